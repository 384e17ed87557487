"""The prompt work that waits at the start of a step, as a Markov chain with a tail in closed form.

Owns: the unit of work, the stationary law of what waits, and how long the steps are. Does not own: the arrivals
(`laws`), step lengths (`work`) or what an arrival meets (`tagged`).
State q: units that wait. The step serves min(q, a step's units); the next state is what is left and what arrived
meanwhile. The chain is cut at a number of states; from a full step on it is a random walk, so that the mean that waits
follows from the variance of its increments (as Pollaczek and Khinchine's formula does), and the cut law is stretched to
it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.compiled import compiled
from perfmodel.queueing.laws import NODES, STABLE_HIT, WEIGHTS, Arrivals, arrived, powers
from perfmodel.queueing.work import Work, decode_s, room, step_s

# States told apart, units of a step and of a prompt at most: enough for every prompt length within 1 % of the mean
# wait, few enough for a tenth of a millisecond.
_STATES = 128
_MOST_STEP_UNITS = 32
_MOST_PROMPT_UNITS = 8

# Prompts that a chain has states for; what is beyond is the tail's.
_PROMPTS = 14

# Units in a step when a prompt has one: the fewest that fill a budget evenly.
_STEP_UNITS = 16

# Prompts that a step of the chain has room for at least, room over mean arrivals from which a step is never full, and
# the factor by which the room is raised until it is that.
_FEWEST, _AMPLE, _MORE = 6.0, 3.0, 1.25

# The chance to go down is never taken as none; a law is scaled when a state has so many times the first one's chance.
_LEAST_LEAVES, _LARGEST = 1e-60, 1e100

# A chance of a full step below this is rounding.
_LEAST_BEYOND = 1e-12

# How far the cut law is stretched at most, and at least.
_STRETCH = (0.3, 50.0)


class Layout(NamedTuple):
    """Units of work that a step serves and that a mean prompt has, and engine steps in a step of the chain."""

    step_units: int
    prompt_units: float
    engine_steps: float
    states: int


class Waiting(NamedTuple):
    """The chain's answer: its layout, the work of a prompt at each node in units, step lengths by state (the last one
    is a full step), the law by time up to each state, and how far what waits beyond a step is stretched.

    `batch`: decodes in a step; `mean_s`: an engine step; `none_ratio`: share of engine steps without a prompt,
    `none_time_ratio` of time;
    `mean_units`: work that waits at the start of a step.
    """

    batch: float
    layout: Layout
    sizes: NDArray[np.float64]
    lengths_s: NDArray[np.float64]
    by_time: NDArray[np.float64]
    stretch: float
    mean_s: float
    none_ratio: float
    none_time_ratio: float
    mean_units: float


@compiled
def _room(work: Work, batch: float, arrivals: Arrivals) -> float:
    """Prompts that a step of the chain has room for: no more than it takes to never be full.

    A step that could take hundreds of prompts but meets two or three needs no states for hundreds, and a prompt that is
    less than a unit would bring no step of its own. With arrivals more even than Poisson's all the room is kept: their
    counts are of few trials, whose chance of none jumps from load to load, and coarse units smooth that.
    """
    fits, most = room(work, batch), _FEWEST
    if arrivals.dispersion < 1.0:
        return fits
    while most < fits and arrivals.rate_per_s * step_s(work, batch, most) * _AMPLE > most:
        most *= _MORE
    return min(fits, most)


@compiled
def _layout(work: Work, batch: float, fits: float) -> Layout:
    """Units fine enough for a prompt and a step; a prompt of very many steps: several steps together."""
    if fits * _MOST_PROMPT_UNITS < 1.0:
        units, prompt, steps = 1, float(_MOST_PROMPT_UNITS), 1.0 / (_MOST_PROMPT_UNITS * fits)
    else:
        wanted = min(max(_STEP_UNITS / fits, 1.0), float(_MOST_PROMPT_UNITS))
        units = max(1, min(_MOST_STEP_UNITS, int(fits * wanted + 0.5)))
        prompt, steps = units / fits, 1.0
    return Layout(units, prompt, steps, min(_STATES, units + int(_PROMPTS * prompt) + 12))


@compiled
def _sizes(work: Work, batch: float, sigma: float, layout: Layout) -> NDArray[np.float64]:
    """Units of work in a prompt at each node of its length: attention's part grows with the square of the length."""
    fits = room(work, batch)
    square_s = work.pair_s * work.new_tokens * (work.cached_tokens + work.new_tokens / 2)
    square_s += work.context_s * (work.new_tokens * max(0.0, 1 / fits - 1.0) / 2 + work.cached_tokens / min(1.0, fits))
    share = min(1.0, square_s * fits / step_s(work, batch, fits))
    out, total = np.empty(5), 0.0
    for node in range(5):
        ratio = math.exp(NODES[node] * sigma - sigma * sigma / 2)
        out[node] = (1 - share) * ratio + share * ratio * ratio
        total += WEIGHTS[node] * out[node]
    out *= layout.prompt_units / total
    return out


@compiled
def _prompt_law(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chances of 0, 1, ... units in a prompt; what lies between two goes to both, so that the mean is kept."""
    law = np.zeros(int(sizes[4]) + 2)
    for node in range(5):
        low = int(sizes[node])
        law[low] += WEIGHTS[node] * (1 - (sizes[node] - low))
        law[low + 1] += WEIGHTS[node] * (sizes[node] - low)
    return law


@compiled
def _stationary(matrix: NDArray[np.float64], down: int) -> NDArray[np.float64]:
    """The stationary law of a chain that goes down by at most `down` states (Grassmann, Taksar and Heyman 1985).

    States are taken out from the last on; `matrix` is used up.
    """
    size = matrix.shape[0]
    for state in range(size - 1, 0, -1):
        low, leaves = max(0, state - down), _LEAST_LEAVES
        for target in range(low, state):
            leaves += matrix[state, target]
        for source in range(state):
            chance = matrix[source, state]
            if chance > 0.0:
                chance /= leaves
                matrix[source, state] = chance
                for target in range(low, state):
                    matrix[source, target] += chance * matrix[state, target]
    law = np.zeros(size)
    law[0] = 1.0
    for state in range(1, size):
        for source in range(state):
            law[state] += law[source] * matrix[source, state]
        if law[state] > _LARGEST:  # evenly spaced arrivals all but never leave none
            law[: state + 1] /= law[state]
    whole: NDArray[np.float64] = law / law.sum()
    return whole


@compiled
def _fill(
    arrivals: Arrivals, layout: Layout, lengths_s: NDArray[np.float64], sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Chances of going from one state to another in a step; the last state stands for all beyond."""
    units, states = layout.step_units, layout.states
    prompt = _prompt_law(sizes)
    most = arrivals.rate_per_s * lengths_s[units] / STABLE_HIT
    rows = int(most) + 2 if arrivals.dispersion < 1.0 - STABLE_HIT else 1
    law = powers(prompt, rows, states)
    matrix, row = np.zeros((states, states)), np.empty(states)
    for state in range(units + 1):
        end = arrived(arrivals, lengths_s[state], prompt, law, row)
        for source in range(state, states if state == units else state + 1):
            left, total = (source - state if state == units else 0), 0.0
            for more in range(min(end, states - left - 1)):
                matrix[source, left + more] = row[more]
                total += row[more]
            matrix[source, states - 1] += max(0.0, 1.0 - total)
    return matrix


@compiled
def _tail(
    arrivals: Arrivals, lengths_s: NDArray[np.float64], sizes: NDArray[np.float64], law: NDArray[np.float64]
) -> tuple[float, float]:
    """(share of full steps, mean units left after a step) that the balance of work and of its square ask for."""
    units = lengths_s.size - 1
    flow, square = 0.0, 0.0
    for node in range(5):
        flow += WEIGHTS[node] * sizes[node]
        square += WEIGHTS[node] * sizes[node] ** 2
    square = arrivals.rate_per_s * (square + flow * flow * (arrivals.dispersion - 1.0))
    flow *= arrivals.rate_per_s
    below, lack, gap, spread = 0.0, 0.0, 0.0, 0.0
    for state in range(units):
        brought = flow * lengths_s[state]
        below += law[state]
        lack += law[state] * (brought - state)
        gap += law[state] * (units - state) ** 2
        spread += law[state] * ((brought - units) ** 2 + square * lengths_s[state])
    lack, gap, spread = lack / below, gap / below, spread / below
    spare = max(units - flow * lengths_s[units], 1e-3)
    full = lack / (lack + spare) if lack > 0.0 else 0.0
    spread = (1 - full) * spread + full * (spare * spare + square * lengths_s[units])
    return full, max(0.0, (spread - (1 - full) * gap) / (2 * spare))


@compiled
def waiting(work: Work, batch: float, arrivals: Arrivals) -> Waiting:
    """What waits for an engine of `batch` decodes a step."""
    layout = _layout(work, batch, _room(work, batch, arrivals))
    units, states = layout.step_units, layout.states
    sizes = _sizes(work, batch, arrivals.prompt_sigma, layout)
    lengths_s = np.empty(units + 1)
    lengths_s[0] = decode_s(work, batch)
    for state in range(1, units + 1):
        share = state / layout.prompt_units / layout.engine_steps
        lengths_s[state] = layout.engine_steps * step_s(work, batch, share)
    law = _stationary(_fill(arrivals, layout, lengths_s, sizes), units)
    full, left = _tail(arrivals, lengths_s, sizes, law)
    below, below_units, cut, beyond = 0.0, 0.0, 0.0, 0.0
    for state in range(units):
        below += law[state]
        below_units += law[state] * state
    for state in range(units, states):
        cut += law[state] * (state - units)
        beyond += law[state]
    if beyond < _LEAST_BEYOND:  # what is left of it is rounding: its law and its share are none
        full, beyond = 0.0, 1.0
    cut /= beyond
    stretch = min(max(left / full / cut, _STRETCH[0]), _STRETCH[1]) if full > 1e-9 and cut > 1e-9 else 1.0
    by_time, total = np.empty(states), 0.0
    for state in range(states):
        if state < units:
            total += law[state] / below * (1 - full) * lengths_s[state]
        else:
            total += law[state] / beyond * full * lengths_s[units]
        by_time[state] = total
    none = (1 - full) * law[0] / below
    engine_steps = none + (1 - none) * layout.engine_steps
    return Waiting(
        batch,
        layout,
        sizes,
        lengths_s,
        by_time / total,
        stretch,
        total / engine_steps,
        none / engine_steps,
        none * lengths_s[0] / total,
        (1 - full) * below_units / below + full * (units + cut * stretch),
    )
