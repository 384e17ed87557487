"""Step times: figures that can be checked by hand, with coefficients of one and nothing added."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.adapters.catalog import Catalog, load_catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.coefficients import Coefficients
from perfmodel.hardware import NumberFormat
from perfmodel.memory import kv_capacity_tokens
from perfmodel.step_terms import TERMS, Term
from perfmodel.step_time import Bound, StepModel, decode_batch, engine_speed, prefill_batch

# Peaks reached: ratios are one, and what is counted in microseconds costs nothing.
IDEAL = Coefficients({term: 0.0 if term.endswith("_us") else 1.0 for term in TERMS})


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


@pytest.fixture(scope="module")
def fitted() -> Coefficients:
    return load_coefficients().coefficients


def test_an_ideal_decode_step_reads_weights_and_cache_once(catalog: Catalog) -> None:
    model = StepModel(catalog.shape("h100", "Llama-3.1-70B", 4), IDEAL)
    time = model.step(decode_batch(16, 1000))
    assert time.weights_s == pytest.approx((141.1e9 - 2.1e9) / (4 * 3.35e12), rel=0.002)
    assert time.kv_cache_s == pytest.approx(16_000 * 327_680 / (4 * 3.35e12), rel=0.001)
    assert time.bound is Bound.WEIGHTS
    assert time.overhead_s == 0
    assert model.step(decode_batch(256, 8000)).bound is Bound.KV_CACHE


def test_an_ideal_prefill_computes_two_flop_per_parameter_and_token(catalog: Catalog) -> None:
    tokens = 65_536  # far beyond the ridge, below which products hide behind the weights
    time = StepModel(catalog.shape("h100", "Llama-3.1-8B"), IDEAL).step(prefill_batch(tokens))
    linear = 2 * 6.98e9 * tokens
    attention = 4 * 32 * 32 * 128 * tokens * (tokens + 1) / 2
    assert time.compute_s == pytest.approx((linear + attention) / 989e12, rel=0.01)
    assert time.bound is Bound.COMPUTE
    assert time.collectives_s == 0


def test_fp8_doubles_the_matrix_rate_only_where_the_device_has_it(catalog: Catalog) -> None:
    def seconds(device: str, weights: str) -> float:
        shape = catalog.shape(device, "Qwen3-32B", 2, weights)
        pairless = replace(prefill_batch(65_536), prefill_attention_pairs=0)
        return StepModel(shape, IDEAL).step(pairless).compute_s

    assert seconds("h100", "bf16") / seconds("h100", "fp8") == pytest.approx(2, rel=0.03)
    assert seconds("a100", "bf16") == pytest.approx(seconds("a100", "fp8"), rel=0.01)


def test_attention_of_a_latent_cache_is_bound_by_compute_where_one_rank_has_all_heads(catalog: Catalog) -> None:
    count, context = 64, 8000
    h200 = catalog.device("h200")

    def seconds(model: str, data: int, kv: str) -> float:
        shape = replace(
            catalog.shape("h200", model, 8 // data, "fp8"),
            kv_format=NumberFormat.parse(kv),
            data_parallel_count=data,
        )
        return StepModel(shape, IDEAL).step(decode_batch(count, context)).kv_cache_s

    flop = count * context * 61 * 128 * 2 * (512 + 64 + 512)
    read = count * context * 61 * (512 + 64)
    assert h200.bf16_flop_per_s is not None
    # Attention data parallelism: each rank has all 128 heads of its sequences.
    assert seconds("DeepSeek-R1", 8, "fp8") == pytest.approx(flop / (8 * h200.bf16_flop_per_s), rel=0.01)
    # Tensor parallelism: a sixteenth of the heads a rank, but each rank reads the whole latent.
    assert seconds("DeepSeek-R1", 1, "fp8") == pytest.approx(read / h200.memory_bytes_per_s, rel=0.01)
    # Grouped heads read far more than they compute.
    assert seconds("Llama-3.1-70B", 1, "fp8") == pytest.approx(
        count * context * 163_840 / (8 * h200.memory_bytes_per_s), rel=0.01
    )


def test_the_floor_of_a_step_takes_reads_and_flops_apart(catalog: Catalog) -> None:
    one = catalog.shape("h200", "DeepSeek-R1", 1, "fp8")
    shape = replace(one, kv_format=NumberFormat.FP8, data_parallel_count=8)
    model = StepModel(shape, IDEAL)
    few, many = decode_batch(8, 8000), decode_batch(512, 8000)
    # Few sequences: the weights; the attention's FLOPs hide behind their read.
    assert model.floor_s(few) < model.step_s(few)
    flop = shape.architecture.decode_attention_flop(8000) * 512 / (8 * (shape.hardware.bf16_flop_per_s or 1))
    assert model.floor_s(many) >= flop
    assert model.floor_s(many) < model.step(many).weights_s + model.step(many).kv_cache_s + model.step(many).compute_s


def test_int8_runs_at_its_own_peak_where_the_device_has_no_fp8(catalog: Catalog) -> None:
    def seconds(device: str, weights: str) -> float:
        pairless = replace(prefill_batch(262_144), prefill_attention_pairs=0)
        return StepModel(catalog.shape(device, "Llama-3.1-8B", 1, weights), IDEAL).step(pairless).compute_s

    for device in ("Arc-Pro-B60", "a100"):
        assert seconds(device, "bf16") / seconds(device, "int8") == pytest.approx(2, rel=0.02)
        assert seconds(device, "fp8") == pytest.approx(seconds(device, "bf16"), rel=0.01)
    assert seconds("h100", "int8") == seconds("h100", "fp8")


def test_collectives_cost_latency_and_volume(catalog: Catalog) -> None:
    shape = catalog.shape("h100", "Qwen3-32B", 4)
    launched = Coefficients({**IDEAL.base, Term.ALLREDUCE_LATENCY: 10.0})
    reduces = 2 * 64
    volume = 2 * 3 / 4 * 5120 * 2 * 100
    found = StepModel(shape, launched).step(prefill_batch(100)).collectives_s
    assert found == pytest.approx(reduces * (2 * 1e-5 + volume / 450e9))  # log2(4) launches each


def test_every_kind_of_work_makes_a_step_longer(catalog: Catalog, fitted: Coefficients) -> None:
    model = StepModel(catalog.shape("a100", "Llama-3.1-8B", 2), fitted)
    plain = model.step_s(decode_batch(8, 1000))
    assert model.step_s(decode_batch(9, 1000)) > plain
    assert model.step_s(decode_batch(8, 1001)) > plain
    mixed = replace(decode_batch(8, 1000), prefill_count=1, prefill_tokens=512, prefill_attention_pairs=512 * 256)
    assert model.step_s(mixed) > plain
    assert model.step_s(prefill_batch(512, 4096)) > model.step_s(prefill_batch(512))


def test_the_router_facts_predict_the_steps_they_were_read_from(catalog: Catalog, fitted: Coefficients) -> None:
    for device in ("a100", "h100", "h200"):
        for name in ("Llama-3.1-8B", "Qwen3-32B"):
            model = StepModel(catalog.shape(device, name, 2), fitted)
            facts = engine_speed(model)
            predicted = facts.prefill_overhead_s + 4096 / facts.prefill_tok_per_s
            # A chord of a curve that is flat below the ridge and bends up with attention: too long in between.
            truth = model.step_s(prefill_batch(4096))
            assert truth <= predicted <= 1.2 * truth
            assert facts.prefill_overhead_s + 8191 / facts.prefill_tok_per_s == pytest.approx(
                model.step_s(prefill_batch(8192))
            )
            assert facts.decode_s_per_token == model.step_s(decode_batch(8, 2048))
            assert facts.kv_capacity_tokens == kv_capacity_tokens(model.shape)


def test_a_newer_device_is_faster(catalog: Catalog, fitted: Coefficients) -> None:
    a100, h100, h200 = (
        engine_speed(StepModel(catalog.shape(device, "Qwen3-32B", 2), fitted)) for device in ("a100", "h100", "h200")
    )
    assert a100.prefill_tok_per_s < h100.prefill_tok_per_s
    assert h100.prefill_tok_per_s == pytest.approx(h200.prefill_tok_per_s, rel=0.02)
    assert a100.decode_s_per_token > h100.decode_s_per_token > h200.decode_s_per_token
