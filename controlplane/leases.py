"""The process's side of limits: what it holds on lease, what it has spent of it, and what it must tell the store.

Owns: spending from leases without I/O (`try_spend`), the plan of one atomic attempt and the merging of its reply, the
settlement of tickets, and the plan of the background report. Does not own: how much one lease should hold and when it
is told of (`lease`), the store's algorithm (`rate_limit.Buckets`), the connection and the clock
(`adapters.limits_redis`). Pure: time is an argument (monotonic ns of this process).

A lease ends here before it ends in the store: its local end is counted from before the call was sent, and is shorter.
Whatever is not certain is lost, never doubled: a call without an answer makes this process take a new lease id, so that
tokens it may have been granted end unspent in the store. Reports carry a number and are sent again until answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from controlplane.lease import (
    FIRST_WISH,
    IDLE_NS,
    LEASE_LOCAL_NS,
    RENEW_NS,
    SLOT_LOCAL_NS,
    Batch,
    Lease,
)
from controlplane.rate_limit import (
    LEASE_WAIT_S,
    NO_LIMITS,
    SLOTS,
    Admitted,
    Ask,
    Attempt,
    BucketReply,
    Cost,
    LimitView,
    RefusalReason,
    Refused,
    Reply,
    Ticket,
    capacity_of,
    state_of,
    wait_s,
    waits_longer,
)
from controlplane.tenancy import Limit

# Two grants closer than this: the lease is too small for the traffic, so the next wish doubles.
BUSY_NS = 250_000_000
# Spends of a small limit are reported at once; they reach the store within this time (a report interval and a call).
REPORT_WAIT_S = 0.1
# Leases in one report: bounds the time one call may hold the store.
REPORT_MAX = 64
# A limit not used for this long is forgotten.
FORGET_NS = 60_000_000_000


@dataclass(slots=True)
class Part:
    """Mutable: one limit's part in a request while it is being decided.

    `taken` came from the lease, `ask.need` is asked of the store.
    """

    lease: Lease
    ask: Ask
    cost: int
    taken: int


@dataclass(slots=True)
class Plan:
    """Mutable: a request on its way to the store; the reply fills it."""

    cost: Cost
    parts: list[Part]
    attempt: Attempt


@dataclass(slots=True)
class Report:
    """Mutable: a numbered report on its way to the store, kept and sent again with its number until it is answered."""

    leases: list[Lease]
    batches: list[Batch]
    attempt: Attempt
    again: bool = field(default=False)


class Leases:
    """Every lease of one process. Not thread-safe: one event loop owns it.

    Without `ahead` nothing is leased beyond the request that asks (a store that is in the process needs no leases).
    """

    def __init__(self, process_id: str, *, ahead: bool = True) -> None:
        self._ahead = ahead
        self._process_id = process_id
        self._leases: dict[str, Lease] = {}
        self._active: list[Lease] = []
        """Those that the store may have to hear of: a round looks at each once, and at no other."""
        self._looked_at_count = 0
        self._idle: dict[str, Lease] = {}
        """The others, by limit, in the order in which they fell idle."""
        self._unanswered: Report | None = None
        self._sequence = 0
        self._lease_number = 0
        self._round = 0
        self._forgotten: list[Limit] = []
        self.process_count = 1
        self.urgent = False
        """Something of a small limit should not wait for the next report interval: a spend, or a slot that is free."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def active_count(self) -> int:
        """Leases that each round looks at: those that hold, have spent or owe something."""
        return len(self._active)

    # ---- the hot path

    def try_spend(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | None:
        """Take the whole cost from leases held now, or nothing (None: ask the store). About 0.4 us per limit."""
        costs = (cost.requests, cost.input_tokens, cost.output_tokens, 1)
        find = self._leases.get
        spends: list[tuple[object, int, object]] = []
        add = spends.append
        requests: Lease | None = None
        tokens: Lease | None = None
        for limit in limits:
            lease = find(limit.limit_id)
            if lease is None:
                return self._undo(spends)
            axis = lease.axis
            amount = costs[axis]
            if amount > lease.left or now_ns >= lease.valid_ns or (lease.limit is not limit and lease.limit != limit):
                if amount:
                    return self._undo(spends)
                continue
            lease.left -= amount
            lease.last_use_ns = now_ns
            add((lease, amount, lease.batch))
            if axis == SLOTS:
                lease.in_use += 1
                continue
            lease.spent += amount
            if axis == 0:
                if requests is None or lease.base + lease.left < requests.base + requests.left:
                    requests = lease
            elif tokens is None or lease.base + lease.left < tokens.base + tokens.left:
                tokens = lease
        return Admitted(Ticket(cost, spends), _view(requests, tokens))

    @staticmethod
    def _undo(spends: list[tuple[object, int, object]]) -> None:
        for lease, amount, _ in spends:
            assert isinstance(lease, Lease)
            lease.left += amount
            if lease.axis == SLOTS:
                lease.in_use -= 1
            else:
                lease.spent -= amount

    # ---- one atomic attempt

    def plan(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Plan | Refused:
        """What to ask the store for this request. A cost above a limit's whole burst is refused here: no state of the
        store could ever admit it."""
        costs = (cost.requests, cost.input_tokens, cost.output_tokens, 1)
        once = {limit.limit_id: limit for limit in limits}  # by id: hashing a limit costs as much as asking for it
        leases = [self._lease(limit, now_ns) for limit in once.values()]
        for lease in leases:
            if costs[lease.axis] > capacity_of(lease.limit):
                needed, left = costs[lease.axis], capacity_of(lease.limit)
                return Refused(RefusalReason.TOO_LARGE, lease.limit, needed, left, None, view_of(leases))
        parts = [self._part(lease, costs[lease.axis], now_ns) for lease in leases]
        return Plan(cost, parts, Attempt(self._process_id, 0, tuple(part.ask for part in parts)))

    def _part(self, lease: Lease, amount: int, now_ns: int) -> Part:
        if now_ns >= lease.valid_ns and not lease.fresh():
            self._rotate(lease)
        lease.asked = amount
        self._measure(lease)
        taken = min(lease.left, amount)
        need = amount - taken
        want = 0
        if need and not lease.small:
            # Doubled once per grant, not once per request being decided: sixty of them in one tick are one sign.
            busy = now_ns - lease.granted_ns < BUSY_NS and not lease.doubled
            lease.doubled = lease.doubled or busy
            lease.target = lease.wish(max(lease.target * (2 if busy else 1), FIRST_WISH * amount), self.process_count)
            want = lease.target
        # Only what the store may not know of: a request is not in line with the reports, so one on its way while
        # a slot goes back would bring that slot to life again, for as long as the lease is in use.
        held = lease.held() if lease.axis == SLOTS and not lease.registered else 0
        ask = Ask(lease.limit, lease.id, need=need, want=want, held=held)
        lease.left -= taken
        lease.pending += taken
        lease.last_use_ns = now_ns
        self._activate(lease)
        return Part(lease, ask, amount, taken)

    def merge(self, plan: Plan, reply: Reply, sent_ns: int, now_ns: int) -> Admitted | Refused | None:
        """Take the reply in. `sent_ns` is from before the call was sent, `now_ns` from after the reply came.

        None: a lease that the request drew on had ended in the store before the call got there; ask again.
        """
        self.heard(reply)
        if any(part.taken and not bucket.known for part, bucket in zip(plan.parts, reply.buckets, strict=True)):
            self._keep_grants(plan, reply, sent_ns)
            return None
        spends: list[tuple[object, int, object]] = []
        for part, bucket in zip(plan.parts, reply.buckets, strict=True):
            lease = part.lease
            self._take_grant(lease, part.ask, bucket, (sent_ns, reply.at_us))
            self._measure(lease)  # the reply may be the first to tell of other processes
            self._activate(lease)
            lease.pending -= part.taken
            if bucket.granted:
                lease.synced_ns = now_ns  # it has just been renewed; what this request spends can wait
            if not reply.admitted:
                if lease.id == part.ask.lease_id:
                    lease.left += part.taken
                continue
            spends.append((lease, part.cost, self._spend_granted(part, now_ns)))
        view = view_of([part.lease for part in plan.parts])
        if reply.admitted:
            return Admitted(Ticket(plan.cost, spends), view)
        # Requests that asked beside this one may have been granted more than they took.
        spare = self.try_spend(tuple(part.lease.limit for part in plan.parts), plan.cost, now_ns)
        return spare or self._refusal(plan, reply, view)

    def _keep_grants(self, plan: Plan, reply: Reply, sent_ns: int) -> None:
        for part, bucket in zip(plan.parts, reply.buckets, strict=True):
            self._take_grant(part.lease, part.ask, bucket, (sent_ns, reply.at_us))
            self._activate(part.lease)
            part.lease.pending -= part.taken
            if bucket.known and part.lease.id == part.ask.lease_id:
                part.lease.left += part.taken

    def _spend_granted(self, part: Part, now_ns: int) -> Batch:
        lease = part.lease
        lease.last_use_ns = now_ns
        same = lease.id == part.ask.lease_id
        if lease.axis == SLOTS:
            lease.in_use += 1
            if same:
                lease.left -= part.ask.need
            else:  # the slot is under an id given up meanwhile: register all that is held under a new one
                self._rotate(lease)
            return lease.batch
        if same:
            lease.left -= part.ask.need
            lease.spent += part.cost
            self.urgent = self.urgent or lease.small
            return lease.batch
        lost = Batch()
        lost.lost = True
        return lost

    def _take_grant(self, lease: Lease, ask: Ask, bucket: BucketReply, times: tuple[int, int]) -> None:
        """`times`: when the call was sent (ns, this process), when the store decided (us, the store)."""
        if lease.id != ask.lease_id:
            return
        sent_ns, at_us = times
        held = lease.left > 0 or lease.spent > 0
        # What was granted after the store took this call is good: its answer may have overtaken this one.
        if lease.axis != SLOTS and not bucket.known and held and lease.since_us < at_us:
            self._rotate(lease)  # it ended in the store while the call was on its way
            return
        lease.base = max(0, bucket.level)
        if bucket.granted:
            lease.since_us = min(lease.since_us, at_us) if held else at_us
            lease.left += bucket.granted
            lease.granted_ns = sent_ns
            lease.doubled = False
        if ask.renew or bucket.granted:
            lease.valid_ns = max(lease.valid_ns, self.local_end_ns(lease, sent_ns))

    def local_end_ns(self, lease: Lease, sent_ns: int) -> int:
        """Until when a lease renewed by a call that was sent at `sent_ns` may be spent from."""
        return sent_ns + (SLOT_LOCAL_NS if lease.axis == SLOTS else LEASE_LOCAL_NS)

    def _refusal(self, plan: Plan, reply: Reply, view: LimitView) -> Refused:
        """The failing limit with the longest wait."""
        worst: Refused | None = None
        for part, bucket in zip(plan.parts, reply.buckets, strict=True):
            if part.ask.need == 0 or part.ask.need <= bucket.level:
                continue
            limit = part.ask.limit
            wait = wait_s(limit, bucket.level, bucket.fraction, part.ask.need)
            if part.lease.axis == SLOTS:
                wait = LEASE_WAIT_S
            elif wait is not None and part.ask.need + bucket.out > limit.burst:
                wait += REPORT_WAIT_S if part.lease.small else LEASE_WAIT_S  # leases hold the refill back until then
            left = max(0, bucket.level + part.taken)
            found = Refused(RefusalReason.RATE_LIMIT, limit, part.cost, left, wait, view)
            if worst is None or waits_longer(found, worst):
                worst = found
        assert worst is not None, "the store refuses only when a need is not met"
        return worst

    def may_come_back(self, refused: Refused) -> bool:
        """Whether what was missing may be on its way to the store, back from a request that has just ended: slots and
        reserved tokens of a small limit, which are told of at once."""
        lease = None if refused.limit is None else self._leases.get(refused.limit.limit_id)
        return refused.reason is RefusalReason.RATE_LIMIT and lease is not None and lease.small and lease.axis != 0

    def abandon(self, plan: Plan) -> Refused:
        """The call's fate is unknown: give up every lease it touched; the store may have granted more under its id."""
        for part in plan.parts:
            part.lease.pending -= part.taken
            if part.lease.id == part.ask.lease_id:
                self._rotate(part.lease)
        view = view_of([part.lease for part in plan.parts])
        return Refused(RefusalReason.STORE_UNAVAILABLE, None, 0, 0, LEASE_WAIT_S, view)

    # ---- settlement

    def settle(self, ticket: Ticket, used: Cost, now_ns: int) -> None:
        """Replace the reservation by `used`, once: a second call changes nothing."""
        if ticket.settled:
            return
        ticket.settled = True
        useds = (used.requests, used.input_tokens, used.output_tokens, 1)
        spends = cast(list[tuple[Lease, int, Batch]], ticket.spends)  # ours: no other port has made it
        for lease, reserved, batch in spends:
            axis = lease.axis
            if axis == SLOTS:
                self._free_slot(lease, now_ns)
            elif reserved > useds[axis]:
                self._pay_back(lease, reserved - useds[axis], batch)
                self.urgent = self.urgent or lease.small
            elif reserved < useds[axis]:
                self._owe(lease, useds[axis] - reserved, now_ns)
            if not lease.active:
                self._activate(lease)

    def _free_slot(self, lease: Lease, now_ns: int) -> None:
        lease.in_use -= 1
        if now_ns < lease.valid_ns:
            lease.left += 1
            lease.last_use_ns = now_ns
            self.urgent = self.urgent or lease.small

    @staticmethod
    def _pay_back(lease: Lease, tokens: int, batch: Batch) -> None:
        if batch is lease.batch:  # not reported yet: the store still counts these as on lease
            lease.spent -= tokens
            lease.left += tokens
        elif not batch.lost:
            lease.credits.append((batch, tokens))

    @staticmethod
    def _owe(lease: Lease, tokens: int, now_ns: int) -> None:
        own = min(lease.left, tokens) if now_ns < lease.valid_ns else 0
        lease.left -= own
        lease.spent += own
        lease.debt += tokens - own

    # ---- the background report

    def begin_round(self) -> None:
        """Start a round of reports: each lease is told of at most once in a round."""
        self._round += 1
        self._looked_at_count = 0
        self.urgent = False

    def report(self, now_ns: int) -> Report | None:
        """The next numbered report of the round, or the one that was not answered; None: nothing to say."""
        if self._unanswered is not None:
            return self._unanswered
        due: dict[str, Lease] = {}
        while self._looked_at_count < len(self._active) and len(due) < REPORT_MAX:
            lease = self._active[self._looked_at_count]
            self._looked_at_count += 1
            if lease.round != self._round and lease.due(now_ns):
                due.setdefault(lease.limit.limit_id, lease)
        if not due:
            self._set_aside()
            self._forget(now_ns)
            return None
        return self._new_report(list(due.values()), now_ns)

    def _new_report(self, due: list[Lease], now_ns: int) -> Report:
        self._sequence += 1
        batches = [lease.batch for lease in due]
        asks = tuple(self._tell(lease, now_ns) for lease in due)
        self._unanswered = Report(due, batches, Attempt(self._process_id, self._sequence, asks))
        return self._unanswered

    def reported(self, report: Report, reply: Reply, sent_ns: int) -> None:
        """The store has applied `report`."""
        self.heard(reply)
        self._unanswered = None
        rows = zip(report.leases, report.batches, report.attempt.asks, reply.buckets, strict=True)
        for lease, batch, ask, bucket in rows:
            if ask.spent:
                batch.generation = bucket.generation
                batch.lost = bucket.generation == 0
            self._take_grant(lease, ask, bucket, (sent_ns, reply.at_us))
            self._activate(lease)
            lease.registered = lease.registered or lease.id == ask.lease_id

    def heard(self, reply: Reply) -> None:
        """Take in what every reply tells: how many processes live. A limit may be too small to be held ahead by two."""
        self.process_count = max(1, reply.process_count)

    def report_failed(self, report: Report) -> None:
        """No answer: it may or may not have been applied. It is sent again; leases it may have grown are given up."""
        for lease, ask in zip(report.leases, report.attempt.asks, strict=True):
            if lease.id == ask.lease_id:
                self._rotate(lease)
        if report.again:
            return
        asks = tuple(
            Ask(a.limit, a.lease_id, spent=a.spent, returned=a.returned, debt=a.debt, credits=a.credits, renew=False)
            for a in report.attempt.asks
        )
        attempt = Attempt(self._process_id, report.attempt.sequence, asks)
        self._unanswered = Report(report.leases, report.batches, attempt, again=True)

    def give_all_back(self, now_ns: int) -> None:
        """Make everything unspent due for return (the process ends, or it is drained)."""
        for lease in self._leases.values():
            lease.last_use_ns = min(lease.last_use_ns, now_ns - IDLE_NS)
            if lease.axis != SLOTS and lease.spent:
                lease.synced_ns = min(lease.synced_ns, now_ns - RENEW_NS)

    def store_lost(self) -> None:
        """The store lost its memory, or may have: nothing held counts any more; running requests register again."""
        for lease in self._leases.values():
            self._rotate(lease)

    def _tell(self, lease: Lease, now_ns: int) -> Ask:
        if now_ns >= lease.valid_ns and not lease.fresh():
            self._rotate(lease)
        self._measure(lease)
        idle = now_ns - lease.last_use_ns >= IDLE_NS
        if idle:
            lease.target = 0
        keep = 0 if lease.small or idle else 2 * lease.target
        returned = max(0, lease.left - keep)
        want = max(0, lease.target - lease.left) if lease.low() else 0
        credits = self._credits(lease)
        ask = Ask(
            lease.limit, lease.id, want=want, spent=lease.spent if lease.axis != SLOTS else 0, returned=returned,
            debt=lease.debt, credits=credits, held=lease.held() - returned if lease.axis == SLOTS else 0,
        )  # fmt: skip
        lease.left -= returned
        if lease.spent:
            lease.batch = Batch()
        lease.spent = lease.debt = 0
        lease.synced_ns = now_ns
        lease.round = self._round
        return ask

    @staticmethod
    def _credits(lease: Lease) -> tuple[tuple[int, int], ...]:
        """Credits whose pool is known, by pool; those still unknown wait for the answer of the report before."""
        known: dict[int, int] = {}
        waiting = []
        for batch, tokens in lease.credits:
            if batch.generation:
                known[batch.generation] = known.get(batch.generation, 0) + tokens
            elif not batch.lost:
                waiting.append((batch, tokens))
        lease.credits = waiting
        return tuple(known.items())

    # ---- bookkeeping

    def _lease(self, limit: Limit, now_ns: int) -> Lease:
        lease = self._leases.get(limit.limit_id)
        if lease is None:
            lease = self._leases[limit.limit_id] = Lease(limit, self._next_id(), now_ns)
        lease.limit = limit
        return lease

    def _next_id(self) -> str:
        self._lease_number += 1
        return f"{self._process_id}.{self._lease_number}"

    def _measure(self, lease: Lease) -> None:
        lease.measure(self.process_count)
        lease.small = lease.small or not self._ahead

    def _rotate(self, lease: Lease) -> None:
        """Leave the old id to end in the store, and start a new one: spare is gone, running requests register again."""
        lease.id = self._next_id()
        lease.left = lease.spent = 0
        lease.valid_ns = 0
        lease.batch.lost = True
        lease.batch = Batch()
        lease.registered = lease.in_use == 0
        if not lease.registered:
            self._activate(lease)

    def _activate(self, lease: Lease) -> None:
        """Report on this lease from now on, also if it was forgotten while a request of it was still running."""
        if not lease.active:
            lease.active = True
            self._active.append(lease)
            self._leases.setdefault(lease.limit.limit_id, lease)
            if self._idle.get(lease.limit.limit_id) is lease:
                del self._idle[lease.limit.limit_id]

    def _set_aside(self) -> None:
        """Take what the store need not hear of any more out of the rounds."""
        busy: list[Lease] = []
        for lease in self._active:
            if lease.left or lease.busy():  # mostly the first
                busy.append(lease)
                continue
            lease.active = False
            if self._leases.get(lease.limit.limit_id) is lease:  # not one that another has replaced meanwhile
                self._idle[lease.limit.limit_id] = lease
        self._active = busy

    def _forget(self, now_ns: int) -> None:
        """Drop limits that nobody has used for long. One that was used later than its turn says waits for the next."""
        while self._idle:
            limit_id, lease = next(iter(self._idle.items()))
            if now_ns - lease.last_use_ns <= FORGET_NS:
                return
            del self._idle[limit_id], self._leases[limit_id]
            self._forgotten.append(lease.limit)

    def forgotten(self) -> list[Limit]:
        """Limits that were forgotten since the last call."""
        gone, self._forgotten = self._forgotten, []
        return gone


def view_of(leases: list[Lease]) -> LimitView:
    """The tightest request and token limits among `leases`."""
    rates = [lease for lease in leases if lease.axis != SLOTS]
    requests = min((lease for lease in rates if lease.axis == 0), key=_remaining, default=None)
    tokens = min((lease for lease in rates if lease.axis != 0), key=_remaining, default=None)
    return _view(requests, tokens)


def _remaining(lease: Lease) -> int:
    return lease.base + lease.left


def _view(requests: Lease | None, tokens: Lease | None) -> LimitView:
    if requests is None and tokens is None:
        return NO_LIMITS
    left = (None, None, None) if requests is None else state_of(requests.limit, _remaining(requests))
    right = (None, None, None) if tokens is None else state_of(tokens.limit, _remaining(tokens))
    return LimitView(*left, *right)
