"""`cache_aware` of sgl-model-gateway and its successor smg: the longest match, or the fewest requests, by a switch.

Owns: the rule as of lightseekorg/smg 73da68ca (2026-08-07), model_gateway/src/policies/cache_aware.rs, with the
defaults of its Python command line (router notes, section 2.1), on HTTP workers: load is the number of requests in
flight, the index is the router's own tree of the prompts that it sent. When the busiest worker has more than 64
requests over the idlest *and* more than 1.5 times as many, every request goes to the least loaded; else a prompt of
which more than 30 % matches goes where it matches, and any other to the worker with the fewest (in flight, sent so
far), the first on a tie.
Does not own: the tree (`prefix_views`). Not modelled: matches in characters (ours are whole blocks), the optional
trigger by KV usage (off by default), unhealthy workers, and eviction once a minute: the bound always holds. Of several
workers that match equally the source takes any; here it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.asked import Asked, Dice, blocks_of, one_of
from router.policies.in_flight import InFlight
from router.policies.prefix_views import EngineHistory

# Characters of a token of English or code: the tree counts characters.
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """The gateway's names with a unit. All defaults: bindings/python/src/smg/router_args.py."""

    cache_threshold_ratio: float = 0.3
    balance_abs_count: int = 64
    balance_rel_ratio: float = 1.5
    # characters a worker
    max_tree_bytes: int = 2**26


class SglangCacheAware:
    """Mutable: the tree, what is in flight, what was sent."""

    hears = True
    reads_blocks = True

    def __init__(self, engine_count: int, block_tokens: int, settings: SglangSettings, dice: Dice) -> None:
        self._settings = settings
        self._in_flight = InFlight(engine_count)
        self._sent = [0] * engine_count
        self._block_tokens = block_tokens
        most = blocks_of(settings.max_tree_bytes / _CHARACTERS_PER_TOKEN, block_tokens)
        self._tree = EngineHistory(engine_count, most, leaves_first=True)
        self._dice = dice

    def pick(self, ask: Asked, now_s: float) -> int:
        """By match while the fleet is balanced, by load while it is not."""
        counts, settings = self._in_flight.counts, self._settings
        most, least = max(counts), min(counts)
        unbalanced = most - least > settings.balance_abs_count and most > settings.balance_rel_ratio * least
        picked = -1
        if not unbalanced and ask.blocks:
            matched = self._tree.matched(ask.blocks)
            best = max(matched)
            if best * self._block_tokens > settings.cache_threshold_ratio * ask.input_tokens:
                picked = one_of([engine for engine, count in enumerate(matched) if count == best], self._dice)
        if picked < 0:
            picked = min(range(len(counts)), key=lambda engine: (counts[engine], self._sent[engine]))
        self._tree.sent(ask.blocks, picked)
        self._sent[picked] += 1
        self._in_flight.placed(ask.serial, picked)
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        """Says nothing about the number in flight."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """It is in flight no more."""
        self._in_flight.ended(serial)
