"""Recalibration on windows made from a known truth: the multipliers must come back, and drift must be told from noise.

Owns: the arithmetic on counters. Does not own: pages and files (`integration/perfmodel/test_recalibrate_command`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.calibration.recalibration import (
    DriftLimits,
    Multipliers,
    Observation,
    RecalibratedSteps,
    Scrape,
    Window,
    WindowUse,
    expected,
    observe,
    recalibrated,
    window_between,
)
from perfmodel.errors import ConfigError
from perfmodel.step_time import BatchShape, decode_batch, prefill_batch

BUDGET_TOKENS = 2048
EMPTY = Scrape(100.0, 0, tuple((float(1 << power), 0) for power in range(12)), 0.0, 0, 0.0, 0, 0.0, 0, 0, 0, 0, 0)


class Linear:
    """Steps of 5 ms, 50 us a prefilled token and 1 us a token of decode context per thousand."""

    def step_s(self, batch: BatchShape) -> float:
        return 0.005 + 5e-5 * batch.prefill_tokens + 1e-4 * batch.decode_count + 1e-9 * batch.decode_context_tokens


def after(truth: Multipliers, steps: int = 2_000, before: Scrape = EMPTY) -> Scrape:
    """Counters after `steps` steps of 8 sequences at 1,000 tokens and a prompt of 900 new tokens every tenth step."""
    true = RecalibratedSteps(Linear(), truth)
    decode_s = true.step_s(decode_batch(8, 1_000))
    with_prompt_s = true.step_s(BatchShape(1, 900, 0, 900 * 901 // 2, 8, 8_000))
    prompts = steps // 10
    itl_total_s = 8 * ((steps - prompts) * decode_s + prompts * with_prompt_s)
    return replace(
        before,
        step_count=before.step_count + steps,
        steps_by_tokens=tuple(
            (bound, count + (steps if bound >= 1024 else steps - prompts if bound >= 16 else 0))
            for bound, count in before.steps_by_tokens
        ),
        itl_total_s=before.itl_total_s + itl_total_s,
        itl_count=before.itl_count + 8 * steps,
        ttft_total_s=before.ttft_total_s + prompts * (with_prompt_s + 0.01),
        ttft_count=before.ttft_count + prompts,
        prefill_total_s=before.prefill_total_s + prompts * with_prompt_s,
        prefill_count=before.prefill_count + prompts,
        prompt_tokens=before.prompt_tokens + prompts * 900,
        computed_tokens=before.computed_tokens + prompts * 900,
        generated_tokens=before.generated_tokens + prompts * 200,
        finished_count=before.finished_count + prompts,
    )


def window(truth: Multipliers, steps: int = 2_000) -> Window:
    return window_between("one", EMPTY, after(truth, steps))


def rounds(truth: Multipliers, count: int, in_use: Multipliers) -> list[list[Observation]]:
    return [[observe(Linear(), window(truth), in_use, BUDGET_TOKENS)] for _ in range(count)]


def test_a_window_has_the_means_between_two_scrapes() -> None:
    first = after(Multipliers())
    second = after(Multipliers(1.2, 1.0), before=first)
    found = window_between("one", first, second)
    assert (found.use, found.step_count, found.prompt_count) == (WindowUse.USED, 2_000, 200)
    assert (found.decode_count, found.context_tokens, found.new_tokens, found.cached_tokens) == (8, 1_000, 900, 0)
    assert found.prompts_per_step == 0.1 and found.prefill_step_count == 200
    assert found.prefill_s is not None and found.ttft_s == pytest.approx(found.prefill_s + 0.01)


def test_a_window_without_work_or_over_a_restart_is_not_used() -> None:
    busy = after(Multipliers())
    assert window_between("one", EMPTY, EMPTY).use is WindowUse.IDLE
    assert window_between("one", EMPTY, after(Multipliers(), steps=40)).use is WindowUse.IDLE
    assert window_between("one", busy, EMPTY).use is WindowUse.RESTARTED
    assert window_between("one", EMPTY, replace(busy, started_s=101.0)).use is WindowUse.RESTARTED


@pytest.mark.parametrize("truth", [Multipliers(), Multipliers(1.4, 0.8), Multipliers(0.7, 1.9)])
@pytest.mark.parametrize("in_use", [Multipliers(), Multipliers(1.5, 1.5)])
def test_the_truth_comes_back(truth: Multipliers, in_use: Multipliers) -> None:
    seen = observe(Linear(), window(truth), in_use, BUDGET_TOKENS)
    assert seen.decode_ratio == pytest.approx(truth.decode_ratio, rel=1e-3)
    assert seen.prefill_ratio == pytest.approx(truth.prefill_ratio, rel=1e-3)
    found = recalibrated(in_use, rounds(truth, 5, in_use), DriftLimits())
    assert found.multipliers.decode_ratio == pytest.approx(truth.decode_ratio, rel=0.04)
    assert found.multipliers.prefill_ratio == pytest.approx(truth.prefill_ratio, rel=0.04)


def test_few_steps_move_little() -> None:
    seen = [[observe(Linear(), window(Multipliers(1.5, 1.5), steps=100), Multipliers(), BUDGET_TOKENS)]]
    found = recalibrated(Multipliers(), seen, DriftLimits()).multipliers
    assert 1.0 < found.decode_ratio < 1.1


def test_one_slow_engine_does_not_move_a_pool() -> None:
    good = observe(Linear(), window(Multipliers()), Multipliers(), BUDGET_TOKENS)
    slow = observe(Linear(), window(Multipliers(2.0, 2.0)), Multipliers(), BUDGET_TOKENS)
    found = recalibrated(Multipliers(), [[good, slow, good]] * 4, DriftLimits())
    assert found.multipliers.decode_ratio == pytest.approx(1.0, abs=1e-6) and not found.alarmed


def test_drift_that_lasts_raises_the_alarm_and_a_window_inside_ends_it() -> None:
    limits, slow, good = DriftLimits(0.2, 3), Multipliers(1.4, 1.4), Multipliers()
    assert not recalibrated(good, rounds(slow, 2, good), limits).alarmed
    assert recalibrated(good, rounds(slow, 3, good), limits).alarmed
    assert recalibrated(good, rounds(slow, 2, good), limits, out_of_band_count=1).alarmed
    ended = recalibrated(good, [*rounds(slow, 2, good), *rounds(good, 1, good)], limits, out_of_band_count=2)
    assert (ended.out_of_band_count, ended.alarmed) == (0, False)
    assert not recalibrated(good, rounds(Multipliers(1.1, 1.1), 9, good), limits).alarmed, "inside the band"


def test_what_no_multiplier_explains_is_an_alarm_at_once() -> None:
    seen = observe(Linear(), replace(window(Multipliers()), itl_s=0.1, prefill_s=0.5), Multipliers(), BUDGET_TOKENS)
    found = recalibrated(Multipliers(), [[seen]] * 2, DriftLimits(0.2, 99))
    assert found.clipped and found.alarmed and found.multipliers == Multipliers(2.0, 2.0)


def test_nothing_seen_is_nothing_learned() -> None:
    found = recalibrated(Multipliers(1.2, 0.9), [[], []], DriftLimits(), out_of_band_count=2)
    assert (found.multipliers, found.step_ratio, found.out_of_band_count) == (Multipliers(1.2, 0.9), None, 2)


def test_a_long_prompt_is_expected_in_chunks() -> None:
    long = replace(window(Multipliers()), new_tokens=5_000.0, prefill_step_count=None, prompts_per_step=0.1)
    said = expected(Linear(), long, BUDGET_TOKENS)
    assert said.prefill_new_s == pytest.approx(5_000 * 5e-5)
    assert said.prefill_decode_s == pytest.approx(3 * Linear().step_s(decode_batch(8, 1_000)))


def test_a_fraction_of_a_sequence_is_between_two_whole_ones() -> None:
    thin = replace(window(Multipliers()), decode_count=1.5, context_tokens=100.0, prompts_per_step=0.0)
    low, high = (Linear().step_s(decode_batch(count, 100)) for count in (1, 2))
    assert expected(Linear(), thin, BUDGET_TOKENS).itl_decode_s == pytest.approx((low + high) / 2)
    lone = replace(thin, decode_count=0.4)
    assert expected(Linear(), lone, BUDGET_TOKENS).itl_decode_s == pytest.approx(low)


def test_multipliers_apply_to_their_part() -> None:
    steps = RecalibratedSteps(Linear(), Multipliers(2.0, 0.5))
    assert steps.step_s(decode_batch(8, 100)) == pytest.approx(2 * Linear().step_s(decode_batch(8, 100)))
    assert steps.step_s(prefill_batch(1_000)) == pytest.approx(2 * 0.005 + 0.5 * 0.05)


def test_values_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode_ratio is 3\.0; expected 0\.5 to 2\.0"):
        Multipliers(3.0)
    with pytest.raises(ConfigError, match=r"band is 1\.5"):
        DriftLimits(1.5)
    with pytest.raises(ConfigError, match="alarm_windows is 0"):
        DriftLimits(0.2, 0)
