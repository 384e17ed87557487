"""`inferplane perf calibrate`: the report's form, the file it writes, and its sentences."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from perfmodel.adapters.catalog import load_catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.adapters.measured import configured
from perfmodel.adapters.perf_cli import register
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
