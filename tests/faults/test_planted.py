"""`inferplane bill reconcile` names every fault that is planted in the books, on both databases, and exits with 1.

The books are made the way that the node makes them: events go through the spool and the shipper. Each fault is planted
past the triggers that make the tables append-only (`tests.fakes.ledger_faults`); that they do refuse is tested too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import typer
from sqlalchemy.engine import Engine
from typer.testing import CliRunner

from billing.adapters import books_sql, sql
from billing.adapters.cli import register
from billing.adapters.shipper import Shipper, ShipperSettings, SqlIngest
from billing.adapters.tables import EntryRow, PostingRow, UsageEventRow, table
from billing.usage_event import Outcome
from controlplane.adapters.spool import Spool, SpoolSettings
from tests.fakes.ledger_events import NOON_NS, a_book, event_id, usage_event
from tests.fakes.ledger_faults import planted

pytestmark = pytest.mark.faults

_MINUTE_NS = 60_000_000_000
# The event that faults are planted in: a priced one among others of its posting.
_VICTIM = event_id(7)


@dataclass(frozen=True)
class Planted:
    """A fault: how it is planted, and what reconcile must call it (`kind`, `name`)."""

    statements: Callable[[Engine], list[str]]
    kind: str
    name: Callable[[Engine], str]
    amount_pico: str | None = None


def value(engine: Engine, query: str) -> Any:
    with sql.read(engine) as connection:
        return connection.execute(sa.text(query)).scalar_one()


def posting(engine: Engine) -> str:
    return str(value(engine, f"SELECT posting_id FROM usage_event WHERE event_id = '{_VICTIM}'"))


def columns(row: Any, *without: str) -> str:
    return ", ".join(column.name for column in table(row).columns if column.name not in without)


def copied_event(_: Engine) -> list[str]:
    rest = columns(UsageEventRow, "event_id")
    source = f"SELECT '{event_id(999)}', {rest} FROM usage_event WHERE event_id = '{_VICTIM}'"
    return [f"INSERT INTO usage_event (event_id, {rest}) {source}"]


def copied_entry(engine: Engine) -> list[str]:
    rest = columns(EntryRow, "line_no")
    source = f"SELECT 99, {rest} FROM entry WHERE posting_id = '{posting(engine)}' AND line_no = 2"
    return [f"INSERT INTO entry (line_no, {rest}) {source}"]


def copied_posting(engine: Engine) -> list[str]:
    copy, one = "f" * 32, posting(engine)
    entry, head = columns(EntryRow, "posting_id"), columns(PostingRow, "posting_id")
    return [
        f"INSERT INTO posting (posting_id, {head}) SELECT '{copy}', {head} FROM posting WHERE posting_id = '{one}'",
        f"INSERT INTO entry (posting_id, {entry}) SELECT '{copy}', {entry} FROM entry WHERE posting_id = '{one}'",
    ]


def one_picodollar(table_name: str, column: str, where: Callable[[Engine], str]) -> Callable[[Engine], list[str]]:
    return lambda engine: [f"UPDATE {table_name} SET {column} = {column} + 1 WHERE {where(engine)}"]


def victims_minute(engine: Engine) -> str:
    ended_ns = value(engine, f"SELECT ended_ns FROM usage_event WHERE event_id = '{_VICTIM}'")
    return f"minute_s = {ended_ns // _MINUTE_NS * 60} AND org_id = 'acme'"


def rollup_name(engine: Engine) -> str:
    ended_ns = value(engine, f"SELECT ended_ns FROM usage_event WHERE event_id = '{_VICTIM}'")
    return f"acme/{ended_ns // _MINUTE_NS * 60}/web/key_1//llama/default//USD/node-0"


FAULTS: dict[str, Planted] = {
    "a deleted event": Planted(
        lambda _: [f"DELETE FROM usage_event WHERE event_id = '{_VICTIM}'"], "missing_event", lambda _: _VICTIM
    ),
    "an event copied under another id": Planted(copied_event, "extra_event", lambda _: event_id(999)),
    "an event dearer by one picodollar": Planted(
        one_picodollar("usage_event", "amount_pico", lambda _: f"event_id = '{_VICTIM}'"),
        "event_amount", lambda _: _VICTIM, "1",
    ),
    "a token more in an event": Planted(
        one_picodollar("usage_event", "output_tokens", lambda _: f"event_id = '{_VICTIM}'"),
        "altered_event", lambda _: _VICTIM,
    ),
    "a deleted entry": Planted(
        lambda engine: [f"DELETE FROM entry WHERE posting_id = '{posting(engine)}' AND line_no = 2"],
        "missing_entry", posting,
    ),
    "a doubled entry": Planted(copied_entry, "duplicate_entry", lambda engine: f"{posting(engine)}#99"),
    "an entry greater by one picodollar": Planted(
        one_picodollar("entry", "amount_pico", lambda engine: f"posting_id = '{posting(engine)}' AND line_no = 2"),
        "entry_amount", lambda engine: f"{posting(engine)}#2", "1",
    ),
    "a dropped posting": Planted(
        lambda engine: [f"DELETE FROM posting WHERE posting_id = '{posting(engine)}'"],
        "unknown_posting", lambda engine: str(value(engine, "SELECT min(event_id) FROM usage_event")),
    ),
    "a doubled posting": Planted(copied_posting, "duplicate_posting", lambda _: "f" * 32),
    "a roll-up greater by one picodollar": Planted(
        one_picodollar("usage_rollup", "amount_pico", victims_minute), "rollup_value", rollup_name, "1"
    ),
    "a deleted roll-up row": Planted(
        lambda engine: [f"DELETE FROM usage_rollup WHERE {victims_minute(engine)}"], "missing_rollup", rollup_name
    ),
}  # fmt: skip


@pytest.fixture
async def books(sql_url: str, tmp_path: Path) -> Engine:
    """Both databases in turn, with 20 events that went through a spool and the shipper; reconcile finds them exact."""
    sql.upgrade(sql_url)
    engine = sql.engine(sql_url)
    books_sql.add_book(engine, a_book(), now_ns=1)
    spool = Spool(SpoolSettings(tmp_path / "spool", "node-0", "1", 1 << 30))
    for number in range(1, 21):
        event = usage_event(
            number,
            ended_ns=NOON_NS + number * _MINUTE_NS,
            output_tokens=number,
            billable=number % 5 != 0,
            estimated=number % 6 == 0,
            outcome=Outcome.CANCELLED if number % 6 == 0 else Outcome.COMPLETED,
        )
        spool.open(event.open)
        spool.close(event.close)
    await spool.aclose()
    Shipper(ShipperSettings(tmp_path / "spool", "node-0"), SqlIngest(engine)).run_once()
    return engine


@pytest.fixture
def reconcile(books: Engine, sql_url: str, tmp_path: Path) -> Iterator[Callable[[], tuple[int, dict[str, Any], str]]]:
    """Runs the command; gives exit status, report and what it says on standard error."""
    app = typer.Typer()
    register(app)

    def run() -> tuple[int, dict[str, Any], str]:
        argv = ["bill", "reconcile", "--json", "--spool", str(tmp_path / "spool"), "--database-url", sql_url]
        done = CliRunner().invoke(app, argv)
        return done.exit_code, json.loads(done.stdout), done.stderr

    status, report, _ = run()
    assert (status, report["exact"], report["events"], report["postings"]) == (0, True, 20, 1)
    yield run
    books.dispose()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(
    books: Engine, reconcile: Callable[[], tuple[int, dict[str, Any], str]], fault: str
) -> None:
    case = FAULTS[fault]
    name, statements = case.name(books), case.statements(books)
    with planted(books) as connection:
        for statement in statements:
            assert connection.execute(sa.text(statement)).rowcount > 0, statement
    status, report, told = reconcile()
    assert status == 1
    assert told.startswith("The books are not exact")
    named = {(one["kind"], one["name"]): one["amount_pico"] for one in report["differences"]}
    assert (case.kind, name) in named, report["differences"]
    if case.amount_pico is not None:
        assert named[case.kind, name] == case.amount_pico


@pytest.mark.parametrize("statement", [
    "DELETE FROM usage_event", "UPDATE usage_event SET amount_pico = 0", "DELETE FROM entry",
    "UPDATE entry SET amount_pico = 0", "DELETE FROM posting", "UPDATE posting SET memo = 'x'",
])  # fmt: skip
def test_the_books_themselves_refuse_to_be_changed(books: Engine, statement: str) -> None:
    with pytest.raises(sa.exc.DatabaseError), sql.write(books) as connection:
        connection.execute(sa.text(statement))
    assert value(books, "SELECT count(*) FROM usage_event") == 20
    books.dispose()
