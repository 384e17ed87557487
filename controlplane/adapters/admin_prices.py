"""Admin routes of price books.

Owns: the JSON of a price book and its two routes. Does not own: what a book may say (`billing.pricing`) or how it is
stored (`billing.adapters.books_sql`). A book is immutable and named by its version, so adding the same one twice is no
change and needs no Idempotency-Key; another price is another book with a later `valid_from_s`.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from billing.adapters import books_sql
from billing.errors import PriceBookError
from billing.pricing import PriceBook, Sku
from controlplane.adapters.admin_calls import Admin, Calls, actor_of, listing
from controlplane.adapters.admin_models import Listing, Wish
from controlplane.adapters.tenancy_tx import TenancyDb, faults
from controlplane.errors import BadRequest

# The largest a 64-bit count of Unix nanoseconds can hold, in seconds.
_MAX_UNIX_S = 9_223_372_036
_NS_PER_S = 1_000_000_000


class PriceItem(Wish):
    """One price. Whole micro-USD for 1,000,000 tokens: 2.50 dollars are 2500000."""

    model: Annotated[str, Field(max_length=200)]
    tier: Annotated[str, Field(max_length=64)] = "default"
    sku: Annotated[str, Field(max_length=64)] = Field(description="input, cached_input, cache_write, output")
    micro_usd_per_million_tokens: int


class BookWish(Wish):
    """Add a price book."""

    version: Annotated[str, Field(max_length=200)]
    valid_from_s: Annotated[int, Field(ge=0, le=_MAX_UNIX_S)]
    valid_until_s: Annotated[int, Field(ge=0, le=_MAX_UNIX_S)] | None = None
    currency: Annotated[str, Field(max_length=8)] = "USD"
    org_id: Annotated[str, Field(max_length=200)] | None = Field(default=None, description="Null: for every org.")
    note: Annotated[str, Field(max_length=1_000)] = ""
    prices: Annotated[list[PriceItem], Field(min_length=1, max_length=5_000)]

    def book(self, org_id: str | None) -> PriceBook:
        """The book; BadRequest says what is wrong with it."""
        prices: dict[tuple[str, str, Sku], int] = {}
        try:
            for item in self.prices:
                if item.sku not in set(Sku):
                    raise BadRequest(f"sku is {item.sku!r}; expected one of {', '.join(Sku)}.", param="prices")
                key = (item.model, item.tier, Sku(item.sku))
                if key in prices:
                    raise BadRequest(
                        f"{item.model!r}, tier {item.tier!r} has two prices for {item.sku}.", param="prices"
                    )
                prices[key] = item.micro_usd_per_million_tokens
            return PriceBook(
                version=self.version,
                currency=self.currency,
                valid_from_ns=self.valid_from_s * _NS_PER_S,
                valid_until_ns=None if self.valid_until_s is None else self.valid_until_s * _NS_PER_S,
                org_id=org_id,
                note=self.note,
                prices=prices,
            )
        except PriceBookError as fault:
            raise BadRequest(str(fault)) from None


class BookView(BaseModel):
    """A price book."""

    id: str
    object: Literal["price_book"] = "price_book"
    currency: str
    valid_from_s: int
    valid_until_s: int | None
    org_id: str | None
    note: str
    prices: list[PriceItem]
    in_force: bool
    """Whether its time includes now; a later book of the same scope may still take its place."""

    @classmethod
    def of(cls, book: PriceBook, now_ns: int) -> BookView:
        """The view of a book."""
        prices = [
            PriceItem(model=model, tier=tier, sku=sku.value, micro_usd_per_million_tokens=price)
            for (model, tier, sku), price in sorted(book.prices.items())
        ]
        return cls(
            id=book.version,
            currency=book.currency,
            valid_from_s=book.valid_from_ns // _NS_PER_S,
            valid_until_s=None if book.valid_until_ns is None else book.valid_until_ns // _NS_PER_S,
            org_id=book.org_id,
            note=book.note,
            prices=prices,
            in_force=book.covers(now_ns),
        )


class SqlPrices:
    """Price books in the database, with a line in the audit log for each that is added. Blocking."""

    def __init__(self, db: TenancyDb) -> None:
        self._db = db

    def books(self) -> list[PriceBook]:
        """Every book, in the order in which they were added."""
        with faults():
            return [stored.book for stored in books_sql.list_books(self._db.engine)]

    def add(self, book: PriceBook, actor: str) -> bool:
        """Add a book; False when the very same one is there. BadRequest (409) when it would change one in use."""
        try:
            with faults():
                added = books_sql.add_book(self._db.engine, book)
        except PriceBookError as fault:
            raise BadRequest(str(fault), code="price_book_conflict", status=409) from None
        if added:
            with self._db.acting(actor).writing() as tx:
                tx.note("price_book.add", book.version, book.org_id, price_count=len(book.prices))
        return added


def price_routes() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter(prefix="/admin/v1/prices", tags=["prices"])
    routes.add_api_route("", add_book, methods=["POST"], status_code=201)
    routes.add_api_route("", list_books, methods=["GET"])
    return routes


async def add_book(response: Response, calls: Calls, admin: Admin, wish: BookWish) -> BookView:
    """Add a price book. It holds from `valid_from_s` on; every node knows it within a few seconds."""
    deps = calls.deps
    org = None if wish.org_id is None else await calls.threads.run(lambda: deps.store.org(wish.org_id or ""))
    book = wish.book(None if org is None else org.org_id)
    added = await calls.threads.run(lambda: deps.prices.add(book, actor_of(admin)))
    response.status_code = 201 if added else 200
    return BookView.of(book, time.time_ns())


async def list_books(calls: Calls, _admin: Admin) -> Listing[BookView]:
    """Every price book, in the order in which they were added."""
    books = await calls.threads.run(calls.deps.prices.books)
    return Listing(**listing([BookView.of(book, time.time_ns()) for book in books], None))
