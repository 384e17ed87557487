"""`inferplane perf size` and `perf pareto` as a user calls them: answers, exit codes, a sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from perfmodel.adapters.catalog import load_catalog
from perfmodel.adapters.perf_cli import register
from perfmodel.adapters.spec_file import read_spec

EXAMPLES = Path(__file__).parents[3] / "examples" / "size"

SMALL = {
    "model": "Llama-3.1-8B",
    "load": {"rate_p50_per_s": 40, "rate_p90_per_s": 80, "input_tokens": 1000, "output_tokens": 150},
    "slo": {"ttft_ms": 1000, "tpot_ms": 30, "percentile": 90},
    "accelerators": {
        "H100-SXM-80GB": {"price": "reserved", "inventory": 8},
        "A100-SXM-80GB": {"usd_per_h": 0.9, "inventory": 8},
    },
    "choices": {"weight_formats": ["fp8"], "tensor_parallel": [1, 2], "chunk_tokens": [2048, 8192]},
}


def call(*words: str) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, ["perf", *words])


def spec(folder: Path, **changes: object) -> str:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}), encoding="utf-8")
    return str(path)


def size(path: str, *words: str) -> Result:
    return call("size", "--spec", path, "--no-check", *words)


def test_the_answer_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    done = size(spec(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert list(answer)[:6] == ["plan", "reason", "cost_usd_per_h", "predicted", "rejected", "sensitivity"]
    (pool, *_) = answer["plan"]["pools"]
    assert pool["accelerator"] in SMALL["accelerators"] and pool["replicas"] >= 1
    assert answer["cost_usd_per_h"] == pytest.approx(answer["plan"]["cost_usd_per_h"])
    predicted = answer["predicted"]
    assert predicted["ttft_ms"]["p90"] <= 1000 and predicted["tpot_ms"]["p90"] <= 30
    assert predicted["usd_per_million_tokens"]["output"] > predicted["usd_per_million_tokens"]["uncached_input"] > 0
    assert predicted["usd_per_million_tokens"]["cached_input"] is None
    for latency in (predicted["ttft_ms"], predicted["tpot_ms"]):
        assert latency["band_low"] < latency["p90"] < latency["band_high"]
    assert predicted["goodput_ratio_band_low"] <= predicted["goodput_ratio"] <= predicted["goodput_ratio_band_high"]
    assert isinstance(predicted["extrapolated"], bool) and "rows)" in predicted["nearest_calibrated"][0]
    assert {"alternative", "reason", "detail"} <= set(answer["rejected"][0])
    prices = answer["sensitivity"]["break_even_usd_per_h"]
    assert set(prices) == {"H100-SXM-80GB", "A100-SXM-80GB"}
    assert any(
        flip["field"] == "slo.ttft_ms" or flip["field"] == "slo.tpot_ms" for flip in answer["sensitivity"]["flips"]
    )


def test_costs_of_all_tokens_pay_the_plan(tmp_path: Path) -> None:
    load = {**SMALL["load"], "cached_ratio": 0.4}  # type: ignore[dict-item]  # the mapping of the dictionary above
    answer = json.loads(size(spec(tmp_path, load=load), "--json", "--no-flips").stdout)
    costs = answer["predicted"]["usd_per_million_tokens"]
    per_h = 40 * 3600 / 1e6
    paid = per_h * (600 * costs["uncached_input"] + 400 * costs["cached_input"] + 150 * costs["output"])
    assert paid == pytest.approx(answer["cost_usd_per_h"])
    assert costs["cached_input"] < costs["uncached_input"]


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    drawn = tmp_path / "plan.html"
    done = size(spec(tmp_path), "--plot", str(drawn))
    assert done.exit_code == 0, done.output
    assert "USD/h" in done.stdout and "Not chosen" in done.stdout
    assert "What would change the plan" in done.stdout and "costs_more" in done.stdout and "rows)" in done.stdout
    assert "H100-SXM-80GB TP" in done.stdout, "names are not cut"
    assert "TTFT p90" in done.stdout and " to " in done.stdout and "80 % band" in done.stdout
    assert "prices of different kinds" in done.stdout, "a reserved card beside a price of the spec is said"
    assert "of what the serving replicas can carry" in done.stdout and "% busy" not in done.stdout
    page = drawn.read_text(encoding="utf-8")
    assert "Candidates that keep the promise" in page and '"name":"plan all"' in page and "all_day" not in page


def test_an_impossible_spec_says_the_bound(tmp_path: Path) -> None:
    done = size(str(EXAMPLES / "impossible.yaml"), "--json")
    assert done.exit_code == 1
    assert "the physical bound of Llama-3.3-70B" in done.stderr and done.stderr.count("\n") == 1
    answer = json.loads(done.stdout)
    assert answer["plan"] is None and answer["reason"] and answer["rejected"]


def test_a_spec_that_cannot_be_kept_leaves_no_plot(tmp_path: Path) -> None:
    drawn = tmp_path / "plan.html"
    done = size(str(EXAMPLES / "impossible.yaml"), "--json", "--plot", str(drawn))
    assert done.exit_code == 1 and not drawn.exists()
    reason = json.loads(done.stdout)["reason"]
    assert done.stderr.splitlines()[-1] == f"perf: {reason}; no plan to plot, {drawn} is not written"
    drawn.write_text("the plan of yesterday", encoding="utf-8")
    size(str(EXAMPLES / "impossible.yaml"), "--plot", str(drawn))
    assert drawn.read_text(encoding="utf-8") == "the plan of yesterday"


def test_day_and_night_give_two_plans_and_the_moves_between_them() -> None:
    done = size(str(EXAMPLES / "day_night.yaml"), "--json", "--no-flips")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    plans = answer["plan"]["periods"]
    assert set(plans) == {"day", "night"}
    night = answer["predicted"]["periods"]["night"]["classes"]
    assert night["batch"]["shares_pools_with"] == ["chat"]
    assert night["batch"]["goodput_ratio_band_low"] > 0.99, "a class is held against its own limits"
    assert night["chat"]["goodput_ratio_band_low"] < 0.9
    assert 0 < night["chat"]["utilisation_ratio"] == night["batch"]["utilisation_ratio"] < 0.99
    mean = (14 * plans["day"]["cost_usd_per_h"] + 10 * plans["night"]["cost_usd_per_h"]) / 24
    assert answer["cost_usd_per_h"] == pytest.approx(mean)
    changes = {(each["from"], each["to"]): each for each in answer["plan"]["moves"]}
    assert set(changes) == {("day", "night"), ("night", "day")}
    started = [
        move for each in changes.values() for move in each["moves"] if move["replicas_after"] > move["replicas_before"]
    ]
    assert started and all(move["start_s"] > 60 for move in started), "weights are loaded before a replica is warm"


def test_a_decoder_with_its_feed_forward_half_in_sram() -> None:
    done = size(str(EXAMPLES / "afd.yaml"), "--json", "--no-flips")
    assert done.exit_code == 0, done.output
    pools = json.loads(done.stdout)["plan"]["pools"]
    assert [pool["role"] for pool in pools] == ["prefill", "attention"]
    assert all(pool["compute_known"] for pool in pools)
    assert pools[1]["ffn_accelerator"] == "Groq-3-LPX-rack" and pools[1]["ffn_devices_per_replica"] == 1


def test_a_card_without_a_compute_figure_decodes_and_says_so(tmp_path: Path) -> None:
    accelerators = {
        "H100-SXM-80GB": {"usd_per_h": 20, "inventory": 1},
        "HyperAccel-Bertha-500": {
            "owned": {"years": 4, "watts": 350, "pue": 1.2, "usd_per_kwh": 0.1},
            "inventory": 16,
            "network_gb_per_s": 12.5,
        },
    }
    load = {"rate_p50_per_s": 20, "rate_p90_per_s": 40, "input_tokens": 500, "output_tokens": 150}
    choices = {"topologies": ["disaggregated"], "weight_formats": ["fp8"], "tensor_parallel": [1]}
    slo = {"ttft_ms": 1500, "tpot_ms": 80}
    changes = {"accelerators": accelerators, "load": load, "slo": slo, "choices": choices}
    answer = json.loads(size(spec(tmp_path, **changes), "--json", "--no-flips").stdout)
    known = {pool["accelerator"]: (pool["role"], pool["compute_known"]) for pool in answer["plan"]["pools"]}
    assert known == {"H100-SXM-80GB": ("prefill", True), "HyperAccel-Bertha-500": ("decode", False)}
    refused = {each["reason"] for each in answer["rejected"]}
    assert "no_compute_figure" in refused


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_every_example_is_a_spec(name: str) -> None:
    asked = read_spec(EXAMPLES / name, load_catalog())
    assert asked.fleet.offers and asked.periods and all(period.classes for period in asked.periods)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "Llama-3.1-8"}, "Llama-3.1-8B"),
        ({"load": {**SMALL["load"], "rate_p90_per_s": 0}}, "load.rate_p90_per_s is 0"),  # type: ignore[dict-item]  # as above
        ({"load": {**SMALL["load"], "rate_p50_per_s": 0}}, "load.rate_p50_per_s is 0"),  # type: ignore[dict-item]  # as above
        ({"slo": {"ttft_ms": -1, "tpot_ms": 50}}, "slo.ttft_ms is -1"),
        ({"slo": {"ttft_ms": "fast", "tpot_ms": 50}}, "slo.ttft_ms is 'fast'; expected a number"),
        ({"slos": {}}, "slos is no field of a spec; did you mean 'slo'?"),
        (
            {"load": {"rate_p50_per_s": 1, "input_tokens": 9, "outptu_tokens": 9}},
            "load.outptu_tokens is no field of a spec; did you mean 'output_tokens'?",
        ),
        ({"slo": {"ttft": 9, "tpot_ms": 9}}, "slo.ttft is no field of a spec; did you mean 'ttft_ms'?"),
        (
            {"accelerators": {"A100-SXM-80GB": {"inventroy": 8}}},
            "accelerators.A100-SXM-80GB.inventroy is no field of a spec; did you mean 'inventory'?",
        ),
        ({"accelerators": {"H101": {"inventory": 1}}}, "H100"),
        ({"accelerators": {"A100-SXM-80GB": {"inventory": 8}}}, "accelerators.A100-SXM-80GB.usd_per_h is missing"),
        ({"accelerators": {"A100-SXM-80GB": {"usd_per_h": 1, "inventory": 1.5}}}, "inventory is 1.5; expected a whole"),
        ({"choices": {"topologies": ["mixed"]}}, "choices.topologies[0] is 'mixed'; expected one of aggregated"),
        ({"choices": {"kv_formats": ["fp7"]}}, "choices.kv_formats[0]: number format is 'fp7'"),
        ({"periods": {"day": {"hours": 14}}}, "periods have 14 hours together; expected 24"),
        ({"classes": [{"name": "a"}, {"name": "a"}]}, "classes names 'a' twice"),
    ],
)
def test_a_bad_spec_is_one_sentence(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    done = size(spec(tmp_path, **changes))
    assert done.exit_code == 2, done.output
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_more_classes_than_the_inventory_holds_side_by_side(tmp_path: Path) -> None:
    classes = [{"name": f"c{number}", "load": {"share_ratio": 0.2}} for number in range(5)]
    few = {"A100-SXM-80GB": {"usd_per_h": 1.0, "inventory": 2}}
    done = size(spec(tmp_path, classes=classes, accelerators=few), "--no-check", "--no-flips")
    assert done.exit_code == 1, done.output
    # The last line: on a machine without compiled code a first one says that it compiles.
    assert done.stderr.splitlines()[-1] == (
        "perf: each class can be served alone, but inventory and racks do not hold all of them together"
    )


def test_a_spec_that_is_no_yaml_or_not_there(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: [", encoding="utf-8")
    assert size(str(broken)).exit_code == 2
    gone = size(str(tmp_path / "gone.yaml"))
    assert gone.exit_code == 1 and "No such file" in gone.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: a\nslo: {}\nmodel: b\n", "has model twice, on lines 1 and 3; expected each key once"),
        ("load: {rate_p50_per_s: 1, rate_p50_per_s: 2}\n", "has rate_p50_per_s twice, on line 1"),
        ("1: a\n2: b\n0x1: c\n", "has 1 and 0x1, which are one key, on lines 1 and 3; expected each key once"),
        ("{1: a, 1.0: b}\n", "has 1 and 1.0, which are one key, on line 1"),
        ("true: a\nYes: b\n", "has true and Yes, which are one key, on lines 1 and 2"),
        ("~: a\nnull: b\n", "has ~ and null, which are one key, on lines 1 and 2"),
        ('model: a\n"model": b\n', "has model twice, on lines 1 and 2"),
        (".nan: a\n.nan: b\n", "has .nan twice, on lines 1 and 2"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text, encoding="utf-8")
    done = size(str(path))
    assert done.exit_code == 2 and words in done.stderr and done.stderr.count("\n") == 1


_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        ("2026-13-45", "has a value that cannot be read: month must be in 1..12"),
        ("9" * 5_001, "has a number of 5001 characters on line 4, 9999999999...; expected at most 100"),
        ("0x" + "f" * 5_000, "has a number of 5002 characters on line 4, 0xffffffff...; expected at most 100"),
        ("!!int '0x" + "f" * 5_000 + "'", "has a number of 5002 characters on line 4, 0xffffffff..."),
        ("1" + ":59" * 3_000, "has a number of 9001 characters on line 4, 1:59:59:59...; expected at most 100"),
        ("1" + ":59" * 3_000 + ".5", "has a number of 9003 characters on line 4"),
        ("0x" + "f" * 98, "load.rate_p50_per_s is 1008691358"),
        ("!!bool foo", "has a value that cannot be read"),
        ("!!int ''", "has a value that cannot be read"),
        ("!!timestamp foo", "has a value that cannot be read"),
        ("!!map [a]", "has a value that cannot be read"),
        ("9" * 100, "load.rate_p50_per_s is 999"),
        ("1.0e-300", "load.rate_p50_per_s is 1e-300; expected 0, or 1e-09 to 1e+15"),
        ("1.0e+308", "load.rate_p50_per_s is 1e+308; expected 0, or 1e-09 to 1e+15"),
        (f"{{{_LAUGHS.replace(chr(10), ', ')} j: *i}}", "load.rate_p50_per_s is "),
    ],
    ids=[
        "no such day",
        "thousands of digits",
        "thousands of hexadecimal digits",
        "the same with a tag",
        "thousands of digits of base 60",
        "the same with a fraction",
        "a hundred characters",
        "no bool",
        "no number",
        "no time",
        "no mapping",
        "beyond a float",
        "tiny",
        "huge",
        "a billion laughs",
    ],
)
def test_a_value_that_no_quantity_has_is_one_sentence(tmp_path: Path, rate: str, words: str) -> None:
    path = tmp_path / "hostile.yaml"
    text = (EXAMPLES / "fleet32.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("rate_p50_per_s: 16", f"rate_p50_per_s: {rate}"), encoding="utf-8")
    done = size(str(path))
    assert done.exit_code == 2, done.output
    assert words in done.stderr and done.stderr.count("\n") == 1 and len(done.stderr) < 500


@pytest.mark.parametrize("digits", ["9" * 5_000, "0x" + "f" * 5_000], ids=["decimal", "hexadecimal"])
@pytest.mark.parametrize(
    "place", ["? {}\n: 1\n", "accelerators: {{A100-SXM-80GB: {{inventory: {}}}}}\n", "choices: [{}]\n"]
)
def test_a_number_of_thousands_of_digits_is_one_sentence_anywhere(tmp_path: Path, place: str, digits: str) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(place.format(digits), encoding="utf-8")
    done = size(str(path))
    assert done.exit_code == 2 and "has a number of 500" in done.stderr and " characters on line 1, " in done.stderr
    assert done.stderr.count("\n") == 1 and len(done.stderr) < 300


def test_merged_keys_may_be_given_again(tmp_path: Path) -> None:
    load = "{rate_p50_per_s: 40, input_tokens: 1000, output_tokens: 150}"
    path = tmp_path / "merged.yaml"
    path.write_text(
        f"model: Llama-3.1-8B\nslo: {{ttft_ms: 1000, tpot_ms: 30}}\nload: {{<<: {load}, input_tokens: 500}}\n"
        "accelerators: {A100-SXM-80GB: {usd_per_h: 1, inventory: 8}}\n",
        encoding="utf-8",
    )
    assert read_spec(path, load_catalog()).periods[0].classes[0].demand.input_tokens == 500


def test_a_spec_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    done = size(str(path))
    assert done.exit_code == 2 and "is not UTF-8 text" in done.stderr


def test_a_plot_without_a_folder_is_refused_before_the_search(tmp_path: Path) -> None:
    done = size(str(tmp_path / "no spec is read.yaml"), "--plot", str(tmp_path / "gone" / "plan.html"))
    assert done.exit_code == 2 and "expected a folder that exists" in done.stderr


def test_classes_with_shares_of_one_load(tmp_path: Path) -> None:
    classes = [
        {"name": "paid", "load": {"share_ratio": 0.75}},
        {"name": "free", "load": {"share_ratio": 0.25}, "slo": {"ttft_ms": 5000, "tpot_ms": 100}},
    ]
    answer = json.loads(size(spec(tmp_path, classes=classes), "--json", "--no-flips").stdout)
    assert set(answer["predicted"]["classes"]) == {"paid", "free"}
    assert answer["predicted"]["classes"]["free"]["ttft_ms"]["limit"] == 5000


def test_pareto_by_accelerator_and_for_mixed_fleets(tmp_path: Path) -> None:
    drawn = tmp_path / "front.html"
    done = call(
        "pareto", "--model", "Llama-3.1-8B", "--gpu", "h100,L40S-48GB", "--isl", "512", "--osl", "256", "--json",
        "--plot", str(drawn),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    fronts = {tuple(each["accelerators"]): each["points"] for each in answer["fronts"]}
    assert ("H100-SXM-80GB",) in fronts and ("L40S-48GB",) in fronts
    assert any(len(names) == 2 for names in fronts)
    for points in fronts.values():
        users = [point["tok_per_s_per_user"] for point in points]
        devices = [point["tok_per_s_per_device"] for point in points]
        assert users == sorted(users, reverse=True) and devices == sorted(devices)
    assert all(point["usd_per_million_output_tokens"] is None for point in fronts[("L40S-48GB",)]), "no price is known"
    assert all(point["usd_per_million_output_tokens"] > 0 for point in fronts[("H100-SXM-80GB",)])
    assert "for one user" in drawn.read_text(encoding="utf-8")


def test_pareto_of_a_spec_and_what_it_refuses(tmp_path: Path) -> None:
    path = spec(tmp_path)
    done = call("pareto", "--spec", path, "--no-mixed")
    assert done.exit_code == 0 and "tok/s/user" in done.stdout
    assert call("pareto", "--spec", path, "--gpu", "h100").exit_code == 2
    assert call("pareto", "--gpu", "h100").exit_code == 2
    assert call("pareto", "--model", "Llama-3.1-405B", "--gpu", "L4-24GB").exit_code == 2


def test_pareto_prices_all_devices_by_one_kind_and_says_it() -> None:
    words = ("pareto", "--model", "Llama-3.1-8B", "--gpu", "H100-SXM-80GB,H200-SXM-141GB,L40S-48GB")
    answer = json.loads(call(*words, "--json").stdout)
    assert answer["prices"] == {
        "H100-SXM-80GB": {"kind": "reserved", "usd_per_h": 1.3},
        "H200-SXM-141GB": {"kind": "reserved", "usd_per_h": 1.6},
        "L40S-48GB": {"kind": None, "usd_per_h": None},
    }
    told = " ".join(call(*words).stdout.split())
    assert "reserved price, USD/h of a device: H200-SXM-141GB 1.60" in told
    assert "No price is known of L40S-48GB" in told and "no queue in front of the prefill replicas" in told


@pytest.mark.parametrize(
    ("entries", "kinds"),
    [
        ({"H100-SXM-80GB": {}, "H200-SXM-141GB": {}}, ["reserved", "reserved"]),
        ({"H100-SXM-80GB": {}}, ["on_demand"]),
        ({"H100-SXM-80GB": {}, "H200-SXM-141GB": {"price": "reserved"}}, ["reserved", "reserved"]),
        ({"H100-SXM-80GB": {}, "H200-SXM-141GB": {"usd_per_h": 2}}, ["on_demand", "spec"]),
    ],
)
def test_a_spec_without_kinds_takes_one_for_all(tmp_path: Path, entries: dict[str, object], kinds: list[str]) -> None:
    accelerators = {name: {"inventory": 8, **own} for name, own in entries.items()}  # type: ignore[dict-item]  # mappings
    asked = read_spec(Path(spec(tmp_path, accelerators=accelerators)), load_catalog())
    assert [each.kind for each in asked.prices] == kinds
    assert [each.usd_per_h for each in asked.prices] == [offer.usd_per_h for offer in asked.fleet.offers]


def test_devices_without_a_common_kind_are_refused(tmp_path: Path) -> None:
    accelerators = {"H100-SXM-80GB": {"price": "on_demand", "inventory": 8}, "H200-SXM-141GB": {"inventory": 8}}
    done = size(spec(tmp_path, accelerators=accelerators))
    assert done.exit_code == 2 and "no on_demand price of H200-SXM-141GB" in done.stderr
