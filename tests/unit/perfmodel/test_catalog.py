"""The shipped catalogue: every device and model is there, sized as published, and a fault in a file is one sentence."""

from __future__ import annotations

import csv
import io
from dataclasses import fields
from pathlib import Path

import pytest

from perfmodel.adapters.catalog import Catalog, load_catalog
from perfmodel.errors import ConfigError
from perfmodel.hardware import DeviceKind, Hardware, NumberFormat
from perfmodel.price import PriceKind

GOOD_FILES = Path(__file__).parents[3] / "perfmodel" / "data"

# Totals and active parameters in billions, KV elements per token of layers that grow, of windows, and bytes of linear
# state, each worked out apart from this project from the shapes of the models' configurations.
PUBLISHED = """\
model,total,active,growing,windows,state
Llama-3.1-8B,8.03,7.50,65536,,
Llama-3.1-70B,70.55,69.50,163840,,
Llama-3.3-70B,70.55,69.50,163840,,
Llama-3.1-405B,405.85,403.75,258048,,
Llama-2-70B,68.98,68.71,163840,,
Llama-2-7B,6.74,6.61,262144,,
Mistral-7B,7.24,7.11,65536,,
Mistral-Large-123B,122.61,122.21,180224,,
Qwen3-8B,8.19,7.57,73728,,
Qwen3-32B,32.76,31.98,131072,,
Qwen2.5-7B,7.62,7.07,28672,,
Qwen2.5-32B,32.76,31.98,131072,,
Qwen2.5-72B,72.70,71.46,163840,,
Gemma-2-9B,9.24,9.24,86016,86016,
Gemma-2-27B,27.23,27.23,94208,94208,
Gemma-3-27B,27.01,27.01,40960,212992,
Gemma-4-26B-A4B,25.23,3.82,10240,102400,
Gemma-4-31B,30.70,30.70,40960,409600,
gpt-oss-20b,20.91,3.61,12288,12288,
gpt-oss-120b,116.79,5.13,18432,18432,
Llama-4-Scout,107.77,16.14,24576,73728,
Llama-4-Maverick,400.71,16.15,24576,73728,
MiMo-V2-Flash,308.78,14.82,11520,99840,
Step-3.7-Flash,195.83,10.34,24576,67584,
Mixtral-8x7B,46.70,12.75,65536,,
Mixtral-8x22B,140.62,38.95,114688,,
Qwen3-30B-A3B,30.53,3.04,49152,,
Qwen3-235B-A22B,235.09,21.57,96256,,
Qwen3-Coder-480B-A35B,480.15,34.54,126976,,
MiniMax-M2.5,228.69,10.42,126976,,
MiniMax-M3,425.44,24.00,61440,,
GLM-4.5,352.80,32.85,188416,,
GLM-4.6,352.80,32.85,188416,,
GLM-4.5-Air,106.85,12.80,94208,,
DeepSeek-V2,235.74,20.85,34560,,
DeepSeek-V3,671.03,36.62,35136,,
DeepSeek-R1,671.03,36.62,35136,,
DeepSeek-V3.1,671.03,36.62,35136,,
DeepSeek-V3.2,671.88,37.48,35136,,
DeepSeek-V4-Pro,,,3964,31232,
DeepSeek-V4-Flash,,,2768,22016,
Kimi-K2,1026.41,31.69,35136,,
Kimi-K2.5,1026.41,31.69,35136,,
Kimi-K3,,,13824,,217055232
GLM-5,743.91,40.83,44928,,
GLM-5.1,743.91,40.83,44928,,
GLM-5.2,743.38,40.30,44928,,
Qwen3-Next-80B-A3B,79.67,3.56,12288,,77266944
Qwen3.5-27B,26.90,25.62,32768,,153944064
Qwen3.5-122B-A10B,122.11,9.01,12288,,153649152
Qwen3.5-397B-A17B,396.35,16.33,15360,,192061440
Nemotron-H-56B,56.32,55.25,20480,,459620352
Nemotron-3-Nano-30B-A3B,31.58,3.23,3072,,49082368
Nemotron-3-Super-120B-A12B,120.67,12.23,4096,,170229760
Nemotron-3-Ultra-550B-A55B,549.31,54.98,6144,,407961600
Nemotron-Super-49B,49.87,49.87,100352,,
Llama-3-8B,8.03,7.50,65536,,
Llama-3-70B,70.55,69.50,163840,,
Qwen2-7B,7.62,7.07,28672,,
Qwen2-72B,72.70,71.46,163840,,
Falcon-180B,178.55,178.55,81920,,
GPT-J-6B,6.05,5.84,229376,,
BLOOM-176B,176.23,176.23,2007040,,
"""

# Devices by what is known of them: everything, no compute figure, not even memory and bandwidth.
COMPUTE = (
    "A100-SXM-40GB A100-SXM-80GB A100-PCIe-80GB A30-24GB L4-24GB L40S-48GB H100-SXM-80GB H100-PCIe-80GB H20-96GB "
    "H200-SXM-141GB B200-SXM-180GB B300-SXM-270GB GB200-NVL72 GB300-NVL72 RTX-PRO-6000-SE Rubin-NVL72 MI300X MI325X "
    "MI350X MI355X Gaudi2 Gaudi3 Arc-Pro-B60 TPU-v5e TPU-v5p TPU-v6e TPU-v7x Groq-LPU-v1 Groq-3-LPU-LP30 "
    "Groq-3-LPX-rack SN40L"
).split()
NO_COMPUTE = "H100-NVL-94GB H200-NVL-141GB GH200-96GB GH200-144GB HyperAccel-Bertha-500 Cerebras-WSE-3".split()
NOT_SIZED = "H800-SXM-80GB GH200 RTX-PRO-4500 Jetson-Thor Arc-Pro-B70 Arc-Pro-B50".split()


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def rows() -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(PUBLISHED)))


def test_all_models_and_devices_are_there_by_name(catalog: Catalog) -> None:
    assert sorted(catalog.models) == sorted(row["model"] for row in rows())
    assert sorted(catalog.devices) == sorted(COMPUTE + NO_COMPUTE)
    assert sorted(catalog.unsized_devices) == sorted(NOT_SIZED)
    assert len(catalog.models) == 63
    assert len(catalog.devices) + len(catalog.unsized_devices) == 43


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["model"])
def test_the_shapes_give_the_published_sizes(catalog: Catalog, row: dict[str, str]) -> None:
    model = catalog.models[row["model"]]
    if row["total"]:
        assert model.parameter_count / 1e9 == pytest.approx(float(row["total"]), rel=0.002)
        assert model.active_parameter_count / 1e9 == pytest.approx(float(row["active"]), rel=0.03)
    growing = sum(group.count * group.kv_elements // group.entry_tokens for group in model.attention if group.grows)
    windows = sum(group.count * group.kv_elements for group in model.attention if group.window_tokens)
    assert growing == int(row["growing"])
    assert windows == int(row["windows"] or 0)
    assert model.linear_state_bytes == int(row["state"] or 0)


def test_models_whose_total_no_source_gives_are_sized_from_their_parts(catalog: Catalog) -> None:
    # Routed and shared experts alone: 1,551 and 278 billion (DeepSeek-V4), 2.72e12 routed (Kimi-K3).
    pro, flash, k3 = (catalog.model(name) for name in ("DeepSeek-V4-Pro", "DeepSeek-V4-Flash", "Kimi-K3"))
    for model, experts_b in ((pro, 1551), (flash, 278)):
        shared = model.moe_layer_count * model.expert_parameter_count
        assert (model.routed_parameter_count + shared) / 1e9 == pytest.approx(experts_b, rel=0.002)
        assert 1 < model.parameter_count / (model.routed_parameter_count + shared) < 1.03
    assert k3.routed_parameter_count == pytest.approx(2.72e12, rel=0.002)


def test_names_are_found_by_alias_in_any_case(catalog: Catalog) -> None:
    assert catalog.device("h200") is catalog.devices["H200-SXM-141GB"]
    assert catalog.device("BERTHA") is catalog.devices["HyperAccel-Bertha-500"]
    assert catalog.model("qwen/qwen3-32b") is catalog.models["Qwen3-32B"]
    assert catalog.model("meta-llama/Llama-3.3-70B-Instruct").name == "Llama-3.3-70B"


@pytest.mark.parametrize(
    ("kind", "name", "offered"),
    [
        ("device", "h300", "H200-SXM-141GB"),
        ("device", "B200-SMX", "B200-SXM-180GB"),
        ("model", "Lama-3.1-70B", "Llama-3.1-70B"),
        ("model", "deepseek-r2", "DeepSeek-R1"),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest_ones(catalog: Catalog, kind: str, name: str, offered: str) -> None:
    with pytest.raises(ConfigError, match=f"^{kind} is '{name}'; the closest of the .* known names: .*{offered}"):
        catalog.device(name) if kind == "device" else catalog.model(name)


def test_a_name_like_no_other_is_answered_with_some(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match=r"device is '☃'; the closest of the 43 known names: (\S+, ){4}\S+$"):
        catalog.device("☃")


def test_a_device_without_compute_figures_cannot_prefill(catalog: Catalog) -> None:
    for name in NO_COMPUTE:
        device = catalog.device(name)
        assert not device.can_prefill
        assert [device.flop_per_s(weights) for weights in NumberFormat] == [None] * 5
    assert all(catalog.device(name).can_prefill for name in COMPUTE)
    assert catalog.device("GH200-96GB").same_die_as == "H100-SXM-80GB"


def test_a_device_that_is_not_sized_is_refused_where_it_is_needed(catalog: Catalog) -> None:
    with pytest.raises(
        ConfigError, match="device H800-SXM-80GB: its memory bandwidth is not known; nothing is guessed"
    ):
        catalog.device("h800")
    with pytest.raises(ConfigError, match="its memory size and memory bandwidth are not known"):
        catalog.device("Jetson-Thor")
    assert catalog.device_memory_bytes("h800") == (80_000_000_000, 80_000_000_000)
    assert catalog.device_memory_bytes("Jetson-Thor") == (None, None)


def test_devices_have_the_figures_of_their_sources(catalog: Catalog) -> None:
    h100 = catalog.device("h100")
    assert h100 == Hardware(
        "H100-SXM-80GB", "nvidia", DeviceKind.GPU, "hopper", 80 * 2**30, 80_000_000_000, 3.35e12, 989e12, 1978e12, None,
        450e9, 8, 50e9, 64e9, 700, 1730,
    )  # fmt: skip
    bertha = catalog.device("bertha")
    assert (bertha.kind, bertha.memory_bytes, bertha.memory_bytes_per_s) == (DeviceKind.LPU, 192_000_000_000, 546e9)
    assert (bertha.memory_reach_ratio, bertha.sram, bertha.all_in_w) == (0.9, False, None)
    lp30 = catalog.device("lp30")
    assert (lp30.memory_bytes, lp30.memory_bytes_per_s, lp30.sram) == (500_000_000, 150e12, True)
    assert (lp30.flop_per_s(NumberFormat.FP8), lp30.flop_per_s(NumberFormat.BF16)) == (1230e12, None)
    gb200 = catalog.device("gb200")
    assert gb200.memory_bytes == round(185.0 * 2**30)
    assert gb200.scaleup_device_count == 72
    assert catalog.device("a100").flop_per_s(NumberFormat.FP8) == 312e12
    assert catalog.device("b200").flop_per_s(NumberFormat.FP4) == 9000e12


def test_prices_are_known_or_name_what_is_missing(catalog: Catalog) -> None:
    assert catalog.price("h100").usd_per_h == 2.99
    assert catalog.price("b200").kind is PriceKind.RESERVED
    assert catalog.price("h100", PriceKind.SPOT).missing == ("spot_usd_per_h",)
    assert catalog.price("L4-24GB").usd_per_h is None
    assert catalog.price("bertha", PriceKind.OWNED).missing == ("years", "power_w", "pue", "usd_per_kwh")


def test_every_figure_of_a_device_is_finite_or_unknown(catalog: Catalog) -> None:
    for device in catalog.devices.values():
        for field in fields(device):
            value = getattr(device, field.name)
            assert not isinstance(value, float) or 0 < value < 1e18, (device.name, field.name)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("hardware_nvidia.yaml", "memory_gb_per_s: 3350", "memory_gb_per_s: fast", "is 'fast'; expected a number"),
        ("hardware_nvidia.yaml", "source: aic-h100-sxm", "source: hearsay", "names source 'hearsay'"),
        ("hardware_nvidia.yaml", "source: aic-h100-sxm", "origin: aic", "H100-SXM-80GB names source None"),
        ("hardware_nvidia.yaml", "{value: 1730, source: ix}", "{value: 1730}", "all_in_w names source None"),
        ("hardware_nvidia.yaml", "{value: 1730, source: ix}", "{source: ix}", "expected {value: ..., source: ...}"),
        ("hardware_nvidia.yaml", "memory_gb_per_s: 3350", "memory_gb_per_s: 0", "memory_bytes_per_s is 0.0"),
        ("hardware_nvidia.yaml", "aliases: [h200, h200-sxm]", "aliases: [h100]", "'h100' is given to both"),
        ("hardware_nvidia.yaml", "devices:", "device:", "section 'devices' is missing"),
        ("models_llama.yaml", "kind: full", "kind: fuller", "expected one of full, window, chunked, latent"),
        ("models_llama.yaml", "layer_count: 32", "layers: 32", "Llama-3.1-8B.layer_count is None"),
        ("models_llama.yaml", "count: 32, head_count: 32", "count: 16, head_count: 32", "the shapes give"),
        ("models_llama.yaml", "kv_head_count: 8", "kv_head_count: 7", "no multiple of kv_head_count 7"),
        ("models_google_openai.yaml", "window_tokens: 4096", "window: 4096", "window_tokens is None"),
        ("models_llama.yaml", "hidden_size: 4096", "hidden_size: 4096.5", "expected a whole number"),
        ("models_qwen.yaml", "gated: true", "gated: 1", "expected true or false"),
        ("prices.yaml", "  H100-SXM-80GB:", "  H101:", "H101 is no device of the catalogue"),
        ("prices.yaml", "sources:", "sources: [", "is no YAML"),
    ],
)
def test_a_fault_in_a_data_file_is_named(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    for path in GOOD_FILES.iterdir():
        content = path.read_text()
        assert path.name != file or old in content
        (tmp_path / path.name).write_text(content.replace(old, new, 1) if path.name == file else content)
    with pytest.raises(ConfigError) as caught:
        load_catalog(tmp_path)
    assert message in str(caught.value)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hardware\*.yaml: no such data file"):
        load_catalog(tmp_path)
