"""What every store of limits must do: the in-process one, and the script in Valkey and in stock Redis.

The second half holds the Lua script to `rate_limit.Buckets` reply by reply: the script says at which of its
microseconds it decided, the Python decides at the same one, and every number must be equal.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from controlplane.adapters.limits_local import InProcessLimits
from controlplane.adapters.limits_redis import LimitsOptions, RedisLimits
from controlplane.rate_limit import Admitted, Ask, Attempt, Buckets, Cost, RefusalReason, Refused, StoreState, Ticket
from controlplane.tenancy import Dimension, Limit

ONE = Cost(0, 0)
# Tests have one process, and no earlier life of the store to wait for.
QUICK = LimitsOptions(opening_s=0.0)


class Store(Protocol):
    """The port, and a way to report at once."""

    def try_admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | None: ...
    async def admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | Refused: ...
    def settle(self, ticket: Ticket, used: Cost, now_ns: int) -> None: ...
    def state(self) -> StoreState: ...
    async def flush(self, now_ns: int) -> None: ...


@pytest.fixture(params=["memory", "valkey", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield InProcessLimits()
        return
    url = request.getfixturevalue("redis_url" if request.param == "valkey" else "second_redis_url")
    limits = RedisLimits(url, uuid.uuid4().hex, options=QUICK)
    await limits.start()
    yield limits
    await limits.aclose()


def limit(dimension: Dimension, amount: int, *, period_s: int = 3_600, burst: int | None = None) -> Limit:
    return Limit(uuid.uuid4().hex, "org", "o", None, dimension, amount, period_s, amount if burst is None else burst)


async def ask(store: Store, limits: tuple[Limit, ...], cost: Cost = ONE) -> Admitted | Refused:
    """As `serve` asks: the lease first, then the store."""
    now_ns = time.monotonic_ns()
    return store.try_admit(limits, cost, now_ns) or await store.admit(limits, cost, now_ns)


async def test_no_limits_means_admitted_at_once(store: Store) -> None:
    assert isinstance(store.try_admit((), ONE, 0), Admitted)
    assert isinstance(await store.admit((), ONE, 0), Admitted)


@pytest.mark.parametrize("amount", [3, 100, 1_000])
async def test_exactly_the_burst_is_admitted(store: Store, amount: int) -> None:
    limits = (limit(Dimension.REQUESTS, amount, period_s=86_400),)
    decisions = [await ask(store, limits) for _ in range(amount + 20)]
    assert [isinstance(decision, Admitted) for decision in decisions] == [True] * amount + [False] * 20


async def test_a_refusal_says_which_limit_and_how_long_to_wait(store: Store) -> None:
    wide, narrow = limit(Dimension.REQUESTS, 1_000), limit(Dimension.INPUT_TOKENS, 600, period_s=60)
    await ask(store, (wide, narrow), Cost(400, 0))
    refused = await ask(store, (wide, narrow), Cost(300, 0))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.RATE_LIMIT
    assert refused.limit == narrow
    assert (refused.needed, refused.left) == (300, 200)
    assert refused.retry_after_s == pytest.approx(10.0, abs=1.1)


async def test_waiting_as_long_as_told_is_enough(store: Store) -> None:
    limits = (limit(Dimension.REQUESTS, 10, period_s=5, burst=2),)
    await ask(store, limits)
    await ask(store, limits)
    refused = await ask(store, limits)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s is not None
    assert 0 < refused.retry_after_s < 0.7
    await asyncio.sleep(refused.retry_after_s)
    assert isinstance(await ask(store, limits), Admitted)


async def test_a_refusal_consumes_nothing(store: Store) -> None:
    wide, narrow = limit(Dimension.REQUESTS, 30), limit(Dimension.OUTPUT_TOKENS, 10)
    slots = limit(Dimension.CONCURRENCY, 3)
    assert isinstance(await ask(store, (wide, narrow, slots), Cost(0, 10)), Admitted)
    for _ in range(50):
        assert isinstance(await ask(store, (wide, narrow, slots), Cost(0, 5)), Refused)
    free = [isinstance(await ask(store, (wide, slots)), Admitted) for _ in range(3)]
    assert free == [True, True, False]
    assert sum([isinstance(await ask(store, (wide,)), Admitted) for _ in range(40)]) == 27


async def test_parallel_requests_cannot_share_one_reservation(store: Store) -> None:
    limits = (limit(Dimension.OUTPUT_TOKENS, 100),)
    decisions = await asyncio.gather(*(ask(store, limits, Cost(0, 60)) for _ in range(5)))
    assert sum(isinstance(decision, Admitted) for decision in decisions) == 1


async def test_more_than_the_whole_burst_is_never_admissible(store: Store) -> None:
    refused = await ask(store, (limit(Dimension.INPUT_TOKENS, 100),), Cost(101, 0))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.needed, refused.left) == (RefusalReason.TOO_LARGE, 101, 100)
    assert refused.retry_after_s is None


async def test_a_cost_of_zero_passes_an_exhausted_limit(store: Store) -> None:
    limits = (limit(Dimension.OUTPUT_TOKENS, 10),)
    await ask(store, limits, Cost(0, 10))
    assert isinstance(await ask(store, limits, Cost(5, 0)), Admitted)


async def test_what_was_not_used_comes_back(store: Store) -> None:
    limits = (limit(Dimension.OUTPUT_TOKENS, 100),)
    first = await ask(store, limits, Cost(0, 90))
    assert isinstance(first, Admitted)
    store.settle(first.ticket, Cost(0, 20), time.monotonic_ns())
    await settled(store)
    assert isinstance(await ask(store, limits, Cost(0, 80)), Admitted)
    assert isinstance(await ask(store, limits, Cost(0, 1)), Refused)


async def test_a_late_settlement_comes_back_through_the_store(store: Store) -> None:
    limits = (limit(Dimension.OUTPUT_TOKENS, 100),)
    first = await ask(store, limits, Cost(0, 90))
    await settled(store)
    assert isinstance(first, Admitted)
    store.settle(first.ticket, Cost(0, 20), time.monotonic_ns())
    await settled(store)
    assert isinstance(await ask(store, limits, Cost(0, 81)), Refused)
    assert isinstance(await ask(store, limits, Cost(0, 80)), Admitted)


async def test_using_more_than_reserved_becomes_debt(store: Store) -> None:
    limits = (limit(Dimension.OUTPUT_TOKENS, 3_600),)  # one a second
    first = await ask(store, limits, Cost(0, 3_000))
    assert isinstance(first, Admitted)
    store.settle(first.ticket, Cost(0, 4_000), time.monotonic_ns())
    await settled(store)
    refused = await ask(store, limits, Cost(0, 1))
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == pytest.approx(401, abs=4)


async def test_a_ticket_settles_once(store: Store) -> None:
    limits = (limit(Dimension.OUTPUT_TOKENS, 100), limit(Dimension.CONCURRENCY, 1))
    first = await ask(store, limits, Cost(0, 50))
    assert isinstance(first, Admitted)
    for _ in range(3):
        store.settle(first.ticket, Cost(0, 0), time.monotonic_ns())
        await settled(store)
    second = await ask(store, limits, Cost(0, 100))
    assert isinstance(second, Admitted)
    assert isinstance(await ask(store, limits, Cost(0, 0)), Refused)  # its one slot is taken, not minus one
    assert isinstance(await ask(store, limits[:1], Cost(0, 1)), Refused)


async def test_a_request_that_was_never_sent_takes_nothing(store: Store) -> None:
    limits = (limit(Dimension.REQUESTS, 1), limit(Dimension.INPUT_TOKENS, 10))
    for _ in range(5):
        admitted = await ask(store, limits, Cost(10, 0))
        assert isinstance(admitted, Admitted)
        store.settle(admitted.ticket, Cost(0, 0, requests=0), time.monotonic_ns())
        await settled(store)


@pytest.mark.parametrize("amount", [2, 64])
async def test_slots_are_free_again_at_once(store: Store, amount: int) -> None:
    limits = (limit(Dimension.CONCURRENCY, amount),)
    for _ in range(3):
        running = [await ask(store, limits) for _ in range(amount)]
        assert all(isinstance(decision, Admitted) for decision in running)
        refused = await ask(store, limits)
        assert isinstance(refused, Refused)
        assert refused.retry_after_s is not None
        for decision in running:
            assert isinstance(decision, Admitted)
            store.settle(decision.ticket, ONE, time.monotonic_ns())


async def test_the_view_is_from_after_the_reservation(store: Store) -> None:
    limits = (
        limit(Dimension.REQUESTS, 60),
        limit(Dimension.REQUESTS, 600),
        limit(Dimension.INPUT_TOKENS, 36_000),
        limit(Dimension.OUTPUT_TOKENS, 7_200),
    )
    admitted = await ask(store, limits, Cost(100, 200))
    assert isinstance(admitted, Admitted)
    view = admitted.view
    assert (view.limit_requests, view.remaining_requests) == (60, 59)
    assert view.reset_requests_s == pytest.approx(60.0)
    assert (view.limit_tokens, view.remaining_tokens) == (7_200, 7_000)
    assert view.reset_tokens_s == pytest.approx(100.0)


async def test_a_limit_that_was_raised_counts_at_once(store: Store) -> None:
    small = limit(Dimension.REQUESTS, 2, period_s=1)
    raised = Limit(small.limit_id, "org", "o", None, Dimension.REQUESTS, 1_000, 1, 1_000)
    while isinstance(await ask(store, (small,)), Admitted):
        pass
    await asyncio.sleep(0.3)
    assert isinstance(await ask(store, (raised,)), Admitted)


async def test_it_says_that_it_answers(store: Store) -> None:
    await ask(store, (limit(Dimension.REQUESTS, 5),))
    assert store.state().answering
    assert store.state().policy == "refuse"


async def settled(store: Store) -> None:
    """Let spends and settlements reach the store: two rounds, as a credit waits for its spend's answer."""
    for _ in range(3):
        await asyncio.sleep(0.12)
        await store.flush(time.monotonic_ns())


# ---- the script is the algorithm


async def mirrored(url: str, seed: int, attempts: int, limits: list[Limit]) -> None:
    """The same random calls at the script and at `Buckets`."""
    dice = random.Random(seed)
    port = RedisLimits(url, f"mirror-{seed}", options=QUICK)
    await port._heartbeat()
    reference = Buckets()
    sequence = 0
    generations = [0]
    for _ in range(attempts):
        chosen = dice.sample(limits, dice.randint(1, len(limits)))
        reports = dice.random() < 0.5
        sequence += reports and dice.random() < 0.9
        asks = tuple(
            Ask(
                one,
                f"lease-{dice.randrange(4)}",
                need=0 if reports else dice.randrange(one.amount // 4 + 1),
                want=dice.randrange(one.amount // 2 + 1),
                spent=dice.randrange(one.amount // 4 + 1) if reports else 0,
                returned=dice.randrange(one.amount // 8 + 1) if reports else 0,
                debt=dice.choice([0, 0, 0, one.amount // 9]) if reports else 0,
                credits=((dice.choice(generations[-4:]), dice.randrange(50)),) if reports else (),
                held=dice.randrange(3),
                renew=dice.random() < 0.8,
            )
            for one in chosen
        )
        attempt = Attempt(f"mirror-{seed}", sequence if reports else 0, asks)
        raw = await port._run_script(attempt)
        expected = reference.attempt(attempt, raw[1])
        assert port._decoded(raw) == expected
        generations += [bucket.generation for bucket in expected.buckets if bucket.generation]
        if dice.random() < 0.05:
            await asyncio.sleep(dice.choice([0.01, 0.05, 0.3, 1.05]))
    await port.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_the_script_decides_as_the_reference_does(any_redis_url: str, seed: int) -> None:
    limits = [
        limit(Dimension.REQUESTS, 3, period_s=1),
        limit(Dimension.REQUESTS, 1_000, period_s=1, burst=777),
        limit(Dimension.INPUT_TOKENS, 7_919, period_s=60, burst=20_011),
        limit(Dimension.OUTPUT_TOKENS, 999_983, period_s=7, burst=100_000),
        limit(Dimension.CONCURRENCY, 12),
        limit(Dimension.CONCURRENCY, 100),
    ]
    await mirrored(any_redis_url, seed, 250, limits)


async def test_the_script_is_exact_at_the_largest_limits(any_redis_url: str) -> None:
    limits = [
        limit(Dimension.INPUT_TOKENS, (1 << 42) - 3, period_s=4_300_000),
        limit(Dimension.OUTPUT_TOKENS, 1_000_000_007, period_s=86_400, burst=(1 << 42) - 1),
        limit(Dimension.INPUT_TOKENS, 999_999_999_989, period_s=61, burst=1 << 41),
    ]
    await mirrored(any_redis_url, 99, 120, limits)


async def test_idle_buckets_vanish(any_redis_url: str) -> None:
    import redis.asyncio as redis

    port = RedisLimits(any_redis_url, "ttl", options=QUICK)
    await port.start()
    quick, slow = limit(Dimension.REQUESTS, 60, period_s=60), limit(Dimension.REQUESTS, 10, period_s=86_400)
    await port.admit((quick, slow), ONE, time.monotonic_ns())
    async with redis.from_url(any_redis_url) as client:
        tag = "{inferplane-limits}:b:"
        assert 60_000 <= await client.pttl(tag + quick.limit_id) <= 80_000
        assert 60_000 + 8_640_000 <= await client.pttl(tag + slow.limit_id) <= 60_000 + 3 * 8_640_000
    await port.aclose()
