"""Keeps machine code on disk, so that only the first run on a machine waits for the compiler.

Owns: the folder (`~/.cache/inferplane/compiled`, one sub-folder for each version of the sources and of numba, kept for
a month after its last use), the form of its files, switching the cache on, and whether it has what is asked for. Does
not own: what is compiled (`simulation`, `replay_loop`, `queueing`) or what a user is told (`perf_compiling`).
Nothing is written beside the installed package, which numba's own `cache=True` would do; without a folder that can be
written, the compiler just runs again. Why files of our own: numba trusts what it finds, so that one emptied or cut file
breaks every later run, and its index lets two processes give one data file to two signatures. Here a file names its
content by digest and its signature by key; one that does not match is compiled again and replaced. Why a digest of all
sources: numba looks only at the file of the outermost function.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from glob import escape
from hashlib import sha256
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

# Letters of a digest in a name: 64 bits are enough to tell versions and signatures apart.
_DIGEST_LETTERS = 16

# The modules of the small compiled loops and the folders of the large ones. A test finds a module that is missing here.
_LOOP_SOURCES = ("compiled.py", "replay_loop.py")
_FOLDERS = ("queueing", "simulation")

# After this long without use a folder belongs to a version that is gone: 30 days.
_UNUSED_S = 30 * 86_400.0

# Bytes of the SHA-256 digest with which a file begins.
_SEAL_BYTES = 32


def remember_compiled_code(folder: Path | None = None) -> bool:
    """Use machine code kept by an earlier run, and keep what is compiled now: the simulation and the small loops.

    False: there is nowhere to keep it, and the compiler runs again each time.
    """
    from perfmodel.simulation.cluster import compiled_entries

    return remember_compiled_loops(folder) and _remember(compiled_entries(), folder)


def remember_compiled_loops(folder: Path | None = None) -> bool:
    """As `remember_compiled_code`, for the loops of the closed forms alone: no simulation is imported."""
    from perfmodel import replay_loop
    from perfmodel.queueing import loops

    return _remember([*_compiled_in(replay_loop), *_compiled_in(loops)], folder)


class CompiledState(StrEnum):
    """Whether a first call waits for the compiler."""

    READY = "ready"
    TO_COMPILE = "to compile"
    CANNOT_KEEP = "to compile each time"


def simulation_state(folder: Path | None = None) -> CompiledState:
    """Switches the cache on as `remember_compiled_code`. READY when all that Python calls of the simulation is kept."""
    from perfmodel.simulation.cluster import compiled_entries

    keeps = remember_compiled_code(folder)
    return _state(keeps, all(map(_is_ready, compiled_entries())))


def loops_state(folder: Path | None = None) -> CompiledState:
    """As `simulation_state`, for the loops of the closed forms. READY when any is kept: no command uses all of them."""
    from perfmodel import replay_loop
    from perfmodel.queueing import loops

    keeps = remember_compiled_loops(folder)
    return _state(keeps, any(map(_is_ready, [*_compiled_in(replay_loop), *_compiled_in(loops)])))


def _state(keeps: bool, ready: bool) -> CompiledState:
    if ready:
        return CompiledState.READY
    return CompiledState.TO_COMPILE if keeps else CompiledState.CANNOT_KEEP


def _is_ready(entry: Any) -> bool:
    """Compiled in this process, or kept on disk for some signature; reading it shows whether the file is whole."""
    return bool(entry.signatures) or (isinstance(entry._cache, _SealedCache) and entry._cache.has_file())


def _compiled_in(module: ModuleType) -> list[Any]:
    """Its compiled functions; none where a test runs the sources as plain Python."""
    return [value for value in vars(module).values() if isinstance(value, Dispatcher)]


def _remember(entries: Iterable[Any], folder: Path | None) -> bool:
    settings: Any = numba.config  # its settings are set when it is imported, so no stub has them
    before = settings.CACHE_DIR
    try:
        home = folder or Path.home() / ".cache" / "inferplane" / "compiled"  # RuntimeError: there is no home
        place = home / _digest()
        place.mkdir(parents=True, exist_ok=True)
        _drop_unused(home, place)
        settings.CACHE_DIR = str(place)
        caches = [(entry, _SealedCache(entry.py_func)) for entry in entries]
    except (OSError, RuntimeError):  # numba says RuntimeError when it finds no folder to write to
        return False
    finally:
        settings.CACHE_DIR = before
    if not all(Path(cache.cache_path).is_relative_to(place) for _, cache in caches):
        return False  # numba found the folder read-only and chose the one of the installed sources
    for entry, cache in caches:
        entry._cache = cache  # what numba's `enable_caching` does, with a cache of our own
    return True


def _drop_unused(home: Path, place: Path) -> None:
    """Mark `place` as used now, and remove the folders of versions that nobody has used for a month."""
    with suppress(OSError):  # another process cleans up too, or the folder is another user's
        os.utime(place)
        for other in home.iterdir():
            if len(other.name) == _DIGEST_LETTERS and time.time() - other.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)


class _SealedFile(IndexDataCacheFile):
    """One file for each function and signature: digest, then (source stamp, key, machine code). There is no index.

    Whatever is wrong with a file, it counts as not there. Files are written aside and renamed (numba's own way), so
    that a process that is killed leaves none half written under its name.
    """

    def __init__(self, cache_path: str, filename_base: str, source_stamp: object) -> None:
        super().__init__(cache_path, filename_base, source_stamp)  # type: ignore[no-untyped-call]  # numba has no types
        self._sealed_base = filename_base

    def flush(self) -> None:
        """Nothing: there is no index to empty."""

    def save(self, key: object, data: object) -> None:
        """Keep it; on a full disk or in a folder that cannot be written any more, go on without."""
        content = self._dump((self._source_stamp, key, data))  # type: ignore[no-untyped-call]  # numba has no types
        try:
            with self._open_for_write(self._sealed_path(key)) as file:
                file.write(sha256(content).digest() + content)
        except OSError:
            return

    def load(self, key: object) -> Any:
        """What was kept under this key; None when there is none that is whole and ours."""
        try:
            sealed = Path(self._sealed_path(key)).read_bytes()
        except OSError:
            return None
        content = sealed[_SEAL_BYTES:]
        if sha256(content).digest() != sealed[:_SEAL_BYTES]:
            return None
        try:
            stamp, kept_key, data = pickle.loads(content)  # noqa: S301  # the user's own folder, as numba's cache
        except Exception:  # whole, yet of another making: unpickling can raise anything
            return None
        return data if (stamp, kept_key) == (self._source_stamp, key) else None

    def has_file(self) -> bool:
        """Whether anything is kept of this function, for whatever signature."""
        return any(Path(self._cache_path).glob(f"{escape(self._sealed_base)}.*.code"))

    def _sealed_path(self, key: object) -> str:
        name = sha256(repr(key).encode()).hexdigest()[:_DIGEST_LETTERS]
        return str(Path(self._cache_path) / f"{self._sealed_base}.{name}.code")


class _SealedCache(FunctionCache):
    """numba's cache of one function, over sealed files."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]  # numba has no types
        locator = self._impl.locator
        self._sealed = _SealedFile(locator.get_cache_path(), self._impl.filename_base, locator.get_source_stamp())
        self._cache_file = self._sealed

    def has_file(self) -> bool:
        """Whether anything is kept of this function, for whatever signature."""
        return self._sealed.has_file()

    def save_overload(self, sig: object, data: object) -> None:
        """Keep it where there is a folder; a folder that is gone and cannot be made again is no fault."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]  # numba has no types
        except OSError:
            return


def compiled_sources() -> list[Any]:
    """Every file of this package that compiled code is made of, constants included, in a fixed order."""
    package = resources.files("perfmodel")
    in_folders = (
        path for folder in _FOLDERS for path in package.joinpath(folder).iterdir() if path.name.endswith(".py")
    )
    return [*(package / name for name in _LOOP_SOURCES), *sorted(in_folders, key=str)]


def _digest() -> str:
    """Of numba's version and every source that compiled code is made of."""
    digest = sha256(numba.__version__.encode())
    for path in compiled_sources():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:_DIGEST_LETTERS]
