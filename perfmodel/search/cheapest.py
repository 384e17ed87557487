"""The cheapest fleet that keeps every class's promise, or why there is none.

Owns: which classes share pools, the cheapest choice over all groups under one inventory, replicas that bought units
leave room for, and the list of what was rejected. Does not own: the candidates of a group (`candidates`), prices
(`purchase`), what would flip the plan (`flips`) or moves between plans (`moves`). Ties of cost go to the
candidate that takes the least of its promise's room, then to its key, so the result does not depend on any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from perfmodel.architecture import Architecture
from perfmodel.errors import ConfigError
from perfmodel.search.candidates import (
    CandidateSearch,
    GroupCandidates,
    Ints,
    Missed,
    Rows,
    Trial,
    described,
    trial,
    words,
)
from perfmodel.search.choice import Choice, Chooser, plan_of
from perfmodel.search.options import Refusal, beyond_all, bounds, engine_options, promise_below_bound
from perfmodel.search.plan import (
    Choices,
    EngineOption,
    Fleet,
    Impossible,
    Plan,
    PoolRole,
    Rejection,
    RejectionReason,
    Topology,
    TrafficClass,
)
from perfmodel.search.purchase import Purchasing
from perfmodel.search.rating import Check, FullModel, GroupLoad, Memory, Rater, group_load, told_apart
from perfmodel.serving import Steps

# Groups of classes grow as the Bell numbers; above this many classes of one model only "each alone" and "all together"
# are tried.
_MOST_PARTITIONED_CLASSES = 4


class EngineSteps(Protocol):
    """Step times of any engine option; `estimate` or a test gives it."""

    def __call__(self, option: EngineOption) -> Steps:
        """The step times of this engine."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be sized: classes (with models by name), what may be bought and varied, how fast engines are.

    `full_model` judges single candidates (None: the closed form of `queueing`), and `check` plays the cheapest out
    (None: the full model has the last word). `only`: keys of the engines to look at, by the names of the classes that
    share pools (None: all; a group that is not named: all).
    `memory`: answers shared with other searches of the same engines and full model. `ceiling_usd_per_h`: only plans up
    to this cost are wanted (None: all); what is dearer is left out, and not listed as rejected.
    """

    classes: tuple[TrafficClass, ...]
    fleet: Fleet
    choices: Choices
    architectures: tuple[tuple[str, Architecture], ...]
    steps: EngineSteps
    full_model: FullModel | None = None
    check: Check | None = None
    only: Mapping[tuple[str, ...], frozenset[tuple[str, ...]]] | None = None
    memory: Memory | None = None
    ceiling_usd_per_h: float | None = None

    def architecture(self, model: str) -> Architecture:
        """The architecture of a model's name."""
        return dict(self.architectures)[model]


@dataclass(frozen=True, slots=True, eq=False)
class Sized:
    """The answer: the plan or None with `impossible`, all groups that were searched, and how many candidates there
    were.
    """

    plan: Plan | None
    impossible: Impossible | None
    rejections: tuple[Rejection, ...]
    groups: tuple[GroupCandidates, ...]
    offer_names: tuple[str, ...]
    considered_count: int
    feasible_count: int


def group_count(classes: Sequence[TrafficClass]) -> int:
    """Groups of classes that `size` searches."""
    return len({tuple(each.name for each in group) for partition in _partitions(classes) for group in partition})


def size(problem: Problem, searched_one: Callable[[], None] | None = None) -> Sized:
    """Search the whole problem; `searched_one` is called after each group. Raises ConfigError for a problem that cannot
    be asked (no class).
    """
    if not problem.classes:
        raise ConfigError("classes is empty; expected at least one")
    purchasing = Purchasing(problem.fleet)
    searched = _Searched(problem, purchasing, searched_one)
    # A search below a ceiling asks only whether there is a plan: no words are wanted.
    beyond = _beyond(problem, searched) if problem.ceiling_usd_per_h is None else None
    if beyond is not None:
        return Sized(None, beyond, beyond.rejections, (), purchasing.names, 0, 0)
    best: Choice | None = None
    chooser = Chooser(purchasing)
    for partition in _partitions(problem.classes):
        ceiling = problem.ceiling_usd_per_h if best is None else best.usd_per_h
        found = chooser.cheapest([searched.group(classes) for classes in partition], ceiling)
        if found is not None and (best is None or found.order < best.order):
            best = found
    groups = searched.all()
    considered = sum(group.considered_count for group in groups)
    feasible = sum(group.feasible_count for group in groups)
    alternatives = [_played(*each) for each in sorted(chooser.missed.values(), key=lambda each: each[1].order)]
    if best is not None and problem.ceiling_usd_per_h is None:
        for group, tried, _ in best.picks:
            alternatives += _dearer(group, tried, purchasing, chooser)
    rejections = (*alternatives, *_refused(problem, groups, searched.refusals))
    if best is None:
        sentence = _why_nothing(groups, rejections)
        return Sized(None, Impossible(sentence, rejections), rejections, groups, purchasing.names, considered, feasible)
    plan = plan_of(best, purchasing)
    return Sized(plan, None, rejections, groups, purchasing.names, considered, feasible)


class _Searched:
    """Groups that were searched. Mutable: each is searched once, whatever partitions it is in."""

    def __init__(self, problem: Problem, purchasing: Purchasing, searched_one: Callable[[], None] | None) -> None:
        self._problem = problem
        self._searched_one = searched_one
        self._purchasing = purchasing
        self._groups: dict[tuple[str, ...], GroupCandidates] = {}
        self._options: dict[tuple[str, int], list[EngineOption]] = {}
        self.refusals: dict[str, list[Refusal]] = {}

    def options(self, model: str, context_tokens: int) -> list[EngineOption]:
        key = (model, context_tokens)
        if key not in self._options:
            architecture = self._problem.architecture(model)
            found, refused = engine_options(architecture, self._problem.fleet, self._problem.choices, context_tokens)
            self._options[key] = found
            self.refusals[model] = refused
        return self._options[key]

    def group(self, classes: Sequence[TrafficClass]) -> GroupCandidates:
        names = tuple(each.name for each in classes)
        if names not in self._groups:
            load: GroupLoad = group_load(classes)
            context = max(each.demand.longest_tokens for each in classes)
            options = self.options(classes[0].model, context)
            asked = self._problem
            only = None if asked.only is None else asked.only.get(names)
            if only is not None:
                options = [option for option in options if option.key in only]
            rater = Rater(load, asked.steps, asked.full_model, asked.check, asked.memory)
            search = CandidateSearch(
                (asked.fleet, asked.choices), self._purchasing, rater, options, asked.ceiling_usd_per_h
            )
            self._groups[names] = search.run()
            if self._searched_one is not None:
                self._searched_one()
        return self._groups[names]

    def all(self) -> tuple[GroupCandidates, ...]:
        return tuple(self._groups.values())


def _partitions(classes: Sequence[TrafficClass]) -> Iterator[list[tuple[TrafficClass, ...]]]:
    """Ways to let classes share pools: only classes of one model can."""
    models = list(dict.fromkeys(each.model for each in classes))
    ways = [list(_groupings([each for each in classes if each.model == model])) for model in models]
    yield from _products(ways)


def _products(
    ways: list[list[list[tuple[TrafficClass, ...]]]],
) -> Iterator[list[tuple[TrafficClass, ...]]]:
    if not ways:
        yield []
        return
    for rest in _products(ways[1:]):
        for way in ways[0]:
            yield way + rest


def _groupings(classes: list[TrafficClass]) -> Iterator[list[tuple[TrafficClass, ...]]]:
    if len(classes) > _MOST_PARTITIONED_CLASSES:
        yield [(each,) for each in classes]
        yield [tuple(classes)]
        return
    if not classes:
        yield []
        return
    head, rest = classes[0], classes[1:]
    for grouping in _groupings(rest):
        yield [(head,), *grouping]
        for index, group in enumerate(grouping):
            yield [*grouping[:index], (head, *group), *grouping[index + 1 :]]


# What was not chosen


def _refused(
    problem: Problem, groups: Sequence[GroupCandidates], refused: dict[str, list[Refusal]]
) -> tuple[Rejection, ...]:
    """What could not be, counted by device and reason."""
    counted: dict[tuple[object, ...], Rejection] = {}
    for group in groups:
        names = group.rater.load.names
        for topology, role, refusal in group.refusals:
            _count(counted, names, f"{topology} ({role})", refusal)
    for model, refusals in refused.items():
        names = tuple(each.name for each in problem.classes if each.model == model)
        for refusal in refusals:
            _count(counted, names, "any topology", refusal)
    return tuple(counted.values())


def _beyond(problem: Problem, searched: _Searched) -> Impossible | None:
    """Why a class can be served by nothing that is offered, before anything is searched; None when none is like that.

    It is the answer to a mistyped limit, so it must not cost a search.
    """
    for each in problem.classes:
        options = searched.options(each.model, each.demand.longest_tokens)
        sentence = beyond_all(each, options, searched.refusals[each.model])
        if sentence is None:
            continue
        counted: dict[tuple[object, ...], Rejection] = {}
        for option in options:
            broken = promise_below_bound(bounds(option.shape, each.demand), each, prompts=True, answers=True)
            if option.chips is None and broken is not None:
                refusal = Refusal(option.offer.name, described(option), *broken)
                _count(counted, (each.name,), "any topology", refusal)
        rejections = (*counted.values(), *_refused(problem, (), {each.model: searched.refusals[each.model]}))
        return Impossible(sentence, rejections)
    return None


def _count(counted: dict[tuple[object, ...], Rejection], names: tuple[str, ...], layout: str, refusal: Refusal) -> None:
    key = (names, layout, refusal.offer_name, refusal.reason)
    known = counted.get(key)
    if known is None:
        what = f"{layout}: {refusal.what}"
        counted[key] = Rejection(names, what, refusal.reason, refusal.detail)
    else:
        counted[key] = replace(known, candidate_count=known.candidate_count + 1)


def _played(group: GroupCandidates, tried: Trial, why: Missed) -> Rejection:
    told = why.predicted
    slos = [each.slo for each in group.rater.load.classes]
    promised = max(slo.goodput_ratio for slo in slos)
    ttft = told_apart(told.ttft_percentile_ms, min(slo.ttft_ms for slo in slos), 0)
    tpot = told_apart(told.tpot_percentile_ms, min(slo.tpot_ms for slo in slos), 1)
    goodput = told_apart(told.goodput_ratio, promised, 3)
    missed = str(why.reason).removesuffix("_at_any_size")  # one size was played out
    return Rejection(
        classes=group.rater.load.names,
        what=f"{tried.topology}: {words(tried)}",
        reason=RejectionReason.MISSED_WHEN_PLAYED,
        detail=f"{missed}: TTFT {ttft} ms, TPOT {tpot} ms, {goodput} of requests in time, promised {promised:g}",
        usd_per_h=tried.usd_per_h,
    )


def _dearer(group: GroupCandidates, tried: Trial, purchasing: Purchasing, chooser: Chooser) -> list[Rejection]:
    """The cheapest alternative of every other topology and set of devices (as the halves rate it) that did not miss
    when it was played out: those are told as such.
    """
    own = (tried.topology, tuple(sorted(tried.device_counts())))
    told: list[Rejection] = []
    for rows in group.rows:
        used = rows.counts > 0
        for pattern in np.unique(used, axis=0) if len(used) else []:
            mine = np.flatnonzero((used == pattern).all(axis=1))
            names = tuple(sorted(name for name, has in zip(purchasing.names, pattern, strict=True) if has))
            if (rows.topology, names) == own:
                continue
            kept = _not_refused(group, rows, mine, chooser)
            if not kept:
                continue
            other = kept[0]
            told.append(
                Rejection(
                    classes=group.rater.load.names,
                    what=f"{rows.topology}: {words(other)}",
                    reason=RejectionReason.COSTS_MORE,
                    detail=_dearer_words(other, tried),
                    candidate_count=kept[1],
                    usd_per_h=other.usd_per_h,
                )
            )
    return sorted(told, key=lambda each: (each.usd_per_h or 0.0, each.what))


def _not_refused(group: GroupCandidates, rows: Rows, mine: Ints, chooser: Chooser) -> tuple[Trial, int] | None:
    """The cheapest of these rows that did not miss when it was played out, and how many there are; None: all missed.

    Rows that were never asked about count as not missed: what is dearer than the plan is not played out.
    """
    order = mine[np.lexsort((rows.use[mine], rows.bill.usd_per_h[mine]))]
    for place, index in enumerate(order.tolist()):
        other = trial(group, rows, index)
        if not chooser.refused(group, other):
            return other, len(order) - place
    return None


def _dearer_words(other: Trial, tried: Trial) -> str:
    told = f"{other.usd_per_h:.2f} USD/h; the plan's pools cost {tried.usd_per_h:.2f} USD/h"
    if round(other.usd_per_h, 6) == round(tried.usd_per_h, 6):
        return f"{told}, the same, and have more room below their limits when replayed, or fewer replicas"
    if other.usd_per_h < tried.usd_per_h:
        return f"{told}, but with pools for the other classes it makes the whole plan dearer"
    return told


def _why_nothing(groups: Sequence[GroupCandidates], rejections: Sequence[Rejection]) -> str:
    """One sentence: what came closest."""
    for group in groups:
        if not group.feasible_count and len(group.rater.load.classes) == 1:
            return _nearest_miss(group)
    played = [each for each in rejections if each.reason is RejectionReason.MISSED_WHEN_PLAYED]
    if played:
        return (
            f"class {', '.join(played[-1].classes)}: candidates keep the promise by calculation, none when played out; "
            f"the last was {played[-1].what}: {played[-1].detail}"
        )
    return "each class can be served alone, but inventory and racks do not hold all of them together"


def _nearest_miss(group: GroupCandidates) -> str:
    name = group.rater.load.names[0]
    closest = _closest(group)
    if closest is None:
        return f"class {name}: no allowed topology has an engine for it"
    topology, role, example = closest
    half = "" if role is PoolRole.BOTH else f" {role}"
    return (
        f"class {name}: nothing keeps the promise; the closest fails by {example.reason}: "
        f"{topology}{half} {example.what}, {example.detail}"
    )


def _closest(group: GroupCandidates) -> tuple[Topology, PoolRole, Refusal] | None:
    """The refusal that is least over its limit; ties go to the later check. A topology whose halves were never paired
    is as far off as the half that is furthest.
    """
    order = list(RejectionReason)

    def far(each: tuple[Topology, PoolRole, Refusal]) -> tuple[float, int]:
        return (each[2].over_ratio, -order.index(each[2].reason))

    whole = [each for each in group.refusals if each[1] is PoolRole.BOTH]
    paired = {topology for topology, _, _ in whole if topology is not Topology.AGGREGATED}
    halves: dict[tuple[Topology, PoolRole], list[tuple[Topology, PoolRole, Refusal]]] = {}
    for each in group.refusals:
        if each[1] is not PoolRole.BOTH and each[0] not in paired:
            halves.setdefault(each[:2], []).append(each)
    nearest = [min(each, key=far) for each in halves.values()]
    split = dict.fromkeys(each[0] for each in nearest)
    whole += [max((each for each in nearest if each[0] is topology), key=far) for topology in split]
    return min(whole, key=far, default=None)
