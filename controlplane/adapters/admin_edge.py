"""The edge of the admin API: request ids, bounded bodies, errors in OpenAI's form, and threads for blocking calls.

Owns: how a fault or a denial becomes an answer, and how long an admin call may take. Does not own: routes
(`admin_http`, `admin_routes`) or the decision who may call (`tenancy.authorize`). The framework's own error bodies
(`{"detail": ...}`) never reach a client, not for unknown routes, wrong methods or invalid bodies either.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
import uuid_utils
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from controlplane.errors import BadRequest, ConfigError, StoreUnavailable
from controlplane.tenancy import DenialReason, Denied

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
T = TypeVar("T")

# The largest sensible admin body, an allow-list of 200 model names, has 40 kB; price books are larger.
_MAX_BODY_BYTES = 1024 * 1024
# A client that trickles its body holds no connection longer.
_BODY_TIMEOUT_S = 10.0
# Admin calls at work and in line: beyond that the database is the bottleneck and waiting would only hide it.
_THREADS, _IN_FLIGHT_COUNT = 4, 64
# Longer than the database's own lock timeout (10 s), so that its clearer answer usually comes first.
CALL_TIMEOUT_S = 15.0
# Reports read roll-ups; the engine of the database stops a statement at 30 s.
REPORT_TIMEOUT_S = 30.0
# What a client should wait when a store does not answer: two reads of the feed.
_STORE_RETRY_S = 1.0

_log = logging.getLogger("inferplane.admin")

# type and code by status (reference gateway 2.1); everything else is an invalid request without a code.
_KINDS: Mapping[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    409: ("conflict_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "store_unavailable"),
}


class DeniedCall(Exception):
    """A caller that may not: raised by a dependency, turned into an answer here."""

    def __init__(self, denied: Denied) -> None:
        super().__init__(denied.reason.value)
        self.denied = denied


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    """An OpenAI error object; `retry-after` where waiting helps."""
    kind, usual_code = _KINDS.get(status, ("invalid_request_error", None))
    body = {"error": {"message": message, "type": kind, "param": param, "code": code or usual_code}}
    headers = {}
    if status == 503:
        headers = {
            "retry-after": str(math.ceil(_STORE_RETRY_S)),
            "retry-after-ms": str(math.ceil(_STORE_RETRY_S * 1_000)),
        }
    elif status < 500:
        headers = {"x-should-retry": "false"}
    return Response(orjson.dumps(body), status, headers, "application/json")


def denial_response(denied: Denied) -> Response:
    """401, 403 or 503 for a denied caller. Never the key, its digest, or which of the two did not fit."""
    match denied.reason:
        case DenialReason.NO_KEY:
            return error_response(401, "No API key was given; send `Authorization: Bearer KEY`.")
        case DenialReason.UNKNOWN_KEY:
            return error_response(401, "The API key is not valid.")
        case DenialReason.EXPIRED_KEY:
            return error_response(401, "The API key has expired.")
        case DenialReason.MISSING_SCOPE | DenialReason.MODEL_NOT_ALLOWED:
            return error_response(403, f"This API key may not do that; it needs the scope {denied.detail!r}.")
        case DenialReason.SNAPSHOT_STALE:
            return error_response(503, "Keys cannot be checked at the moment; try again.")


def install_errors(app: FastAPI) -> None:
    """Make every error of `app` an OpenAI error object."""
    app.add_exception_handler(DeniedCall, _on_denied)
    app.add_exception_handler(BadRequest, _on_bad_request)
    app.add_exception_handler(StoreUnavailable, _on_store)
    app.add_exception_handler(ConfigError, _on_config)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_denied(_request: Request, fault: Exception) -> Response:
    assert isinstance(fault, DeniedCall)
    return denial_response(fault.denied)


async def _on_bad_request(_request: Request, fault: Exception) -> Response:
    assert isinstance(fault, BadRequest)
    return error_response(fault.status, fault.message, fault.param, fault.code)


async def _on_store(_request: Request, fault: Exception) -> Response:
    return error_response(503, str(fault))


async def _on_config(_request: Request, fault: Exception) -> Response:
    # The sentence is for the operator of the node and holds no secret, but a caller cannot act on it.
    _log.error("%s", fault)
    return error_response(500, "This node is not set up as its cluster is; its log says how.", code="misconfigured")


async def _on_invalid(_request: Request, fault: Exception) -> Response:
    """One sentence for the first field that does not fit. The value is not repeated: it may be a secret."""
    assert isinstance(fault, RequestValidationError)
    first = fault.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    param = ".".join(place) or None
    if first["type"] == "json_invalid":
        return error_response(400, "The body is not valid JSON.")
    if param is None:
        return error_response(400, "The body is not a JSON object; send one with `content-type: application/json`.")
    return error_response(400, f"{param}: {first['msg']}.", param)


async def _on_http(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    if fault.status_code == 404:
        return error_response(404, f"No route {request.method} {request.url.path}.", code="unknown_url")
    if fault.status_code == 405:
        answer = error_response(405, f"{request.method} is not allowed for {request.url.path}.")
        answer.headers["allow"] = ", ".join(_methods_at(request))
        return answer
    if fault.status_code == 400:  # the framework's answer to a body that its parser cannot follow
        return error_response(400, "The body is not valid JSON.")
    return error_response(fault.status_code, f"{fault.detail}.")


def _methods_at(request: Request) -> list[str]:
    """What the path may be asked with. The framework names only the methods of the first route it finds."""
    paths = request.app.openapi()["paths"]
    here = [paths[path] for path in paths if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), request.url.path)]
    return sorted({method.upper() for methods in here for method in methods})


class AdminEdge:
    """Around the whole API: gives each answer an `x-request-id`, reads the body within bounds, logs faults once."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid_utils.uuid7().hex}"

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                # no-store: an answer may hold a new key.
                extra = [(b"x-request-id", request_id.encode()), (b"cache-control", b"no-store")]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        try:
            body = await _read_body(scope, receive)
        except BadRequest as fault:
            answer = error_response(fault.status, fault.message, fault.param, fault.code)
            answer.headers["connection"] = "close"  # the rest of the body would be read as the next request
            await answer(scope, receive, send_with_id)
            return
        if body is None:
            return
        try:
            await self._app(scope, _replay(body, receive), send_with_id)
        except Exception as fault:
            # The traceback of our code is logged, never the request's content.
            _log.error("Request %s failed (%s).", request_id, type(fault).__name__, exc_info=fault)
            if not started:
                sorry = "The request failed because of a fault of ours; its id is in `x-request-id`."
                await error_response(500, sorry)(scope, receive, send_with_id)


async def _read_body(scope: MutableMapping[str, Any], receive: Receive) -> bytes | None:
    """The whole body, or None when the client left. BadRequest 413 past the bound, 408 past the deadline."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > _MAX_BODY_BYTES:
            raise _too_large()
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > _MAX_BODY_BYTES:
                    raise _too_large()
                more = message.get("more_body", False)
    except TimeoutError:
        raise BadRequest(
            f"The request's body did not arrive within {_BODY_TIMEOUT_S:g} s.", code="request_timeout", status=408
        ) from None
    return b"".join(parts)


def _too_large() -> BadRequest:
    return BadRequest(f"The body is larger than {_MAX_BODY_BYTES} bytes.", status=413)


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


class SqlThreads:
    """Runs blocking database calls beside the event loop: few at a time, a bounded line, and a deadline for each."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="admin-sql")
        self._in_flight_count = 0

    async def run(self, work: Callable[[], T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """The result of `work`. StoreUnavailable when the line is full or the deadline passes."""
        if self._in_flight_count >= _IN_FLIGHT_COUNT:
            raise StoreUnavailable("Too many admin calls are waiting for the database; try again.")
        self._in_flight_count += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._landed)
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        if not done:
            raise StoreUnavailable(
                f"The database did not answer within {timeout_s:g} s. A change may or may not have been made; "
                "repeating it with the same Idempotency-Key is safe."
            )
        return future.result()

    def _landed(self, future: asyncio.Future[Any]) -> None:
        self._in_flight_count -= 1
        if not future.cancelled():
            future.exception()  # looked at, so that a late fault is not reported as forgotten

    def close(self) -> None:
        """Take no more calls; those at work end by the database's own deadlines."""
        self._pool.shutdown(wait=False, cancel_futures=True)
