"""Whether a request is better prefilled on one engine and decoded on another, and on which two.

Owns: what of an engine's price is a prefill's and what is a decode's, the way of the KV between them in seconds, and
the cheapest pair. Does not own: the price itself (`route` weighs each engine for its part), how the two legs are sent
(the control plane), or any count of load (`pair_route` counts both legs at the pick and releases them on every ending).

    pair = prefill engine: queue + prefill of what it does not hold + hop + eviction
         + KV bytes of what the decode engine does not hold / rate of the link
         + decode engine: queue + one token + its answer's and others' danger + hop + eviction of the whole prompt

The terms are `cost`'s. A pair wins only by more than `min_gain_s` over the cheapest engine that does all of it, so when
little is new the engine that holds the prefix keeps the request: its prefill of the rest is cheaper than the transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from router.cost import TERMS
from router.decision import RouteDecision
from router.endpoints import Endpoint, EngineKind

# Kinds whose two engines can be told to meet (`controlplane.disaggregation` has a handshake for each).
PAIR_KINDS: Final[frozenset[EngineKind]] = frozenset({"vllm", "sglang", "trtllm"})

# Kinds whose decode engine keeps a prefix and fetches only the rest (vLLM nixl/pull_scheduler.py). The others fetch the
# whole prompt: SGLang without `--disaggregation-decode-enable-radix-cache`, and TensorRT-LLM.
_FETCHES_REST: Final[frozenset[EngineKind]] = frozenset({"vllm"})

# Terms that an engine which only prefills does not have: it writes no answer and runs none.
_NOT_OF_PREFILL: Final = frozenset({"decode", "slowdown", "spread"})

_PREFILL, _EVICTION, _QUEUE, _HOP, _FETCH = map(TERMS.index, ("prefill", "eviction", "queue", "hop", "fetch"))


@dataclass(frozen=True, slots=True)
class PairConfig:
    """The settings of the choice, each with its reason."""

    kv_bytes_per_token: int = 327_680
    """Of a model that the endpoints file says nothing of: Llama-3.1-70B (80 layers x 8 heads x 128 x 2 x 2 bytes)."""
    link_bytes_per_s: float = 11.1e9
    """Of a link that it says nothing of: 100 GbE, 40 GB in 3.6 s (router notes, section 0)."""
    min_gain_s: float = 0.05
    """A pair takes two engines and can fail twice, and predictions of a prefill err by tens of milliseconds."""


class Leg(NamedTuple):
    """An engine's part of a request, and what it costs there."""

    endpoint: Endpoint
    held_tokens: int
    """How much of the prompt it holds."""
    terms_s: tuple[float, ...]
    """In the order of `cost.TERMS`."""

    @property
    def total_s(self) -> float:
        """The sum of the terms."""
        return sum(self.terms_s)


class PairOffer(NamedTuple):
    """Two engines and what the request would cost on them."""

    prefill: Leg
    decode: Leg
    transfer_s: float

    @property
    def total_s(self) -> float:
        """The sum of everything."""
        return self.prefill.total_s + self.transfer_s + self.decode.total_s

    @property
    def terms_s(self) -> tuple[float, ...]:
        """In the order of `cost.TERMS`, over both engines; the transfer is what is fetched."""
        both = [mine + theirs for mine, theirs in zip(self.prefill.terms_s, self.decode.terms_s, strict=True)]
        both[_FETCH] += self.transfer_s
        return tuple(both)

    @property
    def fetching(self) -> Leg:
        """The decode leg with the way of its KV."""
        endpoint, held_tokens, terms_s = self.decode
        fetch_s = terms_s[_FETCH] + self.transfer_s
        return Leg(endpoint, held_tokens, (*terms_s[:_FETCH], fetch_s, *terms_s[_FETCH + 1 :]))

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.transfer_s + sum(
            leg.terms_s[term] for leg in (self.prefill, self.decode) for term in (_QUEUE, _PREFILL, _HOP)
        )


class PairDecision(NamedTuple):
    """A request that two engines share, with the load of each counted. Both tickets must end in one `finished`."""

    decode: RouteDecision
    prefill: RouteDecision
    offer: PairOffer

    def summary(self) -> str:
        """One ASCII line for a header, as `RouteDecision.summary`."""
        prefill, way_s = self.offer.prefill, self.offer.transfer_s
        first = f"prefill={prefill.endpoint.endpoint_id} prefill_total_s={prefill.total_s:.4f}"
        return f"{first} prefill_cached={prefill.held_tokens} transfer_s={way_s:.4f}; {self.decode.summary()}"

    def record(self) -> Mapping[str, object]:
        """The whole explanation, JSON-able."""
        offer = self.offer
        pair = {
            "prefill_endpoint_id": offer.prefill.endpoint.endpoint_id,
            "prefill_cached_tokens": offer.prefill.held_tokens,
            "prefill_terms": _named(offer.prefill),
            "transfer_s": offer.transfer_s,
            "decode_terms": _named(offer.decode),
            "total_s": offer.total_s,
        }
        return {**self.decode.record(), "pair": pair}


def _named(leg: Leg) -> dict[str, float]:
    return dict(zip((f"{name}_s" for name in TERMS), leg.terms_s, strict=True))


def prefill_leg(endpoint: Endpoint, held_tokens: int, terms_s: Sequence[float]) -> Leg:
    """The part of an engine that only prefills; `terms_s`: what the whole request would cost there."""
    own = (0.0 if name in _NOT_OF_PREFILL else term_s for name, term_s in zip(TERMS, terms_s, strict=True))
    return Leg(endpoint, held_tokens, tuple(own))


def decode_leg(endpoint: Endpoint, held_tokens: int, alone_s: Sequence[float], held_s: Sequence[float]) -> Leg:
    """The part of an engine that decodes; `alone_s`: what the whole request would cost there, `held_s`: the same if it
    held all of the prompt but one token, as it does once that has come. What has to make room for it is the same.
    """
    return Leg(endpoint, held_tokens, (*held_s[:_EVICTION], alone_s[_EVICTION], *held_s[_EVICTION + 1 :]))


def may_pair(prefill: Endpoint, decode: Endpoint) -> bool:
    """The two can pass KV to each other: one pool, one kind, one role each."""
    return (
        prefill.role == "prefill"
        and decode.role == "decode"
        and prefill.kind == decode.kind
        and prefill.kind in PAIR_KINDS
        and prefill.pool == decode.pool
    )


def may_split(decode: Endpoint, choices: int) -> bool:
    """A request for several choices of one prompt is several requests to an engine, and only one of them could fetch
    what was prefilled. SGLang's decode engines can be given it in no other way; they count rooms up for them.
    """
    return choices == 1 or not decode.serves_alone


def transfer_s(prefill: Endpoint, decode: Leg, input_tokens: int, config: PairConfig) -> float:
    """Seconds for the KV that the decode engine lacks, at the slower end's rate."""
    endpoint = decode.endpoint
    held = decode.held_tokens if endpoint.kind in _FETCHES_REST else 0
    size = prefill.kv_bytes_per_token or endpoint.kv_bytes_per_token or config.kv_bytes_per_token
    known = [rate for rate in (prefill.kv_link_bytes_per_s, endpoint.kv_link_bytes_per_s) if rate is not None]
    return (input_tokens - held) * size / min(known, default=config.link_bytes_per_s)


def best_pair(
    prefills: Sequence[Leg], decodes: Sequence[Leg], input_tokens: int, config: PairConfig
) -> PairOffer | None:
    """The cheapest two; None where no two of them can pass KV to each other."""
    first = sorted(((leg.total_s, leg) for leg in prefills), key=lambda each: each[0])
    best, best_s = None, inf
    for decode in decodes:
        decode_s = decode.total_s
        for prefill_s, prefill in first:
            if prefill_s + decode_s >= best_s:
                break  # and so do all that follow, before any transfer
            if may_pair(prefill.endpoint, decode.endpoint):
                offer = PairOffer(prefill, decode, transfer_s(prefill.endpoint, decode, input_tokens, config))
                if offer.total_s < best_s:
                    best, best_s = offer, offer.total_s
    return best


def is_worth(offer: PairOffer, alone_s: float, config: PairConfig) -> bool:
    """The pair is cheaper than the cheapest engine that does all of it (`alone_s`; infinite: there is none)."""
    return offer.total_s + config.min_gain_s < alone_s
