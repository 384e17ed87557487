"""A real vLLM: what the index predicts is what the engine stores and what it says it took from its cache.

Owns: the parity of our chain keys (over token ids), the stored blocks of the KV events and `cached_tokens`, within one
salt and across salts, through evictions, lost messages and a kill -9. Does not own: the simulated engine
(`integration/router/test_kv_subscriber`). The tests share one engine, so each uses prompts of its own; the one that
kills it is the last.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgpack
import pytest
import zmq
import zmq.asyncio

from router.adapters.discovery import EngineProbe
from router.adapters.kv_subscriber import KvSubscriber
from router.endpoints import Endpoint
from router.kv_index import KvIndex, RankId, Served
from router.kv_keys import ChainIdentity, chain_keys, prompt_extras, root_key, token_bytes
from router.kv_stream import StreamView
from tests.engines.vllm_process import BLOCK_COUNT, BLOCK_TOKENS, MODEL, START_LIMIT_S, VllmProcess

# The first test waits for the engine's start, the last one for its restart.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(START_LIMIT_S + 60)]

SECRET = b"a secret of this test"
RANK = RankId("vllm", "1", 0)
# One step of the engine and one message take milliseconds; a replay is served within 0.1 s.
WAIT_S = 20.0


@dataclass
class Heard:
    """A subscriber that hears the engine, and the engine itself."""

    url: str
    replay_endpoint: str
    index: KvIndex
    subscriber: KvSubscriber
    told: list[str] = field(default_factory=list)

    def stream(self) -> StreamView:
        return self.subscriber.reading()[0].ranks[0].stream

    def predicted(self, tokens: list[int], salt: str | None = None) -> int:
        """Blocks of the prompt's beginning that the index believes held."""
        root = root_key(SECRET, ChainIdentity(MODEL, BLOCK_TOKENS))
        keys = chain_keys(root, token_bytes(tokens), BLOCK_TOKENS, prompt_extras(salt))
        return max((held.blocks for held in self.index.lookup(keys)), default=0)

    def usable(self, tokens: list[int], salt: str | None = None) -> int:
        """Of these, what a request gets: the engine computes at least a prompt's last token, whatever it holds."""
        return min(self.predicted(tokens, salt), (len(tokens) - 1) // BLOCK_TOKENS)

    async def until(self, true: Callable[[], Any], wait_s: float = WAIT_S) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while not true():  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pytest.fail(f"it did not become true in {wait_s} s: {self.subscriber.reading()}; {self.told}")

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=60) as client:
            answer = await client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
            read: dict[str, Any] = answer.json()
            return read

    async def tokens(self, text: str) -> list[int]:
        """The prompt's token ids as the engine itself makes them, by its chat template."""
        return list((await self.call("/tokenize", {"messages": _messages(text)}))["tokens"])

    async def chat(self, text: str, salt: str | None = None, *, settle: bool = True) -> dict[str, Any]:
        """Its usage; with `settle`, once every event that it caused is applied."""
        body = {"messages": _messages(text), "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = await self.call("/v1/chat/completions", body if salt is None else {**body, "cache_salt": salt})
        if settle:
            await self.settled()
        usage: dict[str, Any] = answer["usage"]
        return usage

    async def settled(self) -> None:
        """Until the index has applied what the engine has published by now."""
        newest = len(await self.published()) - 1

        def applied() -> bool:
            rank = self.subscriber.reading()[0].ranks[0]
            return (rank.stream.next_sequence or 0) > newest and rank.stream.trouble is None and not rank.waiting_blocks

        await self.until(applied)

    async def published(self) -> list[Any]:
        """Every message of the engine's present life, asked and decoded by this test itself."""
        messages = []
        context = zmq.asyncio.Context()
        try:
            with context.socket(zmq.DEALER) as socket:
                socket.connect(self.replay_endpoint)
                await socket.send_multipart([b"", bytes(8)])
                while (frames := await socket.recv_multipart())[-2] != b"\xff" * 8:
                    messages.append(msgpack.unpackb(frames[-1]))
        finally:
            context.destroy(linger=0)
        return messages

    async def held_by_engine(self) -> Counter[int]:
        """Copies of each block that the engine holds by its own events."""
        held: Counter[int] = Counter()
        for _, events, _ in await self.published():
            for event in events:
                hashes = event.get("block_hashes", ())
                held.update(hashes) if event["type"] == "BlockStored" else held.subtract(hashes)
        return +held


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def _heard(vllm: VllmProcess, kv_events: str | None = None) -> Heard:
    """A fresh subscriber that has caught up."""
    told: list[str] = []
    index = KvIndex(SECRET)
    probe = EngineProbe(lambda name: None)
    subscriber = KvSubscriber(index, lambda endpoint: Served(MODEL), probe.get, report=told.append)
    subscriber.start()
    subscriber.hear([Endpoint("vllm", vllm.url, frozenset({MODEL}), "vllm", kv_events=kv_events, incarnation="1")])
    made = Heard(vllm.url, vllm.replay_endpoint, index, subscriber, told)
    await made.until(lambda: subscriber.reading()[0].ranks and made.stream().trouble is None)
    return made


@pytest.fixture
async def heard(vllm: VllmProcess) -> AsyncIterator[Heard]:
    """A fresh subscriber, which finds the engine's sockets by asking it and joins late for every test but the first."""
    made = await _heard(vllm)
    yield made
    await made.subscriber.stop()


# Shorter than a block, about one, some, and not only ASCII.
PROMPTS = ["", "x" * 20, "one block and a bit, no more than that", "parity " * 70, "größer als π: " * 40, "tail" * 333]


@pytest.mark.parametrize("text", PROMPTS, ids=lambda text: f"{len(text)} characters")
async def test_predicted_stored_and_reported_blocks_are_the_same(heard: Heard, text: str) -> None:  # R13
    tokens = await heard.tokens(text)
    before = heard.index.counters(RANK).live_blocks
    shared = heard.predicted(tokens)
    first = await heard.chat(text)
    assert first["prompt_tokens"] == len(tokens)
    assert first["prompt_tokens_details"]["cached_tokens"] == shared * BLOCK_TOKENS
    # The last token of an answer is never computed on, so it is in no block.
    stored = (len(tokens) + first["completion_tokens"] - 1) // BLOCK_TOKENS - shared
    assert heard.index.counters(RANK).live_blocks - before == stored
    assert heard.predicted(tokens) == len(tokens) // BLOCK_TOKENS
    assert heard.index.counters(RANK).live_blocks == len(await heard.held_by_engine())
    second = await heard.chat(text)
    assert second["prompt_tokens_details"]["cached_tokens"] == heard.usable(tokens) * BLOCK_TOKENS


async def test_salts_do_not_share(heard: Heard) -> None:  # R17
    text = "a secret between tenant and engine " * 8
    tokens = await heard.tokens(text)
    full = (len(tokens) - 1) // BLOCK_TOKENS
    assert full > 3
    for salt, cached in (("a", 0), ("a", full), ("b", 0), (None, 0), ("a", full)):
        assert heard.usable(tokens, salt) == cached, salt
        usage = await heard.chat(text, salt)
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached * BLOCK_TOKENS, salt
    assert heard.predicted(tokens, "c") == 0


async def test_evicted_blocks_leave_the_index(heard: Heard) -> None:  # R11
    for number in range(8):
        await heard.chat(f"{number} fills the cache " * 40)
    held = await heard.held_by_engine()
    counters = heard.index.counters(RANK)
    assert counters.removed_blocks > 0
    assert (counters.live_blocks, counters.live_copies_count) == (len(held), held.total())
    assert held.total() <= BLOCK_COUNT - 1
    assert heard.predicted(await heard.tokens("7 fills the cache " * 40)) > 20
    assert heard.predicted(await heard.tokens("0 fills the cache " * 40)) < 20


class LossyRelay:
    """Passes live messages on, except those whose turn is in `lost`."""

    def __init__(self, endpoint: str, lost: range) -> None:
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._pub = self._context.socket(zmq.PUB)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self._lost = lost
        self.lost_count = 0
        self._task = asyncio.create_task(self._pass_on())

    async def _pass_on(self) -> None:
        turn = 0
        while True:
            frames = await self._sub.recv_multipart()
            if turn in self._lost:
                self.lost_count += 1
            else:
                await self._pub.send_multipart(frames)
            turn += 1

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


async def test_lost_messages_are_replayed(vllm: VllmProcess, heard: Heard) -> None:  # R10
    source = heard.subscriber.reading()[0].ranks[0].source
    relay = LossyRelay(source.endpoint, range(1, 4))
    lossy = await _heard(vllm, f"tcp://127.0.0.1:{relay.port}?replay={source.replay_endpoint}")
    try:
        for number in range(6):
            await lossy.chat(f"{number} is lost on the way " * 12, settle=False)
        await lossy.settled()
        assert relay.lost_count == 3
        assert lossy.stream().counts.gap_count > 0
        assert lossy.stream().counts.clear_count == 0
        await heard.settled()
        assert lossy.index.counters(RANK).live_blocks == heard.index.counters(RANK).live_blocks
        assert lossy.index.counters(RANK).live_copies_count == (await heard.held_by_engine()).total()
    finally:
        await lossy.subscriber.stop()
        await relay.close()


async def test_a_killed_engine_is_empty_and_fills_again(vllm: VllmProcess, heard: Heard) -> None:  # R9; the last test
    text = "held by the first life " * 20
    tokens = await heard.tokens(text)
    await heard.chat(text)
    assert heard.predicted(tokens) > 10
    vllm.kill()
    await asyncio.to_thread(vllm.start)
    await heard.until(lambda: heard.stream().trouble is None, 60.0)
    assert heard.predicted(tokens) == 0
    assert heard.index.counters(RANK).live_blocks == 0
    again = await heard.chat(text)
    assert again["prompt_tokens_details"]["cached_tokens"] == 0
    assert heard.predicted(tokens) == len(tokens) // BLOCK_TOKENS
    assert (await heard.chat(text))["prompt_tokens_details"]["cached_tokens"] == heard.usable(tokens) * BLOCK_TOKENS
    assert heard.stream().counts.lives_count == 2
