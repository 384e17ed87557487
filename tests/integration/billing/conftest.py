"""Fixtures of the ledger's storage tests: both databases, upgraded and with a price book.

Owns: `books` (an engine on each database) and the clock that counts. Does not own: the servers (`tests/conftest.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy.engine import Engine

from billing.adapters import books_sql, sql
from tests.fakes.ledger_events import a_book


@pytest.fixture
def empty_books(sql_url: str) -> Iterator[Engine]:
    """Both databases in turn, with tables and nothing in them."""
    sql.upgrade(sql_url)
    engine = sql.engine(sql_url)
    yield engine
    engine.dispose()


@pytest.fixture
def books(empty_books: Engine) -> Engine:
    """Both databases in turn, with one price book that holds from the beginning."""
    books_sql.add_book(empty_books, a_book(), now_ns=1)
    return empty_books
