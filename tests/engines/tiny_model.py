"""A Llama model of 0.8 MB with random weights and a byte tokenizer, as files that vLLM serves; nothing is downloaded.

Owns: the folder's files. Does not own: what serves them (`vllm_process`). The weights are drawn from a fixed seed, so
that greedy answers are the same in every run on one machine. The safetensors format is written by hand: 8 bytes of
length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# The least that vLLM's Llama takes with two layers and grouped heads; its CPU attention wants heads of 32 or more.
_LAYER_COUNT, _HIDDEN, _FEED_FORWARD, _HEAD_COUNT, _KV_HEAD_COUNT, _HEAD_SIZE = 2, 128, 256, 4, 2, 32
# 256 bytes and two special tokens, filled up to a multiple of 64 as vLLM would.
_VOCABULARY = 320
CONTEXT_TOKENS = 2_048
_SEED = 20_261_130
_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}: {{ m['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)


def write_tiny_model(folder: Path) -> None:
    """Write config, tokenizer and weights into an existing folder."""
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(_config()))
    header: dict[str, Any] = {}
    body = b""
    for name, tensor in _weights():
        data = tensor.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (len(body), len(body) + len(data))}
        body += data
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + body)


def _write_tokenizer(folder: Path) -> None:
    names = ["<|bos|>", "<|eos|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[0],
        "eos_token": names[1],
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": _LAYER_COUNT,
        "num_attention_heads": _HEAD_COUNT,
        "num_key_value_heads": _KV_HEAD_COUNT,
        "head_dim": _HEAD_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _weights() -> Iterator[tuple[str, Any]]:
    generator = np.random.default_rng(_SEED)

    def drawn(rows: int, columns: int) -> Any:
        return generator.normal(0.0, columns**-0.5, (rows, columns))

    yield "model.embed_tokens.weight", drawn(_VOCABULARY, _HIDDEN)
    for layer in range(_LAYER_COUNT):
        place = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", _HEAD_COUNT * _HEAD_SIZE, _HIDDEN),
            ("self_attn.k_proj", _KV_HEAD_COUNT * _HEAD_SIZE, _HIDDEN),
            ("self_attn.v_proj", _KV_HEAD_COUNT * _HEAD_SIZE, _HIDDEN),
            ("self_attn.o_proj", _HIDDEN, _HEAD_COUNT * _HEAD_SIZE),
            ("mlp.gate_proj", _FEED_FORWARD, _HIDDEN),
            ("mlp.up_proj", _FEED_FORWARD, _HIDDEN),
            ("mlp.down_proj", _HIDDEN, _FEED_FORWARD),
        ):
            yield f"{place}.{name}.weight", drawn(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{place}.{name}.weight", np.ones(_HIDDEN)
    yield "model.norm.weight", np.ones(_HIDDEN)
    yield "lm_head.weight", drawn(_VOCABULARY, _HIDDEN)
