"""TTFT, TPOT and throughput of one engine, or k equal ones, in closed form: no events, well under a millisecond a call.

Owns: the fixed point of batch and step time under a load, the wait for a step, for the token budget and for a sequence
slot, and the percentiles of their sum. Does not own: step times (`step_time`), what fits (`memory`) or the truth: a
seeded replay (`harness`) of the same engine checks this module over the grid of `tests/bench/bench_queueing.py`.
The chain of thought. Engine steps are a gated queue: who arrives during a step is served in the next one, whose length
depends on how many arrived. So prompts per step form a Markov chain; a tagged arrival sees a step in proportion to its
length, waits for its rest, then for full steps ahead of it when the token budget binds, then for its own. A wait for a
sequence slot or for KV room comes on top, as in a queue with many servers (Halfin and Whitt 1981).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.compiled import compiled
from perfmodel.errors import ConfigError
from perfmodel.queue_laws import erlang_c, poisson_count
from perfmodel.serving import (
    SATURATED_TTFT_MS,
    FrontEnd,
    LengthLaw,
    Lengths,
    SchedulingOrder,
    Served,
    ServingEngine,
    Steps,
)
from perfmodel.step_time import StepTable

__all__ = ["FrontEnd", "LengthLaw", "Lengths", "Served", "ServingEngine", "Steps", "closed_loop", "open_loop"]

# Prompts in one step or waiting for it that the chain tells apart; more come up in fewer than 1e-4 of steps at 0.95 of
# capacity.
_STATES = 96

# Points of the tagged arrival's quasi-random sample: the mean of the sum of five terms is then within 1 %.
_POINTS = 512

# Roberts' additive recurrence in five dimensions: powers of the inverse of the root of x^6 = x + 1 (2018).
_ROOT = 1.1347241384015194

# Fixed-point rounds; each about halves the error, which starts below a factor of two.
_ROUNDS = 24

# The mean wait for a slot over (Ca2 + Cs2) / 2 over the spare rate: answers overlap, so a slot is not freed one by one.
_WAIT_FACTOR = 1.2

# Power of 1 / (1 - prefill share) in the variance of the number present: between 1 (each arrival's noise on its own)
# and 2 (fully shared); fitted on the same grid.
_SHARED_POWER = 1.5

# vLLM keeps 1 % of its KV blocks free when it admits (its watermark).
_KV_USED_RATIO = 0.99


class _Work(NamedTuple):
    """One replica and what a request asks of it, as plain numbers for the compiled functions.

    `square_ratio`: the mean square of a prompt's tokens over the squared mean.
    """

    by_token_s: NDArray[np.float64]
    sequence_s: float
    decode_context_s: float
    pair_s: float
    context_s: float
    prefill_step_s: float
    new_tokens: float
    cached_tokens: float
    answer_tokens: float
    decode_context_tokens: float
    budget_tokens: float
    prefill_first: bool
    most_sequences: float
    prompt_spread: float
    square_ratio: float


class _Seen(NamedTuple):
    """What an arrival meets: the chance of an empty engine, and chance and mean seconds of a wait for a slot."""

    idle: float
    wait: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class _Offered:
    """The load of one replica: requests per second, squared variation of their gaps, and the rate that it carries."""

    rate_per_s: float
    gap_cv2: float
    capacity_per_s: float


@compiled
def _tokens_s(by_token_s: NDArray[np.float64], tokens: float) -> float:
    """The table between its entries; beyond its end the last slope goes on."""
    last = by_token_s.size - 1
    low = min(int(tokens), last - 1)
    return float(by_token_s[low] + (tokens - low) * (by_token_s[low + 1] - by_token_s[low]))


@compiled
def _decode_s(work: _Work, batch: float) -> float:
    """A step of `batch` decodes."""
    per_sequence = work.sequence_s + work.decode_context_s * work.decode_context_tokens
    return _tokens_s(work.by_token_s, batch) + batch * per_sequence


@compiled
def _room(work: _Work, batch: float) -> float:
    """Prompts that fit in one step beside `batch` decodes; below one when a prompt needs several steps."""
    budget = work.budget_tokens - (0.0 if work.prefill_first else batch)
    return max(1.0, budget) / work.new_tokens


@compiled
def _parts(work: _Work, batch: float) -> float:
    """Mean steps that one prompt needs: the mean of ceil(tokens / budget) over lengths uniform around the mean."""
    need = 1.0 / _room(work, batch)
    low, high = need * (1 - work.prompt_spread), need * (1 + work.prompt_spread)
    if high - low < 1e-6 or high <= 1.0:
        return max(1.0, math.ceil(need - 1e-9))
    total, at = 0.0, low
    while at < high:
        edge = min(high, math.floor(at) + 1.0)
        total += (edge - at) * (math.floor(at) + 1.0)
        at = edge
    return max(1.0, total / (high - low))


@compiled
def _step_s(work: _Work, batch: float, prompts: float) -> float:
    """A step of `batch` decodes and `prompts` whole prompts; a prompt beyond the budget: all its steps together."""
    if prompts <= 0:
        return _decode_s(work, batch)
    decodes = 0.0 if work.prefill_first else batch
    new, old = work.new_tokens, work.cached_tokens
    parts = _parts(work, batch)
    pairs = prompts * new * (old + (new * work.square_ratio + 1) / 2)
    context = prompts * (parts * old + new * (parts - 1) / 2)
    one_s = _tokens_s(work.by_token_s, decodes + prompts * new / parts) + work.sequence_s * prompts
    one_s += decodes * (work.sequence_s + work.decode_context_s * work.decode_context_tokens) + work.prefill_step_s
    return parts * one_s + work.pair_s * pairs + work.context_s * context


@compiled
def _prompt_s(work: _Work, batch: float) -> float:
    """What one prompt adds to the time of those who decode; of several steps: as one in a queue."""
    decodes_s = 0.0 if work.prefill_first else _decode_s(work, batch)
    if _parts(work, batch) <= 1.0:
        return _step_s(work, batch, 1.0) - decodes_s
    return _full_s(work, batch) / max(1.0, _room(work, batch)) - decodes_s / _room(work, batch)


@compiled
def _full_s(work: _Work, batch: float) -> float:
    """Prompts that fill the budget of every step, as many as fit in one or one that needs several: their steps.

    In a queue the next begins in the step that the one before ends in: 1.1 budgets take 1.1 steps, alone two.
    """
    room = _room(work, batch)
    if _parts(work, batch) <= 1.0:
        return _step_s(work, batch, max(1.0, room))
    decodes = 0.0 if work.prefill_first else batch
    new, old, prompts = work.new_tokens, work.cached_tokens, max(1.0, room)
    steps = prompts / room
    one_s = _tokens_s(work.by_token_s, decodes + room * new) + work.sequence_s * (room + 1.0) + work.prefill_step_s
    one_s += decodes * (work.sequence_s + work.decode_context_s * work.decode_context_tokens)
    pairs = prompts * new * (old + (new * work.square_ratio + 1) / 2)
    before = max(0.0, steps - 1.0)
    context = prompts * ((before + 1.0) * old + new * before / 2)
    return steps * one_s + work.pair_s * pairs + work.context_s * context


@compiled
def _prefill_share(work: _Work, batch: float, prompts: float) -> float:
    """Share of steps with a prompt in them where `prompts` come in a step and some need several; 1: the budget is full.

    A prompt alone takes `_parts` steps. It shares its last one with the next prompt when one waits, of which the chance
    is this share itself, as in any queue of one server.
    """
    parts = _parts(work, batch)
    return prompts * parts / (1.0 + prompts * (parts - 1.0 / _room(work, batch)))


@compiled
def _mean_chunked_s(work: _Work, batch: float, rate_per_s: float) -> float:
    """`_mean_step_s` where prompts need more than one step: its length lies between no prompt and a full budget."""
    room = _room(work, batch)
    steps = max(1.0, room) / room
    alone_s, full_s = _step_s(work, batch, 0.0), _full_s(work, batch) / steps
    if rate_per_s * full_s >= room:
        return np.inf
    lone_s = _step_s(work, batch, 1.0) / _parts(work, batch)
    mean_s = alone_s
    for _ in range(60):
        share = min(1.0, _prefill_share(work, batch, rate_per_s * mean_s))
        new_s = (1.0 - share) * alone_s + share * ((1.0 - share) * lone_s + share * full_s)
        if abs(new_s - mean_s) < 1e-9 * mean_s:
            return new_s
        mean_s = new_s
    return mean_s


@compiled
def _mean_step_s(work: _Work, batch: float, rate_per_s: float) -> float:
    """Mean step under a Poisson rate, from E[T] = E[T(prompts)] with prompts ~ rate * E[T]; inf: none exists."""
    if _parts(work, batch) > 1.0:
        return _mean_chunked_s(work, batch, rate_per_s)
    room = _room(work, batch)
    most = max(1.0, room)
    alone_s, one_s = _step_s(work, batch, 0.0), _step_s(work, batch, 1.0)
    full_s = _step_s(work, batch, most)
    if rate_per_s * full_s >= most:
        return np.inf
    more_s = (full_s - one_s) / max(most - 1.0, 1e-9) if most > 1.0 else one_s
    mean_s = alone_s
    for _ in range(60):
        prompts = rate_per_s * mean_s
        some = -math.expm1(-prompts)
        new_s = alone_s + some * (one_s - alone_s) + max(0.0, prompts - some) * more_s
        if abs(new_s - mean_s) < 1e-9 * mean_s:
            return new_s
        mean_s = new_s
        if mean_s > 1e6 * alone_s:
            return np.inf
    return mean_s


@compiled
def _tpot_s(work: _Work, batch: float, rate_per_s: float) -> float:
    """Seconds per output token: a step each, or a step without prompts when prompts run alone."""
    mean_s = _mean_step_s(work, batch, rate_per_s)
    if not math.isfinite(mean_s):
        return np.inf
    if not work.prefill_first:
        return mean_s
    if _parts(work, batch) > 1.0:
        return mean_s / max(1e-9, 1.0 - _prefill_share(work, batch, rate_per_s * mean_s))
    return mean_s / math.exp(-rate_per_s * mean_s)


@compiled
def _present(work: _Work, batch: float, rate_per_s: float, extra_s: float) -> float:
    """Sequences present (Little's law): each decodes for its steps and `extra_s`, and is prefilled before."""
    decode_s = (work.answer_tokens - 1.0) * _tpot_s(work, batch, rate_per_s) + extra_s
    return rate_per_s * (decode_s + _step_s(work, batch, 1.0))


@compiled
def _fullest(work: _Work) -> float:
    """Decodes of an engine whose queue never empties: all its sequences, or fewer where the token budget binds.

    Each step begins as many answers as prompts fit beside the decodes, and each lasts `answer_tokens - 1` steps.
    """
    if work.prefill_first:
        return work.most_sequences
    steps = max(1.0, work.answer_tokens - 1.0)
    return min(work.most_sequences, max(1.0, steps * work.budget_tokens / (work.new_tokens + steps)))


@compiled
def _carries(work: _Work, rate_per_s: float) -> bool:
    """Whether the engine, as full as it gets, makes tokens at least as fast as this rate asks for them."""
    batch = _fullest(work)
    if not math.isfinite(_mean_step_s(work, batch, rate_per_s)):
        return False
    return bool(_present(work, batch, rate_per_s, 0.0) <= work.most_sequences)


@compiled
def _capacity_per_s(work: _Work) -> float:
    """The largest rate that the engine carries."""
    low, high = 0.0, 1.0 / _step_s(work, 0.0, 1.0)
    while _carries(work, high):
        low, high = high, 2 * high
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if _carries(work, middle):
            low = middle
        else:
            high = middle
    return low


@compiled
def _solve_batch(work: _Work, rate_per_s: float, extra_s: float) -> float:
    """The sequences present N at which Little's law holds; the largest number beyond capacity."""
    low, high = 0.0, _fullest(work)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if _present(work, middle, rate_per_s, extra_s) > middle:
            low = middle
        else:
            high = middle
    return high


@compiled
def _fill_matrix(
    rate_per_s: float,
    lengths_s: NDArray[np.float64],
    served: NDArray[np.float64],
    matrix: NDArray[np.float64],
    ends: NDArray[np.int64],
) -> None:
    """Chances of going from q waiting prompts to q' in one step (Poisson); `ends`: one past the last likely."""
    for state in range(_STATES):
        left = math.floor(state - served[state] + 0.5)
        mean = rate_per_s * lengths_s[state]
        chance, rest, target = math.exp(-mean), 1.0, left
        while target < _STATES - 1 and (rest > 1e-10 or target - left < mean):
            matrix[state, target] = chance
            rest -= chance
            target += 1
            chance *= mean / (target - left)
        matrix[state, target] += max(0.0, rest)
        ends[state] = target + 1


@compiled
def _chain(work: _Work, batch: float, rate_per_s: float, lengths_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Stationary law of the prompts that wait at the start of a step; fills the step length of each state.

    State q serves min(q, room) prompts; the next state is what is left and who arrived meanwhile.
    """
    room = max(1.0, _room(work, batch))
    full_s = _full_s(work, batch)
    served = np.empty(_STATES)
    for state in range(_STATES):
        served[state] = min(float(state), room)
        lengths_s[state] = _step_s(work, batch, served[state])
        if state > 1:
            lengths_s[state] = min(lengths_s[state], full_s)
    matrix = np.zeros((_STATES, _STATES))
    ends = np.zeros(_STATES, dtype=np.int64)
    _fill_matrix(rate_per_s, lengths_s, served, matrix, ends)
    law = np.zeros(_STATES)
    law[0] = 1.0
    for _ in range(300):
        new = np.zeros(_STATES)
        for state in range(_STATES):
            if law[state] > 1e-9:
                for target in range(ends[state]):
                    new[target] += law[state] * matrix[state, target]
        moved = np.abs(new - law).sum()
        law = new / new.sum()
        if moved < 1e-6:
            break
    return law


@compiled
def _tagged(work: _Work, batch: float, rate_per_s: float, seen: _Seen, out: NDArray[np.float64]) -> float:
    """Fill `out` with the seconds from visible to first token of a quasi-random sample of arrivals.

    Returned: the prompts left waiting when the tagged one has its first token, in the mean.
    """
    idle = seen.idle
    lengths_s = np.empty(_STATES)
    law = _chain(work, batch, rate_per_s, lengths_s)
    mean_s = (law * lengths_s).sum()
    room = max(1.0, _room(work, batch))
    alone_s = _step_s(work, 0.0, 1.0)
    full_s = _full_s(work, batch)
    by_length = np.cumsum(law * lengths_s) / mean_s
    # A prompt that ends inside a step ends with it, and the next prompt fills that step's budget.
    parts = _parts(work, batch)
    spare = min(1.0, parts - 1.0 / _room(work, batch)) if parts > 1.0 else 0.0
    need, budget = max(1.0, 1.0 / _room(work, batch)), _room(work, batch) * work.new_tokens
    fill_s = _tokens_s(work.by_token_s, batch + budget) - _tokens_s(work.by_token_s, batch + budget * (1.0 - spare))
    left_behind = 0.0
    for point in range(out.size):
        draw = np.empty(5)
        weight = 1.0
        for axis in range(5):
            weight /= _ROOT
            draw[axis] = (0.5 + (point + 1) * weight) % 1.0
        slot_s = 0.0
        if draw[4] < seen.wait:
            slot_s = -seen.wait_s * math.log(max(1e-12, draw[4] / seen.wait))
        if draw[0] < idle:
            out[point] = alone_s + slot_s
            left_behind += rate_per_s * alone_s
            continue
        state = min(_STATES - 1, int(np.searchsorted(by_length, (draw[0] - idle) / (1.0 - idle))))
        rest_s = draw[1] * lengths_s[state]
        left = max(0.0, state - room)
        ahead = left + poisson_count(rate_per_s * (lengths_s[state] - rest_s), draw[2])
        behind = poisson_count(rate_per_s * rest_s, draw[3])
        full_steps = math.ceil((ahead + 1.0) / room - 1e-9) - 1.0
        last = min(room, ahead - full_steps * room + 1.0 + behind)
        last_s = _step_s(work, batch, last)
        if room < 1.0 + 1e-9:
            last_s += fill_s * (1.0 if behind > 0 else -math.expm1(-rate_per_s * last_s * (parts - 1.0) / parts))
        if parts > 1.0 and full_steps > 0:
            # It begins in the step that the one before it ends in: fewer steps than alone, rounded up at its end.
            last_s = min(last_s, (math.ceil((full_steps + 1.0) * need - 1e-9) / need - full_steps) * full_s)
        out[point] = rest_s + full_steps * full_s + last_s + slot_s
        left_behind += rate_per_s * (full_steps * full_s + last_s)
        left_behind += max(0.0, ahead - full_steps * room + 1.0 + behind - last)
    return float(left_behind / out.size)


def open_loop(engine: ServingEngine, lengths: Lengths, rate_per_s: float, burstiness_cv2: float = 1.0) -> Served:
    """What clients see that send `rate_per_s` requests a second over all replicas, without end.

    `burstiness_cv2` is the squared coefficient of variation of their gaps (1: Poisson). Replicas take turns, so each
    sees gaps of `burstiness_cv2 / replicas`. `utilisation_ratio` is the rate over the largest one that is carried; from
    there on the answer is `saturated`, with infinite TTFT and the throughput of a full engine.
    Raises ConfigError for a rate that is not positive and finite.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise ConfigError(f"open loop: rate_per_s is {rate_per_s}; expected a positive number")
    if not (math.isfinite(burstiness_cv2) and burstiness_cv2 >= 0):
        raise ConfigError(f"open loop: burstiness_cv2 is {burstiness_cv2}; expected 0 or more")
    work = _work(engine, lengths)
    rate = rate_per_s / engine.replicas
    capacity = _capacity_per_s(work)
    if rate >= capacity:
        return _saturated(engine, work, capacity, rate / capacity)
    return _served(engine, work, lengths, _Offered(rate, burstiness_cv2 / engine.replicas, capacity))


def closed_loop(engine: ServingEngine, lengths: Lengths, concurrency: int, requests_per_client: int = 10) -> Served:
    """What `concurrency` clients over all replicas see that start together and send again when their answer ended.

    The mean over `requests_per_client` waves: the first is a burst; later ones are a steady state with random arrivals,
    or stay in step when all lengths are equal. Clients beyond the engine's sequences wait for a slot by Little's law.
    Coarser than a replay (`harness.replay`), which has the waves in between: use that where a millisecond is there.
    Raises ConfigError for a load of nothing.
    """
    for name, value in (("concurrency", concurrency), ("requests_per_client", requests_per_client)):
        if value < 1:
            raise ConfigError(f"closed loop: {name} is {value}; expected at least 1")
    work = _work(engine, lengths)
    clients = max(1.0, math.ceil(concurrency / engine.replicas))
    inside = min(clients, work.most_sequences)
    rate = _closed_rate(work, inside)
    prefilling = min(inside, rate * _step_s(work, inside, 1.0))
    batch = inside - prefilling
    sample = np.empty(_POINTS)
    _tagged(work, batch, rate * (inside - 1) / inside, _Seen(0.0, 0.0, 0.0), sample)
    room = max(1.0, _room(work, inside / 2))
    in_step = lengths.law is LengthLaw.FIXED
    if in_step and not work.prefill_first:
        sample[:] = _step_s(work, inside / 2, min(room, inside))
    first = _POINTS if in_step and work.prefill_first else max(1, _POINTS // requests_per_client)
    groups = math.ceil(inside / room - 1e-9)
    order = np.ceil(groups * (np.arange(first) + 0.5) / first)
    sample[:first] = order * _step_s(work, inside / 2, min(room, inside))
    sample += (clients - inside) / rate
    return _figures(engine, lengths, sample, _Settled(_tpot_s(work, batch, rate), rate, 1.0, batch))


@compiled
def _closed_rate(work: _Work, inside: float) -> float:
    """The rate at which `inside` sequences are always present (Little's law), by bisection: it rises with the rate."""
    low, high = 0.0, 1.0 / _step_s(work, 0.0, 1.0)
    while _present(work, inside, high, 0.0) < inside:
        low, high = high, 2 * high
    for _ in range(_ROUNDS + 16):
        middle = (low + high) / 2
        if _present(work, inside, middle, 0.0) < inside:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _work(engine: ServingEngine, lengths: Lengths) -> _Work:
    """One replica and one mean request as numbers."""
    table: StepTable = engine.step.table(engine.max_batched_tokens)
    cached = lengths.input_tokens * lengths.cached_ratio
    # Longer answers stay longer: of those present at a moment the mean is E[tokens^2] / E[tokens].
    staying = lengths.output_tokens * (1 + lengths.cv2[1])
    held = lengths.input_tokens + staying * (1 + engine.reserve_ratio) / 2
    return _Work(
        np.ascontiguousarray(table.by_token_s, dtype=np.float64),
        float(table.sequence_s),
        float(table.decode_context_s),
        float(table.prefill_pair_s),
        float(table.prefill_context_s),
        float(table.prefill_step_s),
        max(1.0, lengths.input_tokens - cached),
        cached,
        lengths.output_tokens,
        lengths.input_tokens + (staying + 1) / 2,
        float(engine.max_batched_tokens),
        engine.order is SchedulingOrder.PREFILL_FIRST,
        max(1.0, min(float(engine.max_sequence_count), math.floor(_KV_USED_RATIO * engine.kv_capacity_tokens / held))),
        math.sqrt(3 * min(lengths.cv2[0], 1 / 3)),
        1.0 + lengths.cv2[0],
    )


def _slot_wait(work: _Work, present: float, offered: _Offered, lengths: Lengths) -> tuple[float, float]:
    """Chance and mean seconds of a wait for a sequence slot: a queue of as many servers as the engine holds sequences.

    Erlang's chance to wait at the mean number present; the mean wait of those who do is (Ca2 + Cs2) / 2 over the spare
    rate. The number present varies more than a Poisson count, because each arrival's prompt slows all who decode
    (1 / (1 - prefill share), in amplitude) and steps get longer the more are present (1 / (1 - elasticity), linear
    noise around the fixed point). Erlang's servers and load are both divided by that spread.
    """
    variation = (offered.gap_cv2 + lengths.cv2[1]) / 2
    rate_per_s = offered.rate_per_s
    stay, longer = (_present(work, ratio * present, rate_per_s, 0.0) for ratio in (1.0, 1.1))
    # Past the point where the fixed point runs away there is no slope to take: as steep as the bound allows.
    elasticity = min(max((longer / stay - 1) / 0.1, 0.0), 0.9) if math.isfinite(longer) else 0.9
    slowed = min(rate_per_s * _prompt_s(work, present), 0.9)
    spread = 1 / ((1 - slowed) ** _SHARED_POWER * (1 - elasticity))
    chance = erlang_c(max(1, round(work.most_sequences / spread)), present / spread)
    return chance, _WAIT_FACTOR * variation / (offered.capacity_per_s - rate_per_s)


def _served(engine: ServingEngine, work: _Work, lengths: Lengths, offered: _Offered) -> Served:
    """The figures at a load that is carried."""
    rate_per_s, sample = offered.rate_per_s, np.empty(_POINTS)
    extra_s, batch = 0.0, 0.0
    for points in (_POINTS // 4, _POINTS):
        present = _solve_batch(work, rate_per_s, extra_s)
        idle = math.exp(-present)
        prefilling = min(present, rate_per_s * _step_s(work, present, 1.0))
        batch = min(_fullest(work), (present - prefilling) / (1.0 - idle))
        seen = _Seen(idle, *_slot_wait(work, present, offered, lengths))
        behind = _tagged(work, batch, rate_per_s, seen, sample[:points])
        # The prompts left behind run while this one decodes, and who comes meanwhile holds it up as well.
        prompt_s = _prompt_s(work, batch)
        behind = min(behind, max(0.0, work.most_sequences - present))
        extra_s = behind * prompt_s / max(1.0 - rate_per_s * prompt_s, 0.05)
        if _parts(work, batch) > 1.0 and not work.prefill_first:  # no step is longer than a full one
            full_s = _full_s(work, batch) * min(1.0, _room(work, batch))
            extra_s = min(extra_s, (work.answer_tokens - 1.0) * max(0.0, full_s - _tpot_s(work, batch, rate_per_s)))
    tpot_s = _tpot_s(work, batch, rate_per_s) + extra_s / max(1.0, work.answer_tokens - 1.0)
    return _figures(
        engine,
        lengths,
        sample,
        _Settled(tpot_s, rate_per_s, rate_per_s / offered.capacity_per_s, batch),
    )


@dataclass(frozen=True, slots=True)
class _Settled:
    """What `_figures` needs beside the sample of first tokens, of one replica."""

    tpot_s: float
    rate_per_s: float
    utilisation_ratio: float
    batch: float


def _figures(engine: ServingEngine, lengths: Lengths, sample: NDArray[np.float64], settled: _Settled) -> Served:
    """The clients' figures from seconds between visible and first token."""
    front = engine.front_end
    outside_s = front.request_s + front.prompt_token_s * lengths.input_tokens + front.first_token_s
    ttft_ms = np.sort(sample + outside_s) * 1e3
    mean_ms = float(ttft_ms.mean())
    last, tpot_ms = ttft_ms.size - 1, settled.tpot_s * 1e3
    return Served(
        ttft_mean_ms=mean_ms,
        ttft_p50_ms=float(ttft_ms[round(0.5 * last)]),
        ttft_p90_ms=float(ttft_ms[round(0.9 * last)]),
        ttft_p99_ms=float(ttft_ms[round(0.99 * last)]),
        tpot_mean_ms=tpot_ms,
        tpot_p50_ms=tpot_ms,
        tpot_p90_ms=tpot_ms,
        output_tok_per_s=engine.replicas * settled.rate_per_s * lengths.output_tokens,
        request_per_s=engine.replicas * settled.rate_per_s,
        utilisation_ratio=settled.utilisation_ratio,
        batch_mean=settled.batch,
        saturated=mean_ms > SATURATED_TTFT_MS,
    )


def _saturated(engine: ServingEngine, work: _Work, capacity_per_s: float, utilisation_ratio: float) -> Served:
    """A load beyond capacity: the queue grows without end while the engine runs full."""
    tpot_ms = _tpot_s(work, work.most_sequences, capacity_per_s) * 1e3
    return Served(
        ttft_mean_ms=math.inf,
        ttft_p50_ms=math.inf,
        ttft_p90_ms=math.inf,
        ttft_p99_ms=math.inf,
        tpot_mean_ms=tpot_ms,
        tpot_p50_ms=tpot_ms,
        tpot_p90_ms=tpot_ms,
        output_tok_per_s=engine.replicas * capacity_per_s * work.answer_tokens,
        request_per_s=engine.replicas * capacity_per_s,
        utilisation_ratio=utilisation_ratio,
        batch_mean=work.most_sequences,
        saturated=True,
    )
