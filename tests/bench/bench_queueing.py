"""The analytic queue against a simulated one, over a grid of engines, lengths and loads: error by load, and its cost.

Owns: the grid (`GRID`; a test runs a part of it) and the comparison. Does not own: either model. Run it with
`python -m tests.bench.bench_queueing`; it prints one line a point and the summary, and exits 1 when a bar is missed:
mean TTFT within 10 % at a utilisation of up to 0.7 and within 25 % at 0.9. The 99th percentile is printed, not judged.
The simulation is `harness.replay_requests` with Poisson or Gamma arrivals: a seeded run of one engine, event by event.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass

import numpy as np

from perfmodel.harness import ArrivalLaw, HarnessScenario, replay_requests
from perfmodel.queueing import open_loop
from perfmodel.serving import FrontEnd, LengthLaw, Lengths, SchedulingOrder, ServingEngine
from perfmodel.step_time import BatchShape, StepTable

# The share of a run that is not counted: the engine starts empty.
_WARM_UP = 0.1

# Bars of mean TTFT by utilisation.
BARS = {0.3: 0.10, 0.5: 0.10, 0.7: 0.10, 0.9: 0.25}


class GridSteps:
    """A 70B-like engine on four H100s: 8 ms of weights, 60 us a token, 20 ns a context token, 5 ms a prefill step."""

    def __init__(self, largest: int = 16_384) -> None:
        tokens = np.arange(largest + 1, dtype=np.float64)
        self._table = StepTable(0.008 + 6e-5 * tokens, 2e-6, 2e-8, 1e-9, 5e-9)

    def table(self, max_batched_tokens: int) -> StepTable:
        return self._table

    def step_s(self, batch: BatchShape) -> float:
        return self._table.step_s(batch)


@dataclass(frozen=True, slots=True)
class Point:
    """One engine under one load."""

    input_tokens: int
    output_tokens: int
    law: LengthLaw
    order: SchedulingOrder
    slots: int
    utilisation: float

    def engine(self) -> ServingEngine:
        return ServingEngine(
            GridSteps(), 10_000_000, 8192, self.slots, order=self.order, front_end=FrontEnd(0.01, 1e-6, 0.002)
        )

    def lengths(self) -> Lengths:
        return Lengths(self.input_tokens, self.output_tokens, self.law, input_cv2=0.5, output_cv2=0.5)


GRID = [
    Point(*lengths, law, order, slots, utilisation)
    for lengths, law, order, slots, utilisation in itertools.product(
        [(256, 256), (1024, 256), (1024, 1024), (2048, 128), (4096, 512), (500, 500)],
        [LengthLaw.FIXED, LengthLaw.UNIFORM_08_10],
        [SchedulingOrder.DECODE_FIRST, SchedulingOrder.PREFILL_FIRST],
        [64, 256],
        list(BARS),
    )
]


@dataclass(frozen=True, slots=True)
class Compared:
    """Relative errors of the analytic figures, and the analytic call's seconds."""

    mean_error: float
    p99_error: float
    tpot_error: float
    call_s: float


def capacity_per_s(point: Point) -> float:
    """The rate at which the analytic model sees the engine full."""
    return 1.0 / open_loop(point.engine(), point.lengths(), 1.0).utilisation_ratio


def compare(point: Point, request_count: int = 20_000, seeds: int = 2) -> Compared:
    """Both models at one point."""
    engine, lengths = point.engine(), point.lengths()
    rate = capacity_per_s(point) * point.utilisation
    start = time.perf_counter()
    told = open_loop(engine, lengths, rate)
    call_s = time.perf_counter() - start
    means, tails, tpots = [], [], []
    for seed in range(seeds):
        scenario = HarnessScenario(lengths, ArrivalLaw.OPEN_LOOP, rate_per_s=rate, request_count=request_count)
        run = replay_requests(engine, scenario, seed)
        ttft_ms = run.ttft_s[int(_WARM_UP * request_count) :] * 1e3
        means.append(ttft_ms.mean())
        tails.append(np.percentile(ttft_ms, 99))
        tpots.append(run.tpot_s[int(_WARM_UP * request_count) :].mean() * 1e3)
    return Compared(
        mean_error=float(told.ttft_mean_ms / np.mean(means) - 1),
        p99_error=float(told.ttft_p99_ms / np.mean(tails) - 1),
        tpot_error=float(told.tpot_mean_ms / np.mean(tpots) - 1),
        call_s=call_s,
    )


def main() -> None:
    """Print the grid; exit 1 when a bar is missed."""
    found: dict[float, list[Compared]] = {utilisation: [] for utilisation in BARS}
    missed = 0
    for point in GRID:
        compared = compare(point)
        found[point.utilisation].append(compared)
        over = abs(compared.mean_error) > BARS[point.utilisation]
        missed += over
        print(
            f"{point.input_tokens:5d}/{point.output_tokens:<5d} {point.law:16s} {point.order:14s} "
            f"slots {point.slots:4d} "
            f"load {point.utilisation:.1f}: mean {compared.mean_error:+.3f} p99 {compared.p99_error:+.3f} "
            f"tpot {compared.tpot_error:+.3f} {compared.call_s * 1e6:6.0f} us{'  MISSED' if over else ''}"
        )
    for utilisation, results in found.items():
        errors = np.abs([compared.mean_error for compared in results])
        tails = np.abs([compared.p99_error for compared in results])
        calls = [compared.call_s for compared in results]
        print(
            f"load {utilisation:.1f}: mean TTFT error median {np.median(errors):.3f} largest {errors.max():.3f}, "
            f"p99 median {np.median(tails):.3f} largest {tails.max():.3f}, call {np.median(calls) * 1e6:.0f} us"
        )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
