"""Reconcile on both real databases: exact when nothing is wrong, and each planted fault is found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from billing.adapters import books_sql, reconcile_sql
from billing.adapters.corrections_sql import Scope, correct_prices
from billing.adapters.ingest import Ingest, IngestBatch
from billing.adapters.reconcile_inputs import EngineSource
from billing.adapters.reconcile_sql import ReconcileOptions, Report, reconcile
from billing.errors import ReconcileInputError
from billing.ledger import NS_PER_S
from billing.pricing import Sku
from billing.reconcile import Kind
from billing.spool_format import encode_close, encode_open
from billing.usage_event import Outcome
from tests.fakes.ledger_events import NOON_NS, a_book, event_id, usage_event
from tests.fakes.ledger_faults import planted


@pytest.fixture
def full(books: Engine) -> Engine:
    """Books with three batches of two orgs, over two hours, some of it unbilled, estimated or unpriced."""
    ingest = Ingest(books)
    for batch in range(3):
        events = [
            usage_event(
                100 * batch + number,
                org_id=f"org{number % 2}",
                output_tokens=number,
                ended_ns=NOON_NS + (batch * 3_000 + 10 * number) * NS_PER_S,
                tier_served="flex" if number % 3 == 0 else None,
            )
            for number in range(1, 11)
        ]
        events.append(usage_event(100 * batch + 50, org_id="org0", billable=False))
        events.append(usage_event(100 * batch + 51, org_id="org0", estimated=True, outcome=Outcome.CANCELLED))
        events.append(usage_event(100 * batch + 52, org_id="org0", model_served="unsold"))
        ingest.write(IngestBatch(events))
    return books


def plant(engine: Engine, *statements: str) -> None:
    with planted(engine) as connection:
        for statement in statements:
            assert connection.execute(sa.text(statement)).rowcount > 0, statement


def found(engine: Engine) -> Report:
    report = reconcile(engine)
    assert not report.exact
    assert report.difference_count == len(report.differences) > 0
    return report


def kinds(report: Report) -> list[tuple[Kind, str]]:
    return sorted((one.kind, one.name) for one in report.differences)


def value(engine: Engine, query: str) -> Any:
    with engine.connect() as connection:
        return connection.execute(sa.text(query)).scalar()


def test_untouched_books_are_exact_and_every_total_agrees(full: Engine) -> None:
    report = reconcile(full)
    assert report.exact, report.differences
    assert (report.event_count, report.posting_count, report.unpriced_event_count) == (39, 6, 3)
    assert report.estimated_event_count == 3
    totals = report.totals["USD"]
    assert totals["events"] == totals["ledger"] == totals["rollups"] > 0


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_the_size_of_the_pieces_does_not_matter(full: Engine, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile_sql, "POSTINGS_PER_CHUNK", pieces)
    monkeypatch.setattr(reconcile_sql, "ROWS_PER_FETCH", pieces)
    report = reconcile(full)
    assert report.exact, report.differences
    assert report.event_count == 39


@pytest.mark.parametrize("number", [105, 250, 152])
def test_a_deleted_event_is_named(full: Engine, number: int) -> None:
    plant(full, f"DELETE FROM usage_event WHERE event_id = '{event_id(number)}'")
    assert (Kind.MISSING_EVENT, event_id(number)) in kinds(found(full))
    assert len(found(full).differences) == 1


def test_two_deleted_events_of_one_posting_are_both_named_by_their_minutes(full: Engine) -> None:
    posting = value(full, f"SELECT posting_id FROM usage_event WHERE event_id = '{event_id(105)}'")
    plant(full, f"DELETE FROM usage_event WHERE event_id IN ('{event_id(105)}', '{event_id(107)}')")
    named = [(Kind.MISSING_EVENT, event_id(105)), (Kind.MISSING_EVENT, event_id(107)), (Kind.MISSING_EVENT, posting)]
    assert kinds(found(full)) == sorted(named)


def test_a_planted_copy_of_an_event_is_named(full: Engine) -> None:
    columns = ", ".join(column.name for column in reconcile_sql._EVENT.columns if column.name != "event_id")
    source = f"SELECT '{event_id(9999)}', {columns} FROM usage_event WHERE event_id = '{event_id(105)}'"
    plant(full, f"INSERT INTO usage_event (event_id, {columns}) {source}")
    report = found(full)
    assert (Kind.EXTRA_EVENT, event_id(9999)) in kinds(report)
    assert (Kind.ALTERED_EVENT, event_id(9999)) in kinds(report)


@pytest.mark.parametrize("gap", [1, -1])
def test_one_picodollar_in_an_event_is_named(full: Engine, gap: int) -> None:
    plant(full, f"UPDATE usage_event SET amount_pico = amount_pico + {gap} WHERE event_id = '{event_id(204)}'")
    report = found(full)
    assert kinds(report) == [(Kind.EVENT_AMOUNT, event_id(204))]
    assert report.differences[0].amount_pico == gap


def test_one_picodollar_in_an_entry_is_named(full: Engine) -> None:
    posting = value(full, "SELECT max(posting_id) FROM posting")
    plant(full, f"UPDATE entry SET amount_pico = amount_pico + 1 WHERE posting_id = '{posting}' AND line_no = 2")
    report = found(full)
    assert kinds(report) == [(Kind.ENTRY_AMOUNT, f"{posting}#2"), (Kind.UNBALANCED_POSTING, posting)]
    assert {one.amount_pico for one in report.differences} == {1}


def test_a_balanced_shift_between_two_entries_is_named(full: Engine) -> None:
    posting = value(full, "SELECT min(posting_id) FROM posting")
    shift = "UPDATE entry SET amount_pico = amount_pico {} 1 WHERE posting_id = '{}' AND line_no = {}"
    plant(full, shift.format("+", posting, 1), shift.format("-", posting, 2))
    assert kinds(found(full)) == [(Kind.ENTRY_AMOUNT, f"{posting}#1"), (Kind.ENTRY_AMOUNT, f"{posting}#2")]


@pytest.mark.parametrize("column", ["amount_pico", "output_pico", "output_tokens", "event_xor_low", "estimated_count"])
def test_a_difference_of_one_in_a_rollup_is_named(full: Engine, column: str) -> None:
    where = f"minute_s = {NOON_NS // NS_PER_S} AND org_id = 'org1' AND tier = 'flex'"
    plant(full, f"UPDATE usage_rollup SET {column} = {column} + 1 WHERE {where}")
    report = found(full)
    assert [one.kind for one in report.differences] == [Kind.ROLLUP_VALUE]
    assert report.differences[0].name.startswith(f"org1/{NOON_NS // NS_PER_S}/web/key_1//llama/flex")
    assert column in report.differences[0].detail


def test_a_deleted_rollup_row_is_named(full: Engine) -> None:
    where = f"minute_s = {NOON_NS // NS_PER_S} AND org_id = 'org1' AND tier = 'flex'"
    plant(full, f"DELETE FROM usage_rollup WHERE {where}")
    assert [one.kind for one in found(full).differences] == [Kind.MISSING_ROLLUP]


def test_a_rollup_row_that_no_event_made_is_named(full: Engine) -> None:
    columns = ", ".join(column.name for column in reconcile_sql._ROLLUP.columns if column.name != "node")
    source = f"SELECT 'ghost', {columns} FROM usage_rollup WHERE minute_s = {NOON_NS // NS_PER_S} AND org_id = 'org1'"
    plant(full, f"INSERT INTO usage_rollup (node, {columns}) {source}")
    assert {one.kind for one in found(full).differences} == {Kind.EXTRA_ROLLUP}


def test_a_duplicate_entry_is_named(full: Engine) -> None:
    posting = value(full, "SELECT max(posting_id) FROM posting")
    columns = "posting_id, account, currency, model, tier, quantity_tokens, amount_pico"
    source = f"SELECT 99, {columns} FROM entry WHERE posting_id = '{posting}' AND line_no = 2"
    plant(full, f"INSERT INTO entry (line_no, {columns}) {source}")
    assert (Kind.DUPLICATE_ENTRY, f"{posting}#99") in kinds(found(full))


def test_a_deleted_entry_is_named(full: Engine) -> None:
    posting = value(full, "SELECT max(posting_id) FROM posting")
    plant(full, f"DELETE FROM entry WHERE posting_id = '{posting}' AND line_no = 2")
    assert (Kind.MISSING_ENTRY, posting) in kinds(found(full))


@pytest.mark.parametrize("single", [True, False])
def test_a_duplicate_posting_is_named(full: Engine, single: bool) -> None:
    if single:
        Ingest(full).write(IngestBatch([usage_event(7777)]))
    posting = value(full, "SELECT max(posting_id) FROM posting")
    head = ", ".join(column.name for column in reconcile_sql._POSTING.columns if column.name != "posting_id")
    legs = "line_no, account, currency, model, tier, quantity_tokens, amount_pico"
    copy = "f" * 32
    plant(
        full,
        f"INSERT INTO entry (posting_id, {legs}) SELECT '{copy}', {legs} FROM entry WHERE posting_id = '{posting}'",
        f"INSERT INTO posting (posting_id, {head}) SELECT '{copy}', {head} FROM posting WHERE posting_id = '{posting}'",
    )
    report = found(full)
    assert kinds(report) == [(Kind.DUPLICATE_POSTING, copy)]
    assert posting in report.differences[0].detail


@pytest.mark.parametrize("where", ["0" * 32, "f" * 32])
def test_an_orphan_entry_is_named(full: Engine, where: str) -> None:
    plant(
        full,
        "INSERT INTO entry (posting_id, line_no, account, currency, model, tier, quantity_tokens, amount_pico) "
        f"VALUES ('{where}', 1, 'revenue:input', 'USD', 'llama', 'default', 0, -5)",
    )
    if full.dialect.name == "sqlite":
        with full.connect() as connection:
            assert connection.execute(sa.text("PRAGMA foreign_key_check")).all()
    report = found(full)
    assert kinds(report) == [(Kind.ORPHAN_ENTRY, f"{where}#1")]
    assert report.differences[0].amount_pico == -5


def test_a_deleted_posting_leaves_its_entries_and_events_named(full: Engine) -> None:
    posting = value(full, "SELECT max(posting_id) FROM posting")
    plant(full, f"DELETE FROM posting WHERE posting_id = '{posting}'")
    assert {one.kind for one in found(full).differences} == {Kind.ORPHAN_ENTRY, Kind.UNKNOWN_POSTING}


@pytest.mark.parametrize("change", ["output_tokens = output_tokens + 1", "org_id = 'org0'", "billable = (1 = 0)"])
def test_an_altered_event_is_named(full: Engine, change: str) -> None:
    plant(full, f"UPDATE usage_event SET {change} WHERE event_id = '{event_id(105)}'")
    assert (Kind.ALTERED_EVENT, event_id(105)) in kinds(found(full))


def test_an_event_that_cannot_be_read_is_named_and_the_check_goes_on(full: Engine) -> None:
    plant(
        full,
        f"UPDATE usage_event SET outcome = 'exploded' WHERE event_id = '{event_id(105)}'",
        f"UPDATE usage_event SET amount_pico = amount_pico + 1 WHERE event_id = '{event_id(206)}'",
    )
    named = kinds(found(full))
    assert (Kind.ALTERED_EVENT, event_id(105)) in named
    assert (Kind.EVENT_AMOUNT, event_id(206)) in named


def test_an_event_robbed_of_its_amount_and_posting_is_named(full: Engine) -> None:
    plant(full, f"UPDATE usage_event SET amount_pico = NULL, posting_id = NULL WHERE event_id = '{event_id(105)}'")
    assert (Kind.MISSING_EVENT, event_id(105)) in kinds(found(full))


def test_a_changed_price_is_found_in_the_events_that_it_rated(full: Engine) -> None:
    plant(
        full,
        "UPDATE price SET micro_usd_per_million_tokens = micro_usd_per_million_tokens + 1 "
        "WHERE tier = 'flex' AND sku = 'output'",
    )
    named = {one.name for one in found(full).differences if one.kind is Kind.EVENT_AMOUNT}
    assert named == {event_id(100 * batch + number) for batch in range(3) for number in (3, 6, 9)}


def test_a_change_inside_a_closed_month_breaks_its_seal(full: Engine) -> None:
    after_ns = NOON_NS + 40 * 86_400 * NS_PER_S
    books_sql.close_period(full, "2026-11", now_ns=after_ns)
    assert reconcile(full).exact
    plant(full, "UPDATE posting SET usage_until_ns = usage_until_ns + 1 WHERE org_id = 'org1'")
    assert kinds(found(full)) == [(Kind.BROKEN_SEAL, "2026-11")]


def test_corrections_are_part_of_the_books_and_a_picodollar_in_one_is_named(full: Engine) -> None:
    prices = {key: price + 7 for key, price in a_book().prices.items()}
    prices["unsold", "default", Sku.INPUT] = prices["unsold", "default", Sku.OUTPUT] = 5
    books_sql.add_book(full, a_book("pb-2", prices=prices), retroactive=True)
    before = reconcile(full).totals["USD"]["events"]
    done = correct_prices(full, Scope(0, NOON_NS * 2), memo="wrong list")
    assert done.corrected_count == 36
    assert correct_prices(full, Scope(0, NOON_NS * 2)).corrected_count == 0
    report = reconcile(full)
    assert report.exact, report.differences
    assert report.totals["USD"]["events"] == before + done.delta_pico["USD"] == report.totals["USD"]["ledger"]
    plant(full, f"UPDATE usage_correction SET delta_pico = delta_pico + 1 WHERE event_id = '{event_id(105)}'")
    assert kinds(found(full)) == [(Kind.CORRECTION_AMOUNT, event_id(105))]


def write_spool(root: Path, events: list[Any], tail: bytes = b"") -> None:
    folder = root / "node-0~1"
    folder.mkdir(parents=True)
    frames = [encode_open(event.open) + encode_close(event.close) for event in events]
    (folder / "00000001.seg").write_bytes(b"".join(frames) + tail)


def test_the_spool_must_hold_nothing_that_the_books_do_not(books: Engine, tmp_path: Path) -> None:
    events = [usage_event(number) for number in range(1, 40)]
    Ingest(books).write(IngestBatch(events))
    write_spool(tmp_path / "same", events, tail=encode_open(usage_event(41).open)[:20])
    report = reconcile(books, ReconcileOptions(tmp_path / "same"))
    assert report.exact, report.differences
    assert report.spool_event_count == 39
    write_spool(tmp_path / "more", [*events, usage_event(40), usage_event(3, output_tokens=1)])
    found_here = reconcile(books, ReconcileOptions(tmp_path / "more"))
    assert kinds(found_here) == [(Kind.SPOOL_EVENT_DIFFERS, event_id(3)), (Kind.SPOOL_EVENT_MISSING, event_id(40))]
    with pytest.raises(ReconcileInputError, match="does not exist"):
        reconcile(books, ReconcileOptions(tmp_path / "none"))


def page(kind: str, input_tokens: int, output_tokens: int) -> str:
    names = {
        "vllm": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        "llamacpp": ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
    }[kind]
    pairs = zip(names, (input_tokens, output_tokens), strict=True)
    return "".join(f'# TYPE {name} counter\n{name}{{model_name="m"}} {count}.0\n' for name, count in pairs)


@pytest.mark.parametrize(
    ("kind", "input_tokens", "output_tokens", "exact"),
    [
        ("vllm", 3 * 1_512, 300, True),
        ("vllm", 3 * 1_512, 301, False),
        ("vllm", 3 * 1_512 + 1, 300, False),
        ("llamacpp", 3_000, 300, True),
        ("llamacpp", 2_999, 300, False),
    ],
)
def test_engine_counters_must_agree_to_the_token(
    books: Engine, tmp_path: Path, *, kind: str, input_tokens: int, output_tokens: int, exact: bool
) -> None:
    Ingest(books).write(IngestBatch([*(usage_event(n) for n in (1, 2, 3)), usage_event(4, endpoint_incarnation="2")]))
    (tmp_path / "page").write_text(page(kind, input_tokens, output_tokens))
    report = reconcile(books, ReconcileOptions(engines=[EngineSource("engine-0", "1", str(tmp_path / "page"))]))
    assert report.exact is exact
    assert {one.name for one in report.differences} <= {"engine-0@1"}


def test_an_estimated_event_may_hide_tokens_of_the_engine_but_never_add_any(books: Engine, tmp_path: Path) -> None:
    Ingest(books).write(IngestBatch([usage_event(1), usage_event(2, estimated=True)]))
    for counted, exact in ((1_512, True), (9_999, True), (1_511, False)):
        (tmp_path / "page").write_text(page("vllm", counted, 100))
        report = reconcile(books, ReconcileOptions(engines=[EngineSource("engine-0", None, str(tmp_path / "page"))]))
        assert report.exact is exact, counted


def test_the_report_is_json_with_amounts_that_no_reader_rounds(full: Engine) -> None:
    from billing.adapters.cli import report_record

    plant(full, f"UPDATE usage_event SET amount_pico = amount_pico + 1 WHERE event_id = '{event_id(204)}'")
    record = json.loads(json.dumps(report_record(found(full))))
    assert record["exact"] is False
    assert record["differences"][0]["amount_pico"] == "1"
    assert record["totals_pico"]["USD"]["ledger"].isdigit()
