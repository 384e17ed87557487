"""The overlay file: what live pools have taught about their coefficients, one entry a pool.

Owns: the file (JSON: `{"pools": {NAME: {"decode_ratio", "prefill_ratio", ...}}}`), reading one pool's entry and
replacing it. Does not own: how multipliers are found or applied (`recalibration`). A command that predicts a live
pool reads its entry here and wraps its step times in `RecalibratedSteps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from perfmodel.calibration.recalibration import Multipliers
from perfmodel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PoolOverlay:
    """One pool's multipliers, and for how many windows it has been outside the band."""

    multipliers: Multipliers = field(default_factory=Multipliers)
    out_of_band_count: int = 0


def read_overlay(path: Path, pool: str) -> PoolOverlay:
    """The entry of a pool; multipliers of 1 where the file has none. Raises ConfigError, OSError."""
    entry = _pools(path).get(pool, {})
    try:
        multipliers = Multipliers(float(entry.get("decode_ratio", 1.0)), float(entry.get("prefill_ratio", 1.0)))
        return PoolOverlay(multipliers, int(entry.get("out_of_band_count", 0)))
    except ConfigError as fault:
        raise ConfigError(f"{path}: pool {pool}: {fault}") from None
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"{path}: pool {pool} is {entry!r}; expected an object of numbers") from None


def write_overlay(path: Path, pool: str, entry: Mapping[str, Any]) -> None:
    """Put the pool's entry into the file; other pools' entries stay. Raises ConfigError when it is another file."""
    pools = _pools(path) if path.exists() else {}
    pools[pool] = dict(entry)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(orjson.dumps({"pools": pools}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    unfinished.replace(path)


def _pools(path: Path) -> dict[str, Any]:
    try:
        return dict(orjson.loads(path.read_bytes())["pools"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise ConfigError(f"{path} is no overlay; expected a file that `perf recalibrate --out` wrote") from None
