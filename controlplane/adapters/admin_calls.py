"""What every admin route stands on: the ports, who calls, how a change runs, paging and Idempotency-Keys.

Owns: `AdminDeps` (the ports of the admin API), `AdminCalls`, and the parameters that routes share. Does not own: the
routes (`admin_tenancy`, `admin_catalog`, `admin_reports`), the application (`admin_http`), errors (`admin_edge`).

Scopes: `admin` for everything under `/admin/v1`, for the whole cluster; `usage:read` for one's own org's usage and
costs; `explain` for one's own org's routing decisions. What belongs to another org is not found (404), never forbidden:
the answer must not tell whether it exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Protocol

from fastapi import Depends, Header, Query, Request
from pydantic import BaseModel

from billing.pricing import PriceBook
from controlplane.adapters.admin_edge import DeniedCall, SqlThreads
from controlplane.adapters.admin_reconcile import ReconcileResult
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.key_secret import digest_key
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import MAX_PAGE_COUNT, Idempotency, ListQuery
from controlplane.errors import BadRequest
from controlplane.tenancy import Access, Denied, Principal, Scope, Snapshot, authorize

# How long a change waits for this node's own feed before it is answered, so that what was made works here at once.
_OWN_FEED_WAIT_S = 0.25
# The IETF draft names no bound; this one is Stripe's and keeps a hash input sane.
_MAX_IDEMPOTENCY_CHARS = 255


@dataclass(frozen=True, slots=True)
class ReportQuery:
    """What a report shall count. `org_id` None: every org (admins only). Times are Unix seconds, end exclusive."""

    org_id: str | None
    start_time_s: int
    end_time_s: int | None
    bucket_width: str
    group_by: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    limit_count: int | None = None
    page: str | None = None


class Keys(Protocol):
    """The feed of this process."""

    @property
    def snapshot(self) -> Snapshot: ...
    @property
    def allowed_age_s(self) -> float: ...
    async def caught_up(self, timeout_s: float) -> bool: ...


class Decisions(Protocol):
    """Explained routing decisions."""

    async def get(self, request_id: str, org_id: str | None) -> Mapping[str, Any] | None: ...


class Reports(Protocol):
    """Usage, costs and refusals out of the roll-ups: blocking. Each gives the JSON of OpenAI's page objects."""

    def usage(self, query: ReportQuery) -> Mapping[str, Any]: ...
    def costs(self, query: ReportQuery) -> Mapping[str, Any]: ...
    def refusals(self, query: ReportQuery) -> Mapping[str, Any]: ...


class Reconciles(Protocol):
    """The worker's last periodic reconcile."""

    async def last(self) -> ReconcileResult | None: ...


class Prices(Protocol):
    """Price books: blocking. They are immutable; `add` of the same version and content again is no change."""

    def books(self) -> list[PriceBook]: ...
    def add(self, book: PriceBook, actor: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class AdminDeps:
    """What the admin API stands on."""

    store: KeyStore
    catalog: CatalogStore
    feed: Keys
    pepper: bytes
    reports: Reports
    prices: Prices
    decisions: Decisions
    reconciles: Reconciles | None = None
    """None: this process has no place to read it from."""
    monotonic_s: Callable[[], float] = time.monotonic
    unix_s: Callable[[], float] = time.time


class AdminCalls:
    """The dependencies with what every route does with them: ask who calls, run a change, run a query."""

    def __init__(self, deps: AdminDeps) -> None:
        self.deps = deps
        self.threads = SqlThreads()

    def caller(self, authorization: str | None, api_key: str | None, scope: Scope) -> Principal:
        """The caller, if it has the scope; raises DeniedCall."""
        kind, _, presented = (authorization or "").partition(" ")
        secret = presented.strip() if kind.lower() == "bearer" else (api_key or "").strip()
        digest = digest_key(secret.encode("utf-8", "surrogateescape"), self.deps.pepper) if secret else None
        answer = authorize(
            self.deps.feed.snapshot,
            Access(digest, scope),
            self.deps.monotonic_s(),
            wall_s=self.deps.unix_s(),
            grace_s=self.deps.feed.allowed_age_s,
        )
        if isinstance(answer, Denied):
            raise DeniedCall(answer)
        return answer

    async def change(self, work: Callable[[], Any]) -> Any:
        """Run a change, then wait a moment for this node's feed, so that its effect is there when it is answered."""
        made = await self.threads.run(work)
        await self.deps.feed.caught_up(_OWN_FEED_WAIT_S)
        return made


def calls_of(request: Request) -> AdminCalls:
    """The calls object of the application that serves this request."""
    calls: AdminCalls = request.app.state.calls
    return calls


Calls = Annotated[AdminCalls, Depends(calls_of)]
Authorization = Annotated[str | None, Header(include_in_schema=False)]
ApiKey = Annotated[str | None, Header(alias="x-api-key", include_in_schema=False)]


def _admin(calls: Calls, authorization: Authorization = None, x_api_key: ApiKey = None) -> Principal:
    return calls.caller(authorization, x_api_key, Scope.ADMIN)


Admin = Annotated[Principal, Depends(_admin)]


def actor_of(principal: Principal) -> str:
    """Who acts, for the audit log."""
    return f"key:{principal.key_id}"


def idempotency_of(request: Request, principal: Principal, wish: BaseModel) -> Idempotency | None:
    """The request's Idempotency-Key, hashed, with the fingerprint of what is asked. None when it has none."""
    value = request.headers.get("idempotency-key")
    if value is None:
        return None
    value = value.strip().removeprefix('"').removesuffix('"')
    if not (1 <= len(value) <= _MAX_IDEMPOTENCY_CHARS and value.isprintable()):
        raise BadRequest(
            f"Idempotency-Key has {len(value)} characters; expected 1 to {_MAX_IDEMPOTENCY_CHARS} printable ones.",
            param="Idempotency-Key",
        )
    asked = f"{request.method} {request.url.path} {wish.model_dump_json()}"
    return Idempotency(principal.key_id, _hash(value), _hash(asked))


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _documents_idempotency(
    _key: Annotated[
        str | None,
        Header(alias="Idempotency-Key", description="Repeats of this request give what the first one made."),
    ] = None,
) -> None:
    """Puts the header into the OpenAPI document; `idempotency_of` reads it."""


# Dependencies of a creation that may be repeated under its Idempotency-Key.
REPEATABLE = (Depends(_documents_idempotency),)


def list_query(
    after: Annotated[str | None, Query(max_length=200, description="`next_after` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE_COUNT)] = 100,
    org_id: Annotated[str | None, Query(max_length=200, description="Id or name.")] = None,
    project_id: Annotated[str | None, Query(max_length=300, description="Id or ORG/PROJECT.")] = None,
) -> ListQuery:
    """The query parameters of every list."""
    return ListQuery(after, limit, org_id, project_id)


Paging = Annotated[ListQuery, Depends(list_query)]


def listing(items: list[Any], next_after: str | None) -> dict[str, Any]:
    """The fields of a `Listing`."""
    return {"data": items, "has_more": next_after is not None, "next_after": next_after}
