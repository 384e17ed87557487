"""A PostgreSQL of its own for the runs that kill it: durable against the death of its processes, not of the machine.

Owns: SIGKILL of the postmaster with every backend, starting it again. Does not own: how it starts at first and the
databases in it (`tests.services`). The session's shared server answers a commit before it is written (it is never
killed); one that is killed must not: `synchronous_commit` stays on, and only the fsync that protects from a loss of
power is off.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import psutil
import psycopg

from tests.services import Postgres, embedded_postgres

# The last backend of a killed postmaster ends within milliseconds; recovery of a few MB of WAL within a second.
_DEADLINE_S = 30.0


class KillablePostgres(Postgres):
    """One server. `database()` gives a fresh database's URL."""

    def __init__(self, server: Any) -> None:
        super().__init__(lambda: str(server.get_uri()))
        self._server = server

    def kill(self) -> None:
        """SIGKILL to the postmaster and all of its backends."""
        postmaster = psutil.Process(self._server.get_pid())
        whole = [postmaster, *postmaster.children(recursive=True)]
        for process in whole:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(whole, _DEADLINE_S)
        assert not alive

    def start(self) -> None:
        """Start it on the files that are there, and wait until it has recovered."""
        self._server.ensure_postgres_running()
        until_s = time.monotonic() + _DEADLINE_S
        while True:
            try:
                with psycopg.connect(self._uri(), connect_timeout=2):
                    return
            except psycopg.OperationalError:
                assert time.monotonic() < until_s, "PostgreSQL does not recover"
                time.sleep(0.05)


@contextlib.contextmanager
def killable_postgres() -> Iterator[KillablePostgres]:
    """A server in a folder of its own."""
    with embedded_postgres(("fsync", "full_page_writes")) as server:
        yield KillablePostgres(server)
