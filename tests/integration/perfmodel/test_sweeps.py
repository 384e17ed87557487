"""Sweeps over processes and over a real Dask cluster: the same results as in this process, and clean ends.

Owns: order, failures, a dying worker, Ctrl-C, and a cluster that is not there. The cluster's scheduler and workers are
processes of their own, as a user starts them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from perfmodel.adapters.sweeps import run_sweep, workers
from perfmodel.errors import ConfigError, SweepError
from tests import services

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Job:
    """One job: what it adds up, and how it ends."""

    seed: int
    ending: str = "well"


def add_up(job: Job) -> tuple[int, float]:
    """Slow for the first jobs, so that the last ones end first."""
    if job.ending == "config":
        raise ConfigError("rate is 0; expected more than 0")
    if job.ending == "fault":
        raise ZeroDivisionError("division by zero")
    if job.ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02 * max(0, 5 - job.seed))
    return job.seed, sum(job.seed / (i + 1) for i in range(1000))


JOBS = [Job(seed) for seed in range(12)]


@dataclass
class Dask:
    """A scheduler and its workers. Mutable: they can be killed."""

    address: str
    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]


@contextmanager
def _dask() -> Iterator[Dask]:
    port = services.free_tcp_port()
    address = f"tcp://127.0.0.1:{port}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment, "cwd": ROOT}
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port)]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--nthreads", "1"]
    without = ["--no-dashboard"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(subprocess.Popen([*scheduler, *without], **quiet))  # type: ignore[call-overload]  # a dict of options
        workers = [[*worker, *without, "--host", "127.0.0.1"]] * 2
        started += [subprocess.Popen(command, **quiet) for command in workers]  # type: ignore[call-overload]  # as above
        yield Dask(address, started[0], started[1:])
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def dask_address() -> Iterator[str]:
    """A scheduler and two workers on free ports."""
    with _dask() as cluster:
        yield cluster.address


def test_all_places_give_the_same_results_in_the_same_order(dask_address: str) -> None:
    here = run_sweep(add_up, JOBS, worker_count=1)
    told: list[int] = []
    assert run_sweep(add_up, JOBS, worker_count=2, done=told.append) == here
    assert told == [1] * len(JOBS)
    told.clear()
    assert run_sweep(add_up, JOBS, dask=dask_address, done=told.append) == here
    assert told == [1] * len(JOBS)
    assert [seed for seed, _ in here] == list(range(len(JOBS)))


@pytest.mark.parametrize("place", ["here", "processes", "dask"])
def test_a_job_that_fails_is_one_sentence(place: str, request: pytest.FixtureRequest) -> None:
    dask = request.getfixturevalue("dask_address") if place == "dask" else None
    count = {"here": 1, "processes": 2, "dask": None}[place]
    with pytest.raises(SweepError) as caught:
        run_sweep(add_up, [Job(0), Job(1, "fault"), Job(2)], worker_count=count, dask=dask)
    assert str(caught.value) == "job 2 of 3 failed: ZeroDivisionError: division by zero"
    with pytest.raises(ConfigError, match="rate is 0; expected more than 0"):
        run_sweep(add_up, [Job(0), Job(1, "config")], worker_count=count, dask=dask)


def test_a_worker_that_dies_is_one_sentence() -> None:
    with pytest.raises(SweepError, match="a worker process died"):
        run_sweep(add_up, [Job(0), Job(1, "killed"), Job(2)], worker_count=2)


def add_slowly(factor: float, job: Job) -> tuple[int, float]:
    """Long enough to kill a worker in the middle."""
    time.sleep(0.2)
    return job.seed, factor * job.seed


def test_a_dask_worker_that_is_killed_in_the_middle_changes_nothing() -> None:
    with _dask() as cluster, workers(cluster.address) as places:
        told: list[int] = []

        def count(number: int) -> None:
            told.append(number)
            if len(told) == 3:
                cluster.workers[0].kill()

        assert places.map(add_slowly, 3.0, JOBS, count) == [add_slowly(3.0, job) for job in JOBS]
        assert len(told) == len(JOBS)


@pytest.mark.parametrize("lost", ["all workers", "the scheduler"])
def test_a_dask_cluster_that_goes_away_is_one_sentence(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.adapters.sweeps._DASK_WORKER_S", 3.0)
    with _dask() as cluster, pytest.raises(SweepError) as caught, workers(cluster.address) as places:
        doomed = cluster.workers if lost == "all workers" else [cluster.scheduler]

        def end(_: int) -> None:
            for process in doomed:
                process.kill()

        places.map(add_slowly, 3.0, JOBS, end)
    said = str(caught.value)
    assert said.startswith(f"the Dask cluster at {cluster.address} has gone away (") and said.endswith(
        "expected it to stay up"
    )


def test_without_dask_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError) as caught:
        run_sweep(add_up, JOBS, dask="tcp://127.0.0.1:1")
    assert str(caught.value) == ("--dask needs Dask, which is not installed; from a checkout `make setup` installs it")


def test_workers_serve_several_sweeps_and_send_what_is_shared() -> None:
    wanted = [add_slowly(2.0, job) for job in JOBS[:3]]
    for count in (1, 2):
        with workers(worker_count=count) as places:
            assert places.map(add_slowly, 2.0, JOBS[:3]) == wanted
            assert places.map(add_slowly, 2.0, JOBS[:3]) == wanted


@pytest.mark.parametrize(("dask", "count"), [(None, 0), ("tcp://127.0.0.1:1", 2)])
def test_a_bad_number_of_workers_is_one_sentence(dask: str | None, count: int) -> None:
    with pytest.raises(ConfigError, match="--workers"), workers(dask, count):
        pass


def test_no_job_is_no_result() -> None:
    assert run_sweep(add_up, [], worker_count=2) == []


def test_a_cluster_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.adapters.sweeps._DASK_ANSWER_S", 1.0)
    address = f"tcp://127.0.0.1:{services.free_tcp_port()}"
    with pytest.raises(SweepError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:"):
        run_sweep(add_up, JOBS, dask=address)
    for name in ("carrier-pigeon://nest", "foo"):
        with pytest.raises(ConfigError, match="--dask is"):
            run_sweep(add_up, JOBS, dask=name)


def test_a_scheduler_that_says_nothing_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("perfmodel.adapters.sweeps._DASK_ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(SweepError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:"):
            run_sweep(add_up, JOBS, dask=address)


_INTERRUPTED = """
import signal
import time
import typer
from perfmodel.adapters import perf_output
from perfmodel.adapters.sweeps import run_sweep, workers
def main() -> None:
    with perf_output.guard():
        run_sweep(time.sleep, [0.01, 600.0, 600.0], worker_count=2, done=lambda _: print("one", flush=True))
if __name__ == "__main__":
    # A test run in a shell's background would hand on that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    typer.run(main)
"""


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(signal.SIGINT, 130, "perf: interrupted\n"), (signal.SIGTERM, 128 + signal.SIGTERM, "")],
)
def test_an_interrupt_ends_the_workers_too(number: signal.Signals, status: int, words: str, tmp_path: Path) -> None:
    script, scratch = tmp_path / "sleepers.py", tmp_path / "scratch"
    script.write_text(_INTERRUPTED)
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "one\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers and any(scratch.iterdir())
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (status, words)
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    assert not any(scratch.iterdir())


def test_workers_leave_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleepers.py"
    script.write_text(_INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "one\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=30)
    assert psutil.wait_procs(workers, timeout=10)[1] == []
