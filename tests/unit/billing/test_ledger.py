"""The ledger's core: balanced transfers, periods and seals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from billing.errors import PeriodClosed, UnbalancedTransfer
from billing.ledger import (
    Correction,
    Entry,
    PostingKey,
    PostingKind,
    RatedEvent,
    Seal,
    Transfer,
    event_id_floor,
    group,
    month_of,
    period_for,
    period_of,
    post_batch,
    post_corrections,
    require_open,
    time_of_id,
    xor_of,
)
from billing.pricing import Sku, rate
from tests.fakes.ledger_events import NOON_NS, a_book, event_id, usage_event

KEY = PostingKey("acme", "pb-1", "USD", "2026-11")
DAY_NS = 86_400 * 10**9


def rated(number: int, **changed: object) -> RatedEvent:
    event = usage_event(number, **changed)
    return RatedEvent(event, rate(event, a_book()))


def test_a_batch_becomes_one_debit_and_one_credit_per_sku_and_tier() -> None:
    transfer = post_batch(KEY, [rated(1), rated(2), rated(3, tier_served="flex", cached_input_tokens=0)], "p")
    assert [(leg.account, leg.tier, leg.quantity_tokens) for leg in transfer.entries] == [
        ("receivable:acme", "", None),
        ("revenue:cached_input", "default", 1_024),
        ("revenue:input", "default", 2_000),
        ("revenue:input", "flex", 1_000),
        ("revenue:output", "default", 200),
        ("revenue:output", "flex", 100),
    ]
    assert transfer.event_count == 3
    assert transfer.event_xor == event_id(1 ^ 2 ^ 3)


def entry(amount: int, currency: str = "USD") -> Entry:
    return Entry("a", currency, "", "", None, amount)


@pytest.mark.parametrize("legs", [(entry(1), entry(-2)), (entry(0),), (entry(1, "EUR"), entry(-1, "EUR"))])
def test_a_transfer_that_does_not_balance_cannot_be_made(legs: tuple[Entry, ...]) -> None:
    with pytest.raises(UnbalancedTransfer):
        Transfer("p", PostingKind.USAGE, KEY, 0, 0, 1, xor_of(()), legs)


def test_events_are_posted_by_org_version_currency_and_month() -> None:
    before_ns = NOON_NS - 30 * DAY_NS
    groups = group([rated(1), rated(2, org_id="zeta"), rated(3, ended_ns=before_ns), rated(4, billable=False)], never)
    assert {(key.org_id, key.period_id): len(found) for key, found in groups.items()} == {
        ("acme", "2026-11"): 1,
        ("zeta", "2026-11"): 1,
        ("acme", "2026-10"): 1,
    }


def never(_: str) -> bool:
    return False


def test_a_free_model_is_posted_with_its_quantities() -> None:
    free = a_book(prices={("llama", "default", sku): 0 for sku in Sku})
    transfer = post_batch(KEY, [RatedEvent(usage_event(1), rate(usage_event(1), free))], "p")
    assert [leg.amount_pico for leg in transfer.entries] == [0, 0, 0, 0]
    assert [leg.quantity_tokens for leg in transfer.entries] == [None, 512, 1_000, 100]


def test_a_correction_posts_only_the_difference() -> None:
    event = usage_event(1)
    prices = {**a_book().prices, ("llama", "default", Sku.OUTPUT): 14_000_000}
    correction = Correction(event, rate(event, a_book()), rate(event, a_book("pb-2", prices=prices)))
    transfer = post_corrections(KEY, [correction], "p", "agreed late")
    assert correction.delta_pico == -100 * 1_000_000
    assert [(leg.account, leg.quantity_tokens, leg.amount_pico) for leg in transfer.entries] == [
        ("receivable:acme", None, -100_000_000),
        ("revenue:output", 0, 100_000_000),
    ]
    assert (transfer.kind, transfer.memo) == (PostingKind.CORRECTION, "agreed late")


@pytest.mark.parametrize(
    ("at_ns", "period_id"),
    [
        (0, "1970-01"),
        (NOON_NS, "2026-11"),
        (1_798_761_599_999_999_999, "2026-12"),
        (1_798_761_600_000_000_000, "2027-01"),
    ],
)
def test_a_period_is_a_calendar_month_in_utc(at_ns: int, period_id: str) -> None:
    period = month_of(at_ns)
    assert period == period_of(period_id)
    assert period.starts_ns <= at_ns < period.ends_ns
    assert month_of(period.ends_ns).starts_ns == period.ends_ns


def test_late_usage_goes_to_the_next_open_month() -> None:
    assert period_for(NOON_NS, {"2026-11", "2026-12"}.__contains__).period_id == "2027-01"
    with pytest.raises(PeriodClosed, match="2026-11 is closed"):
        require_open("2026-11", {"2026-11"}.__contains__)


def test_a_seal_shows_a_change_of_any_field() -> None:
    transfer = post_batch(KEY, [rated(1), rated(2)], "p")

    def sealed(*transfers: Transfer, previous: str = "") -> str:
        seal = Seal("2026-11", previous)
        for one in transfers:
            seal.add(one)
        return seal.digest()

    first, second, *rest = transfer.entries
    moved = (replace(first, amount_pico=first.amount_pico + 1), replace(second, amount_pico=second.amount_pico - 1))
    seals = {
        sealed(),
        sealed(transfer),
        sealed(transfer, transfer),
        sealed(transfer, previous="x"),
        sealed(replace(transfer, event_count=3)),
        sealed(replace(transfer, usage_until_ns=1)),
        sealed(replace(transfer, entries=(*moved, *rest))),
        sealed(replace(transfer, entries=(first, replace(second, tier="flex"), *rest))),
    }
    assert len(seals) == 8


def test_the_xor_of_ids_names_the_one_that_is_missing() -> None:
    ids = [event_id(number) for number in (7, 2**127, 12, 9)]
    assert xor_of((xor_of(ids), xor_of(ids[:2] + ids[3:]))) == ids[2]
    assert xor_of(()) == "0" * 32


def test_the_floor_of_a_time_sorts_below_every_id_of_it_and_above_those_before() -> None:
    # The example of RFC 9562, A.6: 2022-02-22T19:22:22.000Z.
    known, at_ns = "017f22e279b07cc398c4dc0c0c07398f", 1_645_557_742_000 * 10**6
    assert time_of_id(known) == at_ns
    assert event_id_floor(at_ns) == event_id_floor(at_ns + 999_999) == known[:12] <= known
    assert event_id_floor(at_ns - 1) < event_id_floor(at_ns) < event_id_floor(at_ns + 10**6)
    assert known < event_id_floor(at_ns + 10**6)


def test_times_beyond_those_of_ids_have_a_floor_too() -> None:
    assert event_id_floor(-1) == event_id_floor(0) == "0" * 12 <= event_id(0)
    assert event_id_floor(2**63 - 1) < event_id_floor(2**80) == event_id_floor(2**90) == "f" * 12


@pytest.mark.parametrize("other", [event_id(1), "017f22e279b04cc398c4dc0c0c07398f", ""])
def test_an_id_that_is_no_uuid_of_a_time_has_none(other: str) -> None:
    assert time_of_id(other) is None
