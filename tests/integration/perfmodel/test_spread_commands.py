"""`perf pareto` and `perf size` on processes and on a local Dask cluster: the same bytes as in one process.

Owns: that the options change where work is done and nothing else. Does not own: what the commands answer
(`test_perf_size_command`, `unit/perfmodel/test_pareto`) or how workers fail (`test_sweeps`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer
from typer.testing import CliRunner, Result

from perfmodel.adapters.perf_cli import register
from tests import services

ROOT = Path(__file__).parents[3]
PARETO = ("pareto", "--model", "Llama-3.3-70B", "--gpu", "H100-SXM-80GB,H200-SXM-141GB", "--weight-dtype", "fp8,bf16")
SIZE = ("size", "--spec", str(ROOT / "examples" / "size" / "fleet32.yaml"), "--no-flips")

APP = typer.Typer()
register(APP)


def run(*words: object) -> Result:
    return CliRunner().invoke(APP, ["perf", *map(str, words)])


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A local Dask cluster of two processes."""
    distributed: Any = importlib.import_module("distributed")  # it has no types
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", host="127.0.0.1"
    ) as started:
        yield str(started.scheduler_address)


@pytest.mark.timeout(400)  # the first run after a change compiles in each of five processes
@pytest.mark.parametrize("command", [PARETO, SIZE], ids=["pareto", "size"])
def test_the_same_bytes_wherever_it_runs(command: tuple[str, ...], cluster: str) -> None:
    here = run(*command, "--json")
    assert here.exit_code == 0, here.stderr
    for where in (("--workers", 2), ("--dask", cluster)):
        assert run(*command, "--json", *where).stdout == here.stdout, where
    answer = orjson.loads(here.stdout)
    assert answer["points_considered"] > 100 if command is PARETO else answer["cost_usd_per_h"] > 0


@pytest.mark.parametrize("command", [PARETO, SIZE], ids=["pareto", "size"])
def test_what_cannot_be_is_one_sentence(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.adapters.sweeps._DASK_ANSWER_S", 1.0)
    nobody = f"tcp://127.0.0.1:{services.free_tcp_port()}"
    for words, code, sentence in (
        (("--workers", 0), 2, "--workers is 0; expected at least 1"),
        (("--workers", 2, "--dask", nobody), 2, "--workers has no effect beside --dask"),
        (("--dask", "carrier-pigeon://nest"), 2, "--dask is 'carrier-pigeon://nest'"),
        (("--dask", nobody), 1, f"no Dask scheduler answers at {nobody}"),
    ):
        result = run(*command, *words)
        assert (result.exit_code, result.stderr.count("\n")) == (code, 1), result.stderr
        assert result.stderr.startswith(f"perf: {sentence}")


def test_nothing_is_spread_without_a_check() -> None:
    result = run(*SIZE, "--no-check", "--workers", 2)
    assert (result.exit_code, result.stderr) == (
        2, "perf: --workers is 2; expected it without --no-check, which leaves nothing to spread\n",
    )  # fmt: skip
