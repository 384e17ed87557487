"""What a restart leaves of the store of limits: the rule by which its memory is trusted or counts as lost.

Owns: the life of a store (`Life`), what is told of a clean stop, and which life a process meets (`next_life`), the
reference of the first part of `adapters.limits_redis.lua`, which the contract suite holds to it. Does not own: what is
in the buckets (`rate_limit`), nor how a clean stop is brought about and remembered (`adapters.clean_stop`). Pure.

**Lost.** Any run of the server that the store does not know counts as a loss of memory: what was admitted in the last
seconds of the run before may not have been written. A new era begins; buckets of an earlier one are empty, and fill
`RESTART_US` later, when every lease given out before is over and every living process has registered what it runs.

**Trusted.** A run goes on where another ended only if it is known that this one follows that one with every write
kept, and if no process was alive then: a living one may have requests running whose slots end in the store while that
is down. The names must fit: the run that ended is the one that the store was left by, the run that follows is this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from controlplane.rate_limit import PROCESS_TTL_US, RESTART_US

# A server that has been up this long, and that no process of an earlier life has come to, has no earlier life.
SETTLED_UPTIME_S = 2


@dataclass(frozen=True, slots=True)
class Life:
    """What the store keeps of its life. Times are the server's clock."""

    run_id: str
    era: str
    """The run in which its memory was last lost, or first used: buckets of another era are empty."""
    empty_until_us: int
    """Buckets that are not known fill from here; 0: nothing was ever lost, and such a bucket is full."""
    opened_us: int


@dataclass(frozen=True, slots=True)
class CleanStop:
    """A run of the server that ended with every write kept; nothing was written after `stopped_us` (its clock)."""

    run_id: str
    stopped_us: int
    doubt: bool = False
    """Some run before did not end cleanly, so a store without memory may have had one."""


NOT_CLEAN = CleanStop("", 0, doubt=True)
"""Some run ended, and not cleanly."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What a process knows: the run it talks to, whether it met any store before, and whether that was another run."""

    run_id: str
    met_before: bool
    met_other: bool
    uptime_s: int


@dataclass(frozen=True, slots=True)
class Clock:
    """The server's time of a call, and how long a store that has just started waits for earlier processes."""

    now_us: int
    opening_us: int


def next_life(kept: Life | None, caller: Caller, follows: CleanStop | None, seen_us: Iterable[int], at: Clock) -> Life:
    """The life in which the store is when `caller` calls.

    `kept` is what it remembers (None: nothing), `follows` the stop that the caller's run is known to follow (None:
    nothing is known), `seen_us` when each process was last heard of.
    """
    stranger = kept is None or kept.run_id != caller.run_id
    if kept is not None and not stranger and not (caller.met_other and kept.empty_until_us == 0):
        return kept
    if kept is not None and stranger and _trusts(kept, follows, seen_us):
        return replace(kept, run_id=caller.run_id)
    run = caller.run_id
    if kept is not None or caller.met_before or caller.met_other or (follows is not None and follows.doubt):
        return Life(run, run, at.now_us + RESTART_US, at.now_us)
    settled = caller.uptime_s >= SETTLED_UPTIME_S
    return Life(run, run, 0, at.now_us - at.opening_us if settled else at.now_us)


def _trusts(kept: Life, follows: CleanStop | None, seen_us: Iterable[int]) -> bool:
    if follows is None or follows.run_id != kept.run_id:
        return False
    return all(seen < follows.stopped_us - PROCESS_TTL_US for seen in seen_us)
