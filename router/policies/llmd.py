"""llm-d's endpoint picker: weighted scores between 0 and 1 for queue, KV usage and prefix; the highest sum wins.

Owns: both profiles (router notes, section 2.4). `LlmdDefault`: queue-scorer 2, kv-cache-utilization-scorer 2,
prefix-cache-scorer 3 of pkg/epp/config/loader/defaults.go, the prefix from the picker's own history: 31,250 blocks of
16 tokens a pod, the least recently used dropped. How far a match may go follows llm-d-router ebab6879 (2026-08-22):
131,072 tokens; in llm-d-inference-scheduler 520af478 (2026-05-17) it was 256 blocks = 4,096 tokens
(`most_matched_tokens` 4096). `LlmdPrecise`: prefix 2, KV usage 1, queue 1, the prefix from KV events: the longest run
of blocks, one in the lower tier counts 0.8, divided by the prompt's blocks, as precise-prefix-cache-producer with
prefix-cache-scorer has it. The scorer that these replaced in v0.7 (precise-prefix-cache-scorer) stretched scores
between the lowest and the highest pod that has any: `normalised` "minmax", with which one block that all prompts
share is worth as much as a whole prompt.
The queue's score is (max - q) / (max - min) over the pods, 1 where all are equal; KV's is 1 - usage. Both come from
the engines' metrics, read every 50 ms. Ties are drawn. Does not own: index and history (`prefix_views`).
Not modelled: tokens counted as characters / 4 (ours are exact), stale metrics (never older than 50 ms here), flow
control under saturation, speculative entries of the precise index (off by default), pods that come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import PolicyError
from router.policies.asked import Asked, Dice, Sampled, blocks_of, lowest
from router.policies.prefix_views import EngineHistory, HearsKvEvents

# Tokens of the picker's own block (approximate prefix plug-in).
_BLOCK_TOKENS = 16

# How precise scores become 0 to 1.
NORMALISED = ("minmax", "share")


@dataclass(frozen=True, slots=True)
class LlmdDefaultSettings:
    """Weights of pkg/epp/config/loader/defaults.go; bounds of the approximate prefix plug-in."""

    prefix_weight_ratio: float = 3.0
    queue_weight_ratio: float = 2.0
    kv_weight_ratio: float = 2.0
    # blocks of 16 tokens a pod
    lru_capacity_blocks: int = 31_250
    # August 2026; May 2026: 4096
    most_matched_tokens: int = 131_072
    # --refresh-metrics-interval
    metrics_every_s: float = 0.05


@dataclass(frozen=True, slots=True)
class LlmdPreciseSettings:
    """Weights of the precise profile, tier weights of llm-d-kv-cache. Raises PolicyError (`normalised`)."""

    prefix_weight_ratio: float = 2.0
    queue_weight_ratio: float = 1.0
    kv_weight_ratio: float = 1.0
    # llm-d-kv-cache: gpu 1.0, cpu 0.8
    lower_tier_ratio: float = 0.8
    # v0.7 and later; before: minmax
    normalised: str = "share"
    metrics_every_s: float = 0.05

    def __post_init__(self) -> None:
        if self.normalised not in NORMALISED:
            raise PolicyError(f"normalised is {self.normalised!r}; expected one of {', '.join(NORMALISED)}")


class _Scores:
    """The scorers that read metrics. Mutable: the newest sample."""

    def __init__(self, engine_count: int, queue_weight_ratio: float, kv_weight_ratio: float) -> None:
        self._weights = queue_weight_ratio, kv_weight_ratio
        self._waiting = [0] * engine_count
        self._usage = [0.0] * engine_count

    def heard(self, samples: Sequence[Sampled]) -> None:
        """A new reading of all engines."""
        self._waiting = [sample.waiting_count for sample in samples]
        self._usage = [sample.kv_usage_ratio for sample in samples]

    def points(self) -> list[float]:
        """Of each engine, for queue and KV usage."""
        queue_weight_ratio, kv_weight_ratio = self._weights
        most, least = max(self._waiting), min(self._waiting)
        spread = most - least
        return [
            queue_weight_ratio * ((most - waiting) / spread if spread else 1.0)
            + kv_weight_ratio * min(1.0, max(0.0, 1.0 - usage))
            for waiting, usage in zip(self._waiting, self._usage, strict=True)
        ]


class LlmdDefault:
    """Mutable: the history of its own picks and the newest metrics."""

    hears = False
    reads_blocks = True

    def __init__(self, engine_count: int, block_tokens: int, settings: LlmdDefaultSettings, dice: Dice) -> None:
        self.metrics_every_s = settings.metrics_every_s
        self._weight = settings.prefix_weight_ratio
        self._most_blocks = blocks_of(settings.most_matched_tokens, block_tokens)
        held = blocks_of(settings.lru_capacity_blocks * _BLOCK_TOKENS, block_tokens)
        self._history = EngineHistory(engine_count, held, leaves_first=False)
        self._scores = _Scores(engine_count, settings.queue_weight_ratio, settings.kv_weight_ratio)
        self._dice = dice

    def metrics(self, samples: Sequence[Sampled], sampled_s: float) -> None:
        """A reading of all engines."""
        self._scores.heard(samples)

    def scores(self, ask: Asked) -> list[float]:
        """Of each engine."""
        points = self._scores.points()
        blocks = ask.blocks[: self._most_blocks]
        if not blocks:
            return points
        matched = self._history.matched(blocks)
        return [point + self._weight * count / len(blocks) for point, count in zip(points, matched, strict=True)]

    def pick(self, ask: Asked, now_s: float) -> int:
        """The engine with the most points."""
        picked = lowest([-score for score in self.scores(ask)], self._dice)
        self._history.sent(ask.blocks[: self._most_blocks], picked)
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        """Not listened to."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """Not listened to."""


class LlmdPrecise(HearsKvEvents):
    """Mutable: the index and the newest metrics."""

    hears = False
    reads_blocks = True

    def __init__(self, engine_count: int, settings: LlmdPreciseSettings, dice: Dice) -> None:
        super().__init__(engine_count)
        self.metrics_every_s = settings.metrics_every_s
        self._settings = settings
        self._scores = _Scores(engine_count, settings.queue_weight_ratio, settings.kv_weight_ratio)
        self._dice = dice

    def metrics(self, samples: Sequence[Sampled], sampled_s: float) -> None:
        """A reading of all engines."""
        self._scores.heard(samples)

    def scores(self, ask: Asked) -> list[float]:
        """Of each engine."""
        points = self._scores.points()
        weight = self._settings.lower_tier_ratio
        held = [device + weight * lower for device, lower in self._index.by_tier(ask.blocks)]
        known = [blocks for blocks in held if blocks]
        if not known:
            return points
        least, most = min(known), max(known)
        if self._settings.normalised == "share":
            least, most = 0.0, float(len(ask.blocks))
        for engine, blocks in enumerate(held):
            if blocks:
                share = (blocks - least) / (most - least) if most > least else 1.0
                points[engine] += self._settings.prefix_weight_ratio * share
        return points

    def pick(self, ask: Asked, now_s: float) -> int:
        """The engine with the most points."""
        return lowest([-score for score in self.scores(ask)], self._dice)

    def first_token(self, serial: int, now_s: float) -> None:
        """Not listened to."""

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """Not listened to."""
