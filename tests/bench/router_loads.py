"""The load of one run: copies of parts of a trace under other names, played in closed or open loop.

Owns: which sessions a copy has, which blocks copies share, and the requests that this makes. Does not own: the columns
and the relabelling (`perfmodel.traces`), or the simulation. A copy is a part of the sessions, so that loads differ by
less than a whole trace; the copies take the parts in turn, in an order that the seed draws, so that as many copies as
there are parts are the whole trace once. Time is never squeezed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError
from perfmodel.simulation.arrivals import ClosedLoop, OpenLoop
from perfmodel.traces.copies import Copies
from perfmodel.traces.trace import Trace, joined
from tests.bench.router_plan import TracePlan

# Below this a copy would be a handful of sessions and its load a matter of luck. [judgement]
_MOST_PARTS = 100


def groups_of(trace: Trace) -> npt.NDArray[np.int64]:
    """Number of the group that each request may not be separated from: int64[n], from 0 without gaps.

    Its session; without one, all requests that share the first block which not all of them share; without that block
    the request itself.
    """
    names: list[tuple[str, int]] = []
    depth = _first_differing(trace)
    for row in range(len(trace)):
        session, blocks = int(trace.session[row]), trace.block_ids(row)
        if session >= 0:
            names.append(("session", session))
        elif len(blocks) > depth:
            names.append(("block", int(blocks[depth])))
        else:
            names.append(("row", row))
    order: dict[tuple[str, int], int] = {}
    return np.array([order.setdefault(name, len(order)) for name in names], dtype=np.int64)


def _first_differing(trace: Trace) -> int:
    """The first depth at which prompts without a session have more than one block id."""
    rows = np.flatnonzero((trace.session < 0) & (np.diff(trace.block_offsets) > 0))
    depth = 0
    while True:
        deep = rows[np.diff(trace.block_offsets)[rows] > depth]
        if not len(deep):
            return 0
        if len(np.unique(trace.blocks[trace.block_offsets[deep] + depth])) > 1:
            return depth
        depth += 1


def shared_ids(trace: Trace, depth: int) -> npt.NDArray[np.int64]:
    """Ids among the first `depth` blocks of prompts that more than one group has, sorted: what all users share."""
    groups, starts, counts = groups_of(trace), trace.block_offsets[:-1], np.diff(trace.block_offsets)
    found: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    for place in range(depth):
        rows = np.flatnonzero(counts > place)
        pairs = np.unique(np.stack((trace.blocks[starts[rows] + place], groups[rows])), axis=1)
        ids, users = np.unique(pairs[0], return_counts=True)
        found.append(ids[users > 1])
    return np.unique(np.concatenate(found))


def parts_of(trace: Trace, plan: TracePlan, seed: int) -> list[Trace]:
    """The trace's sessions dealt into `1 / part` heaps of about as many requests, in an order drawn with `seed`."""
    heap_count = min(_MOST_PARTS, round(1 / plan.part))
    if heap_count <= 1:
        return [trace]
    groups = groups_of(trace)
    sizes = np.bincount(groups)
    order = np.random.default_rng(seed).permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]  # the largest first, each onto the smallest heap
    heaps, heap_of = np.zeros(heap_count, dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
    for group in order:
        heap_of[group] = int(heaps.argmin())
        heaps[heap_of[group]] += sizes[group]
    found = [trace.rows(np.flatnonzero(heap_of[groups] == heap)) for heap in range(heap_count)]
    if not all(map(len, found)):
        raise ConfigError(f"part is {plan.part}; expected no more than one part a session ({len(sizes)})")
    return [found[heap] for heap in np.random.default_rng(seed).permutation(heap_count)]


def cut(trace: Trace, plan: TracePlan) -> Trace:
    """The hours that are played, with block ids that copies can be made of and, in closed loop, its think times."""
    if plan.window_h is not None:
        trace = trace.window(plan.window_h[0] * 3600, plan.window_h[1] * 3600)
    if not len(trace):
        raise ConfigError(f"window_h is {plan.window_h}; expected hours in which the trace has requests")
    return trace.with_think_times(plan.engine_s) if plan.closed else trace


def load_of(trace: Trace, plan: TracePlan, copies: int, seed: int, least_requests: int) -> Trace:
    """`copies` parts of the (cut) trace at once, in rounds until there are `least_requests`."""
    parts = parts_of(trace, plan, seed)
    dealt = [len(parts[copy % len(parts)]) for copy in range(copies)]
    rounds = -(-least_requests // sum(dealt))
    whole = Copies(trace, copies, seed, plan.spread_s, repeat_count=rounds)
    shared = shared_ids(trace, plan.shared_blocks)
    found = []
    for number, start_s in enumerate(whole.starts_s().ravel().tolist()):
        shifted = parts[number % len(parts)].shifted(
            by_s=start_s, session_id=number * trace.session_end_id, block_id=number * trace.block_end_id
        )
        if len(shared) and number:
            named = shifted.blocks - number * trace.block_end_id
            shifted = replace(shifted, blocks=np.where(np.isin(named, shared), named, shifted.blocks))
        found.append(shifted)
    return joined(found)


def workload_of(load: Trace, plan: TracePlan) -> OpenLoop | ClosedLoop:
    """As the simulation plays it."""
    return ClosedLoop(load) if plan.closed else OpenLoop([load])


def distinct_blocks(load: Trace) -> int:
    """Blocks that an engine would hold which never forgets."""
    return len(np.unique(load.blocks))
