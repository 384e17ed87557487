"""The OpenAI data plane as plain ASGI: no framework between the socket and `serve`.

Owns: authentication of a request, reading its body within bounds, the request id, the client's side of the connection
(`AsgiSink`), and rendering what `serve` decided as OpenAI answers (`OpenAiEdge`). Does not own: the shape of bodies
(`openai_wire`), or any decision (`serve`). The FastAPI app serves everything that is not in `OpenAiRoutes.paths`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from controlplane.adapters import openai_wire
from controlplane.adapters.gateway_server import CONNECTION, GatewayProtocol
from controlplane.adapters.key_secret import digest_key
from controlplane.adapters.telemetry import Telemetry
from controlplane.admission import limit_headers, refusal_facts, retry_headers
from controlplane.errors import BadRequest
from controlplane.faults import DEFECT, DRAINED, no_such_model
from controlplane.ports import Answer, Call, Clock, Fault, Header, Sink, Trace
from controlplane.rate_limit import LimitView
from controlplane.request import Operation
from controlplane.serve import Path
from controlplane.tenancy import Access, Denied, Principal, Scope, Snapshot, authorize, permit

Scope_ = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

# Response headers of an engine that may reach the client; everything else of an engine's head stays inside.
_RELAYED = frozenset({b"content-type"})
# Under this path everything is OpenAI's, except what the admin API has there.
_V1, _ADMIN_V1 = "/v1/", "/v1/organization/"
# Bodies of the largest size that a process holds while it reads them; a slow sender must not fill its memory.
_BODIES_AT_ONCE = 8
# As much of a path as an error repeats.
_MAX_SHOWN_CHARS = 200
# A body that is there this soon after its head is not a reason to look at the key again.
_SAME_MOMENT_S = 0.05
_log = logging.getLogger(__name__)
_JSON = (b"content-type", b"application/json")
_EXPLAIN = b"x-inferplane-decision"


class AsgiSink:
    """The client's side of one request. Mutable: knows whether the client is still there and what it has taken.

    `until_s` is the request's total deadline (monotonic): a client that does not read holds it no longer.
    """

    __slots__ = (
        "_conn", "_head", "_send", "_stall_s", "_task", "_until_s", "finished", "gone", "open_ended",
        "started",
    )  # fmt: skip

    def __init__(self, scope: Scope_, send: Send, stall_s: float, until_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self._until_s = until_s
        self._head = b""
        self.gone = self.started = self.finished = self.open_ended = False
        self._task: asyncio.Task[None] | None = None
        conn: GatewayProtocol | None = (scope.get("extensions") or {}).get(CONNECTION)
        self._conn = conn
        if conn is not None:
            self._task = conn.task
            conn.on_lost = self._lost
            if conn.lost:  # between the body's last byte and now
                self._lost()

    def _lost(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel("client gone")

    @property
    def drained(self) -> bool:
        """The client's socket has taken every byte written so far (always true without a real connection)."""
        return self._conn is None or self._conn.drained

    @property
    def written_bytes(self) -> int:
        """Everything that was handed to the client's socket so far, with what frames it."""
        return 0 if self._conn is None else self._conn.written_bytes

    @property
    def taken_bytes(self) -> int:
        """How much of that the socket has taken; once it is lost: had taken by then."""
        return 0 if self._conn is None else self._conn.taken_bytes

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        """Send the head: it goes out in one write with the first bytes of the body."""
        self.started = True
        self.open_ended = b"content-length" not in [name for name, _ in headers]
        if self._conn is not None:
            self._head = self._conn.head(status, headers, sized=not self.open_ended)
            return
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    @property
    def has_room(self) -> bool:
        """A piece can be sent without waiting for the client."""
        return self._conn is None or not (self._conn.flow.write_paused or self.gone)

    def queue(self, data: bytes, took: Callable[[bool], None]) -> bool:
        """Send a piece when the event loop turns, and tell `took` then; False: it would have to wait."""
        conn = self._conn
        if conn is None or conn.flow.write_paused or self.gone:
            return False
        conn.queue(self._head, data, took)
        self._head = b""
        return True

    def push(self) -> None:
        """Send what is queued now."""
        if self._conn is not None:
            self._conn.push()

    async def write(self, data: bytes) -> None:
        """Send a piece; waits while the client's socket is full, and gives up on a client that does not read."""
        conn = self._conn
        if conn is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            return
        if conn.flow.write_paused:
            await self._wait_for_room(conn)
        if not self.gone:
            head, self._head = self._head, b""
            conn.piece(head, data)

    async def finish(self, data: bytes) -> None:
        """Send the last piece."""
        conn = self._conn
        if conn is not None and conn.flow.write_paused:
            await self._wait_for_room(conn)
        self.finished = True
        if conn is None:
            await self._send({"type": "http.response.body", "body": data})
            return
        head, self._head = self._head, b""
        conn.last(head, data)

    def abort(self) -> None:
        """Cut the answer off: the client sees that it is not whole."""
        self.finished = True
        if self._conn is not None:
            self._conn.transport.abort()

    async def _wait_for_room(self, conn: GatewayProtocol) -> None:
        left_s = self._until_s - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0.0, min(self._stall_s, left_s))):
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
        headers += limit_headers(view)
        if trace.decision:
            headers.append((_EXPLAIN, trace.decision.encode("ascii", "replace")))
        return headers

    async def fail(self, sink: Sink, call: Call, fault: Fault, view: LimitView | None) -> int:
        """Answer with an error object; returns the status sent."""
        if fault.refused is not None:
            facts = refusal_facts(fault.refused)
            status, body = facts.status, openai_wire.error_body(facts.message, facts.type, None, facts.code)
            retry = retry_headers(facts.retry_after_s, facts.should_retry)
        else:
            status, body = fault.status, _fault_body(fault)
            retry = retry_headers(fault.retry_after_s, fault.should_retry)
        headers = [_JSON, (b"x-request-id", call.request_id.encode()), (b"content-length", b"%d" % len(body))]
        if view is not None:
            headers += limit_headers(view)
        headers += retry
        await sink.start(status, headers)
        await sink.finish(body)
        return status

    def stream_fault(self, fault: Fault) -> bytes:
        """An error said inside a stream that has begun, and its end."""
        return openai_wire.stream_error(fault.message, fault.type, fault.param, fault.code)


def _fault_body(fault: Fault) -> bytes:
    if fault.engine_body is not None:
        return openai_wire.engine_error_body(
            fault.engine_body, openai_wire.EngineErrorDefault(fault.message, fault.type, fault.param, fault.code)
        )
    return openai_wire.error_body(fault.message, fault.type, fault.param, fault.code)


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
    """How long a client may not read while there is something for it."""
    total_s: float
    """How long a request may take altogether."""


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
    """`/v1/chat/completions`, `/v1/completions`, `/v1/models`, and 404 for the rest of /v1."""

    def __init__(self, deps: RoutesDeps, config: RoutesConfig) -> None:
        self._d = deps
        self._c = config
        self._reading_bytes = 0
        self._operations = {"/v1/chat/completions": Operation.CHAT, "/v1/completions": Operation.COMPLETION}

    def serves(self, path: str) -> bool:
        """Whether this data plane answers the path: all of /v1 but the reports, which the admin API has."""
        return path in self._operations or (path.startswith(_V1) and not path.startswith(_ADMIN_V1))

    async def __call__(self, scope: Scope_, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        clock = self._d.clock
        arrival = _Arrival("req_" + clock.event_id(), clock.unix_ns(), clock.monotonic_s(), scope, send)
        try:
            await self._route(arrival, receive)
        except asyncio.CancelledError:  # while it was read: its client is gone, or the drain deadline has passed
            if not arrival.sink_made:
                await self._fail(arrival, DRAINED)
        except Exception:
            _log.exception("Request %s ended in a defect of the gateway.", arrival.request_id)
            if not arrival.sink_made:
                await self._fail(arrival, DEFECT)

    async def _route(self, arrival: _Arrival, receive: Receive) -> None:
        path, method = arrival.scope["path"], arrival.scope["method"]
        operation = self._operations.get(path)
        if operation is not None:
            if method == "POST":
                await self._infer(arrival, operation, receive)
            else:
                await self._fail(arrival, _method_fault(method, "POST"), ((b"allow", b"POST"),))
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            if method in ("GET", "HEAD"):
                await self._models(arrival)
            else:
                await self._fail(arrival, _method_fault(method, "GET"), ((b"allow", b"GET, HEAD"),))
        else:
            await self._fail(arrival, _unknown_url(method, path))

    async def _infer(self, arrival: _Arrival, operation: Operation, receive: Receive) -> None:
        scope = arrival.scope
        secret, length, explain, problem = _read_head(scope["headers"])
        digest = None if secret is None else digest_key(secret, self._c.pepper)
        principal = self._authorize(Access(digest, Scope.INFERENCE))
        if isinstance(principal, Denied):
            await self._deny(arrival, principal)
            return
        try:
            if problem is not None:
                raise problem
            conn: GatewayProtocol | None = (scope.get("extensions") or {}).get(CONNECTION)
            body = conn.whole_body(self._c.max_body_bytes) if conn is not None else None
            if body is None:
                body = await self._read_body(receive, length)
            if body is None:
                return  # the client left before its request was complete: nothing was asked of us
            request = openai_wire.parse(operation, body)
        except BadRequest as error:
            await self._fail(arrival, openai_wire.bad_request_fault(error))
            return
        if self._d.clock.monotonic_s() - arrival.started_s < _SAME_MOMENT_S:
            allowed = permit(principal, request.model_asked)
        else:  # the body took its time: the key may have ended meanwhile
            allowed = self._authorize(Access(digest, Scope.INFERENCE, request.model_asked))
        if isinstance(allowed, Denied):
            await self._deny(arrival, allowed)
            return
        may_explain = explain and (Scope.EXPLAIN in allowed.scopes or Scope.ADMIN in allowed.scopes)
        call = Call(request, allowed, arrival.request_id, arrival.received_ns, arrival.started_s, may_explain)
        sink, trace = AsgiSink(scope, arrival.send, self._c.client_stall_s, call.started_s + self._c.total_s), Trace()
        arrival.sink_made = True
        telemetry = self._d.telemetry
        telemetry.started()
        try:
            await self._d.path.serve(call, sink, trace)
        except Exception:
            _log.exception("Request %s ended in a defect of the gateway.", call.request_id)
        finally:
            telemetry.finished(call, trace)

    def _authorize(self, access: Access) -> Principal | Denied:
        clock, grace_s = self._d.clock, self._c.key_grace_s
        wall_s = clock.unix_ns() / 1e9
        return authorize(self._d.keys.snapshot, access, clock.monotonic_s(), wall_s=wall_s, grace_s=grace_s)

    async def _read_body(self, receive: Receive, length: int | None) -> bytes | None:
        """The whole body, or None when the client left. Raises BadRequest 413 past the limit.

        How long it may take is the connection's to bound (`gateway_server`).
        """
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
            while message.get("more_body", False):
                if size > limit:
                    raise _too_large(limit)
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._reading_bytes += len(parts[-1])
                if self._reading_bytes > _BODIES_AT_ONCE * limit:
                    raise _too_many_bodies()
        finally:
            self._reading_bytes -= size - len(body)
        if size > limit:
            raise _too_large(limit)
        return b"".join(parts)

    async def _models(self, arrival: _Arrival) -> None:
        secret, _, _, _ = _read_head(arrival.scope["headers"])
        digest = None if secret is None else digest_key(secret, self._c.pepper)
        principal = self._authorize(Access(digest, Scope.INFERENCE))
        if isinstance(principal, Denied):
            await self._deny(arrival, principal)
            return
        names = self._d.models(principal)
        wanted = arrival.scope["path"].removeprefix("/v1/models").removeprefix("/")
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "inferplane"} for name in names]
        if not wanted:
            await _answer(arrival, 200, orjson.dumps({"object": "list", "data": cards}), ())
            return
        for card in cards:
            if card["id"] == wanted:
                await _answer(arrival, 200, orjson.dumps(card), ())
                return
        await self._fail(arrival, no_such_model(wanted))

    async def _deny(self, arrival: _Arrival, denied: Denied) -> None:
        self._d.telemetry.denied(denied.reason.value)
        await self._fail(arrival, openai_wire.denial_fault(denied))

    async def _fail(self, arrival: _Arrival, fault: Fault, more: Sequence[Header] = ()) -> None:
        body = openai_wire.error_body(fault.message, fault.type, fault.param, fault.code)
        extra = [*more, *retry_headers(fault.retry_after_s, fault.should_retry)]
        conn: GatewayProtocol | None = (arrival.scope.get("extensions") or {}).get(CONNECTION)
        if conn is not None and conn.expects_continue:
            extra.append((b"connection", b"close"))  # whether its body follows, nobody can know
        await _answer(arrival, fault.status, body, extra)


@dataclass(slots=True)
class _Arrival:
    """Mutable: a request whose head has come, and whether `serve` has taken over its answer."""

    request_id: str
    received_ns: int
    started_s: float
    scope: Scope_
    send: Send
    sink_made: bool = False


async def _answer(arrival: _Arrival, status: int, body: bytes, extra: Sequence[Header]) -> None:
    headers = [_JSON, (b"x-request-id", arrival.request_id.encode()), (b"content-length", b"%d" % len(body)), *extra]
    await arrival.send({"type": "http.response.start", "status": status, "headers": headers})
    await arrival.send({"type": "http.response.body", "body": body})


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


def _too_many_bodies() -> BadRequest:
    return BadRequest(
        "The gateway is reading as many large request bodies as it can hold.", code="gateway_overloaded", status=503
    )


def _too_large(limit_bytes: int) -> BadRequest:
    return BadRequest(
        f"The request's body is larger than the limit of {limit_bytes} bytes.", code="request_too_large", status=413
    )


def _unknown_url(method: str, path: str) -> Fault:
    shown = path if len(path) <= _MAX_SHOWN_CHARS else path[:_MAX_SHOWN_CHARS] + "..."
    return Fault(404, f"Unknown request URL: {method} {shown}.", "invalid_request_error", code="unknown_url")


def _method_fault(method: str, allowed: str) -> Fault:
    return Fault(405, f"{method} is not allowed here; use {allowed}.", "invalid_request_error", "method_not_allowed")
