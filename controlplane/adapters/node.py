"""One node of the gateway: what has to be there before its processes start, and the processes themselves.

Owns: the checks and first steps of `inferplane serve` (folders, database, embedded Redis, port, the first key) and the
list of children. Does not own: how children are kept alive (`processes`), or what they do.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from billing.adapters import sql
from controlplane.adapters.embedded import EmbeddedRedis
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.processes import Child
from controlplane.adapters.tenancy_records import KeyWish
from controlplane.config import Settings
from controlplane.errors import ConfigError
from controlplane.tenancy import Scope
from router.adapters.discovery import endpoint_of_url, read_endpoints
from router.errors import EndpointsError

# Held by the node that uses a data folder.
_LOCK_FILE = "serve.lock"
# Pending connections that the kernel keeps for a busy gateway.
_BACKLOG = 4_096
# How soon a Redis that did not start is tried again.
_REDIS_RETRY_S = 1.0
# A gateway process that dies this soon after its first start will not live the next time either.
_ESSENTIAL_S = 20.0


@dataclass(frozen=True, slots=True)
class FirstKey:
    """The key that was made because there was none: shown once."""

    secret: str
    org: str
    project: str


@contextmanager
def held_folder(settings: Settings) -> Iterator[None]:
    """Hold the data folder for this node alone: two would delete each other's metrics. Raises ConfigError."""
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(settings.data_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"data_dir {settings.data_dir} cannot be used: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"data_dir {settings.data_dir} is in use by another inferplane serve. Stop it, or name another folder."
        ) from error
    try:
        yield
    finally:
        os.close(lock)


def prepare_folders(settings: Settings) -> Path:
    """Make the data folders; returns the fresh run folder (sockets, metrics files). Raises ConfigError."""
    run_dir = settings.data_dir / "run"
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings.spool_dir.mkdir(mode=0o700, exist_ok=True)
        for folder in (run_dir, run_dir / "metrics", run_dir / "siblings"):
            folder.mkdir(mode=0o700, exist_ok=True)
        for stale in (run_dir / "metrics").glob("*.db"):
            stale.unlink()
    except OSError as error:
        raise ConfigError(f"data_dir {settings.data_dir} cannot be used: {error.strerror}.") from error
    free = shutil.disk_usage(settings.data_dir).free
    if free < _MIN_FREE_BYTES:
        raise ConfigError(
            f"data_dir {settings.data_dir} has {free // 1_048_576} MiB free; at least "
            f"{_MIN_FREE_BYTES // 1_048_576} MiB are needed for the usage spool and the database."
        )
    return run_dir


# Less than this and the spool would be full within minutes of ordinary traffic.
_MIN_FREE_BYTES = 64 * 1_048_576


def prepare_database(settings: Settings) -> None:
    """Bring the embedded SQLite file up to date; for another database only check it. Raises ConfigError."""
    if settings.database_url:
        sql.require_current(settings.sql_url)
    else:
        sql.upgrade(settings.sql_url)


def first_key(settings: Settings) -> FirstKey | None:
    """On an empty database make an org, a project and a key, so that one command is enough to try an engine."""
    engine = sql.engine(settings.sql_url)
    try:
        store = KeyStore(engine, load_pepper(settings), actor="serve")
        if store.list_orgs().items:
            return None
        org = store.create_org("default").record
        project = store.create_project(org.org_id, "default").record
        wish = KeyWish(name="first key", scopes=tuple(scope.value for scope in Scope))
        made = store.create_key(project.project_id, wish)
        assert made.secret is not None
        return FirstKey(made.secret, "default", "default")
    finally:
        engine.dispose()


def listen(host: str, port: int) -> socket.socket:
    """The listening socket that all gateway processes share. Raises ConfigError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"port {port} on {host} cannot be used: {error.strerror}. Stop what listens there, or name another port."
        ) from error
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    sock.set_inheritable(True)
    return sock


def embedded_redis(settings: Settings) -> EmbeddedRedis | None:
    """The embedded Redis, started, where the settings name none."""
    if settings.redis_url.get_secret_value():
        return None
    server = EmbeddedRedis(settings.data_dir / "redis")
    server.start()
    return server


def redis_keeper(server: EmbeddedRedis, say: Callable[[str], None]) -> Callable[[], None]:
    """To be called now and then: starts an embedded Redis that died on the same data, at most once a second."""
    retry_at_s = 0.0

    def keep() -> None:
        nonlocal retry_at_s
        if server.poll() is None or time.monotonic() < retry_at_s:
            return
        retry_at_s = time.monotonic() + _REDIS_RETRY_S
        try:
            server.start()
            say("the embedded Redis had died; it runs again")
        except ConfigError as error:
            say(f"the embedded Redis died and does not start: {error}")

    return keep


def url_of(host: str, port: int) -> str:
    """The base URL of a listening address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_endpoints(settings: Settings, urls: Sequence[str]) -> Path:
    """`--engine URL` as an endpoints file in the data folder. Raises ConfigError for what is no URL of an engine."""
    for url in urls:
        try:
            endpoint_of_url(url)
        except EndpointsError:
            raise ConfigError(f"--engine {url!r} is not an http:// or https:// URL of an engine.") from None
    path = settings.data_dir / "engines.json"
    path.write_text(json.dumps([{"id": f"engine-{n}", "url": url} for n, url in enumerate(urls, 1)], indent=1))
    return path


def check_endpoints(path: Path) -> None:
    """Read the endpoints file once before anything is started or made. Raises ConfigError."""
    try:
        read_endpoints(path)
    except EndpointsError as error:
        raise ConfigError(str(error)) from error


def child_env(settings: Settings, redis_url: str, run_dir: Path) -> dict[str, str]:
    """The environment of the node's processes: the final settings, and where metrics files go."""
    env = {
        "INFERPLANE_DATA_DIR": str(settings.data_dir.resolve()),
        "INFERPLANE_DATABASE_URL": settings.sql_url if settings.database_url else "",
        "INFERPLANE_REDIS_URL": redis_url,
        "INFERPLANE_NODE": settings.node or socket.gethostname(),
        "INFERPLANE_RUN_DIR": str(run_dir.resolve()),
        "INFERPLANE_WORKERS": str(settings.workers),
        "INFERPLANE_ACCESS_LOG": _absolute(settings.access_log),
        "PROMETHEUS_MULTIPROC_DIR": str((run_dir / "metrics").resolve()),
    }
    if settings.endpoints_file is not None:
        env["INFERPLANE_ENDPOINTS_FILE"] = str(settings.endpoints_file.resolve())
    return env


def _absolute(access_log: str) -> str:
    return access_log if access_log in ("", "-") else str(Path(access_log).resolve())


def gateway_children(settings: Settings, sock: socket.socket, env: dict[str, str], log: Path | None) -> list[Child]:
    """The gateway processes and the shipper of a node."""
    me = [sys.executable, "-m", "controlplane"]
    stop_s = settings.drain_timeout_s + settings.drain_lead_s + 10.0
    children = [
        Child(
            name=f"gateway {n}",
            argv=[*me, "gateway-process", "--fd", str(sock.fileno())],
            env=env,
            pass_fds=(sock.fileno(),),
            stop_timeout_s=stop_s,
            log=log,
            essential_s=_ESSENTIAL_S,
            group="gateways",  # all say at once that they are not ready, and drain side by side
        )
        for n in range(1, settings.workers + 1)
    ]
    ship = Child(name="shipper", argv=[*me, "ship"], env=env, log=log, stop_timeout_s=15.0, essential_s=_ESSENTIAL_S)
    return [ship, *children]


def new_incarnation() -> str:
    """A name for one start of one process."""
    return f"{os.getpid()}-{secrets.token_hex(6)}"
