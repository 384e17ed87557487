"""The router by example. R-numbers are kinds of bugs that public routers had, one test or more for each."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from router.blocks import Chain
from router.cost import TERMS, Unfit
from router.decision import NoRoute, NoRouteReason, RouteDecision, RouteRequest
from router.endpoints import BreakerState, Ending, Endpoint, EngineSpeed, Finish, HopTable, Place
from router.route import News, RouterConfig
from tests.fakes.fleet import MODEL, SPEED, Fleet, endpoint, prompt

SHARING = RouterConfig(share=True)


def fleet(count: int = 2, config: RouterConfig | None = None) -> Fleet:
    return Fleet([endpoint(name) for name in "abcdefgh"[:count]], config)


def warm(fleet: Fleet, name: str, text: bytes) -> None:
    """Make this endpoint, and no other, hold the prompt."""
    others = frozenset(each.endpoint_id for each in fleet.endpoints) - {name}
    decision = fleet.pick(text, exclude=others)
    assert decision.endpoint.endpoint_id == name
    fleet.start(decision)
    fleet.end(decision)


def occupy(fleet: Fleet, name: str, count: int, tokens: int = 100) -> list[RouteDecision]:
    """Requests in flight there, before their first token."""
    others = frozenset(each.endpoint_id for each in fleet.endpoints) - {name}
    return [fleet.pick(prompt(10_000 + number, tokens), exclude=others) for number in range(count)]


class TestTheBugsOfOthers:
    def test_r1_unrelated_prompts_one_at_a_time_use_every_idle_worker(self) -> None:
        four = fleet(4)
        picks = Counter(four.serve(prompt(number, 100)).endpoint.endpoint_id for number in range(40))
        assert sorted(picks) == ["a", "b", "c", "d"] and all(5 <= count <= 15 for count in picks.values())

    def test_r1_equal_endpoints_are_drawn_by_the_dice(self) -> None:
        first = {
            Fleet([endpoint(n) for n in "abcd"], seed=seed).pick(prompt(1, 100)).endpoint.endpoint_id
            for seed in range(40)
        }
        assert first == {"a", "b", "c", "d"}

    def test_r2_new_prompts_leave_a_loaded_worker_however_small_its_tree(self) -> None:
        two = fleet()
        for number in range(100):
            warm(two, "b", prompt(500 + number, 300))
        occupy(two, "a", 30)
        picks = [two.pick(prompt(number, 100)).endpoint.endpoint_id for number in range(10)]
        assert picks == ["b"] * 10

    def test_r2_a_stuck_worker_is_left_alone_though_its_queue_should_be_done(self) -> None:
        two = fleet()
        occupy(two, "a", 1)
        two.now_s += 60.0
        assert [two.serve(prompt(number, 100)).endpoint.endpoint_id for number in range(10)] == ["b"] * 10

    def test_r3_a_hot_worker_does_not_switch_prompts_of_others_to_shortest_queue(self) -> None:
        three = fleet(3)
        texts = [prompt(number, 2_000) for number in range(10)]
        for text in texts:
            warm(three, "b", text)
        occupy(three, "a", 100)
        for text in texts:
            decision = three.pick(text + prompt(77, 50))
            assert decision.endpoint.endpoint_id == "b"
            three.end(decision)

    def test_r4_load_counts_at_the_pick_so_held_responses_spread(self) -> None:
        four = fleet(4)
        picks = Counter(four.pick(prompt(number, 100)).endpoint.endpoint_id for number in range(16))
        assert picks == {"a": 4, "b": 4, "c": 4, "d": 4}
        same = fleet(4)
        picks = Counter(same.pick(prompt(1, 4_000)).endpoint.endpoint_id for _ in range(16))
        assert len(picks) == 4  # even where all want the same prefix

    @pytest.mark.parametrize("ending", list(Ending))
    def test_r4_every_ending_releases_the_load_once(self, ending: Ending) -> None:
        two = fleet()
        for decode in (False, True):
            decision = two.pick(prompt(1, 100))
            if decode:
                two.start(decision)
            name = decision.endpoint.endpoint_id
            assert two.load(name) != (0, 0, 0)
            assert two.router.finished(decision.ticket, Finish(ending), two.now_s)
            assert not two.router.finished(decision.ticket, Finish(ending), two.now_s)
            two.start(decision)
            assert two.load(name) == (0, 0, 0)
            two.now_s += 100.0

    def test_r5_health_never_touches_load(self) -> None:
        two = fleet()
        held = occupy(two, "a", 20)
        for healthy in (True, False, True, False, True):
            two.router.health("a", healthy, two.now_s)
            two.router.health("nobody", healthy, two.now_s)
            two.router.set_endpoints(two.endpoints, two.now_s)
        assert two.load("a")[0] == 20
        for decision in held:
            two.end(decision)
        assert two.load("a") == (0, 0, 0)

    @pytest.mark.parametrize("shared_tokens", [500, 4_000])
    @pytest.mark.parametrize("steps", [1, 6])
    def test_r6_serial_sessions_with_one_system_prompt_spread(self, shared_tokens: int, steps: int) -> None:
        two = fleet()
        system = prompt(1, shared_tokens)
        homes: Counter[str] = Counter()
        texts = [system + prompt(100 + session, 200) for session in range(40)]
        for step in range(steps):
            for session in range(40):
                decision = two.serve(texts[session], output_tokens=100)
                if step == 0:
                    homes[decision.endpoint.endpoint_id] += 1
                texts[session] += prompt(10_000 + 100 * step + session, 200)
        assert max(homes.values()) <= 24, homes

    def test_r6_a_session_stays_where_it_is_when_sessions_spread(self) -> None:
        two = fleet()
        texts = [prompt(1, 4_000) + prompt(100 + session, 300) for session in range(20)]
        homes: dict[int, str] = {}
        for step in range(5):
            for session in range(20):
                name = two.serve(texts[session], output_tokens=50).endpoint.endpoint_id
                assert homes.setdefault(session, name) == name
                texts[session] += prompt(10_000 + 100 * step + session, 300)

    def test_r7_new_workers_get_their_share_of_new_sessions(self) -> None:
        crew = Fleet([endpoint(name) for name in "ab"])
        system = prompt(1, 4_000)
        for session in range(60):
            crew.serve(system + prompt(100 + session, 500), output_tokens=100)
        crew.endpoints += [endpoint("c"), endpoint("d")]
        crew.router.set_endpoints(crew.endpoints, crew.now_s)
        new = Counter(
            crew.serve(system + prompt(1_000 + session, 500), output_tokens=100).endpoint.endpoint_id
            for session in range(50)
        )
        assert new["c"] >= 8 and new["d"] >= 8, new

    def test_r20_a_router_under_unique_prompts_stays_bounded(self) -> None:
        two = fleet(2, RouterConfig(index_max_bytes=100_000))
        for number in range(5_000):
            two.end(two.pick(number.to_bytes(4, "big") * 200))
        assert two.router.index_bytes <= 100_000
        assert not two.router._in_flight

    def test_r21_bad_requests_do_not_open_the_breaker(self) -> None:
        one = fleet(1)
        for number in range(50):
            one.end(one.pick(prompt(number, 100)), Ending.REFUSED)
        assert one.pick(prompt(1, 100)).endpoint.endpoint_id == "a"

    def test_r21_a_busy_engine_rests_as_long_as_it_asked_and_is_not_broken(self) -> None:
        two = fleet()
        text = prompt(1, 3_000)
        warm(two, "a", text)
        decision = two.pick(text)
        two.router.finished(decision.ticket, Finish(Ending.BUSY, retry_after_s=3.0), two.now_s)
        elsewhere = two.pick(text)
        assert elsewhere.endpoint.endpoint_id == "b"
        two.end(elsewhere, Ending.REFUSED)
        none = two.route(two.request(text, exclude=frozenset("b")))
        assert none == NoRoute(NoRouteReason.ALL_BUSY, 3.0, (("a", Unfit.BUSY), ("b", Unfit.EXCLUDED)))
        two.now_s += 3.0
        assert two.pick(text).endpoint.endpoint_id == "a"

    @pytest.mark.parametrize("per_s", [1.0, 20.0])
    def test_r22_a_worker_that_fails_fast_gets_under_a_twentieth_of_the_traffic(self, per_s: float) -> None:
        two = fleet()
        failures = after = 0
        number = 0
        while after < 400:
            number += 1
            two.now_s += 1 / per_s
            decision = two.pick(prompt(number, 100))
            failed = decision.endpoint.endpoint_id == "a"
            if failures >= 5:
                after += 1
            two.router.health("a", True, two.now_s)  # its health page always answers
            if failed:
                failures += 1
                two.end(decision, Ending.FAILED)
            else:
                two.end(decision)
        assert 5 <= failures < 5 + 0.05 * after

    def test_r22_a_recovered_worker_is_used_again(self) -> None:
        two = fleet()
        for number in range(40):
            decision = two.pick(prompt(number, 100))
            two.end(decision, Ending.FAILED if decision.endpoint.endpoint_id == "a" else Ending.COMPLETED)
        assert [each.endpoint_id for each in two.router.broken()] == ["a"]
        two.now_s += 5.0
        picks = Counter(two.serve(prompt(100 + number, 100)).endpoint.endpoint_id for number in range(40))
        assert picks["a"] >= 10 and not two.router.broken()

    def test_r27_a_draining_endpoint_finishes_and_gets_nothing_new(self) -> None:
        two = fleet()
        text = prompt(1, 4_000)
        warm(two, "a", text)
        running = two.pick(text)
        two.endpoints[0] = replace(two.endpoints[0], drain=True)
        two.router.set_endpoints(two.endpoints, two.now_s)
        assert {two.pick(text).endpoint.endpoint_id for _ in range(10)} == {"b"}
        assert two.load("a")[0] == 1
        two.start(running)
        two.end(running)
        assert two.load("a") == (0, 0, 0)


class TestBeliefs:
    def test_a_session_goes_back_to_the_engine_that_holds_it(self) -> None:
        four = fleet(4)
        text = prompt(1, 10_000)
        home = four.serve(text).endpoint.endpoint_id
        for turn in range(10):
            text += prompt(100 + turn, 200)
            decision = four.serve(text)
            assert decision.endpoint.endpoint_id == home and not decision.new_session
            assert decision.predicted_cached_tokens >= len(text) // 4 - 200 - 1_024

    def test_another_tenants_identical_prompt_is_not_believed_cached(self) -> None:
        one = fleet(1)
        text = prompt(1, 4_000)
        one.serve(text)
        chain = one.hasher.chain(MODEL, "another org", (text,))
        decision = one.route(RouteRequest(MODEL, chain, 4_000, 10))
        assert isinstance(decision, RouteDecision) and decision.predicted_cached_tokens == 0

    @pytest.mark.parametrize(
        "ending", [Ending.REFUSED, Ending.BUSY, Ending.FAILED, Ending.UNREACHABLE, Ending.CANCELLED]
    )
    def test_a_prompt_that_was_never_prefilled_is_not_held(self, ending: Ending) -> None:
        one = fleet(1)
        text = prompt(1, 4_000)
        one.end(one.pick(text), ending)
        one.now_s += 100.0
        assert one.pick(text).predicted_cached_tokens == 0

    def test_an_answer_cut_after_its_first_token_leaves_the_prefix_held(self) -> None:
        one = fleet(1)
        text = prompt(1, 4_000)
        decision = one.pick(text)
        one.start(decision)
        one.end(decision, Ending.CANCELLED)
        assert one.pick(text).predicted_cached_tokens > 3_000

    def test_zero_cached_where_much_was_believed_forgets_all_that_was_idle_longer(self) -> None:
        one = fleet(1)
        texts = [prompt(number, 4_000) for number in range(5)]
        for text in texts:
            one.serve(text)
        one.serve(texts[2] + prompt(9, 100), cached_tokens=0)
        found = []
        for text in texts:
            decision = one.pick(text + prompt(10, 100))
            found.append(decision.predicted_cached_tokens > 0)
            one.end(decision, Ending.CANCELLED)
        assert found == [False, False, True, True, True]

    def test_two_requests_side_by_side_are_no_proof_of_a_lost_prefix(self) -> None:
        one = fleet(1)
        old = prompt(1, 4_000)
        one.serve(old)
        text = prompt(2, 4_000)
        pair = [one.pick(text), one.pick(text)]
        for decision in pair:
            one.start(decision)
            one.end(decision, cached_tokens=0)
        assert one.router.status(one.now_s)[0].trust_ratio == 1.0
        assert one.pick(old).predicted_cached_tokens > 3_000

    def test_an_engine_that_never_finds_what_we_predict_is_trusted_less_and_can_win_trust_back(self) -> None:
        one = fleet(1)
        text = prompt(1, 4_000)
        for _ in range(20):
            one.serve(text, cached_tokens=0)
        assert one.router.status(one.now_s)[0].trust_ratio < 0.1
        assert one.pick(text).predicted_cached_tokens < 400
        two = fleet(1)
        for report in [0] * 20 + [3_900] * 20:
            two.serve(text, cached_tokens=report)
        assert two.router.status(two.now_s)[0].trust_ratio > 0.9

    def test_an_unreported_count_changes_no_belief(self) -> None:
        one = fleet(1)
        text = prompt(1, 4_000)
        for _ in range(5):
            decision = one.pick(text)
            one.start(decision)
            one.router.finished(decision.ticket, Finish(Ending.COMPLETED), one.now_s)
        assert one.router.status(one.now_s)[0].trust_ratio == 1.0

    def test_a_dead_engine_is_believed_to_hold_nothing_and_a_crashing_one_keeps_its_prefixes(self) -> None:
        for ending, kept in ((Ending.UNREACHABLE, False), (Ending.FAILED, True)):
            one = fleet(1)
            warm(one, "a", prompt(1, 4_000))
            for number in range(5):
                one.end(one.pick(prompt(10 + number, 100)), ending)
            one.now_s += 5.0
            assert (one.pick(prompt(1, 4_000)).predicted_cached_tokens > 0) is kept

    @pytest.mark.parametrize(
        "other", [replace(endpoint("a"), incarnation="2"), replace(endpoint("a"), url="http://elsewhere:1")]
    )
    def test_a_new_incarnation_starts_empty_and_its_old_requests_still_end(self, other: Endpoint) -> None:
        one = fleet(1)
        warm(one, "a", prompt(1, 4_000))
        running = one.pick(prompt(2, 100))
        one.endpoints[0] = other
        one.router.set_endpoints(one.endpoints, one.now_s)
        assert one.load("a") == (0, 0, 0)
        decision = one.pick(prompt(1, 4_000))
        assert decision.predicted_cached_tokens == 0
        one.end(running, Ending.FAILED)
        assert one.load("a")[0] == 1

    def test_an_engine_cannot_be_believed_to_hold_more_than_its_kv(self) -> None:
        one = Fleet([endpoint("a", replace(SPEED, kv_capacity_tokens=10_000))])
        for number in range(4):
            warm(one, "a", prompt(number, 4_000))
        held = []
        for number in (3, 2, 1, 0):
            decision = one.pick(prompt(number, 4_000) + b"x" * 400, exclude=frozenset())
            held.append(decision.predicted_cached_tokens)
            one.end(decision, Ending.REFUSED)
        assert held[0] > 3_500 and held[1] > 3_500 and held[3] == 0
        assert one.router.status(one.now_s)[0].held_tokens <= 10_000

    def test_token_estimates_are_corrected_by_what_engines_count(self) -> None:
        one = fleet(1)
        for number in range(30):
            decision = one.pick(prompt(number, 1_000))
            one.start(decision)
            one.router.finished(decision.ticket, Finish(Ending.COMPLETED, 0, 500, 40), one.now_s)
        assert one.pick(prompt(99, 1_000)).ticket.input_tokens == pytest.approx(500, rel=0.02)

    def test_an_answer_that_comes_whole_teaches_no_speed(self) -> None:
        one = Fleet([endpoint("a", None)])
        decision = one.pick(prompt(1, 4_000), streamed=False)
        one.now_s += 100.0
        one.start(decision)
        one.router.finished(decision.ticket, Finish(Ending.COMPLETED, 0, 4_000, 500), one.now_s)
        assert not one.router.status(one.now_s)[0].speed_known

    def test_speeds_are_learned_and_an_unknown_engine_is_taken_as_its_pools(self) -> None:
        crew = Fleet([endpoint("a", None), endpoint("b", None)])
        for number in range(30):
            decision = crew.pick(prompt(number, 4_000), exclude=frozenset("b"))
            crew.router.sent(decision.ticket, crew.now_s)
            crew.now_s += 8.0
            crew.start(decision)
            crew.now_s += 2.0
            crew.router.finished(decision.ticket, Finish(Ending.COMPLETED, 0, 4_000, 101), crew.now_s)
        a, b = crew.router.status(crew.now_s)
        assert a.speed_known and a.speed.prefill_tok_per_s == pytest.approx(500, rel=0.1)
        assert a.speed.decode_s_per_token == pytest.approx(0.020)
        assert not b.speed_known and b.speed.prefill_tok_per_s == pytest.approx(500, rel=0.6)


class TestAnswers:
    def test_no_such_model_and_a_model_not_known_yet(self) -> None:
        one = fleet(1)
        assert one.route(one.request(b"", model="other")) == NoRoute(NoRouteReason.NO_SUCH_MODEL, None)
        one.router.set_endpoints([replace(endpoint("a"), models=frozenset())], one.now_s)
        assert one.route(one.request(b"")) == NoRoute(NoRouteReason.NO_SUCH_MODEL, None)

    def test_why_nothing_could_be_picked(self) -> None:
        one = fleet(1)
        text = prompt(1, 100)
        none = one.route(one.request(text, exclude=frozenset("a")))
        assert none == NoRoute(NoRouteReason.EXCLUDED, None, (("a", Unfit.EXCLUDED),))
        for _ in range(5):
            one.end(one.pick(text), Ending.FAILED)
        none = one.route(one.request(text))
        assert none == NoRoute(NoRouteReason.ALL_BROKEN, 5.0, (("a", Unfit.BROKEN),))
        one.router.set_endpoints([replace(endpoint("a"), drain=True)], one.now_s)
        none = one.route(one.request(text))
        assert none == NoRoute(NoRouteReason.ALL_DRAINING, None, (("a", Unfit.DRAINING),))

    def test_a_prefill_only_engine_takes_no_whole_requests(self) -> None:
        two = Fleet([replace(endpoint("a"), role="prefill"), replace(endpoint("b"), role="decode")])
        assert {two.pick(prompt(number, 100)).endpoint.endpoint_id for number in range(10)} == {"b"}

    def test_a_decision_explains_itself(self) -> None:
        crew = Fleet([*(endpoint(name) for name in "abc"), replace(endpoint("d"), drain=True)])
        text = prompt(1, 4_000)
        warm(crew, "b", text)
        occupy(crew, "c", 3, tokens=2_000)
        decision = crew.pick(text)
        assert decision.endpoint.endpoint_id == "b"
        best, cold, busy, draining = decision.candidates
        assert (best.endpoint_id, best.lost_by) == ("b", "")
        assert (cold.endpoint_id, cold.lost_by) == ("a", "prefill")
        assert (busy.endpoint_id, busy.lost_by) == ("c", "queue")
        assert (draining.endpoint_id, draining.unfit, draining.lost_by) == ("d", Unfit.DRAINING, "draining")
        assert best.total_s is not None and cold.total_s is not None
        assert best.total_s == min(each.total_s for each in decision.candidates if each.total_s is not None)
        assert decision.predicted_ttft_s == pytest.approx(sum((best.terms_s or ())[index] for index in (0, 1, 3)))

    def test_the_summary_is_one_short_ascii_line(self) -> None:
        crew = Fleet([endpoint(f"engine-{number}-ü") for number in range(30)])
        line = crew.pick(prompt(1, 4_000)).summary()
        assert line.isascii() and line.isprintable() and len(line) < 1_000
        assert line.startswith("pick=engine-") and "cached=0/4000" in line and "and 21 more" in line

    def test_the_record_is_json_with_units_and_no_content(self) -> None:
        two = fleet()
        text = b"a secret " * 500
        record = json.loads(json.dumps(two.pick(text).record()))
        assert set(record["candidates"][0]["terms"]) == {f"{name}_s" for name in TERMS}
        assert "secret" not in json.dumps(record)

    def test_a_prompt_without_blocks_is_routed_by_load_alone(self) -> None:
        two = fleet()
        occupy(two, "a", 2)
        decision = two.route(RouteRequest(MODEL, Chain((), 0), 0, 10))
        assert isinstance(decision, RouteDecision) and decision.endpoint.endpoint_id == "b"

    def test_a_near_engine_is_preferred_to_an_equal_one_far_away(self) -> None:
        config = RouterConfig(hops=HopTable(Place("z1", "r1")))
        crew = Fleet([replace(endpoint("far"), region="r2"), replace(endpoint("near"), region="r1")], config)
        picked = set()
        for number in range(10):
            picked.add(crew.serve(prompt(number, 100)).endpoint.endpoint_id)
            crew.now_s += 5.0  # far below what would make it busy
        assert picked == {"near"}

    def test_answers_that_come_whole_do_not_make_their_engine_look_stuck(self) -> None:
        one = fleet(1)
        decision = one.pick(prompt(1, 1_000), streamed=False)
        one.now_s += 60.0
        assert one.load("a")[:2] == (0, 1)
        one.end(decision)
        assert one.load("a") == (0, 0, 0)

    def test_status_shows_what_is_broken(self) -> None:
        one = fleet(1)
        for _ in range(5):
            one.end(one.pick(prompt(1, 100)), Ending.FAILED)
        assert one.router.status(one.now_s)[0].breaker is BreakerState.OPEN
        assert one.router.status(one.now_s + 5)[0].breaker is BreakerState.HALF_OPEN
        assert one.router.models == {MODEL}


class TestNews:
    def make(self) -> tuple[Fleet, Fleet]:
        return fleet(2, SHARING), fleet(2, SHARING)

    def test_a_sibling_knows_where_a_session_went_and_how_busy_that_engine_is(self) -> None:
        ours, theirs = self.make()
        text = prompt(1, 4_000)
        decision = ours.pick(text)
        name = decision.endpoint.endpoint_id
        assert theirs.router.hear("p", ours.router.take_news(ours.now_s), ours.now_s) == []
        assert theirs.load(name) == ours.load(name)
        ours.start(decision)
        ours.end(decision)
        theirs.router.hear("p", ours.router.take_news(ours.now_s), ours.now_s)
        assert theirs.load(name) == (0, 0, 0)
        after = theirs.pick(text + prompt(2, 100))
        assert after.endpoint.endpoint_id == name and not after.new_session

    def test_a_withdrawn_store_is_withdrawn_everywhere(self) -> None:
        ours, theirs = self.make()
        text = prompt(1, 4_000)
        ours.end(ours.pick(text), Ending.REFUSED)
        theirs.router.hear("p", ours.router.take_news(ours.now_s), ours.now_s)
        assert theirs.pick(text).predicted_cached_tokens == 0

    def test_a_lost_cache_is_lost_everywhere(self) -> None:
        ours, theirs = fleet(1, SHARING), fleet(1, SHARING)
        text = prompt(1, 4_000)
        ours.serve(text)
        theirs.router.hear("p", ours.router.take_news(ours.now_s), ours.now_s)
        ours.now_s += 10.0
        theirs.now_s = ours.now_s
        for number in range(5):
            ours.end(ours.pick(prompt(10 + number, 100)), Ending.UNREACHABLE)
        theirs.router.hear("p", ours.router.take_news(ours.now_s), ours.now_s)
        assert theirs.pick(text).predicted_cached_tokens == 0

    def test_a_missing_beginning_is_asked_for_and_healed(self) -> None:
        ours, theirs = self.make()
        text = prompt(1, 4_000)
        name = ours.serve(text).endpoint.endpoint_id
        ours.router.take_news(ours.now_s)  # lost on the way
        longer = text + prompt(2, 400)
        ours.serve(longer)
        (missing,) = theirs.router.hear("p", ours.router.take_news(ours.now_s), ours.now_s)
        path = ours.router.whole_path(*missing)
        assert path is not None and path.endpoint_id == name
        assert theirs.router.hear("p", News(paths=(path,)), ours.now_s) == []
        assert theirs.pick(longer).predicted_cached_tokens > 4_000
        assert ours.router.whole_path(name, 12345) is None and ours.router.whole_path("nobody", 1) is None

    def test_a_dead_siblings_load_is_dropped(self) -> None:
        ours, theirs = self.make()
        decision = ours.pick(prompt(1, 4_000))
        theirs.router.hear("p", ours.router.take_news(ours.now_s), ours.now_s)
        theirs.router.forget_peer("p")
        assert theirs.load(decision.endpoint.endpoint_id) == (0, 0, 0)

    def test_a_full_report_names_every_endpoint_in_use(self) -> None:
        ours, _ = self.make()
        occupy(ours, "a", 1)
        occupy(ours, "b", 2)
        ours.router.take_news(ours.now_s)
        assert ours.router.take_news(ours.now_s).loads == ()
        loads = ours.router.take_news(ours.now_s, everything=True).loads
        assert {each.endpoint_id: each.waiting_count for each in loads} == {"a": 1, "b": 2}

    def test_news_of_unknown_endpoints_are_ignored(self) -> None:
        ours, _ = self.make()
        ours.pick(prompt(1, 400))
        other = Fleet([endpoint("z")], SHARING)
        assert other.router.hear("p", ours.router.take_news(ours.now_s), ours.now_s) == []

    def test_without_siblings_no_news_are_kept(self) -> None:
        alone = fleet(2)
        alone.pick(prompt(1, 400))
        news = alone.router.take_news(alone.now_s)
        assert (news.loads, news.paths) == ((), ())


def test_engine_speed_of_the_list_wins_over_what_was_learned() -> None:
    crew = Fleet([endpoint("a", None)])
    crew.serve(prompt(1, 4_000))
    fast = EngineSpeed(50_000.0, 0.0, 0.001)
    crew.router.set_endpoints([endpoint("a", fast)], crew.now_s)
    assert crew.router.status(crew.now_s)[0].speed == fast
