"""Usage, costs and refusals for the APIs and pages: OpenAI's page objects, out of the roll-ups.

Owns: buckets and pages, grouping, the shape of the results, and the watermark up to which the books are complete. Does
not own: who may ask for which org (`controlplane.adapters.admin_reports`) or the sums themselves (`rollup`).

Only roll-ups are read, never the raw events, so the answer takes the time of minutes x keys, not of requests. Every
number is exact: money is a decimal string to the picodollar, a sum of which nothing is known is null. Field names are
OpenAI's where it has one; input_tokens = input_uncached_tokens + input_cached_tokens + input_cache_write_tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from billing.adapters.sql import pico_sum, read
from billing.adapters.tables import RefusalMinuteRow, SpoolOffsetRow, UsageRollupRow, table
from billing.errors import ReportQueryError
from billing.ledger import NS_PER_S
from billing.money import decimal_text
from billing.pricing import DEFAULT_TIER, Sku
from billing.rollup import MINUTE_S

_ROLLUP = table(UsageRollupRow)
_REFUSAL = table(RefusalMinuteRow)
_OFFSET = table(SpoolOffsetRow)
# Width in seconds, usual and largest number of buckets of a page (reference gateway 2.9, OpenAI's usage API).
BUCKETS = {"1m": (60, 60, 1_440), "1h": (3_600, 24, 168), "1d": (86_400, 7, 31)}
# A page that must be read whole cannot be larger than a group of every minute of its longest window.
_MAX_RESULT_COUNT = 200_000
_PAGE_PREFIX = "page_"
# Field of the API -> column of the roll-up.
_USAGE_GROUPS = {
    "org_id": "org_id",
    "project_id": "project_id",
    "user_id": "end_user",
    "api_key_id": "key_id",
    "model": "model",
    "batch": "batch",
    "service_tier": "tier",
}
_COST_GROUPS = {"org_id": "org_id", "project_id": "project_id", "api_key_id": "key_id"}
_REFUSAL_GROUPS = {"org_id": "org_id", "project_id": "project_id", "model": "model", "reason": "reason"}
_TOKEN_SUMS = (
    *("event_count", "unknown_count", "unpriced_count", "estimated_count", "input_known_count", "output_known_count"),
    *("uncached_input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens"),
)
# (SKU, its tokens, its money) of a roll-up row.
_SKU_COLUMNS = (
    (Sku.INPUT, "uncached_input_tokens", "input_pico"),
    (Sku.CACHED_INPUT, "cached_input_tokens", "cached_input_pico"),
    (Sku.CACHE_WRITE, "cache_write_tokens", "cache_write_pico"),
    (Sku.OUTPUT, "output_tokens", "output_pico"),
)


class Query(Protocol):
    """What a report shall count. `org_id` None: every org. Times are Unix seconds, the end is exclusive."""

    @property
    def org_id(self) -> str | None: ...
    @property
    def start_time_s(self) -> int: ...
    @property
    def end_time_s(self) -> int | None: ...
    @property
    def bucket_width(self) -> str: ...
    @property
    def group_by(self) -> tuple[str, ...]: ...
    @property
    def project_ids(self) -> tuple[str, ...]: ...
    @property
    def key_ids(self) -> tuple[str, ...]: ...
    @property
    def models(self) -> tuple[str, ...]: ...
    @property
    def limit_count(self) -> int | None: ...
    @property
    def page(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A `Query` for callers that have none of their own."""

    start_time_s: int
    end_time_s: int | None = None
    org_id: str | None = None
    bucket_width: str = "1d"
    group_by: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    limit_count: int | None = None
    page: str | None = None


class SqlReports:
    """The three reports. Blocking; each is one transaction, so its numbers and its watermark agree.

    Every method raises ReportQueryError for a query that cannot be answered as asked.
    """

    def __init__(self, engine: Engine, unix_s: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._unix_s = unix_s

    def usage(self, query: Query) -> Mapping[str, Any]:
        """Tokens and requests by time: results of OpenAI's `organization.usage.completions.result`."""
        groups = _groups(query, _USAGE_GROUPS)
        span = _span(query, self._unix_s())
        sums = [sa.func.sum(_ROLLUP.c[name]).label(name) for name in _TOKEN_SUMS]
        where = [_ROLLUP.c.billable, *_filters(_ROLLUP, query)]
        with read(self._engine) as connection:
            rows = _grouped(connection, _Asked(_ROLLUP, groups, sums, where, span))
            return _page(span, ((row, _usage_result(row, groups)) for row in rows), _watermark(connection))

    def costs(self, query: Query) -> Mapping[str, Any]:
        """Money by time: results of OpenAI's `organization.costs.result`, one per currency."""
        by_line = "line_item" in query.group_by
        groups = _groups(query, {**_COST_GROUPS, "line_item": "model"})
        if by_line:
            groups = {**groups, "line_item": "model", "_tier": "tier"}
        groups["_currency"] = "currency"
        span = _span(query, self._unix_s())
        counts = ("event_count", "unpriced_count", *(tokens for _, tokens, _ in _SKU_COLUMNS))
        money = ("amount_pico", *(pico for _, _, pico in _SKU_COLUMNS))
        sums: list[sa.Label[Any]] = [sa.func.sum(_ROLLUP.c[name]).label(name) for name in counts]
        sums += [pico_sum(_ROLLUP.c[name]).label(name) for name in money]
        where = [_ROLLUP.c.billable, *_filters(_ROLLUP, query)]
        with read(self._engine) as connection:
            rows = _grouped(connection, _Asked(_ROLLUP, groups, sums, where, span))
            results = ((row, one) for row in rows for one in _cost_results(row, groups, by_line=by_line))
            return _page(span, results, _watermark(connection))

    def refusals(self, query: Query) -> Mapping[str, Any]:
        """Refused requests by time, which have no usage events."""
        groups = _groups(query, _REFUSAL_GROUPS)
        span = _span(query, self._unix_s())
        sums = [sa.func.sum(_REFUSAL.c.refusal_count).label("refusal_count")]
        with read(self._engine) as connection:
            rows = _grouped(connection, _Asked(_REFUSAL, groups, sums, _filters(_REFUSAL, query), span))
            results = (
                (
                    row,
                    {
                        "object": "inferplane.refusals.result",
                        "refusal_count": int(row["refusal_count"]),
                        **_named(row, groups, _REFUSAL_GROUPS),
                    },
                )
                for row in rows
            )
            return _page(span, results, _watermark(connection))


def complete_to_ns(engine: Engine) -> int | None:
    """Unix ns up to which the books are complete: every event that ended before it is in them. None: not known."""
    with read(engine) as connection:
        return _watermark(connection)


@dataclass(frozen=True, slots=True)
class _Span:
    """The buckets of one page: [start_s, end_s) in steps of width_s, and where the next page starts."""

    start_s: int
    end_s: int
    width_s: int
    next_s: int | None

    def buckets(self) -> list[tuple[int, int]]:
        """(start, end) of each; the first may start, and the last end, inside a step."""
        starts = [
            self.start_s,
            *range(self.start_s // self.width_s * self.width_s + self.width_s, self.end_s, self.width_s),
        ]
        return list(zip(starts, [*starts[1:], self.end_s], strict=True)) if self.start_s < self.end_s else []


@dataclass(frozen=True, slots=True)
class _Asked:
    """One grouped query."""

    source: sa.Table
    groups: Mapping[str, str]
    sums: list[sa.Label[Any]]
    where: list[sa.ColumnElement[bool]]
    span: _Span


def _span(query: Query, now_s: float) -> _Span:
    known = BUCKETS.get(query.bucket_width)
    if known is None:
        raise ReportQueryError(
            f"bucket_width is {query.bucket_width[:20]!r}; expected one of {', '.join(BUCKETS)}.", "bucket_width"
        )
    width_s, usual, most = known
    limit = usual if query.limit_count is None else query.limit_count
    if not 1 <= limit <= most:
        raise ReportQueryError(f"limit is {limit}; 1 to {most} buckets of {query.bucket_width} fit a page.", "limit")
    # The books know minutes: a time inside one means the whole minute.
    end_s = -(-(int(now_s) + 1 if query.end_time_s is None else query.end_time_s) // MINUTE_S) * MINUTE_S
    start_s = query.start_time_s // MINUTE_S * MINUTE_S
    if query.page is not None:
        start_s = _page_start(query.page, start_s, end_s)
    page_end_s = (start_s // width_s + limit) * width_s
    if page_end_s < end_s:
        return _Span(start_s, page_end_s, width_s, page_end_s)
    return _Span(start_s, end_s, width_s, None)


def _page_start(page: str, start_s: int, end_s: int) -> int:
    digits = page.removeprefix(_PAGE_PREFIX)
    if page.startswith(_PAGE_PREFIX) and digits.isascii() and digits.isdigit() and len(digits) <= 12:
        found = int(digits)
        if start_s <= found < end_s and found % MINUTE_S == 0:
            return found
    raise ReportQueryError("page is not the next_page of an answer to this query.", "page")


def _groups(query: Query, known: Mapping[str, str]) -> dict[str, str]:
    for name in query.group_by:
        if name not in known:
            raise ReportQueryError(f"group_by is {name[:40]!r}; expected some of {', '.join(known)}.", "group_by")
    return {name: known[name] for name in dict.fromkeys(query.group_by)}


def _filters(source: sa.Table, query: Query) -> list[sa.ColumnElement[bool]]:
    where = []
    if query.org_id is not None:
        where.append(source.c.org_id == query.org_id)
    if query.project_ids:
        where.append(source.c.project_id.in_(query.project_ids))
    if query.models:
        where.append(source.c.model.in_(query.models))
    if query.key_ids:
        if "key_id" not in source.c:
            raise ReportQueryError("api_key_ids cannot filter refusals; they are counted by project.", "api_key_ids")
        where.append(source.c.key_id.in_(query.key_ids))
    return where


def _grouped(connection: Connection, asked: _Asked) -> list[Mapping[str, Any]]:
    minute, span = asked.source.c.minute_s, asked.span
    bucket = (minute - minute % span.width_s).label("_bucket_s")
    columns = [asked.source.c[column].label(name) for name, column in asked.groups.items()]
    query = sa.select(bucket, *columns, *asked.sums)
    query = query.where(minute >= span.start_s, minute < span.end_s, *asked.where)
    query = query.group_by(bucket, *columns).order_by(bucket, *columns).limit(_MAX_RESULT_COUNT + 1)
    rows = list(connection.execute(query).mappings())
    if len(rows) > _MAX_RESULT_COUNT:
        raise ReportQueryError(
            f"The answer has more than {_MAX_RESULT_COUNT} results; ask for fewer buckets or groups.", "group_by"
        )
    return [dict(row) for row in rows]


def _page(
    span: _Span, results: Iterable[tuple[Mapping[str, Any], dict[str, Any]]], complete_ns: int | None
) -> Mapping[str, Any]:
    by_bucket: dict[int, list[dict[str, Any]]] = {}
    for row, result in results:
        by_bucket.setdefault(int(row["_bucket_s"]), []).append(result)
    data = [
        {
            "object": "bucket",
            "start_time": start_s,
            "end_time": end_s,
            "results": by_bucket.get(start_s // span.width_s * span.width_s, []),
        }
        for start_s, end_s in span.buckets()
    ]
    return {
        "object": "page",
        "data": data,
        "has_more": span.next_s is not None,
        "next_page": None if span.next_s is None else f"{_PAGE_PREFIX}{span.next_s}",
        # Ours: Unix seconds up to which every number here is final, null when a spool has not told.
        "complete_to": None if complete_ns is None else complete_ns // NS_PER_S,
    }


def _usage_result(row: Mapping[str, Any], groups: Mapping[str, str]) -> dict[str, Any]:
    knows_input, knows_output = int(row["input_known_count"]) > 0, int(row["output_known_count"]) > 0
    uncached, cached, written = (
        int(row[name]) if knows_input else None
        for name in ("uncached_input_tokens", "cached_input_tokens", "cache_write_tokens")
    )
    whole = None if uncached is None or cached is None or written is None else uncached + cached + written
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": whole,
        "input_uncached_tokens": uncached,
        "input_cached_tokens": cached,
        "input_cache_write_tokens": written,
        "output_tokens": int(row["output_tokens"]) if knows_output else None,
        "output_reasoning_tokens": int(row["reasoning_tokens"]) if knows_output else None,
        "num_model_requests": int(row["event_count"]),
        "num_requests_with_unknown_usage": int(row["unknown_count"]),
        "num_requests_estimated": int(row["estimated_count"]),
        **_named(row, groups, _USAGE_GROUPS),
    }


def _cost_results(row: Mapping[str, Any], groups: Mapping[str, str], *, by_line: bool) -> list[dict[str, Any]]:
    currency, unpriced = row["_currency"], int(row["unpriced_count"])
    common = {"object": "organization.costs.result", "num_requests_unpriced": unpriced}
    named = _named(row, {name: column for name, column in groups.items() if name in _COST_GROUPS}, _COST_GROUPS)
    if not currency:
        if not unpriced:
            return []
        # Usage that no book sells: that it cost nothing would be a lie.
        amount: dict[str, Any] = {"value": None, "currency": None}
        line_item = row["line_item"] if by_line else None
        return [{**common, "amount": amount, "line_item": line_item, "quantity": None, "quantity_unit": None, **named}]
    if not by_line:
        amount = _amount(
            row["amount_pico"], currency, known=unpriced < int(row["event_count"]) or row["amount_pico"] != 0
        )
        return [{**common, "amount": amount, "line_item": None, "quantity": None, "quantity_unit": None, **named}]
    tier = "" if row["_tier"] == DEFAULT_TIER else f" ({row['_tier']})"
    return [
        {
            **common,
            "amount": _amount(row[pico], currency, known=unpriced < int(row["event_count"]) or row[pico] != 0),
            "line_item": f"{row['line_item']}{tier}, {sku.value}",
            "quantity": int(row[tokens]),
            "quantity_unit": "tokens",
            **named,
        }
        for sku, tokens, pico in _SKU_COLUMNS
        if int(row[tokens]) or row[pico]
    ]


def _amount(amount_pico: int, currency: str, *, known: bool) -> dict[str, Any]:
    return {"value": decimal_text(amount_pico) if known else None, "currency": currency.lower()}


def _named(row: Mapping[str, Any], groups: Mapping[str, str], known: Mapping[str, str]) -> dict[str, Any]:
    """Every group field of the report; null where it was not grouped by, or has no value."""
    values = {name: row[name] if name in groups else None for name in known}
    return {name: None if value == "" else value for name, value in values.items()}


def _watermark(connection: Connection) -> int | None:
    """The least that any spool which is still written to, or not shipped whole, promises."""
    query = sa.select(
        sa.func.count(), sa.func.count(_OFFSET.c.complete_to_ns), sa.func.min(_OFFSET.c.complete_to_ns)
    ).where(_OFFSET.c.finished.is_(False))
    spools, told, least = connection.execute(query).one()
    return int(least) if spools and spools == told else None
