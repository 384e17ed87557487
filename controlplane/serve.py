"""The request path, top to bottom: price, limit, route, send, relay, meter, settle.

Owns: the order of the steps and what happens when one of them breaks. It is the only core module that waits. Does not
own: any I/O (the ports below are handed in by `app`), the wire (`adapters.openai_wire`), or the rules of a step.

Broken steps, decided here once:
- refused by a limit, no route, spool full: nothing was dispatched, every reservation is given back whole;
- an engine lost before its first token: the attempt is closed as not billable and one other engine is tried;
- an engine lost after it: the client is told in the stream, what was delivered is billed;
- the client left: the engine is cancelled at once, what was delivered is billed and flagged as an estimate;
- a deadline of the engine: 504 when nothing was sent yet, else as lost; the request's total also ends a stream that
  still flows, and says nothing about the engine then;
- the drain deadline: as if the client had left, and the client is told;
- a defect of ours: the attempt's books, the router's load and the reservation are closed like on any other ending.
"""

from __future__ import annotations

import asyncio
import contextlib

from billing.metering import CHECKPOINT_S, Meter, StreamEnd
from billing.token_usage import UNKNOWN_USAGE, Usage, usage_of
from billing.usage_event import Outcome, UsageCheckpoint, UsageClose, UsageOpen
from controlplane.admission import after_outage
from controlplane.attempt import NOTHING, Attempt, Run, Verdict, used_by
from controlplane.errors import EngineError, EngineTimeout, SpoolFull
from controlplane.faults import (
    CLIENT_CLOSED_STATUS,
    CLIENT_GONE,
    DEFECT,
    DRAINED,
    ENGINE_FAILED,
    GONE_REASON,
    SPOOL_FULL,
    SUCCESSES,
    TRUNCATED,
    engine_answer_fault,
    engine_fault,
    failed_early,
    unroutable,
)
from controlplane.ports import (
    Answer,
    AttemptEnd,
    Call,
    Deadlines,
    Fault,
    NoTarget,
    Ports,
    Sink,
    Target,
    Trace,
)
from controlplane.rate_limit import Admitted, Cost, LimitView, Refused
from controlplane.tenancy import Limit
from router.endpoints import Ending

# Attempts per request: the first, and one elsewhere when the engine is lost before its first token (DESIGN 4.1).
_MAX_ATTEMPTS = 2
# Under which refusals for unknown models are counted.
_UNKNOWN_MODEL = "(unknown)"
# An engine's error body is a few hundred bytes in every recording; more is cut.
_MAX_ERROR_BYTES = 64 * 1024
# How much may be held back while waiting for the first token (a role chunk is about 300 bytes).
_MAX_HELD_BYTES = 64 * 1024
# The end of every OpenAI stream, also of one whose engine did not come to say it (reference gateway 2.4).
_DONE = b"data: [DONE]\n\n"
# A timer may fire this much before its time (uvloop's clock has milliseconds).
_CLOCK_SLACK_S = 0.002
# How long the engine's last chunk may take after `[DONE]` before its connection is given up.
_TAIL_S = 1.0


class Path:
    """The request path over its ports. One instance per process; holds no state of a request."""

    def __init__(self, ports: Ports, deadlines: Deadlines, node: str) -> None:
        self._p = ports
        self._deadlines = deadlines
        self._node = node

    async def serve(self, call: Call, sink: Sink, trace: Trace) -> None:
        """Answer one request. Raises nothing for what a client or an engine can do; a defect of ours is raised for the
        log after the client was told.
        """
        trace.stream = call.request.wish.stream
        try:
            run = await self._admit(call, sink, trace)
            if run is not None:
                await self._run(run)
        except asyncio.CancelledError:
            if trace.attempts_count == 0:
                trace.outcome = Outcome.CANCELLED.value
            if sink.gone:
                trace.status = trace.status or CLIENT_CLOSED_STATUS
                trace.reason = trace.reason or GONE_REASON
            else:
                await self._tell(call, sink, trace, DRAINED)
        except Exception:
            await self._tell(call, sink, trace, DEFECT)
            raise
        finally:
            trace.duration_s = self._p.clock.monotonic_s() - call.started_s

    async def _tell(self, call: Call, sink: Sink, trace: Trace, fault: Fault) -> None:
        """Say a fault in whatever way the answer still allows: whole, inside the stream, or by cutting it off."""
        if sink.finished:
            return
        trace.reason = fault.code or fault.type
        if not sink.started:
            trace.status = await self._p.edge.fail(sink, call, fault, None)
        elif sink.open_ended and sink.has_room:
            await sink.finish(self._p.edge.stream_fault(fault))
        else:  # it cannot be said in this answer, or to a client whose socket is full
            sink.abort()

    # -- before dispatch -----------------------------------------------------------------------------------------------

    async def _admit(self, call: Call, sink: Sink, trace: Trace) -> Run | None:
        p, request = self._p, call.request
        facts = p.fleet.model(request.model_asked)
        if isinstance(facts, NoTarget):
            await self._refuse(call, sink, trace, unroutable(request.model_asked, facts))
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
        return Run(call, sink, facts.served, cost, decision.ticket, decision.view, version, trace)

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
                self._p.limits.settle(decision.ticket, NOTHING, self._p.clock.monotonic_ns())

    async def _refuse(self, call: Call, sink: Sink, trace: Trace, fault: Fault, view: LimitView | None = None) -> None:
        trace.reason = fault.code or fault.type
        principal = call.principal
        # A name that nobody knows is the client's text: rows by it would grow with whatever it makes up.
        model = _UNKNOWN_MODEL if fault.code == "model_not_found" else call.request.model_asked
        self._p.books.refuse(principal.org_id, principal.project_id, model, trace.reason, call.received_ns)
        trace.status = await self._p.edge.fail(sink, call, fault, view)

    # -- the attempts --------------------------------------------------------------------------------------------------

    async def _run(self, run: Run) -> None:
        try:
            fault = await self._attempts(run)
            if fault is not None:
                self._settle(run)
                run.trace.reason = fault.code or fault.type
                if run.attempt is None:  # nothing was ever dispatched: a refusal, not an attempt
                    await self._refuse(run.call, run.sink, run.trace, fault, run.view)
                else:
                    run.trace.status = await self._p.edge.fail(run.sink, run.call, fault, run.view)
        except asyncio.CancelledError:
            self._interrupted(run, CLIENT_GONE if run.sink.gone else DRAINED)
            raise
        except Exception:
            self._interrupted(run, DEFECT)
            raise
        finally:
            self._settle(run)

    def _settle(self, run: Run) -> None:
        """Give back what was reserved and not used, once: before the client can know that the request has ended."""
        if not run.settled:
            run.settled = True
            self._p.limits.settle(run.ticket, run.used, self._p.clock.monotonic_ns())

    async def _attempts(self, run: Run) -> Fault | None:
        """Dispatch, at most twice. None: answered. A fault: the client has been sent nothing yet."""
        run.read = await self._p.fleet.read(run.call, run.served)
        target = self._p.fleet.pick(run.call, run.served, frozenset(), run.read)
        if isinstance(target, NoTarget):
            return unroutable(run.call.request.model_asked, target)
        attempt = run.attempt = self._open(run, target, 1)
        if attempt is None:
            return SPOOL_FULL
        for number in range(2, _MAX_ATTEMPTS + 2):
            fault = await self._attempt(run, attempt)
            if fault is None:
                return None
            # The next attempt is opened before this one is closed: a kill in between leaves one billable attempt.
            following = self._follow(run, attempt, number) if fault.elsewhere and number <= _MAX_ATTEMPTS else None
            lost, run.attempt = attempt, following or attempt
            self._close(run, lost, fault, billable=following is None)
            if following is None:
                break
            attempt = following
        return fault

    def _follow(self, run: Run, lost: Attempt, number: int) -> Attempt | None:
        """The next attempt, on another engine than the lost one; None when there is none to be had."""
        target = self._p.fleet.pick(run.call, run.served, frozenset({lost.target.endpoint_id}), run.read)
        return None if isinstance(target, NoTarget) else self._open(run, target, number)

    def _open(self, run: Run, target: Target, number: int) -> Attempt | None:
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
            if call.explain:
                self._p.fleet.explain(target, call)
            self._p.books.open(record)
        except BaseException as error:
            self._p.fleet.finished(target, AttemptEnd(Ending.CANCELLED))
            if isinstance(error, SpoolFull):
                return None
            raise
        run.trace.endpoint_id, run.trace.attempts_count = target.endpoint_id, number
        if call.explain:
            run.trace.decision = target.summary
        return Attempt(target, event_id, self._p.clock.monotonic_s())

    async def _attempt(self, run: Run, attempt: Attempt) -> Fault | None:
        """None: answered, and closed. A fault: nothing was sent to the client, and the attempt is still open."""
        try:
            answer = await self._p.fleet.send(attempt.target, run.call, run.served, self._left(run), attempt.on_send)
        except EngineTimeout as error:
            return engine_fault(error if error.deadline == "connect" else self._late(run))
        except EngineError as error:
            return engine_fault(error)
        attempt.answer = answer
        if answer.status not in SUCCESSES:
            return await self._engine_refused(run, answer)
        try:
            if run.call.request.wish.stream:
                fault = await self._stream(run, attempt, answer)
            else:
                fault = await self._whole(run, attempt, answer)
        except EngineError as error:
            fault = await self._broken(run, attempt, engine_fault(error, begun=run.sink.started))
        if fault is not None:
            answer.abort()
        return fault

    def _left(self, run: Run) -> Deadlines:
        """The deadlines with the request's total already counted down. A non-streamed first byte may take the total."""
        d = self._deadlines
        left_s = max(0.001, d.total_s - (self._p.clock.monotonic_s() - run.call.started_s))
        first_byte_s = min(d.first_byte_s, left_s) if run.call.request.wish.stream else left_s
        return Deadlines(min(d.connect_s, left_s), first_byte_s, min(d.idle_s, left_s), left_s, d.max_answer_bytes)

    async def _engine_refused(self, run: Run, answer: Answer) -> Fault:
        try:
            body = await answer.read_all(_MAX_ERROR_BYTES, self._left(run).idle_s)
        except EngineError:  # too long, or cut: the status is what counts
            body = b""
        answer.release()
        return engine_answer_fault(answer.status, answer.headers, body)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _whole(self, run: Run, attempt: Attempt, answer: Answer) -> Fault | None:
        """Relay a non-streamed answer. The close is written before its last byte."""
        left_s = max(0.001, self._deadlines.total_s - (self._p.clock.monotonic_s() - run.call.started_s))
        try:
            body = await answer.read_all(self._deadlines.max_answer_bytes, left_s)
        except EngineTimeout:
            raise self._late(run) from None
        attempt.first_token_ns = self._p.clock.unix_ns()
        self._p.fleet.first_token(attempt.target)
        self._complete(run, attempt, answer.status, usage_of(body, choices=run.call.request.choices))
        answer.release()
        headers = self._p.edge.headers(run.call, run.view, run.trace, answer)
        headers.append((b"content-length", b"%d" % len(body)))
        await run.sink.start(answer.status, headers)
        run.trace.status = answer.status
        await run.sink.finish(body)
        return None

    async def _stream(self, run: Run, attempt: Attempt, answer: Answer) -> Fault | None:
        """Relay a stream. Nothing is sent before the first token, so that a lost engine can still be replaced."""
        meter = attempt.meter = self._p.fleet.meter(attempt.target, run.call)
        self._look_again(run, attempt, meter)
        out, lost = await self._until_first_token(run, attempt, answer)
        if lost is None:
            await self._begin(run, attempt, answer)
            if not meter.done:
                if out:
                    await self._write(run, attempt, out)
                out, lost = await self._relay(run, attempt, answer)
        return await self._end_stream(run, attempt, out, lost if lost is not None else TRUNCATED)

    async def _until_first_token(self, run: Run, attempt: Attempt, answer: Answer) -> tuple[bytes, Fault | None]:
        """What the client gets first; and a fault when the engine ended, or was lost, before a token."""
        meter, now_s = attempt.meter, self._p.clock.monotonic_s
        assert meter is not None
        due_s = min(attempt.sent_s + self._deadlines.first_byte_s, run.call.started_s + self._deadlines.total_s)
        out, silent_bytes = b"", 0
        while not (meter.first_token or meter.done or len(out) > _MAX_HELD_BYTES):
            try:
                data = await self._read(run, answer, due_s - now_s())
            except EngineError as error:
                return out + meter.flush(), engine_fault(error)
            new = meter.feed(data) if data else meter.flush()
            out += new
            silent_bytes = 0 if new else silent_bytes + len(data)
            if not data or silent_bytes > self._deadlines.max_answer_bytes:  # an event without end
                return out, TRUNCATED
        return out, TRUNCATED if meter.failed else None

    async def _relay(self, run: Run, attempt: Attempt, answer: Answer) -> tuple[bytes, Fault | None]:
        """Relay the rest, each piece as it comes. What is still to be sent at the end, and a fault if it was lost."""
        meter, sink, deadlines, now_s = attempt.meter, run.sink, self._deadlines, self._p.clock.monotonic_s
        assert meter is not None
        feed, queue, delivered = meter.feed, sink.queue, meter.delivered
        rest, queued, silent_bytes = b"", b"", 0

        def take(data: bytes) -> bool:
            nonlocal rest, queued, silent_bytes
            if sink.gone:
                return False
            if queued:  # what the client takes of it is counted before the meter is ahead of it
                sink.push()
            rest = feed(data)
            if meter.done:
                return False
            if not rest:
                silent_bytes += len(data)
                return silent_bytes <= deadlines.max_answer_bytes
            silent_bytes = 0
            queued, rest = rest, b""
            if not queue(queued, took):
                queued, rest = b"", queued
                return False
            return True

        def took(drained: bool) -> None:
            nonlocal queued
            if not drained:
                meter.sent(queued, sink.written_bytes)
            elif delivered(now_s()):
                self._checkpoint(run, attempt, meter)
            queued = b""

        try:
            while not meter.done and silent_bytes <= deadlines.max_answer_bytes:  # else: an event without end
                if rest:
                    await self._write(run, attempt, rest)
                    rest = b""
                ended = await answer.relay(take, deadlines.idle_s, self._total_left_s(run))
                sink.push()
                if ended:
                    return meter.flush(), None
        except EngineError as error:
            self._took(run, meter)
            late = isinstance(error, EngineTimeout)
            return meter.flush(), engine_fault(self._late(run) if late else error, begun=True)
        return rest, None

    def _total_left_s(self, run: Run) -> float:
        left_s = run.call.started_s + self._deadlines.total_s - self._p.clock.monotonic_s()
        if left_s <= 0:
            raise self._late(run)
        return left_s

    async def _write(self, run: Run, attempt: Attempt, data: bytes) -> None:
        """Send a piece, with the wait for a slow client: its socket has taken it then, or holds some of it back."""
        meter = attempt.meter
        assert meter is not None
        await run.sink.write(data)
        if run.sink.drained:
            self._delivered(run, attempt, meter)
        else:
            meter.sent(data, run.sink.written_bytes)

    def _look_again(self, run: Run, attempt: Attempt, meter: Meter) -> None:
        """Four times per checkpoint interval: an engine that falls silent must not hold back what was delivered."""
        if run.sink.started and run.sink.drained:
            self._delivered(run, attempt, meter)
        loop = asyncio.get_running_loop()
        attempt.stop_looking = loop.call_later(CHECKPOINT_S / 4, self._look_again, run, attempt, meter).cancel

    async def _read(self, run: Run, answer: Answer, wait_s: float) -> bytes:
        """The next bytes; a passed deadline by its right name, although bytes may be there."""
        if wait_s <= 0:
            raise self._late(run)
        try:
            return await answer.read(wait_s)
        except EngineTimeout:
            raise self._late(run) from None

    def _late(self, run: Run) -> EngineTimeout:
        """Which deadline it was that passed."""
        d, run_s = self._deadlines, self._p.clock.monotonic_s() - run.call.started_s
        endpoint_id = "" if run.attempt is None else run.attempt.target.endpoint_id
        if run_s >= d.total_s - _CLOCK_SLACK_S or not run.trace.stream:
            return EngineTimeout(endpoint_id, "total", d.total_s)
        if run.sink.started:
            return EngineTimeout(endpoint_id, "idle", d.idle_s)
        return EngineTimeout(endpoint_id, "first_byte", d.first_byte_s)

    async def _begin(self, run: Run, attempt: Attempt, answer: Answer) -> None:
        attempt.first_token_ns = self._p.clock.unix_ns()
        run.trace.first_token_s = self._p.clock.monotonic_s() - run.call.started_s
        self._p.fleet.first_token(attempt.target)
        run.trace.status = answer.status
        await run.sink.start(answer.status, self._p.edge.headers(run.call, run.view, run.trace, answer))

    async def _end_stream(self, run: Run, attempt: Attempt, rest: bytes, lost: Fault) -> Fault | None:
        """Close the books, then send the last bytes. A cut stream is told as such, never as a finished one."""
        meter, answer = attempt.meter, attempt.answer
        assert meter is not None and answer is not None
        end = meter.end()
        if end is StreamEnd.TRUNCATED:
            return await self._broken(run, attempt, lost, rest)
        if end is StreamEnd.ENGINE_ERROR:
            if not run.sink.started:
                return failed_early(rest)
            run.trace.reason = ENGINE_FAILED.code or ""
            self._close(run, attempt, ENGINE_FAILED, usage=meter.engine_usage())
        else:
            if not run.sink.started:
                await self._begin(run, attempt, answer)
            self._complete(run, attempt, answer.status, meter.engine_usage())
        if not meter.done:  # every choice has finished, or an error was said, but the engine was cut before its end
            answer.abort()
            await run.sink.finish(rest + _DONE)
            return None
        await run.sink.finish(rest)
        try:
            with contextlib.suppress(EngineError):
                await answer.read(_TAIL_S)  # the engine's last, empty chunk: only then can its connection be used again
        finally:
            answer.release()
        return None

    async def _broken(self, run: Run, attempt: Attempt, fault: Fault, rest: bytes = b"") -> Fault | None:
        """The engine was lost after its head. Before the first token: as a fault. After it: said in the stream."""
        meter, sink = attempt.meter, run.sink
        if not sink.started or meter is None:
            return fault
        if attempt.answer is not None:
            attempt.answer.abort()
        if attempt.closed:
            return None
        if rest:
            await self._write(run, attempt, rest)
        await asyncio.sleep(0)  # what was written reaches the socket when the loop turns
        self._took(run, meter)
        run.trace.reason = fault.code or fault.type
        self._close(run, attempt, fault, usage=self._delivered_usage(run, meter))
        await sink.finish(self._p.edge.stream_fault(fault))
        return None

    def _took(self, run: Run, meter: Meter) -> None:
        """The end of a relay: what the client's socket has taken of it."""
        run.sink.push()
        if run.sink.drained:
            meter.delivered(self._p.clock.monotonic_s())
        else:
            meter.delivered_up_to(run.sink.taken_bytes)

    def _delivered_usage(self, run: Run, meter: Meter) -> Usage:
        """What the client got. An engine that tells no counts before its end leaves the input to our estimate."""
        usage = meter.delivered_usage()
        if usage.uncached_input_tokens is None and run.sink.started:
            return usage._replace(uncached_input_tokens=run.call.request.estimated_input_tokens, estimated=True)
        return usage

    def _delivered(self, run: Run, attempt: Attempt, meter: Meter) -> None:
        """The client's socket has taken everything so far: note it, and write it down when a checkpoint is due."""
        if meter.delivered(self._p.clock.monotonic_s()):
            self._checkpoint(run, attempt, meter)

    def _checkpoint(self, run: Run, attempt: Attempt, meter: Meter) -> None:
        """Write down what was delivered so far, which is what a crash would be billed by."""
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

    def _complete(self, run: Run, attempt: Attempt, status: int, usage: Usage) -> None:
        """The engine has answered to the end."""
        self._end(run, attempt, Verdict(Outcome.COMPLETED, status, None, AttemptEnd(Ending.COMPLETED)), usage)

    def _close(
        self, run: Run, attempt: Attempt, fault: Fault, *, billable: bool = True, usage: Usage | None = None
    ) -> None:
        """The attempt has ended in a fault."""
        end = AttemptEnd(fault.ending, fault.retry_after_s)
        self._end(run, attempt, Verdict(fault.outcome, fault.status, fault.code, end, billable), usage)

    def _end(self, run: Run, attempt: Attempt, verdict: Verdict, usage: Usage | None) -> None:
        """Close an attempt in the books, the router and the request's reservation: once, on every ending."""
        if attempt.closed:
            return
        attempt.closed = True
        if attempt.stop_looking is not None:
            attempt.stop_looking()
        known = usage if usage is not None else UNKNOWN_USAGE
        run.trace.outcome, run.trace.usage = verdict.outcome.value, usage
        run.used = used_by(run.reserved, attempt, known)
        close = UsageClose(
            event_id=attempt.event_id,
            outcome=verdict.outcome,
            status=verdict.status,
            error_code=verdict.error_code,
            billable=verdict.billable,
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
        end = AttemptEnd(
            ending=verdict.end.ending,
            retry_after_s=verdict.end.retry_after_s,
            cached_tokens=known.cached_input_tokens if not known.estimated else None,
            input_tokens=known.input_tokens,
            output_tokens=known.output_tokens,
        )
        try:
            self._p.books.close(close)
        finally:
            self._p.fleet.finished(attempt.target, end)
        if attempt is run.attempt:
            self._settle(run)

    def _interrupted(self, run: Run, fault: Fault) -> None:
        """The client left, this process is draining, or it has a defect: cancel the engine, bill what was delivered."""
        attempt = run.attempt
        if attempt is None or attempt.closed:
            return
        if attempt.answer is not None:
            attempt.answer.abort()
        request, meter = run.call.request, attempt.meter
        if meter is not None:
            self._took(run, meter)
            usage = self._delivered_usage(run, meter)._replace(estimated=True)
        elif request.wish.stream or fault is DEFECT or not attempt.reached:  # not one token came
            usage = UNKNOWN_USAGE._replace(estimated=True)
        else:  # the engine has worked for it, unseen: its input is what is known (DESIGN 4.3)
            usage = UNKNOWN_USAGE._replace(uncached_input_tokens=request.estimated_input_tokens, estimated=True)
        self._close(run, attempt, fault, usage=usage)
