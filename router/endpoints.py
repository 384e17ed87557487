"""Endpoints and what this process knows of each: speed, load in flight, and whether it may be picked.

Owns: `Endpoint` and its parts, `Ticket` (one dispatched attempt), `Load` (counted at the pick, released on every
ending), `Breaker` (opened by real traffic only). Does not own: predictions (`cost`), the choice (`route`), or any
I/O: health probes and discovery are adapters that call in here through `Router`.

Two rules hold in this file. Health never touches load: a probe can only make a broken endpoint's next trial come
sooner. Only the transport and 5xx answers count as failures: a 4xx is the caller's fault and 429 or 503 is a busy
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Literal, NamedTuple

EngineKind = Literal["vllm", "sglang", "trtllm", "llamacpp", "sim", "openai"]
EndpointRole = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """How fast one engine is, alone on its hardware. Injected by the process (performance model or measurement) or
    learned.

    prefill seconds = overhead + uncached / prefill_tok_per_s + prefill_s_per_token2 * uncached * (cached + uncached /
    2); decode step seconds with n running = decode_s_per_token + (n - 1) * decode_s_per_running.
    """

    prefill_tok_per_s: float
    prefill_overhead_s: float
    decode_s_per_token: float
    kv_capacity_tokens: int | None = None
    """Tokens of KV cache; None: unknown."""
    prefill_s_per_token2: float = 0.0
    """Attention's share that grows with the context."""
    decode_s_per_running: float = 0.0
    """What each further running request adds to a decode step."""


@dataclass(frozen=True, slots=True)
class EndpointTls:
    """How the endpoint's certificate is checked: the system's authorities, those of the file `ca`, or (verify False)
    not at all.
    """

    verify: bool = True
    ca: str | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine that serves models over HTTP.

    `incarnation` names one life of its process and KV cache: another one means that nothing it held is there any more.
    """

    endpoint_id: str
    url: str
    models: frozenset[str]
    """Model names it answers to; empty: not known yet, so never picked."""
    kind: EngineKind = "openai"
    role: EndpointRole = "both"
    pool: str = "default"
    zone: str = ""
    region: str = ""
    accelerator: str = ""
    api_key_env: str | None = None
    """Name of the environment variable with its API key; the key itself is never kept here."""
    tls: EndpointTls = EndpointTls()
    kv_events: str | None = None
    drain: bool = False
    """Finish what runs, take nothing new."""
    speed: EngineSpeed | None = None
    """None: learned from its traffic."""
    incarnation: str = ""
    bootstrap_port: int | None = None
    """Where a prefill engine of SGLang is met; None: the engine's default."""
    kv_bytes_per_token: int | None = None
    """Bytes of KV cache of one token; None: unknown."""
    kv_link_bytes_per_s: float | None = None
    """Measured rate at which KV leaves this engine for another; None: unknown."""

    pulls_kv: bool = False
    """It can fetch the KV of a prompt from another engine that holds it, where a request says from which."""

    @property
    def pull_s_per_token(self) -> float | None:
        """Seconds to move a token's KV over its link; None: unknown."""
        if not self.kv_bytes_per_token or not self.kv_link_bytes_per_s:
            return None
        return self.kv_bytes_per_token / self.kv_link_bytes_per_s

    @property
    def serves_alone(self) -> bool:
        """It can take a whole request. A decode engine of SGLang cannot: it waits for the KV of another (sglang
        disaggregation/decode.py); those of the other kinds prefill like any engine when nobody did it for them.
        """
        return self.role == "both" or (self.role == "decode" and self.kind != "sglang")


class Ending(StrEnum):
    """How an attempt ended, as far as the endpoint is concerned. The values are metric labels."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """The client left or a deadline of ours passed while the engine was answering: says nothing about the engine."""
    REFUSED = "refused"
    """The engine answered 4xx (not 429): it works."""
    BUSY = "busy"
    """429 or 503: it works and asks for time."""
    UNREACHABLE = "unreachable"
    """No connection, or it died before the first token: the process is probably gone, and its KV with it."""
    FAILED = "failed"
    """5xx (not 503), a cut answer, or no first byte in time."""


class Finish(NamedTuple):
    """What is known when an attempt has ended. Token counts are the engine's own; None where it named none."""

    outcome: Ending
    cached_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    retry_after_s: float | None = None
    """What a busy engine asked for."""


# An attempt's phases: counted as prefill backlog, then as a running decode, then released.
WAITING, DECODING, ENDED = 0, 1, 2


@dataclass(slots=True, eq=False)
class Ticket:
    """One attempt that was routed: what was counted at the pick, so that exactly that is released. Opaque to callers.
    Mutable: it lives through its phases, and one object per attempt is what the hot path can afford.
    """

    ticket_id: int
    endpoint_id: str
    incarnation: str
    model: str
    prefill_s: float
    queue_s: float
    kv_tokens: int
    input_tokens: int
    predicted_cached_tokens: int
    held_ratio: float
    """Share of the prompt that the index believed held, if that belief can be checked by what the engine reports."""
    prompt_bytes: int
    asked_tokens: int
    """The caller's own estimate of the input, before correction."""
    leaf: int
    """Last block of the prompt; 0 where it is shorter than a block."""
    speculative: bool
    """The pick made the index hold blocks that it did not hold before."""
    previous_use_us: int | None
    stamp_us: int
    picked_s: float
    sent_s: float
    trial: bool
    streamed: bool
    """Its first token will be seen. Otherwise its prefill is taken to end when predicted."""
    phase: int = WAITING
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadNews:
    """A process's whole own load on one endpoint, as siblings tell each other: a total, not a change, so losing one
    message costs nothing once the next arrives.
    """

    endpoint_id: str
    backlog_s: float
    waiting_count: int
    decoding_count: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class LoadView:
    """The load of an endpoint over all processes of the node, for telemetry and tests."""

    waiting_count: int
    decoding_count: int
    backlog_s: float
    kv_tokens: int


# A sibling's prefill may be this much later than its news said.
_PEER_SLACK_S = 1.0


class Load:
    """The attempts in flight on one endpoint: ours exactly, our siblings' as last told."""

    __slots__ = (
        "_backlog_s",
        "_due_s",
        "_head_s",
        "_peer_news",
        "_progress_s",
        "_waiting",
        "decoding_count",
        "kv_tokens",
        "own",
        "peer_backlog_s",
        "request_count",
    )

    def __init__(self) -> None:
        self._waiting: dict[int, Ticket] = {}
        self._backlog_s = 0.0
        self._progress_s = 0.0
        # Of the oldest that waits, worked out when it changes and not at each pick: its prefill's seconds, and when it
        # is taken as done (never: its first token will be seen, or nothing waits).
        self._head_s = 0.0
        self._due_s = inf
        self._peer_news: dict[str, tuple[LoadNews, float]] = {}
        self.own: dict[int, Ticket] = {}
        """Every ticket of ours in flight."""
        self.peer_backlog_s = 0.0
        self.decoding_count = 0
        """Running decodes, ours and our siblings'."""
        self.request_count = 0
        """Requests in flight, waiting or decoding, ours and our siblings'."""
        self.kv_tokens = 0
        """Tokens of KV that the requests in flight need, ours and our siblings'."""

    def take(self, ticket: Ticket) -> None:
        """Count the ticket. Called at the pick, before anything is sent."""
        self._advance(ticket.picked_s)
        if not self._waiting:
            self._progress_s = ticket.picked_s
        self._waiting[ticket.ticket_id] = ticket
        self.own[ticket.ticket_id] = ticket
        if len(self._waiting) == 1:
            self._find_head()
        self._backlog_s += ticket.prefill_s
        self.kv_tokens += ticket.kv_tokens
        self.request_count += 1

    def start_decode(self, ticket: Ticket, now_s: float) -> None:
        """Its first token came: its prefill is done."""
        if ticket.phase != WAITING:
            return
        self._leave_backlog(ticket, now_s)
        ticket.phase = DECODING
        self.decoding_count += 1

    def release(self, ticket: Ticket, now_s: float) -> None:
        """It ended, however it ended. Does nothing the second time."""
        if self.own.pop(ticket.ticket_id, None) is None:
            return
        if ticket.phase == WAITING:
            self._leave_backlog(ticket, now_s)
        else:
            self.decoding_count -= 1
        ticket.phase = ENDED
        self.kv_tokens -= ticket.kv_tokens
        self.request_count -= 1

    def remaining_s(self, now_s: float) -> float:
        """Seconds of prefill that are ahead of a new request.

        Engines start prefills in order, so elapsed time is credited to the oldest one only. One that is overdue is
        expected to need as long again as it is late: a stuck engine looks worse the longer it is stuck, not idle.
        """
        if now_s >= self._due_s:
            self._advance(now_s)
        if not self._waiting:
            return self.peer_backlog_s
        head_s = self._head_s
        return self.peer_backlog_s + self._backlog_s - head_s + abs(head_s - now_s + self._progress_s)

    def settled(self, previous_use_us: int | None, now_s: float) -> bool:
        """Was the prefix that was last used then surely prefilled by now? Otherwise a low `cached_tokens` only says
        that two requests ran side by side. `previous_use_us` None: a shared prefix, of which any waiting request may
        be the first.
        """
        if previous_use_us is None:
            return not self._waiting and not self.peer_backlog_s
        if self.peer_backlog_s and previous_use_us > (now_s - 2 * self.peer_backlog_s - _PEER_SLACK_S) * 1e6:
            return False
        return not self._waiting or previous_use_us < self._waiting[next(iter(self._waiting))].stamp_us

    def news(self, endpoint_id: str, now_s: float) -> LoadNews:
        """Our own load on this endpoint, for siblings."""
        kv_tokens = sum(ticket.kv_tokens for ticket in self.own.values())
        backlog_s = self.remaining_s(now_s) - self.peer_backlog_s
        waiting = len(self._waiting)
        return LoadNews(endpoint_id, backlog_s, waiting, len(self.own) - waiting, kv_tokens)

    def hear(self, peer: str, news: LoadNews | None, now_s: float) -> None:
        """A sibling's load on this endpoint is now this; None: it has none."""
        old = self._peer_news.pop(peer, None)
        if old is not None:
            self.decoding_count -= old[0].decoding_count
            self.request_count -= old[0].waiting_count + old[0].decoding_count
            self.kv_tokens -= old[0].kv_tokens
        if news is not None and (news.waiting_count or news.decoding_count):
            self._peer_news[peer] = news, now_s
            self.decoding_count += news.decoding_count
            self.request_count += news.waiting_count + news.decoding_count
            self.kv_tokens += news.kv_tokens
        self.peer_backlog_s = sum(each.backlog_s for each, _ in self._peer_news.values())

    def expire(self, before_s: float) -> None:
        """Drop what siblings have not repeated since `before_s`: the sibling is dead, or its last word was lost."""
        for peer in [peer for peer, (_, heard_s) in self._peer_news.items() if heard_s < before_s]:
            self.hear(peer, None, before_s)

    def view(self, now_s: float) -> LoadView:
        """A frozen copy of the totals."""
        backlog_s = self.remaining_s(now_s)
        waiting = len(self._waiting) + sum(each.waiting_count for each, _ in self._peer_news.values())
        return LoadView(waiting, self.decoding_count, backlog_s, self.kv_tokens)

    def _advance(self, now_s: float) -> None:
        """Take the prefills of answers that are not streamed as done when they were predicted to be."""
        while now_s >= self._due_s:
            self.start_decode(self._waiting[next(iter(self._waiting))], self._due_s)

    def _leave_backlog(self, ticket: Ticket, now_s: float) -> None:
        del self._waiting[ticket.ticket_id]
        # Set to zero when empty, so that rounding never adds up.
        self._backlog_s = self._backlog_s - ticket.prefill_s if self._waiting else 0.0
        self._progress_s = now_s
        self._find_head()

    def _find_head(self) -> None:
        self._head_s, self._due_s = 0.0, inf
        for head in self._waiting.values():
            self._head_s = head.prefill_s
            if not head.streamed:
                self._due_s = max(head.picked_s, self._progress_s) + head.prefill_s
            return


# The breaker opens when this many of the last attempts in its window failed. Five is what R22 of the router notes
# asks for (a worker that fails fast must be under 5 % of traffic after five failures); smg waits for ten.
_FAILURES_TO_OPEN = 5
_WINDOW_COUNT = 10
_WINDOW_MASK = (1 << _WINDOW_COUNT) - 1

# Back-off of trials on a broken endpoint: doubles from 5 s to 60 s. At 1 request/s the trials of a dead endpoint
# (after 5, 15, 35 s, ...) stay under 5 % of the traffic; a recovery that a health probe sees comes sooner.
_OPEN_FIRST_S = 5.0
_OPEN_MAX_S = 60.0

# Back-off from a busy endpoint that names no time: doubles from 0.25 s to 8 s, resets with the first answer.
_BUSY_FIRST_S = 0.25
_BUSY_MAX_S = 8.0

# The longest time a busy engine may ask for; a wrong header must not take an endpoint away for hours.
_BUSY_ASKED_MAX_S = 60.0


class BreakerState(StrEnum):
    """The values are metric labels."""

    CLOSED = "closed"
    BUSY = "busy"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Whether an endpoint may be picked, from the endings of real attempts.

    Closed -> open after 5 failures among the last 10 attempts. Open -> half-open when the back-off has passed: one
    attempt at a time is a trial. A trial that is answered closes it; one that fails opens it for twice as long.
    """

    __slots__ = ("_busy_backoff_s", "_health_failed", "_history", "_open_s", "_trial", "opened", "ready_s")

    def __init__(self) -> None:
        self._history = 0
        self.opened = False
        """Open or half-open: not trusted with ordinary traffic. To be read only."""
        self._trial: int | None = None
        self._open_s = _OPEN_FIRST_S
        self._busy_backoff_s = _BUSY_FIRST_S
        self._health_failed = False
        self.ready_s = 0.0
        """Not picked before this time (open or busy). Where that has passed and it is not `opened`, it may be picked:
        what the hot path asks instead of `admits`.
        """

    def admits(self, now_s: float) -> bool:
        """May it be picked now?"""
        return now_s >= self.ready_s and self._trial is None

    def state(self, now_s: float) -> BreakerState:
        """For telemetry and reasons."""
        if self.opened:
            return BreakerState.OPEN if now_s < self.ready_s else BreakerState.HALF_OPEN
        return BreakerState.BUSY if now_s < self.ready_s else BreakerState.CLOSED

    def picked(self, ticket_id: int) -> bool:
        """It was picked; True where this attempt is the trial of a half-open breaker."""
        if self.opened:
            self._trial = ticket_id
        return self.opened

    def ended(self, ticket: Ticket, finish: Finish, now_s: float) -> bool:
        """Learn from an ending. True where this one opened the breaker or kept it open."""
        was_trial = self._trial == ticket.ticket_id
        if was_trial:
            self._trial = None
        match finish.outcome:
            case Ending.COMPLETED | Ending.REFUSED:
                self._works(was_trial)
                self._busy_backoff_s = _BUSY_FIRST_S
            case Ending.CANCELLED:
                return False
            case Ending.UNREACHABLE | Ending.FAILED:
                return self._failed(was_trial, now_s)
            case Ending.BUSY:
                self._works(was_trial)
                self._back_off(finish.retry_after_s, now_s)
        return False

    def first_token(self, ticket: Ticket) -> None:
        """A trial that answers need not end before others may come."""
        if self._trial == ticket.ticket_id:
            self._works(was_trial=True)

    def health(self, healthy: bool, now_s: float) -> None:
        """A background probe's answer. Only a recovery that the probes saw (bad, then good) brings the next trial
        forward: an engine whose health page always answers while its inference fails waits out its back-off.
        """
        if not self.opened:
            return
        if not healthy:
            self._health_failed = True
        elif self._health_failed:
            self._health_failed = False
            self.ready_s = min(self.ready_s, now_s)

    def _works(self, was_trial: bool) -> None:
        self._history = (self._history << 1) & _WINDOW_MASK
        if was_trial:
            self._trial = None
            self.opened = False
            self._history = 0
            self._open_s = _OPEN_FIRST_S
            self._health_failed = False

    def _failed(self, was_trial: bool, now_s: float) -> bool:
        self._history = (self._history << 1 | 1) & _WINDOW_MASK
        if self.opened:
            if was_trial:
                self._open_s = min(self._open_s * 2, _OPEN_MAX_S)
                self.ready_s = now_s + self._open_s
            return True
        if self._history.bit_count() < _FAILURES_TO_OPEN:
            return False
        self.opened = True
        self.ready_s = now_s + self._open_s
        return True

    def _back_off(self, asked_s: float | None, now_s: float) -> None:
        wait_s = self._busy_backoff_s if asked_s is None else min(max(asked_s, 0.0), _BUSY_ASKED_MAX_S)
        self._busy_backoff_s = min(self._busy_backoff_s * 2, _BUSY_MAX_S)
        self.ready_s = max(self.ready_s, now_s + wait_s)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something runs; empty means unknown, which is taken as the same place."""

    zone: str = ""
    region: str = ""


# One round trip in seconds: within a zone, between zones of a region, between regions. The public clouds state below
# 1 ms within a zone and below 2 ms between zones; 60 ms is a coast-to-coast round trip. `HopTable.round_trip_s`
# overrides a pair.
_SAME_ZONE_S = 0.0005
_SAME_REGION_S = 0.0015
_OTHER_REGION_S = 0.060


@dataclass(frozen=True, slots=True)
class HopTable:
    """Seconds of network between the router and an endpoint."""

    here: Place = Place()
    round_trip_s: Mapping[tuple[str, str], float] | None = None
    """Measured round trips by (from, to), each a zone or a region name; the zone pair is looked up first, either way
    round.
    """

    def hop_s(self, endpoint: Endpoint) -> float:
        """One round trip from here to the endpoint."""
        for ours, theirs in ((self.here.zone, endpoint.zone), (self.here.region, endpoint.region)):
            for pair in ((ours, theirs), (theirs, ours)):
                measured_s = (self.round_trip_s or {}).get(pair)
                if measured_s is not None and ours and theirs:
                    return measured_s
        if self.here.region and endpoint.region and self.here.region != endpoint.region:
            return _OTHER_REGION_S
        if self.here.zone and endpoint.zone and self.here.zone != endpoint.zone:
            return _SAME_REGION_S
        return _SAME_ZONE_S
