"""The two questions: what clients see of an open load, and of a closed one.

Owns: `open_loop` and `closed_loop`, and the figures made of a sample of first tokens. Does not own: the compiled parts
behind them, which take plain numbers (`work`, `load`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ConfigError
from perfmodel.queueing.load import Load, closed_rate, settle, settle_closed
from perfmodel.queueing.work import Work, alone_s, capacity_per_s, parts, room, step_s, token_s
from perfmodel.serving import SATURATED_TTFT_MS, LengthLaw, Lengths, SchedulingOrder, Served, ServingEngine
from perfmodel.step_time import StepTable

# Points of the tagged arrival's quasi-random sample: the mean of the sum of its terms is then within 1 %.
_POINTS = 320

# vLLM keeps 1 % of its KV blocks free when it admits (its watermark).
_KV_USED_RATIO = 0.99


@dataclass(frozen=True, slots=True)
class _Shown:
    """What `_figures` needs beside the sample of first tokens, of one replica."""

    tpot_s: float
    rate_per_s: float
    utilisation_ratio: float
    batch: float


def open_loop(engine: ServingEngine, lengths: Lengths, rate_per_s: float, burstiness_cv2: float = 1.0) -> Served:
    """What clients see that send `rate_per_s` requests a second over all replicas, without end.

    `burstiness_cv2` is the squared coefficient of variation of their gaps (1: Poisson). Replicas take turns, so each
    sees gaps of `burstiness_cv2 / replicas`. `utilisation_ratio` is the rate over the largest one that is carried; from
    there on the answer is `saturated`, with infinite TTFT and the throughput of a full engine.
    Raises ConfigError for a rate that is not positive and finite.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise ConfigError(f"open loop: rate_per_s is {rate_per_s}; expected a positive number")
    if not (math.isfinite(burstiness_cv2) and burstiness_cv2 >= 0):
        raise ConfigError(f"open loop: burstiness_cv2 is {burstiness_cv2}; expected 0 or more")
    work = _work(engine, lengths)
    rate = float(rate_per_s / engine.replicas)
    capacity = float(capacity_per_s(work))
    if rate >= capacity:
        return _saturated(engine, work, capacity, rate / capacity)
    sample = np.empty(_POINTS)
    settled = settle(work, _load(lengths, rate, burstiness_cv2 / engine.replicas, capacity), sample)
    return _figures(engine, lengths, sample, _Shown(settled.tpot_s, rate, rate / capacity, settled.batch))


def carried_per_s(engine: ServingEngine, lengths: Lengths) -> float:
    """Requests a second that all replicas carry together; from there on `open_loop` says that the queue grows."""
    return engine.replicas * float(capacity_per_s(_work(engine, lengths)))


def closed_loop(engine: ServingEngine, lengths: Lengths, concurrency: int, requests_per_client: int = 10) -> Served:
    """What `concurrency` clients over all replicas see that start together and send again when their answer ended.

    The mean over `requests_per_client` waves: the first is a burst; later ones are a steady state with random arrivals,
    or stay in step when all lengths are equal. Clients beyond the engine's sequences wait for a slot by Little's law.
    Coarser than a replay (`harness.replay`), which has the waves in between: use that where a millisecond is there.
    Raises ConfigError for a load of nothing.
    """
    for name, value in (("concurrency", concurrency), ("requests_per_client", requests_per_client)):
        if value < 1:
            raise ConfigError(f"closed loop: {name} is {value}; expected at least 1")
    work = _work(engine, lengths)
    clients = float(max(1, math.ceil(concurrency / engine.replicas)))
    inside = min(clients, work.most_sequences)
    rate = float(closed_rate(work, inside))
    sample = np.empty(_POINTS)
    settled = settle_closed(work, inside, _load(lengths, rate, 1.0, math.inf), sample)
    group = min(max(1.0, room(work, inside / 2)), inside)
    group_s = step_s(work, inside / 2, group) if parts(work, inside / 2) <= 1.0 else alone_s(work, inside / 2)
    in_step = lengths.law is LengthLaw.FIXED
    if in_step and not work.prefill_first:
        sample[:] = group_s
    first = _POINTS if in_step and work.prefill_first else max(1, _POINTS // requests_per_client)
    groups = math.ceil(inside / group - 1e-9)
    sample[:first] = np.ceil(groups * (np.arange(first) + 0.5) / first) * group_s
    sample += (clients - inside) / rate
    return _figures(engine, lengths, sample, _Shown(settled.tpot_s, rate, 1.0, settled.batch))


def _work(engine: ServingEngine, lengths: Lengths) -> Work:
    """One replica and one mean request as numbers."""
    table: StepTable = engine.step.table(engine.max_batched_tokens)
    cached = lengths.input_tokens * lengths.cached_ratio
    input_cv2, output_cv2 = lengths.cv2
    # Longer answers stay longer: of those present at a moment the mean is E[tokens^2] / E[tokens].
    staying = lengths.output_tokens * (1 + output_cv2)
    reserved = engine.reserve_ratio
    grown = staying * (1 + reserved) / 2
    held = lengths.input_tokens + grown
    fit = _KV_USED_RATIO * engine.kv_capacity_tokens / held
    varies = lengths.input_tokens**2 * input_cv2
    varies += staying**2 * (1 + output_cv2) * (1 + reserved + reserved**2) / 3 - grown**2
    # Floats all: compiled code is made, and loaded, for each set of types.
    return Work(
        np.ascontiguousarray(table.by_token_s, dtype=np.float64),
        float(table.sequence_s),
        float(table.decode_context_s),
        float(table.prefill_pair_s),
        float(table.prefill_context_s),
        float(table.prefill_step_s),
        float(max(1.0, lengths.input_tokens - cached)),
        float(cached),
        float(lengths.output_tokens),
        float(lengths.input_tokens + (staying + 1) / 2),
        float(engine.max_batched_tokens),
        engine.order is SchedulingOrder.PREFILL_FIRST,
        float(max(1, min(engine.max_sequence_count, math.floor(fit)))),
        math.sqrt(3 * min(input_cv2, 1 / 3)),
        float(1 + input_cv2),
        float(engine.launch_s),
        float(varies / held**2 if fit < engine.max_sequence_count else 0.0),
    )


def _load(lengths: Lengths, rate_per_s: float, gap_cv2: float, capacity_per_s: float) -> Load:
    """The load of one replica, floats all."""
    input_cv2, output_cv2 = lengths.cv2
    return Load(rate_per_s, float(gap_cv2), float(input_cv2), float(output_cv2), capacity_per_s)


def _figures(engine: ServingEngine, lengths: Lengths, sample: NDArray[np.float64], shown: _Shown) -> Served:
    """The clients' figures from seconds between visible and first token."""
    front = engine.front_end
    outside_s = front.request_s + front.prompt_token_s * lengths.input_tokens + front.first_token_s
    ttft_ms = np.sort(sample + outside_s) * 1e3
    mean_ms = float(ttft_ms.mean())
    last, tpot_ms = ttft_ms.size - 1, shown.tpot_s * 1e3
    return Served(
        ttft_mean_ms=mean_ms,
        ttft_p50_ms=float(ttft_ms[round(0.5 * last)]),
        ttft_p90_ms=float(ttft_ms[round(0.9 * last)]),
        ttft_p99_ms=float(ttft_ms[round(0.99 * last)]),
        tpot_mean_ms=tpot_ms,
        tpot_p50_ms=tpot_ms,
        tpot_p90_ms=tpot_ms,
        output_tok_per_s=engine.replicas * shown.rate_per_s * lengths.output_tokens,
        request_per_s=engine.replicas * shown.rate_per_s,
        utilisation_ratio=shown.utilisation_ratio,
        batch_mean=shown.batch,
        saturated=mean_ms > SATURATED_TTFT_MS,
    )


def _saturated(engine: ServingEngine, work: Work, rate_per_s: float, utilisation_ratio: float) -> Served:
    """A load beyond capacity: the queue grows without end while the engine runs full."""
    tpot_ms = token_s(work, work.most_sequences, rate_per_s) * 1e3
    return Served(
        ttft_mean_ms=math.inf,
        ttft_p50_ms=math.inf,
        ttft_p90_ms=math.inf,
        ttft_p99_ms=math.inf,
        tpot_mean_ms=tpot_ms,
        tpot_p50_ms=tpot_ms,
        tpot_p90_ms=tpot_ms,
        output_tok_per_s=engine.replicas * rate_per_s * work.answer_tokens,
        request_per_s=engine.replicas * rate_per_s,
        utilisation_ratio=utilisation_ratio,
        batch_mean=work.most_sequences,
        saturated=True,
    )
