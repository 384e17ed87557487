"""Mooncake's scheduler: the engine with the shortest estimated time to first token, queue and prefill in seconds.

Owns: Algorithm 1 of the Mooncake paper (FAST'25, kvcache-ai/Mooncake FAST25-release; router notes, section 2.7): for
each instance, the sum of the prefill times queued there plus the prefill time of this prompt given the prefix that it
holds; the lowest wins. The prefill time is the nominal one of the engine, in place of the paper's regression fitted
offline; a request is queued from its pick to its first token. Who holds what comes from KV events, both tiers alike.
Does not own: the index (`prefix_views`). Not modelled: transfer of a prefix from the instance that holds more of it
(the simulated engines cannot pull from one another, so every instance is priced by its own prefix), the choice of a
decode instance (the simulation's), early rejection by predicted load. Rejection when the estimate is above the SLO is
off unless `reject_above_s` is set: the paper's threshold is the operator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router import cost
from router.cost import PrefillSpeed
from router.policies.asked import Asked, Dice, lowest
from router.policies.prefix_views import HearsKvEvents


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """`reject_above_s`: refuse a request whose best estimated TTFT is above it; 0: never."""

    # the paper's TTFT SLO, which it leaves to the operator
    reject_above_s: float = 0.0


def prefill_s(engine: PrefillSpeed, prompt_tokens: int, cached_tokens: int) -> float:
    """Seconds of the prefill of a prompt of which so many tokens are cached; a token is always computed."""
    cached = min(cached_tokens, prompt_tokens - 1)
    return cost.prefill_s(engine, prompt_tokens - cached, cached)


class Mooncake(HearsKvEvents):
    """Mutable: the index and the prefills queued by engine."""

    hears = True
    reads_blocks = True

    def __init__(
        self, engines: Sequence[PrefillSpeed], block_tokens: int, settings: MooncakeSettings, dice: Dice
    ) -> None:
        super().__init__(len(engines))
        self._engines = engines
        self._block_tokens = block_tokens
        self._settings = settings
        self._queued: list[dict[int, float]] = [{} for _ in engines]
        self._queue_s = [0.0] * len(engines)
        self._engine_of: dict[int, int] = {}
        self._dice = dice

    def estimates_s(self, ask: Asked) -> list[tuple[float, float]]:
        """For each engine: estimated TTFT, and this prompt's prefill as part of it."""
        matched = self._index.matched(ask.blocks)
        found = []
        for engine, blocks, queue_s in zip(self._engines, matched, self._queue_s, strict=True):
            own_s = prefill_s(engine, ask.input_tokens, blocks * self._block_tokens)
            found.append((queue_s + own_s, own_s))
        return found

    def pick(self, ask: Asked, now_s: float) -> int | None:
        """The engine with the shortest estimate; None: even that is too long."""
        estimates = self.estimates_s(ask)
        picked = lowest([ttft_s for ttft_s, _ in estimates], self._dice)
        if 0 < self._settings.reject_above_s < estimates[picked][0]:
            return None
        self._queued[picked][ask.serial] = estimates[picked][1]
        self._queue_s[picked] += estimates[picked][1]
        self._engine_of[ask.serial] = picked
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        """It is queued no more."""
        engine = self._engine_of[serial]
        queued = self._queued[engine]
        own_s = queued.pop(serial, 0.0)
        # zero again when nothing is left, whatever was rounded on the way
        self._queue_s[engine] = self._queue_s[engine] - own_s if queued else 0.0

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """An engine may have refused it without a first token."""
        self.first_token(serial, now_s)
        del self._engine_of[serial]
