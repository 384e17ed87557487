"""The router's quick loop against its rule written plainly, over random fleets, loads and histories.

`Router._weigh` prices every endpoint in one loop without calls, and the speeds it reads are moved in place. Here the
same rule is written the slow way, from the price of one engine (`plain_price`, checked by hand in tests/unit), a walk
along the prompt's blocks and a frozen speed. Before each pick it says what must come out: the endpoint for these dice,
every candidate's seconds to the last bit, and everything the ticket counts. Planted faults show that it would notice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from router.cost import ANSWER_MIN_S, Promise, Unfit, Work, eviction_s, faded_s, prefill_s
from router.decision import NoRoute, RouteDecision, RouteRequest, Row
from router.endpoints import Ending, EngineSpeed, Finish, HopTable, Load, LoadNews, Place
from router.route import News, Router, RouterConfig
from tests.exploring import examples
from tests.fakes.fleet import MODEL, Fleet, endpoint, prompt
from tests.fakes.plain_price import price

MUTANT_RUNS = settings(
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
)

# Not told (learned from the traffic), plain, with attention's growth, and with KV that a few prompts fill.
SPEEDS = st.sampled_from(
    [
        None,
        EngineSpeed(1_000.0, 0.0, 0.010),
        EngineSpeed(1_000.0, 0.0, 0.010, decode_s_per_running=0.002),
        EngineSpeed(900.0, 0.02, 0.012, prefill_s_per_token2=1e-6),
        EngineSpeed(2_000.0, 0.05, 0.008, kv_capacity_tokens=6_000),
    ]
)
SYSTEM = prompt(1, 1_500)
SESSIONS = [SYSTEM + prompt(10 + number, 3_000) for number in range(4)] + [prompt(20, 3_000)]


@dataclass(frozen=True, slots=True)
class Said:
    """What the rule says of one request before it is routed."""

    rows: tuple[Row, ...]
    chosen: int | None
    continues: bool
    ticket: dict[str, object]


def speed_of(site: Any) -> EngineSpeed:
    """The engine's speed as a frozen value."""
    told: EngineSpeed | None = site.endpoint.speed
    return told if told is not None else site.learner.speed()


def unfit(site: Any, request: RouteRequest, now_s: float) -> Unfit | None:
    """The first reason not to pick it."""
    if site.endpoint.drain:
        return Unfit.DRAINING
    if site.endpoint.role == "prefill":
        return Unfit.ROLE
    if site.endpoint.endpoint_id in request.exclude:
        return Unfit.EXCLUDED
    if not site.breaker.admits(now_s):
        return Unfit.BROKEN if site.breaker.opened else Unfit.BUSY
    return None


def held_blocks(site: Any, request: RouteRequest) -> int:
    """How far it holds the prompt, block by block."""
    count = 0
    while count < len(request.chain.hashes) and request.chain.hashes[count] in site.holdings.parents:
        count += 1
    return count


def work_of(router: Router, request: RouteRequest) -> Work:
    """What the request is expected to be."""
    facts, output = router._models[MODEL], router._models[MODEL].output_tokens
    expected = output.value if output.count else router._config.default_output_tokens
    input_tokens = max(1, int(request.input_tokens * facts.input_ratio))
    return Work(input_tokens, min(request.output_tokens, int(expected) + 1), expected)


def row(router: Router, site: Any, load: Load, request: RouteRequest, now_s: float) -> Row:
    """One candidate before the spread."""
    why = unfit(site, request, now_s)
    if why is not None:
        return site.endpoint, why, 0, (), inf
    work, speed, held, cached = work_of(router, request), speed_of(site), held_blocks(site, request), 0
    if held:
        share = router._config.ladder.ends_bytes[held - 1] / request.chain.total_bytes
        cached = min(int(work.input_tokens * share * site.trust_ratio), work.input_tokens - 1)
    answer_s = max(work.answer_tokens * speed.decode_s_per_token, ANSWER_MIN_S)
    recent_s = faded_s(site.prefills_s, site.prefills_at_s, answer_s, now_s) if load.kv_tokens else 0.0
    queue_s, own_s, decode_s, slowdown_s = price(speed, load, work, cached, recent_s=recent_s, now_s=now_s)
    resident = site.holdings.held_bytes / site.bytes_per_token
    new_tokens = work.input_tokens - cached + work.output_tokens
    evicted_s = eviction_s(speed, resident, new_tokens, router._config.kv_reuse_ratio)
    return with_total(
        site.endpoint, cached, (queue_s, own_s, decode_s, site.hop_s, slowdown_s, 0.1 * own_s, evicted_s, 0.0, 0.0)
    )


def with_total(endpoint: Any, cached: int, terms: tuple[float, ...]) -> Row:
    """The candidate with the sum of its terms, added from left to right."""
    total_s = 0.0
    for term_s in terms:
        total_s += term_s
    return endpoint, None, cached, terms, total_s


def spread(router: Router, rows: list[Row], request: RouteRequest) -> list[Row]:
    """A new session's charge for the sessions placed before it."""
    sites = router._groups[MODEL]
    least_s = min(site.placed_s for site, each in zip(sites, rows, strict=True) if each[1] is None)
    charged = list(rows)
    for index, (site, (where, why, cached, terms, _)) in enumerate(zip(sites, rows, strict=True)):
        chance_s = 2 * sqrt((site.placed_s + least_s) * router._service_s.value)
        over_s = site.placed_s - least_s - chance_s
        if why is None and cached and over_s > 0:
            saved_s = prefill_s(speed_of(site), work_of(router, request).input_tokens, 0) - terms[1]
            saved_s += 0.1 * saved_s
            charged[index] = with_total(where, cached, (*terms[:-1], min(over_s, saved_s)))
    return charged


def say(router: Router, request: RouteRequest, now_s: float, dice: float) -> Said:
    """The rule: fewest seconds; among ties least placed work, then the dice."""
    sites = router._groups[MODEL]
    # To price a load takes predicted prefills as done; the router must find it as it was.
    loads = [deepcopy(site.load) if now_s >= site.load._due_s else site.load for site in sites]
    rows = [row(router, site, load, request, now_s) for site, load in zip(sites, loads, strict=True)]
    if all(each[1] is not None for each in rows):
        return Said(tuple(rows), None, False, {})
    held = [held_blocks(site, request) if each[1] is None else 0 for site, each in zip(sites, rows, strict=True)]
    longest = max(held)
    continues = False
    if longest:
        last = request.chain.hashes[longest - 1]
        continues = sites[held.index(longest)].holdings.last_use_us(last) is not None
        if not continues:
            rows = spread(router, rows, request)
    best_s = min(each[4] for each in rows)
    ties = [index for index, each in enumerate(rows) if each[4] <= best_s + router._config.tie_s]
    least_s = min(sites[index].placed_s for index in ties)
    ties = [index for index in ties if sites[index].placed_s == least_s]
    chosen = ties[int(dice * len(ties))]
    return Said(
        tuple(rows), chosen, continues, ticket(router, sites[chosen], loads[chosen], request, (rows[chosen], now_s))
    )


def ticket(
    router: Router, site: Any, load: Load, request: RouteRequest, picked: tuple[Row, float]
) -> dict[str, object]:
    """What must be counted of the pick."""
    made, now_s = picked
    chain, work, held = request.chain, work_of(router, request), held_blocks(site, request)
    previous_us = site.holdings.last_use_us(chain.hashes[held - 1]) if held else None
    held_bytes = router._config.ladder.ends_bytes[held - 1] if held else 0
    checkable = held_bytes >= 2_048 and load.settled(previous_us, now_s)
    return {
        "ticket_id": router._ticket_count + 1,
        "endpoint_id": site.endpoint.endpoint_id,
        "incarnation": site.endpoint.incarnation,
        "model": MODEL,
        "prefill_s": made[3][1],
        "queue_s": made[3][0],
        "kv_tokens": work.input_tokens + work.output_tokens,
        "input_tokens": work.input_tokens,
        "predicted_cached_tokens": made[2],
        "held_ratio": held_bytes / chain.total_bytes if checkable else 0.0,
        "prompt_bytes": chain.total_bytes,
        "asked_tokens": request.input_tokens,
        "leaf": chain.hashes[-1] if chain.hashes else 0,
        "speculative": held < len(chain.hashes),
        "previous_use_us": previous_us,
        "stamp_us": int(now_s * 1e6),
        "picked_s": now_s,
        "sent_s": now_s,
        "trial": site.breaker.opened,
        "streamed": request.streamed,
        "first_token_s": None,
    }


class History:
    """One fleet and what happens to it. `rng` draws the details of each step."""

    def __init__(self, speeds: list[EngineSpeed | None], seed: int, make: Callable[[RouterConfig], Router]) -> None:
        self.rng = rng = random.Random(seed)
        hops = HopTable(Place("", "here"), {("here", "there"): 0.050})
        config = RouterConfig(hops=hops, tie_s=rng.choice([0.001, 0.1]), share=True)
        self.fleet = Fleet(
            [
                replace(
                    endpoint(f"e{number}", speed),
                    region=rng.choice(["here", "here", "there"]),
                    role=rng.choice(["both", "both", "both", "decode", "prefill"]),
                    incarnation=f"life-{number}",
                )
                for number, speed in enumerate(speeds)
            ]
        )
        self.fleet.router = make(config)
        self.fleet.router.set_endpoints(self.fleet.endpoints, self.fleet.now_s)
        self.running: list[RouteDecision] = []

    def ask(self, number: int) -> None:
        """Route a prompt; everything must be as the rule says."""
        fleet, rng = self.fleet, self.rng
        text = SESSIONS[number % len(SESSIONS)][: rng.choice([0, 100, 600, 2_500, 5_000, 6_300, 9_000, 12_000])]
        excluded = frozenset(rng.sample(sorted(each.endpoint_id for each in fleet.endpoints), rng.choice([0, 0, 1])))
        request = fleet.request(text, rng.choice([1, 10, 400]), exclude=excluded, streamed=rng.random() < 0.7)
        dice = rng.random()
        said = say(fleet.router, request, fleet.now_s, dice)
        answer = fleet.router.route(request, fleet.now_s, lambda: dice)
        if said.chosen is None:
            assert isinstance(answer, NoRoute)
            assert answer.unfit == tuple((each[0].endpoint_id, each[1]) for each in said.rows)
            return
        assert isinstance(answer, RouteDecision)
        assert answer.rows == said.rows
        assert answer.endpoint is said.rows[said.chosen][0]
        assert answer.new_session is not said.continues
        assert {name: getattr(answer.ticket, name) for name in said.ticket} == said.ticket
        queue_s, own_s, _, hop_s = said.rows[said.chosen][3][:4]
        assert answer.predicted_ttft_s == queue_s + own_s + hop_s
        self.running.append(answer)

    def end(self, number: int, *endings: Ending) -> None:
        """An attempt ends, in one of these ways."""
        ended = self.running.pop(number % len(self.running))
        outcome = self.rng.choice(endings)
        asked = ended.ticket.asked_tokens
        report = Finish(
            outcome, int(asked * self.rng.choice([0.0, 0.5, 1.0])), asked + abs(number), self.rng.randrange(40)
        )
        self.fleet.router.finished(ended.ticket, report, self.fleet.now_s)

    def step(self, kind: str, number: int) -> None:
        fleet, rng = self.fleet, self.rng
        if kind == "ask":
            self.ask(number)
        elif kind == "burst":
            for _ in range(number):
                self.ask(number)
        elif kind == "serve":
            self.ask(number)
            if self.running:
                fleet.now_s += 0.05
                fleet.start(self.running[-1])
                fleet.now_s += 0.05 * number
                self.end(-1, Ending.COMPLETED)
        elif kind == "fail":
            for _ in range(min(number, len(self.running))):
                self.end(0, Ending.FAILED, Ending.UNREACHABLE, Ending.BUSY)
        elif kind == "token" and self.running:
            fleet.start(self.running[number % len(self.running)])
        elif kind == "end" and self.running:
            self.end(number, *Ending)
        elif kind == "wait":
            fleet.now_s += rng.choice([0.01, 0.3, 3.0, 60.0])
        elif kind == "peer":
            name = rng.choice(fleet.endpoints).endpoint_id
            news = LoadNews(name, rng.choice([0.0, 0.2]), number % 2, number % 7, 100 * number)
            fleet.router.hear("peer", News(loads=(news,)), fleet.now_s)
        elif kind == "list":
            fleet.endpoints = [replace(each, drain=rng.random() < 0.2) for each in fleet.endpoints]
            fleet.router.set_endpoints(fleet.endpoints, fleet.now_s)


STEPS = st.lists(
    st.tuples(
        st.sampled_from("ask ask burst serve serve fail token end wait wait peer list".split()),
        st.integers(1, 12),
    ),
    min_size=10,
    max_size=40,
)
FLEETS = st.lists(SPEEDS, min_size=1, max_size=5)


def check(
    speeds: list[EngineSpeed | None], steps: list[tuple[str, int]], seed: int, make: Callable[[RouterConfig], Router]
) -> None:
    history = History(speeds, seed, make)
    for kind, number in steps:
        history.step(kind, number)


@settings(max_examples=examples(150), deadline=None)
@given(FLEETS, STEPS, st.integers(0, 1_000))
def test_the_quick_loop_is_the_rule(speeds: list[EngineSpeed | None], steps: list[tuple[str, int]], seed: int) -> None:
    check(speeds, steps, seed, Router)


class Spoiled(Router):
    """Fault: while the endpoints are weighed, something of each is not as it is."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        """(object, attribute, what it is taken to be)."""
        raise NotImplementedError

    def _weigh(self, group, request, work, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        with changed([change for site in group for change in self.spoils(site)]):
            return super()._weigh(group, request, work, now_s)


@contextmanager
def changed(changes: list[tuple[object, str, object]]) -> Iterator[None]:
    before = [(what, name, getattr(what, name)) for what, name, _ in changes]
    for what, name, value in changes:
        setattr(what, name, value)
    try:
        yield
    finally:
        for what, name, value in before:
            setattr(what, name, value)


class ForgetsTheRunning(Spoiled):
    """Fault."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site.load, "request_count", 0)]


class ForgetsTheWaiting(Spoiled):
    """Fault."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site.load, "_waiting", {}), (site.load, "_due_s", inf)]


class ForgetsSiblings(Spoiled):
    """Fault: their backlog is not waited for."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site.load, "peer_backlog_s", 0.0)]


class ForgetsTheHop(Spoiled):
    """Fault."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site, "hop_s", 0.0)]


class TrustsTheIndex(Spoiled):
    """Fault: what engines report of their caches is not heard."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site, "trust_ratio", 1.0)]


class ForgetsTheCapacity(Spoiled):
    """Fault: engines with a known KV capacity are priced like the others."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site, "speed", replace(speed_of(site), kv_capacity_tokens=None))]


class ForgetsAttention(Spoiled):
    """Fault: engines whose prefill grows with the context are priced like the others."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site, "speed", replace(speed_of(site), prefill_s_per_token2=0.0))]


class TrustsTheBroken(Spoiled):
    """Fault: breakers are not asked."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site.breaker, "opened", False), (site.breaker, "ready_s", 0.0)]


class TriesTwiceAtATime(Spoiled):
    """Fault: only the time of a broken endpoint's trial is looked at, not whether one is under way."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site.breaker, "opened", False)]


class ForgetsThePrefills(Spoiled):
    """Fault: what an engine was given to prefill before is not looked at."""

    def spoils(self, site: Any) -> list[tuple[object, str, object]]:
        return [(site, "prefills_s", 0.0)]


class ForgetsThePromise(Router):
    """Fault: answers are promised twice the time per token."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._weighed = replace(config, promise=Promise(tpot_s=0.1))

    def _weigh(self, group, request, work, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        with changed([(self, "_config", self._weighed)]):
            return super()._weigh(group, request, work, now_s)


class NeverLearns(Router):
    """Fault: a speed that moves is read as it was when the endpoint was listed."""

    def set_endpoints(self, endpoints, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        super().set_endpoints(endpoints, now_s)
        for site in self._sites.values():
            site.speed = speed_of(site)


class ForgetsTheExcluded(Router):
    """Fault."""

    def _weigh(self, group, request, work, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        return super()._weigh(group, request._replace(exclude=frozenset()), work, now_s)


class ChargesNobody(Router):
    """Fault: new sessions are not spread."""

    def _spread(self, group, rows, work):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        return min(each[4] for each in rows)


class ChargesEverySession(Router):
    """Fault: a session that goes on is taken for a new one."""

    def _weigh(self, group, request, work, now_s):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        rows, best_s, continues = super()._weigh(group, request, work, now_s)
        return rows, best_s, False if continues else continues


class DrawsAnyTie(Router):
    """Fault: among ties the placed work is not looked at."""

    def _draw(self, group, rows, best_s, dice):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        ties = [index for index, each in enumerate(rows) if each[4] <= best_s + self._config.tie_s]
        return ties[int(dice() * len(ties))]


class MixesUpTheTicket(Router):
    """Fault: two of its numbers have changed places."""

    def route(self, request, now_s, dice):  # type: ignore[no-untyped-def]  # a fault, typed by its parent
        answer = super().route(request, now_s, dice)
        if isinstance(answer, RouteDecision):
            made = answer.ticket
            made.input_tokens, made.asked_tokens = made.asked_tokens, made.input_tokens
        return answer


@pytest.mark.parametrize(
    "fault",
    [
        ForgetsTheRunning,
        ForgetsTheWaiting,
        ForgetsSiblings,
        ForgetsTheHop,
        TrustsTheIndex,
        ForgetsTheCapacity,
        ForgetsAttention,
        TrustsTheBroken,
        TriesTwiceAtATime,
        ForgetsThePrefills,
        ForgetsThePromise,
        NeverLearns,
        ForgetsTheExcluded,
        ChargesNobody,
        ChargesEverySession,
        DrawsAnyTie,
        MixesUpTheTicket,
    ],
)
def test_the_rule_catches(fault: type[Router]) -> None:
    @MUTANT_RUNS
    @given(FLEETS, STEPS, st.integers(0, 1_000))
    def attempt(speeds: list[EngineSpeed | None], steps: list[tuple[str, int]], seed: int) -> None:
        check(speeds, steps, seed, fault)

    with pytest.raises(AssertionError):
        attempt()
