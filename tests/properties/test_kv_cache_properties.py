"""Properties of the KV block pool under any order of operations, each shown to fail on a planted fault.

A driver plays admissions (with hits), growth, releases and resets on a pool, and keeps its own record of what every
physical block holds: the salt and the whole token prefix, known from who got which block, never from the pool's hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel.errors import BlockPoolError
from perfmodel.kv_cache import (
    AllBlocksCleared,
    BlockHashChain,
    BlockPool,
    BlockRemoved,
    BlockStored,
    BlockTable,
    KvEvent,
)
from perfmodel.workload import token_bytes
from tests.exploring import examples

BLOCK_COUNT = 9
BLOCK_SIZE_TOKENS = 2

Prefix = tuple[str | None, tuple[int, ...]]


@dataclass
class Holder:
    """One sequence as the driver sees it."""

    salt: str | None
    tokens: list[int]
    chain: BlockHashChain
    table: BlockTable = field(default_factory=BlockTable)


class Driver:
    """Plays operations on a pool and checks every promise after each."""

    def __init__(self, pool: BlockPool, new_chain: Callable[[int, str | None], BlockHashChain]) -> None:
        self.pool = pool
        self.new_chain = new_chain
        self.holders: list[Holder] = []
        self.contents: dict[int, Prefix] = {}
        self.index: Counter[int] = Counter()  # what a router knows: hash -> copies

    def admit(self, salt: str | None, tokens: list[int]) -> None:
        holder = Holder(salt, tokens, self.new_chain(BLOCK_SIZE_TOKENS, salt))
        holder.chain.extend(token_bytes(tokens))
        hit = self.pool.find_hit(holder.chain.hashes, len(tokens))
        assert len(hit) == self.longest_prefix(holder), "a hit is the longest cached prefix without the last token"
        for position, block in enumerate(hit):
            assert self.contents[block] == prefix_of(holder, position), "a hit block holds the prefix it is hit for"
        if self.pool.blocks_taken(hit, holder.table, len(tokens)) > self.pool.free_block_count:
            return
        self.pool.share(holder.table, hit)
        assert self.pool.grow(holder.table, len(tokens)), "blocks_taken said that it fits"
        self.holders.append(holder)
        self.publish(holder, known=len(hit))

    def extend(self, which: int, tokens: list[int]) -> None:
        if not self.holders:
            return
        holder = self.holders[which % len(self.holders)]
        known = len(holder.table.blocks)
        if not self.pool.grow(holder.table, len(holder.tokens) + len(tokens)):
            assert len(holder.table.blocks) == known, "a refused growth changes nothing"
            return
        full = len(holder.tokens) // BLOCK_SIZE_TOKENS
        holder.tokens += tokens
        holder.chain.extend(token_bytes(holder.tokens))
        self.publish(holder, known=full)

    def publish(self, holder: Holder, known: int) -> None:
        """Store what is full from block `known` on, after forgetting what the fresh blocks held before."""
        held_elsewhere = Counter(block for other in self.holders for block in other.table.blocks)
        for position in range(known, len(holder.table.blocks)):
            block = holder.table.blocks[position]
            assert held_elsewhere[block] == 1, "a fresh block has one holder"
            self.contents.pop(block, None)
        self.pool.store(holder.table, holder.chain, token_bytes(holder.tokens), len(holder.tokens))
        for position in range(known, len(holder.tokens) // BLOCK_SIZE_TOKENS):
            self.contents[holder.table.blocks[position]] = prefix_of(holder, position)

    def release(self, which: int) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(which % len(self.holders)).table)

    def reset(self) -> None:
        assert self.pool.reset() is (not self.holders), "a reset is refused while blocks are held, and only then"
        if not self.holders:
            self.contents.clear()

    def longest_prefix(self, holder: Holder) -> int:
        """By brute force over what the blocks hold."""
        cached = set(self.contents.values())
        length = 0
        while (length + 1) * BLOCK_SIZE_TOKENS < len(holder.tokens) and prefix_of(holder, length) in cached:
            length += 1
        return length

    def check(self) -> None:
        holders = Counter(block for holder in self.holders for block in holder.table.blocks)
        free = self.pool.free_blocks()
        assert len(set(free)) == len(free), "a block is free once"
        assert 0 not in free, "the null block is never handed out"
        assert 0 not in holders, "the null block is never handed out"
        assert not set(free) & set(holders), "no block is both free and held"
        assert len(free) + len(holders) == BLOCK_COUNT - 1, "no block is lost or made up"
        for block in range(1, BLOCK_COUNT):
            assert self.pool.reference_count(block) == holders[block], "the count of holders is right"
        for event in self.pool.take_events():
            self.replay(event)
        copies = {block_hash: len(blocks) for block_hash, blocks in self.pool.cached_copies().items()}
        assert +self.index == copies, "events replayed by a counting reader give the pool's content"
        assert min(self.index.values(), default=0) >= 0, "nothing is removed that was not stored"
        cached_blocks = {block for blocks in self.pool.cached_copies().values() for block in blocks}
        assert cached_blocks == set(self.contents), "what is cached is what was stored and not handed out since"

    def replay(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.index.clear()
        elif isinstance(event, BlockStored):
            assert len(event.token_ids) == len(event.block_hashes) * BLOCK_SIZE_TOKENS
            assert len(event.extra_keys) == len(event.block_hashes)
            self.index.update(event.block_hashes)
        else:
            self.index.subtract(event.block_hashes)


def prefix_of(holder: Holder, position: int) -> Prefix:
    return holder.salt, tuple(holder.tokens[: (position + 1) * BLOCK_SIZE_TOKENS])


tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=9)
operation = st.one_of(
    st.tuples(st.just("admit"), st.sampled_from([None, "a", "b"]), tokens_strategy),
    st.tuples(st.just("extend"), st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1, max_size=5)),
    st.tuples(st.just("release"), st.integers(0, 5)),
    st.tuples(st.just("reset")),
)
Operations = Sequence[tuple[str, ...]]


def play(operations: Operations, driver: Driver) -> None:
    for name, *arguments in operations:
        getattr(driver, name)(*arguments)
        driver.check()


@given(st.lists(operation, max_size=40))
@settings(max_examples=examples(300), deadline=None)
def test_the_pool_keeps_its_promises(operations: Operations) -> None:
    play(operations, Driver(BlockPool(BLOCK_COUNT, BLOCK_SIZE_TOKENS), BlockHashChain))


class CountsFirstHolderOnly(BlockPool):
    def share(self, table: BlockTable, hit: Sequence[int]) -> None:
        super().share(table, hit)
        for block in hit:
            self._reference_counts[block] = 1


class LeavesHitsInTheFreeQueue(BlockPool):
    def share(self, table: BlockTable, hit: Sequence[int]) -> None:
        super().share(table, hit)
        for block in hit:
            self._free[block] = None


class HitsTheLastToken(BlockPool):
    def find_hit(self, hashes: Sequence[int], token_count: int) -> list[int]:
        return super().find_hit(hashes, token_count + 1)


class HitsOneBlockLess(BlockPool):
    def find_hit(self, hashes: Sequence[int], token_count: int) -> list[int]:
        return super().find_hit(hashes, token_count)[:-1]


class ForgetsToTellRemovals(BlockPool):
    def take_events(self) -> tuple[KvEvent, ...]:
        return tuple(event for event in super().take_events() if not isinstance(event, BlockRemoved))


class TellsEachHashOnce(BlockPool):
    def take_events(self) -> tuple[KvEvent, ...]:
        return tuple(dict.fromkeys(super().take_events()))


class LosesABlock(BlockPool):
    def release(self, table: BlockTable) -> None:
        super().release(table)
        if len(self._free) == self.usable_block_count:
            self._free.popitem()


class FreesHeldBlocks(BlockPool):
    def release(self, table: BlockTable) -> None:
        blocks = list(table.blocks)
        super().release(table)
        for block in blocks:
            self._free[block] = None


class KeepsTheOldHash(BlockPool):
    """A handed-out block stays in the map under what it held before."""

    def _forget(self, block: int) -> None:
        old_hash = self._hash_of_block[block]
        super()._forget(block)
        if old_hash is not None:
            self._copies.setdefault(old_hash, {})[block] = None


class ResetsWhileHeld(BlockPool):
    def reset(self) -> bool:
        return super().reset() or True


class UnsaltedChain(BlockHashChain):
    def __init__(self, block_size_tokens: int, cache_salt: str | None = None) -> None:
        super().__init__(block_size_tokens, None)


class ParentlessChain(BlockHashChain):
    """Each block's hash is of its own tokens only."""

    def extend(self, tokens: bytes | bytearray | memoryview) -> None:
        width = BLOCK_SIZE_TOKENS * 4
        for start in range(len(self.hashes) * width, len(tokens) // width * width, width):
            alone = BlockHashChain(BLOCK_SIZE_TOKENS, self.cache_salt)
            alone.extend(tokens[start : start + width])
            self.hashes += alone.hashes


FAULTS: list[tuple[type[BlockPool], type[BlockHashChain]]] = [
    (CountsFirstHolderOnly, BlockHashChain),
    (LeavesHitsInTheFreeQueue, BlockHashChain),
    (HitsTheLastToken, BlockHashChain),
    (HitsOneBlockLess, BlockHashChain),
    (ForgetsToTellRemovals, BlockHashChain),
    (TellsEachHashOnce, BlockHashChain),
    (LosesABlock, BlockHashChain),
    (FreesHeldBlocks, BlockHashChain),
    (KeepsTheOldHash, BlockHashChain),
    (ResetsWhileHeld, BlockHashChain),
    (BlockPool, UnsaltedChain),
    (BlockPool, ParentlessChain),
]


@pytest.mark.parametrize(("pool_type", "chain_type"), FAULTS, ids=lambda kind: str(kind.__name__))
def test_a_planted_fault_is_caught(pool_type: type[BlockPool], chain_type: type[BlockHashChain]) -> None:
    @given(st.lists(operation, max_size=40))
    @settings(
        max_examples=1000, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def search(operations: Operations) -> None:
        play(operations, Driver(pool_type(BLOCK_COUNT, BLOCK_SIZE_TOKENS), chain_type))

    with pytest.raises((AssertionError, BlockPoolError, KeyError)):
        search()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(1, 8), max_size=10), st.integers(1, 5))
def test_a_chain_grown_in_pieces_is_the_chain_of_the_whole(tokens: list[int], cuts: list[int], block: int) -> None:
    whole = BlockHashChain(block, "salt")
    whole.extend(token_bytes(tokens))
    pieces = BlockHashChain(block, "salt")
    end = 0
    for cut in cuts:
        end = min(len(tokens), end + cut)
        pieces.extend(token_bytes(tokens[:end]))
    fork = pieces.fork()
    fork.extend(token_bytes(tokens))
    assert fork.hashes == whole.hashes
    assert fork.hashes[: len(pieces.hashes)] == pieces.hashes
    assert len(whole.hashes) == len(tokens) // block
