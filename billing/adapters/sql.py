"""The SQL database: how an engine is made, how a transaction begins, and which version its tables have.

Owns: the SQLAlchemy engine for both databases (SQLite file and PostgreSQL), the two kinds of transaction, the
integer types that hold money without loss, and the Alembic history. Does not own: tables (`tables`), what is written
in them (`ingest`, `books_sql`), or queries (`usage_sql`, `reconcile_sql`). It exists so that no other module knows
which of the two databases it talks to, apart from the few statements that one of them does much faster.

Transactions: `write(engine)` takes SQLite's only write lock at BEGIN (a transaction that reads and then writes can
otherwise fail half way), `read(engine)` never takes it. A plain `engine.begin()` or `Session(engine)` behaves like
`write`: right, but it queues behind other writers. Use `read` for what only reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.types import TypeDecorator, TypeEngine

from billing.errors import SchemaOutdated, StoreError, StoreUnavailable

# How long SQLite waits for another process's write lock (CONTRACTS: 5,000 ms). A batch of 1,000 events holds it 0.2 s.
SQLITE_BUSY_TIMEOUT_MS = 5_000
# A statement that runs longer is stuck or a mistake: reconcile and exports read in chunks of well under a second.
POSTGRES_STATEMENT_TIMEOUT_MS = 30_000
# Waiting for a row lock longer than this means that a peer hangs; the transaction is retried by its owner.
POSTGRES_LOCK_TIMEOUT_MS = 10_000
# A transaction that its process forgot must not hold back vacuum or a period's closing.
POSTGRES_IDLE_IN_TRANSACTION_MS = 60_000
POSTGRES_CONNECT_TIMEOUT_S = 5
# Connections of one process: the shipper uses one, the admin API one per busy thread.
POOL_SIZE = 5
POOL_MAX_OVERFLOW = 10
POOL_WAIT_S = 10.0
# How long one `db upgrade` waits for another that is running.
UPGRADE_WAIT_S = 120.0
# Key of the PostgreSQL advisory lock of `upgrade`: the bytes "inferpla" as a signed 64-bit number.
_UPGRADE_LOCK_KEY = int.from_bytes(b"inferpla", "big", signed=True)
_MIGRATIONS = Path(__file__).parent / "migrations"
# Execution option by which `read` tells the begin listener not to take SQLite's write lock.
_READ_ONLY = "inferplane_read_only"


class PicoInt(TypeDecorator[int]):
    """Picodollars: NUMERIC(38,0) on PostgreSQL; on SQLite a 64-bit INTEGER, where Numeric would lose digits."""

    impl = sa.BigInteger
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        """The column type of this database."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(sa.Numeric(38, 0))
        return dialect.type_descriptor(sa.BigInteger())

    def process_bind_param(self, value: int | None, dialect: sa.Dialect) -> Any:
        """Only whole numbers go in: a float here is a fault of ours."""
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"An amount of picodollars is a whole number; {type(value).__name__} was given.")
        return value

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> int | None:
        """Whole numbers come out."""
        return None if value is None else int(value)


class pico_sum(sa.sql.functions.GenericFunction[Any]):  # noqa: N801 - SQL function names are lower case
    """Exact sum of whole numbers of 64 bits, whatever its size. Gives int, or None over no rows or only nulls.

    SUM on PostgreSQL (NUMERIC). SQLite's SUM stops at 64 bits: there the upper and the lower half of each number are
    summed, which can hold 2^31 rows each, and put together afterwards.
    """

    class _Exact(TypeDecorator[int]):
        impl = sa.Text
        cache_ok = True

        def process_result_value(self, value: Any, dialect: sa.Dialect) -> int | None:
            if value is None:
                return None
            high, _, low = value.rpartition(":")
            return (int(high) << _HALF_BITS) + int(low) if high else int(low)

    type = _Exact()
    inherit_cache = True
    name = "pico_sum"


# Half of the 64 bits of an integer of SQLite.
_HALF_BITS = 32


@compiles(pico_sum, "postgresql")
def _pico_sum_on_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    return f"SUM({compiler.process(element.clauses, **options)})::text"


@compiles(pico_sum, "sqlite")
def _pico_sum_on_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    number = f"({compiler.process(element.clauses, **options)})"
    # A shift of a negative number rounds down and its lower half is positive: together they are the number.
    return f"(SUM({number} >> {_HALF_BITS}) || ':' || SUM({number} & {2**_HALF_BITS - 1}))"


class id_xor(sa.sql.functions.GenericFunction[str]):  # noqa: N801 - SQL function names are lower case
    """XOR of event ids (32 hex digits each) as 32 hex digits; None over no rows."""

    type = sa.Text()
    inherit_cache = True
    name = "id_xor"


@compiles(id_xor, "postgresql")
def _id_xor_on_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    ids = compiler.process(element.clauses, **options)
    halves = (f"bit_xor(('x' || substr({ids}, {start}, 16))::bit(64)::bigint)" for start in (1, 17))
    return "(" + " || ".join(f"lpad(to_hex({half}), 16, '0')" for half in halves) + ")"


class _IdXor:
    """SQLite's id_xor."""

    def __init__(self) -> None:
        self._xor: int | None = None

    def step(self, event_id: str) -> None:
        self._xor = (self._xor or 0) ^ int(event_id, 16)

    def finalize(self) -> str | None:
        return None if self._xor is None else f"{self._xor:032x}"


def engine(url: str) -> Engine:
    """The engine of a database URL: `sqlite:///FILE` or `postgresql://...` (driver psycopg 3).

    No connection is made here. Raises StoreError for a URL of another kind; the message carries no credentials.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed)
    return sa.create_engine(
        parsed.set(drivername="postgresql+psycopg"),
        pool_size=POOL_SIZE,
        max_overflow=POOL_MAX_OVERFLOW,
        pool_timeout=POOL_WAIT_S,
        pool_pre_ping=True,
        connect_args={"connect_timeout": POSTGRES_CONNECT_TIMEOUT_S, "options": _postgres_options(parsed)},
    )


def missing_file(url: str) -> Path | None:
    """The SQLite file that the URL names, where it is not there. What is no URL is for `engine` to say."""
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        return None
    if parsed.get_backend_name() != "sqlite" or not parsed.database or Path(parsed.database).is_file():
        return None
    return Path(parsed.database)


def safe_url(url: str | URL) -> str:
    """The URL for messages: its password is hidden."""
    return make_url(url).render_as_string(hide_password=True)


def read(engine: Engine) -> AbstractContextManager[Connection]:
    """A transaction that only reads: one consistent view, no write lock."""
    return _begin(engine, read_only=True)


def write(engine: Engine) -> AbstractContextManager[Connection]:
    """A transaction that writes: committed at the end of the block, rolled back when it raises."""
    return _begin(engine, read_only=False)


def is_sqlite(bind: Engine | Connection) -> bool:
    """Whether this is the embedded database."""
    return bind.dialect.name == "sqlite"


def upgrade(target: str | Engine) -> str:
    """Bring the tables to this version; gives the revision. Safe when several processes do it at the same time.

    PostgreSQL: an advisory lock, and the whole upgrade is one transaction. SQLite: a lock file beside the database.
    Raises StoreUnavailable when another upgrade does not finish within `UPGRADE_WAIT_S`.
    """
    from alembic import command

    with _engine_of(target) as store, _upgrade_lock(store):
        with write(store) as connection:
            if not is_sqlite(connection):
                connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(UPGRADE_WAIT_S * 1000)}")
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_UPGRADE_LOCK_KEY})")
            config = _alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return head_revision()


def current_revision(target: str | Engine) -> str | None:
    """The revision that the tables have; None for an empty database. Raises StoreUnavailable."""
    from alembic.runtime.migration import MigrationContext

    with _engine_of(target) as store:
        try:
            with read(store) as connection:
                return MigrationContext.configure(connection).get_current_revision()
        except sa.exc.OperationalError as fault:
            raise StoreUnavailable(f"The database {safe_url(store.url)} does not answer: {_reason(fault)}.") from None


def head_revision() -> str:
    """The revision that this version of the code needs."""
    from alembic.script import ScriptDirectory

    head = ScriptDirectory.from_config(_alembic_config()).get_current_head()
    if head is None:  # pragma: no cover - a broken installation
        raise StoreError("The installation holds no migrations; install inferplane again.")
    return head


def require_current(target: str | Engine) -> None:
    """Raise SchemaOutdated, with what to run, unless the tables are those of this version."""
    found, needed = current_revision(target), head_revision()
    if found == needed:
        return
    where = safe_url(target if isinstance(target, str) else target.url)
    state = "has no tables yet" if found is None else f"is at revision {found}"
    raise SchemaOutdated(f"The database {where} {state}, but this version needs {needed}: run inferplane db upgrade.")


def _parsed(url: str) -> URL:
    if url.startswith("postgres://"):
        url = "postgresql://" + url.removeprefix("postgres://")
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):  # ValueError: a port that is no number, a broken IPv6 address
        raise StoreError(
            "The database URL cannot be read; sqlite:///FILE or postgresql://USER@HOST/DATABASE was expected."
        ) from None
    if parsed.get_backend_name() == "postgresql" and "@" in f"{parsed.host or ''}{parsed.database or ''}":
        # The rest of a password would be taken for the host or the database, and shown.
        raise StoreError("The database URL has an '@' too many; one in a password is written %40, a '/' %2F.")
    if parsed.get_backend_name() not in {"sqlite", "postgresql"}:
        raise StoreError(f"The database is {parsed.get_backend_name()!r}; sqlite or postgresql was expected.")
    if parsed.get_backend_name() == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise StoreError("The SQLite database has no file; sqlite:///FILE was expected (memory is not durable).")
    return parsed


def _postgres_options(parsed: URL) -> str:
    ours = (
        f"-c statement_timeout={POSTGRES_STATEMENT_TIMEOUT_MS} -c lock_timeout={POSTGRES_LOCK_TIMEOUT_MS} "
        f"-c idle_in_transaction_session_timeout={POSTGRES_IDLE_IN_TRANSACTION_MS} -c timezone=UTC"
    )
    theirs = parsed.query.get("options", "")
    # What the URL says comes last and wins.
    return f"{ours} {theirs if isinstance(theirs, str) else ' '.join(theirs)}".strip()


def _sqlite(parsed: URL) -> Engine:
    Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
    made = sa.create_engine(parsed, pool_size=POOL_SIZE, max_overflow=POOL_MAX_OVERFLOW, pool_timeout=POOL_WAIT_S)
    event.listen(made, "connect", _prepare_sqlite)
    event.listen(made, "begin", _begin_sqlite)
    return made


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # Our own BEGIN (see `_begin_sqlite`), not the driver's implicit one.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    # FULL: a committed batch survives loss of power, because the spool segment is deleted after the commit.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA cache_size = -65536")
    cursor.close()
    connection.create_aggregate("id_xor", 1, _IdXor)


def _begin_sqlite(connection: Connection) -> None:
    read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


@contextmanager
def _begin(engine: Engine, *, read_only: bool) -> Iterator[Connection]:
    options: dict[str, Any] = {_READ_ONLY: read_only}
    if read_only and not is_sqlite(engine):
        options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
    with engine.connect().execution_options(**options) as connection, connection.begin():
        yield connection


@contextmanager
def _engine_of(target: str | Engine) -> Iterator[Engine]:
    if isinstance(target, Engine):
        yield target
        return
    made = engine(target)
    try:
        yield made
    finally:
        made.dispose()


def _upgrade_lock(store: Engine) -> AbstractContextManager[object]:
    """SQLite only: Alembic's own version table is made outside the first migration, so BEGIN IMMEDIATE is too late."""
    if not is_sqlite(store):
        return nullcontext()
    return _file_lock(Path(f"{store.url.database}.upgrade.lock"))


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=UPGRADE_WAIT_S):
            yield
    except Timeout:
        raise StoreUnavailable(f"Another upgrade holds {path} for more than {UPGRADE_WAIT_S:g} s.") from None


def _alembic_config() -> Any:
    """Alembic without an alembic.ini: the scripts lie in the package, also in a wheel."""
    from alembic.config import Config

    config = Config()
    # A percent sign would be read as interpolation by the ini parser underneath.
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _reason(fault: sa.exc.DBAPIError) -> str:
    """First line of the driver's message; psycopg and sqlite3 name hosts and files in it, never passwords."""
    return str(fault.orig).strip().splitlines()[0].rstrip(".") if fault.orig else "no reason given"


def exact(value: Decimal | int | str | None) -> int | None:
    """A number of the database as an int (psycopg gives Decimal for NUMERIC). Raises StoreError for a fraction."""
    if value is None or isinstance(value, int):
        return value
    number = int(value)
    if Decimal(number) != Decimal(value):
        raise StoreError(f"The database holds {value}; a whole number was expected.")
    return number
