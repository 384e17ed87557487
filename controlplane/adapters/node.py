"""One node of the gateway: what has to be there before its processes start, and the processes themselves.

Owns: the checks and first steps of `inferplane serve` (folders, database, Redis, port, the first key), the list of
children, and when they answer. Does not own: how children are kept alive (`processes`), or what they do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import select
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import redis

from billing.adapters import sql
from controlplane.adapters.database_faults import database_faults
from controlplane.adapters.embedded import EmbeddedRedis
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.processes import Child
from controlplane.adapters.tenancy_records import KeyWish
from controlplane.config import Settings, engine_secret, tokenizer_sources
from controlplane.errors import ConfigError, UsageError
from controlplane.tenancy import Scope
from router.adapters.discovery import endpoint_of_url, read_endpoints, ssl_context
from router.errors import EndpointsError

# Held by the node that uses a data folder.
_LOCK_FILE = "serve.lock"
# Pending connections that the kernel keeps for a busy gateway.
_BACKLOG = 4_096
# How soon a Redis that did not start is tried again.
_REDIS_RETRY_S = 1.0
# How long a Redis elsewhere may take to answer at the start: longer and it is said to be gone.
_REDIS_ANSWER_S = 1.0
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
    """Bring the embedded SQLite file up to date; for another database only check it.

    Raises ConfigError, whatever is wrong with it: one sentence without a password.
    """
    with database_faults(settings):
        if settings.database_url:
            sql.require_current(settings.sql_url)
        else:
            sql.upgrade(settings.sql_url)


def first_key(settings: Settings) -> FirstKey | None:
    """On an empty database make an org, a project and a key, so that one command is enough to try an engine.

    Raises ConfigError when the database's keys were made with another pepper: no gateway could start.
    """
    engine = sql.engine(settings.sql_url)
    try:
        store = KeyStore(engine, load_pepper(settings), actor="serve")
        store.db.require_pepper()
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


def check_host(host: str) -> None:
    """Raise UsageError for what is neither an address nor the name of one."""
    try:
        socket.getaddrinfo(host, None, _family(host), socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UsageError(
            f"--host is {host!r}; expected an address of this machine, such as 127.0.0.1 or 0.0.0.0."
        ) from None


def listen(host: str, port: int) -> socket.socket:
    """The listening socket that all gateway processes share. Raises ConfigError when it cannot be had."""
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"host {host} cannot be used: it is no address of this machine; expected one, such as 127.0.0.1 or "
                "0.0.0.0."
            ) from None
        raise ConfigError(
            f"port {port} on {host} cannot be used: {error.strerror}. Stop what listens there, or name another port."
        ) from error
    sock.setblocking(False)
    sock.set_inheritable(True)
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class FirstAnswer:
    """Whether the gateway answers on the listening socket: asks `/healthz` once and looks, without waiting, for it.

    Mutable: the connection of the question. The kernel takes it before any gateway process is there to answer.
    """

    def __init__(self, listening: socket.socket) -> None:
        host, self._port = listening.getsockname()[:2]
        self._family = listening.family
        # Nobody is reached at an address that stands for all of them.
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - it is compared, not bound
        self._line: socket.socket | None = None

    def look(self) -> bool:
        """True: it has answered. A connection that a dying process took is asked anew."""
        try:
            if self._line is None:
                self._line = socket.socket(self._family, socket.SOCK_STREAM)
                self._line.settimeout(_ASK_S)
                self._line.connect((self._host, self._port))
                self._line.sendall(b"GET /healthz HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
            if not select.select([self._line], [], [], 0)[0]:
                return False
            answered = self._line.recv(12).startswith(b"HTTP/1.1 200")
        except OSError:
            answered = False
        self.close()
        return answered

    def close(self) -> None:
        """Leave the question."""
        if self._line is not None:
            self._line.close()
            self._line = None


# Connecting to a socket of this machine: the kernel answers at once, or its queue is full.
_ASK_S = 0.2


def redis_warning(settings: Settings) -> str | None:
    """One sentence when the Redis that the settings name does not answer, and what that does to limits; else None.

    Raises ConfigError for what is no URL of a Redis. Nothing of the URL but host and port is shown.
    """
    url = settings.redis_url.get_secret_value()
    if not url:
        return None
    try:
        client = redis.Redis.from_url(url, socket_connect_timeout=_REDIS_ANSWER_S, socket_timeout=_REDIS_ANSWER_S)
    except ValueError:
        raise ConfigError(
            "INFERPLANE_REDIS_URL cannot be read; expected redis://HOST:PORT/N, rediss://HOST:PORT/N or unix://PATH."
        ) from None
    try:
        client.ping()
    except (redis.RedisError, OSError) as fault:
        return (
            f"Redis at {_place_of(url)} does not answer ({type(fault).__name__}): until it does, requests of tenants "
            "with limits are refused with 503 limits_unavailable unless their tenant class allows them, and those "
            "without limits are served."
        )
    finally:
        with contextlib.suppress(redis.RedisError, OSError):
            client.close()
    return None


def _place_of(url: str) -> str:
    """Host and port of a Redis URL, or its path: never a user, a password or an option."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]


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


def check_engines(urls: Sequence[str]) -> None:
    """Raise UsageError for an `--engine` that is no URL of one."""
    for url in urls:
        try:
            endpoint_of_url(url)
        except EndpointsError:
            # A URL with a user or password in it is not shown.
            shown = "a URL with a user or password" if "@" in url else repr(url)
            raise UsageError(
                f"--engine is {shown}; expected the http:// or https:// URL of an engine, such as "
                "http://127.0.0.1:8000."
            ) from None


def write_endpoints(settings: Settings, urls: Sequence[str]) -> Path:
    """`--engine URL` as an endpoints file in the data folder."""
    path = settings.data_dir / "engines.json"
    path.write_text(json.dumps([{"id": f"engine-{n}", "url": url} for n, url in enumerate(urls, 1)], indent=1))
    return path


def check_endpoints(path: Path) -> None:
    """Read the endpoints file once before anything is started or made. Raises ConfigError."""
    try:
        read_endpoints(path)
    except EndpointsError as error:
        raise ConfigError(str(error)) from error


def endpoint_warnings(path: Path, secret: Callable[[str], str | None] = engine_secret) -> list[str]:
    """One sentence for each key that is not set and each authority file that cannot be used. Raises ConfigError.

    The gateway starts all the same: its other engines serve. `secret` gives the value of a variable; none is shown.
    """
    try:
        listed = read_endpoints(path)
    except EndpointsError as error:
        raise ConfigError(str(error)) from error
    told = []
    for each in listed:
        where = f"{path}, endpoint {each.endpoint_id!r}, field"
        if each.api_key_env and not secret(each.api_key_env):
            told.append(
                f"{where} api_key_env is {each.api_key_env!r}; this variable is not set, so the engine is asked "
                "without a key. Set it and start again."
            )
        if each.url.startswith("https:") and each.tls.ca is not None:
            try:
                ssl_context(each.tls)
            except EndpointsError as error:
                told.append(f"{where} tls.ca is {each.tls.ca!r}; no request reaches this engine. {error}")
    return told


def check_access_log(target: str, option: bool) -> None:
    """Raise UsageError, or ConfigError where the environment named it, for a file that no line could be written to."""
    if target in ("", "-"):
        return
    path = Path(target)
    if path.is_dir():
        reason = "it is a folder"
    elif path.exists():
        reason = "" if os.access(path, os.W_OK) else "this user may not write it"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    else:
        reason = "" if os.access(path.parent, os.W_OK | os.X_OK) else f"this user may not write in {path.parent}"
    if reason:
        said = f"is {target!r}; expected -, nothing, or a file that can be written: {reason}."
        raise UsageError(f"--access-log {said}") if option else ConfigError(f"INFERPLANE_ACCESS_LOG {said}")


def child_env(settings: Settings, redis_url: str, run_dir: Path) -> dict[str, str]:
    """The environment of the node's processes: the final settings, and where metrics files go."""
    env = {
        "INFERPLANE_DATA_DIR": str(settings.data_dir.resolve()),
        "INFERPLANE_DATABASE_URL": settings.sql_url if settings.database_url else "",
        "INFERPLANE_REDIS_URL": redis_url,
        "INFERPLANE_HOST": settings.host,
        "INFERPLANE_PORT": str(settings.port),
        "INFERPLANE_NODE": settings.node or socket.gethostname(),
        "INFERPLANE_RUN_DIR": str(run_dir.resolve()),
        "INFERPLANE_WORKERS": str(settings.workers),
        "INFERPLANE_ACCESS_LOG": _absolute(settings.access_log),
        "INFERPLANE_TOKENIZERS": ",".join(
            f"{model}={'engine' if folder is None else folder.resolve()}"
            for model, folder in tokenizer_sources(settings.tokenizers).items()
        ),
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
