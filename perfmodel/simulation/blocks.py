"""The prefix cache of one simulated engine: named blocks, their holders, eviction in order of last use, a lower tier.

Owns: lookup by prefix id, sharing, allocation with eviction, release, and the lower tier that takes what is evicted.
Does not own: which request runs (`engine`). Compiled twin of `kv_cache.BlockPool`, with its three rules: one prefix
may have several copies and a lookup takes the oldest; freeing keeps the contents until a block is handed out again; a
request's blocks are freed last one first, nameless ones to the front. Prefixes come as integers (a trace's block ids),
so nothing is hashed but the integer itself.
"""

from __future__ import annotations

import numpy as np

from perfmodel.simulation.compiling import compiled
from perfmodel.simulation.state import REMOVED, STORED, TIER_REMOVED, TIER_STORED, Cluster

# Answers have no block ids in a trace. Their blocks get names that no prompt has (below 0), unique by request and
# place, so that a preempted request finds its own again as in the engine. 2^18 blocks are 4 million tokens of 16.
_PLACE_BITS = 18


@compiled
def home(key: int) -> int:
    """Where a key's search begins, before the table's mask. No product overflows 63 bits, in Python or compiled."""
    low = (key & 0x7FFFFFFF) * 2654435761
    high = ((key >> 31) & 0xFFFFFFFF) * 40503
    mixed = low ^ high
    return (mixed >> 17) ^ mixed


@compiled
def key_of(c: Cluster, r: int, place: int) -> int:
    """The name of a request's block: the trace's id, or one of its own beyond the prompt's full blocks."""
    request = c.requests[r]
    if place < request.key_count:
        return int(c.keys[r, place])
    return int(-(request.serial << _PLACE_BITS) - place - 1)


@compiled
def _look_up(c: Cluster, first: int, mask: int, key: int) -> int:
    at = home(key) & mask
    while True:
        block = np.int64(c.slots[first + at])
        if block < 0:
            return -1
        if c.blocks[block].key == key:
            return int(block)
        at = (at + 1) & mask


@compiled
def find(c: Cluster, e: int, key: int) -> int:
    """The oldest block that holds this prefix; -1 where none does."""
    engine = c.engines[e]
    return _look_up(c, engine.slot_first, engine.slot_mask, key)


@compiled
def tell_block(c: Cluster, e: int, change: int, key: int) -> None:
    """Write to the log that a prefix is now held (0) or not (1) by the engine, or by its lower tier (2, 3).

    Blocks of answers are left out: no prompt has their names.
    """
    totals = c.totals[0]
    if totals.tells_blocks and key > 0:
        at = totals.kv_count
        c.kv_log[at, 0] = 4 * e + change
        c.kv_log[at, 1] = key
        c.kv_log_s[at] = totals.clock_s
        totals.kv_count = at + 1


@compiled
def name_block(c: Cluster, e: int, block: int, key: int) -> None:
    """Publish a full block under its prefix; a copy goes behind those that are there."""
    engine = c.engines[e]
    first, mask = engine.slot_first, engine.slot_mask
    c.blocks[block].key = key
    c.blocks[block].twin = c.blocks[block].elder = -1
    c.blocks[block].last = block
    at = home(key) & mask
    while True:
        other = c.slots[first + at]
        if other < 0:
            c.slots[first + at] = block
            tell_block(c, e, STORED, key)
            return
        if c.blocks[other].key == key:
            last = c.blocks[other].last
            c.blocks[last].twin = block
            c.blocks[block].elder = last
            c.blocks[other].last = block
            return
        at = (at + 1) & mask


@compiled
def forget(c: Cluster, e: int, block: int) -> None:
    """Take a block's name away. The last copy of a prefix goes to the lower tier, if there is one."""
    key = c.blocks[block].key
    if key == 0:
        return
    engine = c.engines[e]
    first, mask = engine.slot_first, engine.slot_mask
    at = home(key) & mask
    while c.blocks[c.slots[first + at]].key != key:
        at = (at + 1) & mask
    head = c.slots[first + at]
    twin = c.blocks[block].twin
    c.blocks[block].key = 0
    c.blocks[block].twin = -1
    if head != block:
        elder = c.blocks[block].elder
        c.blocks[elder].twin = twin
        if twin >= 0:
            c.blocks[twin].elder = elder
        else:
            c.blocks[head].last = elder
        return
    if twin >= 0:
        c.slots[first + at] = twin
        c.blocks[twin].elder = -1
        c.blocks[twin].last = c.blocks[block].last
        return
    _close_gap(c, first, mask, at)
    tell_block(c, e, REMOVED, key)
    if engine.tier_count:
        tier_put(c, e, key)


@compiled
def _close_gap(c: Cluster, first: int, mask: int, at: int) -> None:
    """Delete one slot of linear probing: move up what would not be found behind the gap."""
    gap = at
    while True:
        c.slots[first + gap] = -1
        while True:
            at = (at + 1) & mask
            block = c.slots[first + at]
            if block < 0:
                return
            wanted = home(c.blocks[block].key) & mask
            inside = gap < wanted <= at if gap <= at else (gap < wanted or wanted <= at)
            if not inside:
                break
        c.slots[first + gap] = block
        gap = at


@compiled
def unlink(c: Cluster, e: int, block: int) -> None:
    """Take a block out of the free queue."""
    engine = c.engines[e]
    before, after = c.blocks[block].before, c.blocks[block].after
    if before >= 0:
        c.blocks[before].after = after
    else:
        engine.free_head = after
    if after >= 0:
        c.blocks[after].before = before
    else:
        engine.free_tail = before
    engine.free_count -= 1


@compiled
def free_block(c: Cluster, e: int, block: int) -> None:
    """Nobody holds it: to the end of the free queue, or to its front if it has no name to be found by."""
    engine = c.engines[e]
    entry = c.blocks[block]
    engine.free_count += 1
    if entry.key == 0 and c.totals[0].caching and engine.free_head >= 0:
        entry.before, entry.after = -1, engine.free_head
        c.blocks[engine.free_head].before = block
        engine.free_head = block
        return
    entry.before, entry.after = engine.free_tail, -1
    if engine.free_tail >= 0:
        c.blocks[engine.free_tail].after = block
    else:
        engine.free_head = block
    engine.free_tail = block


@compiled
def grow(c: Cluster, e: int, r: int, tokens: int) -> bool:
    """Give a request room for so many tokens. False, and nothing changed, when too few blocks are free."""
    width = c.totals[0].block_tokens
    request = c.requests[r]
    wanted = (tokens + width - 1) // width - request.block_count
    if wanted <= 0:
        return True
    if wanted > c.engines[e].free_count:
        return False
    for _ in range(wanted):
        block = c.engines[e].free_head
        unlink(c, e, block)
        forget(c, e, block)
        c.blocks[block].ref = 1
        c.blocks[block].ready_s = 0.0
        c.tables[r, request.block_count] = block
        request.block_count += 1
    return True


@compiled
def publish(c: Cluster, e: int, r: int) -> None:
    """Name the blocks that are full now."""
    request = c.requests[r]
    full = request.computed // c.totals[0].block_tokens
    while request.stored < full:
        name_block(c, e, c.tables[r, request.stored], key_of(c, r, request.stored))
        request.stored += 1


@compiled
def release(c: Cluster, e: int, r: int) -> None:
    """Drop the request's hold on its blocks, the last one first."""
    request = c.requests[r]
    for place in range(request.block_count - 1, -1, -1):
        block = c.tables[r, place]
        c.blocks[block].ref -= 1
        if c.blocks[block].ref == 0:
            free_block(c, e, block)
    request.block_count = 0
    request.stored = 0


@compiled
def hit_blocks(c: Cluster, e: int, r: int) -> int:
    """How many of the request's blocks, from the first, are cached; written into its table.

    The last token is always computed (its logits are needed).
    """
    request = c.requests[r]
    if not c.totals[0].caching:
        return 0
    limit = (request.tokens - 1) // c.totals[0].block_tokens
    count = 0
    while count < limit:
        block = find(c, e, key_of(c, r, count))
        if block < 0:
            break
        c.tables[r, count] = block
        count += 1
    return count


@compiled
def share(c: Cluster, e: int, r: int, count: int) -> float:
    """Hold the first `count` blocks of the request's table, which `hit_blocks` has written. When all of them are there:
    some may be on their way from the lower tier."""
    ready_s = 0.0
    for place in range(count):
        block = c.tables[r, place]
        ready_s = max(ready_s, c.blocks[block].ready_s)
        if c.blocks[block].ref == 0:
            unlink(c, e, block)
        c.blocks[block].ref += 1
    c.requests[r].block_count = count
    c.requests[r].stored = count
    return ready_s


@compiled
def tier_find(c: Cluster, e: int, key: int) -> int:
    """The lower tier's block with this prefix; -1 where it has none."""
    engine = c.engines[e]
    return _look_up(c, engine.tier_slot_first, engine.tier_slot_mask, key)


@compiled
def tier_touch(c: Cluster, e: int, block: int) -> None:
    """It was used: to the young end of the lower tier's order."""
    engine = c.engines[e]
    if engine.tier_tail == block:
        return
    _tier_unlink(c, e, block)
    _tier_append(c, e, block)


@compiled
def tier_put(c: Cluster, e: int, key: int) -> None:
    """The lower tier takes an evicted block, in place of its oldest when it is full."""
    engine = c.engines[e]
    block = tier_find(c, e, key)
    if block >= 0:
        tier_touch(c, e, block)
        return
    first, mask = engine.tier_slot_first, engine.tier_slot_mask
    if engine.tier_used < engine.tier_count:
        block = engine.tier_first + engine.tier_used
        engine.tier_used += 1
    else:
        block = engine.tier_head
        _tier_unlink(c, e, block)
        at = home(c.blocks[block].key) & mask
        while c.slots[first + at] != block:
            at = (at + 1) & mask
        _close_gap(c, first, mask, at)
        tell_block(c, e, TIER_REMOVED, c.blocks[block].key)
    tell_block(c, e, TIER_STORED, key)
    c.blocks[block].key = key
    _tier_append(c, e, block)
    at = home(key) & mask
    while c.slots[first + at] >= 0:
        at = (at + 1) & mask
    c.slots[first + at] = block


@compiled
def _tier_unlink(c: Cluster, e: int, block: int) -> None:
    engine = c.engines[e]
    before, after = c.blocks[block].before, c.blocks[block].after
    if before >= 0:
        c.blocks[before].after = after
    else:
        engine.tier_head = after
    if after >= 0:
        c.blocks[after].before = before
    else:
        engine.tier_tail = before


@compiled
def _tier_append(c: Cluster, e: int, block: int) -> None:
    engine = c.engines[e]
    entry = c.blocks[block]
    entry.before, entry.after = engine.tier_tail, -1
    if engine.tier_tail >= 0:
        c.blocks[engine.tier_tail].after = block
    else:
        engine.tier_head = block
    engine.tier_tail = block
