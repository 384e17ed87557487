"""Price books and periods in the database: added, read, listed, closed; and the retroactive change of a price.

Owns: how a book is stored (prices first, then the book that closes over them), what may be added, `load_books`, the
closing and sealing of a period, and `correct_prices`, which writes a retroactive change as new postings. Does not own:
what a price means (`pricing`), what a transfer is (`ledger`), or usage itself (`ingest`).

A book is never changed. A new one takes over by its `valid_from_ns`. One that would change the price of usage that is
already billed is refused unless the caller says `retroactive`; the differences are then posted as corrections.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from billing.adapters.partitions_sql import hold_still, within
from billing.adapters.sql import is_sqlite, read, write
from billing.adapters.tables import EntryRow, PeriodRow, PostingRow, PriceBookRow, PriceRow, UsageEventRow, table
from billing.errors import PriceBookError
from billing.ledger import Entry, PostingKey, PostingKind, Seal, Transfer, month_of, period_of
from billing.pricing import PriceBook, PriceKey, PriceSchedule, Sku, schedule

_BOOK = table(PriceBookRow)
_PRICE = table(PriceRow)
_PERIOD = table(PeriodRow)
_POSTING = table(PostingRow)
_ENTRY = table(EntryRow)
_EVENT = table(UsageEventRow)
# Postings read at once while a period is sealed or reconciled: about 10 entries each.
POSTINGS_PER_CHUNK = 500
# The last Unix ns that a column holds.
_LAST_NS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoredBook:
    """A book and when it was added (Unix ns)."""

    book: PriceBook
    created_ns: int


def load_books(engine: Engine) -> PriceSchedule:
    """The schedule of every book in the database."""
    with read(engine) as connection:
        return schedule(read_books(connection))


def list_books(engine: Engine) -> list[StoredBook]:
    """Every book with its prices, in the order they were added."""
    with read(engine) as connection:
        created = {row[0]: row[1] for row in connection.execute(sa.select(_BOOK.c.version, _BOOK.c.created_ns))}
        return [StoredBook(book, created[book.version]) for book in read_books(connection)]


def read_books(connection: Connection) -> list[PriceBook]:
    """Every book in the order in which they were added."""
    prices: dict[str, dict[PriceKey, int]] = {}
    for row in connection.execute(sa.select(_PRICE)):
        prices.setdefault(row.version, {})[row.model, row.tier, Sku(row.sku)] = row.micro_usd_per_million_tokens
    heads = connection.execute(sa.select(_BOOK).order_by(_BOOK.c.created_ns, _BOOK.c.version))
    return [
        PriceBook(
            version=row.version,
            currency=row.currency,
            valid_from_ns=row.valid_from_ns,
            prices=prices.get(row.version, {}),
            org_id=row.org_id or None,
            valid_until_ns=row.valid_until_ns,
            note=row.note,
        )
        for row in heads
    ]


def books_mark(connection: Connection) -> tuple[int, int]:
    """(how many books, when the last was added): changes exactly when a book is added."""
    row = connection.execute(sa.select(sa.func.count(), sa.func.max(_BOOK.c.created_ns)).select_from(_BOOK)).one()
    return (int(row[0]), int(row[1] or 0))


def add_book(engine: Engine, book: PriceBook, *, retroactive: bool = False, now_ns: int | None = None) -> bool:
    """Add a book; False when the very same book is there already (so adding twice is no fault).

    Raises PriceBookError when the version exists with other content, or when usage that the book would price is
    already billed and `retroactive` is False. With `retroactive`, call `corrections_sql.correct_prices` afterwards.
    """
    at_ns = time.time_ns() if now_ns is None else now_ns
    digest = content_hash(book)
    with write(engine) as connection:
        if not is_sqlite(connection):
            # One adder at a time, so that `created_ns` orders books and two equal versions do not race.
            connection.exec_driver_sql("LOCK TABLE price_book IN SHARE ROW EXCLUSIVE MODE")
        known = connection.execute(sa.select(_BOOK.c.content_hash).where(_BOOK.c.version == book.version)).scalar()
        if known is not None:
            if known == digest:
                return False
            raise PriceBookError(
                f"Price book {book.version} exists with other content; a book never changes: use a new version."
            )
        if not retroactive:
            _refuse_rewriting(connection, book)
        last = connection.execute(sa.select(sa.func.max(_BOOK.c.created_ns))).scalar()
        _insert_book(connection, book, digest, max(at_ns, (last or 0) + 1))
    return True


def content_hash(book: PriceBook) -> str:
    """SHA-256 over everything that a book says, apart from its note."""
    head = (book.version, book.org_id or "", book.currency, book.valid_from_ns, book.valid_until_ns)
    lines = ["\x1f".join(map(str, head))]
    lines += ["\x1f".join((*map(str, key), str(book.prices[key]))) for key in sorted(book.prices)]
    return hashlib.sha256("\x1e".join(lines).encode()).hexdigest()


def _refuse_rewriting(connection: Connection, book: PriceBook) -> None:
    """A book that starts in the past would price usage differently from how it was billed."""
    hold_still(connection)
    query = sa.select(_EVENT.c.event_id).where(
        _EVENT.c.ended_ns >= book.valid_from_ns, _EVENT.c.received_ns >= book.valid_from_ns
    )
    query = query.where(_EVENT.c.amount_pico.is_not(None), _EVENT.c.price_version.is_not(None))
    if book.org_id is not None:
        query = query.where(_EVENT.c.org_id == book.org_id)
    if book.valid_until_ns is not None:
        query = query.where(_EVENT.c.received_ns < book.valid_until_ns)
    until_ns = _LAST_NS if book.valid_until_ns is None else book.valid_until_ns
    query = query.where(*within(connection, book.valid_from_ns, until_ns))
    if connection.execute(query.limit(1)).first() is not None:
        raise PriceBookError(
            f"Price book {book.version} holds from a time whose usage is already billed; give a later valid_from, "
            "or say retroactive to post the differences as corrections."
        )


def _insert_book(connection: Connection, book: PriceBook, digest: str, created_ns: int) -> None:
    prices = [
        {"version": book.version, "model": model, "tier": tier, "sku": sku.value, "micro_usd_per_million_tokens": price}
        for (model, tier, sku), price in sorted(book.prices.items())
    ]
    if prices:
        connection.execute(_PRICE.insert(), prices)
    connection.execute(
        _BOOK.insert().values(
            version=book.version,
            org_id=book.org_id or "",
            currency=book.currency,
            valid_from_ns=book.valid_from_ns,
            valid_until_ns=book.valid_until_ns,
            created_ns=created_ns,
            note=book.note,
            content_hash=digest,
        )
    )


@dataclass(frozen=True, slots=True)
class ClosedPeriod:
    """A sealed period."""

    period_id: str
    posting_count: int
    seal: str


def close_period(engine: Engine, period_id: str, now_ns: int | None = None) -> ClosedPeriod:
    """Close a month and seal it: no posting can join it, and a change of any of its postings shows in its seal.

    Every earlier month with postings must be closed first, because the seals are a chain. Closing a closed period
    gives its seal. Raises ValueError for an id that is no month, or one that is not over, or out of order.
    """
    at_ns = time.time_ns() if now_ns is None else now_ns
    period = period_of(period_id)
    if period.ends_ns > at_ns:
        raise ValueError(f"Period {period_id} is not over yet.")
    with write(engine) as connection:
        _make_period(connection, period_id)
        lock = sa.select(_PERIOD).where(_PERIOD.c.period_id == period_id).with_for_update()
        row = connection.execute(lock).one()
        if row.status == "closed":
            return ClosedPeriod(period_id, row.posting_count, row.seal)
        earlier = sa.select(_PERIOD.c.period_id).where(_PERIOD.c.period_id < period_id, _PERIOD.c.status == "open")
        open_before = connection.execute(earlier.order_by(_PERIOD.c.period_id)).scalars().first()
        if open_before is not None:
            raise ValueError(f"Period {open_before} is still open; close it before {period_id}.")
        before = sa.select(_PERIOD.c.seal).where(_PERIOD.c.period_id < period_id)
        previous = connection.execute(before.order_by(_PERIOD.c.period_id.desc())).scalars().first() or ""
        count, digest = seal_of(connection, period_id, previous)
        connection.execute(
            _PERIOD.update()
            .where(_PERIOD.c.period_id == period_id)
            .values(status="closed", closed_ns=at_ns, posting_count=count, previous_seal=previous, seal=digest)
        )
    return ClosedPeriod(period_id, count, digest)


def seal_of(connection: Connection, period_id: str, previous_seal: str) -> tuple[int, str]:
    """(postings, seal) of what a period holds now."""
    seal, count = Seal(period_id, previous_seal), 0
    for transfer in read_transfers(connection, _POSTING.c.period_id == period_id):
        seal.add(transfer)
        count += 1
    return count, seal.digest()


def read_transfers(connection: Connection, where: sa.ColumnElement[bool]) -> Iterator[Transfer]:
    """Transfers in order of their ids, read in chunks. Raises UnbalancedTransfer for one that was tampered with."""
    last = ""
    while True:
        chunk = sa.select(_POSTING).where(where, _POSTING.c.posting_id > last).order_by(_POSTING.c.posting_id)
        heads = connection.execute(chunk.limit(POSTINGS_PER_CHUNK)).all()
        if not heads:
            return
        legs: dict[str, list[Entry]] = {}
        query = sa.select(_ENTRY).where(
            _ENTRY.c.posting_id >= heads[0].posting_id, _ENTRY.c.posting_id <= heads[-1].posting_id
        )
        for row in connection.execute(query.order_by(_ENTRY.c.posting_id, _ENTRY.c.line_no)):
            legs.setdefault(row.posting_id, []).append(entry_of(row))
        for head in heads:
            yield _transfer_of(head, legs.get(head.posting_id, ()))
        last = heads[-1].posting_id


def entry_of(row: sa.Row[tuple[object, ...]]) -> Entry:
    """The entry of a row of the table."""
    return Entry(row.account, row.currency, row.model, row.tier, row.quantity_tokens, row.amount_pico)


def _transfer_of(head: sa.Row[tuple[object, ...]], entries: Iterable[Entry]) -> Transfer:
    return Transfer(
        posting_id=head.posting_id,
        kind=PostingKind(head.kind),
        key=PostingKey(head.org_id, head.price_version, head.currency, head.period_id),
        usage_from_ns=head.usage_from_ns,
        usage_until_ns=head.usage_until_ns,
        event_count=head.event_count,
        event_xor=head.event_xor,
        entries=tuple(entries),
        memo=head.memo,
    )


def _make_period(connection: Connection, period_id: str) -> None:
    period = period_of(period_id)
    values = (period.period_id, period.starts_ns, period.ends_ns, "open")
    mark = "?" if is_sqlite(connection) else "%s"
    connection.exec_driver_sql(
        "INSERT INTO period (period_id, starts_ns, ends_ns, status) "  # noqa: S608 - parameter marks only
        f"VALUES ({', '.join([mark] * 4)}) ON CONFLICT DO NOTHING",
        values,
    )


def current_period(now_ns: int) -> str:
    """Id of the month of a time."""
    return month_of(now_ns).period_id
