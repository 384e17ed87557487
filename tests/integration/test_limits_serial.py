"""A strictly serial client is never refused for want of what its own last request held, whichever process it meets.

Real processes and a real server. The client's next request is at the other process within a tenth of a millisecond of
the settlement: far sooner than over HTTP. Before refusals were looked at again, 4 to 10 % of such requests were refused
by a cap of 1, and half of them by a token limit of which each reserves most.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import random
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TypeVar

import pytest

from controlplane.adapters.limits_redis import _LOOK_AGAIN_S, LimitsOptions, RedisLimits
from controlplane.rate_limit import Admitted, Attempt, Cost
from controlplane.tenancy import Dimension, Limit

T = TypeVar("T")

SPAWN = multiprocessing.get_context("spawn")
CAP = Limit("serial-cap", "org", "o", None, Dimension.CONCURRENCY, 1, 1, 0)
# Nothing refills within a test. A request reserves 80 and uses none.
TOKENS = Limit("serial-tokens", "org", "o", None, Dimension.OUTPUT_TOKENS, 100, 86_400, 100)
COST, USED = Cost(0, 80), Cost(0, 0)


# A machine that gives a process no time for this long says nothing about limits: waits for what comes back are 0.1 s.
PAUSE_S = 0.05


class Watched(RedisLimits):
    """Knows how long the slowest of its calls took, the one under way included, since it was last asked."""

    slowest_s = 0.0
    began_s: float | None = None

    async def _call(self, work: Callable[[], T]) -> T:
        began_s = time.monotonic()
        self.began_s = self.began_s or began_s
        try:
            return await super()._call(work)
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            self.began_s = None

    def pause_s(self) -> float:
        under_way_s = time.monotonic() - self.began_s if self.began_s else 0.0
        pause_s, self.slowest_s = max(self.slowest_s, under_way_s), 0.0
        return pause_s


def serving(url: str, pipe: Connection) -> None:
    """A process: for each (limits, seconds) on the pipe one request; answers whether it was admitted, once settled.
    Asked without limits, it answers how long it was held up."""

    async def main() -> None:
        port = Watched(url, uuid.uuid4().hex)
        await port.start()
        pipe.send(True)
        while (asked := await asyncio.to_thread(pipe.recv)) is not None:
            limits, hold_s = asked
            if not limits:
                pipe.send(port.pause_s())
                continue
            now_ns = time.monotonic_ns()
            decision = port.try_admit(limits, COST, now_ns) or await port.admit(limits, COST, now_ns)
            if isinstance(decision, Admitted):
                await asyncio.sleep(hold_s)
                port.settle(decision.ticket, USED, time.monotonic_ns())
            pipe.send(isinstance(decision, Admitted))
        await port.aclose()

    asyncio.run(main())


def pause_s(processes: list[Connection]) -> float:
    """How long a process was held up at most since the last question."""
    for pipe in processes:
        pipe.send(((), 0.0))
    return max(float(pipe.recv()) for pipe in processes)


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[list[Connection]]:
    url = request.getfixturevalue("valkey_server").url
    with contextlib.ExitStack() as stack:
        pipes = []
        for _ in range(2):
            mine, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=serving, args=(url, theirs))
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(mine.send, None)
            pipes.append(mine)
        assert [pipe.recv() for pipe in pipes] == [True, True]
        time.sleep(1.0)  # each hears of the other with its next call
        yield pipes
    for pipe in pipes:
        pipe.close()


@pytest.mark.parametrize("hold_s", [0.0005, 0.06], ids=["at once", "past a report"])
@pytest.mark.parametrize("one", [CAP, TOKENS], ids=["cap of 1", "tokens"])
@pytest.mark.parametrize("way", ["same", "turns", "random"])
def test_no_request_of_a_serial_client_is_refused(
    processes: list[Connection], way: str, one: Limit, hold_s: float
) -> None:
    one = dataclasses.replace(one, limit_id=uuid.uuid4().hex)  # each case its own: none inherits a loss
    dice, passed, count = random.Random(1), 0, 150 if hold_s < 0.01 else 30
    pause_s(processes)
    for number in range(count):
        pipe = processes[{"same": 0, "turns": number % 2, "random": dice.randrange(2)}[way]]
        pipe.send(((one,), hold_s))
        admitted = pipe.recv()
        if not admitted and pause_s(processes) >= PAUSE_S:
            time.sleep(1.0)  # what was on its way has arrived; a token that is lost stays lost
            pipe.send(((one,), hold_s))
            admitted = pipe.recv()
        passed += admitted
    assert passed == count


# On the other server: the processes above live until this file ends, and may be the first to meet an emptied one.


class Counting(RedisLimits):
    """Counts its calls of the store that ask for something."""

    calls = 0

    async def _run_script(self, attempt: Attempt) -> list[int]:
        self.calls += bool(attempt.asks)
        return await super()._run_script(attempt)


async def test_of_a_refused_crowd_one_looks_again(second_redis_url: str) -> None:
    port = Counting(second_redis_url, uuid.uuid4().hex, options=LimitsOptions(opening_s=0.0))
    await port.start()
    held = await port.admit((CAP,), COST, time.monotonic_ns())
    assert isinstance(held, Admitted)
    port.calls = 0
    answers = await asyncio.gather(*(port.admit((CAP,), COST, time.monotonic_ns()) for _ in range(50)))
    assert not any(isinstance(answer, Admitted) for answer in answers)
    assert port.calls <= 50 + len(_LOOK_AGAIN_S) + 1  # and perhaps a report
    waiting = asyncio.create_task(port.admit((CAP,), COST, time.monotonic_ns()))
    await asyncio.sleep(0.01)
    port.settle(held.ticket, USED, time.monotonic_ns())
    assert isinstance(await waiting, Admitted)
    await port.aclose()


async def test_a_client_that_leaves_while_it_is_looked_again_leaves_nothing_behind(second_redis_url: str) -> None:
    port = RedisLimits(second_redis_url, uuid.uuid4().hex, options=LimitsOptions(opening_s=0.0))
    await port.start()
    held = await port.admit((CAP,), COST, time.monotonic_ns())
    assert isinstance(held, Admitted)
    waiting = asyncio.create_task(port.admit((CAP,), COST, time.monotonic_ns()))
    await asyncio.sleep(0.03)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    port.settle(held.ticket, USED, time.monotonic_ns())
    assert isinstance(await port.admit((CAP,), COST, time.monotonic_ns()), Admitted)
    await port.aclose()
