"""A node over its life: engines come and go, Redis and a worker are killed, it drains. One node, in this order.

Its tests stand on each other: the last one stops the node.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from billing.usage_event import Outcome
from tests.integration.gateway.client import (
    Caller,
    RawClient,
    assert_error,
    body,
    chunks,
    connected_to,
    head,
    holder,
    request,
    request_id,
)
from tests.integration.gateway.conftest import ENV, reconcile
from tests.integration.gateway.stack import (
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

DRAIN_S = 2.0


class Crowd:
    """The tenants of this node."""

    plain: Tenant
    limited: Tenant
    capped: Tenant

    def prepare(self, tenants: Tenants) -> None:
        """Make them."""
        self.plain = tenants.tenant()
        self.limited = tenants.tenant(limits={"requests": 100_000})
        self.capped = tenants.tenant(limits={"concurrency": 1})


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    return Crowd()


@pytest.fixture(scope="module")
def life(engines: Engines, crowd: Crowd) -> Iterator[Node]:
    """The node; ended by the last test, or here."""
    by = engines.by_name
    rows = [endpoint(by["e1"], "e1", ["m"]), endpoint(by["e2"], "e2", ["m"])]
    env = {**ENV, "INFERPLANE_DRAIN_LEAD_S": "0.5", "INFERPLANE_DRAIN_TIMEOUT_S": str(DRAIN_S)}
    with temporary_folder() as folder, running_node(folder / "node", rows, env, prepare=crowd.prepare) as node:
        yield node


@pytest.fixture
def plain(life: Node, crowd: Crowd) -> Caller:
    return Caller(life, crowd.plain)


def everywhere(life: Node, holds: Callable[[int, dict[str, Any]], bool], what: str) -> None:
    """`holds` of the status and the words of `/readyz` at every worker."""
    for worker in life.workers():
        with connected_to(life, worker) as raw:

            def agrees(raw: RawClient = raw) -> bool:
                answer = raw.send(head(None, None, path="/readyz", method="GET")).read_until(b'"endpoints_file"')
                while not answer.endswith(b"}"):
                    answer += raw.sock.recv(65_536)
                return holds(int(answer[9:12]), json.loads(answer.partition(b"\r\n\r\n")[2]))

            eventually(agrees, what, 10.0)


def test_an_engine_is_added_drained_and_given_another_key_while_it_runs(
    life: Node, plain: Caller, engines: Engines
) -> None:
    by = engines.by_name
    rows = [endpoint(by["e1"], "e1", ["m"]), endpoint(by["e2"], "e2", ["m"]), endpoint(by["solo"], "solo", ["added"])]
    assert_error(plain.post(body(model="added")), 404, "model_not_found")
    life.write_endpoints(rows)
    everywhere(life, lambda _, said: len(said["engines"]) == 3, "three engines everywhere")
    assert plain.post(body(model="added")).status_code == 200

    rows[0]["drain"] = True
    rows[2]["api_key_env"] = "TEST_ENGINE_KEY"
    life.write_endpoints(rows)
    everywhere(life, lambda _, said: said["engines"][0]["drain"], "e1 draining everywhere")
    answers = [plain.post(body(messages=[{"role": "user", "content": f"{n}"}])) for n in range(12)]
    assert {engines.of_request(answer.headers["x-request-id"])[0][0] for answer in answers} == {"e2"}
    keyed = plain.post(body(model="added"))
    sent = dict(engines.of_request(keyed.headers["x-request-id"])[0][1].headers)
    assert sent["authorization"] == f"Bearer {ENV['TEST_ENGINE_KEY']}", "the old facts of the endpoint are not kept"

    rows[0]["drain"] = False
    life.write_endpoints(rows)
    everywhere(life, lambda _, said: not said["engines"][0]["drain"], "e1 back everywhere")


@pytest.mark.parametrize("content", ["{not json", '[{"id": "e1"}]', '[{"id":"x","url":"http://h","colour":1}]', "[]x"])
def test_a_bad_endpoints_file_changes_nothing_and_is_shown(content: str, life: Node, plain: Caller) -> None:
    good = life.endpoints_file.read_text()
    life.endpoints_file.write_text(content)
    everywhere(life, lambda _, said: said["endpoints_file"] is not None, "the fault is shown")
    assert plain.post(body()).status_code == 200
    life.endpoints_file.write_text(good)
    everywhere(life, lambda _, said: said["endpoints_file"] is None, "the fault is gone")


def samples(life: Node) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of `/metrics`."""
    with http_client(life.url) as client:
        text = client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }  # fmt: skip


def sum_of(life: Node, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(value for (found, have), value in samples(life).items()
               if found == name and set(labels.items()) <= set(have))  # fmt: skip


def test_metrics_are_the_sum_over_the_workers(life: Node, plain: Caller) -> None:
    time.sleep(0.8)  # counts of the tests before are on their way: each worker writes its own every quarter of a second
    before = sum_of(life, "inferplane_requests_total", status="200", model="m")
    tokens = sum_of(life, "inferplane_tokens_total", model="m", kind="output")
    for worker in life.workers():
        with connected_to(life, worker) as raw:
            for n in range(10):
                raw.send(request(plain.tenant, body(stream=bool(n % 2))))
                raw.read_until(b"[DONE]" if n % 2 else b"}}")
    eventually(lambda: sum_of(life, "inferplane_requests_total", status="200", model="m") == before + 20, "20 counted")
    assert sum_of(life, "inferplane_tokens_total", model="m", kind="output") == tokens + 100
    names = {name for name, _ in samples(life)}
    assert {"inferplane_time_to_first_token_seconds_bucket", "inferplane_requests_in_flight"} <= names
    text = json.dumps([list(map(str, key)) for key in samples(life)])
    assert plain.tenant.org_id not in text, "no tenant is a label"


def test_the_loss_of_redis_stops_no_stream_and_only_who_has_limits_is_refused(
    life: Node, plain: Caller, crowd: Crowd
) -> None:
    redis = next(
        child for child in psutil.Process(life.process.pid).children(recursive=True) if "valkey" in child.name()
    )
    limited, capped = Caller(life, crowd.limited), Caller(life, crowd.capped)
    assert limited.post(body()).status_code == 200
    with RawClient(life) as raw:
        raw.send(request(crowd.capped, body("normal?tokens=60&gap_ms=30", stream=True), "connection: close"))
        raw.read_until(b"tok2 ")
        redis.suspend()  # killed at once it would be back before anybody had noticed
        try:
            refused = eventually(lambda: _unavailable(limited), "refusals without a store", 5)
            assert_error(refused, 503, "limits_unavailable")
            assert int(refused.headers["retry-after-ms"]) > 0
            assert plain.post(body()).status_code == 200, "no limits, no store"
            everywhere(life, lambda _, said: not said["limits"]["answering"], "it is shown")
            everywhere(life, lambda status, _: status == 200, "and stops nobody")
        finally:
            redis.kill()
        rest = raw.read_all()
    assert b"tok60 " in rest, "what ran went on"
    assert b"[DONE]" in rest
    eventually(lambda: limited.post(body()).status_code == 200, "the store is back", 15)
    eventually(lambda: capped.post(body()).status_code == 200, "the slot is back", 15)
    assert "the embedded Redis had died; it runs again" in life.log_text()


def _unavailable(caller: Caller) -> Any:
    answer = caller.post(body())
    return answer if answer.status_code == 503 else None


def test_a_killed_worker_is_replaced_and_what_it_had_delivered_is_billed(
    life: Node, plain: Caller, engines: Engines
) -> None:
    with RawClient(life) as raw:
        raw.send(request(plain.tenant, body("normal?tokens=500&gap_ms=5", stream=True)))
        got = raw.read_until(b"tok150 ")
        victim = holder(life, raw.sock.getsockname()[1])
        assert victim is not None
        before = {worker.pid for worker in life.workers()}
        os.kill(victim, signal.SIGKILL)
        got += raw.read_all()
    assert plain.post(body("normal")).status_code == 200, "the listening socket is the node's: the other takes it"
    eventually(lambda: len(life.workers()) == 2 and victim not in {one.pid for one in life.workers()}, "a new worker")
    assert len(before & {worker.pid for worker in life.workers()}) == 1
    crashed = eventually(lambda: event_rows(life, request_id(got)), "the settled event", 10)
    assert len(crashed) == 1
    event = crashed[0]
    assert (event["outcome"], event["estimated"], event["billable"]) == (Outcome.CRASHED, True, True)
    seen = got.count(b'"content":"tok')
    assert seen - 64 - 5 <= event["output_tokens"] <= seen + 1, "a checkpoint is at most 64 tokens behind delivery"
    assert event["uncached_input_tokens"] == 17
    truth = engines.of_request(request_id(got))[0][1]
    eventually(lambda: truth.ended == "client_closed", "the engine was let go")
    eventually(lambda: sum_of(life, "inferplane_requests_in_flight") == 0, "nothing of the dead worker in flight")


def event_rows(life: Node, wanted: str) -> list[dict[str, Any]]:
    """The stored events of a request."""
    import sqlalchemy as sa

    from billing.adapters import sql
    from billing.adapters.tables import UsageEventRow, table

    engine = sql.engine(life.settings.sql_url)
    try:
        rows = table(UsageEventRow)
        with sql.read(engine) as connection:
            found = connection.execute(sa.select(rows).where(rows.c.request_id == wanted)).mappings()
            return [dict(row) for row in found]
    finally:
        engine.dispose()


def serve_again(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Another `serve`, which is expected to end by itself."""
    command = [sys.executable, "-m", "controlplane", "serve", "--engine", "http://127.0.0.1:1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_node_on_the_port_or_the_folder_is_told_so_in_one_sentence(life: Node, tmp_path: Path) -> None:
    taken = serve_again("--port", str(life.port), "--data-dir", str(tmp_path / "new"))
    assert (taken.returncode, taken.stdout) == (1, "")
    assert taken.stderr.startswith(f"port {life.port} on 127.0.0.1 cannot be used: ")
    assert taken.stderr.count("\n") == 1
    assert not (tmp_path / "new" / "inferplane.db").exists(), "nothing was made, so no first key is lost"
    shared = serve_again("--port", "0", "--data-dir", str(life.data_dir))
    assert shared.returncode == 1
    assert "is in use by another inferplane serve" in shared.stderr
    assert shared.stderr.count("\n") == 1
    assert life.ready() is not None


def test_sigterm_drains(life: Node, plain: Caller, crowd: Crowd, engines: Engines) -> None:
    ends: dict[str, bytes] = {}

    def follow(name: str, content: dict[str, Any]) -> None:
        with RawClient(life) as raw:
            raw.send(request(plain.tenant, content))
            ends[name] = raw.read_all()

    asked = {
        "ends in time": body("normal?tokens=30&gap_ms=40", stream=True),
        "never ends": body("endless?gap_ms=40", stream=True),
        "whole, in time": body("normal?delay_ms=900"),
        "whole, too late": body("normal?delay_ms=20000"),
    }
    before = len(engines.truths())
    threads = [threading.Thread(target=follow, args=item) for item in asked.items()]
    for thread in threads:
        thread.start()
    eventually(lambda: len(engines.truths()) == before + 4, "four at the engines", 10)
    idle = RawClient(life)  # a connection that waits for its next request
    time.sleep(0.1)
    began_s = time.monotonic()
    life.process.send_signal(signal.SIGTERM)
    unready = eventually(lambda: _blockers(life), "readyz is 503", 1.0)
    assert unready == ["draining"]
    assert time.monotonic() - began_s < 0.5, "at once"
    assert idle.read_all() == b""
    idle.sock.close()
    for thread in threads:
        thread.join(20)
    status = life.process.wait(20)
    took_s = time.monotonic() - began_s
    assert status == 0
    assert DRAIN_S < took_s < DRAIN_S + 8
    assert b"tok30 " in ends["ends in time"]
    assert b"[DONE]" in ends["ends in time"]
    assert ends["whole, in time"].startswith(b"HTTP/1.1 200 ")
    told = chunks(ends["never ends"])[-1]["error"]
    assert told["code"] == "gateway_draining"
    assert b"[DONE]" in ends["never ends"]
    assert ends["whole, too late"].startswith(b"HTTP/1.1 503 ")
    assert b"gateway_draining" in ends["whole, too late"]
    assert b"retry-after-ms: 1000" in ends["whole, too late"]
    for name in ("never ends", "whole, too late"):
        event = event_rows(life, request_id(ends[name]))[0]
        assert (event["outcome"], event["status"], event["estimated"]) == (Outcome.CANCELLED, 503, True)
        assert event["error_code"] == "gateway_draining"
    # everything is in the books: the spool was flushed, and the shipper went last
    report = reconcile(life)
    assert report["exact"], report
    assert report["quarantined"] == 0
    assert "Traceback" not in life.log_text()
    assert not psutil.pid_exists(life.process.pid)


def _blockers(life: Node) -> Any:
    try:
        with http_client(life.url) as client:
            answer = client.get("/readyz")
    except Exception:  # the port is closed already: too late to see it
        return None
    return answer.json()["blockers"] if answer.status_code == 503 else None
