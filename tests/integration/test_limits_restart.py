"""What a restart of the embedded Redis leaves of a limit: all of it after a clean stop, nothing after anything else.

Real servers and processes. Owns: the way from `EmbeddedRedis.stop` to the next decision. Does not own: the rule itself
(`tests/unit/controlplane/test_store_life.py`, `tests/contracts/test_store_life.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.adapters.embedded import EmbeddedRedis
from controlplane.adapters.limits_redis import LimitsOptions, RedisLimits
from controlplane.rate_limit import Admitted, Cost, Refused
from controlplane.tenancy import Dimension, Limit
from tests.integration.test_limits_processes import ALL, SIX_HUNDRED, THREE, Row, check, hammering, started
from tests.services import temporary_folder

NONE = Cost(0, 0)
# As good as no refill: 1,000 an hour is one in 3.6 s; 5 a day is one in five hours.
SMALL = Limit("small", "org", "o", None, Dimension.REQUESTS, 5, 86_400, 5)
LARGE = Limit("large", "org", "o", None, Dimension.OUTPUT_TOKENS, 1_000, 86_400, 1_000)
SLOTS = Limit("slots", "org", "o", None, Dimension.CONCURRENCY, 2, 1, 0)
QUICK = LimitsOptions(opening_s=0.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with temporary_folder() as path:
        yield path / "redis"


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedRedis]:
    """Not started; stopped at the end whatever the test did."""
    made = EmbeddedRedis(folder)
    yield made
    made.stop()


async def gateway(url: str) -> RedisLimits:
    port = RedisLimits(url, uuid.uuid4().hex, options=QUICK)
    await port.start()
    return port


async def spend(port: RedisLimits, one: Limit, count: int, tokens: int = 0) -> int:
    """How many of `count` requests are admitted; each uses what it reserves."""
    passed = 0
    for _ in range(count):
        decision = await port.admit((one,), Cost(0, tokens), time.monotonic_ns())
        if isinstance(decision, Admitted):
            port.settle(decision.ticket, Cost(0, tokens), time.monotonic_ns())
            passed += 1
    return passed


def one_life(url: str, small: int, large: int) -> tuple[int, int]:
    """A gateway that comes, asks this many times of each limit, and leaves."""

    async def main() -> tuple[int, int]:
        port = await gateway(url)
        passed = await spend(port, SMALL, small), await spend(port, LARGE, large, 100)
        await port.aclose()
        return passed

    return asyncio.run(main())


def kill(server: EmbeddedRedis) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.poll() is None:
        time.sleep(0.01)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix socket", "tcp"])
def test_after_a_clean_stop_exactly_the_rest_is_left(folder: Path, tcp: bool) -> None:
    server = EmbeddedRedis(folder, port=0 if tcp else None)
    with server:
        assert one_life(server.url, 2, 4) == (2, 4)
    with server:
        assert one_life(server.url, 1, 1) == (1, 1)
    with server:  # a clean stop after a clean stop
        assert one_life(server.url, 9, 9) == (2, 5)


def test_time_refills_while_the_server_is_down(folder: Path) -> None:
    quick = Limit("quick", "org", "o", None, Dimension.REQUESTS, 4, 2, 4)  # one in 0.5 s

    async def main(url: str) -> tuple[int, float]:
        port = await gateway(url)
        began_s = time.monotonic()
        passed = await spend(port, quick, 8)
        await port.aclose()
        return passed, began_s

    with EmbeddedRedis(folder) as server:
        passed, began_s = asyncio.run(main(server.url))
        assert passed == 4
        time.sleep(0.6)
    with EmbeddedRedis(folder) as server:
        passed, _ = asyncio.run(main(server.url))
        assert 1 <= passed <= (time.monotonic() - began_s) / 0.5


def test_after_a_kill_limits_start_empty(folder: Path) -> None:
    with EmbeddedRedis(folder) as server:
        assert one_life(server.url, 1, 1) == (1, 1)
        kill(server)
        server.start()
        assert one_life(server.url, 5, 1) == (0, 0)


def test_a_mark_counts_for_the_next_start_only(server: EmbeddedRedis) -> None:
    with server:
        assert one_life(server.url, 1, 1) == (1, 1)
    server.start()  # trusts, and takes the mark away
    assert one_life(server.url, 1, 1) == (1, 1)
    kill(server)
    server.start()
    assert one_life(server.url, 5, 1) == (0, 0)


def test_a_life_whose_every_write_was_lost_is_not_passed_over(
    folder: Path, server: EmbeddedRedis, tmp_path: Path
) -> None:
    """As after a power cut: the data is what the clean stop left, and the life since has left no trace in it."""
    with server:
        assert one_life(server.url, 1, 1) == (1, 1)
    shutil.copytree(folder / "appendonlydir", tmp_path / "aof")
    server.start()
    assert one_life(server.url, 4, 4) == (4, 4)
    kill(server)
    shutil.rmtree(folder / "appendonlydir")
    shutil.copytree(tmp_path / "aof", folder / "appendonlydir")
    server.start()
    assert one_life(server.url, 5, 1) == (0, 0)


def test_a_gateway_that_lives_through_a_clean_stop_makes_it_count_as_a_loss(server: EmbeddedRedis) -> None:
    """Its slots may have run out meanwhile although its requests still run: it must be heard first."""

    async def main() -> None:
        server.start()
        port = await gateway(server.url)
        other = await gateway(server.url)
        await other.aclose()
        running = await port.admit((SLOTS,), NONE, time.monotonic_ns())
        assert isinstance(running, Admitted)
        server.stop()
        server.start()
        late = await gateway(server.url)
        first = await late.admit((SLOTS,), NONE, time.monotonic_ns())
        assert isinstance(first, Refused)
        await asyncio.sleep(4.5)  # by then the slot that it registered before the stop has ended too
        taken = [isinstance(await late.admit((SLOTS,), NONE, time.monotonic_ns()), Admitted) for _ in range(2)]
        assert taken == [True, False], "one of two is taken by the request that runs"
        await port.aclose()
        await late.aclose()

    asyncio.run(main())


def test_two_gateways_trust_the_same_rest(folder: Path) -> None:
    with EmbeddedRedis(folder) as server:
        assert one_life(server.url, 2, 4) == (2, 4)

    async def main(url: str) -> int:
        ports = [await gateway(url), await gateway(url)]
        passed = await asyncio.gather(*(spend(port, SMALL, 9) for port in ports))
        for port in ports:
            await port.aclose()
        return sum(passed)

    with EmbeddedRedis(folder) as server:
        assert asyncio.run(main(server.url)) == 3


def test_hammering_processes_stay_within_the_bound_over_a_clean_stop_and_lose_nothing_by_it(folder: Path) -> None:
    log: list[Row] = []
    ends_ns = []
    for _ in range(3):
        with EmbeddedRedis(folder) as server, contextlib.ExitStack() as stack:
            workers = [stack.enter_context(started(hammering, server.url, 1.5, ALL)) for _ in range(2)]
            assert [pipe.recv() for _, pipe in workers] == ["started"] * 2
            log += [row for _, pipe in workers for row in pipe.recv()]
            for process, _ in workers:
                process.join()
            ends_ns.append(time.monotonic_ns())
    check(log)
    three = [row[1] for row in log if row[0] == THREE.limit_id]
    assert len(three) <= 3 + (max(three) - min(three)) / 20e9
    first_ended_ns = ends_ns[0]
    later = sum(row[0] == SIX_HUNDRED.limit_id and row[1] > first_ended_ns for row in log)
    assert later >= 15, "two lives of 1.5 s and more at 10 a second; a loss would give nothing in the first 2 s of each"


def test_the_first_start_on_a_new_folder_admits_at_once(folder: Path) -> None:
    async def main(url: str) -> list[bool]:
        port = RedisLimits(url, uuid.uuid4().hex)  # as in production
        await port.start()
        decisions = [await port.admit((SMALL,), NONE, time.monotonic_ns()) for _ in range(6)]
        await port.aclose()
        return [isinstance(decision, Admitted) for decision in decisions]

    with EmbeddedRedis(folder) as server:
        assert asyncio.run(main(server.url)) == [True] * 5 + [False]
