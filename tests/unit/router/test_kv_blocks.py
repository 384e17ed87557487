"""The rows of the exact index in bulk: a full index promises nothing that nobody holds, and what it counts and weighs
is what is there.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from router import kv_blocks
from router.kv_blocks import SLICE_BLOCKS, BlockRows, Named, Part
from router.kv_events import Tier
from router.kv_holders import NO_ROW
from router.kv_table import Values

ANYONE = np.uint64(0xABCDEF)
SMALL_BYTES = 2 * 2**20


def chain(seed: int, count: int) -> Values:
    """Keys of a chain; aliases are the same bits turned."""
    return np.random.default_rng(seed).integers(1, 2**64, count, dtype=np.uint64)


def named(keys: Values, turn: int = 0) -> Named:
    return Named(keys, keys ^ ANYONE ^ np.uint64(turn << 8))


def held(blocks: BlockRows, keys: Values, seat: int) -> int:
    """Blocks of the chain that the seat holds, from its start."""
    count = 0
    for numbers in blocks.runs(keys):
        for number in numbers.tolist():
            if not blocks.sets.seats[number] >> seat & 1:
                return count
            count += 1
    return count


def recount(blocks: BlockRows) -> None:
    """What is counted as it changes is what a count of everything finds."""
    sets = blocks.sets
    top = blocks._rows.top
    numbers = Counter(blocks._holders[:top].tolist())
    assert blocks.count == top - numbers[NO_ROW] == top - int((blocks._keys[:top] == 0).sum())
    for seat in blocks.live:
        assert blocks.live[seat] == sets.live_blocks(seat)
        further = sum(sum(rows.values()) for place, rows in blocks._copies.items() if place >> 2 == seat)
        assert blocks.copies[seat] == further + sum(sets.live_blocks(seat, tier) for tier in Tier)
    assert sum(sets.worth_rows) == blocks.count
    assert blocks._copies_count == sum(map(len, blocks._copies.values()))


def seats(blocks: BlockRows, count: int) -> BlockRows:
    for seat in range(count):
        blocks.add_seat(seat)
    return blocks


@pytest.mark.parametrize("few", [True, False])
def test_long_chains_of_many_seats_are_found_whole(few: bool) -> None:
    blocks = seats(BlockRows(8 * 2**20), 4)
    chains = [chain(seed, 5_000) for seed in range(8)]
    for number, keys in enumerate(chains):
        for start in range(0, 5_000, 700):
            part = named(keys[start : start + 700])
            above = blocks.find(int(named(keys).aliases[start - 1])) if start else None
            parts = [Part(0, above[0] if above else -1)]
            if few:
                pairs = list(zip(part.keys.tolist(), part.aliases.tolist(), strict=True))
                assert not blocks.store_few(number % 4, Tier.DEVICE, pairs, parts)
            else:
                assert not blocks.store(number % 4, Tier.DEVICE, part, parts)
    for number, keys in enumerate(chains):
        assert [held(blocks, keys, seat) for seat in range(4)] == [5_000 * (seat == number % 4) for seat in range(4)]
    recount(blocks)


def test_chains_that_grow_block_by_block_lie_in_few_stretches() -> None:
    blocks = seats(BlockRows(8 * 2**20), 1)
    chains = [chain(seed, 2_000) for seed in range(16)]
    for block in range(2_000):
        for keys in chains:
            above = blocks.find(int(named(keys).aliases[block - 1])) if block else None
            pair = (int(keys[block]), int(named(keys).aliases[block]))
            blocks.store_few(0, Tier.DEVICE, [pair], [Part(0, above[0] if above else -1)])
    for keys in chains:
        stretches = [len(numbers) for numbers in blocks.runs(keys)]
        assert sum(stretches) == 2_000 and len(stretches) < 40
    assert blocks._rows.top < 32_000 * 1.25
    recount(blocks)


def test_every_hole_ends_a_prefix_wherever_it_is() -> None:
    blocks = seats(BlockRows(8 * 2**20), 2)
    keys = chain(1, 3_000)
    blocks.store(0, Tier.DEVICE, named(keys))
    blocks.store(1, Tier.DEVICE, named(keys))
    for hole in (2_999, 2_000, 1_999, 700, 257, 256, 8, 1, 0):
        assert not blocks.remove(0, Tier.DEVICE, named(keys).aliases[hole : hole + 1])
        assert held(blocks, keys, 0) == hole and held(blocks, keys, 1) == 3_000


def test_a_full_index_promises_nothing_that_is_not_held_and_stays_in_its_bound() -> None:
    blocks = seats(BlockRows(SMALL_BYTES), 6)
    dice = np.random.default_rng(5)
    model: dict[int, Counter[int]] = {seat: Counter() for seat in range(6)}
    chains = [chain(seed, 1_500) for seed in range(120)]
    for _ in range(400):
        seat, keys = int(dice.integers(6)), chains[int(dice.integers(len(chains)))]
        start = int(dice.integers(0, 1_400)) * int(dice.integers(2))
        count = int(dice.choice([3, 40, 600, 1_500]))
        part = named(keys[start : start + count], turn=seat % 2)
        tier = Tier(int(dice.choice([0, 0, 1])))
        if dice.random() < 0.85:
            blocks.store(seat, tier, part)
            model[seat].update(keys[start : start + count].tolist())
        elif dice.random() < 0.9:
            blocks.remove(seat, tier, part.aliases)  # what the model keeps is more than what is held
        else:
            blocks.clear_seat(seat)
            model[seat].clear()
        assert blocks.size_bytes <= SMALL_BYTES
    recount(blocks)
    totals = 0
    for seat, keys in [(seat, keys) for seat in range(6) for keys in chains]:
        count = held(blocks, keys, seat)
        totals += count
        assert all(model[seat][key] for key in keys[:count].tolist())
    assert totals > 1_000 and blocks.dropped_held and blocks.dropped_ghosts and blocks.second_count


def test_unheld_blocks_go_first_then_slow_single_ones_then_shared() -> None:
    blocks = seats(BlockRows(SMALL_BYTES), 2)
    size = blocks.capacity // 4
    unheld, slow, fast, shared = (chain(seed, size - 300) for seed in range(4))
    blocks.store(0, Tier.DEVICE, named(unheld))
    blocks.remove(0, Tier.DEVICE, named(unheld).aliases)
    blocks.store(0, Tier.HOST, named(slow))
    blocks.store(0, Tier.DEVICE, named(fast))
    for seat in range(2):
        blocks.store(seat, Tier.DEVICE, named(shared))
    more = [chain(10 + number, size - 300) for number in range(3)]
    known = (unheld, slow, fast, shared)
    for keys, gone in zip(more, (0, 1, 2), strict=True):
        blocks.store(1, Tier.DEVICE, named(keys))
        blocks.store(0, Tier.DEVICE, named(keys))
        left = [int((blocks._by_key.find_many(each) >= 0).sum()) for each in known]
        assert min(left[gone + 1 :]) >= size - 300 - 2 * SLICE_BLOCKS, "the next ones are hardly touched"
        assert left[3] == size - 300 and left[gone] < SLICE_BLOCKS
    assert blocks.dropped_ghosts == size - 300 and blocks.dropped_held > size


def test_further_hashes_of_a_block_lead_to_it_and_go_with_it() -> None:
    blocks = seats(BlockRows(SMALL_BYTES), 3)
    keys = chain(1, 500)
    for seat in range(3):
        assert not blocks.store(seat, Tier.DEVICE, named(keys, turn=seat))
    assert blocks.count == 500 and blocks.second_count == 1_000
    assert not blocks.remove(1, Tier.DEVICE, named(keys, turn=1).aliases)
    assert [held(blocks, keys, seat) for seat in range(3)] == [500, 0, 500]
    assert blocks.remove(1, Tier.DEVICE, named(keys, turn=1).aliases) == 500, "it does not hold them any more"
    for seat in range(3):
        blocks.clear_seat(seat)
    for seed in range(100, 100 + blocks.capacity // 1_000 + 2):
        blocks.store(0, Tier.DEVICE, named(chain(seed, 1_000)))
    assert blocks.second_count == 0 and blocks.find(int(named(keys, turn=2).aliases[0])) is None


def test_a_hash_that_names_two_blocks_is_refused() -> None:
    blocks = seats(BlockRows(SMALL_BYTES), 1)
    keys, others = chain(1, 40), chain(2, 40)
    blocks.store(0, Tier.DEVICE, named(keys))
    assert blocks.store(0, Tier.DEVICE, Named(others, named(keys).aliases)) == 40
    pairs = list(zip(others.tolist(), named(keys).aliases.tolist(), strict=True))
    assert blocks.store_few(0, Tier.DEVICE, pairs, [Part(0, -1)]) == 40
    assert held(blocks, keys, 0) == 40 and held(blocks, others, 0) == 0


def test_a_block_named_twice_in_a_batch_is_two_copies() -> None:
    blocks = seats(BlockRows(SMALL_BYTES), 1)
    keys = chain(1, 10)
    twice = np.concatenate([keys, keys])
    names = np.concatenate([named(keys).aliases, named(keys, turn=3).aliases])
    assert not blocks.store(0, Tier.DEVICE, Named(twice, names))
    assert (blocks.live[0], blocks.copies[0]) == (10, 20)
    assert not blocks.remove(0, Tier.DEVICE, names) and blocks.live[0] == blocks.copies[0] == 0
    assert not blocks.store_known(0, Tier.HOST, names) and blocks.copies[0] == 20
    recount(blocks)


def test_where_there_is_no_room_for_another_set_nobody_holds_the_blocks() -> None:
    blocks = seats(BlockRows(SMALL_BYTES), 40)
    blocks.sets._max_count = 20
    keys = chain(1, 30)
    for block in range(30):
        for seat in range(block + 1):
            blocks.store_few(seat, Tier.DEVICE, [(int(keys[block]), int(named(keys).aliases[block]))], [Part(0, -1)])
    assert blocks.refused and len(blocks.sets) <= 20
    recount(blocks)


def test_copies_beyond_the_bound_are_not_counted() -> None:
    blocks = seats(BlockRows(SMALL_BYTES), 1)
    blocks._copies_max_count = 5
    keys = chain(1, 8)
    for _ in range(2):
        blocks.store(0, Tier.DEVICE, named(keys))
    assert blocks.copies[0] == 13 and blocks.refused == 3
    blocks.remove(0, Tier.DEVICE, named(keys).aliases)
    assert blocks.live[0] == 5, "a miss too many, never a hit that is none"
    recount(blocks)


def test_a_block_costs_less_than_40_bytes_and_a_further_holder_less_than_4() -> None:
    blocks = seats(BlockRows(16 * 2**20), 64)
    count = 0
    for seed in range(60):
        keys = chain(seed, 4_000)
        count += 4_000
        blocks.store(seed, Tier.DEVICE, named(keys))
    one = blocks.size_bytes
    assert one / count < 40 and kv_blocks.ROW_BYTES < 40
    for seed in range(60):
        blocks.store((seed + 1) % 60, Tier.DEVICE, named(chain(seed, 4_000)))
    assert (blocks.size_bytes - one) / count < 4
