"""`inferplane perf trace`: make a trace of a known kind of traffic, or say what a trace is like.

Owns: its options and what it prints. Does not own: the generators (`traces.generators`), the statistics
(`traces.statistics`) or the file format (`traces`). A made-up trace names its seed: the same options, the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.adapters import perf_output

if TYPE_CHECKING:
    from perfmodel.traces.generators import Demand
    from perfmodel.traces.statistics import TraceStatistics
    from perfmodel.traces.trace import Trace

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
# Prefix statistics of a new trace are worked out up to this many blocks (about 3 GB); a longer one has none.
_MOST_BLOCKS = 50_000_000
# Bytes of a request while a trace is drawn: chat takes most, 523 measured (360,000 requests).
_REQUEST_BYTES = 600
# Field of the cores -> the option that sets it.
_OPTION_OF = {
    "hours": "--hours",
    "rate_per_s": "--rate",
    "seed": "--seed",
    "block_tokens": "--block-tokens",
    "tenant_count": "--tenants",
    "start_hour": "--start-hour",
}


# Agents' sessions and bursts have heavy tails, so that a short trace can be far off.
_RATE_HELP = (
    "Requests a second, the mean over many traces; a short one of bursts or long sessions can be 20 % below or 50 % "
    "above. The output shows the rate that came of it beside the asked one."
)
# Option that only some profiles read -> those profiles (`traces.generators`: who draws tenants, blocks, arrival times).
_PROFILES_OF = {
    "reading": ("agent",),
    "batch_kind": ("batch",),
    "tenants": ("chat", "chat-short", "api", "realtime"),
    "block_tokens": ("agent", "chat", "chat-short", "api", "realtime", "batch"),
    "curve": ("agent", "chat", "chat-short", "code", "api", "realtime"),
    "start_day": ("agent", "chat", "chat-short", "code", "api", "realtime"),
    "start_hour": ("agent", "chat", "chat-short", "code", "api", "realtime"),
}
# Options of a trace that is made.
_MAKING = (
    "profile", "hours", "rate", "seed", "out", "curve", "start_day", "start_hour", "tenants", "block_tokens", "reading",
    "batch_kind",
)  # fmt: skip


def trace(  # noqa: PLR0913 typer makes one option of each parameter
    ctx: typer.Context,
    *,
    stats: Annotated[
        Path | None, typer.Option(help="Print the statistics of this trace file; nothing is made.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="agent, chat, chat-short, code, api, realtime or batch.", show_default=False)
    ] = None,
    hours: Annotated[float, typer.Option(help="Length of the trace.")] = 1.0,
    rate: Annotated[float, typer.Option(help=_RATE_HELP)] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides everything that is drawn.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="File to write: .jsonl, or .jsonl.gz for gzip.", show_default=False)
    ] = None,
    curve: Annotated[
        str | None, typer.Option(help="Day curve: flat, code, chat, campus or api. Default: the profile's.")
    ] = None,
    start_day: Annotated[str, typer.Option(help="Day of the trace's first second; the weekend has its own load.")] = (
        _DAYS[0]
    ),
    start_hour: Annotated[float, typer.Option(help="Hour of the trace's first second.")] = 0.0,
    tenants: Annotated[
        int | None,
        typer.Option(help="Tenants with Zipf shares (chat, chat-short, api, realtime). Default: the profile's."),
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a prefix block. Default: the profile's.", show_default=False)
    ] = None,
    reading: Annotated[
        str, typer.Option(help="Agents: tracelab (for planning), or quoted (shorter waits, as often cited).")
    ] = "tracelab",
    batch_kind: Annotated[str, typer.Option(help="Batch: summarise, generate or classify.")] = "summarise",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a trace of requests with published statistics, or print the statistics of one."""
    from perfmodel.adapters.traces import read_trace
    from perfmodel.traces.statistics import statistics

    with perf_output.guard():
        _check_effects([name for name in _MAKING if _typed(ctx, name)], stats, profile)
        if stats is not None:
            _show({"file": str(stats)}, statistics(read_trace(stats)), as_json)
            return
        if profile is None:
            perf_output.fail("--profile is missing; expected a kind of traffic, or --stats FILE", 2)
        if out is None:
            perf_output.fail("--out is missing; expected the file to write", 2)
        words = {"profile": profile, "curve": curve, "start_day": start_day, "reading": reading}
        numbers: dict[str, Any] = {"hours": hours, "rate_per_s": rate, "seed": seed, "start_hours": start_hour}
        numbers |= {"tenant_count": tenants, "block_tokens": block_tokens}
        demand = _demand(words | {"batch_kind": batch_kind}, numbers)
        made = _write(demand, out)
        facts = {"file": str(out), "profile": demand.profile.value, "seed": seed, "asked_rate_per_s": rate}
        _show(facts, statistics(made), as_json)


def _typed(ctx: typer.Context, parameter: str) -> bool:
    """Whether the user gave it, the default's value included."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _check_effects(given: list[str], stats: Path | None, profile: str | None) -> None:
    """Raises ConfigError for an option that would change nothing, naming what stands against it."""
    from perfmodel.errors import ConfigError
    from perfmodel.traces.generators import Profile

    for name in given:
        option = f"--{name.replace('_', '-')}"
        if stats is not None:
            raise ConfigError(f"{option} has no effect beside --stats, which only reads; expected one of the two")
        readers = _PROFILES_OF.get(name)
        if readers is not None and profile in list(Profile) and profile not in readers:
            raise ConfigError(f"{option} has no effect with --profile {profile}; it is read by {', '.join(readers)}")


def _one_of(option: str, value: str, known: Sequence[str]) -> str:
    """`value` when it is one of `known`; else ConfigError with all of them, the closest first."""
    from perfmodel.errors import ConfigError

    if value in known:
        return value
    likeness = {name: SequenceMatcher(None, value, name).ratio() for name in known}
    order = sorted(known, key=lambda name: -likeness[name])
    raise ConfigError(f"{option} is {value!r}; expected one of {', '.join(order)}")


def _demand(words: dict[str, str | None], numbers: dict[str, Any]) -> Demand:
    """The demand that was typed. Raises ConfigError in the words of the command line."""
    from perfmodel.errors import ConfigError
    from perfmodel.traces.arrivals import CurveName
    from perfmodel.traces.generators import BatchKind, Demand, Profile
    from perfmodel.traces.sessions import AgentReading

    def chosen(option: str, known: type[Any], value: str | None) -> Any:
        if value is None:
            return None
        names = [str(each.value) for each in known]
        return known(_one_of(f"--{option}", value, names))

    profile = chosen("profile", Profile, words["profile"])
    day = _one_of("--start-day", (words["start_day"] or "").lower(), _DAYS)
    try:
        return Demand(
            profile=profile,
            curve=chosen("curve", CurveName, words["curve"]),
            start_day_index=_DAYS.index(day),
            reading=chosen("reading", AgentReading, words["reading"]),
            batch=chosen("batch-kind", BatchKind, words["batch_kind"]),
            **numbers,
        )
    except ConfigError as fault:
        field, said, rest = str(fault).partition(" is ")
        raise ConfigError(f"{_OPTION_OF.get(field, field)}{said}{rest}") from None


def _write(demand: Demand, out: Path) -> Trace:
    """Write the trace piece by piece, and keep what its statistics need: a very long one keeps no blocks."""
    import psutil

    from perfmodel.adapters.traces import write_trace
    from perfmodel.errors import ConfigError
    from perfmodel.traces.generators import generate_parts
    from perfmodel.traces.trace import joined

    if out.suffix not in (".gz", ".jsonl"):
        raise ConfigError(f"--out is {out}; expected a file name that ends in .jsonl or .jsonl.gz")
    if not out.parent.is_dir():
        raise ConfigError(f"--out is {out}; there is no folder {out.parent}")
    kept: list[Trace] = []
    expected = max(1, round(demand.rate_per_s * demand.end_s))
    free_bytes = psutil.virtual_memory().available
    if expected * _REQUEST_BYTES > free_bytes:
        raise ConfigError(
            f"--rate is {demand.rate_per_s:g}, which is {expected:,} requests in {demand.hours:g} hours: about "
            f"{expected * _REQUEST_BYTES / 1e9:,.1f} GB of memory, and {free_bytes / 1e9:,.1f} GB are free; expected "
            "fewer (`perf simulate --copies` plays many)"
        )
    with perf_output.progress("writing requests", expected) as done:

        def told() -> Iterator[Trace]:
            for part in generate_parts(demand):
                yield part
                kept.append(part)
                if sum(len(each.blocks) for each in kept) > _MOST_BLOCKS:
                    kept[:] = [_without_blocks(each) for each in kept]
                done(len(part))

        if not write_trace(told(), out):
            out.unlink()
            raise ConfigError(
                f"--rate is {demand.rate_per_s}; expected enough for one request in {demand.hours:g} hours"
            )
    return joined(kept)


def _without_blocks(trace: Trace) -> Trace:
    """The trace as if its content were not known."""
    return replace(trace, blocks=trace.blocks[:0], block_offsets=trace.block_offsets * 0, block_tokens=0)


def _beside(names: list[str], moved: str, after: str) -> list[str]:
    """The names with `moved` behind `after`."""
    rest = [name for name in names if name != moved]
    place = rest.index(after) + 1
    return [*rest[:place], moved, *rest[place:]]


def _show(facts: dict[str, Any], found: TraceStatistics, as_json: bool) -> None:
    values = facts | asdict(found)
    if "asked_rate_per_s" in values:  # beside the rate that came of it
        values = {name: values[name] for name in _beside(list(values), "asked_rate_per_s", "rate_per_s")}
    if as_json:
        perf_output.show_json(values)
        return
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}_{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    width = max(map(len, flat))
    for name, value in flat.items():
        shown = "-" if value is None else f"{value:,.4g}" if isinstance(value, float) and value < 1000 else value
        shown = f"{value:,.0f}" if isinstance(value, float) and value >= 1000 else shown
        typer.echo(f"{name:<{width}}  {shown}")
