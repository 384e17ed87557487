"""The ports of the request path and the values that cross them.

Owns: what `serve` asks of the outside (engines and their router, limits, usage spool, clock, the client's connection,
the caller's protocol), in this house's words. Does not own: any implementation; `app` hands those in, tests hand in
their own. A port belongs to its consumer, so these live beside `serve` and not beside their adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from billing.metering import Meter
from billing.token_usage import Usage
from billing.usage_event import Outcome, UsageCheckpoint, UsageClose, UsageOpen
from controlplane.rate_limit import LimitsPort, LimitView, Refused
from controlplane.request import InferenceRequest
from controlplane.tenancy import Principal
from router.endpoints import Ending

Header = tuple[bytes, bytes]


class Call(NamedTuple):
    """One authenticated request, as the HTTP edge hands it over."""

    request: InferenceRequest
    principal: Principal
    request_id: str
    received_ns: int
    """Unix ns at which the request's head was read."""
    started_s: float
    """The same moment on the monotonic clock."""
    explain: bool = False
    """The caller asked for, and may see, why an engine was chosen."""


class Deadlines(NamedTuple):
    """The four deadlines of a request and the bound of a non-streamed answer."""

    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float
    max_answer_bytes: int = 64 * 1024 * 1024


class ModelFacts(NamedTuple):
    """What the gateway knows of a model name that a client may use."""

    served: str
    default_max_output_tokens: int


class Target(NamedTuple):
    """The engine that the fleet picked for an attempt."""

    endpoint_id: str
    pool: str | None
    incarnation: str | None
    predicted_cached_tokens: int | None
    summary: str
    """One line for `x-inferplane-decision`: why this engine."""
    ticket: object
    """The router's handle; given back on every ending."""


class NoTargetReason(StrEnum):
    """Why no engine can take the request. The values are metric labels."""

    NO_SUCH_MODEL = "no_such_model"
    NO_ENGINE = "no_engine"


@dataclass(frozen=True, slots=True)
class NoTarget:
    """No engine can take the request now; `retry_after_s` when waiting may help."""

    reason: NoTargetReason
    retry_after_s: float | None


class AttemptEnd(NamedTuple):
    """What the router learns from an attempt."""

    ending: Ending
    retry_after_s: float | None = None
    """What a busy engine asked for."""
    cached_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class Answer(Protocol):
    """An engine's response whose head has arrived."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Sequence[Header]: ...
    async def read(self, timeout_s: float) -> bytes: ...
    async def relay(self, take: Callable[[bytes], bool], idle_s: float, left_s: float) -> bool:
        """Hand each piece to `take` as it comes, until that says False (then False) or the body has ended (True).
        Raises as `read` does, after `idle_s` of silence or `left_s` altogether.
        """
        ...

    async def read_all(self, limit_bytes: int, timeout_s: float) -> bytes: ...
    def abort(self) -> None: ...
    def release(self) -> None: ...


class Fleet(Protocol):
    """The engines: pick one, send to it, tell the router how it went."""

    def model(self, name: str) -> ModelFacts | NoTarget:
        """What is known of a model name; else whether it may yet turn out to exist (NO_ENGINE) or not."""
        ...

    async def read(self, call: Call, served: str) -> object | None:
        """What the fleet works out of the prompt before it can pick, within a deadline of its own; None: nothing."""
        ...

    def pick(self, call: Call, served: str, exclude: frozenset[str], read: object | None) -> Target | NoTarget: ...
    async def send(
        self, target: Target, call: Call, served: str, limits: Deadlines, on_send: Callable[[], None]
    ) -> Answer: ...
    def meter(self, target: Target, call: Call) -> Meter: ...
    def first_token(self, target: Target) -> None: ...
    def finished(self, target: Target, end: AttemptEnd) -> None: ...
    def explain(self, target: Target, call: Call) -> None: ...


class Books(Protocol):
    """The usage spool (DESIGN 4.3). Every call is synchronous and quick."""

    def open(self, record: UsageOpen) -> None: ...
    def checkpoint(self, record: UsageCheckpoint) -> None: ...
    def close(self, record: UsageClose) -> None: ...
    def refuse(self, org_id: str, project_id: str, model: str, reason: str, at_ns: int) -> None: ...


class Clock(Protocol):
    """Time and ids, so that the path can be replayed."""

    def monotonic_s(self) -> float: ...
    def monotonic_ns(self) -> int: ...
    def unix_ns(self) -> int: ...
    def event_id(self) -> str: ...


class Sink(Protocol):
    """The client's side of the connection."""

    @property
    def gone(self) -> bool: ...
    @property
    def started(self) -> bool: ...
    @property
    def finished(self) -> bool: ...
    @property
    def open_ended(self) -> bool:
        """The answer was started without a length, so that more may be said in it than its engine sent."""
        ...

    @property
    def drained(self) -> bool:
        """The client's socket has taken every byte written so far; once it is lost: had taken them by then."""
        ...

    @property
    def written_bytes(self) -> int:
        """Everything that was handed to the client's socket so far, with what frames it."""
        ...

    @property
    def taken_bytes(self) -> int:
        """How much of that the socket has taken; once it is lost: had taken by then."""
        ...

    async def start(self, status: int, headers: Sequence[Header]) -> None: ...
    @property
    def has_room(self) -> bool:
        """A piece can be sent without waiting for the client."""
        ...

    def queue(self, data: bytes, took: Callable[[bool], None]) -> bool:
        """Send a piece, together with those of other requests, when the event loop turns. False: it would have to wait,
        which is for `write`. `took` is told once it is written, with `drained`; nothing may be queued before that.
        """
        ...

    def push(self) -> None:
        """Send what is queued now."""
        ...

    async def write(self, data: bytes) -> None: ...
    async def finish(self, data: bytes) -> None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer that is an error, before the HTTP edge renders it in the caller's protocol."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    should_retry: bool | None = None
    engine_body: bytes | None = None
    """The engine's own error, whose message and param win."""
    refused: Refused | None = None
    elsewhere: bool = False
    """Another engine may be tried."""
    ending: Ending = Ending.FAILED
    """What it says about the engine."""
    outcome: Outcome = Outcome.FAILED


class Edge(Protocol):
    """Renders what `serve` decided in the caller's protocol."""

    def headers(self, call: Call, view: LimitView, trace: Trace, answer: Answer) -> list[Header]: ...
    async def fail(self, sink: Sink, call: Call, fault: Fault, view: LimitView | None) -> int: ...
    def stream_fault(self, fault: Fault) -> bytes: ...


@dataclass(slots=True)
class Trace:
    """Mutable: filled along the path, read once by telemetry when the request has ended."""

    status: int = 0
    outcome: str = "refused"
    reason: str = ""
    endpoint_id: str | None = None
    attempts_count: int = 0
    first_token_s: float | None = None
    """Seconds from the request's start to the first token."""
    duration_s: float = 0.0
    usage: Usage | None = None
    stream: bool = False
    decision: str = ""


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything `Path` needs from the outside."""

    fleet: Fleet
    limits: LimitsPort
    books: Books
    edge: Edge
    clock: Clock
    price_version: Callable[[str, int], str | None]
    """(org id, Unix ns) -> the price book in force."""
