"""Fetching a prompt's KV from another engine: when it is cheaper, what it costs, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.decision import RouteDecision
from router.endpoints import Endpoint
from tests.fakes.fleet import Fleet, endpoint, prompt

# 100,000 bytes a token at 1e9 bytes/s: 0.1 ms, a tenth of what computing it takes.
LINK = {"kv_bytes_per_token": 100_000, "kv_link_bytes_per_s": 1e9, "pulls_kv": True}
TEXT = prompt(1, 8_192)


def linked(name: str, **changes: object) -> Endpoint:
    return replace(endpoint(name), **{**LINK, **changes})  # type: ignore[arg-type]  # a test names only what it changes


def busy_holder(*endpoints: Endpoint) -> Fleet:
    """Engine a holds the prompt and has 30 s of other prefills ahead."""
    crew = Fleet(endpoints)
    names = frozenset(each.endpoint_id for each in endpoints)
    first = crew.pick(TEXT, exclude=names - {"a"})
    crew.start(first)
    crew.end(first)
    crew.now_s += 600.0
    crew.pick(prompt(2, 30_000), exclude=names - {"a"})
    return crew


def terms(decision: RouteDecision, name: str) -> dict[str, float]:
    found = next(each for each in decision.candidates if each.endpoint_id == name).record()["terms"]
    assert isinstance(found, dict)
    return found


def test_an_idle_engine_fetches_what_a_busy_one_holds() -> None:
    crew = busy_holder(linked("a"), linked("b"))
    decision = crew.pick(TEXT)
    assert (decision.endpoint.endpoint_id, decision.pull_from) == ("b", crew.endpoints[0])
    assert decision.predicted_cached_tokens == 8_191  # one token is always computed
    assert terms(decision, "b")["fetch_s"] == pytest.approx(8_191 * 1e-4)
    assert decision.predicted_ttft_s == pytest.approx(8_191 * 1e-4 + 0.001 + 0.0005)
    assert "pull_from=a" in decision.summary() and decision.record()["pull_from"] == "a"


def test_the_links_move_one_prompt_after_the_other() -> None:
    crew = busy_holder(linked("a"), linked("b"), linked("c"))
    first, second = crew.pick(TEXT), crew.pick(TEXT + prompt(3, 4_000))
    assert first.pull_from is not None
    wait_s = terms(first, first.endpoint.endpoint_id)["fetch_s"]
    other = ({"b", "c"} - {first.endpoint.endpoint_id}).pop()
    assert terms(second, other)["fetch_s"] > 1.9 * wait_s


def test_a_slow_link_an_engine_without_one_or_an_idle_holder_is_no_reason() -> None:
    slow = linked("b", kv_link_bytes_per_s=5e7)
    for crew in (
        busy_holder(linked("a"), slow),
        busy_holder(linked("a"), endpoint("b")),
        busy_holder(linked("a", pulls_kv=False), linked("b")),
    ):
        decision = crew.pick(TEXT)
        assert (decision.endpoint.endpoint_id, decision.pull_from) == ("b", None)
        assert decision.predicted_cached_tokens == 0
    idle = Fleet([linked("a"), linked("b")])
    home = idle.serve(TEXT).endpoint
    idle.now_s += 600.0
    decision = idle.pick(TEXT)
    assert (decision.endpoint, decision.pull_from) == (home, None)


def test_what_was_fetched_is_held_there_too() -> None:
    crew = busy_holder(linked("a"), linked("b"))
    fetched = crew.pick(TEXT)
    crew.start(fetched)
    crew.end(fetched)
    crew.now_s += 1.0
    again = crew.pick(TEXT + prompt(4, 10))
    assert (again.endpoint.endpoint_id, again.pull_from) == ("b", None)
    assert again.predicted_cached_tokens == 8_192
