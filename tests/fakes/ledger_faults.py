"""Damage done to the books on purpose, past the triggers that refuse it: what reconcile must find.

Owns: `planted`, a connection on which append-only tables can be changed, on both databases. Test code only: the
product has no way to do this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from billing.adapters.sql import is_sqlite, write


@contextmanager
def planted(engine: Engine) -> Iterator[Connection]:
    """A transaction without triggers and foreign keys; the triggers stand again afterwards."""
    if not is_sqlite(engine):
        with write(engine) as connection:
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
            yield connection
        return
    # An engine of its own: SQLite's foreign keys are off unless a connection asks for them.
    bare = sa.create_engine(engine.url, poolclass=sa.NullPool)
    with bare.begin() as connection:
        triggers = connection.execute(sa.text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")).all()
        for name, _ in triggers:
            connection.exec_driver_sql(f'DROP TRIGGER "{name}"')
        yield connection
        for _, text in triggers:
            connection.exec_driver_sql(text)
    bare.dispose()
