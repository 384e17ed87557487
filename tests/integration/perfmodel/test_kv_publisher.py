"""KV events over real ZMQ sockets: what a router that follows them knows must be what the engine holds.

Owns: the live and the replay socket of the simulated engine. Does not own: the payload's bytes
(`unit/perfmodel/test_kv_payload`) or which events there are (`unit/perfmodel/test_recorded_session`).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq
import zmq.asyncio

from perfmodel.adapters.engine_server import EngineServer
from perfmodel.adapters.kv_publisher import KvPublisher, PublisherConfig
from perfmodel.errors import PortError
from perfmodel.kv_cache import BlockRemoved
from tests.integration.perfmodel.conftest import StartEngine

RECORDED = Path(__file__).parents[2] / "recorded" / "vllm_0.32.0"
END = b"\xff" * 8


class NaiveIndex:
    """Counts copies per hash, as a router must: one removal takes one copy."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.tokens: dict[int, tuple[int, ...]] = {}

    def apply(self, payload: bytes) -> None:
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0
        for event in events:
            if event["type"] == "BlockStored":
                width = event["block_size"]
                for position, block_hash in enumerate(event["block_hashes"]):
                    self.copies[block_hash] += 1
                    self.tokens[block_hash] = tuple(event["token_ids"][position * width : (position + 1) * width])
            elif event["type"] == "BlockRemoved":
                self.copies.subtract(event["block_hashes"])
            else:
                self.copies.clear()
        self.copies = +self.copies


@asynccontextmanager
async def sockets() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


async def replayed(endpoint: str, start: int = 0) -> list[list[bytes]]:
    """The frames of a replay from `start`, without the end mark."""
    async with sockets() as context, asyncio.timeout(20):
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        replies: list[list[bytes]] = []
        while (frames := await socket.recv_multipart())[-2] != END:
            replies.append(frames)
        assert frames == [b"", b"", END, b""]
        return replies


async def ask(server: EngineServer, count: int) -> None:
    """Prompts that fill the cache, evict, share prefixes and run side by side.

    Those of whole blocks are stored once more each time: their last token, and so their last block, is computed anew.
    """
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
        for number in range(count):
            text = f"{number % 3} " + "the quick brown fox jumps over the lazy dog " * (10 + 7 * (number % 5))
            whole = text[: 128 * (1 + number % 4)]
            body = {"prompt": [whole, text + f"{number}"], "max_tokens": 40, "n": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_an_index_that_follows_every_event_equals_the_pool(start_engine: StartEngine) -> None:
    server = await start_engine(step_s=0.0005)
    assert server.publisher is not None
    await ask(server, 20)
    index = NaiveIndex()
    replies = await replayed(server.publisher.replay_endpoint)
    for frames in replies:
        index.apply(frames[-1])
    held = {block_hash: len(blocks) for block_hash, blocks in server.core.pool.cached_copies().items()}
    assert dict(index.copies) == held
    assert any(count > 1 for count in held.values())
    events = [event for frames in replies for event in msgpack.unpackb(frames[-1])[1]]
    assert {event["type"] for event in events} == {"BlockStored", "BlockRemoved"}


async def test_an_index_that_keeps_a_set_would_be_wrong(start_engine: StartEngine) -> None:
    """Shows that the test above can fail: the commonest mistake of readers is seen by it."""
    server = await start_engine(step_s=0.0005)
    assert server.publisher is not None
    await ask(server, 20)
    known: set[int] = set()
    for frames in await replayed(server.publisher.replay_endpoint):
        for event in msgpack.unpackb(frames[-1])[1]:
            if event["type"] == "BlockStored":
                known |= set(event["block_hashes"])
            else:
                known -= set(event["block_hashes"])
    assert known != set(server.core.pool.cached_copies())


async def test_live_messages_and_replies_are_framed_as_recorded(start_engine: StartEngine) -> None:
    server = await start_engine()
    assert server.publisher is not None
    async with sockets() as context, asyncio.timeout(20):
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@tiny@0")
        subscriber.connect(server.publisher.endpoint)
        first = await subscribed(subscriber, server.publisher)
        await ask(server, 3)
        replies = await replayed(server.publisher.replay_endpoint, first)
        live = [await subscriber.recv_multipart() for _ in replies]
    assert all(frames[0] == b"kv@tiny@0" and len(frames) == 3 for frames in live)
    assert [frames[1:] for frames in replies] == live
    assert [int.from_bytes(frames[2], "big") for frames in replies] == list(range(first, first + len(replies)))
    recorded = [
        [bytes.fromhex(frame) for frame in json.loads(line)["frames_hex"]]
        for line in (RECORDED / "kv_events_replay.jsonl").read_text().splitlines()
    ]
    assert {(len(frames), frames[0], frames[1]) for frames in replies} == {(4, b"", b"kv@tiny@0")}
    assert {(len(frames), frames[0], frames[1]) for frames in recorded[:-1]} == {(4, b"", b"kv@tiny@0")}
    assert recorded[-1] == [b"", b"", END, b""]


async def subscribed(subscriber: Any, publisher: KvPublisher) -> int:
    """Publishes until one message gets through: then the subscription is in place. The next message's number."""
    count = 0
    while not await subscriber.poll(20):
        publisher.publish((BlockRemoved((1,)),))
        count += 1
    while await subscriber.poll(50):
        frames = await subscriber.recv_multipart()
    assert int.from_bytes(frames[1], "big") == count - 1
    return count


async def test_a_reset_clears_the_index(start_engine: StartEngine) -> None:
    server = await start_engine()
    assert server.publisher is not None
    index = NaiveIndex()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
        await ask(server, 2)
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        # vLLM sends the event with the next step's.
        await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
        sources = (await client.get("/kv_event_sources")).json()
    for frames in await replayed(sources["0"]["replay_endpoint"]):
        index.apply(frames[-1])
    assert dict(index.copies) == {}
    assert list(sources["0"]) == list(json.loads((RECORDED / "kv_event_sources.json").read_text())["0"])


async def test_a_replay_starts_where_it_is_asked_to_and_at_the_oldest_message_kept() -> None:
    config = PublisherConfig("127.0.0.1", "kv", buffer_steps=300)
    publisher = KvPublisher(config, lambda: 1.5)
    try:
        for number in range(1000):
            publisher.publish((BlockRemoved((number,)),))
        everything = await replayed(publisher.replay_endpoint)
        later = await replayed(publisher.replay_endpoint, 995)
        future = await replayed(publisher.replay_endpoint, 5000)
    finally:
        publisher.close()
    assert [int.from_bytes(frames[2], "big") for frames in everything] == list(range(700, 1000))
    assert [msgpack.unpackb(frames[3])[1][0]["block_hashes"] for frames in later] == [[n] for n in range(995, 1000)]
    assert future == []


async def test_nonsense_on_the_replay_socket_is_ignored_and_the_next_request_answered() -> None:
    publisher = KvPublisher(PublisherConfig("127.0.0.1", "kv"), lambda: 1.5)
    try:
        publisher.publish((BlockRemoved((1,)),))
        async with sockets() as context:
            socket = context.socket(zmq.DEALER)
            socket.connect(publisher.replay_endpoint)
            await socket.send_multipart([b"x"])
            await socket.send_multipart([b"", b"short"])
            await socket.send_multipart([b"", b"a", b"b", b"c"])
            assert len(await replayed(publisher.replay_endpoint)) == 1
    finally:
        publisher.close()


async def test_a_taken_port_is_one_clear_sentence() -> None:
    first = KvPublisher(PublisherConfig("127.0.0.1", "kv"), lambda: 1.5)
    try:
        port = int(first.endpoint.rsplit(":", 1)[1])
        with pytest.raises(PortError, match=r"KV events cannot be published on tcp://127.0.0.1:\d+: Address"):
            KvPublisher(PublisherConfig("127.0.0.1", "kv", port=port), lambda: 1.5)
    finally:
        first.close()


async def test_without_kv_events_there_is_no_source(start_engine: StartEngine) -> None:
    server = await start_engine(kv_events=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
        assert (await client.get("/kv_event_sources")).json() == {}
