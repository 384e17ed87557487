"""Two laws of queues with random arrivals, compiled: Erlang's chance to wait, and a Poisson count at a quantile.

Owns: the formulas, of plain numbers. Does not own: what an engine's servers and arrivals are (`queueing`, which calls
both in its compiled loops). They are apart because they know nothing of engines.
"""

from __future__ import annotations

import math

from perfmodel.compiled import compiled

# A count stops here: far beyond the arrivals in one step that `queueing` tells apart (96).
_MOST_COUNT = 384


@compiled
def erlang_c(servers: int, offered: float) -> float:
    """Erlang's chance that all servers are busy; 1 when the offered load reaches their number."""
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = offered * blocked / (server + offered * blocked)
    return servers * blocked / (servers - offered * (1.0 - blocked))


@compiled
def poisson_count(mean: float, uniform: float) -> int:
    """The Poisson count at this quantile."""
    count, chance = 0, math.exp(-mean)
    total = chance
    while total < uniform and count < _MOST_COUNT:
        count += 1
        chance *= mean / count
        total += chance
    return count
