"""The policies that a simulation can name, asked directly."""

from __future__ import annotations

from typing import NamedTuple

from router.adapters import policies
from tests.fakes.policy_fleet import Ask, Engine, Fleet


class Usage(NamedTuple):
    cached_tokens: int
    input_tokens: int
    output_tokens: int


FLEET = Fleet(tuple(Engine(f"e{number}", kv_capacity_tokens=100_000, prefill_overhead_s=0.01) for number in range(3)))


def test_round_robin_goes_round() -> None:
    policy = policies.round_robin(FLEET)
    assert [policy.pick(Ask(serial), 0.0) for serial in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_requests_counts_what_ended() -> None:
    policy = policies.least_requests(FLEET)
    picks = [policy.pick(Ask(serial), 0.0) for serial in range(3)]
    assert sorted(picks) == [0, 1, 2]
    policy.finished(1, Usage(0, 64, 9), 1.0)
    assert policy.pick(Ask(3), 2.0) == picks[1]


def test_least_requests_draws_among_ties_by_the_seed() -> None:
    first = [policies.least_requests(FLEET).pick(Ask(0), 0.0) for _ in range(3)]
    assert len(set(first)) == 1
    drawn = {policies.least_requests(Fleet(FLEET.engines, seed=seed)).pick(Ask(0), 0.0) for seed in range(20)}
    assert drawn == {0, 1, 2}


def test_the_production_router_stays_with_the_prefix_and_releases_its_load() -> None:
    policy = policies.inferplane_route(FLEET)
    blocks = tuple(range(1, 501))
    first = policy.pick(Ask(0, input_tokens=8000, blocks=blocks), 0.0)
    assert first is not None
    policy.first_token(0, 0.9)
    policy.finished(0, Usage(0, 8000, 50), 2.0)
    again = policy.pick(Ask(1, input_tokens=8064, blocks=(*blocks, 501, 502, 503, 504)), 3.0)
    assert again == first
    policy.first_token(1, 3.1)
    policy.finished(1, Usage(8000, 8064, 50), 4.0)
    assert all(status.load.kv_tokens == 0 for status in policy.status(5.0))


def test_a_model_that_nobody_serves_is_refused() -> None:
    assert policies.inferplane_route(FLEET).pick(Ask(0, model="other"), 0.0) is None


def test_an_engine_s_refusal_frees_the_load_too() -> None:
    policy = policies.inferplane_route(FLEET)
    policy.pick(Ask(0, blocks=(1, 2, 3, 4)), 0.0)
    policy.finished(0, Usage(0, 64, 0), 0.0)
    assert all(status.load.waiting_count == 0 for status in policy.status(1.0))
