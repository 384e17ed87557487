"""Traces in memory: rules of the columns, windows, joins, think times and their statistics by hand.

Owns: small cases whose answers are written down. Does not own: files (`integration/perfmodel/test_traces`) or what
holds for any trace (`properties/test_trace_properties`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.errors import ConfigError
from perfmodel.traces.copies import Copies, copies
from perfmodel.traces.statistics import statistics
from perfmodel.traces.trace import Tier, Trace, joined, predecessors, trace_of


def small() -> Trace:
    """Two sessions of two turns and one request of nobody, blocks of 10 tokens, one block shared by all."""
    return trace_of(
        {
            "arrival_s": [0.0, 1.0, 10.0, 12.0, 12.0],
            "session": [0, 1, 0, -1, 1],
            "input_tokens": [25, 21, 39, 8, 45],
            "output_tokens": [5, 61, 7, 1, 2],
            "tier": [0, 1, 0, 4, 1],
        },
        [[0, 1], [0, 2], [0, 1, 3], [], [0, 2, 4, 5]],
        10,
    )


def test_a_good_trace_passes() -> None:
    trace = small()
    trace.validate()
    assert (len(trace), trace.span_s, trace.session_end_id, trace.block_end_id) == (5, 12.0, 2, 6)
    assert trace.block_ids(2).tolist() == [0, 1, 3]
    assert [tier.label for tier in Tier] == ["chat", "agent", "code", "batch", "api", "realtime"]


@pytest.mark.parametrize(
    ("column", "row", "value", "sentence"),
    [
        ("arrival_s", 0, -1.0, "line 1: t is -1.0; expected 0 or more seconds, at most a billion"),
        ("arrival_s", 2, float("nan"), "line 3: t is nan; expected 0 or more seconds, at most a billion"),
        ("arrival_s", 3, 9.0, "line 4: t is 9.0, before the 10.0 of the line above; expected requests sorted by t"),
        ("input_tokens", 3, 0, "line 4: isl is 0; expected 1 to 4,000,000"),
        ("output_tokens", 1, -2, "line 2: osl is -2; expected 1 to 4,000,000"),
        ("session", 4, -3, "line 5: session is -3; expected -1 (none) or more"),
        ("tier", 0, 9, "line 1: tier is 9; expected 0 to 5"),
        ("think_s", 2, -0.5, "line 3: think_s is -0.5; expected 0 or more seconds, at most a billion"),
        ("blocks", 5, -7, "line 3: a block id is -7; expected 0 or more"),
        ("input_tokens", 2, 40, "line 3: blocks has 3 ids; expected 4, the full blocks of isl 40 at 10 tokens"),
    ],
)
def test_a_bad_row_is_named(column: str, row: int, value: float, sentence: str) -> None:
    changed = getattr(small(), column).copy()
    changed[row] = value
    with pytest.raises(ConfigError) as caught:
        replace(small(), **{column: changed}).validate()
    assert str(caught.value) == sentence


def test_columns_of_unlike_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="output_tokens has 4 rows; expected 5, as arrival_s"):
        replace(small(), output_tokens=small().output_tokens[:4])
    with pytest.raises(ConfigError, match="block_offsets must have 6 rows"):
        replace(small(), blocks=small().blocks[1:])
    with pytest.raises(ConfigError, match="block_tokens is 0; expected at least 1 in a trace with blocks"):
        replace(small(), block_tokens=0).validate()


def test_a_window_starts_at_zero_and_forgets_who_came_before() -> None:
    timed = small().with_think_times(1.0, 10.0)
    window = timed.window(1.0, 12.0)
    assert window.arrival_s.tolist() == [0.0, 9.0]
    assert window.block_ids(1).tolist() == [0, 1, 3]
    assert np.isnan(window.think_s).all(), "the first turn of session 0 is cut off"
    assert len(timed.window(5.0, 5.0)) == 0 and len(timed.window(99.0, 100.0)) == 0


def test_think_times_are_gaps_without_the_engine() -> None:
    assert predecessors(small().session).tolist() == [-1, -1, 0, -1, 1]
    thought = small().with_think_times(ttft_s=1.0, tok_per_s=10.0).think_s
    assert np.isnan(thought[[0, 1, 3]]).all()
    assert thought[2] == pytest.approx(10.0 - 1.0 - 0.5)
    assert thought[4] == pytest.approx(11.0 - 1.0 - 6.1)
    known = replace(small(), think_s=np.array([np.nan, np.nan, 3.0, np.nan, np.nan], dtype=np.float32))
    assert known.with_think_times(1.0, 10.0).think_s[2] == 3.0
    assert known.with_think_times(1.0, 10.0, keep=False).think_s[2] == 8.5
    assert small().with_think_times(ttft_s=100.0).think_s[2] == 0.0


def test_joined_traces_keep_their_order() -> None:
    whole = joined([small(), small().shifted(by_s=1.0, session_id=2, block_id=6, shared_blocks=1)])
    whole.validate()
    assert whole.arrival_s.tolist() == [0.0, 1.0, 1.0, 2.0, 10.0, 11.0, 12.0, 12.0, 13.0, 13.0]
    assert whole.session.tolist() == [0, 1, 2, 3, 0, 2, -1, 1, -1, 3]
    assert whole.block_ids(5).tolist() == [0, 7, 9]
    with pytest.raises(ConfigError, match=r"blocks of \[10, 20\] tokens"):
        joined([small(), trace_of({**_one(), "input_tokens": [20]}, [[0]], 20)])
    with pytest.raises(ConfigError, match="expected at least one trace"):
        joined([])


def _one() -> dict[str, list[float]]:
    return {"arrival_s": [0.0], "session": [-1], "input_tokens": [5], "output_tokens": [1], "tier": [0]}


def test_copies_say_what_they_cannot_be() -> None:
    for arguments, sentence in (
        ({"count": 0}, "copies: count is 0; expected at least 1"),
        ({"count": 1, "repeat_count": 0}, "copies: repeat_count is 0; expected at least 1"),
        ({"count": 1, "spread_s": -1.0}, "copies: spread_s is -1.0; expected 0 or more seconds"),
    ):
        with pytest.raises(ConfigError) as caught:
            Copies(small(), seed=1, **arguments)
        assert str(caught.value) == sentence
    with pytest.raises(ConfigError, match="width_s is 0"):
        list(Copies(small(), 1, 1).windows(0))
    with pytest.raises(ConfigError, match="session numbers"):
        Copies(small(), 2**30, 1)


def test_large_block_ids_are_made_small_with_the_same_sharing() -> None:
    hashed = replace(small(), blocks=2**63 - 1 - small().blocks * 7)
    with pytest.raises(ConfigError, match=r"expected block ids below 2\^63 in all copies"):
        Copies(hashed, 2, 0)
    made = hashed.with_small_block_ids()
    assert made.blocks.tolist() == [5, 4, 5, 3, 5, 4, 2, 5, 3, 1, 0]
    assert statistics(made).prefix == statistics(small()).prefix
    assert len(Copies(made, 1000, 0).whole()) == 5000


def test_one_copy_is_the_trace() -> None:
    once = copies(small(), 1, seed=5)
    for name in ("arrival_s", "session", "blocks", "input_tokens"):
        assert (getattr(once, name) == getattr(small(), name)).all()


def test_copies_of_a_job_stay_at_zero() -> None:
    job = trace_of({**_one(), "arrival_s": [0.0]}, [[]], 0)
    assert copies(job, 3, seed=1).arrival_s.tolist() == [0.0] * 3
    assert next(Copies(job, 2, 1).windows(10.0)).session.tolist() == [-1, -1]


def test_the_statistics_of_a_small_trace() -> None:
    found = statistics(small())
    assert (found.request_count, found.session_count, found.span_s) == (5, 2, 12.0)
    assert found.rate_per_s == pytest.approx(5 / 12)
    assert found.input.median_tokens == 25.0 and found.output.mean_tokens == pytest.approx(15.2)
    assert found.prefix is not None
    # Hits: block 0 of row 1; 0 and 1 of row 2; 0 and 2 of row 4. Row 1 has 0 from another session.
    assert found.prefix.hit_ratio == pytest.approx(50 / (25 + 21 + 39 + 8 + 45))
    assert found.prefix.request_hit_ratio == pytest.approx(3 / 5)
    assert found.prefix.same_session_ratio == pytest.approx(4 / 5)
    assert found.tier_counts == {"chat": 2, "agent": 2, "api": 1}
    assert found.dispersion_ratio is None, "one window has no variance"


def test_a_hit_ends_at_the_first_unknown_block() -> None:
    trace = trace_of(
        {
            "arrival_s": [0.0, 1.0],
            "session": [-1, -1],
            "input_tokens": [30, 40],
            "output_tokens": [1, 1],
            "tier": [0, 0],
        },
        [[1, 2, 3], [1, 9, 3, 2]],
        10,
    )
    found = statistics(trace).prefix
    assert found is not None and found.hit_ratio == pytest.approx(10 / 70)


def test_what_one_request_cannot_have_is_unknown() -> None:
    found = statistics(trace_of(_one(), [[]], 0))  # type: ignore[arg-type]  # a dict of lists
    assert (found.rate_per_s, found.gap_cv_ratio, found.dispersion_ratio, found.prefix) == (None, None, None, None)
