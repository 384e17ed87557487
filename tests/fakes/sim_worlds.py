"""Small random worlds for the simulation, and what must hold of any run of one.

Owns: worlds (engines, requests with shared prefixes), a policy that writes down what it hears, the same world played by
`scheduler.EngineCore`, and the checks. Does not own: drawing worlds or planting faults (the property tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from perfmodel.scheduler import EngineConfig, EngineCore
from perfmodel.simulation.fleet import HandOver, LowerTier
from perfmodel.simulation.policy import Ask, EngineSample, KvTier, PolicyFleet, Usage
from perfmodel.step_time import StepTable
from perfmodel.traces.trace import Trace, trace_of
from perfmodel.workload import SimRequest

TABLE = StepTable(
    by_token_s=0.010 + 0.0013 * np.arange(65.0),
    sequence_s=0.0007,
    decode_context_s=0.00011,
    prefill_pair_s=0.000013,
    prefill_context_s=0.00017,
)


# A token of KV is a byte in these worlds: a block of four comes back in as long as a few steps take.
TIER_BYTES_PER_S = 100.0
LINK_BYTES_PER_S = 150.0


@dataclass(frozen=True, slots=True)
class Request:
    """Prompts are blocks chosen at each depth from a few, and a tail of their own."""

    gap_s: float
    choices: tuple[int, ...]
    tail_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class World:
    """Engines and load. Without `caching` no prompt shares a block with another."""

    requests: tuple[Request, ...]
    block_tokens: int = 4
    block_count: int = 12
    max_batched_tokens: int = 16
    max_sequence_count: int = 3
    engine_count: int = 1
    caching: bool = True
    tier_blocks: int = 0
    prefill_engines: int = 0
    noise_ratio: float = 0.0
    linked: bool = False
    """Engines fetch from the next one what they lack."""

    def prompt_tokens(self, number: int) -> int:
        request = self.requests[number]
        return max(1, len(request.choices) * self.block_tokens + request.tail_tokens % self.block_tokens)

    def answer(self, picked: int, engine_count: int) -> int | tuple[int, int]:
        """What a policy says that has picked this one."""
        return (picked, (picked + 1) % engine_count) if self.linked else picked

    def trace(self) -> Trace:
        ids: dict[tuple[int, ...], int] = {}
        blocks = []
        for request in self.requests:
            prefixes = [request.choices[: depth + 1] for depth in range(len(request.choices))]
            blocks.append([ids.setdefault(prefix, len(ids)) for prefix in prefixes] if self.caching else [])
        columns: dict[str, Any] = {
            "arrival_s": np.cumsum([request.gap_s for request in self.requests]),
            "session": [-1] * len(self.requests),
            "input_tokens": [self.prompt_tokens(number) for number in range(len(self.requests))],
            "output_tokens": [request.output_tokens for request in self.requests],
            "tier": [0] * len(self.requests),
        }
        return trace_of(columns, blocks, self.block_tokens)

    def specs(self, simulation: ModuleType) -> list[Any]:
        made: dict[str, Any] = {
            "steps": TABLE,
            "kv_capacity_tokens": self.block_count * self.block_tokens,
            "kv_bytes_per_token": 1.0,
            "max_batched_tokens": self.max_batched_tokens,
            "max_sequence_count": self.max_sequence_count,
        }
        if self.tier_blocks:
            made["tier"] = LowerTier(self.tier_blocks * self.block_tokens, TIER_BYTES_PER_S)
        if self.linked:
            made["peer_bytes_per_s"] = LINK_BYTES_PER_S
        if not self.prefill_engines:
            return [simulation.EngineSpec("p", count=self.engine_count, **made)]
        link = HandOver(400.0, 0.003)
        return [
            simulation.EngineSpec("p", count=self.prefill_engines, role="prefill", hand_over=link, **made),
            simulation.EngineSpec("d", count=self.engine_count, role="decode", **made),
        ]


@dataclass
class Watch:
    """A policy that sends requests round and writes down what it hears."""

    fleet: PolicyFleet
    hears: bool = True
    reads_blocks: bool = False
    arrived_s: dict[int, float] = field(default_factory=dict)
    first_s: dict[int, list[float]] = field(default_factory=dict)
    ended_s: dict[int, list[float]] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    heard_s: list[float] = field(default_factory=list)

    def pick(self, ask: Ask, now_s: float) -> int:
        self.arrived_s[ask.serial] = now_s
        self.heard_s.append(now_s)
        return (len(self.arrived_s) - 1) % len(self.fleet.engines)

    def first_token(self, serial: int, now_s: float) -> None:
        self.first_s.setdefault(serial, []).append(now_s)
        self.heard_s.append(now_s)

    def finished(self, serial: int, usage: Usage, now_s: float) -> None:
        self.ended_s.setdefault(serial, []).append(now_s)
        self.usage[serial] = usage
        self.heard_s.append(now_s)


@dataclass(frozen=True, slots=True)
class Played:
    """One run."""

    watch: Watch
    replay: Any
    result: Any
    scheduled_s: dict[int, float]


def play(simulation: ModuleType, world: World, seed: int = 1) -> Played:
    """Run a world; block counts are checked at every arrival."""
    watches: list[Watch] = []
    scheduled_s: dict[int, float] = {}
    sound: list[bool] = []

    class Looking(Watch):
        def first_token(self, serial: int, now_s: float) -> None:
            super().first_token(serial, now_s)
            records = replay.cluster.requests
            place = int(np.flatnonzero((records.serial == serial) & (records.first_s == now_s))[0])
            scheduled_s[serial] = float(records[place].scheduled_s)

        def pick(self, ask: Ask, now_s: float) -> Any:
            sound.append(replay.blocks_add_up())
            return world.answer(super().pick(ask, now_s), len(self.fleet.engines))

    def factory(fleet: PolicyFleet) -> Watch:
        watches.append(Looking(fleet))
        return watches[0]

    options = simulation.SimOptions(
        seed=seed, step_noise_ratio=world.noise_ratio, engine_spread_ratio=world.noise_ratio
    )
    replay = simulation.Replay(world.specs(simulation), simulation.OpenLoop([world.trace()]), factory, options)
    replay.run(lambda count: None)
    assert replay.blocks_add_up() and all(sound), "blocks do not add up"
    return Played(watches[0], replay, replay.result(), scheduled_s)


def check(simulation: ModuleType, world: World) -> None:
    """What must hold of every run."""
    played = play(simulation, world)
    watch, result, trace = played.watch, played.result, world.trace()
    accepted = [serial for serial in watch.arrived_s if watch.usage[serial].output_tokens]
    assert result.requests == len(world.requests) == len(watch.arrived_s)
    assert result.completed_count == len(accepted) == result.requests - result.refused_count
    assert watch.heard_s == sorted(watch.heard_s), "a policy hears in the order of time"
    for serial in accepted:
        (first_s,), (ended_s,) = watch.first_s[serial], watch.ended_s[serial]
        assert watch.arrived_s[serial] == trace.arrival_s[serial] < first_s, "no token before its request"
        assert first_s <= ended_s and (first_s < ended_s) == (trace.output_tokens[serial] > 1), "first, then last"
        assert watch.usage[serial].cached_tokens < trace.input_tokens[serial], "a token is always computed"
        assert watch.usage[serial].cached_tokens % world.block_tokens == 0
    if not world.prefill_engines:
        for engine in range(world.engine_count):
            mine = [played.scheduled_s[serial] for serial in accepted if serial % world.engine_count == engine]
            assert mine == sorted(mine), "first come, first served"
    computed = sum(engine.prefill_tokens + engine.decode_tokens for engine in result.engines)
    owed = sum(
        int(trace.input_tokens[serial]) - watch.usage[serial].cached_tokens + int(trace.output_tokens[serial]) - 1
        for serial in accepted
    )
    assert computed == owed + result.lost_tokens, "every token is computed or found, once more if it was lost"
    if not result.preemption_count:
        assert (result.restored_ratio or 0.0) <= (result.prefix_hit_ratio or 0.0), "what is restored is a hit"
        assert (result.pulled_ratio or 0.0) <= (result.prefix_hit_ratio or 0.0), "what is fetched is a hit"
    for engine in played.replay.cluster.engines:
        assert engine.free_count == engine.block_count, "nothing is held when all is done"
    again = play(simulation, world)
    assert again.watch.ended_s == watch.ended_s and again.result == result, "same seed, same run"


@dataclass
class Mirror(Watch):
    """A policy that keeps what it was told of every engine's blocks and of their metrics."""

    hears_kv_events: bool = True
    # so often that the newest sample is the present
    metrics_every_s: float = 1e-9
    held: dict[tuple[int, KvTier], set[int]] = field(default_factory=dict)
    samples: Sequence[EngineSample] = ()

    def stored(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        held = self.held.setdefault((engine, tier), set())
        assert not held & set(blocks) and len(set(blocks)) == len(blocks), "what is told was not there"
        held.update(blocks)

    def removed(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        held = self.held[engine, tier]
        assert held >= set(blocks), "what leaves was there"
        held.difference_update(blocks)

    def metrics(self, samples: Sequence[EngineSample], sampled_s: float) -> None:
        self.samples = samples


def check_told(simulation: ModuleType, world: World, room: int | None = None) -> None:
    """Without delay, a policy that hears knows every engine's blocks and metrics at each pick; hearing changes nothing.

    `room`: lines of the log after which the cluster waits until they are taken.
    """
    picked: list[int] = []

    class Comparing(Mirror):
        def pick(self, ask: Ask, now_s: float) -> Any:
            fresh = now_s not in self.arrived_s.values()  # a sample has nobody who came at its own instant
            for number, at in enumerate(replay._routable):
                self.compare_blocks(number, replay.cluster, at)
                if fresh:
                    self.compare_sample(number, replay.cluster, at)
            picked.append(ask.serial)
            return world.answer(super().pick(ask, now_s), len(self.fleet.engines))

        def compare_blocks(self, number: int, cluster: Any, at: int) -> None:
            row = cluster.engines[at]
            device = cluster.blocks.key[row.block_first : row.block_first + row.block_count]
            lower = cluster.blocks.key[row.tier_first : row.tier_first + row.tier_used]
            for tier, keys in ((KvTier.DEVICE, device), (KvTier.LOWER, lower)):
                assert self.held.get((number, tier), set()) == {key for key in keys.tolist() if key > 0}

        def compare_sample(self, number: int, cluster: Any, at: int) -> None:
            row = cluster.engines[at]
            sample = self.samples[number]
            assert sample.waiting_count == row.waiting_count and sample.running_count == row.running_count
            assert sample.kv_usage_ratio == pytest.approx(1 - row.free_count / row.block_count)
            queued, r = 0, row.waiting_head
            while r >= 0:
                queued, r = queued + cluster.requests[r].tokens, cluster.requests[r].queue_next
            for r in cluster.running[at, : row.running_count]:
                queued += max(0, cluster.requests[r].refill - cluster.requests[r].computed)
            assert sample.queued_tokens == queued

    options = simulation.SimOptions(
        seed=1, step_noise_ratio=world.noise_ratio, engine_spread_ratio=world.noise_ratio, event_delay_s=0.0
    )
    replay = simulation.Replay(world.specs(simulation), simulation.OpenLoop([world.trace()]), Comparing, options)
    if room is not None:
        replay.cluster.totals[0].kv_room = room
    replay.run(lambda count: None)
    assert len(picked) == len(world.requests)
    assert replay.result() == play(simulation, world).result, "listening changes nothing"


def check_against_core(simulation: ModuleType, world: World) -> None:
    """The same first tokens, ends, cache hits and preemptions as the engine that computes step by step."""
    played = play(simulation, world)
    core = EngineCore(
        EngineConfig(
            block_count=world.block_count + 1,
            block_size_tokens=world.block_tokens,
            max_batched_tokens=world.max_batched_tokens,
            max_sequence_count=world.max_sequence_count,
            tier_block_count=world.tier_blocks,
            restore_s_per_block=world.block_tokens / TIER_BYTES_PER_S,
            record_kv_events=False,
        ),
        TABLE,
    )
    trace = world.trace()
    due = [(float(at_s), number) for number, at_s in enumerate(trace.arrival_s)]
    now_s = 0.0
    first_s: dict[int, float] = {}
    ended_s: dict[int, float] = {}
    cached: dict[int, int] = {}
    while due or not core.idle:
        if core.idle:
            now_s = max(now_s, due[0][0])
        while due and due[0][0] <= now_s:
            at_s, number = due.pop(0)
            core.submit(_core_request(world, number), at_s)
        outcome = core.step(now_s)
        if outcome is None:
            continue
        now_s = min([outcome.ends_at_s, *(at_s for at_s, _ in due[:1] if outcome.asleep)])
        for token in outcome.outputs:
            number = int(token.request_id)
            first_s.setdefault(number, now_s)
            if token.finished is not None:
                ended_s[number] = now_s
                cached[number] = token.finished.cached_tokens or 0
    watch = played.watch
    assert {number: times[0] for number, times in watch.first_s.items()} == pytest.approx(first_s, abs=1e-6)
    taken = {number for number, usage in watch.usage.items() if usage.output_tokens}
    assert {number: watch.ended_s[number][0] for number in taken} == pytest.approx(ended_s, abs=1e-6)
    assert {number: watch.usage[number].cached_tokens for number in taken} == cached
    assert played.result.preemption_count == core.stats().preemption_count


def _core_request(world: World, number: int) -> SimRequest:
    request = world.requests[number]
    tokens: list[int] = []
    for choice in request.choices:
        content = 1000 + choice if world.caching else 2_000_000 + number
        tokens += [content] * world.block_tokens
    # the tail, and what follows, is the request's own
    tokens += [1_000_000 + number] * (world.prompt_tokens(number) - len(tokens))
    return SimRequest(str(number), tokens, request.output_tokens, ignore_eos=True)
