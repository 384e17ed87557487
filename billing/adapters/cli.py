"""The commands of this package: `db`, `prices`, `bill` and `ship`.

Owns: options, what is printed (`--json`: one JSON object with stable keys, units in names) and exit codes: 0, 1 with
one line on stderr, 2 for wrong usage (a value that can never be right is told before anything is opened or made). Does
not own: what the commands do. Heavy imports stand inside the commands, so that `inferplane --help` is quick.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from billing.adapters.reconcile_sql import Report
    from billing.pricing import PriceBook

Database = Annotated[
    str,
    typer.Option(
        "--database-url",
        envvar="INFERPLANE_DATABASE_URL",
        help="SQLAlchemy URL; without it, the SQLite file in the data folder.",
        show_default=False,
        show_envvar=True,
    ),
]
DataDir = Annotated[
    Path, typer.Option("--data-dir", envvar="INFERPLANE_DATA_DIR", help="Folder of the embedded parts.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SPAN_BEGIN, _SPAN_END = "--from", "--to"
# The largest a signed 64-bit count of Unix nanoseconds can hold, in seconds: what the books can store.
_LAST_S = 9_223_372_036
# The default of controlplane.config.Settings.data_dir.
_DATA_DIR = Path(".inferplane")


def register(app: typer.Typer) -> None:
    """Add this package's commands to the root app."""
    groups: tuple[tuple[str, str, dict[str, Callable[..., None]]], ...] = (
        ("db", "The database.", {"upgrade": db_upgrade, "current": db_current}),
        ("prices", "Price books.", {"add": prices_add, "list": prices_list, "show": prices_show}),
        (
            "bill",
            "The books: bills, checks, corrections.",
            {"show": bill_show, "reconcile": bill_reconcile, "correct": bill_correct, "close": bill_close},
        ),
    )
    for name, about, commands in groups:
        group = typer.Typer(help=about, no_args_is_help=True)
        for command, function in commands.items():
            group.command(command)(function)
        app.add_typer(group, name=name)
    app.command("ship")(ship)


def db_upgrade(database_url: Database = "", data_dir: DataDir = _DATA_DIR, as_json: AsJson = False) -> None:
    """Bring the tables to this version. Safe to run from several places at once."""
    import time

    from billing.adapters import sql
    from billing.adapters.partitions_sql import make_partitions

    with _reported():
        url = _url(database_url, data_dir)
        before, after = sql.current_revision(url), sql.upgrade(url)
        engine = sql.engine(url)
        # The worker does this each hour, where its role owns the tables; this command's role does in any case.
        make_partitions(engine, time.time_ns())
        engine.dispose()
    _print(as_json, {"before": before, "revision": after}, f"The tables are at revision {after} (before: {before}).")


def db_current(database_url: Database = "", data_dir: DataDir = _DATA_DIR, as_json: AsJson = False) -> None:
    """Show which version the tables have. Exit code 1 when they are not those of this version."""
    from billing.adapters import sql

    with _reported():
        found, needed = sql.current_revision(_existing(database_url, data_dir)), sql.head_revision()
    record = {"revision": found, "needed": needed, "current": found == needed}
    _print(as_json, record, f"The tables are at revision {found}; this version needs {needed}.")
    if found != needed:
        _fail("The tables are not those of this version: run inferplane db upgrade.")


def prices_add(
    file: Annotated[Path, typer.Argument(help="YAML or JSON; its fields: docs/operations.md, Price books.")],
    retroactive: Annotated[
        bool, typer.Option("--retroactive", help="The book may hold from a time that is billed; then bill correct.")
    ] = False,
    database_url: Database = "",
    data_dir: DataDir = _DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Add a price book. It never changes afterwards; adding the same one again is no change."""
    from billing.adapters import books_sql
    from billing.adapters.bill_sql import org_id_of
    from billing.adapters.price_file import read_price_file

    with _reported():
        written = read_price_file(file)
        # Checked before a database is made; a book that extends another, or is one org's, needs one that is there.
        whole = written.book(None) if written.extends is None else None
        with _books(database_url, data_dir, begins=whole is not None and written.org is None) as engine:
            if written.org is not None:
                written, whole = written.of_org(org_id_of(engine, written.org)), None
            book = whole or written.book(books_sql.load_books(engine).book(written.extends))
            added = books_sql.add_book(engine, book, retroactive=retroactive)
    record = {"version": book.version, "added": added, "price_count": len(book.prices)}
    told = "added" if added else "there already"
    _print(as_json, record, f"Price book {book.version} ({len(book.prices)} prices): {told}.")


def prices_list(database_url: Database = "", data_dir: DataDir = _DATA_DIR, as_json: AsJson = False) -> None:
    """List the price books, in the order in which they were added."""
    from billing.adapters import books_sql

    with _reported(), _books(database_url, data_dir) as engine:
        stored = books_sql.list_books(engine)
    records = [{**_book_record(one.book), "created_ns": one.created_ns} for one in stored]
    columns = ("version", "org_id", "currency", "valid_from", "valid_until", "price_count", "note")
    _print(as_json, {"data": records}, lambda: _table(columns, records))


def prices_show(
    version: Annotated[str, typer.Argument(help="The book's version.")],
    database_url: Database = "",
    data_dir: DataDir = _DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show every price of a book."""
    from billing.adapters import books_sql

    with _reported(), _books(database_url, data_dir) as engine:
        book = books_sql.load_books(engine).book(version)
    if book is None:
        _fail(f"No price book has the version {version!r}.")
    prices = [
        {"model": model, "tier": tier, "sku": sku.value, "micro_usd_per_million_tokens": price}
        for (model, tier, sku), price in sorted(book.prices.items())
    ]
    columns = ("model", "tier", "sku", "micro_usd_per_million_tokens")
    _print(as_json, {**_book_record(book), "prices": prices}, lambda: _table(columns, prices))


def bill_show(
    *,
    org: Annotated[str, typer.Option("--org", help="Id or exact name of the org.")],
    begin: Annotated[str, typer.Option("--from", help="First day or time, UTC: 2026-11-01.")],
    end: Annotated[str, typer.Option("--to", help="The day or time after the last, UTC: 2026-12-01.")],
    database_url: Database = "",
    data_dir: DataDir = _DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show what an org owes, with each line rounded once and an explicit rounding line."""
    from billing.adapters.bill_sql import bills, org_id_of

    from_s, to_s = _span_s(begin, end)
    with _reported(), _books(database_url, data_dir) as engine:
        found = bills(engine, org_id_of(engine, org), from_s, to_s)
    _print(as_json, {"data": [asdict(bill) for bill in found]}, lambda: _show_bills(org, found))


def bill_reconcile(
    spool: Annotated[Path | None, typer.Option("--spool", help="Also compare with this spool folder.")] = None,
    engine_counters: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-counters",
            help="Also compare with an engine's own counters: ENDPOINT[@INCARNATION]=FILE_OR_URL. May be repeated.",
        ),
    ] = None,
    database_url: Database = "",
    data_dir: DataDir = _DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Compare events, postings, entries and roll-ups to the picodollar. Exit code 1 unless all agree."""
    from billing.adapters.reconcile_inputs import engine_source
    from billing.adapters.reconcile_sql import ReconcileOptions, reconcile
    from billing.errors import ReconcileInputError

    try:
        sources = [engine_source(text) for text in engine_counters or ()]
    except ReconcileInputError as fault:
        _wrong_usage(f"--engine-counters: {fault}")
    with _reported(), _books(database_url, data_dir) as engine:
        report = reconcile(engine, ReconcileOptions(spool, sources))
    _print(as_json, report_record(report), lambda: _show_report(report))
    if not report.exact:
        _fail(f"The books are not exact: {report.difference_count} differences.")


def bill_correct(
    *,
    begin: Annotated[str, typer.Option("--from", help="First day or time, UTC.")],
    end: Annotated[str, typer.Option("--to", help="The day or time after the last, UTC.")],
    org: Annotated[str | None, typer.Option("--org", help="Only this org: its id or exact name.")] = None,
    memo: Annotated[str, typer.Option("--memo", help="Why; kept with the postings.")] = "",
    database_url: Database = "",
    data_dir: DataDir = _DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Post the differences between what was billed and what the books that hold now say. Nothing is changed."""
    from billing.adapters.bill_sql import org_id_of
    from billing.adapters.corrections_sql import Scope, correct_prices

    from_s, to_s = _span_s(begin, end)
    with _reported(), _books(database_url, data_dir) as engine:
        scope = Scope(from_s * 10**9, to_s * 10**9, None if org is None else org_id_of(engine, org))
        report = correct_prices(engine, scope, memo=memo)
    record = {**asdict(report), "delta_pico": {code: str(delta) for code, delta in report.delta_pico.items()}}
    _print(
        as_json,
        record,
        f"{report.corrected_count} of {report.looked_at_count} events corrected in {len(report.posting_ids)} postings.",
    )


def bill_close(
    period: Annotated[str, typer.Argument(help="A month that is over: 2026-11.")],
    database_url: Database = "",
    data_dir: DataDir = _DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Close and seal a month: late usage goes to the next open one, and any change of its postings shows."""
    from billing.adapters.books_sql import close_period

    _check_month(period)
    with _reported(), _books(database_url, data_dir) as engine:
        try:
            closed = close_period(engine, period)
        except ValueError as fault:
            _fail(str(fault))
    _print(as_json, asdict(closed), f"{closed.period_id}: {closed.posting_count} postings, seal {closed.seal}.")


def ship(
    *,
    spool: Annotated[
        Path | None, typer.Option("--spool", help="Spool folder; default: spool in the data folder.")
    ] = None,
    node: Annotated[str, typer.Option("--node", envvar="INFERPLANE_NODE", help="Name of this node.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Ship what is there, then end.")] = False,
    database_url: Database = "",
    data_dir: DataDir = _DATA_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Bring usage from this node's spool into the database, until SIGTERM."""
    from billing.adapters.shipper import run

    with _reported():
        done = run(spool or data_dir / "spool", _existing(database_url, data_dir), node, once)
    if not once:
        return  # It runs below `serve`, whose output is not for what became of a child.
    record = {
        "shipped_event_count": done.committed_event_count,
        "quarantined_count": done.quarantined_count,
        "running_count": done.open_count,
    }
    told = [f"{_counted(done.committed_event_count, 'event')} shipped"]
    if done.quarantined_count:
        told.append(f"{_counted(done.quarantined_count, 'record')} went to the quarantine")
    if done.open_count:
        told.append(f"{_counted(done.open_count, 'attempt')} still running, to be shipped later")
    _print(as_json, record, "; ".join(told) + ".")


def report_record(report: Report) -> dict[str, Any]:
    """The JSON of a reconcile report. Amounts are strings of whole picodollars: they may pass 2^53."""
    return {
        "exact": report.exact,
        "events": report.event_count,
        "postings": report.posting_count,
        "entries": report.entry_count,
        "rollups": report.rollup_count,
        "spool_events": report.spool_event_count,
        "unpriced_events": report.unpriced_event_count,
        "estimated_events": report.estimated_event_count,
        "quarantined": report.quarantined_count,
        "totals_pico": {
            currency: {name: str(total) for name, total in sums.items()} for currency, sums in report.totals.items()
        },
        "difference_count": report.difference_count,
        "differences": [
            {
                "kind": one.kind.value,
                "name": one.name,
                "detail": one.detail,
                "amount_pico": None if one.amount_pico is None else str(one.amount_pico),
            }
            for one in report.differences
        ],
    }


def _url(database_url: str, data_dir: Path) -> str:
    return database_url or f"sqlite:///{data_dir / 'inferplane.db'}"


def _existing(database_url: str, data_dir: Path) -> str:
    """The database's URL, where its file is there: a mistyped folder must not look like empty books.

    Raises StoreError. A server is asked itself.
    """
    from billing.adapters import sql
    from billing.errors import StoreError

    address = _url(database_url, data_dir)
    missing = sql.missing_file(address)
    if missing is not None:
        raise StoreError(
            f"There is no Inferplane data in {missing if database_url else data_dir}; expected the "
            f"{'database file' if database_url else 'data folder'} of an `inferplane serve`."
        )
    return address


@contextmanager
def _books(database_url: str, data_dir: Path, *, begins: bool = False) -> Iterator[Engine]:
    """The database, with the tables of this version. The embedded file is upgraded on the way.

    `begins`: it is made where there is none.
    """
    from billing.adapters import sql

    engine = sql.engine(_url(database_url, data_dir) if begins else _existing(database_url, data_dir))
    try:
        if sql.is_sqlite(engine):
            sql.upgrade(engine)
        else:
            sql.require_current(engine)
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _reported() -> Iterator[None]:
    """A fault of this package or of the database becomes one line on stderr and exit code 1."""
    import sqlalchemy as sa

    from billing.errors import BillingError

    try:
        yield
    except BillingError as fault:
        _fail(str(fault))
    except sa.exc.SQLAlchemyError as fault:
        cause = getattr(fault, "orig", None)
        _fail(f"The database does not work: {str(cause or type(fault).__name__).strip().splitlines()[0]}")
    except OSError as fault:
        if fault.filename is None:
            raise
        _fail(f"{os.fsdecode(fault.filename)} cannot be used: {fault.strerror}.")


def _fail(sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    raise typer.Exit(1)


def _wrong_usage(sentence: str) -> NoReturn:
    """For a value that can never be right: the sentence names the option, the value and what was expected."""
    typer.echo(sentence, err=True)
    raise typer.Exit(2)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _print(as_json: bool, record: dict[str, Any], text: str | Callable[[], None]) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(record))
    elif isinstance(text, str):
        typer.echo(text)
    else:
        text()


def _table(columns: tuple[str, ...], records: list[dict[str, Any]]) -> None:
    """A box where it fits; else plain columns, one line a record, that a narrow terminal wraps. No value is cut."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [["" if record[name] is None else str(record[name]) for name in columns] for record in records]
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    console = Console()
    # A box has a line before each column and one at the end, and a blank on both sides of each cell.
    if sum(widths) + 3 * len(columns) + 1 <= console.width:
        made = Table(*columns)
        for row in rows:
            made.add_row(*map(Text, row))
        console.print(made)
        return
    for row in [list(columns), *rows]:
        padded = [cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        typer.echo("  ".join(padded).rstrip())


def _book_record(book: PriceBook) -> dict[str, Any]:
    return {
        "version": book.version,
        "org_id": book.org_id,
        "currency": book.currency,
        "valid_from_ns": book.valid_from_ns,
        "valid_from": _iso(book.valid_from_ns),
        "valid_until_ns": book.valid_until_ns,
        "valid_until": None if book.valid_until_ns is None else _iso(book.valid_until_ns),
        "price_count": len(book.prices),
        "note": book.note,
    }


def _show_bills(org: str, found: list[Any]) -> None:
    if not found:
        typer.echo(f"Nothing was billed to {org} in this time.")
    for bill in found:
        lines = [asdict(line) for line in bill.lines]
        _table(("model", "tier", "sku", "quantity_tokens", "amount_exact", "amount"), lines)
        typer.echo(f"rounding {bill.rounding}  total {bill.total} {bill.currency}  (exact: {bill.total_exact})")


def _show_report(report: Report) -> None:
    for one in report.differences:
        typer.echo(f"{one.kind.value}  {one.name}: {one.detail}")
    counts = f"{report.event_count} events, {report.posting_count} postings, {report.entry_count} entries"
    if report.exact:
        typer.echo(f"Exact: {counts}, {report.rollup_count} roll-up rows agree to the picodollar.")
    if report.quarantined_count:
        typer.echo(f"{report.quarantined_count} records are in quarantine and on no bill: look at them.", err=True)


def _span_s(begin: str, end: str) -> tuple[int, int]:
    """Unix seconds of --from and --to."""
    from_s, to_s = _time_s(begin, _SPAN_BEGIN), _time_s(end, _SPAN_END)
    if from_s >= to_s:
        _wrong_usage(f"{_SPAN_END} is {end!r}; expected a time after {_SPAN_BEGIN}, {begin}.")
    return from_s, to_s


def _time_s(text: str, option: str) -> int:
    """Unix seconds of a day or time in UTC."""
    from datetime import UTC, datetime

    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        _wrong_usage(f"{option} is {text!r}; expected a day like 2026-11-01 or a time like 2026-11-01T06:00:00Z.")
    at_s = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    if not 0 <= at_s <= _LAST_S:
        _wrong_usage(f"{option} is {text!r}; expected a time of the years 1970 to 2262.")
    return at_s


def _check_month(period: str) -> None:
    import re

    from billing.ledger import period_of

    try:
        # `period_of` knows the calendar, and takes more forms than a period's id has.
        known = re.fullmatch(r"[0-9]{4}-[0-9]{2}", period) is not None and bool(period_of(period))
    except ValueError:
        known = False
    if not known:
        _wrong_usage(f"period is {period!r}; expected a month such as 2026-11.")


def _iso(at_ns: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
