"""The billing tables as SQLModel classes: what queries are written against.

Owns: the classes, with the types that hold money and 64-bit counts on both databases. Does not own: the DDL (the
migrations make the tables and their triggers; a test holds both to the same columns) or the meaning of a column
(`usage_event`, `pricing`, `ledger`, `rollup`). Field names are column names; `end_user` is the event's `user`, which
is a reserved word of SQL.
"""

from __future__ import annotations

from typing import Any, cast

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from billing.adapters.sql import PicoInt

# Byte order on PostgreSQL; SQLite compares bytes anyway.
_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def _text(*, key: bool = False) -> Any:
    return Field(primary_key=key, sa_type=cast(Any, _TEXT))


def _text_or_none() -> Any:
    return Field(default=None, nullable=True, sa_type=cast(Any, _TEXT))


def _whole(*, key: bool = False) -> Any:
    return Field(primary_key=key, sa_type=sa.BigInteger, sa_column_kwargs={"autoincrement": False})


def _whole_or_none() -> Any:
    return Field(default=None, nullable=True, sa_type=sa.BigInteger)


def _pico() -> Any:
    return Field(sa_type=PicoInt)


class UsageEventRow(SQLModel, table=True):
    """One event and its rating. Written once."""

    __tablename__ = "usage_event"

    event_id: str = _text(key=True)
    schema_version: int = _whole()
    request_id: str = _text()
    attempt: int = _whole()
    org_id: str = _text()
    project_id: str = _text()
    key_id: str = _text()
    end_user: str | None = _text_or_none()
    operation: str = _text()
    profile: str | None = _text_or_none()
    model_asked: str = _text()
    model_served: str = _text()
    tier_asked: str | None = _text_or_none()
    tier_served: str | None = _text_or_none()
    deployment: str | None = _text_or_none()
    pool: str | None = _text_or_none()
    endpoint: str = _text()
    endpoint_incarnation: str = _text()
    node: str = _text()
    batch_id: str | None = _text_or_none()
    custom_id: str | None = _text_or_none()
    spillover: bool
    stream: bool
    billable: bool
    estimated: bool
    outcome: str = _text()
    status: int | None = _whole_or_none()
    error_code: str | None = _text_or_none()
    choices: int = _whole()
    reserved_input_tokens: int = _whole()
    reserved_output_tokens: int = _whole()
    predicted_cached_tokens: int | None = _whole_or_none()
    uncached_input_tokens: int | None = _whole_or_none()
    cached_input_tokens: int | None = _whole_or_none()
    cache_write_tokens: int | None = _whole_or_none()
    output_tokens: int | None = _whole_or_none()
    reasoning_tokens: int | None = _whole_or_none()
    received_ns: int = _whole()
    opened_ns: int = _whole()
    first_token_ns: int | None = _whole_or_none()
    ended_ns: int = _whole()
    payload_hash: str = _text()
    extra: str | None = Field(default=None, nullable=True, sa_type=sa.Text)
    price_version: str | None = _text_or_none()
    currency: str | None = _text_or_none()
    amount_pico: int | None = Field(default=None, nullable=True, sa_type=PicoInt)
    posting_id: str | None = _text_or_none()


class UsageCorrectionRow(SQLModel, table=True):
    """A retroactive change of one event's amount. Written once."""

    __tablename__ = "usage_correction"

    event_id: str = _text(key=True)
    posting_id: str = _text(key=True)
    price_version_from: str | None = _text_or_none()
    price_version_to: str = _text()
    currency: str = _text()
    delta_pico: int = _pico()
    ended_ns: int = _whole()
    posted_ns: int = _whole()


class PriceBookRow(SQLModel, table=True):
    """The head of a price book; `org_id` empty: for every org. Written once, after its prices."""

    __tablename__ = "price_book"

    version: str = _text(key=True)
    org_id: str = _text()
    currency: str = _text()
    valid_from_ns: int = _whole()
    valid_until_ns: int | None = _whole_or_none()
    created_ns: int = _whole()
    note: str = _text()
    content_hash: str = _text()


class PriceRow(SQLModel, table=True):
    """One price of a book. Written once."""

    __tablename__ = "price"

    version: str = _text(key=True)
    model: str = _text(key=True)
    tier: str = _text(key=True)
    sku: str = _text(key=True)
    micro_usd_per_million_tokens: int = _whole()


class PeriodRow(SQLModel, table=True):
    """A calendar month of the books."""

    __tablename__ = "period"

    period_id: str = _text(key=True)
    starts_ns: int = _whole()
    ends_ns: int = _whole()
    status: str = _text()
    closed_ns: int | None = _whole_or_none()
    posting_count: int | None = _whole_or_none()
    previous_seal: str | None = _text_or_none()
    seal: str | None = _text_or_none()


class PostingRow(SQLModel, table=True):
    """The head of a transfer. Written once, after its entries."""

    __tablename__ = "posting"

    posting_id: str = _text(key=True)
    kind: str = _text()
    org_id: str = _text()
    currency: str = _text()
    price_version: str | None = _text_or_none()
    period_id: str = _text()
    usage_from_ns: int = _whole()
    usage_until_ns: int = _whole()
    posted_ns: int = _whole()
    event_count: int = _whole()
    event_xor: str = _text()
    memo: str = _text()


class EntryRow(SQLModel, table=True):
    """One leg of a transfer. Written once."""

    __tablename__ = "entry"

    posting_id: str = _text(key=True)
    line_no: int = _whole(key=True)
    account: str = _text()
    currency: str = _text()
    model: str = _text()
    tier: str = _text()
    quantity_tokens: int | None = _whole_or_none()
    amount_pico: int = _pico()


class UsageRollupRow(SQLModel, table=True):
    """Usage of one minute; see billing.rollup."""

    __tablename__ = "usage_rollup"

    org_id: str = _text(key=True)
    minute_s: int = _whole(key=True)
    project_id: str = _text(key=True)
    key_id: str = _text(key=True)
    end_user: str = _text(key=True)
    model: str = _text(key=True)
    tier: str = _text(key=True)
    batch: bool = Field(primary_key=True)
    billable: bool = Field(primary_key=True)
    currency: str = _text(key=True)
    node: str = _text(key=True)
    event_count: int = _whole()
    unknown_count: int = _whole()
    unpriced_count: int = _whole()
    estimated_count: int = _whole()
    uncached_input_tokens: int = _whole()
    cached_input_tokens: int = _whole()
    cache_write_tokens: int = _whole()
    output_tokens: int = _whole()
    reasoning_tokens: int = _whole()
    input_known_count: int = _whole()
    output_known_count: int = _whole()
    event_xor_high: int = _whole()
    event_xor_low: int = _whole()
    input_pico: int = _pico()
    cached_input_pico: int = _pico()
    cache_write_pico: int = _pico()
    output_pico: int = _pico()
    amount_pico: int = _pico()


class RefusalMinuteRow(SQLModel, table=True):
    """How many requests were refused in one minute, by reason."""

    __tablename__ = "refusal_minute"

    org_id: str = _text(key=True)
    minute_s: int = _whole(key=True)
    project_id: str = _text(key=True)
    model: str = _text(key=True)
    reason: str = _text(key=True)
    node: str = _text(key=True)
    refusal_count: int = _whole()


class SpoolOffsetRow(SQLModel, table=True):
    """How far a spool folder has been shipped; stored with what was shipped, in one transaction."""

    __tablename__ = "spool_offset"

    node: str = _text(key=True)
    incarnation: str = _text(key=True)
    segment: int = _whole()
    offset_bytes: int = _whole()
    complete_to_ns: int | None = _whole_or_none()
    finished: bool
    updated_ns: int = _whole()


class QuarantineRow(SQLModel, table=True):
    """What could not be taken into the books, kept whole with the reason."""

    __tablename__ = "quarantine"

    quarantine_id: str = _text(key=True)
    kind: str = _text()
    reason: str = _text()
    event_id: str | None = _text_or_none()
    node: str | None = _text_or_none()
    incarnation: str | None = _text_or_none()
    raw: bytes = Field(sa_type=sa.LargeBinary)
    at_ns: int = _whole()


def table(model: type[SQLModel]) -> sa.Table:
    """The Core table of a class."""
    return cast(sa.Table, model.__table__)  # type: ignore[attr-defined]  # SQLModel adds it to table classes only
