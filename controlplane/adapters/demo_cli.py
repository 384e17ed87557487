"""`inferplane demo`: its options, and the process of its Redis.

Owns: options and exit codes (0 done, 1 with one sentence, 2 wrong usage), and the hidden `redis-process`. Does not own:
what the demo does (`demo`). Heavy imports stand inside the commands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

# Beside what `serve` keeps in .inferplane, so that a demo never wipes a real database.
_DATA_DIR = Path(".inferplane/demo")
# A day: what is counted of a demo is kept in memory.
_MAX_DURATION_S = 86_400
# The engines' clock cannot keep up with more on any machine, and the traffic's waits vanish.
_MAX_SPEED = 1_000
# How often the embedded Redis is looked at by the process that keeps it.
_REDIS_POLL_S = 0.1


def register(app: typer.Typer) -> None:
    """Add `demo` and the hidden `redis-process`."""
    app.command("demo")(demo)
    app.command("redis-process", hidden=True)(redis_process)


def demo(
    *,
    exit_after: Annotated[bool, typer.Option("--exit", help="Stop when the results are shown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0 takes a free one.")] = None,
    data_dir: Annotated[Path, typer.Option(help="Folder of everything; emptied at the start.")] = _DATA_DIR,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what an earlier demo left in the folder.")] = False,
    duration_s: Annotated[float, typer.Option(help="Seconds of traffic, 1 to 86400.")] = 60.0,
    speed: Annotated[float, typer.Option(help="How many times faster than life the engines are, 0.1 to 1000.")] = 1.0,
    engine: Annotated[str | None, typer.Option(help="llama: add a real llama.cpp engine on the CPU.")] = None,
) -> None:
    """Run everything on this machine: gateway, simulated engines, router, ledger, tenants and a minute of traffic."""
    import psutil

    from billing.errors import BillingError
    from controlplane.adapters.demo import DemoOptions, run
    from controlplane.errors import GatewayError, UsageError

    options = DemoOptions(
        data_dir, port, duration_s, speed, engine is not None, keep, exit_after, as_json, psutil.Process().create_time()
    )
    try:
        _check(engine, duration_s, speed)
        status = run(options)
    except UsageError as fault:
        typer.echo(str(fault), err=True)
        raise typer.Exit(2) from None
    except (GatewayError, BillingError) as fault:
        typer.echo(str(fault), err=True)
        raise typer.Exit(1) from None
    except OSError as fault:
        typer.echo(f"data_dir {data_dir}: {fault.strerror or fault}.", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)


def _check(engine: str | None, duration_s: float, speed: float) -> None:
    """Raise UsageError for what the settings do not check."""
    from controlplane.config import check_range
    from controlplane.errors import UsageError

    if engine not in (None, "llama"):
        raise UsageError(f"--engine is {engine!r}; expected llama.")
    check_range("--duration-s", duration_s, 1, _MAX_DURATION_S)
    check_range("--speed", speed, 0.1, _MAX_SPEED)


def redis_process(folder: Annotated[Path, typer.Option("--folder", help="Folder of the server.")]) -> None:
    """Keep the embedded Redis of a folder running until SIGTERM; started by `demo`."""
    import signal
    import threading

    from controlplane.adapters.embedded import EmbeddedRedis
    from controlplane.errors import ConfigError

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = EmbeddedRedis(folder)
    try:
        server.start()
        print(json.dumps({"url": server.url}), flush=True)
        while not stop.wait(_REDIS_POLL_S):
            if server.poll() is not None:
                server.start()
                print("The embedded Redis ended and was started again.", flush=True)
    except ConfigError as fault:
        typer.echo(str(fault), err=True)
        raise typer.Exit(1) from None
    finally:
        server.stop()
