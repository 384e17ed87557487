"""Which endpoint holds which prompt prefix, as far as we know from our own routing.

Owns: the held blocks of every endpoint, their least-recently-used order, the bound of each engine's KV capacity and the
bound of this index's own memory. Does not own: how a prefix is hashed (`blocks`) or what a hit is worth (`cost`).

Theory of operation. Per endpoint the held prefixes form a tree of blocks. Three facts keep it small and quick:

1. Held sets are downward closed (a block is held only with every block before it), so the longest held prefix of a
   chain is found by binary search over plain `dict` membership.
2. A block was last used when the latest prompt through it was. So only the ends of prompts need a place in the LRU
   order: evicting the oldest end frees its blocks from the tail up, stopping where another prompt's path goes on.
   That is block by block what an engine does (it frees a request's blocks tail first), and touching a 119k-token
   prompt costs one step, not one per block.
3. Everything is an int in a dict of ints, which the garbage collector does not walk: a full index adds no collection
   pauses. `ends` packs (last use in us, depth in blocks, has children) into one int.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from router.blocks import BlockLadder

# Bytes of one held block and of one prompt end, measured with tracemalloc on CPython 3.11 at 100k to 1M entries (a
# dict slot and two 64-bit ints; an OrderedDict slot with its node and int). The growth steps of the dicts are in the
# 25 % margin.
BLOCK_BYTES = 110
END_BYTES = 210

# Default bound of the whole index in estimated bytes; the process's share stays under 150 MB.
DEFAULT_MAX_BYTES = 120_000_000

# The packing of an end mark: bit 0 says that a longer prompt goes on from here, bits 1 to 19 hold the depth in blocks
# (the graded ladder has 8,344), the rest is the last use.
_HAS_CHILD = 1
_DEPTH_BITS = 20
_DEPTH_MASK = (1 << _DEPTH_BITS) - 2


class Stored(NamedTuple):
    """What a store found: `held_blocks` of the chain were held before, and the path they end in was last used at
    `last_use_us` (None where that block is the end of no earlier prompt: then it is only a shared prefix).
    """

    held_blocks: int
    last_use_us: int | None


@dataclass(frozen=True, slots=True)
class PathNews:
    """A path that was stored, as siblings tell each other: `tail` continues the held block `base` at depth
    `base_blocks` (`base` is 0 at the root). An empty tail touches the prompt end `base`.
    """

    endpoint_id: str
    base: int
    base_blocks: int
    tail: Sequence[int]
    stamp_us: int


class Holdings:
    """The blocks that one endpoint incarnation holds."""

    __slots__ = ("_branches", "_ends", "_ladder_bytes", "held_bytes", "parents")

    def __init__(self, ladder: BlockLadder) -> None:
        self._ladder_bytes = ladder.ends_bytes
        self.parents: dict[int, int] = {}
        """Every held block: its parent block, 0 at the root. To be read only."""
        self._ends: OrderedDict[int, int] = OrderedDict()
        """Where prompts ended, oldest use first. Every block without children is here."""
        self._branches: dict[int, int] = {}
        """Children beyond the first, for blocks that have more than one."""
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self.parents)

    def size_bytes(self) -> int:
        """Estimated memory."""
        return len(self.parents) * BLOCK_BYTES + len(self._ends) * END_BYTES

    @property
    def oldest_use_us(self) -> int | None:
        """Last use of the least recently used prompt end; None when nothing is held."""
        for mark in self._ends.values():
            return mark >> _DEPTH_BITS
        return None

    def held_blocks(self, hashes: Sequence[int]) -> int:
        """How many blocks of the chain, from its start, are held. O(log n)."""
        parents = self.parents
        if not hashes or hashes[0] not in parents:
            return 0
        low, high = 1, len(hashes)
        if high > 1 and hashes[1] not in parents:
            return 1  # what every prompt begins with is held nearly everywhere, and mostly no more than that
        while low < high:
            middle = (low + high + 1) >> 1
            if hashes[middle - 1] in parents:
                low = middle
            else:
                high = middle - 1
        return low

    def last_use_us(self, block: int) -> int | None:
        """When the prompt that ended in this block was last used; None where no prompt ended."""
        mark = self._ends.get(block)
        return None if mark is None else mark >> _DEPTH_BITS

    def leaves(self) -> list[int]:
        """The last block of every held path, least recently used first."""
        return [block for block, mark in self._ends.items() if not mark & _HAS_CHILD]

    def path(self, block: int) -> list[int]:
        """The chain from the root to this block; empty where it is not held."""
        parents = self.parents
        chain: list[int] = []
        while block in parents:
            chain.append(block)
            block = parents[block]
        chain.reverse()
        return chain

    def extend(self, base: int, base_blocks: int, tail: Sequence[int], stamp_us: int) -> bool:
        """Hold `tail` after the block `base` (0: the root) and use the whole path now. False, and nothing is changed,
        where `base` is not held. A tail that is held in part is continued from there.
        """
        parents = self.parents
        if base_blocks and base not in parents:
            return False
        held = self.held_blocks(tail)
        if held:
            base = tail[held - 1]
        depth = base_blocks + len(tail)
        if held == len(tail):
            if base_blocks or held:
                self._touch(base, depth, stamp_us)
            return True
        if base_blocks + held:
            self._adopt(base)
        self.held_bytes += self._bytes_to(depth) - self._bytes_to(base_blocks + held)
        for index in range(held, len(tail)):
            block = tail[index]
            parents[block] = base
            base = block
        self._ends[base] = stamp_us << _DEPTH_BITS | depth << 1
        return True

    def evict(self, target_bytes: int) -> None:
        """Free least recently used blocks, tails first, until at most `target_bytes` are held."""
        while self.held_bytes > target_bytes and self._ends:
            self.evict_oldest(target_bytes)

    def evict_oldest(self, target_bytes: int = -1) -> None:
        """Drop the oldest prompt end and free its tail, but stop once at most `target_bytes` are held."""
        block, mark = self._ends.popitem(last=False)
        if not mark & _HAS_CHILD:
            self._free(block, mark, target_bytes)

    def withdraw(self, block: int, stamp_us: int) -> None:
        """Undo a speculative store: free the tail that ends in `block` unless another prompt has used it since
        `stamp_us`.
        """
        mark = self._ends.get(block)
        if mark is not None and not mark & _HAS_CHILD and mark >> _DEPTH_BITS == stamp_us:
            del self._ends[block]
            self._free(block, mark, -1)

    def forget_idle(self, since_us: int) -> None:
        """Forget every prompt end that was last used at or before `since_us`, with the blocks only it needed."""
        while True:
            oldest = self.oldest_use_us
            if oldest is None or oldest > since_us:
                return
            self.evict_oldest()

    def _touch(self, block: int, depth: int, stamp_us: int) -> None:
        mark = self._ends.get(block, _HAS_CHILD)
        if mark >> _DEPTH_BITS > stamp_us:
            return  # old news
        self._ends[block] = stamp_us << _DEPTH_BITS | depth << 1 | (mark & _HAS_CHILD)
        self._ends.move_to_end(block)

    def _adopt(self, parent: int) -> None:
        """Count one more child of `parent`."""
        mark = self._ends.get(parent)
        if mark is not None and not mark & _HAS_CHILD:
            self._ends[parent] = mark | _HAS_CHILD
        else:
            self._branches[parent] = self._branches.get(parent, 0) + 1

    def _free(self, block: int, mark: int, target_bytes: int) -> None:
        """Free `block`, whose end mark was `mark`, and its ancestors up to the next one that is still needed."""
        depth = (mark & _DEPTH_MASK) >> 1
        parents, branches, ladder = self.parents, self._branches, self._ladder_bytes
        while True:
            parent = parents.pop(block)
            depth -= 1
            if not depth:
                self.held_bytes -= ladder[0]
                return
            self.held_bytes -= ladder[depth] - ladder[depth - 1]
            others = branches.get(parent)
            if others:
                if others == 1:
                    del branches[parent]
                else:
                    branches[parent] = others - 1
                return
            parent_mark = self._ends.get(parent)
            if parent_mark is not None:
                self._ends[parent] = parent_mark & ~_HAS_CHILD
                return
            if self.held_bytes <= target_bytes:
                self._ends[parent] = (mark >> _DEPTH_BITS) << _DEPTH_BITS | depth << 1
                self._ends.move_to_end(parent, last=False)
                return
            block = parent

    def _bytes_to(self, depth: int) -> int:
        return self._ladder_bytes[depth - 1] if depth else 0


class PrefixIndex:
    """The holdings of every endpoint, within one bound of memory.

    Memory is estimated as blocks x BLOCK_BYTES + ends x END_BYTES; beyond `max_bytes` the prompt end that was used
    least recently anywhere is evicted, found through a heap of each endpoint's oldest use that is brought up to date
    when it is read.
    """

    def __init__(self, ladder: BlockLadder, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._ladder = ladder
        self._max_bytes = max_bytes
        self._holdings: dict[str, Holdings] = {}
        self._oldest: list[tuple[int, str]] = []
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Estimated memory in bytes."""
        return self._size_bytes

    @property
    def block_count(self) -> int:
        """Blocks held over all endpoints."""
        return sum(len(held) for held in self._holdings.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._holdings)

    def holdings(self, endpoint_id: str) -> Holdings:
        """What this endpoint holds. The object stays the same until the endpoint is forgotten; read it only."""
        held = self._holdings.get(endpoint_id)
        if held is None:
            held = self._holdings[endpoint_id] = Holdings(self._ladder)
            heappush(self._oldest, (0, endpoint_id))
        return held

    def find(self, hashes: Sequence[int], endpoint_ids: Iterable[str]) -> dict[str, int]:
        """Blocks of the chain held by each endpoint, from its start."""
        return {name: self.holdings(name).held_blocks(hashes) for name in endpoint_ids}

    def store(self, endpoint_id: str, hashes: Sequence[int], stamp_us: int, capacity_bytes: int | None) -> Stored:
        """The endpoint now holds this chain (or soon will: this is called at the pick). Bytes beyond `capacity_bytes`
        of the engine are evicted as the engine would.
        """
        holdings = self.holdings(endpoint_id)
        held = holdings.held_blocks(hashes)
        base = hashes[held - 1] if held else 0
        last_use_us = holdings.last_use_us(base) if held else None
        before = holdings.size_bytes()
        holdings.extend(base, held, hashes[held:], stamp_us)
        self._settle(holdings, before, capacity_bytes)
        return Stored(held, last_use_us)

    def learn(self, news: PathNews, capacity_bytes: int | None) -> bool:
        """Take over a stored path. False where its base is not held here, so that the whole path is needed."""
        holdings = self.holdings(news.endpoint_id)
        before = holdings.size_bytes()
        known = holdings.extend(news.base, news.base_blocks, news.tail, news.stamp_us)
        self._settle(holdings, before, capacity_bytes)
        return known

    def _settle(self, holdings: Holdings, before_bytes: int, capacity_bytes: int | None) -> None:
        """Apply both bounds after a store."""
        if capacity_bytes is not None and holdings.held_bytes > capacity_bytes:
            holdings.evict(capacity_bytes)
        self._size_bytes += holdings.size_bytes() - before_bytes
        if self._size_bytes > self._max_bytes:
            self._shrink()

    def withdraw(self, endpoint_id: str, block: int, stamp_us: int) -> None:
        """Undo the speculative store that ended in `block` at `stamp_us`."""
        holdings = self.holdings(endpoint_id)
        before = holdings.size_bytes()
        holdings.withdraw(block, stamp_us)
        self._size_bytes += holdings.size_bytes() - before

    def forget_idle(self, endpoint_id: str, since_us: int) -> None:
        """The endpoint has lost what it last used at or before `since_us`."""
        holdings = self.holdings(endpoint_id)
        before = holdings.size_bytes()
        holdings.forget_idle(since_us)
        self._size_bytes += holdings.size_bytes() - before

    def forget(self, endpoint_id: str) -> None:
        """The endpoint's incarnation has ended: it holds nothing."""
        holdings = self._holdings.pop(endpoint_id, None)
        if holdings is not None:
            self._size_bytes -= holdings.size_bytes()
            self._oldest = [row for row in self._oldest if row[1] != endpoint_id]
            heapify(self._oldest)

    def _shrink(self) -> None:
        """Evict the least recently used prompt end of all endpoints until the bound holds."""
        empty: list[tuple[int, str]] = []
        while self._size_bytes > self._max_bytes and self._oldest:
            stamp_us, endpoint_id = heappop(self._oldest)
            holdings = self._holdings[endpoint_id]
            oldest = holdings.oldest_use_us
            if oldest is None:
                empty.append((stamp_us, endpoint_id))
                continue
            if oldest <= stamp_us:
                before = holdings.size_bytes()
                holdings.evict_oldest()
                self._size_bytes += holdings.size_bytes() - before
                oldest = holdings.oldest_use_us or oldest
            heappush(self._oldest, (oldest, endpoint_id))
        for row in empty:
            heappush(self._oldest, row)


def _size(holdings: Holdings) -> int:
    return holdings.size_bytes()
