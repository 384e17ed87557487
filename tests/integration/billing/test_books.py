"""Price books and periods in both databases: immutable, effective-dated, sealed."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from billing.adapters import books_sql, sql
from billing.adapters.corrections_sql import Scope, correct_prices
from billing.adapters.ingest import Ingest, IngestBatch
from billing.adapters.price_feed import PriceFeed
from billing.adapters.reconcile_sql import ledger_balance, reconcile
from billing.errors import PriceBookError
from billing.pricing import Sku
from tests.fakes.ledger_events import NOON_NS, a_book, usage_event

DAY_NS = 86_400 * 10**9


def test_a_book_is_read_back_as_it_was_added(empty_books: Engine) -> None:
    book = a_book("pb-7", org_id="acme", valid_from_ns=5, valid_until_ns=9, note="for acme", currency="KWD")
    assert books_sql.add_book(empty_books, book, now_ns=77)
    assert books_sql.list_books(empty_books) == [books_sql.StoredBook(book, 77)]


def test_the_same_book_again_is_no_change_and_another_content_is_refused(books: Engine) -> None:
    assert not books_sql.add_book(books, a_book())
    with pytest.raises(PriceBookError, match="a book never changes"):
        books_sql.add_book(books, a_book(currency="EUR"))
    assert len(books_sql.list_books(books)) == 1


def test_prices_cannot_join_a_book_afterwards(books: Engine) -> None:
    with pytest.raises(sa.exc.IntegrityError, match="finished book"), sql.write(books) as connection:
        connection.exec_driver_sql("INSERT INTO price VALUES ('pb-1', 'new', 'default', 'input', 1)")


def test_a_book_that_would_rewrite_billed_usage_must_say_so(books: Engine) -> None:
    Ingest(books).write(IngestBatch([usage_event(1)]))
    later = a_book("pb-2", valid_from_ns=NOON_NS + DAY_NS)
    assert books_sql.add_book(books, later)
    assert books_sql.add_book(books, a_book("other-org", org_id="zeta"))
    with pytest.raises(PriceBookError, match="already billed"):
        books_sql.add_book(books, a_book("pb-3", valid_from_ns=NOON_NS))
    assert books_sql.add_book(books, a_book("pb-3", valid_from_ns=NOON_NS), retroactive=True)


def test_a_correction_posts_the_difference_and_leaves_the_event_alone(books: Engine) -> None:
    Ingest(books).write(IngestBatch([usage_event(n, org_id=("acme", "zeta")[n % 2]) for n in range(1, 11)]))
    before = ledger_balance(books, "acme", "USD")
    cheaper = {key: price // 2 for key, price in a_book().prices.items()}
    books_sql.add_book(books, a_book("acme-1", org_id="acme", prices=cheaper), retroactive=True)
    done = correct_prices(books, Scope(NOON_NS, NOON_NS + 1), memo="agreed late")
    assert (done.looked_at_count, done.corrected_count) == (10, 5)
    assert done.delta_pico == {"USD": -before // 2}
    assert ledger_balance(books, "acme", "USD") == before + done.delta_pico["USD"]
    assert ledger_balance(books, "zeta", "USD") == before
    assert reconcile(books).exact


def test_usage_without_a_price_is_billed_once_a_book_sells_it(books: Engine) -> None:
    Ingest(books).write(IngestBatch([usage_event(1, model_served="new"), usage_event(2, price_version=None)]))
    prices = {**a_book().prices, ("new", "default", Sku.INPUT): 10, ("new", "default", Sku.OUTPUT): 20}
    books_sql.add_book(books, a_book("pb-2", prices=prices), retroactive=True)
    done = correct_prices(books, Scope(0, NOON_NS * 2))
    assert done.corrected_count == 1
    assert done.delta_pico == {"USD": 1_512 * 10 + 100 * 20}
    assert correct_prices(books, Scope(0, NOON_NS * 2)).corrected_count == 0
    report = reconcile(books)
    assert report.exact, report.differences
    with sql.read(books) as connection:
        assert connection.exec_driver_sql("SELECT sum(unpriced_count) FROM usage_rollup").scalar() == 0


def test_periods_close_in_order_and_only_when_they_are_over(books: Engine) -> None:
    Ingest(books).write(IngestBatch([usage_event(1, ended_ns=NOON_NS - 30 * DAY_NS), usage_event(2)]))
    december_ns = NOON_NS + 30 * DAY_NS
    with pytest.raises(ValueError, match="2026-11 is not over"):
        books_sql.close_period(books, "2026-11", now_ns=NOON_NS)
    with pytest.raises(ValueError, match="Period 2026-10 is still open"):
        books_sql.close_period(books, "2026-11", now_ns=december_ns)
    october = books_sql.close_period(books, "2026-10", now_ns=december_ns)
    november = books_sql.close_period(books, "2026-11", now_ns=december_ns)
    assert (october.posting_count, november.posting_count) == (1, 1)
    assert len({october.seal, november.seal}) == 2
    assert books_sql.close_period(books, "2026-11", now_ns=december_ns) == november


async def test_the_feed_learns_of_a_new_book_and_keeps_the_old_ones(books: Engine) -> None:
    feed = PriceFeed(books, interval_s=60)
    await feed.start()
    assert feed.version_at("acme", NOON_NS) == "pb-1"
    books_sql.add_book(books, a_book("pb-2", valid_from_ns=NOON_NS))
    assert feed.version_at("acme", NOON_NS) == "pb-1"
    assert feed.refresh()
    assert not feed.refresh()
    assert (feed.version_at("acme", NOON_NS - 1), feed.version_at("acme", NOON_NS)) == ("pb-1", "pb-2")
    await feed.stop()
