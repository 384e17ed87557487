"""The bodies of the two legs, byte for byte, and what a prefill's answer is read as."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from billing.metering import Meter
from billing.token_usage import usage_of
from controlplane.disaggregation import (
    MIN_CONTEXT_ID,
    Body,
    CachedTokens,
    HandOver,
    Handshake,
    Meeting,
    NoHandOver,
    as_stream,
    hand_over,
    meeting_body,
    prefill_body,
    with_members,
)
from controlplane.request import Operation

CONTEXT_ID = MIN_CONTEXT_ID + 7
# Unsorted names, an odd float, escapes, spaces: nothing of it may change (R28).
ODD = (
    b'{ "messages" :[{"role":"user","content":"\\u00e9 \xc3\xa9"}],"temperature": 1.10E0 , "min_tokens":3,"model":"m",'
    b'"stream":true,"tools":[{"b":1,"a":2}],"max_tokens":  400,"stream_options":{"include_usage":true}}'
)
PARAMS = (
    b'{ "do_remote_prefill": true, "do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"e1",'
    b'"remote_request_id":"r-1","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"zz":1.50}'
)


def text(parts: Body) -> bytes:
    """The slices as one."""
    return b"".join(parts)


def vllm_answer(params: bytes | None, cached: int | None = 16) -> bytes:
    """A prefill's answer of vLLM 0.32."""
    details = b"null" if cached is None else b'{"cached_tokens":%d}' % cached
    usage = b'{"prompt_tokens":40,"total_tokens":41,"completion_tokens":1,"prompt_tokens_details":%s}' % details
    choice = b'{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length"}'
    shown = b"" if params is None else b',"kv_transfer_params":%s' % params
    return b'{"id":"x","choices":[%s],"usage":%s%s}' % (choice, usage, shown)


class TestMembers:
    @pytest.mark.parametrize(
        ("body", "new", "drop", "wanted"),
        [
            (b'{"a":1}', {"b": b"2"}, (), b'{"a":1,"b":2}'),
            (b'{"a": 1 , "b":2}', {"a": b"9"}, (), b'{"a": 9 , "b":2}'),
            (b'{"a":1, "b":2,"c":3}', {}, ("b",), b'{"a":1, "c":3}'),
            (b'{"a":1 ,"b":2,"c":3 }', {}, ("b", "c"), b'{"a":1 }'),
            (b'{"b":2,"b":3,"a":1}', {}, ("b",), b'{"a":1}'),
            (b'{"a":1,"b":2}', {"n": b"{}"}, ("b",), b'{"a":1,"n":{}}'),
            (b'{"b":2}', {"n": b"{}"}, ("b",), b'{"n":{}}'),
            (b"{}", {"n": b"1", "o": b"2"}, (), b'{"n":1,"o":2}'),
            (b'{"a":"\xc3\xa9","b":0}', {"b": b"1"}, (), b'{"a":"\xc3\xa9","b":1}'),
        ],
    )
    def test_only_what_is_named_changes(
        self, body: bytes, new: dict[str, bytes], drop: Sequence[str], wanted: bytes
    ) -> None:
        assert text(with_members(body, new, drop)) == wanted


class TestNixl:
    def test_the_prefill_leg_is_the_body_with_the_fields_of_the_toy_proxy(self) -> None:
        asked = b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
        asked += b'"remote_host":null,"remote_port":null}'
        made = text(prefill_body(Handshake.NIXL, Operation.CHAT, ODD, CONTEXT_ID))
        wanted = (
            ODD.replace(b'"min_tokens":3,', b"")
            .replace(b'"stream":true', b'"stream":false')
            .replace(b"  400", b"  1")
            .replace(b',"stream_options":{"include_usage":true}', b"")
        )
        assert made == wanted[:-1] + b',"max_completion_tokens":1,"kv_transfer_params":%s}' % asked

    def test_a_completion_has_no_max_completion_tokens(self) -> None:
        made = json.loads(text(prefill_body(Handshake.NIXL, Operation.COMPLETION, b'{"prompt":"a"}', CONTEXT_ID)))
        assert (made["max_tokens"], made["stream"]) == (1, False)
        assert "max_completion_tokens" not in made

    def test_the_decode_leg_gets_the_parameters_as_they_were_written(self) -> None:
        made = hand_over(Handshake.NIXL, Operation.CHAT, ODD, vllm_answer(PARAMS), CONTEXT_ID)
        assert isinstance(made, HandOver)
        assert made.decode_body is not None
        assert text(made.decode_body) == ODD[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
        assert made.usage.cached_input_tokens == 16

    def test_the_cached_tokens_may_stand_in_the_parameters_alone(self) -> None:
        params = PARAMS[:-1] + b',"remote_prefill_cached_tokens":32}'
        made = hand_over(Handshake.NIXL, Operation.CHAT, ODD, vllm_answer(params, None), CONTEXT_ID)
        assert isinstance(made, HandOver)
        assert (made.usage.cached_input_tokens, made.usage.uncached_input_tokens) == (32, 8)

    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            (b"<html>", "no JSON object"),
            (vllm_answer(None), "without kv_transfer_params"),
            (vllm_answer(b"null"), "without kv_transfer_params"),
            (vllm_answer(b"{}"), "lack do_remote_prefill, remote_engine_id"),
            (vllm_answer(PARAMS.replace(b'"10.0.0.1"', b"null")), "lack remote_host"),
            (vllm_answer(PARAMS.replace(b"[[1,2]]", b"null")), "lack remote_block_ids"),
            (vllm_answer(PARAMS.replace(b"true", b"false")), "lack do_remote_prefill"),
        ],
    )
    def test_an_answer_that_hands_nothing_over_is_said_to(self, answer: bytes, says: str) -> None:
        made = hand_over(Handshake.NIXL, Operation.CHAT, ODD, answer, CONTEXT_ID)
        assert isinstance(made, NoHandOver)
        assert says in made.reason


def test_both_sglang_legs_get_one_body_with_the_meeting() -> None:
    made = text(meeting_body(ODD, Meeting("10.0.0.1", 8998, 2**63 - 1)))
    meeting = b',"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":9223372036854775807}'
    assert made == ODD[:-1] + meeting


class TestContextFirst:
    PARAMS: dict[str, Any] = {  # noqa: RUF012 - read only
        "request_type": "context_only", "first_gen_tokens": [5], "ctx_request_id": 11, "encoded_opaque_state": "AA==",
        "draft_tokens": None, "disagg_request_id": CONTEXT_ID, "ctx_dp_rank": 0, "ctx_info_endpoint": "tcp://h:1",
        "schedule_style": None,
    }  # fmt: skip

    def answer(self, params: Any, finish: str = "length", **more: Any) -> bytes:
        """A context answer."""
        choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": finish}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
        choices = [{**choice, "disaggregated_params": params}]
        return json.dumps({"object": "chat.completion", "choices": choices, "usage": usage, **more}).encode()

    def test_the_context_leg_names_its_type_and_a_global_id(self) -> None:
        made = text(prefill_body(Handshake.CONTEXT_FIRST, Operation.CHAT, ODD, CONTEXT_ID))
        params = b',"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d}}' % CONTEXT_ID
        wanted = ODD.replace(b'"stream":true', b'"stream":false')
        assert made == wanted.replace(b',"stream_options":{"include_usage":true}}', params)

    @pytest.mark.parametrize("usage_known", [False, True])
    def test_the_generation_leg_gets_all_of_it_back(self, usage_known: bool) -> None:
        params = {**self.PARAMS, **({"ctx_usage": None} if usage_known else {})}
        answer = self.answer(params, prompt_token_ids=[1, 2, 3])
        made = hand_over(Handshake.CONTEXT_FIRST, Operation.CHAT, ODD, answer, CONTEXT_ID)
        assert isinstance(made, HandOver)
        assert made.decode_body is not None
        sent = json.loads(text(made.decode_body))
        assert text(made.decode_body).startswith(ODD[:-1])
        assert sent["prompt_token_ids"] == [1, 2, 3]
        got = sent["disaggregated_params"]
        usage = {"ctx_usage": json.loads(answer)["usage"]} if usage_known else {}
        assert got == {**params, "request_type": "generation_only", "schedule_style": 0, **usage}

    def test_a_completion_gets_token_ids_for_its_prompt(self) -> None:
        answer = self.answer(self.PARAMS, prompt_token_ids=[1, 2])
        made = hand_over(Handshake.CONTEXT_FIRST, Operation.COMPLETION, b'{"prompt":"ab"}', answer, CONTEXT_ID)
        assert isinstance(made, HandOver)
        assert made.decode_body is not None
        assert json.loads(text(made.decode_body))["prompt"] == [1, 2]

    def test_an_answer_that_ended_at_once_is_the_clients(self) -> None:
        answer = self.answer(self.PARAMS, "stop", prompt_token_ids=[1])
        made = hand_over(Handshake.CONTEXT_FIRST, Operation.CHAT, ODD, answer, CONTEXT_ID)
        assert isinstance(made, HandOver)
        assert made.decode_body is None
        assert b"disaggregated_params" not in made.answer
        assert b"prompt_token_ids" not in made.answer
        assert usage_of(made.answer).output_tokens == 1

    @pytest.mark.parametrize("params", [None, {}, {**PARAMS, "ctx_request_id": None}])
    def test_missing_parameters_are_said_to_be(self, params: Any) -> None:
        made = hand_over(Handshake.CONTEXT_FIRST, Operation.CHAT, ODD, self.answer(params), CONTEXT_ID)
        assert isinstance(made, NoHandOver)
        assert "ctx_request_id" in made.reason

    def test_a_whole_answer_can_be_told_as_a_stream(self) -> None:
        meter = Meter(choices=1, keep_usage_chunk=True, keep_continuous_usage=False, now_s=0.0)
        shown = meter.feed(as_stream(self.answer(None, "stop")))
        assert meter.end().value == "completed"
        assert meter.engine_usage().cached_input_tokens == 2
        assert b'"content":"a"' in shown
        assert b"chat.completion.chunk" in shown


def chunk(usage: str, choices: str = "[]") -> bytes:
    """One event with that usage."""
    return f'data: {{"choices":{choices},"usage":{usage}}}\n\n'.encode()


class TestCachedTokens:
    @pytest.mark.parametrize(
        ("known", "usage", "wanted"),
        [
            (16, '{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens":39}}', 16),
            (0, '{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens": 39}}', 0),
            (16, '{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens":null,"audio_tokens":1}}', 16),
            (16, '{"prompt_tokens":40,"prompt_tokens_details":{}}', 16),
            (16, '{"prompt_tokens":40,"prompt_tokens_details":null}', 16),
            (16, '{"prompt_tokens":40}', 16),
            (None, '{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens":39}}', None),
            (None, '{"prompt_tokens":40}', None),
        ],
    )
    def test_the_prefills_word_stands_whatever_the_decoder_says(
        self, known: int | None, usage: str, wanted: int | None
    ) -> None:
        fixed = CachedTokens(known)
        found = json.loads(fixed.feed(chunk(usage))[6:])
        assert (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") == wanted
        whole = fixed.whole(f'{{"choices":[{{"message":{{"content":"x"}}}}],"usage":{usage}}}'.encode())
        assert usage_of(whole).cached_input_tokens == wanted

    def test_text_that_looks_like_usage_stays(self) -> None:
        said = json.dumps({"content": '"prompt_tokens_details":{"cached_tokens":5},"usage":{"a":1}'})
        event = f'data: {{"choices":[{{"delta":{said}}}]}}\n\n'.encode()
        assert CachedTokens(1).feed(event) == event

    def test_a_chunk_that_says_nothing_of_the_cache_gets_nothing(self) -> None:
        """Usage in each chunk (vLLM's continuous_usage_stats) has no details: only the total tells them."""
        each = chunk('{"prompt_tokens":40}', '[{"index":0,"delta":{"content":"a"}}]')
        assert CachedTokens(9).feed(each) == each

    @pytest.mark.parametrize("size", [1, 2, 7, 1_000])
    @pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
    def test_pieces_of_any_size_and_line_ends_of_any_kind(self, size: int, end: bytes) -> None:
        plain = chunk('{"prompt_tokens":40}', '[{"index":0,"delta":{"content":"\u00fc"}}]')
        total = chunk('{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens":39}}')
        stream = (plain + total + b"data: [DONE]\n\n").replace(b"\n", end)
        fixed = CachedTokens(3)
        got = b"".join(fixed.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + fixed.flush()
        assert got == stream.replace(b":39", b":3")
