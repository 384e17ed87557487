"""The request path, top to bottom: price, limit, route, send, relay, meter, settle.

Owns: the order of the steps and what happens when one of them breaks. It is the only core module that waits. Does not
own: any I/O (the ports below are handed in by `app`), the wire (`adapters.openai_wire`), or the rules of a step.

Broken steps, decided here once:
- refused by a limit, no route, spool full: nothing was dispatched, every reservation is given back whole;
- an engine lost before its first token: the attempt is closed as not billable and one other engine is tried;
- an engine lost after it: the client is told in the stream, what was delivered is billed;
- the client left: the engine is cancelled at once, what was delivered is billed and flagged as an estimate;
- a deadline: as lost, with 504 when nothing was sent yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from billing.metering import UNKNOWN_USAGE, Meter, StreamEnd, Usage, usage_of
from billing.usage_event import Outcome, UsageCheckpoint, UsageClose, UsageOpen
from controlplane.admission import after_outage
from controlplane.errors import EngineError, EngineTimeout, EngineUnreachable, SpoolFull
from controlplane.ports import (
    Answer,
    AttemptEnd,
    Call,
    Deadlines,
    Fault,
    Header,
    NoTarget,
    NoTargetReason,
    Ports,
    Sink,
    Target,
    Trace,
)
from controlplane.rate_limit import Admitted, Cost, LimitView, Refused, Ticket
from controlplane.tenancy import Limit
from router.endpoints import Ending

# Attempts per request: the first, and one elsewhere when the engine is lost before its first token (DESIGN 4.1).
_MAX_ATTEMPTS = 2
# HTTP: an answer, a redirect (which an engine has no business to send), the caller's error, the server's own.
_OK_STATUS = 200
_FIRST_REDIRECT_STATUS = 300
_FIRST_ERROR_STATUS = 400
_FIRST_CRASH_STATUS = 500
# An engine that refuses our credentials is misconfigured: that is no fault of the caller, who must not hear of it.
_CREDENTIALS = frozenset({401, 403, 407})
# Back-pressure, not death (reference router R21): 429 and 503.
_BUSY = frozenset({429, 503})
# The status that access logs use for a client that left (nginx's convention; never sent).
_CLIENT_CLOSED_STATUS = 499
# A model name that nobody knows is the client's text: this much of it is worth counting refusals by.
_MAX_MODEL_CHARS = 128
# An engine's error body is a few hundred bytes in every recording; more is cut.
_MAX_ERROR_BYTES = 64 * 1024
# How much may be held back while waiting for the first token (a role chunk is about 300 bytes).
_MAX_HELD_BYTES = 64 * 1024
# How long the engine's last chunk may take after `[DONE]` before its connection is given up.
_TAIL_S = 1.0


_SPOOL_FULL = Fault(
    503, "Usage cannot be recorded now, so the request was not served.", "server_error", code="usage_spool_full",
    retry_after_s=1.0,
)  # fmt: skip
_TRUNCATED = Fault(
    502, "The engine's stream ended before the answer was complete.", "server_error", code="upstream_stream_truncated",
    elsewhere=True, ending=Ending.FAILED, outcome=Outcome.TRUNCATED,
)  # fmt: skip
_ENGINE_FAILED = Fault(502, "The engine failed.", "server_error", code="engine_error", elsewhere=True)
_DRAINED = Fault(
    503, "The gateway is shutting down and the drain deadline has passed.", "server_error", code="gateway_draining",
    retry_after_s=1.0, outcome=Outcome.CANCELLED,
)  # fmt: skip
# What an attempt that ended without a fault says about its engine.
_ENDINGS = {
    Outcome.COMPLETED: Ending.COMPLETED,
    Outcome.CANCELLED: Ending.CANCELLED,
    Outcome.FAILED: Ending.FAILED,
}
# What a request takes that was never dispatched.
_NOTHING = Cost(input_tokens=0, output_tokens=0, requests=0)


@dataclass(slots=True)
class _Attempt:
    """Mutable: one dispatch to one engine, closed exactly once."""

    target: Target
    event_id: str
    answer: Answer | None = None
    meter: Meter | None = None
    first_token_ns: int | None = None
    closed: bool = False


@dataclass(slots=True)
class _Run:
    """Mutable: what one request holds until it has ended."""

    call: Call
    sink: Sink
    served: str
    reserved: Cost
    ticket: Ticket
    view: LimitView
    price_version: str | None
    trace: Trace
    attempt: _Attempt | None = None
    used: Cost = _NOTHING


class Path:
    """The request path over its ports. One instance per process; holds no state of a request."""

    def __init__(self, ports: Ports, deadlines: Deadlines, node: str) -> None:
        self._p = ports
        self._deadlines = deadlines
        self._node = node

    async def serve(self, call: Call, sink: Sink, trace: Trace) -> None:
        """Answer one request. Never raises for anything a client or an engine can do."""
        trace.stream = call.request.wish.stream
        try:
            run = await self._admit(call, sink, trace)
            if run is not None:
                await self._run(run)
        finally:
            trace.duration_s = self._p.clock.monotonic_s() - call.started_s

    # -- before dispatch -----------------------------------------------------------------------------------------------

    async def _admit(self, call: Call, sink: Sink, trace: Trace) -> _Run | None:
        p, request = self._p, call.request
        facts = p.fleet.model(request.model_asked)
        if facts is None:
            await self._refuse(call, sink, trace, _no_such_model(request.model_asked))
            return None
        per_choice = request.max_output_tokens or facts.default_max_output_tokens
        cost = Cost(input_tokens=request.estimated_input_tokens, output_tokens=per_choice * request.choices)
        limits = call.principal.limits_for(facts.served)
        decision: Admitted | Refused | None = p.limits.try_admit(limits, cost, p.clock.monotonic_ns())
        if decision is None:
            decision = after_outage(await self._ask_store(limits, cost), cost, call.principal.outage_policy)
        if isinstance(decision, Refused):
            fault = Fault(429, "", "requests", code=decision.reason.value, refused=decision)
            await self._refuse(call, sink, trace, fault, decision.view)
            return None
        version = p.price_version(call.principal.org_id, call.received_ns)
        return _Run(call, sink, facts.served, cost, decision.ticket, decision.view, version, trace)

    async def _ask_store(self, limits: tuple[Limit, ...], cost: Cost) -> Admitted | Refused:
        """The store's answer. A caller who leaves meanwhile still gets back what the store may have deducted."""
        asked = asyncio.ensure_future(self._p.limits.admit(limits, cost, self._p.clock.monotonic_ns()))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_back)
            raise

    def _give_back(self, asked: asyncio.Future[Admitted | Refused]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            decision = asked.result()
            if isinstance(decision, Admitted):
                self._p.limits.settle(decision.ticket, _NOTHING, self._p.clock.monotonic_ns())

    async def _refuse(self, call: Call, sink: Sink, trace: Trace, fault: Fault, view: LimitView | None = None) -> None:
        trace.reason = fault.code or fault.type
        principal = call.principal
        model = call.request.model_asked[:_MAX_MODEL_CHARS]
        self._p.books.refuse(principal.org_id, principal.project_id, model, trace.reason, call.received_ns)
        trace.status = await self._p.edge.fail(sink, call, fault, view)

    # -- the attempts --------------------------------------------------------------------------------------------------

    async def _run(self, run: _Run) -> None:
        try:
            fault = await self._attempts(run)
            if fault is not None:
                run.trace.reason = fault.code or fault.type
                if run.attempt is None:  # nothing was ever dispatched: a refusal, not an attempt
                    await self._refuse(run.call, run.sink, run.trace, fault, run.view)
                else:
                    run.trace.status = await self._p.edge.fail(run.sink, run.call, fault, run.view)
        except asyncio.CancelledError:
            self._interrupted(run)
            if not run.sink.gone:
                await self._say_interrupted(run)
        except Exception:  # a defect of ours: the books are closed like any other ending, then it is reported
            self._defect(run)
            raise
        finally:
            self._p.limits.settle(run.ticket, run.used, self._p.clock.monotonic_ns())

    async def _attempts(self, run: _Run) -> Fault | None:
        """Dispatch, at most twice. None: answered. A fault: the client has been sent nothing yet."""
        target = self._p.fleet.pick(run.call, run.served, frozenset())
        if isinstance(target, NoTarget):
            return _unroutable(run.call.request.model_asked, target)
        attempt = run.attempt = self._open(run, target, 1)
        if attempt is None:
            return _SPOOL_FULL
        for number in range(2, _MAX_ATTEMPTS + 2):
            fault = await self._attempt(run, attempt)
            if fault is None:
                return None
            # The next attempt is opened before this one is closed: a kill in between leaves one billable attempt.
            following = self._follow(run, attempt, number) if fault.elsewhere and number <= _MAX_ATTEMPTS else None
            self._close(run, attempt, fault.outcome, fault.status, billable=following is None, fault=fault)
            if following is None:
                break
            attempt = run.attempt = following
        return fault

    def _follow(self, run: _Run, lost: _Attempt, number: int) -> _Attempt | None:
        """The next attempt, on another engine than the lost one; None when there is none to be had."""
        target = self._p.fleet.pick(run.call, run.served, frozenset({lost.target.endpoint_id}))
        return None if isinstance(target, NoTarget) else self._open(run, target, number)

    def _open(self, run: _Run, target: Target, number: int) -> _Attempt | None:
        """Record the attempt before it is dispatched. None: the spool is full, and nothing may run unmetered."""
        call, request, principal = run.call, run.call.request, run.call.principal
        event_id = self._p.clock.event_id()
        record = UsageOpen(
            event_id=event_id,
            request_id=call.request_id,
            attempt=number,
            org_id=principal.org_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            user=request.user,
            operation=request.operation.value,
            profile=None,
            model_asked=request.model_asked,
            model_served=run.served,
            tier_asked=request.tier_asked,
            deployment=None,
            pool=target.pool,
            endpoint=target.endpoint_id,
            endpoint_incarnation=target.incarnation or "",
            node=self._node,
            batch_id=None,
            custom_id=None,
            spillover=False,
            stream=request.wish.stream,
            choices=request.choices,
            reserved_input_tokens=run.reserved.input_tokens,
            reserved_output_tokens=run.reserved.output_tokens,
            predicted_cached_tokens=target.predicted_cached_tokens,
            price_version=run.price_version,
            received_ns=call.received_ns,
            opened_ns=self._p.clock.unix_ns(),
        )
        try:
            self._p.books.open(record)
        except SpoolFull:
            self._p.fleet.finished(target, AttemptEnd(Ending.CANCELLED))
            return None
        run.trace.endpoint_id, run.trace.attempts_count = target.endpoint_id, number
        if call.explain:
            run.trace.decision = target.summary
            self._p.fleet.explain(target, call)
        return _Attempt(target, event_id)

    async def _attempt(self, run: _Run, attempt: _Attempt) -> Fault | None:
        try:
            answer = await self._p.fleet.send(attempt.target, run.call, run.served, self._left(run))
        except EngineError as error:
            return engine_fault(error)
        attempt.answer = answer
        if not _OK_STATUS <= answer.status < _FIRST_REDIRECT_STATUS:
            return await self._engine_refused(run, answer)
        try:
            if run.call.request.wish.stream:
                return await self._stream(run, attempt, answer)
            return await self._whole(run, attempt, answer)
        except EngineError as error:
            answer.abort()
            return await self._broken(run, attempt, engine_fault(error))

    def _left(self, run: _Run) -> Deadlines:
        """The deadlines with the request's total already counted down. A non-streamed first byte may take the total."""
        d = self._deadlines
        left_s = max(0.001, d.total_s - (self._p.clock.monotonic_s() - run.call.started_s))
        first_byte_s = min(d.first_byte_s, left_s) if run.call.request.wish.stream else left_s
        return Deadlines(min(d.connect_s, left_s), first_byte_s, min(d.idle_s, left_s), left_s, d.max_answer_bytes)

    async def _engine_refused(self, run: _Run, answer: Answer) -> Fault:
        body = await answer.read_all(_MAX_ERROR_BYTES, self._left(run).idle_s)
        answer.release()
        wait_s = retry_after_s(answer.headers)
        if answer.status in _BUSY:
            return Fault(
                answer.status, "The engine is busy.", "server_error", code="engine_overloaded",
                retry_after_s=wait_s or 1.0, engine_body=body, elsewhere=True, ending=Ending.BUSY,
            )  # fmt: skip
        if answer.status < _FIRST_ERROR_STATUS or answer.status in _CREDENTIALS:
            return replace(_ENGINE_FAILED, message="The engine does not accept requests of this gateway.")
        if answer.status >= _FIRST_CRASH_STATUS:
            return replace(_ENGINE_FAILED, engine_body=body)
        return Fault(
            answer.status, "The engine refused the request.", "invalid_request_error", engine_body=body,
            ending=Ending.REFUSED, outcome=Outcome.REJECTED_BY_ENGINE,
        )  # fmt: skip

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _whole(self, run: _Run, attempt: _Attempt, answer: Answer) -> Fault | None:
        """Relay a non-streamed answer. The close is written before its last byte."""
        left = self._left(run)
        body = await answer.read_all(left.max_answer_bytes, left.total_s)
        attempt.first_token_ns = self._p.clock.unix_ns()
        self._p.fleet.first_token(attempt.target)
        usage = usage_of(body, choices=run.call.request.choices)
        self._close(run, attempt, Outcome.COMPLETED, answer.status, billable=True, usage=usage)
        answer.release()
        headers = self._p.edge.headers(run.call, run.view, run.trace, answer)
        headers.append((b"content-length", b"%d" % len(body)))
        await run.sink.start(answer.status, headers)
        run.trace.status = answer.status
        await run.sink.finish(body)
        return None

    async def _stream(self, run: _Run, attempt: _Attempt, answer: Answer) -> Fault | None:
        """Relay a stream. Nothing is sent before the first token, so that a lost engine can still be replaced."""
        meter = attempt.meter = self._p.fleet.meter(attempt.target, run.call)
        left = self._left(run)
        wait_s, held = left.first_byte_s, b""
        out, lost = b"", _TRUNCATED
        while not meter.done:
            try:
                data = await answer.read(min(wait_s, self._left(run).total_s))
            except EngineError as error:
                data, lost = b"", engine_fault(error)
            if run.sink.drained:
                self._delivered(run, attempt, meter)
            out = held + (meter.feed(data) if data else meter.flush())
            held = b""
            if not data:
                break
            if not run.sink.started:
                if not (meter.first_token or meter.done or len(out) > _MAX_HELD_BYTES):
                    held = out
                    continue
                if meter.failed:
                    break
                await self._begin(run, attempt, answer)
                wait_s = left.idle_s
            if out and not meter.done:
                await run.sink.write(out)
                out = b""
        return await self._end_stream(run, attempt, out, lost)

    async def _begin(self, run: _Run, attempt: _Attempt, answer: Answer) -> None:
        attempt.first_token_ns = self._p.clock.unix_ns()
        run.trace.first_token_s = self._p.clock.monotonic_s() - run.call.started_s
        self._p.fleet.first_token(attempt.target)
        run.trace.status = answer.status
        await run.sink.start(answer.status, self._p.edge.headers(run.call, run.view, run.trace, answer))

    async def _end_stream(self, run: _Run, attempt: _Attempt, rest: bytes, lost: Fault) -> Fault | None:
        """Close the books, then send the last bytes. A cut stream is told as such, never as a finished one."""
        meter, answer = attempt.meter, attempt.answer
        assert meter is not None and answer is not None
        end = meter.end()
        if end is StreamEnd.TRUNCATED:
            answer.abort()
            return await self._broken(run, attempt, lost, rest)
        if not run.sink.started:
            if end is StreamEnd.ENGINE_ERROR:
                answer.abort()
                return _ENGINE_FAILED
            await self._begin(run, attempt, answer)
        outcome = Outcome.COMPLETED if end is StreamEnd.COMPLETED else Outcome.FAILED
        self._close(run, attempt, outcome, answer.status, billable=True, usage=meter.engine_usage())
        if not meter.done:  # every choice finished, but the engine was cut before it said so
            answer.abort()
            await run.sink.finish(rest + b"data: [DONE]\n\n")
            return None
        await run.sink.finish(rest)
        await answer.read(_TAIL_S)  # the engine's last, empty chunk: only then can its connection be used again
        answer.release()
        return None

    async def _broken(self, run: _Run, attempt: _Attempt, fault: Fault, rest: bytes = b"") -> Fault | None:
        """The engine was lost after its head. Before the first token: as a fault. After it: said in the stream."""
        if not run.sink.started:
            return fault
        if attempt.closed:
            return None
        usage = self._delivered_usage(run, attempt.meter) if attempt.meter is not None else None
        run.trace.reason = fault.code or fault.type
        self._close(run, attempt, fault.outcome, fault.status, billable=True, usage=usage, fault=fault)
        await run.sink.finish(rest + self._p.edge.stream_fault(fault))
        return None

    def _delivered_usage(self, run: _Run, meter: Meter) -> Usage:
        """What the client got. An engine that tells no counts before its end leaves the input to our estimate."""
        usage = meter.delivered_usage()
        if usage.uncached_input_tokens is None and run.sink.started:
            return replace(usage, uncached_input_tokens=run.call.request.estimated_input_tokens, estimated=True)
        return usage

    def _delivered(self, run: _Run, attempt: _Attempt, meter: Meter) -> None:
        """The client's socket has taken everything so far: note it, and write it down when a checkpoint is due."""
        meter.delivered()
        if not meter.checkpoint_due(self._p.clock.monotonic_s()):
            return
        usage = self._delivered_usage(run, meter)
        self._p.books.checkpoint(
            UsageCheckpoint(
                event_id=attempt.event_id,
                uncached_input_tokens=usage.uncached_input_tokens,
                cached_input_tokens=usage.cached_input_tokens,
                output_tokens=usage.output_tokens,
                first_token_ns=attempt.first_token_ns,
                at_ns=self._p.clock.unix_ns(),
            )
        )
        meter.checkpointed(self._p.clock.monotonic_s())

    # -- endings -------------------------------------------------------------------------------------------------------

    def _close(
        self,
        run: _Run,
        attempt: _Attempt,
        outcome: Outcome,
        status: int,
        *,
        billable: bool,
        usage: Usage | None = None,
        fault: Fault | None = None,
    ) -> None:
        """Close an attempt in the books, the router and the request's reservation: once, on every ending."""
        if attempt.closed:
            return
        attempt.closed = True
        known = usage if usage is not None else UNKNOWN_USAGE
        self._p.books.close(
            UsageClose(
                event_id=attempt.event_id,
                outcome=outcome,
                status=status,
                error_code=None if fault is None else fault.code,
                billable=billable,
                estimated=known.estimated,
                tier_served=known.tier_served,
                uncached_input_tokens=known.uncached_input_tokens,
                cached_input_tokens=known.cached_input_tokens,
                cache_write_tokens=known.cache_write_tokens,
                output_tokens=known.output_tokens,
                reasoning_tokens=known.reasoning_tokens,
                first_token_ns=attempt.first_token_ns,
                ended_ns=self._p.clock.unix_ns(),
            )
        )
        end = AttemptEnd(
            ending=_ENDINGS[outcome] if fault is None else fault.ending,
            retry_after_s=None if fault is None else fault.retry_after_s,
            cached_tokens=known.cached_input_tokens if not known.estimated else None,
            input_tokens=known.input_tokens,
            output_tokens=known.output_tokens,
        )
        self._p.fleet.finished(attempt.target, end)
        run.trace.outcome, run.trace.usage = outcome.value, usage
        run.used = _used(run.reserved, attempt, known)

    def _interrupted(self, run: _Run) -> None:
        """The client left, or this process is draining: cancel the engine, bill what was delivered."""
        attempt = run.attempt
        run.trace.status = run.trace.status or _CLIENT_CLOSED_STATUS
        if attempt is None or attempt.closed:
            return
        if attempt.answer is not None:
            attempt.answer.abort()
        if attempt.meter is not None:
            usage = replace(self._delivered_usage(run, attempt.meter), estimated=True)
        elif run.call.request.wish.stream:
            usage = replace(UNKNOWN_USAGE, estimated=True)
        else:
            usage = replace(
                UNKNOWN_USAGE, uncached_input_tokens=run.call.request.estimated_input_tokens, estimated=True
            )
        self._close(run, attempt, Outcome.CANCELLED, _CLIENT_CLOSED_STATUS, billable=True, usage=usage)

    def _defect(self, run: _Run) -> None:
        """This process failed: the engine is cancelled, and only what was delivered is billed."""
        attempt = run.attempt
        if attempt is None or attempt.closed:
            return
        if attempt.answer is not None:
            attempt.answer.abort()
        meter = attempt.meter
        usage = self._delivered_usage(run, meter) if meter is not None and run.sink.started else None
        fault = Fault(500, "", "server_error", code="internal_error", ending=Ending.CANCELLED)
        self._close(run, attempt, Outcome.FAILED, fault.status, billable=True, usage=usage, fault=fault)

    async def _say_interrupted(self, run: _Run) -> None:
        if run.sink.started:
            await run.sink.finish(self._p.edge.stream_fault(_DRAINED))
        else:
            run.trace.status = await self._p.edge.fail(run.sink, run.call, _DRAINED, run.view)


def _used(reserved: Cost, attempt: _Attempt, usage: Usage) -> Cost:
    """What a closed attempt takes from the limits. Never dispatched to a token: only the request itself."""
    if attempt.first_token_ns is None and usage.input_tokens is None:
        return Cost(input_tokens=0, output_tokens=0)
    seen_output = usage.output_tokens
    return Cost(
        input_tokens=reserved.input_tokens if usage.input_tokens is None else usage.input_tokens,
        output_tokens=reserved.output_tokens if seen_output is None else seen_output,
    )


def engine_fault(error: EngineError) -> Fault:
    """An engine's failure as the answer that the client gets if no other engine takes over."""
    if isinstance(error, EngineTimeout):
        return Fault(
            504, str(error), "server_error", code="engine_timeout",
            elsewhere=error.deadline == "connect",
            ending=Ending.UNREACHABLE if error.deadline == "connect" else Ending.FAILED,
        )  # fmt: skip
    code = "engine_unreachable" if isinstance(error, EngineUnreachable) else "engine_lost"
    return Fault(
        502, "The engine could not be reached or was lost.", "server_error", code,
        elsewhere=True, ending=Ending.UNREACHABLE,
    )  # fmt: skip


def retry_after_s(headers: Sequence[Header]) -> float | None:
    """Seconds of an engine's `retry-after` (delta form), None when absent or a date."""
    for name, value in headers:
        if name == b"retry-after" and value.isdigit():
            return float(value)
    return None


def _no_such_model(model: str) -> Fault:
    return Fault(
        404, f"The model '{model}' does not exist or you do not have access to it.", "invalid_request_error",
        code="model_not_found", param="model",
    )  # fmt: skip


def _unroutable(model: str, none: NoTarget) -> Fault:
    if none.reason is NoTargetReason.NO_SUCH_MODEL:
        return _no_such_model(model)
    return Fault(
        503, f"No engine can take a request for '{model}' now.", "server_error", code="no_engine_available",
        retry_after_s=none.retry_after_s or 1.0,
    )  # fmt: skip
