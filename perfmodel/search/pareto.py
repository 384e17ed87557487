"""What can be had at all: tokens a second for one user against tokens a second for one device, and the price of a
million.

Owns: the sweep over engines and batch sizes, pairs of unlike devices at matched rates, and which points nothing beats.
Does not own: the closed-loop model (`queueing`), what fits (`options`) or a promise (`search`). A point is a
steady state at full load, as InferenceX measures: fixed concurrency, no idle time; a fleet sized for a promise runs
below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.disaggregation import DECODE_YIELD_RATIO, PREFILL_YIELD_RATIO, prefill_rate, prompt_batch_s
from perfmodel.errors import ConfigError
from perfmodel.queueing.loops import closed_loop
from perfmodel.search.plan import EngineOption
from perfmodel.serving import Lengths, ServingEngine, Steps
from perfmodel.step_time import decode_batch

# Concurrencies per engine that are tried: powers of two, as the published curves have them.
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# Replicas of each side that are tried: ratios up to 1:8 and 8:1; beyond, one side is nearly idle hardware.
_MOST_SIDE = 8

# Smaller gains than this are far inside the model's error, and chunk sizes alone would fill the front with them.
_LEAST_GAIN_RATIO = 0.01


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration at one concurrency. `what` names it, `accelerators` the devices it needs.

    `usd_per_million_output_tokens` None: a price is not known.
    """

    accelerators: tuple[str, ...]
    what: str
    device_count: int
    concurrency_count: int
    user_tok_per_s: float
    device_tok_per_s: float
    ttft_mean_ms: float
    usd_per_million_output_tokens: float | None


def points(
    options: Sequence[EngineOption], lengths: Lengths, steps: Callable[[EngineOption], Steps], *, mixed: bool
) -> list[Point]:
    """All points of engines that do everything, and with `mixed` those of prefill and decode on unlike devices.

    Engines of which too little is known for step times are left out.
    """
    found = alone_points(options, lengths, steps)
    return found + (pair_points(options, lengths, steps) if mixed else [])


def alone_points(
    options: Sequence[EngineOption], lengths: Lengths, steps: Callable[[EngineOption], Steps]
) -> list[Point]:
    """The points of engines that do everything, in the order of the options: slices of them give slices of these."""
    return [
        point
        for option, step in _timed(options, steps)
        if option.chips is None and option.offer.hardware.can_prefill
        for point in _alone(option, lengths, step)
    ]


def pair_points(
    options: Sequence[EngineOption], lengths: Lengths, steps: Callable[[EngineOption], Steps]
) -> list[Point]:
    """The points of prefill and decode on unlike devices."""
    return _pairs(_timed(options, steps), lengths)


def _timed(options: Sequence[EngineOption], steps: Callable[[EngineOption], Steps]) -> list[tuple[EngineOption, Steps]]:
    """Engines with their step times, those left out of which too little is known."""
    timed: list[tuple[EngineOption, Steps]] = []
    for option in options:
        try:
            timed.append((option, steps(option)))
        except ConfigError:
            continue
    return timed


def _alone(option: EngineOption, lengths: Lengths, step: Steps) -> list[Point]:
    engine = _engine(option, step)
    devices = option.shape.device_count
    found = []
    for concurrency in CONCURRENCIES:
        if concurrency > option.max_sequence_count:
            break
        if concurrency * (lengths.input_tokens + lengths.output_tokens) > option.kv_capacity_tokens:
            break
        served = closed_loop(engine, lengths, concurrency)
        found.append(
            Point(
                accelerators=(option.offer.name,),
                what=option_words(option),
                device_count=devices,
                concurrency_count=concurrency,
                user_tok_per_s=1000 / served.tpot_mean_ms,
                device_tok_per_s=served.output_tok_per_s / devices,
                ttft_mean_ms=served.ttft_mean_ms,
                usd_per_million_output_tokens=_price(devices * option.offer.usd_per_h, served.output_tok_per_s),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Side:
    """One half at full load: requests a second that it carries, and for a decode side its batch and step."""

    option: EngineOption
    request_per_s: float
    batch_count: int
    step_s: float
    prompt_s: float


def _pairs(timed: Sequence[tuple[EngineOption, Steps]], lengths: Lengths) -> list[Point]:
    prefill = _best_per_device(
        _prefill_side(option, lengths, step)
        for option, step in timed
        if option.chips is None and option.offer.hardware.can_prefill
    )
    decode = [side for option, step in _smallest_chunks(timed) for side in _decode_sides(option, lengths, step)]
    return [
        _pair(first, second, lengths)
        for first in prefill
        for second in decode
        if first.option.offer.name != second.option.offer.name
    ]


def _smallest_chunks(timed: Sequence[tuple[EngineOption, Steps]]) -> list[tuple[EngineOption, Steps]]:
    found: dict[tuple[str, ...], tuple[EngineOption, Steps]] = {}
    for option, step in sorted(timed, key=lambda each: each[0].chunk_tokens):
        found.setdefault(option.key[:-1], (option, step))
    return list(found.values())


def _prefill_side(option: EngineOption, lengths: Lengths, step: Steps) -> _Side:
    engine = _engine(option, step)
    rate = prefill_rate(engine, lengths)
    alone_s = prompt_batch_s(engine, lengths.input_tokens, lengths.cached_ratio, 1)
    return _Side(option, PREFILL_YIELD_RATIO * rate.request_per_s, 0, 0.0, alone_s)


def _engine(option: EngineOption, step: Steps) -> ServingEngine:
    return ServingEngine(step, option.kv_capacity_tokens, option.chunk_tokens, option.max_sequence_count)


def _best_per_device(sides: Iterable[_Side]) -> list[_Side]:
    best: dict[str, _Side] = {}
    for side in sides:
        known = best.get(side.option.offer.name)
        rate = side.request_per_s / side.option.shape.device_count
        if known is None or rate > known.request_per_s / known.option.shape.device_count:
            best[side.option.offer.name] = side
    return list(best.values())


def _decode_sides(option: EngineOption, lengths: Lengths, step: Steps) -> list[_Side]:
    context = int(lengths.input_tokens + lengths.output_tokens / 2)
    found = []
    for batch in CONCURRENCIES:
        if batch > option.max_sequence_count:
            break
        if batch * (lengths.input_tokens + lengths.output_tokens) > option.kv_capacity_tokens:
            break
        step_s = step.step_s(decode_batch(batch, context))
        found.append(_Side(option, DECODE_YIELD_RATIO * batch / (step_s * lengths.output_tokens), batch, step_s, 0.0))
    return found


def _pair(first: _Side, second: _Side, lengths: Lengths) -> Point:
    """The ratio of sides that gives most tokens per device, up to eight of each (rate matching)."""
    counts = np.arange(1, _MOST_SIDE + 1)
    left, right = np.meshgrid(counts, counts, indexing="ij")
    rate = np.minimum(left * first.request_per_s, right * second.request_per_s)
    devices = left * first.option.shape.device_count + right * second.option.shape.device_count
    best = int(np.argmax(rate / devices))
    n_first, n_second = int(left.flat[best]), int(right.flat[best])
    tok_per_s = float(rate.flat[best]) * lengths.output_tokens
    usd_per_h = (
        n_first * first.option.shape.device_count * first.option.offer.usd_per_h
        + n_second * second.option.shape.device_count * second.option.offer.usd_per_h
    )
    device_count = int(devices.flat[best])
    return Point(
        accelerators=(first.option.offer.name, second.option.offer.name),
        what=f"{n_first} x prefill {option_words(first.option)} + {n_second} x decode {option_words(second.option)}",
        device_count=device_count,
        concurrency_count=n_second * second.batch_count,
        user_tok_per_s=1 / second.step_s,
        device_tok_per_s=tok_per_s / device_count,
        ttft_mean_ms=first.prompt_s * 1000,
        usd_per_million_output_tokens=_price(usd_per_h, tok_per_s),
    )


def _price(usd_per_h: float, tok_per_s: float) -> float:
    return usd_per_h / (3600 * tok_per_s) * 1e6


def option_words(option: EngineOption) -> str:
    """An engine in a few words."""
    shape = option.shape
    return f"{option.offer.name} TP{shape.tensor_parallel_count} {shape.weight_format} chunk {option.chunk_tokens}"


def front(found: Sequence[Point], value: Callable[[Point], float]) -> list[Point]:
    """Points that no other beats in both tokens a second for a user and `value` (more is better), fastest first.

    A point that gains less than `_LEAST_GAIN_RATIO` over a faster one is left out.
    """
    best: list[Point] = []
    for point in sorted(found, key=lambda each: (-each.user_tok_per_s, -value(each), each.what)):
        if not best or value(point) > value(best[-1]) * (1 + _LEAST_GAIN_RATIO):
            best.append(point)
    return best


def fronts(found: Sequence[Point]) -> dict[tuple[str, ...], list[Point]]:
    """The front of tokens per device of each set of accelerators."""
    sets = sorted({point.accelerators for point in found})
    return {
        names: front([point for point in found if point.accelerators == names], lambda each: each.device_tok_per_s)
        for names in sets
    }
