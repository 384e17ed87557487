"""The blocks that engines hold: one row each in flat columns, found by our key or by an engine's hash.

Owns: `BlockRows`: a row's key, alias (the engine's hash, mixed with what sets engines apart) and holder set, copies
beyond the first, further aliases, and the bound of memory. Does not own: events, ranks and roots (`kv_index`).

A block costs 8 bytes of key, 8 of alias, 4 of holder set and 7.3 in each of two tables: 34.5, whoever holds it. Where
engines of one model hash differently (unlike engines, or seeds per process), each further hash of a block costs 19.3.

Rows of one run of blocks lie side by side, so a chain is compared with its prompt as a few stretches of memory instead
of one search per block (`runs`): the answer is exact for every block, however engines evict.

When room is needed, blocks that nobody holds go first (they are kept until then, since a copy on a slower tier may be
reported after the faster one is gone), then those held by one seat alone, slowest tier first, then shared ones; among
equals in the order of rows, which is about the order of age and takes whole chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.kv_events import Tier
from router.kv_holders import EMPTY, MORE_SEATS_BYTES, NO_ROW, SET_BYTES, HolderSets, Masks
from router.kv_table import ENTRY_BYTES, ROWS_MAX_COUNT, RowNumbers, Rows, Values, ValueTable

# Bytes of a row in its columns, and of a further alias (value and row), each plus table entries.
ROW_BYTES = 20 + 2 * ENTRY_BYTES
SECOND_BYTES = 12 + ENTRY_BYTES

# Bytes of one further copy: a dict entry with two integers (tracemalloc, CPython 3.11, as `prefix_index.BLOCK_BYTES`).
COPY_BYTES = 110

# Shares of the bound: rows; the rest is further aliases and holder sets (an eighth each at most); copies are few.
_ROWS_SHARE, _SIDE_SHARE = 0.75, 0.125

# Least rows, so that a batch always fits, and most blocks stored in one go.
_ROWS_MIN_COUNT = 16_384
SLICE_BLOCKS = 2_048

# Room is made for so many blocks at a time (about 4 ms), looking at so many rows in a step (30 us).
_SWEEP_BLOCKS = 2_048
_SWEEP_ROWS = 16_384

# A stretch shorter than this is not worth a comparison of its own: then so many keys are searched side by side.
_SHORT_RUN_BLOCKS = 8
_PROBE_BLOCKS = 256

# First width of a comparison with rows that lie side by side; it doubles while they match.
_FIRST_RUN_BLOCKS = 512

# Rows kept free behind a chain: this part of its length, so that its blocks lie in a few stretches and at most a fifth
# of its rows is empty (5 bytes a block, mostly half of it); a long chain's is bounded.
_SPARE_PART, _SPARE_MAX_BLOCKS = 4, 512

# Chains with rows kept free, per row of the index; bytes of an entry (as a copy's), and how it is packed.
_TAILS_RATIO = 1 / 256
TAIL_BYTES = 110
_ROW_BITS = 27
_ROW_MASK = (1 << _ROW_BITS) - 1

HolderNumbers = NDArray[np.uint32]


class Named(NamedTuple):
    """Blocks by our key and by the engine's alias, which differ."""

    keys: Values
    aliases: Values

    def take(self, places: slice | NDArray[np.bool_]) -> Named:
        """Some of them."""
        return Named(self.keys[places], self.aliases[places])


class Part(NamedTuple):
    """Blocks of a batch from `start` on follow each other, and the first of them this row (-1: none that is known), or
    that block of the same batch.
    """

    start: int
    after_row: int
    after_block: int | None = None


class BlockRows:
    """Every known block. Mutable: it is the state of the index. Aliases and keys are 64-bit and well mixed."""

    def __init__(self, max_bytes: int) -> None:
        count = int(max_bytes * _ROWS_SHARE / ROW_BYTES)
        self.capacity = max(_ROWS_MIN_COUNT, min(count, ROWS_MAX_COUNT))
        second = max(_ROWS_MIN_COUNT // 4, int(max_bytes * _SIDE_SHARE / SECOND_BYTES))
        self.sets = HolderSets(max(1_024, int(max_bytes * _SIDE_SHARE / SET_BYTES)))
        self._copies_max_count = max(1_024, int(max_bytes * _SIDE_SHARE / COPY_BYTES / 2))
        self._keys: Values = np.zeros(self.capacity, np.uint64)
        self._aliases: Values = np.zeros(self.capacity, np.uint64)
        self._holders: HolderNumbers = np.zeros(self.capacity, np.uint32)
        self._holder_at: Any = memoryview(self._holders.data)
        self._by_key, self._by_alias = ValueTable(self._keys), ValueTable(self._aliases)
        self._rows = Rows(self.capacity)
        self._tails: dict[int, int] = {}
        """Rows kept free behind the last block of a chain: their end and the chain's length, by that block's row."""
        self._tails_max_count = max(256, int(self.capacity * _TAILS_RATIO))
        self._second_aliases: Values = np.zeros(min(second, self.capacity), np.uint64)
        self._second_rows: HolderNumbers = np.zeros(len(self._second_aliases), np.uint32)
        self._by_second = ValueTable(self._second_aliases)
        self._seconds = Rows(len(self._second_aliases))
        self._hand = 0
        self._copies: dict[int, dict[int, int]] = {}
        """By seat and tier: copies beyond the first, by row."""
        self._copies_count = 0
        self.live: dict[int, int] = {}
        """Blocks by seat."""
        self.copies: dict[int, int] = {}
        """Copies by seat."""
        self.dropped_ghosts = 0
        self.dropped_held = 0
        self.refused = 0

    @property
    def count(self) -> int:
        """Blocks known."""
        return self._by_key.count

    @property
    def second_count(self) -> int:
        """Further aliases known."""
        return self._by_second.count

    @property
    def size_bytes(self) -> int:
        """Memory in use: columns up to the last row ever used, tables, sets, copies."""
        tables = self._by_key.size_bytes + self._by_alias.size_bytes + self._by_second.size_bytes
        sets = len(self.sets) * (SET_BYTES + MORE_SEATS_BYTES * (len(self.live) // 30))
        dicts = self._copies_count * COPY_BYTES + len(self._tails) * TAIL_BYTES
        return self._rows.top * 20 + self._seconds.top * 12 + tables + sets + dicts

    def find(self, alias: int) -> tuple[int, int] | None:
        """Row and key of the block with this alias. The row is good for `Part` until blocks are stored."""
        row = self._by_alias.find(alias)
        if row < 0 and self._by_second.count:
            place = self._by_second.find(alias)
            row = int(self._second_rows[place]) if place >= 0 else -1
        return None if row < 0 else (row, int(self._keys[row]))

    def add_seat(self, seat: int) -> None:
        """A new seat, which holds nothing."""
        self.live[seat] = self.copies[seat] = 0

    def clear_seat(self, seat: int, tier: Tier | None = None) -> None:
        """The seat holds nothing, or nothing on this tier. O(sets)."""
        for each in Tier if tier is None else (tier,):
            further = self._copies.pop(seat << 2 | each, {})
            self._copies_count -= len(further)
            self.copies[seat] -= sum(further.values()) + self.sets.live_blocks(seat, each)
        self.sets.forget_seat(seat, tier)
        self.live[seat] = self.sets.live_blocks(seat)

    def drop_seat(self, seat: int) -> None:
        """The seat is gone."""
        self.clear_seat(seat)
        del self.live[seat], self.copies[seat]

    # -- stores and removals

    def store(self, seat: int, tier: Tier, blocks: Named, parts: Sequence[Part] = ()) -> int:
        """One more copy of each of these blocks. Returns how many were refused: their alias is that of a block with
        another key, or there is no room for it. `parts` say what follows what, which keeps chains together.
        """
        first = _firsts(blocks.keys)
        if not first.all():  # two hashes of one block
            again = [self.store(seat, tier, blocks.take(slice(i, i + 1))) for i in (~first).nonzero()[0]]
            return self.store(seat, tier, blocks.take(first)) + sum(again)
        if len(blocks.keys) <= SLICE_BLOCKS:
            return self._store(seat, tier, blocks, parts or (Part(0, -1),))
        refused = 0
        for start in range(0, len(blocks.keys), SLICE_BLOCKS):
            piece = blocks.take(slice(start, start + SLICE_BLOCKS))
            above = self.find(int(blocks.aliases[start - 1])) if start else None
            refused += self._store(seat, tier, piece, (Part(0, above[0] if above else -1),))
        return refused

    def store_few(self, seat: int, tier: Tier, blocks: Sequence[tuple[int, int]], parts: Sequence[Part]) -> int:
        """`store` of a few blocks (key and alias of each), one by one: what costs 350 us side by side, whatever their
        number, costs 16 us a block.
        """
        self._make_room(len(blocks))
        starts = {part.start: part for part in parts}
        rows: list[int] = []
        refused = 0
        for index, (key, alias) in enumerate(blocks):
            part = starts.get(index)
            if part is None:
                above = rows[-1] if rows else -1
            else:
                above = part.after_row if part.after_block is None else rows[part.after_block]
            found = self.find(alias)
            if found is not None:
                row, known = found
                if known != key:
                    rows.append(-1)
                    refused += 1
                    continue
            else:
                row = self._by_key.find(key)
                if row < 0:
                    row = self._new_row(key, alias, above)
                elif self._add_aliases(np.array([alias], np.uint64), np.array([row]))[0]:
                    refused += 1
            rows.append(row)
            number = self._holder_at[row]
            masks = self.sets.masks[number]
            if masks[tier] >> seat & 1:
                self._add_copies(seat, tier, [row])
            else:
                self.copies[seat] += 1
                self._give_set(row, number, _changed(masks, tier, masks[tier] | 1 << seat))
        return refused

    def _new_row(self, key: int, alias: int, above: int) -> int:
        kept = self._tails.get(above, 0)
        if kept & _ROW_MASK > above + 1:
            row = above + 1
            self._tails[row] = self._tails.pop(above) + (1 << _ROW_BITS)
        else:
            row = int(self._rows_after(above, 1, self._rows.room - _SPARE_MAX_BLOCKS)[0])
        self._keys[row], self._aliases[row], self._holders[row] = key, alias, EMPTY
        self._by_key.add(key, row)
        self._by_alias.add(alias, row)
        self.sets.move(NO_ROW, EMPTY, 1)
        return row

    def remove_few(self, seat: int, tier: Tier | None, aliases: Sequence[int]) -> int:
        """`remove` of a few blocks, one by one."""
        unknown = 0
        for alias in aliases:
            found = self.find(alias)
            if found is None:
                unknown += 1
                continue
            row = found[0]
            number = self._holder_at[row]
            masks = self.sets.masks[number]
            at = self._tier_of(seat, tier, masks)
            if at is None:
                unknown += 1
                continue
            self.copies[seat] -= 1
            if self._drop_copies(seat << 2 | at, [row]):
                self._give_set(row, number, _changed(masks, at, masks[at] & ~(1 << seat)))
        return unknown

    def _tier_of(self, seat: int, tier: Tier | None, masks: Masks) -> Tier | None:
        """The tier to remove a copy from: the one that is said, or the fastest; None where the seat has none there."""
        for each in Tier if tier is None else (tier,):
            if masks[each] >> seat & 1:
                return each
        return None

    def store_known(self, seat: int, tier: Tier, aliases: Values) -> int:
        """One more copy of each of these blocks, of which only the hash is told. Returns how many are unknown."""
        rows = self._find(aliases)
        known = rows[rows >= 0]
        first = _firsts(known)
        self._add_holder(seat, tier, known[first])
        for row in known[~first]:
            self._add_holder(seat, tier, known[known == row][:1])
        return len(rows) - len(known)

    def remove(self, seat: int, tier: Tier | None, aliases: Values) -> int:
        """One copy less of each of these blocks, which differ; `tier` None: on the fastest that has one. Returns how
        many the seat did not hold.
        """
        rows = self._find(aliases)
        rows = rows[rows >= 0]
        unknown = len(aliases) - len(rows)
        first = _firsts(rows)
        if not first.all():  # two hashes of one block
            unknown += sum(self.remove(seat, tier, self._aliases[rows[i : i + 1]]) for i in (~first).nonzero()[0])
            rows = rows[first]
        for number, part in self._by_set(rows):
            masks = self.sets.masks[number]
            at = self._tier_of(seat, tier, masks)
            if at is None:
                unknown += len(part)
                continue
            self.copies[seat] -= len(part)
            last = part
            if self._copies.get(seat << 2 | at):
                last = np.array(self._drop_copies(seat << 2 | at, part.tolist()), np.int64)
            if len(last):
                self._give_set(last, number, _changed(masks, at, masks[at] & ~(1 << seat)))
        return unknown

    def _store(self, seat: int, tier: Tier, blocks: Named, parts: Sequence[Part]) -> int:
        keys, aliases = blocks
        self._make_room(len(keys))
        rows = self._find(aliases)
        same = rows >= 0
        refused = np.zeros(len(keys), np.bool_)
        if same.all():
            refused = self._keys[rows] != keys
        else:
            refused[same] = self._keys[rows[same]] != keys[same]
            new = (~same).nonzero()[0]
            named = self._by_key.find_many(keys[new])
            known = named >= 0
            rows[new] = named
            refused[new[known]] = self._add_aliases(aliases[new[known]], named[known])
            fresh = new[~known]
            if len(fresh):
                self._place(rows, fresh, parts)
                self._add_rows(keys[fresh], aliases[fresh], rows[fresh])
        self._add_holder(seat, tier, rows[~refused] if refused.any() else rows)
        return int(refused.sum())

    def _place(self, rows: RowNumbers, fresh: RowNumbers, parts: Sequence[Part]) -> None:
        """Give rows to the new blocks of a batch, each stretch of them behind the block that it follows. Behind a chain
        rows are kept free for what follows, a quarter of its length: a decoding session's blocks come one by one, among
        those of others.
        """
        if len(parts) == 1 and int(fresh[-1]) - int(fresh[0]) == len(fresh) - 1:  # the usual case
            begin, part = int(fresh[0]), parts[0]
            above = int(rows[begin - 1]) if begin else part.after_row
            rows[fresh] = self._rows_after(above, len(fresh), self._rows.room - len(fresh))
            return
        starts = np.array([part.start for part in parts], np.int64)
        cuts = ((fresh[1:] != fresh[:-1] + 1) | np.isin(fresh[1:], starts)).nonzero()[0] + 1
        edges = [0, *cuts.tolist(), len(fresh)]
        part_of = np.searchsorted(starts, fresh[edges[:-1]], side="right") - 1
        for first, last, number in zip(edges[:-1], edges[1:], part_of.tolist(), strict=True):
            begin, part = int(fresh[first]), parts[number]
            if begin > part.start:
                above = int(rows[begin - 1])
            else:
                above = part.after_row if part.after_block is None else int(rows[part.after_block])
            room = self._rows.room - (len(fresh) - first)
            rows[begin : begin + last - first] = self._rows_after(above, last - first, room)

    def _rows_after(self, above: int, count: int, room: int) -> RowNumbers:
        """So many rows for a stretch that follows the block in the row `above`. `room` rows can be kept free."""
        kept = self._tails.pop(above, 0)
        end, length = kept & _ROW_MASK, (kept >> _ROW_BITS) + count
        rows = np.arange(above + 1, min(above + 1 + count, end))
        more = count - len(rows)
        if more:
            spare = max(0, min(_SPARE_MAX_BLOCKS, length // _SPARE_PART, room))
            taken = self._rows.take(more + spare)
            rows = np.concatenate([rows, taken[:more]])
            end = int(rows[-1]) + 1 + spare
            if spare and taken[-1] != end - 1:  # what is free lies elsewhere
                self._rows.give_back(taken[more:])
                end = int(rows[-1]) + 1
        if length >= _SPARE_PART:  # also where nothing is kept now: what follows needs the length
            self._tails[int(rows[-1])] = length << _ROW_BITS | end
            if len(self._tails) > self._tails_max_count:
                self._give_up_tails(1)
        return rows

    def _give_up_tails(self, count: int) -> None:
        """Free what is kept behind the chains that were continued longest ago."""
        for row in list(islice(self._tails, count)):
            self._rows.give_back(np.arange(row + 1, self._tails.pop(row) & _ROW_MASK))

    def _add_rows(self, keys: Values, aliases: Values, rows: RowNumbers) -> None:
        """Fill the rows of blocks that were not known."""
        self._keys[rows], self._aliases[rows], self._holders[rows] = keys, aliases, EMPTY
        self._by_key.add_many(keys, rows)
        self._by_alias.add_many(aliases, rows)
        self.sets.move(NO_ROW, EMPTY, len(rows))

    def _add_aliases(self, aliases: Values, rows: RowNumbers) -> NDArray[np.bool_]:
        """Further aliases of known blocks. Where there is no room for more, a block that nobody holds gets it instead
        of its own. True: refused.
        """
        refused = np.zeros(len(rows), np.bool_)
        count = min(self._seconds.room, len(rows))
        places = self._seconds.take(count)
        self._second_aliases[places], self._second_rows[places] = aliases[:count], rows[:count]
        self._by_second.add_many(aliases[:count], places)
        if count < len(rows):
            unheld = self.sets.worths[self._holders[rows[count:]]] == 0
            refused[count:] = ~unheld
            renamed, names = rows[count:][unheld], aliases[count:][unheld]
            self._by_alias.remove_many(self._aliases[renamed], renamed)
            self._aliases[renamed] = names
            self._by_alias.add_many(names, renamed)
        return refused

    def _add_holder(self, seat: int, tier: Tier, rows: RowNumbers) -> None:
        bit = 1 << seat
        for number, part in self._by_set(rows):
            masks = self.sets.masks[number]
            if masks[tier] & bit:
                self._add_copies(seat, tier, part.tolist())
                continue
            self.copies[seat] += len(part)
            self._give_set(part, number, _changed(masks, tier, masks[tier] | bit))

    def _give_set(self, rows: RowNumbers | int, old: int, masks: Masks) -> None:
        """Rows of the set `old` get this one. Where there is no room for another set nobody holds them: a miss too many
        is cheaper than a hit that is none.
        """
        count = 1 if isinstance(rows, int) else len(rows)
        before, after = self.sets.seats[old], masks[0] | masks[1] | masks[2] | masks[3]
        if before != after:
            self.live[(before ^ after).bit_length() - 1] += count if after > before else -count
        new = self.sets.number(masks)
        if new < 0:
            self.refused += count
            self._forget_holders(np.atleast_1d(rows), masks)
            new = EMPTY
        self._holders[rows] = new
        self.sets.move(old, new, count)

    def _by_set(self, rows: RowNumbers) -> Iterator[tuple[int, RowNumbers]]:
        """Rows by their holder set."""
        if not len(rows):
            return
        numbers = self._holders[rows]
        first = int(numbers[0])
        if (numbers == first).all():
            yield first, rows
            return
        order = np.argsort(numbers, kind="stable")
        numbers, rows = numbers[order], rows[order]
        ends = [*((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
        start = 0
        for end in ends:
            yield int(numbers[start]), rows[start:end]
            start = end

    def _add_copies(self, seat: int, tier: Tier, rows: list[int]) -> None:
        further = self._copies.setdefault(seat << 2 | tier, {})
        for row in rows:
            count = further.get(row, 0)
            if not count:
                if self._copies_count >= self._copies_max_count:
                    self.refused += 1
                    continue
                self._copies_count += 1
            further[row] = count + 1
            self.copies[seat] += 1

    def _drop_copies(self, place: int, rows: list[int]) -> list[int]:
        """Take one copy of each; the rows of which that was the last."""
        further = self._copies.get(place)
        if not further:
            return rows
        last = []
        for row in rows:
            count = further.get(row)
            if count is None:
                last.append(row)
            elif count == 1:
                del further[row]
                self._copies_count -= 1
            else:
                further[row] = count - 1
        return last

    # -- searches

    def _find(self, aliases: Values) -> RowNumbers:
        """The row of each alias, -1 where it has none."""
        rows = self._by_alias.find_many(aliases)
        if self._by_second.count:
            missing = (rows < 0).nonzero()[0]
            if len(missing):
                places = self._by_second.find_many(aliases[missing])
                rows[missing] = np.where(places >= 0, self._second_rows[places], np.int64(-1))
        return rows

    def runs(self, keys: Values) -> Iterator[HolderNumbers]:
        """Holder sets of the blocks of a chain from its start on, in stretches, up to the first block not known."""
        at, count, width = 0, len(keys), _FIRST_RUN_BLOCKS
        key_column, holders = self._keys, self._holders
        while at < count:
            row = self._by_key.find(int(keys[at]))
            if row < 0:
                return
            length = 1
            while True:
                end = min(at + length + width, count, at + self.capacity - row)
                other = key_column[row + length : row + end - at] != keys[at + length : end]
                matched = int(other.argmax()) if len(other) else 0  # stops at the first
                if not matched and not other[:1].any():
                    matched = len(other)
                length += matched
                if matched < width:
                    break
                width *= 2
            yield holders[row : row + length]
            at += length
            width = max(_FIRST_RUN_BLOCKS, min(length, width))
            if length < _SHORT_RUN_BLOCKS:
                while at < count:
                    rows = self._by_key.find_many(keys[at : at + _PROBE_BLOCKS])
                    missing = (rows < 0).nonzero()[0]
                    if len(missing):
                        yield holders[rows[: missing[0]]]
                        return
                    yield holders[rows]
                    at += len(rows)
                    if rows[-1] - rows[-_SHORT_RUN_BLOCKS:][0] == min(len(rows), _SHORT_RUN_BLOCKS) - 1:
                        break

    # -- room

    def _make_room(self, count: int) -> None:
        if self._rows.room < count:
            self._give_up_tails(len(self._tails))
        need = count - self._rows.room
        if need <= 0:
            return
        goal = max(need, _SWEEP_BLOCKS)
        known = list(accumulate(self.sets.worth_rows))
        worth = next(each for each, count in enumerate(known) if count >= goal)
        while goal > 0:
            stop = min(self._hand + _SWEEP_ROWS, self._rows.top)
            worths = self.sets.worths[self._holders[self._hand : stop]]
            rows = (worths <= worth).nonzero()[0][:goal] + self._hand
            goal -= len(rows)
            if not goal:
                stop = int(rows[-1]) + 1
            self._hand = stop if stop < self._rows.top else 0
            self._free(rows)

    def _free(self, rows: RowNumbers) -> None:
        """These blocks are no longer known."""
        for number, part in self._by_set(rows):
            masks = self.sets.masks[number]
            if self.sets.seats[number]:
                self.dropped_held += len(part)
                self._forget_holders(part, masks)
            else:
                self.dropped_ghosts += len(part)
            self.sets.move(number, NO_ROW, len(part))
        self._by_key.remove_many(self._keys[rows], rows)
        self._by_alias.remove_many(self._aliases[rows], rows)
        if self._by_second.count:
            self._free_seconds(rows)
        self._holders[rows] = NO_ROW
        self._keys[rows] = 0
        self._rows.give_back(rows)
        for row in self._tails.keys() & set(rows.tolist()) if self._tails else ():
            self._rows.give_back(np.arange(row + 1, self._tails.pop(row) & _ROW_MASK))

    def _free_seconds(self, rows: RowNumbers) -> None:
        top = self._seconds.top
        places = (np.isin(self._second_rows[:top], rows) & (self._second_aliases[:top] != 0)).nonzero()[0]
        self._by_second.remove_many(self._second_aliases[places], places)
        self._second_aliases[places] = 0
        self._seconds.give_back(places)

    def _forget_holders(self, rows: RowNumbers, masks: Masks) -> None:
        """The seats of `masks` no longer count these blocks nor copies of them."""
        seats = masks[0] | masks[1] | masks[2] | masks[3]
        gone = set(rows.tolist())
        while seats:
            seat = (seats & -seats).bit_length() - 1
            seats &= seats - 1
            self.live[seat] -= len(rows)
            for tier in Tier:
                if not masks[tier] >> seat & 1:
                    continue
                self.copies[seat] -= len(rows)
                further = self._copies.get(seat << 2 | tier)
                if further:
                    for row in gone & further.keys():
                        self.copies[seat] -= further.pop(row)
                        self._copies_count -= 1


def _changed(masks: Masks, tier: Tier, mask: int) -> Masks:
    """The set with another mask on one tier."""
    changed = list(masks)
    changed[tier] = mask
    return changed[0], changed[1], changed[2], changed[3]


def _firsts(values: NDArray[Any]) -> NDArray[np.bool_]:
    """True for each value's first place."""
    first = np.ones(len(values), np.bool_)
    ordered = np.sort(values)
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(values, kind="stable")
        first[order[1:]] = values[order][1:] != values[order][:-1]
    return first
