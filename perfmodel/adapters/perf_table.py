"""Tables of `inferplane perf` for people: a box where it fits, else plain columns that the terminal wraps.

Owns: the choice between the two, and that no value and no title is cut in either. Does not own: what is in a table.
Why not rich's own layout: in a narrow window it shrinks columns down to nothing and ends cells with an ellipsis, and a
name that somebody wants to copy is gone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import typer

# Columns of a table that goes to a file or a pipe, where no line has to fit a window.
_PIPE_COLUMNS = 160


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str] = ()
) -> None:
    """The title, then the rows. `left`: columns of words; the others are numbers and end at the right."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if title:
        typer.echo(title)
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PIPE_COLUMNS)
    # A box has a line before each column and one at the end, and a blank on both sides of each cell.
    if sum(widths) + 3 * len(columns) + 1 <= console.width:
        table = Table()
        for column in columns:
            table.add_column(Text(column), justify="left" if column in left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    for row in [columns, *rows]:
        cells = []
        for cell, column, width in zip(row, columns, widths, strict=True):
            blank = " " * (width - cell_len(cell))
            cells.append(cell + blank if column in left else blank + cell)
        typer.echo("  ".join(cells).rstrip())


def counted(count: int, noun: str) -> str:
    """The number with its noun, which takes an s unless there is one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
