"""Mooncake's scheduler: the engine with the shortest estimated time to first token, queue and prefill in seconds.

Owns: Algorithm 1 of the Mooncake paper (FAST'25, kvcache-ai/Mooncake FAST25-release; router notes, section 2.7): for
each instance, the sum of the prefill times queued there plus the prefill time of this prompt given the prefix that it
holds; the lowest wins. The prefill time is the nominal one of the engine, in place of the paper's regression fitted
offline; a request is queued from its pick to its first token. Who holds what comes from KV events, both tiers alike.
Where engines have links, an instance that holds `balancing_ratio` times less of the prompt than the one that holds most
is priced with the transfer of the difference and the prefill of the rest, as in the paper, and makes that transfer.
Does not own: the index (`prefix_views`). Not modelled: the choice of a decode instance (the simulation's), early
rejection by predicted load. Rejection when the estimate is above the SLO is off unless `reject_above_s` is set: the
paper's threshold is the operator's, and so is `balancing_ratio` (kvcache_balancing_threshold), "adjusted manually".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router import cost
from router.cost import PrefillSpeed
from router.policies.asked import Asked, Dice, lowest
from router.policies.prefix_views import HearsKvEvents


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """`reject_above_s`: refuse a request whose best estimated TTFT is above it; 0: never. `balancing_ratio`: fetch
    where another instance holds more than so many times the prefix.
    """

    # the paper's TTFT SLO, which it leaves to the operator
    reject_above_s: float = 0.0
    # the paper names none; twice the prefix is worth a transfer
    balancing_ratio: float = 2.0


def prefill_s(engine: PrefillSpeed, prompt_tokens: int, cached_tokens: int) -> float:
    """Seconds of the prefill of a prompt of which so many tokens are cached; a token is always computed."""
    cached = min(cached_tokens, prompt_tokens - 1)
    return cost.prefill_s(engine, prompt_tokens - cached, cached)


class Instance(PrefillSpeed, Protocol):
    """What is read of an engine."""

    @property
    def kv_bytes_per_token(self) -> float: ...
    @property
    def peer_bytes_per_s(self) -> float | None: ...


class Mooncake(HearsKvEvents):
    """Mutable: the index and the prefills queued by engine."""

    hears = True
    reads_blocks = True

    def __init__(self, engines: Sequence[Instance], block_tokens: int, settings: MooncakeSettings, dice: Dice) -> None:
        super().__init__(len(engines))
        self._engines = engines
        self._block_tokens = block_tokens
        self._settings = settings
        self._queued: list[dict[int, float]] = [{} for _ in engines]
        self._queue_s = [0.0] * len(engines)
        self._engine_of: dict[int, int] = {}
        self._dice = dice

    def estimates_s(self, ask: Asked) -> list[tuple[float, float, int | None]]:
        """For each engine: estimated TTFT, this prompt's prefill as part of it, and whence it fetches a prefix."""
        matched = self._index.matched(ask.blocks)
        best = max(range(len(matched)), key=matched.__getitem__)
        found = []
        for number, (engine, blocks, queue_s) in enumerate(zip(self._engines, matched, self._queue_s, strict=True)):
            bytes_per_s = self._link_bytes_per_s(number, best)
            source = best if bytes_per_s and matched[best] > self._settings.balancing_ratio * blocks else None
            cached, fetch_s = blocks * self._block_tokens, 0.0
            if source is not None:
                fetched = (matched[best] - blocks) * self._block_tokens
                cached, fetch_s = cached + fetched, fetched * engine.kv_bytes_per_token / bytes_per_s
            own_s = prefill_s(engine, ask.input_tokens, cached)
            found.append((queue_s + fetch_s + own_s, own_s, source))
        return found

    def _link_bytes_per_s(self, engine: int, source: int) -> float:
        """Rate between two engines; 0: there is no link."""
        if engine == source:
            return 0.0
        return min(self._engines[engine].peer_bytes_per_s or 0.0, self._engines[source].peer_bytes_per_s or 0.0)

    def pick(self, ask: Asked, now_s: float) -> int | tuple[int, int] | None:
        """The engine with the shortest estimate, perhaps with one to fetch from; None: even that is too long."""
        estimates = self.estimates_s(ask)
        picked = lowest([ttft_s for ttft_s, _, _ in estimates], self._dice)
        if 0 < self._settings.reject_above_s < estimates[picked][0]:
            return None
        self._queued[picked][ask.serial] = estimates[picked][1]
        self._queue_s[picked] += estimates[picked][1]
        self._engine_of[ask.serial] = picked
        source = estimates[picked][2]
        return picked if source is None else (picked, source)

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
