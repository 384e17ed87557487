"""The command group `inferplane perf`: what a pool will do, and the cheapest one that will do it.

Owns: which commands there are. Does not own: any of them; each is one function in a `perf_*` module, which imports what
is heavy only when it runs, so that `inferplane --help` stays quick.
"""

from __future__ import annotations

import typer

from perfmodel.adapters import (
    perf_calibrate,
    perf_estimate,
    perf_kv,
    perf_pareto,
    perf_recalibrate,
    perf_simulate,
    perf_size,
    perf_trace,
)


def register(app: typer.Typer) -> None:
    """Add the group to the root command."""
    perf = typer.Typer(no_args_is_help=True, help="Predict, simulate and size pools.", pretty_exceptions_enable=False)
    perf.command("calibrate")(perf_calibrate.calibrate)
    perf.command("estimate")(perf_estimate.estimate)
    perf.command("kv")(perf_kv.kv)
    perf.command("pareto")(perf_pareto.pareto)
    perf.command("recalibrate")(perf_recalibrate.recalibrate)
    perf.command("simulate")(perf_simulate.simulate)
    perf.command("size")(perf_size.size)
    perf.command("trace")(perf_trace.trace)
    app.add_typer(perf, name="perf")
