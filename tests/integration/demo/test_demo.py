"""`inferplane demo` end to end: real processes, real Redis, the real ledger.

Owns: what a person sees of it (the JSON, the exit codes, one clear sentence for each thing that can be in the way) and
that nothing is left behind, however it ends. Does not own: its parts (unit tests), or speed (benchmarks).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.services import free_tcp_port, temporary_folder

pytestmark = pytest.mark.timeout(240)
# Far beyond what a loaded machine with two cores takes; a test that reaches it has hung.
_DEADLINE_S = 120.0
# All that a run without a fault says on stderr.
PROGRESS = re.compile(r"starting \.\.\.|traffic: \d+ of \d+ s, \d+ requests, \d+ completed")


class Demo:
    """One run in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("INFERPLANE_")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # without it every child compiles everything anew
        self.process = subprocess.Popen(
            [sys.executable, "-m", "controlplane", "demo", "--data-dir", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
        )

    def children(self) -> list[psutil.Process]:
        """Everything below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def child(self, *words: str) -> psutil.Process:
        """A child whose command holds these words."""
        found: list[psutil.Process] = []

        def look() -> bool:
            for child in self.children():
                with contextlib.suppress(psutil.Error):
                    if all(word in child.cmdline() for word in words):
                        found.append(child)
            return bool(found)

        until(look)
        return found[0]

    def end(self) -> tuple[int, str, str]:
        """(exit status, stdout, stderr) once it has ended by itself."""
        out, err = self.process.communicate(timeout=_DEADLINE_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[Demo]:
    started = Demo(folder, *arguments)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.communicate(timeout=30)
        if started.process.poll() is None:
            for child in started.children():
                child.kill()
            started.process.kill()
        started.process.communicate()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with temporary_folder() as made:
        yield made / "demo"


def until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def none_left(children: list[psutil.Process]) -> list[str]:
    """Commands of those that still run."""
    left = []
    for child in children:
        with contextlib.suppress(psutil.Error):
            if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(child.cmdline()))
    return left


def check_results(told: dict[str, Any]) -> None:
    assert list(told) == [
        "requests", "completed", "ttft_ms", "tpot_ms", "prefix_hit_ratio", "tokens", "bill", "reconcile",
        "first_token_s", "duration_s", "url",
    ]  # fmt: skip
    assert told["reconcile"]["exact"] is True
    assert told["reconcile"]["events"] >= told["completed"] > 10
    assert told["prefix_hit_ratio"] > 0.5
    assert told["first_token_s"] > 0
    assert told["duration_s"] > 0
    assert told["url"].startswith("http://127.0.0.1:")
    assert list(told["ttft_ms"]) == list(told["tpot_ms"]) == ["p50", "p95"]
    assert 0 < told["ttft_ms"]["p50"] <= told["ttft_ms"]["p95"]
    assert 0 < told["tpot_ms"]["p50"] <= told["tpot_ms"]["p95"]
    assert list(told["tokens"]) == ["uncached_input", "cached_input", "output"]
    assert all(count > 0 for count in told["tokens"].values())
    assert [line["tenant"] for line in told["bill"]] == ["demo-agent", "demo-chat", "demo-batch"]
    assert all(isinstance(line["usd"], str) and Decimal(line["usd"]) > 0 for line in told["bill"])


def test_a_run_prints_its_results_as_json_and_leaves_nothing_behind(folder: Path) -> None:
    with demo(folder, "--exit", "--json", "--duration-s", "6", "--port", "0") as run:
        run.child("ship")
        children = run.children()
        status, out, err = run.end()
        assert status == 0
        assert err.splitlines(), "a pipe is told how far it is"
        assert all(PROGRESS.fullmatch(line) for line in err.splitlines()), err
        told = json.loads(out)
        check_results(told)
        # The engines' own words in the clients' answers, and the product's books, are the same tokens.
        tokens = told["tokens"]
        assert told["completed"] == told["requests"] == told["reconcile"]["events"]
        prompt = tokens["uncached_input"] + tokens["cached_input"]
        assert told["prefix_hit_ratio"] == pytest.approx(tokens["cached_input"] / prompt, abs=1e-4)
        # By the price book: 0.20, 0.05 and 0.60 dollars a million tokens, half of it for the batch tenant.
        full = Decimal(tokens["uncached_input"] * 20 + tokens["cached_input"] * 5 + tokens["output"] * 60) / 100_000_000
        billed = sum(Decimal(line["usd"]) for line in told["bill"])
        assert full == billed + Decimal(told["bill"][2]["usd"])
        assert none_left(children) == []


def test_a_second_run_survives_a_killed_engine_and_keeps_others_out(folder: Path) -> None:
    port = free_tcp_port()
    with demo(folder, "--json", "--duration-s", "8", "--port", str(port)) as run:
        engine = run.child("engine-sim")
        run.child("worker")  # it starts with the first token: the traffic runs
        engine.kill()
        with demo(folder, "--exit") as other:
            status, _, err = other.end()
            assert status == 1
            assert err == (
                f"Another demo runs in {folder} (process {run.process.pid}); stop it, or name another folder with "
                "--data-dir.\n"
            )
        with temporary_folder() as elsewhere, demo(elsewhere / "demo", "--exit", "--port", str(port)) as other:
            status, _, err = other.end()
            assert status == 1
            assert re.fullmatch(rf"port {port} on 127.0.0.1 cannot be used: .*\n", err)
        assert run.process.stdout is not None
        check_results(json.loads(run.process.stdout.readline()))
        children = run.children()
        run.process.send_signal(signal.SIGINT)
        status, out, err = run.end()
        assert (status, out) == (0, "")
        assert "was killed by SIGKILL; starting it again" in err
        assert f"http://127.0.0.1:{port}/v1" in err
        assert err.splitlines()[-1] == "Stopping ..."
        assert none_left(children) == []


def test_ctrl_c_during_traffic_ends_everything(folder: Path) -> None:
    with demo(folder, "--json", "--duration-s", "60", "--port", "0", "--keep") as run:
        run.child("worker")
        children = run.children()
        run.process.send_signal(signal.SIGINT)
        status, out, err = run.end()
        assert (status, out) == (1, "")
        assert err.splitlines()[-2:] == ["Stopping ...", "Stopped before there were results."]
        assert none_left(children) == []


def test_a_killed_demo_leaves_nothing_and_the_next_one_starts_at_once(folder: Path) -> None:
    port = free_tcp_port()
    with demo(folder, "--json", "--duration-s", "60", "--port", str(port)) as run:
        run.child("worker")
        children = run.children()
        run.process.kill()
        with demo(folder, "--exit", "--duration-s", "2", "--port", str(port)) as following:
            status, out, err = following.end()
            assert status == 0
            assert all(PROGRESS.fullmatch(line) for line in err.splitlines()), err
            assert "first token after" in out
            shown = [line.split()[0] for line in out.splitlines() if line.lstrip().startswith("demo-")]
            assert shown == ["demo-agent", "demo-chat", "demo-batch"]
            assert "reconcile: exact" in out
        assert none_left(children) == []


def test_a_part_that_cannot_start_is_named_with_its_last_words(folder: Path) -> None:
    with temporary_folder() as elsewhere:
        place = elsewhere / "demo"
        place.mkdir()
        (place / "demo.lock").touch()
        (place / "redis").touch()  # a file where a folder must be; kept, because the folder shall be kept
        with demo(place, "--exit", "--keep", "--port", "0") as run:
            status, out, err = run.end()
    assert (status, out) == (1, "")
    assert err.startswith("redis ended with status 1 right after its start: data_dir: the embedded Redis cannot use")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--engine", "gpt"), "--engine is 'gpt'; expected llama."),
        (("--port", "99999"), "--port is 99999; expected a whole number from 0 to 65535."),
        (("--duration-s", "0.5"), "--duration-s is 0.5; expected a number from 1 to 86400."),
        (("--speed", "nan"), "--speed is nan; expected a number from 0.1 to 1000."),
    ],
)
def test_a_wrong_option_is_a_usage_error_and_leaves_the_folder_alone(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    place = tmp_path / "demo"
    place.mkdir()
    (place / "demo.lock").touch()
    (place / "of the last demo").touch()
    with demo(place, *words) as run:
        status, out, err = run.end()
    assert (status, out, err) == (2, "", f"{told}\n")
    assert (place / "of the last demo").exists()
