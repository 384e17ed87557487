"""`inferplane perf kv`: the contract of its JSON, its sentences and exit codes, its plot."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from perfmodel.adapters.perf_cli import register

KEYS = [
    "kv_bytes_per_token",
    "kv_bytes",
    "weights_bytes",
    "devices_for_kv",
    "devices_by_memory",
    "crossover_tokens",
]


APP = typer.Typer()
register(APP)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Done:
    result = CliRunner().invoke(APP, ["perf", "kv", *arguments])
    return Done(result.exit_code, result.stdout, result.stderr)


def answer(*arguments: str) -> dict[str, int | None]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, int | None] = json.loads(done.stdout)
    assert list(found) == KEYS
    return found


def test_the_command_is_one_of_inferplane() -> None:
    command = [sys.executable, "-m", "controlplane", "perf", "kv", "--model", "Qwen3-8B", "--context", "10", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kv_bytes_per_token"] == 147_456


def test_the_70b_at_128k_is_as_published() -> None:
    found = answer("--model", "Llama-3.1-70B", "--context", "131072", "--batch", "1", "--gpu", "H100-SXM-80GB")
    assert found["kv_bytes_per_token"] == 327_680
    assert found["kv_bytes"] == 40 * 2**30
    assert found["weights_bytes"] == pytest.approx(141.1e9, rel=0.001)
    assert (found["devices_for_kv"], found["devices_by_memory"]) == (1, 3)
    assert found["crossover_tokens"] == pytest.approx(430_600, abs=100)


def test_devices_are_null_without_a_device_and_formats_count() -> None:
    wide = answer("--model", "llama-3.1-405b", "--context", "128000", "--batch", "32", "--gpu", "h100")
    assert wide["devices_for_kv"] == 27
    narrow = answer(
        "--model",
        "llama-3.1-405b",
        "--context",
        "128000",
        "--batch",
        "32",
        "--kv-dtype",
        "nvfp4",
        "--weight-dtype",
        "fp8",
    )
    assert narrow["devices_for_kv"] is narrow["devices_by_memory"] is None
    assert wide["kv_bytes"] is not None
    assert narrow["kv_bytes"] == wide["kv_bytes"] * 4.5 / 16
    assert narrow["weights_bytes"] == pytest.approx(403.75e9 + 4.3e9, rel=0.005)


def test_a_configuration_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    path.write_text(json.dumps(fields))
    assert answer("--model", str(path), "--context", "1000") == answer("--model", "Llama-3.1-8B", "--context", "1000")
    del fields["hidden_size"]
    path.write_text(json.dumps(fields))
    done = run("--model", str(path), "--context", "1000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"perf: {path}: hidden_size is missing; expected a whole number above 0\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--model", "Lama-3.1-70B"),
            "perf: --model is 'Lama-3.1-70B'; the closest of the 63 known names: Llama-3.1-70B",
        ),
        (("--model", "Qwen3-8B", "--gpu", "h300"), "perf: --gpu is 'h300'; the closest of the 43 known names: "),
        (("--model", "Qwen3-8B", "--gpu", "GH200"), "perf: --gpu GH200: its memory size is not known"),
        (("--model", "Qwen3-8B", "--kv-dtype", "fp3"), "perf: --kv-dtype is 'fp3'; expected one of bf16, fp8"),
        (("--model", "Qwen3-8B", "--weight-dtype", "x"), "perf: --weight-dtype is 'x'; expected one of bf16, fp8"),
        (("--model", "Qwen3-8B", "--plot", "kv.jpeg"), "perf: --plot is kv.jpeg; expected a file name that ends in"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: tuple[str, ...], sentence: str) -> None:
    done = run(*arguments, "--context", "1000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("option", "value"), [("--context", "0"), ("--context", "many"), ("--batch", "-1")])
def test_a_count_that_cannot_be_names_its_option(option: str, value: str) -> None:
    arguments = {"--model": "Qwen3-8B", "--context": "1000", option: value}
    done = run(*(word for pair in arguments.items() for word in pair))
    assert done.returncode == 2
    assert option in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--context", "131072"), ["tensor-parallel group │ 4 │"]),
        (("--context", "131073"), ["tensor-parallel group │ 4 │", "above the model's maximum of │ 131,072 tokens │"]),
        (("--context", "1000"), []),
        (("--context", "131072", "--batch", "64"), ["tensor-parallel group │ none fits │"]),
    ],
)
def test_the_table_says_usable_groups_and_too_long_contexts(arguments: tuple[str, ...], words: list[str]) -> None:
    done = run("--model", "Llama-3.1-70B", "--gpu", "H100-SXM-80GB", *arguments)
    assert done.returncode == 0, done.stderr
    flat = " ".join(done.stdout.split())
    assert [word for word in words if word not in flat] == []
    assert ("tensor-parallel group" in flat, "maximum" in flat) == (
        any("group" in word for word in words), any("maximum" in word for word in words),
    )  # fmt: skip


def test_the_table_and_the_plot_show_the_crossing(tmp_path: Path) -> None:
    plot = tmp_path / "kv.html"
    done = run("--model", "Qwen3-Next-80B-A3B", "--context", "100000", "--gpu", "b200", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert "of which linear state" in done.stdout
    assert "b200 for weights, cache and runtime" in done.stdout
    page = plot.read_text()
    assert "KV reaches the weights" in page
    assert "<html" in page
