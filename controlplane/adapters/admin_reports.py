"""Routes that read: usage, costs, refusals, the last reconcile, routing decisions; for admins, and a tenant's own org.

Owns: the query parameters (OpenAI's, with `[]` and without) and the rule that a tenant sees its own org only. Does not
own: the numbers and which buckets and groups there are (`Reports`, out of billing's roll-ups), or what a decision says
(`router`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from billing.errors import ReportQueryError
from controlplane.adapters.admin_calls import Admin, ApiKey, Authorization, Calls, ReportQuery
from controlplane.adapters.admin_edge import REPORT_TIMEOUT_S, DeniedCall
from controlplane.adapters.admin_models import ReconcileView
from controlplane.adapters.tenancy_tx import faults
from controlplane.errors import BadRequest
from controlplane.tenancy import DenialReason, Principal, Scope

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
    routes.add_api_route("/admin/v1/reconcile", last_reconcile, methods=["GET"], tags=["reports"])
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
    if end_time is not None and end_time <= start_time:
        raise BadRequest("end_time must be later than start_time.", param="end_time")
    return ReportQuery(
        org_id=None,
        start_time_s=start_time,
        end_time_s=end_time,
        bucket_width=bucket_width,
        group_by=_many(request, "group_by"),
        project_ids=_many(request, "project_ids"),
        key_ids=_many(request, "api_key_ids"),
        models=_many(request, "models"),
        limit_count=limit,
        page=page,
    )


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
    """Costs by time, of one org or all. Amounts are exact decimal strings."""
    return await _report(calls, calls.deps.reports.costs, await _of_org(calls, query, org_id))


async def any_refusals(calls: Calls, _admin: Admin, query: Asked, org_id: OrgFilter = None) -> dict[str, Any]:
    """Refused requests by time, of one org or all."""
    return await _report(calls, calls.deps.reports.refusals, await _of_org(calls, query, org_id))


async def last_reconcile(calls: Calls, _admin: Admin) -> ReconcileView:
    """What the worker's last comparison of the books found: exact or not, when, and what is in quarantine."""
    reconciles = calls.deps.reconciles
    result = None if reconciles is None else await reconciles.last()
    if result is None:
        raise BadRequest(
            "The books have not been compared yet: inferplane worker does it once an hour.",
            code="reconcile_not_found",
            status=404,
        )
    return ReconcileView.of(result, int(calls.deps.unix_s() * 1e9))


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
    def work() -> dict[str, Any]:
        try:
            with faults():
                return dict(report(query))
        except ReportQueryError as fault:
            raise BadRequest(str(fault), param=fault.param) from None

    return await calls.threads.run(work, REPORT_TIMEOUT_S)


def _daily(query: ReportQuery) -> ReportQuery:
    if query.bucket_width != "1d":
        raise BadRequest("bucket_width of costs is 1d; money is reported by day.", param="bucket_width")
    return query
