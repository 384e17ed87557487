"""From one plan to the next, day to night and back: which replicas start, which drain, and how long that takes.

Owns: the difference of two plans by engine, seconds to load weights and to drain, and whether starts must wait for
drains because the devices are taken. Does not own: either plan (`search`) or who carries the moves out (the operator).
An engine is the same when model, role, device, cut, formats and chunk are: then it keeps running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel import memory
from perfmodel.search.plan import EngineOption, Plan, PoolPlan, PoolRole, added_counts

# Answers that a drain waits for, in mean answers: about the 95th percentile of the log-normal lengths used here (cv2
# 1.2).
_DRAINED_ANSWERS = 3.0


@dataclass(frozen=True, slots=True)
class StartSpeed:
    """How a replica comes up: bytes of weights a second into one device (all devices load at once), then warm-up."""

    weight_bytes_per_s: float
    warm_up_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """One engine whose number of replicas changes. `start_s` and `drain_s` are of one replica; all go at once."""

    role: PoolRole
    option: EngineOption
    before_count: int
    after_count: int
    start_s: float
    drain_s: float
    waits_for_drain: bool

    @property
    def seconds(self) -> float:
        """Until the move is done, a wait for drained devices included."""
        if self.after_count < self.before_count:
            return self.drain_s
        return self.start_s + (self.drain_s if self.waits_for_drain else 0.0)


@dataclass(frozen=True, slots=True)
class Moves:
    """All moves of one change of plan, largest engine first, and when the last is done."""

    moves: tuple[Move, ...]
    total_s: float


@dataclass(frozen=True, slots=True)
class _Pools:
    counts: dict[tuple[str, ...], int]
    pools: dict[tuple[str, ...], PoolPlan]
    drain_s: float


def load_s(option: EngineOption, speed: StartSpeed) -> float:
    """Seconds until a replica serves: its weights into every device at once, then warm-up.

    Chips of an AFD engine hold its feed-forward half and load it at the same speed per device, so the fuller side
    decides.
    """
    devices = option.shape.device_count
    return memory.weight_bytes(option.shape) / devices / speed.weight_bytes_per_s + speed.warm_up_s


def moves(before: Plan, after: Plan, output_tokens: float, stock: Mapping[str, int], speed: StartSpeed) -> Moves:
    """What changes between two plans. `output_tokens` is the longest mean answer, `stock` the devices by offer."""
    old, new = _pools(before, output_tokens), _pools(after, output_tokens)
    growing = [key for key in new.counts if new.counts[key] > old.counts.get(key, 0)]
    started = added_counts(_devices(new.pools[key], new.counts[key] - old.counts.get(key, 0)) for key in growing)
    running = added_counts(_devices(old.pools[key], old.counts[key]) for key in old.counts)
    short = {name for name, count in started.items() if count + running.get(name, 0) > stock.get(name, 0)}
    found = []
    for key in sorted({*old.counts, *new.counts}):
        was, will = old.counts.get(key, 0), new.counts.get(key, 0)
        if was == will:
            continue
        pool = new.pools.get(key) or old.pools[key]
        waits = will > was and bool(short & set(_devices(pool, 1)))
        found.append(
            Move(pool.role, pool.option, was, will, load_s(pool.option, speed), old.drain_s, waits),
        )
    return Moves(tuple(found), max((move.seconds for move in found), default=0.0))


def _devices(pool: PoolPlan, count: int) -> dict[str, int]:
    return PoolPlan(pool.role, pool.option, count, 0).device_counts()


def _pools(plan: Plan, output_tokens: float) -> _Pools:
    counts: dict[tuple[str, ...], int] = {}
    pools: dict[tuple[str, ...], PoolPlan] = {}
    drain_ms = 0.0
    for each in plan.candidates:
        told = each.predicted
        drain_ms = max(drain_ms, told.ttft_percentile_ms + _DRAINED_ANSWERS * output_tokens * told.tpot_percentile_ms)
        for pool in each.pools:
            key = (pool.option.shape.architecture.name, str(pool.role), *pool.option.key)
            counts[key] = counts.get(key, 0) + pool.replica_count
            pools[key] = pool
    return _Pools(counts, pools, drain_ms / 1000)
