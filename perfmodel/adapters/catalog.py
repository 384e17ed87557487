"""The catalogue: devices, models, prices and efficiencies of the data files by name or alias.

Owns: which files are read, units conversion of devices, and look-up with the closest names offered. Does not own: the
files' format (`data_files`), the shapes of models (`model_file`, `hf_config`), or any arithmetic on the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NoReturn

from perfmodel.adapters import model_file
from perfmodel.adapters.data_files import DataFile, Entry
from perfmodel.architecture import Architecture
from perfmodel.errors import ConfigError
from perfmodel.hardware import DeviceKind, Hardware, NumberFormat
from perfmodel.memory import EngineShape
from perfmodel.price import DevicePrices, Ownership, Price, PriceKind, price

_PRICE_FIELDS = (
    "on_demand_usd_per_h",
    "reserved_usd_per_h",
    "spot_usd_per_h",
    "tco_hyperscaler_usd_per_h",
    "tco_neocloud_usd_per_h",
    "capex_usd",
)

# How many names are offered for one that is not known.
_OFFERED_COUNT = 5


@dataclass(frozen=True, slots=True)
class UnsizedDevice:
    """A device whose memory or bandwidth is not known: it can be named, and nothing can be computed on it."""

    name: str
    missing: tuple[str, ...]
    memory_bytes: int | None
    memory_marketed_bytes: int | None


@dataclass(frozen=True, slots=True)
class Catalog:
    """What the data files hold. Names are canonical; `device` and `model` also take aliases, in any letter case."""

    devices: Mapping[str, Hardware]
    unsized_devices: Mapping[str, UnsizedDevice]
    models: Mapping[str, Architecture]
    prices: Mapping[str, DevicePrices]
    device_aliases: Mapping[str, str]
    model_aliases: Mapping[str, str]

    def device(self, name: str) -> Hardware:
        """The device of this name. Raises ConfigError: unknown (the closest names are offered), or not sized."""
        canonical = self.device_name(name)
        unsized = self.unsized_devices.get(canonical)
        if unsized is not None:
            verb = "is" if len(unsized.missing) == 1 else "are"
            raise ConfigError(
                f"device {canonical}: its {' and '.join(unsized.missing)} {verb} not known; nothing is guessed for it"
            )
        return self.devices[canonical]

    def device_name(self, name: str) -> str:
        """The canonical name of a device. Raises ConfigError when it is not known."""
        canonical = self.device_aliases.get(name.lower())
        if canonical is None:
            _unknown("device", name, self.device_aliases)
        return canonical

    def device_memory_bytes(self, name: str) -> tuple[int | None, int | None]:
        """Usable and marketed bytes of a device, known even of some that cannot be computed on."""
        canonical = self.device_name(name)
        device = self.unsized_devices.get(canonical) or self.devices[canonical]
        return device.memory_bytes, device.memory_marketed_bytes

    def price(self, device: str, kind: PriceKind | None = None, ownership: Ownership | None = None) -> Price:
        """USD an hour of a device; the answer says when it is not known. Raises ConfigError for an unknown device."""
        canonical = self.device_name(device)
        return price(self.prices.get(canonical) or self._unpriced(canonical), kind, ownership)

    def _unpriced(self, canonical: str) -> DevicePrices:
        device = self.devices.get(canonical)
        return DevicePrices(canonical, power_w=None if device is None else device.all_in_w or device.tdp_w)

    def model(self, name: str) -> Architecture:
        """The model of this name, or of a Hugging Face `config.json` (the file or its folder). Raises ConfigError."""
        canonical = self.model_aliases.get(name.lower())
        if canonical is not None:
            return self.models[canonical]
        if name and (name.endswith(".json") or _is_folder(name)):
            from perfmodel.adapters.hf_config import read_config

            return read_config(Path(name))
        _unknown("model", name, self.model_aliases)

    def shape(
        self, device: str, model: str, tensor_parallel_count: int = 1, weight_format: str = "bf16"
    ) -> EngineShape:
        """The engine of this model on these devices, weights in a number format. Raises ConfigError."""
        try:
            weights = NumberFormat.parse(weight_format)
        except ConfigError:
            raise ConfigError(
                f"weight_format is {weight_format!r}; expected one of {', '.join(NumberFormat)}"
            ) from None
        return EngineShape(self.device(device), self.model(model), tensor_parallel_count, weights)


def _is_folder(name: str) -> bool:
    """Whether a folder has this name; what the system does not take for a name (too long, a null byte) is none."""
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False


def load_catalog(folder: Traversable | None = None) -> Catalog:
    """Read hardware*.yaml, models*.yaml and prices*.yaml from `folder` (default: the ones shipped).

    Raises ConfigError that names file, entry and field.
    """
    root = resources.files("perfmodel") / "data" if folder is None else folder
    devices: dict[str, Hardware] = {}
    unsized: dict[str, UnsizedDevice] = {}
    models: dict[str, Architecture] = {}
    device_aliases: dict[str, str] = {}
    model_aliases: dict[str, str] = {}
    for file in _files(root, "hardware"):
        for name, entry in file.entries("devices").items():
            device = _device(entry)
            if isinstance(device, Hardware):
                devices[name] = device
            else:
                unsized[name] = device
            _add_aliases(device_aliases, entry)
    for file in _files(root, "models"):
        for name, entry in file.entries("models").items():
            models[name] = model_file.architecture(entry)
            _add_aliases(model_aliases, entry)
    prices = _prices(root, devices, unsized)
    return Catalog(devices, unsized, models, prices, device_aliases, model_aliases)


def _files(root: Traversable, stem: str) -> list[DataFile]:
    """The data files whose name begins with `stem`, by name."""
    paths = [path for path in root.iterdir() if path.name.startswith(stem) and path.name.endswith(".yaml")]
    if not paths:
        raise ConfigError(f"{stem}*.yaml: no such data file in {root}; expected at least one")
    return [DataFile(path) for path in sorted(paths, key=lambda path: path.name)]


def _prices(
    root: Traversable, devices: Mapping[str, Hardware], unsized: Mapping[str, UnsizedDevice]
) -> dict[str, DevicePrices]:
    prices: dict[str, DevicePrices] = {}
    for file in _files(root, "prices"):
        for name, entry in file.entries("prices").items():
            if name not in devices and name not in unsized:
                raise ConfigError(f"{file.name}: {name} is no device of the catalogue; expected the name of one")
            device = devices.get(name)
            power_w = None if device is None else device.all_in_w or device.tdp_w
            figures = {field: entry.optional_number(field) for field in _PRICE_FIELDS}
            prices[name] = DevicePrices(name, **figures, power_w=power_w)
    return prices


def _device(entry: Entry) -> Hardware | UnsizedDevice:
    marketed = _scaled(entry, "memory_gb_marketed", 1e9)
    usable = _scaled(entry, "memory_gib", 2**30)
    # What the vendor prints is decimal and never more than what is there.
    usable = marketed if usable is None else usable
    bandwidth = _scaled(entry, "memory_gb_per_s", 1e9)
    if usable is None or bandwidth is None:
        missing = tuple(
            words for words, value in (("memory size", usable), ("memory bandwidth", bandwidth))
            if value is None
        )  # fmt: skip
        return UnsizedDevice(entry.name, missing, _whole(usable), _whole(marketed))
    return Hardware(
        name=entry.name,
        vendor=entry.text("vendor"),
        kind=DeviceKind(entry.text("kind")),
        generation=entry.text("generation"),
        memory_bytes=round(usable),
        memory_marketed_bytes=round(usable if marketed is None else marketed),
        memory_bytes_per_s=bandwidth,
        bf16_flop_per_s=_scaled(entry, "bf16_tflop_per_s", 1e12),
        fp8_flop_per_s=_scaled(entry, "fp8_tflop_per_s", 1e12),
        fp4_flop_per_s=_scaled(entry, "fp4_tflop_per_s", 1e12),
        scaleup_bytes_per_s=_scaled(entry, "scaleup_gb_per_s", 1e9),
        scaleup_device_count=entry.count("scaleup_device_count", 1),
        scaleout_bytes_per_s=_scaled(entry, "scaleout_gb_per_s", 1e9),
        host_link_bytes_per_s=_scaled(entry, "host_link_gb_per_s", 1e9),
        tdp_w=entry.optional_number("tdp_w"),
        all_in_w=entry.optional_number("all_in_w"),
        memory_reach_ratio=entry.optional_number("memory_reach_ratio"),
        sram=entry.flag("sram"),
        same_die_as=entry.optional_text("same_die_as"),
        int8_flop_per_s=_scaled(entry, "int8_tflop_per_s", 1e12),
    )


def _scaled(entry: Entry, field: str, unit: float) -> float | None:
    value = entry.optional_number(field)
    return None if value is None else value * unit


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _add_aliases(aliases: dict[str, str], entry: Entry) -> None:
    for alias in (entry.name, *entry.texts("aliases")):
        owner = aliases.setdefault(alias.lower(), entry.name)
        if owner != entry.name:
            raise ConfigError(f"the alias {alias!r} is given to both {owner} and {entry.name}; expected one owner")


def _unknown(kind: str, name: str, aliases: Mapping[str, str]) -> NoReturn:
    """Refuse an unknown name and offer the closest ones, however far they are."""
    close = get_close_matches(name.lower(), aliases, n=4 * _OFFERED_COUNT, cutoff=0.0)
    offered = list(dict.fromkeys(aliases[alias] for alias in close))[:_OFFERED_COUNT]
    known = len(set(aliases.values()))
    raise ConfigError(f"{kind} is {name!r}; the closest of the {known} known names: {', '.join(offered)}")
