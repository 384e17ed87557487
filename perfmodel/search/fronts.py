"""Candidates of several groups that buy from one inventory: which sets of devices could be part of the cheapest fleet.

Owns: the sets of devices of one group that no smaller set replaces, which candidate stands for each, and the cheapest
combinations of one set per group. Does not own: prices (`purchase`), what the full model says of a candidate, or the
check (`choice`). Nothing is asked of a model here: thousands of candidates cost array operations, and only those of a
combination that would win are asked about.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.search.candidates import GroupCandidates, Ints, Trial, trial
from perfmodel.search.purchase import SAME_COST_RATIO, Purchasing
from perfmodel.search.rating import Floats

# Sets of devices of one group that are combined with those of the others, cheapest first, and combinations that are
# kept of two groups when a third is added. It bounds the work; a set that is dearer than this many others alone is very
# unlikely to be part of the cheapest fleet. Where the stock forbids all of these, so many more are tried.
_MOST_COMBINED = 400
_MOST_IN_SCARCITY = 2_000


@dataclass(frozen=True, slots=True, eq=False)
class Combined:
    """Combinations of least cost: one set of devices per group (int64[n, groups], as the fronts number them)."""

    places: Ints
    usd_per_h: float


class Front:
    """Sets of devices of one group, and the candidate that stands for each. Mutable: candidates are refused, and
    larger ones are added.
    """

    def __init__(self, group: GroupCandidates, purchasing: Purchasing) -> None:
        self.group = group
        self._purchasing = purchasing
        sized = [rows for rows in group.rows if len(rows.first)]
        width = len(purchasing.names)
        counts = np.concatenate([np.zeros((0, width), dtype=np.int64), *(rows.counts for rows in sized)])
        self.counts, members = np.unique(counts, axis=0, return_inverse=True)
        self._owner = np.concatenate([np.zeros(0, np.int64), *(np.full(len(r.first), n) for n, r in enumerate(sized))])
        self._index = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(rows.first)) for rows in sized)])
        self._use = np.concatenate([np.zeros(0), *(rows.use for rows in sized)]).round(9)
        self._sized = sized
        order = np.argsort(members.ravel(), kind="stable")
        self._rows = np.split(order, np.flatnonzero(np.diff(members.ravel()[order])) + 1) if len(order) else []
        self._coming: dict[int, Iterator[Trial]] = {}
        self._standing: dict[int, Trial] = {}
        self._larger: dict[int, list[tuple[tuple[float, float, tuple[str, ...]], Trial]]] = {}
        self._seen: set[tuple[str, ...]] = set()
        self._places = {row.tobytes(): place for place, row in enumerate(self.counts)}
        self._empty: set[int] = set()
        self._price()

    def _price(self) -> None:
        self.usd_per_h: Floats = self._purchasing.bill(self.counts).usd_per_h
        self.floor_usd_per_h: Floats = self._purchasing.floor_usd_per_h(self.counts)
        self._cheapest_first: Ints = np.lexsort((*self.counts.T, self.usd_per_h.round(6)))

    def standing(self, place: int) -> Trial | None:
        """The roomiest candidate of this set that was not refused; None: all were, and the set is dropped."""
        if place not in self._standing:
            found = self._next(place)
            if found is None:
                self._empty.add(place)
                return None
            self._standing[place] = found
        return self._standing[place]

    def refuse(self, place: int) -> None:
        """Take away the candidate that stands for this set, and try it with one more replica of each pool in turn."""
        tried = self._standing.pop(place)
        for at in range(len(tried.pools)):
            larger = tried.larger(at, self._purchasing)
            if larger is not None and larger.key not in self._seen:
                self._add(larger)

    def alive(self, floor_usd_per_h: float, most_count: int) -> Ints:
        """So many sets that no smaller one replaces, cheapest first, of those that cost no more than this even in split
        units.
        """
        kept = np.zeros((most_count, self.counts.shape[1]), dtype=np.int64)
        found: list[int] = []
        cheap = self.floor_usd_per_h <= floor_usd_per_h * (1 + SAME_COST_RATIO)
        for place in self._cheapest_first[cheap[self._cheapest_first]].tolist():
            if place in self._empty:
                continue
            row = self.counts[place]
            if found and bool((row >= kept[: len(found)]).all(axis=1).any()):
                continue
            kept[len(found)] = row
            found.append(place)
            if len(found) == most_count:
                break
        return np.array(found, dtype=np.int64)

    def least_floor(self) -> float:
        """The least that any set that is left costs in split units; infinite: none is left."""
        left = np.ones(len(self.counts), dtype=np.bool_)
        left[list(self._empty)] = False
        return float(self.floor_usd_per_h[left].min(initial=np.inf))

    def cheapest(self) -> int | None:
        """The cheapest set that is left."""
        return next((place for place in self._cheapest_first.tolist() if place not in self._empty), None)

    def _next(self, place: int) -> Trial | None:
        pushed = self._larger.get(place, [])
        if place not in self._coming:
            self._coming[place] = self._in_order(self._rows[place] if place < len(self._rows) else [])
        while True:
            found = next(self._coming[place], None)
            if found is None:
                found = heapq.heappop(pushed)[1] if pushed else None
            if found is None or found.key not in self._seen:
                break
        if found is not None:
            self._seen.add(found.key)
        return found

    def _in_order(self, rows: Sequence[int] | Ints) -> Iterator[Trial]:
        """Trials of these rows, roomiest first, then by key."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            return
        rows = rows[np.argsort(self._use[rows], kind="stable")]
        starts = np.flatnonzero(np.diff(self._use[rows], prepend=np.nan) != 0).tolist()
        for low, high in zip(starts, [*starts[1:], len(rows)], strict=True):
            tied = [trial(self.group, self._sized[self._owner[at]], int(self._index[at])) for at in rows[low:high]]
            yield from sorted(tied, key=lambda each: each.order)

    def _add(self, larger: Trial) -> None:
        row = self._purchasing.row(larger.device_counts())
        place = self._places.get(row.tobytes())
        if place is None:
            place = self._places[row.tobytes()] = len(self.counts)
            self.counts = np.concatenate([self.counts, row[None, :]])
            self._price()
        heapq.heappush(self._larger.setdefault(place, []), (larger.order, larger))
        self._empty.discard(place)


def cheapest_together(fronts: Sequence[Front], purchasing: Purchasing, ceiling: float | None) -> Combined | None:
    """The combinations of least cost that may be bought, at or below the ceiling (USD an hour); None: there is none.

    A set is left out when it, with the least that the others cost in split units, costs more than the ceiling or than
    the cheapest sets together.
    """
    found = _together(fronts, purchasing, ceiling, _MOST_COMBINED)
    if found is None and len(fronts) > 1 and any(len(front.counts) > _MOST_COMBINED for front in fronts):
        found = _together(fronts, purchasing, ceiling, _MOST_IN_SCARCITY)
    return found


def _together(
    fronts: Sequence[Front], purchasing: Purchasing, ceiling: float | None, most_count: int
) -> Combined | None:
    floors = [front.least_floor() for front in fronts]
    most = _first_bound(fronts, purchasing, np.inf if ceiling is None else ceiling)
    places, counts = np.zeros((1, 0), dtype=np.int64), np.zeros((1, len(purchasing.names)), dtype=np.int64)
    for at, front in enumerate(fronts):
        mine = front.alive(most - sum(floors[:at]) - sum(floors[at + 1 :]), most_count)
        places = np.hstack([np.repeat(places, len(mine), axis=0), np.tile(mine, len(places))[:, None]])
        counts = (counts[:, None, :] + front.counts[mine][None, :, :]).reshape(-1, counts.shape[1])
        bill = purchasing.bill(counts)
        rest = sum(floors[at + 1 :])
        cheap = purchasing.floor_usd_per_h(counts) + rest <= most * (1 + SAME_COST_RATIO)
        keep = np.flatnonzero(bill.allowed & cheap)
        keep = keep[np.lexsort((*places[keep].T, bill.usd_per_h[keep]))]
        if at + 1 < len(fronts):
            keep = keep[:most_count]
        places, counts, usd = places[keep], counts[keep], bill.usd_per_h[keep]
        if not len(keep):
            return None
    least = float(usd.min())
    if ceiling is not None and least > ceiling * (1 + SAME_COST_RATIO):
        return None
    return Combined(places[usd <= least * (1 + SAME_COST_RATIO)], least)


def _first_bound(fronts: Sequence[Front], purchasing: Purchasing, ceiling: float) -> float:
    """What the cheapest sets of all groups cost together, where that may be bought and is below the ceiling."""
    chosen = [front.cheapest() for front in fronts]
    rows = [front.counts[place] for front, place in zip(fronts, chosen, strict=True) if place is not None]
    if len(rows) < len(fronts):
        return ceiling
    bill = purchasing.bill(np.sum(rows, axis=0)[None, :])
    return min(ceiling, float(bill.usd_per_h[0])) if bill.allowed[0] else ceiling
