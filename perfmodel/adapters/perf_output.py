"""What every `inferplane perf` command has in common: results on stdout, one sentence on stderr, a bar while it works.

Owns: exit codes (2 for input that cannot be right, 1 for the rest), the form of `--json`, and that progress is seen by
a person only. Does not own: what a command computes or prints as a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn

import orjson
import typer

from perfmodel.errors import ConfigError, PerfModelError


def fail(sentence: str, code: int = 1) -> NoReturn:
    """Say why on stderr and exit."""
    typer.echo(f"perf: {sentence}", err=True)
    raise typer.Exit(code)


def show_json(data: Mapping[str, object]) -> None:
    """Print one JSON object, keys in the order given; numbers that are not finite become null."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    typer.echo(orjson.dumps(data, option=options).decode())


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr; call what it gives with the amount done since the last call."""
    if not sys.stderr.isatty():
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


# Packages of the extra `perf` (pyproject.toml), which an installation without it lacks. `make setup` brings them; the
# project is on no package index.
_EXTRAS = ("numba", "scipy", "plotly")


@contextmanager
def guard() -> Iterator[None]:
    """Faults as the command line shows them: ConfigError exits 2, other faults of the model and the system exit 1."""
    try:
        yield
    except ConfigError as fault:
        fail(str(fault), 2)
    except PerfModelError as fault:
        fail(str(fault))
    except ModuleNotFoundError as fault:
        if fault.name not in _EXTRAS:
            raise
        fail(f"{fault.name} is not installed; from a checkout `make setup` installs it")
    except BrokenPipeError:
        raise  # the reader of a pipe has left (`| head`): typer ends without a word
    except OSError as fault:
        reason = fault.strerror or str(fault)
        fail(f"{fault.filename}: {reason}" if fault.filename else reason)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def _nothing(_: int) -> None:
    """Progress in a pipe."""


def one_of(field: str, value: str, known: Sequence[str]) -> str:
    """`value` when it is one of `known`; else ConfigError that offers the closest names, or all where none is close."""
    if value in known:
        return value
    close = get_close_matches(value, known, n=3, cutoff=0.5)
    raise ConfigError(f"{field} is {value!r}; expected one of {', '.join(close or known)}")
