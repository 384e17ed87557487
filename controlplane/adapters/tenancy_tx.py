"""Transactions over the tenancy tables: the epoch, the audit line and the Idempotency-Key belong to every change.

Owns: how a change is made so that feeds see it whole (epoch first, rows stamped with it, audit line beside them), the
check that this node has the cluster's pepper, and the translation of database faults. Does not own: which rows a
change writes (`keys_sql`, `catalog_sql`).

Every write transaction first updates the one row of `feed_epoch`. That row's lock puts all tenancy writers in one
line, which buys two things: epochs are committed in order (a reader that saw epoch n has everything up to n), and
"look, then insert" cannot race. Admin writes are rare, so one line is wide enough.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
import uuid_utils
from sqlalchemy.engine import Connection, Engine, Row

from billing.adapters import sql
from controlplane.adapters.tenancy_records import Idempotency
from controlplane.adapters.tenancy_tables import AUDIT_LOG, FEED_EPOCH, IDEMPOTENCY_MARK
from controlplane.errors import BadRequest, ConfigError, GatewayError, StoreUnavailable

# How long an Idempotency-Key is remembered: twice the 24 h that the IETF draft's users expect (reference gateway 2.8).
_REMEMBER_S = 48 * 3_600
# Old marks deleted beside a new one; more than are made, so the table cannot grow for ever.
_FORGET_COUNT = 20


def new_id(kind: str) -> str:
    """A new id: the kind, `_` and a UUIDv7 in hex, so that ids sort by creation and lists page by id."""
    return f"{kind}_{uuid_utils.uuid7().hex}"


@dataclass(frozen=True, slots=True)
class TenancyDb:
    """Where tenancy is stored, and in whose name it is changed."""

    engine: Engine
    pepper_mark: str
    actor: str = "system"
    """Who acts, for the audit log: `cli:NAME` or `key:PREFIX`; never a secret."""
    clock_s: Callable[[], float] = time.time
    announce: Callable[[int], None] | None = None
    """Told the epoch after each commit, to wake the feeds early. It must neither raise nor wait long."""

    def acting(self, actor: str) -> TenancyDb:
        """The same database, changed in the name of `actor`."""
        return replace(self, actor=actor[:100])

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent view. Raises StoreUnavailable."""
        with faults(), sql.read(self.engine) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Writing]:
        """One change. Raises StoreUnavailable, and ConfigError when this node's pepper is not the cluster's."""
        with faults(), sql.write(self.engine) as connection:
            epoch = self._next_epoch(connection)
            yield Writing(connection, epoch, int(self.clock_s()), self.actor)
        if self.announce is not None:
            self.announce(epoch)

    def require_pepper(self) -> None:
        """Raise ConfigError when this node's pepper is not the cluster's, and StoreUnavailable."""
        with self.reading() as connection:
            mark = connection.execute(sa.select(FEED_EPOCH.c.pepper_mark).where(FEED_EPOCH.c.id == 1)).scalar()
        check_pepper(mark, self.pepper_mark)

    def _next_epoch(self, connection: Connection) -> int:
        bumped = sa.update(FEED_EPOCH).where(FEED_EPOCH.c.id == 1).values(epoch=FEED_EPOCH.c.epoch + 1)
        row = connection.execute(bumped.returning(FEED_EPOCH.c.epoch, FEED_EPOCH.c.pepper_mark)).one()
        if row.pepper_mark is None:
            connection.execute(sa.update(FEED_EPOCH).values(pepper_mark=self.pepper_mark))
        check_pepper(row.pepper_mark, self.pepper_mark)
        return int(row.epoch)


def check_pepper(stored: str | None, ours: str) -> None:
    """Raise ConfigError when the database's keys were made with another pepper than this node's."""
    if stored is not None and stored != ours:
        raise ConfigError(
            f"This node's key pepper (mark {ours}) is not the one that the keys of this database were made with (mark "
            f"{stored}): give every node the same INFERPLANE_KEY_PEPPER, or the same file `pepper` in its data_dir."
        )


@dataclass(frozen=True, slots=True)
class Writing:
    """One open change. Rows written through it carry its epoch."""

    connection: Connection
    epoch: int
    now_s: int
    actor: str

    def put(self, table: sa.Table, **values: Any) -> None:
        """Insert a row."""
        self.connection.execute(sa.insert(table).values(**values, changed_epoch=self.epoch))

    def change(self, table: sa.Table, key: sa.ColumnElement[bool], **values: Any) -> None:
        """Update the rows that `key` picks."""
        self.connection.execute(sa.update(table).where(key).values(**values, changed_epoch=self.epoch))

    def first(self, query: sa.Select[Any]) -> Row[Any] | None:
        """The first row of a query."""
        return self.connection.execute(query.limit(1)).first()

    def note(self, action: str, target_id: str, org_id: str | None, **detail: Any) -> None:
        """Write the audit line of this change."""
        values = {"actor": self.actor, "action": action, "target_id": target_id, "org_id": org_id, "detail": detail}
        self.connection.execute(sa.insert(AUDIT_LOG).values(at_s=self.now_s, epoch=self.epoch, **values))

    def made_before(self, idempotency: Idempotency | None) -> str | None:
        """The id of what this Idempotency-Key made before; BadRequest (422) when it came with another request."""
        if idempotency is None:
            return None
        mark = IDEMPOTENCY_MARK.c
        row = self.first(
            sa.select(IDEMPOTENCY_MARK).where(
                mark.caller == idempotency.caller,
                mark.mark == idempotency.mark,
                mark.created_at_s > self.now_s - _REMEMBER_S,
            )
        )
        if row is None:
            return None
        if row.fingerprint != idempotency.fingerprint:
            raise BadRequest(
                "This Idempotency-Key was used before with another request; use a new one for a new request.",
                code="idempotency_key_reused",
                status=422,
            )
        return str(row.made_id)

    def remember(self, idempotency: Idempotency | None, made_id: str) -> None:
        """Note what this Idempotency-Key made, and forget some that are too old."""
        if idempotency is None:
            return
        mark = IDEMPOTENCY_MARK.c
        old = (
            sa.select(mark.caller, mark.mark)
            .where(mark.created_at_s <= self.now_s - _REMEMBER_S)
            .order_by(mark.created_at_s)
            .limit(_FORGET_COUNT)
        )
        same = sa.and_(mark.caller == idempotency.caller, mark.mark == idempotency.mark)
        for row in self.connection.execute(old).all():
            self.connection.execute(sa.delete(IDEMPOTENCY_MARK).where(mark.caller == row.caller, mark.mark == row.mark))
        self.connection.execute(sa.delete(IDEMPOTENCY_MARK).where(same, mark.created_at_s <= self.now_s - _REMEMBER_S))
        self.connection.execute(
            sa.insert(IDEMPOTENCY_MARK).values(
                caller=idempotency.caller,
                mark=idempotency.mark,
                fingerprint=idempotency.fingerprint,
                made_id=made_id,
                created_at_s=self.now_s,
            )
        )


@contextmanager
def faults() -> Iterator[None]:
    """Turn a fault of the database into StoreUnavailable: one sentence, never a URL, a statement or its values."""
    try:
        yield
    except sa.exc.TimeoutError:
        raise StoreUnavailable("No database connection was free in time.") from None
    except sa.exc.DBAPIError as fault:
        # The fault's own text holds the statement's values, a digest among them: it ends here.
        if isinstance(fault, sa.exc.DataError):
            raise BadRequest("A value of the request cannot be stored as text.") from None
        if isinstance(fault, sa.exc.IntegrityError):
            raise GatewayError(f"The database refused a change ({type(fault.orig).__name__}).") from None
        raise StoreUnavailable(_sentence(fault)) from None


def _sentence(fault: sa.exc.DBAPIError) -> str:
    origin = fault.orig
    if isinstance(origin, sqlite3.Error):
        missing = "no such table" in str(origin) or "no such column" in str(origin)
        reason = getattr(origin, "sqlite_errorname", type(origin).__name__)
    else:
        # 42P01 and 42703 are PostgreSQL's codes for a missing table and a missing column.
        missing = getattr(origin, "sqlstate", None) in {"42P01", "42703"}
        reason = getattr(origin, "sqlstate", None) or type(origin).__name__
    if missing:
        return "The database has no tenancy tables of this version; run `inferplane db upgrade`."
    return f"The database did not answer ({reason})."
