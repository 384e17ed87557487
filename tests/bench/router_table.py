"""The comparison as one markdown table and one JSON object, with a line on each bar.

Owns: rows, columns, their units and the sentences under them. Does not own: the figures (`router_play`), which of them
were sought (`bench_router_policies`) or what a bar is (`router_search`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.bench.router_search import LEAST_SHARE, CaseCarried, CaseLoad

Figures = Mapping[str, object]

_COLUMNS = (
    "policy", "goodput %", "TTFT mean s", "p50", "p95", "p99", "TPOT p95 ms", "hits %", "pulled %", "tok/s", "carries",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one load. `carried`: its own carried copies, None for the floor; `figures`: means over seeds."""

    trace: str
    engines: str
    load_ratio: float
    copies: int
    label: str
    seeds: int
    carried: int | None
    monotone: bool
    figures: Figures


def mean_figures(each: Sequence[Figures]) -> dict[str, object]:
    """The mean of every figure over runs; None where one run has none."""
    found: dict[str, object] = {}
    for name in each[0]:
        values = [value for value in (figures[name] for figures in each) if isinstance(value, int | float)]
        found[name] = sum(values) / len(values) if len(values) == len(each) else None
    return found


def markdown(rows: Sequence[Row], loads: Sequence[CaseLoad], carries: Sequence[CaseCarried]) -> str:
    """The table by trace, engines and load, each with its verdicts."""
    lines: list[str] = []
    for place in dict.fromkeys((row.trace, row.engines, row.load_ratio, row.copies) for row in rows):
        trace, engines, load_ratio, copies = place
        lines += ["", f"### {trace}, {engines}, {load_ratio:.0%} of the best baseline's load ({copies} copies)", ""]
        lines += [f"| {' | '.join(_COLUMNS)} |", "|---|" + "--:|" * (len(_COLUMNS) - 1)]
        here = [row for row in rows if (row.trace, row.engines, row.load_ratio, row.copies) == place]
        lines += [_line(row) for row in sorted(here, key=_order)]
        lines += ["", *(_verdict(case) for case in loads if (case.trace, case.engines, case.load_ratio) == place[:3])]
    lines += ["", *(_carries(case) for case in carries)]
    return "\n".join(lines).strip() + "\n"


def _order(row: Row) -> tuple[bool, float]:
    return row.carried is None, -(_number(row.figures.get("goodput_ratio")) or 0.0)


def _line(row: Row) -> str:
    figures = row.figures
    name = row.label if row.seeds == 1 else f"{row.label} ({row.seeds} seeds)"
    load = "-" if row.carried is None else f"{row.carried}{'' if row.monotone else ' (not monotone)'}"
    if row.carried == 0:
        load = f"< {LEAST_SHARE:.0%} of ours"
    cells = [
        name, _shown(figures, "goodput_ratio", 100, 2), _shown(figures, "ttft_mean_s", 1, 3),
        _shown(figures, "ttft_p50_s", 1, 3), _shown(figures, "ttft_p95_s", 1, 2), _shown(figures, "ttft_p99_s", 1, 2),
        _shown(figures, "tpot_p95_s", 1e3, 1), _shown(figures, "hit_ratio", 100, 1),
        _shown(figures, "pulled_ratio", 100, 1), _shown(figures, "output_tok_per_s", 1, 0), load,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _verdict(case: CaseLoad) -> str:
    error = "" if case.points.error is None else f" +- {case.points.error:.2f}"
    text = f"Goodput {case.points.mean:+.2f}{error} points from {case.best} ({case.points.count} paired seeds)"
    if case.excess_removed_ratio is not None:
        text += f"; mean-TTFT excess over the floor removed: {case.excess_removed_ratio:.0%}"
    return text + "."


def _carries(case: CaseCarried) -> str:
    ratio = f" ({case.ours / case.best:.2f} times)" if case.best else ""
    return f"- {case.trace}, {case.engines}: ours carries {case.ours} copies, {case.best_name} {case.best}{ratio}."


def _shown(figures: Figures, name: str, scale: float, digits: int) -> str:
    value = _number(figures.get(name))
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def as_json(
    rows: Sequence[Row], loads: Sequence[CaseLoad], carries: Sequence[CaseCarried], missed: Sequence[str]
) -> dict[str, object]:
    """The same with every digit."""
    return {
        "rows": [asdict(row) for row in rows],
        "loads": [asdict(case) for case in loads],
        "carried": [asdict(case) | {"ratio": case.ours / case.best if case.best else None} for case in carries],
        "missed": list(missed),
    }
