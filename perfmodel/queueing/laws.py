"""Laws of random arrivals, compiled: counts in a time, lengths of prompts as a few nodes, Erlang's chance to wait.

Owns: the formulas, of plain numbers. Does not own: what an engine's servers and arrivals are (`chain`, `load`). Counts
are Poisson, or negative binomial where gaps vary more than Poisson's and binomial where they vary less, so that their
variance over their mean is the dispersion that is asked; all three are sums of Panjer's recursion (1981).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.compiled import compiled

# A count stops here: far beyond the arrivals in one step.
_MOST_COUNT = 384

# A dispersion this near to 1 is Poisson's.
_POISSON_WITHIN = 1e-3

# Gauss-Hermite nodes and weights of a normal law (five: exact up to its ninth power, so that the square of the time of
# a prompt whose attention grows with the square of its length is right).
NODES = (-2.8569700138728056, -1.355626179974266, 0.0, 1.355626179974266, 2.8569700138728056)
WEIGHTS = (0.011257411327720691, 0.2220759220056126, 0.5333333333333333, 0.2220759220056126, 0.011257411327720691)


class Arrivals(NamedTuple):
    """Requests per second, variance over mean of their counts, and sigma of the logarithm of a prompt's length."""

    rate_per_s: float
    dispersion: float
    prompt_sigma: float


@compiled
def erlang_c(servers: int, offered: float) -> float:
    """Erlang's chance that all servers are busy; 1 when the offered load reaches their number."""
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = offered * blocked / (server + offered * blocked)
    return servers * blocked / (servers - offered * (1.0 - blocked))


@compiled
def _panjer(arrivals: Arrivals, mean: float, none: float) -> tuple[float, float, float]:
    """(a, b, chance of nothing) of Panjer's recursion for a count of this mean, whose parts are nothing by `none`."""
    more = arrivals.dispersion - 1.0
    if more > _POISSON_WITHIN:
        slope = more / (1.0 + more)
        return slope, (mean / more - 1.0) * slope, (1.0 + more * (1.0 - none)) ** (-mean / more)
    if more < -_POISSON_WITHIN and mean > 0.0:
        trials = math.ceil(mean / -more)
        hit = min(mean / trials, 0.999999)
        slope = -hit / (1.0 - hit)
        return slope, -slope * (trials + 1.0), (1.0 - hit + hit * none) ** trials
    return 0.0, mean, math.exp(-mean * (1.0 - none))


@compiled
def arrived(
    arrivals: Arrivals, seconds: float, prompt: NDArray[np.float64], places: NDArray[np.int64], out: NDArray[np.float64]
) -> int:
    """Fill `out` with the chances of 0, 1, ... units of work in this time; returned: one past the last likely.

    `prompt`: chances of 0, 1, ... units in one prompt, positive at `places` only.
    """
    mean, none = arrivals.rate_per_s * seconds, prompt[0]
    slope, start, chance = _panjer(arrivals, mean, none)
    out[:] = 0.0
    out[0] = chance
    rest, likely = 1.0 - chance, mean * (1.0 - none)
    for at in range(1, out.size):
        if rest < 1e-9 and at > likely:
            return at
        total = 0.0
        for unit in places:
            if 0 < unit <= at:
                total += (slope + start * unit / at) * prompt[unit] * out[at - unit]
        out[at] = max(0.0, total / (1.0 - slope * none))
        rest -= out[at]
    return int(out.size)


@compiled
def count(arrivals: Arrivals, mean: float, uniform: float) -> int:
    """The count of arrivals at this quantile."""
    slope, start, chance = _panjer(arrivals, mean, 0.0)
    found, total = 0, chance
    while total < uniform and found < _MOST_COUNT:
        found += 1
        chance *= slope + start / found
        total += chance
        if chance <= 0.0:
            break
    return found
