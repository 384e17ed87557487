"""The choice of an endpoint for each request, and everything that is learned from how it went.

Owns: `Router`, its requests and answers. Does not own: any I/O, clock or dice (arguments), the price of a candidate
(`cost`), or retries (the caller asks again with the failed endpoint in `exclude`).

A request goes to the feasible endpoint with the fewest predicted seconds; endpoints within `tie_s` are equal and one is
drawn. The load is counted and the prefix is stored at the pick, before anything is sent, so that the next pick sees
both; `finished` releases the load on every ending and corrects the beliefs by what the engine reported.

New sessions. Agent steps come one after another, so at most picks nothing is in flight and a shared system prompt would
draw every session to one engine. A request that continues no earlier prompt is a new session. An engine on which more
seconds of sessions were placed than on the least used candidate, beyond what chance (two standard deviations) explains,
is charged the difference, up to what its hit on the shared prefix saves: then it has no advantage, and load decides.
That pays for copying a hot prefix to another engine once, moves no session that exists, and never outweighs a queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, inf, sqrt

from router.blocks import BlockLadder
from router.cost import (
    ANSWER_MIN_S,
    DEFAULT_SPEED,
    Ewma,
    ModelFacts,
    Promise,
    Speed,
    Unfit,
    Work,
    decode_danger_s,
    eviction_s,
    faded_s,
    harm_s,
    prefill_s,
    typical_speed,
)
from router.decision import EndpointStatus, NoRoute, NoRouteReason, RouteDecision, RouteRequest, Row
from router.endpoints import (
    Ending,
    Endpoint,
    EngineSpeed,
    Finish,
    HopTable,
    LoadNews,
    Ticket,
)
from router.held import UNFIT, correct, note
from router.prefix_index import DEFAULT_MAX_BYTES, PathNews, PrefixIndex, Stored
from router.pulls import offer_pulls
from router.site import Site


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The settings of a router, each with its reason."""

    ladder: BlockLadder = field(default_factory=BlockLadder.graded)
    """Where the blocks of the chains end; the hasher's ladder."""
    index_max_bytes: int = DEFAULT_MAX_BYTES
    hops: HopTable = field(default_factory=HopTable)
    default_speed: EngineSpeed = DEFAULT_SPEED
    tie_s: float = 0.001
    """Endpoints this close are equal: predictions are not better than a millisecond."""
    promise: Promise = field(default_factory=Promise)
    kv_reuse_ratio: float = 0.25
    """Share of evicted KV that would have been asked for again. An assumption: the oldest KV returns least often."""
    spread_horizon_s: float = 600.0
    """How long a placed session weighs: most come back within 5 to 10 minutes (router notes, section 0)."""
    default_output_tokens: int = 256
    """Expected output of a model that has answered nothing yet; afterwards its own mean."""
    share: bool = False
    """Keep news for sibling processes (`take_news`)."""


@dataclass(frozen=True, slots=True)
class News:
    """What one process tells its siblings: loads as totals, and what happened to prefixes since the last news."""

    loads: tuple[LoadNews, ...] = ()
    paths: tuple[PathNews, ...] = ()
    withdrawn: tuple[tuple[str, int, int], ...] = ()
    """(endpoint id, last block, its stamp in us) of stores that came to nothing."""
    lost: tuple[tuple[str, int], ...] = ()
    """(endpoint id, us): everything last used up to then is gone."""


# Weight of one report in the token ratios and in an endpoint's trust: about five reports to follow a change.
_REPORT_WEIGHT = 0.2

# An engine that reports under this share of the cached tokens we predicted has lost the prefix: less is block rounding.
_LOST_RATIO = 0.5

# A held prefix under this is not checked: engines cache in blocks of up to some hundred tokens, and little is at stake.
_CHECK_MIN_BYTES = 2_048

# An engine is never trusted less than this, so that it can win trust back.
_TRUST_MIN_RATIO = 0.05

# A queue up to this share of the time to first token still leaves a usable sample of the prefill.
_CLEAN_QUEUE_RATIO = 0.25

# Stores, withdrawals and losses kept for siblings between two rounds of news (2 ms): beyond, the oldest are dropped.
_NEWS_MAX_COUNT = 4_096

# The total of an endpoint that cannot be picked.
_NEVER_S = inf

# What a prompt without blocks finds.
_NOTHING = Stored(0, None)

# The decay of placed sessions is applied in steps of this share of the horizon.
_DECAY_STEP_RATIO = 0.125


class Router:
    """Chooses endpoints. Not thread-safe: one per event loop. `now_s` is a monotonic clock that siblings share."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._index = PrefixIndex(config.ladder, config.index_max_bytes)
        self._sites: dict[str, Site] = {}
        self._groups: dict[str, tuple[Site, ...]] = {}
        self._models: dict[str, ModelFacts] = {}
        self._pulls = False
        self._in_flight: dict[int, Site] = {}
        self._ticket_count = 0
        self._service_s = Ewma()
        self._decayed_s = 0.0
        self._dirty: set[str] = set()
        self._paths: deque[PathNews] = deque(maxlen=_NEWS_MAX_COUNT)
        self._withdrawn: deque[tuple[str, int, int]] = deque(maxlen=_NEWS_MAX_COUNT)
        self._lost: deque[tuple[str, int]] = deque(maxlen=_NEWS_MAX_COUNT)

    # --- endpoints ---------------------------------------------------------------------------------------------------

    def set_endpoints(self, endpoints: Sequence[Endpoint], now_s: float) -> None:
        """These are the endpoints from now on. One with the same id, url and incarnation keeps its load, breaker,
        speed and prefixes; any other starts empty. Requests in flight on one that is gone still end through
        `finished`.
        """
        sites: dict[str, Site] = {}
        for endpoint in endpoints:
            old = self._sites.get(endpoint.endpoint_id)
            same = old and (old.endpoint.url, old.endpoint.incarnation) == (endpoint.url, endpoint.incarnation)
            if old is not None and same:
                old.describe(endpoint, self._config.hops.hop_s(endpoint))
                sites[endpoint.endpoint_id] = old
                continue
            self._index.forget(endpoint.endpoint_id)
            holdings = self._index.holdings(endpoint.endpoint_id)
            hop_s = self._config.hops.hop_s(endpoint)
            sites[endpoint.endpoint_id] = Site(endpoint, holdings, self._config.default_speed, hop_s)
        for endpoint_id in self._sites.keys() - sites.keys():
            self._index.forget(endpoint_id)
        self._sites = sites
        groups: dict[str, list[Site]] = {}
        for site in sites.values():
            for model in site.endpoint.models:
                groups.setdefault(model, []).append(site)
        self._groups = {model: tuple(group) for model, group in groups.items()}
        self._models = {model: self._models.get(model) or ModelFacts() for model in groups}
        self._pulls = any(site.pull_s_per_token is not None for site in sites.values())
        self._guess_speeds()

    @property
    def models(self) -> frozenset[str]:
        """Every model that some endpoint serves, whether it can be picked now or not."""
        return frozenset(self._groups)

    def status(self, now_s: float) -> tuple[EndpointStatus, ...]:
        """Every endpoint, for telemetry."""
        return tuple(
            EndpointStatus(
                endpoint=site.endpoint,
                breaker=site.breaker.state(now_s),
                load=site.load.view(now_s),
                speed=site.endpoint.speed or site.learner.speed(),
                speed_known=site.endpoint.speed is not None or site.learner.measured,
                held_blocks=len(site.holdings),
                held_tokens=int(site.holdings.held_bytes / site.bytes_per_token),
                trust_ratio=site.trust_ratio,
            )
            for site in self._sites.values()
        )

    @property
    def index_bytes(self) -> int:
        """Estimated memory of the prefix index."""
        return self._index.size_bytes

    def broken(self) -> tuple[Endpoint, ...]:
        """Endpoints whose breaker is open: the ones a health probe should look at."""
        return tuple(site.endpoint for site in self._sites.values() if site.breaker.opened)

    def health(self, endpoint_id: str, healthy: bool, now_s: float) -> None:
        """A health probe's answer for a broken endpoint. Touches nothing but the time of its next trial."""
        site = self._sites.get(endpoint_id)
        if site is not None:
            site.breaker.health(healthy, now_s)

    # --- the pick ----------------------------------------------------------------------------------------------------

    def route(self, request: RouteRequest, now_s: float, dice: Callable[[], float]) -> RouteDecision | NoRoute:
        """Pick an endpoint and count the load there. `dice()` is uniform in [0, 1). Every decision's ticket must end in
        exactly one `finished`.
        """
        group = self._groups.get(request.model)
        if group is None:
            return NoRoute(NoRouteReason.NO_SUCH_MODEL, None)
        work = self._work(request)
        rows, best_s, continues, sources = self._offers(group, request, work, now_s)
        if best_s == _NEVER_S:
            return self._no_route(group, rows, now_s)
        if continues is False:
            best_s = self._spread(group, rows, work)
        chosen = self._draw(group, rows, best_s, dice)
        made = chosen, tuple(rows), not continues, sources.get(chosen)
        return self._pick(request, work, group[chosen], made, now_s)

    def _work(self, request: RouteRequest) -> Work:
        """The request's input as engines would count it, and the output to expect."""
        facts = self._models[request.model]
        learned = facts.output_tokens
        expected = learned.value if learned.count else self._config.default_output_tokens
        told = request.told
        input_tokens = told.input_tokens if told else max(1, int(request.input_tokens * facts.input_ratio))
        return Work(input_tokens, min(request.output_tokens, int(expected) + 1), expected)

    def _offers(
        self, group: tuple[Site, ...], request: RouteRequest, work: Work, now_s: float
    ) -> tuple[list[Row], float, bool | None, dict[int, Site]]:
        """`_weigh`, with a fetch of KV where that is cheaper: whence, by the index of the row."""
        rows, best_s, continues = self._weigh(group, request, work, now_s)
        if not self._pulls or best_s == _NEVER_S:
            return rows, best_s, continues, {}
        sources = offer_pulls(group, rows, work, self._config.promise, now_s)
        return rows, min([row[4] for row in rows]), continues, sources

    def _cached(
        self, group: tuple[Site, ...], request: RouteRequest, input_tokens: int, now_s: float
    ) -> tuple[list[int], bool | None]:
        """The cached tokens to expect on each endpoint (UNFIT: it cannot be picked), and whether the longest prefix
        that one holds is the end of an earlier prompt (None: nobody holds any).
        """
        hashes, prompt_bytes = request.chain
        first = hashes[0] if hashes else 0  # 0 is no block; most endpoints hold nothing of a prompt
        exclude, ends_bytes = request.exclude, self._config.ladder.ends_bytes
        found: list[int] = []
        longest, continues = 0, None
        for site in group:
            breaker = site.breaker
            cached = 0
            if (site.closed is not None or breaker.opened or now_s < breaker.ready_s or exclude) and site.unfit(
                exclude, now_s
            ) is not None:
                cached = UNFIT
            elif first in site.holdings.parents:
                held = site.holdings.held_blocks(hashes)
                # The held part of the prompt, as far as this engine's reports bear out; one token is always computed.
                cached = int(input_tokens * (ends_bytes[held - 1] / prompt_bytes) * site.trust_ratio)
                if cached >= input_tokens:
                    cached = input_tokens - 1
                if held > longest:
                    longest, continues = held, site.holdings.last_use_us(hashes[held - 1]) is not None
            found.append(cached)
        correct(found, group, request, ends_bytes, (input_tokens, now_s))
        return found, continues

    def _weigh(
        self, group: tuple[Site, ...], request: RouteRequest, work: Work, now_s: float
    ) -> tuple[list[Row], float, bool | None]:
        """What the work costs on each endpoint, the least of it, and whether it continues a prompt (`_cached`).

        One loop with few calls: it is a tenth of what a short request costs. The terms are those of `cost`'s docstring;
        tests/properties has the same rule written plainly and holds this to it, to the last bit.
        """
        input_tokens, output_tokens, answer_tokens = work
        promise, kv_reuse_ratio = self._config.promise, self._config.kv_reuse_ratio
        rows: list[Row] = []
        best_s = _NEVER_S
        found, continues = self._cached(group, request, input_tokens, now_s)
        for site, cached in zip(group, found, strict=True):
            if cached == UNFIT:
                rows.append((site.endpoint, site.unfit(request.exclude, now_s), 0, (), _NEVER_S))
                continue
            new_tokens = input_tokens - cached
            speed, load = site.speed, site.load
            own_s = speed.prefill_overhead_s + new_tokens / speed.prefill_tok_per_s
            token2_s = speed.prefill_s_per_token2
            if token2_s:
                own_s += token2_s * new_tokens * (cached + new_tokens / 2)
            queue_s = slowdown_s = evicted_s = recent_s = 0.0
            step_s = speed.decode_s_per_token
            kv_tokens = load.kv_tokens
            answer_s = max(answer_tokens * step_s, ANSWER_MIN_S)
            if kv_tokens:
                queue_s = load.remaining_s(now_s)  # first: it may move prefills that are due to the decodes
                # Who waits now decodes beside this request later. Were they not counted, an engine that has fewer
                # running than the others would look so until their prefills end, and take all that comes meanwhile.
                others = load.request_count
                step_s += others * speed.decode_s_per_running
                slowdown_s = others * harm_s(promise, step_s, own_s, answer_tokens)
                recent_s = faded_s(site.prefills_s, site.prefills_at_s, answer_s, now_s)  # alone it would say nothing
            decode_s = decode_danger_s(promise, step_s, recent_s, answer_s)
            capacity = speed.kv_capacity_tokens
            if capacity is not None:
                over_tokens = kv_tokens + input_tokens + output_tokens - capacity
                if over_tokens > 0 and kv_tokens:
                    # The requests in flight free their KV over about one answer's time.
                    queue_s += output_tokens * step_s * over_tokens / kv_tokens
                resident_tokens = site.holdings.held_bytes / site.bytes_per_token
                evicted_s = eviction_s(speed, resident_tokens, new_tokens + output_tokens, kv_reuse_ratio)
            hop_s = site.hop_s
            work_s = promise.work_ratio * own_s
            terms = (queue_s, own_s, decode_s, hop_s, slowdown_s, work_s, evicted_s, 0.0, 0.0)
            total_s = queue_s + own_s + decode_s + hop_s + slowdown_s + work_s + evicted_s
            rows.append((site.endpoint, None, cached, terms, total_s))
            if total_s < best_s:  # noqa: PLR1730 - min() would cost 60 ns per endpoint on the hot path
                best_s = total_s
        return rows, best_s, continues

    def _spread(self, group: tuple[Site, ...], rows: list[Row], work: Work) -> float:
        """Charge a new session, in `rows`, for the sessions placed before (module docstring). Returns the new best."""
        least_s = min([site.placed_s for site, row in zip(group, rows, strict=True) if row[1] is None])
        for index, (endpoint, unfit, cached, terms, total_s) in enumerate(rows):
            placed_s = group[index].placed_s
            if not cached or placed_s <= least_s:
                continue
            # Two sums of about n and m sessions of one length s differ by chance by about s * sqrt(n + m).
            over_s = placed_s - least_s - 2 * sqrt((placed_s + least_s) * self._service_s.value)
            if over_s > 0:
                saved_s = prefill_s(group[index].speed, work.input_tokens, 0) - terms[1]
                saved_s += self._config.promise.work_ratio * saved_s
                spread_s = min(over_s, saved_s)
                rows[index] = (endpoint, unfit, cached, (*terms[:-1], spread_s), total_s + spread_s)
        return min([row[4] for row in rows])

    def _draw(self, group: tuple[Site, ...], rows: list[Row], best_s: float, dice: Callable[[], float]) -> int:
        """One of the cheapest: among ties the one with the least placed work, then by the dice."""
        limit_s = best_s + self._config.tie_s
        ties = [index for index, row in enumerate(rows) if row[4] <= limit_s]
        if len(ties) == 1:
            return ties[0]
        least_s = min([group[index].placed_s for index in ties])
        ties = [index for index in ties if group[index].placed_s <= least_s]
        return ties[int(dice() * len(ties))]

    def _pick(
        self,
        request: RouteRequest,
        work: Work,
        site: Site,
        made: tuple[int, tuple[Row, ...], bool, Site | None],
        now_s: float,
    ) -> RouteDecision:
        """Count the load, store the prefix, and hand out the decision."""
        chosen, rows, new_session, source = made
        _, _, cached, terms, _ = rows[chosen]
        queue_s, own_s, _, hop_s = terms[:4]
        model, chain, asked_tokens, _, _, streamed, told = request
        hashes = chain.hashes
        input_tokens, output_tokens, answer_tokens = work
        endpoint = site.endpoint
        stamp_us = int(now_s * 1e6)
        stored = _NOTHING
        if hashes:
            stored = self._index.store(endpoint.endpoint_id, hashes, stamp_us, site.capacity_bytes())
        held = stored.held_blocks
        self._ticket_count += 1
        # In the order of its fields: to name each of the twenty would cost three times as much.
        ticket = Ticket(
            self._ticket_count, endpoint.endpoint_id, endpoint.incarnation, model, own_s, queue_s,
            input_tokens + output_tokens, input_tokens, cached,
            self._checkable(site, request, stored, now_s),
            chain.total_bytes, 0 if told else asked_tokens, hashes[-1] if hashes else 0, held < len(hashes),
            stored.last_use_us, stamp_us, now_s, now_s, site.breaker.picked(self._ticket_count), streamed,
        )  # fmt: skip
        site.load.take(ticket)
        self._in_flight[ticket.ticket_id] = site
        answer_s = max(answer_tokens * site.speed.decode_s_per_token, ANSWER_MIN_S)
        site.prefills_s = faded_s(site.prefills_s, site.prefills_at_s, answer_s, now_s) + own_s
        site.prefills_at_s = now_s
        if source is not None:
            site.link_free_s = source.link_free_s = now_s + terms[7]
        service_s = own_s + output_tokens * site.speed.decode_s_per_token
        self._service_s.add(service_s)
        if new_session:
            if now_s - self._decayed_s >= self._config.spread_horizon_s * _DECAY_STEP_RATIO:
                self._decay(now_s)
            site.placed_s += service_s
        if self._config.share:
            self._dirty.add(endpoint.endpoint_id)
            if hashes:
                base = hashes[held - 1] if held else 0
                self._paths.append(PathNews(endpoint.endpoint_id, base, held, hashes[held:], stamp_us))
        ttft_s = queue_s + own_s + hop_s + terms[7]
        note(site, request, ttft_s, now_s)
        pull_from = None if source is None else source.endpoint
        return RouteDecision(endpoint, ticket, cached, ttft_s, new_session, self._config.tie_s, pull_from, rows)

    def _checkable(self, site: Site, request: RouteRequest, stored: Stored, now_s: float) -> float:
        """Share of the prompt that the engine should find cached; 0: it held nothing, or its report would not tell."""
        told, chain = request.told, request.chain
        if told is not None and site.endpoint.endpoint_id in told.held_ratio:
            return told.held_ratio[site.endpoint.endpoint_id]
        held_bytes = self._config.ladder.ends_bytes[stored.held_blocks - 1] if stored.held_blocks else 0
        if held_bytes < _CHECK_MIN_BYTES or not site.load.settled(stored.last_use_us, now_s):
            return 0.0
        return held_bytes / chain.total_bytes

    def _decay(self, now_s: float) -> None:
        """Let placed work fade, in steps, so that every endpoint's is of the same age."""
        keep = exp((self._decayed_s - now_s) / self._config.spread_horizon_s)
        self._decayed_s = now_s
        for site in self._sites.values():
            site.placed_s *= keep

    def _no_route(self, group: tuple[Site, ...], rows: list[Row], now_s: float) -> NoRoute:
        reasons = [row[1] for row in rows if row[1] is not None]
        waits = [
            max(site.breaker.ready_s - now_s, self._config.default_speed.prefill_overhead_s)
            for site, reason in zip(group, reasons, strict=True)
            if reason in (Unfit.BUSY, Unfit.BROKEN)
        ]
        reason = NoRouteReason.ALL_DRAINING
        if Unfit.BUSY in reasons:
            reason = NoRouteReason.ALL_BUSY
        elif Unfit.BROKEN in reasons:
            reason = NoRouteReason.ALL_BROKEN
        elif Unfit.EXCLUDED in reasons:
            reason = NoRouteReason.EXCLUDED
        elif Unfit.DRAINING not in reasons:
            reason = NoRouteReason.NO_SUCH_MODEL
        unfit = tuple((row[0].endpoint_id, why) for row, why in zip(rows, reasons, strict=True))
        return NoRoute(reason, min(waits, default=None), unfit)

    # --- what became of it -------------------------------------------------------------------------------------------

    def sent(self, ticket: Ticket, now_s: float) -> None:
        """The request's bytes are on their way. The time to first token is counted from here."""
        ticket.sent_s = now_s

    def first_token(self, ticket: Ticket, now_s: float) -> None:
        """The first token came: the prefill is done, the request decodes."""
        site = self._in_flight.get(ticket.ticket_id)
        if site is None or ticket.first_token_s is not None:
            return
        ticket.first_token_s = now_s
        site.load.start_decode(ticket, now_s)
        site.breaker.first_token(ticket)
        if self._config.share:
            self._dirty.add(ticket.endpoint_id)

    def finished(self, ticket: Ticket, report: Finish, now_s: float) -> bool:
        """The attempt ended, however it did: releases its load, feeds the breaker, learns. False the second time."""
        site = self._in_flight.pop(ticket.ticket_id, None)
        if site is None:
            return False
        site.load.release(ticket, now_s)
        if self._config.share:
            self._dirty.add(ticket.endpoint_id)
        opened = site.breaker.ended(ticket, report, now_s)
        if self._sites.get(ticket.endpoint_id) is not site:
            return True
        if opened and report.outcome is Ending.UNREACHABLE:
            # It died, and its KV with it. A restart too quick to be seen here shows in the first `cached_tokens`.
            self._forget_idle(ticket.endpoint_id, int(now_s * 1e6))
        elif ticket.first_token_s is None and ticket.speculative and report.outcome is not Ending.COMPLETED:
            self._withdraw(ticket)
        if report.outcome in (Ending.COMPLETED, Ending.CANCELLED):
            self._learn(site, ticket, report, now_s)
        return True

    def _withdraw(self, ticket: Ticket) -> None:
        """The prompt was never prefilled: what the pick stored is not there."""
        self._index.withdraw(ticket.endpoint_id, ticket.leaf, ticket.stamp_us)
        if self._config.share:
            self._withdrawn.append((ticket.endpoint_id, ticket.leaf, ticket.stamp_us))

    def _forget_idle(self, endpoint_id: str, since_us: int) -> None:
        self._index.forget_idle(endpoint_id, since_us)
        if self._config.share:
            self._lost.append((endpoint_id, since_us))

    def _learn(self, site: Site, ticket: Ticket, report: Finish, now_s: float) -> None:
        facts = self._models.get(ticket.model)
        if facts is not None:
            facts.learn(ticket, report)
        if report.input_tokens:
            if ticket.prompt_bytes:
                ratio = min(max(ticket.prompt_bytes / report.input_tokens, 1.0), 64.0)
                site.bytes_per_token += _REPORT_WEIGHT * (ratio - site.bytes_per_token)
            if report.cached_tokens is not None and ticket.held_ratio:
                self._check_cached(site, ticket, report.cached_tokens / report.input_tokens)
        first_token_s = ticket.first_token_s if ticket.streamed else None
        if site.endpoint.speed is None and first_token_s is not None and report.outcome is Ending.COMPLETED:
            self._learn_speed(site, ticket, report, (first_token_s, now_s))

    def _check_cached(self, site: Site, ticket: Ticket, cached_ratio: float) -> None:
        """Compare what the engine found cached with what was predicted (both as shares of the prompt).

        An engine evicts in the order of last use. So when the prefix of a continued prompt is gone, everything that was
        idle for longer is gone too; and an engine that keeps finding less than predicted is trusted less.
        """
        found = min(cached_ratio / ticket.held_ratio, 1.0)
        site.trust_ratio = max(site.trust_ratio + _REPORT_WEIGHT * (found - site.trust_ratio), _TRUST_MIN_RATIO)
        if found < _LOST_RATIO and ticket.previous_use_us is not None:
            self._forget_idle(ticket.endpoint_id, ticket.previous_use_us)

    def _learn_speed(self, site: Site, ticket: Ticket, report: Finish, times_s: tuple[float, float]) -> None:
        first_token_s, ended_s = times_s
        tokens = report.input_tokens or ticket.input_tokens
        cached = report.cached_tokens
        if cached is None:
            cached = ticket.predicted_cached_tokens
        ttft_s = first_token_s - ticket.sent_s - site.hop_s
        was_measured = site.learner.measured
        if ticket.queue_s <= _CLEAN_QUEUE_RATIO * ttft_s:
            site.learner.prefilled(max(1, tokens - cached), ttft_s - ticket.queue_s)
        if report.output_tokens:
            site.learner.decoded(report.output_tokens - 1, ended_s - first_token_s)
        if site.learner.measured and not was_measured:
            self._guess_speeds()

    def _guess_speeds(self) -> None:
        """An engine of which nothing is known is taken to be its pool's median."""
        known: dict[str, list[Speed]] = {}
        for site in self._sites.values():
            if site.endpoint.speed is not None or site.learner.measured:
                known.setdefault(site.endpoint.pool, []).append(site.speed)
        for site in self._sites.values():
            if site.endpoint.speed is None and not site.learner.measured:
                site.learner.set_prior(typical_speed(known.get(site.endpoint.pool, ()), self._config.default_speed))

    # --- siblings ----------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Is there something that siblings have not heard?"""
        return bool(self._dirty or self._paths or self._withdrawn or self._lost)

    def take_news(self, now_s: float, *, everything: bool = False) -> News:
        """What siblings should hear: what changed since the last call, or `everything`: also each load in flight."""
        names = [name for name, site in self._sites.items() if site.load.own] if everything else []
        loads = tuple(
            self._sites[name].load.news(name, now_s) for name in self._dirty.union(names) if name in self._sites
        )
        news = News(loads, tuple(self._paths), tuple(self._withdrawn), tuple(self._lost))
        for queue in (self._dirty, self._paths, self._withdrawn, self._lost):
            queue.clear()
        return news

    def hear(self, peer: str, news: News, now_s: float) -> list[tuple[str, int]]:
        """Take over a sibling's news. Returns the paths (endpoint id, last block) whose beginning is not known here."""
        for load in news.loads:
            site = self._sites.get(load.endpoint_id)
            if site is not None:
                site.load.hear(peer, load, now_s)
        for endpoint_id, since_us in news.lost:
            if endpoint_id in self._sites:
                self._index.forget_idle(endpoint_id, since_us)
        missing: list[tuple[str, int]] = []
        for path in news.paths:
            site = self._sites.get(path.endpoint_id)
            if site is not None and not self._index.learn(path, site.capacity_bytes()):
                missing.append((path.endpoint_id, path.tail[-1] if path.tail else path.base))
        for endpoint_id, leaf, stamp_us in news.withdrawn:
            if endpoint_id in self._sites:
                self._index.withdraw(endpoint_id, leaf, stamp_us)
        return missing

    def whole_path(self, endpoint_id: str, leaf: int) -> PathNews | None:
        """The whole path to a block, for a sibling that lacks its beginning; None where it is not held."""
        site = self._sites.get(endpoint_id)
        last_use_us = site.holdings.last_use_us(leaf) if site is not None else None
        if site is None or last_use_us is None:
            return None
        return PathNews(endpoint_id, 0, 0, site.holdings.path(leaf), last_use_us)

    def whole_paths(self) -> Iterator[PathNews]:
        """Every path that is held when its turn comes, for a sibling that has just started."""
        leaves = [(name, leaf) for name, site in self._sites.items() for leaf in site.holdings.leaves()]
        for endpoint_id, leaf in leaves:
            path = self.whole_path(endpoint_id, leaf)
            if path is not None:
                yield path

    def forget_peer(self, peer: str) -> None:
        """A sibling is gone: its load no longer counts."""
        for site in self._sites.values():
            site.load.hear(peer, None, 0.0)

    def expire_peers(self, before_s: float) -> None:
        """Drop the load that no sibling has repeated since `before_s`."""
        for site in self._sites.values():
            site.load.expire(before_s)
