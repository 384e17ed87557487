"""`inferplane worker` with a real Redis: tasks run, results are kept, and it ends when it is told to.

Owns: the worker's process. Does not own: what reconcile finds (tests/integration/billing).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
import sqlalchemy as sa
from celery import Celery
from pydantic import SecretStr

from billing.adapters import sql
from billing.adapters.tables import QuarantineRow, UsageRollupRow, table
from controlplane.adapters.tasks import HOUSEKEEPING, RECONCILE, build_celery, keep_house, read_reconcile
from controlplane.adapters.tenancy_tables import IDEMPOTENCY_MARK
from controlplane.config import Settings, load_settings

# A worker starts within 2 s on an idle machine.
_DEADLINE_S = 60.0


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> Settings:
    made = load_settings({"data_dir": tmp_path, "redis_url": SecretStr(redis_url)})
    sql.upgrade(made.sql_url)
    return made


@pytest.fixture
def app(settings: Settings) -> Iterator[Celery]:
    made = build_celery(settings)
    yield made
    made.close()


def start(settings: Settings, *command: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("INFERPLANE_")}
    env |= {
        "INFERPLANE_REDIS_URL": settings.redis_url.get_secret_value(),
        "INFERPLANE_DATA_DIR": str(settings.data_dir),
    }
    return subprocess.Popen(
        [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> tuple[int, float, str]:
    """(exit status, seconds it took, its output)."""
    began_s = time.monotonic()
    process.send_signal(number)
    out, _ = process.communicate(timeout=_DEADLINE_S)
    return process.returncode, time.monotonic() - began_s, out


def test_tasks_run_and_the_result_is_kept(settings: Settings, app: Celery, redis_url: str) -> None:
    engine = sql.engine(settings.sql_url)
    two_days_s, now_s = 48 * 3_600, int(time.time())
    with sql.write(engine) as connection:
        for mark, created_at_s in (("old", now_s - two_days_s - 1), ("new", now_s)):
            values = {"caller": "c", "fingerprint": "f", "made_id": "m", "created_at_s": created_at_s}
            connection.execute(sa.insert(IDEMPOTENCY_MARK).values(mark=mark, **values))
    worker = start(settings, "-m", "controlplane", "worker")
    client = redis.Redis.from_url(redis_url)
    try:
        assert read_reconcile(client) is None
        told = app.send_task(RECONCILE).get(timeout=_DEADLINE_S)
        kept = read_reconcile(client)
        assert kept is not None
        assert (kept.exact, kept.event_count, kept.finished_ns) == (True, 0, told["finished_ns"])
        assert kept.quarantined_count == 0
        # One tick of the schedule is done once, however many beats send it.
        first, second = (app.send_task(HOUSEKEEPING, args=(3_600,)).get(timeout=_DEADLINE_S) for _ in range(2))
        assert (first, second) == ({"idempotency_row_count": 1}, None)
        with sql.read(engine) as connection:
            assert connection.execute(sa.select(IDEMPOTENCY_MARK.c.mark)).scalars().all() == ["new"]
        # A planted row is found, kept and logged.
        rollup = table(UsageRollupRow)
        texts = {one.name for one in rollup.columns if isinstance(one.type, sa.String)}
        planted = {one.name: "1" if one.name in texts else 1 for one in rollup.columns} | {"minute_s": 60}
        with sql.write(engine) as connection:
            connection.execute(sa.insert(rollup).values(planted))
            aside = {"quarantine_id": "q", "kind": "event", "reason": "r", "raw": b"", "at_ns": 1}
            connection.execute(sa.insert(table(QuarantineRow)).values(aside))
        app.send_task(RECONCILE).get(timeout=_DEADLINE_S)
        kept = read_reconcile(client)
        assert kept is not None
        assert (kept.exact, kept.difference_count, kept.quarantined_count) == (False, 1, 1)
    finally:
        status, took_s, out = end(worker)
        client.close()
        engine.dispose()
    assert status == 0
    assert took_s < 10
    assert "The books are not exact: 1 differences" in out
    assert "1 records are in quarantine" in out


def test_housekeeping_makes_the_partitions_of_the_months_ahead(settings: Settings, postgres_url: str) -> None:
    sql.upgrade(postgres_url)
    engine = sql.engine(postgres_url)
    with sql.write(engine) as connection:
        last = connection.exec_driver_sql(
            "SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'usage_event'::regclass "
            "AND inhrelid::regclass::text <> 'usage_event_default'"
        ).scalar_one()
        connection.exec_driver_sql(f"DROP TABLE {last}")
    engine.dispose()
    there = settings.model_copy(update={"database_url": postgres_url})
    month = last.removeprefix("usage_event_").replace("_", "-")
    assert keep_house(there) == {
        "idempotency_row_count": 0,
        "partitions_made": [month],
        "partition_row_count": 0,
        "partition_put_off": None,
    }
    assert keep_house(there)["partitions_made"] == []


def test_a_running_task_does_not_hold_up_the_end(settings: Settings, app: Celery) -> None:
    worker = start(settings, str(Path(__file__).with_name("sleepy_worker.py")), str(settings.data_dir),
                   settings.redis_url.get_secret_value())  # fmt: skip
    app.send_task("tests.sleep", queue="inferplane")
    assert worker.stdout is not None
    for line in worker.stdout:
        if "asleep" in line:
            break
    children = psutil.Process(worker.pid).children(recursive=True)
    _, took_s, _ = end(worker)
    assert took_s < 10
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_worker_leaves_no_process(settings: Settings, app: Celery) -> None:
    worker = start(settings, "-m", "controlplane", "worker")
    app.send_task(HOUSEKEEPING).get(timeout=_DEADLINE_S)
    children = psutil.Process(worker.pid).children(recursive=True)
    assert len(children) == 2  # a pool process and the beat
    end(worker, signal.SIGKILL)
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert len(gone) == 2


def test_a_worker_without_redis_says_so(tmp_path: Path) -> None:
    sql.upgrade(f"sqlite:///{tmp_path / 'inferplane.db'}")
    worker = start(load_settings({"data_dir": tmp_path}), "-m", "controlplane", "worker")
    out, _ = worker.communicate(timeout=_DEADLINE_S)
    assert worker.returncode == 1
    assert out.startswith("redis_url is empty and no embedded Redis runs in")
    assert out.count("\n") == 1


def test_a_wrong_option_is_a_usage_error(tmp_path: Path) -> None:
    worker = start(load_settings({"data_dir": tmp_path}), "-m", "controlplane", "worker", "--concurrency", "33")
    told, _ = worker.communicate(timeout=_DEADLINE_S)
    assert (worker.returncode, told) == (2, "--concurrency is 33; expected a number from 1 to 32.\n")
