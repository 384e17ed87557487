"""The command `inferplane perf simulate`: a trace through simulated engines, behind a routing policy by name.

Owns: its options, its output and its plot. Does not own: the simulation (`simulation`), traces (`traces`,
`traces.copies`), engines (`sim_fleet_file`) or policies (`policy_names`). Contract of the JSON: the keys of `_answer`,
in that order. All but `wall_s`, its last key, depends on the input and `--seed` alone: the same bytes every time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.adapters.perf_output import fail, guard, progress, show_json

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from perfmodel.simulation.run import ClosedLoop, Durations, OpenLoop, SimResult
    from perfmodel.traces.copies import Copies
    from perfmodel.traces.trace import Trace

# Seconds of arrivals that are in memory at once: at 100 requests/s a window of long prompts is a few MB.
_WINDOW_S = 30.0


def simulate(  # noqa: PLR0913 - each is an option of the command
    ctx: typer.Context,
    *,
    trace: Annotated[Path, typer.Option(help="Trace file (.jsonl or .jsonl.gz).")],
    model: Annotated[str | None, typer.Option(help="Model of the catalogue, or a config.json.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Device of the catalogue.")] = None,
    tp: Annotated[int, typer.Option(help="Devices of one engine (tensor parallel).")] = 1,
    replicas: Annotated[int, typer.Option(help="Engines.")] = 1,
    policy: Annotated[str, typer.Option(help="round_robin, least_requests, inferplane_route, ...")] = "round_robin",
    copies: Annotated[int, typer.Option(help="Relabelled copies of the trace at once.")] = 1,
    duration_s: Annotated[
        float | None, typer.Option(help="Play the trace again, or cut it, to this length.", show_default=False)
    ] = None,
    closed_loop: Annotated[
        bool,
        typer.Option("--closed-loop", help="A session's turn starts when its last one ended, after its think time."),
    ] = False,
    engines: Annotated[
        Path | None, typer.Option(help="YAML of unlike engines, pools and roles.", show_default=False)
    ] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    detail: Annotated[bool, typer.Option("--detail", help="Add engines, tiers and hand-overs to the JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw TTFT and load over time to this .html or .png file.", show_default=False)
    ] = None,
) -> None:
    """Simulate a cluster on a trace: TTFT, TPOT, cache hits and goodput under a routing policy.

    "Not idle" is the share of the time in which an engine had anything to do; it says nothing about how full it was.
    """
    given = tuple(name for option, name in _FIELD_OF.items() if _typed(ctx, option))
    engine = _EngineWords(model, gpu, tp, replicas, dtype, kv_dtype, max_batched_tokens, max_sequences)
    with guard():
        _check_tier(engines, dram_gb, dram_gb_per_s)
        _run(
            _Request(
                trace, policy, copies, duration_s, closed_loop, engines, engine, (dram_gb, dram_gb_per_s),
                (engine_spread, step_noise), (slo_ttft_s, slo_tpot_ms / 1e3), seed, as_json, detail, plot, given,
            )
        )  # fmt: skip


# Parameter of the command -> field of the engines file that takes its place.
_FIELD_OF = {
    "model": "model", "gpu": "gpu", "tp": "tp", "replicas": "count", "dtype": "dtype", "kv_dtype": "kv_dtype",
    "max_batched_tokens": "max_batched_tokens", "max_sequences": "max_sequences", "dram_gb": "dram_gb",
    "dram_gb_per_s": "dram_gb_per_s",
}  # fmt: skip


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
    replicas: int
    dtype: str
    kv_dtype: str
    max_batched_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True)
class _Request:
    """The command's options. `tier`: GB, GB/s; `hidden`: spread of engines, noise of steps; `slo_s`: TTFT, TPOT.

    `given`: the engines file's fields whose options were typed.
    """

    trace: Path
    policy: str
    copies: int
    duration_s: float | None
    closed_loop: bool
    engines: Path | None
    engine: _EngineWords
    tier: tuple[float | None, float | None]
    hidden: tuple[float, float]
    slo_s: tuple[float, float]
    seed: int
    as_json: bool
    detail: bool
    plot: Path | None
    given: tuple[str, ...]


def _run(asked: _Request) -> None:
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.compiled_code import remember_compiled_code
    from perfmodel.adapters.plots import check_plot_path, write_plot
    from perfmodel.adapters.policy_names import policy_factory
    from perfmodel.adapters.sim_fleet_file import EngineOptions, engines_of
    from perfmodel.simulation.run import SimOptions, simulate

    words = asked.engine
    if asked.plot is not None:
        check_plot_path(asked.plot)
    _check_counts(replicas=words.replicas, copies=asked.copies, tp=words.tp)
    factory = policy_factory(asked.policy)
    options = SimOptions(
        slo_ttft_s=asked.slo_s[0],
        slo_tpot_s=asked.slo_s[1],
        seed=asked.seed,
        model=words.model or "model",
        engine_spread_ratio=asked.hidden[0],
        step_noise_ratio=asked.hidden[1],
    )
    kind = EngineOptions(
        words.model, words.gpu, words.tp, words.replicas, words.dtype, words.kv_dtype, words.max_batched_tokens,
        words.max_sequences, *asked.tier,
    )  # fmt: skip
    specs = engines_of(kind, asked.engines, load_catalog())
    if asked.engines is not None:
        _say_ignored(asked.engines, asked.given)
    workload, count = _workload(asked.trace, (asked.copies, asked.duration_s, asked.seed), asked.closed_loop)
    remember_compiled_code()
    started_s = time.perf_counter()
    with progress("simulating", count) as advance:
        result = simulate(specs, workload, factory, options, advance)
    wall_s = time.perf_counter() - started_s
    if asked.plot is not None:
        write_plot(_figure(result, options.slo_ttft_s, asked.policy), asked.plot)
    if asked.as_json or asked.detail:
        show_json(_answer(result, wall_s, asked.detail))
    else:
        _show_table(result, asked.policy, wall_s)
        _show_overload(result, options.slo_ttft_s, asked.closed_loop)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            fail(f"--{name} is {value}; expected at least 1", 2)


def _workload(path: Path, load: tuple[int, float | None, int], closed: bool) -> tuple[OpenLoop | ClosedLoop, int]:
    """The workload and about how many requests it has. `load`: copies, seconds (None: once), seed."""
    from perfmodel.adapters.traces import read_trace
    from perfmodel.errors import ConfigError
    from perfmodel.simulation.run import ClosedLoop, OpenLoop
    from perfmodel.traces.copies import Copies

    copy_count, duration_s, seed = load
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise ConfigError(f"--duration-s is {duration_s}; expected above 0")
    base = read_trace(path)
    base = base.window(float(base.arrival_s[0]), math.inf)
    rounds = 1
    single = Copies(base, 1, seed)
    if duration_s is not None and single.round_s > 0:
        rounds = math.ceil(duration_s / single.round_s)
    whole = Copies(base, copy_count, seed, repeat_count=rounds)
    if closed:
        played = whole.whole().with_think_times()
        played = played if duration_s is None else played.window(0.0, duration_s)
        return ClosedLoop(played), len(played)
    share = 1.0 if duration_s is None or not single.round_s else min(1.0, duration_s / (rounds * single.round_s))
    return OpenLoop(_windows(whole, math.inf if duration_s is None else duration_s)), int(whole.request_count * share)


def _windows(copies: Copies, end_s: float) -> Iterator[Trace]:
    for window in copies.windows(_WINDOW_S):
        if window.arrival_s[-1] < end_s:
            yield window
            continue
        last = window.window(0.0, end_s)  # a window from 0 keeps its times
        if len(last):
            yield last
        return


def _answer(result: SimResult, wall_s: float, detail: bool) -> dict[str, object]:
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
            "preemptions": result.preemption_count,
            "hand_overs": result.hand_over_count,
            "recomputed_tokens": result.lost_tokens,
            "engines": [asdict(engine) for engine in result.engines],
        }
    answer["wall_s"] = round(wall_s, 3)
    return answer


def _milliseconds(durations: Durations) -> dict[str, float | None]:
    figures = {"mean": durations.mean_s, "p50": durations.p50_s, "p95": durations.p95_s, "p99": durations.p99_s}
    return {name: None if value is None else value * 1e3 for name, value in figures.items()}


def _show_table(result: SimResult, policy: str, wall_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{policy}: {result.requests:,} requests on {len(result.engines)} engines")
    for column in ("", "mean", "p50", "p95", "p99"):
        table.add_column(column, justify="right" if column else "left")
    for name, durations in (("TTFT", result.ttft), ("TPOT", result.tpot), ("end to end", result.end_to_end)):
        figures = _milliseconds(durations).values()
        table.add_row(name, *("-" if figure is None else _duration(figure) for figure in figures))
    console = Console()
    console.print(table)
    busy = [engine.busy_ratio for engine in result.engines]
    shares = (("prefix hits", result.prefix_hit_ratio), ("goodput", result.goodput_ratio))
    lines = [f"{name} {'-' if value is None else f'{value:.1%}'}" for name, value in shares]
    lines.append(f"engines not idle {min(busy):.0%} to {max(busy):.0%} of the time")
    lines.append(f"{result.output_tok_per_s:,.0f} output tokens/s over {result.sim_s:,.0f} s ({wall_s:.1f} s of work)")
    console.print("; ".join(lines))
    too_long_count = result.refused_count - result.refused_by_policy_count
    if too_long_count:
        typer.echo(f"{too_long_count:,} requests refused: longer than the KV cache of the engine they were sent to")
    if result.refused_by_policy_count:
        typer.echo(f"{result.refused_by_policy_count:,} requests refused by the policy {policy}: it picked no engine")


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


# Milliseconds of 10 s and of 10 min: from there a time reads better in s and in min.
_SECONDS_FROM_MS, _MINUTES_FROM_MS = 10_000.0, 600_000.0


def _duration(value_ms: float) -> str:
    """A time with the unit that a reader wants."""
    if value_ms < _SECONDS_FROM_MS:
        return f"{value_ms:,.1f} ms"
    if value_ms < _MINUTES_FROM_MS:
        return f"{value_ms / 1e3:,.1f} s"
    return f"{value_ms / 60e3:,.1f} min"


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
    engines = len(result.engines)
    figure.update_layout(title=f"{result.requests:,} requests on {engines} engines, {policy}", template="plotly_white")
    return figure
