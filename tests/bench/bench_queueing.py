"""The analytic queue against a simulated one, over a grid of engines, lengths and loads: error by load, and its cost.

Owns: the grid (`GRID`, and `CLOSED` for closed loops; a test runs a part) and the comparison. Does not own: either
model. Run it with `python -m tests.bench.bench_queueing` (six minutes; `--all`: all calibrated points); it prints one
line a point and a summary by kind of point, and exits 1 when a bar is missed: mean TTFT within 10 % at a utilisation of
up to 0.7 and within 25 % at 0.9, mean TPOT within 10 %, both on the points of steady arrivals. Percentiles and the
points of bursts are printed, not judged.
The simulation is `harness.replay_requests` with Poisson or Gamma arrivals: a seeded run of one engine, event by event.
How long it runs is decided by its own noise alone: a judged point near capacity whose simulated mean has a standard
error above `MOST_NOISE` is simulated again by longer runs, as many as bring it below (`simulated`).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from perfmodel.adapters.catalog import load_catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.hardware import NumberFormat
from perfmodel.harness import ArrivalLaw, HarnessScenario, replay, replay_requests
from perfmodel.memory import EngineShape, kv_capacity_tokens
from perfmodel.queueing.loops import closed_loop, open_loop
from perfmodel.serving import FrontEnd, LengthLaw, Lengths, SchedulingOrder, ServingEngine
from perfmodel.step_time import BatchShape, StepModel, StepTable

# The share of a run that is not counted: the engine starts empty.
_WARM_UP = 0.1

# Bars of mean TTFT by utilisation, and of mean TPOT at any.
BARS = {0.3: 0.10, 0.5: 0.10, 0.7: 0.10, 0.9: 0.25}
TPOT_BAR = 0.10

# Seeds by utilisation: a queue near capacity varies for longer than a run. With long answers the mean TTFT of one run
# of 20,000 requests at 0.9 is anything from 80 to 300 ms, so that four of them would judge the draw.
_SEEDS = {0.9: 16}

# The largest standard error of a simulated mean near capacity that is judged (an eighth of the bar there), the requests
# of the longer runs that take its place (the most that a replay takes), and how many of them there are at most.
MOST_NOISE = 0.03
_LONG_REQUESTS, _MOST_LONG_RUNS = 65_536, 320

# A dense model, a mixture of experts and latent attention: model, device, how many.
_ENGINES = {
    "dense": ("Llama-3.3-70B", "H100-SXM-80GB", 4),
    "experts": ("gpt-oss-120b", "B200", 1),
    "latent": ("DeepSeek-R1", "H200-SXM-141GB", 8),
}


class GridSteps:
    """A 70B-like engine on four H100s: 8 ms of weights, 60 us a token, 20 ns a context token, 5 ms a prefill step."""

    def __init__(self, largest: int = 16_384) -> None:
        tokens = np.arange(largest + 1, dtype=np.float64)
        self._table = StepTable(0.008 + 6e-5 * tokens, 2e-6, 2e-8, 1e-9, 5e-9)

    def table(self, max_batched_tokens: int) -> StepTable:
        return self._table

    def step_s(self, batch: BatchShape) -> float:
        return self._table.step_s(batch)


class _Calibrated:
    """A calibrated engine whose table is made once. Mutable: it keeps it."""

    def __init__(self, name: str) -> None:
        model, device, count = _ENGINES[name]
        catalog, fp8 = load_catalog(), NumberFormat.FP8
        shape = EngineShape(catalog.device(device), catalog.model(model), count, fp8, fp8)
        self._model = StepModel(shape, load_coefficients().coefficients)
        self._table = self._model.table(16_384)
        self.kv_capacity_tokens = kv_capacity_tokens(shape)

    def table(self, max_batched_tokens: int) -> StepTable:
        return self._table

    def step_s(self, batch: BatchShape) -> float:
        return self._model.step_s(batch)


@cache
def calibrated(name: str) -> _Calibrated:
    """The engine of this name."""
    return _Calibrated(name)


@dataclass(frozen=True, slots=True)
class Point:
    """One engine under one load. `model` "plain" is `GridSteps` with room for everything."""

    input_tokens: int
    output_tokens: int
    law: LengthLaw
    order: SchedulingOrder
    slots: int
    utilisation: float
    model: str = "plain"
    chunk_tokens: int = 8192
    cached_ratio: float = 0.0
    burstiness_cv2: float = 1.0

    def engine(self) -> ServingEngine:
        front = FrontEnd(0.01, 1e-6, 0.002) if self.model == "plain" else FrontEnd()
        steps = GridSteps() if self.model == "plain" else calibrated(self.model)
        room = 10_000_000 if self.model == "plain" else calibrated(self.model).kv_capacity_tokens
        return ServingEngine(steps, room, self.chunk_tokens, self.slots, order=self.order, front_end=front)

    def lengths(self) -> Lengths:
        return Lengths(
            self.input_tokens, self.output_tokens, self.law, self.cached_ratio, input_cv2=0.5, output_cv2=0.5
        )

    @property
    def kind(self) -> str:
        """The group that the summary counts it in."""
        if self.burstiness_cv2 > 1:
            return "bursts"
        if self.model == "plain":
            return "plain"
        if self.output_tokens == 1 or self.cached_ratio == 1:
            return "half of a split"
        sequences = calibrated(self.model).kv_capacity_tokens / (self.input_tokens + self.output_tokens / 2)
        return "few sequences" if sequences < _FEW else "chunked"

    @property
    def judged(self) -> bool:
        """Whether the bars hold here; the other kinds are named in `docs/performance-model.md`."""
        return self.kind not in ("bursts", "few sequences")


# Sequences that a cache holds below which the wait for room is not judged: one long prompt more or less decides.
_FEW = 64

# Prompts, answers, budgets, cached shares of the calibrated engines; their laws take turns.
_SHAPES = list(itertools.product(_ENGINES, (512, 2048, 8192), (200, 1500, 6000, 30_000), (20, 200, 2000), (0.0, 0.8)))
_LAWS = list(LengthLaw)


def _calibrated_points() -> Iterable[Point]:
    for index, (model, chunk, prompt, answer, cached) in enumerate(_SHAPES):
        for turn, utilisation in enumerate((0.5, 0.7, 0.9)):
            law = _LAWS[(index + index // 3 + turn) % 3]
            order = SchedulingOrder.PREFILL_FIRST if (index + turn) % 5 == 4 else SchedulingOrder.DECODE_FIRST
            slots = 64 if (index // 2 + turn) % 4 == 3 else 256
            yield Point(prompt, answer, law, order, slots, utilisation, model, chunk, cached)
            if (index + turn) % 3 == 2:
                yield Point(prompt, answer, law, order, slots, utilisation, model, chunk, cached, 4.0)


def _halves() -> Iterable[Point]:
    """Prompts alone and answers alone, as the pools of a split see them."""
    first = SchedulingOrder.DECODE_FIRST
    for model, prompt, utilisation in itertools.product(_ENGINES, (1500, 6000), (0.5, 0.7, 0.9)):
        yield Point(prompt, 1, LengthLaw.LOGNORMAL, first, 256, utilisation, model, 8192)
        yield Point(prompt, 200, LengthLaw.LOGNORMAL, first, 256, utilisation, model, 8192, 1.0)


PLAIN = [
    Point(*lengths, law, order, slots, utilisation)
    for lengths, law, order, slots, utilisation in itertools.product(
        [(256, 256), (1024, 256), (1024, 1024), (2048, 128), (4096, 512), (500, 500)],
        [LengthLaw.FIXED, LengthLaw.UNIFORM_08_10],
        [SchedulingOrder.DECODE_FIRST, SchedulingOrder.PREFILL_FIRST],
        [64, 256],
        list(BARS),
    )
]
CALIBRATED = list(_calibrated_points())
GRID = [*PLAIN, *CALIBRATED, *_halves()]

# What a run of six minutes takes of the calibrated points and of the closed loops: prime to the lengths of the lists
# that they are products of, so that every value is met.
_EVERY, _EVERY_CLOSED = 7, 5

# Closed loops: model, chunk, prompt, answer, clients.
CLOSED = list(itertools.product(_ENGINES, (512, 8192), (200, 1500, 6000), (200, 1000), (4, 32, 128)))


@dataclass(frozen=True, slots=True)
class Compared:
    """Relative errors of the analytic figures, the analytic call's seconds, and the simulated mean's standard error."""

    mean_error: float
    p99_error: float
    tpot_error: float
    rate_error: float
    call_s: float
    noise: float = 0.0


def capacity_per_s(point: Point) -> float:
    """The rate at which the analytic model sees the engine full."""
    return 0.001 / open_loop(point.engine(), point.lengths(), 0.001).utilisation_ratio


def _runs(point: Point, rate_per_s: float, request_count: int, seeds: Iterable[int]) -> NDArray[np.float64]:
    """Mean and p99 of TTFT in ms, mean TPOT in ms (not a number with answers of one token), requests a second: a row a
    seed.
    """
    rows, first = [], int(_WARM_UP * request_count)
    scenario = HarnessScenario(
        point.lengths(),
        ArrivalLaw.OPEN_LOOP,
        rate_per_s=rate_per_s,
        burstiness_cv2=point.burstiness_cv2,
        request_count=request_count,
    )
    for seed in seeds:
        run = replay_requests(point.engine(), scenario, seed)
        ttft_ms = run.ttft_s[first:] * 1e3
        tpot_ms = run.tpot_s[first:].mean() * 1e3 if point.output_tokens > 1 else math.nan
        rows.append((ttft_ms.mean(), np.percentile(ttft_ms, 99), tpot_ms, request_count / run.wall_s))
    return np.array(rows)


def noise(runs: NDArray[np.float64]) -> float:
    """Standard error of the mean TTFT over it; 0 for one run, which tells none."""
    means = runs[:, 0]
    return float(np.std(means, ddof=1) / means.mean() / math.sqrt(means.size)) if means.size > 1 else 0.0


def simulated(point: Point, rate_per_s: float, request_count: int) -> NDArray[np.float64]:
    """Runs of a point, `_runs`: two, or near capacity 16 and, where these are too noisy, longer ones instead."""
    seeds = _SEEDS.get(point.utilisation, 2)
    runs = _runs(point, rate_per_s, request_count, range(seeds))
    if point.utilisation not in _SEEDS or not point.judged or noise(runs) <= MOST_NOISE:
        return runs
    runs = _runs(point, rate_per_s, _LONG_REQUESTS, range(seeds))
    while noise(runs) > MOST_NOISE and len(runs) < _MOST_LONG_RUNS:
        more = _runs(point, rate_per_s, _LONG_REQUESTS, range(len(runs), len(runs) + seeds))
        runs = np.concatenate((runs, more))
    return runs


def compare(point: Point, request_count: int = 20_000, seeds: int | None = None) -> Compared:
    """Both models at one point; `seeds`: so many runs whatever their noise."""
    engine, lengths = point.engine(), point.lengths()
    rate = capacity_per_s(point) * point.utilisation
    start = time.perf_counter()
    told = open_loop(engine, lengths, rate, point.burstiness_cv2)
    call_s = time.perf_counter() - start
    runs = _runs(point, rate, request_count, range(seeds)) if seeds else simulated(point, rate, request_count)
    mean_ms, tail_ms, tpot_ms, served_per_s = runs.mean(axis=0)
    return Compared(
        mean_error=float(told.ttft_mean_ms / mean_ms - 1),
        p99_error=float(told.ttft_p99_ms / tail_ms - 1),
        tpot_error=float(told.tpot_mean_ms / tpot_ms - 1) if point.output_tokens > 1 else 0.0,
        rate_error=float(told.request_per_s / served_per_s - 1),
        call_s=call_s,
        noise=noise(runs),
    )


def compare_closed(model: str, chunk: int, prompt: int, answer: int, clients: int) -> Compared:
    """Both models of a closed loop whose lengths vary as InferenceX's do."""
    found = calibrated(model)
    engine = ServingEngine(found, found.kv_capacity_tokens, chunk, 256)
    lengths = Lengths.of_nominal(prompt, answer)
    start = time.perf_counter()
    told = closed_loop(engine, lengths, clients)
    call_s = time.perf_counter() - start
    shown = [replay(engine, HarnessScenario(lengths, concurrency=clients), seed) for seed in range(3)]
    return Compared(
        mean_error=float(told.ttft_mean_ms / np.mean([run.ttft_mean_ms for run in shown]) - 1),
        p99_error=float(told.ttft_p99_ms / np.mean([run.ttft_p99_ms for run in shown]) - 1),
        tpot_error=float(told.tpot_mean_ms / np.mean([run.tpot_mean_ms for run in shown]) - 1),
        rate_error=float(told.output_tok_per_s / np.mean([run.output_tok_per_s for run in shown]) - 1),
        call_s=call_s,
    )


def missed(point: Point, compared: Compared) -> str:
    """The bars that a point misses, in words; empty: none."""
    words = []
    if not abs(compared.mean_error) <= BARS[point.utilisation]:
        words.append("TTFT")
    if not abs(compared.tpot_error) <= TPOT_BAR:
        words.append("TPOT")
    return ", ".join(words)


def _line(name: str, of: Callable[[Compared], float], results: list[Compared]) -> str:
    errors = np.abs([of(compared) for compared in results])
    return f"{name} {np.median(errors):.3f} / {np.percentile(errors, 90):.3f} / {errors.max():.3f}"


def _summary(title: str, results: list[Compared], bar: float | None = None) -> None:
    """Median, 90th percentile and largest of the absolute errors."""
    parts = [
        _line("TTFT", lambda compared: compared.mean_error, results),
        _line("p99", lambda compared: compared.p99_error, results),
        _line("TPOT", lambda compared: compared.tpot_error, results),
        _line("tok/s", lambda compared: compared.rate_error, results),
    ]
    within = ""
    if bar is not None:
        late = sum(not abs(compared.mean_error) <= bar for compared in results)
        slow = sum(not abs(compared.tpot_error) <= TPOT_BAR for compared in results)
        within = f", outside {late} TTFT {slow} TPOT"
    noise = max(compared.noise for compared in results)
    print(f"{title:28s} n {len(results):4d}  {'  '.join(parts)}{within}, noise up to {noise:.3f}")


def main() -> None:
    """Print the grid; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_queueing")
    parser.add_argument("--all", action="store_true", help="all points (half an hour), not every seventh")
    every = 1 if parser.parse_args().all else _EVERY
    found: dict[tuple[str, float], list[Compared]] = defaultdict(list)
    failed, calls = 0, []
    for point in [*PLAIN, *CALIBRATED[::every], *_halves()]:
        compared = compare(point)
        found[point.kind, point.utilisation].append(compared)
        words = missed(point, compared)
        failed += bool(words) and point.judged
        calls.append(compared.call_s)
        print(
            f"{point.model:7s} {point.kind:15s} {point.input_tokens:5d}/{point.output_tokens:<5d} {point.law:16s} "
            f"{point.order:14s} chunk {point.chunk_tokens:4d} slots {point.slots:4d} cached {point.cached_ratio:.1f} "
            f"cv2 {point.burstiness_cv2:.0f} load {point.utilisation:.1f}: mean {compared.mean_error:+.3f} "
            f"p99 {compared.p99_error:+.3f} tpot {compared.tpot_error:+.3f} "
            f"noise {compared.noise:.3f} {compared.call_s * 1e6:6.0f} us"
            f"{'  MISSED ' + words if words else ''}",
            flush=True,
        )
    closed = [compare_closed(*case) for case in CLOSED[:: min(every, _EVERY_CLOSED)]]
    print("absolute errors: median / 90th percentile / largest")
    for (kind, utilisation), results in sorted(found.items()):
        _summary(f"{kind}, load {utilisation:.1f}", results, BARS[utilisation])
    _summary("closed loop", closed)
    print(f"one call: median {np.median(calls) * 1e6:.0f} us; {failed} judged points missed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
