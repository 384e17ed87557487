"""The prefix index by example: hits, LRU eviction block by block, corrections, bounds."""

from __future__ import annotations

import pytest

from router.blocks import BlockLadder
from router.prefix_index import BLOCK_BYTES, END_BYTES, PathNews, PrefixIndex

LADDER = BlockLadder.uniform(10, 1_000)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(LADDER)


def chain(name: int, length: int, shared: int = 0) -> list[int]:
    """A chain whose first `shared` blocks are everybody's."""
    return [100 + block for block in range(shared)] + [name * 1_000 + block for block in range(shared, length)]


def held(index: PrefixIndex, hashes: list[int], endpoint_id: str = "a") -> int:
    return index.holdings(endpoint_id).held_blocks(hashes)


def test_a_stored_chain_is_found_with_its_beginnings_and_extensions(index: PrefixIndex) -> None:
    index.store("a", chain(1, 10), 1, None)
    assert held(index, chain(1, 10)) == 10
    assert held(index, chain(1, 4)) == 4
    assert held(index, chain(1, 30)) == 10
    assert held(index, chain(2, 10)) == 0
    assert index.find(chain(1, 30), ("a", "b")) == {"a": 10, "b": 0}
    assert held(index, []) == 0


def test_store_reports_what_was_held_and_whether_a_prompt_is_continued(index: PrefixIndex) -> None:
    assert index.store("a", chain(1, 10, shared=6), 1, None) == (0, None)
    assert index.store("a", chain(1, 14, shared=6), 2, None) == (10, 1)  # a continued session
    assert index.store("a", chain(2, 10, shared=6), 3, None) == (6, None)  # only the shared prefix
    assert index.store("a", chain(2, 10, shared=6), 4, None) == (10, 3)  # the same prompt again


def test_the_least_recently_used_prompt_loses_its_tail_block_by_block(index: PrefixIndex) -> None:
    index.store("a", chain(1, 10), 1, 300)
    index.store("a", chain(2, 10), 2, 300)
    index.store("a", chain(1, 10), 3, 300)
    index.store("a", chain(3, 14), 4, 300)
    assert (held(index, chain(1, 10)), held(index, chain(2, 10)), held(index, chain(3, 14))) == (10, 6, 14)
    index.store("a", chain(4, 10), 5, 300)
    assert (held(index, chain(1, 10)), held(index, chain(2, 10)), held(index, chain(3, 14))) == (6, 0, 14)


def test_a_shared_prefix_outlives_the_sessions_that_were_evicted(index: PrefixIndex) -> None:
    for name in range(1, 9):
        index.store("a", chain(name, 10, shared=5), name, 200)
    assert held(index, chain(9, 10, shared=5)) == 5
    assert index.holdings("a").held_bytes <= 200
    assert held(index, chain(8, 10, shared=5)) == 10 and held(index, chain(1, 10, shared=5)) == 5


def test_a_prompt_larger_than_the_cache_keeps_what_fits(index: PrefixIndex) -> None:
    index.store("a", chain(1, 50), 1, 300)
    assert held(index, chain(1, 50)) == 30


def test_withdrawing_a_store_leaves_what_was_held_before(index: PrefixIndex) -> None:
    index.store("a", chain(1, 10), 1, None)
    index.store("a", chain(1, 20), 2, None)
    index.withdraw("a", chain(1, 20)[-1], 2)
    assert held(index, chain(1, 20)) == 10


def test_withdrawing_does_not_take_what_another_prompt_has_used_since(index: PrefixIndex) -> None:
    index.store("a", chain(1, 10), 1, None)
    index.store("a", chain(1, 10), 2, None)
    index.withdraw("a", chain(1, 10)[-1], 1)
    assert held(index, chain(1, 10)) == 10
    index.store("a", chain(1, 12), 3, None)
    index.withdraw("a", chain(1, 10)[-1], 2)
    assert held(index, chain(1, 12)) == 12


def test_forgetting_the_idle_keeps_what_was_used_later(index: PrefixIndex) -> None:
    for name in range(1, 6):
        index.store("a", chain(name, 10, shared=5), name, None)
    index.forget_idle("a", 3)
    assert [held(index, chain(name, 10, shared=5)) for name in range(1, 6)] == [5, 5, 5, 10, 10]


def test_forgetting_an_incarnation_leaves_nothing_and_frees_its_memory(index: PrefixIndex) -> None:
    index.store("a", chain(1, 10), 1, None)
    index.store("b", chain(1, 10), 1, None)
    index.forget("a")
    assert (held(index, chain(1, 10), "a"), held(index, chain(1, 10), "b")) == (0, 10)
    assert index.size_bytes == 10 * BLOCK_BYTES + END_BYTES
    index.forget("never seen")


def test_the_memory_bound_evicts_the_oldest_of_all_endpoints() -> None:
    index = PrefixIndex(LADDER, max_bytes=4 * (BLOCK_BYTES * 10 + END_BYTES))
    for stamp, (endpoint_id, name) in enumerate([("a", 1), ("b", 2), ("a", 3), ("b", 4), ("b", 2), ("c", 5)]):
        index.store(endpoint_id, chain(name, 10), stamp, None)
    assert index.size_bytes <= 4 * (BLOCK_BYTES * 10 + END_BYTES)
    assert held(index, chain(1, 10), "a") == 0
    assert [held(index, chain(name, 10), place) for place, name in (("a", 3), ("b", 4), ("b", 2), ("c", 5))] == [10] * 4


def test_unique_prompts_do_not_grow_the_index() -> None:
    # R20: 200,000 distinct prompts, counted in entries.
    index = PrefixIndex(LADDER, max_bytes=1_000_000)
    sizes = []
    for number in range(200_000):
        index.store("ab"[number & 1], chain(number + 1, 3), number, None)
        if number % 50_000 == 49_999:
            sizes.append((index.block_count, index.size_bytes))
    assert len(set(sizes)) == 1
    assert index.size_bytes <= 1_000_000
    assert held(index, chain(200_000, 3), "b") == 3


def test_a_siblings_news_continues_a_path_only_where_its_base_is_held(index: PrefixIndex) -> None:
    whole = chain(1, 10)
    tail = PathNews("a", whole[5], 6, whole[6:], 2)
    assert not index.learn(tail, None)
    assert index.block_count == 0
    assert index.learn(PathNews("a", 0, 0, whole[:6], 1), None)
    assert index.learn(tail, None)
    assert held(index, whole) == 10
    assert index.holdings("a").path(whole[-1]) == whole
    assert index.learn(PathNews("a", whole[-1], 10, (), 9), None)
    assert index.holdings("a").last_use_us(whole[-1]) == 9


def test_news_that_overlap_what_is_held_change_nothing_else(index: PrefixIndex) -> None:
    whole = chain(1, 10)
    index.store("a", whole[:8], 1, None)
    assert index.learn(PathNews("a", whole[2], 3, whole[3:], 2), None)
    assert held(index, whole) == 10 and index.holdings("a").held_bytes == 100


def test_leaves_are_the_ends_that_nothing_continues(index: PrefixIndex) -> None:
    for stamp, whole in enumerate((chain(1, 10), chain(2, 10), chain(1, 12))):
        index.store("a", whole, stamp, None)
    assert index.holdings("a").leaves() == [chain(2, 10)[-1], chain(1, 12)[-1]]


def test_old_news_do_not_make_a_path_look_unused(index: PrefixIndex) -> None:
    whole = chain(1, 10)
    index.store("a", whole, 9, None)
    assert index.learn(PathNews("a", 0, 0, whole, 3), None)
    assert index.holdings("a").last_use_us(whole[-1]) == 9
