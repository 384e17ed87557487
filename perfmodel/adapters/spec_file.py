"""Reads the YAML file of `perf size` and `perf pareto` into the values of `plan`.

Owns: the file's keys, their units and defaults, and one sentence for everything that is wrong in it, the path of the
field first. Does not own: what the values mean (`plan`) or the facts of devices and models (`catalog`). An unknown key
is refused with the closest known one, because a mistyped limit that is ignored buys the wrong fleet.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from perfmodel.adapters.catalog import Catalog
from perfmodel.adapters.offer_prices import SPEC_KIND, OfferPrice, is_rented, shared_kind
from perfmodel.adapters.yaml_text import read_yaml
from perfmodel.errors import ConfigError
from perfmodel.hardware import Hardware, NumberFormat
from perfmodel.price import Ownership, PriceKind
from perfmodel.search.plan import (
    Choices,
    Demand,
    DemandLevel,
    Fleet,
    Offer,
    PurchaseUnit,
    RackLimit,
    Slo,
    SpareRule,
    Topology,
    TrafficClass,
)
from perfmodel.serving import LengthLaw

_Word = TypeVar("_Word", bound=StrEnum)
_Item = TypeVar("_Item")

# How fast weights reach a device's memory when a replica starts, where the spec does not say: one PCIe 4.0 x4 NVMe
# drive, the slowest part of a usual start from local disk.
_WEIGHT_LOAD_BYTES_PER_S = 7e9

# Seconds from "weights are loaded" to "ready" (graph capture, warm-up) where the spec does not say: an assumption, said
# in the answer.
_WARM_UP_S = 60.0

# More devices, replicas or tokens than a site has.
_MOST_COUNT = 1_000_000
# No quantity of a spec is outside of these: what is beyond would overflow somewhere, and end as another field's fault.
_LEAST, _MOST = 1e-9, 1e15
# How a value that is no scalar is shown.
_SHORT = reprlib.Repr()

# Fields at the top of a spec, of a load and of its choices (docs/size-spec.md).
_FIELDS = (
    "model", "load", "slo", "classes", "periods", "accelerators", "racks", "spare", "choices", "engine", "era",
    "weight_load_gb_per_s", "warm_up_s",
)  # fmt: skip
_LOAD_FIELDS = (
    "rate_p50_per_s", "rate_p90_per_s", "input_tokens", "output_tokens", "lengths", "cached_ratio", "burstiness_cv2",
)  # fmt: skip
_CHOICE_FIELDS = (
    "topologies", "weight_formats", "kv_formats", "tensor_parallel", "pipeline_parallel", "attention_data_parallel",
    "expert_parallel", "chunk_tokens", "max_sequences",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Period:
    """A part of the day: its name, hours a day, and each class with the rates it has then."""

    name: str
    hours: float
    classes: tuple[TrafficClass, ...]


@dataclass(frozen=True, slots=True)
class SizeSpec:
    """All that a spec file says. `periods` is never empty; without day and night it holds one of 24 hours."""

    fleet: Fleet
    choices: Choices
    periods: tuple[Period, ...]
    engine: str
    era: str | None
    weight_load_bytes_per_s: float
    warm_up_s: float
    prices: tuple[OfferPrice, ...] = ()


def read_spec(path: Path, catalog: Catalog) -> SizeSpec:
    """The spec in this file. Raises ConfigError for a bad field and OSError for a file that cannot be read."""
    root = Section("", read_yaml(path))
    root.only(*_FIELDS)
    classes = _classes(root, catalog)
    offers, prices = _offers(root, catalog)
    fleet = Fleet(offers, _racks(root), _spare(root))
    spec = SizeSpec(
        fleet=fleet,
        choices=_choices(root),
        periods=_periods(root, classes),
        engine=root.text("engine", "vllm"),
        era=root.text("era", "") if root.has("era") else None,
        weight_load_bytes_per_s=root.number("weight_load_gb_per_s", _WEIGHT_LOAD_BYTES_PER_S / 1e9, above=0) * 1e9,
        warm_up_s=root.number("warm_up_s", _WARM_UP_S, least=0),
        prices=prices,
    )
    return spec


class Section:
    """One mapping of the file. `only` comes first: a mistyped field is told as such, not as one that is missing."""

    def __init__(self, path: str, content: object) -> None:
        if not isinstance(content, dict):
            raise ConfigError(f"{path or 'the spec'} is {_shown(content)}; expected a mapping")
        self.path = path
        self._content: dict[object, object] = content

    def at(self, key: str) -> str:
        """The path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the key is there with a value."""
        return self._content.get(key) is not None

    def raw(self, key: str) -> object:
        """The value as YAML gave it; None where it is missing."""
        return self._content.get(key)

    def section(self, key: str) -> Section:
        """A mapping that must be there."""
        if not self.has(key):
            raise ConfigError(f"{self.at(key)} is missing; expected a mapping")
        return Section(self.at(key), self.raw(key))

    def names(self) -> list[str]:
        """Keys, for a mapping whose keys are names."""
        return [str(key) for key in self._content]

    def number(
        self, key: str, default: float | None = None, *, above: float | None = None, least: float | None = None
    ) -> float:
        """A number; without a default it must be there."""
        value = self.raw(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.at(key)} is missing; expected a number")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.at(key)} is {_shown(value)}; expected a number")
        if value and not _LEAST <= abs(value) <= _MOST:
            raise ConfigError(f"{self.at(key)} is {_shown(value)}; expected 0, or {_LEAST:g} to {_MOST:g}")
        number = float(value)
        if above is not None and not above < number < float("inf"):
            raise ConfigError(f"{self.at(key)} is {value}; expected a number above {above:g}")
        if least is not None and not least <= number < float("inf"):
            raise ConfigError(f"{self.at(key)} is {value}; expected a number of at least {least:g}")
        return number

    def whole(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number."""
        number = self.number(key, None if default is None else float(default), least=least)
        if number > _MOST_COUNT:
            raise ConfigError(f"{self.at(key)} is {number:g}; expected at most {_MOST_COUNT:,}")
        if number != int(number):
            raise ConfigError(f"{self.at(key)} is {number}; expected a whole number")
        return int(number)

    def text(self, key: str, default: str | None = None) -> str:
        """A word."""
        value = self.raw(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.at(key)} is missing; expected a name")
            return default
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.at(key)} is {_shown(value)}; expected a name")
        return value

    def word(self, key: str, kind: type[_Word], default: _Word) -> _Word:
        """One of a closed vocabulary."""
        return one_of(self.at(key), self.text(key, default.value), kind)

    def listed(self, key: str, default: tuple[_Item, ...], read: Callable[[str, object], _Item]) -> tuple[_Item, ...]:
        """A list whose items `read` turns into values, without repeats."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{self.at(key)} is {_shown(value)}; expected a list of at least one")
        return tuple(dict.fromkeys(read(f"{self.at(key)}[{index}]", item) for index, item in enumerate(value)))

    def only(self, *fields: str) -> None:
        """Raises ConfigError for a key that is none of these fields."""
        for key in self._content:
            if str(key) not in fields:
                near = difflib.get_close_matches(str(key), fields, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(fields))}"
                raise ConfigError(f"{self.at(str(key))} is no field of a spec{hint}")


def one_of(path: str, word: object, kind: type[_Word]) -> _Word:
    """The member of a closed vocabulary that this word names. Raises ConfigError that lists them."""
    for member in kind:
        if member.value == word:
            return member
    raise ConfigError(f"{path} is {_shown(word)}; expected one of {', '.join(member.value for member in kind)}")


def _shown(value: object) -> str:
    # A list may hold a list ten levels deep, nine times each (aliases): never spelled out.
    text = repr(value) if isinstance(value, str | float | bool | None) else _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _count(path: str, item: object) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or item < 1:
        raise ConfigError(f"{path} is {_shown(item)}; expected a whole number of at least 1")
    return item


def _format(path: str, item: object) -> NumberFormat:
    if not isinstance(item, str):
        raise ConfigError(f"{path} is {_shown(item)}; expected a number format")
    try:
        return NumberFormat.parse(item)
    except ConfigError as fault:
        raise ConfigError(f"{path}: {fault}") from None


def read_demand(section: Section, fallback: Demand | None = None) -> Demand:
    """The load of a class. `rate_p90_per_s` is the P50 rate where it is missing: a load that does not vary."""
    if section.has("share_ratio"):
        if fallback is None:
            raise ConfigError(f"{section.at('share_ratio')} needs a load at the top of the spec to be a share of")
        section.only("share_ratio")
        share = section.number("share_ratio", above=0)
        return replace(
            fallback,
            rate_p50_per_s=fallback.rate_p50_per_s * share,
            rate_p90_per_s=fallback.rate_p90_per_s * share,
        )
    section.only(*_LOAD_FIELDS, *(("share_ratio",) if fallback is not None else ()))
    with _where(section.path, "load."):
        p50 = section.number("rate_p50_per_s")
        demand = Demand(
            rate_p50_per_s=p50,
            rate_p90_per_s=section.number("rate_p90_per_s", p50),
            input_tokens=section.number("input_tokens"),
            output_tokens=section.number("output_tokens"),
            law=section.word("lengths", LengthLaw, LengthLaw.LOGNORMAL),
            cached_ratio=section.number("cached_ratio", 0.0),
            burstiness_cv2_ratio=section.number("burstiness_cv2", 1.0),
        )
    return demand


def read_slo(section: Section) -> Slo:
    """The promise of a class; `percentile` is in per cent."""
    section.only("ttft_ms", "tpot_ms", "percentile", "goodput_ratio")
    with _where(section.path, "slo."):
        percentile_ratio = section.number("percentile", 90.0) / 100
        slo = Slo(
            ttft_ms=section.number("ttft_ms"),
            tpot_ms=section.number("tpot_ms"),
            percentile_ratio=percentile_ratio,
            goodput_ratio=section.number("goodput_ratio", percentile_ratio),
        )
    return slo


@contextmanager
def _where(path: str, owner: str) -> Iterator[None]:
    """Put the section's path in the place of the owner that a value's own check names (`slo.`, `ownership: `)."""
    try:
        yield
    except ConfigError as fault:
        said = str(fault)
        if not said.startswith(owner):
            raise
        raise ConfigError(f"{path}.{said[len(owner) :]}") from None


def _classes(root: Section, catalog: Catalog) -> tuple[TrafficClass, ...]:
    model = root.text("model", "") or None
    demand = read_demand(root.section("load")) if root.has("load") else None
    slo = read_slo(root.section("slo")) if root.has("slo") else None
    entries = root.raw("classes")
    if entries is None:
        for field, value in (("model", model), ("load", demand), ("slo", slo)):
            if value is None:
                raise ConfigError(f"{field} is missing; expected it at the top of the spec, or in each of classes")
        assert model is not None and demand is not None and slo is not None
        return (TrafficClass("all", _model_name(catalog, "model", model), demand, slo),)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"classes is {_shown(entries)}; expected a list of at least one class")
    classes = []
    for index, entry in enumerate(entries):
        section = Section(f"classes[{index}]", entry)
        section.only("name", "model", "load", "slo")
        name = section.text("name")
        own_model = section.text("model", model or "")
        if not own_model:
            raise ConfigError(f"{section.at('model')} is missing; expected a model of the catalogue")
        own_demand = read_demand(section.section("load"), demand) if section.has("load") else demand
        own_slo = read_slo(section.section("slo")) if section.has("slo") else slo
        if own_demand is None or own_slo is None:
            raise ConfigError(f"{section.at('load' if own_demand is None else 'slo')} is missing; expected a mapping")
        classes.append(TrafficClass(name, _model_name(catalog, section.at("model"), own_model), own_demand, own_slo))
    names = [each.name for each in classes]
    if len(set(names)) < len(names):
        raise ConfigError(f"classes names {max(names, key=names.count)!r} twice; expected each class once")
    return tuple(classes)


def _model_name(catalog: Catalog, path: str, name: str) -> str:
    try:
        catalog.model(name)
    except ConfigError as fault:
        raise ConfigError(f"{path}: {fault}" if path != "model" else str(fault)) from None
    return name


def _periods(root: Section, classes: tuple[TrafficClass, ...]) -> tuple[Period, ...]:
    if not root.has("periods"):
        return (Period("all_day", 24.0, classes),)
    section = root.section("periods")
    periods = []
    for name in section.names():
        own = section.section(name)
        own.only("hours", "load_ratio", "classes")
        hours = own.number("hours", above=0)
        ratio = own.number("load_ratio", 1.0, above=0)
        ratios = _class_ratios(own, classes)
        periods.append(
            Period(name, hours, tuple(_scaled(each, ratios.get(each.name, ratio)) for each in classes)),
        )
    total = sum(period.hours for period in periods)
    if abs(total - 24) > 1e-6:
        raise ConfigError(f"periods have {total:g} hours together; expected 24")
    return tuple(periods)


def _class_ratios(section: Section, classes: tuple[TrafficClass, ...]) -> dict[str, float]:
    if not section.has("classes"):
        return {}
    own = section.section("classes")
    for name in own.names():
        if name not in {each.name for each in classes}:
            raise ConfigError(f"{own.at(name)} is no class; expected one of {', '.join(c.name for c in classes)}")
    return {name: own.number(name, above=0) for name in own.names()}


def _scaled(each: TrafficClass, ratio: float) -> TrafficClass:
    demand = each.demand
    return replace(
        each,
        demand=replace(
            demand, rate_p50_per_s=demand.rate_p50_per_s * ratio, rate_p90_per_s=demand.rate_p90_per_s * ratio
        ),
    )


def _offers(root: Section, catalog: Catalog) -> tuple[tuple[Offer, ...], tuple[OfferPrice, ...]]:
    section = root.section("accelerators")
    owns = {name: section.section(name) for name in section.names()}
    for own in owns.values():
        own.only("inventory", "usd_per_h", "price", "owned", "unit", "network_gb_per_s")
    kind = _kind_for_the_others(owns, catalog)
    offers, prices = [], []
    for name, own in owns.items():
        hardware = catalog.device(name)
        price = _price(own, hardware, catalog, kind)
        offers.append(_offer(own, hardware, price.usd_per_h or 0.0))
        prices.append(price)
    return tuple(offers), tuple(prices)


def _kind_for_the_others(owns: Mapping[str, Section], catalog: Catalog) -> PriceKind | None:
    """The kind of price of devices that say none: what the others say, if that is one kind, else what all of them have.

    None: each says its own, or one of them has no price at all, which its own check then says.
    """
    silent = [
        catalog.device(name).name
        for name, own in owns.items()
        if not (own.has("usd_per_h") or own.has("price") or own.has("owned"))
    ]
    if not all(is_rented(catalog, name) for name in silent):
        return None
    said = {
        one_of(own.at("price"), own.raw("price"), PriceKind)
        for own in owns.values()
        if own.has("price") and not own.has("usd_per_h")
    }
    return shared_kind(catalog, silent, tuple(said)) if len(said) == 1 else shared_kind(catalog, silent)


def _offer(section: Section, hardware: Hardware, usd_per_h: float) -> Offer:
    unit = PurchaseUnit()
    if section.has("unit"):
        own = section.section("unit")
        own.only("devices", "name", "kw")
        devices = own.whole("devices", 1, least=1)
        watts = own.number("kw", above=0) * 1000 if own.has("kw") else _unit_watts(hardware, devices)
        unit = PurchaseUnit(own.text("name", "device" if devices == 1 else "node"), devices, watts)
    else:
        unit = PurchaseUnit(watts=_unit_watts(hardware, 1))
    network = hardware.scaleout_bytes_per_s
    if section.has("network_gb_per_s"):
        network = section.number("network_gb_per_s", above=0) * 1e9
    return Offer(
        hardware=hardware,
        usd_per_h=usd_per_h,
        inventory_count=section.whole("inventory", least=0),
        unit=unit,
        scaleout_bytes_per_s=network,
    )


def _unit_watts(hardware: Hardware, devices: int) -> float | None:
    return None if hardware.all_in_w is None else hardware.all_in_w * devices


def _price(section: Section, hardware: Hardware, catalog: Catalog, shared: PriceKind | None) -> OfferPrice:
    """The spec's own price, else the catalogue's of the kind that `price` names (or of the kind that all share)."""
    if section.has("usd_per_h"):
        return OfferPrice(hardware.name, SPEC_KIND, section.number("usd_per_h", above=0))
    kind = None if section.has("owned") else shared
    if section.has("price"):
        kind = one_of(section.at("price"), section.raw("price"), PriceKind)
    ownership = _ownership(section) if section.has("owned") else None
    if ownership is not None and kind is None:
        kind = PriceKind.OWNED
    found = catalog.price(hardware.name, kind, ownership)
    if found.usd_per_h is None:
        where = f"{section.at('owned')} with " if found.kind is PriceKind.OWNED else ""
        raise ConfigError(
            f"{section.at('usd_per_h')} is missing and the catalogue has no {found.kind} price of {hardware.name}; "
            f"expected USD per device and hour there, or {where}{' and '.join(found.missing)}"
        )
    return OfferPrice(hardware.name, str(found.kind), found.usd_per_h)


def _ownership(section: Section) -> Ownership:
    """How an owned device is written off: `owned: {capex_usd, years, utilisation_ratio, watts, pue, usd_per_kwh}`."""
    own = section.section("owned")
    own.only("capex_usd", "years", "utilisation_ratio", "watts", "pue", "usd_per_kwh", "other_usd_per_h")

    def known(key: str) -> float | None:
        return own.number(key, above=0) if own.has(key) else None

    with _where(own.path, "ownership: "):
        ownership = Ownership(
            capex_usd=known("capex_usd"),
            years=known("years"),
            utilisation_ratio=own.number("utilisation_ratio", 1.0),
            power_w=known("watts"),
            pue=known("pue"),
            usd_per_kwh=known("usd_per_kwh"),
            other_usd_per_h=own.number("other_usd_per_h", 0.0),
        )
    return ownership


def _racks(root: Section) -> RackLimit | None:
    if not root.has("racks"):
        return None
    section = root.section("racks")
    section.only("count", "kw")
    limit = RackLimit(section.whole("count", least=1), section.number("kw", above=0) * 1000)
    return limit


def _spare(root: Section) -> SpareRule:
    if not root.has("spare"):
        return SpareRule()
    section = root.section("spare")
    section.only("replicas", "zones", "zone_load", "rolling", "rolling_load")
    rule = SpareRule(
        replica_count=section.whole("replicas", 0),
        zone_count=section.whole("zones", 1, least=1),
        zone_demand=section.word("zone_load", DemandLevel, DemandLevel.P50),
        rolling_count=section.whole("rolling", 0),
        rolling_demand=section.word("rolling_load", DemandLevel, DemandLevel.P50),
    )
    return rule


def _topology(path: str, item: object) -> Topology:
    return one_of(path, item, Topology)


def _choices(root: Section) -> Choices:
    default = Choices()
    if not root.has("choices"):
        return default
    section = root.section("choices")
    section.only(*_CHOICE_FIELDS)
    expert_parallel = section.raw("expert_parallel")
    if expert_parallel is None:
        expert_parallel = default.expert_parallel
    if not isinstance(expert_parallel, bool):
        raise ConfigError(f"{section.at('expert_parallel')} is {_shown(expert_parallel)}; expected true or false")
    choices = Choices(
        topologies=section.listed("topologies", default.topologies, _topology),
        weight_formats=section.listed("weight_formats", default.weight_formats, _format),
        kv_formats=section.listed("kv_formats", default.kv_formats, _format),
        tensor_parallel_count=section.listed("tensor_parallel", default.tensor_parallel_count, _count),
        pipeline_parallel_count=section.listed("pipeline_parallel", default.pipeline_parallel_count, _count),
        attention_data_parallel_count=section.listed(
            "attention_data_parallel", default.attention_data_parallel_count, _count
        ),
        expert_parallel=expert_parallel,
        chunk_tokens=section.listed("chunk_tokens", default.chunk_tokens, _count),
        max_sequence_count=section.whole("max_sequences", default.max_sequence_count, least=1),
    )
    return choices
