"""vllm-project/router's `smetric`: stay with the cache while its engine keeps the promised TTFT, else the least work.

Owns: the rule of src/policies/smetric.rs (router notes, section 2.2; read at 8bef7312) on workers that prefill and
decode. For each worker: n = prompt not found in the router's own tree of what it sent there; work = `linear_ratio` *
n + c_att * n * (length - n / 2); queued = work of the requests before their first token + this. rate = the 90th
percentile of the last 64 (at least 8) quotients of work and seconds to the first token. A request with a turn before
it stays with the worker of the longest match if that is more than `hit_ratio` of the history that it should have
there, and queued / rate is within `slack_ratio` * (`ttft_slo_base_s` + `ttft_slo_s_per_token` * length), or no
worker's is. Else the lowest queued work times requests in flight, the search beginning one worker further each time.
Work and lengths are in tokens, the source's in characters.
The history is the session's prompt of before; a request without a session passes the turn gate and expects none.
`c_att` is `attention_ratio` times what the nominal model of the first engine says; the source has no default for
either, and ours for the promise is the comparison's. Does not own: the tree (`prefix_views`).
Not modelled: matches within a block, and inputs that are no text.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from router.policies.asked import Asked, NominalFleet, blocks_of
from router.policies.in_flight import InFlight
from router.policies.prefix_views import EngineHistory

# RATE_WINDOW, RATE_MIN_SAMPLES and the percentile of the source.
_RATE_WINDOW, _FEWEST_RATES, _RATE_SHARE = 64, 8, 0.9

# Characters of a token of English or code: the tree counts characters.
_CHARACTERS_PER_TOKEN = 4

# Sessions whose last prompt is remembered, which the source reads off the request itself.
_MOST_SESSIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class SmetricSettings:
    """The source's names, lengths in tokens. `prefill_rate` 0: it is learned."""

    linear_ratio: float = 1.0
    # of the attention term of the nominal prefill model; the source's c_att is the operator's to fit
    attention_ratio: float = 1.0
    # of the source's tests; it has no default
    hit_ratio: float = 0.5
    slack_ratio: float = 1.0
    # no default in the source; the promise of our comparison
    ttft_slo_base_s: float = 5.0
    ttft_slo_s_per_token: float = 0.0
    prefill_work_per_s: float = 0.0
    # characters a worker, as the gateway's cache_aware
    max_tree_bytes: int = 2**26


@dataclass(slots=True)
class _Rates:
    """Work done a second, as seen. Mutable: the last few."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW))
    work_per_s: float | None = None

    def record(self, rate: float) -> None:
        self.seen.append(rate)
        if len(self.seen) >= _FEWEST_RATES:
            self.work_per_s = sorted(self.seen)[round((len(self.seen) - 1) * _RATE_SHARE)]


class Smetric:
    """Mutable: the tree, queued work, learned rates."""

    hears = True
    reads_blocks = True

    def __init__(self, fleet: NominalFleet, settings: SmetricSettings) -> None:
        count, first = len(fleet.engines), fleet.engines[0]
        self._settings = settings
        self._block_tokens = fleet.block_tokens
        self._c_att = settings.attention_ratio * first.prefill_s_per_token2 * first.prefill_tok_per_s
        most = blocks_of(settings.max_tree_bytes / _CHARACTERS_PER_TOKEN, fleet.block_tokens)
        self._tree = EngineHistory(count, most, leaves_first=True)
        self._in_flight = InFlight(count)
        self._work = [0.0] * count
        self._rates = [_Rates() for _ in range(count)]
        self._prefills: dict[int, tuple[int, float, float]] = {}
        self._histories: OrderedDict[int, int] = OrderedDict()
        self._start = 0

    def _cost(self, length: int, hit: int) -> float:
        new = length - hit
        return self._settings.linear_ratio * new + self._c_att * new * (length - new / 2)

    def pick(self, ask: Asked, now_s: float) -> int:
        """The holder of the session's cache, or the least queued work."""
        count, length = len(self._work), ask.input_tokens
        hits = [min(length, blocks * self._block_tokens) for blocks in self._tree.matched(ask.blocks)]
        costs = [self._cost(length, hit) for hit in hits]
        order = [(self._start + step) % count for step in range(count)]
        self._start = (self._start + 1) % count
        meets = [self._meets(engine, costs[engine], length) for engine in range(count)]
        best = max(order, key=hits.__getitem__)  # the first of equals
        expected = self._histories.get(ask.session, 0)
        has_turn = ask.session < 0 or ask.session in self._histories
        if has_turn and hits[best] > self._settings.hit_ratio * expected and (meets[best] or not any(meets)):
            picked = best
        else:
            counts = self._in_flight.counts
            picked = min(order, key=lambda engine: (self._work[engine] + costs[engine]) * counts[engine])
        self._placed(ask, picked, costs[picked], now_s)
        return picked

    def _meets(self, engine: int, cost: float, length: int) -> bool:
        """Whether this engine is thought to keep the promise; one of unknown rate is."""
        settings = self._settings
        rate = settings.prefill_work_per_s or self._rates[engine].work_per_s
        if rate is None:
            return True
        allowed_s = settings.slack_ratio * (settings.ttft_slo_base_s + settings.ttft_slo_s_per_token * length)
        return (self._work[engine] + cost) / rate <= allowed_s

    def _placed(self, ask: Asked, engine: int, cost: float, now_s: float) -> None:
        self._tree.sent(ask.blocks, engine)
        self._work[engine] += cost
        self._in_flight.placed(ask.serial, engine)
        self._prefills[ask.serial] = engine, cost, now_s
        if ask.session >= 0:
            self._histories[ask.session] = ask.input_tokens
            self._histories.move_to_end(ask.session)
            if len(self._histories) > _MOST_SESSIONS:
                self._histories.popitem(last=False)

    def first_token(self, serial: int, now_s: float) -> None:
        """Its work is done, at this rate."""
        engine, cost, placed_s = self._prefills.pop(serial)
        self._work[engine] = max(0.0, self._work[engine] - cost)
        if cost > 0 and now_s > placed_s:
            self._rates[engine].record(cost / (now_s - placed_s))

    def finished(self, serial: int, usage: object, now_s: float) -> None:
        """It is in flight no more; without a first token its work was never done."""
        unfinished = self._prefills.pop(serial, None)
        if unfinished is not None:
            self._work[unfinished[0]] = max(0.0, self._work[unfinished[0]] - unfinished[1])
        self._in_flight.ended(serial)
