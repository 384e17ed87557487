"""Reads the shapes of models from the data files into `Architecture`.

Owns: the fields of an entry and of its groups of layers. Does not own: the files' format (`data_files`), Hugging Face
configurations (`hf_config`) or any arithmetic on shapes (`attention`, `architecture`).
"""

from __future__ import annotations

from perfmodel.adapters.data_files import Entry
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

# Kinds of attention groups in the files.
_GROUPED = ("full", "window", "chunked")
_SHARED = ("shared_window", "compressed")
_KINDS = (*_GROUPED, "latent", *_SHARED, *LinearKind)


def architecture(entry: Entry) -> Architecture:
    """The model of one entry. Raises ConfigError that names file, model and field."""
    hidden = entry.count("hidden_size")
    experts = entry.part("experts")
    try:
        return Architecture(
            name=entry.name,
            layer_count=entry.count("layer_count"),
            hidden_size=hidden,
            vocabulary_size=entry.count("vocabulary_size"),
            attention=tuple(_attention(part, hidden) for part in entry.parts("attention")),
            feed_forward=tuple(_dense(part) for part in entry.parts("feed_forward")),
            experts=None if experts is None else _experts(experts),
            tied_embeddings=entry.flag("tied_embeddings"),
            mtp_layer_count=entry.count("mtp_layer_count", 0),
            max_context_tokens=entry.optional_count("max_context_tokens"),
            native_format=entry.optional_text("native_format"),
            dense_format=entry.optional_text("dense_format"),
            published_parameter_count=entry.optional_count("published_parameter_count"),
        )
    except ConfigError as fault:
        if str(fault).startswith(entry.file.name):
            raise
        raise ConfigError(f"{entry.file.name}: {entry.name}: {fault}") from None


def _dense(part: Entry) -> DenseLayers:
    parameters = part.optional_count("layer_parameter_count")
    return DenseLayers(
        layer_count=part.count("layer_count"),
        intermediate_size=part.count("intermediate_size", None if parameters is None else 0),
        matrix_count=part.count("matrix_count", 3),
        layer_parameter_count=parameters,
    )


def _experts(part: Entry) -> ExpertLayers:
    return ExpertLayers(
        layer_count=part.count("layer_count"),
        expert_count=part.count("expert_count"),
        active_count=part.count("active_count"),
        intermediate_size=part.count("intermediate_size"),
        shared_count=part.count("shared_count", 0),
        shared_intermediate_size=part.count("shared_intermediate_size", 0),
        latent_size=part.optional_count("latent_size"),
        matrix_count=part.count("matrix_count", 3),
    )


def _attention(part: Entry, hidden_size: int) -> AttentionLayers:
    kind = part.text("kind")
    if kind in _GROUPED:
        return _grouped(part, hidden_size, AttentionKind(kind))
    if kind == "latent":
        return _latent(part, hidden_size)
    if kind in _SHARED:
        return _shared(part, hidden_size, kind)
    if kind in tuple(LinearKind):
        return _linear(part, hidden_size, LinearKind(kind))
    raise part.fault("kind", kind, f"one of {', '.join(_KINDS)}")


def _grouped(part: Entry, hidden_size: int, kind: AttentionKind) -> AttentionLayers:
    heads = GroupedHeads(
        hidden_size=hidden_size,
        head_count=part.count("head_count"),
        kv_head_count=part.count("kv_head_count"),
        key_size=part.count("key_size"),
        value_size=part.count("value_size"),
        gated=part.flag("gated"),
        value_is_key=part.flag("value_is_key"),
    )
    return heads.layers(part.count("count"), kind, part.optional_count("window_tokens"), _indexer(part, hidden_size))


def _latent(part: Entry, hidden_size: int) -> AttentionLayers:
    query_rank = part.optional_count("query_rank")
    heads = LatentHeads(
        hidden_size=hidden_size,
        head_count=part.count("head_count"),
        query_rank=query_rank,
        kv_rank=part.count("kv_rank"),
        nope_size=part.count("nope_size"),
        rope_size=part.count("rope_size"),
        value_size=part.count("value_size"),
    )
    return heads.layers(part.count("count"), _indexer(part, hidden_size if query_rank is None else query_rank))


def _shared(part: Entry, hidden_size: int, kind: str) -> AttentionLayers:
    query_rank = part.count("query_rank")
    head = SharedHead(
        hidden_size=hidden_size,
        head_count=part.count("head_count"),
        head_size=part.count("head_size"),
        query_rank=query_rank,
        output_group_count=part.count("output_group_count"),
        output_rank=part.count("output_rank"),
    )
    if kind == "shared_window":
        return head.window_layers(part.count("count"), part.count("window_tokens"))
    return head.compressed_layers(part.count("count"), part.count("entry_tokens"), _indexer(part, query_rank))


def _linear(part: Entry, hidden_size: int, kind: LinearKind) -> AttentionLayers:
    heads = LinearHeads(
        kind=kind,
        hidden_size=hidden_size,
        key_head_count=part.count("key_head_count"),
        key_size=part.count("key_size"),
        value_head_count=part.count("value_head_count"),
        value_size=part.count("value_size"),
        state_element_bytes=part.count("state_element_bytes", 4),
    )
    return heads.layers(part.count("count"))


def _indexer(part: Entry, query_size: int) -> Indexer | None:
    """The group's sparse indexer. With `top_k_count` alone the choice is known and the indexer's own cost is not."""
    index = part.part("indexer")
    if index is None:
        top_k = part.optional_count("top_k_count")
        return None if top_k is None else Indexer(0, 0, top_k, query_size, owned=False)
    owned = index.value("owned")
    return Indexer(
        head_count=index.count("head_count"),
        head_size=index.count("head_size"),
        top_k_count=index.count("top_k_count"),
        query_size=query_size,
        owned=True if owned is None else index.flag("owned"),
    )
