"""What publishes KV events in these tests, and a network that can be cut.

Owns: `RawSource`, whose frames are written by hand (other shapes, lost and garbled messages); `engine_sim`, a simulated
engine as a process of its own that can be killed; `Cable`, a TCP connection that can be cut or go silent. Does not own:
the simulated engine's own publisher (`perfmodel.adapters.kv_publisher`), which the tests use as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

END = b"\xff" * 8
BLOCK_TOKENS = 4


def stored(hashes: Sequence[int], parent: int | None = None) -> dict[str, Any]:
    """An event map of vLLM 0.32: these blocks after `parent`, with tokens that follow from the hashes."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [value % 1_000 for value in hashes for _ in range(BLOCK_TOKENS)],
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(hashes: Sequence[int]) -> dict[str, Any]:
    """Its counterpart."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}


class RawSource:
    """A PUB and a ROUTER socket served frame by frame; numbers, shapes and losses are the test's choice."""

    def __init__(self, *, short_replies: bool = False, replay: bool = True) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._short = short_replies
        self._replays = replay
        self.buffer: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self._task = asyncio.create_task(self._serve())

    @property
    def address(self) -> str:
        """For the field `kv_events`."""
        return f"tcp://127.0.0.1:{self.port}" + (f"?replay={self.replay_port}" if self._replays else "")

    def publish(self, *events: dict[str, Any], live: bool = True) -> None:
        """The next message; `live=False`: it is lost on the way."""
        number = len(self.buffer)
        payload: bytes = msgpack.packb([1_000.0 + number, list(events), 0])
        self.buffer.append((number, payload))
        if live:
            self._pub.send_multipart((b"kv", number.to_bytes(8, "big"), payload))

    def send(self, *frames: bytes) -> None:
        """Any frames at all."""
        self._pub.send_multipart(frames)

    async def heard(self) -> None:
        """Until a subscriber is there: what is published before is lost."""
        monitor = self._pub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        while not monitor.poll(0):  # noqa: ASYNC110 a ZMQ monitor is polled, it sets no event
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    async def _serve(self) -> None:
        while True:
            while int(self._router.get(zmq.EVENTS)) & zmq.POLLIN:
                identity, _, start = self._router.recv_multipart(zmq.NOBLOCK)
                first = int.from_bytes(start, "big")
                self.asked.append(first)
                middle = () if self._short else (b"kv",)
                for number, payload in self.buffer:
                    if number >= first:
                        self._router.send_multipart((identity, b"", *middle, number.to_bytes(8, "big"), payload))
                self._router.send_multipart((identity, b"", *(() if self._short else (b"",)), END, b""))
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)


class Cable:
    """A TCP port on loopback whose connections go on to another one; it can be cut, or carry nothing in silence."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._whole = asyncio.Event()
        self._whole.set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Every connection breaks, and none is taken."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writers.clear()

    def silence(self) -> None:
        """Connections stay, nothing passes, nobody is told."""
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(back)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                await self._whole.wait()
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


@contextlib.contextmanager
def engine_sim(*, port: int = 0, events_port: int = 0, replay_port: int = 0) -> Iterator[dict[str, Any]]:
    """A small simulated engine; yields what it says of itself, with its `process`."""
    command = [
        *(str(Path(sys.executable).parent / "inferplane"), "engine-sim", "--json", "--model", "tiny"),
        *("--arch", "llama-3.1-8b", "--port", str(port), "--speed", "50", "--block-size", "16"),
        *("--kv-events-port", str(events_port), "--kv-replay-port", str(replay_port)),
        *("--num-gpu-blocks-override", "200"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield {**json.loads(process.stdout.readline()), "process": process}
        finally:
            process.kill()
