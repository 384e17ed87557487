"""How many digits a currency is paid in.

Owns: the lookup of ISO 4217 exponents in babel's copy of CLDR. Does not own: rounding (`billing.money`, which takes the
exponent as an argument so that it stays pure). USD 2, JPY 0, KWD 3.
"""

from __future__ import annotations

from billing.errors import MoneyError
from billing.money import check_currency


def currency_exponent(code: str) -> int:
    """Digits after the point of the smallest coin. Raises MoneyError for a code that no territory has ever used."""
    from babel.core import get_global
    from babel.numbers import get_currency_precision

    if check_currency(code) not in get_global("all_currencies"):
        raise MoneyError(f"The currency is {code!r}; a code of ISO 4217 was expected.")
    return get_currency_precision(code)
