"""Partitions of usage events by ranges of ids, on a real PostgreSQL: made ahead, moved into, pruned to, migrated to.

Owns: where a row lies and which partitions a query touches. Does not own: what ingest or reconcile do with the rows
(their own tests run on the partitioned table too). SQLite has no partitions: there every call is shown to do nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from sqlalchemy.engine import Connection, Engine

from billing.adapters import books_sql, partitions_sql, sql
from billing.adapters.corrections_sql import Scope, correct_prices
from billing.adapters.ingest import Ingest, IngestBatch
from billing.adapters.partitions_sql import MONTHS_AHEAD, PartitionReport, make_partitions, within
from billing.adapters.reconcile_sql import reconcile
from billing.adapters.tables import UsageEventRow, table
from billing.errors import PriceBookError, StoreError
from billing.ledger import ID_MARGIN_NS, NS_PER_S, event_id_floor, month_of
from billing.usage_event import UsageEvent
from tests.fakes.ledger_events import a_book, usage_event
from tests.services import at_once

EVENT = table(UsageEventRow)
DAY_NS = 86_400 * NS_PER_S
# The months that the migration makes depend on the clock; these tests make their own, years later.
MAY_NS = int(datetime(2031, 5, 1, tzinfo=UTC).timestamp()) * NS_PER_S
JUNE_NS, JULY_NS = MAY_NS + 31 * DAY_NS, MAY_NS + 61 * DAY_NS


@pytest.fixture
def engine(postgres_url: str) -> Iterator[Engine]:
    """PostgreSQL with tables and a price book."""
    sql.upgrade(postgres_url)
    made = sql.engine(postgres_url)
    books_sql.add_book(made, a_book(), now_ns=1)
    yield made
    made.dispose()


def v7(at_ns: int, number: int = 0) -> int:
    """The number of an id that a gateway could have made at this time."""
    return int(f"{event_id_floor(at_ns)}7{number:019x}", 16)


def event_at(at_ns: int, number: int = 0, **changed: Any) -> UsageEvent:
    return usage_event(
        v7(at_ns, number), received_ns=at_ns, opened_ns=at_ns, ended_ns=at_ns + 2 * NS_PER_S, first_token_ns=at_ns,
        **changed,
    )  # fmt: skip


def places(engine: Engine) -> dict[str, int]:
    """How many events each partition holds, of those that hold any."""
    with sql.read(engine) as connection:
        rows = connection.exec_driver_sql(
            "SELECT tableoid::regclass::text, count(*) FROM usage_event GROUP BY 1 ORDER BY 1"
        ).all()
    return {row[0]: row[1] for row in rows}


def partitions(engine: Engine) -> list[str]:
    with sql.read(engine) as connection:
        return list(
            connection.exec_driver_sql(
                "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'usage_event'::regclass ORDER BY 1"
            ).scalars()
        )


def touched(connection: Connection, query: sa.Select[Any]) -> set[str]:
    """The partitions in the plan of a query."""
    text = query.compile(connection, compile_kwargs={"literal_binds": True})
    (plan,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {text}".replace("%", "%%")).scalar_one()
    found: set[str] = set()
    nodes = [plan["Plan"]]
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if "Relation Name" in node:
            found.add(node["Relation Name"])
    return found


def test_a_new_database_has_this_month_and_the_months_ahead(engine: Engine) -> None:
    month, expected = month_of(int(datetime.now(UTC).timestamp()) * NS_PER_S), ["usage_event_default"]
    for _ in range(MONTHS_AHEAD + 1):
        expected.append(f"usage_event_{month.period_id.replace('-', '_')}")
        month = month_of(month.ends_ns)
    assert partitions(engine) == sorted(expected)


def test_months_are_made_ahead_once(engine: Engine) -> None:
    first = make_partitions(engine, MAY_NS)
    assert first.made == ("2031-05", "2031-06", "2031-07", "2031-08")
    assert make_partitions(engine, MAY_NS) == PartitionReport()
    assert make_partitions(engine, JUNE_NS).made == ("2031-09",)


def test_events_go_to_the_partition_of_their_month_and_any_other_to_the_default(engine: Engine) -> None:
    make_partitions(engine, MAY_NS)
    events = [event_at(MAY_NS), event_at(JUNE_NS - 1), event_at(JUNE_NS, 1), usage_event(3), usage_event(16**32 - 1)]
    assert Ingest(engine).write(IngestBatch(events)).inserted == 5
    assert places(engine) == {"usage_event_2031_05": 2, "usage_event_2031_06": 1, "usage_event_default": 2}
    # The unique key holds over all partitions: a replay is a duplicate wherever the row lies.
    assert Ingest(engine).write(IngestBatch(events)).duplicates == 5
    with pytest.raises(sa.exc.IntegrityError, match="usage_event_2031_05_pkey"), sql.write(engine) as connection:
        connection.exec_driver_sql(
            f"INSERT INTO usage_event SELECT * FROM usage_event WHERE event_id = '{v7(MAY_NS):032x}'"
        )


def test_rows_that_landed_in_the_default_are_moved_when_their_month_is_made(engine: Engine) -> None:
    far_ns = JULY_NS + 400 * DAY_NS
    late = [event_at(MAY_NS + n * DAY_NS, n) for n in range(40)]
    Ingest(engine).write(IngestBatch([*late, usage_event(7), event_at(far_ns)]))
    before = reconcile(engine)
    assert places(engine) == {"usage_event_default": 42}
    # Two months later: the months of the rows are made too, but not one that lies beyond those made ahead.
    report = make_partitions(engine, JULY_NS)
    assert report.made == ("2031-05", "2031-06", "2031-07", "2031-08", "2031-09", "2031-10")
    assert report.moved_row_count == 40
    assert places(engine) == {"usage_event_2031_05": 31, "usage_event_2031_06": 9, "usage_event_default": 2}
    after = reconcile(engine)
    assert after.exact
    assert (after.event_count, after.totals) == (before.event_count, before.totals)
    assert Ingest(engine).write(IngestBatch(late)).duplicates == 40


@pytest.mark.parametrize("name", ["usage_event", "usage_event_default", "usage_event_2031_05", "usage_event_2031_06"])
@pytest.mark.parametrize("statement", ["UPDATE {} SET amount_pico = 0", "DELETE FROM {}", "TRUNCATE {}"])
def test_no_partition_can_be_changed(engine: Engine, name: str, statement: str) -> None:
    Ingest(engine).write(IngestBatch([event_at(MAY_NS)]))
    make_partitions(engine, MAY_NS)  # one with a moved row, one that was empty, and the default it was moved from
    with pytest.raises(sa.exc.IntegrityError, match="append only"), sql.write(engine) as connection:
        connection.exec_driver_sql(statement.format(name))


def _make(url: str, answers: Any) -> None:
    engine = sql.engine(url)
    try:
        answers.put(make_partitions(engine, JULY_NS))
    except Exception as fault:
        answers.put(fault)
    finally:
        engine.dispose()


def test_several_workers_at_once_make_each_month_once(engine: Engine) -> None:
    Ingest(engine).write(IngestBatch([event_at(MAY_NS + n * DAY_NS, n) for n in range(60)]))
    told = at_once(4, _make, engine.url.render_as_string(hide_password=False))
    assert not [one for one in told if isinstance(one, Exception)]
    make_partitions(engine, JULY_NS)  # what a worker left to another that was at it, the next tick does
    assert places(engine) == {"usage_event_2031_05": 31, "usage_event_2031_06": 29}


def test_a_long_reader_puts_the_work_off_and_is_not_waited_for_by_ingest(engine: Engine) -> None:
    make_partitions(engine, MAY_NS)
    with sql.read(engine) as reading:
        reading.exec_driver_sql("SELECT count(*) FROM usage_event_default")
        report = make_partitions(engine, JUNE_NS, lock_wait_s=0.05)
        assert (report.made, report.put_off) == ((), "2031-09")
        assert Ingest(engine).write(IngestBatch([event_at(JUNE_NS)])).inserted == 1
    assert make_partitions(engine, JUNE_NS).made == ("2031-09",)


def test_a_role_that_does_not_own_the_table_is_told_so(engine: Engine) -> None:
    name = f"plain_{engine.url.database}"
    with sql.write(engine) as connection:
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN")
        connection.exec_driver_sql(f"GRANT ALL ON SCHEMA public TO {name}")
        connection.exec_driver_sql(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
    theirs = sql.engine(engine.url.set(username=name).render_as_string(hide_password=False))
    try:
        # It may write and read events all the same.
        assert Ingest(theirs).write(IngestBatch([event_at(MAY_NS), usage_event(5)])).inserted == 2
        assert reconcile(theirs).exact
        with pytest.raises(StoreError, match="does not own usage_event; run inferplane db upgrade"):
            make_partitions(theirs, MAY_NS)
    finally:
        theirs.dispose()
        with sql.write(engine) as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {name}")
            connection.exec_driver_sql(f"DROP ROLE {name}")
    assert make_partitions(engine, MAY_NS).moved_row_count == 1


def test_a_table_that_was_detached_is_left_alone(engine: Engine) -> None:
    make_partitions(engine, MAY_NS)
    with sql.write(engine) as connection:
        connection.exec_driver_sql("ALTER TABLE usage_event DETACH PARTITION usage_event_2031_05")
    Ingest(engine).write(IngestBatch([event_at(MAY_NS)]))
    assert make_partitions(engine, JUNE_NS).made == ("2031-09",)
    assert places(engine) == {"usage_event_default": 1}


def test_a_query_by_time_touches_the_partitions_of_that_time_only(engine: Engine) -> None:
    make_partitions(engine, MAY_NS)
    with sql.read(engine) as connection:
        everything = touched(connection, sa.select(EVENT.c.amount_pico).where(EVENT.c.ended_ns >= JUNE_NS))
        assert {"usage_event_default", "usage_event_2031_05", "usage_event_2031_06"} < everything

        def of(from_ns: int, until_ns: int) -> set[str]:
            query = sa.select(sa.func.sum(EVENT.c.amount_pico)).where(
                EVENT.c.ended_ns >= from_ns, EVENT.c.ended_ns < until_ns, *within(connection, from_ns, until_ns)
            )
            return touched(connection, query)

        # All of June but for the margin at both ends: one partition. With the margin, one hour of each neighbour.
        assert of(JUNE_NS + ID_MARGIN_NS, JULY_NS - ID_MARGIN_NS) == {"usage_event_2031_06"}
        assert of(JUNE_NS, JULY_NS) == {"usage_event_2031_05", "usage_event_2031_06", "usage_event_2031_07"}


def test_an_event_whose_id_is_not_of_its_time_is_never_pruned_away(engine: Engine) -> None:
    make_partitions(engine, MAY_NS)
    day = (JUNE_NS + 10 * DAY_NS, JUNE_NS + 11 * DAY_NS)
    inside_ns = day[0] + NS_PER_S
    odd = [
        usage_event(event, received_ns=inside_ns, opened_ns=inside_ns, ended_ns=inside_ns + NS_PER_S)
        for event in (5, v7(MAY_NS), v7(day[1] + 2 * ID_MARGIN_NS), v7(inside_ns) ^ 1 << 79)
    ]
    slow = usage_event(v7(day[0] - 2 * DAY_NS), received_ns=day[0] - 2 * DAY_NS, ended_ns=inside_ns)
    Ingest(engine).write(IngestBatch([event_at(MAY_NS, 9), event_at(inside_ns, 9)]))

    def found(connection: Connection) -> int:
        ended = (
            sa.select(sa.func.count()).select_from(EVENT).where(EVENT.c.ended_ns >= day[0], EVENT.c.ended_ns < day[1])
        )
        return int(connection.execute(ended.where(*within(connection, *day))).scalar_one())

    with sql.read(engine) as connection:
        assert within(connection, *day)
        assert found(connection) == 1
    for count, one in enumerate([*odd, slow], start=2):
        Ingest(engine).write(IngestBatch([one]))
        with sql.read(engine) as connection:
            assert found(connection) == count
            assert within(connection, *day) == ()
            # Days that no such event touches are pruned as before.
            assert within(connection, day[1] + 9 * DAY_NS, day[1] + 10 * DAY_NS)


def test_events_at_the_edge_of_the_margin_are_found(engine: Engine) -> None:
    edge_ns = JUNE_NS + 10 * DAY_NS
    for number, shift_ns in enumerate((-ID_MARGIN_NS, 0, ID_MARGIN_NS)):
        one = usage_event(v7(edge_ns + shift_ns, number), received_ns=edge_ns, opened_ns=edge_ns, ended_ns=edge_ns)
        Ingest(engine).write(IngestBatch([one]))
    with sql.read(engine) as connection:
        conditions = within(connection, edge_ns, edge_ns + 1)
        assert conditions
        query = sa.select(sa.func.count()).select_from(EVENT).where(*conditions)
        assert connection.execute(query).scalar_one() == 3


def test_a_correction_of_one_month_finds_every_event_of_it(engine: Engine) -> None:
    make_partitions(engine, MAY_NS)
    events = [event_at(MAY_NS + n * DAY_NS, n) for n in range(70)]
    Ingest(engine).write(IngestBatch([*events, usage_event(5, received_ns=JUNE_NS, ended_ns=JUNE_NS)]))
    prices = {key: price + 7 for key, price in a_book().prices.items()}
    books_sql.add_book(engine, a_book("pb-2", prices=prices, valid_from_ns=MAY_NS), retroactive=True)
    assert correct_prices(engine, Scope(JUNE_NS, JULY_NS)).corrected_count == 31
    report = reconcile(engine)
    assert report.exact, report.differences


@contextmanager
def a_move_under_way(engine: Engine) -> Iterator[None]:
    """May's rows are on their way out of the default partition; the move ends when somebody waits for it."""
    moved, ended = threading.Event(), threading.Event()

    def move() -> None:
        with sql.write(engine) as connection:
            assert partitions_sql._make(connection, month_of(MAY_NS), 2.0)
            moved.set()
            lock = "relation = 'usage_event_default'::regclass AND NOT granted"
            waiting = f"SELECT EXISTS (SELECT 1 FROM pg_locks WHERE {lock})"
            with engine.connect() as other:
                until_s = time.monotonic() + 10
                while time.monotonic() < until_s and not other.exec_driver_sql(waiting).scalar():
                    time.sleep(0.01)
        ended.set()

    mover = threading.Thread(target=move)
    mover.start()
    assert moved.wait(10)
    yield
    mover.join()
    assert ended.is_set()


def test_no_reader_misses_events_that_are_moved_while_it_begins(engine: Engine) -> None:
    Ingest(engine).write(IngestBatch([event_at(MAY_NS + n * DAY_NS, n) for n in range(30)]))
    prices = {key: price * 2 for key, price in a_book().prices.items()}
    books_sql.add_book(engine, a_book("pb-2", prices=prices, valid_from_ns=MAY_NS), retroactive=True)
    with a_move_under_way(engine):
        assert correct_prices(engine, Scope(MAY_NS, JUNE_NS)).corrected_count == 30
    assert reconcile(engine).exact


def test_reconcile_is_exact_while_events_are_moved(engine: Engine) -> None:
    Ingest(engine).write(IngestBatch([event_at(MAY_NS + n * DAY_NS, n) for n in range(30)]))
    with a_move_under_way(engine):
        report = reconcile(engine)
    assert (report.exact, report.event_count) == (True, 30), report.differences


def test_a_book_from_the_past_is_refused_while_events_are_moved(engine: Engine) -> None:
    Ingest(engine).write(IngestBatch([event_at(MAY_NS + n * DAY_NS, n) for n in range(30)]))
    with a_move_under_way(engine), pytest.raises(PriceBookError):
        books_sql.add_book(engine, a_book("pb-2", valid_from_ns=MAY_NS), now_ns=JUNE_NS)


def _run_to(url: str, revision: str, *, down: bool = False) -> None:
    """Alembic to a revision, in the transaction that `sql.upgrade` would open."""
    engine = sql.engine(url)
    config = sql._alembic_config()
    with sql.write(engine) as connection:
        config.attributes["connection"] = connection
        (command.downgrade if down else command.upgrade)(config, revision)
    engine.dispose()


def _shape(engine: Engine) -> Any:
    """Columns, primary key, indexes, checks and triggers of the events' table, as PostgreSQL reports them."""
    inspector = sa.inspect(engine)
    with sql.read(engine) as connection:
        triggers = connection.exec_driver_sql(
            "SELECT tgname FROM pg_trigger WHERE tgrelid = 'usage_event'::regclass AND NOT tgisinternal ORDER BY 1"
        ).scalars()
        kind = connection.exec_driver_sql("SELECT relkind FROM pg_class WHERE oid = 'usage_event'::regclass").scalar()
        names = [name for name in triggers if name != "usage_event_misdated"]
    columns = [(one["name"], str(one["type"]), one["nullable"]) for one in inspector.get_columns("usage_event")]
    indexes = sorted((str(one["name"]), one["column_names"]) for one in inspector.get_indexes("usage_event"))
    return kind, (
        columns,
        inspector.get_pk_constraint("usage_event"),
        indexes,
        [one["name"] for one in inspector.get_check_constraints("usage_event")],
        names,
    )


def _sums(engine: Engine) -> Any:
    with sql.read(engine) as connection:
        query = "SELECT count(*), sum(amount_pico), count(DISTINCT event_id), min(payload_hash) FROM usage_event"
        return tuple(connection.exec_driver_sql(query).one())


def test_a_table_with_data_is_converted_and_back(postgres_url: str) -> None:
    _run_to(postgres_url, "0002")
    engine = sql.engine(postgres_url)
    books_sql.add_book(engine, a_book(), retroactive=True, now_ns=1)
    plain = _shape(engine)
    # Past months, this one, the next, a clock that ran ahead, and ids of no time at all.
    now_ns = int(datetime.now(UTC).timestamp()) * NS_PER_S
    next_month = month_of(month_of(now_ns).ends_ns)
    times = [now_ns - 90 * DAY_NS, now_ns, next_month.starts_ns + DAY_NS, now_ns + 3_000 * DAY_NS]
    events = [*(event_at(at_ns) for at_ns in times), usage_event(5)]
    Ingest(engine).write(IngestBatch(events))
    assert _shape(engine)[0] == "r"
    before = _sums(engine)
    sql.upgrade(engine)
    later = f"usage_event_{next_month.period_id.replace('-', '_')}"
    assert places(engine) == {"usage_event_default": 1, "usage_event_history": 3, later: 1}
    kind, shape = _shape(engine)
    assert (kind, shape) == ("p", plain[1])
    assert Ingest(engine).write(IngestBatch(events)).duplicates == 5
    assert _sums(engine) == before
    assert reconcile(engine).exact
    with sql.read(engine) as connection:
        # The one whose id is of no time was noted on the way; it is looked for everywhere.
        odd_ns = events[-1].close.ended_ns
        assert within(connection, odd_ns, odd_ns + 1) == ()
        assert within(connection, now_ns - 2 * DAY_NS, now_ns - DAY_NS)
    for name in ("usage_event_history", later):
        with pytest.raises(sa.exc.IntegrityError, match="append only"), sql.write(engine) as connection:
            connection.exec_driver_sql(f"DELETE FROM {name}")
    assert Ingest(engine).write(IngestBatch([event_at(now_ns, 1), event_at(next_month.ends_ns - 1, 1)])).inserted == 2
    assert make_partitions(engine, now_ns) == PartitionReport()
    grown = _sums(engine)
    _run_to(postgres_url, "0002", down=True)
    assert (_shape(engine), _sums(engine)) == (plain, grown)
    sql.upgrade(engine)
    assert _sums(engine) == grown
    assert reconcile(engine).exact
    engine.dispose()


def test_the_conversion_changes_nothing_on_sqlite(sqlite_url: str) -> None:
    _run_to(sqlite_url, "0002")
    engine = sql.engine(sqlite_url)
    with sql.read(engine) as connection:
        listed = sa.text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
        before = connection.execute(listed).all()
    sql.upgrade(engine)
    assert make_partitions(engine, MAY_NS) == PartitionReport()
    with sql.read(engine) as connection:
        assert connection.execute(listed).all() == before
        assert within(connection, MAY_NS, JUNE_NS) == ()
    _run_to(sqlite_url, "0002", down=True)
    assert sql.current_revision(engine) == "0002"
    engine.dispose()
