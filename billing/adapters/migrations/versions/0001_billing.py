"""The billing tables: usage events, price books, the double-entry ledger, roll-ups and the shipper's books.

Revision ID: 0001
Revises:
Create Date: 2026-11-29

Owns the first shape of these tables; later changes are later files. It imports no models, so that it always makes what
it made on the day it was written. What must never change (events, books, postings, entries) is protected by triggers
of the database itself, because a fault of ours is exactly what they guard against.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Tables whose rows are written once. The database refuses UPDATE and DELETE on them.
APPEND_ONLY = ("usage_event", "usage_correction", "price_book", "price", "posting", "entry")


def upgrade() -> None:
    """Make the tables, then the triggers of the database at hand."""
    _events()
    _prices()
    _ledger()
    _rollups()
    _shipping()
    if _on_sqlite():
        _sqlite_triggers()
    else:
        _postgres_triggers()


def downgrade() -> None:
    """There is no way back from the first revision: the books would be gone."""
    raise NotImplementedError("Restore a backup instead: the first revision holds the books.")


def _on_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[Any]:
    """Ids and names: byte order on PostgreSQL, so that an index is fast and sorts as SQLite and Python do."""
    kind = sa.Text() if _on_sqlite() else sa.Text(collation="C")
    return sa.Column(name, kind, nullable=null, primary_key=key)


def _whole(name: str, *, null: bool = False, key: bool = False) -> sa.Column[Any]:
    """Counts, Unix times and ids in 64 bits."""
    return sa.Column(name, sa.BigInteger(), nullable=null, primary_key=key, autoincrement=False)


def _flag(name: str, *, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Boolean(), nullable=False, primary_key=key)


def _pico(name: str, *, null: bool = False) -> sa.Column[Any]:
    """Picodollars: see billing.adapters.sql.PicoInt."""
    return sa.Column(name, sa.BigInteger() if _on_sqlite() else sa.Numeric(38, 0), nullable=null)


def _whole_pico(table: str, *names: str) -> list[sa.CheckConstraint]:
    """SQLite turns an integer that overflows into a REAL without a word: refuse that."""
    if not _on_sqlite():
        return []
    return [sa.CheckConstraint(f"typeof({n}) IN ('integer', 'null')", name=f"{table}_{n}_whole") for n in names]


def _events() -> None:
    op.create_table(
        "usage_event",
        _text("event_id", key=True),
        _whole("schema_version"),
        _text("request_id"),
        _whole("attempt"),
        _text("org_id"),
        _text("project_id"),
        _text("key_id"),
        _text("end_user", null=True),
        _text("operation"),
        _text("profile", null=True),
        _text("model_asked"),
        _text("model_served"),
        _text("tier_asked", null=True),
        _text("tier_served", null=True),
        _text("deployment", null=True),
        _text("pool", null=True),
        _text("endpoint"),
        _text("endpoint_incarnation"),
        _text("node"),
        _text("batch_id", null=True),
        _text("custom_id", null=True),
        _flag("spillover"),
        _flag("stream"),
        _flag("billable"),
        _flag("estimated"),
        _text("outcome"),
        _whole("status", null=True),
        _text("error_code", null=True),
        _whole("choices"),
        _whole("reserved_input_tokens"),
        _whole("reserved_output_tokens"),
        _whole("predicted_cached_tokens", null=True),
        _whole("uncached_input_tokens", null=True),
        _whole("cached_input_tokens", null=True),
        _whole("cache_write_tokens", null=True),
        _whole("output_tokens", null=True),
        _whole("reasoning_tokens", null=True),
        _whole("received_ns"),
        _whole("opened_ns"),
        _whole("first_token_ns", null=True),
        _whole("ended_ns"),
        _text("payload_hash"),
        sa.Column("extra", sa.Text(), nullable=True),
        _text("price_version", null=True),
        _text("currency", null=True),
        _pico("amount_pico", null=True),
        _text("posting_id", null=True),
        sa.CheckConstraint("length(event_id) = 32", name="usage_event_id_length"),
        *_whole_pico("usage_event", "amount_pico"),
    )
    op.create_index("usage_event_org_time", "usage_event", ["org_id", "ended_ns"])
    op.create_index("usage_event_posting", "usage_event", ["posting_id"])
    op.create_index("usage_event_time", "usage_event", ["ended_ns"], postgresql_using="brin")
    op.create_table(
        "usage_correction",
        _text("event_id", key=True),
        _text("posting_id", key=True),
        _text("price_version_from", null=True),
        _text("price_version_to"),
        _text("currency"),
        _pico("delta_pico"),
        _whole("ended_ns"),
        _whole("posted_ns"),
        *_whole_pico("usage_correction", "delta_pico"),
    )
    op.create_index("usage_correction_posting", "usage_correction", ["posting_id"])
    op.create_index("usage_correction_time", "usage_correction", ["ended_ns"])


def _prices() -> None:
    op.create_table(
        "price_book",
        _text("version", key=True),
        # Empty: every org that has no book of its own in force.
        _text("org_id"),
        _text("currency"),
        _whole("valid_from_ns"),
        _whole("valid_until_ns", null=True),
        _whole("created_ns"),
        _text("note"),
        _text("content_hash"),
        sa.CheckConstraint("length(currency) = 3", name="price_book_currency"),
    )
    op.create_table(
        "price",
        _text("version", key=True),
        _text("model", key=True),
        _text("tier", key=True),
        _text("sku", key=True),
        _whole("micro_usd_per_million_tokens"),
        sa.ForeignKeyConstraint(
            ["version"], ["price_book.version"], name="price_of_book", deferrable=True, initially="DEFERRED"
        ),
        sa.CheckConstraint("micro_usd_per_million_tokens >= 0", name="price_not_negative"),
    )


def _ledger() -> None:
    op.create_table(
        "period",
        _text("period_id", key=True),
        _whole("starts_ns"),
        _whole("ends_ns"),
        _text("status"),
        _whole("closed_ns", null=True),
        _whole("posting_count", null=True),
        _text("previous_seal", null=True),
        _text("seal", null=True),
        sa.CheckConstraint("status IN ('open', 'closed')", name="period_status"),
        sa.CheckConstraint("(status = 'closed') = (seal IS NOT NULL)", name="period_sealed"),
    )
    op.create_table(
        "posting",
        _text("posting_id", key=True),
        _text("kind"),
        _text("org_id"),
        _text("currency"),
        _text("price_version", null=True),
        _text("period_id"),
        _whole("usage_from_ns"),
        _whole("usage_until_ns"),
        _whole("posted_ns"),
        _whole("event_count"),
        # XOR of the ids of the events, 32 hex digits: names an event that was deleted.
        _text("event_xor"),
        _text("memo"),
        sa.ForeignKeyConstraint(["period_id"], ["period.period_id"], name="posting_in_period"),
    )
    op.create_index("posting_org_period", "posting", ["org_id", "period_id"])
    op.create_index("posting_period", "posting", ["period_id"])
    op.create_table(
        "entry",
        _text("posting_id", key=True),
        _whole("line_no", key=True),
        _text("account"),
        _text("currency"),
        _text("model"),
        _text("tier"),
        _whole("quantity_tokens", null=True),
        _pico("amount_pico"),
        sa.ForeignKeyConstraint(
            ["posting_id"], ["posting.posting_id"], name="entry_of_posting", deferrable=True, initially="DEFERRED"
        ),
        *_whole_pico("entry", "amount_pico"),
    )


def _rollups() -> None:
    amounts = ("input_pico", "cached_input_pico", "cache_write_pico", "output_pico", "amount_pico")
    counts = (
        *("event_count", "unknown_count", "unpriced_count", "estimated_count"),
        *("uncached_input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens"),
        # How many of the events know each count: 0 means that the sum beside it is unknown, not zero.
        *("input_known_count", "output_known_count"),
        *("event_xor_high", "event_xor_low"),
    )
    op.create_table(
        "usage_rollup",
        _text("org_id", key=True),
        _whole("minute_s", key=True),
        _text("project_id", key=True),
        _text("key_id", key=True),
        _text("end_user", key=True),
        _text("model", key=True),
        _text("tier", key=True),
        _flag("batch", key=True),
        _flag("billable", key=True),
        _text("currency", key=True),
        _text("node", key=True),
        *(_whole(name) for name in counts),
        *(_pico(name) for name in amounts),
        *_whole_pico("usage_rollup", *amounts),
    )
    op.create_index("usage_rollup_minute", "usage_rollup", ["minute_s"])
    op.create_table(
        "refusal_minute",
        _text("org_id", key=True),
        _whole("minute_s", key=True),
        _text("project_id", key=True),
        _text("model", key=True),
        _text("reason", key=True),
        _text("node", key=True),
        _whole("refusal_count"),
    )


def _shipping() -> None:
    op.create_table(
        "spool_offset",
        _text("node", key=True),
        _text("incarnation", key=True),
        _whole("segment"),
        _whole("offset_bytes"),
        # Everything that this spool closed before this Unix time is in the ledger; null: nothing is promised.
        _whole("complete_to_ns", null=True),
        _flag("finished"),
        _whole("updated_ns"),
    )
    op.create_table(
        "quarantine",
        # Hash of reason and content, so that a replay does not file the same thing twice.
        _text("quarantine_id", key=True),
        _text("kind"),
        _text("reason"),
        _text("event_id", null=True),
        _text("node", null=True),
        _text("incarnation", null=True),
        sa.Column("raw", sa.LargeBinary(), nullable=False),
        _whole("at_ns"),
    )


def _sqlite_triggers() -> None:
    for table in APPEND_ONLY:
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append only: {verb} refused'); END"
            )
    _sqlite_guard("entry_before_posting", "entry", "posting", "posting_id", "an entry cannot join a finished posting")
    _sqlite_guard("price_before_book", "price", "price_book", "version", "a price cannot join a finished book")
    op.execute(
        "CREATE TRIGGER posting_balanced BEFORE INSERT ON posting "
        "WHEN EXISTS (SELECT 1 FROM entry WHERE posting_id = NEW.posting_id GROUP BY currency "
        "HAVING SUM(amount_pico) <> 0 OR currency <> NEW.currency) "
        "BEGIN SELECT RAISE(ABORT, 'the entries of a posting sum to zero in its currency'); END"
    )
    op.execute(
        "CREATE TRIGGER posting_in_open_period BEFORE INSERT ON posting "
        "WHEN (SELECT status FROM period WHERE period_id = NEW.period_id) = 'closed' "
        "BEGIN SELECT RAISE(ABORT, 'the period is closed'); END"
    )
    op.execute(
        "CREATE TRIGGER period_stays_closed BEFORE UPDATE ON period WHEN OLD.status = 'closed' "
        "BEGIN SELECT RAISE(ABORT, 'a closed period is sealed'); END"
    )
    op.execute(
        "CREATE TRIGGER period_no_delete BEFORE DELETE ON period "
        "BEGIN SELECT RAISE(ABORT, 'period is append only: DELETE refused'); END"
    )


def _sqlite_guard(name: str, table: str, parent: str, key: str, message: str) -> None:
    """Children are written before their parent; once it stands, it takes no more."""
    op.execute(
        f"CREATE TRIGGER {name} BEFORE INSERT ON {table} "  # noqa: S608 - names of this file
        f"WHEN EXISTS (SELECT 1 FROM {parent} WHERE {key} = NEW.{key}) "
        f"BEGIN SELECT RAISE(ABORT, '{message}'); END"
    )


def _postgres_triggers() -> None:
    _postgres_function(
        "inferplane_append_only",
        "RAISE EXCEPTION '% is append only: % refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'check_violation';",
    )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION inferplane_append_only()"
        )
    _postgres_guard("entry_before_posting", "entry", "posting", "posting_id", "an entry cannot join a finished posting")
    _postgres_guard("price_before_book", "price", "price_book", "version", "a price cannot join a finished book")
    _postgres_function(
        "inferplane_posting_balanced",
        "IF EXISTS (SELECT 1 FROM entry WHERE posting_id = NEW.posting_id GROUP BY currency "
        "HAVING SUM(amount_pico) <> 0 OR currency <> NEW.currency) THEN "
        "RAISE EXCEPTION 'the entries of a posting sum to zero in its currency' USING ERRCODE = 'check_violation'; "
        "END IF; RETURN NULL;",
    )
    op.execute(
        "CREATE CONSTRAINT TRIGGER posting_balanced AFTER INSERT ON posting DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION inferplane_posting_balanced()"
    )
    _postgres_function(
        "inferplane_period_open",
        "IF (SELECT status FROM period WHERE period_id = NEW.period_id) = 'closed' THEN "
        "RAISE EXCEPTION 'the period is closed' USING ERRCODE = 'check_violation'; END IF; RETURN NEW;",
    )
    op.execute(
        "CREATE TRIGGER posting_in_open_period BEFORE INSERT ON posting "
        "FOR EACH ROW EXECUTE FUNCTION inferplane_period_open()"
    )
    _postgres_function(
        "inferplane_period_sealed",
        "IF TG_OP = 'DELETE' OR OLD.status = 'closed' THEN "
        "RAISE EXCEPTION 'a closed period is sealed' USING ERRCODE = 'check_violation'; END IF; RETURN NEW;",
    )
    op.execute(
        "CREATE TRIGGER period_stays_closed BEFORE UPDATE OR DELETE ON period "
        "FOR EACH ROW EXECUTE FUNCTION inferplane_period_sealed()"
    )


def _postgres_guard(name: str, table: str, parent: str, key: str, message: str) -> None:
    """Children are written before their parent; once it stands, it takes no more."""
    _postgres_function(
        f"inferplane_{name}",
        f"IF EXISTS (SELECT 1 FROM {parent} WHERE {key} = NEW.{key}) THEN "  # noqa: S608 - names of this file
        f"RAISE EXCEPTION '{message}' USING ERRCODE = 'check_violation'; END IF; RETURN NEW;",
    )
    op.execute(f"CREATE TRIGGER {name} BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION inferplane_{name}()")


def _postgres_function(name: str, body: str) -> None:
    op.execute(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$")
