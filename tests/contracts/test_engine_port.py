"""The `Answer` port: what `serve` may rely on, held by the real engine connection and by the double of its tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import pytest

from controlplane.adapters.engine_http import EngineCall, EngineClient, request_head
from controlplane.errors import EngineLost, EngineTimeout
from controlplane.ports import Answer
from tests.fakes.engine_scripts import End, Script, Send, Wait
from tests.fakes.engine_scripts import Step as ScriptStep
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_ports import Clock, FakeAnswer, Hang, Plan, Step


class Engine(Protocol):
    """Gives answers of a shape: pieces, then how it ends."""

    async def answer(self, pieces: Sequence[bytes], end: str = "whole", status: int = 200) -> Answer: ...


class RealEngine:
    """The production client before a scripted engine."""

    def __init__(self, engine: ScriptedEngine, client: EngineClient) -> None:
        self._engine, self._client = engine, client

    async def answer(self, pieces: Sequence[bytes], end: str = "whole", status: int = 200) -> Answer:
        """Ask for it."""
        steps: list[ScriptStep] = [Send(piece) for piece in pieces]
        if end == "cut":
            steps += [Wait(0.05), End("reset")]
        elif end == "silent":
            steps.append(End("stall"))
        headers = (("Content-Type", "text/event-stream"), ("Retry-After", "7"))
        self._engine.enqueue(Script("contract", steps, status, headers))
        head = request_head("POST", "/v1/chat/completions", [(b"host", b"e")], 2)
        return await self._client.send(EngineCall("e", "127.0.0.1", self._engine.port, head, [b"{}"], 2.0, 5.0))


class FakeEngine:
    """The double."""

    async def answer(self, pieces: Sequence[bytes], end: str = "whole", status: int = 200) -> Answer:
        """Make it."""
        last: dict[str, Step] = {"whole": b"", "cut": EngineLost("e", "cut"), "silent": Hang()}
        headers = ((b"content-type", b"text/event-stream"), (b"retry-after", b"7"))
        return FakeAnswer(Plan(status, (*pieces, last[end]), headers), status, Clock())


@pytest.fixture(params=["real", "fake"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """Each implementation."""
    if request.param == "fake":
        yield FakeEngine()
        return
    client = EngineClient()
    async with ScriptedEngine() as scripted:
        yield RealEngine(scripted, client)
        await client.aclose()


async def read_to_end(answer: Answer) -> bytes:
    """Everything, by `read`."""
    data = b""
    while piece := await answer.read(5.0):
        data += piece
    return data


async def test_the_head_is_there_at_once_with_names_in_lower_case(engine: Engine) -> None:
    answer = await engine.answer([b"a"], status=429)
    assert answer.status == 429
    assert (b"retry-after", b"7") in answer.headers
    assert (b"content-type", b"text/event-stream") in answer.headers
    answer.abort()


async def test_reads_give_all_bytes_in_order_then_nothing_for_ever(engine: Engine) -> None:
    answer = await engine.answer([b"one", b"two", b"\xf0\x9f", b"\x98\x80"])
    assert await read_to_end(answer) == b"onetwo\xf0\x9f\x98\x80"
    assert [await answer.read(1.0), await answer.read(1.0)] == [b"", b""]
    answer.release()


async def test_read_all_gives_the_whole(engine: Engine) -> None:
    answer = await engine.answer([b"x" * 1_000] * 5)
    assert await answer.read_all(10_000, 5.0) == b"x" * 5_000
    answer.release()


async def test_a_cut_is_told_after_the_bytes_that_came_and_stays_told(engine: Engine) -> None:
    answer = await engine.answer([b"one"], end="cut")
    assert await answer.read(5.0) == b"one"
    for _ in range(2):
        with pytest.raises(EngineLost):
            await answer.read(5.0)
    answer.abort()


async def test_silence_is_a_timeout_and_stays_one(engine: Engine) -> None:
    answer = await engine.answer([b"one"], end="silent")
    assert await answer.read(5.0) == b"one"
    for _ in range(2):
        with pytest.raises(EngineTimeout):
            await answer.read(0.05)
    answer.abort()


async def test_read_all_has_one_deadline_for_the_whole(engine: Engine) -> None:
    answer = await engine.answer([b"one"], end="silent")
    with pytest.raises(EngineTimeout):
        await answer.read_all(1_000, 0.1)


@pytest.mark.parametrize("end", ["whole", "cut", "silent"])
async def test_read_all_refuses_more_than_its_bound(end: str, engine: Engine) -> None:
    answer = await engine.answer([b"x" * 600, b"y" * 600], end=end)
    with pytest.raises(EngineLost):
        await answer.read_all(1_000, 5.0)


async def test_giving_up_is_harmless_at_any_time_and_more_than_once(engine: Engine) -> None:
    before = await engine.answer([b"one"], end="silent")
    before.abort()
    before.abort()
    before.release()
    after = await engine.answer([b"one"])
    await read_to_end(after)
    after.release()
    after.abort()


async def test_a_cancelled_read_gives_the_answer_up(engine: Engine) -> None:
    answer = await engine.answer([], end="silent")
    reading = asyncio.create_task(answer.read(1e9))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    answer.abort()
