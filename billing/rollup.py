"""Usage per minute: the sums that pages and APIs read instead of the raw events.

Owns: what identifies a roll-up row, what it sums, and how rated events and corrections add to it. Does not own: the
table (`adapters.tables`), the queries over it (`adapters.usage_sql`), or the check against the events (`reconcile`).

The node is part of the key, so that two shippers never fight for a row. A minute is a minute of `ended_ns`, the time
at which usage is complete. Each sum of tokens stands beside the number of events that knew the count: a sum over no
known count is unknown, not zero. The XOR of the event ids names the one event that a row lost or gained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from billing.ledger import NS_PER_S, Correction, RatedEvent
from billing.pricing import Charge, ChargeFlag, Sku, billed_model, billed_tier
from billing.usage_event import UsageEvent

# Seconds of one roll-up row.
MINUTE_S = 60
_HALF_BITS = 64
_HALF_MASK = 2**_HALF_BITS - 1
_SIGN = 2 ** (_HALF_BITS - 1)


@dataclass(frozen=True, slots=True)
class RollupKey:
    """One row. Text that an event does not have is empty here: a key has no nulls."""

    org_id: str
    minute_s: int
    """Unix s of the start of the minute."""
    project_id: str
    key_id: str
    end_user: str
    model: str
    tier: str
    batch: bool
    billable: bool
    """False: attempts that their request is not billed by; usage APIs leave them out, engine counters hold them."""
    currency: str
    node: str


@dataclass(slots=True)
class RollupSums:
    """What a row sums. Mutable while a batch is added up, then handed over whole."""

    event_count: int = 0
    unknown_count: int = 0
    """Events with a count that is not known."""
    unpriced_count: int = 0
    estimated_count: int = 0
    uncached_input_tokens: int = 0
    cached_input_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    input_known_count: int = 0
    """Events that know their uncached input; 0 means that the input sums are unknown."""
    output_known_count: int = 0
    event_xor_high: int = 0
    """Upper 64 bits of the XOR of the event ids, as a signed number (the column is BIGINT)."""
    event_xor_low: int = 0
    input_pico: int = 0
    cached_input_pico: int = 0
    cache_write_pico: int = 0
    output_pico: int = 0
    amount_pico: int = 0

    def add(self, one: RatedEvent) -> None:
        """Count one event in."""
        close, charge = one.event.close, one.charge
        self.event_count += 1
        self.estimated_count += close.estimated
        self.unpriced_count += ChargeFlag.UNPRICED in charge.flags
        self.uncached_input_tokens += close.uncached_input_tokens or 0
        self.cached_input_tokens += close.cached_input_tokens or 0
        self.cache_write_tokens += close.cache_write_tokens or 0
        self.output_tokens += close.output_tokens or 0
        self.reasoning_tokens += close.reasoning_tokens or 0
        knows_input, knows_output = close.uncached_input_tokens is not None, close.output_tokens is not None
        self.input_known_count += knows_input
        self.output_known_count += knows_output
        self.unknown_count += not (knows_input and knows_output and close.cached_input_tokens is not None)
        self.xor(one.event.event_id)
        self.add_charge(charge, 1)

    def add_charge(self, charge: Charge, sign: int) -> None:
        """Add (sign 1) or take away (sign -1) the money of a charge."""
        for line in charge.lines:
            name = _PICO_OF[line.sku]
            setattr(self, name, getattr(self, name) + sign * line.amount_pico)
        self.amount_pico += sign * (charge.amount_pico or 0)

    def xor(self, event_id: str) -> None:
        """Take an event id into the XOR."""
        high, low = halves(event_id)
        self.event_xor_high ^= high
        self.event_xor_low ^= low


_PICO_OF = {
    Sku.INPUT: "input_pico",
    Sku.CACHED_INPUT: "cached_input_pico",
    Sku.CACHE_WRITE: "cache_write_pico",
    Sku.OUTPUT: "output_pico",
}
SUMS = tuple(one.name for one in fields(RollupSums))
"""Column names of the sums."""
XOR_SUMS = frozenset({"event_xor_high", "event_xor_low"})
"""The sums that are combined with XOR, not with plus."""


def signed_half(half: int) -> int:
    """64 unsigned bits as the signed number with the same bits."""
    return half - 2 * _SIGN if half >= _SIGN else half


def halves(event_id: str) -> tuple[int, int]:
    """The signed halves of 32 hex digits: an id, or an XOR of ids."""
    number = int(event_id, 16)
    return signed_half(number >> _HALF_BITS), signed_half(number & _HALF_MASK)


def xor_id(high: int, low: int) -> str:
    """The 32 hex digits of two signed halves."""
    return f"{high & _HALF_MASK:016x}{low & _HALF_MASK:016x}"


def key_of(event: UsageEvent, currency: str | None) -> RollupKey:
    """The row that an event belongs to."""
    open_, close = event.open, event.close
    return RollupKey(
        org_id=open_.org_id,
        minute_s=close.ended_ns // (MINUTE_S * NS_PER_S) * MINUTE_S,
        project_id=open_.project_id,
        key_id=open_.key_id,
        end_user=open_.user or "",
        model=billed_model(event),
        tier=billed_tier(event),
        batch=open_.batch_id is not None,
        billable=close.billable,
        currency=currency or "",
        node=open_.node,
    )


def roll_up(rated: Iterable[RatedEvent]) -> dict[RollupKey, RollupSums]:
    """The rows that a batch of newly inserted events adds to."""
    rows: dict[RollupKey, RollupSums] = {}
    for one in rated:
        key = key_of(one.event, one.charge.currency)
        sums = rows.get(key)
        if sums is None:
            sums = rows[key] = RollupSums()
        sums.add(one)
    return rows


def correct(corrections: Iterable[Correction]) -> dict[RollupKey, RollupSums]:
    """What corrections add to the rows of their events: money only, no event is counted twice."""
    rows: dict[RollupKey, RollupSums] = {}
    for one in corrections:
        key = key_of(one.event, one.after.currency or one.before.currency)
        sums = rows.setdefault(key, RollupSums())
        sums.add_charge(one.after, 1)
        sums.add_charge(one.before, -1)
        if ChargeFlag.UNPRICED in one.before.flags and ChargeFlag.UNPRICED not in one.after.flags:
            # The event was counted where it had no price; it has one now.
            rows.setdefault(key_of(one.event, one.before.currency), RollupSums()).unpriced_count -= 1
    return rows
