"""More load of the same kind: copies of a trace under other names, at other times, window by window.

Owns: how many copies there are, when each starts, and that no two share a session or a block that they should not.
Does not own: the columns (`trace`). Why copies: scaling the times of a trace changes its bursts and think times, and
thinning makes any traffic Poisson; copies keep each user's behaviour and bring more users.
A copy is made when its window comes, so that days of traffic need the memory of one window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError
from perfmodel.traces.trace import Trace, joined

# Copies start at random within this time, so that the bursts of one trace do not come n times at once; short against
# the hours that day and night curves are made of. Shorter traces spread over a tenth of their span.
_SPREAD_S = 60.0
_SPREAD_SPAN_SHARE = 0.1
# The column of sessions has 32 bits, that of blocks 64.
_SESSION_MOST, _BLOCK_MOST = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class Copies:
    """`count` copies of a trace at once, played `repeat_count` times one after the other.

    Copy 0 of the first round is the trace itself. Every other one is shifted by a start drawn from [0, spread_s) with
    `seed` (None: a minute, or a tenth of a shorter trace's span), and its sessions and blocks are its own but for the
    first `shared_blocks` blocks of each prompt. A round begins when the one before it is over. Raises ConfigError for a
    count below 1 and for a negative spread.
    """

    trace: Trace
    count: int
    seed: int
    spread_s: float | None = None
    shared_blocks: int = 0
    repeat_count: int = 1

    def __post_init__(self) -> None:
        for name in ("count", "repeat_count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"copies: {name} is {getattr(self, name)}; expected at least 1")
        if self.count * self.repeat_count * self.trace.session_end_id > _SESSION_MOST:
            raise ConfigError(f"copies: count is {self.count}; expected session numbers of 32 bits in all copies")
        if self.count * self.repeat_count * self.trace.block_end_id > _BLOCK_MOST:
            raise ConfigError(
                f"copies: count is {self.count}; expected block ids below 2^63 in all copies "
                f"(the trace's end at {self.trace.block_end_id})"
            )
        if self.spread_s is not None and not 0 <= self.spread_s < float("inf"):
            raise ConfigError(f"copies: spread_s is {self.spread_s}; expected 0 or more seconds")

    @property
    def request_count(self) -> int:
        """Requests of all copies and rounds."""
        return len(self.trace) * self.count * self.repeat_count

    @property
    def round_s(self) -> float:
        """Seconds from one round's start to the next one's: the span, and one mean gap so that the rate goes on."""
        gaps = max(1, len(self.trace) - 1)
        return self.trace.span_s * (1 + 1 / gaps)

    def starts_s(self) -> npt.NDArray[np.float64]:
        """When each copy starts, one row a round: float64[repeat_count, count]."""
        spread_s = self.spread_s
        if spread_s is None:
            spread_s = min(_SPREAD_S, _SPREAD_SPAN_SHARE * self.trace.span_s)
        drawn = np.random.default_rng(self.seed).random((self.repeat_count, self.count)) * spread_s
        drawn[0, 0] = 0.0
        return drawn + self.round_s * np.arange(self.repeat_count)[:, None]

    def windows(self, width_s: float) -> Iterator[Trace]:
        """All requests in windows of `width_s` seconds, in order, empty windows left out; times stay absolute.

        Think times stay as they are in the trace: a turn's predecessor may be in an earlier window.
        """
        if not width_s > 0:
            raise ConfigError(f"copies: width_s is {width_s}; expected more than 0 seconds")
        if not len(self.trace):
            return
        starts_s = self.starts_s().ravel()
        ends_s = starts_s + self.trace.arrival_s[-1]
        begin_s = float(starts_s.min() + self.trace.arrival_s[0])
        while True:
            alive = np.flatnonzero(ends_s >= begin_s)
            if not len(alive):
                return
            end_s = begin_s + width_s
            parts = [self._part(int(copy), float(starts_s[copy]), begin_s, end_s) for copy in alive]
            found = [part for part in parts if len(part)]
            if found:
                yield joined(found)
                begin_s = end_s
            else:  # nobody comes for a while: go on where the next one does
                nexts = [self._next_s(float(starts_s[copy]), end_s) for copy in alive]
                begin_s = max(end_s, min(nexts))
                if begin_s == float("inf"):
                    return

    def whole(self) -> Trace:
        """All requests as one trace."""
        if not len(self.trace):
            return self.trace
        parts = [self._part(copy, float(start), 0.0, np.inf) for copy, start in enumerate(self.starts_s().ravel())]
        return joined(parts)

    def _next_s(self, start_s: float, after_s: float) -> float:
        row = int(np.searchsorted(self.trace.arrival_s + start_s, after_s, side="left"))
        return float(self.trace.arrival_s[row] + start_s) if row < len(self.trace) else float("inf")

    def _part(self, copy: int, start_s: float, begin_s: float, end_s: float) -> Trace:
        # Compared as they will be played: the rounding of a shifted time must not put a request in two windows.
        first, last = np.searchsorted(self.trace.arrival_s + start_s, (begin_s, end_s), side="left")
        rows = self.trace.rows(np.arange(first, last))
        return rows.shifted(
            by_s=start_s,
            session_id=copy * self.trace.session_end_id,
            block_id=copy * self.trace.block_end_id,
            shared_blocks=self.shared_blocks,
        )


def copies(trace: Trace, count: int, seed: int) -> Trace:
    """`count` relabelled copies of a trace as one trace: `Copies(trace, count, seed).whole()`."""
    return Copies(trace, count, seed).whole()
