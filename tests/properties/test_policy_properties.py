"""No routing policy sees the future: output lengths, later requests, or more of a prompt than its blocks.

Owns: one property for every policy by name and for one that makes its picks of everything it is told: a run is cut at
a request, all that was not known by then is changed, and the picks up to the cut stay the same. It is shown to fail
for policies that cheat, and for simulations that tell too much. Does not own: what the rules are
(`tests/unit/router/test_baseline_policies.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import perfmodel.simulation.run
from perfmodel.adapters.compiled_code import remember_compiled_code
from perfmodel.simulation.fleet import LowerTier
from perfmodel.simulation.policy import Ask, EngineSample, KvTier, PolicyFleet, Usage
from perfmodel.step_time import StepTable
from perfmodel.traces.trace import Trace, trace_of
from router.adapters import policies
from tests.exploring import examples
from tests.fakes.plain_simulation import Fault, plain_simulation

ROOT = Path(__file__).parents[2]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inferplane.policies"]
TABLE = StepTable(0.010 + 0.001 * np.arange(65.0), 0.0007, 0.00001, 0.000001, 0.00001)
WIDTH = 4


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> None:
    remember_compiled_code()


@dataclass(frozen=True, slots=True)
class Row:
    """One request: prompts of a session grow from the same first blocks."""

    gap_s: float
    session: int
    blocks: int
    tail_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Future:
    """Where a run is cut, and what takes the place of all that was not known then."""

    cut: int
    rows: tuple[Row, ...]
    longer_tokens: int


def row_strategy() -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        gap_s=st.integers(0, 300).map(lambda n: n * 0.00137 + 1e-7 * (n * 7919 % 997)),
        session=st.integers(-1, 4),
        blocks=st.integers(0, 8),
        tail_tokens=st.integers(1, 3),
        output_tokens=st.integers(1, 20),
    )


def rows_strategy(fewest: int) -> st.SearchStrategy[tuple[Row, ...]]:
    return st.lists(row_strategy(), min_size=fewest, max_size=16).map(tuple)


def futures() -> st.SearchStrategy[Future]:
    return st.builds(Future, cut=st.integers(0, 15), rows=rows_strategy(0), longer_tokens=st.integers(1, 30))


def trace(rows: Sequence[Row], outputs: Sequence[int]) -> Trace:
    # a session's prompts share their first blocks, and its first one with every other session's
    blocks = [[0 if at == 0 else 100 * (row.session + 2) + at for at in range(row.blocks)] for row in rows]
    columns: dict[str, Any] = {
        "arrival_s": np.cumsum([row.gap_s for row in rows]),
        "session": [row.session for row in rows],
        "input_tokens": [row.blocks * WIDTH + row.tail_tokens for row in rows],
        "output_tokens": list(outputs),
        "tier": [0] * len(rows),
    }
    return trace_of(columns, blocks, WIDTH)


Factory = Callable[[PolicyFleet], Any]


@dataclass
class Recorder:
    """Passes everything on to a policy; keeps its picks and when answers ended. Mutable: that."""

    policy: Any
    picks: list[int | None]
    ended_s: dict[int, float]

    def __post_init__(self) -> None:
        # an answer's end is wanted here even if the policy does not hear
        self.hears, self._passes = True, self.policy.hears
        self.reads_blocks = self.policy.reads_blocks
        self.hears_kv_events = getattr(self.policy, "hears_kv_events", False)
        self.metrics_every_s = getattr(self.policy, "metrics_every_s", 0.0)

    def pick(self, ask: Ask, now_s: float) -> int | None:
        picked: int | None = self.policy.pick(ask, now_s)
        self.picks.append(picked)
        return picked

    def first_token(self, serial: int, now_s: float) -> None:
        if self._passes:
            self.policy.first_token(serial, now_s)

    def finished(self, serial: int, usage: Usage, now_s: float) -> None:
        self.ended_s[serial] = now_s
        if self._passes:
            self.policy.finished(serial, usage, now_s)

    def stored(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        self.policy.stored(engine, blocks, tier, now_s)

    def removed(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        self.policy.removed(engine, blocks, tier, now_s)

    def metrics(self, samples: Sequence[EngineSample], sampled_s: float) -> None:
        self.policy.metrics(samples, sampled_s)


def run(simulation: ModuleType, played: Trace, factory: Factory) -> Recorder:
    made: list[Recorder] = []

    def recorded(fleet: PolicyFleet) -> Recorder:
        made.append(Recorder(factory(fleet), [], {}))
        return made[0]

    spec = simulation.EngineSpec(
        "p", TABLE, 40 * WIDTH, 1.0, count=3, max_batched_tokens=16, max_sequence_count=4,
        tier=LowerTier(20 * WIDTH, 400.0),
    )  # fmt: skip
    simulation.simulate([spec], simulation.OpenLoop([played]), recorded)
    return made[0]


def check_future(
    simulation: ModuleType, rows: Sequence[Row], future: Future, factory_of: Callable[[Trace], Factory]
) -> None:
    """The picks up to the cut do not depend on what comes after it."""
    cut = future.cut % len(rows)
    outputs = [row.output_tokens for row in rows]
    first = trace(rows, outputs)
    before = run(simulation, first, factory_of(first))
    now_s = float(first.arrival_s[cut])
    others = [*rows[: cut + 1], *future.rows]
    changed = [
        row.output_tokens + future.longer_tokens * (at <= cut and before.ended_s[at] >= now_s)
        for at, row in enumerate(others)
    ]
    second = trace(others, changed)
    after = run(simulation, second, factory_of(second))
    assert after.picks[: cut + 1] == before.picks[: cut + 1]


class Listener:
    """Picks by everything that it was ever told: whatever the simulation lets slip changes its picks."""

    hears = reads_blocks = hears_kv_events = True
    metrics_every_s = 0.001

    def __init__(self, fleet: PolicyFleet) -> None:
        self._count = len(fleet.engines)
        self._told = 0

    def _hear(self, *said: object) -> None:
        self._told = hash((self._told, *said))

    def pick(self, ask: Ask, now_s: float) -> int:
        self._hear(*ask[:1], *ask[2:5], tuple(ask.blocks), round(now_s, 6))
        return self._told % self._count

    def first_token(self, serial: int, now_s: float) -> None:
        self._hear(serial, round(now_s, 6))

    def finished(self, serial: int, usage: Usage, now_s: float) -> None:
        self._hear(serial, tuple(usage), round(now_s, 6))

    def stored(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        self._hear(engine, tuple(blocks), tier == KvTier.LOWER)

    def removed(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        self._hear(engine, tuple(blocks), tier == KvTier.LOWER, 1)

    def metrics(self, samples: Sequence[EngineSample], sampled_s: float) -> None:
        self._hear(*(tuple(sample[:2]) for sample in samples), *(sample.queued_tokens for sample in samples))


def factory_by_name(name: str) -> Factory:
    if name == "listener":
        return Listener
    found: Factory = getattr(policies, str(POINTS[name]).partition(":")[2])
    return found


@pytest.mark.parametrize("name", [*POINTS, "listener"])
@given(rows=rows_strategy(2), future=futures())
@settings(max_examples=examples(40), deadline=None)
def test_no_policy_sees_the_future(name: str, rows: tuple[Row, ...], future: Future) -> None:
    check_future(perfmodel.simulation.run, rows, future, lambda _: factory_by_name(name))


def cheating(column: str, ahead: int) -> Callable[[Trace], Factory]:
    """A policy that looks something up in the trace itself: of its own request or of one that comes later."""

    def factory_of(played: Trace) -> Factory:
        class Cheat(Listener):
            def pick(self, ask: Ask, now_s: float) -> int:
                row = min(ask.serial + ahead, len(played) - 1)
                return int(getattr(played, column)[row]) % self._count

        return Cheat

    return factory_of


CHEATS = {
    "its own output length": cheating("output_tokens", 0),
    "the next prompt's length": cheating("input_tokens", 1),
    "the session after the next": cheating("session", 2),
}


def search(simulation: ModuleType, factory_of: Callable[[Trace], Factory]) -> None:
    @given(rows=rows_strategy(4), future=futures())
    @settings(
        max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def searching(rows: tuple[Row, ...], future: Future) -> None:
        check_future(simulation, rows, future, factory_of)

    searching()


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
def test_a_policy_that_cheats_is_caught(cheat: Callable[[Trace], Factory]) -> None:
    with pytest.raises(AssertionError):
        search(perfmodel.simulation.run, cheat)


LEAKS = [
    Fault("the output's length as its limit", "run", "part.prompt[row], self._options.output_limit_tokens, blocks",
          "part.prompt[row], int(part.trace.output_tokens[row]), blocks"),
    Fault("the blocks of the next prompt too", "arrivals",
          "return self._blocks[self._offsets[row] : self._offsets[row + 1]]",
          "return self._blocks[self._offsets[row] : self._offsets[min(row + 2, len(self._offsets) - 1)]]"),
    Fault("the window's size in the serial", "run", "serial = part.serial + row",
          "serial = part.serial + row + 1000 * len(part.trace)"),
    Fault("the answer's end at its first token", "record", "        tell(c, FIRST_TOKEN, r, now_s)",
          "        tell(c, FIRST_TOKEN, r, now_s + request.output)"),
]  # fmt: skip


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_simulation_that_tells_too_much_is_caught(leak: Fault) -> None:
    with plain_simulation(leak) as simulation, pytest.raises(AssertionError):
        search(simulation, lambda _: Listener)
