"""The HTTP server under the gateway: uvicorn with what a relay needs on top.

Owns: telling the request at once when its client is gone (no watcher task per request), how much of what was written
the client's socket has taken, bounds on a request's head in bytes and seconds, and the drain on SIGTERM. Does not own:
routes. uvicorn keeps HTTP itself; this file only overrides the hooks that it leaves open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Key of the ASGI extension under which a request finds its connection.
CONNECTION = "inferplane.connection"
# A request's head (line and headers): common servers stop at 8 to 64 KiB.
_MAX_HEAD_BYTES = 64 * 1024
# How long a head may take; a client that trickles headers holds a connection no longer than this.
_HEAD_TIMEOUT_S = 15.0


# Idle client connections: longer than the 60 s of common load balancers, so that they close first.
_KEEP_ALIVE_S = 75


class GatewayProtocol(HttpToolsProtocol):
    """One client connection. Mutable: the server's state of it, and who to call when it is lost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_lost: Callable[[], None] | None = None
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def drained(self) -> bool:
        """The client's socket has taken every byte written so far."""
        return not self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        unfinished = self.cycle is not None and not self.cycle.response_complete
        super().connection_lost(exc)
        on_lost, self.on_lost = self.on_lost, None
        if unfinished and on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head:
            return
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", b"The request's headers are larger than 64 KiB.")
        elif self._head_timer is None:
            self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope["extensions"] = {CONNECTION: self}

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self.on_lost = None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg.encode("ascii", "replace"))

    def _refuse(self, status: bytes, sentence: bytes) -> None:
        body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % sentence
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (status, len(body), body)
            )
        self.transport.close()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._head_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._in_head and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a gateway process drains: who is told, how long it still accepts, how long streams may go on."""

    on_drain: Callable[[], None]
    lead_s: float
    drain_timeout_s: float
    log_level: str


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


def build_server(app: Any, options: ServerOptions) -> GatewayServer:
    """A server for one gateway process; sockets are given to `serve`. Access logs are the gateway's own."""
    config = uvicorn.Config(
        app,
        http=GatewayProtocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level=options.log_level,
        server_header=False,
        date_header=True,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.drain_timeout_s)),
        backlog=4096,
    )
    return GatewayServer(config, options)
