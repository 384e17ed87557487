"""Our router against every public routing rule on the same work: `make bench-router`.

Owns: the order of the comparison: the load that each policy carries, then all of them at shares of what the best
baseline carries, our router and the best three over many seeds, and the floor. Does not own: what is compared
(`router.yaml`), one run (`router_play`), the arithmetic (`router_search`), the table (`router_table`), or the traces,
which are no part of this project: `--traces FOLDER`, by default the shared folder beside the checkout. Results are
kept in `--state FOLDER`, so that an interrupted comparison goes on; a run whose inputs or code changed is played anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from perfmodel.errors import ConfigError, PerfModelError
from tests.bench.router_plan import RouterPlan, Variant, load_plan
from tests.bench.router_play import Place, Play, play, run_key, trace_file
from tests.bench.router_search import (
    LEAST_SHARE,
    Bars,
    CaseCarried,
    CaseLoad,
    Search,
    carried,
    excess_removed,
    is_monotone,
    missed,
    next_copies,
    paired,
)
from tests.bench.router_state import RunStore
from tests.bench.router_table import Figures, Row, as_json, markdown, mean_figures

HERE = Path(__file__).parent
SHARED = Path(__file__).parents[3] / "shared" / "traces"
STATE = Path(__file__).parents[2] / ".inferplane" / "bench-router"

# `--quick`: the trace whose runs are the shortest, on the simplest engines.
QUICK_TRACE, QUICK_ENGINES = "mooncake_synthetic", "hbm"
# Baselines with more seeds than one, by goodput at the load in question.
BEST_COUNT = 3
# Seed of the runs that settings are chosen by: none of the comparison's.
TUNING_SEED = 1000


class Advance(Protocol):
    """Shows how far the comparison is."""

    def __call__(self, label: str, todo: int, done: int) -> None: ...


class Runner:
    """Plays runs on all cores, each only once. Mutable: the store, and what it counted."""

    def __init__(self, place: Place, store: RunStore, pool: ProcessPoolExecutor, advance: Advance) -> None:
        self._place, self._store, self._pool, self._advance = place, store, pool, advance
        self.played_count = 0

    def all(self, label: str, runs: Sequence[Play]) -> dict[Play, Figures]:
        """The figures of these runs."""
        keys = {run: run_key(self._place, run) for run in runs}
        todo = [run for run, key in keys.items() if self._store.get(key) is None]
        self._advance(label, len(todo), 0)
        waiting = {self._pool.submit(play, self._place, run): run for run in todo}
        for done in as_completed(waiting):
            run = waiting[done]
            self._store.put(keys[run], asdict(run), done.result())
            self.played_count += 1
            self._advance(label, 0, 1)
        found: dict[Play, Figures] = {}
        for run, key in keys.items():
            figures = self._store.get(key)
            assert figures is not None
            found[run] = figures
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """One trace on one engines file."""

    plan: RouterPlan
    trace: str
    engines: str

    @property
    def label(self) -> str:
        return f"{self.trace}, {self.engines}"


def carried_loads(case: Case, variants: Sequence[Variant], runner: Runner) -> dict[Variant, tuple[int, bool]]:
    """Copies that each carries, and whether goodput fell with every copy.

    The first one's search begins where the plan guesses, the others' side by side where the first one's ended.
    """
    plan = case.plan
    search = Search(plan.traces[case.trace].guess_copies, plan.carried_ratio, plan.resolution_ratio)
    first = _carried(case, variants[:1], runner, search)
    others = replace(search, guess=max(1, first[variants[0]][0]), least_share=LEAST_SHARE)
    return first | _carried(case, variants[1:], runner, others)


def _carried(
    case: Case, variants: Sequence[Variant], runner: Runner, search: Search
) -> dict[Variant, tuple[int, bool]]:
    known: dict[Variant, dict[int, float]] = {variant: {} for variant in variants}
    while True:
        asked = {variant: next_copies(search, known[variant]) for variant in variants}
        runs = [
            Play(case.trace, case.engines, variant, copies, 0)
            for variant, copies in asked.items()
            if copies is not None
        ]
        if not runs:
            return {v: (carried(search, known[v]), is_monotone(search, known[v])) for v in variants}
        for run, figures in runner.all(f"{case.label}: carried load", runs).items():
            known[run.variant][run.copies] = _number(figures, "goodput_ratio")


def _number(figures: Figures, name: str) -> float:
    value = figures[name]
    return float(value) if isinstance(value, int | float) else float("nan")


def _better(figures: Figures) -> tuple[float, float]:
    """Orders policies: goodput, then mean TTFT."""
    return _number(figures, "goodput_ratio"), -_number(figures, "ttft_mean_s")


@dataclass(frozen=True, slots=True)
class Compared:
    """What one case added to the comparison."""

    rows: tuple[Row, ...]
    loads: tuple[CaseLoad, ...]
    carried: CaseCarried | None


def compare(case: Case, runner: Runner) -> Compared:
    """All of one trace on one engines file."""
    plan = case.plan
    variants = plan.variants(case.trace)
    loads = carried_loads(case, variants, runner)
    rivals = [variant for variant in variants if variant.policy not in plan.ours]
    best = max(rivals, key=lambda variant: loads[variant][0])
    ours = Variant(plan.ours[-1])
    rows: list[Row] = []
    verdicts: list[CaseLoad] = []
    for ratio in plan.load_ratios:
        copies = max(1, int(ratio * loads[best][0]))
        found, verdict = at_load(case, runner, loads, (ratio, copies))
        rows += found
        verdicts.append(verdict)
    carry = CaseCarried(case.trace, case.engines, loads[ours][0], loads[best][0], best.label)
    return Compared(tuple(rows), tuple(verdicts), carry)


def at_load(
    case: Case, runner: Runner, loads: Mapping[Variant, tuple[int, bool]], load: tuple[float, int]
) -> tuple[list[Row], CaseLoad]:
    """Rows and verdict of one load: its share of the best baseline's, and its copies."""
    plan, (ratio, copies) = case.plan, load
    label = f"{case.label} at {ratio:.0%}"
    first = runner.all(label, [Play(case.trace, case.engines, variant, copies, 0) for variant in loads])
    by_variant = {run.variant: figures for run, figures in first.items()}
    rivals: dict[str, Variant] = {}
    for variant in loads:  # of a baseline's defaults and its chosen settings the better counts
        held = rivals.get(variant.policy)
        if held is None or _better(by_variant[variant]) > _better(by_variant[held]):
            rivals[variant.policy] = variant
    ours = [rivals.pop(name) for name in plan.ours]
    ranked = sorted(rivals.values(), key=lambda variant: _better(by_variant[variant]), reverse=True)
    judged = ours[-1]
    runs = [
        Play(case.trace, case.engines, variant, copies, seed)
        for variant in (*ours, *ranked[:BEST_COUNT])
        for seed in range(plan.seeds)
    ]
    floors = [Play(case.trace, case.engines, judged, copies, seed, floor=True) for seed in range(plan.seeds)]
    played = runner.all(label, [*runs, *floors])
    seeds: dict[Variant, dict[int, Figures]] = {variant: {0: by_variant[variant]} for variant in (*ours, *ranked)}
    for run in runs:
        seeds[run.variant][run.seed] = played[run]
    means = {variant: mean_figures(list(each.values())) for variant, each in seeds.items()}
    floor = mean_figures([played[run] for run in floors])
    top = ranked[:BEST_COUNT]
    best = max(top, key=lambda variant: _better(means[variant]))
    points = paired(_points(seeds[judged]), _points(seeds[best]))
    quickest_s = min(_number(means[variant], "ttft_mean_s") for variant in top)
    removed = excess_removed(quickest_s, _number(means[judged], "ttft_mean_s"), _number(floor, "ttft_mean_s"))
    rows = [
        _row(case, load, (variant.label, len(seeds[variant])), _best_load(loads, variant.policy), means[variant])
        for variant in (*ours, *ranked)
    ]
    rows.append(_row(case, load, ("floor: unbounded cache", len(floors)), (None, True), floor))
    return rows, CaseLoad(case.trace, case.engines, ratio, points, best.label, removed)


def _points(seeds: Mapping[int, Figures]) -> dict[int, float]:
    return {seed: 100 * _number(figures, "goodput_ratio") for seed, figures in seeds.items()}


def _best_load(loads: Mapping[Variant, tuple[int, bool]], policy: str) -> tuple[int, bool]:
    """Of the defaults and the chosen settings, the larger load."""
    return max(load for variant, load in loads.items() if variant.policy == policy)


def _row(
    case: Case, load: tuple[float, int], named: tuple[str, int], carries: tuple[int | None, bool], figures: Figures
) -> Row:
    return Row(case.trace, case.engines, load[0], load[1], named[0], named[1], carries[0], carries[1], figures)


# Choosing settings


def tune(plan: RouterPlan, runner: Runner) -> dict[str, dict[str, dict[str, str]]]:
    """For each baseline and trace, the declared settings that beat the defaults on the first engines file."""
    engines = next(iter(plan.engines))
    found: dict[str, dict[str, dict[str, str]]] = {}
    for trace in plan.traces:
        case = Case(plan, trace, engines)
        defaults = [Variant(name) for name in (plan.ours[-1], *plan.baselines)]
        copies = max(
            1, int(max(plan.load_ratios) * max(load for load, _ in carried_loads(case, defaults, runner).values()))
        )
        tried = [
            Variant(name, each) for name, declared in plan.baselines.items() for each in ((), *declared) if declared
        ]
        played = runner.all(
            f"{case.label}: settings", [Play(trace, engines, variant, copies, TUNING_SEED) for variant in tried]
        )
        for name, declared in plan.baselines.items():
            mine = {run.variant: _better(figures) for run, figures in played.items() if run.variant.policy == name}
            if declared and (top := max(mine, key=lambda variant: mine[variant])).settings:
                found.setdefault(name, {})[trace] = dict(top.settings)
    return found


def with_chosen(text: str, chosen: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The file with another `chosen`, its last key."""
    kept = re.split(r"^chosen:.*", text, maxsplit=1, flags=re.MULTILINE)[0]
    if not chosen:
        return f"{kept}chosen: {{}}\n"
    lines = [f"{kept}chosen:"]
    for name, by_trace in chosen.items():
        lines.append(f"  {name}:")
        for trace, settings in by_trace.items():
            words = ", ".join(f"{setting}: {value}" for setting, value in settings.items())
            lines.append(f"    {trace}: {{{words}}}")
    return "\n".join(lines) + "\n"


# The command


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_router_policies", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", type=Path, default=HERE / "router.yaml", help="what is compared")
    parser.add_argument("--traces", type=Path, default=SHARED, help="folder of the trace files")
    parser.add_argument("--state", type=Path, default=STATE, help="folder where results are kept")
    parser.add_argument("--only", action="append", metavar="TRACE[:ENGINES]", help="these cases only; more than once")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--seeds", type=int, help="instead of the file's number")
    parser.add_argument("--quick", action="store_true", help="one trace, one engines file, one seed")
    parser.add_argument("--tune", action="store_true", help="choose the baselines' settings and write them to --plan")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every bar is held")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help="write the table here too")
    return parser.parse_args(words)


def _cases(plan: RouterPlan, only: Sequence[str] | None, quick: bool) -> list[Case]:
    """Which cases are played. Raises ConfigError for a name that the plan does not have."""
    every = [Case(plan, trace, engines) for trace in plan.traces for engines in plan.engines]
    if quick:
        only = [f"{QUICK_TRACE}:{QUICK_ENGINES}"]
    if not only:
        return every
    found: list[Case] = []
    for word in only:
        trace, _, engines = word.partition(":")
        wanted = [case for case in every if case.trace == trace and engines in ("", case.engines)]
        if not wanted:
            known = ", ".join(plan.traces), ", ".join(plan.engines)
            raise ConfigError(f"--only is {word!r}; expected TRACE or TRACE:ENGINES of {known[0]} and {known[1]}")
        found += wanted
    return found


@contextmanager
def _progress() -> Iterator[Advance]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda label, todo, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("runs", total=0)
        total = 0

        def advance(label: str, todo: int, done: int) -> None:
            nonlocal total
            total += todo
            bar.update(task, description=label, total=total, advance=done)

        yield advance


def _missing(plan: RouterPlan, cases: Sequence[Case], folder: Path) -> str | None:
    """One sentence where a trace is not there."""
    if not folder.is_dir():
        return f"no folder {folder}; expected --traces FOLDER with the trace files, which are no part of this project"
    lacking = sorted({case.trace for case in cases if not trace_file(folder, case.trace).exists()})
    if lacking:
        return f"{folder} has no {', '.join(f'{name}.jsonl.gz' for name in lacking)}; expected the traces of the plan"
    return None


def _run(options: argparse.Namespace) -> int:
    plan = load_plan(options.plan)
    if options.quick or options.seeds:
        plan = replace(plan, seeds=1 if options.quick else options.seeds)
    cases = _cases(plan, options.only, options.quick)
    reason = _missing(plan, cases, options.traces)
    if reason:
        print(f"bench-router: {reason}", file=sys.stderr)
        return 2
    place = Place(plan, options.traces)
    pool = ProcessPoolExecutor(max(1, options.workers), mp_context=get_context("spawn"))
    with pool, _progress() as advance:
        runner = Runner(place, RunStore(options.state), pool, advance)
        try:
            if options.tune:
                chosen = tune(plan, runner)
                options.plan.write_text(with_chosen(options.plan.read_text(encoding="utf-8"), chosen), encoding="utf-8")
                return 0
            return _report(options, plan, [compare(case, runner) for case in cases])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _report(options: argparse.Namespace, plan: RouterPlan, found: Sequence[Compared]) -> int:
    rows = [row for each in found for row in each.rows]
    loads = [load for each in found for load in each.loads]
    carries = [each.carried for each in found if each.carried is not None]
    agents = [name for name, trace in plan.traces.items() if trace.agent]
    sentences = missed(loads, carries, agents, Bars())
    text = markdown(rows, loads, carries)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(as_json(rows, loads, carries, sentences), indent=1), encoding="utf-8")
    for sentence in sentences:
        print(f"bar missed: {sentence}", file=sys.stderr)
    return 1 if options.check and sentences else 0


def main(words: Sequence[str] | None = None) -> int:
    """Exit 0; 1: a bar is missed under --check, or a fault; 2: a value that cannot be, or no traces."""
    try:
        return _run(_options(words))
    except (ConfigError, PerfModelError) as fault:
        print(f"bench-router: {fault}", file=sys.stderr)
        return 2 if isinstance(fault, ConfigError) else 1
    except OSError as fault:
        print(f"bench-router: {fault.filename}: {fault.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench-router: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
