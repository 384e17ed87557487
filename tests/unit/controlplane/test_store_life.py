"""Which life of the store a process meets, case by case."""

from __future__ import annotations

from controlplane.rate_limit import PROCESS_TTL_US, RESTART_US
from controlplane.store_life import NOT_CLEAN, Caller, CleanStop, Clock, Life, next_life

AT = Clock(now_us=1_000_000_000, opening_us=1_000_000)
STOPPED_US = 999_000_000
KEPT = Life("first", "first", 0, 5)
NEWCOMER = Caller("second", met_before=False, met_other=False, uptime_s=0)
LOST = Life("second", "second", AT.now_us + RESTART_US, AT.now_us)


def after(run_id: str) -> CleanStop:
    return CleanStop(run_id, STOPPED_US)


def test_nothing_changes_within_a_run() -> None:
    caller = Caller("first", met_before=True, met_other=False, uptime_s=9)
    assert next_life(KEPT, caller, None, [STOPPED_US], AT) is KEPT


def test_a_store_that_nobody_used_is_full_and_waits_for_earlier_processes_only_when_it_has_just_started() -> None:
    assert next_life(None, NEWCOMER, None, [], AT) == Life("second", "second", 0, AT.now_us)
    settled = Caller("second", met_before=False, met_other=False, uptime_s=2)
    assert next_life(None, settled, None, [], AT) == Life("second", "second", 0, AT.now_us - AT.opening_us)


def test_another_run_is_a_loss() -> None:
    assert next_life(KEPT, NEWCOMER, None, [], AT) == LOST


def test_an_empty_store_is_a_loss_to_who_met_one_before() -> None:
    caller = Caller("second", met_before=True, met_other=True, uptime_s=0)
    assert next_life(None, caller, None, [], AT) == LOST


def test_who_knew_another_run_makes_a_store_that_seemed_new_a_loss() -> None:
    fresh = Life("second", "second", 0, 5)
    caller = Caller("second", met_before=True, met_other=True, uptime_s=9)
    assert next_life(fresh, caller, None, [], AT) == LOST


def test_a_store_without_memory_is_a_loss_after_a_run_that_did_not_end_cleanly() -> None:
    assert next_life(None, NEWCOMER, NOT_CLEAN, [], AT) == LOST
    assert next_life(KEPT, NEWCOMER, NOT_CLEAN, [], AT) == LOST


def test_the_run_after_a_clean_stop_goes_on_in_the_same_era() -> None:
    assert next_life(KEPT, NEWCOMER, after("first"), [], AT) == Life("second", "first", 0, 5)
    once_lost = Life("first", "older", 77, 70)
    assert next_life(once_lost, NEWCOMER, after("first"), [], AT) == Life("second", "older", 77, 70)


def test_the_clean_stop_of_another_run_says_nothing() -> None:
    assert next_life(KEPT, NEWCOMER, after("zeroth"), [], AT) == LOST
    assert next_life(None, NEWCOMER, after("first"), [], AT) == Life("second", "second", 0, AT.now_us)


def test_a_process_that_lived_at_the_stop_makes_it_a_loss_and_a_dead_one_does_not() -> None:
    dead, living = STOPPED_US - PROCESS_TTL_US - 1, STOPPED_US - PROCESS_TTL_US
    assert next_life(KEPT, NEWCOMER, after("first"), [dead], AT).era == "first"
    assert next_life(KEPT, NEWCOMER, after("first"), [dead, living], AT) == LOST
