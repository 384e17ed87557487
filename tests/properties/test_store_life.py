"""Overshoot 0 through any order of clean stops, crashes that lose writes, and starts of the server of limits.

The server, its disk, the mark of a clean stop and gateways that live or die are simulated on one clock. The property:
over every interval admitted <= burst + amount * t / period, and never more in flight than the slots. It is shown to
catch planted faults.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.rate_limit import Ask, Attempt, Buckets
from controlplane.store_life import NOT_CLEAN, Caller, CleanStop, Clock, Life, next_life
from controlplane.tenancy import Dimension, Limit
from tests.exploring import examples

RATE = Limit("rate", "org", "o", None, Dimension.REQUESTS, 6, 60, 6)
SLOTS = Limit("slots", "org", "o", None, Dimension.CONCURRENCY, 2, 1, 0)
TICK_US = 500_000
OPENING_US = 1_000_000
Rule = Callable[[Life | None, Caller, CleanStop | None, Iterable[int], Clock], Life]


@dataclass
class Memory:
    """What the server holds, and what of it is on the disk when copied there."""

    life: Life | None = None
    follows: tuple[str, CleanStop] | None = None
    buckets: Buckets = field(default_factory=Buckets)
    seen_us: dict[str, int] = field(default_factory=dict)


@dataclass
class Gateway:
    """A process: which run it last met, and the requests with a slot that it runs."""

    name: str
    met: str = ""
    met_other: bool = False
    lease: int = 0
    running: int = 0


class Machine:
    """A server with its disk, and two gateways at a time."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.now_us = 1_000_000_000
        self._numbers = itertools.count(1)
        self.memory: Memory | None = None
        self.disk = Memory()
        self.mark: CleanStop | None = None
        self.used = False
        self.run, self.started_us = "", 0
        self.gateways = [self._gateway(), self._gateway()]
        self.admitted_us: list[int] = []
        self.most_running = 0

    def _gateway(self) -> Gateway:
        return Gateway(f"g{next(self._numbers)}")

    # ---- the server

    def start(self) -> None:
        if self.memory is not None:
            return
        self.run, self.started_us = f"run{next(self._numbers)}", self.now_us
        clean = self.take()
        self.memory = copy.deepcopy(self.disk)
        if clean is not None:
            doubt = clean.doubt or (self.memory.follows is not None and self.memory.follows[1].doubt)
            self.memory.follows = (self.run, replace(clean, doubt=doubt))

    def take(self) -> CleanStop | None:
        mark, self.mark = self.mark, None
        unmarked = NOT_CLEAN if self.used else None
        self.used = True
        return mark or unmarked

    def sync(self) -> None:
        if self.memory is not None:
            self.disk = copy.deepcopy(self.memory)

    def crash(self) -> None:
        self.memory = None

    def stop(self) -> None:
        if self.memory is not None:
            self.flush()
            self.mark = CleanStop(self.run, self.now_us)
            self.memory = None

    def flush(self) -> None:
        self.sync()

    # ---- gateways

    def call(self, gateway: Gateway, need: int, slots: int) -> bool:
        """One attempt of a gateway, as the script makes it; False: refused, or the server is down."""
        memory = self.memory
        if memory is None:
            return False
        if gateway.met != self.run:
            gateway.lease += 1
            gateway.met_other = gateway.met_other or gateway.met != ""
        life = self._meet(memory, gateway)
        memory.seen_us[gateway.name] = self.now_us
        if life.empty_until_us == 0 and self.now_us < life.opened_us + OPENING_US:
            return False
        lease = f"{gateway.name}.{gateway.lease}"
        asks = (
            Ask(RATE, f"{lease}.{next(self._numbers)}", need=need),  # spent at once, reported never
            Ask(SLOTS, lease, need=slots, held=gateway.running),
        )
        return memory.buckets.attempt(Attempt(gateway.name, 0, asks), self.now_us).admitted

    def _meet(self, memory: Memory, gateway: Gateway) -> Life:
        follows = memory.follows[1] if memory.follows is not None and memory.follows[0] == self.run else None
        caller = Caller(self.run, gateway.met != "", gateway.met_other, (self.now_us - self.started_us) // 1_000_000)
        gateway.met = self.run
        life = self._rule(memory.life, caller, follows, memory.seen_us.values(), Clock(self.now_us, OPENING_US))
        if memory.life is None or life.era != memory.life.era or life.empty_until_us != memory.life.empty_until_us:
            memory.buckets = Buckets(life.empty_until_us or None)
        memory.life = life
        return life

    def request(self, number: int) -> None:
        if self.call(self.gateways[number], 1, 0):
            self.admitted_us.append(self.now_us)

    def run_one(self, number: int) -> None:
        gateway = self.gateways[number]
        if self.call(gateway, 0, 1):
            gateway.running += 1
            self.most_running = max(self.most_running, sum(one.running for one in self.gateways))

    def wait(self, duration_us: int) -> None:
        for _ in range(duration_us // TICK_US):
            self.now_us += TICK_US
            for gateway in self.gateways:
                if gateway.met:
                    self.call(gateway, 0, 0)

    def end(self, number: int, *, gently: bool) -> None:
        """Gently: it leaves with nothing held, and says so."""
        gateway = self.gateways[number]
        if gently and self.memory is not None:
            self.memory.seen_us.pop(gateway.name, None)
        self.gateways[number] = self._gateway()

    def act(self, action: str) -> None:
        name, _, argument = action.partition(" ")
        match name:
            case "request":
                self.request(int(argument))
            case "slot":
                self.run_one(int(argument))
            case "wait":
                self.wait(int(argument) * TICK_US)
            case "leave" | "kill":
                self.end(int(argument), gently=name == "leave")
            case _:
                {"start": self.start, "sync": self.sync, "crash": self.crash, "stop": self.stop}[name]()

    def fault(self) -> str:
        """The first interval with more than the bound; empty when there is none."""
        if self.most_running > SLOTS.amount:
            return f"{self.most_running} in flight"
        times = self.admitted_us
        for first, last in itertools.combinations_with_replacement(range(len(times)), 2):
            allowed = RATE.burst * 60_000_000 + RATE.amount * (times[last] - times[first])
            if (last - first + 1) * 60_000_000 > allowed:
                return f"{last - first + 1} in {(times[last] - times[first]) / 1e6} s"
        return ""


def replay(actions: list[str], machine: type[Machine] = Machine, rule: Rule = next_life) -> str:
    made = machine(rule)
    for action in actions:
        made.act(action)
    return made.fault()


ACTIONS = st.lists(
    st.sampled_from(
        ["request 0"] * 4 + ["request 1"] * 2 + ["slot 0", "slot 1", "sync", "crash"] + ["start"] * 4 + ["stop"] * 2
        + ["leave 0", "leave 1"] * 2 + ["kill 0", "kill 1", "wait 1", "wait 3", "wait 5", "wait 11", "wait 30"]
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=examples(400), deadline=None)
@given(actions=ACTIONS)
def test_no_order_of_stops_and_crashes_admits_more_than_the_bound(actions: list[str]) -> None:
    assert replay(["start", *actions]) == ""


def test_a_clean_stop_gives_up_nothing() -> None:
    machine = Machine(next_life)
    use = ["request 0"] * 4 + ["leave 0", "stop", "wait 1", "start"]
    for action in ["start", "wait 4", *use, *["request 1"] * 9]:
        machine.act(action)
    assert len(machine.admitted_us) == 6


# ---- planted faults: the same property must find each


class MarkStays(Machine):
    """Leaves the mark for later starts."""

    def take(self) -> CleanStop | None:
        return self.mark


class FolderIsForgotten(Machine):
    """Takes a folder without a mark for a new one."""

    def take(self) -> CleanStop | None:
        mark, self.mark = self.mark, None
        return mark


class StopDoesNotFlush(Machine):
    """Leaves the mark although the last writes are not on the disk."""

    def flush(self) -> None:
        """Nothing."""


def any_stop(kept: Life | None, caller: Caller, follows: CleanStop | None, seen: Iterable[int], at: Clock) -> Life:
    """Trusts whatever clean stop it is told of, also that of another run than the store was left by."""
    if kept is not None and follows is not None and follows.run_id:
        follows = replace(follows, run_id=kept.run_id)
    return next_life(kept, caller, follows, seen, at)


def any_process(kept: Life | None, caller: Caller, follows: CleanStop | None, seen: Iterable[int], at: Clock) -> Life:
    """Trusts a clean stop although processes lived through it."""
    return next_life(kept, caller, follows, (), at)


def no_doubt(kept: Life | None, caller: Caller, follows: CleanStop | None, seen: Iterable[int], at: Clock) -> Life:
    """Takes a store without memory for a new one whenever the last stop was clean, whatever was before that."""
    doubtless = replace(follows, doubt=False) if follows is not None and follows.run_id else follows
    return next_life(kept, caller, doubtless, seen, at)


SIX = ["request 0"] * 6
LEFT = ["wait 4", "request 0", "sync", "leave 0", "stop", "start"]
FAULTS: list[tuple[type[Machine], Rule, list[str]]] = [
    (MarkStays, next_life, [*LEFT, *SIX, "kill 0", "crash", "start", *SIX]),
    (StopDoesNotFlush, next_life, ["wait 4", "request 0", "leave 0", "sync", *SIX, "leave 0", "stop", "start", *SIX]),
    (MarkStays, any_stop, [*LEFT, "sync", *SIX, "kill 0", "crash", "start", *SIX]),
    (FolderIsForgotten, next_life, ["wait 4", *SIX, "kill 0", "crash", "start", "wait 4", *SIX]),
    (Machine, no_doubt, ["wait 4", *SIX, "kill 0", "crash", "start", "stop", "start", "wait 4", *SIX]),
    (Machine, any_process, ["wait 4", "slot 0", "slot 0", "stop", "wait 11", "start", "slot 1"]),
]


@pytest.mark.parametrize(
    ("machine", "rule", "actions"), FAULTS, ids=["mark stays", "no flush", "any stop", "folder", "doubt", "living"]
)
def test_the_property_finds_a_planted_fault(machine: type[Machine], rule: Rule, actions: list[str]) -> None:
    assert replay(["start", *actions]) == ""
    assert replay(["start", *actions], machine, rule) != ""
