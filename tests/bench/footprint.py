"""The memory of one gateway process: idle, with the prefix index full, and over 200,000 unique prompts.

Run: `python -m tests.bench.footprint [--quick] [--check]`. Owns: the three phases, the samples and their slope. Does
not own: starting the node (`stack`), or the index's bound (`router.prefix_index`). The index is filled with unique
prompts of 2 kB until the gateway says that it is as large as it may be, and then turned over once, because the dicts
in it take their final size when they are compacted for the first time (a step of 50 MB, measured). 200,000 more of the
same kind follow, each of which evicts. Growth is what is resident at their end, beyond what was resident after the
first fifth of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from router.prefix_index import DEFAULT_MAX_BYTES
from tests.bench import native, stack
from tests.bench.gateway import ENDPOINT_COUNT, MODEL, cache_home
from tests.bench.machine import Affinity, BenchError, affinity, resident_mb
from tests.bench.report import Verdict

_UNIQUE_COUNT, _QUICK_COUNT = 200_000, 20_000
_SAMPLE_COUNT = 20
# About 2 kB of prompt: nine blocks and an end in the index, 110,000 of them fill it.
_PAD_BYTES = 1_800
_FILL_STEP_COUNT, _FILL_MAX_COUNT = 5_000, 400_000
# --quick fills it with 4,600 prompts of 480 kB instead.
_QUICK_PAD_BYTES, _QUICK_STEP_COUNT = 480_000, 500
# The index is a little below its bound right after it evicted.
_FULL_RATIO = 0.95
# What counts as none: 40 bytes a prompt. A prompt that was kept would be 400.
_GROWTH_MAX_MB = 5.0


def index_bytes(port: int) -> int:
    """What the gateway says of its prefix index."""
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0, trust_env=False).text
    for line in page.splitlines():
        if line.startswith("inferplane_state{") and 'name="prefix_index_bytes"' in line:
            return int(float(line.rpartition(" ")[2]))
    raise BenchError("The gateway's /metrics does not tell the size of its prefix index.")


class Load:
    """Unique prompts to one node. Mutable: how many were sent."""

    def __init__(self, program: Path, where: Affinity, node: stack.Node) -> None:
        self._program, self._where, self._node = program, where, node
        self.sent_count = 0

    def send(self, count: int, pad_bytes: int = _PAD_BYTES) -> None:
        """Send so many prompts, however long it takes (ten minutes at most). Raises BenchError."""
        options = ["--port", self._node.port, "--keys", self._node.keys_file, "--model", MODEL]
        options += ["--connections", 16, "--requests", count, "--pad-bytes", pad_bytes]
        figures = native.run_load(self._program, self._where, options, 600.0).figures
        self.sent_count += int(figures["sent"])
        if figures["ok"] < count * 0.99:
            raise BenchError(f"Only {figures['ok']} of {count} prompts were answered: {figures['first_error']}.")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures. Raises BenchError."""
    home = cache_home()
    (home / "runs").mkdir(parents=True, exist_ok=True)
    where = affinity(options.nice)
    programs = native.build(home)
    count = options.prompts or (_QUICK_COUNT if options.quick else _UNIQUE_COUNT)
    with ExitStack() as stop:
        folder = Path(stop.enter_context(tempfile.TemporaryDirectory(dir=home / "runs")))
        engines = stop.enter_context(native.stub(programs["stub"], where, MODEL, ENDPOINT_COUNT))
        node = stop.enter_context(stack.node(stack.NodeWish(folder, MODEL), engines, where))
        load = Load(programs["load"], where, node)
        filled_s = time.monotonic()
        while index_bytes(node.port) < _FULL_RATIO * DEFAULT_MAX_BYTES:
            load.send(*((_QUICK_STEP_COUNT, _QUICK_PAD_BYTES) if options.quick else (_FILL_STEP_COUNT, _PAD_BYTES)))
            time.sleep(0.5)  # the gauge is refreshed four times a second
            _say(f"{load.sent_count:,} prompts to fill: {resident_mb([node.gateway_pid])} MB")
            if load.sent_count > _FILL_MAX_COUNT:
                raise BenchError(f"The index has {index_bytes(node.port)} bytes after {load.sent_count} prompts.")
        filled_s = time.monotonic() - filled_s
        fill_count, samples = load.sent_count, [resident_mb([node.gateway_pid])]
        if not options.quick:
            load.send(fill_count)
            samples.append(resident_mb([node.gateway_pid]))
        turned_count = load.sent_count
        for _ in range(_SAMPLE_COUNT):
            load.send(count // _SAMPLE_COUNT)
            samples.append(resident_mb([node.gateway_pid]))
            _say(f"{load.sent_count - turned_count:,} prompts: {samples[-1]} MB")
        stack.await_books(node, 600.0)
        books = stack.reconcile(node, engines)
        if not stack.alive(node) or not books["exact"]:
            raise BenchError(f"The gateway was restarted, or the books differ: {json.dumps(books)[:300]}")
        index = index_bytes(node.port)
    fifth = _SAMPLE_COUNT // 5
    steady = samples[-_SAMPLE_COUNT:]
    growth_mb = statistics.median(steady[-fifth:]) - statistics.median(steady[fifth : 2 * fifth])
    return {
        "idle_mb": node.idle_mb, "full_mb": samples[0], "most_mb": max(samples), "end_mb": samples[-1],
        "growth_mb": round(growth_mb, 1), "unique_prompts_count": load.sent_count - turned_count,
        "fill_prompts_count": fill_count, "filled_s": round(filled_s, 1), "index_bytes": index, "samples_mb": samples,
        "events_count": books["events"],
    }  # fmt: skip


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    """The bars of memory."""
    return [
        Verdict("idle gateway process, MB resident", 150.0, False, figures["idle_mb"]),
        Verdict("gateway process with the index full, most MB resident", 400.0, False, figures["most_mb"]),
        Verdict("growth over the last 120,000 unique prompts, MB", _GROWTH_MAX_MB, False, figures["growth_mb"]),
        Verdict("unique prompts", _UNIQUE_COUNT, True, figures["unique_prompts_count"]),
    ]


def main() -> None:
    """Print the figures as JSON, and the bars."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.footprint", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_COUNT:,} prompts: shows that it works")
    parser.add_argument("--prompts", type=int, help=f"unique short prompts; default {_UNIQUE_COUNT:,}")
    parser.add_argument("--nice", type=int, default=0, help="weight of all that is measured; root may go below 0")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every bar is held")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    try:
        figures = measure(options)
    except BenchError as fault:
        sys.exit(str(fault))
    bars = verdicts(figures)
    text = json.dumps({**figures, "verdicts": [bar.record() for bar in bars]}, indent=1)
    print(json.dumps(figures))
    print("\n".join(bar.line() for bar in bars))
    if options.json:
        options.json.write_text(text + "\n")
    sys.exit(options.check and not all(bar.passed for bar in bars))


if __name__ == "__main__":
    main()
