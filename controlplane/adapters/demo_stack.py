"""The processes of the demo, and where they listen.

Owns: how each child is started, reading the addresses that engines and Redis say in their logs, and the endpoints file
that the gateways follow. Does not own: keeping children alive (`processes`), a node's own processes (`node`), traffic.

An engine that died comes back on another port: it says so in its log, and the endpoints file names its new address. The
gateways then know it for another incarnation, whose cache and counters start empty.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from controlplane.adapters.processes import Child, Supervisor
from controlplane.config import Settings
from controlplane.errors import ConfigError

# The model and device that the engines simulate, by the names of the catalogue; the model is served by this name.
SIM_MODEL = "Llama-3.1-8B"
SIM_HARDWARE = "H100-SXM-80GB"
# A child that dies this soon after its first start will not live the next time either.
_ESSENTIAL_S = 20.0
# A start takes 1 to 3 s on two idle cores (measured); a loaded machine may need many times that.
START_DEADLINE_S = 60.0
# Where the demo's children differ from a server's: nobody balances load onto them, and Ctrl-C shall be quick.
_ENV = {
    "INFERPLANE_DRAIN_LEAD_S": "0",
    "INFERPLANE_DRAIN_TIMEOUT_S": "3",
    "INFERPLANE_ENDPOINTS_POLL_S": "0.1",
    "INFERPLANE_ACCESS_LOG": "",
}


@dataclass(slots=True)
class Announced:
    """Mutable: the newest address that a child said in its log."""

    name: str
    log: Path
    url: str = ""
    _offset_bytes: int = field(init=False)
    _rest: bytes = b""

    def __post_init__(self) -> None:
        self._offset_bytes = self.log.stat().st_size if self.log.exists() else 0

    def look(self) -> bool:
        """Read what was added to the log. True when the address is another one."""
        if not self.log.exists() or self.log.stat().st_size <= self._offset_bytes:
            return False
        with self.log.open("rb") as file:
            file.seek(self._offset_bytes)
            data = file.read()
        self._offset_bytes += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        before = self.url
        for line in lines:
            if line.startswith(b'{"url"'):
                self.url = str(json.loads(line)["url"])
        return self.url != before


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its line in the endpoints file, less the address, and how it is started."""

    endpoint: dict[str, Any]
    argv: Sequence[str]

    @property
    def name(self) -> str:
        """Its id."""
        return str(self.endpoint["id"])


def simulated_engines(count: int, speed: float, seed: int) -> list[Engine]:
    """Engines of one pool in two zones."""
    engines = []
    for number in range(1, count + 1):
        endpoint = {"id": f"sim-{number}", "model": SIM_MODEL, "kind": "sim", "pool": "demo", "zone": "ab"[number % 2]}
        if speed == 1:
            endpoint["accelerator"] = SIM_HARDWARE  # the router then knows its speed before the first request
        argv = [*_me(), "engine-sim", "--port", "0", "--json", "--arch", SIM_MODEL, "--hardware", SIM_HARDWARE]
        # The router has no reader of KV events yet: publishing them would cost the demo's two cores for nothing.
        argv += ["--speed", str(speed), "--seed", str(seed + number), "--drain-s", "1", "--no-kv-events"]
        engines.append(Engine(endpoint, argv))
    return engines


class Stack:
    """Mutable: the children of one demo under its supervisor. Call it from the main thread only (`follow_parent`)."""

    def __init__(self, supervisor: Supervisor, settings: Settings, lock: int) -> None:
        self.settings = settings
        self._supervisor = supervisor
        self._lock = lock
        self._logs = settings.data_dir / "logs"
        self._engines: dict[str, tuple[Engine, Announced]] = {}
        self._redis: Announced | None = None

    @property
    def endpoints_file(self) -> Path:
        """The file that the gateways follow."""
        return self.settings.data_dir / "engines.json"

    @property
    def redis_url(self) -> str:
        """The embedded Redis; empty until it has said where it listens."""
        return "" if self._redis is None else self._redis.url

    @property
    def engine_urls(self) -> dict[str, str]:
        """Address by engine, of those that have said one."""
        return {name: said.url for name, (_, said) in self._engines.items() if said.url}

    def start_redis(self) -> None:
        """Start the Redis that came with the product."""
        argv = [*_me(), "redis-process", "--folder", str(self.settings.data_dir / "redis")]
        self._redis = self._start(Child("redis", argv, {}, essential_s=_ESSENTIAL_S))

    def start_engines(self, engines: Sequence[Engine]) -> None:
        """Start engines; the endpoints file gets each when it listens."""
        for engine in engines:
            child = Child(engine.name, engine.argv, {}, essential_s=_ESSENTIAL_S, group="engines", stop_timeout_s=5.0)
            self._engines[engine.name] = (engine, self._start(child))
        self._write_endpoints()

    def start_gateways(self, sock: socket.socket, run_dir: Path) -> None:
        """Start the gateway processes and the shipper. Redis must have said where it listens."""
        from controlplane.adapters import node

        env = self._env(run_dir)
        for child in node.gateway_children(self.settings, sock, env, None):
            gateway = child.name.startswith("gateway")
            self._start(replace(child, group="front" if gateway else "", stop_timeout_s=10.0))

    def note_ready(self) -> None:
        """Requests are answered: whatever dies from now on is started again."""
        self._supervisor.note_ready()

    def start_worker(self, run_dir: Path) -> None:
        """Start the Celery worker with its beat."""
        argv = [*_me(), "worker"]
        child = Child("worker", argv, self._env(run_dir), essential_s=_ESSENTIAL_S, group="front", stop_timeout_s=10.0)
        self._start(child)

    def tick(self) -> None:
        """Restart what died and follow engines to their new addresses. Raises ConfigError when the whole must end."""
        fault = self._supervisor.watch()
        if fault is not None:
            raise ConfigError(f"{fault.rstrip('.')}.")
        if self._redis is not None and self._redis.look():
            self._supervisor.note_ready(self._redis.name)
        changed = [name for name, (_, said) in self._engines.items() if said.look()]
        if changed:
            self._supervisor.note_ready(*changed)
            self._write_endpoints()

    def await_redis(self) -> None:
        """Wait until Redis has said where it listens. Raises ConfigError."""
        until_s = time.monotonic() + START_DEADLINE_S
        while not self.redis_url and not self._supervisor.stopping:
            if time.monotonic() > until_s:
                raise ConfigError(f"redis did not start within {START_DEADLINE_S:g} s; its log is in {self._logs}.")
            self._supervisor.wait(0.02)
            self.tick()

    def _start(self, child: Child) -> Announced:
        log = self._log_of(child.name)
        said = Announced(child.name, log)
        self._supervisor.start(replace(child, log=log, pass_fds=(*child.pass_fds, self._lock)))
        return said

    def _log_of(self, name: str) -> Path:
        return self._logs / f"{name.replace(' ', '-')}.log"

    def _env(self, run_dir: Path) -> dict[str, str]:
        from controlplane.adapters import node

        settings = self.settings.model_copy(update={"endpoints_file": self.endpoints_file})
        return {**node.child_env(settings, self.redis_url, run_dir), **_ENV}

    def _write_endpoints(self) -> None:
        listed = [{**engine.endpoint, "url": said.url} for engine, said in self._engines.values() if said.url]
        fresh = self.endpoints_file.with_suffix(".new")
        fresh.write_text(json.dumps(listed, indent=1))
        fresh.replace(self.endpoints_file)


def _me() -> list[str]:
    return [sys.executable, "-m", "controlplane"]
