"""A fleet of processes with leases on one store, on one exact clock (microseconds): what the properties of limits play.

Owns: the steps of a schedule, late and lost messages, crashes, a store that forgets, the log of admissions, and the
test of the bound on it. Does not own: drawing schedules or planting faults (the property tests).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.leases import Leases
from controlplane.rate_limit import RESTART_US, Admitted, Attempt, Buckets, Cost, Refused, Reply, Ticket
from controlplane.tenancy import Dimension, Limit

# A process gives a call up after this long; the store may still execute it.
DEADLINE_US = 800_000
TICK_US = 50_000


@dataclass(frozen=True)
class Op:
    """One step of a schedule: wait, then act. Its call takes `there_us` and `back_us`; `lost` is the answer's fate."""

    action: str = "request"
    process: int = 0
    wait_us: int = 0
    size: int = 1
    there_us: int = 200
    back_us: int = 200
    lost: bool = False


@dataclass
class Running:
    """One admitted request of a live process."""

    ticket: Ticket
    at_us: int
    row: list[int]


@dataclass
class Process:
    """One simulated gateway process."""

    leases: Leases
    number: int
    alive: bool = True
    reporting: bool = False
    running: list[Running] = field(default_factory=list)
    next_tick_us: int = 0
    muted_until_us: int = 0


class Fleet:
    """N processes and a store on one clock; every admission is logged."""

    def __init__(self, limits: tuple[Limit, ...], buckets: type[Buckets], leases: type[Leases]) -> None:
        self.limits = limits
        self._buckets_type, self._leases_type = buckets, leases
        self.store = buckets()
        self.now_us = 10_000_000
        self._numbers = itertools.count()
        self.processes = [self._process() for _ in range(3)]
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.log: list[list[int]] = []
        """[time, requests, input tokens, output tokens], the larger of seen and kept while in flight."""
        self.most_running = 0
        self.refused = 0

    def _process(self) -> Process:
        number = next(self._numbers)
        return Process(self._leases_type(f"p{number}"), number, next_tick_us=self.now_us)

    def at(self, when_us: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_us, next(self._order), act))

    def run_until(self, until_us: int) -> None:
        while True:
            ticks = [p.next_tick_us for p in self.processes]
            when_us = min([until_us, *ticks, *(event[0] for event in self._events[:1])])
            self.now_us = max(self.now_us, when_us)
            if self._events and self._events[0][0] <= self.now_us:
                heapq.heappop(self._events)[2]()
            elif any(tick <= self.now_us for tick in ticks):
                self._tick_all()
            elif when_us >= until_us:
                return

    def _tick_all(self) -> None:
        for process in self.processes:
            if process.next_tick_us <= self.now_us:
                quiet = not any(lease.busy() for lease in process.leases._active)
                process.next_tick_us = self.now_us + (60_000_000 if quiet else TICK_US)
                if self.now_us >= process.muted_until_us:
                    self.report(process, Op(there_us=500, back_us=500))

    # ---- messages

    def _call(self, attempt: Attempt, op: Op, answer: Callable[[Reply | None], None]) -> None:
        """The request reaches the store after `there_us`, the reply the caller after `back_us`; each may be lost."""
        sent_us = self.now_us
        done: list[bool] = []

        def finish(reply: Reply | None) -> None:
            if not done:
                done.append(True)
                answer(reply)

        def execute() -> None:
            reply = self.store.attempt(attempt, self.now_us)
            if not op.lost:
                self.at(self.now_us + op.back_us, lambda: finish(reply))

        self.at(sent_us + op.there_us, execute)
        self.at(sent_us + DEADLINE_US, lambda: finish(None))

    def request(self, process: Process, cost: Cost, op: Op) -> None:
        process.next_tick_us = min(process.next_tick_us, self.now_us + TICK_US)
        decision = process.leases.try_spend(self.limits, cost, self.now_us * 1_000)
        if decision is not None:
            self._admit(process, decision)
            return
        plan = process.leases.plan(self.limits, cost, self.now_us * 1_000)
        if isinstance(plan, Refused):
            return
        sent_ns = self.now_us * 1_000

        def answer(reply: Reply | None) -> None:
            if not process.alive:
                return
            if reply is None:
                process.leases.abandon(plan)
                return
            decision = process.leases.merge(plan, reply, sent_ns, self.now_us * 1_000)
            if isinstance(decision, Admitted):
                self._admit(process, decision)
            else:
                self.refused += 1

        self._call(plan.attempt, op, answer)

    def _admit(self, process: Process, admitted: Admitted) -> None:
        process.next_tick_us = min(process.next_tick_us, self.now_us + TICK_US)
        cost = admitted.ticket.cost
        row = [self.now_us, cost.requests, cost.input_tokens, cost.output_tokens]
        self.log.append(row)
        process.running.append(Running(admitted.ticket, self.now_us, row))
        self.most_running = max(self.most_running, sum(len(p.running) for p in self.processes))

    def settle(self, process: Process, op: Op) -> None:
        if not process.running:
            return
        process.next_tick_us = min(process.next_tick_us, self.now_us + TICK_US)
        run = process.running.pop(op.size % len(process.running))
        kept = run.ticket.cost
        used = Cost(kept.input_tokens * (op.size % 3) // 2, kept.output_tokens * (op.size % 4) // 3, op.size % 2)
        process.leases.settle(run.ticket, used, self.now_us * 1_000)
        counted = (used.requests, used.input_tokens, used.output_tokens)
        run.row[1:] = [min(a, b) for a, b in zip(run.row[1:], counted, strict=True)]

    def report(self, process: Process, op: Op) -> None:
        if process.reporting or not process.alive:
            return
        process.leases.begin_round()
        report = process.leases.report(self.now_us * 1_000)
        if report is None:
            return
        process.reporting = True
        sent_ns = self.now_us * 1_000

        def answer(reply: Reply | None) -> None:
            process.reporting = False
            if not process.alive:
                return
            if reply is None:
                process.leases.report_failed(report)
            else:
                process.leases.reported(report, reply, sent_ns)

        self._call(report.attempt, op, answer)

    def crash(self, process: Process) -> None:
        process.alive = False
        process.running.clear()
        self.processes[self.processes.index(process)] = self._process()

    def lose_store(self) -> None:
        """A restart without its data; what is on its way is lost with the connections; every process notices now or
        when its next call fails, here at once for all but their leases' spending until then."""
        self._events = [event for event in self._events if event[2].__name__ != "execute"]
        heapq.heapify(self._events)
        self.store = self._buckets_type(self.now_us + RESTART_US)
        for process in self.processes:
            self.at(self.now_us + 300_000, process.leases.store_lost)


def replay(
    limits: tuple[Limit, ...], ops: list[Op], buckets: type[Buckets] = Buckets, leases: type[Leases] = Leases
) -> Fleet:
    """Run a schedule."""
    fleet = Fleet(limits, buckets, leases)
    for op in ops:
        fleet.run_until(fleet.now_us + op.wait_us)
        process = fleet.processes[op.process]
        if op.action == "request":
            fleet.request(process, Cost(op.size, op.size % 23), op)
        elif op.action == "burst":
            for _ in range(op.size):
                fleet.request(process, Cost(op.size % 7 + 1, op.size % 5 + 1), op)
        elif op.action == "report":
            fleet.report(process, op)
        elif op.action == "settle":
            fleet.settle(process, op)
        elif op.action == "settle_all":
            while process.running:
                fleet.settle(process, op)
        elif op.action == "crash":
            fleet.crash(process)
        elif op.action == "mute":
            process.muted_until_us = fleet.now_us + 2_500_000  # less than the 3 s that a slot lease has left at least
        else:
            fleet.lose_store()
    fleet.run_until(fleet.now_us + 500_000)
    return fleet


def overshoot(fleet: Fleet) -> str:
    """The first interval in which more was admitted than the bound; empty when there is none."""
    for limit in fleet.limits:
        if limit.dimension is Dimension.CONCURRENCY:
            if fleet.most_running > limit.amount:
                return f"{fleet.most_running} in flight, {limit}"
            continue
        column = {Dimension.REQUESTS: 1, Dimension.INPUT_TOKENS: 2, Dimension.OUTPUT_TOKENS: 3}[limit.dimension]
        lowest = 0  # of (amount before the interval) * period - rate * start
        total, scale = 0, limit.period_s * 1_000_000
        first = True
        for row in fleet.log:
            before = total * scale - limit.amount * row[0]
            lowest = before if first else min(lowest, before)
            first = False
            total += row[column]
            over = total * scale - limit.amount * row[0] - lowest - limit.burst * scale
            if over > 0:
                return f"{over / scale} above the bound at {row[0]} us, {limit}"
    return ""


def limit_of(dimension: Dimension, amount: int, burst: int, period_s: int = 1) -> Limit:
    return Limit(f"l-{dimension.value}", "org", "o", None, dimension, amount, period_s, burst)
