"""Bodies of legs for any JSON object, and usage for any stream cut anywhere, against the same rules read slowly.

Each property is also run on versions with a planted fault, which it must catch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from controlplane.disaggregation import Body, CachedTokens, with_members
from tests.exploring import examples

OURS = st.sampled_from(["a", "b", "c", "max_tokens", "min_tokens", 'q"', "stream"])
NAMES = st.one_of(OURS, st.just("\u00e9"))
TEXT = st.sampled_from(
    ["", "x", '"', "\\", '\\"usage":{', '"prompt_tokens_details":{"cached_tokens":5}', "\u4f60", "}", ","]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=4,
)
SPACE = st.sampled_from(["", "", " ", "\n\t"])


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """The text of an object, its members in any order and any spacing, some of them twice."""
    members = []
    for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=5)):
        text = json.dumps(value, ensure_ascii=draw(st.booleans()))
        members.append(
            f"{draw(SPACE)}{json.dumps(name, ensure_ascii=False)}{draw(SPACE)}:{draw(SPACE)}{text}{draw(SPACE)}"
        )
    return f"{draw(SPACE)}{{{','.join(members) or draw(SPACE)}}}{draw(SPACE)}".encode()


Edit = tuple[bytes, dict[str, bytes], frozenset[str]]


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """A body, what is set in it, and what is dropped."""
    drop = draw(st.frozensets(OURS, max_size=3))
    new = draw(st.dictionaries(OURS, st.sampled_from([b"1", b'{"k":[2]}', b'"s"', b"null"]), max_size=3))
    return draw(objects()), {name: value for name, value in new.items() if name not in drop}, drop


Editor = Callable[[bytes, Mapping[str, bytes], Collection[str]], Body]


def only_what_is_named_changes(editor: Editor, case: Edit) -> bool:
    """The object means what it should, and without the named members its text is what it was, commas apart."""
    body, new, drop = case
    made = b"".join(editor(body, new, drop))
    before = json.loads(body, object_pairs_hook=list)
    wanted = [(name, json.loads(new[name]) if name in new else value) for name, value in before if name not in drop]
    there = {name for name, _ in before}
    wanted += [(name, json.loads(value)) for name, value in new.items() if name not in there]
    if json.loads(made, object_pairs_hook=list) != json.loads(_dumped(wanted), object_pairs_hook=list):
        return False
    return _kept(made, new, drop) == _kept(body, new, drop)


def _dumped(pairs: list[tuple[str, Any]]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):
            return "{" + ",".join(f"{json.dumps(name)}:{text(inner)}" for name, inner in value) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(text, value)) + "]"
        return json.dumps(value)

    return "{" + ",".join(f"{json.dumps(name)}:{text(value)}" for name, value in pairs) + "}"


def _kept(body: bytes, new: Mapping[str, bytes], drop: Collection[str]) -> list[bytes]:
    """The text of each member that is not named, from its name to its value's end, found by a walk of its own."""
    text, found = body.decode(), []
    decoder = json.JSONDecoder()
    at = text.index("{") + 1
    while (start := re.compile(r"[\s,]*").match(text, at).end()) < len(text) and text[start] != "}":  # type: ignore[union-attr] # matches empty
        name, end = decoder.raw_decode(text, start)
        value_at = re.compile(r"\s*:\s*").match(text, end).end()  # type: ignore[union-attr] # valid JSON
        _, at = decoder.raw_decode(text, value_at)
        if name not in new and name not in drop:
            found.append(text[start:at].encode())
    return found


@given(edits())
@settings(max_examples=examples(300))
def test_only_what_is_named_changes(case: Edit) -> None:
    assert only_what_is_named_changes(with_members, case)


# -- cached tokens -----------------------------------------------------------------------------------------------------

Stream = tuple[list[dict[str, Any]], int | None, str, list[int]]


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Chunks of a stream, what the prefill leg said, the line end, and where the stream is cut."""
    chunks = []
    for _ in range(draw(st.integers(1, 4))):
        chunk: dict[str, Any] = {
            "choices": draw(st.sampled_from([[], [{"index": 0, "delta": {"content": draw(TEXT)}}]]))
        }
        if draw(st.booleans()):
            usage: dict[str, Any] = {"prompt_tokens": 40, "completion_tokens": draw(st.integers(0, 9))}
            details = draw(st.sampled_from(["absent", None, {}, {"cached_tokens": 39}, {"cached_tokens": None},
                                            {"audio_tokens": 1, "cached_tokens": 39}]))  # fmt: skip
            if details != "absent":
                usage["prompt_tokens_details"] = details
            chunk["usage"] = usage
        chunks.append(chunk)
    known = draw(st.sampled_from([None, 0, 16]))
    return chunks, known, draw(st.sampled_from(["\n", "\r\n", "\r"])), draw(st.lists(st.integers(0, 600), max_size=6))


def _written(chunks: list[dict[str, Any]], end: str) -> bytes:
    return "".join(f"data: {json.dumps(chunk)}{end}{end}" for chunk in chunks).encode()


def _corrected(chunk: dict[str, Any], known: int | None) -> dict[str, Any]:
    """What the chunk should say, by its values."""
    usage = chunk.get("usage")
    if usage is None:
        return chunk
    usage = dict(usage)
    if "prompt_tokens_details" in usage:
        details = usage["prompt_tokens_details"]
        if details is None:
            usage["prompt_tokens_details"] = None if known is None else {"cached_tokens": known}
        elif "cached_tokens" in details or known is not None:
            usage["prompt_tokens_details"] = {**details, "cached_tokens": known}
    elif not chunk["choices"] and known:
        usage["prompt_tokens_details"] = {"cached_tokens": known}
    return {**chunk, "usage": usage}


def the_prefills_word_stands(made: type[CachedTokens], case: Stream) -> bool:
    """However the stream is cut, each chunk says what the prefill leg said, and nothing else of it changes."""
    chunks, known, end, cuts = case
    data = _written(chunks, end)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    fixed = made(known)
    out = b"".join(fixed.feed(data[start:stop]) for start, stop in pairwise(places)) + fixed.flush()
    got = [json.loads(line[6:]) for line in re.split(r"[\r\n]+", out.decode()) if line]
    untouched = [chunk for chunk in chunks if "usage" not in chunk]
    same = all(_written([chunk], end) in out for chunk in untouched)
    return same and got == [_corrected(chunk, known) for chunk in chunks]


@given(streams())
@settings(max_examples=examples(300))
def test_the_prefills_word_stands(case: Stream) -> None:
    assert the_prefills_word_stands(CachedTokens, case)


# -- planted faults ----------------------------------------------------------------------------------------------------


def sorts_names(body: bytes, new: Mapping[str, bytes], drop: Collection[str]) -> Body:
    """Writes the object anew (R28)."""
    made = {**json.loads(body), **{name: json.loads(value) for name, value in new.items()}}
    return [json.dumps({name: value for name, value in made.items() if name not in drop}, sort_keys=True).encode()]


def leaves_commas(body: bytes, new: Mapping[str, bytes], drop: Collection[str]) -> Body:
    """Drops a member and not the comma before it."""
    made = b"".join(with_members(body, new))
    for name in drop:
        made = re.sub(rb'"%s"\s*:\s*[^,{}\[\]"]+(?=\s*[,}])' % re.escape(name.encode()), b"", made)
    return [made]


def sets_once(body: bytes, new: Mapping[str, bytes], drop: Collection[str]) -> Body:
    """Adds what is there already."""
    made = b"".join(with_members(body, {}, drop))
    added = b"".join(b',"%s":%s' % (name.encode(), value) for name, value in new.items())
    return [made[: made.rindex(b"}")] + added + made[made.rindex(b"}") :]]


def by_characters(body: bytes, new: Mapping[str, bytes], drop: Collection[str]) -> Body:
    """Takes offsets in text for offsets in bytes."""
    shifted = body.decode().encode("latin-1", "replace")
    return with_members(shifted, new, drop)


class FixesPieces(CachedTokens):
    """Corrects each piece as it comes."""

    def feed(self, data: bytes) -> bytes:
        return self.whole(data)


class TrustsTheDecoder(CachedTokens):
    """Lets the decode leg's word stand where the prefill leg said nothing."""

    def feed(self, data: bytes) -> bytes:
        return data if self.known is None else super().feed(data)


class TellsEveryChunk(CachedTokens):
    """Adds details to chunks that never had any."""

    def _lines(self, lines: bytes) -> bytes:
        made = super()._lines(lines)
        return b"".join(map(self._total, made.splitlines(keepends=True))) if self.known else made


class ReadsInsideText(CachedTokens):
    """Finds a count in what the model says."""

    def _lines(self, lines: bytes) -> bytes:
        return re.sub(rb'cached_tokens\\?":\s*\d+', b'cached_tokens":%d' % (self.known or 0), lines)


class LosesTheTail(CachedTokens):
    """Forgets the last line where no line end follows."""

    def flush(self) -> bytes:
        return b""

    def feed(self, data: bytes) -> bytes:
        end = data.rfind(b"\n") + 1
        return super().feed(data[:end])


FAULTS: list[tuple[Any, Any, Any]] = [
    *((fault, only_what_is_named_changes, edits()) for fault in (sorts_names, leaves_commas, sets_once, by_characters)),
    *(
        (fault, the_prefills_word_stands, streams())
        for fault in (FixesPieces, TrustsTheDecoder, TellsEveryChunk, ReadsInsideText, LosesTheTail)
    ),
]
HUNT = settings(
    max_examples=2_000, database=None, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), derandomize=True,
)  # fmt: skip


@pytest.mark.parametrize(("fault", "holds", "cases"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS])
def test_a_planted_fault_is_caught(fault: Any, holds: Any, cases: Any) -> None:
    def caught(case: Any) -> bool:
        try:
            return not holds(fault, case)
        except Exception:
            return True

    try:
        find(cases, caught, settings=HUNT)
    except NoSuchExample:
        pytest.fail(f"{fault.__name__} passes {holds.__name__}")
