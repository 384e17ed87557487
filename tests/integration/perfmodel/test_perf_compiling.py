"""What a user reads on stderr before a `perf` command compiles, and that a warm cache says nothing.

Owns: the line, in a pipe and on a terminal. Does not own: the cache (`unit/perfmodel/test_compiled_code`). A cold
command is ended once it has said its line: what it would do then is compile.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfmodel.adapters.traces import write_trace
from perfmodel.traces.trace import trace_of

ROOT = Path(__file__).parents[3]
PARETO = ("pareto", "--model", "Llama-3.1-8B", "--gpu", "H100-SXM-80GB", "--no-mixed")
SIMULATE = ("simulate", "--model", "Llama-3.1-8B", "--gpu", "h100", "--trace")
SWEEP = ("--replicas", "1,2", "--workers", "1")
SAID = {"simulate": "simulation"}
DEPLOYMENT = (
    "model,gpu,scenario,isl,osl,concurrency_or_batch,tpot_ms\nLlama-3.1-8B,H100-SXM-80GB,closed_loop,100,10,4,9\n"
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    columns: dict[str, Sequence[Any]] = {
        "arrival_s": [0.0, 1.0], "session": [-1, -1], "input_tokens": [50, 60], "output_tokens": [3, 4], "tier": [0, 0],
    }  # fmt: skip
    write_trace(trace_of(columns, [[], []], 0), tmp_path / "t.jsonl")
    return str(tmp_path / "t.jsonl")


def started(words: tuple[str, ...], home: Path | None, stderr: int) -> subprocess.Popen[bytes]:
    """The command with its cache under this home; None: the user's own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if home is None else {"HOME": str(home)})
    return subprocess.Popen(
        [sys.executable, "-m", "controlplane", "perf", *words], stdout=subprocess.PIPE, stderr=stderr, env=env
    )


def first_line(words: tuple[str, ...], home: Path, *, terminal: bool) -> str:
    """The first line on stderr; then the command is killed."""
    shown, given = pty.openpty() if terminal else os.pipe()
    with started(words, home, given) as process:
        os.close(given)
        with os.fdopen(shown, "rb", buffering=0) as lines:
            line = lines.readline()
            process.kill()
    return line.decode().rstrip("\r\n")


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("command", ["calibrate", "estimate", "pareto", "simulate", "sweep"])
def test_a_cold_cache_is_one_line(command: str, terminal: bool, trace: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(DEPLOYMENT)
    words = {
        "calibrate": ("calibrate", "--data", str(rows)),
        "estimate": ("estimate", "--rows", str(rows), "--out", str(tmp_path / "out.csv")),
        "pareto": PARETO,
        "simulate": (*SIMULATE, trace),
        "sweep": (*SIMULATE, trace, *SWEEP),
    }[command]
    what = SAID.get(words[0], "queueing model")
    assert first_line(words, tmp_path, terminal=terminal) == (
        f"Compiling the {what} for this machine: 10 to 60 s, once (kept in ~/.cache/inferplane/compiled)."
    )


def test_a_home_that_cannot_be_written_is_said_too(trace: str, tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("")
    assert first_line((*SIMULATE, trace), home, terminal=False) == (
        "Compiling the simulation for this machine: 10 to 60 s, each time (~/.cache/inferplane/compiled cannot be "
        "written)."
    )


@pytest.mark.timeout(300)  # the first run after a change of the sources compiles
@pytest.mark.parametrize("command", ["pareto", "simulate"])
def test_a_warm_cache_says_nothing(command: str, trace: str) -> None:
    words = PARETO if command == "pareto" else (*SIMULATE, trace)
    for _ in range(2):
        with started(words, None, subprocess.PIPE) as process:
            said, complaint = process.communicate()
        assert process.returncode == 0 and b"TTFT" in said
    assert complaint == b""
