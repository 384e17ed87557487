"""Amounts of money as whole numbers of picodollars, and the one place where they are rounded.

Owns: `Money`, its decimal text without floats, and the rounding of an invoice (once per line, half to even, with an
explicit rounding line). Does not own: prices (`pricing`), accounts (`ledger`), or how many digits a currency has: the
exponent is an argument, read from CLDR by `billing.adapters.currencies`.

A price is micro-USD per 1,000,000 tokens, so tokens x price is exact in units of 10^-12 of the currency. The name
"picodollar" is kept for other currencies too: 10^-12 of one unit of the currency that stands beside the amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from billing.errors import MoneyError

# Picodollars in one dollar: micro (10^6) x tokens of the price's unit (10^6).
PICO_PER_UNIT = 10**12
# Digits after the point of an exact amount.
PICO_DIGITS = 12
# NUMERIC(38,0) of the ledger holds this many digits.
MAX_DIGITS = 38
# ISO 4217 codes have three letters.
_CODE_LENGTH = 3


@dataclass(frozen=True, slots=True)
class Money:
    """An exact amount: `amount_pico` picodollars of `currency` (ISO 4217, upper case)."""

    amount_pico: int
    currency: str

    def __post_init__(self) -> None:
        if not isinstance(self.amount_pico, int) or isinstance(self.amount_pico, bool):
            raise MoneyError(f"amount_pico is of type {type(self.amount_pico).__name__}; a whole number was expected.")
        if abs(self.amount_pico) >= 10**MAX_DIGITS:
            raise MoneyError(f"amount_pico has more than {MAX_DIGITS} digits.")
        check_currency(self.currency)

    def __add__(self, other: Money) -> Money:
        """The sum. Raises MoneyError when the currencies differ."""
        self._same_currency(other)
        return Money(self.amount_pico + other.amount_pico, self.currency)

    def __sub__(self, other: Money) -> Money:
        """The difference. Raises MoneyError when the currencies differ."""
        self._same_currency(other)
        return Money(self.amount_pico - other.amount_pico, self.currency)

    def __neg__(self) -> Money:
        return Money(-self.amount_pico, self.currency)

    def __str__(self) -> str:
        return f"{decimal_text(self.amount_pico)} {self.currency}"

    def _same_currency(self, other: Money) -> None:
        if self.currency != other.currency:
            raise MoneyError(f"{self.currency} and {other.currency} cannot be added.")


def check_currency(code: str) -> str:
    """The code when it looks like ISO 4217. Raises MoneyError."""
    if len(code) != _CODE_LENGTH or not code.isascii() or not code.isalpha() or code != code.upper():
        raise MoneyError(f"The currency is {code!r}; three upper-case letters (ISO 4217) were expected.")
    return code


def decimal_text(amount_pico: int) -> str:
    """The exact amount in whole units as decimal text: no exponent, no trailing zeros ("0.0000125", "-3", "0")."""
    sign = "-" if amount_pico < 0 else ""
    units, rest = divmod(abs(amount_pico), PICO_PER_UNIT)
    fraction = f"{rest:0{PICO_DIGITS}d}".rstrip("0")
    return f"{sign}{units}.{fraction}" if fraction else f"{sign}{units}"


def pico_of(text: str) -> int:
    """The exact amount of a decimal text in whole units; the inverse of `decimal_text`.

    Raises MoneyError for anything else than digits with at most 12 after the point.
    """
    body = text.removeprefix("-")
    units, point, fraction = body.partition(".")
    well_formed = units.isascii() and units.isdigit() and len(fraction) <= PICO_DIGITS
    if point:
        well_formed = well_formed and fraction.isascii() and fraction.isdigit()
    if not well_formed:
        raise MoneyError(f"The amount is {text!r}; digits with at most {PICO_DIGITS} after the point were expected.")
    amount = int(units) * PICO_PER_UNIT + int(fraction.ljust(PICO_DIGITS, "0"))
    return -amount if text.startswith("-") else amount


def round_half_even(amount_pico: int, exponent: int) -> int:
    """The amount in minor units (10^-exponent of a unit), half to even: what a banker's rule gives, without floats.

    `exponent` is the number of digits that the currency is paid in: USD 2, JPY 0, KWD 3.
    """
    step = _pico_per_minor(exponent)
    quotient, rest = divmod(amount_pico, step)
    if 2 * rest > step or (2 * rest == step and quotient % 2 == 1):
        return quotient + 1
    return quotient


def minor_text(amount_minor: int, exponent: int) -> str:
    """An amount of minor units as decimal text with exactly `exponent` digits after the point."""
    if exponent == 0:
        return str(amount_minor)
    sign = "-" if amount_minor < 0 else ""
    units, rest = divmod(abs(amount_minor), 10**exponent)
    return f"{sign}{units}.{rest:0{exponent}d}"


@dataclass(frozen=True, slots=True)
class RoundedLines:
    """An invoice's amounts in minor units. `lines_minor` + `rounding_minor` = `total_minor`, always."""

    lines_minor: tuple[int, ...]
    rounding_minor: int
    """The explicit rounding line: what makes the rounded lines add up to the rounded total."""
    total_minor: int
    residue_pico: int
    """Rounded total minus exact total, in picodollars, at most half a minor unit: what the account `rounding` takes."""


def round_lines(amounts_pico: Sequence[int], exponent: int) -> RoundedLines:
    """Round each line once, half to even, and the exact total once; their difference becomes the rounding line."""
    lines = tuple(round_half_even(amount, exponent) for amount in amounts_pico)
    exact = sum(amounts_pico)
    total = round_half_even(exact, exponent)
    return RoundedLines(lines, total - sum(lines), total, total * _pico_per_minor(exponent) - exact)


def _pico_per_minor(exponent: int) -> int:
    if not 0 <= exponent <= PICO_DIGITS:
        raise MoneyError(f"The currency's exponent is {exponent}; 0 to {PICO_DIGITS} was expected.")
    return int(10 ** (PICO_DIGITS - exponent))
