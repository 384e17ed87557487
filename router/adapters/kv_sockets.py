"""The ZMQ sockets of one data-parallel rank: live events, replay, and whether the connection stands.

Owns: a SUB socket with its monitor, a DEALER for each question to the replay socket, their options, and both shapes of
a message. Does not own: what a message means for the stream (`kv_stream`), when sockets are made anew or when they are
read (`kv_subscriber`). Nothing here waits: libzmq connects, resolves names and reconnects in its own thread, and the
event loop is woken through the sockets' descriptors, which tell edges only: after a wake-up a socket must be read until
it is empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from router.adapters.kv_sources import KvSource

# vLLM's and SGLang's end mark of a replay: -1 as a signed 64-bit number.
_END = b"\xff" * 8

# A broken connection is made anew after 0.1 s, then ever later, at most after 2 s: an engine that comes back is heard
# well within the time that its first request takes.
_RECONNECT_FIRST_MS, _RECONNECT_MAX_MS = 100, 2_000
# A peer that answers no ZMTP ping for 6 s is gone: a machine that lost its power, or a firewall that forgot us.
_PING_EVERY_MS, _PING_ANSWER_MS = 2_000, 6_000
# A peer that takes the connection and says nothing is left after this; libzmq's own limit is 30 s.
_HANDSHAKE_MS = 5_000

# Messages that libzmq keeps for us. vLLM's publisher keeps 100,000 more on its side and drops beyond.
_LIVE_MAX_COUNT = 1_024
# vLLM's replay socket drops what its own queue (1,000) cannot pass on; what waits here does not fill that queue.
_REPLAY_MAX_COUNT = 16_384
# A message beyond this closes the connection: the largest real one is a step's blocks, well under 1 MiB.
_MESSAGE_MAX_BYTES = 4 * 2**20


class SocketsFault(Exception):
    """The sockets cannot be made; one sentence."""


class Link(Enum):
    """What became of the live connection."""

    JOINED = auto()
    CUT = auto()


class Message(NamedTuple):
    """One message of either socket."""

    sequence: int
    payload: bytes


class Mark(Enum):
    """What came that is no message."""

    END = auto()
    """The end of a replay."""
    GARBLED = auto()


def read_message(frames: list[bytes]) -> Message | Mark:
    """[topic, number, payload] live; ["", topic, number, payload] or (before vLLM 0.32) ["", number, payload] replayed:
    counted from the end they are one shape.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        return Mark.GARBLED
    if frames[-2] == _END:
        return Mark.END
    return Message(int.from_bytes(frames[-2], "big"), frames[-1])


class RankSockets:
    """The sockets of one rank. Built, used and closed inside a running event loop; `wake` is called when there may be
    something to read. Raises SocketsFault where libzmq refuses an address.
    """

    __slots__ = ("_context", "_live", "_loop", "_monitor", "_monitored", "_replay", "_source", "_wake", "ask_id")

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: KvSource, wake: Callable[[], None]) -> None:
        self._context = context
        self._source = source
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._replay: zmq.Socket[bytes] | None = None
        self._monitored = False
        self.ask_id: int | None = None
        """The question whose answer the replay socket brings; None: none is open."""
        self._live: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._set(self._live, _LIVE_MAX_COUNT)
            self._live.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            self._monitor = self._live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self._live.connect(source.endpoint)
        except (zmq.ZMQError, OverflowError, ValueError) as fault:
            self.close()
            raise SocketsFault(f"{source.endpoint} cannot be connected to: {fault}") from fault
        self._loop.add_reader(self._live.FD, wake)
        self._loop.add_reader(self._monitor.FD, self._on_monitor)
        self._on_monitor()

    def link(self) -> Link | None:
        """What became of the connection since last asked. It is known a tenth of a second before anything comes by a
        connection that was made anew.
        """
        if not self._monitored:
            return None
        if self._monitor is None or not int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            self._monitored = False
            return None
        event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return Link.JOINED
        # The replay socket's connection is of the same life; the next question gets a fresh one.
        self._close_replay()
        return Link.CUT

    def live(self) -> Message | Mark | None:
        """The next live message."""
        return _received(self._live)

    def replayed(self) -> Message | Mark | None:
        """The next message of the answer to the open question."""
        if self._replay is None or self.ask_id is None:
            return None
        message = _received(self._replay)
        if message is Mark.END:
            self.ask_id = None
        return message

    def ask(self, ask_id: int, start: int) -> None:
        """Ask for the messages from `start` on. Raises SocketsFault.

        The socket of an answer that came to its end is used again; one that still brings something is thrown away, so
        that no message is taken for the answer to another question.
        """
        assert self._source.replay_endpoint is not None
        if self.ask_id is not None:
            self._close_replay()
        try:
            if self._replay is None:
                self._replay = self._context.socket(zmq.DEALER)
                self._set(self._replay, _REPLAY_MAX_COUNT)
                self._replay.connect(self._source.replay_endpoint)
                self._loop.add_reader(self._replay.FD, self._wake)
            self.ask_id = ask_id
            self._replay.send_multipart((b"", start.to_bytes(8, "big")), zmq.NOBLOCK)
        except (zmq.ZMQError, OverflowError, ValueError) as fault:
            self._close_replay()
            raise SocketsFault(f"{self._source.replay_endpoint} cannot be asked: {fault}") from fault
        self._wake()

    def give_up(self) -> None:
        """The open question is of no interest any more."""
        if self.ask_id is not None:
            self._close_replay()

    def close(self) -> None:
        """Close everything. Twice does nothing."""
        self._close_replay()
        if self._live.closed:
            return
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.FD)
            self._loop.remove_reader(self._live.FD)
            self._live.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._live.close(linger=0)

    def _on_monitor(self) -> None:
        self._monitored = True
        self._wake()

    def _close_replay(self) -> None:
        self.ask_id = None
        if self._replay is None:
            return
        self._loop.remove_reader(self._replay.FD)
        self._replay.close(linger=0)
        self._replay = None

    @staticmethod
    def _set(socket: zmq.Socket[bytes], queue_count: int) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, queue_count),
            (zmq.MAXMSGSIZE, _MESSAGE_MAX_BYTES),
            (zmq.IPV6, 1),
            (zmq.RECONNECT_IVL, _RECONNECT_FIRST_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.HEARTBEAT_IVL, _PING_EVERY_MS),
            (zmq.HEARTBEAT_TIMEOUT, _PING_ANSWER_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS),
        ):
            socket.setsockopt(option, value)


def _received(socket: zmq.Socket[bytes]) -> Message | Mark | None:
    # Asking for the events first costs half of what an exception for an empty socket does.
    if not int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
        return None
    try:
        return read_message(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        return None
