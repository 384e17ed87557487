"""Ingest on both real databases: once, whole, priced, balanced; and what cannot be stored is kept aside."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from billing.adapters import books_sql, sql
from billing.adapters.ingest import Clock, Ingest, IngestBatch, Quarantined, SpoolOffset, SpoolRefusal
from billing.adapters.reconcile_sql import reconcile
from billing.errors import StoreUnavailable
from billing.usage_event import Outcome, Refusal
from tests.fakes.ledger_events import NOON_NS, a_book, event_id, usage_event

# 1,000 x 3 + 512 x 0.3 + 100 x 15 dollars per million tokens, in picodollars.
ONE_EVENT_PICO = 1_000 * 3_000_000 + 512 * 300_000 + 100 * 15_000_000


def rows(engine: Engine, query: str) -> list[Any]:
    with sql.read(engine) as connection:
        return list(connection.execute(sa.text(query)).all())


def one(engine: Engine, query: str) -> Any:
    return rows(engine, query)[0][0]


def test_an_event_is_rated_posted_and_rolled_up_in_one_go(books: Engine) -> None:
    report = Ingest(books).write(IngestBatch([usage_event(1)]))
    assert (report.inserted, report.duplicates, report.posted) == (1, 0, 1)
    stored = rows(books, "SELECT amount_pico, currency, posting_id FROM usage_event")[0]
    assert (int(stored[0]), stored[1], stored[2]) == (ONE_EVENT_PICO, "USD", report.posting_ids[0])
    entries = rows(books, "SELECT account, amount_pico FROM entry ORDER BY line_no")
    assert [(account, int(amount)) for account, amount in entries] == [
        ("receivable:acme", ONE_EVENT_PICO),
        ("revenue:cached_input", -512 * 300_000),
        ("revenue:input", -1_000 * 3_000_000),
        ("revenue:output", -100 * 15_000_000),
    ]
    assert int(one(books, "SELECT amount_pico FROM usage_rollup")) == ONE_EVENT_PICO
    assert reconcile(books).exact


def test_a_replay_of_a_batch_changes_nothing(books: Engine) -> None:
    ingest = Ingest(books)
    batch = IngestBatch([usage_event(number) for number in range(1, 30)])
    ingest.write(batch)
    report = ingest.write(batch)
    assert (report.inserted, report.duplicates, report.posted) == (0, 29, 0)
    assert one(books, "SELECT count(*) FROM posting") == 1
    assert reconcile(books).exact


def test_the_same_event_twice_in_one_batch_counts_once(books: Engine) -> None:
    report = Ingest(books).write(IngestBatch([usage_event(1), usage_event(1)]))
    assert (report.inserted, report.duplicates) == (1, 1)
    assert reconcile(books).exact


@pytest.mark.parametrize("in_one_batch", [True, False])
def test_an_id_with_another_payload_is_an_alarm_and_kept(books: Engine, in_one_batch: bool) -> None:
    first, other = usage_event(1), usage_event(1, output_tokens=101)
    ingest = Ingest(books)
    if in_one_batch:
        report = ingest.write(IngestBatch([first, other]))
    else:
        ingest.write(IngestBatch([first]))
        report = ingest.write(IngestBatch([other]))
    assert report.conflicting == 1
    ingest.write(IngestBatch([other]))
    kept = rows(books, "SELECT kind, event_id, raw FROM quarantine")
    assert [(row[0], row[1]) for row in kept] == [("conflict", event_id(1))]
    assert b'"output_tokens":101' in bytes(kept[0][2])
    assert one(books, "SELECT output_tokens FROM usage_event") == 100
    assert reconcile(books).exact


def test_unknown_counts_stay_null_and_bill_what_is_known(books: Engine) -> None:
    event = usage_event(1, outcome=Outcome.CRASHED, estimated=True, uncached_input_tokens=None, output_tokens=7)
    Ingest(books).write(IngestBatch([event]))
    stored = rows(books, "SELECT uncached_input_tokens, output_tokens, amount_pico FROM usage_event")[0]
    assert (stored[0], stored[1], int(stored[2])) == (None, 7, 7 * 15_000_000 + 512 * 300_000)
    assert rows(books, "SELECT unknown_count, input_known_count FROM usage_rollup")[0] == (1, 0)
    assert reconcile(books).exact


def test_a_model_without_a_price_is_stored_without_an_amount(books: Engine) -> None:
    events = [usage_event(1, model_served="gpt"), usage_event(2, price_version="pb-9")]
    report = Ingest(books).write(IngestBatch(events))
    assert (report.inserted, report.unpriced, report.posted) == (2, 2, 0)
    assert rows(books, "SELECT amount_pico, posting_id FROM usage_event") == [(None, None), (None, None)]
    found = reconcile(books)
    assert found.exact
    assert found.unpriced_event_count == 2


def test_an_attempt_that_is_not_billed_costs_nothing_and_is_counted(books: Engine) -> None:
    failed = usage_event(1, outcome=Outcome.FAILED, first_token_ns=None, billable=True)
    retried = usage_event(2, billable=False)
    Ingest(books).write(IngestBatch([failed, retried]))
    assert [int(row[0]) for row in rows(books, "SELECT amount_pico FROM usage_event")] == [0, 0]
    assert one(books, "SELECT count(*) FROM posting") == 0
    assert one(books, "SELECT sum(event_count) FROM usage_rollup") == 2
    assert reconcile(books).exact


def test_the_offset_is_stored_with_the_events_and_never_moves_back(books: Engine) -> None:
    ingest = Ingest(books)
    ingest.write(IngestBatch([usage_event(1)], offsets=[SpoolOffset("n", "a", 2, 100, complete_to_ns=5)]))
    ingest.write(IngestBatch([usage_event(2)], offsets=[SpoolOffset("n", "a", 1, 900, complete_to_ns=9)]))
    assert rows(books, "SELECT segment, offset_bytes, complete_to_ns FROM spool_offset") == [(2, 100, 5)]
    ingest.write(IngestBatch(offsets=[SpoolOffset("n", "a", 2, 100, finished=True)]))
    told = rows(books, "SELECT segment, offset_bytes, complete_to_ns, finished FROM spool_offset")[0]
    assert (told[0], told[1], told[2], bool(told[3])) == (2, 100, 5, True)


def test_refusals_count_once_however_often_their_batch_is_sent(books: Engine) -> None:
    refusal = SpoolRefusal(Refusal("acme", "web", "llama", "rate_limit", NOON_NS + 5, 3), "n", "a")
    batch = IngestBatch(refusals=[refusal, refusal], offsets=[SpoolOffset("n", "a", 1, 50)])
    ingest = Ingest(books)
    ingest.write(batch)
    ingest.write(batch)
    assert rows(books, "SELECT minute_s, refusal_count FROM refusal_minute") == [(NOON_NS // 10**9, 6)]
    ingest.write(IngestBatch(refusals=[refusal], offsets=[SpoolOffset("n", "a", 1, 80)]))
    assert one(books, "SELECT refusal_count FROM refusal_minute") == 9


def test_a_frame_that_cannot_be_read_is_kept_once(books: Engine) -> None:
    frame = Quarantined("frame", "checksum differs", b"\x00\xff", "n", "a")
    for _ in range(2):
        Ingest(books).write(IngestBatch(quarantined=[frame]))
    assert [bytes(row[0]) for row in rows(books, "SELECT raw FROM quarantine")] == [b"\x00\xff"]


@pytest.mark.parametrize(
    ("name", "value"), [("org_id", "a\x00b"), ("output_tokens", 2**63), ("received_ns", -1), ("model_asked", None)]
)
def test_a_malformed_event_is_quarantined_alone(books: Engine, name: str, value: object) -> None:
    events = [usage_event(1), usage_event(2, **{name: value}), usage_event(3)]
    report = Ingest(books).write(IngestBatch(events))
    assert (report.inserted, report.quarantined) == (2, 1)
    assert one(books, "SELECT event_id FROM quarantine") == event_id(2)
    assert reconcile(books).exact


def test_an_event_that_only_the_database_refuses_is_found_by_halves(books: Engine) -> None:
    # A unique key of PostgreSQL's partitioned table must hold the id; one partition may have another.
    where = "usage_event" if sql.is_sqlite(books) else "usage_event_default"
    constraint = f"CREATE UNIQUE INDEX planted ON {where} (custom_id)"
    with sql.write(books) as connection:
        connection.exec_driver_sql(constraint)
    events = [usage_event(number, custom_id=f"c{number}") for number in range(1, 20)]
    Ingest(books).write(IngestBatch([usage_event(99, custom_id="c7")]))
    report = Ingest(books).write(IngestBatch(events, offsets=[SpoolOffset("n", "a", 1, 10)]))
    assert (report.inserted, report.quarantined) == (18, 1)
    assert rows(books, "SELECT event_id, kind FROM quarantine") == [(event_id(7), "event")]
    assert one(books, "SELECT offset_bytes FROM spool_offset") == 10
    assert reconcile(books).exact


def test_an_amount_beyond_64_bits_is_exact_on_postgresql_and_aside_on_sqlite(books: Engine) -> None:
    books_sql.add_book(books, a_book("dear", prices={k: 2**40 for k in a_book().prices}), retroactive=True)
    event = usage_event(1, price_version="dear", output_tokens=2**40)
    report = Ingest(books).write(IngestBatch([event, usage_event(2)]))
    if sql.is_sqlite(books):
        assert (report.inserted, report.quarantined) == (1, 1)
    else:
        assert report.inserted == 2
        assert max(int(row[0]) for row in rows(books, "SELECT amount_pico FROM usage_event")) > 2**80
    assert reconcile(books).exact


def test_two_writers_with_the_same_events_store_each_once(books: Engine) -> None:
    events = [usage_event(number, org_id=f"org{number % 3}") for number in range(1, 400)]
    reports = []

    def write(shift: int) -> None:
        ingest = Ingest(books)
        for start in range(0, len(events), 50):
            part = [events[(start + shift + index) % len(events)] for index in range(50)]
            reports.append(ingest.write(IngestBatch(part)))

    threads = [threading.Thread(target=write, args=(shift,)) for shift in (0, 13, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(report.inserted for report in reports) == len(events)
    found = reconcile(books)
    assert found.exact, found.differences
    assert found.event_count == len(events)


def test_usage_of_a_closed_month_goes_to_the_open_one_with_its_own_time(books: Engine) -> None:
    october_ns = NOON_NS - 20 * 86_400 * 10**9
    ingest = Ingest(books)
    ingest.write(IngestBatch([usage_event(1, ended_ns=october_ns)]))
    books_sql.close_period(books, "2026-10", now_ns=NOON_NS)
    ingest.write(IngestBatch([usage_event(2, ended_ns=october_ns + 1)]))
    postings = rows(books, "SELECT period_id, usage_from_ns FROM posting ORDER BY period_id")
    assert [tuple(row) for row in postings] == [("2026-10", october_ns), ("2026-11", october_ns + 1)]
    assert reconcile(books).exact


def test_a_lost_database_is_one_clear_fault_after_bounded_tries(sqlite_url: str) -> None:
    sql.upgrade(sqlite_url)
    engine = sql.engine(sqlite_url + "?timeout=0")
    pauses: list[float] = []
    holder = sql.engine(sqlite_url)
    sa.event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA busy_timeout = 1"))
    with sql.write(holder), pytest.raises(StoreUnavailable, match="6 attempts: database is locked"):
        Ingest(engine, Clock(pause=pauses.append)).write(IngestBatch([usage_event(1)]))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]
    engine.dispose()
    holder.dispose()


def test_a_connection_that_is_cut_inside_a_transaction_costs_nothing(postgres_url: str) -> None:
    sql.upgrade(postgres_url)
    engine = sql.engine(postgres_url)
    books_sql.add_book(engine, a_book(), now_ns=1)
    ids = iter(range(1, 10))

    def new_id() -> str:
        number = next(ids)
        if number <= 2:
            killer = sa.create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
            with killer.begin() as connection:
                others = "datname = current_database() AND pid <> pg_backend_pid()"
                connection.execute(sa.text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
            killer.dispose()
        return event_id(number)

    clock = Clock(new_id=new_id, pause=lambda _: None)
    report = Ingest(engine, clock).write(IngestBatch([usage_event(1)], offsets=[SpoolOffset("n", "a", 1, 7)]))
    assert (report.inserted, report.posting_ids) == (1, (event_id(3),))
    assert reconcile(engine).exact
    engine.dispose()


def test_an_event_without_a_version_is_rated_by_the_book_of_its_start(empty_books: Engine) -> None:
    books_sql.add_book(empty_books, a_book("old"), now_ns=1)
    books_sql.add_book(empty_books, a_book("new", valid_from_ns=NOON_NS), now_ns=2)
    events = [usage_event(1, price_version=None), usage_event(2, price_version=None, received_ns=NOON_NS - 1)]
    Ingest(empty_books).write(IngestBatch(events))
    assert rows(empty_books, "SELECT price_version FROM usage_event ORDER BY event_id") == [("new",), ("old",)]
    assert reconcile(empty_books).exact


def test_fields_of_a_newer_writer_survive_in_the_books(books: Engine) -> None:
    event = usage_event(1, extra={"carbon_grams": 1.50, "tags": ["a"]})
    Ingest(books).write(IngestBatch([event]))
    assert one(books, "SELECT extra FROM usage_event") == '{"carbon_grams":1.5,"tags":["a"]}'
    assert reconcile(books).exact
