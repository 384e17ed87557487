"""A price book as a file that people write: YAML or JSON.

Owns: the form of the file and its faults. Does not own: what a book may say (`pricing`) or where it goes (`books_sql`).

    version: "2026-12"
    currency: USD
    valid_from: 2026-12-01T00:00:00Z
    micro_usd_per_million_tokens:      # whole numbers: 3.00 USD per 1,000,000 tokens is 3000000
      llama-3.3-70b:
        default: {input: 600000, cached_input: 150000, output: 900000}
        batch: {input: 300000, output: 450000}

Optional: `valid_until`, `org` (the book holds for this org only), `note`, and `extends` (a stored version whose prices
are taken over where the file names none, so that an org's book needs to list only what differs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from billing.errors import PriceBookError
from billing.ledger import NS_PER_S
from billing.pricing import PriceBook, PriceKey, Sku

_PRICES = "micro_usd_per_million_tokens"
_KNOWN = frozenset({"version", "currency", "valid_from", "valid_until", "org", "note", "extends", _PRICES})
# A price list of thousands of models is far below this.
_MAX_FILE_BYTES = 8 * 1024 * 1024


def read_price_file(path: Path, stored: Callable[[str], PriceBook | None]) -> PriceBook:
    """The book of a file; `stored` finds the version that it extends. Raises PriceBookError with file and field."""
    import yaml

    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise PriceBookError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; that is no price book.")
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as fault:
        raise PriceBookError(f"{path} cannot be read: {fault}.") from None
    except yaml.YAMLError as fault:
        raise PriceBookError(f"{path} is neither YAML nor JSON: {str(fault).splitlines()[0]}.") from None
    try:
        return book_of_document(document, stored)
    except PriceBookError as fault:
        raise PriceBookError(f"{path}: {fault}") from None


def book_of_document(document: object, stored: Callable[[str], PriceBook | None]) -> PriceBook:
    """The book of a parsed file. Raises PriceBookError."""
    fields = _mapping(document, "the price book")
    unknown = sorted(str(name) for name in fields if name not in _KNOWN)
    if unknown:
        raise PriceBookError(f"{unknown[0]} is no field of a price book; known are {', '.join(sorted(_KNOWN))}.")
    for name in ("version", "currency", "valid_from", _PRICES):
        if name not in fields:
            raise PriceBookError(f"{name} is missing.")
    prices: dict[PriceKey, int] = {}
    if "extends" in fields:
        parent = stored(str(fields["extends"]))
        if parent is None:
            raise PriceBookError(f"extends is {fields['extends']!r}; a version that is stored was expected.")
        if parent.currency != fields["currency"]:
            raise PriceBookError(f"currency is {fields['currency']!r}; that of the extended book is {parent.currency}.")
        prices.update(parent.prices)
    prices.update(_prices(fields[_PRICES]))
    until = fields.get("valid_until")
    return PriceBook(
        version=str(fields["version"]),
        currency=str(fields["currency"]),
        valid_from_ns=_ns(fields["valid_from"], "valid_from"),
        prices=prices,
        org_id=None if fields.get("org") is None else str(fields["org"]),
        valid_until_ns=None if until is None else _ns(until, "valid_until"),
        note=str(fields.get("note", "")),
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
    """Unix ns of a time in the file; YAML gives a datetime, JSON a text."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise PriceBookError(f"{where} is {value!r}; a time like 2026-12-01T00:00:00Z was expected.") from None
    if not isinstance(value, datetime):
        raise PriceBookError(f"{where} is {value!r}; a time like 2026-12-01T00:00:00Z was expected.")
    # YAML drops the zone of a UTC time in some versions; every time of a book is UTC.
    moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1_000_000) * (NS_PER_S // 1_000_000)
