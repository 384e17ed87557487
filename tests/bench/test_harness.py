"""The measuring tools tell the truth: stub and load generator count alike, and what was not measured is no pass.

Owns: the checks of `native`, `workloads` and `report` on small loads. Does not own: any speed; nothing here is timed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench import native, report, stack, workloads
from tests.bench.machine import Affinity, BenchError
from tests.bench.report import DIRECT, OURS, Verdict
from tests.bench.workloads import LATENCY, RATE, Spread

# One core is enough here; the benchmark itself wants two.
HERE = Affinity(min(os.sched_getaffinity(0)), min(os.sched_getaffinity(0)))
MODEL = "bench-model"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if shutil.which("cc") is None or shutil.which("taskset") is None:
        pytest.skip("the benchmark's tools need a C compiler and taskset")
    return native.build(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def engines(programs: dict[str, Path]) -> Iterator[native.Stub]:
    with native.stub(programs["stub"], HERE, MODEL, 1) as running:
        yield running


def load(programs: dict[str, Path], port: int, *options: object) -> dict[str, Any]:
    made = native.run_load(programs["load"], HERE, ["--port", port, "--model", MODEL, *options], 10.0)
    return made.figures


def counters(port: int) -> dict[str, int]:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    rows = [line.split() for line in page.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: int(value) for name, value in rows}


def test_every_answer_that_the_load_counts_was_asked_of_the_stub(
    programs: dict[str, Path], engines: native.Stub
) -> None:
    figures = load(programs, engines.ours[0], "--requests", 50, "--warmup", 10, "--connections", 4)
    assert (figures["ok"], figures["refused"], figures["errors"]) == (50, 0, 0)
    assert stack.engine_requests(engines.ours) == 60
    assert stack.engine_requests(engines.peers) == 0


@pytest.mark.parametrize("interval_us", [0, 1_000])
def test_no_chunk_of_a_stream_is_lost_or_counted_twice(
    programs: dict[str, Path], engines: native.Stub, interval_us: int
) -> None:
    options = ["--requests", 6, "--connections", 3, "--stream", 1, "--max-tokens", 17, "--interval-us", interval_us]
    figures = load(programs, engines.ours[0], *options)
    assert (figures["chunks"], figures["chunks_least"], figures["chunks_most"]) == (6 * 17, 17, 17)
    assert figures["cut_streams"] == 0
    assert figures["delay_us"]["count"] == 6 * 17
    assert counters(engines.ours[0])["vllm:generation_tokens_total"] == 6 * 17


def test_long_prompts_arrive_whole(programs: dict[str, Path], engines: native.Stub) -> None:
    figures = load(programs, engines.ours[0], "--requests", 3, "--pad-bytes", 480_000)
    assert figures["ok"] == 3
    assert counters(engines.ours[0])["vllm:prompt_tokens_total"] > 3 * 480_000 // 4


def test_a_refusal_is_no_answer_and_says_why(programs: dict[str, Path], engines: native.Stub) -> None:
    figures = load(programs, engines.ours[0], "--requests", 2, "--path", "/v1/nothing")
    assert (figures["ok"], figures["refused"]) == (0, 2)
    assert figures["first_error"].startswith("404")


def test_usage_comes_in_each_chunk_only_when_asked_for(engines: native.Stub) -> None:
    url = f"http://127.0.0.1:{engines.ours[0]}/v1/chat/completions"
    body: dict[str, Any] = {"model": MODEL, "messages": [], "max_tokens": 5, "stream": True}
    each = {"include_usage": True, "continuous_usage_stats": True}
    asked = [{}, {"stream_options": {"include_usage": True}}, {"stream_options": each}]
    texts = [httpx.post(url, json={**body, **more}, trust_env=False).text for more in asked]
    assert [text.count('"usage"') for text in texts] == [0, 1, 7]  # role, five tokens, and the last one
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No C compiler"):
        native.build(tmp_path, search_path=str(tmp_path))


def test_a_program_that_cannot_run_is_a_fault_not_a_figure(programs: dict[str, Path]) -> None:
    with pytest.raises(BenchError, match="--port"):
        load(programs, 0)


def test_what_was_not_measured_is_no_pass() -> None:
    assert not Verdict("bar", 1.0, True, None).passed
    assert not any(verdict.passed for verdict in report.verdicts({}, None))


def figures_of(values: dict[tuple[str, str], dict[str, float]]) -> report.Figures:
    return {
        place: {name: Spread(value, value, value, 1) for name, value in found.items()}
        for place, found in values.items()
    }


def test_ratios_and_added_times_compare_with_the_same_load() -> None:
    figures = figures_of(
        {
            (OURS, RATE): {"requests_per_s": 8_000.0}, ("litellm", RATE): {"requests_per_s": 100.0},
            (OURS, LATENCY): {"latency_us.p50": 150.0}, (DIRECT, LATENCY): {"latency_us.p50": 20.0},
        }
    )  # fmt: skip
    found = {verdict.bar: verdict for verdict in report.verdicts(figures, 120.0)}
    assert found["requests/s against LiteLLM's"].measured == 80.0
    assert found["added latency p50, ms"].measured == pytest.approx(0.13)
    assert not found["requests/s against vllm-router cache_aware's"].passed


def test_a_median_comes_with_its_range() -> None:
    records = [{"target": OURS, "load": RATE, "requests_per_s": value} for value in (3.0, 1.0, 2.0)]
    spread = workloads.spreads(records)[(OURS, RATE)]["requests_per_s"]
    assert (spread.median, spread.least, spread.most, spread.runs_count) == (2.0, 1.0, 3.0, 3)
