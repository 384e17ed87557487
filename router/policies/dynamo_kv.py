"""NVIDIA Dynamo's KV router: prefill still to do plus blocks in use, in blocks, the lowest sum wins.

Owns: the rule of docs/components/router and lib/kv-router/src/scheduling/selector/default.rs (router notes, section
2.3; read at 07a6c9ce). For each worker: (prompt tokens not yet computed there + the request's) / block size, less the
credit for blocks that it holds (device 1, lower tier 0.75 as host memory), not below 0, times prefill_load_scale;
plus the blocks of the requests in flight there and of this one, a shared prefix counted once. Ties are drawn; with a
temperature the draw is a softmax over the costs between the lowest and the highest.
Who holds what comes from KV events; load from the router's own life cycle (pick, first token, end), an entry dropped
after five minutes. Does not own: the index (`prefix_views`).
Not modelled: other replicas of the router, the queue in front (off by default), taints, session affinity (off by
default), the side index of predicted blocks (off by default), and output blocks (not tracked by default).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from router.errors import PolicyError
from router.policies.asked import Asked, Dice, lowest
from router.policies.prefix_views import HearsKvEvents, leading_blocks


@dataclass(frozen=True, slots=True)
class DynamoSettings:
    """Dynamo's defaults, its names with a unit (docs/components/router/router-configuration.md). Raises PolicyError."""

    overlap_score_credit_ratio: float = 1.0
    prefill_load_scale_ratio: float = 1.0
    host_cache_hit_ratio: float = 0.75
    overlap_score_credit_decay_ratio: float = 0.0
    decode_active_request_blocks: float = 0.0
    temperature_ratio: float = 0.0
    # docs/design-docs/router-design.md: an entry without an end is stale after five minutes
    stale_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("temperature_ratio", "overlap_score_credit_decay_ratio"):
            if getattr(self, name) < 0:
                raise PolicyError(f"{name} is {getattr(self, name)}; expected 0 or more")


@dataclass(slots=True)
class _Active:
    """One request in flight. Mutable: its prefill ends."""

    engine_index: int
    prefill_tokens: int
    blocks: Sequence[int]
    own_blocks: float
    placed_s: float


class DynamoKv(HearsKvEvents):
    """Mutable: the index, and the load by engine."""

    hears = True
    reads_blocks = True

    def __init__(self, engine_count: int, block_tokens: int, settings: DynamoSettings, dice: Dice) -> None:
        super().__init__(engine_count)
        self._settings = settings
        self._block_tokens = block_tokens
        self._prefill_tokens = [0] * engine_count
        self._own_blocks = [0.0] * engine_count
        self._requests = [0] * engine_count
        # Per engine, how many requests in flight have this prefix; and which engines have any.
        self._in_use: list[dict[int, int]] = [{} for _ in range(engine_count)]
        self._users: dict[int, int] = {}
        self._active: dict[int, _Active] = {}
        self._dice = dice

    def costs(self, ask: Asked) -> list[float]:
        """Cost of each engine in blocks."""
        return self._costs(ask, self._index.by_tier(ask.blocks))

    def _costs(self, ask: Asked, held: Sequence[tuple[int, int]]) -> list[float]:
        settings, width = self._settings, self._block_tokens
        in_use = leading_blocks(self._users, ask.blocks, len(held))
        blocks = ask.input_tokens / width
        floor = min(self._prefill_tokens)
        found = []
        for engine, (device, lower) in enumerate(held):
            waiting = self._prefill_tokens[engine]
            excess = (waiting - floor) / width / blocks
            credit = settings.overlap_score_credit_ratio / (1 + settings.overlap_score_credit_decay_ratio * excess)
            prefill = waiting / width + blocks - credit * device - settings.host_cache_hit_ratio * lower
            decode = len(self._in_use[engine]) + self._own_blocks[engine] + blocks - in_use[engine]
            requests = settings.decode_active_request_blocks * self._requests[engine]
            found.append(settings.prefill_load_scale_ratio * max(prefill, 0.0) + decode + requests)
        return found

    def pick(self, ask: Asked, now_s: float) -> int:
        """The engine with the lowest cost."""
        self._drop_stale(now_s)
        held = self._index.by_tier(ask.blocks)
        costs = self._costs(ask, held)
        picked = self._softmax(costs) if self._settings.temperature_ratio else lowest(costs, self._dice)
        found = sum(held[picked]) * self._block_tokens
        active = _Active(
            picked,
            max(0, ask.input_tokens - found),
            ask.blocks,
            ask.input_tokens / self._block_tokens - len(ask.blocks),
            now_s,
        )
        self._active[ask.serial] = active
        self._prefill_tokens[picked] += active.prefill_tokens
        self._own_blocks[picked] += active.own_blocks
        self._requests[picked] += 1
        in_use, bit = self._in_use[picked], 1 << picked
        for block in ask.blocks:
            count = in_use.get(block, 0)
            in_use[block] = count + 1
            if not count:
                self._users[block] = self._users.get(block, 0) | bit
        return picked

    def _softmax(self, costs: Sequence[float]) -> int:
        """Drawn: the cheaper, the likelier."""
        least, most = min(costs), max(costs)
        if least == most:
            return lowest(costs, self._dice)
        scale = (most - least) * self._settings.temperature_ratio
        weights = [exp((least - cost) / scale) for cost in costs]
        drawn = self._dice() * sum(weights)
        for engine, weight in enumerate(weights):
            drawn -= weight
            if drawn < 0:
                return engine
        return len(costs) - 1

    def first_token(self, serial: int, now_s: float) -> None:
        """Its prefill is done."""
        active = self._active.get(serial)
        if active is not None:
            self._prefill_tokens[active.engine_index] -= active.prefill_tokens
            active.prefill_tokens = 0

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """It is gone; so may be its entry."""
        active = self._active.pop(serial, None)
        if active is not None:
            self._free(active)

    def _drop_stale(self, now_s: float) -> None:
        """Entries are in the order of their picks."""
        while self._active:
            serial = next(iter(self._active))
            if self._active[serial].placed_s >= now_s - self._settings.stale_s:
                return
            self._free(self._active.pop(serial))

    def _free(self, active: _Active) -> None:
        engine = active.engine_index
        self._prefill_tokens[engine] -= active.prefill_tokens
        self._requests[engine] -= 1
        # whole again when nothing is left, whatever was rounded on the way
        self._own_blocks[engine] = self._own_blocks[engine] - active.own_blocks if self._requests[engine] else 0.0
        in_use, bit = self._in_use[engine], 1 << engine
        for block in active.blocks:
            in_use[block] -= 1
            if not in_use[block]:
                del in_use[block]
                left = self._users[block] & ~bit
                if left:
                    self._users[block] = left
                else:
                    del self._users[block]
