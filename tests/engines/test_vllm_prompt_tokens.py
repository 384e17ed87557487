"""A real vLLM: the token ids that we work out for a request are those that it computes, for every shape of request.

Owns: the parity of our rendering and tokenising with the `prompt_token_ids` and token counts it reports. Does not own:
blocks and events (`test_vllm_kv_index`), or the rules of each shape (`unit/router/test_prompt_forms`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.adapters.engine_tokenize import engine_tokens
from router.adapters.prompt_tokens import Prompt, PromptTokens
from router.adapters.tokenizer_folder import load_folder
from router.kv_keys import chain_keys, token_bytes
from router.prompt_chains import ChainScope, PromptKeys
from router.prompt_forms import PromptShape
from tests.engines.tiny_model import write_tiny_model
from tests.engines.vllm_process import MODEL, START_LIMIT_S, VllmProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(START_LIMIT_S + 60)]

# Blocks of one token: the keys tell every id.
SCOPE = ChainScope(1, 1)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}
CHAT = [
    {"role": "system", "content": "x-anthropic-billing-header: cch=1f2e\nbe good"},
    {"role": "user", "content": [{"type": "text", "text": "thère"}, {"type": "text", "text": "你 <|eos|> 🙂"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "ok"}]},
    {"role": "developer", "content": "mind the gap"},
]
BLOCKS = [
    {"role": "user", "content": "go"},
    {"role": "system", "content": "a reminder"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "well"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"q": "é"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "found"}]},
            {"type": "text", "text": "on"},
        ],
    },
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "found"},
    {"role": "assistant", "content": "well"},
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> PromptTokens:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    made = PromptTokens(b"secret", time.monotonic)
    made.set_models({MODEL: load_folder(folder)})
    return made


def keys(tokens: PromptTokens, shape: PromptShape, fields: dict[str, Any]) -> PromptKeys:
    found = tokens.keys_now(Prompt(MODEL, shape, fields, SCOPE))
    assert isinstance(found, PromptKeys), found
    return found


def call(vllm: VllmProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{vllm.url}{path}", json={"model": MODEL, **body}, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    read: dict[str, Any] = answer.json()
    return read


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": CHAT},
        {"messages": CHAT[:2], "add_generation_prompt": False},
        {"messages": CHAT[:2], "add_special_tokens": True, "reasoning_effort": "low"},
    ],
)
def test_chats(vllm: VllmProcess, tokens: PromptTokens, fields: dict[str, Any]) -> None:
    answer = call(vllm, "/v1/chat/completions", {**fields, "max_tokens": 1, "return_token_ids": True})
    assert keys(tokens, PromptShape.CHAT, fields).keys == chain_keys(1, token_bytes(answer["prompt_token_ids"]), 1)


@pytest.mark.parametrize("prompt", ["plain", "with <|bos|> in it é🙂", [5, 6, 7]])
def test_completions(vllm: VllmProcess, tokens: PromptTokens, prompt: Any) -> None:
    answer = call(vllm, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "return_token_ids": True})
    ids = answer["choices"][0]["prompt_token_ids"]
    assert keys(tokens, PromptShape.COMPLETION, {"prompt": prompt}).keys == chain_keys(1, token_bytes(ids), 1)


def test_responses(vllm: VllmProcess, tokens: PromptTokens) -> None:
    fields = {"instructions": "be good", "input": ITEMS}
    used = call(vllm, "/v1/responses", {**fields, "max_output_tokens": 1})["usage"]
    assert keys(tokens, PromptShape.RESPONSES, fields).total_tokens == used["input_tokens"]


def test_anthropic_messages(vllm: VllmProcess, tokens: PromptTokens) -> None:
    fields = {"system": [{"type": "text", "text": "x-anthropic-billing-header: a"}], "messages": BLOCKS}
    used = call(vllm, "/v1/messages", {**fields, "max_tokens": 1})["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert keys(tokens, PromptShape.MESSAGES, fields).total_tokens == sum(used.get(part) or 0 for part in parts)


async def test_its_own_tokenize(vllm: VllmProcess, tokens: PromptTokens) -> None:
    fields = {"messages": CHAT}
    async with httpx.AsyncClient(trust_env=False) as client:
        ids = await engine_tokens(client, vllm.url, MODEL, PromptShape.CHAT, fields, deadline_s=30.0)
    assert isinstance(ids, list)
    assert keys(tokens, PromptShape.CHAT, fields).keys == chain_keys(1, token_bytes(ids), 1)
