"""Figures of the comparison that are pure arithmetic: the load a policy carries, paired differences, what bars say.

Owns: the next count of copies to try, the count that is carried, pairing over seeds, and the verdicts. Does not own:
running anything (`router_play`) or the table (`router_table`). A search gets what is known and says what to try, so
that the searches of all policies go on side by side and after an interruption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# How much further a search goes from its last count while it has only seen passes, or only failures. [judgement]
_STEPS = (1.25, 1.5, 2.0)
# A policy that carries fewer copies than this share of ours is far behind; its exact figure is not sought. [judgement]
LEAST_SHARE = 0.3
# Counts beyond which nobody looks.
_MOST_COPIES = 20_000


@dataclass(frozen=True, slots=True)
class Search:
    """What decides a search: a count passes with `bar_ratio` good requests; two counts closer than `resolution_ratio`
    (or 1) need no third between them; below `least_share` of the guess nothing is tried."""

    guess: int
    bar_ratio: float
    resolution_ratio: float
    least_share: float = 0.0


def next_copies(search: Search, known: Mapping[int, float]) -> int | None:
    """The count to try next, given goodput by count; None: the carried load is known."""
    if not known:
        return search.guess
    passing = [count for count, good in known.items() if good >= search.bar_ratio]
    low = max(passing, default=0)
    failing = [count for count in known if count > low]
    if not failing:
        step = _STEPS[min(len(passing), len(_STEPS)) - 1]
        return None if low >= _MOST_COPIES else max(low + 1, round(low * step))
    high = min(failing)
    if low == 0:
        if high == 1 or high < search.guess * search.least_share:
            return None
        return max(1, min(high - 1, round(high / _STEPS[min(len(failing), len(_STEPS)) - 1])))
    if high - low <= max(1.0, search.resolution_ratio * low):
        return None
    return (low + high) // 2


def carried(search: Search, known: Mapping[int, float]) -> int:
    """The most copies that passed; 0: none that was tried."""
    return max((count for count, good in known.items() if good >= search.bar_ratio), default=0)


def is_monotone(search: Search, known: Mapping[int, float]) -> bool:
    """Whether no count failed below one that passed."""
    top = carried(search, known)
    return all(good >= search.bar_ratio for count, good in known.items() if count <= top)


@dataclass(frozen=True, slots=True)
class Paired:
    """Mean of the differences over common seeds and its standard error (None for one seed)."""

    mean: float
    error: float | None
    count: int


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    """Ours less theirs, seed by seed. Raises ValueError without a common seed."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]
    if not differences:
        raise ValueError("no seed is common to both; expected at least one")
    count = len(differences)
    mean = math.fsum(differences) / count
    if count == 1:
        return Paired(mean, None, 1)
    spread = math.fsum((each - mean) ** 2 for each in differences) / (count - 1)
    return Paired(mean, math.sqrt(spread / count), count)


def excess_removed(best_s: float, ours_s: float, floor_s: float) -> float | None:
    """Share of the best baseline's mean TTFT above the floor that ours does not have; None: there is no excess."""
    excess_s = best_s - floor_s
    return (best_s - ours_s) / excess_s if excess_s > 0 else None


@dataclass(frozen=True, slots=True)
class Bars:
    """What must hold. Source: the comparison's definition, before any tuning."""

    goodput_points: float = -0.3
    better_share: float = 0.5
    carried_ratio: float = 1.0
    excess_removed_ratio: float = 0.3


@dataclass(frozen=True, slots=True)
class CaseLoad:
    """One trace on one engines file at one load. `points`: goodput of ours less the best baseline's, in points."""

    trace: str
    engines: str
    load_ratio: float
    points: Paired
    best: str
    excess_removed_ratio: float | None


@dataclass(frozen=True, slots=True)
class CaseCarried:
    """One trace on one engines file: carried copies of ours and of the best baseline."""

    trace: str
    engines: str
    ours: int
    best: int
    best_name: str


def missed(loads: Sequence[CaseLoad], carries: Sequence[CaseCarried], agents: Sequence[str], bars: Bars) -> list[str]:
    """A sentence for each bar that is not held."""
    found = []
    for case in loads:
        where = f"{case.trace} on {case.engines} at {case.load_ratio:.0%}"
        if case.points.mean < bars.goodput_points:
            found.append(
                f"{where}: goodput is {case.points.mean:+.2f} points from {case.best}'s; "
                f"expected at least {bars.goodput_points:+.1f}"
            )
        share = case.excess_removed_ratio
        if case.trace in agents and share is not None and share < bars.excess_removed_ratio:
            found.append(
                f"{where}: {share:.0%} of the mean-TTFT excess is removed; expected {bars.excess_removed_ratio:.0%}"
            )
    better = sum(case.points.mean > 0 for case in loads)
    if loads and better < bars.better_share * len(loads):
        found.append(f"goodput is better in {better} of {len(loads)} cases; expected {bars.better_share:.0%}")
    found.extend(
        f"{carry.trace} on {carry.engines}: {carry.ours} copies are carried, {carry.best_name} carries {carry.best}"
        for carry in carries
        if carry.ours < bars.carried_ratio * carry.best
    )
    return found
