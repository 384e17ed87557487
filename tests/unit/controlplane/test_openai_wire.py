"""`controlplane.adapters.openai_wire`: what is taken, what is refused and how, in-place edits, and error objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.adapters.openai_wire import (
    EngineErrorDefault,
    OwnedFields,
    apply_edits,
    bad_request_fault,
    denial_fault,
    engine_error_body,
    error_body,
    parse,
    stream_error,
)
from controlplane.errors import BadRequest
from controlplane.request import InferenceRequest, Operation, StreamWish
from controlplane.tenancy import DenialReason, Denied

RECORDED = Path(__file__).parents[2] / "recorded"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(body: bytes | dict[str, Any]) -> InferenceRequest:
    return parse(Operation.CHAT, body if isinstance(body, bytes) else json.dumps(body).encode())


def completion(**fields: Any) -> InferenceRequest:
    return parse(Operation.COMPLETION, json.dumps({"model": "m", **fields}).encode())


def refused(body: bytes | dict[str, Any], operation: Operation = Operation.CHAT) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(operation, body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def edited(body: bytes | dict[str, Any], **owned: Any) -> bytes:
    return b"".join(apply_edits(chat(body), OwnedFields(**{"model_served": "m", **owned})))


class TestParse:
    def test_a_plain_chat(self) -> None:
        request = chat({**ASK, "max_tokens": 9, "user": "u", "service_tier": "flex", "top_k": 3})
        assert (request.model_asked, request.choices, request.max_output_tokens) == ("m", 1, 9)
        assert (request.user, request.tier_asked) == ("u", "flex")
        assert request.wish == StreamWish(False, False, False)

    def test_the_prompt_is_the_raw_tools_then_the_raw_messages_without_their_end(self) -> None:
        body = b'{"messages" : [ {"role":"user","content":"\xc3\xa9"} ],"tools": [{"a":1.0}] ,"model":"m"}'
        request = chat(body)
        assert [bytes(part) for part in request.prompt_parts] == [
            b'[{"a":1.0}]', b'[ {"role":"user","content":"\xc3\xa9"} ',
        ]  # fmt: skip
        assert request.body is body

    @pytest.mark.parametrize(
        ("options", "wish"),
        [
            (None, (False, False)),
            ({}, (False, False)),
            ({"include_usage": True}, (True, False)),
            ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
            ({"continuous_usage_stats": True}, (False, False)),
        ],
    )
    def test_what_the_client_wants_of_the_stream(self, options: Any, wish: tuple[bool, bool]) -> None:
        assert chat({**ASK, "stream": True, "stream_options": options}).wish == StreamWish(True, *wish)

    def test_max_completion_tokens_supersedes_and_null_is_absent(self) -> None:
        assert chat({**ASK, "max_tokens": 5, "max_completion_tokens": 7}).max_output_tokens == 7
        assert chat({**ASK, "max_tokens": 5, "max_completion_tokens": None}).max_output_tokens == 5
        assert chat({**ASK, "n": None, "stream": None, "user": None}).choices == 1

    def test_escaped_names_are_the_names_they_spell(self) -> None:
        assert chat(b'{"mo\\u0064el":"m\\u00e9","messages":[{}]}').model_asked == "m\u00e9"

    def test_text_outside_ascii_is_read_as_utf_8(self) -> None:
        assert chat({**ASK, "user": "J\u00fcrgen \U0001f600"}).user == "J\u00fcrgen \U0001f600"
        raw = json.dumps({**ASK, "model": "\u6a21"}, ensure_ascii=False).encode()
        assert chat(raw).model_asked == "\u6a21"

    def test_a_media_part_counts_as_media_not_as_its_bytes(self) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
        small = chat({**ASK, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]})
        assert 1_024 < small.estimated_input_tokens < 1_200

    def test_long_text_is_estimated_by_its_bytes(self) -> None:
        request = chat({**ASK, "messages": [{"role": "user", "content": "x" * 4_000}]})
        assert 1_200 < request.estimated_input_tokens < 1_230

    def test_lone_surrogates_in_text_are_the_engines_business(self) -> None:
        body = b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}],"temperature":1e999}'
        assert edited(body) == body

    @pytest.mark.parametrize(
        ("prompt", "choices", "tokens"),
        [("hello", 1, 2), (["a", "b"], 2, 3), ([1, 2, 3], 1, 3), ([[1, 2], [3]], 2, 3)],
    )
    def test_completion_prompts(self, prompt: Any, choices: int, tokens: int) -> None:
        request = completion(prompt=prompt)
        assert (request.choices, request.estimated_input_tokens) == (choices, tokens)

    def test_completion_choices_are_prompts_times_n(self) -> None:
        assert completion(prompt=["a", "b", "c"], n=4).choices == 12


class TestRefusals:
    @pytest.mark.parametrize(
        "body",
        [
            b"", b"{", b"[]", b"null", b'"x"', b"{}x", b'{"model":"m",}', b"{'model':1}", b'{"model":NaN}',
            b'{"a":Infinity}', b'{"a":01}', b'{"a":"\x01"}', b'{"a" 1}', b'{"a":1 "b":2}', b'{"a":}', b'{"a":1',
            b'{"a":1,', b'{"a', b'{"a"', b'{"a":', b'{a:1}', b'{"a":"\\x"}', b'\xef\xbb\xbf{"a":1}',
        ],
    )  # fmt: skip
    def test_what_is_no_json_object(self, body: bytes) -> None:
        error = refused(body)
        assert (error.status, error.param, error.code) == (400, None, None)
        assert error.message.startswith("The request body is not a valid JSON object: ")
        assert "\n" not in error.message

    def test_bytes_that_are_no_utf_8(self) -> None:
        assert refused(b'{"model":"\xff"}').message == "The request body is not valid UTF-8 at byte 10."

    def test_a_depth_bomb(self) -> None:
        assert "nested too deeply" in refused(b'{"model":"m","messages":' + b"[" * 100_000 + b"}").message

    def test_a_number_with_too_many_digits(self) -> None:
        assert refused(b'{"seed":' + b"9" * 5_000 + b"}").status == 400

    def test_a_body_of_millions_of_tiny_values(self) -> None:
        body = b'{"model":"m","messages":[' + b"{}," * 3_000_000 + b"{}]}"
        assert refused(body).status == 413

    @pytest.mark.parametrize(
        ("change", "param", "sentence"),
        [
            ({"model": None}, "model", "model is required: a string that names a model."),
            ({"model": 5}, "model", "model must be a string, not 5."),
            ({"model": ""}, "model", "model must have 1 to 256 characters, this one has 0."),
            ({"model": "x" * 300}, "model", "model must have 1 to 256 characters, this one has 300."),
            ({"model": "a\x00"}, "model", "model must not contain a NUL character."),
            ({"model": "\ud800"}, "model", "model must be valid Unicode."),
            ({"messages": "hi"}, "messages", 'messages must be a list with at least one message, not "hi".'),
            ({"messages": []}, "messages", "messages must be a list with at least one message, not an empty one."),
            ({"messages": ["x"]}, "messages[0]", "messages[0] must be an object."),
            ({"stream": "yes"}, "stream", 'stream must be true or false, not "yes".'),
            ({"stream": 1}, "stream", "stream must be true or false, not 1."),
            ({"n": 0}, "n", "n must be a whole number from 1 to 128, not 0."),
            ({"n": 129}, "n", "n must be a whole number from 1 to 128, not 129."),
            ({"n": 1.0}, "n", "n must be a whole number from 1 to 128, not 1.0."),
            ({"n": True}, "n", "n must be a whole number from 1 to 128, not true."),
            ({"max_tokens": 0}, "max_tokens", "max_tokens must be a whole number from 1 to 2147483647, not 0."),
            ({"n": [1]}, "n", "n must be a whole number from 1 to 128, not an array."),
            ({"n": 10**60}, "n", f"n must be a whole number from 1 to 128, not {10**36}...."),
            ({"max_completion_tokens": -1}, "max_completion_tokens",
             "max_completion_tokens must be a whole number from 1 to 2147483647, not -1."),
            ({"tools": {"a": 1}}, "tools", "tools must be a list, not an object."),
            ({"user": 5}, "user", "user must be a string, not 5."),
            ({"service_tier": []}, "service_tier", "service_tier must be a string, not an empty array."),
            ({"stream": True, "stream_options": 1}, "stream_options", "stream_options must be an object, not 1."),
            ({"stream_options": {}}, "stream_options", "stream_options is only allowed when stream is true."),
            (
                {"stream": True, "stream_options": {"include_usage": 1}},
                "stream_options.include_usage",
                "stream_options.include_usage must be true or false, not 1.",
            ),
        ],
    )  # fmt: skip
    def test_wrong_types(self, change: dict[str, Any], param: str, sentence: str) -> None:
        error = refused({**ASK, **change})
        assert (error.status, error.param, error.message) == (400, param, sentence)

    def test_missing_messages_and_prompt(self) -> None:
        assert refused({"model": "m"}).param == "messages"
        assert refused({"model": "m"}, Operation.COMPLETION).param == "prompt"

    @pytest.mark.parametrize("prompt", [[], {}, 5, [1, "a"], [[]], [["a"]], [True], [1.5], None])
    def test_wrong_prompts(self, prompt: Any) -> None:
        assert refused({"model": "m", "prompt": prompt}, Operation.COMPLETION).param == "prompt"

    @pytest.mark.parametrize(
        "name", ["model", "messages", "n", "stream_options", "cache_salt", "priority", "bootstrap_room", "vllm_xargs"]
    )
    def test_a_field_that_we_act_on_given_twice(self, name: str) -> None:
        body = json.dumps({**ASK, name: ASK.get(name, 1)})[:-1] + f', "{name}": 1}}'
        error = refused(body.encode())
        assert (error.param, error.message) == (name, f"{name} is given twice.")

    def test_an_escaped_duplicate_is_one(self) -> None:
        assert refused(b'{"model":"m","messages":[{}],"mod\\u0065l":"x"}').message == "model is given twice."

    def test_other_duplicates_are_the_engines_business(self) -> None:
        body = b'{"model":"m","messages":[{}],"top_k":1,"top_k":2}'
        assert edited(body) == body


class TestEdits:
    BODY = b'{ "messages" : [{"content":"\\u00e9 \xe4\xbd\xa0","model":"inner","priority":1}] ,\n "temperature": 1.0e-0, "model": "alias", "x": {"cache_salt": 1} }'  # noqa: E501 - one body, byte for byte

    def test_nothing_to_change_is_the_same_bytes(self) -> None:
        assert edited(self.BODY, model_served="alias") == self.BODY

    def test_the_model_is_replaced_in_place(self) -> None:
        assert edited(self.BODY, model_served='r"eal') == self.BODY.replace(b'"alias"', b'"r\\"eal"')

    def test_our_fields_come_last(self) -> None:
        out = edited(self.BODY, model_served="alias", cache_salt="s", request_id="r", priority=-1)
        added = b',"cache_salt":"s","request_id":"r","priority":-1'
        assert out == self.BODY[:-2] + added + self.BODY[-2:]

    @pytest.mark.parametrize("engine", [False, True])
    def test_usage_is_asked_for_in_a_stream(self, engine: bool) -> None:
        body = {**ASK, "stream": True}
        asked = json.loads(edited(body, include_usage=True, continuous_usage=engine))["stream_options"]
        assert asked == {"include_usage": True, **({"continuous_usage_stats": True} if engine else {})}

    def test_the_clients_stream_options_are_replaced_where_they_stand(self) -> None:
        body = b'{"stream_options": {"include_usage":false, "x":1} ,"stream":true,"model":"m","messages":[{}]}'
        out = edited(body, include_usage=True)
        assert out == body.replace(b'{"include_usage":false, "x":1}', b'{"include_usage":true}')

    def test_a_request_that_does_not_stream_gets_none(self) -> None:
        body = {**ASK, "stream_options": None}
        assert edited(body, include_usage=True) == json.dumps(body).encode()

    @pytest.mark.parametrize(
        "name",
        [
            "cache_salt", "priority", "request_id", "session_id", "kv_transfer_params", "ec_transfer_params",
            "bootstrap_host", "bootstrap_room", "vllm_xargs", "disaggregated_params", "routed_dp_rank",
            "disagg_prefill_dp_rank", "data_parallel_rank", "rid", "input_ids",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("where", [0, 1, 2])
    def test_a_tenants_owned_field_is_removed_wherever_it_stands(self, name: str, where: int) -> None:
        members = list(ASK.items())
        members.insert(where, (name, {"a": [1, "}"]}))
        assert json.loads(edited(dict(members))) == ASK

    def test_several_at_the_end_and_an_addition(self) -> None:
        body = b'{"model":"m","priority":1,"messages":[{}] , "session_id":"a","bootstrap_x":[2] }'
        assert edited(body, cache_salt="s") == b'{"model":"m","messages":[{}],"cache_salt":"s" }'

    def test_a_prompt_is_not_copied(self) -> None:
        request = chat({**ASK, "messages": [{"role": "user", "content": "x" * 500_000}]})
        parts = apply_edits(request, OwnedFields("other", "salt"))
        assert all(isinstance(part, memoryview) and part.obj is request.body for part in parts if len(part) > 100)


class TestErrors:
    def test_all_four_keys_are_always_there(self) -> None:
        assert json.loads(error_body("no", "server_error")) == {
            "error": {"message": "no", "type": "server_error", "param": None, "code": None}
        }

    def test_an_error_in_a_stream_ends_it(self) -> None:
        frame = stream_error("gone", "server_error", code="engine_lost")
        first, last, rest = frame.split(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["error"]["code"] == "engine_lost"
        assert (last, rest) == (b"data: [DONE]", b"")
        assert b"finish_reason" not in frame

    def test_a_lone_surrogate_in_a_message_does_not_break_it(self) -> None:
        assert json.loads(error_body("\ud83d", "x"))["error"]["message"] == "\ud83d"

    def test_a_bad_request(self) -> None:
        fault = bad_request_fault(BadRequest("too big", status=413, code="request_too_large"))
        assert (fault.status, fault.type, fault.code) == (413, "invalid_request_error", "request_too_large")

    @pytest.mark.parametrize(
        ("reason", "status", "code"),
        [
            (DenialReason.NO_KEY, 401, "invalid_api_key"),
            (DenialReason.UNKNOWN_KEY, 401, "invalid_api_key"),
            (DenialReason.EXPIRED_KEY, 401, "invalid_api_key"),
            (DenialReason.MISSING_SCOPE, 403, "insufficient_permissions"),
            (DenialReason.MODEL_NOT_ALLOWED, 403, "model_not_allowed"),
            (DenialReason.SNAPSHOT_STALE, 503, "auth_unavailable"),
        ],
    )
    def test_denials(self, reason: DenialReason, status: int, code: str) -> None:
        fault = denial_fault(Denied(reason, "x"))
        assert (fault.status, fault.code) == (status, code)

    def test_an_unknown_and_an_expired_key_look_the_same(self) -> None:
        assert denial_fault(Denied(DenialReason.UNKNOWN_KEY)) == denial_fault(Denied(DenialReason.EXPIRED_KEY))

    @pytest.mark.parametrize(
        ("file", "message", "param", "code"),
        [
            ("vllm_0.32.0/err_404", "Not Found", None, None),
            ("vllm_0.32.0/err_bad_json", "1 validation error:", None, None),
            ("vllm_0.32.0/err_bad_temperature", "temperature must be non-negative", "temperature", None),
            ("vllm_0.32.0/err_context_length", "This model's maximum", "messages", "context_length_exceeded"),
            ("vllm_0.32.0/err_max_tokens_too_large", "max_tokens=5000 cannot", "max_tokens", None),
            ("vllm_0.32.0/err_missing_messages", "1 validation error:", "messages", None),
            ("vllm_0.32.0/err_model_not_found", "The model `nope`", "model", "model_not_found"),
            ("llamacpp/err_404", "File Not Found", None, None),
            ("llamacpp/err_bad_json", "[json.exception.parse_error.101]", None, None),
            ("llamacpp/err_context_length", "request (8002 tokens)", "messages", "context_length_exceeded"),
            ("llamacpp/err_embeddings", "This server does not support", None, None),
            ("llamacpp/err_missing_messages", "'messages' is required", None, None),
        ],
    )
    def test_recorded_engine_errors(self, file: str, message: str, param: str | None, code: str | None) -> None:
        body = (RECORDED / f"{file}.response.json").read_bytes()
        error = json.loads(engine_error_body(body, EngineErrorDefault("x", "invalid_request_error")))["error"]
        assert error["message"].startswith(message)
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
        assert set(error) == {"message", "type", "param", "code"}

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b"", "The engine failed."),
            (b"<html>", "The engine failed."),
            (b"[1]", "The engine failed."),
            (b'{"error": null}', "The engine failed."),
            (b'{"error": "out of memory"}', "out of memory"),
            (b'{"object":"error","message":"old vLLM","type":"BadRequestError","code":400}', "old vLLM"),
            (b'{"detail":[{"loc":["body","n"],"msg":"too big"}]}', "n: too big"),
            (b'{"error": {"message": 5, "code": 500}}', "The engine failed."),
        ],
    )
    def test_other_engine_errors(self, body: bytes, message: str) -> None:
        default = EngineErrorDefault("The engine failed.", "server_error", code="engine_error")
        error = json.loads(engine_error_body(body, default))["error"]
        assert (error["message"], error["type"], error["code"]) == (message, "server_error", "engine_error")


def test_very_many_fields_are_refused_at_once() -> None:
    many = b",".join(b'"bootstrap_%d":1' % n for n in range(20_000))
    with pytest.raises(BadRequest, match="fields at top level"):
        parse(Operation.CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],' + many + b"}")


def test_a_completion_is_bounded_by_max_tokens_alone_and_a_chat_by_the_larger() -> None:
    both = b'"max_tokens":2000,"max_completion_tokens":1'
    completion = parse(Operation.COMPLETION, b'{"model":"m","prompt":"hi",' + both + b"}")
    assert completion.max_output_tokens == 2000
    chat = parse(Operation.CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],' + both + b"}")
    assert chat.max_output_tokens == 2000
