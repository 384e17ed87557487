"""What the database adds up is what the core's rules give event by event.

On a real SQLite file per example (the rules stand twice: in `billing.pricing` and `billing.rollup` in Python, in
`billing.adapters.event_sums` in SQL). The property must fail where the sums leave an event out or take another price.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Connection

from billing.adapters import books_sql, sql
from billing.adapters.event_rows import from_row
from billing.adapters.event_sums import posting_tallies, rollup_rows
from billing.adapters.ingest import Ingest, IngestBatch
from billing.adapters.tables import UsageEventRow, table
from billing.ledger import RatedEvent
from billing.pricing import PriceSchedule, Sku
from billing.reconcile import PostingTally, StoredEvent, charge_of
from billing.rollup import RollupKey, RollupSums, key_of
from billing.usage_event import Outcome, UsageEvent
from tests.exploring import examples
from tests.fakes.ledger_events import NOON_NS, a_book, usage_event
from tests.services import books_template

CHECKED = settings(max_examples=examples(40), deadline=None, report_multiple_bugs=False)
MUTANT = settings(CHECKED, max_examples=60, phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)
EVENT = table(UsageEventRow)
# An amount must fit 64 bits on SQLite; sums of ten of these tokens do not.
MOST_TOKENS = 2**38

Sums = Callable[[Connection, PriceSchedule], tuple[dict[str, PostingTally], dict[RollupKey, RollupSums]]]


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A database with tables and two price books, to be copied."""
    with books_template(a_book(), a_book("pb-2", prices={key: 7 for key in a_book().prices})) as path:
        yield path


TOKENS = st.one_of(st.none(), st.integers(0, 3), st.integers(0, MOST_TOKENS))
TIERS = st.sampled_from([None, "", "auto", "default", "flex", "unheard"])


@st.composite
def events(draw: st.DrawFn) -> list[UsageEvent]:
    """Up to ten events of all kinds, few enough values that groups form."""
    found = []
    for number in range(1, draw(st.integers(1, 10)) + 1):
        changed: dict[str, Any] = {
            "org_id": draw(st.sampled_from(["acme", "zeta"])),
            "user": draw(st.sampled_from([None, "", "u"])),
            "batch_id": draw(st.sampled_from([None, "b"])),
            "model_served": draw(st.sampled_from(["llama", "unsold", ""])),
            "model_asked": draw(st.sampled_from(["llama", "other"])),
            "tier_served": draw(TIERS),
            "tier_asked": draw(TIERS),
            "price_version": draw(st.sampled_from(["pb-1", "pb-2", "gone", None])),
            "outcome": draw(st.sampled_from(list(Outcome))),
            "first_token_ns": draw(st.sampled_from([None, NOON_NS])),
            "billable": draw(st.booleans()),
            "estimated": draw(st.booleans()),
            "ended_ns": NOON_NS + draw(st.integers(0, 3)) * 30 * 10**9,
        }
        names = ("uncached_input", "cached_input", "cache_write", "output", "reasoning")
        changed.update({f"{name}_tokens": draw(TOKENS) for name in names})
        found.append(usage_event(number, **changed))
    return found


def by_the_database(connection: Connection, books: PriceSchedule) -> Any:
    return posting_tallies(connection, books.book), rollup_rows(connection, books.book)


def by_the_core(connection: Connection, books: PriceSchedule) -> Any:
    tallies: dict[str, PostingTally] = {}
    rows: dict[RollupKey, RollupSums] = {}
    for row in connection.execute(sa.select(EVENT)).mappings():
        stored = StoredEvent(from_row(dict(row)), row["currency"], row["posting_id"])
        charge = charge_of(stored, books.book)
        rows.setdefault(key_of(stored.event, stored.currency), RollupSums()).add(RatedEvent(stored.event, charge))
        if stored.posting_id is not None:
            tally = tallies.setdefault(stored.posting_id, PostingTally())
            tally.count(stored.event.event_id)
            tally.add_charge(charge, 1)
    return tallies, rows


def check_sums(template: Path, sums: Sums, how: settings) -> None:
    @how
    @given(events())
    def agrees(found: list[UsageEvent]) -> None:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            path = Path(folder) / "x.db"
            shutil.copy(template, path)
            engine = sql.engine(f"sqlite:///{path}")
            try:
                Ingest(engine).write(IngestBatch(found))
                books = books_sql.load_books(engine)
                with sql.read(engine) as connection:
                    told, known = sums(connection, books), by_the_core(connection, books)
            finally:
                engine.dispose()
        assert told[1] == known[1]
        assert told[0].keys() == known[0].keys()
        for posting_id, tally in known[0].items():
            mine = told[0][posting_id]
            counted = (mine.event_count, mine.event_xor, mine.first_event_id)
            assert counted == (tally.event_count, tally.event_xor, tally.first_event_id)
            assert mine.legs("o") == tally.legs("o")

    agrees()


def test_the_database_adds_up_as_the_core_does(template: Path) -> None:
    check_sums(template, by_the_database, CHECKED)


def _leaves_out(condition: sa.ColumnElement[bool]) -> Sums:
    def sums(connection: Connection, books: PriceSchedule) -> Any:
        return posting_tallies(connection, books.book, condition), rollup_rows(connection, books.book, condition)

    return sums


def _takes_another_book(connection: Connection, books: PriceSchedule) -> Any:
    dearer = a_book("pb-1", prices={**a_book().prices, ("llama", "flex", Sku.OUTPUT): 7_500_002})
    return by_the_database(connection, PriceSchedule({**{book.version: book for book in books.books}, "pb-1": dearer}))


@pytest.mark.parametrize(
    "mutant",
    [
        _leaves_out(sa.not_(EVENT.c.estimated)),
        _leaves_out(EVENT.c.first_token_ns.is_not(None)),
        _leaves_out(EVENT.c.output_tokens.is_not(None)),
        _takes_another_book,
    ],
)
def test_wrong_sums_are_caught(template: Path, mutant: Sums) -> None:
    with pytest.raises(AssertionError):
        check_sums(template, mutant, MUTANT)
