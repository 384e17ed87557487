"""Everything that goes wrong with a request, as the answer that its caller gets and as what it says about the engine.

Owns: the faults of the request path, and the reading of an engine's failure (an exception, a status, an error inside
its stream) as one of them. Does not own: when a fault arises (`serve`), or its form on the wire (`openai_http`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson

from billing.usage_event import Outcome
from controlplane.errors import EngineError, EngineTimeout, EngineUnreachable
from controlplane.ports import Fault, Header, NoTarget, NoTargetReason
from router.endpoints import Ending

# SDKs give up on waits above two minutes (reference gateway 2.1); an hour is as good as for ever.
_MAX_WAIT_S = 3_600.0
_MAX_WAIT_DIGITS = 9

# HTTP: what an engine may answer with when it serves, when it refuses, and when it fails (RFC 9110 15).
SUCCESSES = range(200, 300)
_CLIENT_ERRORS = range(400, 500)
_SERVER_ERRORS = range(500, 600)
# An engine that refuses our credentials is misconfigured: that is no fault of the caller, who must not hear of it.
_CREDENTIALS = frozenset({401, 403, 407})
# Back-pressure, not death (reference router R21): 429 and 503.
_BUSY = frozenset({429, 503})
# The status that access logs use for a client that left (nginx's convention; never sent).
CLIENT_CLOSED_STATUS = 499

# Before the dispatch: nothing may run unmetered (DESIGN 4.3).
SPOOL_FULL = Fault(
    503, "Usage cannot be recorded now, so the request was not served.", "server_error", code="usage_spool_full",
    retry_after_s=1.0,
)  # fmt: skip
# Neither `[DONE]` nor a finish reason for every choice (reference gateway 2.4).
TRUNCATED = Fault(
    502, "The engine's stream ended before the answer was complete.", "server_error", code="upstream_stream_truncated",
    elsewhere=True, ending=Ending.FAILED, outcome=Outcome.TRUNCATED,
)  # fmt: skip
# It said so itself, or answered with what no engine should.
ENGINE_FAILED = Fault(502, "The engine failed.", "server_error", code="engine_error", elsewhere=True)
# This process ends; the engine is none the worse for it.
DRAINED = Fault(
    503, "The gateway is shutting down and the drain deadline has passed.", "server_error", code="gateway_draining",
    retry_after_s=1.0, ending=Ending.CANCELLED, outcome=Outcome.CANCELLED,
)  # fmt: skip
# Never said to anybody: it is what the event and the router get.
CLIENT_GONE = Fault(CLIENT_CLOSED_STATUS, "", "", ending=Ending.CANCELLED, outcome=Outcome.CANCELLED)
# Our own fault.
DEFECT = Fault(
    500, "The gateway failed to serve this request.", "server_error", code="internal_error", ending=Ending.CANCELLED
)
# The reason of a request whose client left, in metrics and the access log.
GONE_REASON = "client_closed"


def engine_fault(error: EngineError, *, begun: bool = False) -> Fault:
    """An engine's failure as the answer that the client gets if no other engine takes over.

    `begun`: the answer had begun, so that a passed total deadline says nothing about the engine.
    """
    if isinstance(error, EngineTimeout):
        unreachable = error.deadline == "connect"
        late = Ending.CANCELLED if begun and error.deadline == "total" else Ending.FAILED
        return Fault(
            504, str(error), "server_error", code="engine_timeout", elsewhere=unreachable,
            ending=Ending.UNREACHABLE if unreachable else late,
        )  # fmt: skip
    code = "engine_unreachable" if isinstance(error, EngineUnreachable) else "engine_lost"
    return Fault(
        502, "The engine could not be reached or was lost.", "server_error", code,
        elsewhere=True, ending=Ending.UNREACHABLE,
    )  # fmt: skip


def engine_answer_fault(status: int, headers: Sequence[Header], body: bytes) -> Fault:
    """An engine's answer that is no success. It keeps its status and message (DESIGN 4.1), unless it is about us."""
    if status in _BUSY:
        return Fault(
            status, "The engine is busy.", "server_error", code="engine_overloaded",
            retry_after_s=retry_after_s(headers) or 1.0, engine_body=body, elsewhere=True, ending=Ending.BUSY,
        )  # fmt: skip
    if status in _SERVER_ERRORS:
        return replace(ENGINE_FAILED, status=status, engine_body=body)
    if status in _CLIENT_ERRORS and status not in _CREDENTIALS:
        return _rejected(status, body)
    return replace(ENGINE_FAILED, message="The engine does not accept requests of this gateway.")


def _rejected(status: int, body: bytes) -> Fault:
    return Fault(
        status, "The engine refused the request.", "invalid_request_error", engine_body=body,
        ending=Ending.REFUSED, outcome=Outcome.REJECTED_BY_ENGINE,
    )  # fmt: skip


def failed_early(events: bytes) -> Fault:
    """A stream whose first word is an error: nothing was sent, so it is answered as an error of its own status."""
    for line in events.splitlines():
        if not line.startswith(b"data:") or b'"error"' not in line:
            continue
        body = line[5:].strip()
        try:
            code = orjson.loads(body)["error"]["code"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            code = None
        if type(code) is int and code in _CLIENT_ERRORS and code not in _CREDENTIALS:
            return _rejected(code, body)
        return replace(ENGINE_FAILED, engine_body=body)
    return ENGINE_FAILED


def retry_after_s(headers: Sequence[Header]) -> float | None:
    """Seconds of an engine's `retry-after` (delta form), None when absent or a date."""
    for name, value in headers:
        if name == b"retry-after" and value.isdigit():
            return min(float(value[:_MAX_WAIT_DIGITS]), _MAX_WAIT_S)
    return None


def no_such_model(model: str) -> Fault:
    """Neither an alias nor an engine has it."""
    return Fault(
        404, f"The model '{model}' does not exist or you do not have access to it.", "invalid_request_error",
        code="model_not_found", param="model",
    )  # fmt: skip


def unroutable(model: str, none: NoTarget) -> Fault:
    """No engine can be picked for it now."""
    if none.reason is NoTargetReason.NO_SUCH_MODEL:
        return no_such_model(model)
    return Fault(
        503, f"No engine can take a request for '{model}' now.", "server_error", code="no_engine_available",
        retry_after_s=none.retry_after_s or 1.0,
    )  # fmt: skip
