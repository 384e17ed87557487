"""Which price each device of a question is given: one kind for all of them, unless the asker says otherwise.

Owns: the choice of that kind, the refusal when no kind is known of all devices, and how prices are told in tables and
JSON. Does not own: the figures (`catalog`) or the kinds (`price`). Prices of different kinds are never mixed unasked,
because a reserved card beside one on demand looks cheaper than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.adapters.catalog import Catalog
from perfmodel.errors import ConfigError
from perfmodel.price import PriceKind

# Kinds that are taken unasked, in this order: what can be rented, and what anybody can have first.
RENTED = (PriceKind.ON_DEMAND, PriceKind.RESERVED, PriceKind.SPOT)

# What stands for the kind of a price that the asker gave as a figure.
SPEC_KIND = "spec"


@dataclass(frozen=True, slots=True)
class OfferPrice:
    """What one device is taken to cost: `kind` is a `PriceKind` or `SPEC_KIND`; both None when no price is known."""

    name: str
    kind: str | None
    usd_per_h: float | None


def shared_kind(catalog: Catalog, names: Sequence[str], kinds: Sequence[PriceKind] = RENTED) -> PriceKind | None:
    """The first of the kinds that is known of every device; None for no device. Raises ConfigError that says who lacks
    which.
    """
    lacking: list[str] = []
    for kind in kinds if names else ():
        without = [name for name in names if catalog.price(name, kind).usd_per_h is None]
        if not without:
            return kind
        lacking.append(f"no {kind} price of {' and '.join(without)}")
    if not names:
        return None
    raise ConfigError(
        f"the catalogue has no kind of price for all of {', '.join(names)} ({'; '.join(lacking)}); "
        "expected price or usd_per_h of each in the spec, because kinds are not mixed unasked"
    )


def is_rented(catalog: Catalog, name: str) -> bool:
    """Whether the catalogue has any of the rented kinds for the device."""
    return any(catalog.price(name, kind).usd_per_h is not None for kind in RENTED)


def priced_alike(catalog: Catalog, names: Sequence[str]) -> tuple[OfferPrice, ...]:
    """All devices at one kind of price; those that have none of any kind stay unknown. Raises ConfigError as
    `shared_kind`.
    """
    kind = shared_kind(catalog, [name for name in names if is_rented(catalog, name)])
    found = []
    for name in names:
        usd = None if kind is None else catalog.price(name, kind).usd_per_h
        found.append(OfferPrice(name, None if usd is None else str(kind), usd))
    return tuple(found)


def price_words(prices: Sequence[OfferPrice]) -> str:
    """One line: the kind once where all have the same, and the USD an hour of each device."""
    known = [each for each in prices if each.usd_per_h is not None]
    unknown = [each.name for each in prices if each.usd_per_h is None]
    rest = f"; not known of {', '.join(unknown)}" if unknown else ""
    kinds = {each.kind for each in known}
    if not known:
        return "no price is known"
    if len(kinds) == 1:
        figures = ", ".join(f"{each.name} {each.usd_per_h:.2f}" for each in known)
        return f"{_kind_words(known[0].kind)}, USD/h of a device: {figures}{rest}"
    figures = ", ".join(f"{each.name} {each.usd_per_h:.2f} ({_kind_words(each.kind)})" for each in known)
    return f"prices of different kinds, USD/h of a device: {figures}{rest}"


def unknown_words(prices: Sequence[OfferPrice]) -> str | None:
    """A sentence that names the devices without a price; None when all have one."""
    names = [each.name for each in prices if each.usd_per_h is None]
    if not names:
        return None
    return f"No price is known of {', '.join(names)}: give usd_per_h in a spec (--spec) to have USD/Mtok."


def prices_json(prices: Sequence[OfferPrice]) -> dict[str, object]:
    """By device: kind and USD an hour; null where unknown."""
    return {each.name: {"kind": each.kind, "usd_per_h": each.usd_per_h} for each in prices}


def _kind_words(kind: str | None) -> str:
    return "the spec's own price" if kind == SPEC_KIND else f"{kind} price"
