"""KV events on ZMQ, byte for byte as vLLM 0.32 publishes them, with the replay socket.

Owns: the msgpack payload, the PUB socket (frames: topic, sequence number as 8 bytes big-endian, payload), the bounded
replay buffer and the ROUTER socket that serves it. Does not own: which events there are (`kv_cache`) or when they are
published (`engine_clock`).
Everything runs on the server's event loop: sends never wait, and the replay socket's file descriptor wakes the loop, so
an engine without subscribers costs nothing while idle. Long replays are sent in slices between other work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgpack
import zmq

from perfmodel.errors import ConfigError, PortError
from perfmodel.kv_cache import BlockRemoved, BlockStored, KvEvent

# vLLM's defaults of KVEventsConfig (recorded in kv_event_sources.json).
DEFAULT_BUFFER_STEPS = 10_000
_SEND_LIMIT_COUNT = 100_000
# The buffer is bounded in bytes too: 10,000 steps of 8,192 new tokens each would be 400 MB.
_BUFFER_LIMIT_BYTES = 128 * 2**20
# Marks the end of a replay (vLLM: -1 as a signed 64-bit number, empty topic and payload).
_END_OF_REPLAY = b"\xff" * 8
# Replayed messages between two turns of the event loop: about a millisecond of work.
_REPLAY_SLICE_COUNT = 128
# Replays under way at once; a further one is refused by an immediate end mark, as a reader would see an empty buffer.
_REPLAYS_LIMIT_COUNT = 16


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """Where to publish. Port 0 takes a free one; `buffer_steps` messages can be replayed."""

    host: str
    topic: str
    port: int = 0
    replay_port: int = 0
    buffer_steps: int = DEFAULT_BUFFER_STEPS
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        if self.buffer_steps < 1:
            raise ConfigError(f"buffer_steps is {self.buffer_steps}; expected at least 1")


def encode_batch(published_at_s: float, events: Iterable[KvEvent], data_parallel_rank: int = 0) -> bytes:
    """The payload of one message: msgpack [Unix seconds, [event maps], rank], default members left out."""
    payload: bytes = msgpack.packb([published_at_s, [_event_map(event) for event in events], data_parallel_rank])
    return payload


def _event_map(event: KvEvent) -> dict[str, Any]:
    if isinstance(event, BlockStored):
        return {
            "type": "BlockStored",
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": event.extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": "GPU", "group_idx": 0}
    return {"type": "AllBlocksCleared"}


class KvPublisher:
    """The two sockets of one engine. Built inside a running event loop; `close` it there too."""

    def __init__(self, config: PublisherConfig, wall_clock_s: Callable[[], float]) -> None:
        self._config = config
        self._wall_clock_s = wall_clock_s
        self._topic = config.topic.encode()
        self._next_sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered_bytes = 0
        self._replays: deque[tuple[bytes, Iterator[tuple[int, bytes]]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._replaying = False
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_SEND_LIMIT_COUNT)
        self._router = self._context.socket(zmq.ROUTER)
        # A reader that fell behind must not lose replies in the middle of a replay.
        self._router.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
        self._router.setsockopt(zmq.RCVHWM, _REPLAYS_LIMIT_COUNT)
        try:
            self.endpoint = self._bind(self._pub, config.port)
            self.replay_endpoint = self._bind(self._router, config.replay_port)
        except PortError:
            self._context.destroy(linger=0)
            raise
        self._loop.add_reader(self._router.FD, self._on_replay_socket)
        self._on_replay_socket()

    def sources(self) -> dict[str, dict[str, Any]]:
        """The body of GET /kv_event_sources."""
        return {
            str(self._config.data_parallel_rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay_endpoint,
                "buffer_steps": self._config.buffer_steps,
                "hwm": _SEND_LIMIT_COUNT,
                "max_queue_size": _SEND_LIMIT_COUNT,
                "topic": self._config.topic,
            }
        }

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        """Send one step's events. Never waits: a subscriber that is too slow misses messages, and replays them."""
        payload = encode_batch(self._wall_clock_s(), events, self._config.data_parallel_rank)
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        self._buffer.append((sequence, payload))
        self._buffered_bytes += len(payload)
        while len(self._buffer) > self._config.buffer_steps or self._buffered_bytes > _BUFFER_LIMIT_BYTES:
            _, dropped = self._buffer.popleft()
            self._buffered_bytes -= len(dropped)
        try:
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        """Close both sockets; messages not yet taken by the network are given a moment. Twice does nothing."""
        if self._context.closed:
            return
        self._loop.remove_reader(self._router.FD)
        self._replays.clear()
        self._context.destroy(linger=200)

    def _bind(self, socket: zmq.Socket[bytes], port: int) -> str:
        host = self._config.host
        wanted = f"tcp://[{host}]:{port or '*'}" if ":" in host else f"tcp://{host}:{port or '*'}"
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(wanted)
        except zmq.ZMQError as fault:
            raise PortError(f"KV events cannot be published on {wanted}: {zmq.strerror(fault.errno or 0)}") from fault
        return bytes(socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\x00")

    def _on_replay_socket(self) -> None:
        """The descriptor is edge-triggered: take everything there is, or it will not wake us again."""
        while int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:
            frames = self._router.recv_multipart(zmq.NOBLOCK)
            # [identity, empty, start sequence]; anything else is not a replay request.
            if len(frames) == 3 and len(frames[2]) == 8:
                self._begin_replay(frames[0], int.from_bytes(frames[2], "big"))

    def _begin_replay(self, identity: bytes, start: int) -> None:
        if len(self._replays) >= _REPLAYS_LIMIT_COUNT:
            self._reply(identity, b"", _END_OF_REPLAY, b"")
            return
        first = self._buffer[0][0] if self._buffer else 0
        # A copy: the buffer goes on while the replay is sent, and later messages come by the PUB socket.
        messages = list(islice(self._buffer, max(0, start - first), None))
        self._replays.append((identity, iter(messages)))
        self._send_slice()

    def _send_slice(self) -> None:
        if self._replaying or not self._replays:
            return
        identity, messages = self._replays[0]
        count = 0
        for sequence, payload in islice(messages, _REPLAY_SLICE_COUNT):
            count += 1
            self._reply(identity, self._topic, sequence.to_bytes(8, "big"), payload)
        if count < _REPLAY_SLICE_COUNT:
            self._replays.popleft()
            self._reply(identity, b"", _END_OF_REPLAY, b"")
        if self._replays:
            self._replaying = True
            self._loop.call_soon(self._next_slice)

    def _next_slice(self) -> None:
        self._replaying = False
        if not self._context.closed:
            self._send_slice()
            self._on_replay_socket()

    def _reply(self, identity: bytes, topic: bytes, sequence: bytes, payload: bytes) -> None:
        try:
            self._router.send_multipart((identity, b"", topic, sequence, payload), zmq.NOBLOCK)
        except zmq.Again:
            return
