"""How fast the simulated engine runs offline: steps and tokens a second, and the cost of a very long prompt.

Not a test: figures depend on the machine. Run it with `python -m tests.bench.bench_engine_core`; each line is the best
of five rounds, because a shared machine only ever adds time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from perfmodel.scheduler import EngineConfig, EngineCore
from perfmodel.step_time import BatchShape
from perfmodel.workload import SimRequest

ROUNDS = 5


class FixedTiming:
    def step_s(self, batch: BatchShape) -> float:
        return 0.01


def drain(core: EngineCore) -> tuple[int, int]:
    """(steps, tokens) until the engine is idle."""
    steps, tokens, now_s = 0, 0, 0.0
    while (outcome := core.step(now_s)) is not None:
        steps += 1
        tokens += len(outcome.outputs)
        now_s = outcome.ends_at_s
    return steps, tokens


def best_of(measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(ROUNDS))


def decode_seconds_per_step(sequence_count: int, token_count: int = 400) -> float:
    core = EngineCore(EngineConfig(block_count=60_000), FixedTiming())
    prompt = np.arange(400, dtype=np.uint32)
    for number in range(sequence_count):
        core.submit(SimRequest(f"r{number}", prompt, token_count, ignore_eos=True), 0.0)
    start = time.perf_counter()
    steps, _ = drain(core)
    return (time.perf_counter() - start) / steps


def prompt_seconds(token_count: int) -> tuple[float, float]:
    """(seconds to hash and queue, seconds of all its prefill steps) of one new prompt."""
    core = EngineCore(EngineConfig(block_count=20_000), FixedTiming())
    request = SimRequest("r", np.arange(token_count, dtype=np.uint32), 1)
    start = time.perf_counter()
    core.submit(request, 0.0)
    queued = time.perf_counter()
    drain(core)
    return queued - start, time.perf_counter() - queued


def main() -> None:
    for sequence_count in (1, 8, 64, 256):
        step_s = best_of(lambda count=sequence_count: decode_seconds_per_step(count))  # type: ignore[misc]  # default binds
        print(f"{sequence_count:4d} sequences: {1 / step_s:9,.0f} steps/s {sequence_count / step_s:11,.0f} tokens/s")
    for token_count in (20_000, 119_000):
        rounds = [prompt_seconds(token_count) for _ in range(ROUNDS)]
        submit_s, prefill_s = (min(column) for column in zip(*rounds, strict=True))
        print(f"{token_count:7,d} token prompt: submit {submit_s * 1e3:.2f} ms, prefill steps {prefill_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
