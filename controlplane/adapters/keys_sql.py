"""Orgs, projects and keys in SQL: make, list, show, revoke, restore, rotate.

Owns: `KeyStore`, what the command line and the admin API change tenancy with. It is synchronous; servers call it in
threads. Does not own: limits, model aliases and tenant classes (`catalog_sql`), the transaction around a change
(`tenancy_tx`), or who may call it (the command line's user owns the database; `admin_http` asks `authorize`).

Revoking an org or a project does not touch its keys: a key lives only while its project and org do, so the cascade is
one row and can be taken back. Revoking a key is final.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine, Row

from controlplane.adapters.key_secret import digest_key, mint_secret, pepper_mark
from controlplane.adapters.tenancy_records import (
    Idempotency,
    KeyRecord,
    KeyWish,
    ListQuery,
    NewKey,
    OrgRecord,
    Page,
    ProjectRecord,
    checked_name,
    checked_overlap,
    no_tenant_class,
)
from controlplane.adapters.tenancy_tables import API_KEY, ORG, PROJECT, TENANT_CLASS
from controlplane.adapters.tenancy_tx import TenancyDb, Writing, new_id
from controlplane.errors import BadRequest
from controlplane.tenancy import Scope

__all__ = ["KeyStore", "Made", "digest_key"]

# What `keys bootstrap-admin` makes its key in.
_ADMIN_ORG, _ADMIN_PROJECT = "operators", "admin"
# A first admin can do all that is not inference: the key that manages tenants should not be pasted into clients.
_ADMIN_SCOPES = (Scope.ADMIN.value, Scope.EXPLAIN.value, Scope.USAGE_READ.value)

# What a list and a key are when the caller asks for nothing special.
_FIRST_PAGE, _PLAIN_KEY = ListQuery(), KeyWish()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Made(Generic[T]):
    """What a creation gave. `created` is False when it was there already, equal to what was asked."""

    record: T
    created: bool


class KeyStore:
    """Orgs, projects and keys.

    References: an org by id or name, a project by id or `ORG/PROJECT`, a key by id or public prefix.
    Raises BadRequest (400 bad input, 404 unknown, 409 in conflict, 422 Idempotency-Key reused), StoreUnavailable, and
    ConfigError when the node's pepper is not the cluster's.
    """

    def __init__(
        self,
        engine: Engine,
        pepper: bytes,
        *,
        actor: str = "system",
        clock_s: Callable[[], float] = time.time,
        announce: Callable[[int], None] | None = None,
    ) -> None:
        self._pepper = pepper
        self.db = TenancyDb(engine, pepper_mark(pepper), actor, clock_s, announce)

    def acting(self, actor: str) -> KeyStore:
        """The same store, with changes audited in the name of `actor`."""
        db = self.db
        return KeyStore(db.engine, self._pepper, actor=actor[:100], clock_s=db.clock_s, announce=db.announce)

    # Orgs

    def create_org(
        self, name: str, tenant_class: str = "default", *, idempotency: Idempotency | None = None
    ) -> Made[OrgRecord]:
        """Make an org. The same name and class again gives the same org; a revoked or different one is a 409."""
        checked_name("name", name)
        with self.db.writing() as tx:
            before = tx.made_before(idempotency)
            if before is not None:
                return Made(find_org(tx.connection, before), False)
            made = self._org_named(tx, name, tenant_class)
            tx.remember(idempotency, made.record.org_id)
            return made

    def _org_named(self, tx: Writing, name: str, tenant_class: str) -> Made[OrgRecord]:
        there = tx.first(sa.select(ORG).where(ORG.c.name == name))
        if there is not None:
            if there.revoked_at_s is not None or there.tenant_class != tenant_class:
                raise BadRequest(
                    f"An org named {name!r} is there already, revoked or of another class; choose another name.",
                    param="name",
                    code="already_exists",
                    status=409,
                )
            return Made(_org(there), False)
        if tx.first(sa.select(TENANT_CLASS.c.name).where(TENANT_CLASS.c.name == tenant_class)) is None:
            raise no_tenant_class(tenant_class)
        record = OrgRecord(new_id("org"), name, tenant_class, tx.now_s, None)
        tx.put(ORG, id=record.org_id, name=name, tenant_class=tenant_class, created_at_s=tx.now_s, revoked_at_s=None)
        tx.note("org.create", record.org_id, record.org_id, name=name, tenant_class=tenant_class)
        return Made(record, True)

    def org(self, ref: str) -> OrgRecord:
        """The org of this id or name."""
        with self.db.reading() as connection:
            return find_org(connection, ref)

    def list_orgs(self, query: ListQuery = _FIRST_PAGE) -> Page[OrgRecord]:
        """Orgs in the order of creation."""
        with self.db.reading() as connection:
            rows = page_of(connection, sa.select(ORG), ORG, query)
        return paged([_org(row) for row in rows], query, lambda org: org.org_id)

    def revoke_org(self, ref: str) -> OrgRecord:
        """Shut an org out, with all its projects and keys. Again is no change."""
        return self._switch_org(ref, revoke=True)

    def restore_org(self, ref: str) -> OrgRecord:
        """Let an org in again, with those of its projects and keys that are not revoked themselves."""
        return self._switch_org(ref, revoke=False)

    def _switch_org(self, ref: str, *, revoke: bool) -> OrgRecord:
        with self.db.writing() as tx:
            org = find_org(tx.connection, ref)
            if (org.revoked_at_s is not None) == revoke:
                return org
            tx.change(ORG, ORG.c.id == org.org_id, revoked_at_s=tx.now_s if revoke else None)
            tx.note("org.revoke" if revoke else "org.restore", org.org_id, org.org_id)
            return find_org(tx.connection, org.org_id)

    # Projects

    def create_project(self, org_ref: str, name: str, *, idempotency: Idempotency | None = None) -> Made[ProjectRecord]:
        """Make a project of an org. The same name again gives the same project; a revoked one is a 409."""
        checked_name("name", name)
        with self.db.writing() as tx:
            before = tx.made_before(idempotency)
            if before is not None:
                return Made(find_project(tx.connection, before), False)
            made = self._project_named(tx, live_org(tx.connection, org_ref), name)
            tx.remember(idempotency, made.record.project_id)
            return made

    def _project_named(self, tx: Writing, org: OrgRecord, name: str) -> Made[ProjectRecord]:
        there = tx.first(sa.select(PROJECT).where(PROJECT.c.org_id == org.org_id, PROJECT.c.name == name))
        if there is not None and there.revoked_at_s is not None:
            raise BadRequest(
                f"A project named {name!r} is there already and revoked; restore it or choose another name.",
                param="name",
                code="already_exists",
                status=409,
            )
        if there is not None:
            return Made(_project(there), False)
        record = ProjectRecord(new_id("proj"), org.org_id, name, tx.now_s, None)
        tx.put(PROJECT, id=record.project_id, org_id=org.org_id, name=name, created_at_s=tx.now_s, revoked_at_s=None)
        tx.note("project.create", record.project_id, org.org_id, name=name)
        return Made(record, True)

    def project(self, ref: str) -> ProjectRecord:
        """The project of this id or `ORG/PROJECT`."""
        with self.db.reading() as connection:
            return find_project(connection, ref)

    def list_projects(self, query: ListQuery = _FIRST_PAGE) -> Page[ProjectRecord]:
        """Projects in the order of creation, of one org when the query names one."""
        with self.db.reading() as connection:
            select = sa.select(PROJECT)
            if query.org_id is not None:
                select = select.where(PROJECT.c.org_id == find_org(connection, query.org_id).org_id)
            rows = page_of(connection, select, PROJECT, query)
        return paged([_project(row) for row in rows], query, lambda project: project.project_id)

    def revoke_project(self, ref: str) -> ProjectRecord:
        """Shut a project out, with all its keys. Again is no change."""
        return self._switch_project(ref, revoke=True)

    def restore_project(self, ref: str) -> ProjectRecord:
        """Let a project in again, with those of its keys that are not revoked themselves."""
        return self._switch_project(ref, revoke=False)

    def _switch_project(self, ref: str, *, revoke: bool) -> ProjectRecord:
        with self.db.writing() as tx:
            project = find_project(tx.connection, ref)
            if (project.revoked_at_s is not None) == revoke:
                return project
            tx.change(PROJECT, PROJECT.c.id == project.project_id, revoked_at_s=tx.now_s if revoke else None)
            tx.note("project.revoke" if revoke else "project.restore", project.project_id, project.org_id)
            return find_project(tx.connection, project.project_id)

    # Keys

    def create_key(
        self, project_ref: str, wish: KeyWish = _PLAIN_KEY, *, idempotency: Idempotency | None = None
    ) -> NewKey:
        """Make a key. Its secret is in the answer and nowhere else."""
        wish = wish.checked()
        with self.db.writing() as tx:
            before = tx.made_before(idempotency)
            if before is not None:
                return NewKey(find_key(tx.connection, before), None)
            project = live_project(tx.connection, project_ref)
            new = self._new_key(tx, project, wish, None)
            tx.remember(idempotency, new.key_id)
            return new

    def _new_key(self, tx: Writing, project: ProjectRecord, wish: KeyWish, old: KeyRecord | None) -> NewKey:
        secret = mint_secret()
        while tx.first(sa.select(API_KEY.c.id).where(API_KEY.c.prefix == secret.prefix)) is not None:
            secret = mint_secret()
        key_id = new_id("key")
        record = KeyRecord(
            key_id=key_id,
            org_id=project.org_id,
            project_id=project.project_id,
            name=wish.name,
            prefix=secret.prefix,
            scopes=wish.scopes,
            models=wish.models,
            created_at_s=tx.now_s,
            expires_at_s=None if wish.life_s is None else tx.now_s + wish.life_s,
            revoked_at_s=None,
            rotated_from=None if old is None else old.key_id,
            lineage_id=key_id if old is None else old.lineage_id,
        )
        tx.put(
            API_KEY,
            id=key_id,
            org_id=record.org_id,
            project_id=record.project_id,
            lineage_id=record.lineage_id,
            rotated_from=record.rotated_from,
            name=record.name,
            prefix=record.prefix,
            digest=digest_key(secret.text.encode(), self._pepper),
            scopes=" ".join(record.scopes),
            models=None if record.models is None else list(record.models),
            created_at_s=record.created_at_s,
            expires_at_s=record.expires_at_s,
            revoked_at_s=None,
        )
        action = "key.create" if old is None else "key.rotate"
        tx.note(action, key_id, record.org_id, prefix=record.prefix, scopes=list(record.scopes), of=record.rotated_from)
        return NewKey(record, secret.text)

    def key(self, ref: str) -> KeyRecord:
        """The key of this id or public prefix."""
        with self.db.reading() as connection:
            return find_key(connection, ref)

    def list_keys(self, query: ListQuery = _FIRST_PAGE) -> Page[KeyRecord]:
        """Keys in the order of creation, of one project or org when the query names one."""
        with self.db.reading() as connection:
            select = sa.select(API_KEY)
            if query.project_id is not None:
                select = select.where(API_KEY.c.project_id == find_project(connection, query.project_id).project_id)
            if query.org_id is not None:
                select = select.where(API_KEY.c.org_id == find_org(connection, query.org_id).org_id)
            rows = page_of(connection, select, API_KEY, query)
        return paged([_key(row) for row in rows], query, lambda key: key.key_id)

    def revoke_key(self, ref: str) -> KeyRecord:
        """End a key for good. Again is no change."""
        with self.db.writing() as tx:
            key = find_key(tx.connection, ref)
            if key.revoked_at_s is not None:
                return key
            tx.change(API_KEY, API_KEY.c.id == key.key_id, revoked_at_s=tx.now_s)
            tx.note("key.revoke", key.key_id, key.org_id, prefix=key.prefix)
            return find_key(tx.connection, key.key_id)

    def rotate_key(self, ref: str, overlap_s: int, *, idempotency: Idempotency | None = None) -> NewKey:
        """Make a successor with the same rights and limits; the old key ends `overlap_s` from now (0: at once).

        The successor has no end of its own unless the old key had one, which it then shares.
        """
        checked_overlap(overlap_s)
        with self.db.writing() as tx:
            before = tx.made_before(idempotency)
            if before is not None:
                return NewKey(find_key(tx.connection, before), None)
            old = find_key(tx.connection, ref)
            self._check_rotation(tx, old)
            life_s = None if old.expires_at_s is None else old.expires_at_s - tx.now_s
            project = live_project(tx.connection, old.project_id)
            new = self._new_key(tx, project, KeyWish(old.name, old.scopes, old.models, life_s), old)
            if overlap_s == 0:
                tx.change(API_KEY, API_KEY.c.id == old.key_id, revoked_at_s=tx.now_s)
            else:
                ends_at_s = min(tx.now_s + overlap_s, old.expires_at_s or tx.now_s + overlap_s)
                tx.change(API_KEY, API_KEY.c.id == old.key_id, expires_at_s=ends_at_s)
            tx.remember(idempotency, new.key_id)
            return new

    def _check_rotation(self, tx: Writing, old: KeyRecord) -> None:
        successor = tx.first(sa.select(API_KEY.c.prefix).where(API_KEY.c.rotated_from == old.key_id))
        over = old.revoked_at_s is not None or (old.expires_at_s is not None and old.expires_at_s <= tx.now_s)
        if successor is not None or over:
            reason = f"was rotated already, to {successor.prefix}" if successor is not None else "is revoked or expired"
            raise BadRequest(
                f"Key {old.prefix} {reason}; only a live key can be rotated, once.", code="key_not_live", status=409
            )

    def bootstrap_admin(self, *, force: bool = False) -> NewKey:
        """Make the first admin key. A 409 when a live one is there, unless `force`."""
        with self.db.writing() as tx:
            if not force and tx.first(_live_admin_keys(tx.now_s)) is not None:
                raise BadRequest(
                    "A live admin key is there already; make more with it, or pass --force to make another.",
                    code="already_exists",
                    status=409,
                )
            org = self._org_named(tx, _ADMIN_ORG, "default").record
            project = self._project_named(tx, org, _ADMIN_PROJECT).record
            return self._new_key(tx, project, KeyWish("bootstrap", _ADMIN_SCOPES), None)


def _live_admin_keys(now_s: int) -> sa.Select[tuple[str]]:
    padded = sa.literal(" ") + API_KEY.c.scopes + sa.literal(" ")
    return (
        sa.select(API_KEY.c.id)
        .join(PROJECT, PROJECT.c.id == API_KEY.c.project_id)
        .join(ORG, ORG.c.id == API_KEY.c.org_id)
        .where(
            padded.like(f"% {Scope.ADMIN.value} %"),
            API_KEY.c.revoked_at_s.is_(None),
            sa.or_(API_KEY.c.expires_at_s.is_(None), API_KEY.c.expires_at_s > now_s),
            PROJECT.c.revoked_at_s.is_(None),
            ORG.c.revoked_at_s.is_(None),
        )
    )


def find_org(connection: Connection, ref: str) -> OrgRecord:
    """The org of this id or name; BadRequest (404)."""
    row = connection.execute(sa.select(ORG).where(sa.or_(ORG.c.id == ref, ORG.c.name == ref))).first()
    if row is None:
        raise _missing("org", ref)
    return _org(row)


def find_project(connection: Connection, ref: str) -> ProjectRecord:
    """The project of this id or `ORG/PROJECT`; BadRequest (404)."""
    org_name, slash, name = ref.partition("/")
    select = sa.select(PROJECT)
    if slash:
        select = select.join(ORG, ORG.c.id == PROJECT.c.org_id).where(
            sa.or_(ORG.c.name == org_name, ORG.c.id == org_name), PROJECT.c.name == name
        )
    else:
        select = select.where(PROJECT.c.id == ref)
    row = connection.execute(select).first()
    if row is None:
        raise _missing("project", ref)
    return _project(row)


def find_key(connection: Connection, ref: str) -> KeyRecord:
    """The key of this id or public prefix; BadRequest (404)."""
    row = connection.execute(sa.select(API_KEY).where(sa.or_(API_KEY.c.id == ref, API_KEY.c.prefix == ref))).first()
    if row is None:
        raise _missing("key", ref)
    return _key(row)


def live_org(connection: Connection, ref: str) -> OrgRecord:
    """As `find_org`; BadRequest (409) when it is revoked."""
    org = find_org(connection, ref)
    if org.revoked_at_s is not None:
        raise BadRequest(f"Org {org.name!r} is revoked; restore it first.", code="revoked", status=409)
    return org


def live_project(connection: Connection, ref: str) -> ProjectRecord:
    """As `find_project`; BadRequest (409) when it or its org is revoked."""
    project = find_project(connection, ref)
    live_org(connection, project.org_id)
    if project.revoked_at_s is not None:
        raise BadRequest(f"Project {project.name!r} is revoked; restore it first.", code="revoked", status=409)
    return project


def paged(items: list[T], query: ListQuery, id_of: Callable[[T], str]) -> Page[T]:
    """A page from one row more than it may hold."""
    shown = items[: query.limit_count]
    return Page(tuple(shown), id_of(shown[-1]) if len(items) > len(shown) else None)


def page_of(
    connection: Connection, select: sa.Select[tuple[object]], table: sa.Table, query: ListQuery
) -> list[Row[tuple[object]]]:
    query.checked()
    if query.after is not None:
        select = select.where(table.c.id > query.after)
    return list(connection.execute(select.order_by(table.c.id).limit(query.limit_count + 1)).all())


def _missing(kind: str, ref: str) -> BadRequest:
    # A whole secret typed where an id belongs must not come back in the message.
    shown = ref if len(ref) <= 40 else f"{ref[:11]}..."
    return BadRequest(f"No {kind} {shown!r}.", param=f"{kind}_id", code=f"{kind}_not_found", status=404)


def _org(row: Row[tuple[object]]) -> OrgRecord:
    return OrgRecord(row.id, row.name, row.tenant_class, row.created_at_s, row.revoked_at_s)


def _project(row: Row[tuple[object]]) -> ProjectRecord:
    return ProjectRecord(row.id, row.org_id, row.name, row.created_at_s, row.revoked_at_s)


def _key(row: Row[tuple[object]]) -> KeyRecord:
    return KeyRecord(
        key_id=row.id,
        org_id=row.org_id,
        project_id=row.project_id,
        name=row.name,
        prefix=row.prefix,
        scopes=tuple(row.scopes.split()),
        models=None if row.models is None else tuple(row.models),
        created_at_s=row.created_at_s,
        expires_at_s=row.expires_at_s,
        revoked_at_s=row.revoked_at_s,
        rotated_from=row.rotated_from,
        lineage_id=row.lineage_id,
    )
