"""The two calls that drive a simulated cluster: take a request, and let time pass.

Owns: the order of events over all engines, hand-overs under way, and refusing what can never fit. Does not own: what an
engine does in a step (`engine`) or where a request goes (a policy, outside).
`advance` stops before `until_s`: what happens at that very time comes after the request that arrives then, so requests
of one instant are in the same first step.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfmodel.simulation.compiling import columns_of, compiled
from perfmodel.simulation.engine import begin, enqueue, finish, move_transfer
from perfmodel.simulation.record import note_arrival
from perfmodel.simulation.state import (
    CLUSTER_COLUMNS,
    KV_USAGE,
    PREFILL,
    QUEUED_TOKENS,
    RUNNING,
    RUNNING_COUNT,
    WAITING,
    Cluster,
)

# What `submit` answers when it did not take the request.
NO_RECORD, NEVER_FITS = -1, -2

# What `advance` answers when nobody must be told and the log of blocks must be taken before it can go on.
LOG_FULL = -1


# An address book (`compiling.address_book`) of a `Cluster` or a `Window`.
Book = npt.NDArray[np.int64]


class Window(NamedTuple):
    """Columns of the requests that `submit` reads. Block ids are 1 or more; `serial_first` + row names a request.

    `prompt` and `output` int64[n], `block_offsets` int64[n + 1], `blocks` int64[m], `watched` int8[n], `serial_first`
    int64[1].
    """

    prompt: npt.NDArray[np.int64]
    output: npt.NDArray[np.int64]
    block_offsets: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    watched: npt.NDArray[np.int8]
    serial_first: npt.NDArray[np.int64]


WINDOW_COLUMNS = columns_of(
    "Window",
    [
        ("prompt", np.int64, 1), ("output", np.int64, 1), ("block_offsets", np.int64, 1), ("blocks", np.int64, 1),
        ("watched", np.int8, 1), ("serial_first", np.int64, 1),
    ],
)  # fmt: skip
"""In compiled code: the columns of `Window` behind their address book."""


@compiled
def submit(cluster: Book, requests: Book, row: int, engines: tuple[int, int], now_s: float) -> int:
    """Give row `row` to an engine at `now_s`; the second of `engines` (-1: none) is whence it may fetch blocks.

    Its record's index, or NO_RECORD (grow and ask again) or NEVER_FITS.
    """
    c, window = CLUSTER_COLUMNS(cluster), WINDOW_COLUMNS(requests)
    e = engines[0]
    totals, engine = c.totals[0], c.engines[e]
    prompt, output = window.prompt[row], window.output[row]
    width = totals.block_tokens
    needed = (prompt + output - 1 + width - 1) // width
    fits = needed <= engine.block_count
    if engine.role == PREFILL:
        fits = (prompt + width - 1) // width <= engine.block_count and (
            output == 1 or needed <= totals.decode_blocks_max
        )
    if not fits:
        totals.offered += 1
        totals.refused += 1
        return NEVER_FITS
    r = totals.request_free
    if r < 0:
        return NO_RECORD
    totals.offered += 1
    request = c.requests[r]
    totals.request_free = request.queue_next
    totals.live += 1
    request.arrival_s = now_s
    request.scheduled_s = request.first_s = request.ready_s = 0.0
    request.serial = window.serial_first[0] + row
    request.row = row
    request.engine = e
    request.source = engines[1]
    request.prompt = request.tokens = request.refill = prompt
    request.output = output
    request.computed = request.stored = request.block_count = request.preempted = request.carried = 0
    request.cached = -1
    request.watched = window.watched[row]
    first = window.block_offsets[row]
    request.key_count = window.block_offsets[row + 1] - first
    for place in range(request.key_count):
        c.keys[r, place] = window.blocks[first + place]
    note_arrival(c, r)
    enqueue(c, e, r, now_s)
    return int(r)


@compiled
def advance(cluster: Book, until_s: float) -> int:
    """Let everything happen before `until_s` (exclusive), or until somebody must be told.

    Returns how many events lie in `events` and `events_s`, oldest first; the next call forgets them. 0: time has
    come to `until_s`. It stops early when the event columns are nearly full, and at the end of a watched request, whose
    successor may arrive next. LOG_FULL: the log of blocks must be taken first (`kv_count` set to 0).
    """
    c = CLUSTER_COLUMNS(cluster)
    totals = c.totals[0]
    totals.event_count = 0
    totals.watched_ended = 0
    # One engine's event tells at most two of each of its sequences.
    room = len(c.events_s) - 2 * c.running.shape[1] - 2
    while totals.watched_ended == 0 and totals.event_count < room and totals.kv_count < totals.kv_room:
        e = int(np.argmin(c.next_s))
        at_s = c.next_s[e]
        landing_s = c.transfers[0].at_s if totals.transfer_count > 0 else inf
        if totals.metrics_every_s > 0:
            _sample(c, min(at_s, landing_s, until_s))
        if min(at_s, landing_s) >= until_s:
            break
        if landing_s <= at_s:
            _land(c, landing_s)
            continue
        totals.clock_s = at_s
        if c.engines[e].phase == RUNNING:
            finish(c, e)
        begin(c, e, at_s)
    if totals.event_count == 0 and totals.kv_count >= totals.kv_room:
        return LOG_FULL
    return int(totals.event_count)


@compiled
def _sample(c: Cluster, next_s: float) -> None:
    """Note down what every engine's metrics say, if a sample is due before the next thing happens at `next_s`.

    Between two events nothing changes, so the state now is the state at that tick. Inside a run of decode steps the
    blocks are those of the run's first step.
    """
    totals = c.totals[0]
    if next_s == inf:
        return
    tick = int(next_s / totals.metrics_every_s)
    if tick <= totals.sampled_tick:
        return
    totals.sampled_tick = tick
    for e in range(len(c.engines)):
        engine = c.engines[e]
        queued = 0
        for at in range(engine.running_count):
            request = c.requests[c.running[e, at]]
            queued += max(0, request.refill - request.computed)
        r = engine.waiting_head
        while r >= 0:
            queued += c.requests[r].tokens
            r = c.requests[r].queue_next
        c.samples[e, WAITING] = engine.waiting_count
        c.samples[e, RUNNING_COUNT] = engine.running_count
        c.samples[e, KV_USAGE] = 1.0 - engine.free_count / engine.block_count
        c.samples[e, QUEUED_TOKENS] = queued


@compiled
def _land(c: Cluster, now_s: float) -> None:
    """The first hand-over has arrived: its request joins the decode engine's queue."""
    totals = c.totals[0]
    r, e = c.transfers[0].request, c.transfers[0].target
    totals.transfer_count -= 1
    last = totals.transfer_count
    last_s = c.transfers[last].at_s
    at = 0
    while 2 * at + 1 < last:
        child = 2 * at + 1
        if child + 1 < last and c.transfers[child + 1].at_s < c.transfers[child].at_s:
            child += 1
        if c.transfers[child].at_s >= last_s:
            break
        move_transfer(c, child, at)
        at = child
    move_transfer(c, last, at)
    c.engines[e].incoming_count -= 1
    enqueue(c, e, r, now_s)


@compiled
def invariants_hold(cluster: Book) -> bool:
    """Whether every engine's blocks add up: held and free ones are all, holders are counted right. For tests."""
    c = CLUSTER_COLUMNS(cluster)
    for e in range(len(c.engines)):
        engine = c.engines[e]
        held = 0
        for block in range(engine.block_first, engine.block_first + engine.block_count):
            if c.blocks[block].ref < 0:
                return False
            if c.blocks[block].ref > 0:
                held += 1
        if held + engine.free_count != engine.block_count:
            return False
        references = 0
        for at in range(engine.running_count):
            references += c.requests[c.running[e, at]].block_count
        counted = 0
        for block in range(engine.block_first, engine.block_first + engine.block_count):
            counted += c.blocks[block].ref
        if counted != references:
            return False
    return True


def compiled_entries() -> tuple[Any, ...]:
    """The functions that are called from Python: whose machine code is worth keeping on disk (an adapter does)."""
    return submit, advance
