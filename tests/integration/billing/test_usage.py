"""The usage, cost and refusal reports on both databases: OpenAI's shape, exact numbers, pages that add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from billing.adapters.bill_sql import bills
from billing.adapters.ingest import Ingest, IngestBatch, SpoolOffset, SpoolRefusal
from billing.adapters.usage_sql import SqlReports, UsageQuery, complete_to_ns
from billing.errors import ReportQueryError
from billing.ledger import NS_PER_S
from billing.money import decimal_text, pico_of
from billing.usage_event import Outcome, Refusal
from tests.fakes.ledger_events import NOON_NS, usage_event

NOON_S = NOON_NS // NS_PER_S
HOUR_S = 3_600


def event(number: int, **changed: Any) -> Any:
    """Event `number` ends `number` minutes after the start of the day, unless it says otherwise."""
    return usage_event(number, **{"ended_ns": NOON_NS + number * 60 * NS_PER_S, **changed})


def results(page: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [result for bucket in page["data"] for result in bucket["results"]]


def everything(ask: Callable[[UsageQuery], Mapping[str, Any]], query: UsageQuery) -> list[dict[str, Any]]:
    """Every bucket of every page."""
    buckets: list[dict[str, Any]] = []
    page: str | None = None
    while True:
        fields = {name: getattr(query, name) for name in query.__dataclass_fields__}
        answer = ask(UsageQuery(**{**fields, "page": page}))
        buckets += answer["data"]
        page = answer["next_page"]
        assert answer["has_more"] is (page is not None)
        if page is None:
            return buckets


@pytest.fixture
def reports(books: Engine) -> SqlReports:
    return SqlReports(books, unix_s=lambda: NOON_S + 2 * HOUR_S)


def test_a_bucket_has_openais_fields_and_input_is_the_sum_of_its_parts(books: Engine, reports: SqlReports) -> None:
    Ingest(books).write(IngestBatch([event(1), event(2, cache_write_tokens=8), event(3, billable=False)]))
    page = reports.usage(UsageQuery(NOON_S, org_id="acme"))
    assert page["object"] == "page"
    assert [(bucket["start_time"], bucket["end_time"]) for bucket in page["data"]] == [
        (NOON_S, NOON_S + 2 * HOUR_S + 60)
    ]
    (result,) = results(page)
    assert result == {
        "object": "organization.usage.completions.result",
        "input_tokens": 2 * 1_512 + 8,
        "input_uncached_tokens": 2_000,
        "input_cached_tokens": 1_024,
        "input_cache_write_tokens": 8,
        "output_tokens": 200,
        "output_reasoning_tokens": 0,
        "num_model_requests": 2,
        "num_requests_with_unknown_usage": 0,
        "num_requests_estimated": 0,
        **dict.fromkeys(("org_id", "project_id", "user_id", "api_key_id", "model", "batch", "service_tier")),
    }


def test_usage_is_grouped_and_filtered(books: Engine, reports: SqlReports) -> None:
    Ingest(books).write(
        IngestBatch(
            [
                event(1, project_id="p1", user="u1", batch_id="b", tier_served="flex"),
                event(2, project_id="p2", key_id="k2"),
                event(3, org_id="zeta"),
            ]
        )
    )
    names = ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier")
    mine = results(reports.usage(UsageQuery(NOON_S, org_id="acme", group_by=names)))
    assert [tuple(result[name] for name in names) for result in mine] == [
        ("p1", "u1", "key_1", "llama", True, "flex"),
        ("p2", None, "k2", "llama", False, "default"),
    ]
    assert [type(result["batch"]) for result in mine] == [bool, bool]
    everyone = results(reports.usage(UsageQuery(NOON_S, group_by=("org_id",))))
    assert [(result["org_id"], result["num_model_requests"]) for result in everyone] == [("acme", 2), ("zeta", 1)]
    for chosen in ({"project_ids": ("p2",)}, {"key_ids": ("k2",)}, {"models": ("llama",), "project_ids": ("p2",)}):
        (one,) = results(reports.usage(UsageQuery(NOON_S, org_id="acme", **chosen)))  # type: ignore[arg-type]  # each value has its field's type
        assert one["num_model_requests"] == 1


@pytest.mark.parametrize(("width", "limit"), [("1m", 7), ("1m", 1_440), ("1h", 1), ("1h", 100), ("1d", 1)])
def test_pages_of_any_size_add_up_to_the_same_total(books: Engine, reports: SqlReports, width: str, limit: int) -> None:
    Ingest(books).write(IngestBatch([event(number) for number in (1, 2, 59, 60, 61, 119)]))
    query = UsageQuery(
        NOON_S, NOON_S + 2 * HOUR_S, bucket_width=width, limit_count=min(limit, 31) if width == "1d" else limit
    )
    buckets = everything(reports.usage, query)
    assert sum(result["output_tokens"] for bucket in buckets for result in bucket["results"]) == 600
    edges = [bucket["start_time"] for bucket in buckets] + [buckets[-1]["end_time"]]
    assert edges == sorted(set(edges))
    assert [bucket["end_time"] for bucket in buckets] == edges[1:]
    money = everything(reports.costs, query)
    total = sum(pico_of(result["amount"]["value"]) for bucket in money for result in bucket["results"])
    assert total == 6 * (3_000_000_000 + 512 * 300_000 + 1_500_000_000)


def test_a_span_that_starts_and_ends_inside_a_bucket_counts_only_its_minutes(
    books: Engine, reports: SqlReports
) -> None:
    Ingest(books).write(IngestBatch([event(number) for number in (9, 10, 69, 70)]))
    page = reports.usage(UsageQuery(NOON_S + 600, NOON_S + 70 * 60, bucket_width="1h"))
    assert [(b["start_time"] - NOON_S, b["end_time"] - NOON_S) for b in page["data"]] == [(600, 3_600), (3_600, 4_200)]
    assert [result["num_model_requests"] for result in results(page)] == [1, 1]


def test_unknown_counts_are_null_and_counted_never_zero(books: Engine, reports: SqlReports) -> None:
    lost = {"outcome": Outcome.CRASHED, "estimated": True, "uncached_input_tokens": None, "cached_input_tokens": None}
    Ingest(books).write(IngestBatch([event(1, project_id="dark", output_tokens=None, **lost), event(2, **lost)]))
    dark, known = results(reports.usage(UsageQuery(NOON_S, group_by=("project_id",))))
    assert (dark["input_tokens"], dark["output_tokens"], dark["num_requests_with_unknown_usage"]) == (None, None, 1)
    assert (known["input_tokens"], known["output_tokens"], known["num_requests_estimated"]) == (None, 100, 1)


def test_costs_are_exact_decimal_strings_by_line_item(books: Engine, reports: SqlReports) -> None:
    Ingest(books).write(IngestBatch([event(1), event(2, tier_served="flex", output_tokens=1)]))
    (whole,) = results(reports.costs(UsageQuery(NOON_S)))
    assert whole["amount"] == {"value": "0.0069212", "currency": "usd"} or whole["amount"]["currency"] == "usd"
    lines = results(reports.costs(UsageQuery(NOON_S, group_by=("line_item", "project_id"))))
    assert [(line["line_item"], line["quantity"], line["amount"]["value"]) for line in lines] == [
        ("llama, input", 1_000, "0.003"),
        ("llama, cached_input", 512, "0.0001536"),
        ("llama, output", 100, "0.0015"),
        ("llama (flex), input", 1_000, "0.0015"),
        ("llama (flex), cached_input", 512, "0.000768"),
        ("llama (flex), output", 1, "0.000007500001"),
    ]
    assert decimal_text(sum(pico_of(line["amount"]["value"]) for line in lines)) == whole["amount"]["value"]
    assert {(line["project_id"], line["quantity_unit"]) for line in lines} == {("web", "tokens")}


def test_usage_without_a_price_costs_null_not_zero(books: Engine, reports: SqlReports) -> None:
    Ingest(books).write(IngestBatch([event(1, price_version="gone")]))
    (result,) = results(reports.costs(UsageQuery(NOON_S)))
    assert result["amount"] == {"value": None, "currency": None}
    assert result["num_requests_unpriced"] == 1


def test_refusals_are_reported_by_reason(books: Engine, reports: SqlReports) -> None:
    told = [
        SpoolRefusal(Refusal("acme", "web", "llama", reason, NOON_NS, 2), "n", "1")
        for reason in ("rate", "size", "rate")
    ]
    Ingest(books).write(IngestBatch(refusals=told))
    found = results(reports.refusals(UsageQuery(NOON_S, org_id="acme", group_by=("reason",))))
    assert [(result["reason"], result["refusal_count"]) for result in found] == [("rate", 4), ("size", 2)]
    with pytest.raises(ReportQueryError, match="api_key_ids"):
        reports.refusals(UsageQuery(NOON_S, key_ids=("k",)))


def test_the_watermark_is_what_every_running_spool_promises(books: Engine, reports: SqlReports) -> None:
    assert complete_to_ns(books) is None
    ingest = Ingest(books)
    ingest.write(
        IngestBatch(offsets=[SpoolOffset("a", "1", 1, 0, NOON_NS + 5 * NS_PER_S), SpoolOffset("b", "1", 1, 0, NOON_NS)])
    )
    assert reports.usage(UsageQuery(NOON_S))["complete_to"] == NOON_S
    ingest.write(IngestBatch(offsets=[SpoolOffset("b", "1", 1, 9, None, finished=True)]))
    assert complete_to_ns(books) == NOON_NS + 5 * NS_PER_S
    ingest.write(IngestBatch(offsets=[SpoolOffset("c", "1", 1, 0)]))
    assert reports.costs(UsageQuery(NOON_S))["complete_to"] is None


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"bucket_width": "2d"}, "bucket_width"),
        ({"limit_count": 0}, "limit"),
        ({"limit_count": 32}, "limit"),
        ({"group_by": ("colour",)}, "group_by"),
        ({"page": "page_1"}, "page"),
        ({"page": "3; DROP TABLE"}, "page"),
    ],
)
def test_a_query_that_cannot_be_answered_names_its_parameter(
    reports: SqlReports, wrong: dict[str, Any], param: str
) -> None:
    with pytest.raises(ReportQueryError) as raised:
        reports.usage(UsageQuery(NOON_S, **wrong))
    assert raised.value.param == param


def test_a_bill_rounds_each_line_once_and_says_what_rounding_made(books: Engine) -> None:
    Ingest(books).write(IngestBatch([event(number, output_tokens=333) for number in range(1, 8)]))
    (bill,) = bills(books, "acme", NOON_S, NOON_S + HOUR_S)
    assert [(line.sku, line.amount_exact, line.amount) for line in bill.lines] == [
        ("input", "0.021", "0.02"),
        ("cached_input", "0.0010752", "0.00"),
        ("output", "0.034965", "0.03"),
    ]
    assert (bill.total_exact, bill.total, bill.rounding) == ("0.0570402", "0.06", "0.01")
    assert bills(books, "nobody", NOON_S, NOON_S + HOUR_S) == []
