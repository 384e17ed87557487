"""Sums over usage events, added up by the database: per posting, and per row of the roll-ups.

Owns: the queries, with the rules of billed model, billed tier and billed attempt as SQL, and their rows as the core's
values. Does not own: what the sums are compared with (`billing.reconcile`) or the rules themselves (`billing.pricing`
and `billing.rollup`; a property test holds these queries to them). Tokens are summed, never money: events of a group
have the same prices, so the core rates the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from billing.adapters.sql import id_xor, pico_sum
from billing.adapters.tables import UsageEventRow, table
from billing.ledger import NS_PER_S
from billing.pricing import DEFAULT_TIER, ENGINE_FAILED, UNTIERED, Charge, ChargeFlag, Sku
from billing.reconcile import Books, EventGroup, PostingTally, charge_of_group
from billing.rollup import MINUTE_S, RollupKey, RollupSums, halves

_EVENT = table(UsageEventRow)
_TOKENS = {
    Sku.INPUT: _EVENT.c.uncached_input_tokens,
    Sku.CACHED_INPUT: _EVENT.c.cached_input_tokens,
    Sku.CACHE_WRITE: _EVENT.c.cache_write_tokens,
    Sku.OUTPUT: _EVENT.c.output_tokens,
}
# `pricing.billed_model`, `billed_tier` and `is_billable`, and `reconcile.charge_of`'s rule of what stays unrated.
_MODEL = sa.case((_EVENT.c.model_served != "", _EVENT.c.model_served), else_=_EVENT.c.model_asked)
_TIER = sa.case(
    (_EVENT.c.tier_served.not_in(sorted(UNTIERED)), _EVENT.c.tier_served),
    (_EVENT.c.tier_asked.not_in(sorted(UNTIERED)), _EVENT.c.tier_asked),
    else_=DEFAULT_TIER,
)
_NOTHING_CAME = sa.and_(
    _EVENT.c.first_token_ns.is_(None), _EVENT.c.outcome.in_(sorted(outcome.value for outcome in ENGINE_FAILED))
)
_IS_BILLED = sa.and_(_EVENT.c.billable, sa.not_(_NOTHING_CAME))
_IS_UNRATED = sa.and_(_EVENT.c.amount_pico.is_(None), _EVENT.c.posting_id.is_(None))
_GROUP: tuple[sa.ColumnElement[Any], ...] = (
    _EVENT.c.price_version,
    _EVENT.c.currency,
    _MODEL.label("model"),
    _TIER.label("tier"),
    _IS_UNRATED.label("is_unrated"),
    _IS_BILLED.label("is_billed"),
)
_SUMS: tuple[sa.ColumnElement[Any], ...] = (
    sa.func.count().label("event_count"),
    id_xor(_EVENT.c.event_id).label("event_xor"),
    *(pico_sum(column).label(sku.value) for sku, column in _TOKENS.items()),
)
_ROW: tuple[sa.ColumnElement[Any], ...] = (
    _EVENT.c.org_id,
    (_EVENT.c.ended_ns - _EVENT.c.ended_ns % (MINUTE_S * NS_PER_S)).label("minute_ns"),
    _EVENT.c.project_id,
    _EVENT.c.key_id,
    _EVENT.c.end_user,
    _EVENT.c.batch_id.is_not(None).label("batch"),
    _EVENT.c.billable,
    _EVENT.c.node,
)


def _count_of(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.sum(sa.case((condition, 1), else_=0))


_KNOWLEDGE: tuple[sa.ColumnElement[Any], ...] = (
    _count_of(_EVENT.c.estimated).label("estimated_count"),
    sa.func.count(_EVENT.c.uncached_input_tokens).label("input_known_count"),
    sa.func.count(_EVENT.c.output_tokens).label("output_known_count"),
    _count_of(
        sa.or_(*(_TOKENS[sku].is_(None) for sku in (Sku.INPUT, Sku.CACHED_INPUT, Sku.OUTPUT)))
    ).label("unknown_count"),
    pico_sum(_EVENT.c.reasoning_tokens).label("reasoning_tokens"),
)  # fmt: skip


def posting_tallies(connection: Connection, books: Books, *where: sa.ColumnElement[bool]) -> dict[str, PostingTally]:
    """What the events that name each posting add up to, of the postings that `where` leaves."""
    query = sa.select(_EVENT.c.posting_id, *_GROUP, *_SUMS, sa.func.min(_EVENT.c.event_id).label("first_event_id"))
    query = query.where(_EVENT.c.posting_id.is_not(None), *where).group_by(_EVENT.c.posting_id, *_GROUP)
    tallies: dict[str, PostingTally] = {}
    rows: Iterator[Any] = iter(connection.execute(query))
    for row in rows:
        tally = tallies.setdefault(row.posting_id, PostingTally())
        tally.count(row.event_xor, row.event_count, row.first_event_id)
        tally.add_charge(charge_of_group(_group_of(row), books), 1)
    return tallies


def rollup_rows(
    connection: Connection, books: Books, *where: sa.ColumnElement[bool]
) -> dict[RollupKey, RollupSums]:  # fmt: skip
    """The roll-up rows of the events that `where` leaves, without corrections."""
    rows: dict[RollupKey, RollupSums] = {}
    for row in _rollup_groups(connection, *where):
        group = _group_of(row)
        key = RollupKey(
            org_id=row.org_id,
            minute_s=row.minute_ns // NS_PER_S,
            project_id=row.project_id,
            key_id=row.key_id,
            end_user=row.end_user or "",
            model=group.model,
            tier=group.tier,
            batch=bool(row.batch),
            billable=bool(row.billable),
            currency=group.currency or "",
            node=row.node,
        )
        _add(rows.setdefault(key, RollupSums()), row, charge_of_group(group, books))
    return rows


def _rollup_groups(connection: Connection, *where: sa.ColumnElement[bool]) -> Iterator[Any]:
    query = sa.select(*_ROW, *_GROUP, *_SUMS, *_KNOWLEDGE).where(*where).group_by(*_ROW, *_GROUP)
    yield from connection.execute(query)


def _group_of(row: Any) -> EventGroup:
    return EventGroup(
        price_version=row.price_version,
        currency=row.currency,
        model=row.model,
        tier=row.tier,
        is_unrated=bool(row.is_unrated),
        is_billed=bool(row.is_billed),
        tokens=tuple((sku, row._mapping[sku.value] or 0) for sku in _TOKENS),
    )


def _add(sums: RollupSums, row: Any, charge: Charge) -> None:
    """Add a group to its row."""
    tokens = row._mapping
    sums.event_count += row.event_count
    sums.unknown_count += row.unknown_count
    sums.estimated_count += row.estimated_count
    sums.unpriced_count += row.event_count if ChargeFlag.UNPRICED in charge.flags else 0
    sums.uncached_input_tokens += tokens[Sku.INPUT.value] or 0
    sums.cached_input_tokens += tokens[Sku.CACHED_INPUT.value] or 0
    sums.cache_write_tokens += tokens[Sku.CACHE_WRITE.value] or 0
    sums.output_tokens += tokens[Sku.OUTPUT.value] or 0
    sums.reasoning_tokens += row.reasoning_tokens or 0
    sums.input_known_count += row.input_known_count
    sums.output_known_count += row.output_known_count
    high, low = halves(row.event_xor)
    sums.event_xor_high ^= high
    sums.event_xor_low ^= low
    sums.add_charge(charge, 1)
