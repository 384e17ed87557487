"""Runs of `perf simulate` side by side: traces, copies, policies, engine counts and seeds, over cores or a cluster.

Owns: which runs there are and their order, one run as a job that any worker can do, and what a sweep shows: its JSON,
table and plot. Does not own: the simulation (`simulation`), where jobs run (`sweeps`) or the options (`perf_simulate`).
A run is made of the values in `World` and `Run` alone, so it is the same on every worker; nothing is read there but the
policy's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import typer

from perfmodel.adapters.compiled_code import remember_compiled_code
from perfmodel.adapters.perf_table import counted, print_table
from perfmodel.adapters.policy_names import policy_factory
from perfmodel.errors import ConfigError
from perfmodel.simulation.arrivals import ClosedLoop, OpenLoop
from perfmodel.simulation.fleet import EngineSpec, memory_bytes
from perfmodel.simulation.run import SimOptions, SimResult, simulate
from perfmodel.traces.copies import Copies
from perfmodel.traces.trace import Trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Seconds of arrivals that are in memory at once: at 100 requests/s a window of long prompts is a few MB.
WINDOW_S = 30.0

# Keys of a run that say which it is; seeds of one configuration are pooled.
_CONFIGURATION = ("trace", "copies", "policy", "replicas")
# Figures of a run that the summary takes the mean of; those in parts part by part.
_TOLD = ("ttft_ms", "tpot_ms", "prefix_hit_ratio", "output_tok_per_s", "goodput_ratio", "sim_s")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a sweep. `replicas` None: an engines file says how many."""

    trace: str
    copies: int
    policy: str
    replicas: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class World:
    """What the runs share: traces by name, engines by their number, how long and how a trace is played, the promise.

    `settings`: of policies, as typed, by policy.
    """

    traces: Mapping[str, Trace]
    engines: Mapping[int | None, tuple[EngineSpec, ...]]
    options: SimOptions
    duration_s: float | None = None
    closed_loop: bool = False
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of each kind that a sweep combines."""

    traces: tuple[str, ...]
    copies: tuple[int, ...]
    policies: tuple[str, ...]
    replicas: tuple[int | None, ...]
    seeds: tuple[int, ...]

    def runs(self) -> list[Run]:
        """All combinations; the seeds of one configuration follow one another."""
        return [Run(*values) for values in product(self.traces, self.copies, self.policies, self.replicas, self.seeds)]


def play(world: World, run: Run) -> SimResult:
    """One run, as a job for any worker."""
    remember_compiled_code()
    return played(world, run)


def played(world: World, run: Run, progress: Callable[[int], None] | None = None) -> SimResult:
    """One run. Raises ConfigError for options that cannot be played, memory that is not enough included."""
    factory = policy_factory(run.policy, world.settings.get(run.policy))
    options = replace(world.options, seed=run.seed, policy_name=run.policy)
    try:
        workload, _ = workload_of(world, run)
        return simulate(world.engines[run.replicas], workload, factory, options, progress)
    except MemoryError:
        raise ConfigError(
            f"the memory is not enough for {run.copies:,} copies of the trace on these engines; expected fewer copies, "
            "fewer engines or a shorter trace"
        ) from None


# A window's requests are held as its parts, as the joined trace and sorted: three times. [counted in `copies.windows`]
_HELD_TIMES = 3
# Bytes of a copy that has a request in a window, beside its rows: arrays of a few rows are mostly their headers.
_PART_BYTES = 2_000


def check_memory(world: World, run: Run, free_bytes: float) -> None:
    """Raises ConfigError where a run's engines, or one window of its copies, would not fit into `free_bytes`."""
    trace = world.traces[run.trace]
    fleet_bytes = memory_bytes(world.engines[run.replicas], trace.block_tokens)
    if fleet_bytes > free_bytes:
        count = sum(spec.count for spec in world.engines[run.replicas])
        raise ConfigError(
            f"the KV blocks of {counted(count, 'engine')} would take {fleet_bytes / 1e9:,.1f} GB of memory here and "
            f"{free_bytes / 1e9:,.1f} GB are free; expected fewer engines (--replicas), or a trace with wider blocks "
            f"than {trace.block_tokens or 16} tokens"
        )
    row_bytes = 64 + trace.blocks.nbytes / len(trace)
    most = len(trace)
    if not world.closed_loop:
        ends = np.searchsorted(trace.arrival_s, trace.arrival_s + WINDOW_S)
        most = int((ends - np.arange(len(trace))).max())
    window_bytes = run.copies * (_PART_BYTES + _HELD_TIMES * most * row_bytes)
    if fleet_bytes + window_bytes > free_bytes:
        raise ConfigError(
            f"--copies is {run.copies:,}, whose requests of {WINDOW_S:.0f} s would take {window_bytes / 1e9:,.1f} GB "
            f"of memory and {free_bytes / 1e9:,.1f} GB are free; expected fewer copies"
        )


def workload_of(world: World, run: Run) -> tuple[OpenLoop | ClosedLoop, int]:
    """The workload and about how many requests it has."""
    base, duration_s = world.traces[run.trace], world.duration_s
    rounds = 1
    single = Copies(base, 1, run.seed)
    if duration_s is not None and single.round_s > 0:
        rounds = math.ceil(duration_s / single.round_s)
    whole = Copies(base, run.copies, run.seed, repeat_count=rounds)
    if world.closed_loop:
        full = whole.whole().with_think_times()
        full = full if duration_s is None else full.window(0.0, duration_s)
        return ClosedLoop(full), len(full)
    share = 1.0 if duration_s is None or not single.round_s else min(1.0, duration_s / (rounds * single.round_s))
    return OpenLoop(_windows(whole, math.inf if duration_s is None else duration_s)), int(whole.request_count * share)


def _windows(copies: Copies, end_s: float) -> Iterator[Trace]:
    for window in copies.windows(WINDOW_S):
        if window.arrival_s[-1] < end_s:
            yield window
            continue
        last = window.window(0.0, end_s)  # a window from 0 keeps its times
        if len(last):
            yield last
        return


# What a sweep shows


def named(run: Run, engine_count: int, figures: Mapping[str, object]) -> dict[str, object]:
    """A run's figures behind what says which run it is."""
    return {
        "trace": run.trace,
        "copies": run.copies,
        "policy": run.policy,
        "replicas": engine_count if run.replicas is None else run.replicas,
        "seed": run.seed,
        **figures,
    }


def summary(runs: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """One entry a configuration: the mean of each figure over its seeds, and goodput's lowest and highest."""
    pools: dict[tuple[object, ...], list[Mapping[str, object]]] = {}
    for run in runs:
        pools.setdefault(tuple(run[name] for name in _CONFIGURATION), []).append(run)
    found: list[dict[str, object]] = []
    for key, pool in pools.items():
        entry: dict[str, object] = {**dict(zip(_CONFIGURATION, key, strict=True)), "seeds": len(pool)}
        for name in _TOLD:
            entry[name] = _mean([run[name] for run in pool])
        shares = [run["goodput_ratio"] for run in pool]
        known = [share for share in shares if isinstance(share, float)]
        entry["goodput_ratio_lowest"] = min(known, default=None)
        entry["goodput_ratio_highest"] = max(known, default=None)
        found.append(entry)
    return found


def _mean(values: Sequence[object]) -> object:
    """Of numbers, or part by part of objects; None where one is not known."""
    first = values[0]
    if isinstance(first, Mapping):
        return {part: _mean([value[part] for value in values if isinstance(value, Mapping)]) for part in first}
    known = [float(value) for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if len(known) == len(values) else None


def show(entries: Sequence[Mapping[str, object]], wall_s: float) -> None:
    """The summary as a table; a column that is the same everywhere is said above it."""
    varied = [name for name in _CONFIGURATION if len({str(entry[name]) for entry in entries}) > 1]
    same = [f"{name} {entries[0][name]}" for name in _CONFIGURATION if name not in varied]
    columns = [*varied, "goodput", "TTFT mean / p95", "TPOT p50", "prefix hits", "output tok/s"]
    rows = []
    for entry in entries:
        ttft, tpot = entry["ttft_ms"], entry["tpot_ms"]
        assert isinstance(ttft, dict) and isinstance(tpot, dict)
        rows.append(
            [
                *(str(entry[name]) for name in varied),
                _spread(entry),
                f"{duration_words(ttft['mean'])} / {duration_words(ttft['p95'])}",
                duration_words(tpot["p50"]),
                _percent(entry["prefix_hit_ratio"]),
                f"{entry['output_tok_per_s']:,.0f}",
            ]
        )
    print_table(", ".join(same), columns, rows, left=("trace", "policy"))
    count = entries[0]["seeds"]
    means = f"means over {count} seeds, goodput with its lowest and highest; " if count != 1 else ""
    typer.echo(f"{means}{wall_s:.1f} s of work")


def _spread(entry: Mapping[str, object]) -> str:
    mean = _percent(entry["goodput_ratio"])
    if entry["seeds"] == 1 or entry["goodput_ratio"] is None:
        return mean
    return f"{mean} ({_percent(entry['goodput_ratio_lowest'])} to {_percent(entry['goodput_ratio_highest'])})"


def _percent(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) else "-"


# Milliseconds of 10 s and of 10 min: from there a time reads better in s and in min.
_SECONDS_FROM_MS, _MINUTES_FROM_MS = 10_000.0, 600_000.0


def duration_words(value_ms: float | None) -> str:
    """A time with the unit that a reader wants."""
    if value_ms is None:
        return "-"
    if value_ms < _SECONDS_FROM_MS:
        return f"{value_ms:,.1f} ms"
    if value_ms < _MINUTES_FROM_MS:
        return f"{value_ms / 1e3:,.1f} s"
    return f"{value_ms / 60e3:,.1f} min"


def figure(entries: Sequence[Mapping[str, object]], slo_ttft_s: float) -> Figure:
    """Goodput and TTFT of all configurations: over engines or copies where these vary, else side by side."""
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    over = next((name for name in ("replicas", "copies") if len({str(e[name]) for e in entries}) > 1), None)
    others = [name for name in _CONFIGURATION if name != over and len({str(e[name]) for e in entries}) > 1]
    lines: dict[str, list[Mapping[str, object]]] = {}
    for entry in entries:
        lines.setdefault(", ".join(str(entry[name]) for name in others) if over else "", []).append(entry)
    drawn = make_subplots(rows=1, cols=2, subplot_titles=("Requests within the promise", "Time to first token, p95"))
    for place, (label, line) in enumerate(lines.items()):
        style = {"color": qualitative.Plotly[place % len(qualitative.Plotly)]}
        x = [entry[over] if over else ", ".join(str(entry[name]) for name in others) for entry in line]
        shares = [entry["goodput_ratio"] for entry in line]
        kept = [100 * share if isinstance(share, float) else None for share in shares]
        common = {"x": x, "mode": "lines+markers" if over else "markers", "legendgroup": label, "marker": style}
        drawn.add_scatter(y=kept, error_y=_bars(line), name=label, showlegend=bool(label), row=1, col=1, **common)
        waits = [_part(entry["ttft_ms"], "p95") for entry in line]
        drawn.add_scatter(y=waits, name=label, showlegend=False, row=1, col=2, **common)
    # A label of the line itself: an annotation on a logarithmic axis would stand at ten to the power of its place.
    drawn.add_hline(
        y=slo_ttft_s, line_dash="dash", label={"text": "promised", "textposition": "end"}, row=1, col=2
    )  # fmt: skip
    drawn.update_xaxes(title_text={"replicas": "engines", "copies": "copies of the trace"}.get(over or "", ""))
    if over:
        counts = [count for count in (entry[over] for entry in entries) if isinstance(count, int)]
        drawn.update_xaxes(tickformat=",d", dtick=1 if max(counts) - min(counts) <= _EACH_COUNT_SPAN else None)
    drawn.update_yaxes(title_text="%", rangemode="tozero", row=1, col=1)
    drawn.update_yaxes(title_text="s", type="log", row=1, col=2)
    seeds, each = entries[0]["seeds"], " each" if len(entries) > 1 else ""
    assert isinstance(seeds, int)
    title = f"{counted(len(entries), 'configuration')}, {counted(seeds, 'seed')}{each}"
    drawn.update_layout(title=title, template="plotly_white")
    return drawn


# Engines or copies between the ends of an axis up to which each whole number gets a tick; beyond, Plotly's own ticks
# are whole numbers too, even on a screen of 4000 pixels (it puts one at most every 80).
_EACH_COUNT_SPAN = 20


def _bars(line: Sequence[Mapping[str, object]]) -> dict[str, object] | None:
    """From goodput's lowest seed to its highest, around the mean, in %; None for one seed, which has no spread."""
    if all(entry["seeds"] == 1 for entry in line):
        return None
    up, down = [], []
    for entry in line:
        low, mean, high = (entry[f"goodput_ratio{end}"] for end in ("_lowest", "", "_highest"))
        if isinstance(low, float) and isinstance(mean, float) and isinstance(high, float):
            up.append(100 * (high - mean))
            down.append(100 * (mean - low))
        else:
            up.append(0.0)
            down.append(0.0)
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down}


def _part(value: object, name: str) -> float | None:
    """One percentile in seconds."""
    found = value[name] if isinstance(value, Mapping) else None
    return found / 1e3 if isinstance(found, int | float) else None
