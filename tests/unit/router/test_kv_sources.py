"""Where engines publish their KV events: what an engine lists, what a file says, which address is reached from here.

Owns: `adapters.kv_sources` and the shape of a message (`adapters.kv_sockets.read_message`). Does not own: sockets
(`integration/router/test_kv_subscriber`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.adapters.kv_sockets import Mark, Message, read_message
from router.adapters.kv_sources import KvSource, configured_sources, reached_from_here, sources_of_engine

RECORDED = Path(__file__).parents[2] / "recorded" / "vllm_0.32.0"


def test_what_vllm_lists_is_read() -> None:
    body = (RECORDED / "kv_event_sources.json").read_bytes()
    assert sources_of_engine(body, "http://127.0.0.1:8000") == (
        KvSource(0, "tcp://127.0.0.1:43797", "tcp://127.0.0.1:5558", "kv@tiny@0"),
    )


def test_ranks_come_in_order_and_those_without_events_are_left_out() -> None:
    entry = {"endpoint": "tcp://*:5557", "publisher": "zmq", "enable_kv_cache_events": True}
    listed = {
        "10": entry,
        "2": {**entry, "replay_endpoint": "tcp://*:5560", "topic": "kv"},
        "3": {**entry, "publisher": "null"},
        "4": {**entry, "enable_kv_cache_events": False},
    }
    assert sources_of_engine(json.dumps(listed).encode(), "http://[fd00::1]:8000/v1") == (
        KvSource(2, "tcp://[fd00::1]:5557", "tcp://[fd00::1]:5560", "kv"),
        KvSource(10, "tcp://[fd00::1]:5557", None, ""),
    )
    assert sources_of_engine(b"{}", "http://h:1") == ()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"7",
        b"not json",
        b'{"a": {"endpoint": "tcp://h:1"}}',
        b'{"-1": {"endpoint": "tcp://h:1"}}',
        b'{"0": {}}',
        b'{"0": 7}',
        b'{"0": {"endpoint": "h:1"}}',
        b'{"0": {"endpoint": "tcp://h"}}',
        b'{"0": {"endpoint": "tcp://h:0"}}',
        b'{"0": {"endpoint": "tcp://h:65536"}}',
        b'{"0": {"endpoint": 5}}',
        b'{"0": {"endpoint": "tcp://h:1", "topic": 5}}',
        b'{"0": {"endpoint": "tcp://h:1", "topic": "\\ud800"}}',
        b'{"0": {"endpoint": "ipc:///run/\\ud800"}}',
        b'{"0": {"endpoint": "tcp://h:1", "replay_endpoint": "ipc://a\\u0000b"}}',
        b'{"0": {"endpoint": "tcp://h:1", "replay_endpoint": "udp://h:1"}}',
    ],
)
def test_nonsense_is_one_sentence(body: bytes) -> None:
    assert sources_of_engine(body, "http://h:1") == "its answer to GET /kv_event_sources is no list of event sources"


@pytest.mark.parametrize(
    ("address", "host", "reached"),
    [
        ("tcp://*:5557", "10.0.0.5", "tcp://10.0.0.5:5557"),
        ("tcp://0.0.0.0:5557", "engine.local", "tcp://engine.local:5557"),
        ("tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://10.1.1.1:5557", "10.0.0.5", "tcp://10.1.1.1:5557"),
        ("tcp://127.0.0.1:5557", "10.0.0.5", "tcp://10.0.0.5:5557"),
        ("tcp://localhost:5557", "127.0.0.1", "tcp://localhost:5557"),
        ("tcp://127.0.0.1:5557", "localhost", "tcp://127.0.0.1:5557"),
        ("ipc:///run/kv", "10.0.0.5", "ipc:///run/kv"),
    ],
)
def test_an_address_is_reached_on_the_engines_machine_never_on_ours_by_mistake(
    address: str, host: str, reached: str
) -> None:
    assert reached_from_here(address, host) == reached


def test_a_configured_address_names_replay_topic_and_ranks() -> None:
    url = "http://10.0.0.5:8000"
    assert configured_sources("tcp://h:5557", url) == (KvSource(0, "tcp://h:5557", None),)
    assert configured_sources("tcp://*:5557?replay=5560&topic=kv-events&ranks=2", url) == (
        KvSource(0, "tcp://10.0.0.5:5557", "tcp://10.0.0.5:5560", "kv-events"),
        KvSource(1, "tcp://10.0.0.5:5558", "tcp://10.0.0.5:5561", "kv-events"),
    )
    assert configured_sources("tcp://127.0.0.1:1?replay=tcp://[::1]:2", url) == (
        KvSource(0, "tcp://127.0.0.1:1", "tcp://[::1]:2"),
    )


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("tcp://h:1?rank=2", "kv_events has an unknown option 'rank'; the options are replay, topic, ranks"),
        ("tcp://h:1?ranks=0", "kv_events, option ranks: '0' is not a number from 1 to 256"),
        ("tcp://h:1?ranks=x", "kv_events, option ranks: 'x' is not a number from 1 to 256"),
        ("tcp://h:x", "kv_events: 'tcp://h:x' is no ZMQ address such as tcp://host:5557?replay=5558"),
        ("ipc:///a?ranks=2", "kv_events: 'ipc:///a?ranks=2' is no ZMQ address such as tcp://host:5557?replay=5558"),
    ],
)
def test_a_configured_address_that_cannot_be_used_is_one_sentence(address: str, sentence: str) -> None:
    assert configured_sources(address, "http://h:1") == sentence


def test_every_recorded_message_is_read() -> None:
    live = [json.loads(line) for line in (RECORDED / "kv_events.jsonl").read_text().splitlines()]
    for each in live:
        frames = [each["topic"].encode(), bytes.fromhex(each["seq_hex"]), bytes.fromhex(each["payload_hex"])]
        assert read_message(frames) == Message(each["seq"], frames[-1])
    replayed = [json.loads(line) for line in (RECORDED / "kv_events_replay.jsonl").read_text().splitlines()]
    read = [read_message([bytes.fromhex(frame) for frame in each["frames_hex"]]) for each in replayed]
    assert read[-1] is Mark.END
    assert all(isinstance(each, Message) for each in read[:-1])


def test_the_shapes_of_messages() -> None:
    number = (5).to_bytes(8, "big")
    for frames in ([b"kv", number, b"p"], [b"", b"kv", number, b"p"], [b"", number, b"p"], [number, b"p"]):
        assert read_message(frames) == Message(5, b"p")
    assert read_message([b"", b"", b"\xff" * 8, b""]) is Mark.END
    assert read_message([b"", b"\xff" * 8, b""]) is Mark.END
    for frames in ([], [b""], [b"kv", b"p"], [b"kv", b"1234567", b"p"], [b"", b"", b""]):
        assert read_message(frames) is Mark.GARBLED
