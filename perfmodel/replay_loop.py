"""The compiled inner loop of the harness replay: one engine, its scheduler and its clients, step by step.

Owns: what happens in which order (launch, admission, prefill chunks, decode runs, preemption, finish) and when.
Does not own: how long a step takes (a `StepTable` as plain numbers), what the clients ask (`harness` draws the lengths)
or statistics (`harness`). It is separate because numba compiles it: only arrays, numbers and functions live here.
Decode runs between two events are taken in closed form, so the cost is about two events a request, not one a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.compiled import compiled

# Scheduling orders. Decode first: every decode gets its token, prompts fill the rest of the budget in chunks (vLLM V1,
# TensorRT-LLM with chunked context). Whole prompts: the same without chunks (TensorRT-LLM's default). Prefill first:
# prompts run alone and decodes wait (SGLang without mixed chunks).
DECODE_FIRST, WHOLE_PROMPTS, PREFILL_FIRST = 0, 1, 2

# Places in `State.counts`: decode steps so far; prompts sent, made visible to the engine, ended; live decodes; entries
# in the heap, in the stack of admitted requests, in the stack of preempted ones; the request that is partly prefilled
# (-1: none); tokens held by decodes and by the partial prefill; tokens reserved by all admitted; preemptions;
# requests in the chunk being planned; entries in the engine's queue; prompts that a prefill pool has begun, and those
# that it has begun but not handed over.
STEP, SENT, TAKEN, ENDED, LIVE, HEAP, ADMITTED, EVICTED, PARTIAL, CONTEXT, HELD, RESERVED, PREEMPTED, CHUNKS = range(14)
QUEUED, BEGUN, FLYING = 14, 15, 16
# As many as there are places above.
COUNTS = 17

# Places in `State.clock`: now; when the serial front end (tokeniser, HTTP) is free; seconds in steps; sequence-seconds;
# the next moment at which something outside this engine may send it a request.
NOW, FRONT_FREE, BUSY, SEQUENCE_S, HORIZON = range(5)
# As many as there are places above.
CLOCKS = 5

# A heap entry is finish step * this + request: one integer to compare. 2^40 steps and 2^23 requests fit in 63 bits.
_HEAP_SHIFT = 1 << 23


class Prices(NamedTuple):
    """A `StepTable` as an array and numbers, and what lies outside the steps (all seconds).

    `prefill_step_s` is paid once by every step with a prompt in it; `launch_s` is how long the host takes to launch
    such a step.
    """

    by_token_s: NDArray[np.float64]
    sequence_s: float
    decode_context_s: float
    prefill_pair_s: float
    prefill_context_s: float
    prefill_step_s: float
    request_s: float
    prompt_token_s: float
    first_token_s: float
    launch_s: float


class Limits(NamedTuple):
    """What the scheduler may do. `reserve_ratio`: share of the answer that admission sets KV tokens aside for."""

    order: int
    max_batched_tokens: int
    max_sequence_count: int
    kv_capacity_tokens: int
    reserve_ratio: float


class Requests(NamedTuple):
    """Per request: tokens asked, cached here and at a prefill pool, when it is sent (open loop; negative: when a client
    is free), results."""

    prompt: NDArray[np.int64]
    answer: NDArray[np.int64]
    cached: NDArray[np.int64]
    pool_cached: NDArray[np.int64]
    sent_s: NDArray[np.float64]
    visible_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


class State(NamedTuple):
    """Mutable: the arrays that the loop works on; see the place names above."""

    counts: NDArray[np.int64]
    clock: NDArray[np.float64]
    heap: NDArray[np.int64]
    finish_step: NDArray[np.int64]
    computed: NDArray[np.int64]
    produced: NDArray[np.int64]
    reserved: NDArray[np.int64]
    admitted: NDArray[np.int64]
    evicted: NDArray[np.int64]
    queue: NDArray[np.int64]
    flying: NDArray[np.int64]
    chunk_of: NDArray[np.int64]
    chunk_tokens: NDArray[np.int64]


@compiled
def _push(heap: NDArray[np.int64], size: int, key: int) -> None:
    """Insert into a binary min-heap of `size` entries."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if heap[parent] <= key:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = key


@compiled
def _pop(heap: NDArray[np.int64], size: int) -> None:
    """Remove the smallest of `size` entries."""
    key = heap[size - 1]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key


@compiled
def _tokens_s(by_token_s: NDArray[np.float64], tokens: int) -> float:
    """The table's entry; beyond its end the last slope goes on."""
    last = by_token_s.size - 1
    if tokens <= last:
        return float(by_token_s[tokens])
    return float(by_token_s[last] + (tokens - last) * (by_token_s[last] - by_token_s[last - 1]))


@compiled
def _launched(device_s: float, launch_s: float) -> float:
    """Seconds of a step that the host launches while the device works: most of the shorter one is hidden.

    The root of the squares: between their sum, which doubled short prompts on fast devices, and the larger of the two.
    """
    return float(np.sqrt(device_s * device_s + launch_s * launch_s))


@compiled
def _send(requests: Requests, state: State, prices: Prices, at_s: float) -> None:
    """The next request leaves its client; the front end takes prompts one after the other."""
    request = state.counts[SENT]
    state.counts[SENT] = request + 1
    if requests.sent_s[request] < 0:
        requests.sent_s[request] = at_s
    begins_s = max(requests.sent_s[request], state.clock[FRONT_FREE])
    free_s = begins_s + prices.prompt_token_s * requests.prompt[request]
    state.clock[FRONT_FREE] = free_s
    requests.visible_s[request] = free_s + prices.request_s
    state.computed[request] = requests.cached[request]
    if state.flying.size == 0:
        _enqueue(state, request)


@compiled
def _enqueue(state: State, request: int) -> None:
    """It stands in the engine's queue from its `visible_s` on; calls come in that order."""
    state.queue[state.counts[QUEUED]] = request
    state.counts[QUEUED] += 1


@compiled
def _next_waiting(requests: Requests, state: State) -> int:
    """The request that admission would take now, or -1: evicted ones first, then in order of arrival."""
    count = state.counts
    if count[EVICTED] > 0:
        return int(state.evicted[count[EVICTED] - 1])
    if count[TAKEN] < count[QUEUED]:
        request = state.queue[count[TAKEN]]
        if requests.visible_s[request] <= state.clock[NOW]:
            return int(request)
    return -1


@compiled
def _admits(requests: Requests, state: State, limits: Limits, request: int) -> bool:
    """Whether there is a sequence slot and KV room for it. An empty engine admits anything: nothing waits forever."""
    count = state.counts
    running = count[LIVE] + count[CHUNKS] + (1 if count[PARTIAL] >= 0 and count[CHUNKS] == 0 else 0)
    if running == 0:
        return True
    if running >= limits.max_sequence_count:
        return False
    need = requests.prompt[request] + state.produced[request]
    need += int(limits.reserve_ratio * (requests.answer[request] - state.produced[request]))
    used = max(count[RESERVED], count[CONTEXT] + count[HELD])
    # Room for one more token of everyone, and the 1 % of blocks that vLLM keeps free (its watermark): without them an
    # evicted request would come back and be evicted again before anything moved.
    spare = count[LIVE] + 2 + limits.kv_capacity_tokens // 100
    return bool(used + need + spare <= limits.kv_capacity_tokens)


@compiled
def _take(requests: Requests, state: State, limits: Limits, request: int) -> None:
    """Admit it: it leaves its queue and its KV is set aside."""
    count = state.counts
    if count[EVICTED] > 0 and state.evicted[count[EVICTED] - 1] == request:
        count[EVICTED] -= 1
    else:
        count[TAKEN] += 1
    need = requests.prompt[request] + state.produced[request]
    need += int(limits.reserve_ratio * (requests.answer[request] - state.produced[request]))
    state.reserved[request] = need
    count[RESERVED] += need
    count[HELD] += state.computed[request]


@compiled
def _chunk(requests: Requests, state: State, request: int, budget: int) -> int:
    """Plan up to `budget` tokens of this request's prompt (after an eviction: and answer); the tokens planned."""
    count = state.counts
    missing = requests.prompt[request] + state.produced[request] - state.computed[request]
    tokens = min(missing, budget)
    state.chunk_of[count[CHUNKS]] = request
    state.chunk_tokens[count[CHUNKS]] = tokens
    count[CHUNKS] += 1
    count[HELD] += tokens
    return int(tokens)


@compiled
def _plan(requests: Requests, state: State, limits: Limits) -> None:
    """Fill the prefill chunks of the next step: the partial prompt, then whoever waits and fits."""
    count = state.counts
    count[CHUNKS] = 0
    budget = limits.max_batched_tokens
    if limits.order != PREFILL_FIRST:
        budget -= count[LIVE]
    if count[PARTIAL] >= 0 and budget > 0:
        budget -= _chunk(requests, state, count[PARTIAL], budget)
    while budget > 0:
        request = _next_waiting(requests, state)
        if request < 0 or not _admits(requests, state, limits, request):
            return
        missing = requests.prompt[request] + state.produced[request] - state.computed[request]
        whole = limits.order == WHOLE_PROMPTS
        if whole and missing > budget and count[CHUNKS] > 0:
            return
        _take(requests, state, limits, request)
        budget -= _chunk(requests, state, request, missing if whole else budget)


@compiled
def _begin_decode(requests: Requests, state: State, request: int) -> None:
    """Its prompt is computed: it holds its tokens as a decode and ends when its last token is made."""
    count = state.counts
    tokens = requests.prompt[request] + state.produced[request]
    count[HELD] -= tokens
    count[CONTEXT] += tokens
    count[LIVE] += 1
    left = requests.answer[request] - state.produced[request]
    state.finish_step[request] = count[STEP] + left
    _push(state.heap, count[HEAP], state.finish_step[request] * _HEAP_SHIFT + request)
    count[HEAP] += 1
    state.admitted[count[ADMITTED]] = request
    count[ADMITTED] += 1


@compiled
def _mixed_step(requests: Requests, state: State, prices: Prices, limits: Limits) -> None:
    """One step with prefill chunks in it; decodes take part unless prompts run alone."""
    count, clock = state.counts, state.clock
    decodes = 0 if limits.order == PREFILL_FIRST else count[LIVE]
    tokens, pairs, context = decodes, 0.0, 0
    for place in range(count[CHUNKS]):
        request, new = state.chunk_of[place], state.chunk_tokens[place]
        before = state.computed[request]
        tokens += new
        pairs += new * before + new * (new + 1) / 2
        context += before
    step_s = _tokens_s(prices.by_token_s, tokens) + prices.prefill_step_s
    step_s += prices.sequence_s * (decodes + count[CHUNKS])
    step_s += prices.prefill_pair_s * pairs + prices.prefill_context_s * context
    if decodes > 0:
        step_s += prices.decode_context_s * count[CONTEXT]
        count[STEP] += 1
        count[CONTEXT] += decodes
    step_s = _launched(step_s, prices.launch_s)
    clock[NOW] += step_s
    clock[BUSY] += step_s
    clock[SEQUENCE_S] += step_s * (decodes + count[CHUNKS])
    count[PARTIAL] = -1
    for place in range(count[CHUNKS]):
        request = state.chunk_of[place]
        state.computed[request] += state.chunk_tokens[place]
        if state.computed[request] < requests.prompt[request] + state.produced[request]:
            count[PARTIAL] = request
            continue
        if state.produced[request] == 0:
            requests.first_s[request] = clock[NOW] + prices.first_token_s
        state.produced[request] += 1
        count[HELD] += 1
        _begin_decode(requests, state, request)
    count[CHUNKS] = 0


@compiled
def _steps_until(prices: Prices, state: State, wait_s: float) -> int:
    """Decode steps that begin before `wait_s` from now has passed (at least one)."""
    count = state.counts
    slope_s = prices.decode_context_s * count[LIVE]
    first_s = _tokens_s(prices.by_token_s, count[LIVE]) + prices.sequence_s * count[LIVE]
    first_s += prices.decode_context_s * count[CONTEXT]
    linear = first_s - slope_s / 2
    steps = wait_s / first_s
    if slope_s > 0.0:
        steps = (np.sqrt(linear * linear + 2 * slope_s * wait_s) - linear) / slope_s
    return max(1, int(np.ceil(steps - 1e-9)))


@compiled
def _decode_run(requests: Requests, state: State, prices: Prices, limits: Limits) -> None:
    """Decode steps up to the next event: an answer ends, the KV cache is full, or a request could be admitted."""
    count, clock = state.counts, state.clock
    live = count[LIVE]
    steps = state.heap[0] // _HEAP_SHIFT - count[STEP]
    room = limits.kv_capacity_tokens - count[CONTEXT] - count[HELD]
    if live > 1 and room < steps * live:
        steps = max(1, room // live)
    event_s = clock[HORIZON]
    if count[EVICTED] == 0 and count[TAKEN] < count[QUEUED]:
        visible_s = requests.visible_s[state.queue[count[TAKEN]]]
        # One that is visible and still waits can only be helped by an end.
        event_s = visible_s if visible_s > clock[NOW] else np.inf
    if clock[NOW] < event_s < np.inf:
        steps = min(steps, _steps_until(prices, state, event_s - clock[NOW]))
    step_s = _tokens_s(prices.by_token_s, live) + prices.sequence_s * live
    context = steps * count[CONTEXT] + live * steps * (steps - 1) / 2
    spent_s = steps * step_s + prices.decode_context_s * context
    clock[NOW] += spent_s
    clock[BUSY] += spent_s
    clock[SEQUENCE_S] += spent_s * live
    count[STEP] += steps
    count[CONTEXT] += steps * live


@compiled
def _finish(requests: Requests, state: State, prices: Prices, client_count: int) -> None:
    """End the answers whose last token this step made; in a closed loop their clients send their next request."""
    count, clock = state.counts, state.clock
    while count[HEAP] > 0 and state.heap[0] // _HEAP_SHIFT <= count[STEP]:
        entry = state.heap[0]
        request = entry % _HEAP_SHIFT
        _pop(state.heap, count[HEAP])
        count[HEAP] -= 1
        if state.finish_step[request] != entry // _HEAP_SHIFT:
            continue  # it was evicted since
        state.finish_step[request] = -1
        count[CONTEXT] -= requests.prompt[request] + requests.answer[request]
        count[LIVE] -= 1
        count[RESERVED] -= state.reserved[request]
        requests.end_s[request] = clock[NOW] + prices.first_token_s
        count[ENDED] += 1
        if client_count > 0 and count[SENT] < requests.prompt.size:
            _send(requests, state, prices, requests.end_s[request])


@compiled
def _evict(requests: Requests, state: State, limits: Limits) -> None:
    """While the KV cache cannot take one more token of every decode, the newest decode gives its tokens back."""
    count = state.counts
    while count[LIVE] > 1 and count[CONTEXT] + count[HELD] + count[LIVE] > limits.kv_capacity_tokens:
        count[ADMITTED] -= 1
        request = state.admitted[count[ADMITTED]]
        if state.finish_step[request] < 0:
            continue
        left = state.finish_step[request] - count[STEP]
        state.produced[request] = requests.answer[request] - left
        state.finish_step[request] = -1
        count[CONTEXT] -= requests.prompt[request] + state.produced[request]
        count[LIVE] -= 1
        count[RESERVED] -= state.reserved[request]
        state.computed[request] = requests.cached[request]
        state.evicted[count[EVICTED]] = request
        count[EVICTED] += 1
        count[PREEMPTED] += 1


@compiled
def _compact(state: State) -> None:
    """Drop the ended requests from the stack of admitted ones, so that it never overflows."""
    kept = 0
    for place in range(state.counts[ADMITTED]):
        request = state.admitted[place]
        if state.finish_step[request] >= 0:
            state.admitted[kept] = request
            kept += 1
    state.counts[ADMITTED] = kept


@compiled
def advance(requests: Requests, state: State, prices: Prices, limits: Limits, client_count: int) -> None:
    """One step or one decode run of the engine, or a jump to the next event when it is idle."""
    count, clock = state.counts, state.clock
    if count[ADMITTED] > state.admitted.size - state.chunk_of.size:
        _compact(state)
    _plan(requests, state, limits)
    if count[CHUNKS] > 0:
        _mixed_step(requests, state, prices, limits)
    elif count[LIVE] > 0:
        _decode_run(requests, state, prices, limits)
    else:
        event_s = clock[HORIZON]
        if count[TAKEN] < count[QUEUED]:
            event_s = min(event_s, requests.visible_s[state.queue[count[TAKEN]]])
        clock[NOW] = max(clock[NOW], event_s)
    _finish(requests, state, prices, client_count)
    _evict(requests, state, limits)


@compiled
def start(requests: Requests, state: State, prices: Prices, client_count: int) -> None:
    """All clients send their first request at 0; in an open loop (`client_count` 0) all requests at their `sent_s`."""
    total = requests.prompt.size
    state.clock[HORIZON] = np.inf
    first_wave = min(client_count, total) if client_count > 0 else total
    for _ in range(first_wave):
        _send(requests, state, prices, 0.0)


@compiled
def run(requests: Requests, state: State, prices: Prices, limits: Limits, client_count: int) -> None:
    """Serve all requests. `client_count` 0: they come at `sent_s` (ascending); else that many clients, one each."""
    start(requests, state, prices, client_count)
    while state.counts[ENDED] < requests.prompt.size:
        advance(requests, state, prices, limits, client_count)


class Pool(NamedTuple):
    """A prefill pool: when each worker is free, its step times, what a batch may hold, and the KV hand-over.

    A prompt reaches the decode side `handover_s + handover_token_s * prompt` after its batch ends. `rank_count`:
    prompts that a worker's attention ranks compute side by side; a batch costs as if all ranks were as full as the
    fullest.
    """

    free_s: NDArray[np.float64]
    prices: Prices
    max_batched_tokens: int
    max_batch_count: int
    rank_count: int
    handover_s: float
    handover_token_s: float
    client_count: int


@compiled
def _prefill_batch(requests: Requests, state: State, pool: Pool, worker: int, begins_s: float) -> None:
    """The worker takes who waits at `begins_s`, up to its budget, and hands all over at the batch's end."""
    count = state.counts
    first, tokens, pairs, taken, widest = count[BEGUN], 0, 0.0, 0, 0
    while count[BEGUN] < count[SENT] and taken < pool.max_batch_count:
        request = count[BEGUN]
        held = requests.pool_cached[request]
        new = requests.prompt[request] - held
        if taken > 0 and (tokens + new > pool.max_batched_tokens or requests.visible_s[request] > begins_s):
            break
        tokens += new
        widest = max(widest, new)
        pairs += new * held + new * (new + 1) / 2
        taken += 1
        count[BEGUN] += 1
    deep = (taken + pool.rank_count - 1) // pool.rank_count
    fill = deep * pool.rank_count / taken
    price = pool.prices
    steps = max(1, int(np.ceil(tokens / pool.max_batched_tokens)))
    device_s = _tokens_s(price.by_token_s, int(tokens * fill / steps)) + price.prefill_step_s
    device_s += (price.sequence_s * taken + price.prefill_pair_s * pairs * fill) / steps
    spent_s = steps * _launched(device_s, price.launch_s)
    pool.free_s[worker] = begins_s + spent_s
    for request in range(first, count[BEGUN]):
        requests.visible_s[request] = begins_s + spent_s + pool.handover_s
        requests.visible_s[request] += pool.handover_token_s * requests.prompt[request]
        state.flying[count[FLYING]] = request
        count[FLYING] += 1


@compiled
def _hand_over(requests: Requests, state: State) -> float:
    """Queue at the decode side what has arrived by now, earliest first; when the next arrives (infinity: none)."""
    count = state.counts
    while True:
        best, best_s = -1, np.inf
        for place in range(count[FLYING]):
            arrives_s = requests.visible_s[state.flying[place]]
            if arrives_s < best_s:
                best, best_s = place, arrives_s
        if best < 0 or best_s > state.clock[NOW]:
            return best_s
        _enqueue(state, state.flying[best])
        count[FLYING] -= 1
        for place in range(best, count[FLYING]):
            state.flying[place] = state.flying[place + 1]


@compiled
def run_split(requests: Requests, state: State, prices: Prices, limits: Limits, pool: Pool) -> None:
    """As `run`, with the prompts computed by a pool of prefill workers; this engine decodes only."""
    count, clock = state.counts, state.clock
    start(requests, state, prices, pool.client_count)
    while count[ENDED] < requests.prompt.size:
        begins_s = np.inf
        while count[BEGUN] < count[SENT]:
            worker = int(np.argmin(pool.free_s))
            begins_s = max(pool.free_s[worker], requests.visible_s[count[BEGUN]])
            if begins_s > clock[NOW]:
                break
            _prefill_batch(requests, state, pool, worker, begins_s)
            begins_s = np.inf
        clock[HORIZON] = min(begins_s, _hand_over(requests, state))
        advance(requests, state, prices, limits, pool.client_count)
