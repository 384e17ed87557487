"""`inferplane perf estimate`: every row answered or refused in a sentence, and nothing measured is read."""

from __future__ import annotations

import csv
import json
import random
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from perfmodel.adapters.perf_cli import register
from perfmodel.adapters.perf_estimate import ADDED
from perfmodel.configuration import Scenario
from perfmodel.step_time import Bound

APP = typer.Typer()
register(APP)

INPUTS = (
    "split", "source", "date", "engine", "engine_version", "model", "weight_dtype", "kv_dtype", "gpu", "n_gpus", "tp",
    "pp", "dp", "ep", "disagg(prefill_gpus/decode_gpus or blank)", "isl", "osl", "concurrency_or_batch",
    "request_rate", "scenario", "lengths", "prefill_layout", "decode_layout", "speculative", "prefix_hit_ratio",
    "ttft_statistic",
)  # fmt: skip
MEASURED = ("ttft_ms", "tpot_ms", "e2e_ms", "output_tok_s", "total_tok_s", "output_tok_s_per_gpu", "exclude", "note")

# Deployments as tables describe them; the figures measured are made up.
DENSE = {
    "source": "s", "date": "2025-10-29", "engine": "vllm", "model": "Llama-3.3-70B", "weight_dtype": "fp8",
    "gpu": "H100-SXM-80GB", "n_gpus": "4", "tp": "4", "isl": "1024", "osl": "1024", "concurrency_or_batch": "16",
    "scenario": "closed_loop", "lengths": "uniform_0.8_1.0", "ttft_ms": "1", "tpot_ms": "2", "note": "x",
}  # fmt: skip
ROWS = (
    DENSE,
    {**DENSE, "concurrency_or_batch": "64", "ttft_ms": "3", "tpot_ms": "4", "note": "y"},
    {**DENSE, "model": "DeepSeek-R1", "gpu": "H200-SXM-141GB", "engine": "sglang", "n_gpus": "16", "tp": "",
     "disagg(prefill_gpus/decode_gpus or blank)": "8/8", "prefill_layout": "1x(tp8,dp1,moe_tp8,ep1,bs1)",
     "decode_layout": "1x(tp1,dp8,moe_tp1,ep8,bs8)", "ttft_ms": "5", "tpot_ms": "6", "note": "z"},
    {**DENSE, "model": "Llama-2-70B", "n_gpus": "8", "tp": "", "isl": "", "concurrency_or_batch": "",
     "request_rate": "50", "scenario": "mlperf_server", "lengths": "", "weight_dtype": "", "ttft_ms": "7"},
    {**DENSE, "model": "gpt-oss-120b", "gpu": "B300-SXM-270GB", "n_gpus": "2", "tp": "2", "weight_dtype": ""},
    {**DENSE, "gpu": "H300"},
    {**DENSE, "gpu": "H800-SXM-80GB"},
    {**DENSE, "model": "Llama-9-1T"},
    {**DENSE, "gpu": "HyperAccel-Bertha-500", "n_gpus": "1", "tp": "1"},
)  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, (*INPUTS, *MEASURED), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def answered(folder: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    out = folder / "out.csv"
    done = CliRunner().invoke(
        APP, ["perf", "estimate", "--rows", str(write(folder / "in.csv", rows)), "--out", str(out)]
    )
    assert done.exit_code == 0, done.stderr
    with out.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_each_row_is_answered_with_a_band_or_refused_in_a_sentence(tmp_path: Path) -> None:
    answers = answered(tmp_path, [dict(row) for row in ROWS])
    assert len(answers) == len(ROWS)
    for answer in answers[:5]:
        assert answer["error"] == ""
        for column in ("ttft_ms", "tpot_ms", "output_tok_s"):
            low, middle, high = (float(answer[name]) for name in (f"{column}_p10", f"pred_{column}", f"{column}_p90"))
            assert 0 < low <= middle <= high
        assert answer["bound"] in {"compute", "weights", "kv_cache", "collectives", "overhead"}
    assert answers[0]["extrapolated"] == ""
    assumed = dict(word.partition("=")[::2] for word in answers[3]["assumed"].split(";"))
    assert float(assumed.pop("concurrency")) > 1
    assert assumed == {"weight_dtype": "fp8", "kv_dtype": "bf16", "isl": "294", "tp": "2"}
    assert answers[4]["extrapolated"].startswith("nearest calibrated group: gpt-oss-120b on ")
    assert "'H300'" in answers[5]["error"]
    assert "closest" in answers[5]["error"]
    assert answers[6]["error"].startswith("device H800-SXM-80GB: its memory bandwidth is not known")
    assert "'Llama-9-1T'" in answers[7]["error"]
    assert "no compute figure is known" in answers[8]["error"]
    for answer in answers[5:]:
        assert answer["pred_tpot_ms"] == ""


def test_nothing_measured_is_read(tmp_path: Path) -> None:
    rows = [dict(row) for row in ROWS]
    before = answered(tmp_path, rows)
    order = random.Random(1).sample(range(len(rows)), len(rows))
    shuffled = [
        {**row, **{name: rows[other].get(name, "9") for name in MEASURED}}
        for row, other in zip(rows, order, strict=True)
    ]
    blank = [{**row, **dict.fromkeys(MEASURED, "")} for row in rows]
    for changed in (shuffled, blank):
        after = answered(tmp_path, changed)
        for one, other in zip(before, after, strict=True):
            assert {name: value for name, value in one.items() if name not in MEASURED} == {
                name: value for name, value in other.items() if name not in MEASURED
            }


def test_an_assumed_input_widens_the_band(tmp_path: Path) -> None:
    said = {**DENSE, "lengths": "fixed", "isl": "1024"}
    answers = answered(tmp_path, [said, {**said, "isl": ""}])
    widths = [float(answer["tpot_ms_p90"]) / float(answer["tpot_ms_p10"]) for answer in answers]
    assert widths[1] > widths[0]
    assert "isl=1024" in answers[1]["assumed"].split(";")


def test_weights_that_do_not_fit_are_answered_named_and_wider(tmp_path: Path) -> None:
    big = {**DENSE, "model": "Llama-3.1-405B", "kv_dtype": "fp8", "lengths": "fixed"}
    offered = {**big, "scenario": "mlperf_server", "request_rate": "1"}
    answers = answered(
        tmp_path, [{**big, "n_gpus": "8", "tp": "8"}, big, {**offered, "n_gpus": "8", "tp": "8"}, offered]
    )
    assert [answer["assumed"] for answer in answers] == ["", "memory", "", "memory"]
    widths = [float(answer["tpot_ms_p90"]) / float(answer["tpot_ms_p10"]) for answer in answers]
    assert widths[1] > widths[0]
    assert widths[3] > widths[2]


@pytest.mark.parametrize("link", ["same", "symbolic", "hard"])
def test_the_input_is_never_overwritten(tmp_path: Path, link: str) -> None:
    rows = write(tmp_path / "in.csv", [dict(DENSE)])
    before, out = rows.read_bytes(), tmp_path / "out.csv"
    if link == "symbolic":
        out.symlink_to(rows)
    elif link == "hard":
        out.hardlink_to(rows)
    else:
        out = tmp_path / "." / "in.csv"
    done = CliRunner().invoke(APP, ["perf", "estimate", "--rows", str(rows), "--out", str(out)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"perf: --out is {out}, the file that is read; expected another one\n"
    assert rows.read_bytes() == before


def test_the_counts_say_assumptions_extrapolations_and_errors(tmp_path: Path) -> None:
    rows = write(tmp_path / "in.csv", [dict(row) for row in ROWS])
    arguments = ["perf", "estimate", "--rows", str(rows), "--out", str(tmp_path / "out.csv")]
    counts = json.loads(CliRunner().invoke(APP, [*arguments, "--json"]).stdout)
    assert {name: counts[name] for name in ("rows", "answered", "errors", "assumed")} == {
        "rows": 9, "answered": 5, "errors": 4, "assumed": 5,
    }  # fmt: skip
    said = CliRunner().invoke(APP, arguments).stdout
    assert f"5 of 9 rows answered: 5 with assumptions, {counts['extrapolated']} extrapolated; 4 errors;" in said


def test_every_added_column_and_rule_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/performance-model.md").read_text(encoding="utf-8")
    section = text.partition("## Columns of `perf estimate` and `perf calibrate`")[2].partition("\n## ")[0]
    words = set(re.findall(r"`([^`]+)`", section))
    added = {name for name in ADDED if not name.startswith(("tpot_ms_", "output_tok_s_"))}
    read = set(INPUTS) - {"split", "ttft_statistic"}
    assert added | read | set(Scenario) | set(Bound) <= words


@pytest.mark.parametrize(
    ("content", "sentence"), [("a,b\n1,2\n", "has no column 'model'"), ("", "has no column 'model'")]
)
def test_another_table_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "in.csv"
    path.write_text(content, encoding="utf-8")
    done = CliRunner().invoke(APP, ["perf", "estimate", "--rows", str(path), "--out", str(tmp_path / "out.csv")])
    assert done.exit_code == 2
    assert sentence in done.stderr
    missing = CliRunner().invoke(APP, ["perf", "estimate", "--rows", str(tmp_path / "no.csv"), "--out", "o.csv"])
    assert missing.exit_code == 1
    assert "No such file" in missing.stderr


def test_a_table_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    table, out = write(tmp_path / "rows.csv", [DENSE]), tmp_path / "out.csv"
    table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes())
    result = CliRunner().invoke(APP, ["perf", "estimate", "--rows", str(table), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert next(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))["error"] == ""
