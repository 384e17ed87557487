"""How many usage events a second the real shipper brings from a spool into the database: SQLite and PostgreSQL.

Run: `python -m tests.bench.bench_shipper [--events N] [--rounds N] [--check]`. Owns: a spool written by the gateway's
own writer (OPEN and CLOSE of each event), one `inferplane ship --once` per round and database in turn, and the rates:
events over the time from the shipper's start (imports done) to its last commit, by its own status file. Does not own:
the events (`bench_ingest.load`). The databases are fresh each round; PostgreSQL is the one of the development
requirements, with fsync on, on the same machine. `bench_ingest` measures the same without spool and process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from billing.adapters import books_sql, sql
from billing.adapters.shipper_status import read_status
from billing.pricing import Sku
from billing.usage_event import UsageEvent
from controlplane.adapters.spool import Spool, SpoolSettings
from tests import services
from tests.bench.bench_ingest import load
from tests.bench.gateway import cache_home
from tests.bench.machine import BenchError
from tests.bench.report import Verdict
from tests.fakes.ledger_events import a_book

_NODE = "node-0"
_BARS = {"sqlite": 3_000, "postgresql": 5_000}
_SHIP_S = 600.0


@dataclass(frozen=True, slots=True)
class Round:
    """One run of the shipper."""

    database: str
    events_per_s: float
    cpu_us_per_event: float


async def write_spool(spool_dir: Path, events: list[UsageEvent]) -> None:
    """A finished writer's folder, as a gateway leaves it."""
    spool = Spool(SpoolSettings(spool_dir, _NODE, "1-bench", 8 << 30))
    for event in events:
        spool.open(event.open)
        spool.close(event.close)
    await spool.aclose()


def prepare(url: str) -> None:
    """Tables and prices of the models in the load."""
    sql.upgrade(url)
    engine = sql.engine(url)
    prices = dict(a_book().prices)
    prices.update({("qwen", tier, sku): price for (_, tier, sku), price in a_book().prices.items()})
    prices["qwen", "default", Sku.OUTPUT] = 600_000
    books_sql.add_book(engine, a_book(prices=prices), retroactive=True)
    engine.dispose()


def ship(url: str, spool_dir: Path, count: int) -> Round:
    """Ship everything. Raises BenchError when not all of it arrived."""
    argv = [sys.executable, "-m", "controlplane", "ship", "--once", "--spool", str(spool_dir), "--node", _NODE]
    before = os.times()
    made = subprocess.run([*argv, "--database-url", url], capture_output=True, text=True, check=False, timeout=_SHIP_S)
    after = os.times()
    status = read_status(spool_dir)
    if made.returncode or status is None or status.committed_event_count != count or status.last_commit_ns is None:
        raise BenchError(f"The shipper ended with status {made.returncode}: {made.stderr.strip()[-300:]} {status}")
    took_s = (status.last_commit_ns - status.started_ns) / 1e9
    cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
    return Round(sql.safe_url(url).split(":")[0].split("+")[0], count / took_s, 1e6 * cpu_s / count)


@contextmanager
def durable_postgres() -> Iterator[services.Postgres]:
    """PostgreSQL that syncs as in production; the tests' fixture switches that off."""
    with services.postgres() as server:
        with server.database() as url:
            plain = url.replace("postgresql+psycopg://", "postgresql://")
            with psycopg.connect(plain, autocommit=True) as connection:
                for setting in ("fsync", "full_page_writes", "synchronous_commit"):
                    connection.execute(f"ALTER SYSTEM RESET {setting}")
                connection.execute("SELECT pg_reload_conf()")
                time.sleep(0.5)
                found = connection.execute("SHOW fsync").fetchone()
                if found is None or found[0] != "on":
                    raise BenchError(f"PostgreSQL's fsync is {found}; on was expected.")
        yield server


def measure(events_count: int, rounds_count: int) -> list[Round]:
    """All rounds, SQLite and PostgreSQL in turn."""
    rounds = []
    home = cache_home() / "runs"
    home.mkdir(parents=True, exist_ok=True)
    with durable_postgres() as server:
        for number in range(rounds_count):
            events = load(events_count, seed=number)
            for database in ("sqlite", "postgresql"):
                with ExitStack() as stop:
                    folder = Path(stop.enter_context(tempfile.TemporaryDirectory(dir=home)))
                    url = f"sqlite:///{folder / 'bench.db'}"
                    if database == "postgresql":
                        url = stop.enter_context(server.database())
                    prepare(url)
                    asyncio.run(write_spool(folder / "spool", events))
                    rounds.append(ship(url, folder / "spool", events_count))
                    print(json.dumps({"round": number + 1, **_record(rounds[-1])}), file=sys.stderr, flush=True)
    return rounds


def _record(one: Round) -> dict[str, Any]:
    return {
        "database": one.database,
        "events_per_s": round(one.events_per_s),
        "cpu_us_per_event": round(one.cpu_us_per_event, 1),
    }


def summary(rounds: list[Round]) -> dict[str, dict[str, Any]]:
    """Median and range by database."""
    found = {}
    for database in _BARS:
        rates = [one.events_per_s for one in rounds if one.database == database]
        costs = [one.cpu_us_per_event for one in rounds if one.database == database]
        found[database] = {
            "events_per_s": round(statistics.median(rates)),
            "events_per_s_least": round(min(rates)),
            "events_per_s_most": round(max(rates)),
            "cpu_us_per_event": round(statistics.median(costs), 1),
            "rounds_count": len(rates),
        }
    return found


def main() -> None:
    """Print medians as JSON, and the bars."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bench_shipper", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--events", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 unless every bar is held")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    try:
        rounds = measure(options.events, options.rounds)
    except BenchError as fault:
        sys.exit(str(fault))
    found = summary(rounds)
    bars = [
        Verdict(f"usage events/s into {database}, one shipper", bar, True, found[database]["events_per_s"])
        for database, bar in _BARS.items()
    ]
    print(json.dumps(found))
    print("\n".join(bar.line() for bar in bars))
    if options.json:
        content = {**found, "rounds": [_record(one) for one in rounds], "verdicts": [bar.record() for bar in bars]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(options.check and not all(bar.passed for bar in bars))


if __name__ == "__main__":
    main()
