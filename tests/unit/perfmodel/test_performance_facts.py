"""Devices, models, memory and step times: figures that can be checked by hand, and the data files' own rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.adapters.catalog import Catalog, load_catalog
from perfmodel.errors import ConfigError
from perfmodel.hardware import NumberFormat
from perfmodel.memory import EngineShape, kv_bytes_per_token, kv_capacity_tokens, weight_bytes
from perfmodel.step_time import (
    Bound,
    Efficiency,
    RooflineTiming,
    decode_batch,
    engine_speed,
    prefill_batch,
)

# Peaks reached and nothing added: what is left is arithmetic.
IDEAL = Efficiency(1, 1, 1, 1, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def test_the_catalogue_has_the_three_devices_and_models_by_name_and_alias(catalog: Catalog) -> None:
    assert sorted(catalog.devices) == ["A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB"]
    assert sorted(catalog.models) == ["Llama-3.1-70B", "Llama-3.1-8B", "Qwen3-32B"]
    assert catalog.device("h200") is catalog.devices["H200-SXM-141GB"]
    assert catalog.model("qwen/qwen3-32b") is catalog.models["Qwen3-32B"]
    with pytest.raises(ConfigError, match=r"device is 'h300'; expected one of A100.*, H100.*, H200"):
        catalog.device("h300")
    with pytest.raises(ConfigError, match="weight_format is 'int3'"):
        catalog.shape("h100", "Qwen3-32B", 1, "int3")


@pytest.mark.parametrize(
    ("model", "kib_per_token", "weights_gb"),
    [("Llama-3.1-8B", 128, 16.06), ("Llama-3.1-70B", 320, 141.1), ("Qwen3-32B", 256, 65.5)],
)
def test_kv_and_weight_bytes_are_the_published_ones(
    catalog: Catalog, model: str, kib_per_token: int, weights_gb: float
) -> None:
    shape = catalog.shape("h100", model)
    assert kv_bytes_per_token(shape) == kib_per_token * 1024
    assert weight_bytes(shape) / 1e9 == pytest.approx(weights_gb, rel=0.005)
    assert kv_bytes_per_token(replace(shape, kv_format=NumberFormat.FP8)) == kib_per_token * 512


def test_a_70b_context_of_128k_takes_40_gib(catalog: Catalog) -> None:
    assert kv_bytes_per_token(catalog.shape("h100", "Llama-3.1-70B", 4)) * 131_072 == 40 * 2**30


def test_what_does_not_fit_is_refused_with_the_reason(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match=r"Llama-3\.1-70B in bf16 does not fit on 1 x H100-SXM-80GB: 141\.1 GB"):
        kv_capacity_tokens(catalog.shape("h100", "Llama-3.1-70B"))
    with pytest.raises(ConfigError, match="tensor_parallel_count is 3; expected a divisor of the 64"):
        catalog.shape("h100", "Llama-3.1-70B", 3)
    with pytest.raises(ConfigError, match="links at most 8 devices"):
        catalog.shape("h100", "Llama-3.1-70B", 16)


def test_capacity_grows_with_memory_and_shrinks_with_the_batch(catalog: Catalog) -> None:
    small, large = (kv_capacity_tokens(catalog.shape(device, "Llama-3.1-8B")) for device in ("h100", "h200"))
    shape = catalog.shape("h100", "Llama-3.1-8B")
    assert large > small > kv_capacity_tokens(shape, max_batched_tokens=32_768)
    # 0.9 x 80 GiB less weights (16.06), runtime (3.5) and activations (0.91 GB), over 131,072 B.
    assert small == pytest.approx((0.9 * 80 * 2**30 - 16.06e9 - 3.5e9 - 0.91e9) / 131_072, rel=0.002)
    # With more devices than KV heads the heads are copied.
    many = EngineShape(replace(shape.hardware, scaleup_device_count=32), shape.architecture, 16)
    assert kv_bytes_per_token(many) == 2 * kv_bytes_per_token(shape)


def test_an_ideal_decode_step_reads_weights_and_cache_once(catalog: Catalog) -> None:
    shape = catalog.shape("h100", "Llama-3.1-70B", 4)
    time = RooflineTiming(shape, IDEAL).step_time(decode_batch(16, 1000))
    assert time.weights_s == pytest.approx((141.1e9 - 2.1e9) / (4 * 3.35e12), rel=0.002)
    assert time.kv_cache_s == pytest.approx(16_000 * 327_680 / (4 * 3.35e12))
    assert time.bound is Bound.WEIGHTS
    assert time.overhead_s == 0
    assert RooflineTiming(shape, IDEAL).step_time(decode_batch(256, 8000)).bound is Bound.KV_CACHE


def test_an_ideal_prefill_computes_two_flop_per_parameter_and_token(catalog: Catalog) -> None:
    shape = catalog.shape("h100", "Llama-3.1-8B")
    tokens = 4096
    time = RooflineTiming(shape, IDEAL).step_time(prefill_batch(tokens))
    linear = 2 * 6.98e9 * tokens
    attention = 4 * 32 * 32 * 128 * tokens * (tokens + 1) / 2
    assert time.compute_s == pytest.approx((linear + attention + 2 * 128_256 * 4096) / 989e12, rel=0.002)
    assert time.bound is Bound.COMPUTE
    assert time.collectives_s == 0


def test_fp8_doubles_the_matrix_rate_only_where_the_device_has_it(catalog: Catalog) -> None:
    def seconds(device: str, weights: str) -> float:
        return (
            RooflineTiming(catalog.shape(device, "Qwen3-32B", 2, weights), IDEAL).step_time(prefill_batch(64)).compute_s
        )

    assert seconds("h100", "bf16") / seconds("h100", "fp8") == pytest.approx(2, rel=0.02)
    assert seconds("a100", "bf16") == seconds("a100", "fp8")


def test_collectives_cost_latency_and_volume(catalog: Catalog) -> None:
    shape = catalog.shape("h100", "Qwen3-32B", 4)
    timing = RooflineTiming(shape, replace(IDEAL, collective_latency_s=1e-5))
    reduces = 2 * 64
    volume = 2 * 3 / 4 * 5120 * 2 * 100
    assert timing.step_time(prefill_batch(100)).collectives_s == pytest.approx(reduces * (1e-5 + volume / 450e9))


def test_every_kind_of_work_makes_a_step_longer(catalog: Catalog) -> None:
    timing = RooflineTiming(catalog.shape("a100", "Llama-3.1-8B", 2), catalog.efficiency)
    plain = timing.step_s(decode_batch(8, 1000))
    assert timing.step_s(decode_batch(9, 1000)) > plain
    assert timing.step_s(decode_batch(8, 1001)) > plain
    mixed = replace(decode_batch(8, 1000), prefill_count=1, prefill_tokens=512, prefill_attention_pairs=512 * 256)
    assert timing.step_s(mixed) > plain
    assert timing.step_s(prefill_batch(512, 4096)) > timing.step_s(prefill_batch(512))


def test_the_router_facts_predict_the_steps_they_were_read_from(catalog: Catalog) -> None:
    for device in catalog.devices:
        for model in ("Llama-3.1-8B", "Qwen3-32B"):
            shape = catalog.shape(device, model, 2)
            facts = engine_speed(shape, catalog.efficiency)
            timing = RooflineTiming(shape, catalog.efficiency)
            predicted = facts.prefill_overhead_s + 4096 / facts.prefill_tok_per_s
            # Attention grows with the square, so the straight line is a little off between its ends.
            assert predicted == pytest.approx(timing.step_s(prefill_batch(4096)), rel=0.1)
            assert facts.decode_s_per_token == timing.step_s(decode_batch(8, 2048))
            assert facts.kv_capacity_tokens == kv_capacity_tokens(shape)


def test_a_newer_device_is_faster(catalog: Catalog) -> None:
    a100, h100, h200 = (
        engine_speed(catalog.shape(device, "Qwen3-32B", 2), catalog.efficiency) for device in ("a100", "h100", "h200")
    )
    assert a100.prefill_tok_per_s < h100.prefill_tok_per_s == h200.prefill_tok_per_s
    assert a100.decode_s_per_token > h100.decode_s_per_token > h200.decode_s_per_token


@pytest.mark.parametrize("field", ["compute_ratio", "weight_read_ratio", "kv_read_ratio", "link_ratio"])
@pytest.mark.parametrize("value", [0.0, 1.01, -1.0])
def test_an_efficiency_above_the_peak_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} is"):
        replace(IDEAL, **{field: value})


def test_a_model_whose_shapes_contradict_its_size_is_refused(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="the shapes give"):
        replace(catalog.model("Qwen3-32B"), layer_count=60)
    with pytest.raises(ConfigError, match="no multiple of kv_head_count"):
        replace(catalog.model("Qwen3-32B"), kv_head_count=7)


GOOD_FILES = Path(__file__).parents[3] / "perfmodel" / "data"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("hardware.yaml", "{value: 3350, source: aic, also: ix}", "3350", "memory_gb_per_s is 3350; expected {value"),
        ("hardware.yaml", "{value: 3350, source: aic, also: ix}", "{value: 3350, source: hearsay}", "source 'hearsay'"),
        ("hardware.yaml", "{value: 3350, source: aic", "{value: fast, source: aic", "value 'fast'; expected a number"),
        ("hardware.yaml", "{value: 3350, source: aic", "{value: null, source: aic", "is null; expected a number"),
        ("hardware.yaml", "aliases: [h200, H200]", "aliases: [h100]", "'h100' is given to both"),
        ("hardware.yaml", "devices:", "device:", "section 'devices' is missing"),
        ("models.yaml", "attention: gqa", "attention: mla", "only 'gqa' can be sized"),
        ("models.yaml", "layer_count: {value: 80, source: llama-70b}", "", "layer_count is None"),
        ("efficiency.yaml", "value: 0.60", "value: 1.60", "compute_ratio is 1.6"),
        ("efficiency.yaml", "sources:", "sources: [", "cannot be read"),
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
