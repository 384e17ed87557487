"""KV events of inference engines: the bytes of one message to typed events.

Owns: the encodings of vLLM (a map per event; a positional array before May 2026), of SGLang (three positional forms)
and of TensorRT-LLM (JSON), the names of storage media as tiers, and what is wrong with bytes that cannot be read. Does
not own: sockets and sequence numbers (`kv_stream`, `adapters/kv_subscriber`), or what events mean (`kv_index`).

Members are found by presence: unknown keys, later positions and unknown kinds of events are passed over, so that an
engine upgrade does not silence its events (R12). Every failure is counted with its reason.

Verified against bytes recorded from vLLM 0.32.0 (tests/recorded): the map form. Unverified, from public source only:
vLLM's positional form, SGLang's forms (python/sglang/srt/disaggregation/kv_events.py, its tests and kv_events recorder,
read 2026-11-30), and TensorRT-LLM's (tensorrt_llm/_utils.py, `KVCacheEventSerializer`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import msgpack
import orjson

from router.kv_keys import token_bytes

# Engine hashes are used as 64 bits: the whole of vLLM's integers, and the last 8 bytes of a longer digest, which are
# what the integers were cut from; so an engine may change between both forms. SGLang's are signed.
_MASK_64 = (1 << 64) - 1
_HASH_BYTES = 8
_HASH_HEX_DIGITS = 16

# Positions of the array form after the tag. vLLM declared the first eleven before it sent maps; SGLang ends after
# lora_id (2025), after medium, or after metadata (2026, "the positional layout that routers parse").
_STORED_MEMBERS = (
    "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx "
    "kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership metadata"
).split()
_REMOVED_MEMBERS = (
    "block_hashes medium group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership"
).split()

# Kinds of KV groups whose blocks make up a prefix chain, one hash per block of tokens. Only `full_attention` has been
# seen on the wire; the others are the names of vLLM's specs for attention over the whole prefix.
_CHAIN_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention"))

# Where the engine does not say the kind: a block of more tokens than this is a state, not attention. vLLM's hybrid
# models pad attention blocks up to about 1,100 tokens; their states have one hash for thousands.
_CHAIN_BLOCK_TOKENS_MAX = 2_048

# How SGLang writes a cache salt among extra keys (its constant is pinned by its own test).
_SALT_PREFIX = "dynamo-cache-salt:"


class Tier(IntEnum):
    """Where a copy lies, fastest first. The value is the place in tuples of counts by tier."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


# Media of the router notes, section 3.1, and of the sources above. One that is not here counts as the slowest tier: a
# hit is promised no faster than it may be.
_TIERS = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
    "STORAGE": Tier.REMOTE,
    "FS": Tier.REMOTE,
}

# TensorRT-LLM's cache levels: the primary pool is the GPU's, the secondary the host's.
_LEVELS = (Tier.DEVICE, Tier.HOST)


# Events of one message that are read: a step stores and removes a run for each of some hundred requests.
_EVENTS_MAX_COUNT = 20_000


class BadEvents(StrEnum):
    """Why bytes could not be read. The values are metric labels."""

    NOT_MSGPACK = "not_msgpack"
    NOT_A_BATCH = "not_a_batch"
    NOT_AN_EVENT = "not_an_event"
    BAD_MEMBER = "bad_member"
    TOO_MANY = "too_many"
    """More events than one step of an engine makes: to read them would hold up everybody."""


class BlocksStored(NamedTuple):
    """A run of consecutive blocks of which the engine now holds one more copy each."""

    hashes: list[int]
    """The engine's own, 64 bits each."""
    parent: int | None
    """The engine's hash of the block before the run; None at the start of a prompt."""
    tokens: bytes
    """Token ids of the whole run as little-endian 32-bit numbers; empty where a slower tier names hashes only."""
    block_tokens: int
    tier: Tier = Tier.DEVICE
    lora_name: str | None = None
    extras: list[list[Any] | None] | None = None
    """Per block what else its identity depends on (cache salt, images), from the first on; the adapter is not there."""
    group_id: int | None = None
    """The engine's KV group; None where it does not say."""
    chained: bool = True
    """False: a group that keeps no prefix chain (state or window)."""


class BlocksRemoved(NamedTuple):
    """One copy less of each of these blocks. `tier` None: of the fastest tier that has one."""

    hashes: list[int]
    tier: Tier | None = Tier.DEVICE
    group_id: int | None = None


class BlocksCleared(NamedTuple):
    """Everything is gone, or everything on one tier where the engine names it."""

    tier: Tier | None = None


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class Batch(NamedTuple):
    """One message of one rank. `faults` are events that could not be read, `unknown_count` events of kinds not known
    here; `data_parallel_rank` and `published_at_s` are None where the engine does not say.
    """

    published_at_s: float | None
    events: list[KvEvent]
    data_parallel_rank: int | None
    faults: list[BadEvents]
    unknown_count: int


def decode(payload: bytes | memoryview) -> Batch | BadEvents:
    """The events of one vLLM or SGLang message; a reason where nothing of it can be used."""
    try:
        body = msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return BadEvents.NOT_MSGPACK
    if not isinstance(body, list) or len(body) < 2 or not isinstance(body[1], list):
        return BadEvents.NOT_A_BATCH
    if not isinstance(body[0], int | float):
        return BadEvents.NOT_A_BATCH
    rank = body[2] if len(body) > 2 and isinstance(body[2], int) else None
    if len(body[1]) > _EVENTS_MAX_COUNT:
        return BadEvents.TOO_MANY
    batch = Batch(float(body[0]), [], rank, [], 0)
    unknown_count = 0
    for raw in body[1]:
        event = _event(raw)
        if event is None:
            unknown_count += 1
        elif isinstance(event, BadEvents):
            batch.faults.append(event)
        else:
            batch.events.append(event)
    return batch._replace(unknown_count=unknown_count) if unknown_count else batch


def split(events: Sequence[KvEvent], max_blocks: int) -> Iterator[list[KvEvent]]:
    """The same events in slices of at most `max_blocks` blocks, so that a loop can do other work in between.

    A long run of blocks is cut in two that follow each other; a run that cannot be cut (no chain) stays whole.
    """
    part: list[KvEvent] = []
    room = max_blocks
    for event in events:
        rest: KvEvent | None = event
        while rest is not None:
            head, rest = _cut(rest, max(room, 1))
            size = 0 if isinstance(head, BlocksCleared) else len(head.hashes)
            if size > room and part:
                yield part
                part, room = [], max_blocks
            part.append(head)
            room -= size
            if room <= 0:
                yield part
                part, room = [], max_blocks
    if part:
        yield part


def _cut(event: KvEvent, count: int) -> tuple[KvEvent, KvEvent | None]:
    """The first `count` blocks of an event, and the rest of it."""
    if isinstance(event, BlocksCleared) or len(event.hashes) <= count:
        return event, None
    if isinstance(event, BlocksRemoved):
        return event._replace(hashes=event.hashes[:count]), event._replace(hashes=event.hashes[count:])
    if not event.chained:
        return event, None
    at = len(event.tokens) * count // len(event.hashes)
    extras = event.extras
    return (
        event._replace(hashes=event.hashes[:count], tokens=event.tokens[:at], extras=extras and extras[:count]),
        event._replace(
            hashes=event.hashes[count:],
            parent=event.hashes[count - 1],
            tokens=event.tokens[at:],
            extras=extras and extras[count:],
        ),
    )


def _event(raw: object) -> KvEvent | BadEvents | None:
    if isinstance(raw, dict):
        members, kind = raw, raw.get("type")
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        # A position of the cleared event is its owner in SGLang, so none is read: it clears everything.
        names = {"BlockStored": _STORED_MEMBERS, "BlockRemoved": _REMOVED_MEMBERS}.get(str(kind), [])
        members = dict(zip(names, raw[1:], strict=False))
    else:
        return BadEvents.NOT_AN_EVENT
    try:
        if kind == "BlockStored":
            return _stored(members)
        if kind == "BlockRemoved":
            return BlocksRemoved(_hashes(members["block_hashes"]), _tier(members), _group(members))
        if kind == "AllBlocksCleared":
            return BlocksCleared(None if members.get("medium") is None else _tier(members))
    except (KeyError, TypeError, ValueError, OverflowError):
        return BadEvents.BAD_MEMBER
    return None if isinstance(kind, str) else BadEvents.NOT_AN_EVENT


def _stored(members: dict[str, Any]) -> BlocksStored:
    hashes = _hashes(members["block_hashes"])
    block_tokens, tokens = members["block_size"], members.get("token_ids") or ()
    if not isinstance(block_tokens, int) or block_tokens < 0 or (tokens and not block_tokens):
        raise ValueError
    chained = _is_chained(members.get("kv_cache_spec_kind"), block_tokens, len(tokens) - len(hashes) * block_tokens)
    if chained and tokens and len(tokens) != len(hashes) * block_tokens:
        raise ValueError
    parent, lora = members.get("parent_block_hash"), members.get("lora_name")
    if isinstance(lora, dict):  # SGLang once wrote its metadata where the adapter's name is now
        members, lora = {**members, "metadata": lora}, None
    if lora is None and members.get("lora_id") is not None:
        lora = f"#{members['lora_id']}"
    lora = None if lora is None else str(lora)
    return BlocksStored(
        hashes,
        None if parent is None else _hash(parent),
        token_bytes(tokens) if chained and tokens else b"",
        block_tokens,
        _tier(members),
        lora,
        _extras(members, lora, len(hashes)) if chained else None,
        _group(members),
        chained,
    )


def _is_chained(kind: object, block_tokens: int, surplus_tokens: int) -> bool:
    """Whether a group's blocks form a prefix chain; `surplus_tokens` are those that no hash of the event covers."""
    if kind is not None:
        return kind in _CHAIN_KINDS and surplus_tokens <= 0
    return block_tokens <= _CHAIN_BLOCK_TOKENS_MAX and surplus_tokens <= 0


def _extras(members: dict[str, Any], lora: str | None, count: int) -> list[list[Any] | None] | None:
    """What identifies blocks beside tokens. vLLM repeats the adapter in every block: that is in the chain's root.
    SGLang says the salt in every event: it counts in a prompt's first block, as with vLLM.
    """
    raw, metadata = members.get("extra_keys"), members.get("metadata")
    if raw is None and not isinstance(metadata, dict):
        return None
    if raw is not None and (not isinstance(raw, list) or len(raw) > count):
        raise ValueError
    salt = metadata.get("cache_salt") if isinstance(metadata, dict) else None
    extras: list[list[Any] | None] = []
    for block in raw or ():
        if not block:
            extras.append(None)
            continue
        kept = []
        for entry in block:
            if isinstance(entry, str) and entry.startswith(_SALT_PREFIX):
                salt = entry[len(_SALT_PREFIX) :]
            elif entry != lora:
                kept.append(entry)
        extras.append(kept or None)
    if salt is not None and members.get("parent_block_hash") is None:
        extras[:1] = [[*((extras and extras[0]) or ()), salt]]
    return extras if any(extras) else None


def _hashes(raw: Any) -> list[int]:
    if not isinstance(raw, list):
        raise TypeError
    try:
        # the usual case in one pass of C: unsigned 64-bit integers
        array("Q", raw)
    except (TypeError, OverflowError):
        return [_hash(each) for each in raw]
    return raw


def _hash(raw: Any) -> int:
    if isinstance(raw, int):
        return raw & _MASK_64
    if isinstance(raw, bytes) and raw:
        return int.from_bytes(raw[-_HASH_BYTES:], "big")
    if isinstance(raw, str) and raw:
        return int(raw[-_HASH_HEX_DIGITS:], 16)
    raise TypeError


def _tier(members: dict[str, Any]) -> Tier:
    medium, locality = members.get("medium"), members.get("locality")
    if locality == "REMOTE":
        return Tier.REMOTE
    if locality == "LOCAL" and medium in ("STORAGE", "FS"):
        return Tier.DISK
    if medium is not None and not isinstance(medium, str):
        raise TypeError
    return _TIERS.get(medium, Tier.REMOTE)


def _group(members: dict[str, Any]) -> int | None:
    group = members.get("group_idx")
    if group is not None and not isinstance(group, int):
        raise TypeError
    return group


class TensorRtEvents:
    """Reads what `POST /kv_cache_events` of one TensorRT-LLM server returns. Mutable: it remembers the event number of
    each rank (a jump clears that rank: the server's buffer ran over) and the widest attention window (narrower ones
    keep no chain). Unverified: no engine's own bytes have been seen.

    `block_tokens` is the server's tokens_per_block; where None, the longest block seen. A shorter block is a partial
    one: it and what follows has no key.
    """

    def __init__(self, block_tokens: int | None = None) -> None:
        self._block_tokens = block_tokens or 0
        self._window = 0
        self._last_ids: dict[int, int] = {}
        self.gap_count = 0

    def decode(self, body: bytes | Sequence[Any]) -> list[Batch] | BadEvents:
        """One batch per rank that has events, in their order."""
        if isinstance(body, bytes):
            try:
                body = orjson.loads(body)
            except orjson.JSONDecodeError:
                return BadEvents.NOT_A_BATCH
        if not isinstance(body, list):
            return BadEvents.NOT_A_BATCH
        batches: dict[int, Batch] = {}
        for raw in body:
            rank = raw.get("attention_dp_rank") or 0 if isinstance(raw, dict) else 0
            batch = batches.setdefault(rank, Batch(None, [], rank, [], 0))
            try:
                known = self._read(raw, batch)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                batch.faults.append(BadEvents.BAD_MEMBER)
                continue
            if not known:
                batches[rank] = batch._replace(unknown_count=batch.unknown_count + 1)
        return list(batches.values())

    def _read(self, raw: Mapping[str, Any], batch: Batch) -> bool:
        """Append the events of one entry; False where its kind is not known."""
        self._follow(raw.get("event_id"), batch)
        data = raw["data"]
        kind, window = data["type"], raw.get("window_size") or 0
        self._window = max(self._window, window)
        if kind == "created":
            return True
        if kind == "stored":
            self._read_stored(data, window, batch)
        elif kind == "removed":
            hashes = [_hash(each) for each in data["block_hashes"]]
            batch.events.append(BlocksRemoved(hashes, None, window))
        elif kind == "updated":
            level = data.get("cache_level")
            if level:  # or only its priority changed
                hashes = [_hash(data["block_hash"])]
                chained = window == self._window
                stored = BlocksStored(hashes, None, b"", 0, _LEVELS[level["new_value"]], None, None, window, chained)
                batch.events.append(stored)
                batch.events.append(BlocksRemoved(hashes, _LEVELS[level["old_value"]], window))
        else:
            return False
        return True

    def _follow(self, event_id: object, batch: Batch) -> None:
        if not isinstance(event_id, int) or batch.data_parallel_rank is None:
            return
        last = self._last_ids.get(batch.data_parallel_rank)
        self._last_ids[batch.data_parallel_rank] = event_id
        if last is not None and event_id != last + 1:
            self.gap_count += 1
            batch.events.append(BlocksCleared())

    def _read_stored(self, data: Mapping[str, Any], window: int, batch: Batch) -> None:
        """Blocks of one entry, in runs of one cache level."""
        chained = window == self._window
        parent = data.get("parent_hash")
        above = None if parent is None else _hash(parent)
        salt, lora = data.get("cache_salt"), data.get("lora_name")
        for block in data["blocks"]:
            tokens = [each["token_id"] for each in block["tokens"]]
            self._block_tokens = max(self._block_tokens, len(tokens))
            if len(tokens) < self._block_tokens:
                return
            extra: list[Any] = [[each["hash"], each.get("start_offset")] for each in block.get("mm_keys") or ()]
            extra += sorted({each["token_extra_id"] for each in block["tokens"] if each.get("token_extra_id")})
            if above is None and salt:
                extra.append(salt)
            tier, block_hash = _LEVELS[block.get("cache_level") or 0], _hash(block["block_hash"])
            last = batch.events[-1] if batch.events else None
            if (
                isinstance(last, BlocksStored)
                and last.hashes[-1:] == [above]
                and (last.tier, last.group_id, last.lora_name, last.block_tokens) == (tier, window, lora, len(tokens))
            ):
                extras = [*(last.extras or [None] * len(last.hashes)), extra or None]
                joined = last._replace(hashes=[*last.hashes, block_hash], tokens=last.tokens + token_bytes(tokens))
                batch.events[-1] = joined._replace(extras=extras if any(extras) else None)
            else:
                run = BlocksStored([block_hash], above, token_bytes(tokens), len(tokens), tier, lora)
                batch.events.append(run._replace(extras=[extra] if extra else None, group_id=window, chained=chained))
            above = block_hash
