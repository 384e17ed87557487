"""The two C programs of the gateway benchmark: compiled where they are needed, started on the load's core.

Owns: compiling `csrc/stub.c` (the engine) and `csrc/load.c` (the clients) into the benchmark's cache folder,
starting the stub, and running one load with a deadline. Does not own: what is measured (`workloads`) or the gateways.
They are C because a Python client or engine would be the slowest part of the measurement by a factor of ten.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.machine import Affinity, BenchError, favour

_SOURCES = Path(__file__).parent / "csrc"
# load.c waits 20 s for answers that are under way when its time is over; a run that takes longer than that hangs.
_GRACE_S = 30.0


def build(home: Path, search_path: str | None = None) -> dict[str, Path]:
    """Paths of `stub` and `load`, compiled unless these very sources were. Raises BenchError.

    The compiler is searched for in `search_path`; None: in PATH.
    """
    programs = {}
    folder = home / "native"
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(_SOURCES.glob("*.c")):
        digest = hashlib.blake2b(source.read_bytes(), digest_size=6).hexdigest()
        program = folder / f"{source.stem}-{digest}"
        if not program.exists():
            _compile(source, program, search_path)
        programs[source.stem] = program
    return programs


def _compile(source: Path, program: Path, search_path: str | None) -> None:
    found = (shutil.which(name, path=search_path) for name in ("cc", "gcc", "clang"))
    compiler = next((path for path in found if path is not None), None)
    if compiler is None:
        raise BenchError(
            "No C compiler (cc, gcc or clang) is on the PATH, and the benchmark's stub engine and load generator are "
            "in C; install one (Debian: apt-get install gcc libc6-dev)."
        )
    fresh = program.with_suffix(f".{os.getpid()}")
    argv = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(fresh), str(source)]
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode:
        raise BenchError(f"{compiler} could not compile {source.name}: {made.stderr.strip().splitlines()[0]}")
    fresh.replace(program)


@dataclass(frozen=True, slots=True)
class Stub:
    """The running engine stub: two sets of ports, so that its counters tell our requests from the peers'."""

    pid: int
    ours: tuple[int, ...]
    peers: tuple[int, ...]


@contextmanager
def stub(program: Path, affinity: Affinity, model: str, endpoint_count: int) -> Iterator[Stub]:
    """Run the stub with `endpoint_count` ports for us and as many for the peers."""
    argv = [*affinity.load, str(program), "--ports", str(2 * endpoint_count), "--model", model]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        favour([process.pid], affinity.load_nice)
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise BenchError(f"The stub engine ended with status {process.wait()} at its start.")
        ports = json.loads(said)["ports"]
        yield Stub(process.pid, tuple(ports[:endpoint_count]), tuple(ports[endpoint_count:]))
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the load generator measured, and the CPU time that it used itself."""

    figures: dict[str, Any]
    cpu_s: float


def run_load(program: Path, affinity: Affinity, options: Sequence[object], seconds: float) -> LoadResult:
    """One run. Raises BenchError when it could not be made."""
    argv = [*affinity.load, str(program), "--seconds", str(seconds), *map(str, options)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        favour([process.pid], affinity.load_nice)
        before = os.times()
        out, err = process.communicate(timeout=seconds + _GRACE_S)
        after = os.times()
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BenchError(f"The load generator did not end within {seconds + _GRACE_S:g} s.") from None
    if process.returncode or not out.strip():
        raise BenchError(f"The load generator ended with status {process.returncode}: {err.strip()[-300:]}")
    used_s = after.children_user - before.children_user + after.children_system - before.children_system
    return LoadResult(json.loads(out), used_s)
