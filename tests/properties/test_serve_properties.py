"""Whatever engines and clients do: every request is answered, billed once, and holds nothing afterwards.

Each property is shown to bite: paths with a planted fault must fail it on one of the same requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from billing.usage_event import Outcome
from controlplane.errors import EngineError, EngineLost, EngineTimeout, EngineUnreachable
from controlplane.ports import Fault
from controlplane.serve import Path
from tests.exploring import examples
from tests.fakes.serve_ports import DEADLINES, After, Hang, Plan, Step, World, a_call

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"dead","code":500}}\n\n'
WHOLE = b'{"choices":[{"message":{"content":"abc"}}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'


def word(n: int) -> bytes:
    """The n-th chunk, of one token, with usage."""
    return (
        b'data: {"choices":[{"index":0,"delta":{"content":"w"},"finish_reason":null}],"usage":{"prompt_tokens":7,'
        b'"completion_tokens":%d}}\n\n' % n
    )


def last(n: int) -> bytes:
    """The chunk with the finish reason, after n words."""
    return (
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,'
        b'"completion_tokens":%d}}\n\n' % n
    )


def total(n: int) -> bytes:
    """The usage chunk, after n words."""
    return b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d}}\n\n' % n


@dataclass(frozen=True)
class Case:
    """One request: what its engines do, and when its client leaves or the gateway drains."""

    plans: tuple[Plan, Plan]
    stream: bool
    endpoints: int
    leave_at: int | None
    """Turns of the loop before the interruption; None: it stays."""
    drain: bool
    spool_for: int | None
    """Opens that the spool takes; None: all."""


FAULTS: st.SearchStrategy[Step] = st.sampled_from(
    [EngineLost("e", "cut"), EngineTimeout("e", "idle", 1.0), Hang(), b"", After(30.0, EngineLost("e", "late"))]
)


def good_ends(n: int) -> list[list[Step]]:
    """The ways in which an engine may end a stream of n words by itself."""
    return [[last(n), total(n), DONE, b""], [last(n), b""], [DONE, b""], [ERROR, DONE, b""], [ERROR, b""]]


HEADS: st.SearchStrategy[int | EngineError | Hang] = st.sampled_from(
    [200] * 8 + [400, 401, 307, 429, 500, 503, EngineUnreachable("e", "no"), EngineLost("e", "cut"), Hang()]
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One engine's behaviour."""
    head: int | EngineError | Hang = draw(HEADS)
    if head != 200:
        return Plan(head, draw(st.sampled_from([(b"{}", b""), (EngineLost("e", "cut"),), (b"{", Hang())])))
    steps: list[Step] = [ROLE] * draw(st.integers(0, 1))
    words = draw(st.integers(0, 5))
    steps += [word(n) for n in range(1, words + 1)]
    if draw(st.booleans()):
        steps = [b"".join(step for step in steps if isinstance(step, bytes))] if steps else []  # one read
    gap_s = draw(st.sampled_from([0.0, 0.0, 4.0]))
    if gap_s:
        steps = [After(gap_s, step) for step in steps]
    steps += draw(st.sampled_from(good_ends(words))) if draw(st.booleans()) else [draw(FAULTS)]
    return Plan(200, tuple(step for step in steps if step != b"" or step is steps[-1]))


CASES = st.builds(
    Case,
    plans=st.tuples(plans(), plans()),
    stream=st.booleans(),
    endpoints=st.integers(0, 2),
    leave_at=st.none() | st.integers(2, 25),  # before the second turn it has not begun
    drain=st.booleans(),
    spool_for=st.none() | st.integers(0, 1),
)


def _whole(plan: Plan) -> Plan:
    return replace(plan, steps=(WHOLE, *plan.steps[-1:]))


async def play(case: Case, path_class: type[Path] = Path) -> World:
    """Serve one case to its end."""
    given_plans = tuple(_whole(plan) if plan.head == 200 and not case.stream else plan for plan in case.plans)
    world = World(given_plans, endpoints=case.endpoints, deadlines=DEADLINES, path_class=path_class)
    world.books.full_after = case.spool_for
    running = asyncio.create_task(world.serve(a_call(stream=case.stream)))
    if case.leave_at is not None:
        for _ in range(case.leave_at):
            await asyncio.sleep(0)
        task = world.sink.task
        if task is not None and not task.done() and not world.sink.finished:
            if case.drain:
                task.cancel("drain")
            else:
                world.sink.leave()
    await running
    return world


def check(world: World) -> None:
    """The properties."""
    world.check()
    sink, books = world.sink, world.books
    completed = [close for close in books.closes if close.outcome is Outcome.COMPLETED]
    assert len(completed) <= 1
    if sink.status == 200 and not sink.open_ended:
        assert sink.data in (WHOLE, b"")
    for close in books.closes[:-1]:
        assert (close.output_tokens, close.uncached_input_tokens) == (None, None), "a lost attempt bills nothing"
    if books.closes:
        close = books.closes[-1]
        delivered = sink.data.count(b'"content":"w"')
        if close.outcome is not Outcome.COMPLETED and sink.open_ended and close.error_code != "engine_error":
            assert (close.output_tokens or 0) <= delivered, "never more than was delivered"
        if close.outcome in (Outcome.TRUNCATED, Outcome.CANCELLED) or close.error_code == "engine_timeout":
            assert b'"finish_reason":"stop"' not in sink.data or close.outcome is Outcome.CANCELLED
        failed = close.outcome is not Outcome.COMPLETED
        if failed and sink.status == 200 and sink.finished and not sink.gone and not sink.aborted:
            assert b'"error"' in sink.data, "a failure is said"
        if sink.open_ended:
            settled = world.limits.settled[0][1]
            assert settled.output_tokens == (close.output_tokens or 0) or close.output_tokens is None
    for (_, end), close in zip(world.fleet.ends, books.closes, strict=False):
        if close.outcome is Outcome.COMPLETED:
            assert end.ending.value == "completed"


@settings(max_examples=examples(600), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=CASES)
def test_every_request_is_answered_billed_once_and_lets_everything_go(case: Case) -> None:
    check(asyncio.run(play(case)))


class ForgetsToSettle(Path):
    """Planted: the reservation is kept."""

    def _settle(self, run: Any) -> None:
        run.settled = True


class ForgetsTheRouter(Path):
    """Planted: a cancelled attempt's load is never released."""

    def _interrupted(self, run: Any, fault: Fault) -> None:
        attempt = run.attempt
        if attempt is not None and not attempt.closed:
            attempt.closed = True


class BillsEveryAttempt(Path):
    """Planted: a lost attempt is billed too."""

    def _close(self, run: Any, attempt: Any, fault: Fault, *, billable: bool = True, usage: Any = None) -> None:
        super()._close(run, attempt, fault, billable=True, usage=usage)


class StopsFalsely(Path):
    """Planted: a stream that was cut ends like one that is finished."""

    async def _broken(self, run: Any, attempt: Any, fault: Fault, rest: bytes = b"") -> Fault | None:
        if not run.sink.started:
            return await super()._broken(run, attempt, fault, rest)
        attempt.answer.abort()
        self._close(run, attempt, fault)
        await run.sink.finish(b"data: [DONE]\n\n")
        return None


class RetriesAfterTheFirstToken(Path):
    """Planted: a stream that has begun is asked for again elsewhere."""

    async def _broken(self, run: Any, attempt: Any, fault: Fault, rest: bytes = b"") -> Fault | None:
        attempt.answer.abort()
        return fault


class TellsNobodyOfTheDrain(Path):
    """Planted: a request that is cut at the drain deadline just ends."""

    async def _tell(self, call: Any, sink: Any, trace: Any, fault: Fault) -> None:
        return


class KeepsTheEngineWorking(Path):
    """Planted: the engine of a client that left is not cancelled."""

    def _interrupted(self, run: Any, fault: Fault) -> None:
        if run.attempt is not None:
            run.attempt.answer = None
        super()._interrupted(run, fault)


class BillsWhatWasNotDelivered(Path):
    """Planted: a cut stream is billed by the engine's last word, delivered or not."""

    def _delivered_usage(self, run: Any, meter: Any) -> Any:
        usage = meter.engine_usage()
        return usage._replace(output_tokens=(usage.output_tokens or 0) + 1)


MUTANTS = (
    ForgetsToSettle, ForgetsTheRouter, BillsEveryAttempt, StopsFalsely, RetriesAfterTheFirstToken,
    TellsNobodyOfTheDrain, KeepsTheEngineWorking, BillsWhatWasNotDelivered,
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_fault_is_found(mutant: type[Path]) -> None:
    @settings(max_examples=1_500, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              report_multiple_bugs=False, suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=CASES)
    def holds(case: Case) -> None:
        check(asyncio.run(play(case, mutant)))

    with pytest.raises(BaseException) as caught:
        holds()
    assert isinstance(caught.value, AssertionError | BaseExceptionGroup), repr(caught.value)
