"""Properties of the fleet search under any demand, prices and stock, each shown to fail on a planted fault.

A looser promise, a lower price or more stock never makes the plan dearer; a plan obeys its own rules (stock, whole
units, spares, promise, price); and the answer does not depend on the order in which offers and choices are listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel.search import candidates, choice
from perfmodel.search.candidates import CandidateSearch, Trial
from perfmodel.search.cheapest import size
from perfmodel.search.plan import Demand, Offer, Plan, Slo, SpareRule, Topology
from perfmodel.search.purchase import Bill, Counts, Purchasing
from perfmodel.search.rating import Latencies, Verdict, judged, latencies
from tests.exploring import examples
from tests.fakes.sizing import CARD, CHEAP, CHOICES, FAST, Setting, offer, problem, traffic


@dataclass(frozen=True)
class Drawn:
    """One problem and how it is made easier."""

    rate_per_s: float
    quiet_ratio: float
    input_tokens: int
    output_tokens: int
    slo: Slo
    prices: tuple[float, float, float]
    stock: tuple[int, int, int]
    unit: int
    spare: SpareRule
    looser: float
    cheaper: float
    more: int

    def offers(self) -> tuple[Offer, ...]:
        hardware = (FAST, CHEAP, CARD)
        return tuple(
            offer(each, usd, count * self.unit, self.unit)
            for each, usd, count in zip(hardware, self.prices, self.stock, strict=True)
        )

    def setting(self) -> Setting:
        demand = Demand(
            rate_p50_per_s=self.rate_per_s * self.quiet_ratio,
            rate_p90_per_s=self.rate_per_s,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cached_ratio=0.2,
        )
        return Setting(
            (traffic(demand=demand, slo=self.slo),),
            self.offers(),
            replace(CHOICES, weight_formats=CHOICES.weight_formats[1:]),
            self.spare,
        )


drawn = st.builds(
    Drawn,
    rate_per_s=st.floats(1, 80),
    quiet_ratio=st.sampled_from([0.3, 0.6, 1.0]),
    input_tokens=st.sampled_from([200, 1000, 4000]),
    output_tokens=st.sampled_from([20, 150, 400]),
    slo=st.builds(Slo, ttft_ms=st.sampled_from([80.0, 300.0, 1500.0]), tpot_ms=st.sampled_from([5.0, 12.0, 60.0])),
    prices=st.tuples(*[st.sampled_from([0.3, 0.7, 1.0, 2.0, 3.1])] * 3),
    stock=st.tuples(*[st.integers(0, 6)] * 3),
    unit=st.sampled_from([1, 1, 2, 4]),
    spare=st.builds(SpareRule, st.integers(0, 1), st.integers(1, 2), rolling_count=st.integers(0, 2)),
    looser=st.sampled_from([1.1, 2.0, 4.0]),
    cheaper=st.sampled_from([0.5, 0.9]),
    more=st.integers(1, 4),
)


def planned(setting: Setting) -> Plan | None:
    return size(problem(setting)).plan


def cost(plan: Plan | None) -> float:
    return float("inf") if plan is None else plan.usd_per_h


def check(case: Drawn) -> None:
    setting = case.setting()
    plan = planned(setting)
    if plan is not None:
        check_rules(plan, setting)
    check_pruned(setting, plan)
    check_easier(case, setting, cost(plan))
    turned = replace(
        setting,
        offers=setting.offers[::-1],
        choices=replace(
            setting.choices,
            chunk_tokens=setting.choices.chunk_tokens[::-1],
            tensor_parallel_count=setting.choices.tensor_parallel_count[::-1],
        ),
    )
    other = planned(turned)
    assert keys(other) == keys(plan), "the order of the lists does not matter"


def keys(plan: Plan | None) -> list[tuple[str, ...]] | None:
    return None if plan is None else [each.key for each in plan.candidates]


def check_pruned(setting: Setting, plan: Plan | None) -> None:
    """What the search leaves out never was the plan: numbers of replicas that cannot carry the load, and what costs
    more than a ceiling.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CandidateSearch, "_bisect", one_by_one)
        assert keys(planned(setting)) == keys(plan), "every number of replicas tried gives the same plan"
    ceiling = 1e6 if plan is None else plan.usd_per_h
    bounded = size(replace(problem(setting), ceiling_usd_per_h=ceiling)).plan
    assert keys(bounded) == keys(plan), "a ceiling at the plan's cost leaves the plan"
    assert size(replace(problem(setting), ceiling_usd_per_h=ceiling * 0.999)).plan is None or plan is None, (
        "below it there is none"
    )


def one_by_one(self, *asked):  # type: ignore[no-untyped-def]  # its types are those of the method it stands for
    role, option, judge, rate, most = asked
    for count in range(1, most + 1):
        if judge(latencies([self._rater.half(role, option, count, rate)])).meets[0]:
            return count
    return None


def check_easier(case: Drawn, setting: Setting, usd_per_h: float) -> None:
    (one,) = setting.classes
    slo = replace(one.slo, ttft_ms=one.slo.ttft_ms * case.looser, tpot_ms=one.slo.tpot_ms * case.looser)
    easy = replace(setting, classes=(replace(one, slo=slo),))
    assert cost(planned(easy)) <= usd_per_h * (1 + 1e-9), "a looser promise never costs more"
    cheap = tuple(replace(each, usd_per_h=each.usd_per_h * case.cheaper) for each in setting.offers[:1])
    assert cost(planned(replace(setting, offers=cheap + setting.offers[1:]))) <= usd_per_h * (1 + 1e-9), (
        "a lower price never costs more"
    )
    stocked = tuple(
        replace(each, inventory_count=each.inventory_count + case.more * each.unit.device_count)
        for each in setting.offers
    )
    assert cost(planned(replace(setting, offers=stocked))) <= usd_per_h * (1 + 1e-9), "more stock never costs more"


def check_rules(plan: Plan, setting: Setting) -> None:
    offers = {each.name: each for each in setting.offers}
    (one,) = setting.classes
    used: dict[str, int] = {}
    for each in plan.candidates:
        for name, count in each.device_counts().items():
            used[name] = used.get(name, 0) + count
    usd = 0.0
    for name, count in used.items():
        unit = offers[name].unit.device_count
        bought = -(-count // unit) * unit
        assert bought <= offers[name].inventory_count, "nothing is used that is not there"
        assert plan.device_counts[name] == bought, "whole units are bought"
        usd += bought * offers[name].usd_per_h
    assert plan.usd_per_h == pytest.approx(usd), "the price is that of what is bought"
    for each in plan.candidates:
        told = each.predicted
        assert told.ttft_percentile_ms <= one.slo.ttft_ms * (1 + 1e-9), "the promise holds"
        assert told.tpot_percentile_ms <= one.slo.tpot_ms * (1 + 1e-9), "the promise holds"
        assert told.goodput_ratio >= one.slo.goodput_ratio - 1e-9, "the promise holds"
        for pool in each.pools:
            assert pool.spare_count >= setting.spare.replica_count, "spares are run"
            if setting.spare.zone_count > 1 and one.demand.rate_p50_per_s == one.demand.rate_p90_per_s:
                lost = -(-pool.replica_count // setting.spare.zone_count)
                needed = pool.serving_count if not filled(plan) else 1
                assert pool.replica_count - lost >= needed, "a zone may be lost"


def filled(plan: Plan) -> bool:
    """Whether bought units had room for more replicas, which are counted as serving."""
    return any(count > 1 for count in plan.unit_counts.values()) or any(
        plan.device_counts[name] != count for name, count in plan.unit_counts.items()
    )


@given(drawn)
@settings(max_examples=examples(40), deadline=None)
def test_the_search_keeps_its_promises(case: Drawn) -> None:
    check(case)


# Planted faults


def _bill_with(change: Callable[[Purchasing, Counts, Bill], Bill]) -> Callable[[Purchasing, Counts], Bill]:
    honest = Purchasing.bill

    def bill(self: Purchasing, counts: Counts) -> Bill:
        return change(self, counts, honest(self, counts))

    return bill


def stock_is_endless(patch: pytest.MonkeyPatch) -> None:
    change = _bill_with(lambda _, __, bill: replace(bill, in_stock=np.ones_like(bill.in_stock)))
    patch.setattr(Purchasing, "bill", change)
    patch.setattr(Purchasing, "stock_devices", lambda self, name: 64)


def units_are_split(patch: pytest.MonkeyPatch) -> None:
    def change(self: Purchasing, counts: Counts, bill: Bill) -> Bill:
        share = counts / np.maximum(bill.units * self._unit_devices, 1)
        return replace(bill, usd_per_h=(bill.units * share) @ self._unit_usd_per_h)

    patch.setattr(Purchasing, "bill", _bill_with(change))


def spares_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpareRule, "total_count", lambda self, p90, p50: p90)


def promises_are_broken(patch: pytest.MonkeyPatch) -> None:
    def easy(times: Latencies, slos: list[Slo], shifts: list[float]) -> Verdict:
        honest = judged(times, slos, shifts)
        nothing = np.zeros_like(honest.tpot_use)
        return replace(honest, tpot_use=nothing, goodput_short=nothing)

    patch.setattr(candidates, "judged", easy)


def the_roomiest_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trial, "order", property(lambda self: (self.use_ratio, self.usd_per_h, self.key)))
    honest = candidates.trials
    patch.setattr(choice, "trials", lambda group: iter(sorted(honest(group), key=lambda each: each.order)))


def all_stock_is_used(patch: pytest.MonkeyPatch) -> None:
    honest = CandidateSearch._bisect

    def greedy(self, *asked):  # type: ignore[no-untyped-def]  # a fault, its types are the original's
        return None if honest(self, *asked) is None else asked[-1]

    patch.setattr(CandidateSearch, "_bisect", greedy)


def the_last_listed_wins(patch: pytest.MonkeyPatch) -> None:
    def first(self, *_):  # type: ignore[no-untyped-def]  # a fault, its types are the original's
        return (round(self.usd_per_h, 6), 0.0, ())

    patch.setattr(Trial, "order", property(first))
    patch.setattr(choice, "_MOST_TIED", 1)

    def listed(group):  # type: ignore[no-untyped-def]  # a fault, its types are the original's
        made = [candidates.trial(group, rows, at) for rows in group.rows for at in range(len(rows.first))]
        return iter(sorted(made, key=lambda each: each.usd_per_h))

    patch.setattr(choice, "trials", listed)


def a_tighter_promise_is_easier(patch: pytest.MonkeyPatch) -> None:
    def upside_down(times: Latencies, slos: list[Slo], shifts: list[float]) -> Verdict:
        honest = judged(times, slos, shifts)
        slow = np.maximum(honest.tpot_use, 0.1 / np.maximum(honest.tpot_use, 1e-9))
        return replace(honest, tpot_use=slow)

    patch.setattr(candidates, "judged", upside_down)


def a_ceiling_buys_too_little(patch: pytest.MonkeyPatch) -> None:
    honest = Purchasing.affordable_devices
    patch.setattr(Purchasing, "affordable_devices", lambda self, name, usd: honest(self, name, usd) - 1)


def too_few_replicas_are_skipped_to_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(candidates, "_ROUNDING_RATIO", -1.0)


FAULTS = [
    a_ceiling_buys_too_little,
    too_few_replicas_are_skipped_to_too_many,
    stock_is_endless,
    units_are_split,
    spares_are_forgotten,
    promises_are_broken,
    the_roomiest_wins,
    all_stock_is_used,
    the_last_listed_wins,
    a_tighter_promise_is_easier,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_caught(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    @given(drawn)
    @settings(
        max_examples=150, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def run(case: Drawn) -> None:
        check(case)

    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            run()


def test_topologies_of_the_drawn_problems() -> None:
    assert set(CHOICES.topologies) == {Topology.AGGREGATED, Topology.DISAGGREGATED}
