"""Trace files on a disk: what is written is what is read, and every bad line is one sentence that names it.

Owns: the file format, gzip or plain, in chunks. Does not own: the columns' rules (`unit/perfmodel/test_trace`).
"""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.adapters.traces import read_trace, stream_trace, write_trace
from perfmodel.errors import ConfigError
from perfmodel.traces.copies import Copies
from perfmodel.traces.generators import Demand, Profile, generate
from perfmodel.traces.trace import Trace

GOOD: dict[str, Any] = {
    "t": 0.0, "session": "a", "isl": 25, "osl": 3, "blocks": [0, 1], "block_tokens": 10, "tier": "chat",
}  # fmt: skip
# How every sentence on a line that is no request ends.
WANTED = "expected a JSON object with t, isl, osl, tier (and, where known, session, blocks, block_tokens)"


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def same(left: Trace, right: Trace) -> bool:
    columns = ("session", "input_tokens", "output_tokens", "block_offsets", "blocks", "tier")
    return (
        left.block_tokens == right.block_tokens
        and all(np.array_equal(getattr(left, name), getattr(right, name)) for name in columns)
        and np.allclose(left.arrival_s, right.arrival_s, rtol=0, atol=1e-6)
        and np.allclose(left.think_s, right.think_s, rtol=0, atol=1e-3, equal_nan=True)
    )


@pytest.mark.parametrize("profile", list(Profile))
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_written_is_read(profile: Profile, name: str, tmp_path: Path) -> None:
    trace = generate(Demand(profile, 0.3, 0.5, seed=4))
    path = tmp_path / name
    assert write_trace(trace, path) == len(trace)
    assert same(read_trace(path), trace)
    again = tmp_path / f"again-{name}"
    write_trace([trace.rows(np.arange(7)), trace.rows(np.arange(7, len(trace)))], again)
    assert again.read_bytes() == path.read_bytes(), "the same trace, the same bytes"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([name, again.name])


def test_chunks_number_sessions_alike(tmp_path: Path) -> None:
    trace = generate(Demand(Profile.CHAT, 0.3, 0.5, seed=4))
    write_trace(trace, tmp_path / "t.jsonl")
    sessions = np.concatenate([part.session for part in stream_trace(tmp_path / "t.jsonl", chunk_rows=10)])
    assert np.array_equal(sessions, trace.session)


def test_the_published_schema_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        GOOD,
        {**GOOD, "session": None, "blocks": None, "block_tokens": None, "tier": "batch"},
        {**GOOD, "t": 1, "isl": 9, "blocks": [], "session": "b"},
        {**GOOD, "t": 2.5, "think_s": 1.5},
    )
    trace = read_trace(path)
    assert trace.session.tolist() == [0, -1, 1, 0]
    assert trace.arrival_s.tolist() == [0.0, 0.0, 1.0, 2.5]
    assert trace.tier.tolist() == [0, 3, 0, 0]
    assert np.diff(trace.block_offsets).tolist() == [2, 0, 0, 2]
    assert np.isnan(trace.think_s[:3]).all() and trace.think_s[3] == 1.5


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ({**GOOD, "t": -1}, "line 2: t is -1.0; expected 0 or more seconds, at most a billion"),
        ({**GOOD, "t": True}, "line 2: t is true; expected a number of seconds"),
        ({**GOOD, "isl": 0, "blocks": []}, "line 2: isl is 0; expected 1 to 4,000,000"),
        ({**GOOD, "isl": 2.5}, "line 2: isl is 2.5; expected an integer from 1 to 2147483647"),
        ({**GOOD, "osl": None}, "line 2: osl is missing or null; expected an integer from 1 to 2147483647"),
        ({**GOOD, "isl": 2**31}, "line 2: isl is 2147483648; expected an integer from 1 to 2147483647"),
        ({**GOOD, "isl": 35}, "line 2: blocks has 2 ids; expected 3, the full blocks of isl 35 at 10 tokens"),
        ({**GOOD, "blocks": []}, "line 2: blocks has 0 ids; expected 2, the full blocks of isl 25 at 10 tokens"),
        ({**GOOD, "blocks": [0, -4]}, "line 2: a block id is -4; expected 0 or more"),
        ({**GOOD, "blocks": [0, "1"]}, 'line 2: blocks is [0,"1"]; expected a list of integers or null'),
        ({**GOOD, "blocks": [0, 2**63]}, "line 1 or later: a block id is beyond 64 bits; expected 0 to 2^63 - 1"),
        ({**GOOD, "block_tokens": 16}, "line 2: block_tokens is 16; expected 10, as on the lines above"),
        (
            {**GOOD, "block_tokens": 0},
            "line 2: block_tokens is 0; expected an integer of at least 1, at most 4,000,000",
        ),
        (
            {**GOOD, "isl": 9, "blocks": [], "block_tokens": 10**12},
            "line 2: block_tokens is 1000000000000; expected an integer of at least 1, at most 4,000,000",
        ),
        ({**GOOD, "session": 4}, "line 2: session is 4; expected a string or null"),
        (
            {**GOOD, "tier": "gold"},
            'line 2: tier is "gold"; expected one of chat, agent, code, batch, api, realtime',
        ),
        ({**GOOD, "think_s": -2}, "line 2: think_s is -2.0; expected 0 or more seconds, at most a billion"),
        ({**GOOD, "think_s": 1e300}, "line 2: think_s is inf; expected 0 or more seconds, at most a billion"),
        (
            {"timestamp": 1, "input_length": 5, "tier": "chat"},
            f"line 2: t, isl, osl missing; {WANTED}; it has timestamp, input_length, tier",
        ),
        ("[1]", f"line 2: it is [1]; {WANTED}"),
        ("", f"line 2: it is empty; {WANTED}"),
    ],
)
def test_a_bad_line_is_one_sentence(second: dict[str, Any] | str, sentence: str, tmp_path: Path) -> None:
    path = written(tmp_path / "bad.jsonl", GOOD, second)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}: {sentence}"


def test_a_trace_of_two_models_is_refused(tmp_path: Path) -> None:
    named = {**GOOD, "model": "Llama-3.1-8B"}
    assert len(read_trace(written(tmp_path / "one.jsonl", named, named, GOOD))) == 3
    path = written(tmp_path / "two.jsonl", named, {**named, "model": "Qwen3-8B"})
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value) == (
        f'{path}: line 2: model is "Qwen3-8B"; expected "Llama-3.1-8B", as on the lines above: a trace is for one model'
    )


def test_a_line_that_is_no_json_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"line 2: it is no JSON \(.*\); {re.escape(WANTED)}$"):
        read_trace(written(tmp_path / "bad.jsonl", GOOD, "{'t': 0}"))


def test_times_that_fall_are_found_within_and_between_chunks(tmp_path: Path) -> None:
    lines = [{**GOOD, "t": 5.0 + number} for number in range(6)]
    lines[3]["t"] = 1.0
    path = written(tmp_path / "bad.jsonl", *lines)
    for chunk_rows in (2, 3, 100):
        with pytest.raises(ConfigError, match=r"line 4: t is 1\.0, before the 7\.0 of the line above"):
            list(stream_trace(path, chunk_rows))


def test_a_file_that_is_empty_cut_off_or_not_there_is_one_sentence(tmp_path: Path) -> None:
    empty = written(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="it has no request; expected at least one line"):
        read_trace(empty)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 100)[:-20])
    with pytest.raises(ConfigError, match="the gzip data is damaged or cut off"):
        read_trace(cut)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def parts() -> Any:
        yield generate(Demand(Profile.BATCH, 0.1, 0.1, seed=4))
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_trace(parts(), tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "none" / "t.jsonl"
    with pytest.raises(FileNotFoundError) as caught:
        write_trace(generate(Demand(Profile.BATCH, 0.1, 0.1, seed=4)), path)
    assert caught.value.filename == str(path)


def test_copies_of_any_length_need_the_memory_of_a_window() -> None:
    base = generate(Demand(Profile.CHAT, 0.5, 1.0, seed=4))

    def peak_bytes(repeat_count: int) -> int:
        tracemalloc.start()
        count = sum(len(part) for part in Copies(base, 10, 1, repeat_count=repeat_count).windows(60.0))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == len(base) * 10 * repeat_count
        return peak

    assert peak_bytes(8) < 1.25 * peak_bytes(2)
