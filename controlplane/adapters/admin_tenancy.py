"""Admin routes of orgs, projects and keys.

Owns: these routes of `admin_http`'s application. Does not own: who may call or how errors look (`admin_calls`,
`admin_edge`), and no rule about what is good input: those are in `keys_sql` and `tenancy_records`.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from controlplane.adapters.admin_calls import REPEATABLE, Admin, Calls, Paging, actor_of, idempotency_of, listing
from controlplane.adapters.admin_models import (
    KeyCreate,
    KeyRotate,
    KeyView,
    Listing,
    NewKeyView,
    OrgChange,
    OrgView,
    OrgWish,
    ProjectView,
    ProjectWish,
)
from controlplane.adapters.tenancy_records import KeyWish


def tenancy_routes() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    for part in (_org_routes(), _project_routes(), _key_routes()):
        routes.include_router(part)
    return routes


def _org_routes() -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/orgs", tags=["orgs"])
    routes.add_api_route("", create_org, methods=["POST"], status_code=201, dependencies=REPEATABLE)
    routes.add_api_route("", list_orgs, methods=["GET"])
    routes.add_api_route("/{org_id}", show_org, methods=["GET"])
    routes.add_api_route("/{org_id}", change_org, methods=["PATCH"])
    routes.add_api_route("/{org_id}", revoke_org, methods=["DELETE"])
    routes.add_api_route("/{org_id}/restore", restore_org, methods=["POST"])
    return routes


async def create_org(request: Request, response: Response, calls: Calls, admin: Admin, wish: OrgWish) -> OrgView:
    """Make an org. The same name again gives the same org with status 200."""
    store, once = calls.deps.store.acting(actor_of(admin)), idempotency_of(request, admin, wish)
    made = await calls.change(lambda: store.create_org(wish.name, wish.tenant_class, idempotency=once))
    response.status_code = 201 if made.created else 200
    return OrgView.of(made.record)


async def list_orgs(calls: Calls, _admin: Admin, query: Paging) -> Listing[OrgView]:
    """Orgs in the order of creation."""
    page = await calls.threads.run(lambda: calls.deps.store.list_orgs(query))
    return Listing(**listing([OrgView.of(org) for org in page.items], page.next_after))


async def show_org(calls: Calls, _admin: Admin, org_id: str) -> OrgView:
    """One org, by id or name."""
    return OrgView.of(await calls.threads.run(lambda: calls.deps.store.org(org_id)))


async def change_org(calls: Calls, admin: Admin, org_id: str, wish: OrgChange) -> OrgView:
    """Put an org into a tenant class."""
    catalog = calls.deps.catalog.acting(actor_of(admin))
    return OrgView.of(await calls.change(lambda: catalog.set_org_class(org_id, wish.tenant_class)))


async def revoke_org(calls: Calls, admin: Admin, org_id: str) -> OrgView:
    """Shut an org out with all its projects and keys, on every node within 2 s. It can be restored."""
    store = calls.deps.store.acting(actor_of(admin))
    return OrgView.of(await calls.change(lambda: store.revoke_org(org_id)))


async def restore_org(calls: Calls, admin: Admin, org_id: str) -> OrgView:
    """Let a revoked org in again."""
    store = calls.deps.store.acting(actor_of(admin))
    return OrgView.of(await calls.change(lambda: store.restore_org(org_id)))


def _project_routes() -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/projects", tags=["projects"])
    routes.add_api_route("", create_project, methods=["POST"], status_code=201, dependencies=REPEATABLE)
    routes.add_api_route("", list_projects, methods=["GET"])
    routes.add_api_route("/{project_id}", show_project, methods=["GET"])
    routes.add_api_route("/{project_id}", revoke_project, methods=["DELETE"])
    routes.add_api_route("/{project_id}/restore", restore_project, methods=["POST"])
    return routes


async def create_project(
    request: Request, response: Response, calls: Calls, admin: Admin, wish: ProjectWish
) -> ProjectView:
    """Make a project of an org. The same name again gives the same project with status 200."""
    store, once = calls.deps.store.acting(actor_of(admin)), idempotency_of(request, admin, wish)
    made = await calls.change(lambda: store.create_project(wish.org_id, wish.name, idempotency=once))
    response.status_code = 201 if made.created else 200
    return ProjectView.of(made.record)


async def list_projects(calls: Calls, _admin: Admin, query: Paging) -> Listing[ProjectView]:
    """Projects in the order of creation."""
    page = await calls.threads.run(lambda: calls.deps.store.list_projects(query))
    return Listing(**listing([ProjectView.of(project) for project in page.items], page.next_after))


async def show_project(calls: Calls, _admin: Admin, project_id: str) -> ProjectView:
    """One project."""
    return ProjectView.of(await calls.threads.run(lambda: calls.deps.store.project(project_id)))


async def revoke_project(calls: Calls, admin: Admin, project_id: str) -> ProjectView:
    """Shut a project out with all its keys, on every node within 2 s. It can be restored."""
    store = calls.deps.store.acting(actor_of(admin))
    return ProjectView.of(await calls.change(lambda: store.revoke_project(project_id)))


async def restore_project(calls: Calls, admin: Admin, project_id: str) -> ProjectView:
    """Let a revoked project in again."""
    store = calls.deps.store.acting(actor_of(admin))
    return ProjectView.of(await calls.change(lambda: store.restore_project(project_id)))


def _key_routes() -> APIRouter:
    routes = APIRouter(prefix="/admin/v1/keys", tags=["keys"])
    routes.add_api_route("", create_key, methods=["POST"], status_code=201, dependencies=REPEATABLE)
    routes.add_api_route("", list_keys, methods=["GET"])
    routes.add_api_route("/{key_id}", show_key, methods=["GET"])
    routes.add_api_route("/{key_id}", revoke_key, methods=["DELETE"])
    routes.add_api_route("/{key_id}/rotate", rotate_key, methods=["POST"], status_code=201, dependencies=REPEATABLE)
    return routes


async def create_key(request: Request, response: Response, calls: Calls, admin: Admin, wish: KeyCreate) -> NewKeyView:
    """Make a key. Its secret is in this answer and nowhere else; other nodes let it in within 2 s."""
    store, once = calls.deps.store.acting(actor_of(admin)), idempotency_of(request, admin, wish)
    models = None if wish.models is None else tuple(wish.models)
    key = KeyWish(wish.name, tuple(wish.scopes), models, wish.expires_in_s)
    new = await calls.change(lambda: store.create_key(wish.project_id, key, idempotency=once))
    response.status_code = 201 if new.secret is not None else 200
    return NewKeyView.made(new)


async def list_keys(calls: Calls, _admin: Admin, query: Paging) -> Listing[KeyView]:
    """Keys in the order of creation, revoked ones included."""
    page = await calls.threads.run(lambda: calls.deps.store.list_keys(query))
    return Listing(**listing([KeyView.of(key) for key in page.items], page.next_after))


async def show_key(calls: Calls, _admin: Admin, key_id: str) -> KeyView:
    """One key, by id or public prefix."""
    return KeyView.of(await calls.threads.run(lambda: calls.deps.store.key(key_id)))


async def revoke_key(calls: Calls, admin: Admin, key_id: str) -> KeyView:
    """End a key for good, on every node within 2 s."""
    store = calls.deps.store.acting(actor_of(admin))
    return KeyView.of(await calls.change(lambda: store.revoke_key(key_id)))


async def rotate_key(
    *, request: Request, response: Response, calls: Calls, admin: Admin, key_id: str, wish: KeyRotate
) -> NewKeyView:  # fmt: skip
    """Make a successor with the same rights and limits; the old key ends after the overlap."""
    store, once = calls.deps.store.acting(actor_of(admin)), idempotency_of(request, admin, wish)
    new = await calls.change(lambda: store.rotate_key(key_id, wish.overlap_s, idempotency=once))
    response.status_code = 201 if new.secret is not None else 200
    return NewKeyView.made(new)
