"""The request path over engines with roles, in one process: production core, fleet, router and client, real sockets.

Owns: putting these together over strict engines (`pair_engines`) and doubles of books, limits and client
(`serve_ports`), and what must hold after every request. Does not own: any check of one test.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from billing.usage_event import UsageClose
from controlplane.adapters.engine_http import EngineClient
from controlplane.adapters.fleet import EngineFleet, FleetDeps
from controlplane.adapters.openai_http import OpenAiEdge
from controlplane.adapters.openai_wire import parse
from controlplane.ports import Call, Deadlines, ModelFacts, Ports, Trace
from controlplane.request import Operation
from controlplane.serve import Path
from router.blocks import BlockHasher
from router.endpoints import Endpoint, EndpointRole, EngineKind, EngineSpeed
from router.pair_route import PairingRouter
from router.pairing import PairConfig
from router.route import RouterConfig
from tests.fakes.engine_scripts import Truth
from tests.fakes.pair_engines import Bench, PairEngine
from tests.fakes.serve_ports import PRINCIPAL, FakeBooks, FakeLimits, FakeSink

DEADLINES = Deadlines(connect_s=2.0, first_byte_s=10.0, idle_s=5.0, total_s=20.0)
# Prefill is what a decode engine is bad at here, so that any prompt is worth two engines.
_SPEEDS: Mapping[EndpointRole, EngineSpeed] = {
    "prefill": EngineSpeed(1e9, 0.0, 0.01),
    "decode": EngineSpeed(1.0, 0.0, 0.01),
    "both": EngineSpeed(1.0, 0.0, 0.01),
}
# The first request's.
REQUEST_ID = f"req_{1:032x}"


class Clock:
    """The machine's."""

    monotonic_s = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)
    unix_ns = staticmethod(time.time_ns)

    def __init__(self) -> None:
        self._ids = 0

    def event_id(self) -> str:
        """The next one."""
        self._ids += 1
        return f"{self._ids:032x}"


class NoNames:
    """No aliases."""

    def alias(self, name: str) -> ModelFacts | None:
        """None."""
        return None


class Decisions:
    """Explained decisions. Mutable."""

    def __init__(self) -> None:
        self.kept: dict[str, Mapping[str, Any]] = {}

    def put(self, request_id: str, org_id: str, record: Mapping[str, Any]) -> None:
        """Keep one."""
        self.kept[request_id] = json.loads(json.dumps(record))


@dataclass
class Done:
    """A request that has ended."""

    sink: FakeSink
    trace: Trace
    took_s: float

    @property
    def error(self) -> dict[str, Any]:
        """What it was answered."""
        found: dict[str, Any] = json.loads(self.sink.data)["error"]
        return found

    @property
    def text(self) -> str:
        """What it said."""
        data = self.sink.data
        if not data.startswith(b"data: "):
            return str(json.loads(data)["choices"][0]["message"]["content"])
        chunks = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        return "".join(c["delta"].get("content") or "" for each in chunks for c in each.get("choices", ()))

    @property
    def usage(self) -> dict[str, Any]:
        """The usage that the client was shown."""
        data = self.sink.data
        if not data.startswith(b"data: "):
            return cast("dict[str, Any]", json.loads(data)["usage"])
        found = [json.loads(line[6:]).get("usage") for line in data.split(b"\n") if line.startswith(b"data: {")]
        return cast("dict[str, Any]", found[-1])


@dataclass
class PairStack:
    """`async with PairStack("vllm") as stack`. Mutable."""

    kind: EngineKind
    roles: Sequence[tuple[str, EndpointRole]] = (("p", "prefill"), ("d", "decode"))
    deadlines: Deadlines = DEADLINES
    bench: Bench = field(default_factory=Bench)
    engines: dict[str, PairEngine] = field(default_factory=dict)
    asked_count: int = 0

    async def __aenter__(self) -> PairStack:
        endpoints = []
        for name, role in self.roles:
            engine = self.engines[name] = PairEngine(name, self.kind, role, self.bench)
            await engine.start()
            endpoints.append(
                Endpoint(
                    name,
                    f"http://127.0.0.1:{engine.port}",
                    frozenset({"m"}),
                    self.kind,
                    role,
                    speed=_SPEEDS[role],
                    kv_bytes_per_token=1,
                    kv_link_bytes_per_s=1e12,
                )
            )
        self.endpoints = endpoints
        self.router = PairingRouter(RouterConfig(), PairConfig(min_gain_s=0.0))
        self.router.set_endpoints(endpoints, time.monotonic())
        self.client = EngineClient()
        self.decisions = Decisions()
        self.books, self.limits = FakeBooks(), FakeLimits()
        deps = FleetDeps(
            router=self.router, hasher=BlockHasher(b"secret"), client=self.client, names=NoNames(),
            decisions=self.decisions, monotonic_s=time.monotonic, dice=random.Random(0).random, learning=lambda: False,
            engine_key=lambda name: None, pairs=self.router,
        )  # fmt: skip
        self.fleet = EngineFleet(deps, 8)
        ports = Ports(self.fleet, self.limits, self.books, OpenAiEdge(), Clock(), lambda org, at_ns: "book")
        self.path = Path(ports, self.deadlines, "node")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        for engine in self.engines.values():
            await engine.stop()

    def begin(self, user: str = "", sink: FakeSink | None = None, **fields: Any) -> tuple[asyncio.Task[None], Done]:
        """Serve one request; what it comes to fills as it goes."""
        body = {
            "model": "m", "messages": [{"role": "user", "content": "hello there"}], "stream": True, "max_tokens": 4,
            "stream_options": {"include_usage": True}, "user": f"pair:{user}", **fields,
        }  # fmt: skip
        if not body["stream"]:
            del body["stream_options"]
        request = parse(Operation.CHAT, json.dumps(body).encode())
        self.asked_count += 1
        call = Call(request, PRINCIPAL, f"req_{self.asked_count:032x}", time.time_ns(), time.monotonic(), explain=True)
        done = Done(sink or FakeSink(), Trace(), 0.0)
        task = asyncio.create_task(self.path.serve(call, done.sink, done.trace))
        done.sink.task = task
        return task, done

    async def ask(self, user: str = "", **fields: Any) -> Done:
        """One request, to its end. The books are of this one alone."""
        for kept in (self.books.opens, self.books.closes, self.books.refusals):
            kept.clear()
        started_s = time.monotonic()
        task, done = self.begin(user, **fields)
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 15)
        done.took_s = time.monotonic() - started_s
        error = None if task.cancelled() else task.exception()
        if error is not None:
            raise error
        self.check()
        return done

    async def settled(self) -> None:
        """Every leg has ended at its engine."""
        await self.until(lambda: all(truth.ended for engine in self.engines.values() for truth in engine.truths))

    async def until(self, holds: Any, within_s: float = 5.0) -> None:
        """Wait for it."""
        until_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < until_s, "not within the time"
            await asyncio.sleep(0.005)

    def leg(self, name: str) -> Truth:
        """The one leg that an engine was sent."""
        legs = self.engines[name].legs
        assert len(legs) == 1, legs
        return legs[0]

    @property
    def close(self) -> UsageClose:
        """What was billed: one attempt of a request."""
        (billed,) = [close for close in self.books.closes if close.billable]
        return billed

    def check(self, requests: int = 1) -> None:
        """After every request: books and load are even, whatever became of the legs."""
        books = self.books
        assert sorted(one.event_id for one in books.closes) == sorted(one.event_id for one in books.opens)
        assert [one.billable for one in books.closes].count(True) == (requests if books.closes else 0)
        assert len(self.limits.settled) == len(self.limits.reserved)
        for row in self.router.status(time.monotonic()):
            load = row.load
            assert (load.waiting_count, load.decoding_count, load.kv_tokens) == (0, 0, 0), row.endpoint.endpoint_id
        assert not self.fleet._splits
