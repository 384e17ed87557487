"""What an org owes for a stretch of time, as lines that add up.

Owns: the query over the roll-ups, the rounding of each line by the currency's exponent, and whom a bill is asked for
(an org's id or name). Does not own: rounding itself (`money.round_lines`), the exact sums (`rollup`), the orgs
(`controlplane.adapters.tenancy_tables`; two of their columns are read here), or the numbering and sending of invoices.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from billing.adapters.currencies import currency_exponent
from billing.adapters.sql import pico_sum, read
from billing.adapters.tables import UsageRollupRow, table
from billing.adapters.usage_sql import complete_to_ns
from billing.errors import ReportQueryError
from billing.ledger import NS_PER_S
from billing.money import decimal_text, minor_text, round_lines
from billing.pricing import Sku

_ROLLUP = table(UsageRollupRow)
# What is read of the tenants: migration 0002 makes the table.
# Longer than any id or name can be: what is longer is not looked for, nor repeated whole.
_MOST_NAME_CHARS = 1_000
_ORG = sa.table("org", sa.column("id", sa.String), sa.column("name", sa.String))
# (SKU, its tokens, its money) of a roll-up row.
_SKU_COLUMNS = (
    (Sku.INPUT, _ROLLUP.c.uncached_input_tokens, _ROLLUP.c.input_pico),
    (Sku.CACHED_INPUT, _ROLLUP.c.cached_input_tokens, _ROLLUP.c.cached_input_pico),
    (Sku.CACHE_WRITE, _ROLLUP.c.cache_write_tokens, _ROLLUP.c.cache_write_pico),
    (Sku.OUTPUT, _ROLLUP.c.output_tokens, _ROLLUP.c.output_pico),
)


@dataclass(frozen=True, slots=True)
class BillLine:
    """One line. Amounts are decimal texts in whole units of the bill's currency."""

    model: str
    tier: str
    sku: str
    quantity_tokens: int
    amount_exact: str
    amount: str
    """Rounded once, half to even."""


@dataclass(frozen=True, slots=True)
class Bill:
    """The lines of one currency. The rounded lines and `rounding` add up to `total`."""

    org_id: str
    from_s: int
    to_s: int
    currency: str
    lines: tuple[BillLine, ...]
    rounding: str
    total: str
    total_exact: str
    request_count: int
    unpriced_request_count: int
    """Requests for models without a price; they are in no line."""
    complete_to_s: int | None
    """Up to when the books are complete; None: not known."""


def bills(engine: Engine, org_id: str, from_s: int, to_s: int) -> list[Bill]:
    """An org's bill for [from_s, to_s) (Unix s, whole minutes), one per currency."""
    columns = [_ROLLUP.c.currency, _ROLLUP.c.model, _ROLLUP.c.tier]
    sums: list[sa.Label[int]] = [sa.func.sum(_ROLLUP.c.event_count).label("events")]
    sums.append(sa.func.sum(_ROLLUP.c.unpriced_count).label("unpriced"))
    for sku, tokens, pico in _SKU_COLUMNS:
        sums += [sa.func.sum(tokens).label(f"{sku.value}_tokens"), pico_sum(pico).label(f"{sku.value}_amount")]
    query = sa.select(*columns, *sums).where(
        _ROLLUP.c.org_id == org_id, _ROLLUP.c.minute_s >= from_s, _ROLLUP.c.minute_s < to_s, _ROLLUP.c.billable
    )
    complete_ns = complete_to_ns(engine)
    with read(engine) as connection:
        rows = list(connection.execute(query.group_by(*columns).order_by(*columns)).mappings())
    unpriced = sum(int(row["unpriced"]) for row in rows)
    found = []
    for currency in sorted({row["currency"] for row in rows if row["currency"]}):
        mine = [row for row in rows if row["currency"] == currency]
        raw = [
            (row["model"], row["tier"], sku.value, int(row[f"{sku.value}_tokens"]), int(row[f"{sku.value}_amount"]))
            for row in mine
            for sku, _, _ in _SKU_COLUMNS
            if row[f"{sku.value}_amount"] or int(row[f"{sku.value}_tokens"])
        ]
        exponent = currency_exponent(currency)
        rounded = round_lines([line[4] for line in raw], exponent)
        lines = tuple(
            BillLine(*line[:4], decimal_text(line[4]), minor_text(minor, exponent))
            for line, minor in zip(raw, rounded.lines_minor, strict=True)
        )
        found.append(
            Bill(
                org_id=org_id,
                from_s=from_s,
                to_s=to_s,
                currency=currency,
                lines=lines,
                rounding=minor_text(rounded.rounding_minor, exponent),
                total=minor_text(rounded.total_minor, exponent),
                total_exact=decimal_text(sum(line[4] for line in raw)),
                request_count=sum(int(row["events"]) for row in mine),
                unpriced_request_count=unpriced,
                complete_to_s=None if complete_ns is None else complete_ns // NS_PER_S,
            )
        )
    return found


def org_id_of(engine: Engine, org: str) -> str:
    """The id of the org that `org` names: an id (with a row of its own, or only with usage) or an exact name.

    Raises ReportQueryError when there is none, or when it is the id of one org and the name of another.
    """
    expected = "the id or the exact name of an org was expected (inferplane orgs list)"
    if len(org) > _MOST_NAME_CHARS or any("\ud800" <= char <= "\udfff" for char in org):  # no text in a database
        raise ReportQueryError(f"org is {org[:40]!a}; {expected}.", "org")
    with read(engine) as connection:
        rows = connection.execute(sa.select(_ORG.c.id, _ORG.c.name).where(sa.or_(_ORG.c.id == org, _ORG.c.name == org)))
        names = {row.id: row.name for row in rows}
        used = sa.select(_ROLLUP.c.org_id).where(_ROLLUP.c.org_id == org).limit(1)
        is_id = org in names or connection.execute(used).first() is not None
    others = [org_id for org_id, name in names.items() if name == org and org_id != org]
    if is_id and others:
        first = f"its name ({names[org]})" if org in names else "another id"
        raise ReportQueryError(
            f"org is {org!r}, the id of one org and the name of another; {first} for the first, "
            f"or its id ({others[0]}) for the second was expected.",
            "org",
        )
    if not is_id and not others:
        raise ReportQueryError(f"org is {org!r}; {expected}.", "org")
    return org if is_id else others[0]
