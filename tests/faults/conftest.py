"""Fixtures of the fault runs: a PostgreSQL that may be killed, started once per session and only where it is needed.

Owns: names and scopes. Does not own: the server (`killable_postgres`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.killable_postgres import KillablePostgres, killable_postgres


@pytest.fixture(scope="session")
def mortal_postgres() -> Iterator[KillablePostgres]:
    """The session's server that is killed."""
    with killable_postgres() as server:
        yield server
