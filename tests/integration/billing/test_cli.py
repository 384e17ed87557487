"""The commands `db`, `prices` and `bill`: JSON on stdout, one line on stderr, exit codes 0, 1 and 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from billing.adapters import cli, sql
from billing.adapters.ingest import Ingest, IngestBatch
from tests.fakes.ledger_events import NOON_NS, event_id, usage_event
from tests.fakes.ledger_faults import planted

BOOK = """
version: pb-1
currency: USD
valid_from: 2026-01-01T00:00:00Z
micro_usd_per_million_tokens:
  llama:
    default: {input: 3000000, cached_input: 300000, output: 15000000}
"""


def run(url: str, *words: str) -> Result:
    app = typer.Typer()
    cli.register(app)
    return CliRunner().invoke(app, list(words), env={"INFERPLANE_DATABASE_URL": url})


def answer(url: str, *words: str) -> dict[str, Any]:
    result = run(url, *words, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.fixture
def book_file(tmp_path: Path) -> Path:
    path = tmp_path / "book.yaml"
    path.write_text(BOOK)
    return path


def test_a_database_is_brought_to_the_current_tables(sql_url: str) -> None:
    if sql_url.startswith("sqlite:///"):
        Path(sql_url.removeprefix("sqlite:///")).touch()  # there, and empty
    before = run(sql_url, "db", "current", "--json")
    assert before.exit_code == 1
    assert json.loads(before.stdout)["revision"] is None
    assert before.stderr == "The tables are not those of this version: run inferplane db upgrade.\n"
    assert answer(sql_url, "db", "upgrade") == {"before": None, "revision": sql.head_revision()}
    assert answer(sql_url, "db", "current")["current"] is True


def test_postgresql_is_never_upgraded_on_the_way(postgres_url: str) -> None:
    result = run(postgres_url, "prices", "list")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "run inferplane db upgrade" in result.stderr


def test_a_book_is_added_once_and_shown(sqlite_url: str, book_file: Path, tmp_path: Path) -> None:
    assert answer(sqlite_url, "prices", "add", str(book_file)) == {"version": "pb-1", "added": True, "price_count": 3}
    assert answer(sqlite_url, "prices", "add", str(book_file))["added"] is False
    own = tmp_path / "own.json"
    own.write_text(
        json.dumps(
            {
                "version": "acme-1",
                "currency": "USD",
                "valid_from": "2026-11-01T00:00:00Z",
                "org": "acme",
                "extends": "pb-1",
                "micro_usd_per_million_tokens": {"llama": {"default": {"output": 1}}},
            }
        )
    )
    assert answer(sqlite_url, "prices", "add", str(own))["price_count"] == 3
    listed = answer(sqlite_url, "prices", "list")["data"]
    assert [(one["version"], one["org_id"], one["valid_from"]) for one in listed] == [
        ("pb-1", None, "2026-01-01T00:00:00Z"),
        ("acme-1", "acme", "2026-11-01T00:00:00Z"),
    ]
    shown = answer(sqlite_url, "prices", "show", "acme-1")["prices"]
    assert {one["sku"]: one["micro_usd_per_million_tokens"] for one in shown} == {
        "input": 3_000_000,
        "cached_input": 300_000,
        "output": 1,
    }
    assert run(sqlite_url, "prices", "list").exit_code == 0
    assert run(sqlite_url, "prices", "show", "acme-1").exit_code == 0
    missing = run(sqlite_url, "prices", "show", "nope")
    assert (missing.exit_code, missing.stderr) == (1, "No price book has the version 'nope'.\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1", "neither YAML nor JSON"),
        ("- 1", "names with values were expected"),
        (BOOK.replace("USD", "usd"), "three upper-case letters"),
        (BOOK.replace("3000000", "3.5"), "a whole number of micro-USD"),
        (BOOK.replace(", output: 15000000", ""), "has no price for output"),
        (BOOK.replace("cached_input", "cached"), "'cached' is no SKU"),
        (BOOK.replace("2026-01-01T00:00:00Z", "soon"), "valid_from is 'soon'"),
        (BOOK + "\ncolour: red\n", "colour is no field"),
        (BOOK.replace("version: pb-1", ""), "version is missing"),
        (BOOK + "\nextends: nope\n", "a version that is stored was expected"),
    ],
)
def test_a_wrong_price_file_is_told_in_one_line(sqlite_url: str, tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    result = run(sqlite_url, "prices", "add", str(path))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert told in result.stderr


def test_a_bill_is_shown_and_the_books_are_reconciled(sqlite_url: str, book_file: Path) -> None:
    answer(sqlite_url, "prices", "add", str(book_file))
    engine = sql.engine(sqlite_url)
    Ingest(engine).write(IngestBatch([usage_event(number) for number in range(1, 101)]))
    span = ("--org", "acme", "--from", "2026-11-01", "--to", "2026-12-01")
    (bill,) = answer(sqlite_url, "bill", "show", *span)["data"]
    assert (bill["total"], bill["total_exact"], bill["rounding"]) == ("0.47", "0.46536", "0.00")
    assert "total 0.47 USD" in run(sqlite_url, "bill", "show", *span).output
    report = answer(sqlite_url, "bill", "reconcile")
    assert (report["exact"], report["events"], report["differences"]) == (True, 100, [])
    assert report["totals_pico"]["USD"] == dict.fromkeys(("events", "ledger", "rollups"), "465360000000")
    assert run(sqlite_url, "bill", "reconcile").output.startswith("Exact: 100 events, 1 postings, 4 entries")
    with planted(engine) as connection:
        connection.exec_driver_sql(f"DELETE FROM usage_event WHERE event_id = '{event_id(7)}'")
    engine.dispose()
    broken = run(sqlite_url, "bill", "reconcile", "--json")
    assert broken.exit_code == 1
    assert broken.stderr == "The books are not exact: 1 differences.\n"
    (difference,) = json.loads(broken.stdout)["differences"]
    assert (difference["kind"], difference["name"]) == ("missing_event", event_id(7))


def _orgs(url: str, **names: str) -> None:
    """Orgs of the tenancy tables: id -> name."""
    sql.upgrade(url)
    engine = sql.engine(url)
    with sql.write(engine) as connection:
        for org_id, name in names.items():
            connection.exec_driver_sql(
                "INSERT INTO org (id, name, tenant_class, created_at_s, changed_epoch) "
                f"VALUES ('{org_id}', '{name}', 'default', 1, 1)"
            )
    engine.dispose()


def test_a_bill_is_asked_for_by_id_or_by_name(sql_url: str, book_file: Path) -> None:
    _orgs(sql_url, org_1="Acme Corp", org_2="zeta", acme="other", org_3="org_2")
    answer(sql_url, "prices", "add", str(book_file))
    engine = sql.engine(sql_url)
    Ingest(engine).write(IngestBatch([usage_event(1, org_id="org_1"), usage_event(2, org_id="bare")]))
    engine.dispose()
    span = ("--from", "2026-11-01", "--to", "2026-12-01")
    by_name = answer(sql_url, "bill", "show", "--org", "Acme Corp", *span)
    assert by_name == answer(sql_url, "bill", "show", "--org", "org_1", *span)
    assert [bill["org_id"] for bill in by_name["data"]] == ["org_1"]
    # An org without usage has an empty bill; usage whose org is in no table (yet) is found by its id.
    assert answer(sql_url, "bill", "show", "--org", "zeta", *span) == {"data": []}
    assert "Nothing was billed to zeta" in run(sql_url, "bill", "show", "--org", "zeta", *span).output
    assert answer(sql_url, "bill", "show", "--org", "bare", *span)["data"][0]["org_id"] == "bare"
    told = {
        "acme corp": "org is 'acme corp'; the id or the exact name of an org was expected (inferplane orgs list).\n",
        "org_2": "org is 'org_2', the id of one org and the name of another; its name (zeta) for the first, or its id "
        "(org_3) for the second was expected.\n",
    }
    for value, sentence in told.items():
        result = run(sql_url, "bill", "show", "--org", value, *span)
        assert (result.exit_code, result.stderr) == (1, sentence)


def test_a_month_is_closed_and_a_price_corrected(sqlite_url: str, book_file: Path) -> None:
    answer(sqlite_url, "prices", "add", str(book_file))
    engine = sql.engine(sqlite_url)
    Ingest(engine).write(IngestBatch([usage_event(1, ended_ns=NOON_NS - 300 * 86_400 * 10**9)]))
    engine.dispose()
    closed = answer(sqlite_url, "bill", "close", "2026-01")
    assert (closed["period_id"], closed["posting_count"], len(closed["seal"])) == ("2026-01", 1, 64)
    assert run(sqlite_url, "bill", "close", "2999-01").exit_code == 1
    book_file.write_text(BOOK.replace("pb-1", "pb-2").replace("15000000", "15000001"))
    refused = run(sqlite_url, "prices", "add", str(book_file))
    assert "already billed" in refused.stderr
    assert answer(sqlite_url, "prices", "add", str(book_file), "--retroactive")["added"] is True
    done = answer(sqlite_url, "bill", "correct", "--from", "2026-01-01", "--to", "2027-01-01", "--memo", "typo")
    assert (done["corrected_count"], done["delta_pico"]) == (1, {"USD": "100"})
    assert answer(sqlite_url, "bill", "reconcile")["exact"] is True


@pytest.mark.parametrize(
    "words",
    [
        ("bill", "show", "--org", "a", "--from", "x", "--to", "2026-12-01"),
        ("bill", "show", "--org", "a", "--from", "2026-12-01", "--to", "2026-11-01"),
        ("bill", "reconcile", "--colour"),
        ("prices", "add"),
    ],
)
def test_wrong_usage_exits_2(sqlite_url: str, words: tuple[str, ...]) -> None:
    assert run(sqlite_url, *words).exit_code == 2


def test_counters_that_cannot_be_read_are_told_in_one_line(sqlite_url: str) -> None:
    for source in ("engine-0", "engine-0=/nowhere", "engine-0@=x"):
        result = run(sqlite_url, "bill", "reconcile", "--engine-counters", source)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


def test_an_unreachable_database_is_told_in_one_line_without_the_password(tmp_path: Path) -> None:
    result = run(f"postgresql://me:hunter2@/x?host={tmp_path}", "bill", "reconcile")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("db", "current"),
        ("prices", "list"),
        ("prices", "show", "pb-1"),
        ("bill", "show", "--org", "o", "--from", "2026-11-01", "--to", "2026-12-01"),
        ("bill", "reconcile"),
        ("bill", "correct", "--from", "2026-11-01", "--to", "2026-12-01"),
        ("bill", "close", "2026-01"),
        ("ship", "--once"),
    ],
    ids=" ".join,
)
def test_a_mistyped_place_is_told_and_nothing_is_made(words: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "none"
    for url, place in (("", folder), (f"sqlite:///{folder / 'no.db'}", folder / "no.db")):
        result = run(url, *words, "--data-dir", str(folder))
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"There is no Inferplane data in {place}; expected the ")
        assert result.stderr.count("\n") == 1
        assert not folder.exists()
