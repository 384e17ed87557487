"""The commands `db`, `prices` and `bill`: JSON on stdout, one line on stderr, exit codes 0, 1 and 2."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from billing.adapters import cli, sql
from billing.adapters.ingest import Ingest, IngestBatch
from billing.spool_format import encode_close, encode_open
from tests.fakes.ledger_events import NOON_NS, event_id, usage_event
from tests.fakes.ledger_faults import planted
from tests.fakes.usage import a_close, an_open

BOOK = """
version: pb-1
currency: USD
valid_from: 2026-01-01T00:00:00Z
micro_usd_per_million_tokens:
  llama:
    default: {input: 3000000, cached_input: 300000, output: 15000000}
"""


def run(url: str, *words: str, columns: int = 200) -> Result:
    app = typer.Typer()
    cli.register(app)
    return CliRunner().invoke(app, list(words), env={"INFERPLANE_DATABASE_URL": url, "COLUMNS": str(columns)})


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
    _orgs(sqlite_url, org_1="Acme Corp")
    own = tmp_path / "own.json"
    own.write_text(
        json.dumps(
            {
                "version": "acme-1",
                "currency": "USD",
                "valid_from": "2026-11-01T00:00:00Z",
                "org": "Acme Corp",
                "extends": "pb-1",
                "micro_usd_per_million_tokens": {"llama": {"default": {"output": 1}}},
            }
        )
    )
    assert answer(sqlite_url, "prices", "add", str(own))["price_count"] == 3
    listed = answer(sqlite_url, "prices", "list")["data"]
    assert [(one["version"], one["org_id"], one["valid_from"]) for one in listed] == [
        ("pb-1", None, "2026-01-01T00:00:00Z"),
        ("acme-1", "org_1", "2026-11-01T00:00:00Z"),
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
        (BOOK.replace("2026-01-01T00:00:00Z", "2026-13-01"), "valid_from is '2026-13-01'; a time like 2026-12-01T"),
        (BOOK.replace("2026-01-01T00:00:00Z", "2026-11-31T00:00:00Z"), "valid_from is '2026-11-31T00:00:00Z'; a time"),
        (BOOK.replace("2026-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00"), "1970 to 2262"),
        (BOOK + "\nvalid_until: 9999-12-31\n", "valid_until is 9999-12-31T00:00:00Z; "),
        (BOOK.replace("3000000", "9" * 5000), "has a value that cannot be read"),
        ("[" * 10_000, "nested too deeply"),
        (BOOK + "\ncolour: red\n", "colour is no field"),
        (BOOK.replace("version: pb-1", ""), "version is missing"),
        (BOOK + "\nextends: nope\n", "a version that is stored was expected"),
    ],
)
def test_a_wrong_price_file_is_told_in_one_line(sqlite_url: str, tmp_path: Path, text: str, told: str) -> None:
    sql.upgrade(sqlite_url)
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    result = run(sqlite_url, "prices", "add", str(path))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert told in result.stderr


@pytest.mark.parametrize("day", ["2026-11-01", '"2026-11-01"', "2026-11-01T00:00:00Z", "2026-11-01T01:00:00+01:00"])
def test_a_day_in_a_price_file_is_its_midnight_in_utc(sqlite_url: str, tmp_path: Path, day: str) -> None:
    path = tmp_path / "book.yaml"
    path.write_text(BOOK.replace("2026-01-01T00:00:00Z", day) + "valid_until: 2026-12-01\nnote:\n")
    answer(sqlite_url, "prices", "add", str(path))
    (listed,) = answer(sqlite_url, "prices", "list")["data"]
    assert (listed["valid_from"], listed["valid_until"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert listed["note"] == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read: No such file or directory.\n"),
        ("[1", "is neither YAML nor JSON"),
        (BOOK.replace(", output: 15000000", ""), "has no price for output"),
        (BOOK + "extends: pb-0\n", "There is no Inferplane data in "),
    ],
    ids=["no file", "no YAML", "no complete book", "extends nothing"],
)
def test_a_price_file_that_cannot_be_used_makes_no_data_folder(tmp_path: Path, text: str | None, told: str) -> None:
    path, folder = tmp_path / "prices.yaml", tmp_path / "data"
    if text is not None:
        path.write_text(text)
    result = run("", "prices", "add", str(path), "--data-dir", str(folder))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert told in result.stderr
    assert not folder.exists()
    path.write_text(BOOK)
    assert run("", "prices", "add", str(path), "--data-dir", str(folder)).exit_code == 0
    assert (folder / "inferplane.db").exists()


def test_the_documented_price_books_can_be_added(sqlite_url: str, tmp_path: Path) -> None:
    operations = Path(__file__).parents[3] / "docs/operations.md"
    section = operations.read_text().partition("## Price books\n")[2].partition("\n## ")[0]
    texts = [block.partition("```")[0] for block in section.split("```yaml\n")[1:]]
    for number, text in enumerate(texts):
        if "\norg: " in text:
            _orgs(sqlite_url, org_01a22843d1ae721494667c78e069a60b="Acme Corp")
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert answer(sqlite_url, "prices", "add", str(path))["price_count"] == 5
    assert len(texts) == 2
    # Each field has a row.
    fields = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    told = run(sqlite_url, "prices", "add", _unknown_field(tmp_path)).stderr
    assert sorted(fields) == told.partition("known are ")[2].removesuffix(".\n").split(", ")
    assert "docs/operations.md" in " ".join(run(sqlite_url, "prices", "add", "--help").output.split())


def _unknown_field(folder: Path) -> str:
    path = folder / "unknown.yaml"
    path.write_text("colour: red\n")
    return str(path)


def test_no_value_of_a_table_is_cut_on_a_narrow_terminal(sqlite_url: str, tmp_path: Path) -> None:
    model, org = "a-model-with-a-rather-long-name-70b", "org_01a22843d1ae721494667c78e069a60b"
    path = tmp_path / "book.yaml"
    optional = f"org: {org}\nvalid_until: 2027-01-01\nnote: a promise [of sales] to the largest of our tenants\n"
    path.write_text(BOOK.replace("llama", model) + optional)
    _orgs(sqlite_url, **{org: "Acme Corp"})
    answer(sqlite_url, "prices", "add", str(path))
    engine = sql.engine(sqlite_url)
    Ingest(engine).write(IngestBatch([usage_event(1, model_served=model, org_id=org)]))
    engine.dispose()
    bill = ("bill", "show", "--org", org, "--from", "2026-11-01", "--to", "2026-12-01")
    wanted: dict[tuple[str, ...], tuple[str, ...]] = {
        ("prices", "list"): (
            "version", "org_id", "currency", "valid_from", "valid_until", "price_count", "note",
            org, "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z", "a promise [of sales] to the largest of our tenants",
        ),
        ("prices", "show", "pb-1"): ("micro_usd_per_million_tokens", model, "cached_input", "15000000"),
        bill: ("model", "tier", "sku", "quantity_tokens", "amount_exact", "amount", model, "cached_input"),
    }  # fmt: skip
    for words, values in wanted.items():
        for columns in (40, 80, 300):
            shown = run(sqlite_url, *words, columns=columns)
            assert shown.exit_code == 0
            assert "\u2026" not in shown.stdout
            for value in values:
                assert value in shown.stdout
    wide, narrow = run(sqlite_url, *bill, columns=300).stdout, run(sqlite_url, *bill, columns=40).stdout
    assert ("\u2502" in wide, "\u2502" in narrow) == (True, False)  # boxed where the box fits


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


@pytest.mark.parametrize("words", [("db", "upgrade"), ("prices", "add", "{book}")])
def test_a_data_folder_that_is_a_file_is_one_line(words: tuple[str, ...], tmp_path: Path, book_file: Path) -> None:
    folder = tmp_path / "file"
    folder.touch()
    result = run("", *(word.format(book=book_file) for word in words), "--data-dir", str(folder))
    assert (result.exit_code, result.stderr) == (1, f"{folder} cannot be used: File exists.\n")


def test_an_org_that_is_not_there_is_told_where_it_is_named(sqlite_url: str, tmp_path: Path) -> None:
    sentence = "org is 'acne'; the id or the exact name of an org was expected (inferplane orgs list).\n"
    _orgs(sqlite_url, org_1="acme")
    path = tmp_path / "book.yaml"
    path.write_text(BOOK + "org: acne\n")
    span = ("--from", "2026-11-01", "--to", "2026-12-01")
    for words in (("prices", "add", str(path)), ("bill", "correct", "--org", "acne", *span)):
        result = run(sqlite_url, *words)
        assert (result.exit_code, result.stderr) == (1, sentence)
    for value, told in (
        ("\n", "org is empty; expected"),
        ('"\\ud800"\n', "org is '\\ud800'; the id"),
        ("x" * 10_000, "org is '"),
    ):
        path.write_text(BOOK + f"org: {value}")
        result = run(sqlite_url, "prices", "add", str(path))
        assert result.exit_code == 1 and told in result.stderr and len(result.stderr) < 300
    assert answer(sqlite_url, "prices", "list")["data"] == []
    assert answer(sqlite_url, "bill", "correct", "--org", "acme", *span)["corrected_count"] == 0


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("bill", "show", "--org", "a", "--from", "foo", "--to", "2026-12-01"),
            "--from is 'foo'; expected a day like 2026-11-01 or a time like 2026-11-01T06:00:00Z.",
        ),
        (
            ("bill", "correct", "--from", "2026-11-01", "--to", "2026-13-01"),
            "--to is '2026-13-01'; expected a day like 2026-11-01 or a time like 2026-11-01T06:00:00Z.",
        ),
        (
            ("bill", "correct", "--from", "2026-11-01", "--to", "9999-12-31"),
            "--to is '9999-12-31'; expected a time of the years 1970 to 2262.",
        ),
        (
            ("bill", "show", "--org", "a", "--from", "0001-01-01T00:00+14:00", "--to", "2026-12-01"),
            "--from is '0001-01-01T00:00+14:00'; expected a time of the years 1970 to 2262.",
        ),
        (
            ("bill", "show", "--org", "a", "--from", "2026-12-01", "--to", "2026-11-01"),
            "--to is '2026-11-01'; expected a time after --from, 2026-12-01.",
        ),
        (
            ("bill", "correct", "--from", "2026-12-01", "--to", "2026-12-01"),
            "--to is '2026-12-01'; expected a time after --from, 2026-12-01.",
        ),
        *(
            (("bill", "close", text), f"period is {text!r}; expected a month such as 2026-11.")
            for text in (
                "foo",
                "202611",
                "2026-13",
                "2026-00",
                "0000-01",
                "9999-12",
                "2026-1",
                "2026-11-01",
                " 2026-11",
            )
        ),
        *(
            (
                ("bill", "reconcile", "--engine-counters", text),
                f"--engine-counters: {text!r} names no counters; ENDPOINT[@INCARNATION]=FILE_OR_URL was expected.",
            )
            for text in ("engine-0", "engine-0@=x", "=x")
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_value_that_can_never_be_right_is_told_in_one_sentence_and_exits_2(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    # It is told before the database is looked for.
    result = run("", *words, "--data-dir", str(tmp_path / "none"))
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", sentence + "\n")


def test_counters_that_cannot_be_read_are_told_in_one_line(sqlite_url: str) -> None:
    sql.upgrade(sqlite_url)
    result = run(sqlite_url, "bill", "reconcile", "--engine-counters", "engine-0=/nowhere")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "engine-0" in result.stderr


def test_a_mistyped_spool_is_told_and_nothing_is_made(sqlite_url: str, tmp_path: Path) -> None:
    sql.upgrade(sqlite_url)
    (tmp_path / "file").touch()
    for spool in (tmp_path / "nope", tmp_path / "file"):
        for words in (("--once",), ("--once", "--json"), ()):
            result = run(sqlite_url, "ship", "--spool", str(spool), *words)
            assert (result.exit_code, result.stdout) == (1, "")
            expected = "expected the one that `inferplane serve` makes in its data folder."
            assert result.stderr == f"There is no spool folder {spool}; {expected}\n"
    assert not (tmp_path / "nope").exists()


def test_what_was_shipped_is_told(sqlite_url: str, tmp_path: Path) -> None:
    sql.upgrade(sqlite_url)
    folder = tmp_path / "spool" / "node-1~dead"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    records = [encode_open(an_open(number)) + encode_close(a_close(number)) for number in (1, 2)]
    (folder / "00000001.seg").write_bytes(b"".join(records) + b"rubbish" * 3 + encode_open(an_open(3)))
    words = ("ship", "--spool", str(tmp_path / "spool"), "--once")
    # The attempt that was running when its writer died is settled, and is an event too.
    told = run(sqlite_url, *words)
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout == "3 events shipped; 1 record went to the quarantine.\n"
    assert answer(sqlite_url, *words) == {"shipped_event_count": 0, "quarantined_count": 0, "running_count": 0}
    assert run(sqlite_url, *words).stdout == "0 events shipped.\n"


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
