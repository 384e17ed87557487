"""What an event costs: immutable, effective-dated price books and the rating of events by them.

Owns: `PriceBook`, `PriceSchedule` (which book holds for an org at a time) and `rate` (event and book to exact lines).
Does not own: where books are stored (`adapters.books_sql`), how charges become entries (`ledger`), or rounding
(`money`).

A price is a whole number of micro-USD per 1,000,000 tokens: tokens x price is exact picodollars, so there is no
division and no rounding here. A book never changes; what changes is which book is in force, by time. An event is
rated by the version that it names, which the gateway took at the time the request came in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from billing.errors import MoneyError, PriceBookError
from billing.money import check_currency
from billing.usage_event import Outcome, UsageEvent

# The tier of an event that names none, and the one whose price holds for a tier that has none of its own.
DEFAULT_TIER = "default"
# The columns that hold prices are signed 64-bit integers.
_PRICE_LIMIT = 2**63
# Tier names of the wire that mean "no particular tier" (reference gateway 2.3).
UNTIERED = frozenset({"", "auto"})
# What an attempt that the engine failed is: free, unless the client had got something.
ENGINE_FAILED = frozenset({Outcome.FAILED, Outcome.REJECTED_BY_ENGINE})


class Sku(StrEnum):
    """What is sold. The values are stored and are part of account names (`revenue:{sku}`). Reasoning is output."""

    INPUT = "input"
    CACHED_INPUT = "cached_input"
    CACHE_WRITE = "cache_write"
    OUTPUT = "output"


# SKUs that a book may leave out: their tokens are then input like any other.
_SOLD_AS_INPUT = frozenset({Sku.CACHED_INPUT, Sku.CACHE_WRITE})

PriceKey = tuple[str, str, Sku]
"""(model, tier, sku)."""


@dataclass(frozen=True, slots=True)
class PriceBook:
    """The prices that hold from `valid_from_ns` (Unix ns) on, until `valid_until_ns` or a later book of the same scope.

    `prices` maps (model, tier, sku) to micro-USD per 1,000,000 tokens. `org_id` None: for every org without a book of
    its own in force. An org's book is complete: nothing is looked up elsewhere. Raises PriceBookError.
    """

    version: str
    currency: str
    valid_from_ns: int
    prices: Mapping[PriceKey, int]
    org_id: str | None = None
    valid_until_ns: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _check_book(self)
        object.__setattr__(self, "prices", MappingProxyType(dict(self.prices)))

    def price(self, model: str, tier: str, sku: Sku) -> int | None:
        """Micro-USD per 1,000,000 tokens, or None when the book does not sell this model.

        A tier without prices of its own is sold at the default tier's. Cached input and cache writes without a price
        are sold as input.
        """
        for level in (tier, DEFAULT_TIER):
            found = self.prices.get((model, level, sku))
            if found is None and sku in _SOLD_AS_INPUT:
                found = self.prices.get((model, level, Sku.INPUT))
            if found is not None:
                return found
        return None

    def covers(self, at_ns: int) -> bool:
        """Whether the book may hold at this time (a later book of its scope may still take its place)."""
        return self.valid_from_ns <= at_ns and (self.valid_until_ns is None or at_ns < self.valid_until_ns)


@dataclass(frozen=True, slots=True)
class PriceSchedule:
    """Every book, immutable: which one holds for an org at a time. Build it with `schedule`."""

    _books: Mapping[str, PriceBook] = field(default_factory=dict)
    _by_scope: Mapping[str | None, tuple[PriceBook, ...]] = field(default_factory=dict)
    """Per scope (an org, or None for all), in order of valid_from; the later of two equal ones was added later."""
    _starts: Mapping[str | None, tuple[int, ...]] = field(default_factory=dict)

    def version_at(self, org_id: str, at_ns: int) -> str | None:
        """The version that holds for the org at this Unix time, or None: nothing is sold to it then."""
        found = self.book_at(org_id, at_ns)
        return found.version if found else None

    def book_at(self, org_id: str, at_ns: int) -> PriceBook | None:
        """The org's own latest book that covers the time, else the latest general one, else None."""
        return self._latest(org_id, at_ns) or self._latest(None, at_ns)

    def book(self, version: str | None) -> PriceBook | None:
        """The book of this version, or None when it is not known here."""
        return None if version is None else self._books.get(version)

    @property
    def books(self) -> tuple[PriceBook, ...]:
        """Every book, in the order they were given."""
        return tuple(self._books.values())

    def _latest(self, scope: str | None, at_ns: int) -> PriceBook | None:
        books = self._by_scope.get(scope, ())
        for index in range(bisect_right(self._starts.get(scope, ()), at_ns) - 1, -1, -1):
            if books[index].covers(at_ns):
                return books[index]
        return None


def schedule(books: Iterable[PriceBook]) -> PriceSchedule:
    """The schedule of these books, given in the order in which they were added."""
    by_version: dict[str, PriceBook] = {}
    by_scope: dict[str | None, list[PriceBook]] = {}
    for book in books:
        if book.version in by_version:
            raise PriceBookError(f"Two price books have the version {book.version!r}.")
        by_version[book.version] = book
        by_scope.setdefault(book.org_id, []).append(book)
    ordered = {scope: tuple(sorted(found, key=lambda b: b.valid_from_ns)) for scope, found in by_scope.items()}
    starts = {scope: tuple(book.valid_from_ns for book in found) for scope, found in ordered.items()}
    return PriceSchedule(by_version, ordered, starts)


class ChargeFlag(StrEnum):
    """Why a charge is not simply the event's counts times its prices."""

    NOT_BILLABLE = "not_billable"
    """Another attempt of the request is billed, or the engine failed before the client got anything: amount 0."""
    UNKNOWN_COUNTS = "unknown_counts"
    """A count is not known: only the known ones are charged. The counts stay null, they are not zero."""
    UNPRICED = "unpriced"
    """No book, or a book that does not sell this model: amount None, to be rated when a price exists."""


@dataclass(frozen=True, slots=True)
class ChargeLine:
    """`quantity_tokens` x `price` (micro-USD per 1,000,000 tokens) = `amount_pico`, exactly."""

    model: str
    tier: str
    sku: Sku
    quantity_tokens: int
    price: int

    @property
    def amount_pico(self) -> int:
        """Picodollars."""
        return self.quantity_tokens * self.price


@dataclass(frozen=True, slots=True)
class Charge:
    """What one event costs. `amount_pico` is the sum of the lines, 0 without lines, None when there is no price."""

    price_version: str | None
    currency: str | None
    lines: tuple[ChargeLine, ...]
    amount_pico: int | None
    flags: frozenset[ChargeFlag] = frozenset()


_NO_FLAGS: frozenset[ChargeFlag] = frozenset()
_FREE = frozenset({ChargeFlag.NOT_BILLABLE})
_NO_PRICE = frozenset({ChargeFlag.UNPRICED})
_PARTLY_KNOWN = frozenset({ChargeFlag.UNKNOWN_COUNTS})


def billed_model(event: UsageEvent) -> str:
    """The model whose price holds: the one that served; the one asked for when none did."""
    return event.open.model_served or event.open.model_asked


def billed_tier(event: UsageEvent) -> str:
    """The tier that was served, which is what is billed (reference gateway 2.3); else the one asked for."""
    for tier in (event.close.tier_served, event.open.tier_asked):
        if tier is not None and tier not in UNTIERED:
            return tier
    return DEFAULT_TIER


def is_billable(event: UsageEvent) -> bool:
    """Whether the event is charged: its request's billed attempt, and not one that failed before the first token."""
    close = event.close
    return close.billable and not (close.first_token_ns is None and close.outcome in ENGINE_FAILED)


def known_counts(event: UsageEvent) -> tuple[tuple[Sku, int | None], ...]:
    """The disjoint counts that are sold, in tokens; None where it is not known."""
    close = event.close
    return (
        (Sku.INPUT, close.uncached_input_tokens),
        (Sku.CACHED_INPUT, close.cached_input_tokens),
        (Sku.CACHE_WRITE, close.cache_write_tokens),
        (Sku.OUTPUT, close.output_tokens),
    )


def counts_are_known(event: UsageEvent) -> bool:
    """Whether input and output are known. Cache writes are left out: engines without them report none."""
    close = event.close
    return None not in (close.uncached_input_tokens, close.cached_input_tokens, close.output_tokens)


def rate(event: UsageEvent, book: PriceBook | None) -> Charge:
    """The exact charge of an event by a book: one line per known count above zero.

    An attempt that is not billed costs 0, whatever the book. An unknown count makes no line and sets a flag. Without
    a book, or without a price for the model, the amount is None: unknown is not zero.
    """
    version, currency = (book.version, book.currency) if book else (event.open.price_version, None)
    if not is_billable(event):
        return Charge(version, currency, (), 0, _FREE)
    if book is None:
        return Charge(version, None, (), None, _NO_PRICE)
    lines = sell(book, billed_model(event), billed_tier(event), known_counts(event))
    if lines is None:
        return Charge(version, currency, (), None, _NO_PRICE)
    amount = sum(line.amount_pico for line in lines)
    return Charge(version, currency, lines, amount, _NO_FLAGS if counts_are_known(event) else _PARTLY_KNOWN)


def sell(
    book: PriceBook, model: str, tier: str, counts: Iterable[tuple[Sku, int | None]]
) -> tuple[ChargeLine, ...] | None:
    """The lines of these counts (tokens, of one event or summed over several); None when the book has no price."""
    lines = []
    for sku, tokens in counts:
        price = book.price(model, tier, sku)
        if price is None:
            return None
        if tokens:
            lines.append(ChargeLine(model, tier, sku, tokens, price))
    return tuple(lines)


def _check_book(book: PriceBook) -> None:
    if not book.version or len(book.version) > 64 or not book.version.isprintable():
        raise PriceBookError(f"version is {book.version!r}; 1 to 64 printable characters were expected.")
    try:
        check_currency(book.currency)
    except MoneyError as fault:
        raise PriceBookError(f"Price book {book.version}: {fault}") from None
    if not 0 <= book.valid_from_ns < _PRICE_LIMIT:
        raise PriceBookError(f"Price book {book.version}: valid_from_ns is {book.valid_from_ns}; Unix ns was expected.")
    if book.valid_until_ns is not None and book.valid_until_ns <= book.valid_from_ns:
        raise PriceBookError(f"Price book {book.version}: valid_until_ns must be later than valid_from_ns.")
    if book.org_id == "":
        raise PriceBookError(f"Price book {book.version}: org_id is empty; an org id or nothing was expected.")
    for (model, tier, sku), price in book.prices.items():
        where = f"Price book {book.version}: the price of {model!r}, tier {tier!r}, {sku}"
        if not model or not tier or not isinstance(sku, Sku):
            raise PriceBookError(f"{where}: a model, a tier and a SKU were expected.")
        if not isinstance(price, int) or isinstance(price, bool) or not 0 <= price < _PRICE_LIMIT:
            raise PriceBookError(
                f"{where} is {price!r}; a whole number of micro-USD per 1,000,000 tokens was expected."
            )
    for model, tier in {(model, tier) for model, tier, _ in book.prices}:
        for sku in (Sku.INPUT, Sku.OUTPUT):
            if (model, tier, sku) not in book.prices:
                raise PriceBookError(f"Price book {book.version}: {model!r}, tier {tier!r} has no price for {sku}.")
