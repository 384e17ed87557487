"""Where the members of a JSON object stand in its text, so that one can be cut out or replaced in place.

Owns: one strict walk over an object's top level. Does not own: what the members mean. Used on both sides of the relay
(the request's owned fields, the answer's usage), because bodies are edited in place and never re-serialised: a changed
key order changes the prompt. The standard library's C scanner does the work and gives offsets, which orjson does not.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined] # typeshed leaves it out; there since Python 2.6
from typing import Any, Final

_SPACE: Final = " \t\n\r"
_BLANKS: Final = re.compile(r"[ \t\n\r]*")


def reject_constant(constant: str) -> Any:
    """For `parse_constant`: NaN and the infinities are no JSON, though Python's parser takes them."""
    raise ValueError(f"{constant} is not JSON.")


# The C scanner: (text, offset) -> (value, end). typeshed leaves it out; `JSONDecoder.raw_decode` wraps it.
_SCAN: Final = json.JSONDecoder(parse_constant=reject_constant).scan_once  # type: ignore[attr-defined] # the C scanner


Member = tuple[str, int, int, int, Any]
"""One `"name": value`: (name, offset of the name's quote, start of the value, end of the value, the parsed value).

A plain tuple, because making a class instance of each would double the cost of the walk."""


def json_members(text: str, at: int = 0) -> tuple[list[Member], int]:
    """The members of the JSON object at text[at], in order, duplicates included, and the offset of its closing brace.

    Strict RFC 8259 (no NaN, no control characters in strings). Raises ValueError with the offset in the message, and
    RecursionError for a value nested deeper than the interpreter's limit. Text decoded as Latin-1 gives byte offsets.
    """
    members: list[Member] = []
    i = _skip(text, at)
    if text[i : i + 1] != "{":
        raise ValueError(f"expected an object at byte {i}")
    i = _skip(text, i + 1)
    if text[i : i + 1] == "}":
        return members, i
    try:
        while True:  # a single space is looked for before `_skip` is called: this runs for every request
            if text[i] != '"':
                raise ValueError(f"expected a member name in double quotes at byte {i}")
            name, j = scanstring(text, i + 1, True)
            if text[j] != ":":
                j = _skip(text, j)
                if text[j] != ":":
                    raise ValueError(f"expected ':' at byte {j}")
            j += 2 if text[j + 1] == " " else 1
            if text[j] in _SPACE:
                j = _skip(text, j)
            value, end = _SCAN(text, j)
            members.append((name, i, j, end, value))
            mark = text[end]
            if mark in _SPACE:
                end = _skip(text, end)
                mark = text[end]
            if mark == "}":
                return members, end
            if mark != ",":
                raise ValueError(f"expected ',' or '}}' at byte {end}")
            i = end + (2 if text[end + 1] == " " else 1)
            if text[i] in _SPACE:
                i = _skip(text, i)
    except StopIteration as stop:
        raise ValueError(f"expected a value at byte {stop.value}") from None
    except IndexError:
        raise ValueError(f"the text ends inside the object, at byte {len(text)}") from None


def _skip(text: str, i: int) -> int:
    found = _BLANKS.match(text, i)
    return i if found is None else found.end()
