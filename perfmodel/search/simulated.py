"""A candidate as a simulated cluster: its engines, a trace of the demand it was sized for, and what became of it.

Owns: turning pools into engines of `simulation` and a load into a seeded trace in which the stated share of each prompt
is a prefix that all share. Does not own: the simulation, or the policy that routes (an argument). It is the check on
`perf size` from outside: whole cluster, real routing, prefix cache and hand-overs, none of which the closed form plays
out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from perfmodel import memory
from perfmodel.errors import ConfigError
from perfmodel.search.plan import PoolPlan, PoolRole
from perfmodel.search.rating import Check, GroupLoad, Rater, link_bytes_per_s
from perfmodel.simulation.arrivals import OpenLoop
from perfmodel.simulation.fleet import EngineSpec, HandOver
from perfmodel.simulation.policy import PolicyFactory
from perfmodel.simulation.run import SimOptions, SimResult, simulate
from perfmodel.traces.trace import Trace

# Tokens of a KV block in the simulated engines: vLLM's default, doubled until a mean prompt has at most so many blocks,
# because a simulation's time goes with them. A block is then at most a thirtieth of a prompt, and only rounds KV room.
_LEAST_BLOCK_TOKENS, _MOST_PROMPT_BLOCKS = 16, 64

# One seed this far below the promise is not made good by the others: seeds differ by about 0.05.
_FAR_BELOW_RATIO = 0.1

# So many seeds that are all below the promise by more than this decide it: the others would have to be far above.
_DECIDING_SEEDS, _BELOW_RATIO = 2, 0.02

# Requests of one simulation over all replicas, and the seeds: more than the benchmark of `perf size` judges a plan
# with.
CHECK_REQUESTS = 4_000
CHECK_SEEDS = (1, 2, 3, 4)

_ROLE_WORDS = {
    PoolRole.BOTH: "both",
    PoolRole.PREFILL: "prefill",
    PoolRole.DECODE: "decode",
    PoolRole.ATTENTION: "decode",
}


@dataclass(frozen=True, slots=True)
class PlayedOut:
    """What one simulation of a candidate says. `goodput_ratio` is of all requests offered."""

    seed: int
    requests: int
    goodput_ratio: float
    ttft_p95_ms: float
    tpot_p95_ms: float


def block_tokens(load: GroupLoad) -> int:
    """Tokens of a block in the simulation of this load."""
    width = _LEAST_BLOCK_TOKENS
    while load.lengths.input_tokens > width * _MOST_PROMPT_BLOCKS:
        width *= 2
    return width


def demand_trace(load: GroupLoad, rate_per_s: float, request_count: int, seed: int) -> Trace:
    """`request_count` requests of the load: Gamma gaps of its burstiness, lengths of its law, one prefix for all."""
    generator = np.random.default_rng(seed)
    prompts, answers = load.lengths.draw(request_count, generator)
    cv2 = load.burstiness_cv2_ratio
    gaps = (
        np.full(request_count, 1 / rate_per_s)
        if cv2 == 0
        else generator.gamma(1 / cv2, cv2 / rate_per_s, request_count)
    )
    width = block_tokens(load) if load.lengths.cached_ratio else 0
    offsets, blocks = np.zeros(request_count + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if width:
        offsets, blocks = _shared_blocks(prompts, load.lengths.cached_ratio, width)
    return Trace(
        arrival_s=np.cumsum(gaps),
        session=np.full(request_count, -1, dtype=np.int32),
        input_tokens=prompts.astype(np.int32),
        output_tokens=answers.astype(np.int32),
        block_offsets=offsets,
        blocks=blocks,
        block_tokens=width,
        tier=np.zeros(request_count, dtype=np.int8),
        think_s=np.full(request_count, np.nan, dtype=np.float32),
    )


def _shared_blocks(
    prompts: np.ndarray[tuple[int], np.dtype[np.int64]], cached_ratio: float, width: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Offsets and block ids: each prompt begins with its share of one common chain and goes on with blocks of its
    own.
    """
    counts = prompts // width
    shared = np.minimum(np.rint(prompts * cached_ratio / width).astype(np.int64), counts)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    place = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], counts)
    common = place < np.repeat(shared, counts)
    own = np.cumsum(~common) + int(counts.max())
    return offsets, np.where(common, place, own)


def engine_specs(rater: Rater, pools: Sequence[PoolPlan], longest_tokens: int) -> list[EngineSpec]:
    """The serving replicas of a candidate, for requests of at most `longest_tokens`.

    A decode engine is given no more KV room than all its sequences can ever hold: it looks nothing up, so that more
    would change nothing but the time that it takes to simulate. Raises ConfigError when a network between its pools is
    not known.
    """
    specs = []
    for pool in pools:
        option, shape = pool.option, pool.option.shape
        tokens = max(1, int(rater.load.lengths.input_tokens))
        hand_over = None
        if pool.role is PoolRole.PREFILL:
            link = link_bytes_per_s(option, pools[1].option)
            if link is None:
                raise ConfigError(
                    f"the network between {option.offer.name} and {pools[1].option.offer.name} is not known"
                )
            hand_over = HandOver(link, layer_count=shape.architecture.layer_count)
        capacity = option.kv_capacity_tokens
        if pool.role in (PoolRole.DECODE, PoolRole.ATTENTION):
            most = (option.max_sequence_count + 1) * (longest_tokens + block_tokens(rater.load))
            capacity = min(capacity, most)
        specs.append(
            EngineSpec(
                pool=f"{pool.role}-{option.offer.name}",
                steps=rater.steps(option).table(max(option.chunk_tokens, option.max_sequence_count)),
                kv_capacity_tokens=capacity,
                kv_bytes_per_token=memory.kv_bytes(shape, tokens) / tokens,
                count=pool.serving_count,
                role=_ROLE_WORDS[pool.role],
                max_batched_tokens=option.chunk_tokens,
                max_sequence_count=option.max_sequence_count,
                accelerator=option.offer.name,
                hand_over=hand_over,
            )
        )
    return specs


def played_out(
    rater: Rater, pools: Sequence[PoolPlan], policy: PolicyFactory, *, request_count: int, seed: int
) -> PlayedOut:
    """Simulate the serving replicas at the P90 rate under the strictest of the classes' limits."""
    load = rater.load
    options = SimOptions(
        slo_ttft_s=min(each.slo.ttft_ms for each in load.classes) / 1000,
        slo_tpot_s=min(each.slo.tpot_ms for each in load.classes) / 1000,
        seed=seed,
    )
    trace = demand_trace(load, load.rate_p90_per_s, request_count, seed)
    longest = int((trace.input_tokens.astype(np.int64) + trace.output_tokens).max())
    result: SimResult = simulate(engine_specs(rater, pools, longest), OpenLoop([trace]), policy, options)
    return PlayedOut(
        seed=seed,
        requests=result.requests,
        goodput_ratio=result.goodput_ratio or 0.0,
        ttft_p95_ms=(result.ttft.p95_s or 0.0) * 1000,
        tpot_p95_ms=(result.tpot.p95_s or 0.0) * 1000,
    )


class SeedsPlayed(Protocol):
    """Plays all seeds of a candidate side by side; the shares of requests in time are those of `played_out`."""

    def __call__(
        self, rater: Rater, pools: Sequence[PoolPlan], request_count: int, seeds: Sequence[int]
    ) -> Sequence[float]:
        """One share for each seed."""
        ...


def simulated(
    policy: PolicyFactory,
    *,
    request_count: int = CHECK_REQUESTS,
    seeds: Sequence[int] = CHECK_SEEDS,
    side_by_side: SeedsPlayed | None = None,
) -> Check:
    """A check that simulates a candidate with every seed: the mean share of requests in time, less its standard error.

    The error is taken off because a plan must also hold with arrivals that were not tried. A first seed that is far
    below the promise decides alone. `side_by_side` plays the seeds at once (None: here, one after the other).
    """

    def check(rater: Rater, pools: Sequence[PoolPlan]) -> float:
        needed = max(each.slo.goodput_ratio for each in rater.load.classes)
        known = None if side_by_side is None else side_by_side(rater, pools, request_count, seeds)
        shares: list[float] = []
        for place, seed in enumerate(seeds):
            if known is None:
                played = played_out(rater, pools, policy, request_count=request_count, seed=seed)
                shares.append(played.goodput_ratio)
            else:
                shares.append(known[place])
            if shares[0] < needed - _FAR_BELOW_RATIO or (
                len(shares) >= _DECIDING_SEEDS and max(shares) < needed - _BELOW_RATIO
            ):
                break
        error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
        return float(np.mean(shares)) - error

    return check
