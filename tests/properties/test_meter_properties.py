"""The meter against an independent slow reading of the same rules, for any stream cut anywhere.

Each property is also run on meters with a planted fault, which it must catch.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from billing import metering
from billing.metering import Meter
from tests.exploring import examples
from tests.fakes.sse_reference import relayed

RECORDED = Path(__file__).parents[1] / "recorded"
STREAMS = [path.read_bytes() for path in sorted(RECORDED.glob("*/*.response.sse"))]
WISHES = st.sampled_from([(False, False), (True, False), (True, True)])

PIECES = [*'ab"\\{}[],:\n\r\t \u00fc\u4f60\U0001f600\x07', '"usage":', '"error"', ',"usage":{}}\n\n']
TEXT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
COUNT = st.integers(0, 300)


@st.composite
def usage_objects(draw: st.DrawFn) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": draw(COUNT), "completion_tokens": draw(COUNT)}
    if draw(st.booleans()):
        usage["prompt_tokens_details"] = draw(st.sampled_from([None, {}, {"cached_tokens": 3}]))
    if draw(st.integers(0, 9)) == 0:
        usage["note"] = draw(TEXT)
    return usage


@st.composite
def chunks(draw: st.DrawFn, choices: int) -> dict[str, Any]:
    index = draw(st.integers(0, choices - 1))
    delta = draw(
        st.one_of(
            st.builds(lambda t: {"content": t}, TEXT),
            st.just({"role": "assistant", "content": ""}),
            st.builds(lambda t: {"tool_calls": [{"index": 0, "function": {"arguments": t}}]}, TEXT),
            st.just({}),
        )
    )
    finish = draw(st.sampled_from([None] * 8 + ["stop"]))
    value: dict[str, Any] = {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}
    kind = draw(st.integers(0, 19))
    if kind == 0:
        value = {"choices": []}
    elif kind == 1:
        value["error"] = draw(st.sampled_from([None, {"message": "x"}, "x"]))
    members = [("id", "c"), *value.items()]
    if draw(st.booleans()):
        members.append(("extra", draw(st.sampled_from([1, {"usage": {"a": 1}}, [{"b": 2}], "\u00e9"]))))
    if draw(st.integers(0, 3)):
        where = draw(st.sampled_from([len(members), len(members), len(members), 1]))
        members.insert(where, ("usage", draw(st.one_of(usage_objects(), st.none()))))
    return dict(members)


@st.composite
def events(draw: st.DrawFn, choices: int) -> bytes:
    if draw(st.integers(0, 14)) == 0:
        return draw(st.sampled_from([b": keep-alive\n\n", b"data: [DONE]\n\n", b': ,"usage":{}}\n\n']))
    value = draw(chunks(choices))
    spaced = draw(st.integers(0, 9)) == 0
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), separators=None if spaced else (",", ":"))
    return b"data: " + text.encode() + b"\n\n"


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, bytes]:
    choices = draw(st.sampled_from([1, 1, 1, 2, 3]))
    if draw(st.integers(0, 4)) == 0:
        return 1, draw(st.sampled_from(STREAMS))
    parts = draw(st.lists(events(choices), min_size=1, max_size=14))
    if draw(st.booleans()):
        finals = [
            {"choices": [{"index": n, "delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
            for n in range(choices)
        ]
        last = {"choices": [], "usage": draw(usage_objects()), "system_fingerprint": "\u00fc", "timings": {"a": 1.50}}
        parts += [b"data: " + json.dumps(v, separators=(",", ":")).encode() + b"\n\n" for v in (*finals, last)]
        parts.append(b"data: [DONE]\n\n")
    stream = b"".join(parts)
    if draw(st.integers(0, 3)) == 0:
        stream = stream.replace(b"\n", draw(st.sampled_from([b"\r\n", b"\r"])))
    return choices, stream


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, bytes, list[int], tuple[bool, bool]]:
    choices, stream = draw(streams())
    cuts = draw(st.lists(st.integers(0, len(stream)), max_size=8))
    return choices, stream, sorted(cuts), draw(WISHES)


Case = tuple[int, bytes, list[int], tuple[bool, bool]]


def run(kind: type[Meter], case: Case) -> tuple[bytes, Meter]:
    choices, stream, cuts, (keep, each) = case
    meter = kind(choices=choices, keep_usage_chunk=keep, keep_continuous_usage=each, now_s=0.0)
    edges = [0, *cuts, len(stream)]
    out = b"".join(meter.feed(stream[a:b]) for a, b in pairwise(edges))
    return out + meter.flush(), meter


def shows_the_right_bytes(kind: type[Meter], case: Case) -> bool:
    """The client gets, byte for byte, what the slow reading of the rules says."""
    choices, stream, _, (keep, each) = case
    return run(kind, case)[0] == relayed(stream, choices, keep, each)


def counts_the_same_however_cut(kind: type[Meter], case: Case) -> bool:
    """Tokens, first token, done and the ending do not depend on where the bytes were cut."""
    choices, stream, _, wish = case
    whole, pieces = run(kind, (choices, stream, [], wish))[1], run(kind, case)[1]

    def facts(meter: Meter) -> tuple[Any, ...]:
        meter.delivered(0.0)
        usage = meter.engine_usage()
        return usage.input_tokens, usage.output_tokens, meter.first_token, meter.done, meter.end(), usage.estimated

    return facts(whole) == facts(pieces)


PROPERTIES = [shows_the_right_bytes, counts_the_same_however_cut]
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
HUNT = settings(RELAXED, max_examples=2_000, database=None, derandomize=True, phases=[Phase.generate])


# The last word on usage is in the finishing chunk, and neither a usage chunk nor `[DONE]` follows it.
ENDS_AT_THE_FINISH: Case = (
    1,
    b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}\n\n',
    [],
    (True, False),
)


# An engine that counts in one chunk and says null in the next.
SAYS_NULL_AFTER_A_COUNT: Case = (
    1,
    b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":null}],"usage":{"completion_tokens":7}}\n\n'
    b'data: {"choices":[{"delta":{"content":"c"},"finish_reason":null}],"usage":null}\n\n',
    [166],
    (False, False),
)


# Usage that the client asked for, and that is not the last member; and one with a blank after the comma.
KEEPS_USAGE_AT_THE_FRONT: Case = (
    1,
    b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    b'data: {"usage":{"completion_tokens":23,"prompt_tokens":30},"choices":[{"delta":{},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":null}], "usage":{"completion_tokens":24,"prompt_tokens":30}}\n\n',
    [70],
    (True, True),
)


@pytest.mark.parametrize("holds", PROPERTIES)
@given(case=cases())
@example(case=ENDS_AT_THE_FINISH)
@example(case=SAYS_NULL_AFTER_A_COUNT)
@example(case=KEEPS_USAGE_AT_THE_FRONT)
@settings(RELAXED, max_examples=examples(250))
def test_property(holds: Any, case: Case) -> None:
    assert holds(Meter, case)


# -- planted faults ----------------------------------------------------------------------------------------------------


class SumsNothingBack(Meter):
    """Drops the usage chunk without giving back what the engine had moved to it."""

    def _let_go(self, out: list[bytes], **how: Any) -> None:
        how.pop("extra_of", None)
        how.pop("names", None)
        super()._let_go(out, **how)


class ReleasesHalves(Meter):
    """Relays what is there without waiting for the end of the event."""

    def feed(self, data: bytes) -> bytes:
        return self._block(data)


class TrustsTheTail(Meter):
    """Takes every stream for the common form."""

    def _steady(self, run: bytes) -> bytes | None:
        self._chunks[0] = self._chunks.get(0, 0) + run.count(b"\n\n")
        return self._pattern.sub(b"", run) if self._cut else run


class ForgetsToHold(Meter):
    """Never holds the last event, so that usage asked for is lost where no chunk of its own follows."""

    def _chunk(self, raw: bytes, chunk: dict[str, Any], out: list[bytes]) -> None:
        super()._chunk(raw, chunk, out)
        self._let_go(out)


class KeepsNull(Meter):
    """Leaves `"usage":null` in for a client that asked for no usage."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._pattern = metering._USAGE_OBJECT

    def _steady(self, run: bytes) -> bytes | None:
        if b'"usage":null' in run and self._cut:
            return run
        return super()._steady(run)


class CountsPerRead(Meter):
    """Counts reads instead of chunks."""

    def _steady(self, run: bytes) -> bytes | None:
        before = self._chunks.get(0, 0)
        shown = super()._steady(run)
        if shown is not None:
            self._chunks[0] = before + 1
        return shown


@pytest.mark.parametrize(
    ("fault", "holds"),
    [
        (SumsNothingBack, shows_the_right_bytes),
        (ReleasesHalves, shows_the_right_bytes),
        (TrustsTheTail, shows_the_right_bytes),
        (ForgetsToHold, shows_the_right_bytes),
        (KeepsNull, shows_the_right_bytes),
        (CountsPerRead, counts_the_same_however_cut),
    ],
)
def test_a_planted_fault_is_caught(fault: type[Meter], holds: Any) -> None:
    def caught(case: Case) -> bool:
        try:
            return not holds(fault, case)
        except Exception:
            return True

    try:
        find(cases(), caught, settings=HUNT)
    except NoSuchExample:
        pytest.fail(f"{fault.__name__} passes {holds.__name__}")
