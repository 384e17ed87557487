"""The router of pools whose engines have roles: one engine for the whole request, or two that share it.

Owns: which endpoints may take which part, and counting both parts of a pair at the pick. Does not own: the price of a
pair (`pairing`), that of an engine for its part, the index, or the load (`route`, which this extends: one object, so
that both kinds of pick see each other's load). A model whose endpoints have no roles is routed as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.cost import Unfit, Work
from router.decision import NoRoute, NoRouteReason, RouteDecision, RouteRequest, Row
from router.endpoints import Endpoint
from router.held import correct
from router.pairing import (
    Leg,
    PairConfig,
    PairDecision,
    PairOffer,
    best_pair,
    decode_leg,
    is_worth,
    may_split,
    prefill_leg,
)
from router.route import Router, RouterConfig
from router.site import Site

Sites = tuple[Site, ...]


class PairingRouter(Router):
    """Chooses endpoints, and pairs of them. Not thread-safe: one per event loop."""

    def __init__(self, config: RouterConfig, pairs: PairConfig | None = None) -> None:
        super().__init__(config)
        self._pairs = pairs or PairConfig()
        self._legs: dict[str, tuple[Sites, Sites]] = {}
        """By model, where there are both: the engines that only prefill, and those that only decode."""
        self._supposed: list[int] | None = None
        """While a leg is weighed: the tokens that each engine is to be taken to hold."""

    def set_endpoints(self, endpoints: Sequence[Endpoint], now_s: float) -> None:
        """These are the endpoints from now on (`Router.set_endpoints`)."""
        super().set_endpoints(endpoints, now_s)
        legs: dict[str, tuple[Sites, Sites]] = {}
        for model, group in self._groups.items():
            for site in group:
                if not site.endpoint.serves_alone and site.closed is None:
                    site.closed = Unfit.ROLE
            prefills = tuple(site for site in group if site.endpoint.role == "prefill")
            decodes = tuple(site for site in group if site.endpoint.role == "decode")
            if prefills and decodes:
                legs[model] = prefills, decodes
        self._legs = legs

    def route_split(
        self, request: RouteRequest, now_s: float, dice: Callable[[], float], choices: int
    ) -> PairDecision | RouteDecision | NoRoute:
        """As `route`, or two engines where both roles exist and a pair is cheaper. Both its tickets must end."""
        legs = self._legs.get(request.model)
        if legs is None:
            return self._alone(request, now_s, dice)
        work = self._work(request)
        prefills, decodes = (tuple(site for site in part if _fits(site, request.exclude, now_s)) for part in legs)
        decodes = tuple(site for site in decodes if may_split(site.endpoint, choices))
        if prefills and decodes:
            offer = self._offer(prefills, decodes, request, work, now_s)
            if offer is not None:
                group = self._groups[request.model]
                rows, alone_s, continues, _ = self._offers(group, request, work, now_s)
                if is_worth(offer, alone_s, self._pairs):
                    return self._pick_two(request, work, offer, (rows, not continues), now_s)
        return self._alone(request, now_s, dice)

    def _offer(
        self, prefills: Sites, decodes: Sites, request: RouteRequest, work: Work, now_s: float
    ) -> PairOffer | None:
        """The cheapest pair of these. Each engine is weighed for its part by the router's own rule."""
        first = [
            prefill_leg(site.endpoint, held, row[3])
            for site, held, row in self._weighed(prefills, None, request, work, now_s)
        ]
        alone = self._weighed(decodes, None, request, work, now_s)
        come = self._weighed(decodes, work.input_tokens - 1, request, work, now_s)
        then = [
            decode_leg(site.endpoint, held, row[3], later[3])
            for (site, held, row), (_, _, later) in zip(alone, come, strict=True)
        ]
        return best_pair(first, then, work.input_tokens, self._pairs)

    def _weighed(
        self, sites: Sites, supposed: int | None, request: RouteRequest, work: Work, now_s: float
    ) -> list[tuple[Site, int, Row]]:
        """Each of the sites with what it holds, or is `supposed` to hold, and its row."""
        held = [self._held_tokens(site, request, work.input_tokens, now_s) for site in sites]
        self._supposed = held if supposed is None else [supposed] * len(sites)
        try:
            rows, _, _ = self._weigh(sites, request, work, now_s)
        finally:
            self._supposed = None
        return list(zip(sites, held, rows, strict=True))

    def _cached(
        self, group: Sites, request: RouteRequest, input_tokens: int, now_s: float
    ) -> tuple[list[int], bool | None]:
        if self._supposed is not None:
            return self._supposed, None
        return super()._cached(group, request, input_tokens, now_s)

    def _alone(self, request: RouteRequest, now_s: float, dice: Callable[[], float]) -> RouteDecision | NoRoute:
        """One engine. Where all there are only do a part, the model exists all the same, and waiting may help."""
        made = self.route(request, now_s, dice)
        group = self._groups.get(request.model)
        if group is None or not isinstance(made, NoRoute) or made.reason is not NoRouteReason.NO_SUCH_MODEL:
            return made
        waits = [site.breaker.ready_s - now_s for site in group if not site.breaker.admits(now_s)]
        reason = NoRouteReason.EXCLUDED if request.exclude else NoRouteReason.ALL_DRAINING
        if waits:
            reason = NoRouteReason.ALL_BROKEN if any(site.breaker.opened for site in group) else NoRouteReason.ALL_BUSY
        return NoRoute(reason, max(0.0, min(waits)) if waits else None, made.unfit)

    def _pick_two(
        self, request: RouteRequest, work: Work, offer: PairOffer, made: tuple[list[Row], bool], now_s: float
    ) -> PairDecision:
        """Count both. The decode leg is counted as running at once: while it waits for its KV it keeps nobody waiting,
        and how long it waits says nothing of its engine's prefill.
        """
        rows, new_session = made
        endpoint, held, _ = offer.decode
        first, then = (self._sites[leg.endpoint.endpoint_id] for leg in (offer.prefill, offer.decode))
        chosen = next(index for index, row in enumerate(rows) if row[0] is endpoint)
        rows[chosen] = _row(offer.fetching)
        made_then = (chosen, tuple(rows), new_session, first)
        decode = self._pick(request._replace(streamed=False), work, then, made_then, now_s)
        rows[chosen] = (endpoint, None, held, offer.terms_s, offer.total_s)
        decode = decode._replace(rows=tuple(rows), predicted_ttft_s=offer.ttft_s)
        made_first = (0, (_row(offer.prefill),), new_session, None)
        prefill = self._pick(request._replace(streamed=True), work._replace(output_tokens=0), first, made_first, now_s)
        return PairDecision(decode, prefill, offer)

    def _held_tokens(self, site: Site, request: RouteRequest, input_tokens: int, now_s: float) -> int:
        """How much of the prompt an endpoint holds, whatever its role: the rule of `Router._cached` for one."""
        chain, ends_bytes = request.chain, self._config.ladder.ends_bytes
        found = [0]
        if chain.hashes and chain.hashes[0] in site.holdings.parents:
            held_bytes = ends_bytes[site.holdings.held_blocks(chain.hashes) - 1]
            found = [min(int(input_tokens * (held_bytes / chain.total_bytes) * site.trust_ratio), input_tokens - 1)]
        correct(found, (site,), request, ends_bytes, (input_tokens, now_s))
        return found[0]


def _row(leg: Leg) -> Row:
    return leg.endpoint, None, leg.held_tokens, leg.terms_s, leg.total_s


def _fits(site: Site, exclude: frozenset[str], now_s: float) -> bool:
    """May it be picked now for the part of a request that its role is for?"""
    closed = site.closed not in (None, Unfit.ROLE)
    return not closed and site.endpoint.endpoint_id not in exclude and site.breaker.admits(now_s)
