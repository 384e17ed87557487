"""What a router thinks who holds, by example."""

from __future__ import annotations

from router.policies.prefix_views import EngineHistory, EventView, SharedHistory, leading_blocks


def test_a_walk_ends_where_an_engine_lacks_a_block() -> None:
    holders = {1: 0b111, 2: 0b101, 3: 0b001, 4: 0b111}
    assert leading_blocks(holders, [1, 2, 3, 4], 3) == [4, 1, 2]
    assert leading_blocks(holders, [9, 1], 3) == [0, 0, 0]
    assert leading_blocks(holders, [], 3) == [0, 0, 0]


def test_a_list_by_last_use_forgets_the_beginning_first_and_a_tree_the_end() -> None:
    for leaves_first, left in ((False, 0), (True, 2)):
        history = EngineHistory(2, 4, leaves_first=leaves_first)
        history.sent([1, 2, 3], 0)
        history.sent([7, 8], 0)
        assert history.matched([1, 2, 3]) == [left, 0]
        assert history.matched([7, 8]) == [2, 0]


def test_use_keeps_a_prompt_and_engines_forget_apart() -> None:
    history = EngineHistory(2, 4, leaves_first=False)
    history.sent([1, 2], 0)
    history.sent([1, 2], 1)
    history.sent([3, 4], 0)
    history.sent([1, 2], 0)
    history.sent([5, 6], 0)
    assert history.matched([1, 2]) == [2, 2]
    assert history.matched([3, 4]) == [0, 0]


def test_a_shared_memory_is_bounded_and_forgets_what_is_idle() -> None:
    history = SharedHistory(2, 4, idle_s=10.0)
    history.sent([1, 2], 0, 0.0)
    history.sent([1, 2], 1, 1.0)
    assert history.matched([1, 2]) == [2, 2]
    history.sent([3, 4, 5], 0, 2.0)
    assert history.matched([1, 2]) == [0, 0], "the first block of the oldest is gone"
    history.forget_idle(12.0)
    assert history.matched([3, 4, 5]) == [3, 0]
    history.forget_idle(12.1)
    assert history.matched([3, 4, 5]) == [0, 0]


def test_events_by_tier() -> None:
    view = EventView(2)
    view.stored(0, [1, 2, 3], "device")
    view.stored(1, [1], "device")
    view.stored(1, [2, 4], "lower")
    assert view.by_tier([1, 2, 3, 4]) == [(3, 0), (1, 1)]
    view.stored(0, [3], "lower")
    view.removed(0, [2, 3], "device")
    view.removed(0, [99], "device")
    assert view.matched([1, 2, 3, 4]) == [1, 2]
    view.stored(0, [2], "device")
    assert view.by_tier([1, 2, 3, 4]) == [(2, 1), (1, 1)]
    view.removed(1, [2, 4], "lower")
    view.removed(0, [3], "lower")
    assert view.by_tier([1, 2, 3, 4]) == [(2, 0), (1, 0)]
