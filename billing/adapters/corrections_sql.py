"""Retroactive prices: what was billed by another book than the one that holds now is corrected by new postings.

Owns: `correct_prices`, which finds such events, and the rows and postings of their corrections. Does not own: the
arithmetic (`ledger.post_corrections`, `rollup.correct`) or books (`books_sql`). Nothing that was written changes: the
event keeps its amount, the correction names both versions and the difference, and the posting goes to an open period.

Running it twice posts nothing the second time: the version an event is corrected to is the one it is billed by next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
import uuid_utils
from sqlalchemy.engine import Connection, Engine

from billing import ledger, rollup
from billing.adapters import books_sql, ingest_sql
from billing.adapters.event_rows import from_row
from billing.adapters.ingest_sql import Raced
from billing.adapters.partitions_sql import hold_still, within
from billing.adapters.sql import is_sqlite, write
from billing.adapters.tables import UsageCorrectionRow, UsageEventRow, table
from billing.errors import StoreUnavailable
from billing.ledger import Correction, PostingKey
from billing.pricing import PriceSchedule, rate, schedule

_EVENT = table(UsageEventRow)
_CORRECTION = table(UsageCorrectionRow)
# Events that one transaction looks at.
_EVENTS_PER_CHUNK = 1_000
_MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Scope:
    """Which usage to look at: requests that came in within [from_ns, until_ns), of one org or all."""

    from_ns: int
    until_ns: int
    org_id: str | None = None


@dataclass(frozen=True, slots=True)
class CorrectionReport:
    """What `correct_prices` did."""

    looked_at_count: int
    corrected_count: int
    delta_pico: dict[str, int]
    """By currency."""
    posting_ids: tuple[str, ...]


def correct_prices(
    engine: Engine, scope: Scope, *, memo: str = "", unix_ns: Callable[[], int] = time.time_ns
) -> CorrectionReport:
    """Bill usage by the book that holds for its time now. Also rates events that had no price when they came.

    An event whose new book has another currency is left alone: that is no correction but a new agreement. Each chunk
    of events is one transaction; when the run is cut off, run it again. Raises StoreUnavailable.
    """
    looked, corrected = 0, 0
    posting_ids: list[str] = []
    deltas: dict[str, int] = {}
    last = ""
    while True:
        ids, corrections, posted = _chunk(engine, scope, last, memo, unix_ns())
        if not ids:
            return CorrectionReport(looked, corrected, deltas, tuple(posting_ids))
        looked, last = looked + len(ids), ids[-1]
        corrected += len(corrections)
        posting_ids += posted
        for one in corrections:
            currency = str(one.after.currency)
            deltas[currency] = deltas.get(currency, 0) + one.delta_pico


def _chunk(
    engine: Engine, scope: Scope, last: str, memo: str, now_ns: int
) -> tuple[list[str], list[Correction], list[str]]:
    for _ in range(_MAX_ATTEMPTS):
        try:
            with write(engine) as connection:
                if not is_sqlite(connection):
                    # Two corrections of the same event at once would both start from the same version.
                    connection.exec_driver_sql("LOCK TABLE usage_correction IN SHARE ROW EXCLUSIVE MODE")
                hold_still(connection)
                rows = _rows(connection, scope, last)
                books = schedule(books_sql.read_books(connection))
                corrections = [one for row in rows if (one := _correction(row, books)) is not None]
                posted = _post(connection, corrections, memo, now_ns)
                return [row["event_id"] for row in rows], corrections, posted
        except Raced:
            continue
    raise StoreUnavailable("A period was closed while its usage was corrected; run the correction again.")


def _rows(connection: Connection, scope: Scope, last: str) -> list[Any]:
    """The next events, each with the version that it is billed by now."""
    newest = (
        sa.select(_CORRECTION.c.price_version_to)
        .where(_CORRECTION.c.event_id == _EVENT.c.event_id)
        .order_by(_CORRECTION.c.posted_ns.desc(), _CORRECTION.c.posting_id.desc())
        .limit(1)
        .scalar_subquery()
    )
    query = sa.select(_EVENT, newest.label("corrected_to")).where(
        _EVENT.c.event_id > last,
        _EVENT.c.billable,
        _EVENT.c.received_ns >= scope.from_ns,
        # Nothing ends before it came in; this is the time that has an index.
        _EVENT.c.ended_ns >= scope.from_ns,
        _EVENT.c.received_ns < scope.until_ns,
        *within(connection, scope.from_ns, scope.until_ns),
    )
    if scope.org_id is not None:
        query = query.where(_EVENT.c.org_id == scope.org_id)
    ordered = query.order_by(_EVENT.c.event_id).limit(_EVENTS_PER_CHUNK)
    return list(connection.execute(ordered).mappings())


def _correction(row: Any, books: PriceSchedule) -> Correction | None:
    event = from_row(row)
    target = books.book_at(event.open.org_id, event.open.received_ns)
    billed_by = row["corrected_to"] or (row["price_version"] if row["amount_pico"] is not None else None)
    if target is None or target.version == billed_by:
        return None
    before, after = rate(event, books.book(billed_by)), rate(event, target)
    if billed_by is None:
        # Where its roll-up row counts it as unpriced.
        before = replace(before, currency=row["currency"])
    if after.amount_pico is None or before.currency not in {None, after.currency} or before.lines == after.lines:
        return None
    return Correction(event, before, after)


def _post(connection: Connection, corrections: Sequence[Correction], memo: str, now_ns: int) -> list[str]:
    store = ingest_sql.writer(connection)
    closed = store.closed_periods()
    groups: dict[PostingKey, list[Correction]] = {}
    for one in corrections:
        period_id = ledger.period_for(one.event.close.ended_ns, closed.__contains__).period_id
        key = PostingKey(one.event.open.org_id, str(one.after.price_version), str(one.after.currency), period_id)
        groups.setdefault(key, []).append(one)
    store.hold_periods({key.period_id for key in groups})
    transfers, rows = [], []
    for key, group in groups.items():
        transfer = ledger.post_corrections(key, group, uuid_utils.uuid7().hex, memo)
        transfers.append(transfer)
        rows += [_row(one, transfer.posting_id, now_ns) for one in group]
    store.insert_transfers(transfers, now_ns)
    if rows:
        connection.execute(_CORRECTION.insert(), rows)
    store.add_rollups(rollup.correct(corrections))
    return [transfer.posting_id for transfer in transfers]


def _row(one: Correction, posting_id: str, now_ns: int) -> dict[str, Any]:
    unpriced = one.before.amount_pico is None
    return {
        "event_id": one.event.event_id,
        "posting_id": posting_id,
        "price_version_from": None if unpriced else one.before.price_version,
        "price_version_to": one.after.price_version,
        "currency": one.after.currency,
        "delta_pico": one.delta_pico,
        "ended_ns": one.event.close.ended_ns,
        "posted_ns": now_ns,
    }
