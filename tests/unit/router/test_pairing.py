"""When two engines share a request, which two, and what is counted for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from router.blocks import BlockHasher
from router.cost import TERMS
from router.decision import NoRoute, NoRouteReason, RouteDecision, RouteRequest
from router.endpoints import Ending, Endpoint, EndpointRole, EngineKind, EngineSpeed, Finish
from router.pair_route import PairingRouter
from router.pairing import (
    Leg,
    PairConfig,
    PairDecision,
    best_pair,
    decode_leg,
    is_worth,
    may_pair,
    may_split,
    prefill_leg,
    transfer_s,
)
from router.route import RouterConfig
from tests.fakes.fleet import MODEL, SPEED, prompt

# 1 MB of KV per token over 1 GB/s: a token takes a millisecond on its way, as it does in its prefill.
KV: dict[str, Any] = {"kv_bytes_per_token": 1_000_000, "kv_link_bytes_per_s": 1e9}
FAST_LINK: dict[str, Any] = {"kv_bytes_per_token": 1_000, "kv_link_bytes_per_s": 1e9}


def engine(
    name: str, role: EndpointRole = "both", kind: EngineKind = "vllm", speed: EngineSpeed = SPEED, **more: Any
) -> Endpoint:
    """An endpoint of the test model."""
    made = Endpoint(name, f"http://{name}:8000", frozenset({MODEL}), kind, role, speed=speed)
    return replace(made, **more)


def leg(endpoint: Endpoint, held_tokens: int = 0, prefill_s: float = 0.0, **terms: float) -> Leg:
    """An engine's part by term."""
    given = {"prefill": prefill_s, **terms}
    return Leg(endpoint, held_tokens, tuple(given.get(name, 0.0) for name in TERMS))


class TestPrices:
    def test_only_one_kind_in_one_pool_and_one_role_each(self) -> None:
        prefill, decode = engine("p", "prefill"), engine("d", "decode")
        assert may_pair(prefill, decode)
        assert not may_pair(decode, prefill)
        assert not may_pair(prefill, engine("b", "both"))
        assert not may_pair(prefill, engine("d", "decode", "sglang"))
        assert not may_pair(prefill, engine("d", "decode", pool="other"))
        assert not may_pair(engine("p", "prefill", "openai"), engine("d", "decode", "openai"))

    def test_the_way_is_the_bytes_at_the_slower_ends_rate(self) -> None:
        prefill, decode = engine("p", "prefill", **KV), engine("d", "decode")
        assert transfer_s(prefill, leg(decode), 500, PairConfig()) == pytest.approx(0.5)
        slow = engine("d", "decode", kv_link_bytes_per_s=5e8)
        assert transfer_s(prefill, leg(slow), 500, PairConfig()) == pytest.approx(1.0)
        unknown = transfer_s(engine("p", "prefill"), leg(decode), 119_000, PairConfig())
        assert unknown == pytest.approx(119_000 * 327_680 / 11.1e9)

    def test_vllm_fetches_the_rest_and_sglang_all(self) -> None:
        ways_s: dict[EngineKind, float] = {"vllm": 0.1, "sglang": 0.5, "trtllm": 0.5}
        for kind, wanted_s in ways_s.items():
            prefill, decode = engine("p", "prefill", kind, **KV), engine("d", "decode", kind)
            assert transfer_s(prefill, leg(decode, 400), 500, PairConfig()) == pytest.approx(wanted_s)

    def test_a_prefill_leg_writes_nothing_and_a_decode_leg_makes_room_for_all_of_it(self) -> None:
        whole = [float(n) for n in range(1, len(TERMS) + 1)]
        first = prefill_leg(engine("p", "prefill"), 7, whole)
        shown = dict(zip(TERMS, first.terms_s, strict=True))
        assert {name for name, term_s in shown.items() if not term_s} == {"decode", "slowdown", "spread"}
        assert all(term_s in (0.0, whole[TERMS.index(name)]) for name, term_s in shown.items())
        then = decode_leg(engine("d", "decode"), 7, whole, [10 * term_s for term_s in whole])
        for name, term_s in zip(TERMS, then.terms_s, strict=True):
            assert term_s == whole[TERMS.index(name)] * (1 if name == "eviction" else 10)

    def test_the_cheapest_pair_of_those_that_fit(self) -> None:
        prefills = [
            leg(engine("p-cold", "prefill", **KV), 0, 1.0),
            leg(engine("p-warm", "prefill", **KV), 900, 0.1),
            leg(engine("p-other", "prefill", "sglang", **KV), 999, 0.0),
        ]
        decodes = [leg(engine("d-cold", "decode"), decode=0.1), leg(engine("d-warm", "decode"), 950, decode=0.1)]
        offer = best_pair(prefills, decodes, 1_000, PairConfig())
        assert offer is not None
        assert (offer.prefill.endpoint.endpoint_id, offer.decode.endpoint.endpoint_id) == ("p-warm", "d-warm")
        assert offer.total_s == pytest.approx(0.1 + 0.05 + 0.1)
        assert sum(offer.terms_s) == pytest.approx(offer.total_s)
        assert offer.ttft_s == pytest.approx(0.15)
        assert best_pair(prefills[2:], decodes, 1_000, PairConfig()) is None
        assert best_pair([], decodes, 1_000, PairConfig()) is None

    def test_the_search_finds_what_trying_all_finds(self) -> None:
        draw = random.Random(2)
        roles: tuple[EndpointRole, ...] = ("prefill", "decode")
        kinds: tuple[EngineKind, ...] = ("vllm", "sglang")
        for _ in range(300):
            tokens = draw.randint(100, 5_000)
            legs = [
                [
                    leg(
                        engine(
                            f"{role}{n}",
                            role,
                            draw.choice(kinds),
                            pool=draw.choice("ab"),
                            kv_bytes_per_token=draw.choice([None, 10_000, 10_000_000]),
                        ),
                        draw.randint(0, tokens),
                        draw.uniform(0, 10),
                        queue=draw.choice([0.0, draw.uniform(0, 10)]),
                    )
                    for n in range(draw.randint(0, 4))
                ]
                for role in roles
            ]
            offer = best_pair(legs[0], legs[1], tokens, PairConfig())
            each = [best_pair([p], [d], tokens, PairConfig()) for p in legs[0] for d in legs[1]]
            costs = [pair.total_s for pair in each if pair is not None]
            assert (None if offer is None else offer.total_s) == (min(costs) if costs else None)

    def test_a_gain_that_is_none_is_no_reason(self) -> None:
        offer = best_pair([leg(engine("p", "prefill"), 0, 1.0)], [leg(engine("d", "decode"))], 0, PairConfig())
        assert offer is not None
        assert is_worth(offer, 1.06, PairConfig())
        assert not is_worth(offer, 1.05, PairConfig())
        assert is_worth(offer, float("inf"), PairConfig())

    def test_several_choices_are_not_split_unless_there_is_no_other_way(self) -> None:
        assert may_split(engine("d", "decode"), 1)
        assert not may_split(engine("d", "decode"), 2)
        assert may_split(engine("d", "decode", "sglang"), 2)


# A decode engine is slow at prefill: what pools of unlike accelerators are for.
SLOW = EngineSpeed(prefill_tok_per_s=100.0, prefill_overhead_s=0.0, decode_s_per_token=0.010)


class Pool:
    """A router over endpoints with roles."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.now_s = 100.0
        self.router = PairingRouter(RouterConfig())
        self.endpoints = list(endpoints)
        self.router.set_endpoints(endpoints, self.now_s)
        self.hasher = BlockHasher(b"secret")
        self.dice = random.Random(1).random

    def ask(self, text: bytes, choices: int = 1, exclude: Sequence[str] = ()) -> PairDecision | RouteDecision | NoRoute:
        """Route a prompt."""
        chain = self.hasher.chain(MODEL, "", (text,))
        request = RouteRequest(MODEL, chain, len(text) // 4, 10, frozenset(exclude))
        return self.router.route_split(request, self.now_s, self.dice, choices)

    def pair(self, text: bytes) -> PairDecision:
        """Route a prompt that two engines take."""
        made = self.ask(text)
        assert isinstance(made, PairDecision), made
        return made

    def end(self, made: PairDecision | RouteDecision, outcome: Ending = Ending.COMPLETED) -> None:
        """All of it ends now."""
        for part in (made.prefill, made.decode) if isinstance(made, PairDecision) else (made,):
            self.router.first_token(part.ticket, self.now_s)
            self.router.finished(part.ticket, Finish(outcome), self.now_s)

    def load(self, name: str) -> tuple[int, int, int]:
        """(waiting, decoding, KV tokens) on an endpoint."""
        view = next(row.load for row in self.router.status(self.now_s) if row.endpoint.endpoint_id == name)
        return view.waiting_count, view.decoding_count, view.kv_tokens


def name(made: RouteDecision | PairDecision | NoRoute) -> str:
    """The engine that does all of it."""
    assert isinstance(made, RouteDecision), made
    return made.endpoint.endpoint_id


class TestChoice:
    def test_a_long_cold_prompt_is_shared_and_what_comes_after_it_is_not(self) -> None:
        """The decode engine that fetched the prompt holds it: the next turn's few tokens are its own (section 6, 5)."""
        link: dict[str, Any] = {"kv_bytes_per_token": 300_000, "kv_link_bytes_per_s": 1e9}
        decode = engine("d", "decode", speed=replace(SPEED, prefill_tok_per_s=700.0))
        pool = Pool(engine("p", "prefill", **link), decode)
        history = prompt(1, 4_000)
        made = pool.pair(history)
        assert (made.prefill.endpoint.endpoint_id, made.decode.endpoint.endpoint_id) == ("p", "d")
        pool.end(made)
        pool.now_s += 60
        assert name(pool.ask(history + prompt(2, 2))) == "d"

    def test_an_engine_that_does_both_keeps_what_it_holds(self) -> None:
        pool = Pool(engine("p", "prefill", **FAST_LINK), engine("d", "decode", speed=SLOW), engine("b"))
        history = prompt(1, 4_000)
        router = pool.router
        chain = pool.hasher.chain(MODEL, "", (history,))
        others = frozenset({"p", "d"})
        first = router.route(RouteRequest(MODEL, chain, 4_000, 10, others), pool.now_s, pool.dice)
        assert name(first) == "b"
        assert isinstance(first, RouteDecision)
        pool.end(first)
        pool.now_s += 60
        assert name(pool.ask(history + prompt(2, 20))) == "b"

    def test_a_slow_way_or_a_single_role_is_no_reason_to_split(self) -> None:
        slow: dict[str, Any] = {"kv_bytes_per_token": 1_000_000_000, "kv_link_bytes_per_s": 1e9}
        assert name(Pool(engine("p", "prefill", **slow), engine("d", "decode")).ask(prompt(1, 400))) == "d"
        assert name(Pool(engine("a"), engine("d", "decode", speed=SLOW)).ask(prompt(1, 400))) == "a"
        assert name(Pool(engine("p", "prefill"), engine("a")).ask(prompt(1, 400))) == "a"

    def test_a_prefill_engines_queue_drives_the_next_one_elsewhere(self) -> None:
        pool = Pool(
            engine("p1", "prefill", **FAST_LINK),
            engine("p2", "prefill", **FAST_LINK),
            engine("d", "decode", speed=SLOW),
        )
        picks = {pool.pair(prompt(n, 4_000)).prefill.endpoint.endpoint_id for n in range(2)}
        assert picks == {"p1", "p2"}

    def test_sglang_decodes_nothing_alone(self) -> None:
        both = (engine("p", "prefill", "sglang", **KV), engine("d", "decode", "sglang"))
        pool = Pool(*both)
        assert isinstance(pool.ask(prompt(1, 4)), PairDecision)
        assert isinstance(pool.ask(prompt(1, 4), choices=3), PairDecision)
        made = pool.ask(prompt(1, 4), exclude=["p"])
        assert isinstance(made, NoRoute)
        assert made.reason is NoRouteReason.EXCLUDED
        alone = Pool(both[1]).ask(prompt(1, 4))
        assert isinstance(alone, NoRoute)
        assert alone.reason is NoRouteReason.ALL_DRAINING, "the model exists"

    def test_a_prefill_engine_that_keeps_failing_is_left_out(self) -> None:
        pool = Pool(engine("p", "prefill", **FAST_LINK), engine("d", "decode", speed=SLOW))
        for n in range(5):
            made = pool.pair(prompt(n, 4_000))
            pool.router.finished(made.prefill.ticket, Finish(Ending.FAILED), pool.now_s)
            pool.router.finished(made.decode.ticket, Finish(Ending.CANCELLED), pool.now_s)
        assert name(pool.ask(prompt(9, 4_000))) == "d"
        only = Pool(engine("p", "prefill", "sglang", **KV), engine("d", "decode", "sglang"))
        for n in range(5):
            made = only.pair(prompt(n, 400))
            only.router.finished(made.prefill.ticket, Finish(Ending.FAILED), only.now_s)
            only.router.finished(made.decode.ticket, Finish(Ending.CANCELLED), only.now_s)
        none = only.ask(prompt(9, 400))
        assert isinstance(none, NoRoute)
        assert none.reason is NoRouteReason.ALL_BROKEN
        assert none.retry_after_s == pytest.approx(5.0)


class TestLoad:
    def test_both_legs_count_from_the_pick_to_their_end(self) -> None:
        pool = Pool(engine("p", "prefill", **FAST_LINK), engine("d", "decode", speed=SLOW))
        made = pool.pair(prompt(1, 4_000))
        assert pool.load("p") == (1, 0, 4_000)
        pool.now_s += 0.02
        assert pool.load("d") == (0, 1, 4_010), "it waits for its KV, and nobody for it"
        pool.router.first_token(made.prefill.ticket, pool.now_s)
        pool.router.finished(made.prefill.ticket, Finish(Ending.COMPLETED, 0, 4_000), pool.now_s)
        assert pool.load("p") == (0, 0, 0)
        pool.router.finished(made.decode.ticket, Finish(Ending.COMPLETED, None, 4_000, 10), pool.now_s)
        assert pool.load("d") == (0, 0, 0)

    def test_a_wait_for_the_kv_says_nothing_of_the_decode_engine(self) -> None:
        """Its time to first token is the other's prefill: its own speed is not to be learned from that."""
        pool = Pool(engine("p", "prefill", **FAST_LINK), replace(engine("d", "decode"), speed=None))
        for n in range(5):  # what runs there would be slowed down by a prefill
            running = pool.ask(prompt(n, 100), exclude=["p"])
            assert isinstance(running, RouteDecision)
            pool.router.first_token(running.ticket, pool.now_s)
        before = pool.router.status(pool.now_s)[1].speed
        made = pool.pair(prompt(9, 40_000))
        pool.now_s += 80
        pool.end(made)
        assert pool.router.status(pool.now_s)[1].speed == before

    def test_an_attempt_that_came_to_nothing_leaves_no_belief(self) -> None:
        pool = Pool(engine("p", "prefill", **FAST_LINK), engine("d", "decode", speed=SLOW))
        made = pool.pair(prompt(1, 4_000))
        pool.router.finished(made.prefill.ticket, Finish(Ending.FAILED), pool.now_s)
        pool.router.finished(made.decode.ticket, Finish(Ending.CANCELLED), pool.now_s)
        assert [row.held_blocks for row in pool.router.status(pool.now_s)] == [0, 0]
        assert pool.load("p") == pool.load("d") == (0, 0, 0)


def test_a_pair_explains_itself() -> None:
    pool = Pool(engine("p", "prefill", **FAST_LINK), engine("d", "decode", speed=SLOW), engine("b", speed=SLOW))
    made = pool.pair(prompt(1, 4_000))
    line = made.summary()
    assert line.startswith("prefill=p prefill_total_s=4.4005 prefill_cached=0 transfer_s=0.0040; pick=d total_s=4.")
    assert "; pick=d total_s=4." in line
    assert line.isascii()
    record = made.record()
    pair, candidates = record["pair"], record["candidates"]
    assert isinstance(pair, dict)
    assert isinstance(candidates, list)
    assert pair["prefill_endpoint_id"] == "p"
    assert [each["endpoint_id"] for each in candidates] == ["d", "b", "p"]
