"""`inferplane perf estimate`: answers every row of a table of deployments, with bands and what had to be assumed.

Owns: the command and the columns it adds. Does not own: the prediction (`estimate`), the rules for missing inputs
(`row_rules`) or the coefficients. Measured columns and `note` are not read: shuffling or blanking them changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.adapters.perf_output import guard, progress, show_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perfmodel.adapters.catalog import Catalog
    from perfmodel.adapters.coefficient_file import CoefficientFile
    from perfmodel.estimate import Estimated, Known

# The columns that the command adds, in order.
ADDED = (
    "pred_ttft_ms", "ttft_ms_p10", "ttft_ms_p90",
    "pred_tpot_ms", "tpot_ms_p10", "tpot_ms_p90",
    "pred_output_tok_s", "output_tok_s_p10", "output_tok_s_p90",
    "bound", "assumed", "extrapolated", "error",
)  # fmt: skip

# Where the columns are said.
_ROWS_HELP = "CSV table of deployments; columns: docs/performance-model.md, 'Columns of `perf estimate`'."


def estimate(
    rows: Annotated[Path, typer.Option("--rows", help=_ROWS_HELP)],
    out: Annotated[Path, typer.Option("--out", help="CSV table to write: the input's columns and the predictions.")],
    coefficients: Annotated[
        Path | None, typer.Option("--coefficients", help="A coefficient file of `perf calibrate` (default: shipped).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the replays.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Predict TTFT, TPOT and output rate of every row of a table."""
    import csv

    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.coefficient_file import load_coefficients
    from perfmodel.adapters.measured import keep_input, read_rows
    from perfmodel.adapters.perf_compiling import say_if_compiling
    from perfmodel.estimate import Known

    with guard():
        keep_input("--out", out, rows)
        table = read_rows(rows)
        catalog = load_catalog()
        fitted = load_coefficients(coefficients)
        known = Known(catalog.devices, catalog.models)
        answers = []
        say_if_compiling(simulation=False)
        with progress("rows", len(table)) as done:
            for row in table:
                answers.append(answer(row, catalog, fitted, known, seed))
                done(1)
        columns = [name for name in (table[0] if table else ()) if name not in ADDED]
        with out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*columns, *ADDED])
            for row, added in zip(table, answers, strict=True):
                writer.writerow([*(row[name] for name in columns), *(added[name] for name in ADDED)])
        failed = sum(1 for added in answers if added["error"])
        counts = {
            "rows": len(table),
            "answered": len(table) - failed,
            "errors": failed,
            "assumed": sum(1 for added in answers if added["assumed"]),
            "extrapolated": sum(1 for added in answers if added["extrapolated"]),
            "out": str(out),
        }
        if as_json:
            show_json(counts)
        else:
            typer.echo(
                f"{counts['answered']} of {counts['rows']} rows answered: {counts['assumed']} with assumptions, "
                f"{counts['extrapolated']} extrapolated; {failed} errors; written to {out}"
            )


def answer(
    row: Mapping[str, str], catalog: Catalog, fitted: CoefficientFile, known: Known, seed: int
) -> dict[str, str]:
    """The added columns of one row."""
    from perfmodel.adapters.measured import configured
    from perfmodel.errors import PerfModelError
    from perfmodel.estimate import predict

    added = dict.fromkeys(ADDED, "")
    try:
        made = predict(configured(row, catalog), fitted.coefficients, known, fitted.first_token, seed)
    except PerfModelError as fault:
        added["error"] = str(fault).replace("\n", " ")
        return added
    except ArithmeticError as fault:  # figures that no engine has, together: one row must not cost the others
        added["error"] = f"its figures lead out of range ({fault}); expected those of an engine that can exist"
        return added
    for name, column, figure in (
        ("pred_ttft_ms", "ttft_ms", made.ttft_ms),
        ("pred_tpot_ms", "tpot_ms", made.tpot_ms),
        ("pred_output_tok_s", "output_tok_s", made.output_tok_per_s),
    ):
        added[name], added[f"{column}_p10"], added[f"{column}_p90"] = _figures(figure)
    added["bound"] = made.bound.value
    added["assumed"] = ";".join(made.assumed)
    added["extrapolated"] = made.extrapolated
    return added


def _figures(figure: Estimated) -> tuple[str, str, str]:
    return f"{figure.value:.5g}", f"{figure.p10:.5g}", f"{figure.p90:.5g}"
