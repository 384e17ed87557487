"""`inferplane perf simulate` as a user calls it: its JSON, its plot, and one sentence for what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
import typer
from typer.testing import CliRunner, Result

from perfmodel.adapters import policy_names
from perfmodel.adapters.perf_simulate import simulate
from perfmodel.adapters.traces import write_trace
from perfmodel.traces.trace import trace_of
from router.adapters import policies

KEYS = ["requests", "completed", "ttft_ms", "tpot_ms", "prefix_hit_ratio", "output_tok_per_s", "goodput_ratio", "sim_s"]
FLEET = """
engines:
  - {pool: fast, gpu: h100, tp: 2, count: 1, dtype: fp8}
  - {pool: old, gpu: a100, tp: 4, count: 2, slow_ratio: 1.2, dram_gb: 100, dram_gb_per_s: 20}
"""
SPLIT = """
engines:
  - {pool: p, role: prefill, gpu: h100, count: 2, transfer_gb_per_s: 50, transfer_ms: 1, layerwise: true}
  - {pool: d, role: decode, gpu: h100, count: 1}
"""


class Point:
    """An entry point as `importlib.metadata` gives it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self) -> object:
        return getattr(policies, self.name)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point(name) for name in ("round_robin", "least_requests", "inferplane_route")]
    monkeypatch.setattr(policy_names, "entry_points", lambda group: points)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    dice = np.random.default_rng(1)
    prompts = dice.integers(200, 4000, 80).tolist()
    columns = {
        "arrival_s": np.sort(dice.uniform(0, 60, 80)).tolist(),
        "session": [row % 20 for row in range(80)],
        "input_tokens": prompts,
        "output_tokens": dice.integers(1, 200, 80).tolist(),
        "tier": [0] * 80,
    }
    blocks = [[1000 * (row % 20) + depth for depth in range(tokens // 512)] for row, tokens in enumerate(prompts)]
    path = tmp_path / "t.jsonl.gz"
    write_trace(trace_of(columns, blocks, 512), path)
    return path


def run(trace: Path, *options: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(simulate)
    words = ["--trace", trace, "--model", "Llama-3.1-8B", "--gpu", "h100", *options]
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("policy", ["round_robin", "least_requests", "inferplane_route"])
def test_the_json_has_the_contract_s_keys_and_the_same_bytes_again(trace: Path, policy: str) -> None:
    outputs = []
    for _ in range(2):
        result = run(trace, "--tp", 1, "--replicas", 2, "--policy", policy, "--copies", 3, "--seed", 5, "--json")
        assert result.exit_code == 0, result.output
        answer = orjson.loads(result.stdout)
        assert list(answer) == [*KEYS, "wall_s"]
        assert list(answer["ttft_ms"]) == list(answer["tpot_ms"]) == ["mean", "p50", "p95", "p99"]
        outputs.append(result.stdout.rpartition('"wall_s"')[0])
    assert answer["requests"] == answer["completed"] == 240
    assert 0 < answer["prefix_hit_ratio"] < 1
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("fleet", [FLEET, SPLIT], ids=["unlike engines", "prefill and decode"])
def test_a_fleet_file_with_detail_and_a_plot(trace: Path, tmp_path: Path, fleet: str) -> None:
    file, plot = tmp_path / "fleet.yaml", tmp_path / "p.html"
    file.write_text(fleet)
    result = run(trace, "--engines", file, "--detail", "--plot", plot, "--policy", "inferplane_route")
    assert result.exit_code == 0, result.output
    detail = orjson.loads(result.stdout)["detail"]
    assert len(detail["engines"]) == 3
    assert detail["hand_overs"] == (0 if fleet is FLEET else orjson.loads(result.stdout)["completed"])
    assert "plotly" in plot.read_text()


def test_closed_loop_and_a_longer_play(trace: Path) -> None:
    closed = orjson.loads(run(trace, "--closed-loop", "--json").stdout)
    assert closed["requests"] == 80
    longer = orjson.loads(run(trace, "--duration-s", 240, "--replicas", 2, "--json").stdout)
    assert 280 <= longer["requests"] <= 330
    shorter = orjson.loads(run(trace, "--duration-s", 30, "--json").stdout)
    assert 20 <= shorter["requests"] <= 60


def test_a_table_for_people(trace: Path) -> None:
    result = run(trace)
    assert result.exit_code == 0
    assert "TTFT" in result.stdout and "goodput" in result.stdout and "engines not idle" in result.stdout
    assert "overloaded" not in result.stdout and "refused" not in result.stdout


def test_an_overloaded_cluster_is_said_to_be_one(trace: Path) -> None:
    result = run(trace, "--copies", 400)
    assert result.exit_code == 0
    assert "overloaded: the queue grew until the last arrival" in result.stdout
    assert " min" in result.stdout or " s " in result.stdout
    answer = orjson.loads(run(trace, "--copies", 400, "--json").stdout)
    assert list(answer) == [*KEYS, "wall_s"]


def test_refused_requests_are_counted_with_the_reason(trace: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    rows = [
        {"t": at, "session": None, "isl": tokens, "osl": 2, "blocks": None, "block_tokens": None, "tier": "chat"}
        for at, tokens in enumerate((800, 1_000_000))
    ]
    long.write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\n")
    result = run(long)
    assert "1 requests refused: longer than the KV cache of the engine" in result.stdout, result.output


def test_options_that_the_file_overrules_are_named(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    result = run(trace, "--engines", file, "--replicas", 5, "--tp", 1, "--dtype", "bf16", "--json")
    assert result.exit_code == 0
    # fp8 is said for one of the two kinds only, so --dtype and --model still decide something.
    assert (
        result.stderr == f"perf: no effect beside --engines: --gpu, --tp, --replicas ({file} decides gpu, tp, count)\n"
    )


@pytest.mark.parametrize("missing", ["model", "gpu"])
def test_a_missing_model_or_gpu_names_its_option(trace: Path, missing: str) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(simulate)
    words = {"model": "Llama-3.1-8B", "gpu": "h100"}
    del words[missing]
    result = CliRunner().invoke(app, ["--trace", str(trace), *(w for k, v in words.items() for w in (f"--{k}", v))])
    assert (result.exit_code, result.stderr) == (2, f"perf: --{missing} is missing; expected a name of the catalogue\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--policy", "roundrobin"),
            "--policy is 'roundrobin'; expected one of inferplane_route, least_requests, round_robin",
        ),
        (("--replicas", 0), "--replicas is 0; expected at least 1"),
        (("--copies", 0), "--copies is 0; expected at least 1"),
        (("--model", "Llama-3.1-70B"), "perf: Llama-3.1-70B in bf16 does not fit"),
        (("--model", "Llama-3.1-70B"), "(--gpu, --tp, --dtype decide it)"),
        (("--dram-gb", 5), "--dram-gb-per-s is missing; expected the bandwidth of a restore beside --dram-gb"),
        (("--dram-gb-per-s", 5), "--dram-gb-per-s has no effect without --dram-gb"),
        (("--model", "Lama-3.1-8B"), "Llama-3.1-8B"),
        (("--gpu", "h1000"), "H100"),
        (("--slo-ttft-s", 0), "slo_ttft_s is 0.0; expected above 0"),
        (("--duration-s", -1), "--duration-s is -1.0; expected above 0"),
        (("--plot", "x.pdf"), ".html or .png"),
    ],
)
def test_bad_options_are_one_sentence_and_exit_2(trace: Path, options: tuple[object, ...], sentence: str) -> None:
    result = run(trace, *options)
    assert (result.exit_code, sentence in result.stderr, result.stderr.count("\n")) == (2, True, 1), result.stderr


@pytest.mark.parametrize(
    ("fleet", "sentence"),
    [
        ("engines: []", "expected a list of at least one engine"),
        ("engines: [{gpu: h100, cuont: 2}]", "cuont is no field of an engine; expected count"),
        ("engines: [{gpu: h100, count: 0}]", "engine 1: count is 0; expected an integer of 1 to 100,000"),
        ("engines: [{gpu: h100, role: prefill}]", "transfer_gb_per_s is missing"),
        ("engines: [{gpu: h100, dram_gb: 5}]", "dram_gb_per_s is missing"),
        ("engines: [", "is no YAML"),
        ("engines: [{role: foo}]", "engine 1: role is 'foo'; expected one of both, prefill, decode"),
        ("engines: [{model: Llama-3.1-70B}]", "(gpu, tp, dtype decide it)"),
        ("engines: [{tp: 5}]", "engine 1: tensor_parallel_count is 5"),
    ],
)
def test_bad_fleet_files_are_one_sentence_and_exit_2(trace: Path, tmp_path: Path, fleet: str, sentence: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(fleet)
    result = run(trace, "--engines", file)
    assert (result.exit_code, sentence in result.stderr, result.stderr.count("\n")) == (2, True, 1), result.stderr


@pytest.mark.parametrize(
    ("second", "sentence"), [(0.5, "expected requests sorted by t"), (-1.0, "expected 0 or more seconds")]
)
def test_unsorted_and_negative_times_are_refused(tmp_path: Path, second: float, sentence: str) -> None:
    path = tmp_path / "bad.jsonl"
    rows = [
        {"t": at_s, "session": None, "isl": 8, "osl": 2, "blocks": None, "block_tokens": None, "tier": "chat"}
        for at_s in (1.0, second)
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\n")
    result = run(path)
    assert (result.exit_code, sentence in result.stderr) == (2, True), result.stderr
