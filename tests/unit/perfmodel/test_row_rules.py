"""Rows of benchmark tables as configurations: what each rule assumes, and what it may not."""

from __future__ import annotations

import pytest

from perfmodel.adapters.catalog import Catalog, load_catalog
from perfmodel.adapters.measured import configured
from perfmodel.calibration.row_rules import parse_layout
from perfmodel.configuration import Configuration
from perfmodel.errors import ConfigError
from perfmodel.groups import engine_era, model_family
from perfmodel.hardware import NumberFormat
from perfmodel.serving import LengthLaw

ROW = {
    "gpu": "H100-SXM-80GB", "model": "Llama-3.3-70B", "engine": "vllm", "date": "2025-10-29", "weight_dtype": "fp8",
    "n_gpus": "4", "tp": "4", "isl": "1000", "osl": "500", "concurrency_or_batch": "8", "scenario": "closed_loop",
    "lengths": "fixed",
}  # fmt: skip


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def made(catalog: Catalog, **changes: str) -> Configuration:
    return configured({**ROW, **changes}, catalog)


def test_a_complete_row_assumes_only_what_no_table_says(catalog: Catalog) -> None:
    asked = made(catalog)
    assert asked.assumed == ("kv_dtype",)
    assert (asked.decode.shape.tensor_parallel_count, asked.decode.replicas, asked.concurrency) == (4, 1, 8)
    assert asked.group.era.name == "vllm 2025b"
    assert (asked.lengths.input_tokens, asked.lengths.law) == (1000, LengthLaw.FIXED)
    assert made(catalog, kv_dtype="fp8").assumed == ()


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"tp": ""}, {"tp"}),
        ({"isl": ""}, {"isl"}),
        ({"osl": "", "isl": ""}, {"isl", "osl"}),
        ({"weight_dtype": ""}, {"weight_dtype"}),
        ({"concurrency_or_batch": ""}, {"concurrency"}),
        ({"n_gpus": ""}, {"n_gpus"}),
        ({"scenario": "agentic"}, {"prefix_hit"}),
        ({"gpu": "GH200-96GB"}, {"compute"}),
        ({"model": "Qwen2-7B", "tp": "8"}, {"tp_divides"}),
        ({"disagg(prefill_gpus/decode_gpus or blank)": "2/4"}, {"layout"}),
        ({"scenario": "closed-loop"}, {"scenario"}),
        ({"scenario": ""}, {"scenario"}),
        ({"scenario": "other"}, set()),
        ({"model": "Llama-3.1-405B"}, {"memory"}),
        ({"model": "Llama-3.1-405B", "n_gpus": "8", "tp": "8"}, set()),
        ({"isl": "131073", "osl": "1"}, {"max_context"}),
        ({"isl": "131000", "osl": "72"}, set()),
        (
            {"model": "DeepSeek-R1", "gpu": "H200-SXM-141GB", "scenario": "mlperf_offline", "n_gpus": "8", "tp": ""},
            {"tp", "dp", "ep"},
        ),
    ],
)
def test_each_gap_names_its_rule(catalog: Catalog, changes: dict[str, str], rules: set[str]) -> None:
    assert set(made(catalog, **changes).assumed) == {"kv_dtype"} | rules


def test_imputed_values_are_said(catalog: Catalog) -> None:
    blank = dict.fromkeys(("tp", "n_gpus", "isl", "osl", "weight_dtype", "concurrency_or_batch"), "")
    said = dict(made(catalog, **blank, scenario="agentic").imputed)
    assert said == {
        "weight_dtype": "bf16", "kv_dtype": "bf16", "isl": "1024", "osl": "256", "prefix_hit": "0.9", "tp": "4",
        "n_gpus": "4",
    }  # fmt: skip
    assert dict(made(catalog, model="Qwen2-7B", tp="8").imputed)["tp_divides"] == "7"
    assert dict(made(catalog, gpu="GH200-96GB").imputed)["compute"] == catalog.device("GH200-96GB").same_die_as
    sides = {"disagg(prefill_gpus/decode_gpus or blank)": "2/16"}
    assert dict(made(catalog, **sides).imputed)["layout"] == "tp2dp1/tp8dp2"
    assert dict(made(catalog, scenario="x").imputed)["scenario"] == "other"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf"])
@pytest.mark.parametrize("column", ["isl", "osl", "concurrency_or_batch", "tp", "n_gpus"])
def test_a_count_that_cannot_be_is_refused_by_its_column(catalog: Catalog, column: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{column} is '{value}'; expected a finite number "):
        made(catalog, **{column: value})


def test_imputed_figures_follow_the_documented_rules(catalog: Catalog) -> None:
    # 70.6 GB of FP8 weights in at most 60 % of 80 GiB: two devices.
    assert made(catalog, tp="").decode.shape.tensor_parallel_count == 2
    assert made(catalog, tp="").decode.replicas == 2
    mlperf = made(catalog, model="Llama-2-70B", scenario="mlperf_server", isl="", osl="", weight_dtype="", lengths="")
    assert (mlperf.lengths.input_tokens, mlperf.lengths.output_tokens) == (294, 291)
    assert mlperf.decode.shape.weight_format is NumberFormat.FP8
    assert made(catalog, model="gpt-oss-120b", weight_dtype="fp8").decode.shape.weight_format is NumberFormat.FP4
    assert made(catalog, engine="trtllm").decode.shape.kv_format is NumberFormat.FP8
    assert made(catalog).decode.shape.kv_format is NumberFormat.BF16
    assert made(catalog, gpu="B200-SXM-180GB").decode.shape.kv_format is NumberFormat.FP8
    assert made(catalog, lengths="uniform_0.8_1.0").lengths.input_tokens == pytest.approx(900)


FIXED_CLIENTS = {
    "model": "gpt-oss-120b", "weight_dtype": "fp4", "kv_dtype": "bf16", "date": "2025-12-05",
    "concurrency_or_batch": "512", "lengths": "uniform_0.8_1.0",
}  # fmt: skip


def test_a_harness_of_fixed_clients_leaves_the_engines_sequences_to_assume(catalog: Catalog) -> None:
    asked = made(catalog, **FIXED_CLIENTS)
    assert (asked.concurrency, asked.slot_count, asked.imputed) == (512, 16, (("slots", "16"),))


@pytest.mark.parametrize(
    "changes",
    [
        {"concurrency_or_batch": "256"},
        {"date": "2026-03-27"},
        {"engine": "trtllm"},
        {"gpu": "H200-SXM-141GB"},
        {"model": "Qwen3-32B", "weight_dtype": "fp8"},
        {"lengths": "fixed"},
        {"scenario": "open_loop"},
    ],
)
def test_other_loads_of_512_are_what_they_say(catalog: Catalog, changes: dict[str, str]) -> None:
    asked = made(catalog, **{**FIXED_CLIENTS, **changes})
    assert asked.slot_count is None and "slots" not in asked.assumed


def test_layouts_make_two_pools(catalog: Catalog) -> None:
    asked = made(
        catalog,
        model="DeepSeek-R1",
        gpu="H200-SXM-141GB",
        prefill_layout="3x(tp8,dp1,moe_tp1,ep8,bs1)",
        decode_layout="1x(tp1,dp16,moe_tp1,ep16,bs64)",
        **{"disagg(prefill_gpus/decode_gpus or blank)": "24/16"},
    )
    assert asked.prefill is not None
    assert (asked.prefill.replicas, asked.prefill.device_count, asked.decode.device_count) == (3, 24, 16)
    assert asked.decode.shape.expert_parallel_count == 16
    assert parse_layout("nothing") == ()


def test_clients_of_a_layout_are_its_decode_slots(catalog: Catalog) -> None:
    split = {
        "disagg(prefill_gpus/decode_gpus or blank)": "8/32", "prefill_layout": "1x(tp8,dp1,moe_tp1,ep1,bs1)",
        "decode_layout": "2x(tp1,dp16,moe_tp1,ep1,bs4)", "n_gpus": "40",
    }  # fmt: skip
    said = made(catalog, **split)
    assert (said.concurrency, "concurrency" in said.assumed) == (8, False)
    blank = made(catalog, **split, concurrency_or_batch="")
    assert blank.concurrency == 2 * 16 * 4
    assert dict(blank.imputed)["concurrency"] == "128"
    offered = made(catalog, **split, concurrency_or_batch="", request_rate="2", scenario="open_loop")
    assert offered.concurrency is None
    bare = {**split, "decode_layout": "2x(tp1,dp16)"}
    assert made(catalog, **bare, concurrency_or_batch="").concurrency is None


def test_a_group_across_nodes_uses_the_slower_link(catalog: Catalog) -> None:
    wide = made(catalog, model="DeepSeek-R1", tp="16", n_gpus="16").decode
    assert wide.spans_nodes
    assert wide.shape.hardware.scaleup_bytes_per_s == catalog.device("H100-SXM-80GB").scaleout_bytes_per_s


def test_devices_without_facts_are_refused(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="memory bandwidth is not known"):
        made(catalog, gpu="H800-SXM-80GB")
    with pytest.raises(ConfigError, match="model is 'Llama-9'"):
        made(catalog, model="Llama-9")


@pytest.mark.parametrize(
    ("model", "family"),
    [("Llama-3.1-8B", "Llama-3"), ("DeepSeek-R1", "DeepSeek-V3"), ("Mixtral-8x7B", "Mixtral"), ("BLOOM-176B", "BLOOM"),
     ("Qwen3.5-397B-A17B", "Qwen3.5"), ("Qwen3-235B-A22B", "Qwen3"), ("MiniMax-M2.5", "MiniMax-M2")],
)  # fmt: skip
def test_families_join_sizes(model: str, family: str) -> None:
    assert model_family(model) == family


def test_eras_are_half_years_by_date_then_by_version() -> None:
    assert engine_era("vllm", "0.6.3", "2026-03-27").name == "vllm 2026a"
    assert engine_era("trtllm", "1.0.0rc3").name == "trtllm 2025b"
    assert engine_era("", "", "2024").name == "unnamed 2024a"
