"""One HTTP/1.1 connection of the simulated engine, on httptools.

Owns: framing (keep-alive, pipelining, chunks both ways), every bound on what a client may send or leave unread, and
telling the server at once that a client is gone. Does not own: routes and answers (`engine_server`).
No ASGI: a streamed token is one write on the transport, with no task, queue or future in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast

import httptools
import orjson

# Line and headers of a request: what common servers take.
_MAX_HEAD_BYTES = 64 * 1024
# Requests read but not answered on one connection (pipelining); a client beyond that is cut off.
_MAX_PIPELINED_COUNT = 16
_NO_BODY = b""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of every connection. All deadlines end in a closed socket.

    `receive_timeout_s` covers one whole request from its first byte; `write_timeout_s` is how long a client may take
    nothing of what is written.
    """

    max_body_bytes: int = 64 * 2**20
    max_connection_count: int = 4096
    keep_alive_s: float = 75.0
    receive_timeout_s: float = 60.0
    write_timeout_s: float = 60.0


@dataclass(slots=True)
class HttpRequest:
    """One request, complete once it is handed over."""

    method: str = ""
    path: str = ""
    query: str = ""
    content_type: str = ""
    request_id: str | None = None
    body: bytes = b""
    keep_alive: bool = True
    chunked_answer: bool = True


class HttpApp(Protocol):
    """What answers requests."""

    def handle_request(self, connection: EngineConnection, request: HttpRequest) -> None:
        """Answer by `connection.respond`, or by `start_stream` and what follows it, now or later."""
        ...


class DateHeader:
    """The Date header's line, made once a second."""

    def __init__(self, wall_clock_s: Callable[[], float]) -> None:
        self._wall_clock_s = wall_clock_s
        self._second = -1
        self._line = b""

    def line(self) -> bytes:
        """`date: ...` with its line end, and the server's name as vLLM's."""
        now = int(self._wall_clock_s())
        if now != self._second:
            self._second = now
            self._line = b"date: %s\r\nserver: uvicorn\r\n" % formatdate(now, usegmt=True).encode()
        return self._line


class ConnectionSet:
    """The open connections of one server and what they share."""

    def __init__(self, app: HttpApp, limits: HttpLimits, wall_clock_s: Callable[[], float]) -> None:
        self.app = app
        self.limits = limits
        self.date = DateHeader(wall_clock_s)
        self.open: set[EngineConnection] = set()
        self.draining = False

    @property
    def slow_reader_count(self) -> int:
        """Connections whose socket does not take what is written."""
        return sum(1 for connection in self.open if connection.paused)

    def drain(self) -> None:
        """Close idle connections now and the others after their answer."""
        self.draining = True
        for connection in tuple(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        """Cut every connection."""
        for connection in tuple(self.open):
            connection.abort()


class EngineConnection(asyncio.Protocol):
    """One client. `on_lost` is called once when it goes away before its answer is complete."""

    def __init__(self, shared: ConnectionSet) -> None:
        self._shared = shared
        self._limits = shared.limits
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._request = HttpRequest()
        self._url = b""
        self._in_head = True
        self._head_bytes = 0
        self._chunks: list[bytes] = []
        self._body_bytes = 0
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._active: HttpRequest | None = None
        self._pumping = False
        self.paused = False
        self.on_lost: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class has the methods, not the base
        shared = self._shared
        if len(shared.open) >= self._limits.max_connection_count or shared.draining:
            self._active = HttpRequest(keep_alive=False)
            self.respond(HTTPStatus.SERVICE_UNAVAILABLE, b'{"detail":"Too many connections"}')
            return
        shared.open.add(self)
        self._arm(self._limits.receive_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.open.discard(self)
        self._disarm()
        self._waiting.clear()
        self._active = None
        on_lost, self.on_lost, self.on_writable = self.on_lost, None, None
        if on_lost is not None:
            on_lost()

    def eof_received(self) -> bool:
        """A client that closes its side is gone: the transport closes, and the request is aborted."""
        return False

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The body of such a request is not read as one, so there is nothing to answer.
            self._waiting.clear()
            self._refuse(HTTPStatus.BAD_REQUEST, "Upgrading the connection is not supported.")
        except (httptools.HttpParserError, httptools.HttpParserCallbackError):
            self._refuse(HTTPStatus.BAD_REQUEST, "Invalid HTTP request received.")
        if self._in_head and self._head_bytes > _MAX_HEAD_BYTES:
            # Counted here, because the parser keeps a header to itself until its end.
            told = "The request's headers are larger than 64 KiB."
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, told)
        if len(self._waiting) > _MAX_PIPELINED_COUNT:
            self.abort()
            return
        self._serve_next()
        self._send_refusal()

    def pause_writing(self) -> None:
        self.paused = True
        self._arm(self._limits.write_timeout_s)

    def resume_writing(self) -> None:
        self.paused = False
        self._disarm()
        if self.on_writable is not None:
            self.on_writable()
        elif self._active is None:
            self._arm(self._limits.keep_alive_s)

    # The parser's side (names given by httptools)

    def on_message_begin(self) -> None:
        self._request, self._url, self._chunks = HttpRequest(), b"", []
        self._in_head, self._body_bytes = True, 0
        if self._active is None and not self.paused:
            self._arm(self._limits.receive_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length" and int(value) > self._limits.max_body_bytes:
            self._refuse_body()
        elif name == b"content-type":
            self._request.content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name == b"x-request-id":
            self._request.request_id = value.decode("utf-8", "replace")
        elif name == b"expect" and value.lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._refuse_body()
        if self._refusal is None:
            self._chunks.append(body)

    def on_message_complete(self) -> None:
        if self._refusal is not None:
            return
        url = httptools.parse_url(self._url)
        request = self._request
        request.method = self._parser.get_method().decode("ascii", "replace")
        request.path = (url.path or b"/").decode("latin-1")
        request.query = (url.query or b"").decode("latin-1")
        request.keep_alive = self._parser.should_keep_alive()
        request.chunked_answer = self._parser.get_http_version() != "1.0"
        request.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = []
        self._waiting.append(request)

    # The server's side

    @property
    def closing(self) -> bool:
        """The client is gone or about to be cut."""
        return self._transport is None or self._transport.is_closing()

    def respond(
        self,
        status: HTTPStatus,
        body: bytes = _NO_BODY,
        content_type: bytes = b"application/json",
        headers: bytes = b"",
    ) -> None:
        """A whole answer. `headers` are complete lines."""
        kind = b"content-type: %s\r\n" % content_type if body else b""
        self._write(
            b"%scontent-length: %d\r\n%s%svary: Origin\r\n%s\r\n%s"
            % (self._status_line(status), len(body), kind, headers, self._connection_header(), body)
        )
        self._answered()

    def start_stream(self) -> None:
        """The head of a streamed answer of server-sent events."""
        chunked = self._active is not None and self._active.chunked_answer
        if self._active is not None and not chunked:
            self._active.keep_alive = False
        self._write(
            b"%scontent-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\n%s%s\r\n"
            % (
                self._status_line(HTTPStatus.OK),
                b"transfer-encoding: chunked\r\n" if chunked else b"",
                self._connection_header(),
            )
        )

    def write_chunk(self, data: bytes, *, last: bool = False) -> None:
        """A piece of a streamed answer; `last` completes it."""
        if self._active is None:
            return
        if self._active.chunked_answer:
            data = b"%x\r\n%s\r\n%s" % (len(data), data, b"0\r\n\r\n" if last else b"")
        self._write(data)
        if last:
            self._answered()

    def close_if_idle(self) -> None:
        """Close unless a request is being answered or received."""
        if self._active is None and not self._waiting and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Cut the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def _status_line(self, status: HTTPStatus) -> bytes:
        return b"HTTP/1.1 %d %s\r\n%s" % (status, status.phrase.encode(), self._shared.date.line())

    def _connection_header(self) -> bytes:
        keep = self._active is not None and self._active.keep_alive and not self._shared.draining
        if not keep:
            return b"connection: close\r\n"
        # HTTP/1.0 closes unless told otherwise.
        return b"" if self._active is None or self._active.chunked_answer else b"connection: keep-alive\r\n"

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _answered(self) -> None:
        """The active request has its whole answer: read the next one, or close."""
        active, self._active = self._active, None
        self.on_lost = self.on_writable = None
        if self._transport is None:
            return
        if active is None or not active.keep_alive or self._shared.draining:
            self._waiting.clear()
            self._arm(self._limits.write_timeout_s)
            self._transport.close()
            return
        if self._waiting:
            self._serve_next()
        elif self._refusal is not None:
            self._send_refusal()
        elif not self.paused:
            self._arm(self._limits.keep_alive_s)

    def _serve_next(self) -> None:
        """Answer what was read, one at a time; a loop, because an answer given at once asks for the next one."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._waiting and self._active is None and not self.closing:
                self._disarm()
                self._active = self._waiting.popleft()
                self._shared.app.handle_request(self, self._active)
        finally:
            self._pumping = False

    def _refuse_body(self) -> None:
        told = f"The request's body is larger than {self._limits.max_body_bytes} bytes."
        self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, told)

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        """Read no further; say why when the answers before this request are out."""
        if self._refusal is None:
            self._refusal = (status, sentence)
            self._chunks = []

    def _send_refusal(self) -> None:
        if self._refusal is None or self._active is not None or self.closing:
            return
        status, sentence = self._refusal
        self._active = HttpRequest(keep_alive=False)
        error = {"message": sentence, "type": "BadRequestError", "param": None, "code": int(status)}
        self.respond(status, orjson.dumps({"error": error}))

    def _arm(self, delay_s: float) -> None:
        self._disarm()
        self._timer = self._loop.call_later(delay_s, self.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
