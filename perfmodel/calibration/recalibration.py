"""How far a live pool is from what the model predicts: multipliers for its steps, and an alarm when it drifts.

Owns: what two scrapes of an engine say about a window, the prediction for the same window, the pool's two multipliers
(decode and prefill; robust, bounded, shrunk by how much was seen), and when drift is alarming. Does not own: fetching
metrics or files (`adapters.perf_recalibrate`), or the shipped coefficients (`calibration`).
Only two numbers are learned on purpose: a window's means say how slow decoding and prefilling are, not which physical
term is to blame. The time between two tokens of one answer is the time of the step between them, so the mean
inter-token latency is the mean step time, weighted by the sequences that decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError
from perfmodel.step_time import BatchShape, decode_batch

# A window with fewer steps, or fewer prompts for the prefill multiplier, says nothing: means of a handful are chance.
_LEAST_STEPS, _LEAST_PROMPTS = 50, 5
# Steps and prompts at which the measured ratio weighs as much as the one in use.
_HALF_STEPS, _HALF_PROMPTS = 500, 20
# No window counts for more than this many steps: a pool's busiest engine must not speak for all.
_MOST_STEPS = 5000
# A batch that decodes stays below this many times its mean.
_BATCH_SPREAD = 2.0
# Multipliers beyond these are no calibration error: the engine is another one than was said.
_RATIO_LOW, _RATIO_HIGH = 0.5, 2.0
# Share of the predicted time between tokens that prefills must make up before it is used to tell the two apart.
_LEAST_PREFILL_SHARE = 0.02


class Steps(Protocol):
    """Anything that knows how long an engine's step takes (`step_time`)."""

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step."""
        ...


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What a pool's predicted times are multiplied with: the decode part of a step, and what a prefill chunk adds."""

    decode_ratio: float = 1.0
    prefill_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("decode_ratio", "prefill_ratio"):
            if not _RATIO_LOW <= getattr(self, name) <= _RATIO_HIGH:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected {_RATIO_LOW} to {_RATIO_HIGH}")


class RecalibratedSteps:
    """Step times with a pool's multipliers applied."""

    def __init__(self, steps: Steps, multipliers: Multipliers) -> None:
        self._steps = steps
        self._multipliers = multipliers

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step: decode part and prefill part, each by its multiplier."""
        whole_s = self._steps.step_s(batch)
        if not batch.prefill_tokens:
            return self._multipliers.decode_ratio * whole_s
        decode_s = self._steps.step_s(
            BatchShape(decode_count=batch.decode_count, decode_context_tokens=batch.decode_context_tokens)
        )
        return self._multipliers.decode_ratio * decode_s + self._multipliers.prefill_ratio * (whole_s - decode_s)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One engine's counters at one time; every sum and count since the engine started.

    `started_s`: when the engine began to count, to tell a restart. `steps_by_tokens`: (upper bound of tokens, steps up
    to it), the engine's cumulative histogram; it tells how many steps prefilled. Latency sums in seconds with their
    counts: `itl` between tokens, `ttft`, `prefill` (scheduled to first token). Token sums over finished requests: their
    `prompt_tokens`, what was `computed_tokens` of it, and `generated_tokens`.
    """

    started_s: float
    step_count: int
    steps_by_tokens: tuple[tuple[float, int], ...]
    itl_total_s: float
    itl_count: int
    ttft_total_s: float
    ttft_count: int
    prefill_total_s: float
    prefill_count: int
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    finished_count: int
    kv_usage_ratio: float | None = None


class WindowUse(StrEnum):
    """What became of a window."""

    USED = "used"
    IDLE = "idle"
    RESTARTED = "restarted"


@dataclass(frozen=True, slots=True)
class Window:
    """Means of one engine between two scrapes; None where nothing was seen.

    `decode_count`: sequences that decode in a step. `context_tokens`: what each of them attends to. `prompts_per_step`:
    prompts that finish their prefill in a step, with `new_tokens` computed on `cached_tokens` each.
    `prefill_step_count`: steps with more tokens than decoding makes; None where prompts are too short to tell.
    """

    engine: str
    use: WindowUse
    step_count: int
    decode_count: float = 0.0
    context_tokens: float = 0.0
    prompt_count: int = 0
    prompts_per_step: float = 0.0
    new_tokens: float = 0.0
    cached_tokens: float = 0.0
    prefill_step_count: int | None = None
    itl_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    kv_usage_ratio: float | None = None


def window_between(engine: str, before: Scrape, after: Scrape) -> Window:
    """What happened on `engine` between two scrapes, or why that cannot be said."""
    steps = after.step_count - before.step_count
    tokens = after.itl_count - before.itl_count
    finished = after.finished_count - before.finished_count
    if after.started_s != before.started_s or min(steps, tokens, finished) < 0:
        return Window(engine, WindowUse.RESTARTED, 0)
    if steps < _LEAST_STEPS or tokens < _LEAST_STEPS or finished < 1:
        return Window(engine, WindowUse.IDLE, steps)
    prompts = after.ttft_count - before.ttft_count
    prefills = after.prefill_count - before.prefill_count
    prompt = (after.prompt_tokens - before.prompt_tokens) / finished
    computed = (after.computed_tokens - before.computed_tokens) / finished
    generated = (after.generated_tokens - before.generated_tokens) / finished
    return Window(
        engine=engine,
        use=WindowUse.USED,
        step_count=steps,
        decode_count=tokens / steps,
        # Half of the answer is there on the mean while it is written.
        context_tokens=prompt + generated / 2,
        prompt_count=prompts,
        prompts_per_step=prompts / steps,
        new_tokens=computed,
        cached_tokens=prompt - computed,
        prefill_step_count=_prefill_steps(before, after, tokens / steps, computed),
        itl_s=(after.itl_total_s - before.itl_total_s) / tokens,
        prefill_s=(after.prefill_total_s - before.prefill_total_s) / prefills if prefills else None,
        ttft_s=(after.ttft_total_s - before.ttft_total_s) / prompts if prompts else None,
        kv_usage_ratio=after.kv_usage_ratio,
    )


def _prefill_steps(before: Scrape, after: Scrape, decode_count: float, new_tokens: float) -> int | None:
    """Steps above the first bucket bound that a decoding batch does not reach, if prompts reach above it."""
    bound = next((bound for bound, _ in after.steps_by_tokens if bound >= _BATCH_SPREAD * decode_count), None)
    if bound is None or not 2 * bound < new_tokens:
        return None
    earlier, later = dict(before.steps_by_tokens), dict(after.steps_by_tokens)
    return (after.step_count - later[bound]) - (before.step_count - earlier.get(bound, 0))


@dataclass(frozen=True, slots=True)
class Expected:
    """The uncorrected prediction for a window, split so that two multipliers can be told apart.

    Time between tokens is `itl_decode_s` + `itl_prefill_s`; from first scheduled to the first token it is
    `prefill_decode_s` (the others' decoding that the prompt's chunks ride on) + `prefill_new_s`.
    """

    itl_decode_s: float
    itl_prefill_s: float
    prefill_decode_s: float
    prefill_new_s: float


def expected(steps: Steps, window: Window, max_batched_tokens: int) -> Expected:
    """What the model says of a used window: each prompt is prefilled in chunks that fill what decoding leaves."""
    context = round(window.context_tokens)
    low = math.floor(window.decode_count)
    # A step has whole sequences: interpolate between the two numbers around the mean. No step is empty.
    part = window.decode_count - low
    if low == 0:
        low, part = 1, 0.0
    decode_s = (1 - part) * steps.step_s(decode_batch(low, context)) + part * steps.step_s(
        decode_batch(low + 1, context)
    )
    riding = max(1, round(window.decode_count))
    base_s = steps.step_s(decode_batch(riding, context))
    left, done, chunks, added_s = max(1, round(window.new_tokens)), round(window.cached_tokens), 0, 0.0
    budget = max(1, max_batched_tokens - riding)
    while left > 0:
        new = min(left, budget)
        batch = BatchShape(1, new, done, new * done + new * (new + 1) // 2, riding, riding * context)
        added_s += steps.step_s(batch) - base_s
        left, done, chunks = left - new, done + new, chunks + 1
    return Expected(
        itl_decode_s=decode_s,
        itl_prefill_s=window.prompts_per_step * added_s,
        prefill_decode_s=chunks * decode_s,
        prefill_new_s=added_s * _prompts_beside(window, chunks),
    )


def _prompts_beside(window: Window, chunks: int) -> float:
    """Prompts that share a prefill step, seen by one of them: those that came while another one was prefilled.

    With k = 1 + Poisson(m) prompts a step, a prompt sees E[k^2] / E[k] = 1 + m + m / (1 + m) of them.
    """
    if not window.prefill_step_count:
        return 1.0
    more = max(0.0, window.prompts_per_step * window.step_count * chunks / window.prefill_step_count - 1)
    return 1 + more + more / (1 + more)


@dataclass(frozen=True, slots=True)
class Observation:
    """One used window against the model: the ratios that would make it right, and the error of those in use.

    `step_ratio` is measured time between tokens over that predicted with the multipliers in use. `prefill_ratio` None:
    too few prompts, or prefill too small a part of the steps.
    """

    window: Window
    step_ratio: float
    decode_ratio: float
    prefill_ratio: float | None


def observe(steps: Steps, window: Window, in_use: Multipliers, max_batched_tokens: int) -> Observation:
    """Solve the window's two means for its two multipliers. `window` must be used."""
    assert window.use is WindowUse.USED
    assert window.itl_s is not None
    said = expected(steps, window, max_batched_tokens)
    itl_s = in_use.decode_ratio * said.itl_decode_s + in_use.prefill_ratio * said.itl_prefill_s
    prefill_ratio = None
    share = said.prefill_new_s / (said.prefill_new_s + said.prefill_decode_s)
    if window.prefill_s is not None and window.prompt_count >= _LEAST_PROMPTS and share > _LEAST_PREFILL_SHARE:
        # [itl]     [itl_decode      itl_prefill ] [decode ]
        # [prefill] [prefill_decode  prefill_new ] [prefill]; well-posed where a chunk is not the mean step itself.
        matrix = np.array([[said.itl_decode_s, said.itl_prefill_s], [said.prefill_decode_s, said.prefill_new_s]])
        decode, prefill = np.linalg.solve(matrix, np.array([window.itl_s, window.prefill_s]))
        prefill_ratio = float(prefill) if prefill > 0 and decode > 0 else None
    used = in_use.prefill_ratio if prefill_ratio is None else prefill_ratio
    decode_ratio = (window.itl_s - used * said.itl_prefill_s) / said.itl_decode_s
    return Observation(window, window.itl_s / itl_s, max(decode_ratio, _RATIO_LOW / 2), prefill_ratio)


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """When to raise the alarm: measured over predicted outside [1 / (1 + band), 1 + band] in so many windows running.

    The band is the model's own error: its 80 % band of the time per token.
    """

    band_ratio: float = 0.2
    alarm_windows_count: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.band_ratio < 1:
            raise ConfigError(f"band is {self.band_ratio}; expected more than 0 and less than 1")
        if self.alarm_windows_count < 1:
            raise ConfigError(f"alarm_windows is {self.alarm_windows_count}; expected at least 1")


@dataclass(frozen=True, slots=True)
class Recalibration:
    """A pool's new multipliers and its drift.

    `step_ratio`: the pool's measured over predicted step time with the multipliers that were in use, over all windows;
    None when no window could be used. `out_of_band_count`: windows outside the band up to the last one, running on from
    earlier runs. `clipped`: a multiplier wanted to leave its bounds.
    """

    multipliers: Multipliers
    step_ratio: float | None
    step_count: int
    prompt_count: int
    out_of_band_count: int
    clipped: bool
    alarmed: bool


def recalibrated(
    in_use: Multipliers, rounds: Sequence[Sequence[Observation]], limits: DriftLimits, out_of_band_count: int = 0
) -> Recalibration:
    """New multipliers from rounds of windows, one round a time with one observation an engine that was busy.

    Each multiplier moves from the one in use towards the weighted median of the observed ones (in logarithms), by the
    share n / (n + n0) of what was seen: a median because one slow node must not move a pool. `out_of_band_count` is
    that of the run before.
    """
    every = [each for observed in rounds for each in observed]
    steps = sum(each.window.step_count for each in every)
    with_prefill = [each for each in every if each.prefill_ratio is not None]
    prompts = sum(each.window.prompt_count for each in with_prefill)
    decode = _moved(
        in_use.decode_ratio, [each.decode_ratio for each in every], [_weight(each) for each in every],
        steps / (steps + _HALF_STEPS),
    )  # fmt: skip
    prefill = _moved(
        in_use.prefill_ratio, [each.prefill_ratio or 0.0 for each in with_prefill],
        [float(each.window.prompt_count) for each in with_prefill], prompts / (prompts + _HALF_PROMPTS),
    )  # fmt: skip
    kept = [min(max(ratio, _RATIO_LOW), _RATIO_HIGH) for ratio in (decode, prefill)]
    clipped = kept != [decode, prefill]
    for observed in rounds:
        if observed:
            ratio = _middle([each.step_ratio for each in observed], [_weight(each) for each in observed])
            inside = 1 / (1 + limits.band_ratio) <= ratio <= 1 + limits.band_ratio
            out_of_band_count = 0 if inside else out_of_band_count + 1
    return Recalibration(
        multipliers=Multipliers(*kept),
        step_ratio=_middle([each.step_ratio for each in every], [_weight(each) for each in every]) if every else None,
        step_count=steps,
        prompt_count=prompts,
        out_of_band_count=out_of_band_count,
        clipped=clipped,
        alarmed=clipped or out_of_band_count >= limits.alarm_windows_count,
    )


def _weight(observation: Observation) -> float:
    return float(min(observation.window.step_count, _MOST_STEPS))


def _moved(in_use: float, ratios: Sequence[float], weights: Sequence[float], share: float) -> float:
    if not ratios:
        return in_use
    return float(in_use * (_middle(ratios, weights) / in_use) ** share)


def _middle(ratios: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted median, between the two middle values where the weights part evenly."""
    order = np.argsort(ratios, kind="stable")
    values: npt.NDArray[np.float64] = np.asarray(ratios, dtype=np.float64)[order]
    heaped = np.cumsum(np.asarray(weights, dtype=np.float64)[order])
    half = heaped[-1] / 2
    upper = int(np.searchsorted(heaped, half, side="left"))
    if math.isclose(heaped[upper], half) and upper + 1 < len(values):
        return float(math.sqrt(values[upper] * values[upper + 1]))
    return float(values[upper])
