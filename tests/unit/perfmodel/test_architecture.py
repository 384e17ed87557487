"""Attention groups and totals: counts that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.architecture import Architecture, DenseLayers, ExpertLayers
from perfmodel.attention import (
    AttentionKind,
    AttentionLayers,
    GroupedHeads,
    Indexer,
    LatentHeads,
    LinearHeads,
    LinearKind,
    SharedHead,
)
from perfmodel.errors import ConfigError

# Four query heads of 8 share two key and value heads, hidden size 32.
HEADS = GroupedHeads(32, 4, 2, 8, 8)
# DeepSeek-V3's attention.
MLA = LatentHeads(7168, 128, 1536, 512, 128, 64, 128)


def model(*groups: AttentionLayers, experts: ExpertLayers | None = None) -> Architecture:
    return Architecture("m", 4, 32, 100, groups, (DenseLayers(2, 64),), experts)


def pairs(new_tokens: int, context_tokens: int, seen: int | None = None) -> int:
    """Pairs counted one by one; `seen`: a window of that many tokens."""
    positions = range(context_tokens + 1, context_tokens + new_tokens + 1)
    return sum(position if seen is None else min(position, seen) for position in positions)


def test_grouped_heads_weigh_and_cache_what_their_shape_says() -> None:
    layers = HEADS.layers(3)
    assert layers.parameter_count == 32 * 8 * (4 + 2 + 2 + 4)
    assert (layers.kv_elements, layers.kv_head_count, layers.head_size) == (2 * 2 * 8, 2, 8)
    assert layers.prefill_pair_flop == layers.decode_pair_flop == 4 * 4 * 8
    assert replace(HEADS, gated=True).parameter_count - HEADS.parameter_count == 32 * 4 * 8
    assert HEADS.parameter_count - replace(HEADS, value_is_key=True).parameter_count == 32 * 2 * 8
    assert replace(HEADS, key_size=12).layers(1).kv_elements == 2 * (12 + 8)


def test_a_latent_caches_one_head_and_decodes_in_its_absorbed_form() -> None:
    layers = MLA.layers(61)
    assert layers.kv_elements == 576
    assert layers.kv_head_count == 1
    assert layers.prefill_pair_flop == 2 * 128 * (192 + 128)
    assert layers.decode_pair_flop == 2 * 128 * (576 + 512)
    # 187.1 million parameters a layer, as DeepSeek-V3's report.
    assert layers.parameter_count == pytest.approx(187.1e6, rel=0.001)
    without = replace(MLA, query_rank=None)
    assert without.parameter_count > MLA.parameter_count


@pytest.mark.parametrize(("new", "context"), [(1, 0), (7, 0), (5, 3), (30, 11), (1, 64)])
def test_attention_flop_is_the_sum_over_every_pair(new: int, context: int) -> None:
    full, window, chunked = (
        HEADS.layers(2),
        HEADS.layers(2, AttentionKind.WINDOW, 6),
        HEADS.layers(2, AttentionKind.CHUNKED, 6),
    )
    flop = 2 * 4 * 4 * 8
    assert full.prefill_flop(new, context) == pairs(new, context) * flop
    assert window.prefill_flop(new, context) == pairs(new, context, 6) * flop
    in_chunk = sum((position - 1) % 6 + 1 for position in range(context + 1, context + new + 1))
    assert chunked.prefill_flop(new, context) == in_chunk * flop


def test_windows_stop_growing_and_full_layers_do_not() -> None:
    both = model(HEADS.layers(1), HEADS.layers(3, AttentionKind.WINDOW, 6))
    assert [both.kv_elements_per_token_at(context) for context in (0, 5, 6, 1000)] == [4 * 32, 4 * 32, 32, 32]
    assert both.kv_elements(5) == 5 * 4 * 32
    assert both.kv_elements(100) == (100 + 3 * 6) * 32
    assert both.decode_read_elements(100) == both.kv_elements(100)
    assert both.kv_elements_per_token == 128
    assert both.attention_flop_per_pair == 4 * 4 * 8


def test_a_sparse_indexer_scans_every_key_and_reads_the_chosen() -> None:
    layers = MLA.layers(2, Indexer(64, 128, 2048, 1536))
    assert layers.parameter_count - MLA.parameter_count == 1536 * 64 * 128 + 7168 * (128 + 64)
    assert layers.held_elements(100_000) == 2 * 100_000 * (576 + 128)
    assert layers.read_elements(1000) == 2 * 1000 * (576 + 128)
    assert layers.read_elements(100_000) == 2 * (2048 * 576 + 100_000 * 128)
    assert layers.decode_flop(100_000) == 2 * (2048 * 2 * 128 * 1088 + 100_000 * 2 * 64 * 128)
    # Short prompts attend to everything in the dense form, long ones to the chosen: never more than dense.
    dense = MLA.layers(2)
    index = 2 * 2 * 64 * 128
    assert layers.prefill_flop(1000, 0) == dense.prefill_flop(1000, 0) + index * pairs(1000, 0)
    assert layers.prefill_flop(100_000, 0) < dense.prefill_flop(100_000, 0)
    borrowed = MLA.layers(2, Indexer(64, 128, 2048, 1536, owned=False))
    assert (borrowed.index_elements, borrowed.index_pair_flop, borrowed.top_k_count) == (0, 0, 2048)


def test_a_compressed_cache_keeps_one_entry_for_several_tokens() -> None:
    head = SharedHead(7168, 128, 512, 1536, 16, 1024)
    window, fine, coarse = head.window_layers(61, 128), head.compressed_layers(30, 4), head.compressed_layers(31, 128)
    whole = Architecture("v4", 61, 7168, 129280, (window, fine, coarse))
    assert whole.kv_elements_per_token_at(1000) == 30 * 512 // 4 + 31 * 512 // 128
    assert whole.kv_elements_per_token_at(0) == 61 * 512 + 3964
    assert whole.kv_elements(128_000) == 61 * 512 * 128 + 3964 * 128_000
    assert (fine.parameter_count, coarse.parameter_count) == (0, 0)
    assert whole.head_count == 128


@pytest.mark.parametrize(
    ("heads", "state_bytes"),
    [
        # Published per-sequence state of one layer: Qwen3-Next, Kimi-K3, Nemotron-3-Nano, Nemotron-H.
        (LinearHeads(LinearKind.GATED_DELTANET, 2048, 16, 128, 32, 128), 77266944 // 36),
        (LinearHeads(LinearKind.KDA, 7168, 96, 128, 96, 128, 2), 217055232 // 69),
        (LinearHeads(LinearKind.MAMBA2, 2688, 8, 128, 64, 64), 49082368 // 23),
        (LinearHeads(LinearKind.MAMBA2, 8192, 8, 256, 256, 64, 2), 459620352 // 54),
    ],
)
def test_a_linear_layer_keeps_a_constant_state_and_no_cache(heads: LinearHeads, state_bytes: int) -> None:
    layers = heads.layers(3)
    assert layers.state_bytes == state_bytes
    assert layers.held_elements(10_000) == layers.added_elements(0) == layers.read_elements(10_000) == 0
    state = heads.value_head_count * heads.key_size * heads.value_size
    assert layers.prefill_flop(10, 1000) == 10 * layers.decode_flop(1000) == 3 * 10 * 6 * state
    hybrid = model(HEADS.layers(1), layers)
    assert hybrid.linear_state_bytes == 3 * state_bytes
    assert hybrid.head_count == 4


def test_experts_count_their_routed_shared_and_latent_parts() -> None:
    experts = ExpertLayers(2, 16, 2, 24, shared_count=1, shared_intermediate_size=48)
    moe = model(HEADS.layers(4), experts=experts)
    one = 3 * 32 * 24
    dense = 4 * HEADS.parameter_count + 2 * 3 * 32 * 64 + 2 * (32 * 16 + 3 * 32 * 48)
    assert moe.expert_parameter_count == one
    assert moe.routed_parameter_count == 2 * 16 * one
    assert moe.linear_parameter_count == dense
    assert moe.parameter_count == dense + 2 * 16 * one + 2 * 3200
    assert moe.active_parameter_count == dense + 2 * 2 * one + 3200
    assert moe.active_linear_flop_per_token == 2 * (dense + 2 * 2 * one)
    assert (moe.experts_total, moe.experts_active, moe.experts_shared, moe.moe_layer_count) == (16, 2, 1, 2)
    assert moe.intermediate_size == 2 * 24 + 48
    latent = model(HEADS.layers(4), experts=replace(experts, latent_size=8, matrix_count=2))
    assert latent.expert_parameter_count == 2 * 8 * 24


def test_experts_hit_saturate_at_all_of_them() -> None:
    # DeepSeek-R1 at 64 sequences hits 222 of 256 experts, Maverick 50 of 128.
    r1 = model(HEADS.layers(4), experts=ExpertLayers(2, 256, 8, 24))
    maverick = model(HEADS.layers(4), experts=ExpertLayers(2, 128, 1, 24))
    assert r1.experts_hit(64) == pytest.approx(222, abs=0.5)
    assert maverick.experts_hit(64) == pytest.approx(50, abs=0.6)
    assert r1.experts_hit(1) == pytest.approx(8)
    assert r1.experts_hit(1e6) == pytest.approx(256)
    assert model(HEADS.layers(4)).experts_hit(64) == 0


def test_tied_embeddings_are_counted_once() -> None:
    untied = model(HEADS.layers(4))
    tied = replace(untied, tied_embeddings=True)
    assert untied.parameter_count - tied.parameter_count == 3200
    assert untied.active_parameter_count == tied.active_parameter_count


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: GroupedHeads(32, 4, 3, 8, 8), "head_count 4 is no multiple of kv_head_count 3"),
        (lambda: HEADS.layers(1, AttentionKind.WINDOW), "window_tokens is None; expected a count"),
        (lambda: HEADS.layers(1, AttentionKind.FULL, 8), "window_tokens is 8"),
        (lambda: HEADS.layers(0), "count is 0; expected at least 1"),
        (lambda: HEADS.layers(1, AttentionKind.CHUNKED, 0), "window_tokens is 0"),
        (lambda: ExpertLayers(1, 4, 5, 8), "active_count is 5; expected 1 to the 4 experts"),
        (model, "attention is empty"),
        (lambda: replace(model(HEADS.layers(4)), hidden_size=0), "hidden_size is 0"),
        (lambda: replace(model(HEADS.layers(4)), published_parameter_count=10**9), "the shapes give"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fault: object, message: str) -> None:
    assert callable(fault)
    with pytest.raises(ConfigError, match=message):
        fault()
