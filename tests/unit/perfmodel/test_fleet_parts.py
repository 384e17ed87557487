"""The parts of sizing: shares within limits, merged classes, purchases, moves, token costs, flips, AFD and
simulation.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.adapters.catalog import load_catalog
from perfmodel.disaggregation import afd_step
from perfmodel.errors import ConfigError
from perfmodel.search.cheapest import Sized, size
from perfmodel.search.costs import group_costs
from perfmodel.search.flips import Short, break_evens, slo_flips
from perfmodel.search.moves import StartSpeed, moves
from perfmodel.search.options import bounds, engine_options
from perfmodel.search.plan import Fleet, Plan, PoolPlan, PoolRole, RackLimit, Slo, Topology
from perfmodel.search.purchase import Purchasing
from perfmodel.search.rating import Latencies, Memory, Rater, at_share, group_load, judged, share_within
from perfmodel.search.simulated import demand_trace, played_out, simulated
from perfmodel.search.steps import AfdSteps, BandwidthSteps, afd_engine
from perfmodel.serving import LengthLaw
from perfmodel.simulation.policy import Ask, PolicyFleet, Usage
from perfmodel.step_time import decode_batch
from tests.fakes.sizing import (
    CARD,
    CHEAP,
    CHOICES,
    DEMAND,
    FAST,
    OFFERS,
    RooflineSteps,
    Setting,
    architecture,
    offer,
    problem,
    traffic,
)

ONLY_TOGETHER = replace(CHOICES, topologies=(Topology.AGGREGATED,))


def answer(setting: Setting) -> Sized:
    return size(problem(setting))


def plan_of(setting: Setting) -> Plan:
    found = answer(setting).plan
    assert found is not None
    return found


# Shares and percentiles


def test_a_share_within_a_limit_is_the_inverse_of_the_percentile() -> None:
    p50, p90, p99 = (np.array([value]) for value in (100.0, 400.0, 900.0))
    for share in (0.5, 0.75, 0.9, 0.95, 0.99, 0.995):
        limit = float(at_share(share, p50, p90, p99)[0])
        assert share_within(limit, p50, p90, p99)[0] == pytest.approx(share, abs=1e-9)
    assert share_within(0.0, p50, p90, p99)[0] == 0
    assert share_within(50.0, p50, p90, p99)[0] == pytest.approx(0.25)


def test_requests_that_are_all_alike_meet_a_limit_or_do_not() -> None:
    same = np.array([100.0])
    assert share_within(100.1, same, same, same)[0] == pytest.approx(1.0)
    assert share_within(99.0, same, same, same)[0] < 0.5


def test_a_mixture_of_classes_varies_more_than_its_parts() -> None:
    short = traffic("short", replace(DEMAND, input_tokens=100, law=LengthLaw.FIXED))
    long = traffic("long", replace(DEMAND, input_tokens=1900, law=LengthLaw.FIXED))
    load = group_load((short, long))
    assert load.lengths.input_tokens == pytest.approx(1000)
    assert load.lengths.cv2[0] == pytest.approx(0.81)
    assert load.rate_p90_per_s == pytest.approx(2 * DEMAND.rate_p90_per_s)


def test_a_longer_class_in_a_shared_pool_waits_longer() -> None:
    short = traffic("short", replace(DEMAND, input_tokens=100))
    long = traffic("long", replace(DEMAND, input_tokens=4000))
    options, _ = engine_options(architecture(), Fleet(OFFERS), CHOICES, 10_000)
    shifts = Rater(group_load((short, long)), RooflineSteps).shifts_ms(options[0])
    assert shifts[0] < 0 < shifts[1]


def test_one_candidate_is_judged_as_it_is_among_many() -> None:
    generator = np.random.default_rng(1)
    ttft = np.sort(generator.exponential(100, (200, 3)), axis=1)
    tpot = np.sort(generator.exponential(20, (200, 3)), axis=1)
    ttft[0], tpot[1] = 86_400_000.0, tpot[1, 0]
    slos = [Slo(120, 25, 0.5, 0.7), Slo(300, 40, 0.95, 0.9)]
    shifts = [-30.0, 45.0]
    together = judged(Latencies(ttft, tpot), slos, shifts)
    for at in range(len(ttft)):
        alone = judged(Latencies(ttft[at : at + 1], tpot[at : at + 1]), slos, shifts)
        assert alone.use[0] == pytest.approx(together.use[at], rel=1e-9)
        assert alone.goodput[0] == pytest.approx(together.goodput[at], rel=1e-9, abs=1e-12)
        assert alone.meets[0] == together.meets[at] and alone.reason(0) == together.reason(at)
    unknown = judged(Latencies(ttft[:1], tpot[:1]), slos[:1], [math.nan])
    assert math.isinf(unknown.ttft_use[0]) and not unknown.meets[0]


def test_the_full_model_is_asked_again_for_another_cached_share() -> None:
    options, _ = engine_options(architecture(), Fleet(OFFERS), CHOICES, 10_000)
    shared = Memory()
    shown = []
    for ratio in (0.0, 0.9):
        rater = Rater(group_load((traffic(demand=replace(DEMAND, cached_ratio=ratio)),)), RooflineSteps, memory=shared)
        shown.append(rater.full([PoolPlan(PoolRole.BOTH, options[0], 8, 0)], DEMAND.rate_p90_per_s).ttft_mean_ms)
    assert shown[1] < shown[0], "the answer for one load is not given for another"


# Purchases


def test_units_racks_and_watts() -> None:
    fleet = Fleet((offer(FAST, 2.0, inventory=16, unit=8), offer(CHEAP, 1.0, inventory=6, unit=4)), RackLimit(2, 9000))
    buying = Purchasing(
        replace(fleet, offers=tuple(replace(each, unit=replace(each.unit, watts=8000)) for each in fleet.offers))
    )
    bill = buying.bill(np.array([[1, 0], [9, 0], [8, 4], [0, 5], [9, 1]]))
    assert bill.usd_per_h.tolist() == [16, 32, 20, 8, 36]
    assert bill.in_stock.tolist() == [True, True, True, False, True]
    assert bill.in_power.tolist() == [True, True, True, True, False]
    assert buying.stock_devices("cheap") == 4
    assert buying.watts(bill.units[2]) == 16_000
    assert buying.devices(bill.units[1]) == {"fast": 16}


# Bounds


def test_the_bound_is_below_what_any_engine_does() -> None:
    options, _ = engine_options(architecture(), Fleet(OFFERS), CHOICES, 2000)
    for option in options:
        least = bounds(option.shape, DEMAND)
        context = int(DEMAND.input_tokens)
        assert least.tpot_ms < RooflineSteps(option).step_s(decode_batch(1, context)) * 1000
        assert (least.ttft_ms is None) == (option.offer.name == "card")


# Moves


def test_moves_between_day_and_night() -> None:
    day = plan_of(Setting(choices=ONLY_TOGETHER, offers=(offer(FAST, 2.0),)))
    quiet = traffic(demand=replace(DEMAND, rate_p50_per_s=1.0, rate_p90_per_s=2.0))
    night = plan_of(Setting(classes=(quiet,), choices=ONLY_TOGETHER, offers=(offer(CHEAP, 1.0),)))
    speed = StartSpeed(weight_bytes_per_s=2e9, warm_up_s=30)
    change = moves(day, night, DEMAND.output_tokens, {"fast": 8, "cheap": 8}, speed)
    stopped, started = sorted(change.moves, key=lambda move: move.after_count)
    assert stopped.after_count == 0 and stopped.before_count >= 1
    weights = 2 if started.option.shape.weight_format == "bf16" else 1
    assert started.start_s == pytest.approx(30 + weights * 8.03 / 2 / started.option.shape.device_count, rel=0.2)
    assert not started.waits_for_drain and change.total_s >= started.start_s
    assert moves(day, day, 100, {}, speed).moves == ()


def test_a_start_waits_when_the_devices_are_taken() -> None:
    wide = replace(ONLY_TOGETHER, tensor_parallel_count=(2,))
    narrow = replace(ONLY_TOGETHER, tensor_parallel_count=(1,))
    before = plan_of(Setting(choices=narrow, offers=(offer(FAST, 2.0, inventory=2),)))
    after = plan_of(Setting(choices=wide, offers=(offer(FAST, 2.0, inventory=2),)))
    change = moves(before, after, DEMAND.output_tokens, {"fast": 2}, StartSpeed(1e9, 0))
    assert [move.waits_for_drain for move in change.moves if move.after_count] == [True]


# Costs


def test_groups_pay_the_plan_together() -> None:
    big = traffic("big", replace(DEMAND, rate_p50_per_s=1, rate_p90_per_s=1), Slo(3000, 60), "Llama-3.1-70B")
    found = answer(Setting(classes=(traffic("small"), big), choices=replace(CHOICES, tensor_parallel_count=(1, 2, 4))))
    assert found.plan is not None
    raters = {group.rater.load.names: group.rater for group in found.groups}
    costs = group_costs(found.plan, {each.name: each for each in OFFERS}, raters)
    assert sum(each.usd_per_h for each in costs) == pytest.approx(found.plan.usd_per_h)
    for each in costs:
        assert each.uncached_usd_per_million is not None and each.cached_usd_per_million is not None
        assert each.output_usd_per_million > each.uncached_usd_per_million > each.cached_usd_per_million >= 0


# Flips


def test_break_even_prices_change_the_plan() -> None:
    setting = Setting(choices=ONLY_TOGETHER, offers=OFFERS[:2])
    found = answer(setting)
    assert found.plan is not None
    for one in break_evens(problem(setting), found):
        assert one.usd_per_h is not None
        for factor, changed in ((0.97, not one.in_plan), (1.03, one.in_plan)):
            offers = tuple(
                replace(each, usd_per_h=one.usd_per_h * factor) if each.name == one.offer_name else each
                for each in setting.offers
            )
            other = plan_of(replace(setting, offers=offers))
            assert (other.device_counts != found.plan.device_counts) == changed, one.offer_name


def test_break_even_prices_of_two_groups_change_the_plan() -> None:
    big = traffic("big", replace(DEMAND, rate_p50_per_s=1, rate_p90_per_s=1), Slo(3000, 60), "Llama-3.1-70B")
    setting = Setting(
        classes=(traffic("small"), big),
        offers=OFFERS[:2],
        choices=replace(ONLY_TOGETHER, tensor_parallel_count=(1, 2, 4)),
    )
    found = answer(setting)
    assert found.plan is not None and len(found.plan.candidates) == 2
    told = [one for one in break_evens(problem(setting), found) if one.usd_per_h is not None]
    assert told
    for one in told:
        assert one.usd_per_h is not None
        # A dearer device of the plan, or a cheaper one that is not in it, changes the plan just beyond the price.
        beyond = one.usd_per_h * (1.02 if one.in_plan else 0.98)
        offers = tuple(
            replace(each, usd_per_h=beyond) if each.name == one.offer_name else each for each in setting.offers
        )
        assert plan_of(replace(setting, offers=offers)).device_counts != found.plan.device_counts


def test_the_nearest_promise_that_changes_the_plan() -> None:
    setting = Setting(choices=ONLY_TOGETHER, offers=OFFERS[:2])
    asked = problem(setting)
    plan = plan_of(setting)
    flips = [flip for flip in slo_flips(Short(asked, asked), plan) if flip is not None]
    assert flips
    (one,) = setting.classes
    for flip in flips:
        field = flip.field.removeprefix("slo.")
        looser = float(flip.value) > float(flip.was)
        assert flip.usd_per_h is None or (flip.usd_per_h < plan.usd_per_h) == looser
        assert abs(float(flip.stays) / float(flip.value) - 1) < 0.05, "the flip is brought near"
        at, stays = (
            size(problem(replace(setting, classes=(replace(one, slo=replace(one.slo, **{field: float(value)})),)))).plan
            for value in (flip.value, flip.stays)
        )
        assert (None if at is None else at.usd_per_h) == flip.usd_per_h, "what is told is what a search finds there"
        assert stays is not None and stays.usd_per_h == pytest.approx(plan.usd_per_h), "just before it the plan stays"
    # What a change leads to may be the plan that is told already: then nothing changes.
    for flip in flips:
        usd_per_h = flip.usd_per_h
        if usd_per_h is not None and usd_per_h > plan.usd_per_h:
            told = replace(plan, usd_per_h=usd_per_h)
            again = [
                each
                for each in slo_flips(Short(asked, asked), plan, told)
                if each is not None and each.field == flip.field
            ]
            assert all(each.usd_per_h != usd_per_h for each in again)


# Engines that the calibrated model does not describe


def test_the_table_of_an_afd_decoder_is_its_step() -> None:
    catalog = load_catalog()
    rack = offer(catalog.device("Groq-3-LPX-rack"), 60.0, inventory=1)
    gpu = offer(catalog.device("H200-SXM-141GB"), 2.0)
    choices = replace(CHOICES, topologies=(Topology.AFD,))
    options, _ = engine_options(catalog.model("gpt-oss-120b"), Fleet((gpu, rack)), choices, 4000)
    option = next(each for each in options if each.chips is not None)
    steps = AfdSteps(option, 2000)
    for batch in (1, 16, 64):
        exact = afd_step(afd_engine(option), batch, 2000).step_s
        assert steps.step_s(decode_batch(batch, 2000)) == pytest.approx(exact, rel=0.02)
        assert steps.table(64).step_s(decode_batch(batch, 2000)) == pytest.approx(exact, rel=0.02)
    assert steps.compute_known
    with pytest.raises(ConfigError, match="no chips"):
        afd_engine(next(each for each in options if each.chips is None))


def test_a_device_without_compute_decodes_at_its_bandwidth() -> None:
    options, _ = engine_options(architecture(), Fleet((offer(CARD, 0.3),)), CHOICES, 2000)
    steps = BandwidthSteps(options[0], 1000)
    weights_s = 15.0e9 / (0.75 * 546e9)
    assert steps.step_s(decode_batch(1, 1000)) == pytest.approx(weights_s, rel=0.1)
    assert steps.table(8).step_s(decode_batch(8, 1000)) == pytest.approx(steps.step_s(decode_batch(8, 1000)))
    assert not steps.compute_known


# Simulation


class InTurn:
    """A policy: one engine after the other."""

    hears = False
    reads_blocks = False

    def __init__(self, fleet: PolicyFleet) -> None:
        self._count = len(fleet.engines)
        self._next = 0

    def pick(self, ask: Ask, now_s: float) -> int:
        self._next = (self._next + 1) % self._count
        return self._next

    def first_token(self, serial: int, now_s: float) -> None:
        return None

    def finished(self, serial: int, usage: Usage, now_s: float) -> None:
        return None


def test_the_trace_has_the_demand_and_its_shared_prefix() -> None:
    load = group_load((traffic(),))
    trace = demand_trace(load, 50.0, 4000, seed=3)
    trace.validate()
    assert trace.span_s == pytest.approx(4000 / 50, rel=0.1)
    assert trace.input_tokens.mean() == pytest.approx(DEMAND.input_tokens, rel=0.1)
    longest = max(len(trace.block_ids(row)) for row in range(len(trace)))
    shared = sum(int((trace.block_ids(row) < longest).sum()) for row in range(len(trace)))
    assert shared * 16 / trace.input_tokens.sum() == pytest.approx(DEMAND.cached_ratio, rel=0.05)


def test_a_plan_with_room_holds_when_simulated_and_one_without_does_not() -> None:
    heavy = traffic(demand=replace(DEMAND, rate_p90_per_s=250.0))
    found = answer(Setting(classes=(heavy,), choices=ONLY_TOGETHER, offers=(offer(FAST, 2.0, inventory=16),)))
    assert found.plan is not None
    (group,) = found.groups
    (pool,) = found.plan.candidates[0].pools
    assert pool.serving_count >= 3
    roomy = (replace(pool, serving_count=pool.serving_count + 2),)
    check = simulated(InTurn, request_count=600, seeds=(1, 2))
    assert check(group.rater, roomy) > 0.98
    short = (replace(pool, serving_count=1),)
    assert check(group.rater, short) < 0.5


def test_a_pair_is_simulated_with_its_hand_over() -> None:
    apart = replace(CHOICES, topologies=(Topology.DISAGGREGATED,))
    found = answer(Setting(choices=apart))
    assert found.plan is not None
    (group,) = found.groups
    played = played_out(group.rater, found.plan.candidates[0].pools, InTurn, request_count=400, seed=1)
    assert played.requests == 400 and 0 < played.goodput_ratio <= 1 and math.isfinite(played.ttft_p95_ms)
    dark = [
        PoolPlan(role, replace(pool.option, offer=replace(pool.option.offer, scaleout_bytes_per_s=None)), 1, 0)
        for role, pool in zip((PoolRole.PREFILL, PoolRole.DECODE), found.plan.candidates[0].pools, strict=True)
    ]
    with pytest.raises(ConfigError, match="is not known"):
        played_out(group.rater, dark, InTurn, request_count=10, seed=1)


def test_what_is_short_is_said_with_what_there_is() -> None:
    buying = Purchasing(Fleet((offer(FAST, 2.0, inventory=1),)))
    units = buying.bill(np.array([[2], [1]])).units
    assert buying.shortage_words(units[0]) == f"needs 2 {FAST.name}, there is 1"
    assert buying.stock_ratio(units).tolist() == [2.0, 1.0] and buying.power_ratio(units).tolist() == [0.0, 0.0]
