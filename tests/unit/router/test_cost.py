"""The price of work on one engine, and learning an engine's speed."""

from __future__ import annotations

from math import e, exp, log1p

import pytest

from router.cost import (
    DEFAULT_SPEED,
    NEVER_FITS_S,
    Promise,
    SpeedLearner,
    Work,
    decode_danger_s,
    eviction_s,
    faded_s,
    harm_s,
    prefill_s,
    typical_speed,
)
from router.endpoints import EngineSpeed, Load, LoadNews
from tests.fakes.plain_price import price

SPEED = EngineSpeed(1_000.0, 0.5, 0.010)


def busy(decoding_count: int = 0, backlog_s: float = 0.0, kv_tokens: int = 1_000) -> Load:
    load = Load()
    load.hear("peer", LoadNews("a", backlog_s, int(backlog_s > 0), decoding_count, kv_tokens), 0.0)
    return load


def work(input_tokens: int, output_tokens: int = 0, answer_tokens: float = 100.0) -> Work:
    return Work(input_tokens, output_tokens, answer_tokens)


def test_an_idle_engine_costs_its_prefill() -> None:
    assert price(SPEED, Load(), work(1_000, 20), 400) == pytest.approx((0.0, 1.1, 0.0, 0.0))


def test_prefill_grows_with_the_context_where_the_engine_says_so() -> None:
    quadratic = EngineSpeed(1_000.0, 0.5, 0.010, prefill_s_per_token2=1e-6)
    assert prefill_s(quadratic, 1_000, 2_000) == pytest.approx(0.5 + 1.0 + 1e-6 * 1_000 * 2_500)
    assert price(quadratic, Load(), work(3_000), 2_000)[1] == pytest.approx(4.0)


def test_a_backlog_is_waited_for() -> None:
    assert price(SPEED, busy(backlog_s=7.0), work(1_000), 0)[0] == pytest.approx(7.0)


def test_a_prefill_endangers_the_answers_that_run_or_wait_there() -> None:
    crowded = EngineSpeed(1_000.0, 0.5, 0.010, decode_s_per_running=0.001)
    load = Load()
    load.hear("peer", LoadNews("a", 3.0, 2, 3, 1_000), 0.0)
    queue_s, own_s, decode_s, slowdown_s = price(crowded, load, work(100), 0)
    assert (queue_s, own_s, decode_s) == pytest.approx((3.0, 0.6, 0.0))
    # Steps of 15 ms leave 35 ms a token: an answer of mean 100 misses if it has under 0.6 / 0.035 = 17 tokens.
    assert slowdown_s == pytest.approx(5 * 0.1 * (1 - exp(-0.6 / 3.5)))


def test_an_engine_that_cannot_keep_the_promise_is_still_worse_with_more_running() -> None:
    slow = Promise(tpot_s=0.005)
    assert 0 < harm_s(slow, 0.010, 0.1, 100) < harm_s(slow, 0.010, 0.2, 100) < slow.harm_s
    assert decode_danger_s(slow, 0.005, 0.0, 1.0) == pytest.approx(3 * 0.2)
    # 10 ms are two promises, 1.2 above where it counts: 0.9 s, and the logarithm of what is beyond 0.3.
    assert decode_danger_s(slow, 0.010, 0.0, 1.0) == pytest.approx(0.9 + log1p(1.2 - 0.3))
    assert decode_danger_s(slow, 0.060, 0.0, 1.0) > decode_danger_s(slow, 0.010, 0.0, 1.0) + 1


def test_an_engine_that_cannot_hold_a_request_is_the_last_resort() -> None:
    small = EngineSpeed(1_000.0, 0.0, 0.010, kv_capacity_tokens=10_000)
    assert eviction_s(small, 0, 10_001, 0.25) == NEVER_FITS_S


def test_recent_prefills_stretch_the_steps_to_come() -> None:
    # Half of an answer's second was prefill: steps of 10 ms look like 20, far from the promise of 50; 0.3 s a second.
    assert decode_danger_s(Promise(), 0.010, 0.5, 1.0) == pytest.approx(0.15)
    # A promise that is near: 20 ms of 24.
    assert decode_danger_s(Promise(tpot_s=0.024), 0.010, 0.5, 1.0) == pytest.approx(0.15 + 3 * (20 / 24 - 0.8))
    # Only prefills, of which one long one may be over: neither part grows without end.
    assert decode_danger_s(Promise(tpot_s=0.020), 0.010, 9.0, 1.0) == pytest.approx(0.3 + 3 * 0.3)


def test_prefills_fade_over_one_answer() -> None:
    assert faded_s(2.0, 10.0, 3.0, 13.0) == pytest.approx(2.0 / e)
    assert faded_s(0.0, 10.0, 3.0, 13.0) == 0.0


def test_a_request_that_finds_no_kv_room_waits_for_some() -> None:
    small = EngineSpeed(1_000.0, 0.0, 0.010, kv_capacity_tokens=2_000)
    free = price(small, busy(decoding_count=1, kv_tokens=900), work(1_000, 100), 0)[0]
    full = price(small, busy(decoding_count=1, kv_tokens=1_800), work(1_000, 100), 0)[0]
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
