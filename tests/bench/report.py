"""The tables, the bars and the JSON of the gateway benchmark.

Owns: which figures are shown, ratios between targets of one run, and the bars with who fails them. Does not own:
measuring. A bar that was not measured is a failure of `--check`, never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.workloads import BURST, LATENCY, LONG, PACED, RATE, TTFT, Spread

OURS, DIRECT = "inferplane", "direct"
Figures = Mapping[tuple[str, str], Mapping[str, Spread]]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: a figure of one load, scaled; `added` subtracts what the stub alone takes."""

    title: str
    load: str
    figure: str
    scale: float = 1.0
    digits: int = 0
    added: bool = False


COLUMNS = (
    Column("req/s c64", RATE, "requests_per_s"),
    Column("CPU us/req", RATE, "gateway_cpu_us_per_request"),
    Column("side us/req", RATE, "side_cpu_us_per_request"),
    Column("added p50 us", LATENCY, "latency_us.p50", added=True),
    Column("added p99 us", LATENCY, "latency_us.p99", added=True),
    Column("TTFT added ms", TTFT, "ttft_us.p50", 1e-3, 2, added=True),
    Column("burst chunks/s", BURST, "chunks_per_s"),
    Column("paced chunks/s", PACED, "chunks_per_s"),
    Column("CPU us/chunk", PACED, "gateway_cpu_us_per_chunk", digits=1),
    Column("delay p50 ms", PACED, "delay_us.p50", 1e-3, 2),
    Column("delay p99 ms", PACED, "delay_us.p99", 1e-3, 1),
    Column("480 kB added ms", LONG, "latency_us.p50", 1e-3, 2, added=True),
)


def _text(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def value_of(figures: Figures, target: str, column: Column) -> Spread | None:
    """The column's figure of a target; None when it was not measured."""
    spread = figures.get((target, column.load), {}).get(column.figure)
    if spread is None:
        return None
    less = 0.0
    if column.added:
        direct = figures.get((DIRECT, column.load), {}).get(column.figure)
        if direct is None:
            return None
        less = direct.median
    return Spread(
        (spread.median - less) * column.scale,
        (spread.least - less) * column.scale,
        (spread.most - less) * column.scale,
        spread.runs_count,
    )


def _cell(figures: Figures, target: str, column: Column) -> str:
    if target == DIRECT and column.added:
        column = Column(column.title, column.load, column.figure, column.scale, max(column.digits, 1))
    spread = value_of(figures, target, column)
    if spread is None:
        return "-"
    middle = _text(spread.median, column.digits)
    if spread.runs_count == 1:
        return middle
    return f"{middle} ({_text(spread.least, column.digits)}-{_text(spread.most, column.digits)})"


def table(figures: Figures, targets: Sequence[str]) -> str:
    """One row per target; medians with (least-most). The row `direct` shows absolute times instead of added ones."""
    rows = [["target", *(column.title for column in COLUMNS)]]
    rows += [[target, *(_cell(figures, target, column) for column in COLUMNS)] for target in targets]
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def noise(figures: Figures, targets: Sequence[str]) -> str:
    """How busy others kept the machine during each target's runs, and how long its gateway waited for its core."""
    parts = []
    for target in targets:
        runs = [spread for (name, _), spread in figures.items() if name == target]
        foreign = max((run["foreign_cpu_ratio"].median for run in runs), default=0.0)
        waited = max((run["gateway_waited_ratio"].median for run in runs), default=0.0)
        parts.append(f"{target} {foreign:.2f}/{waited:.2f}")
    told = "Noise (CPUs that foreign processes used / share of time that the gateway waited for its core; worst load): "
    return told + ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar against what was measured. `measured` None: not measured, which is no pass."""

    bar: str
    limit: float
    at_least: bool
    measured: float | None

    @property
    def passed(self) -> bool:
        """Whether the bar is held."""
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def line(self) -> str:
        """For people."""
        sign = ">=" if self.at_least else "<="
        shown = "not measured" if self.measured is None else f"{self.measured:,.2f}"
        return f"{'ok  ' if self.passed else 'FAIL'} {self.bar}: {shown} ({sign} {self.limit:,.2f})"

    def record(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "passed": self.passed}


def verdicts(figures: Figures, idle_mb: float | None) -> list[Verdict]:
    """The bars of DESIGN for the gateway."""

    def ours(load: str, figure: str, scale: float = 1.0, *, added: bool = False) -> float | None:
        spread = value_of(figures, OURS, Column("", load, figure, scale, added=added))
        return None if spread is None else spread.median

    def against(peer: str) -> float | None:
        mine = figures.get((OURS, RATE), {}).get("requests_per_s")
        theirs = figures.get((peer, RATE), {}).get("requests_per_s")
        return None if mine is None or theirs is None else mine.median / theirs.median

    return [
        Verdict("requests/s against LiteLLM's", 40.0, True, against("litellm")),
        Verdict("requests/s against vllm-router cache_aware's", 0.7, True, against("vllm-router")),
        Verdict("added latency p50, ms", 0.4, False, ours(LATENCY, "latency_us.p50", 1e-3, added=True)),
        Verdict("burst chunks/s", 80_000, True, ours(BURST, "chunks_per_s")),
        Verdict("CPU per paced chunk, us", 35.0, False, ours(PACED, "gateway_cpu_us_per_chunk")),
        Verdict("added TTFT p50, ms", 1.0, False, ours(TTFT, "ttft_us.p50", 1e-3, added=True)),
        Verdict("added latency p50 of a 480 kB prompt, ms", 5.0, False, ours(LONG, "latency_us.p50", 1e-3, added=True)),
        Verdict("idle gateway process, MB resident", 150.0, False, idle_mb),
    ]


def ratios(figures: Figures, targets: Sequence[str]) -> str:
    """Our requests/s, and our CPU time per request, against each other target's."""
    mine = figures.get((OURS, RATE))
    rows = [["ours against", "requests/s", "CPU per request"]]
    for name in targets:
        theirs = figures.get((name, RATE))
        if name in (OURS, DIRECT) or mine is None or theirs is None:
            continue
        rate = mine["requests_per_s"].median / theirs["requests_per_s"].median
        cost = mine["gateway_cpu_us_per_request"].median / theirs["gateway_cpu_us_per_request"].median
        rows.append([name, f"{rate:.2f}x", f"{cost:.2f}x"])
    return markdown(rows)
