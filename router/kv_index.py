"""Which engine holds which blocks of a prompt, as the engines themselves say: the exact index of KV events.

Owns: `KvIndex`: ranks by incarnation, what each event means for them, our keys of the blocks that events name, the
search for a prompt's longest held prefix, and counters. Does not own: bytes (`kv_events`), sequence numbers
(`kv_stream`), memory (`kv_blocks`), what a hit is worth (`cost`), or engines without events (`prefix_index`).

A rank is one data-parallel rank of one incarnation of an engine: its blocks are its own, and another incarnation
starts empty (R9). Within it each KV group of a chain has a seat of its own; a group that keeps a state or a window is
left out, and where a model has several groups of full attention, a prefix counts as far as all of them hold it.

An engine's hash is opaque. A block's name is our key, made from the token ids that the engine publishes, so block size,
tokens and extras are what the engine used (R13, R15 to R18). Hashes only lead from an event to a block seen before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.kv_blocks import BlockRows, HolderNumbers, Named, Part
from router.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier
from router.kv_keys import ChainIdentity, alias_seed, chain_keys, root_key
from router.kv_table import Values

# Default bound of memory: 11 million blocks, 180 million tokens in blocks of 16. It is touched as it is used.
DEFAULT_MAX_BYTES = 512 * 2**20

# An odd multiplier that spreads an engine's hash over all bits (the 64-bit golden ratio): SGLang's and vLLM's are parts
# of digests, but nothing says that an engine's must be.
_MIX = 0x9E3779B97F4A7C15
_MIX_SHIFT = 32
_MASK_64 = (1 << 64) - 1

# So many blocks or fewer are applied one by one, which is quicker: 16 us each, against 350 us for a batch side by side
# (measured on a busy core).
_FEW_BLOCKS = 24

# The group of events that name none, while no group is known.
_FIRST_GROUP = 0


class RankId(NamedTuple):
    """One data-parallel rank of one incarnation of an engine."""

    engine_id: str
    incarnation: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What a rank computes. Engines of one `namespace` name equal blocks by equal hashes; where they do not after all,
    as with a random seed per process, each further name costs memory and nothing else.
    """

    model: str
    weights: str = ""
    namespace: str = ""


class Held(NamedTuple):
    """The longest prefix of a chain that a rank holds: its blocks, and how many of them have which best tier (device,
    host, disk, remote).
    """

    rank: RankId
    blocks: int
    tiers: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class RankCounters:
    """What a rank's events came to. `live_blocks` and `live_copies` are what it holds now, the rest only grows."""

    stored_blocks: int
    removed_blocks: int
    unknown_removes_count: int
    """Removals of blocks that the rank did not hold as far as known: seen late, or dropped here for want of room."""
    unresolved_parents_count: int
    """Runs after a block that is not known: their own blocks are found by hash alone."""
    unresolved_blocks: int
    """Blocks not indexed because neither their tokens nor their hash leads to a key."""
    state_events_count: int
    """Events of groups without a chain."""
    refused_blocks: int
    """Blocks whose hash named a block of another key, or for whose further hash there was no room."""
    decode_failures_count: int
    live_blocks: int
    live_copies_count: int


@dataclass(frozen=True, slots=True)
class IndexCounters:
    """The index as a whole."""

    known_blocks: int
    unheld_blocks: int
    """Known blocks that nobody holds: the first to go."""
    holder_sets_count: int
    second_aliases_count: int
    dropped_unheld_blocks: int
    dropped_held_blocks: int
    """Blocks dropped for want of room although an engine held them."""
    refused_blocks: int
    """Holders not counted for want of room."""
    size_bytes: int


@dataclass(slots=True)
class _Rank:
    """One rank. Mutable: its groups appear with its events, and it counts."""

    rank_id: RankId
    served: Served
    alias_seed: int
    seats: dict[int, int] = field(default_factory=dict)
    """Seat by KV group, of groups that keep a chain."""
    state_groups: set[int] = field(default_factory=set)
    roots: dict[tuple[int, str | None], int] = field(default_factory=dict)
    block_tokens: int | None = None
    stored_count: int = 0
    removed_count: int = 0
    unknown_removes_count: int = 0
    unresolved_parents_count: int = 0
    unresolved_count: int = 0
    state_events_count: int = 0
    refused_count: int = 0
    decode_failures_count: int = 0


class _Above(NamedTuple):
    """The block before a run: its key, and where it is."""

    key: int
    part: Part


class _Run:
    """Blocks of consecutive stores by one seat on one tier, which are applied together. Mutable: they are gathered."""

    __slots__ = ("hashes", "keys", "parts", "place_of", "seat", "tier")

    def __init__(self, seat: int, tier: Tier) -> None:
        self.seat, self.tier = seat, tier
        self.hashes: array[int] = array("Q")
        self.keys: array[int] = array("Q")
        self.place_of: dict[int, int] = {}
        self.parts: list[Part] = []


class KvIndex:
    """The blocks of every rank within one bound of memory. Mutable: it is the index. Not thread-safe.

    `secret` is the same in processes that compare keys.
    """

    few_blocks: ClassVar[int] = _FEW_BLOCKS

    def __init__(self, secret: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._secret = secret
        self.max_bytes = max_bytes
        self._blocks = BlockRows(max_bytes)
        self._ranks: dict[RankId, _Rank] = {}
        self._rank_of_seat: dict[int, _Rank] = {}
        self._free_seats: list[int] = []

    @property
    def size_bytes(self) -> int:
        """Memory in use."""
        return self._blocks.size_bytes

    def ranks(self) -> list[RankId]:
        """Every open rank."""
        return list(self._ranks)

    def open(self, rank: RankId, served: Served) -> None:
        """Expect events of this rank. Other incarnations of it are dropped; opening it again changes nothing unless it
        serves something else now, which it then holds nothing of.
        """
        present = self._ranks.get(rank)
        if present is not None and present.served == served:
            return
        for other in [each for each in self._ranks if (each.engine_id, each.rank) == (rank.engine_id, rank.rank)]:
            self.drop(other)
        seed = alias_seed(self._secret, served.namespace, served.model, served.weights)
        self._ranks[rank] = _Rank(rank, served, seed)

    def clear(self, rank: RankId) -> None:
        """The rank holds nothing now."""
        for seat in self._ranks[rank].seats.values():
            self._blocks.clear_seat(seat)

    def drop(self, rank: RankId) -> None:
        """The rank is gone. Nothing happens where it is not open."""
        state = self._ranks.pop(rank, None)
        if state is not None:
            for seat in state.seats.values():
                self._blocks.drop_seat(seat)
                del self._rank_of_seat[seat]
                self._free_seats.append(seat)

    def drop_engine(self, engine_id: str) -> None:
        """Every rank of the engine is gone."""
        for rank in [each for each in self._ranks if each.engine_id == engine_id]:
            self.drop(rank)

    def decode_failed(self, rank: RankId, count: int = 1) -> None:
        """Count messages or events of the rank that could not be read."""
        self._ranks[rank].decode_failures_count += count

    def block_tokens(self, rank: RankId) -> int | None:
        """Tokens of a block as the rank's events say; None before the first."""
        return self._ranks[rank].block_tokens

    def counters(self, rank: RankId) -> RankCounters:
        """What the rank's events came to."""
        state, blocks = self._ranks[rank], self._blocks
        return RankCounters(
            state.stored_count,
            state.removed_count,
            state.unknown_removes_count,
            state.unresolved_parents_count,
            state.unresolved_count,
            state.state_events_count,
            state.refused_count,
            state.decode_failures_count,
            sum(blocks.live[seat] for seat in state.seats.values()),
            sum(blocks.copies[seat] for seat in state.seats.values()),
        )

    def totals(self) -> IndexCounters:
        """The index as a whole."""
        blocks = self._blocks
        return IndexCounters(
            blocks.count,
            blocks.sets.worth_rows[0],
            len(blocks.sets),
            blocks.second_count,
            blocks.dropped_ghosts,
            blocks.dropped_held,
            blocks.refused,
            blocks.size_bytes,
        )

    # -- events

    def apply(self, rank: RankId, events: Sequence[KvEvent]) -> None:
        """What the rank's engine says, in its order. Raises KeyError where the rank is not open.

        Consecutive stores, and consecutive removals, are applied together: many blocks cost about 3 us each, a few
        16 us each. `kv_events.split` cuts long messages for a loop that must not wait.
        """
        state = self._ranks[rank]
        run: _Run | None = None
        removals: list[int] = []
        removed_from: tuple[int, Tier | None] | None = None
        for event in events:
            if isinstance(event, BlocksRemoved):
                self._flush(state, run)
                run = None
                seat = self._seat(state, event.group_id)
                if seat is None:
                    if event.group_id in state.state_groups:
                        state.state_events_count += 1
                    else:
                        state.unknown_removes_count += len(event.hashes)
                    continue
                if removed_from != (seat, event.tier):
                    self._remove(state, removed_from, removals)
                    removals, removed_from = [], (seat, event.tier)
                removals += event.hashes
                continue
            if removals:
                self._remove(state, removed_from, removals)
                removals = []
            if isinstance(event, BlocksStored):
                run = self._store(state, run, event)
            else:
                self._flush(state, run)
                run = None
                self._clear(state, event)
        self._flush(state, run)
        self._remove(state, removed_from, removals)

    def _store(self, state: _Rank, run: _Run | None, event: BlocksStored) -> _Run | None:
        """Gather the blocks of one event. Returns the run that is open now."""
        if not event.chained:
            state.state_events_count += 1
            if event.group_id is not None and event.group_id not in state.seats:
                state.state_groups.add(event.group_id)
            return run
        seat = self._seat(state, event.group_id, make=True)
        if seat is None:
            state.state_events_count += 1
            return run
        hashes = event.hashes
        if run is not None and (
            (run.seat, run.tier) != (seat, event.tier) or not run.place_of.keys().isdisjoint(hashes)
        ):
            self._flush(state, run)
            run = None
        if len(set(hashes)) != len(hashes):
            return self._store_repeats(state, run, event)
        above = self._above(state, run, event)
        if above is None:
            self._flush(state, run)
            state.stored_count += len(hashes)
            state.unresolved_count += self._blocks.store_known(
                seat, event.tier, self._aliases(state, array("Q", hashes))
            )
            return None
        if run is None:
            run = _Run(seat, event.tier)
        start = len(run.hashes)
        run.parts.append(above.part._replace(start=start))
        run.hashes.extend(hashes)
        run.keys.extend(chain_keys(above.key, event.tokens, event.block_tokens, event.extras or ()))
        run.place_of.update(zip(hashes, range(start, start + len(hashes)), strict=True))
        return run

    def _store_repeats(self, state: _Rank, run: _Run | None, event: BlocksStored) -> _Run | None:
        """One event that names a hash twice: block by block."""
        size = len(event.tokens) // len(event.hashes)
        extras = event.extras or ()
        parent = event.parent
        for index, each in enumerate(event.hashes):
            tokens = event.tokens[index * size : (index + 1) * size]
            extra = [extras[index]] if index < len(extras) else None
            run = self._store(state, run, event._replace(hashes=[each], parent=parent, tokens=tokens, extras=extra))
            parent = each
        return run

    def _above(self, state: _Rank, run: _Run | None, event: BlocksStored) -> _Above | None:
        """What an event's blocks follow; None where its tokens or the block before it are not known."""
        if not event.tokens:
            return None
        state.block_tokens = event.block_tokens
        if event.parent is None:
            place = (event.block_tokens, event.lora_name)
            above = state.roots.get(place)
            if above is None:
                served = state.served
                identity = ChainIdentity(served.model, event.block_tokens, event.lora_name, served.weights)
                above = state.roots[place] = root_key(self._secret, identity)
            return _Above(above, Part(0, -1))
        at = run.place_of.get(event.parent) if run is not None else None
        if run is not None and at is not None:
            return _Above(run.keys[at], Part(0, -1, at))
        found = self._blocks.find(_alias(event.parent, state.alias_seed))
        if found is None:
            state.unresolved_parents_count += 1
            return None
        row, key = found
        return _Above(key, Part(0, row))

    def _flush(self, state: _Rank, run: _Run | None) -> None:
        """Apply a run of stores."""
        if run is not None:
            state.stored_count += len(run.keys)
            if len(run.keys) <= self.few_blocks:
                few = [(key, _alias(name, state.alias_seed)) for key, name in zip(run.keys, run.hashes, strict=True)]
                state.refused_count += self._blocks.store_few(run.seat, run.tier, few, run.parts)
                return
            blocks = Named(np.frombuffer(run.keys, np.uint64), self._aliases(state, run.hashes))
            state.refused_count += self._blocks.store(run.seat, run.tier, blocks, run.parts)

    def _remove(self, state: _Rank, place: tuple[int, Tier | None] | None, hashes: list[int]) -> None:
        """Apply a run of removals; a hash that comes twice is two copies."""
        while hashes and place is not None:
            once = list(dict.fromkeys(hashes))
            if len(once) <= self.few_blocks:
                unknown = self._blocks.remove_few(*place, [_alias(each, state.alias_seed) for each in once])
            else:
                unknown = self._blocks.remove(*place, self._aliases(state, array("Q", once)))
            state.unknown_removes_count += unknown
            state.removed_count += len(once) - unknown
            if len(once) == len(hashes):
                return
            seen: set[int] = set()
            hashes = [each for each in hashes if each in seen or seen.add(each)]  # type: ignore[func-returns-value]  # adds

    def _clear(self, state: _Rank, event: BlocksCleared) -> None:
        for seat in state.seats.values():
            self._blocks.clear_seat(seat, event.tier)

    def _aliases(self, state: _Rank, hashes: array[int]) -> Values:
        """Engine hashes as the index names them: well mixed, and unlike those of other models and kinds of engines."""
        mixed = np.frombuffer(hashes, np.uint64) ^ np.uint64(state.alias_seed)
        mixed = mixed * np.uint64(_MIX)
        mixed ^= mixed >> np.uint64(_MIX_SHIFT)
        return mixed * np.uint64(_MIX)

    def _seat(self, state: _Rank, group_id: int | None, *, make: bool = False) -> int | None:
        """The seat of a KV group. An event that names none (a slower tier's) means the rank's first chain."""
        if group_id is None:
            group_id = min(state.seats, default=_FIRST_GROUP)
        seat = state.seats.get(group_id)
        if seat is None and make and group_id not in state.state_groups:
            seat = self._free_seats.pop() if self._free_seats else len(self._rank_of_seat)
            state.seats[group_id] = seat
            self._rank_of_seat[seat] = state
            self._blocks.add_seat(seat)
        return seat

    # -- search

    def lookup(self, keys: NDArray[np.uint64] | array[int] | Sequence[int]) -> list[Held]:
        """What each rank holds of a chain (`kv_keys.chain_keys`), from its start; ranks that hold nothing are left out.

        Exact for every block. An array of 64-bit numbers is read in place, a list is copied first.
        """
        chain = np.frombuffer(keys, np.uint64) if isinstance(keys, array) else np.asarray(keys, np.uint64)
        sets = self._blocks.sets
        alive = -1
        position = 0
        ends: list[tuple[int, int]] = []
        slower: dict[int, list[int]] = {}
        for numbers in self._blocks.runs(chain):
            start = 0
            for end in _stretches(numbers):
                number = int(numbers[start])
                here = alive & sets.seats[number]
                if here != alive:
                    if position:
                        ends += [(seat, position) for seat in _seats(alive & ~here)]
                    alive = here
                    if not alive:
                        return self._held(ends, slower)
                behind = alive & ~sets.masks[number][0]
                if behind:
                    _count_slower(slower, sets.masks[number], behind, end - start)
                position += end - start
                start = end
        if position:
            ends += [(seat, position) for seat in _seats(alive)]
        return self._held(ends, slower)

    def _held(self, ends: list[tuple[int, int]], slower: dict[int, list[int]]) -> list[Held]:
        """Seats to ranks. Of several groups of one rank, the one that holds least counts."""
        found: list[Held] = []
        blocks_of = dict(ends)
        for seat, blocks in ends:
            state = self._rank_of_seat[seat]
            if len(state.seats) > 1:
                least = min(state.seats.values(), key=lambda each: blocks_of.get(each, 0))
                if seat != least:
                    continue
            tiers = slower.get(seat)
            if tiers is None:
                found.append(Held(state.rank_id, blocks, (blocks, 0, 0, 0)))
            else:
                _, host, disk, remote = tiers
                found.append(Held(state.rank_id, blocks, (blocks - host - disk - remote, host, disk, remote)))
        return found


def _stretches(numbers: HolderNumbers) -> list[int]:
    """Where each stretch of equal numbers ends."""
    count = len(numbers)
    if not count or not (numbers != numbers[0]).any():
        return [count] if count else []
    return [*((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist(), count]


def _seats(mask: int) -> list[int]:
    """The seats of a mask."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _count_slower(slower: dict[int, list[int]], masks: tuple[int, int, int, int], behind: int, count: int) -> None:
    """So many blocks more that the seats of `behind` have on a slower tier."""
    for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE):
        for seat in _seats(behind & masks[tier]):
            slower.setdefault(seat, [0, 0, 0, 0])[tier] += count
        behind &= ~masks[tier]


def _alias(engine_hash: int, seed: int) -> int:
    """One engine hash as the index names it (`KvIndex._aliases`)."""
    mixed = (engine_hash ^ seed) * _MIX & _MASK_64
    mixed ^= mixed >> _MIX_SHIFT
    return mixed * _MIX & _MASK_64
