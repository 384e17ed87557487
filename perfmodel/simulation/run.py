"""A cluster of engines under a trace and a routing policy, from first arrival to last token.

Owns: feeding arrivals (open loop, or sessions in closed loop),
asking and telling the policy, and the result. Does not own: the engines (`fleet`), what happens inside (`cluster` and
below), policies, or files. Same engines, workload, policy and seed: the same result, bit for bit.

Memory does not grow with time: arrivals come in windows, live requests use their records again, durations go to
sketches. A percentile is within `sketch.RELATIVE_ERROR_RATIO` of the exact one.
Not modelled: answers' blocks are not found by the session's next prompt unless the trace names them (a trace knows
prompts only); clients never hang up; engines never fail; a hand-over looks for nothing in the decode engine's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import index
from typing import NoReturn

import numpy as np

from perfmodel.errors import ConfigError
from perfmodel.simulation.arrivals import ClosedArrivals, ClosedLoop, OpenArrivals, OpenLoop, arrivals_of
from perfmodel.simulation.cluster import LOG_FULL, NO_RECORD, advance, invariants_hold, submit
from perfmodel.simulation.compiling import address_book
from perfmodel.simulation.fleet import DEFAULT_BLOCK_TOKENS, EngineSpec, cluster_of, one_by_one, policy_engine
from perfmodel.simulation.hearing import DEFAULT_EVENT_DELAY_S, Hearing, metrics_every_s, wants_kv_events
from perfmodel.simulation.policy import Ask, Policy, PolicyFactory, PolicyFleet, Usage
from perfmodel.simulation.sketch import cumulative, percentile_s
from perfmodel.simulation.state import (
    END_TO_END,
    FIRST_TOKEN,
    TPOT,
    TTFT,
    Cluster,
    roomier,
)
from perfmodel.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The promise that goodput counts, the dice, and what no policy sees: how much engines and steps differ.

    `engine_spread_ratio` is the standard deviation of ln(an engine's speed), `step_noise_ratio` that of ln(a step's
    time), both around the nominal one (the mean of a step stays). `output_limit_tokens` is what policies are told that
    an answer may have. `policy_name` is for the sentence when a policy fails; `event_delay_s` is how late a policy
    hears which blocks engines store and drop.
    """

    slo_ttft_s: float = 5.0
    slo_tpot_s: float = 0.05
    seed: int = 0
    model: str = "model"
    engine_spread_ratio: float = 0.0
    step_noise_ratio: float = 0.0
    output_limit_tokens: int = 4096
    policy_name: str = ""
    event_delay_s: float = DEFAULT_EVENT_DELAY_S

    def __post_init__(self) -> None:
        for name in ("slo_ttft_s", "slo_tpot_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected above 0")
        if not 0 <= self.event_delay_s < inf:
            raise ConfigError(f"event_delay_s is {self.event_delay_s}; expected 0 or more")
        for name in ("engine_spread_ratio", "step_noise_ratio"):
            if not 0 <= getattr(self, name) < 2:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more and below 2")


@dataclass(frozen=True, slots=True)
class Durations:
    """Mean (exact) and percentiles (within `RELATIVE_ERROR_RATIO`) in seconds; None where nothing was measured."""

    mean_s: float | None
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What one engine did. `busy_ratio`: share of the simulated time in which it was not idle, however full."""

    pool: str
    requests: int
    busy_ratio: float
    step_count: int
    prefill_tokens: int
    decode_tokens: int
    hit_ratio: float | None
    preemption_count: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rates over time in equal bins of `bin_s` seconds, from 0."""

    bin_s: float
    arrived_per_s: tuple[float, ...]
    ended_per_s: tuple[float, ...]
    output_tok_per_s: tuple[float, ...]
    ttft_mean_s: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class SimResult:
    """What came of it. Ratios are None where nothing was counted; `goodput_ratio` is of all requests offered."""

    requests: int
    completed_count: int
    refused_count: int
    ttft: Durations
    tpot: Durations
    end_to_end: Durations
    prefix_hit_ratio: float | None
    restored_ratio: float | None
    pulled_ratio: float | None
    output_tok_per_s: float
    goodput_ratio: float | None
    sim_s: float
    preemption_count: int
    refused_by_policy_count: int
    hand_over_count: int
    lost_tokens: int
    engines: tuple[EngineResult, ...]
    timeline: Timeline
    ttft_s: tuple[float, ...] = field(repr=False)
    ttft_share_ratio: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class GrowingQueue:
    """Rates over the second half of the arrivals, where more came than ended until the last."""

    arrived_per_s: float
    ended_per_s: float


# A queue grows where this share of what arrives does not end, in both of the last quarters of the arrivals; less is
# what requests that are merely running do. [judgement]
_GROWTH_RATIO = 0.05
# Bins of arrivals below which a quarter says nothing.
_FEWEST_BINS = 8


def growing_queue(timeline: Timeline, slo_ttft_s: float) -> GrowingQueue | None:
    """The rates of a queue that grew until the last arrival, or None.

    It grew when, in each of the last two quarters of the time of arrivals, 5 % of what came did not end, and first
    tokens after the last arrival came later than promised and later than in the first half. Then TTFT says how long
    the trace is, for it would grow with a longer one.
    """
    arrived, ended = timeline.arrived_per_s, timeline.ended_per_s
    used = 1 + max((at for at, rate in enumerate(arrived) if rate), default=-1)
    half, quarter = used // 2, used - used // 4
    if used < _FEWEST_BINS:
        return None
    for start, stop in ((half, quarter), (quarter, used)):
        came = sum(arrived[start:stop])
        if came - sum(ended[start:stop]) <= _GROWTH_RATIO * came:
            return None
    early_s = _mean([wait_s for wait_s in timeline.ttft_mean_s[:half] if wait_s is not None])
    late_s = _mean([wait_s for wait_s in timeline.ttft_mean_s[used - 1 :] if wait_s is not None])
    if late_s is None or late_s <= max(slo_ttft_s, early_s or 0.0):
        return None
    return GrowingQueue(_mean(arrived[half:used]) or 0.0, _mean(ended[half:used]) or 0.0)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def simulate(
    engines: Sequence[EngineSpec],
    workload: OpenLoop | ClosedLoop,
    policy: PolicyFactory,
    options: SimOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> SimResult:
    """Run the workload to its last token. `progress` gets the number of requests that arrived since its last call.

    Raises ConfigError for no engine that can be picked, a decode pool that is missing, times that fall, block sizes
    that change, and a policy that raises or picks what is no engine.
    """
    replay = Replay(engines, workload, policy, options or SimOptions())
    replay.run(progress or _silent)
    return replay.result()


class Replay:
    """One simulation under way. Mutable: time passes in it."""

    def __init__(
        self,
        engines: Sequence[EngineSpec],
        workload: OpenLoop | ClosedLoop,
        policy: PolicyFactory,
        options: SimOptions,
    ) -> None:
        self._specs = one_by_one(engines)
        self._options = options
        self._source: OpenArrivals | ClosedArrivals = arrivals_of(workload)
        block_tokens = self._source.block_tokens
        self._routable = [at for at, spec in enumerate(self._specs) if spec.role != "decode"]
        fleet = PolicyFleet(
            options.model,
            tuple(policy_engine(self._specs[at], at) for at in self._routable),
            block_tokens or DEFAULT_BLOCK_TOKENS,
            options.seed,
            options.slo_ttft_s,
            options.slo_tpot_s,
        )
        try:
            self._policy: Policy = policy(fleet)
            hears, self._reads_blocks = bool(self._policy.hears), bool(self._policy.reads_blocks)
            told = wants_kv_events(self._policy), metrics_every_s(self._policy)
        except Exception as fault:  # a plug-in's code: anything can be wrong with it
            self._policy_failed("its making", fault)
        self.cluster: Cluster = cluster_of(self._specs, block_tokens, (hears, *told), options)
        self._hears = hears
        self._hearing = (
            Hearing(self._policy, self._routable, len(self._specs), options.event_delay_s) if any(told) else None
        )
        self.book = address_book(self.cluster)
        self.refused_by_policy_count = 0

    def run(self, progress: Callable[[int], None]) -> None:
        """Let every request arrive and everything end."""
        source, cluster_events, hearing = self._source, self._deliver, self._hearing
        while True:
            arrival_s = source.next_s()
            count = advance(self.book, arrival_s)
            if hearing is not None:
                hearing.take(self.cluster)
            if count:
                if count != LOG_FULL:
                    cluster_events(count)
                continue
            if arrival_s == inf:
                return
            new = source.take()
            if new is not None:
                progress(len(new.trace))
                self._make_room(new.trace)
            self._place(arrival_s)

    def _place(self, now_s: float) -> None:
        """Ask the policy where the arriving request goes, and send it there."""
        source = self._source
        part, row = source.part, source.row
        policy = self._policy
        blocks = part.blocks_of(row) if self._reads_blocks else ()
        serial = part.serial + row
        ask = Ask(
            serial, self._options.model, part.session[row], part.prompt[row], self._options.output_limit_tokens, blocks
        )
        if self._hearing is not None:
            self._tell_published(self._hearing, now_s)
        try:
            picked = policy.pick(ask, now_s)
            if picked is None:
                self.refused_by_policy_count += 1
                return
            places = [index(each) for each in (picked if isinstance(picked, tuple) else (picked,))]
        except Exception as fault:
            self._policy_failed("pick", fault)
        if not 1 <= len(places) <= 2 or any(not 0 <= place < len(self._routable) for place in places):
            raise ConfigError(
                f"{self._policy_words} picked engine {picked}; expected 0 to {len(self._routable) - 1}, or None to "
                "refuse the request"
            )
        engines = [self._routable[place] for place in places]
        pair = (engines[0], engines[1] if len(engines) > 1 else -1)
        taken = submit(self.book, part.book, row, pair, now_s)
        if taken == NO_RECORD:
            self._grow(requests=2 * len(self.cluster.requests))
            taken = submit(self.book, part.book, row, pair, now_s)
        if taken < 0 and self._hears:
            self._tell_finished(serial, Usage(0, part.prompt[row], 0), now_s)

    def _tell_published(self, hearing: Hearing, now_s: float) -> None:
        try:
            hearing.tell(self.cluster, now_s)
        except Exception as fault:
            self._policy_failed("stored, removed or metrics", fault)

    def _tell_finished(self, serial: int, usage: Usage, at_s: float) -> None:
        try:
            self._policy.finished(serial, usage, at_s)
        except Exception as fault:
            self._policy_failed("finished", fault)

    @property
    def _policy_words(self) -> str:
        return f"the policy {self._options.policy_name}".rstrip()

    def _policy_failed(self, where: str, fault: Exception) -> NoReturn:
        said = " ".join(str(fault).split()) or "no message"
        raise ConfigError(
            f"{self._policy_words} failed in {where} ({type(fault).__name__}: {said}); "
            "expected an engine's number or None, and no fault"
        ) from fault

    def _deliver(self, count: int) -> None:
        """Tell the policy, and the source of follow-ups, what happened."""
        times = self.cluster.events_s[:count].tolist()
        policy = self._policy
        hears = self._hears
        follow = self._source.ended
        for (kind, serial, row, cached, prompt, output), at_s in zip(
            self.cluster.events[:count].tolist(), times, strict=True
        ):
            if kind == FIRST_TOKEN:
                try:
                    policy.first_token(serial, at_s)
                except Exception as fault:
                    self._policy_failed("first_token", fault)
                continue
            if hears:
                self._tell_finished(serial, Usage(cached, prompt, output), at_s)
            follow(row, at_s)

    def _make_room(self, trace: Trace) -> None:
        """A window may hold longer requests than any before it."""
        width = int(self.cluster.totals[0].block_tokens)
        prompt_blocks = int(np.diff(trace.block_offsets).max())
        longest = int((trace.input_tokens.astype(np.int64) + trace.output_tokens).max())
        sequence_blocks = -(-longest // width)
        if prompt_blocks > self.cluster.keys.shape[1] or sequence_blocks > self.cluster.tables.shape[1]:
            self._grow(prompt_blocks=prompt_blocks, sequence_blocks=sequence_blocks)

    def _grow(self, requests: int | None = None, prompt_blocks: int = 0, sequence_blocks: int = 0) -> None:
        self.cluster = roomier(
            self.cluster, requests=requests, prompt_blocks=prompt_blocks, sequence_blocks=sequence_blocks
        )
        self.book = address_book(self.cluster)

    def blocks_add_up(self) -> bool:
        """Whether every KV block of every engine is free or held by as many as say so. Slow; for tests."""
        return invariants_hold(self.book)

    def result(self) -> SimResult:
        """What came of it so far."""
        c = self.cluster
        totals = c.totals[0]
        offered = int(totals.offered) + self.refused_by_policy_count
        sim_s = float(totals.last_s)
        values, shares = cumulative(c.sketches[TTFT])
        return SimResult(
            requests=offered,
            completed_count=int(totals.completed),
            refused_count=int(totals.refused) + self.refused_by_policy_count,
            ttft=_durations(c, TTFT, float(totals.ttft_sum_s), int(totals.ttft_count)),
            tpot=_durations(c, TPOT, float(totals.tpot_sum_s), int(totals.tpot_count)),
            end_to_end=_durations(c, END_TO_END, float(totals.end_to_end_sum_s), int(totals.completed)),
            prefix_hit_ratio=_ratio(totals.hit_tokens, totals.prompt_tokens),
            restored_ratio=_ratio(totals.restored_tokens, totals.prompt_tokens),
            pulled_ratio=_ratio(totals.pulled_tokens, totals.prompt_tokens),
            output_tok_per_s=float(totals.output_tokens) / sim_s if sim_s else 0.0,
            goodput_ratio=_ratio(totals.good, offered),
            sim_s=sim_s,
            preemption_count=int(totals.preempted),
            refused_by_policy_count=self.refused_by_policy_count,
            hand_over_count=int(totals.transfers),
            lost_tokens=int(totals.lost_tokens),
            engines=tuple(_engine_result(spec, c.engines[at], sim_s) for at, spec in enumerate(self._specs)),
            timeline=_timeline(c),
            ttft_s=tuple(values),
            ttft_share_ratio=tuple(shares),
        )


def _silent(_: int) -> None:
    """No progress is shown."""


def _ratio(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def _durations(c: Cluster, row: int, sum_s: float, count: int) -> Durations:
    p50, p95, p99 = (percentile_s(c.sketches[row], share) for share in (0.5, 0.95, 0.99))
    return Durations(sum_s / count if count else None, p50, p95, p99)


def _engine_result(spec: EngineSpec, row: np.record, sim_s: float) -> EngineResult:
    return EngineResult(
        pool=spec.pool,
        requests=int(row.routed_count),
        busy_ratio=float(row.busy_s) / sim_s if sim_s else 0.0,
        step_count=int(row.step_count),
        prefill_tokens=int(row.prefill_tokens),
        decode_tokens=int(row.decode_tokens),
        hit_ratio=_ratio(row.hit_tokens, row.prompt_tokens),
        preemption_count=int(row.preempted_count),
    )


def _timeline(c: Cluster) -> Timeline:
    bin_s = float(c.totals[0].bin_s)
    used = 1 + int(float(c.totals[0].last_s) / bin_s)
    arrived, ended, tokens, ttft_sum, ttft_count = c.timeline[:used].T
    means = [
        total / count if count else None for total, count in zip(ttft_sum.tolist(), ttft_count.tolist(), strict=True)
    ]
    rates = [tuple((column / bin_s).tolist()) for column in (arrived, ended, tokens)]
    return Timeline(bin_s, rates[0], rates[1], rates[2], tuple(means))
