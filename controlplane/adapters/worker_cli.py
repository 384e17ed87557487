"""`inferplane worker`: a Celery worker with its beat in one command.

Owns: options, the life of the process (quick start, an end within ten seconds of SIGTERM, no orphans) and exit codes.
Does not own: what the tasks do (`tasks`). Celery alone would wait for a running task for as long as it takes; here the
wait is bounded, and what is cut off is handed to another worker, because tasks are acknowledged late.
"""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from celery import Celery

    from controlplane.config import Settings

# Each is a process of a hundred megabytes; the tasks are two an hour.
_MAX_CONCURRENCY = 32
# After SIGTERM: how long running tasks may end by themselves, and how long the cold shutdown after it may take.
_WARM_S = 5.0
_COLD_S = 3.0


def register(app: typer.Typer) -> None:
    """Add `worker`."""
    app.command("worker")(worker)


def worker(
    *,
    concurrency: Annotated[int, typer.Option(help="Tasks at once, 1 to 32.")] = 1,
    beat: Annotated[bool, typer.Option("--beat/--no-beat", help="Also send the periodic tasks.")] = True,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of everything embedded.")] = None,
    database_url: Annotated[str | None, typer.Option(help="SQLAlchemy URL; default: as `serve`.")] = None,
) -> None:
    """Run background work: periodic reconcile and housekeeping. Needs the Redis of the gateways."""
    import logging

    from billing.adapters import sql
    from controlplane.adapters.cli_session import require_database
    from controlplane.adapters.database_faults import database_faults
    from controlplane.config import check_range, load_settings
    from controlplane.errors import GatewayError, UsageError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # One line when a task comes and one when it ended; results hold counts and ids only.
    logging.getLogger("celery").setLevel(logging.INFO)
    given = {"data_dir": data_dir, "database_url": database_url}
    try:
        check_range("--concurrency", concurrency, 1, _MAX_CONCURRENCY)
        settings = load_settings({name: value for name, value in given.items() if value is not None})
        settings = with_redis(settings)
        with database_faults(settings, option=database_url is not None):
            require_database(settings)
            sql.require_current(settings.sql_url)
    except GatewayError as fault:
        typer.echo(str(fault), err=True)
        raise typer.Exit(2 if isinstance(fault, UsageError) else 1) from None
    from controlplane.adapters.tasks import build_celery

    raise typer.Exit(run_worker(build_celery(settings), settings, concurrency, beat))


def with_redis(settings: Settings) -> Settings:
    """The settings with the URL of the running embedded Redis where they name none. Raises ConfigError."""
    from pydantic import SecretStr

    from controlplane.errors import ConfigError

    if settings.redis_url.get_secret_value():
        return settings
    socket_path = (settings.data_dir / "redis" / "redis.sock").absolute()
    if not socket_path.is_socket():
        raise ConfigError(
            f"redis_url is empty and no embedded Redis runs in {settings.data_dir}; expected INFERPLANE_REDIS_URL, "
            "or an `inferplane serve` with this data_dir."
        )
    return settings.model_copy(update={"redis_url": SecretStr(f"unix://{socket_path}?db=0")})


def run_worker(app: Celery, settings: Settings, concurrency: int, beat: bool) -> int:
    """Work until SIGTERM or SIGINT. Returns the exit status."""
    from celery import signals
    from celery.apps.worker import Worker
    from celery.platforms import SecurityWarning

    # It warns of root because pickled messages could run code; only JSON is accepted here (`tasks`).
    warnings.simplefilter("ignore", SecurityWarning)

    folder = settings.data_dir / "run"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    signals.worker_process_init.connect(_end_with_worker, weak=False)
    signals.beat_embedded_init.connect(_end_with_worker, weak=False)
    signals.worker_shutting_down.connect(_bound_shutdown, weak=False)
    process: Any = Worker(
        app=app,
        pool_cls="prefork",
        concurrency=concurrency,
        beat=beat,
        schedule_filename=str(folder / "beat-schedule"),
        loglevel="INFO",
        quiet=True,
        hostname=f"inferplane-{os.getpid()}@{socket.gethostname()}",
        without_gossip=True,
        without_mingle=True,
    )
    process.start()
    return int(process.exitcode or 0)


def _end_with_worker(**_: object) -> None:
    """In a child of the worker: die with it, however it dies."""
    from controlplane.adapters.processes import die_with_parent

    die_with_parent()


def _bound_shutdown(**_: object) -> None:
    """The shutdown has begun: see to it that it ends."""
    import threading

    threading.Thread(target=_end_in_time, name="bounded shutdown", daemon=True).start()


def _end_in_time() -> None:
    import signal
    import time

    import psutil

    time.sleep(_WARM_S)
    os.kill(os.getpid(), signal.SIGQUIT)
    time.sleep(_COLD_S)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)
