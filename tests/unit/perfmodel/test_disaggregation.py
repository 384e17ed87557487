"""P/D rate matching and hand-over, and attention-FFN disaggregation, on numbers that can be checked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.adapters.catalog import load_catalog
from perfmodel.disaggregation import (
    AfdBound,
    AfdEngine,
    PoolRate,
    SplitBound,
    SplitEngine,
    afd_step,
    decode_rate,
    exposed_transfer_s,
    ffn_devices_by_memory,
    ffn_parameter_count,
    match_rates,
    prefill_rate,
    prompt_batch_s,
    split_ttft,
)
from perfmodel.errors import ConfigError
from perfmodel.hardware import NumberFormat
from perfmodel.serving import FrontEnd, Lengths, ServingEngine
from perfmodel.step_time import BatchShape, StepTable


class PlainSteps:
    """1 ms a step, 0.1 ms a token, and a microsecond per token of decode context."""

    def table(self, max_batched_tokens: int) -> StepTable:
        return StepTable(0.001 + 1e-4 * np.arange(max_batched_tokens + 1.0), 0.0, 1e-6, 0.0, 0.0)

    def step_s(self, batch: BatchShape) -> float:
        return self.table(batch.token_count).step_s(batch)


def engine(replicas: int = 1, slots: int = 64) -> ServingEngine:
    return ServingEngine(PlainSteps(), 100_000, 4000, slots, replicas=replicas)


def test_a_transfer_hides_behind_prefill_but_for_the_last_layer() -> None:
    # 1 GB over 10 GB/s is 100 ms; 90 % of a 500 ms prefill hides all but the last of ten layers.
    assert exposed_transfer_s(1e9, 1e10, 0.5, 10) == pytest.approx(0.01)
    # A prefill of 50 ms hides 45 ms of it.
    assert exposed_transfer_s(1e9, 1e10, 0.05, 10) == pytest.approx(0.055)
    assert exposed_transfer_s(1e9, 1e10, 0.5, 1) == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="link_bytes_per_s is 0"):
        exposed_transfer_s(1e9, 0.0, 0.5, 10)


def test_a_slow_link_shows_in_ttft() -> None:
    lengths = Lengths(1000, 100)
    fast = SplitEngine(engine(), engine(), 1e5, 1e12, layer_count=40)
    slow = replace(fast, link_bytes_per_s=1e8)
    told = [split_ttft(split, lengths, 0.01, 8) for split in (fast, slow)]
    assert told[0].prefill_s == pytest.approx(0.101)
    # 0.1 GB at 0.1 GB/s is a second, of which 39 / 40 of the prefill is hidden.
    assert told[1].transfer_s == pytest.approx(1.0 - 0.101 * 39 / 40)
    assert told[1].total_s > told[0].total_s + 0.8
    assert told[0].transfer_s < 0.001


def test_ttft_of_a_split_engine_is_the_sum_of_its_parts() -> None:
    worker = replace(engine(replicas=2), front_end=FrontEnd(0.01, 1e-6, 0.002))
    lengths = Lengths(1000, 101)
    told = split_ttft(SplitEngine(worker, engine(), handover_s=0.03), lengths, 5.0, 10)
    assert told.outside_s == pytest.approx(0.013)
    assert told.decode_step_s == pytest.approx(0.001 + 0.001 + 1e-6 * 10 * 1051)
    assert told.total_s == pytest.approx(
        told.outside_s + told.queue_s + told.prefill_s + told.transfer_s + told.decode_step_s
    )
    assert math.isinf(split_ttft(SplitEngine(worker, engine()), lengths, 1e3, 10).queue_s)
    loads = [split_ttft(SplitEngine(worker, engine()), lengths, rate, 10).queue_s for rate in (1.0, 5.0, 15.0)]
    assert loads == sorted(loads)


def test_prompts_beyond_the_budget_take_several_steps() -> None:
    assert prompt_batch_s(engine(), 10_000, 0.0, 1) == pytest.approx(3 * 0.001 + 1.0, rel=1e-3)
    assert prompt_batch_s(engine(), 1000, 0.5, 2) == pytest.approx(0.001 + 0.1, rel=1e-3)


def test_a_decode_engine_takes_the_largest_batch_within_its_limit() -> None:
    lengths = Lengths(1000, 101)
    rate = decode_rate(engine(), lengths, 0.02)
    assert rate is not None
    # 1 ms + B (0.1 ms + 1,051 us) <= 20 ms.
    assert rate.batch == 16
    assert rate.request_per_s == pytest.approx(16 / (100 * rate.time_s))
    assert decode_rate(engine(), lengths, 0.001) is None
    capped = decode_rate(engine(slots=4), lengths, 1.0)
    assert capped is not None and capped.batch == 4


def test_a_prefill_engine_runs_full_budgets() -> None:
    rate = prefill_rate(engine(), Lengths(1000, 100))
    assert rate.batch == 4
    assert rate.request_per_s == pytest.approx(4 / 0.401)


def test_rate_matching_takes_the_fewest_engines_and_names_the_tighter_side() -> None:
    prefill, decode = PoolRate(10.0, 1, 0.1), PoolRate(4.0, 16, 0.02)
    match = match_rates(18.0, prefill, decode)
    # 18 / (10 * 0.9) = 2 exactly; 18 / (4 * 0.92) = 4.9.
    assert (match.prefill_count, match.decode_count) == (2, 5)
    assert match.request_per_s == pytest.approx(18.0)
    assert match.bound is SplitBound.PREFILL
    assert match_rates(18.4, prefill, decode).prefill_count == 3
    assert match_rates(3.6, prefill, decode).bound is SplitBound.DECODE
    with pytest.raises(ConfigError, match="rate_per_s is 0"):
        match_rates(0.0, prefill, decode)


@pytest.fixture(scope="module")
def afd() -> AfdEngine:
    catalog = load_catalog()
    model, chip = catalog.model("DeepSeek-R1"), catalog.device("Groq-3-LPU-LP30")
    count = ffn_devices_by_memory(model, NumberFormat.FP8, chip)
    return AfdEngine(model, catalog.device("H200-SXM-141GB"), 8, chip, count, 4e11, micro_batch_count=4)


def test_sram_chips_are_counted_by_their_memory(afd: AfdEngine) -> None:
    held = ffn_parameter_count(afd.architecture) * 1.0
    assert afd.ffn_device_count == math.ceil(held / afd.ffn_hardware.memory_bytes)
    # The attention half of DeepSeek-R1 is a few percent of its 671e9 parameters.
    assert 0.95 < held / afd.architecture.parameter_count < 0.99
    with pytest.raises(ConfigError, match="expected at least"):
        replace(afd, ffn_device_count=afd.ffn_device_count - 1)


def test_ffn_in_sram_is_fast_and_attention_binds_at_long_contexts(afd: AfdEngine) -> None:
    step = afd_step(afd, 256, 32_768)
    assert step.bound is AfdBound.ATTENTION
    assert step.ffn_s - afd.layer_overhead_s < 0.05 * step.attention_s
    assert step.step_s == pytest.approx(afd.architecture.layer_count * afd.micro_batch_count * step.attention_s)
    longer = afd_step(afd, 256, 65_536)
    assert longer.step_s > step.step_s
    assert longer.ffn_s == step.ffn_s


def test_a_thin_link_binds_by_its_bytes_and_a_far_one_by_its_round_trip(afd: AfdEngine) -> None:
    assert afd_step(replace(afd, link_bytes_per_s=1e9), 256, 1024).bound is AfdBound.LINK_BANDWIDTH
    far = afd_step(replace(afd, link_latency_s=1e-3), 256, 1024)
    assert far.bound is AfdBound.LINK
    assert far.micro_batches_to_hide > afd.micro_batch_count


def test_enough_micro_batches_hide_the_link(afd: AfdEngine) -> None:
    """MegaScale-Infer: with equal halves the link is hidden when m >= 2 (1 + T_c / T_f)."""
    far = replace(afd, link_latency_s=5e-5)
    one = afd_step(far, 256, 4096)
    half = max(one.attention_s, one.ffn_s)
    assert one.micro_batches_to_hide == math.ceil((one.attention_s + one.ffn_s + 2 * one.transfer_s) / half)
    hidden = afd_step(replace(far, micro_batch_count=12), 256, 4096)
    assert hidden.bound is not AfdBound.LINK


def test_a_device_without_a_compute_figure_is_a_lower_bound(afd: AfdEngine) -> None:
    bertha = load_catalog().device("HyperAccel-Bertha-500")
    count = ffn_devices_by_memory(afd.architecture, NumberFormat.FP8, bertha)
    step = afd_step(replace(afd, ffn_hardware=bertha, ffn_device_count=count), 64, 4096)
    assert not step.compute_known
    assert afd_step(afd, 64, 4096).compute_known
    # 546 GB/s at 90 %: reading the experts that 16 sequences hit takes far longer than from SRAM.
    assert step.ffn_s > 10 * afd_step(afd, 64, 4096).ffn_s


@pytest.mark.parametrize(("count", "context"), [(0, 10), (1, 0)])
def test_an_empty_step_is_refused(afd: AfdEngine, count: int, context: int) -> None:
    with pytest.raises(ConfigError, match="AFD step"):
        afd_step(afd, count, context)
