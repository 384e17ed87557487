"""Requests in flight by engine, as a router counts them: from the pick to the end of the answer.

Owns: the counts. Does not own: who picks (the rules). Counting at the pick and not when headers return is what keeps
requests that arrive together apart (router notes, R4).
"""

from __future__ import annotations


class InFlight:
    """Counts per engine. Mutable: the counts and which engine has which request."""

    __slots__ = ("_engine_of", "counts", "total")

    def __init__(self, engine_count: int) -> None:
        self.counts = [0] * engine_count
        """Requests in flight, by engine."""
        self.total = 0
        self._engine_of: dict[int, int] = {}

    def placed(self, serial: int, engine: int) -> None:
        """It was sent there."""
        self.counts[engine] += 1
        self.total += 1
        self._engine_of[serial] = engine

    def ended(self, serial: int) -> int:
        """Its answer is complete, or the engine refused it. The engine that had it."""
        engine = self._engine_of.pop(serial)
        self.counts[engine] -= 1
        self.total -= 1
        return engine
