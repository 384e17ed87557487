"""Properties of bytes and attention FLOPs of any model under any cut, each shown to fail on a planted fault.

Models are drawn from every kind of attention layer, small enough that windows, chunks and top-k are crossed within a
few hundred tokens. What must hold is physics: a cache only grows, narrower numbers take less, a prompt computed in
chunks costs what it costs at once, what is admitted fits and one more would not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel import memory
from perfmodel.architecture import Architecture, DenseLayers, ExpertLayers
from perfmodel.attention import (
    AttentionKind,
    AttentionLayers,
    GroupedHeads,
    Indexer,
    LatentHeads,
    LinearHeads,
    LinearKind,
)
from perfmodel.hardware import DeviceKind, Hardware, NumberFormat
from perfmodel.memory import EngineShape
from tests.exploring import examples

HIDDEN = 64
# Room for runtime, activations, weights and some sequences of the small models.
DEVICE = Hardware("d", "v", DeviceKind.GPU, "g", 4_400_000_000, 4_400_000_000, 1e12, 1e14, None, None, 1e11, 64)
WIDE_FIRST = (NumberFormat.BF16, NumberFormat.FP8, NumberFormat.FP4, NumberFormat.INT4)


@dataclass(frozen=True)
class Case:
    """One model on one engine, a context, and tokens added to it."""

    shape: EngineShape
    context: int
    added: int


class Sizes:
    """What is under test; faults are planted by overriding."""

    def kv_bytes(self, shape: EngineShape, context: int) -> float:
        return memory.kv_bytes(shape, context)

    def kv_bytes_per_token(self, shape: EngineShape, context: int) -> float:
        return memory.kv_bytes_per_token(shape, context)

    def read_elements(self, model: Architecture, context: int) -> float:
        return model.decode_read_elements(context)

    def prefill_flop(self, model: Architecture, new: int, context: int) -> float:
        return model.prefill_attention_flop(new, context)

    def decode_flop(self, model: Architecture, context: int) -> float:
        return model.decode_attention_flop(context)

    def experts_hit(self, model: Architecture, tokens: float) -> float:
        return model.experts_hit(tokens)

    def weight_bytes(self, shape: EngineShape) -> float:
        return memory.weight_bytes(shape)

    def fullest_device_weight_bytes(self, shape: EngineShape) -> float:
        return memory.fullest_device_weight_bytes(shape)

    def largest_batch(self, shape: EngineShape, context: int) -> int:
        return memory.largest_batch(shape, context, max_batched_tokens=16)


def check_cache(sizes: Sizes, case: Case) -> None:
    shape, context, model = case.shape, case.context, case.shape.architecture
    groups = len(model.attention)
    now, later = sizes.kv_bytes(shape, context), sizes.kv_bytes(shape, context + case.added)
    assert later >= now >= model.linear_state_bytes, "a cache only grows"
    steps = [sizes.kv_bytes_per_token(shape, context + step) for step in range(case.added)]
    assert later - now == pytest.approx(sum(steps), abs=groups * (case.added + 1)), "it grows token by token"
    assert all(b <= a for a, b in pairwise(steps)), "windows fill and never empty"
    by_format = [sizes.kv_bytes(replace(shape, kv_format=number), context) for number in WIDE_FIRST]
    assert by_format == sorted(by_format, reverse=True), "narrower numbers take less"
    held = now - model.linear_state_bytes
    heads = sum(group.held_elements(context) / group.kv_head_count for group in model.attention)
    per_rank = held / shape.tensor_parallel_count
    assert per_rank >= heads * shape.kv_format.element_bytes - groups, "every rank holds a head of each layer or more"
    assert held >= sizes.kv_bytes(replace(shape, tensor_parallel_count=1), context) - model.linear_state_bytes - groups
    reads, elements = sizes.read_elements(model, context), model.kv_elements(context)
    assert reads <= elements + groups, "nothing is read that is not held"
    if all(group.top_k_count is None or context <= group.top_k_count for group in model.attention):
        assert reads == elements, "below top-k all that is held is read"
    assert sizes.read_elements(model, context + case.added) >= reads
    scanned = sum(group.count * group.index_elements * context for group in model.attention)
    assert reads >= scanned, "an indexer scans every key"


def check_flop(sizes: Sizes, case: Case) -> None:
    model, context, added = case.shape.architecture, case.context, case.added
    whole = sizes.prefill_flop(model, context + added, 0)
    parts = sizes.prefill_flop(model, context, 0) + sizes.prefill_flop(model, added, context)
    if all(group.top_k_count is None for group in model.attention):
        assert parts == pytest.approx(whole, rel=1e-12), "chunks cost what the whole prompt costs"
    else:
        assert parts <= whole * (1 + 1e-12), "each chunk may choose the cheaper form"
    assert sizes.prefill_flop(model, added + 1, context) > sizes.prefill_flop(model, added, context) > 0
    full = replace(model, attention=tuple(without_limits(group) for group in model.attention))
    assert sizes.prefill_flop(model, added, context) <= full.prefill_attention_flop(added, context) * (1 + 1e-12)
    assert sizes.decode_flop(model, context + added) >= sizes.decode_flop(model, context) > 0
    if all(group.kind is not AttentionKind.CHUNKED for group in model.attention):
        one = sizes.prefill_flop(model, 1, context - 1)
        assert one <= sizes.decode_flop(model, context) * (1 + 1e-12), "a decode is a prefill of one token or dearer"


def without_limits(group: AttentionLayers) -> AttentionLayers:
    """The same layers seeing everything; the indexer's scan stays."""
    if group.kind is AttentionKind.LINEAR:
        return group
    return replace(group, kind=AttentionKind.FULL, window_tokens=None, top_k_count=None)


def check_experts(sizes: Sizes, case: Case) -> None:
    model = case.shape.architecture
    few, many = sizes.experts_hit(model, case.added), sizes.experts_hit(model, case.added + case.context)
    assert few <= many <= model.experts_total
    assert many >= model.experts_active * (1 - 1e-12)
    assert few <= model.experts_active * case.added * (1 + 1e-12), "a token touches its own experts at most"


def check_fit(sizes: Sizes, case: Case) -> None:
    shape = case.shape
    by_format = [sizes.weight_bytes(replace(shape, weight_format=number)) for number in WIDE_FIRST]
    assert by_format == sorted(by_format, reverse=True)
    fullest = sizes.fullest_device_weight_bytes(shape)
    assert fullest * shape.device_count >= sizes.weight_bytes(shape) * (1 - 1e-9), "the fullest holds its share or more"
    batch = sizes.largest_batch(shape, case.context)
    assert batch % shape.data_parallel_count == 0
    in_group = batch // shape.data_parallel_count
    room = memory.kv_budget_bytes_per_device(shape, max_batched_tokens=16)
    one = memory.kv_bytes(shape, case.context) / shape.tensor_parallel_count
    layers = shape.architecture.layer_count
    one *= -(-layers // shape.pipeline_parallel_count) / layers
    assert in_group * one <= room * (1 + 1e-9), "what is admitted fits"
    assert (in_group + 1) * one > room * (1 - 1e-9), "and one more would not"


def check(sizes: Sizes, case: Case) -> None:
    check_cache(sizes, case)
    check_flop(sizes, case)
    check_experts(sizes, case)
    check_fit(sizes, case)


@st.composite
def groups(draw: st.DrawFn) -> AttentionLayers:
    kind = draw(st.sampled_from(["full", "window", "chunked", "latent", "sparse", "linear"]))
    count = draw(st.integers(1, 3))
    if kind == "linear":
        linear = draw(st.sampled_from(LinearKind))
        return LinearHeads(linear, HIDDEN, 2, 4, 8, 4).layers(count)
    if kind in ("latent", "sparse"):
        indexer = Indexer(2, 8, draw(st.integers(1, 60)), 32, draw(st.booleans())) if kind == "sparse" else None
        return LatentHeads(HIDDEN, 8, 32, 16, 8, 4, 8).layers(count, indexer)
    heads = GroupedHeads(HIDDEN, 8, draw(st.sampled_from([1, 2, 4, 8])), 8, draw(st.sampled_from([8, 4])))
    window = None if kind == "full" else draw(st.integers(1, 60))
    return heads.layers(count, AttentionKind(kind), window)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    attention = tuple(draw(st.lists(groups(), min_size=1, max_size=3)))
    experts = ExpertLayers(2, 16, draw(st.integers(1, 4)), 32) if draw(st.booleans()) else None
    layer_count = sum(group.count for group in attention)
    model = Architecture("m", layer_count, HIDDEN, 50, attention, (DenseLayers(layer_count, 128),), experts)
    shape = EngineShape(
        DEVICE,
        model,
        tensor_parallel_count=draw(st.sampled_from([1, 2, 4, 8])),
        weight_format=draw(st.sampled_from(WIDE_FIRST)),
        kv_format=draw(st.sampled_from(WIDE_FIRST)),
        pipeline_parallel_count=draw(st.integers(1, min(3, layer_count))),
        data_parallel_count=draw(st.sampled_from([1, 2])),
    )
    return Case(shape, draw(st.integers(1, 200)), draw(st.integers(1, 20)))


@given(cases())
@settings(max_examples=examples(300), deadline=None)
def test_bytes_and_flop_obey_physics(case: Case) -> None:
    check(Sizes(), case)


class GrowsPastItsWindows(Sizes):
    def kv_bytes(self, shape: EngineShape, context: int) -> float:
        return memory.kv_bytes_per_token(shape, 0) * context + shape.architecture.linear_state_bytes


class ForgetsLinearState(Sizes):
    def kv_bytes(self, shape: EngineShape, context: int) -> float:
        return memory.kv_bytes(shape, context) - shape.architecture.linear_state_bytes


class CutsALatentOverRanks(Sizes):
    def kv_bytes(self, shape: EngineShape, context: int) -> float:
        return memory.kv_bytes(replace(shape, tensor_parallel_count=1), context) / shape.tensor_parallel_count


class KeepsTheWindowOpenOneTokenLonger(Sizes):
    def kv_bytes_per_token(self, shape: EngineShape, context: int) -> float:
        return memory.kv_bytes_per_token(shape, max(0, context - 1))


class CachesAlwaysInBf16(Sizes):
    def kv_bytes(self, shape: EngineShape, context: int) -> float:
        narrow = shape.kv_format is NumberFormat.FP4
        return memory.kv_bytes(replace(shape, kv_format=NumberFormat.BF16) if narrow else shape, context)


class ReadsEverything(Sizes):
    def read_elements(self, model: Architecture, context: int) -> float:
        return model.kv_elements(context + 1)


class SkipsTheIndexScan(Sizes):
    def read_elements(self, model: Architecture, context: int) -> float:
        index = sum(group.count * group.index_elements * context for group in model.attention)
        return model.decode_read_elements(context) - index


class LosesTheContextOfAChunk(Sizes):
    def prefill_flop(self, model: Architecture, new: int, context: int) -> float:
        return model.prefill_attention_flop(new, context // 2)


class AttendsToEverythingInAWindow(Sizes):
    def prefill_flop(self, model: Architecture, new: int, context: int) -> float:
        pairs = (context + new) ** 2 - context**2
        return float(sum(group.count * group.prefill_pair_flop * pairs for group in model.attention)) + new


class DecodesOneTokenShort(Sizes):
    def decode_flop(self, model: Architecture, context: int) -> float:
        return model.decode_attention_flop(max(1, context // 2))


class HitsNewExpertsWithEveryToken(Sizes):
    def experts_hit(self, model: Architecture, tokens: float) -> float:
        return model.experts_active * tokens


class SharesStagesEvenly(Sizes):
    def fullest_device_weight_bytes(self, shape: EngineShape) -> float:
        return 0.9 * memory.weight_bytes(shape) / shape.device_count


class WidensFp4Weights(Sizes):
    def weight_bytes(self, shape: EngineShape) -> float:
        narrow = shape.weight_format is NumberFormat.FP4
        return memory.weight_bytes(replace(shape, weight_format=NumberFormat.BF16) if narrow else shape)


class AdmitsOneTooMany(Sizes):
    def largest_batch(self, shape: EngineShape, context: int) -> int:
        return super().largest_batch(shape, context) + shape.data_parallel_count


class LeavesRoom(Sizes):
    def largest_batch(self, shape: EngineShape, context: int) -> int:
        return max(0, super().largest_batch(shape, context) - shape.data_parallel_count)


@pytest.mark.parametrize(
    "faulty",
    [
        GrowsPastItsWindows,
        ForgetsLinearState,
        CutsALatentOverRanks,
        KeepsTheWindowOpenOneTokenLonger,
        CachesAlwaysInBf16,
        ReadsEverything,
        SkipsTheIndexScan,
        LosesTheContextOfAChunk,
        AttendsToEverythingInAWindow,
        DecodesOneTokenShort,
        HitsNewExpertsWithEveryToken,
        SharesStagesEvenly,
        WidensFp4Weights,
        AdmitsOneTooMany,
        LeavesRoom,
    ],
)
def test_a_planted_fault_is_caught(faulty: type[Sizes]) -> None:
    @given(cases())
    @settings(
        max_examples=600, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def search(case: Case) -> None:
        check(faulty(), case)

    with pytest.raises(AssertionError):
        search()
