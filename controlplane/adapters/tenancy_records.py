"""What the admin side says and hears about tenancy: records, wishes, and the rules of good input.

Owns: the frozen values that `KeyStore` takes and returns, and the checks that turn bad input into one clear sentence.
Does not own: SQL (`keys_sql`), the wire (`admin_models`), or the values of the request path (`controlplane.tenancy`).

The command line, the HTTP API and a caller of `KeyStore` all pass through these checks, so they agree on every one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from controlplane.errors import BadRequest
from controlplane.tenancy import Dimension, Limit, OutagePolicy, Scope, ScopeKind

# Sizes of the columns; a name is for people, a model name is what engines use (paths of Hugging Face included).
_MAX_NAME_CHARS = 100
_MAX_MODEL_CHARS = 200
# An allow-list longer than this wants to be "all models" or several keys; it is held in memory on every node.
_MAX_MODELS_COUNT = 200
# How ids and keys begin; a name like that could be taken for another's id.
_ID_STARTS = ("org_", "proj_", "key_", "ip-")
# Rows a page may hold: a page is one query and one JSON body.
MAX_PAGE_COUNT = 1_000
# Amounts above this could not be multiplied by a period in nanoseconds inside 2^63 (GCRA in integer ns).
_MAX_AMOUNT = 10**12
# A window longer than 31 days is a budget, which the ledger enforces.
_MAX_PERIOD_S = 31 * 86_400
# Longest key life and rotation overlap that is not a mistyped unit.
_MAX_LIFE_S = 10 * 366 * 86_400
_MAX_OVERLAP_S = 90 * 86_400

# Seconds of each unit that a duration may be written in.
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OrgRecord:
    """An org as the store holds it. Times are Unix seconds."""

    org_id: str
    name: str
    tenant_class: str
    created_at_s: int
    revoked_at_s: int | None


@dataclass(frozen=True, slots=True)
class ProjectRecord:
    """A project as the store holds it."""

    project_id: str
    org_id: str
    name: str
    created_at_s: int
    revoked_at_s: int | None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as it may be shown: no secret, no digest."""

    key_id: str
    org_id: str
    project_id: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    models: tuple[str, ...] | None
    created_at_s: int
    expires_at_s: int | None
    revoked_at_s: int | None
    rotated_from: str | None
    lineage_id: str
    """The first key of its chain of rotations: what limits of the key are stored under."""


@dataclass(frozen=True, slots=True, repr=False)
class NewKey:
    """A key that was just made. `secret` is in clear and exists nowhere else; None when the creation was repeated
    under its Idempotency-Key, because a secret is shown once."""

    record: KeyRecord
    secret: str | None

    @property
    def key_id(self) -> str:
        """Id of the key."""
        return self.record.key_id

    @property
    def prefix(self) -> str:
        """Public part of the secret."""
        return self.record.prefix


@dataclass(frozen=True, slots=True)
class TenantClassRecord:
    """A tenant class and its policy for lost counters."""

    name: str
    outage_policy: OutagePolicy


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One line of the audit log."""

    audit_id: int
    at_s: int
    actor: str
    action: str
    target_id: str
    org_id: str | None
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list. `next_after` is what to pass as `after` for the next one; None at the end."""

    items: tuple[T, ...]
    next_after: str | None


@dataclass(frozen=True, slots=True)
class Idempotency:
    """An Idempotency-Key: who sent it, the hash of its value, and the hash of what was asked with it."""

    caller: str
    mark: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class KeyWish:
    """What a new key shall be. `models` None: all; `life_s` None: it never expires."""

    name: str = ""
    scopes: tuple[str, ...] = (Scope.INFERENCE.value,)
    models: tuple[str, ...] | None = None
    life_s: int | None = None

    def checked(self) -> KeyWish:
        """The same wish in normal form; BadRequest says what is wrong with it."""
        if self.life_s is not None:
            whole("life_s", self.life_s, 1, _MAX_LIFE_S)
        name = checked_name("name", self.name) if self.name else ""
        return KeyWish(name, checked_scopes(self.scopes), checked_models(self.models), self.life_s)


@dataclass(frozen=True, slots=True)
class LimitWish:
    """What a limit shall be. `burst` None: the amount. `period_s` is ignored for concurrency."""

    scope_kind: ScopeKind
    scope_id: str
    dimension: str
    amount: int
    period_s: int = 60
    burst: int | None = None
    model: str | None = None

    def checked(self) -> LimitWish:
        """The same wish in normal form; BadRequest says what is wrong with it."""
        dimension = one_of("dimension", self.dimension, [item.value for item in Dimension])
        whole("amount", self.amount, 1, _MAX_AMOUNT)
        model = None if self.model is None else checked_model("model", self.model)
        if dimension == Dimension.CONCURRENCY:
            # Requests in flight have no period and no burst; fixed values keep the row's identity unique.
            return LimitWish(self.scope_kind, self.scope_id, dimension, self.amount, 1, self.amount, model)
        whole("period_s", self.period_s, 1, _MAX_PERIOD_S)
        burst = self.amount if self.burst is None else self.burst
        whole("burst", burst, 1, _MAX_AMOUNT)
        return LimitWish(self.scope_kind, self.scope_id, dimension, self.amount, self.period_s, burst, model)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which rows of a list: after which id, how many, and of which parent."""

    after: str | None = None
    limit_count: int = 100
    org_id: str | None = None
    project_id: str | None = None

    def checked(self) -> ListQuery:
        """Itself, or BadRequest when the page is out of bounds."""
        whole("limit", self.limit_count, 1, MAX_PAGE_COUNT)
        return self


@dataclass(frozen=True, slots=True)
class LimitQuery:
    """Which limits of a list: of one owner, or all when both are None."""

    scope_kind: ScopeKind | None = None
    scope_id: str | None = None
    page: ListQuery = ListQuery()


def limit_of(limit_id: str, wish: LimitWish) -> Limit:
    """The limit row that a checked wish makes."""
    burst = wish.amount if wish.burst is None else wish.burst
    return Limit(
        limit_id=limit_id,
        scope_kind=wish.scope_kind,
        scope_id=wish.scope_id,
        model=wish.model,
        dimension=Dimension(wish.dimension),
        amount=wish.amount,
        period_s=wish.period_s,
        burst=burst,
    )


def whole(field: str, value: int, lowest: int, highest: int) -> int:
    """`value`, or BadRequest when it is outside."""
    if not lowest <= value <= highest:
        raise BadRequest(f"{field} is {value}; expected a whole number from {lowest} to {highest}.", param=field)
    return value


def one_of(field: str, value: str, known: Iterable[str]) -> str:
    """`value`, or BadRequest when it is not one of `known`."""
    names = list(known)
    if value not in names:
        raise BadRequest(f"{field} is {_shown(value)}; expected one of {', '.join(names)}.", param=field)
    return value


def no_tenant_class(name: str) -> BadRequest:
    """The refusal of a tenant class that is not there."""
    return BadRequest(
        f"tenant_class is {name[:64]!r}; no such class (see `inferplane limits classes`).",
        param="tenant_class",
        code="tenant_class_not_found",
    )


def checked_name(field: str, value: str) -> str:
    """A name for people: 1 to 100 printable characters, no blanks at the ends."""
    good = 1 <= len(value) <= _MAX_NAME_CHARS and value.isprintable() and value == value.strip()
    if not good or "/" in value or value.startswith(_ID_STARTS):
        raise BadRequest(
            f"{field} is {_shown(value)}; expected 1 to {_MAX_NAME_CHARS} printable characters without '/', without "
            "blanks at the ends, and not looking like an id or a key.",
            param=field,
        )
    return value


def checked_model(field: str, value: str) -> str:
    """A model name as engines write it: 1 to 200 visible characters."""
    if not (1 <= len(value) <= _MAX_MODEL_CHARS and value.isprintable() and " " not in value):
        raise BadRequest(
            f"{field} is {_shown(value)}; expected a model name of 1 to {_MAX_MODEL_CHARS} characters without blanks.",
            param=field,
        )
    return value


def checked_models(models: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """An allow-list, sorted and without repeats. An empty one is refused: it would allow nothing and look like all."""
    if models is None:
        return None
    if not 1 <= len(models) <= _MAX_MODELS_COUNT:
        raise BadRequest(
            f"models names {len(models)} models; expected 1 to {_MAX_MODELS_COUNT}, or none at all for every model.",
            param="models",
        )
    return tuple(sorted({checked_model("models", model) for model in models}))


def checked_scopes(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Scopes, sorted and without repeats; at least one."""
    known = [scope.value for scope in Scope]
    if not scopes:
        raise BadRequest(f"scopes is empty; expected one or more of {', '.join(known)}.", param="scopes")
    return tuple(sorted({one_of("scopes", scope, known) for scope in scopes}))


def checked_overlap(overlap_s: int) -> int:
    """How long the old key goes on beside the new one."""
    return whole("overlap_s", overlap_s, 0, _MAX_OVERLAP_S)


def parse_duration(field: str, text: str) -> int:
    """Whole seconds of `90`, `90s`, `15m`, `24h`, `7d` or `2w`; BadRequest otherwise."""
    found = re.fullmatch(r"(\d{1,12})(s|m|h|d|w)?", text.strip(), re.ASCII)
    if found is None:
        raise BadRequest(
            f"{field} is {_shown(text)}; expected a duration such as 90s, 15m, 24h, 7d or 2w.", param=field
        )
    return int(found[1]) * _UNIT_S[found[2] or "s"]


def _shown(value: str) -> str:
    """Input as it may stand in a message: short, on one line, and never a whole key."""
    return repr(value if len(value) <= 40 else value[:11] + "...")
