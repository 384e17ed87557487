"""Routing against its own arithmetic, over random fleets and histories; each property is shown to catch planted faults.

The break-even between a warm busy engine and a cold idle one is computed here by hand, from the formula that the design
states, and both sides of it are asked. The histories check what must hold whatever happens: the pick is the cheapest of
those that may be picked, and no load is left when everything has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import exp, log1p

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from router.decision import RouteDecision
from router.endpoints import Ending, EngineSpeed, Finish, HopTable, LoadNews, Place, Ticket
from router.route import News, Router, RouterConfig
from tests.exploring import examples
from tests.fakes.fleet import Fleet, endpoint, prompt

# Tokens held by the warm engine: whole blocks of the graded ladder, at 4 bytes a token.
HELD_TOKENS = st.sampled_from([1_024, 2_048, 8_192, 20_480])
SPEEDS = st.builds(
    EngineSpeed,
    prefill_tok_per_s=st.floats(500, 20_000),
    prefill_overhead_s=st.floats(0, 0.2),
    decode_s_per_token=st.floats(0.005, 0.1),
    kv_capacity_tokens=st.none(),
    prefill_s_per_token2=st.sampled_from([0.0, 1e-8]),
    decode_s_per_running=st.sampled_from([0.0, 0.001]),
)

# Both sides of a break-even are asked this far from it: the router's tie, and two tokens of rounding at 500 tokens/s.
MARGIN_S = 0.006

TEXT = prompt(1, 24_000)

MUTANT_RUNS = settings(
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
)


def alone_s(speed: EngineSpeed, new_tokens: int, cached_tokens: int) -> float:
    """Prefill seconds on an idle engine, by the definition of EngineSpeed."""
    attention = speed.prefill_s_per_token2 * new_tokens * (cached_tokens + new_tokens / 2)
    return speed.prefill_overhead_s + new_tokens / speed.prefill_tok_per_s + attention


class Duel:
    """A warm engine with others' work on it, and an idle cold one in another region."""

    def __init__(self, warm: EngineSpeed, cold: EngineSpeed, held_tokens: int, make: Callable[..., Router]) -> None:
        self.warm, self.cold, self.held_tokens = warm, cold, held_tokens
        self.make = make
        self.new_tokens, self.output_tokens = 500, 20

    def pick(self, backlog_s: float, running: int) -> str:
        """Who gets the session's next turn."""
        config = RouterConfig(hops=HopTable(Place("", "here"), {("here", "there"): 0.050}))
        fleet = Fleet(
            [replace(endpoint("warm", self.warm), region="here"), replace(endpoint("cold", self.cold), region="there")]
        )
        fleet.router = self.make(config)
        fleet.router.set_endpoints(fleet.endpoints, fleet.now_s)
        first = fleet.pick(TEXT[: self.held_tokens * 4], exclude=frozenset({"cold"}))
        fleet.start(first)
        fleet.end(first)
        fleet.now_s += 3_600  # its prefill is long forgotten
        load = LoadNews("warm", backlog_s, int(backlog_s > 0), running, 1)
        fleet.router.hear("others", News(loads=(load,)), fleet.now_s)
        text = TEXT[: (self.held_tokens + self.new_tokens) * 4]
        return fleet.pick(text, self.output_tokens).endpoint.endpoint_id

    def advantage_s(self, running: int, waiting: int) -> float:
        """Seconds by which the warm engine, with `running` decodes and `waiting` prompts of no length, beats the cold
        one, when nothing has been prefilled for long."""
        warm, cold = self.warm, self.cold
        beside = running + waiting
        step_s = warm.decode_s_per_token + beside * warm.decode_s_per_running
        own_s = alone_s(warm, self.new_tokens, self.held_tokens)
        answers = 256.0  # of which nothing is known
        missed = 1 - exp(-own_s / (max(0.050 - step_s, 0.005) * answers))
        warm_s = 0.0005 + 1.1 * own_s + late_s(step_s) + beside * 0.1 * missed
        cold_s = 0.050 + 1.1 * alone_s(cold, self.held_tokens + self.new_tokens, 0) + late_s(cold.decode_s_per_token)
        return cold_s - warm_s


def late_s(step_s: float) -> float:
    """Steps over four fifths of the promise: three seconds a promise up to 0.9, then slowly more."""
    over = step_s / 0.050 - 0.8
    return min(max(0.0, 3 * over), 0.9) + log1p(max(0.0, over - 0.3))


def check_break_even(duel: Duel, running: int) -> None:
    """The choice flips at the computed backlog."""
    backlog_s = duel.advantage_s(running, 1)
    if duel.advantage_s(running, 0) < -MARGIN_S:
        assert duel.pick(0.0, running) == "cold"
    if backlog_s > MARGIN_S:
        assert duel.pick(backlog_s - MARGIN_S, running) == "warm"
    if backlog_s > -MARGIN_S:
        assert duel.pick(max(backlog_s, 0.0) + MARGIN_S, running) == "cold"


@settings(max_examples=examples(150), deadline=None)
@given(SPEEDS, SPEEDS, HELD_TOKENS, st.integers(0, 8))
def test_warm_and_busy_against_cold_and_idle_flips_at_the_break_even(
    warm: EngineSpeed, cold: EngineSpeed, held_tokens: int, running: int
) -> None:
    check_break_even(Duel(warm, cold, held_tokens, Router), running)


class WithoutTerm(Router):
    """Fault: one term of the price is left out."""

    dropped = 0

    def _weigh(self, group, request, work, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        rows, _, continues = super()._weigh(group, request, work, now_s)
        for index, (where, unfit, cached, terms, total_s) in enumerate(rows):
            if unfit is None:
                left = tuple(0.0 if number == self.dropped else term for number, term in enumerate(terms))
                rows[index] = (where, unfit, cached, left, total_s - terms[self.dropped])
        return rows, min(row[4] for row in rows), continues


class WithoutQueue(WithoutTerm):
    """Fault."""


class WithoutPrefill(WithoutTerm):
    """Fault."""

    dropped = 1


class WithoutDecode(WithoutTerm):
    """Fault."""

    dropped = 2


class WithoutHop(WithoutTerm):
    """Fault."""

    dropped = 3


class WithoutSlowdown(WithoutTerm):
    """Fault."""

    dropped = 4


class OneSpeedForAll(Router):
    """Fault: unlike engines are priced alike."""

    def set_endpoints(self, endpoints, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        super().set_endpoints([replace(each, speed=endpoints[0].speed) for each in endpoints], now_s)


class BlindToTheCache(Router):
    """Fault: nothing is believed cached."""

    def _weigh(self, group, request, work, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        for site in group:
            site.trust_ratio = 0.0
        return super()._weigh(group, request, work, now_s)


class TiesAreWide(Router):
    """Fault: engines within 100 ms are called equal."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(replace(config, tie_s=0.1))


@pytest.mark.parametrize(
    "fault",
    [
        WithoutQueue,
        WithoutPrefill,
        WithoutDecode,
        WithoutHop,
        WithoutSlowdown,
        OneSpeedForAll,
        BlindToTheCache,
        TiesAreWide,
    ],
)
def test_the_break_even_catches(fault: type[Router]) -> None:
    @MUTANT_RUNS
    @given(SPEEDS, SPEEDS, HELD_TOKENS, st.integers(0, 8))
    def attempt(warm: EngineSpeed, cold: EngineSpeed, held_tokens: int, running: int) -> None:
        check_break_even(Duel(warm, cold, held_tokens, fault), running)

    with pytest.raises(AssertionError):
        attempt()


# A step: (kind, number); the number picks the prompt, the attempt in flight, the ending, or the seconds that pass.
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "token", "end", "wait", "list"]), st.integers(0, 30)), max_size=60
)


def check_history(steps: list[tuple[str, int]], seed: int, make: Callable[[RouterConfig], Router]) -> None:
    """Run a history; the pick must be the cheapest fit endpoint each time, and nothing may be left at the end."""
    rng = random.Random(seed)
    fleet = Fleet([endpoint(name) for name in "abc"], seed=seed)
    fleet.router = make(RouterConfig())
    fleet.router.set_endpoints(fleet.endpoints, fleet.now_s)
    running: list[RouteDecision] = []
    for kind, number in steps:
        if kind == "ask":
            answer = fleet.route(
                fleet.request(TEXT[: 400 * number], exclude=frozenset(rng.sample("abc", rng.randrange(2))))
            )
            if isinstance(answer, RouteDecision):
                running.append(answer)
                check_pick(answer)
        elif kind == "token" and running:
            fleet.start(running[number % len(running)])
        elif kind == "end" and running:
            ended = running.pop(number % len(running))
            finish = Finish(list(Ending)[number % len(Ending)], rng.randrange(100), ended.ticket.asked_tokens, 5)
            fleet.router.finished(ended.ticket, finish, fleet.now_s)
        elif kind == "wait":
            fleet.now_s += number
        elif kind == "list":
            kept = [replace(each, drain=rng.random() < 0.2) for each in fleet.endpoints if rng.random() < 0.9]
            fleet.router.set_endpoints(kept, fleet.now_s)
    check_loads(fleet, running)
    for ended in running:
        fleet.router.finished(ended.ticket, Finish(Ending.CANCELLED), fleet.now_s)
    check_loads(fleet, [])


def check_pick(decision: RouteDecision) -> None:
    fit = {row[0].endpoint_id: row[4] for row in decision.rows if row[1] is None}
    assert fit[decision.endpoint.endpoint_id] <= min(fit.values()) + decision.tie_s
    assert all(value >= 0 for row in decision.rows for value in row[3])
    assert not decision.endpoint.drain


def check_loads(fleet: Fleet, running: list[RouteDecision]) -> None:
    for status in fleet.router.status(fleet.now_s):
        name = status.endpoint.endpoint_id
        count = status.load.waiting_count + status.load.decoding_count
        mine = [each for each in running if each.endpoint.endpoint_id == name]
        # An endpoint that left the list and came back starts anew, so it may count fewer.
        assert count <= len(mine)
        assert status.load.kv_tokens <= sum(each.ticket.kv_tokens for each in mine)
        if not mine:
            assert (count, status.load.backlog_s, status.load.kv_tokens) == (0, 0.0, 0)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS, st.integers(0, 1_000))
def test_any_history_picks_the_cheapest_and_leaves_no_load(steps: list[tuple[str, int]], seed: int) -> None:
    check_history(steps, seed, Router)


class KeepsCancelled(Router):
    """Fault: a cancelled attempt is never released."""

    def finished(self, ticket: Ticket, report: Finish, now_s: float) -> bool:
        return report.outcome is not Ending.CANCELLED and super().finished(ticket, report, now_s)


class CountsTokensTwice(Router):
    """Fault: a first token counts another decode."""

    def first_token(self, ticket: Ticket, now_s: float) -> None:
        super().first_token(ticket, now_s)
        site = self._in_flight.get(ticket.ticket_id)
        if site is not None:
            site.load.decoding_count += 1


class PicksTheFirst(Router):
    """Fault: the list's first fit endpoint is taken."""

    def _draw(self, group, rows, best_s, dice):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        return next(index for index, row in enumerate(rows) if row[1] is None)


class SpeaksToTheDraining(Router):
    """Fault: drain is ignored."""

    def set_endpoints(self, endpoints, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        super().set_endpoints(endpoints, now_s)
        for site in self._sites.values():
            site.closed = None


@pytest.mark.parametrize("fault", [KeepsCancelled, CountsTokensTwice, PicksTheFirst, SpeaksToTheDraining])
def test_the_history_property_catches(fault: type[Router]) -> None:
    @MUTANT_RUNS
    @given(STEPS, st.integers(0, 1_000))
    def attempt(steps: list[tuple[str, int]], seed: int) -> None:
        check_history(steps, seed, fault)

    with pytest.raises(AssertionError):
        attempt()
