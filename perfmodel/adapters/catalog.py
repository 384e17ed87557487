"""Reads the data files of devices, models and efficiencies into the core's dataclasses.

Owns: the files' format (every number carries a named source), units conversion and look-up by name or alias. Does not
own: any arithmetic on the facts. A number without a source, an unknown source or a missing field is an error at load,
so that no figure enters the model that nobody can trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import yaml

from perfmodel.architecture import Architecture
from perfmodel.errors import ConfigError
from perfmodel.hardware import Hardware, NumberFormat
from perfmodel.memory import EngineShape
from perfmodel.step_time import Efficiency

Fact = TypeVar("Fact")

# Field names of the core's dataclasses that the files give in the same unit.
_MODEL_FIELDS = (
    "layer_count",
    "hidden_size",
    "head_count",
    "kv_head_count",
    "head_size",
    "intermediate_size",
    "vocabulary_size",
    "parameter_count",
    "max_context_tokens",
)
_EFFICIENCY_FIELDS = (
    "compute_ratio",
    "weight_read_ratio",
    "kv_read_ratio",
    "link_ratio",
    "layer_overhead_s",
    "step_overhead_s",
    "sequence_overhead_s",
    "collective_latency_s",
)


@dataclass(frozen=True, slots=True)
class Catalog:
    """What the data files hold. Names are canonical; `device` and `model` also take aliases, in any letter case."""

    devices: Mapping[str, Hardware]
    models: Mapping[str, Architecture]
    efficiency: Efficiency
    aliases: Mapping[str, str]

    def device(self, name: str) -> Hardware:
        """The device of this name. Raises ConfigError that lists the known ones."""
        return _named("device", name, self.devices, self.aliases)

    def model(self, name: str) -> Architecture:
        """The model of this name. Raises ConfigError that lists the known ones."""
        return _named("model", name, self.models, self.aliases)

    def shape(
        self, device: str, model: str, tensor_parallel_count: int = 1, weight_format: str = "bf16"
    ) -> EngineShape:
        """The engine of this model on these devices, weights in `bf16` or `fp8`. Raises ConfigError."""
        if weight_format not in tuple(NumberFormat):
            raise ConfigError(f"weight_format is {weight_format!r}; expected one of {', '.join(NumberFormat)}")
        return EngineShape(self.device(device), self.model(model), tensor_parallel_count, NumberFormat(weight_format))


def load_catalog(folder: Traversable | None = None) -> Catalog:
    """Read hardware.yaml, models.yaml and efficiency.yaml from `folder` (default: the ones shipped). Raises
    ConfigError.
    """
    root = resources.files("perfmodel") / "data" if folder is None else folder
    aliases: dict[str, str] = {}
    devices: dict[str, Hardware] = {}
    models: dict[str, Architecture] = {}
    hardware_file = _File(root / "hardware.yaml")
    for name, entry in hardware_file.section("devices").items():
        devices[name] = _hardware(hardware_file, name, entry)
        _add_aliases(aliases, name, entry)
    models_file = _File(root / "models.yaml")
    for name, entry in models_file.section("models").items():
        models[name] = _architecture(models_file, name, entry)
        _add_aliases(aliases, name, entry)
    efficiency_file = _File(root / "efficiency.yaml")
    entry = efficiency_file.section("efficiency")
    efficiency = Efficiency(
        **{field: efficiency_file.number("efficiency", entry, field) for field in _EFFICIENCY_FIELDS}
    )
    return Catalog(devices, models, efficiency, aliases)


class _File:
    """One data file: its sections, and its numbers with their sources checked."""

    def __init__(self, path: Traversable) -> None:
        self.name = path.name
        try:
            content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as fault:
            raise ConfigError(f"{self.name} cannot be read: {fault}") from fault
        if not isinstance(content, dict):
            raise ConfigError(f"{self.name} holds {type(content).__name__}; expected a mapping with 'sources'")
        self._content: dict[str, Any] = content
        self._sources = self.section("sources")

    def section(self, name: str) -> dict[str, Any]:
        """A top-level mapping of the file."""
        section = self._content.get(name)
        if not isinstance(section, dict) or not section:
            raise ConfigError(f"{self.name}: section {name!r} is missing or empty; expected a mapping")
        return section

    def optional_number(self, owner: str, entry: Mapping[str, Any], field: str) -> float | None:
        """The number of `field`; None where the file says null (known not to exist)."""
        item = entry.get(field)
        if not isinstance(item, dict) or "value" not in item:
            raise ConfigError(f"{self.name}: {owner}.{field} is {item!r}; expected {{value: ..., source: ...}}")
        for source in (item.get("source"), item.get("also", item.get("source"))):
            if source not in self._sources:
                raise ConfigError(f"{self.name}: {owner}.{field} names source {source!r}; expected one of 'sources'")
        value = item["value"]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.name}: {owner}.{field} has the value {value!r}; expected a number")
        return float(value)

    def number(self, owner: str, entry: Mapping[str, Any], field: str) -> float:
        """The number of `field`, which must exist."""
        value = self.optional_number(owner, entry, field)
        if value is None:
            raise ConfigError(f"{self.name}: {owner}.{field} is null; expected a number")
        return value


def _hardware(file: _File, name: str, entry: Mapping[str, Any]) -> Hardware:
    fp8_tflop_per_s = file.optional_number(name, entry, "fp8_tflop_per_s")
    return Hardware(
        name=name,
        memory_bytes=int(file.number(name, entry, "memory_gib") * 2**30),
        memory_bytes_per_s=file.number(name, entry, "memory_gb_per_s") * 1e9,
        bf16_flop_per_s=file.number(name, entry, "bf16_tflop_per_s") * 1e12,
        fp8_flop_per_s=None if fp8_tflop_per_s is None else fp8_tflop_per_s * 1e12,
        scaleup_bytes_per_s=file.number(name, entry, "scaleup_gb_per_s") * 1e9,
        scaleup_device_count=int(file.number(name, entry, "scaleup_device_count")),
    )


def _architecture(file: _File, name: str, entry: Mapping[str, Any]) -> Architecture:
    if entry.get("attention") != "gqa":
        raise ConfigError(f"{file.name}: {name}.attention is {entry.get('attention')!r}; only 'gqa' can be sized today")
    return Architecture(name=name, **{field: int(file.number(name, entry, field)) for field in _MODEL_FIELDS})


def _add_aliases(aliases: dict[str, str], name: str, entry: Mapping[str, Any]) -> None:
    for alias in (name, *entry.get("aliases", ())):
        owner = aliases.setdefault(str(alias).lower(), name)
        if owner != name:
            raise ConfigError(f"the alias {alias!r} is given to both {owner} and {name}; expected one owner")


def _named(kind: str, name: str, facts: Mapping[str, Fact], aliases: Mapping[str, str]) -> Fact:
    canonical = aliases.get(name.lower(), name)
    fact = facts.get(canonical)
    if fact is None:
        raise ConfigError(f"{kind} is {name!r}; expected one of {', '.join(sorted(facts))}")
    return fact
