"""Keeps the simulation's machine code on disk, so that only the first run on a machine waits for the compiler.

Owns: the folder (`~/.cache/inferplane/compiled`, one sub-folder for each version of the sources and of numba) and
switching numba's cache on for it. Does not own: what is compiled (`sim_cluster.compiled_entries`). Nothing is
written beside the installed package, which numba's own `cache=True` would do; without a folder that can be written, the
compiler just runs again. Why a digest of all sources: numba looks only at the file of the outermost function.
"""

from __future__ import annotations

from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import numba

from perfmodel.sim_cluster import compiled_entries

# Letters of the digest in the folder's name: 64 bits are enough to tell versions apart.
_DIGEST_LETTERS = 16


def remember_compiled_code(folder: Path | None = None) -> bool:
    """Use machine code kept by an earlier run, and keep what is compiled now. False: there is nowhere to keep it."""
    home = folder or Path.home() / ".cache" / "inferplane" / "compiled"
    place = home / _digest()
    settings: Any = numba.config  # its settings are set when it is imported, so no stub has them
    before = settings.CACHE_DIR
    try:
        place.mkdir(parents=True, exist_ok=True)
        settings.CACHE_DIR = str(place)
        for entry in compiled_entries():
            entry.enable_caching()
    except (OSError, RuntimeError):  # numba says RuntimeError when it finds no folder to write to
        return False
    finally:
        settings.CACHE_DIR = before
    return True


def _digest() -> str:
    """Of numba's version and every source that compiled code is made of."""
    digest = sha256(numba.__version__.encode())
    sources = [path for path in resources.files("perfmodel").iterdir() if path.name.startswith("sim_")]
    for path in sorted(sources, key=lambda path: path.name):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:_DIGEST_LETTERS]
