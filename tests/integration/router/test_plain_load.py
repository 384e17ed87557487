"""The production router on a load that no cache can help with: it must not be worse than taking turns.

Simulated: four equal engines near their capacity, prompts and answers of many lengths, with and without a prefix that
all share. Deterministic: trace, engines and dice have seeds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from perfmodel.adapters.compiled_code import remember_compiled_code
from perfmodel.adapters.perf_simulate import simulate
from perfmodel.adapters.traces import write_trace
from perfmodel.traces.trace import trace_of

COUNT, BLOCK_TOKENS = 6_000, 16


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> None:
    remember_compiled_code()


def plain_trace(path: Path, rate_per_s: float, shared_ratio: float) -> Path:
    """Poisson arrivals; log-normal lengths, 1,500 and 220 tokens in the mean; part of each prompt is the same text."""
    rng = np.random.default_rng(5)
    spread = 0.8
    inputs = rng.lognormal(np.log(1_500) - spread**2 / 2, spread, COUNT).astype(int) + 16
    outputs = rng.lognormal(np.log(220) - spread**2 / 2, spread, COUNT).astype(int) + 1
    blocks, fresh = [], 1_000_000
    for tokens in inputs:
        full = int(tokens) // BLOCK_TOKENS
        shared = int(full * shared_ratio)
        blocks.append([*range(shared), *range(fresh, fresh + full - shared)])
        fresh += full - shared
    columns: dict[str, Any] = {
        "arrival_s": np.cumsum(rng.exponential(1 / rate_per_s, COUNT)),
        "session": [-1] * COUNT,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "tier": [0] * COUNT,
    }
    write_trace(trace_of(columns, blocks, BLOCK_TOKENS), path)
    return path


@pytest.mark.parametrize(("rate_per_s", "shared_ratio"), [(26.0, 0.3), (22.0, 0.0)])
def test_a_plain_load_is_spread_better_than_by_turns(tmp_path: Path, rate_per_s: float, shared_ratio: float) -> None:
    trace = plain_trace(tmp_path / "plain.jsonl.gz", rate_per_s, shared_ratio)
    app = typer.Typer()
    app.command()(simulate)
    found = {}
    for policy in ("round_robin", "least_requests", "inferplane_route"):
        words = ["--trace", str(trace), "--model", "Llama-3.3-70B", "--gpu", "H100-SXM-80GB", "--tp", "2"]
        words += ["--dtype", "fp8", "--kv-dtype", "fp8", "--replicas", "4", "--max-batched-tokens", "1024"]
        words += ["--slo-ttft-s", "1.5", "--slo-tpot-ms", "60", "--policy", policy, "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        found[policy] = json.loads(result.stdout)
    ours, turns = found["inferplane_route"], found["round_robin"]
    assert ours["ttft_ms"]["mean"] < min(turns["ttft_ms"]["mean"], found["least_requests"]["ttft_ms"]["mean"])
    assert ours["ttft_ms"]["p99"] < 1.1 * turns["ttft_ms"]["p99"]
    assert ours["goodput_ratio"] > turns["goodput_ratio"]
