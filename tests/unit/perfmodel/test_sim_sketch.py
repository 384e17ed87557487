"""The percentile sketch keeps its stated error on any durations within its range."""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.simulation.sketch import BUCKET_COUNT, RELATIVE_ERROR_RATIO, bucket_of, cumulative, percentile_s


def sketch(values: np.ndarray) -> np.ndarray:
    counts = np.zeros(BUCKET_COUNT, dtype=np.int64)
    for value in values:
        counts[bucket_of(float(value))] += 1
    return counts


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("law", ["lognormal", "uniform", "constant", "two lumps"])
def test_a_percentile_is_within_the_stated_error_of_the_exact_one(law: str, share: float) -> None:
    dice = np.random.default_rng(3)
    values = {
        "lognormal": np.exp(dice.normal(-3, 2.5, 20_000)),
        "uniform": dice.uniform(0.01, 9, 20_000),
        "constant": np.full(100, 0.123),
        "two lumps": np.concatenate((np.full(900, 0.02), np.full(100, 700.0))),
    }[law]
    exact = float(np.sort(values)[int(np.ceil(share * len(values))) - 1])
    found = percentile_s(sketch(values), share)
    assert found == pytest.approx(exact, rel=RELATIVE_ERROR_RATIO * 1.0001)


def test_nothing_measured_has_no_percentile() -> None:
    assert percentile_s(np.zeros(BUCKET_COUNT, dtype=np.int64), 0.5) is None


@pytest.mark.parametrize(
    ("value_s", "low", "high"), [(0.0, 0, 0), (-1.0, 0, 0), (1e9, BUCKET_COUNT - 1, BUCKET_COUNT - 1)]
)
def test_durations_beyond_the_range_go_to_its_ends(value_s: float, low: int, high: int) -> None:
    assert low <= bucket_of(value_s) <= high


def test_the_distribution_to_draw_rises_to_one() -> None:
    values, shares = cumulative(sketch(np.array([0.1, 0.2, 0.2, 5.0])))
    assert shares == [0.25, 0.75, 1.0]
    assert values == pytest.approx([0.1, 0.2, 5.0], rel=RELATIVE_ERROR_RATIO)
