"""One lease: what a process holds of one limit, how much it should hold ahead, and when the store must hear of it.

Owns: the state of a lease and the rules that need nothing else (is it small, low, due; how much to wish for), with
their constants. Does not own: the tokens' ways between requests, leases and the store (`leases`), nor the store's
algorithm (`rate_limit`). Pure: time is an argument (monotonic ns of this process).
"""

from __future__ import annotations

from controlplane.rate_limit import SLOTS, SMALL_PER_PROCESS, axis_of, capacity_of
from controlplane.tenancy import Limit

# Local ends of leases: 10 % before the store's (1 s and 4 s), for clocks that run at different speeds.
LEASE_LOCAL_NS = 900_000_000
SLOT_LOCAL_NS = 3_600_000_000
# Unspent tokens go back this long after the last use; with one report interval that is well within 1 s.
IDLE_NS = 700_000_000
# A lease in use is renewed, and what was spent of it reported, this often. One that was not used since goes back soon.
RENEW_NS = 450_000_000
# What a settlement owes or gets back may wait this long, for the report that renews or returns the lease.
SETTLE_NS = 850_000_000
# Slots are renewed this often (they end after 4 s).
SLOT_RENEW_NS = 1_000_000_000
# First wish: this many requests like the one that asked.
FIRST_WISH = 4
# A large limit lends each process this part of it divided by the processes: asking is dear, a second's loan is not.
LEND_DIVISOR = 64
# A wish never exceeds this part of a bucket.
WISH_DIVISOR = 4


class Batch:
    """The spends of one lease between two reports; `generation` is the store's pool they went to, once it answered."""

    __slots__ = ("generation", "lost")

    def __init__(self) -> None:
        self.generation: int | None = None
        self.lost = False


class Lease:
    """What this process holds of one limit. `left` may be spent until `valid_ns`; everything here is in tokens."""

    __slots__ = (
        "active", "asked", "axis", "base", "batch", "credits", "debt", "doubled", "granted_ns", "id", "in_use",
        "last_use_ns", "left", "limit", "pending", "registered", "round", "since_us", "small", "spent", "synced_ns",
        "target", "valid_ns",
    )  # fmt: skip

    def __init__(self, limit: Limit, lease_id: str, now_ns: int) -> None:
        self.limit = limit
        self.axis = axis_of(limit)
        self.id = lease_id
        self.left = 0
        self.spent = 0
        self.in_use = 0
        self.pending = 0
        self.valid_ns = now_ns
        self.last_use_ns = now_ns
        self.granted_ns = 0
        self.since_us = 0
        self.doubled = False
        self.synced_ns = now_ns
        self.target = 0
        self.asked = 0
        self.base = limit.burst
        self.round = 0
        self.debt = 0
        self.credits: list[tuple[Batch, int]] = []
        self.batch = Batch()
        self.active = False
        self.small = False
        self.registered = True

    def held(self) -> int:
        """Slots this process has: running, spare, and set aside for a request that is being decided."""
        return self.in_use + self.left + self.pending

    def busy(self) -> bool:
        """Whether there is anything the store should hear of, now or later."""
        return bool(self.left or self.spent or self.in_use or self.debt or self.credits or self.pending)

    def fresh(self) -> bool:
        """Whether the store need not know of it: nothing is held, and nothing was spent that it has not heard of."""
        return self.left == 0 and self.spent == 0 and self.held() == 0

    def low(self) -> bool:
        """Whether less than half of what should be held ahead is left."""
        return not self.small and self.left * 2 < self.target

    def measure(self, process_count: int) -> None:
        """Note whether the limit is small: too small to be held ahead, so that each request asks for it.

        So is one that the other processes could hold whole, with a first wish of such requests each: what they hold
        ahead would be missing where the next request arrives.
        """
        capacity = capacity_of(self.limit)
        few = min(self.limit.amount, capacity) < SMALL_PER_PROCESS * process_count
        self.small = few or self.asked * FIRST_WISH * (process_count - 1) > capacity

    def wish(self, tokens: int, process_count: int) -> int:
        """How much to hold ahead: at least this process's share of a sixty-fourth of a large limit, at most a quarter.

        Slots that a lost call leaves behind are gone for 4 s: never more ahead than are in use, and a few.
        """
        capacity = capacity_of(self.limit)
        if self.axis == SLOTS:
            return min(tokens, capacity // WISH_DIVISOR, max(FIRST_WISH, self.in_use + self.pending))
        return min(max(tokens, capacity // (LEND_DIVISOR * process_count)), capacity // WISH_DIVISOR)

    def due(self, now_ns: int) -> bool:
        """Whether the store should hear of it in this round."""
        heard_lately = now_ns - self.synced_ns < RENEW_NS and now_ns - self.last_use_ns < IDLE_NS
        if heard_lately and self.registered and not (self.small or self.debt) and self.left * 2 >= self.target:
            return False  # most of a busy process's, twenty times a second: nothing below can hold
        if not self.registered:
            return True
        if self.debt or self.credits:
            # A small difference between reserved and used is no hurry: reported one by one they would cost a busy
            # store more than the requests do.
            large = self.debt * LEND_DIVISOR > capacity_of(self.limit)
            if self.small or large or now_ns - self.synced_ns >= SETTLE_NS:
                return True
        if self.axis == SLOTS:
            spare = self.left > 0 and (self.small or now_ns - self.last_use_ns >= IDLE_NS)
            return spare or (self.held() > 0 and now_ns - self.synced_ns >= SLOT_RENEW_NS) or self.low()
        if not self.spent and not self.left:
            return False
        if self.small or (self.low() and self.spent > 0) or now_ns - self.last_use_ns >= IDLE_NS:
            return True
        return self.last_use_ns > self.synced_ns and now_ns - self.synced_ns >= RENEW_NS
