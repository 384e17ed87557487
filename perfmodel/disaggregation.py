"""Prompts and answers on different engines (P/D), and attention and FFN on different devices (AFD).

Owns: how many prefill and decode engines a load needs when the two kinds are unlike, what of the KV transfer a client
sees, and the step of a decoder whose FFN half sits on other chips (an LPU with its weights in SRAM, say).
Does not own: step times (`step_time`), queues of whole pools over time (`harness.replay_split` replays them) or money.
Pure functions: the same engines give the same plan, so that a search may call them thousands of times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.architecture import Architecture
from perfmodel.errors import ConfigError
from perfmodel.hardware import Hardware, NumberFormat
from perfmodel.serving import Lengths, ServingEngine
from perfmodel.step_time import BatchShape

# Shares of a pool's rate that survive bursts and unequal prompts: aiconfigurator 0.12 plans with the same two.
PREFILL_YIELD_RATIO = 0.9
DECODE_YIELD_RATIO = 0.92

# Activations between the halves of a layer: FP8 on the way out, BF16 back (DeepSeek's dispatch and combine).
_OUT_BYTES, _BACK_BYTES = 1.0, 2.0

# Achieved shares of peak bandwidth and compute: 0.75 is what 2025 engines reach on large GPUs; SRAM needs no refresh or
# row activation, so it is taken as reached, and a published reachable share (Bertha: 0.9) goes before both.
_READ_RATIO, _SRAM_READ_RATIO, _COMPUTE_RATIO = 0.75, 1.0, 0.5

# Attention with its KV outgrows this many sequences on no device that is sold; it ends the search for a batch.
_MOST_SEQUENCES = 1 << 20


def exposed_transfer_s(kv_bytes: float, link_bytes_per_s: float, prefill_s: float, layer_count: int) -> float:
    """Seconds of a KV transfer that prefill does not hide when each layer is sent as it is done.

    max(KV / bw - t_prefill (L - 1) / L, KV / (L bw)): the layers before the last run beside the computation, the last
    layer's KV never does. Raises ConfigError for a link or layer count that is not positive.
    """
    if not (link_bytes_per_s > 0 and layer_count >= 1):
        raise ConfigError(
            f"transfer: link_bytes_per_s is {link_bytes_per_s}, layer_count {layer_count}; expected positive numbers"
        )
    whole_s = kv_bytes / link_bytes_per_s
    return max(whole_s - prefill_s * (layer_count - 1) / layer_count, whole_s / layer_count)


@dataclass(frozen=True, slots=True)
class SplitEngine:
    """A prefill pool (`prefill.replicas` equal workers) and a decode pool that serve one model together.

    A prompt's KV takes `kv_bytes_per_token` over a link of `link_bytes_per_s` per worker, sent layer by layer;
    `handover_s` passes besides for the hand-over's messages. `prefill_rank_count`: attention ranks of a prefill worker
    that compute whole prompts side by side (attention data parallelism). No link speed: the KV moves in no time.
    """

    prefill: ServingEngine
    decode: ServingEngine
    kv_bytes_per_token: float = 0.0
    link_bytes_per_s: float = math.inf
    layer_count: int = 1
    handover_s: float = 0.0
    prefill_rank_count: int = 1

    def __post_init__(self) -> None:
        if not self.link_bytes_per_s > 0:
            raise ConfigError(f"split engine: link_bytes_per_s is {self.link_bytes_per_s}; expected above 0")
        for name in ("kv_bytes_per_token", "handover_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"split engine: {name} is {getattr(self, name)}; expected 0 or more")
        for name in ("layer_count", "prefill_rank_count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"split engine: {name} is {getattr(self, name)}; expected at least 1")

    def handover_token_s(self, input_tokens: float) -> float:
        """Seconds per prompt token of the transfer that a prompt of this length leaves exposed."""
        if self.kv_bytes_per_token == 0 or math.isinf(self.link_bytes_per_s):
            return 0.0
        alone_s = prompt_batch_s(self.prefill, input_tokens, 0.0, 1)
        kv_bytes = self.kv_bytes_per_token * input_tokens
        return exposed_transfer_s(kv_bytes, self.link_bytes_per_s, alone_s, self.layer_count) / input_tokens


def prompt_batch_s(engine: ServingEngine, input_tokens: float, cached_ratio: float, prompt_count: int) -> float:
    """Seconds in which one engine computes `prompt_count` such prompts, in as many steps as its budget demands."""
    cached = round(input_tokens * cached_ratio)
    new = max(1, round(input_tokens) - cached)
    steps = max(1, math.ceil(new * prompt_count / engine.max_batched_tokens))
    part = new * prompt_count / steps
    total_s = 0.0
    for step in range(steps):
        context = cached * prompt_count + (round(step * part) if prompt_count == 1 else 0)
        pairs = round(part * context / prompt_count + part * (part / prompt_count + 1) / 2)
        total_s += engine.step.step_s(BatchShape(prompt_count, round(part), context, pairs))
    return total_s


@dataclass(frozen=True, slots=True)
class PoolRate:
    """What one engine of a pool carries: requests per second, and the seconds that decide it.

    `batch` sequences at `time_s` a step (decode), or `batch` prompts in `time_s` (prefill).
    """

    request_per_s: float
    batch: int
    time_s: float


def prefill_rate(engine: ServingEngine, lengths: Lengths) -> PoolRate:
    """Prompts per second of one prefill engine that always has a full budget of them."""
    new = max(1.0, lengths.input_tokens * (1 - lengths.cached_ratio))
    count = max(1, min(engine.max_sequence_count, int(engine.max_batched_tokens // new)))
    spent_s = prompt_batch_s(engine, lengths.input_tokens, lengths.cached_ratio, count)
    return PoolRate(count / spent_s, count, spent_s)


def decode_rate(engine: ServingEngine, lengths: Lengths, tpot_limit_s: float) -> PoolRate | None:
    """The largest rate of one decode engine within the TPOT limit; None when one sequence alone is slower.

    The batch is bounded by the engine's sequences, its KV (a request holds its prompt and half of its answer in the
    mean) and the limit; step times grow with the batch, so the largest one is found by bisection.
    """
    context = lengths.input_tokens + (lengths.output_tokens + 1) / 2
    held = lengths.input_tokens + lengths.output_tokens * (1 + engine.reserve_ratio) / 2
    most = max(1, int(min(engine.max_sequence_count, engine.kv_capacity_tokens / held, _MOST_SEQUENCES)))

    def step_s(batch: int) -> float:
        return engine.step.step_s(BatchShape(decode_count=batch, decode_context_tokens=round(batch * context)))

    if step_s(1) > tpot_limit_s:
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= tpot_limit_s:
            low = middle
        else:
            high = middle - 1
    spent_s = step_s(low)
    return PoolRate(low / (max(1.0, lengths.output_tokens - 1) * spent_s), low, spent_s)


class SplitBound(StrEnum):
    """The pool that a larger load would fill first."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RateMatch:
    """Engines of either pool for a load, the rate that they carry together, and which pool binds."""

    prefill_count: int
    decode_count: int
    request_per_s: float
    bound: SplitBound


def match_rates(rate_per_s: float, prefill: PoolRate, decode: PoolRate) -> RateMatch:
    """The fewest engines of either kind that carry `rate_per_s`, with the usual losses on both sides.

    Unlike devices need nothing more: each side has its own rate, and neither waits for the other's count.
    Raises ConfigError for a rate that is not positive and finite.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise ConfigError(f"rate matching: rate_per_s is {rate_per_s}; expected a positive number")
    one_prefill = prefill.request_per_s * PREFILL_YIELD_RATIO
    one_decode = decode.request_per_s * DECODE_YIELD_RATIO
    # A count that fits exactly must not grow by rounding noise.
    prefill_count = max(1, math.ceil(rate_per_s / one_prefill - 1e-9))
    decode_count = max(1, math.ceil(rate_per_s / one_decode - 1e-9))
    carried = (prefill_count * one_prefill, decode_count * one_decode)
    bound = SplitBound.PREFILL if carried[0] <= carried[1] else SplitBound.DECODE
    return RateMatch(prefill_count, decode_count, min(carried), bound)


@dataclass(frozen=True, slots=True)
class SplitTtft:
    """Seconds of a split engine's TTFT by part. `queue_s` is infinite when the prefill pool cannot carry the rate."""

    outside_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_step_s: float

    @property
    def total_s(self) -> float:
        """TTFT = front end + queue + prefill + exposed transfer + first decode step."""
        return self.outside_s + self.queue_s + self.prefill_s + self.transfer_s + self.decode_step_s


def split_ttft(engine: SplitEngine, lengths: Lengths, rate_per_s: float, decode_batch: int) -> SplitTtft:
    """Mean TTFT at `rate_per_s` Poisson requests a second while each decode engine runs `decode_batch` sequences.

    The queue is Sakasegawa's M/G/k: W = (1 + Cs2) / 2 * rho^(sqrt(2 (k + 1)) - 1) / (k (1 - rho)) * S over the workers.
    """
    prefill = engine.prefill
    alone_s = prompt_batch_s(prefill, lengths.input_tokens, lengths.cached_ratio, 1)
    full = prefill_rate(prefill, lengths)
    workers = prefill.replicas
    load = rate_per_s / (workers * full.request_per_s)
    queue_s = math.inf
    if load < 1:
        shape = load ** (math.sqrt(2 * (workers + 1)) - 1) / (workers * (1 - load))
        queue_s = (1 + lengths.cv2[0]) / 2 * shape * alone_s
    context = round(decode_batch * (lengths.input_tokens + (lengths.output_tokens + 1) / 2))
    decode_s = engine.decode.step.step_s(BatchShape(decode_count=decode_batch, decode_context_tokens=context))
    front = prefill.front_end
    return SplitTtft(
        outside_s=front.request_s + front.first_token_s + front.prompt_token_s * lengths.input_tokens,
        queue_s=queue_s,
        prefill_s=alone_s,
        transfer_s=engine.handover_s + engine.handover_token_s(lengths.input_tokens) * lengths.input_tokens,
        decode_step_s=decode_s,
    )


# Attention and FFN apart


class AfdBound(StrEnum):
    """What a layer of a decoder with its halves apart waits for."""

    ATTENTION = "attention"
    FFN = "ffn"
    # Too few micro-batches to hide the way there and back.
    LINK = "link"
    # The link's own throughput.
    LINK_BANDWIDTH = "link_bandwidth"


@dataclass(frozen=True, slots=True)
class AfdEngine:
    """A decoder whose attention (with the KV cache) and FFN (with the experts) run on different devices.

    `link_bytes_per_s` is what all activations share one way; `link_latency_s` is paid per crossing. `micro_batch_count`
    micro-batches play ping-pong over the two halves. `layer_overhead_s` is paid by each half per layer and micro-batch.
    """

    architecture: Architecture
    attention_hardware: Hardware
    attention_device_count: int
    ffn_hardware: Hardware
    ffn_device_count: int
    link_bytes_per_s: float
    weight_format: NumberFormat = NumberFormat.FP8
    kv_format: NumberFormat = NumberFormat.FP8
    link_latency_s: float = 10e-6
    layer_overhead_s: float = 10e-6
    micro_batch_count: int = 3

    def __post_init__(self) -> None:
        for name in ("attention_device_count", "ffn_device_count", "micro_batch_count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"AFD engine: {name} is {getattr(self, name)}; expected at least 1")
        if not self.link_bytes_per_s > 0:
            raise ConfigError(f"AFD engine: link_bytes_per_s is {self.link_bytes_per_s}; expected above 0")
        held, room = self.ffn_bytes, self.ffn_device_count * self.ffn_hardware.memory_bytes
        if held > room:
            raise ConfigError(
                f"AFD engine: the FFN of {self.architecture.name} is {held / 1e9:.1f} GB, {self.ffn_device_count} x "
                f"{self.ffn_hardware.name} hold {room / 1e9:.1f} GB; expected at least "
                f"{ffn_devices_by_memory(self.architecture, self.weight_format, self.ffn_hardware)} devices"
            )

    @property
    def ffn_bytes(self) -> float:
        """Bytes of all FFN weights, routed and shared experts included."""
        return ffn_parameter_count(self.architecture) * self.weight_format.element_bytes


def ffn_parameter_count(architecture: Architecture) -> int:
    """Parameters of the layers that are no attention."""
    every = architecture.linear_parameter_count - architecture.attention_parameter_count
    return every + architecture.routed_parameter_count


def ffn_devices_by_memory(architecture: Architecture, weight_format: NumberFormat, hardware: Hardware) -> int:
    """Devices whose memory holds all FFN weights: weights / 0.23 GB for a Groq LPU, / 0.5 GB for an LP30."""
    return math.ceil(ffn_parameter_count(architecture) * weight_format.element_bytes / hardware.memory_bytes)


@dataclass(frozen=True, slots=True)
class AfdStep:
    """One decode step with the halves apart. Times per layer and micro-batch; `step_s` makes a token per sequence.

    `micro_batches_to_hide`: the fewest with which the slower half never idles, (T_a + T_f + 2 T_c) / max(T_a, T_f)
    rounded up; that is 2 (1 + T_c / T_f) for equal halves (MegaScale-Infer). `compute_known`: both devices have a
    compute figure; without one, that half's time is its reads alone, a lower bound.
    """

    attention_s: float
    ffn_s: float
    transfer_s: float
    step_s: float
    bound: AfdBound
    micro_batches_to_hide: int
    compute_known: bool


def afd_step(engine: AfdEngine, sequence_count: int, context_tokens: int) -> AfdStep:
    """Seconds of a step of `sequence_count` sequences of `context_tokens` each, and what binds.

    With m micro-batches a layer takes m * max(T_a, T_f, T_link, (T_a + T_f + 2 T_c) / m): either half is busy all the
    time, or the link is, or the m micro-batches do not fill the round trip. Raises ConfigError for an empty step.
    """
    if sequence_count < 1 or context_tokens < 1:
        raise ConfigError(
            f"AFD step: sequence_count is {sequence_count}, context_tokens {context_tokens}; expected at least 1"
        )
    micro = engine.micro_batch_count
    batch = sequence_count / micro
    attention_s, attention_known = _attention_s(engine, batch, context_tokens)
    ffn_s, ffn_known = _ffn_s(engine, batch)
    hidden = engine.architecture.hidden_size
    out_s = batch * hidden * _OUT_BYTES / engine.link_bytes_per_s
    back_s = batch * hidden * _BACK_BYTES / engine.link_bytes_per_s
    # The mean of the two crossings; the directions are full duplex, so each is busy for its own bytes only.
    transfer_s = (out_s + back_s) / 2 + engine.link_latency_s
    round_s = (attention_s + ffn_s + 2 * transfer_s) / micro
    terms = (
        (attention_s, AfdBound.ATTENTION),
        (ffn_s, AfdBound.FFN),
        (max(out_s, back_s), AfdBound.LINK_BANDWIDTH),
        (round_s, AfdBound.LINK),
    )
    slowest_s, bound = max(terms, key=lambda term: term[0])
    if bound is AfdBound.LINK and 2 * transfer_s < max(attention_s, ffn_s) and micro == 1:
        # One micro-batch: the halves take turns, and the larger one is what a layer waits for.
        bound = AfdBound.ATTENTION if attention_s >= ffn_s else AfdBound.FFN
    return AfdStep(
        attention_s=attention_s,
        ffn_s=ffn_s,
        transfer_s=transfer_s,
        step_s=engine.architecture.layer_count * micro * slowest_s,
        bound=bound,
        micro_batches_to_hide=math.ceil((attention_s + ffn_s + 2 * transfer_s) / max(attention_s, ffn_s) - 1e-9),
        compute_known=attention_known and ffn_known,
    )


def _reach_bytes_per_s(hardware: Hardware, count: int) -> float:
    """Bytes per second that `count` devices achieve."""
    usual = _SRAM_READ_RATIO if hardware.sram else _READ_RATIO
    return count * hardware.memory_bytes_per_s * (hardware.memory_reach_ratio or usual)


def _compute_s(flop: float, hardware: Hardware, count: int, weights: NumberFormat) -> tuple[float, bool]:
    """Seconds of these FLOPs on `count` devices, and whether their peak is known (else 0)."""
    peak = hardware.flop_per_s(weights)
    if peak is None:
        return 0.0, False
    return flop / (count * peak * _COMPUTE_RATIO), True


def _attention_s(engine: AfdEngine, batch: float, context_tokens: int) -> tuple[float, bool]:
    """One layer's attention for a micro-batch: its matrices and the sequences' KV are read, and computed with."""
    architecture, layers = engine.architecture, engine.architecture.layer_count
    weights = architecture.attention_parameter_count * engine.weight_format.element_bytes / layers
    kv = batch * architecture.decode_read_elements(context_tokens) * engine.kv_format.element_bytes / layers
    state = batch * architecture.linear_state_bytes / layers
    flop = batch * (2.0 * architecture.attention_parameter_count + architecture.decode_attention_flop(context_tokens))
    compute_s, known = _compute_s(
        flop / layers, engine.attention_hardware, engine.attention_device_count, NumberFormat.BF16
    )
    read_s = (weights + kv + state) / _reach_bytes_per_s(engine.attention_hardware, engine.attention_device_count)
    return read_s + compute_s + engine.layer_overhead_s, known


def _ffn_s(engine: AfdEngine, batch: float) -> tuple[float, bool]:
    """One layer's FFN for a micro-batch, averaged over dense and expert layers: the experts it hits are read."""
    architecture, layers = engine.architecture, engine.architecture.layer_count
    every = architecture.linear_parameter_count - architecture.attention_parameter_count
    one_expert = architecture.moe_layer_count * architecture.expert_parameter_count
    read = every + architecture.experts_hit(batch) * one_expert
    flop = batch * 2.0 * (every + architecture.experts_active * one_expert)
    compute_s, known = _compute_s(flop / layers, engine.ffn_hardware, engine.ffn_device_count, engine.weight_format)
    read_s = read * engine.weight_format.element_bytes / layers
    read_s /= _reach_bytes_per_s(engine.ffn_hardware, engine.ffn_device_count)
    return read_s + compute_s + engine.layer_overhead_s, known
