"""A price book as a file that people write: YAML or JSON.

Owns: the form of the file and its faults. Does not own: what a book may say (`pricing`) or where it goes (`books_sql`).
A file is read without a database: only what it extends has to be asked for there, so a wrong file makes nothing.

    version: "2026-12"
    currency: USD
    valid_from: 2026-12-01T00:00:00Z
    micro_usd_per_million_tokens:      # whole numbers: 3.00 USD per 1,000,000 tokens is 3000000
      llama-3.3-70b:
        default: {input: 600000, cached_input: 150000, output: 900000}
        batch: {input: 300000, output: 450000}

Optional: `valid_until`, `org` (the book holds for this org only), `note`, and `extends` (a stored version whose prices
are taken over where the file names none, so that an org's book needs to list only what differs). For people the fields
are in docs/operations.md, "Price books".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

from billing.errors import PriceBookError
from billing.ledger import NS_PER_S
from billing.pricing import PriceBook, PriceKey, Sku

_PRICES = "micro_usd_per_million_tokens"
_KNOWN = frozenset({"version", "currency", "valid_from", "valid_until", "org", "note", "extends", _PRICES})
# A price list of thousands of models is far below this.
_MAX_FILE_BYTES = 8 * 1024 * 1024
# Times are stored as signed 64-bit Unix nanoseconds.
_LAST_S = (2**63 - 1) // NS_PER_S


class _Loader(yaml.SafeLoader):
    """Leaves what looks like a time and is none (the 13th month) as it is written, for a sentence with its field."""

    def construct_yaml_timestamp(self, node: yaml.ScalarNode) -> Any:
        """A date, a datetime, or the text."""
        try:
            return super().construct_yaml_timestamp(node)
        except (ValueError, OverflowError):
            return node.value


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_timestamp)


@dataclass(frozen=True, slots=True)
class PriceFile:
    """A file that was read; its fields are known ones and the needed ones are there."""

    path: Path
    fields: Mapping[str, Any]

    @property
    def extends(self) -> str | None:
        """The version whose prices are taken over; None: the file has all of its prices."""
        return str(self.fields["extends"]) if "extends" in self.fields else None

    @property
    def org(self) -> str | None:
        """The id or the name of the one org that the book is for; None: for every org."""
        return None if self.fields.get("org") is None else str(self.fields["org"])

    def of_org(self, org_id: str) -> PriceFile:
        """The same file with its org by id."""
        return replace(self, fields={**self.fields, "org": org_id})

    def book(self, parent: PriceBook | None) -> PriceBook:
        """The book; `parent` is the stored one that it extends. Raises PriceBookError with file and field."""
        try:
            return _book(self.fields, self.extends, parent)
        except PriceBookError as fault:
            raise PriceBookError(f"{self.path}: {fault}") from None


def read_price_file(path: Path) -> PriceFile:
    """Read a file, without any database. Raises PriceBookError with file and field."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise PriceBookError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; that is no price book.")
        document = yaml.load(path.read_text(), _Loader)  # noqa: S506 - a SafeLoader
    except OSError as fault:
        raise PriceBookError(f"{path} cannot be read: {fault.strerror}.") from None
    except UnicodeDecodeError as fault:
        raise PriceBookError(f"{path} cannot be read: {fault}.") from None
    except yaml.YAMLError as fault:
        raise PriceBookError(f"{path} is neither YAML nor JSON: {str(fault).splitlines()[0]}.") from None
    except RecursionError:
        raise PriceBookError(f"{path} is nested too deeply; that is no price book.") from None
    except ValueError as fault:  # a number of thousands of digits
        raise PriceBookError(f"{path} has a value that cannot be read: {fault}.") from None
    try:
        return PriceFile(path, _fields(document))
    except PriceBookError as fault:
        raise PriceBookError(f"{path}: {fault}") from None


def _fields(document: object) -> Mapping[str, Any]:
    fields = _mapping(document, "the price book")
    unknown = sorted(str(name) for name in fields if name not in _KNOWN)
    if unknown:
        raise PriceBookError(f"{unknown[0]} is no field of a price book; known are {', '.join(sorted(_KNOWN))}.")
    if "org" in fields and fields["org"] is None:  # a template's variable that was left blank: not for everybody
        raise PriceBookError("org is empty; expected the id or the name of an org, or no such line.")
    for name in ("version", "currency", "valid_from", _PRICES):
        if name not in fields:
            raise PriceBookError(f"{name} is missing.")
    return fields


def _book(fields: Mapping[str, Any], extends: str | None, parent: PriceBook | None) -> PriceBook:
    prices: dict[PriceKey, int] = {}
    if extends is not None:
        if parent is None:
            raise PriceBookError(f"extends is {extends!r}; a version that is stored was expected.")
        if parent.currency != fields["currency"]:
            raise PriceBookError(f"currency is {fields['currency']!r}; that of the extended book is {parent.currency}.")
        prices.update(parent.prices)
    prices.update(_prices(fields[_PRICES]))
    until, note = fields.get("valid_until"), fields.get("note")
    return PriceBook(
        version=str(fields["version"]),
        currency=str(fields["currency"]),
        valid_from_ns=_ns(fields["valid_from"], "valid_from"),
        prices=prices,
        org_id=None if fields.get("org") is None else str(fields["org"]),
        valid_until_ns=None if until is None else _ns(until, "valid_until"),
        note="" if note is None else str(note),
    )


def _prices(models: object) -> dict[PriceKey, int]:
    prices: dict[PriceKey, int] = {}
    for model, tiers in _mapping(models, _PRICES).items():
        for tier, skus in _mapping(tiers, f"{_PRICES}.{model}").items():
            for sku, price in _mapping(skus, f"{_PRICES}.{model}.{tier}").items():
                if sku not in set(Sku):
                    raise PriceBookError(f"{_PRICES}.{model}.{tier}: {sku!r} is no SKU; {', '.join(Sku)} are.")
                prices[str(model), str(tier), Sku(str(sku))] = price
    return prices


def _mapping(value: object, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise PriceBookError(f"{where} is {type(value).__name__}; names with values were expected.")
    return value


def _ns(value: object, where: str) -> int:
    """Unix ns of a time in the file; YAML gives a date or a datetime, JSON a text. A day is its midnight in UTC."""
    expected = "a time like 2026-12-01T00:00:00Z or a day like 2026-12-01 was expected"
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise PriceBookError(f"{where} is {value!r}; {expected}.") from None
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise PriceBookError(f"{where} is {value!r}; {expected}.")
    # YAML drops the zone of a UTC time in some versions; every time of a book is UTC.
    moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if not 0 <= moment.timestamp() <= _LAST_S:
        shown = moment.isoformat().replace("+00:00", "Z")
        raise PriceBookError(f"{where} is {shown}; a time of the years 1970 to 2262 was expected.")
    return int(moment.timestamp() * 1_000_000) * (NS_PER_S // 1_000_000)
