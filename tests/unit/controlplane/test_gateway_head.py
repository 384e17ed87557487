"""What the gateway's connection makes of a request's bytes is what uvicorn's own makes of them.

`GatewayProtocol` builds the ASGI scope itself, in fewer steps. Here both get the same bytes, and the scope, whether the
connection goes on, whether the client waits for leave, and the body must be equal; what uvicorn refuses is refused.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from controlplane.adapters.gateway_server import CONNECTION, ClientTimes, GatewayProtocol, Outbox

HEADS = {
    "a chat completion": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    "a completion": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    "a known path and a query": b"POST /v1/completions?a=1&b=%20 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
    "a known path and an empty query": b"POST /v1/completions? HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
    "another path": b"GET /admin/v1/decisions/req_1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "escapes": b"GET /v1/models/org%2Fmodel%20%C3%BC HTTP/1.1\r\nHost: a\r\n\r\n",
    "an escape that means nothing": b"GET /v1/%zz HTTP/1.1\r\nHost: a\r\n\r\n",
    "a fragment": b"GET /v1/models#part HTTP/1.1\r\nHost: a\r\n\r\n",
    "two slashes": b"GET //v1//models HTTP/1.1\r\nHost: a\r\n\r\n",
    "an absolute URL": b"GET http://else.where:8000/v1/models?q HTTP/1.1\r\nHost: a\r\n\r\n",
    "an absolute URL of a known path": b"POST http://a/v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
    "an absolute URL without a path": b"GET http://else.where HTTP/1.1\r\nHost: a\r\n\r\n",
    "the server": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tunnel": b"CONNECT else.where:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "bytes that are no ASCII": b"GET /v1/\xc3\xbc HTTP/1.1\r\nHost: a\r\n\r\n",
    "HEAD": b"HEAD /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/1.0": b"GET /healthz HTTP/1.0\r\n\r\n",
    "HTTP/1.0 that would stay": b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "the last request": b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "leave to send": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 3\r\n\r\n",
    "headers as they come": b"GET / HTTP/1.1\r\nHOST: a\r\nX-Two: 1\r\nx-two:2 \r\nX-Empty:\r\n\r\n",
    "an upgrade without a body": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "chunks": b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc",
    "no HTTP": b"hello\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\n: a\r\n\r\n",
}


class Wire(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 8000), "peername": ("127.0.0.2", 50_000)})
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application that is never asked: no test lets the loop run."""


def fed(kind: type[HttpToolsProtocol], data: bytes, piece_bytes: int, **more: Any) -> tuple[Any, Wire]:
    """A connection that got these bytes, so many at a time."""
    config = uvicorn.Config(nothing, ws="none", interface="asgi3", lifespan="off", access_log=False, log_config=None)
    config.load()
    connection = kind(config, ServerState(), {"started": True}, asyncio.get_running_loop(), **more)
    wire = Wire()
    connection.connection_made(wire)
    for start in range(0, len(data), piece_bytes):
        if not wire.closed:
            connection.data_received(data[start : start + piece_bytes])
    return connection, wire


@pytest.mark.parametrize("piece_bytes", [10_000, 7, 1])
@pytest.mark.parametrize("name", HEADS)
def test_a_request_is_read_as_uvicorn_reads_it(name: str, piece_bytes: int) -> None:
    async def compare() -> None:
        theirs, their_wire = fed(HttpToolsProtocol, HEADS[name], piece_bytes)
        ours_only: dict[str, Any] = {"times": ClientTimes(15.0, 30.0), "outbox": Outbox()}
        ours, our_wire = fed(GatewayProtocol, HEADS[name], piece_bytes, **ours_only)
        assert our_wire.closed is their_wire.closed
        assert our_wire.written[:12] == their_wire.written[:12]
        assert (ours.cycle is None) is (theirs.cycle is None)
        assert len(ours.tasks) == len(theirs.tasks)
        if theirs.cycle is not None:
            assert ours.cycle.scope.pop("extensions") == {CONNECTION: ours}
            assert ours.cycle.scope == theirs.cycle.scope
            for each in ("keep_alive", "waiting_for_100_continue", "body", "more_body", "default_headers"):
                assert getattr(ours.cycle, each, None) == getattr(theirs.cycle, each, None), each
            assert ours.cycle.message_event.is_set() is theirs.cycle.message_event.is_set()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(compare())


def test_most_of_these_requests_are_accepted_and_some_refused() -> None:
    """So that the comparison above is not one of nothing with nothing."""

    async def count() -> int:
        refused = [name for name, data in HEADS.items() if fed(HttpToolsProtocol, data, 10_000)[1].closed]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return len(refused)

    assert 3 <= asyncio.run(count()) <= 8
