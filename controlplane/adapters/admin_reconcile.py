"""The worker's last periodic reconcile, where gateways read it: the value, its place in Redis, its metrics.

Owns: `ReconcileResult`, the key that it lies under, reading it (`RedisReconciles`), and the Prometheus gauges that are
made of it at each scrape. Does not own: the comparison (`billing.adapters.reconcile_sql`), when it runs (`tasks`), or
the routes (`admin_reports`, `ops_http`). It imports no Celery, because gateways import it.

The books are the cluster's, not a node's: every gateway shows the same result, read from Redis when it is asked for.
No result is no gauge: that the books were never compared must not look like books that are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import orjson
import redis.asyncio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from controlplane.errors import StoreUnavailable

# Where the newest result lies.
RESULT_KEY = "inferplane:reconcile:last"
# Deadline of reading it: a scrape must not wait for a store that is gone.
_CALL_TIMEOUT_S = 1.0
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """What the last periodic reconcile found. Times are Unix ns."""

    finished_ns: int
    duration_s: float
    exact: bool
    event_count: int
    difference_count: int
    differences: tuple[dict[str, Any], ...]
    """The first ones: kind, name (an id), amount_pico as text or None."""
    quarantined_count: int | None = None
    """Rows of the quarantine, which are on no bill. None: the worker is of a version that did not tell."""

    def age_s(self, now_ns: int) -> float:
        """Seconds since it ended; 0 where this machine's clock is behind the worker's."""
        return max(0, now_ns - self.finished_ns) / _NS_PER_S


# The fields that this version knows: a newer worker may write more.
_KNOWN = frozenset(one.name for one in fields(ReconcileResult))


def result_of(stored: bytes) -> ReconcileResult:
    """The result as it lies in Redis."""
    told: Mapping[str, Any] = orjson.loads(stored)
    values = {name: value for name, value in told.items() if name in _KNOWN}
    return ReconcileResult(**{**values, "differences": tuple(values["differences"])})


class RedisReconciles:
    """Reads the result. Holds nothing: the client is its caller's."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client

    async def last(self) -> ReconcileResult | None:
        """The last result; None: no worker has compared the books yet. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                stored = await self._redis.get(RESULT_KEY)
        except (RedisError, OSError, TimeoutError):
            raise StoreUnavailable("The store of the reconcile result does not answer; try again.") from None
        return result_of(stored) if isinstance(stored, bytes) else None


def families(result: ReconcileResult, now_ns: int) -> Iterator[GaugeMetricFamily]:
    """The gauges of a result. They are made at each scrape, so the age is that of the scrape."""
    values = {
        "inferplane_reconcile_exact": (int(result.exact), "1 when the last reconcile found no difference."),
        "inferplane_reconcile_age_seconds": (result.age_s(now_ns), "Since the last reconcile ended."),
        "inferplane_reconcile_differences": (result.difference_count, "What it found."),
        "inferplane_quarantined_records": (result.quarantined_count, "Records on no bill, at the last reconcile."),
    }
    for name, (value, text) in values.items():
        if value is not None:
            yield GaugeMetricFamily(name, text, value)


class _Once(Collector):
    """The gauges of one scrape."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        """What was made."""
        return self._found


def exposition(result: ReconcileResult | None, now_ns: int) -> bytes:
    """The gauges in Prometheus text format; nothing without a result."""
    if result is None:
        return b""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(list(families(result, now_ns))))
    return generate_latest(registry)
