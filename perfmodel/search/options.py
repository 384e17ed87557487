"""Which engines could be run at all: every allowed cut of one model over the offered devices, and why others cannot be.

Owns: enumeration of parallelism, number formats and chunk sizes, what fits, and the physical bounds of a promise. Does
not own: queueing (`rating`) or how many of them are bought (`search`). Each engine that cannot be is given with
the first check that it fails, so that nobody has to guess why a device was not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perfmodel import memory
from perfmodel.architecture import Architecture
from perfmodel.disaggregation import ffn_devices_by_memory
from perfmodel.errors import ConfigError
from perfmodel.hardware import NumberFormat
from perfmodel.memory import EngineShape
from perfmodel.search.plan import (
    Choices,
    Demand,
    EngineOption,
    Fleet,
    Offer,
    RejectionReason,
    Topology,
    TrafficClass,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine that cannot be: its offer, what it was, the first check that it fails and the figures.

    `over_ratio` is how many times the limit it needs (infinite: no size of anything would do); it orders near misses.
    """

    offer_name: str
    what: str
    reason: RejectionReason
    detail: str
    over_ratio: float = math.inf


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no engine of this shape can beat, whatever its software: one sequence alone at the full published peaks."""

    ttft_ms: float | None
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to lay a model over devices."""

    tensor_parallel_count: int
    pipeline_parallel_count: int
    data_parallel_count: int
    expert_parallel_count: int
    weight_format: NumberFormat
    kv_format: NumberFormat

    def __str__(self) -> str:
        return f"{cut_words(self)}, {self.weight_format} weights, {self.kv_format} KV"


def cut_words(cut: Cut | EngineShape) -> str:
    """How a model is split over devices, in words: TP always, the others where they split it."""
    parts = [f"TP{cut.tensor_parallel_count}"]
    parts += [f"PP{cut.pipeline_parallel_count}"] if cut.pipeline_parallel_count > 1 else []
    parts += [f"DP{cut.data_parallel_count}"] if cut.data_parallel_count > 1 else []
    parts += [f"EP{cut.expert_parallel_count}"] if cut.expert_parallel_count > 1 else []
    return " ".join(parts)


def cuts(architecture: Architecture, choices: Choices) -> Iterator[Cut]:
    """Every cut that the choices allow. Experts are spread over all devices of an engine, or over none."""
    for tensor in choices.tensor_parallel_count:
        for pipeline in choices.pipeline_parallel_count:
            for data in choices.attention_data_parallel_count:
                spread = tensor * data
                experts = {1, spread} if architecture.experts_total and choices.expert_parallel else {1}
                for expert in sorted(experts):
                    for weights in choices.weight_formats:
                        for kv in choices.kv_formats:
                            yield Cut(tensor, pipeline, data, expert, weights, kv)


def engine_options(
    architecture: Architecture, fleet: Fleet, choices: Choices, context_tokens: int
) -> tuple[list[EngineOption], list[Refusal]]:
    """Engines that hold the model and a sequence of `context_tokens`, each with every chunk size, and the refused."""
    options: list[EngineOption] = []
    refusals: list[Refusal] = []
    for offer in fleet.offers:
        for cut in cuts(architecture, choices):
            found = _option(architecture, offer, cut, choices, context_tokens)
            if isinstance(found, Refusal):
                refusals.append(found)
                continue
            options.extend(found)
    if Topology.AFD in choices.topologies:
        apart, refused = _afd_options(architecture, fleet, choices, context_tokens)
        options += apart
        refusals += refused
    return options, refusals


def _afd_options(
    architecture: Architecture, fleet: Fleet, choices: Choices, context_tokens: int
) -> tuple[list[EngineOption], list[Refusal]]:
    """Decoders whose attention runs on one offer and whose feed-forward half sits in another's SRAM."""
    options: list[EngineOption] = []
    refusals: list[Refusal] = []
    for chips in fleet.offers:
        if not chips.hardware.sram:
            continue
        for offer in fleet.offers:
            if offer.hardware.sram:
                continue
            for cut in cuts(architecture, choices):
                if cut.expert_parallel_count > 1 or cut.pipeline_parallel_count > 1:
                    continue
                found = _afd_option(architecture, (offer, chips), cut, choices, context_tokens)
                if isinstance(found, Refusal):
                    refusals.append(found)
                else:
                    options.append(found)
    return options, refusals


def _afd_option(
    architecture: Architecture, offers: tuple[Offer, Offer], cut: Cut, choices: Choices, context_tokens: int
) -> EngineOption | Refusal:
    offer, chips = offers
    what = f"attention {cut}, feed-forward half on {chips.name}"

    def refused(reason: RejectionReason, detail: str) -> Refusal:
        return Refusal(f"{offer.name} + {chips.name}", what, reason, detail)

    try:
        shape = _shape(architecture, offer, cut)
    except ConfigError as fault:
        return refused(RejectionReason.PARALLELISM_IMPOSSIBLE, str(fault))
    count = ffn_devices_by_memory(architecture, cut.weight_format, chips.hardware)
    for one, needed in ((offer, shape.device_count), (chips, count)):
        if needed > one.inventory_count:
            return refused(
                RejectionReason.INVENTORY,
                _short_words(one, needed),
            )
    link = _chip_link(offer, shape.device_count, chips, count)
    if link is None:
        return refused(
            RejectionReason.LINK_UNKNOWN,
            f"the network of {offer.name} and of {chips.name} is not known: give network_gb_per_s in the spec",
        )
    chunk = min(choices.chunk_tokens)
    capacity = _attention_capacity_tokens(shape, chunk, context_tokens)
    if capacity < context_tokens:
        return refused(
            RejectionReason.CONTEXT_DOES_NOT_FIT,
            f"room for the KV of {capacity} tokens beside attention; one sequence has {context_tokens}",
        )
    return EngineOption(offer, shape, chunk, choices.max_sequence_count, capacity, chips, count, link)


def _short_words(offer: Offer, needed: int) -> str:
    there = offer.inventory_count
    return f"one replica takes {needed} {offer.name}, the inventory has {there or 'none'}"


def _chip_link(offer: Offer, devices: int, chips: Offer, count: int) -> float | None:
    """What activations share: the narrower side's network; a side whose network is not known is taken as the wider."""
    sides = [
        one.scaleout_bytes_per_s * number
        for one, number in ((offer, devices), (chips, count))
        if one.scaleout_bytes_per_s is not None
    ]
    return min(sides, default=None)


def _attention_capacity_tokens(shape: EngineShape, chunk_tokens: int, context_tokens: int) -> int:
    """Tokens of KV beside the attention half, the embedding and the head: as `memory.kv_capacity_tokens`, less
    weights.
    """
    architecture = shape.architecture
    taken = memory.runtime_bytes(shape.hardware, shape.device_count)
    taken += memory.activation_bytes_per_device(shape, chunk_tokens)
    tables = 1 if architecture.tied_embeddings else 2
    weights = architecture.attention_parameter_count * shape.dense_format.element_bytes
    weights += tables * memory.head_weight_bytes(shape)
    one = memory.DEFAULT_UTILISATION_RATIO * shape.hardware.memory_bytes - taken - weights / shape.tensor_parallel_count
    per_token = memory.kv_bytes(shape, context_tokens) / context_tokens
    return max(0, shape.data_parallel_count * int(shape.tensor_parallel_count * one // per_token))


def _shape(architecture: Architecture, offer: Offer, cut: Cut) -> EngineShape:
    return EngineShape(
        offer.hardware,
        architecture,
        tensor_parallel_count=cut.tensor_parallel_count,
        weight_format=cut.weight_format,
        kv_format=cut.kv_format,
        pipeline_parallel_count=cut.pipeline_parallel_count,
        data_parallel_count=cut.data_parallel_count,
        expert_parallel_count=cut.expert_parallel_count,
    )


def _option(
    architecture: Architecture, offer: Offer, cut: Cut, choices: Choices, context_tokens: int
) -> list[EngineOption] | Refusal:
    def refused(reason: RejectionReason, detail: str) -> Refusal:
        return Refusal(offer.name, str(cut), reason, detail)

    try:
        shape = _shape(architecture, offer, cut)
    except ConfigError as fault:
        return refused(RejectionReason.PARALLELISM_IMPOSSIBLE, str(fault))
    if shape.device_count > offer.inventory_count:
        return refused(RejectionReason.INVENTORY, _short_words(offer, shape.device_count))
    found = []
    last = ""
    for chunk in choices.chunk_tokens:
        try:
            capacity = memory.kv_capacity_tokens(shape, max_batched_tokens=chunk)
        except ConfigError as fault:
            last = str(fault)
            continue
        if capacity >= context_tokens:
            found.append(EngineOption(offer, shape, chunk, choices.max_sequence_count, capacity))
        else:
            last = f"room for the KV of {capacity} tokens; one sequence has {context_tokens}"
    if found:
        return found
    # How many times the devices' memory is wanted tells near misses apart.
    wanted = memory.weight_bytes(shape) + memory.kv_bytes(shape, context_tokens)
    over_ratio = wanted / (shape.device_count * offer.hardware.memory_bytes)
    fits = last.startswith("room")
    reason = RejectionReason.CONTEXT_DOES_NOT_FIT if fits else RejectionReason.WEIGHTS_DO_NOT_FIT
    return Refusal(offer.name, str(cut), reason, last, over_ratio)


def bounds(shape: EngineShape, demand: Demand) -> Bounds:
    """Least TTFT and TPOT of one sequence alone at full published peaks: FLOPs of the uncached prompt over peak FLOP/s
    and bytes of the active weights and of the sequence's KV over peak bandwidth. `ttft_ms` None: no compute figure.
    """
    architecture, hardware, count = shape.architecture, shape.hardware, shape.device_count
    bandwidth = count * hardware.memory_bytes_per_s
    active_bytes = architecture.active_linear_flop_per_token / 2 * shape.weight_format.element_bytes
    context = int(demand.input_tokens)
    kv_bytes = architecture.decode_read_elements(context) * shape.kv_format.element_bytes
    flop_per_s = hardware.flop_per_s(shape.weight_format)
    ttft_ms = None
    if flop_per_s is not None:
        cached = int(demand.input_tokens * demand.cached_ratio)
        new = max(1, math.floor(demand.input_tokens) - cached)
        flop = new * architecture.active_linear_flop_per_token + architecture.prefill_attention_flop(new, cached)
        # The fastest figure of the device bounds attention too, whatever format it runs in.
        peak = max(
            figure
            for figure in (hardware.bf16_flop_per_s, hardware.fp8_flop_per_s, hardware.fp4_flop_per_s)
            if figure is not None
        )
        ttft_ms = max(flop / (count * peak), active_bytes / bandwidth) * 1000
    return Bounds(ttft_ms, (active_bytes + kv_bytes) / bandwidth * 1000)


def promise_below_bound(
    least: Bounds, each: TrafficClass, *, prompts: bool, answers: bool
) -> tuple[RejectionReason, str] | None:
    """Why no software on a shape with these bounds keeps the class's promise: its first limit below them, of a pool
    that computes prompts, answers or both; None when the bounds leave room.
    """
    if prompts and least.ttft_ms is not None and least.ttft_ms > each.slo.ttft_ms:
        detail = f"TTFT {each.slo.ttft_ms:g} ms; no software is faster than {least.ttft_ms:.1f} ms on it"
        return RejectionReason.TTFT_BELOW_BOUND, detail
    if answers and least.tpot_ms > each.slo.tpot_ms:
        detail = f"TPOT {each.slo.tpot_ms:g} ms; no software is faster than {least.tpot_ms:.2f} ms on it"
        return RejectionReason.TPOT_BELOW_BOUND, detail
    return None


def beyond_all(each: TrafficClass, options: Sequence[EngineOption], refusals: Sequence[Refusal]) -> str | None:
    """One sentence when no number of any of these engines can keep the class's promise, before any queue is asked:
    nothing holds the model, or a limit lies below the physical bound of all. None: it has to be searched.
    """
    if not options:
        return _nothing_runs(each.model, refusals)
    floor = [bounds(option.shape, each.demand) for option in options if option.chips is None]
    tpot_ms = min((one.tpot_ms for one in floor), default=0.0)
    if not any(option.chips for option in options) and tpot_ms > each.slo.tpot_ms:
        return (
            f"class {each.name}: slo.tpot_ms is {each.slo.tpot_ms:g}; the physical bound of {each.model} on the "
            f"allowed accelerators is {tpot_ms:.2f} ms (weights and one sequence's KV read once at peak bandwidth)"
        )
    ttft_ms = min((one.ttft_ms for one in floor if one.ttft_ms is not None), default=None)
    if ttft_ms is not None and ttft_ms > each.slo.ttft_ms:
        return (
            f"class {each.name}: slo.ttft_ms is {each.slo.ttft_ms:g}; the physical bound of {each.model} on the "
            f"allowed accelerators is {ttft_ms:.1f} ms (one prompt of {each.demand.input_tokens:g} tokens, "
            f"{each.demand.cached_ratio:.0%} of them cached, alone at peak FLOP/s or the weights read once at peak "
            "bandwidth)"
        )
    return None


def _nothing_runs(model: str, refusals: Sequence[Refusal]) -> str:
    """Which accelerator comes closest to running the model, and what it lacks: the last check that any engine met."""
    stocked = [each for each in refusals if each.reason is not RejectionReason.INVENTORY]
    if not refusals:
        return f"no accelerator of the spec can run {model}: no engine is allowed"
    if not stocked:
        return f"no accelerator of the spec can run {model}: {refusals[0].detail}"
    closest = min(stocked, key=lambda each: each.over_ratio)
    return (
        f"no accelerator of the spec can run {model}; "
        f"the closest is {closest.offer_name} {closest.what}: {closest.detail}"
    )
