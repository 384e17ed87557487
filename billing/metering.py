"""Counting tokens in an engine's answer while it is relayed, and cutting out the usage that only we asked for.

Owns: `Meter` (a server-sent-event stream in, the client's bytes out, usage counted on the way), and the rule of which
of an engine's many usage figures counts. Does not own: the reading of one usage object or of a whole answer
(`token_usage`), what a token costs (`pricing`), the request side (`controlplane.adapters.openai_wire`), or any socket.
Bytes and seconds are arguments.

To have a count when a stream breaks, the gateway asks every engine for usage in each chunk. The client must not see
that: what `feed` returns is what the engine would have sent for the client's own body, byte for byte. That includes
what an engine moves to its usage chunk when there is one (vLLM's `system_fingerprint`, llama.cpp's `timings`): it is
put back on the last chunk with choices, which is therefore held until the next event (reference gateway 2.4).

Usage is cumulative and per choice index (vLLM), the chunk without choices holds the total: the last total wins, else
the sum of each index's last value, else the number of content chunks, flagged as an estimate. Nothing is summed over
chunks; a count that falls is flagged `inconsistent`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from math import ceil
from typing import Any, Final, NamedTuple

from billing.json_members import json_members
from billing.token_usage import MAX_TOKENS, Usage, parsed_json, tier_of, token_count, usage_from

# DESIGN 4.3: a checkpoint follows delivery by at most 64 tokens or one second, whichever is less.
CHECKPOINT_TOKENS: Final = 64
CHECKPOINT_S: Final = 1.0
# The longest event that is waited for; the longest seen in practice (logprobs, base64 audio) are under 1 MB.
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024

# The inside of a usage object whose values are numbers, null or one level of objects of these. A colon must not be
# followed by a quote, so no string value (which could hold a brace) is ever matched.
_FLAT: Final = rb'(?:[^{}:]*+:[^"{}:])*+[^{}:"]*'
_INSIDE: Final = rb'(?:[^{}:]*+:(?:[^"{}:]|\{' + _FLAT + rb'\}))*+[^{}:"]*'
# `,"usage":{..}` directly before the `}` that ends the event. Exact, given valid JSON: a raw quote after a comma starts
# a string, so this is a member; and the brace before the end of the event closes the outermost object.
_USAGE_OBJECT: Final = re.compile(rb',"usage":\{' + _INSIDE + rb"\}(?=\}\n\n)")
_USAGE_ANY: Final = re.compile(rb',"usage":(?:null|\{' + _INSIDE + rb"\})(?=\}\n\n)")
# The same anywhere in an event; only a candidate, to be proven (`_without_usage`, `_members_text`).
_USAGE_INSIDE: Final = re.compile(rb',"usage":(?:null|\{' + _INSIDE + rb"\})(?=[,}])")
# Two line ends in a row end an event (WHATWG HTML 9.2.6); only used once a CR was seen.
_BLANK: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE: Final = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r|\Z)")

_DONE: Final = b"[DONE]"


class StreamEnd(StrEnum):
    """How an engine's stream ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Neither `[DONE]` nor a finish reason for every choice came."""
    ENGINE_ERROR = "engine_error"
    """An event with an error came; a `[DONE]` after it proves nothing."""


class _Held(NamedTuple):
    """The last event with choices, until it is known what comes after it."""

    raw: bytes
    shown: bytes
    """Without its own usage."""
    names: frozenset[str]
    """Members that it has."""


class _Unsent(NamedTuple):
    """A piece that a slow client's socket may not have taken: its bytes, and the tokens released before and with it."""

    data: bytes
    end_bytes: int
    before: int
    tokens: int


class Meter:
    """One engine stream, relayed and counted. Mutable; one instance per attempt, fed in order.

    `feed` takes bytes as they come, split anywhere, and returns what the client gets now: whole events, as soon as they
    are complete, and nothing that comes after `[DONE]`. `flush` is called when the engine's body has ended, then `end`
    says how. Line ends may be LF, CRLF or CR; an event that ends in CR at the end of a read waits for the next byte,
    because a LF would belong to it.
    """

    __slots__ = (
        "_all_finished",
        "_choices",
        "_chunks",
        "_cr",
        "_cut",
        "_delivered",
        "_delivered_all",
        "_failed",
        "_finished",
        "_held",
        "_held_before",
        "_keep_chunk",
        "_keep_each",
        "_last",
        "_marked_s",
        "_marked_tokens",
        "_pattern",
        "_plain",
        "_released",
        "_seen",
        "_sent_tokens",
        "_tail",
        "_tier",
        "_total",
        "_unsent",
        "_wrong",
        "done",
        "first_token",
    )  # fmt: skip

    def __init__(self, *, choices: int, keep_usage_chunk: bool, keep_continuous_usage: bool, now_s: float) -> None:
        self._choices = choices
        self._keep_chunk = keep_usage_chunk
        self._keep_each = keep_usage_chunk and keep_continuous_usage  # engines ignore the second without the first
        self._cut = not self._keep_each
        self._plain = choices == 1 and self._cut
        """Its common event may be tried for first, as long as nothing has finished."""
        self._pattern = _USAGE_OBJECT if keep_usage_chunk else _USAGE_ANY
        self.done = False
        """`[DONE]` was seen. No proof of success: see `end`."""
        self.first_token = False
        """A chunk with content (text, tool call, reasoning) was seen; a chunk with only a role is none."""
        self._tail = bytearray()
        self._cr = False
        self._failed = False
        self._wrong = False
        self._finished: set[int] = set()
        self._all_finished = False
        self._chunks: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._seen: Mapping[str, Any] | None = None
        self._total: Mapping[str, Any] | None = None
        self._tier: str | None = None
        self._held: _Held | None = None
        self._held_before = 0
        self._released = 0
        self._delivered = 0
        self._delivered_all = False
        self._unsent: deque[_Unsent] = deque()
        self._sent_tokens = 0
        self._marked_tokens = 0
        self._marked_s = now_s

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> bytes:
        """Bytes from the engine; returns the bytes that the client gets now, perhaps none."""
        if self._cr or data.find(b"\r") >= 0:  # `in` takes twice as long here, and below
            return self._feed_any_line_end(data)
        tail = self._tail
        if self._plain and self.first_token and not tail and data.find(b"\n") == len(data) - 2:
            shown = self._one_steady(data)
            if shown is not None:
                return shown
        if tail:
            start = max(0, len(tail) - 1)
            tail += data
            end = tail.rfind(b"\n\n", start) + 2
            if end < 2:
                return self._wait_for_more()
            block = bytes(tail[:end])
            del tail[:end]
            return self._block(block)
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            tail += data
            return self._wait_for_more()
        if end == len(data):
            return self._block(data)
        tail += data[end:]
        return self._block(data[:end])

    def _wait_for_more(self) -> bytes:
        """No event has ended; one that never does is an engine's failure, not our memory."""
        if len(self._tail) > MAX_EVENT_BYTES:
            self._failed = self.done = True
            self._tail = bytearray()
        return b""

    def _feed_any_line_end(self, data: bytes) -> bytes:
        self._cr = True
        tail = self._tail
        start = max(0, len(tail) - 3)
        tail += data
        if not _BLANK.search(tail, start):
            return self._wait_for_more()
        text = bytes(tail)
        out: list[bytes] = []
        pos = 0
        for blank in _BLANK.finditer(text):
            end = blank.end()
            if self.done or (end == len(text) and text[-1:] == b"\r"):
                break
            self._event(text[pos:end], out)
            pos = end
        self._tail = bytearray(text[pos:])
        self._account()
        return b"".join(out)

    def flush(self) -> bytes:
        """The engine's body has ended: returns what was held back. An event that is cut in two is dropped."""
        out: list[bytes] = []
        rest = bytes(self._tail)
        self._tail = bytearray()
        if rest and not self.done and self._is_whole(rest):
            self._event(rest, out)
        self._let_go(out, keep_own_usage=True)
        self._account()
        return b"".join(out)

    def _is_whole(self, rest: bytes) -> bool:
        """Whether an event without its blank line is complete all the same (some engines end in one line end)."""
        text = _json_text(rest)
        return text is None or text == _DONE or isinstance(parsed_json(text), dict)

    # -- events --------------------------------------------------------------------------------------------------------

    def _block(self, block: bytes) -> bytes:
        """Whole events with LF line ends; `block` ends in a blank line."""
        out: list[bytes] = []
        pos, size = 0, len(block)
        if self._choices == 1:
            while not self.first_token and not self.done and pos < size:
                pos = self._one(block, pos, out)
            if pos < size and not self._all_finished and not self.done:
                stop = block.find(b'"finish_reason":"', pos)
                stop = size if stop < 0 else block.rfind(b"\n\n", pos, stop) + 2
                shown = self._steady(block[pos:stop] if stop - pos != size else block) if stop > pos else None
                if shown is not None:
                    out.append(shown)
                    pos = stop
        while pos < size and not self.done:
            pos = self._one(block, pos, out)
        self._account()
        return out[0] if len(out) == 1 else b"".join(out)

    def _one(self, block: bytes, pos: int, out: list[bytes]) -> int:
        end = block.find(b"\n\n", pos) + 2
        if end < 2:
            end = len(block)
        self._event(block[pos:end] if end - pos != len(block) else block, out)
        return end

    def _steady(self, run: bytes) -> bytes | None:
        """The common middle of a stream in a few native calls; None, and nothing done, for any other form.

        The common form: every event is one `data: {..}` line with one unfinished choice and no error; usage, if there
        is any, is the last member of each. Nothing is held before every choice has finished.
        """
        count = run.count(b"\n") >> 1
        if (
            run.count(b'"finish_reason":null') != count
            or not run.startswith(b"data: {")
            or (count > 1 and run.count(b"}\n\ndata: {") != count - 1)
            or not run.endswith(b"}\n\n")
            or b'"error"' in run
        ):
            return None
        shown, cuts = self._pattern.subn(b"", run) if self._cut else (run, -1)
        if cuts >= 0 and ((cuts and cuts != count) or b'"usage"' in shown):
            return None
        at = run.rfind(b',"usage":')
        if at >= 0:
            counts = parsed_json(run[at + 9 : -3])
            if isinstance(counts, dict):
                self._note(0, counts)
            elif counts is not None or run[at + 9 : -3] != b"null" or b',"usage":{' in run:
                return None
        elif cuts < 0 and b'"usage"' in run:  # kept, and not where it is looked for
            return None
        self._chunks[0] = self._chunks.get(0, 0) + count
        return shown

    def _one_steady(self, event: bytes) -> bytes | None:
        """One event of the common form that ends in a usage object which is not the client's; None for any other.

        What is cut is a whole JSON value after `,"usage":` and before the event's last brace (as `_USAGE_ANY` says),
        and the only place that has the name.
        """
        at = event.find(b'"usage"') - 1
        if (
            at < 0
            or event[at : at + 10] != b',"usage":{'
            or event.count(b'"finish_reason":null') != 1
            or not event.startswith(b"data: {")
            or not event.endswith(b"}}\n\n")
            or event.find(b'"error"') >= 0
        ):
            return None
        counts = parsed_json(event[at + 9 : -3])
        if type(counts) is not dict:
            return None
        self._chunks[0] = self._chunks.get(0, 0) + 1
        output = counts.get("completion_tokens")
        if type(output) is int and self._released <= output < MAX_TOKENS and self._held is None and self._total is None:
            self._last[0] = self._released = output
            self._seen = counts
            self._delivered_all = False
        else:  # no count, or one that falls
            self._note(0, counts)
            self._account()
        return event[:at] + b"}\n\n"

    def _event(self, raw: bytes, out: list[bytes]) -> None:
        """One event, in any form. Exact and slower."""
        if raw[:1] in b"\r\n" and raw:
            rest = raw.lstrip(b"\r\n")
            self._let_go(out)
            out.append(raw[: len(raw) - len(rest)])
            if not rest:
                return
            raw = rest
        plain = raw.startswith((b"data: {", b"data: [")) and raw.find(b"\n") == len(raw) - 2
        payload = raw[6:-2] if plain else _json_text(raw)
        chunk = None
        if payload == _DONE:
            self._let_go(out, keep_own_usage=True)
            self.done = True
            self._plain = False
        elif payload is not None:
            chunk = parsed_json(payload)
        if not isinstance(chunk, dict):
            self._let_go(out)
            out.append(raw)
        elif chunk.get("error"):
            self._failed = True
            self._let_go(out)
            out.append(raw)
        else:
            self._chunk(raw, chunk, out)

    def _chunk(self, raw: bytes, chunk: dict[str, Any], out: list[bytes]) -> None:
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if type(choices) is not list:
            choices = []
        was_finished = self._all_finished
        before = 0 if was_finished or b'"finish_reason":null' in raw else self._output()
        for choice in choices:
            if type(choice) is dict:
                self._choice(choice)
        if type(usage) is dict:
            self._note_chunk(choices, usage)
        self._tier = tier_of(chunk) or self._tier
        if not self._cut or (self._keep_chunk and (not choices or type(usage) is not dict)):
            self._let_go(out)
            out.append(raw)
        elif not choices and type(usage) is dict:
            self._let_go(out, extra_of=raw, names=chunk)
        else:
            shown = _without_usage(raw, chunk) if "usage" in chunk else raw
            self._let_go(out)
            if self._all_finished and not was_finished:
                self._held, self._held_before = _Held(raw, shown, frozenset(chunk)), before
            else:
                out.append(shown)

    def _let_go(
        self,
        out: list[bytes],
        *,
        keep_own_usage: bool = False,
        extra_of: bytes | None = None,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """Release the held event: with its own usage where the client asked for usage and no chunk with it came after;
        with the members that the engine moved to the usage chunk `extra_of`, which is not shown."""
        held = self._held
        if held is None:
            return
        self._held = None
        shown = held.raw if keep_own_usage and self._keep_chunk else held.shown
        if extra_of is not None and names is not None and (moved := names.keys() - held.names - {"usage"}):
            at = shown.rfind(b"}")
            shown = shown[:at] + _members_text(extra_of, set(moved)) + shown[at:]
        out.append(shown)

    # -- counts --------------------------------------------------------------------------------------------------------

    def _choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index") if self._choices > 1 else 0
        if type(index) is not int:
            index = 0
        delta = choice.get("delta")
        if not self.first_token:
            self.first_token = bool(choice.get("text")) or (type(delta) is dict and _has_content(delta))
        finish = choice.get("finish_reason")
        if finish is not None:
            self._finished.add(index)
            self._all_finished = len(self._finished) >= self._choices
            self._plain = False
        if self.first_token and not (finish is not None and not delta and not choice.get("text")):
            self._chunks[index] = self._chunks.get(index, 0) + 1

    def _note_chunk(self, choices: list[Any], usage: Mapping[str, Any]) -> None:
        """Usage beside one choice counts that choice; beside none or several, and for one choice, it is the total."""
        if len(choices) == 1 and self._choices > 1:
            index = choices[0].get("index") if type(choices[0]) is dict else 0
            self._note(index if type(index) is int else 0, usage)
        elif choices and self._choices == 1:
            self._note(0, usage)
        elif (output := token_count(usage, "completion_tokens")) is not None:
            if output < sum(self._last.values()):
                self._wrong = True
            self._total = self._seen = usage

    def _note(self, index: int, usage: Mapping[str, Any]) -> None:
        output = usage.get("completion_tokens")
        if type(output) is not int or not 0 <= output < MAX_TOKENS:
            return
        if output < self._last.get(index, 0):  # a cumulative count does not fall
            self._wrong = True
        self._last[index] = output
        self._seen = usage

    def _output(self) -> int:
        if self._total is not None:
            return self._total["completion_tokens"]  # type: ignore[no-any-return] # checked by token_count when it was noted
        last = self._last
        if self._choices == 1:
            return last[0] if last else self._chunks.get(0, 0)
        if not last:
            return sum(self._chunks.values())
        return sum(last.values()) + sum(n for index, n in self._chunks.items() if index not in last)

    def _account(self) -> None:
        self._released = self._output() if self._held is None else self._held_before
        self._delivered_all = False

    # -- what the caller asks ------------------------------------------------------------------------------------------

    def end(self) -> StreamEnd:
        """How the stream ended; call it after `flush`, or once `done`."""
        if self._failed:
            return StreamEnd.ENGINE_ERROR
        return StreamEnd.COMPLETED if self.done or self._all_finished else StreamEnd.TRUNCATED

    @property
    def failed(self) -> bool:
        """An event with an error was seen."""
        return self._failed

    def sent(self, data: bytes, end_bytes: int) -> None:
        """`data`, just returned, was handed to a socket that has not taken everything; it ends at its `end_bytes`."""
        self._unsent.append(_Unsent(data, end_bytes, self._sent_tokens, self._released))
        self._sent_tokens = self._released

    def delivered_up_to(self, taken_bytes: int) -> None:
        """The client's socket has taken this many of its bytes: of the piece in which they end, the events it began."""
        while self._unsent and (first := self._unsent[0]).end_bytes <= taken_bytes:
            self._delivered = max(self._delivered, first.tokens)
            self._unsent.popleft()
        if self._unsent:
            first = self._unsent[0]
            part = first.data[: max(0, len(first.data) - (first.end_bytes - taken_bytes))]
            begun = part.count(b"\n\n") + (part[-2:] not in (b"", b"\n\n"))
            share = begun / max(1, first.data.count(b"\n\n"))
            self._delivered = max(self._delivered, first.before + ceil((first.tokens - first.before) * share))

    def delivered(self, now_s: float) -> bool:
        """The client's socket has taken everything that `feed` and `flush` returned so far.

        Whether a checkpoint is due now: delivery is ahead of the last one by 64 tokens, or by anything for a second.
        """
        if self._unsent:
            self._unsent.clear()
        released = self._sent_tokens = self._released
        if released > self._delivered:  # noqa: PLR1730 - for each piece of a stream, and max() costs twice as much
            self._delivered = released
        self._delivered_all = self._held is None
        ahead = self._delivered - self._marked_tokens
        return ahead >= CHECKPOINT_TOKENS or (ahead > 0 and now_s - self._marked_s >= CHECKPOINT_S)

    def engine_usage(self) -> Usage:
        """What the engine counted: its total, else its last counts per choice; an estimate when it counted nothing."""
        counted = self._total is not None or (bool(self._last) and self._all_finished)
        seen = self._seen if self._seen is not None else {}
        output = self._output() if (self._seen is not None or self._chunks) else None
        return usage_from(seen, output, tier=self._tier, estimated=not counted, wrong=self._wrong)

    def delivered_usage(self) -> Usage:
        """What the client got: the engine's counts if that is all of them, else an estimate.

        An engine tells how much of the input it had cached only at the end, so in an estimate all input is uncached.
        """
        if self._delivered_all and self._total is not None:
            return self.engine_usage()
        prompt = {} if self._seen is None else {"prompt_tokens": self._seen.get("prompt_tokens")}
        return usage_from(prompt, self._delivered, tier=self._tier, estimated=True, wrong=self._wrong)

    def checkpointed(self, now_s: float) -> None:
        """A checkpoint of `delivered_usage` was written."""
        self._marked_tokens = self._delivered
        self._marked_s = now_s


def _has_content(delta: Mapping[str, Any]) -> bool:
    if delta.get("content"):
        return True
    return any(value for name, value in delta.items() if name != "role")


def _json_text(event: bytes) -> bytes | None:
    """The data of an event as JSON text with the offsets of `event`, or `[DONE]`; None when it has no data.

    What is not data (field names, comments, line ends) is blanked, so that the text parses as if its data lines were
    joined with line feeds and a member can be cut out of the event by its offset in the text.
    """
    parts: list[bytes] = []
    data: list[bytes] = []
    for match in _LINE.finditer(event):
        line = match.group()
        text = line.rstrip(b"\r\n")
        at = _data_start(text)
        if at < 0:
            parts.append(b" " * len(line))
            continue
        data.append(text[at:])
        parts.append(b" " * at + text[at:] + b"\n" * (len(line) - len(text)))
    if not data:
        return None
    return _DONE if b"\n".join(data) == _DONE else b"".join(parts)


def _data_start(line: bytes) -> int:
    """Where the value of a `data` line starts, past the one space that may follow the colon; -1 for another line."""
    for mark in (b"data:", b"\xef\xbb\xbfdata:"):  # a byte order mark may open the stream
        if line.startswith(mark):
            return len(mark) + (line[len(mark) : len(mark) + 1] == b" ")
    return -1


def _without_usage(raw: bytes, chunk: Mapping[str, Any]) -> bytes:
    """The event without the top-level member `usage`, everything else byte for byte. `chunk` is its parsed data."""
    shown, cuts = _USAGE_ANY.subn(b"", raw)
    if cuts == 1 and b'"usage"' not in shown:
        return shown
    shown, cuts = _USAGE_INSIDE.subn(b"", raw)
    if cuts == 1 and shown.startswith(b"data: {"):  # proven right by what is left, which costs less than the walk
        left = parsed_json(shown[6:])
        if isinstance(left, dict) and left == {name: value for name, value in chunk.items() if name != "usage"}:
            return shown
    text = (_json_text(raw) or b"").decode("latin-1")
    try:
        members, _ = json_members(text)
    except (ValueError, RecursionError):
        return raw
    for n in range(len(members) - 1, -1, -1):
        name, start, _, end, _ = members[n]
        if name != "usage":
            continue
        if n + 1 < len(members):
            end = members[n + 1][1]
        elif n:
            start = members[n - 1][3]
        raw = raw[:start] + raw[end:]
    return raw


def _members_text(raw: bytes, names: set[str]) -> bytes:
    """The named members of an event's object as text to append to another's, a comma before each."""
    usage = _USAGE_INSIDE.search(raw)
    if usage is not None and raw.endswith(b"}\n\n"):  # mostly they are all that follows the usage: proven by parsing it
        text = raw[usage.end() : -3]
        found = parsed_json(b"{" + text[1:] + b"}")
        if isinstance(found, dict) and found.keys() == names:
            return text
    members, _ = json_members((_json_text(raw) or b"").decode("latin-1"))
    return b"".join(b"," + raw[start:end] for name, start, _, end, _ in members if name in names)
