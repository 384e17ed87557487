"""Health, readiness and metrics: what an operator's machinery asks, without a key and without the framework.

Owns: `/healthz`, `/readyz`, `/metrics`. Does not own: what they report; each part tells its own state. `/metrics` is
the node's own metrics and, where it can be read, the cluster's last reconcile (`admin_reconcile`).
`/readyz` is 503 while this process must get no new traffic: draining, no keys, no room in the spool, or no engine.
A part that degrades without stopping the service (Redis gone, shipper behind) is shown and does not fail readiness.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from controlplane.adapters.admin_reconcile import ReconcileResult, exposition
from controlplane.adapters.openai_wire import error_body
from controlplane.errors import StoreUnavailable

Send = Callable[[Any], Awaitable[None]]

_PATHS = ("/healthz", "/readyz", "/metrics")


@dataclass(frozen=True, slots=True)
class Readiness:
    """What this process can do now. `blockers` are sentences; empty means ready."""

    blockers: tuple[str, ...]
    parts: dict[str, Any]


class Reconciles(Protocol):
    """Where the last reconcile is read."""

    async def last(self) -> ReconcileResult | None:
        """The last result, or None. Raises StoreUnavailable."""
        ...


class OpsRoutes:
    """The operator's endpoints."""

    def __init__(
        self, readiness: Callable[[], Readiness], metrics: Callable[[], bytes], reconciles: Reconciles | None = None
    ) -> None:
        self._readiness = readiness
        self._metrics = metrics
        self._reconciles = reconciles

    def serves(self, path: str) -> bool:
        """Whether the path is one of these."""
        return path in _PATHS

    async def __call__(self, scope: dict[str, Any], send: Send) -> None:
        """Answer one request."""
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(
                send,
                405,
                b"application/json",
                error_body("Use GET.", "invalid_request_error", code="method_not_allowed"),
            )
        elif path == "/healthz":
            await _answer(send, 200, b"application/json", b'{"alive":true}')
        elif path == "/readyz":
            now = self._readiness()
            body = orjson.dumps({"ready": not now.blockers, "blockers": now.blockers, **now.parts})
            await _answer(send, 503 if now.blockers else 200, b"application/json", body)
        else:
            body, last = await asyncio.gather(asyncio.to_thread(self._metrics), self._last_reconcile())
            await _answer(
                send, 200, b"text/plain; version=0.0.4; charset=utf-8", body + exposition(last, time.time_ns())
            )

    async def _last_reconcile(self) -> ReconcileResult | None:
        """None while the store does not answer: `inferplane_store_answering` says that."""
        if self._reconciles is None:
            return None
        try:
            return await self._reconciles.last()
        except StoreUnavailable:
            return None


async def _answer(send: Send, status: int, kind: bytes, body: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
