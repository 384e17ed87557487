"""What a set of devices costs and draws when it must be bought in whole units, and whether it may be bought at all.

Owns: rounding to purchase units, USD an hour, watts, racks and inventory, over arrays of device counts. Does not own:
which devices are wanted (`search`) or the prices (`price`). Rows are candidates and columns the fleet's offers, so that
thousands of candidates cost a few array operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ConfigError
from perfmodel.search.plan import Fleet

# Costs closer than this are one cost: sums of prices in another order differ in their last bits.
SAME_COST_RATIO = 1e-9

Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Bill:
    """Of n candidates: `units` int64[n, offers], `usd_per_h` float64[n], `in_stock` and `in_power` bool[n]."""

    units: Counts
    usd_per_h: NDArray[np.float64]
    in_stock: Flags
    in_power: Flags

    @property
    def allowed(self) -> Flags:
        """Whether the candidate may be bought."""
        return self.in_stock & self.in_power


class Purchasing:
    """Prices candidates of one fleet. Raises ConfigError when racks limit the power of a unit whose watts are
    unknown.
    """

    def __init__(self, fleet: Fleet) -> None:
        offers = fleet.offers
        self.names = tuple(offer.name for offer in offers)
        self._unit_devices = np.array([offer.unit.device_count for offer in offers], dtype=np.int64)
        self._unit_usd_per_h = np.array([offer.usd_per_h * offer.unit.device_count for offer in offers])
        self._stock_units = np.array([offer.inventory_count // offer.unit.device_count for offer in offers])
        self._unit_watts = [offer.unit.watts for offer in offers]
        self._rack_count = None if fleet.racks is None else fleet.racks.rack_count
        self._units_per_rack = np.ones(len(offers), dtype=np.int64)
        if fleet.racks is not None:
            for index, offer in enumerate(offers):
                if offer.unit.watts is None:
                    raise ConfigError(
                        f"accelerators.{offer.name}.unit.kw is missing; "
                        "expected the unit's power because racks.kw limits it"
                    )
                self._units_per_rack[index] = int(fleet.racks.watts // offer.unit.watts)

    def index(self, name: str) -> int:
        """Column of the offer of this name."""
        return self.names.index(name)

    def row(self, counts: Mapping[str, int]) -> Counts:
        """Device counts by name as one row."""
        return np.array([counts.get(name, 0) for name in self.names], dtype=np.int64)

    def stock_devices(self, name: str) -> int:
        """Devices of this offer that whole units of the inventory hold."""
        index = self.index(name)
        return int(self._stock_units[index] * self._unit_devices[index])

    def affordable_devices(self, name: str, usd_per_h: float) -> int:
        """Devices of this offer that this many USD an hour buy in whole units, whatever the inventory is."""
        index = self.index(name)
        units = math.floor(usd_per_h / float(self._unit_usd_per_h[index]) * (1 + SAME_COST_RATIO))
        return units * int(self._unit_devices[index])

    def bill(self, counts: Counts) -> Bill:
        """Price rows of device counts (int64[n, offers])."""
        units = -(-counts // self._unit_devices)
        in_stock: Flags = np.asarray((units <= self._stock_units).all(axis=1))
        in_power: Flags = np.asarray(self.power_ratio(units) <= 1)
        return Bill(units, units @ self._unit_usd_per_h, in_stock, in_power)

    def floor_usd_per_h(self, counts: Counts) -> NDArray[np.float64]:
        """What rows of device counts would cost if units could be split: no fleet that holds them costs less, and what
        several rows cost adds up.
        """
        return np.asarray(counts @ (self._unit_usd_per_h / self._unit_devices))

    def stock_ratio(self, units: Counts) -> NDArray[np.float64]:
        """Of rows of units: the largest share of an offer's stock that they take (above 1: more than there is)."""
        stock = np.maximum(self._stock_units, 0)
        taken = np.where(units > 0, units / np.maximum(stock, 1e-9), 0.0)
        return np.asarray(np.where((units > 0) & (stock == 0), np.inf, taken).max(axis=1, initial=0.0))

    def power_ratio(self, units: Counts) -> NDArray[np.float64]:
        """Of rows of units: racks that they need over racks there are; infinite for a unit that no rack can feed."""
        if self._rack_count is None:
            return np.zeros(len(units))
        fed = ((units == 0) | (self._units_per_rack > 0)).all(axis=1)
        racks = -(-units // np.maximum(self._units_per_rack, 1))
        return np.where(fed, racks.sum(axis=1) / self._rack_count, np.inf)

    def shortage_words(self, units: Counts) -> str:
        """What one row of units lacks: devices that are not there, else racks."""
        wanted = self.devices(units)
        short = [
            f"needs {count} {name}, there {'is' if self.stock_devices(name) == 1 else 'are'} {self.stock_devices(name)}"
            for name, count in wanted.items()
            if count > self.stock_devices(name)
        ]
        if short:
            return "; ".join(short)
        bought = ", ".join(f"{count} {name}" for name, count in wanted.items())
        ratio = float(self.power_ratio(units[None, :])[0])
        if not np.isfinite(ratio):
            return f"a unit of {bought} draws more than a rack gives"
        racks = self._rack_count or 0
        return f"{bought} need {round(ratio * racks)} racks, there {'is' if racks == 1 else 'are'} {racks}"

    def watts(self, units: Counts) -> float | None:
        """Watts of one row of units; None when a unit's power is not known."""
        total = 0.0
        for count, each in zip(units.tolist(), self._unit_watts, strict=True):
            if not count:
                continue
            if each is None:
                return None
            total += count * each
        return total

    def devices(self, units: Counts) -> dict[str, int]:
        """Devices that one row of units holds, by name, without zeros."""
        pairs = zip(self.names, (units * self._unit_devices).tolist(), strict=True)
        return {name: int(count) for name, count in pairs if count}
