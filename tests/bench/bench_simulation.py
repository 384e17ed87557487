"""How fast the simulation runs, and that its memory does not grow with time: `python -m tests.bench.bench_simulation`.

Owns: the case (mooncake_conversation copies at 100 requests/s on 32 engines, 512-token blocks, eviction on) and its
bars: one hour in 20 s of round robin and 60 s of our router, four hours in 1.1 times the memory of one. Does not own:
the trace, which is no part of this project: `--trace FILE`, by default the shared copy beside the checkout; without it
a generated trace of the same rate and lengths stands in, and says so. Each run is a process of its own; seconds are
the wall's and the processor's of the simulation alone, and the compiler's are reported apart.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from perfmodel.simulation.arrivals import OpenLoop
from perfmodel.simulation.fleet import EngineSpec
from perfmodel.simulation.run import simulate
from perfmodel.traces.copies import Copies
from perfmodel.traces.trace import Trace, trace_of

SHARED = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
RATE_PER_S, ENGINES, BLOCK_TOKENS, WINDOW_S = 100.0, 32, 512, 30.0
BARS_S = {"round_robin": 20.0, "inferplane_route": 60.0}
MEMORY_BAR_RATIO = 1.1


def stand_in() -> Trace:
    """2,400 s at 3.27 requests/s of sessions with the published lengths (12,428 in, 347 out, four tenths shared)."""
    dice = np.random.default_rng(0)
    count = 7_851
    prompts = np.clip(np.exp(dice.normal(8.9, 1.0, count)), 64, 120_000).astype(int)
    sessions = dice.integers(0, 4_900, count)
    blocks = [
        [0 if depth == 0 else int(session) * 1000 + depth for depth in range(tokens // BLOCK_TOKENS)]
        for session, tokens in zip(sessions, prompts.tolist(), strict=True)
    ]
    columns = {
        "arrival_s": np.sort(dice.uniform(0, 2_400, count)).tolist(),
        "session": sessions.tolist(),
        "input_tokens": prompts.tolist(),
        "output_tokens": np.clip(dice.exponential(347, count), 1, 2_000).astype(int).tolist(),
        "tier": [0] * count,
    }
    return trace_of(columns, blocks, BLOCK_TOKENS)


def windows(base: Trace, hours: float) -> Iterator[Trace]:
    """Copies of the trace at the bench's rate for so many hours."""
    end_s = hours * 3600
    count = round(RATE_PER_S / (len(base) / base.span_s))
    rounds = math.ceil(end_s / base.span_s)
    for window in Copies(base, count, 0, repeat_count=rounds).windows(WINDOW_S):
        if window.arrival_s[-1] < end_s:
            yield window
            continue
        yield window.window(0.0, end_s)
        return


def once(path: Path, policy: str, hours: float) -> dict[str, object]:
    """One run in this process."""
    from perfmodel import memory
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.coefficient_file import load_coefficients
    from perfmodel.adapters.compiled_code import remember_compiled_code
    from perfmodel.adapters.traces import read_trace
    from perfmodel.step_time import StepModel
    from router.adapters import policies

    base = read_trace(path) if path.exists() else stand_in()
    catalog = load_catalog()
    shape = catalog.shape("H100", "Llama-3.1-8B", 8)
    per_token = memory.kv_bytes_per_token(shape)
    table = StepModel(shape, load_coefficients().coefficients).table(8192)
    spec = EngineSpec("p", table, memory.kv_capacity_tokens(shape), per_token, count=ENGINES)
    remember_compiled_code()
    before = time.perf_counter()
    simulate([spec], OpenLoop([base.window(0.0, 3.0)]), policies.round_robin)
    started = time.perf_counter(), time.process_time()
    result = simulate([spec], OpenLoop(windows(base, hours)), getattr(policies, policy))
    return {
        "policy": policy,
        "hours": hours,
        "trace": path.name if path.exists() else "stand-in (generated)",
        "wall_s": round(time.perf_counter() - started[0], 2),
        "cpu_s": round(time.process_time() - started[1], 2),
        "first_call_s": round(started[0] - before, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "requests": result.requests,
        "ttft_p99_s": result.ttft.p99_s,
        "busy_ratio": round(max(engine.busy_ratio for engine in result.engines), 3),
        "hit_ratio": result.prefix_hit_ratio,
        "goodput_ratio": result.goodput_ratio,
    }


def apart(path: Path, policy: str, hours: float) -> dict[str, object]:
    """One run in a process of its own."""
    words = ["--trace", str(path), "--once", policy, "--hours", str(hours)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_simulation", *words], check=True, capture_output=True, text=True
    )
    row: dict[str, object] = json.loads(done.stdout)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """All cases; medians of `--rounds`."""
    parser = argparse.ArgumentParser(prog="bench_simulation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=SHARED)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the medians here")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every bar is held")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.trace, options.once, options.hours)))
        return
    medians: dict[str, object] = {}
    missed = []
    for policy, bar_s in BARS_S.items():
        rows = [apart(options.trace, policy, options.hours) for _ in range(options.rounds)]
        wall_s = statistics.median(float(str(row["wall_s"])) for row in rows)
        medians[f"{policy}_wall_s"] = wall_s
        medians[f"{policy}_cpu_s"] = statistics.median(float(str(row["cpu_s"])) for row in rows)
        if wall_s > bar_s * options.hours:
            missed.append(f"{policy} took {wall_s} s of {bar_s * options.hours}")
        if policy == "round_robin":
            short_mib = statistics.median(float(str(row["peak_mib"])) for row in rows)
    long_mib = float(str(apart(options.trace, "round_robin", 4 * options.hours)["peak_mib"]))
    medians["memory_ratio"] = round(long_mib / short_mib, 3)
    if long_mib > MEMORY_BAR_RATIO * short_mib:
        missed.append(f"four times the time took {long_mib / short_mib:.2f} times the memory")
    print(json.dumps(medians))
    if options.json:
        options.json.write_text(json.dumps(medians))
    if options.check and missed:
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
