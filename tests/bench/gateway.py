"""The gateway side by side with others on one machine: `python -m tests.bench.gateway [--quick] [--check]`.

Owns: the order of runs (load by load, and within a round every target in turn, so that each meets the same noise), and
the end: the books must reconcile exactly with what the engine stub counted. Does not own: the parts, see the imports.

One gateway process on one core, in front of a stub engine in C that shares the other core with the clients. Every
target is started once, stays up and idles while another one is measured; before another target's turn our shipper gets
the time to bring our usage into the database, so that its work falls into nobody else's run. During our own runs it
works beside them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench import native, peers, report, stack, workloads
from tests.bench.machine import BenchError, affinity, cpu_s, facts, tree
from tests.bench.report import DIRECT, OURS
from tests.bench.workloads import Bench, Target, Workload

MODEL = "bench-model"
ENDPOINT_COUNT = 8
_ROUNDS, _QUICK_ROUNDS = 5, 1
# A run with a wrong answer is made again this often, and both are reported.
_ATTEMPTS = 3
_IDLE_S = 3.0
_QUICK_PEERS = ("litellm", "vllm-router")


def cache_home() -> Path:
    """Where peers' environments, compiled programs and data folders lie: outside the working tree."""
    named = os.environ.get("INFERPLANE_BENCH_HOME")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferplane-bench"


@dataclass(slots=True)
class Session:
    """Mutable: what runs now, and what was measured."""

    options: argparse.Namespace
    home: Path
    folder: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    targets: dict[str, Target] = field(default_factory=dict)
    starts: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Peers, and loads of a target, that were asked for and not measured, with the reason."""
    repeated: list[str] = field(default_factory=list)
    """Runs that were made again, with the reason: a wrong answer, say because others kept our Redis from its core."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gateway", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one round of short runs against LiteLLM and vllm-router")
    parser.add_argument("--peers", help=f"comma-separated, of {', '.join(peers.PEERS)}; `none` for none")
    parser.add_argument("--loads", help=f"comma-separated, of {', '.join(load.name for load in workloads.WORKLOADS)}")
    parser.add_argument("--rounds", type=int, help=f"default {_ROUNDS}")
    parser.add_argument("--database-url", default="", help="SQLAlchemy URL of an empty database; default: SQLite")
    parser.add_argument("--nice", type=int, default=0, help="weight of all that is measured; root may go below 0")
    parser.add_argument("--no-install", action="store_true", help="never install a peer")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every bar is held")
    parser.add_argument("--json", type=Path, help="write every run and the medians to this file")
    options = parser.parse_args()
    known = {load.name for load in workloads.WORKLOADS}
    chosen = options.loads.split(",") if options.loads else sorted(known)
    named = options.peers.split(",") if options.peers else (_QUICK_PEERS if options.quick else peers.DEFAULT_PEERS)
    options.peer_names = [] if options.peers == "none" else list(named)
    for name in options.peer_names:
        if name not in peers.PEERS:
            parser.error(f"--peers: {name!r} is not one of {', '.join(peers.PEERS)}")
    for name in chosen:
        if name not in known:
            parser.error(f"--loads: {name!r} is not one of {', '.join(sorted(known))}")
    options.workloads = [load for load in workloads.WORKLOADS if load.name in chosen]
    options.rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    return options


def _start_peers(session: Session, stop: ExitStack, keys_file: Path, engines: native.Stub) -> None:
    where = affinity(session.options.nice)
    for name in session.options.peer_names:
        _say(f"starting {name}")
        folder = session.folder / name
        folder.mkdir()
        try:
            binaries = peers.environment(peers.PEERS[name], session.home, install=not session.options.no_install)
            ports = engines.peers[: peers.PEERS[name].engines_count]
            urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
            site = peers.Site(binaries, folder, peers.free_port(), urls, MODEL, keys_file)
            up = stop.enter_context(peers.running(name, site, where))
        except BenchError as fault:
            session.missing[name] = str(fault)
            _say(f"NOT MEASURED: {name}: {fault}")
            continue
        session.starts[name] = {"start_s": round(up.start_s, 2), "idle_mb": up.idle_mb}
        slow = peers.PEERS[name].slow
        session.targets[name] = Target(name, up.port, up.keys_file, functools.partial(tree, up.pid), slow=slow)


def _start(session: Session, stop: ExitStack) -> tuple[Bench, stack.Node, native.Stub]:
    where = affinity(session.options.nice)
    programs = native.build(session.home)
    engines = stop.enter_context(native.stub(programs["stub"], where, MODEL, ENDPOINT_COUNT))
    _say("starting inferplane")
    wish = stack.NodeWish(session.folder, MODEL, session.options.database_url)
    ours = stop.enter_context(stack.node(wish, engines, where))
    session.starts[OURS] = {"start_s": round(ours.start_s, 2), "idle_mb": ours.idle_mb}
    session.targets[DIRECT] = Target(DIRECT, engines.peers[0], None, lambda: ())
    session.targets[OURS] = Target(
        OURS, ours.port, ours.keys_file, lambda: (ours.gateway_pid,), side_pids=ours.side_pids
    )
    _start_peers(session, stop, ours.keys_file, engines)
    bench = Bench(programs["load"], where, engines.pid, MODEL, lambda: tree(os.getpid()))
    return bench, ours, engines


def _note_idle(session: Session) -> None:
    """What each target costs while it does nothing: it goes on beside the others' runs."""
    pids = {name: tuple(target.gateway_pids()) for name, target in session.targets.items() if name != DIRECT}
    before = {name: cpu_s(found) for name, found in pids.items()}
    time.sleep(_IDLE_S)
    for name, found in pids.items():
        session.starts[name]["idle_cpu_ratio"] = round((cpu_s(found) - before[name]) / _IDLE_S, 4)


def _measure(session: Session, bench: Bench, ours: stack.Node) -> None:
    names = list(session.targets)
    for name in names:
        workloads.warm(bench, session.targets[name])
    stack.await_books(ours)
    _note_idle(session)
    for number in range(session.options.rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        _say(f"round {number + 1} of {session.options.rounds}")
        for load in session.options.workloads:
            chosen = workloads.quick(load) if session.options.quick else load
            for name in order:
                _measure_one(session, bench, ours, session.targets[name], chosen)


def _measure_one(session: Session, bench: Bench, ours: stack.Node, target: Target, load: Workload) -> None:
    record = _attempt(session, bench, target, load)
    lag_s = stack.await_books(ours) if target.name == OURS else 0.0
    if record is None:
        session.missing[f"{target.name}, {load.name}"] = session.repeated[-1]
        return
    session.records.append({**record, "shipper_lag_s": round(lag_s, 2)})
    _say(
        f"{load.name:8s} {target.name:16s} {record['requests_per_s']:>9,.0f} req/s "
        f"p50 {record['latency_us']['p50']:>9,.0f} us  {record['chunks_per_s']:>8,.0f} chunks/s "
        f"CPU {record['gateway_cpu_us_per_request']:>8,.1f} us/req  core {record['gateway_cpu_ratio']:.2f} "
        f"foreign {record['foreign_cpu_ratio']:.2f} waited {record['gateway_waited_ratio']:.2f}"
    )


def _attempt(session: Session, bench: Bench, target: Target, load: Workload) -> dict[str, Any] | None:
    """A run without a wrong answer; None after three that had one."""
    for _ in range(_ATTEMPTS):
        try:
            return workloads.run(bench, target, load)
        except BenchError as fault:
            session.repeated.append(str(fault))
            _say(f"NOT COUNTED: {fault}")
    return None


def _end(session: Session, ours: stack.Node, engines: native.Stub) -> dict[str, Any]:
    """The books against the engines. Raises BenchError when they differ."""
    if not stack.alive(ours):
        raise BenchError("Our gateway process was restarted during the benchmark.")
    stack.await_books(ours)
    _say("reconciling")
    books = stack.reconcile(ours, engines)
    asked = stack.engine_requests(engines.ours)
    if not books["exact"]:
        raise BenchError(f"The books are not exact: {json.dumps(books)[:600]}")
    return {"engine_requests": asked, "reconcile": books}


def _write(session: Session, end: dict[str, Any], verdicts: list[report.Verdict], took_s: float) -> None:
    figures = workloads.spreads(session.records)
    medians: dict[str, Any] = {}
    for (target, load), spread in figures.items():
        medians.setdefault(target, {})[load] = {
            name: [each.median, each.least, each.most] for name, each in spread.items()
        }
    content = {
        "machine": facts(),
        "versions": {name: peers.PEERS[name].packages for name in session.options.peer_names},
        "rounds": session.options.rounds, "quick": session.options.quick, "took_s": round(took_s),
        "starts": session.starts, "missing": session.missing, "repeated": session.repeated, "medians": medians, **end,
        "verdicts": [verdict.record() for verdict in verdicts], "runs": session.records,
    }  # fmt: skip
    session.options.json.write_text(json.dumps(content, indent=1) + "\n")


def measure(options: argparse.Namespace) -> int:
    """Run everything and print the tables. Returns the exit status."""
    home = cache_home()
    (home / "runs").mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with ExitStack() as stop:
        folder = Path(stop.enter_context(tempfile.TemporaryDirectory(dir=home / "runs")))
        session = Session(options, home, folder)
        bench, ours, engines = _start(session, stop)
        names = list(session.targets)
        _measure(session, bench, ours)
        end = _end(session, ours, engines)
    figures = workloads.spreads(session.records)
    verdicts = report.verdicts(figures, session.starts[OURS]["idle_mb"])
    print("\n".join(f"{name}: {value}" for name, value in facts().items()))
    print(f"\n{report.table(figures, names)}\n\n{report.ratios(figures, names)}\n\n{report.noise(figures, names)}")
    for name, started in session.starts.items():
        about = ""
        if name in peers.PEERS:
            peer = peers.PEERS[name]
            about = f" ({peer.packages[0]}, {peer.engines_count} engines: {peer.note})"
        idle = f"{started['idle_mb']:g} MB and {started['idle_cpu_ratio']:.1%} of a core idle"
        most_mb = max((each["gateway_mb"] for each in session.records if each["target"] == name), default=0.0)
        print(f"{name}: first answer after {started['start_s']:g} s, {idle}, {most_mb:g} MB at most{about}")
    for name, reason in session.missing.items():
        print(f"NOT MEASURED: {name}: {reason}")
    for reason in session.repeated:
        print(f"Run again: {reason}")
    print(f"Books: exact after {end['engine_requests']:,} requests.\n")
    print("\n".join(verdict.line() for verdict in verdicts))
    if options.json:
        _write(session, end, verdicts, time.monotonic() - began_s)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    return 1 if options.check and (failed or session.missing) else 0


def main() -> None:
    """Entry."""
    try:
        sys.exit(measure(_options()))
    except BenchError as fault:
        sys.exit(str(fault))


if __name__ == "__main__":
    main()
