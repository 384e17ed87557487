"""Who holds a block, as one number: sets of seats by tier, each kept once.

Owns: `HolderSets`, which numbers every distinct set, counts the blocks that have it, and edits all blocks of a seat at
once by editing its sets. Does not own: which block has which set (`kv_blocks`), or what a seat is (`kv_index`).

Blocks of one stretch of a prompt are held by the same engines, so there are about as many sets as branches of prompts,
and a further holder of a block costs nothing. A set is four Python integers with one bit per seat, one for each tier:
intersecting a set of 64 engines with another takes 50 ns. Two numbers may stand for equal sets after an edit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.kv_events import Tier

Masks = tuple[int, int, int, int]

# Numbers of rows that are no block (a column's zeros), and of the set of no seats, which a new block has.
NO_ROW, EMPTY = 0, 1
_NONE: Masks = (0, 0, 0, 0)

# Bytes of one set with up to 30 seats: its tuple, dict entry, list slots and integers, measured with tracemalloc on
# CPython 3.11; and of 30 more seats on the device tier.
SET_BYTES, MORE_SEATS_BYTES = 300, 10

# What a set is worth when room is needed, worst first: nobody's blocks, then by the best tier of one seat alone, then
# blocks that several seats hold (prefixes that prompts share).
WORTH_COUNT = 6
_WORTH_SHARED = 5
_WORTH_NO_ROW = 255


class HolderSets:
    """The distinct sets of holders, at most `max_count`. Mutable: sets come and go with blocks."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self.masks: list[Masks] = [_NONE, _NONE]
        """Seats by tier. To be read only."""
        self.seats: list[int] = [0, 0]
        """Seats on any tier. To be read only."""
        self.row_counts: list[int] = [0, 0]
        self.worth_rows = [0] * WORTH_COUNT
        """Blocks by worth."""
        self.worths: NDArray[np.uint8] = np.zeros(1024, np.uint8)
        self.worths[NO_ROW] = _WORTH_NO_ROW
        self._numbers: dict[Masks, int] = {_NONE: EMPTY}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.masks) - len(self._free) - 2

    def number(self, masks: Masks) -> int:
        """The number of this set; -1 when there is no room for another."""
        number = self._numbers.get(masks)
        if number is not None:
            return number
        if self._free:
            number = self._free.pop()
            self.masks[number] = masks
        else:
            number = len(self.masks)
            if number >= self._max_count:
                return -1
            self.masks.append(masks)
            self.seats.append(0)
            self.row_counts.append(0)
            if number == len(self.worths):
                self.worths = np.concatenate([self.worths, np.zeros(number, np.uint8)])
        self._numbers[masks] = number
        self._describe(number)
        return number

    def move(self, old: int, new: int, count: int) -> None:
        """So many blocks that had the set `old` have `new`. A set that no block has is forgotten."""
        for number, more in ((old, -count), (new, count)):
            if number != NO_ROW:
                self.row_counts[number] += more
                self.worth_rows[self.worths[number]] += more
        if old > EMPTY and not self.row_counts[old]:
            if self._numbers.get(self.masks[old]) == old:
                del self._numbers[self.masks[old]]
            self.masks[old], self.seats[old] = _NONE, 0
            self._free.append(old)

    def forget_seat(self, seat: int, tier: Tier | None) -> None:
        """Take a seat out of every set, on one tier or on all."""
        bit = 1 << seat
        for number, seats in enumerate(self.seats):
            if not seats & bit:
                continue
            masks = self.masks[number]
            device, host, disk, remote = (
                mask & ~bit if tier is None or tier == each else mask for each, mask in enumerate(masks)
            )
            if self._numbers.get(masks) == number:
                del self._numbers[masks]
            self.masks[number] = (device, host, disk, remote)
            self._numbers.setdefault(self.masks[number], number)
            self.worth_rows[self.worths[number]] -= self.row_counts[number]
            self._describe(number)
            self.worth_rows[self.worths[number]] += self.row_counts[number]

    def live_blocks(self, seat: int, tier: Tier | None = None) -> int:
        """Blocks that a seat holds, on one tier or on any. O(sets): for edits and checks."""
        bit = 1 << seat
        if tier is None:
            return sum(self.row_counts[number] for number, seats in enumerate(self.seats) if seats & bit)
        return sum(self.row_counts[number] for number, masks in enumerate(self.masks) if masks[tier] & bit)

    def _describe(self, number: int) -> None:
        device, host, disk, remote = self.masks[number]
        seats = device | host | disk | remote
        self.seats[number] = seats
        if not seats:
            worth = 0
        elif seats & (seats - 1):
            worth = _WORTH_SHARED
        else:
            worth = 4 if device else 3 if host else 2 if disk else 1
        self.worths[number] = worth
