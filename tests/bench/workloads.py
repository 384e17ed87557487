"""What is asked of each gateway, and how one run of it becomes figures.

Owns: the six loads, the warm-up, one measured run (load, CPU time, memory, noise) and medians over runs. Does not own:
which gateways there are, or how results are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench.machine import Affinity, BenchError, busy_s, cpu_s, resident_mb, tree, waited_s
from tests.bench.native import run_load


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load. Runs end after `requests_count` or `seconds_s`, whichever is first."""

    name: str
    connections_count: int
    requests_count: int
    seconds_s: float
    warmup_count: int = 0
    stream: bool = False
    max_tokens: int = 2
    interval_us: int = 0
    pad_bytes: int = 0

    def options(self) -> list[object]:
        """For `load`, without port, keys and time."""
        made: list[object] = ["--connections", self.connections_count, "--requests", self.requests_count]
        made += ["--warmup", self.warmup_count, "--max-tokens", self.max_tokens, "--pad-bytes", self.pad_bytes]
        return [*made, "--stream", int(self.stream), "--interval-us", self.interval_us]


LATENCY, RATE, TTFT, BURST, PACED, LONG = "latency", "rate", "ttft", "burst", "paced", "long"
# The prompts of the performance target: 119,000 tokens at 4 bytes.
_LONG_BYTES = 480_000
# 256 streams with a chunk each 10 ms: 25,600 chunks/s offered, near what one core carries with a write per chunk.
_PACED_STREAMS, _PACED_US = 256, 10_000
WORKLOADS = (
    Workload(LATENCY, 1, 4_000, 2.0, warmup_count=200),
    Workload(RATE, 64, 60_000, 3.0, warmup_count=500),
    Workload(TTFT, 1, 1_000, 2.0, warmup_count=20, stream=True, max_tokens=64),
    Workload(BURST, 64, 8_000, 3.0, warmup_count=64, stream=True, max_tokens=64),
    Workload(PACED, _PACED_STREAMS, 8_000, 3.0, stream=True, max_tokens=64, interval_us=_PACED_US),
    Workload(LONG, 1, 150, 4.0, warmup_count=5, pad_bytes=_LONG_BYTES),
)
# Runs of --quick: enough to see a factor, not enough to publish.
QUICK_SHARE = 0.4


def quick(load: Workload) -> Workload:
    """A shorter run of the same."""
    return replace(load, seconds_s=max(0.8, load.seconds_s * QUICK_SHARE), warmup_count=load.warmup_count // 2)


def for_slow(load: Workload) -> Workload:
    """The same without a warm-up, for a gateway whose warm-up would take longer than the run."""
    return replace(load, warmup_count=0)


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway, or the engine stub itself, as loads see it."""

    name: str
    port: int
    keys_file: Path | None
    gateway_pids: Callable[[], Sequence[int]]
    """The processes whose CPU time counts as the gateway's."""
    side_pids: Sequence[int] = ()
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Bench:
    """What runs need."""

    load_program: Path
    affinity: Affinity
    stub_pid: int
    model: str
    own_pids: Callable[[], Sequence[int]]
    """Every process of this benchmark: what else is busy is noise."""


# First uses (imports, connections, leases of each key) are over after so many requests.
_WARM = Workload("warm-up", 8, 1_000, 5.0)
_WARM_STREAMS = Workload("warm-up", 8, 100, 5.0, stream=True, max_tokens=64)


def warm(bench: Bench, target: Target) -> None:
    """Once before the first run of a target. What goes wrong here shows in the runs."""
    for load in (_WARM, _WARM_STREAMS):
        run_load(bench.load_program, bench.affinity, _options(bench, target, load), load.seconds_s)


def _options(bench: Bench, target: Target, load: Workload) -> list[object]:
    keys: list[object] = [] if target.keys_file is None else ["--keys", target.keys_file]
    return ["--port", target.port, "--model", bench.model, *load.options(), *keys]


def run(bench: Bench, target: Target, load: Workload) -> dict[str, Any]:
    """One measured run. Raises BenchError when answers were wrong."""
    load = for_slow(load) if target.slow else load
    gateway = target.gateway_pids()
    before = _counters(bench, target, gateway)
    made = run_load(bench.load_program, bench.affinity, _options(bench, target, load), load.seconds_s)
    after = _counters(bench, target, gateway)
    figures = made.figures
    spent = {name: after[name] - before[name] for name in before}
    wall_s = spent["wall_s"]
    sent = max(1, figures["ok"] + figures["refused"] + load.warmup_count)
    chunks = max(1, figures["chunks"]) * sent / max(1, figures["ok"])
    foreign_s = max(0.0, spent["busy_s"] - spent["own_s"] - made.cpu_s)
    record = {
        "target": target.name, "load": load.name, **figures,
        "gateway_cpu_us_per_request": round(1e6 * spent["gateway_s"] / sent, 2),
        "side_cpu_us_per_request": round(1e6 * spent["side_s"] / sent, 2),
        "gateway_cpu_us_per_chunk": round(1e6 * spent["gateway_s"] / chunks, 2) if load.stream else None,
        "gateway_cpu_ratio": round(spent["gateway_s"] / wall_s, 3),
        "gateway_waited_ratio": round(spent["waited_s"] / wall_s, 3),
        "foreign_cpu_ratio": round(foreign_s / wall_s, 3),
        "steal_cpu_ratio": round(spent["steal_s"] / wall_s, 3),
        "gateway_mb": resident_mb(gateway),
        "wall_s": round(wall_s, 3),
    }  # fmt: skip
    _check(record)
    return record


def _counters(bench: Bench, target: Target, gateway: Sequence[int]) -> dict[str, float]:
    busy, steal = busy_s()
    return {
        "wall_s": time.monotonic(),
        "gateway_s": cpu_s(gateway),
        "side_s": cpu_s(target.side_pids),
        "waited_s": waited_s(gateway[0]) if gateway else 0.0,
        "own_s": cpu_s(bench.own_pids()),
        "busy_s": busy,
        "steal_s": steal,
    }


def _check(record: dict[str, Any]) -> None:
    wrong = {name: record[name] for name in ("refused", "errors", "cut_streams") if record[name]}
    if wrong or not record["ok"]:
        told = ", ".join(f"{count} {name}" for name, count in wrong.items()) or "no answer"
        raise BenchError(f"{record['target']}, {record['load']}: {told} ({record['first_error'] or 'no message'}).")


def own_processes(root_pid: int) -> list[int]:
    """The benchmark and all that it started."""
    return tree(root_pid)


def flat(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a run, by dotted name."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found.update({f"{name}.{part}": each for part, each in value.items()})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over rounds."""

    median: float
    least: float
    most: float
    runs_count: int


def spreads(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Spread]]:
    """By target and load: each figure's median and range."""
    grouped: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in records:
        figures = grouped.setdefault((record["target"], record["load"]), {})
        for name, value in flat(record).items():
            figures.setdefault(name, []).append(value)
    return {
        place: {
            name: Spread(statistics.median(values), min(values), max(values), len(values))
            for name, values in figures.items()
        }
        for place, figures in grouped.items()
    }
