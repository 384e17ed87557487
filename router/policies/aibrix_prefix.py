"""AIBrix's `prefix-cache`: the best match among pods that are not busier than the mean and a standard deviation.

Owns: the rule as of aibrix e3e10f9e, pkg/plugins/gateway/algorithms/prefix_cache.go (router notes, section 2.5), with
the defaults of its code where its README says others. Requests running are the gateway's own counts. If the busiest
pod has more than 8 over the idlest, only the idlest pods are candidates. Candidates go by the match in whole per
cent, highest first, then by requests running; the first with no more than the mean plus one standard deviation of all
pods gets the request; if none matches, the one with the fewest.
The index is one for the gateway: 200,000 blocks of 4 characters, forgotten after 20 idle minutes. Does not own: it
(`prefix_views`). Not modelled: characters within a block of the trace, several gateways that share through Redis
every 10 s, and the sweep once a second (idle blocks are forgotten at the next pick).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import pstdev

from router.policies.asked import Asked, Dice, blocks_of, one_of
from router.policies.in_flight import InFlight
from router.policies.prefix_views import SharedHistory

# Characters of a token of English or code.
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class AibrixSettings:
    """Defaults of pkg/utils/prefixcacheindexer and the algorithm's environment variables."""

    # AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT: 8 in code, 16 in the README
    imbalance_count: int = 8
    # AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR: 1 in code, 2 in the README
    deviation_ratio: float = 1.0
    # AIBRIX_PREFIX_CACHE_BLOCK_NUMBER and _BLOCK_SIZE (128 in the README), in characters by the default tokenizer
    block_count: int = 200_000
    block_bytes: int = 4
    # AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS
    idle_s: float = 1200.0


class AibrixPrefix:
    """Mutable: the index and what runs."""

    hears = True
    reads_blocks = True

    def __init__(self, engine_count: int, block_tokens: int, settings: AibrixSettings, dice: Dice) -> None:
        self._settings = settings
        self._in_flight = InFlight(engine_count)
        tokens = settings.block_count * settings.block_bytes / _CHARACTERS_PER_TOKEN
        self._index = SharedHistory(engine_count, blocks_of(tokens, block_tokens), settings.idle_s)
        self._dice = dice

    def pick(self, ask: Asked, now_s: float) -> int:
        """The best match that is not too busy."""
        counts = self._in_flight.counts
        least = min(counts)
        candidates = list(range(len(counts)))
        if max(counts) - least > self._settings.imbalance_count:
            candidates = [engine for engine in candidates if counts[engine] == least]
        self._index.forget_idle(now_s)
        picked = self._matching(ask, candidates)
        if picked is None:
            fewest = min(counts[engine] for engine in candidates)
            picked = one_of([engine for engine in candidates if counts[engine] == fewest], self._dice)
        self._index.sent(ask.blocks, picked, now_s)
        self._in_flight.placed(ask.serial, picked)
        return picked

    def _matching(self, ask: Asked, candidates: list[int]) -> int | None:
        """The first candidate by match and load that is not too busy; None: none matches, or all that do are."""
        if not ask.blocks:
            return None
        counts = self._in_flight.counts
        matched = self._index.matched(ask.blocks)
        order = sorted(
            (-(100 * matched[engine] // len(ask.blocks)), counts[engine], engine)
            for engine in candidates
            if matched[engine]
        )
        if not order:
            return None
        limit = self._in_flight.total / len(counts) + self._settings.deviation_ratio * pstdev(counts)
        for share, running, _ in order:
            if running <= limit:
                tied = [engine for other, count, engine in order if (other, count) == (share, running)]
                return one_of(tied, self._dice)
        return None

    def first_token(self, serial: int, now_s: float) -> None:
        """Says nothing about what runs."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """It runs no more."""
        self._in_flight.ended(serial)
