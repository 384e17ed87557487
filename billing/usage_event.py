"""The usage event: what one attempt dispatched to an engine used, and for whom.

Owns: the values that the gateway records while a request runs (`UsageOpen` before dispatch, `UsageCheckpoint` while
tokens are delivered, `UsageClose` before the last byte), the finished `UsageEvent` that is joined from them, its JSON
form, its payload hash, and the rule by which an attempt that nobody closed is settled. Does not own: how records lie
in a file (`spool_format`), what an event costs (`pricing`), or where events are stored (`adapters`).

A count that is not known is None, never 0. Fields that this version does not know are kept in `extra`, by name, so
that an old reader passes a newer writer's events on without losing anything. A field that is added later is nullable:
the payload hash leaves nulls out, so an old event hashes the same under a newer reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple, get_args, get_type_hints

import orjson

# The version that this module writes. A newer writer names its own in the field of this name.
SCHEMA_VERSION = 1
# The database columns are signed 64-bit integers (PostgreSQL BIGINT, SQLite INTEGER).
_INT_LIMIT = 2**63
# 128 bits: the hash tells a changed payload from a repeated one; it is no defence against a forger.
_HASH_BYTES = 16
# A rating may be redone (a price book that came late, a correction), so it is no part of what the hash protects.
_RATING_FIELDS = frozenset({"amount_pico", "price_version", "payload_hash"})
# No field of a newer writer.
_NOTHING_NEWER: Mapping[str, Any] = MappingProxyType({})


class MalformedEvent(ValueError):
    """A record or an event is not in the form that this module writes. The message names the field."""


class Outcome(StrEnum):
    """How an attempt ended. The values are stored and are metric labels."""

    COMPLETED = "completed"
    """The engine finished and the client got everything."""
    CANCELLED = "cancelled"
    """The client left."""
    FAILED = "failed"
    """The engine failed, before or after the first token."""
    TRUNCATED = "truncated"
    """A deadline of ours cut the answer short."""
    REJECTED_BY_ENGINE = "rejected_by_engine"
    """The engine answered with a 4xx or refused to queue."""
    CRASHED = "crashed"
    """The gateway process died; the event was settled afterwards from its last checkpoint."""


class UsageOpen(NamedTuple):
    """What is known of an attempt before it is dispatched. Written before the engine sees a byte."""

    event_id: str
    """UUIDv7, 32 hex digits, made by us: never the client's or the engine's id."""
    request_id: str
    attempt: int
    """1 for the first engine that was tried."""
    org_id: str
    project_id: str
    key_id: str
    user: str | None
    operation: str
    profile: str | None
    model_asked: str
    model_served: str
    tier_asked: str | None
    deployment: str | None
    pool: str | None
    endpoint: str
    endpoint_incarnation: str
    node: str
    batch_id: str | None
    custom_id: str | None
    spillover: bool
    stream: bool
    choices: int
    reserved_input_tokens: int
    reserved_output_tokens: int
    predicted_cached_tokens: int | None
    price_version: str | None
    received_ns: int
    """Unix ns at which the request was accepted."""
    opened_ns: int
    """Unix ns at which this attempt was recorded."""
    extra: Mapping[str, Any] = _NOTHING_NEWER


class UsageCheckpoint(NamedTuple):
    """What had been delivered to the client at `at_ns` (Unix ns). The last one wins; counts are totals, not steps."""

    event_id: str
    uncached_input_tokens: int | None
    cached_input_tokens: int | None
    output_tokens: int | None
    first_token_ns: int | None
    at_ns: int
    extra: Mapping[str, Any] = _NOTHING_NEWER


class UsageClose(NamedTuple):
    """How an attempt ended and what it used. Written before the client gets the last byte."""

    event_id: str
    outcome: Outcome
    status: int | None
    """HTTP status that the client saw; None when nobody can know (a crash)."""
    error_code: str | None
    billable: bool
    """Whether this is the attempt that the request is billed by: exactly one of a request's attempts is."""
    estimated: bool
    """The counts are ours, not the engine's."""
    tier_served: str | None
    uncached_input_tokens: int | None
    cached_input_tokens: int | None
    cache_write_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    """Inside `output_tokens`."""
    first_token_ns: int | None
    ended_ns: int
    extra: Mapping[str, Any] = _NOTHING_NEWER


@dataclass(frozen=True, slots=True)
class Refusal:
    """How often a request of this kind was refused within one minute. A refusal has no event of its own."""

    org_id: str
    project_id: str
    model: str
    reason: str
    minute_ns: int
    """Unix ns of the start of the minute."""
    count: int
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """One finished attempt, ready for the ledger.

    `payload_hash` (32 hex digits) is over everything but the rating, so it is fixed when the event is made. The same
    `event_id` with another hash is an alarm, never an update.
    """

    open: UsageOpen
    close: UsageClose
    payload_hash: str
    amount_pico: int | None = None
    """Picodollars (or pico-units of the price book's currency); None until the event is rated."""
    schema_version: int = SCHEMA_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of a newer writer, of the open, the close and the event together."""

    @property
    def event_id(self) -> str:
        """The event's id, the same in its open and its close."""
        return self.open.event_id


def settle_orphan(opened: UsageOpen, checkpoint: UsageCheckpoint | None, *, billable: bool = True) -> UsageClose:
    """The close of an attempt whose process died before it could write one.

    It is billed by the last checkpoint, which runs at most 1 s or 64 tokens behind delivery (DESIGN 4.3). Without one
    nothing is known to have been delivered: every count is None, which bills 0. Deterministic, so that settling the
    same orphan twice makes the same event. `billable` is False when a later attempt of the request exists.
    """
    seen = checkpoint
    return UsageClose(
        event_id=opened.event_id,
        outcome=Outcome.CRASHED,
        status=None,
        error_code=None,
        billable=billable,
        estimated=True,
        tier_served=None,
        uncached_input_tokens=seen.uncached_input_tokens if seen else None,
        cached_input_tokens=seen.cached_input_tokens if seen else None,
        cache_write_tokens=None,
        output_tokens=seen.output_tokens if seen else None,
        reasoning_tokens=None,
        first_token_ns=seen.first_token_ns if seen else None,
        ended_ns=seen.at_ns if seen else opened.opened_ns,
        extra=seen.extra if seen else {},
    )


def join(opened: UsageOpen, closed: UsageClose) -> UsageEvent:
    """The finished event of an attempt. Raises MalformedEvent when the two records are of different attempts."""
    if opened.event_id != closed.event_id:
        raise MalformedEvent(
            f"An open of event {opened.event_id!r} cannot be joined with a close of {closed.event_id!r}."
        )
    content = _flat(opened, closed)
    extra = {**opened.extra, **closed.extra}
    if extra:
        opened, closed = opened._replace(extra=_NOTHING_NEWER), closed._replace(extra=_NOTHING_NEWER)
    written_by = extra.pop("schema_version", SCHEMA_VERSION)
    version = written_by if isinstance(written_by, int) else SCHEMA_VERSION
    return UsageEvent(opened, closed, _hash(content, extra), schema_version=version, extra=extra)


def payload_hash(event: UsageEvent) -> str:
    """The hash of the event's content as it is now: compare with `event.payload_hash` to find an edit.

    blake2b over the JSON of all fields that are not None, keys sorted, without the rating (`amount_pico`,
    `price_version`). It does not depend on field order, nor on what version of this module reads the event.
    """
    return _hash(_flat(event.open, event.close), event.extra)


def event_fields(event: UsageEvent) -> dict[str, Any]:
    """The event as one flat mapping, fields in their documented order, unknown fields last."""
    flat = {"schema_version": event.schema_version, **_flat(event.open, event.close)}
    flat["amount_pico"] = event.amount_pico
    flat["payload_hash"] = event.payload_hash
    for name, value in event.extra.items():
        flat.setdefault(name, value)
    return flat


def event_from_fields(flat: Mapping[str, Any]) -> UsageEvent:
    """The event of a flat mapping, in any field order. Fields that are unknown here go to `extra`.

    Raises MalformedEvent, with the field and the expectation, when a field is missing or of a wrong kind.
    """
    try:
        opened = UsageOpen(*(_checked(name, flat[name], kinds) for name, kinds in OPEN_KINDS.items()))
        closed = _close_of(opened.event_id, *(_checked(name, flat[name], kinds) for name, kinds in CLOSE_KINDS.items()))
        version = _checked("schema_version", flat["schema_version"], (int,))
        digest = _checked("payload_hash", flat["payload_hash"], (str,))
    except KeyError as fault:
        raise MalformedEvent(f"The usage event lacks the field {fault.args[0]!r}.") from None
    amount = flat.get("amount_pico")
    if amount is not None and (not isinstance(amount, int) or isinstance(amount, bool)):
        raise MalformedEvent(f"amount_pico is {amount!r}; a whole number or null was expected.")
    extra = {name: value for name, value in flat.items() if name not in _EVENT_FIELDS}
    return UsageEvent(opened, closed, digest, amount, version, extra)


def encode_event(event: UsageEvent) -> bytes:
    """The event as one JSON object. A picodollar amount beyond 64 bits is written as a string of digits."""
    flat = event_fields(event)
    amount = event.amount_pico
    if amount is not None and not -_INT_LIMIT <= amount < _INT_LIMIT:
        flat["amount_pico"] = str(amount)
    return orjson.dumps(flat)


def decode_event(raw: bytes) -> UsageEvent:
    """The event of one JSON object. Raises MalformedEvent."""
    try:
        flat = orjson.loads(raw)
    except orjson.JSONDecodeError as fault:
        raise MalformedEvent(f"A usage event is not JSON: {fault}.") from None
    if not isinstance(flat, dict):
        raise MalformedEvent(f"A usage event is a JSON object; {type(flat).__name__} was found.")
    amount = flat.get("amount_pico")
    if isinstance(amount, str):
        if not amount.removeprefix("-").isdecimal():
            raise MalformedEvent(f"amount_pico is {amount!r}; a whole number was expected.")
        flat["amount_pico"] = int(amount)
    return event_from_fields(flat)


def open_from_row(row: list[Any]) -> UsageOpen:
    """The open of its positional form: the fields in order, then perhaps an object of named newer fields."""
    return UsageOpen(*_row(row, OPEN_KINDS, "open"))


def checkpoint_from_row(row: list[Any]) -> UsageCheckpoint:
    """The checkpoint of its positional form."""
    return UsageCheckpoint(*_row(row, CHECKPOINT_KINDS, "checkpoint"))


def close_from_row(row: list[Any]) -> UsageClose:
    """The close of its positional form."""
    return _close_of(*_row(row, CLOSE_ROW_KINDS, "close"))


def refusal_from_row(row: list[Any]) -> Refusal:
    """The refusal of its positional form."""
    return Refusal(*_row(row, REFUSAL_KINDS, "refusal"))


Kinds = tuple[type, ...]


def _kinds_of(record: type, *, without: frozenset[str] = frozenset({"extra"})) -> dict[str, Kinds]:
    """Field name -> accepted builtin types, from the annotations, so that the two cannot drift apart."""
    return {
        name: tuple(str if kind is Outcome else kind for kind in get_args(hint) or (hint,))
        for name, hint in get_type_hints(record).items()
        if name not in without
    }


# The positional forms: name -> accepted types, in the order in which the fields are written.
OPEN_KINDS = _kinds_of(UsageOpen)
CHECKPOINT_KINDS = _kinds_of(UsageCheckpoint)
CLOSE_ROW_KINDS = _kinds_of(UsageClose)
REFUSAL_KINDS = _kinds_of(Refusal)
# What a close adds to a flat event: the id is the open's.
CLOSE_KINDS = _kinds_of(UsageClose, without=frozenset({"extra", "event_id"}))
_EVENT_FIELDS = frozenset({"schema_version", "amount_pico", "payload_hash", *OPEN_KINDS, *CLOSE_KINDS})


def _flat(opened: UsageOpen, closed: UsageClose) -> dict[str, Any]:
    """Every known field of the two records, by name."""
    flat: dict[str, Any] = opened._asdict()
    flat.update(closed._asdict())  # the id is the same in both
    del flat["extra"]
    return flat


def _hash(content: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    present = {
        name: value
        for name, value in (*extra.items(), *content.items())
        if value is not None and name not in _RATING_FIELDS
    }
    return blake2b(orjson.dumps(present, option=orjson.OPT_SORT_KEYS), digest_size=_HASH_BYTES).hexdigest()


def _checked(name: str, value: Any, kinds: Kinds) -> Any:
    kind = type(value)
    if kind is Outcome:
        kind = str
    if kind not in kinds:
        expected = " or ".join(one.__name__ for one in kinds)
        raise MalformedEvent(f"{name} is of type {kind.__name__}; {expected} was expected.")
    if kind is int and not 0 <= value < _INT_LIMIT:
        raise MalformedEvent(f"{name} is {value}; a whole number from 0 to 2^63 - 1 was expected.")
    return value


def _close_of(event_id: str, outcome: str, *rest: Any) -> UsageClose:
    try:
        known_outcome = Outcome(outcome)
    except ValueError:
        raise MalformedEvent(f"outcome is {outcome!r}; one of {', '.join(Outcome)} was expected.") from None
    return UsageClose(event_id, known_outcome, *rest)


def _row(row: Any, kinds: Mapping[str, Kinds], what: str) -> list[Any]:
    """The checked values of a positional form, the object of newer fields last."""
    known = len(kinds)
    if not isinstance(row, list) or not known <= len(row) <= known + 1:
        raise MalformedEvent(f"The record {what} is an array of {known} fields and perhaps one object of newer ones.")
    values = [_checked(name, value, accepted) for (name, accepted), value in zip(kinds.items(), row, strict=False)]
    if len(row) == known:
        return [*values, {}]
    if not isinstance(row[known], dict):
        raise MalformedEvent(f"What follows the {known} fields of a {what} record must be an object of newer fields.")
    return [*values, row[known]]
