"""Admin routes of limits, model names, tenant classes and the audit log.

Owns: these routes of `admin_http`'s application. Does not own: who may call or how errors look (`admin_calls`,
`admin_edge`), and no rule about limits: they are in `catalog_sql` and `tenancy_records`.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from controlplane.adapters.admin_calls import Admin, Calls, Paging, actor_of, listing
from controlplane.adapters.admin_models import (
    AuditView,
    Deleted,
    LimitSet,
    LimitView,
    Listing,
    ModelSet,
    ModelView,
    TenantClassSet,
    TenantClassView,
)
from controlplane.adapters.tenancy_records import LimitQuery, LimitWish
from controlplane.errors import BadRequest
from controlplane.tenancy import ModelAlias, ScopeKind


def catalog_routes() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter(prefix="/admin/v1")
    routes.add_api_route("/limits", set_limit, methods=["POST"], tags=["limits"])
    routes.add_api_route("/limits", list_limits, methods=["GET"], tags=["limits"])
    routes.add_api_route("/limits/{limit_id}", show_limit, methods=["GET"], tags=["limits"])
    routes.add_api_route("/limits/{limit_id}", delete_limit, methods=["DELETE"], tags=["limits"])
    routes.add_api_route("/models", set_model, methods=["POST"], tags=["models"])
    routes.add_api_route("/models", list_models, methods=["GET"], tags=["models"])
    # Model names may hold slashes.
    routes.add_api_route("/models/{name:path}", delete_model, methods=["DELETE"], tags=["models"])
    routes.add_api_route("/tenant-classes", set_tenant_class, methods=["POST"], tags=["tenant classes"])
    routes.add_api_route("/tenant-classes", list_tenant_classes, methods=["GET"], tags=["tenant classes"])
    routes.add_api_route("/audit", list_audit, methods=["GET"], tags=["audit"])
    return routes


async def set_limit(calls: Calls, admin: Admin, wish: LimitSet) -> LimitView:
    """Make or change a limit. It is named by scope, model, dimension and period, so repeating this is safe."""
    catalog = calls.deps.catalog.acting(actor_of(admin))
    limit = LimitWish(
        wish.scope_kind, wish.scope_id, wish.dimension, wish.amount, wish.period_s, wish.burst, wish.model
    )  # fmt: skip
    return LimitView.of(await calls.change(lambda: catalog.set_limit(limit)))


async def list_limits(
    calls: Calls,
    _admin: Admin,
    query: Paging,
    scope_kind: Annotated[ScopeKind | None, Query()] = None,
    scope_id: Annotated[str | None, Query(max_length=300)] = None,
) -> Listing[LimitView]:
    """Limits in the order of creation, of one owner when both scope parameters are given."""
    if (scope_kind is None) != (scope_id is None):
        raise BadRequest("scope_kind and scope_id go together; give both or neither.", param="scope_id")
    wanted = LimitQuery(scope_kind, scope_id, query)
    page = await calls.threads.run(lambda: calls.deps.catalog.list_limits(wanted))
    return Listing(**listing([LimitView.of(limit) for limit in page.items], page.next_after))


async def show_limit(calls: Calls, _admin: Admin, limit_id: str) -> LimitView:
    """One limit."""
    return LimitView.of(await calls.threads.run(lambda: calls.deps.catalog.limit(limit_id)))


async def delete_limit(calls: Calls, admin: Admin, limit_id: str) -> Deleted:
    """Take a limit away."""
    catalog = calls.deps.catalog.acting(actor_of(admin))
    await calls.change(lambda: catalog.delete_limit(limit_id))
    return Deleted(id=limit_id, object="limit")


async def set_model(calls: Calls, admin: Admin, wish: ModelSet) -> ModelView:
    """Make or change a model name that tenants may ask for."""
    catalog = calls.deps.catalog.acting(actor_of(admin))
    alias = ModelAlias(wish.name, wish.served, wish.default_max_output_tokens, wish.context_tokens)
    return ModelView.of(await calls.change(lambda: catalog.set_model(alias)))


async def list_models(calls: Calls, _admin: Admin) -> Listing[ModelView]:
    """Every model name."""
    models = await calls.threads.run(calls.deps.catalog.list_models)
    return Listing(**listing([ModelView.of(alias) for alias in models], None))


async def delete_model(calls: Calls, admin: Admin, name: str) -> Deleted:
    """Take a model name away."""
    catalog = calls.deps.catalog.acting(actor_of(admin))
    await calls.change(lambda: catalog.delete_model(name))
    return Deleted(id=name, object="model_alias")


async def set_tenant_class(calls: Calls, admin: Admin, wish: TenantClassSet) -> TenantClassView:
    """Make or change a tenant class."""
    catalog = calls.deps.catalog.acting(actor_of(admin))
    return TenantClassView.of(await calls.change(lambda: catalog.set_tenant_class(wish.name, wish.outage_policy)))


async def list_tenant_classes(calls: Calls, _admin: Admin) -> Listing[TenantClassView]:
    """Every tenant class."""
    classes = await calls.threads.run(calls.deps.catalog.list_tenant_classes)
    return Listing(**listing([TenantClassView.of(item) for item in classes], None))


async def list_audit(calls: Calls, _admin: Admin, query: Paging) -> Listing[AuditView]:
    """Who did what, newest first, of one org when `org_id` is given."""
    page = await calls.threads.run(lambda: calls.deps.catalog.list_audit(query))
    return Listing(**listing([AuditView.of(line) for line in page.items], page.next_after))
