"""One replica under a load as plain numbers, and how long its steps are: what the compiled parts of the queue share.

Owns: `Work`, the length of a step by decodes and prompt tokens, what a step has room for, and the mean step, the
sequences present and the largest rate at which Little's law still holds. Does not own: step times (`step_time`), the
law of the prompts that wait (`chain`) or what a client sees (`tagged`). A prompt counts by its tokens: in a queue the
next one begins in the step that the one before ends in, so that 1.1 budgets of tokens take 1.1 steps, alone two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.compiled import compiled

# Rounds of a bisection; each halves the error, which starts below a factor of two.
_ROUNDS = 24


class Work(NamedTuple):
    """One replica and what a request asks of it, as plain numbers for the compiled functions.

    `square_ratio`: the mean square of a prompt's tokens over the squared mean; `prompt_spread`: the half width of a
    uniform law of them over the mean; `launch_s`: what the host needs to launch a step with a prompt in it; `room_cv2`:
    squared variation of the KV room that a sequence holds, where room and not slots bound `most_sequences` (else 0).
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
    launch_s: float
    room_cv2: float


@compiled
def tokens_s(by_token_s: NDArray[np.float64], tokens: float) -> float:
    """The table between its entries; beyond its end the last slope goes on."""
    last = by_token_s.size - 1
    low = min(int(tokens), last - 1)
    return float(by_token_s[low] + (tokens - low) * (by_token_s[low + 1] - by_token_s[low]))


@compiled
def decode_s(work: Work, batch: float) -> float:
    """A step of `batch` decodes."""
    per_sequence = work.sequence_s + work.decode_context_s * work.decode_context_tokens
    return tokens_s(work.by_token_s, batch) + batch * per_sequence


@compiled
def room(work: Work, batch: float) -> float:
    """Prompts that fit in one step beside `batch` decodes; below one when a prompt needs several steps."""
    budget = work.budget_tokens - (0.0 if work.prefill_first else batch)
    return max(1.0, budget) / work.new_tokens


@compiled
def parts(work: Work, batch: float) -> float:
    """Mean steps that one prompt needs: the mean of ceil(tokens / budget) over lengths uniform around the mean."""
    need = 1.0 / room(work, batch)
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
def alone_s(work: Work, batch: float) -> float:
    """All steps of one prompt that nobody waits with, beside `batch` decodes.

    All steps but the last are full. Attention makes each longer than the one before, by as much: the launches, which
    run beside the step, are met at the two points of a Gauss rule over the full steps.
    """
    decodes = 0.0 if work.prefill_first else batch
    new, old, steps = work.new_tokens, work.cached_tokens, parts(work, batch)
    usual_s = work.sequence_s + work.prefill_step_s
    usual_s += decodes * (work.sequence_s + work.decode_context_s * work.decode_context_tokens)
    pairs_s = work.pair_s * new * ((old + new / 2) * work.square_ratio + 0.5)
    if steps <= 1.0:
        spent_s = usual_s + tokens_s(work.by_token_s, decodes + new) + pairs_s + work.context_s * old
        return math.sqrt(spent_s * spent_s + work.launch_s * work.launch_s)
    full = steps - 1.0
    last = max(0.0, new - full * room(work, batch) * new)
    budget = (new - last) / full
    context_s = work.context_s * (old + budget * (full - 1.0) / 2)
    ends_s = work.pair_s * last * (old + new - last / 2) + work.context_s * (old + new - last)
    full_s = usual_s + tokens_s(work.by_token_s, decodes + budget) + context_s
    full_s += max(0.0, pairs_s - work.pair_s * last * (old + new - last / 2)) / full
    ends_s += usual_s + tokens_s(work.by_token_s, decodes + last)
    # The deviation of the full steps' lengths.
    spread_s = budget * (work.pair_s * budget + work.context_s) * math.sqrt(max(0.0, full * full - 1.0) / 12.0)
    spread_s = min(spread_s, full_s)
    launch = work.launch_s * work.launch_s
    full_s = (math.sqrt((full_s - spread_s) ** 2 + launch) + math.sqrt((full_s + spread_s) ** 2 + launch)) / 2
    return full * full_s + math.sqrt(ends_s * ends_s + launch)


@compiled
def step_s(work: Work, batch: float, prompts: float) -> float:
    """A step of `batch` decodes and the tokens of `prompts` prompts of a queue (below one: a part of a prompt)."""
    if prompts <= 0:
        return decode_s(work, batch)
    decodes = 0.0 if work.prefill_first else batch
    new, old, fits = work.new_tokens, work.cached_tokens, room(work, batch)
    chunks = prompts + (1.0 if fits < 1.0 else 0.0)
    spent_s = tokens_s(work.by_token_s, decodes + prompts * new) + work.sequence_s * chunks + work.prefill_step_s
    spent_s += decodes * (work.sequence_s + work.decode_context_s * work.decode_context_tokens)
    spent_s += work.pair_s * prompts * new * ((old + new / 2) * work.square_ratio + 0.5)
    spent_s += work.context_s * (max(1.0, prompts) * old + new * max(0.0, 1.0 - fits) / 2)
    return math.sqrt(spent_s * spent_s + work.launch_s * work.launch_s)


@compiled
def mean_step_s(work: Work, batch: float, rate_per_s: float) -> float:
    """The mean step under random arrivals, from E[T] = E[T(prompts)] with prompts = rate * E[T]; inf: none exists.

    Prompts that come to a step with room for them share it; in a queue they fill it. The share of steps with a prompt
    lies between both.
    """
    fits = room(work, batch)
    none_s, full_s = decode_s(work, batch), step_s(work, batch, fits)
    if rate_per_s * full_s >= fits:
        return np.inf
    steps = parts(work, batch)
    lone_s = alone_s(work, batch) / steps
    mean_s = none_s
    for _ in range(100):
        prompts = rate_per_s * mean_s
        if steps > 1.0:
            share = min(1.0, prompts * steps / (1.0 + prompts * (steps - 1.0 / fits)))
            new_s = (1.0 - share) * none_s + share * ((1.0 - share) * lone_s + share * full_s)
        else:
            some = -math.expm1(-prompts)
            more_s = (full_s - lone_s) / max(fits - 1.0, 1e-9) if fits > 1.0 + 1e-9 else lone_s
            new_s = none_s + some * (lone_s - none_s) + max(0.0, prompts - some) * more_s
        if abs(new_s - mean_s) < 1e-9 * mean_s:
            return new_s
        mean_s = min(new_s, 2.0 * full_s)
    return mean_s


@compiled
def _prompts_between_s(work: Work, batch: float, rate_per_s: float) -> float:
    """Seconds from one decode step to the next when prompts of at most one step run before it; inf: there is none.

    What came meanwhile runs first, and what came during that, and so on: the prompts of such a cycle share as many
    steps as there are chances that one came during the step before. They are at most one step each, and at least as
    many as they fill.
    """
    fits, none_s, lone_s = room(work, batch), decode_s(work, batch), alone_s(work, batch)
    full_s = step_s(work, batch, fits)
    if rate_per_s * full_s >= fits:
        return np.inf
    filled_s = none_s / (1.0 - rate_per_s * full_s / fits)
    more_s = min((full_s - lone_s) / (fits - 1.0), lone_s) if fits > 1.0 + 1e-9 else lone_s
    steps = -math.expm1(-rate_per_s * none_s) * math.exp(min(rate_per_s * lone_s, 100.0))
    shared_s = (none_s + steps * (lone_s - more_s)) / (1.0 - min(rate_per_s * more_s, 0.999))
    if rate_per_s * lone_s < 1.0:
        shared_s = min(shared_s, none_s / (1.0 - rate_per_s * lone_s))
    return max(filled_s, shared_s)


@compiled
def token_s(work: Work, batch: float, rate_per_s: float) -> float:
    """Seconds per output token: a step each, or a step without prompts when prompts run alone."""
    steps = parts(work, batch)
    if work.prefill_first and steps <= 1.0:
        return _prompts_between_s(work, batch, rate_per_s)
    mean_s = mean_step_s(work, batch, rate_per_s)
    if not work.prefill_first or not math.isfinite(mean_s):
        return mean_s
    prompts = rate_per_s * mean_s
    return mean_s / max(1e-9, 1.0 - prompts * steps / (1.0 + prompts * (steps - 1.0 / room(work, batch))))


@compiled
def present(work: Work, batch: float, rate_per_s: float) -> float:
    """Sequences present (Little's law): each decodes for its steps, and is prefilled before."""
    return rate_per_s * ((work.answer_tokens - 1.0) * token_s(work, batch, rate_per_s) + alone_s(work, batch))


@compiled
def fullest(work: Work) -> float:
    """Decodes of an engine whose queue never empties: all its sequences, or fewer where the token budget binds.

    Each step begins as many answers as prompts fit beside the decodes, and each lasts `answer_tokens - 1` steps.
    """
    if work.prefill_first:
        return work.most_sequences
    steps = max(1.0, work.answer_tokens - 1.0)
    return min(work.most_sequences, max(1.0, steps * work.budget_tokens / (work.new_tokens + steps)))


@compiled
def _carries(work: Work, rate_per_s: float) -> bool:
    """Whether the engine, as full as it gets, makes tokens at least as fast as this rate asks for them."""
    asked = present(work, fullest(work), rate_per_s)
    return bool(math.isfinite(asked) and asked <= work.most_sequences)


@compiled
def capacity_per_s(work: Work) -> float:
    """The largest rate that the engine carries."""
    low, high = 0.0, 1.0 / alone_s(work, 0.0)
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
def solve_present(work: Work, rate_per_s: float, longer: float) -> float:
    """The sequences present at which Little's law holds, with tokens `longer` times as long as `token_s` says; the
    largest number beyond capacity.
    """
    low, high = 0.0, fullest(work)
    steps = max(0.0, work.answer_tokens - 1.0)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        asked = rate_per_s * (steps * longer * token_s(work, middle, rate_per_s) + alone_s(work, middle))
        if asked > middle:
            low = middle
        else:
            high = middle
    return high
