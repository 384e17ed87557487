"""The HTTP/1.1 client of the hot path: one request to one engine, its answer as it arrives, connections kept alive.

Owns: connecting (TCP, TLS), the pool of idle connections, and the retry of a stale one. Does not own: the exchange on a
connection (`engine_connection`), which engine (`router`), what is sent (`openai_wire`), or what a failure means for the
client (`serve`). Written by hand because a general client costs more than the rest of the gateway (reference
performance: httpx 0.3-1k requests/s, aiohttp half of a pass-through's time).

Faults are `EngineUnreachable` (nothing was sent), `EngineLost` (the answer did not end) and `EngineTimeout`. A reused
connection that dies before the first byte of an answer was closed by the engine while it was idle (uvicorn does after
5 s): that request is sent once more, on a fresh connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.adapters.engine_connection import (
    Connection,
    EngineAnswer,
    EngineCall,
    Header,
    Key,
    StaleConnection,
    reason,
)
from controlplane.errors import EngineLost, EngineTimeout, EngineUnreachable

__all__ = ["EngineAnswer", "EngineCall", "EngineClient", "PoolLimits", "request_head"]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of the idle connections."""

    idle_s: float = 4.0
    """Engines behind uvicorn close idle connections after 5 s: ours go first."""
    idle_count: int = 256
    """Per engine address."""


class EngineClient:
    """Sends requests to engines. One per process and event loop. Mutable: owns the pool."""

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self._limits = limits if limits is not None else PoolLimits()
        self._idle: dict[Key, list[Connection]] = {}
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def open_count(self) -> int:
        """Connections, idle ones included."""
        return len(self._open)

    @property
    def idle_count(self) -> int:
        """Connections that wait for a request."""
        return sum(map(len, self._idle.values()))

    async def send(self, call: EngineCall) -> EngineAnswer:
        """Send and wait for the answer's head. Raises EngineError; a cancelled wait closes the connection."""
        key = (call.host, call.port, call.ssl, call.server_name)
        connection = self._take(key)
        if connection is not None:
            try:
                return await connection.exchange(call)
            except StaleConnection:
                pass
        connection = await self._connect(call, key)
        try:
            return await connection.exchange(call)
        except StaleConnection as error:
            raise EngineLost(call.endpoint_id, str(error)) from None

    def _take(self, key: Key) -> Connection | None:
        idle = self._idle.get(key)
        if not idle:
            return None
        oldest_s = asyncio.get_running_loop().time() - self._limits.idle_s
        connection = idle.pop()  # the one used last: the others may go cold and be closed
        if connection.idle_since_s >= oldest_s:
            return connection
        idle.append(connection)
        for cold in idle:
            cold.close()
        idle.clear()
        return None

    async def _connect(self, call: EngineCall, key: Key) -> Connection:
        if self._closed:
            raise EngineUnreachable(call.endpoint_id, "This gateway is shutting down.")
        loop = asyncio.get_running_loop()
        server_name = (call.server_name or call.host) if call.ssl is not None else None
        try:
            async with asyncio.timeout(call.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, key, loop),
                    call.host,
                    call.port,
                    ssl=call.ssl,
                    server_hostname=server_name,
                )
        except TimeoutError:
            raise EngineTimeout(call.endpoint_id, "connect", call.connect_timeout_s) from None
        except (OSError, ssl.SSLError, UnicodeError) as error:
            raise EngineUnreachable(call.endpoint_id, f"No connection to the engine: {reason(error)}.") from None
        return connection

    def keep(self, connection: Connection) -> None:
        """Take back a connection whose answer has ended."""
        idle = self._idle.setdefault(connection.key, [])
        if self._closed or len(idle) >= self._limits.idle_count:
            connection.close()
            return
        connection.idle_since_s = connection.loop.time()
        idle.append(connection)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(self._limits.idle_s, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle too long; runs only while something is idle."""
        self._sweeper = None
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._limits.idle_s
        for key in list(self._idle):
            idle = self._idle[key]
            cold = 0
            while cold < len(idle) and idle[cold].idle_since_s < oldest_s:
                idle[cold].close()
                cold += 1
            del idle[:cold]
            if not idle:
                del self._idle[key]
        if self._idle:
            self._sweeper = loop.call_later(self._limits.idle_s, self._sweep)

    def opened(self, connection: Connection) -> None:
        """A connection was made."""
        self._open.add(connection)

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        idle = self._idle.get(connection.key)
        if idle and connection in idle:
            idle.remove(connection)

    async def aclose(self) -> None:
        """Close every connection, idle or not."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._open):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the transports' own close callbacks run


def request_head(method: str, target: str, headers: Sequence[Header], content_length: int | None = None) -> bytes:
    """A request head with its blank line. Raises ValueError for a name or value that would break out of its line."""
    lines = [f"{method} {target} HTTP/1.1".encode()]
    for name, value in headers:
        if any(byte in b"\r\n\0" for byte in name + value):
            raise ValueError(f"header {name!r} contains a line break")
        lines.append(name + b": " + value)
    if content_length is not None:
        lines.append(b"content-length: %d" % content_length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
