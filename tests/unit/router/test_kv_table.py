"""The flat table: it finds what is there, through growth and removal, and stays small."""

from __future__ import annotations

import numpy as np
import pytest

from router.kv_table import BUCKET_SLOTS, ENTRY_BYTES, Rows, Values, ValueTable

COUNT = 60_000


def random_values(count: int = COUNT, seed: int = 1) -> Values:
    return np.random.default_rng(seed).integers(1, 2**64, count, dtype=np.uint64)


def full_table(values: Values, batch: int) -> ValueTable:
    table = ValueTable(values)
    for start in range(0, len(values), batch):
        part = values[start : start + batch]
        table.add_many(part, np.arange(start, start + len(part)))
    return table


@pytest.mark.parametrize("batch", [1, 37, 5_000])
def test_every_value_is_found_and_no_other(batch: int) -> None:
    values = random_values(COUNT if batch > 1 else 5_000)
    table = full_table(values, batch)
    assert (table.find_many(values) == np.arange(len(values))).all()
    assert (table.find_many(random_values(seed=2)) == -1).all()
    assert table.find(int(values[-1])) == len(values) - 1 and table.find(7) == -1
    assert table.count == len(values)
    assert table.size_bytes <= len(values) * ENTRY_BYTES + 2 * BUCKET_SLOTS * 4


def test_one_by_one_and_side_by_side_are_the_same_table() -> None:
    values = random_values(20_000)
    table = ValueTable(values)
    for row, value in enumerate(values[:10_000].tolist()):
        table.add(value, row)
    table.add_many(values[10_000:], np.arange(10_000, 20_000))
    assert (table.find_many(values) == np.arange(20_000)).all()
    assert [table.find(value) for value in values.tolist()] == list(range(20_000))


def test_removed_values_are_gone_and_their_slots_come_back() -> None:
    values = random_values()
    table = full_table(values, 1_000)
    buckets = table.bucket_count
    dice = np.random.default_rng(3)
    rows = np.arange(COUNT)
    for turn in range(12):
        out = dice.choice(rows, 15_000, replace=False)
        table.remove_many(values[out], out)
        assert (table.find_many(values[out]) == -1).all()
        values[out] = random_values(15_000, seed=100 + turn)
        table.add_many(values[out], out)
    assert (table.find_many(values) == rows).all()
    assert table.count == COUNT and table.bucket_count <= buckets + 1


def test_a_full_bucket_makes_the_table_grow() -> None:
    # all in one of the first two buckets: they agree in the lowest bit
    places = np.arange(1_500, dtype=np.uint64)
    values = (places << np.uint64(40)) | (places << np.uint64(1)) | np.uint64(1)
    table = ValueTable(values)
    for start in range(0, 1_500, 100):
        table.add_many(values[start : start + 100], np.arange(start, start + 100))
    assert (table.find_many(values) == np.arange(1_500)).all()
    alike = (places << np.uint64(40)) | np.uint64(1)
    with pytest.raises(OverflowError, match="well mixed"):
        full_table(alike, 100)


def test_rows_come_back_before_new_ones_are_used() -> None:
    rows = Rows(10)
    assert rows.take(6).tolist() == [0, 1, 2, 3, 4, 5] and rows.room == 4
    rows.give_back(np.array([2, 3]))
    assert rows.room == 6
    assert rows.take(1).tolist() == [2] and rows.take(2).tolist() == [3, 6]
    assert rows.top == 7 and rows.room == 3
