"""Routes that read: usage, costs, refusals, routing decisions; for admins, and for a tenant about its own org.

Owns: the query parameters (OpenAI's, with `[]` and without) and the rule that a tenant sees its own org only. Does not
own: the numbers (`Reports`, out of billing's roll-ups) or what a decision says (`router`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from controlplane.adapters.admin_calls import Admin, ApiKey, Authorization, Calls, ReportQuery
from controlplane.adapters.admin_edge import REPORT_TIMEOUT_S, DeniedCall
from controlplane.errors import BadRequest
from controlplane.tenancy import DenialReason, Principal, Scope

# Bucket widths of OpenAI's usage API and the pages they allow: width -> (default, maximum) buckets (gateway 2.9).
_BUCKETS = {"1m": (60, 1_440), "1h": (24, 168), "1d": (7, 31)}
# What OpenAI's endpoints group by, and the reason of a refusal; admins may also group by org.
_GROUPS = {
    "usage": ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier"),
    "costs": ("project_id", "api_key_id", "line_item"),
    "refusals": ("project_id", "model", "reason"),
}
# Ids of one filter; more is a mistake.
_MAX_FILTER_COUNT = 100
_MAX_UNIX_S = 9_223_372_036


def report_routes() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    routes.add_api_route("/v1/organization/usage/completions", own_usage, methods=["GET"], tags=["own org"])
    routes.add_api_route("/v1/organization/costs", own_costs, methods=["GET"], tags=["own org"])
    routes.add_api_route("/admin/v1/usage", any_usage, methods=["GET"], tags=["reports"])
    routes.add_api_route("/admin/v1/costs", any_costs, methods=["GET"], tags=["reports"])
    routes.add_api_route("/admin/v1/refusals", any_refusals, methods=["GET"], tags=["reports"])
    routes.add_api_route("/admin/v1/decisions/{request_id}", show_decision, methods=["GET"], tags=["reports"])
    return routes


def _reader(calls: Calls, authorization: Authorization = None, x_api_key: ApiKey = None) -> Principal:
    return calls.caller(authorization, x_api_key, Scope.USAGE_READ)


def _explainer(calls: Calls, authorization: Authorization = None, x_api_key: ApiKey = None) -> Principal:
    """A caller that may see decisions: an admin all of them, `explain` those of its own org."""
    try:
        return calls.caller(authorization, x_api_key, Scope.ADMIN)
    except DeniedCall as denied:
        if denied.denied.reason is not DenialReason.MISSING_SCOPE:
            raise
    return calls.caller(authorization, x_api_key, Scope.EXPLAIN)


Reader = Annotated[Principal, Depends(_reader)]
Explainer = Annotated[Principal, Depends(_explainer)]


def report_query(
    *,
    request: Request,
    start_time: Annotated[int, Query(ge=0, le=_MAX_UNIX_S, description="Unix seconds, inclusive.")],
    end_time: Annotated[int | None, Query(ge=0, le=_MAX_UNIX_S, description="Unix seconds, exclusive.")] = None,
    bucket_width: Annotated[str, Query(description="1m, 1h or 1d")] = "1d",
    limit: Annotated[int | None, Query(ge=1, description="Buckets: 1d 7 (31), 1h 24 (168), 1m 60 (1440).")] = None,
    page: Annotated[str | None, Query(max_length=200, description="`next_page` of the page before.")] = None,
) -> ReportQuery:
    """OpenAI's parameters; `group_by`, `project_ids`, `api_key_ids` and `models` may be repeated, with `[]` or not."""
    if bucket_width not in _BUCKETS:
        raise BadRequest(
            f"bucket_width is {bucket_width[:20]!r}; expected one of {', '.join(_BUCKETS)}.", param="bucket_width"
        )
    usual, most = _BUCKETS[bucket_width]
    if limit is not None and limit > most:
        raise BadRequest(f"limit is {limit}; at most {most} buckets of {bucket_width} fit a page.", param="limit")
    if end_time is not None and end_time <= start_time:
        raise BadRequest("end_time must be later than start_time.", param="end_time")
    group_by = _many(request, "group_by")
    known = _groups_of(request.url.path)
    for name in group_by:
        if name not in known:
            raise BadRequest(f"group_by is {name[:40]!r}; expected some of {', '.join(known)}.", param="group_by")
    return ReportQuery(
        org_id=None,
        start_time_s=start_time,
        end_time_s=end_time,
        bucket_width=bucket_width,
        group_by=group_by,
        project_ids=_many(request, "project_ids"),
        key_ids=_many(request, "api_key_ids"),
        models=_many(request, "models"),
        limit_count=limit or usual,
        page=page,
    )


def _groups_of(path: str) -> tuple[str, ...]:
    report = "costs" if path.endswith("/costs") else "refusals" if path.endswith("/refusals") else "usage"
    return (*_GROUPS[report], "org_id") if path.startswith("/admin/") else _GROUPS[report]


def _many(request: Request, name: str) -> tuple[str, ...]:
    values = (*request.query_params.getlist(name), *request.query_params.getlist(f"{name}[]"))
    if len(values) > _MAX_FILTER_COUNT:
        raise BadRequest(f"{name} has {len(values)} values; at most {_MAX_FILTER_COUNT} are taken.", param=name)
    return values


Asked = Annotated[ReportQuery, Depends(report_query)]
OrgFilter = Annotated[str | None, Query(max_length=200, description="Id or name; without it, every org.")]


async def own_usage(calls: Calls, reader: Reader, query: Asked) -> dict[str, Any]:
    """Tokens and requests of the caller's org by time: OpenAI's completions usage."""
    return await _report(calls, calls.deps.reports.usage, replace(query, org_id=reader.org_id))


async def own_costs(calls: Calls, reader: Reader, query: Asked) -> dict[str, Any]:
    """Costs of the caller's org by day: OpenAI's costs. Amounts are exact decimal strings."""
    return await _report(calls, calls.deps.reports.costs, replace(_daily(query), org_id=reader.org_id))


async def any_usage(calls: Calls, _admin: Admin, query: Asked, org_id: OrgFilter = None) -> dict[str, Any]:
    """Tokens and requests by time, of one org or all."""
    return await _report(calls, calls.deps.reports.usage, await _of_org(calls, query, org_id))


async def any_costs(calls: Calls, _admin: Admin, query: Asked, org_id: OrgFilter = None) -> dict[str, Any]:
    """Costs by day, of one org or all. Amounts are exact decimal strings."""
    return await _report(calls, calls.deps.reports.costs, await _of_org(calls, _daily(query), org_id))


async def any_refusals(calls: Calls, _admin: Admin, query: Asked, org_id: OrgFilter = None) -> dict[str, Any]:
    """Refused requests by time, of one org or all."""
    return await _report(calls, calls.deps.reports.refusals, await _of_org(calls, query, org_id))


async def show_decision(calls: Calls, caller: Explainer, request_id: str) -> dict[str, Any]:
    """Why the router chose as it did for a request that asked to be explained; kept for an hour."""
    org_id = None if Scope.ADMIN in caller.scopes else str(caller.org_id)
    record = await calls.deps.decisions.get(request_id, org_id)
    if record is None:
        raise BadRequest(
            "No such decision: it was not asked for, is older than an hour, or is not yours.",
            param="request_id",
            code="decision_not_found",
            status=404,
        )
    return dict(record)


async def _of_org(calls: Calls, query: ReportQuery, org: str | None) -> ReportQuery:
    if org is None:
        return query
    record = await calls.threads.run(lambda: calls.deps.store.org(org))
    return replace(query, org_id=record.org_id)


async def _report(
    calls: Calls, report: Callable[[ReportQuery], Mapping[str, Any]], query: ReportQuery
) -> dict[str, Any]:
    return dict(await calls.threads.run(lambda: report(query), REPORT_TIMEOUT_S))


def _daily(query: ReportQuery) -> ReportQuery:
    if query.bucket_width != "1d":
        raise BadRequest("bucket_width of costs is 1d; money is reported by day.", param="bucket_width")
    return query
