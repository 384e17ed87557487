"""What would change a plan: prices at which another accelerator wins, the hit ratio, and a looser or tighter promise.

Owns: break-even prices over all candidates of a group, and repeated searches on a short list of engines. Does not own:
the search itself (`search`). A repeated search varies one input and keeps the engines that came closest, so it is quick
and its answer is a bound: among all engines the plan may change a little earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.search.candidates import GroupCandidates, Trial, confirmed, trial
from perfmodel.search.cheapest import Problem, Sized, size
from perfmodel.search.check import CHECK_SEEDS, replayed
from perfmodel.search.plan import Candidate, Offer, Plan, TrafficClass
from perfmodel.search.rating import Memory

# Hit ratios that are tried: steps of a tenth tell whether the cache decides, not more.
_HIT_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

# Factors on a latency limit that are tried, nearest first.
_LOOSER = (1.1, 1.25, 1.5, 2.0, 3.0)
_TIGHTER = (0.9, 0.8, 0.67, 0.5, 0.33)

# Candidates of each topology, cheapest first, whose engines a repeated search looks at.
_SHORT_LIST = 200

# Kinds of engines that are asked of the full model before no break-even price is told.
_MOST_CONFIRMED = 40


@dataclass(frozen=True, slots=True)
class BreakEven:
    """An accelerator and the price at which the plan changes.

    `in_plan` False: below `usd_per_h` a candidate with it is cheaper than the plan. True: above it, one without it is.
    `usd_per_h` None: none of the candidates that were tried wins, even for nothing (or, in the plan, can take its
    place).
    """

    offer_name: str
    in_plan: bool
    offered_usd_per_h: float
    usd_per_h: float | None


@dataclass(frozen=True, slots=True)
class Flip:
    """The nearest value of an input at which the plan changes: what it is then and what it costs (None: nothing
    fits).
    """

    field: str
    value: str
    was: str
    plan: str | None
    usd_per_h: float | None


def plan_words(plan: Plan) -> str:
    """A plan in one line: topology and replicas by role and device."""
    parts = []
    for each in plan.candidates:
        pools = " + ".join(
            f"{pool.replica_count} x {pool.option.offer.name} TP{pool.option.shape.tensor_parallel_count}"
            f" {pool.option.shape.weight_format} {pool.role}"
            for pool in each.pools
        )
        parts.append(f"{each.topology}: {pools}")
    return "; ".join(parts)


def break_evens(sized: Sized, offers: tuple[Offer, ...]) -> list[BreakEven]:
    """Break-even price of every offer, over all candidates of the plan's group. One group only: with several, the price
    of one group's devices moves the others' too, and the list is empty.
    """
    plan = sized.plan
    if plan is None or len(plan.candidates) != 1:
        return []
    group = next(each for each in sized.groups if each.rater.load.names == plan.candidates[0].classes)
    found = []
    for column, offer in enumerate(offers):
        in_plan = offer.name in plan.device_counts
        price = _price_without(group, plan, offer, column) if in_plan else _price_with(group, plan, offer, column)
        found.append(BreakEven(offer.name, in_plan, offer.usd_per_h, price))
    return found


def _price_with(group: GroupCandidates, plan: Plan, offer: Offer, column: int) -> float | None:
    """The highest price at which some candidate with the offer costs what the plan does."""
    prices: list[tuple[float, int, int]] = []
    for place, rows in enumerate(group.rows):
        devices = rows.bill.units[:, column] * offer.unit.device_count
        for index in np.flatnonzero(devices).tolist():
            rest = float(rows.bill.usd_per_h[index]) - offer.usd_per_h * float(devices[index])
            prices.append(((plan.usd_per_h - rest) / float(devices[index]), place, index))
    prices.sort(reverse=True)
    tried: set[tuple[object, ...]] = set()
    for price, place, index in prices:
        each = trial(group, group.rows[place], index)
        if price <= 0 or len(tried) >= _MOST_CONFIRMED:
            break
        if each.family not in tried:
            tried.add(each.family)
            if _holds(group, each):
                return price
    return None


def _price_without(group: GroupCandidates, plan: Plan, offer: Offer, column: int) -> float | None:
    """The price at which the cheapest candidate without the offer costs what the plan does."""
    devices = plan.device_counts[offer.name]
    rest = plan.usd_per_h - devices * offer.usd_per_h
    rows_by_cost = sorted(
        (float(rows.bill.usd_per_h[index]), float(rows.use[index]), place, index)
        for place, rows in enumerate(group.rows)
        for index in np.flatnonzero(rows.bill.units[:, column] == 0).tolist()
    )
    tried: set[tuple[object, ...]] = set()
    for usd, _, place, index in rows_by_cost:
        each = trial(group, group.rows[place], index)
        if each.family in tried:
            continue
        if len(tried) >= _MOST_CONFIRMED:
            break
        tried.add(each.family)
        if _holds(group, each):
            return (usd - rest) / devices
    return None


def _holds(group: GroupCandidates, tried: Trial) -> bool:
    """Whether the full model lets the candidate pass, and it is not one that the search played out and saw fail."""
    if not isinstance(confirmed(group, tried), Candidate):
        return False
    seen = group.rater.known_goodput(tried.pools)
    return seen is None or all(seen >= each.slo.goodput_ratio for each in group.rater.load.classes)


def shortened(problem: Problem, sized: Sized) -> Problem:
    """The problem with the engines of the cheapest candidates only, one seed, no check: for searches by the dozen."""
    keys: set[tuple[str, ...]] = set()
    for group in sized.groups:
        for rows in group.rows:
            order = np.lexsort((rows.use, rows.bill.usd_per_h))[:_SHORT_LIST]
            for column in (rows.first, rows.second):
                keys.update(group.halves[index].option.key for index in np.unique(column[order]).tolist() if index >= 0)
    memory = Memory()
    if problem.memory is not None:
        memory.steps = problem.memory.steps
    model = None if problem.full_model is None else replayed(seeds=CHECK_SEEDS[:1])
    return replace(problem, full_model=model, check=None, only=frozenset(keys), memory=memory)


def hit_ratio_flips(problem: Problem, plan: Plan, current: Plan | None = None) -> list[Flip]:
    """The nearest higher and lower cached share of prompts at which the plan changes, of all classes moved together.

    `current`: the plan that is told, where it is not the one by calculation.
    """
    now = max(each.demand.cached_ratio for each in problem.classes)
    found = []
    for easier, ratios in (
        (True, [ratio for ratio in _HIT_RATIOS if ratio > now + 1e-9]),
        (False, [ratio for ratio in reversed(_HIT_RATIOS) if ratio < now - 1e-9]),
    ):
        steps = [(f"{ratio:g}", _with_hits(ratio)) for ratio in ratios]
        flip = _first_flip(problem, _Limits.of(plan, current, easier=easier), "cached_ratio", f"{now:g}", steps)
        found += [] if flip is None else [flip]
    return found


def input_flips(problem: Problem, sized: Sized) -> list[Flip]:
    """All flips of the cached share and of the promise, among the engines of the cheapest candidates.

    They are found by calculation: costs are compared with the plan's by calculation, which may be cheaper than the one
    that the check let pass.
    """
    short = shortened(problem, sized)
    base = size(short).plan
    if base is None:
        return []
    return [*hit_ratio_flips(short, base, sized.plan), *slo_flips(short, base, sized.plan)]


def slo_flips(problem: Problem, plan: Plan, current: Plan | None = None) -> list[Flip]:
    """For TTFT and TPOT: the nearest looser limit that makes the plan cheaper and the nearest tighter one that
    changes it. `current` as in `hit_ratio_flips`.
    """
    found = []
    for field in ("ttft_ms", "tpot_ms"):
        now = "/".join(f"{getattr(each.slo, field):g}" for each in problem.classes)
        for factors in (_LOOSER, _TIGHTER):
            steps = []
            for factor in factors:
                value = "/".join(f"{getattr(each.slo, field) * factor:g}" for each in problem.classes)
                steps.append((value, _with_limit(field, factor)))
            limits = _Limits.of(plan, current, easier=factors is _LOOSER)
            flip = _first_flip(problem, limits, f"slo.{field}", now, steps)
            found += [] if flip is None else [flip]
    return found


Change = Callable[[TrafficClass], TrafficClass]


def _with_hits(ratio: float) -> Change:
    def change(each: TrafficClass) -> TrafficClass:
        return replace(each, demand=replace(each.demand, cached_ratio=ratio))

    return change


def _with_limit(field: str, factor: float) -> Change:
    def change(each: TrafficClass) -> TrafficClass:
        limits = {field: getattr(each.slo, field) * factor}
        return replace(each, slo=replace(each.slo, **limits))

    return change


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a changed plan must cost: less than `usd_per_h` for an easier input, more for a harder one.

    An easier input that costs more, or a harder one that costs less than the plan, says only that the short search is
    by calculation; one that costs the same is the plan that is there already.
    """

    usd_per_h: float
    easier: bool

    @classmethod
    def of(cls, plan: Plan, current: Plan | None, *, easier: bool) -> _Limits:
        costs = [each.usd_per_h for each in (plan, current) if each is not None]
        return cls(min(costs) if easier else max(costs), easier)

    def passed(self, usd_per_h: float) -> bool:
        if self.easier:
            return usd_per_h < self.usd_per_h * (1 - 1e-6)
        return usd_per_h > self.usd_per_h * (1 + 1e-6)


def _first_flip(
    problem: Problem, limits: _Limits, field: str, was: str, steps: list[tuple[str, Change]]
) -> Flip | None:
    for value, change in steps:
        classes = tuple(change(each) for each in problem.classes)
        other = size(replace(problem, classes=classes)).plan
        if other is None:
            return Flip(field, value, was, None, None)
        if limits.passed(other.usd_per_h):
            return Flip(field, value, was, plan_words(other), other.usd_per_h)
    return None
