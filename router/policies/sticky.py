"""A session stays where a hash puts it: strictly, or unless its engine has more than twice the mean load.

Owns: both rules. `Sticky` is consistent hashing over a session key as gateways have it (router notes, section 2.0):
rendezvous hashing here, whose shares are even; without a session the key is the prompt's first block, without blocks
the request itself. `StickyTwice` follows one sentence of a published study of production agent traces
(gahow/agentic-kvc, router notes, section 4: sticky with "override if pinned load > 2x mean" was its best). Its source
could not be read, so three things are our reading: load is the number of requests in flight as the router counts
them, before this one, and `load` of its settings can say prompt tokens in flight instead; an overridden request goes
to the least loaded engine; the pin stays where it was. Does not own: any knowledge of caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from router.errors import PolicyError
from router.policies.asked import Asked, Dice, lowest

# What `StickyTwice` may count.
LOADS = ("requests", "tokens")


def hashed_engine(ask: Asked, engine_count: int) -> int:
    """The engine with the highest hash of (key, engine): rendezvous hashing. The key is the session, or what stands
    for it."""
    if ask.session >= 0:
        key = f"session {ask.session}"
    elif ask.blocks:
        key = f"block {ask.blocks[0]}"
    else:
        key = f"request {ask.serial}"
    digests = [blake2b(f"{key} {engine}".encode(), digest_size=8).digest() for engine in range(engine_count)]
    return digests.index(max(digests))


class Sticky:
    """Never leaves the engine of the hash."""

    hears = False
    reads_blocks = True

    def __init__(self, engine_count: int) -> None:
        self._engine_count = engine_count

    def pick(self, ask: Asked, now_s: float) -> int:
        """Whatever that engine is doing."""
        return hashed_engine(ask, self._engine_count)

    def first_token(self, serial: int, now_s: float) -> None:
        """Not listened to."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """Not listened to."""


@dataclass(frozen=True, slots=True)
class StickyTwiceSettings:
    """`most_ratio` of the mean load is what the pinned engine may have. Raises PolicyError for a load it cannot count.

    `moves`: an overridden session stays where it went.
    """

    # "override if pinned load > 2x mean" (router notes, section 4)
    most_ratio: float = 2.0
    # not published; what every gateway counts
    load: str = "requests"
    # not published; "override" reads as of one request
    moves: bool = False

    def __post_init__(self) -> None:
        if self.load not in LOADS:
            raise PolicyError(f"load is {self.load!r}; expected one of {', '.join(LOADS)}")
        if not self.most_ratio > 0:
            raise PolicyError(f"most_ratio is {self.most_ratio}; expected above 0")


class StickyTwice:
    """Leaves the hash's engine for the least loaded one while its load is too far above the mean. Mutable: loads."""

    hears = True
    reads_blocks = True

    def __init__(self, engine_count: int, settings: StickyTwiceSettings, dice: Dice) -> None:
        self._settings = settings
        self._loads: list[float] = [0.0] * engine_count
        self._placed: dict[int, tuple[int, float]] = {}
        self._moved: dict[int, int] = {}
        self._dice = dice

    @property
    def loads(self) -> Sequence[float]:
        """Requests, or prompt tokens, in flight by engine."""
        return self._loads

    def pick(self, ask: Asked, now_s: float) -> int:
        """The pinned engine or the least loaded one."""
        loads = self._loads
        picked = self._moved.get(ask.session, -1)
        if picked < 0:
            picked = hashed_engine(ask, len(loads))
        if loads[picked] > self._settings.most_ratio * sum(loads) / len(loads):
            picked = lowest(loads, self._dice)
            if self._settings.moves and ask.session >= 0:
                self._moved[ask.session] = picked
        weight = float(ask.input_tokens) if self._settings.load == "tokens" else 1.0
        loads[picked] += weight
        self._placed[ask.serial] = picked, weight
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        """Says nothing about what is in flight."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """It is in flight no more."""
        engine, weight = self._placed.pop(serial)
        self._loads[engine] -= weight
