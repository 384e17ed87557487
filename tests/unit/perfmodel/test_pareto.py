"""The sweep behind `perf pareto`: fronts that nothing beats, rate-matched pairs, prices, and engines left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.errors import ConfigError
from perfmodel.search.options import engine_options
from perfmodel.search.pareto import Point, front, fronts, points
from perfmodel.search.plan import EngineOption, Fleet
from perfmodel.serving import Lengths, Steps
from perfmodel.step_time import decode_batch
from tests.fakes.sizing import CARD, CHEAP, CHOICES, FAST, OFFERS, RooflineSteps, architecture, offer

LENGTHS = Lengths(512, 256)


def swept(*, mixed: bool = True) -> list[Point]:
    options, _ = engine_options(architecture(), Fleet(OFFERS), CHOICES, 768)
    return points(options, LENGTHS, RooflineSteps, mixed=mixed)


def point(user: float, device: float) -> Point:
    return Point(("a",), f"{user}/{device}", 1, 1, user, device, 1.0, 1.0)


def test_a_front_holds_what_nothing_beats() -> None:
    found = [point(100, 10), point(90, 5), point(80, 20), point(80, 19), point(10, 50), point(10, 50.1)]
    assert [each.what for each in front(found, lambda each: each.device_tok_per_s)] == ["100/10", "80/20", "10/50.1"]


def test_small_gains_are_left_out() -> None:
    found = [point(100, 10), point(99, 10.05), point(98, 10.2)]
    assert [each.what for each in front(found, lambda each: each.device_tok_per_s)] == ["100/10", "98/10.2"]


def test_every_point_of_a_front_is_beaten_by_none_of_its_kind() -> None:
    found = swept()
    for names, best in fronts(found).items():
        mine = [each for each in found if each.accelerators == names]
        for one in best:
            assert not any(
                each.user_tok_per_s > one.user_tok_per_s * 1.001
                and each.device_tok_per_s > one.device_tok_per_s * 1.011
                for each in mine
            )


def test_a_device_without_compute_appears_in_pairs_only() -> None:
    names = {each.accelerators for each in swept()}
    assert ("card",) not in names and ("fast", "card") in names
    assert ("card", "fast") not in names, "it computes no prompts"
    assert all(len(each) == 1 for each in {point.accelerators for point in swept(mixed=False)})


def test_a_pair_is_rate_matched() -> None:
    options, _ = engine_options(architecture(), Fleet((offer(FAST, 2.0), offer(CARD, 0.5))), CHOICES, 768)
    pairs = [each for each in points(options, LENGTHS, RooflineSteps, mixed=True) if len(each.accelerators) == 2]
    assert pairs
    cards = [option for option in options if option.offer.name == "card"]
    fastest_s = min(RooflineSteps(option).step_s(decode_batch(1, 640)) for option in cards)
    for each in pairs:
        assert each.user_tok_per_s <= 1 / fastest_s * (1 + 1e-9)
        assert each.usd_per_million_output_tokens is not None and each.usd_per_million_output_tokens > 0


def test_the_price_follows_the_throughput() -> None:
    for each in swept(mixed=False):
        usd_per_h = each.device_count * {"fast": 2.0, "cheap": 1.0}[each.accelerators[0]]
        tok_per_h = 3600 * each.device_tok_per_s * each.device_count
        assert each.usd_per_million_output_tokens == pytest.approx(usd_per_h / tok_per_h * 1e6)


def test_engines_without_step_times_are_left_out() -> None:
    def steps(option: EngineOption) -> Steps:
        if option.offer.name == "cheap":
            raise ConfigError("not known")
        return RooflineSteps(option)

    options, _ = engine_options(architecture(), Fleet((offer(FAST, 2.0), offer(CHEAP, 1.0))), CHOICES, 768)
    names = {each.accelerators for each in points(options, LENGTHS, steps, mixed=True)}
    assert names == {("fast",)}


def test_no_concurrency_beyond_the_cache() -> None:
    options, _ = engine_options(architecture(), Fleet((offer(FAST, 2.0),)), CHOICES, 768)
    tight = [replace(option, kv_capacity_tokens=3000) for option in options]
    assert max(each.concurrency_count for each in points(tight, LENGTHS, RooflineSteps, mixed=False)) == 2
