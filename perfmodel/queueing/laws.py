"""Laws of random arrivals, compiled: counts in a time, lengths of prompts as a few nodes.

Owns: the formulas, of plain numbers. Does not own: what an engine and its arrivals are (`chain`, `load`). Counts
are Poisson, or negative binomial where gaps vary more than Poisson's and binomial where they vary less, so that their
variance over their mean is the dispersion that is asked; all three are sums of Panjer's recursion (1981). Where that is
unstable (a binomial whose trials mostly succeed: its factor is below -1 and rounding errors grow with its powers), the
work is summed over powers of one prompt's law instead, which has no minus in it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.compiled import compiled

# A count is normal from this mean on, and stops at the other number: beyond 20 deviations of a mean below.
_NORMAL_FROM, _MOST_COUNT = 60.0, 384

# A dispersion this near to 1 is Poisson's.
_POISSON_WITHIN = 1e-3

# The largest chance of a trial to bring work with which Panjer's recursion keeps rounding errors from growing: the
# polynomial whose power it takes has no root within the unit circle. Above 0 only a binomial has such a chance.
STABLE_HIT = 0.5

# The largest chance of a trial: spacing more even than that is not told apart, and its powers stay above underflow.
_MOST_HIT = 0.97

# Powers of a prompt's law that are kept; a step of evenly spaced arrivals has fewer prompts.
_MOST_POWERS = 200

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
def _panjer(arrivals: Arrivals, mean: float, none: float) -> tuple[float, float, float]:
    """(a, b, chance of nothing) of Panjer's recursion for a count of this mean, whose parts are nothing by `none`."""
    more = max(arrivals.dispersion, 1.0 - _MOST_HIT) - 1.0
    if more > _POISSON_WITHIN:
        slope = more / (1.0 + more)
        return slope, (mean / more - 1.0) * slope, (1.0 + more * (1.0 - none)) ** (-mean / more)
    if more < -_POISSON_WITHIN and mean > 0.0:
        trials = math.ceil(mean / -more)
        hit = mean / trials
        slope = -hit / (1.0 - hit)
        return slope, -slope * (trials + 1.0), (1.0 - hit + hit * none) ** trials
    return 0.0, mean, math.exp(-mean * (1.0 - none))


@compiled
def powers(prompt: NDArray[np.float64], rows: int, columns: int) -> NDArray[np.float64]:
    """Chances of 0, 1, ... units in 0, 1, ... prompts, one row each; `columns` units at most, the rest is left out."""
    out = np.zeros((min(rows, _MOST_POWERS), columns))
    out[0, 0] = 1.0
    for prompts in range(1, out.shape[0]):
        for unit in range(min(prompt.size, columns)):
            if prompt[unit] > 0.0:
                for at in range(unit, columns):
                    out[prompts, at] += prompt[unit] * out[prompts - 1, at - unit]
    return out


@compiled
def _evenly_arrived(trials: int, hit: float, law: NDArray[np.float64], out: NDArray[np.float64]) -> int:
    """`arrived` for a binomial number of prompts, by the powers of one prompt's law."""
    out[:] = 0.0
    chance, end = (1.0 - hit) ** trials, 1
    for prompts in range(min(trials + 1, law.shape[0])):
        if chance > 0.0:
            for at in range(out.size):
                out[at] += chance * law[prompts, at]
        chance *= (trials - prompts) / (prompts + 1.0) * hit / (1.0 - hit)
    for at in range(out.size):
        if out[at] > 1e-30:
            end = at + 1
    return end


@compiled
def arrived(
    arrivals: Arrivals, seconds: float, prompt: NDArray[np.float64], law: NDArray[np.float64], out: NDArray[np.float64]
) -> int:
    """Fill `out` with the chances of 0, 1, ... units of work in this time; returned: one past the last likely.

    `prompt`: chances of 0, 1, ... units in one prompt; `law`: its `powers`, which only evenly spaced arrivals need.
    """
    mean, none = arrivals.rate_per_s * seconds, prompt[0]
    slope, start, chance = _panjer(arrivals, mean, none)
    hit = slope / (slope - 1.0)
    if hit * (1.0 - none) > STABLE_HIT:
        return _evenly_arrived(int(-start / slope - 0.5), hit, law, out)
    out[:] = 0.0
    out[0] = chance
    rest, likely = 1.0 - chance, mean * (1.0 - none)
    for at in range(1, out.size):
        if rest < 1e-9 and at > likely:
            return at
        total = 0.0
        for unit in range(1, min(at + 1, prompt.size)):
            if prompt[unit] > 0.0:
                total += (slope + start * unit / at) * prompt[unit] * out[at - unit]
        out[at] = max(0.0, total / (1.0 - slope * none))
        rest -= out[at]
    return int(out.size)


@compiled
def _normal(uniform: float) -> float:
    """The normal law's quantile within 0.003 (Abramowitz and Stegun 26.2.23)."""
    tail = math.sqrt(-2.0 * math.log(max(1e-300, min(uniform, 1.0 - uniform))))
    found = tail - (2.30753 + 0.27061 * tail) / (1.0 + 0.99229 * tail + 0.04481 * tail * tail)
    return found if uniform > 0.5 else -found


@compiled
def count(arrivals: Arrivals, mean: float, uniform: float) -> float:
    """The count of arrivals at this quantile."""
    if mean > _NORMAL_FROM:
        return max(0.0, mean + _normal(uniform) * math.sqrt(mean * max(arrivals.dispersion, 1.0 - _MOST_HIT)))
    slope, start, chance = _panjer(arrivals, mean, 0.0)
    found, total = 0.0, chance
    while total < uniform and found < _MOST_COUNT:
        found += 1.0
        chance *= slope + start / found
        if chance <= 0.0:
            break
        total += chance
    return found
