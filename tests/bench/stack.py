"""Our side of the gateway benchmark: the product as it is run, with everything on.

Owns: a fresh data folder with 200 keys and their limits, a price book and eight engines; `inferplane serve` and
`inferplane worker` on it; waiting for the books; `bill reconcile`. Does not own: any load.

Where things run: the gateway process is moved to its core when it answers; everything else of the node (supervisor,
shipper, Redis, worker) stays on the load's core, beside the stub and the clients. SQLite, Redis and the spool lie in
the data folder, which must be on a real disk: the spool calls fdatasync.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from billing.adapters import books_sql, sql
from billing.adapters.shipper_status import read_status
from billing.pricing import DEFAULT_TIER, PriceBook, Sku
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import KeyWish, LimitWish
from controlplane.config import Settings, load_settings
from tests.bench.machine import Affinity, BenchError, favour, pin, resident_mb, tree
from tests.bench.native import Stub

# 20 tenants of ten keys.
ORG_COUNT, KEYS_PER_ORG = 20, 10
# Limits per minute of each key, and tenfold of each org: finite, so that every request is counted against eight, and
# beyond what one core can send.
_KEY_LIMITS = (
    ("requests", 5_000_000),
    ("input_tokens", 5_000_000_000),
    ("output_tokens", 5_000_000_000),
    ("concurrency", 5_000),
)
_ORG_FACTOR = 10
_PRICES = {Sku.INPUT: 200_000, Sku.CACHED_INPUT: 50_000, Sku.OUTPUT: 600_000}
_START_S, _STOP_S, _DRAIN_S = 60.0, 45.0, 300.0


@dataclass(frozen=True, slots=True)
class Node:
    """Our node as it runs."""

    port: int
    gateway_pid: int
    side_pids: tuple[int, ...]
    """Supervisor, shipper, Redis and worker."""
    data_dir: Path
    database_url: str
    keys_file: Path
    start_s: float
    idle_mb: float

    @property
    def spool_dir(self) -> Path:
        """Where usage waits for the shipper."""
        return self.data_dir / "spool"


@dataclass(frozen=True, slots=True)
class NodeWish:
    """What to start."""

    folder: Path
    model: str
    database_url: str = ""


@contextmanager
def node(wish: NodeWish, engines: Stub, affinity: Affinity) -> Iterator[Node]:
    """Our node with everything on. Raises BenchError."""
    data_dir = wish.folder / "inferplane"
    data_dir.mkdir(parents=True)
    settings = load_settings({"data_dir": data_dir, "database_url": wish.database_url})
    keys_file = wish.folder / "keys.txt"
    _make_tenants(settings, wish.model, keys_file)
    endpoints = wish.folder / "engines.json"
    listed = [
        {"id": f"engine-{number}", "url": f"http://127.0.0.1:{port}", "model": wish.model, "kind": "vllm"}
        for number, port in enumerate(engines.ours, 1)
    ]
    endpoints.write_text(json.dumps(listed))
    me = [*affinity.load, sys.executable, "-m", "controlplane"]
    env = _environment(data_dir, wish.database_url)
    argv = [*me, "serve", "--endpoints", str(endpoints), "--port", "0", "--json"]
    with (wish.folder / "node.log").open("wb") as log:
        began_s = time.monotonic()
        serve = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            port = _announced_port(serve, wish.folder / "node.log")
            gateway_pid = _await_gateway(serve, port)
            start_s = time.monotonic() - began_s
            pin(gateway_pid, affinity.gateway_core)
            worker = subprocess.Popen([*me, "worker"], env=env, stdout=log, stderr=log, start_new_session=True)
            try:
                time.sleep(3.0)  # the worker's first tasks, and caches that are filled once
                if worker.poll() is not None:
                    raise BenchError(f"`inferplane worker` ended with status {worker.returncode}; see {log.name}.")
                favour([*tree(serve.pid), *tree(worker.pid)], affinity.nice)
                sides = {*tree(serve.pid), *tree(worker.pid)} - {gateway_pid}
                idle_mb = resident_mb([gateway_pid])
                yield Node(
                    port, gateway_pid, tuple(sorted(sides)), data_dir, wish.database_url, keys_file, start_s, idle_mb
                )
            finally:
                _stop(worker)
        finally:
            _stop(serve)
            assert serve.stdout is not None
            serve.stdout.close()


def _environment(data_dir: Path, database_url: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("INFERPLANE_")}
    ours.pop("PYTHONDONTWRITEBYTECODE", None)
    named = {"DATA_DIR": str(data_dir), "DATABASE_URL": database_url, "ACCESS_LOG": ""}  # the peers write none either
    return {**ours, **{f"INFERPLANE_{name}": value for name, value in named.items()}}


def _make_tenants(settings: Settings, model: str, keys_file: Path) -> None:
    sql.upgrade(settings.sql_url)
    engine = sql.engine(settings.sql_url)
    try:
        keys = KeyStore(engine, load_pepper(settings), actor="bench")
        catalog = CatalogStore(keys.db)
        secrets = []
        for number in range(ORG_COUNT):
            org = keys.create_org(f"org-{number}").record
            project = keys.create_project(org.org_id, "default").record
            for dimension, amount in _KEY_LIMITS:
                catalog.set_limit(LimitWish("org", org.org_id, dimension, amount * _ORG_FACTOR))
            for _ in range(KEYS_PER_ORG):
                made = keys.create_key(project.project_id, KeyWish("bench"))
                assert made.secret is not None
                secrets.append(made.secret)
                for dimension, amount in _KEY_LIMITS:
                    catalog.set_limit(LimitWish("key", made.key_id, dimension, amount))
        prices = {(model, DEFAULT_TIER, sku): price for sku, price in _PRICES.items()}
        books_sql.add_book(engine, PriceBook("bench", "USD", 0, prices, None, note="benchmark"), retroactive=True)
    finally:
        engine.dispose()
    keys_file.touch(mode=0o600)
    keys_file.write_text("".join(f"{secret}\n" for secret in secrets))


def _announced_port(serve: subprocess.Popen[str], log: Path) -> int:
    assert serve.stdout is not None
    said = serve.stdout.readline()
    if not said:
        raise BenchError(f"`inferplane serve` ended with status {serve.wait()}; see {log}.")
    return int(str(json.loads(said)["url"]).rpartition(":")[2])


def _await_gateway(serve: subprocess.Popen[str], port: int) -> int:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and serve.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5.0, trust_env=False).status_code == 200:
                return _gateway_pid(serve.pid)
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise BenchError(f"Our gateway was not ready within {_START_S:g} s (serve: {serve.poll()}).")


def _gateway_pid(serve_pid: int) -> int:
    children = psutil.Process(serve_pid).children(recursive=True)
    found = [child.pid for child in children if "gateway-process" in child.cmdline()]
    if len(found) != 1:
        raise BenchError(f"One gateway process was expected below `inferplane serve`; there are {len(found)}.")
    return found[0]


def _stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def await_books(running: Node, timeout_s: float = _DRAIN_S) -> float:
    """Wait until the shipper has committed all usage. Returns the seconds that it took. Raises BenchError."""
    began_s = time.monotonic()
    asked_ns = time.time_ns()
    while time.monotonic() < began_s + timeout_s:
        status = read_status(running.spool_dir)
        fresh = status is not None and status.updated_ns > asked_ns + 50_000_000
        if status is not None and fresh and status.lag_events == status.lag_bytes == status.open_count == 0:
            return time.monotonic() - began_s
        time.sleep(0.1)
    raise BenchError(f"The shipper has not caught up within {timeout_s:g} s: {read_status(running.spool_dir)}.")


def reconcile(running: Node, engines: Stub) -> dict[str, Any]:
    """What `inferplane bill reconcile --json` says with the spool and the engines' own counters."""
    argv = [sys.executable, "-m", "controlplane", "bill", "reconcile", "--json", "--spool", str(running.spool_dir)]
    for number, port in enumerate(engines.ours, 1):
        argv += ["--engine-counters", f"engine-{number}=http://127.0.0.1:{port}/metrics"]
    env = _environment(running.data_dir, running.database_url)
    made = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=600)
    if not made.stdout.strip():
        raise BenchError(f"`bill reconcile` ended with status {made.returncode}: {made.stderr.strip()[-300:]}")
    report: dict[str, Any] = json.loads(made.stdout)
    return report


def engine_requests(ports: tuple[int, ...]) -> int:
    """Completions that the stub answered on these ports."""
    total = 0
    for port in ports:
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0, trust_env=False).text
        total += sum(int(line.split()[1]) for line in page.splitlines() if line.startswith("stub_requests_total{"))
    return total


def alive(running: Node) -> bool:
    """Whether the gateway process is still the one that was started."""
    try:
        return "gateway-process" in psutil.Process(running.gateway_pid).cmdline()
    except psutil.NoSuchProcess:
        return False
