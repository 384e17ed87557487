"""The replay of a benchmark's harness: what its clients do, request by request, against one engine's step times.

Owns: the scenario of a benchmark (closed loop of c clients that start together, open loop, everything at once, static
batch), the drawing of its requests, and the statistics that such a harness prints. Does not own: the engine's loop
(`replay_loop`, compiled), step times (`step_time`) or which scenario a measured row was (`estimate`).
Why a replay: within one concurrency curve TTFT grows as c^0.4..0.6 nearly independent of utilisation. That is the burst
at the start and the waves that keep step after it, not a queue in steady state; a replay has both by construction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from perfmodel import replay_loop
from perfmodel.disaggregation import SplitEngine
from perfmodel.errors import ConfigError
from perfmodel.serving import SATURATED_TTFT_MS, Lengths, SchedulingOrder, Served, ServingEngine
from perfmodel.step_time import StepTable

# InferenceX and vLLM's `benchmark_serving` under it send ten prompts per client.
REQUESTS_PER_CLIENT = 10

# A replay's cost is about two events a request; beyond this many the waves have long settled.
MAX_REQUESTS = 65_536

# vLLM's `benchmark_serving` sends 1,000 prompts in an open loop unless told otherwise.
OPEN_LOOP_REQUESTS = 1_000

_ORDERS = {
    SchedulingOrder.DECODE_FIRST: replay_loop.DECODE_FIRST,
    SchedulingOrder.WHOLE_PROMPTS: replay_loop.WHOLE_PROMPTS,
    SchedulingOrder.PREFILL_FIRST: replay_loop.PREFILL_FIRST,
}


class ArrivalLaw(StrEnum):
    """When the clients send."""

    # `concurrency` clients start together; each sends its next request when its last one ended.
    CLOSED_LOOP = "closed_loop"
    # Gamma-distributed gaps of mean 1 / rate (Poisson at burstiness_cv2 1); a rate of infinity sends all at once.
    OPEN_LOOP = "open_loop"


@dataclass(frozen=True, slots=True)
class HarnessScenario:
    """What a benchmark's clients do.

    `concurrency` (closed loop) or `rate_per_s` and `burstiness_cv2` (open loop); `request_count` None: ten per client,
    or 1,000 in an open loop. `rate_per_s` and `concurrency` are of all replicas together; `request_count` too.
    Raises ConfigError for a load of nothing.
    """

    lengths: Lengths
    arrival: ArrivalLaw = ArrivalLaw.CLOSED_LOOP
    concurrency: int = 1
    rate_per_s: float = math.inf
    burstiness_cv2: float = 1.0
    request_count: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"scenario: concurrency is {self.concurrency}; expected at least 1")
        if not self.rate_per_s > 0:
            raise ConfigError(f"scenario: rate_per_s is {self.rate_per_s}; expected above 0")
        if not (math.isfinite(self.burstiness_cv2) and self.burstiness_cv2 >= 0):
            raise ConfigError(f"scenario: burstiness_cv2 is {self.burstiness_cv2}; expected 0 or more")
        if self.request_count is not None and self.request_count < 1:
            raise ConfigError(f"scenario: request_count is {self.request_count}; expected at least 1")

    def requests_of_one(self, replicas: int) -> int:
        """Requests that one of `replicas` engines serves in the run."""
        if self.request_count is not None:
            count = self.request_count
        elif self.arrival is ArrivalLaw.CLOSED_LOOP:
            count = self.concurrency * REQUESTS_PER_CLIENT
        else:
            count = OPEN_LOOP_REQUESTS
        return max(1, min(MAX_REQUESTS, math.ceil(count / replicas)))


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Per request of one engine, in order of sending (float64 seconds; int64 tokens), and the engine's totals."""

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    sent_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    busy_s: float
    sequence_s: float
    preempted_count: int

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        """Seconds per output token after the first, of the requests that have more than one."""
        many = self.output_tokens > 1
        decode_s = self.end_s[many] - self.sent_s[many] - self.ttft_s[many]
        return decode_s / (self.output_tokens[many] - 1)

    @property
    def wall_s(self) -> float:
        """From the first request sent to the last answer's end."""
        return float(self.end_s.max() - self.sent_s.min())


def replay(engine: ServingEngine, scenario: HarnessScenario, seed: int) -> Served:
    """What the harness would print about `engine`. The same arguments give the same figures on every machine."""
    return served(replay_requests(engine, scenario, seed), engine.replicas)


def replay_requests(engine: ServingEngine, scenario: HarnessScenario, seed: int) -> Replayed:
    """The run of one of the engine's replicas, request by request."""
    generator = np.random.default_rng(seed)
    count = scenario.requests_of_one(engine.replicas)
    prompts, answers = scenario.lengths.draw(count, generator)
    if scenario.arrival is ArrivalLaw.CLOSED_LOOP:
        clients = max(1, math.ceil(scenario.concurrency / engine.replicas))
        sent_s = np.full(count, -1.0)
    else:
        clients = 0
        sent_s = _arrivals(scenario, scenario.rate_per_s / engine.replicas, count, generator)
    cached = _cached(prompts, scenario.lengths)
    requests = replay_loop.Requests(
        prompts, answers, cached, np.zeros_like(cached), sent_s, np.zeros(count), np.zeros(count), np.zeros(count)
    )
    state = _empty_state(count)
    most = min(engine.max_batched_tokens, int(prompts.sum()) + count)
    replay_loop.run(requests, state, _prices(engine, most), _limits(engine), clients)
    return _replayed(requests, state)


def _replayed(requests: replay_loop.Requests, state: replay_loop.State) -> Replayed:
    """What the loop has left in its arrays."""
    return Replayed(
        input_tokens=requests.prompt,
        output_tokens=requests.answer,
        sent_s=requests.sent_s,
        ttft_s=requests.first_s - requests.sent_s,
        end_s=requests.end_s,
        busy_s=float(state.clock[replay_loop.BUSY]),
        sequence_s=float(state.clock[replay_loop.SEQUENCE_S]),
        preempted_count=int(state.counts[replay_loop.PREEMPTED]),
    )


def _cached(prompts: NDArray[np.int64], lengths: Lengths) -> NDArray[np.int64]:
    """Of each prompt, the tokens found in a prefix cache; at least one is always computed."""
    found: NDArray[np.int64] = np.minimum(prompts - 1, np.rint(prompts * lengths.cached_ratio).astype(np.int64))
    return found


def replay_split(engine: SplitEngine, scenario: HarnessScenario, seed: int) -> Served:
    """The same for prompts and answers on different engines: the client's first token comes from the decode side."""
    return served(replay_split_requests(engine, scenario, seed))


def replay_split_requests(engine: SplitEngine, scenario: HarnessScenario, seed: int) -> Replayed:
    """The run of both pools, request by request.

    The decode replicas are taken as one engine whose steps last as long as a replica's with an even share of the
    sequences. Prefix hits shorten the prompts that the prefill pool computes; the whole prompt is handed over.
    """
    generator = np.random.default_rng(seed)
    count = scenario.requests_of_one(1)
    prompts, answers = scenario.lengths.draw(count, generator)
    closed = scenario.arrival is ArrivalLaw.CLOSED_LOOP
    sent_s = np.full(count, -1.0) if closed else _arrivals(scenario, scenario.rate_per_s, count, generator)
    cached = _cached(prompts, scenario.lengths)
    requests = replay_loop.Requests(
        prompts, answers, prompts - 1, cached, sent_s, np.zeros(count), np.zeros(count), np.zeros(count)
    )
    state = _empty_state(count, split=True)
    prefill, decode = engine.prefill, engine.decode
    pool = replay_loop.Pool(
        np.zeros(prefill.replicas),
        _prices(prefill, prefill.max_batched_tokens),
        prefill.max_batched_tokens,
        prefill.max_sequence_count,
        engine.prefill_rank_count,
        float(engine.handover_s),
        float(engine.handover_token_s(scenario.lengths.input_tokens)),
        scenario.concurrency if closed else 0,
    )
    prices = _shared_prices(engine, scenario.lengths.input_tokens)
    replay_loop.run_split(requests, state, prices, _shared_limits(decode), pool)
    return _replayed(requests, state)


def _shared_prices(engine: SplitEngine, input_tokens: float) -> replay_loop.Prices:
    """The decode replicas as one engine (n tokens cost what one needs for its share), behind the front end."""
    decode = engine.decode
    one = _prices(decode, decode.max_batched_tokens)
    front = engine.prefill.front_end
    # Each prefill worker has a tokeniser: together they take prompts that much faster, one prompt takes as long.
    token_s = front.prompt_token_s / engine.prefill.replicas
    beside_s = (front.prompt_token_s - token_s) * input_tokens
    shared = np.repeat(one.by_token_s[1:], decode.replicas)
    return replay_loop.Prices(
        np.concatenate((one.by_token_s[:1], shared)),
        one.sequence_s / decode.replicas,
        one.decode_context_s / decode.replicas,
        0.0,
        0.0,
        0.0,
        float(front.request_s + beside_s),
        float(token_s),
        float(front.first_token_s),
        0.0,
    )


def _shared_limits(decode: ServingEngine) -> replay_loop.Limits:
    """The decode replicas' limits together."""
    one = _limits(decode)
    return replay_loop.Limits(
        one.order,
        one.max_batched_tokens * decode.replicas,
        one.max_sequence_count * decode.replicas,
        one.kv_capacity_tokens * decode.replicas,
        one.reserve_ratio,
    )


def served(run: Replayed, replicas: int = 1) -> Served:
    """The statistics that a harness prints, of `replicas` engines that each did what this one did."""
    ttft_ms = run.ttft_s * 1e3
    tpot_ms = run.tpot_s * 1e3 if (run.output_tokens > 1).any() else np.zeros(1)
    wall_s = run.wall_s
    p50, p90, p99 = np.percentile(ttft_ms, (50, 90, 99))
    return Served(
        ttft_mean_ms=float(ttft_ms.mean()),
        ttft_p50_ms=float(p50),
        ttft_p90_ms=float(p90),
        ttft_p99_ms=float(p99),
        tpot_mean_ms=float(tpot_ms.mean()),
        tpot_p50_ms=float(np.median(tpot_ms)),
        tpot_p90_ms=float(np.percentile(tpot_ms, 90)),
        output_tok_per_s=replicas * float(run.output_tokens.sum()) / wall_s,
        request_per_s=replicas * run.output_tokens.size / wall_s,
        utilisation_ratio=min(1.0, run.busy_s / wall_s),
        batch_mean=run.sequence_s / run.busy_s,
        saturated=bool(ttft_ms.mean() > SATURATED_TTFT_MS),
    )


def _arrivals(
    scenario: HarnessScenario, rate_per_s: float, count: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Send times of an open loop: Gamma gaps of the given mean rate and squared coefficient of variation."""
    if math.isinf(rate_per_s):
        return np.zeros(count)
    if scenario.burstiness_cv2 == 0:
        gaps = np.full(count, 1 / rate_per_s)
    else:
        shape = 1 / scenario.burstiness_cv2
        gaps = generator.gamma(shape, 1 / (shape * rate_per_s), count)
    return np.cumsum(gaps)


def _prices(engine: ServingEngine, max_batched_tokens: int) -> replay_loop.Prices:
    """The engine's table and front end as the loop takes them."""
    table: StepTable = engine.step.table(max(1, max_batched_tokens))
    front = engine.front_end
    return replay_loop.Prices(
        np.ascontiguousarray(table.by_token_s, dtype=np.float64),
        float(table.sequence_s),
        float(table.decode_context_s),
        float(table.prefill_pair_s),
        float(table.prefill_context_s),
        float(table.prefill_step_s),
        float(front.request_s),
        float(front.prompt_token_s),
        float(front.first_token_s),
        float(engine.launch_s),
    )


def _limits(engine: ServingEngine) -> replay_loop.Limits:
    """The engine's scheduler as the loop takes it."""
    return replay_loop.Limits(
        _ORDERS[engine.order],
        engine.max_batched_tokens,
        engine.max_sequence_count,
        engine.kv_capacity_tokens,
        float(engine.reserve_ratio),
    )


def _empty_state(count: int, *, split: bool = False) -> replay_loop.State:
    """The loop's arrays for `count` requests."""
    counts = np.zeros(replay_loop.COUNTS, dtype=np.int64)
    counts[replay_loop.PARTIAL] = -1
    integers = np.zeros((6, count + 2), dtype=np.int64)
    return replay_loop.State(
        counts=counts,
        clock=np.zeros(replay_loop.CLOCKS),
        # An evicted request leaves a dead entry behind until its old finish step passes.
        heap=np.zeros(8 * count + 16, dtype=np.int64),
        finish_step=np.full(count + 2, -1, dtype=np.int64),
        computed=integers[0],
        produced=integers[1],
        reserved=integers[2],
        admitted=np.zeros(3 * count + 8, dtype=np.int64),
        evicted=integers[3],
        queue=integers[4],
        flying=np.zeros(count + 2 if split else 0, dtype=np.int64),
        chunk_of=integers[5],
        chunk_tokens=np.zeros(count + 2, dtype=np.int64),
    )
