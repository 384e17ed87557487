"""Load counts, breakers and hops."""

from __future__ import annotations

import pytest

from router.endpoints import (
    Breaker,
    BreakerState,
    Ending,
    Endpoint,
    Finish,
    HopTable,
    Load,
    LoadNews,
    Place,
    Ticket,
)


def ticket(number: int, prefill_s: float = 1.0, at_s: float = 0.0, *, streamed: bool = True) -> Ticket:
    return Ticket(
        ticket_id=number,
        endpoint_id="a",
        incarnation="",
        model="m",
        prefill_s=prefill_s,
        queue_s=0.0,
        kv_tokens=100,
        input_tokens=90,
        predicted_cached_tokens=0,
        held_ratio=0.0,
        prompt_bytes=360,
        asked_tokens=90,
        leaf=0,
        speculative=False,
        previous_use_us=None,
        stamp_us=int(at_s * 1e6),
        picked_s=at_s,
        sent_s=at_s,
        trial=False,
        streamed=streamed,
    )


class TestLoad:
    def test_counts_at_the_pick_and_returns_to_zero_on_every_path(self) -> None:
        load = Load()
        tickets = [ticket(number) for number in range(3)]
        for each in tickets:
            load.take(each)
        assert (load.view(0.0).waiting_count, load.decoding_count, load.kv_tokens) == (3, 0, 300)
        load.start_decode(tickets[0], 1.0)
        assert (load.view(1.0).waiting_count, load.decoding_count, load.kv_tokens) == (2, 1, 300)
        for each in tickets:
            load.release(each, 2.0)
        view = load.view(2.0)
        assert (view.waiting_count, view.decoding_count, view.backlog_s, view.kv_tokens) == (0, 0, 0.0, 0)

    def test_releasing_twice_counts_once_and_a_late_first_token_does_nothing(self) -> None:
        load = Load()
        one, two = ticket(1), ticket(2)
        load.take(one)
        load.take(two)
        load.release(one, 1.0)
        load.release(one, 1.0)
        load.start_decode(one, 1.0)
        assert (load.view(1.0).waiting_count, load.decoding_count, load.kv_tokens) == (1, 0, 100)

    def test_elapsed_time_is_credited_to_the_oldest_prefill_only(self) -> None:
        load = Load()
        load.take(ticket(1, prefill_s=4.0))
        load.take(ticket(2, prefill_s=2.0))
        assert load.remaining_s(0.0) == pytest.approx(6.0)
        assert load.remaining_s(3.0) == pytest.approx(3.0)
        assert load.remaining_s(4.0) == pytest.approx(2.0)

    def test_a_stuck_engine_looks_worse_the_longer_it_is_stuck(self) -> None:
        load = Load()
        load.take(ticket(1, prefill_s=1.0))
        assert [round(load.remaining_s(at_s), 6) for at_s in (1.0, 2.0, 31.0)] == [0.0, 1.0, 30.0]

    def test_rounding_does_not_add_up(self) -> None:
        load = Load()
        for number in range(1_000):
            load.take(ticket(number, prefill_s=0.1 * (number % 7 + 1)))
        for number in range(1_000):
            load.release(load.own[number], 1.0)
        assert load.view(1.0).backlog_s == 0.0

    def test_an_answer_that_comes_whole_is_taken_to_decode_when_its_prefill_was_due(self) -> None:
        load = Load()
        whole = ticket(1, prefill_s=2.0, streamed=False)
        load.take(whole)
        assert load.remaining_s(1.0) == pytest.approx(1.0)
        assert (load.remaining_s(60.0), load.decoding_count) == (0.0, 1)
        load.release(whole, 60.0)
        assert (load.decoding_count, load.kv_tokens) == (0, 0)

    def test_a_siblings_news_replace_its_earlier_ones(self) -> None:
        load = Load()
        load.take(ticket(1, prefill_s=1.0))
        load.hear("p", LoadNews("a", 5.0, 2, 3, 500), 0.0)
        load.hear("p", LoadNews("a", 4.0, 1, 3, 400), 0.0)
        load.hear("q", LoadNews("a", 1.0, 1, 0, 50), 0.0)
        view = load.view(0.0)
        assert (view.waiting_count, view.decoding_count, view.kv_tokens) == (3, 3, 550)
        assert view.backlog_s == pytest.approx(6.0)
        load.hear("p", LoadNews("a", 0.0, 0, 0, 0), 0.0)
        load.hear("q", None, 0.0)
        view = load.view(0.0)
        assert (view.waiting_count, view.decoding_count, view.kv_tokens) == (1, 0, 100)

    def test_what_no_sibling_repeats_expires(self) -> None:
        load = Load()
        load.hear("p", LoadNews("a", 5.0, 2, 3, 500), 1.0)
        load.hear("q", LoadNews("a", 1.0, 0, 1, 100), 2.0)
        load.expire(1.5)
        assert (load.decoding_count, load.kv_tokens, load.peer_backlog_s) == (1, 100, 1.0)

    def test_what_is_told_to_siblings_is_our_own_load_alone(self) -> None:
        load = Load()
        load.take(ticket(1, prefill_s=1.0))
        load.hear("p", LoadNews("a", 5.0, 2, 3, 500), 0.0)
        assert load.news("a", 0.0) == LoadNews("a", 1.0, 1, 0, 100)

    def test_a_prefix_is_settled_when_nobody_can_still_be_computing_it(self) -> None:
        load = Load()
        assert load.settled(None, 10.0)
        load.take(ticket(1, at_s=10.0))
        assert not load.settled(None, 11.0)
        assert load.settled(9_000_000, 11.0) and not load.settled(10_000_000, 11.0)
        load.hear("p", LoadNews("a", 5.0, 1, 0, 100), 0.0)
        assert not load.settled(9_000_000, 11.0) and load.settled(9_000_000, 30.0)


def fail(breaker: Breaker, count: int, now_s: float = 0.0, outcome: Ending = Ending.FAILED) -> None:
    for number in range(count):
        breaker.ended(ticket(number), Finish(outcome), now_s)


class TestBreaker:
    @pytest.mark.parametrize("outcome", [Ending.FAILED, Ending.UNREACHABLE])
    def test_opens_at_the_fifth_failure(self, outcome: Ending) -> None:
        breaker = Breaker()
        fail(breaker, 4, outcome=outcome)
        assert breaker.admits(0.0)
        assert breaker.ended(ticket(9), Finish(outcome), 0.0)
        assert not breaker.admits(4.9) and breaker.state(4.9) is BreakerState.OPEN

    @pytest.mark.parametrize("outcome", [Ending.REFUSED, Ending.CANCELLED, Ending.COMPLETED])
    def test_refusals_and_cancels_never_open_it(self, outcome: Ending) -> None:
        breaker = Breaker()
        fail(breaker, 50, outcome=outcome)
        assert breaker.admits(0.0) and not breaker.opened

    def test_half_the_attempts_failing_opens_it_but_one_in_three_does_not(self) -> None:
        often, seldom = Breaker(), Breaker()
        for _ in range(10):
            fail(often, 1)
            fail(often, 1, outcome=Ending.COMPLETED)
            fail(seldom, 1)
            fail(seldom, 2, outcome=Ending.COMPLETED)
        assert often.opened and not seldom.opened

    def test_trials_come_one_at_a_time_with_growing_back_off(self) -> None:
        breaker = Breaker()
        fail(breaker, 5)
        now_s, waits = 0.0, []
        for number in range(100, 107):
            waits.append(breaker.ready_s - now_s)
            now_s = breaker.ready_s
            assert breaker.admits(now_s) and breaker.state(now_s) is BreakerState.HALF_OPEN
            assert breaker.picked(number)
            assert not breaker.admits(now_s)
            assert breaker.ended(ticket(number), Finish(Ending.UNREACHABLE), now_s)
        assert waits == [5, 10, 20, 40, 60, 60, 60]

    def test_a_trial_that_is_answered_closes_it_at_the_first_token(self) -> None:
        breaker = Breaker()
        fail(breaker, 5)
        breaker.picked(7)
        breaker.first_token(ticket(7))
        assert breaker.admits(100.0) and not breaker.opened
        fail(breaker, 4)
        assert not breaker.opened  # the old failures are forgotten

    def test_a_cancelled_trial_leaves_room_for_another(self) -> None:
        breaker = Breaker()
        fail(breaker, 5)
        breaker.picked(7)
        breaker.ended(ticket(7), Finish(Ending.CANCELLED), 6.0)
        assert breaker.admits(6.0) and breaker.opened

    def test_late_endings_of_ordinary_attempts_do_not_move_an_open_breaker(self) -> None:
        breaker = Breaker()
        fail(breaker, 5)
        fail(breaker, 3, now_s=4.0)
        fail(breaker, 3, now_s=4.0, outcome=Ending.COMPLETED)
        assert breaker.opened and breaker.ready_s == 5.0

    def test_busy_is_not_broken_and_waits_what_the_engine_asked(self) -> None:
        breaker = Breaker()
        breaker.ended(ticket(1), Finish(Ending.BUSY, retry_after_s=3.0), 0.0)
        assert not breaker.admits(2.9) and breaker.state(2.9) is BreakerState.BUSY and not breaker.opened
        assert breaker.admits(3.0)

    def test_busy_without_a_time_backs_off_until_an_answer(self) -> None:
        breaker = Breaker()
        waits = []
        for _ in range(7):
            now_s = breaker.ready_s
            breaker.ended(ticket(1), Finish(Ending.BUSY), now_s)
            waits.append(breaker.ready_s - now_s)
        assert waits == [0.25, 0.5, 1, 2, 4, 8, 8]
        breaker.ended(ticket(1), Finish(Ending.COMPLETED), 100.0)
        breaker.ended(ticket(1), Finish(Ending.BUSY), 100.0)
        assert breaker.ready_s == 100.25

    def test_an_absurd_retry_after_is_bounded(self) -> None:
        breaker = Breaker()
        breaker.ended(ticket(1), Finish(Ending.BUSY, retry_after_s=86_400.0), 0.0)
        assert breaker.ready_s == 60.0

    def test_only_a_recovery_that_the_probe_saw_brings_the_trial_forward(self) -> None:
        breaker = Breaker()
        fail(breaker, 5)
        breaker.health(True, 1.0)
        assert not breaker.admits(1.0)  # R22: healthy on /health, dead on inference
        breaker.health(False, 2.0)
        breaker.health(True, 3.0)
        assert breaker.admits(3.0) and breaker.opened

    def test_health_says_nothing_about_a_closed_breaker(self) -> None:
        breaker = Breaker()
        breaker.health(False, 0.0)
        assert breaker.admits(0.0)


class TestHops:
    TABLE = HopTable(Place("z1", "r1"), {("z1", "z9"): 0.007, ("r2", "r1"): 0.031})

    @pytest.mark.parametrize(
        ("zone", "region", "expected_s"),
        [
            ("z1", "r1", 0.0005),
            ("z2", "r1", 0.0015),
            ("z9", "r1", 0.007),
            ("z3", "r2", 0.031),
            ("z3", "r3", 0.060),
            ("", "", 0.0005),
        ],
    )
    def test_the_nearest_known_distance_counts(self, zone: str, region: str, expected_s: float) -> None:
        there = Endpoint("a", "http://a", frozenset(), zone=zone, region=region)
        assert self.TABLE.hop_s(there) == expected_s

    def test_an_unknown_place_of_ours_is_near(self) -> None:
        assert HopTable().hop_s(Endpoint("a", "http://a", frozenset(), zone="z", region="r")) == 0.0005
