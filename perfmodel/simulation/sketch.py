"""Percentiles of any number of durations in a fixed amount of memory.

Owns: a histogram whose buckets grow by a constant factor, its percentiles and their stated error. Does not own: what is
measured. A value is reported as the middle of its bucket, so a percentile is off by at most half a percent of itself
(`RELATIVE_ERROR_RATIO`), whatever the distribution; the rank is exact.
"""

from __future__ import annotations

from math import log

import numpy as np
import numpy.typing as npt

from perfmodel.simulation.compiling import compiled

# Largest relative error of a percentile. Half a percent is far below what any model of an engine knows.
RELATIVE_ERROR_RATIO = 0.005

# Shortest duration that is told from 0: a microsecond, below any step. Longest: a million seconds, eleven days.
SHORTEST_S = 1e-6
_LONGEST_S = 1e6

# ln of the factor between buckets, (1 + error) / (1 - error); the first bucket holds all up to the shortest.
_LOG_STEP = log((1 + RELATIVE_ERROR_RATIO) / (1 - RELATIVE_ERROR_RATIO))
BUCKET_COUNT = int(log(_LONGEST_S / SHORTEST_S) / _LOG_STEP) + 3


@compiled
def bucket_of(value_s: float) -> int:
    """The bucket that counts this duration (seconds)."""
    if value_s <= SHORTEST_S:
        return 0
    return min(int(np.log(value_s / SHORTEST_S) / _LOG_STEP) + 1, BUCKET_COUNT - 1)


def percentile_s(counts: npt.NDArray[np.int64], share_ratio: float) -> float | None:
    """The duration (seconds) below or at which `share_ratio` of what was counted lies; None when nothing was."""
    total = int(counts.sum())
    if not total:
        return None
    rank = max(1, int(np.ceil(share_ratio * total)))
    bucket = int(np.searchsorted(np.cumsum(counts), rank))
    return middle_s(bucket)


def middle_s(bucket: int) -> float:
    """The duration that stands for a bucket: within `RELATIVE_ERROR_RATIO` of both its ends. 0 for the first."""
    if bucket == 0:
        return 0.0
    lower_s = SHORTEST_S * float(np.exp((bucket - 1) * _LOG_STEP))
    return lower_s * (1 + RELATIVE_ERROR_RATIO)


def cumulative(counts: npt.NDArray[np.int64]) -> tuple[list[float], list[float]]:
    """(seconds, share of all up to there) at every bucket that counted something: a distribution to draw."""
    used = np.flatnonzero(counts)
    total = max(1, int(counts.sum()))
    shares = np.cumsum(counts)[used] / total
    return [middle_s(int(bucket)) for bucket in used], shares.tolist()
