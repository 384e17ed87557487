"""One line before a `perf` command waits for the compiler: what happens, about how long, and that it is once.

Owns: the line, and that it goes to stderr, on a terminal and in a pipe. Does not own: whether the compiler runs
(`compiled_code`). Without it the first command on a machine says nothing for up to a minute and looks hung.
"""

from __future__ import annotations

import typer

from perfmodel.adapters.compiled_code import CompiledState, loops_state, simulation_state

# Seconds of the compiler, measured: 10 on an idle core for the queueing loops or the simulation, 60 on a busy machine.
_TAKES = "10 to 60 s"


def say_if_compiling(*, simulation: bool) -> None:
    """Switch the cache of compiled code on; say when the simulation, or else the queueing loops, have to be compiled.

    For commands that compile in this process or in ones that it starts; a cluster has caches of its own.
    """
    state = simulation_state() if simulation else loops_state()
    if state is CompiledState.READY:
        return
    what = "simulation" if simulation else "queueing model"
    kept = "once (kept in ~/.cache/inferplane/compiled)"
    if state is CompiledState.CANNOT_KEEP:
        kept = "each time (~/.cache/inferplane/compiled cannot be written)"
    typer.echo(f"Compiling the {what} for this machine: {_TAKES}, {kept}.", err=True)
