"""The block pool's rules one by one: order of eviction, duplicates, salts, what is refused."""

from __future__ import annotations

from hashlib import sha256

import pytest

from perfmodel.errors import BlockPoolError, ConfigError
from perfmodel.kv_cache import AllBlocksCleared, BlockHashChain, BlockPool, BlockRemoved, BlockStored, BlockTable
from perfmodel.workload import token_bytes


def stored(pool: BlockPool, tokens: list[int], salt: str | None = None) -> BlockTable:
    """A table that holds `tokens`, computed and published."""
    chain = chain_of(pool, tokens, salt)
    table = BlockTable()
    pool.share(table, pool.find_hit(chain.hashes, len(tokens)))
    assert pool.grow(table, len(tokens))
    pool.store(table, chain, token_bytes(tokens), len(tokens))
    return table


def chain_of(pool: BlockPool, tokens: list[int], salt: str | None = None) -> BlockHashChain:
    chain = BlockHashChain(pool.block_size_tokens, salt)
    chain.extend(token_bytes(tokens))
    return chain


def hit_length(pool: BlockPool, tokens: list[int], salt: str | None = None) -> int:
    return len(pool.find_hit(chain_of(pool, tokens, salt).hashes, len(tokens)))


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(96, 32)
    table = BlockTable()
    assert pool.usable_block_count == 95
    assert pool.grow(table, 95 * 32)
    assert sorted(table.blocks) == list(range(1, 96))
    assert not pool.grow(BlockTable(), 1)


def test_a_hash_is_the_low_64_bits_of_a_sha256_chain_over_parent_tokens_and_salt() -> None:
    chain = BlockHashChain(2, "tenant-a")
    chain.extend(token_bytes([1, 2, 3, 4, 5]))
    root = sha256(b"inferplane simulated engine, kv block chain 1").digest()
    first = sha256(root + token_bytes([1, 2]) + b"tenant-a").digest()
    second = sha256(first + token_bytes([3, 4])).digest()
    assert chain.hashes == [int.from_bytes(digest[-8:], "big") for digest in (first, second)]


def test_the_last_token_is_always_computed_again() -> None:
    pool = BlockPool(9, 2)
    pool.release(stored(pool, [1, 2, 3, 4]))
    assert hit_length(pool, [1, 2, 3, 4]) == 1
    assert hit_length(pool, [1, 2, 3, 4, 5]) == 2
    assert hit_length(pool, [1]) == 0


def test_a_prefix_is_evicted_from_its_tail() -> None:
    pool = BlockPool(5, 2)
    pool.release(stored(pool, [1, 2, 3, 4, 5, 6]))
    table = BlockTable()
    assert pool.grow(table, 4)  # one never used block, one eviction
    assert hit_length(pool, [1, 2, 3, 4, 5, 6, 7]) == 2


def test_a_block_without_a_hash_is_reused_before_any_cached_one() -> None:
    pool = BlockPool(4, 2)
    pool.release(stored(pool, [1, 2, 3, 4]))
    pool.release(stored(pool, [9]))
    reused = BlockTable()
    assert pool.grow(reused, 2)
    assert hit_length(pool, [1, 2, 3, 4, 5]) == 2


def test_the_least_recently_freed_prefix_goes_first() -> None:
    pool = BlockPool(5, 2)
    pool.release(stored(pool, [1, 2, 3, 4]))
    pool.release(stored(pool, [5, 6, 7, 8]))
    touched = BlockTable()
    pool.share(touched, pool.find_hit(chain_of(pool, [1, 2, 3, 4, 0]).hashes, 5))
    pool.release(touched)
    assert pool.grow(BlockTable(), 4)
    assert hit_length(pool, [1, 2, 3, 4, 0]) == 2
    assert hit_length(pool, [5, 6, 7, 8, 0]) == 0


def test_copies_computed_side_by_side_are_told_and_removed_one_by_one() -> None:
    pool = BlockPool(3, 2)
    tables = [BlockTable(), BlockTable()]
    for table in tables:  # both started before either was cached
        assert pool.grow(table, 2)
    for table in tables:
        pool.store(table, chain_of(pool, [1, 2]), token_bytes([1, 2]), 2)
    assert len(pool.take_events()) == 2
    assert pool.cached_hash_count == 1
    for table in tables:
        pool.release(table)
    assert pool.grow(BlockTable(), 2)
    assert [type(event) for event in pool.take_events()] == [BlockRemoved]
    assert hit_length(pool, [1, 2, 3]) == 1


def test_a_stored_event_carries_parent_tokens_and_the_salt_of_the_first_block() -> None:
    pool = BlockPool(9, 2)
    chain = chain_of(pool, [1, 2, 3, 4, 5, 6], "tenant-a")
    table = BlockTable()
    tokens = token_bytes([1, 2, 3, 4, 5, 6])
    assert pool.grow(table, 6)
    pool.store(table, chain, tokens, 4)
    pool.store(table, chain, tokens, 6)
    assert pool.take_events() == (
        BlockStored(tuple(chain.hashes[:2]), None, (1, 2, 3, 4), 2, (("tenant-a",), None)),
        BlockStored((chain.hashes[2],), chain.hashes[1], (5, 6), 2, (None,)),
    )


def test_salts_keep_tenants_apart() -> None:
    pool = BlockPool(9, 2)
    stored(pool, [1, 2, 3, 4], "a")
    assert hit_length(pool, [1, 2, 3, 4, 5], "a") == 2
    assert hit_length(pool, [1, 2, 3, 4, 5], "b") == 0
    assert hit_length(pool, [1, 2, 3, 4, 5]) == 0


def test_a_reset_clears_the_cache_but_not_under_a_running_sequence() -> None:
    pool = BlockPool(9, 2)
    table = stored(pool, [1, 2, 3])
    assert not pool.reset()
    pool.release(table)
    pool.take_events()
    assert pool.reset()
    assert pool.take_events() == (AllBlocksCleared(),)
    assert hit_length(pool, [1, 2, 3]) == 0
    assert pool.grow(BlockTable(), 16)
    assert pool.take_events() == ()


def test_usage_counts_held_blocks_only() -> None:
    pool = BlockPool(5, 2)
    table = stored(pool, [1, 2, 3])
    assert pool.usage_ratio == 0.5
    pool.release(table)
    assert pool.usage_ratio == 0.0
    assert pool.cached_hash_count == 1


def test_without_prefix_caching_nothing_is_hit_or_told() -> None:
    pool = BlockPool(9, 2, prefix_caching=False)
    pool.release(stored(pool, [1, 2, 3, 4]))
    assert hit_length(pool, [1, 2, 3, 4, 5]) == 0
    assert pool.take_events() == ()


def test_misuse_is_a_fault() -> None:
    pool = BlockPool(9, 2)
    table = stored(pool, [1, 2, 3, 4])
    with pytest.raises(BlockPoolError, match="already has blocks"):
        pool.share(table, table.blocks)
    twin = BlockTable(blocks=table.blocks.copy())
    pool.release(table)
    with pytest.raises(BlockPoolError, match="not held"):
        pool.release(twin)


@pytest.mark.parametrize(("count", "size"), [(1, 16), (0, 16), (8, 0)])
def test_impossible_sizes_are_refused(count: int, size: int) -> None:
    with pytest.raises(ConfigError, match="expected at least"):
        BlockPool(count, size)
