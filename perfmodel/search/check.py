"""A candidate played out request by request before it becomes the plan: the seeded replay of its engines.

Owns: how long and how often a candidate is replayed, and pooling the seeds. Does not own: the replay (`harness`) or the
closed form that finds candidates (`queueing`). The closed form is within a few per cent in the mean, a promise is about
a percentile of unequal requests; the replay sees their lengths, so the plan is bought on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfmodel.harness import ArrivalLaw, HarnessScenario, replay
from perfmodel.search.plan import PoolPlan
from perfmodel.search.rating import FullModel, Rater, closed_form, half_lengths, joined
from perfmodel.serving import Served

# Requests of one replay over all replicas, and the seeds: what the benchmark of `perf size` simulates a plan with.
CHECK_REQUESTS = 3_000
CHECK_SEEDS = (1, 2, 3)


def replayed(*, request_count: int = CHECK_REQUESTS, seeds: Sequence[int] = CHECK_SEEDS) -> FullModel:
    """A full model that replays a candidate with every seed; the mean of each figure over them.

    How much of the load that they can carry the pools use is the closed form's: a replay sees only how long they have
    anything to do. A candidate that the closed form says cannot carry the load is not replayed: a run that ends hides a
    queue that grows.
    """

    def full(rater: Rater, pools: Sequence[PoolPlan], rate_per_s: float) -> Served:
        told = closed_form(rater, pools, rate_per_s)
        if not np.isfinite(told.ttft_mean_ms):
            return told
        played = [pooled([_replay(rater, pool, rate_per_s, request_count, seed) for seed in seeds]) for pool in pools]
        shown = played[0]
        if len(pools) > 1:
            shown = joined(played[0], played[1], rater.hand_over_ms(pools[0].option, pools[1].option))
        return replace(shown, utilisation_ratio=told.utilisation_ratio)

    return full


def _replay(rater: Rater, pool: PoolPlan, rate_per_s: float, request_count: int, seed: int) -> Served:
    """One replica of a pool; replicas take turns, so each of n sees the gaps of n arrivals."""
    scenario = HarnessScenario(
        half_lengths(pool.role, rater.load.lengths),
        ArrivalLaw.OPEN_LOOP,
        rate_per_s=rate_per_s,
        burstiness_cv2=rater.load.burstiness_cv2_ratio / pool.serving_count,
        request_count=request_count,
    )
    return replay(rater.engine(pool.option, pool.serving_count), scenario, seed)


def pooled(runs: Sequence[Served]) -> Served:
    """The mean of each figure over runs; saturated when any is."""
    names = [name for name in Served.__slots__ if name != "saturated"]
    means = {name: float(np.mean([getattr(run, name) for run in runs])) for name in names}
    return Served(**means, saturated=any(run.saturated for run in runs))
