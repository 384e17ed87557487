"""The seeds of `perf size`'s confirming simulation side by side, on processes or a Dask cluster.

Owns: one seed of one candidate as a job for any worker. Does not own: the simulation of a candidate and the verdict
(`search.simulated`), or where jobs run (`sweeps`). A worker gets the candidate's step times with the load, so it asks
no catalogue of its own, and plays what `search.simulated` would play here: the same shares to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfmodel.adapters.compiled_code import remember_compiled_code
from perfmodel.adapters.policy_names import policy_factory
from perfmodel.adapters.sweeps import Workers
from perfmodel.search.plan import EngineOption, PoolPlan
from perfmodel.search.rating import GroupLoad, Rater
from perfmodel.search.simulated import SeedsPlayed, played_out
from perfmodel.serving import Steps


@dataclass(frozen=True, slots=True)
class _Candidate:
    """All that decides a candidate's simulation but the seed."""

    load: GroupLoad
    pools: tuple[PoolPlan, ...]
    steps: Mapping[tuple[str, ...], Steps]
    policy: str
    request_count: int

    def steps_of(self, option: EngineOption) -> Steps:
        """The step times of one of its engines."""
        return self.steps[option.key]


def _share(candidate: _Candidate, seed: int) -> float:
    remember_compiled_code()
    rater = Rater(candidate.load, candidate.steps_of)
    played = played_out(
        rater, candidate.pools, policy_factory(candidate.policy), request_count=candidate.request_count, seed=seed
    )
    return played.goodput_ratio


def seeds_on(places: Workers, policy: str) -> SeedsPlayed:
    """Plays the seeds on these workers, under the policy of this name."""

    def played(rater: Rater, pools: Sequence[PoolPlan], request_count: int, seeds: Sequence[int]) -> list[float]:
        steps = {pool.option.key: rater.steps(pool.option) for pool in pools}
        candidate = _Candidate(rater.load, tuple(pools), steps, policy, request_count)
        return places.map(_share, candidate, seeds)

    return played
