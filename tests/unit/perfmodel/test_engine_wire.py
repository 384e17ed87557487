"""What clients may ask for: parsing, defaults, the context's arithmetic, and the template.

Owns: `engine_wire`, `wire_fields` and `chat_template` where a recording says nothing. Does not own: answers as bytes
(`integration/perfmodel/test_engine_contract`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from perfmodel.adapters.chat_template import render_chat
from perfmodel.adapters.engine_wire import (
    Generation,
    WireLimits,
    error_body,
    parse_abort,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from perfmodel.errors import ClientError
from perfmodel.workload import TOKEN_BYTES, detokenize, tokenize

LIMITS = WireLimits(("tiny", "tiny-alias"), 100)
HELLO = [{"role": "user", "content": "hello"}]


def chat(**members: Any) -> Generation:
    return parse_chat(json.dumps({"messages": HELLO, **members}).encode(), LIMITS)


def completion(**members: Any) -> Generation:
    return parse_completion(json.dumps({"prompt": "hello", **members}).encode(), LIMITS)


def refusal(parse: Any, **members: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        parse(**members)
    return caught.value


# Defaults


def test_a_chat_without_a_limit_may_fill_the_context() -> None:
    call = chat()
    assert call.max_tokens == (100 - call.prompt_tokens,)
    assert (call.stream, call.choice_count, call.logprob_count, call.greedy, call.seed) == (False, 1, None, False, None)


def test_a_completion_without_a_limit_gets_16_tokens_as_vllm_gives() -> None:
    assert completion().max_tokens == (16,)
    assert completion(max_tokens=None).max_tokens == (100 - 2,)


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=3, max_completion_tokens=5).max_tokens == (5,)
    assert "max_completion_tokens=500 cannot be greater" in str(refusal(chat, max_tokens=3, max_completion_tokens=500))


def test_the_model_may_be_left_out_or_named_by_any_alias() -> None:
    assert chat(model=None).max_tokens == chat(model="tiny-alias").max_tokens
    assert str(refusal(chat, model="x")) == "The model `x` does not exist. Valid aliases: tiny, tiny-alias."


def test_continuous_usage_needs_usage() -> None:
    on = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    off = chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert (on.continuous_usage, off.continuous_usage) == (True, False)


def test_logprobs_of_a_chat_need_their_switch_and_those_of_a_completion_are_a_number() -> None:
    assert chat(logprobs=True).logprob_count == 0
    assert chat(logprobs=True, top_logprobs=5).logprob_count == 5
    assert completion(logprobs=3).logprob_count == 3
    assert "greater than max allowed: 20" in str(refusal(completion, logprobs=21))


def test_unknown_members_are_ignored_as_vllm_ignores_them() -> None:
    assert chat(stop=["a"], user="u", logit_bias={"1": 2}, made_up=1).choice_count == 1


# Prompts


def test_every_form_of_prompt_is_taken() -> None:
    assert [tokens.tolist() for tokens in completion(prompt=[1, 2, 3]).prompts] == [[1, 2, 3]]
    assert [tokens.tolist() for tokens in completion(prompt=[[1], [2, 3]]).prompts] == [[1], [2, 3]]
    texts = completion(prompt=["hello", "a"]).prompts
    assert [detokenize(tokens) for tokens in texts] == [b"hello", b"a"]


def test_the_limits_of_many_prompts_are_each_ones_own() -> None:
    assert completion(prompt=["abcd" * 10, "abcd"], max_tokens=None).max_tokens == (90, 99)


# The context


@pytest.mark.parametrize(
    ("tokens", "limit", "told"),
    [
        (
            100,
            None,
            "you requested 1 output tokens and your prompt contains 100 input tokens, for a total of 101 tokens",
        ),
        (96, 5, "you requested 5 output tokens and your prompt contains 96 input tokens, for a total of 101 tokens"),
        (101, 1, "your prompt contains 101 input tokens, which exceeds this limit even without any output tokens"),
    ],
)
def test_a_sequence_longer_than_the_context_is_refused(tokens: int, limit: int | None, told: str) -> None:
    assert told in str(refusal(completion, prompt=list(range(tokens)), max_tokens=limit))
    assert completion(prompt=list(range(tokens - 1))[: 100 - (limit or 1)], max_tokens=limit).prompt_tokens <= 99


def test_a_text_too_long_is_told_as_vllm_tells_it_which_stops_counting_one_past_the_limit() -> None:
    fault = refusal(completion, prompt="abcd" * 5000)
    assert "your prompt contains at least 101 input tokens" in str(fault)
    assert str(fault).endswith("(parameter=input_tokens, value=101)")


# Faults


def test_all_faults_of_a_body_are_told_at_once() -> None:
    fault = refusal(chat, max_tokens="x", stream="y")
    assert str(fault).startswith("2 validation errors:\n")
    assert {"body.stream", "body.max_tokens"} <= {word.strip("',") for word in str(fault).split()}
    assert json.loads(error_body(fault))["error"]["type"] == "Bad Request"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "'type': 'missing', 'loc': 'body'"),
        (b"[1]", "'type': 'model_attributes_type', 'loc': 'body'"),
        (b'{"a":', "'loc': 'body.5', 'msg': 'JSON decode error'"),
        (b'"\xff"', "JSON decode error"),
        (b"[" * 100_000, "JSON decode error"),
        (b'{"messages":null}', "'loc': 'body.messages'"),
        (b'{"messages":[],"n":NaN}', "JSON decode error"),
        (b'{"messages":[],"n":1e400}', "holds a number out of range"),
    ],
)
def test_what_is_no_usable_object_is_refused(body: bytes, told: str) -> None:
    with pytest.raises(ClientError, match="validation error") as caught:
        parse_chat(body, LIMITS)
    assert told in str(caught.value)


def test_numbers_and_booleans_in_strings_are_taken_as_pydantic_takes_them() -> None:
    call = chat(max_tokens="7", n="2", stream="true", temperature="0.5")
    assert (call.max_tokens, call.choice_count, call.stream) == ((7,), 2, True)


def test_long_inputs_are_not_echoed() -> None:
    assert len(str(refusal(chat, model="tiny", stream="x" * 100_000))) < 300


# Other bodies


def test_tokenize_takes_text_or_messages() -> None:
    assert parse_tokenize(b'{"prompt":"hello"}', LIMITS).tokens.tolist() == tokenize(b"hello").tolist()
    by_messages = parse_tokenize(json.dumps({"messages": HELLO}).encode(), LIMITS)
    assert by_messages.tokens.tolist() == chat().prompts[0].tolist()


def test_an_abort_names_its_requests_or_means_all() -> None:
    assert parse_abort(b"") is None
    assert parse_abort(b"{}") is None
    assert parse_abort(b'{"request_ids":[]}') is None
    assert parse_abort(b'{"request_ids":["a","b"]}') == ("a", "b")


# The template


def test_a_rendered_chat_reads_as_documented() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    assert render_chat(messages) == b"<|system|>\n\nBe kind.</s><|user|>hello\0\0\0</s><|assistant|>\n\n\n"
    assert render_chat(messages, add_generation_prompt=False).endswith(b"hello\0\0\0</s>")
    assert render_chat(messages, continue_final_message=True).endswith(b"<|user|>hello")


def test_parts_tools_and_tool_calls_are_part_of_the_prompt() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert render_chat([{"role": "user", "content": parts}]) == render_chat(HELLO)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render_chat(HELLO, tools) == b"<|tools|>\n\n\n" + _filled(json.dumps(tools, separators=(",", ":"))) + (
        b"</s>" + render_chat(HELLO)
    )
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert b'[{"id":"c1"}]' in render_chat([called])
    assert b"c1\n42" in render_chat([answered])


def _filled(text: str) -> bytes:
    return text.encode() + b"\0" * (-len(text) % TOKEN_BYTES)
