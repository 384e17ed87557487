"""Alembic's environment: runs the scripts of `versions/` on the connection that `billing.adapters.sql.upgrade` opened.

Owns nothing: the connection, its transaction and its lock are the caller's. There is no offline mode and no
alembic.ini, because the scripts are only ever run by `inferplane db upgrade`.
"""

from __future__ import annotations

from alembic import context


def run() -> None:
    """Run the pending migrations inside the caller's transaction."""
    context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


run()
