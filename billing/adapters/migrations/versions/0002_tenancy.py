"""Tenancy: orgs, projects, keys, limits, model aliases, the feed's epoch, audit log, idempotency marks.

Owns: the tables of `controlplane.adapters.tenancy_tables` as they were at this revision. It imports no model: a
revision that has run somewhere must mean the same for ever. It seeds the one row of the epoch and the class `default`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def _org_and_project() -> None:
    op.create_table(
        "feed_epoch",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("pepper_mark", sa.String(32), nullable=True),
        sa.CheckConstraint("id = 1", name="ck_feed_epoch_one_row"),
    )
    op.create_table(
        "tenant_class",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("outage_policy", sa.String(16), nullable=False),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False, index=True),
    )
    op.create_table(
        "org",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False, unique=True),
        sa.Column("tenant_class", sa.String(64), sa.ForeignKey("tenant_class.name"), nullable=False),
        sa.Column("created_at_s", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at_s", sa.BigInteger(), nullable=True),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False, index=True),
    )
    op.create_table(
        "project",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("org_id", sa.String(40), sa.ForeignKey("org.id"), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("created_at_s", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at_s", sa.BigInteger(), nullable=True),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False, index=True),
        sa.UniqueConstraint("org_id", "name", name="uq_project_org_name"),
    )


def _keys() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("org_id", sa.String(40), sa.ForeignKey("org.id"), nullable=False),
        sa.Column("project_id", sa.String(40), sa.ForeignKey("project.id"), nullable=False),
        sa.Column("lineage_id", sa.String(40), nullable=False),
        sa.Column("rotated_from", sa.String(40), sa.ForeignKey("api_key.id"), nullable=True, unique=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False, unique=True),
        sa.Column("digest", sa.LargeBinary(32), nullable=False, unique=True),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("models", sa.JSON(), nullable=True),
        sa.Column("created_at_s", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_s", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at_s", sa.BigInteger(), nullable=True),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False, index=True),
    )
    op.create_index("ix_api_key_project_id", "api_key", ["project_id", "id"])
    op.create_index("ix_api_key_org_id", "api_key", ["org_id", "id"])


def _limits_and_models() -> None:
    op.create_table(
        "limit_row",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("scope_kind", sa.String(8), nullable=False),
        sa.Column("scope_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("dimension", sa.String(32), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("period_s", sa.Integer(), nullable=False),
        sa.Column("burst", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at_s", sa.BigInteger(), nullable=True),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False, index=True),
        sa.UniqueConstraint("scope_kind", "scope_id", "model", "dimension", "period_s", name="uq_limit_row_what"),
    )
    op.create_table(
        "model_alias",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("served", sa.String(200), nullable=False),
        sa.Column("default_max_output_tokens", sa.Integer(), nullable=True),
        sa.Column("context_tokens", sa.Integer(), nullable=True),
        sa.Column("deleted_at_s", sa.BigInteger(), nullable=True),
        sa.Column("changed_epoch", sa.BigInteger(), nullable=False, index=True),
    )


def _audit_and_idempotency() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("at_s", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(100), nullable=False),
        sa.Column("action", sa.String(40), nullable=False),
        sa.Column("target_id", sa.String(200), nullable=False),
        sa.Column("org_id", sa.String(40), nullable=True),
        sa.Column("detail", sa.JSON(), nullable=False),
    )
    op.create_index("ix_audit_log_org_id", "audit_log", ["org_id", "id"])
    op.create_table(
        "idempotency_mark",
        sa.Column("caller", sa.String(100), primary_key=True),
        sa.Column("mark", sa.String(64), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("made_id", sa.String(200), nullable=False),
        sa.Column("created_at_s", sa.BigInteger(), nullable=False, index=True),
    )


def upgrade() -> None:
    """Create the tables and the two rows that must always exist."""
    _org_and_project()
    _keys()
    _limits_and_models()
    _audit_and_idempotency()
    op.execute("INSERT INTO feed_epoch (id, epoch) VALUES (1, 0)")
    op.execute("INSERT INTO tenant_class (name, outage_policy, changed_epoch) VALUES ('default', 'refuse', 0)")


def downgrade() -> None:
    """Drop them, children first."""
    for table in (
        "idempotency_mark",
        "audit_log",
        "model_alias",
        "limit_row",
        "api_key",
        "project",
        "org",
        "tenant_class",
        "feed_epoch",
    ):
        op.drop_table(table)
