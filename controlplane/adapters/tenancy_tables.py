"""The SQL tables of tenancy.

Owns: the columns of orgs, projects, keys, limits, model aliases, tenant classes, the feed's epoch, the audit log and
idempotency marks. Does not own: how they are changed (`keys_sql`), how they are read on the hot path (`key_feed`), nor
how they come to exist (`billing/adapters/migrations`, which imports no model so that old revisions never change).

Times are whole Unix seconds. `changed_epoch` on a row is the epoch of the transaction that last wrote it: it is what
lets a feed read only what changed. Rows that a feed must see vanish are never deleted; they get a time of death.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    UniqueConstraint,
)
from sqlmodel import Field, SQLModel

# SQLite makes only an INTEGER primary key count up by itself; PostgreSQL needs 8 bytes for a log of years.
_COUNTING = BigInteger().with_variant(Integer(), "sqlite")


def _epoch() -> Any:
    """The column every row of the feed carries, indexed because the feed asks for what is newer."""
    return Field(sa_column=Column("changed_epoch", BigInteger, nullable=False, index=True))


def _text(name: str, length: int, **more: Any) -> Any:
    return Field(sa_column=Column(name, String(length), nullable=False, **more))


def _seconds(name: str, *, nullable: bool) -> Any:
    return Field(default=None, sa_column=Column(name, BigInteger, nullable=nullable))


class FeedEpochRow(SQLModel, table=True):
    """One row (id 1). Every writer of this file's tables updates it first, which also puts all writers in one line."""

    __tablename__ = "feed_epoch"
    __table_args__ = (CheckConstraint("id = 1", name="ck_feed_epoch_one_row"),)
    id: int = Field(sa_column=Column("id", Integer, primary_key=True, autoincrement=False))
    epoch: int = Field(sa_column=Column("epoch", BigInteger, nullable=False))
    pepper_mark: str | None = Field(default=None, sa_column=Column("pepper_mark", String(32), nullable=True))
    """One-way mark of the pepper that all digests in this database were made with."""


class TenantClassRow(SQLModel, table=True):
    """A class of tenants and what their limits do when the counter store is gone (DESIGN 4.2; default: refuse)."""

    __tablename__ = "tenant_class"
    name: str = Field(sa_column=Column("name", String(64), primary_key=True))
    outage_policy: str = _text("outage_policy", 16)
    changed_epoch: int = _epoch()


class OrgRow(SQLModel, table=True):
    """A tenant."""

    __tablename__ = "org"
    id: str = Field(sa_column=Column("id", String(40), primary_key=True))
    name: str = _text("name", 100, unique=True)
    tenant_class: str = Field(
        sa_column=Column("tenant_class", String(64), ForeignKey("tenant_class.name"), nullable=False)
    )
    created_at_s: int = _seconds("created_at_s", nullable=False)
    revoked_at_s: int | None = _seconds("revoked_at_s", nullable=True)
    changed_epoch: int = _epoch()


class ProjectRow(SQLModel, table=True):
    """A project of an org."""

    __tablename__ = "project"
    __table_args__ = (UniqueConstraint("org_id", "name", name="uq_project_org_name"),)
    id: str = Field(sa_column=Column("id", String(40), primary_key=True))
    org_id: str = Field(sa_column=Column("org_id", String(40), ForeignKey("org.id"), nullable=False))
    name: str = _text("name", 100)
    created_at_s: int = _seconds("created_at_s", nullable=False)
    revoked_at_s: int | None = _seconds("revoked_at_s", nullable=True)
    changed_epoch: int = _epoch()


class ApiKeyRow(SQLModel, table=True):
    """A key. Of its secret only the keyed digest is here; `prefix` is the public part, safe to show and to log."""

    __tablename__ = "api_key"
    __table_args__ = (Index("ix_api_key_project_id", "project_id", "id"), Index("ix_api_key_org_id", "org_id", "id"))
    id: str = Field(sa_column=Column("id", String(40), primary_key=True))
    org_id: str = Field(sa_column=Column("org_id", String(40), ForeignKey("org.id"), nullable=False))
    project_id: str = Field(sa_column=Column("project_id", String(40), ForeignKey("project.id"), nullable=False))
    lineage_id: str = _text("lineage_id", 40)
    """The first key of a chain of rotations. Limits of a key hang on it, so that rotation neither drops nor doubles
    them."""
    rotated_from: str | None = Field(
        default=None, sa_column=Column("rotated_from", String(40), ForeignKey("api_key.id"), nullable=True, unique=True)
    )
    name: str = _text("name", 100)
    prefix: str = _text("prefix", 16, unique=True)
    digest: bytes = Field(sa_column=Column("digest", LargeBinary(32), nullable=False, unique=True))
    scopes: str = _text("scopes", 100)
    """Space-separated, sorted."""
    models: list[str] | None = Field(default=None, sa_column=Column("models", JSON(none_as_null=True), nullable=True))
    created_at_s: int = _seconds("created_at_s", nullable=False)
    expires_at_s: int | None = _seconds("expires_at_s", nullable=True)
    revoked_at_s: int | None = _seconds("revoked_at_s", nullable=True)
    changed_epoch: int = _epoch()


class LimitRow(SQLModel, table=True):
    """One limit. `model` is empty for any model: a NULL would slip past the unique constraint."""

    __tablename__ = "limit_row"
    __table_args__ = (
        UniqueConstraint("scope_kind", "scope_id", "model", "dimension", "period_s", name="uq_limit_row_what"),
    )
    id: str = Field(sa_column=Column("id", String(40), primary_key=True))
    scope_kind: str = _text("scope_kind", 8)
    scope_id: str = _text("scope_id", 40)
    model: str = _text("model", 200)
    dimension: str = _text("dimension", 32)
    amount: int = Field(sa_column=Column("amount", BigInteger, nullable=False))
    period_s: int = Field(sa_column=Column("period_s", Integer, nullable=False))
    burst: int = Field(sa_column=Column("burst", BigInteger, nullable=False))
    deleted_at_s: int | None = _seconds("deleted_at_s", nullable=True)
    changed_epoch: int = _epoch()


class ModelAliasRow(SQLModel, table=True):
    """The name a tenant asks for, the model that serves it, and the bounds of that model."""

    __tablename__ = "model_alias"
    name: str = Field(sa_column=Column("name", String(200), primary_key=True))
    served: str = _text("served", 200)
    default_max_output_tokens: int | None = Field(
        default=None, sa_column=Column("default_max_output_tokens", Integer, nullable=True)
    )
    context_tokens: int | None = Field(default=None, sa_column=Column("context_tokens", Integer, nullable=True))
    deleted_at_s: int | None = _seconds("deleted_at_s", nullable=True)
    changed_epoch: int = _epoch()


class AuditRow(SQLModel, table=True):
    """Who did what, and when. Never a secret, never a digest."""

    __tablename__ = "audit_log"
    __table_args__ = (Index("ix_audit_log_org_id", "org_id", "id"),)
    id: int | None = Field(default=None, sa_column=Column("id", _COUNTING, primary_key=True))
    at_s: int = _seconds("at_s", nullable=False)
    epoch: int = Field(sa_column=Column("epoch", BigInteger, nullable=False))
    actor: str = _text("actor", 100)
    action: str = _text("action", 40)
    target_id: str = _text("target_id", 200)
    org_id: str | None = Field(default=None, sa_column=Column("org_id", String(40), nullable=True))
    detail: dict[str, Any] = Field(sa_column=Column("detail", JSON, nullable=False))


class IdempotencyRow(SQLModel, table=True):
    """What an Idempotency-Key made. It is written in the transaction that made it, so there is no half-done state."""

    __tablename__ = "idempotency_mark"
    caller: str = Field(sa_column=Column("caller", String(100), primary_key=True))
    mark: str = Field(sa_column=Column("mark", String(64), primary_key=True))
    """Hash of the header's value."""
    fingerprint: str = _text("fingerprint", 64)
    made_id: str = _text("made_id", 200)
    created_at_s: int = Field(sa_column=Column("created_at_s", BigInteger, nullable=False, index=True))


# The same tables for statements that are not about one row; the classes above declare them.
ORG, PROJECT, API_KEY = (SQLModel.metadata.tables[name] for name in ("org", "project", "api_key"))
LIMIT_ROW, MODEL_ALIAS, TENANT_CLASS = (
    SQLModel.metadata.tables[name] for name in ("limit_row", "model_alias", "tenant_class")
)
FEED_EPOCH, AUDIT_LOG, IDEMPOTENCY_MARK = (
    SQLModel.metadata.tables[name] for name in ("feed_epoch", "audit_log", "idempotency_mark")
)
