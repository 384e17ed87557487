"""Trace files: one JSON object a line, gzip or plain, read and written in chunks, so that long ones need little memory.

Owns: the file's fields (`t`, `session`, `isl`, `osl`, `blocks`, `block_tokens`, `tier` and, beyond the published
schema, an optional `think_s`), their types, and the sentence for a line that breaks a rule. Does not own: what a trace
means (`trace`). Session names become numbers in the order in which they appear; they are not kept, block ids are.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson

from perfmodel.errors import ConfigError
from perfmodel.traces.trace import MOST_TOKENS, Tier, Trace, joined, trace_of

# Lines read or written at once: a chunk of long prompts (130 blocks each) is about 10 MB.
_CHUNK_ROWS = 8192
# First bytes of a gzip file (RFC 1952).
_GZIP_MAGIC = b"\x1f\x8b"
# A fast level: 9 takes three times as long for 4 % less.
_GZIP_LEVEL = 6
# Largest value of the columns of int32.
_INT32_MAX = 2**31 - 1
# Times are written to the microsecond, think times to the millisecond.
_TIME_DIGITS, _THINK_DIGITS = 6, 3

_FIELDS = ("t", "session", "isl", "osl", "blocks", "block_tokens", "tier")
# Keys without which a line says nothing: another format has none or few of them.
_NEEDED = frozenset({"t", "isl", "osl", "tier"})
# What a line must be, in the words of every sentence on one that is not.
_EXPECTED = (
    f"expected a JSON object with {', '.join(name for name in _FIELDS if name in _NEEDED)} (and, where known, "
    f"{', '.join(name for name in _FIELDS if name not in _NEEDED)})"
)
_TIER_CODES = {tier.label: int(tier) for tier in Tier}


def read_trace(path: Path) -> Trace:
    """The whole file.

    Raises ConfigError (file, line, field, value and what was expected), OSError when it cannot be read.
    """
    parts = list(stream_trace(path))
    # Chunks follow one another in time (checked), so that joining keeps the order of the lines.
    return joined(parts)


def stream_trace(path: Path, chunk_rows: int = _CHUNK_ROWS) -> Iterator[Trace]:
    """The file in pieces of `chunk_rows` requests with one numbering of sessions. Raises as `read_trace` does."""
    try:
        with path.open("rb") as file:
            zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            yield from _chunks(gzip.GzipFile(fileobj=file) if zipped else file, chunk_rows)
    except ConfigError as fault:
        raise ConfigError(f"{path}: {fault}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise ConfigError(f"{path}: the gzip data is damaged or cut off ({fault}); expected a whole file") from None


def _chunks(lines: Iterable[bytes], chunk_rows: int) -> Iterator[Trace]:
    rows = _Rows()
    first_line, last_s = 1, 0.0
    for number, line in enumerate(lines, 1):
        rows.add(line, number)
        if len(rows.arrival_s) == chunk_rows:
            yield _checked(rows, first_line, last_s)
            first_line, last_s = number + 1, rows.arrival_s[-1]
            rows.clear()
    if rows.arrival_s:
        yield _checked(rows, first_line, last_s)
    elif first_line == 1:
        raise ConfigError("it has no request; expected at least one line")


def write_trace(parts: Trace | Iterable[Trace], path: Path) -> int:
    """Write the parts as one file, gzip when its name ends in .gz; the number of requests is returned.

    The same trace gives the same bytes. The file appears under its name only when it is complete. Raises OSError.
    """
    pieces = (parts,) if isinstance(parts, Trace) else parts
    # The stem decides the reader's guess of a suffix, so the unfinished file gets another one.
    unfinished = path.with_name(f".{path.name}.unfinished")
    count = 0
    try:
        with unfinished.open("wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as zipped:
                    count = _write(pieces, zipped)
            else:
                count = _write(pieces, file)
        unfinished.replace(path)
    except OSError as fault:
        if fault.filename != str(unfinished):
            raise
        # The caller knows the name that it gave, not the one of the unfinished file.
        raise OSError(fault.errno, fault.strerror, str(path)) from None
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _write(pieces: Iterable[Trace], file: IO[bytes] | gzip.GzipFile) -> int:
    count = 0
    for trace in pieces:
        for start in range(0, len(trace), _CHUNK_ROWS):
            stop = min(len(trace), start + _CHUNK_ROWS)
            file.write(b"".join(_line(trace, row) for row in range(start, stop)))
            count += stop - start
    return count


def _line(trace: Trace, row: int) -> bytes:
    session, think_s = int(trace.session[row]), float(trace.think_s[row])
    known = trace.block_tokens > 0
    # A prompt below one block has an empty list; a longer one without ids has unknown content.
    ids = trace.block_ids(row)
    blank = known and len(ids) == 0 and trace.input_tokens[row] >= trace.block_tokens
    record: dict[str, Any] = {
        "t": round(float(trace.arrival_s[row]), _TIME_DIGITS),
        "session": None if session < 0 else f"s{session}",
        "isl": int(trace.input_tokens[row]),
        "osl": int(trace.output_tokens[row]),
        "blocks": ids if known and not blank else None,
        "block_tokens": trace.block_tokens if known and not blank else None,
        "tier": Tier(int(trace.tier[row])).label,
    }
    if not math.isnan(think_s):
        record["think_s"] = round(think_s, _THINK_DIGITS)
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


@dataclass(slots=True)
class _Rows:
    """The lines of a chunk as lists. Mutable: a reader fills it."""

    arrival_s: list[float] = field(default_factory=list)
    session: list[int] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    tier: list[int] = field(default_factory=list)
    think_s: list[float] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    block_tokens: int = 0
    sessions: dict[str, int] = field(default_factory=dict)
    models: list[object] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the rows; the block size, the sessions' numbers and the model stay."""
        for name in ("arrival_s", "session", "input_tokens", "output_tokens", "tier", "think_s", "blocks"):
            setattr(self, name, [])

    def add(self, line: bytes, number: int) -> None:
        """Take one line. Raises ConfigError for fields of a wrong type; values are checked by the chunk."""
        if line.isspace():
            raise ConfigError(f"line {number}: it is empty; {_EXPECTED}")
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as fault:
            raise ConfigError(f"line {number}: it is no JSON ({fault}); {_EXPECTED}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"line {number}: it is {_short(record)}; {_EXPECTED}")
        if not record.keys() >= _NEEDED:
            raise ConfigError(f"line {number}: {_other_format(record)}")
        if "model" in record:
            self._check_model(record["model"], number)
        self.arrival_s.append(_number(record, "t", number))
        self.session.append(self._session(record, number))
        self.input_tokens.append(_count(record, "isl", number))
        self.output_tokens.append(_count(record, "osl", number))
        tier = record.get("tier")
        code = _TIER_CODES.get(tier) if isinstance(tier, str) else None
        if code is None:
            raise ConfigError(f"line {number}: tier is {_short(tier)}; expected one of {', '.join(_TIER_CODES)}")
        self.tier.append(code)
        think_s = record.get("think_s")
        self.think_s.append(math.nan if think_s is None else _number(record, "think_s", number))
        self.blocks.append(self._ids(record, number))

    def _check_model(self, model: object, number: int) -> None:
        """The schema has no model; a file that names two would be played as if all asks were for one."""
        if not self.models:
            self.models.append(model)
        if model != self.models[0]:
            raise ConfigError(
                f"line {number}: model is {_short(model)}; expected {_short(self.models[0])}, as on the lines above: a "
                "trace is for one model"
            )

    def _session(self, record: dict[str, Any], number: int) -> int:
        name = record.get("session")
        if name is None:
            return -1
        if not isinstance(name, str):
            raise ConfigError(f"line {number}: session is {_short(name)}; expected a string or null")
        return self.sessions.setdefault(name, len(self.sessions))

    def _ids(self, record: dict[str, Any], number: int) -> list[int]:
        ids, width = record.get("blocks"), record.get("block_tokens")
        if ids is None:
            return []
        if type(width) is not int or not 1 <= width <= MOST_TOKENS:
            raise ConfigError(
                f"line {number}: block_tokens is {_short(width)}; expected an integer of at least 1, at most "
                f"{MOST_TOKENS:,}"
            )
        if self.block_tokens not in (0, width):
            raise ConfigError(
                f"line {number}: block_tokens is {width}; expected {self.block_tokens}, as on the lines above"
            )
        self.block_tokens = width
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise ConfigError(f"line {number}: blocks is {_short(ids)}; expected a list of integers or null")
        wanted = self.input_tokens[-1] // width
        if len(ids) != wanted:  # here and not by the columns only, for an empty list there means unknown content
            raise ConfigError(
                f"line {number}: blocks has {len(ids)} ids; expected {wanted}, the full blocks of isl "
                f"{self.input_tokens[-1]} at {width} tokens"
            )
        return ids


def _checked(rows: _Rows, first_line: int, last_s: float) -> Trace:
    names = ("arrival_s", "session", "input_tokens", "output_tokens", "tier", "think_s")
    try:
        trace = trace_of({name: getattr(rows, name) for name in names}, rows.blocks, rows.block_tokens)
    except OverflowError:
        raise ConfigError(f"line {first_line} or later: a block id is beyond 64 bits; expected 0 to 2^63 - 1") from None
    trace.validate(first_line)
    if trace.arrival_s[0] < last_s:
        raise ConfigError(
            f"line {first_line}: t is {trace.arrival_s[0]}, before the {last_s} of the line above; "
            "expected requests sorted by t"
        )
    return trace


def _other_format(record: dict[str, Any]) -> str:
    """What a line lacks, what it has, and what a line of a trace has."""
    missing = ", ".join(name for name in _FIELDS if name in _NEEDED - record.keys())
    found = ", ".join(str(name)[:20] for name in list(record)[:8]) or "nothing"
    return f"{missing} missing; {_EXPECTED}; it has {found}"


def _number(record: dict[str, Any], name: str, number: int) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"line {number}: {name} is {_short(value)}; expected a number of seconds")
    return float(value)


def _count(record: dict[str, Any], name: str, number: int) -> int:
    value = record.get(name)
    if type(value) is not int or not -_INT32_MAX <= value <= _INT32_MAX:
        raise ConfigError(f"line {number}: {name} is {_short(value)}; expected an integer from 1 to {_INT32_MAX}")
    return value


def _short(value: Any) -> str:
    """A JSON value for a sentence: cut where it is long."""
    text = orjson.dumps(value).decode()
    return "missing or null" if value is None else (text if len(text) <= 40 else f"{text[:37]}...")
