"""A worker whose one task sleeps for longer than anybody waits: it is stopped while it runs.

Owns: a process for `test_worker.py`. Does not own: the worker's life, which is the product's (`run_worker`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from celery import Celery
from pydantic import SecretStr

from controlplane.adapters.tasks import build_celery
from controlplane.adapters.worker_cli import run_worker
from controlplane.config import Settings, load_settings


def sleepy(settings: Settings) -> Celery:
    """The product's app with one more task."""
    app = build_celery(settings)

    def sleep() -> None:
        print("asleep", flush=True)
        time.sleep(600)

    app.task(sleep, shared=False, name="tests.sleep")
    return app


if __name__ == "__main__":
    chosen = load_settings({"data_dir": Path(sys.argv[1]), "redis_url": SecretStr(sys.argv[2])})
    sys.exit(run_worker(sleepy(chosen), chosen, 1, beat=False))
