"""Every event once, as bare values: whether its content is what its hash says and its amount what its book says.

Owns: the quick way to know that an event is right, and the counts that a pass over all of them gives. Does not own:
what is wrong with one that is not: its id is handed over, and `reconcile_sql` reads it again and asks
`billing.reconcile`, whose rules decide. So a quick "right" must be certain, and a quick "not right" costs only time.

This pass is what a reconcile of many millions of events takes its time for: no object is made for an event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from sqlalchemy.engine import Connection

from billing.adapters.event_rows import CONTENT_COLUMNS, content_hash
from billing.adapters.sql import is_sqlite
from billing.ledger import NS_PER_S
from billing.pricing import DEFAULT_TIER, ENGINE_FAILED, UNTIERED, Sku
from billing.reconcile import Books

# Rows fetched at once while streaming.
ROWS_PER_FETCH = 1_000
_RATING = ("payload_hash", "extra", "price_version", "currency", "amount_pico", "posting_id")
# In the order in which they are read: what the hash is over comes first.
_COLUMNS = (*CONTENT_COLUMNS, *_RATING)
_PRICED = (Sku.INPUT, Sku.CACHED_INPUT, Sku.CACHE_WRITE, Sku.OUTPUT)
_FAILED = frozenset(outcome.value for outcome in ENGINE_FAILED)
_about = itemgetter(
    *(_COLUMNS.index(name) for name in ("event_id", "ended_ns", "estimated", "currency", "amount_pico", "posting_id"))
)
_rating = itemgetter(*(_COLUMNS.index(name) for name in ("billable", "first_token_ns", "outcome")))
_tariff = itemgetter(
    *(
        _COLUMNS.index(name)
        for name in ("price_version", "model_served", "model_asked", "tier_served", "tier_asked")
    )
)  # fmt: skip
_tokens = itemgetter(
    *(
        _COLUMNS.index(name)
        for name in ("uncached_input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens")
    )
)
_source = itemgetter(_COLUMNS.index("endpoint"), _COLUMNS.index("endpoint_incarnation"))
_ID, _HASH, _EXTRA = (_COLUMNS.index(name) for name in ("event_id", "payload_hash", "extra"))
# Tariffs kept at once; model and tier asked for are clients' words, so there may be any number of them.
_MAX_TARIFFS = 10_000


@dataclass(slots=True)
class Scan:
    """What the pass has counted so far. Mutable: filled row by row."""

    event_count: int = 0
    unpriced_count: int = 0
    estimated_count: int = 0
    amounts_pico: dict[str, int] = field(default_factory=dict)
    """By currency."""
    stretches: set[int] = field(default_factory=set)
    """Numbers since 1970 of the stretches of `width_s` in which an event ended."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a row says that its engine did: a `billing.reconcile.EngineWork`."""

    estimated: bool
    uncached_input_tokens: int | None
    cached_input_tokens: int | None
    cache_write_tokens: int | None
    output_tokens: int | None


Watch = Callable[[str, str, Work], None]
"""Told the endpoint, its incarnation and the work of each event."""


class EventScan:
    """One pass over all events of a connection's view."""

    def __init__(self, connection: Connection, books: Books, width_s: int, watch: Watch | None = None) -> None:
        self._connection = connection
        self._books = books
        self._width_ns = width_s * NS_PER_S
        self._watch = watch
        self._prices: dict[tuple[Any, ...], tuple[int, ...] | None] = {}
        self.found = Scan()

    def doubtful(self) -> Iterator[list[str]]:
        """The ids of events that are not certainly right, some at a time; `found` is complete at the end."""
        is_right, count = self._is_right, self._count
        columns = ", ".join(_COLUMNS)
        rows = self._connection.exec_driver_sql(
            f"SELECT {columns} FROM usage_event",  # noqa: S608 - column names of this package
            execution_options={"yield_per": ROWS_PER_FETCH},
        )
        lite = is_sqlite(self._connection)
        for part in rows.partitions():
            ids = []
            for row in part:
                count(row)
                if not is_right(row, lite):
                    ids.append(row[_ID])
            if ids:
                yield ids

    def _count(self, row: Sequence[Any]) -> None:
        _, ended_ns, estimated, currency, amount, _ = _about(row)
        found = self.found
        found.event_count += 1
        found.stretches.add(ended_ns // self._width_ns)
        if estimated:
            found.estimated_count += 1
        if amount is None:
            found.unpriced_count += 1
        elif amount:
            key = str(currency)
            found.amounts_pico[key] = found.amounts_pico.get(key, 0) + int(amount)
        if self._watch is not None:
            endpoint, incarnation = _source(row)
            self._watch(endpoint, incarnation, Work(bool(estimated), *_tokens(row)))

    def _is_right(self, row: Sequence[Any], lite: bool) -> bool:
        """Whether the hash is that of the content, the amount that of the book, and a charge is posted."""
        if row[_EXTRA] is not None or content_hash(row, has_numbers_for_flags=lite) != row[_HASH]:
            return False
        _, _, _, _, amount, posting_id = _about(row)
        if amount is None and posting_id is None:
            return True  # it had no price when it came, and stays without
        billable, first_token_ns, outcome = _rating(row)
        if not billable or (first_token_ns is None and outcome in _FAILED):
            return bool(amount == 0)
        tariff = _tariff(row)
        try:
            prices = self._prices[tariff]
        except KeyError:
            if len(self._prices) >= _MAX_TARIFFS:
                self._prices.clear()
            prices = self._prices[tariff] = self._prices_of(*tariff)
        if prices is None:
            return False
        charge = 0
        tokens = _tokens(row)
        for count, price in zip(tokens, prices, strict=True):
            if count:
                charge += count * price
        return bool(amount == charge) and (posting_id is not None or not any(tokens))

    def _prices_of(self, version: str | None, *about: str | None) -> tuple[int, ...] | None:
        """The four prices of what is billed alike; None when the book does not sell it."""
        book = self._books(version)
        if book is None:
            return None
        served, asked, tier_served, tier_asked = about
        tier = next((one for one in (tier_served, tier_asked) if one and one not in UNTIERED), DEFAULT_TIER)
        found = tuple(book.price(served or asked or "", tier, sku) for sku in _PRICED)
        return None if None in found else tuple(price for price in found if price is not None)
