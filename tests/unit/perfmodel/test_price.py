"""Prices: lists, ownership, and that what is not known is named and never zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfmodel.errors import ConfigError
from perfmodel.price import DevicePrices, Ownership, PriceKind, price

LISTED = DevicePrices("X", reserved_usd_per_h=2.0, tco_neocloud_usd_per_h=1.5, capex_usd=35_040, power_w=1000)
TERMS = Ownership(years=4, utilisation_ratio=0.5, pue=1.25, usd_per_kwh=0.08)


def test_a_kind_is_read_from_its_list() -> None:
    assert price(LISTED, PriceKind.RESERVED).usd_per_h == 2.0
    assert price(LISTED, PriceKind.TCO_NEOCLOUD).known_usd_per_h() == 1.5
    spot = price(LISTED, PriceKind.SPOT)
    assert (spot.usd_per_h, spot.missing) == (None, ("spot_usd_per_h",))
    with pytest.raises(ConfigError, match="the spot price of X is not known; expected spot_usd_per_h"):
        spot.known_usd_per_h()


def test_without_a_kind_the_first_known_one_is_taken() -> None:
    assert price(LISTED).kind is PriceKind.RESERVED
    assert price(replace(LISTED, on_demand_usd_per_h=3.0)).usd_per_h == 3.0
    assert price(DevicePrices("X", spot_usd_per_h=0.5)).kind is PriceKind.SPOT
    owned = price(DevicePrices("X", capex_usd=35_040, power_w=1000, spot_usd_per_h=0.5), ownership=TERMS)
    assert owned.kind is PriceKind.OWNED
    nothing = price(DevicePrices("X"))
    assert nothing.usd_per_h is None
    with pytest.raises(ConfigError, match="price of X is not known; expected usd_per_h, or capex_usd"):
        nothing.known_usd_per_h()


def test_ownership_writes_off_and_feeds() -> None:
    # 35,040 USD over 4 years of 8,760 h is 1 USD/h, half used: 2; 1 kW at PUE 1.25 and 0.08 USD/kWh: 0.1.
    owned = price(LISTED, PriceKind.OWNED, TERMS)
    assert owned.usd_per_h == pytest.approx(2.1)
    assert price(LISTED, PriceKind.OWNED, replace(TERMS, capex_usd=70_080)).usd_per_h == pytest.approx(4.1)
    assert price(LISTED, PriceKind.OWNED, replace(TERMS, power_w=2000)).usd_per_h == pytest.approx(2.2)
    assert price(LISTED, PriceKind.OWNED, replace(TERMS, other_usd_per_h=0.4)).usd_per_h == pytest.approx(2.5)


@pytest.mark.parametrize("field", ["years", "pue", "usd_per_kwh"])
def test_ownership_names_what_is_missing(field: str) -> None:
    unknown: dict[str, Any] = {field: None}
    assert price(LISTED, PriceKind.OWNED, replace(TERMS, **unknown)).missing == (field,)
    bare = DevicePrices("X")
    assert price(bare, PriceKind.OWNED).missing == ("capex_usd", "years", "power_w", "pue", "usd_per_kwh")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("years", 0, "years is 0; expected above 0"),
        ("utilisation_ratio", 1.5, "utilisation_ratio is 1.5; expected at most 1"),
        ("utilisation_ratio", 0, "utilisation_ratio is 0"),
        ("pue", 0.9, "pue is 0.9; expected 1 or more"),
        ("usd_per_kwh", -1, "usd_per_kwh is -1"),
        ("other_usd_per_h", -1, "other_usd_per_h is -1"),
    ],
)
def test_impossible_terms_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TERMS, **{field: value})
    with pytest.raises(ConfigError, match="price of X: spot_usd_per_h is 0; expected above 0"):
        DevicePrices("X", spot_usd_per_h=0)
