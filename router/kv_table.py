"""Flat tables of 64-bit values: four bytes a slot, no object per entry, no pause when they grow.

Owns: `ValueTable`, which finds the row of a value by linear hashing, and `Rows`, which hands out row numbers. Does not
own: what the rows mean (`kv_blocks`).

A slot holds a row number with 5 bits of the value (0 is free, all ones a removed entry); the value itself lies in a
numpy column by row. Slots are in lines of 8 that are read at once, lines in buckets of 128; an entry is in its line or,
where that was full, in one of the next of its bucket. The table grows one group of buckets at a time (linear hashing
with partial expansions: groups of two buckets become three, then four), so no insert ever rehashes everything, and the
table is always 55 % full: 7.3 bytes an entry. Memory is reserved at the bound and touched as it is used (the kernel's
zero pages cost nothing). Batches of values are probed side by side in numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.uint64]
RowNumbers = NDArray[np.int64]

# Slots of a line: 32 bytes, half a cache line, read in one step.
_LINE_BITS = 3
_LINE_SLOTS = 1 << _LINE_BITS

# Slots of a bucket: large enough that the fullest kind, with 845 entries on average, does not fill (6 standard
# deviations), small enough that a split moves about 2,000 rows (150 us).
_BUCKET_BITS = 10
BUCKET_SLOTS = 1 << _BUCKET_BITS
_BUCKET_LINES = BUCKET_SLOTS // _LINE_SLOTS
_LINE_MASK = _BUCKET_LINES - 1

# Most entries per slot, on average, before the next group is split. Groups still to be split when those before became
# three buckets of two are half as full again: 0.82.
_FILL_RATIO = 0.55

# Bits of a slot that hold a part of the value: of 8 entries in a line 1 in 4 lines has one that must be looked at for
# nothing. The rest is the row plus one, so a table has at most 2^27 - 2 rows.
_TAG_BITS = 5
_TAG_MASK = (1 << _TAG_BITS) - 1
ROWS_MAX_COUNT = (1 << (32 - _TAG_BITS)) - 2

# A slot whose entry was removed; searches pass it.
_REMOVED = 0xFFFF_FFFF

# One bucket is cleaned of removed slots per so many removals: so they stay under about an eighth of the slots.
_CLEAN_EVERY_COUNT = 128

# Which bits of a value choose: the low ones the group, these the line, the third of a group, and the tag.
_LINE_SHIFT = 40
_THIRD_SHIFT = 48
_TAG_SHIFT = 59


# Buckets beyond those that the fill needs: for the first group, and for splits that a full bucket forces.
_SPARE_BUCKETS_COUNT = 64

# Bytes of an entry.
ENTRY_BYTES = 4 / _FILL_RATIO


class ValueTable:
    """Rows by value. `values` is the column of the rows, which the caller writes before it adds them. Mutable: it is
    the table. Values must be well mixed (else OverflowError), and each has one row.
    """

    def __init__(self, values: Values) -> None:
        self._values = values
        self._value_at: Any = memoryview(values.data)
        buckets = int(len(values) / _FILL_RATIO / BUCKET_SLOTS) + _SPARE_BUCKETS_COUNT
        self._slots = np.zeros(buckets * BUCKET_SLOTS, np.uint32)
        self._lines = self._slots.reshape(-1, _LINE_SLOTS)
        self._slot_at: Any = memoryview(self._slots.data)
        self._half_bits = 0
        self._half = 1
        self._wide = 3
        self._split = 0
        self._removals = 0
        self._clean_next = 0
        self.count = 0
        self.bucket_count = 2

    @property
    def size_bytes(self) -> int:
        """Bytes of the buckets in use."""
        return self.bucket_count * BUCKET_SLOTS * 4

    def find(self, value: int) -> int:
        """The row of a value; -1 where it has none."""
        bucket = self._bucket(value) * _BUCKET_LINES
        line = (value >> _LINE_SHIFT) & _LINE_MASK
        tag = value >> _TAG_SHIFT
        slot_at, value_at = self._slot_at, self._value_at
        while True:
            start = (bucket + line) << _LINE_BITS
            for slot in slot_at[start : start + _LINE_SLOTS]:
                if not slot:
                    return -1
                if slot & _TAG_MASK == tag and slot != _REMOVED and value_at[(slot >> _TAG_BITS) - 1] == value:
                    return int(slot >> _TAG_BITS) - 1
            line = (line + 1) & _LINE_MASK

    def find_many(self, values: Values) -> RowNumbers:
        """The row of each value, -1 where it has none."""
        found = np.full(len(values), -1, np.int64)
        buckets, lines = self._addresses(values)
        tags = (values >> np.uint64(_TAG_SHIFT)).astype(np.uint32)
        lanes = None
        while len(lines):
            slots = self._lines[buckets + lines]
            at, place = ((slots & np.uint32(_TAG_MASK)) == tags[:, None]).nonzero()
            marks = slots[at, place]
            rows = (marks >> np.uint32(_TAG_BITS)).astype(np.int64) - 1
            rows[marks == _REMOVED] = -1
            # row -1 reads the last value, which is as good as any: such a slot is no match
            same = (rows >= 0) & (self._values[rows] == values[at])
            hit = at[same]
            found[hit if lanes is None else lanes[hit]] = rows[same]
            # Slots of a line fill from the left and are never freed singly: a free last one says that no entry of this
            # line went on to the next.
            on = slots[:, -1] != 0
            on[hit] = False
            left = on.nonzero()[0]
            lanes = left if lanes is None else lanes[left]
            values, tags, buckets = values[left], tags[left], buckets[left]
            lines = (lines[left] + 1) & _LINE_MASK
        return found

    def add(self, value: int, row: int) -> None:
        """Give a value that has no row this one."""
        self.reserve(1)
        self.count += 1
        mark = (row + 1) << _TAG_BITS | value >> _TAG_SHIFT
        slot_at = self._slot_at
        while True:
            bucket = self._bucket(value) * _BUCKET_LINES
            home = (value >> _LINE_SHIFT) & _LINE_MASK
            for line in range(home, home + _BUCKET_LINES):
                start = (bucket + (line & _LINE_MASK)) << _LINE_BITS
                for place in range(start, start + _LINE_SLOTS):
                    if not slot_at[place]:
                        slot_at[place] = mark
                        return
            self._split_next()

    def add_many(self, values: Values, rows: RowNumbers) -> None:
        """Give values that have no row, each different, these ones."""
        self.reserve(len(values))
        self.count += len(values)
        buckets, lines = self._addresses(values)
        marks = _marks(values, rows)
        steps = 0
        while len(marks):
            at = buckets + lines
            free = self._lines[at] == 0
            has_room = free[:, -1]
            places = (at << _LINE_BITS) + free.argmax(axis=1)
            taken = places[has_room]
            self._slots[taken] = marks[has_room]
            on = ~has_room
            lines += on
            on[has_room] = self._slots[taken] != marks[has_room]  # two wanted one slot: the last one has it
            values, buckets, lines, marks = values[on], buckets[on], lines[on] & _LINE_MASK, marks[on]
            steps += 1
            if steps > _BUCKET_LINES + _LINE_SLOTS * len(marks):  # a bucket is full
                self._split_next()
                buckets, lines = self._addresses(values)
                steps = 0

    def remove_many(self, values: Values, rows: RowNumbers) -> None:
        """Take these rows out; each value has its row."""
        buckets, lines = self._addresses(values)
        marks = _marks(values, rows)
        self.count -= len(marks)
        self._removals += len(marks)
        while len(marks):
            at = buckets + lines
            here = self._lines[at] == marks[:, None]
            on = ~here.any(axis=1)
            self._slots[((at << _LINE_BITS) + here.argmax(axis=1))[~on]] = _REMOVED
            buckets, marks = buckets[on], marks[on]
            lines = (lines[on] + 1) & _LINE_MASK
        while self._removals >= _CLEAN_EVERY_COUNT:
            self._removals -= _CLEAN_EVERY_COUNT
            self._clean_next = (self._clean_next + 1) % self.bucket_count
            self._rebuild([self._clean_next])

    def reserve(self, more: int) -> None:
        """Split groups until `more` entries fit under the fill bound."""
        while (self.count + more) > _FILL_RATIO * BUCKET_SLOTS * self.bucket_count:
            self._split_next()

    def _split_next(self) -> None:
        if (self.bucket_count + 1) * BUCKET_SLOTS > len(self._slots):
            raise OverflowError("values of a KV index table are not well mixed: too many share a bucket")
        group, half, wide = self._split, self._half, self._wide
        self._split += 1
        self.bucket_count += 1
        if self._split == half:  # every group is as wide now
            self._split = 0
            self._wide = 4 if wide == 3 else 3
            if wide == 4:
                self._half, self._half_bits = half * 2, self._half_bits + 1
        self._rebuild([part * half + group for part in range(wide)])

    def _rebuild(self, buckets: list[int]) -> None:
        """Put the rows of these buckets where they belong now: all of them stay within `buckets`."""
        grid = self._slots.reshape(-1, BUCKET_SLOTS)
        old = grid[buckets].ravel()
        old = old[(old != 0) & (old != _REMOVED)]
        grid[buckets] = 0
        starts, lines = self._addresses(self._values[(old >> np.uint32(_TAG_BITS)).astype(np.int64) - 1])
        starts //= _BUCKET_LINES
        order = np.argsort((starts << (_BUCKET_BITS - _LINE_BITS)) + lines)
        old, starts, wanted = old[order], starts[order], lines[order] << _LINE_BITS
        for bucket in buckets:
            first, last = np.searchsorted(starts, (bucket, bucket + 1))
            steps = np.arange(last - first)
            # In the order of their lines, each entry goes to its line's first slot or right after the one before.
            places = np.maximum.accumulate(wanted[first:last] - steps) + steps
            slots, marks = grid[bucket], old[first:last]
            inside = places < BUCKET_SLOTS
            slots[places[inside]] = marks[inside]
            wrapped = marks[~inside]
            if len(wrapped):  # from the first line on; the same rule as for one at a time
                slots[(slots == 0).nonzero()[0][: len(wrapped)]] = wrapped

    def _bucket(self, value: int) -> int:
        """The bucket of a value, as the group of it is split so far."""
        half = self._half
        group = value & (half - 1)
        part = (value >> self._half_bits) & 3
        width = self._wide if group < self._split else self._wide - 1
        if part >= width:
            part = (value >> _THIRD_SHIFT) % 3 if width == 3 else part - 2
        return part * half + group

    def _addresses(self, values: Values) -> tuple[RowNumbers, RowNumbers]:
        """First line of the bucket and line in it, per value."""
        half = self._half
        signed = values.view(np.int64)
        group = signed & (half - 1)
        part = (signed >> self._half_bits) & 3
        width = np.where(group < self._split, self._wide, self._wide - 1)
        over = (part >= width).nonzero()[0]
        if len(over):
            third = ((values[over] >> np.uint64(_THIRD_SHIFT)) % np.uint64(3)).astype(np.int64)
            part[over] = np.where(width[over] == 3, third, part[over] - 2)
        lines = (signed >> _LINE_SHIFT) & _LINE_MASK
        return (part * half + group) * _BUCKET_LINES, lines


def _marks(values: Values, rows: RowNumbers) -> NDArray[np.uint32]:
    """What slots hold."""
    return ((rows + 1) << _TAG_BITS).astype(np.uint32) | (values >> np.uint64(_TAG_SHIFT)).astype(np.uint32)


class Rows:
    """Row numbers below `capacity`: those given back first, then the next ones. Mutable: it counts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free: list[RowNumbers] = []
        self._free_count = 0
        self.top = 0
        """Rows ever in use: what columns have touched."""

    @property
    def room(self) -> int:
        """Rows that can be taken."""
        return self._capacity - self.top + self._free_count

    def take(self, count: int) -> RowNumbers:
        """So many rows."""
        parts: list[RowNumbers] = []
        left = count
        while left and self._free:
            chunk = self._free.pop()
            if len(chunk) > left:
                self._free.append(chunk[left:])
                chunk = chunk[:left]
            parts.append(chunk)
            left -= len(chunk)
            self._free_count -= len(chunk)
        parts.append(np.arange(self.top, self.top + left))
        self.top += left
        return np.concatenate(parts)

    def give_back(self, rows: RowNumbers) -> None:
        """These are free again."""
        if len(rows):
            self._free.append(rows)
            self._free_count += len(rows)
