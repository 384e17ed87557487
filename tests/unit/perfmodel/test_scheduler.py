"""The engine's scheduling rules one by one, with a timing that makes every second easy to follow."""

from __future__ import annotations

import pytest

from perfmodel.errors import ConfigError, RequestError
from perfmodel.kv_cache import AllBlocksCleared
from perfmodel.scheduler import EngineConfig, EngineCore, Finished, FinishReason, StepOutcome, SubmitOutcome
from perfmodel.step_time import BatchShape
from perfmodel.workload import OutputLaw, SimRequest


class OneSecondSteps:
    def step_s(self, batch: BatchShape) -> float:
        return 1.0


def engine(**limits: object) -> EngineCore:
    fields: dict[str, object] = {"block_count": 101, "block_size_tokens": 4, "max_batched_tokens": 16, **limits}
    return EngineCore(EngineConfig(**fields), OneSecondSteps())  # type: ignore[arg-type]  # fields by name


def ask(name: str, prompt: int | list[int], max_tokens: int, **options: object) -> SimRequest:
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    return SimRequest(name, ids, max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]  # fields by name


def run(core: EngineCore, now_s: float = 0.0) -> list[StepOutcome]:
    outcomes = []
    while (outcome := core.step(now_s)) is not None:
        outcomes.append(outcome)
        now_s = outcome.ends_at_s
    return outcomes


def endings(outcomes: list[StepOutcome]) -> dict[tuple[str, int], Finished]:
    done = [output.finished for outcome in outcomes for output in outcome.outputs if output.finished]
    return {(finished.request_id, finished.choice_index): finished for finished in done}


def test_a_request_runs_to_its_end_with_its_times() -> None:
    core = engine()
    assert core.submit(ask("a", 5, 3), 10.0) is SubmitOutcome.ACCEPTED
    outcomes = run(core, 12.0)
    assert [[output.position for output in outcome.outputs] for outcome in outcomes] == [[0], [1], [2]]
    assert [outcome.outputs[0].waited_s for outcome in outcomes] == [3.0, 1.0, 1.0]
    assert endings(outcomes)["a", 0] == Finished("a", 0, FinishReason.LENGTH, 5, 3, 0, 4, 0, 10.0, 12.0, 13.0, 15.0)
    assert core.idle
    assert core.step(15.0) is None


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_first() -> None:
    core = engine()
    core.submit(ask("short", 3, 20), 0.0)
    first = core.step(0.0)
    core.submit(ask("long", [100 + n for n in range(40)], 2), 0.5)
    outcomes = [first, *run(core, 1.0)]
    shapes = [(o.batch.prefill_tokens, o.batch.prefill_context_tokens, o.batch.decode_count) for o in outcomes if o]
    assert shapes[:5] == [(3, 0, 0), (15, 0, 1), (15, 15, 1), (10, 30, 1), (0, 0, 2)]
    assert endings(run(core)) == {}
    pairs = [outcome.batch.prefill_attention_pairs for outcome in outcomes if outcome]
    assert pairs[:4] == [6, 120, 15 * 15 + 120, 10 * 30 + 55]
    assert [outcome.batch.decode_context_tokens for outcome in outcomes if outcome][:3] == [0, 4, 5]


def test_the_second_turn_finds_the_first_ones_prompt_and_answer() -> None:
    core = engine()
    core.submit(ask("turn-1", 8, 9), 0.0)
    outcomes = run(core)
    answer = [output.token_id for outcome in outcomes for output in outcome.outputs]
    core.submit(ask("turn-2", [*range(8), *answer, 77, 78], 1), 100.0)
    finished = endings(run(core, 100.0))["turn-2", 0]
    # 8 + 9 - 1 computed tokens are four full blocks.
    assert (finished.cached_tokens, finished.created_cache_tokens) == (16, 0)


def test_choices_share_the_prompts_blocks_and_differ_in_their_answers() -> None:
    core = engine(max_batched_tokens=64)
    core.submit(ask("a", 9, 4, choice_count=3), 0.0)
    outcome = core.step(0.0)
    assert outcome is not None
    # Two shared prompt blocks, and one block for each choice's ninth token.
    assert core.pool.used_block_count == 2 + 3
    assert [output.cached_tokens for output in outcome.outputs] == [0, 8, 8]
    assert len({output.text for output in outcome.outputs}) == 3
    done = endings(run(core, 1.0))
    assert sorted(done) == [("a", 0), ("a", 1), ("a", 2)]
    assert core.pool.used_block_count == 0


def test_a_cache_salt_hides_one_tenants_prompt_from_another() -> None:
    core = engine()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        core.submit(ask(name, 9, 1, cache_salt=salt), 0.0)
        cached = endings(run(core))[name, 0].cached_tokens
        assert cached == (8 if name == "c" else 0)


def test_a_full_cache_preempts_the_youngest_which_computes_again_and_loses_no_token() -> None:
    core = engine(block_count=6, max_sequence_count=2)
    core.submit(ask("old", [1, 2, 3, 4, 5, 6, 7, 8], 8), 0.0)
    core.submit(ask("young", [9, 8, 7, 6, 5, 4, 3, 2], 6), 0.0)
    outcomes = run(core)
    done = endings(outcomes)
    assert (done["old", 0].preemption_count, done["young", 0].preemption_count) == (0, 1)
    assert (done["old", 0].output_tokens, done["young", 0].output_tokens) == (8, 6)
    assert done["old", 0].ended_at_s < done["young", 0].ended_at_s
    stats = core.stats()
    assert (stats.preemption_count, stats.prompt_tokens, stats.prefix_cache_queries_tokens) == (1, 16, 16)
    assert sum(outcome.preempted_count for outcome in outcomes) == 1


def test_waiting_requests_are_admitted_in_order_within_the_limits() -> None:
    core = engine(max_sequence_count=2)
    for name in "abc":
        core.submit(ask(name, 2, 2), 0.0)
    first, second, third = (core.step(float(at)) for at in range(3))
    assert first and second and third
    assert [output.request_id for output in first.outputs] == ["a", "b"]
    assert [output.request_id for output in second.outputs] == ["a", "b"]
    assert [output.request_id for output in third.outputs] == ["c"]


def test_the_queue_is_bounded_and_an_impossible_request_is_told_so() -> None:
    core = engine(block_count=6, max_waiting_count=3)
    assert core.submit(ask("too-big", 16, 6), 0.0) is SubmitOutcome.NEVER_FITS
    assert core.submit(ask("just-fits", 16, 5), 0.0) is SubmitOutcome.ACCEPTED
    assert core.submit(ask("three", 1, 1, choice_count=3), 0.0) is SubmitOutcome.QUEUE_FULL
    assert core.submit(ask("two", 1, 1, choice_count=2), 0.0) is SubmitOutcome.ACCEPTED
    assert core.submit(ask("four", 1, 1), 0.0) is SubmitOutcome.QUEUE_FULL
    stats = core.stats()
    assert (stats.refused_count, stats.waiting_count) == (3, 3)
    assert len(endings(run(core))) == 3


def test_an_abort_frees_blocks_at_once_whatever_the_request_was_doing() -> None:
    core = engine(max_sequence_count=1)
    core.submit(ask("running", 8, 50), 0.0)
    core.submit(ask("waiting", 8, 50), 0.0)
    core.step(0.0)
    (waiting,) = core.abort("waiting", 1.0)
    assert (waiting.reason, waiting.cached_tokens, waiting.first_scheduled_at_s) == (FinishReason.ABORT, None, None)
    (running,) = core.abort("running", 1.5)
    assert (running.output_tokens, running.ended_at_s) == (1, 1.5)
    assert core.idle
    assert core.pool.used_block_count == 0
    assert core.abort("running", 2.0) == ()
    assert core.submit(ask("running", 8, 1), 2.0) is SubmitOutcome.ACCEPTED


def test_answers_end_by_themselves_or_at_their_limit() -> None:
    core = engine(output_law=OutputLaw(mean_tokens=5.0), max_batched_tokens=64)
    for number in range(30):
        core.submit(SimRequest(f"r{number}", [1], 12), 0.0)
    done = endings(run(core)).values()
    assert {finished.reason for finished in done} == {FinishReason.STOP, FinishReason.LENGTH}
    for finished in done:
        assert (finished.reason is FinishReason.LENGTH) == (finished.output_tokens == 12)


def test_a_reset_is_refused_while_running_and_told_with_the_next_step() -> None:
    core = engine()
    core.submit(ask("a", 8, 2), 0.0)
    core.step(0.0)
    assert not core.reset_prefix_cache()
    run(core, 1.0)
    assert core.reset_prefix_cache()
    core.submit(ask("b", 8, 1), 5.0)
    outcome = core.step(5.0)
    assert outcome is not None
    assert outcome.kv_events[0] == AllBlocksCleared()
    assert outcome.outputs[0].cached_tokens == 0


def test_gauges_follow_the_engine() -> None:
    core = engine(max_sequence_count=1)
    core.submit(ask("a", 8, 3), 0.0)
    core.submit(ask("b", 8, 3), 0.0)
    core.step(0.0)
    stats = core.stats()
    assert (stats.running_count, stats.waiting_count, stats.kv_usage_ratio) == (1, 1, 0.02)


def test_a_live_request_id_cannot_be_used_twice() -> None:
    core = engine()
    core.submit(ask("a", 1, 1), 0.0)
    with pytest.raises(RequestError, match="request a: request_id is in use"):
        core.submit(ask("a", 1, 1), 0.0)


@pytest.mark.parametrize("field", ["max_batched_tokens", "max_sequence_count", "max_waiting_count"])
def test_a_limit_below_one_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 0; expected at least 1"):
        engine(**{field: 0})


def evicted(restore_s_per_block: float) -> EngineCore:
    """An engine that is idle and has the prompt of 16 tokens in its lower tier only."""
    core = engine(block_count=9, tier_block_count=100, restore_s_per_block=restore_s_per_block, max_batched_tokens=64)
    core.submit(ask("a", 16, 1), 0.0)
    core.submit(ask("evicts a", [100 + n for n in range(32)], 1), 0.0)
    run(core)
    return core


def test_what_was_evicted_comes_back_from_the_lower_tier_over_one_link() -> None:
    core = evicted(0.25)
    core.submit(ask("a again", 16, 1), 10.0)
    waits = core.step(10.0)
    assert waits is not None and waits.asleep and not waits.batch.token_count
    # Three of four blocks (the last token is always computed): 0.75 s, and its names are there at once.
    assert waits.ends_at_s == 10.75
    finished = endings(run(core, waits.ends_at_s))["a again", 0]
    assert (finished.cached_tokens, finished.first_scheduled_at_s, finished.first_token_at_s) == (12, 10.0, 11.75)
    stats = core.stats()
    assert (stats.external_hits_tokens, stats.external_queries_tokens) == (12, 16 + 32 + 16)
    assert (stats.restored_prompt_tokens, stats.prefix_cache_hits_tokens) == (12, 0)


def test_others_compute_while_a_sequence_waits_for_its_kv() -> None:
    core = evicted(1.0)
    core.submit(ask("a again", 16, 1), 10.0)
    core.submit(ask("b", [500, 501], 2), 10.0)
    outcomes = run(core, 10.0)
    ended_s = {name: finished.ended_at_s for (name, _), finished in endings(outcomes).items()}
    assert ended_s == {"b": 12.0, "a again": 14.0}


def test_hidden_speed_and_noise_change_times_and_nothing_else() -> None:
    def ends_s(**limits: float) -> list[float]:
        core = engine(**limits)
        core.submit(ask("a", 5, 390), 0.0)
        return [outcome.ends_at_s - outcome.starts_at_s for outcome in run(core)]

    assert set(ends_s(slow_ratio=1.5)) == {1.5}
    noisy = ends_s(noise_ratio=0.1)
    assert noisy == ends_s(noise_ratio=0.1) != ends_s(noise_ratio=0.1, seed=2)
    assert sum(noisy) / 390 == pytest.approx(1.0, abs=0.02)
    assert 0.08 < (sum((each - 1) ** 2 for each in noisy) / 390) ** 0.5 < 0.12


def test_kv_that_nobody_waits_for_any_more_still_comes_when_it_comes() -> None:
    core = evicted(1.0)
    core.submit(ask("leaves", 16, 1), 10.0)
    assert core.step(10.0) is not None
    core.abort("leaves", 10.5)
    core.submit(ask("a again", 16, 1), 11.0)
    finished = endings(run(core, 11.0))["a again", 0]
    # Three blocks asked for at 10 are there at 13, not sooner and not a second time.
    assert (finished.cached_tokens, finished.first_token_at_s) == (12, 14.0)
    assert core.stats().external_hits_tokens == 12
