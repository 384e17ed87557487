"""PostgreSQL: usage events in partitions by ranges of ids, a calendar month each.

Revision ID: 0003
Revises: 0002
Create Date: 2026-11-29

Owns: the conversion of `usage_event`, there and back; SQLite is left as it is. What is there already becomes one
partition, `usage_event_history`, up to the end of this month: it is attached, not copied, so the lock is held for one
reading of it and not for writing tens of gigabytes again. A table without rows becomes monthly partitions at once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# Months made beyond the present one; the worker goes on from there each hour.
MONTHS_AHEAD = 3
_INDEXES = {
    "usage_event_org_time": "USING btree (org_id, ended_ns)",
    "usage_event_posting": "USING btree (posting_id)",
    "usage_event_time": "USING brin (ended_ns)",
}
# An event whose id is no UUIDv7, or of a time more than an hour away from when it came in or ended: a query that looks
# for it by time must not look only where ids of that time lie (billing.ledger.ID_MARGIN_NS).
_MISDATED = (
    "substr({0}event_id, 13, 1) <> '7' "
    "OR {0}event_id < lpad(to_hex(greatest(greatest({0}received_ns, {0}ended_ns) / 1000000 - 3600000, 0)), 12, '0') "
    "OR {0}event_id >= lpad(to_hex(least({0}received_ns, {0}ended_ns) / 1000000 + 3600001), 12, '0')"
)


def upgrade() -> None:
    """Make the partitioned table, and put what is there into it."""
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute("LOCK TABLE usage_event IN ACCESS EXCLUSIVE MODE")
    op.execute("ALTER TABLE usage_event RENAME TO usage_event_history")
    op.execute("ALTER TABLE usage_event_history RENAME CONSTRAINT usage_event_pkey TO usage_event_history_pkey")
    for name in _INDEXES:
        op.execute(f"ALTER INDEX {name} RENAME TO {name.replace('usage_event', 'usage_event_history')}")
    op.execute(
        "CREATE TABLE usage_event (LIKE usage_event_history INCLUDING DEFAULTS INCLUDING CONSTRAINTS) "
        "PARTITION BY RANGE (event_id)"
    )
    _index_and_protect("usage_event")
    op.execute("CREATE TABLE usage_event_default PARTITION OF usage_event DEFAULT")
    _protect("usage_event_default")
    months = _months(MONTHS_AHEAD + 2)
    if op.get_bind().exec_driver_sql("SELECT EXISTS (SELECT 1 FROM usage_event_history)").scalar():
        _make_months(months[1:])
        _attach_history(months[1])
    else:
        op.execute("DROP TABLE usage_event_history")
        _make_months(months)
    _note_misdated()


def downgrade() -> None:
    """Copy everything back into one plain table."""
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute("LOCK TABLE usage_event IN ACCESS EXCLUSIVE MODE")
    op.execute("CREATE TABLE usage_event_plain (LIKE usage_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
    op.execute("INSERT INTO usage_event_plain SELECT * FROM usage_event")
    op.execute("DROP TABLE usage_event")
    op.execute("DROP TABLE usage_event_misdated")
    op.execute("DROP FUNCTION inferplane_note_misdated()")
    op.execute("ALTER TABLE usage_event_plain RENAME TO usage_event")
    _index_and_protect("usage_event")


def _index_and_protect(table: str) -> None:
    op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {table}_pkey PRIMARY KEY (event_id)")
    for name, how in _INDEXES.items():
        op.execute(f"CREATE INDEX {name} ON {table} {how}")
    _protect(table)


def _protect(table: str) -> None:
    """Rows are written once. A statement's trigger is not inherited: each partition has its own."""
    op.execute(
        f"CREATE TRIGGER usage_event_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION inferplane_append_only()"
    )


def _months(count: int) -> list[datetime]:
    """The first moments of this month and of those that follow."""
    first = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    found = [first]
    while len(found) < count:
        year, month = divmod(first.year * 12 + first.month - 1 + len(found), 12)
        found.append(first.replace(year=year, month=month + 1))
    return found


def _bound(moment: datetime) -> str:
    """The least id of a moment: a UUIDv7 begins with 12 hex digits of Unix ms."""
    return f"{int(moment.timestamp()) * 1000:012x}"


def _make_months(starts: list[datetime]) -> None:
    """A partition from each moment to the one after it."""
    for start, end in pairwise(starts):
        name = f"usage_event_{start:%Y_%m}"
        op.execute(
            f"CREATE TABLE {name} PARTITION OF usage_event FOR VALUES FROM ('{_bound(start)}') TO ('{_bound(end)}')"
        )
        _protect(name)


def _attach_history(until: datetime) -> None:
    """What is there becomes the partition below `until`; the few ids above it (a clock ahead) go where they belong."""
    above = f"WHERE event_id >= '{_bound(until)}'"
    op.execute("DROP TRIGGER usage_event_append_only ON usage_event_history")
    op.execute(f"INSERT INTO usage_event SELECT * FROM usage_event_history {above}")  # noqa: S608 - names of this file
    op.execute(f"DELETE FROM usage_event_history {above}")  # noqa: S608 - names of this file
    _protect("usage_event_history")
    op.execute(
        "ALTER TABLE usage_event ATTACH PARTITION usage_event_history "
        f"FOR VALUES FROM (MINVALUE) TO ('{_bound(until)}')"
    )


def _note_misdated() -> None:
    """The table of events whose ids do not tell their time, filled from now on by a trigger."""
    op.execute(
        'CREATE TABLE usage_event_misdated (event_id text COLLATE "C" PRIMARY KEY, '
        "least_ns bigint NOT NULL, most_ns bigint NOT NULL)"
    )
    columns = "event_id, least({0}received_ns, {0}ended_ns), greatest({0}received_ns, {0}ended_ns)"
    op.execute(
        f"INSERT INTO usage_event_misdated SELECT {columns.format('')} FROM usage_event "  # noqa: S608 - names of this file
        f"WHERE {_MISDATED.format('')}"
    )
    note = f"INSERT INTO usage_event_misdated VALUES (NEW.{columns.format('NEW.')}) ON CONFLICT DO NOTHING;"  # noqa: S608 - names of this file
    op.execute(
        "CREATE FUNCTION inferplane_note_misdated() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {note} RETURN NULL; END $$"
    )
    op.execute(
        "CREATE TRIGGER usage_event_misdated AFTER INSERT ON usage_event FOR EACH ROW "
        f"WHEN ({_MISDATED.format('NEW.')}) EXECUTE FUNCTION inferplane_note_misdated()"
    )
