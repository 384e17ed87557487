"""The arithmetic of buckets and the process's side of leases, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.lease import IDLE_NS, LEASE_LOCAL_NS, RENEW_NS, SLOT_LOCAL_NS
from controlplane.leases import Leases, Plan
from controlplane.rate_limit import (
    LEASE_TTL_US,
    RESTART_US,
    SLOT_TTL_US,
    Admitted,
    Ask,
    Attempt,
    BucketReply,
    Buckets,
    Cost,
    RefusalReason,
    Refused,
    Reply,
    capacity_of,
    wait_s,
)
from controlplane.tenancy import Dimension, Limit

SECOND = 1_000_000_000
ONE = Cost(0, 0)


def limit(dimension: Dimension, amount: int, period_s: int = 60, burst: int | None = None, name: str = "l") -> Limit:
    return Limit(name, "org", "o", None, dimension, amount, period_s, amount if burst is None else burst)


def take(store: Buckets, one: Limit, need: int, now_us: int, *, lease: str = "a", want: int = 0) -> BucketReply | None:
    """Ask for `need`; None: refused."""
    reply = store.attempt(Attempt(lease, 0, (Ask(one, lease, need=need, want=want),)), now_us)
    return reply.buckets[0] if reply.admitted else None


def look(store: Buckets, one: Limit, now_us: int) -> BucketReply:
    return store.attempt(Attempt("x", 0, (Ask(one, "x"),)), now_us).buckets[0]


def told(store: Buckets, one: Limit, now_us: int, sequence: int, **what: object) -> BucketReply:
    ask = Ask(one, "a", **what)  # type: ignore[arg-type]  # the names of Ask's fields
    return store.attempt(Attempt("a", sequence, (ask,)), now_us).buckets[0]


# ---- waits


def test_the_wait_is_exact_to_the_microsecond() -> None:
    assert wait_s(limit(Dimension.REQUESTS, 3, 60), 0, 0, 1) == 20.0
    assert wait_s(limit(Dimension.REQUESTS, 3, 60), 0, 3_000_000, 1) == 19.0
    assert wait_s(limit(Dimension.REQUESTS, 7, 60), 0, 0, 1) == 8.571429  # 60/7 s, rounded up
    assert wait_s(limit(Dimension.REQUESTS, 3, 60), 5, 0, 5) == 0.0


def test_there_is_no_wait_for_what_never_comes() -> None:
    assert wait_s(limit(Dimension.REQUESTS, 0), 0, 0, 1) is None
    assert wait_s(limit(Dimension.CONCURRENCY, 5), 0, 0, 1) is None


def test_capacity_is_the_burst_of_a_rate_and_the_amount_of_slots() -> None:
    assert capacity_of(limit(Dimension.REQUESTS, 5, burst=9)) == 9
    assert capacity_of(limit(Dimension.CONCURRENCY, 5, burst=9)) == 5


# ---- the store


def test_a_bucket_refills_exactly_and_keeps_the_fraction() -> None:
    store, one = Buckets(), limit(Dimension.REQUESTS, 7, 60, burst=7)
    assert take(store, one, 7, 0) is not None
    told(store, one, 1, 1, spent=7)
    reply = look(store, one, 8_571_430)
    assert (reply.level, reply.fraction) == (1, 3)  # 8,571,429 us * 7 = 60,000,003: the first us refilled nothing
    for now_us in range(8_571_430, 60_000_000, 9_999):  # asking often must not lose fractions
        look(store, one, now_us)
    assert look(store, one, 60_000_001).level == 7


def test_level_and_leases_never_exceed_the_burst() -> None:
    store, one = Buckets(), limit(Dimension.REQUESTS, 1_000, 1, burst=100)
    assert take(store, one, 40, 0) is not None
    reply = look(store, one, 900_000)
    assert (reply.level, reply.out) == (60, 40)


def test_an_expired_lease_is_lost_not_credited() -> None:
    store, one = Buckets(), limit(Dimension.REQUESTS, 10, 3_600, burst=100)
    assert take(store, one, 40, 0) is not None
    reply = look(store, one, LEASE_TTL_US)
    assert (reply.level, reply.out) == (60, 0)


def test_a_returned_lease_is_whole_again() -> None:
    store, one = Buckets(), limit(Dimension.REQUESTS, 10, 3_600, burst=100)
    take(store, one, 40, 0)
    reply = told(store, one, 10, 1, returned=30, spent=10)
    assert (reply.level, reply.out) == (90, 0)


def test_all_limits_or_none() -> None:
    store = Buckets()
    wide, narrow = limit(Dimension.REQUESTS, 100, name="w"), limit(Dimension.REQUESTS, 2, name="n")
    asks = (Ask(wide, "a", need=5, want=10), Ask(narrow, "b", need=3))
    reply = store.attempt(Attempt("p", 0, asks), 0)
    assert not reply.admitted
    assert [bucket.granted for bucket in reply.buckets] == [0, 0]
    assert (look(store, wide, 0).level, look(store, narrow, 0).level) == (100, 2)


def test_grants_shrink_as_the_rest_shrinks_and_leave_a_share_to_others() -> None:
    store, one = Buckets(), limit(Dimension.REQUESTS, 1_000, 3_600)
    for name in ("a", "b", "c", "d"):
        store.attempt(Attempt(name, 0, ()), 0)
    grants = []
    for _ in range(6):
        reply = take(store, one, 1, 0, want=10_000)
        assert reply is not None
        grants.append(reply.granted)
    assert grants[0] == 1 + 999 // 8
    assert grants == sorted(grants, reverse=True)


def test_a_report_counts_once_even_if_sent_again() -> None:
    store, one = Buckets(), limit(Dimension.OUTPUT_TOKENS, 10, 3_600, burst=100)
    take(store, one, 50, 0)
    for _ in range(3):
        reply = told(store, one, 10, 1, spent=50, debt=20)
    assert reply.level == 30
    assert reply.generation == 0, "nothing may be credited for a report whose pool is not known"


def test_debt_goes_below_zero_and_is_paid_by_the_refill() -> None:
    store, one = Buckets(), limit(Dimension.OUTPUT_TOKENS, 10, 1, burst=100)
    take(store, one, 100, 0)
    assert told(store, one, 0, 1, spent=100, debt=50).level == -50
    assert take(store, one, 1, 5_000_000) is None
    assert take(store, one, 1, 5_100_000) is not None


def test_a_credit_is_paid_from_its_own_pool() -> None:
    store, one = Buckets(), limit(Dimension.OUTPUT_TOKENS, 1, 3_600, burst=100)
    take(store, one, 80, 0)
    generation = told(store, one, 10, 1, spent=80).generation
    assert told(store, one, 20, 2, credits=((generation, 60),)).level == 80
    assert told(store, one, 30, 3, credits=((generation, 60),)).level == 100  # 20 were left of the pool
    assert told(store, one, 40, 4, credits=((12345, 60),)).level == 100


def test_a_credit_is_lost_as_far_as_the_bucket_was_full_meanwhile() -> None:
    store, one = Buckets(), limit(Dimension.OUTPUT_TOKENS, 10, 1, burst=100)
    take(store, one, 80, 0)
    generation = told(store, one, 10, 1, spent=80).generation
    look(store, one, 3_000_000)  # 30 came in, so 30 of the 80 can no longer be kept
    assert told(store, one, 3_000_000, 2, credits=((generation, 80),)).level == 100
    take(store, one, 100, 3_000_000)
    assert told(store, one, 3_000_000, 3, credits=((generation, 80),)).level == 0


def test_a_long_request_does_not_stop_the_refill() -> None:
    store, one = Buckets(), limit(Dimension.OUTPUT_TOKENS, 10, 1, burst=100)
    take(store, one, 100, 0)
    told(store, one, 10, 1, spent=100)
    assert look(store, one, 10_000_010).level == 100


def test_slots_end_when_nobody_renews_them() -> None:
    store, one = Buckets(), limit(Dimension.CONCURRENCY, 2)
    assert take(store, one, 2, 0) is not None
    assert take(store, one, 1, SLOT_TTL_US - 1, lease="b") is None
    assert take(store, one, 1, SLOT_TTL_US, lease="b") is not None


def test_running_requests_register_again_where_the_store_forgot_them() -> None:
    store, one = Buckets(), limit(Dimension.CONCURRENCY, 2)
    assert told(store, one, 0, 1, held=2).out == 2
    assert take(store, one, 1, 1, lease="b") is None


def test_after_a_loss_of_the_store_buckets_start_empty() -> None:
    store = Buckets(empty_until_us=RESTART_US)
    rate, slots = limit(Dimension.REQUESTS, 10, 1, name="r"), limit(Dimension.CONCURRENCY, 2, name="c")
    assert take(store, rate, 1, 0) is None
    assert take(store, slots, 1, 0) is None
    assert look(store, rate, RESTART_US + 100_000).level == 1
    assert take(store, slots, 1, RESTART_US) is not None
    late = limit(Dimension.REQUESTS, 10, 1, name="late")
    assert look(store, late, RESTART_US + 500_000).level == 5


def test_idle_buckets_can_be_dropped_and_busy_ones_stay() -> None:
    store, one = Buckets(), limit(Dimension.REQUESTS, 10, 1)
    take(store, one, 10, 0)
    store.drop_idle([one], 500_000)
    assert store.bucket_count() == 1
    store.drop_idle([one], 10_000_000)
    assert store.bucket_count() == 0


# ---- the process's side


class Pair:
    """One process and its store on one clock, without delays."""

    def __init__(self) -> None:
        self.leases, self.store, self.now_ns = Leases("p"), Buckets(), 10 * SECOND

    def admit(self, limits: tuple[Limit, ...], cost: Cost = ONE) -> Admitted | Refused:
        found = self.leases.try_spend(limits, cost, self.now_ns)
        if found is not None:
            return found
        plan = self.leases.plan(limits, cost, self.now_ns)
        if isinstance(plan, Refused):
            return plan
        decision = self.leases.merge(plan, self.answer(plan), self.now_ns, self.now_ns)
        assert decision is not None
        return decision

    def answer(self, plan: Plan) -> Reply:
        return self.store.attempt(plan.attempt, self.now_ns // 1_000)

    def report(self) -> int:
        """One round; how many buckets were told of."""
        self.leases.begin_round()
        count = 0
        while (report := self.leases.report(self.now_ns)) is not None:
            count += len(report.attempt.asks)
            self.leases.reported(report, self.store.attempt(report.attempt, self.now_ns // 1_000), self.now_ns)
        return count

    def level(self, one: Limit) -> int:
        return look(self.store, one, self.now_ns // 1_000).level


WIDE = limit(Dimension.REQUESTS, 1_000, 3_600, name="wide")
TOKENS = limit(Dimension.OUTPUT_TOKENS, 10_000, 3_600, name="tokens")


def test_the_second_request_needs_no_store() -> None:
    pair = Pair()
    assert isinstance(pair.admit((WIDE,)), Admitted)
    assert pair.leases.try_spend((WIDE,), ONE, pair.now_ns) is not None


def test_a_lease_ends_here_before_it_ends_in_the_store() -> None:
    assert LEASE_LOCAL_NS < LEASE_TTL_US * 1_000
    assert SLOT_LOCAL_NS < SLOT_TTL_US * 1_000
    pair = Pair()
    pair.admit((WIDE,))
    assert pair.leases.try_spend((WIDE,), ONE, pair.now_ns + LEASE_LOCAL_NS) is None


def test_a_failed_try_takes_nothing_from_any_lease() -> None:
    pair = Pair()
    pair.admit((WIDE, TOKENS), Cost(0, 100))
    before = [(lease.left, lease.spent) for lease in pair.leases._leases.values()]
    assert pair.leases.try_spend((WIDE, TOKENS), Cost(0, 9_000), pair.now_ns) is None
    assert [(lease.left, lease.spent) for lease in pair.leases._leases.values()] == before


def test_wishes_grow_with_traffic() -> None:
    pair = Pair()
    grants = []
    for _ in range(200):
        before = pair.level(WIDE)
        pair.admit((WIDE,))
        grants.append(before - pair.level(WIDE))
    calls = [grant for grant in grants if grant]
    assert len(calls) < 20
    assert max(calls) > 4 * calls[0]


def test_a_small_limit_holds_nothing_in_advance() -> None:
    pair = Pair()
    small = limit(Dimension.REQUESTS, 15, 3_600)
    pair.admit((small,))
    assert pair.level(small) == 14
    assert pair.leases.urgent


def test_nothing_is_held_ahead_of_a_limit_that_another_process_could_hold_whole() -> None:
    pair = Pair()
    hundred = limit(Dimension.OUTPUT_TOKENS, 100, 86_400)
    other = Attempt("another process", 0, ())
    pair.store.attempt(other, pair.now_ns // 1_000)
    for size, ahead in ((25, True), (26, False)):
        admitted = pair.admit((hundred,), Cost(0, size))
        assert isinstance(admitted, Admitted)
        assert (pair.level(hundred) < 100 - size) == ahead
        pair.leases.urgent = False
        pair.leases.settle(admitted.ticket, Cost(0, 0), pair.now_ns)
        assert pair.leases.urgent == (not ahead)
        pair.now_ns += 0 if not ahead else IDLE_NS
        pair.report()
        assert pair.level(hundred) == 100


def test_what_a_running_request_holds_may_come_back_and_what_was_used_does_not() -> None:
    pair = Pair()
    cap, three, hundred = limit(Dimension.CONCURRENCY, 1, name="cap"), limit(Dimension.REQUESTS, 3), TOKENS
    pair.admit((cap, three))
    refused = pair.admit((cap, three))
    assert isinstance(refused, Refused)
    assert pair.leases.may_come_back(refused)
    for _ in range(2):
        pair.admit((three,))
    refused = pair.admit((three,))
    assert isinstance(refused, Refused)
    assert not pair.leases.may_come_back(refused)
    too_large = pair.admit((hundred,), Cost(0, 10_001))
    assert isinstance(too_large, Refused)
    assert not pair.leases.may_come_back(too_large)


def test_unspent_tokens_go_back_when_idle() -> None:
    pair = Pair()
    pair.admit((WIDE,))
    assert pair.level(WIDE) < 999
    pair.now_ns += IDLE_NS
    pair.report()
    assert pair.level(WIDE) == 999


def test_a_lease_in_use_is_renewed() -> None:
    pair = Pair()
    for _ in range(20):
        pair.admit((WIDE,))
        pair.now_ns += RENEW_NS // 2
        pair.report()
    assert pair.leases.try_spend((WIDE,), ONE, pair.now_ns) is not None


def test_nothing_is_told_twice_in_a_round_and_nothing_when_quiet() -> None:
    pair = Pair()
    pair.admit((WIDE, TOKENS), Cost(0, 5))
    pair.now_ns += IDLE_NS
    assert pair.report() == 2
    assert pair.report() == 0


def test_a_lost_answer_gives_the_lease_up() -> None:
    pair = Pair()
    pair.admit((WIDE,))
    plan = pair.leases.plan((WIDE,), Cost(0, 0, requests=500), pair.now_ns)
    assert isinstance(plan, Plan)
    pair.answer(plan)  # granted, but the answer is lost
    refused = pair.leases.abandon(plan)
    assert refused.reason is RefusalReason.STORE_UNAVAILABLE
    assert pair.leases.try_spend((WIDE,), ONE, pair.now_ns) is None
    assert isinstance(pair.admit((WIDE,)), Admitted)


def test_a_lost_report_is_sent_again_under_its_number() -> None:
    pair = Pair()
    ticket = pair.admit((TOKENS,), Cost(0, 100))
    assert isinstance(ticket, Admitted)
    pair.leases.settle(ticket.ticket, Cost(0, 1_100), pair.now_ns)
    pair.now_ns += RENEW_NS  # debts ride on the renewal of their lease
    pair.leases.begin_round()
    report = pair.leases.report(pair.now_ns)
    assert report is not None
    pair.store.attempt(report.attempt, pair.now_ns // 1_000)
    level = pair.level(TOKENS)
    pair.leases.report_failed(report)
    again = pair.leases.report(pair.now_ns)
    assert again is not None
    assert again.attempt.sequence == report.attempt.sequence
    pair.report()
    assert pair.level(TOKENS) == level
    assert pair.report() == 0


def test_a_settlement_before_the_report_stays_in_the_process() -> None:
    pair = Pair()
    admitted = pair.admit((TOKENS,), Cost(0, 100))
    assert isinstance(admitted, Admitted)
    lease = next(iter(pair.leases._leases.values()))
    left = lease.left
    pair.leases.settle(admitted.ticket, Cost(0, 30), pair.now_ns)
    assert (lease.left, lease.spent) == (left + 70, 30)


def test_slots_are_reused_without_the_store_and_go_back_when_idle() -> None:
    pair = Pair()
    slots = limit(Dimension.CONCURRENCY, 100)
    admitted = pair.admit((slots,))
    assert isinstance(admitted, Admitted)
    pair.leases.settle(admitted.ticket, ONE, pair.now_ns)
    assert pair.leases.try_spend((slots,), ONE, pair.now_ns) is not None
    pair.now_ns += IDLE_NS
    pair.report()
    assert look(pair.store, slots, pair.now_ns // 1_000).out == 1


def test_a_loss_of_the_store_voids_leases_and_registers_what_runs() -> None:
    pair = Pair()
    slots = limit(Dimension.CONCURRENCY, 100, name="slots")
    pair.admit((WIDE, slots))
    pair.store = Buckets(empty_until_us=pair.now_ns // 1_000 + RESTART_US)
    pair.leases.store_lost()
    assert pair.leases.try_spend((WIDE,), ONE, pair.now_ns) is None
    pair.report()
    assert look(pair.store, slots, pair.now_ns // 1_000).out == 1


def test_a_forgotten_limit_whose_request_still_runs_is_remembered_at_its_end() -> None:
    pair = Pair()
    admitted = pair.admit((TOKENS,), Cost(0, 1_000))
    assert isinstance(admitted, Admitted)
    for _ in range(200):
        pair.now_ns += SECOND
        pair.report()
    assert len(pair.leases) == 0
    pair.leases.settle(admitted.ticket, Cost(0, 3_000), pair.now_ns)
    before = pair.level(TOKENS)
    pair.report()
    assert pair.level(TOKENS) == before - 2_000


def test_rounds_look_only_at_limits_in_use_and_idle_ones_are_forgotten() -> None:
    pair = Pair()
    many = [limit(Dimension.REQUESTS, 1_000, 3_600, name=f"l{n}") for n in range(200)]
    for one in many:
        pair.admit((one,))
    pair.report()
    assert pair.leases.active_count == 200
    pair.now_ns += IDLE_NS
    pair.admit((many[7],))
    assert pair.report() == 200
    pair.report()
    assert pair.leases.active_count == 1
    for _ in range(50):
        pair.now_ns += SECOND
        pair.admit((many[7],))
        pair.report()
    assert len(pair.leases) == 200
    for _ in range(20):
        pair.now_ns += SECOND
        pair.admit((many[7],))
        pair.report()
    assert len(pair.leases) == 1


def test_a_request_on_its_way_does_not_register_a_slot_that_came_back_meanwhile() -> None:
    pair, two = Pair(), limit(Dimension.CONCURRENCY, 2, name="c")
    first = pair.admit((two,))
    second = pair.leases.plan((two,), ONE, pair.now_ns)  # on its way: one slot is held
    assert isinstance(first, Admitted)
    assert isinstance(second, Plan)
    pair.leases.settle(first.ticket, ONE, pair.now_ns)
    pair.report()  # none is held any more, and the store knows
    admitted = pair.leases.merge(second, pair.answer(second), pair.now_ns, pair.now_ns)
    assert isinstance(admitted, Admitted)
    pair.leases.settle(admitted.ticket, ONE, pair.now_ns)
    pair.report()
    assert look(pair.store, two, pair.now_ns // 1_000).out == 0


def test_too_large_is_said_without_asking() -> None:
    pair = Pair()
    refused = pair.admit((WIDE, TOKENS), Cost(0, 10_001))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.limit) == (RefusalReason.TOO_LARGE, TOKENS)
    assert pair.level(WIDE) == 1_000


def test_the_longest_wait_is_the_one_told() -> None:
    pair = Pair()
    quick, slow = limit(Dimension.REQUESTS, 2, 2, name="quick"), limit(Dimension.REQUESTS, 2, 200, name="slow")
    for _ in range(2):
        pair.admit((quick, slow))
    pair.report()
    refused = pair.admit((quick, slow))
    assert isinstance(refused, Refused)
    assert refused.limit == slow
    assert refused.retry_after_s == pytest.approx(100.0)


def test_the_same_limit_twice_in_a_request_counts_once() -> None:
    pair = Pair()
    small = limit(Dimension.REQUESTS, 3, 3_600)
    pair.admit((small, small))
    assert pair.level(small) == 2


def test_a_lease_that_ended_on_the_way_is_not_spent() -> None:
    pair = Pair()
    assert isinstance(pair.admit((TOKENS,), Cost(0, 100)), Admitted)
    lease = next(iter(pair.leases._leases.values()))
    plan = pair.leases.plan((TOKENS,), Cost(0, lease.left + 1), pair.now_ns)
    assert isinstance(plan, Plan)
    slow_us = pair.now_ns // 1_000 + LEASE_TTL_US  # the call takes so long that the lease is over when it arrives
    reply = pair.store.attempt(plan.attempt, slow_us)
    assert pair.leases.merge(plan, reply, pair.now_ns, slow_us * 1_000) is None
    assert lease.pending == 0


def test_an_answer_that_a_later_grant_overtook_does_not_void_it() -> None:
    """A report empties the lease; before its answer arrives, a request is granted tokens under the same id."""
    pair = Pair()
    daily = limit(Dimension.OUTPUT_TOKENS, 100, 86_400)
    pair.store.attempt(Attempt("other", 0, ()), pair.now_ns // 1_000)
    first = pair.admit((daily,), Cost(0, 80))
    assert isinstance(first, Admitted)
    assert pair.report() == 1
    pair.leases.settle(first.ticket, Cost(0, 0), pair.now_ns)
    pair.leases.begin_round()
    credit = pair.leases.report(pair.now_ns)
    assert credit is not None
    late = pair.store.attempt(credit.attempt, pair.now_ns // 1_000)
    pair.now_ns += 4_000_000
    second = pair.admit((daily,), Cost(0, 80))
    assert isinstance(second, Admitted)
    pair.leases.settle(second.ticket, Cost(0, 0), pair.now_ns)
    pair.leases.reported(credit, late, pair.now_ns - 4_000_000)
    assert pair.report() == 1
    assert pair.level(daily) == 100


def test_a_limit_is_small_from_the_first_answer_that_tells_of_another_process() -> None:
    pair = Pair()
    pair.store.attempt(Attempt("other", 0, ()), pair.now_ns // 1_000)
    daily = limit(Dimension.OUTPUT_TOKENS, 100, 86_400)
    first = pair.admit((daily,), Cost(0, 80))
    assert isinstance(first, Admitted)
    pair.leases.settle(first.ticket, Cost(0, 0), pair.now_ns)
    assert pair.leases.urgent
    assert pair.report() == 1
    assert pair.level(daily) == 100


def test_a_fraction_that_a_pools_token_stands_for_is_not_paid_beside_it() -> None:
    """A burst of 2 that fills in 100 s: of three requests within 1.1 s the third would be 0.98 of a token too many."""
    one, store, second = limit(Dimension.OUTPUT_TOKENS, 2, 100, name="one"), Buckets(), 1_000_000

    def ask(at_s: float, sequence: int, lease_id: str, **told: Any) -> Reply:
        at_us = int((10 + at_s) * second)
        return store.attempt(Attempt("p", sequence, (Ask(one, lease_id, **told),)), at_us)

    assert ask(0.0, 0, "a", need=1).admitted
    generation = ask(0.05, 1, "a", spent=1).buckets[0].generation
    assert ask(49.0, 0, "b", need=1).admitted
    ask(49.05, 2, "b", spent=1)
    ask(49.1, 3, "z", credits=((generation, 1),))
    assert ask(49.2, 0, "c", need=1).admitted
    assert not ask(50.1, 0, "d", need=1).admitted
