"""The statements of one ingest transaction, for both databases.

Owns: how rows of events, transfers, roll-ups, refusals, quarantine and offsets are written fast: executemany on
SQLite, COPY into a temporary staging table and pipelined statements on PostgreSQL. Does not own: what is written and in
which order (`ingest`), or the transaction (its caller opens it). Statements are built from column names of this
package only; every value is a parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import orjson
from sqlalchemy.engine import Connection

from billing.adapters.event_rows import COLUMNS, to_row
from billing.adapters.sql import is_sqlite
from billing.ledger import NS_PER_S, RatedEvent, Transfer, period_of
from billing.rollup import MINUTE_S, SUMS, XOR_SUMS, RollupKey, RollupSums
from billing.usage_event import Refusal

_ROLLUP_KEYS = tuple(one.name for one in fields(RollupKey))
_key_values = attrgetter(*_ROLLUP_KEYS)
_sums_of = attrgetter(*SUMS)
_REFUSAL_KEYS = ("org_id", "minute_s", "project_id", "model", "reason", "node")
_POSTING_COLUMNS = (
    *("posting_id", "kind", "org_id", "currency", "price_version", "period_id"),
    *("usage_from_ns", "usage_until_ns", "posted_ns", "event_count", "event_xor", "memo"),
)
_ENTRY_COLUMNS = (*("posting_id", "line_no", "account", "currency", "model", "tier", "quantity_tokens", "amount_pico"),)
_QUARANTINE_COLUMNS = ("quarantine_id", "kind", "reason", "event_id", "node", "incarnation", "raw", "at_ns")
_OFFSET_COLUMNS = ("node", "incarnation", "segment", "offset_bytes", "complete_to_ns", "finished", "updated_ns")


class Raced(Exception):
    """Another writer got in between; the transaction is rolled back and done again."""


@dataclass(frozen=True, slots=True)
class SpoolOffset:
    """Where to go on reading a spool folder: `offset_bytes` into segment number `segment`.

    `complete_to_ns`: every event that this folder's process ends from now on ends at or after this Unix time, so the
    books are complete up to it as far as this folder goes; None leaves what was promised before. `finished`: the
    folder is shipped whole and its process is gone, so it holds the watermark back no more.
    """

    node: str
    incarnation: str
    segment: int
    offset_bytes: int
    complete_to_ns: int | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class SpoolRefusal:
    """A refusal counter and the spool folder it was read from."""

    refusal: Refusal
    node: str
    incarnation: str

    @property
    def spool(self) -> tuple[str, str]:
        """(node, incarnation)."""
        return (self.node, self.incarnation)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Something that cannot be taken into the books: a frame, an event, or an event in conflict with a stored one."""

    kind: str
    """frame | event | conflict"""
    reason: str
    raw: bytes
    node: str | None = None
    incarnation: str | None = None
    event_id: str | None = None

    @property
    def quarantine_id(self) -> str:
        """Hash of the kind, the reason and the content: filing the same thing again changes nothing."""
        content = b"\x00".join((self.kind.encode(), self.reason.encode("utf-8", "backslashreplace"), self.raw))
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def writer(connection: Connection) -> Writer:
    """The writer for the database of this connection."""
    return Writer(connection) if is_sqlite(connection) else PostgresWriter(connection)


class Writer:
    """Writes on SQLite; what PostgreSQL does differently is overridden below."""

    _mark = "?"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def hashes_of(self, event_ids: Sequence[str]) -> dict[str, str]:
        """Payload hash by id, of those events that the books hold."""
        if not event_ids:
            return {}
        sql = "SELECT event_id, payload_hash FROM usage_event WHERE event_id IN (SELECT value FROM json_each(?))"
        rows = self._connection.exec_driver_sql(sql, (orjson.dumps(list(event_ids)).decode(),))
        return {row[0]: row[1] for row in rows}

    def insert_events(self, rated: Sequence[RatedEvent], posting_of: Mapping[str, str]) -> None:
        """Insert events that are new. Raises Raced when one of them is not new any more."""
        rows = [to_row(one.event, one.charge, posting_of.get(one.event.event_id)) for one in rated]
        if rows and self._insert_rows(rows) != len(rows):
            raise Raced

    def closed_periods(self) -> frozenset[str]:
        """Ids of the periods that take no more postings."""
        rows = self._connection.exec_driver_sql("SELECT period_id FROM period WHERE status = 'closed'")
        return frozenset(row[0] for row in rows)

    def hold_periods(self, period_ids: Iterable[str]) -> None:
        """Make the periods exist, and keep them open until the transaction ends. Raises Raced when one is closed."""
        wanted = sorted(period_ids)
        periods = [period_of(period_id) for period_id in wanted]
        rows: list[tuple[Any, ...]] = [(one.period_id, one.starts_ns, one.ends_ns, "open") for one in periods]
        self._many("period", ("period_id", "starts_ns", "ends_ns", "status"), rows, "ON CONFLICT DO NOTHING")
        if rows:
            self._lock_periods(wanted)

    def insert_transfers(self, transfers: Sequence[Transfer], now_ns: int) -> None:
        """Insert entries, then the postings that close them: the triggers check and refuse in that order."""
        entries = [
            (one.posting_id, line, leg.account, leg.currency, leg.model, leg.tier, leg.quantity_tokens, leg.amount_pico)
            for one in transfers
            for line, leg in enumerate(one.entries, start=1)
        ]
        postings = [
            (
                *(one.posting_id, one.kind.value, one.key.org_id, one.key.currency, one.key.price_version),
                *(one.key.period_id, one.usage_from_ns, one.usage_until_ns, now_ns),
                *(one.event_count, one.event_xor, one.memo),
            )
            for one in transfers
        ]
        self._many("entry", _ENTRY_COLUMNS, entries)
        self._many("posting", _POSTING_COLUMNS, postings)

    def add_rollups(self, rows: Mapping[RollupKey, RollupSums]) -> None:
        """Add to the roll-up rows."""
        combined = ", ".join(
            f"{name} = (usage_rollup.{name} | excluded.{name}) - (usage_rollup.{name} & excluded.{name})"
            if name in XOR_SUMS
            else f"{name} = usage_rollup.{name} + excluded.{name}"
            for name in SUMS
        )
        self._many(
            "usage_rollup",
            (*_ROLLUP_KEYS, *SUMS),
            # In one order on every node, so that two writers cannot deadlock.
            [(*_key_values(key), *_sums_of(rows[key])) for key in sorted(rows, key=_key_values)],
            f"ON CONFLICT ({', '.join(_ROLLUP_KEYS)}) DO UPDATE SET {combined}",
        )

    def add_refusals(self, refusals: Sequence[SpoolRefusal]) -> None:
        """Add to the counters of refusals."""
        counts: dict[tuple[Any, ...], int] = {}
        for one in refusals:
            said = one.refusal
            minute_s = said.minute_ns // (MINUTE_S * NS_PER_S) * MINUTE_S
            key = (said.org_id, minute_s, said.project_id, said.model, said.reason, one.node)
            counts[key] = counts.get(key, 0) + said.count
        self._many(
            "refusal_minute",
            (*_REFUSAL_KEYS, "refusal_count"),
            [(*key, counts[key]) for key in sorted(counts)],
            f"ON CONFLICT ({', '.join(_REFUSAL_KEYS)}) DO UPDATE SET "
            "refusal_count = refusal_minute.refusal_count + excluded.refusal_count",
        )

    def quarantine(self, found: Sequence[Quarantined], now_ns: int) -> None:
        """Keep what could not be taken in."""
        rows = [
            (
                *(one.quarantine_id, one.kind, _storable(one.reason), one.event_id, one.node, one.incarnation),
                *(one.raw, now_ns),
            )
            for one in found
        ]
        self._many("quarantine", _QUARANTINE_COLUMNS, rows, "ON CONFLICT (quarantine_id) DO NOTHING")

    def put_offsets(self, offsets: Sequence[SpoolOffset], now_ns: int) -> frozenset[tuple[str, str]]:
        """Store the offsets that moved forward; gives the (node, incarnation) of those. One that moves back is left."""
        advanced = set()
        mark = self._mark
        for one in sorted(offsets, key=lambda o: (o.node, o.incarnation)):
            values = (
                one.node,
                one.incarnation,
                one.segment,
                one.offset_bytes,
                one.complete_to_ns,
                one.finished,
                now_ns,
            )
            before = self._connection.exec_driver_sql(
                f"SELECT segment, offset_bytes FROM spool_offset WHERE node = {mark} AND incarnation = {mark}"  # noqa: S608 - parameter marks only
                f"{self._for_update}",
                (one.node, one.incarnation),
            ).first()
            position = (one.segment, one.offset_bytes)
            if before is not None and position < (before[0], before[1]):
                continue
            self._many(
                "spool_offset",
                _OFFSET_COLUMNS,
                [values],
                "ON CONFLICT (node, incarnation) DO UPDATE SET segment = excluded.segment, "
                "offset_bytes = excluded.offset_bytes, finished = excluded.finished, updated_ns = excluded.updated_ns, "
                "complete_to_ns = COALESCE(excluded.complete_to_ns, spool_offset.complete_to_ns)",
            )
            if before is None or position > (before[0], before[1]):
                advanced.add((one.node, one.incarnation))
        return frozenset(advanced)

    _for_update = ""

    def _insert_rows(self, rows: list[tuple[Any, ...]]) -> int:
        marks = ", ".join("?" * len(COLUMNS))
        sql = f"INSERT INTO usage_event ({', '.join(COLUMNS)}) VALUES ({marks}) ON CONFLICT (event_id) DO NOTHING"  # noqa: S608 - column names of this package
        return self._connection.exec_driver_sql(sql, rows).rowcount

    def _lock_periods(self, period_ids: list[str]) -> None:
        """SQLite: the transaction holds the only write lock already."""

    def _many(self, into: str, columns: Sequence[str], rows: list[tuple[Any, ...]], clause: str = "") -> None:
        if rows:
            marks = ", ".join([self._mark] * len(columns))
            sql = f"INSERT INTO {into} ({', '.join(columns)}) VALUES ({marks}) {clause}"  # noqa: S608 - names of this package
            self._connection.exec_driver_sql(sql, rows)


class PostgresWriter(Writer):
    """Writes on PostgreSQL."""

    _mark = "%s"
    _for_update = " FOR UPDATE"

    def hashes_of(self, event_ids: Sequence[str]) -> dict[str, str]:
        """Payload hash by id, of those events that the books hold."""
        if not event_ids:
            return {}
        sql = "SELECT event_id, payload_hash FROM usage_event WHERE event_id = ANY(%s)"
        rows = self._connection.exec_driver_sql(sql, (list(event_ids),))
        return {row[0]: row[1] for row in rows}

    def _insert_rows(self, rows: list[tuple[Any, ...]]) -> int:
        columns = ", ".join(COLUMNS)
        self._connection.exec_driver_sql(
            "CREATE TEMP TABLE IF NOT EXISTS usage_event_stage (LIKE usage_event) ON COMMIT DELETE ROWS"
        )
        cursor = self._connection.connection.cursor()
        try:
            with cursor.copy(f"COPY usage_event_stage ({columns}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        finally:
            cursor.close()
        sql = (
            f"INSERT INTO usage_event ({columns}) SELECT {columns} FROM usage_event_stage "  # noqa: S608 - column names of this package
            "ON CONFLICT (event_id) DO NOTHING"
        )
        return self._connection.exec_driver_sql(sql).rowcount

    def _lock_periods(self, period_ids: list[str]) -> None:
        # A shared lock: any number of writers hold it; closing a period waits for them.
        sql = "SELECT status FROM period WHERE period_id = ANY(%s) ORDER BY period_id FOR SHARE"
        if any(row[0] != "open" for row in self._connection.exec_driver_sql(sql, (period_ids,))):
            raise Raced


def _storable(text: str) -> str:
    """Text that both databases take: no NUL, no lone surrogate."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
