"""The JSON of the admin API: what it takes and what it shows.

Owns: the pydantic models of requests and answers, in OpenAI's manner (`object`, `created_at` in Unix seconds, lists
with `has_more`). Does not own: the rules of good input, which are those of `tenancy_records` so that the command line
and this API refuse the same things with the same sentence. No model of an answer has a field for a digest.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from controlplane.adapters.admin_reconcile import ReconcileResult
from controlplane.adapters.tenancy_records import (
    AuditRecord,
    KeyRecord,
    NewKey,
    OrgRecord,
    ProjectRecord,
    TenantClassRecord,
)
from controlplane.tenancy import Limit, ModelAlias, ScopeKind

Item = TypeVar("Item")

# Text that cannot fit its column is refused before it is looked at; the rules proper are in `tenancy_records`.
Text = Annotated[str, Field(max_length=500)]


class Wish(BaseModel):
    """A request body: unknown fields are refused, because a mistyped limit must not be no limit."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OrgWish(Wish):
    """Make an org."""

    name: Text = Field(examples=["acme"])
    tenant_class: Text = "default"


class OrgChange(Wish):
    """Change an org."""

    tenant_class: Text


class ProjectWish(Wish):
    """Make a project."""

    org_id: Text = Field(description="Id or name of the org.")
    name: Text = Field(examples=["web"])


class KeyCreate(Wish):
    """Make a key."""

    project_id: Text = Field(description="Id of the project, or ORG/PROJECT by names.")
    name: Text = ""
    scopes: list[Text] = Field(
        default=["inference"], max_length=100, description="inference, usage:read, explain, admin"
    )
    models: list[Text] | None = Field(default=None, max_length=1_000, description="Models it may name; null: all.")
    expires_in_s: int | None = Field(default=None, description="Seconds until it ends; null: never.")


class KeyRotate(Wish):
    """Rotate a key."""

    overlap_s: int = Field(
        default=86_400, description="How long the old key goes on beside the new one; 0: not at all."
    )


class LimitSet(Wish):
    """Make or change a limit: it is named by scope, model, dimension and period."""

    scope_kind: ScopeKind
    scope_id: Text
    dimension: Text = Field(examples=["requests"], description="requests, input_tokens, output_tokens, concurrency")
    amount: int
    period_s: int = 60
    burst: int | None = Field(default=None, description="Null: the amount.")
    model: Text | None = Field(default=None, description="Null: any model.")


class ModelSet(Wish):
    """Make or change a model name that tenants may ask for."""

    name: Text
    served: Text = Field(description="The name that the engines know.")
    default_max_output_tokens: int | None = None
    context_tokens: int | None = None


class TenantClassSet(Wish):
    """Make or change a tenant class."""

    name: Text
    outage_policy: Text = Field(description="refuse or allow, once the counter store is gone and the leases are spent.")


class OrgView(BaseModel):
    """An org."""

    id: str
    object: Literal["org"] = "org"
    name: str
    tenant_class: str
    created_at: int
    revoked_at: int | None

    @classmethod
    def of(cls, org: OrgRecord) -> OrgView:
        """The view of a record."""
        return cls(
            id=org.org_id,
            name=org.name,
            tenant_class=org.tenant_class,
            created_at=org.created_at_s,
            revoked_at=org.revoked_at_s,
        )


class ProjectView(BaseModel):
    """A project."""

    id: str
    object: Literal["project"] = "project"
    org_id: str
    name: str
    created_at: int
    revoked_at: int | None

    @classmethod
    def of(cls, project: ProjectRecord) -> ProjectView:
        """The view of a record."""
        return cls(
            id=project.project_id,
            org_id=project.org_id,
            name=project.name,
            created_at=project.created_at_s,
            revoked_at=project.revoked_at_s,
        )


class KeyView(BaseModel):
    """A key. `prefix` is its public part."""

    id: str
    object: Literal["key"] = "key"
    org_id: str
    project_id: str
    name: str
    prefix: str
    scopes: list[str]
    models: list[str] | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    rotated_from: str | None

    @classmethod
    def of(cls, key: KeyRecord) -> KeyView:
        """The view of a record."""
        return cls(**_key_fields(key))


class NewKeyView(KeyView):
    """A key that was just made."""

    secret: str | None = Field(
        description="The key itself, shown this once. Null when the request was repeated under its Idempotency-Key: "
        "if the first answer was lost, rotate the key."
    )

    @classmethod
    def made(cls, new: NewKey) -> NewKeyView:
        """The view of a new key."""
        return cls(**_key_fields(new.record), secret=new.secret)


def _key_fields(key: KeyRecord) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "org_id": key.org_id,
        "project_id": key.project_id,
        "name": key.name,
        "prefix": key.prefix,
        "scopes": list(key.scopes),
        "models": None if key.models is None else list(key.models),
        "created_at": key.created_at_s,
        "expires_at": key.expires_at_s,
        "revoked_at": key.revoked_at_s,
        "rotated_from": key.rotated_from,
    }


class LimitView(BaseModel):
    """A limit."""

    id: str
    object: Literal["limit"] = "limit"
    scope_kind: ScopeKind
    scope_id: str
    model: str | None
    dimension: str
    amount: int
    period_s: int
    burst: int

    @classmethod
    def of(cls, limit: Limit) -> LimitView:
        """The view of a limit row."""
        return cls(
            id=limit.limit_id,
            scope_kind=limit.scope_kind,
            scope_id=limit.scope_id,
            model=limit.model,
            dimension=limit.dimension.value,
            amount=limit.amount,
            period_s=limit.period_s,
            burst=limit.burst,
        )


class ModelView(BaseModel):
    """A model name."""

    id: str
    object: Literal["model_alias"] = "model_alias"
    served: str
    default_max_output_tokens: int | None
    context_tokens: int | None

    @classmethod
    def of(cls, alias: ModelAlias) -> ModelView:
        """The view of an alias."""
        return cls(
            id=alias.name,
            served=alias.served,
            default_max_output_tokens=alias.default_max_output_tokens,
            context_tokens=alias.context_tokens,
        )


class TenantClassView(BaseModel):
    """A tenant class."""

    id: str
    object: Literal["tenant_class"] = "tenant_class"
    outage_policy: str

    @classmethod
    def of(cls, tenant_class: TenantClassRecord) -> TenantClassView:
        """The view of a record."""
        return cls(id=tenant_class.name, outage_policy=tenant_class.outage_policy.value)


class AuditView(BaseModel):
    """A line of the audit log."""

    id: str
    object: Literal["audit_line"] = "audit_line"
    at: int
    actor: str
    action: str
    target_id: str
    org_id: str | None
    detail: dict[str, Any]

    @classmethod
    def of(cls, line: AuditRecord) -> AuditView:
        """The view of a record."""
        return cls(
            id=str(line.audit_id),
            at=line.at_s,
            actor=line.actor,
            action=line.action,
            target_id=line.target_id,
            org_id=line.org_id,
            detail=line.detail,
        )


class Listing(BaseModel, Generic[Item]):
    """A page of a list. Pass `next_after` as `after` for the next one."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    next_after: str | None


class Deleted(BaseModel):
    """What was taken away."""

    id: str
    object: str
    deleted: Literal[True] = True


class ErrorBody(BaseModel):
    """The four keys of an OpenAI error; all are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    error: ErrorBody


class ReconcileView(BaseModel):
    """The last periodic comparison of the books with themselves."""

    object: Literal["reconcile"] = "reconcile"
    exact: bool = Field(description="Whether it found no difference.")
    finished_at: int
    age_s: float = Field(description="Seconds since it ended.")
    duration_s: float
    event_count: int
    difference_count: int
    differences: list[dict[str, Any]] = Field(description="The first ones: kind, name, amount_pico as text or null.")
    quarantined_count: int | None = Field(description="Records that are on no bill; null when the worker did not tell.")

    @classmethod
    def of(cls, result: ReconcileResult, now_ns: int) -> ReconcileView:
        """The view of a result."""
        return cls(
            exact=result.exact,
            finished_at=result.finished_ns // 1_000_000_000,
            age_s=round(result.age_s(now_ns), 3),
            duration_s=round(result.duration_s, 3),
            event_count=result.event_count,
            difference_count=result.difference_count,
            differences=list(result.differences),
            quarantined_count=result.quarantined_count,
        )
