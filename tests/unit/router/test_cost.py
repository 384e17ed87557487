"""The price of work on one engine, and learning an engine's speed."""

from __future__ import annotations

import pytest

from router.cost import DEFAULT_SPEED, SpeedLearner, Work, eviction_s, prefill_s, typical_speed
from router.endpoints import EngineSpeed, Load, LoadNews
from tests.fakes.plain_price import price

SPEED = EngineSpeed(1_000.0, 0.5, 0.010)


def busy(decoding_count: int = 0, backlog_s: float = 0.0, kv_tokens: int = 1_000) -> Load:
    load = Load()
    load.hear("peer", LoadNews("a", backlog_s, int(backlog_s > 0), decoding_count, kv_tokens), 0.0)
    return load


def test_an_idle_engine_costs_its_prefill_and_its_decode() -> None:
    assert price(SPEED, Load(), Work(1_000, 20), 400, 0.0) == pytest.approx((0.0, 1.1, 0.2, 0.0))


def test_prefill_grows_with_the_context_where_the_engine_says_so() -> None:
    quadratic = EngineSpeed(1_000.0, 0.5, 0.010, prefill_s_per_token2=1e-6)
    assert prefill_s(quadratic, 1_000, 2_000) == pytest.approx(0.5 + 1.0 + 1e-6 * 1_000 * 2_500)
    assert price(quadratic, Load(), Work(3_000, 0), 2_000, 0.0)[1] == pytest.approx(4.0)


def test_a_backlog_is_waited_for() -> None:
    assert price(SPEED, busy(backlog_s=7.0), Work(1_000, 0), 0, 0.0)[0] == pytest.approx(7.0)


def test_running_decodes_slow_the_prefill_and_are_slowed_by_it() -> None:
    queue_s, own_s, _, slowdown_s = price(SPEED, busy(decoding_count=4), Work(2_048, 0), 0, 0.0)
    assert queue_s == pytest.approx(0.010)  # one mixed step of 2,048 tokens
    assert slowdown_s == pytest.approx(4 * own_s)


def test_more_running_requests_make_decoding_slower_where_the_engine_says_so() -> None:
    crowded = EngineSpeed(1_000.0, 0.5, 0.010, decode_s_per_running=0.001)
    _, own_s, decode_s, slowdown_s = price(crowded, busy(decoding_count=5), Work(100, 100), 0, 0.0)
    assert decode_s == pytest.approx(100 * 0.015)
    assert slowdown_s == pytest.approx(5 * (own_s + 100 * 0.001))


def test_who_waits_now_decodes_beside_the_request_later() -> None:
    crowded = EngineSpeed(1_000.0, 0.5, 0.010, decode_s_per_running=0.001)
    load = Load()
    load.hear("peer", LoadNews("a", 3.0, 2, 0, 1_000), 0.0)
    queue_s, _, decode_s, slowdown_s = price(crowded, load, Work(100, 100), 0, 0.0)
    assert queue_s == pytest.approx(3.0)
    assert decode_s == pytest.approx(100 * 0.012)
    assert slowdown_s == pytest.approx(2 * 100 * 0.001)


def test_a_request_that_finds_no_kv_room_waits_for_some() -> None:
    small = EngineSpeed(1_000.0, 0.0, 0.010, kv_capacity_tokens=2_000)
    free = price(small, busy(decoding_count=1, kv_tokens=900), Work(1_000, 100), 0, 0.0)[0]
    full = price(small, busy(decoding_count=1, kv_tokens=1_800), Work(1_000, 100), 0, 0.0)[0]
    assert full - free == pytest.approx(1.0 * 900 / 1_800)


@pytest.mark.parametrize(("resident", "expected_s"), [(0, 0.0), (9_000, 0.0), (9_500, 0.125), (20_000, 0.25)])
def test_eviction_charges_only_what_overflows(resident: int, expected_s: float) -> None:
    small = EngineSpeed(1_000.0, 0.0, 0.010, kv_capacity_tokens=10_000)
    assert eviction_s(small, resident, 1_000, 0.25) == pytest.approx(expected_s)
    assert eviction_s(SPEED, resident, 1_000, 0.25) == 0.0


def test_an_unknown_engine_is_its_pools_median_or_the_default() -> None:
    known = [EngineSpeed(rate, 0.1, rate / 1e6) for rate in (1_000.0, 2_000.0, 90_000.0)]
    assert typical_speed(known, DEFAULT_SPEED) == EngineSpeed(2_000.0, 0.1, 0.002)
    assert typical_speed([], DEFAULT_SPEED) == DEFAULT_SPEED


def test_a_learner_finds_the_speed_of_its_engine() -> None:
    learner = SpeedLearner(DEFAULT_SPEED)
    assert not learner.measured and learner.speed() == DEFAULT_SPEED
    for number in range(60):
        new_tokens = 20 if number % 3 == 0 else 3_000
        learner.prefilled(new_tokens, 0.2 + new_tokens / 500)
        learner.decoded(100, 4.0)
    speed = learner.speed()
    assert speed.prefill_tok_per_s == pytest.approx(500, rel=0.02)
    assert speed.prefill_overhead_s == pytest.approx(0.2, rel=0.05)
    assert speed.decode_s_per_token == pytest.approx(0.040)


def test_one_stall_moves_the_estimate_little_and_a_lasting_change_is_followed() -> None:
    learner = SpeedLearner(DEFAULT_SPEED)
    for _ in range(20):
        learner.prefilled(1_000, 1.03)
    learner.prefilled(1_000, 500.0)
    assert learner.speed().prefill_tok_per_s > 600
    for _ in range(30):
        learner.prefilled(1_000, 2.03)
    assert learner.speed().prefill_tok_per_s == pytest.approx(500, rel=0.05)


def test_samples_that_say_nothing_are_left_out() -> None:
    learner = SpeedLearner(DEFAULT_SPEED)
    learner.prefilled(1_000, 0.0)
    learner.prefilled(1_000, -1.0)
    learner.decoded(3, 1.0)
    learner.decoded(100, 0.0)
    assert not learner.measured
