"""The engines of a simulated cluster as a caller describes them, and the records that are made of them.

Owns: `EngineSpec` with its lower tier, its hand-over and its link to others, what a fleet must have, the memory that it
takes, its records, and the nominal speed that a policy is told. Does not own: the layout of the records (`state`) or
what happens to them (`run`). Bytes become seconds a block here, with the width of the trace's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

import numpy as np

from perfmodel.errors import ConfigError
from perfmodel.simulation.policy import PolicyEngine
from perfmodel.simulation.state import (
    BOTH,
    DECODE,
    PREFILL,
    Cluster,
    EngineRecord,
    Settings,
    Steps,
    cluster,
    engine_bytes,
)

# Block of a trace without block ids: vLLM's default. Nothing is shared then, so it only rounds KV room.
DEFAULT_BLOCK_TOKENS = 16

# Probes of a step table for the nominal speed that a policy is told: vLLM's default token budget of an online server,
# and a lightly loaded engine's batch and context (the same as `step_time.engine_speed`).
_PROBE_TOKENS, _PROBE_COUNT, _PROBE_CONTEXT_TOKENS = 8192, 8, 2048

_ROLES = {"both": BOTH, "prefill": PREFILL, "decode": DECODE}


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A second memory of one engine: it takes evicted blocks and gives them back over one link, one after the other."""

    capacity_bytes: float
    restore_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "restore_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"tier: {name} is {getattr(self, name)}; expected above 0")


@dataclass(frozen=True, slots=True)
class HandOver:
    """How a prefill engine's KV reaches a decode engine: bytes over the sender's link, one after the other.

    With `layer_count` layers sent as they are computed, all but one layer's share runs beside the prefill; 1 sends
    everything after it.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    layer_count: int = 1

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"transfer: bytes_per_s is {self.bytes_per_s}; expected above 0")
        if self.layer_count < 1 or self.latency_s < 0:
            raise ConfigError("transfer: expected a layer_count of at least 1 and a latency_s of 0 or more")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`count` equal engines. `steps` has their nominal step times; `slow_ratio` multiplies them where no policy sees.

    Raises ConfigError for a count or limit below 1, an unknown role and a ratio that is not above 0.
    """

    pool: str
    steps: Steps
    kv_capacity_tokens: int
    kv_bytes_per_token: float
    count: int = 1
    role: str = "both"
    max_batched_tokens: int = 8192
    max_sequence_count: int = 256
    accelerator: str = ""
    zone: str = ""
    slow_ratio: float = 1.0
    tier: LowerTier | None = None
    hand_over: HandOver | None = None
    peer_bytes_per_s: float = 0.0
    """Rate of its link to other engines, over which it may fetch their KV; 0: none."""

    def __post_init__(self) -> None:
        for name in ("count", "max_batched_tokens", "max_sequence_count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engines of pool {self.pool}: {name} is {getattr(self, name)}; expected at least 1")
        if self.role not in _ROLES:
            raise ConfigError(
                f"engines of pool {self.pool}: role is {self.role!r}; expected one of {', '.join(_ROLES)}"
            )
        if not 0 <= self.peer_bytes_per_s < inf:
            raise ConfigError(
                f"engines of pool {self.pool}: peer_bytes_per_s is {self.peer_bytes_per_s}; expected 0 or more"
            )
        if not 0.001 <= self.slow_ratio <= 1000:  # beyond, times leave what a clock can count
            raise ConfigError(f"engines of pool {self.pool}: slow_ratio is {self.slow_ratio}; expected 0.001 to 1000")
        if len(self.steps.by_token_s) <= self.max_batched_tokens:
            raise ConfigError(
                f"engines of pool {self.pool}: max_batched_tokens is {self.max_batched_tokens}; their step table ends "
                f"at {len(self.steps.by_token_s) - 1}"
            )


def memory_bytes(engines: Sequence[EngineSpec], block_tokens: int) -> float:
    """What the records of these engines' KV blocks and places take; a trace's width of blocks decides (0: unknown)."""
    return sum(
        spec.count * engine_bytes(_record(spec, 0, block_tokens or DEFAULT_BLOCK_TOKENS, _AS_NOMINAL))
        for spec in engines
    )


# Speed and noise of an engine whose hidden ones do not matter.
_AS_NOMINAL = (1.0, 0.0)


def one_by_one(engines: Sequence[EngineSpec]) -> tuple[EngineSpec, ...]:
    """One spec an engine. Raises ConfigError where no request could be served."""
    single = tuple(replace(spec, count=1) for spec in engines for _ in range(spec.count))
    if not any(spec.role != "decode" for spec in single):
        raise ConfigError("no engine computes prompts; expected at least one of role both or prefill")
    prefills = [spec for spec in single if spec.role == "prefill"]
    if prefills and not any(spec.role == "decode" for spec in single):
        raise ConfigError("there are prefill engines and no decode engine; expected both")
    for spec in prefills:
        if spec.hand_over is None:
            raise ConfigError(f"prefill engines of pool {spec.pool} have no transfer bandwidth; expected bytes_per_s")
    return single


class World(Protocol):
    """What is read of the options of a run."""

    @property
    def seed(self) -> int: ...
    @property
    def engine_spread_ratio(self) -> float: ...
    @property
    def step_noise_ratio(self) -> float: ...
    @property
    def slo_ttft_s(self) -> float: ...
    @property
    def slo_tpot_s(self) -> float: ...


def cluster_of(specs: Sequence[EngineSpec], block_tokens: int, told: tuple[bool, bool, float], world: World) -> Cluster:
    """`told`: whether the policy hears, whether it hears of blocks, seconds between its readings of the metrics."""
    width = block_tokens or DEFAULT_BLOCK_TOKENS
    dice = np.random.default_rng(world.seed)
    hidden = np.exp(world.engine_spread_ratio * dice.standard_normal(len(specs)))
    tables: list[Steps] = []
    records = []
    for spec, slow_ratio in zip(specs, hidden.tolist(), strict=True):
        kind = next((at for at, table in enumerate(tables) if table is spec.steps), len(tables))
        if kind == len(tables):
            tables.append(spec.steps)
        records.append(_record(spec, kind, width, (spec.slow_ratio * slow_ratio, world.step_noise_ratio)))
    settings = Settings(
        block_tokens=width,
        caching=block_tokens > 0,
        hears=told[0],
        tells_blocks=told[1],
        metrics_every_s=told[2],
        slo_ttft_s=world.slo_ttft_s,
        slo_tpot_s=world.slo_tpot_s,
        prompt_blocks=0,
        sequence_blocks=0,
        seed=world.seed,
    )
    return cluster(records, tables, settings)


def _record(spec: EngineSpec, kind: int, width: int, hidden: tuple[float, float]) -> EngineRecord:
    block_bytes = spec.kv_bytes_per_token * width
    tier, hand_over = spec.tier, spec.hand_over
    return EngineRecord(
        kind_index=kind,
        role_index=_ROLES[spec.role],
        block_count=spec.kv_capacity_tokens // width,
        batch_limit_tokens=spec.max_batched_tokens,
        sequence_limit_count=spec.max_sequence_count,
        slow_ratio=hidden[0],
        noise_ratio=hidden[1],
        tier_block_count=int(tier.capacity_bytes // block_bytes) if tier else 0,
        restore_s=block_bytes / tier.restore_bytes_per_s if tier else 0.0,
        transfer_s=hand_over.latency_s if hand_over else 0.0,
        transfer_block_s=block_bytes / hand_over.bytes_per_s if hand_over else 0.0,
        layer_share_ratio=1 / hand_over.layer_count if hand_over else 1.0,
        peer_block_s=block_bytes / spec.peer_bytes_per_s if spec.peer_bytes_per_s else 0.0,
    )


def policy_engine(spec: EngineSpec, number: int) -> PolicyEngine:
    """The nominal speed of an engine, read off its step table."""
    steps = spec.steps
    probe = min(_PROBE_TOKENS, spec.max_batched_tokens)
    fixed_s = float(steps.by_token_s[1]) + steps.sequence_s
    decode_context_s = _PROBE_COUNT * _PROBE_CONTEXT_TOKENS * steps.decode_context_s
    few = min(_PROBE_COUNT, spec.max_batched_tokens)
    slope_s = (float(steps.by_token_s[probe]) - float(steps.by_token_s[1])) / max(1, probe - 1)
    one_more_s = (float(steps.by_token_s[few]) - float(steps.by_token_s[1])) / max(1, few - 1) + steps.sequence_s
    running_s = one_more_s + _PROBE_CONTEXT_TOKENS * steps.decode_context_s
    return PolicyEngine(
        name=f"{spec.pool}-{number}",
        pool=spec.pool,
        accelerator=spec.accelerator,
        zone=spec.zone,
        kv_capacity_tokens=spec.kv_capacity_tokens,
        prefill_tok_per_s=1 / slope_s if slope_s > 0 else 1e9,
        prefill_overhead_s=fixed_s,
        prefill_s_per_token2=steps.prefill_pair_s,
        decode_s_per_token=float(steps.by_token_s[few]) + _PROBE_COUNT * steps.sequence_s + decode_context_s,
        decode_s_per_running=running_s,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        restore_bytes_per_s=spec.tier.restore_bytes_per_s if spec.tier else None,
        peer_bytes_per_s=spec.peer_bytes_per_s or None,
    )
