"""The database itself: versions, concurrent upgrades, what triggers refuse, and exact integers, on both databases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy.engine import Engine
from sqlmodel import SQLModel

from billing.adapters import books_sql, sql, tables
from billing.adapters.ingest import Ingest, IngestBatch
from billing.errors import SchemaOutdated, StoreError
from billing.ledger import xor_of
from tests.fakes.ledger_events import NOON_NS, a_book, usage_event
from tests.services import at_once

BILLING_TABLES = {
    tables.table(kind).name
    for kind in vars(tables).values()
    if isinstance(kind, type) and issubclass(kind, SQLModel) and kind is not SQLModel
}


def test_an_empty_database_is_told_what_to_run(sql_url: str) -> None:
    with pytest.raises(SchemaOutdated, match=r"has no tables yet.*run inferplane db upgrade\.$"):
        sql.require_current(sql_url)
    assert sql.current_revision(sql_url) is None
    assert sql.upgrade(sql_url) == sql.head_revision() == sql.current_revision(sql_url)
    sql.require_current(sql_url)


def test_an_old_database_is_told_what_to_run(sql_url: str) -> None:
    sql.upgrade(sql_url)
    engine = sql.engine(sql_url)
    with sql.write(engine) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(SchemaOutdated, match="is at revision 0000, but this version needs"):
        sql.require_current(engine)
    engine.dispose()


def _upgrade(url: str, answers: Any) -> None:
    try:
        answers.put(sql.upgrade(url))
    except Exception as fault:
        answers.put(repr(fault))


def test_processes_that_upgrade_at_once_do_not_disturb_each_other(sql_url: str) -> None:
    told = at_once(3, _upgrade, sql_url)
    assert told == [sql.head_revision()] * 3


def test_the_migrations_make_the_columns_of_the_models(empty_books: Engine) -> None:
    def is_ours(_thing: object, name: str | None, kind: str, *_: object) -> bool:
        return kind != "table" or name in BILLING_TABLES  # other packages' tables may be imported in the same process

    only_ours = {"include_object": is_ours, "compare_type": True}
    with sql.read(empty_books) as connection:
        found = compare_metadata(MigrationContext.configure(connection, opts=only_ours), SQLModel.metadata)
    assert len(BILLING_TABLES) == 11
    # Indexes and foreign keys stand in the migrations only; the classes are for queries.
    assert [change for change in found if not str(change[0]).endswith(("index", "fk"))] == []


APPEND_ONLY = {
    "usage_event": "amount_pico = 0",
    "price": "micro_usd_per_million_tokens = 0",
    "price_book": "note = 'x'",
    "posting": "memo = 'x'",
    "entry": "amount_pico = 0",
}


@pytest.mark.parametrize("name", sorted(APPEND_ONLY))
def test_what_is_written_once_can_be_neither_changed_nor_deleted(books: Engine, name: str) -> None:
    Ingest(books).write(IngestBatch([usage_event(1)]))
    for statement in (f"UPDATE {name} SET {APPEND_ONLY[name]}", f"DELETE FROM {name}"):
        with pytest.raises(sa.exc.IntegrityError, match="append only"), sql.write(books) as connection:
            connection.exec_driver_sql(statement)


LEG = (
    "INSERT INTO entry (posting_id, line_no, account, currency, model, tier, amount_pico) "
    "VALUES ('{}', {}, 'x', '{}', '', '', {})"
)
HEAD = (
    "INSERT INTO posting (posting_id, kind, org_id, currency, period_id, usage_from_ns, usage_until_ns, posted_ns, "
    "event_count, event_xor, memo) VALUES ('{}', 'usage', 'o', 'USD', '{}', 0, 0, 0, 0, '', '')"
)


def run(engine: Engine, *statements: str) -> None:
    with sql.write(engine) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def test_the_database_itself_refuses_a_posting_that_does_not_balance(books: Engine) -> None:
    Ingest(books).write(IngestBatch([usage_event(1)]))
    run(books, LEG.format("p1", 1, "USD", 5), LEG.format("p1", 2, "USD", -5), HEAD.format("p1", "2026-11"))
    refused = {
        "sum to zero": [LEG.format("p2", 1, "USD", 5), LEG.format("p2", 2, "USD", -4), HEAD.format("p2", "2026-11")],
        "in its currency": [
            LEG.format("p3", 1, "EUR", 5),
            LEG.format("p3", 2, "EUR", -5),
            HEAD.format("p3", "2026-11"),
        ],
        "finished posting": [LEG.format("p1", 3, "USD", 0)],
        "(?i)foreign key": [LEG.format("p4", 1, "USD", 0)],
    }
    for reason, statements in refused.items():
        with pytest.raises(sa.exc.IntegrityError, match=reason):
            run(books, *statements)


def test_a_closed_period_takes_no_posting_and_does_not_open_again(books: Engine) -> None:
    Ingest(books).write(IngestBatch([usage_event(1)]))
    books_sql.close_period(books, "2026-11", now_ns=NOON_NS + 30 * 86_400 * 10**9)
    with pytest.raises(sa.exc.IntegrityError, match="period is closed"):
        run(books, LEG.format("p", 1, "USD", 0), LEG.format("p", 2, "USD", 0), HEAD.format("p", "2026-11"))
    for statement in ("UPDATE period SET status = 'open', seal = NULL", "DELETE FROM period"):
        with pytest.raises(sa.exc.IntegrityError):
            run(books, statement)


@pytest.mark.parametrize(
    "numbers",
    [
        [2**63 - 1] * 5,
        [-(2**63)] * 5,
        [2**63 - 1, -1, 1, -(2**63), 2**32, -(2**32), 2**31, -(2**31), 0],
        [-1],
        [0],
        [1, -1],
    ],
)
def test_sums_pass_64_bits_without_losing_a_picodollar(books: Engine, numbers: list[int]) -> None:
    rows = sa.union_all(*(sa.select(sa.literal(number, sa.BigInteger).label("n")) for number in numbers)).subquery()
    with sql.read(books) as connection:
        assert connection.execute(sa.select(sql.pico_sum(rows.c.n))).scalar() == sum(numbers)
        empty = sa.select(sql.pico_sum(tables.table(tables.EntryRow).c.amount_pico))
        assert connection.execute(empty).scalar() is None


def test_ids_are_combined_by_the_database_as_here(books: Engine) -> None:
    ids = [f"{number:032x}" for number in (0, 1, 16**32 - 1, 2**127, 2**63, 2**64 + 5, 12_345_678_901_234_567_890)]
    for count in range(1, len(ids) + 1):
        rows = sa.union_all(*(sa.select(sa.literal(one, sa.Text).label("id")) for one in ids[:count])).subquery()
        with sql.read(books) as connection:
            assert connection.execute(sa.select(sql.id_xor(rows.c.id))).scalar() == xor_of(ids[:count])


def test_sqlite_refuses_an_amount_that_would_become_a_float(sqlite_url: str) -> None:
    sql.upgrade(sqlite_url)
    engine = sql.engine(sqlite_url)
    books_sql.add_book(engine, a_book(), now_ns=1)
    Ingest(engine).write(IngestBatch([usage_event(1)]))
    with pytest.raises(sa.exc.IntegrityError, match="whole"):
        run(engine, "UPDATE usage_rollup SET amount_pico = amount_pico + 9223372036854775807")
    engine.dispose()


def test_a_reader_does_not_wait_for_a_writer(sqlite_url: str) -> None:
    sql.upgrade(sqlite_url)
    engine = sql.engine(sqlite_url)
    with sql.write(engine) as writing:
        writing.exec_driver_sql("INSERT INTO quarantine VALUES ('q', 'k', 'r', NULL, NULL, NULL, x'00', 1)")
        with sql.read(engine) as reading:
            assert reading.exec_driver_sql("SELECT count(*) FROM quarantine").scalar() == 0
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mysql://root:hunter2@db/x", "The database is 'mysql'; sqlite or postgresql was expected."),
        ("sqlite://", "no file"),
        ("not a url hunter2", "cannot be read"),
        ("postgresql://me:hunter2@db:none/x", "cannot be read"),
        ("postgresql://me:hunter2@[::1/x", "cannot be read"),
        ("postgresql://me:hun@ter/hunter2@db/x", "an '@' too many"),
        ("postgresql://me:hun@hunter2@db/x", "an '@' too many"),
    ],
)
def test_a_url_of_another_kind_is_refused_without_its_password(url: str, told: str) -> None:
    with pytest.raises(StoreError, match=told) as raised:
        sql.engine(url)
    assert "hunter2" not in str(raised.value)


def test_a_database_that_does_not_answer_is_one_sentence_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not answer") as raised:
        sql.current_revision(f"postgresql://me:hunter2@/x?host={tmp_path}")
    assert "hunter2" not in str(raised.value)
