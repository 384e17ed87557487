"""What a router knows of who holds which prefix: from its own picks within published bounds, or from KV events.

Owns: three views with one question, "how many of these blocks, from the first, does each engine have". Does not own:
what a rule makes of the answer. Engines are bits of one integer a block, so that a walk down a prompt handles all of
them at once. A block is one of the trace, which may be wider than the router's own: bounds are converted by tokens.
Not modelled: parts of a block, hash collisions, and lost events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol


class PrefixView(Protocol):
    """Any of them."""

    def matched(self, blocks: Sequence[int]) -> list[int]:
        """Blocks of the prompt, from the first, that each engine is thought to have."""
        ...


def leading_blocks(holders: Mapping[int, int], blocks: Sequence[int], engine_count: int) -> list[int]:
    """For each engine, how many of the first `blocks` all have its bit in `holders`."""
    counts = [0] * engine_count
    alive = (1 << engine_count) - 1
    for depth, block in enumerate(blocks):
        still = alive & holders.get(block, 0)
        if still != alive:
            _set_bits(counts, alive ^ still, depth)
            alive = still
            if not alive:
                return counts
    _set_bits(counts, alive, len(blocks))
    return counts


def _set_bits(counts: list[int], bits: int, depth: int) -> None:
    if not depth:
        return
    while bits:
        low = bits & -bits
        counts[low.bit_length() - 1] = depth
        bits ^= low


class EngineHistory:
    """Blocks of the prompts sent to each engine, the least recently sent forgotten first. Mutable: the memory.

    `most_blocks` bounds each engine's. With `leaves_first` the end of a prompt is forgotten before its beginning, as a
    radix tree does; without, its first block is, as in a plain list by last use.
    """

    def __init__(self, engine_count: int, most_blocks: int, *, leaves_first: bool) -> None:
        self._holders: dict[int, int] = {}
        self._used: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engine_count)]
        self._most_blocks = most_blocks
        self._leaves_first = leaves_first

    def matched(self, blocks: Sequence[int]) -> list[int]:
        """As the router remembers."""
        return leading_blocks(self._holders, blocks, len(self._used))

    def sent(self, blocks: Sequence[int], engine: int) -> None:
        """A prompt of these blocks was sent to this engine."""
        used, holders, bit = self._used[engine], self._holders, 1 << engine
        for block in reversed(blocks) if self._leaves_first else blocks:
            if block in used:
                used.move_to_end(block)
            else:
                used[block] = None
                holders[block] = holders.get(block, 0) | bit
        while len(used) > self._most_blocks:
            block, _ = used.popitem(last=False)
            left = holders[block] & ~bit
            if left:
                holders[block] = left
            else:
                del holders[block]


class SharedHistory:
    """One memory of blocks for the whole fleet, bounded in number and by idle time. Mutable: the memory."""

    def __init__(self, engine_count: int, most_blocks: int, idle_s: float) -> None:
        self._holders: OrderedDict[int, int] = OrderedDict()
        self._used_s: dict[int, float] = {}
        self._engine_count = engine_count
        self._most_blocks = most_blocks
        self._idle_s = idle_s

    def matched(self, blocks: Sequence[int]) -> list[int]:
        """As the router remembers."""
        return leading_blocks(self._holders, blocks, self._engine_count)

    def sent(self, blocks: Sequence[int], engine: int, now_s: float) -> None:
        """A prompt of these blocks was sent to this engine."""
        holders, used_s, bit = self._holders, self._used_s, 1 << engine
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit
            holders.move_to_end(block)
            used_s[block] = now_s
        while len(holders) > self._most_blocks:
            self._forget_oldest()

    def forget_idle(self, now_s: float) -> None:
        """Forget what nobody asked for in `idle_s`."""
        while self._holders and self._used_s[next(iter(self._holders))] < now_s - self._idle_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        block, _ = self._holders.popitem(last=False)
        del self._used_s[block]


class EventView:
    """The exact index: what each engine said that it holds, by tier. Mutable: the index.

    `stored` and `removed` are what a simulation tells a policy that hears KV events; any tier but "device" is a lower.
    """

    def __init__(self, engine_count: int) -> None:
        self._engine_count = engine_count
        self._device: dict[int, int] = {}
        self._lower: dict[int, int] = {}

    def stored(self, engine: int, blocks: Sequence[int], tier: str) -> None:
        """The engine holds these now."""
        holders, bit = self._of(tier), 1 << engine
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit

    def removed(self, engine: int, blocks: Sequence[int], tier: str) -> None:
        """It does no more. A block that was never heard of is ignored."""
        holders, bit = self._of(tier), 1 << engine
        for block in blocks:
            left = holders.get(block, 0) & ~bit
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)

    def _of(self, tier: str) -> dict[int, int]:
        return self._device if tier == "device" else self._lower

    def matched(self, blocks: Sequence[int]) -> list[int]:
        """Blocks in either tier, from the first without a gap."""
        return [device + lower for device, lower in self.by_tier(blocks)]

    def by_tier(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """For each engine (on the device, only in the lower tier), of the blocks from the first without a gap."""
        device = leading_blocks(self._device, blocks, self._engine_count)
        if not self._lower:
            return [(count, 0) for count in device]
        return [self._follow(blocks, engine, count) for engine, count in enumerate(device)]

    def _follow(self, blocks: Sequence[int], engine: int, device: int) -> tuple[int, int]:
        """Go on behind the blocks on the device, through both tiers."""
        bit, lower = 1 << engine, 0
        for block in blocks[device:]:
            if self._device.get(block, 0) & bit:
                device += 1
            elif self._lower.get(block, 0) & bit:
                lower += 1
            else:
                break
        return device, lower


class HearsKvEvents:
    """What a rule that hears KV events begins with: its exact index, kept by what it is told. Mutable: the index."""

    hears_kv_events = True

    def __init__(self, engine_count: int) -> None:
        self._index = EventView(engine_count)

    def stored(self, engine: int, blocks: Sequence[int], tier: str, now_s: float) -> None:
        """A KV event."""
        self._index.stored(engine, blocks, tier)

    def removed(self, engine: int, blocks: Sequence[int], tier: str, now_s: float) -> None:
        """A KV event."""
        self._index.removed(engine, blocks, tier)
