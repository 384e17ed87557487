"""The engine with the fewest requests in flight: what most load balancers call least connections.

Owns: the rule (router notes, section 2.0: in flight as the router counts it, ties drawn by dice). Does not own: what a
simulation asks a policy; the class has that shape and needs nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Asked(Protocol):
    """What the rule reads of a request."""

    @property
    def serial(self) -> int: ...


class LeastRequests:
    """Counts what it sent and what ended. Mutable: the counts. `dice()` is uniform in [0, 1)."""

    hears = True
    reads_blocks = False

    def __init__(self, engine_count: int, dice: Callable[[], float]) -> None:
        self._in_flight = [0] * engine_count
        self._engine_of: dict[int, int] = {}
        self._dice = dice

    def pick(self, ask: Asked, now_s: float) -> int:
        """One of the least loaded."""
        counts = self._in_flight
        least = min(counts)
        tied = [engine for engine, count in enumerate(counts) if count == least]
        picked = tied[int(self._dice() * len(tied))]
        counts[picked] += 1
        self._engine_of[ask.serial] = picked
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        """Says nothing about the number in flight."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """It is in flight no more."""
        self._in_flight[self._engine_of.pop(serial)] -= 1
