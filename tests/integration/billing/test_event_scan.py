"""The quick pass over events on both databases: what is right is told so without a second look, what is not is not.

Owns: `EventScan` by itself. Does not own: what reconcile says of a doubtful event (test_reconcile.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from billing.adapters import books_sql, sql
from billing.adapters.event_rows import COLUMNS
from billing.adapters.event_scan import EventScan, Scan, Work
from billing.adapters.ingest import Ingest, IngestBatch
from billing.adapters.tables import UsageEventRow, table
from billing.ledger import NS_PER_S
from billing.usage_event import Outcome
from tests.fakes.ledger_events import NOON_NS, event_id, usage_event
from tests.fakes.ledger_faults import planted

EVENT = table(UsageEventRow)
WHOLE = {
    "user": 'Zoë \u2028 \x7f "quoted" \\ \t\u0001',
    "profile": "",
    "tier_asked": "auto",
    "tier_served": "flex",
    "deployment": "d",
    "pool": "p",
    "batch_id": "b",
    "custom_id": "\U0001f600",
    "spillover": True,
    "estimated": True,
    "error_code": "e",
    "predicted_cached_tokens": 2**62,
    "cache_write_tokens": 5,
    "reasoning_tokens": 3,
}


@pytest.fixture
def full(books: Engine) -> Engine:
    events = [
        usage_event(1),
        usage_event(2, **WHOLE),
        usage_event(3, billable=False),
        usage_event(4, first_token_ns=None, outcome=Outcome.FAILED),
        usage_event(5, model_served="unsold"),
        usage_event(6, uncached_input_tokens=None, cached_input_tokens=None, output_tokens=None, status=None),
        usage_event(7, uncached_input_tokens=0, cached_input_tokens=0, output_tokens=0),
        usage_event(8, model_served="", model_asked="llama", endpoint="engine-1"),
        usage_event(9, price_version=None, ended_ns=NOON_NS + 3_600 * NS_PER_S),
    ]
    assert Ingest(books).write(IngestBatch(events)).inserted == 9
    return books


def scan(engine: Engine, seen: list[Any] | None = None) -> tuple[list[str], Scan]:
    """The doubtful ids, and what was counted."""
    schedule = books_sql.load_books(engine)
    watch = None if seen is None else lambda *told: seen.append(told)
    with sql.read(engine) as connection:
        made = EventScan(connection, schedule.book, 3_600, watch)
        return [one for part in made.doubtful() for one in part], made.found


def doubtful_after(engine: Engine, changes: dict[str, str]) -> dict[str, list[str]]:
    """The doubtful ids after each change (column -> SQL) of event 2 by itself; each is taken back."""
    schedule, found = books_sql.load_books(engine), {}
    where = f"WHERE event_id = '{event_id(2)}'"
    with planted(engine) as connection:
        connection.exec_driver_sql("CREATE TEMP TABLE kept AS SELECT * FROM usage_event")
        for column, value in changes.items():
            connection.exec_driver_sql(f"UPDATE usage_event SET {column} = {value} {where}")
            made = EventScan(connection, schedule.book, 3_600)
            found[column] = [one for part in made.doubtful() for one in part]
            connection.exec_driver_sql(f"UPDATE usage_event SET {column} = (SELECT {column} FROM kept {where}) {where}")
    assert scan(engine)[0] == []
    return found


def test_no_event_that_is_right_is_looked_at_twice(full: Engine) -> None:
    doubtful, found = scan(full)
    assert doubtful == []
    assert (found.event_count, found.unpriced_count, found.estimated_count) == (9, 1, 1)
    assert found.stretches == {NOON_NS // (3_600 * NS_PER_S), NOON_NS // (3_600 * NS_PER_S) + 1}
    with sql.read(full) as connection:
        total = connection.execute(sa.select(sql.pico_sum(EVENT.c.amount_pico))).scalar()
    assert found.amounts_pico == {"USD": total}


def test_events_with_fields_of_a_newer_writer_are_looked_at_again(full: Engine) -> None:
    Ingest(full).write(IngestBatch([usage_event(10, extra={"newer": 1})]))
    assert scan(full)[0] == [event_id(10)]


# What the hash does not cover and no amount depends on: who made the row, and in which currency an amount is.
UNCHECKED = {"schema_version", "currency"}


def test_a_change_of_any_column_is_doubtful(full: Engine) -> None:
    changes = {"posting_id": "NULL", "extra": "'{\"newer\": 1}'"}
    for column in sorted(set(COLUMNS) - UNCHECKED - {"event_id"} - changes.keys()):
        kind = EVENT.c[column].type
        changes[column] = "'zz'"
        if isinstance(kind, sa.Boolean):
            changes[column] = f"NOT {column}"
        elif isinstance(kind, sa.BigInteger) or column == "amount_pico":
            changes[column] = f"coalesce({column}, 0) + 1"
    assert len(changes) >= 40
    assert doubtful_after(full, changes) == {column: [event_id(2)] for column in changes}


def test_a_value_that_became_unknown_is_doubtful(full: Engine) -> None:
    columns = ["end_user", *sorted(WHOLE.keys() - {"user", "spillover", "estimated"})]
    assert doubtful_after(full, dict.fromkeys(columns, "NULL")) == {column: [event_id(2)] for column in columns}


def test_another_id_is_doubtful(full: Engine) -> None:
    with planted(full) as connection:
        connection.exec_driver_sql(
            f"UPDATE usage_event SET event_id = '{event_id(99)}' WHERE event_id = '{event_id(2)}'"
        )
    assert scan(full)[0] == [event_id(99)]


def test_a_price_that_is_not_the_books_and_a_posting_that_is_gone_are_doubtful(full: Engine) -> None:
    with planted(full) as connection:
        connection.exec_driver_sql(f"UPDATE usage_event SET posting_id = NULL WHERE event_id = '{event_id(1)}'")
        connection.exec_driver_sql(f"UPDATE usage_event SET amount_pico = 1 WHERE event_id = '{event_id(3)}'")
        connection.exec_driver_sql(f"UPDATE usage_event SET price_version = 'x' WHERE event_id = '{event_id(8)}'")
    assert sorted(scan(full)[0]) == [event_id(1), event_id(3), event_id(8)]


def test_the_work_of_engines_is_told(full: Engine) -> None:
    seen: list[Any] = []
    scan(full, seen)
    assert len(seen) == 9
    assert seen.count(("engine-1", "1", Work(False, 1_000, 512, None, 100))) == 1
