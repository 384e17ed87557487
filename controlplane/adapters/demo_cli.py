"""`inferplane demo`: its options, and the process of its Redis.

Owns: options and exit codes (0 done, 1 with one sentence, 2 wrong usage), and the hidden `redis-process`. Does not own:
what the demo does (`demo`). Heavy imports stand inside the commands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

# How often the embedded Redis is looked at by the process that keeps it.
_REDIS_POLL_S = 0.1


def register(app: typer.Typer) -> None:
    """Add `demo` and the hidden `redis-process`."""
    app.command("redis-process", hidden=True)(redis_process)


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
