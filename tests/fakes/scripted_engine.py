"""A real TCP server that plays scripts, byte by byte, in the place of an engine, and keeps the truth of what it did.

Owns: the server, the choice of a request's script and the truth log, the ground truth of fault tests: what was asked,
what was sent, how many tokens, and when the caller closed. Does not own: the scripts (`engine_scripts`), or how a real
engine schedules and counts (`perfmodel`).

A request picks its script by `"user": "script:NAME?option=value&..."`, else by a `model` of that form, else the next
queued one (`enqueue`), else `normal`. As a process: `python -m tests.fakes.scripted_engine --port 0 --log FILE` prints
its port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httptools

from tests.fakes.engine_scripts import SCRIPTS, Ask, End, Script, Send, Truth, Wait, json_script, normal

_PREFIX = "script:"


class ScriptedEngine:
    """The server. `async with ScriptedEngine() as engine: engine.port`. `truths` holds every request, in order."""

    def __init__(self, log: Path | None = None, models: Sequence[str] = ("m",), tls: Any = None) -> None:
        self.truths: list[Truth] = []
        self.models = list(models)
        self.port = 0
        self.connections_count = 0
        """Connections ever accepted."""
        self._tls = tls
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._queue: deque[Script | Callable[[Ask], Script]] = deque()
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    def enqueue(self, *scripts: Script | Callable[[Ask], Script]) -> None:
        """Scripts for the next requests that name none."""
        self._queue.extend(scripts)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.shut()
        await asyncio.sleep(0.01)
        if self._log is not None:
            os.close(self._log)
            self._log = None

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def drop_idle(self) -> None:
        """Close connections that are between requests, as uvicorn does after 5 s."""
        for connection in list(self._connections):
            if connection.idle:
                connection.shut()

    def joined(self, connection: _Connection) -> None:
        """A connection was accepted."""
        self.connections_count += 1
        self._connections.add(connection)

    def left(self, connection: _Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)

    def script_for(self, truth: Truth) -> Script:
        """The script that this request asks for."""
        if truth.method == "GET":
            if truth.target == "/v1/models":
                cards = [{"id": name, "object": "model", "created": 1, "owned_by": "stub"} for name in self.models]
                return json_script("models", json.dumps({"object": "list", "data": cards}).encode())
            found = truth.target == "/health"
            return json_script("get", b"" if found else b'{"detail":"Not Found"}', 200 if found else 404)
        fields: Any = None
        with contextlib.suppress(ValueError):
            fields = json.loads(truth.body)
        fields = fields if isinstance(fields, dict) else {}
        for name in ("user", "model"):
            asked = fields.get(name)
            if isinstance(asked, str) and asked.startswith(_PREFIX):
                key, _, query = asked.removeprefix(_PREFIX).partition("?")
                return SCRIPTS[key](Ask(fields, dict(parse_qsl(query, keep_blank_values=True)), truth))
        script = self._queue.popleft() if self._queue else normal
        return script if isinstance(script, Script) else script(Ask(fields, {}, truth))

    def record(self, truth: Truth) -> None:
        """One line of the truth log, written at once."""
        if self._log is not None:
            os.write(self._log, json.dumps(truth.line()).encode() + b"\n")


# A script without waits lets the engine's other connections have their turn after this many steps.
_STEPS_IN_A_ROW = 64


class _Connection(asyncio.Protocol):
    """One client connection; answers its requests one after the other."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._truth: Truth | None = None
        self._task: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._target = b""
        self._headers: list[tuple[str, str]] = []
        self._body: list[bytes] = []

    @property
    def idle(self) -> bool:
        """Between two requests."""
        return self._task is None or self._task.done()

    def shut(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._engine.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.left(self)
        self._room.set()
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.shut()

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body = b"", [], []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        engine = self._engine
        truth = Truth(
            len(engine.truths) + 1, time.time_ns(), self._parser.get_method().decode(), self._target.decode("latin-1"),
            self._headers, b"".join(self._body),
        )  # fmt: skip
        engine.truths.append(truth)
        self._task = asyncio.ensure_future(self._answer(truth))

    async def _answer(self, truth: Truth) -> None:
        try:
            script = self._engine.script_for(truth)
            truth.script = script.name
            self._engine.record(truth)
            truth.ended = await self._play(script, truth)
        except asyncio.CancelledError:
            truth.ended = "client_closed"
        except Exception as error:  # a script's own fault must not look like an engine's
            truth.ended = f"script failed: {error!r}"
            self.shut()
        truth.ended_ns = time.time_ns()
        self._engine.record(truth)

    async def _play(self, script: Script, truth: Truth) -> str:
        chunked = script.framing == "chunked"
        if script.framing != "raw":
            self._transport.write(_head(script))
        for number, step in enumerate(script.steps, 1):
            if number % _STEPS_IN_A_ROW == 0:
                await asyncio.sleep(0)
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
            elif isinstance(step, End):
                return await self._end(step.how)
            else:
                await self._send(step, truth, chunked)
        if chunked:
            self._transport.write(b"0\r\n\r\n")
        if script.framing in ("close", "raw"):
            self._transport.close()
        return "completed"

    async def _send(self, step: Send, truth: Truth, chunked: bool) -> None:
        size = step.piece_bytes or max(1, len(step.data))
        for start in range(0, len(step.data), size):
            piece = step.data[start : start + size]
            self._transport.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            truth.sent += piece
            if self._transport.is_closing():  # a script that never waits would not be told by a cancellation
                raise asyncio.CancelledError
            if step.piece_bytes:
                await asyncio.sleep(step.gap_s)
            await self._room.wait()
        truth.tokens_sent += step.tokens

    async def _end(self, how: str) -> str:
        if how == "stall":
            await asyncio.sleep(3_600)
        if how == "reset":
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(0.02)  # what was written leaves first
            self._transport.abort()
        else:
            self._transport.close()
        return how


def _head(script: Script) -> bytes:
    lines = [f"HTTP/1.1 {script.status} Scripted", *(f"{name}: {value}" for name, value in script.headers)]
    if script.framing == "chunked":
        lines.append("transfer-encoding: chunked")
    elif script.framing == "length":
        lines.append(f"content-length: {sum(len(step.data) for step in script.steps if isinstance(step, Send))}")
    else:
        lines.append("connection: close")
    return "\r\n".join([*lines, "", ""]).encode()


async def _main(port: int, log: Path | None, models: Sequence[str]) -> None:
    engine = ScriptedEngine(log, models)
    await engine.start(port=port)
    sys.stdout.write(f"{engine.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plays an engine by script.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--model", action="append", default=None)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(given.port, given.log, given.model or ["m"]))
