"""Each engine in turn, whatever it is doing: the rule to be better than.

Owns: the rule (router notes, section 2.0). Does not own: what a simulation asks a policy; the class has that shape and
needs nothing else of it.
"""

from __future__ import annotations


class RoundRobin:
    """Picks 0, 1, 2 and so on, round and round. Mutable: it counts."""

    hears = False
    reads_blocks = False

    def __init__(self, engine_count: int) -> None:
        self._engine_count = engine_count
        self._next = 0

    def pick(self, ask: object, now_s: float) -> int:
        """The engine after the last one."""
        picked = self._next
        self._next = picked + 1 if picked + 1 < self._engine_count else 0
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        """Not listened to."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """Not listened to."""
