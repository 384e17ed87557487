"""Reads a Hugging Face `config.json` into an `Architecture`.

Owns: which field means what in which family (the names and defaults of transformers' configuration classes), for dense
and mixture-of-experts decoders with grouped-query, latent, windowed, chunked, compressed and linear layers. Does not
own: a layer's arithmetic (`attention`) or the shipped catalogue (`catalog`). A field that decides a size and is not
there is one sentence: a default is taken only where transformers' class for the family defines it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from perfmodel.adapters.hf_fields import Fields
from perfmodel.adapters.hf_layers import attention_groups, layer_plan
from perfmodel.architecture import Architecture, DenseLayers, ExpertLayers
from perfmodel.errors import ConfigError

# Families whose feed-forward layers have two matrices instead of a gated three.
_UNGATED = frozenset(
    ("bloom", "falcon", "gpt2", "gptj", "gpt_bigcode", "gpt_neox", "nemotron", "nemotron_h", "opt", "phi", "starcoder2")
)

# Families whose feed-forward layers are four times as wide as the hidden state unless said otherwise.
_FOUR_TIMES = frozenset(("bloom", "falcon", "gpt2", "gptj", "gpt_bigcode"))

# Families that share embedding and output head unless said otherwise (transformers' default; most classes turn it off).
_TIED = frozenset(
    ("bloom", "falcon", "gpt2", "gpt_bigcode", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text")
)

# Names of the same thing in different families, most common first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts")
_SHARED_SIZE = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
    "share_expert_dim",
)  # fmt: skip
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")

# Number formats of plain checkpoints; a 32-bit one is served at 16 bits.
_PLAIN_FORMATS = {"bfloat16": "bf16", "float16": "bf16", "float32": "bf16"}


# A config.json has some kilobytes; what is beyond this (a checkpoint, say) is something else and is not read.
_MOST_FILE_BYTES = 16_000_000


def read_config(path: Path) -> Architecture:
    """The model of a `config.json`, or of the one in this folder. Raises ConfigError in one sentence."""
    file = path / "config.json" if path.is_dir() else path
    try:
        size = file.stat().st_size
        if size > _MOST_FILE_BYTES:
            raise ConfigError(f"{file} has {size} bytes; expected a Hugging Face config.json of at most 16 MB")
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as fault:
        raise ConfigError(f"model is {str(path)!r}: {file} cannot be read ({fault.strerror})") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply; expected a Hugging Face config.json") from None
    except ValueError as fault:
        raise ConfigError(f"{file} is not JSON ({fault}); expected a Hugging Face config.json") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds {type(content).__name__}; expected an object of configuration fields")
    name = content.get("_name_or_path")
    named = name if isinstance(name, str) and name and not name.startswith((".", "/")) else file.resolve().parent.name
    return from_config(content, named, str(file))


def from_config(content: Mapping[str, object], name: str, where: str) -> Architecture:
    """The model of a parsed configuration; `where` names it in faults. Multimodal ones are read by `text_config`."""
    if content.get("is_encoder_decoder") is True:
        raise ConfigError(f"{where}: is_encoder_decoder is true; expected a decoder")
    nested = content.get("text_config")
    fields = Fields({**content, **nested} if isinstance(nested, dict) else content, where)
    hidden = fields.count(*_HIDDEN)
    plan = layer_plan(fields, fields.count(*_LAYERS))
    native, dense = _formats(fields)
    try:
        return Architecture(
            name=name,
            layer_count=plan.layer_count,
            hidden_size=hidden,
            vocabulary_size=fields.count("vocab_size"),
            attention=attention_groups(fields, plan, hidden),
            feed_forward=_feed_forward(fields, plan.mlp_layers, hidden),
            experts=_experts(fields, plan.moe_layers),
            tied_embeddings=fields.flag("tie_word_embeddings", fields.family in _TIED),
            mtp_layer_count=fields.optional_count(*_MTP) or 0,
            max_context_tokens=fields.optional_count(*_CONTEXT),
            native_format=native,
            dense_format=dense,
        )
    except ConfigError as fault:
        raise fault if where in str(fault) else ConfigError(f"{where}: {fault}") from None


def _feed_forward(fields: Fields, layer_count: int, hidden: int) -> tuple[DenseLayers, ...]:
    if layer_count == 0:
        return ()
    matrices = 2 if fields.family in _UNGATED else 3
    names = ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner")
    width = fields.optional_count(*names)
    if width is None:
        width = 4 * hidden if fields.family in _FOUR_TIMES else fields.count("intermediate_size")
    return (DenseLayers(layer_count, width, matrices),)


def _experts(fields: Fields, layer_count: int) -> ExpertLayers | None:
    if layer_count == 0:
        return None
    width = fields.optional_count("moe_intermediate_size", "expert_ffn_hidden_size")
    if width is None:
        width = fields.count("intermediate_size")
    shared_count = fields.optional_count(*_SHARED_COUNT)
    shared_size = fields.optional_count(*_SHARED_SIZE)
    if fields.family in ("llama4", "llama4_text"):
        shared_count, shared_size = 1, width
    if shared_size is None:
        shared_size = (shared_count or 0) * width
    return ExpertLayers(
        layer_count=layer_count,
        expert_count=fields.count(*_EXPERTS),
        active_count=fields.count(*_EXPERTS_PER_TOKEN),
        intermediate_size=width,
        shared_count=shared_count or (1 if shared_size else 0),
        shared_intermediate_size=shared_size,
        latent_size=fields.optional_count("moe_latent_size"),
        matrix_count=2 if fields.family in _UNGATED else 3,
    )


def _formats(fields: Fields) -> tuple[str | None, str | None]:
    """Number format of the checkpoint, and the wider one that it keeps outside of the experts (or None)."""
    plain = fields.optional_text("torch_dtype", "dtype")
    wide = None if plain is None else _PLAIN_FORMATS.get(plain)
    quantised = fields.optional_mapping("quantization_config")
    if quantised is None:
        return ("fp4", "fp8") if fields.optional_text("expert_dtype") == "fp4" else (wide, None)
    method = str(quantised.get("quant_method", quantised.get("quant_algo", ""))).lower()
    if method == "mxfp4":
        return "fp4", wide
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8", None
    bits = quantised.get("bits", quantised.get("num_bits"))
    if method in ("gptq", "awq", "auto_round") and bits in (4, 8):
        return ("int4" if bits == 4 else "int8"), None
    if "nvfp4" in method or "nvfp4" in str(quantised.get("quant_algo", "")).lower():
        return "fp4", None
    return None, None  # another scheme: the format must be named by who asks
