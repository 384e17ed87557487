"""The HTTP server under the gateway: uvicorn with what a relay needs on top.

Owns: telling the request at once when its client is gone (no watcher task per request), how much of what was written
the client's socket has taken, bounds on a request's head and body in bytes and seconds, what becomes of a body that
nobody waits for, and the drain on SIGTERM. Does not own: routes, or the parsing of HTTP (httptools). uvicorn keeps the
messages of ASGI and the life of the process; this file overrides the hooks that it leaves open, from bytes to a scope.

One request at a time per connection: a client that pipelines gets the first answer and then the end of the connection.
Reading on is what shows that a client has left, and a queue of requests would have to stop it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any
from urllib.parse import unquote

import httptools
import uuid_utils
import uvicorn
from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from controlplane.adapters.openai_wire import error_body

_log = logging.getLogger(__name__)

# Key of the ASGI extension under which a request finds its connection.
CONNECTION = "inferplane.connection"
# A request's head (line and headers): common servers stop at 8 to 64 KiB.
_MAX_HEAD_BYTES = 64 * 1024
# What says that a body follows (RFC 9112 6).
_BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})
# Idle client connections: longer than the 60 s of common load balancers, so that they close first.
_KEEP_ALIVE_S = 75
# A body that is not complete when its time is up gets as much again, as long as it comes at 16 KiB/s or more: the
# slowest lines that still work carry that.
_MIN_BODY_BYTES_PER_S = 16 * 1024
# A body whose answer is already given is read on and dropped, so that the client gets to read the answer (a close would
# be a reset), but no further than this.
_LINGER_S = 5.0
_LINGER_BYTES = 64 * 1024 * 1024
# After the drain deadline, how long requests that were cut may take to say so.
_LAST_WORDS_S = 2.0
# Pieces that wait for each other: what came first is held back by the work on as many more, well below 1 ms.
_OUTBOX_COUNT = 32
# How often a drain looks whether it is over.
_DRAIN_POLL_S = 0.02


# The data plane's own paths need no parsing: URL -> (path, raw path, query).
_PATHS = {path.encode(): (path, path.encode(), b"") for path in ("/v1/chat/completions", "/v1/completions")}


# How long a request's head may take: a client that trickles headers holds a connection no longer than this.
HEAD_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """How long a client may take for a request's head, and for its body before the rate counts."""

    head_s: float
    body_s: float


class Outbox:
    """The connections with a piece of a stream to write when the event loop turns. Mutable; one per process.

    Pieces that come in one turn are written one after the other, not each as it comes: writing wakes the client, and
    on a core that is busy with the next piece meanwhile that is most of what a write costs.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[GatewayProtocol] = []

    def put(self, conn: GatewayProtocol) -> None:
        """`conn` has something to push."""
        waiting = self._waiting
        if not waiting:
            conn.loop.call_soon(self._push)
        waiting.append(conn)
        if len(waiting) >= _OUTBOX_COUNT:
            self._push()

    def _push(self) -> None:
        waiting, self._waiting = self._waiting, []
        for conn in waiting:
            try:
                conn.push()
            except Exception:
                _log.exception("A piece of a stream could not be written.")
                conn.transport.abort()


class _Stage(Enum):
    """What the connection waits for."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"


class GatewayProtocol(HttpToolsProtocol):
    """One client connection. Mutable: the server's state of it, and who to call when it is lost."""

    def __init__(self, *args: Any, times: ClientTimes, outbox: Outbox, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._times = times
        self._outbox = outbox
        self._queued = b""
        self._took: Callable[[bool], None] | None = None
        """Told when what is queued was written; None: nothing is."""
        self.on_lost: Callable[[], None] | None = None
        self.lost = False
        self.task: asyncio.Task[None] | None = None
        """What answers the current request."""
        self._idle_since_s: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self.written_bytes = 0
        """Of streams: pieces with what frames them."""
        self._taken_bytes = 0
        self._dropped_bytes = 0
        """Of the written ones, the last, which no socket was given."""
        self._deaf = False
        """What still comes is not looked at."""
        self._stage = _Stage.HEAD
        self._timed: _Stage | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._body_bytes = 0

    @property
    def drained(self) -> bool:
        """The client's socket has taken every byte written so far; once it is lost: had taken them by then."""
        if self.lost:
            return self._taken_bytes >= self.written_bytes
        if self._took is not None:
            return False
        return not self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    @property
    def taken_bytes(self) -> int:
        """How many of the `written_bytes` the client's socket has taken; once it is lost: had taken by then."""
        return self._taken_bytes if self.lost else self._given_bytes - self.transport.get_write_buffer_size()

    @property
    def _given_bytes(self) -> int:
        return self.written_bytes - self._dropped_bytes

    @property
    def expects_continue(self) -> bool:
        """The client waits for leave to send its body (`expect: 100-continue`)."""
        return self.cycle is not None and self.cycle.waiting_for_100_continue

    def whole_body(self, max_bytes: int) -> bytes | None:
        """The body of the current request, once, if all of it is here and it is not too large; else use `receive`."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue or len(cycle.body) > max_bytes:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    # -- answers ---------------------------------------------------------------------------------------------------
    #
    # The data plane writes its answers here instead of sending messages through uvicorn, whose checks of each header
    # and message are a tenth of what a short request costs, and a third of what a piece of a stream does.

    def head(self, status: int, headers: Sequence[tuple[bytes, bytes]], *, sized: bool) -> bytes:
        """Begin an answer: its head, to be written with the first bytes of its body. `headers` are ours.

        Not `sized` (no content-length): the body goes in chunks, or up to the close for a caller of HTTP/1.0.
        """
        cycle = self.cycle
        lines = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        if not sized:
            cycle.chunked_encoding = cycle.scope["http_version"] != "1.0"
            if cycle.chunked_encoding:
                lines.append(b"transfer-encoding: chunked\r\n")
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        return b"".join(lines)

    def piece(self, head: bytes, data: bytes) -> None:
        """Write a piece of an answer, after its head where that is still to be written."""
        self.push()
        self._hold(head, data, lambda _: None)
        self.push()

    def queue(self, head: bytes, data: bytes, took: Callable[[bool], None]) -> None:
        """The same when the event loop turns; `took` is told then, with `drained`."""
        self._hold(head, data, took)
        self._outbox.put(self)

    def _hold(self, head: bytes, data: bytes, took: Callable[[bool], None]) -> None:
        self._queued = b"%b%x\r\n%b\r\n" % (head, len(data), data) if self.cycle.chunked_encoding else head + data
        self._took = took

    def push(self) -> None:
        """Write what is queued, if anything. Of one that is lost or closing it counts as written, not taken."""
        took = self._took
        if took is None:
            return
        data, self._queued = self._queued, b""
        self._took = None
        self.written_bytes += len(data)
        transport = self.transport
        if self.cycle.disconnected or transport.is_closing():  # it would take the bytes without a word, and drop them
            self._dropped_bytes += len(data)
            took(False)
            return
        transport.write(data)
        took(not (transport.get_write_buffer_size() or transport.is_closing()))

    def last(self, head: bytes, data: bytes) -> None:
        """Write the last piece, or the whole body, of an answer."""
        self.push()
        cycle = self.cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        cycle.response_complete = True
        cycle.message_event.set()
        self.transport.write(head + data)
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    # -- the connection ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None, 0.0)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.lost = True
        # uvloop still knows what it had not written (asyncio's own transport has forgotten it by now)
        self._taken_bytes = self._given_bytes - self.transport.get_write_buffer_size()
        unfinished = self.cycle is not None and not self.cycle.response_complete
        super().connection_lost(exc)
        self.push()
        on_lost, self.on_lost = self.on_lost, None
        if unfinished and on_lost is not None:
            on_lost()

    def eof_received(self) -> None:
        """The client sends no more, and the transport closes after this: what is queued goes first."""
        self.push()
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._stage is _Stage.BODY:
            self._body_bytes += len(data)
        else:
            self._head_bytes += len(data)
        self._idle_since_s = None
        try:
            self.parser.feed_data(data)
        except HttpParserError:
            self.send_400_response("")
        except HttpParserUpgrade:
            pass  # the upgrade is refused: its request is answered like any other
        stage = self._stage
        if stage is _Stage.IDLE:
            if self.cycle is not None and not self.cycle.response_complete:
                if self._timed is not stage:
                    self._set_timer(stage, 0.0)
                return
            self._stage = _Stage.HEAD  # stray bytes between requests: the idle timer is stopped, this one runs
        self._watch()

    # -- the parser ----------------------------------------------------------------------------------------------------
    #
    # What uvicorn does at these calls, without what this server never has: a root path, WebSockets, a bound on
    # concurrency, a queue of pipelined requests.

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        if self._busy():
            self._close_after_answer()
        else:
            self._stage = _Stage.HEAD

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        if self._head_bytes > _MAX_HEAD_BYTES and self._head_size() > _MAX_HEAD_BYTES:
            self._head_too_large()
            return
        self._stage = _Stage.BODY
        self._head_bytes = self._body_bytes = 0
        parser = self.parser
        if parser.should_upgrade() and any(name in _BODY_HEADERS for name, _ in self.headers):
            # the parser takes what follows for another protocol: the body would be lost
            self._refuse(b"400 Bad Request", "The connection cannot be upgraded.", "upgrade_not_supported")
            return
        http_version = parser.get_http_version()
        url = self.url
        path, raw_path, query = _PATHS.get(url) or _parts(url)
        scope: Any = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": http_version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": parser.get_method().decode("ascii"),
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
            "extensions": {CONNECTION: self},
        }
        keep_alive = http_version != "1.0" and parser.should_keep_alive()
        self.cycle = RequestResponseCycle(  # not by name: that costs as much again
            scope, self.transport, self.flow, self.logger, self.access_logger, self.access_log,
            self.server_state.default_headers, asyncio.Event(), self.expect_100_continue, keep_alive,
            self.on_response_complete,
        )  # fmt: skip
        self.task = task = self.loop.create_task(self.cycle.run_asgi(self.app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if self._deaf or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        self._stage = _Stage.IDLE
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()
        # reading stops behind 64 KiB and only goes on when the body is asked for; the end of the connection would then
        # go unseen for as long as the answer takes
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self.on_lost = self.task = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._idle_since_s = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)
        if self._stage is _Stage.BODY:
            self._body_bytes = 0
            self._set_timer(_Stage.BODY, _LINGER_S)

    # -- the idle connection: one timer that is moved, instead of one made and cancelled for each request --

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since_s = None

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since_s is None:
            return  # the end of the answer that is under way sets it again
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._close_if_idle)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "The request is not valid HTTP/1.1.", "invalid_http")

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_after_answer(self) -> None:
        self.cycle.keep_alive = False
        self._deaf = True

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _watch(self) -> None:
        """Bound what the connection waits for, in bytes at once and in seconds by a timer."""
        stage = self._stage
        if stage is _Stage.HEAD and self._head_bytes > _MAX_HEAD_BYTES and not self._deaf:
            self._head_too_large()
        elif stage is _Stage.BODY and not self._busy() and self._body_bytes > _LINGER_BYTES:
            self.transport.close()
        elif stage is not self._timed:
            seconds = self._times.head_s if stage is _Stage.HEAD else self._times.body_s
            self._set_timer(stage, seconds)

    def _set_timer(self, stage: _Stage | None, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = stage
        if stage is _Stage.HEAD or stage is _Stage.BODY:
            self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        self._timer, stage = None, self._timed
        if stage is _Stage.HEAD:
            if self._head_bytes:
                self._refuse(b"408 Request Timeout", "The request's headers did not arrive in time.", "request_timeout")
            else:
                self.transport.close()
        elif not self._busy():
            self.transport.close()
        elif self._body_bytes >= _MIN_BODY_BYTES_PER_S * self._times.body_s:
            self._body_bytes = 0
            self._set_timer(_Stage.BODY, self._times.body_s)
        else:
            self._refuse(b"408 Request Timeout", "The request's body did not arrive in time.", "request_timeout")

    def _head_too_large(self) -> None:
        sentence = f"The request's headers are larger than {_MAX_HEAD_BYTES} bytes."
        self._refuse(b"431 Request Header Fields Too Large", sentence, "headers_too_large")

    def _refuse(self, status: bytes, sentence: str, code: str) -> None:
        """Answer what never became a request, and close. In the middle of another answer: only close."""
        self._deaf = True
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error_body(sentence, "invalid_request_error", None, code)
            self.transport.write(
                b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: req_%s\r\n"
                b"connection: close\r\n\r\n%s" % (status, len(body), uuid_utils.uuid7().hex.encode(), body)
            )
        self.transport.close()


def _parts(url: bytes) -> tuple[str, bytes, bytes]:
    """The path with its escapes resolved, as it came, and the query. Raises HttpParserError, which ends in a 400."""
    parsed = httptools.parse_url(url)
    raw_path = parsed.path
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path, raw_path, parsed.query or b""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a gateway process drains: who is told, how long it still accepts, how long streams may go on."""

    on_drain: Callable[[], None]
    lead_s: float
    drain_timeout_s: float
    times: ClientTimes


class GatewayServer(uvicorn.Server):
    """uvicorn's server with a drain: not ready at once, then no new connections, then the deadline."""

    def __init__(self, config: uvicorn.Config, options: ServerOptions) -> None:
        super().__init__(config)
        self._options = options
        self._draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: answer `/readyz` with 503 and keep serving for `lead_s`. Second signal: stop now."""
        if self._draining:
            self.should_exit = True
            self.force_exit = True
            return
        self._draining = True
        self._options.on_drain()
        asyncio.get_running_loop().call_later(self._options.lead_s, self._stop)

    def _stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Take no new connection, let requests end until the deadline, cut the rest with a word, stop the parts."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._await_end(self._options.drain_timeout_s)
        for task in list(self.server_state.tasks):
            task.cancel("the drain deadline has passed")
        await self._await_end(_LAST_WORDS_S)
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _await_end(self, within_s: float) -> None:
        loop, state = asyncio.get_running_loop(), self.server_state
        until_s = loop.time() + within_s
        while (state.tasks or state.connections) and loop.time() < until_s and not self.force_exit:  # noqa: ASYNC110 - uvicorn keeps sets, no event
            await asyncio.sleep(_DRAIN_POLL_S)


def build_server(app: Any, options: ServerOptions) -> GatewayServer:
    """A server for one gateway process; sockets are given to `serve`. Access logs are the gateway's own."""
    config = uvicorn.Config(
        app,
        http=partial(GatewayProtocol, times=options.times, outbox=Outbox()),  # type: ignore[arg-type] # it calls it like a class
        loop="uvloop",
        ws="none",
        interface="asgi3",
        lifespan="on",
        access_log=False,
        log_level="error",  # its warnings are of malformed requests: anybody could fill the log
        server_header=False,
        date_header=True,
        proxy_headers=False,  # nothing here goes by the client's address
        timeout_keep_alive=_KEEP_ALIVE_S,
        backlog=4096,
    )
    return GatewayServer(config, options)
