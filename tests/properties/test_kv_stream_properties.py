"""Whatever a network does to an engine's event stream, what is applied ends up as what the engine holds.

A publisher with a bounded replay buffer is driven through lost, doubled and late messages, broken connections,
restarts, replays with holes and questions without an answer. Then the network is quiet and works, time passes, and:

- what was applied since the last clear is an unbroken run of messages of the engine's present life, up to its last;
- the index that it was applied to holds as many copies of each block as the messages since then leave;
- it reaches back as far as the buffer does or further, so that an engine whose buffer holds its first message is
  known exactly: block by block what the publisher itself holds;
- the stream says that it is to be trusted, and memory is within its bounds all the while.

Each is shown to fail on planted faults.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgpack
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from router import kv_events
from router.kv_index import KvIndex, RankId, Served
from router.kv_stream import Action, Apply, AskReplay, Clear, RankStream, StreamLimits
from tests.exploring import examples

Fate = Literal["arrives", "lost", "doubled", "late"]
# Enough that replays overlap with live messages, few enough that every bound is met.
_RANK = RankId("e", "1", 0)
_LIMITS = StreamLimits(held_count=6, held_bytes=400)


@dataclass(frozen=True)
class Publish:
    """The engine publishes one message; what becomes of it on the live connection."""

    fate: Fate
    stored: int
    removes: bool


@dataclass(frozen=True)
class Restart:
    """kill -9 and a new process: empty cache, number 0. The connection breaks with it."""


@dataclass(frozen=True)
class Break:
    """The connection breaks and is made anew; messages in between are lost."""

    lost_count: int


@dataclass(frozen=True)
class Deliver:
    """The open replay brings so many messages, of which the ones at `holes` are lost on the way."""

    count: int
    holes: frozenset[int]


@dataclass(frozen=True)
class Wait:
    """Seconds pass; the replay socket answers nothing that is asked in them when it is `deaf`."""

    seconds: float
    deaf: bool


Step = Publish | Restart | Break | Deliver | Wait


class Publisher:
    """What vLLM's publisher does: number, buffer, replay. `held` is its own truth."""

    def __init__(self, buffer_count: int, life: int = 0) -> None:
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_count)
        self.messages: list[bytes] = []
        self.held: Counter[int] = Counter()
        self.life = life

    def publish(self, stored: int, *, removes: bool) -> tuple[int, bytes]:
        block = 1_000 * self.life + stored + 1
        removed = [min(self.held)] if removes and self.held else []
        self.held[block] += 1
        self.held.subtract(removed)
        self.held = +self.held
        number = len(self.messages)
        events: list[dict[str, object]] = [
            {
                "type": "BlockStored",
                "block_hashes": [block],
                "parent_block_hash": None,
                "token_ids": [block] * 4,
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
            }
        ]
        if removed:
            events.append({"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU"})
        payload: bytes = msgpack.packb([1e6 * self.life + number, events, 0])
        self.messages.append(payload)
        self.buffer.append((number, payload))
        return number, payload


class World:
    """One publisher, one reader, and the network between them."""

    def __init__(self, stream: RankStream, buffer_count: int) -> None:
        self.stream = stream
        self.buffer_count = buffer_count
        self.publisher = Publisher(buffer_count)
        self.now_s = 0.0
        self.applied: list[bytes] = []
        self.index = KvIndex(b"secret", 2**20)
        self.index.open(_RANK, Served("m"))
        self.late: list[tuple[int, bytes]] = []
        self.ask: AskReplay | None = None
        self.answer: deque[tuple[int, bytes]] = deque()
        self.deaf = False
        self.begun = 0
        self.stream.joined(self.now_s)
        self.do(self.stream.begin(self.now_s))

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Clear):
                self.applied.clear()
                self.index.clear(_RANK)
            elif isinstance(action, Apply):
                self.applied.append(action.payload)
                batch = kv_events.decode(action.payload)
                assert isinstance(batch, kv_events.Batch)
                self.index.apply(_RANK, batch.events)
                self.stream.decoded(readable=True)
            elif isinstance(action, AskReplay):
                self.ask = None if self.deaf else action
                self.answer = deque(each for each in self.publisher.buffer if each[0] >= action.start)
        view = self.stream.view()
        assert view.held_count <= _LIMITS.held_count
        assert view.held_bytes <= _LIMITS.held_bytes

    def live(self, number: int, payload: bytes) -> None:
        self.do(self.stream.live(number, payload, self.now_s))

    def publish(self, step: Publish) -> None:
        number, payload = self.publisher.publish(step.stored, removes=step.removes)
        if step.fate == "late":
            self.late.append((number, payload))
            return
        for _ in range({"arrives": 1, "doubled": 2}.get(step.fate, 0)):
            self.live(number, payload)
        late, self.late = self.late, []
        for each in late:
            self.live(*each)

    def reconnect(self, publisher: Publisher, lost_count: int) -> None:
        self.late.clear()
        self.ask = None
        self.do(self.stream.cut(self.now_s))
        self.publisher = publisher
        for number in range(lost_count):
            publisher.publish(number % 7, removes=number % 3 == 0)
        self.do(self.stream.joined(self.now_s))

    def deliver(self, count: int, holes: frozenset[int] = frozenset()) -> None:
        for position in range(count):
            ask = self.ask
            if ask is None:
                return
            if not self.answer:
                self.ask = None
                self.do(self.stream.replay_ended(ask.ask_id, self.now_s))
                return
            message = self.answer.popleft()
            # A socket drops what its queue cannot take; the queue is empty for the first message of an answer.
            if position not in holes or self.begun != ask.ask_id:
                self.begun = ask.ask_id
                self.do(self.stream.replayed(ask.ask_id, *message, self.now_s))

    def wait(self, seconds: float, *, deaf: bool = False) -> None:
        self.deaf = deaf
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.25
            self.do(self.stream.tick(self.now_s))
        self.deaf = False

    def step(self, step: Step) -> None:
        if isinstance(step, Publish):
            self.publish(step)
        elif isinstance(step, Restart):
            self.reconnect(Publisher(self.buffer_count, self.publisher.life + 1), lost_count=0)
        elif isinstance(step, Break):
            self.reconnect(self.publisher, step.lost_count)
        elif isinstance(step, Deliver):
            self.deliver(step.count, step.holes)
        else:
            self.wait(step.seconds, deaf=step.deaf)

    def settle(self) -> None:
        """The network is quiet and works for a minute: the promise is that the index is right again after it."""
        for _ in range(240):
            self.wait(0.25)
            self.deliver(10_000)


def _copies(payloads: list[bytes]) -> Counter[int]:
    """What these messages leave; a removal of what was stored before them takes nothing."""
    held: Counter[int] = Counter()
    for payload in payloads:
        for event in msgpack.unpackb(payload)[1]:
            if event["type"] == "BlockStored":
                held.update(event["block_hashes"])
            else:
                held.subtract(event["block_hashes"])
                held = +held
    return held


def _check(world: World) -> None:
    publisher = world.publisher
    messages, oldest = publisher.messages, len(publisher.messages) - len(publisher.buffer)
    applied = world.applied
    assert applied == messages[len(messages) - len(applied) :], "not the tail of the present life"
    assert len(applied) >= len(publisher.buffer), "the buffer reaches further back than what is known"
    held = _copies(applied)
    counters = world.index.counters(_RANK)
    assert (counters.live_blocks, counters.live_copies_count) == (len(held), held.total())
    if oldest == 0:
        assert held == publisher.held
        assert world.stream.view().complete
    view = world.stream.view()
    assert view.trouble is None
    assert view.next_sequence == len(messages)
    assert (view.held_count, view.held_bytes) == (0, 0)


_PUBLISH = st.builds(
    Publish, st.sampled_from(["arrives", "arrives", "lost", "doubled", "late"]), st.integers(0, 6), st.booleans()
)
_STEPS = st.lists(
    st.one_of(
        _PUBLISH,
        _PUBLISH,
        _PUBLISH,
        st.builds(Restart),
        st.builds(Break, st.integers(0, 12)),
        st.builds(Deliver, st.integers(1, 9), st.frozensets(st.integers(0, 8), max_size=3)),
        st.builds(Wait, st.sampled_from([0.25, 2.0, 8.0]), st.booleans()),
    ),
    max_size=30,
)


def _play(stream: RankStream, steps: list[Step], buffer_count: int, before: int) -> None:
    world = World(stream, buffer_count)
    for number in range(before):  # what was published before the reader joined
        world.publisher.publish(number % 7, removes=number % 4 == 0)
    for step in steps:
        world.step(step)
    world.settle()
    _check(world)


_GIVEN = given(steps=_STEPS, buffer_count=st.sampled_from([3, 8, 1_000]), before=st.sampled_from([0, 2, 9]))


@settings(max_examples=examples(400))
@_GIVEN
def test_after_quiet_what_was_applied_is_what_the_engine_holds(
    steps: list[Step], buffer_count: int, before: int
) -> None:
    _play(RankStream(can_replay=True, limits=_LIMITS), steps, buffer_count, before)


_BLIND_STEPS = st.lists(
    st.one_of(_PUBLISH, _PUBLISH, st.builds(Restart), st.builds(Break, st.integers(0, 12))), max_size=30
)


def _play_blind(stream: RankStream, steps: list[Step]) -> None:
    world = World(stream, 3)
    for step in steps:
        world.step(step)
    world.live(*world.publisher.publish(1, removes=False))
    messages, applied = world.publisher.messages, world.applied
    assert applied, "the last message was heard"
    assert applied == messages[len(messages) - len(applied) :]
    assert world.stream.trouble() is None


@settings(max_examples=examples(300))
@given(steps=_BLIND_STEPS)
def test_without_a_replay_socket_what_is_known_is_never_more_than_the_truth(steps: list[Step]) -> None:
    _play_blind(RankStream(can_replay=False, limits=_LIMITS), steps)


# --- planted faults --------------------------------------------------------------------------------------------------


@dataclass
class _Fault:
    """A stream with one rule taken out; `blind`: found without a replay socket too, by the second property."""

    stream: type[RankStream]
    blind: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.stream.__name__


class _AnyMessageIsTheSame(RankStream):
    __slots__ = ()

    def _known(self, sequence: int, payload: bytes) -> bool | None:
        return True if super()._known(sequence, payload) is not None else None


class _AsksFromTheNext(RankStream):
    __slots__ = ()

    def _open(self, now_s: float, *, idle: bool = False) -> AskReplay:
        ask = super()._open(now_s, idle=idle)
        assert self._ask is not None
        if ask.history:
            return ask
        self._ask.start = ask.start + 1
        return ask._replace(start=ask.start + 1)


class _DuplicatesAreApplied(RankStream):
    __slots__ = ()

    def _behind(self, sequence: int, payload: bytes, now_s: float) -> list[Action]:
        return [Apply(sequence, payload)]


class _GapsAreSkipped(RankStream):
    __slots__ = ()

    def live(self, sequence: int, payload: bytes, now_s: float) -> list[Action]:
        if self._next is not None and sequence > self._next and not self._doubt:
            self._next = sequence
        return super().live(sequence, payload, now_s)


class _RestartsClearNothing(RankStream):
    __slots__ = ()

    def _restart(self, now_s: float) -> list[Action]:
        return [action for action in super()._restart(now_s) if not isinstance(action, Clear)]


class _LostMessagesClearNothing(RankStream):
    __slots__ = ()

    def _begin_anew(self, sequence: int) -> list[Action]:
        super()._begin_anew(sequence)
        return []


class _ReconnectsAreBelieved(RankStream):
    __slots__ = ()

    def cut(self, now_s: float) -> list[Action]:
        return []

    def joined(self, now_s: float) -> list[Action]:
        return []


class _IdleIsNeverAsked(RankStream):
    __slots__ = ()

    def tick(self, now_s: float) -> list[Action]:
        self._heard_s = now_s
        return super().tick(now_s)


class _HeldIsUnbounded(RankStream):
    __slots__ = ()

    def _hold(self, sequence: int, payload: bytes, now_s: float) -> list[Action] | None:
        self._held[sequence] = payload
        self._held_bytes += len(payload)
        return None


class _GapsClearNothing(RankStream):
    __slots__ = ()

    def _give_up_gap(self) -> list[Action]:
        return [action for action in super()._give_up_gap() if not isinstance(action, Clear)]


_FAULTS = [
    _Fault(_AnyMessageIsTheSame),
    _Fault(_AsksFromTheNext),
    _Fault(_DuplicatesAreApplied, blind=True),
    _Fault(_GapsAreSkipped, blind=True),
    _Fault(_RestartsClearNothing),
    _Fault(_LostMessagesClearNothing),
    _Fault(_ReconnectsAreBelieved, blind=True),
    _Fault(_IdleIsNeverAsked),
    _Fault(_HeldIsUnbounded),
    _Fault(_GapsClearNothing, blind=True),
]
_FIND = settings(max_examples=2_000, derandomize=True, database=None, deadline=None, phases=[Phase.generate])


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: _Fault) -> None:
    @_FIND
    @_GIVEN
    def play(steps: list[Step], buffer_count: int, before: int) -> None:
        _play(fault.stream(can_replay=True, limits=_LIMITS), steps, buffer_count, before)

    with pytest.raises((AssertionError, ExceptionGroup)):
        play()


@pytest.mark.parametrize("fault", [each for each in _FAULTS if each.blind], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_without_a_replay_socket(fault: _Fault) -> None:
    @_FIND
    @given(steps=_BLIND_STEPS)
    def play(steps: list[Step]) -> None:
        _play_blind(fault.stream(can_replay=False, limits=_LIMITS), steps)

    with pytest.raises((AssertionError, ExceptionGroup)):
        play()
