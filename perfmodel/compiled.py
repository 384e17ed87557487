"""The typed decorator of the small compiled loops (`replay_loop`, `queueing`): numba's own, which ships no types.

Owns: that one decorator. Does not own: the simulation's, which needs pointers (`simulation.compiling`), or any cache of
compiled code, which is a folder and therefore an adapter's (`adapters.compiled_code`): numba's `cache=True` would write
beside the installed sources and trust whatever lies there. A test replaces this decorator to run the sources as plain
Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F) -> _F:
    """Compile on the first call with each set of types."""
    return cast(_F, njit(function))
