"""How long one engine step takes: a roofline with named, sourced efficiencies, summed over its terms.

Owns: the shape of a batch, seconds per term, which term binds, and the few speeds a router needs to know of an engine.
Does not own: what is in a batch (`scheduler`), what fits (`memory`), or device facts (`hardware`).
Terms are added, not maximised: near the ridge engines overlap them badly, and over the measured points of unseen
(model, GPU) pairs a sum had 15.6 % median TPOT error where the maximum of the terms had 16.4 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from perfmodel import memory
from perfmodel.coefficients import Coefficients, Group
from perfmodel.groups import EngineEra, model_family
from perfmodel.memory import EngineShape
from perfmodel.step_terms import INDEX, StepBasis, Term, Work, format_class

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


@dataclass(frozen=True, slots=True)
class StepTable:
    """The step time of one engine as a look-up and four products, for a loop that cannot afford calls.

    `by_token_s` (float64, `max_batched_tokens + 1` entries) holds all that depends only on the tokens computed in the
    step: weights with the experts that they hit, matrix products, collectives and fixed overheads. The rest is seconds
    per sequence, per token of decode context, per prefill attention pair and per token of prefill context, and once in
    a step that holds any prompt.
    """

    by_token_s: NDArray[np.float64]
    sequence_s: float
    decode_context_s: float
    prefill_pair_s: float
    prefill_context_s: float
    prefill_step_s: float = 0.0

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step. Raises IndexError beyond the table's `max_batched_tokens`."""
        return (
            float(self.by_token_s[batch.token_count])
            + self.sequence_s * batch.sequence_count
            + self.decode_context_s * batch.decode_context_tokens
            + self.prefill_pair_s * batch.prefill_attention_pairs
            + self.prefill_context_s * batch.prefill_context_tokens
            + (self.prefill_step_s if batch.prefill_tokens else 0.0)
        )


class StepModel:
    """Calibrated step times of one engine: the basis of its shape times the coefficients of its group.

    `engine` and `era` ("2025b", None: the engine's own correction only) choose the corrections; engines that
    calibration has not seen get none. A step is never faster than its bytes over the peak bandwidth or its FLOPs over
    the peak. Raises ConfigError for a device without compute figures.
    """

    def __init__(
        self,
        shape: EngineShape,
        coefficients: Coefficients,
        engine: str = "vllm",
        era: str | None = None,
        *,
        spans_nodes: bool = False,
    ) -> None:
        self.shape = shape
        group = Group(
            EngineEra(engine, era or ""),
            shape.hardware.generation,
            model_family(shape.architecture.name),
            format_class(shape.hardware, shape.weight_format),
        )
        self.multipliers = coefficients.resolve(group)
        self._basis = StepBasis(shape, spans_nodes=spans_nodes)

    def step(self, batch: BatchShape) -> StepTime:
        """Seconds of one step by term."""
        work = _work(batch)
        parts = self._basis.of(work) * self.multipliers
        named = {bound: float(sum(parts[INDEX[term]] for term in terms)) for bound, terms in _BOUND_TERMS.items()}
        short_s = self._basis.floor_s(work) - sum(named.values())
        if short_s > 0:
            named[Bound.WEIGHTS] += short_s
        return StepTime(
            compute_s=named[Bound.COMPUTE],
            weights_s=named[Bound.WEIGHTS],
            kv_cache_s=named[Bound.KV_CACHE],
            collectives_s=named[Bound.COLLECTIVES],
            overhead_s=named[Bound.OVERHEAD],
        )

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step (the scheduler's `StepTiming`)."""
        return self.step(batch).total_s

    def floor_s(self, batch: BatchShape) -> float:
        """Seconds that physics does not let this step beat."""
        return self._basis.floor_s(_work(batch))

    def table(self, max_batched_tokens: int) -> StepTable:
        """The same as a table. Exact for full attention; windows and sparse attention are linear at 4,096 tokens of
        context, and the floor of physics is applied to what depends on the tokens only.
        """
        tokens = np.arange(max_batched_tokens + 1, dtype=np.float64)
        by_token_s = self._basis.by_tokens(tokens) @ self.multipliers
        one = self._basis.of(Work())
        context = Work(decode_count=1.0, decode_context_tokens=_TABLE_CONTEXT_TOKENS)
        decode = (self._basis.of(context) - one) @ self.multipliers
        sequence_s = float((self._basis.of(Work(prefill_count=1.0)) - one) @ self.multipliers)
        pairs = Work(prefill_tokens=1.0, prefill_pairs=_TABLE_CONTEXT_TOKENS)
        held = replace(pairs, prefill_context_tokens=1.0)
        prefill = self._basis.of(pairs) * self.multipliers
        return StepTable(
            by_token_s=np.maximum(by_token_s, self._basis.token_floor_s(tokens)),
            sequence_s=sequence_s,
            decode_context_s=float((decode - sequence_s) / _TABLE_CONTEXT_TOKENS),
            prefill_pair_s=float(prefill[INDEX[Term.PREFILL_ATTENTION]] / _TABLE_CONTEXT_TOKENS),
            prefill_context_s=float((self._basis.of(held) - self._basis.of(pairs)) @ self.multipliers),
            prefill_step_s=float(prefill[INDEX[Term.PREFILL_LAYER]] + prefill[INDEX[Term.PREFILL_MOE_LAYER]]),
        )


# Context at which layers that forget are made linear in `StepModel.table`: a common one in chat and code.
_TABLE_CONTEXT_TOKENS = 4096

# The terms behind each bound.
_BOUND_TERMS = {
    Bound.COMPUTE: (
        Term.COMPUTE_BF16,
        Term.COMPUTE_FP8,
        Term.COMPUTE_FP4,
        Term.COMPUTE_EXPERTS,
        Term.PREFILL_ATTENTION,
    ),
    Bound.WEIGHTS: (Term.WEIGHT_READ, Term.EXPERT_READ),
    Bound.KV_CACHE: (Term.KV_READ,),
    Bound.COLLECTIVES: (
        Term.ALLREDUCE_VOLUME,
        Term.ALLREDUCE_LATENCY,
        Term.EXCHANGE_VOLUME,
        Term.EXCHANGE_LATENCY,
    ),
    Bound.OVERHEAD: (
        Term.LAYER,
        Term.MOE_LAYER,
        Term.LINEAR_LAYER,
        Term.STEP,
        Term.SEQUENCE,
        Term.PREFILL_LAYER,
        Term.PREFILL_MOE_LAYER,
    ),
}


def bound_of(basis: NDArray[np.float64], multipliers: NDArray[np.float64]) -> Bound:
    """The largest of a basis' terms under these multipliers, as the closed vocabulary says it."""
    parts = basis * multipliers
    sums = {bound: float(sum(parts[INDEX[term]] for term in terms)) for bound, terms in _BOUND_TERMS.items()}
    return max(sums, key=lambda bound: sums[bound])


def _work(batch: BatchShape) -> Work:
    """A batch as real numbers."""
    return Work(
        decode_count=float(batch.decode_count),
        decode_context_tokens=batch.decode_context_tokens / max(batch.decode_count, 1),
        prefill_count=float(batch.prefill_count),
        prefill_tokens=float(batch.prefill_tokens),
        prefill_pairs=float(batch.prefill_attention_pairs),
        prefill_context_tokens=float(batch.prefill_context_tokens),
    )


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


def engine_speed(model: StepModel) -> EngineSpeedFacts:
    """The four figures of one engine. Raises ConfigError when the model does not fit."""
    full_s = model.step_s(prefill_batch(_PREFILL_PROBE_TOKENS))
    fixed_s = model.step_s(prefill_batch(1))
    return EngineSpeedFacts(
        prefill_tok_per_s=(_PREFILL_PROBE_TOKENS - 1) / (full_s - fixed_s),
        prefill_overhead_s=fixed_s,
        decode_s_per_token=model.step_s(decode_batch(_DECODE_PROBE_COUNT, _DECODE_PROBE_CONTEXT_TOKENS)),
        kv_capacity_tokens=memory.kv_capacity_tokens(model.shape),
    )
