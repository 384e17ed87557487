"""The simulated engine against bytes recorded from vLLM 0.32.0: the same request must get the same answer.

What cannot be equal is replaced on both sides before comparing: generated text, ids and times, and numbers that depend
on the tokenizer. Whether such a number is 0 or not is kept, so that the prefix cache must hit where it did.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from perfmodel.adapters.engine_server import EngineServer
from tests.integration.perfmodel.conftest import StartEngine

RECORDED = Path(__file__).parents[2] / "recorded" / "vllm_0.32.0"

# The recorded session's order: later ones hit what earlier ones left in the prefix cache.
SESSION = (
    "chat_nonstream_cold chat_nonstream_warm_cached chat_stream_usage chat_stream_continuous_usage chat_stream_nousage "
    "chat_n2_logprobs completion_nonstream completion_stream_usage completion_batch2 completion_token_ids_cache_salt "
    "tokenize tokenize_chat detokenize reset_prefix_cache err_model_not_found err_bad_json err_missing_messages "
    "err_bad_temperature err_context_length err_max_tokens_too_large err_404 err_embeddings_unsupported health ping "
    "load version models evict_fill_0"
).split()

_REPLACED = (
    (r'"(content|text|token|prompt)":"(?:[^"\\]|\\.)*"', r'"\1":"T"'),
    (r'"(tokens|bytes|token_strs)":\[[^\]]*\]', r'"\1":[]'),
    (r'"id":"(chatcmpl|cmpl|modelperm)-[0-9a-f]{16}"', r'"id":"\1-ID"'),
    (r'"created":\d+', '"created":0'),
    (r'"system_fingerprint":"vllm-0.32.0-[0-9a-f]{8}"', '"system_fingerprint":"F"'),
    (r'"(prompt_tokens|total_tokens|cached_tokens|created_cache_tokens|count)":[1-9]\d*', r'"\1":N'),
    (r'"logprob":-[0-9.]+', '"logprob":L'),
)


def normalised(body: str) -> str:
    for pattern, replacement in _REPLACED:
        body = re.sub(pattern, replacement, body)
    return body


def recorded_request(name: str) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((RECORDED / f"{name}.meta.json").read_text())
    return meta


def recorded_body(name: str) -> str:
    (path,) = RECORDED.glob(f"{name}.response.*")
    return path.read_bytes().decode()


async def send(client: httpx.AsyncClient, meta: dict[str, Any]) -> httpx.Response:
    body = meta["request_body"]
    if isinstance(body, dict) and isinstance(prompt := body.get("prompt"), str) and len(prompt) > 2048:
        # A token of the recorded tokenizer was two bytes of this text; here it is four.
        body = {**body, "prompt": prompt * 2}
    content = body if isinstance(body, str) else json.dumps(body) if body is not None else None
    return await client.request(
        meta["method"],
        meta["path"],
        content=content,
        headers={"content-type": "application/json", **meta["request_headers"]},
    )


async def test_every_recorded_request_gets_the_recorded_bytes(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        for name in SESSION:
            meta = recorded_request(name)
            response = await send(client, meta)
            assert response.status_code == meta["status"], name
            assert normalised(response.text) == normalised(recorded_body(name)), name
            told = [(key, value) for key, value in response.headers.items() if key not in ("date", "content-length")]
            wanted = [(key, value) for key, value in meta["response_headers"] if key not in ("date", "content-length")]
            assert told == wanted, name
            assert ("content-length" in response.headers) == any(
                key == "content-length" for key, _ in meta["response_headers"]
            )


def client_of(server: EngineServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=30)


async def test_an_aborted_stream_begins_with_the_recorded_bytes(start_engine: StartEngine) -> None:
    server = await start_engine()
    meta = recorded_request("completion_stream_aborted")
    wanted = recorded_body("completion_stream_aborted").split("\n\n")[:-1]
    async with client_of(server) as client, client.stream("POST", meta["path"], json=meta["request_body"]) as response:
        events = response.aiter_text()
        text = ""
        while text.count("\n\n") < len(wanted):
            text += await anext(events)
    assert [normalised(event) for event in text.split("\n\n")[: len(wanted)]] == [normalised(event) for event in wanted]


def test_what_is_replaced_still_tells_a_hit_from_a_miss_and_one_member_from_another() -> None:
    cold, warm = recorded_body("chat_nonstream_cold"), recorded_body("chat_nonstream_warm_cached")
    assert normalised(cold) != normalised(warm)
    assert normalised(cold) != normalised(cold.replace('"refusal":null,', ""))
    assert normalised(cold) != normalised(cold.replace('"completion_tokens":12', '"completion_tokens":11'))


# vLLM's series that the simulated engine has not: FLOP estimates, and what its web framework and Python add.
MISSING = re.compile(r"vllm:estimated_|http_|python_")
ADDED = re.compile(r"inferplane_sim:")


async def test_metrics_are_vllms_but_for_the_named_ones(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        for name in ("chat_nonstream_cold", "chat_stream_usage"):
            await send(client, recorded_request(name))
        text = (await client.get("/metrics")).text
    ours = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    vllms = set((RECORDED / "metric_names.txt").read_text().split())
    assert {name for name in vllms - ours if not MISSING.match(name)} == set()
    assert {name for name in ours - vllms if not ADDED.match(name)} == set()


async def test_metrics_have_vllms_types_labels_and_buckets(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        for name in ("chat_nonstream_cold", "chat_stream_usage"):
            await send(client, recorded_request(name))
        ours = families((await client.get("/metrics")).text)
    vllms = families((RECORDED / "metrics_after.prom").read_text())
    compared = [name for name in vllms if name in ours and name != "vllm:cache_config_info"]
    assert len(compared) > 30
    for name in compared:
        assert ours[name] == vllms[name], name


def families(text: str) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
    """Family -> (type, the label sets of its samples)."""
    return {
        family.name: (
            family.type,
            {
                (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items())))
                for sample in family.samples
            },
        )
        for family in text_string_to_metric_families(text)
    }


async def test_counters_and_histograms_count_what_happened(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        for name in ("chat_nonstream_cold", "chat_nonstream_warm_cached", "chat_n2_logprobs"):
            response = await send(client, recorded_request(name))
        prompt_tokens = response.json()["usage"]["prompt_tokens"]
        values = {
            (sample.name, sample.labels.get("source") or sample.labels.get("finished_reason")): sample.value
            for family in text_string_to_metric_families((await client.get("/metrics")).text)
            for sample in family.samples
            if "le" not in sample.labels
        }
    cached = prompt_tokens // 32 * 32
    assert values["vllm:generation_tokens_total", None] == 12 + 12 + 6
    assert values["vllm:prompt_tokens_total", None] == 4 * prompt_tokens
    assert values["vllm:prefix_cache_hits_total", None] == 3 * cached
    assert values["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 3 * cached
    assert values["vllm:request_success_total", "length"] == 4
    assert values["vllm:time_to_first_token_seconds_count", None] == 4
    assert values["vllm:inter_token_latency_seconds_count", None] == 30 - 4
    assert values["vllm:request_params_n_sum", None] == 1 + 1 + 2
    assert values["vllm:num_requests_running", None] == 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": "many"}, "unable to parse string as an integer"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": 1.5}, "got a number with a fractional part"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
        ({"top_logprobs": 2}, "`logprobs` must be set to true"),
        ({"logprobs": True, "top_logprobs": 21}, "greater than max allowed: 20"),
        ({"stream_options": {"include_usage": True}}, "only be defined when `stream=True`"),
        ({"cache_salt": ""}, "cache_salt has 0 characters"),
        ({"priority": 1}, "Priority scheduling is not enabled"),
        ({"stream": "perhaps"}, "valid boolean"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "at most 4 items"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be in [0, max_tokens=8], got 9."),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text parts only"),
        ({"messages": ["hello"]}, "messages.0 is str"),
        ({"messages": {}}, "Input should be a valid list"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
    ],
)
async def test_a_bad_value_is_refused_in_one_sentence(
    start_engine: StartEngine, body: dict[str, Any], told: str
) -> None:
    server = await start_engine()
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **body}
    async with client_of(server) as client:
        response = await client.post("/v1/chat/completions", json=asked)
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400
    assert told in error["message"]
    assert list(error) == ["message", "type", "param", "code"]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (None, "must be provided and non-empty"),
        ([], "must be provided and non-empty"),
        ("", "empty string"),
        ([1, "a"], "token ids"),
        ([-1], "token ids"),
        ([2**32], "token ids"),
        ([1.5], "mixed types"),
        (["a", [1]], "mixed types"),
        ([[]], "no token ids"),
        (7, "must be provided and non-empty"),
    ],
)
async def test_a_bad_prompt_is_refused_in_one_sentence(start_engine: StartEngine, prompt: object, told: str) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        response = await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


async def test_a_wrong_method_and_media_type_are_refused(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        wrong_method = await client.get("/v1/completions")
        wrong_type = await client.post("/v1/completions", content=b"prompt=a", headers={"content-type": "text/plain"})
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert wrong_method.json() == {"detail": "Method Not Allowed"}
    assert wrong_type.status_code == 400
    assert "application/json" in wrong_type.json()["error"]["message"]
