"""The fixtures every test may ask for, and two rules of the suite.

Owns: names and scopes of the real services (`services.py` starts them), the rule that a skip is a failure where
INFERPLANE_NO_SKIP=1 says so (CI), the rule that no test leaves a process behind, and that Hypothesis draws the same
examples in every run (`exploring.py`). Each pytest-xdist worker has its own servers. Only loopback and Unix sockets may
be connected to (`--allow-hosts` in pyproject.toml).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

from controlplane.adapters.embedded import EmbeddedRedis
from tests import exploring, services

# Before any test module makes its settings: they inherit from the profile.
exploring.load_profile()

# Set by CI: a skipped test fails the run, so that a missing service is seen.
NO_SKIP = os.environ.get("INFERPLANE_NO_SKIP", "") == "1"


def _skip_is_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"INFERPLANE_NO_SKIP=1 and this was skipped: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _skip_is_failure(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _skip_is_failure(report)
    return report


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails the session's last test when a child process is still there after every other fixture is gone."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    told = [" ".join(child.cmdline()) or child.name() for child in left if child.status() != psutil.STATUS_ZOMBIE]
    told = [command for command in told if "multiprocessing.resource_tracker" not in command]  # Python's own
    assert not told, f"tests left these processes running: {told}"


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EmbeddedRedis]:
    """The session's Valkey; ask for `redis_url` unless the test needs the process."""
    with services.valkey() as server:
        yield server


@pytest.fixture(scope="session")
def stock_redis_server() -> Iterator[EmbeddedRedis]:
    """The session's stock Redis."""
    with services.stock_redis() as server:
        yield server


@pytest.fixture
def redis_url(valkey_server: EmbeddedRedis) -> str:
    """URL of an empty Valkey."""
    return services.emptied(valkey_server.url)


@pytest.fixture
def second_redis_url(stock_redis_server: EmbeddedRedis) -> str:
    """URL of an empty stock Redis."""
    return services.emptied(stock_redis_server.url)


@pytest.fixture(params=["valkey", "redis"])
def any_redis_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty Valkey, then of an empty Redis."""
    return str(request.getfixturevalue("redis_url" if request.param == "valkey" else "second_redis_url"))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[services.Postgres]:
    """The session's PostgreSQL; ask for `postgres_url`."""
    with services.postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: services.Postgres) -> Iterator[str]:
    """SQLAlchemy URL (postgresql+psycopg) of a fresh, empty database."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """SQLAlchemy URL of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'test.db'}"


@pytest.fixture(params=["sqlite", "postgres"])
def sql_url(request: pytest.FixtureRequest) -> str:
    """SQLAlchemy URL of a fresh SQLite file, then of a fresh PostgreSQL database."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(scope="session")
def llama_url() -> Iterator[str]:
    """Base URL of a real llama.cpp server with a random model (alias `tiny`)."""
    with services.llama() as engine:
        yield engine.url


@pytest.fixture
def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    return services.free_tcp_port()
