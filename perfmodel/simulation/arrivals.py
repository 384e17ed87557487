"""When requests arrive in a simulation: by the trace alone, or after the answer that a session's last turn got.

Owns: the two ways to play a trace, their cursors, and the forms of a window that Python and compiled code read. Does
not own: traces (`trace`), their copies (`traces.copies`), or what happens to a request once it is here (`cluster`).
An open loop holds one window at a time, so hours of traffic need the memory of half a minute; a closed loop needs the
whole trace, because a turn may come at any time after its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError
from perfmodel.simulation.cluster import Window
from perfmodel.simulation.compiling import address_book
from perfmodel.traces.trace import Trace, predecessors


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come when the trace says, whatever became of earlier ones. `windows` follow one another in time."""

    windows: Iterable[Trace]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A session's next turn comes `think_s` after its last one ended; first turns come when the trace says.

    A turn whose `think_s` is NaN counts as a first one. After a refused turn the session's later ones never come.
    """

    trace: Trace


class Part:
    """A window of requests in the forms that Python and compiled code need. Made once a window."""

    __slots__ = ("_blocks", "_offsets", "book", "columns", "prompt", "serial", "session", "trace")

    def __init__(self, trace: Trace, serial: int, watched: npt.NDArray[np.int8] | None = None) -> None:
        self.trace = trace
        self.serial = serial
        self.session: list[int] = trace.session.tolist()
        self.prompt: list[int] = trace.input_tokens.tolist()
        self._offsets: list[int] = []
        self._blocks: list[int] = []
        self.columns = Window(
            prompt=trace.input_tokens.astype(np.int64),
            output=trace.output_tokens.astype(np.int64),
            block_offsets=np.ascontiguousarray(trace.block_offsets, dtype=np.int64),
            blocks=trace.blocks.astype(np.int64) + 1,  # 0 is a nameless block
            watched=np.zeros(len(trace), dtype=np.int8) if watched is None else watched,
            serial_first=np.array([serial], dtype=np.int64),
        )
        self.book = address_book(self.columns)

    def blocks_of(self, row: int) -> list[int]:
        """The ids of a prompt's prefix blocks, 1 or more."""
        if not self._offsets:
            self._offsets = self.columns.block_offsets.tolist()
            self._blocks = self.columns.blocks.tolist()
        return self._blocks[self._offsets[row] : self._offsets[row + 1]]


class OpenArrivals:
    """Arrivals of an open loop, window by window. Mutable: a cursor."""

    def __init__(self, workload: OpenLoop) -> None:
        self._windows: Iterator[Trace] = (window for window in workload.windows if len(window))
        self._waiting: Trace | None = None
        self.part = Part(_empty(), 0)
        self.row = 0
        self._arrivals: list[float] = []
        self._at = 0
        self._last_s = 0.0
        self._fresh = True
        self._load()
        self.block_tokens = self.part.trace.block_tokens

    def _load(self) -> None:
        serial = self.part.serial + len(self.part.trace)
        window = next(self._windows, None)
        self._at = 0
        if window is None:
            self._arrivals = []
            return
        arrivals = window.arrival_s
        if len(arrivals) and (float(arrivals[0]) < self._last_s or bool((np.diff(arrivals) < 0).any())):
            raise ConfigError("a request arrives before the one ahead of it; expected a trace sorted by arrival")
        if self._arrivals and window.block_tokens not in (0, self.block_tokens):
            raise ConfigError(
                f"blocks change from {self.block_tokens} to {window.block_tokens} tokens within the trace"
            )
        self.part = Part(window, serial)
        self._arrivals = arrivals.tolist()
        self._last_s = self._arrivals[-1]
        self._fresh = True

    def next_s(self) -> float:
        """When the next request arrives; infinity when none does."""
        if self._at == len(self._arrivals):
            if not self._arrivals:
                return inf
            self._load()
            if not self._arrivals:
                return inf
        return self._arrivals[self._at]

    def take(self) -> Part | None:
        """Let it arrive: `part` and `row` are it. The part when it is new."""
        self.row = self._at
        self._at += 1
        fresh, self._fresh = self._fresh, False
        return self.part if fresh else None

    def ended(self, row: int, now_s: float) -> None:
        """Nothing follows in an open loop."""


class ClosedArrivals:
    """Arrivals of a closed loop: first turns by the trace, later ones after the one before. Mutable: a cursor."""

    def __init__(self, trace: Trace) -> None:
        before = predecessors(trace.session)
        follows = (before >= 0) & ~np.isnan(trace.think_s)
        self._next = np.full(len(trace), -1, dtype=np.int64)
        self._next[before[follows]] = np.flatnonzero(follows)
        self._think_s = trace.think_s
        self._due: list[tuple[float, int]] = [
            (float(trace.arrival_s[row]), int(row)) for row in np.flatnonzero(~follows)
        ]  # sorted already: arrivals never fall
        trace.validate()
        self.part = Part(trace, 0, (self._next >= 0).astype(np.int8))
        self.row = -1
        self._fresh = True
        self.block_tokens = trace.block_tokens

    def next_s(self) -> float:
        """When the next request arrives, as far as is known; infinity when none is due."""
        return self._due[0][0] if self._due else inf

    def take(self) -> Part | None:
        """Let it arrive."""
        _, self.row = heappop(self._due)
        fresh, self._fresh = self._fresh, False
        return self.part if fresh else None

    def ended(self, row: int, now_s: float) -> None:
        """The session's next turn comes when its think time has passed."""
        after = int(self._next[row])
        if after >= 0:
            heappush(self._due, (now_s + float(self._think_s[after]), after))


def _empty() -> Trace:
    return Trace(
        arrival_s=np.zeros(0), session=np.zeros(0, np.int32), input_tokens=np.zeros(0, np.int32),
        output_tokens=np.zeros(0, np.int32), block_offsets=np.zeros(1, np.int64), blocks=np.zeros(0, np.int64),
        block_tokens=0, tier=np.zeros(0, np.int8), think_s=np.zeros(0, np.float32),
    )  # fmt: skip


def arrivals_of(workload: OpenLoop | ClosedLoop) -> OpenArrivals | ClosedArrivals:
    """The cursor of a workload. Raises ConfigError for a trace whose times fall."""
    if isinstance(workload, ClosedLoop):
        return ClosedArrivals(workload.trace)
    return OpenArrivals(workload)
