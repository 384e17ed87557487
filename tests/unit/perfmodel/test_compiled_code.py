"""Kept machine code: found again, and compiled anew when its file is damaged, swapped or cannot be written."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from numba import njit
from numba.core.dispatcher import Dispatcher

import perfmodel
from perfmodel.adapters import compiled_code

ROOT = Path(__file__).parents[3]


def _made() -> Any:
    """A fresh compiled function, as another process would have it."""

    @njit
    def twice(value):  # type: ignore[no-untyped-def]  # numba finds the types
        return value + value

    return twice


def _run(folder: Path, value: float = 2.0) -> int:
    """Calls it once with the cache on; how often the kept code was found."""
    function = _made()
    assert compiled_code._remember([function], folder)
    assert function(value) == 2 * value
    return sum(function.stats.cache_hits.values())


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.code"))


def test_the_second_run_finds_what_the_first_compiled(tmp_path: Path) -> None:
    assert _run(tmp_path) == 0
    assert len(_files(tmp_path)) == 1
    assert _run(tmp_path) == 1


def test_folders_of_versions_that_nobody_uses_any_more_are_removed(tmp_path: Path) -> None:
    unused, used, other = tmp_path / ("0" * 16), tmp_path / ("1" * 16), tmp_path / "mine"
    now_s = time.time()
    for folder, days in ((unused, 31), (used, 29), (other, 31)):
        folder.mkdir()
        (folder / "x.code").write_bytes(b"x")
        os.utime(folder, (now_s - days * 86_400,) * 2)
    _run(tmp_path)
    (place,) = {path.parent for path in _files(tmp_path)} - {unused, used, other}
    assert (unused.exists(), used.exists(), other.exists()) == (False, True, True)
    os.utime(place, (now_s - 31 * 86_400,) * 2)
    assert _run(tmp_path) == 1  # its own folder counts as used by that


def _swap_ends(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda content: content[:20], lambda content: content[: len(content) // 2], _swap_ends],
    ids=["emptied", "cut in the digest", "cut", "one bit"],
)
def test_a_damaged_file_is_compiled_again_and_replaced(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    _run(tmp_path)
    (file,) = _files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert _run(tmp_path) == 0
    assert _run(tmp_path) == 1


def test_code_of_another_signature_is_never_run(tmp_path: Path) -> None:
    _run(tmp_path, 2.0)
    (of_floats,) = _files(tmp_path)
    content = of_floats.read_bytes()
    of_floats.unlink()
    _run(tmp_path, 3)
    (of_integers,) = _files(tmp_path)
    of_integers.write_bytes(content)
    assert _run(tmp_path, 3) == 0
    assert _run(tmp_path, 3) == 1


def test_a_folder_in_the_place_of_a_file_is_no_fault(tmp_path: Path) -> None:
    _run(tmp_path)
    (file,) = _files(tmp_path)
    file.unlink()
    file.mkdir()
    assert _run(tmp_path) == 0


def test_without_a_folder_the_compiler_runs(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    function = _made()
    assert not compiled_code._remember([function], taken)
    assert function(2.0) == 4.0


def test_what_is_kept_is_ready_and_nothing_else_is(tmp_path: Path) -> None:
    def ready(function: Any) -> bool:
        assert compiled_code._remember([function], tmp_path)
        return compiled_code._is_ready(function)

    @njit
    def thrice(value):  # type: ignore[no-untyped-def]  # numba finds the types
        return value + value + value

    assert not compiled_code._is_ready(_made()), "no cache is switched on"
    assert not ready(_made()) and not _files(tmp_path)
    used = _made()
    assert used(2.0) == 4.0 and compiled_code._is_ready(used), "compiled in this process"
    _run(tmp_path)
    assert ready(_made()), "kept by another process"
    assert not ready(thrice), "kept is another function"
    _files(tmp_path)[0].unlink()
    assert not ready(_made())


@pytest.mark.parametrize(
    ("keeps", "ready", "state"),
    [
        (True, True, "ready"),
        (False, True, "ready"),  # compiled in this process already
        (True, False, "to compile"),
        (False, False, "to compile each time"),
    ],
)
def test_the_state_says_whether_the_compiler_runs(keeps: bool, ready: bool, state: str) -> None:
    assert compiled_code._state(keeps, ready) == state


def test_all_loops_are_kept(tmp_path: Path) -> None:
    from perfmodel import replay_loop
    from perfmodel.queueing import load, loops

    before = [(entry, entry._cache) for module in (loops, replay_loop) for entry in compiled_code._compiled_in(module)]
    try:
        assert compiled_code.remember_compiled_loops(tmp_path)
        assert {replay_loop.run, replay_loop.run_split, load.settle} <= {entry for entry, _ in before}
        assert all(str(entry._cache.cache_path).startswith(str(tmp_path)) for entry, _ in before)
    finally:
        for entry, cache in before:
            entry._cache = cache


def test_a_folder_that_numba_would_leave_for_the_sources_own_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As numba finds a folder that is there and cannot be written (root writes everywhere, so it is said here).
    monkeypatch.setattr("numba.core.caching.UserProvidedCacheLocator.from_function", lambda *_: None)
    monkeypatch.setattr("numba.core.caching.InTreeCacheLocator.ensure_cache_path", lambda _: None)
    function = _made()
    before = function._cache
    assert not compiled_code._remember([function], tmp_path)
    assert function._cache is before


def _modules_with_compiled_code() -> Iterator[Any]:
    for found in pkgutil.walk_packages(perfmodel.__path__, "perfmodel."):
        if found.ispkg or found.name.startswith("perfmodel.adapters."):
            continue
        module = importlib.import_module(found.name)
        own = [each for each in vars(module).values() if isinstance(each, Dispatcher)]
        if any(each.py_func.__module__ == found.name for each in own):
            yield module


def test_every_source_of_compiled_code_decides_which_cache_is_used() -> None:
    kept = {str(path) for path in compiled_code.compiled_sources()}
    folder = Path(next(iter(perfmodel.__path__)))
    seen = 0
    for module in _modules_with_compiled_code():
        seen += 1
        assert module.__file__ in kept, f"{module.__name__} has compiled code and is not part of the digest"
        used = {
            name
            for each in vars(module).values()
            if isinstance(each, Dispatcher) and each.py_func.__module__ == module.__name__
            for name in each.py_func.__code__.co_names
        }
        for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perfmodel."):
                taken = used & {alias.name for alias in node.names}
                source = folder.joinpath(*(node.module or "").split(".")[1:]).with_suffix(".py")
                assert not taken or str(source) in kept, f"compiled code of {module.__name__} uses {taken} of {source}"
    assert seen >= 7


_COMPILES = """
import sys
from pathlib import Path
from numba import njit
from perfmodel.adapters import compiled_code

@njit
def summed(values):
    total = 0.0
    for outer in range(len(values)):
        for inner in range(outer):
            total += values[outer] * values[inner] ** 0.5 + abs(values[outer] - values[inner])
    return total

@njit
def many(values):
    return summed(values) + summed(values[::2]) + summed(values + 1.0)

assert compiled_code._remember([summed, many], Path(sys.argv[1]))
import numpy as np
print("ready", flush=True)
print(f"{many(np.arange(50.0) * 0 + 2.0):.3f}", sum(many.stats.cache_hits.values()), flush=True)
"""


def _compiler(script: Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_compilers_that_are_killed_or_run_at_once_never_break_a_later_run(tmp_path: Path) -> None:
    script, folder = tmp_path / "compiles.py", tmp_path / "cache"
    script.write_text(_COMPILES)
    for delay_s in (0.0, 0.1, 0.3, 0.6):
        process = _compiler(script, folder)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    both = [_compiler(script, folder) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [complaint for _, complaint in answers] == ["", ""]
    values = {said.split()[1] for said, _ in answers}
    said, complaint = _compiler(script, folder).communicate(timeout=60)
    assert (complaint, said.split()[2]) == ("", "1"), "the last one finds what was kept"
    assert {said.split()[1]} == values
