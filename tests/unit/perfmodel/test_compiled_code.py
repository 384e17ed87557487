"""Kept machine code: found again, and compiled anew when its file is damaged, swapped or cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba import njit

from perfmodel.adapters import compiled_code


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


def test_all_loops_are_kept(tmp_path: Path) -> None:
    from perfmodel import queueing, replay_loop

    before = [
        (entry, entry._cache) for module in (queueing, replay_loop) for entry in compiled_code._compiled_in(module)
    ]
    try:
        assert compiled_code.remember_compiled_loops(tmp_path)
        assert {replay_loop.run, replay_loop.run_split, queueing._tagged} <= {entry for entry, _ in before}
        assert all(str(entry._cache.cache_path).startswith(str(tmp_path)) for entry, _ in before)
    finally:
        for entry, cache in before:
            entry._cache = cache
