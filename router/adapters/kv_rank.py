"""One data-parallel rank that is heard: from its sockets through its stream into the index, one small step at a time.

Owns: the order in which a rank's sockets are read (the connection's state, then the replay, then live messages), doing
what the stream says, and applying messages in portions of like size. Does not own: when a step is taken or how many
replays run at once (`kv_subscriber`), or what the stream says (`kv_stream`).

The connection's state comes first: what comes after a reconnect must not be believed before the stream knows of it.
The replay comes before live messages, which wait in the socket meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from router import kv_events
from router.adapters.kv_sockets import Link, Mark, Message, RankSockets
from router.adapters.kv_sources import KvSource
from router.kv_events import Batch, BlocksCleared, KvEvent
from router.kv_index import RankId, Served
from router.kv_stream import Action, Apply, AskReplay, Clear, RankStream, Reconnect, StreamLimits, StreamView

# Blocks that are applied at once, between two looks at the clock: one to three milliseconds. One call of the index
# costs as much as fifty blocks do, so messages of a replay are applied together up to this, and a longer one in parts.
_SLICE_BLOCKS = 512


class EventIndex(Protocol):
    """What events are applied to: `kv_index.KvIndex`."""

    def open(self, rank: RankId, served: Served) -> None:
        """This rank is heard from now on; another life of it is dropped."""

    def apply(self, rank: RankId, events: Sequence[KvEvent]) -> None:
        """What it stored and removed."""

    def clear(self, rank: RankId) -> None:
        """It holds nothing."""

    def drop(self, rank: RankId) -> None:
        """It is gone."""

    def decode_failed(self, rank: RankId, count: int = 1) -> None:
        """So many of its events could not be read."""


@dataclass(frozen=True, slots=True)
class RankReading:
    """How one rank is heard."""

    rank: RankId
    source: KvSource
    stream: StreamView
    waiting_blocks: int
    """Blocks of events that are decoded and not in the index yet."""
    sockets_count: int
    """Pairs of sockets made so far: 1 where none ever had to be made anew."""


class HeardRank:
    """One rank that is heard. Mutable: it lives with its engine."""

    __slots__ = (
        "_actions",
        "_events",
        "_index",
        "_live",
        "_published_s",
        "_slices",
        "_sockets",
        "_sockets_count",
        "_waiting_blocks",
        "made_s",
        "name",
        "queued",
        "rank",
        "reconnect_wanted",
        "requests",
        "source",
        "stream",
    )

    def __init__(self, rank: RankId, source: KvSource, index: EventIndex, limits: StreamLimits | None) -> None:
        self.rank = rank
        self.name = f"{rank.engine_id}, rank {rank.rank}"
        self.source = source
        self.stream = RankStream(can_replay=source.replay_endpoint is not None, limits=limits)
        self.requests: deque[AskReplay | Reconnect] = deque()
        """What the stream wants of the sockets, for the subscriber to grant."""
        self.queued = False
        self.made_s = float("-inf")
        """When its sockets were last made."""
        self.reconnect_wanted = False
        self._index = index
        self._sockets: RankSockets | None = None
        self._sockets_count = 0
        self._actions: deque[Action] = deque()
        self._live = False
        self._published_s: float | None = None
        # What was decoded and is not applied yet, and what is being applied of it.
        self._events: list[KvEvent] = []
        self._waiting_blocks = 0
        self._slices: Iterator[list[KvEvent]] | None = None

    @property
    def connected(self) -> bool:
        """Are there sockets?"""
        return self._sockets is not None

    def connect(self, context: zmq.Context[zmq.Socket[bytes]], wake: Callable[[], None], now_s: float) -> None:
        """Make the sockets, anew where there are some. Raises SocketsFault."""
        first = self._sockets_count == 0
        self.close()
        self.made_s = now_s
        self.reconnect_wanted = False
        if not first:
            self._actions.extend(self.stream.cut(now_s))
        self._sockets = RankSockets(context, self.source, wake)
        self._sockets_count += 1
        if first:
            self._actions.extend(self.stream.begin(now_s))

    def close(self) -> None:
        """Close the sockets. Twice does nothing."""
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    def retire(self) -> None:
        """It is heard no more: close, and do nothing that was still to be done."""
        self.close()
        self._actions.clear()
        self.requests.clear()
        self._forget_events()

    def ask(self, request: AskReplay) -> None:
        """Send a question. Raises SocketsFault."""
        if self._sockets is not None:
            self._sockets.ask(request.ask_id, request.start)

    def give_up(self) -> None:
        """No question is open any more."""
        if self._sockets is not None:
            self._sockets.give_up()

    @property
    def asking(self) -> bool:
        """Is a question that was sent still to be answered?"""
        sent = None if self._sockets is None else self._sockets.ask_id
        return sent is not None and sent == self.stream.open_ask_id

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        self._actions.extend(self.stream.tick(now_s))

    def step(self, now_s: float) -> bool:
        """Do one small thing; False: there is nothing to do until the sockets have something."""
        if self._slices is not None:
            self._apply_slice()
        elif self._waiting_blocks >= _SLICE_BLOCKS:
            self._begin_slices()
        elif self._actions:
            self._do(self._actions.popleft())
        elif self._sockets is None or not self._read(self._sockets, now_s):
            if not self._events:
                return False
            self._begin_slices()
        return True

    def failed(self) -> None:
        """The last step failed by a fault of ours: what it was to change is unknown."""
        self._forget_events()
        self._index.clear(self.rank)
        self._unreadable(1)

    def reading(self) -> RankReading:
        """How it goes."""
        return RankReading(self.rank, self.source, self.stream.view(), self._waiting_blocks, self._sockets_count)

    def _read(self, sockets: RankSockets, now_s: float) -> bool:
        link = sockets.link()
        if link is not None:
            self._actions.extend(self.stream.joined(now_s) if link is Link.JOINED else self.stream.cut(now_s))
            return True
        ask_id = sockets.ask_id
        message = sockets.replayed()
        self._live = message is None
        if message is None:
            message = sockets.live()
        if message is None:
            return False
        if isinstance(message, Message):
            heard = (
                self.stream.live(message.sequence, message.payload, now_s)
                if ask_id is None or self._live
                else self.stream.replayed(ask_id, message.sequence, message.payload, now_s)
            )
            self._actions.extend(heard)
        elif message is Mark.END and not self._live and ask_id is not None:
            self._actions.extend(self.stream.replay_ended(ask_id, now_s))
        else:
            self.stream.garbled()
        return True

    def _do(self, action: Action) -> None:
        if isinstance(action, Apply):
            self._decode(action.payload)
        elif isinstance(action, Clear):
            self._forget_events()
            self._index.clear(self.rank)
        else:
            self.requests.append(action)

    def _decode(self, payload: bytes) -> None:
        batch = kv_events.decode(payload)
        if not isinstance(batch, Batch) or batch.faults:
            # What an event that cannot be read removed is unknown.
            self._unreadable(len(batch.faults) if isinstance(batch, Batch) else 1)
            return
        if self._live and batch.published_at_s is not None:
            self._published_s = batch.published_at_s
        self._events += batch.events
        self._waiting_blocks += _blocks_count(batch.events)

    def _applied(self) -> None:
        """All that was decoded is in the index."""
        lag_s = None if self._published_s is None else time.time() - self._published_s
        self._published_s = None
        self.stream.decoded(readable=True, lag_s=lag_s)

    def _unreadable(self, count: int) -> None:
        if self._events:
            self._applied()  # they are before it, so there is something to clear
        self._index.decode_failed(self.rank, count)
        self._actions.extendleft(reversed(self.stream.decoded(readable=False)))

    def _begin_slices(self) -> None:
        self._slices = kv_events.split(self._events, _SLICE_BLOCKS)
        self._events = []

    def _apply_slice(self) -> None:
        assert self._slices is not None
        events = next(self._slices, None)
        if events is None:
            self._slices = None
            self._applied()
            return
        self._waiting_blocks -= _blocks_count(events)
        self._index.apply(self.rank, events)

    def _forget_events(self) -> None:
        self._slices = None
        self._events, self._waiting_blocks = [], 0


def _blocks_count(events: Sequence[KvEvent]) -> int:
    """Blocks that events name; clearing counts as one."""
    return sum(1 if isinstance(event, BlocksCleared) else len(event.hashes) for event in events)
