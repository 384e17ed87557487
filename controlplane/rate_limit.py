"""May this request run now? The arithmetic of limits, and what the store does in one atomic step.

Owns: the values of a decision (`Cost`, `Admitted`, `Refused`, `LimitView`), the port that `serve` uses, the integer
arithmetic of a bucket, and `Buckets`: the store's whole algorithm, state in and state out (`adapters.limits_redis.lua`
is the same algorithm inside Redis, held to it by the contract suite). Does not own: the process's side (`leases`), the
text of a refusal (`admission`), any clock (time is an argument).

**The bound** ("overshoot 0"): over any interval of t seconds, admitted over all processes is at most
burst + amount * t / period, where a token request counts min(reserved, used). It holds because at every moment

    level + out + pools <= burst

`level` is what the store may still grant, `out` what processes hold on lease and have not reported spent, `pools` what
requests in flight may yet give back at settlement. Granting, spending, reporting, returning and crediting only move
tokens between the three; only the clock adds (and never above burst). So whatever is admitted in an interval was in the
three at its start (<= burst) or was refilled in it. When a refill meets the cap, the oldest pools shrink first: a
credit is paid only as far as the bucket would really have kept those tokens, and a long request never stops the refill.
A request that used more than it reserved takes the rest from `level`, which may go below zero (debt).

Unit of time in the store: microseconds. A bucket is (whole tokens, fraction in 1/period_us tokens), so that refilling
is exact and every number stays below 2**53 in Lua. Concurrency is the same lease without a refill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from controlplane.tenancy import Dimension, Limit

# A token lease that is not renewed ends after this long in the store (DESIGN 4.2: within 1 s of the last use).
LEASE_TTL_US = 1_000_000
# A concurrency lease that is not renewed: slots of a dead process must be back within 5 s (DESIGN 4.2).
SLOT_TTL_US = 4_000_000
# A process counts as alive this long after its last call.
PROCESS_TTL_US = 5_000_000
# A process that is silent for this long is forgotten, with the number of its last report.
FORGET_US = 600_000_000
# After the store lost (or may have lost) its memory, buckets stay empty this long: every lease given out before is
# over, and every living process has registered its running requests again.
RESTART_US = 2_000_000
# One grant beyond the request takes at most level / (this * processes), so that no process starves the others.
SHARE_DIVISOR = 2
# A limit smaller than this many tokens per process is asked for at the store on each request (DESIGN 4.2).
SMALL_PER_PROCESS = 16
# Pools of credit per bucket; the oldest is dropped beyond (its requests then get no credit: the safe side).
MAX_POOLS = 8
# Largest amount and burst, and longest period, for which the arithmetic in Lua is exact (both factors below 2**42).
MAX_AMOUNT = 1 << 42
MAX_PERIOD_S = 4_300_000
# How long to wait for a slot, or for tokens that another process holds on lease: a lease ends within this time.
LEASE_WAIT_S = 1.0


class Cost(NamedTuple):
    """What a request takes from its limits: reserved before, used after. One concurrency slot is always part of it."""

    input_tokens: int
    output_tokens: int
    requests: int = 1


class LimitView(NamedTuple):
    """The tightest limits after a decision, for the `x-ratelimit-*` headers; None where there is no such limit.

    `reset_*_s` is the time until the bucket is full again. Tokens: the tighter of input and output limits.
    """

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float | None = None


NO_LIMITS = LimitView()
"""What a request sees to which no limit applies."""


class Ticket:
    """The receipt of an admission: what was taken and from where. `settle` takes it exactly once."""

    __slots__ = ("cost", "settled", "spends")

    def __init__(self, cost: Cost, spends: list[tuple[object, int, object]]) -> None:
        self.cost = cost
        self.spends = spends
        self.settled = False


class Admitted(NamedTuple):
    """The request may run; hand `ticket` back to `settle` when it ended, however it ended."""

    ticket: Ticket
    view: LimitView


class RefusalReason(StrEnum):
    """Why not. The values are metric labels."""

    RATE_LIMIT = "rate_limit"
    TOO_LARGE = "too_large"
    """Larger than the whole burst: never admissible."""
    STORE_UNAVAILABLE = "store_unavailable"


class Refused(NamedTuple):
    """The request may not run, and nothing was taken from any limit.

    `limit` is the one with the longest wait (None when the store did not answer); `needed` and `left` are in its unit.
    """

    reason: RefusalReason
    limit: Limit | None
    needed: int
    left: int
    retry_after_s: float | None
    view: LimitView


@dataclass(frozen=True, slots=True)
class StoreState:
    """For `/readyz`: does the store answer, since when (monotonic ns), and what happens to tenants if it does not."""

    answering: bool
    since_ns: int
    policy: str
    detail: str = ""


class LimitsPort(Protocol):
    """What `serve` asks of limits. `now_ns` is `time.monotonic_ns()` of the process."""

    def try_admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | None:
        """Decide from what this process holds on lease, without I/O; None: ask `admit`."""

    async def admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | Refused:
        """Decide in one atomic attempt at the store; it never raises for a store that is gone."""

    def settle(self, ticket: Ticket, used: Cost, now_ns: int) -> None:
        """Replace the reservation by what was used and free the slot; exactly once per ticket, never blocks."""

    def state(self) -> StoreState:
        """Whether the store answers."""


def axis_of(limit: Limit) -> int:
    """Index of the limit's dimension in (requests, input tokens, output tokens, slots)."""
    return _AXES[limit.dimension]


# The order of a cost's parts everywhere below.
_AXES = {Dimension.REQUESTS: 0, Dimension.INPUT_TOKENS: 1, Dimension.OUTPUT_TOKENS: 2, Dimension.CONCURRENCY: 3}
# Index of the slots axis.
SLOTS = 3


def capacity_of(limit: Limit) -> int:
    """The most that can ever be taken at once: burst of a rate, amount of a concurrency limit."""
    return limit.amount if limit.dimension is Dimension.CONCURRENCY else limit.burst


def wait_s(limit: Limit, level: int, fraction: int, target: int) -> float | None:
    """Seconds until a bucket at `level` + fraction/period_us tokens holds `target`, if nobody takes any; None: never.

    Exact to the microsecond: ceil(((target - level) * period_us - fraction) / amount).
    """
    if target <= level:
        return 0.0
    if limit.amount <= 0 or limit.dimension is Dimension.CONCURRENCY:
        return None
    missing = (target - level) * limit.period_s * 1_000_000 - fraction
    return -(-missing // limit.amount) / 1e6


def state_of(limit: Limit, level: int) -> tuple[int, int, float | None]:
    """(limit, remaining, seconds until it is full again; None: never) of a limit with `level` left, for `LimitView`."""
    remaining = min(level, limit.burst)
    missing = limit.burst - remaining
    return limit.amount, remaining, missing * limit.period_s / limit.amount if limit.amount else None


def waits_longer(found: Refused, than: Refused) -> bool:
    """Whether `found` keeps the caller away longer than `than`; None is for ever."""
    if than.retry_after_s is None:
        return False
    return found.retry_after_s is None or found.retry_after_s > than.retry_after_s


class Ask(NamedTuple):
    """One bucket's part of a call to the store.

    `need` is checked (all of a call, or none, is granted); `want` is a wish on top for later requests. The rest reports
    what happened to `lease_id` since: `spent` and `returned` tokens, `debt` beyond it, `credits` by generation.
    `held` (concurrency) registers the slots a process holds when the store does not know the lease.
    """

    limit: Limit
    lease_id: str
    need: int = 0
    want: int = 0
    spent: int = 0
    returned: int = 0
    debt: int = 0
    credits: tuple[tuple[int, int], ...] = ()
    held: int = 0
    renew: bool = True


class Attempt(NamedTuple):
    """One atomic call. `sequence` > 0 numbers a process's reports: the store applies each number once."""

    process_id: str
    sequence: int
    asks: tuple[Ask, ...]


class BucketReply(NamedTuple):
    """A bucket after the call; `out` counts the leases of all processes.

    `generation` names the pool that the reported spends went to; 0: they went to none (the lease was over, or this
    report was applied before), so nothing may be credited for them. `known`: the lease was alive when the call came.
    """

    level: int
    fraction: int
    out: int
    granted: int
    generation: int
    known: bool


class Reply(NamedTuple):
    """What the store decided; `buckets` stand in the order of the asks.

    `at_us` is the store's clock when it did: replies may arrive in another order than that.
    """

    admitted: bool
    process_count: int
    buckets: tuple[BucketReply, ...]
    at_us: int


@dataclass(slots=True)
class _Lease:
    """Mutable: what a process holds of a limit, as the store counts it."""

    tokens: int
    ends_us: int


@dataclass(slots=True)
class Bucket:
    """Mutable: one limit's state in the store."""

    level: int
    fraction: int
    at_us: int
    generation: int
    pools: list[list[int]] = field(default_factory=list)
    """[generation, tokens] oldest first: what requests reported as spent may still give back."""
    leases: dict[str, _Lease] = field(default_factory=dict)

    @property
    def out(self) -> int:
        """Tokens or slots held on lease."""
        return sum(lease.tokens for lease in self.leases.values())


class Buckets:
    """The store: every bucket, every lease, and which processes live. Pure: time comes with each call.

    `empty_until_us` is set when an earlier store's memory was lost: buckets it might have known start empty then and
    fill at their rate; without it an unknown bucket is full.
    """

    def __init__(self, empty_until_us: int | None = None) -> None:
        self._empty_until_us = empty_until_us
        self._buckets: dict[str, Bucket] = {}
        self._processes: dict[str, int] = {}
        self._sequences: dict[str, int] = {}

    def attempt(self, attempt: Attempt, now_us: int) -> Reply:
        """Apply the reports, check every need, then grant all of them or none."""
        processes = self._count_processes(attempt.process_id, now_us)
        pairs = [(ask, self._bucket(ask.limit, now_us)) for ask in attempt.asks]
        known = [ask.lease_id in bucket.leases for ask, bucket in pairs]
        is_new = self._is_new(attempt)
        generations = [self._report(ask, bucket) if is_new else 0 for ask, bucket in pairs]
        for ask, bucket in pairs:
            self._renew(ask, bucket, now_us)
        admitted = self._passes(pairs, now_us)
        granted = [self._grant(ask, bucket, processes, now_us) if admitted else 0 for ask, bucket in pairs]
        rows = zip(pairs, granted, generations, known, strict=True)
        replies = tuple(
            BucketReply(self._free(ask.limit, bucket, now_us), bucket.fraction, bucket.out, grant, generation, alive)
            for (ask, bucket), grant, generation, alive in rows
        )
        return Reply(admitted, processes, replies, now_us)

    def bucket_count(self) -> int:
        """How many buckets are kept."""
        return len(self._buckets)

    def drop_idle(self, limits: Iterable[Limit], now_us: int) -> None:
        """Drop those buckets that nobody leases and that are full again: an unknown bucket is full too."""
        for limit in limits:
            bucket = self._buckets.get(limit.limit_id)
            if bucket is None:
                continue
            self._advance(limit, bucket, now_us)
            if not bucket.leases and (axis_of(limit) == SLOTS or bucket.level >= limit.burst):
                del self._buckets[limit.limit_id]

    def _count_processes(self, process_id: str, now_us: int) -> int:
        self._processes[process_id] = now_us
        for name, seen_us in list(self._processes.items()):
            if now_us - seen_us > FORGET_US:
                del self._processes[name]
                self._sequences.pop(name, None)
        return sum(1 for seen_us in self._processes.values() if now_us - seen_us <= PROCESS_TTL_US)

    def _is_new(self, attempt: Attempt) -> bool:
        if attempt.sequence == 0:
            return True
        if attempt.sequence <= self._sequences.get(attempt.process_id, 0):
            return False
        self._sequences[attempt.process_id] = attempt.sequence
        return True

    def _bucket(self, limit: Limit, now_us: int) -> Bucket:
        bucket = self._buckets.get(limit.limit_id)
        if bucket is None:
            bucket = Bucket(limit.burst, 0, now_us, now_us)
            if self._empty_until_us is not None:
                bucket.level, bucket.at_us = 0, self._empty_until_us
            self._buckets[limit.limit_id] = bucket
        self._advance(limit, bucket, now_us)
        return bucket

    def _advance(self, limit: Limit, bucket: Bucket, now_us: int) -> None:
        """Bring the bucket to `now_us`, ending each lease at its own time: until then it holds the refill back."""
        over = sorted((lease.ends_us, lease_id) for lease_id, lease in bucket.leases.items() if lease.ends_us <= now_us)
        for ends_us, lease_id in over:
            self._refill(limit, bucket, ends_us)
            del bucket.leases[lease_id]
        self._refill(limit, bucket, now_us)

    def _refill(self, limit: Limit, bucket: Bucket, until_us: int) -> None:
        if limit.dimension is Dimension.CONCURRENCY:
            return
        passed_us = max(0, until_us - bucket.at_us)
        bucket.at_us += passed_us
        tokens, bucket.fraction = divmod(bucket.fraction + limit.amount * passed_us, limit.period_s * 1_000_000)
        bucket.level = min(bucket.level + tokens, limit.burst)
        self._cap(limit, bucket)

    def _cap(self, limit: Limit, bucket: Bucket) -> None:
        """Restore level + out + pools <= burst: shrink the oldest pools first, then the level."""
        over = sum(pool[1] for pool in bucket.pools) - (limit.burst - bucket.out - bucket.level)
        if bucket.pools and over > 0:
            bucket.generation = max(bucket.at_us, bucket.generation + 1)
            while bucket.pools and over > 0:
                cut = min(over, bucket.pools[0][1])
                bucket.pools[0][1] -= cut
                over -= cut
                if bucket.pools[0][1] == 0:
                    del bucket.pools[0]
        self._top(limit, bucket)

    @staticmethod
    def _top(limit: Limit, bucket: Bucket) -> None:
        """A full bucket keeps no fraction. Below the top, the pools' last token stands for it until it is whole."""
        cap = limit.burst - bucket.out
        if bucket.level >= cap:
            bucket.level, bucket.fraction = cap, 0

    def _report(self, ask: Ask, bucket: Bucket) -> int:
        """Apply what a process says of its lease; the generation of its spends (0: not all of them were on lease)."""
        lease = bucket.leases.get(ask.lease_id)
        spent = 0
        if lease is not None:
            spent = min(ask.spent, lease.tokens)
            returned = min(ask.returned, lease.tokens - spent)
            lease.tokens -= spent + returned
            if ask.limit.dimension is not Dimension.CONCURRENCY:
                self._pool(bucket, spent)
                bucket.level += returned
        bucket.level -= ask.debt
        paid = sum(self._credit(bucket, generation, tokens) for generation, tokens in ask.credits)
        bucket.level += paid
        # Of a bucket that is full but for its pools, their last token stands for the fraction: it is paid only once.
        if paid and bucket.level + bucket.out + sum(pool[1] for pool in bucket.pools) >= ask.limit.burst:
            bucket.fraction = 0
        if ask.limit.dimension is not Dimension.CONCURRENCY:
            self._top(ask.limit, bucket)
        return bucket.generation if spent == ask.spent else 0

    def _pool(self, bucket: Bucket, spent: int) -> None:
        if spent and bucket.pools and bucket.pools[-1][0] == bucket.generation:
            bucket.pools[-1][1] += spent
        elif spent:
            bucket.pools.append([bucket.generation, spent])
            del bucket.pools[:-MAX_POOLS]

    def _credit(self, bucket: Bucket, generation: int, tokens: int) -> int:
        """The part of a credit that the bucket would have kept: at most what is left of the pool it was spent into."""
        for pool in bucket.pools:
            if pool[0] == generation:
                paid = min(tokens, pool[1])
                pool[1] -= paid
                return paid
        return 0

    def _renew(self, ask: Ask, bucket: Bucket, now_us: int) -> None:
        slots = ask.limit.dimension is Dimension.CONCURRENCY
        if slots and ask.held and ask.lease_id not in bucket.leases:
            bucket.leases[ask.lease_id] = _Lease(ask.held, now_us + SLOT_TTL_US)
        lease = bucket.leases.get(ask.lease_id)
        if lease is None:
            return
        if lease.tokens == 0:
            del bucket.leases[ask.lease_id]
        elif ask.renew:
            lease.ends_us = now_us + (SLOT_TTL_US if slots else LEASE_TTL_US)

    def _free(self, limit: Limit, bucket: Bucket, now_us: int) -> int:
        if limit.dimension is not Dimension.CONCURRENCY:
            return bucket.level
        if self._empty_until_us is not None and now_us < self._empty_until_us:
            return 0
        return max(0, limit.amount - bucket.out)

    def _passes(self, pairs: list[tuple[Ask, Bucket]], now_us: int) -> bool:
        return all(ask.need == 0 or ask.need <= self._free(ask.limit, bucket, now_us) for ask, bucket in pairs)

    def _grant(self, ask: Ask, bucket: Bucket, processes: int, now_us: int) -> int:
        """Move `need`, and as much of `want` as this process's share of the rest allows, onto its lease."""
        rest = self._free(ask.limit, bucket, now_us) - ask.need
        tokens = ask.need + max(0, min(ask.want, rest // (SHARE_DIVISOR * processes)))
        if tokens == 0:
            return 0
        slots = ask.limit.dimension is Dimension.CONCURRENCY
        ends_us = now_us + (SLOT_TTL_US if slots else LEASE_TTL_US)
        lease = bucket.leases.setdefault(ask.lease_id, _Lease(0, ends_us))
        lease.tokens += tokens
        lease.ends_us = ends_us
        if not slots:
            bucket.level -= tokens
        return tokens
