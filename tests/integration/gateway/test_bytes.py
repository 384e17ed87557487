"""What goes in and out, byte for byte (reference router R28; gateway 5, rows 4-6, 8, 24-27)."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine_scripts import RECORDED, Ask, stream_steps
from tests.fakes.engine_scripts import Send as SendStep
from tests.integration.gateway.client import CHAT, Caller, body, chunks, events, text_of
from tests.integration.gateway.conftest import ENGINE_KEY, People
from tests.integration.gateway.stack import Engines, Node, http_client

# Unsorted keys, odd floats, escapes, duplicate-free whitespace of its own, unknown fields, and every owned field.
ODD_BODY = (
    '{ "zeta": [1.0, 1e3, 0.1000000000000000055511151231257827, -0.0],\n "model" : "m", "messages":[{"role": "user",'
    '"content":"caf\\u00e9 \\ud83d\\ude00 \u4f60 \U0001f600", "x":{"b":1,"a":2}}], "user":"script:echo",'
    '"tools":[{"type":"function","function":{"name":"f","parameters":{"z":1,"a":{"$ref":"#/\\/"}}}}],'
    '"temperature":0.70, "max_tokens": 5 , "unknown_field":{"k":[null,true]}'
).encode()


def as_engine_saw(answer: Any) -> tuple[bytes, dict[str, str]]:
    """The body and the headers that the echo script gives back."""
    said = answer.json()
    return base64.b64decode(said["body"]), {name.lower(): value for name, value in said["headers"]}


def test_a_body_reaches_the_engine_byte_for_byte_apart_from_our_fields(caller: Caller) -> None:
    sent, _ = as_engine_saw(caller.post(ODD_BODY + b"}"))
    salt = json.loads(sent)["cache_salt"]
    assert sent == ODD_BODY + b',"cache_salt":"%s"}' % salt.encode()


def test_owned_fields_of_a_tenant_are_taken_out_in_place(caller: Caller) -> None:
    owned = b',"priority":9,"cache_salt":"mine","request_id":"r","kv_transfer_params":{"a":1},"bootstrap_room":7'
    sent, _ = as_engine_saw(caller.post(ODD_BODY + owned + b"}"))
    kept = json.loads(sent)
    assert sent.startswith(ODD_BODY)
    assert kept["cache_salt"] != "mine"
    assert not kept.keys() & {"priority", "request_id", "kv_transfer_params", "bootstrap_room"}


def test_two_tenants_never_share_a_cache_salt_and_one_keeps_its_own(node: Node, people: People) -> None:
    mine, other = Caller(node, people["plain"]), Caller(node, people["other"])
    salts = [json.loads(as_engine_saw(one.post(ODD_BODY + b"}"))[0])["cache_salt"] for one in (mine, mine, other)]
    assert salts[0] == salts[1] != salts[2]
    assert people["plain"].org_id not in salts[0]


def test_no_header_of_the_caller_reaches_the_engine(caller: Caller) -> None:
    answer = caller.post(
        ODD_BODY + b"}", cookie="session=1", x_api_key="sk-other", api_key="k", x_custom="1", connection="keep-alive",
        te="trailers", accept_encoding="gzip", proxy_authorization="Basic x", x_forwarded_for="1.2.3.4",
        openai_organization="org", x_request_id="mine",
    )  # fmt: skip
    _, headers = as_engine_saw(answer)
    assert set(headers) == {"host", "content-type", "accept-encoding", "content-length", "x-request-id"}
    assert headers["accept-encoding"] == "identity"
    assert headers["x-request-id"] == answer.headers["x-request-id"] != "mine"
    assert caller.tenant.secret not in str(headers)


def test_the_engines_own_key_is_used_where_it_names_one(caller: Caller) -> None:
    _, headers = as_engine_saw(caller.post(body("echo", model="keyed")))
    assert headers["authorization"] == f"Bearer {ENGINE_KEY}"


def test_only_harmless_headers_of_the_engine_reach_the_caller(caller: Caller) -> None:
    answer = caller.post(body("normal"))
    assert set(answer.headers) == {"date", "content-type", "content-length", "x-request-id"}


@pytest.mark.parametrize("script", ["normal", "trickle", "burst", "compressed?piece=7", "big_event", "close_delimited"])
def test_a_stream_is_the_engines_without_the_usage_that_we_asked_for(
    script: str, caller: Caller, engines: Engines
) -> None:
    with caller.stream(body(script, stream=True)) as answer:
        got = b"".join(answer.iter_raw())
    truth = engines.truth(answer.headers["x-request-id"])
    assert answer.headers["content-type"] == "text/event-stream" + ("" if "compressed" in script else "; charset=utf-8")
    assert "content-encoding" not in answer.headers
    # the engine's bytes for the client's own body, which asks for no usage
    ask = Ask({"stream": True, "max_tokens": 5, "model": "m"}, {}, truth)
    wanted = b"".join(step.data for step in stream_steps(ask) if isinstance(step, SendStep))
    if script == "trickle":
        wanted = wanted.replace(b"tok", "\u00fc\u4f60\U0001f600".encode())
    if script == "big_event":
        word = "w" * 200_000
        big = Ask({"stream": True, "model": "m"}, {"word": word, "tokens": "1"}, truth)
        wanted = b"".join(step.data for step in stream_steps(big) if isinstance(step, SendStep))
    assert got == wanted
    asked = json.loads(truth.body)["stream_options"]
    assert asked == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("continuous", [False, True])
def test_a_stream_whose_client_asked_for_usage_keeps_it(continuous: bool, caller: Caller, engines: Engines) -> None:
    options = {"include_usage": True, **({"continuous_usage_stats": True} if continuous else {})}
    with caller.stream(body("normal", stream=True, stream_options=options)) as answer:
        got = b"".join(answer.iter_raw())
    truth = engines.truth(answer.headers["x-request-id"])
    if continuous:
        assert got == bytes(truth.sent)
    else:
        assert [chunk.get("usage") for chunk in chunks(got)][:-1] == [None] * 7
    assert chunks(got)[-1]["choices"] == []
    assert chunks(got)[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("end", ["crlf", "cr"])
def test_other_line_ends_and_comments_are_relayed_as_they_are(end: str, caller: Caller) -> None:
    with caller.stream(body(f"line_ends?end={end}", stream=True)) as answer:
        got = b"".join(answer.iter_raw())
    mark = {"crlf": b"\r\n", "cr": b"\r"}[end]
    assert got.count(b": keep-alive" + mark + mark) >= 6
    assert text_of(got.replace(mark, b"\n")) == "tok1 tok2 tok3 tok4 tok5 "


def test_logprobs_of_half_a_character_are_relayed(caller: Caller) -> None:
    with caller.stream(body("logprobs", stream=True, logprobs=True)) as answer:
        got = b"".join(answer.iter_raw())
    assert b'"bytes":[240,159]' in got.replace(b" ", b"")
    assert b"\\ufffd" in got


def test_interleaved_tool_calls_are_relayed_verbatim(caller: Caller, engines: Engines) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with caller.stream(body("tool_calls", stream=True, stream_options=options)) as answer:
        got = b"".join(answer.iter_raw())
    assert got == bytes(engines.truth(answer.headers["x-request-id"]).sent)


def same_but_ids(data: bytes) -> bytes:
    """A recorded stream without what differs between two runs of the same request."""
    data = re.sub(rb'"id":"[^"]*"', b'"id":"x"', data)
    data = re.sub(rb'"created":\d+', b'"created":1', data)
    return re.sub(rb'"timings":\{[^}]*\}', b'"timings":{}', data)


@pytest.mark.parametrize(
    ("model", "engine_sent", "client_gets"),
    [
        ("m", "vllm_0.32.0/chat_stream_continuous_usage", "vllm_0.32.0/chat_stream_nousage"),
        ("m", "vllm_0.32.0/chat_stream_continuous_usage", "vllm_0.32.0/chat_stream_usage"),
        ("lc", "llamacpp/chat_stream_usage", "llamacpp/chat_stream_nousage"),
        ("lc", "llamacpp/chat_stream_usage", "llamacpp/chat_stream_usage"),
    ],
)
def test_recorded_streams_come_out_as_the_engine_would_have_sent_them(
    model: str, engine_sent: str, client_gets: str, caller: Caller
) -> None:
    usage = client_gets.endswith("stream_usage")
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    with caller.stream(body(f"recorded?file={engine_sent}.response.sse", model=model, stream=True, **fields)) as answer:
        got = b"".join(answer.iter_raw())
    recorded = Path(RECORDED / f"{client_gets}.response.sse").read_bytes()
    assert same_but_ids(got) == same_but_ids(recorded)
    close = caller.node.event(answer.headers["x-request-id"]).close
    assert not close.estimated
    wanted = {"m": (28, 256, 12), "lc": (5, 163, 24)}[model]
    assert (close.uncached_input_tokens, close.cached_input_tokens, close.output_tokens) == wanted


@pytest.mark.parametrize(
    "name",
    ["vllm_0.32.0/chat_nonstream_warm_cached", "vllm_0.32.0/chat_n2_logprobs", "llamacpp/chat_nonstream_warm_cached"],
)
def test_recorded_whole_answers_come_out_unchanged(name: str, caller: Caller) -> None:
    recorded = Path(RECORDED / f"{name}.response.json").read_bytes()
    answer = caller.post(body(f"recorded?file={name}.response.json", model="lc" if "llama" in name else "m"))
    assert answer.content == recorded


class TestUsage:
    """What is metered from what the engine says of itself."""

    def test_a_last_chunk_with_choices_and_usage_is_believed(self, caller: Caller, node: Node) -> None:
        with caller.stream(body("usage_on_last_choice", stream=True)) as answer:
            got = b"".join(answer.iter_raw())
        assert b'"usage"' not in got
        close = node.event(answer.headers["x-request-id"]).close
        assert (close.uncached_input_tokens, close.cached_input_tokens, close.output_tokens) == (239, 15_872, 2)

    def test_growing_usage_is_never_summed(self, caller: Caller, node: Node) -> None:
        with caller.stream(body("normal?tokens=20&cached=7", stream=True)) as answer:
            answer.read()
        close = node.event(answer.headers["x-request-id"]).close
        assert (close.uncached_input_tokens, close.cached_input_tokens, close.output_tokens) == (10, 7, 20)

    @pytest.mark.parametrize("stream", [False, True])
    def test_all_choices_are_counted_once(self, stream: bool, caller: Caller, node: Node) -> None:
        with caller.stream(body("normal", stream=stream, n=2)) as answer:
            got = answer.read()
        if stream:
            assert text_of(got, 0) == text_of(got, 1) == "tok1 tok2 tok3 tok4 tok5 "
        event = node.event(answer.headers["x-request-id"])
        assert (event.open.choices, event.close.output_tokens) == (2, 10)

    def test_an_engine_that_contradicts_itself_is_billed_by_its_last_total(self, caller: Caller, node: Node) -> None:
        with caller.stream(body("falling_usage", stream=True)) as answer:
            answer.read()
        close = node.event(answer.headers["x-request-id"]).close
        assert (close.uncached_input_tokens, close.cached_input_tokens, close.output_tokens) == (0, 17, 1)

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_engine_without_usage_is_estimated_and_flagged(self, stream: bool, caller: Caller, node: Node) -> None:
        with caller.stream(body("no_usage", stream=stream)) as answer:
            assert answer.read()
        close = node.event(answer.headers["x-request-id"]).close
        assert close.estimated
        assert close.output_tokens is not None
        assert 5 <= close.output_tokens <= 7

    def test_an_engine_that_always_names_the_same_id_loses_no_event(self, caller: Caller, node: Node) -> None:
        answers = [caller.post(body("normal?id=chatcmpl-1")) for _ in range(20)]
        assert {answer.json()["id"] for answer in answers} == {"chatcmpl-1"}
        assert len({node.event(answer.headers["x-request-id"]).event_id for answer in answers}) == 20

    def test_the_close_is_in_the_spool_before_the_client_has_the_last_byte(self, caller: Caller, node: Node) -> None:
        for stream in (False, True):
            with caller.stream(body("normal", stream=stream)) as answer:
                answer.read()
                assert len(node.events(answer.headers["x-request-id"])) == 1


def test_completions_are_relayed_like_chats(caller: Caller, node: Node) -> None:
    content = json.dumps({"model": "m", "prompt": ["a", "b"], "user": "script:recorded?file="
                          "vllm_0.32.0/completion_batch2.response.json"}).encode()  # fmt: skip
    answer = caller.post(content, path="/v1/completions")
    assert answer.content == Path(RECORDED / "vllm_0.32.0/completion_batch2.response.json").read_bytes()
    event = node.event(answer.headers["x-request-id"])
    assert (event.open.operation, event.open.choices) == ("completion", 2)


def test_a_long_user_is_forwarded_whole_and_stored_cut(caller: Caller, node: Node, engines: Engines) -> None:
    answer = caller.post({**body(), "user": "u" * 100_000})
    assert answer.status_code == 200
    sent = engines.truth(answer.headers["x-request-id"]).body
    assert json.loads(sent)["user"] == "u" * 100_000
    assert node.event(answer.headers["x-request-id"]).open.user == "u" * 256


def test_an_answer_of_a_large_body_is_whole(caller: Caller, engines: Engines) -> None:
    """Bodies longer than one read of the socket, at both sides."""
    long = body("normal", messages=[{"role": "user", "content": "x" * 1_000_000}])
    answer = caller.post(long)
    assert answer.status_code == 200
    assert len(engines.truth(answer.headers["x-request-id"]).body) > 1_000_000


def test_one_connection_carries_many_requests(node: Node, people: People) -> None:
    with http_client(node.url, people["plain"].headers) as client:
        for stream in (False, True, False, True):
            answer = client.post(CHAT, json=body("normal", stream=stream))
            assert answer.status_code == 200
        assert events(answer.content)[-1] == b"[DONE]"
