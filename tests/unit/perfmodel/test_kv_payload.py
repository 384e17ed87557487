"""The msgpack payload of KV events, against every message recorded from vLLM 0.32.0.

Owns: `encode_batch`. Does not own: sockets (`integration/perfmodel/test_kv_publisher`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perfmodel.adapters.kv_publisher import encode_batch
from perfmodel.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

RECORDED = Path(__file__).parents[2] / "recorded" / "vllm_0.32.0" / "kv_events.jsonl"


def event_of(decoded: dict[str, Any]) -> KvEvent:
    if decoded["type"] == "BlockStored":
        return BlockStored(
            block_hashes=tuple(decoded["block_hashes"]),
            parent_block_hash=decoded["parent_block_hash"],
            token_ids=tuple(decoded["token_ids"]),
            block_size_tokens=decoded["block_size"],
            extra_keys=tuple(None if keys is None else tuple(keys) for keys in decoded["extra_keys"]),
        )
    if decoded["type"] == "BlockRemoved":
        return BlockRemoved(tuple(decoded["block_hashes"]))
    return AllBlocksCleared()


def test_every_recorded_message_is_encoded_to_the_recorded_bytes() -> None:
    messages = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len(messages) == 126
    for message in messages:
        published_at_s, events, rank = message["decoded"]
        payload = encode_batch(published_at_s, [event_of(event) for event in events], rank)
        assert payload.hex() == message["payload_hex"], message["seq"]
