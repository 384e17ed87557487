"""Fixtures of the fault runs: a PostgreSQL that may be killed, started once per session and only where it is needed.

Owns: names and scopes, and the line that sums the kills of a session. Does not own: the server (`killable_postgres`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.terminal import TerminalReporter

from tests.faults.killable_postgres import KillablePostgres, killable_postgres

# The property of a test's report that holds how often it killed.
KILLS = "kills"


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """One line for the session: how many kills it made."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    kills = [value for one in reports for name, value in getattr(one, "user_properties", ()) if name == KILLS]
    if kills:
        terminalreporter.write_line(f"fault runs: {sum(kills)} kills in {len(kills)} seeds")


@pytest.fixture(scope="session")
def mortal_postgres() -> Iterator[KillablePostgres]:
    """The session's server that is killed."""
    with killable_postgres() as server:
        yield server
