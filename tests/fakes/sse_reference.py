"""What a client must see of an engine's stream, worked out the slow way on the whole stream.

Owns: a second, independent reading of the rules of `billing.metering.Meter` (split by regex, parse with the standard
library, cut members by a character-by-character walk) that property tests compare the meter with. Does not own: counts.
"""

from __future__ import annotations

import json
import re
from typing import Any

_EVENT = re.compile(rb"(.*?(?>\r\n|\n|\r)(?>\r\n|\n|\r))", re.DOTALL)


def events(stream: bytes) -> list[bytes]:
    """The stream's whole events, with their blank lines; what is left over is no event."""
    return [match for match in _EVENT.findall(stream) if match]


def until_done(stream: bytes) -> list[bytes]:
    """The stream's whole events up to the first `[DONE]`: what comes after it is not relayed."""
    found = events(stream)
    ends = [n for n, event in enumerate(found, 1) if data_of(event) == "[DONE]"]
    return found[: ends[0]] if ends else found


def data_of(event: bytes) -> str | None:
    """The joined data lines of an event."""
    lines = re.split(r"\r\n|\n|\r", event.decode("utf-8", "surrogateescape"))
    values = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
    return "\n".join(values) if values else None


def top_level_spans(text: str) -> list[tuple[str, int, int]]:
    """(name, start, end) of each member of the object in `text`, by counting brackets outside strings."""
    spans: list[tuple[str, int, int]] = []
    depth, in_string, escaped, start = 0, False, False, -1
    for i, c in enumerate(text):
        if in_string:
            in_string = escaped or c != '"'
            escaped = c == "\\" and not escaped
            continue
        if c == '"':
            in_string = True
            if depth == 1 and start < 0:
                start = i
        elif c in "{[":
            depth += 1
        elif c in "}]" or c == ",":
            if depth == 1 and start >= 0:
                end = i
                while text[end - 1] in " \t\r\n":
                    end -= 1
                spans.append((json.loads(text[start : text.index('"', start + 1) + 1]), start, end))
                start = -1
            depth -= c != ","
    return spans


def without(text: str, name: str) -> str:
    """The object without the member."""
    spans = top_level_spans(text)
    for n, (member, start, end) in enumerate(spans):
        if member == name:
            if n + 1 < len(spans):
                return text[:start] + text[spans[n + 1][1] :]
            return text[: spans[n - 1][2] if n else start] + text[end:]
    return text


def relayed(stream: bytes, choices: int, keep_usage: bool, keep_each: bool) -> bytes:
    """The client's bytes. Only for streams whose events are one `data: ` line each, or comments."""
    if keep_usage and keep_each:
        return b"".join(until_done(stream))
    shown: list[bytes] = []
    finished: set[int] = set()
    last: tuple[int, bytes, dict[str, Any]] | None = None  # where the finishing event went, as it came, its object
    for event in until_done(stream):
        body = data_of(event)
        if body is None or body == "[DONE]":
            if body is not None and last is not None and keep_usage and last[0] == len(shown) - 1:
                shown[last[0]] = last[1]
            shown.append(event)
            continue
        value = json.loads(body)
        usage, has_choices = value.get("usage"), bool(value.get("choices"))
        if value.get("error") or ("usage" not in value and not has_choices):
            shown.append(event)
            continue
        if not has_choices and isinstance(usage, dict):
            if keep_usage:
                shown.append(event)
            elif last is not None and last[0] == len(shown) - 1:
                shown[-1] = _moved(shown[-1], body, value, last[2])
            continue
        was = len(finished) >= choices
        for one in value.get("choices", []):
            if one.get("finish_reason") is not None:
                finished.add(one.get("index", 0) if choices > 1 else 0)
        cut = "usage" in value and (not keep_usage or (isinstance(usage, dict) and has_choices))
        new = _with_data(event, without(body, "usage")) if cut else event
        shown.append(new)
        if len(finished) >= choices and not was and has_choices and (cut or not keep_usage):
            last = (len(shown) - 1, event, value)
    if last is not None and keep_usage and last[0] == len(shown) - 1:  # an end without `[DONE]` is an end as well
        shown[-1] = last[1]
    return b"".join(shown)


def _with_data(event: bytes, text: str) -> bytes:
    end = re.search(rb"[\r\n]+\Z", event)
    assert end is not None
    return b"data: " + text.encode("utf-8", "surrogateescape") + end.group()


def _moved(shown: bytes, body: str, value: dict[str, Any], held: dict[str, Any]) -> bytes:
    """The finishing event with what the engine had moved to the usage chunk."""
    extra = "".join(
        "," + body[start:end]
        for name, start, end in top_level_spans(body)
        if name in value and name not in held and name != "usage"
    )
    text = data_of(shown)
    assert text is not None
    return _with_data(shown, text[:-1] + extra + "}")
