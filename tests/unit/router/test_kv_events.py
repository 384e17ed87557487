"""KV events: every known encoding of the same thing gives the same events, and bad bytes are told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import orjson
import pytest

from router.kv_events import (
    BadEvents,
    Batch,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    TensorRtEvents,
    Tier,
    decode,
    split,
)
from router.kv_keys import token_bytes

RECORDED = Path(__file__).parents[2] / "recorded/vllm_0.32.0/kv_events.jsonl"

# One store as vLLM 0.32 writes it, and the event that it is.
STORED_MAP: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
STORED = BlocksStored([11, 12], 10, token_bytes([1, 2, 3, 4]), 2, group_id=0)


def batch(*events: object, rank: object = 0) -> Batch:
    got = decode(msgpack.packb([1.5, list(events), rank]))
    assert isinstance(got, Batch)
    return got


def only(event: object) -> KvEvent:
    got = batch(event)
    assert not got.faults and not got.unknown_count
    (found,) = got.events
    return found


def stored(**changes: object) -> KvEvent:
    return only({**STORED_MAP, **changes})


def test_recorded_messages_are_read_without_a_fault() -> None:
    events: list[KvEvent] = []
    for line in RECORDED.read_text().splitlines():
        got = decode(bytes.fromhex(json.loads(line)["payload_hex"]))
        assert isinstance(got, Batch) and not got.faults and not got.unknown_count
        assert got.data_parallel_rank == 0 and got.published_at_s is not None and got.published_at_s > 1.7e9
        events += got.events
    kinds = [type(event) for event in events]
    assert (kinds.count(BlocksStored), kinds.count(BlocksRemoved), kinds.count(BlocksCleared)) == (164, 157, 1)
    salted = [event.extras for event in events if isinstance(event, BlocksStored) and event.extras]
    assert len(salted) == 1 and salted[0][1:] == [None, None]


def test_both_encodings_of_vllm_say_the_same() -> None:
    array = ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU", None, [None, None], 0, "full_attention", None]
    assert only(STORED_MAP) == only(array) == STORED
    removed = BlocksRemoved([11], Tier.HOST, 0)
    assert only({"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU", "group_idx": 0}) == removed
    assert only(["BlockRemoved", [11], "CPU", 0]) == removed
    assert only({"type": "AllBlocksCleared"}) == only(["AllBlocksCleared"]) == BlocksCleared(None)


@pytest.mark.parametrize(
    "array",
    [
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None],  # 2025
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU", None, None, None, None, None, None, None],
    ],
)
def test_each_layout_of_sglang_says_the_same(array: list[object]) -> None:
    assert only(array) == STORED._replace(group_id=None)


@pytest.mark.parametrize(
    "tail",
    [
        [{"cache_salt": "a"}],  # metadata where the adapter's name is now
        [None, [["dynamo-cache-salt:a"]], None, None, None, None, None, {"cache_salt": "a"}],
    ],
)
def test_a_salt_of_sglang_is_where_vllm_has_it(tail: list[object]) -> None:
    first = only(["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", *tail])
    assert isinstance(first, BlocksStored) and first.extras == [["a"]] and first.lora_name is None
    later = only(["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU", *tail])
    assert isinstance(later, BlocksStored) and later.extras is None, "a salt counts once, in the first block"


def test_sglangs_removals_hashes_and_owners() -> None:
    assert only(["BlockRemoved", [-1]]) == BlocksRemoved([2**64 - 1], Tier.DEVICE, None)
    assert only(["BlockRemoved", [1], "CPU_PINNED", None, None, None, None, None]) == BlocksRemoved(
        [1], Tier.HOST, None
    )
    assert only(["AllBlocksCleared", "somebody"]) == BlocksCleared(None)
    pairs = only(["BlockStored", [1, 2], None, [[1, 2], [2, 3], [3, 4], [4, 5]], 2, None, "GPU"])
    assert isinstance(pairs, BlocksStored) and pairs.tokens == token_bytes([1, 2, 3, 4])


def test_unknown_members_positions_and_kinds_are_passed_over() -> None:
    assert stored(news=1, ownership="x") == STORED
    assert batch({"type": "BlockWarmed"}, STORED_MAP).unknown_count == 1
    assert batch({"type": "BlockWarmed"}, STORED_MAP).events == [STORED]


def test_a_hash_is_an_int_or_the_end_of_a_digest() -> None:
    digest = bytes(range(24)) + (11).to_bytes(8, "big")
    assert stored(block_hashes=[digest, 12], parent_block_hash=(10).to_bytes(8, "big")) == STORED


def test_the_adapter_is_in_the_root_and_images_and_salts_in_blocks() -> None:
    event = stored(lora_name="sql", extra_keys=[["sql", ["image", 3], "salt"], ["sql"]])
    assert isinstance(event, BlocksStored)
    assert event.lora_name == "sql" and event.extras == [[["image", 3], "salt"], None]
    old = stored(lora_id=7)
    assert isinstance(old, BlocksStored) and old.lora_name == "#7"


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        (None, None, Tier.DEVICE),
        ("GPU", None, Tier.DEVICE),
        ("GPU", "REMOTE", Tier.REMOTE),
        ("CPU", None, Tier.HOST),
        ("CPU_PINNED", None, Tier.HOST),
        ("CPU_TIER1", None, Tier.HOST),
        ("DISK", None, Tier.DISK),
        ("STORAGE", "LOCAL", Tier.DISK),
        ("STORAGE", None, Tier.REMOTE),
        ("EXTERNAL", None, Tier.REMOTE),
        ("TAPE", None, Tier.REMOTE),
    ],
)
def test_media_are_tiers_and_an_unknown_one_is_the_slowest(medium: object, locality: object, tier: Tier) -> None:
    event = stored(medium=medium, locality=locality)
    assert isinstance(event, BlocksStored) and event.tier is tier


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_spec_kind": "mamba"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"block_hashes": [11]},  # one hash for more tokens than a block has
        {"kv_cache_spec_kind": None, "block_hashes": [11]},
        {"kv_cache_spec_kind": None, "block_size": 4096, "token_ids": [1] * 8192},
    ],
)
def test_a_state_or_window_group_is_no_chain(changes: dict[str, object]) -> None:
    event = stored(**changes)
    assert isinstance(event, BlocksStored) and not event.chained and not event.tokens


def test_a_placeholder_of_a_slower_tier_has_hashes_only() -> None:
    event = stored(medium="CPU", token_ids=[], block_size=0, parent_block_hash=None, group_idx=None)
    assert event == BlocksStored([11, 12], None, b"", 0, Tier.HOST)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xc1", BadEvents.NOT_MSGPACK),
        (b"", BadEvents.NOT_MSGPACK),
        (msgpack.packb({"a": 1}), BadEvents.NOT_A_BATCH),
        (msgpack.packb([1.0]), BadEvents.NOT_A_BATCH),
        (msgpack.packb([None, []]), BadEvents.NOT_A_BATCH),
        (msgpack.packb([1.0, [None] * 20_001]), BadEvents.TOO_MANY),
    ],
)
def test_what_is_no_message_has_a_reason(payload: bytes, reason: BadEvents) -> None:
    assert decode(payload) is reason


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (7, BadEvents.NOT_AN_EVENT),
        ([], BadEvents.NOT_AN_EVENT),
        ({"type": 3}, BadEvents.NOT_AN_EVENT),
        ({"type": "BlockStored"}, BadEvents.BAD_MEMBER),
        ({**STORED_MAP, "token_ids": [1, 2, 3]}, BadEvents.BAD_MEMBER),
        ({**STORED_MAP, "token_ids": ["a"] * 4}, BadEvents.BAD_MEMBER),
        ({**STORED_MAP, "block_hashes": [11, "no hex"]}, BadEvents.BAD_MEMBER),
        ({**STORED_MAP, "extra_keys": [None] * 3}, BadEvents.BAD_MEMBER),
        ({**STORED_MAP, "medium": 3}, BadEvents.BAD_MEMBER),
        ({"type": "BlockRemoved", "block_hashes": 1}, BadEvents.BAD_MEMBER),
        ({"type": "BlockRemoved", "block_hashes": [1], "group_idx": "x"}, BadEvents.BAD_MEMBER),
    ],
)
def test_an_event_that_cannot_be_read_has_a_reason_and_the_others_count(event: object, reason: BadEvents) -> None:
    got = batch(event, STORED_MAP)
    assert got.faults == [reason] and got.events == [STORED]


def test_a_split_is_the_same_events_in_small_parts() -> None:
    long = BlocksStored(list(range(10)), 99, token_bytes(range(20)), 2, extras=[["a"], None, ["b"]])
    removed = BlocksRemoved(list(range(5)))
    parts = list(split([long, BlocksCleared(), removed], 4))
    assert [sum(len(each.hashes) for each in part if not isinstance(each, BlocksCleared)) for part in parts] == [
        4,
        4,
        4,
        3,
    ]
    events = [event for part in parts for event in part]
    runs = [event for event in events if isinstance(event, BlocksStored)]
    assert [event.parent for event in runs] == [99, 3, 7]
    assert b"".join(event.tokens for event in runs) == long.tokens
    assert runs[0].extras == [["a"], None, ["b"]] and not runs[1].extras
    assert [each for event in events if isinstance(event, BlocksRemoved) for each in event.hashes] == removed.hashes
    assert list(split([long], 100)) == [[long]]


def tensorrt(kind: str, event_id: int, **data: object) -> dict[str, object]:
    return {"event_id": event_id, "data": {"type": kind, **data}, "window_size": 4096}


def tensorrt_block(block_hash: int | str, tokens: list[int], level: int = 0, **more: object) -> dict[str, object]:
    ids = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {
        "type": "stored_block",
        "block_hash": block_hash,
        "tokens": ids,
        "cache_level": level,
        "priority": 35,
        **more,
    }


def test_tensorrt_events_are_runs_moves_and_removals() -> None:
    reader = TensorRtEvents(2)
    body = [
        tensorrt("created", 0, num_blocks_per_cache_level=[10, 5]),
        tensorrt(
            "stored",
            1,
            parent_hash=None,
            blocks=[tensorrt_block(1, [1, 2]), tensorrt_block(2, [3, 4], 1), tensorrt_block(3, [5])],
        ),
        tensorrt("updated", 2, block_hash=1, cache_level={"type": "event_diff", "new_value": 1, "old_value": 0}),
        tensorrt("updated", 3, block_hash=1, cache_level=None),
        tensorrt("removed", 4, block_hashes=[1, 2]),
        tensorrt("lost", 5),
    ]
    got = reader.decode(orjson.dumps(body))
    assert isinstance(got, list)
    (only_rank,) = got
    assert only_rank.unknown_count == 1 and not only_rank.faults and reader.gap_count == 0
    assert only_rank.events == [
        BlocksStored([1], None, token_bytes([1, 2]), 2, Tier.DEVICE, group_id=4096),
        BlocksStored([2], 1, token_bytes([3, 4]), 2, Tier.HOST, group_id=4096),
        BlocksStored([1], None, b"", 0, Tier.HOST, group_id=4096),
        BlocksRemoved([1], Tier.DEVICE, 4096),
        BlocksRemoved([1, 2], None, 4096),
    ]


def test_tensorrt_keys_ranks_gaps_and_windows() -> None:
    reader = TensorRtEvents()
    stored = tensorrt(
        "stored",
        5,
        parent_hash=None,
        cache_salt="a",
        lora_name="sql",
        blocks=[
            tensorrt_block("00" * 31 + "0b", [1, 2], mm_keys=[{"type": "mm_key", "hash": "ff", "start_offset": 4}]),
            tensorrt_block(12, [3, 4]),
        ],
    )
    narrow = {**tensorrt("stored", 6, parent_hash=None, blocks=[tensorrt_block(9, [1, 2])]), "window_size": 512}
    other = {**tensorrt("removed", 0, block_hashes=[7]), "attention_dp_rank": 1}
    got = reader.decode([stored, narrow, other])
    assert isinstance(got, list) and [each.data_parallel_rank for each in got] == [0, 1]
    run, window = got[0].events
    assert run == BlocksStored(
        [11, 12], None, token_bytes([1, 2, 3, 4]), 2, Tier.DEVICE, "sql", [[["ff", 4], "a"], None], 4096
    )
    assert isinstance(window, BlocksStored) and not window.chained
    late = reader.decode([tensorrt("removed", 9, block_hashes=[11])])
    assert isinstance(late, list) and late[0].events[0] == BlocksCleared(None) and reader.gap_count == 1
    assert reader.decode(b"{") is BadEvents.NOT_A_BATCH and reader.decode(b"{}") is BadEvents.NOT_A_BATCH
    bad = reader.decode([{"event_id": 10, "data": {"type": "removed"}}, 7])
    assert isinstance(bad, list) and bad[0].faults == [BadEvents.BAD_MEMBER] * 2
