"""The books are right for any usage: rating, transfers, roll-ups and price schedules; each catches its fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from billing import ledger, rollup
from billing.ledger import Entry, PostingKey, RatedEvent, receivable
from billing.pricing import Charge, PriceBook, PriceSchedule, Sku, is_billable, known_counts, rate, schedule
from billing.rollup import SUMS, XOR_SUMS, RollupKey, RollupSums
from billing.usage_event import Outcome, UsageEvent
from tests.exploring import examples
from tests.fakes.ledger_events import NOON_NS, a_book, usage_event

CHECKED = settings(max_examples=examples(150), deadline=None, report_multiple_bugs=False)
MUTANT = settings(CHECKED, max_examples=3_000, phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)

tokens = st.one_of(st.none(), st.integers(0, 5), st.integers(0, 2_000_000), st.integers(0, 2**40))
prices = st.one_of(st.integers(0, 5), st.integers(0, 60_000_000), st.integers(0, 2**40))


@st.composite
def books(draw: st.DrawFn) -> PriceBook:
    """Books that sell one or two models, with and without the SKUs that may be left out."""
    table: dict[tuple[str, str, Sku], int] = {}
    for model in draw(st.sampled_from([("llama",), ("llama", "qwen")])):
        for tier in draw(st.sampled_from([("default",), ("default", "flex")])):
            for sku in Sku:
                if sku in {Sku.INPUT, Sku.OUTPUT} or draw(st.booleans()):
                    table[model, tier, sku] = draw(prices)
    return a_book(prices=table)


@st.composite
def events(draw: st.DrawFn, number: int | None = None) -> UsageEvent:
    """Events of every kind: unknown counts, every outcome, attempts that are not billed, models that are not sold."""
    return usage_event(
        draw(st.integers(1, 10**9)) if number is None else number,
        org_id=draw(st.sampled_from(["acme", "zeta"])),
        key_id=draw(st.sampled_from(["k1", "k2"])),
        user=draw(st.sampled_from([None, "u"])),
        model_served=draw(st.sampled_from(["llama", "qwen", "unsold"])),
        tier_served=draw(st.sampled_from([None, "default", "flex", "auto"])),
        tier_asked=draw(st.sampled_from([None, "flex", "auto"])),
        batch_id=draw(st.sampled_from([None, "b"])),
        outcome=draw(st.sampled_from(list(Outcome))),
        billable=draw(st.sampled_from([True, True, False])),
        estimated=draw(st.booleans()),
        uncached_input_tokens=draw(tokens),
        cached_input_tokens=draw(tokens),
        cache_write_tokens=draw(tokens),
        output_tokens=draw(tokens),
        first_token_ns=draw(st.sampled_from([None, NOON_NS])),
        ended_ns=NOON_NS + draw(st.integers(0, 3 * 60)) * 10**9,
    )


@st.composite
def usage(draw: st.DrawFn, most: int = 12) -> list[UsageEvent]:
    """Events with different ids."""
    return [draw(events(number)) for number in range(1, draw(st.integers(0, most)) + 1)]


Rate = Callable[[UsageEvent, PriceBook | None], Charge]


def by_hand(event: UsageEvent, book: PriceBook) -> Fraction | None:
    """Dollars by the rule as people say it: price per million, times millions of tokens; no shared code with `rate`."""
    close, table = event.close, book.prices
    if not close.billable or (close.outcome in {"failed", "rejected_by_engine"} and close.first_token_ns is None):
        return Fraction(0)
    tier = close.tier_served if close.tier_served not in {None, "auto"} else event.open.tier_asked
    tiers = [tier, "default"] if tier not in {None, "auto"} else ["default"]
    model, total = event.open.model_served, Fraction(0)
    if (model, "default", Sku.INPUT) not in table:
        return None
    counts = {
        Sku.INPUT: close.uncached_input_tokens,
        Sku.CACHED_INPUT: close.cached_input_tokens,
        Sku.CACHE_WRITE: close.cache_write_tokens,
        Sku.OUTPUT: close.output_tokens,
    }
    for sku, count in counts.items():
        names = [(model, t, s) for t in tiers for s in ((sku,) if sku is Sku.OUTPUT else (sku, Sku.INPUT))]
        price = next(table[name] for name in names if name in table)
        total += Fraction(count or 0, 1_000_000) * Fraction(price, 1_000_000)
    return total


def check_rating(rated: Rate, how: settings = CHECKED) -> None:
    @how
    @given(events(), books())
    def rates_by_hand(event: UsageEvent, book: PriceBook) -> None:
        charge, dollars = rated(event, book), by_hand(event, book)
        assert (charge.amount_pico is None) == (dollars is None)
        if charge.amount_pico is not None:
            assert isinstance(charge.amount_pico, int)
            assert Fraction(charge.amount_pico, 10**12) == dollars
            assert sum(line.amount_pico for line in charge.lines) == charge.amount_pico

    rates_by_hand()


def test_rating_is_the_sum_of_prices_times_counts() -> None:
    check_rating(rate)


def _changed(event: UsageEvent, **close: Any) -> UsageEvent:
    return replace(event, close=event.close._replace(**close))


def _as_float(event: UsageEvent, book: PriceBook | None) -> Charge:
    charge = rate(event, book)
    return charge if charge.amount_pico is None else replace(charge, amount_pico=int(charge.amount_pico * 1.0))


def _cached_twice(event: UsageEvent, book: PriceBook | None) -> Charge:
    both = (event.close.uncached_input_tokens or 0) + (event.close.cached_input_tokens or 0)
    return rate(_changed(event, uncached_input_tokens=both), book)


RATING_MUTANTS = [
    pytest.param(_as_float, id="float"),
    pytest.param(_cached_twice, id="cached input billed twice"),
    pytest.param(lambda event, book: rate(_changed(event, tier_served=None), book), id="billed by the tier asked for"),
    pytest.param(lambda event, book: rate(_changed(event, billable=True), book), id="every attempt billed"),
    pytest.param(lambda event, book: rate(_changed(event, first_token_ns=1), book), id="failed attempts billed"),
    pytest.param(
        lambda event, book: replace(rate(event, book), amount_pico=rate(event, book).amount_pico or 0),
        id="unpriced is free",
    ),
    pytest.param(lambda event, book: rate(_changed(event, cache_write_tokens=0), book), id="cache writes forgotten"),
]


@pytest.mark.parametrize("mutant", RATING_MUTANTS)
def test_a_wrong_rating_is_caught(mutant: Rate) -> None:
    with pytest.raises(AssertionError):
        check_rating(mutant, MUTANT)


Post = Callable[[PostingKey, Sequence[RatedEvent]], Iterable[Entry]]


def rated_by(found: list[UsageEvent], book: PriceBook) -> list[RatedEvent]:
    return [RatedEvent(event, rate(event, book)) for event in found]


def check_transfers(post: Post, how: settings = CHECKED) -> None:
    @how
    @given(usage(), books())
    def balances(found: list[UsageEvent], book: PriceBook) -> None:
        rated = rated_by(found, book)
        groups = ledger.group(rated, lambda _: False)
        assert sum(len(group) for group in groups.values()) == sum(bool(one.charge.lines) for one in rated)
        owed = 0
        for key, group in groups.items():
            entries = list(post(key, group))
            assert sum(entry.amount_pico for entry in entries) == 0
            accounts = [(entry.account, entry.model, entry.tier) for entry in entries]
            assert len(set(accounts)) == len(accounts)
            debit = sum(entry.amount_pico for entry in entries if entry.account == receivable(key.org_id))
            assert debit == sum(one.charge.amount_pico or 0 for one in group)
            sold = sum(entry.quantity_tokens or 0 for entry in entries)
            assert sold == sum(line.quantity_tokens for one in group for line in one.charge.lines)
            owed += debit
        assert owed == sum(one.charge.amount_pico or 0 for one in rated)

    balances()


def posted(key: PostingKey, rated: Sequence[RatedEvent]) -> Iterable[Entry]:
    return ledger.post_batch(key, rated, "0" * 32).entries


def test_every_transfer_sums_to_zero_and_owes_what_its_events_cost() -> None:
    check_transfers(posted)


TRANSFER_MUTANTS = [
    pytest.param(lambda key, rated: list(posted(key, rated))[:-1], id="a leg lost"),
    pytest.param(lambda key, rated: posted(key, list(rated)[:-1] or rated), id="an event left out"),
    pytest.param(lambda key, rated: posted(key, [*rated, rated[0]]), id="an event twice"),
    pytest.param(
        lambda key, rated: [replace(e, amount_pico=e.amount_pico // 1_000 * 1_000) for e in posted(key, rated)],
        id="legs rounded",
    ),
    pytest.param(lambda key, rated: [e for one in rated for e in posted(key, [one])], id="a row per event and account"),
]


@pytest.mark.parametrize("mutant", TRANSFER_MUTANTS)
def test_a_wrong_transfer_is_caught(mutant: Post) -> None:
    with pytest.raises(AssertionError):
        check_transfers(mutant, MUTANT)


Roll = Callable[[Iterable[RatedEvent]], dict[RollupKey, RollupSums]]


def merged(parts: Iterable[dict[RollupKey, RollupSums]]) -> dict[RollupKey, dict[str, int]]:
    """What the upsert of the table does."""
    rows: dict[RollupKey, dict[str, int]] = {}
    for part in parts:
        for key, sums in part.items():
            row = rows.setdefault(key, dict.fromkeys(SUMS, 0))
            for name in SUMS:
                value = getattr(sums, name)
                row[name] = row[name] ^ value if name in XOR_SUMS else row[name] + value
    return rows


def check_rollups(roll: Roll, how: settings = CHECKED) -> None:
    @how
    @given(usage(), books(), st.lists(st.integers(0, 12), max_size=4))
    def sums_are_the_events(found: list[UsageEvent], book: PriceBook, cuts: list[int]) -> None:
        rated = rated_by(found, book)
        edges = [0, *sorted(min(cut, len(rated)) for cut in cuts), len(rated)]
        parts = [roll(rated[start:end]) for start, end in pairwise(edges)]
        whole = merged([roll(rated)])
        assert merged(parts) == whole
        rows = whole.values()
        assert sum(row["event_count"] for row in rows) == len(found)
        assert sum(row["amount_pico"] for row in rows) == sum(one.charge.amount_pico or 0 for one in rated)
        for sku, name in (
            (Sku.INPUT, "input_pico"),
            (Sku.CACHED_INPUT, "cached_input_pico"),
            (Sku.OUTPUT, "output_pico"),
        ):
            lines = [line.amount_pico for one in rated for line in one.charge.lines if line.sku is sku]
            assert sum(row[name] for row in rows) == sum(lines)
        assert sum(row["output_tokens"] for row in rows) == sum(dict(known_counts(e))[Sku.OUTPUT] or 0 for e in found)
        for key, row in whole.items():
            mine = [one.event for one in rated if rollup.key_of(one.event, one.charge.currency) == key]
            assert rollup.xor_id(row["event_xor_high"], row["event_xor_low"]) == ledger.xor_of(e.event_id for e in mine)
            assert row["input_known_count"] == sum(e.close.uncached_input_tokens is not None for e in mine)

    sums_are_the_events()


def test_rollups_are_the_sums_of_their_events_however_they_are_split() -> None:
    check_rollups(rollup.roll_up)


def _only_billed(rated: Iterable[RatedEvent]) -> dict[RollupKey, RollupSums]:
    return rollup.roll_up(one for one in rated if is_billable(one.event))


def _counted_per_batch(rated: Iterable[RatedEvent]) -> dict[RollupKey, RollupSums]:
    rows = rollup.roll_up(rated)
    for sums in rows.values():
        sums.estimated_count = min(sums.estimated_count, 1)
    return rows


def _zero_is_known(rated: Iterable[RatedEvent]) -> dict[RollupKey, RollupSums]:
    rows = rollup.roll_up(rated)
    for sums in rows.values():
        sums.input_known_count = sums.event_count
    return rows


@pytest.mark.parametrize("mutant", [_only_billed, _counted_per_batch, _zero_is_known])
def test_wrong_rollups_are_caught(mutant: Roll) -> None:
    with pytest.raises(AssertionError):
        check_rollups(mutant, MUTANT)


Schedule = Callable[[PriceSchedule, str, int], str | None]


@st.composite
def schedules(draw: st.DrawFn) -> list[PriceBook]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, 5))
        until = draw(st.sampled_from([None, start + 1, start + 3]))
        scope = draw(st.sampled_from([None, None, "acme", "zeta"]))
        found.append(a_book(f"v{number}", valid_from_ns=start, valid_until_ns=until, org_id=scope))
    return found


def check_schedule(version_at: Schedule, how: settings = CHECKED) -> None:
    @how
    @given(schedules(), st.sampled_from(["acme", "other"]), st.integers(0, 8))
    def is_the_latest_in_force(found: list[PriceBook], org: str, at: int) -> None:
        def latest(scope: str | None) -> str | None:
            best: PriceBook | None = None
            for book in found:
                in_force = book.valid_from_ns <= at and (book.valid_until_ns is None or at < book.valid_until_ns)
                if book.org_id == scope and in_force and (best is None or book.valid_from_ns >= best.valid_from_ns):
                    best = book
            return best.version if best else None

        assert version_at(schedule(found), org, at) == (latest(org) or latest(None))

    is_the_latest_in_force()


def test_the_book_in_force_is_the_orgs_latest_else_the_latest_of_all() -> None:
    check_schedule(PriceSchedule.version_at)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(lambda s, org, at: s.version_at(org, at - 1), id="a book starts late"),
        pytest.param(lambda s, org, at: s.version_at("nobody", at), id="own books ignored"),
        pytest.param(lambda s, org, at: max((b.version for b in s.books), default=None), id="the newest always"),
    ],
)
def test_a_wrong_schedule_is_caught(mutant: Schedule) -> None:
    with pytest.raises(AssertionError):
        check_schedule(mutant, MUTANT)
