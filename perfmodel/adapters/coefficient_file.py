"""The coefficient file: what calibration fitted, with units, bounds, source and errors, as YAML.

Owns: its format, both ways. Does not own: the values' meaning (`coefficients`, `first_token`). The shipped file is
`data/coefficients.yaml`; a calibration of one's own has the same form and is given by path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from perfmodel.adapters.yaml_text import read_yaml
from perfmodel.coefficients import Band, Coefficients, FirstToken, Lever, bounds
from perfmodel.errors import ConfigError
from perfmodel.step_terms import TERMS, FormatClass, Term

_FACTORS = ("launch_factors", "request_factors", "scale_factors")


@dataclass(frozen=True, slots=True)
class CoefficientFile:
    """The content of one file. `residuals` and `cross_validation` are for people: error tables by group and split."""

    coefficients: Coefficients
    first_token: FirstToken
    source: str
    residuals: Mapping[str, Mapping[str, float]]
    cross_validation: Mapping[str, Mapping[str, float]]


def load_coefficients(path: Path | None = None) -> CoefficientFile:
    """Read a coefficient file (default: the one shipped). Raises ConfigError that names file and field."""
    place: Traversable = resources.files("perfmodel") / "data" / "coefficients.yaml" if path is None else path
    try:
        content = read_yaml(place)
    except OSError as fault:
        raise ConfigError(f"{place.name} cannot be read: {fault}") from fault
    if not isinstance(content, dict):
        raise ConfigError(f"{place.name} holds {type(content).__name__}; expected a mapping with 'base'")
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise ConfigError(
            f"{place.name}: {fault!r} is missing or malformed; expected a file of `perf calibrate`"
        ) from fault


def _parse(content: dict[str, Any]) -> CoefficientFile:
    first = content["first_token"]
    known = {item.name for item in fields(FirstToken)}
    unknown = set(first) - known
    if unknown:
        raise ConfigError(f"coefficients: first_token.{min(unknown)} is not known; expected {', '.join(sorted(known))}")
    coefficients = Coefficients(
        base={Term(name): float(entry["value"]) for name, entry in content["base"].items()},
        formats={FormatClass(name): float(value) for name, value in content["formats"].items()},
        engines=_levers(content["engines"]),
        eras=_levers(content["eras"]),
        generations=_levers(content["generations"]),
        families={str(name): float(value) for name, value in content["families"].items()},
        benchmark={str(name): float(value) for name, value in content["benchmark"].items()},
        bands={
            str(name): Band(float(low), float(high), int(count))
            for name, (low, high, count) in content["bands"].items()
        },
        device_rows=_counts(content["rows"]["devices"]),
        model_rows=_counts(content["rows"]["models"]),
        pair_rows=_counts(content["rows"]["pairs"]),
    )
    return CoefficientFile(
        coefficients,
        FirstToken(**first),
        str(content["source"]),
        content.get("residuals", {}),
        content.get("cross_validation", {}),
    )


def _levers(section: Mapping[str, Mapping[str, float]]) -> dict[str, dict[Lever, float]]:
    return {
        str(name): {Lever(lever): float(value) for lever, value in factors.items()} for name, factors in section.items()
    }


def _counts(section: Mapping[str, int]) -> dict[str, int]:
    return {str(name): int(count) for name, count in section.items()}


# What a coefficient multiplies, for the file's readers.
_UNITS = {True: "microseconds each", False: "times the physical minimum"}


def dump_coefficients(file: CoefficientFile) -> str:
    """The file's text. The same values give the same bytes."""
    kept = file.coefficients
    base = {}
    for term in TERMS:
        low, high = bounds(term)
        base[term.value] = {
            "value": _round(kept.base[term]),
            "unit": _UNITS[term.value.endswith("_us")],
            "low": low,
            "high": high,
        }
    first = {item.name: _plain(getattr(file.first_token, item.name)) for item in fields(FirstToken)}
    content = {
        "source": file.source,
        "base": base,
        "formats": {name.value: _round(value) for name, value in sorted(kept.formats.items())},
        "engines": _plain_levers(kept.engines),
        "eras": _plain_levers(kept.eras),
        "generations": _plain_levers(kept.generations),
        "families": {name: _round(value) for name, value in sorted(kept.families.items())},
        "benchmark": {name: _round(value) for name, value in sorted(kept.benchmark.items())},
        "first_token": first,
        "bands": {
            name: [_round(band.low_ratio), _round(band.high_ratio), band.row_count]
            for name, band in sorted(kept.bands.items())
        },
        "rows": {
            "devices": dict(sorted(kept.device_rows.items())),
            "models": dict(sorted(kept.model_rows.items())),
            "pairs": dict(sorted(kept.pair_rows.items())),
        },
        "cross_validation": _plain(file.cross_validation),
        "residuals": _plain(file.residuals),
    }
    head = (
        "# Fitted coefficients of the performance model, written by `inferplane perf calibrate --out`.\n"
        "# A term is its physical minimum (or count) times its base value times the factors of format, engine, era,\n"
        "# generation and family. `bands` hold the middle 80 % of measured over predicted: [low, high, points].\n"
        "# Points: InferenceX (Apache-2.0, copyright SemiAnalysis) through aiconfigurator, NVIDIA TensorRT-LLM, \n"
        "# MLCommons MLPerf Inference, Splitwise, dstack and vendors' documents. No measured row is in this file.\n"
    )
    return head + str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=118, allow_unicode=True))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, float):
        return _round(value)
    return value


def _plain_levers(section: Mapping[str, Mapping[Lever, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {lever.value: _round(value) for lever, value in factors.items()}
        for name, factors in sorted(section.items())
    }


def _round(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
