"""Whether the books are exact, and what exactly is wrong where they are not.

Owns: the comparison of events with their price book, of postings with their events and entries, of roll-ups with
events, and of events with the spool and with engine counters; each difference is named. Does not own: reading and
adding up (`adapters.reconcile_sql`, `adapters.event_sums`) or repair. It is pure and works on one posting or one
stretch of minutes at a time, so that tables of any size are checked in bounded memory.

Exact means: what each event costs by its book = what it says = what its posting's entries say = what the roll-ups say
(= the spool, = engine counters less estimated events, where given), to the picodollar and the token. A posting and a
roll-up row each hold the XOR of their event ids: when one event is missing or planted, the XOR is its id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from billing.ledger import Correction, Entry, PostingKind, receivable, revenue
from billing.pricing import Charge, ChargeFlag, PriceBook, Sku, rate, sell
from billing.rollup import SUMS, RollupKey, RollupSums, xor_id
from billing.usage_event import UsageEvent, payload_hash

_UNPRICED = frozenset({ChargeFlag.UNPRICED})
_FREE = frozenset({ChargeFlag.NOT_BILLABLE})


class Kind(StrEnum):
    """What is wrong. The values are stable: they are the `kind` of the JSON report."""

    MISSING_EVENT = "missing_event"
    EXTRA_EVENT = "extra_event"
    ALTERED_EVENT = "altered_event"
    EVENT_AMOUNT = "event_amount"
    UNPOSTED_EVENT = "unposted_event"
    UNKNOWN_POSTING = "unknown_posting"
    UNKNOWN_PRICE_BOOK = "unknown_price_book"
    POSTING_WITHOUT_EVENTS = "posting_without_events"
    DUPLICATE_POSTING = "duplicate_posting"
    UNBALANCED_POSTING = "unbalanced_posting"
    ORPHAN_ENTRY = "orphan_entry"
    DUPLICATE_ENTRY = "duplicate_entry"
    MISSING_ENTRY = "missing_entry"
    UNEXPECTED_ENTRY = "unexpected_entry"
    ENTRY_AMOUNT = "entry_amount"
    CORRECTION_AMOUNT = "correction_amount"
    MISSING_ROLLUP = "missing_rollup"
    EXTRA_ROLLUP = "extra_rollup"
    ROLLUP_VALUE = "rollup_value"
    BROKEN_SEAL = "broken_seal"
    SPOOL_EVENT_MISSING = "spool_event_missing"
    SPOOL_EVENT_DIFFERS = "spool_event_differs"
    SPOOL_DAMAGED = "spool_damaged"
    ENGINE_TOKENS = "engine_tokens"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it must be. `name` is the id of the row; `amount_pico` is found minus expected."""

    kind: Kind
    name: str
    detail: str
    amount_pico: int | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event as the books hold it."""

    event: UsageEvent
    currency: str | None
    posting_id: str | None

    @property
    def amount_pico(self) -> int | None:
        """The amount that the row says."""
        return self.event.amount_pico


@dataclass(frozen=True, slots=True)
class StoredPosting:
    """The head of a posting as the books hold it."""

    posting_id: str
    kind: PostingKind
    org_id: str
    currency: str
    event_count: int
    event_xor: str


@dataclass(frozen=True, slots=True)
class StoredCorrection:
    """A correction as the books hold it, with its event."""

    event: StoredEvent
    posting_id: str
    price_version_from: str | None
    price_version_to: str
    delta_pico: int


Books = Callable[[str | None], PriceBook | None]
"""The book of a version."""


def charge_of(stored: StoredEvent, books: Books) -> Charge:
    """What the event costs by the book it was rated by. One that had no price when it came stays without one."""
    event = stored.event
    if stored.amount_pico is None and stored.posting_id is None:
        return Charge(event.open.price_version, stored.currency, (), None, _UNPRICED)
    charge = rate(event, books(event.open.price_version))
    return charge if charge.currency == stored.currency else _in_currency(charge, stored.currency)


def check_event(stored: StoredEvent, charge: Charge, books: Books) -> list[Difference]:
    """The event against its own hash and its price book."""
    event, found = stored.event, []
    if payload_hash(event) != event.payload_hash:
        found.append(Difference(Kind.ALTERED_EVENT, event.event_id, "The event's content is not what its hash says."))
    version = event.open.price_version
    if stored.amount_pico and books(version) is None:
        detail = f"The event was rated by price book {version!r}, which does not exist."
        found.append(Difference(Kind.UNKNOWN_PRICE_BOOK, event.event_id, detail))
    elif stored.amount_pico != charge.amount_pico:
        detail = f"The event says {stored.amount_pico} picodollars; price book {version!r} gives {charge.amount_pico}."
        found.append(Difference(Kind.EVENT_AMOUNT, event.event_id, detail, _gap(stored.amount_pico, charge)))
    if charge.lines and stored.posting_id is None:
        detail = "The event has a charge but no posting."
        found.append(Difference(Kind.UNPOSTED_EVENT, event.event_id, detail, charge.amount_pico))
    return found


@dataclass(frozen=True, slots=True)
class EventGroup:
    """What the database added up over events that are rated alike. Rating is linear, so the sums are rated as one."""

    price_version: str | None
    currency: str | None
    model: str
    tier: str
    is_unrated: bool
    """They had no price when they came, and stay without."""
    is_billed: bool
    tokens: tuple[tuple[Sku, int], ...]
    """By SKU; a count that is not known adds nothing."""


def charge_of_group(group: EventGroup, books: Books) -> Charge:
    """What `charge_of` gives for the events of the group, added up."""
    version, currency = group.price_version, group.currency
    if group.is_unrated:
        return Charge(version, currency, (), None, _UNPRICED)
    if not group.is_billed:
        return Charge(version, currency, (), 0, _FREE)
    book = books(version)
    lines = None if book is None else sell(book, group.model, group.tier, group.tokens)
    if lines is None:
        return Charge(version, currency, (), None, _UNPRICED)
    return Charge(version, currency, lines, sum(line.amount_pico for line in lines))


Leg = tuple[str, str, str]
"""(account, model, tier): what a posting has one entry for."""


@dataclass(slots=True)
class PostingTally:
    """What the events (or corrections) that name a posting add up to. Mutable: fed one by one, keeps no event."""

    event_count: int = 0
    event_xor: int = 0
    first_event_id: str = ""
    sold: dict[Leg, tuple[int, int]] = field(default_factory=dict)
    """(tokens, picodollars) by leg; credits are negative."""

    def count(self, event_xor: str, event_count: int = 1, first_event_id: str = "") -> None:
        """Count events in without their money: one by its id, or several by the XOR and the first of their ids."""
        first = first_event_id or event_xor
        self.event_count += event_count
        self.event_xor ^= int(event_xor, 16)
        self.first_event_id = min(self.first_event_id or first, first)

    def add_charge(self, charge: Charge, sign: int) -> None:
        """Count lines in without counting an event."""
        for line in charge.lines:
            leg = (revenue(line.sku), line.model, line.tier)
            tokens, amount = self.sold.get(leg, (0, 0))
            self.sold[leg] = (tokens + sign * line.quantity_tokens, amount - sign * line.amount_pico)

    def legs(self, org_id: str) -> dict[Leg, tuple[int | None, int]]:
        """The entries that the posting must have."""
        legs: dict[Leg, tuple[int | None, int]] = {leg: value for leg, value in self.sold.items() if any(value)}
        if legs:
            legs[receivable(org_id), "", ""] = (None, -sum(amount for _, amount in legs.values()))
        return legs


def check_correction(stored: StoredCorrection, books: Books) -> tuple[Correction, list[Difference]]:
    """A correction against the two books it names."""
    event = stored.event.event
    before = (
        Charge(None, stored.event.currency, (), None, frozenset({ChargeFlag.UNPRICED}))
        if stored.price_version_from is None
        else rate(event, books(stored.price_version_from))
    )
    correction = Correction(event, before, rate(event, books(stored.price_version_to)))
    if correction.delta_pico == stored.delta_pico:
        return correction, []
    detail = (
        f"The correction in posting {stored.posting_id} says {stored.delta_pico} picodollars; from "
        f"{stored.price_version_from!r} to {stored.price_version_to!r} is {correction.delta_pico}."
    )
    gap = stored.delta_pico - correction.delta_pico
    return correction, [Difference(Kind.CORRECTION_AMOUNT, event.event_id, detail, gap)]


class Elsewhere(Protocol):
    """What a check must look up beyond the rows it was given."""

    def has_event(self, event_id: str) -> bool:
        """Whether the books hold an event of this id."""
        ...

    def twin_of(self, head: StoredPosting) -> str | None:
        """The posting that holds the events that this one was posted for, or None."""
        ...


@dataclass(frozen=True, slots=True)
class PostingFacts:
    """Everything that the books hold under one posting id."""

    posting_id: str
    head: StoredPosting | None
    entries: Sequence[tuple[int, Entry]]
    """With their line numbers, in order."""
    tally: PostingTally | None
    """None: no event names the posting."""


def check_posting(facts: PostingFacts, elsewhere: Elsewhere) -> list[Difference]:
    """One posting against its entries and the events that name it."""
    head, tally = facts.head, facts.tally
    if head is None:
        return _no_posting(facts)
    found = []
    total = sum(entry.amount_pico for _, entry in facts.entries)
    if total != 0:
        detail = f"The entries of the posting sum to {total} picodollars, not to zero."
        found.append(Difference(Kind.UNBALANCED_POSTING, head.posting_id, detail, total))
    if tally is None:
        return [*found, _without_events(head, facts.entries, elsewhere)]
    members = _check_members(head, tally)
    # With an event missing or planted the entries cannot agree; the event is the finding.
    return [*found, *(members or _check_entries(head, facts.entries, tally.legs(head.org_id)))]


def check_rollups(
    expected: Mapping[RollupKey, RollupSums], stored: Mapping[RollupKey, RollupSums], elsewhere: Elsewhere
) -> list[Difference]:
    """The roll-up rows of a stretch of minutes against the sums of its events and corrections."""
    found = []
    for key in sorted(expected.keys() | stored.keys(), key=_rollup_name):
        wanted, held = expected.get(key), stored.get(key)
        if wanted is None and held is not None:
            found += _row_without_events(key, held, elsewhere)
        elif held is None and wanted is not None:
            detail = f"The roll-up row of {wanted.event_count} events is missing."
            found.append(Difference(Kind.MISSING_ROLLUP, _rollup_name(key), detail, -wanted.amount_pico))
        elif wanted is not None and held is not None:
            found += _check_row(key, wanted, held, elsewhere)
    return found


@dataclass(frozen=True, slots=True)
class EngineTokens:
    """Tokens of one engine by its own counters. `output_tokens` counts every choice."""

    input_tokens: int
    output_tokens: int
    input_is_uncached: bool = False
    """The engine counts only what it computed (llama.cpp), not the whole prompt (vLLM, SGLang)."""


class EngineWork(Protocol):
    """What an event says that the engine did: the close of an event, or a row of it."""

    @property
    def estimated(self) -> bool: ...
    @property
    def uncached_input_tokens(self) -> int | None: ...
    @property
    def cached_input_tokens(self) -> int | None: ...
    @property
    def cache_write_tokens(self) -> int | None: ...
    @property
    def output_tokens(self) -> int | None: ...


@dataclass(slots=True)
class EngineTally:
    """What the events say that an engine did; estimated ones are left out. Mutable: fed one by one, keeps no event."""

    uncached_input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    estimated_event_count: int = 0

    def add(self, work: EngineWork) -> None:
        """Count an event in, billed or not: the engine did the work."""
        if work.estimated or work.uncached_input_tokens is None or work.output_tokens is None:
            self.estimated_event_count += 1
            return
        self.uncached_input_tokens += work.uncached_input_tokens + (work.cache_write_tokens or 0)
        self.cached_input_tokens += work.cached_input_tokens or 0
        self.output_tokens += work.output_tokens


def check_engine(name: str, counters: EngineTokens, tally: EngineTally) -> list[Difference]:
    """An engine's counters against its events.

    Without estimated events both must be equal. With some, the engine may have counted more (a request that was cut
    off has no usage of the engine's own), never less.
    """
    found = []
    cached = 0 if counters.input_is_uncached else tally.cached_input_tokens
    for what, counted, known in (
        ("input", counters.input_tokens, tally.uncached_input_tokens + cached),
        ("output", counters.output_tokens, tally.output_tokens),
    ):
        gap = known - counted
        if gap == 0 or (gap < 0 and tally.estimated_event_count):
            continue
        detail = (
            f"The engine counted {counted} {what} tokens, its events {known} "
            f"({tally.estimated_event_count} estimated events left out)."
        )
        found.append(Difference(Kind.ENGINE_TOKENS, name, detail))
    return found


def check_spooled(spooled: UsageEvent, stored_hash: str | None) -> list[Difference]:
    """An event of the spool against the books."""
    if stored_hash is None:
        return [Difference(Kind.SPOOL_EVENT_MISSING, spooled.event_id, "The spool holds the event, the books do not.")]
    if stored_hash != spooled.payload_hash:
        detail = "The event of the spool is another than that of the books with its id."
        return [Difference(Kind.SPOOL_EVENT_DIFFERS, spooled.event_id, detail)]
    return []


def _no_posting(facts: PostingFacts) -> list[Difference]:
    found = [
        Difference(
            Kind.ORPHAN_ENTRY,
            f"{facts.posting_id}#{line}",
            f"The entry on {entry.account} has no posting.",
            entry.amount_pico,
        )
        for line, entry in facts.entries
    ]
    if facts.tally is not None:
        count = facts.tally.event_count
        detail = f"The event (of {count}) names posting {facts.posting_id}, which does not exist."
        found.append(Difference(Kind.UNKNOWN_POSTING, facts.tally.first_event_id, detail))
    return found


def _without_events(head: StoredPosting, entries: Sequence[tuple[int, Entry]], elsewhere: Elsewhere) -> Difference:
    held = sum(entry.amount_pico for _, entry in entries if entry.account == receivable(head.org_id))
    twin = elsewhere.twin_of(head)
    if twin is not None:
        detail = f"The posting repeats posting {twin}, which holds its events."
        return Difference(Kind.DUPLICATE_POSTING, head.posting_id, detail, held)
    if head.event_count == 1:
        return _missing(head.event_xor, f"posting {head.posting_id}", held)
    detail = f"No event names the posting, which was made for {head.event_count}."
    return Difference(Kind.POSTING_WITHOUT_EVENTS, head.posting_id, detail, held)


def _check_members(head: StoredPosting, tally: PostingTally) -> list[Difference]:
    """The events of a posting against their number and XOR."""
    where = f"posting {head.posting_id}"
    gap = tally.event_count - head.event_count
    odd = f"{tally.event_xor ^ int(head.event_xor, 16):032x}"
    if gap == 0 and int(odd, 16) == 0:
        return []
    if gap == -1:
        return [_missing(odd, where)]
    if gap == 1:
        detail = f"The event names {where}, which was not posted for it."
        return [Difference(Kind.EXTRA_EVENT, odd, detail)]
    kind = Kind.MISSING_EVENT if gap < 0 else Kind.EXTRA_EVENT
    detail = f"{where} was posted for {head.event_count} events; {tally.event_count} name it (XOR of the odd: {odd})."
    return [Difference(kind, head.posting_id, detail)]


def _check_entries(
    head: StoredPosting, entries: Sequence[tuple[int, Entry]], legs: Mapping[Leg, tuple[int | None, int]]
) -> list[Difference]:
    found: list[Difference] = []
    seen: set[Leg] = set()
    for line, entry in entries:
        name, leg = f"{head.posting_id}#{line}", (entry.account, entry.model, entry.tier)
        wanted = legs.get(leg)
        if leg in seen:
            detail = f"The posting has a second entry on {entry.account}."
            found.append(Difference(Kind.DUPLICATE_ENTRY, name, detail, entry.amount_pico))
        elif wanted is None:
            detail = f"No event of the posting has to do with its entry on {entry.account}."
            found.append(Difference(Kind.UNEXPECTED_ENTRY, name, detail, entry.amount_pico))
        elif (entry.quantity_tokens, entry.amount_pico) != wanted or entry.currency != head.currency:
            detail = (
                f"The entry on {entry.account} says {entry.amount_pico} picodollars for {entry.quantity_tokens} "
                f"tokens; the events of the posting say {wanted[1]} for {wanted[0]}."
            )
            found.append(Difference(Kind.ENTRY_AMOUNT, name, detail, entry.amount_pico - wanted[1]))
        seen.add(leg)
    for leg in sorted(legs.keys() - seen):
        detail = f"The posting lacks its entry on {leg[0]} ({leg[1]}, {leg[2]})."
        found.append(Difference(Kind.MISSING_ENTRY, head.posting_id, detail, -legs[leg][1]))
    return found


def _check_row(key: RollupKey, wanted: RollupSums, held: RollupSums, elsewhere: Elsewhere) -> list[Difference]:
    name = _rollup_name(key)
    gap = wanted.event_count - held.event_count
    if abs(gap) == 1:
        odd = xor_id(wanted.event_xor_high ^ held.event_xor_high, wanted.event_xor_low ^ held.event_xor_low)
        if gap < 0 and not elsewhere.has_event(odd):
            return [_missing(odd, f"roll-up {name}", held.amount_pico - wanted.amount_pico)]
        if gap > 0 and elsewhere.has_event(odd):
            detail = f"Roll-up {name} was not made for the event."
            return [Difference(Kind.EXTRA_EVENT, odd, detail, wanted.amount_pico - held.amount_pico)]
    found = []
    for column in SUMS:
        expected, stored = getattr(wanted, column), getattr(held, column)
        if expected != stored:
            money = stored - expected if column.endswith("_pico") else None
            detail = f"{column} is {stored}; the events say {expected}."
            found.append(Difference(Kind.ROLLUP_VALUE, name, detail, money))
    return found


def _row_without_events(key: RollupKey, held: RollupSums, elsewhere: Elsewhere) -> list[Difference]:
    name = _rollup_name(key)
    odd = xor_id(held.event_xor_high, held.event_xor_low)
    if held.event_count == 1 and not elsewhere.has_event(odd):
        return [_missing(odd, f"roll-up {name}", held.amount_pico)]
    if held == RollupSums():
        return []
    detail = f"No event belongs to the roll-up row, which says {held.event_count}."
    return [Difference(Kind.EXTRA_ROLLUP, name, detail, held.amount_pico)]


def _missing(event_id: str, where: str, held: int | None = None) -> Difference:
    return Difference(Kind.MISSING_EVENT, event_id, f"The event is gone; {where} was made for it.", held)


def _rollup_name(key: RollupKey) -> str:
    """The row in one word for people: what its key is, in order."""
    flags = ("batch" if key.batch else "") + ("" if key.billable else "+unbilled")
    parts = (key.org_id, str(key.minute_s), key.project_id, key.key_id, key.end_user, key.model, key.tier)
    return "/".join((*parts, flags, key.currency, key.node))


def _in_currency(charge: Charge, currency: str | None) -> Charge:
    return Charge(charge.price_version, currency, charge.lines, charge.amount_pico, charge.flags)


def _gap(stored: int | None, charge: Charge) -> int | None:
    return None if stored is None or charge.amount_pico is None else stored - charge.amount_pico
