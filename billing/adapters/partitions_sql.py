"""Partitions of `usage_event` on PostgreSQL: months made ahead, and where a query by time has to look.

Owns: which months have a partition, moving rows out of the default partition when their month gets one, and the
conditions on the id that follow from a time. Does not own: the partitioned table itself (migration 0003), when this
runs (`controlplane.adapters.tasks`, `inferplane db upgrade`), or queries. SQLite has no partitions: nothing is done.

Ids are UUIDv7, so a range of ids is a range of time, and the unique key of the id, which is what makes an event count
once, can be the partitioned table's own. Events of a month without a partition go to the default partition: nothing is
ever refused for want of one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from billing.adapters.event_rows import COLUMNS
from billing.adapters.sql import is_sqlite, read, write
from billing.adapters.tables import UsageEventRow, table
from billing.errors import StoreError
from billing.ledger import ID_MARGIN_NS, NS_PER_S, Period, event_id_floor, month_of, time_of_id

_log = logging.getLogger(__name__)
_EVENT = table(UsageEventRow)
# Months made beyond the present one: a worker may be away for a quarter before an event lands in the default.
MONTHS_AHEAD = 3
# Months made in one run; each is a transaction of its own, and the next run goes on.
MAX_MONTHS_PER_RUN = 24
# A partition is attached under a lock that waits for readers of the default partition and holds up new ones meanwhile:
# rather another hour without it than a stop of ingest.
LOCK_WAIT_S = 2.0
# Key of the advisory lock of this work: the bytes "inferpar" as a signed 64-bit number.
_LOCK_KEY = int.from_bytes(b"inferpar", "big", signed=True)
# SQLSTATE lock_not_available: `LOCK_WAIT_S` is over.
_LOCK_NOT_AVAILABLE = "55P03"
# SQLSTATE insufficient_privilege: only the owner of a table adds to it.
_INSUFFICIENT_PRIVILEGE = "42501"
_BOUND = re.compile(r"FOR VALUES FROM \((MINVALUE|'([0-9a-f]*)')\) TO \((MAXVALUE|'([0-9a-f]*)')\)")
# Sorts after every id.
_END = "g"
# Ids know milliseconds.
_NS_PER_MS = 1_000_000
# 9000-01-01 in Unix ns: a clock beyond it is broken, and the calendar ends soon after.
_LAST_NS = 221_845_392_000 * NS_PER_S


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What `make_partitions` did. Months are ids of periods, "2026-11"."""

    made: tuple[str, ...] = ()
    moved_row_count: int = 0
    """Rows that had landed in the default partition."""
    put_off: str | None = None
    """The month at which it stopped, because a lock was not free in time or another worker is at it."""


def make_partitions(engine: Engine, now_ns: int, lock_wait_s: float = LOCK_WAIT_S) -> PartitionReport:
    """Make the partitions of this month, of the months ahead, and of months that the default partition holds rows of.

    Safe to repeat and to run from several places at once. Each month is one transaction: it is there with all of its
    rows, or not at all. Raises StoreError where the role does not own the table.
    """
    if is_sqlite(engine):
        return PartitionReport()
    with read(engine) as connection:
        missing = _missing(connection, now_ns)
    made: list[str] = []
    moved_count = 0
    for period in missing:
        try:
            with write(engine) as connection:
                moved = _make(connection, period, lock_wait_s)
        except sa.exc.OperationalError as fault:
            if getattr(fault.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            moved = None
        except sa.exc.ProgrammingError as fault:
            if getattr(fault.orig, "sqlstate", None) != _INSUFFICIENT_PRIVILEGE:
                raise
            raise StoreError(
                f"The partition of {period.period_id} was not made: the database role does not own usage_event; "
                "run inferplane db upgrade as the role that does."
            ) from None
        if moved is None:
            return PartitionReport(tuple(made), moved_count, period.period_id)
        made.append(period.period_id)
        moved_count += moved
    return PartitionReport(tuple(made), moved_count)


def hold_still(connection: Connection) -> None:
    """Until this transaction ends no event moves to another partition. The first read of a transaction that reads
    events comes after it: a statement that waits for a move is pruned by the partitions after it and sees the rows
    from before it, and so none. Waits for a move that is under way; `make_partitions` puts itself off meanwhile.
    """
    if not is_sqlite(connection):
        connection.exec_driver_sql("LOCK TABLE usage_event_default IN ACCESS SHARE MODE")  # takes no snapshot


def within(connection: Connection, from_ns: int, until_ns: int) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions on `usage_event.event_id` that every event which came in or ended in [from_ns, until_ns) fulfils.

    With them a query by time reads the partitions of that time only. No conditions on SQLite, and none where an event
    of that time has an id that does not tell it: such events are noted by the database as they come in.
    """
    if is_sqlite(connection):
        return ()
    odd = "SELECT EXISTS (SELECT 1 FROM usage_event_misdated WHERE least_ns < %s AND most_ns >= %s)"
    if connection.exec_driver_sql(odd, (until_ns, from_ns)).scalar():
        return ()
    low, last = event_id_floor(from_ns - ID_MARGIN_NS), event_id_floor(until_ns - 1 + ID_MARGIN_NS + _NS_PER_MS)
    return (_EVENT.c.event_id >= low, _EVENT.c.event_id < last)


def _missing(connection: Connection, now_ns: int) -> list[Period]:
    """The months without a partition that should have one, oldest first."""
    month = month_of(now_ns)
    wanted = {month.period_id: month}
    for _ in range(MONTHS_AHEAD):
        month = month_of(month.ends_ns)
        wanted[month.period_id] = month
    ranges, last = list(_ranges(connection)), month.ends_ns
    for month in _months_in_default(connection):
        if month.ends_ns <= last:
            wanted[month.period_id] = month
    missing = [wanted[name] for name in sorted(wanted) if not _covered(wanted[name], ranges)]
    return [period for period in missing if not _is_taken(connection, period)][:MAX_MONTHS_PER_RUN]


def _ranges(connection: Connection) -> Iterator[tuple[str, str]]:
    """[low, high) of ids of each partition but the default."""
    rows = connection.exec_driver_sql(
        "SELECT pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'usage_event'::regclass"
    )
    for row in rows:
        found = _BOUND.fullmatch(row[0])
        if found is not None:
            yield found[2] or "", _END if found[4] is None else found[4]


def _covered(period: Period, ranges: list[tuple[str, str]]) -> bool:
    low, high = event_id_floor(period.starts_ns), event_id_floor(period.ends_ns)
    return any(one_low < high and low < one_high for one_low, one_high in ranges)


def _months_in_default(connection: Connection) -> Iterator[Period]:
    """The months of which the default partition holds ids of our form: one step of an index for each."""
    low = ""
    for _ in range(MAX_MONTHS_PER_RUN):
        found = connection.exec_driver_sql(
            "SELECT event_id FROM usage_event_default WHERE event_id >= %s AND substr(event_id, 13, 1) = '7' "
            "ORDER BY event_id LIMIT 1",
            (low,),
        ).scalar()
        made_ns = None if found is None else time_of_id(found)
        if made_ns is None or made_ns >= _LAST_NS:
            return
        month = month_of(made_ns)
        yield month
        low = event_id_floor(month.ends_ns)


def _is_taken(connection: Connection, period: Period) -> bool:
    """Whether a table has the partition's name without being one: somebody detached it, and it stays detached."""
    # Both functions look at the catalogue of now, not of this transaction: another worker may just have made it.
    asked = "SELECT to_regclass(%s) IS NOT NULL AND pg_partition_root(to_regclass(%s)) IS NULL"
    taken = bool(connection.exec_driver_sql(asked, (_name(period), _name(period))).scalar())
    if taken:
        _log.warning("The table %s is no partition of usage_event; events of its month stay outside.", _name(period))
    return taken


def _make(connection: Connection, period: Period, lock_wait_s: float) -> int | None:
    """Make one partition; gives how many rows moved into it, None where another worker is making it."""
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, int(lock_wait_s * 1000))}")
    if not connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({_LOCK_KEY})").scalar():
        return None
    if _covered(period, list(_ranges(connection))):
        return None
    name, low, high = _name(period), event_id_floor(period.starts_ns), event_id_floor(period.ends_ns)
    # What attaching will lock anyway; nobody adds to the default while its rows move.
    connection.exec_driver_sql("LOCK TABLE usage_event_default IN ACCESS EXCLUSIVE MODE")
    connection.exec_driver_sql(f"CREATE TABLE {name} (LIKE usage_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
    moved = _move(connection, name, low, high)
    connection.exec_driver_sql(
        f"ALTER TABLE usage_event ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')"
    )
    connection.exec_driver_sql(
        f"CREATE TRIGGER usage_event_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {name} "
        "FOR EACH STATEMENT EXECUTE FUNCTION inferplane_append_only()"
    )
    return moved


def _move(connection: Connection, name: str, low: str, high: str) -> int:
    """Move the rows of a range out of the default partition. The one place where a row leaves a table of the books."""
    inside, columns = "WHERE event_id >= %s AND event_id < %s", ", ".join(COLUMNS)
    held = connection.exec_driver_sql(f"SELECT 1 FROM usage_event_default {inside} LIMIT 1", (low, high)).first()  # noqa: S608 - names of this package
    if held is None:
        return 0
    connection.exec_driver_sql("ALTER TABLE usage_event_default DISABLE TRIGGER usage_event_append_only")
    copied = connection.exec_driver_sql(
        f"INSERT INTO {name} ({columns}) SELECT {columns} FROM usage_event_default {inside}",  # noqa: S608 - names of this package
        (low, high),
    ).rowcount
    dropped = connection.exec_driver_sql(f"DELETE FROM usage_event_default {inside}", (low, high)).rowcount  # noqa: S608 - names of this package
    connection.exec_driver_sql("ALTER TABLE usage_event_default ENABLE TRIGGER usage_event_append_only")
    if copied != dropped:  # pragma: no cover - the lock makes it impossible; money is not moved on trust
        raise StoreError(f"{copied} rows were copied to {name}, {dropped} left the default partition.")
    return copied


def _name(period: Period) -> str:
    return f"usage_event_{period.period_id.replace('-', '_')}"
