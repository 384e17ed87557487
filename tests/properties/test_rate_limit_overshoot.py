"""Overshoot 0, for any schedule: many processes, one store, late and lost messages, crashes, a store that forgets.
And nothing lost where nothing went wrong.

The fleet is simulated on one exact clock (microseconds). The property: over every interval of t seconds, admitted over
all processes <= burst + amount * t / period, and never more requests in flight than a concurrency limit. Each property
is shown to catch planted faults, so that it cannot pass for want of looking.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.lease import LEASE_LOCAL_NS, SLOT_LOCAL_NS, Batch, Lease
from controlplane.leases import Leases, Part, Plan, Report
from controlplane.rate_limit import (
    SLOTS,
    Admitted,
    Ask,
    Attempt,
    Bucket,
    Buckets,
    Refused,
    Reply,
)
from controlplane.tenancy import Dimension, Limit
from tests.exploring import examples
from tests.fakes.limit_fleet import Fleet, Op, limit_of, overshoot, replay

# Rates are slow beside the life of a lease, so that a second's refill cannot hide a fault.
WAITS_US = [0, 0, 1_000, 60_000, 200_000, 450_000, 800_000, 1_000_000, 1_200_000, 7_000_000, 21_000_000]
DELAYS_US = [200, 200, 2_000, 40_000, 120_000, 220_000, 500_000, 750_000, 900_000, 1_500_000]
ACTIONS = ["request"] * 4 + ["burst"] * 6 + ["settle"] + ["settle_all"] * 4 + ["mute"] * 2 + ["crash", "lose"]
OPS = st.lists(
    st.builds(
        Op,
        wait_us=st.sampled_from(WAITS_US),
        process=st.integers(0, 2),
        action=st.sampled_from(ACTIONS),
        size=st.integers(1, 60),
        there_us=st.sampled_from(DELAYS_US),
        back_us=st.sampled_from(DELAYS_US[:-2]),
        lost=st.sampled_from([False, False, False, False, True]),
    ),
    min_size=1,
    max_size=40,
)
LIMITS = st.sampled_from(
    [
        (limit_of(Dimension.REQUESTS, 3, 3, 60),),
        (limit_of(Dimension.REQUESTS, 200, 200, 100),),
        (limit_of(Dimension.INPUT_TOKENS, 200, 200, 100),),
        (limit_of(Dimension.OUTPUT_TOKENS, 300, 120, 100), limit_of(Dimension.CONCURRENCY, 5, 0)),
        (limit_of(Dimension.REQUESTS, 1_000, 500), limit_of(Dimension.CONCURRENCY, 100, 0)),
        (limit_of(Dimension.INPUT_TOKENS, 6_000, 900, 60), limit_of(Dimension.OUTPUT_TOKENS, 7_001, 97, 60)),
    ]
)


def long_schedule(seed: int) -> list[Op]:
    """A schedule drawn at random: longer ones than hypothesis builds by itself."""
    dice = random.Random(seed)
    return [
        Op(
            action=dice.choice(ACTIONS),
            process=dice.randrange(3),
            wait_us=dice.choice(WAITS_US),
            size=dice.randint(1, 60),
            there_us=dice.choice(DELAYS_US),
            back_us=dice.choice(DELAYS_US[:-2]),
            lost=dice.random() < 0.2,
        )
        for _ in range(dice.randint(5, 60))
    ]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=LIMITS, ops=OPS | st.integers(0, 2**32).map(long_schedule))
def test_no_interval_admits_more_than_the_bound(limits: tuple[Limit, ...], ops: list[Op]) -> None:
    assert overshoot(replay(limits, ops)) == ""


# ---- nothing is lost where nothing went wrong

# Nothing to speak of refills in a schedule: whatever is missing at its end, nobody has used.
MONTH_S = 2_678_400
STILL = st.sampled_from(
    [
        (limit_of(Dimension.OUTPUT_TOKENS, 100, 100, MONTH_S),),
        (limit_of(Dimension.INPUT_TOKENS, 5_000, 5_000, MONTH_S), limit_of(Dimension.CONCURRENCY, 5, 0)),
        (limit_of(Dimension.REQUESTS, 1_000, 1_000, MONTH_S), limit_of(Dimension.INPUT_TOKENS, 900, 900, MONTH_S)),
    ]
)
CALM_DELAYS_US = [200, 700, 2_000, 5_000, 20_000, 60_000]
CALM_OPS = st.lists(
    st.builds(
        Op,
        wait_us=st.sampled_from([0, 0, 500, 1_000, 3_000, 10_000, 60_000, 450_000, 800_000, 1_200_000]),
        process=st.integers(0, 2),
        action=st.sampled_from(["request"] * 4 + ["burst", "settle", "report"] + ["settle_all"] * 4),
        size=st.integers(1, 30),
        there_us=st.sampled_from(CALM_DELAYS_US),
        back_us=st.sampled_from(CALM_DELAYS_US),
    ),
    min_size=1,
    max_size=40,
)


def missing(fleet: Fleet) -> str:
    """What is neither used nor in the store once every request is over and every process idle."""
    for process in fleet.processes:
        while process.running:
            fleet.settle(process, Op())
    fleet.run_until(fleet.now_us + 3_000_000)
    for limit in fleet.limits:
        reply = fleet.store.attempt(Attempt("looks", 0, (Ask(limit, "none"),)), fleet.now_us)
        column = {Dimension.REQUESTS: 1, Dimension.INPUT_TOKENS: 2, Dimension.OUTPUT_TOKENS: 3}.get(limit.dimension)
        used = sum(row[column] for row in fleet.log) if column else 0
        capacity = limit.burst if column else limit.amount
        if reply.buckets[0].level != capacity - used:
            return f"{capacity - used - reply.buckets[0].level} of {limit}"
    return ""


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=STILL, ops=CALM_OPS)
def test_without_a_fault_nothing_is_lost(limits: tuple[Limit, ...], ops: list[Op]) -> None:
    assert missing(replay(limits, ops)) == ""


class ReplyTakenForTheLatest(Leases):
    """Takes the answer to a report for the store's last word, although a grant may have overtaken it."""

    def reported(self, report: Report, reply: Reply, sent_ns: int) -> None:
        super().reported(report, reply._replace(at_us=1 << 62), sent_ns)


class GivesUpEarly(Leases):
    """Gives a lease up that has less left than a slow call takes."""

    def _part(self, lease: Lease, amount: int, now_ns: int) -> Part:
        if now_ns + 300_000_000 >= lease.valid_ns and not lease.fresh():
            self._rotate(lease)
        return super()._part(lease, amount, now_ns)


DAILY = (limit_of(Dimension.OUTPUT_TOKENS, 100, 100, MONTH_S),)
BOTH = (limit_of(Dimension.INPUT_TOKENS, 5_000, 5_000, MONTH_S), limit_of(Dimension.CONCURRENCY, 5, 0))
# Three processes, so that nothing is held ahead. What the first has used is told, then given back; while the answer to
# that is on its way, it is granted tokens again.
OVERTAKEN = [
    Op(process=1), Op(process=2), Op(wait_us=900_000, size=22), Op("report", wait_us=1_000),
    Op("settle", wait_us=2_000, size=4), Op("report", wait_us=1_000, back_us=20_000), Op(wait_us=1_000, size=22),
    Op("settle", wait_us=2_000, size=4),
]  # fmt: skip
# Found by the property: a request that asks for a slot draws on tokens whose lease has 0.27 s left.
SHORT_LEFT = [
    *[Op()] * 4, Op(process=1), Op(wait_us=60_000), Op(), Op(), Op(wait_us=60_000), Op(wait_us=450_000),
    Op(process=1, wait_us=60_000),
]  # fmt: skip


@pytest.mark.parametrize(
    ("leases", "limits", "ops"), [(ReplyTakenForTheLatest, DAILY, OVERTAKEN), (GivesUpEarly, BOTH, SHORT_LEFT)]
)
def test_the_property_finds_tokens_that_are_lost(
    leases: type[Leases], limits: tuple[Limit, ...], ops: list[Op]
) -> None:
    assert missing(replay(limits, ops)) == ""
    assert missing(replay(limits, ops, leases=leases)) != ""


# ---- planted faults: the same property must find each


class CapIgnoresLeases(Buckets):
    """Refills to the burst although part of it is out on lease."""

    def _cap(self, limit: Limit, bucket: Bucket) -> None:
        held, bucket.leases = bucket.leases, {}
        super()._cap(limit, bucket)
        Buckets._top(limit, bucket)
        bucket.leases = held

    @staticmethod
    def _top(limit: Limit, bucket: Bucket) -> None:
        """Already done, without the leases, by `_cap`."""


class CreditUncapped(Buckets):
    """Pays every credit whole, also of tokens that a full bucket would have let go."""

    def _credit(self, bucket: Bucket, generation: int, tokens: int) -> int:
        return tokens


class CreditToAnyPool(Buckets):
    """Pays a credit out of what other requests may still give back."""

    def _credit(self, bucket: Bucket, generation: int, tokens: int) -> int:
        return super()._credit(bucket, bucket.pools[-1][0] if bucket.pools else 0, tokens)


class PoolsAreNotCapped(Buckets):
    """Lets what may come back pile up beside a full bucket."""

    def _cap(self, limit: Limit, bucket: Bucket) -> None:
        pools, bucket.pools = bucket.pools, []
        super()._cap(limit, bucket)
        bucket.pools = pools


class FullAfterLoss(Buckets):
    """Starts with full buckets after the store lost its memory."""

    def __init__(self, empty_until_us: int | None = None) -> None:
        super().__init__(None)


class LeaseEndsAllAtOnce(Buckets):
    """Ends leases first and refills after: the refill of the past forgets that they held it back."""

    def _advance(self, limit: Limit, bucket: Bucket, now_us: int) -> None:
        for lease_id, lease in list(bucket.leases.items()):
            if lease.ends_us <= now_us:
                del bucket.leases[lease_id]
        super()._advance(limit, bucket, now_us)


class ExpiryFromTheReply(Leases):
    """Counts a lease's local end from when the answer came, not from before the call was sent."""

    def merge(self, plan: Plan, reply: Reply, sent_ns: int, now_ns: int) -> Admitted | Refused | None:
        return super().merge(plan, reply, now_ns, now_ns)


class ExpiryTooLate(Leases):
    """Ends leases locally after the store does."""

    def local_end_ns(self, lease: Lease, sent_ns: int) -> int:
        return sent_ns + (SLOT_LOCAL_NS if lease.axis == SLOTS else LEASE_LOCAL_NS) * 2


class CreditWithoutPool(Leases):
    """Gives back locally what was reported as spent already."""

    @staticmethod
    def _pay_back(lease: Lease, tokens: int, batch: Batch) -> None:
        lease.left += tokens


class SlotsForgottenOnRotation(Leases):
    """Does not register running requests again under a new lease id."""

    def _tell(self, lease: Lease, now_ns: int) -> Ask:
        return super()._tell(lease, now_ns)._replace(held=0)


INPUT = (limit_of(Dimension.INPUT_TOKENS, 2_000, 200, 10),)  # 200 tokens a second
SLOW_INPUT = (limit_of(Dimension.INPUT_TOKENS, 200, 200, 100),)
REQUESTS = (limit_of(Dimension.REQUESTS, 200, 200, 10),)
FIVE = (limit_of(Dimension.CONCURRENCY, 5, 0),)
# 27 requests of 7 input tokens each: 189 of a burst of 200. Settled with size 30: nothing used.
ALL, UNUSED = 27, 30


def late_lease(wait_us: int, back_us: int = 200) -> list[Op]:
    """Process 0 holds 189 unspent tokens, is silent, and spends them `wait_us` later; then process 1 takes the rest."""
    return [
        Op("mute"),
        Op("burst", size=ALL, back_us=back_us),
        Op("settle_all", wait_us=250_000, size=UNUSED),
        Op("burst", wait_us=wait_us - 250_000, size=ALL),
        Op("burst", process=1, wait_us=150_000 if wait_us < 900_000 else 0, size=ALL),
    ]


LATE_CREDIT = [
    Op("burst", size=ALL),
    Op("burst", process=1, wait_us=110_000_000, size=ALL),
    Op("settle_all", wait_us=500_000, size=UNUSED),
    Op("burst", process=2, wait_us=500_000, size=ALL),
]
FAULTS: list[tuple[type[Buckets], type[Leases], tuple[Limit, ...], list[Op]]] = [
    (CapIgnoresLeases, Leases, INPUT, [*late_lease(850_000)[:-1], Op("burst", process=1, size=ALL)]),
    (CreditUncapped, Leases, SLOW_INPUT, LATE_CREDIT),
    (CreditToAnyPool, Leases, SLOW_INPUT, LATE_CREDIT),
    (PoolsAreNotCapped, Leases, SLOW_INPUT, LATE_CREDIT),
    (
        FullAfterLoss, Leases, REQUESTS,
        [Op("burst", size=60)] * 4 + [Op("lose", wait_us=10_000)] + [Op("burst", process=1, size=60)] * 4,
    ),
    (LeaseEndsAllAtOnce, Leases, INPUT, late_lease(850_000)),
    (Buckets, ExpiryFromTheReply, INPUT, late_lease(1_100_000, back_us=220_000)),
    (Buckets, ExpiryTooLate, INPUT, late_lease(1_400_000)),
    (
        Buckets, CreditWithoutPool, INPUT,
        [Op("burst", size=ALL), *[Op("request", wait_us=300_000)] * 4, Op("settle_all", size=UNUSED),
         Op("burst", size=ALL), Op("burst", process=1, size=ALL)],
    ),
    (
        Buckets, SlotsForgottenOnRotation, FIVE,
        [Op("burst", size=5), Op(wait_us=100_000, lost=True), Op("burst", process=1, wait_us=4_500_000, size=5)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("buckets", "leases", "limits", "ops"), FAULTS, ids=lambda kind: getattr(kind, "__name__", ""))
def test_the_property_finds_a_planted_fault(
    buckets: type[Buckets], leases: type[Leases], limits: tuple[Limit, ...], ops: list[Op]
) -> None:
    assert overshoot(replay(limits, ops)) == ""
    assert overshoot(replay(limits, ops, buckets, leases)) != ""


# ---- a refusal consumes nothing


class RefusalConsumes(Buckets):
    """Grants what passes, limit by limit, although the request as a whole is refused."""

    def _passes(self, pairs: list[tuple[Ask, Bucket]], now_us: int) -> bool:
        passed = super()._passes(pairs, now_us)
        if not passed:
            for ask, bucket in pairs:
                if ask.need <= self._free(ask.limit, bucket, now_us):
                    self._grant(ask, bucket, 1, now_us)
        return passed


def free_after_refusals(buckets: type[Buckets], needs: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """What is free before and after the refused ones among `needs`, as an observer sees it."""
    store = buckets()
    limits = (
        limit_of(Dimension.REQUESTS, 50, 50),
        limit_of(Dimension.INPUT_TOKENS, 30, 40, 60),
        limit_of(Dimension.CONCURRENCY, 9, 0),
    )
    watch = Attempt("watch", 0, tuple(Ask(one, "watch") for one in limits))
    expected, seen = [], []
    for number, need in enumerate(needs):
        before = [bucket.level for bucket in store.attempt(watch, 1_000).buckets]
        asks = tuple(Ask(one, f"l{number}", need=amount, want=3) for one, amount in zip(limits, need, strict=True))
        if not store.attempt(Attempt("p", 0, asks), 1_000).admitted:
            expected += before
            seen += [bucket.level for bucket in store.attempt(watch, 1_000).buckets]
    return expected, seen


NEEDS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 10)), max_size=12)


@given(needs=NEEDS)
def test_a_refusal_consumes_nothing(needs: list[tuple[int, int, int]]) -> None:
    expected, seen = free_after_refusals(Buckets, needs)
    assert seen == expected


def test_the_property_finds_a_refusal_that_consumes() -> None:
    expected, seen = free_after_refusals(RefusalConsumes, [(10, 41, 1)])
    assert seen != expected
