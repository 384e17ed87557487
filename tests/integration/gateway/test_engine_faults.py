"""What an engine does wrong: retried once elsewhere before the first token, said in the stream after it, never a false
stop, never a hang, and one event that tells what happened (reference gateway 5, rows 22, 23, 28; router R22).
"""

from __future__ import annotations

import json
import threading
import time
from itertools import product
from typing import Any, ClassVar

import httpx
import pytest

from billing.usage_event import Outcome
from tests.fakes.engine_scripts import DONE, Ask, End, Script, Send, Wait, choice, chunk, event
from tests.integration.gateway.client import Caller, assert_error, body, chunks, events, text_of
from tests.integration.gateway.stack import Engines


def streamed(caller: Caller, script: str | None, **fields: Any) -> tuple[httpx.Response, bytes]:
    """A streamed answer, read to its end."""
    with caller.stream(body(script, stream=True, **fields)) as answer:
        return answer, b"".join(answer.iter_raw())


class TestBeforeTheFirstToken:
    """Nothing was sent yet, so one other engine may take over."""

    @pytest.mark.parametrize(
        ("fault", "stream"),
        [
            *product(
                ["cut?after=-1&how=reset", "cut?after=-1&how=fin", "status?code=500", "status?code=502",
                 "status?code=503", "status?code=429", "html", "status?code=401", "status?code=307"],
                [False, True],
            ),
            ("cut?after=0&how=reset", True),
            ("cut?after=0&how=fin", True),
            ("error_event?after=0", True),
        ],
    )  # fmt: skip
    def test_a_lost_engine_is_replaced_once_and_one_event_of_two_is_billed(
        self, fault: str, stream: bool, fresh: str, caller: Caller, engines: Engines
    ) -> None:
        script = f"once:{fresh}|{fault}|normal"
        if stream:
            answer, got = streamed(caller, script, model=fresh)
            assert text_of(got) == "tok1 tok2 tok3 tok4 tok5 "
            assert events(got)[-1] == b"[DONE]"
        else:
            answer = caller.post(body(script, model=fresh))
        assert answer.status_code == 200, answer.text
        asked = engines.of_request(answer.headers["x-request-id"])
        assert {name for name, _ in asked} == {"left", "right"}
        first, second = caller.node.events(answer.headers["x-request-id"])
        assert (first.open.attempt, first.close.billable) == (1, False)
        assert (second.open.attempt, second.close.billable, second.close.outcome) == (2, True, Outcome.COMPLETED)
        assert first.open.endpoint == f"{fresh}-{asked[0][0]}" != second.open.endpoint
        assert first.event_id != second.event_id
        assert second.close.output_tokens == 5

    @pytest.mark.parametrize(
        ("fault", "status", "code"),
        [("cut?after=-1&how=reset", 502, "engine_lost"), ("status?code=500", 500, "engine_error"),
         ("html", 502, "engine_error"), ("status?code=429&retry_after=7", 429, "engine_overloaded"),
         ("status?code=503&retry_after=7", 503, "engine_overloaded")],
    )  # fmt: skip
    def test_two_lost_engines_are_enough(self, fault: str, status: int, code: str, fresh: str, caller: Caller) -> None:
        answer = caller.post(body(fault, stream=status == 429, model=fresh))
        error = assert_error(answer, status, code)
        if "code=" in fault:
            assert error["message"] == f"stub says {status}"
        if "retry_after" in fault:
            assert answer.headers["retry-after"] == "7"
            assert answer.headers["retry-after-ms"] == "7000"
        events = caller.node.events(answer.headers["x-request-id"])
        assert [event.close.billable for event in events] == [False, True]
        assert {event.close.output_tokens for event in events} == {None}

    @pytest.mark.parametrize("code", [400, 404, 413, 422])
    def test_a_refusal_keeps_its_status_and_message_and_is_not_tried_again(
        self, code: int, fresh: str, caller: Caller, engines: Engines
    ) -> None:
        answer = caller.post(body(f"status?code={code}", stream=True, model=fresh))
        error = assert_error(answer, code, type_="invalid_request_error")
        assert error["message"] == f"stub says {code}"
        assert error["code"] is None
        assert len(engines.of_request(answer.headers["x-request-id"])) == 1
        close = caller.node.event(answer.headers["x-request-id"]).close
        assert (close.outcome, close.status) == (Outcome.REJECTED_BY_ENGINE, code)

    @pytest.mark.parametrize(
        ("recorded", "status", "code"),
        [("vllm_0.32.0/err_context_length", 400, "context_length_exceeded"),
         ("llamacpp/err_context_length", 400, "context_length_exceeded"),
         ("vllm_0.32.0/err_model_not_found", 404, "model_not_found"),
         ("vllm_0.32.0/err_bad_temperature", 400, None)],
    )  # fmt: skip
    def test_recorded_errors_come_out_in_openais_form(
        self, recorded: str, status: int, code: str | None, caller: Caller
    ) -> None:
        answer = caller.post(body(f"recorded?file={recorded}.response.json&code={status}"))
        error = assert_error(answer, status, code)
        assert len(error["message"]) > 10

    def test_an_error_body_without_end_keeps_its_status(self, caller: Caller, engines: Engines) -> None:
        long = Send(json.dumps({"detail": [{"msg": "bad", "input": "x" * 200_000}]}).encode())
        kind = (("content-type", "application/json"),)
        engines.by_name["solo"].enqueue(Script("long error", (long,), 400, kind, "length"))
        assert_error(caller.post(body(model="solo")), 400, type_="invalid_request_error")

    def test_an_error_with_a_status_in_the_stream_is_answered_with_it(self, caller: Caller, engines: Engines) -> None:
        error = {"error": {"message": "The grammar is bad.", "type": "BadRequestError", "param": None, "code": 400}}
        engines.by_name["solo"].enqueue(Script("early", (Send(event(error)), Send(DONE))))
        answer = caller.post(body(model="solo", stream=True))
        assert assert_error(answer, 400)["message"] == "The grammar is bad."
        assert caller.node.event(answer.headers["x-request-id"]).close.outcome is Outcome.REJECTED_BY_ENGINE

    def test_an_engine_that_is_not_there_is_502_and_one_that_does_not_accept_504(self, caller: Caller) -> None:
        assert_error(caller.post(body(model="dead")), 502, "engine_unreachable")
        started_s = time.monotonic()
        answer = caller.post(body(model="hole", stream=True))
        assert_error(answer, 504, "engine_timeout")
        assert 0.9 <= time.monotonic() - started_s < 3
        assert "connect" in answer.json()["error"]["message"]
        assert caller.node.event(answer.headers["x-request-id"]).close.status == 504


class TestAfterTheFirstToken:
    """The client is told, and pays for what it got."""

    @pytest.mark.parametrize(
        "script", ["cut?after=3&how=reset&gap_ms=20", "cut?after=3&how=fin&gap_ms=20", "cut?after=3&how=reset"]
    )
    def test_a_cut_stream_says_so_and_never_stops_falsely(
        self, script: str, fresh: str, caller: Caller, engines: Engines
    ) -> None:
        answer, got = streamed(caller, script, model=fresh)
        assert answer.status_code == 200
        assert text_of(got) == "tok1 tok2 tok3 "
        assert chunks(got)[-1]["error"]["code"] == "engine_lost"
        assert set(chunks(got)[-1]["error"]) == {"message", "type", "param", "code"}
        assert events(got)[-1] == b"[DONE]"
        assert b'"finish_reason":"' not in got
        assert len(engines.of_request(answer.headers["x-request-id"])) == 1
        close = caller.node.event(answer.headers["x-request-id"]).close
        assert (close.outcome, close.estimated, close.billable) == (Outcome.FAILED, True, True)
        assert (close.uncached_input_tokens, close.output_tokens) == (17, 3)
        assert close.error_code == "engine_lost"

    def test_an_end_without_done_or_finish_reason_is_truncated(self, caller: Caller, engines: Engines) -> None:
        def cut_in_order(ask: Ask) -> Script:
            words = [Send(chunk(ask, [choice(0, {"content": "hi"})]), tokens=1) for _ in range(2)]
            return Script("short", words)  # a complete HTTP answer

        engines.by_name["solo"].enqueue(cut_in_order)
        answer, got = streamed(caller, None, model="solo")
        assert chunks(got)[-1]["error"]["code"] == "upstream_stream_truncated"
        close = caller.node.event(answer.headers["x-request-id"]).close
        assert (close.outcome, close.output_tokens) == (Outcome.TRUNCATED, 2)

    @pytest.mark.parametrize("how", ["end", "fin", "reset"])
    def test_an_end_without_done_but_with_all_finish_reasons_is_a_success(
        self, how: Any, caller: Caller, engines: Engines
    ) -> None:
        def finished(ask: Ask) -> Script:
            steps = [Send(chunk(ask, [choice(0, {"content": "hi"})]), 1), Send(chunk(ask, [choice(0, {}, "stop")]))]
            return Script("finished", steps if how == "end" else [*steps, Wait(0.05), End(how)])

        engines.by_name["solo"].enqueue(finished)
        answer, got = streamed(caller, None, model="solo")
        assert b'"error"' not in got
        assert events(got)[-1] == b"[DONE]"
        assert caller.node.event(answer.headers["x-request-id"]).close.outcome is Outcome.COMPLETED

    def test_an_error_in_the_stream_is_relayed_and_its_done_proves_nothing(self, fresh: str, caller: Caller) -> None:
        answer, got = streamed(caller, "error_event?after=3&gap_ms=20", model=fresh)
        assert chunks(got)[-1]["error"]["message"] == "EngineCore died."
        assert events(got)[-1] == b"[DONE]"
        assert got.count(b"[DONE]") == 1
        close = caller.node.event(answer.headers["x-request-id"]).close
        assert (close.outcome, close.error_code, close.output_tokens) == (Outcome.FAILED, "engine_error", 3)


class TestDeadlines:
    """Four of them (connect 1 s above; first byte 2 s, idle 2.5 s, total 6 s), each at its time and by its name."""

    CASES: ClassVar[dict[str, tuple[str, bool, float, str, int]]] = {
        "first byte, no head": ("cut?after=-1&how=stall", True, 2.0, "first byte", 504),
        "first token, a head and a role": ("cut?after=0&how=stall", True, 2.0, "first byte", 504),
        "first token, only comments": ("pings", True, 2.0, "first byte", 504),
        "idle": ("cut?after=2&how=stall", True, 2.5, "idle", 200),
        "total of a stream that flows": ("endless?gap_ms=1", True, 6.0, "total", 200),
        "total of a stream that trickles": ("endless?gap_ms=900", True, 6.0, "total", 200),
        "total of a whole answer": ("normal?delay_ms=20000", False, 6.0, "total", 504),
        "total of a whole answer without head": ("cut?after=-1&how=stall", False, 6.0, "total", 504),
    }

    def test_each_deadline_ends_its_request(self, fresh: str, caller: Caller, engines: Engines) -> None:
        found: dict[str, tuple[httpx.Response, bytes, float]] = {}

        def pings(ask: Ask) -> Script:
            def steps() -> Any:
                for _ in range(100):
                    yield Send(b": ping\n\n")
                    yield Wait(0.2)

            return Script("pings", steps())

        def one(name: str, script: str, stream: bool) -> None:
            if script == "pings":
                engines.by_name["solo"].enqueue(pings)
            model = {"script": None, "model": "solo"} if script == "pings" else {"script": script, "model": fresh}
            started_s = time.monotonic()
            with caller.stream(body(stream=stream, **model)) as answer:
                got = b"".join(answer.iter_raw())
            found[name] = (answer, got, time.monotonic() - started_s)

        threads = [threading.Thread(target=one, args=(name, case[0], case[1])) for name, case in self.CASES.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(25)
        assert found.keys() == self.CASES.keys()
        for name, (_, stream, deadline_s, word, status) in self.CASES.items():
            answer, got, took_s = found[name]
            assert answer.status_code == status, (name, got)
            assert deadline_s - 0.05 <= took_s < deadline_s + 1.5, (name, took_s)
            error = (json.loads(got) if status != 200 else chunks(got)[-1])["error"]
            assert error["code"] == "engine_timeout", name
            assert f"passed its {word} deadline of {deadline_s:g} s" in error["message"], (name, error)
            if status == 200:
                assert events(got)[-1] == b"[DONE]"
            request_id = answer.headers["x-request-id"]
            assert [truth.ended for _, truth in engines.of_request(request_id)] == ["client_closed"], name
            close = caller.node.event(request_id).close
            assert (close.outcome, close.status, close.error_code) == (Outcome.FAILED, 504, "engine_timeout"), name
            assert stream or close.output_tokens is None


def test_an_engine_that_fails_fast_gets_little_traffic(fresh: str, caller: Caller, engines: Engines) -> None:
    """R22: `left` answers 500 in a millisecond, so its load is always 0; failures must cost."""

    def failing(_: Ask) -> Script:
        return Script("500", (Send(b"{}"),), 500, (("content-type", "application/json"),), "length")

    left = engines.by_name["left"]
    left.enqueue(*[failing] * 100)
    try:
        before = len(engines.truths("left"))
        statuses = [caller.post(body(model=fresh)).status_code for _ in range(100)]
        tried = len(engines.truths("left")) - before
    finally:
        left._queue.clear()
    assert set(statuses) == {200}, "each was served by the other engine"
    assert 5 <= tried <= 10, "five failures for each of two workers, and none until a trial is due after 5 s"
