"""The OpenAI data plane as plain ASGI: no framework between the socket and `serve`.

Owns: authentication of a request, reading its body within bounds, the request id, the client's side of the connection
(`AsgiSink`), and rendering what `serve` decided as OpenAI answers (`OpenAiEdge`). Does not own: the shape of bodies
(`openai_wire`), or any decision (`serve`). The FastAPI app serves everything that is not in `OpenAiRoutes.paths`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from controlplane.adapters import openai_wire
from controlplane.adapters.gateway_server import CONNECTION, GatewayProtocol
from controlplane.adapters.key_secret import digest_key
from controlplane.adapters.telemetry import Telemetry
from controlplane.admission import limit_headers, refusal_facts
from controlplane.errors import BadRequest
from controlplane.ports import Answer, Call, Clock, Fault, Header, Sink, Trace
from controlplane.rate_limit import LimitView
from controlplane.request import Operation
from controlplane.serve import Path
from controlplane.tenancy import Access, Denied, Principal, Scope, Snapshot, authorize

Scope_ = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

# Response headers of an engine that may reach the client; everything else of an engine's head stays inside.
_RELAYED = frozenset({b"content-type"})
# How long the rest of a body may take to arrive once its head is there.
_BODY_TIMEOUT_S = 60.0
_log = logging.getLogger(__name__)
_DEFECT = Fault(500, "The gateway failed to serve this request.", "server_error", "internal_error")
_JSON = (b"content-type", b"application/json")
_EXPLAIN = b"x-inferplane-decision"


class AsgiSink:
    """The client's side of one request. Mutable: knows whether the client is still there and what it has taken."""

    __slots__ = ("_conn", "_send", "_stall_s", "_task", "gone", "started")

    def __init__(self, scope: Scope_, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self.gone = False
        self.started = False
        self._task = asyncio.current_task()
        conn: GatewayProtocol | None = (scope.get("extensions") or {}).get(CONNECTION)
        self._conn = conn
        if conn is not None:
            conn.on_lost = self._lost

    def _lost(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel("client gone")

    @property
    def drained(self) -> bool:
        """The client's socket has taken every byte written so far (always true without a real connection)."""
        return self._conn is None or self._conn.drained

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        """Send the head."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a piece; waits while the client's socket is full, and gives up on a client that does not read."""
        conn = self._conn
        if conn is not None and conn.flow.write_paused:
            await self._wait_for_room(conn)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> None:
        """Send the last piece."""
        conn = self._conn
        if conn is not None and conn.flow.write_paused:
            await self._wait_for_room(conn)
        await self._send({"type": "http.response.body", "body": data})

    async def _wait_for_room(self, conn: GatewayProtocol) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await conn.flow.drain()
        except TimeoutError:
            conn.transport.abort()  # its loss cancels this task
            await asyncio.sleep(self._stall_s)


class OpenAiEdge:
    """Renders decisions of `serve` as OpenAI answers."""

    def headers(self, call: Call, view: LimitView, trace: Trace, answer: Answer) -> list[Header]:
        """The head of an engine's answer as the client gets it."""
        headers = [(name, value) for name, value in answer.headers if name in _RELAYED]
        headers.append((b"x-request-id", call.request_id.encode()))
        headers += _encoded(limit_headers(view))
        if trace.decision:
            headers.append((_EXPLAIN, trace.decision.encode("ascii", "replace")))
        return headers

    async def fail(self, sink: Sink, call: Call, fault: Fault, view: LimitView | None) -> int:
        """Answer with an error object; returns the status sent."""
        if fault.refused is not None:
            facts = refusal_facts(fault.refused)
            status, body = facts.status, openai_wire.error_body(facts.message, facts.type, None, facts.code)
            retry = _encoded(facts.headers())
        else:
            status, body = fault.status, _fault_body(fault)
            retry = retry_headers(fault.retry_after_s, fault.should_retry)
        headers = [_JSON, (b"x-request-id", call.request_id.encode()), (b"content-length", b"%d" % len(body))]
        if view is not None:
            headers += _encoded(limit_headers(view))
        headers += retry
        await sink.start(status, headers)
        await sink.finish(body)
        return status

    def stream_fault(self, fault: Fault) -> bytes:
        """An error said inside a stream that has begun, and its end."""
        return openai_wire.stream_error(fault.message, fault.type, fault.param, fault.code)


def _encoded(pairs: Sequence[tuple[str, str]]) -> list[Header]:
    return [(name.encode(), value.encode()) for name, value in pairs]


def _fault_body(fault: Fault) -> bytes:
    if fault.engine_body is not None:
        return openai_wire.engine_error_body(
            fault.engine_body, openai_wire.EngineErrorDefault(fault.message, fault.type, fault.param, fault.code)
        )
    return openai_wire.error_body(fault.message, fault.type, fault.param, fault.code)


def retry_headers(retry_after_s: float | None, should_retry: bool | None) -> list[Header]:
    """Both retry headers where waiting helps, and the SDKs' override where it does not (reference gateway 2.1)."""
    headers: list[Header] = []
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(retry_after_s * 1_000))))
    if should_retry is not None:
        headers.append((b"x-should-retry", b"true" if should_retry else b"false"))
    return headers


class KeySource(Protocol):
    """The keys as the feed holds them now."""

    @property
    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True, slots=True)
class RoutesConfig:
    """Bounds and secrets of the data plane."""

    pepper: bytes
    key_grace_s: float
    max_body_bytes: int
    client_stall_s: float


@dataclass(frozen=True, slots=True)
class RoutesDeps:
    """What the data plane stands on."""

    path: Path
    edge: OpenAiEdge
    keys: KeySource
    clock: Clock
    telemetry: Telemetry
    models: Callable[[Principal], list[str]]
    """The models that a principal may name, sorted."""


class OpenAiRoutes:
    """`/v1/chat/completions`, `/v1/completions` and `/v1/models`."""

    def __init__(self, deps: RoutesDeps, config: RoutesConfig) -> None:
        self._d = deps
        self._c = config
        self._operations = {"/v1/chat/completions": Operation.CHAT, "/v1/completions": Operation.COMPLETION}

    def serves(self, path: str) -> bool:
        """Whether this data plane answers the path."""
        return path in self._operations or path == "/v1/models" or path.startswith("/v1/models/")

    async def __call__(self, scope: Scope_, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        clock = self._d.clock
        received_ns, started_s = clock.unix_ns(), clock.monotonic_s()
        request_id = "req_" + clock.event_id()
        operation = self._operations.get(scope["path"])
        method = scope["method"]
        if operation is None:
            if method not in ("GET", "HEAD"):
                await self._fail(send, request_id, _method_fault(method, "GET"))
                return
            await self._models(scope, send, request_id)
        elif method != "POST":
            await self._fail(send, request_id, _method_fault(method, "POST"))
        else:
            await self._infer(scope, receive, send, _Arrival(operation, request_id, received_ns, started_s))

    async def _infer(self, scope: Scope_, receive: Receive, send: Send, arrival: _Arrival) -> None:
        secret, length, explain, problem = _read_head(scope["headers"])
        principal = self._authorize(secret, Scope.INFERENCE, None)
        if isinstance(principal, Denied):
            self._d.telemetry.denied(principal.reason.value)
            await self._fail(send, arrival.request_id, openai_wire.denial_fault(principal))
            return
        try:
            if problem is not None:
                raise problem
            body = await self._read_body(receive, length)
            if body is None:
                return  # the client left before its request was complete: nothing was asked of us
            request = openai_wire.parse(arrival.operation, body)
            allowed = self._authorize(secret, Scope.INFERENCE, request.model_asked)
        except BadRequest as error:
            await self._fail(send, arrival.request_id, openai_wire.bad_request_fault(error))
            return
        if isinstance(allowed, Denied):
            self._d.telemetry.denied(allowed.reason.value)
            await self._fail(send, arrival.request_id, openai_wire.denial_fault(allowed))
            return
        may_explain = explain and (Scope.EXPLAIN in allowed.scopes or Scope.ADMIN in allowed.scopes)
        call = Call(request, allowed, arrival.request_id, arrival.received_ns, arrival.started_s, may_explain)
        sink, trace = AsgiSink(scope, send, self._c.client_stall_s), Trace()
        telemetry = self._d.telemetry
        telemetry.started()
        try:
            await self._d.path.serve(call, sink, trace)
        except Exception:
            _log.exception("Request %s ended in a defect of the gateway.", call.request_id)
            if not sink.started:
                trace.status = await self._d.edge.fail(sink, call, _DEFECT, None)
        finally:
            telemetry.finished(call, trace)

    def _authorize(self, secret: bytes | None, use: Scope, model: str | None) -> Principal | Denied:
        digest = None if secret is None else digest_key(secret, self._c.pepper)
        clock = self._d.clock
        return authorize(
            self._d.keys.snapshot,
            Access(digest, use, model),
            clock.monotonic_s(),
            wall_s=clock.unix_ns() / 1e9,
            grace_s=self._c.key_grace_s,
        )

    async def _read_body(self, receive: Receive, length: int | None) -> bytes | None:
        """The whole body, or None when the client left. Raises BadRequest 413 past the limit, 408 past the deadline."""
        limit = self._c.max_body_bytes
        if length is not None and length > limit:
            raise _too_large(limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > limit:
                raise _too_large(limit)
            return body
        parts, size = [body], len(body)
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                while message.get("more_body", False):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise BadRequest(
                f"The request's body did not arrive within {_BODY_TIMEOUT_S:g} s.", code="request_timeout", status=408
            ) from None
        return b"".join(parts)

    async def _models(self, scope: Scope_, send: Send, request_id: str) -> None:
        secret, _, _, _ = _read_head(scope["headers"])
        principal = self._authorize(secret, Scope.INFERENCE, None)
        if isinstance(principal, Denied):
            self._d.telemetry.denied(principal.reason.value)
            await self._fail(send, request_id, openai_wire.denial_fault(principal))
            return
        names = self._d.models(principal)
        wanted = scope["path"].removeprefix("/v1/models").removeprefix("/")
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "inferplane"} for name in names]
        if not wanted:
            await _answer(send, request_id, 200, orjson.dumps({"object": "list", "data": cards}), ())
            return
        for card in cards:
            if card["id"] == wanted:
                await _answer(send, request_id, 200, orjson.dumps(card), ())
                return
        message = f"The model '{wanted}' does not exist or you do not have access to it."
        fault = Fault(404, message, "invalid_request_error", code="model_not_found", param="model")
        await self._fail(send, request_id, fault)

    async def _fail(self, send: Send, request_id: str, fault: Fault) -> None:
        body = openai_wire.error_body(fault.message, fault.type, fault.param, fault.code)
        extra = retry_headers(fault.retry_after_s, fault.should_retry)
        if fault.status in (408, 413):
            extra.append((b"connection", b"close"))  # the rest of the body would be read as the next request
        await _answer(send, request_id, fault.status, body, extra)


@dataclass(frozen=True, slots=True)
class _Arrival:
    operation: Operation
    request_id: str
    received_ns: int
    started_s: float


async def _answer(send: Send, request_id: str, status: int, body: bytes, extra: Sequence[Header]) -> None:
    headers = [_JSON, (b"x-request-id", request_id.encode()), (b"content-length", b"%d" % len(body)), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _read_head(headers: Sequence[Header]) -> tuple[bytes | None, int | None, bool, BadRequest | None]:
    """The presented secret, the declared length, whether a decision is asked for, and what is wrong with the head."""
    secret: bytes | None = None
    length: int | None = None
    explain = False
    problem: BadRequest | None = None
    for name, value in headers:
        if name == b"authorization":
            kind, _, rest = value.partition(b" ")
            secret = rest.strip() if kind.lower() == b"bearer" and rest else secret
        elif name == b"x-api-key" and secret is None:
            secret = value
        elif name == b"content-length" and value.isdigit():
            length = int(value)
        elif name == b"content-encoding" and value != b"identity":
            problem = BadRequest(
                f"content-encoding '{value.decode('latin-1')}' is not supported; send the body uncompressed.",
                code="unsupported_content_encoding",
                status=415,
            )
        elif name == _EXPLAIN:
            explain = value == b"explain"
    return secret, length, explain, problem


def _too_large(limit_bytes: int) -> BadRequest:
    return BadRequest(
        f"The request's body is larger than the limit of {limit_bytes} bytes.", code="request_too_large", status=413
    )


def _method_fault(method: str, allowed: str) -> Fault:
    return Fault(405, f"{method} is not allowed here; use {allowed}.", "invalid_request_error", "method_not_allowed")
