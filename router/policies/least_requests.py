"""The engine with the fewest requests in flight: what most load balancers call least connections.

Owns: the rule (router notes, section 2.0: in flight as the router counts it, ties drawn by dice). Does not own: what a
simulation asks a policy; the class has that shape and needs nothing else of it.
"""

from __future__ import annotations

from router.policies.asked import Asked, Dice
from router.policies.in_flight import InFlight


class LeastRequests:
    """Counts what it sent and what ended. Mutable: the counts. `dice()` is uniform in [0, 1)."""

    hears = True
    reads_blocks = False

    def __init__(self, engine_count: int, dice: Dice) -> None:
        self._in_flight = InFlight(engine_count)
        self._dice = dice

    def pick(self, ask: Asked, now_s: float) -> int:
        """One of the least loaded."""
        counts = self._in_flight.counts
        least = min(counts)
        tied = [engine for engine, count in enumerate(counts) if count == least]
        picked = tied[int(self._dice() * len(tied))]
        self._in_flight.placed(ask.serial, picked)
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        """Says nothing about the number in flight."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """It is in flight no more."""
        self._in_flight.ended(serial)
