"""One seeded run: set the books up, put load on, kill by plan, wait until all is shipped, and judge.

Owns: the order of a run and the report of a failed one. Does not own: the processes (`stack`), the load (`client`), the
plan or the rules (`plan`, `check`).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import redis

from billing.adapters import books_sql, sql
from billing.pricing import PriceBook, Sku
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tasks import ReconcileResult, read_reconcile
from controlplane.adapters.tenancy_records import KeyWish, LimitWish
from controlplane.config import Settings
from tests.faults.check import CACHED_PRICE, INPUT_PRICE, OUTPUT_PRICE, findings, history
from tests.faults.client import Door, Load, ask
from tests.faults.plan import TAIL_S, WARM_UP_S, Plan, Target, Wish
from tests.faults.stack import Database, Place, Stack
from tests.faults.truth import Booked, ClientSaw, Ended, Evidence, read_books
from tests.services import free_tcp_port

# Limits of the key. Concurrency is twice what the load needs: slots of a killed gateway come back within 5 s.
SLOTS = 24
# Output tokens per 31 days: refilled by 38 a second, so what is left shows what was settled.
OUTPUT_TOKENS = 100_000_000
_MONTH_S = 31 * 86_400
# Where Redis is killed: its buckets start empty again and fill at their rate, so the rate must be a quick one.
_MINUTE_S = 60
# Slots of a dead process are back within 5 s (DESIGN 4.2); the clients that fill them start within another.
_SLOTS_BACK_S = 8.0
_BREAKERS_CLOSE_S = 30.0
_SHIPPED_S = 30.0
# While a bucket is nearly full, it may forget what requests in flight could give back (`rate_limit.MAX_POOLS`): at most
# what 12 clients with two choices reserve at once. The requests of a run reserve ten times as much.
_IN_FLIGHT_TOKENS = 12 * 2 * 4_096
# Leases end within 1 s of their last use (DESIGN 4.2): then what is left of them is back in the bucket.
_LEASES_OVER_S = 1.2
# A failed run shows this many requests in full.
_MOST_SHOWN = 5


@dataclass(slots=True)
class Result:
    """What a run found. Mutable while it runs."""

    plan: Plan
    wrong: list[str] = field(default_factory=list)
    kill_count: int = 0
    summary: str = ""


def prepare(planned: Plan, folder: Path, database_url: str) -> Place:
    """Tables, prices, a key with limits, and a free port."""
    data_dir = folder / "data"
    data_dir.mkdir(parents=True)
    url = database_url or f"sqlite:///{data_dir / 'inferplane.db'}"
    sql.upgrade(url)
    engine = sql.engine(url)
    try:
        prices = {
            ("m", "default", Sku.INPUT): INPUT_PRICE,
            ("m", "default", Sku.CACHED_INPUT): CACHED_PRICE,
            ("m", "default", Sku.OUTPUT): OUTPUT_PRICE,
        }
        books_sql.add_book(engine, PriceBook("pb-1", "USD", 0, prices))
        store = KeyStore(engine, load_pepper(Settings(data_dir=data_dir)))
        org = store.create_org("acme").record
        project = store.create_project(org.org_id, "web").record
        key = store.create_key(project.project_id, KeyWish())
        catalog = CatalogStore(store.db)
        catalog.set_limit(LimitWish("key", key.key_id, "concurrency", SLOTS))
        period_s = _MINUTE_S if planned.kills_any(Target.REDIS) else _MONTH_S
        catalog.set_limit(LimitWish("key", key.key_id, "output_tokens", OUTPUT_TOKENS, period_s))
        assert key.secret is not None
        return Place(folder, url, Door(free_tcp_port(), key.secret), embedded_sql=not database_url)
    finally:
        engine.dispose()


async def run(planned: Plan, place: Place, database: Database | None) -> Result:
    """The whole run; nothing of it is left running."""
    result = Result(planned)
    stack = Stack(place, database)
    load = Load(place.door, planned.seed, planned.clients)
    began_s = time.monotonic()
    try:
        await stack.start(worker=planned.kills_any(Target.WORKER))
        ready_s = time.monotonic()
        await _under_load(planned, stack, load)
        loaded_s = time.monotonic()
        await _check_limits(stack, load, result)
        if planned.kills_any(Target.WORKER):
            await _check_worker(stack, result)
        if planned.reservations_are_exact:
            await _check_reservations(stack, load, result)
        await stack.shipped(_SHIPPED_S)
        status = await stack.stop_serve()
        if status != 0:
            result.wrong.append(f"serve ended with status {status} after SIGTERM")
        evidence = await asyncio.to_thread(_evidence, stack, load)
        report = await asyncio.to_thread(reconcile_command, stack)
        _judge(result, stack, evidence, report)
        result.kill_count = stack.kill_count
        result.summary = _summary(stack, planned, evidence, report, (began_s, ready_s, loaded_s, time.monotonic()))
    finally:
        await load.cancel()
        await stack.give_up()
        await asyncio.to_thread(stack.stop)
    return result


async def _under_load(planned: Plan, stack: Stack, load: Load) -> None:
    load.start()
    await asyncio.sleep(WARM_UP_S)
    for kill in planned.kills:
        await asyncio.sleep(kill.after_s)
        await stack.kill(kill.target, kill.pick, kill.down_s)
    await stack.recovered()
    await asyncio.sleep(TAIL_S)
    await load.stop()
    stack.say("the load has ended")


def _evidence(stack: Stack, load: Load) -> Evidence:
    return Evidence(
        tuple(load.seen),
        tuple(stack.engine_logs()),
        read_books(stack.place.sql_url),
        tuple(stack.gateway_kills_ns),
        tuple(stack.engine_kills),
    )


def reconcile_command(stack: Stack) -> dict[str, Any]:
    """What `inferplane bill reconcile --json` says of the books and of what the spool still holds."""
    argv = [sys.executable, "-m", "controlplane", "bill", "reconcile", "--json", "--spool", str(stack.place.spool_dir)]
    done = subprocess.run(argv, env=stack.environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, f"bill reconcile ended with {done.returncode}: {done.stderr}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) is report["exact"], done.stderr
    return report


def _judge(result: Result, stack: Stack, evidence: Evidence, report: dict[str, Any]) -> None:
    found = findings(evidence)
    result.wrong += [str(one) for one in found]
    if not report["exact"]:
        result.wrong += [f"reconcile: {one}" for one in report["differences"]]
    if report["quarantined"]:
        result.wrong.append(f"{report['quarantined']} rows lie in the quarantine")
    if report["events"] != len(evidence.events):
        result.wrong.append(f"reconcile counts {report['events']} events, the table holds {len(evidence.events)}")
    left = sorted(path.name for path in stack.place.spool_dir.glob("*~*/*.seg"))
    if left:
        result.wrong.append(f"serve has ended, and the spool still holds {left}")
    if "Traceback" in stack.log("serve.log"):
        result.wrong.append("serve has logged a traceback")
    if result.wrong:
        shown = dict.fromkeys(one.tag for one in found)
        result.wrong += [history(evidence, tag) for tag in list(shown)[:_MOST_SHOWN]]
        result.wrong.append(stack.last_words())


def _summary(
    stack: Stack, planned: Plan, evidence: Evidence, report: dict[str, Any], times_s: tuple[float, float, float, float]
) -> str:
    ended = Counter(f"{saw.ended} {saw.status or ''} {saw.code}".strip() for saw in evidence.clients)
    outcomes = Counter(event.outcome for event in evidence.events)
    spent = [f"{after - before:.1f}" for before, after in pairwise(times_s)]
    return (
        f"seed {planned.seed} on {'PostgreSQL' if planned.postgres else 'SQLite'}: {stack.kill_count} kills "
        f"({', '.join(kill.target for kill in planned.kills)}); {len(evidence.clients)} requests {dict(ended)}, "
        f"{len(evidence.events)} events {dict(outcomes)}, {report['estimated_events']} estimated, exact "
        f"{report['exact']}; start, load and end took {' + '.join(spent)} s"
    )


# -- limits and the worker ---------------------------------------------------------------------------------------------


def _probe(name: str, **options: str) -> Wish:
    return Wish(f"probe-{name}", "normal", options, stream=True, choices=1, tokens=3, prompt=5, cached=0)


async def _check_limits(stack: Stack, load: Load, result: Result) -> None:
    """Every slot is free again: as many requests as the limit allows run at once, and one more does not."""
    until_s = time.monotonic() + _SLOTS_BACK_S
    attempt = 0
    while True:
        attempt += 1
        held = [ClientSaw(_probe(f"{attempt}-{number}", gap_ms="350")) for number in range(SLOTS + 1)]
        load.seen += held
        await asyncio.gather(*(ask(stack.place.door, saw) for saw in held))
        ends = Counter((str(saw.ended), saw.status, saw.code) for saw in held)
        done = sum(saw.ended is Ended.DONE for saw in held)
        if done > SLOTS:
            result.wrong.append(f"{done} requests ran at once; the limit is {SLOTS}")
        if done >= SLOTS:
            stack.say(f"all slots are free (attempt {attempt})")
            return
        over_s = time.monotonic() - until_s
        # Breakers that the load has opened are no matter of slots: they get more time.
        if over_s > (0.0 if any(saw.status == 429 for saw in held) else _BREAKERS_CLOSE_S):
            result.wrong.append(f"{SLOTS} slots are not free {_SLOTS_BACK_S} s after the last kill: {dict(ends)}")
            return
        await asyncio.sleep(0.3)


async def _check_reservations(stack: Stack, load: Load, result: Result) -> None:
    """What the requests reserved is settled: a request for all that must be left is admitted, one for more is not."""
    door = stack.place.door
    await stack.shipped(_SHIPPED_S)
    await asyncio.sleep(_LEASES_OVER_S)
    events = [event for event in await asyncio.to_thread(read_books, stack.place.sql_url) if event.billable]
    least = sum(event.output_tokens or 0 for event in events)
    most = sum(_may_have_used(event) for event in events) + _IN_FLIGHT_TOKENS
    all_that_is_left = ClientSaw(replace(_probe("left"), max_tokens=OUTPUT_TOKENS - most))
    await ask(door, all_that_is_left)
    refilled = OUTPUT_TOKENS * (time.monotonic() - stack.began_s) / _MONTH_S
    too_much = ClientSaw(replace(_probe("more"), max_tokens=OUTPUT_TOKENS - least + int(refilled) + 1))
    await ask(door, too_much)
    load.seen += [all_that_is_left, too_much]
    if all_that_is_left.ended is not Ended.DONE:
        left = OUTPUT_TOKENS - most
        told = f"{all_that_is_left.code}; the gateway says {all_that_is_left.left_tokens or too_much.left_tokens}"
        result.wrong.append(f"{left} tokens must be left, but they were refused ({told}): a leak")
    if too_much.status != 429:
        result.wrong.append(f"more than the limit was admitted ({too_much.status}): used tokens were not settled")


def _may_have_used(event: Booked) -> int:
    """Output tokens that a request may have taken from its limit: where nobody knows, what it had reserved."""
    if event.output_tokens is not None:
        return event.output_tokens
    nothing_came = event.first_token_ns is None and event.uncached_input_tokens is None
    return 0 if nothing_came else event.reserved_output_tokens


async def _check_worker(stack: Stack, result: Result) -> None:
    """The worker that was started again compares the books, and finds them exact."""
    await asyncio.to_thread(stack.order_reconcile)
    url = stack.environment()["INFERPLANE_REDIS_URL"]

    def newest() -> ReconcileResult | None:
        client = redis.Redis.from_url(url)
        try:
            return read_reconcile(client)
        finally:
            client.close()

    ordered_ns, until_s = time.time_ns(), time.monotonic() + 30.0
    while time.monotonic() < until_s:
        found = await asyncio.to_thread(newest)
        if found is not None and found.finished_ns > ordered_ns:
            if not found.exact:
                result.wrong.append(f"the worker's reconcile is not exact: {found.differences}")
            return
        await asyncio.sleep(0.1)
    result.wrong.append("the worker that was started again has not compared the books within 30 s")
