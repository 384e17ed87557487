"""The replay of a benchmark's clients, on steps simple enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from perfmodel.disaggregation import SplitEngine
from perfmodel.errors import ConfigError
from perfmodel.harness import ArrivalLaw, HarnessScenario, replay, replay_requests, replay_split
from perfmodel.serving import FrontEnd, LengthLaw, Lengths, SchedulingOrder, ServingEngine
from perfmodel.step_time import BatchShape, StepTable


class PlainSteps:
    """1 ms a step and 0.1 ms a token; contexts and pairs cost nothing unless said."""

    def __init__(self, context_s: float = 0.0, pair_s: float = 0.0) -> None:
        self._context_s, self._pair_s = context_s, pair_s

    def table(self, max_batched_tokens: int) -> StepTable:
        tokens = np.arange(max_batched_tokens + 1, dtype=np.float64)
        return StepTable(0.001 + 0.0001 * tokens, 0.0, self._context_s, self._pair_s, 0.0)

    def step_s(self, batch: BatchShape) -> float:
        return self.table(batch.token_count).step_s(batch)


def engine(**fields: object) -> ServingEngine:
    values: dict[str, object] = {
        "step": PlainSteps(),
        "kv_capacity_tokens": 1_000_000,
        "max_batched_tokens": 1000,
        "max_sequence_count": 256,
        **fields,
    }
    return ServingEngine(**values)  # type: ignore[arg-type]  # fields by name


def closed(concurrency: int, input_tokens: int, output_tokens: int, count: int | None = None) -> HarnessScenario:
    return HarnessScenario(Lengths(input_tokens, output_tokens), concurrency=concurrency, request_count=count)


def test_one_client_pays_front_end_prefill_and_one_step_a_token() -> None:
    front = FrontEnd(request_s=0.010, prompt_token_s=0.00001, first_token_s=0.002)
    run = replay_requests(engine(front_end=front), closed(1, 100, 11), seed=1)
    # 10 ms + 1 ms of tokenising, a step of 100 tokens, 2 ms to the client; then ten steps of one token.
    assert run.ttft_s == pytest.approx(np.full(10, 0.010 + 0.001 + 0.011 + 0.002))
    assert run.tpot_s == pytest.approx(np.full(10, 0.0011))
    assert run.input_tokens.size == 10


def test_launches_of_a_prompt_step_hide_behind_the_device() -> None:
    # A step of 11 ms under launches of 60 ms takes the root of both squares; decode steps are in graphs.
    run = replay_requests(engine(launch_s=0.060), closed(1, 100, 3, count=1), seed=1)
    assert run.ttft_s[0] == pytest.approx(math.hypot(0.011, 0.060))
    assert run.end_s[0] - run.ttft_s[0] == pytest.approx(2 * 0.0011)
    # A step of 101 ms hides most of them.
    long = replay_requests(engine(launch_s=0.060), closed(1, 1000, 1, count=1), seed=1)
    assert long.ttft_s[0] == pytest.approx(math.hypot(0.101, 0.060))
    split = SplitEngine(engine(launch_s=0.060), engine(), 0.0, math.inf)
    first_s = replay_split(split, closed(1, 100, 2, count=1), seed=1).ttft_mean_ms / 1e3
    assert first_s == pytest.approx(math.hypot(0.011, 0.060) + 0.0011)


def test_each_prefill_worker_tokenises_for_itself() -> None:
    front = FrontEnd(prompt_token_s=0.001)
    scenario = closed(4, 100, 2, count=4)

    def last_ms(workers: int) -> float:
        split = SplitEngine(engine(front_end=front, replicas=workers), engine(), 0.0, math.inf)
        return replay_split(split, scenario, seed=1).ttft_p99_ms

    # One after the other, 100 ms each; four side by side are through after about one.
    assert last_ms(1) > 400
    assert last_ms(4) < 200


def test_decode_runs_taken_in_closed_form_sum_the_growing_context() -> None:
    steps = PlainSteps(context_s=1e-6)
    run = replay_requests(engine(step=steps), closed(1, 50, 201, count=1), seed=1)
    # Token k attends to 50 + k tokens, k = 1..200.
    decode_s = 200 * 0.0011 + 1e-6 * sum(50 + k for k in range(1, 201))
    assert run.end_s[0] - run.ttft_s[0] == pytest.approx(decode_s)


def test_a_prompt_beyond_the_budget_runs_in_chunks_that_see_their_context() -> None:
    steps = PlainSteps(pair_s=1e-7)
    run = replay_requests(engine(step=steps), closed(1, 2500, 1, count=1), seed=1)
    assert run.ttft_s[0] == pytest.approx(3 * 0.001 + 0.25 + 1e-7 * 2500 * 2501 / 2)


def test_a_burst_fills_the_budget_prompt_by_prompt() -> None:
    run = replay_requests(engine(), closed(4, 500, 1, count=4), seed=1)
    # Two prompts of 500 a step.
    assert run.ttft_s == pytest.approx([0.101, 0.101, 0.202, 0.202])


def test_whole_prompts_never_start_in_what_is_left_of_a_budget() -> None:
    whole = replay_requests(engine(order=SchedulingOrder.WHOLE_PROMPTS), closed(3, 600, 1, count=3), seed=1)
    chunked = replay_requests(engine(), closed(3, 600, 1, count=3), seed=1)
    assert whole.ttft_s == pytest.approx([0.061, 0.122, 0.183])
    # 600 + 400 tokens, then 200 + 600.
    assert chunked.ttft_s == pytest.approx([0.101, 0.182, 0.182])


def test_prefill_first_holds_decodes_and_keeps_equal_requests_in_step() -> None:
    run = replay_requests(engine(order=SchedulingOrder.PREFILL_FIRST), closed(4, 500, 10), seed=1)
    # Every wave of four is a burst of two steps.
    assert run.ttft_s.reshape(10, 4) == pytest.approx(np.tile([0.101, 0.101, 0.202, 0.202], (10, 1)))


def test_a_sequence_limit_makes_clients_wait_for_an_end() -> None:
    run = replay_requests(engine(max_sequence_count=1), closed(2, 100, 11, count=2), seed=1)
    first_end = 0.011 + 10 * 0.0011
    assert run.ttft_s == pytest.approx([0.011, first_end + 0.011])


def test_kv_room_admits_with_reserve_and_evicts_without() -> None:
    tight = {"kv_capacity_tokens": 450}
    reserved = replay_requests(engine(reserve_ratio=1.0, **tight), closed(3, 100, 100, count=3), seed=1)
    greedy = replay_requests(engine(**tight), closed(3, 100, 100, count=3), seed=1)
    assert reserved.preempted_count == 0
    # Two fit with all of their answers; the third starts when the first two end.
    assert reserved.ttft_s[2] > reserved.end_s[0] - 1e-9
    assert greedy.preempted_count > 0
    assert greedy.ttft_s[2] < reserved.ttft_s[2]
    assert (greedy.end_s > 0).all()


def test_a_prompt_larger_than_the_cache_runs_alone() -> None:
    run = replay_requests(engine(kv_capacity_tokens=10), closed(2, 100, 5, count=2), seed=1)
    assert (run.end_s > run.ttft_s).all()


def test_all_at_once_is_an_open_loop_of_infinite_rate() -> None:
    scenario = HarnessScenario(Lengths(500, 1), ArrivalLaw.OPEN_LOOP, request_count=4)
    assert replay_requests(engine(), scenario, seed=1).ttft_s == pytest.approx([0.101, 0.101, 0.202, 0.202])


def test_an_open_loop_sends_at_its_rate_with_its_burstiness() -> None:
    def gaps(cv2: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        scenario = HarnessScenario(
            Lengths(10, 1), ArrivalLaw.OPEN_LOOP, rate_per_s=50.0, burstiness_cv2=cv2, request_count=20_000
        )
        return np.diff(replay_requests(engine(), scenario, seed=3).sent_s)

    for cv2 in (0.0, 0.5, 1.0, 4.0):
        between = gaps(cv2)
        assert between.mean() == pytest.approx(0.02, rel=0.05)
        assert between.var() / between.mean() ** 2 == pytest.approx(cv2, rel=0.1, abs=1e-9)


def test_cached_tokens_are_not_computed_again() -> None:
    plain = replay(engine(), closed(1, 800, 2), seed=1)
    hit = replay(engine(), HarnessScenario(Lengths(800, 2, cached_ratio=0.5)), seed=1)
    assert plain.ttft_mean_ms - hit.ttft_mean_ms == pytest.approx(40.0)


def test_replicas_share_the_clients() -> None:
    lengths = Lengths.of_nominal(200, 50)
    one = replay(engine(), HarnessScenario(lengths, concurrency=8), seed=1)
    three = replay(engine(replicas=3), HarnessScenario(lengths, concurrency=24), seed=1)
    assert three.ttft_mean_ms == one.ttft_mean_ms
    assert three.output_tok_per_s == pytest.approx(3 * one.output_tok_per_s)


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    scenario = HarnessScenario(Lengths.of_nominal(300, 60), concurrency=16)
    assert replay(engine(), scenario, seed=5) == replay(engine(), scenario, seed=5)
    assert replay(engine(), scenario, seed=5) != replay(engine(), scenario, seed=6)


def test_uniform_lengths_are_nine_tenths_of_the_nominal_ones() -> None:
    run = replay_requests(engine(), HarnessScenario(Lengths.of_nominal(1000, 500), concurrency=50), seed=2)
    assert run.input_tokens.mean() == pytest.approx(900, rel=0.01)
    assert 800 <= run.input_tokens.min() <= run.input_tokens.max() <= 1000
    assert run.output_tokens.mean() == pytest.approx(450, rel=0.01)


def test_lognormal_lengths_keep_mean_and_variation() -> None:
    lengths = Lengths(200, 100, LengthLaw.LOGNORMAL, input_cv2=1.0, output_cv2=0.5)
    prompts, answers = lengths.draw(50_000, np.random.default_rng(1))
    for values, mean, cv2 in ((prompts, 200, 1.0), (answers, 100, 0.5)):
        assert values.mean() == pytest.approx(mean, rel=0.02)
        assert values.var() / values.mean() ** 2 == pytest.approx(cv2, rel=0.1)


def test_a_split_engine_adds_hand_over_and_a_decode_step() -> None:
    split = SplitEngine(engine(), engine(), handover_s=0.5)
    served = replay_split(split, closed(1, 100, 11), seed=1)
    # Prefill of 100 tokens, the hand-over, and the decode side's step of one token.
    assert served.ttft_mean_ms == pytest.approx(11.0 + 500.0 + 1.1)
    assert served.tpot_mean_ms == pytest.approx(1.1)


def test_a_split_engines_prefill_workers_take_prompts_side_by_side() -> None:
    burst = HarnessScenario(Lengths(1000, 1), ArrivalLaw.OPEN_LOOP, request_count=4)
    one = replay_split(SplitEngine(engine(), engine()), burst, seed=1)
    four = replay_split(SplitEngine(engine(replicas=4), engine()), burst, seed=1)
    assert one.ttft_mean_ms == pytest.approx(101.0 * 2.5 + 1.1, rel=0.01)
    assert four.ttft_mean_ms == pytest.approx(101.0 + 1.4, rel=0.01)


def test_a_prefill_pool_does_not_compute_what_its_cache_holds() -> None:
    half = HarnessScenario(Lengths(1000, 1, cached_ratio=0.5), ArrivalLaw.OPEN_LOOP, request_count=1)
    served = replay_split(SplitEngine(engine(), engine()), half, seed=1)
    assert served.ttft_mean_ms == pytest.approx(51.0 + 1.1, rel=0.01)


def test_attention_ranks_of_a_prefill_worker_idle_unless_all_have_a_prompt() -> None:
    wide = engine(max_batched_tokens=4000)
    alone = replay_split(SplitEngine(wide, engine(), prefill_rank_count=4), closed(1, 1000, 1), seed=1)
    full = HarnessScenario(Lengths(1000, 1), ArrivalLaw.OPEN_LOOP, request_count=4)
    together = replay_split(SplitEngine(wide, engine(), prefill_rank_count=4), full, seed=1)
    assert alone.ttft_mean_ms == pytest.approx(401.0 + 1.1)
    assert together.ttft_mean_ms == pytest.approx(401.0 + 1.4, rel=0.01)


def test_decode_slots_of_a_split_engine_hold_up_the_first_token() -> None:
    free = replay_split(SplitEngine(engine(), engine()), closed(4, 10, 100), seed=1)
    short = replay_split(SplitEngine(engine(), engine(max_sequence_count=2)), closed(4, 10, 100), seed=1)
    # Half of the clients always wait for about one answer.
    assert short.ttft_mean_ms > 10 * free.ttft_mean_ms


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"rate_per_s": 0.0}, "rate_per_s is 0.0"),
        ({"burstiness_cv2": -1.0}, "burstiness_cv2 is -1.0"),
        ({"burstiness_cv2": math.nan}, "burstiness_cv2 is nan"),
        ({"request_count": 0}, "request_count is 0"),
    ],
)
def test_a_scenario_of_nothing_is_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HarnessScenario(Lengths(10, 10), **fields)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Lengths(0, 1), "input_tokens is 0"),
        (lambda: Lengths(1, math.inf), "output_tokens is inf"),
        (lambda: Lengths(1, 1, cached_ratio=1.5), "cached_ratio is 1.5"),
        (lambda: Lengths(1, 1, input_cv2=-1), "input_cv2 is -1"),
        (lambda: FrontEnd(request_s=-1.0), "request_s is -1.0"),
        (lambda: engine(replicas=0), "replicas is 0"),
        (lambda: engine(reserve_ratio=2.0), "reserve_ratio is 2.0"),
        (lambda: SplitEngine(engine(), engine(), handover_s=-1.0), "handover_s is -1.0"),
        (lambda: SplitEngine(engine(), engine(), link_bytes_per_s=0.0), "link_bytes_per_s is 0.0"),
        (lambda: SplitEngine(engine(), engine(), layer_count=0), "layer_count is 0"),
    ],
)
def test_values_out_of_bounds_are_refused(build: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build()  # type: ignore[operator]  # a function without arguments
