"""Small sizing problems for tests: two GPUs and a memory-only card, a real model's shapes, and step times by roofline.

Owns: problems that a search answers in milliseconds. Does not own: what the answer should be. Step times here are plain
peaks times 0.7, so that tests of the search do not move when the calibration does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from perfmodel import memory
from perfmodel.adapters.catalog import load_catalog
from perfmodel.architecture import Architecture
from perfmodel.hardware import DeviceKind, Hardware
from perfmodel.search.cheapest import Problem
from perfmodel.search.plan import (
    Choices,
    Demand,
    EngineOption,
    Fleet,
    Offer,
    PurchaseUnit,
    Slo,
    SpareRule,
    Topology,
    TrafficClass,
)
from perfmodel.step_time import BatchShape, StepTable

REACHED = 0.7
MODEL = "Llama-3.1-8B"


class RooflineSteps:
    """Weights once a step, FLOPs per token, KV per token of context, a fixed millisecond."""

    def __init__(self, option: EngineOption) -> None:
        shape = option.shape
        devices, hardware, architecture = shape.device_count, shape.hardware, shape.architecture
        bandwidth = REACHED * devices * hardware.memory_bytes_per_s
        peak = hardware.flop_per_s(shape.weight_format)
        flop_per_s = REACHED * devices * peak if peak else float("inf")
        self.fixed_s = memory.layer_weight_bytes(shape) / bandwidth + 0.001
        self.token_s = architecture.active_linear_flop_per_token / flop_per_s
        self.context_s = memory.kv_bytes_per_token(shape, 0) / bandwidth
        self.pair_s = architecture.attention_flop_per_pair / flop_per_s

    def step_s(self, batch: BatchShape) -> float:
        return self.table(1).step_s(BatchShape()) + (
            self.token_s * batch.token_count
            + (self.context_s + self.pair_s) * batch.decode_context_tokens
            + self.pair_s * batch.prefill_attention_pairs
            + self.context_s * batch.prefill_context_tokens
        )

    def table(self, max_batched_tokens: int) -> StepTable:
        return StepTable(
            by_token_s=self.fixed_s + self.token_s * np.arange(max_batched_tokens + 1, dtype=np.float64),
            sequence_s=0.0,
            decode_context_s=self.context_s + self.pair_s,
            prefill_pair_s=self.pair_s,
            prefill_context_s=self.context_s,
        )


def gpu(name: str = "fast", bandwidth_gb_per_s: float = 3350, tflop_per_s: float | None = 989) -> Hardware:
    """A GPU of 80 GB; no `tflop_per_s`: a card without a compute figure."""
    return Hardware(
        name=name,
        vendor="test",
        kind=DeviceKind.GPU if tflop_per_s else DeviceKind.LPU,
        generation="test",
        memory_bytes=80 * 2**30,
        memory_marketed_bytes=80_000_000_000,
        memory_bytes_per_s=bandwidth_gb_per_s * 1e9,
        bf16_flop_per_s=None if tflop_per_s is None else tflop_per_s * 1e12,
        fp8_flop_per_s=None if tflop_per_s is None else 2 * tflop_per_s * 1e12,
        fp4_flop_per_s=None,
        scaleup_bytes_per_s=450e9,
        scaleup_device_count=8,
        scaleout_bytes_per_s=50e9,
    )


FAST = gpu("fast")
CHEAP = gpu("cheap", 2039, 312)
CARD = gpu("card", 546, None)


def offer(
    hardware: Hardware, usd_per_h: float, inventory: int = 8, unit: int = 1, watts: float | None = 1000.0
) -> Offer:
    """An offer with a network."""
    return Offer(hardware, usd_per_h, inventory, PurchaseUnit("unit", unit, watts), hardware.scaleout_bytes_per_s)


OFFERS = (offer(FAST, 2.0), offer(CHEAP, 1.0), offer(CARD, 0.3))

DEMAND = Demand(rate_p50_per_s=30.0, rate_p90_per_s=50.0, input_tokens=1000, output_tokens=150, cached_ratio=0.2)
SLO = Slo(ttft_ms=800, tpot_ms=40)


def traffic(name: str = "chat", demand: Demand = DEMAND, slo: Slo = SLO, model: str = MODEL) -> TrafficClass:
    """A class."""
    return TrafficClass(name, model, demand, slo)


CHOICES = Choices(
    topologies=(Topology.AGGREGATED, Topology.DISAGGREGATED),
    tensor_parallel_count=(1, 2),
    chunk_tokens=(512, 2048),
    max_sequence_count=128,
)


@dataclass(frozen=True)
class Setting:
    """What a test varies."""

    classes: tuple[TrafficClass, ...] = (traffic(),)
    offers: tuple[Offer, ...] = OFFERS
    choices: Choices = CHOICES
    spare: SpareRule = field(default_factory=SpareRule)


@cache
def architecture(model: str = MODEL) -> Architecture:
    """A model of the catalogue."""
    return load_catalog().model(model)


def problem(setting: Setting) -> Problem:
    """The setting as a problem."""
    models = dict.fromkeys(each.model for each in setting.classes)
    return Problem(
        setting.classes,
        Fleet(setting.offers, spare=setting.spare),
        setting.choices,
        tuple((name, architecture(name)) for name in models),
        RooflineSteps,
    )
