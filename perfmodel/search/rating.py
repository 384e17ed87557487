"""What a number of replicas of an engine would show under a load: the queueing model, asked for one group of classes.

Owns: merging classes that share pools into one load, keeping each class's own limits, shares of requests within a limit
from three percentiles, and the words for how far a limit is missed. Does not own: the queueing formulas (`queueing`),
the hand-over between prefill and decode (`disaggregation`), step times (`step_time`), or what is bought (`search`). It
remembers what it was asked, because the search asks for the same engine at many promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel import memory
from perfmodel.disaggregation import SplitEngine
from perfmodel.queueing.loops import carried_per_s, open_loop
from perfmodel.search.options import Bounds, bounds
from perfmodel.search.plan import (
    DemandLevel,
    EngineOption,
    PoolPlan,
    PoolRole,
    Prediction,
    RejectionReason,
    Slo,
    TrafficClass,
)
from perfmodel.serving import LengthLaw, Lengths, Served, ServingEngine, Steps
from perfmodel.step_time import BatchShape, StepTable, prefill_batch

Floats = NDArray[np.float64]
_Times = TypeVar("_Times", float, Floats)


class FullModel(Protocol):
    """What all pools of a candidate show together at a rate: the closed form, or a simulation that checks it."""

    def __call__(self, rater: Rater, pools: Sequence[PoolPlan], rate_per_s: float) -> Served:
        """The pools' serving replicas under the rater's load at this rate."""
        ...


# Shares of requests above the percentiles that a `Served` has, as logarithms.
_LOG_HALF, _LOG_TENTH, _LOG_HUNDREDTH = math.log(0.5), math.log(0.1), math.log(0.01)

# A day: longer than any promise.
_LONGEST_MS = 86_400_000.0

# Slope of a percentile that stands still (all requests alike), in milliseconds; only keeps a division finite.
_LEAST_WIDTH_MS = 1e-9


# More digits than any figure here means: two that are still alike are told as they are.
_MOST_DIGITS = 6

# From here on a multiple of a limit is told without digits: nobody needs "123.40 times".
_FAR_RATIO = 10.0


class Check(Protocol):
    """The last judge of a candidate: the share of requests that met the promise when it was played out."""

    def __call__(self, rater: Rater, pools: Sequence[PoolPlan]) -> float:
        """The share at the P90 rate, serving replicas only."""
        ...


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Classes that share pools as one stream: rates added, lengths and cached shares weighted by rate."""

    classes: tuple[TrafficClass, ...]
    lengths: Lengths
    rate_p50_per_s: float
    rate_p90_per_s: float
    burstiness_cv2_ratio: float

    def rate_per_s(self, level: DemandLevel) -> float:
        """The rate of this level."""
        return self.rate_p90_per_s if level is DemandLevel.P90 else self.rate_p50_per_s

    @property
    def names(self) -> tuple[str, ...]:
        """The classes' names."""
        return tuple(each.name for each in self.classes)


def group_load(classes: Sequence[TrafficClass]) -> GroupLoad:
    """One stream of these classes, which have one model. A mixture of unlike lengths varies more than its parts: its
    variance is that within the classes plus that between their means.
    """
    demands = [each.demand for each in classes]
    rates = np.array([demand.rate_p90_per_s for demand in demands])
    weights = rates / rates.sum()
    inputs = np.array([demand.input_tokens for demand in demands])
    outputs = np.array([demand.output_tokens for demand in demands])
    cached = np.array([demand.cached_ratio for demand in demands])
    mean_input, mean_output = float(weights @ inputs), float(weights @ outputs)
    if len(demands) == 1:
        lengths = demands[0].lengths
    else:
        input_cv2 = np.array([demand.lengths.cv2[0] for demand in demands])
        output_cv2 = np.array([demand.lengths.cv2[1] for demand in demands])
        lengths = Lengths(
            mean_input,
            mean_output,
            LengthLaw.LOGNORMAL,
            float(weights @ (inputs * cached)) / mean_input,
            float(weights @ (inputs**2 * (1 + input_cv2))) / mean_input**2 - 1,
            float(weights @ (outputs**2 * (1 + output_cv2))) / mean_output**2 - 1,
        )
    return GroupLoad(
        classes=tuple(classes),
        lengths=lengths,
        rate_p50_per_s=sum(demand.rate_p50_per_s for demand in demands),
        rate_p90_per_s=float(rates.sum()),
        burstiness_cv2_ratio=float(weights @ np.array([demand.burstiness_cv2_ratio for demand in demands])),
    )


def share_within(limit_ms: float, p50_ms: Floats, p90_ms: Floats, p99_ms: Floats) -> Floats:
    """Share of requests at or below a limit, from three percentiles (all float64[n] or broadcastable).

    The logarithm of the share above is linear between the percentiles and goes on past P99 with the last slope, as the
    tail of a queue does; below the median the share falls linearly to nothing at 0.
    """
    first = np.maximum(p90_ms - p50_ms, _LEAST_WIDTH_MS)
    second = np.maximum(p99_ms - p90_ms, _LEAST_WIDTH_MS)
    near = _LOG_HALF + (limit_ms - p50_ms) / first * (_LOG_TENTH - _LOG_HALF)
    far = _LOG_TENTH + (limit_ms - p90_ms) / second * (_LOG_HUNDREDTH - _LOG_TENTH)
    above = np.exp(np.clip(np.where(limit_ms < p90_ms, near, far), -700.0, 0.0))
    below_median = 0.5 * np.clip(limit_ms / np.maximum(p50_ms, _LEAST_WIDTH_MS), 0.0, 1.0)
    return np.where(limit_ms < p50_ms, below_median, 1 - np.minimum(above, 0.5))


def at_share(share_ratio: float, p50_ms: _Times, p90_ms: _Times, p99_ms: _Times) -> _Times:
    """The percentile of a share of at least a half: the inverse of `share_within`. Of one candidate or of many."""
    log_above = math.log(1 - share_ratio)
    if log_above >= _LOG_TENTH:
        return p50_ms + (p90_ms - p50_ms) * (log_above - _LOG_HALF) / (_LOG_TENTH - _LOG_HALF)
    return p90_ms + (p99_ms - p90_ms) * (log_above - _LOG_TENTH) / (_LOG_HUNDREDTH - _LOG_TENTH)


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """Percentiles (50, 90, 99) of TTFT and TPOT of n candidates, float64[n, 3] milliseconds."""

    ttft_ms: Floats
    tpot_ms: Floats


def latencies(served: Sequence[Served]) -> Latencies:
    """Percentiles of many. TPOT's P99 goes on from its P50 and P90 as an exponential tail does. A load that is not
    carried has infinite times; they are cut where every promise is long broken, so that differences stay finite.
    """
    ttft = np.array([(each.ttft_p50_ms, each.ttft_p90_ms, each.ttft_p99_ms) for each in served]).reshape(-1, 3)
    tail = (_LOG_HUNDREDTH - _LOG_TENTH) / (_LOG_TENTH - _LOG_HALF)
    tpot = np.array(
        [
            (each.tpot_p50_ms, each.tpot_p90_ms, each.tpot_p90_ms + (each.tpot_p90_ms - each.tpot_p50_ms) * tail)
            for each in served
        ]
    ).reshape(-1, 3)
    return Latencies(np.minimum(ttft, _LONGEST_MS), np.minimum(tpot, _LONGEST_MS))


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Of n candidates against all classes' promises (float64[n], bool[n]).

    `ttft_use` and `tpot_use` are the percentile over its limit, `goodput` the share that meets both, each for the class
    that is worst off; `meets` says whether all hold.
    """

    ttft_use: Floats
    tpot_use: Floats
    goodput: Floats
    goodput_short: Floats

    @property
    def meets(self) -> NDArray[np.bool_]:
        """Whether every promise holds."""
        return (self.ttft_use <= 1) & (self.tpot_use <= 1) & (self.goodput_short <= 0)

    @property
    def use(self) -> Floats:
        """The larger of both: how much of its room the candidate takes."""
        return np.maximum(self.ttft_use, self.tpot_use)

    @property
    def over(self) -> Floats:
        """How many times the limit the worst promise is; a goodput that is short counts by what it lacks."""
        return np.asarray(np.maximum(self.use, 1 + np.maximum(self.goodput_short, 0.0)))

    def reason(self, index: int) -> RejectionReason | None:
        """The first promise that a candidate breaks."""
        if not self.ttft_use[index] <= 1:
            return RejectionReason.TTFT_MISSED
        if not self.tpot_use[index] <= 1:
            return RejectionReason.TPOT_MISSED
        return None if self.goodput_short[index] <= 0 else RejectionReason.GOODPUT_MISSED


def told_apart(value: float, limit: float, digits: int) -> str:
    """`value` with `digits` decimals, or with as many more as tell it from the limit."""
    while digits < _MOST_DIGITS and value != limit and f"{value:.{digits}f}" == f"{limit:.{digits}f}":
        digits += 1
    return f"{value:.{digits}f}"


def miss_words(verdict: Verdict, index: int) -> str:
    """How far a candidate is over the limit that it misses most, and by how much too few requests are in time."""
    use, goodput = float(verdict.use[index]), float(verdict.goodput[index])
    short = float(verdict.goodput_short[index])
    times = f"{use:.0f}" if use >= _FAR_RATIO else told_apart(use, 1.0, 2)
    told = f"{times} times the limit"
    if not short > 0:
        return f"{told}, {goodput:.3f} of requests in time"
    lacking = told_apart(short, 0.0, 3)
    return f"{told}, {told_apart(goodput, goodput + short, 3)} of requests in time, {lacking} too few"


def judged(times: Latencies, slos: Sequence[Slo], shifts_ms: Floats | Sequence[float]) -> Verdict:
    """Hold candidates against promises. `shifts_ms[k]` (or [n, k]) is how much later than the merged stream's the first
    token of class k comes, because its prompts are longer.
    """
    count = times.ttft_ms.shape[0]
    if count == 1:
        return _judged_alone(times, slos, np.ravel(np.asarray(shifts_ms, dtype=np.float64)).tolist())
    ttft, tpot = times.ttft_ms.T, times.tpot_ms.T
    shifts = np.broadcast_to(np.asarray(shifts_ms, dtype=np.float64), (count, len(slos)))
    worst = [np.zeros(count), np.zeros(count), np.ones(count), np.full(count, -1.0)]
    for column, slo in enumerate(slos):
        moved = np.maximum(ttft + shifts[:, column], 0.0)
        ttft_use = at_share(slo.percentile_ratio, *moved) / slo.ttft_ms
        tpot_use = at_share(slo.percentile_ratio, *tpot) / slo.tpot_ms
        goodput = share_within(slo.ttft_ms, *moved) * share_within(slo.tpot_ms, *tpot)
        worst[0] = np.maximum(worst[0], ttft_use)
        worst[1] = np.maximum(worst[1], tpot_use)
        worst[2] = np.minimum(worst[2], goodput)
        worst[3] = np.maximum(worst[3], slo.goodput_ratio - goodput)
    return Verdict(*(np.where(np.isnan(each), np.inf, each) for each in worst))


def _judged_alone(times: Latencies, slos: Sequence[Slo], shifts_ms: Sequence[float]) -> Verdict:
    """`judged` of one candidate in plain numbers. It stands beside the arrays because a search asks one at a time, 576
    times for the committed spec of 32 GPUs: 0.05 ms each here and 0.20 ms as arrays of one, a fifth of that search.
    """
    ttft, tpot = times.ttft_ms[0].tolist(), times.tpot_ms[0].tolist()
    uses, shares = ([0.0], [0.0]), ([1.0], [-1.0])
    for slo, shift_ms in zip(slos, shifts_ms, strict=True):
        moved = [max(each + shift_ms, 0.0) if not math.isnan(shift_ms) else math.nan for each in ttft]
        uses[0].append(at_share(slo.percentile_ratio, *moved) / slo.ttft_ms)
        uses[1].append(at_share(slo.percentile_ratio, *tpot) / slo.tpot_ms)
        goodput = _share_alone(slo.ttft_ms, *moved) * _share_alone(slo.tpot_ms, *tpot)
        shares[0].append(goodput)
        shares[1].append(slo.goodput_ratio - goodput)
    told = (_worst(max, uses[0]), _worst(max, uses[1]), _worst(min, shares[0]), _worst(max, shares[1]))
    return Verdict(*np.array(told)[:, None])


def _worst(of: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    """The worst of them; infinite where one is not known."""
    return math.inf if any(map(math.isnan, values)) else of(values)


def _share_alone(limit_ms: float, p50_ms: float, p90_ms: float, p99_ms: float) -> float:
    """`share_within` of one."""
    if limit_ms < p50_ms:
        return 0.5 * min(max(limit_ms / max(p50_ms, _LEAST_WIDTH_MS), 0.0), 1.0)
    if limit_ms < p90_ms:
        first = max(p90_ms - p50_ms, _LEAST_WIDTH_MS)
        log_above = _LOG_HALF + (limit_ms - p50_ms) / first * (_LOG_TENTH - _LOG_HALF)
    else:
        second = max(p99_ms - p90_ms, _LEAST_WIDTH_MS)
        log_above = _LOG_TENTH + (limit_ms - p90_ms) / second * (_LOG_HUNDREDTH - _LOG_TENTH)
    return 1 - min(math.exp(min(max(log_above, -700.0), 0.0)), 0.5)


class _KeptTables:
    """Step times whose table is made once: the queueing model asks for it at every load. Mutable: it keeps them."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._tables: dict[int, StepTable] = {}

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step."""
        return self._steps.step_s(batch)

    def table(self, max_batched_tokens: int) -> StepTable:
        """The same as a table."""
        found = self._tables.get(max_batched_tokens)
        if found is None:
            found = self._tables[max_batched_tokens] = self._steps.table(max_batched_tokens)
        return found


class Memory:
    """What the queueing model and the full model said, step tables and bounds. Mutable: it grows. Searches that vary
    loads, promises, prices or stock share one: what an answer depends on is in its key.
    """

    def __init__(self, shared: Memory | None = None) -> None:
        """`shared`: a memory of the same engines under another full model; all but its answers are used together."""
        self.steps: dict[tuple[str, ...], Steps] = {} if shared is None else shared.steps
        self.answers: dict[tuple[object, ...], Served] = {} if shared is None else shared.answers
        self.hand_overs: dict[tuple[object, ...], float] = {} if shared is None else shared.hand_overs
        self.carried_per_s: dict[tuple[object, ...], float] = {} if shared is None else shared.carried_per_s
        self.prompts_ms: dict[tuple[object, ...], float] = {} if shared is None else shared.prompts_ms
        self.bounds: dict[tuple[object, ...], Bounds] = {} if shared is None else shared.bounds
        self.full: dict[tuple[object, ...], Served] = {}


class Rater:
    """Asks the queueing model about engines under one group's load. Mutable: it remembers the answers."""

    def __init__(
        self,
        load: GroupLoad,
        steps: Callable[[EngineOption], Steps],
        full_model: FullModel | None = None,
        check: Check | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.load = load
        self._memory = memory or Memory()
        self._half_lengths = {role: half_lengths(role, load.lengths) for role in PoolRole}
        self._check = check
        self._checked: dict[tuple[object, ...], float] = {}
        self._full_model = full_model or closed_form
        self._steps_of = steps

    def steps(self, option: EngineOption) -> Steps:
        """The step times of an engine."""
        found = self._memory.steps.get(option.key)
        if found is None:
            found = self._memory.steps[option.key] = _KeptTables(self._steps_of(option))
        return found

    def bounds(self, option: EngineOption, each: TrafficClass) -> Bounds:
        """The physical bounds of a class on an engine."""
        key = (option.key, each.demand)
        found = self._memory.bounds.get(key)
        if found is None:
            found = self._memory.bounds[key] = bounds(option.shape, each.demand)
        return found

    def engine(self, option: EngineOption, count: int) -> ServingEngine:
        """`count` replicas as the queueing model takes them."""
        return ServingEngine(
            step=self.steps(option),
            kv_capacity_tokens=option.kv_capacity_tokens,
            max_batched_tokens=option.chunk_tokens,
            max_sequence_count=option.max_sequence_count,
            replicas=count,
        )

    def half(self, role: PoolRole, option: EngineOption, count: int, rate_per_s: float) -> Served:
        """What a pool of `count` replicas alone would show: whole requests, prompts only, or answers only."""
        lengths = self._half_lengths[role]
        # By what the half sees: a decode pool's answer holds for every cached share of the prompts.
        key = (lengths, self.load.burstiness_cv2_ratio, option.key, count, rate_per_s)
        found = self._memory.answers.get(key)
        if found is None:
            found = self._memory.answers[key] = self._open_loop(self.engine(option, count), lengths, rate_per_s)
        return found

    def carried_per_s(self, role: PoolRole, option: EngineOption) -> float:
        """Requests a second that one replica carries: more grow its queue without end."""
        lengths = self._half_lengths[role]
        key = (lengths, option.key)
        found = self._memory.carried_per_s.get(key)
        if found is None:
            found = self._memory.carried_per_s[key] = carried_per_s(self.engine(option, 1), lengths)
        return found

    def _open_loop(self, engine: ServingEngine, lengths: Lengths, rate_per_s: float) -> Served:
        return open_loop(engine, lengths, rate_per_s, self.load.burstiness_cv2_ratio)

    def split(self, prefill: PoolPlan, decode: PoolPlan) -> SplitEngine | None:
        """A prefill and a decode pool as one engine; None: a network between them is not known."""
        link = link_bytes_per_s(prefill.option, decode.option)
        if link is None:
            return None
        shape = prefill.option.shape
        tokens = max(1, int(self.load.lengths.input_tokens))
        return SplitEngine(
            prefill=self.engine(prefill.option, prefill.serving_count),
            decode=self.engine(decode.option, decode.serving_count),
            kv_bytes_per_token=memory.kv_bytes(shape, tokens) / tokens,
            link_bytes_per_s=link,
            layer_count=shape.architecture.layer_count,
            prefill_rank_count=shape.data_parallel_count,
        )

    def hand_over_ms(self, prefill: EngineOption, decode: EngineOption) -> float:
        """What a client sees of the KV transfer of a mean prompt; NaN: a network between them is not known."""
        link = link_bytes_per_s(prefill, decode)
        tokens = self.load.lengths.input_tokens
        key = (tokens, prefill.key, link)
        if key not in self._memory.hand_overs:
            one = self.split(PoolPlan(PoolRole.PREFILL, prefill, 1, 0), PoolPlan(PoolRole.DECODE, decode, 1, 0))
            self._memory.hand_overs[key] = math.nan if one is None else one.handover_token_s(tokens) * tokens * 1000
        return self._memory.hand_overs[key]

    def full(self, pools: Sequence[PoolPlan], rate_per_s: float) -> Served:
        """What the pools of one candidate would show together, by the full model."""
        key = (self.load.lengths, self.load.burstiness_cv2_ratio, rate_per_s, *_pools_key(pools))
        found = self._memory.full.get(key)
        if found is None:
            found = self._memory.full[key] = self._full_model(self, pools, rate_per_s)
        return found

    def checked_goodput(self, pools: Sequence[PoolPlan]) -> float | None:
        """What the check says of the pools; None: there is no check."""
        if self._check is None:
            return None
        key = _pools_key(pools)
        if key not in self._checked:
            self._checked[key] = self._check(self, pools)
        return self._checked[key]

    def known_goodput(self, pools: Sequence[PoolPlan]) -> float | None:
        """What the check said of the pools when it was asked before; None: it was not."""
        return self._checked.get(_pools_key(pools))

    def shifts_ms(self, option: EngineOption) -> tuple[float, ...]:
        """How much later each class's first token comes than the merged stream's, for its longer prompt."""
        if len(self.load.classes) == 1:
            return (0.0,)
        merged = self._prompt_ms(option, self.load.lengths)
        return tuple(self._prompt_ms(option, each.demand.lengths) - merged for each in self.load.classes)

    def _prompt_ms(self, option: EngineOption, lengths: Lengths) -> float:
        cached = int(lengths.input_tokens * lengths.cached_ratio)
        new = max(1, int(lengths.input_tokens) - cached)
        key = (option.key, new, cached)
        found = self._memory.prompts_ms.get(key)
        if found is None:
            found = self._memory.prompts_ms[key] = self.steps(option).step_s(prefill_batch(new, cached)) * 1000
        return found


def link_bytes_per_s(prefill: EngineOption, decode: EngineOption) -> float | None:
    """What one prefill replica sends over: the narrower side's devices together; None: not known of one of them."""
    sides = (prefill.offer.scaleout_bytes_per_s, decode.offer.scaleout_bytes_per_s)
    if sides[0] is None or sides[1] is None:
        return None
    return min(sides[0] * prefill.shape.device_count, sides[1] * decode.shape.device_count)


def _pools_key(pools: Sequence[PoolPlan]) -> tuple[object, ...]:
    return tuple(part for pool in pools for part in (pool.role, pool.serving_count, pool.option.key))


def closed_form(rater: Rater, pools: Sequence[PoolPlan], rate_per_s: float) -> Served:
    """The full model of `queueing`: one pool as it is, a pair as its halves with the hand-over between them."""
    if len(pools) == 1:
        return rater.half(PoolRole.BOTH, pools[0].option, pools[0].serving_count, rate_per_s)
    first, second = pools
    before = rater.half(PoolRole.PREFILL, first.option, first.serving_count, rate_per_s)
    after = rater.half(PoolRole.DECODE, second.option, second.serving_count, rate_per_s)
    return joined(before, after, rater.hand_over_ms(first.option, second.option))


def joined(before: Served, after: Served, hand_over_ms: float) -> Served:
    """A prefill and a decode pool together: TPOT of the second, TTFT of the first and then the KV's way and a step. The
    fuller pool says how much of the load that both can carry is used.
    """
    late_ms = hand_over_ms + after.ttft_p50_ms
    return replace(
        after,
        ttft_mean_ms=before.ttft_mean_ms + late_ms,
        ttft_p50_ms=before.ttft_p50_ms + late_ms,
        ttft_p90_ms=before.ttft_p90_ms + late_ms,
        ttft_p99_ms=before.ttft_p99_ms + late_ms,
        utilisation_ratio=max(before.utilisation_ratio, after.utilisation_ratio),
    )


def half_lengths(role: PoolRole, lengths: Lengths) -> Lengths:
    """Requests as a pool of this role sees them: without the answer, or with the prompt already computed."""
    if role is PoolRole.PREFILL:
        return replace(lengths, output_tokens=1.0, output_cv2=0.0)
    return lengths if role is PoolRole.BOTH else replace(lengths, cached_ratio=1.0)


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """What one class of a group would show at the P90 rate: its own prompts, percentile and limits."""

    ttft_mean_ms: float
    ttft_percentile_ms: float
    tpot_mean_ms: float
    tpot_percentile_ms: float
    goodput_ratio: float


def class_figures(
    rater: Rater, pools: Sequence[PoolPlan], ttft_ratio: float = 1.0, tpot_ratio: float = 1.0
) -> dict[str, ClassFigures]:
    """Figures by class name, as if every TTFT and TPOT were these factors longer."""
    served = rater.full(pools, rater.load.rate_p90_per_s)
    times = latencies([served])
    told = {}
    for each, shift_ms in zip(rater.load.classes, rater.shifts_ms(pools[0].option), strict=True):
        slo = each.slo
        ttft = np.maximum(times.ttft_ms.T + shift_ms, 0.0) * ttft_ratio
        tpot = times.tpot_ms.T * tpot_ratio
        told[each.name] = ClassFigures(
            ttft_mean_ms=max(served.ttft_mean_ms + shift_ms, 0.0) * ttft_ratio,
            ttft_percentile_ms=float(at_share(slo.percentile_ratio, *ttft)[0]),
            tpot_mean_ms=served.tpot_mean_ms * tpot_ratio,
            tpot_percentile_ms=float(at_share(slo.percentile_ratio, *tpot)[0]),
            goodput_ratio=float((share_within(slo.ttft_ms, *ttft) * share_within(slo.tpot_ms, *tpot))[0]),
        )
    return told


def prediction(served: Served, verdict: Verdict, index: int, slo: Slo) -> Prediction:
    """What is told of one candidate."""
    times = latencies([served])
    return Prediction(
        ttft_mean_ms=served.ttft_mean_ms,
        ttft_percentile_ms=float(at_share(slo.percentile_ratio, *times.ttft_ms.T)[0]),
        tpot_mean_ms=served.tpot_mean_ms,
        tpot_percentile_ms=float(at_share(slo.percentile_ratio, *times.tpot_ms.T)[0]),
        goodput_ratio=float(verdict.goodput[index]),
        utilisation_ratio=served.utilisation_ratio,
        batch_mean_count=served.batch_mean,
    )
