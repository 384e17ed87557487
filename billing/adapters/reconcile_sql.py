"""`inferplane bill reconcile`: reads the books in bounded pieces and has `billing.reconcile` compare them.

Owns: the order of the passes (every event by itself, postings with their entries, roll-ups by hours, seals, spool,
engines), one consistent view of the database for all of them, and the report. Does not own: what a difference is
(`billing.reconcile`), how events are read and added up (`event_scan`, `event_sums`), or the spool and the counters
(`reconcile_inputs`).

Events are never held: one pass streams them, and the database adds them up for 2,000 postings, or for the roll-up rows
of one hour, at a time. Only events that are not certainly right are made objects of, to say what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from billing.adapters import books_sql
from billing.adapters.event_rows import from_row
from billing.adapters.event_scan import EventScan, Work
from billing.adapters.event_sums import posting_tallies, rollup_rows
from billing.adapters.partitions_sql import hold_still, within
from billing.adapters.reconcile_inputs import EngineSource, engine_tokens, spooled_events
from billing.adapters.sql import is_sqlite, pico_sum, read
from billing.adapters.tables import (
    EntryRow,
    PeriodRow,
    PostingRow,
    QuarantineRow,
    UsageCorrectionRow,
    UsageEventRow,
    UsageRollupRow,
    table,
)
from billing.errors import UnbalancedTransfer
from billing.ledger import NS_PER_S, Correction, Entry, PostingKind
from billing.pricing import PriceBook, PriceSchedule, schedule
from billing.reconcile import (
    Difference,
    EngineTally,
    Kind,
    PostingFacts,
    PostingTally,
    StoredCorrection,
    StoredEvent,
    StoredPosting,
    charge_of,
    check_correction,
    check_engine,
    check_event,
    check_posting,
    check_rollups,
    check_spooled,
)
from billing.rollup import SUMS, RollupKey, RollupSums, correct
from billing.spool_format import Damage

_EVENT = table(UsageEventRow)
_CORRECTION = table(UsageCorrectionRow)
_POSTING = table(PostingRow)
_ENTRY = table(EntryRow)
_ROLLUP = table(UsageRollupRow)
_PERIOD = table(PeriodRow)
_QUARANTINE = table(QuarantineRow)
# Postings compared at once; each covers up to a batch of 1,000 events, of which only sums are kept.
POSTINGS_PER_CHUNK = 2_000
# Corrections and roll-up rows fetched at once while streaming.
ROWS_PER_FETCH = 1_000
# The busiest hour is added up by one statement: a node's 5,000 events a second are 18 million, which take minutes.
STATEMENT_TIMEOUT_S = 900
# Roll-up rows are compared by this much time at once.
WINDOW_S = 3_600
# Differences that a report names; the rest is counted. A broken table must not fill the memory.
MAX_NAMED = 1_000
# What more than one pass comes upon.
_SEEN_TWICE = frozenset({Kind.MISSING_EVENT, Kind.EXTRA_EVENT, Kind.ALTERED_EVENT})
# Ids that a database is asked for at once.
_IDS_PER_QUERY = 500
# Sorts after every id.
_END = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class ReconcileOptions:
    """What to compare the books with, besides themselves."""

    spool_dir: Path | None = None
    engines: Sequence[EngineSource] = ()


@dataclass(slots=True)
class Report:
    """What reconcile found. Filled while it runs, then handed over."""

    event_count: int = 0
    posting_count: int = 0
    entry_count: int = 0
    rollup_count: int = 0
    unpriced_event_count: int = 0
    estimated_event_count: int = 0
    quarantined_count: int = 0
    """Rows of the quarantine: an alarm of its own, no difference of the books."""
    spool_event_count: int | None = None
    difference_count: int = 0
    differences: list[Difference] = field(default_factory=list)
    _named: set[tuple[Kind, str]] = field(default_factory=set)
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    """Picodollars by currency: `events`, `ledger` (what orgs owe) and `rollups`, corrections included."""

    @property
    def exact(self) -> bool:
        """Whether nothing is left unexplained."""
        return self.difference_count == 0

    def add(self, found: Sequence[Difference]) -> None:
        """Take differences in, each once: a missing event is seen by its posting and by its roll-up."""
        for one in found:
            if one.kind in _SEEN_TWICE and (one.kind, one.name) in self._named:
                continue
            self.difference_count += 1
            if len(self.differences) < MAX_NAMED:
                self.differences.append(one)
                self._named.add((one.kind, one.name))

    def add_total(self, currency: str, name: str, amount_pico: int) -> None:
        """Add to a total."""
        sums = self.totals.setdefault(currency, {"events": 0, "ledger": 0, "rollups": 0})
        sums[name] += amount_pico


def reconcile(engine: Engine, options: ReconcileOptions | None = None) -> Report:
    """Compare everything with everything. Raises ReconcileInputError for a spool or counters that cannot be read."""
    chosen = options or ReconcileOptions()
    report = Report()
    with read(engine) as connection:
        if not is_sqlite(connection):
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_S * 1000}")
        hold_still(connection)
        _Run(connection, report, chosen).run()
    if chosen.spool_dir is not None:
        _compare_spool(engine, chosen.spool_dir, report)
    return report


class _Run:
    """One pass over the books in one transaction. Implements `billing.reconcile.Elsewhere`."""

    def __init__(self, connection: Connection, report: Report, options: ReconcileOptions) -> None:
        self._connection = connection
        self._report = report
        self._engines = [(source, EngineTally()) for source in options.engines]
        self._schedule: PriceSchedule = schedule(books_sql.read_books(connection))
        self._hours: set[int] = set()

    def run(self) -> None:
        """Every check of the database, then the engines."""
        self._check_events()
        for low, high in self._posting_ranges():
            self._compare_postings(low, high)
        for start_s in self._windows():
            self._compare_rollups(start_s)
        self._compare_seals()
        count = self._connection.execute(sa.select(sa.func.count()).select_from(_QUARANTINE)).scalar()
        self._report.quarantined_count = int(count or 0)
        for source, tally in self._engines:
            self._report.add(check_engine(source.name, engine_tokens(source), tally))

    def _check_events(self) -> None:
        """Every event by itself: its hash, its amount, its posting."""
        scan = EventScan(self._connection, self._book, WINDOW_S, self._watch if self._engines else None)
        for ids in scan.doubtful():
            for start in range(0, len(ids), _IDS_PER_QUERY):
                some = _EVENT.c.event_id.in_(ids[start : start + _IDS_PER_QUERY])
                for stored, _ in self._events(sa.select(_EVENT).where(some)):
                    self._report.add(check_event(stored, charge_of(stored, self._book), self._book))
        report, found = self._report, scan.found
        report.event_count, report.unpriced_event_count = found.event_count, found.unpriced_count
        report.estimated_event_count = found.estimated_count
        for currency, amount_pico in found.amounts_pico.items():
            report.add_total(currency, "events", amount_pico)
        self._hours.update(number * WINDOW_S for number in found.stretches)

    def _watch(self, endpoint: str, incarnation: str, work: Work) -> None:
        for source, tally in self._engines:
            if endpoint == source.endpoint and source.incarnation in {None, incarnation}:
                tally.add(work)

    def has_event(self, event_id: str) -> bool:
        """Whether the books hold an event of this id."""
        query = sa.select(_EVENT.c.event_id).where(_EVENT.c.event_id == event_id)
        return self._connection.execute(query).first() is not None

    def twin_of(self, head: StoredPosting) -> str | None:
        """The posting that holds the events that this one was posted for, or None."""
        if head.event_count == 1:
            query = sa.select(_EVENT.c.posting_id).where(_EVENT.c.event_id == head.event_xor)
        else:
            query = sa.select(_POSTING.c.posting_id).where(
                _POSTING.c.event_xor == head.event_xor,
                _POSTING.c.event_count == head.event_count,
                _POSTING.c.kind == head.kind.value,
                _POSTING.c.posting_id != head.posting_id,
            )
        return self._connection.execute(query.limit(1)).scalar()

    def _book(self, version: str | None) -> PriceBook | None:
        return self._schedule.book(version)

    def _events(self, query: sa.Select[Any]) -> Iterator[tuple[StoredEvent, Any]]:
        """Events with their rows. One that cannot be read is a difference, not the end of the check."""
        for row in self._stream(query):
            try:
                stored = StoredEvent(from_row(row), row["currency"], row["posting_id"])
            except ValueError as fault:
                name, detail = str(row["event_id"]), f"The event cannot be read: {fault}."
                self._report.add([Difference(Kind.ALTERED_EVENT, name, detail)])
            else:
                yield stored, row

    def _stream(self, query: sa.Select[Any]) -> Iterator[Any]:
        options = {"yield_per": ROWS_PER_FETCH}
        return iter(self._connection.execution_options().execute(query, execution_options=options).mappings())

    def _posting_ranges(self) -> Iterator[tuple[str, str]]:
        """Ranges (low, high] that together cover every id, so that what has no posting falls into one of them."""
        low = ""
        while True:
            query = sa.select(_POSTING.c.posting_id).where(_POSTING.c.posting_id > low).order_by(_POSTING.c.posting_id)
            found = self._connection.execute(query.limit(POSTINGS_PER_CHUNK)).scalars().all()
            if len(found) < POSTINGS_PER_CHUNK:
                yield low, _END
                return
            yield low, found[-1]
            low = found[-1]

    def _compare_postings(self, low: str, high: str) -> None:
        tallies = posting_tallies(self._connection, self._book, *_inside(_EVENT, low, high))
        self._tally_corrections(tallies, low, high)
        heads = {row.posting_id: _head_of(row) for row in self._connection.execute(_between(_POSTING, low, high))}
        entries: dict[str, list[tuple[int, Entry]]] = {}
        lines = _between(_ENTRY, low, high).order_by(_ENTRY.c.posting_id, _ENTRY.c.line_no)
        for row in self._connection.execute(lines):
            entry = books_sql.entry_of(row)
            entries.setdefault(row.posting_id, []).append((row.line_no, entry))
            self._report.entry_count += 1
            if entry.account.startswith("receivable:"):
                self._report.add_total(entry.currency, "ledger", entry.amount_pico)
        self._report.posting_count += len(heads)
        for posting_id in sorted(heads.keys() | entries.keys() | tallies.keys()):
            facts = PostingFacts(
                posting_id, heads.get(posting_id), entries.get(posting_id, ()), tallies.get(posting_id)
            )
            self._report.add(check_posting(facts, self))

    def _tally_corrections(self, tallies: dict[str, PostingTally], low: str, high: str) -> None:
        for stored in self._corrections(_CORRECTION.c.posting_id > low, _CORRECTION.c.posting_id <= high):
            correction, found = check_correction(stored, self._book)
            self._report.add(found)
            self._report.add_total(str(correction.after.currency), "events", stored.delta_pico)
            self._hours.add(stored.event.event.close.ended_ns // NS_PER_S // WINDOW_S * WINDOW_S)
            tally = tallies.setdefault(stored.posting_id, PostingTally())
            tally.count(correction.event.event_id)
            tally.add_charge(correction.after, 1)
            tally.add_charge(correction.before, -1)

    def _corrections(self, *where: sa.ColumnElement[bool]) -> Iterator[StoredCorrection]:
        about = ("posting_id", "price_version_from", "price_version_to", "delta_pico")
        columns = [_CORRECTION.c[name].label(f"correction_{name}") for name in about]
        query = sa.select(_EVENT, *columns).join(_CORRECTION, _CORRECTION.c.event_id == _EVENT.c.event_id)
        for stored, row in self._events(query.where(*where)):
            yield StoredCorrection(stored, *(row[f"correction_{name}"] for name in about))

    def _windows(self) -> list[int]:
        """Starts (Unix s) of the hours in which there is an event, a correction or a roll-up row.

        Those of events were noted while they were read: no index answers that without another pass.
        """
        hour = _ROLLUP.c.minute_s - _ROLLUP.c.minute_s % WINDOW_S
        self._hours.update(self._connection.execute(sa.select(hour).distinct()).scalars())
        return sorted(self._hours)

    def _compare_rollups(self, start_s: int) -> None:
        low_ns, high_ns = start_s * NS_PER_S, (start_s + WINDOW_S) * NS_PER_S
        in_hour = (_EVENT.c.ended_ns >= low_ns, _EVENT.c.ended_ns < high_ns)
        ids = within(self._connection, low_ns, high_ns)
        expected = rollup_rows(self._connection, self._book, *in_hour, *ids)
        in_window = (_CORRECTION.c.ended_ns >= low_ns, _CORRECTION.c.ended_ns < high_ns)
        for one in self._corrections(*in_window):
            _add(expected, correct([check_correction(one, self._book)[0]]))
        stored_rows: dict[RollupKey, RollupSums] = {}
        query = sa.select(_ROLLUP).where(_ROLLUP.c.minute_s >= start_s, _ROLLUP.c.minute_s < start_s + WINDOW_S)
        for row in self._stream(query):
            key = RollupKey(**{name: row[name] for name in RollupKey.__dataclass_fields__})
            stored_rows[key] = RollupSums(**{name: row[name] for name in SUMS})
            self._report.rollup_count += 1
            if key.currency:
                self._report.add_total(key.currency, "rollups", row["amount_pico"])
        self._report.add(check_rollups(expected, stored_rows, self))

    def _compare_seals(self) -> None:
        closed = sa.select(_PERIOD).where(_PERIOD.c.status == "closed").order_by(_PERIOD.c.period_id)
        previous = ""
        for row in self._connection.execute(closed).all():
            try:
                count, seal = books_sql.seal_of(self._connection, row.period_id, row.previous_seal)
            except (UnbalancedTransfer, ValueError):
                count, seal = -1, ""
            if (count, seal, row.previous_seal) != (row.posting_count, row.seal, previous):
                detail = f"Period {row.period_id} is not what was sealed."
                self._report.add([Difference(Kind.BROKEN_SEAL, row.period_id, detail)])
            previous = row.seal


def _compare_spool(engine: Engine, spool_dir: Path, report: Report) -> None:
    """Every closed event that the spool holds must be in the books. Read after the books: what is shipped stays."""
    report.spool_event_count = 0
    items = spooled_events(spool_dir)
    while chunk := list(islice(items, _IDS_PER_QUERY)):
        events = {one.event_id: one for one in chunk if not isinstance(one, Damage)}
        query = sa.select(_EVENT.c.event_id, _EVENT.c.payload_hash).where(_EVENT.c.event_id.in_(events))
        with read(engine) as connection:
            hold_still(connection)
            hashes = {row[0]: row[1] for row in connection.execute(query)}
        for one in chunk:
            if isinstance(one, Damage):
                report.add([Difference(Kind.SPOOL_DAMAGED, f"byte {one.start_bytes}", one.reason)])
            else:
                report.spool_event_count += 1
                report.add(check_spooled(one, hashes.get(one.event_id)))


def ledger_balance(engine: Engine, org_id: str, currency: str) -> int:
    """What an org owes, in picodollars: the sum of its receivable account. Exact."""
    account = f"receivable:{org_id}"
    query = sa.select(pico_sum(_ENTRY.c.amount_pico)).join(_POSTING, _POSTING.c.posting_id == _ENTRY.c.posting_id)
    query = query.where(_POSTING.c.org_id == org_id, _ENTRY.c.account == account, _ENTRY.c.currency == currency)
    with read(engine) as connection:
        return int(connection.execute(query).scalar() or 0)


def _between(source: sa.Table, low: str, high: str) -> sa.Select[Any]:
    return sa.select(source).where(*_inside(source, low, high))


def _inside(source: sa.Table, low: str, high: str) -> list[sa.ColumnElement[bool]]:
    inside = [source.c.posting_id > low]
    return inside if high == _END else [*inside, source.c.posting_id <= high]


def _head_of(row: Any) -> StoredPosting:
    return StoredPosting(
        row.posting_id, PostingKind(row.kind), row.org_id, row.currency, row.event_count, row.event_xor
    )


def _add(into: dict[RollupKey, RollupSums], more: dict[RollupKey, RollupSums]) -> None:
    """Add sums of money and counts; a correction has no event ids to combine."""
    for key, sums in more.items():
        held = into.setdefault(key, RollupSums())
        for name in SUMS:
            setattr(held, name, getattr(held, name) + getattr(sums, name))


__all__ = ["Correction", "ReconcileOptions", "Report", "ledger_balance", "reconcile"]
