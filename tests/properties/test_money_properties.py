"""Money never gains or loses a picodollar, for any amounts; and each property fails on a planted fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from billing.errors import MoneyError
from billing.money import PICO_PER_UNIT, RoundedLines, decimal_text, pico_of, round_half_even, round_lines
from tests.exploring import examples

# Deterministic, so that a planted fault is always caught; the shrinker has nothing to do for one.
CHECKED = settings(max_examples=examples(300), deadline=None, report_multiple_bugs=False)
MUTANT = settings(CHECKED, max_examples=3_000, phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)

amounts = st.one_of(
    st.integers(-(10**38) + 1, 10**38 - 1),
    st.integers(-2_000, 2_000).map(lambda halves: halves * PICO_PER_UNIT // 200),
    st.integers(-5, 5),
)
exponents = st.sampled_from([0, 2, 3])


def check_rounding(rounded: Callable[[int, int], int], how: settings = CHECKED) -> None:
    @how
    @given(amounts, exponents)
    def rounds_like_decimal(amount: int, exponent: int) -> None:
        with localcontext() as context:
            context.prec = 60
            exact = Decimal(amount) / PICO_PER_UNIT
            expected = exact.quantize(Decimal(1).scaleb(-exponent), rounding=ROUND_HALF_EVEN).scaleb(exponent)
        assert rounded(amount, exponent) == int(expected)

    rounds_like_decimal()


def test_rounding_is_bankers_rounding_for_every_amount() -> None:
    check_rounding(round_half_even)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(lambda a, e: a // 10 ** (12 - e), id="floor"),
        pytest.param(lambda a, e: (a + 10 ** (12 - e) // 2) // 10 ** (12 - e), id="half up"),
        pytest.param(lambda a, e: round(a / 10 ** (12 - e)), id="float"),
        pytest.param(lambda a, _: round_half_even(a, 2), id="always two digits"),
    ],
)
def test_wrong_rounding_is_caught(mutant: Callable[[int, int], int]) -> None:
    with pytest.raises(AssertionError):
        check_rounding(mutant, MUTANT)


def check_invoice(rounded: Callable[[Sequence[int], int], RoundedLines], how: settings = CHECKED) -> None:
    @how
    @given(st.lists(amounts, max_size=8), exponents)
    def adds_up(lines: list[int], exponent: int) -> None:
        found = rounded(lines, exponent)
        assert found.lines_minor == tuple(round_half_even(line, exponent) for line in lines)
        assert sum(found.lines_minor) + found.rounding_minor == found.total_minor
        assert found.total_minor == round_half_even(sum(lines), exponent)
        assert found.total_minor * 10 ** (12 - exponent) - sum(lines) == found.residue_pico
        assert abs(found.residue_pico) * 2 <= 10 ** (12 - exponent)

    adds_up()


def test_the_lines_of_an_invoice_add_up_to_its_total() -> None:
    check_invoice(round_lines)


def _sum_of_rounded(lines: Sequence[int], exponent: int) -> RoundedLines:
    found = round_lines(lines, exponent)
    return replace(found, rounding_minor=0, total_minor=sum(found.lines_minor))


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(_sum_of_rounded, id="total of rounded lines"),
        pytest.param(lambda lines, e: replace(round_lines(lines, e), rounding_minor=0), id="no rounding line"),
        pytest.param(lambda lines, e: replace(round_lines(lines, e), residue_pico=0), id="residue lost"),
    ],
)
def test_an_invoice_that_does_not_add_up_is_caught(mutant: Callable[[Sequence[int], int], RoundedLines]) -> None:
    with pytest.raises(AssertionError):
        check_invoice(mutant, MUTANT)


def check_text(written: Callable[[int], str], how: settings = CHECKED) -> None:
    @how
    @given(amounts)
    def is_exact(amount: int) -> None:
        text = written(amount)
        assert pico_of(text) == amount
        assert Decimal(text) * PICO_PER_UNIT == amount or abs(amount) >= 10**28
        assert "e" not in text.lower()
        assert not (text.endswith("0") and "." in text)

    is_exact()


def test_decimal_text_is_exact_and_has_no_exponent() -> None:
    check_text(decimal_text)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(lambda a: repr(a / PICO_PER_UNIT), id="float"),
        pytest.param(lambda a: f"{a // PICO_PER_UNIT}.{abs(a) % PICO_PER_UNIT:012d}", id="sign and zeros"),
        pytest.param(lambda a: decimal_text(a - a % 1_000), id="nano"),
    ],
)
def test_inexact_text_is_caught(mutant: Callable[[int], str]) -> None:
    with pytest.raises((AssertionError, MoneyError)):
        check_text(mutant, MUTANT)
