"""The command `inferplane perf pareto`: speed for one user against speed of one device and the price of a million
tokens.

Owns: the command's options, the layout of its JSON, table and plot. Does not own: the sweep (`pareto`), what fits
(`search.options`) or the spec's fields (`spec_file`). Without a spec the devices are named on the command line, priced
from the catalogue where it has a price, and null in the answer where it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from perfmodel.adapters.catalog import Catalog
    from perfmodel.adapters.offer_prices import OfferPrice
    from perfmodel.adapters.spec_file import SizeSpec
    from perfmodel.coefficients import Coefficients
    from perfmodel.search.pareto import Point
    from perfmodel.search.plan import EngineOption
    from perfmodel.serving import Lengths

# Devices of each kind when no spec says how many there are: one full scale-up domain of most vendors.
_DEVICES = 8

# Said under the table of a mixed fleet: `pareto` matches the rates of its halves, so no prompt waits in its model.
_NO_QUEUE = "TTFT is one prompt alone: no queue in front of the prefill replicas, no transfer of its KV cache."


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is swept: a model's engines on a fleet, and the lengths of a request."""

    spec: SizeSpec
    model: str
    lengths: Lengths
    prices: tuple[OfferPrice, ...]

    @property
    def priced(self) -> frozenset[str]:
        """Devices whose price is known."""
        return frozenset(each.name for each in self.prices if each.usd_per_h is not None)


def pareto(  # noqa: PLR0913 typer makes one option of each parameter
    *,
    spec: Annotated[
        Path | None, typer.Option(help="YAML file of `perf size`; its first class is swept.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, without --spec.", show_default=False)] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Devices, without --spec: one or several, with commas.", show_default=False)
    ] = None,
    isl: Annotated[int, typer.Option(help="Prompt tokens.")] = 1024,
    osl: Annotated[int, typer.Option(help="Answer tokens.")] = 1024,
    cached_ratio: Annotated[float, typer.Option(help="Share of the prompt found in the prefix cache.")] = 0.0,
    weight_dtype: Annotated[str, typer.Option(help="Weights, with commas.")] = "fp8",
    kv_dtype: Annotated[str, typer.Option(help="KV cache, with commas.")] = "bf16",
    mixed: Annotated[
        bool, typer.Option("--mixed/--no-mixed", help="Also pair prefill and decode on unlike devices.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(help="Processes for the sweep. Default: this one alone.", show_default=False)
    ] = None,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask cluster for the sweep.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write the fronts as a plot: FILE.html or FILE.png.", show_default=False)
    ] = None,
) -> None:
    """Sweep engines and batch sizes, and show what nothing else beats, by accelerator and for mixed fleets."""
    from perfmodel.adapters import perf_output
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.plots import check_plot_path, write_plot
    from perfmodel.errors import ConfigError

    with perf_output.guard():
        if plot is not None:
            check_plot_path(plot)
        catalog = load_catalog()
        if spec is not None:
            for option, value in (("--model", model), ("--gpu", gpu)):
                if value is not None:
                    raise ConfigError(f"{option} is {value!r}; expected it without --spec, which says it")
            asked = _of_spec(spec, catalog)
        else:
            if model is None or gpu is None:
                raise ConfigError("--spec is missing; expected it, or --model and --gpu")
            asked = _of_options(catalog, model, gpu, (isl, osl, cached_ratio), (weight_dtype, kv_dtype))
        sweep, parts = _parts(asked, catalog, mixed=mixed)
        found = _found(sweep, parts, dask, workers)
        if plot is not None:
            write_plot(_figure(found, asked), plot)
    if as_json:
        perf_output.show_json(_as_json(found, asked))
    else:
        _show(found, asked)


def _of_spec(path: Path, catalog: Catalog) -> _Asked:
    from perfmodel.adapters.spec_file import read_spec

    spec = read_spec(path, catalog)
    first = spec.periods[0].classes[0]
    return _Asked(spec, first.model, first.demand.lengths, spec.prices)


def _of_options(
    catalog: Catalog, model: str, gpus: str, request: tuple[int, int, float], formats: tuple[str, str]
) -> _Asked:
    """A fleet of eight of each named device. Raises ConfigError for an unknown name or length."""
    from perfmodel.adapters.offer_prices import priced_alike
    from perfmodel.adapters.spec_file import SizeSpec
    from perfmodel.hardware import NumberFormat
    from perfmodel.search.plan import Choices, Fleet, Offer, PurchaseUnit
    from perfmodel.serving import Lengths

    catalog.model(model)
    devices = {
        catalog.device(part.strip()).name: catalog.device(part.strip()) for part in gpus.split(",") if part.strip()
    }
    prices = priced_alike(catalog, list(devices))
    # An offer must have a price; where none is known the figure is never shown (`_usd`).
    offers = [
        Offer(
            devices[each.name], each.usd_per_h or 1.0, _DEVICES, PurchaseUnit(), devices[each.name].scaleout_bytes_per_s
        )
        for each in prices
    ]
    weights, kv = (tuple(NumberFormat.parse(word) for word in words.split(",")) for words in formats)
    choices = Choices(weight_formats=weights, kv_formats=kv, chunk_tokens=(2048, 8192), max_sequence_count=512)
    spec = SizeSpec(Fleet(tuple(offers)), choices, (), "vllm", None, 1.0, 0.0, prices)
    return _Asked(spec, model, Lengths(request[0], request[1], cached_ratio=request[2]), prices)


# Engines of one job: about 0.1 s of work.
_PART_ENGINES = 32


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What all parts of a sweep share. `context_tokens`: the mean one of a decode."""

    spec: SizeSpec
    coefficients: Coefficients
    lengths: Lengths
    context_tokens: float


@dataclass(frozen=True, slots=True)
class _Part:
    """Some engines alone, or all engines in pairs."""

    options: tuple[EngineOption, ...]
    in_pairs: bool = False


def _parts(asked: _Asked, catalog: Catalog, *, mixed: bool) -> tuple[_Sweep, list[_Part]]:
    """The sweep in parts whose points, one part after the other, are those of `pareto.points`."""
    from perfmodel.adapters.coefficient_file import load_coefficients
    from perfmodel.errors import ConfigError
    from perfmodel.search.options import engine_options

    context = int(asked.lengths.input_tokens + asked.lengths.output_tokens)
    options, refusals = engine_options(catalog.model(asked.model), asked.spec.fleet, asked.spec.choices, context)
    if not options:
        detail = refusals[0].detail if refusals else "no engine is allowed"
        raise ConfigError(f"no engine of {asked.model} fits on the named devices: {detail}")
    middle_tokens = asked.lengths.input_tokens + asked.lengths.output_tokens / 2
    sweep = _Sweep(asked.spec, load_coefficients().coefficients, asked.lengths, middle_tokens)
    starts = range(0, len(options), _PART_ENGINES)
    parts = [_Part(tuple(options[start : start + _PART_ENGINES])) for start in starts]
    return sweep, [*parts, _Part(tuple(options), in_pairs=True)] if mixed else parts


def _found(sweep: _Sweep, parts: list[_Part], dask: str | None, workers: int | None) -> list[Point]:
    """The points of all parts, from this process alone unless workers are asked for."""
    from perfmodel.adapters import sweeps
    from perfmodel.adapters.perf_compiling import say_if_compiling
    from perfmodel.adapters.perf_output import progress

    if dask is None:
        say_if_compiling(simulation=False)
    count = 1 if workers is None and dask is None else workers
    with (
        sweeps.workers(dask, count, most=len(parts)) as places,
        progress("engines and batch sizes", len(parts)) as done,
    ):
        return [point for points in places.map(_points, sweep, parts, done) for point in points]


def _points(sweep: _Sweep, part: _Part) -> list[Point]:
    """The points of one part, as a job for any worker."""
    from perfmodel.adapters.compiled_code import remember_compiled_loops
    from perfmodel.adapters.size_report import engine_steps
    from perfmodel.search.pareto import alone_points, pair_points

    remember_compiled_loops()
    steps = engine_steps(sweep.spec, sweep.coefficients, sweep.context_tokens)
    return (pair_points if part.in_pairs else alone_points)(part.options, sweep.lengths, steps)


def _usd(point: Point, asked: _Asked) -> float | None:
    """USD per million output tokens; None when a device of the point has no price."""
    return point.usd_per_million_output_tokens if set(point.accelerators) <= asked.priced else None


def _as_json(found: list[Point], asked: _Asked) -> dict[str, object]:
    from perfmodel.adapters.offer_prices import prices_json
    from perfmodel.search.pareto import fronts

    return {
        "model": asked.model,
        "input_tokens": asked.lengths.input_tokens,
        "output_tokens": asked.lengths.output_tokens,
        "points_considered": len(found),
        "prices": prices_json(asked.prices),
        "fronts": [
            {
                "accelerators": list(names),
                "mixed": len(names) > 1,
                "ttft_has_prefill_queue": len(names) == 1,
                "points": [
                    {
                        "engine": point.what,
                        "devices": point.device_count,
                        "concurrency": point.concurrency_count,
                        "tok_per_s_per_user": point.user_tok_per_s,
                        "tok_per_s_per_device": point.device_tok_per_s,
                        "ttft_mean_ms": point.ttft_mean_ms,
                        "usd_per_million_output_tokens": _usd(point, asked),
                    }
                    for point in points
                ],
            }
            for names, points in fronts(found).items()
        ],
    }


def _show(found: list[Point], asked: _Asked) -> None:
    from perfmodel.adapters.offer_prices import price_words, unknown_words
    from perfmodel.adapters.perf_table import print_table
    from perfmodel.search.pareto import fronts

    columns = ("tok/s/user", "tok/s/device", "USD/Mtok out", "TTFT ms", "concurrency", "engine")
    for names, points in fronts(found).items():
        own = [each for each in asked.prices if each.name in names]
        rows = []
        for point in points:
            usd = _usd(point, asked)
            rows.append(
                (
                    f"{point.user_tok_per_s:.1f}",
                    f"{point.device_tok_per_s:.1f}",
                    "" if usd is None else f"{usd:.3f}",
                    f"{point.ttft_mean_ms:.0f}",
                    str(point.concurrency_count),
                    point.what,
                )
            )
        print_table(f"{_front_name(names)} ({price_words(own)})", columns, rows, left=("engine",))
        if len(names) > 1:
            typer.echo(_NO_QUEUE)
    unknown = unknown_words(asked.prices)
    if unknown is not None:
        typer.echo(unknown)


def _figure(found: list[Point], asked: _Asked) -> Figure:
    """Two panels, one line per accelerator or pair: tokens per device, and the price, against tokens per user."""
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    from perfmodel.search.pareto import fronts

    drawn = make_subplots(rows=1, cols=2, subplot_titles=("Throughput of a device", "Price of a million output tokens"))
    for place, (names, points) in enumerate(fronts(found).items()):
        style = {
            "color": qualitative.Plotly[place % len(qualitative.Plotly)],
            "dash": "dash" if len(names) > 1 else "solid",
        }
        users = [point.user_tok_per_s for point in points]
        told = [point.what for point in points]
        label = _front_name(names)
        drawn.add_scatter(
            x=users, y=[point.device_tok_per_s for point in points], text=told, name=label, line=style,
            mode="lines+markers", legendgroup=label, row=1, col=1,
        )  # fmt: skip
        drawn.add_scatter(
            x=users, y=[_usd(point, asked) for point in points], text=told, name=label, line=style,
            mode="lines+markers", legendgroup=label, showlegend=False, row=1, col=2,
        )  # fmt: skip
    drawn.update_xaxes(title_text="tokens/s for one user", type="log", dtick="D2")
    drawn.update_yaxes(title_text="tokens/s per device", type="log", dtick="D2", row=1, col=1)
    drawn.update_yaxes(title_text="USD", type="log", dtick="D2", row=1, col=2)
    shape = f"{asked.lengths.input_tokens:g} tokens in, {asked.lengths.output_tokens:g} out"
    drawn.update_layout(title=f"{asked.model}: {shape}")
    return drawn


def _front_name(names: Sequence[str]) -> str:
    """The devices of a front; of a mixed one, which computes the prompts and which the answers."""
    return names[0] if len(names) == 1 else f"prompts on {names[0]}, answers on {names[1]}"
