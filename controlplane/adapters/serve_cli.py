"""`inferplane serve` and the process it starts per worker.

Owns: options, what is said at the start, exit codes. Does not own: the steps (`node`), the children (`processes`), or
the gateway (`app`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from controlplane.adapters.node import FirstAnswer
    from controlplane.config import Settings


def register(app: typer.Typer) -> None:
    """Add `serve`, `worker` and `demo`, and the hidden commands of the processes they start."""
    from controlplane.adapters import demo_cli, worker_cli

    worker_cli.register(app)
    demo_cli.register(app)
    app.command("serve")(serve)
    app.command("gateway-process", hidden=True)(gateway_process)


def serve(  # noqa: PLR0913 - each is an option of the command
    *,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", help="URL of an engine; repeat for more. Enough to try one.")
    ] = None,
    endpoints: Annotated[
        Path | None, typer.Option("--endpoints", help="File of engines, re-read when it changes.")
    ] = None,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            "--tokenizer",
            help="MODEL=FOLDER or MODEL=engine: hear where this model's engines keep which KV; repeat for more.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    workers: Annotated[int | None, typer.Option(help="Gateway processes that share the port.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of everything embedded.")] = None,
    access_log: Annotated[str | None, typer.Option(help="`-` standard output, empty off, else a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say what was started as one JSON line.")] = False,
) -> None:
    """Run the gateway of this node: OpenAI-compatible API, admin API, health and metrics."""
    from controlplane.adapters import node
    from controlplane.config import load_settings, tokenizer_sources
    from controlplane.errors import GatewayError, UsageError

    chosen = {
        "endpoints_file": endpoints, "host": host, "port": port, "workers": workers, "data_dir": data_dir,
        "access_log": access_log, "tokenizers": ",".join(tokenizer) if tokenizer else None,
    }  # fmt: skip
    try:
        settings = load_settings({name: value for name, value in chosen.items() if value is not None})
        if engine and settings.endpoints_file is not None:
            typer.echo("Give --engine or --endpoints, not both.", err=True)
            raise typer.Exit(2)
        if not engine and settings.endpoints_file is None:
            typer.echo("No engine: give --engine URL or --endpoints FILE.", err=True)
            raise typer.Exit(2)
        node.check_host(settings.host)
        node.check_engines(engine or [])
        tokenizer_sources(settings.tokenizers, option=tokenizer is not None)
        node.check_access_log(settings.access_log, option=access_log is not None)
        if settings.endpoints_file is not None:
            node.check_endpoints(settings.endpoints_file)
        with node.held_folder(settings):
            status = _run_node(settings, engine or [], as_json)
    except GatewayError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error
    raise typer.Exit(status)


def _run_node(settings: Settings, engines: list[str], as_json: bool) -> int:
    """From the first check to the last child. The first key is made last: what fails before must not swallow it.

    What was started is announced once the port answers; a key that was made is shown also when it never does.
    """
    from controlplane.adapters import node
    from controlplane.adapters.processes import Supervisor

    supervisor = Supervisor(say=_say)
    redis_server = hello = None
    sock = node.listen(settings.host, settings.port)
    try:
        run_dir = node.prepare_folders(settings)
        if engines:
            settings = settings.model_copy(update={"endpoints_file": node.write_endpoints(settings, engines)})
        assert settings.endpoints_file is not None
        warnings = node.endpoint_warnings(settings.endpoints_file)
        redis_warning = node.redis_warning(settings)
        if redis_warning is not None:
            warnings.append(redis_warning)
        node.prepare_database(settings)
        redis_server = node.embedded_redis(settings)
        redis_url = redis_server.url if redis_server is not None else settings.redis_url.get_secret_value()
        first = node.first_key(settings)
        url = node.url_of(settings.host, sock.getsockname()[1])
        hello = _Hello(url, first.secret if first else None, as_json, node.FirstAnswer(sock))
        supervisor.install_signals()
        for child in node.gateway_children(settings, sock, node.child_env(settings, redis_url, run_dir), None):
            supervisor.start(child)
        for warning in warnings:
            _say(f"WARNING {warning}")
        keep = None if redis_server is None else node.redis_keeper(redis_server, _say)

        def tick() -> None:
            hello.look()
            if keep is not None:
                keep()

        return supervisor.run(tick)
    finally:
        if hello is not None:
            hello.leave()
        sock.close()  # the children hold it while they drain; nobody shall wait in a queue that no one serves
        supervisor.stop()
        if redis_server is not None:
            redis_server.stop()


def _say(line: str) -> None:
    typer.echo(line, err=True)


@dataclass(slots=True)
class _Hello:
    """Mutable: what is told once the port answers, and whether it was."""

    url: str
    key: str | None
    as_json: bool
    answer: FirstAnswer
    told: bool = False

    def look(self) -> None:
        """Tell it if the port answers by now; to be called now and then."""
        if not self.told and self.answer.look():
            self.told = True
            self._tell()

    def leave(self) -> None:
        """The end has come, maybe before the port ever answered: the key would be lost with it."""
        self.answer.close()
        if not self.told:
            self._tell_key()

    def _tell(self) -> None:
        if self.as_json:
            typer.echo(json.dumps({"url": self.url, "key": self.key}))
            return
        _say(f"Gateway:  {self.url}/v1")
        if self.key is None:
            _say("API key:  made earlier; another: inferplane keys create --project ORG/PROJECT")
        self._tell_key()
        _say(f"Health:   {self.url}/readyz   metrics: {self.url}/metrics   Ctrl-C stops.")

    def _tell_key(self) -> None:
        if self.key is not None:
            _say(f"API key:  {self.key}   (shown this once; org and project 'default', all scopes)")


def gateway_process(fd: Annotated[int, typer.Option("--fd", help="The listening socket, inherited.")]) -> None:
    """One gateway process; started by `serve`."""
    import asyncio
    import gc
    import logging
    import socket
    import sys

    import uvloop

    from controlplane.adapters.gateway_server import HEAD_TIMEOUT_S, ClientTimes, ServerOptions, build_server
    from controlplane.adapters.node import new_incarnation
    from controlplane.app import Gateway, ProcessFacts
    from controlplane.config import load_settings, run_dir
    from controlplane.errors import GatewayError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = load_settings({})
        gateway = Gateway(settings, ProcessFacts(new_incarnation(), run_dir(), settings.node))
    except GatewayError as error:
        sys.exit(str(error))
    idle_s = settings.idle_timeout_s
    times = ClientTimes(head_s=min(HEAD_TIMEOUT_S, idle_s), body_s=idle_s)
    server = build_server(gateway, ServerOptions(gateway.drain, settings.drain_lead_s, settings.drain_timeout_s, times))
    sock = socket.socket(fileno=fd)
    # Measured on a pass-through of this shape: fewer full collections take the p99 at 64 connections from 52 to 12 ms
    # (performance notes): the start-up heap leaves the collector's sight, and its thresholds rise.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[sock]))
    sys.exit(0 if server.started else 1)
