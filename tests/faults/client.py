"""A raw HTTP client that logs exactly what it received, and the load that many of them make.

Owns: the request on the wire, leaving at a planned moment (with FIN or RST), counting the tokens of whole events as
they arrive, and how a request ended. Does not own: what a request shall be (`plan`) or whether the books agree
(`check`). It shares no code with the gateway: what it counts is an account of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import time
from dataclasses import dataclass, field

import httptools

from tests.faults.plan import Leave, Wish, wish
from tests.faults.truth import ClientSaw, Ended

# Longer than all deadlines of the gateway under test together (`stack.ENVIRONMENT`), on a machine that is overbooked.
_GIVE_UP_S = 30.0
# After a connection that was refused.
_PAUSE_S = 0.05
# A token, as the scripted engine writes it: a word with its number.
_TOKEN = re.compile(rb"tok\d+ ")
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Door:
    """Where the gateway listens, and the key to it."""

    port: int
    secret: str


class _Answer:
    """The parser's side of one answer. Mutable: filled as bytes come."""

    def __init__(self, saw: ClientSaw) -> None:
        self.saw = saw
        self.status = 0
        self.complete = False
        self.body = bytearray()
        self._rest = b""
        self._tokens = 0
        self._said_end = self._said_fault = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket."""
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self.saw.request_id = value.decode()
        elif name.lower() == b"x-ratelimit-remaining-tokens":
            self.saw.left_tokens = value.decode()

    def on_headers_complete(self) -> None:
        self.status = self.saw.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.status >= 400 or not self.saw.wish.stream:
            self.body += data
            return
        whole, blank, rest = (self._rest + data).rpartition(b"\n\n")
        self._rest = rest
        if not blank:
            return
        self._said_end = self._said_end or _END in whole
        self._said_fault = self._said_fault or b'"error"' in whole
        self._count(whole)

    def on_message_complete(self) -> None:
        self.complete = True
        if self.status < 400 and not self.saw.wish.stream:
            self._count(bytes(self.body))

    def _count(self, data: bytes) -> None:
        found = len(_TOKEN.findall(data))
        if found:
            self._tokens += found
            self.saw.reads.append((time.monotonic(), self._tokens))

    def ending(self) -> Ended:
        """How it ended, given that no more will come."""
        if not self.status:
            return Ended.NO_ANSWER
        if self.status >= 400:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                error = json.loads(self.body)["error"]
                self.saw.code, self.saw.message = str(error["code"]), str(error["message"])
            return Ended.REFUSED
        if self._said_fault:
            return Ended.FAULT_SAID
        return Ended.DONE if self.complete and (self._said_end or not self.saw.wish.stream) else Ended.CUT


def request_bytes(door: Door, wished: Wish) -> bytes:
    """The request as sent."""
    fields: dict[str, object] = {
        "model": "m",
        "messages": [{"role": "user", "content": f"{wished.tag} says hello"}],
        "user": wished.user,
    }
    if wished.stream:
        fields["stream"] = True
        if wished.include_usage:
            fields["stream_options"] = {"include_usage": True}
    if wished.max_tokens is not None:
        fields["max_tokens"] = wished.max_tokens
    if wished.choices > 1:
        fields["n"] = wished.choices
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{door.port}\r\nauthorization: Bearer {door.secret}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(door: Door, saw: ClientSaw) -> None:
    """Send one request and log what comes of it. Never raises for anything that a gateway can do."""
    saw.sent_s, saw.sent_ns = time.monotonic(), time.time_ns()
    answer = _Answer(saw)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_GIVE_UP_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            saw.connected = True
            writer.write(request_bytes(door, saw.wish))
            saw.ended = await _listen(reader, answer)
    except TimeoutError:
        saw.ended = Ended.GAVE_UP
    except (OSError, httptools.HttpParserError):
        saw.ended = answer.ending()
    saw.ended_s = time.monotonic()
    if writer is not None:
        _close(writer, abort=saw.wish.abort and saw.ended is Ended.LEFT)


async def _listen(reader: asyncio.StreamReader, answer: _Answer) -> Ended:
    wished = answer.saw.wish
    if wished.leave is Leave.BEFORE_HEAD:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wished.leave_after):
                return await _listen_for(reader, answer, None)
        return Ended.LEFT
    return await _listen_for(reader, answer, wished.leave_after if wished.leave is Leave.AFTER_TOKENS else None)


async def _listen_for(reader: asyncio.StreamReader, answer: _Answer, tokens: float | None) -> Ended:
    while not answer.complete:
        data = await reader.read(65_536)
        if not data:
            break
        answer.feed(data)
        if tokens is not None and answer.saw.tokens >= tokens and not answer.complete:
            return Ended.LEFT
    return answer.ending()


def _close(writer: asyncio.StreamWriter, *, abort: bool) -> None:
    if abort:
        sock: socket.socket = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass(slots=True)
class Load:
    """Mutable: clients that ask, one request after the other, until told to stop. `seen` holds every request."""

    door: Door
    seed: int
    clients: int
    seen: list[ClientSaw] = field(default_factory=list)
    _stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        """Begin."""
        self._tasks = [asyncio.create_task(self._ask_for_ever(number)) for number in range(self.clients)]

    async def stop(self) -> None:
        """Let every client end the request that it is in."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """End at once, for a run that has failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask_for_ever(self, number: int) -> None:
        dice = random.Random(f"client {self.seed} {number}")
        count = 0
        while not self._stopping:
            count += 1
            saw = ClientSaw(wish(dice, f"s{self.seed}-c{number}-{count}"))
            self.seen.append(saw)
            await ask(self.door, saw)
            if saw.ended in {Ended.NO_ANSWER, Ended.REFUSED}:
                await asyncio.sleep(_PAUSE_S)
