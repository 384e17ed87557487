"""What a policy is told beside the ends of its own requests: blocks that engines store and drop, and their metrics.

Owns: the way from the cluster's log and samples to the policy's ears, late by the same delay for every policy. Does not
own: what is written there (`blocks`, `cluster`) or when the policy is asked (`run`). Everything is told right before a
pick, in the order in which it happened, because nothing else of a policy depends on it; what is on its way for less
than the delay stays unknown. A policy that hears neither costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from perfmodel.simulation.policy import EngineSample, HearsKvEvents, HearsMetrics, KvTier, Policy
from perfmodel.simulation.state import Cluster

# How late a policy hears of stored and dropped blocks: an engine's batching and a hop over ZMQ. [judgement]
DEFAULT_EVENT_DELAY_S = 0.005

# Lines on their way from which they are told without waiting for the next pick, as far as their delay is over: a
# million of them are 24 MB.
_MOST_HELD = 1 << 20


def wants_kv_events(policy: Policy) -> bool:
    """Whether it says that it hears what engines store."""
    return bool(getattr(policy, "hears_kv_events", False))


def metrics_every_s(policy: Policy) -> float:
    """How often it reads the engines' metrics; 0: never."""
    return float(getattr(policy, "metrics_every_s", 0.0))


class Hearing:
    """Carries blocks and samples to a policy. Mutable: what is under way."""

    def __init__(self, policy: Policy, routable: Sequence[int], engine_count: int, delay_s: float) -> None:
        self._policy = policy
        self._routable = list(routable)
        self._delay_s = delay_s
        self._every_s = metrics_every_s(policy)
        self._tells_blocks = wants_kv_events(policy)
        self._held: deque[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = deque()
        self._held_count = 0
        self._tick = -1
        # Engine of the cluster -> engine of the policy's fleet; -1: it only decodes and nobody picks it.
        self._number = [-1] * engine_count
        for number, engine in enumerate(self._routable):
            self._number[engine] = number

    def take(self, cluster: Cluster) -> None:
        """Take the log before the cluster goes on."""
        totals = cluster.totals[0]
        count = int(totals.kv_count)
        if not count:
            return
        totals.kv_count = 0
        self._held.append((cluster.kv_log[:count].copy(), cluster.kv_log_s[:count].copy()))
        self._held_count += count
        if self._held_count > _MOST_HELD:
            self._tell_blocks(float(totals.clock_s))

    def tell(self, cluster: Cluster, now_s: float) -> None:
        """Tell all that has come by `now_s`: blocks first, then the newest sample of the metrics."""
        if self._tells_blocks:
            self._tell_blocks(now_s)
        if self._every_s > 0:
            self._tell_metrics(cluster)

    def _tell_blocks(self, now_s: float) -> None:
        until_s = now_s - self._delay_s
        while self._held:
            lines, times = self._held[0]
            due = int(np.searchsorted(times, until_s, side="right"))
            if due:
                self._held_count -= due
                self._tell_lines(lines[:due], now_s)
            if due < len(times):
                self._held[0] = (lines[due:], times[due:])
                return
            self._held.popleft()

    def _tell_lines(self, lines: npt.NDArray[np.int64], now_s: float) -> None:
        """One call for each stretch of one engine's blocks in one tier."""
        policy = cast(HearsKvEvents, self._policy)
        codes = lines[:, 0]
        ends = np.flatnonzero(codes[1:] != codes[:-1]) + 1
        keys = lines[:, 1].tolist()
        start = 0
        for end in (*ends.tolist(), len(keys)):
            code = int(codes[start])
            engine = self._number[code >> 2]
            if engine >= 0:
                tier = KvTier.LOWER if code & 2 else KvTier.DEVICE
                hear = policy.removed if code & 1 else policy.stored
                hear(engine, keys[start:end], tier, now_s)
            start = end

    def _tell_metrics(self, cluster: Cluster) -> None:
        tick = int(cluster.totals[0].sampled_tick)
        if tick <= self._tick:
            return
        self._tick = tick
        rows = cluster.samples.tolist()
        samples = []
        for engine in self._routable:
            waiting, running, usage, queued = rows[engine]
            samples.append(EngineSample(int(waiting), int(running), usage, int(queued)))
        cast(HearsMetrics, self._policy).metrics(samples, tick * self._every_s)
