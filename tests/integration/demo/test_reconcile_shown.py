"""The last reconcile as gateways show it: read from a real Redis, as gauges at `/metrics`.

Owns: reading and the Prometheus text. Does not own: the admin route (tests/integration/tenancy/test_admin_http.py) or
what puts the result there (test_worker.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import orjson
import pytest
import redis.asyncio
from prometheus_client.parser import text_string_to_metric_families

from controlplane.adapters.admin_reconcile import RESULT_KEY, ReconcileResult, RedisReconciles
from controlplane.adapters.ops_http import OpsRoutes, Readiness
from controlplane.errors import StoreUnavailable

RESULT = ReconcileResult(1_794_268_800_000_000_000, 2.5, True, 9, 0, (), 4)
OWN = b"# TYPE own counter\nown_total 1.0\n"


@pytest.fixture
async def client(any_redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    made = redis.asyncio.Redis.from_url(any_redis_url)
    yield made
    await made.aclose()


async def scrape(reconciles: RedisReconciles | None) -> dict[str, float]:
    """The gauges and counters of `/metrics`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    ops = OpsRoutes(lambda: Readiness((), {}), lambda: OWN, reconciles)
    await ops({"method": "GET", "path": "/metrics"}, send)
    assert sent[0]["status"] == 200
    text = sent[1]["body"].decode()
    return {one.name: one.value for found in text_string_to_metric_families(text) for one in found.samples}


async def test_without_a_result_there_are_no_gauges(client: redis.asyncio.Redis) -> None:
    assert await RedisReconciles(client).last() is None
    assert await scrape(RedisReconciles(client)) == await scrape(None) == {"own_total": 1.0}


async def test_the_result_is_shown_with_its_age(client: redis.asyncio.Redis) -> None:
    result = replace(RESULT, finished_ns=time.time_ns() - 60 * 10**9)
    await client.set(RESULT_KEY, orjson.dumps(asdict(result)))
    assert await RedisReconciles(client).last() == result
    shown = await scrape(RedisReconciles(client))
    assert 60 <= shown.pop("inferplane_reconcile_age_seconds") < 120
    assert shown == {
        "own_total": 1.0,
        "inferplane_reconcile_exact": 1.0,
        "inferplane_reconcile_differences": 0.0,
        "inferplane_quarantined_records": 4.0,
    }


async def test_a_result_of_another_version_is_read(client: redis.asyncio.Redis) -> None:
    older = {name: value for name, value in asdict(RESULT).items() if name != "quarantined_count"}
    await client.set(RESULT_KEY, orjson.dumps({**older, "exact": False, "something_newer": 1}))
    shown = await scrape(RedisReconciles(client))
    assert shown["inferplane_reconcile_exact"] == 0.0
    assert "inferplane_quarantined_records" not in shown


async def test_a_store_that_is_gone_is_told_and_fails_no_scrape(tmp_path: Any) -> None:
    gone = redis.asyncio.Redis.from_url(f"unix://{tmp_path}/gone.sock?password=hunter2")
    with pytest.raises(StoreUnavailable) as raised:
        await RedisReconciles(gone).last()
    assert "hunter2" not in str(raised.value)
    assert await scrape(RedisReconciles(gone)) == {"own_total": 1.0}
    await gone.aclose()
