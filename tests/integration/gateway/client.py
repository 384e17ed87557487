"""Callers of a gateway under test: plain requests, streams with a beginning and an end of their own, raw bytes.

Owns: how a request is put together and sent. Does not own: any check of an answer beyond its form.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tests.integration.gateway.stack import Node, Tenant, eventually, http_client

CHAT = "/v1/chat/completions"


def body(script: str | None = None, *, model: str = "m", stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A chat request; `script` is what the engine plays."""
    made: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    if script is not None:
        made["user"] = script if script.startswith("once:") else f"script:{script}"
    if stream:
        made["stream"] = True
    return {**made, **fields}


@dataclass(frozen=True)
class Caller:
    """A tenant's client of one gateway; keeps no connection between two requests unless told to."""

    node: Node
    tenant: Tenant

    def post(self, content: Mapping[str, Any] | bytes, path: str = CHAT, **headers: str) -> httpx.Response:
        """One request, its whole answer."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with http_client(self.node.url, {"content-type": "application/json", **self.tenant.headers, **named}) as client:
            return client.post(path, content=data)

    def get(self, path: str, **params: Any) -> httpx.Response:
        """One GET."""
        with http_client(self.node.url, self.tenant.headers) as client:
            return client.get(path, params=params)

    @contextlib.contextmanager
    def stream(self, content: Mapping[str, Any]) -> Iterator[httpx.Response]:
        """One streamed answer, to be read or left."""
        with http_client(self.node.url, self.tenant.headers) as client:
            with client.stream("POST", CHAT, json=content) as answer:
                yield answer


def events(data: bytes) -> list[bytes]:
    """The payloads of a stream's events."""
    return [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]


def chunks(data: bytes) -> list[dict[str, Any]]:
    """The same, parsed, without `[DONE]`."""
    return [json.loads(payload) for payload in events(data) if payload != b"[DONE]"]


def text_of(data: bytes, index: int = 0) -> str:
    """The text that a stream said for one choice."""
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks(data) for choice in chunk.get("choices", ()) if choice["index"] == index
    )  # fmt: skip


def assert_error(answer: httpx.Response, status: int, code: str | None = None, type_: str | None = None) -> Any:
    """An OpenAI error object with its four keys and a request id; returns the error."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"]), answer.headers
    found = answer.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    if code is not None:
        assert found["error"]["code"] == code
    if type_ is not None:
        assert found["error"]["type"] == type_
    return found["error"]


class RawClient:
    """A socket to the gateway."""

    def __init__(self, node: Node, receive_buffer_bytes: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.sock.connect(node.address)
        self.sock.settimeout(20)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> RawClient:
        """Write."""
        self.sock.sendall(data)
        return self

    def read_until(self, mark: bytes) -> bytes:
        """Read up to and with `mark`; what follows in the same read comes too."""
        data = b""
        while mark not in data:
            piece = self.sock.recv(65_536)
            assert piece, f"closed before {mark!r}: {data!r}"
            data += piece
        return data

    def read_all(self) -> bytes:
        """Read until the gateway closes."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := self.sock.recv(65_536):
                data += piece
        return data

    def reset(self) -> None:
        """Close with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def holder(node: Node, client_port: int) -> int | None:
    """Process id of the worker that holds the connection from this port."""
    for worker in node.workers():
        if any(one.raddr and one.raddr.port == client_port for one in worker.net_connections("tcp")):
            return worker.pid
    return None


@contextlib.contextmanager
def connected_to(node: Node, worker: psutil.Process) -> Iterator[RawClient]:
    """A connection that this worker holds: the others are stopped while it is accepted."""
    others = [one for one in node.workers() if one.pid != worker.pid]
    for one in others:
        one.suspend()
    try:
        eventually(lambda: {one.status() for one in others} == {psutil.STATUS_STOPPED}, "the others have stopped")
        raw = RawClient(node)
        eventually(lambda: holder(node, raw.sock.getsockname()[1]) == worker.pid, "the worker has accepted")
    finally:
        for one in others:
            one.resume()
    with raw:
        yield raw


def head(tenant: Tenant | None, length: int | None, *extra: str, path: str = CHAT, method: str = "POST") -> bytes:
    """A request head."""
    lines = [f"{method} {path} HTTP/1.1", "host: gateway", *extra]
    if tenant is not None:
        lines.append(f"authorization: Bearer {tenant.secret}")
    if length is not None:
        lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def request(tenant: Tenant | None, content: Mapping[str, Any], *extra: str) -> bytes:
    """A whole request."""
    data = json.dumps(content).encode()
    return head(tenant, len(data), *extra) + data


def request_id(head_bytes: bytes) -> str:
    """The request id in an answer's head."""
    found = re.search(rb"x-request-id: (req_[0-9a-f]{32})", head_bytes)
    assert found, head_bytes
    return found.group(1).decode()


def seconds_until(started_s: float) -> float:
    """Seconds since `started_s` on the monotonic clock."""
    return time.monotonic() - started_s
