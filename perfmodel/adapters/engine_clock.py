"""Runs the simulated engine against a real clock: sleeps until a step ends, hands out its tokens, begins the next.

Owns: the mapping of model time to real time (`speed` model seconds per real second), when each step's outputs are
delivered, and how late that was. Does not own: what a step does (`scheduler`) or where tokens go (each request's
`Sink`).
The model's clock never waits for this process: a step that is delivered late is followed by one that begins when it
should have ended, so the model keeps its pace after a hiccup, and the lag says by how much reality was behind. What
arrives meanwhile is taken as arriving at the end of the late step. An idle engine has no timer at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from perfmodel.errors import ConfigError
from perfmodel.scheduler import ChoiceTokens, EngineCore, EngineStats, Finished, StepOutcome, SubmitOutcome
from perfmodel.workload import SimRequest

# Event loops keep time in milliseconds; a step due sooner than half of one is due now.
_DUE_NOW_S = 0.0005
# Longest stretch of delivering late steps before sockets are looked at again: a disconnect is seen well within 100 ms.
_SLICE_S = 0.005


class Sink(Protocol):
    """Where one request's tokens go."""

    def take(self, output: ChoiceTokens) -> None:
        """One token of one choice is due."""
        ...

    def flush(self) -> None:
        """All that is due now has been taken: write it."""
        ...


class StepObserver(Protocol):
    """Told what was delivered (metrics)."""

    def step(self, outcome: StepOutcome, lag_s: float) -> None:
        """A step was delivered `lag_s` real seconds after it was due; or a wait for KV is over (`asleep`)."""
        ...

    def finished(self, finished: Finished) -> None:
        """A choice ended by an abort; ends within a step are in its outcome."""
        ...


@dataclass(frozen=True, slots=True)
class ClockConfig:
    """`speed` model seconds pass in one real second."""

    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed <= 1_000_000:
            raise ConfigError(f"speed is {self.speed}; expected above 0 and at most 1,000,000")


class EngineClock:
    """Drives one EngineCore on the running event loop. `real_clock_s` is a monotonic clock."""

    def __init__(
        self, core: EngineCore, config: ClockConfig, observer: StepObserver, real_clock_s: Callable[[], float]
    ) -> None:
        self.core = core
        self._speed = config.speed
        self._observer = observer
        self._real_clock_s = real_clock_s
        self._origin_s = real_clock_s()
        self._model_s = 0.0
        self._pending: StepOutcome | None = None
        self._sinks: dict[str, Sink] = {}
        self._open_counts: dict[str, int] = {}
        self._wake_up: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def live_count(self) -> int:
        """Requests that were submitted and not finished or aborted, as their clients see it."""
        return len(self._sinks)

    @property
    def lag_s(self) -> float:
        """How late the step that should have been delivered is, now; 0 when none is overdue."""
        if self._pending is None:
            return 0.0
        return max(0.0, self._real_clock_s() - self._due_s(self._pending))

    def stats(self) -> EngineStats:
        """The core's gauges and counters (a step's effects are counted from its beginning)."""
        return self.core.stats()

    def ending_count(self) -> int:
        """Choices whose last token is still being computed: the core has let them go, their clients wait for it."""
        if self._pending is None:
            return 0
        return sum(1 for output in self._pending.outputs if output.finished and output.request_id in self._sinks)

    def submit(self, request: SimRequest, sink: Sink) -> SubmitOutcome:
        """Queue a request now; its tokens go to `sink`."""
        outcome = self.core.submit(request, self._now_s())
        if outcome is SubmitOutcome.ACCEPTED:
            self._sinks[request.request_id] = sink
            self._open_counts[request.request_id] = request.choice_count
            self._rouse()
            if self._pending is None and self._wake_up is None:
                # Requests that arrived in the same turn of the loop share the first step.
                self._wake_up = self._loop.call_soon(self._advance)
        return outcome

    def abort(self, request_id: str) -> None:
        """End a request now: its blocks are free when this returns, and its sink hears no more."""
        if self._sinks.pop(request_id, None) is None:
            return
        del self._open_counts[request_id]
        for finished in self.core.abort(request_id, self._now_s()):
            self._observer.finished(finished)
        self._rouse()  # it may have waited for its KV in another's place

    def _rouse(self) -> None:
        """An engine that only waits for KV to come back looks again at what it can do."""
        if self._pending is not None and self._pending.asleep:
            self.stop()
            self._observer.step(self._pending, 0.0)
            self._pending = None
            self._wake_up = self._loop.call_soon(self._advance)

    def stop(self) -> None:
        """Cancel the timer; nothing is delivered any more."""
        if self._wake_up is not None:
            self._wake_up.cancel()
            self._wake_up = None

    def _now_s(self) -> float:
        """Model time of an event that happens now."""
        now_s = max(self._model_s, (self._real_clock_s() - self._origin_s) * self._speed)
        if self._pending is not None:
            now_s = min(now_s, self._pending.ends_at_s)
        self._model_s = now_s
        return now_s

    def _due_s(self, outcome: StepOutcome) -> float:
        return self._origin_s + outcome.ends_at_s / self._speed

    def _advance(self) -> None:
        self._wake_up = None
        began_s = self._real_clock_s()
        touched: dict[str, Sink] = {}
        while True:
            if self._pending is None:
                self._pending = self.core.step(self._model_s)
            if self._pending is None:
                break
            now_s = self._real_clock_s()
            due_s = self._due_s(self._pending)
            if due_s - now_s > _DUE_NOW_S:
                self._wake_up = self._loop.call_later(due_s - now_s, self._advance)
                break
            if now_s - began_s > _SLICE_S:
                self._wake_up = self._loop.call_later(0, self._advance)
                break
            self._deliver(self._pending, now_s - due_s, touched)
        for sink in touched.values():
            sink.flush()

    def _deliver(self, outcome: StepOutcome, lag_s: float, touched: dict[str, Sink]) -> None:
        self._pending = None
        self._model_s = outcome.ends_at_s
        self._observer.step(outcome, lag_s)
        sinks = self._sinks
        for output in outcome.outputs:
            request_id = output.request_id
            sink = sinks.get(request_id)
            if sink is None:
                continue
            touched[request_id] = sink
            if output.finished is not None:
                self._open_counts[request_id] -= 1
                if not self._open_counts[request_id]:
                    del self._open_counts[request_id], sinks[request_id]
            sink.take(output)
