"""One HTTP/1.1 connection to an engine, and the answer that comes over it.

Owns: writing a request, parsing its answer (httptools), the deadlines of each wait, and back-pressure. Does not own:
the pool and the retry of a stale connection (`engine_http`), or what a failure means (`serve`). An answer keeps its
bytes, so that its connection is free for the next request as soon as the last one has come.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar, cast

import httptools

from controlplane.adapters.content_coding import Inflater
from controlplane.errors import Deadline, EngineError, EngineLost, EngineTimeout

Header = tuple[bytes, bytes]
T = TypeVar("T")

# Body bytes that may wait for a slow reader before the engine's socket is no longer read.
_HIGH_WATER_BYTES: Final = 256 * 1024
# Requests up to here are one write (one copy, one system call); longer ones are written piece by piece.
_JOIN_BYTES: Final = 64 * 1024
_PIECE_BYTES: Final = 256 * 1024
# Header block of an answer, and headers in it. Engines send about ten; the bounds stop a broken or hostile one.
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_HEADERS_COUNT: Final = 256
# Answers without a body, whatever their headers say (RFC 9112 6.3).
_NO_BODY_STATUS: Final = frozenset({204, 304})


class EngineCall(NamedTuple):
    """One request. `head` is complete, with its blank line and the content-length of `body`."""

    endpoint_id: str
    host: str
    port: int
    head: bytes
    body: Sequence[bytes | memoryview]
    connect_timeout_s: float
    first_byte_timeout_s: float
    """From the moment a connection is there until the answer's head is complete."""
    ssl: ssl.SSLContext | None = None
    server_name: str | None = None
    """The name in the engine's certificate, where it is not `host`."""
    on_send: Callable[[], None] | None = None
    """Called as soon as there is a connection, before the first byte of the request is written to it."""


Take = Callable[[bytes], bool]
"""Takes a piece of an answer; False: no more of them."""

Key = tuple[str, int, ssl.SSLContext | None, str | None]


class Pool(Protocol):
    """Who is told about a connection."""

    def opened(self, connection: Connection) -> None: ...
    def keep(self, connection: Connection) -> None: ...
    def lost(self, connection: Connection) -> None: ...


class StaleConnection(Exception):
    """The connection ended before one byte of an answer had come."""


class Connection(asyncio.Protocol):
    """One connection and at most one exchange on it. Mutable.

    Everything that waits here waits on `_waiter`, bounded by `_deadline_s`; one timer of the loop is kept and moved
    instead of made anew for each wait.
    """

    __slots__ = (
        "_answer",
        "_close_delimited",
        "_deadline_s",
        "_done",
        "_endpoint_id",
        "_error",
        "_head_bytes",
        "_headers",
        "_idle_s",
        "_parser",
        "_pool",
        "_reusable",
        "_silent_s",
        "_started",
        "_take",
        "_timer",
        "_transport",
        "_unsent",
        "_until_s",
        "_waiter",
        "_write_paused",
        "idle_since_s",
        "key",
        "loop",
    )  # fmt: skip

    def __init__(self, pool: Pool, key: Key, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.key = key
        self.idle_since_s = 0.0
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._endpoint_id = ""
        self._answer: EngineAnswer | None = None
        self._headers: list[Header] = []
        self._head_bytes = 0
        self._started = False
        """A byte of the current answer has come."""
        self._done = False
        """The current answer has ended."""
        self._close_delimited = False
        self._reusable = False
        self._unsent = False
        """Bytes of the request are still to be written: the connection cannot be used again."""
        self._write_paused = False
        self._error: str | None = None
        self._take: Take | None = None
        """Who gets the pieces of the current answer while a task waits in `relay`."""
        self._idle_s = self._until_s = self._silent_s = 0.0

    # -- the exchange --------------------------------------------------------------------------------------------------

    async def exchange(self, call: EngineCall) -> EngineAnswer:
        """Send, wait for the head. Raises EngineError, or StaleConnection when no byte of an answer came."""
        self._endpoint_id = call.endpoint_id
        answer = self._answer = EngineAnswer(self)
        self._headers = []
        self._head_bytes = 0
        self._started = self._done = self._close_delimited = False
        timeout_s = call.first_byte_timeout_s
        deadline_s = self.loop.time() + timeout_s
        if call.on_send is not None:
            call.on_send()
        try:
            size = sum(map(len, call.body))
            if size <= _JOIN_BYTES:
                self._write(b"".join((call.head, *call.body)))
            else:
                await self._write_pieces(call, deadline_s)
            while not answer.status:
                if self._error is not None:
                    if not self._started:
                        raise StaleConnection(self._error)  # noqa: TRY301 - the one place that knows both
                    raise EngineLost(call.endpoint_id, self._error)  # noqa: TRY301 - as above
                await self._wait(deadline_s, "first_byte", timeout_s)
        except BaseException:
            self.close()
            raise
        return answer

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None and self._error is None:
            self._transport.write(data)

    async def _write_pieces(self, call: EngineCall, deadline_s: float) -> None:
        """A long body, without copying it and never more than the socket takes plus one piece ahead."""
        self._unsent = True
        self._write(call.head)
        answer = self._answer
        for part in call.body:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE_BYTES):
                self._write(view[start : start + _PIECE_BYTES])
                while self._write_paused:
                    if self._error is not None or answer is None or answer.status:
                        return  # the engine answered (an error, mostly) or left before it had the whole body
                    await self._wait(deadline_s, "first_byte", call.first_byte_timeout_s)
        self._unsent = False

    async def wait_body(self, deadline_s: float, timeout_s: float) -> None:
        """Wait until the current answer has bytes or has ended. Raises EngineTimeout."""
        await self._wait(deadline_s, "idle", timeout_s)

    async def relay(self, take: Take, idle_s: float, until_s: float, silent_s: float) -> tuple[bool, float]:
        """Wait while pieces go to `take` as they come, at the latest until `silent_s` for the first of them.

        False: it wants no more; True: the body may have ended. With the time until which the next piece must come.
        """
        self._take, self._idle_s, self._until_s, self._silent_s = take, idle_s, until_s, silent_s
        try:
            more = await self._wait(min(silent_s, until_s), "idle", idle_s)
        finally:
            if self._take is take:  # the connection may serve another exchange by the time this one resumes
                self._take = None
        return more, self._silent_s

    def _hand_on(self, take: Take, answer: EngineAnswer) -> None:
        """Give what came to the relay, and move its deadline."""
        silent_s = self._silent_s = self.loop.time() + self._idle_s
        self._deadline_s = silent_s if silent_s < self._until_s else self._until_s  # noqa: FURB136 - hot; min() is slower
        try:
            more = take(answer.taken())
        except BaseException as error:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
            return
        if not more:
            self._take = None
            self._wake(False)

    async def _wait(self, deadline_s: float, name: Deadline, limit_s: float) -> bool:
        """Until `_wake`, whose word it gives, or the deadline."""
        waiter: asyncio.Future[bool] = self.loop.create_future()
        self._waiter = waiter
        self._deadline_s = deadline_s
        timer = self._timer
        if timer is None or timer.when() > deadline_s:
            if timer is not None:
                timer.cancel()
            self._timer = self.loop.call_at(deadline_s, self._timer_fired)
        try:
            return await waiter
        except TimeoutError:
            raise EngineTimeout(self._endpoint_id, name, limit_s) from None
        finally:
            if self._waiter is waiter:  # the connection may serve another exchange by the time this one resumes
                self._waiter = None

    def _timer_fired(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # nobody waits: the next wait makes a timer
        if self.loop.time() >= self._deadline_s - 1e-3:
            waiter.set_exception(TimeoutError())
        else:
            self._timer = self.loop.call_at(self._deadline_s, self._timer_fired)

    def _wake(self, more: bool = True) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(more)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading the engine's socket."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if paused:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def close(self) -> None:
        """Close the socket at once; what was not sent is dropped. The engine sees it and stops working."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def error(self) -> str | None:
        """Why the connection is gone, None while it is there."""
        return self._error

    @property
    def endpoint_id(self) -> str:
        """The engine of the current exchange."""
        return self._endpoint_id

    # -- the transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        answer = self._answer
        if answer is None:
            self._broken("The engine sent bytes that nobody had asked for.")
            return
        self._started = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._done:  # bytes after a complete last answer only cost the connection
                self._broken(f"The engine's answer is not HTTP/1.1: {reason(error)}.")
                return
            self._close_delimited = True
        if not answer.status:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._broken(f"The engine's headers are longer than {_MAX_HEAD_BYTES} bytes.")
                return
        if self._take is not None and answer.chunks:
            self._hand_on(self._take, answer)
            if not self._done:
                return
        if self._done:
            self._finish(answer)
        elif answer.buffered_bytes > _HIGH_WATER_BYTES:
            answer.pause()
        self._wake()

    def eof_received(self) -> bool:
        """asyncio: the engine closed its side. What follows is `connection_lost`."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        answer = self._answer
        if answer is not None and answer.status and self._close_delimited and exc is None and self._error is None:
            self._answer = None
            answer.ended = True
        if self._error is None:
            self._error = (
                "The engine closed the connection." if exc is None else f"The connection broke: {reason(exc)}."
            )
        self._transport = None
        self._pool.lost(self)
        self._wake()

    def pause_writing(self) -> None:
        """asyncio: the socket is full."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """asyncio: the socket takes bytes again."""
        self._write_paused = False
        self._wake()

    def _broken(self, reason: str) -> None:
        if self._error is None:
            self._error = reason
        self._started = True  # not a connection that merely went stale
        self.close()
        self._wake()

    def _finish(self, answer: EngineAnswer) -> None:
        """The answer is complete: its connection goes back to the pool, the bytes stay with the answer."""
        self._answer = self._take = None
        answer.ended = True
        if answer.paused:
            answer.paused = False
            self.pause(False)
        transport = self._transport
        unsent = self._unsent or transport is None or transport.get_write_buffer_size() > 0
        if unsent or self._close_delimited or not self._reusable:
            self.close()
        else:
            self._pool.keep(self)

    # -- the parser ----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """httptools: an answer begins. A second one to the same request cannot be."""
        if self._done:
            self._close_delimited = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a header, or a trailer after the body, which is never relayed."""
        answer = self._answer
        if answer is None or answer.status or self._done:
            return
        self._headers.append((name.lower(), value))
        if len(self._headers) > _MAX_HEADERS_COUNT:
            raise ValueError(f"more than {_MAX_HEADERS_COUNT} headers")

    def on_headers_complete(self) -> None:
        """httptools: the head is there. Interim answers (1xx) are skipped."""
        status = self._parser.get_status_code()
        answer = self._answer
        if answer is None or self._done:
            return
        if status < 200:
            self._headers = []
            return
        headers = tuple(self._headers)
        names = {name for name, _ in headers}
        self._close_delimited = (
            status not in _NO_BODY_STATUS and b"content-length" not in names and b"transfer-encoding" not in names
        )
        answer.begin(status, headers)

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body."""
        answer = self._answer
        if answer is not None and not self._done:
            answer.chunks.append(data)
            answer.buffered_bytes += len(data)

    def on_message_complete(self) -> None:
        """httptools: the answer has ended, unless it was an interim one."""
        answer = self._answer
        if answer is not None and answer.status and not self._done:
            self._done = True
            self._reusable = self._parser.should_keep_alive()  # llhttp forgets it after this callback


class EngineAnswer:
    """An engine's answer whose head has arrived. Mutable; read by one task.

    `read` gives the body as it comes, with content encodings undone. End it with `release` (after the last byte, or to
    give the rest up) or with `abort`.
    """

    __slots__ = (
        "_connection", "_inflater", "_stuck", "buffered_bytes", "chunks", "ended", "headers", "paused", "status",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inflater: Inflater | None = None
        self._stuck: EngineError | None = None
        self.status = 0
        """HTTP status; 0 until the head has come."""
        self.headers: tuple[Header, ...] = ()
        """Names in lower case, in the engine's order."""
        self.chunks: list[bytes] = []
        self.buffered_bytes = 0
        self.ended = False
        self.paused = False

    def begin(self, status: int, headers: tuple[Header, ...]) -> None:
        """The head has come."""
        self.status = status
        coding = b", ".join(value.strip().lower() for name, value in headers if name == b"content-encoding")
        if coding and coding != b"identity":
            self._inflater = Inflater(coding)
            headers = tuple(h for h in headers if h[0] not in (b"content-encoding", b"content-length"))
        self.headers = headers

    def pause(self) -> None:
        """The reader lags: the engine's socket is not read until it has caught up."""
        if not self.paused:
            self.paused = True
            self._connection.pause(True)

    async def read(self, timeout_s: float) -> bytes:
        """The bytes that are there, waiting for some if there are none; b"" at the end.

        Raises EngineLost when the connection ends before the answer does, EngineTimeout after `timeout_s` of silence;
        the connection is closed then.
        """
        if (data := self._there()) is not None:
            return data
        connection = self._connection
        deadline_s = connection.loop.time() + timeout_s  # one: bytes that bring no body do not start it again
        while (data := self._there()) is None:
            await self._waited(connection.wait_body(deadline_s, timeout_s))
        return data

    async def relay(self, take: Take, idle_s: float, left_s: float) -> bool:
        """Hand each piece to `take` as it comes, until that says False (then False) or the body has ended (True).

        Pieces are handed on in the callback of the connection that brings them: no task is woken for each. Raises as
        `read` does, after `idle_s` of silence or `left_s` altogether.
        """
        connection = self._connection
        now_s = connection.loop.time()
        until_s, silent_s = now_s + left_s, now_s + idle_s  # bytes that bring no body do not start the second again
        while (data := self._there()) != b"":
            if data:
                if not take(data):
                    return False
                silent_s = connection.loop.time() + idle_s
            elif self._inflater is not None:
                await self._waited(connection.wait_body(min(silent_s, until_s), idle_s))
            else:
                more, silent_s = await self._waited(connection.relay(take, idle_s, until_s, silent_s))
                if not more:
                    return False
        return True

    def _there(self) -> bytes | None:
        """The bytes that have come, b"" at the end; None: wait for some. Raises EngineLost where none can come."""
        if self._inflater is not None:
            if data := self._inflated(self._inflater):
                return data
        elif self.chunks:
            return self.taken()
        if self.ended:
            if self._inflater is not None and not self._inflater.complete:
                raise self._failed("The engine's compressed answer is cut short.")
            return b""
        if self._stuck is not None:
            raise self._stuck
        if self._connection.error is not None:
            raise self._failed(self._connection.error)
        return None

    async def _waited(self, wait: Awaitable[T]) -> T:
        """What a wait on the connection gives. One that fails or is given up closes the connection."""
        try:
            return await wait
        except BaseException as error:
            if isinstance(error, EngineError):
                self._stuck = error
            self.abort()
            raise

    def taken(self) -> bytes:
        """The body's bytes that have come, as they came, and not to be had again."""
        chunks = self.chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self.chunks = []
        self.buffered_bytes = 0
        if self.paused:
            self.paused = False
            self._connection.pause(False)
        return data

    def _inflated(self, inflater: Inflater) -> bytes:
        """What the bytes that are there inflate to, a bounded piece at a time."""
        try:
            while True:
                data = inflater.more()
                if data or not self.chunks:
                    return data
                inflater.feed(self.taken())
        except (zlib.error, ValueError) as error:
            self.abort()
            raise self._failed(f"The engine's answer cannot be decoded: {error}.") from None

    def _failed(self, reason: str) -> EngineError:
        self._stuck = EngineLost(self._connection.endpoint_id, reason)
        return self._stuck

    async def read_all(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body within `timeout_s` altogether. Raises EngineLost when it is longer than `limit_bytes`."""
        if self.ended and self._inflater is None and self.buffered_bytes <= limit_bytes:  # it came with its head
            return self.taken()
        loop = self._connection.loop
        deadline_s = loop.time() + timeout_s
        parts: list[bytes] = []
        size = 0
        while True:
            data = await self.read(max(0.0, deadline_s - loop.time()))
            if not data:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            parts.append(data)
            size += len(data)
            if size > limit_bytes:
                self.abort()
                raise self._failed(f"The engine's answer is longer than {limit_bytes} bytes.")

    def abort(self) -> None:
        """Give the answer up: the socket is closed at once, which cancels the engine's work. Harmless when it ended."""
        if not self.ended:
            self._connection.close()

    def release(self) -> None:
        """Done with the answer. A complete one's connection is already kept for the next; any other is closed."""
        self.abort()
        self.chunks = []


def reason(error: BaseException) -> str:
    """An error in words, without the addresses that asyncio puts in."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused ({error.verify_message})"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ssl.SSLError):
        return error.strerror.partition("(")[0].strip() or type(error).__name__
    return str(error).rstrip(".") or type(error).__name__
