"""Who is calling and what they may do.

Owns: the values of tenancy (org, project, key, limit rows), the in-memory `Snapshot` of every live key, and
`authorize`, the one place that decides whether a principal may do a thing. Does not own: where keys are stored
(`adapters.keys_sql`), how a secret is hashed (the digest is an argument), or the arithmetic of limits (`rate_limit`).

A tenant is an org. An org has projects, a project has keys, a key has scopes and perhaps a model allow-list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, NewType

OrgId = NewType("OrgId", str)
ProjectId = NewType("ProjectId", str)
KeyId = NewType("KeyId", str)

KeyDigest = NewType("KeyDigest", bytes)
"""The keyed hash of a secret. The secret itself is never kept."""


class Scope(StrEnum):
    """What a key may be used for (DESIGN 4.1)."""

    INFERENCE = "inference"
    USAGE_READ = "usage:read"
    EXPLAIN = "explain"
    ADMIN = "admin"


class Dimension(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    CONCURRENCY = "concurrency"


ScopeKind = Literal["org", "project", "key"]


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit row.

    `amount` per `period_s` for rates (GCRA with `burst`, which defaults to `amount` where it is stored); for
    `CONCURRENCY` only `amount` counts (requests in flight at once). `model` None means any model.
    `limit_id` is stable: it names the bucket.
    """

    limit_id: str
    scope_kind: ScopeKind
    scope_id: str
    model: str | None
    dimension: Dimension
    amount: int
    period_s: int
    burst: int


class OutagePolicy(StrEnum):
    """What the limits of a tenant class do while the counter store is gone and the leases are spent (DESIGN 4.2)."""

    REFUSE = "refuse"
    ALLOW = "allow"


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A model name that tenants may ask for: what serves it, and the bounds of that model (None: not known)."""

    name: str
    served: str
    default_max_output_tokens: int | None
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Principal:
    """A live key, resolved to everything the request path needs."""

    key_id: KeyId
    org_id: OrgId
    project_id: ProjectId
    scopes: frozenset[Scope]
    models: frozenset[str] | None
    """The models this key may name; None means all."""
    expires_at_s: float | None
    """Unix seconds; None means never."""
    cache_salt: str
    """Keyed hash of the org: keeps one tenant's KV blocks from another's (DESIGN 4.1, owned fields)."""
    limits: tuple[Limit, ...] = ()
    """Every limit of the key, its project and its org."""
    outage_policy: OutagePolicy = OutagePolicy.REFUSE
    """Of the org's tenant class."""

    def limits_for(self, model: str) -> tuple[Limit, ...]:
        """The limits that a request for `model` must pass."""
        return tuple([limit for limit in self.limits if limit.model is None or limit.model == model])


class DenialReason(StrEnum):
    """Why a caller may not go on. The values are metric labels."""

    NO_KEY = "no_key"
    UNKNOWN_KEY = "unknown_key"
    EXPIRED_KEY = "expired_key"
    MISSING_SCOPE = "missing_scope"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    SNAPSHOT_STALE = "snapshot_stale"


@dataclass(frozen=True, slots=True)
class Denied:
    """The answer is no; `reason` says why, `detail` names the scope or model that was missing."""

    reason: DenialReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every live key at one epoch. Immutable: a change makes a new snapshot.

    `read_at_s` is when the store was last known to agree with it (monotonic seconds of the owning process).
    """

    epoch: int
    read_at_s: float
    keys: Mapping[KeyDigest, Principal] = field(default_factory=dict)

    def confirmed(self, read_at_s: float) -> Snapshot:
        """The same content, confirmed by the store at `read_at_s`."""
        return Snapshot(self.epoch, read_at_s, self.keys)

    def changed(
        self, epoch: int, read_at_s: float, put: Mapping[KeyDigest, Principal], drop: Iterable[KeyDigest]
    ) -> Snapshot:
        """A new snapshot with `put` added or replaced and `drop` removed."""
        keys = dict(self.keys)
        for digest in drop:
            keys.pop(digest, None)
        keys.update(put)
        return Snapshot(epoch, read_at_s, keys)


class Access(NamedTuple):
    """What `authorize` is asked: the digest of the presented secret (None: no key), and the use intended."""

    digest: KeyDigest | None
    scope: Scope
    model: str | None = None


def authorize(snapshot: Snapshot, access: Access, now_s: float, *, wall_s: float, grace_s: float) -> Principal | Denied:
    """Decide whether the caller may do this.

    `now_s` is the monotonic clock of `Snapshot.read_at_s`; `wall_s` is Unix time, for key expiry. A snapshot that the
    store has not confirmed for longer than `grace_s` lets nobody in: a key revoked since then would be among them.
    """
    if access.digest is None:
        return Denied(DenialReason.NO_KEY)
    if now_s - snapshot.read_at_s > grace_s:
        return Denied(DenialReason.SNAPSHOT_STALE)
    principal = snapshot.keys.get(access.digest)
    if principal is None:
        return Denied(DenialReason.UNKNOWN_KEY)
    if principal.expires_at_s is not None and wall_s >= principal.expires_at_s:
        return Denied(DenialReason.EXPIRED_KEY)
    if access.scope not in principal.scopes:
        return Denied(DenialReason.MISSING_SCOPE, access.scope.value)
    return principal if access.model is None else permit(principal, access.model)


def permit(principal: Principal, model: str) -> Principal | Denied:
    """Whether a caller that was let in may name this model."""
    if principal.models is not None and model not in principal.models:
        return Denied(DenialReason.MODEL_NOT_ALLOWED, model)
    return principal
