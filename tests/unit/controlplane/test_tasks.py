"""The Celery app: addresses, limits and schedule as they are set.

Owns: what can be seen without a broker. Does not own: tasks that run (tests/integration/demo/test_worker.py).
"""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from controlplane.adapters.tasks import HOUSEKEEPING, RECONCILE, broker_url, build_celery
from controlplane.config import load_settings


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("unix:///tmp/r/redis.sock?db=0", "redis+socket:///tmp/r/redis.sock?virtual_host=0"),
        ("unix:///tmp/r/redis.sock", "redis+socket:///tmp/r/redis.sock?virtual_host=0"),
        ("unix://:p%40ss@/tmp/r.sock?db=3", "redis+socket://:p%40ss@/tmp/r.sock?virtual_host=3"),
        ("redis://:secret@redis:6379/2", "redis://:secret@redis:6379/2"),
        ("rediss://redis:6380/0", "rediss://redis:6380/0"),
    ],
)
def test_a_redis_url_becomes_celerys(url: str, wanted: str) -> None:
    assert broker_url(url) == wanted


def test_every_task_is_bounded_repeatable_and_scheduled() -> None:
    app = build_celery(load_settings({"redis_url": SecretStr("redis://127.0.0.1:1/0")}))
    ours = {name: task for name, task in app.tasks.items() if not name.startswith("celery.")}
    assert set(ours) == {RECONCILE, HOUSEKEEPING} == {entry["task"] for entry in app.conf.beat_schedule.values()}
    longest_s = max(task.time_limit for task in ours.values())
    assert all(task.soft_time_limit < task.time_limit for task in ours.values())
    assert app.conf.task_acks_late is True
    # A message must not be handed to a second worker while the first may still run it.
    assert app.conf.broker_transport_options["visibility_timeout"] > longest_s
    assert app.conf.accept_content == ["json"]


def test_an_encrypted_store_is_verified() -> None:
    app = build_celery(load_settings({"redis_url": SecretStr("rediss://redis:6380/0")}))
    assert app.conf.broker_use_ssl == app.conf.redis_backend_use_ssl == {"ssl_cert_reqs": 2}
