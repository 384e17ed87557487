"""The engine against a clock that the test sets: lag, catching up, arrivals and aborts in the middle of a step.

Owns: `engine_clock`. Does not own: what a step does (`test_scheduler`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from perfmodel.adapters.engine_clock import ClockConfig, EngineClock
from perfmodel.errors import ConfigError
from perfmodel.scheduler import ChoiceTokens, EngineConfig, EngineCore, Finished, StepOutcome, SubmitOutcome
from perfmodel.step_time import BatchShape
from perfmodel.workload import SimRequest

# Model seconds in a real one: a step of one second is due a real millisecond later.
SPEED = 1000.0


class Dial:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def read(self) -> float:
        return self.now_s


class OneSecond:
    def step_s(self, batch: BatchShape) -> float:
        return 1.0


class Watcher:
    """Observer and sink in one: what was delivered, and in how many flushes."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.lags_s: list[float] = []
        self.aborted: list[Finished] = []
        self.taken: list[ChoiceTokens] = []
        self.flush_count = 0

    def step(self, outcome: StepOutcome, lag_s: float) -> None:
        self.steps.append((outcome.starts_at_s, outcome.ends_at_s))
        self.lags_s.append(lag_s)

    def finished(self, finished: Finished) -> None:
        self.aborted.append(finished)

    def take(self, output: ChoiceTokens) -> None:
        self.taken.append(output)

    def flush(self) -> None:
        self.flush_count += 1


def engine(dial: Dial, watcher: Watcher) -> EngineClock:
    core = EngineCore(EngineConfig(block_count=100), OneSecond())
    return EngineClock(core, ClockConfig(SPEED), watcher, dial.read)


def request(name: str, max_tokens: int) -> SimRequest:
    return SimRequest(name, [1, 2, 3], max_tokens, ignore_eos=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 there is no event: the clock under test has no hook for it
            await asyncio.sleep(0.001)


async def test_nothing_is_delivered_before_its_time() -> None:
    dial, watcher = Dial(), Watcher()
    clock = engine(dial, watcher)
    assert clock.submit(request("a", 3), watcher) is SubmitOutcome.ACCEPTED
    await asyncio.sleep(0.02)
    assert watcher.taken == []
    dial.now_s += 0.001
    await until(lambda: len(watcher.taken) == 1)
    assert clock.live_count == 1
    clock.stop()


async def test_late_steps_keep_the_models_pace_tell_their_lag_and_are_written_once() -> None:
    dial, watcher = Dial(), Watcher()
    clock = engine(dial, watcher)
    clock.submit(request("a", 5), watcher)
    await asyncio.sleep(0.005)
    dial.now_s += 0.100
    await until(lambda: len(watcher.taken) == 5)
    assert [end - start for start, end in watcher.steps] == [1.0] * 5
    assert [round(lag_s, 6) for lag_s in watcher.lags_s] == [0.099, 0.098, 0.097, 0.096, 0.095]
    assert [output.waited_s for output in watcher.taken] == [1.0] * 5
    assert watcher.flush_count == 1
    assert clock.live_count == 0


async def test_who_arrives_while_a_step_is_late_arrives_at_its_end() -> None:
    dial, watcher = Dial(), Watcher()
    clock = engine(dial, watcher)
    clock.submit(request("a", 1), watcher)
    await asyncio.sleep(0.005)
    dial.now_s += 0.050
    assert clock.lag_s == pytest.approx(0.049)
    clock.submit(request("b", 1), watcher)
    await until(lambda: len(watcher.taken) == 2)
    finished = watcher.taken[1].finished
    assert finished is not None
    assert (finished.arrived_at_s, finished.first_scheduled_at_s, finished.ended_at_s) == (1.0, 1.0, 2.0)


async def test_after_a_rest_the_model_is_at_the_real_time_again() -> None:
    dial, watcher = Dial(), Watcher()
    clock = engine(dial, watcher)
    clock.submit(request("a", 1), watcher)
    await asyncio.sleep(0.005)
    dial.now_s += 5
    await until(lambda: len(watcher.taken) == 1)
    dial.now_s += 5
    clock.submit(request("b", 1), watcher)
    await asyncio.sleep(0.005)
    dial.now_s += 0.001
    await until(lambda: len(watcher.taken) == 2)
    assert watcher.steps[1] == (10_000.0, 10_001.0)
    assert watcher.lags_s[1] < 0.0005


async def test_requests_of_one_turn_of_the_loop_share_a_step() -> None:
    dial, watcher = Dial(), Watcher()
    clock = engine(dial, watcher)
    clock.submit(request("a", 1), watcher)
    clock.submit(request("b", 1), watcher)
    await asyncio.sleep(0.005)
    dial.now_s += 0.001
    await until(lambda: len(watcher.taken) == 2)
    assert len(watcher.steps) == 1


async def test_an_abort_in_the_middle_of_a_step_frees_now_and_is_silent_then() -> None:
    dial, watcher = Dial(), Watcher()
    clock = engine(dial, watcher)
    clock.submit(request("a", 3), watcher)
    await asyncio.sleep(0.005)
    assert clock.core.pool.used_block_count == 1
    clock.abort("a")
    clock.abort("a")
    assert clock.core.pool.used_block_count == 0
    assert [finished.reason.value for finished in watcher.aborted] == ["abort"]
    dial.now_s += 0.001
    await until(lambda: len(watcher.steps) == 1)
    assert watcher.taken == []


async def test_a_request_in_its_last_step_still_counts_as_running() -> None:
    dial, watcher = Dial(), Watcher()
    clock = engine(dial, watcher)
    clock.submit(request("a", 1), watcher)
    await asyncio.sleep(0.005)
    assert (clock.stats().running_count, clock.ending_count()) == (0, 1)
    dial.now_s += 0.001
    await until(lambda: len(watcher.taken) == 1)
    assert clock.ending_count() == 0


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), 2e6])
def test_an_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="expected above 0 and at most 1,000,000"):
        ClockConfig(speed)


async def test_when_a_client_leaves_whose_kv_was_coming_back_the_next_one_runs() -> None:
    """The engine sleeps until a restore that nobody waits for any more: 1,000 s here."""
    dial, watcher = Dial(), Watcher()
    limits = {"block_count": 9, "block_size_tokens": 4, "tier_block_count": 100, "restore_s_per_block": 1_000.0}
    clock = EngineClock(EngineCore(EngineConfig(**limits), OneSecond()), ClockConfig(SPEED), watcher, dial.read)  # type: ignore[arg-type] # by name
    for name, first in (("a", 0), ("evicts a", 100), ("a again", 0)):
        clock.submit(SimRequest(name, list(range(first, first + 28)), 1, ignore_eos=True), watcher)
        await asyncio.sleep(0.005)
        dial.now_s += 0.010
        if name != "a again":
            await until(lambda: clock.live_count == 0)
    clock.submit(SimRequest("waits for room", list(range(200, 228)), 1, ignore_eos=True), watcher)
    await asyncio.sleep(0.005)
    assert clock.live_count == 2
    clock.abort("a again")
    await asyncio.sleep(0.005)
    dial.now_s += 0.010
    await until(lambda: clock.live_count == 0)
    assert watcher.taken[-1].request_id == "waits for room"
