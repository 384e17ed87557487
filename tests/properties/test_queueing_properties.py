"""Properties of the analytic queue on any engine, from almost no load to near its capacity; planted faults are caught.

Engines, prompts, answers, replicas and burstiness are drawn, as are the two halves of a split: prompts alone and
answers alone. The limit of no load is not the model's own word: it is one request, played out by the replay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel.harness import ArrivalLaw, HarnessScenario, replay_requests
from perfmodel.queueing import loops
from perfmodel.queueing.load import Load, Settled
from perfmodel.queueing.loops import open_loop
from perfmodel.queueing.work import Work
from perfmodel.serving import LengthLaw, Lengths, SchedulingOrder, Served, ServingEngine
from perfmodel.step_time import BatchShape, StepTable
from tests.exploring import examples

# Mean requests present at which an engine is asked, were each alone: as good as none.
LIGHT = (1e-6, 1e-4)

# Shares of the capacity at which it is asked besides.
LOADS = (0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)

# How much a figure may fall from one load to the next: the sample of arrivals is finite.
FALL = 0.03

# How far below one request alone a figure may be, and how far off it at almost no load: prompts that are not a whole
# number of tokens or steps.
BELOW, OFF = 0.02, 0.02


class TableSteps:
    """An engine whose steps are a table."""

    def __init__(self, table: StepTable) -> None:
        self._table = table

    def table(self, max_batched_tokens: int) -> StepTable:
        return self._table

    def step_s(self, batch: BatchShape) -> float:
        return self._table.step_s(batch)


@dataclass(frozen=True)
class Case:
    """One engine and its requests."""

    engine: ServingEngine
    lengths: Lengths
    burstiness_cv2: float

    def served(self) -> list[Served]:
        capacity = 1.0 / open_loop(self.engine, self.lengths, 1.0).utilisation_ratio
        ttft_ms, tpot_ms = self.alone_ms()
        stay_s = (ttft_ms + tpot_ms * (self.lengths.output_tokens - 1)) / 1e3
        rates = [present / stay_s * self.engine.replicas for present in LIGHT]
        rates += [load * capacity for load in LOADS if load * capacity > rates[-1]]
        return [open_loop(self.engine, self.lengths, rate, self.burstiness_cv2) for rate in rates]

    def alone_ms(self) -> tuple[float, float]:
        """TTFT and TPOT of one request that nobody else is there with."""
        one = Lengths(
            round(self.lengths.input_tokens), round(self.lengths.output_tokens), cached_ratio=self.lengths.cached_ratio
        )
        scenario = HarnessScenario(one, ArrivalLaw.OPEN_LOOP, rate_per_s=1.0, request_count=1)
        run = replay_requests(self.engine, scenario, seed=0)
        return float(run.ttft_s[0] * 1e3), float(run.tpot_s[0] * 1e3) if one.output_tokens > 1 else 0.0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def log(low: float, high: float) -> float:
        return math.exp(draw(st.floats(math.log(low), math.log(high))))

    budget = draw(st.sampled_from((256, 512, 2048, 8192)))
    tokens = np.arange(max(budget, 1024) + 1, dtype=np.float64)
    weights_s, knee = log(1e-3, 0.05), log(32, 512)
    by_token_s = weights_s * np.maximum(1.0, tokens / knee) if draw(st.booleans()) else weights_s * (1 + tokens / knee)
    table = StepTable(by_token_s, log(1e-7, 1e-5), log(1e-9, 1e-7), log(1e-11, 3e-9), log(1e-11, 1e-8), log(1e-5, 5e-3))
    role = draw(st.sampled_from(("both", "prefill", "decode")))
    lengths = Lengths(
        round(log(20, 30_000)),
        1 if role == "prefill" else round(log(2, 2_000)),
        draw(st.sampled_from(LengthLaw)),
        1.0 if role == "decode" else draw(st.sampled_from((0.0, 0.0, 0.8))),
    )
    sequences = draw(st.sampled_from((16, 64, 256, 1024)))
    engine = ServingEngine(
        TableSteps(table),
        round(3.1 * (lengths.input_tokens + lengths.output_tokens) * log(2, 2 * sequences)) + 1,
        budget,
        sequences,
        draw(st.sampled_from((1, 2, 4, 12, 16, 32))),
        draw(
            st.sampled_from((SchedulingOrder.DECODE_FIRST, SchedulingOrder.DECODE_FIRST, SchedulingOrder.PREFILL_FIRST))
        ),
        launch_s=draw(st.sampled_from((0.0, 0.01))),
    )
    return Case(engine, lengths, draw(st.sampled_from((0.0, 0.5, 1.0, 1.0, 4.0))))


def check(case: Case) -> None:
    served, alone = case.served(), case.alone_ms()
    ttft, tpot = [one.ttft_mean_ms for one in served], [one.tpot_mean_ms for one in served]
    for one in served:
        for name in ("ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_mean_ms", "output_tok_per_s"):
            assert math.isfinite(getattr(one, name)), (name, one)
        assert 0 <= one.batch_mean <= case.engine.max_sequence_count * (1 + 1e-9), one
    for figures, least in ((ttft, alone[0]), (tpot, alone[1])):
        assert min(figures) >= least * (1 - BELOW), (figures, least)
        for earlier, later in itertools.pairwise(figures):
            assert later >= earlier * (1 - FALL), figures
        assert figures[1] <= figures[0] * (1 + OFF), figures  # no step on the way to no load
    if case.lengths.law is LengthLaw.FIXED:
        assert ttft[0] == pytest.approx(alone[0], rel=OFF)
        assert case.lengths.output_tokens == 1 or tpot[0] == pytest.approx(alone[1], rel=OFF)
