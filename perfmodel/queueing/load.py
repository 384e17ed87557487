"""The fixed point of batch, step time and waiting prompts under a load, compiled as one call.

Owns: what settles under an open load (first tokens, seconds per token, batch), the wait for a sequence slot, and the
rate of a closed one. Does not own: the parts (`work`, `chain`, `tagged`) or the clients' figures (`loops`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.compiled import compiled
from perfmodel.queueing.chain import Waiting, waiting
from perfmodel.queueing.laws import NODES, WEIGHTS, Arrivals
from perfmodel.queueing.tagged import Met, tagged
from perfmodel.queueing.work import (
    Work,
    alone_s,
    decode_s,
    fullest,
    present,
    solve_present,
    token_s,
)

# Bisection rounds; each halves the error, which starts below a factor of two.
_ROUNDS = 40

# Points of the first round, whose answer only corrects the second.
_FIRST_POINTS = 48

# A token's length by the chain over that of the closed form is looked for until it changes by less than the first
# share, in so many rounds at most; beyond the second bound one of them is past its capacity.
_SAME, _MOST_LONGER, _MOST_ROUNDS = 0.1, 5.0, 6

# The share of steps with decodes in them is not below this.
_LEAST_NONE = 1e-6

# The share by which rate and number are raised to see how a token grows with them.
_MORE_RATE, _MORE_PRESENT = 0.01, 0.1

# The most that a token takes longer, as a share, for each share of more arrivals; and the variance over mean of the
# number present that is not gone below, however even the arrivals are.
_MOST_SLOWER, _LEAST_NOISE = 9.0, 0.1

# Power of the noise of prompts that is left outside a full engine; in replays of the bench's grid the number present is
# 1.3 to 1.9 times as likely just above all slots as just below, at noises of 4 to 14.
_OUTSIDE_POWER = 0.2

# Numbers present, at even distances up to all slots, at which a stay is computed; it is a smooth curve between them.
_STAYS = 16

# A number present that is so many times as likely as a full engine says that the engine is never full; one that is so
# much less likely than all others together ends the sum.
_NEVER_FULL, _NEVER_THERE = 1e9, 1e-9

# The square root of the arrivals in a wait at which counts vary halfway between Poisson's and their gaps' variation;
# fitted on the bench's grid, as is the next.
_BURST_ARRIVALS = 0.4

# The share of the number present by which a token sees more of them than a step does, at most.
_SEEN_RATIO = 0.3


class Load(NamedTuple):
    """Requests per second of one replica, squared variations of gaps, prompts and answers, and the rate it carries."""

    rate_per_s: float
    gap_cv2: float
    input_cv2: float
    output_cv2: float
    capacity_per_s: float


class Settled(NamedTuple):
    """Seconds per output token in the mean over requests, and decodes in a step."""

    tpot_s: float
    batch: float


@compiled
def _dispersion(load: Load, wait_s: float) -> float:
    """Variance over mean of the arrivals in such a wait: gaps that vary more than Poisson's show it with time only."""
    if load.gap_cv2 <= 1.0:
        return float(load.gap_cv2)
    arrivals = math.sqrt(load.rate_per_s * wait_s)
    return float(1.0 + (load.gap_cv2 - 1.0) * arrivals / (arrivals + _BURST_ARRIVALS))


@compiled
def _shared(output_cv2: float) -> float:
    """Of the noise that all who are present share, the part that the number present shows.

    The mean of the shorter of two answers over the mean answer (Eckberg 1983): 1 for equal ones, for a lognormal law
    one minus its Gini coefficient, erf(sigma / 2).
    """
    return 1.0 - math.erf(math.sqrt(math.log1p(output_cv2)) / 2)


@compiled
def _noise(work: Work, there: float, load: Load, gap_cv2: float) -> float:
    """Variance over mean of the number present, were a step no longer the more are present.

    1 for a Poisson count, whose members leave alone. Here an arrival's prompt holds up all who decode while others
    arrive: a token takes `slower` times the share longer by which arrivals are more, so that one more arrival is
    1 + `slower` more present, by its prompt's length.
    """
    now_s = token_s(work, there, load.rate_per_s)
    more_s = token_s(work, there, (1.0 + _MORE_RATE) * load.rate_per_s)
    slower = _MOST_SLOWER
    if math.isfinite(more_s):
        slower = min(max((more_s / now_s - 1.0) / _MORE_RATE, 0.0), _MOST_SLOWER)
    square = (1.0 + slower) ** 2 * gap_cv2 + slower * slower * load.input_cv2
    return max(_LEAST_NOISE, 1.0 + _shared(load.output_cv2) * (square - 1.0))


@compiled
def _spread(work: Work, there: float, load: Load) -> float:
    """Variance over mean of the number present under Poisson arrivals.

    Their noise, and steps get longer the more are present: 1 / (1 - elasticity), linear noise around the fixed point.
    A number between none and all has a variance over mean of what is left to all at most: both bounds at work.
    """
    stay = present(work, there, load.rate_per_s)
    longer = present(work, (1.0 + _MORE_PRESENT) * there, load.rate_per_s)
    # Past the point where the fixed point runs away there is no slope to take: as steep as the bound allows.
    elasticity = min(max((longer / stay - 1) / _MORE_PRESENT, 0.0), 0.9) if math.isfinite(longer) else 0.9
    spread, left = _noise(work, there, load, 1.0) / (1 - elasticity), max(0.0, fullest(work) - there)
    return float(max(1.0, spread * left / (spread + left)))


@compiled
def _log_asked(work: Work, number: float, rate_per_s: float, longer: float) -> float:
    """Logarithm of the number that would be present if each stayed as long as beside so many (Little's law)."""
    steps = max(0.0, work.answer_tokens - 1.0)
    return math.log(rate_per_s * (steps * longer * token_s(work, number, rate_per_s) + alone_s(work, number)))


@compiled
def full_ratio(work: Work, there: float, load: Load, longer: float) -> float:
    """Chance that an arrival finds all sequence slots taken; `there`: the mean number present.

    The number present is a birth and death chain: all share the engine's speed, so that its law asks only for the mean
    stay beside so many (Cohen 1979). Where it varies more than a Poisson count it goes up and down by as many at once
    (Hayward). Who finds all slots taken waits outside and holds up nobody: from there on the noise is that of the
    arrivals and of the room they ask for, and little of their prompts', and the chance falls by the rate over the
    capacity. Without prompts, this is Erlang's formula. An engine whose token budget binds first is never full.
    """
    rate, slots = load.rate_per_s, work.most_sequences
    if fullest(work) < slots:
        return 0.0
    held_up = _noise(work, there, load, load.gap_cv2)
    alone = max(_LEAST_NOISE, 1.0 + _shared(load.output_cv2) * (load.gap_cv2 - 1.0))
    noise = held_up + work.room_cv2
    outside = alone * (held_up / alone) ** _OUTSIDE_POWER + work.room_cv2
    full = outside / (1.0 - rate / load.capacity_per_s)
    total, chance, number = full, 1.0, slots
    above, log_above = slots, _log_asked(work, slots, rate, longer)
    while number > 0.0 and chance > _NEVER_THERE * total:
        below = max(0.0, above - max(1.0, slots / _STAYS))
        log_below = _log_asked(work, below, rate, longer)
        while number > below and chance < _NEVER_FULL:
            log_asked = log_below + (number - below) / (above - below) * (log_above - log_below)
            chance *= math.exp((math.log(number) - log_asked) / noise)
            total += chance
            number -= 1.0
        if not chance < _NEVER_FULL:
            return 0.0
        above, log_above = below, log_below
    return float(full / total)


@compiled
def _order(point: int) -> float:
    """Where a point stands among all by the golden ratio, 0 to 1: even over any run of points."""
    return (0.5 + point * 0.6180339887498949) % 1.0


@compiled
def _full_wait_s(work: Work, load: Load) -> float:
    """Mean wait of an arrival that finds all sequence slots taken, as in a queue with as many servers.

    Over the spare rate 1 if stays are random (exponential), half and a little if they are equal: servers of equal times
    are not freed one by one. In between by the squared variation of the slot's or the room's time (Cosmetatos 1976).
    """
    full, slots = load.rate_per_s / load.capacity_per_s, work.most_sequences
    bunched = (1.0 - full) * (slots - 1.0) * (math.sqrt(4.0 + 5.0 * slots) - 2.0) / (16.0 * full * slots)
    equal = min(1.0, (1.0 + bunched) / 2)
    stay_cv2 = (1.0 + load.output_cv2) * (1.0 + work.room_cv2) - 1.0
    ratio = stay_cv2 + (1.0 - stay_cv2) * equal + (load.gap_cv2 - 1.0) / 2
    return float(max(0.0, ratio) / (load.capacity_per_s - load.rate_per_s))


@compiled
def _slot_wait(work: Work, there: float, load: Load, longer: float, sample: NDArray[np.float64]) -> None:
    """Let the sample wait for sequence slots, each by an exponential law.

    Who waits for a slot stands in the queue of prompts meanwhile: the longer wait of both counts.
    """
    chance = full_ratio(work, there, load, longer)
    if chance <= 0.0:
        return
    wait_s = _full_wait_s(work, load)
    lone_s = alone_s(work, there)
    drawn = 0.0
    for point in range(sample.size):
        if _order(point) < chance:
            drawn -= math.log(max(1e-12, _order(point) / chance))
    if drawn > 0.0:
        wait_s *= chance * sample.size / drawn  # so that the points' mean is exact, however few they are
    for point in range(sample.size):
        order = _order(point)
        if order < chance:
            late_s = -wait_s * math.log(max(1e-12, order / chance))
            sample[point] = max(sample[point], lone_s) + max(0.0, late_s - max(0.0, sample[point] - lone_s))


@compiled
def _step_per_token_s(work: Work, queue: Waiting) -> float:
    """Seconds of steps for each one with decodes in it."""
    return float(queue.mean_s / max(queue.none_ratio, _LEAST_NONE) if work.prefill_first else queue.mean_s)


@compiled
def _most_behind(work: Work, queue: Waiting) -> float:
    """Units of work of the prompts that slots can be free for."""
    return float(max(0.0, work.most_sequences - queue.batch) * queue.layout.prompt_units)


@compiled
def _longer(work: Work, load: Load, longer: float) -> float:
    """How many times as long as in the closed form a token takes by the chain, at the batch that follows from it.

    A token that is longer makes for more decodes, whose tokens are longer again: near capacity a step of this fixed
    point can overshoot, so that half of each (in the logarithm) is taken, and few of them.
    """
    rate, steps = load.rate_per_s, max(0.0, work.answer_tokens - 1.0)
    arrivals = Arrivals(rate, _dispersion(load, alone_s(work, 0.0)), math.sqrt(math.log1p(load.input_cv2)))
    for _ in range(_MOST_ROUNDS):
        there = solve_present(work, rate, longer)
        batch = min(fullest(work), rate * steps * token_s(work, there, rate) * longer)
        found = _step_per_token_s(work, waiting(work, batch, arrivals)) / token_s(work, batch, rate)
        found = min(max(found, 1.0 / _MOST_LONGER), _MOST_LONGER)
        if abs(found - longer) < _SAME * longer:
            return found
        longer = math.sqrt(longer * found)
    return longer


@compiled
def _extra_s(work: Work, batch: float, queue: Waiting, met: Met, rate_per_s: float) -> float:
    """Seconds by which the prompts left behind a first token hold up its answer, if it never ended.

    Each unit of work takes its time and brings that of who comes meanwhile.
    """
    units = queue.layout.step_units
    full_s = queue.lengths_s[units]
    unit_s = full_s / units if work.prefill_first else (full_s - queue.lengths_s[0]) / units
    usual = 0.0 if work.prefill_first else min(queue.mean_units, max(met.behind_units, _most_behind(work, queue)))
    flow = rate_per_s * queue.layout.prompt_units
    extra_s = unit_s * (met.behind_units - usual) / max(1e-3, 1.0 - flow * unit_s)
    if work.prefill_first:
        # Once all slots are taken no prompt runs before a decode; its last token waits for none.
        extra_s = min(extra_s, max(0.0, work.most_sequences - batch) * alone_s(work, 0.0))
        extra_s -= _step_per_token_s(work, queue) - decode_s(work, batch)
    return float(extra_s)


@compiled
def _held_up_s(work: Work, queue: Waiting, met: Met, extra_s: float, output_cv2: float) -> float:
    """The same per token, in the mean over answers, of which short ones end before the queue is gone.

    The steps' excess over their mean decays from that of the first one so that its sum is `extra_s`.
    """
    sigma = math.sqrt(math.log1p(output_cv2))
    gap_s, total_s = met.next_s - queue.mean_s, 0.0
    for node in range(5):
        steps = max(1.0, work.answer_tokens * math.exp(NODES[node] * sigma - sigma * sigma / 2) - 1.0)
        if work.prefill_first:
            held_s = extra_s
        elif extra_s * gap_s > 0.0 and abs(gap_s) < abs(extra_s):
            held_s = extra_s * (1.0 - (1.0 - gap_s / extra_s) ** steps)
        else:
            held_s = gap_s
        total_s += WEIGHTS[node] * held_s / steps
    return total_s


@compiled
def _swing_s(work: Work, batch: float, seen: float, rate_per_s: float) -> float:
    """Seconds by which a token takes longer beside `seen` decodes than beside `batch`."""
    token, seen = token_s(work, batch, rate_per_s), min(fullest(work), max(batch, seen))
    return max(0.0, min(token_s(work, seen, rate_per_s) - token, 2.0 * token))


@compiled
def settle(work: Work, load: Load, sample: NDArray[np.float64]) -> Settled:
    """What settles at a rate that is carried. Fills `sample` with seconds from visible to first token.

    The steps of the closed form give the first batch; the chain's mean step corrects it.
    """
    rate, steps = load.rate_per_s, max(0.0, work.answer_tokens - 1.0)
    sigma = math.sqrt(math.log1p(load.input_cv2))
    longer, wait_s, empty = 1.0, alone_s(work, 0.0), -1.0
    token, batch, decodes = 0.0, 0.0, 0.0
    for points in (_FIRST_POINTS, sample.size):
        there = solve_present(work, rate, longer)
        decodes = rate * steps * token_s(work, there, rate) * longer if steps > 0.0 else 0.0
        if empty < 0.0:
            empty = max(0.0, 1.0 - rate * alone_s(work, decodes))
        idle = empty * math.exp(-decodes)
        batch = min(fullest(work), decodes / (1.0 - idle)) if decodes > 0.0 else 0.0
        arrivals = Arrivals(rate, _dispersion(load, wait_s), sigma)
        queue = waiting(work, batch, arrivals)
        met = tagged(work, arrivals, queue, idle, sample[:points])
        token = _step_per_token_s(work, queue)
        found = min(max(token / token_s(work, batch, rate), 1.0 / _MOST_LONGER), _MOST_LONGER)
        if points == _FIRST_POINTS and abs(found - longer) > _SAME * longer:
            found = _longer(work, load, math.sqrt(found * longer))
        longer = found
        wait_s, empty = sample[:points].mean(), queue.none_time_ratio
    extra_s = _extra_s(work, batch, queue, met, rate)
    tpot_s = token + _held_up_s(work, queue, met, extra_s, load.output_cv2)
    # A token is made in a step of more decodes than the mean step has: one more, or as many as their number varies.
    bursts = max(1.0 + (_dispersion(load, decodes / rate) - 1.0) / (1.0 + load.output_cv2), 0.3)
    varies = _spread(work, max(decodes, 0.5), load)
    if not work.prefill_first:  # there, who came together stays together: prompts of others hold up all of them
        varies = min(varies, 1.0 + _SEEN_RATIO * decodes)
    varies = max(varies, bursts)
    waits_s = tpot_s + longer * _swing_s(work, batch, decodes + bursts, rate)
    _slot_wait(work, rate * (steps * waits_s + alone_s(work, batch)), load, longer, sample)
    tpot_s += longer * _swing_s(work, batch, decodes + varies, rate)
    return Settled(tpot_s, batch)


@compiled
def closed_rate(work: Work, inside: float) -> float:
    """The rate at which `inside` sequences are always present (Little's law), by bisection: it rises with the rate."""
    low, high = 0.0, 1.0 / alone_s(work, 0.0)
    while present(work, inside, high) < inside:
        low, high = high, 2 * high
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if present(work, inside, middle) < inside:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@compiled
def settle_closed(work: Work, inside: float, load: Load, sample: NDArray[np.float64]) -> Settled:
    """As `settle`, for `inside` sequences that are always present: the waves after the first, with random arrivals."""
    rate = load.rate_per_s
    batch = inside - min(inside, rate * alone_s(work, inside))
    others = rate * (inside - 1.0) / inside
    arrivals = Arrivals(others, 1.0, math.sqrt(math.log1p(load.input_cv2)))
    tagged(work, arrivals, waiting(work, batch, arrivals), 0.0, sample)
    return Settled(token_s(work, batch, rate), batch)
