"""Limits, model aliases, tenant classes and the audit log in SQL.

Owns: `CatalogStore`, the second half of what the command line and the admin API change. Synchronous, as `KeyStore`,
whose transactions it shares. Does not own: the arithmetic of a limit (`controlplane.rate_limit`), or prices (billing).

A limit is named by what it limits (owner, model, dimension, period). Setting it again changes it in place and keeps
its id, so the bucket of what was already used goes on: changing a limit never hands out a fresh allowance.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from controlplane.adapters.keys_sql import find_key, find_org, find_project, page_of, paged
from controlplane.adapters.tenancy_records import (
    AuditRecord,
    LimitQuery,
    LimitWish,
    ListQuery,
    OrgRecord,
    Page,
    TenantClassRecord,
    checked_model,
    checked_name,
    no_tenant_class,
    one_of,
    whole,
)
from controlplane.adapters.tenancy_tables import AUDIT_LOG, LIMIT_ROW, MODEL_ALIAS, ORG, TENANT_CLASS
from controlplane.adapters.tenancy_tx import TenancyDb, Writing, new_id
from controlplane.errors import BadRequest
from controlplane.tenancy import Dimension, Limit, ModelAlias, OutagePolicy, ScopeKind

# Limits of one org, project or key. All limits of a request are decided in one step, on every request.
_MAX_LIMITS_COUNT = 50
# Model names that tenants may ask for; the whole table is in every node's memory.
_MAX_ALIASES_COUNT = 10_000
# No model's context is longer (the longest published are 10 million tokens); catches a mistyped unit.
_MAX_CONTEXT_TOKENS = 100_000_000
_FIRST_PAGE, _ALL_LIMITS = ListQuery(), LimitQuery()


class CatalogStore:
    """Limits, model aliases, tenant classes, audit log. Raises as `KeyStore` does."""

    def __init__(self, db: TenancyDb) -> None:
        self.db = db

    def acting(self, actor: str) -> CatalogStore:
        """The same store, with changes audited in the name of `actor`."""
        return CatalogStore(self.db.acting(actor))

    # Limits

    def set_limit(self, wish: LimitWish) -> Limit:
        """Make or change the limit of this owner, model, dimension and period; its id stays."""
        wish = wish.checked()
        with self.db.writing() as tx:
            scope_id, org_id = _owner(tx.connection, wish.scope_kind, wish.scope_id)
            column = LIMIT_ROW.c
            same = sa.and_(
                column.scope_kind == wish.scope_kind,
                column.scope_id == scope_id,
                column.model == (wish.model or ""),
                column.dimension == wish.dimension,
                column.period_s == wish.period_s,
            )
            there = tx.first(sa.select(LIMIT_ROW).where(same))
            if there is None or there.deleted_at_s is not None:
                self._check_room(tx, wish.scope_kind, scope_id)
            limit_id = new_id("lim") if there is None else str(there.id)
            values: dict[str, Any] = {"amount": wish.amount, "burst": wish.burst, "deleted_at_s": None}
            if there is not None:
                tx.change(LIMIT_ROW, column.id == limit_id, **values)
            else:
                where = {"scope_kind": wish.scope_kind, "scope_id": scope_id, "model": wish.model or ""}
                what = {"dimension": wish.dimension, "period_s": wish.period_s}
                tx.put(LIMIT_ROW, id=limit_id, **where, **what, **values)
            tx.note(
                "limit.set", limit_id, org_id, scope_id=scope_id, dimension=wish.dimension, amount=wish.amount,
                period_s=wish.period_s, burst=wish.burst, model=wish.model,
            )  # fmt: skip
            return find_limit(tx.connection, limit_id)

    def _check_room(self, tx: Writing, scope_kind: ScopeKind, scope_id: str) -> None:
        live = sa.select(sa.func.count()).where(
            LIMIT_ROW.c.scope_kind == scope_kind,
            LIMIT_ROW.c.scope_id == scope_id,
            LIMIT_ROW.c.deleted_at_s.is_(None),
        )
        if tx.connection.execute(live).scalar_one() >= _MAX_LIMITS_COUNT:
            raise BadRequest(f"This {scope_kind} has {_MAX_LIMITS_COUNT} limits already; delete one first.", status=409)

    def limit(self, limit_id: str) -> Limit:
        """The limit of this id."""
        with self.db.reading() as connection:
            return find_limit(connection, limit_id)

    def list_limits(self, query: LimitQuery = _ALL_LIMITS) -> Page[Limit]:
        """Live limits in the order of creation, of one owner when the query names one."""
        with self.db.reading() as connection:
            select = sa.select(LIMIT_ROW).where(LIMIT_ROW.c.deleted_at_s.is_(None))
            if query.scope_kind is not None and query.scope_id is not None:
                scope_id, _ = _owner(connection, query.scope_kind, query.scope_id)
                select = select.where(LIMIT_ROW.c.scope_kind == query.scope_kind, LIMIT_ROW.c.scope_id == scope_id)
            rows = page_of(connection, select, LIMIT_ROW, query.page)
        return paged([limit_from(row) for row in rows], query.page, lambda limit: limit.limit_id)

    def delete_limit(self, limit_id: str) -> Limit:
        """Take a limit away; gives what it was. BadRequest (404) when there is none."""
        with self.db.writing() as tx:
            limit = find_limit(tx.connection, limit_id)
            _, org_id = _owner(tx.connection, limit.scope_kind, limit.scope_id)
            tx.change(LIMIT_ROW, LIMIT_ROW.c.id == limit_id, deleted_at_s=tx.now_s)
            tx.note("limit.delete", limit_id, org_id, scope_id=limit.scope_id, dimension=limit.dimension.value)
            return limit

    # Model aliases

    def set_model(self, alias: ModelAlias) -> ModelAlias:
        """Make or change the name that tenants may ask for."""
        checked_model("name", alias.name)
        checked_model("served", alias.served)
        for field in ("default_max_output_tokens", "context_tokens"):
            value = getattr(alias, field)
            if value is not None:
                whole(field, value, 1, _MAX_CONTEXT_TOKENS)
        with self.db.writing() as tx:
            values = {
                "served": alias.served,
                "default_max_output_tokens": alias.default_max_output_tokens,
                "context_tokens": alias.context_tokens,
                "deleted_at_s": None,
            }
            there = tx.first(sa.select(MODEL_ALIAS.c.name).where(MODEL_ALIAS.c.name == alias.name))
            if there is None:
                count = tx.connection.execute(sa.select(sa.func.count()).select_from(MODEL_ALIAS)).scalar_one()
                whole("the number of model names", count + 1, 1, _MAX_ALIASES_COUNT)
                tx.put(MODEL_ALIAS, name=alias.name, **values)
            else:
                tx.change(MODEL_ALIAS, MODEL_ALIAS.c.name == alias.name, **values)
            tx.note("model.set", alias.name, None, served=alias.served)
        return alias

    def list_models(self) -> tuple[ModelAlias, ...]:
        """Every model name, sorted."""
        with self.db.reading() as connection:
            select = sa.select(MODEL_ALIAS).where(MODEL_ALIAS.c.deleted_at_s.is_(None)).order_by(MODEL_ALIAS.c.name)
            return tuple(alias_from(row) for row in connection.execute(select))

    def delete_model(self, name: str) -> ModelAlias:
        """Take a model name away; gives what it was. BadRequest (404) when there is none."""
        with self.db.writing() as tx:
            live = sa.and_(MODEL_ALIAS.c.name == name, MODEL_ALIAS.c.deleted_at_s.is_(None))
            row = tx.first(sa.select(MODEL_ALIAS).where(live))
            if row is None:
                raise BadRequest(f"No model name {name[:200]!r}.", param="name", code="model_not_found", status=404)
            tx.change(MODEL_ALIAS, MODEL_ALIAS.c.name == name, deleted_at_s=tx.now_s)
            tx.note("model.delete", name, None, served=row.served)
            return alias_from(row)

    # Tenant classes

    def set_tenant_class(self, name: str, outage_policy: str) -> TenantClassRecord:
        """Make or change a tenant class: what its limits do while the counter store is gone."""
        if len(checked_name("name", name)) > 64:
            raise BadRequest(f"name has {len(name)} characters; a tenant class has at most 64.", param="name")
        policy = OutagePolicy(one_of("outage_policy", outage_policy, [item.value for item in OutagePolicy]))
        with self.db.writing() as tx:
            there = tx.first(sa.select(TENANT_CLASS.c.name).where(TENANT_CLASS.c.name == name))
            if there is None:
                tx.put(TENANT_CLASS, name=name, outage_policy=policy.value)
            else:
                tx.change(TENANT_CLASS, TENANT_CLASS.c.name == name, outage_policy=policy.value)
            tx.note("tenant_class.set", name, None, outage_policy=policy.value)
        return TenantClassRecord(name, policy)

    def list_tenant_classes(self) -> tuple[TenantClassRecord, ...]:
        """Every tenant class, sorted."""
        with self.db.reading() as connection:
            rows = connection.execute(sa.select(TENANT_CLASS).order_by(TENANT_CLASS.c.name)).all()
        return tuple(TenantClassRecord(row.name, OutagePolicy(row.outage_policy)) for row in rows)

    def set_org_class(self, org_ref: str, tenant_class: str) -> OrgRecord:
        """Put an org into a tenant class."""
        with self.db.writing() as tx:
            org = find_org(tx.connection, org_ref)
            if tx.first(sa.select(TENANT_CLASS.c.name).where(TENANT_CLASS.c.name == tenant_class)) is None:
                raise no_tenant_class(tenant_class)
            tx.change(ORG, ORG.c.id == org.org_id, tenant_class=tenant_class)
            tx.note("org.class", org.org_id, org.org_id, tenant_class=tenant_class)
            return find_org(tx.connection, org.org_id)

    # Audit

    def list_audit(self, query: ListQuery = _FIRST_PAGE) -> Page[AuditRecord]:
        """The audit log, newest first, of one org when the query names one. `after` is an audit id."""
        query.checked()
        column = AUDIT_LOG.c
        select = sa.select(AUDIT_LOG).order_by(column.id.desc()).limit(query.limit_count + 1)
        if query.after is not None:
            if not (query.after.isascii() and query.after.isdigit() and len(query.after) <= 18):
                raise BadRequest("after is no id of the audit log; expected a whole number.", param="after")
            select = select.where(column.id < int(query.after))
        with self.db.reading() as connection:
            if query.org_id is not None:
                select = select.where(column.org_id == find_org(connection, query.org_id).org_id)
            rows = connection.execute(select).all()
        lines = [
            AuditRecord(row.id, row.at_s, row.actor, row.action, row.target_id, row.org_id, row.detail) for row in rows
        ]
        return paged(lines, query, lambda line: str(line.audit_id))


def find_limit(connection: Connection, limit_id: str) -> Limit:
    """The live limit of this id; BadRequest (404)."""
    live = sa.and_(LIMIT_ROW.c.id == limit_id, LIMIT_ROW.c.deleted_at_s.is_(None))
    row = connection.execute(sa.select(LIMIT_ROW).where(live)).first()
    if row is None:
        raise BadRequest(f"No limit {limit_id[:40]!r}.", param="limit_id", code="limit_not_found", status=404)
    return limit_from(row)


def limit_from(row: Row[Any]) -> Limit:
    """The limit of a row."""
    return Limit(
        limit_id=row.id,
        scope_kind=row.scope_kind,
        scope_id=row.scope_id,
        model=row.model or None,
        dimension=Dimension(row.dimension),
        amount=row.amount,
        period_s=row.period_s,
        burst=row.burst,
    )


def alias_from(row: Row[Any]) -> ModelAlias:
    """The model alias of a row."""
    return ModelAlias(row.name, row.served, row.default_max_output_tokens, row.context_tokens)


def _owner(connection: Connection, scope_kind: ScopeKind, ref: str) -> tuple[str, str]:
    """(what the limit hangs on, its org). A key's limits hang on the first key of its chain of rotations."""
    if scope_kind == "org":
        org = find_org(connection, ref)
        return org.org_id, org.org_id
    if scope_kind == "project":
        project = find_project(connection, ref)
        return project.project_id, project.org_id
    key = find_key(connection, ref)
    return key.lineage_id, key.org_id
