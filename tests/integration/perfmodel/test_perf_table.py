"""Tables and plots of sweeps: every value is there in every window, and a plot's marks stand where its figures say.

Owns: `perf_table`, and what `sim_sweep` and `perf pareto` show through it. Does not own: the figures in them.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import typer
from typer.testing import CliRunner

from perfmodel.adapters import sim_sweep
from perfmodel.adapters.perf_cli import register
from perfmodel.adapters.perf_table import counted, print_table

WIDTHS = ("40", "80", "200")
PARETO = ("perf", "pareto", "--model", "Llama-3.1-8B", "--gpu", "H100-SXM-80GB,H200-SXM-141GB")
PROMISED_S = 5.0


def entry(policy: str, replicas: int, seeds: int = 3, trace: str = "week.jsonl.gz") -> dict[str, object]:
    """A configuration as `sim_sweep.summary` gives it."""
    times = {"mean": 1234.5, "p50": 900.0, "p95": 45_678.0, "p99": 700_000.0}
    return {
        "trace": trace, "copies": 1, "policy": policy, "replicas": replicas, "seeds": seeds, "ttft_ms": times,
        "tpot_ms": {name: value / 1e3 for name, value in times.items()}, "prefix_hit_ratio": 0.4321,
        "output_tok_per_s": 12_345.6, "goodput_ratio": 0.9012, "sim_s": 600.0,
        "goodput_ratio_lowest": 0.8765, "goodput_ratio_highest": 0.9432,
    }  # fmt: skip


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_sweep_s_table_has_every_value(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    trace = "/data/traces/of the team [copy]/conversations_of_a_week_in_november_with_all_tiers.jsonl.gz"
    policies = ("inferplane_route", "a_policy_of_another_package_with_a_long_name")
    sim_sweep.show([entry(policy, count, trace=trace) for policy in policies for count in (1, 64)], 12.34)
    said = capsys.readouterr().out
    for value in (
        *policies, trace, "64", "90.1% (87.6% to 94.3%)", "1,234.5 ms / 45.7 s", "0.9 ms", "43.2%", "12,346",
        "policy", "replicas", "goodput", "TTFT mean / p95", "TPOT p50", "prefix hits", "output tok/s",
        "copies 1", "means over 3 seeds", "12.3 s of work",
    ):  # fmt: skip
        assert value in said, f"{value} at {columns} columns:\n{said}"
    assert "…" not in said
    assert ("━" in said) == (columns == "200"), "a box where it fits"


@pytest.mark.parametrize("columns", WIDTHS)
def test_every_engine_of_a_front_is_named_in_full(columns: str) -> None:
    app = typer.Typer()
    register(app)
    answer = CliRunner().invoke(app, [*PARETO, "--json"])
    shown = CliRunner().invoke(app, PARETO, env={"COLUMNS": columns})
    assert (answer.exit_code, shown.exit_code) == (0, 0), shown.output
    points = [point for front in orjson.loads(answer.stdout)["fronts"] for point in front["points"]]
    assert len(points) > 5
    for point in points:
        assert point["engine"] in shown.stdout
        assert f"{point['tok_per_s_per_user']:.1f}" in shown.stdout
        assert f"{point['usd_per_million_output_tokens']:.3f}" in shown.stdout
    assert "prompts on H100-SXM-80GB, answers on H200-SXM-141GB" in shown.stdout
    assert "…" not in shown.stdout


def test_plain_columns_stand_under_one_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    print_table("two [b]rows[/b]", ("name", "count"), (("größer", "1"), ("格", "1,000")), left=("name",))
    assert capsys.readouterr().out == "two [b]rows[/b]\nname    count\ngrößer      1\n格      1,000\n"


def test_a_box_just_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for columns, boxed in ((17, False), (18, True)):  # 4 and 7 letters, 3 lines, 4 blanks
        monkeypatch.setenv("COLUMNS", str(columns))
        print_table("", ("name", "count"), (("[a]", "1234567"),), left=("name",))
        said = capsys.readouterr().out
        assert ("━" in said) == boxed and "[a]" in said and "1234567" in said


def test_a_pipe_has_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table("", ("name",), (("n" * 150,),), left=("name",))
    assert "━" in capsys.readouterr().out


def test_one_is_not_many() -> None:
    assert [counted(count, "engine") for count in (0, 1, 2, 1000)] == [
        "0 engines", "1 engine", "2 engines", "1,000 engines",
    ]  # fmt: skip


def drawn(*entries: dict[str, object]) -> dict[str, Any]:
    return dict(orjson.loads(sim_sweep.figure(entries, PROMISED_S).to_json()))


def test_the_promise_stands_at_its_place_on_the_logarithmic_axis() -> None:
    layout = drawn(entry("round_robin", 1), entry("round_robin", 2))["layout"]
    (line,) = layout["shapes"]
    assert (line["yref"], line["y0"], line["y1"]) == ("y2", PROMISED_S, PROMISED_S)
    assert (layout["yaxis2"]["type"], line["label"]["text"]) == ("log", "promised")
    # An annotation's place on a logarithmic axis is an exponent: those that are left are the titles of the panels.
    assert {note["yref"] for note in layout["annotations"]} == {"paper"}


@pytest.mark.parametrize(("counts", "step"), [((1, 2), 1), ((4, 24), 1), ((1, 512), None)])
def test_engines_are_whole_numbers(counts: tuple[int, int], step: int | None) -> None:
    layout = drawn(*(entry("round_robin", count) for count in counts))["layout"]
    for axis in (layout["xaxis"], layout["xaxis2"]):
        assert (axis["title"]["text"], axis["tickformat"], axis.get("dtick")) == ("engines", ",d", step)


def test_names_side_by_side_have_an_axis_of_names() -> None:
    layout = drawn(entry("round_robin", 2), entry("least_requests", 2))["layout"]
    assert "dtick" not in layout["xaxis"] and "tickformat" not in layout["xaxis"]


def test_seeds_have_bars_and_one_seed_has_none() -> None:
    several = drawn(entry("round_robin", 1), entry("round_robin", 2))
    assert several["layout"]["title"]["text"] == "2 configurations, 3 seeds each"
    bars = several["data"][0]["error_y"]
    assert bars["array"] == pytest.approx([4.2, 4.2]) and bars["arrayminus"] == pytest.approx([2.47, 2.47])
    one = drawn(entry("round_robin", 1, seeds=1), entry("round_robin", 2, seeds=1))
    assert one["layout"]["title"]["text"] == "2 configurations, 1 seed each"
    assert all("error_y" not in line for line in one["data"])
    assert drawn(entry("round_robin", 1, seeds=4))["layout"]["title"]["text"] == "1 configuration, 4 seeds"


def test_goodput_that_is_not_known_has_no_bar() -> None:
    unknown = entry("round_robin", 1) | dict.fromkeys(
        ("goodput_ratio", "goodput_ratio_lowest", "goodput_ratio_highest"), None
    )
    line = drawn(unknown, entry("round_robin", 2))["data"][0]
    assert line["y"][0] is None and line["error_y"]["array"][0] == 0
