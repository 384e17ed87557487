"""The typed decorator of the small compiled loops (`replay_loop`, `queueing`): numba's own, which ships no types.

Owns: that one decorator. Does not own: the simulation's, which needs pointers and no cache (`sim_compile`).
Compiled code is cached beside the byte code (numba's `cache=True`), as Python caches its own: a command that predicts a
few rows must not compile for ten seconds. A test replaces this decorator to run the sources as plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F) -> _F:
    """Compile on the first call with each set of types; later processes load the result."""
    return cast(_F, njit(cache=True)(function))
