"""Hears the KV events of every engine over ZMQ and keeps the exact index equal to what the engines hold.

Owns: which endpoints are heard, when their event sources are asked for again, the pace at which messages are taken so
that the event loop is never held, and how all that went. Does not own: what a message means (`kv_events`,
`kv_index`), what to do about a gap or a restart (`kv_stream`), the sockets of one rank (`kv_sockets`), or the addresses
(`kv_sources`).

All runs on the gateway's event loop, without a thread of its own (libzmq has one for the network). Ranks with
something to do queue up; each turn of the loop gives them about a millisecond together, in rounds, one message each,
and a message of many blocks is applied in portions. A router that restarts replays every engine's buffer: only a
few of those long replays run at once, so that memory stays small while 64 engines are caught up with.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import zmq

from router.adapters.kv_rank import EventIndex, HeardRank, RankReading
from router.adapters.kv_sockets import SocketsFault
from router.adapters.kv_sources import KvSource, configured_sources, sources_of_engine
from router.endpoints import Endpoint
from router.kv_index import RankId, Served
from router.kv_stream import AskReplay, Reconnect, StreamLimits, StreamTrouble

AskEngine = Callable[[Endpoint, str], Awaitable[tuple[int, bytes] | str]]
"""GET a path of an engine within a deadline: status and body, or one sentence on why there is none (`EngineProbe`)."""

Report = Callable[[str], None]
"""Takes one sentence for the log."""

# No further step is begun in one turn of the loop after this; a step is a message read, or a portion of blocks applied
# (one to three milliseconds). A time to first token is ten times as long at the least.
_TURN_S = 0.001
# Time in the streams moves this often; the shortest wait of theirs is 250 ms.
_TICK_S = 0.25

# Long replays at once: each may have some thousands of messages in memory.
_HISTORIES_MAX_COUNT = 4

# First and longest wait between two questions for sources: an engine loads weights for minutes, and one that has none
# may be replaced by one that has.
_ASK_FIRST_S = 0.5
_ASK_MAX_S = 15.0
# Sources that are known are asked for again this often: ranks come and go while an engine runs (elastic expert
# parallelism), and an engine that was replaced may publish elsewhere.
_ASK_AGAIN_S = 30.0
# No more than one new pair of sockets in so many seconds for a rank that cannot be heard.
_RECONNECT_S = 1.0

# Sockets of one process: a SUB, a DEALER and two ends of a monitor for each rank; libzmq's own limit is 1,023.
_SOCKETS_MAX_COUNT = 16_384

# Engines that say where they publish.
_ASKED_KINDS = frozenset({"vllm", "sim"})


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One endpoint that should be heard. `fault`: one sentence on why it is not; None: it is."""

    endpoint_id: str
    ranks: tuple[RankReading, ...]
    fault: str | None


class _Engine:
    """One endpoint that should be heard. Mutable: its ranks come and go."""

    def __init__(self, endpoint: Endpoint, served: Served) -> None:
        self.endpoint = endpoint
        self.served = served
        self.ranks: dict[int, HeardRank] = {}
        self.fault: str | None = None
        self.told = ""
        self.again = asyncio.Event()
        """Set: where it publishes must be asked for now."""
        self.task: asyncio.Task[None] | None = None


class KvSubscriber:
    """Keeps `index` true for the endpoints that `hear` names. Use it inside one running event loop.

    `served` says what an endpoint serves, or None as long as that is not known (its models are being asked for).
    """

    def __init__(
        self,
        index: EventIndex,
        served: Callable[[Endpoint], Served | None],
        ask: AskEngine,
        *,
        limits: StreamLimits | None = None,
        report: Report = lambda sentence: None,
    ) -> None:
        self._index = index
        self._served = served
        self._ask = ask
        self._limits = limits
        self._report = report
        self._engines: dict[str, _Engine] = {}
        self._ready: deque[HeardRank] = deque()
        self._turning = False
        self._histories: set[HeardRank] = set()
        self._postponed: dict[HeardRank, AskReplay] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From here on `hear` may be called."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX_COUNT)
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def hear(self, endpoints: Iterable[Endpoint]) -> None:
        """Hear these and no others. What an endpoint that is gone, or is another one now, held is dropped."""
        wanted: dict[str, tuple[Endpoint, Served]] = {}
        for endpoint in endpoints:
            served = self._served(endpoint)
            if served is not None and (endpoint.kv_events or endpoint.kind in _ASKED_KINDS):
                wanted[endpoint.endpoint_id] = endpoint, served
        for endpoint_id, engine in list(self._engines.items()):
            new = wanted.get(endpoint_id)
            if new is None or _identity(*new) != _identity(engine.endpoint, engine.served):
                self._leave(engine)
        for endpoint_id, (endpoint, served) in wanted.items():
            if endpoint_id in self._engines:
                self._engines[endpoint_id].endpoint = endpoint
            else:
                engine = self._engines[endpoint_id] = _Engine(endpoint, served)
                engine.task = asyncio.create_task(self._follow(engine), name=f"KV event sources of {endpoint_id}")

    async def stop(self) -> None:
        """Close every socket. The index stays as it is. May be called twice."""
        if self._context is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        tasks = [engine.task for engine in self._engines.values() if engine.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in self._engines.values():
            for heard in engine.ranks.values():
                heard.retire()
        self._engines.clear()
        self._ready.clear()
        self._histories.clear()
        self._postponed.clear()
        context, self._context = self._context, None
        context.destroy(linger=0)

    def trouble(self, rank: RankId) -> StreamTrouble | None:
        """Why the index is not to be believed about this rank now; None: it is. A rank that is not heard is
        unreachable.
        """
        engine = self._engines.get(rank.engine_id)
        heard = None if engine is None else engine.ranks.get(rank.rank)
        if heard is None or heard.rank != rank:
            return StreamTrouble.UNREACHABLE
        return heard.stream.trouble()

    def reading(self) -> tuple[EngineReading, ...]:
        """How it goes, for metrics and `explain`."""
        return tuple(
            EngineReading(name, tuple(rank.reading() for rank in engine.ranks.values()), engine.fault)
            for name, engine in sorted(self._engines.items())
        )

    # --- who is heard ------------------------------------------------------------------------------------------------

    async def _follow(self, engine: _Engine) -> None:
        """Know where one engine publishes, as long as it is to be heard."""
        wait_s = _ASK_FIRST_S
        while True:
            try:
                found = await self._sources(engine.endpoint)
            except Exception as error:
                # Whatever goes wrong with one question, the next one is asked.
                found = f"{engine.endpoint.endpoint_id} could not be asked: {type(error).__name__}"
            if isinstance(found, str):
                self._complain(engine, found)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _ASK_MAX_S)
                continue
            wait_s = _ASK_FIRST_S
            engine.fault = None
            if not found:
                self._complain(engine, f"{engine.endpoint.endpoint_id} publishes no KV events")
            self._adopt(engine, found)
            if engine.fault is None:
                engine.told = ""
            engine.again.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_AGAIN_S):
                    await engine.again.wait()
            await asyncio.sleep(_ASK_FIRST_S)  # at most two questions a second, whatever goes wrong

    async def _sources(self, endpoint: Endpoint) -> tuple[KvSource, ...] | str:
        if endpoint.kv_events:
            found = configured_sources(endpoint.kv_events, endpoint.url)
            return f"{endpoint.endpoint_id}: {found}" if isinstance(found, str) else found
        answer = await self._ask(endpoint, "/kv_event_sources")
        if isinstance(answer, str):
            return answer
        status, body = answer
        if status != 200:
            return f"{endpoint.endpoint_id} answered {status} to GET /kv_event_sources"
        found = sources_of_engine(body, endpoint.url)
        return f"{endpoint.endpoint_id}: {found}" if isinstance(found, str) else found

    def _adopt(self, engine: _Engine, sources: Sequence[KvSource]) -> None:
        """Hear exactly these ranks of the engine. An address that changed is another life's."""
        wanted = {source.rank_index: source for source in sources}
        for number, heard in list(engine.ranks.items()):
            if wanted.get(number) != heard.source:
                self._drop(engine, number)
        for number, source in wanted.items():
            if number in engine.ranks:
                continue
            rank = RankId(engine.endpoint.endpoint_id, engine.endpoint.incarnation, number)
            self._index.open(rank, engine.served)
            heard = engine.ranks[number] = HeardRank(rank, source, self._index, self._limits)
            self._connect(engine, heard)

    def _drop(self, engine: _Engine, number: int) -> None:
        heard = engine.ranks.pop(number)
        heard.retire()
        self._histories.discard(heard)
        self._postponed.pop(heard, None)
        self._index.drop(heard.rank)

    def _leave(self, engine: _Engine) -> None:
        if engine.task is not None:
            engine.task.cancel()
        for number in list(engine.ranks):
            self._drop(engine, number)
        del self._engines[engine.endpoint.endpoint_id]

    def _connect(self, engine: _Engine, heard: HeardRank) -> None:
        assert self._context is not None
        try:
            heard.connect(self._context, lambda: self._wake(heard), _now_s())
        except SocketsFault as fault:
            self._complain(engine, f"{heard.name}: {fault}")
        else:
            engine.fault = None

    def _complain(self, engine: _Engine, sentence: str) -> None:
        """Say a fault once, until it is another one or healed."""
        engine.fault = sentence.rstrip(".")
        if engine.told != engine.fault:
            engine.told = engine.fault
            self._report(f"{engine.fault}. What it holds is guessed from our own requests until its events are heard.")

    # --- the turns ---------------------------------------------------------------------------------------------------

    def _wake(self, heard: HeardRank) -> None:
        if not heard.queued:
            heard.queued = True
            self._ready.append(heard)
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Give each rank that is ready one step after the other, for a millisecond in all."""
        self._turning = False
        until_s = _now_s() + _TURN_S
        ready = self._ready
        while ready and (now_s := _now_s()) < until_s:
            heard = ready.popleft()
            heard.queued = False
            if self._step(heard, now_s):
                heard.queued = True
                ready.append(heard)
            if heard.requests:
                self._serve(heard, now_s)
            if self._postponed and heard in self._histories and not heard.asking:
                self._grant(now_s)
        if ready and not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _step(self, heard: HeardRank, now_s: float) -> bool:
        try:
            return heard.step(now_s)
        except Exception as error:
            # A fault of ours with one rank's events must not deafen us to the others.
            heard.failed()
            told = f"{heard.name}: its events could not be applied: {type(error).__name__}: {error}"
            self._complain(self._engines[heard.rank.engine_id], told)
            return True

    def _serve(self, heard: HeardRank, now_s: float) -> None:
        """What a stream asks of its sockets."""
        while heard.requests:
            request = heard.requests.popleft()
            if isinstance(request, Reconnect):
                heard.reconnect_wanted = True
                self._engines[heard.rank.engine_id].again.set()
                continue
            self._histories.discard(heard)
            self._postponed.pop(heard, None)
            if request.history and len(self._histories) >= _HISTORIES_MAX_COUNT:
                heard.give_up()
                self._postponed[heard] = request
                continue
            self._send(heard, request)

    def _send(self, heard: HeardRank, request: AskReplay) -> None:
        if request.history:
            self._histories.add(heard)
        try:
            heard.ask(request)
        except SocketsFault as fault:
            self._complain(self._engines[heard.rank.engine_id], f"{heard.name}: {fault}")

    def _grant(self, now_s: float) -> None:
        """Send the long questions that had to wait, as far as others have ended."""
        for heard in [each for each in self._histories if not each.asking]:
            self._histories.discard(heard)
        for heard, request in list(self._postponed.items()):
            if heard.stream.open_ask_id != request.ask_id:
                del self._postponed[heard]
                continue
            heard.stream.postponed(now_s)
            if len(self._histories) < _HISTORIES_MAX_COUNT:
                del self._postponed[heard]
                self._send(heard, request)

    def _tick(self) -> None:
        """Time passes in every stream; questions that had to wait are sent; dead sockets are made anew."""
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)  # first: no fault may stop time
        now_s = _now_s()
        self._grant(now_s)
        for engine in self._engines.values():
            for heard in engine.ranks.values():
                if (heard.reconnect_wanted or not heard.connected) and now_s - heard.made_s >= _RECONNECT_S:
                    self._connect(engine, heard)
                heard.tick(now_s)
                self._wake(heard)


def _now_s() -> float:
    return time.monotonic()


def _identity(endpoint: Endpoint, served: Served) -> tuple[object, ...]:
    return endpoint.incarnation, endpoint.url, endpoint.kind, endpoint.kv_events, served
