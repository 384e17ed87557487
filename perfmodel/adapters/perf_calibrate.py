"""`inferplane perf calibrate`: fits the coefficients to a table of measurements and says how far to trust them.

Owns: the command, its report, its plot and the file it writes. Does not own: the fit (`calibration`, `validation`), the
refusal of rows (`measured`), or the file's format (`coefficient_file`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.adapters.perf_output import guard, progress, show_json
from perfmodel.adapters.perf_table import print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perfmodel.adapters.measured import Refused
    from perfmodel.calibration.fit import Penalties
    from perfmodel.calibration.validation import Calibrated, Measured, Predicted

# Groups with fewer points are summed up in the report's totals only.
_LEAST_GROUP_POINTS = 5

# Candidates of `--choose-shrinkage`: ridge weights relative to the defaults.
_CANDIDATES = (0.3, 1.0, 3.0)

# Lines of a table that are named for one reason of refusal.
_SHOWN_LINES = 6

# Names of what was left out, as in docs/performance-model.md ("How far off it is"), by the keys of the JSON.
_SPLIT_WORDS = {"within": "curves", "gpu": "device", "combo": "pair", "model": "family"}

# Where the columns are said.
_DATA_HELP = "CSV table of measurements; columns: docs/performance-model.md, 'Columns of `perf estimate`'."


def calibrate(
    data: Annotated[Path, typer.Option("--data", help=_DATA_HELP)],
    out: Annotated[Path | None, typer.Option("--out", help="Coefficient file (YAML) to write.")] = None,
    choose: Annotated[
        bool, typer.Option("--choose-shrinkage", help="Choose the shrinkage by leaving out whole (model, GPU) pairs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Plot errors to FILE.html or FILE.png.")] = None,
) -> None:
    """Fit the performance model to measurements and cross-validate it."""
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.coefficient_file import CoefficientFile, dump_coefficients
    from perfmodel.adapters.measured import keep_input, measured, read_rows, usable_rows
    from perfmodel.adapters.plots import check_plot_path, write_plot

    with guard():
        keep_input("--out", out, data)
        keep_input("--plot", plot, data)
        if plot is not None:
            check_plot_path(plot)
        usable, refused = usable_rows(read_rows(data), load_catalog())
        rows = [row for row in map(measured, usable) if row.useful]
        report, whole, answers = _calibrated(rows, refused, choose=choose)
        if out is not None:
            file = CoefficientFile(
                coefficients=whole.coefficients,
                first_token=whole.first_token,
                source=f"fitted to {len(rows)} rows of {data.name}",
                residuals=report["groups"],  # type: ignore[arg-type]  # built below
                cross_validation=report["splits"],  # type: ignore[arg-type]  # built below
            )
            out.write_text(dump_coefficients(file), encoding="utf-8")
        if plot is not None:
            write_plot(_figure(answers), plot)
        if as_json:
            show_json(report)
        else:
            _show(report, refused)


def _calibrated(
    rows: Sequence[Measured], refused: Sequence[Refused], *, choose: bool
) -> tuple[dict[str, object], Calibrated, list[Predicted]]:
    """The report, the fitted set with its bands, and all cross-validated answers."""
    from dataclasses import replace

    from perfmodel.adapters.perf_compiling import say_if_compiling
    from perfmodel.calibration import validation
    from perfmodel.calibration.fit import Penalties, Scheme

    say_if_compiling(simulation=False)
    penalties = Penalties()
    tried: dict[str, float] = {}
    if choose:
        penalties, tried = _chosen(rows)
    whole = validation.calibrate(rows, penalties)
    answers: list[Predicted] = []
    with progress("cross-validation", len(rows) * len(Scheme)) as done:
        for scheme in Scheme:
            answers.extend(validation.cross_validate(rows, scheme, whole, penalties, done))
    whole = replace(whole, coefficients=replace(whole.coefficients, bands=validation.bands(answers)))
    splits: dict[str, object] = {}
    misses: dict[str, object] = {}
    unjudged: dict[str, int] = {}
    for scheme in Scheme:
        own = [answer for answer in answers if answer.scheme is scheme]
        if len(own) < len(rows):
            unjudged[scheme.value] = len(rows) - len(own)
        if not own:
            continue
        splits[scheme.value] = {
            **validation.error_table(own, lambda _: "all").get("all", {}),
            **{f"saturation_{name}": value for name, value in validation.saturation(own).items()},
            **validation.coverage(own, whole.coefficients),
        }
        misses[scheme.value] = validation.saturation_misses(own)
        for kind, line in validation.error_table(own, validation.kind_name).items():
            splits[f"{scheme.value} {kind}"] = line
    within = [answer for answer in answers if answer.scheme is Scheme.WITHIN]
    groups = validation.error_table(within, lambda answer: validation.group_name(answer.row))
    report: dict[str, object] = {
        "rows": len(rows),
        "refused": _reasons(refused),
        "shrinkage": tried,
        "rows_without_cross_validation": unjudged,
        "splits": splits,
        "saturation_misses": misses,
        "groups": {name: line for name, line in groups.items() if _points(line) >= _LEAST_GROUP_POINTS},
    }
    return report, whole, answers


def _chosen(rows: Sequence[Measured]) -> tuple[Penalties, dict[str, float]]:
    """The ridge weights with the least error on pairs left out, and the median errors of all candidates."""
    from dataclasses import fields, replace

    from perfmodel.calibration.fit import Penalties, Problem, choose_penalties

    points = [point for row in rows if (point := row.observation()) is not None]
    base = Penalties()
    groups = [item.name for item in fields(Penalties) if item.name != "base"]
    candidates = {
        f"x{ratio:g}": replace(base, **{name: getattr(base, name) * ratio for name in groups}) for ratio in _CANDIDATES
    }
    with progress("shrinkage", len(candidates)) as done:
        best, errors = choose_penalties(Problem(points), candidates, lambda _: done(0))
    return candidates[best], errors


def _points(line: Mapping[str, float]) -> float:
    return max(line.get("ttft_count", 0.0), line.get("tpot_count", 0.0))


def _reasons(refused: Sequence[Refused]) -> dict[str, int]:
    """How many rows were refused, by reason without its figures."""
    counts: dict[str, int] = {}
    for row in refused:
        reason = _kind_of_reason(row)
        counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _kind_of_reason(row: Refused) -> str:
    return row.reason.split(":")[0].split(";")[0]


def _refusal_words(refused: Sequence[Refused]) -> list[str]:
    """One sentence for each reason: how many rows, their lines in the file, and the first in full."""
    groups: dict[str, list[Refused]] = {}
    for row in refused:
        groups.setdefault(_kind_of_reason(row), []).append(row)
    told = []
    for rows in sorted(groups.values(), key=len, reverse=True):
        lines = ", ".join(str(row.line) for row in rows[:_SHOWN_LINES])
        more = f" and {len(rows) - _SHOWN_LINES} more" if len(rows) > _SHOWN_LINES else ""
        if len(rows) == 1:
            told.append(f"1 row is not used, line {lines}: {rows[0].reason}")
        else:
            told.append(f"{len(rows)} rows are not used, lines {lines}{more}; line {rows[0].line}: {rows[0].reason}")
    return told


def _unjudged_words(report: Mapping[str, object]) -> list[str]:
    """One sentence for each split in which rows could not be predicted by the others."""
    from perfmodel.calibration.fit import UNITS, Scheme

    unjudged: Mapping[str, int] = report["rows_without_cross_validation"]  # type: ignore[assignment]  # built above
    told = []
    for name, count in unjudged.items():
        unit, words = UNITS[Scheme(name)], _SPLIT_WORDS[name]
        if count == report["rows"]:
            told.append(f"not cross-validated by {words}: the rows with tpot_ms are all of one {unit}")
        else:
            told.append(f"{count} rows not cross-validated by {words}: without their {unit} no tpot_ms is left to fit")
    return told


def _show(report: Mapping[str, object], refused: Sequence[Refused]) -> None:
    """The report as sentences and tables; a table without a row is left out."""
    for sentence in (f"{report['rows']} rows fitted", *_refusal_words(refused), *_unjudged_words(report)):
        typer.echo(sentence)
    columns = ("", "TPOT n", "median", "p90", "bias", "TTFT n", "median", "p90", "bias")
    for title, section in (
        ("Cross-validated errors by what was left out and load", "splits"),
        ("Residuals by group", "groups"),
    ):
        lines: Mapping[str, Mapping[str, float]] = report[section]  # type: ignore[assignment]  # built above
        rows = []
        for name, line in lines.items():
            cells = [_split_words(name) if section == "splits" else name]
            for quantity in ("tpot", "ttft"):
                cells.append(f"{line.get(f'{quantity}_count', 0):.0f}")
                cells.extend(_percent(line.get(f"{quantity}_{figure}_ratio")) for figure in ("median", "p90", "bias"))
            rows.append(cells)
        if rows:
            print_table(title, columns, rows, left=("",))
    _show_misses(report["saturation_misses"])  # type: ignore[arg-type]  # built above


def _split_words(name: str) -> str:
    """A key of the report's splits (`combo`, `combo closed_loop`) in the words of the documentation."""
    split, space, kind = name.partition(" ")
    return f"{_SPLIT_WORDS[split]}{space}{kind}"


def _show_misses(splits: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    """Loads that were wrongly said to be saturated or not, by cause; nothing where none was."""
    none = {"missed": 0, "false": 0}
    rows = []
    for cause in sorted({cause for causes in splits.values() for cause in causes}):
        counts = [causes.get(cause, none) for causes in splits.values()]
        rows.append([cause, *(f"{count['missed']} / {count['false']}" for count in counts)])
    if rows:
        title = "TTFT above 10 s, said wrongly by cause: missed / false"
        print_table(title, ("", *map(_split_words, splits)), rows, left=("",))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _figure(answers: Sequence[Predicted]) -> object:
    """Predicted over measured TPOT and TTFT, points left out by curve."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    from perfmodel.calibration.fit import Scheme
    from perfmodel.calibration.validation import kind_name, quantity_pairs
    from perfmodel.estimate import Quantity

    figure = make_subplots(cols=2, subplot_titles=("TPOT (ms), curves left out", "TTFT (ms), curves left out"))
    shown = [answer for answer in answers if answer.scheme is Scheme.WITHIN]
    palette = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
    for color, kind in zip(palette, sorted({kind_name(answer) for answer in shown}), strict=False):
        for column, quantity in ((1, Quantity.TPOT), (2, Quantity.TTFT)):
            pairs = [
                pair
                for answer in shown
                if kind_name(answer) == kind and (pair := quantity_pairs(answer).get(quantity)) is not None
            ]
            figure.add_trace(
                go.Scatter(
                    x=[seen * 1e3 for _, seen in pairs],
                    y=[made * 1e3 for made, _ in pairs],
                    mode="markers",
                    marker={"size": 4, "color": color},
                    name=kind,
                    legendgroup=kind,
                    showlegend=column == 1,
                ),
                row=1,
                col=column,
            )
    for column in (1, 2):
        figure.update_xaxes(type="log", title="measured", row=1, col=column)
        figure.update_yaxes(type="log", title="predicted", row=1, col=column)
        low, high = (1.0, 1_000.0) if column == 1 else (10.0, 1e6)
        figure.add_trace(
            go.Scatter(x=[low, high], y=[low, high], mode="lines", line={"color": "#bbb"}, showlegend=False),
            row=1,
            col=column,
        )
    return figure
