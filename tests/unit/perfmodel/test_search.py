"""The fleet search on small problems: the plan, every reason that rejects, sharing, spares, units, nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.errors import ConfigError
from perfmodel.search.cheapest import Sized, size
from perfmodel.search.check import replayed
from perfmodel.search.plan import (
    EngineOption,
    Fleet,
    Offer,
    Plan,
    PoolPlan,
    PoolRole,
    RackLimit,
    RejectionReason,
    Slo,
    SpareRule,
    Topology,
)
from perfmodel.search.rating import (
    Memory,
    Rater,
    Verdict,
    class_figures,
    group_load,
    judged,
    latencies,
    miss_words,
    prediction,
    told_apart,
)
from tests.fakes.sizing import (
    CARD,
    CHEAP,
    CHOICES,
    DEMAND,
    FAST,
    OFFERS,
    SLO,
    RooflineSteps,
    Setting,
    offer,
    problem,
    traffic,
)

ONLY_TOGETHER = replace(CHOICES, topologies=(Topology.AGGREGATED,))
ONLY_APART = replace(CHOICES, topologies=(Topology.DISAGGREGATED,))


def sized(setting: Setting) -> Sized:
    return size(problem(setting))


def plan_of(setting: Setting) -> Plan:
    found = sized(setting).plan
    assert found is not None
    return found


def reasons(found: Sized) -> set[RejectionReason]:
    return {each.reason for each in found.rejections}


def test_the_plan_is_the_cheapest_candidate_that_keeps_the_promise() -> None:
    found = sized(Setting())
    assert found.plan is not None
    dearer = [each.usd_per_h for each in found.rejections if each.reason is RejectionReason.COSTS_MORE]
    assert dearer and all(usd is not None and usd >= found.plan.usd_per_h for usd in dearer)
    for each in found.plan.candidates:
        assert each.predicted.ttft_percentile_ms <= SLO.ttft_ms
        assert each.predicted.tpot_percentile_ms <= SLO.tpot_ms
        assert each.predicted.goodput_ratio >= SLO.goodput_ratio
    counts = found.plan.candidates[0].device_counts()
    usd = {each.name: each.usd_per_h for each in OFFERS}
    assert found.plan.usd_per_h == pytest.approx(sum(count * usd[name] for name, count in counts.items()))


def test_a_device_without_a_compute_figure_serves_decode_only() -> None:
    found = sized(Setting(choices=ONLY_TOGETHER, offers=(offer(FAST, 2.0), offer(CARD, 0.01))))
    assert RejectionReason.NO_COMPUTE_FIGURE in reasons(found)
    assert found.plan is not None and set(found.plan.device_counts) == {"fast"}
    apart = plan_of(Setting(choices=ONLY_APART, offers=(offer(FAST, 2.0), offer(CARD, 0.01))))
    roles = {pool.role: pool.option.offer.name for each in apart.candidates for pool in each.pools}
    assert roles == {PoolRole.PREFILL: "fast", PoolRole.DECODE: "card"}


def test_unlike_devices_are_paired_at_matched_rates() -> None:
    apart = plan_of(Setting(choices=ONLY_APART))
    (found,) = apart.candidates
    assert found.topology is Topology.DISAGGREGATED
    assert [pool.role for pool in found.pools] == [PoolRole.PREFILL, PoolRole.DECODE]


def test_a_pair_over_an_unknown_network_is_refused() -> None:
    dark = replace(offer(CARD, 0.01), scaleout_bytes_per_s=None)
    found = sized(Setting(choices=ONLY_APART, offers=(offer(FAST, 2.0), dark)))
    assert RejectionReason.LINK_UNKNOWN in reasons(found)
    assert found.plan is not None and "card" not in found.plan.device_counts


def test_weights_that_do_not_fit() -> None:
    big = traffic(model="Llama-3.1-70B")
    found = sized(Setting(classes=(big,), offers=(offer(FAST, 2.0, inventory=2),)))
    assert found.plan is None and RejectionReason.WEIGHTS_DO_NOT_FIT in reasons(found)


def test_a_context_that_does_not_fit() -> None:
    long = replace(DEMAND, input_tokens=120_000, rate_p50_per_s=0.01, rate_p90_per_s=0.01)
    small = replace(FAST, memory_bytes=30 * 2**30)
    found = sized(Setting(classes=(traffic(demand=long, slo=Slo(60_000, 100)),), offers=(offer(small, 2.0),)))
    assert RejectionReason.CONTEXT_DOES_NOT_FIT in reasons(found)


def test_parallelism_that_the_model_cannot_have() -> None:
    odd = replace(CHOICES, tensor_parallel_count=(1, 3))
    assert RejectionReason.PARALLELISM_IMPOSSIBLE in reasons(sized(Setting(choices=odd)))


@pytest.mark.parametrize(
    ("slo", "reason", "words"),
    [
        (Slo(800, 0.5), RejectionReason.TPOT_BELOW_BOUND, "slo.tpot_ms is 0.5; the physical bound"),
        (Slo(2, 40), RejectionReason.TTFT_BELOW_BOUND, "slo.ttft_ms is 2; the physical bound"),
    ],
)
def test_a_promise_below_the_physical_bound_says_the_bound(slo: Slo, reason: RejectionReason, words: str) -> None:
    found = sized(Setting(classes=(traffic(slo=slo),)))
    assert found.plan is None and found.impossible is not None
    assert reason in reasons(found)
    assert words in found.impossible.sentence


def test_a_promise_below_the_bound_is_told_before_anything_is_asked_of_an_engine() -> None:
    def never(option: EngineOption) -> RooflineSteps:
        raise AssertionError(f"{option.key} was asked")

    found = size(replace(problem(Setting(classes=(traffic(slo=Slo(2, 40)),))), steps=never))
    assert found.impossible is not None and found.considered_count == 0 and found.rejections


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        ((offer(FAST, 2.0, inventory=0),), "one replica takes 1 fast, the inventory has none"),
        ((offer(FAST, 2.0, inventory=2),), "the closest is fast TP2, fp8 weights, bf16 KV"),
    ],
)
def test_a_model_that_nothing_holds_is_one_sentence(offers: tuple[Offer, ...], words: str) -> None:
    model = "Llama-3.1-8B" if offers[0].inventory_count == 0 else "Llama-3.1-405B"
    found = size(problem(Setting(classes=(traffic(model=model),), offers=offers)))
    assert found.impossible is not None and words in found.impossible.sentence


def test_an_inventory_without_a_whole_unit_is_refused() -> None:
    found = sized(Setting(offers=(offer(FAST, 2.0, inventory=7, unit=8),)))
    assert found.impossible is not None and RejectionReason.INVENTORY in reasons(found)
    assert "whole units of the inventory hold 0" in found.impossible.sentence


def test_the_work_does_not_grow_with_the_inventory() -> None:
    def asked(inventory: int) -> tuple[int, list[tuple[str, ...]]]:
        memory = Memory()
        offers = tuple(replace(each, inventory_count=inventory) for each in OFFERS)
        found = size(replace(problem(Setting(offers=offers)), memory=memory))
        assert found.plan is not None
        return len(memory.answers), [each.key for each in found.plan.candidates]

    (few, small), (many, large) = asked(1_000), asked(1_000_000)
    assert large == small
    assert many <= 1.1 * few, "a search of a thousand times the stock asks no more but for a few"


@pytest.mark.parametrize(
    ("slo", "reason"),
    [
        (Slo(25, 40), RejectionReason.TTFT_MISSED),
        (Slo(800, 5.5), RejectionReason.TPOT_MISSED),
        (Slo(70, 40, percentile_ratio=0.5, goodput_ratio=0.99), RejectionReason.GOODPUT_MISSED),
    ],
)
def test_a_promise_that_no_size_keeps(slo: Slo, reason: RejectionReason) -> None:
    light = replace(DEMAND, rate_p50_per_s=20.0, rate_p90_per_s=20.0)
    slow = (offer(CHEAP, 1.0, inventory=4),)
    found = sized(Setting(classes=(traffic(demand=light, slo=slo),), offers=slow))
    assert reason in reasons(found)


def test_a_load_that_is_not_carried() -> None:
    found = sized(Setting(offers=(offer(CHEAP, 1.0, inventory=1),)))
    assert found.plan is None and RejectionReason.LOAD_NOT_CARRIED in reasons(found)
    assert found.impossible is not None and "the queue grows without end" in found.impossible.sentence


def test_inventory_and_racks_bound_what_is_bought() -> None:
    heavy = traffic(demand=replace(DEMAND, rate_p90_per_s=300.0))
    assert RejectionReason.INVENTORY in reasons(sized(Setting(classes=(heavy,), choices=ONLY_APART)))
    asked = problem(Setting(classes=(heavy,)))
    powered = replace(asked, fleet=Fleet(OFFERS, RackLimit(1, 2500.0)))
    found = size(powered)
    assert RejectionReason.POWER in reasons(found)
    assert found.plan is None or (found.plan.watts or 0) <= 2500


@pytest.mark.parametrize(("spare", "words"), [(0, ""), (1, " with 1 spare"), (2, " with 2 spares")])
def test_what_exceeds_the_inventory_names_its_spares(spare: int, words: str) -> None:
    few = (offer(FAST, 2.0, inventory=8, unit=4), offer(CHEAP, 1.0, inventory=4))
    heavy = traffic(demand=replace(DEMAND, rate_p90_per_s=120.0))
    found = sized(Setting(classes=(heavy,), offers=few, choices=ONLY_APART, spare=SpareRule(replica_count=spare)))
    short = [each.what for each in found.rejections if each.reason is RejectionReason.INVENTORY and " x (" in each.what]
    assert short, [each.what for each in found.rejections]
    for what in short:
        assert all(pool.endswith(f"){words}") for pool in what.split(" + ")), what


def test_racks_ask_for_the_power_of_every_unit() -> None:
    asked = problem(Setting(offers=(offer(FAST, 2.0, watts=None),)))
    with pytest.raises(ConfigError, match=r"accelerators.fast.unit.kw is missing"):
        size(replace(asked, fleet=Fleet(asked.fleet.offers, RackLimit(1, 1e4))))


def test_whole_units_are_bought_and_filled() -> None:
    nodes = (offer(FAST, 2.0, inventory=8, unit=8),)
    bought = plan_of(Setting(offers=nodes, choices=ONLY_TOGETHER))
    assert bought.device_counts == {"fast": 8} and bought.unit_counts == {"fast": 1}
    assert bought.usd_per_h == pytest.approx(16.0)
    used = bought.candidates[0].device_counts()["fast"]
    assert used + bought.candidates[0].pools[0].option.shape.device_count > 8


@pytest.mark.parametrize(
    ("rule", "p90", "p50", "total"),
    [
        (SpareRule(), 4, 2, 4),
        (SpareRule(replica_count=1), 4, 2, 5),
        (SpareRule(rolling_count=3), 4, 2, 5),
        (SpareRule(zone_count=2), 4, 2, 4),
        (SpareRule(zone_count=2), 4, 3, 6),
        (SpareRule(zone_count=3), 4, 4, 6),
    ],
)
def test_spare_replicas(rule: SpareRule, p90: int, p50: int, total: int) -> None:
    assert rule.total_count(p90, p50) == total


def test_spares_are_bought() -> None:
    spared = plan_of(Setting(choices=ONLY_TOGETHER, spare=SpareRule(replica_count=1, zone_count=2)))
    plain = plan_of(Setting(choices=ONLY_TOGETHER))
    assert spared.usd_per_h > plain.usd_per_h
    assert spared.candidates[0].pools[0].spare_count >= 1


def test_classes_share_pools_when_that_is_cheaper() -> None:
    half = replace(DEMAND, rate_p50_per_s=3.0, rate_p90_per_s=5.0)
    both = (traffic("a", half), traffic("b", half))
    found = plan_of(Setting(classes=both, choices=ONLY_TOGETHER))
    assert [each.classes for each in found.candidates] == [("a", "b")]
    alone = [plan_of(Setting(classes=(each,), choices=ONLY_TOGETHER)).usd_per_h for each in both]
    assert found.usd_per_h <= sum(alone)


def test_classes_with_unlike_promises_are_kept_apart_when_that_is_cheaper() -> None:
    strict = traffic("strict", replace(DEMAND, rate_p50_per_s=1.0, rate_p90_per_s=1.0), Slo(100, 4.5))
    loose = traffic(
        "loose",
        replace(DEMAND, rate_p50_per_s=60.0, rate_p90_per_s=60.0, input_tokens=600, output_tokens=250),
        Slo(20_000, 200),
    )
    found = plan_of(Setting(classes=(strict, loose), choices=ONLY_TOGETHER))
    assert sorted(each.classes for each in found.candidates) == [("loose",), ("strict",)]


def test_two_models_never_share_a_pool() -> None:
    big = traffic("big", replace(DEMAND, rate_p50_per_s=1, rate_p90_per_s=1), Slo(3000, 60), "Llama-3.1-70B")
    found = plan_of(Setting(classes=(traffic("small"), big), choices=replace(CHOICES, tensor_parallel_count=(1, 2, 4))))
    assert sorted(each.classes for each in found.candidates) == [("big",), ("small",)]
    assert found.device_counts.keys() <= {each.name for each in OFFERS}
    stock = {each.name: each.inventory_count for each in OFFERS}
    assert all(count <= stock[name] for name, count in found.device_counts.items())


def test_no_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="classes is empty"):
        size(replace(problem(Setting()), classes=()))


def test_a_candidate_that_misses_when_played_out_is_followed_by_the_next() -> None:
    asked = problem(Setting(choices=ONLY_TOGETHER))
    free = size(asked).plan
    assert free is not None

    def only_fast(rater: Rater, pools: Sequence[PoolPlan]) -> float:
        return 1.0 if all(pool.option.offer.name == "fast" for pool in pools) else 0.5

    found = size(replace(asked, check=only_fast))
    assert found.plan is not None and set(found.plan.device_counts) == {"fast"}
    missed = [each for each in found.rejections if each.reason is RejectionReason.MISSED_WHEN_PLAYED]
    assert missed and "0.500 of requests in time" in missed[0].detail
    assert found.plan.usd_per_h > free.usd_per_h
    dearer = [each for each in found.rejections if each.reason is RejectionReason.COSTS_MORE]
    assert all((each.usd_per_h or 0.0) >= found.plan.usd_per_h for each in dearer), "a miss is told once, as a miss"
    assert f"promised {SLO.goodput_ratio:g}" in missed[0].detail


@pytest.mark.parametrize(
    ("value", "limit", "told"), [(0.9497, 0.95, "0.9497"), (0.9, 0.95, "0.900"), (0.95, 0.95, "0.950")]
)
def test_a_miss_is_told_with_the_digits_that_show_it(value: float, limit: float, told: str) -> None:
    assert told_apart(value, limit, 3) == told


def test_a_verdict_is_told_with_what_is_missed() -> None:
    def words(use: float, goodput: float, short: float) -> str:
        return miss_words(Verdict(*(np.array([figure]) for figure in (use, 0.5, goodput, short))), 0)

    assert words(1.00004, 0.97, -0.02) == "1.00004 times the limit, 0.970 of requests in time"
    assert words(0.98, 0.9497, 0.0003) == "0.98 times the limit, 0.9497 of requests in time, 0.0003 too few"
    assert words(123.4, 0.1, 0.8) == "123 times the limit, 0.100 of requests in time, 0.800 too few"


def test_one_replica_that_is_not_enough_is_not_called_all_of_them() -> None:
    found = sized(Setting(offers=(offer(CHEAP, 1.0, inventory=1),)))
    assert any("with the only replica at" in each.detail for each in found.rejections)
    assert not any("all 1 replicas" in each.detail for each in found.rejections)


def test_classes_in_one_pool_have_figures_of_their_own() -> None:
    strict = traffic("strict", DEMAND, Slo(300, 10))
    loose = traffic("loose", replace(DEMAND, input_tokens=3 * DEMAND.input_tokens), Slo(60_000, 200))
    asked = replace(problem(Setting()), classes=(strict, loose))
    rater = Rater(group_load(asked.classes), asked.steps)
    option = next(pool.option for each in plan_of(Setting()).candidates for pool in each.pools)
    pools = (PoolPlan(PoolRole.BOTH, option, 40, 0),)
    told, slower = class_figures(rater, pools), class_figures(rater, pools, 2.0, 20.0)
    assert told["loose"].ttft_percentile_ms > told["strict"].ttft_percentile_ms, "its prompts are longer"
    assert slower["strict"].goodput_ratio < 0.5 and slower["loose"].goodput_ratio > 0.99
    assert slower["loose"].ttft_percentile_ms == pytest.approx(2 * told["loose"].ttft_percentile_ms)
    alone = Rater(group_load([strict]), asked.steps)
    served = alone.full(pools, alone.load.rate_p90_per_s)
    verdict = judged(latencies([served]), [strict.slo], [0.0])
    expected, figures = prediction(served, verdict, 0, strict.slo), class_figures(alone, pools)["strict"]
    assert figures.ttft_percentile_ms == expected.ttft_percentile_ms
    assert figures.goodput_ratio == expected.goodput_ratio


def test_utilisation_is_the_rate_over_what_is_carried_also_when_replayed() -> None:
    asked = problem(Setting(choices=ONLY_APART))
    (found,) = plan_of(Setting(choices=ONLY_APART)).candidates
    rater = Rater(group_load(asked.classes), asked.steps, replayed(request_count=200, seeds=(1,)))
    rate = rater.load.rate_p90_per_s
    halves = [rater.half(pool.role, pool.option, pool.serving_count, rate).utilisation_ratio for pool in found.pools]
    assert rater.full(found.pools, rate).utilisation_ratio == max(halves) < 1


def test_a_check_that_nothing_passes_leaves_no_plan() -> None:
    asked = problem(Setting(choices=ONLY_TOGETHER, offers=(offer(CHEAP, 1.0, inventory=4),)))
    found = size(replace(asked, check=lambda rater, pools: 0.0))
    assert found.plan is None and RejectionReason.MISSED_WHEN_PLAYED in reasons(found)
    assert found.impossible is not None and "played out" in found.impossible.sentence
