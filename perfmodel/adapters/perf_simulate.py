"""The command `inferplane perf simulate`: a trace through simulated engines, behind a routing policy by name.

Owns: its options, and the output and plot of one run. Does not own: the simulation (`simulation`), several runs side by
side (`sim_sweep`), where they run (`sweeps`), traces (`traces`), engines (`sim_fleet_file`) or policies
(`policy_names`). Contract of one run's JSON: the keys of `_answer`, in that order. All but `wall_s`, its last key,
depends on the input and `--seed` alone: the same bytes every time, of a sweep too, wherever it runs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.adapters.perf_output import fail, guard, progress, show_json

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from perfmodel.adapters.sim_sweep import Axes, Run, World
    from perfmodel.simulation.fleet import EngineSpec
    from perfmodel.simulation.run import Durations, SimResult
    from perfmodel.traces.trace import Trace

# More engines of one kind, copies or seeds than anybody simulates, and more runs than anybody reads.
_MOST_ENGINES, _MOST_COPIES, _MOST_SEEDS, _MOST_RUNS = 100_000, 1_000_000_000, 10_000, 100_000

# From here block ids are renumbered: a billion copies of a trace of a billion blocks stay below 2^63.
_LARGE_BLOCK_ID = 2**32

# The longer options; the command has the others.
_Traces = Annotated[list[Path], typer.Option(help="Trace file (.jsonl or .jsonl.gz); given again: a sweep over both.")]
_Replicas = Annotated[str, typer.Option(metavar="N[,N...]", help="Engines; several counts: a sweep.")]
_Policies = Annotated[
    str,
    typer.Option(metavar="NAME[,NAME...]", help="round_robin, inferplane_route, dynamo_kv, ...; several: a sweep."),
]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[POLICY:]NAME=VALUE[,...]",
        help="Other settings of a policy than its published defaults; once for each policy.",
        show_default=False,
    ),
]
_Copies = Annotated[
    str, typer.Option(metavar="N[,N...]", help="Relabelled copies of the trace at once; several: a sweep.")
]
_Duration = Annotated[
    float | None, typer.Option(help="Play the trace again, or cut it, to this length.", show_default=False)
]
_ClosedLoop = Annotated[
    bool,
    typer.Option("--closed-loop", help="A session's turn starts when its last one ended, after its think time."),
]
_Engines = Annotated[Path | None, typer.Option(help="YAML of unlike engines, pools and roles.", show_default=False)]
_Workers = Annotated[
    int | None, typer.Option(help="Processes of a sweep. Default: one for each core.", show_default=False)
]
_Dask = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Run on this Dask cluster (tcp://host:8786).", show_default=False),
]
_Plot = Annotated[
    Path | None, typer.Option(help="Draw TTFT and load over time to this .html or .png file.", show_default=False)
]


def simulate(  # noqa: PLR0913 - each is an option of the command
    ctx: typer.Context,
    *,
    trace: _Traces,
    model: Annotated[str | None, typer.Option(help="Model of the catalogue, or a config.json.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Device of the catalogue.")] = None,
    tp: Annotated[int, typer.Option(help="Devices of one engine (tensor parallel).")] = 1,
    replicas: _Replicas = "1",
    policy: _Policies = "round_robin",
    policy_settings: _Settings = None,
    event_delay_ms: Annotated[float, typer.Option(help="How late a policy hears an engine's KV events.")] = 5.0,
    copies: _Copies = "1",
    duration_s: _Duration = None,
    closed_loop: _ClosedLoop = False,
    engines: _Engines = None,
    dtype: Annotated[str, typer.Option(help="Weights: bf16, fp8, fp4, int8, int4.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="KV elements: bf16, fp8, fp4.")] = "bf16",
    max_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step (the chunk of a prefill).")] = 8192,
    max_sequences: Annotated[int, typer.Option(min=1, help="Requests that run at once on an engine.")] = 256,
    dram_gb: Annotated[float | None, typer.Option(help="Lower KV tier of each engine.", show_default=False)] = None,
    dram_gb_per_s: Annotated[float | None, typer.Option(help="Its restore bandwidth.", show_default=False)] = None,
    engine_spread: Annotated[float, typer.Option(help="Hidden: st. dev. of ln(engine speed).")] = 0.0,
    step_noise: Annotated[float, typer.Option(help="Hidden: st. dev. of ln(step time).")] = 0.0,
    slo_ttft_s: Annotated[float, typer.Option(help="Promise: time to first token.")] = 5.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="Promise: time per output token.")] = 50.0,
    seed: Annotated[int, typer.Option(min=0, help="Of every dice: copies, hidden speeds, noise, ties.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=_MOST_SEEDS, help="A sweep over so many, from --seed on.")] = 1,
    workers: _Workers = None,
    dask: _Dask = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    detail: Annotated[bool, typer.Option("--detail", help="Add engines, tiers and hand-overs to the JSON.")] = False,
    plot: _Plot = None,
) -> None:
    """Simulate a cluster on a trace: TTFT, TPOT, cache hits and goodput under a routing policy.

    Several traces, copies, policies, replicas or seeds are a sweep: all combinations side by side, on all cores.
    "Not idle" is the share of the time in which an engine had anything to do; it says nothing about how full it was.
    """
    given = tuple(name for option, name in _FIELD_OF.items() if _typed(ctx, option))
    engine = _EngineWords(model, gpu, tp, dtype, kv_dtype, max_batched_tokens, max_sequences)
    with guard():
        _check_tier(engines, dram_gb, dram_gb_per_s)
        _run(
            _Request(
                _axes(trace, (copies, policy, replicas), range(seed, seed + seeds), engines),
                duration_s, closed_loop, engines, engine, (dram_gb, dram_gb_per_s), (engine_spread, step_noise),
                (slo_ttft_s, slo_tpot_ms / 1e3), (dask, workers), as_json, detail, plot, given,
                tuple(policy_settings or ()), event_delay_ms / 1e3,
            )
        )  # fmt: skip


# Parameter of the command -> field of the engines file that takes its place.
_FIELD_OF = {
    "model": "model", "gpu": "gpu", "tp": "tp", "replicas": "count", "dtype": "dtype", "kv_dtype": "kv_dtype",
    "max_batched_tokens": "max_batched_tokens", "max_sequences": "max_sequences", "dram_gb": "dram_gb",
    "dram_gb_per_s": "dram_gb_per_s",
}  # fmt: skip


def _axes(traces: list[Path], lists: tuple[str, str, str], seeds: range, engines: Path | None) -> Axes:
    """What is combined; `lists`: copies, policies and replicas as typed. Exits 2 for a value that cannot be."""
    from perfmodel.adapters.sim_sweep import Axes

    copies, policies, replicas = lists
    counts = _counts("--replicas", replicas, _MOST_ENGINES)
    if engines is not None and len(counts) > 1:
        fail(f"--replicas is {replicas}; expected one number beside --engines, which says how many there are", 2)
    axes = Axes(
        traces=tuple(dict.fromkeys(str(path) for path in traces)),
        copies=_counts("--copies", copies, _MOST_COPIES),
        policies=tuple(dict.fromkeys(name.strip() for name in policies.split(","))),
        replicas=counts if engines is None else (None,),
        seeds=tuple(seeds),
    )
    combined = math.prod(map(len, (axes.traces, axes.copies, axes.policies, axes.replicas, axes.seeds)))
    if combined > _MOST_RUNS:
        fail(f"the sweep has {combined:,} runs; expected at most {_MOST_RUNS:,}", 2)
    return axes


def _counts(option: str, text: str, most: int) -> tuple[int, ...]:
    """Whole numbers with commas between them, each once."""
    found: dict[int, None] = {}
    for word in text.split(","):
        try:
            value = int(word)
        except ValueError:
            fail(f"{option} is {text!r}; expected a whole number, or several with commas between them", 2)
        if value < 1:
            fail(f"{option} is {value}; expected at least 1", 2)
        if value > most:
            fail(f"{option} is {value}; expected at most {most:,}", 2)
        found[value] = None
    return tuple(found)


def _typed(ctx: typer.Context, parameter: str) -> bool:
    """Whether the user gave it, the default's value included."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _say_ignored(file: Path, given: tuple[str, ...]) -> None:
    """One line on stderr for options that this file overrules; no refusal, for the command's form allows both."""
    from perfmodel.adapters.sim_fleet_file import without_effect

    options = {name: f"--{option.replace('_', '-')}" for option, name in _FIELD_OF.items()}
    ignored = without_effect(file, given)
    if ignored:
        names, fields = ", ".join(options[name] for name in ignored), ", ".join(ignored)
        typer.echo(f"perf: no effect beside --engines: {names} ({file} decides {fields})", err=True)


def _check_tier(engines: Path | None, dram_gb: float | None, dram_gb_per_s: float | None) -> None:
    """Exits 2 for a bandwidth without a memory, and for values that no memory has."""
    for option, value in (("--dram-gb", dram_gb), ("--dram-gb-per-s", dram_gb_per_s)):
        if value is not None and not 0 < value < math.inf:
            fail(f"{option} is {value}; expected a number above 0", 2)
    if engines is None and dram_gb is None and dram_gb_per_s is not None:
        fail("--dram-gb-per-s has no effect without --dram-gb; expected both or none", 2)


@dataclass(frozen=True, slots=True)
class _EngineWords:
    """One kind of engine as it was asked for."""

    model: str | None
    gpu: str | None
    tp: int
    dtype: str
    kv_dtype: str
    max_batched_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True)
class _Request:
    """The command's options. `tier`: GB, GB/s; `hidden`: spread of engines, noise of steps; `slo_s`: TTFT, TPOT.

    `where`: Dask address, processes; `given`: the engines file's fields whose options were typed.
    """

    axes: Axes
    duration_s: float | None
    closed_loop: bool
    engines: Path | None
    engine: _EngineWords
    tier: tuple[float | None, float | None]
    hidden: tuple[float, float]
    slo_s: tuple[float, float]
    where: tuple[str | None, int | None]
    as_json: bool
    detail: bool
    plot: Path | None
    given: tuple[str, ...]
    settings: tuple[str, ...]
    event_delay_s: float


def _run(asked: _Request) -> None:
    from perfmodel.adapters.plots import check_plot_path
    from perfmodel.adapters.policy_names import policy_factory, settings_by_policy

    if asked.plot is not None:
        check_plot_path(asked.plot)
    _check_counts(tp=asked.engine.tp)
    if asked.where[1] is not None:
        _check_counts(workers=asked.where[1])
    settings = settings_by_policy(list(asked.settings), asked.axes.policies)
    for policy in asked.axes.policies:
        policy_factory(policy, settings.get(policy))
    world = replace(_world(asked), settings=settings)
    runs = asked.axes.runs()
    _check_memory(world, runs, asked.where)
    if len(runs) == 1:
        _one(asked, world, runs[0])
    else:
        _several(asked, world, runs)


def _world(asked: _Request) -> World:
    """All that the runs share. Raises ConfigError, OSError."""
    from perfmodel.adapters.sim_sweep import World
    from perfmodel.errors import ConfigError
    from perfmodel.simulation.run import SimOptions

    if asked.duration_s is not None and not 0 < asked.duration_s < math.inf:
        raise ConfigError(f"--duration-s is {asked.duration_s}; expected above 0")
    if not 0 <= asked.event_delay_s < math.inf:
        raise ConfigError(f"--event-delay-ms is {asked.event_delay_s * 1e3:g}; expected 0 or more")
    options = SimOptions(
        slo_ttft_s=asked.slo_s[0],
        slo_tpot_s=asked.slo_s[1],
        model=asked.engine.model or "model",
        engine_spread_ratio=asked.hidden[0],
        step_noise_ratio=asked.hidden[1],
        event_delay_s=asked.event_delay_s,
    )
    engines = _engines(asked)
    if asked.engines is not None:
        _say_ignored(asked.engines, asked.given)
    traces = {path: _from_first(Path(path)) for path in asked.axes.traces}
    return World(traces, engines, options, asked.duration_s, asked.closed_loop)


def _engines(asked: _Request) -> dict[int | None, tuple[EngineSpec, ...]]:
    """The engines by how many are asked for; None: those of the file."""
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.sim_fleet_file import EngineOptions, engines_of

    words = asked.engine
    kind = EngineOptions(
        words.model, words.gpu, words.tp, 1, words.dtype, words.kv_dtype, words.max_batched_tokens,
        words.max_sequences, *asked.tier,
    )  # fmt: skip
    found = engines_of(kind, asked.engines, load_catalog())
    if asked.engines is not None:
        return {None: found}
    return {count: tuple(replace(spec, count=count or 1) for spec in found) for count in asked.axes.replicas}


def _from_first(path: Path) -> Trace:
    """The trace with its first arrival at 0, and block ids of which copies can be made (some are hashes of 63 bits)."""
    from perfmodel.adapters.traces import read_trace

    trace = read_trace(path)
    if trace.block_end_id > _LARGE_BLOCK_ID:
        trace = trace.with_small_block_ids()
    return trace.window(float(trace.arrival_s[0]), math.inf)


def _check_memory(world: World, runs: list[Run], where: tuple[str | None, int | None]) -> None:
    """The memory of this machine, shared by the runs that are played at once; a cluster's is its own."""
    import os

    import psutil

    from perfmodel.adapters.sim_sweep import check_memory

    if where[0] is not None:
        return
    at_once = min(len(runs), where[1] or len(os.sched_getaffinity(0)))
    free_bytes = psutil.virtual_memory().available / at_once
    for run in {(run.trace, run.copies, run.replicas): run for run in runs}.values():
        check_memory(world, run, free_bytes)


def _one(asked: _Request, world: World, run: Run) -> None:
    from perfmodel.adapters.perf_compiling import say_if_compiling
    from perfmodel.adapters.plots import write_plot
    from perfmodel.adapters.sim_sweep import play, played, workload_of
    from perfmodel.adapters.sweeps import workers

    started_s = time.perf_counter()
    if asked.where[0] is not None:
        with workers(*asked.where) as places, progress("simulating", 1) as advance:
            result = places.map(play, world, [run], advance)[0]
    else:
        say_if_compiling(simulation=True)
        started_s = time.perf_counter()
        _, count = workload_of(world, run)
        with progress("simulating", count) as advance:
            result = played(world, run, advance)
    wall_s = time.perf_counter() - started_s
    if asked.plot is not None:
        write_plot(_figure(result, world.options.slo_ttft_s, run.policy), asked.plot)
    if asked.as_json or asked.detail:
        show_json(_answer(result, asked.detail) | {"wall_s": round(wall_s, 3)})
    else:
        _show_table(result, run.policy, wall_s)
        _show_overload(result, world.options.slo_ttft_s, asked.closed_loop)


def _several(asked: _Request, world: World, runs: list[Run]) -> None:
    from perfmodel.adapters import sim_sweep
    from perfmodel.adapters.perf_compiling import say_if_compiling
    from perfmodel.adapters.plots import write_plot
    from perfmodel.adapters.sweeps import workers

    if asked.where[0] is None:
        say_if_compiling(simulation=True)
    started_s = time.perf_counter()
    with workers(*asked.where, most=len(runs)) as places, progress("simulating runs", len(runs)) as advance:
        results = places.map(sim_sweep.play, world, runs, advance)
    wall_s = time.perf_counter() - started_s
    told = [
        sim_sweep.named(run, len(result.engines), _answer(result, asked.detail))
        for run, result in zip(runs, results, strict=True)
    ]
    summary = sim_sweep.summary(told)
    if asked.plot is not None:
        write_plot(sim_sweep.figure(summary, world.options.slo_ttft_s), asked.plot)
    if asked.as_json or asked.detail:
        show_json({"runs": told, "summary": summary, "wall_s": round(wall_s, 3)})
        return
    sim_sweep.show(summary, wall_s)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            fail(f"--{name} is {value}; expected at least 1", 2)


def _answer(result: SimResult, detail: bool) -> dict[str, object]:
    answer: dict[str, object] = {
        "requests": result.requests,
        "completed": result.completed_count,
        "ttft_ms": _milliseconds(result.ttft),
        "tpot_ms": _milliseconds(result.tpot),
        "prefix_hit_ratio": result.prefix_hit_ratio,
        "output_tok_per_s": result.output_tok_per_s,
        "goodput_ratio": result.goodput_ratio,
        "sim_s": result.sim_s,
    }
    if detail:
        from dataclasses import asdict

        answer["detail"] = {
            "refused": result.refused_count,
            "end_to_end_ms": _milliseconds(result.end_to_end),
            "restored_ratio": result.restored_ratio,
            "pulled_ratio": result.pulled_ratio,
            "preemptions": result.preemption_count,
            "hand_overs": result.hand_over_count,
            "recomputed_tokens": result.lost_tokens,
            "engines": [asdict(engine) for engine in result.engines],
        }
    return answer


def _milliseconds(durations: Durations) -> dict[str, float | None]:
    figures = {"mean": durations.mean_s, "p50": durations.p50_s, "p95": durations.p95_s, "p99": durations.p99_s}
    return {name: None if value is None else value * 1e3 for name, value in figures.items()}


def _show_table(result: SimResult, policy: str, wall_s: float) -> None:
    from perfmodel.adapters.perf_table import counted, print_table
    from perfmodel.adapters.sim_sweep import duration_words

    rows = [
        [name, *map(duration_words, _milliseconds(durations).values())]
        for name, durations in (("TTFT", result.ttft), ("TPOT", result.tpot), ("end to end", result.end_to_end))
    ]
    print_table(f"{policy}: {_played_words(result)}", ("", "mean", "p50", "p95", "p99"), rows, left=("",))
    shares = (("prefix hits", result.prefix_hit_ratio), ("goodput", result.goodput_ratio))
    lines = [f"{name} {'-' if value is None else f'{value:.1%}'}" for name, value in shares]
    busy = [engine.busy_ratio for engine in result.engines]
    lines.append(
        f"engine not idle {busy[0]:.0%} of the time"
        if len(busy) == 1
        else f"engines not idle {min(busy):.0%} to {max(busy):.0%} of the time"
    )
    lines.append(f"{result.output_tok_per_s:,.0f} output tokens/s over {result.sim_s:,.0f} s ({wall_s:.1f} s of work)")
    typer.echo("; ".join(lines))
    too_long_count = result.refused_count - result.refused_by_policy_count
    if too_long_count:
        refused = counted(too_long_count, "request")
        typer.echo(f"{refused} refused: longer than the KV cache of the engine that was picked")
    if result.refused_by_policy_count:
        refused = counted(result.refused_by_policy_count, "request")
        typer.echo(f"{refused} refused by the policy {policy}: it picked no engine")


def _played_words(result: SimResult) -> str:
    from perfmodel.adapters.perf_table import counted

    return f"{counted(result.requests, 'request')} on {counted(len(result.engines), 'engine')}"


def _show_overload(result: SimResult, slo_ttft_s: float, closed_loop: bool) -> None:
    """One line when the queue grew until the last arrival: then the times above are those of the trace's length."""
    from perfmodel.simulation.run import growing_queue

    found = growing_queue(result.timeline, slo_ttft_s)
    if found is None:
        return
    rates = f"{found.arrived_per_s:,.2f} requests/s arrived and {found.ended_per_s:,.2f} ended"
    less = "sessions" if closed_loop else "copies"
    typer.echo(
        f"overloaded: the queue grew until the last arrival ({rates} in the second half), more than the engines carry; "
        f"TTFT grows with the length of the trace. Try more engines or fewer {less}."
    )


def _figure(result: SimResult, slo_ttft_s: float, policy: str) -> Figure:
    """TTFT's distribution above, arrivals, ends and mean TTFT over time below."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2, cols=1, subplot_titles=("Time to first token", "Load over time"), vertical_spacing=0.16,
        specs=[[{}], [{"secondary_y": True}]],
    )  # fmt: skip
    shares = [100 * share for share in result.ttft_share_ratio]
    figure.add_trace(go.Scatter(x=list(result.ttft_s), y=shares, name="requests with TTFT up to x"), row=1, col=1)
    promise = go.Scatter(x=[slo_ttft_s] * 2, y=[0, 100], mode="lines", name="promised TTFT", line={"dash": "dash"})
    figure.add_trace(promise, row=1, col=1)
    figure.update_xaxes(title_text="TTFT, s", type="log", row=1, col=1)
    figure.update_yaxes(title_text="share of requests, %", range=[0, 101], row=1, col=1)
    timeline = result.timeline
    times = [timeline.bin_s * (at + 0.5) for at in range(len(timeline.arrived_per_s))]
    for name, rates in (("arrive", timeline.arrived_per_s), ("end", timeline.ended_per_s)):
        figure.add_trace(go.Scatter(x=times, y=list(rates), name=f"requests that {name}"), row=2, col=1)
    figure.add_trace(
        go.Scatter(x=times, y=list(timeline.ttft_mean_s), name="mean TTFT", line={"dash": "dot"}),
        row=2, col=1, secondary_y=True,
    )  # fmt: skip
    figure.update_xaxes(title_text="simulated time, s", row=2, col=1)
    figure.update_yaxes(title_text="requests/s", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(title_text="mean TTFT, s", rangemode="tozero", row=2, col=1, secondary_y=True)
    figure.update_layout(title=f"{_played_words(result)}, {policy}", template="plotly_white")
    return figure
