"""`billing.metering` on recorded and written streams: what the client sees, what is counted, how streams end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from billing.metering import Meter, StreamEnd
from billing.token_usage import UNKNOWN_USAGE, Usage, usage_of

RECORDED = Path(__file__).parents[2] / "recorded"
VLLM = RECORDED / "vllm_0.32.0"
LLAMA = RECORDED / "llamacpp"


def meter(choices: int = 1, keep: bool = False, each: bool = False) -> Meter:
    return Meter(choices=choices, keep_usage_chunk=keep, keep_continuous_usage=each, now_s=0.0)


def relay(m: Meter, stream: bytes, step: int = 0) -> bytes:
    step = step or len(stream)
    out = b"".join(m.feed(stream[i : i + step]) for i in range(0, len(stream), step))
    return out + m.flush()


def sse(folder: Path, name: str) -> bytes:
    return (folder / f"{name}.response.sse").read_bytes()


def same_but_ids(stream: bytes) -> bytes:
    """Two requests never have the same id, creation second or timings."""
    stream = re.sub(rb'"(id|created)":("[^"]*"|\d+)', rb'"\1":0', stream)
    return re.sub(rb'"timings":\{[^}]*\}', b'"timings":{}', stream)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def token(text: str = "x", index: int = 0, usage: Any = None, finish: str | None = None) -> bytes:
    value: dict[str, Any] = {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}
    if usage is not None:
        value["usage"] = usage
    return event(value)


def counts(output: int, prompt: int = 17, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output, **more}


DONE = b"data: [DONE]\n\n"
ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})


@pytest.mark.parametrize("step", [0, 1, 7, 333])
class TestRecordedPair:
    """What we ask of vLLM is cut to what it sends for the client's own body."""

    def test_a_client_that_asked_for_no_usage_gets_the_stream_without_it(self, step: int) -> None:
        m = meter()
        out = relay(m, sse(VLLM, "chat_stream_continuous_usage"), step)
        assert same_but_ids(out) == same_but_ids(sse(VLLM, "chat_stream_nousage"))
        assert m.end() is StreamEnd.COMPLETED
        assert m.engine_usage() == Usage(28, 256, None, 12, None)

    def test_a_client_that_asked_for_the_usage_chunk_gets_only_that(self, step: int) -> None:
        out = relay(meter(keep=True), sse(VLLM, "chat_stream_continuous_usage"), step)
        assert same_but_ids(out) == same_but_ids(sse(VLLM, "chat_stream_usage"))

    def test_a_client_that_asked_for_all_usage_gets_every_byte(self, step: int) -> None:
        stream = sse(VLLM, "chat_stream_continuous_usage")
        assert relay(meter(keep=True, each=True), stream, step) == stream

    def test_a_stream_without_usage_is_untouched(self, step: int) -> None:
        stream = sse(VLLM, "chat_stream_nousage")
        m = meter()
        assert relay(m, stream, step) == stream
        assert m.engine_usage().estimated
        assert m.engine_usage().output_tokens == 12

    def test_llama_cpp_moves_its_timings_back(self, step: int) -> None:
        m = meter()
        out = relay(m, sse(LLAMA, "chat_stream_usage"), step)
        assert same_but_ids(out) == same_but_ids(sse(LLAMA, "chat_stream_nousage"))
        assert m.engine_usage() == Usage(5, 163, None, 24, None)

    def test_usage_beside_the_last_choice_is_kept_for_a_client_that_asked_for_usage(self, step: int) -> None:
        stream = sse(LLAMA, "completion_stream_usage")
        m = meter(keep=True)
        assert relay(m, stream, step) == stream
        assert m.engine_usage() == Usage(4, 1, None, 24, None)

    def test_usage_beside_the_last_choice_is_cut_for_a_client_that_did_not_ask(self, step: int) -> None:
        stream = sse(LLAMA, "completion_stream_usage")
        m = meter()
        out = relay(m, stream, step)
        assert out == re.sub(rb'"usage":\{.*?\}\},', b"", stream)
        assert m.engine_usage() == Usage(4, 1, None, 24, None)

    def test_a_recorded_completion_is_metered(self, step: int) -> None:
        m = meter()
        out = relay(m, sse(VLLM, "completion_stream_usage"), step)
        assert b'"usage"' not in out
        assert out.endswith(DONE)
        assert m.engine_usage().output_tokens == 20

    def test_an_aborted_stream_is_truncated(self, step: int) -> None:
        m = meter()
        stream = sse(VLLM, "completion_stream_aborted")
        assert relay(m, stream, step) == stream
        assert m.end() is StreamEnd.TRUNCATED


class TestCounting:
    def test_growing_usage_is_not_summed(self) -> None:
        m = meter()
        relay(m, ROLE + b"".join(token(usage=counts(n)) for n in range(1, 21)) + DONE)
        assert m.engine_usage().output_tokens == 20

    def test_usage_beside_a_choice_counts_that_choice(self) -> None:
        m = meter(choices=2)
        relay(m, b"".join(token(index=n % 2, usage=counts(n // 2 + 1)) for n in range(10)))
        assert m.engine_usage().output_tokens == 10
        assert m.engine_usage().estimated

    def test_the_total_wins_over_what_was_counted_per_choice(self) -> None:
        m = meter(choices=2)
        stream = token(index=0, usage=counts(3), finish="stop") + token(index=1, usage=counts(4), finish="stop")
        relay(m, stream + event({"choices": [], "usage": counts(7)}) + DONE)
        assert m.engine_usage() == Usage(17, None, None, 7, None)

    def test_cached_and_written_tokens_are_taken_out_of_the_prompt_once(self) -> None:
        m = meter()
        details = {"cached_tokens": 200, "cache_write_tokens": 50}
        usage = counts(2, 300, prompt_tokens_details=details, completion_tokens_details={"reasoning_tokens": 1})
        relay(m, token(finish="stop") + event({"choices": [], "usage": usage}) + DONE)
        assert m.engine_usage() == Usage(50, 200, 50, 2, 1)
        assert m.engine_usage().input_tokens == 300

    def test_usage_in_the_last_chunk_with_a_choice_counts(self) -> None:
        m = meter()
        usage = counts(2, 16_111, prompt_tokens_details={"cached_tokens": 15_872})
        relay(m, token() + token() + event({"choices": [{"index": 0, "delta": {}}], "usage": usage}) + DONE)
        assert m.engine_usage() == Usage(239, 15_872, None, 2, None, estimated=True)

    def test_a_total_below_what_was_counted_wins_and_is_flagged(self) -> None:
        m = meter()
        relay(m, token(usage=counts(9)) + token(finish="stop") + event({"choices": [], "usage": counts(1)}) + DONE)
        assert m.engine_usage() == Usage(17, None, None, 1, None, inconsistent=True)

    def test_falling_counts_are_flagged(self) -> None:
        m = meter()
        for n in (5, 4):
            m.feed(token(usage=counts(n)))
        assert m.engine_usage().inconsistent

    def test_more_cached_than_prompt_is_bounded_and_flagged(self) -> None:
        m = meter()
        relay(m, token() + event({"choices": [], "usage": counts(1, 10, prompt_tokens_details={"cached_tokens": 99})}))
        assert m.engine_usage() == Usage(0, 10, None, 1, None, inconsistent=True)

    @pytest.mark.parametrize("bad", [-1, 1.5, "7", None, True, 2**60])
    def test_what_is_no_count_is_ignored(self, bad: Any) -> None:
        m = meter()
        relay(m, token() + token() + event({"choices": [], "usage": {**counts(3), "completion_tokens": bad}}) + DONE)
        assert m.engine_usage().output_tokens == 2
        assert m.engine_usage().estimated

    def test_without_usage_content_chunks_are_counted_as_an_estimate(self) -> None:
        m = meter()
        relay(m, ROLE + token() * 3 + event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + DONE)
        assert m.engine_usage() == Usage(None, None, None, 3, None, estimated=True)

    def test_nothing_at_all_is_unknown(self) -> None:
        assert meter().engine_usage() == UNKNOWN_USAGE._replace(estimated=True)

    def test_the_tier_that_served_is_told(self) -> None:
        m = meter()
        m.feed(event({"choices": [{"index": 0, "delta": {"content": "x"}}], "service_tier": "flex"}))
        assert m.engine_usage().tier_served == "flex"


class TestFirstToken:
    @pytest.mark.parametrize(
        "delta",
        [{"content": "a"}, {"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}, {"role": "a", "refusal": "no"}],
    )
    def test_content_is_a_first_token(self, delta: dict[str, Any]) -> None:
        m = meter()
        m.feed(ROLE)
        assert not m.first_token
        m.feed(event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
        assert m.first_token

    def test_a_role_a_comment_and_an_empty_text_are_none(self) -> None:
        m = meter()
        m.feed(ROLE + b": ping\n\n" + event({"choices": [{"index": 0, "text": ""}]}))
        assert not m.first_token

    def test_completion_text_is_one(self) -> None:
        m = meter()
        m.feed(event({"choices": [{"index": 0, "text": "a"}]}))
        assert m.first_token


class TestEnd:
    def test_done_without_error_is_complete(self) -> None:
        m = meter()
        relay(m, token() + DONE)
        assert m.done
        assert m.end() is StreamEnd.COMPLETED

    @pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
    @pytest.mark.parametrize("tokens", [b"", token()], ids=["alone", "after a token"])
    def test_what_comes_after_done_is_neither_relayed_nor_counted(self, line_end: bytes, tokens: bytes) -> None:
        more = token(usage={"prompt_tokens": 7, "completion_tokens": 99})
        whole = (tokens + DONE).replace(b"\n", line_end)
        for pieces in ([whole + more.replace(b"\n", line_end)], [whole + b"data: x"], [whole, more], [whole, b"x"]):
            m = meter()
            assert b"".join([m.feed(piece) for piece in pieces]) + m.flush() == whole
            assert m.done
            assert m.engine_usage().output_tokens == (1 if tokens else None)

    def test_every_choice_finished_without_done_is_complete(self) -> None:
        m = meter(choices=2)
        relay(m, token(index=0, finish="stop") + token(index=1, finish="length"))
        assert m.end() is StreamEnd.COMPLETED

    def test_one_of_two_choices_finished_is_truncated(self) -> None:
        m = meter(choices=2)
        relay(m, token(index=0, finish="stop") + token(index=1))
        assert m.end() is StreamEnd.TRUNCATED

    def test_done_after_an_error_is_a_failure(self) -> None:
        m = meter()
        error = event({"error": {"message": "died", "code": 500}})
        assert relay(m, token() + error + DONE) == token() + error + DONE
        assert m.end() is StreamEnd.ENGINE_ERROR
        assert m.failed

    def test_an_error_of_null_is_none(self) -> None:
        m = meter()
        relay(m, event({"error": None, "choices": [{"index": 0, "delta": {"content": "error"}}]}) + DONE)
        assert m.end() is StreamEnd.COMPLETED

    def test_half_an_event_is_dropped_so_that_an_error_can_follow(self) -> None:
        m = meter()
        assert relay(m, token() + token()[:-9]) == token()
        assert m.end() is StreamEnd.TRUNCATED

    def test_a_last_event_without_its_blank_line_is_taken(self) -> None:
        m = meter()
        assert relay(m, token(finish="stop") + b"data: [DONE]") == token(finish="stop") + b"data: [DONE]"
        assert m.done

    def test_a_held_finish_is_released_when_the_stream_ends(self) -> None:
        m = meter()
        last = token("", finish="stop")
        assert m.feed(token() + last) == token()
        assert m.flush() == last
        assert m.end() is StreamEnd.COMPLETED


class TestForms:
    """Everything the event stream format allows (reference gateway 2.4)."""

    @pytest.mark.parametrize("mark", [b"\n", b"\r\n", b"\r"])
    @pytest.mark.parametrize("step", [0, 1, 3])
    def test_line_ends(self, mark: bytes, step: int) -> None:
        m = meter()
        usage = event({"choices": [], "usage": counts(1), "system_fingerprint": "f"})
        stream = token(usage=counts(1)) + b": keep\n\n" + token(usage=counts(1), finish="stop") + usage + DONE
        shown = token() + b": keep\n\n" + token(finish="stop")[:-3] + b',"system_fingerprint":"f"}\n\n' + DONE
        assert relay(m, stream.replace(b"\n", mark), step) == shown.replace(b"\n", mark)
        assert m.engine_usage().output_tokens == 1

    def test_fields_comments_and_no_space_after_the_colon(self) -> None:
        m = meter()
        stream = b'event: message\nid: 1\n: c\ndata:{"choices":[{"index":0,"delta":{"content":"x"}}]}\nretry: 5\n\n'
        assert relay(m, stream) == stream
        assert m.first_token

    def test_a_chunk_over_several_data_lines(self) -> None:
        m = meter()
        stream = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}],\ndata: "usage":{"completion_tokens":4}}\n\n'
        assert relay(m, stream) == b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
        assert m.engine_usage().output_tokens == 4

    def test_spaced_json_and_usage_in_the_middle(self) -> None:
        m = meter()
        raw = b'data: { "usage" : {"completion_tokens": 1, "x": "}"} , "choices": [{"delta": {"content": "a"}}] }\n\n'
        assert relay(m, raw) == b'data: { "choices": [{"delta": {"content": "a"}}] }\n\n'

    def test_a_nested_usage_stays(self) -> None:
        stream = ROLE + token() + event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
                                         "x": {"y": 1, "usage": {"z": 1}}})  # fmt: skip
        assert relay(meter(), stream) == stream

    def test_usage_in_the_text_stays(self) -> None:
        text = '{"a":1,"usage":{"b":2}}\n\ndata: [DONE]\n\n"error" "finish_reason":"stop"'
        m = meter()
        stream = token() + token(text, usage=counts(2))
        assert relay(m, stream) == token() + token(text)
        assert not m.done
        assert m.end() is StreamEnd.TRUNCATED

    def test_null_usage_is_cut_for_a_client_that_did_not_ask(self) -> None:
        one = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
        assert relay(meter(), event({**one, "usage": None}) * 3) == event(one) * 3
        assert relay(meter(keep=True), event({**one, "usage": None}) * 3) == event({**one, "usage": None}) * 3

    def test_events_larger_than_any_line_buffer(self) -> None:
        m = meter()
        big = "w" * 200_000
        assert relay(m, token(big, usage=counts(1)), 1_000) == token(big)

    def test_an_event_that_never_ends_is_a_failure(self) -> None:
        m = meter()
        for _ in range(17):
            assert m.feed(b"x" * 1024 * 1024) == b""
        assert m.done
        assert m.end() is StreamEnd.ENGINE_ERROR

    def test_lone_surrogates_and_what_is_no_json_pass(self) -> None:
        stream = b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\ndata: <oops>\n\ndata: 5\n\n'
        m = meter()
        assert relay(m, stream) == stream
        assert m.first_token

    def test_a_byte_order_mark_is_no_part_of_the_field(self) -> None:
        m = meter()
        relay(m, b"\xef\xbb\xbf" + token())
        assert m.first_token


class TestDelivery:
    def test_only_what_the_socket_took_is_delivered(self) -> None:
        m = meter()
        m.feed(token(usage=counts(1)))
        m.delivered(0.0)
        m.feed(token(usage=counts(2)))
        assert m.delivered_usage() == Usage(17, None, None, 1, None, estimated=True)
        m.delivered(0.0)
        assert m.delivered_usage().output_tokens == 2

    def test_of_a_piece_that_was_taken_in_part_the_events_begun_count(self) -> None:
        m = meter()
        sizes = []
        for upto in (range(1, 2), range(2, 6), range(6, 7)):
            data = m.feed(b"".join(token(usage=counts(n)) for n in upto))
            sizes.append(len(data))
            m.sent(data, sum(sizes))
        one = sizes[0]
        ends = ((0, 0), (1, 1), (one, 1), (2 * one + 3, 3), (sum(sizes[:2]), 5), (sum(sizes), 6))
        for taken_bytes, tokens in ends:
            m.delivered_up_to(taken_bytes)
            assert m.delivered_usage().output_tokens == tokens
        m.delivered_up_to(0)
        assert m.delivered_usage().output_tokens == 6

    def test_a_held_event_is_not_delivered(self) -> None:
        m = meter()
        m.feed(token(usage=counts(1)) + token(usage=counts(2), finish="stop"))
        m.delivered(0.0)
        assert m.delivered_usage().output_tokens == 1

    def test_all_of_a_complete_stream_delivered_is_the_engines_own_count(self) -> None:
        m = meter()
        relay(m, sse(VLLM, "chat_stream_continuous_usage"))
        assert m.delivered_usage().estimated
        m.delivered(0.0)
        assert m.delivered_usage() == m.engine_usage() == Usage(28, 256, None, 12, None)

    def test_a_checkpoint_is_due_after_64_tokens_or_a_second(self) -> None:
        m = meter()
        assert not m.delivered(100.0)
        m.feed(token(usage=counts(63)))
        assert not m.delivered(0.9)
        assert m.delivered(1.0)
        m.checkpointed(1.0)
        assert not m.delivered(9.0)
        m.feed(token(usage=counts(127)))
        assert m.delivered(1.1)


class TestWholeAnswers:
    @pytest.mark.parametrize(
        ("folder", "name", "expected"),
        [
            (VLLM, "chat_nonstream_cold", Usage(284, 0, None, 12, None)),
            (VLLM, "chat_nonstream_warm_cached", Usage(28, 256, None, 12, None)),
            (VLLM, "completion_batch2", Usage(4, 0, None, 8, None)),
            (LLAMA, "chat_nonstream_warm_cached", Usage(5, 163, None, 24, None)),
        ],
    )
    def test_recorded(self, folder: Path, name: str, expected: Usage) -> None:
        assert usage_of((folder / f"{name}.response.json").read_bytes()) == expected

    def test_without_usage_the_text_is_an_estimate(self) -> None:
        body = json.dumps({"choices": [{"text": "x" * 40}, {"text": "y" * 40}]}).encode()
        assert usage_of(body, choices=2) == Usage(None, None, None, 20, None, estimated=True)

    @pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"x"', b"{"])
    def test_what_is_no_answer_is_unknown(self, body: bytes) -> None:
        assert usage_of(body) is UNKNOWN_USAGE


@pytest.mark.parametrize("tier", ['"a\\u0000b"', '"\\ud800"', '"' + "x" * 65 + '"', "7"])
def test_an_engines_odd_service_tier_stays_out_of_the_books(tier: str) -> None:
    body = '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1},"service_tier":' + tier + "}"
    assert usage_of(body.encode()).tier_served is None


def test_a_count_beyond_any_context_is_no_count() -> None:
    assert usage_of(b'{"usage":{"prompt_tokens":9007199254740991,"completion_tokens":1}}').input_tokens is None
