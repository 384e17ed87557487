"""What a request would cost on an endpoint, in seconds.

Owns: the formula of every term except what depends on other endpoints (`route` adds that), the learning of an engine's
speed from its traffic, and the value that explains a candidate. Does not own: load counting (`endpoints`), what is
cached (`prefix_index`), or the choice (`route`).

Everything is in seconds, so that warmth and load trade at their real rate on each engine's own hardware: waiting
behind a warm engine's queue is better than a cold idle one exactly while it takes less time. The terms:

    queue      prefills ahead of it, and waiting for KV room
    prefill    overhead + uncached tokens, with attention's growth over the context
    decode     how far its own answer is in danger of missing the promised time per output token (TPOT) there
    hop        one network round trip
    slowdown   how many of the answers that run there its prefill puts in danger
    work       its prefill again, lightly: engine time that others will want
    fetch      the KV of its prompt on the way from another engine that holds more of it
    eviction   the later recomputation of KV that it pushes out
    spread     for a new session: the work placed there beyond its share (`route.Router`)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log1p
from statistics import median
from typing import NamedTuple, Protocol

from router.endpoints import Ending, EngineSpeed, Finish, Ticket

TERMS = ("queue", "prefill", "decode", "hop", "slowdown", "work", "eviction", "fetch", "spread")
"""The order of `Candidate.terms_s`."""

# What was prefilled says what may come, and one long prefill that is over says little: steps are taken as stretched to
# 1 / (1 - 0.7) = 3.3 times at most, and no more than a second of it is charged. Without these bounds a session's next
# step would leave the engine that has just prefilled its prompt.
STALLED_MAX_RATIO = 0.7
RECENT_MAX_S = 1.0

# A TPOT beyond the promise by more than this share of it is as bad as one beyond by so much: it is missed either way.
LATE_MAX_RATIO = 0.3

# What an engine costs that cannot hold a request at all: it is picked only where none can.
NEVER_FITS_S = 1e6

# Room below the promise is never taken as less than this share of it, so that an engine which cannot keep the promise
# even when empty still looks worse the more run there.
ROOM_MIN_RATIO = 0.1

# Recent prefills are looked back at over one answer's time, but never less than this: short answers would see only the
# last prefill.
ANSWER_MIN_S = 0.5

# Speed of an engine of which nothing is known yet and whose pool has no known one. 10,000 tokens/s and 20 ms are the
# order of a 70B dense model on 8 x H100 (119k tokens in 11 s at 40 % MFU, router notes section 0); 30 ms is a vLLM
# request's fixed cost.
DEFAULT_SPEED = EngineSpeed(prefill_tok_per_s=10_000.0, prefill_overhead_s=0.030, decode_s_per_token=0.020)


class Work(NamedTuple):
    """What a request asks of an engine: its input, and the output that is expected (not the limit it names).

    A tuple, because one is made for every request.
    """

    input_tokens: int
    output_tokens: int
    answer_tokens: float
    """The model's mean answer, whatever this request allows."""


class PrefillSpeed(Protocol):
    """How fast an engine prefills."""

    @property
    def prefill_tok_per_s(self) -> float: ...
    @property
    def prefill_overhead_s(self) -> float: ...
    @property
    def prefill_s_per_token2(self) -> float: ...


class Speed(PrefillSpeed, Protocol):
    """An engine's speed with the fields of `EngineSpeed`: told (`EngineSpeed`) or moving (`SpeedLearner`)."""

    @property
    def decode_s_per_token(self) -> float: ...
    @property
    def kv_capacity_tokens(self) -> int | None: ...
    @property
    def decode_s_per_running(self) -> float: ...


def prefill_s(speed: PrefillSpeed, new_tokens: int, cached_tokens: int) -> float:
    """Seconds to prefill `new_tokens` after `cached_tokens` on an otherwise idle engine."""
    attention_s = speed.prefill_s_per_token2 * new_tokens * (cached_tokens + new_tokens / 2)
    return speed.prefill_overhead_s + new_tokens / speed.prefill_tok_per_s + attention_s


@dataclass(frozen=True, slots=True)
class Promise:
    """The time per output token (TPOT) that answers are promised, and what its dangers are worth in seconds of waiting.

    The three weights were chosen by simulation over nine workloads at 85 to 98 % of requests in time; any of them may
    be halved or doubled for less than half a point there (docs/design/0007).
    """

    tpot_s: float = 0.050
    """Promised seconds per output token."""
    near_ratio: float = 0.8
    """An engine whose predicted TPOT is under this share of the promise is as good as an idle one."""
    late_s: float = 3.0
    """Above it: a TPOT beyond by one whole promise weighs as these seconds of waiting."""
    recent_ratio: float = 0.3
    """Weight of a second of prefill given to an engine within the last answer's time: others like it follow."""
    work_ratio: float = 0.1
    """Weight of a second of prefill that somebody else will want: to wait for a sibling's prefill of the same prefix
    takes as long as to compute it elsewhere, and leaves the other engine free.
    """
    harm_s: float = 0.1
    """What an answer of somebody else's that surely misses its promise weighs."""


def faded_s(kept_s: float, kept_at_s: float, answer_s: float, now_s: float) -> float:
    """What is left of the seconds of prefill given to an engine: they fade over one answer's time."""
    return kept_s * exp((kept_at_s - now_s) / answer_s) if kept_s else 0.0


def decode_danger_s(promise: Promise, step_s: float, recent_s: float, answer_s: float) -> float:
    """Seconds that its own answer's danger is worth, on an engine with steps of `step_s` and `recent_s` of prefill."""
    stalled_ratio = min(recent_s / answer_s, STALLED_MAX_RATIO)
    step_ratio = step_s / promise.tpot_s - promise.near_ratio
    over_ratio = step_s / (1 - stalled_ratio) / promise.tpot_s - promise.near_ratio
    danger_s = promise.recent_ratio * min(recent_s, RECENT_MAX_S)
    if step_ratio > LATE_MAX_RATIO:  # late without any prefill: how late still matters
        danger_s += log1p(step_ratio - LATE_MAX_RATIO)
    return danger_s + promise.late_s * min(over_ratio, LATE_MAX_RATIO) if over_ratio > 0 else danger_s


def harm_s(promise: Promise, step_s: float, prefill_time_s: float, answer_tokens: float) -> float:
    """Seconds that one running answer's danger is worth, when a prefill of so long stalls it.

    It misses its promise if it is shorter than the prefill divided by the room that each token has; lengths are taken
    as exponential with the model's mean `answer_tokens`.
    """
    room_s = max(promise.tpot_s - step_s, ROOM_MIN_RATIO * promise.tpot_s) * answer_tokens
    return promise.harm_s * (1 - exp(-prefill_time_s / room_s))


def eviction_s(speed: Speed, resident_tokens: float, new_tokens: int, reuse_ratio: float) -> float:
    """Seconds of later prefill for the KV that `new_tokens` push out of a cache that holds `resident_tokens`, when
    `reuse_ratio` of what is evicted would have been asked for again.
    """
    capacity = speed.kv_capacity_tokens
    if capacity is None:
        return 0.0
    if new_tokens > capacity:
        return NEVER_FITS_S
    over_tokens = min(resident_tokens + new_tokens - capacity, new_tokens)
    return reuse_ratio * over_tokens / speed.prefill_tok_per_s if over_tokens > 0 else 0.0


def typical_speed(known: Iterable[Speed], default: EngineSpeed) -> EngineSpeed:
    """The median speed of a pool, field by field, for its engines of which nothing is known; `default` for an empty
    pool.
    """
    speeds = list(known)
    if not speeds:
        return default
    return EngineSpeed(
        prefill_tok_per_s=median(speed.prefill_tok_per_s for speed in speeds),
        prefill_overhead_s=median(speed.prefill_overhead_s for speed in speeds),
        decode_s_per_token=median(speed.decode_s_per_token for speed in speeds),
        prefill_s_per_token2=median(speed.prefill_s_per_token2 for speed in speeds),
        decode_s_per_running=median(speed.decode_s_per_running for speed in speeds),
    )


# Weight of a new sample once the first few are averaged: about ten samples to follow a change.
_SAMPLE_WEIGHT = 0.2

# Samples of which the plain mean is kept: then a further one weighs no more than _SAMPLE_WEIGHT.
_MEAN_COUNT = 4

# A sample is pulled to within this factor of the estimate, so that one stall cannot move it far.
_SAMPLE_CLAMP = 4.0

# A prefill shorter than this says more of the fixed overhead than of the rate (256 tokens: 25 ms at 10,000 tokens/s).
_RATE_MIN_TOKENS = 256

# Fewer tokens than this do not measure a decode step (the first gaps hold scheduling noise).
_DECODE_MIN_TOKENS = 8


class Ewma:
    """A robust moving average: the plain mean of the first samples, then exponential, each sample clamped to the
    estimate.
    """

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, sample: float) -> None:
        """Take one sample (> 0)."""
        value = self.value
        if self.count == 0:
            self.value = sample
        else:
            if sample < value / _SAMPLE_CLAMP:
                sample = value / _SAMPLE_CLAMP
            elif sample > value * _SAMPLE_CLAMP:
                sample = value * _SAMPLE_CLAMP
            weight = _SAMPLE_WEIGHT if self.count >= _MEAN_COUNT else 1 / (self.count + 1)
            self.value = value + weight * (sample - value)
        self.count += 1


class SpeedLearner:
    """One engine's speed, learned from what its requests took. Mutable: its fields, those of `EngineSpeed`, move with
    every sample. Routing reads them here; a frozen copy for each answer would cost more than the prices of a request.
    """

    __slots__ = (
        "_decode_s", "_overhead_s", "_prior", "_token_s",
        "decode_s_per_running", "decode_s_per_token", "kv_capacity_tokens",
        "prefill_overhead_s", "prefill_s_per_token2", "prefill_tok_per_s",
    )  # fmt: skip

    def __init__(self, prior: EngineSpeed) -> None:
        self._token_s = Ewma()
        self._overhead_s = Ewma()
        self._decode_s = Ewma()
        self.kv_capacity_tokens: int | None = None
        """Requests do not show it."""
        self.set_prior(prior)

    @property
    def measured(self) -> bool:
        """At least one sample of any kind was taken."""
        return bool(self._token_s.count or self._decode_s.count or self._overhead_s.count)

    def set_prior(self, prior: EngineSpeed) -> None:
        """What to take for what is not measured yet."""
        self._prior = prior
        self.prefill_tok_per_s = 1 / self._token_s.value if self._token_s.count else prior.prefill_tok_per_s
        self.prefill_overhead_s = self._overhead_s.value if self._overhead_s.count else prior.prefill_overhead_s
        self.decode_s_per_token = self._decode_s.value if self._decode_s.count else prior.decode_s_per_token
        self.prefill_s_per_token2 = prior.prefill_s_per_token2
        self.decode_s_per_running = prior.decode_s_per_running

    def prefilled(self, new_tokens: int, took_s: float) -> None:
        """A prefill of `new_tokens`, alone in the queue, took this long."""
        if took_s <= 0:
            return
        if new_tokens >= _RATE_MIN_TOKENS:
            self._token_s.add(max(took_s - self.prefill_overhead_s, took_s / 10) / new_tokens)
            self.prefill_tok_per_s = 1 / self._token_s.value
        else:
            token_s = self._token_s.value if self._token_s.count else 1 / self._prior.prefill_tok_per_s
            self._overhead_s.add(max(took_s - new_tokens * token_s, took_s / 10))
            self.prefill_overhead_s = self._overhead_s.value

    def decoded(self, tokens: int, took_s: float) -> None:
        """`tokens` after the first took this long."""
        if tokens >= _DECODE_MIN_TOKENS and took_s > 0:
            self._decode_s.add(took_s / tokens)
            self.decode_s_per_token = self._decode_s.value

    def speed(self) -> EngineSpeed:
        """The speed as known now."""
        return EngineSpeed(
            prefill_tok_per_s=self.prefill_tok_per_s,
            prefill_overhead_s=self.prefill_overhead_s,
            decode_s_per_token=self.decode_s_per_token,
            prefill_s_per_token2=self.prefill_s_per_token2,
            decode_s_per_running=self.decode_s_per_running,
        )


class ModelFacts:
    """What answers have taught about one model: how many tokens prompts really have, and how long answers are."""

    __slots__ = ("input_ratio", "output_tokens")

    def __init__(self) -> None:
        self.input_ratio = 1.0
        self.output_tokens = Ewma()

    def learn(self, ticket: Ticket, finish: Finish) -> None:
        """Take an ended attempt's counts."""
        if finish.input_tokens and ticket.asked_tokens:
            ratio = min(max(finish.input_tokens / ticket.asked_tokens, 0.1), 10.0)
            self.input_ratio += _SAMPLE_WEIGHT * (ratio - self.input_ratio)
        if finish.outcome is Ending.COMPLETED and finish.output_tokens:
            self.output_tokens.add(finish.output_tokens)


class Unfit(StrEnum):
    """Why an endpoint could not be picked at all."""

    DRAINING = "draining"
    EXCLUDED = "excluded"
    BROKEN = "broken"
    BUSY = "busy"
    ROLE = "role"
    """It only does prefills."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One endpoint in one decision. `terms_s` (in the order of TERMS) and `cached_tokens` are None where it was
    unfit.
    """

    endpoint_id: str
    unfit: Unfit | None
    cached_tokens: int | None
    terms_s: tuple[float, ...] | None
    lost_by: str
    """Empty for the pick; `tie`, the term that cost it most against the pick, or why it was unfit."""

    @property
    def total_s(self) -> float | None:
        """The sum of the terms."""
        return None if self.terms_s is None else sum(self.terms_s)

    def record(self) -> dict[str, object]:
        """A JSON-able form; times in seconds."""
        terms = None if self.terms_s is None else dict(zip((f"{name}_s" for name in TERMS), self.terms_s, strict=True))
        return {
            "endpoint_id": self.endpoint_id,
            "unfit": self.unfit,
            "cached_tokens": self.cached_tokens,
            "total_s": self.total_s,
            "terms": terms,
            "lost_by": self.lost_by or None,
        }
