"""A whole gateway node as a tenant meets it: `controlplane serve` in processes of its own, before scripted engines.

Owns: starting and stopping the node, its tenants, reading the usage that its spool holds, and the engines of a test
session (`Engines`, in a thread with a loop of its own, so that tests may block). Does not own: any check.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from billing.adapters import books_sql, sql
from billing.adapters.reconcile_inputs import spooled_events
from billing.adapters.spool_files import segments, spool_folders
from billing.pricing import DEFAULT_TIER, PriceBook, Sku
from billing.spool_format import Damage, Fold, Scanner
from billing.usage_event import UsageEvent
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import KeyWish, LimitWish
from controlplane.config import Settings
from tests.fakes.engine_scripts import Script, Truth
from tests.fakes.scripted_engine import ScriptedEngine

T = TypeVar("T")

# Everything of the second kind the tests wait for comes within this on a machine with two busy cores.
WAIT_S = 20.0
# Micro-USD per 1,000,000 tokens.
PRICES = {Sku.INPUT: 200_000, Sku.CACHED_INPUT: 50_000, Sku.OUTPUT: 600_000}
FRESH_MODELS = tuple(f"fresh-{number}" for number in range(80))
MODELS = ("m", "solo", "lc", "keyed", "dead", "hole", "tiny", *FRESH_MODELS)
_VALID_FROM_NS = 1_735_689_600 * 10**9


def eventually(holds: Callable[[], T | bool | None], what: str, within_s: float = WAIT_S) -> T:
    """The first true value of `holds`; fails after `within_s`."""
    until_s = time.monotonic() + within_s
    while True:
        found = holds()
        if found:
            return found  # type: ignore[return-value] # true values are T by the signature's intent
        assert time.monotonic() < until_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.02)


def http_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.Client:
    """A client that reads no environment and loads no certificates (30 ms each time, and all is plain HTTP here)."""
    return httpx.Client(base_url=url, headers=headers, verify=False, trust_env=False, timeout=30)


class TestEngine(ScriptedEngine):
    """A scripted engine that also knows scripts whose answer depends on which engine was asked first.

    `"user": "once:KEY|FIRST|SECOND"` plays FIRST on the engine that is the first to be asked for KEY (also when the
    gateway's client sends once more, on a fresh connection), SECOND on every other.
    """

    __test__ = False

    def __init__(self, name: str, asked: dict[str, str], models: Sequence[str]) -> None:
        super().__init__(models=models)
        self.name = name
        self._asked = asked

    def script_for(self, truth: Truth) -> Script:
        """The script that this request asks for."""
        try:
            user = json.loads(truth.body).get("user", "") if truth.body else ""
        except ValueError:
            user = ""
        if isinstance(user, str) and user.startswith("once:"):
            key, first, second = user.removeprefix("once:").split("|")
            played = first if self._asked.setdefault(key, self.name) == self.name else second
            body = json.loads(truth.body)
            stand_in = Truth(truth.number, truth.received_ns, truth.method, truth.target, truth.headers,
                             json.dumps({**body, "user": f"script:{played}"}).encode())  # fmt: skip
            return super().script_for(stand_in)
        return super().script_for(truth)


class Engines:
    """Scripted engines on a loop of their own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        self.by_name: dict[str, TestEngine] = {}
        self._asked: dict[str, str] = {}

    def call(self, work: Any) -> Any:
        """Run a coroutine on the engines' loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def add(self, name: str, *models: str) -> TestEngine:
        """Start an engine."""
        engine = self.by_name[name] = TestEngine(name, self._asked, models)
        self.call(engine.start())
        return engine

    def truths(self, *names: str) -> list[tuple[str, Truth]]:
        """(engine, request) of inference requests, of the named engines or all."""
        return [
            (name, truth)
            for name, engine in self.by_name.items()
            if not names or name in names
            for truth in list(engine.truths)
            if truth.method == "POST"
        ]

    def of_request(self, request_id: str) -> list[tuple[str, Truth]]:
        """What the engines know of one request of the gateway, in order."""
        found = [
            (name, truth)
            for name, truth in self.truths()
            if ("x-request-id", request_id) in [(key.lower(), value) for key, value in truth.headers]
        ]
        return sorted(found, key=lambda pair: pair[1].received_ns)

    def truth(self, request_id: str) -> Truth:
        """The one attempt of a request, once it has ended at the engine."""

        def ended() -> Truth | None:
            found = self.of_request(request_id)
            return found[0][1] if len(found) == 1 and found[0][1].ended else None

        return eventually(ended, f"one ended attempt of {request_id}")

    def stop(self) -> None:
        """Stop the engines and the loop."""
        for engine in self.by_name.values():
            self.call(engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


@dataclass(frozen=True)
class Tenant:
    """An org with one project and one key."""

    org_id: str
    project_id: str
    key_id: str
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        """The caller's authorization."""
        return {"authorization": f"Bearer {self.secret}"}


ALL_SCOPES = ("inference", "usage:read", "explain")


class Tenants:
    """Makes tenants straight in the database, as the admin commands do."""

    def __init__(self, settings: Settings) -> None:
        self._engine = sql.engine(settings.sql_url)
        self.keys = KeyStore(self._engine, load_pepper(settings), actor="test")
        self.catalog = CatalogStore(self.keys.db)
        self._count = 0

    def add_prices(self, models: Sequence[str]) -> None:
        """One price book for everybody."""
        prices = {(model, DEFAULT_TIER, sku): price for model in models for sku, price in PRICES.items()}
        books_sql.add_book(self._engine, PriceBook("test", "USD", _VALID_FROM_NS, prices, None), retroactive=True)

    def tenant(self, *, scopes: Sequence[str] = ALL_SCOPES, models: Sequence[str] | None = None,
               expires_s: int | None = None, limits: Mapping[str, int] | None = None) -> Tenant:  # fmt: skip
        """A new org with a key; `limits` are of the org, per minute, by dimension."""
        self._count += 1
        org = self.keys.create_org(f"org-{self._count}-{os.urandom(4).hex()}").record
        project = self.keys.create_project(org.org_id, "p").record
        for dimension, amount in (limits or {}).items():
            self.catalog.set_limit(LimitWish("org", org.org_id, dimension, amount))
        wish = KeyWish("k", tuple(scopes), tuple(models) if models is not None else None, expires_s)
        made = self.keys.create_key(project.project_id, wish)
        assert made.secret is not None
        return Tenant(org.org_id, project.project_id, made.key_id, made.secret)

    def admin(self) -> str:
        """The secret of an admin key."""
        secret = self.keys.bootstrap_admin(force=True).secret
        assert secret is not None
        return secret

    def close(self) -> None:
        """Let the database go."""
        self._engine.dispose()


@dataclass
class Node:
    """A running `controlplane serve`."""

    process: subprocess.Popen[bytes]
    url: str
    data_dir: Path
    settings: Settings
    tenants: Tenants
    admin_secret: str
    log: Path
    first_secret: str | None = None
    extra_env: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def address(self) -> tuple[str, int]:
        """The same for a socket."""
        return "127.0.0.1", self.port

    @property
    def endpoints_file(self) -> Path:
        """The file of its engines."""
        return self.data_dir / "endpoints.json"

    def write_endpoints(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the list of engines, atomically."""
        fresh = self.endpoints_file.with_suffix(".new")
        fresh.write_text(json.dumps(list(rows)))
        fresh.replace(self.endpoints_file)

    def ready(self) -> dict[str, Any] | None:
        """What one of the workers says of itself; None while nobody answers."""
        try:
            with http_client(self.url) as client:
                answer = client.get("/readyz")
        except httpx.TransportError:
            return None
        found: dict[str, Any] = answer.json()
        return found

    def workers(self) -> list[psutil.Process]:
        """The gateway processes."""
        return [
            child for child in psutil.Process(self.process.pid).children(recursive=True)
            if "gateway-process" in " ".join(_command(child))
        ]  # fmt: skip

    def events(self, request_id: str) -> list[UsageEvent]:
        """The closed events of one request that the spool holds, by attempt. At once: the close comes before the last
        byte.
        """
        found = [event for event in self.all_events() if event.open.request_id == request_id]
        return sorted(found, key=lambda event: event.open.attempt)

    def event(self, request_id: str) -> UsageEvent:
        """The one event of a request, within the time that an abandoned one takes to be closed."""
        found = eventually(lambda: self.events(request_id), f"an event of {request_id}", 5.0)
        assert len(found) == 1, found
        return found[0]

    def open_count(self) -> int:
        """Attempts that are open, over all workers."""
        found = 0
        for folder in spool_folders(self.settings.spool_dir):
            fold = Fold()
            for number in segments(folder):
                with contextlib.suppress(FileNotFoundError):
                    for item in Scanner().feed((folder / f"{number:08d}.seg").read_bytes()):
                        if not isinstance(item, Damage):
                            fold.add(item.value)
            found += fold.open_count
        return found

    def all_events(self) -> list[UsageEvent]:
        """Every closed event in the spool."""
        return [event for event in spooled_events(self.settings.spool_dir) if not isinstance(event, Damage)]

    def events_of(self, tenant: Tenant) -> list[UsageEvent]:
        """The tenant's events that the spool holds."""
        return [event for event in self.all_events() if event.open.org_id == tenant.org_id]

    def log_text(self) -> str:
        """What the node's processes said."""
        return self.log.read_text(errors="replace")

    def stop(self, within_s: float = WAIT_S) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()
            raise


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def endpoint(engine: ScriptedEngine, name: str, models: Sequence[str], **more: Any) -> dict[str, Any]:
    """One row of the endpoints file."""
    return {"id": name, "url": f"http://127.0.0.1:{engine.port}", "kind": "vllm", "models": list(models), **more}


@contextmanager
def running_node(
    data_dir: Path,
    rows: Sequence[Mapping[str, Any]],
    env: Mapping[str, str],
    *,
    database_url: str = "",
    prepare: Callable[[Tenants], None] = lambda tenants: None,
) -> Iterator[Node]:
    """A node of two workers that is ready, stopped at the end. Tenants made by `prepare` are known from the start."""
    data_dir.mkdir(parents=True, exist_ok=True)
    settings = Settings(data_dir=data_dir, database_url=database_url)
    sql.upgrade(settings.sql_url)
    tenants = Tenants(settings)
    try:
        tenants.add_prices(MODELS)
        admin = tenants.admin()
        prepare(tenants)
        node = Node(None, "", data_dir, settings, tenants, admin, data_dir / "node.log")  # type: ignore[arg-type] # set below
        node.write_endpoints(rows)
        arguments = ["--endpoints", str(node.endpoints_file), "--data-dir", str(data_dir)]
        start(node, [*arguments, "--workers", "2"], {**env, "INFERPLANE_DATABASE_URL": database_url})
        try:
            yield node
        finally:
            node.stop()
    finally:
        tenants.close()


def start(node: Node, arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Start `serve` and wait until it is ready."""
    argv = [sys.executable, "-m", "controlplane", "serve", "--port", "0", "--json", *arguments]
    with node.log.open("ab") as log:
        node.process = subprocess.Popen(
            argv, env={**os.environ, "INFERPLANE_ACCESS_LOG": "", **env}, stdout=subprocess.PIPE, stderr=log
        )
    assert node.process.stdout is not None
    line = node.process.stdout.readline()
    node.process.stdout.close()
    if not line:
        node.process.wait(WAIT_S)
        raise AssertionError(f"serve did not start: {node.log_text()}")
    said = json.loads(line)
    node.url, node.first_secret = said["url"], said["key"]
    eventually(lambda: (node.ready() or {}).get("ready"), f"readiness of {node.url}: {node.log_text()[-2000:]}")
