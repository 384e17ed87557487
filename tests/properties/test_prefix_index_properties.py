"""The prefix index against a plain model, over random histories; and proof that the property catches planted faults.

The model keeps each block's last use as one number and evicts the block with the oldest use, deepest first: what an
engine does. The index must hold exactly the same blocks after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from router.blocks import BlockLadder
from router.prefix_index import Holdings
from tests.exploring import examples

LADDER = BlockLadder.uniform(10, 64)

# A prompt is a path through a small tree: three ways to go on at every block, so that prompts share, branch and extend.
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), PATHS),
        st.tuples(st.just("withdraw"), st.just([0])),
        st.tuples(st.just("forget"), st.lists(st.integers(0, 8), min_size=1, max_size=1)),
    ),
    max_size=40,
)


def chain(path: list[int]) -> list[int]:
    """Block hashes that stand for prefixes: the digits of the path so far."""
    hashes, value = [], 0
    for turn in path:
        value = value * 4 + turn + 1
        hashes.append(value)
    return hashes


@dataclass
class Model:
    """Every held block with its last use and depth."""

    capacity_bytes: int
    used: dict[int, int] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=dict)

    def store(self, hashes: list[int], stamp: int) -> None:
        for number, block in enumerate(hashes):
            self.used[block] = stamp
            self.depth[block] = number
        while len(self.used) * 10 > self.capacity_bytes:
            self.evict()

    def evict(self) -> None:
        oldest = min(self.used, key=lambda block: (self.used[block], -self.depth[block]))
        del self.used[oldest]

    def forget(self, stamp: int) -> None:
        self.used = {block: use for block, use in self.used.items() if use > stamp}

    def held_blocks(self, hashes: list[int]) -> int:
        return next((number for number, block in enumerate(hashes) if block not in self.used), len(hashes))


def replay(steps: list[tuple[str, list[int]]], capacity_blocks: int, make: Callable[[BlockLadder], Holdings]) -> None:
    """Run a history through both and compare after each step."""
    holdings, model = make(LADDER), Model(capacity_blocks * 10)
    seen: list[list[int]] = []
    last: tuple[list[int], int, dict[int, int]] | None = None
    for stamp, (step, value) in enumerate(steps, start=1):
        if step == "store":
            hashes = chain(value)
            held = holdings.held_blocks(hashes)
            fresh = held < len(hashes) and capacity_blocks * 10 >= holdings.held_bytes + 10 * (len(hashes) - held)
            holdings.extend(hashes[held - 1] if held else 0, held, hashes[held:], stamp)
            holdings.evict(model.capacity_bytes)
            before = dict(model.used)
            model.store(hashes, stamp)
            seen.append(hashes)
            last = (hashes, stamp, before) if fresh else None
        elif step == "withdraw" and last is not None:
            hashes, stored, before = last
            holdings.withdraw(hashes[-1], stored)
            model.used = before  # a request that came to nothing has used nothing
            last = None
        elif step == "forget":
            since = stamp - value[0]
            holdings.forget_idle(since)
            model.forget(since)
            last = None
        assert len(holdings) == len(model.used)
        assert holdings.held_bytes == 10 * len(model.used) <= model.capacity_bytes
        for hashes in seen:
            assert holdings.held_blocks(hashes) == model.held_blocks(hashes)


@settings(max_examples=examples(200), deadline=None)
@given(STEPS, st.integers(1, 12))
def test_the_index_holds_what_a_block_by_block_lru_holds(steps: list[tuple[str, list[int]]], capacity: int) -> None:
    replay(steps, capacity, Holdings)


class NeverTouches(Holdings):
    """Fault: a used prompt keeps its old place."""

    def _touch(self, block: int, depth: int, stamp_us: int) -> None:
        return


class ForgetsChildren(Holdings):
    """Fault: a block that got a child still counts as the end of a path."""

    def _adopt(self, parent: int) -> None:
        return


class EvictsWholePaths(Holdings):
    """Fault: eviction frees more than it must."""

    def evict_oldest(self, target_bytes: int = -1) -> None:
        super().evict_oldest(-1)


class EvictsNewest(Holdings):
    """Fault: most recently used goes first."""

    def evict_oldest(self, target_bytes: int = -1) -> None:
        self._ends.move_to_end(next(reversed(self._ends)), last=False)
        super().evict_oldest(target_bytes)


class WithdrawsNothing(Holdings):
    """Fault: what never was prefilled stays."""

    def withdraw(self, block: int, stamp_us: int) -> None:
        return


@pytest.mark.parametrize("fault", [NeverTouches, ForgetsChildren, EvictsWholePaths, EvictsNewest, WithdrawsNothing])
def test_the_property_catches(fault: type[Holdings]) -> None:
    @settings(
        max_examples=400,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    @given(STEPS, st.integers(1, 12))
    def attempt(steps: list[tuple[str, list[int]]], capacity: int) -> None:
        replay(steps, capacity, fault)

    with pytest.raises((AssertionError, KeyError)):
        attempt()
