"""What an engine that serves looks like from outside a step: its scheduler's limits, its front end, its lengths.

Owns: the values that the analytic model (`queueing`), the replay of a benchmark (`harness`) and the split of prefill
and decode (`disaggregation`) share, so that the three answer about the same engine. Does not own: how long a step takes
(`step_time`) or what is done with the answer. Everything here is a frozen value with its bounds checked once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ConfigError
from perfmodel.step_time import BatchShape, StepTable

# InferenceX draws every length from U[0.8, 1] of the nominal one; measured means of 922 for "1024" confirm it.
_UNIFORM_LOW = 0.8

# Squared coefficients of variation of prompt and answer lengths of ShareGPT as benchmark clients filter it
# (fitted log-normals; prompts 215 +- 250 tokens, answers 190 +- 200).
_SHAREGPT_CV2 = 1.2


class Steps(Protocol):
    """The speed of one engine (`step_time.StepModel`)."""

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step."""
        ...

    def table(self, max_batched_tokens: int) -> StepTable:
        """The same step times as a table of up to `max_batched_tokens` tokens."""
        ...


class SchedulingOrder(StrEnum):
    """Who gets the token budget of a step first."""

    # Every decode its token, prompts fill the rest in chunks (vLLM V1).
    DECODE_FIRST = "decode_first"
    # The same, but a prompt runs whole or waits (TensorRT-LLM without chunked context).
    WHOLE_PROMPTS = "whole_prompts"
    # Prompts run alone while decodes wait (SGLang without mixed chunks).
    PREFILL_FIRST = "prefill_first"


class LengthLaw(StrEnum):
    """How the lengths of requests vary around their mean."""

    FIXED = "fixed"
    UNIFORM_08_10 = "uniform_0.8_1.0"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean prompt and answer tokens of a request, and their law. `cached_ratio`: share of prompts found in the cache.

    `input_tokens` and `output_tokens` are true means: a nominal 1024 under U[0.8, 1] is 922 (`Lengths.of_nominal`).
    `input_cv2` and `output_cv2` are squared coefficients of variation, used by the log-normal law only.
    """

    input_tokens: float
    output_tokens: float
    law: LengthLaw = LengthLaw.FIXED
    cached_ratio: float = 0.0
    input_cv2: float = _SHAREGPT_CV2
    output_cv2: float = _SHAREGPT_CV2

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 1):
                raise ConfigError(f"lengths: {name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.cached_ratio <= 1:
            raise ConfigError(f"lengths: cached_ratio is {self.cached_ratio}; expected 0 to 1")
        for name in ("input_cv2", "output_cv2"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"lengths: {name} is {getattr(self, name)}; expected 0 or more")

    @staticmethod
    def of_nominal(input_tokens: float, output_tokens: float, *, cached_ratio: float = 0.0) -> Lengths:
        """The lengths of an InferenceX run: U[0.8, 1] of the nominal tokens, so 0.9 of them in the mean."""
        mean = (1 + _UNIFORM_LOW) / 2
        return Lengths(
            max(1.0, input_tokens * mean), max(1.0, output_tokens * mean), LengthLaw.UNIFORM_08_10, cached_ratio
        )

    @property
    def cv2(self) -> tuple[float, float]:
        """Squared coefficients of variation of prompts and answers under the law."""
        if self.law is LengthLaw.FIXED:
            return 0.0, 0.0
        if self.law is LengthLaw.UNIFORM_08_10:
            flat = ((1 - _UNIFORM_LOW) / (1 + _UNIFORM_LOW)) ** 2 / 3
            return flat, flat
        return self.input_cv2, self.output_cv2

    def draw(self, count: int, generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Prompt and answer tokens of `count` requests, each at least 1; only `generator` decides."""
        input_cv2, output_cv2 = self.cv2
        return (
            _draw(self.law, self.input_tokens, input_cv2, count, generator),
            _draw(self.law, self.output_tokens, output_cv2, count, generator),
        )


def _draw(law: LengthLaw, mean: float, cv2: float, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """`count` lengths of the law with this mean."""
    if law is LengthLaw.FIXED:
        lengths = np.full(count, mean)
    elif law is LengthLaw.UNIFORM_08_10:
        top = mean * 2 / (1 + _UNIFORM_LOW)
        lengths = generator.uniform(_UNIFORM_LOW * top, top, count)
    else:
        variance = math.log1p(cv2)
        lengths = generator.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    whole: NDArray[np.int64] = np.maximum(1, np.rint(lengths)).astype(np.int64)
    return whole


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What a request costs outside the steps: HTTP and scheduling, tokenising (one prompt after another), streaming.

    `request_s` passes before the engine sees the request, `prompt_token_s` of a serial tokeniser per prompt token, and
    `first_token_s` before the client sees a token.
    """

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    first_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("request_s", "prompt_token_s", "first_token_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"front end: {name} is {getattr(self, name)}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """One engine, or `replicas` equal ones that share the load evenly: speed, room and scheduler.

    `reserve_ratio` is the share of an answer's KV that admission sets aside: 0 with eviction when the cache is full
    (vLLM), 1 never evicts (TensorRT-LLM's default). `launch_s`: what the host takes to launch a step with a prompt in
    it, outside of graphs, while the device works (the harness replay has it). Raises ConfigError for limits below 1.
    """

    step: Steps
    kv_capacity_tokens: int
    max_batched_tokens: int
    max_sequence_count: int
    replicas: int = 1
    order: SchedulingOrder = SchedulingOrder.DECODE_FIRST
    reserve_ratio: float = 0.0
    front_end: FrontEnd = field(default_factory=FrontEnd)
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kv_capacity_tokens", "max_batched_tokens", "max_sequence_count", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"serving engine: {name} is {getattr(self, name)}; expected at least 1")
        if not (math.isfinite(self.launch_s) and self.launch_s >= 0):
            raise ConfigError(f"serving engine: launch_s is {self.launch_s}; expected 0 or more")
        if not 0 <= self.reserve_ratio <= 1:
            raise ConfigError(f"serving engine: reserve_ratio is {self.reserve_ratio}; expected 0 to 1")


@dataclass(frozen=True, slots=True)
class Served:
    """What the clients of an engine saw. Times in milliseconds, rates over all replicas.

    `saturated`: the offered load cannot be served (open loop), or the mean TTFT passed `SATURATED_TTFT_MS`.
    `utilisation_ratio` is the busy share of an engine (1 in a closed loop that never idles), `batch_mean` the mean
    sequences in its steps. Percentiles that an estimator does not know are None.
    """

    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    output_tok_per_s: float
    request_per_s: float
    utilisation_ratio: float
    batch_mean: float
    saturated: bool


# TTFT above which a served load counts as saturated (the issue's own threshold).
SATURATED_TTFT_MS = 10_000.0
