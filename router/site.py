"""One endpoint incarnation with all that the router knows of it.

Owns: `Site`, which joins an endpoint's description, load, breaker, speed and holdings, and says whether it can be
picked at all. Does not own: any of these parts (`endpoints`, `cost`, `prefix_index`), or the choice (`route`). The pick
reads its fields one by one, in a loop over all sites.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from router.cost import Speed, SpeedLearner, Unfit
from router.endpoints import Breaker, Endpoint, EngineSpeed, Load
from router.prefix_index import Holdings

# Bytes of prompt JSON per token of an endpoint that has reported none yet: English text and code with common
# tokenizers.
_BYTES_PER_TOKEN = 4.0


class Site:
    """One endpoint incarnation with all that is known of it."""

    __slots__ = (
        "breaker", "bytes_per_token", "closed", "endpoint", "holdings", "hop_s", "learner", "link_free_s", "load",
        "placed_s", "prefills_at_s", "prefills_s", "pull_s_per_token", "recent", "speed", "trust_ratio",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, holdings: Holdings, speed: EngineSpeed, hop_s: float) -> None:
        self.holdings = holdings
        self.load = Load()
        self.breaker = Breaker()
        self.learner = SpeedLearner(speed)
        self.describe(endpoint, hop_s)
        self.placed_s = 0.0
        """Seconds of new sessions placed here, decaying over the horizon."""
        self.prefills_s = 0.0
        """Seconds of prefill given to it, as of `prefills_at_s`; they fade over an answer's time (`cost.faded_s`)."""
        self.prefills_at_s = 0.0
        self.recent: deque[tuple[float, Sequence[int]]] = deque()
        """Prompts sent there of which its events cannot tell yet: until when, and their blocks (`held`)."""
        self.link_free_s = 0.0
        """When its link to other engines will have moved all that it was asked to."""
        self.bytes_per_token = _BYTES_PER_TOKEN
        self.trust_ratio = 1.0
        """Cached tokens reported over predicted, moving: how far the index is right about this engine."""

    def unfit(self, exclude: frozenset[str], now_s: float) -> Unfit | None:
        """Why it cannot be picked now; None: it can."""
        if self.closed is not None:
            return self.closed
        if exclude and self.endpoint.endpoint_id in exclude:
            return Unfit.EXCLUDED
        if self.breaker.admits(now_s):
            return None
        return Unfit.BROKEN if self.breaker.opened else Unfit.BUSY

    def describe(self, endpoint: Endpoint, hop_s: float) -> None:
        """Take over what the endpoints list says of it."""
        self.endpoint = endpoint
        self.hop_s = hop_s
        self.pull_s_per_token: float | None = endpoint.pull_s_per_token if endpoint.pulls_kv else None
        self.speed: Speed = endpoint.speed or self.learner
        self.closed = Unfit.DRAINING if endpoint.drain else Unfit.ROLE if endpoint.role == "prefill" else None

    def capacity_bytes(self) -> int | None:
        """The prompt bytes that fit its KV cache; None: unknown."""
        capacity = self.speed.kv_capacity_tokens
        return None if capacity is None else int(capacity * self.bytes_per_token)
