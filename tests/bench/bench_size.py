"""`perf size` against brute force: how long the search takes, whether its plan holds, and what it costs beside the
best.

Not a test: figures depend on the machine. Run it with `python -m tests.bench.bench_size` (`make bench-size`); it fails
when a bar is missed. The candidates are all engines and pairs with all numbers of replicas that cost less than the
plan, not only those that the search liked; each is simulated at the P90 rate as a whole cluster. Two things keep that
finite. More replicas of the same engines serve no worse, so of those that cost less than plan / 1.05 only the largest
are simulated: if none of them holds, no cheaper one does. And a candidate is not simulated when the closed form says
that it lacks a fifth of the capacity, or the replay of its engines that a latency is half over its limit; how many
these are is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perfmodel.adapters import perf_output
from perfmodel.adapters.catalog import load_catalog
from perfmodel.adapters.compiled_code import remember_compiled_code
from perfmodel.adapters.policy_names import policy_factory
from perfmodel.adapters.size_report import Answer, answered
from perfmodel.adapters.spec_file import SizeSpec, read_spec
from perfmodel.search.candidates import GroupCandidates
from perfmodel.search.plan import EngineOption, Fleet, PoolPlan, PoolRole, added_counts
from perfmodel.search.purchase import Purchasing
from perfmodel.search.rating import Rater, judged, latencies
from perfmodel.search.simulated import played_out, simulated
from perfmodel.simulation.policy import PolicyFactory

SPEC = Path("examples/size/fleet32.yaml")

# The bars of the issue.
MOST_SECONDS, LEAST_FEASIBLE, MOST_OVER_BEST = 5.0, 2000, 1.05
REQUESTS, SEEDS = 3_000, (11, 12, 13)

# From here on the closed form's capacity and the replay's percentiles are not doubted: both are within a tenth
# elsewhere.
HOPELESS_UTILISATION, HOPELESS_USE = 1.2, 1.5


@dataclass(frozen=True)
class Tried:
    """A candidate of the brute force."""

    pools: tuple[PoolPlan, ...]
    usd_per_h: float

    def words(self) -> str:
        return " + ".join(
            f"{pool.serving_count} x {pool.option.offer.name} TP{pool.option.shape.tensor_parallel_count}"
            f" {pool.option.shape.weight_format}/{pool.option.shape.kv_format} c{pool.option.chunk_tokens} {pool.role}"
            for pool in self.pools
        )


def goodput(rater: Rater, pools: Sequence[PoolPlan], policy: PolicyFactory, needed: float) -> float:
    """Mean share of requests in time over the seeds; a first seed far below decides alone."""
    shares: list[float] = []
    for seed in SEEDS:
        shares.append(played_out(rater, pools, policy, request_count=REQUESTS, seed=seed).goodput_ratio)
        if shares[0] < needed - 0.1:
            break
    return sum(shares) / len(shares)


class BruteForce:
    """All candidates of one group below a cost, the largest of each engine or pair of engines."""

    def __init__(self, spec: SizeSpec, group: GroupCandidates, options: Sequence[EngineOption]) -> None:
        self.rater = group.rater
        self.options = options
        self.fleet: Fleet = spec.fleet
        self.purchasing = Purchasing(spec.fleet)
        self.hopeless_count = 0
        self.considered_count = 0

    def below(self, usd_per_h: float) -> Iterator[Tried]:
        together = [option for option in self.options if option.offer.hardware.can_prefill]
        for option in together:
            yield from self._largest((PoolPlan(PoolRole.BOTH, option, 1, 0),), usd_per_h)
        decode = {option.key[:-1]: option for option in sorted(self.options, key=lambda each: -each.chunk_tokens)}
        for first in together:
            for second in decode.values():
                pools = (PoolPlan(PoolRole.PREFILL, first, 1, 0), PoolPlan(PoolRole.DECODE, second, 1, 0))
                yield from self._largest(pools, usd_per_h)

    def _largest(self, pools: tuple[PoolPlan, ...], usd_per_h: float) -> Iterator[Tried]:
        """Numbers of replicas that fit below the cost and to which no replica can be added."""
        fitting: set[tuple[int, ...]] = set()
        frontier = [tuple(1 for _ in pools)]
        while frontier:
            counts = frontier.pop()
            if counts in fitting or self._cost(pools, counts) is None:
                continue
            cost = self._cost(pools, counts)
            if cost is None or cost > usd_per_h:
                continue
            fitting.add(counts)
            frontier += [tuple(n + (at == place) for at, n in enumerate(counts)) for place in range(len(counts))]
        for counts in sorted(fitting):
            self.considered_count += 1
            grown = [tuple(n + (at == place) for at, n in enumerate(counts)) for place in range(len(counts))]
            if any(each in fitting for each in grown):
                continue
            sized = tuple(replace(pool, serving_count=n) for pool, n in zip(pools, counts, strict=True))
            if self._hopeless(sized):
                self.hopeless_count += 1
                continue
            cost = self._cost(pools, counts)
            assert cost is not None
            yield Tried(sized, cost)

    def _cost(self, pools: tuple[PoolPlan, ...], counts: tuple[int, ...]) -> float | None:
        sized = [replace(pool, serving_count=n) for pool, n in zip(pools, counts, strict=True)]
        row = self.purchasing.row(added_counts(pool.device_counts() for pool in sized))
        bill = self.purchasing.bill(row[None, :])
        return float(bill.usd_per_h[0]) if bill.allowed[0] else None

    def _hopeless(self, pools: Sequence[PoolPlan]) -> bool:
        rate = self.rater.load.rate_p90_per_s
        if len(pools) == 2 and self.rater.split(pools[0], pools[1]) is None:
            return True
        halves = [self.rater.half(pool.role, pool.option, pool.serving_count, rate) for pool in pools]
        if any(half.utilisation_ratio > HOPELESS_UTILISATION for half in halves):
            return True
        if any(half.saturated for half in halves):
            return False
        slos = [each.slo for each in self.rater.load.classes]
        played = latencies([self.rater.full(pools, rate)])
        return bool(judged(played, slos, self.rater.shifts_ms(pools[0].option)).use[0] > HOPELESS_USE)


def options_of(group: GroupCandidates, spec: SizeSpec) -> list[EngineOption]:
    """Every engine that fits, as the search saw them."""
    from perfmodel.search.options import engine_options

    classes = group.rater.load.classes
    context = max(each.demand.longest_tokens for each in classes)
    found, _ = engine_options(load_catalog().model(classes[0].model), spec.fleet, spec.choices, context)
    return [option for option in found if option.chips is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=SPEC)
    parser.add_argument("--policy", default="inferplane_route", help="what the plan and all candidates are routed by")
    asked = parser.parse_args()
    spec_path, policy = asked.spec, policy_factory(asked.policy)
    catalog = load_catalog()
    spec = read_spec(spec_path, catalog)
    remember_compiled_code()
    check = simulated(policy)
    answered(
        spec, catalog, flips=False, check=check, progress=perf_output.progress
    )  # compiles, or loads what was compiled
    start, busy = time.perf_counter(), time.process_time()
    answer: Answer = answered(spec, catalog, flips=False, check=check, progress=perf_output.progress)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - busy
    sized = answer.periods[0].sized
    plan = sized.plan
    assert plan is not None and len(plan.candidates) == 1, "the committed spec has one class and a plan"
    (found,) = plan.candidates
    group = next(each for each in sized.groups if each.rater.load.names == found.classes)
    needed = max(each.slo.goodput_ratio for each in group.rater.load.classes)
    print(f"search: {wall_s:.2f} s wall, {cpu_s:.2f} s of one core, {sized.feasible_count} feasible candidates")
    print(f"plan: {plan.usd_per_h:.2f} USD/h, {plan.device_counts}, {found.topology}")
    share = goodput(group.rater, found.pools, policy, needed)
    print(f"plan simulated ({len(SEEDS)} seeds x {REQUESTS} requests): {share:.4f} in time, promised {needed}")
    best_usd, simulated_count = brute_force(spec, group, plan.usd_per_h, (policy, needed))
    over = plan.usd_per_h / best_usd
    print(
        f"best of all simulated: {best_usd:.2f} USD/h; the plan costs {over:.3f} x that ({simulated_count} simulated)"
    )
    bars = {
        f"search within {MOST_SECONDS} s of one core": cpu_s <= MOST_SECONDS,
        f"at least {LEAST_FEASIBLE} feasible": sized.feasible_count >= LEAST_FEASIBLE,
        "the plan keeps its promise when simulated": share >= needed,
        f"the plan costs at most {MOST_OVER_BEST} x the best": over <= MOST_OVER_BEST,
    }
    for bar, held in bars.items():
        print(f"{'ok    ' if held else 'MISSED'} {bar}")
    return 0 if all(bars.values()) else 1


def brute_force(
    spec: SizeSpec, group: GroupCandidates, plan_usd: float, promise: tuple[PolicyFactory, float]
) -> tuple[float, int]:
    """The cost of the cheapest candidate that holds when simulated (the plan's own when none below holds). `promise`:
    the policy and the share of requests that must be in time.
    """
    policy, needed = promise
    search = BruteForce(spec, group, options_of(group, spec))
    tried = sorted(search.below(plan_usd / MOST_OVER_BEST), key=lambda each: (each.usd_per_h, each.words()))
    print(
        f"below {plan_usd / MOST_OVER_BEST:.2f} USD/h: {search.considered_count} candidates; of the largest of their "
        f"kind {search.hopeless_count} are hopeless and {len(tried)} are simulated"
    )
    best = plan_usd
    count = 0
    start = time.perf_counter()
    for each in tried:
        count += 1
        share = goodput(search.rater, each.pools, policy, needed)
        if count % 25 == 0:
            print(f"  {count} simulated, {time.perf_counter() - start:.0f} s", file=sys.stderr)
        if share >= needed:
            print(f"  {each.usd_per_h:.2f} USD/h holds ({share:.4f}): {each.words()}")
            best = each.usd_per_h
            break
    return best, count


if __name__ == "__main__":
    sys.exit(main())
