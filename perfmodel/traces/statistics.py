"""What a trace is like: rates, burstiness, lengths, and how much of its prompts any prefix cache could serve.

Owns: the statistics of a whole trace and their definitions, which are those of the published traces' tables. Does not
own: the columns (`trace`) or what a given cache and router reach. The hit ratio here is an upper bound: a cold cache
without limit and a router that always finds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perfmodel.traces.trace import Tier, Trace

# The dispersion of counts is read over windows of this length, or of a minute in a trace of hours.
_SHORT_WINDOW_S = 10.0
_LONG_WINDOW_S = 60.0
_LONG_SPAN_S = 7200.0


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Mean, median and 99th percentile of a length in tokens."""

    mean_tokens: float
    median_tokens: float
    p99_tokens: float


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """What a cold, endless, prefix-exact cache would serve.

    `hit_ratio`: share of all prompt tokens. `request_hit_ratio`: share of requests with at least one block found.
    `same_session_ratio`: share of the found blocks that the same session had itself sent before, which is what session
    affinity alone can reach; None where nothing is found.
    """

    hit_ratio: float
    request_hit_ratio: float
    same_session_ratio: float | None


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """A trace in figures. None: not defined for it (a rate needs two arrival times, hits need block ids).

    `gap_cv_ratio` is the coefficient of variation of the gaps between arrivals, `dispersion_ratio` the variance over
    the mean of the counts in windows of `window_s` (1: Poisson).
    """

    request_count: int
    session_count: int
    span_s: float
    rate_per_s: float | None
    gap_cv_ratio: float | None
    dispersion_ratio: float | None
    window_s: float
    input: LengthStatistics
    output: LengthStatistics
    prefix: PrefixStatistics | None
    tier_counts: dict[str, int]


def statistics(trace: Trace) -> TraceStatistics:
    """The figures of a trace that has at least one request."""
    gaps_s = np.diff(trace.arrival_s)
    timed = trace.span_s > 0
    window_s = _LONG_WINDOW_S if trace.span_s > _LONG_SPAN_S else _SHORT_WINDOW_S
    codes, counts = np.unique(trace.tier, return_counts=True)
    return TraceStatistics(
        request_count=len(trace),
        session_count=len(np.unique(trace.session[trace.session >= 0])),
        span_s=trace.span_s,
        rate_per_s=len(trace) / trace.span_s if timed else None,
        gap_cv_ratio=float(gaps_s.std() / gaps_s.mean()) if timed else None,
        dispersion_ratio=_dispersion(trace, window_s),
        window_s=window_s,
        input=_lengths(trace.input_tokens),
        output=_lengths(trace.output_tokens),
        prefix=prefix_statistics(trace) if len(trace.blocks) else None,
        tier_counts={Tier(int(code)).label: int(count) for code, count in zip(codes, counts, strict=True)},
    )


def prefix_statistics(trace: Trace) -> PrefixStatistics:
    """The upper bounds of cache hits of a trace with blocks; a hit is the leading run of ids known before the row."""
    counts = np.diff(trace.block_offsets)
    row = np.repeat(np.arange(len(trace)), counts)
    place = np.arange(len(trace.blocks)) - np.repeat(trace.block_offsets[:-1], counts)
    found = place < np.repeat(_leading(_seen_before(trace.blocks, row), trace.block_offsets), counts)
    session = trace.session[row].astype(np.int64)
    # One key for (session, block); a request without a session has nobody's earlier blocks.
    own = _seen_before(session * trace.block_end_id + trace.blocks, row) & (session >= 0)
    hits = int(found.sum())
    return PrefixStatistics(
        hit_ratio=hits * trace.block_tokens / float(trace.input_tokens.sum(dtype=np.int64)),
        request_hit_ratio=len(np.unique(row[found])) / len(trace),
        same_session_ratio=float((own & found).sum() / hits) if hits else None,
    )


def _seen_before(keys: npt.NDArray[np.int64], row: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether a key occurs in an earlier row than this one."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    seen: npt.NDArray[np.bool_] = row[first][inverse] < row
    return seen


def _leading(known: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many blocks of each row are known from its first on without a gap."""
    counts = np.diff(offsets)
    place = np.arange(len(known)) - np.repeat(offsets[:-1], counts)
    stop = np.where(known, len(known), place)
    leading = counts.copy()
    filled = np.flatnonzero(counts)
    if len(filled):
        leading[filled] = np.minimum(np.minimum.reduceat(stop, offsets[:-1][filled]), counts[filled])
    return leading


def _lengths(column: npt.NDArray[np.int32]) -> LengthStatistics:
    median, p99 = np.percentile(column, (50, 99))
    return LengthStatistics(float(column.mean()), float(median), float(p99))


def _dispersion(trace: Trace, window_s: float) -> float | None:
    count = int(trace.span_s // window_s)
    if count < 2:
        return None
    inside = trace.arrival_s - trace.arrival_s[0]
    per_window = np.bincount((inside[inside < count * window_s] // window_s).astype(np.int64), minlength=count)
    return float(per_window.var() / per_window.mean())
