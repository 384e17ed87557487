"""Two engines drawn at random, and of these the one with fewer requests in flight.

Owns: the rule (router notes, section 2.0; Mitzenmacher's two choices, as sgl-model-gateway and Ray Serve have it). Does
not own: what a simulation asks a policy. Not modelled: the gateway's comparison by KV token usage, which it makes only
where both engines report it; counts decide, as for engines that report none.
"""

from __future__ import annotations

from router.policies.asked import Asked, Dice
from router.policies.in_flight import InFlight


class PowerOfTwo:
    """Mutable: it counts what is in flight."""

    hears = True
    reads_blocks = False

    def __init__(self, engine_count: int, dice: Dice) -> None:
        self._in_flight = InFlight(engine_count)
        self._dice = dice

    def pick(self, ask: Asked, now_s: float) -> int:
        """The less loaded of two; the first drawn on a tie."""
        counts = self._in_flight.counts
        picked = int(self._dice() * len(counts))
        if len(counts) > 1:
            other = int(self._dice() * (len(counts) - 1))
            other += other >= picked
            if counts[other] < counts[picked]:
                picked = other
        self._in_flight.placed(ask.serial, picked)
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        """Says nothing about the number in flight."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """It is in flight no more."""
        self._in_flight.ended(serial)
