"""The subscriber over real ZMQ sockets: the index ends up as what the publishers hold, whatever happens on the way.

Owns: sockets, sources over HTTP, reconnects, pace and faults of `kv_subscriber`, `kv_rank` and `kv_sockets`, against
the simulated engine's publisher, a simulated engine as a process, and frames written by hand. Does not own: the rules
of a stream (`unit/router/test_kv_stream`, `properties/test_kv_stream_properties`) or real vLLM (`engines/`).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from perfmodel.adapters.kv_publisher import KvPublisher, PublisherConfig
from perfmodel.kv_cache import BlockRemoved, BlockStored
from router.adapters.discovery import EngineProbe
from router.adapters.kv_subscriber import EngineReading, KvSubscriber
from router.endpoints import Endpoint, EngineKind
from router.kv_events import KvEvent
from router.kv_index import KvIndex, RankId, Served
from router.kv_stream import StreamLimits, StreamTrouble, StreamView
from tests.integration.router.event_sources import Cable, RawSource, engine_sim, removed, stored
from tests.services import free_tcp_port

# Idle engines are asked every 0.3 s instead of every 5 s, and answers are waited for 1 s: the tests take less long.
QUICK = StreamLimits(answer_s=1.0, idle_s=0.3)
NOBODY = "http://127.0.0.1:9"


def endpoint(
    kv_events: str | None = None, *, url: str = NOBODY, name: str = "e", kind: EngineKind = "openai"
) -> Endpoint:
    return Endpoint(name, url, frozenset({"m"}), kind, kv_events=kv_events, incarnation="1")


class BrittleIndex(KvIndex):
    """An index with a fault: it takes nothing of the engines that are named."""

    def __init__(self, *refused: str) -> None:
        super().__init__(b"secret")
        self._refused = refused

    def apply(self, rank: RankId, events: Sequence[KvEvent]) -> None:
        if rank.engine_id in self._refused:
            raise IndexError("a fault of ours")
        super().apply(rank, events)


class Ears:
    """A subscriber with a fresh index; `until` waits for something to become true."""

    def __init__(self, index: KvIndex | None = None, limits: StreamLimits = QUICK) -> None:
        self.index = index or KvIndex(b"secret")
        self.told: list[str] = []
        probe = EngineProbe(lambda name: None)
        self.subscriber = KvSubscriber(
            self.index, lambda each: Served("m"), probe.get, limits=limits, report=self.told.append
        )
        self.subscriber.start()

    def copies(self, name: str = "e", rank: int = 0) -> int:
        """Copies of blocks that the index holds of a rank; -1: it knows no such rank."""
        wanted = RankId(name, "1", rank)
        return self.index.counters(wanted).live_copies_count if wanted in self.index.ranks() else -1

    def reading(self, name: str = "e") -> EngineReading:
        return next(each for each in self.subscriber.reading() if each.endpoint_id == name)

    def stream(self, name: str = "e") -> StreamView:
        return self.reading(name).ranks[0].stream

    def trouble(self, name: str = "e") -> StreamTrouble | None:
        return self.subscriber.trouble(RankId(name, "1", 0))

    async def until(self, true: Callable[[], Any], seconds: float = 20.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not true():  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pytest.fail(f"it did not become true in {seconds} s; {self.subscriber.reading()}; told {self.told}")


@asynccontextmanager
async def http_engine(listed: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
    """An engine that only says where it publishes; its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(listed()).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def ears() -> AsyncIterator[Ears]:
    made = Ears()
    yield made
    await made.subscriber.stop()
    await made.subscriber.stop()


@pytest.fixture
async def source() -> AsyncIterator[RawSource]:
    made = RawSource()
    yield made
    await made.close()


@pytest.fixture
async def publisher() -> AsyncIterator[KvPublisher]:
    made = KvPublisher(PublisherConfig("127.0.0.1", "kv"), lambda: 1.5)
    yield made
    made.close()


def configured(publisher: KvPublisher) -> str:
    return f"{publisher.endpoint}?replay={publisher.replay_endpoint}&topic=kv"


def block(number: int) -> BlockStored:
    return BlockStored((number,), None, (number,) * 4, 4, (None,))


async def test_a_late_reader_knows_what_the_simulated_engines_publisher_holds(
    ears: Ears, publisher: KvPublisher
) -> None:
    held: Counter[int] = Counter()
    for number in range(1, 2_001):
        publisher.publish((block(number),))
        held[number] += 1
        if number % 3 == 0:
            publisher.publish((BlockRemoved((number - 1,)), block(number)))
            held[number - 1] -= 1
            held[number] += 1
    ears.subscriber.hear([endpoint(configured(publisher))])
    await ears.until(lambda: ears.copies() == held.total())
    await ears.until(lambda: ears.trouble() is None)
    view = ears.stream()
    assert view.complete
    assert (view.counts.lost_count, view.counts.clear_count, view.counts.undecodable_count) == (0, 0, 0)
    publisher.publish((block(9_999),))
    await ears.until(lambda: ears.copies() == held.total() + 1)
    await ears.until(lambda: ears.stream().lag_s is not None)


async def test_the_loop_goes_on_while_a_long_replay_is_applied(ears: Ears, publisher: KvPublisher) -> None:
    for number in range(3_000):
        publisher.publish((block(number),))
    ears.subscriber.hear([endpoint(configured(publisher))])
    seen: set[int] = set()

    def caught_up() -> bool:
        seen.add(ears.copies())
        return ears.copies() == 3_000

    async with asyncio.timeout(20):
        while not caught_up():  # noqa: ASYNC110 - every turn of the loop is looked at
            await asyncio.sleep(0)
    # Turns of a millisecond: other callbacks of the loop saw many states in between.
    assert len(seen) > 5


@pytest.mark.parametrize("short", [False, True])
async def test_both_shapes_of_replies_are_read(ears: Ears, short: bool) -> None:
    source = RawSource(short_replies=short)
    source.publish(stored([1, 2, 3]))
    source.publish(removed([2]))
    ears.subscriber.hear([endpoint(source.address)])
    await ears.until(lambda: ears.copies() == 2 and ears.trouble() is None)
    await source.close()


async def test_lost_messages_are_replayed(ears: Ears, source: RawSource) -> None:  # R10
    ears.subscriber.hear([endpoint(source.address)])
    await source.heard()
    for number in range(20):
        source.publish(stored([number + 1]), live=number not in range(5, 10))
    await ears.until(lambda: ears.copies() == 20)
    counts = ears.stream().counts
    assert (counts.gap_count, counts.lost_count, counts.clear_count) == (1, 0, 0)
    source.publish(stored([100]), live=False)
    await ears.until(lambda: ears.copies() == 21)


async def test_without_a_replay_socket_lost_messages_clear(ears: Ears) -> None:  # R10
    source = RawSource(replay=False)
    ears.subscriber.hear([endpoint(source.address)])
    await source.heard()
    for number in range(20):
        source.publish(stored([number + 1]), live=number not in range(5, 10))
    await ears.until(lambda: ears.copies() == 10)
    counts = ears.stream().counts
    assert (counts.lost_count, counts.clear_count) == (5, 1)
    assert ears.trouble() is None
    await source.close()


async def test_garbage_is_counted_distrusted_and_healed(ears: Ears, source: RawSource) -> None:  # R12
    ears.subscriber.hear([endpoint(source.address)])
    await source.heard()
    source.publish(stored([1]))
    await ears.until(lambda: ears.copies() == 1)
    for frames in ([b"kv"], [b"kv", b"short", b""], [b""], [b"kv", b"\xff" * 8, b""], [b"kv", b"", b"", b"", b""]):
        source.send(*frames)
    await ears.until(lambda: ears.trouble() is StreamTrouble.UNDECODABLE)
    assert ears.copies() == 1, "frames that are no messages change nothing"
    source.publish(stored([2]))
    await ears.until(lambda: ears.trouble() is None)
    assert ears.copies() == 2
    source.buffer.append((2, b"\xc1 no msgpack"))
    source.send(b"kv", (2).to_bytes(8, "big"), b"\xc1 no msgpack")
    await ears.until(lambda: ears.copies() == 0)
    assert ears.index.counters(RankId("e", "1", 0)).decode_failures_count == 1
    source.publish(stored([3]))
    await ears.until(lambda: ears.copies() == 1)
    assert ears.trouble() is None


async def test_an_event_that_cannot_be_read_clears_what_it_may_have_changed(ears: Ears, source: RawSource) -> None:
    ears.subscriber.hear([endpoint(source.address)])
    await source.heard()
    source.publish(stored([1]))
    source.publish({**stored([2]), "a_member_of_tomorrow": 7}, {"type": "AnEventOfTomorrow", "block_hashes": [1]})
    await ears.until(lambda: ears.copies() == 2)
    source.publish(stored([3]), {"type": "BlockRemoved", "block_hashes": "none"})
    await ears.until(lambda: ears.copies() == 0)
    source.publish(stored([4]))
    await ears.until(lambda: ears.copies() == 1 and ears.trouble() is None)


async def test_each_rank_is_heard_and_one_that_is_gone_is_dropped(ears: Ears) -> None:
    sources = {number: RawSource() for number in (0, 3)}
    listed = {
        str(number): {"endpoint": f"tcp://*:{each.port}", "replay_endpoint": f"tcp://*:{each.replay_port}"}
        for number, each in sources.items()
    }
    async with http_engine(lambda: listed) as url:
        for number, each in sources.items():
            each.publish(stored(range(1, number + 2)))
        ears.subscriber.hear([endpoint(url=url, kind="vllm")])
        await ears.until(lambda: (ears.copies(rank=0), ears.copies(rank=3)) == (1, 4))
        del listed["3"]
        await sources[3].close()
        await ears.until(lambda: (ears.copies(rank=0), ears.copies(rank=3)) == (1, -1))
    await sources[0].close()


async def test_a_number_out_of_the_blue_loses_nothing(ears: Ears, source: RawSource) -> None:
    ears.subscriber.hear([endpoint(source.address)])
    await source.heard()
    source.publish(stored([1]))
    await ears.until(lambda: ears.copies() == 1)
    source.send(b"kv", (2**40).to_bytes(8, "big"), b"\x93")
    await ears.until(lambda: ears.stream().counts.garbled_count == 1)
    source.publish(stored([2]))
    await ears.until(lambda: ears.copies() == 2 and ears.trouble() is None)


async def test_an_address_where_nobody_listens_is_distrusted_until_somebody_does(ears: Ears) -> None:
    port, replay_port = free_tcp_port(), free_tcp_port()
    ears.subscriber.hear([endpoint(f"tcp://127.0.0.1:{port}?replay={replay_port}")])
    await ears.until(lambda: ears.trouble() is StreamTrouble.UNREACHABLE)
    publisher = KvPublisher(PublisherConfig("127.0.0.1", "kv", port, replay_port), lambda: 1.5)
    try:
        publisher.publish((block(1),))
        await ears.until(lambda: ears.copies() == 1 and ears.trouble() is None)
    finally:
        publisher.close()


async def test_nonsense_addresses_are_told_once_and_hold_up_nobody(ears: Ears, publisher: KvPublisher) -> None:
    publisher.publish((block(1),))
    ears.subscriber.hear(
        [
            endpoint("tcp://127.0.0.1:99999", name="port"),
            endpoint("tcp://no.such.host.invalid:5557?replay=5558", name="host"),
            endpoint("tcp://127.0.0.1:5557?rank=2", name="option"),
            endpoint(configured(publisher)),
        ]
    )
    await ears.until(lambda: ears.copies() == 1 and ears.trouble() is None)
    await ears.until(lambda: ears.trouble("host") is StreamTrouble.UNREACHABLE)
    assert len(ears.told) == len(set(ears.told)) == 2, ears.told
    assert "no ZMQ address" in str(ears.reading("port").fault)
    assert "unknown option 'rank'" in str(ears.reading("option").fault)
    assert ears.trouble("port") is StreamTrouble.UNREACHABLE


async def test_many_engines_are_caught_up_with_though_others_do_not_answer(ears: Ears) -> None:
    # More than run at once, and the dead ones come first.
    dead = [endpoint(f"tcp://127.0.0.1:{free_tcp_port()}?replay={free_tcp_port()}", name=f"a{n}") for n in range(6)]
    publishers = [KvPublisher(PublisherConfig("127.0.0.1", "kv"), lambda: 1.5) for _ in range(8)]
    for number, publisher in enumerate(publishers):
        for place in range(300 + number):
            publisher.publish((block(place + 1),))
    alive = [endpoint(configured(each), name=f"b{number}") for number, each in enumerate(publishers)]
    ears.subscriber.hear([*dead, *alive])
    names = [each.endpoint_id for each in alive]
    await ears.until(lambda: [ears.copies(name) for name in names] == list(range(300, 308)))
    await ears.until(lambda: {ears.trouble(name) for name in names} == {None})
    await ears.until(lambda: {ears.trouble(each.endpoint_id) for each in dead} == {StreamTrouble.UNREACHABLE})
    for publisher in publishers:
        publisher.close()


async def test_a_fault_of_ours_with_one_engines_events_deafens_nobody(publisher: KvPublisher) -> None:
    ears = Ears(BrittleIndex("bad"))
    ears.subscriber.hear([endpoint(configured(publisher), name="bad"), endpoint(configured(publisher))])
    for number in range(1, 8):
        publisher.publish((block(number),))
        await ears.until(lambda number=number: ears.copies() == number)  # type: ignore[misc]  # a default is no loop variable
    await ears.until(lambda: ears.index.counters(RankId("bad", "1", 0)).decode_failures_count >= 5)
    assert ears.trouble() is None
    assert ears.trouble("bad") is StreamTrouble.UNDECODABLE
    assert [told for told in ears.told if "a fault of ours" in told] == ears.told[:1] == ears.told
    await ears.subscriber.stop()


async def test_an_endpoint_that_is_gone_is_dropped_and_one_that_is_another_now_begins_anew(
    ears: Ears, publisher: KvPublisher
) -> None:
    publisher.publish((block(1),))
    first = endpoint(configured(publisher))
    ears.subscriber.hear([first])
    await ears.until(lambda: ears.copies() == 1)
    ears.subscriber.hear([])
    assert ears.copies() == -1
    assert ears.subscriber.reading() == ()
    ears.subscriber.hear([first])
    await ears.until(lambda: ears.copies() == 1)
    other = Endpoint("e", NOBODY, frozenset({"m"}), kv_events=configured(publisher), incarnation="2")
    ears.subscriber.hear([other])
    assert ears.copies() == -1
    await ears.until(lambda: RankId("e", "2", 0) in ears.index.ranks())
    await ears.until(lambda: ears.index.counters(RankId("e", "2", 0)).live_copies_count == 1)


async def test_a_broken_connection_is_made_anew_and_what_was_missed_is_found(ears: Ears, source: RawSource) -> None:
    cable = Cable(source.port)
    await cable.start()
    ears.subscriber.hear([endpoint(f"tcp://127.0.0.1:{cable.port}?replay={source.replay_port}")])
    await source.heard()
    source.publish(stored([1]))
    await ears.until(lambda: ears.copies() == 1)
    await cable.cut()
    await ears.until(lambda: ears.trouble() is StreamTrouble.UNREACHABLE)
    for number in range(2, 6):
        source.publish(stored([number]))
    await cable.start()
    await ears.until(lambda: ears.copies() == 5 and ears.trouble() is None)
    assert ears.stream().counts.clear_count == 0
    source.publish(stored([6]))
    await ears.until(lambda: ears.copies() == 6)
    await ears.subscriber.stop()
    await cable.cut()


async def test_a_connection_that_dies_in_silence_is_noticed_and_replaced(ears: Ears, source: RawSource) -> None:
    cable = Cable(source.port)
    await cable.start()
    ears.subscriber.hear([endpoint(f"tcp://127.0.0.1:{cable.port}?replay={source.replay_port}")])
    await source.heard()
    source.publish(stored([1]))
    await ears.until(lambda: ears.copies() == 1)
    cable.silence()
    source.publish(stored([2]))
    await ears.until(lambda: ears.copies() == 2)  # by asking while nothing comes
    source.publish(stored([3]))
    await ears.until(lambda: ears.reading().ranks[0].sockets_count > 1)
    cable.mend()
    await ears.until(lambda: ears.copies() == 3 and ears.trouble() is None)
    await ears.subscriber.stop()
    await cable.cut()


async def ask(url: str, prompt: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 4})
        usage: dict[str, Any] = answer.json()["usage"]
        return usage


async def test_a_killed_engine_that_comes_back_on_the_same_ports_is_empty_and_fills_again(ears: Ears) -> None:
    ports = {"port": free_tcp_port(), "events_port": free_tcp_port(), "replay_port": free_tcp_port()}
    with engine_sim(**ports) as facts:
        ears.subscriber.hear([endpoint(url=facts["url"], kind="vllm")])
        await ask(facts["url"], "hello " * 400)
        await ears.until(lambda: ears.copies() > 20 and ears.trouble() is None)
        before = ears.copies()
        facts["process"].kill()
        await ears.until(lambda: ears.trouble() is StreamTrouble.UNREACHABLE)
    with engine_sim(**ports) as facts:
        await ears.until(lambda: ears.copies() == 0)
        await ask(facts["url"], "another prompt " * 100)
        await ears.until(lambda: 0 < ears.copies() < before and ears.trouble() is None)
        assert ears.stream().counts.lives_count == 2


async def test_a_killed_engine_that_publishes_elsewhere_now_is_found_again(ears: Ears) -> None:
    port = free_tcp_port()
    with engine_sim(port=port) as facts:
        ears.subscriber.hear([endpoint(url=facts["url"], kind="sim")])
        await ask(facts["url"], "hello " * 400)
        await ears.until(lambda: ears.copies() > 20)
        first = ears.reading().ranks[0].source
    with engine_sim(port=port) as facts:
        await ask(facts["url"], "hello " * 40)
        await ears.until(lambda: ears.reading().ranks and ears.reading().ranks[0].source != first, 45)
        await ears.until(lambda: 0 < ears.copies() < 30 and ears.trouble() is None)


async def test_a_subscriber_that_starts_under_load_catches_up(ears: Ears) -> None:
    with engine_sim() as facts:
        load = asyncio.create_task(_load(facts["url"]))
        await asyncio.sleep(0.5)
        ears.subscriber.hear([endpoint(url=facts["url"], kind="vllm")])
        await load
        fresh = Ears()
        fresh.subscriber.hear([endpoint(url=facts["url"], kind="vllm")])
        await fresh.until(lambda: fresh.copies() > 20 and fresh.trouble() is None)
        await ears.until(lambda: ears.copies() == fresh.copies() and ears.trouble() is None)
        assert ears.stream().counts.clear_count == 0
        await fresh.subscriber.stop()


async def _load(url: str) -> None:
    await asyncio.gather(*(ask(url, f"session {number % 7} " * (20 + number)) for number in range(60)))


async def test_an_engine_without_events_is_said_to_have_none(ears: Ears) -> None:
    async with http_engine(dict) as url:
        for _ in range(2):
            ears.subscriber.hear([endpoint(url=url, kind="vllm"), endpoint(kind="vllm", name="refused")])
        await ears.until(lambda: ears.reading().fault == "e publishes no KV events")
        await ears.until(lambda: "cannot be asked" in str(ears.reading("refused").fault))
        assert ears.reading().ranks == ()
    assert len(ears.told) == 2, "each is told once"
