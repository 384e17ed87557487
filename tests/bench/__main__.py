"""All benchmarks one after the other: `python -m tests.bench [--quick] [--check] [--only PART,...]` (`make bench`).

Owns: which parts there are, what each is called with, and where their JSON goes (`results` in the cache folder). Does
not own: measuring. Each part is a process of its own and can be run alone; a part that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.gateway import cache_home


@dataclass(frozen=True, slots=True)
class Part:
    """One module of this folder."""

    about: str
    full: Sequence[str] = ()
    quick: Sequence[str] = ()
    has_bars: bool = True
    """Whether it takes --check and --json."""
    pinned: bool = False
    """Whether it takes --nice."""


PARTS = {
    "gateway": Part("one gateway process beside its peers", quick=("--quick",), pinned=True),
    "footprint": Part("memory: idle, index full, 200,000 unique prompts", quick=("--quick",), pinned=True),
    "bench_shipper": Part("spool to database, by the real shipper", quick=("--events", "10000", "--rounds", "1")),
    "bench_ingest": Part("ingest alone", quick=("--events", "5000"), has_bars=False),
    "bench_key_feed": Part("100,000 keys in one process", quick=("--keys", "10000"), has_bars=False),
    "bench_router": Part("hashing, picks, news between siblings", has_bars=False),
    "bench_queueing": Part("analytic TTFT against the simulated one", has_bars=False),
    "bench_simulation": Part("the simulation: an hour of traffic, memory", quick=("--hours", "0.05", "--rounds", "1")),
    "bench_size": Part("the fleet search against all its candidates simulated", has_bars=False),
    "bench_engine_core": Part("the simulated engine, offline", has_bars=False),
    "bench_engine_server": Part("the simulated engine's server", has_bars=False),
}


def main() -> None:
    """Run the parts; exit 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short runs, two peers: shows that everything works")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every bar is held")
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--nice", type=int, default=0, help="weight of what is measured; root may go below 0")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(PARTS)
    for name in names:
        if name not in PARTS:
            parser.error(f"--only: {name!r} is not one of {', '.join(PARTS)}")
    results = cache_home() / "results" / time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    results.mkdir(parents=True)
    failed = []
    for name in names:
        part = PARTS[name]
        argv = [sys.executable, "-m", f"tests.bench.{name}", *(part.quick if options.quick else part.full)]
        argv += ["--json", str(results / f"{name}.json")] if part.has_bars else []
        argv += ["--check"] if part.has_bars and options.check else []
        argv += ["--nice", str(options.nice)] if part.pinned else []
        print(f"\n== {name}: {part.about}", flush=True)
        if subprocess.run(argv, check=False).returncode:
            failed.append(name)
    print(f"\nFigures as JSON: {results}")
    if failed:
        sys.exit(f"Failed, or below a bar: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
