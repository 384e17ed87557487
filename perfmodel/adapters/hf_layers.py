"""Which layer of a Hugging Face configuration is what, and the attention groups that follow.

Owns: layer kinds (full, window, chunked, linear, feed-forward alone, experts) from each family's fields. Does not own:
feed-forward widths and totals (`hf_config`). Sources: transformers' configuration classes and the model repositories'
own ones (DeepSeek-V4, Nemotron-H).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from perfmodel.adapters.hf_fields import Fields
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

# More layers than any model has (published ones: at most a few hundred); layers are listed one by one.
_MOST_LAYERS = 10_000

# What `layer_types` calls the kinds.
_LAYER_TYPES = {
    "full_attention": "full", "attention": "full", "global_attention": "full",
    "sliding_attention": "window", "sliding_window_attention": "window", "local_attention": "window",
    "chunked_attention": "chunked",
    "linear_attention": "linear", "mamba": "linear",
}  # fmt: skip

# Letters of Nemotron-H's `hybrid_override_pattern`: Mamba, attention, feed-forward, experts.
_PATTERN = {"M": "linear", "*": "full", "-": "mlp", "E": "moe"}

# Families whose every n-th layer is full and the others have a window, when `layer_types` is not there
# (transformers' defaults).
_WINDOW_PATTERN = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "llama4": 4,
    "llama4_text": 4,
}

# Families that had one KV head per query head before `num_key_value_heads` existed.
_MULTI_HEAD = frozenset(("bloom", "gpt2", "gptj", "gpt_neox", "opt", "phi"))

_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How many layers of each kind: `attention` by kind, feed-forward and expert layers."""

    layer_count: int
    attention: Counter[str]
    mlp_layers: int
    moe_layers: int


def layer_plan(fields: Fields, layer_count: int) -> LayerPlan:
    """The layers of a configuration. Raises ConfigError for a kind of layer that cannot be sized."""
    if layer_count > _MOST_LAYERS:
        raise fields.fault("num_hidden_layers", layer_count, f"at most {_MOST_LAYERS} layers")
    pattern = fields.optional_text("hybrid_override_pattern")
    if pattern is not None:
        unknown = set(pattern) - set(_PATTERN)
        if unknown:
            raise fields.fault("hybrid_override_pattern", pattern, f"letters of {' '.join(_PATTERN)}")
        kinds = Counter(_PATTERN[letter] for letter in pattern)
        attention = Counter({kind: kinds[kind] for kind in ("full", "linear") if kinds[kind]})
        return LayerPlan(layer_count, attention, kinds["mlp"], kinds["moe"])
    moe = _moe_layers(fields, layer_count)
    return LayerPlan(layer_count, Counter(_attention_kinds(fields, layer_count)), layer_count - moe, moe)


def _attention_kinds(fields: Fields, layer_count: int) -> list[str]:
    listed = fields.optional_list("layer_types")
    if listed is not None:
        for kind in listed:
            if not isinstance(kind, str) or kind not in _LAYER_TYPES:
                raise fields.fault("layer_types", kind, f"one of {', '.join(_LAYER_TYPES)}")
        if len(listed) < layer_count:
            raise fields.fault("layer_types", listed, f"a kind for each of the {layer_count} layers")
        return [_LAYER_TYPES[kind] for kind in listed[:layer_count]]
    interval = fields.optional_count("full_attention_interval")
    if interval:
        return ["full" if (layer + 1) % interval == 0 else "linear" for layer in range(layer_count)]
    chunk = fields.optional_count("attention_chunk_size")
    if chunk:
        rotary = fields.optional_list("no_rope_layers") or []
        every = _WINDOW_PATTERN.get(fields.family, 4)
        positions = rotary if len(rotary) == layer_count else [int((i + 1) % every != 0) for i in range(layer_count)]
        return ["chunked" if chunked else "full" for chunked in positions]
    if not fields.optional_count("sliding_window") or not fields.flag("use_sliding_window", True):
        return ["full"] * layer_count
    every = fields.optional_count("sliding_window_pattern") or _WINDOW_PATTERN.get(fields.family, 0)
    if every:
        return ["full" if (layer + 1) % every == 0 else "window" for layer in range(layer_count)]
    first = fields.optional_count("max_window_layers") or 0  # Qwen2: the layers before it are full
    return ["full"] * min(first, layer_count) + ["window"] * max(0, layer_count - first)


def _moe_layers(fields: Fields, layer_count: int) -> int:
    """Layers with routed experts."""
    if not (fields.optional_count("num_local_experts", "num_experts", "n_routed_experts") or 0) > 1:
        return 0
    listed = fields.optional_list("moe_layers")
    if listed is not None:
        return len(listed)
    frequency = fields.raw("moe_layer_freq")
    if isinstance(frequency, list):
        return sum(1 for layer in frequency[:layer_count] if layer)
    step = fields.optional_count("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq") or 1
    first = fields.optional_count("first_k_dense_replace", "num_dense_layers") or 0
    without = fields.optional_list("mlp_only_layers") or []
    if not all(isinstance(layer, int) for layer in without):
        raise fields.fault("mlp_only_layers", without, "a list of whole numbers")
    dense = set(without)
    if fields.has("interleave_moe_layer_step") or fields.has("decoder_sparse_step"):
        return sum((layer + 1) % step == 0 and layer not in dense and layer >= first for layer in range(layer_count))
    return sum(layer % step == 0 and layer not in dense and layer >= first for layer in range(layer_count))


def attention_groups(fields: Fields, plan: LayerPlan, hidden: int) -> tuple[AttentionLayers, ...]:
    """The groups of attention layers. Raises ConfigError that names the missing field."""
    if fields.optional_list("compress_ratios") is not None:
        return _compressed(fields, plan, hidden)
    groups: list[AttentionLayers] = []
    for kind in ("full", "window", "chunked"):
        count = plan.attention[kind]
        if count and fields.has("kv_lora_rank"):
            groups.append(_latent(fields, hidden, count))
        elif count:
            groups.append(_grouped(fields, hidden, count, AttentionKind(kind)))
    if plan.attention["linear"]:
        groups.append(_linear(fields, hidden).layers(plan.attention["linear"]))
    return tuple(groups)


def _grouped(fields: Fields, hidden: int, count: int, kind: AttentionKind) -> AttentionLayers:
    heads = fields.count(*_HEADS)
    kv_heads, size = _kv_heads(fields, heads), fields.optional_count("head_dim", "attention_head_dim")
    if size is None:
        if hidden % heads:
            raise fields.fault("num_attention_heads", heads, f"a divisor of hidden_size {hidden}, or head_dim")
        size = hidden // heads
    value_size = fields.optional_count("v_head_dim") or size
    shared = False
    if kind is AttentionKind.FULL and fields.has("global_head_dim"):  # Gemma 4's global layers
        size = value_size = fields.count("global_head_dim")
        kv_heads = fields.optional_count("num_global_key_value_heads") or kv_heads
        shared = fields.flag("attention_k_eq_v", False)
    window = None
    if kind is AttentionKind.WINDOW:
        window = fields.count("sliding_window")
        kv_heads = fields.optional_count("swa_num_key_value_heads") or kv_heads
    elif kind is AttentionKind.CHUNKED:
        window = fields.count("attention_chunk_size")
    gated = fields.flag("attn_output_gate", fields.family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"))
    shape = GroupedHeads(hidden, heads, kv_heads, size, value_size, gated=gated, value_is_key=shared)
    return shape.layers(count, kind, window)


def _kv_heads(fields: Fields, heads: int) -> int:
    if fields.family == "falcon":  # the newer decoder ignores `multi_query`
        if fields.flag("new_decoder_architecture", False):
            return fields.count(*_KV_HEADS)
        return 1 if fields.flag("multi_query", True) else heads
    if fields.flag("multi_query", False):  # GPT-BigCode
        return 1
    if fields.family in _MULTI_HEAD and fields.optional_count(*_KV_HEADS) is None:
        return heads
    return fields.count(*_KV_HEADS)


def _latent(fields: Fields, hidden: int, count: int) -> AttentionLayers:
    query_rank = fields.optional_count("q_lora_rank")
    shape = LatentHeads(
        hidden_size=hidden,
        head_count=fields.count(*_HEADS),
        query_rank=query_rank,
        kv_rank=fields.count("kv_lora_rank"),
        nope_size=fields.count("qk_nope_head_dim"),
        rope_size=fields.count("qk_rope_head_dim"),
        value_size=fields.count("v_head_dim"),
    )
    return shape.layers(count, _indexer(fields, hidden if query_rank is None else query_rank))


def _indexer(fields: Fields, query_size: int) -> Indexer | None:
    if not fields.has("index_topk"):
        return None
    return Indexer(
        head_count=fields.count("index_n_heads"),
        head_size=fields.count("index_head_dim"),
        top_k_count=fields.count("index_topk"),
        query_size=query_size,
    )


def _compressed(fields: Fields, plan: LayerPlan, hidden: int) -> tuple[AttentionLayers, ...]:
    """DeepSeek-V4: a window in every layer, a compressed cache in most; the finest ratio has the indexer."""
    query_rank = fields.count("q_lora_rank")
    head = SharedHead(
        hidden_size=hidden,
        head_count=fields.count(*_HEADS),
        head_size=fields.count("head_dim"),
        query_rank=query_rank,
        output_group_count=fields.count("o_groups"),
        output_rank=fields.count("o_lora_rank"),
    )
    ratios = Counter((fields.optional_list("compress_ratios") or [])[: plan.layer_count])
    groups = [head.window_layers(plan.layer_count, fields.count("sliding_window"))]
    finest = min((ratio for ratio in ratios if ratio), default=0)
    for ratio, count in sorted(ratios.items()):
        if ratio:
            indexer = _indexer(fields, query_rank) if ratio == finest else None
            groups.append(head.compressed_layers(count, ratio, indexer))
    return tuple(groups)


def _linear(fields: Fields, hidden: int) -> LinearHeads:
    if fields.has("linear_num_value_heads"):
        return LinearHeads(
            kind=LinearKind.GATED_DELTANET,
            hidden_size=hidden,
            key_head_count=fields.count("linear_num_key_heads"),
            key_size=fields.count("linear_key_head_dim"),
            value_head_count=fields.count("linear_num_value_heads"),
            value_size=fields.count("linear_value_head_dim"),
        )
    wide = fields.optional_text("mamba_ssm_cache_dtype") == "float32"
    return LinearHeads(
        kind=LinearKind.MAMBA2,
        hidden_size=hidden,
        key_head_count=fields.count("n_groups", "mamba_n_groups"),
        key_size=fields.count("ssm_state_size", "mamba_d_state"),
        value_head_count=fields.count("mamba_num_heads", "mamba_n_heads"),
        value_size=fields.count("mamba_head_dim", "mamba_d_head"),
        state_element_bytes=4 if wide else 2,
    )
