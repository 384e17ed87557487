"""One gateway node per test session, with engines, tenants, and the proof that its books are exact.

Owns: the node that most tests of this folder share. Its deadlines are short, its bodies small, its drain quick; tests
that stop or break a node start their own (`stack.running_node`).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from billing.adapters import reconcile_sql, sql
from billing.adapters.reconcile_sql import ReconcileOptions
from billing.pricing import Sku
from billing.usage_event import UsageEvent
from tests.integration.gateway.client import Caller
from tests.integration.gateway.stack import (
    FRESH_MODELS,
    PRICES,
    Engines,
    Node,
    Tenant,
    Tenants,
    endpoint,
    eventually,
    http_client,
    running_node,
)
from tests.services import temporary_folder

ENGINE_KEY = "sk-of-the-engine"
MAX_BODY_BYTES = 4 * 1024 * 1024
ENV = {
    "INFERPLANE_CONNECT_TIMEOUT_S": "1",
    "INFERPLANE_FIRST_BYTE_TIMEOUT_S": "2",
    "INFERPLANE_IDLE_TIMEOUT_S": "2.5",
    "INFERPLANE_TOTAL_TIMEOUT_S": "6",
    "INFERPLANE_DRAIN_LEAD_S": "0",
    "INFERPLANE_DRAIN_TIMEOUT_S": "1",
    "INFERPLANE_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
    "INFERPLANE_ENDPOINTS_POLL_S": "0.1",
    "TEST_ENGINE_KEY": ENGINE_KEY,
}


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """Two engines of model `m`, and one for each special role."""
    made = Engines()
    for name, model in (("e1", "m"), ("e2", "m"), ("solo", "solo"), ("lc", "lc"), ("keyed", "keyed"),
                        ("left", "-"), ("right", "-")):  # fmt: skip
        made.add(name, model)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def hole() -> Iterator[int]:
    """A port whose connections are never accepted: its queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        for _ in range(3):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            waiting.append(one)
        yield listener.getsockname()[1]
        for one in waiting:
            one.close()


def standard_rows(engines: Engines, hole_port: int) -> list[dict[str, Any]]:
    """The endpoints of the shared node."""
    by = engines.by_name
    return [
        endpoint(by["e1"], "e1", ["m"]),
        endpoint(by["e2"], "e2", ["m"]),
        endpoint(by["solo"], "solo", ["solo"]),
        endpoint(by["lc"], "lc", ["lc"], kind="llamacpp"),
        endpoint(by["keyed"], "keyed", ["keyed"], api_key_env="TEST_ENGINE_KEY"),
        {"id": "dead", "url": "http://127.0.0.1:1", "kind": "vllm", "models": ["dead"]},
        {"id": "hole", "url": f"http://127.0.0.1:{hole_port}", "kind": "vllm", "models": ["hole"]},
        *(
            {**endpoint(by[side], f"{model}-{side}", [model]), "url": f"http://127.0.0.1:{by[side].port}/{model}"}
            for model in FRESH_MODELS for side in ("left", "right")
        ),
    ]  # fmt: skip


class People:
    """The tenants of the shared node, known to it from its start."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tenant] = {}

    def prepare(self, tenants: Tenants) -> None:
        """Make them."""
        made = self.by_name
        made["plain"] = tenants.tenant()
        made["other"] = tenants.tenant()
        made["reader"] = tenants.tenant(scopes=("usage:read",))
        made["inference only"] = tenants.tenant(scopes=("inference",))
        made["only solo"] = tenants.tenant(models=("solo",))
        made["expired"] = tenants.tenant(expires_s=1)
        made["to revoke"] = tenants.tenant()
        made["3 requests"] = tenants.tenant(limits={"requests": 3})
        made["2 requests"] = tenants.tenant(limits={"requests": 2})
        for name in ("100 output", "100 output again"):
            made[name] = tenants.tenant(limits={"output_tokens": 100})
        made["1000 input"] = tenants.tenant(limits={"input_tokens": 1_000, "requests": 50})
        for name in ("cap 2", "cap 2 again"):
            made[name] = tenants.tenant(limits={"concurrency": 2})
        made["cap 1"] = tenants.tenant(limits={"concurrency": 1})

    def __getitem__(self, name: str) -> Tenant:
        return self.by_name[name]


@pytest.fixture(scope="session")
def shared(engines: Engines, hole: int) -> Iterator[tuple[Node, People]]:
    """The node on SQLite and the embedded Redis, two workers."""
    people = People()
    with temporary_folder() as folder:
        with running_node(folder / "node", standard_rows(engines, hole), ENV, prepare=people.prepare) as node:
            yield node, people
            # every fault that the tests provoke is a value: nothing of it may look like a defect in the log
            said = node.log_text()
        assert node.process.returncode == 0
        assert "Traceback" not in said, said[-4_000:]


@pytest.fixture(scope="module")
def node(shared: tuple[Node, People]) -> Iterator[Node]:
    """The shared node; when the module is over, its books are proven exact."""
    yield shared[0]
    assert_books_exact(shared[0])


@pytest.fixture(scope="session")
def people(shared: tuple[Node, People]) -> People:
    """Its tenants."""
    return shared[1]


@pytest.fixture(scope="session")
def _unused_models() -> list[str]:
    return list(FRESH_MODELS)


@pytest.fixture
def fresh(_unused_models: list[str]) -> str:
    """A model on two endpoints (engines `left` and `right`) of which the routers know nothing bad yet."""
    return _unused_models.pop()


@pytest.fixture
def caller(node: Node, people: People) -> Caller:
    """A tenant without limits."""
    return Caller(node, people["plain"])


def assert_books_exact(node: Node) -> None:
    """The usage API and `bill reconcile` agree with the spool's events, to the token and the picodollar."""
    eventually(lambda: not node.open_count(), "every attempt closed")
    spooled = node.all_events()
    by_project: dict[str, list[UsageEvent]] = {}
    for event in spooled:
        if event.close.billable:
            by_project.setdefault(event.open.project_id, []).append(event)
    wanted = {project: expected_usage(events) for project, events in by_project.items()}
    eventually(lambda: usage_by_project(node) == wanted, "the usage of every project in the API")
    engine = sql.engine(node.settings.sql_url)
    try:
        report = reconcile_sql.reconcile(engine, ReconcileOptions(node.settings.spool_dir))
    finally:
        engine.dispose()
    assert report.exact, report
    assert report.spool_event_count == len(spooled)
    assert report.event_count >= len(spooled)
    assert report.quarantined_count == 0
    total = sum(pico_of(event) for event in spooled if event.close.billable)
    wanted_totals = {"events": total, "ledger": total, "rollups": total}
    assert report.totals == ({"USD": wanted_totals} if total else {})


def expected_usage(events: list[UsageEvent]) -> dict[str, int]:
    """What the usage API must say of billable events."""
    closes = [event.close for event in events]
    return {
        "input_uncached_tokens": sum(close.uncached_input_tokens or 0 for close in closes),
        "input_cached_tokens": sum(close.cached_input_tokens or 0 for close in closes),
        "output_tokens": sum(close.output_tokens or 0 for close in closes),
        "num_model_requests": len(closes),
        "num_requests_estimated": sum(close.estimated for close in closes),
    }


def usage_by_project(node: Node) -> dict[str, dict[str, int]]:
    """What the usage API says of every project today (and yesterday, around midnight)."""
    with http_client(node.url, {"authorization": f"Bearer {node.admin_secret}"}) as client:
        since_s = int(time.time()) - 86_400
        asked: dict[str, str | int] = {"start_time": since_s, "bucket_width": "1d", "group_by": "project_id"}
        answer = client.get("/admin/v1/usage", params=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, dict[str, int]] = {}
    for bucket in answer.json()["data"]:
        for result in bucket["results"]:
            sums = found.setdefault(result["project_id"], {})
            for name in expected_usage([]):
                sums[name] = sums.get(name, 0) + (result[name] or 0)
    return found


def reconcile(node: Node) -> dict[str, Any]:
    """`inferplane bill reconcile` as a person runs it, where the node is not shared and one start more is cheap."""
    command = [sys.executable, "-m", "controlplane", "bill", "reconcile", "--json",
               "--data-dir", str(node.data_dir), "--spool", str(node.settings.spool_dir)]  # fmt: skip
    if node.settings.database_url:
        command += ["--database-url", node.settings.database_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def pico_of(event: UsageEvent) -> int:
    """What an event costs by the test's price book."""
    close = event.close
    return (
        (close.uncached_input_tokens or 0) * PRICES[Sku.INPUT]
        + (close.cached_input_tokens or 0) * PRICES[Sku.CACHED_INPUT]
        + (close.output_tokens or 0) * PRICES[Sku.OUTPUT]
    )


@pytest.fixture
def data_folder() -> Iterator[Path]:
    """A folder for a node of one test's own."""
    with temporary_folder() as folder:
        yield folder
