"""How usage records lie in a spool segment, and how finished events are made of them.

Owns: the frame (magic, length, CRC-32, version, kind, payload), encoding, the `Scanner` that reads a segment while it
is still being written and tells a torn tail from damage, and the `Fold` that joins records into events. Does not own:
files, folders and locks (`controlplane.adapters.spool` writes, `billing.adapters.spool_files` reads) or the records'
fields (`usage_event`).

A payload is a JSON array of the record's fields in order, and one object of named newer fields when there are any:
half the size and under half the time of an object with names. JSON is UTF-8, in which the byte 0xFF cannot occur, so
no payload can hold what looks like a frame, and reading can start again at the next magic after damage.

A segment starts with what is still open (OPEN, its last CHECKPOINT, RETRIED where a later attempt exists), so that it
can be read without the segments before it. An OPEN that is read twice counts once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from struct import Struct
from typing import Any

import orjson

from billing.usage_event import (
    REFUSAL_KINDS,
    MalformedEvent,
    Refusal,
    UsageCheckpoint,
    UsageClose,
    UsageEvent,
    UsageOpen,
    checkpoint_from_row,
    close_from_row,
    join,
    open_from_row,
    refusal_from_row,
    settle_orphan,
)

# The version of the frame. A reader keeps frames of other versions aside, whole.
FORMAT_VERSION = 1
# 0xFF is in no UTF-8 text, so this cannot occur inside a payload.
MAGIC = b"\xffU"
_HEADER = Struct("<2sIIBB")
HEADER_BYTES = _HEADER.size
# Far above any record (an OPEN is about 350 bytes), far below what a damaged length could make a reader wait for.
MAX_PAYLOAD_BYTES = 64 * 1024
MAX_FRAME_BYTES = HEADER_BYTES + MAX_PAYLOAD_BYTES
# About 1.5 kB each: 150 MB at worst. A gateway process runs a few thousand requests at once; more is a leak of opens.
MAX_OPEN_COUNT = 100_000


class Kind(IntEnum):
    """What a frame holds. The numbers are the format."""

    OPEN = 1
    CHECKPOINT = 2
    CLOSE = 3
    REFUSAL = 4
    RETRIED = 5
    """A later attempt of a request exists: written when the earlier one is carried into a new segment."""
    END = 6
    """The writer stopped in order: nothing follows."""


@dataclass(frozen=True, slots=True)
class Retried:
    """Attempt `attempt` of this request was dispatched, so an earlier one is not what the request is billed by."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class End:
    """The writer stopped in order."""


Value = UsageOpen | UsageCheckpoint | UsageClose | Refusal | Retried | End


@dataclass(frozen=True, slots=True)
class Record:
    """A frame that was read. `start_bytes` and `end_bytes` are its place in the segment."""

    value: Value
    start_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are no readable record: the bytes themselves, for quarantine, and one sentence why."""

    raw: bytes
    reason: str
    start_bytes: int
    end_bytes: int


Item = Record | Damage


def encode_open(opened: UsageOpen) -> bytes:
    """The frame of an OPEN. Raises MalformedEvent when it is longer than a frame may be."""
    return _frame(orjson.dumps(_row(opened)), Kind.OPEN, _OPEN_SEED)


def encode_checkpoint(checkpoint: UsageCheckpoint) -> bytes:
    """The frame of a CHECKPOINT."""
    return _frame(orjson.dumps(_row(checkpoint)), Kind.CHECKPOINT, _CHECKPOINT_SEED)


def encode_close(closed: UsageClose) -> bytes:
    """The frame of a CLOSE. Raises MalformedEvent when it is longer than a frame may be."""
    return _frame(orjson.dumps(_row(closed)), Kind.CLOSE, _CLOSE_SEED)


def encode_refusal(refusal: Refusal) -> bytes:
    """The frame of a REFUSAL."""
    row = _REFUSAL_ROW(refusal)
    return _frame(orjson.dumps((*row, refusal.extra) if refusal.extra else row), Kind.REFUSAL, _seed(Kind.REFUSAL))


def encode_retried(retried: Retried) -> bytes:
    """The frame that says that a later attempt exists."""
    return _frame(orjson.dumps((retried.request_id, retried.attempt)), Kind.RETRIED, _seed(Kind.RETRIED))


def encode_end() -> bytes:
    """The frame of an orderly end."""
    return _frame(b"[]", Kind.END, _seed(Kind.END))


class Scanner:
    """Reads one segment, in pieces, while it may still be written.

    The caller hands in bytes that start at `offset_bytes` and may hand the same bytes in again: what is not yet a
    whole frame is not kept, because a writer that ran out of disk cuts its half-written frame off again.
    """

    __slots__ = ("_offset",)

    def __init__(self, offset_bytes: int = 0) -> None:
        self._offset = offset_bytes

    @property
    def offset_bytes(self) -> int:
        """The first byte of the segment that was not consumed."""
        return self._offset

    def feed(self, data: bytes, *, final: bool = False) -> list[Item]:
        """The records and the damage in `data`, in order.

        Not `final`: bytes at the end that may yet become a frame are left for the next call. `final` (the writer is
        gone or has moved on, and `data` reaches the end of the file): a frame that was cut off by the end is a torn
        tail, which was never acknowledged to anybody, and is dropped (`offset_bytes` stays before it); anything else
        unreadable is damage.
        """
        items: list[Item] = []
        start, at, size = self._offset, 0, len(data)
        while at < size:
            end, fault = _frame_end(data, at)
            if end:
                items.append(_read(data, at, end, start))
                at = end
                continue
            upto = _next_frame(data, at + 1)
            if upto < 0:
                upto = self._undecided(data, at, final=final)
                if upto == at:
                    break
            items.append(Damage(data[at:upto], fault, start + at, start + upto))
            at = upto
        self._offset = start + at
        return items

    def _undecided(self, data: bytes, at: int, *, final: bool) -> int:
        """How far the unreadable bytes at `at`, with no frame after them, are damage for certain."""
        if final:
            return at if _is_torn(data, at) else len(data)
        # A frame that is still being written may start anywhere in the last MAX_FRAME_BYTES, not before them.
        return max(at, len(data) - MAX_FRAME_BYTES)


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A record that fits no event: a close without its open, an open too many. `reason` is one sentence."""

    reason: str


class Fold:
    """Joins the records of one writer into finished events, and knows which attempts are still open.

    Mutable; one per writer. Records come in the order in which they were written. A record that is read twice from
    where a segment was rotated (OPEN, CHECKPOINT) changes nothing.
    """

    __slots__ = ("_attempts", "_ended", "_max_open_count", "_open")

    def __init__(self, max_open_count: int = MAX_OPEN_COUNT) -> None:
        self._max_open_count = max_open_count
        self._open: dict[str, tuple[UsageOpen, UsageCheckpoint | None]] = {}
        # request_id -> (attempts open now, latest attempt seen); kept while one is open.
        self._attempts: dict[str, tuple[int, int]] = {}
        self._ended = False

    @property
    def open_count(self) -> int:
        """How many attempts are open."""
        return len(self._open)

    @property
    def ended(self) -> bool:
        """Whether the writer said that it stopped in order."""
        return self._ended

    def ends_not_before_ns(self) -> int | None:
        """The earliest Unix ns at which an attempt that is open now can come to have ended; None when none is.

        Should its writer die, it has ended at its last checkpoint, or when it was opened.
        """
        ends = (noted.at_ns if noted else opened.opened_ns for opened, noted in self._open.values())
        return min(ends, default=None)

    def add(self, value: Value) -> UsageEvent | Refusal | Unmatched | None:
        """Take the next record; gives what it finished, if anything."""
        match value:
            case UsageClose():
                return self._close(value)
            case UsageOpen():
                return self._begin(value)
            case UsageCheckpoint():
                return self._note(value)
            case Refusal():
                return value
            case Retried():
                self._retried(value)
            case End():
                self._ended = True
        return None

    def settle(self) -> list[UsageEvent]:
        """Close what is open, because its writer is gone: estimated, from the last checkpoint.

        Of a request's attempts the latest is billable, so an orphan is unless a later attempt was seen.
        """
        settled = []
        for opened, checkpoint in self._open.values():
            latest = self._attempts[opened.request_id][1]
            settled.append(join(opened, settle_orphan(opened, checkpoint, billable=opened.attempt >= latest)))
        self._open.clear()
        self._attempts.clear()
        return settled

    def _begin(self, opened: UsageOpen) -> Unmatched | None:
        if opened.event_id in self._open:
            return None
        if len(self._open) >= self._max_open_count:
            return Unmatched(f"More than {self._max_open_count} attempts of one writer are open.")
        self._open[opened.event_id] = (opened, None)
        count, latest = self._attempts.get(opened.request_id, (0, 0))
        self._attempts[opened.request_id] = (count + 1, max(latest, opened.attempt))
        return None

    def _note(self, checkpoint: UsageCheckpoint) -> Unmatched | None:
        known = self._open.get(checkpoint.event_id)
        if known is None:
            return Unmatched("A checkpoint has no open before it.")
        self._open[checkpoint.event_id] = (known[0], checkpoint)
        return None

    def _close(self, closed: UsageClose) -> UsageEvent | Unmatched:
        known = self._open.pop(closed.event_id, None)
        if known is None:
            return Unmatched("A close has no open before it.")
        opened = known[0]
        count, latest = self._attempts.pop(opened.request_id)
        if count > 1:
            self._attempts[opened.request_id] = (count - 1, latest)
        return join(opened, closed)

    def _retried(self, retried: Retried) -> None:
        known = self._attempts.get(retried.request_id)
        if known is not None:
            self._attempts[retried.request_id] = (known[0], max(known[1], retried.attempt))


def _seed(kind: Kind) -> int:
    """The CRC of version and kind, which the payload's CRC goes on from: so it covers them too."""
    return zlib.crc32(bytes((FORMAT_VERSION, kind)))


_REFUSAL_ROW: Callable[[Refusal], tuple[Any, ...]] = attrgetter(*REFUSAL_KINDS)
_OPEN_SEED = _seed(Kind.OPEN)
_CHECKPOINT_SEED = _seed(Kind.CHECKPOINT)
_CLOSE_SEED = _seed(Kind.CLOSE)


def _row(record: UsageOpen | UsageCheckpoint | UsageClose) -> tuple[Any, ...]:
    """The fields in their order; `extra`, the last one, only where there is any."""
    return (*record[:-1], dict(record.extra)) if record.extra else record[:-1]


def _frame(payload: bytes, kind: int, seed: int) -> bytes:
    size = len(payload)
    if size > MAX_PAYLOAD_BYTES:
        raise MalformedEvent(f"A usage record is {size} bytes long; at most {MAX_PAYLOAD_BYTES} were expected.")
    return _HEADER.pack(MAGIC, size, zlib.crc32(payload, seed), FORMAT_VERSION, kind) + payload


def _frame_end(data: bytes, at: int) -> tuple[int, str]:
    """Where the valid frame at `at` ends; 0 and one sentence when there is none."""
    body = at + HEADER_BYTES
    if body > len(data):
        return 0, "The bytes end within a frame's header."
    magic, size, crc, version, kind = _HEADER.unpack_from(data, at)
    if magic != MAGIC or size > MAX_PAYLOAD_BYTES:
        return 0, "The bytes do not start with a frame."
    end = body + size
    if end > len(data):
        return 0, "The bytes end within a frame."
    if zlib.crc32(data[body:end], zlib.crc32(bytes((version, kind)))) != crc:
        return 0, "The checksum of a frame does not match its bytes."
    return end, ""


def _next_frame(data: bytes, at: int) -> int:
    """Where the next valid frame from `at` on starts; -1 when there is none."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _frame_end(data, at)[0]:
            return at
        at += 1
    return -1


def _is_torn(data: bytes, at: int) -> bool:
    """Whether the bytes from `at` to the end are the beginning of a frame that was cut off."""
    size = len(data) - at
    if size < HEADER_BYTES:
        return data[at : at + len(MAGIC)] == MAGIC[:size]
    magic, payload, _crc, _version, _kind = _HEADER.unpack_from(data, at)
    return bool(magic == MAGIC and payload <= MAX_PAYLOAD_BYTES and size < HEADER_BYTES + payload)


def _read(data: bytes, at: int, end: int, start: int) -> Item:
    """The record of a frame whose checksum holds."""
    _magic, _size, _crc, version, kind = _HEADER.unpack_from(data, at)
    reader = _READERS.get(kind) if version == FORMAT_VERSION else None
    if reader is None:
        reason = f"A frame is of version {version} and kind {kind}, which this version cannot read."
        return Damage(data[at:end], reason, start + at, start + end)
    try:
        value = reader(orjson.loads(data[at + HEADER_BYTES : end]))
    except (MalformedEvent, orjson.JSONDecodeError) as fault:
        return Damage(data[at:end], str(fault), start + at, start + end)
    return Record(value, start + at, start + end)


def _retried_from_row(row: Any) -> Retried:
    match row:
        case [str(request_id), int(attempt)]:
            return Retried(request_id, attempt)
    raise MalformedEvent("A record of a retry is an array of the request's id and the attempt.")


def _end_from_row(_row: Any) -> End:
    return End()


_READERS: Mapping[int, Callable[[Any], Value]] = {
    Kind.OPEN: open_from_row,
    Kind.CHECKPOINT: checkpoint_from_row,
    Kind.CLOSE: close_from_row,
    Kind.REFUSAL: refusal_from_row,
    Kind.RETRIED: _retried_from_row,
    Kind.END: _end_from_row,
}
