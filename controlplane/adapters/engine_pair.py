"""A request on two engines over the same connections as any other: the prefill leg, the decode leg, one answer.

Owns: the order of the two legs by handshake, that they share one set of deadlines, that the end of one is the end of
the other at once (router R23, R24), and whose fault an ending was. Does not own: the bodies (`disaggregation`), which
two engines (`router.pairing`), the connections (`engine_http`), or what a failure means for the client (`serve`).

The answer that comes back is the decode leg's, with the cached tokens of the prefill leg in it: `serve` meters and
relays it like any other, so a request is billed once: input and output by the decode leg, cached by the prefill leg.

When the client leaves, both connections are closed, which is what these engines take as a cancellation. A prefill of
vLLM that was answered holds its blocks for the decoder by then. Its engine is asked to let go (`/abort_requests`, there
with `--tokens-only` or in development mode); vLLM 0.32 heeds that only while the request runs, and else frees them when
their lease ends (`kv_lease_duration`, 30 s).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from billing.metering import Meter, StreamEnd
from billing.token_usage import UNKNOWN_USAGE, Usage, usage_of
from controlplane.adapters.engine_http import EngineAnswer, EngineCall, EngineClient
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
)
from controlplane.errors import EngineError, EngineLost, EngineTimeout
from controlplane.faults import SUCCESSES
from controlplane.ports import Answer, Deadlines, Header
from controlplane.request import Operation

_log = logging.getLogger(__name__)

# What a prefill answers at most: its blocks and, of TensorRT-LLM, its prompt's token ids (1 M of them: 7 MB).
_MAX_PREFILL_BYTES: Final = 64 * 1024 * 1024
# How long the end of a prefill leg may come after the first token of its decode leg: both see the same transfer end.
_GRACE_S: Final = 1.0
# How long an engine may take to be told that nobody will fetch its blocks.
_TELL_S: Final = 2.0
# Rooms and ids are positive 64-bit integers in the engines.
_ID_BITS: Final = 63


class LegName(StrEnum):
    """Which of the two. The values go into logs."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LegWire:
    """How one of the engines is reached for this request."""

    call: EngineCall
    """Without a body: its head ends before the content-length."""
    bootstrap_host: str
    bootstrap_port: int


@dataclass(frozen=True, slots=True)
class PairCall:
    """A request for two engines. `body` is what a single engine would get."""

    handshake: Handshake
    operation: Operation
    request_id: str
    body: bytes
    stream: bool
    choices: int
    limits: Deadlines
    prefill: LegWire
    decode: LegWire


class PairRun:
    """One attempt on two engines. Mutable: what became of its legs, for the router that counts each."""

    __slots__ = ("_on_prefilled", "fault", "no_hand_over", "prefilled")

    def __init__(self, on_prefilled: Callable[[Usage], None]) -> None:
        self._on_prefilled = on_prefilled
        self.fault: LegName | None = None
        """The leg whose failure ended the attempt; None: neither's."""
        self.no_hand_over = False
        """That failure was an answer that handed nothing over: the engine works, and not as it should."""
        self.prefilled: Usage | None = None
        """What the prefill leg used, once it has ended well."""

    def blame(self, leg: LegName) -> None:
        """The first failure counts: the other leg's end is its consequence."""
        if self.fault is None:
            self.fault = leg

    def has_prefilled(self, usage: Usage) -> None:
        """The prefill leg has ended well."""
        if self.prefilled is None:
            self.prefilled = usage
            self._on_prefilled(usage)


class EnginePairs:
    """Sends requests to pairs of engines. One per process. Mutable: rooms in use, and what it still tells engines."""

    def __init__(self, client: EngineClient, bits: Callable[[int], int]) -> None:
        self._client = client
        self._bits = bits
        self._rooms: set[int] = set()
        self._telling: set[asyncio.Task[None]] = set()

    async def send(self, call: PairCall, run: PairRun) -> Answer:
        """The decode leg's answer once its head is there, or the answer of the leg that refused. Raises EngineError.

        A cancelled wait closes both connections.
        """
        if call.handshake is Handshake.BOOTSTRAP:
            return await self._together(call, run)
        return await self._in_turn(call, run)

    # -- prefill, then decode ------------------------------------------------------------------------------------------

    async def _in_turn(self, call: PairCall, run: PairRun) -> Answer:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        context_id = MIN_CONTEXT_ID + self._bits(_ID_BITS) % (2**_ID_BITS - MIN_CONTEXT_ID)
        body = prefill_body(call.handshake, call.operation, call.body, context_id)
        answered = taken_over = False
        try:
            with _blaming(run, LegName.PREFILL):
                answer = await self._client.send(_engine_call(call.prefill, body, call.limits, 0.0))
                if answer.status not in SUCCESSES:
                    run.blame(LegName.PREFILL)
                    return answer
                answered = True
                data = await _read_all(answer, call.limits.first_byte_s - (loop.time() - started_s))
                answer.release()
                made = hand_over(call.handshake, call.operation, call.body, data, context_id)
                if isinstance(made, NoHandOver):
                    raise self._useless(call, run, made)
            run.has_prefilled(made.usage)
            if made.decode_body is None:
                taken_over = True
                return _finished(call, made, answer)
            with _blaming(run, LegName.DECODE):
                waited_s = loop.time() - started_s
                decoded = await self._client.send(_engine_call(call.decode, made.decode_body, call.limits, waited_s))
            taken_over = decoded.status in SUCCESSES
            if not taken_over:
                run.blame(LegName.DECODE)
                return decoded
            return PairAnswer(decoded, run, None)
        finally:
            if answered and not taken_over:
                self._tell(call)

    def _useless(self, call: PairCall, run: PairRun, made: NoHandOver) -> EngineLost:
        """An answer to a prefill that no decoder can use. An error, and said: never a second prefill in silence."""
        run.no_hand_over = True
        endpoint_id = call.prefill.call.endpoint_id
        _log.warning("%s cannot be paired for prefill: %s", endpoint_id, made.reason)
        return EngineLost(endpoint_id, f"The prefill engine handed nothing over: {made.reason}.")

    def _tell(self, call: PairCall) -> None:
        """Tell a vLLM prefill engine that nobody will fetch this request's blocks, for what it is worth there."""
        if call.handshake is not Handshake.NIXL:
            return
        task = asyncio.create_task(self._abort(call), name="abort of a prefill")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _abort(self, call: PairCall) -> None:
        # vLLM's own names for requests with our X-Request-Id (chat_completion/serving.py, completion/serving.py). The
        # list is never empty: an empty one aborts every request of the engine.
        prefix = "chatcmpl-" if call.operation is Operation.CHAT else "cmpl-"
        body = orjson.dumps({"request_ids": [prefix + call.request_id]})
        wire = call.prefill.call
        path, _, rest = wire.head.partition(b" HTTP/1.1\r\n")
        head = b"%s/abort_requests HTTP/1.1\r\n%s" % (path[: path.rindex(b"/v1/")], rest)
        told = wire._replace(
            head=_sized(head, len(body)), body=[body], connect_timeout_s=_TELL_S, first_byte_timeout_s=_TELL_S,
            on_send=None,
        )  # fmt: skip
        with contextlib.suppress(EngineError):
            answer = await self._client.send(told)
            await _read_all(answer, _TELL_S)
            answer.release()

    # -- both at once --------------------------------------------------------------------------------------------------

    async def _together(self, call: PairCall, run: PairRun) -> Answer:
        room = self._room()
        meeting = Meeting(call.prefill.bootstrap_host, call.prefill.bootstrap_port, room)
        body = meeting_body(call.body, meeting)
        first = asyncio.create_task(self._prefill_leg(call, body), name="prefill leg")
        head = self._client.send(_engine_call(call.decode, body, call.limits, 0.0))
        then = asyncio.create_task(head, name="decode leg")
        first.add_done_callback(lambda _: self._rooms.discard(room))
        first.add_done_callback(_looked_at)
        then.add_done_callback(_looked_at)
        answer: Answer | None = None
        try:
            answer = await self._both_begun(call, run, first, then)
            return answer
        finally:
            if not isinstance(answer, PairAnswer):
                first.cancel()
                if not then.done():
                    then.cancel()
                elif not then.cancelled() and then.exception() is None and then.result() is not answer:
                    then.result().abort()

    async def _both_begun(
        self, call: PairCall, run: PairRun, first: asyncio.Task[Usage], then: asyncio.Task[EngineAnswer]
    ) -> Answer:
        """Until the decode leg writes, which it does when the prefill leg has ended; or the answer of the one that
        refused. Raises EngineError of the one that was lost.

        A prefill leg that ends later than the decode leg begins is waited for a second more. After that its failure
        ends the decode leg in the middle.
        """
        started_s = asyncio.get_running_loop().time()
        waiting: set[asyncio.Future[Any]] = {first, then}
        while not then.done():
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and first in waiting:
                waiting.discard(first)
                if (refused := self._end_prefill(first, run)) is not None:
                    return refused
        with _blaming(run, LegName.DECODE, first):
            decoded = then.result()
        if decoded.status not in SUCCESSES:
            run.blame(LegName.DECODE)
            return decoded
        if first not in waiting:
            return PairAnswer(decoded, run, None)
        left_s = max(0.001, call.limits.first_byte_s - (asyncio.get_running_loop().time() - started_s))
        begun = asyncio.ensure_future(decoded.read(left_s))
        try:
            await asyncio.wait({first, begun}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                with _blaming(run, LegName.DECODE, first):
                    begun.result()
                await asyncio.wait({first}, timeout=_GRACE_S)
            if first.done() and (refused := self._end_prefill(first, run)) is not None:
                begun.cancel()
                return refused
            with _blaming(run, LegName.DECODE):
                return PairAnswer(decoded, run, None if first.done() else first, await begun)
        except BaseException:
            begun.cancel()
            raise

    def _room(self) -> int:
        """A room that no other request of this process is in: two in one room take both engines down (sglang#40125)."""
        while (room := self._bits(_ID_BITS)) in self._rooms:
            pass
        self._rooms.add(room)
        return room

    async def _prefill_leg(self, call: PairCall, body: Body) -> Usage:
        """The whole of a leg whose answer nobody reads but us. Raises EngineError, or `_Refused`."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        answer = await self._client.send(_engine_call(call.prefill, body, call.limits, 0.0))
        try:
            left_s = call.limits.first_byte_s - (loop.time() - started_s)
            data = await _read_all(answer, left_s)
        finally:
            answer.release()
        if answer.status not in SUCCESSES:
            raise _Refused(call.prefill.call.endpoint_id, HeldAnswer(answer.status, answer.headers, data))
        if not call.stream:
            return usage_of(data)
        meter = Meter(choices=call.choices, keep_usage_chunk=True, keep_continuous_usage=True, now_s=0.0)
        meter.feed(data)
        meter.flush()
        end = meter.end()
        if end is StreamEnd.ENGINE_ERROR:  # its status said nothing of it: said as the stream of the client would
            raise _Refused(call.prefill.call.endpoint_id, HeldAnswer(answer.status, answer.headers, data))
        if end is StreamEnd.TRUNCATED:
            raise EngineLost(call.prefill.call.endpoint_id, "The prefill engine's stream ended before it was complete.")
        return meter.engine_usage()

    def _end_prefill(self, first: asyncio.Task[Usage], run: PairRun) -> Answer | None:
        """Its answer where it refused; None: it has ended well. Raises EngineError where it was lost."""
        try:
            with _blaming(run, LegName.PREFILL):
                run.has_prefilled(first.result())
        except _Refused as refused:
            return refused.answer
        return None


class _Refused(EngineError):
    """The prefill engine of a pair that runs at once answered with an error."""

    def __init__(self, endpoint_id: str, answer: HeldAnswer) -> None:
        super().__init__(endpoint_id, f"The prefill engine answered {answer.status}.")
        self.answer = answer


@contextlib.contextmanager
def _blaming(run: PairRun, leg: LegName, waits_for: asyncio.Future[Usage] | None = None) -> Iterator[None]:
    """An engine's fault in here is this leg's; being late is not, while it waits for the prefill."""
    try:
        yield
    except EngineError as error:
        waited = isinstance(error, EngineTimeout) and error.deadline != "connect"
        run.blame(LegName.PREFILL if waited and waits_for is not None and not waits_for.done() else leg)
        raise


def _looked_at(task: asyncio.Task[Usage] | asyncio.Task[EngineAnswer]) -> None:
    """What a leg raised after nobody waited for it any more is no news."""
    if not task.cancelled():
        task.exception()


def _sized(head: bytes, length: int) -> bytes:
    return b"%scontent-length: %d\r\n\r\n" % (head, length)


def _engine_call(wire: LegWire, body: Body, limits: Deadlines, waited_s: float) -> EngineCall:
    """One leg with what is left of the deadlines. Raises EngineTimeout where nothing is."""
    left_s = limits.first_byte_s - waited_s
    if left_s <= 0:
        raise EngineTimeout(wire.call.endpoint_id, "first_byte", limits.first_byte_s)
    return wire.call._replace(
        head=_sized(wire.call.head, sum(map(len, body))), body=body,
        connect_timeout_s=min(limits.connect_s, left_s), first_byte_timeout_s=left_s,
    )  # fmt: skip


async def _read_all(answer: EngineAnswer, left_s: float) -> bytes:
    return await answer.read_all(_MAX_PREFILL_BYTES, max(0.001, left_s))


def _finished(call: PairCall, made: HandOver, answer: EngineAnswer) -> HeldAnswer:
    """A context answer that is the whole answer, in the form that the client asked for."""
    if not call.stream:
        return HeldAnswer(answer.status, answer.headers, made.answer)
    kind = (b"content-type", b"text/event-stream; charset=utf-8")
    headers = [kind, *(header for header in answer.headers if header[0] not in (b"content-type", b"content-length"))]
    return HeldAnswer(answer.status, headers, as_stream(made.answer))


# -- answers -----------------------------------------------------------------------------------------------------------


class HeldAnswer:
    """The `Answer` port over an answer that was read already. Mutable: what of it is still to be read."""

    def __init__(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def read(self, timeout_s: float) -> bytes:
        """All of it, then nothing."""
        body, self._body = self._body, b""
        return body

    async def relay(self, take: Callable[[bytes], bool], idle_s: float, left_s: float) -> bool:
        """Hand it on."""
        data = await self.read(idle_s)
        return not data or take(data)

    async def read_all(self, limit_bytes: int, timeout_s: float) -> bytes:
        """All of it. Raises EngineLost when it is longer than `limit_bytes`."""
        if len(self._body) > limit_bytes:
            raise EngineLost("", f"The engine's answer is longer than {limit_bytes} bytes.")
        return await self.read(timeout_s)

    def abort(self) -> None:
        """There is no connection any more."""

    def release(self) -> None:
        """There is no connection any more."""
        self._body = b""


class PairAnswer:
    """The `Answer` port over the decode leg, with the prefill leg's cached tokens in it. Mutable.

    `prefill` None: that leg has ended; else its failure ends this answer in the middle. `begun`: what was read already.
    """

    def __init__(
        self, decode: EngineAnswer, run: PairRun, prefill: asyncio.Task[Usage] | None, begun: bytes = b""
    ) -> None:
        self._decode = decode
        self._run = run
        self._prefill = prefill
        self._begun = begun
        self._lost: EngineError | None = None
        self._cached = CachedTokens((run.prefilled or UNKNOWN_USAGE).cached_input_tokens)
        if prefill is not None:
            prefill.add_done_callback(self._ended_late)

    @property
    def status(self) -> int:
        """The decode leg's."""
        return self._decode.status

    @property
    def headers(self) -> Sequence[Header]:
        """The decode leg's."""
        return self._decode.headers

    async def read(self, timeout_s: float) -> bytes:
        """The next whole lines, b"" at the end. Raises EngineError."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s  # one: half a line does not start it again
        while True:
            data, self._begun = self._begun, b""
            if not data:
                with self._judging():
                    data = await self._decode.read(max(0.001, until_s - loop.time()))
            shown = self._cached.feed(data) if data else self._cached.flush()
            if shown or not data:
                return shown

    async def relay(self, take: Callable[[bytes], bool], idle_s: float, left_s: float) -> bool:
        """Hand on whole lines as they come."""
        cached = self._cached

        def mine(data: bytes) -> bool:
            shown = cached.feed(data)
            return not shown or take(shown)

        begun, self._begun = self._begun, b""
        if begun and not mine(begun):
            return False
        with self._judging():
            if not await self._decode.relay(mine, idle_s, left_s):
                return False
        rest = cached.flush()
        return not rest or take(rest)

    async def read_all(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole answer."""
        begun, self._begun = self._begun, b""
        with self._judging():
            rest = await self._decode.read_all(max(0, limit_bytes - len(begun)), timeout_s)
        return self._cached.whole(begun + rest)

    def abort(self) -> None:
        """End both legs."""
        self._decode.abort()
        if self._prefill is not None:
            self._prefill.cancel()

    def release(self) -> None:
        """Done with both."""
        self._decode.release()
        if self._prefill is not None:
            self._prefill.cancel()

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """A connection that ends in here ends by the decode engine's fault, unless the prefill leg was lost."""
        try:
            yield
        except EngineError:
            if self._lost is not None:
                raise self._lost from None
            self._run.blame(LegName.DECODE)
            self.abort()
            raise

    def _ended_late(self, prefill: asyncio.Task[Usage]) -> None:
        if prefill.cancelled():
            return
        try:
            with _blaming(self._run, LegName.PREFILL):
                self._run.has_prefilled(prefill.result())
        except EngineError as error:
            self._lost = error
            self._decode.abort()
