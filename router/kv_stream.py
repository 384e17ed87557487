"""One rank's stream of KV events: what to do with each message so that the index is what the engine holds.

Owns: the sequence of one publisher as one reader hears it. Which message is next, which is a duplicate, where some are
missing, when the engine has begun a new life (its numbers fell back), when to ask for a replay and from which number,
when what is known must be cleared because nothing can fill a gap, and whether the stream is to be trusted. Does not
own: sockets and their retries (`adapters.kv_subscriber`), the bytes of a payload (`kv_events`), or the index
(`kv_index`). It is pure: time is an argument, and what is to be done comes back as a list of actions.

The publisher is that of vLLM (`vllm/distributed/kv_events.py`, 0.32): live messages are numbered from 0, and the last
`buffer_steps` of them can be asked for again from a number on. Four facts about it shape this file:

- It says nowhere which life of the engine speaks. A replay is therefore asked from the last message that was applied,
  not the one after it: if that message comes back with the same digest, it is the same life; if another one comes in
  its place, or none, the engine was restarted. The same question, asked when nothing was heard for a while, finds lost
  messages and restarts of an engine that is idle.
- Its replay socket drops messages of a long replay where the reader is slower (a ROUTER at its high-water mark), so a
  replay may have holes; it is asked for again from the hole as long as that brings it further.
- A reader that joins late may find a buffer that no longer begins at 0. What it then builds is a part of the truth and
  never more than it: a store in the buffer that was not removed since is a block that is held.
- After a reconnect nothing that comes live is believed before such a question has been answered: the next number could
  by chance be the one that was expected, from another life.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from enum import StrEnum
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

# The last messages whose digests are kept: 64 KiB a rank. vLLM keeps 10,000 for replay; a duplicate older than these
# is known by its time.
_DIGEST_COUNT = 8192

# An empty answer to a question about a known message means a new life, unless the publisher was too busy to answer
# (the simulated engine ends a 17th replay at once): it is asked twice, this far apart.
_EMPTY_TO_RESTART_COUNT = 2
_EMPTY_RETRY_S = 0.25

# Replays in a row that bring no further message before the gap is taken as one that nothing fills.
_STUCK_TO_GIVE_UP_COUNT = 3

# Questions in a row without an answer before the replay socket is taken as gone: what came live is then used without.
_UNANSWERED_TO_GO_ON_COUNT = 2

# Idle questions in a row that bring news which should have come live before the live socket is taken as dead.
_NEWS_TO_RECONNECT_COUNT = 2

# Wait after the first unanswered question; doubles up to the limit.
_BACKOFF_FIRST_S = 0.5
_BACKOFF_MAX_S = 15.0

# msgpack: an array of two or three elements whose first is a 64-bit float, as vLLM and SGLang begin every payload.
_ARRAY_HEADS = frozenset({0x92, 0x93})
_FLOAT_HEAD = 0xCB
_BIG_DOUBLE = Struct(">d")


class ClearReason(StrEnum):
    """Why all that is known of a rank's cache must go. The values are metric labels."""

    RESTART = "restart"
    """The engine lives a new life with an empty cache."""
    GAP = "gap"
    """Messages are lost, and no replay brings them back."""
    UNDECODABLE = "undecodable"
    """A message could not be read: what it removed is unknown."""
    REBUILD = "rebuild"
    """A replay that begins earlier than what was known has come at last; everything is applied anew."""
    CUT = "cut"
    """The connection broke, and without a replay socket nobody can say what was missed."""


class StreamTrouble(StrEnum):
    """Why a rank's stream is not to be trusted now. The values are metric labels."""

    CATCHING_UP = "catching_up"
    """Its first replay has not ended yet."""
    GAP = "gap"
    """Messages are missing and asked for, or a reconnect is not verified yet."""
    UNREACHABLE = "unreachable"
    """Questions to its replay socket stay without an answer, or its connection is broken."""
    UNDECODABLE = "undecodable"
    """Every recent message was one that could not be read."""


class Apply(NamedTuple):
    """Decode this payload and apply it to the index; then tell `RankStream.decoded`."""

    sequence: int
    payload: bytes


class AskReplay(NamedTuple):
    """Ask the replay socket from `start` on. It replaces the question before it: what that one still brings is void."""

    ask_id: int
    start: int
    history: bool
    """A replay of everything: long. Otherwise a few messages are expected."""


class Clear(NamedTuple):
    """Forget what this rank holds."""

    reason: ClearReason


class Reconnect(NamedTuple):
    """The sockets are of no use: find out where the engine publishes now and connect anew."""


Action = Apply | AskReplay | Clear | Reconnect


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How patient one stream is and how much it may hold."""

    held_count: int = 10_000
    """Live messages kept while a replay runs; further ones are dropped and asked for again."""
    held_bytes: int = 32 * 2**20
    """The same in bytes."""
    answer_s: float = 3.0
    """A replay that brings nothing for so long has failed."""
    idle_s: float = 5.0
    """After so long without a message the last one is asked for again."""
    undecodable_to_distrust_count: int = 5
    """Messages in a row that cannot be read before the stream is distrusted."""


@dataclass(slots=True)
class StreamCounts:
    """What one stream has met so far. Mutable: every message counts."""

    lives_count: int = 1
    received_count: int = 0
    replayed_count: int = 0
    duplicate_count: int = 0
    gap_count: int = 0
    replay_count: int = 0
    lost_count: int = 0
    """Messages that were published and never applied, as far as their numbers tell."""
    overflow_count: int = 0
    """Live messages that found the buffer full; a replay brings them again."""
    undecodable_count: int = 0
    garbled_count: int = 0
    """Frames that are no messages at all, and numbers that the publisher does not know."""
    clear_count: int = 0


@dataclass(frozen=True, slots=True)
class StreamView:
    """The state of one stream, for metrics and `explain`."""

    trouble: StreamTrouble | None
    next_sequence: int | None
    """The message that is expected; None: not known yet."""
    complete: bool
    """Everything since the engine's first message is applied; False: it was joined later than its buffer reaches."""
    counts: StreamCounts
    held_count: int
    held_bytes: int
    lag_s: float | None
    """From publishing to applying, of the last live message, by two machines' clocks; None: none came live yet."""


def published_at_s(payload: bytes) -> float | None:
    """Unix seconds at which a payload was published, read from its first ten bytes; None where they are others."""
    if len(payload) < 10 or payload[0] not in _ARRAY_HEADS or payload[1] != _FLOAT_HEAD:
        return None
    return float(_BIG_DOUBLE.unpack_from(payload, 2)[0])


@dataclass(slots=True, eq=False)
class _Ask:
    """An open question to the replay socket. Mutable: it follows the answer as it comes."""

    ask_id: int
    start: int
    history: bool
    idle: bool
    next_then_sequence: int | None
    progress_s: float
    newest_sequence: int | None = None
    news_count: int = 0


class RankStream:
    """The stream of one rank of one endpoint, over all lives of its engine. Mutable: every message moves it.

    Every method that hears something returns what is to be done, in this order. `now_s` is any steady clock.
    """

    __slots__ = (
        "_ask", "_ask_id", "_base", "_connected", "_counts", "_digests", "_doubt", "_empty_count", "_failed_run",
        "_heard_s", "_held", "_held_bytes", "_lag_s", "_limits", "_news_run", "_next", "_published_s", "_retry_s",
        "_stuck_count", "_touched", "_unanswered", "_wants_history", "_whole", "can_replay",
    )  # fmt: skip

    def __init__(self, *, can_replay: bool, limits: StreamLimits | None = None) -> None:
        self.can_replay = can_replay
        """Is there a replay socket?"""
        self._limits = limits or StreamLimits()
        self._counts = StreamCounts()
        self._digests = array("Q", bytes(8 * _DIGEST_COUNT))
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._ask: _Ask | None = None
        self._ask_id = 0
        self._connected = False
        self._failed_run = 0
        self._lag_s: float | None = None
        self._touched = False
        self._heard_s = self._retry_s = 0.0
        self._unanswered = self._news_run = 0
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of this life yet."""
        # Applied since the last rebase: [_base, _next).
        self._base = 0
        self._next: int | None = None
        self._held.clear()
        self._held_bytes = 0
        self._doubt = self._wants_history = False
        self._whole = True
        self._published_s: float | None = None
        self._empty_count = self._stuck_count = 0

    # --- what is heard -----------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> list[Action]:
        """The live socket is there: ask for everything that was before."""
        self._heard_s = now_s
        return [self._open(now_s)] if self.can_replay else []

    def live(self, sequence: int, payload: bytes, now_s: float) -> list[Action]:
        """A message of the live socket."""
        self._heard_s = now_s
        self._counts.received_count += 1
        self._news_run = 0
        expected = self._next
        if sequence == expected and not self._doubt:
            return self._advance(sequence, payload)
        if expected is None:
            if self._is_alone():
                return self._begin_at(sequence, payload)
            return self._hold(sequence, payload, now_s) or []
        if sequence < expected:
            return self._behind(sequence, payload, now_s)
        restarted = self._hold(sequence, payload, now_s)
        if restarted is not None:
            return restarted
        if self._is_alone():
            return self._give_up_gap()
        return self._ask_soon(now_s)

    def replayed(self, ask_id: int, sequence: int, payload: bytes, now_s: float) -> list[Action]:
        """A message of the answer to question `ask_id`."""
        ask = self._ask
        if ask is None or ask.ask_id != ask_id:
            return []
        self._heard_s = ask.progress_s = now_s
        self._unanswered = 0
        self._counts.replayed_count += 1
        actions: list[Action] = []
        if ask.newest_sequence is None:
            if sequence < ask.start:
                return []
            actions = self._first_replayed(sequence, payload, now_s)
            if self._ask is not ask:
                return actions
        ask.newest_sequence = sequence
        expected = self._next
        assert expected is not None
        if sequence == expected:
            ask.news_count += 1
            actions += self._advance(sequence, payload)
        elif sequence > expected:
            # A hole in the replay itself: kept, and asked for again when it ends.
            actions += self._hold(sequence, payload, now_s) or []
        elif self._known(sequence, payload) is False:
            actions += self._restart(now_s)
        return actions

    def replay_ended(self, ask_id: int, now_s: float) -> list[Action]:
        """The end mark of question `ask_id`."""
        ask = self._ask
        if ask is None or ask.ask_id != ask_id:
            return []
        self._ask = None
        self._heard_s = now_s
        self._unanswered = 0
        if ask.newest_sequence is None:
            return self._empty_answer(ask, now_s)
        self._empty_count = 0
        if ask.history:
            self._wants_history = False
        self._doubt = False
        actions = self._drain()
        if ask.idle:
            self._news_run = self._news_run + 1 if ask.news_count else 0
            if self._news_run >= _NEWS_TO_RECONNECT_COUNT:
                self._news_run = 0
                actions.append(Reconnect())
        if not self._held:
            self._stuck_count = 0
            return actions
        return actions + self._still_missing(ask, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed: give up on a question, ask again, or ask whether all is well. A few times a second."""
        ask = self._ask
        if ask is not None:
            return self._unanswered_since(ask, now_s) if now_s - ask.progress_s >= self._limits.answer_s else []
        if not self.can_replay or now_s < self._retry_s:
            return []
        idle = now_s - self._heard_s >= self._limits.idle_s
        if idle or self._held or self._doubt or self._empty_count or self._next is None or self._wants_history:
            return [self._open(now_s, idle=idle)]
        return []

    def cut(self, now_s: float) -> list[Action]:
        """The live connection broke. It is made anew by its socket; what was missed meanwhile must be found out."""
        self._connected = False
        self._ask = None
        self._drop_held()
        if self.can_replay:
            self._doubt = self._next is not None
            self._retry_s = now_s
            return []
        known, self._next = self._next, None
        return [] if known is None else self._clear(ClearReason.CUT)

    def joined(self, now_s: float) -> list[Action]:
        """The live connection stands again."""
        self._connected = True
        if not self.can_replay or self._next is None:
            return []
        self._doubt = True
        return [self._open(now_s)]

    def decoded(self, *, readable: bool, lag_s: float | None = None) -> list[Action]:
        """How an `Apply` went. `lag_s`: published to now, of a live message."""
        if readable:
            self._failed_run = 0
            self._touched = True
            if lag_s is not None:
                self._lag_s = lag_s
            return []
        self._failed_run += 1
        self._counts.undecodable_count += 1
        self._whole = False
        return self._clear(ClearReason.UNDECODABLE) if self._touched else []

    def garbled(self) -> None:
        """Frames came that are no message."""
        self._counts.garbled_count += 1
        self._failed_run += 1

    def postponed(self, now_s: float) -> None:
        """The open question was not sent yet: its answer is not late."""
        if self._ask is not None:
            self._ask.progress_s = now_s

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def open_ask_id(self) -> int | None:
        """The question whose answer is awaited."""
        return None if self._ask is None else self._ask.ask_id

    def trouble(self) -> StreamTrouble | None:
        """Why the index cannot be believed about this rank now; None: it can."""
        if self._failed_run >= self._limits.undecodable_to_distrust_count:
            return StreamTrouble.UNDECODABLE
        if self._unanswered >= _UNANSWERED_TO_GO_ON_COUNT or not self._connected:
            return StreamTrouble.UNREACHABLE
        if self._next is None and self.can_replay:
            return StreamTrouble.CATCHING_UP
        if self._ask is not None and self._ask.history:
            return StreamTrouble.CATCHING_UP
        return StreamTrouble.GAP if self._held or self._doubt else None

    def view(self) -> StreamView:
        """A frozen copy of the counters."""
        return StreamView(
            trouble=self.trouble(),
            next_sequence=self._next,
            complete=self._whole and self._base == 0 and self._next is not None,
            counts=replace(self._counts),
            held_count=len(self._held),
            held_bytes=self._held_bytes,
            lag_s=self._lag_s,
        )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _is_alone(self) -> bool:
        """Is there nobody to ask what was missed?"""
        return not self.can_replay or self._unanswered >= _UNANSWERED_TO_GO_ON_COUNT

    def _ask_soon(self, now_s: float) -> list[Action]:
        return [self._open(now_s)] if self._ask is None and now_s >= self._retry_s else []

    def _open(self, now_s: float, *, idle: bool = False) -> AskReplay:
        """Ask from the last message that was applied, or for everything where none was."""
        expected = self._next
        history = expected is None or expected == self._base or self._wants_history
        start = 0 if history or expected is None else expected - 1
        self._ask_id += 1
        self._counts.replay_count += 1
        quiet = idle and not self._held and not self._doubt
        self._ask = _Ask(self._ask_id, start, history, quiet, expected, now_s)
        return AskReplay(self._ask_id, start, history)

    def _first_replayed(self, sequence: int, payload: bytes, now_s: float) -> list[Action]:
        """The first message of an answer says whether it continues what is known. `_next` is a number afterwards."""
        expected = self._next
        if expected is None:
            self._rebase(sequence)
        elif sequence < self._base:
            self._rebase(sequence)
            self._doubt = False
            return self._clear(ClearReason.REBUILD)
        elif expected == self._base:
            self._counts.lost_count += max(0, sequence - expected)
            self._rebase(sequence)
        elif sequence < expected:
            return self._restart(now_s) if self._known(sequence, payload) is False else []
        else:
            # Even if it is the expected one: the message before it is gone, so nothing vouches for the same life.
            return self._begin_anew(sequence)
        return []

    def _begin_anew(self, sequence: int) -> list[Action]:
        """The replay begins after what is known: the messages between are lost, and it holds all that there is."""
        assert self._next is not None
        self._counts.lost_count += sequence - self._next
        actions = self._clear(ClearReason.GAP)
        self._drop_held()
        self._rebase(sequence)
        self._doubt = False
        return actions

    def _empty_answer(self, ask: _Ask, now_s: float) -> list[Action]:
        if self._next is not None and self._next > self._base:
            self._empty_count += 1
            if self._empty_count < _EMPTY_TO_RESTART_COUNT:
                self._retry_s = now_s + _EMPTY_RETRY_S
                return []
            return self._restart(now_s)
        self._doubt = self._wants_history = False
        if self._next is None:
            self._rebase(0)
        actions = self._drain()
        return actions + self._still_missing(ask, now_s) if self._held else actions

    def _still_missing(self, ask: _Ask, now_s: float) -> list[Action]:
        """A replay ended and messages before the held ones are still missing."""
        self._stuck_count = self._stuck_count + 1 if self._next == ask.next_then_sequence else 0
        if self._stuck_count < _STUCK_TO_GIVE_UP_COUNT:
            if not self._stuck_count:
                return [self._open(now_s)]
            self._retry_s = now_s + _EMPTY_RETRY_S
            return []
        self._stuck_count = 0
        if ask.newest_sequence is not None and ask.newest_sequence < min(self._held):
            # The publisher answers and does not know these numbers: they were not its own.
            self._counts.garbled_count += len(self._held)
            self._drop_held()
            return []
        return self._give_up_gap()

    def _unanswered_since(self, ask: _Ask, now_s: float) -> list[Action]:
        self._ask = None
        self._unanswered += 1
        self._retry_s = now_s + min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(self._unanswered, 10))
        if self._unanswered < _UNANSWERED_TO_GO_ON_COUNT:
            return []
        return [Reconnect(), *(self._give_up_gap() if self._held else [])]

    def _behind(self, sequence: int, payload: bytes, now_s: float) -> list[Action]:
        """A live message before the expected one: a duplicate, or the first word of another life?"""
        if self._doubt:
            return []  # the open question decides, and its replay brings this message again
        known = self._known(sequence, payload)
        if known is None and not self._is_newer(payload):
            known = True
        if known:
            self._counts.duplicate_count += 1
            return []
        if known is None and not self._is_alone():
            return self._ask_soon(now_s)
        actions = self._restart(now_s)
        if self._is_alone():
            return actions + self._begin_at(sequence, payload)
        return actions + (self._hold(sequence, payload, now_s) or [])

    def _known(self, sequence: int, payload: bytes) -> bool | None:
        """Is this the message that was applied under this number? None: it is too old to say."""
        assert self._next is not None
        if sequence < max(self._base, self._next - _DIGEST_COUNT):
            return None
        return self._digests[sequence % _DIGEST_COUNT] == xxh3_64_intdigest(payload)

    def _is_newer(self, payload: bytes) -> bool:
        """Was it published after the last message that was applied? True where nobody can say."""
        at_s = published_at_s(payload)
        return at_s is None or self._published_s is None or at_s > self._published_s

    def _take(self, sequence: int, payload: bytes) -> Apply:
        self._digests[sequence % _DIGEST_COUNT] = xxh3_64_intdigest(payload)
        self._published_s = published_at_s(payload)
        self._next = sequence + 1
        return Apply(sequence, payload)

    def _advance(self, sequence: int, payload: bytes) -> list[Action]:
        """Apply the expected message, and the held ones that follow it."""
        actions: list[Action] = [self._take(sequence, payload)]
        if self._held and not self._doubt:
            actions += self._drain()
        return actions

    def _drain(self) -> list[Action]:
        """Apply held messages as far as none is missing between them; drop those that are known by now."""
        actions: list[Action] = []
        while self._next is not None and (payload := self._held.pop(self._next, None)) is not None:
            self._held_bytes -= len(payload)
            actions.append(self._take(self._next, payload))
        for sequence in [each for each in self._held if self._next is not None and each < self._next]:
            self._held_bytes -= len(self._held.pop(sequence))
        return actions

    def _hold(self, sequence: int, payload: bytes, now_s: float) -> list[Action] | None:
        """Keep a message until those before it are there. Not None: it shows that the engine was restarted."""
        known = self._held.get(sequence)
        if known is not None:
            if known == payload:
                self._counts.duplicate_count += 1
                return None
            # Two messages under one number: of two lives, or of nobody.
            return self._restart(now_s)
        if len(self._held) >= self._limits.held_count or self._held_bytes + len(payload) > self._limits.held_bytes:
            self._counts.overflow_count += 1
            return None
        if not self._held and self._next is not None and sequence > self._next:
            self._counts.gap_count += 1
        self._held[sequence] = payload
        self._held_bytes += len(payload)
        return None

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _give_up_gap(self) -> list[Action]:
        """No replay fills the gap before the held messages: clear, and go on with them."""
        first = min(self._held)
        actions: list[Action] = []
        if self._next is not None:
            self._counts.lost_count += max(0, first - self._next)
            actions = self._clear(ClearReason.GAP)
        self._doubt = False
        self._rebase(first)
        # A socket that answers has told all that it has; one that does not is asked again later.
        self._wants_history = self.can_replay and self._is_alone()
        return actions + self._drain()

    def _begin_at(self, sequence: int, payload: bytes) -> list[Action]:
        """The first message of a life, with nobody to ask what was before it."""
        self._rebase(sequence)
        self._wants_history = self.can_replay
        return self._advance(sequence, payload)

    def _restart(self, now_s: float) -> list[Action]:
        """The engine was restarted: nothing that was known holds any more."""
        self._counts.lives_count += 1
        actions = self._clear(ClearReason.RESTART)
        self._forget()
        if self.can_replay:
            actions.append(self._open(now_s))
        return actions

    def _rebase(self, sequence: int) -> None:
        self._base = self._next = sequence
        self._whole = True

    def _clear(self, reason: ClearReason) -> list[Action]:
        self._counts.clear_count += 1
        self._touched = False
        return [Clear(reason)]
