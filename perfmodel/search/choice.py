"""Which candidates of which groups become the plan: the cheapest combination that holds when it is played out.

Owns: which candidates are asked of the full model, the check of the winner, and replicas that bought units leave room
for. Does not own: the candidates (`candidates`), combinations under one inventory (`fronts`), prices (`purchase`), the
partition into groups or the words for what was not chosen (`cheapest`). A candidate passes three judges, each dearer
than the one before: the closed form by halves, the full model, and the check; only the cheapest ever meet the last one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.search.candidates import GroupCandidates, Ints, Missed, Trial, confirmed, trials
from perfmodel.search.fronts import Front, cheapest_together
from perfmodel.search.plan import Candidate, Plan, RejectionReason
from perfmodel.search.purchase import SAME_COST_RATIO, Purchasing

# Candidates of one cost that are asked of the full model to find the roomiest: enough for all chunk sizes of an engine.
_MOST_TIED = 12

# A candidate that the check finds this far below the promise takes its siblings with it: the same engines with another
# chunk size or KV format, which the full model rated lower.
_CLEAR_MISS_RATIO = 0.02

# Combinations that are played out before the search gives up; the check costs a thousand times a closed form.
_MOST_CHECKED = 60

# A group, one of its trials, and what the full model says of it.
Pick = tuple[GroupCandidates, Trial, Candidate]
Miss = tuple[GroupCandidates, Trial, Missed]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One confirmed candidate per group, and what they cost together."""

    picks: tuple[Pick, ...]
    usd_per_h: float

    @property
    def order(self) -> tuple[float, float, tuple[tuple[str, ...], ...]]:
        """Cheaper first, then roomier, then by key."""
        use = max(_use(group, found) for group, _, found in self.picks)
        return (round(self.usd_per_h, 6), round(use, 9), tuple(found.key for _, _, found in self.picks))


def _use(group: GroupCandidates, found: Candidate) -> float:
    told = found.predicted
    return max(
        max(told.ttft_percentile_ms / one.slo.ttft_ms, told.tpot_percentile_ms / one.slo.tpot_ms)
        for one in group.rater.load.classes
    )


class Chooser:
    """Finds the cheapest choice. Mutable: it remembers what was refused and checked, and why."""

    def __init__(self, purchasing: Purchasing) -> None:
        self._purchasing = purchasing
        self.missed: dict[str, Miss] = {}
        self._banned: set[tuple[object, ...]] = set()
        self._checked: dict[tuple[object, ...], bool] = {}
        self._fronts: dict[tuple[str, ...], Front] = {}

    def cheapest(self, groups: list[GroupCandidates], ceiling: float | None) -> Choice | None:
        """The cheapest choice that passes the check; None when there is none at or below the ceiling (USD an hour)."""
        for _ in range(_MOST_CHECKED):
            choices = self._tied(groups, ceiling)
            if not choices:
                return None
            for choice in sorted(choices, key=lambda each: each.order):
                if any(self._is_banned(group, tried) for group, tried, _ in choice.picks):
                    continue
                if all([self._passes(pick) for pick in choice.picks]):
                    return choice
        return None

    def _passes(self, pick: Pick) -> bool:
        group, tried, found = pick
        key = (group.rater.load.names, tried.key)
        if key not in self._checked:
            needed = max(each.slo.goodput_ratio for each in group.rater.load.classes)
            seen = group.rater.checked_goodput(tried.pools)
            self._checked[key] = seen is None or seen >= needed
            if seen is not None and seen < needed:
                self._banned.add(key)
                if seen < needed - _CLEAR_MISS_RATIO:
                    self._banned.add((group.rater.load.names, tried.family))
                told = replace(found.predicted, goodput_ratio=seen)
                self._note((group, tried, Missed(RejectionReason.GOODPUT_MISSED, told)))
        return self._checked[key]

    def refused(self, group: GroupCandidates, tried: Trial) -> bool:
        """Whether the trial, or a sibling that was rated higher, missed when it was played out."""
        return f"{group.rater.load.names} {tried.key}" in self.missed or self._is_banned(group, tried)

    def _is_banned(self, group: GroupCandidates, tried: Trial) -> bool:
        names = group.rater.load.names
        return (names, tried.key) in self._banned or (names, tried.family) in self._banned

    def _note(self, miss: Miss) -> None:
        group, tried, _ = miss
        self.missed.setdefault(f"{group.rater.load.names} {tried.key}", miss)

    def _tied(self, groups: list[GroupCandidates], ceiling: float | None) -> list[Choice]:
        """The choices of the least cost, before the check."""
        if len(groups) == 1:
            return [Choice((pick,), pick[1].usd_per_h) for pick in self._cheapest_of(groups[0], ceiling)]
        fronts = [self._front(group) for group in groups]
        while (found := cheapest_together(fronts, self._purchasing, ceiling)) is not None:
            rows = found.places[:_MOST_TIED]
            asked = sorted({(at, place) for row in rows.tolist() for at, place in enumerate(row)})
            picks = {(at, place): self._standing(fronts[at], place) for at, place in asked}
            chosen = [[picks[at, place] for at, place in enumerate(row)] for row in rows.tolist()]
            if None not in picks.values():
                return [Choice(tuple(each for each in row if each), found.usd_per_h) for row in chosen]
        return []

    def _front(self, group: GroupCandidates) -> Front:
        names = group.rater.load.names
        if names not in self._fronts:
            self._fronts[names] = Front(group, self._purchasing)
        return self._fronts[names]

    def _standing(self, front: Front, place: int) -> Pick | None:
        """The candidate of this set of devices that the full model confirms; None: it refuses all. A refused one is
        tried again with a replica more.
        """
        group = front.group
        while (tried := front.standing(place)) is not None:
            found = confirmed(group, tried)
            if isinstance(found, Candidate) and not self._is_banned(group, tried):
                return group, tried, found
            if isinstance(found, Missed):
                self._note((group, tried, found))
            front.refuse(place)
        return None

    def _cheapest_of(self, group: GroupCandidates, ceiling: float | None) -> list[Pick]:
        """The cheapest candidates that the full model confirms, of one cost. A refused one is tried again with a
        replica more.
        """
        queue = _Queue(group)
        picks: list[Pick] = []
        while len(picks) < _MOST_TIED and (tried := queue.pop()) is not None:
            if ceiling is not None and tried.usd_per_h > ceiling * (1 + SAME_COST_RATIO):
                break
            if picks and tried.usd_per_h > picks[0][1].usd_per_h * (1 + SAME_COST_RATIO):
                break
            banned = self._is_banned(group, tried)
            found = confirmed(group, tried)
            if isinstance(found, Candidate) and not banned:
                picks.append((group, tried, found))
                continue
            if isinstance(found, Missed):
                self._note((group, tried, found))
            queue.push_larger(tried, self._purchasing)
        return picks


class _Queue:
    """Trials of a group, cheapest first: its rows as they come, and larger ones that were pushed. Mutable: a queue."""

    def __init__(self, group: GroupCandidates) -> None:
        self._coming = trials(group)
        self._following = next(self._coming, None)
        self._pushed: list[tuple[tuple[float, float, tuple[str, ...]], Trial]] = []
        self._seen: set[tuple[str, ...]] = set()

    def pop(self) -> Trial | None:
        """The next trial that was not seen yet."""
        while True:
            following = self._following
            if following is not None and (not self._pushed or following.order <= self._pushed[0][0]):
                tried, self._following = following, next(self._coming, None)
            elif self._pushed:
                tried = heapq.heappop(self._pushed)[1]
            else:
                return None
            if tried.key not in self._seen:
                self._seen.add(tried.key)
                return tried

    def push_larger(self, tried: Trial, purchasing: Purchasing) -> None:
        """The same with one more replica of each pool in turn."""
        for place in range(len(tried.pools)):
            larger = tried.larger(place, purchasing)
            if larger is not None and larger.key not in self._seen:
                heapq.heappush(self._pushed, (larger.order, larger))


def plan_of(choice: Choice, purchasing: Purchasing) -> Plan:
    """The plan, with replicas added where bought units leave devices over: they are paid for anyway."""
    counts = np.sum([purchasing.row(found.device_counts()) for _, _, found in choice.picks], axis=0)
    bill = purchasing.bill(counts[None, :])
    devices = purchasing.devices(bill.units[0])
    left = purchasing.row(devices) - counts
    candidates = []
    for group, tried, found in choice.picks:
        filled, left = _filled(group, tried, found, purchasing, left)
        candidates.append(filled)
    units = {name: int(count) for name, count in zip(purchasing.names, bill.units[0].tolist(), strict=True) if count}
    return Plan(
        candidates=tuple(candidates),
        device_counts=devices,
        unit_counts=units,
        usd_per_h=float(bill.usd_per_h[0]),
        watts=purchasing.watts(bill.units[0]),
    )


def _filled(
    group: GroupCandidates, tried: Trial, found: Candidate, purchasing: Purchasing, left: Ints
) -> tuple[Candidate, Ints]:
    """The candidate with more serving replicas, pool after pool, as long as devices are left and the promise holds."""
    grown = True
    while grown:
        grown = False
        for place, pool in enumerate(tried.pools):
            one = purchasing.row(replace(pool, serving_count=1, spare_count=0).device_counts())
            larger = tried.larger(place, purchasing) if (one <= left).all() else None
            better = None if larger is None else confirmed(group, larger)
            if larger is not None and isinstance(better, Candidate):
                tried, found, left, grown = larger, better, left - one, True
    return found, left
