"""What is asked of the router and what it answers: values that explain themselves.

Owns: `RouteRequest`, `RouteDecision`, `NoRoute`, `EndpointStatus`. Does not own: how they are made (`route`) or the
terms' formulas (`cost`). Decisions keep raw tuples and build their explanation only when somebody reads it: nearly
nobody does, and the pick is on the hot path. No part of a request's content is in here, only counts and endpoint
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from router.blocks import Chain
from router.cost import TERMS, Candidate, Unfit
from router.endpoints import BreakerState, Endpoint, EngineSpeed, LoadView, Ticket


class Told(NamedTuple):
    """A prompt as the model's engines count and hold it."""

    input_tokens: int
    held_ratio: Mapping[str, float]
    """By endpoint id, the share of the prompt that its engine's own events say it holds; those that are not in it are
    judged by the router's history.
    """


class RouteRequest(NamedTuple):
    """What is to be routed. `exclude` names endpoints that an earlier attempt of the same request has failed on."""

    model: str
    chain: Chain
    input_tokens: int
    """The caller's estimate; corrected per model by what engines report."""
    output_tokens: int
    """The most it may answer with."""
    exclude: frozenset[str] = frozenset()
    streamed: bool = True
    """The caller will report the first token. False: the answer comes whole."""
    told: Told | None = None
    """What is known of the prompt beyond an estimate. None: nothing is."""


class NoRouteReason(StrEnum):
    """Why no endpoint can take the request. The values are metric labels."""

    NO_SUCH_MODEL = "no_such_model"
    ALL_DRAINING = "all_draining"
    ALL_BROKEN = "all_broken"
    ALL_BUSY = "all_busy"
    EXCLUDED = "excluded"


@dataclass(frozen=True, slots=True)
class NoRoute:
    """No endpoint. `retry_after_s` is when the first of them may be tried again; None: waiting does not help."""

    reason: NoRouteReason
    retry_after_s: float | None
    unfit: tuple[tuple[str, Unfit], ...] = ()
    """Every endpoint of the model and why not."""


# Candidates named in the one-line summary: a header should stay under 1 kB; the record has all.
_SUMMARY_MAX_COUNT = 8

# (endpoint, why it was unfit, cached tokens, seconds by term, their sum); the terms are empty where it was unfit
Row = tuple[Endpoint, Unfit | None, int, tuple[float, ...], float]


class RouteDecision(NamedTuple):
    """The pick, what it was predicted to cost, and every other candidate."""

    endpoint: Endpoint
    ticket: Ticket
    predicted_cached_tokens: int
    predicted_ttft_s: float
    new_session: bool
    tie_s: float
    pull_from: Endpoint | None
    """The engine from which it fetches KV, as the price assumes; None: from none."""
    rows: tuple[Row, ...]
    """Raw candidates in the order of the endpoints list; `candidates` explains them."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every endpoint of the model, cheapest first, the unfit last."""
        best = next(terms for endpoint, _, _, terms, _ in self.rows if endpoint is self.endpoint)
        found = [self._explain(row, best) for row in self.rows]
        return tuple(sorted(found, key=lambda each: (each.lost_by != "", each.total_s is None, each.total_s or 0.0)))

    def _explain(self, row: Row, best: tuple[float, ...]) -> Candidate:
        endpoint, unfit, cached, terms, _ = row
        if unfit is not None:
            return Candidate(endpoint.endpoint_id, unfit, None, None, unfit.value)
        lost_by = ""
        if endpoint is not self.endpoint:
            losses = [mine - theirs for mine, theirs in zip(terms, best, strict=True)]
            lost_by = "tie" if sum(losses) <= self.tie_s else TERMS[losses.index(max(losses))]
        return Candidate(endpoint.endpoint_id, None, cached, terms, lost_by)

    def summary(self) -> str:
        """One ASCII line for a header: the pick with its terms, then what each other one lost by. No content of the
        request.
        """
        first, *others = self.candidates
        terms = first.terms_s or ()
        named = " ".join(f"{name}={value:.4f}" for name, value in zip(TERMS, terms, strict=True) if value)
        tokens = f"cached={self.predicted_cached_tokens}/{self.ticket.input_tokens}"
        if self.pull_from is not None:
            tokens += f" pull_from={self.pull_from.endpoint_id}"
        parts = [f"pick={first.endpoint_id} total_s={sum(terms):.4f} {tokens} {named}"]
        for other in others[:_SUMMARY_MAX_COUNT]:
            cost = f" +{(other.total_s or 0.0) - sum(terms):.4f}" if other.terms_s is not None else ""
            parts.append(f"{other.endpoint_id}{cost} ({other.lost_by})")
        if len(others) > _SUMMARY_MAX_COUNT:
            parts.append(f"and {len(others) - _SUMMARY_MAX_COUNT} more")
        return "; ".join(parts).encode("ascii", "replace").decode()

    def record(self) -> dict[str, object]:
        """The whole decision, JSON-able; times in seconds."""
        return {
            "endpoint_id": self.endpoint.endpoint_id,
            "model": self.ticket.model,
            "input_tokens": self.ticket.input_tokens,
            "input_tokens_known": not self.ticket.asked_tokens,
            "predicted_cached_tokens": self.predicted_cached_tokens,
            "predicted_ttft_s": self.predicted_ttft_s,
            "new_session": self.new_session,
            "pull_from": None if self.pull_from is None else self.pull_from.endpoint_id,
            "candidates": [candidate.record() for candidate in self.candidates],
        }


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """One endpoint as this process sees it, for telemetry and `top`."""

    endpoint: Endpoint
    breaker: BreakerState
    load: LoadView
    speed: EngineSpeed
    speed_known: bool
    held_blocks: int
    held_tokens: int
    trust_ratio: float
