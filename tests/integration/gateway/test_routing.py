"""The router behind the gateway: R1 to R5 of the router notes through real sockets, and why an engine was chosen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import httpx

from tests.integration.gateway.client import CHAT, Caller, RawClient, assert_error, body, request
from tests.integration.gateway.conftest import People
from tests.integration.gateway.stack import Engines, Node, Tenant, eventually, http_client


def prompt(seed: int | str, size: int = 4_000) -> list[dict[str, str]]:
    """A conversation that shares nothing with another seed's."""
    return [{"role": "user", "content": f"{seed} " * (size // (len(str(seed)) + 1))}]


def picked(engines: Engines, answers: list[httpx.Response]) -> list[str]:
    """Which engine answered each."""
    return [engines.of_request(answer.headers["x-request-id"])[0][0] for answer in answers]


def test_r1_unrelated_prompts_one_at_a_time_are_spread(fresh: str, caller: Caller, engines: Engines) -> None:
    answers = [caller.post(body(model=fresh, messages=prompt(f"r1-{n}"))) for n in range(40)]
    counts = Counter(picked(engines, answers))
    assert set(counts) == {"left", "right"}
    assert min(counts.values()) >= 8


class Holding:
    """Requests that are being answered, each on a connection of its own."""

    def __init__(self, node: Node, tenant: Tenant) -> None:
        self._node, self._tenant = node, tenant
        self._raw: list[RawClient] = []

    def ask(self, content: dict[str, Any]) -> None:
        """One more."""
        raw = RawClient(self._node)
        self._raw.append(raw.send(request(self._tenant, content)))

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        for raw in self._raw:
            raw.sock.close()


def test_r2_and_r4_a_busy_engine_is_avoided_and_load_counts_at_the_pick(
    fresh: str, node: Node, people: People, engines: Engines
) -> None:
    """Sixteen requests whose answers have no byte yet spread over both engines, whichever worker took them."""
    before = len(engines.truths("left", "right"))
    with Holding(node, people["plain"]) as held:
        for n in range(16):
            held.ask(body("normal?delay_ms=4000", model=fresh, messages=prompt(f"r4-{n}", 400)))
            time.sleep(0.01)  # news travels between the workers within 2 ms
        eventually(lambda: len(engines.truths("left", "right")) == before + 16, "sixteen at the engines", 4)
        counts = Counter(name for name, _ in engines.truths("left", "right")[-0:] if name)
        ours = [(name, truth) for name, truth in engines.truths("left", "right") if f'"{fresh}"' in truth.body.decode()]
        counts = Counter(name for name, _ in ours)
    assert min(counts["left"], counts["right"]) >= 6, counts


def test_r3_a_cached_prompt_stays_where_it_is_although_another_engine_is_hot(
    fresh: str, caller: Caller, engines: Engines, people: People
) -> None:
    history = prompt("r3", 40_000)
    first = caller.post(body("normal?prompt=10000&cached=0", model=fresh, messages=history))
    home = picked(engines, [first])[0]
    with Holding(caller.node, people["plain"]) as held:
        for n in range(8):
            held.ask(body("normal?tokens=400&gap_ms=10", model=fresh, stream=True, messages=prompt(f"r3-{n}", 100)))
        time.sleep(0.2)
        later = [
            caller.post(body("normal?prompt=10000&cached=9900", model=fresh,
                             messages=[*history, {"role": "user", "content": f"turn {n}"}]))
            for n in range(6)
        ]  # fmt: skip
    assert set(picked(engines, later)) == {home}


def test_r5_looking_at_health_and_metrics_touches_no_load(node: Node, people: People, fresh: str) -> None:
    def in_flight() -> float:
        with http_client(node.url) as client:
            text = client.get("/metrics").text
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("inferplane_requests_in_flight")
        )

    with Holding(node, people["plain"]) as held:
        for n in range(10):
            held.ask(body("normal?delay_ms=3500", model=fresh, messages=prompt(f"r5-{n}", 100)))
        eventually(lambda: in_flight() == 10, "ten in flight", 3)
        for _ in range(5):
            node.ready()
        assert in_flight() == 10
    eventually(lambda: in_flight() == 0, "none in flight", 5)


class TestExplain:
    """Why this engine."""

    def test_the_header_says_it_in_one_line(self, fresh: str, caller: Caller, engines: Engines) -> None:
        answer = caller.post(body(model=fresh), x_inferplane_decision="explain")
        said = answer.headers["x-inferplane-decision"]
        engine = f"{fresh}-{picked(engines, [answer])[0]}"
        assert said.startswith(f"pick={engine} total_s=")
        other = f"{fresh}-left" if engine.endswith("right") else f"{fresh}-right"
        assert other in said
        assert len(said) < 1_000

    def test_the_record_can_be_read_at_any_worker_by_the_org_that_asked(
        self, fresh: str, caller: Caller, node: Node, people: People
    ) -> None:
        answer = caller.post(body(model=fresh), x_inferplane_decision="explain")
        path = f"/admin/v1/decisions/{answer.headers['x-request-id']}"
        records = [caller.get(path) for _ in range(6)]
        assert {record.status_code for record in records} == {200}
        record = records[0].json()
        assert record["model"] == fresh
        assert {candidate["endpoint_id"] for candidate in record["candidates"]} == {f"{fresh}-left", f"{fresh}-right"}
        assert_error(Caller(node, people["other"]).get(path), 404, "decision_not_found")
        with http_client(node.url, {"authorization": f"Bearer {node.admin_secret}"}) as admin:
            assert admin.get(path).json() == record

    def test_nobody_is_told_who_may_not_know_or_did_not_ask(
        self, fresh: str, caller: Caller, node: Node, people: People
    ) -> None:
        silent = Caller(node, people["inference only"]).post(body(model=fresh), x_inferplane_decision="explain")
        assert silent.status_code == 200
        assert "x-inferplane-decision" not in silent.headers
        not_asked = caller.post(body(model=fresh))
        assert "x-inferplane-decision" not in not_asked.headers
        assert_error(caller.get(f"/admin/v1/decisions/{not_asked.headers['x-request-id']}"), 404)


def test_many_at_once_all_come_through(node: Node, people: People, caller: Caller) -> None:
    """A hundred streams side by side: each gets its own words, each is billed once."""
    found: list[int] = []

    async def all_of_them() -> None:
        async with httpx.AsyncClient(
            base_url=node.url, headers=people["plain"].headers, verify=False, trust_env=False, timeout=30
        ) as client:

            async def one(n: int) -> None:
                answer = await client.post(CHAT, json=body(f"normal?tokens=20&gap_ms=5&word=w{n}x", stream=True))
                assert answer.status_code == 200
                assert f"w{n}x20 " in answer.text
                found.append(n)

            await asyncio.gather(*(one(n) for n in range(100)))

    thread = threading.Thread(target=lambda: asyncio.run(all_of_them()))
    before = len(node.events_of(people["plain"]))
    thread.start()
    thread.join(60)
    assert len(found) == 100
    assert len(node.events_of(people["plain"])) - before == 100


def test_r29_a_prompt_that_changes_at_its_beginning_is_told(fresh: str, node: Node, people: People) -> None:
    """A date in the first line makes every turn a cold one; two workers may see the turns, so there are several."""
    caller = Caller(node, people["plain"])
    history = "the same long history of a conversation, line by line\n" * 200
    answer = None
    for turn in range(12):
        content = f"now: 2026-11-30T09:{turn:02d}:{turn * 7 % 60:02d}\n{history}"
        answer = caller.post(
            body(model=fresh, messages=[{"role": "user", "content": content}]),
            x_inferplane_decision="explain",
        )
        assert answer.status_code == 200, answer.text
    assert answer is not None
    request_id = answer.headers["x-request-id"]
    with http_client(node.url, {"authorization": f"Bearer {node.admin_secret}"}) as client:
        record = eventually(
            lambda: (found := client.get(f"/admin/v1/decisions/{request_id}")).status_code == 200 and found.json(),
            "the decision",
        )
    seen = record["volatile_prefix"]
    assert seen["volatile_count"] >= 3 and seen["last"]["offset_bytes"] < 200, seen
    eventually(lambda: "change near byte" in node.log_text(), "a line in the log")
    with http_client(node.url) as client:
        name = f'inferplane_volatile_prompts_total{{model="{fresh}"}}'
        eventually(lambda: name in client.get("/metrics").text, "the metric")
