"""Properties of the simulation, over small random worlds, each shown to fail on planted faults.

Owns: token conservation, no over-commit of blocks, causality, determinism, first come first served, what policies are
told of blocks and metrics, and the same times as `scheduler.EngineCore`, which computes every step. The compiled code
is checked on most worlds; mutants are the same sources run as plain Python (`tests.fakes.plain_simulation`).
"""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import perfmodel.simulation.run
from perfmodel.adapters.compiled_code import remember_compiled_code
from perfmodel.errors import ConfigError
from tests.exploring import examples
from tests.fakes.plain_simulation import Fault, plain_simulation
from tests.fakes.sim_worlds import Request, World, check, check_against_core, check_told


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> None:
    remember_compiled_code()


# Gaps with many digits: an arrival at the very end of a step may go into either, and no test should hang on that.
gaps = st.one_of(st.just(0.0), st.integers(1, 400).map(lambda n: n * 0.00137 + 1e-7 * (n * 7919 % 997)))


def requests(fewest: int) -> st.SearchStrategy[tuple[Request, ...]]:
    request = st.builds(
        Request,
        gap_s=gaps,
        choices=st.lists(st.integers(0, 1), max_size=5).map(tuple),
        tail_tokens=st.integers(0, 3),
        output_tokens=st.integers(1, 14),
    )
    return st.lists(request, min_size=fewest, max_size=9).map(tuple)


def singles(fewest: int) -> st.SearchStrategy[World]:
    return st.builds(
        World,
        requests=requests(fewest),
        block_count=st.integers(4, 14),
        max_batched_tokens=st.integers(3, 16),
        max_sequence_count=st.integers(1, 4),
        caching=st.booleans(),
        tier_blocks=st.sampled_from([0, 0, 2, 20]),
    )


def tiered(fewest: int) -> st.SearchStrategy[World]:
    return st.builds(World, requests=requests(fewest), block_count=st.integers(6, 9), tier_blocks=st.just(30))


def clusters(fewest: int) -> st.SearchStrategy[World]:
    return st.builds(
        World,
        requests=requests(fewest),
        block_count=st.integers(6, 14),
        max_batched_tokens=st.integers(3, 16),
        max_sequence_count=st.integers(1, 4),
        engine_count=st.integers(1, 2),
        tier_blocks=st.sampled_from([0, 0, 3, 20]),
        prefill_engines=st.sampled_from([0, 0, 1, 2]),
        noise_ratio=st.sampled_from([0.0, 0.2]),
        linked=st.booleans(),
    )


def linked(fewest: int) -> st.SearchStrategy[World]:
    return st.builds(
        World,
        requests=requests(fewest),
        block_count=st.integers(6, 14),
        engine_count=st.just(2),
        tier_blocks=st.sampled_from([0, 20]),
        linked=st.just(True),
    )


@given(singles(1))
@settings(max_examples=examples(300), deadline=None)
def test_the_fast_engine_keeps_the_times_of_the_step_by_step_engine(world: World) -> None:
    check_against_core(perfmodel.simulation.run, world)


@given(clusters(1))
@settings(max_examples=examples(300), deadline=None)
def test_a_cluster_keeps_its_promises(world: World) -> None:
    check(perfmodel.simulation.run, world)


@given(clusters(1))
@settings(max_examples=examples(25), deadline=None)
def test_the_sources_as_plain_python_keep_them_too(world: World) -> None:
    with plain_simulation() as simulation:
        check(simulation, world)


FAULTS = [
    Fault("no growth of context in a run", "engine", "engine.slope_s * (steps * (steps - 1) / 2)", "0.0"),
    Fault("arrivals wait for the run's end", "engine", "        shorten(c, e, now_s)\n", "        pass\n"),
    Fault("the last come is served first", "engine", "        engine.waiting_head = r\n    engine.waiting_tail = r",
          "        engine.waiting_head = r\n    request.queue_next, engine.waiting_head = (-1 if engine.waiting_head "
          "== r else engine.waiting_head), r\n    engine.waiting_tail = r"),
    Fault("a block leaks at release", "blocks", "range(request.block_count - 1, -1, -1)",
          "range(request.block_count - 2, -1, -1)"),
    Fault("a cached block stays in the free queue when it is held again", "blocks",
          "        if c.blocks[block].ref == 0:\n            unlink(c, e, block)\n", ""),
    Fault("the last token comes from the cache", "blocks",
          "limit = (request.tokens - 1) // c.totals[0].block_tokens\n    count",
          "limit = request.tokens // c.totals[0].block_tokens\n    count"),
    Fault("a shared block is not counted", "blocks", "        c.blocks[block].ref += 1\n",
          "        c.blocks[block].ref = 1\n"),
    Fault("the budget does not shrink", "engine", "    plan.budget -= tokens\n", "    plan.budget -= 0\n"),
    Fault("lost tokens are not counted", "engine", "    c.totals[0].lost_tokens += request.computed\n", ""),
    Fault("an answer ends a token early", "engine", "if made >= request.output:",
          "if made >= max(1, request.output - 1):"),
    Fault("the newest free block is evicted first", "blocks", "        block = c.engines[e].free_head\n",
          "        block = c.engines[e].free_tail\n"),
    Fault("hidden speeds are not seeded", "fleet", "dice = np.random.default_rng(world.seed)\n    hidden",
          "dice = np.random.default_rng()\n    hidden"),
    Fault("restored tokens are computed as well", "engine", "else (hits + restored + pulled) * width",
          "else (hits + pulled) * width", engines="tier"),
    Fault("fetched tokens are computed as well", "engine", "else (hits + restored + pulled) * width",
          "else (hits + restored) * width", engines="linked"),
    Fault("the link restores two at once", "engine", "max(engine.link_free_s, now_s) + restored",
          "now_s + restored", engines="tier"),
    Fault("a hand-over computes the prompt again", "engine",
          "request.computed = request.tokens - 1 if request.carried else",
          "request.computed = 0 if request.carried else"),
    Fault("a hand-over arrives before it left", "engine", "    _push(c, engine.link_free_s, r, target)",
          "    _push(c, request.arrival_s - 1.0, r, target)"),
]  # fmt: skip


def check_all(simulation: ModuleType, world: World) -> None:
    check(simulation, world)
    if world.engine_count == 1 and not (world.prefill_engines or world.noise_ratio):
        check_against_core(simulation, world)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    with plain_simulation(fault) as simulation:

        @given({"tier": tiered(7), "linked": linked(7), "any": st.one_of(singles(5), clusters(5))}[fault.engines])
        @settings(
            max_examples=600, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            report_multiple_bugs=False,
        )  # fmt: skip
        def search(world: World) -> None:
            check_all(simulation, world)

        with pytest.raises((AssertionError, IndexError, KeyError, ValueError, RuntimeWarning)):
            search()


def told(fewest: int) -> st.SearchStrategy[World]:
    return st.one_of(clusters(fewest), tiered(fewest), full_tiers(fewest))


def full_tiers(fewest: int) -> st.SearchStrategy[World]:
    tiers = st.integers(2, 6)
    return st.builds(World, requests=requests(fewest), block_count=st.integers(6, 9), tier_blocks=tiers)


@given(told(1), st.sampled_from([None, None, 1]))
@settings(max_examples=examples(150), deadline=None)
def test_a_policy_is_told_what_the_engines_hold(world: World, room: int | None) -> None:
    check_told(perfmodel.simulation.run, world, room)


TELLING_FAULTS = [
    Fault("what is stored is not told", "blocks", "            tell_block(c, e, STORED, key)\n", ""),
    Fault("an eviction is not told", "blocks", "    tell_block(c, e, REMOVED, key)\n", ""),
    Fault("the lower tier's eviction is not told", "blocks",
          "        tell_block(c, e, TIER_REMOVED, c.blocks[block].key)\n", "", engines="tier"),
    Fault("the lower tier is told as the device", "hearing", "KvTier.LOWER if code & 2", "KvTier.LOWER if code & 8",
          engines="tier"),
    Fault("a further copy is told again", "blocks", "            c.blocks[other].last = block\n            return\n",
          "            c.blocks[other].last = block\n            tell_block(c, e, STORED, key)\n            return\n"),
    Fault("a removal is told of the wrong engine", "blocks", "c.kv_log[at, 0] = 4 * e + change",
          "c.kv_log[at, 0] = 4 * (e if change != 1 else 0) + change"),
    Fault("only the first stretch is told", "hearing", "            start = end\n", "            return\n"),
    Fault("the last lines are lost", "hearing", "self._tell_lines(lines[:due], now_s)",
          "self._tell_lines(lines[: due - due // 3], now_s)"),
    Fault("a sample is from the turn before", "cluster", "    if tick <= totals.sampled_tick:\n",
          "    if tick <= totals.sampled_tick + 1000000:\n"),
    Fault("cached blocks count as used", "cluster", "1.0 - engine.free_count / engine.block_count",
          "1.0 - min(engine.free_count, 3) / engine.block_count"),
    Fault("running prefills are not queued", "cluster",
          "            queued += max(0, request.refill - request.computed)\n", ""),
]  # fmt: skip


@pytest.mark.parametrize("fault", TELLING_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_telling_is_caught(fault: Fault) -> None:
    with plain_simulation(fault) as simulation:

        @given(full_tiers(7) if fault.engines == "tier" else told(5))
        @settings(
            max_examples=600, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            report_multiple_bugs=False,
        )  # fmt: skip
        def search(world: World) -> None:
            check_told(simulation, world)

        with pytest.raises(ConfigError):  # a policy's fault, as the simulation says it
            search()
