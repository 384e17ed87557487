"""A workload as columns: when each request came, how long it is, which prefix blocks it shares and with whom.

Owns: the columns of a trace and their rules, cutting a window out of one, joining several, and what is needed to play
one in closed loop. Does not own: files (`adapters.traces`), copies that raise the load (`copies`), statistics
(`statistics`) or made-up workloads (`generators`).
A column is a numpy array that nobody writes to after construction. A block id names a whole prefix: equal ids mean
equal content up to there, so that a cache hit is the leading run of known ids. Ids mean something in one trace only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError

FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int32]

# Twice the longest context on sale. A simulation makes room for the longest request: one mistyped must not ask for all.
MOST_TOKENS = 4_000_000
# Thirty years; beyond it sums of times lose their microseconds.
MOST_S = 1e9

# Engine time that a recorded gap between two turns contains, where nothing better is known: the medians of TraceLab's
# steps (arXiv 2606.30560): time to the first token, and the rate of output tokens after it.
_RECORDED_TTFT_S = 2.2
_RECORDED_TOK_PER_S = 61.0


class Tier(IntEnum):
    """The kind of traffic that a request belongs to; the value is the code in the column `tier`."""

    CHAT = 0
    AGENT = 1
    CODE = 2
    BATCH = 3
    API = 4
    REALTIME = 5

    @property
    def label(self) -> str:
        """The word in a trace file."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """n requests in the order of their arrival; every column but `block_offsets` and `blocks` has n rows.

    `arrival_s` float64, seconds from the start of the trace, never falling. `session` int32: requests of one session
    have one number, -1 has none; a session's turns follow one another. `input_tokens` int32 >= 1, `output_tokens` int32
    >= 1. Row i holds the prefix blocks `blocks[block_offsets[i]:block_offsets[i + 1]]` (int64 ids >= 0, offsets
    int64[n + 1]): its FULL blocks only, so `input_tokens // block_tokens` of them, or none where content is unknown.
    `block_tokens` is 0 in a trace without any block. `tier` int8 holds `Tier` codes. `think_s` float32: seconds from
    the end of the session's turn before to the start of this one, NaN where that is unknown or there is none.
    Raises ConfigError when columns differ in length.
    """

    arrival_s: FloatColumn
    session: IntColumn
    input_tokens: IntColumn
    output_tokens: IntColumn
    block_offsets: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    block_tokens: int
    tier: npt.NDArray[np.int8]
    think_s: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        for name in ("session", "input_tokens", "output_tokens", "tier", "think_s"):
            if len(getattr(self, name)) != count:
                raise ConfigError(f"{name} has {len(getattr(self, name))} rows; expected {count}, as arrival_s")
        if len(self.block_offsets) != count + 1 or self.block_offsets[0] or self.block_offsets[-1] != len(self.blocks):
            raise ConfigError(f"block_offsets must have {count + 1} rows, from 0 to the {len(self.blocks)} blocks")

    def __len__(self) -> int:
        """Requests in the trace."""
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for fewer than two requests."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def session_end_id(self) -> int:
        """One more than the largest session number; 0 where no request has a session."""
        return int(self.session.max()) + 1 if len(self) else 0

    @property
    def block_end_id(self) -> int:
        """One more than the largest block id; 0 without blocks."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def block_ids(self, row: int) -> npt.NDArray[np.int64]:
        """The prefix blocks of one request, first block first."""
        return self.blocks[self.block_offsets[row] : self.block_offsets[row + 1]]

    def validate(self, first_line: int = 1) -> None:
        """Raise ConfigError for the first row that breaks a rule; the sentence names it by its line in the file."""
        _check_times(self.arrival_s, first_line)
        for name, column in (("isl", self.input_tokens), ("osl", self.output_tokens)):
            good = (column >= 1) & (column <= MOST_TOKENS)
            _check_all(good, column, first_line, f"{name} is {{}}; expected 1 to {MOST_TOKENS:,}")
        _check_all(self.session >= -1, self.session, first_line, "session is {}; expected -1 (none) or more")
        known = (self.tier >= 0) & (self.tier < len(Tier))
        _check_all(known, self.tier, first_line, f"tier is {{}}; expected 0 to {len(Tier) - 1}")
        thought = ~(self.think_s < 0) & ~(self.think_s > MOST_S)
        _check_all(thought, self.think_s, first_line, "think_s is {}; expected 0 or more seconds, at most a billion")
        self._check_blocks(first_line)

    def _check_blocks(self, first_line: int) -> None:
        counts = np.diff(self.block_offsets)
        if self.block_tokens < (1 if len(self.blocks) else 0):
            raise ConfigError(f"block_tokens is {self.block_tokens}; expected at least 1 in a trace with blocks")
        _check_all(counts >= 0, counts, first_line, "blocks has {} ids; expected 0 or more")
        if self.block_tokens == 0:
            return
        wanted = self.input_tokens // self.block_tokens
        wrong = np.flatnonzero((counts != 0) & (counts != wanted))
        if len(wrong):
            row = int(wrong[0])
            raise ConfigError(
                f"line {row + first_line}: blocks has {counts[row]} ids; expected {wanted[row]}, the full blocks of "
                f"isl {self.input_tokens[row]} at {self.block_tokens} tokens"
            )
        if len(self.blocks) and self.blocks.min() < 0:
            position = int(np.argmax(self.blocks < 0))
            row = int(np.searchsorted(self.block_offsets, position, side="right")) - 1
            raise ConfigError(f"line {row + first_line}: a block id is {self.blocks[position]}; expected 0 or more")

    def rows(self, chosen: npt.NDArray[np.int64]) -> Trace:
        """The requests at the positions `chosen`, in that order, with the columns as they are."""
        counts = np.diff(self.block_offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        # Position of each kept block in the old column: its row's old start plus its place within the row.
        starts = np.repeat(self.block_offsets[:-1][chosen] - offsets[:-1], counts)
        return Trace(
            arrival_s=self.arrival_s[chosen],
            session=self.session[chosen],
            input_tokens=self.input_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            block_offsets=offsets,
            blocks=self.blocks[starts + np.arange(offsets[-1])],
            block_tokens=self.block_tokens,
            tier=self.tier[chosen],
            think_s=self.think_s[chosen],
        )

    def window(self, start_s: float, end_s: float) -> Trace:
        """Requests that arrive in [start_s, end_s), with `start_s` as the new 0.

        A turn whose predecessor was cut off loses its think time: nothing in the window ends before it.
        """
        first, last = np.searchsorted(self.arrival_s, (start_s, end_s), side="left")
        cut = self.rows(np.arange(first, max(first, last)))
        think_s = np.where(predecessors(cut.session) < 0, np.float32(np.nan), cut.think_s)
        return replace(cut, arrival_s=cut.arrival_s - start_s, think_s=think_s)

    def shifted(self, *, by_s: float = 0.0, session_id: int = 0, block_id: int = 0, shared_blocks: int = 0) -> Trace:
        """The same requests `by_s` later under other names: sessions and block ids are raised by the two numbers.

        The ids of the first `shared_blocks` blocks of every prompt stay, for a prefix that all users have.
        """
        blocks = self.blocks
        if block_id:
            place = np.arange(len(blocks)) - np.repeat(self.block_offsets[:-1], np.diff(self.block_offsets))
            blocks = blocks + np.where(place < shared_blocks, 0, block_id)
        session = np.where(self.session < 0, self.session, self.session + np.int32(session_id)).astype(np.int32)
        return replace(self, arrival_s=self.arrival_s + by_s, session=session, blocks=blocks)

    def with_small_block_ids(self) -> Trace:
        """The same content under ids from 0 without gaps, so that copies have room for theirs below 2^63."""
        _, blocks = np.unique(self.blocks, return_inverse=True)
        return replace(self, blocks=blocks.astype(np.int64))

    def with_think_times(
        self, ttft_s: float = _RECORDED_TTFT_S, tok_per_s: float = _RECORDED_TOK_PER_S, *, keep: bool = True
    ) -> Trace:
        """The trace for closed-loop replay: each later turn's `think_s` is its recorded gap less the engine's time.

        The engine's time of the turn before is taken as `ttft_s` + output / `tok_per_s`, and a gap that is shorter
        counts as no thinking. `keep` leaves think times that the trace has. First turns stay NaN.
        """
        before = predecessors(self.session)
        later = before >= 0
        gap_s = self.arrival_s - self.arrival_s[before]
        think_s = np.maximum(0.0, gap_s - ttft_s - self.output_tokens[before] / tok_per_s)
        found = np.where(later, think_s, np.nan).astype(np.float32)
        if keep:
            found = np.where(np.isnan(self.think_s), found, self.think_s)
        return replace(self, think_s=found)


def predecessors(session: IntColumn) -> npt.NDArray[np.int64]:
    """For each row the row of the same session's turn before it, -1 for a first turn and for no session."""
    order = np.argsort(session, kind="stable")
    ordered = session[order]
    before = np.full(len(session), -1, dtype=np.int64)
    if len(session) > 1:
        same = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
        before[order[1:][same]] = order[:-1][same]
    return before


def trace_of(columns: dict[str, Sequence[Any]], blocks: Sequence[Sequence[int]], block_tokens: int) -> Trace:
    """A trace from plain lists.

    `columns` has `arrival_s`, `session`, `input_tokens`, `output_tokens`, `tier` and, if known, `think_s`; `blocks` has
    one list of ids a request. Raises ConfigError when lengths differ.
    """
    count = len(columns["arrival_s"])
    counts = np.fromiter(map(len, blocks), dtype=np.int64, count=len(blocks))
    offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
    with np.errstate(over="ignore"):  # beyond 32 bits it is infinite, which `validate` refuses
        think_s = np.asarray(columns.get("think_s", np.full(count, np.nan)), dtype=np.float32)
    flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in blocks]) if offsets[-1] else np.zeros(0, np.int64)
    return Trace(
        arrival_s=np.asarray(columns["arrival_s"], dtype=np.float64),
        session=np.asarray(columns["session"], dtype=np.int32),
        input_tokens=np.asarray(columns["input_tokens"], dtype=np.int32),
        output_tokens=np.asarray(columns["output_tokens"], dtype=np.int32),
        block_offsets=offsets,
        blocks=flat,
        block_tokens=block_tokens,
        tier=np.asarray(columns["tier"], dtype=np.int8),
        think_s=think_s,
    )


def joined(parts: Sequence[Trace]) -> Trace:
    """The parts as one trace, their requests sorted by arrival; at equal times the order of the parts stays.

    Names are not touched: parts that must not share content or sessions are `shifted` first. Raises ConfigError when
    two parts with blocks cut prompts differently, or when there is no part.
    """
    widths = sorted({part.block_tokens for part in parts if part.block_tokens})
    if not parts or len(widths) > 1:
        raise ConfigError(f"traces to join have blocks of {widths} tokens; expected at least one trace and one size")
    sizes = np.concatenate([np.diff(part.block_offsets) for part in parts])
    whole = Trace(
        arrival_s=np.concatenate([part.arrival_s for part in parts]),
        session=np.concatenate([part.session for part in parts]),
        input_tokens=np.concatenate([part.input_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        block_offsets=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
        blocks=np.concatenate([part.blocks for part in parts]),
        block_tokens=widths[0] if widths else 0,
        tier=np.concatenate([part.tier for part in parts]),
        think_s=np.concatenate([part.think_s for part in parts]),
    )
    order = np.argsort(whole.arrival_s, kind="stable")
    return whole if bool((order[1:] > order[:-1]).all()) else whole.rows(order)


def _check_times(arrival_s: FloatColumn, first_line: int) -> None:
    good = (arrival_s >= 0) & (arrival_s <= MOST_S)
    _check_all(good, arrival_s, first_line, "t is {}; expected 0 or more seconds, at most a billion")
    falling = np.flatnonzero(np.diff(arrival_s) < 0)
    if len(falling):
        row = int(falling[0]) + 1
        raise ConfigError(
            f"line {row + first_line}: t is {arrival_s[row]}, before the {arrival_s[row - 1]} of the line above; "
            "expected requests sorted by t"
        )


def _check_all(good: npt.NDArray[np.bool_], column: npt.NDArray[Any], first_line: int, sentence: str) -> None:
    if not bool(good.all()):
        row = int(np.argmin(good))
        _refuse(row + first_line, sentence.format(column[row]))


def _refuse(line: int, sentence: str) -> NoReturn:
    raise ConfigError(f"line {line}: {sentence}")
