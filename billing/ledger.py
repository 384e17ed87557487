"""The books: double entry, append only. Rated usage becomes balanced transfers.

Owns: accounts and their names, `Transfer` (a posting with entries that sum to zero), how a batch of rated events of
one org, price version, currency and period becomes one transfer, how a correction becomes another, which period a
usage time is posted to, the ids that a time can have, and the hash that seals a closed period. Does not own: prices
(`pricing`), storage (`adapters.ingest`), or rounding (`money`).

Signs: a debit is positive, a credit negative. `receivable:{org}` is what an org owes us; `revenue:{sku}` is what we
earned; `rounding` takes what an invoice rounds away. One transfer covers many events, because a row per event and SKU
would be 44 GB at 50 million events (DESIGN 4.3); the events name the posting that holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import reduce
from operator import xor

from billing.errors import PeriodClosed, UnbalancedTransfer
from billing.pricing import Charge, Sku
from billing.usage_event import UsageEvent

# Nanoseconds in a second.
NS_PER_S = 1_000_000_000
# An event id is 128 bits (UUIDv7).
_XOR_DIGITS = 32
# A UUIDv7 begins with its time: 48 bits of Unix milliseconds (RFC 9562, 5.7), which are 12 hex digits.
_ID_TIME_DIGITS = 12
_LAST_ID_MS = 16**_ID_TIME_DIGITS - 1
_NS_PER_MS = 1_000_000
# How far the time in an event's id may lie from the times that the event states, for the id to tell where it is looked
# for. An id is made between arrival and end of a request, by the same clock; the longest request is half of this
# (`INFERPLANE_TOTAL_TIMEOUT_S`, 1,800 s). The trigger `usage_event_misdated` notes every event that is further off.
ID_MARGIN_NS = 3_600 * NS_PER_S


class PostingKind(StrEnum):
    """Why a transfer was posted. The values are stored."""

    USAGE = "usage"
    CORRECTION = "correction"


@dataclass(frozen=True, slots=True)
class Entry:
    """One leg. `quantity_tokens` is what a revenue leg sold (negative in a correction downwards), else None."""

    account: str
    currency: str
    model: str
    tier: str
    quantity_tokens: int | None
    amount_pico: int


@dataclass(frozen=True, slots=True)
class PostingKey:
    """What the events of one transfer have in common."""

    org_id: str
    price_version: str
    currency: str
    period_id: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """A posting and its entries. Raises UnbalancedTransfer unless they sum to zero in the posting's currency."""

    posting_id: str
    kind: PostingKind
    key: PostingKey
    usage_from_ns: int
    usage_until_ns: int
    """First and last usage time of its events (Unix ns, both inclusive); a late event keeps its own."""
    event_count: int
    event_xor: str
    """XOR of the event ids, 32 hex digits: when one event is missing, the difference is its id."""
    entries: tuple[Entry, ...]
    memo: str = ""

    def __post_init__(self) -> None:
        total = sum(entry.amount_pico for entry in self.entries)
        if total != 0:
            raise UnbalancedTransfer(f"Posting {self.posting_id}: the entries sum to {total} picodollars, not to zero.")
        if len(self.entries) == 1:
            raise UnbalancedTransfer(f"Posting {self.posting_id} has one entry; double entry needs two sides.")
        if any(entry.currency != self.key.currency for entry in self.entries):
            raise UnbalancedTransfer(f"Posting {self.posting_id}: an entry is not in {self.key.currency}.")


@dataclass(frozen=True, slots=True)
class RatedEvent:
    """An event and what it costs."""

    event: UsageEvent
    charge: Charge


@dataclass(frozen=True, slots=True)
class Correction:
    """A retroactive change of one event's price: the difference is posted, the event itself never changes."""

    event: UsageEvent
    before: Charge
    after: Charge

    @property
    def delta_pico(self) -> int:
        """Picodollars to add. An event that had no price before counts as nothing billed so far."""
        return (self.after.amount_pico or 0) - (self.before.amount_pico or 0)


@dataclass(frozen=True, slots=True)
class Period:
    """A calendar month in UTC: [starts_ns, ends_ns) in Unix ns."""

    period_id: str
    starts_ns: int
    ends_ns: int


def receivable(org_id: str) -> str:
    """Account: what the org owes us."""
    return f"receivable:{org_id}"


def revenue(sku: Sku) -> str:
    """Account: what we earned with this SKU."""
    return f"revenue:{sku.value}"


ROUNDING = "rounding"
"""Account: what invoices round away."""


def month_of(at_ns: int) -> Period:
    """The UTC calendar month that a Unix time falls in."""
    day = datetime.fromtimestamp(at_ns // NS_PER_S, UTC)
    return _month(day.year, day.month)


def period_of(period_id: str) -> Period:
    """The period of an id like "2026-11". Raises ValueError for another form."""
    year, _, month = period_id.partition("-")
    return _month(int(year), int(month))


def period_for(usage_ns: int, is_closed: Callable[[str], bool]) -> Period:
    """The period that usage of this time is posted to: its month, or the next one that is still open."""
    period = month_of(usage_ns)
    while is_closed(period.period_id):
        period = month_of(period.ends_ns)
    return period


def event_id_floor(at_ns: int) -> str:
    """12 hex digits: in byte order not above any UUIDv7 of this Unix time or later, and above any of an earlier ms."""
    return f"{min(max(0, at_ns // _NS_PER_MS), _LAST_ID_MS):0{_ID_TIME_DIGITS}x}"


def time_of_id(event_id: str) -> int | None:
    """The Unix time (ns, whole ms) at which an id was made; None for an id that is no UUIDv7."""
    if event_id[_ID_TIME_DIGITS : _ID_TIME_DIGITS + 1] != "7":
        return None
    return int(event_id[:_ID_TIME_DIGITS], 16) * _NS_PER_MS


def require_open(period_id: str, is_closed: Callable[[str], bool]) -> None:
    """Raise PeriodClosed when the period takes no more postings."""
    if is_closed(period_id):
        raise PeriodClosed(period_id)


def group(rated: Iterable[RatedEvent], is_closed: Callable[[str], bool]) -> dict[PostingKey, list[RatedEvent]]:
    """The events that are posted, by what one transfer has in common. Events without charge lines are not posted."""
    groups: dict[PostingKey, list[RatedEvent]] = {}
    months: dict[int, str] = {}
    for one in rated:
        charge, open_ = one.charge, one.event.open
        if not charge.lines or charge.price_version is None or charge.currency is None:
            continue
        # A month lookup per minute of usage, not per event.
        minute = one.event.close.ended_ns // (60 * NS_PER_S)
        period_id = months.get(minute)
        if period_id is None:
            period_id = months[minute] = period_for(one.event.close.ended_ns, is_closed).period_id
        key = PostingKey(open_.org_id, charge.price_version, charge.currency, period_id)
        groups.setdefault(key, []).append(one)
    return groups


def post_batch(key: PostingKey, rated: Sequence[RatedEvent], posting_id: str) -> Transfer:
    """One transfer for the events of one group: a debit of the org, a credit per (SKU, model, tier)."""
    sold: dict[tuple[Sku, str, str], tuple[int, int]] = {}
    for one in rated:
        for line in one.charge.lines:
            where = (line.sku, line.model, line.tier)
            tokens, amount = sold.get(where, (0, 0))
            sold[where] = (tokens + line.quantity_tokens, amount + line.amount_pico)
    return _transfer(PostingKind.USAGE, key, [one.event for one in rated], sold, posting_id=posting_id)


def post_corrections(key: PostingKey, corrections: Sequence[Correction], posting_id: str, memo: str = "") -> Transfer:
    """One transfer for corrections of one group: what is billed now minus what was billed, per (SKU, model, tier)."""
    sold: dict[tuple[Sku, str, str], tuple[int, int]] = {}
    for one in corrections:
        for sign, charge in ((1, one.after), (-1, one.before)):
            for line in charge.lines:
                where = (line.sku, line.model, line.tier)
                tokens, amount = sold.get(where, (0, 0))
                sold[where] = (tokens + sign * line.quantity_tokens, amount + sign * line.amount_pico)
    events = [one.event for one in corrections]
    return _transfer(PostingKind.CORRECTION, key, events, sold, posting_id=posting_id, memo=memo)


def xor_of(event_ids: Iterable[str]) -> str:
    """XOR of event ids as 32 hex digits; no id gives zeros."""
    return f"{reduce(xor, (int(event_id, 16) for event_id in event_ids), 0):0{_XOR_DIGITS}x}"


class Seal:
    """The hash of a closed period, fed with its postings in order of their ids: a chain from period to period.

    SHA-256 over the seal before it and every field of every posting and entry, so a change of any of them, or of
    their number, shows.
    """

    def __init__(self, period_id: str, previous_seal: str) -> None:
        self._hash = hashlib.sha256(f"{period_id}\x00{previous_seal}\x00".encode())

    def add(self, posting: Transfer) -> None:
        """Take in one posting."""
        key = posting.key
        head = (posting.posting_id, posting.kind.value, key.org_id, key.currency, key.price_version)
        counts = (posting.usage_from_ns, posting.usage_until_ns, posting.event_count, posting.event_xor)
        self._hash.update("\x1f".join(map(str, (*head, *counts))).encode() + b"\x1e")
        for entry in posting.entries:
            leg = (entry.account, entry.model, entry.tier, entry.quantity_tokens, entry.amount_pico)
            self._hash.update("\x1f".join(map(str, leg)).encode() + b"\x1e")

    def digest(self) -> str:
        """64 hex digits."""
        return self._hash.hexdigest()


def _transfer(
    kind: PostingKind,
    key: PostingKey,
    events: Sequence[UsageEvent],
    sold: dict[tuple[Sku, str, str], tuple[int, int]],
    *,
    posting_id: str,
    memo: str = "",
) -> Transfer:
    legs = [
        Entry(revenue(sku), key.currency, model, tier, tokens, -amount)
        for (sku, model, tier), (tokens, amount) in sorted(sold.items())
        if tokens or amount
    ]
    debit = -sum(leg.amount_pico for leg in legs)
    entries = (Entry(receivable(key.org_id), key.currency, "", "", None, debit), *legs) if legs else ()
    times = [event.close.ended_ns for event in events]
    return Transfer(
        posting_id=posting_id,
        kind=kind,
        key=key,
        usage_from_ns=min(times),
        usage_until_ns=max(times),
        event_count=len(events),
        event_xor=xor_of(event.event_id for event in events),
        entries=entries,
        memo=memo,
    )


def _month(year: int, month: int) -> Period:
    start = datetime(year, month, 1, tzinfo=UTC)
    end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return Period(f"{year:04d}-{month:02d}", _ns(start), _ns(end))


def _ns(moment: datetime) -> int:
    return int(moment.timestamp()) * NS_PER_S
