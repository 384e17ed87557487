"""Roll-ups: which row an event belongs to, what is summed, what stays unknown."""

from __future__ import annotations

from billing.ledger import Correction, RatedEvent
from billing.pricing import rate
from billing.rollup import RollupSums, correct, key_of, roll_up, signed_half, xor_id
from tests.fakes.ledger_events import NOON_NS, a_book, event_id, usage_event


def rated(number: int, **changed: object) -> RatedEvent:
    event = usage_event(number, **changed)
    return RatedEvent(event, rate(event, a_book()))


def test_a_row_is_a_minute_of_the_end_of_usage() -> None:
    assert key_of(usage_event(1, ended_ns=NOON_NS + 59_999_999_999), "USD").minute_s == NOON_NS // 10**9
    assert key_of(usage_event(1, ended_ns=NOON_NS + 60_000_000_000), "USD").minute_s == NOON_NS // 10**9 + 60


def test_what_an_event_does_not_have_is_empty_in_its_key() -> None:
    key = key_of(usage_event(1, user=None, batch_id=None), None)
    assert (key.end_user, key.batch, key.currency, key.tier) == ("", False, "", "default")


def test_unknown_counts_are_counted_as_unknown() -> None:
    (sums,) = roll_up([rated(1), rated(2, uncached_input_tokens=None), rated(3, output_tokens=None)]).values()
    assert (sums.event_count, sums.input_known_count, sums.output_known_count, sums.unknown_count) == (3, 2, 2, 2)
    assert (sums.uncached_input_tokens, sums.output_tokens) == (2_000, 200)


def test_the_ids_of_a_row_xor_to_the_missing_one_in_64_signed_bits() -> None:
    sums = RollupSums()
    for number in (2**127 + 1, 2**64 + 2**63, 5):
        sums.xor(event_id(number))
    assert -(2**63) <= sums.event_xor_high < 2**63
    assert -(2**63) <= sums.event_xor_low < 2**63
    assert xor_id(sums.event_xor_high, sums.event_xor_low) == event_id((2**127 + 1) ^ (2**64 + 2**63) ^ 5)
    assert (signed_half(2**63), signed_half(2**63 - 1)) == (-(2**63), 2**63 - 1)


def test_a_correction_adds_money_and_no_event() -> None:
    event = usage_event(1)
    doubled = a_book("pb-2", prices={key: 2 * price for key, price in a_book().prices.items()})
    (sums,) = correct([Correction(event, rate(event, a_book()), rate(event, doubled))]).values()
    assert sums.event_count == 0
    assert sums.amount_pico == rate(event, a_book()).amount_pico
    assert sums.amount_pico == sums.input_pico + sums.cached_input_pico + sums.cache_write_pico + sums.output_pico


def test_a_price_that_came_late_takes_the_event_off_the_unpriced_ones() -> None:
    event = usage_event(1)
    rows = correct([Correction(event, rate(event, None), rate(event, a_book()))])
    assert {key.currency: sums.unpriced_count for key, sums in rows.items()} == {"USD": 0, "": -1}
