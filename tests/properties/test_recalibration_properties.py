"""Properties of recalibration, each shown to fail on a planted fault.

Owns: that multipliers stay bounded, move towards what was seen and never past it, move more the more was seen, and that
the alarm counts windows in order. A planted fault is a function like `recalibrated` with one thing wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel.calibration.recalibration import (
    DriftLimits,
    Multipliers,
    Observation,
    Recalibration,
    Window,
    WindowUse,
    recalibrated,
)
from tests.exploring import examples

Rounds = Sequence[Sequence[Observation]]
Recalibrate = Callable[[Multipliers, Rounds, DriftLimits, int], Recalibration]

ratios = st.floats(0.3, 3.5)
observations = st.builds(
    lambda steps, prompts, step, decode, prefill: Observation(
        Window("one", WindowUse.USED, steps, prompt_count=prompts), step, decode, prefill
    ),
    st.integers(50, 20_000),
    st.integers(5, 500),
    ratios,
    ratios,
    st.one_of(st.none(), ratios),
)
rounds_of = st.lists(st.lists(observations, max_size=4), max_size=6)
in_uses = st.builds(Multipliers, st.floats(0.5, 2.0), st.floats(0.5, 2.0))


def check(run: Recalibrate, in_use: Multipliers, rounds: Rounds, before: int) -> None:
    limits = DriftLimits(0.2, 3)
    found = run(in_use, rounds, limits, before)
    every = [each for observed in rounds for each in observed]
    for name in ("decode_ratio", "prefill_ratio"):
        old, new = getattr(in_use, name), getattr(found.multipliers, name)
        seen = [value for each in every if (value := getattr(each, name)) is not None]
        assert 0.5 <= new <= 2.0
        low, high = min([old, *seen]), max([old, *seen])
        assert max(0.5, low) * (1 - 1e-9) <= new <= min(2.0, high) * (1 + 1e-9), "between what was in use and seen"
        if not seen:
            assert new == old, "nothing seen, nothing learned"
        elif min(seen) > old * 1.001 and old < 1.999:
            assert new > old
        elif max(seen) < old * 0.999 and old > 0.501:
            assert new < old
    assert found.step_count == sum(each.window.step_count for each in every)
    assert found.alarmed == (found.clipped or found.out_of_band_count >= 3)
    outside = [[not 1 / 1.2 <= each.step_ratio <= 1.2 for each in observed] for observed in rounds if observed]
    if all(len(set(each)) == 1 for each in outside):  # where every engine of a round agrees, the count is plain
        count = before
        for each in outside:
            count = count + 1 if each[0] else 0
        if all(_one_side(observed) for observed in rounds if observed):
            assert found.out_of_band_count == count
    twice = run(in_use, [*rounds, *rounds], limits, before)
    assert abs(twice.multipliers.decode_ratio - in_use.decode_ratio) >= (
        abs(found.multipliers.decode_ratio - in_use.decode_ratio) - 1e-9
    ), "more of the same moves at least as far"


def _one_side(observed: Sequence[Observation]) -> bool:
    return len({(each.step_ratio > 1.2) - (each.step_ratio < 1 / 1.2) for each in observed}) == 1


@given(in_uses, rounds_of, st.integers(0, 3))
@settings(max_examples=examples(300), deadline=None)
def test_recalibration_is_bounded_and_moves_towards_what_was_seen(
    in_use: Multipliers, rounds: Rounds, before: int
) -> None:
    check(recalibrated, in_use, rounds, before)


def believes_everything(in_use: Multipliers, rounds: Rounds, limits: DriftLimits, before: int) -> Recalibration:
    found = recalibrated(in_use, rounds, limits, before)
    every = [each.decode_ratio for observed in rounds for each in observed]
    wanted = min(max(1.1 * every[-1], 0.5), 2.0) if every else in_use.decode_ratio
    return replace(found, multipliers=replace(found.multipliers, decode_ratio=wanted))


def never_learns(in_use: Multipliers, rounds: Rounds, limits: DriftLimits, before: int) -> Recalibration:
    return replace(recalibrated(in_use, rounds, limits, before), multipliers=in_use)


def learns_from_nothing(in_use: Multipliers, rounds: Rounds, limits: DriftLimits, before: int) -> Recalibration:
    found = recalibrated(in_use, rounds, limits, before)
    return replace(found, multipliers=replace(found.multipliers, prefill_ratio=1.0))


def forgets_the_run_before(in_use: Multipliers, rounds: Rounds, limits: DriftLimits, before: int) -> Recalibration:
    return recalibrated(in_use, rounds, limits, 0)


def counts_all_windows(in_use: Multipliers, rounds: Rounds, limits: DriftLimits, before: int) -> Recalibration:
    outside = [each for observed in rounds for each in observed if not 1 / 1.2 <= each.step_ratio <= 1.2]
    found = recalibrated(in_use, rounds, limits, before)
    return replace(found, out_of_band_count=before + len(outside))


def keeps_quiet(in_use: Multipliers, rounds: Rounds, limits: DriftLimits, before: int) -> Recalibration:
    return replace(recalibrated(in_use, rounds, limits, before), alarmed=False)


def shrinks_with_more(in_use: Multipliers, rounds: Rounds, limits: DriftLimits, before: int) -> Recalibration:
    half = list(rounds)[: (len(rounds) + 1) // (2 if len(rounds) > 6 else 1)]
    found = recalibrated(in_use, half if len(rounds) <= 6 else half[:1], limits, before)
    whole = recalibrated(in_use, rounds, limits, before)
    return replace(whole, multipliers=found.multipliers)


@pytest.mark.parametrize(
    "fault",
    [
        believes_everything,
        never_learns,
        learns_from_nothing,
        forgets_the_run_before,
        counts_all_windows,
        keeps_quiet,
        shrinks_with_more,
    ],
)
def test_a_planted_fault_is_caught(fault: Recalibrate) -> None:
    @given(in_uses, rounds_of, st.integers(0, 3))
    @settings(
        max_examples=500, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def search(in_use: Multipliers, rounds: Rounds, before: int) -> None:
        check(fault, in_use, rounds, before)

    with pytest.raises(AssertionError):
        search()
