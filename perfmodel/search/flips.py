"""What would change a plan: prices at which another accelerator wins, the hit ratio, and a looser or tighter promise.

Owns: break-even prices over all candidates of a group, and repeated searches on a short list of engines. Does not own:
the search itself (`search`). A repeated search varies one input and keeps the engines that came closest, so it is quick
and its answer is a bound: among all engines the plan may change a little earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from perfmodel.search.candidates import GroupCandidates, Trial, confirmed, trial
from perfmodel.search.cheapest import Problem, Sized, size
from perfmodel.search.check import CHECK_SEEDS, replayed
from perfmodel.search.options import cut_words
from perfmodel.search.plan import Candidate, Offer, Plan, TrafficClass
from perfmodel.search.rating import Memory

# Hit ratios that are tried first.
_HIT_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

# Factors on a latency limit that are tried, nearest first.
_LOOSER = (1.1, 1.25, 1.5, 2.0, 3.0)
_TIGHTER = (0.9, 0.8, 0.67, 0.5, 0.33)

# What `input_flips` asks: the cached share, TTFT and TPOT, each up and down.
INPUT_QUESTIONS = 6

# Times that the gap between the value that flips and the one that does not is halved: from a tenth to below 0.01.
_HALVINGS = 4

# Costs closer than this are one cost.
_SAME_USD_RATIO = 1e-6

# Prices of one offer that are tried before the highest at which it comes in is told as a bound.
_MOST_PRICES = 8

# Candidates of each topology, cheapest first, whose engines a repeated search looks at.
_SHORT_LIST = 50

# Candidates whose engines are asked first: most of the time one of them answers.
_FEW = 8

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
    fits). `stays`: the farthest value towards it at which the plan was seen to stay.
    """

    field: str
    value: str
    was: str
    stays: str
    plan: str | None
    usd_per_h: float | None


def plan_words(plan: Plan) -> str:
    """A plan in one line: topology and replicas by role and device."""
    parts = []
    for each in plan.candidates:
        pools = " + ".join(
            f"{pool.replica_count} x {pool.option.offer.name} {cut_words(pool.option.shape)}"
            f" {pool.option.shape.weight_format} {pool.role}"
            for pool in each.pools
        )
        parts.append(f"{each.topology}: {pools}")
    return "; ".join(parts)


def break_evens(problem: Problem, sized: Sized) -> Iterator[BreakEven]:
    """Break-even price of every offer, as they are found: over all candidates where one group of pools is the plan; by
    repeated searches with another price where there are several, because one group's prices move the others too.
    """
    plan, offers = sized.plan, problem.fleet.offers
    if plan is None:
        return
    if len(plan.candidates) != 1:
        quick = _by_calculation(problem)
        yield from (_searched_price(quick, plan, offer) for offer in offers)
        return
    group = next(each for each in sized.groups if each.rater.load.names == plan.candidates[0].classes)
    for column, offer in enumerate(offers):
        in_plan = offer.name in plan.device_counts
        price = _price_without(group, plan, offer, column) if in_plan else _price_with(group, plan, offer, column)
        yield BreakEven(offer.name, in_plan, offer.usd_per_h, price)


def _searched_price(quick: Problem, plan: Plan, offer: Offer) -> BreakEven:
    """As `_price_with` and `_price_without`, by searches of a problem without a check."""
    in_plan = offer.name in plan.device_counts
    price: float | None = None
    if in_plan:
        others = tuple(each for each in quick.fleet.offers if each.name != offer.name)
        other = size(replace(quick, fleet=replace(quick.fleet, offers=others))).plan if others else None
        if other is not None:
            devices = plan.device_counts[offer.name]
            price = (other.usd_per_h - plan.usd_per_h) / devices + offer.usd_per_h
        return BreakEven(offer.name, in_plan, offer.usd_per_h, price)
    # Where the cheapest plan's cost line meets the plan's, from nothing upwards: each search finds a higher line or the
    # end.
    tried = offer.usd_per_h * _SAME_USD_RATIO
    for _ in range(_MOST_PRICES):
        ceiling = plan.usd_per_h * (1 - _SAME_USD_RATIO)
        other = size(replace(_priced(quick, offer.name, tried), ceiling_usd_per_h=ceiling)).plan
        devices = 0 if other is None else other.device_counts.get(offer.name, 0)
        if other is None or not devices:
            break
        tried = price = (plan.usd_per_h - other.usd_per_h) / devices + tried
        if price >= offer.usd_per_h:
            # By calculation it is the better one already; the check saw otherwise.
            price = None
            break
    return BreakEven(offer.name, in_plan, offer.usd_per_h, price)


def _priced(problem: Problem, name: str, usd_per_h: float) -> Problem:
    offers = tuple(replace(each, usd_per_h=usd_per_h) if each.name == name else each for each in problem.fleet.offers)
    return replace(problem, fleet=replace(problem.fleet, offers=offers))


def _by_calculation(problem: Problem) -> Problem:
    """The problem with one seed and no check, sharing what does not depend on it: for searches by the dozen."""
    model = None if problem.full_model is None else replayed(seeds=CHECK_SEEDS[:1])
    return replace(problem, full_model=model, check=None, memory=Memory(problem.memory))


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


@dataclass(frozen=True, slots=True)
class Short:
    """Searches by the dozen: `few` looks at a handful of each group's engines and is asked first, `more` at all that
    came close. What `few` finds `more` can only better.
    """

    few: Problem
    more: Problem

    def changed(self, classes: tuple[TrafficClass, ...]) -> Short:
        """The same for other classes."""
        return Short(replace(self.few, classes=classes), replace(self.more, classes=classes))

    def fits(self, ceiling_usd_per_h: float) -> bool:
        """Whether any plan costs at most this."""
        return any(
            size(replace(each, ceiling_usd_per_h=ceiling_usd_per_h)).plan is not None for each in (self.few, self.more)
        )

    def cheapest(self) -> Plan | None:
        """The cheapest plan; that of the few bounds what the others are asked for."""
        bound = size(self.few).plan
        if bound is None:
            return size(self.more).plan
        return size(replace(self.more, ceiling_usd_per_h=bound.usd_per_h)).plan or bound


def shortened(problem: Problem, sized: Sized) -> Short:
    """The problem with the engines of each group's cheapest candidates only, one seed, no check. A group that has no
    candidate looks at what the others do.
    """
    quick = _by_calculation(problem)
    few, more = (_listed(sized, count) for count in (_FEW, _SHORT_LIST))
    return Short(replace(quick, only=few), replace(quick, only=more))


def _listed(sized: Sized, count: int) -> dict[tuple[str, ...], frozenset[tuple[str, ...]]]:
    """Engines of so many candidates of each group and topology, by the group's classes."""
    listed = {group.rater.load.names: _engines(group, count) for group in sized.groups}
    anywhere: frozenset[tuple[str, ...]] = frozenset().union(*listed.values())
    return {names: keys or anywhere for names, keys in listed.items()}


def _engines(group: GroupCandidates, count: int) -> frozenset[tuple[str, ...]]:
    keys: set[tuple[str, ...]] = set()
    for rows in group.rows:
        order = np.lexsort((rows.use, rows.bill.usd_per_h))[:count]
        for column in (rows.first, rows.second):
            keys.update(group.halves[index].option.key for index in np.unique(column[order]).tolist() if index >= 0)
    return frozenset(keys)


def hit_ratio_flips(short: Short, plan: Plan, current: Plan | None = None) -> Iterator[Flip | None]:
    """The nearest higher and lower cached share of prompts at which the plan changes, of all classes moved together;
    None where it does not.

    `current`: the plan that is told, where it is not the one by calculation.
    """
    classes = short.more.classes
    now = max(each.demand.cached_ratio for each in classes)

    def changed(ratio: float) -> tuple[TrafficClass, ...]:
        return tuple(replace(each, demand=replace(each.demand, cached_ratio=ratio)) for each in classes)

    varied = _Input("cached_ratio", now, lambda ratio: f"{ratio:.3g}", changed)
    for easier, ratios in (
        (True, [ratio for ratio in _HIT_RATIOS if ratio > now + 1e-9]),
        (False, [ratio for ratio in reversed(_HIT_RATIOS) if ratio < now - 1e-9]),
    ):
        yield _first_flip(short, _Limits.of(plan, current, easier=easier), varied, ratios)


def input_flips(problem: Problem, sized: Sized) -> Iterator[Flip | None]:
    """All flips of the cached share and of the promise as they are found, among the engines of the cheapest candidates:
    `INPUT_QUESTIONS` answers, None where nothing that was tried changes the plan.

    They are found by calculation: costs are compared with the plan's by calculation, which may be cheaper than the one
    that the check let pass.
    """
    short = shortened(problem, sized)
    base = short.cheapest()
    if base is not None:
        yield from hit_ratio_flips(short, base, sized.plan)
        yield from slo_flips(short, base, sized.plan)


def slo_flips(short: Short, plan: Plan, current: Plan | None = None) -> Iterator[Flip | None]:
    """For TTFT and TPOT: the nearest looser limit that makes the plan cheaper and the nearest tighter one that
    changes it, all classes' limits moved by one factor; None where none does. `current` as in `hit_ratio_flips`.
    """
    classes = short.more.classes
    for field in ("ttft_ms", "tpot_ms"):
        varied = _Input(f"slo.{field}", 1.0, partial(_limit_words, classes, field), partial(_limited, classes, field))
        for factors in (_LOOSER, _TIGHTER):
            limits = _Limits.of(plan, current, easier=factors is _LOOSER)
            yield _first_flip(short, limits, varied, factors)


def _limit_words(classes: Sequence[TrafficClass], field: str, factor: float) -> str:
    limits = [getattr(each.slo, field) * factor for each in classes]
    return "/".join(f"{limit:.0f}" if limit >= 1000 else f"{limit:.4g}" for limit in limits)


def _limited(classes: Sequence[TrafficClass], field: str, factor: float) -> tuple[TrafficClass, ...]:
    return tuple(replace(each, slo=replace(each.slo, **{field: getattr(each.slo, field) * factor})) for each in classes)


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

    def flipped(self, short: Short) -> bool:
        """Whether the plan changes, by a search that looks no further than the plan's cost: most engines are dearer."""
        ceiling = self.usd_per_h * (1 - _SAME_USD_RATIO if self.easier else 1 + _SAME_USD_RATIO)
        return short.fits(ceiling) is self.easier


@dataclass(frozen=True, slots=True)
class _Input:
    """An input that is varied: its field, its value in words, and the classes with another value of it."""

    field: str
    now: float
    words: Callable[[float], str]
    changed: Callable[[float], tuple[TrafficClass, ...]]


def _first_flip(short: Short, limits: _Limits, varied: _Input, values: Sequence[float]) -> Flip | None:
    """The nearest value at which the plan changes: the first of the values (nearest first), then halved towards the one
    at which it stays. An input that is eased or hardened further never takes a flip back, so the farthest is asked
    first.
    """

    def flips(value: float) -> bool:
        return limits.flipped(short.changed(varied.changed(value)))

    if not values or not flips(values[-1]):
        return None
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if flips(values[middle]) else (middle + 1, high)
    stays, at = varied.now if low == 0 else values[low - 1], values[low]
    for _ in range(_HALVINGS):
        between = (stays + at) / 2
        stays, at = (stays, between) if flips(between) else (between, at)
    plan = short.changed(varied.changed(at)).cheapest()
    told = (None, None) if plan is None else (plan_words(plan), plan.usd_per_h)
    return Flip(varied.field, varied.words(at), varied.words(varied.now), varied.words(stays), *told)
