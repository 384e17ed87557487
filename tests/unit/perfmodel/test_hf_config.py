"""Hugging Face configurations of many families give the catalogue's sizes, and a missing field is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfmodel.adapters.catalog import Catalog, load_catalog
from perfmodel.adapters.hf_config import from_config, read_config
from perfmodel.architecture import Architecture
from perfmodel.errors import ConfigError

Config = dict[str, object]

LLAMA: Config = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3: Config = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 64, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL: Config = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3_MOE: Config = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 40960,
}  # fmt: skip
DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V32: Config = {
    **DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
}  # fmt: skip
GPT_OSS: Config = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
LLAMA4: Config = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 202048, "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8192, "no_rope_layers": [], "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
GEMMA3: Config = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
        "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
    },
}  # fmt: skip
GEMMA2: Config = {
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096,
    "max_position_embeddings": 8192,
}  # fmt: skip
QWEN3_NEXT: Config = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10,
    "decoder_sparse_step": 1, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
}  # fmt: skip
NEMOTRON_H: Config = {
    "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072, "n_routed_experts": 128,
    "num_experts_per_tok": 6, "n_shared_experts": 1, "hybrid_override_pattern": "M*E" * 6 + "ME" * 17,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "mamba_ssm_cache_dtype": "float32", "tie_word_embeddings": False, "max_position_embeddings": 262144,
}  # fmt: skip
DEEPSEEK_V4: Config = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "vocab_size": 129280, "q_lora_rank": 1024,
    "o_groups": 8, "o_lora_rank": 1024, "index_topk": 512, "index_n_heads": 64, "index_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0], "expert_dtype": "fp4", "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GLM45: Config = {
    "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151552, "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "max_position_embeddings": 131072,
}  # fmt: skip
BLOOM: Config = {
    "model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880,
    "seq_length": 2048,
}  # fmt: skip
GPTJ: Config = {
    "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_inner": None, "n_positions": 2048,
    "vocab_size": 50400, "tie_word_embeddings": False,
}  # fmt: skip
FALCON: Config = {
    "model_type": "falcon", "hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232,
    "num_kv_heads": 8, "new_decoder_architecture": True, "multi_query": True, "vocab_size": 65024,
    "max_position_embeddings": 2048,
}  # fmt: skip

FAMILIES = [
    ("Llama-3.1-70B", LLAMA),
    ("Qwen3-32B", QWEN3),
    ("Mixtral-8x7B", MIXTRAL),
    ("Qwen3-30B-A3B", QWEN3_MOE),
    ("DeepSeek-V3", DEEPSEEK_V3),
    ("DeepSeek-V3.2", DEEPSEEK_V32),
    ("DeepSeek-V4-Flash", DEEPSEEK_V4),
    ("gpt-oss-120b", GPT_OSS),
    ("Llama-4-Maverick", LLAMA4),
    ("Gemma-3-27B", GEMMA3),
    ("Gemma-2-9B", GEMMA2),
    ("Qwen3-Next-80B-A3B", QWEN3_NEXT),
    ("Nemotron-3-Nano-30B-A3B", NEMOTRON_H),
    ("GLM-4.5", GLM45),
    ("BLOOM-176B", BLOOM),
    ("GPT-J-6B", GPTJ),
    ("Falcon-180B", FALCON),
]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def sizes(model: Architecture) -> dict[str, object]:
    """What decides bytes and seconds."""
    return {
        "parameters": model.parameter_count,
        "active": model.active_parameter_count,
        "experts": (model.moe_layer_count, model.experts_total, model.experts_active, model.experts_shared),
        "kv": [model.kv_elements(context) for context in (1, 100, 5000, 1_000_000)],
        "added": [model.kv_elements_per_token_at(context) for context in (0, 500, 10_000)],
        "reads": [model.decode_read_elements(context) for context in (100, 10_000)],
        "flop": [model.prefill_attention_flop(10_000), model.decode_attention_flop(10_000)],
        "state": model.linear_state_bytes,
        "mtp": model.mtp_layer_count,
        "heads": (model.head_count, model.kv_head_count),
        "layers": model.layer_count,
        "tied": model.tied_embeddings,
    }


@pytest.mark.parametrize(("name", "config"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_a_configuration_gives_the_catalogues_model(catalog: Catalog, name: str, config: Config) -> None:
    assert sizes(from_config(config, name, "config.json")) == sizes(catalog.model(name))


def test_a_path_is_a_model_name(catalog: Catalog, tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    by_folder, by_file = catalog.model(str(folder)), catalog.model(str(folder / "config.json"))
    assert by_folder == by_file
    assert (by_folder.name, by_folder.native_format, by_folder.max_context_tokens) == ("my-llama", "bf16", 131_072)


@pytest.mark.parametrize(
    ("config", "native", "dense"),
    [
        (LLAMA, "bf16", None),
        (DEEPSEEK_V3, "fp8", None),
        (GPT_OSS, "fp4", "bf16"),
        (DEEPSEEK_V4, "fp4", "fp8"),
        (QWEN3, None, None),
        ({**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}, "int4", None),
        ({**LLAMA, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "fp4", None),
        ({**LLAMA, "quantization_config": {"quant_method": "exotic"}}, None, None),
    ],
)
def test_the_checkpoints_format_is_read_or_unknown(config: Config, native: str | None, dense: str | None) -> None:
    model = from_config(config, "m", "config.json")
    assert (model.native_format, model.dense_format) == (native, dense)


def test_sliding_windows_of_old_families() -> None:
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
    assert from_config(mistral, "m", "c").kv_elements(10_000) == 4096 * 163_840
    qwen2 = {
        **LLAMA,
        "model_type": "qwen2",
        "sliding_window": 4096,
        "use_sliding_window": True,
        "max_window_layers": 60,
    }
    assert from_config(qwen2, "m", "c").kv_elements(10_000) == (60 * 10_000 + 20 * 4096) * 2048
    assert from_config({**qwen2, "use_sliding_window": False}, "m", "c").kv_elements(10_000) == 10_000 * 163_840
    mqa = {**FALCON, "new_decoder_architecture": False}
    assert from_config(mqa, "m", "c").kv_head_count == 1


@pytest.mark.parametrize(
    ("config", "field"),
    [(LLAMA, field) for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")]
    + [(LLAMA, "intermediate_size"), (LLAMA, "num_key_value_heads")]
    + [(DEEPSEEK_V3, field) for field in ("qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim")]
    + [(MIXTRAL, "num_experts_per_tok"), (DEEPSEEK_V32, "index_head_dim"), (GPT_OSS, "sliding_window")]
    + [(QWEN3_NEXT, "linear_key_head_dim"), (NEMOTRON_H, "ssm_state_size"), (DEEPSEEK_V4, "o_groups")],
)
def test_a_missing_field_is_one_sentence(tmp_path: Path, config: Config, field: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in config.items() if name != field}))
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value) == f"{path}: {field} is missing; expected a whole number above 0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; expected a whole number"),
        ({"hidden_size": 0}, "hidden_size is 0; expected a whole number above 0"),
        ({"hidden_size": 8190}, "num_attention_heads is 64; expected a divisor of hidden_size 8190, or head_dim"),
        ({"num_key_value_heads": 7}, "head_count 64 is no multiple of kv_head_count 7"),
        ({"layer_types": ["full_attention"]}, "expected a kind for each of the 80 layers"),
        ({"layer_types": ["ring_attention"] * 80}, "layer_types is 'ring_attention'; expected one of full_attention"),
        ({"layer_types": "full"}, "layer_types is 'full'; expected a list"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true; expected a decoder"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
        ({"hybrid_override_pattern": "MX"}, "expected letters of M"),
    ],
)
def test_a_field_that_cannot_be_is_one_sentence(change: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config({**LLAMA, **change}, "m", "config.json")


def test_a_file_that_is_no_configuration_is_one_sentence(tmp_path: Path, catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json cannot be read \(No such file"):
        catalog.model(str(tmp_path / "nothing.json"))
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        catalog.model(str(tmp_path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds list; expected an object"):
        catalog.model(str(path))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 200_000, "nested too deeply"),
        (json.dumps({**LLAMA, "layer_types": [["x"], {}]}), r"layer_types is \['x'\]; expected one of full_attention"),
        (
            json.dumps({**LLAMA, "num_hidden_layers": 10**12}),
            "num_hidden_layers is 1000000000000; expected at most 10000",
        ),
        (
            json.dumps({**QWEN3_MOE, "mlp_only_layers": [[1]]}),
            r"mlp_only_layers is \[\[1\]\]; expected a list of whole",
        ),
        (" " * 16_000_001, "has 16000001 bytes; expected .* at most 16 MB"),
    ],
    ids=["nested", "kinds of kinds", "layers", "list of lists", "large"],
)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=sentence) as raised:
        read_config(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["", "x" * 500, "a/" * 3000, "a\0b"], ids=["empty", "long", "deep", "null byte"])
def test_a_name_that_is_no_path_is_an_unknown_model(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^model is .*; the closest of the"):
        load_catalog().model(name)
