"""Events into the books: one transaction per batch, nothing lost and nothing twice.

Owns: the batch (`IngestBatch`), the order of its one transaction (sift out repeats, rate, insert, post, roll up, store
the offset), the retry of what the database aborted, and the isolation of an event that cannot be stored. Does not own:
the SQL of each table (`ingest_sql`), rating and posting (`pricing`, `ledger`, `rollup`), or the spool (`shipper`).

The unique key of `usage_event` decides what is new, not a cache: an event that is already there is not rated, posted
or rolled up again, so a batch may be replayed whole or in part. The same id with another payload hash is never
dropped: it goes to the quarantine and is counted. Refusals have no id; they are counted with the spool offset that
they were read before, and only when that offset moves forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import orjson
import sqlalchemy as sa
import uuid_utils
from sqlalchemy.engine import Connection, Engine

from billing import ledger, rollup
from billing.adapters import books_sql, ingest_sql
from billing.adapters.ingest_sql import Quarantined, Raced, SpoolOffset, SpoolRefusal
from billing.adapters.sql import is_sqlite, write
from billing.errors import StoreUnavailable
from billing.ledger import PostingKey, RatedEvent, Transfer
from billing.pricing import ChargeFlag, PriceSchedule, rate, schedule
from billing.usage_event import MalformedEvent, UsageEvent, encode_event, event_fields, event_from_fields

__all__ = ["Ingest", "IngestBatch", "IngestReport", "Quarantined", "SpoolOffset", "SpoolRefusal"]

# How often one batch is tried again when the database aborts it (deadlock, lost race, lost connection).
MAX_ATTEMPTS = 6
# First pause between attempts; doubles. 0.05 s is longer than a batch of a peer takes.
FIRST_PAUSE_S = 0.05
# A UUIDv7 as hex.
_ID_LENGTH = 32
_HEX_DIGITS = frozenset("0123456789abcdef")
# What a NUL character is in JSON; a text that spells this out has it too, and is then looked at closely.
_NUL_IN_JSON = rb"\u0000"
# SQLSTATE of what a retry cures: serialization failure, deadlock, lock or statement cancelled, server going down.
_TRANSIENT_STATES = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "08000", "08003", "08006"})
# sqlite3 raises OverflowError, which SQLAlchemy does not wrap, for an integer beyond 64 bits.
_DATABASE_FAULTS = (sa.exc.DBAPIError, OverflowError)
_TRANSIENT_SQLITE = ("database is locked", "database is busy", "database table is locked")


@dataclass(frozen=True, slots=True)
class IngestBatch:
    """What is taken into the books at once: in full, or not at all."""

    events: Sequence[UsageEvent] = ()
    refusals: Sequence[SpoolRefusal] = ()
    quarantined: Sequence[Quarantined] = ()
    """What the reader could not decode."""
    offsets: Sequence[SpoolOffset] = ()
    """Where to go on reading after this batch, one per spool folder."""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What became of a batch. Counts of events unless named otherwise."""

    inserted: int = 0
    duplicates: int = 0
    """Already in the books, with the same payload: nothing was done."""
    conflicting: int = 0
    """Already in the books, with another payload: kept in the quarantine. An alarm."""
    quarantined: int = 0
    """Events that could not be stored; kept in the quarantine."""
    unpriced: int = 0
    """Inserted without an amount, because no book sells their model."""
    posting_ids: tuple[str, ...] = ()

    @property
    def posted(self) -> int:
        """Transfers posted."""
        return len(self.posting_ids)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time and ids, as arguments so that tests decide them."""

    unix_ns: Callable[[], int] = time.time_ns
    new_id: Callable[[], str] = lambda: uuid_utils.uuid7().hex
    pause: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class _Sifted:
    """A batch's events by what the books say of them."""

    fresh: list[UsageEvent]
    duplicates: int
    conflicting: list[UsageEvent]


class Ingest:
    """Writes batches into the books of one database. One caller at a time; any number of instances side by side."""

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self._engine = engine
        self._clock = clock or Clock()
        self._schedule: PriceSchedule = schedule(())
        self._books_seen: tuple[int, int] = (0, 0)

    def write(self, batch: IngestBatch) -> IngestReport:
        """Take a batch into the books. When this returns, it is committed.

        Raises StoreUnavailable when the database does not answer or keeps aborting; nothing of the batch is then in
        the books, or all of it is and a replay finds only duplicates.
        """
        events, poison = self._well_formed(batch.events)
        pause_s = FIRST_PAUSE_S
        reason = "other writers were first"
        for _ in range(MAX_ATTEMPTS):
            try:
                return self._commit(replace(batch, events=events), poison)
            except Raced:
                continue
            except sa.exc.TimeoutError:
                raise StoreUnavailable("No database connection became free in time.") from None
            except _DATABASE_FAULTS as fault:
                reason = _reason(fault)
                blame = _blame(fault)
                if blame is _Blame.STORE:
                    raise StoreUnavailable(f"The database refused a batch: {reason}.") from None
                if blame is _Blame.ROW:
                    found = self._poison(events)
                    if not found:
                        raise
                    bad = {id(one.event) for one in found}
                    events = [event for event in events if id(event) not in bad]
                    poison = [*poison, *found]
                    continue
            self._clock.pause(pause_s)
            pause_s *= 2
        raise StoreUnavailable(f"The database did not take a batch in {MAX_ATTEMPTS} attempts: {reason}.")

    def _commit(self, batch: IngestBatch, poison: Sequence[_Poison]) -> IngestReport:
        with write(self._engine) as connection:
            return self._apply(connection, batch, poison)

    def _apply(self, connection: Connection, batch: IngestBatch, poison: Sequence[_Poison]) -> IngestReport:
        store = ingest_sql.writer(connection)
        now_ns = self._clock.unix_ns()
        sifted = self._sift(store, batch.events)
        rated = self._rate(connection, sifted.fresh)
        transfers, posting_of = self._post(store, rated)
        store.insert_events(rated, posting_of)
        store.insert_transfers(transfers, now_ns)
        store.add_rollups(rollup.roll_up(rated))
        advanced = store.put_offsets(batch.offsets, now_ns)
        tracked = {(one.node, one.incarnation) for one in batch.offsets}
        store.add_refusals(
            [one for one in batch.refusals if one.spool not in tracked or one.spool in advanced],
        )
        conflicts = [_conflict(event) for event in sifted.conflicting]
        store.quarantine([*batch.quarantined, *conflicts, *(one.quarantined() for one in poison)], now_ns)
        return IngestReport(
            inserted=len(rated),
            duplicates=sifted.duplicates,
            conflicting=len(conflicts),
            quarantined=len(poison),
            unpriced=sum(ChargeFlag.UNPRICED in one.charge.flags for one in rated),
            posting_ids=tuple(transfer.posting_id for transfer in transfers),
        )

    def _sift(self, store: ingest_sql.Writer, events: Sequence[UsageEvent]) -> _Sifted:
        known = store.hashes_of([event.event_id for event in events])
        fresh: dict[str, UsageEvent] = {}
        duplicates, conflicting = 0, []
        for event in events:
            first = fresh.get(event.event_id)
            stored = first.payload_hash if first else known.get(event.event_id)
            if stored is None:
                fresh[event.event_id] = event
            elif stored == event.payload_hash:
                duplicates += 1
            else:
                conflicting.append(event)
        # Two writers that insert in the same order cannot deadlock.
        return _Sifted([fresh[event_id] for event_id in sorted(fresh)], duplicates, conflicting)

    def _rate(self, connection: Connection, events: Sequence[UsageEvent]) -> list[RatedEvent]:
        if not events:
            return []
        self._refresh_books(connection)
        rated = []
        for event in events:
            opened = event.open
            if opened.price_version is not None:
                book = self._schedule.book(opened.price_version)
            else:
                # The gateway knew no price when the request came in; one may have been added since.
                book = self._schedule.book_at(opened.org_id, opened.received_ns)
            rated.append(RatedEvent(event, rate(event, book)))
        return rated

    def _refresh_books(self, connection: Connection) -> None:
        """Books never change, so a look at how many there are, and when the last came, is enough."""
        seen = books_sql.books_mark(connection)
        if seen != self._books_seen:
            self._schedule = schedule(books_sql.read_books(connection))
            self._books_seen = seen

    def _post(self, store: ingest_sql.Writer, rated: Sequence[RatedEvent]) -> tuple[list[Transfer], dict[str, str]]:
        closed = store.closed_periods()
        groups = ledger.group(rated, closed.__contains__)
        # Holds the periods open until this transaction ends; raises Raced when one was closed meanwhile.
        store.hold_periods({key.period_id for key in groups})
        transfers: list[Transfer] = []
        posting_of: dict[str, str] = {}
        for key in sorted(groups, key=_sort_key):
            posting_id = self._clock.new_id()
            transfers.append(ledger.post_batch(key, groups[key], posting_id))
            posting_of.update((one.event.event_id, posting_id) for one in groups[key])
        return transfers, posting_of

    def _well_formed(self, events: Sequence[UsageEvent]) -> tuple[list[UsageEvent], list[_Poison]]:
        """The events that can be a row, and those that cannot with the reason."""
        good, poison = [], []
        for event in events:
            fault = _malformed(event)
            if fault is None:
                good.append(event)
            else:
                poison.append(_Poison(event, fault))
        return good, poison

    def _poison(self, events: Sequence[UsageEvent]) -> list[_Poison]:
        """The events that the database refuses even alone, found by halves in transactions that are rolled back."""
        if not events:
            return []
        fault = self._fault_of(events)
        if fault is None:
            return []
        if len(events) == 1:
            return [_Poison(events[0], fault)]
        middle = len(events) // 2
        return [*self._poison(events[:middle]), *self._poison(events[middle:])]

    def _fault_of(self, events: Sequence[UsageEvent]) -> str | None:
        try:
            with write(self._engine) as connection:
                self._apply(connection, IngestBatch(events), ())
                _roll_back(connection)
        except Raced:
            pass
        except _DATABASE_FAULTS as fault:
            if _blame(fault) is not _Blame.ROW:
                raise
            return _reason(fault)
        return None


@dataclass(frozen=True, slots=True)
class _Poison:
    """An event that cannot be stored, and why."""

    event: UsageEvent
    reason: str

    def quarantined(self) -> Quarantined:
        """What the quarantine keeps of it."""
        return Quarantined("event", self.reason, _raw(self.event), self.event.open.node, event_id=_safe(self.event))


def _conflict(event: UsageEvent) -> Quarantined:
    reason = "An event with this id and another payload is already in the books."
    return Quarantined("conflict", reason, _raw(event), event.open.node, event_id=event.event_id)


def _raw(event: UsageEvent) -> bytes:
    """The event as JSON; where it cannot even be that, its fields as Python prints them."""
    try:
        return encode_event(event)
    except (TypeError, ValueError):
        return repr(event_fields(event)).encode("utf-8", "backslashreplace")


def _safe(event: UsageEvent) -> str:
    return ascii(event.event_id).strip("'")


def _malformed(event: UsageEvent) -> str | None:
    """Why the event cannot be a row, in one sentence, or None. Checked here so that one event cannot fail a batch."""
    event_id = event.event_id
    if len(event_id) != _ID_LENGTH or not _HEX_DIGITS.issuperset(event_id):
        return "event_id must be 32 lower-case hex digits."
    fields = event_fields(event)
    try:
        event_from_fields(fields)
        text = orjson.dumps(fields) if event.amount_pico is None else encode_event(event)
    except (MalformedEvent, TypeError, ValueError) as fault:
        return str(fault)
    if _NUL_IN_JSON not in text:
        return None
    for name, value in fields.items():
        # PostgreSQL stores no NUL in text.
        if isinstance(value, str) and "\x00" in value:
            return f"{name} holds a NUL character."
    return None


def _sort_key(key: PostingKey) -> tuple[str, ...]:
    return (key.org_id, key.price_version, key.currency, key.period_id)


def _roll_back(connection: Connection) -> None:
    """End a transaction that was only tried, after what the database would have checked at its commit."""
    if not is_sqlite(connection):
        connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
    transaction = connection.get_transaction()
    if transaction is not None:
        transaction.rollback()


class _Blame(Enum):
    """What a fault of the database says about the transaction."""

    MOMENT = "moment"
    """The same transaction may well succeed when tried again."""
    ROW = "row"
    """A value was refused, so some event cannot be stored."""
    STORE = "store"
    """The database cannot be used as it is (full, read-only, statement too slow)."""


def _blame(fault: sa.exc.DBAPIError | OverflowError) -> _Blame:
    if isinstance(fault, OverflowError | sa.exc.DataError | sa.exc.IntegrityError):
        return _Blame.ROW
    state = getattr(fault.orig, "sqlstate", "")
    # psycopg has no state to tell when it cannot connect at all.
    if fault.connection_invalidated or state is None or state in _TRANSIENT_STATES:
        return _Blame.MOMENT
    if isinstance(fault, sa.exc.OperationalError):
        return _Blame.MOMENT if any(text in str(fault.orig) for text in _TRANSIENT_SQLITE) else _Blame.STORE
    raise fault


def _reason(fault: sa.exc.DBAPIError | OverflowError) -> str:
    told = str(fault.orig if isinstance(fault, sa.exc.DBAPIError) else fault).strip()
    return told.splitlines()[0].rstrip(".") if told else type(fault).__name__
