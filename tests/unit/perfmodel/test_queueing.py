"""The analytic queue: its limits, its bars against a simulated one on a part of the committed grid, planted faults."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from perfmodel.errors import ConfigError
from perfmodel.harness import ArrivalLaw, HarnessScenario, replay, replay_requests
from perfmodel.queueing import loops
from perfmodel.queueing.load import Load, full_ratio
from perfmodel.queueing.loops import closed_loop, open_loop
from perfmodel.serving import FrontEnd, LengthLaw, Lengths, SchedulingOrder, Served, ServingEngine
from perfmodel.step_time import BatchShape, StepTable
from tests.bench import bench_queueing
from tests.bench.bench_queueing import BARS, GRID, TPOT_BAR, GridSteps, Point, compare

# Every eleventh of the plain points (each load, length, law, order and slot count), and of the calibrated engines those
# below 0.9 every thirteenth: a queue near capacity needs longer runs than a test has.
PLAIN = [point for point in GRID if point.kind == "plain"]
CALIBRATED = [point for point in GRID if point.judged and point.kind != "plain" and point.utilisation < 0.9]
PART = [*PLAIN[::11], *CALIBRATED[::13]]


def engine(**fields: object) -> ServingEngine:
    values: dict[str, object] = {
        "step": GridSteps(),
        "kv_capacity_tokens": 10_000_000,
        "max_batched_tokens": 8192,
        "max_sequence_count": 256,
        **fields,
    }
    return ServingEngine(**values)  # type: ignore[arg-type]  # fields by name


LENGTHS = Lengths(1024, 256)


def test_the_part_of_the_grid_meets_every_value() -> None:
    for field in ("input_tokens", "output_tokens", "law", "order", "slots", "utilisation"):
        assert {getattr(point, field) for point in PART[: len(PLAIN[::11])]} == {
            getattr(point, field) for point in PLAIN
        }
    for field in ("input_tokens", "output_tokens", "law", "order", "slots", "model", "chunk_tokens", "cached_ratio"):
        assert {getattr(point, field) for point in PART} == {getattr(point, field) for point in [*PLAIN, *CALIBRATED]}


@pytest.mark.parametrize("point", PART, ids=str)
def test_mean_ttft_is_within_the_bar_of_the_simulated_one(point: Point) -> None:
    compared = compare(point, request_count=12_000, seeds=2)
    assert abs(compared.mean_error) <= BARS[point.utilisation]
    assert abs(compared.tpot_error) <= TPOT_BAR
    assert abs(compared.rate_error) <= 0.05


# A step has room for hundreds of these prompts and meets one or two: each is a step of its own all the same, which its
# fixed cost makes felt. (The states of the chain were once so coarse that most prompts were none of them, and every
# second-long wait for a slot that follows was missed.)
SHORT_PROMPTS = [
    Point(200, 20, LengthLaw.LOGNORMAL, SchedulingOrder.PREFILL_FIRST, 256, 0.5, "dense", 8192, 0.8),
    Point(200, 20, LengthLaw.FIXED, SchedulingOrder.PREFILL_FIRST, 256, 0.9, "latent", 8192),
    Point(1500, 200, LengthLaw.LOGNORMAL, SchedulingOrder.DECODE_FIRST, 256, 0.7, "latent", 8192, 1.0),
]


@pytest.mark.parametrize("point", SHORT_PROMPTS, ids=str)
def test_a_prompt_far_shorter_than_a_step_has_room_for_is_felt_by_tokens(point: Point) -> None:
    compared = compare(point, request_count=12_000, seeds=2)
    assert abs(compared.tpot_error) <= TPOT_BAR
    assert abs(compared.mean_error) <= BARS[0.7]


def erlang_c(servers: int, offered: float) -> float:
    """Erlang's chance that all servers are busy, as the sums of his formula."""
    free = sum(offered**busy / math.factorial(busy) for busy in range(servers))
    full = offered**servers / math.factorial(servers) / (1 - offered / servers)
    return full / (free + full)


@pytest.mark.parametrize("slots", [1, 4, 32, 100])
@pytest.mark.parametrize("utilisation", [0.5, 0.9, 0.99])
def test_without_prompts_and_with_equal_steps_slots_are_erlangs_servers(slots: int, utilisation: float) -> None:
    steps = GridSteps()
    flat = np.full(8193, 0.01)
    steps._table = StepTable(flat, 0.0, 0.0, 0.0, 0.0)
    work = loops._work(engine(step=steps, max_sequence_count=slots), Lengths(1, 200, LengthLaw.FIXED))
    capacity = slots / (200 * 0.01)
    load = Load(utilisation * capacity, 1.0, 0.0, 0.0, capacity)
    offered = utilisation * slots
    assert full_ratio(work, offered, load, 1.0) == pytest.approx(erlang_c(slots, offered), rel=1e-6)


def test_uneven_arrivals_and_uneven_room_find_more_slots_taken() -> None:
    work = loops._work(engine(max_sequence_count=64), LENGTHS)
    capacity = float(capacity_per_s(engine(max_sequence_count=64), LENGTHS))

    def full(gap_cv2: float, room_cv2: float) -> float:
        load = Load(0.9 * capacity, gap_cv2, 0.0, 0.0, capacity)
        return float(full_ratio(work._replace(room_cv2=room_cv2), 50.0, load, 1.0))

    assert full(0.5, 0.0) < full(1.0, 0.0) < full(4.0, 0.0) < 1.0
    assert full(1.0, 0.0) < full(1.0, 1.0) < 1.0


def test_an_engine_whose_budget_binds_first_is_never_full() -> None:
    budget = engine(max_batched_tokens=512)
    lengths = Lengths(4000, 60)
    capacity = float(capacity_per_s(budget, lengths))
    load = Load(0.95 * capacity, 1.0, 0.0, 0.0, capacity)
    assert full_ratio(loops._work(budget, lengths), 10.0, load, 1.0) == 0.0


def test_a_judged_point_is_simulated_until_its_noise_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    point = next(point for point in PLAIN if point.utilisation == 0.9)
    asked: list[tuple[int, int]] = []

    def runs(_: Point, rate_per_s: float, request_count: int, seeds: range) -> np.ndarray:
        asked.append((request_count, len(seeds)))
        return np.array([[1.0 + 0.4 * (seed % 2), 1.0, 1.0, 1.0] for seed in seeds])

    monkeypatch.setattr(bench_queueing, "_runs", runs)
    told = bench_queueing.simulated(point, 1.0, 20_000)
    assert asked[:2] == [(20_000, 16), (65_536, 16)]
    assert bench_queueing.noise(told) <= bench_queueing.MOST_NOISE < bench_queueing.noise(told[:-16])
    asked.clear()
    bench_queueing.simulated(dataclasses.replace(point, utilisation=0.7), 1.0, 20_000)
    assert asked == [(20_000, 2)]


def test_an_almost_idle_engine_has_the_ttft_of_one_prompt() -> None:
    front = FrontEnd(request_s=0.02, prompt_token_s=1e-6, first_token_s=0.001)
    served = open_loop(engine(front_end=front), LENGTHS, 0.001)
    alone_s = GridSteps().step_s(BatchShape(1, 1024, 0, 1024 * 1025 // 2))
    assert served.ttft_mean_ms == pytest.approx((alone_s + 0.02 + 0.001024 + 0.001) * 1e3, rel=0.01)
    assert served.utilisation_ratio < 0.01
    assert not served.saturated


def test_beyond_capacity_the_queue_has_no_end_and_throughput_stays() -> None:
    full = open_loop(engine(), LENGTHS, 1.0)
    capacity = 1.0 / full.utilisation_ratio
    served = open_loop(engine(), LENGTHS, 3 * capacity)
    assert served.saturated
    assert math.isinf(served.ttft_mean_ms)
    assert served.utilisation_ratio == pytest.approx(3.0, rel=1e-3)
    assert served.request_per_s == pytest.approx(capacity, rel=1e-3)
    assert open_loop(engine(), LENGTHS, 0.999 * capacity).ttft_mean_ms < math.inf


def test_kv_room_bounds_capacity() -> None:
    rates = [
        1 / open_loop(engine(kv_capacity_tokens=tokens), LENGTHS, 0.1).utilisation_ratio for tokens in (20_000, 10**7)
    ]
    assert rates[0] < 0.8 * rates[1]


def drained_per_s(offline: ServingEngine, lengths: Lengths, request_count: int = 3000) -> float:
    """The rate at which an engine with everything queued ends requests, over the middle half of the run."""
    scenario = HarnessScenario(lengths, ArrivalLaw.OPEN_LOOP, request_count=request_count)
    end_s = np.sort(replay_requests(offline, scenario, seed=1).end_s)
    first, last = request_count // 4, 3 * request_count // 4
    return float((last - first) / (end_s[last] - end_s[first]))


def capacity_per_s(served_engine: ServingEngine, lengths: Lengths) -> float:
    return 0.001 / open_loop(served_engine, lengths, 0.001).utilisation_ratio


# Prompt, answer, token budget, slots. In turn: a prompt that needs a little more than the room beside the decodes (two
# steps alone, 1.1 in a queue), one of many steps, a budget that the decodes alone could fill, several prompts a step,
# slots that bind, and KV room that binds (`ROOM_TOKENS`; evicted prompts run twice there, which the closed form leaves
# out).
DRAINED = [
    (2000, 300, 2048, 256),
    (4000, 60, 512, 256),
    (300, 40, 512, 1024),
    (500, 100, 4096, 256),
    (2000, 300, 2048, 32),
    (1024, 256, 8192, 64),
]
ROOM_TOKENS = {(1024, 256, 8192, 64): 30_000}


@pytest.mark.parametrize("case", DRAINED, ids=str)
def test_capacity_is_what_a_full_queue_drains_at(case: tuple[int, int, int, int]) -> None:
    prompt, answer, budget, slots = case
    lengths = Lengths(prompt, answer)
    full = engine(
        max_batched_tokens=budget, max_sequence_count=slots, kv_capacity_tokens=ROOM_TOKENS.get(case, 10_000_000)
    )
    assert capacity_per_s(full, lengths) == pytest.approx(
        drained_per_s(full, lengths), rel=0.08 if case in ROOM_TOKENS else 0.05
    )


@pytest.mark.parametrize("load_ratio", [0.5, 0.7, 0.9])
def test_a_prompt_beyond_the_budget_waits_as_in_its_replay(load_ratio: float) -> None:
    lengths = Lengths(2000, 300)
    chunked = engine(max_batched_tokens=2048)
    rate = load_ratio * capacity_per_s(chunked, lengths)
    scenario = HarnessScenario(lengths, ArrivalLaw.OPEN_LOOP, rate_per_s=rate, request_count=12_000)
    run = replay_requests(chunked, scenario, seed=1)
    told = open_loop(chunked, lengths, rate)
    assert told.ttft_mean_ms == pytest.approx(run.ttft_s[1200:].mean() * 1e3, rel=BARS[load_ratio])
    assert told.tpot_mean_ms == pytest.approx(run.tpot_s[1200:].mean() * 1e3, rel=TPOT_BAR)


def test_replicas_share_the_rate_and_smooth_it() -> None:
    one, four = open_loop(engine(), LENGTHS, 5.0), open_loop(engine(replicas=4), LENGTHS, 20.0)
    assert four.utilisation_ratio == pytest.approx(one.utilisation_ratio)
    assert four.output_tok_per_s == pytest.approx(4 * one.output_tok_per_s)
    assert four.ttft_mean_ms <= one.ttft_mean_ms


def little(served: Served) -> tuple[float, float]:
    """(sequences that decode in the mean, rate times the time they do)."""
    decode_s = served.tpot_mean_ms / 1e3 * (LENGTHS.output_tokens - 1)
    return served.batch_mean, served.request_per_s * decode_s


@pytest.mark.parametrize("order", SchedulingOrder)
@pytest.mark.parametrize("rate", [2.0, 4.0, 8.0])
def test_littles_law_holds_in_the_results(order: SchedulingOrder, rate: float) -> None:
    batch, product = little(open_loop(engine(order=order), LENGTHS, rate))
    assert batch == pytest.approx(product, rel=0.12, abs=0.3)


@pytest.mark.parametrize("order", SchedulingOrder)
@pytest.mark.parametrize("concurrency", [1, 8, 64, 200])
def test_a_closed_loop_keeps_littles_law_and_is_near_its_replay(order: SchedulingOrder, concurrency: int) -> None:
    lengths = Lengths.of_nominal(1024, 512)
    told = closed_loop(engine(order=order), lengths, concurrency)
    shown = replay(engine(order=order), HarnessScenario(lengths, concurrency=concurrency), seed=1)
    assert told.ttft_mean_ms == pytest.approx(shown.ttft_mean_ms, rel=0.25)
    assert told.tpot_mean_ms == pytest.approx(shown.tpot_mean_ms, rel=0.1)
    assert told.output_tok_per_s == pytest.approx(shown.output_tok_per_s, rel=0.1)


def test_closed_loop_clients_beyond_the_slots_wait_by_littles_law() -> None:
    served = closed_loop(engine(max_sequence_count=16), Lengths(1024, 512, LengthLaw.UNIFORM_08_10), 64)
    stay_s = served.ttft_mean_ms / 1e3 + served.tpot_mean_ms / 1e3 * 511
    assert served.request_per_s * stay_s == pytest.approx(64, rel=0.1)
    assert served.ttft_p50_ms > 3 * closed_loop(engine(), LENGTHS, 16).ttft_p50_ms


def monotone(values: list[float]) -> bool:
    return all(later > earlier for earlier, later in itertools.pairwise(values))


def by_rate(model: Callable[..., Served]) -> list[float]:
    return [model(engine(), LENGTHS, rate).ttft_mean_ms for rate in (0.5, 1.0, 2.0, 4.0, 8.0)]


def by_input(model: Callable[..., Served]) -> list[float]:
    return [model(engine(), Lengths(tokens, 256), 0.5).ttft_mean_ms for tokens in (128, 512, 2048, 8192, 20_000)]


def bound(model: Callable[..., Served]) -> bool:
    alone_ms = GridSteps().step_s(BatchShape(1, 1024, 0, 1024 * 1025 // 2)) * 1e3
    return all(model(engine(), LENGTHS, rate).ttft_p50_ms >= 0.999 * alone_ms for rate in (0.01, 1.0, 8.0))


def test_ttft_grows_with_rate_and_prompt_and_keeps_its_bound() -> None:
    assert monotone(by_rate(open_loop))
    assert monotone(by_input(open_loop))
    assert bound(open_loop)


@pytest.mark.parametrize("concurrency", [2, 8, 32, 128])
def test_closed_loop_ttft_grows_with_concurrency(concurrency: int) -> None:
    fewer, more = (closed_loop(engine(), LENGTHS, count) for count in (concurrency, 2 * concurrency))
    assert more.ttft_mean_ms > fewer.ttft_mean_ms
    assert more.output_tok_per_s > fewer.output_tok_per_s


def deaf_to_rate(served_engine: ServingEngine, lengths: Lengths, rate: float) -> Served:
    return open_loop(served_engine, lengths, 1.0)


def deaf_to_prompts(served_engine: ServingEngine, lengths: Lengths, rate: float) -> Served:
    return open_loop(served_engine, Lengths(8, lengths.output_tokens), rate)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (deaf_to_rate, lambda model: monotone(by_rate(model))),
        (deaf_to_prompts, lambda model: monotone(by_input(model))),
        (deaf_to_prompts, bound),
    ],
)
def test_a_planted_fault_is_found(fault: Callable[..., Served], check: Callable[..., bool]) -> None:
    assert not check(fault)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_of_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate_per_s"):
        open_loop(engine(), LENGTHS, rate)


def test_other_bad_loads_are_refused() -> None:
    with pytest.raises(ConfigError, match="burstiness_cv2"):
        open_loop(engine(), LENGTHS, 1.0, -0.5)
    with pytest.raises(ConfigError, match="concurrency is 0"):
        closed_loop(engine(), LENGTHS, 0)
    with pytest.raises(ConfigError, match="requests_per_client is 0"):
        closed_loop(engine(), LENGTHS, 1, 0)


def test_the_same_question_has_the_same_answer() -> None:
    assert open_loop(engine(), LENGTHS, 3.0) == open_loop(engine(), LENGTHS, 3.0)
    assert np.isfinite(open_loop(engine(), LENGTHS, 3.0, burstiness_cv2=4.0).ttft_p99_ms)
