"""One run of an admin command: open the database, do one thing, print it, map a fault to an exit code.

Owns: `Place`, `show` and `listing`, the exit codes (0; 2 for bad input; 1 with one line on stderr for the rest), and
that only a command which begins something makes a data folder: elsewhere a mistyped one must not look like an empty
house. Does not own: commands and options (`cli`), or what a command does (`keys_sql`, `catalog_sql`).

`--json` prints one object, or one object with `data` and `next_after` for a list, in the fields of the records.
"""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import typer

from billing.adapters import sql
from billing.errors import StoreError
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.database_faults import database_faults
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import NewKey, Page
from controlplane.config import Settings, load_settings
from controlplane.errors import BadRequest, ConfigError, GatewayError, UsageError

# Fields that a table leaves out: of use to programs only.
_HIDDEN = frozenset({"lineage_id", "rotated_from"})
# What names a record, by the code of the refusal when there is none.
_NAMED_BY = {
    "org_not_found": "the id or name of one (see `inferplane orgs list`)",
    "project_not_found": "its id, or ORG/PROJECT",
    "key_not_found": "its id or public prefix (see `inferplane keys list`)",
    "limit_not_found": "its id (see `inferplane limits list`)",
    "model_not_found": "one of `inferplane models list`",
}
# Field of a record -> the option that sets it, where every command that takes the field has it as an option.
_OPTION_OF = {
    "limit": "--limit",
    "after": "--after",
    "scopes": "--scope",
    "models": "--model",
    "model": "--model",
    "dimension": "--dimension",
    "amount": "--amount",
    "burst": "--burst",
    "period_s": "--per",
    "life_s": "--expires",
    "overlap_s": "--overlap",
    "outage_policy": "--outage-policy",
    "served": "--served",
    "default_max_output_tokens": "--default-max-output-tokens",
    "context_tokens": "--context-tokens",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command works and how it answers. None: as the settings say."""

    database_url: str | None
    data_dir: Path | None
    as_json: bool
    begins: bool = False
    """The command may be the first of all: it makes the data folder, database and pepper where there are none."""
    options: Mapping[str, str] | None = None
    """Field -> option, where a field that is an argument elsewhere is an option of this command."""


@dataclass(frozen=True, slots=True)
class Stores:
    """What a command works on."""

    keys: KeyStore
    catalog: CatalogStore


def show(place: Place, work: Callable[[Stores], dict[str, Any]]) -> None:
    """Run `work` and print the one record it gives."""
    with _faults(place), _stores(place) as stores:
        record = work(stores)
    if place.as_json:
        typer.echo(json.dumps(record))
        return
    width = max(len(name) for name in record)
    for name, value in record.items():
        if name not in _HIDDEN:
            typer.echo(f"{name:<{width}}  {_cell(name, value)}")
    if record.get("secret"):
        typer.echo("The secret is shown this once; keep it now.", err=True)


def listing(place: Place, work: Callable[[Stores], Page[Any] | tuple[Any, ...]]) -> None:
    """Run `work` and print the records it gives as a table."""
    with _faults(place), _stores(place) as stores:
        found = work(stores)
    page = found if isinstance(found, Page) else Page(found, None)
    records = [asdict(item) for item in page.items]
    if place.as_json:
        typer.echo(json.dumps({"data": records, "next_after": page.next_after}))
        return
    if not records:
        typer.echo("None.", err=True)
        return
    _table(records)
    if page.next_after is not None:
        typer.echo(f"More: --after {page.next_after}", err=True)


def new_key(new: NewKey) -> dict[str, Any]:
    """The record of a new key, its secret first."""
    return {"secret": new.secret, **asdict(new.record)}


@contextmanager
def _stores(place: Place) -> Iterator[Stores]:
    given = {"database_url": place.database_url, "data_dir": place.data_dir}
    settings = load_settings({name: value for name, value in given.items() if value is not None})
    faults = partial(database_faults, settings, option=place.database_url is not None)
    with faults():
        if not place.begins:
            require_database(settings)
        engine = sql.engine(settings.sql_url)
    announce = _announcer(settings)
    try:
        with faults():
            if sql.is_sqlite(engine):
                sql.upgrade(engine)
            else:
                sql.require_current(engine)
        if not place.begins:
            _require_pepper(settings)
        keys = KeyStore(engine, load_pepper(settings), actor=f"cli:{_user()}", announce=announce)
        yield Stores(keys, CatalogStore(keys.db))
    finally:
        engine.dispose()
        if announce is not None:
            announce.close()


def require_database(settings: Settings) -> None:
    """Raise ConfigError when the SQLite file is not there. A server is asked itself (`sql.require_current`)."""
    missing = sql.missing_file(settings.sql_url)
    if missing is None:
        return
    if settings.database_url:
        raise ConfigError(
            f"There is no Inferplane data in {missing}; expected the database file of an `inferplane serve`."
        )
    raise ConfigError(
        f"There is no Inferplane data in {settings.data_dir}; expected the data folder of an `inferplane serve` "
        "(--data-dir or INFERPLANE_DATA_DIR), or make the first org with `inferplane orgs create`."
    )


def _require_pepper(settings: Settings) -> None:
    """Raise ConfigError when the keys' pepper is neither set nor there: a new one would fit no key."""
    if not settings.key_pepper.get_secret_value() and not (settings.data_dir / "pepper").exists():
        raise ConfigError(
            f"There is no Inferplane data in {settings.data_dir}; expected the file pepper that belongs to the "
            "database, or INFERPLANE_KEY_PEPPER."
        )


def _announcer(settings: Settings) -> Any:
    if not settings.redis_url.get_secret_value():
        return None  # an embedded Redis may run or not; the feed's interval is soon enough for a person
    from controlplane.adapters.key_feed import RedisAnnouncer

    return RedisAnnouncer(settings.redis_url)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"  # a container without an entry for its user id


def _as_typed(fault: BadRequest, place: Place) -> str:
    """The refusal in the words of the command line: the option that was typed, and what names a record."""
    sentence, field = fault.message, fault.param or ""
    option = (place.options or {}).get(field) or _OPTION_OF.get(field)
    if option is not None and sentence.startswith(f"{field} "):
        sentence = f"{option}{sentence.removeprefix(field)}"
    named_by = _NAMED_BY.get(fault.code or "")
    return sentence if named_by is None else f"{sentence.rstrip('.')}; expected {named_by}."


@contextmanager
def _faults(place: Place) -> Iterator[None]:
    try:
        yield
    except BadRequest as fault:
        typer.echo(_as_typed(fault, place), err=True)
        # A name that is not there may be there tomorrow: it is no wrong usage.
        sys.exit(2 if fault.status == 400 and not (fault.code or "").endswith("_not_found") else 1)
    except UsageError as fault:
        typer.echo(str(fault), err=True)
        sys.exit(2)
    except (GatewayError, StoreError) as fault:
        typer.echo(str(fault), err=True)
        sys.exit(1)
    except OSError as fault:
        typer.echo(f"data_dir: {fault.filename or 'its folder'} cannot be used: {fault.strerror}.", err=True)
        sys.exit(1)


def _table(records: list[dict[str, Any]]) -> None:
    """Columns two blanks apart, one line a record: read by people and by `awk`; a narrow terminal wraps it."""
    names = [name for name in records[0] if name not in _HIDDEN]
    rows = [names, *([_cell(name, record[name]) for name in names] for record in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_at_s"):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value) or "-"
