"""`inferplane perf trace` as a user calls it: files, statistics, and one sentence for each mistake.

Owns: the command. Does not own: what the generators draw (`unit/perfmodel/test_trace_generators`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from perfmodel.adapters import cli
from perfmodel.adapters.traces import read_trace


def perf(*options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `inferplane perf trace OPTIONS`."""
    app = typer.Typer()
    cli.register(app)
    ran = CliRunner().invoke(app, ["perf", "trace", *options])
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.mark.parametrize("profile", ["agent", "chat", "chat-short", "code", "api", "realtime", "batch"])
def test_a_trace_is_made_and_described(profile: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl.gz"
    code, said, complaint = perf(
        "--profile", profile, "--hours", "0.5", "--rate", "0.5", "--seed", "3", "--out", str(out), "--json"
    )
    assert (code, complaint) == (0, "")
    found = json.loads(said)
    assert found["profile"] == profile and found["seed"] == 3 and found["file"] == str(out)
    names = list(found)
    assert found["asked_rate_per_s"] == 0.5 and names.index("asked_rate_per_s") == names.index("rate_per_s") + 1
    assert found["request_count"] == len(read_trace(out)) > 100
    again = tmp_path / "again.jsonl.gz"
    perf("--profile", profile, "--hours", "0.5", "--rate", "0.5", "--seed", "3", "--out", str(again))
    assert again.read_bytes() == out.read_bytes()
    code, said, _ = perf("--stats", str(out), "--json")
    shown = json.loads(said)
    assert code == 0 and shown["input"] == found["input"] and shown["prefix"] == found["prefix"]


def test_statistics_are_a_table_for_people(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    perf("--profile", "chat", "--rate", "0.2", "--start-day", "saturday", "--start-hour", "9", "--out", str(out))
    code, said, _ = perf("--stats", str(out))
    rows = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert code == 0
    assert rows["request_count"].isdigit() and float(rows["prefix_hit_ratio"]) > 0
    assert set(rows) >= {"rate_per_s", "dispersion_ratio", "input_p99_tokens", "tier_counts_chat"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "--profile is missing; expected a kind of traffic, or --stats FILE"),
        (["--profile", "chat"], "--out is missing; expected the file to write"),
        (["--profile", "agnt", "--out", "t.jsonl"], "--profile is 'agnt'; expected one of agent"),
        (["--profile", "chat", "--rate", "0", "--out", "t.jsonl"], "--rate is 0.0; expected more than 0"),
        (["--profile", "chat", "--hours", "-1", "--out", "t.jsonl"], "--hours is -1.0; expected more than 0"),
        (["--profile", "chat", "--seed", "-1", "--out", "t.jsonl"], "--seed is -1; expected 0 or more"),
        (["--profile", "chat", "--tenants", "0", "--out", "t.jsonl"], "--tenants is 0; expected at least 1"),
        (["--profile", "chat", "--block-tokens", "0", "--out", "t.jsonl"], "--block-tokens is 0; expected at least 1"),
        (["--profile", "chat", "--start-hour", "24", "--out", "t.jsonl"], "--start-hour is 24.0; expected 0"),
        (
            ["--profile", "chat", "--start-day", "mon", "--out", "t.jsonl"],
            "--start-day is 'mon'; expected one of monday",
        ),
        (
            ["--profile", "agents", "--out", "t.jsonl"],
            "--profile is 'agents'; expected one of agent, chat, chat-short, batch, realtime, api, code",
        ),
        (
            ["--profile", "chat", "--start-day", "monda", "--out", "t.jsonl"],
            "--start-day is 'monda'; expected one of monday, sunday, ",
        ),
        (
            ["--profile", "batch", "--reading", "quoted", "--out", "t.jsonl"],
            "--reading has no effect with --profile ba",
        ),
        (["--profile", "batch", "--tenants", "3", "--out", "t.jsonl"], "--tenants has no effect with --profile batch"),
        (["--profile", "batch", "--curve", "flat", "--out", "t.jsonl"], "--curve has no effect with --profile batch"),
        (["--profile", "code", "--block-tokens", "16", "--out", "t"], "--block-tokens has no effect with --profile co"),
        (["--stats", "t.jsonl", "--rate", "1"], "--rate has no effect beside --stats"),
        (["--profile", "chat", "--out", "none/t.jsonl"], "--out is none/t.jsonl; there is no folder none"),
        (["--profile", "chat", "--curve", "moon", "--out", "t.jsonl"], "--curve is 'moon'; expected one of"),
        (["--profile", "agent", "--reading", "x", "--out", "t.jsonl"], "--reading is 'x'; expected one of"),
        (["--profile", "batch", "--batch-kind", "x", "--out", "t.jsonl"], "--batch-kind is 'x'; expected one of"),
        (["--profile", "chat", "--out", "t.csv"], "--out is t.csv; expected a file name that ends in .jsonl"),
        (["--profile", "code", "--rate", "1e-9", "--out", "t.jsonl"], "--rate is 1e-09; expected enough for one"),
        (["--profile", "agent", "--hours", "1e-6", "--out", "t.jsonl"], "--rate is 1.0; expected enough for one"),
        (["--profile", "chat", "--hours", "1e300", "--out", "t.jsonl"], "--hours is 1e+300; expected at most 277,778"),
        (["--profile", "chat", "--hours", "nan", "--out", "t.jsonl"], "--hours is nan; expected more than 0"),
        (
            ["--profile", "chat", "--block-tokens", "1" + 30 * "0", "--out", "t.jsonl"],
            f"--block-tokens is {10**30}; expected at most 4,000,000",
        ),
        (["--profile", "api", "--tenants", "1000001", "--out", "t.jsonl"], "--tenants is 1000001; expected at most 1,"),
        (
            ["--profile", "chat", "--rate", "500000", "--out", "t.jsonl"],
            "--rate is 500000, which is 1,800,000,000 requests in 1 hours: about 1,080.0 GB of memory, and ",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said, complaint = perf(*options)
    assert (code, said) == (2, "")
    assert complaint.startswith(f"perf: {sentence}") and complaint.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_bad_trace_file_is_one_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"t": 1, "isl": 5, "osl": 1, "tier": "chat"}\n{"t": 0, "isl": 5, "osl": 1, "tier": "chat"}\n')
    code, _, complaint = perf("--stats", str(bad))
    assert code == 2 and "line 2: t is 0.0, before the 1.0 of the line above" in complaint
    code, _, complaint = perf("--stats", str(tmp_path / "none.jsonl"))
    assert code == 1 and complaint == f"perf: {tmp_path / 'none.jsonl'}: No such file or directory\n"
