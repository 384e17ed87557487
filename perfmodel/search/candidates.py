"""Every candidate that one group of classes could be served by: engines, pairs of engines, and how many of each.

Owns: the smallest number of replicas at which an engine keeps the promise, spare replicas, and pairing prefill with
decode pools (on unlike devices too) by array operations. Does not own: the queueing model behind it (`rating`),
prices (`purchase`), or the choice (`search`). Pairs are judged by their halves first, which costs nothing per pair;
`confirmed` asks the full model about the few that the search wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ConfigError
from perfmodel.search.options import Refusal, cut_words, promise_below_bound
from perfmodel.search.plan import (
    Candidate,
    Choices,
    EngineOption,
    Fleet,
    PoolPlan,
    PoolRole,
    Prediction,
    RejectionReason,
    Topology,
    added_counts,
)
from perfmodel.search.purchase import Bill, Purchasing
from perfmodel.search.rating import Floats, Latencies, Rater, Verdict, judged, latencies, miss_words, prediction
from perfmodel.serving import Served

Ints = NDArray[np.int64]

# What rounding may take from the number of replicas that carry a load before one too few would be skipped.
_ROUNDING_RATIO = 1e-9

# How many more replicas than the fewest a half may have when it is paired: the other half's hand-over eats into the
# promise, and one more replica on either side usually buys it back.
_MORE_REPLICAS = (0, 1)


@dataclass(frozen=True, slots=True)
class Half:
    """One pool of a candidate: an engine, its serving and total replicas, and what it alone would show at P90."""

    option: EngineOption
    serving_count: int
    total_count: int
    served: Served


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Candidates of one topology: indices into halves (second -1: none), device counts, how much of the promise's room
    they take, and what they cost alone.
    """

    topology: Topology
    first: Ints
    second: Ints
    counts: Ints
    use: Floats
    bill: Bill


@dataclass(frozen=True, slots=True, eq=False)
class GroupCandidates:
    """All candidates of one group that keep the promise and may be bought, and why the rest may not."""

    rater: Rater
    halves: tuple[Half, ...]
    rows: tuple[Rows, ...]
    refusals: tuple[tuple[Topology, PoolRole, Refusal], ...]
    considered_count: int

    @property
    def feasible_count(self) -> int:
        """Candidates that keep the promise and may be bought alone."""
        return sum(len(rows.first) for rows in self.rows)


class CandidateSearch:
    """Finds the candidates of one group. Mutable: it collects refusals as it goes."""

    def __init__(
        self,
        asked: tuple[Fleet, Choices],
        purchasing: Purchasing,
        rater: Rater,
        options: Sequence[EngineOption],
        ceiling_usd_per_h: float | None = None,
    ) -> None:
        """`ceiling_usd_per_h`: pools that cost more alone are left out, which no plan up to that cost can hold."""
        fleet, choices = asked
        self._fleet = fleet
        self._choices = choices
        self._purchasing = purchasing
        self._rater = rater
        self._options = options
        self._ceiling = ceiling_usd_per_h
        self._slos = [each.slo for each in rater.load.classes]
        self._halves: list[Half] = []
        self._refusals: list[tuple[Topology, PoolRole, Refusal]] = []
        self._considered = 0

    def run(self) -> GroupCandidates:
        """All topologies that the choices allow."""
        rows = []
        if Topology.AGGREGATED in self._choices.topologies:
            rows.append(self._aggregated())
        split = [each for each in (Topology.DISAGGREGATED, Topology.AFD) if each in self._choices.topologies]
        if split:
            prefill = self._prefill_halves()
            rows += [self._pairs(topology, prefill, self._decode_halves(topology)) for topology in split]
        return GroupCandidates(self._rater, tuple(self._halves), tuple(rows), tuple(self._refusals), self._considered)

    # One engine

    def _aggregated(self) -> Rows:
        topology = Topology.AGGREGATED
        found: list[int] = []
        for option in self._options:
            if option.chips is not None:
                continue
            self._considered += 1
            if not self._passes_bounds(topology, PoolRole.BOTH, option):
                continue
            shifts = self._rater.shifts_ms(option)
            half = self._smallest(topology, PoolRole.BOTH, option, partial(self._both, shifts))
            if half is not None:
                found.append(self._keep(half))
        first = np.array(found, dtype=np.int64)
        counts = self._counts(first)
        use = np.array([self._alone(self._halves[index]) for index in found], dtype=np.float64)
        return self._bought(topology, Rows(topology, first, np.full(len(first), -1), counts, use, _empty_bill()))

    def _alone(self, half: Half) -> float:
        shifts = self._rater.shifts_ms(half.option)
        return float(judged(latencies([half.served]), self._slos, shifts).use[0])

    # Two engines

    def _prefill_halves(self) -> list[int]:
        topology = Topology.DISAGGREGATED
        found = []
        for option in self._options:
            if option.chips is not None or not self._passes_bounds(topology, PoolRole.PREFILL, option):
                continue
            shifts = self._rater.shifts_ms(option)
            half = self._smallest(topology, PoolRole.PREFILL, option, partial(self._ttft_only, shifts))
            if half is not None:
                found += self._with_more(PoolRole.PREFILL, half)
        return found

    def _decode_halves(self, topology: Topology) -> list[int]:
        found = []
        seen: set[tuple[str, ...]] = set()
        for option in sorted(self._options, key=lambda each: each.chunk_tokens):
            if (option.chips is not None) != (topology is Topology.AFD):
                continue
            # Without prompts the chunk only takes memory: the smallest stands for all.
            if option.key[:-1] in seen:
                continue
            seen.add(option.key[:-1])
            if not self._passes_bounds(topology, PoolRole.DECODE, option):
                continue
            half = self._smallest(topology, PoolRole.DECODE, option, self._decode_alone)
            if half is not None:
                found += self._with_more(PoolRole.DECODE, half)
        return found

    def _both(self, shifts: Sequence[float], times: Latencies) -> Verdict:
        return judged(times, self._slos, shifts)

    def _ttft_only(self, shifts: Sequence[float], times: Latencies) -> Verdict:
        return judged(Latencies(times.ttft_ms, np.zeros_like(times.ttft_ms)), self._slos, shifts)

    def _decode_alone(self, times: Latencies) -> Verdict:
        """A decode pool's own wait and first step are a part of TTFT, so they must fit into its limit at least."""
        return judged(times, self._slos, [0.0] * len(self._slos))

    def _with_more(self, role: PoolRole, half: Half) -> list[int]:
        found = [self._keep(half)]
        rate = self._rater.load.rate_p90_per_s
        for more in _MORE_REPLICAS[1:]:
            serving = half.serving_count + more
            total = half.total_count + more
            if total * self._devices(half.option) > self._stock(half.option):
                break
            found.append(
                self._keep(Half(half.option, serving, total, self._rater.half(role, half.option, serving, rate)))
            )
        return found

    def _pairs(self, topology: Topology, prefill: list[int], decode: list[int]) -> Rows:
        self._considered += len(prefill) * len(decode)
        first = np.repeat(np.array(prefill, dtype=np.int64), len(decode))
        second = np.tile(np.array(decode, dtype=np.int64), len(prefill))
        counts = self._counts(first) + self._counts(second)
        if not len(first):
            return Rows(topology, first, second, counts, np.zeros(0), self._purchasing.bill(counts))
        late_ms = self._hand_over(prefill, decode)
        before = latencies([self._halves[index].served for index in prefill]).ttft_ms
        after = latencies([self._halves[index].served for index in decode])
        ttft = (before[:, None, :] + (late_ms + after.ttft_ms[None, :, 0])[:, :, None]).reshape(-1, 3)
        tpot = np.broadcast_to(after.tpot_ms[None], (len(prefill), *after.tpot_ms.shape)).reshape(-1, 3)
        shifts = np.repeat(
            np.array([self._rater.shifts_ms(self._halves[index].option) for index in prefill]), len(decode), axis=0
        )
        verdict = judged(Latencies(ttft, tpot), self._slos, shifts)
        rows = Rows(topology, first, second, counts, verdict.use, _empty_bill())
        if self._ceiling is None:
            self._note_pairs(topology, verdict, rows, np.isnan(late_ms).reshape(-1))
        return self._bought(topology, _taken(rows, verdict.meets))

    def _hand_over(self, prefill: list[int], decode: list[int]) -> Floats:
        """Milliseconds of the KV's way, float64[prefill, decode]; of the decode side only its network counts."""
        sides: dict[tuple[float | None, int], list[int]] = {}
        for place, index in enumerate(decode):
            option = self._halves[index].option
            sides.setdefault((option.offer.scaleout_bytes_per_s, option.shape.device_count), []).append(place)
        told = np.empty((len(prefill), len(decode)))
        for row, index in enumerate(prefill):
            for places in sides.values():
                told[row, places] = self._rater.hand_over_ms(
                    self._halves[index].option, self._halves[decode[places[0]]].option
                )
        return told

    def _note_pairs(self, topology: Topology, verdict: Verdict, rows: Rows, unknown: NDArray[np.bool_]) -> None:
        """One refusal for the first pair of each reason; the search counts, it does not list thousands."""
        failed = np.flatnonzero(~verdict.meets)
        # Nearest to its limit first, so that the one that is noted is the closest.
        nearest = failed[np.argsort(verdict.over[failed], kind="stable")]
        noted: set[tuple[str, str, RejectionReason]] = set()
        for index in nearest.tolist():
            halves = self._halves[rows.first[index]], self._halves[rows.second[index]]
            reason = RejectionReason.LINK_UNKNOWN if unknown[index] else verdict.reason(index)
            names = halves[0].option.offer.name, halves[1].option.offer.name
            if reason is None or (*names, reason) in noted:
                continue
            noted.add((*names, reason))
            detail = "the network between the pools is not known: give network_gb_per_s in the spec"
            if reason is not RejectionReason.LINK_UNKNOWN:
                detail = miss_words(verdict, index)
            what = " + ".join(described(half.option) for half in halves)
            over = float(verdict.over[index])
            self._refusals.append(
                (topology, PoolRole.BOTH, Refusal(f"{names[0]} + {names[1]}", what, reason, detail, over))
            )

    # Sizes

    def _smallest(
        self, topology: Topology, role: PoolRole, option: EngineOption, judge: Callable[[Latencies], Verdict]
    ) -> Half | None:
        """The fewest replicas that keep the promise at P90, with spares; None is noted with its reason."""
        most = self._most(option)
        if most < 1:
            self._refuse(topology, role, option, RejectionReason.INVENTORY, self._none_words(option))
            return None
        load, rate = self._rater.load, self._rater.load.rate_p90_per_s
        serving = self._bisect(role, option, judge, rate, most)
        if serving is None:
            if self._ceiling is None:
                self._refuse_all(topology, role, option, judge, most)
            return None
        quiet = serving
        spare = self._fleet.spare
        # The quiet hours are asked about only where a spare rule looks at them.
        if spare.total_count(serving, 1) != spare.total_count(serving, serving):
            quiet = self._bisect(role, option, judge, load.rate_p50_per_s, serving) or serving
        total = spare.total_count(serving, quiet)
        if total > most:
            detail = f"{serving} serving and {total - serving} spare replicas; inventory holds {most}"
            self._refuse(topology, role, option, RejectionReason.INVENTORY, detail, over_ratio=total / most)
            return None
        return Half(option, serving, total, self._rater.half(role, option, serving, rate))

    def _refuse_all(
        self,
        topology: Topology,
        role: PoolRole,
        option: EngineOption,
        judge: Callable[[Latencies], Verdict],
        most: int,
    ) -> None:
        """Note why not even all replicas that there are keep the promise."""
        rate = self._rater.load.rate_p90_per_s
        served = self._rater.half(role, option, most, rate)
        verdict = judge(latencies([served]))
        reason = verdict.reason(0) or RejectionReason.GOODPUT_MISSED
        detail = f"with {_all_words(most)} at {rate:g} requests/s: "
        over = float(verdict.over[0])
        if math.isinf(served.ttft_mean_ms):
            reason = RejectionReason.LOAD_NOT_CARRIED
            detail += f"the queue grows without end, as it does from {rate / served.utilisation_ratio:.2f}/s on"
            over = served.utilisation_ratio
        else:
            detail += miss_words(verdict, 0)
        self._refuse(topology, role, option, reason, detail, over_ratio=over)

    def _bisect(
        self, role: PoolRole, option: EngineOption, judge: Callable[[Latencies], Verdict], rate: float, most: int
    ) -> int | None:
        """The fewest replicas, at most `most`, that keep the promise at the rate; None when `most` do not.

        Fewer than the rate over what one carries never do, so the search begins there and doubles its steps: the work
        grows with what the load needs, not with what there is to buy.
        """

        def holds(count: int) -> bool:
            served = self._rater.half(role, option, count, rate)
            # A queue that grows without end keeps no promise; that is most of what is asked.
            return math.isfinite(served.ttft_mean_ms) and bool(judge(latencies([served])).meets[0])

        needed = math.ceil(rate / self._rater.carried_per_s(role, option) * (1 - _ROUNDING_RATIO))
        if needed > most:
            return None
        high = max(1, needed)
        if holds(high):
            return high
        if high == most or not holds(most):
            return None
        failed, high, step = high, min(most, high + 1), 2
        while high < most and not holds(high):
            failed, high, step = high, min(most, high + step), 2 * step
        while high - failed > 1:
            middle = (failed + high) // 2
            if holds(middle):
                high = middle
            else:
                failed = middle
        return high

    def _passes_bounds(self, topology: Topology, role: PoolRole, option: EngineOption) -> bool:
        if role is not PoolRole.DECODE and not option.offer.hardware.can_prefill:
            detail = f"the catalogue has no FLOP/s of {option.offer.name}; it may serve decode or FFN only"
            self._refuse(topology, role, option, RejectionReason.NO_COMPUTE_FIGURE, detail)
            return False
        try:
            self._rater.steps(option)
        except ConfigError as fault:
            self._refuse(topology, role, option, RejectionReason.FACTS_UNKNOWN, str(fault))
            return False
        if option.chips is not None:
            return True
        for each in self._rater.load.classes:
            prompts, answers = role is not PoolRole.DECODE, role is not PoolRole.PREFILL
            broken = promise_below_bound(self._rater.bounds(option, each), each, prompts=prompts, answers=answers)
            if broken is not None:
                self._refuse(topology, role, option, *broken)
                return False
        return True

    # Book-keeping

    def _refuse(
        self,
        topology: Topology,
        role: PoolRole,
        option: EngineOption,
        reason: RejectionReason,
        detail: str,
        *,
        over_ratio: float = math.inf,
    ) -> None:
        if self._ceiling is not None:
            return  # nobody is told
        refusal = Refusal(option.offer.name, described(option), reason, detail, over_ratio)
        self._refusals.append((topology, role, refusal))

    def _keep(self, half: Half) -> int:
        self._halves.append(half)
        return len(self._halves) - 1

    def _devices(self, option: EngineOption) -> int:
        return option.shape.device_count

    def _most(self, option: EngineOption) -> int:
        """Replicas that the inventory's whole units hold and, where there is a ceiling, that it pays for."""
        most = self._stock(option) // self._devices(option)
        if self._ceiling is None:
            return most
        most = min(most, self._purchasing.affordable_devices(option.offer.name, self._ceiling) // self._devices(option))
        if option.chips is not None:
            chips = self._purchasing.affordable_devices(option.chips.name, self._ceiling)
            most = min(most, chips // option.chip_count)
        return most

    def _none_words(self, option: EngineOption) -> str:
        sides = [(option.offer, self._devices(option))]
        sides += [] if option.chips is None else [(option.chips, option.chip_count)]
        return "; ".join(
            f"one replica takes {needed} {offer.name}, whole units of the inventory hold "
            f"{self._purchasing.stock_devices(offer.name)}"
            for offer, needed in sides
            if needed > self._purchasing.stock_devices(offer.name)
        )

    def _stock(self, option: EngineOption) -> int:
        stock = self._purchasing.stock_devices(option.offer.name)
        if option.chips is None:
            return stock
        replicas = self._purchasing.stock_devices(option.chips.name) // option.chip_count
        return min(stock, replicas * self._devices(option))

    def _counts(self, indices: Ints) -> Ints:
        rows = [
            self._purchasing.row(PoolPlan(PoolRole.BOTH, half.option, half.total_count, 0).device_counts())
            for half in self._halves
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, len(self._purchasing.names))[indices]

    def _bought(self, topology: Topology, rows: Rows) -> Rows:
        """Rows that inventory and racks allow, priced; the nearest (then cheapest) of each refusal is noted."""
        bill = self._purchasing.bill(rows.counts)
        if self._ceiling is not None:
            return _taken(Rows(topology, rows.first, rows.second, rows.counts, rows.use, bill), bill.allowed)
        stock = self._purchasing.stock_ratio(bill.units)
        power = self._purchasing.power_ratio(bill.units)
        for over, reason, kept in (
            (stock, RejectionReason.INVENTORY, bill.in_stock),
            (np.where(bill.in_stock, power, 0.0), RejectionReason.POWER, bill.in_power | ~bill.in_stock),
        ):
            short = np.flatnonzero(~kept)
            if len(short):
                index = int(short[np.lexsort((bill.usd_per_h[short], over[short]))[0]])
                detail = self._purchasing.shortage_words(bill.units[index])
                if len(short) > 1:
                    detail += f" (the nearest of {len(short)})"
                halves = [self._halves[each] for each in (rows.first[index], rows.second[index]) if each >= 0]
                what = " + ".join(_half_words(half) for half in halves)
                names = " + ".join(self._purchasing.devices(bill.units[index]))
                self._refusals.append(
                    (topology, PoolRole.BOTH, Refusal(names, what, reason, detail, float(over[index])))
                )
        return _taken(Rows(topology, rows.first, rows.second, rows.counts, rows.use, bill), bill.allowed)


def _all_words(count: int) -> str:
    return "the only replica" if count == 1 else f"all {count} replicas"


def _half_words(half: Half) -> str:
    """A pool in words; its spares are told because they may be what does not fit."""
    spare = half.total_count - half.serving_count
    told = "" if not spare else " with 1 spare" if spare == 1 else f" with {spare} spares"
    return f"{half.total_count} x ({described(half.option)}){told}"


def _empty_bill() -> Bill:
    nothing = np.zeros((0, 0), dtype=np.int64)
    return Bill(nothing, np.zeros(0), np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.bool_))


def _taken(rows: Rows, keep: NDArray[np.bool_]) -> Rows:
    bill = rows.bill
    if len(bill.usd_per_h):
        bill = Bill(bill.units[keep], bill.usd_per_h[keep], bill.in_stock[keep], bill.in_power[keep])
    return Rows(rows.topology, rows.first[keep], rows.second[keep], rows.counts[keep], rows.use[keep], bill)


def described(option: EngineOption) -> str:
    """An engine in words."""
    shape = option.shape
    parts = [f"{option.offer.name} {cut_words(shape)}"]
    parts.append(f"{shape.weight_format} weights, {shape.kv_format} KV, chunk {option.chunk_tokens}")
    if option.chips is not None:
        parts.append(f"with its feed-forward half on {option.chip_count} {option.chips.name}")
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that is yet to be asked of the full model: its pools, and what it costs alone."""

    topology: Topology
    pools: tuple[PoolPlan, ...]
    usd_per_h: float
    use_ratio: float

    @property
    def key(self) -> tuple[str, ...]:
        """Names it; breaks ties."""
        parts = [str(self.topology)]
        for pool in self.pools:
            parts += [f"{pool.replica_count:05d}", *pool.option.key]
        return tuple(parts)

    @property
    def family(self) -> tuple[object, ...]:
        """The same for trials that differ in chunk size or KV format only."""
        return (
            "family",
            self.topology,
            *(
                part
                for pool in self.pools
                for part in (pool.serving_count, *pool.option.key[:7], str(pool.option.shape.weight_format))
            ),
        )

    @property
    def order(self) -> tuple[float, float, tuple[str, ...]]:
        """Cheaper first, then roomier, then by key."""
        return (round(self.usd_per_h, 6), round(self.use_ratio, 9), self.key)

    def device_counts(self) -> dict[str, int]:
        """Devices by the name of their offer."""
        return added_counts(pool.device_counts() for pool in self.pools)

    def larger(self, place: int, purchasing: Purchasing) -> Trial | None:
        """The same with one more serving replica of a pool; None when that may not be bought."""
        pools = tuple(
            replace(pool, serving_count=pool.serving_count + 1) if index == place else pool
            for index, pool in enumerate(self.pools)
        )
        counts = purchasing.row(added_counts(pool.device_counts() for pool in pools))
        bill = purchasing.bill(counts[None, :])
        if not bill.allowed[0]:
            return None
        return Trial(self.topology, pools, float(bill.usd_per_h[0]), self.use_ratio)


def trial(group: GroupCandidates, rows: Rows, index: int) -> Trial:
    """One row as a trial."""
    first = group.halves[int(rows.first[index])]
    if int(rows.second[index]) < 0:
        pools: tuple[PoolPlan, ...] = (_pool(PoolRole.BOTH, first),)
    else:
        second = group.halves[int(rows.second[index])]
        decode = PoolRole.ATTENTION if rows.topology is Topology.AFD else PoolRole.DECODE
        pools = (_pool(PoolRole.PREFILL, first), _pool(decode, second))
    return Trial(rows.topology, pools, float(rows.bill.usd_per_h[index]), float(rows.use[index]))


def _pool(role: PoolRole, half: Half) -> PoolPlan:
    return PoolPlan(role, half.option, half.serving_count, half.total_count - half.serving_count)


@dataclass(frozen=True, slots=True)
class Missed:
    """A trial that the full model refuses: the first promise it breaks and what would have been seen."""

    reason: RejectionReason
    predicted: Prediction


def confirmed(group: GroupCandidates, tried: Trial) -> Candidate | Missed:
    """The trial as the full model sees it at the P90 rate."""
    rater = group.rater
    served = rater.full(tried.pools, rater.load.rate_p90_per_s)
    slos = [each.slo for each in rater.load.classes]
    verdict = judged(latencies([served]), slos, rater.shifts_ms(tried.pools[0].option))
    told = prediction(served, verdict, 0, slos[0])
    reason = verdict.reason(0)
    if reason is not None:
        return Missed(reason, told)
    return Candidate(rater.load.names, tried.topology, tried.pools, told)


def trials(group: GroupCandidates) -> Iterator[Trial]:
    """All rows of a group in the order of `Trial.order`, made as they are asked for: few of thousands are."""
    sized = [rows for rows in group.rows if len(rows.first)]
    if not sized:
        return
    usd = np.concatenate([rows.bill.usd_per_h for rows in sized]).round(6)
    use = np.concatenate([rows.use for rows in sized]).round(9)
    owner = np.concatenate([np.full(len(rows.first), place) for place, rows in enumerate(sized)])
    index = np.concatenate([np.arange(len(rows.first)) for rows in sized])
    order = np.lexsort((use, usd))
    starts = np.flatnonzero(np.diff(usd[order], prepend=np.nan) + np.diff(use[order], prepend=np.nan) != 0)
    for low, high in zip(starts, [*starts[1:], len(order)], strict=True):
        tied = [trial(group, sized[int(owner[place])], int(index[place])) for place in order[low:high]]
        yield from sorted(tied, key=lambda each: each.order)


def words(tried: Trial | Candidate) -> str:
    """A candidate in words."""
    return " + ".join(f"{pool.replica_count} x ({described(pool.option)})" for pool in tried.pools)
