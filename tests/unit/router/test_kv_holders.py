"""Holder sets: one number for equal sets, edits that reach every block, and an end to sets that no block has."""

from __future__ import annotations

from router.kv_events import Tier
from router.kv_holders import EMPTY, NO_ROW, HolderSets

ONE, TWO = 0b01, 0b10


def test_equal_sets_have_one_number_and_unused_ones_are_forgotten() -> None:
    sets = HolderSets(10)
    both = sets.number((ONE | TWO, 0, 0, 0))
    assert both == sets.number((ONE | TWO, 0, 0, 0)) not in (EMPTY, NO_ROW)
    assert sets.number((0, 0, 0, 0)) == EMPTY and len(sets) == 1
    sets.move(NO_ROW, both, 5)
    sets.move(both, EMPTY, 3)
    assert sets.row_counts[both] == 2 and sets.row_counts[EMPTY] == 3
    sets.move(both, EMPTY, 2)
    assert len(sets) == 0 and sets.number((0, TWO, 0, 0)) == both, "its number is free for another"


def test_worth_is_by_best_tier_and_number_of_holders() -> None:
    sets = HolderSets(20)
    masks = [(0, 0, 0, ONE), (0, 0, ONE, ONE), (0, ONE, 0, 0), (ONE, ONE, 0, 0), (0, 0, 0, ONE | TWO), (ONE, TWO, 0, 0)]
    numbers = [sets.number(each) for each in masks]
    assert sets.worths[numbers].tolist() == [1, 2, 3, 4, 5, 5]
    for number in numbers:
        sets.move(NO_ROW, number, 7)
    assert sets.worth_rows == [0, 7, 7, 7, 7, 14]


def test_a_seat_is_taken_out_of_every_set_at_once() -> None:
    sets = HolderSets(10)
    first, second, alone = (sets.number(each) for each in ((ONE | TWO, 0, 0, 0), (TWO, ONE, 0, 0), (0, ONE, 0, 0)))
    for number in (first, second, alone):
        sets.move(NO_ROW, number, 4)
    assert sets.live_blocks(0) == 12 and sets.live_blocks(0, Tier.HOST) == 8
    sets.forget_seat(0, Tier.HOST)
    assert sets.masks[second] == (TWO, 0, 0, 0) and sets.live_blocks(0) == 4
    sets.forget_seat(0, None)
    assert sets.masks[first] == sets.masks[second] == (TWO, 0, 0, 0) and sets.seats[alone] == 0
    assert sets.worth_rows == [4, 0, 0, 0, 8, 0]
    assert sets.number((TWO, 0, 0, 0)) in (first, second)
    for number in (first, second, alone):
        sets.move(number, EMPTY, 4)
    assert len(sets) == 0 and sets.worth_rows[0] == 12 and sets.number((0, 0, 0, 0)) == EMPTY


def test_sets_are_bounded_and_many() -> None:
    sets = HolderSets(3_000)
    numbers = [sets.number((1 << seat, 0, 0, 0)) for seat in range(3_100)]
    assert numbers[2_997] == 2_999 and set(numbers[2_998:]) == {-1}
    assert len(sets.worths) >= 3_000 and sets.worths[2_999] == 4
