"""The engine's `/tokenize`, played by a server that answers with the bytes that vLLM 0.32 answered with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.adapters.engine_tokenize import engine_tokens
from router.prompt_forms import PromptShape, ToolRules, Unhashed

RECORDED = Path(__file__).parents[2] / "recorded" / "vllm_0.32.0"


def recorded(name: str) -> tuple[dict[str, Any], bytes]:
    """A recorded request's body and the answer's bytes."""
    body = json.loads((RECORDED / f"{name}.meta.json").read_bytes())["request_body"]
    return body, (RECORDED / f"{name}.response.json").read_bytes()


class Engine:
    """Answers every request alike. Mutable: keeps what it was asked."""

    def __init__(self, status: int = 200, answer: bytes = b"", delay_s: float = 0.0, length: int | None = None) -> None:
        self.status, self.answer, self.delay_s = status, answer, delay_s
        self.length = len(answer) if length is None else length
        self.asked: list[tuple[bytes, dict[str, Any]]] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            await self.answer_one(reader, writer)
        finally:
            writer.close()

    async def answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.asked.append((head.split(b"\r\n")[0], json.loads(await reader.readexactly(length))))
        await asyncio.sleep(self.delay_s)
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (self.status, self.length) + self.answer)
        await writer.drain()


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[str]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in engine.tasks:
            task.cancel()
        await asyncio.gather(*engine.tasks, return_exceptions=True)


async def ask(url: str, shape: PromptShape, deadline_s: float = 5.0, **fields: Any) -> list[int] | Unhashed:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await engine_tokens(client, url, "tiny", shape, fields, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("name", "shape", "fields"),
    [
        ("tokenize", PromptShape.COMPLETION, {"prompt": "hello world the quick brown fox"}),
        ("tokenize_chat", PromptShape.CHAT, {"messages": [{"role": "user", "content": "hello world"}]}),
        ("tokenize_chat", PromptShape.RESPONSES, {"input": "hello world"}),
        ("tokenize_chat", PromptShape.MESSAGES, {"messages": [{"role": "user", "content": "hello world"}]}),
    ],
)
async def test_it_is_asked_and_answers_as_recorded(name: str, shape: PromptShape, fields: dict[str, Any]) -> None:
    body, answer = recorded(name)
    engine = Engine(answer=answer)
    async with running(engine) as url:
        assert await ask(url, shape, **fields) == json.loads(answer)["tokens"]
    ((line, asked),) = engine.asked
    assert line == b"POST /tokenize HTTP/1.1"
    assert {**asked, **{key: body[key] for key in body if key != "return_token_strs"}} == asked
    assert asked["add_special_tokens"] is (shape is PromptShape.COMPLETION)


async def test_what_a_chat_says_is_told() -> None:
    engine = Engine(answer=recorded("tokenize_chat")[1])
    tool = {"type": "function", "function": {"name": "f"}}
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    async with running(engine) as url, httpx.AsyncClient(trust_env=False) as client:
        rules = ToolRules(default_template_kwargs={"style": "plain"})
        found = await engine_tokens(client, url + "/", "m", PromptShape.CHAT, fields, deadline_s=5.0, rules=rules)
    assert isinstance(found, list)
    asked = engine.asked[0][1]
    assert asked["tools"] == [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]
    assert asked["add_generation_prompt"] is False
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert "style" not in asked, "the engine has it"


async def test_token_ids_are_not_asked_for() -> None:
    assert await ask("http://127.0.0.1:9", PromptShape.COMPLETION, prompt=[1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reasoning_effort": "low"}, Unhashed.UNSUPPORTED_FIELD),
        ({"documents": [{"text": "x"}]}, Unhashed.UNSUPPORTED_FIELD),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, Unhashed.MEDIA),
        ({"messages": 5}, Unhashed.MALFORMED),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, Unhashed.MALFORMED),
    ],
)
async def test_what_the_endpoint_would_answer_wrongly_is_not_asked(fields: dict[str, Any], reason: Unhashed) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert await ask("http://127.0.0.1:9", PromptShape.CHAT, **said) is reason


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Engine(400, b'{"error":{"message":"no"}}'), Unhashed.ENGINE_REFUSED),
        (Engine(404, b'{"detail":"Not Found"}'), Unhashed.ENGINE_REFUSED),
        (Engine(answer=b"<html>"), Unhashed.ENGINE_REFUSED),
        (Engine(answer=b'{"tokens":"1 2"}'), Unhashed.ENGINE_REFUSED),
        (Engine(answer=b'{"tokens":[1,-2]}'), Unhashed.ENGINE_REFUSED),
        (Engine(answer=b"[1]"), Unhashed.ENGINE_REFUSED),
        (Engine(answer=b'{"tokens":[1', length=99), Unhashed.ENGINE_UNREACHABLE),
        (Engine(answer=b"{}", delay_s=2.0), Unhashed.ENGINE_TIMEOUT),
    ],
)
async def test_what_an_engine_may_do_instead(engine: Engine, reason: Unhashed) -> None:
    async with running(engine) as url:
        assert await ask(url, PromptShape.COMPLETION, deadline_s=0.3, prompt="hi") is reason


async def test_an_engine_that_is_gone() -> None:
    async with running(Engine()) as url:
        pass
    assert await ask(url, PromptShape.COMPLETION, prompt="hi") is Unhashed.ENGINE_UNREACHABLE
