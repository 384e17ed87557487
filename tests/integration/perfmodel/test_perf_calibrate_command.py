"""`inferplane perf calibrate`: the report's form, the file it writes, and its sentences."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from perfmodel.adapters.catalog import load_catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.adapters.measured import configured
from perfmodel.adapters.perf_cli import register
from perfmodel.adapters.perf_output import guard
from perfmodel.steady import Steady, settle

APP = typer.Typer()
register(APP)

COLUMNS = (
    "source", "date", "engine", "model", "weight_dtype", "gpu", "n_gpus", "tp", "isl", "osl", "concurrency_or_batch",
    "scenario", "lengths", "ttft_ms", "tpot_ms", "exclude", "note",
)  # fmt: skip


def table(path: Path) -> Path:
    """Points made by the shipped coefficients, every seventh a tenth slower; one excluded, one impossible."""
    catalog, fitted = load_catalog(), load_coefficients().coefficients
    rows: list[dict[str, str]] = []
    for gpu in ("H100-SXM-80GB", "B200-SXM-180GB"):
        for model, tensor in (("Llama-3.3-70B", 4), ("Qwen3-32B", 2), ("gpt-oss-120b", 2)):
            for isl in (1024, 8192):
                for count in (4, 16, 64):
                    row = {
                        "source": "made", "date": "2025-10", "engine": "vllm", "model": model, "weight_dtype": "fp8",
                        "gpu": gpu, "n_gpus": str(tensor), "tp": str(tensor), "isl": str(isl), "osl": "1024",
                        "concurrency_or_batch": str(count), "scenario": "closed_loop", "lengths": "uniform_0.8_1.0",
                    }  # fmt: skip
                    asked = configured(row, catalog)
                    seconds = settle(Steady(asked), fitted.resolve(asked.group))[1]
                    slower = 1.1 if len(rows) % 7 == 0 else 1.0
                    rows.append({**row, "tpot_ms": f"{seconds * slower * 1e3:.4f}", "ttft_ms": f"{100 + isl / 20:.1f}"})
    rows.append({**rows[0], "exclude": "stalled", "tpot_ms": "9999"})
    rows.append({**rows[0], "tpot_ms": "0.001"})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_table_is_fitted_reported_plotted_and_written(tmp_path: Path) -> None:
    out, plot = tmp_path / "fitted.yaml", tmp_path / "errors.html"
    done = CliRunner().invoke(
        APP,
        [
            "perf",
            "calibrate",
            "--data",
            str(table(tmp_path / "in.csv")),
            "--out",
            str(out),
            "--json",
            "--plot",
            str(plot),
        ],
    )
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rows"] == 36
    assert report["refused"] == {"exclude is 'stalled'": 1, "units": 1}
    assert {"within", "gpu", "combo", "model"} <= set(report["splits"])
    within = report["splits"]["within"]
    assert within["tpot_median_ratio"] < 0.05
    assert 0.7 <= within["tpot_coverage_ratio"] <= 1
    assert set(report["saturation_misses"]) == {"within", "gpu", "combo", "model"}
    fitted = load_coefficients(out)
    assert fitted.coefficients.pair_rows["H100-SXM-80GB Qwen3-32B"] == 6
    assert "tpot any closed_loop" in fitted.coefficients.bands
    assert plot.read_text(encoding="utf-8").lstrip().lower().startswith(("<html", "<!doctype"))
    again = tmp_path / "again.yaml"
    shown = CliRunner().invoke(APP, ["perf", "calibrate", "--data", str(tmp_path / "in.csv"), "--out", str(again)])
    assert again.read_bytes() == out.read_bytes()
    assert "36 rows fitted" in shown.stdout
    assert "Residuals by group" in shown.stdout
    assert "1 row is not used, line 38: exclude is 'stalled'\n" in shown.stdout
    assert "1 row is not used, line 39: units: tpot_ms is 0.001; expected 0.2 to 5000 milliseconds\n" in shown.stdout
    assert "pair closed_loop" in shown.stdout and "combo" not in shown.stdout, "named as in the documents"
    assert report["rows_without_cross_validation"] == {}


def part(path: Path, source: Path, **fields: str) -> str:
    """The rows of a table with these fields, without TTFT."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = [{**row, "ttft_ms": ""} for row in csv.DictReader(file) if not row["exclude"]]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(row for row in rows if fields.items() <= row.items() and row["tpot_ms"] != "0.001")
    return str(path)


def test_rows_of_one_family_are_fitted_and_that_split_is_left_out(tmp_path: Path) -> None:
    data = part(tmp_path / "part.csv", table(tmp_path / "in.csv"), model="Llama-3.3-70B")
    told = CliRunner().invoke(APP, ["perf", "calibrate", "--data", data])
    assert told.exit_code == 0, told.stderr
    assert "12 rows fitted\n" in told.stdout
    assert "not cross-validated by family: the rows with tpot_ms are all of one model family\n" in told.stdout
    assert "TTFT above 10 s" not in told.stdout, "a table without a row is left out"
    report = json.loads(CliRunner().invoke(APP, ["perf", "calibrate", "--data", data, "--json"]).stdout)
    assert set(report["saturation_misses"]) == {"within", "gpu", "combo"}
    assert report["rows_without_cross_validation"] == {"model": 12}
    assert report["splits"]["gpu"]["tpot_count"] == 12 and "model" not in report["splits"]


def test_rows_of_one_device_and_model_are_fitted(tmp_path: Path) -> None:
    data = part(tmp_path / "part.csv", table(tmp_path / "in.csv"), model="Qwen3-32B", gpu="H100-SXM-80GB", isl="1024")
    told = CliRunner().invoke(APP, ["perf", "calibrate", "--data", data])
    assert told.exit_code == 0, told.stderr
    for words in ("curves", "device", "pair", "family"):
        assert f"not cross-validated by {words}: " in told.stdout
    assert "Cross-validated errors" not in told.stdout and "Residuals" not in told.stdout
    chosen = CliRunner().invoke(APP, ["perf", "calibrate", "--data", data, "--choose-shrinkage"])
    assert chosen.exit_code == 2
    assert "the rows with tpot_ms are of one (model, device) pair; expected at least two" in chosen.stderr


def test_a_package_that_is_missing_is_said_with_what_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), guard():
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")
    assert capsys.readouterr().err == "perf: scipy is not installed; from a checkout `make setup` installs it\n"


def test_the_measurements_are_never_overwritten(tmp_path: Path) -> None:
    path = table(tmp_path / "in.csv")
    before = path.read_bytes()
    done = CliRunner().invoke(APP, ["perf", "calibrate", "--data", str(path), "--out", str(path)])
    assert done.exit_code == 2
    assert "the file that is read" in done.stderr
    assert path.read_bytes() == before


def test_a_table_without_usable_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    done = CliRunner().invoke(APP, ["perf", "calibrate", "--data", str(path)])
    assert done.exit_code == 2
    assert "no rows are left to fit" in done.stderr
