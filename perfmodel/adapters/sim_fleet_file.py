"""Engines of a simulation from the catalogue: one kind by options, or unlike ones, pools and roles from a YAML file.

Owns: the file's keys and units, their defaults and one sentence for what is wrong. Does not own: what an engine does
(`simulation`) or the facts of devices and models (`catalog`). The file:

    engines:
      - {pool: fast, gpu: h100, tp: 2, count: 8}            # model, gpu, tp, dtype default to the command's options
      - {pool: old, gpu: a100, tp: 4, count: 4, slow_ratio: 1.15, dram_gb: 200, dram_gb_per_s: 20}
      - {pool: near, gpu: h100, count: 2, peer_gb_per_s: 40}  # may fetch KV from others that have such a link
      - {pool: p, role: prefill, gpu: h100, count: 2, transfer_gb_per_s: 50, transfer_ms: 1, layerwise: true}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from perfmodel import memory
from perfmodel.adapters.catalog import Catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.adapters.yaml_text import read_yaml
from perfmodel.errors import ConfigError
from perfmodel.hardware import NumberFormat
from perfmodel.memory import EngineShape
from perfmodel.simulation.fleet import EngineSpec, HandOver, LowerTier
from perfmodel.step_time import StepModel, StepTable

_TEXTS = ("pool", "model", "gpu", "dtype", "kv_dtype", "role", "zone")
# More of anything than a cluster has; the simulation holds every engine and every place of a sequence in memory.
_MOST_COUNT = 100_000
_COUNTS = ("tp", "count", "max_batched_tokens", "max_sequences")
_NUMBERS = ("slow_ratio", "dram_gb", "dram_gb_per_s", "transfer_gb_per_s", "transfer_ms", "peer_gb_per_s")
_FLAGS = ("layerwise",)
_ROLES = ("both", "prefill", "decode")
# Bytes of a gigabyte, as links and memories are sold.
_GB = 1e9


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One kind of engine in the words of the command line. None: not said."""

    model: str | None
    gpu: str | None
    tensor_parallel_count: int = 1
    replica_count: int = 1
    weight_format: str = "bf16"
    kv_format: str = "bf16"
    max_batched_tokens: int = 8192
    max_sequence_count: int = 256
    dram_gb: float | None = None
    dram_gb_per_s: float | None = None


def without_effect(file: Path, given: Collection[str]) -> tuple[str, ...]:
    """Those of the `given` fields (names as in the file) that the command's options cannot change beside this file.

    `count` always; another field where every engine of the file has its own. Raises as `engines_of` does.
    """
    entries = _entries(file)
    return tuple(name for name in given if name == "count" or all(name in entry for entry in entries))


def engines_of(options: EngineOptions, file: Path | None, catalog: Catalog) -> tuple[EngineSpec, ...]:
    """The engines of the file, or those of the options. Raises ConfigError, OSError."""
    maker = _Maker(options, catalog)
    if file is None:
        return (maker.spec({"pool": "pool", "count": options.replica_count}, None),)
    return tuple(maker.spec(entry, f"{file}, engine {number}") for number, entry in enumerate(_entries(file), 1))


def _entries(file: Path) -> list[dict[str, Any]]:
    """The entries of the file; their fields are not checked yet."""
    content = read_yaml(file)
    entries = content.get("engines") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{file}: engines is {_short(entries)}; expected a list of at least one engine")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise ConfigError(f"{file}: engine {number} is {_short(entry)}; expected fields such as gpu and count")
    return entries


class _Maker:
    """Specs of entries, with one step table for each kind of engine. Mutable: it keeps the tables."""

    def __init__(self, options: EngineOptions, catalog: Catalog) -> None:
        self._options = options
        self._catalog = catalog
        self._coefficients = load_coefficients().coefficients
        self._tables: dict[tuple[Any, ...], StepTable] = {}

    def spec(self, entry: Mapping[str, Any], where: str | None) -> EngineSpec:
        """The engines of one entry; `where` is None for those of the options.

        Raises ConfigError that names the field or option and what was expected.
        """
        _check_fields(entry, where)
        options = self._options
        batched = _count(entry, "max_batched_tokens", where, options.max_batched_tokens)
        shape = self._shape(entry, where)
        try:
            capacity_tokens = memory.kv_capacity_tokens(shape, max_batched_tokens=batched)
        except ConfigError as fault:
            deciding = ", ".join(_said(name, None if where is None else "") for name in ("gpu", "tp", "dtype"))
            raise ConfigError(f"{'' if where is None else f'{where}: '}{fault} ({deciding} decide it)") from None
        per_token_bytes = memory.kv_bytes(shape, _CONTEXT_TOKENS) / _CONTEXT_TOKENS
        return EngineSpec(
            pool=str(entry.get("pool", "pool")),
            steps=self._table(shape, batched),
            kv_capacity_tokens=capacity_tokens,
            kv_bytes_per_token=per_token_bytes,
            count=_count(entry, "count", where, 1),
            role=str(entry.get("role", "both")),
            max_batched_tokens=batched,
            max_sequence_count=_count(entry, "max_sequences", where, options.max_sequence_count),
            accelerator=shape.hardware.name,
            zone=str(entry.get("zone", "")),
            slow_ratio=_number(entry, "slow_ratio", where) or 1.0,
            tier=self._tier(entry, where),
            hand_over=_hand_over(entry, where, shape),
            peer_bytes_per_s=(_number(entry, "peer_gb_per_s", where) or 0.0) * _GB,
        )

    def _shape(self, entry: Mapping[str, Any], where: str | None) -> EngineShape:
        options, catalog = self._options, self._catalog
        gpu, model = entry.get("gpu", options.gpu), entry.get("model", options.model)
        for name, value in (("gpu", gpu), ("model", model)):
            if value is None:
                also = "" if where is None else f", or --{name}"
                raise ConfigError(f"{_said(name, where)} is missing; expected a name of the catalogue{also}")
        tensor_parallel_count = _count(entry, "tp", where, options.tensor_parallel_count)
        try:
            return EngineShape(
                catalog.device(str(gpu)),
                catalog.model(str(model)),
                tensor_parallel_count,
                NumberFormat.parse(str(entry.get("dtype", options.weight_format))),
                NumberFormat.parse(str(entry.get("kv_dtype", options.kv_format))),
            )
        except ConfigError as fault:
            raise ConfigError(f"{'' if where is None else f'{where}: '}{fault}") from None

    def _table(self, shape: EngineShape, batched_tokens: int) -> StepTable:
        key = (
            shape.hardware.name, shape.architecture.name, shape.tensor_parallel_count, shape.weight_format,
            shape.kv_format, batched_tokens,
        )  # fmt: skip
        if key not in self._tables:
            self._tables[key] = StepModel(shape, self._coefficients).table(batched_tokens)
        return self._tables[key]

    def _tier(self, entry: Mapping[str, Any], where: str | None) -> LowerTier | None:
        capacity_gb = _number(entry, "dram_gb", where) or self._options.dram_gb
        if capacity_gb is None:
            return None
        bandwidth = _number(entry, "dram_gb_per_s", where) or self._options.dram_gb_per_s
        if bandwidth is None:
            raise ConfigError(
                f"{_said('dram_gb_per_s', where)} is missing; expected the bandwidth of a restore beside "
                f"{_said('dram_gb', None if where is None else '')}"
            )
        return LowerTier(capacity_gb * _GB, bandwidth * _GB)


# Context at which a model whose layers forget is asked for its bytes per token; the same as `memory`'s capacity.
_CONTEXT_TOKENS = 8192


def _said(name: str, where: str | None) -> str:
    """A field as the reader knows it: the option (`where` None), or the field of the file at `where` ("": here)."""
    return f"--{name.replace('_', '-')}" if where is None else f"{where}: {name}" if where else name


def _hand_over(entry: Mapping[str, Any], where: str | None, shape: EngineShape) -> HandOver | None:
    bandwidth = _number(entry, "transfer_gb_per_s", where)
    if bandwidth is None:
        if entry.get("role") == "prefill":
            raise ConfigError(f"{where}: transfer_gb_per_s is missing; expected the bandwidth from prefill to decode")
        return None
    layers = shape.architecture.layer_count if entry.get("layerwise", False) else 1
    return HandOver(bandwidth * _GB, (_number(entry, "transfer_ms", where) or 0.0) / 1e3, layers)


def _check_fields(entry: Mapping[str, Any], where: str | None) -> None:
    known = (*_TEXTS, *_COUNTS, *_NUMBERS, *_FLAGS)
    for name, value in entry.items():
        if name not in known:
            close = get_close_matches(str(name), known, n=1) or known
            raise ConfigError(f"{where}: {name} is no field of an engine; expected {', '.join(close)}")
        if name in _TEXTS and not isinstance(value, str):
            raise ConfigError(f"{where}: {name} is {_short(value)}; expected a name")
        if name in _FLAGS and not isinstance(value, bool):
            raise ConfigError(f"{where}: {name} is {_short(value)}; expected true or false")
    if entry.get("role", "both") not in _ROLES:
        raise ConfigError(f"{where}: role is {_short(entry['role'])}; expected one of {', '.join(_ROLES)}")


def _count(entry: Mapping[str, Any], name: str, where: str | None, default: int) -> int:
    value = entry.get(name, default)
    if type(value) is not int or not 1 <= value <= _MOST_COUNT:
        raise ConfigError(f"{_said(name, where)} is {_short(value)}; expected an integer of 1 to {_MOST_COUNT:,}")
    return value


def _number(entry: Mapping[str, Any], name: str, where: str | None) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ConfigError(f"{_said(name, where)} is {_short(value)}; expected a number above 0")
    return float(value)


def _short(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
