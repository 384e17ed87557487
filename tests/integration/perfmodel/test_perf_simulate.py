"""`inferplane perf simulate` as a user calls it: its JSON, its plot, and one sentence for what is wrong."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
import typer
from typer.testing import CliRunner, Result

from perfmodel.adapters import policy_names
from perfmodel.adapters.perf_simulate import simulate
from perfmodel.adapters.traces import read_trace, write_trace
from perfmodel.traces.trace import Trace, trace_of
from router.adapters import policies
from tests import services

KEYS = ["requests", "completed", "ttft_ms", "tpot_ms", "prefix_hit_ratio", "output_tok_per_s", "goodput_ratio", "sim_s"]
ROOT = Path(__file__).parents[3]
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


class Broken:
    """A policy of another package, with the fault that its name says."""

    hears = reads_blocks = False

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.hears = fault == "deaf"

    def pick(self, ask: object, now_s: float) -> object:
        if self._fault == "raises":
            raise LookupError("no such tenant")
        return {"refuses": None, "beyond": 7, "negative": -1, "wordy": "first"}.get(self._fault, 0)

    def first_token(self, serial: int, now_s: float) -> None:
        raise RuntimeError

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """Told nothing."""


PUBLISHED = (
    "power_of_two", "sticky", "sticky_2x", "sglang_cache_aware", "dynamo_kv", "dynamo_kv_8", "llmd_default",
    "llmd_precise", "aibrix_prefix", "mooncake", "smetric",
)  # fmt: skip
BROKEN = ("refuses", "beyond", "negative", "wordy", "raises", "deaf")


class Point:
    """An entry point as `importlib.metadata` gives it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self) -> object:
        if self.name == "absent":
            raise ImportError("No module named 'elsewhere'")
        if self.name == "unmade":
            return lambda fleet: fleet.nothing
        if self.name in BROKEN:
            return lambda fleet: Broken(self.name)
        return getattr(policies, self.name)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("round_robin", "least_requests", "inferplane_route", *PUBLISHED)
    points = [Point(name) for name in (*ours, *BROKEN, "absent", "unmade")]
    monkeypatch.setattr(policy_names, "entry_points", lambda group: points)


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Once, so that no test reads on stderr that the compiler runs."""
    path = tmp_path_factory.mktemp("warm") / "short.jsonl"
    write_trace(short_trace(), path)
    assert run(path, "--json").exit_code == 0


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
    assert "TTFT" in result.stdout and "goodput" in result.stdout and "engine not idle" in result.stdout
    assert "round_robin: 80 requests on 1 engine\n" in result.stdout
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
    assert "1 request refused: longer than the KV cache of the engine that was picked" in result.stdout, result.output


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
            "--policy is 'roundrobin'; expected one of absent, aibrix_prefix, beyond, deaf, dynamo_kv, dynamo_kv_8, ",
        ),
        (("--replicas", 0), "--replicas is 0; expected at least 1"),
        (("--replicas", "2,x"), "--replicas is '2,x'; expected a whole number, or several with commas between them"),
        (("--replicas", 100_001), "--replicas is 100001; expected at most 100,000"),
        (("--replicas", 100_000, "--max-sequences", 100_000), "the KV blocks of 100,000 engines would take"),
        (("--copies", 10**8), "--copies is 100,000,000, whose requests of 30 s would take"),
        (("--copies", 10**9), "--copies is 1,000,000,000"),
        (("--copies", 10**8, "--closed-loop"), "--copies is 100,000,000"),
        (("--workers", 0), "--workers is 0; expected at least 1"),
        (("--copies", "1,2", "--workers", 2, "--dask", "tcp://127.0.0.1:1"), "--workers has no effect beside --dask"),
        (("--replicas", "1,2", "--engines", "e.yaml"), "--replicas is 1,2; expected one number beside --engines"),
        (("--seeds", 10_000, "--copies", "1,2,3,4,5,6", "--replicas", "1,2"), "the sweep has 120,000 runs; expected"),
        (("--policy", "beyond"), "the policy beyond picked engine 7; expected 0 to 0, or None to refuse the request"),
        (("--policy", "negative"), "the policy negative picked engine -1; expected 0 to 0"),
        (("--policy", "wordy"), "the policy wordy failed in pick (TypeError: "),
        (("--policy", "raises"), "the policy raises failed in pick (LookupError: no such tenant)"),
        (("--policy", "deaf"), "the policy deaf failed in first_token (RuntimeError: no message)"),
        (("--policy", "unmade"), "the policy unmade failed in its making (AttributeError: "),
        (("--policy", "absent"), "--policy absent cannot be loaded (ImportError: No module named 'elsewhere')"),
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


def test_a_policy_that_refuses_everything_is_an_answer(trace: Path) -> None:
    result = run(trace, "--policy", "refuses")
    assert (result.exit_code, "80 requests refused by the policy refuses" in result.stdout) == (0, True)
    answer = orjson.loads(run(trace, "--policy", "refuses", "--json").stdout)
    assert (answer["requests"], answer["completed"], answer["goodput_ratio"]) == (80, 0, 0.0)
    assert answer["ttft_ms"] == {"mean": None, "p50": None, "p95": None, "p99": None}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A local Dask cluster of two processes."""
    distributed: Any = importlib.import_module("distributed")  # it has no types
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", host="127.0.0.1"
    ) as started:
        yield str(started.scheduler_address)


SWEEP = (
    "--policy", "round_robin,inferplane_route", "--replicas", "2,1", "--seeds", 2, "--copies", 2, "--step-noise", 0.1,
)  # fmt: skip


def told(result: Result) -> str:
    """The JSON up to the time that the work took, which is its last key."""
    assert result.exit_code == 0, result.stderr
    said, _, wall = result.stdout.rpartition('"wall_s"')
    assert len(wall.splitlines()) == 2
    return said


def test_a_sweep_gives_the_same_bytes_on_one_core_on_all_and_on_dask(trace: Path, cluster: str) -> None:
    here = told(run(trace, *SWEEP, "--json", "--workers", 1))
    assert told(run(trace, *SWEEP, "--json", "--dask", cluster)) == here
    spread = run(trace, *SWEEP, "--json")
    assert told(spread) == here
    answer = orjson.loads(spread.stdout)
    assert list(answer) == ["runs", "summary", "wall_s"]
    keys = ["trace", "copies", "policy", "replicas", "seed"]
    assert [list(each) for each in answer["runs"]] == [[*keys, *KEYS]] * 8
    which = [tuple(each[key] for key in keys[2:]) for each in answer["runs"]]
    assert which == [
        (policy, replicas, seed)
        for policy in ("round_robin", "inferplane_route") for replicas in (2, 1) for seed in (0, 1)
    ]  # fmt: skip
    one = orjson.loads(run(trace, "--policy", "inferplane_route", "--seed", 1, *SWEEP[6:], "--json").stdout)
    assert {name: one[name] for name in KEYS} == {name: answer["runs"][-1][name] for name in KEYS}
    first = answer["summary"][0]
    assert (first["policy"], first["replicas"], first["seeds"]) == ("round_robin", 2, 2)
    shares = [each["goodput_ratio"] for each in answer["runs"][:2]]
    assert first["goodput_ratio"] == pytest.approx(sum(shares) / 2)
    assert [first["goodput_ratio_lowest"], first["goodput_ratio_highest"]] == sorted(shares)
    p95 = [each["ttft_ms"]["p95"] for each in answer["runs"][:2]]
    assert p95[0] != p95[1] and first["ttft_ms"]["p95"] == pytest.approx(sum(p95) / 2)


def test_one_run_on_dask_has_the_form_of_one_run(trace: Path, cluster: str) -> None:
    assert told(run(trace, "--json", "--dask", cluster)) == told(run(trace, "--json"))


def test_traces_are_swept_too_and_drawn(trace: Path, tmp_path: Path) -> None:
    other, plot = tmp_path / "other.jsonl", tmp_path / "sweep.html"
    write_trace(short_trace(), other)
    result = run(trace, "--trace", other, "--trace", trace, "--plot", plot, "--workers", 1)
    assert result.exit_code == 0, result.stderr
    assert [name in result.stdout for name in (trace.name, other.name, "goodput", "TTFT")] == [True] * 4
    assert "plotly" in plot.read_text()
    engines = tmp_path / "fleet.yaml"
    engines.write_text(FLEET)
    swept = orjson.loads(run(trace, "--engines", engines, "--seeds", 2, "--workers", 1, "--json").stdout)
    assert [each["replicas"] for each in swept["runs"]] == [3, 3]


def short_trace() -> Trace:
    """Two short prompts without sessions or blocks."""
    columns: dict[str, Sequence[Any]] = {
        "arrival_s": [0.0, 1.0],
        "session": [-1, -1],
        "input_tokens": [50, 60],
        "output_tokens": [3, 4],
    }
    return trace_of({**columns, "tier": [0, 0]}, [[], []], 0)


def test_a_cluster_that_is_not_there_is_one_sentence(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.adapters.sweeps._DASK_ANSWER_S", 1.0)
    result = run(trace, "--seeds", 2, "--dask", f"tcp://127.0.0.1:{services.free_tcp_port()}")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("perf: no Dask scheduler answers at tcp://127.0.0.1:")
    monkeypatch.setitem(sys.modules, "distributed", None)
    result = run(trace, "--seeds", 2, "--dask", "tcp://127.0.0.1:1")
    assert (result.exit_code, result.stderr) == (
        2, "perf: --dask needs Dask, which is not installed; from a checkout `make setup` installs it\n",
    )  # fmt: skip


def _started(*words: object) -> subprocess.Popen[str]:
    """The command as a process that hears Ctrl-C, whatever the test run hears."""
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = f"{begin}import sys; sys.argv[0] = 'inferplane'; from controlplane.__main__ import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "perf", "simulate", *map(str, words)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def _worked_s(pid: int) -> float:
    """Seconds of CPU time of a process and its children."""
    own = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


@pytest.mark.parametrize("more", [(), ("--seeds", 4, "--workers", 2)], ids=["one run", "a sweep"])
def test_an_interrupt_is_one_line_and_exit_130(trace: Path, more: tuple[object, ...]) -> None:
    process = _started(
        "--trace", trace, "--model", "Llama-3.1-8B", "--gpu", "h100", "--replicas", 4, "--duration-s", 10_000_000,
        "--policy", "inferplane_route", *more,
    )  # fmt: skip
    while _worked_s(process.pid) < 7.0:  # importing takes 2 s in each process: it is simulating by then
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, complaint = process.communicate(timeout=30)
    assert (process.returncode, said, complaint) == (130, "", "perf: interrupted\n")


def test_a_reader_that_leaves_is_no_traceback(trace: Path) -> None:
    for more in ("--json", "--detail"):
        process = _started("--trace", trace, "--model", "Llama-3.1-8B", "--gpu", "h100", more)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
        process.stderr.close()
        assert (process.wait(60), complaint) == (1, "")


def test_block_ids_that_are_hashes_can_be_copied(trace: Path, tmp_path: Path) -> None:
    small = read_trace(trace)
    hashed = tmp_path / "hashed.jsonl"
    write_trace(replace(small, blocks=2**63 - 1 - small.blocks), hashed)
    for copies in (1, 3):
        assert told(run(hashed, "--copies", copies, "--json")) == told(run(trace, "--copies", copies, "--json"))


def test_every_published_policy_plays_the_trace(trace: Path) -> None:
    done = run(trace, "--policy", ",".join(PUBLISHED), "--replicas", 3, "--workers", 1, "--json")
    assert done.exit_code == 0, done.output
    told = orjson.loads(done.stdout)["runs"]
    assert [entry["policy"] for entry in told] == list(PUBLISHED)
    assert all(entry["requests"] == entry["completed"] == 80 for entry in told)
    hits = {entry["policy"]: entry["prefix_hit_ratio"] for entry in told}
    assert hits["sticky"] > hits["power_of_two"], "a session's cache is where the session is"


def test_a_setting_changes_its_policy_alone(trace: Path) -> None:
    def hits(*options: str) -> list[float]:
        done = run(trace, "--policy", "dynamo_kv,dynamo_kv_8", "--replicas", 3, "--workers", 1, "--json", *options)
        assert done.exit_code == 0, done.output
        return [entry["prefix_hit_ratio"] for entry in orjson.loads(done.stdout)["runs"]]

    plain = hits()
    assert hits("--policy-settings", "dynamo_kv:prefill_load_scale_ratio=8") == [plain[1], plain[1]]
    both = ("--policy-settings", "dynamo_kv: prefill_load_scale_ratio = 8 , stale_s=100",
            "--policy-settings", "dynamo_kv_8:prefill_load_scale_ratio=1.0")  # fmt: skip
    assert hits(*both) == [plain[1], plain[0]]


def test_the_only_policy_needs_no_name_before_its_settings(trace: Path) -> None:
    assert run(trace, "--policy", "sticky_2x", "--policy-settings", "load=tokens,moves=yes").exit_code == 0


@pytest.mark.parametrize(
    ("policy", "words", "said"),
    [
        ("dynamo_kv", "scale", "--policy-settings is 'scale'; expected NAME=VALUE, or several with commas between"),
        (
            "dynamo_kv",
            "prefill_load=8",
            "dynamo_kv has no setting 'prefill_load'; expected one of overlap_score_credit_ratio",
        ),
        ("dynamo_kv", "prefill_load=8", "did you mean prefill_load_scale_ratio"),
        ("dynamo_kv", "temperature_ratio=warm", "dynamo_kv:temperature_ratio is 'warm'; expected a number"),
        ("dynamo_kv", "temperature_ratio=nan", "dynamo_kv:temperature_ratio is 'nan'; expected a number"),
        (
            "dynamo_kv",
            "temperature_ratio=-1",
            "--policy-settings of dynamo_kv: temperature_ratio is -1.0; expected 0 or more",
        ),
        ("aibrix_prefix", "block_count=1.5", "aibrix_prefix:block_count is '1.5'; expected a whole number"),
        ("sticky_2x", "moves=maybe", "sticky_2x:moves is 'maybe'; expected true or false"),
        (
            "sticky_2x",
            "load=bytes",
            "--policy-settings of sticky_2x: load is 'bytes'; expected one of requests, tokens",
        ),
        ("round_robin", "first=1", "the policy round_robin has no settings; expected a policy that has some"),
        ("sticky,mooncake", "reject_above_s=1", "and there are 2 policies; expected POLICY:NAME=VALUE"),
        (
            "sticky,mooncake",
            "smetric:slack_ratio=2",
            "--policy-settings is of 'smetric'; expected a policy of this run",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_said(trace: Path, policy: str, words: str, said: str) -> None:
    done = run(trace, "--policy", policy, "--policy-settings", words)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())


def test_events_cannot_come_before_they_happen(trace: Path) -> None:
    done = run(trace, "--policy", "mooncake", "--event-delay-ms", -1)
    assert done.exit_code == 2 and "--event-delay-ms is -1; expected 0 or more" in " ".join(done.stderr.split())
