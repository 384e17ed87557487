"""The `inferplane` command: one typer app whose sub-commands each package registers by entry point.

Owns: the root app, its options and the loading of the plug-ins. Does not own: any sub-command. Each package declares
`register(app)` in the entry-point group `inferplane.commands`, so that no package imports another to appear here. A
plug-in that cannot be loaded costs its own commands and one line on stderr, never the other commands.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated

import typer

from controlplane.adapters.processes import follow_parent

# The entry-point group that packages register their commands in (DESIGN 2 and 4.7).
COMMAND_GROUP = "inferplane.commands"


def command_plugins() -> tuple[EntryPoint, ...]:
    """The installed command plug-ins, sorted by name so that `--help` never changes its order."""
    return tuple(sorted(entry_points(group=COMMAND_GROUP), key=lambda plugin: plugin.name))


def load_plugins(app: typer.Typer, plugins: Iterable[EntryPoint], complain: Callable[[str], None]) -> None:
    """Let each plug-in add its commands to `app`; call `complain` with one line for each that cannot."""
    for plugin in plugins:
        try:
            plugin.load()(app)
        except Exception as fault:
            where = traceback.extract_tb(fault.__traceback__)[-1]
            complain(
                f"inferplane: the commands of {plugin.name!r} ({plugin.value}) are missing: "
                f"{type(fault).__name__}: {fault} ({where.filename}:{where.lineno})"
            )


def build_app(plugins: Iterable[EntryPoint], complain: Callable[[str], None]) -> typer.Typer:
    """The root app with the commands of `plugins`."""
    app = typer.Typer(
        name="inferplane",
        help="The control plane of an LLM inference cluster: gateway, router, ledger and performance model.",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,  # locals may hold keys and prompts
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    load_plugins(app, plugins, complain)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"inferplane {version('inferplane')}")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The control plane of an LLM inference cluster: gateway, router, ledger and performance model."""


def main() -> None:
    """Run the command line. Exit status: 0 success, 1 a one-line reason on stderr, 2 a usage error."""
    follow_parent()
    build_app(command_plugins(), lambda line: print(line, file=sys.stderr))()


if __name__ == "__main__":
    main()
