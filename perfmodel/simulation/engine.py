"""One simulated engine's steps: the compiled twin of `scheduler.EngineCore`, with runs of decode steps taken at once.

Owns: which requests run in a step, chunked prefill after the decodes, admission by KV room, preemption of the
youngest, the length of a run, and hand-over to a decode engine. Does not own: blocks (`blocks`), step times (a
table), what is counted (`record`) or which engine runs next (`cluster`).

A run. When a step holds decodes only and nobody waiting can come in before one of them ends, the next steps have the
same requests, each with one more token of context: k steps take k * first + slope * k (k - 1) / 2 seconds. So they are
one event, as many as there are until the first answer ends or KV room runs out. A request that arrives in between
shortens the run to the step in progress (`shorten`), which is exact: nothing visible happened inside.

Differences to `scheduler.EngineCore`: no choices (n = 1), no aborts, answers as long as the trace says; noise is drawn
once a run (a run of k steps gets the noise of their mean).
"""

from __future__ import annotations

from math import inf

import numpy as np

from perfmodel.simulation.blocks import find, grow, hit_blocks, key_of, publish, release, share, tier_find, tier_touch
from perfmodel.simulation.compiling import compiled
from perfmodel.simulation.record import note_end, note_first_scheduled, note_first_token
from perfmodel.simulation.state import ASLEEP, DECODE, IDLE, PREFILL, RUNNING, Cluster

# L'Ecuyer's combined generator (1988): two multiplicative ones whose products stay below 2^47.
_MULTIPLIER_A, _MODULUS_A = 40014, 2147483563
_MULTIPLIER_B, _MODULUS_B = 40692, 2147483399


@compiled
def begin(c: Cluster, e: int, now_s: float) -> None:
    """Start the engine's next step or run at `now_s`, or let it rest."""
    engine, plan = c.engines[e], c.plan[0]
    if engine.running_count == 0 and engine.waiting_count == 0:
        engine.phase = IDLE
        c.next_s[e] = inf
        return
    _clear_plan(c, engine.batch_limit)
    _schedule_running(c, e, now_s)
    if plan.preempted == 0:
        _schedule_waiting(c, e, now_s)
    if plan.prefill_count + plan.decode_count == 0 and plan.preempted == 0:
        # Every running one waits for its KV from the lower tier.
        engine.phase = ASLEEP
        c.next_s[e] = plan.wake_s
        return
    kind = c.kinds[engine.kind]
    tokens = plan.prefill_tokens + plan.decode_count
    step_s = (
        c.by_token_s[engine.kind, tokens]
        + kind.sequence_s * (plan.prefill_count + plan.decode_count)
        + kind.decode_context_s * plan.decode_context
        + kind.prefill_pair_s * plan.prefill_pairs
        + kind.prefill_context_s * plan.prefill_context
    )
    slope_s = kind.decode_context_s * plan.decode_count
    steps = 1
    if plan.prefill_count == 0 and plan.preempted == 0 and plan.decode_count == engine.running_count - plan.sleeping:
        steps = _run_steps(c, e, now_s)
    factor = engine.slow_ratio
    if engine.noise_ratio > 0:
        spread = engine.noise_ratio / np.sqrt(steps)
        factor *= np.exp(spread * _normal(c, e) - spread * spread / 2)
    engine.phase = RUNNING
    engine.start_s, engine.first_s, engine.slope_s, engine.run_steps = now_s, factor * step_s, factor * slope_s, steps
    if plan.sleeping > 0 and steps > 1:
        engine.run_steps = _steps_until(c, e, plan.wake_s - now_s)
    engine.run_decodes = plan.decode_count
    engine.prefill_tokens += plan.prefill_tokens
    c.next_s[e] = now_s + run_s(c, e, engine.run_steps)


@compiled
def run_s(c: Cluster, e: int, steps: int) -> float:
    """Seconds of the first `steps` steps of the engine's run."""
    engine = c.engines[e]
    return float(steps * engine.first_s + engine.slope_s * (steps * (steps - 1) / 2))


@compiled
def shorten(c: Cluster, e: int, now_s: float) -> None:
    """Somebody arrived: the run ends with the step that is in progress at `now_s`."""
    engine = c.engines[e]
    if engine.run_steps > 1:
        engine.run_steps = _steps_until(c, e, now_s - engine.start_s)
        c.next_s[e] = engine.start_s + run_s(c, e, engine.run_steps)


@compiled
def _steps_until(c: Cluster, e: int, after_s: float) -> int:
    """The fewest steps of the run (at least one, at most all) that take `after_s` or longer."""
    engine = c.engines[e]
    limit = int(engine.run_steps)
    if run_s(c, e, limit) <= after_s:
        return limit
    half, rest = engine.slope_s / 2, engine.first_s - engine.slope_s / 2
    root = after_s / rest
    if half > 0:
        # The stable form of the quadratic's root: half * n^2 + rest * n = after.
        root = 2 * after_s / (rest + np.sqrt(rest * rest + 4 * half * after_s))
    steps = min(limit, max(1, int(np.ceil(root))))
    while steps > 1 and run_s(c, e, steps - 1) >= after_s:
        steps -= 1
    while steps < limit and run_s(c, e, steps) < after_s:
        steps += 1
    return steps


@compiled
def _run_steps(c: Cluster, e: int, now_s: float) -> int:
    """Steps until the first of the running answers ends, as far as the free KV blocks reach."""
    engine = c.engines[e]
    steps = 1 << 40
    for at in range(engine.running_count):
        request = c.requests[c.running[e, at]]
        if request.ready_s <= now_s:
            steps = min(steps, int(request.output - (request.tokens - request.prompt)))
    if _blocks_for_run(c, e, now_s, steps) <= engine.free_count:
        return steps
    low, high = 1, steps
    while low < high - 1:
        middle = (low + high) // 2
        if _blocks_for_run(c, e, now_s, middle) <= engine.free_count:
            low = middle
        else:
            high = middle
    return low


@compiled
def _blocks_for_run(c: Cluster, e: int, now_s: float, steps: int) -> int:
    """New blocks that a run of so many steps takes; its first step has its room already."""
    width = c.totals[0].block_tokens
    wanted = 0
    for at in range(c.engines[e].running_count):
        request = c.requests[c.running[e, at]]
        if request.ready_s <= now_s:
            wanted += (request.computed + steps - 1 + width - 1) // width - request.block_count
    return wanted


@compiled
def _clear_plan(c: Cluster, budget_tokens: int) -> None:
    plan = c.plan[0]
    plan.budget = budget_tokens
    plan.preempted = plan.prefill_count = plan.prefill_tokens = plan.prefill_context = plan.prefill_pairs = 0
    plan.decode_count = plan.decode_context = plan.sleeping = 0
    plan.wake_s = inf


@compiled
def _schedule_running(c: Cluster, e: int, now_s: float) -> None:
    """Those that run, in the order of their admission. One that cannot grow costs the youngest its place."""
    engine, plan = c.engines[e], c.plan[0]
    at = 0
    while at < engine.running_count and plan.budget > 0:
        r = c.running[e, at]
        request = c.requests[r]
        if request.ready_s > now_s:
            plan.sleeping += 1
            plan.wake_s = min(plan.wake_s, request.ready_s)
            at += 1
            continue
        tokens = min(request.tokens - request.computed, plan.budget)
        while not grow(c, e, r, request.computed + tokens):
            victim = c.running[e, engine.running_count - 1]
            _preempt(c, e, victim)
            if victim == r:
                return
        _take(c, e, r, tokens)
        at += 1


@compiled
def _schedule_waiting(c: Cluster, e: int, now_s: float) -> None:
    """Those that wait, first come first served, while there are tokens, places and KV room for the whole prompt."""
    engine, plan = c.engines[e], c.plan[0]
    while engine.waiting_head >= 0 and plan.budget > 0 and engine.running_count < engine.sequence_limit:
        r = engine.waiting_head
        request = c.requests[r]
        hits, restored, pulled = 0, 0, 0
        if not request.carried:
            hits = hit_blocks(c, e, r)
            if engine.tier_count:
                restored = _tier_hits(c, e, r, hits)
            if request.source >= 0 and engine.peer_block_s > 0:
                pulled = _peer_hits(c, r, hits + restored)
        if not _has_room(c, e, r, hits):
            return
        engine.waiting_head = request.queue_next
        if engine.waiting_head < 0:
            engine.waiting_tail = -1
        engine.waiting_count -= 1
        c.running[e, engine.running_count] = r
        engine.running_count += 1
        _start(c, e, r, (hits, restored, pulled), now_s)


@compiled
def _start(c: Cluster, e: int, r: int, found: tuple[int, int, int], now_s: float) -> None:
    """Let an admitted request have what is cached, and compute its first chunk unless it must wait for some of it."""
    engine, plan, request = c.engines[e], c.plan[0], c.requests[r]
    hits, restored, pulled = found
    width = c.totals[0].block_tokens
    ready_s = share(c, e, r, hits)
    request.computed = request.tokens - 1 if request.carried else (hits + restored + pulled) * width
    if request.cached < 0:
        note_first_scheduled(c, e, r, now_s)
    elif not request.carried:
        c.totals[0].lost_tokens -= request.computed
    request.carried = 0
    if restored + pulled > 0:
        grow(c, e, r, request.computed)
        publish(c, e, r)
    if restored > 0:
        engine.link_free_s = max(engine.link_free_s, now_s) + restored * engine.restore_s
        ready_s = max(ready_s, engine.link_free_s)
        for place in range(hits, hits + restored):
            c.blocks[c.tables[r, place]].ready_s = engine.link_free_s
        engine.restored_tokens += restored * width
        c.totals[0].restored_tokens += restored * width
    if pulled > 0:
        ready_s = max(ready_s, _pull(c, e, r, (hits + restored, pulled), now_s))
    request.ready_s = ready_s
    if ready_s > now_s:
        plan.sleeping += 1
        plan.wake_s = min(plan.wake_s, request.ready_s)
        return
    tokens = min(request.tokens - request.computed, plan.budget)
    grow(c, e, r, request.computed + tokens)
    _take(c, e, r, tokens)


@compiled
def _has_room(c: Cluster, e: int, r: int, hits: int) -> bool:
    """Whether all present tokens fit in free blocks; a cached block that nobody holds is a free one."""
    width = c.totals[0].block_tokens
    wanted = (c.requests[r].tokens + width - 1) // width - hits
    for place in range(hits):
        if c.blocks[c.tables[r, place]].ref == 0:
            wanted += 1
    return bool(wanted <= c.engines[e].free_count)


@compiled
def _tier_hits(c: Cluster, e: int, r: int, hits: int) -> int:
    """How many blocks after the first `hits` the lower tier has; they count as used now."""
    limit = (c.requests[r].tokens - 1) // c.totals[0].block_tokens
    place = hits
    while place < limit:
        block = tier_find(c, e, key_of(c, r, place))
        if block < 0:
            break
        tier_touch(c, e, block)
        place += 1
    return place - hits


@compiled
def _peer_hits(c: Cluster, r: int, have: int) -> int:
    """How many blocks after the first `have` the request's source holds now, in either memory."""
    request = c.requests[r]
    source = request.source
    limit = (request.tokens - 1) // c.totals[0].block_tokens
    place = have
    while place < limit:
        key = key_of(c, r, place)
        if find(c, source, key) < 0:
            block = tier_find(c, source, key) if c.engines[source].tier_count else -1
            if block < 0:
                break
            tier_touch(c, source, block)
        place += 1
    return place - have


@compiled
def _pull(c: Cluster, e: int, r: int, found: tuple[int, int], now_s: float) -> float:
    """Fetch blocks from the request's source, after what uses either engine's link already. When they are here."""
    engine, there = c.engines[e], c.engines[c.requests[r].source]
    have, pulled = found
    block_s = max(engine.peer_block_s, there.peer_block_s)
    done_s = max(now_s, engine.peer_free_s, there.peer_free_s) + pulled * block_s
    engine.peer_free_s = there.peer_free_s = done_s
    for place in range(have, have + pulled):
        c.blocks[c.tables[r, place]].ready_s = done_s
    tokens = pulled * c.totals[0].block_tokens
    engine.pulled_tokens += tokens
    c.totals[0].pulled_tokens += tokens
    return float(done_s)


@compiled
def _take(c: Cluster, e: int, r: int, tokens: int) -> None:
    """Put so many tokens of a request that has room for them into the step."""
    plan, request = c.plan[0], c.requests[r]
    context = request.computed
    plan.budget -= tokens
    if context < request.refill:
        plan.prefill_count += 1
        plan.prefill_tokens += tokens
        plan.prefill_context += context
        plan.prefill_pairs += tokens * context + tokens * (tokens + 1) // 2
    else:
        plan.decode_count += 1
        plan.decode_context += context + 1
    request.computed = context + tokens
    if c.totals[0].caching:
        publish(c, e, r)


@compiled
def _preempt(c: Cluster, e: int, r: int) -> None:
    """The youngest loses its blocks and goes to the head of the queue, to be computed again."""
    engine, request = c.engines[e], c.requests[r]
    engine.running_count -= 1
    release(c, e, r)
    c.totals[0].lost_tokens += request.computed
    c.totals[0].preempted += 1
    c.plan[0].preempted += 1
    engine.preempted_count += 1
    request.computed = 0
    request.ready_s = 0.0
    request.refill = request.tokens
    request.preempted += 1
    request.queue_next = engine.waiting_head
    engine.waiting_head = r
    if engine.waiting_tail < 0:
        engine.waiting_tail = r
    engine.waiting_count += 1


@compiled
def finish(c: Cluster, e: int) -> None:
    """The engine's run is over: its tokens are out, the answers that are complete leave."""
    engine, totals = c.engines[e], c.totals[0]
    now_s = c.next_s[e]
    steps = engine.run_steps
    engine.busy_s += now_s - engine.start_s
    engine.step_count += steps
    engine.decode_tokens += steps * engine.run_decodes
    totals.last_s = now_s
    if steps > 1:
        _catch_up(c, e, steps - 1)
    kept = 0
    for at in range(engine.running_count):
        r = c.running[e, at]
        request = c.requests[r]
        if request.computed < request.tokens:
            c.running[e, kept] = r
            kept += 1
            continue
        request.tokens += 1
        made = request.tokens - request.prompt
        if made == 1:
            note_first_token(c, r, now_s)
        if made >= request.output:
            release(c, e, r)
            note_end(c, r, now_s)
            drop(c, r)
        elif engine.role == PREFILL:
            release(c, e, r)
            _hand_over(c, e, r, now_s)
        else:
            c.running[e, kept] = r
            kept += 1
    engine.running_count = kept


@compiled
def _catch_up(c: Cluster, e: int, steps: int) -> None:
    """Everybody in the run has `steps` more tokens. All take their blocks before the first one that ends frees any."""
    for at in range(c.engines[e].running_count):
        r = c.running[e, at]
        request = c.requests[r]
        if request.computed == request.tokens:
            request.computed += steps
            request.tokens += steps
            grow(c, e, r, request.computed)
            if c.totals[0].caching:
                publish(c, e, r)


@compiled
def drop(c: Cluster, r: int) -> None:
    """The record of a request is free for another."""
    c.requests[r].queue_next = c.totals[0].request_free
    c.totals[0].request_free = r
    c.totals[0].live -= 1


@compiled
def enqueue(c: Cluster, e: int, r: int, now_s: float) -> None:
    """A request joins the end of an engine's queue and, if need be, wakes the engine."""
    engine, request = c.engines[e], c.requests[r]
    blocked = engine.waiting_count > 0
    request.queue_next = -1
    request.engine = e
    if engine.waiting_tail >= 0:
        c.requests[engine.waiting_tail].queue_next = r
    else:
        engine.waiting_head = r
    engine.waiting_tail = r
    engine.waiting_count += 1
    if engine.phase != RUNNING:
        c.next_s[e] = min(c.next_s[e], now_s)
    elif not blocked:
        # Behind one that waits already nothing changes before this run ends: what blocks that one blocks this one.
        shorten(c, e, now_s)


@compiled
def _hand_over(c: Cluster, e: int, r: int, now_s: float) -> None:
    """The prompt's KV goes to the decode engine with the fewest requests for its KV room, over the sender's link.

    With layer-wise transfer only `layer_share` of it must follow the prefill; the rest runs beside it, if it took long
    enough.
    """
    engine, request, totals = c.engines[e], c.requests[r], c.totals[0]
    width = totals.block_tokens
    needed = (request.prompt + request.output - 1 + width - 1) // width
    target, least = -1, inf
    for other in range(len(c.engines)):
        there = c.engines[other]
        if there.role == DECODE and there.block_count >= needed:
            load = (there.running_count + there.waiting_count + there.incoming_count) / there.block_count
            if load < least:
                target, least = other, load
    whole_s = engine.transfer_s + (request.prompt + width - 1) // width * engine.transfer_block_s
    behind_s = max(whole_s * engine.layer_share, whole_s - (now_s - request.scheduled_s))
    engine.link_free_s = max(engine.link_free_s, now_s) + behind_s
    c.engines[target].incoming_count += 1
    request.carried = 1
    totals.transfers += 1
    _push(c, engine.link_free_s, r, target)


@compiled
def _push(c: Cluster, at_s: float, r: int, target: int) -> None:
    """Add a hand-over to the heap of those under way."""
    at = c.totals[0].transfer_count
    c.totals[0].transfer_count += 1
    while at > 0 and c.transfers[(at - 1) // 2].at_s > at_s:
        move_transfer(c, (at - 1) // 2, at)
        at = (at - 1) // 2
    entry = c.transfers[at]
    entry.at_s, entry.request, entry.target = at_s, r, target


@compiled
def move_transfer(c: Cluster, source: int, target: int) -> None:
    """Copy one entry of the heap of hand-overs over another."""
    old, new = c.transfers[source], c.transfers[target]
    new.at_s, new.request, new.target = old.at_s, old.request, old.target


@compiled
def _uniform(c: Cluster, e: int) -> float:
    engine = c.engines[e]
    engine.dice_a = engine.dice_a * _MULTIPLIER_A % _MODULUS_A
    engine.dice_b = engine.dice_b * _MULTIPLIER_B % _MODULUS_B
    return float(((engine.dice_a - engine.dice_b) % (_MODULUS_A - 1) + 0.5) / (_MODULUS_A - 1))


@compiled
def _normal(c: Cluster, e: int) -> float:
    """A standard normal number from the engine's own dice (Box and Muller)."""
    radius = np.sqrt(-2 * np.log(_uniform(c, e)))
    return float(radius * np.cos(2 * np.pi * _uniform(c, e)))
