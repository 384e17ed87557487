"""From rows to principals: what a node keeps in memory of tenancy, and how a change of rows changes it.

Owns: `read_changes`, the queries that fetch everything or only what is newer than an epoch, and `Directory`, which
joins orgs, projects, keys and limits into the `Principal` of each live key. Does not own: when to read (`key_feed`).

A change of one org, project, class or limit rebuilds the principals of the keys under it and no others, so that a
node with 100,000 keys does not stop to rebuild them all when one key is made.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from controlplane.adapters.catalog_sql import alias_from, limit_from
from controlplane.adapters.key_secret import org_salt
from controlplane.adapters.tenancy_tables import API_KEY, FEED_EPOCH, LIMIT_ROW, MODEL_ALIAS, ORG, PROJECT, TENANT_CLASS
from controlplane.tenancy import KeyDigest, KeyId, Limit, ModelAlias, OrgId, OutagePolicy, Principal, ProjectId, Scope

# Rows fetched at a time: a round trip each, and at each the reader shows that it is alive.
_CHUNK_COUNT = 1_000
# Principals built between two breaths. Building is pure Python in a thread beside the event loop; without a breath the
# loop would wait for the interpreter's 5 ms switch interval again and again.
_BREATH_COUNT = 200
# A key that ended longer ago is left out of a full load; before, its caller is told that it has expired.
_REMEMBER_EXPIRED_S = 86_400

# What an epoch of -1 means: nothing was read yet, so everything is newer.
NOTHING_READ = -1


@dataclass(frozen=True, slots=True)
class StoreMark:
    """The store's epoch and the mark of its pepper."""

    epoch: int
    pepper_mark: str | None


@dataclass(frozen=True, slots=True)
class Changes:
    """The rows newer than some epoch, table by table."""

    epoch: int
    classes: list[Row[Any]]
    orgs: list[Row[Any]]
    projects: list[Row[Any]]
    limits: list[Row[Any]]
    aliases: list[Row[Any]]
    keys: list[Row[Any]]


def read_mark(connection: Connection) -> StoreMark:
    """The one row that says whether anything changed."""
    row = connection.execute(sa.select(FEED_EPOCH.c.epoch, FEED_EPOCH.c.pepper_mark)).one()
    return StoreMark(row.epoch, row.pepper_mark)


def read_changes(connection: Connection, epoch: int, since: int, now_s: float, alive: Callable[[], None]) -> Changes:
    """Every row newer than `since`, as of `epoch`, in the transaction in which `epoch` was read.

    `alive` is called after each chunk. A full read (`since` is NOTHING_READ) leaves out keys that can never live again.
    """

    def newer(table: sa.Table, *also: sa.ColumnElement[bool]) -> list[Row[Any]]:
        select = sa.select(table).where(table.c.changed_epoch > since, *also)
        result = connection.execution_options(yield_per=_CHUNK_COUNT) if since == NOTHING_READ else connection
        rows: list[Row[Any]] = []
        for chunk in result.execute(select).partitions(_CHUNK_COUNT):
            rows.extend(chunk)
            alive()
        return rows

    lasting = sa.or_(API_KEY.c.expires_at_s.is_(None), API_KEY.c.expires_at_s > now_s - _REMEMBER_EXPIRED_S)
    only_live = (API_KEY.c.revoked_at_s.is_(None), lasting) if since == NOTHING_READ else ()
    return Changes(
        epoch,
        newer(TENANT_CLASS),
        newer(ORG),
        newer(PROJECT),
        newer(LIMIT_ROW),
        newer(MODEL_ALIAS),
        newer(API_KEY, *only_live),
    )


@dataclass(frozen=True, slots=True)
class _Org:
    tenant_class: str
    live: bool
    salt: str


@dataclass(frozen=True, slots=True)
class _Key:
    digest: KeyDigest
    org_id: str
    project_id: str
    lineage_id: str
    scopes: frozenset[Scope]
    models: frozenset[str] | None
    expires_at_s: float | None


class Directory:
    """Tenancy as one node knows it. One thread at a time."""

    def __init__(self, pepper: bytes) -> None:
        self._pepper = pepper
        self._policies: dict[str, OutagePolicy] = {}
        self._orgs: dict[str, _Org] = {}
        self._live_projects: dict[str, bool] = {}
        self._keys: dict[str, _Key] = {}
        # Owner id (org, project, class or first key of a rotation) to the keys under it.
        self._under: defaultdict[str, set[str]] = defaultdict(set)
        self._limits: defaultdict[str, dict[str, Limit]] = defaultdict(dict)
        self._limits_of: dict[tuple[str, str, str], tuple[Limit, ...]] = {}
        # Each set of scopes once in memory, not once per key.
        self._scope_sets: dict[str, frozenset[Scope]] = {}
        self.epoch = NOTHING_READ
        self.aliases: dict[str, ModelAlias] = {}

    def apply(self, changes: Changes, alive: Callable[[], None]) -> tuple[dict[KeyDigest, Principal], list[KeyDigest]]:
        """Take the changes in; gives the principals that are new or different, and the digests that are gone.

        `alive` is called now and then. After an exception the directory is half changed: begin with a new one.
        """
        touched: set[str] = set()
        gone: list[KeyDigest] = []
        for owner in self._take_owners(changes):
            touched |= self._under.get(owner, set())
        for row in changes.keys:
            if row.revoked_at_s is not None:
                gone.append(KeyDigest(bytes(row.digest)))
                self._forget(row)
                touched.discard(row.id)
            else:
                self._learn(row)
                touched.add(row.id)
        self._take_aliases(changes.aliases)
        self._limits_of.clear()
        put: dict[KeyDigest, Principal] = {}
        for key_id in _with_breaths(touched, alive):
            key = self._keys[key_id]
            principal = self._principal(key_id, key)
            if principal is None:
                gone.append(key.digest)
            else:
                put[key.digest] = principal
        self.epoch = changes.epoch
        return put, gone

    def _take_owners(self, changes: Changes) -> Iterator[str]:
        """Take in everything above the keys; gives the owners whose keys change."""
        for row in changes.classes:
            self._policies[row.name] = OutagePolicy(row.outage_policy)
            yield from (org_id for org_id, org in self._orgs.items() if org.tenant_class == row.name)
        for row in changes.orgs:
            salt = org_salt(OrgId(row.id), self._pepper)
            self._orgs[row.id] = _Org(row.tenant_class, row.revoked_at_s is None, salt)
            yield row.id
        for row in changes.projects:
            self._live_projects[row.id] = row.revoked_at_s is None
            yield row.id
        for row in changes.limits:
            if row.deleted_at_s is None:
                self._limits[row.scope_id][row.id] = limit_from(row)
            else:
                self._limits[row.scope_id].pop(row.id, None)
            yield row.scope_id

    def _take_aliases(self, rows: Iterable[Row[Any]]) -> None:
        changed = dict(self.aliases)
        for row in rows:
            if row.deleted_at_s is None:
                changed[row.name] = alias_from(row)
            else:
                changed.pop(row.name, None)
        self.aliases = changed

    def _learn(self, row: Row[Any]) -> None:
        scopes = self._scope_sets.get(row.scopes)
        if scopes is None:
            scopes = self._scope_sets[row.scopes] = _known_scopes(row.scopes)
        self._keys[row.id] = _Key(
            digest=KeyDigest(bytes(row.digest)),
            org_id=row.org_id,
            project_id=row.project_id,
            lineage_id=row.lineage_id,
            scopes=scopes,
            models=None if row.models is None else frozenset(row.models),
            expires_at_s=row.expires_at_s,
        )
        for owner in (row.org_id, row.project_id, row.lineage_id):
            self._under[owner].add(row.id)

    def _forget(self, row: Row[Any]) -> None:
        self._keys.pop(row.id, None)
        for owner in (row.org_id, row.project_id, row.lineage_id):
            self._under[owner].discard(row.id)
        if not self._under[row.lineage_id]:
            del self._under[row.lineage_id]

    def _principal(self, key_id: str, key: _Key) -> Principal | None:
        org = self._orgs[key.org_id]
        if not org.live or not self._live_projects[key.project_id]:
            return None
        return Principal(
            key_id=KeyId(key_id),
            org_id=OrgId(key.org_id),
            project_id=ProjectId(key.project_id),
            scopes=key.scopes,
            models=key.models,
            expires_at_s=key.expires_at_s,
            cache_salt=org.salt,
            limits=self._limits_above(key),
            outage_policy=self._policies[org.tenant_class],
        )

    def _limits_above(self, key: _Key) -> tuple[Limit, ...]:
        """The limits of org, project and key; keys without limits of their own share one tuple per project."""
        own = key.lineage_id if self._limits.get(key.lineage_id) else ""
        owners = (key.org_id, key.project_id, own)
        found = self._limits_of.get(owners)
        if found is None:
            found = tuple(limit for owner in owners for limit in self._limits.get(owner, {}).values())
            self._limits_of[owners] = found
        return found


def _known_scopes(text: str) -> frozenset[Scope]:
    """Scopes that this version knows; one of a newer version gives no right here."""
    known = {scope.value: scope for scope in Scope}
    return frozenset(known[name] for name in text.split() if name in known)


def _with_breaths(key_ids: Iterable[str], alive: Callable[[], None]) -> Iterator[str]:
    for count, key_id in enumerate(key_ids, start=1):
        yield key_id
        if count % _BREATH_COUNT == 0:
            alive()
            time.sleep(0)
