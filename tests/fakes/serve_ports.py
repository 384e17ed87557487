"""The ports of the request path in memory: engines that answer by plan, books, limits and a client that can be cut.

Owns: doubles of `controlplane.ports` that record everything and decide nothing. Does not own: any rule of the path.
Engines answer by a `Plan`: what `send` does, then one step per read. Time passes only where a plan says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from billing.metering import Meter
from billing.usage_event import UsageCheckpoint, UsageClose, UsageOpen
from controlplane.adapters.openai_http import OpenAiEdge
from controlplane.adapters.openai_wire import parse
from controlplane.errors import EngineError, EngineLost, EngineTimeout, SpoolFull
from controlplane.ports import (
    AttemptEnd,
    Call,
    Deadlines,
    Header,
    ModelFacts,
    NoTarget,
    NoTargetReason,
    Ports,
    Target,
    Trace,
)
from controlplane.rate_limit import NO_LIMITS, Admitted, Cost, LimitsPort, Refused, StoreState, Ticket
from controlplane.request import Operation
from controlplane.serve import Path
from controlplane.tenancy import Limit, Principal

DEADLINES = Deadlines(connect_s=1.0, first_byte_s=10.0, idle_s=5.0, total_s=60.0, max_answer_bytes=100_000)
SSE: tuple[Header, ...] = ((b"content-type", b"text/event-stream"),)


class Clock:
    """Time that only moves when it is told to. Mutable."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self._ids = 0

    def monotonic_s(self) -> float:
        """Seconds."""
        return self.now_s

    def monotonic_ns(self) -> int:
        """The same in ns."""
        return int(self.now_s * 1e9)

    def unix_ns(self) -> int:
        """A Unix time that moves with it."""
        return 1_700_000_000_000_000_000 + int(self.now_s * 1e9)

    def event_id(self) -> str:
        """The next id."""
        self._ids += 1
        return f"{self._ids:032x}"


@dataclass(frozen=True)
class After:
    """Time passes, then the step happens."""

    seconds: float
    step: Step


@dataclass(frozen=True)
class Hang:
    """Never: until the deadline of the read, or the client leaves."""


Step = bytes | EngineError | Exception | After | Hang
"""One read: bytes (b"" is the end), a fault, or one of the above."""


@dataclass
class Plan:
    """How one attempt goes."""

    head: Step | int = 200
    """What `send` does: a status, or a fault."""
    steps: Sequence[Step] = ()
    headers: tuple[Header, ...] = SSE


class FakeAnswer:
    """The `Answer` port by a plan. Mutable."""

    def __init__(self, plan: Plan, status: int, clock: Clock) -> None:
        self.status, self.headers = status, plan.headers
        self._steps = list(plan.steps)
        self._clock = clock
        self.aborted = self.released = False
        self.ended = False
        self._stuck: Exception | None = None

    async def read(self, timeout_s: float) -> bytes:
        """The next step. A fault stays one, as on a real connection."""
        if self._stuck is not None:
            raise self._stuck
        try:
            return await self._next(timeout_s)
        except Exception as error:
            self._stuck = error
            raise

    async def _next(self, timeout_s: float) -> bytes:
        if self.ended or not self._steps:
            self.ended = True
            return b""
        step = self._steps.pop(0)
        waited_s = 0.0
        while isinstance(step, After):
            waited_s += step.seconds
            step = step.step
        if isinstance(step, Hang) or waited_s > timeout_s:
            if isinstance(step, Hang) and timeout_s > 1e6:
                await asyncio.Event().wait()
            self._clock.now_s += timeout_s
            await asyncio.sleep(0)
            raise EngineTimeout("e", "idle", timeout_s)
        self._clock.now_s += waited_s
        await asyncio.sleep(0)
        if isinstance(step, Exception):
            raise step
        self.ended = step == b""
        return step

    async def relay(self, take: Callable[[bytes], bool], idle_s: float, left_s: float) -> bool:
        """Step by step to `take`."""
        until_s = self._clock.now_s + left_s
        while data := await self.read(min(idle_s, until_s - self._clock.now_s)):
            if not take(data):
                return False
        return True

    async def read_all(self, limit_bytes: int, timeout_s: float) -> bytes:
        """Everything, within the time altogether."""
        parts, until_s = b"", self._clock.now_s + timeout_s
        while data := await self.read(until_s - self._clock.now_s):
            parts += data
            if len(parts) > limit_bytes:
                self.abort()
                raise EngineLost("e", "too long")
        return parts

    def abort(self) -> None:
        """Given up."""
        self.aborted = True

    def release(self) -> None:
        """Done with."""
        self.released = True


class FakeFleet:
    """The `Fleet` port: picks endpoints in order, each attempt goes by the next plan. Mutable."""

    def __init__(self, clock: Clock, plans: Sequence[Plan], endpoints: int = 2) -> None:
        self._clock = clock
        self._plans = list(plans)
        self._endpoints = [f"e{n}" for n in range(endpoints)]
        self.picked: list[Target] = []
        self.ends: list[tuple[Target, AttemptEnd]] = []
        self.answers: list[FakeAnswer] = []
        self.explained: list[str] = []
        self.first_tokens: list[Target] = []
        self.sent_limits: list[Deadlines] = []

    def model(self, name: str) -> ModelFacts | NoTarget:
        """Everything but `unknown` exists; `untold` may."""
        if name in ("unknown", "untold"):
            return NoTarget(NoTargetReason.NO_ENGINE if name == "untold" else NoTargetReason.NO_SUCH_MODEL, None)
        return ModelFacts(name, 100)

    async def read(self, call: Call, served: str) -> object | None:
        """Nothing."""
        return None

    def pick(self, call: Call, served: str, exclude: frozenset[str], read: object | None) -> Target | NoTarget:
        """The first that is not excluded."""
        for name in self._endpoints:
            if name not in exclude:
                target = Target(name, "pool", "i1", 3, f"pick={name}", object())
                self.picked.append(target)
                return target
        return NoTarget(NoTargetReason.NO_ENGINE, 2.0)

    async def send(
        self, target: Target, call: Call, served: str, limits: Deadlines, on_send: Callable[[], None]
    ) -> FakeAnswer:
        """By the next plan. A plan that hangs or fails at once was never written to."""
        self.sent_limits.append(limits)
        plan = self._plans.pop(0)
        step = plan.head
        while isinstance(step, After):
            self._clock.now_s += step.seconds
            step = step.step
        await asyncio.sleep(0)
        if isinstance(step, Hang):
            self._clock.now_s += limits.first_byte_s
            raise EngineTimeout(target.endpoint_id, "first_byte", limits.first_byte_s)
        if isinstance(step, Exception):
            raise step
        assert isinstance(step, int)
        on_send()
        answer = FakeAnswer(plan, step, self._clock)
        self.answers.append(answer)
        return answer

    def meter(self, target: Target, call: Call) -> Meter:
        """The production meter."""
        wish = call.request.wish
        return Meter(
            choices=call.request.choices, keep_usage_chunk=wish.include_usage,
            keep_continuous_usage=wish.continuous_usage, now_s=self._clock.now_s,
        )  # fmt: skip

    def first_token(self, target: Target) -> None:
        """Noted."""
        self.first_tokens.append(target)

    def finished(self, target: Target, end: AttemptEnd) -> None:
        """Noted."""
        self.ends.append((target, end))

    def explain(self, target: Target, call: Call) -> None:
        """Noted."""
        self.explained.append(call.request_id)


class FakeBooks:
    """The `Books` port. Mutable. `full` refuses opens; `broken` names the calls that raise a defect."""

    def __init__(self) -> None:
        self.opens: list[UsageOpen] = []
        self.checkpoints: list[UsageCheckpoint] = []
        self.closes: list[UsageClose] = []
        self.refusals: list[tuple[str, str]] = []
        self.full_after: int | None = None
        self.broken: set[str] = set()
        self.order: list[str] = []

    def open(self, record: UsageOpen) -> None:
        """Record, or refuse."""
        if "open" in self.broken:
            raise ValueError("a defect in open")
        if self.full_after is not None and len(self.opens) >= self.full_after:
            raise SpoolFull("full")
        self.opens.append(record)
        self.order.append(f"open {record.attempt}")

    def checkpoint(self, record: UsageCheckpoint) -> None:
        """Record."""
        if "checkpoint" in self.broken:
            raise ValueError("a defect in checkpoint")
        self.checkpoints.append(record)

    def close(self, record: UsageClose) -> None:
        """Record."""
        if "close" in self.broken:
            raise ValueError("a defect in close")
        self.closes.append(record)
        self.order.append("close")

    def refuse(self, org_id: str, project_id: str, model: str, reason: str, at_ns: int) -> None:
        """Count."""
        self.refusals.append((model, reason))


class FakeLimits:
    """The `LimitsPort`: admits, or gives the decision it was made with. Mutable."""

    def __init__(self, decision: Refused | None = None, *, ask_store: bool = False) -> None:
        self._decision = decision
        self._ask_store = ask_store or decision is not None
        self.asked = asyncio.Event()
        self.answer: asyncio.Event | None = None
        self.reserved: list[Cost] = []
        self.settled: list[tuple[Cost, Cost]] = []

    def try_admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | None:
        """From a lease, unless the store is to be asked."""
        return None if self._ask_store else self._admitted(cost)

    async def admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | Refused:
        """The store's answer, when it is let go."""
        self.asked.set()
        if self.answer is not None:
            await self.answer.wait()
        return self._decision or self._admitted(cost)

    def settle(self, ticket: Ticket, used: Cost, now_ns: int) -> None:
        """Once per ticket."""
        assert not ticket.settled, "settled twice"
        ticket.settled = True
        self.settled.append((ticket.cost, used))

    def state(self) -> StoreState:
        """Answering."""
        return StoreState(True, 0, "refuse")

    def _admitted(self, cost: Cost) -> Admitted:
        self.reserved.append(cost)
        return Admitted(Ticket(cost, []), NO_LIMITS)


class FakeSink:
    """The client. Mutable. `leave_after` pieces it is gone; `stuck` it takes nothing more."""

    def __init__(self, leave_after: int | None = None) -> None:
        self.gone = self.started = self.finished = self.open_ended = False
        self.status = 0
        self.headers: list[Header] = []
        self.pieces: list[bytes] = []
        self.aborted = False
        self._drained = True
        self.took_bytes = 0
        self._offered = 0
        self._queued: tuple[bytes, Callable[[bool], None]] | None = None
        self._leave_after = leave_after
        self.task: asyncio.Task[Any] | None = None
        self.on_piece: Callable[[], None] = lambda: None

    @property
    def data(self) -> bytes:
        """Everything it was sent."""
        return b"".join(self.pieces)

    @property
    def written_bytes(self) -> int:
        """Everything it was sent."""
        return len(self.data)

    @property
    def taken_bytes(self) -> int:
        """What it took: all, or nothing more since it is stuck."""
        return self.written_bytes if self.drained else self.took_bytes

    def leave(self) -> None:
        """Be gone, as the connection's loss says it."""
        self.gone = True
        if self.task is not None:
            self.task.cancel("client gone")

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        """The head."""
        assert not self.started
        self.started, self.status, self.headers = True, status, list(headers)
        self.open_ended = all(name != b"content-length" for name, _ in headers)

    @property
    def drained(self) -> bool:
        """It took everything."""
        return self._drained and self._queued is None

    @drained.setter
    def drained(self, value: bool) -> None:
        self._drained = value

    @property
    def has_room(self) -> bool:
        """Always, until it is gone."""
        return not self.gone

    def queue(self, data: bytes, took: Callable[[bool], None]) -> bool:
        """A piece, for when the loop turns; every third one has to wait."""
        assert self.started
        assert self._queued is None, "queued before the last one was written"
        self._offered += 1
        if self.gone or self._offered % 3 == 0:
            return False
        self._queued = data, took
        asyncio.get_running_loop().call_soon(self.push)
        return True

    def push(self) -> None:
        """What is queued."""
        if self._queued is not None:
            (data, took), self._queued = self._queued, None
            self._took(data)
            took(self._drained)

    async def write(self, data: bytes) -> None:
        """A piece."""
        assert self._queued is None, "overtakes what is queued"
        self._took(data)

    def _took(self, data: bytes) -> None:
        assert self.started
        assert not self.finished
        assert data
        self.pieces.append(data)
        self.on_piece()
        if self._leave_after is not None and len(self.pieces) >= self._leave_after:
            self.leave()

    async def finish(self, data: bytes) -> None:
        """The last piece."""
        assert self.started
        assert not self.finished
        assert self._queued is None, "overtakes what is queued"
        if not self.open_ended:
            assert len(data) == int(dict(self.headers)[b"content-length"])
        self.finished = True
        self.pieces.append(data)
        self.on_piece()

    def abort(self) -> None:
        """Cut off."""
        self.aborted = self.finished = True


PRINCIPAL = Principal("key", "org", "project", frozenset(), None, None, "salt")  # type: ignore[arg-type] # plain ids


def a_call(*, stream: bool = True, model: str = "m", principal: Principal = PRINCIPAL, extra: bytes = b"") -> Call:
    """A request as the HTTP edge hands it over."""
    body = b'{"model":"%s","stream":%s,"messages":[{"role":"user","content":"hi"}]%s}' % (
        model.encode(), b"true" if stream else b"false", extra,
    )  # fmt: skip
    return Call(parse(Operation.CHAT, body), principal, "req_1", 1_700_000_000_000_000_000, 1_000.0)


@dataclass
class World:
    """One path over its doubles."""

    plans: Sequence[Plan] = ()
    limits: FakeLimits = field(default_factory=FakeLimits)
    endpoints: int = 2
    deadlines: Deadlines = DEADLINES
    path_class: type[Path] = Path

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.fleet = FakeFleet(self.clock, self.plans, self.endpoints)
        self.books = FakeBooks()
        self.sink = FakeSink()
        self.trace = Trace()

    async def serve(self, call: Call | None = None) -> World:
        """Run one request to its end, whatever it is."""
        limits: LimitsPort = self.limits
        ports = Ports(self.fleet, limits, self.books, OpenAiEdge(), self.clock, lambda org, at_ns: "book-1")
        path = self.path_class(ports, self.deadlines, "node")
        call = (call if call is not None else a_call())._replace(started_s=self.clock.now_s)
        task = asyncio.create_task(path.serve(call, self.sink, self.trace))
        self.sink.task = task
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 10)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            raise error
        return self

    def check(self) -> None:
        """What must hold after every request, however it ended."""
        books, fleet, limits = self.books, self.fleet, self.limits
        assert [one.event_id for one in books.closes] == [one.event_id for one in books.opens], "each open closed once"
        if books.closes:
            assert [one.billable for one in books.closes].count(True) == 1, "one attempt of a request is billable"
            assert books.closes[-1].billable, "the last one"
        assert len(fleet.ends) == len(fleet.picked), "each pick released once"
        assert {id(target) for target, _ in fleet.ends} == {id(target) for target in fleet.picked}
        assert len(limits.settled) == len(limits.reserved), "each reservation settled once"
        assert all(answer.aborted or answer.released for answer in fleet.answers), "each answer let go"
        assert len(books.opens) <= 2, "at most one retry"
        assert len(books.refusals) + (1 if books.opens else 0) <= 1, "a refusal or an attempt, not both"
        assert self.trace.duration_s >= 0
        if not self.sink.gone and not self.sink.aborted:
            assert self.sink.finished, "a client that is there is always answered"
        if self.sink.started and self.sink.open_ended and self.sink.finished and not self.sink.aborted:
            assert self.sink.data.endswith(b"data: [DONE]\n\n"), "a stream always says that it ends"
