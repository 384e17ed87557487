"""What 100,000 keys cost a node: loading, one change, a change of their org, and the event loop meanwhile.

Run: `python -m tests.bench.bench_key_feed [--keys 100000] [--url URL]`. Without a URL an SQLite file is made. Prints
seconds, and the longest time that a 1 ms timer of the event loop came late while each thing happened in the background.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import sqlalchemy as sa

from billing.adapters import sql
from controlplane.adapters.key_feed import FeedOptions, KeyFeed
from controlplane.adapters.key_secret import digest_key, mint_secret
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_tables import API_KEY
from controlplane.adapters.tenancy_tx import new_id

PEPPER = b"p" * 32


def fill(store: KeyStore, count: int) -> None:
    """Put `count` keys of one project straight into the table."""
    org = store.create_org("acme").record
    project = store.create_project("acme", "web").record
    with store.db.writing() as tx:
        rows = []
        for _ in range(count):
            key_id, secret = new_id("key"), mint_secret()
            rows.append(
                {
                    "id": key_id,
                    "org_id": org.org_id,
                    "project_id": project.project_id,
                    "lineage_id": key_id,
                    "name": "",
                    "prefix": secret.prefix,
                    "digest": digest_key(secret.text.encode(), PEPPER),
                    "scopes": "inference",
                    "created_at_s": tx.now_s,
                    "changed_epoch": tx.epoch,
                }
            )
        tx.connection.execute(sa.insert(API_KEY), rows)


class Lateness:
    """How late a 1 ms timer comes. Mutable: the worst so far."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            started_s = time.perf_counter()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, time.perf_counter() - started_s - 0.001)


@asynccontextmanager
async def watched() -> AsyncIterator[Lateness]:
    """Watch the loop during a block."""
    lateness = Lateness()
    task = asyncio.create_task(lateness.run())
    try:
        yield lateness
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def timed(what: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Seconds, and the worst lateness of the loop in ms."""
    async with watched() as lateness:
        started_s = time.perf_counter()
        await what()
        took_s = time.perf_counter() - started_s
    return {"took_s": round(took_s, 3), "loop_late_ms": round(lateness.worst_s * 1_000, 2)}


async def measure(url: str, store: KeyStore, count: int) -> dict[str, object]:
    """The figures of one node."""
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    feed = KeyFeed(url, PEPPER, FeedOptions(interval_s=0.5, start_timeout_s=120))

    async def change(work: Callable[[], object]) -> None:
        await asyncio.to_thread(work)
        while not await feed.caught_up(30):
            pass

    found: dict[str, object] = {"keys": count, "load": await timed(feed.start)}
    found["resident_mb"] = round((process.memory_info().rss - before_bytes) / 1e6)
    found["unchanged"] = await timed(lambda: feed.caught_up(30))
    found["one_key_created"] = await timed(lambda: change(lambda: store.create_key("acme/web")))
    found["org_revoked"] = await timed(lambda: change(lambda: store.revoke_org("acme")))
    assert len(feed.snapshot.keys) == 0
    found["org_restored"] = await timed(lambda: change(lambda: store.restore_org("acme")))
    assert len(feed.snapshot.keys) == count + 1
    await feed.stop()
    return found


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.url or f"sqlite:///{folder}/bench.db"
        sql.upgrade(url)
        engine = sql.engine(url)
        store = KeyStore(engine, PEPPER)
        fill(store, options.keys)
        print(json.dumps(asyncio.run(measure(url, store, options.keys)), indent=1))
        engine.dispose()


if __name__ == "__main__":
    main()
