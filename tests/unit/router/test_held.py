"""Whose word counts on what an engine holds: its events', the router's history, or a pick of a moment ago."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from router.decision import RouteDecision, Told
from router.endpoints import Ending, Finish
from tests.fakes.fleet import Fleet, endpoint, prompt

TEXT = prompt(1, 8_192)


def fleet(count: int = 2) -> Fleet:
    return Fleet([endpoint(name) for name in "abcdefgh"[:count]])


def warm(crew: Fleet, name: str, text: bytes = TEXT) -> None:
    others = frozenset(each.endpoint_id for each in crew.endpoints) - {name}
    done = crew.pick(text, exclude=others)
    crew.start(done)
    crew.end(done)
    crew.now_s += 600.0


def ask(crew: Fleet, text: bytes, held_ratio: Mapping[str, float]) -> RouteDecision:
    return crew.pick(text, told=Told(len(text) // 4, held_ratio))


def cached(decision: RouteDecision) -> dict[str, int | None]:
    return {each.endpoint_id: each.cached_tokens for each in decision.candidates}


def test_events_overrule_the_history_both_ways() -> None:
    crew = fleet()
    warm(crew, "a")
    decision = ask(crew, TEXT, {"a": 0.0, "b": 0.5})
    assert cached(decision) == {"a": 0, "b": 4_096} and decision.endpoint.endpoint_id == "b"


def test_an_engine_whose_events_are_not_heard_is_judged_by_the_history() -> None:
    crew = fleet()
    warm(crew, "a")
    decision = ask(crew, TEXT, {"b": 0.25})
    assert cached(decision) == {"a": 8_191, "b": 2_048} and decision.endpoint.endpoint_id == "a"


def test_tokens_that_are_known_are_not_estimated() -> None:
    crew = fleet(1)
    for _ in range(5):  # the estimate is taught to be half of the truth
        made = crew.pick(prompt(2, 1_000))
        crew.start(made)
        crew.end(made, cached_tokens=0)
        crew.router._models["m"].input_ratio = 0.5
    assert crew.pick(TEXT).ticket.input_tokens == 4_096
    told = ask(crew, TEXT, {})
    assert told.ticket.input_tokens == 8_192 and told.ticket.asked_tokens == 0, "nor is the estimate taught by them"


def test_eight_siblings_of_a_cold_prefix_are_prefilled_on_at_most_two_engines() -> None:
    crew = fleet(8)
    nobody = dict.fromkeys("abcdefgh", 0.0)
    shared = prompt(1, 16_000)
    picks: Counter[str] = Counter()
    for number in range(8):
        picks[ask(crew, shared + prompt(100 + number, 100), nobody).endpoint.endpoint_id] += 1
        crew.now_s += 0.006
    assert len(picks) <= 2, picks


def test_what_was_just_sent_counts_until_events_should_have_told() -> None:
    crew = fleet()
    nobody = {"a": 0.0, "b": 0.0}
    first = ask(crew, TEXT, nobody)
    home = first.endpoint.endpoint_id
    crew.start(first)
    crew.end(first)
    crew.now_s += first.predicted_ttft_s + 1.9
    soon = ask(crew, TEXT[:20_000], nobody)
    assert (cached(soon)[home] or 0) > 4_000
    crew.start(soon)
    crew.end(soon)
    crew.now_s += 60.0
    assert cached(ask(crew, TEXT, nobody))[home] == 0, "the engine says that it is gone"


def test_the_share_that_was_told_is_what_the_report_is_held_to() -> None:
    crew = fleet(1)
    for _ in range(20):
        made = ask(crew, TEXT, {"a": 1.0})
        crew.start(made)
        crew.router.finished(made.ticket, Finish(Ending.COMPLETED, 0, 8_192, 10), crew.now_s)
        crew.now_s += 60.0
    assert crew.router.status(crew.now_s)[0].trust_ratio < 0.1, "events that are not borne out are believed less"
