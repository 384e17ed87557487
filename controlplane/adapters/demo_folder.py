"""The folder of a demo: held by one demo at a time, empty at its start unless it shall be kept.

Owns: the lock file, telling a demo that runs from one that was killed, and the wipe. Does not own: what is kept in it.
The lock is a flock that every child inherits: it is free exactly when the last process of a killed demo has ended, so
that the next demo never shares files or ports with it. A folder that the demo did not make is never wiped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from controlplane.errors import ConfigError

_LOCK_FILE = "demo.lock"
# The processes of a killed demo are told by the kernel and end within their drain time (3 s).
_ORPHANS_S = 12.0
_POLL_S = 0.05


@contextmanager
def held(folder: Path, *, keep: bool) -> Iterator[int]:
    """Hold the folder; gives the lock's file descriptor, which children may inherit. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / _LOCK_FILE).exists() and any(folder.iterdir()):
            raise ConfigError(f"data_dir {folder} holds files of something else; name an empty or a new folder.")
        lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        raise ConfigError(f"data_dir {folder} cannot be used: {fault.strerror}.") from fault
    try:
        _take(lock, folder)
        try:
            if not keep:
                _wipe(folder)
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        except OSError as fault:
            raise ConfigError(f"data_dir {folder} cannot be used: {fault.strerror}.") from fault
        yield lock
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    until_s = time.monotonic() + _ORPHANS_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(f"data_dir {folder} cannot be locked: {fault.strerror}.") from fault
        else:
            return
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        if owner.isdigit() and _runs(int(owner)):
            raise ConfigError(
                f"Another demo runs in {folder} (process {owner}); stop it, or name another folder with --data-dir."
            )
        if time.monotonic() > until_s:
            raise ConfigError(
                f"Processes of a demo that was killed still run in {folder}; end them, or name another --data-dir."
            )
        time.sleep(_POLL_S)


def _runs(pid: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody asked after yet does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wipe(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name == _LOCK_FILE:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
