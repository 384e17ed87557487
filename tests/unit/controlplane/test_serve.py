"""The request path over doubles of its ports: each step that can break, broken; the books of each ending."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from billing.usage_event import Outcome
from controlplane.errors import EngineLost, EngineTimeout, EngineUnreachable
from controlplane.ports import Call, Target
from controlplane.rate_limit import NO_LIMITS, Cost, RefusalReason, Refused
from controlplane.tenancy import Dimension, Limit, OutagePolicy
from router.endpoints import Ending
from tests.fakes.serve_ports import (
    DEADLINES,
    PRINCIPAL,
    After,
    FakeLimits,
    FakeSink,
    Hang,
    Plan,
    Step,
    World,
    a_call,
)


def sse(content: str | None = None, finish: str | None = None, usage: tuple[int, int] | None = None) -> bytes:
    """One chunk of a stream."""
    delta = {} if content is None else {"content": content}
    chunk: dict[str, object] = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}\n\n'
WORDS = (sse("a", usage=(7, 1)), sse("b", usage=(7, 2)), sse("c", usage=(7, 3)))
LAST = sse(finish="stop", usage=(7, 3))
TOTAL = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
GOOD = Plan(steps=(ROLE, *WORDS, LAST, TOTAL, DONE, b""))
WHOLE_BODY = b'{"choices":[{"message":{"content":"abc"}}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
WHOLE = Plan(steps=(WHOLE_BODY, b""), headers=((b"content-type", b"application/json"),))
ERROR = b'data: {"error":{"message":"dead","code":500}}\n\n'


A_LIMIT = Limit("l", "org", "org", None, Dimension.REQUESTS, 3, 60, 3)


def error_of(sink: FakeSink) -> dict[str, object]:
    """The error object of an answer that is one."""
    found: dict[str, object] = json.loads(sink.data)["error"]
    return found


async def run(*plans: Plan, stream: bool = True, **more: object) -> World:
    """One request by these plans; everything that always holds is checked."""
    world = World(plans, **more)  # type: ignore[arg-type] # fields of World by name
    await world.serve(a_call(stream=stream))
    world.check()
    return world


class TestAnswers:
    """An engine that does its work."""

    async def test_a_stream_is_relayed_without_the_usage_and_closed_before_its_last_byte(self) -> None:
        world = World((GOOD,))
        closes_when_done: list[int] = []
        world.sink.on_piece = lambda: closes_when_done.append(len(world.books.closes))
        await world.serve()
        world.check()
        assert b"usage" not in world.sink.data
        assert world.sink.data.count(b'"content"') == 3
        assert closes_when_done[-1] == 1
        assert closes_when_done[-2] == 0
        close = world.books.closes[0]
        assert (close.outcome, close.uncached_input_tokens, close.output_tokens) == (Outcome.COMPLETED, 7, 3)
        assert world.fleet.ends[0][1].ending is Ending.COMPLETED
        assert world.limits.settled[0][1] == Cost(7, 3)
        assert world.trace.status == 200
        assert world.trace.first_token_s is not None

    async def test_nothing_is_sent_before_the_first_token(self) -> None:
        world = World((Plan(steps=(ROLE, b": ping\n\n", After(2, WORDS[0]), LAST, DONE, b"")),))
        sent: list[bytes] = []
        world.sink.on_piece = lambda: sent.append(world.sink.pieces[-1])
        await world.serve()
        assert sent[0].startswith(ROLE), "the role is held, then sent with the first word"
        assert b'"content":"a"' in sent[0]

    async def test_a_whole_answer_is_closed_before_it_is_sent(self) -> None:
        world = World((WHOLE,))
        closed: list[int] = []
        world.sink.on_piece = lambda: closed.append(len(world.books.closes))
        await world.serve(a_call(stream=False))
        world.check()
        assert world.sink.data == WHOLE_BODY
        assert dict(world.sink.headers)[b"content-length"] == b"%d" % len(WHOLE_BODY)
        assert closed == [1]

    async def test_the_reservation_is_settled_before_the_last_byte(self) -> None:
        for plan, stream in ((GOOD, True), (WHOLE, False)):
            world = World((plan,))
            settled: list[int] = []
            world.sink.on_piece = lambda s=settled, w=world: s.append(len(w.limits.settled))  # type: ignore[misc] # bound now
            await world.serve(a_call(stream=stream))
            assert settled[-1] == 1

    async def test_an_end_without_done_after_all_finish_reasons_is_a_success_and_gets_its_done(self) -> None:
        for end in (b"", EngineLost("e0", "cut")):
            world = await run(Plan(steps=(*WORDS, LAST, end)))
            assert world.books.closes[0].outcome is Outcome.COMPLETED
            assert world.sink.data.endswith(DONE)
            assert b"error" not in world.sink.data

    async def test_checkpoints_follow_delivery(self) -> None:
        words = tuple(sse("w", usage=(7, n)) for n in range(1, 200))
        world = await run(Plan(steps=(*words, LAST, DONE, b"")))
        noted = [one.output_tokens for one in world.books.checkpoints]
        assert noted == [64, 128, 192]

    async def test_an_explained_call_is_remembered(self) -> None:
        world = World((GOOD,))
        await world.serve(a_call()._replace(explain=True))
        assert world.fleet.explained == ["req_1"]
        assert (b"x-inferplane-decision", b"pick=e0") in world.sink.headers

    async def test_a_decision_that_cannot_be_kept_leaves_nothing_open(self) -> None:
        world = World((GOOD,))

        def broken(target: Target, call: Call) -> None:
            raise TypeError("a defect in explain")

        world.fleet.explain = broken  # type: ignore[method-assign]  # a fault
        with pytest.raises(TypeError, match="a defect in explain"):
            await world.serve(a_call()._replace(explain=True))
        assert len(world.books.opens) == len(world.books.closes) and len(world.fleet.ends) == 1
        assert world.limits.settled and world.sink.status == 500


class TestBeforeDispatch:
    """Refused: nothing was dispatched, everything comes back, one refusal is counted."""

    @pytest.mark.parametrize(
        ("reason", "status"), [(RefusalReason.TOO_LARGE, 429), (RefusalReason.STORE_UNAVAILABLE, 503)]
    )
    async def test_by_a_limit(self, reason: RefusalReason, status: int) -> None:
        limit = None if reason is RefusalReason.STORE_UNAVAILABLE else A_LIMIT
        world = await run(limits=FakeLimits(Refused(reason, limit, 5, 1, 3.0, NO_LIMITS)))
        assert world.sink.status == world.trace.status == status
        assert world.books.refusals == [("m", reason.value)]
        assert not world.limits.reserved

    async def test_a_class_that_may_go_on_without_the_store_does(self) -> None:
        gone = Refused(RefusalReason.STORE_UNAVAILABLE, None, 0, 0, 1.0, NO_LIMITS)
        world = World((GOOD,), limits=FakeLimits(gone))
        await world.serve(a_call(principal=replace(PRINCIPAL, outage_policy=OutagePolicy.ALLOW)))
        assert world.sink.status == 200

    async def test_no_such_model(self) -> None:
        world = World()
        await world.serve(a_call(model="unknown"))
        world.check()
        assert (world.sink.status, error_of(world.sink)["code"]) == (404, "model_not_found")

    async def test_a_model_that_an_engine_may_yet_tell_is_worth_waiting_for(self) -> None:
        world = World()
        await world.serve(a_call(model="untold"))
        world.check()
        assert (world.sink.status, error_of(world.sink)["code"]) == (503, "no_engine_available")
        assert dict(world.sink.headers)[b"retry-after"] == b"1"

    async def test_no_engine(self) -> None:
        world = await run(endpoints=0)
        assert (world.sink.status, error_of(world.sink)["code"]) == (503, "no_engine_available")
        assert dict(world.sink.headers)[b"retry-after-ms"] == b"2000"
        assert world.limits.settled == [(world.limits.reserved[0], Cost(0, 0, 0))]

    async def test_a_full_spool_serves_nobody(self) -> None:
        world = World((GOOD,))
        world.books.full_after = 0
        await world.serve()
        world.check()
        assert (world.sink.status, error_of(world.sink)["code"]) == (503, "usage_spool_full")
        assert world.fleet.ends[0][1].ending is Ending.CANCELLED
        assert not world.fleet.answers

    async def test_a_client_that_leaves_while_the_store_is_asked_gets_its_tokens_back(self) -> None:
        world = World((GOOD,), limits=FakeLimits(ask_store=True))
        world.limits.answer = asyncio.Event()
        running = asyncio.create_task(world.serve())
        await world.limits.asked.wait()
        world.sink.leave()
        await running
        assert (world.trace.status, world.trace.outcome) == (499, "cancelled")
        assert not world.limits.settled
        world.limits.answer.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        world.check()
        assert world.limits.settled == [(world.limits.reserved[0], Cost(0, 0, 0))]


class TestRetries:
    """Lost before the first token: one more engine, one billable event of two."""

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("lost", "ending"),
        [
            (Plan(EngineUnreachable("e0", "no")), Ending.UNREACHABLE),
            (Plan(EngineLost("e0", "cut")), Ending.UNREACHABLE),
            (Plan(EngineTimeout("e0", "connect", 1.0)), Ending.UNREACHABLE),
            (Plan(500, (b"{}", b"")), Ending.FAILED),
            (Plan(503, (b"{}", b"")), Ending.BUSY),
            (Plan(429, (b"{}", b"")), Ending.BUSY),
            (Plan(401, (b"{}", b"")), Ending.FAILED),
            (Plan(302, (b"", b"")), Ending.FAILED),
            (Plan(200, (EngineLost("e0", "cut"),)), Ending.UNREACHABLE),
        ],
    )
    async def test_another_engine_takes_over(self, lost: Plan, ending: Ending, stream: bool) -> None:
        world = await run(lost, GOOD if stream else WHOLE, stream=stream)
        assert world.sink.status == 200
        assert [target.endpoint_id for target in world.fleet.picked] == ["e0", "e1"]
        assert [end.ending for _, end in world.fleet.ends] == [ending, Ending.COMPLETED]
        assert [close.billable for close in world.books.closes] == [False, True]
        assert world.books.order == ["open 1", "open 2", "close", "close"], "a kill in between leaves one billable"
        assert world.trace.attempts_count == 2

    @pytest.mark.parametrize("steps", [(ROLE, EngineLost("e0", "cut")), (ROLE, b""), (b"",), (ERROR, DONE, b"")])
    async def test_a_stream_that_breaks_before_its_first_token(self, steps: tuple[Step, ...]) -> None:
        world = await run(Plan(steps=steps), GOOD)
        assert world.sink.status == 200
        assert world.sink.data.count(DONE) == 1
        assert b"dead" not in world.sink.data

    async def test_twice_is_enough(self) -> None:
        world = await run(Plan(EngineLost("e0", "x")), Plan(500, (b'{"error":{"message":"out of memory"}}', b"")), GOOD)
        assert world.sink.status == 500
        assert error_of(world.sink) == {
            "message": "out of memory", "type": "server_error", "param": None, "code": "engine_error",
        }  # fmt: skip
        assert [close.billable for close in world.books.closes] == [False, True]
        assert {close.output_tokens for close in world.books.closes} == {None}
        assert world.limits.settled[0][1] == Cost(0, 0), "the request itself counts, its tokens do not"

    @pytest.mark.parametrize("status", [400, 404, 422])
    async def test_a_refusal_is_not_tried_again(self, status: int) -> None:
        world = await run(Plan(status, (b'{"error":{"message":"bad n"}}', b"")), GOOD)
        assert (world.sink.status, error_of(world.sink)["message"]) == (status, "bad n")
        assert world.books.closes[0].outcome is Outcome.REJECTED_BY_ENGINE
        assert world.fleet.ends[0][1].ending is Ending.REFUSED

    async def test_one_engine_alone_is_not_asked_twice(self) -> None:
        world = await run(Plan(EngineLost("e0", "cut")), GOOD, endpoints=1)
        assert (world.sink.status, error_of(world.sink)["code"]) == (502, "engine_lost")
        assert len(world.books.opens) == 1

    async def test_a_spool_that_fills_up_before_the_second_attempt(self) -> None:
        world = World((Plan(EngineLost("e0", "cut")), GOOD))
        world.books.full_after = 1
        await world.serve()
        assert world.sink.status == 502
        assert [end.ending for _, end in world.fleet.ends] == [Ending.CANCELLED, Ending.UNREACHABLE]
        assert world.books.closes[0].billable

    async def test_a_busy_engine_is_relayed_with_its_time_when_there_is_no_other(self) -> None:
        busy = Plan(503, (b"{}", b""), headers=((b"retry-after", b"7"),))
        world = await run(busy, endpoints=1)
        headers = dict(world.sink.headers)
        assert (world.sink.status, headers[b"retry-after"], headers[b"retry-after-ms"]) == (503, b"7", b"7000")
        assert world.fleet.ends[0][1].retry_after_s == 7.0

    async def test_an_error_body_that_never_ends_keeps_its_status(self) -> None:
        for steps in ((b"x" * 200_000, b""), (b"{", EngineLost("e0", "cut")), (b"{", Hang())):
            world = await run(Plan(400, steps))
            assert (world.sink.status, error_of(world.sink)["message"]) == (400, "The engine refused the request.")


class TestAfterTheFirstToken:
    """The client is told; what it got is billed."""

    @pytest.mark.parametrize(
        ("end", "code", "outcome", "ending"),
        [
            (EngineLost("e0", "cut"), "engine_lost", Outcome.FAILED, Ending.UNREACHABLE),
            (b"", "upstream_stream_truncated", Outcome.TRUNCATED, Ending.FAILED),
            (Hang(), "engine_timeout", Outcome.FAILED, Ending.FAILED),
        ],
    )
    async def test_a_break(self, end: Step, code: str, outcome: Outcome, ending: Ending) -> None:
        world = await run(Plan(steps=(ROLE, *WORDS[:2], end)), GOOD)
        assert world.sink.status == 200
        assert b'"code":"%s"' % code.encode() in world.sink.data
        assert b'"finish_reason":"stop"' not in world.sink.data
        close = world.books.closes[0]
        assert (close.outcome, close.error_code, close.estimated, close.output_tokens) == (outcome, code, True, 2)
        assert world.fleet.ends[0][1].ending is ending
        assert world.limits.settled[0][1] == Cost(7, 2)

    async def test_an_error_of_the_engine_is_relayed(self) -> None:
        world = await run(Plan(steps=(*WORDS, ERROR, DONE, b"")), GOOD)
        assert world.sink.data.count(b"dead") == 1
        assert world.sink.data.count(DONE) == 1
        assert (world.books.closes[0].outcome, world.books.closes[0].error_code) == (Outcome.FAILED, "engine_error")

    async def test_an_event_without_end_is_cut(self) -> None:
        world = await run(Plan(steps=(*WORDS, *[b"x" * 10_000] * 20)), GOOD)
        assert world.books.closes[0].outcome is Outcome.TRUNCATED
        assert len(world.fleet.answers) == 1
        assert world.fleet.answers[0].aborted

    async def test_bytes_the_client_has_not_taken_are_not_billed(self) -> None:
        world = World((Plan(steps=(*WORDS, EngineLost("e0", "cut"))),))
        world.sink.drained = False
        await world.serve()
        assert world.books.closes[0].output_tokens == 0

    async def test_of_bytes_that_the_client_took_in_part_the_events_begun_are_billed(self) -> None:
        first = (await run(Plan(steps=(*WORDS, EngineLost("e0", "cut"))))).sink.pieces[0]
        for took_bytes, tokens in ((0, 0), (len(first), 1), (len(first) + 20, 2), (2 * len(first), 2)):
            world = World((Plan(steps=(*WORDS, EngineLost("e0", "cut"))),))
            world.sink.drained = False
            world.sink.took_bytes = took_bytes
            await world.serve()
            assert world.books.closes[0].output_tokens == tokens


class TestDeadlines:
    """By name, and at their time."""

    @pytest.mark.parametrize(
        ("plan", "stream", "took_s", "named"),
        [
            (Plan(Hang()), True, 10, "first byte"),
            (Plan(steps=(ROLE, Hang())), True, 10, "first byte"),
            (Plan(steps=[After(4, b": ping\n\n")] * 9), True, 10, "first byte"),
            (Plan(Hang()), False, 60, "total"),
            (Plan(steps=(b"{", Hang())), False, 60, "total"),
            (Plan(steps=[After(20, b" ")] * 9), False, 60, "total"),
        ],
    )
    async def test_nothing_was_sent_so_it_is_504(self, plan: Plan, stream: bool, took_s: int, named: str) -> None:
        world = await run(plan, GOOD, stream=stream)
        assert world.sink.status == 504
        assert f"its {named} deadline of {took_s} s" in str(error_of(world.sink)["message"])
        assert world.clock.now_s - 1_000 == took_s
        assert world.fleet.ends[0][1].ending is Ending.FAILED

    async def test_idle(self) -> None:
        world = await run(Plan(steps=(WORDS[0], After(4, WORDS[1]), Hang())))
        assert b"its idle deadline of 5 s" in world.sink.data
        assert world.clock.now_s - 1_000 == 9

    @pytest.mark.parametrize("gap_s", [0.5, 4.0])
    async def test_total_ends_a_stream_that_flows_and_blames_nobody(self, gap_s: float) -> None:
        world = await run(Plan(steps=[After(gap_s, sse("w"))] * 1_000))
        assert b"its total deadline of 60 s" in world.sink.data
        assert world.clock.now_s - 1_000 == 60
        assert world.fleet.ends[0][1].ending is Ending.CANCELLED
        assert world.books.closes[0].outcome is Outcome.FAILED

    async def test_total_counts_what_the_client_took(self) -> None:
        """Bytes are always there, the client is what is slow: no read ever waits."""
        world = World((Plan(steps=[sse("w")] * 10_000),))

        def slow() -> None:
            world.clock.now_s += 1

        world.sink.on_piece = slow
        await world.serve()
        assert b"its total deadline" in world.sink.data
        assert len(world.sink.pieces) < 65

    async def test_a_second_attempt_has_what_is_left_of_the_total(self) -> None:
        world = await run(Plan(After(45, EngineLost("e0", "cut"))), WHOLE, stream=False)
        assert [round(limits.total_s) for limits in world.fleet.sent_limits] == [60, 15]
        assert round(world.fleet.sent_limits[1].first_byte_s) == 15


class TestLeaving:
    """The client is gone: the engine is cancelled, the books say what was delivered."""

    async def cut_during(self, *plans: Plan, stream: bool = True, at: int = 1, drain: bool = False) -> World:
        """Leave (or drain) while the `at`-th read waits for ever."""
        world = World(plans, deadlines=DEADLINES._replace(idle_s=1e9, first_byte_s=1e9, total_s=1e9))
        running = asyncio.create_task(world.serve(a_call(stream=stream)))
        for _ in range(50):
            await asyncio.sleep(0)
        if drain:
            assert world.sink.task is not None
            world.sink.task.cancel("drain")
        else:
            world.sink.leave()
        await running
        world.check()
        return world

    async def test_a_whole_answer_is_billed_by_its_input(self) -> None:
        world = await self.cut_during(Plan(steps=(b"{", Hang())), stream=False)
        close = world.books.closes[0]
        assert (close.outcome, close.status, close.estimated) == (Outcome.CANCELLED, 499, True)
        assert close.uncached_input_tokens == world.books.opens[0].reserved_input_tokens
        assert close.output_tokens is None
        assert world.limits.settled[0][1] == world.limits.reserved[0], "what is not known is not given back"
        assert world.fleet.answers[0].aborted
        assert not world.sink.started

    async def test_a_stream_before_its_first_token_is_billed_what_is_known(self) -> None:
        world = await self.cut_during(Plan(steps=(b": ping\n\n", Hang())))
        close = world.books.closes[0]
        assert (close.outcome, close.uncached_input_tokens, close.output_tokens) == (Outcome.CANCELLED, None, 0)
        # no money, but the engine may have read the prompt: its limit keeps what was reserved for it
        assert world.limits.settled[0][1] == Cost(world.limits.reserved[0].input_tokens, 0)

    async def test_a_stream_is_billed_by_what_was_delivered(self) -> None:
        world = await self.cut_during(Plan(steps=(*WORDS, Hang())))
        close = world.books.closes[0]
        assert (close.uncached_input_tokens, close.output_tokens, close.estimated) == (7, 3, True)
        assert (world.trace.status, world.trace.reason, world.trace.outcome) == (200, "client_closed", "cancelled")
        assert world.fleet.ends[0][1].ending is Ending.CANCELLED

    async def test_leaving_while_a_piece_is_written(self) -> None:
        world = World((Plan(steps=(*WORDS, LAST, TOTAL, DONE, b"")),))
        world.sink._leave_after = 2
        await world.serve()
        world.check()
        assert world.books.closes[0].outcome is Outcome.CANCELLED
        assert world.fleet.answers[0].aborted

    async def test_leaving_after_the_last_byte_changes_nothing(self) -> None:
        world = World((Plan(steps=(*WORDS, LAST, TOTAL, DONE, Hang())),), deadlines=DEADLINES._replace(idle_s=1e9))
        world.sink.on_piece = lambda: world.sink.leave() if world.sink.finished else None
        await world.serve()
        world.check()
        assert world.books.closes[0].outcome is Outcome.COMPLETED

    async def test_the_drain_deadline_is_said_in_a_stream(self) -> None:
        world = await self.cut_during(Plan(steps=(*WORDS, Hang())), drain=True)
        assert b'"code":"gateway_draining"' in world.sink.data
        close = world.books.closes[0]
        assert (close.outcome, close.status, close.error_code) == (Outcome.CANCELLED, 503, "gateway_draining")
        assert world.fleet.ends[0][1].ending is Ending.CANCELLED

    async def test_the_drain_deadline_is_503_where_nothing_was_sent(self) -> None:
        for stream in (False, True):
            world = await self.cut_during(Plan(steps=(Hang(),)), stream=stream, drain=True)
            assert (world.sink.status, error_of(world.sink)["code"]) == (503, "gateway_draining")
            assert world.trace.status == 503

    async def test_the_drain_deadline_cuts_a_whole_answer_that_was_begun(self) -> None:
        """Its length was declared: an error in it would be taken for a part of it."""
        world = World((WHOLE,))

        async def stuck(data: bytes) -> None:
            await asyncio.Event().wait()

        world.sink.finish = stuck  # type: ignore[method-assign] # a client that does not read
        running = asyncio.create_task(world.serve(a_call(stream=False)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert world.sink.task is not None
        world.sink.task.cancel("drain")
        await running
        assert world.sink.aborted
        assert world.books.closes[0].outcome is Outcome.COMPLETED, "it was closed before its last byte"


class TestDefects:
    """Something of ours breaks: told, logged by the caller, and nothing is held for ever."""

    @pytest.mark.parametrize("broken", ["open", "close"])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_books_that_raise(self, broken: str, stream: bool) -> None:
        world = World((GOOD if stream else WHOLE,))
        world.books.broken.add(broken)
        with pytest.raises(ValueError, match="defect"):
            await world.serve(a_call(stream=stream))
        assert len(world.fleet.ends) == len(world.fleet.picked) == 1, "the router is released"
        assert len(world.limits.settled) == 1, "the reservation is settled"
        assert world.sink.finished, "the client is told"
        if not (broken == "close" and stream):
            assert (world.sink.status, error_of(world.sink)["code"]) == (500, "internal_error")
        else:
            assert b'"code":"internal_error"' in world.sink.data
            assert world.limits.settled[0][1] == Cost(7, 3), "what was used is used"

    async def test_a_checkpoint_that_raises_ends_the_stream_with_a_word(self) -> None:
        words = tuple(sse("w", usage=(7, n)) for n in range(1, 100))
        world = World((Plan(steps=(*words, LAST, DONE, b"")),))
        world.books.broken.add("checkpoint")
        with pytest.raises(ValueError, match="defect"):
            await world.serve()
        world.check()
        assert b'"code":"internal_error"' in world.sink.data
        close = world.books.closes[0]
        assert (close.outcome, close.status, close.error_code) == (Outcome.FAILED, 500, "internal_error")
        assert close.output_tokens is not None
        assert close.output_tokens >= 64
        assert world.fleet.ends[0][1].ending is Ending.CANCELLED

    async def test_an_engine_client_that_raises_what_it_never_should(self) -> None:
        world = World((Plan(ValueError("a defect")),))
        with pytest.raises(ValueError, match="defect"):
            await world.serve()
        world.check()
        assert world.sink.status == 500
        assert world.books.closes[0].outcome is Outcome.FAILED
