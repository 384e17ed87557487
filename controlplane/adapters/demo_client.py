"""A client of the gateway that measures what a user would: time to first token, time per token, usage.

Owns: one chat call, streamed or whole, with its server-sent events parsed, and what is measured of it. Does not own:
what is asked (`demo_traffic`). It stands on the product's own HTTP client (`engine_http`), which costs a fraction of a
general one: on two cores the measuring client must not be what is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from controlplane.adapters.engine_http import EngineAnswer, EngineCall, EngineClient, PoolLimits
from controlplane.errors import EngineError

# Deadlines of a call in seconds: a cold prompt of 100,000 tokens on a loaded machine stays far below.
_FIRST_BYTE_S = 60.0
_IDLE_S = 30.0
_CONNECT_S = 5.0
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
# A refusal without `retry-after` is asked again after this.
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Ask:
    """One chat call."""

    workload: str
    secret: str
    model: str
    messages: Sequence[dict[str, Any]]
    max_tokens: int
    tools: Sequence[dict[str, Any]] = ()
    stream: bool = True
    user: str = ""

    def body(self) -> bytes:
        """The JSON to send. `ignore_eos`: the answer is as long as asked, as the lengths are drawn by the traffic."""
        fields: dict[str, Any] = {"model": self.model, "messages": self.messages, "max_tokens": self.max_tokens}
        if self.tools:
            fields["tools"] = self.tools
        if self.user:
            fields["user"] = self.user
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return orjson.dumps({**fields, "ignore_eos": True})


@dataclass(frozen=True, slots=True)
class Told:
    """What a call gave. Times in seconds; a count that nobody told is None."""

    workload: str
    completed: bool
    status: int
    """0: no answer came."""
    streamed: bool
    text: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    retry_after_s: float = _RETRY_S
    reason: str = ""
    first_token_unix_s: float | None = None


class SseReader:
    """Cuts a stream of bytes into events. Mutable: holds what is not complete yet."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The `data` of every event that is complete now. Lines end with CR, LF or both."""
        text = self._rest + chunk
        # A CR at the very end may be half of a CRLF: it waits for the next chunk.
        cut = max(text.rfind(b"\n"), text.rfind(b"\r", 0, max(0, len(text) - 1))) + 1
        self._rest = text[cut:]
        events = []
        for line in text[:cut].splitlines():
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class ChatClient:
    """Calls one gateway. Mutable: owns connections. One per event loop."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        # Uvicorn, which serves the gateway, closes idle connections after 5 s.
        self._http = EngineClient(PoolLimits(idle_s=2.0))

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def blocker(self) -> str | None:
        """Why the gateway takes no requests yet, in one sentence; None: it does."""
        try:
            answer = await self._http.send(self._call("GET", "/readyz", "", b"", 5.0))
            body = await answer.read_all(_MAX_ANSWER_BYTES, 5.0)
        except EngineError:
            return "it does not answer"
        if answer.status == 200:
            return None
        try:
            return "; ".join(orjson.loads(body)["blockers"]) or "it does not say why"
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return f"it answered {answer.status}"

    async def has_model(self, model: str, secret: str) -> bool:
        """Whether the gateway lists the model for this key."""
        try:
            answer = await self._http.send(self._call("GET", "/v1/models", secret, b"", 5.0))
            listed = orjson.loads(await answer.read_all(_MAX_ANSWER_BYTES, 5.0))
        except (EngineError, orjson.JSONDecodeError):
            return False
        return any(one["id"] == model for one in listed.get("data", ()))

    async def chat(self, ask: Ask) -> Told:
        """Make one call. Never raises for what a gateway can do; a cancelled call closes its connection."""
        began_s = time.perf_counter()
        answer: EngineAnswer | None = None
        try:
            call = self._call("POST", "/v1/chat/completions", ask.secret, ask.body(), _FIRST_BYTE_S)
            answer = await self._http.send(call)
            if answer.status != 200:
                return await self._refused(ask, answer)
            return await (_stream(ask, answer, began_s) if ask.stream else _whole(ask, answer))
        except EngineError as fault:
            return _failed(ask, answer.status if answer is not None else 0, str(fault))
        except asyncio.CancelledError:
            if answer is not None:
                answer.abort()
            raise

    async def _refused(self, ask: Ask, answer: EngineAnswer) -> Told:
        wait = next((value for name, value in answer.headers if name == b"retry-after"), b"")
        body = await answer.read_all(_MAX_ANSWER_BYTES, _IDLE_S)
        retry_s = float(wait) if wait.replace(b".", b"", 1).isdigit() else _RETRY_S
        return _failed(ask, answer.status, _message(body), retry_s)

    def _call(self, method: str, path: str, secret: str, body: bytes, first_byte_s: float) -> EngineCall:
        authorization = f"authorization: Bearer {secret}\r\n" if secret else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: application/json\r\n"
            f"{authorization}content-length: {len(body)}\r\n\r\n"
        ).encode()
        return EngineCall("gateway", self._host, self._port, head, (body,), _CONNECT_S, first_byte_s)


async def _stream(ask: Ask, answer: EngineAnswer, began_s: float) -> Told:
    reader, parts = SseReader(), []
    first_s = last_s = first_unix_s = None
    usage: dict[str, Any] = {}
    done = False
    while data := await answer.read(_IDLE_S):
        now_s = time.perf_counter()
        for event in reader.feed(data):
            if event == b"[DONE]":
                done = True
                continue
            chunk = orjson.loads(event)
            if chunk.get("error"):
                return _failed(ask, answer.status, str(chunk["error"].get("message", "")))
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                if text := choice["delta"].get("content"):
                    parts.append(text)
                    last_s = now_s
                    if first_s is None:
                        first_s, first_unix_s = now_s, time.time()
    answer.release()
    if not done:
        return _failed(ask, answer.status, "The stream ended before [DONE].")
    prompt, cached, output = _counts(usage)
    gap_s = None if first_s is None or last_s is None or not output or output < 2 else (last_s - first_s) / (output - 1)
    return Told(
        workload=ask.workload,
        completed=True,
        status=answer.status,
        streamed=True,
        text="".join(parts),
        ttft_s=None if first_s is None else first_s - began_s,
        tpot_s=gap_s,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        first_token_unix_s=first_unix_s,
    )


async def _whole(ask: Ask, answer: EngineAnswer) -> Told:
    body = orjson.loads(await answer.read_all(_MAX_ANSWER_BYTES, _FIRST_BYTE_S))
    answer.release()
    prompt, cached, output = _counts(body.get("usage") or {})
    return Told(
        workload=ask.workload,
        completed=True,
        status=answer.status,
        streamed=False,
        text=str(body["choices"][0]["message"].get("content") or ""),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
    )


def _counts(usage: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    """(prompt, cached, output) tokens as the engine told them."""
    details = usage.get("prompt_tokens_details") or {}
    return usage.get("prompt_tokens"), details.get("cached_tokens"), usage.get("completion_tokens")


def _failed(ask: Ask, status: int, reason: str, retry_after_s: float = _RETRY_S) -> Told:
    return Told(ask.workload, False, status, ask.stream, reason=reason, retry_after_s=retry_after_s)


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "The gateway answered with an error."
