"""The three accounts of a run, as values: what clients got, what engines sent, what the books say.

Owns: the records, reading an engine's log (also one that ends in the middle of a line, because its writer was killed)
and reading the books' events. Does not own: what must hold between the accounts (`check`).

The tag, made by the client, is inside the request's `user`: engines log it, and the books keep `user`. So a request is
known in all three accounts even when its client never learned the gateway's request id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import sqlalchemy as sa

from billing.adapters import sql
from billing.adapters.tables import UsageEventRow, table
from tests.faults.plan import Wish, tag_of

# The tag in the JSON text of a request.
TAGGED = re.compile(r"&tag=([a-z0-9-]+)")


class Ended(StrEnum):
    """How a request ended, as its client saw it."""

    DONE = "done"
    """A whole answer: `[DONE]` of a stream without an error in it, or every byte of a JSON answer."""
    FAULT_SAID = "fault said"
    """The stream said that it failed."""
    CUT = "cut"
    """The connection ended after the head and before the end."""
    LEFT = "left"
    """The client went away."""
    REFUSED = "refused"
    """An error status."""
    NO_ANSWER = "no answer"
    """The connection ended, or was never made, before a head came."""
    GAVE_UP = "gave up"
    """Nothing came for longer than every deadline of the gateway: a defect."""


@dataclass(slots=True)
class ClientSaw:
    """What one client logged of one request. Mutable while it runs. Times are monotonic seconds of the test."""

    wish: Wish
    sent_s: float = 0.0
    sent_ns: int = 0
    connected: bool = False
    request_id: str = ""
    status: int | None = None
    ended: Ended | None = None
    ended_s: float = 0.0
    code: str = ""
    """Of an error answer."""
    message: str = ""
    left_tokens: str = ""
    """What the gateway says is left of the token limit."""
    reads: list[tuple[float, int]] = field(default_factory=list)
    """(when, tokens so far) for each read that brought tokens."""

    @property
    def tokens(self) -> int:
        """Output tokens received, over all choices."""
        return self.reads[-1][1] if self.reads else 0

    def tokens_until(self, at_s: float) -> int:
        """Output tokens received by then."""
        return max((tokens for when_s, tokens in self.reads if when_s <= at_s), default=0)


@dataclass(frozen=True, slots=True)
class EngineSaw:
    """What one engine logged of one request."""

    endpoint: str
    request_id: str
    tag: str
    script: str
    tokens_sent: int
    """At most: each token is logged before it is sent."""
    ended: str
    """Empty: the engine was killed meanwhile (or the run ended)."""
    received_ns: int


@dataclass(frozen=True, slots=True)
class Booked:
    """An event as the books hold it."""

    event_id: str
    request_id: str
    attempt: int
    tag: str
    endpoint: str
    stream: bool
    choices: int
    billable: bool
    estimated: bool
    outcome: str
    status: int | None
    error_code: str | None
    uncached_input_tokens: int | None
    cached_input_tokens: int | None
    output_tokens: int | None
    reserved_input_tokens: int
    reserved_output_tokens: int
    first_token_ns: int | None
    opened_ns: int
    ended_ns: int
    amount_pico: int | None
    posting_id: str | None

    @property
    def input_tokens(self) -> int | None:
        """The whole prompt, as billed."""
        if self.uncached_input_tokens is None:
            return None
        return self.uncached_input_tokens + (self.cached_input_tokens or 0)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known of a run."""

    clients: tuple[ClientSaw, ...]
    engines: tuple[EngineSaw, ...]
    events: tuple[Booked, ...]
    gateway_kills_ns: tuple[int, ...]
    """Unix ns at which a gateway process was killed, by SIGKILL or with its parent."""
    engine_kills: tuple[tuple[str, int], ...] = ()
    """(endpoint, Unix ns)."""


def read_engine_log(endpoint: str, log: Path) -> list[EngineSaw]:
    """The requests of one life of an engine."""
    lines: dict[int, dict[str, object]] = {}
    for raw in log.read_bytes().split(b"\n") if log.exists() else ():
        try:
            line = json.loads(raw)
        except ValueError:
            continue  # the last line of a life that was ended by SIGKILL, or the empty rest
        lines.setdefault(line["number"], {}).update(line)
    return [_engine_saw(endpoint, line) for line in lines.values() if "request_id" in line]


def _engine_saw(endpoint: str, line: dict[str, object]) -> EngineSaw:
    sending, sent = line.get("sending", 0), line["tokens_sent"]
    assert isinstance(sending, int) and isinstance(sent, int)
    return EngineSaw(
        endpoint, str(line["request_id"]), str(line["tag"]), str(line["script"]), max(sending, sent),
        str(line["ended"]), int(str(line["received_ns"])),
    )  # fmt: skip


def read_books(url: str) -> tuple[Booked, ...]:
    """Every event of the books."""
    rows = table(UsageEventRow)
    engine = sql.engine(url)
    try:
        with sql.read(engine) as connection:
            found = connection.execute(sa.select(rows).order_by(rows.c.opened_ns)).mappings().all()
    finally:
        engine.dispose()
    return tuple(_booked(row) for row in found)


def _booked(row: sa.RowMapping) -> Booked:
    same = {name: row[name] for name in Booked.__dataclass_fields__ if name != "tag"}
    return Booked(**same, tag=tag_of(row["end_user"]))


def by_tag(records: Iterable[ClientSaw]) -> dict[str, ClientSaw]:
    """The clients by tag."""
    return {record.wish.tag: record for record in records}
