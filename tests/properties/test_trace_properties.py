"""Properties of traces, their copies and the generators, each shown to fail on a planted fault.

Owns: that copies share nothing they should not and lose nothing, that windows of copies are the whole, that validation
refuses exactly what breaks a rule, and what a generated trace must be whatever is asked for. A planted fault is a
function with the same signature that does one thing wrong; the same property must catch it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel.errors import ConfigError
from perfmodel.traces.copies import Copies
from perfmodel.traces.generators import Demand, Profile, generate, generate_parts
from perfmodel.traces.statistics import prefix_statistics
from perfmodel.traces.trace import Trace, joined, predecessors, trace_of
from tests.exploring import examples

WIDTH = 4


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Few sessions over few texts: prompts are prefixes of chains that branch, so much is shared."""
    count = draw(st.integers(1, 12))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 30.0]), min_size=count, max_size=count))
    chains = [[0, 1, 2, 3], [0, 1, 4, 5], [0, 6, 7, 8], [9, 10, 11, 12]]
    blocks, inputs = [], []
    for _ in range(count):
        chain, depth = draw(st.sampled_from(chains)), draw(st.integers(0, 4))
        blocks.append(chain[:depth])
        inputs.append(depth * WIDTH + draw(st.integers(0 if depth else 1, WIDTH - 1)))
    return trace_of(
        {
            "arrival_s": np.cumsum(gaps).tolist(),
            "session": draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count)),
            "input_tokens": inputs,
            "output_tokens": draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
            "tier": draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)),
        },
        blocks,
        WIDTH,
    )


copy_plans: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    count=st.integers(1, 4),
    seed=st.integers(0, 99),
    spread_s=st.sampled_from([None, 0.0, 5.0]),
    shared_blocks=st.sampled_from([0, 0, 1]),
    repeat_count=st.integers(1, 3),
)


def rows_of(trace: Trace) -> list[tuple[Any, ...]]:
    """Each request with everything it has."""
    columns = (trace.arrival_s, trace.session, trace.input_tokens, trace.output_tokens, trace.tier)
    return [
        (*(column[row].item() for column in columns), tuple(trace.block_ids(row).tolist())) for row in range(len(trace))
    ]


Whole = Callable[[Copies], Trace]


def check_copies(whole_of: Whole, trace: Trace, plan: dict[str, Any]) -> None:
    made = Copies(trace, **plan)
    whole = whole_of(made)
    whole.validate()
    assert len(whole) == made.request_count == len(trace) * plan["count"] * plan["repeat_count"]
    assert rows_of(whole) == rows_of(whole_of(made)), "the same seed, the same copies"
    # What each request is, but for names and times, comes as often as there are copies.
    content = sorted(zip(trace.input_tokens, trace.output_tokens, trace.tier, strict=True))
    times = plan["count"] * plan["repeat_count"]
    assert sorted(zip(whole.input_tokens, whole.output_tokens, whole.tier, strict=True)) == sorted(content * times)
    stride, shared = trace.block_end_id, plan["shared_blocks"]
    starts_s = made.starts_s().ravel()
    owner: dict[int, int] = {}
    rows = [tuple(row) for row in rows_of(trace)]
    expected: list[tuple[Any, ...]] = []
    for copy, start_s in enumerate(starts_s):
        for arrival_s, session, *rest, ids in rows:
            raised = tuple(each + (copy * stride if place >= shared else 0) for place, each in enumerate(ids))
            number = session if session < 0 else session + copy * trace.session_end_id
            expected.append((arrival_s + start_s, number, *rest, raised))
            for each in raised[shared:]:
                assert owner.setdefault(each, copy) == copy, "no two copies share a block that is not common"
    assert sorted(rows_of(whole)) == sorted(expected)
    if plan["count"] == plan["repeat_count"] == 1:
        assert rows_of(whole) == rows


@given(traces(), copy_plans)
@settings(max_examples=examples(150), deadline=None)
def test_copies_share_and_lose_nothing(trace: Trace, plan: dict[str, Any]) -> None:
    check_copies(Copies.whole, trace, plan)


@given(traces(), copy_plans, st.sampled_from([0.3, 2.0, 40.0, 1e6]))
@settings(max_examples=examples(150), deadline=None)
def test_copies_in_windows_are_the_whole(trace: Trace, plan: dict[str, Any], width_s: float) -> None:
    check_copies(lambda made: joined(list(made.windows(width_s))), trace, plan)
    parts = list(Copies(trace, **plan).windows(width_s))
    for part, after in pairwise(parts):
        assert part.arrival_s[-1] <= after.arrival_s[0]
        assert part.span_s <= width_s * (1 + 1e-9)


def shares_blocks(made: Copies) -> Trace:
    return _parts(made, block_id=0)


def shares_sessions(made: Copies) -> Trace:
    return _parts(made, session_id=0)


def strides_one_short(made: Copies) -> Trace:
    return _parts(made, block_id=max(0, made.trace.block_end_id - 1))


def loses_the_last(made: Copies) -> Trace:
    whole = made.whole()
    return whole.rows(np.arange(len(whole) - 1)) if len(whole) > len(made.trace) else whole


def starts_together(made: Copies) -> Trace:
    return replace(made, spread_s=0.0).whole() if made.spread_s else made.whole()


def names_the_nameless(made: Copies) -> Trace:
    whole = made.whole()
    return replace(whole, session=np.where(whole.session < 0, 0, whole.session))


def leaves_gaps_in_windows(made: Copies) -> Trace:
    return joined([part for part in made.windows(2.0) if len(part) > 1] or [made.whole()])


def _parts(made: Copies, **changed: int) -> Trace:
    names = {"session_id": made.trace.session_end_id, "block_id": made.trace.block_end_id} | changed
    starts_s = made.starts_s().ravel()
    return joined(
        [
            made.trace.shifted(
                by_s=float(start_s),
                session_id=copy * names["session_id"],
                block_id=copy * names["block_id"],
                shared_blocks=made.shared_blocks,
            )
            for copy, start_s in enumerate(starts_s)
        ]
    )


@pytest.mark.parametrize(
    "fault",
    [
        shares_blocks,
        shares_sessions,
        strides_one_short,
        loses_the_last,
        starts_together,
        names_the_nameless,
        leaves_gaps_in_windows,
    ],
)
def test_a_planted_fault_in_copies_is_caught(fault: Whole) -> None:
    @given(traces(), copy_plans)
    @settings(
        max_examples=400, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def search(trace: Trace, plan: dict[str, Any]) -> None:
        check_copies(fault, trace, plan)

    with pytest.raises(AssertionError):
        search()


BREAKS: dict[str, Callable[[Trace, int], Trace]] = {
    "time": lambda trace, row: _with(trace, "arrival_s", row, float(trace.arrival_s[row]) - 1e6),
    "input": lambda trace, row: _with(trace, "input_tokens", row, 0),
    "output": lambda trace, row: _with(trace, "output_tokens", row, 0),
    "session": lambda trace, row: _with(trace, "session", row, -2),
    "tier": lambda trace, row: _with(trace, "tier", row, 6),
    "think": lambda trace, row: _with(trace, "think_s", row, -1.0),
    "blocks": lambda trace, row: _with(trace, "input_tokens", row, int(trace.input_tokens[row]) + WIDTH * 5),
}


def _with(trace: Trace, name: str, row: int, value: float) -> Trace:
    column = getattr(trace, name).copy()
    column[row] = value
    return replace(trace, **{name: column})


Validate = Callable[[Trace], None]


def check_validation(validate: Validate, trace: Trace, rule: str, row: int) -> None:
    validate(trace)
    row %= len(trace)
    broken = BREAKS[rule](trace, row)
    if rule == "blocks" and not len(trace.block_ids(row)):
        validate(broken)  # content that is unknown may be of any length
        return
    with pytest.raises(ConfigError, match=rf"^line {row + 1}: "):
        validate(broken)


@given(traces(), st.sampled_from(sorted(BREAKS)), st.integers(0, 99))
@settings(max_examples=examples(200), deadline=None)
def test_validation_names_the_line_that_breaks_a_rule(trace: Trace, rule: str, row: int) -> None:
    check_validation(Trace.validate, trace, rule, row)


def _blind(*columns: str) -> Validate:
    """Validation that does not look at some columns."""

    def validate(trace: Trace) -> None:
        good: dict[str, Any] = {
            "input_tokens": np.maximum(1, trace.input_tokens),
            "output_tokens": np.ones_like(trace.output_tokens),
            "session": np.zeros_like(trace.session),
            "tier": np.zeros_like(trace.tier),
            "think_s": np.zeros_like(trace.think_s),
            "arrival_s": np.zeros_like(trace.arrival_s),
        }
        replace(trace, **{name: good[name] for name in columns}).validate()

    return validate


@pytest.mark.parametrize(
    "fault",
    [
        *(_blind(name) for name in ("input_tokens", "output_tokens", "session", "tier", "think_s", "arrival_s")),
        lambda trace: trace.validate(first_line=0),
        lambda trace: replace(trace, block_tokens=0).validate() if not len(trace.blocks) else None,
    ],
)
def test_a_planted_fault_in_validation_is_caught(fault: Validate) -> None:
    @given(traces(), st.sampled_from(sorted(BREAKS)), st.integers(0, 99))
    @settings(
        max_examples=400, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def search(trace: Trace, rule: str, row: int) -> None:
        check_validation(fault, trace, rule, row)

    with pytest.raises((AssertionError, ConfigError, pytest.fail.Exception)):
        search()


def check_hits(found: Callable[[Trace], float], trace: Trace) -> None:
    """The hit ratio against a cache that is played request by request."""
    known: set[int] = set()
    hit_tokens = 0
    for row in range(len(trace)):
        ids = trace.block_ids(row).tolist()
        leading = next((place for place, each in enumerate(ids) if each not in known), len(ids))
        hit_tokens += leading * trace.block_tokens
        known.update(ids)
    assert found(trace) == pytest.approx(hit_tokens / int(trace.input_tokens.sum()))


def _hit_ratio(trace: Trace) -> float:
    return prefix_statistics(trace).hit_ratio


@given(traces().filter(lambda trace: len(trace.blocks) > 0))
@settings(max_examples=examples(200), deadline=None)
def test_the_hit_bound_is_that_of_an_endless_cache(trace: Trace) -> None:
    check_hits(_hit_ratio, trace)


@pytest.mark.parametrize(
    "fault",
    [
        lambda trace: 1 - len(np.unique(trace.blocks)) * trace.block_tokens / int(trace.input_tokens.sum()),
        lambda trace: _hit_ratio(trace) * (len(trace) > 2),
        lambda trace: _hit_ratio(trace) * int(trace.input_tokens.sum()) / (len(trace.blocks) * trace.block_tokens),
    ],
)
def test_a_planted_fault_in_the_hit_bound_is_caught(fault: Callable[[Trace], float]) -> None:
    @given(traces().filter(lambda trace: len(trace.blocks) > 0))
    @settings(
        max_examples=400, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def search(trace: Trace) -> None:
        check_hits(fault, trace)

    with pytest.raises(AssertionError):
        search()


demands = st.builds(
    Demand,
    profile=st.sampled_from(Profile),
    hours=st.sampled_from([0.05, 0.5]),
    rate_per_s=st.sampled_from([0.02, 0.5]),
    seed=st.integers(0, 1000),
    start_day_index=st.integers(0, 6),
    start_hours=st.sampled_from([0.0, 7.5, 23.9]),
    tenant_count=st.sampled_from([None, 1, 3]),
    block_tokens=st.sampled_from([None, 64]),
)
Made = Callable[[Demand], Trace]


def check_generator(made: Made, demand: Demand) -> None:
    try:
        trace = made(demand)
    except ConfigError as fault:
        assert "no request" in str(fault)
        return
    trace.validate()
    assert rows_of(trace) == rows_of(made(demand)), "a seed decides everything"
    assert trace.arrival_s[0] >= 0 and trace.arrival_s[-1] < demand.end_s
    before = predecessors(trace.session)
    thought = ~np.isnan(trace.think_s)
    assert (before[thought] >= 0).all(), "who thinks has a turn before"
    gap_s = trace.arrival_s[thought] - trace.arrival_s[before[thought]]
    assert (trace.think_s[thought] <= gap_s * (1 + 1e-5) + 1e-3).all(), "thinking is part of the gap between two starts"
    sessions = np.unique(trace.session[trace.session >= 0])
    assert sessions.tolist() == list(range(len(sessions))), "sessions are numbered without holes"
    if trace.block_tokens:
        wanted = trace.input_tokens // trace.block_tokens
        assert (np.diff(trace.block_offsets) == wanted).all(), "every full block has an id"
        parents: dict[int, int] = {}
        for row in range(len(trace)):
            ids = trace.block_ids(row).tolist()
            for parent, each in zip([-1, *ids], ids, strict=False):
                assert parents.setdefault(each, parent) == parent, "an id names a whole prefix"


@given(demands)
@settings(max_examples=examples(40), deadline=None)
def test_a_generated_trace_is_a_trace(demand: Demand) -> None:
    check_generator(generate, demand)
    parts = list(generate_parts(demand, piece_rows=7))
    if parts:
        assert rows_of(joined(parts)) == rows_of(generate(demand)), "pieces are the whole"


class RemembersTheLastCall:
    """Draws on where the call before stopped: every other trace of a demand is shifted. Mutable: that is the fault."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, demand: Demand) -> Trace:
        trace = generate(demand)
        self._calls += 1
        return replace(trace, output_tokens=trace.output_tokens + self._calls % 2)


def mixes_prefixes(demand: Demand) -> Trace:
    trace = generate(demand)
    return replace(trace, blocks=trace.blocks // 2)


def thinks_too_long(demand: Demand) -> Trace:
    trace = generate(demand)
    return replace(trace, think_s=trace.think_s * 1.1 + 1)


def thinks_at_first(demand: Demand) -> Trace:
    trace = generate(demand)
    return replace(trace, think_s=np.zeros_like(trace.think_s))


def runs_over(demand: Demand) -> Trace:
    return generate(replace(demand, hours=demand.hours * 1.2))


def skips_numbers(demand: Demand) -> Trace:
    trace = generate(demand)
    return replace(trace, session=np.where(trace.session < 0, -1, trace.session * 2).astype(np.int32))


def forgets_a_block(demand: Demand) -> Trace:
    trace = generate(demand)
    counts = np.diff(trace.block_offsets)
    counts[-1] = 0
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return replace(trace, block_offsets=offsets, blocks=trace.blocks[: offsets[-1]])


@pytest.mark.parametrize(
    "fault",
    [
        RemembersTheLastCall(),
        mixes_prefixes,
        thinks_too_long,
        thinks_at_first,
        runs_over,
        skips_numbers,
        forgets_a_block,
    ],
)
def test_a_planted_fault_in_a_generator_is_caught(fault: Made) -> None:
    @given(demands)
    @settings(
        max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def search(demand: Demand) -> None:
        check_generator(fault, demand)

    with pytest.raises((AssertionError, ConfigError)):
        search()
