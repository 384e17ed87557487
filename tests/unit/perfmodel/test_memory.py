"""Bytes of weights and caches under every way to cut a model, checked by hand on the catalogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfmodel import memory
from perfmodel.adapters.catalog import Catalog, load_catalog
from perfmodel.errors import ConfigError
from perfmodel.hardware import NumberFormat

BF16, FP8, FP4 = NumberFormat.BF16, NumberFormat.FP8, NumberFormat.FP4


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


@pytest.mark.parametrize(
    ("model", "kib_per_token", "weights_gb"),
    [("Llama-3.1-8B", 128, 16.06), ("Llama-3.1-70B", 320, 141.1), ("Qwen3-32B", 256, 65.5)],
)
def test_kv_and_weight_bytes_are_the_published_ones(
    catalog: Catalog, model: str, kib_per_token: int, weights_gb: float
) -> None:
    shape = catalog.shape("h100", model)
    assert memory.kv_bytes_per_token(shape) == kib_per_token * 1024
    assert memory.weight_bytes(shape) / 1e9 == pytest.approx(weights_gb, rel=0.005)
    assert memory.kv_bytes_per_token(replace(shape, kv_format=FP8)) == kib_per_token * 512
    assert memory.kv_bytes_per_token(replace(shape, kv_format=FP4)) == kib_per_token * 288


def test_what_does_not_fit_is_refused_with_the_reason(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match=r"Llama-3\.1-70B in bf16 does not fit on 1 x H100-SXM-80GB: 141\.1 GB"):
        memory.kv_capacity_tokens(catalog.shape("h100", "Llama-3.1-70B"))
    with pytest.raises(ConfigError, match="does not fit on 1 x"):
        memory.largest_batch(catalog.shape("h100", "Llama-3.1-70B"), 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_count": 3}, "tensor_parallel_count is 3; expected a divisor of the 128"),
        ({"tensor_parallel_count": 16}, "H100-SXM-80GB links at most 8 devices"),
        ({"data_parallel_count": 0}, "data_parallel_count is 0"),
        ({"pipeline_parallel_count": 62}, "pipeline_parallel_count is 62; expected 1 to the 61 layers"),
        ({"tensor_parallel_count": 8, "expert_parallel_count": 3}, "expert_parallel_count is 3; expected a divisor"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(catalog: Catalog, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(catalog.shape("h100", "DeepSeek-R1"), **changes)


def test_a_dense_model_has_no_experts_to_spread(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="Qwen3-32B has no experts"):
        replace(catalog.shape("h100", "Qwen3-32B", 8), expert_parallel_count=8)


def test_a_fabric_of_unknown_extent_refuses_nothing(catalog: Catalog) -> None:
    assert catalog.shape("Gaudi3", "Llama-3.1-70B", 16).device_count == 16


def test_quantised_checkpoints_keep_their_tables_in_bf16(catalog: Catalog) -> None:
    shape = catalog.shape("h100", "Llama-3.1-70B", 1, "fp8")
    table = 128_256 * 8192
    assert memory.weight_bytes(shape) == shape.architecture.linear_parameter_count + 2 * 2 * table
    tied = catalog.shape("h100", "Gemma-2-9B", 1, "fp8")
    assert memory.checkpoint_bytes(tied) - memory.layer_weight_bytes(tied) == 2 * 256_000 * 3584


def test_native_fp4_checkpoints_quantise_the_experts_alone(catalog: Catalog) -> None:
    native = catalog.shape("h100", "gpt-oss-120b", 1, "mxfp4")
    architecture = native.architecture
    assert native.dense_format is BF16
    assert memory.layer_weight_bytes(native) == pytest.approx(
        2 * architecture.linear_parameter_count + 0.5625 * architecture.routed_parameter_count, abs=1
    )
    # The published checkpoint is 65.2 GB (60.8 GiB); with 4.25 bits, as MXFP4 has, the same sum gives 65.2.
    assert memory.checkpoint_bytes(native) / 1e9 == pytest.approx(65.2, rel=0.06)
    assert catalog.shape("h100", "DeepSeek-V4-Pro", 1, "fp4").dense_format is FP8
    assert catalog.shape("h100", "DeepSeek-R1", 1, "fp4").dense_format is FP4
    assert catalog.shape("h100", "gpt-oss-120b", 1, "bf16").dense_format is BF16
    # A repack of a release with INT4 experts has no narrower matrices to start from outside of them.
    assert catalog.shape("h100", "Kimi-K2.5", 1, "nvfp4").dense_format is BF16


def test_kv_heads_are_copied_when_there_are_fewer_than_ranks(catalog: Catalog) -> None:
    one = catalog.shape("gb200", "Llama-3.1-405B")
    per_token = memory.kv_bytes_per_token(one)
    assert per_token == 504 * 1024
    for ranks, copies in ((4, 1), (8, 1), (16, 2), (64, 8)):
        assert memory.kv_bytes_per_token(replace(one, tensor_parallel_count=ranks)) == copies * per_token


def test_a_latent_cache_is_copied_to_every_rank_unless_attention_is_data_parallel(catalog: Catalog) -> None:
    one = catalog.shape("h200", "DeepSeek-R1", 1, "fp8")
    per_token = 61 * 576 * 2
    assert memory.kv_bytes_per_token(one) == per_token
    tensor = replace(one, tensor_parallel_count=8)
    data = replace(one, data_parallel_count=8, expert_parallel_count=8)
    assert memory.kv_bytes_per_token(tensor) == 8 * per_token
    assert memory.kv_bytes_per_token(data) == per_token
    # Eight ranks keep a copy each, so they hold as many tokens as one; eight groups hold eight times as many,
    # less what the copies of attention and dense matrices take.
    assert tensor.device_count == data.device_count == 8
    assert memory.weight_bytes(data) > memory.weight_bytes(tensor)
    assert 3 < memory.kv_capacity_tokens(data) / memory.kv_capacity_tokens(tensor) < 8


def test_windows_and_state_decide_what_a_sequence_holds(catalog: Catalog) -> None:
    oss = catalog.shape("h100", "gpt-oss-120b", 1, "fp4")
    assert memory.kv_bytes_per_token(oss, 100) == 72 * 1024
    assert memory.kv_bytes_per_token(oss, 128) == 36 * 1024
    assert memory.kv_bytes(oss, 131_072) == (131_072 + 128) * 36 * 1024
    hybrid = catalog.shape("h100", "Qwen3-Next-80B-A3B", 2)
    assert memory.kv_bytes(hybrid, 1000) == 1000 * 24 * 1024 + 77_266_944
    assert memory.decode_read_bytes(hybrid, 1000) == 1000 * 24 * 1024 + 2 * 77_266_944
    long, short = (memory.kv_capacity_tokens(oss, context_tokens=context) for context in (100_000, 256))
    assert long > short
    assert memory.kv_capacity_tokens(oss) // 8192 == memory.largest_batch(oss, 8192) > 1


def test_capacity_grows_with_memory_and_shrinks_with_the_batch(catalog: Catalog) -> None:
    small, large = (memory.kv_capacity_tokens(catalog.shape(device, "Llama-3.1-8B")) for device in ("h100", "h200"))
    shape = catalog.shape("h100", "Llama-3.1-8B")
    assert large > small > memory.kv_capacity_tokens(shape, max_batched_tokens=32_768)
    # 0.9 x 80 GiB less weights (16.06), runtime (3.5) and activations (0.91 GB), over 131,072 B.
    assert small == pytest.approx((0.9 * 80 * 2**30 - 16.06e9 - 3.5e9 - 0.91e9) / 131_072, rel=0.002)
    assert memory.largest_batch(shape, 10_000) == small // 10_000
    assert memory.largest_batch(shape, 10 * small) == 0


def test_stages_are_as_full_as_the_largest(catalog: Catalog) -> None:
    even = replace(catalog.shape("h100", "Llama-3.1-70B", 4), pipeline_parallel_count=2)
    uneven = replace(even, pipeline_parallel_count=3)
    assert even.device_count == 8
    assert memory.fullest_device_weight_bytes(even) == pytest.approx((136.9e9 / 2 + 2.1e9) / 4, rel=0.002)
    assert memory.fullest_device_weight_bytes(uneven) == pytest.approx((136.9e9 * 27 / 80 + 2.1e9) / 4, rel=0.002)
    flat = catalog.shape("h100", "Llama-3.1-70B", 8)
    assert memory.kv_capacity_tokens(even) == pytest.approx(memory.kv_capacity_tokens(flat), rel=0.05)


def test_devices_are_counted_by_bytes_alone(catalog: Catalog) -> None:
    one = catalog.shape("h100", "Llama-3.1-70B")
    # 141.1 + 42.9 GB over 0.9 x 85.9 - 3.9 - 0.4 (activations of 8,192 tokens) GB.
    assert memory.device_count_by_memory(one, 131_072, 1) == 3
    assert memory.device_count_by_memory(catalog.shape("h100", "Llama-3.1-8B"), 1000, 1) == 1
    tight = catalog.shape("groq", "Llama-3.1-8B")
    with pytest.raises(ConfigError, match=r"Groq-LPU-v1 has 0\.23 GB; activations of 8192 tokens"):
        memory.device_count_by_memory(catalog.shape("groq", "Llama-3.1-70B"), 1000, 1)
    # 16.06 GB over 230 MB chips that a batch of 1 leaves nearly whole.
    chips = memory.device_count_by_memory(tight, 1000, 1, max_batched_tokens=1, utilisation_ratio=1)
    assert chips == pytest.approx(16.2e9 / 0.23e9, abs=2)


def test_the_cache_outgrows_the_weights_where_the_bytes_say(catalog: Catalog) -> None:
    shape = catalog.shape("h100", "Llama-3.1-70B")
    crossing = memory.crossover_tokens(shape)
    assert crossing is not None
    assert memory.kv_bytes(shape, crossing) >= memory.checkpoint_bytes(shape) > memory.kv_bytes(shape, crossing - 1)
    windows = replace(
        shape.architecture, attention=catalog.model("gpt-oss-20b").attention[1:], published_parameter_count=None
    )
    assert memory.crossover_tokens(replace(shape, architecture=windows)) is None


@pytest.mark.parametrize("field", ["tensor", "data", "pipeline", "expert"])
@pytest.mark.parametrize("count", [10**6 + 1, 10**20, 10**330, 1e308, float("inf")])
def test_more_devices_than_a_cluster_has_are_refused(catalog: Catalog, field: str, count: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}_parallel_count is .*; expected at most 1000000$") as raised:
        replace(catalog.shape("h100", "Llama-3.1-8B"), **{f"{field}_parallel_count": count})
    assert len(str(raised.value)) < 120


@pytest.mark.parametrize("context", [10**12 + 1, 10**330, 1e308, float("inf"), float("nan")])
@pytest.mark.parametrize("count", [memory.kv_bytes, memory.kv_bytes_per_token, memory.decode_read_bytes])
def test_a_context_beyond_any_is_refused(catalog: Catalog, count: Any, context: Any) -> None:
    shape = catalog.shape("h100", "Llama-3.1-8B")
    with pytest.raises(ConfigError, match=r"^context_tokens is .*; expected at most 1000000000000 tokens$") as raised:
        count(shape, context)
    assert len(str(raised.value)) < 120
    assert count(shape, 10**12) > 0
