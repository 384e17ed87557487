"""The admin API as one ASGI application: `/admin/v1/*`, and OpenAI's usage and cost endpoints for a tenant's own org.

Owns: the composition of the routes and the OpenAPI document. Does not own: routes (`admin_tenancy`, `admin_catalog`,
`admin_reports`), ports and callers (`admin_calls`), errors, bodies and threads (`admin_edge`), the JSON
(`admin_models`). It exists so that the gateway mounts one application and knows nothing of what is in it.
"""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer

from controlplane.adapters.admin_calls import AdminCalls, AdminDeps
from controlplane.adapters.admin_catalog import catalog_routes
from controlplane.adapters.admin_edge import AdminEdge, install_errors
from controlplane.adapters.admin_models import ErrorAnswer
from controlplane.adapters.admin_prices import price_routes
from controlplane.adapters.admin_reports import report_routes
from controlplane.adapters.admin_tenancy import tenancy_routes

__all__ = ["AdminDeps", "build_admin_app"]


def build_admin_app(deps: AdminDeps) -> FastAPI:
    """The admin API as an ASGI application. Serve it under its full paths; `openapi` is at /admin/v1/openapi.json."""
    app = FastAPI(
        title="Inferplane admin API",
        description="Orgs, projects, keys, limits, models, prices, usage and costs of an Inferplane cluster.",
        version="1",
        openapi_url="/admin/v1/openapi.json",
        docs_url=None,  # the pages load scripts from a CDN, which a private cluster cannot and should not
        redoc_url=None,
        responses={code: {"model": ErrorAnswer} for code in (400, 401, 403, 404, 405, 409, 413, 422, 500, 503)},
        dependencies=[Depends(HTTPBearer(auto_error=False, description="A key with the scope the route needs."))],
    )
    app.state.calls = AdminCalls(deps)
    install_errors(app)
    app.add_middleware(AdminEdge)
    for router in (tenancy_routes(), catalog_routes(), price_routes(), report_routes()):
        app.include_router(router)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign] # FastAPI's documented way to change the schema
    return app


def _schema(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document. FastAPI writes its own 422 body into it, which this API never sends."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for unused in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(unused, None)
        app.openapi_schema = schema
    return app.openapi_schema
