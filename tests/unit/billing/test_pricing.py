"""Pricing: what each kind of attempt costs, what a book may say, and which one holds."""

from __future__ import annotations

from typing import Any

import pytest

from billing.errors import PriceBookError
from billing.pricing import ChargeFlag, Sku, rate, schedule
from billing.usage_event import Outcome
from tests.fakes.ledger_events import a_book, usage_event

BOOK = a_book()


def test_each_known_count_is_a_line_and_cached_input_is_charged_once() -> None:
    """The numbers of Aider-AI/aider#5516: 0.185 USD, where charging the cached input twice gave 0.764."""
    book = a_book(
        prices={
            ("llama", "default", Sku.INPUT): 3_000_000,
            ("llama", "default", Sku.CACHED_INPUT): 600_000,
            ("llama", "default", Sku.OUTPUT): 8_721_000,
        }
    )
    event = usage_event(1, uncached_input_tokens=262_960 - 257_955, cached_input_tokens=257_955, output_tokens=1_744)
    charge = rate(event, book)
    assert [(line.sku, line.quantity_tokens) for line in charge.lines] == [
        (Sku.INPUT, 5_005),
        (Sku.CACHED_INPUT, 257_955),
        (Sku.OUTPUT, 1_744),
    ]
    assert charge.amount_pico == 5_005 * 3_000_000 + 257_955 * 600_000 + 1_744 * 8_721_000
    assert not charge.flags


def test_an_unknown_count_makes_no_line_and_a_flag() -> None:
    charge = rate(usage_event(1, output_tokens=None), BOOK)
    assert [line.sku for line in charge.lines] == [Sku.INPUT, Sku.CACHED_INPUT]
    assert charge.flags == {ChargeFlag.UNKNOWN_COUNTS}


def test_nothing_known_costs_nothing_and_says_so() -> None:
    nothing = dict.fromkeys(("uncached_input_tokens", "cached_input_tokens", "output_tokens"))
    charge = rate(usage_event(1, outcome=Outcome.CRASHED, **nothing), BOOK)
    assert (charge.amount_pico, charge.lines, set(charge.flags)) == (0, (), {ChargeFlag.UNKNOWN_COUNTS})


@pytest.mark.parametrize(
    ("changed", "is_free"),
    [
        ({"billable": False}, True),
        ({"outcome": Outcome.FAILED, "first_token_ns": None}, True),
        ({"outcome": Outcome.REJECTED_BY_ENGINE, "first_token_ns": None}, True),
        ({"outcome": Outcome.FAILED}, False),
        ({"outcome": Outcome.CANCELLED, "first_token_ns": None}, False),
        ({"outcome": Outcome.CRASHED, "first_token_ns": None}, False),
    ],
)
def test_what_failed_before_the_first_token_is_free(changed: dict[str, Any], is_free: bool) -> None:
    charge = rate(usage_event(1, **changed), BOOK)
    assert (charge.amount_pico == 0) is is_free
    assert (charge.flags == {ChargeFlag.NOT_BILLABLE}) is is_free


def test_without_a_book_or_a_price_the_amount_is_not_known() -> None:
    assert rate(usage_event(1), None).amount_pico is None
    unsold = rate(usage_event(1, model_served="other"), BOOK)
    assert (unsold.amount_pico, set(unsold.flags)) == (None, {ChargeFlag.UNPRICED})
    assert rate(usage_event(1, billable=False), None).amount_pico == 0


@pytest.mark.parametrize(
    ("served", "asked", "tier"),
    [(None, None, "default"), ("flex", None, "flex"), ("default", "flex", "default"), ("auto", "flex", "flex")],
)
def test_the_tier_that_was_served_is_billed(served: str | None, asked: str | None, tier: str) -> None:
    charge = rate(usage_event(1, tier_served=served, tier_asked=asked), BOOK)
    assert {line.tier for line in charge.lines} == {tier}


def test_a_tier_without_prices_is_sold_at_the_default_ones() -> None:
    assert BOOK.price("llama", "priority", Sku.OUTPUT) == BOOK.price("llama", "default", Sku.OUTPUT) == 15_000_000


def test_cached_input_without_a_price_of_its_own_is_input_of_the_same_tier() -> None:
    assert BOOK.price("llama", "flex", Sku.CACHED_INPUT) == 1_500_000
    assert BOOK.price("llama", "default", Sku.CACHE_WRITE) == 3_000_000
    assert BOOK.price("other", "default", Sku.CACHE_WRITE) is None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"version": ""}, "version is ''"),
        ({"currency": "usd"}, "three upper-case letters"),
        ({"valid_from_ns": -1}, "valid_from_ns is -1"),
        ({"valid_from_ns": 5, "valid_until_ns": 5}, "must be later"),
        ({"org_id": ""}, "org_id is empty"),
        ({"prices": {("m", "default", Sku.INPUT): 1}}, "has no price for output"),
        ({"prices": {("m", "default", Sku.INPUT): 1.5, ("m", "default", Sku.OUTPUT): 1}}, "a whole number"),
        ({"prices": {("m", "default", Sku.INPUT): -1, ("m", "default", Sku.OUTPUT): 1}}, "a whole number"),
        ({"prices": {("", "default", Sku.INPUT): 1, ("", "default", Sku.OUTPUT): 1}}, "a model"),
        ({"prices": {("m", "default", "input"): 1}}, "a SKU"),
    ],
)
def test_a_book_that_makes_no_sense_is_refused_with_the_field(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(PriceBookError, match=told):
        a_book(**changed)


def test_a_book_does_not_change_with_what_it_was_made_of() -> None:
    prices = {("m", "default", Sku.INPUT): 1, ("m", "default", Sku.OUTPUT): 2}
    book = a_book(prices=prices)
    prices["m", "default", Sku.INPUT] = 99
    assert book.price("m", "default", Sku.INPUT) == 1
    with pytest.raises(TypeError):
        book.prices["m", "default", Sku.INPUT] = 99  # type: ignore[index]  # that it cannot is what is tested


def test_an_orgs_own_book_holds_until_it_ends_then_the_general_one_again() -> None:
    own = a_book("own", org_id="acme", valid_from_ns=10, valid_until_ns=20)
    plan = schedule([a_book("all"), own])
    assert [plan.version_at("acme", at) for at in (9, 10, 19, 20)] == ["all", "own", "own", "all"]
    assert plan.version_at("zeta", 15) == "all"
    assert plan.book("own") is own
    assert plan.book(None) is plan.book("none") is None


def test_before_the_first_book_nothing_is_sold() -> None:
    assert schedule([a_book(valid_from_ns=10)]).version_at("acme", 9) is None


def test_two_books_of_one_version_are_refused() -> None:
    with pytest.raises(PriceBookError, match="Two price books"):
        schedule([a_book(), a_book()])
