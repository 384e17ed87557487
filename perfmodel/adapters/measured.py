"""Measured rows from a CSV file: reading, and refusing those that cannot be true.

Owns: the columns, and the checks of a row against arithmetic and physics, each refusal with its reason. Does not own:
the reading of a row as a configuration (`row_rules`) or any fit. `note` is never read; rows with `exclude` are dropped
under that reason.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from perfmodel.adapters.catalog import Catalog
from perfmodel.calibration.row_rules import configuration, number, with_compute
from perfmodel.calibration.validation import Measured
from perfmodel.configuration import LIMITED, QUEUED, Configuration, Scenario
from perfmodel.errors import ConfigError
from perfmodel.hardware import DeviceKind, Hardware
from perfmodel.step_terms import StepBasis, Work

# Columns without which a table is another table.
REQUIRED = ("model", "gpu", "scenario", "isl", "osl", "concurrency_or_batch")

# Columns that tell one concurrency curve from another.
_CURVE = (
    "source", "date", "engine", "engine_version", "model", "weight_dtype", "gpu", "n_gpus", "tp", "pp", "dp", "ep",
    "isl", "osl", "scenario", "decode_layout", "prefill_layout",
)  # fmt: skip

# Throughput times latency over concurrency: outside of this range one of the three is in another unit or of other runs
# (all rows of the reference table with means are within 0.7 to 1.3).
_LITTLE_RATIOS = (0.5, 2.0)

# TPOT in milliseconds outside of this range is in another unit.
_TPOT_MS_RANGE = (0.2, 5_000.0)

# How far below a bound a row may be: the facts it is computed from are rounded, and lengths vary.
_BOUND_SLACK_RATIO = 0.9

# Rows whose load is not what their columns say weigh less: live sessions are not requests in flight, and where the
# sequences of an engine had to be assumed its batch is not known.
_UNSURE_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that is not used, by its line in the file (the header is line 1), and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row."""

    line: int
    fields: Mapping[str, str]
    configuration: Configuration


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises ConfigError without the required columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # Excel begins with a mark
            reader = csv.DictReader(file)
            missing = [column for column in REQUIRED if column not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path.name} has no column {missing[0]!r}; expected {', '.join(REQUIRED)}")
            return [{name: value or "" for name, value in row.items() if name} for row in reader]
    except (UnicodeDecodeError, csv.Error) as fault:
        raise ConfigError(f"{path.name} is no CSV table in UTF-8: {fault}") from fault


def keep_input(option: str, out: Path | None, source: Path) -> None:
    """Raises ConfigError where writing `out` would overwrite `source`, links followed."""
    if out is None:
        return
    same = out.samefile(source) if out.exists() and source.exists() else out.resolve() == source.resolve()
    if same:
        raise ConfigError(f"{option} is {out}, the file that is read; expected another one")


def configured(row: Mapping[str, str], catalog: Catalog) -> Configuration:
    """The configuration of a row, compute figures borrowed where the catalogue allows. Raises ConfigError."""
    device, assumed = usable_device(catalog, row.get("gpu", ""))
    return configuration(row, device, catalog.model(row.get("model", "")), assumed)


def usable_device(catalog: Catalog, name: str) -> tuple[Hardware, dict[str, str]]:
    """The device, and `compute` with the name of another one whose figures stand in: its die's, else its generation's
    nearest in bandwidth.
    """
    device = catalog.device(name)
    if device.bf16_flop_per_s is not None:
        return device, {}
    twin = catalog.devices.get(device.same_die_as or "")
    if twin is None:
        alike = [
            other
            for other in catalog.devices.values()
            if other.generation == device.generation and other.vendor == device.vendor and other.bf16_flop_per_s
        ]
        if not alike or device.kind is not DeviceKind.GPU:
            return device, {}
        twin = min(alike, key=lambda other: abs(math.log(other.memory_bytes_per_s / device.memory_bytes_per_s)))
    return with_compute(device, twin), {"compute": twin.name}


def usable_rows(rows: list[dict[str, str]], catalog: Catalog) -> tuple[list[Row], list[Refused]]:
    """The rows that can be believed, and the others with their reasons."""
    used: list[Row] = []
    refused: list[Refused] = []
    for line, row in enumerate(rows, start=2):
        if row.get("exclude"):
            refused.append(Refused(line, f"exclude is {row['exclude']!r}"))
            continue
        try:
            asked = configured(row, catalog)
        except ConfigError as fault:
            refused.append(Refused(line, str(fault)))
            continue
        reason = next(_faults(row, asked), None)
        if reason is None:
            used.append(Row(line, row, asked))
        else:
            refused.append(Refused(line, reason))
    return used, refused


def measured(row: Row) -> Measured:
    """The row as calibration takes it."""
    fields, scenario = row.fields, row.configuration.scenario
    ttft_ms, tpot_ms = number(fields, "ttft_ms"), number(fields, "tpot_ms")
    return Measured(
        configuration=row.configuration,
        device=row.configuration.decode.shape.hardware.name,
        model=row.configuration.decode.shape.architecture.name,
        curve="|".join(fields.get(column, "") for column in _CURVE),
        source=fields.get("source", ""),
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
        output_tok_per_s=number(fields, "output_tok_s"),
        weight=_UNSURE_WEIGHT if scenario is Scenario.AGENTIC or row.configuration.slot_count is not None else 1.0,
    )


def _faults(row: Mapping[str, str], asked: Configuration) -> Iterator[str]:
    """Reasons not to believe a row."""
    tpot_ms, ttft_ms = number(row, "tpot_ms"), number(row, "ttft_ms")
    low, high = _TPOT_MS_RANGE
    if tpot_ms is not None and not low <= tpot_ms <= high:
        yield f"units: tpot_ms is {tpot_ms:g}; expected {low:g} to {high:g} milliseconds"
    if ttft_ms is not None and not ttft_ms > 0:
        yield f"units: ttft_ms is {ttft_ms:g}; expected above 0"
    yield from _little_faults(row, asked, tpot_ms, ttft_ms)
    yield from _bound_faults(row, asked, tpot_ms)


def _little_faults(
    row: Mapping[str, str], asked: Configuration, tpot_ms: float | None, ttft_ms: float | None
) -> Iterator[str]:
    """Little's law: requests in flight are rate times time in flight."""
    output, concurrency = number(row, "output_tok_s"), number(row, "concurrency_or_batch")
    if None in (output, concurrency, tpot_ms, ttft_ms) or asked.scenario is not Scenario.CLOSED_LOOP:
        return
    assert output is not None and concurrency is not None and tpot_ms is not None and ttft_ms is not None
    lengths = asked.lengths
    seconds = (ttft_ms + tpot_ms * (lengths.output_tokens - 1)) / 1e3
    ratio = output / lengths.output_tokens * seconds / concurrency
    low, high = _LITTLE_RATIOS
    if not low <= ratio <= high:
        yield f"Little's law: rate x latency is {ratio:.2f} of the concurrency; expected {low} to {high}"


def _bound_faults(row: Mapping[str, str], asked: Configuration, tpot_ms: float | None) -> Iterator[str]:
    """The weight read of a step, and peak FLOPS."""
    if row.get("speculative") == "yes":
        return
    if tpot_ms is not None and asked.scenario not in LIMITED:
        basis = StepBasis(asked.decode.shape)
        work = Work(decode_count=1.0, decode_context_tokens=1.0)
        least_ms = basis.floor_s(work) * 1e3
        if tpot_ms < _BOUND_SLACK_RATIO * least_ms:
            yield f"weight read: tpot_ms is {tpot_ms:g}; reading the weights takes {least_ms:.3g} ms"
    output = number(row, "output_tok_s")
    peak = _peak_tok_per_s(asked)
    if output is not None and peak is not None and asked.scenario in QUEUED and output > peak / _BOUND_SLACK_RATIO:
        yield f"peak FLOPS: output_tok_s is {output:g}; the devices' peak allows {peak:.4g}"


def _peak_tok_per_s(asked: Configuration) -> float | None:
    """Output tokens a second at the peak of the fastest format that the devices have, prompts included."""
    shape = asked.decode.shape
    peak = shape.hardware.flop_per_s(shape.weight_format)
    if peak is None:
        return None
    lengths = asked.lengths
    per_answer = shape.architecture.active_linear_flop_per_token * (
        lengths.input_tokens * (1 - lengths.cached_ratio) + lengths.output_tokens
    )
    return asked.device_count * peak / per_answer * lengths.output_tokens
