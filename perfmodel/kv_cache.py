"""The KV block pool of one engine, as vLLM v1 keeps it.

Owns: physical blocks, their reference counts, the LRU queue of free blocks, the map from block hash to the blocks that
hold it, the lower tier that takes what is evicted, and the events that tell routers what is stored. Does not own: which
request runs or when (`scheduler`), what a token costs (`step_time`), or how events travel (`adapters.kv_publisher`).

Three things are easy to get wrong and are kept as the engine has them, because routers are tested against them:
  * one hash may live in several physical blocks (requests that computed the same prefix side by side), and every copy
    has its own BlockStored and BlockRemoved: a reader must count, not keep a set;
  * freeing keeps the contents. A block loses its hash only when it is handed out again, so free blocks are the cache;
  * a request's blocks are freed last one first, so the tail of a prefix is evicted before its head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from perfmodel.errors import BlockPoolError, ConfigError
from perfmodel.workload import TOKEN_BYTES

# Root of every hash chain. Any fixed value serves: engines differ in theirs, and readers must treat hashes as opaque.
_CHAIN_ROOT = sha256(b"inferplane simulated engine, kv block chain 1").digest()


@dataclass(frozen=True, slots=True)
class BlockStored:
    """`len(block_hashes)` consecutive full blocks of one sequence now hold these tokens.

    `parent_block_hash` is the hash of the block before the first one (None at the start of a prompt). `extra_keys` has
    one entry per block: the cache salt for the first block of a salted prompt, None elsewhere.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size_tokens: int
    extra_keys: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One physical copy of each of these hashes is gone. Other copies may remain."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset: no hash is held any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockHashChain:
    """The chained hashes of one sequence's full blocks: hash(parent, token ids, salt on the first block).

    `hashes[i]` is the low 64 bits of the i-th SHA-256 digest; the chain itself continues from the whole digest. Grows
    with the sequence, so a block is hashed once however often it is looked up.
    """

    __slots__ = ("_block_bytes", "_digest", "cache_salt", "hashes")

    def __init__(self, block_size_tokens: int, cache_salt: str | None = None) -> None:
        self._block_bytes = block_size_tokens * TOKEN_BYTES
        self._digest = _CHAIN_ROOT
        self.cache_salt = cache_salt
        self.hashes: list[int] = []

    def fork(self) -> BlockHashChain:
        """An independent copy: choices of one request share the prompt and then part."""
        twin = BlockHashChain(self._block_bytes // TOKEN_BYTES, self.cache_salt)
        twin._digest = self._digest
        twin.hashes = self.hashes.copy()
        return twin

    def extend(self, tokens: bytes | bytearray | memoryview) -> None:
        """Hash the full blocks of `tokens` (the whole sequence, TOKEN_BYTES each) that are not hashed yet."""
        width = self._block_bytes
        start = len(self.hashes) * width
        end = len(tokens) // width * width
        if end <= start:
            return
        view = bytes(memoryview(tokens)[start:end])
        digest = self._digest
        digests: list[bytes] = []
        offset = 0
        if start == 0 and self.cache_salt is not None:
            digest = sha256(digest + view[:width] + self.cache_salt.encode()).digest()
            digests.append(digest)
            offset = width
        for at in range(offset, end - start, width):
            digest = sha256(digest + view[at : at + width]).digest()
            digests.append(digest)
        self._digest = digest
        # A digest is four big-endian 64-bit words; the last one is its low 64 bits.
        self.hashes.extend(np.frombuffer(b"".join(digests), dtype=">u8")[3::4].tolist())


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order. `stored_count` of them are full and published under their hash.

    Mutable: it grows with its sequence, and the pool changes it in place.
    """

    blocks: list[int] = field(default_factory=list)
    stored_count: int = 0


class BlockPool:
    """`block_count` physical blocks of `block_size_tokens` tokens. Block 0 is the null block and never handed out.

    The last copy of a hash that is evicted goes to a lower tier of `tier_block_count` blocks, in place of the one there
    that was used longest ago. What the lower tier holds is not told in events.
    """

    def __init__(
        self,
        block_count: int,
        block_size_tokens: int,
        *,
        prefix_caching: bool = True,
        record_events: bool = True,
        tier_block_count: int = 0,
    ) -> None:
        if block_count < 2:
            raise ConfigError(f"block_count is {block_count}; expected at least 2 (block 0 is the null block)")
        if block_size_tokens < 1:
            raise ConfigError(f"block_size_tokens is {block_size_tokens}; expected at least 1")
        self.block_size_tokens = block_size_tokens
        self.usable_block_count = block_count - 1
        self._prefix_caching = prefix_caching
        self._record_events = record_events
        self._reference_counts = [0] * block_count
        self._hash_of_block: list[int | None] = [None] * block_count
        # hash -> its physical copies in the order they were stored; a lookup takes the oldest, as the engine does.
        self._copies: dict[int, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, block_count))
        self._events: list[KvEvent] = []
        self._tier_block_count = tier_block_count
        self._tier: OrderedDict[int, None] = OrderedDict()
        self._arrives_s: dict[int, float] = {}
        """Blocks whose contents come, or came, from the lower tier -> when."""

    @property
    def free_block_count(self) -> int:
        """Blocks that no sequence holds, cached or not."""
        return len(self._free)

    @property
    def used_block_count(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.usable_block_count - len(self._free)

    @property
    def usage_ratio(self) -> float:
        """vLLM's `kv_cache_usage_perc`: referenced blocks over usable ones; cached but free blocks do not count."""
        return self.used_block_count / self.usable_block_count

    @property
    def cached_hash_count(self) -> int:
        """Distinct hashes a new prompt could hit."""
        return len(self._copies)

    def reference_count(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._reference_counts[block]

    def cached_copies(self) -> dict[int, tuple[int, ...]]:
        """hash -> physical blocks that hold it, oldest first (a copy, for tests and reports)."""
        return {block_hash: tuple(copies) for block_hash, copies in self._copies.items()}

    def free_blocks(self) -> tuple[int, ...]:
        """The free queue, next to be handed out first (a copy, for tests and reports)."""
        return tuple(self._free)

    def blocks_for(self, token_count: int) -> int:
        """Blocks that hold `token_count` tokens."""
        return -(-token_count // self.block_size_tokens)

    def find_hit(self, hashes: Sequence[int], token_count: int) -> list[int]:
        """The blocks of the longest cached prefix of a sequence of `token_count` tokens with these chain hashes.

        The last token is always computed anew (its logits are needed), so at most (token_count - 1) // block size
        blocks.
        """
        if not self._prefix_caching:
            return []
        hit: list[int] = []
        copies_of = self._copies
        for block_hash in hashes[: max(0, token_count - 1) // self.block_size_tokens]:
            copies = copies_of.get(block_hash)
            if copies is None:
                break
            hit.append(next(iter(copies)))
        return hit

    def find_in_tier(self, hashes: Sequence[int], start: int, token_count: int) -> int:
        """How many blocks after the first `start` of such a sequence the lower tier has; they count as used now."""
        place = start
        if self._tier_block_count:
            limit = max(0, token_count - 1) // self.block_size_tokens
            while place < min(limit, len(hashes)) and hashes[place] in self._tier:
                self._tier.move_to_end(hashes[place])
                place += 1
        return place - start

    def arrive(self, blocks: Iterable[int], at_s: float) -> None:
        """The contents of `blocks` come from the lower tier at `at_s`, whoever still waits for them then."""
        self._arrives_s.update(dict.fromkeys(blocks, at_s))

    def arrived_s(self, blocks: Iterable[int]) -> float:
        """When the contents of all of `blocks` are there; 0: they were computed here."""
        return max((self._arrives_s.get(block, 0.0) for block in blocks), default=0.0)

    def blocks_taken(self, hit: Iterable[int], table: BlockTable, token_count: int) -> int:
        """How far the free queue shrinks if a sequence takes `hit` and grows to `token_count` tokens."""
        counts = self._reference_counts
        hits = list(hit)
        new = max(0, self.blocks_for(token_count) - len(table.blocks) - len(hits))
        return new + sum(1 for block in hits if counts[block] == 0)

    def share(self, table: BlockTable, hit: Sequence[int]) -> None:
        """Start `table` with the cached blocks `hit`: each gains one holder and leaves the free queue."""
        if table.blocks:
            raise BlockPoolError("share: the table already has blocks; a hit can only be a prefix")
        counts = self._reference_counts
        for block in hit:
            if counts[block] == 0:
                del self._free[block]
            counts[block] += 1
        table.blocks.extend(hit)
        table.stored_count = len(hit)

    def grow(self, table: BlockTable, token_count: int) -> bool:
        """Give `table` room for `token_count` tokens. False, and nothing changed, when too few blocks are free."""
        wanted = self.blocks_for(token_count) - len(table.blocks)
        if wanted <= 0:
            return True
        free = self._free
        if wanted > len(free):
            return False
        for _ in range(wanted):
            block, _none = free.popitem(last=False)
            self._forget(block)
            self._arrives_s.pop(block, None)
            self._reference_counts[block] = 1
            table.blocks.append(block)
        return True

    def store(self, table: BlockTable, chain: BlockHashChain, tokens: bytes | bytearray, token_count: int) -> None:
        """Publish the blocks of `table` that are full once `token_count` tokens of `tokens` are computed."""
        full = token_count // self.block_size_tokens
        first = table.stored_count
        if full <= first or not self._prefix_caching:
            return
        new_hashes = chain.hashes[first:full]
        for block, block_hash in zip(table.blocks[first:full], new_hashes, strict=True):
            if self._hash_of_block[block] is not None:
                raise BlockPoolError(f"store: block {block} already holds a hash")
            self._hash_of_block[block] = block_hash
            self._copies.setdefault(block_hash, {})[block] = None
        table.stored_count = full
        if self._record_events:
            self._events.append(self._stored_event(chain, tokens, first, full))

    def release(self, table: BlockTable) -> None:
        """Drop the sequence's hold on its blocks; those nobody else holds become free, tail first.

        A block without a hash is worth nothing to anybody, so it goes to the front of the queue (vLLM 0.32: the
        recording evicts nothing while such a block is left).
        """
        counts = self._reference_counts
        free = self._free
        for block in reversed(table.blocks):
            if counts[block] < 1:
                raise BlockPoolError(f"release: block {block} is not held")
            counts[block] -= 1
            if counts[block] == 0:
                free[block] = None
                if self._prefix_caching and self._hash_of_block[block] is None:
                    free.move_to_end(block, last=False)
        table.blocks.clear()
        table.stored_count = 0

    def reset(self) -> bool:
        """Forget every hash. False, and nothing changed, while a sequence holds blocks (vLLM refuses too)."""
        if self.used_block_count:
            return False
        self._copies.clear()
        self._tier.clear()
        self._hash_of_block = [None] * len(self._hash_of_block)
        if self._record_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> tuple[KvEvent, ...]:
        """The events since the last call, oldest first."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of_block[block]
        if block_hash is None:
            return
        self._hash_of_block[block] = None
        copies = self._copies[block_hash]
        del copies[block]
        if not copies:
            del self._copies[block_hash]
            self._put_in_tier(block_hash)
        if self._record_events:
            self._events.append(BlockRemoved((block_hash,)))

    def _put_in_tier(self, block_hash: int) -> None:
        if not self._tier_block_count:
            return
        self._tier[block_hash] = None
        self._tier.move_to_end(block_hash)
        if len(self._tier) > self._tier_block_count:
            self._tier.popitem(last=False)

    def _stored_event(self, chain: BlockHashChain, tokens: bytes | bytearray, first: int, full: int) -> BlockStored:
        width = self.block_size_tokens * TOKEN_BYTES
        ids = np.frombuffer(bytes(memoryview(tokens)[first * width : full * width]), dtype="<u4")
        salted = first == 0 and chain.cache_salt is not None
        head: tuple[tuple[str, ...] | None, ...] = ((str(chain.cache_salt),),) if salted else (None,)
        return BlockStored(
            block_hashes=tuple(chain.hashes[first:full]),
            parent_block_hash=chain.hashes[first - 1] if first else None,
            token_ids=tuple(ids.tolist()),
            block_size_tokens=self.block_size_tokens,
            extra_keys=head + (None,) * (full - first - 1),
        )
