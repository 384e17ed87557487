"""How long one engine step takes: a roofline with named, sourced efficiencies, summed over its terms.

Owns: the shape of a batch, seconds per term, which term binds, and the few speeds a router needs to know of an engine.
Does not own: what is in a batch (`scheduler`), what fits (`memory`), or device facts (`hardware`).
Terms are added, not maximised: near the ridge engines overlap them badly, and over the measured points of unseen
(model, GPU) pairs a sum had 15.6 % median TPOT error where the maximum of the terms had 16.4 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perfmodel import memory
from perfmodel.errors import ConfigError
from perfmodel.hardware import NumberFormat
from perfmodel.memory import EngineShape

# Prompt length at which `engine_speed` reads the prefill rate: long enough that fixed costs vanish, short enough that
# attention is still a small part; also vLLM's max_num_batched_tokens for online serving on an H100.
_PREFILL_PROBE_TOKENS = 8192

# Batch and context at which `engine_speed` reads the decode rate: a lightly loaded interactive engine.
_DECODE_PROBE_COUNT = 8
_DECODE_PROBE_CONTEXT_TOKENS = 2048


class Bound(StrEnum):
    """The largest term of a step."""

    COMPUTE = "compute"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    COLLECTIVES = "collectives"
    OVERHEAD = "overhead"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One step's work. A prefill chunk of n tokens on a context of c computed ones has n*c + n*(n+1)/2 attention pairs.

    `decode_context_tokens` is the sum over the decoding sequences of the tokens they attend to, the new one included.
    """

    prefill_count: int = 0
    prefill_tokens: int = 0
    prefill_context_tokens: int = 0
    prefill_attention_pairs: int = 0
    decode_count: int = 0
    decode_context_tokens: int = 0

    @property
    def token_count(self) -> int:
        """Tokens computed in the step."""
        return self.prefill_tokens + self.decode_count

    @property
    def sequence_count(self) -> int:
        """Sequences in the step."""
        return self.prefill_count + self.decode_count


def prefill_batch(new_tokens: int, context_tokens: int = 0) -> BatchShape:
    """The step that computes `new_tokens` of one prompt on top of `context_tokens` cached ones."""
    pairs = new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2
    return BatchShape(1, new_tokens, context_tokens, pairs)


def decode_batch(sequence_count: int, context_tokens: int) -> BatchShape:
    """The step that makes one token for each of `sequence_count` sequences of `context_tokens` tokens."""
    return BatchShape(decode_count=sequence_count, decode_context_tokens=sequence_count * context_tokens)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of the peaks an engine reaches, and what it adds. Values and their source: `data/efficiency.yaml`.

    Ratios divide the peak (0.75: three quarters of it); `layer_overhead_s` is paid per layer and step,
    `step_overhead_s` and `sequence_overhead_s` once a step and once per sequence in it, `collective_latency_s` per
    all-reduce.
    """

    compute_ratio: float
    weight_read_ratio: float
    kv_read_ratio: float
    link_ratio: float
    layer_overhead_s: float
    step_overhead_s: float
    sequence_overhead_s: float
    collective_latency_s: float

    def __post_init__(self) -> None:
        for name in ("compute_ratio", "weight_read_ratio", "kv_read_ratio", "link_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency: {name} is {getattr(self, name)}; expected above 0 and at most 1")
        for name in ("layer_overhead_s", "step_overhead_s", "sequence_overhead_s", "collective_latency_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"efficiency: {name} is {getattr(self, name)}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step by term."""

    compute_s: float
    weights_s: float
    kv_cache_s: float
    collectives_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.weights_s + self.kv_cache_s + self.collectives_s + self.overhead_s

    @property
    def bound(self) -> Bound:
        """The term that takes longest."""
        terms = (
            (self.compute_s, Bound.COMPUTE),
            (self.weights_s, Bound.WEIGHTS),
            (self.kv_cache_s, Bound.KV_CACHE),
            (self.collectives_s, Bound.COLLECTIVES),
            (self.overhead_s, Bound.OVERHEAD),
        )
        return max(terms, key=lambda term: term[0])[1]


class RooflineTiming:
    """Step times of one engine. All that does not depend on the batch is worked out once; `step_s` is a few
    products.
    """

    def __init__(self, shape: EngineShape, efficiency: Efficiency) -> None:
        architecture, hardware, devices = shape.architecture, shape.hardware, shape.tensor_parallel_count
        achieved_flop_per_s = devices * efficiency.compute_ratio * hardware.flop_per_s(shape.weight_format)
        # Attention and the output head run in BF16 whatever the weights are.
        achieved_bf16_flop_per_s = devices * efficiency.compute_ratio * hardware.flop_per_s(NumberFormat.BF16)
        bandwidth_bytes_per_s = devices * hardware.memory_bytes_per_s
        read_bytes = memory.layer_weight_bytes(shape) + memory.head_weight_bytes(shape)
        self.shape = shape
        self._token_compute_s = 2 * architecture.linear_parameter_count / achieved_flop_per_s
        self._head_compute_s = 2 * architecture.embedding_parameter_count / achieved_bf16_flop_per_s
        self._pair_compute_s = architecture.attention_flop_per_pair / achieved_bf16_flop_per_s
        self._weights_s = read_bytes / (bandwidth_bytes_per_s * efficiency.weight_read_ratio)
        self._kv_token_s = memory.kv_bytes_per_token(shape) / (bandwidth_bytes_per_s * efficiency.kv_read_ratio)
        self._overhead_s = efficiency.step_overhead_s + architecture.layer_count * efficiency.layer_overhead_s
        self._sequence_s = efficiency.sequence_overhead_s
        self._collective_s = 0.0
        self._collective_token_s = 0.0
        if devices > 1:
            # Two all-reduces a layer, each moving 2 (n - 1) / n of the activations over every device's link.
            reduces = 2 * architecture.layer_count
            volume_bytes = 2 * (devices - 1) / devices * architecture.hidden_size * NumberFormat.BF16.element_bytes
            link_bytes_per_s = hardware.scaleup_bytes_per_s * efficiency.link_ratio
            self._collective_s = reduces * efficiency.collective_latency_s
            self._collective_token_s = reduces * volume_bytes / link_bytes_per_s

    def step_time(self, batch: BatchShape) -> StepTime:
        """Seconds of one step by term."""
        pairs = batch.prefill_attention_pairs + batch.decode_context_tokens
        # Logits are made for one token a sequence.
        compute_s = (
            batch.token_count * self._token_compute_s
            + batch.sequence_count * self._head_compute_s
            + pairs * self._pair_compute_s
        )
        return StepTime(
            compute_s=compute_s,
            weights_s=self._weights_s,
            kv_cache_s=(batch.prefill_context_tokens + batch.decode_context_tokens) * self._kv_token_s,
            collectives_s=self._collective_s + batch.token_count * self._collective_token_s,
            overhead_s=self._overhead_s + batch.sequence_count * self._sequence_s,
        )

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step (the scheduler's `StepTiming`)."""
        return self.step_time(batch).total_s


@dataclass(frozen=True, slots=True)
class EngineSpeedFacts:
    """What a router needs to know of an engine before it has measured one.

    Prefill of n uncached tokens takes about `prefill_overhead_s + n / prefill_tok_per_s`; a lightly loaded engine makes
    one token per `decode_s_per_token` and sequence.
    """

    prefill_tok_per_s: float
    prefill_overhead_s: float
    decode_s_per_token: float
    kv_capacity_tokens: int


def engine_speed(shape: EngineShape, efficiency: Efficiency) -> EngineSpeedFacts:
    """The four figures of one engine. Raises ConfigError when the model does not fit."""
    timing = RooflineTiming(shape, efficiency)
    full_s = timing.step_s(prefill_batch(_PREFILL_PROBE_TOKENS))
    fixed_s = timing.step_s(prefill_batch(1))
    return EngineSpeedFacts(
        prefill_tok_per_s=(_PREFILL_PROBE_TOKENS - 1) / (full_s - fixed_s),
        prefill_overhead_s=fixed_s,
        decode_s_per_token=timing.step_s(decode_batch(_DECODE_PROBE_COUNT, _DECODE_PROBE_CONTEXT_TOKENS)),
        kv_capacity_tokens=memory.kv_capacity_tokens(shape),
    )
