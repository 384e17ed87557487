"""Money: whole picodollars, exact text, one rounding."""

from __future__ import annotations

from typing import Any

import pytest

from billing.adapters.currencies import currency_exponent
from billing.errors import MoneyError
from billing.money import Money, decimal_text, minor_text, pico_of, round_half_even, round_lines

CENT = 10**10


def test_amounts_of_one_currency_add_and_subtract() -> None:
    assert Money(5, "USD") + Money(-7, "USD") == Money(-2, "USD") == -(Money(2, "USD"))
    assert Money(5, "USD") - Money(7, "USD") == Money(-2, "USD")
    assert str(Money(12_500_000, "USD")) == "0.0000125 USD"


def test_currencies_do_not_mix() -> None:
    with pytest.raises(MoneyError, match="USD and EUR cannot be added"):
        Money(1, "USD") + Money(1, "EUR")


@pytest.mark.parametrize("amount", [1.0, "1", None, True, 10**38])
def test_only_a_whole_number_of_at_most_38_digits_is_money(amount: Any) -> None:
    with pytest.raises(MoneyError):
        Money(amount, "USD")


@pytest.mark.parametrize("code", ["usd", "US", "DOLLARS", "U$D", "ÄÖÜ", ""])
def test_a_currency_is_three_upper_case_letters(code: str) -> None:
    with pytest.raises(MoneyError, match="three upper-case letters"):
        Money(1, code)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (1, "0.000000000001"), (-1, "-0.000000000001"), (10**12, "1"), (-(5 * 10**12) // 2, "-2.5")],
)
def test_text_is_exact_both_ways(amount: int, text: str) -> None:
    assert decimal_text(amount) == text
    assert pico_of(text) == amount


@pytest.mark.parametrize("text", ["", "-", "1e3", "1.", ".5", "1.0000000000001", "1,5", "٣", "+1", " 1", "--1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(MoneyError):
        pico_of(text)


@pytest.mark.parametrize(
    ("amount", "cents"),
    [(CENT // 2, 0), (CENT // 2 + 1, 1), (3 * CENT // 2, 2), (5 * CENT // 2, 2), (-CENT // 2, 0), (-3 * CENT // 2, -2)],
)
def test_half_a_cent_goes_to_the_even_one(amount: int, cents: int) -> None:
    assert round_half_even(amount, 2) == cents


@pytest.mark.parametrize(
    ("minor", "exponent", "text"),
    [(5, 2, "0.05"), (-105, 2, "-1.05"), (7, 0, "7"), (1_234, 3, "1.234"), (0, 2, "0.00")],
)
def test_minor_units_are_written_with_all_their_digits(minor: int, exponent: int, text: str) -> None:
    assert minor_text(minor, exponent) == text


def test_three_thirds_of_a_cent_make_a_cent_by_the_rounding_line() -> None:
    found = round_lines([CENT // 3 + 1] * 3, 2)
    assert (found.lines_minor, found.rounding_minor, found.total_minor) == ((0, 0, 0), 1, 1)


def test_an_invoice_without_lines_is_zero() -> None:
    assert round_lines([], 2).total_minor == 0


def test_an_exponent_beyond_picodollars_is_refused() -> None:
    with pytest.raises(MoneyError, match="exponent is 13"):
        round_half_even(1, 13)


@pytest.mark.parametrize(("code", "digits"), [("USD", 2), ("JPY", 0), ("KWD", 3), ("EUR", 2)])
def test_exponents_are_those_of_iso_4217(code: str, digits: int) -> None:
    assert currency_exponent(code) == digits


def test_a_code_that_is_no_currency_has_no_exponent() -> None:
    with pytest.raises(MoneyError, match="a code of ISO 4217 was expected"):
        currency_exponent("ZZZ")
