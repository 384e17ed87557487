"""Reconcile's core on values: each comparison, and what it looks up elsewhere. The planted faults on real databases
stand in tests/integration/billing/test_reconcile.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from billing.adapters.reconcile_inputs import engine_source, parse_counters
from billing.errors import ReconcileInputError
from billing.ledger import PostingKey, RatedEvent, post_batch
from billing.pricing import PriceBook, rate
from billing.reconcile import (
    EngineTally,
    EngineTokens,
    Kind,
    PostingFacts,
    PostingTally,
    StoredEvent,
    StoredPosting,
    charge_of,
    check_engine,
    check_event,
    check_posting,
    check_rollups,
)
from billing.rollup import roll_up
from tests.fakes.ledger_events import a_book, event_id, usage_event

BOOK = a_book()


def books(version: str | None) -> PriceBook | None:
    return BOOK if version == BOOK.version else None


class Nowhere:
    """Nothing else is in the books."""

    def has_event(self, event_id: str) -> bool:
        return False

    def twin_of(self, head: StoredPosting) -> str | None:
        return None


RATED = [RatedEvent(usage_event(number), rate(usage_event(number), BOOK)) for number in (1, 2, 3)]
TRANSFER = post_batch(PostingKey("acme", "pb-1", "USD", "2026-11"), RATED, "p")
HEAD = StoredPosting("p", TRANSFER.kind, "acme", "USD", TRANSFER.event_count, TRANSFER.event_xor)
LEGS = tuple(enumerate(TRANSFER.entries, start=1))


def tally(rated: list[RatedEvent]) -> PostingTally:
    made = PostingTally()
    for one in rated:
        made.count(one.event.event_id)
        made.add_charge(one.charge, 1)
    return made


def test_a_posting_that_agrees_has_no_difference() -> None:
    assert check_posting(PostingFacts("p", HEAD, LEGS, tally(RATED)), Nowhere()) == []


def test_events_that_cancel_in_number_are_still_found_by_their_ids() -> None:
    other = RatedEvent(usage_event(9), RATED[0].charge)
    (found,) = check_posting(PostingFacts("p", HEAD, LEGS, tally([*RATED[:2], other])), Nowhere())
    assert (found.kind, found.name) == (Kind.EXTRA_EVENT, "p")


def test_a_posting_whose_only_event_is_gone_names_it() -> None:
    one = post_batch(TRANSFER.key, RATED[:1], "p")
    head = replace(HEAD, event_count=1, event_xor=one.event_xor)
    (found,) = check_posting(PostingFacts("p", head, tuple(enumerate(one.entries, 1)), None), Nowhere())
    assert (found.kind, found.name, found.amount_pico) == (Kind.MISSING_EVENT, event_id(1), RATED[0].charge.amount_pico)


def test_a_posting_of_many_events_of_which_none_is_left_is_named_itself() -> None:
    (found,) = check_posting(PostingFacts("p", HEAD, LEGS, None), Nowhere())
    assert (found.kind, found.name) == (Kind.POSTING_WITHOUT_EVENTS, "p")


def test_an_entry_in_another_currency_is_a_difference() -> None:
    legs = ((1, replace(TRANSFER.entries[0], currency="EUR")), *LEGS[1:])
    assert [one.kind for one in check_posting(PostingFacts("p", HEAD, legs, tally(RATED)), Nowhere())] == [
        Kind.ENTRY_AMOUNT
    ]


def test_an_event_whose_book_is_gone_is_named() -> None:
    stored = StoredEvent(replace(usage_event(1, price_version="gone"), amount_pico=5), "USD", "p")
    found = check_event(stored, charge_of(stored, books), books)
    assert [one.kind for one in found] == [Kind.UNKNOWN_PRICE_BOOK]


def test_rollups_that_agree_have_no_difference_and_one_that_is_gone_is_named() -> None:
    rows = roll_up(RATED)
    assert check_rollups(rows, roll_up(RATED), Nowhere()) == []
    assert [one.kind for one in check_rollups(rows, {}, Nowhere())] == [Kind.MISSING_ROLLUP]
    assert [one.kind for one in check_rollups({}, rows, Nowhere())] == [Kind.EXTRA_ROLLUP]
    (found,) = check_rollups(roll_up(RATED[:2]), rows, Nowhere())
    assert (found.kind, found.name) == (Kind.MISSING_EVENT, event_id(3))


def test_an_engine_that_counts_cached_input_or_not_is_compared_by_its_own_rule() -> None:
    events = EngineTally()
    for one in RATED:
        events.add(one.event.close)
    assert check_engine("e", EngineTokens(3 * 1_512, 300), events) == []
    assert check_engine("e", EngineTokens(3 * 1_000, 300, input_is_uncached=True), events) == []
    assert [one.kind for one in check_engine("e", EngineTokens(3 * 1_000, 299), events)] == [Kind.ENGINE_TOKENS] * 2


PAGE = """# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a"} 10.0
vllm:prompt_tokens_total{engine="1",model_name="a"} 5.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a"} 7.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="a"} 1.7e+09
"""


def test_counters_are_summed_over_models_and_ranks() -> None:
    assert parse_counters(PAGE, "e") == EngineTokens(15, 7)


@pytest.mark.parametrize("page", ["", "# TYPE up gauge\nup 1\n", "{{{"])
def test_a_page_without_known_counters_is_refused(page: str) -> None:
    with pytest.raises(ReconcileInputError, match="The counters of e"):
        parse_counters(page, "e")


def test_a_source_names_an_endpoint_and_perhaps_its_incarnation() -> None:
    assert engine_source("e@7=http://x/metrics?a=b").name == "e@7"
    assert engine_source("e=f").incarnation is None
