"""What a device costs an hour: rented at a list price, or owned and written off, with power.

Owns: the kinds of prices, the arithmetic of ownership, and naming what is missing. Does not own: the figures
(`data/prices.yaml`, each with its source, and what a user's spec overrides) or purchase units (`purchase`). A price
that is not known is None together with the fields that would make it known: nothing is ever priced at zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.errors import ConfigError

# Hours of a year (365 days), as depreciation schedules and cloud price lists count them.
HOURS_PER_YEAR = 8760


class PriceKind(StrEnum):
    """How a device is paid for.

    ON_DEMAND, RESERVED (a three-year rental) and SPOT are what a provider charges; TCO_HYPERSCALER and TCO_NEOCLOUD are
    published estimates of an owner's own cost; OWNED is worked out from a purchase price, years and power.
    """

    ON_DEMAND = "on_demand"
    RESERVED = "reserved"
    SPOT = "spot"
    TCO_HYPERSCALER = "tco_hyperscaler"
    TCO_NEOCLOUD = "tco_neocloud"
    OWNED = "owned"


# What is taken when nobody says how the device is paid for: what anybody can buy first, spot last (it can be taken
# away, so a promise must not rest on it).
_PREFERENCE = (
    PriceKind.ON_DEMAND,
    PriceKind.RESERVED,
    PriceKind.TCO_NEOCLOUD,
    PriceKind.TCO_HYPERSCALER,
    PriceKind.OWNED,
    PriceKind.SPOT,
)

# Kinds that are read from a list.
_LISTED = tuple(kind for kind in PriceKind if kind is not PriceKind.OWNED)


@dataclass(frozen=True, slots=True)
class DevicePrices:
    """Prices of one device, USD an hour and device unless named otherwise. None: not known.

    `power_w` is what the device draws with its share of the host, for ownership.
    """

    name: str
    on_demand_usd_per_h: float | None = None
    reserved_usd_per_h: float | None = None
    spot_usd_per_h: float | None = None
    tco_hyperscaler_usd_per_h: float | None = None
    tco_neocloud_usd_per_h: float | None = None
    capex_usd: float | None = None
    power_w: float | None = None

    def __post_init__(self) -> None:
        _check_positive(f"price of {self.name}", self, (f"{kind}_usd_per_h" for kind in _LISTED))
        _check_positive(f"price of {self.name}", self, ("capex_usd", "power_w"))


@dataclass(frozen=True, slots=True)
class Ownership:
    """How an owned device is written off and fed. What is None comes from the catalogue or is missing.

    `utilisation_ratio` is the share of hours in which the device serves; hours it idles are paid by those. `pue` is the
    building's power over the devices'. `other_usd_per_h` is hosting, staff and network.
    """

    capex_usd: float | None = None
    years: float | None = None
    utilisation_ratio: float = 1.0
    power_w: float | None = None
    pue: float | None = None
    usd_per_kwh: float | None = None
    other_usd_per_h: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("ownership", self, ("capex_usd", "years", "utilisation_ratio", "power_w", "usd_per_kwh"))
        if self.utilisation_ratio > 1:
            raise ConfigError(f"ownership: utilisation_ratio is {self.utilisation_ratio}; expected at most 1")
        if self.pue is not None and not self.pue >= 1:
            raise ConfigError(f"ownership: pue is {self.pue}; expected 1 or more")
        if not self.other_usd_per_h >= 0:
            raise ConfigError(f"ownership: other_usd_per_h is {self.other_usd_per_h}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class Price:
    """An answer. `usd_per_h` None: not known, and `missing` names the figures that would make it known."""

    device: str
    kind: PriceKind
    usd_per_h: float | None
    missing: tuple[str, ...] = ()

    def known_usd_per_h(self) -> float:
        """The price. Raises ConfigError that names what is missing."""
        if self.usd_per_h is None:
            raise ConfigError(
                f"the {self.kind} price of {self.device} is not known; expected {' and '.join(self.missing)}"
            )
        return self.usd_per_h


def _check_positive(owner: str, values: object, fields: Iterable[str]) -> None:
    for field in fields:
        value: float | None = getattr(values, field)
        if value is not None and not value > 0:
            raise ConfigError(f"{owner}: {field} is {value}; expected above 0, or null when unknown")


def price(prices: DevicePrices, kind: PriceKind | None = None, ownership: Ownership | None = None) -> Price:
    """USD an hour of one device. Without a `kind`: the first that is known of on demand, reserved, TCO, owned, spot."""
    if kind is not None:
        return _priced(prices, kind, ownership)
    answers = [_priced(prices, one, ownership) for one in _PREFERENCE]
    unknown = Price(prices.name, PriceKind.ON_DEMAND, None, ("usd_per_h, or capex_usd with years and power",))
    return next((answer for answer in answers if answer.usd_per_h is not None), unknown)


def _priced(prices: DevicePrices, kind: PriceKind, ownership: Ownership | None) -> Price:
    if kind is PriceKind.OWNED:
        return _owned(prices, ownership or Ownership())
    field = f"{kind}_usd_per_h"
    listed: float | None = getattr(prices, field)
    return Price(prices.name, kind, listed, () if listed is not None else (field,))


def _owned(prices: DevicePrices, ownership: Ownership) -> Price:
    """(capex / (years * 8,760) / utilisation) + kW * PUE * USD/kWh + other."""
    capex = prices.capex_usd if ownership.capex_usd is None else ownership.capex_usd
    power_w = prices.power_w if ownership.power_w is None else ownership.power_w
    figures = {
        "capex_usd": capex,
        "years": ownership.years,
        "power_w": power_w,
        "pue": ownership.pue,
        "usd_per_kwh": ownership.usd_per_kwh,
    }
    missing = tuple(name for name, value in figures.items() if value is None)
    if capex is None or ownership.years is None or power_w is None:
        return Price(prices.name, PriceKind.OWNED, None, missing)
    if ownership.pue is None or ownership.usd_per_kwh is None:
        return Price(prices.name, PriceKind.OWNED, None, missing)
    write_off = capex / (ownership.years * HOURS_PER_YEAR * ownership.utilisation_ratio)
    power = power_w / 1000 * ownership.pue * ownership.usd_per_kwh
    return Price(prices.name, PriceKind.OWNED, write_off + power + ownership.other_usd_per_h)
