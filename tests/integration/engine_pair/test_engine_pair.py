"""Prefill and decode on two engines over real sockets: what each leg is sent, and what becomes of one when the other
fails, is slow, or the client leaves (R23, R24, R26, R28). The engines refuse what real ones would
(`tests.fakes.pair_engines`).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any, cast

import pytest

from billing.usage_event import Outcome
from controlplane.adapters.engine_http import EngineCall, EngineClient
from controlplane.adapters.engine_pair import EnginePairs, LegName, LegWire, PairCall, PairRun
from controlplane.disaggregation import HANDSHAKES, Handshake
from controlplane.errors import EngineTimeout
from controlplane.request import Operation
from router.endpoints import BreakerState, EndpointRole, EngineKind
from router.pairing import PAIR_KINDS
from tests.fakes.pair_engines import CACHED_TOKENS, PROMPT_TOKENS
from tests.fakes.pair_stack import DEADLINES, REQUEST_ID, PairStack
from tests.fakes.serve_ports import FakeSink

KINDS: tuple[EngineKind, ...] = ("vllm", "sglang", "trtllm")
# R23: a client is answered this soon after one of its legs has failed.
ANSWERED_WITHIN_S = 2.0
# DESIGN 4.1: a client that leaves cancels its engines within this.
CANCELLED_WITHIN_S = 1.0
TWO_OF_EACH: tuple[tuple[str, EndpointRole], ...] = (
    ("p", "prefill"),
    ("p2", "prefill"),
    ("d", "decode"),
    ("d2", "decode"),
)


def test_every_kind_that_the_router_pairs_has_a_handshake() -> None:
    assert set(HANDSHAKES) == PAIR_KINDS


class TestServed:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("kind", KINDS)
    async def test_a_pair_answers_and_is_billed_once_by_the_right_leg(self, kind: EngineKind, stream: bool) -> None:
        """Input and output by the decode leg; cached by the prefill leg, whatever the decoder says."""
        async with PairStack(kind) as stack:
            done = await stack.ask(stream=stream)
            assert done.sink.status == 200, done.sink.data
            assert done.text == "tok1 tok2 tok3 tok4 "
            close = stack.close
            assert close.outcome is Outcome.COMPLETED
            assert (close.cached_input_tokens, close.output_tokens) == (CACHED_TOKENS, 4)
            assert close.uncached_input_tokens == PROMPT_TOKENS - CACHED_TOKENS
            assert not close.estimated
            assert len(stack.books.closes) == 1
            assert done.usage["prompt_tokens_details"]["cached_tokens"] == CACHED_TOKENS
            await stack.settled()
            assert [stack.leg(name).ended for name in ("p", "d")] == ["completed", "completed"]
            assert not stack.bench.told
            assert stack.client.idle_count == 2, "both connections are kept"

    @pytest.mark.parametrize("kind", KINDS)
    async def test_both_legs_carry_the_request_id_and_the_bytes_of_the_client(self, kind: EngineKind) -> None:
        """R28, and R26 as far as it is about both legs: the same id on each."""
        odd: dict[str, Any] = {"temperature": 1.10, "tools": [{"b": 1, "a": {"z": 1, "y": "\u00e9"}}]}
        async with PairStack(kind) as stack:
            await stack.ask(**odd)
            for name in ("p", "d"):
                truth = stack.leg(name)
                assert dict(truth.headers)["x-request-id"] == REQUEST_ID
                assert json.dumps(odd)[1:-1].encode() in truth.body
                messages = json.dumps([{"role": "user", "content": "hello there"}]).encode()
                assert b'"messages": ' + messages in truth.body

    async def test_sglangs_legs_run_at_once_and_others_in_turn(self) -> None:
        for kind in KINDS:
            async with PairStack(kind) as stack:
                await stack.ask()
                first, then = stack.leg("p"), stack.leg("d")
                assert first.ended_ns is not None
                assert (then.received_ns < first.ended_ns) == (kind == "sglang"), kind

    async def test_a_context_answer_that_ends_at_once_is_the_clients(self) -> None:
        for stream in (True, False):
            async with PairStack("trtllm") as stack:
                done = await stack.ask("prefill=eos", stream=stream)
                assert done.text == "tok1 "
                assert not stack.engines["d"].legs
                assert (stack.close.cached_input_tokens, stack.close.output_tokens) == (CACHED_TOKENS, 1)

    async def test_several_choices_run_on_one_engine(self) -> None:
        async with PairStack("vllm") as stack:
            await stack.ask(n=2)
            assert not stack.engines["p"].legs
            assert stack.close.cached_input_tokens == 0
            assert stack.close.output_tokens == 8

    async def test_the_choice_explains_itself_and_the_router_learns_each_legs_own(self) -> None:
        async with PairStack("vllm") as stack:
            done = await stack.ask()
            assert done.trace.decision.startswith("prefill=p ")
            assert stack.decisions.kept[REQUEST_ID]["pair"]["prefill_endpoint_id"] == "p"
            assert done.trace.endpoint_id == "d"

    async def test_the_next_turn_stays_where_the_prompt_is(self) -> None:
        """The decode engine holds the prompt now: no pair for what little is new."""
        async with PairStack("vllm") as stack:
            stack.router.set_endpoints(
                [stack.endpoints[0].__class__(**_changed(each)) for each in stack.endpoints], time.monotonic()
            )
            history = [{"role": "user", "content": "word " * 4_000}]
            await stack.ask(messages=history)
            await stack.ask(messages=[*history, {"role": "user", "content": "and?"}])
            assert len(stack.engines["p"].legs) == 1
            assert len(stack.engines["d"].legs) == 2
            assert b"kv_transfer_params" not in stack.engines["d"].legs[1].body


def _changed(endpoint: Any) -> dict[str, Any]:
    """A decode engine that prefills half as fast as the other, which takes a while to begin, and a way that costs."""
    speed = endpoint.speed.__class__(
        prefill_tok_per_s=2_000.0 if endpoint.role == "prefill" else 1_000.0,
        prefill_overhead_s=0.3 if endpoint.role == "prefill" else 0.0, decode_s_per_token=0.01,
    )  # fmt: skip
    fields = {name: getattr(endpoint, name) for name in endpoint.__dataclass_fields__}
    return {**fields, "speed": speed, "kv_bytes_per_token": 1_000_000, "kv_link_bytes_per_s": 3e9}


class TestOneLegFails:
    """R23: the other one is ended at once, and the client is told within two seconds."""

    @pytest.mark.parametrize("fault", ["status.500", "status.502", "status.503", "status.429", "reset"])
    @pytest.mark.parametrize("leg", ["prefill", "decode"])
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("kind", KINDS)
    async def test_before_an_answer(self, kind: EngineKind, leg: str, fault: str, stream: bool) -> None:
        async with PairStack(kind) as stack:
            done = await stack.ask(f"{leg}={fault}", stream=stream)
            assert done.took_s < ANSWERED_WITHIN_S
            await stack.settled()
            bad, good = ("p", "d") if leg == "prefill" else ("d", "p")
            if fault == "reset":
                allowed = (502, "engine_lost")
            else:
                status = int(fault[-3:])
                allowed = (status, "engine_overloaded" if status in (429, 503) else "engine_error")
            if kind != "sglang" and leg == "prefill":
                # The same decode engine, which was never asked, does all of it then.
                assert done.sink.status == 200
                assert stack.leg("d").ended == "completed"
                assert (stack.close.cached_input_tokens, stack.close.uncached_input_tokens) == (0, PROMPT_TOKENS)
                return
            assert (done.sink.status, done.error["code"]) == allowed
            assert len(stack.engines[bad].legs) == 1
            for truth in stack.engines[good].legs:
                finished = kind != "sglang" or leg == "decode"
                assert truth.ended in (("completed", "client_closed") if finished else ("client_closed",)), kind
            if kind == "vllm":
                assert stack.bench.told == [("p", [f"chatcmpl-{REQUEST_ID}"])], "nobody will fetch its blocks"

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("leg", ["prefill", "decode"])
    async def test_another_engine_takes_the_failed_ones_part(self, kind: EngineKind, leg: str) -> None:
        async with PairStack(kind, TWO_OF_EACH) as stack:
            names = ("p", "p2") if leg == "prefill" else ("d", "d2")
            stack.bench.fail_first = leg
            done = await stack.ask()
            assert done.sink.status == 200, done.sink.data
            assert sorted(len(stack.engines[name].legs) for name in names) == [1, 1]
            assert [close.billable for close in stack.books.closes] == [False, True]
            assert stack.close.cached_input_tokens == CACHED_TOKENS
            assert stack.close.output_tokens == 4

    @pytest.mark.parametrize("leg", ["p", "d"])
    @pytest.mark.parametrize("kind", KINDS)
    async def test_an_engine_that_is_gone(self, kind: EngineKind, leg: str) -> None:
        async with PairStack(kind) as stack:
            await stack.engines[leg].stop()
            done = await stack.ask()
            assert done.took_s < ANSWERED_WITHIN_S
            if leg == "p" and kind != "sglang":
                assert done.sink.status == 200
                return
            assert (done.sink.status, done.error["code"]) == (502, "engine_unreachable")
            await stack.until(lambda: all(t.ended for e in stack.engines.values() for t in e.legs))

    @pytest.mark.parametrize("fault", ["cut.1", "short.1", "stall", "absent"])
    async def test_sglangs_prefill_fails_while_the_decode_leg_waits(self, fault: str) -> None:
        deadlines = DEADLINES._replace(first_byte_s=1.0)
        async with PairStack("sglang", deadlines=deadlines) as stack:
            done = await stack.ask(f"prefill={fault}", max_tokens=400)
            assert done.took_s < ANSWERED_WITHIN_S
            assert done.sink.status == (502 if fault.endswith(".1") else 504)
            await stack.until(lambda: stack.leg("d").ended == "client_closed")

    async def test_sglangs_prefill_that_does_not_end_holds_nothing_up_for_long(self) -> None:
        """Its KV was fetched, so the decode leg writes: that answer is served, a second late. What was cached before
        nobody knows then, and the leg is ended with its sibling.
        """
        async with PairStack("sglang") as stack:
            done = await stack.ask("prefill=hang.1")
            assert 0.9 < done.took_s < ANSWERED_WITHIN_S
            assert done.text == "tok1 tok2 tok3 tok4 "
            assert (stack.close.cached_input_tokens, stack.close.uncached_input_tokens) == (None, PROMPT_TOKENS)
            await stack.until(lambda: stack.leg("p").ended == "client_closed")

    async def test_sglangs_prefill_that_breaks_late_ends_the_answer_in_the_middle(self) -> None:
        async with PairStack("sglang") as stack:
            stack.engines["p"].break_after_s = 1.5
            done = await stack.ask("prefill=hang.1", max_tokens=2_000)
            assert done.sink.status == 200
            assert b'"engine_lost"' in done.sink.data
            await stack.until(lambda: stack.leg("d").ended == "client_closed")
            states = {row.endpoint.endpoint_id: row.breaker for row in stack.router.status(time.monotonic())}
            assert states == {"p": BreakerState.CLOSED, "d": BreakerState.CLOSED}

    async def test_sglangs_prefill_may_fail_inside_a_stream_that_began_well(self) -> None:
        async with PairStack("sglang") as stack:
            done = await stack.ask("prefill=error")
            assert done.sink.status == 502 or done.error["message"] == "EngineCore died."
            assert done.took_s < ANSWERED_WITHIN_S
            await stack.until(lambda: stack.leg("d").ended == "client_closed")

    @pytest.mark.parametrize("kind", KINDS)
    async def test_the_decode_leg_dies_in_the_middle(self, kind: EngineKind) -> None:
        """What was delivered is billed, as on one engine, and the prefill leg's cached tokens are no longer needed."""
        async with PairStack(kind) as stack:
            done = await stack.ask("decode=cut.3")
            assert done.sink.status == 200
            assert b'"engine_lost"' in done.sink.data
            assert stack.close.outcome is Outcome.FAILED
            assert stack.close.output_tokens == 2
            assert done.took_s < ANSWERED_WITHIN_S

    async def test_a_prefill_that_hands_nothing_over_is_an_error_and_said_so(self, caplog: Any) -> None:
        """Never a second prefill in silence: the attempt failed, and the log says why."""
        for kind, how, says in (
            ("vllm", "no_params", "without kv_transfer_params"),
            ("vllm", "bad_params", "lack remote_host"),
            ("trtllm", "no_params", "ctx_request_id"),
        ):
            async with PairStack(kind) as stack:  # type: ignore[arg-type] # one of the kinds
                done = await stack.ask(f"prefill={how}")
                assert done.sink.status == 200
                assert [(close.billable, close.error_code) for close in stack.books.closes] == [
                    (False, "engine_lost"), (True, None),
                ]  # fmt: skip
                assert says in caplog.text
                assert stack.close.cached_input_tokens == 0, "the decode engine did all of it"
                caplog.clear()

    @pytest.mark.parametrize("kind", KINDS)
    async def test_a_refused_body_is_the_clients_fault_on_either_leg(self, kind: EngineKind) -> None:
        async with PairStack(kind) as stack:
            for leg in ("prefill", "decode"):
                done = await stack.ask(f"{leg}=status.400")
                assert done.sink.status == 400
                assert done.error["type"] == "invalid_request_error"
            states = {row.endpoint.endpoint_id: row.breaker for row in stack.router.status(time.monotonic())}
            assert set(states.values()) == {BreakerState.CLOSED}

    @pytest.mark.parametrize("kind", KINDS)
    async def test_only_the_leg_that_fails_is_blamed(self, kind: EngineKind) -> None:
        """Five failures open a breaker: the failing prefill engine's, not that of the decode engine beside it."""
        async with PairStack(kind) as stack:
            for _ in range(5):
                await stack.ask("prefill=status.500")
            states = {row.endpoint.endpoint_id: row.breaker for row in stack.router.status(time.monotonic())}
            assert states == {"p": BreakerState.OPEN, "d": BreakerState.CLOSED}
            asked = len(stack.engines["p"].legs)
            done = await stack.ask()
            assert len(stack.engines["p"].legs) == asked
            assert done.sink.status == (503 if kind == "sglang" else 200), "sglang decodes nothing alone"


class TestDeadlines:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("kind", KINDS)
    async def test_a_prefill_past_the_deadline_ends_both(self, kind: EngineKind, stream: bool) -> None:
        deadlines = DEADLINES._replace(first_byte_s=0.5, total_s=20.0 if stream else 0.5)
        async with PairStack(kind, deadlines=deadlines) as stack:
            done = await stack.ask("prefill=slow.3000", stream=stream)
            assert (done.sink.status, done.error["code"]) == (504, "engine_timeout")
            assert done.took_s < ANSWERED_WITHIN_S
            await stack.until(lambda: all(t.ended == "client_closed" for e in stack.engines.values() for t in e.legs))
            assert len(stack.engines["d"].legs) == (1 if kind == "sglang" else 0)

    @pytest.mark.parametrize("kind", KINDS)
    async def test_a_slow_prefill_is_not_the_fault_of_the_engine_that_waits_for_it(self, kind: EngineKind) -> None:
        async with PairStack(kind, deadlines=DEADLINES._replace(first_byte_s=0.1)) as stack:
            for _ in range(5):
                await stack.ask("prefill=slow.3000")
            states = {row.endpoint.endpoint_id: row.breaker for row in stack.router.status(time.monotonic())}
            assert states == {"p": BreakerState.OPEN, "d": BreakerState.CLOSED}

    async def test_a_decode_leg_that_is_late_first_was_waiting(self) -> None:
        """Both run into one deadline: which timer fires first says nothing."""

        class Client:
            """The decode leg's timer fires; the prefill leg's would later."""

            async def send(self, call: EngineCall) -> Any:
                if call.endpoint_id == "p":
                    await asyncio.sleep(60)
                raise EngineTimeout("d", "first_byte", 1.0)

        pairs = EnginePairs(cast("EngineClient", Client()), random.Random(0).getrandbits)
        wires = [LegWire(EngineCall(name, "", 0, b"", (), 0.0, 0.0), "h", 8998) for name in ("p", "d")]
        call = PairCall(Handshake.BOOTSTRAP, Operation.CHAT, "r", b'{"a":1}', True, 1, DEADLINES, *wires)
        run = PairRun(lambda usage: None)
        with pytest.raises(EngineTimeout):
            await pairs.send(call, run)
        assert run.fault is LegName.PREFILL

    @pytest.mark.parametrize("kind", ["vllm", "trtllm"])
    async def test_the_two_legs_share_one_deadline(self, kind: EngineKind) -> None:
        deadlines = DEADLINES._replace(first_byte_s=1.0)
        async with PairStack(kind, deadlines=deadlines) as stack:
            done = await stack.ask("prefill=slow.600,decode=stall")
            assert done.sink.status == 504
            assert 0.9 < done.took_s < 1.5


class TestClientLeaves:
    """R24: both legs hear of it, and an engine that holds blocks for nobody is told."""

    async def leave(self, stack: PairStack, user: str, when: Any, **fields: Any) -> FakeSink:
        """Ask, and be gone as soon as `when` holds."""
        task, done = stack.begin(user, **fields)
        await stack.until(when)
        left_s = time.monotonic()
        done.sink.leave()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
        await stack.settled()
        assert time.monotonic() - left_s < CANCELLED_WITHIN_S
        stack.check()
        return done.sink

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("kind", KINDS)
    async def test_during_the_prefill(self, kind: EngineKind, stream: bool) -> None:
        async with PairStack(kind) as stack:
            await self.leave(stack, "prefill=stall", lambda: stack.engines["p"].legs, stream=stream)
            assert stack.leg("p").ended == "client_closed"
            decoded = [truth.ended for truth in stack.engines["d"].legs]
            assert decoded == (["client_closed"] if kind == "sglang" else [])
            assert stack.close.outcome is Outcome.CANCELLED
            assert not stack.bench.told, "a closed connection ends a prefill that runs"

    @pytest.mark.parametrize("kind", ["vllm", "trtllm"])
    async def test_between_the_prefills_answer_and_the_decode_leg(self, kind: EngineKind) -> None:
        """Its head is there, its hand-over is not: the decode engine is never asked, and vLLM is told."""
        async with PairStack(kind) as stack:
            begun = lambda: stack.engines["p"].legs and stack.leg("p").sent  # noqa: E731 - short
            await self.leave(stack, "prefill=hang.1", begun)
            assert not stack.engines["d"].legs
            assert stack.leg("p").ended == "client_closed"
            wanted = [("p", [f"chatcmpl-{REQUEST_ID}"])] if kind == "vllm" else []
            await stack.until(lambda: stack.bench.told == wanted)

    @pytest.mark.parametrize("kind", KINDS)
    async def test_while_the_decode_engine_has_said_nothing(self, kind: EngineKind) -> None:
        async with PairStack(kind) as stack:
            await self.leave(stack, "decode=stall", lambda: stack.engines["d"].legs)
            assert stack.leg("d").ended == "client_closed"
            assert stack.close.outcome is Outcome.CANCELLED
            if kind == "vllm":
                await stack.until(lambda: stack.bench.told == [("p", [f"chatcmpl-{REQUEST_ID}"])])

    @pytest.mark.parametrize("kind", KINDS)
    async def test_in_the_middle_of_the_answer(self, kind: EngineKind) -> None:
        async with PairStack(kind) as stack:
            sink = FakeSink()
            await self.leave(stack, "", lambda: len(sink.pieces) > 2, sink=sink, max_tokens=400)
            assert stack.leg("d").ended == "client_closed"
            assert stack.close.outcome is Outcome.CANCELLED
            assert stack.close.estimated
            assert not stack.bench.told, "its blocks were fetched"

    async def test_in_the_middle_of_the_answer_while_the_prefill_leg_has_not_ended(self) -> None:
        async with PairStack("sglang") as stack:
            sink = FakeSink()
            await self.leave(stack, "prefill=hang.1", lambda: len(sink.pieces) > 2, sink=sink, max_tokens=2_000)
            assert [stack.leg(name).ended for name in ("p", "d")] == ["client_closed", "client_closed"]

    async def test_an_engine_without_the_route_is_told_in_vain_and_nothing_breaks(self) -> None:
        async with PairStack("vllm") as stack:
            stack.engines["p"].kind = "sglang"  # has no such route
            stack.engines["p"].role = "gone"
            await stack.ask("decode=status.500")
            await stack.until(lambda: not stack.fleet._pairs._telling)


async def test_rooms_are_never_shared() -> None:
    async with PairStack("sglang") as stack:
        tasks = [stack.begin(messages=[{"role": "user", "content": str(n)}])[0] for n in range(24)]
        await asyncio.gather(*tasks)
        assert len(stack.bench.rooms) == 24
        assert not stack.fleet._pairs._rooms
        stack.check(24)


async def test_the_cached_tokens_are_unknown_where_the_prefill_leg_does_not_say() -> None:
    """Nobody knows then, and nothing is billed as cached although the decoder says that all of it was."""
    async with PairStack("vllm") as stack:
        stack.engines["p"].says_cached = False
        done = await stack.ask()
        assert done.usage["prompt_tokens_details"]["cached_tokens"] is None
        assert (stack.close.cached_input_tokens, stack.close.uncached_input_tokens) == (None, PROMPT_TOKENS)


# How a leg may go in a storm: mostly well, each fault now and then.
_WEATHER = ["ok"] * 16 + [
    "status.500", "status.503", "status.400", "reset", "slow.100", "cut.1", "cut.2", "hang.1", "error",
]  # fmt: skip
_STORM = (*TWO_OF_EACH, ("b", "both"))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_storm_leaves_nothing_behind(kind: EngineKind) -> None:
    """Whatever fails and whoever leaves: each request ends, is billed once at most, and no load, leg or room stays."""
    draw = random.Random(f"storm {kind}")
    deadlines = DEADLINES._replace(first_byte_s=0.6, idle_s=0.5, total_s=1.5)
    async with PairStack(kind, _STORM, deadlines) as stack:
        slots = asyncio.Semaphore(10)

        async def one() -> None:
            user = f"prefill={draw.choice(_WEATHER)},decode={draw.choice(_WEATHER)}"
            async with slots:
                task, done = stack.begin(
                    user, stream=draw.random() < 0.6, max_tokens=draw.choice([1, 4, 40]),
                    messages=[{"role": "user", "content": "x" * draw.randint(1, 4_000)}],
                )  # fmt: skip
                if draw.random() < 0.3:
                    await asyncio.sleep(draw.random() * 0.3)
                    if not task.done():
                        done.sink.leave()
                await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
                assert task.cancelled() or task.exception() is None
                assert done.sink.gone or done.sink.finished or done.sink.aborted

        await asyncio.gather(*(one() for _ in range(60)))
        stack.check(len({record.request_id for record in stack.books.opens}))
        await stack.settled()
        await stack.until(lambda: not stack.fleet._pairs._rooms and not stack.fleet._pairs._telling)
        refused = [bytes(t.sent) for e in stack.engines.values() for t in e.truths if t.script == "refused"]
        assert not refused, refused
        assert stack.engines["p"].legs
        assert stack.engines["p2"].legs
