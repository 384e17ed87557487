"""The command `inferplane perf size`: a spec file in, the cheapest fleet that keeps its promises out.

Owns: the command's options and its exit codes (0 with a plan, 1 when nothing fits, which leaves no plot either, 2 for a
spec that cannot be read). Does not own: the search (`search`), the spec's fields (`spec_file`) or the
plot's file (`plots`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from perfmodel.adapters.size_report import Answer
    from perfmodel.adapters.sweeps import Workers
    from perfmodel.search.rating import Check


def size(
    *,
    spec: Annotated[
        Path, typer.Option(help="YAML file: classes, loads, promises, accelerators (docs: examples/size).")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write what was considered as a plot: FILE.html or FILE.png.", show_default=False),
    ] = None,
    flips: Annotated[
        bool, typer.Option("--flips/--no-flips", help="Also search what would change the plan (prices, hits, promise).")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Simulate the cheapest candidates before one is the plan.")
    ] = True,
    policy: Annotated[str, typer.Option(help="Routing policy of that simulation.")] = "inferplane_route",
    workers: Annotated[
        int | None, typer.Option(help="Processes for its seeds. Default: this one alone.", show_default=False)
    ] = None,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask cluster for its seeds.", show_default=False)
    ] = None,
) -> None:
    """Find the cheapest plan that keeps the promise, or say why there is none."""
    from perfmodel.adapters import perf_output, perf_size_text, size_report
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.perf_compiling import say_if_compiling
    from perfmodel.adapters.plots import check_plot_path, write_plot
    from perfmodel.adapters.spec_file import read_spec

    with perf_output.guard(), ExitStack() as held:
        if plot is not None:
            check_plot_path(plot)
        catalog = load_catalog()
        asked = read_spec(spec, catalog)
        if not check:
            _no_effect(workers, dask)
        say_if_compiling(simulation=check)
        simulation = _check(policy, held.enter_context(_places(workers, dask))) if check else None
        answer: Answer = size_report.answered(
            asked,
            catalog,
            flips=flips,
            check=simulation,
            progress=perf_output.progress,
            policy=policy if check else None,
        )
        if plot is not None and answer.sentence is None:
            write_plot(size_report.figure(answer), plot)
    if as_json:
        perf_output.show_json(size_report.as_json(answer))
    elif answer.sentence is None:
        perf_size_text.show(answer)
    if answer.sentence is not None:
        unwritten = "" if plot is None else f"; no plan to plot, {plot} is not written"
        perf_output.fail(answer.sentence + unwritten)


def _no_effect(workers: int | None, dask: str | None) -> None:
    """Raises ConfigError for an option that nothing is left to do for."""
    from perfmodel.errors import ConfigError

    for option, value in (("--workers", workers), ("--dask", dask)):
        if value is not None:
            raise ConfigError(f"{option} is {value}; expected it without --no-check, which leaves nothing to spread")


@contextmanager
def _places(count: int | None, dask: str | None) -> Iterator[Workers | None]:
    """Where the seeds are played; None: in this process. Raises ConfigError, SweepError."""
    from perfmodel.adapters.sweeps import workers
    from perfmodel.search.simulated import CHECK_SEEDS

    if count is None and dask is None:
        yield None
        return
    with workers(dask, count, most=len(CHECK_SEEDS)) as places:
        yield places


def _check(policy: str, places: Workers | None) -> Check:
    """The simulation under this policy. Raises ConfigError for an unknown name."""
    from perfmodel.adapters.policy_names import policy_factory
    from perfmodel.adapters.spread_check import seeds_on
    from perfmodel.search.simulated import simulated

    factory = policy_factory(policy)
    return simulated(factory, side_by_side=None if places is None else seeds_on(places, policy))
