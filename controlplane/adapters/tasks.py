"""Periodic work on Celery: what runs, how often, within which limits, and where its result is read.

Owns: the Celery app (`build_celery`), the schedule, the tasks `inferplane.reconcile` and `inferplane.housekeeping`, and
keeping the reconcile result in Redis (`read_reconcile`). Does not own: the comparison of the books
(`billing.adapters.reconcile_sql`), partitions (`billing.adapters.partitions_sql`), how gateways show the result
(`admin_reconcile`), or the worker's process (`worker_cli`).

Messages carry a slot number and nothing else: no content, no names, no keys. Every task may run twice (a worker that is
lost before it acknowledges leaves its message to another), so every task is safe to repeat. Several beats may run: the
tick of an interval is claimed in Redis, and the others skip it.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import orjson
import redis
from celery import Celery

from billing.reconcile import Difference
from controlplane.adapters.admin_reconcile import RESULT_KEY, ReconcileResult, result_of
from controlplane.config import Settings

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

__all__ = ["ReconcileResult", "broker_url", "build_celery", "keep_house", "read_reconcile", "reconcile_books"]

_log = logging.getLogger(__name__)

QUEUE = "inferplane"
RECONCILE = "inferplane.reconcile"
HOUSEKEEPING = "inferplane.housekeeping"
# What marks a tick as taken.
_TICK_KEY = "inferplane:tick:"
# The books are compared once an hour (DESIGN 4.3: reconcile is periodic work); what is old is dropped as often.
_RECONCILE_EVERY_S = 3_600
_HOUSEKEEPING_EVERY_S = 3_600
# A reconcile of 50 million events takes minutes; the soft limit lets it end with a reason, the hard one ends it.
_SOFT_LIMIT_S = 1_740
_HARD_LIMIT_S = 1_800
# A message that no worker acknowledged is handed to another after this: longer than any task may run.
_VISIBILITY_S = 3_600
# Results of tasks are looked at within minutes, if at all.
_RESULT_LIFE_S = 86_400
# An Idempotency-Key is honoured for 48 h (tenancy_tx); its row is of no use afterwards.
_IDEMPOTENCY_LIFE_S = 48 * 3_600
# Differences kept with a result: enough to see what kind of thing is wrong; `bill reconcile` names all.
_MAX_NAMED_COUNT = 20
# A store that does not answer within this makes the task fail, and the next tick tries again.
_REDIS_TIMEOUT_S = 5.0


def broker_url(url: str) -> str:
    """A redis-py URL as Celery wants it: `unix://` becomes `redis+socket://` (kombu's name for the same)."""
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    secret = f":{quote(unquote(parts.password), safe='')}@" if parts.password else ""
    return f"redis+socket://{secret}{parts.path}?virtual_host={database}"


def build_celery(settings: Settings) -> Celery:
    """The app with its tasks and schedule. Connects to nothing yet."""
    url = broker_url(settings.redis_url.get_secret_value())
    app = Celery("inferplane", broker=url, backend=url, set_as_current=False)
    tls = {"ssl_cert_reqs": ssl.CERT_REQUIRED} if url.startswith("rediss:") else None
    app.conf.update(
        task_default_queue=QUEUE,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_time_limit=_HARD_LIMIT_S,
        task_soft_time_limit=_SOFT_LIMIT_S,
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        result_expires=_RESULT_LIFE_S,
        broker_transport_options={"visibility_timeout": _VISIBILITY_S, "global_keyprefix": "inferplane:celery:"},
        result_backend_transport_options={"global_keyprefix": "inferplane:celery:"},
        broker_connection_retry_on_startup=True,
        broker_use_ssl=tls,
        redis_backend_use_ssl=tls,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_enable_remote_control=True,
        enable_utc=True,
        timezone="UTC",
        beat_schedule={
            "reconcile": _every(RECONCILE, _RECONCILE_EVERY_S),
            "housekeeping": _every(HOUSEKEEPING, _HOUSEKEEPING_EVERY_S),
        },
    )
    _add_tasks(app, settings)
    return app


def _every(task: str, interval_s: int) -> dict[str, Any]:
    # A tick that found no worker for its whole interval is void: the next one does the same work.
    options = {"queue": QUEUE, "expires": interval_s}
    return {"task": task, "schedule": timedelta(seconds=interval_s), "args": (interval_s,), "options": options}


def _add_tasks(app: Celery, settings: Settings) -> None:
    """Register the tasks. Each takes the interval of its tick in seconds; 0 or nothing: run in any case."""

    def task(name: str, work: Callable[[Settings], dict[str, Any]]) -> None:
        def run(self: Any, interval_s: int = 0) -> dict[str, Any] | None:
            if interval_s and not _claim(settings, f"{name}:{int(time.time()) // interval_s}", self.request.id):
                return None
            return work(settings)

        app.task(run, bind=True, shared=False, name=name, time_limit=_HARD_LIMIT_S, soft_time_limit=_SOFT_LIMIT_S)

    task(RECONCILE, reconcile_books)
    task(HOUSEKEEPING, keep_house)


def reconcile_books(settings: Settings) -> dict[str, Any]:
    """Compare the books with themselves, keep the result, and log an alarm when they are not exact.

    The spool is left out: while requests run, it is ahead of the books (`inferplane bill reconcile --spool` is for a
    gateway at rest).
    """
    from billing.adapters import sql
    from billing.adapters.reconcile_sql import reconcile

    began_s = time.monotonic()
    engine = sql.engine(settings.sql_url)
    try:
        report = reconcile(engine)
    finally:
        engine.dispose()
    named = tuple(_named(one) for one in report.differences[:_MAX_NAMED_COUNT])
    result = ReconcileResult(
        finished_ns=time.time_ns(),
        duration_s=time.monotonic() - began_s,
        exact=report.exact,
        event_count=report.event_count,
        difference_count=report.difference_count,
        differences=named,
        quarantined_count=report.quarantined_count,
    )
    if result.quarantined_count:
        _log.error("%d records are in quarantine and on no bill: look at them.", result.quarantined_count)
    if not result.exact:
        first = ", ".join(f"{one['kind']} {one['name']}" for one in named[:3])
        _log.error("The books are not exact: %d differences, first %s.", result.difference_count, first)
    with _store(settings) as client:
        client.set(RESULT_KEY, orjson.dumps(asdict(result)))
    return asdict(result)


def _named(one: Difference) -> dict[str, Any]:
    amount = None if one.amount_pico is None else str(one.amount_pico)
    return {"kind": one.kind.value, "name": one.name, "amount_pico": amount}


def read_reconcile(client: redis.Redis) -> ReconcileResult | None:
    """What the last periodic reconcile found; None: none ran yet. Raises redis.RedisError."""
    stored = client.get(RESULT_KEY)
    return result_of(stored) if isinstance(stored, bytes) else None


def keep_house(settings: Settings) -> dict[str, Any]:
    """Drop rows that nothing reads any more, then make the partitions of the months ahead. Returns the counts."""
    from billing.adapters import sql

    engine = sql.engine(settings.sql_url)
    try:
        told: dict[str, Any] = {"idempotency_row_count": _drop_expired(engine)}
        if not sql.is_sqlite(engine):
            told |= _make_partitions(engine)
    finally:
        engine.dispose()
    return told


def _drop_expired(engine: Engine) -> int:
    """Delete Idempotency-Keys past their life."""
    import sqlalchemy as sa

    from billing.adapters import sql
    from controlplane.adapters.tenancy_tables import IDEMPOTENCY_MARK

    with sql.write(engine) as connection:
        old = IDEMPOTENCY_MARK.c.created_at_s <= int(time.time()) - _IDEMPOTENCY_LIFE_S
        return connection.execute(sa.delete(IDEMPOTENCY_MARK).where(old)).rowcount


def _make_partitions(engine: Engine) -> dict[str, Any]:
    """Make what is missing. What was put off, the next tick tries again: until then its events are in the default."""
    from billing.adapters.partitions_sql import PartitionReport, make_partitions
    from billing.errors import StoreError

    try:
        report = make_partitions(engine, time.time_ns())
    except StoreError as fault:
        _log.error("%s", fault)
        report = PartitionReport()
    if report.made:
        moved = f"{report.moved_row_count} rows moved out of the default partition"
        _log.warning("Partitions of usage events made for %s; %s.", ", ".join(report.made), moved)
    if report.put_off is not None:
        _log.warning("The partition of %s was put off: the table was busy, or another worker is at it.", report.put_off)
    return {
        "partitions_made": list(report.made),
        "partition_row_count": report.moved_row_count,
        "partition_put_off": report.put_off,
    }


def _store(settings: Settings) -> redis.Redis:
    url = settings.redis_url.get_secret_value()
    return redis.Redis.from_url(url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S)


def _claim(settings: Settings, tick: str, task_id: str) -> bool:
    """Whether this tick is this task's: nobody took it, or this very message did and was handed over."""
    with _store(settings) as client:
        taken = client.set(_TICK_KEY + tick, task_id, nx=True, get=True, ex=2 * _VISIBILITY_S)
    return taken is None or taken == task_id.encode()
