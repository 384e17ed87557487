"""What a tagged arrival meets: a sample of seconds to its first token, and what it leaves behind.

Owns: the quasi-random sample and the means of it that TPOT needs. Does not own: the law of what waits (`chain`), or a
wait for a sequence slot (`load`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.compiled import compiled
from perfmodel.queueing.chain import Waiting
from perfmodel.queueing.laws import WEIGHTS, Arrivals, count
from perfmodel.queueing.work import Work, alone_s, step_s

# Roberts' additive recurrence (2018) in eight dimensions: powers of the inverse of the root of x^9 = x + 1.
_AXES = 8
_ROOT = 1.0850702454914507


class Met(NamedTuple):
    """Means over the sample: the step after a first token, and the units of work left behind by it."""

    next_s: float
    behind_units: float


class Own(NamedTuple):
    """A tagged arrival: its work in units, and how many of those who came with it stand before and behind it."""

    units: float
    before: int
    behind: int


@compiled
def _own(arrivals: Arrivals, sizes: NDArray[np.float64], draw: NDArray[np.float64]) -> Own:
    """Its length, and its burst: counts with a dispersion above 1 come in bursts of a logarithmic law, of which an
    arrival sees one in proportion to its number.
    """
    node, under = 0, WEIGHTS[0]
    while draw[5] > under and node < 4:
        node += 1
        under += WEIGHTS[node]
    more = arrivals.dispersion - 1.0
    if more <= 1e-3:
        return Own(sizes[node], 0, 0)
    mates = int(math.log(max(1e-12, 1 - draw[6])) / math.log(more / (1.0 + more)))
    before = int(((draw[6] * 7919.0) % 1.0) * (mates + 1))
    return Own(sizes[node], before, mates - before)


@compiled
def _first_token(work: Work, arrivals: Arrivals, queue: Waiting, draw: NDArray[np.float64]) -> tuple[float, float]:
    """(seconds to the first token, units left behind) of one arrival at a busy engine."""
    layout, rate = queue.layout, arrivals.rate_per_s
    own = _own(arrivals, queue.sizes, draw)
    units, prompt = layout.step_units, layout.prompt_units
    full_s, by_step = queue.lengths_s[units] / layout.engine_steps, units / layout.engine_steps
    state = min(layout.states - 1, int(np.searchsorted(queue.by_time, draw[0])))
    length_s = queue.lengths_s[min(state, units)]
    rest_s = draw[1] * length_s
    ahead = max(0.0, state - units) * queue.stretch
    ahead += (count(arrivals, rate * (length_s - rest_s), draw[2]) + own.before) * prompt
    behind = (count(arrivals, rate * rest_s, draw[3]) + own.behind) * prompt
    steps = (ahead + own.units) / by_step
    before = math.ceil(steps - 1e-9) - 1.0
    last = (steps - before) * by_step
    if before > 0:
        behind += count(arrivals, rate * before * full_s, draw[7]) * prompt
    last_s = step_s(work, queue.batch, min(by_step, last + behind) / prompt)
    left = max(0.0, last + behind - by_step) + count(arrivals, rate * last_s, (draw[7] + draw[1]) % 1.0) * prompt
    return rest_s + before * full_s + last_s, left


@compiled
def tagged(work: Work, arrivals: Arrivals, queue: Waiting, idle: float, out: NDArray[np.float64]) -> Met:
    """Fill `out` with the seconds from visible to first token of a quasi-random sample of arrivals.

    `idle`: chance that an arrival meets an empty engine.
    """
    layout, rate = queue.layout, arrivals.rate_per_s
    by_step, prompt = layout.step_units / layout.engine_steps, layout.prompt_units
    lone_s = alone_s(work, 0.0)
    most_behind = max(0.0, work.most_sequences - queue.batch) * prompt
    idle = min(idle, queue.by_time[0])
    draw = np.empty(_AXES)
    behind, next_s = 0.0, 0.0
    for point in range(out.size):
        weight = 1.0
        for axis in range(_AXES):
            weight /= _ROOT
            draw[axis] = (0.5 + (point + 1) * weight) % 1.0
        own = _own(arrivals, queue.sizes, draw)
        if draw[0] < idle and own.before + own.behind == 0:
            out[point] = lone_s
            if own.units != prompt:
                before = math.ceil(own.units / by_step - 1e-9) - 1.0
                out[point] = step_s(work, 0.0, (own.units - before * by_step) / prompt)
                if before > 0.0:
                    out[point] += before * step_s(work, 0.0, by_step / prompt)
            left = count(arrivals, rate * lone_s, draw[7]) * prompt
        else:
            out[point], left = _first_token(work, arrivals, queue, draw)
        left = min(left, most_behind)
        behind += left
        next_s += step_s(work, queue.batch, min(left, by_step) / prompt)
    return Met(next_s / out.size, behind / out.size)
