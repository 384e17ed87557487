"""From a decision of the limits to what a client is told, and what happens while the store of limits is gone.

Owns: the facts of a refusal (status, message, type, code, wait, retry or not), the values of the rate limit headers,
and what an outage policy makes of a refusal. Does not own: the arithmetic (`rate_limit`), the shape of the error body
(`adapters.openai_wire`), or which policy a tenant has (`tenancy`). Reference: gateway.md 2.1, 2.2, 2.12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.rate_limit import Admitted, Cost, LimitView, RefusalReason, Refused, Ticket
from controlplane.tenancy import Dimension, Limit, OutagePolicy

# How each dimension is called in a message, and the `type` of its error object (gateway.md 2.1: requests or tokens).
_NAMES = {
    Dimension.REQUESTS: "Request",
    Dimension.INPUT_TOKENS: "Input token",
    Dimension.OUTPUT_TOKENS: "Output token",
    Dimension.CONCURRENCY: "Concurrency",
}
_TYPES = {
    Dimension.REQUESTS: "requests",
    Dimension.INPUT_TOKENS: "tokens",
    Dimension.OUTPUT_TOKENS: "tokens",
    Dimension.CONCURRENCY: "requests",
}
# Periods that have a name; others are told in seconds.
_PERIODS = {1: "second", 60: "minute", 3_600: "hour", 86_400: "day"}


@dataclass(frozen=True, slots=True)
class RefusalFacts:
    """What the client is told. `retry_after_s` None: waiting does not help. `should_retry` overrides what an SDK
    makes of the status; None: the status says it.
    """

    status: int
    message: str
    type: str
    code: str
    retry_after_s: float | None
    should_retry: bool | None


def refusal_facts(refused: Refused) -> RefusalFacts:
    """The facts of a refusal by a limit (429) or for want of the store (503)."""
    if refused.reason is RefusalReason.STORE_UNAVAILABLE or refused.limit is None:
        message = "Rate limits cannot be checked at the moment, so the request was not accepted. Please try again."
        return RefusalFacts(503, message, "server_error", "limits_unavailable", refused.retry_after_s, None)
    limit = refused.limit
    kind = _TYPES[limit.dimension]
    if refused.reason is RefusalReason.TOO_LARGE:
        message = (
            f"{limit_sentence(limit)} can never admit this request; {refused.needed} needed, {refused.left} at most."
        )
        return RefusalFacts(429, message, kind, "rate_limit_exceeded", None, False)
    message = f"{limit_sentence(limit)} reached; {refused.needed} needed, {refused.left} left."
    never = refused.retry_after_s is None
    return RefusalFacts(429, message, kind, "rate_limit_exceeded", refused.retry_after_s, False if never else None)


def limit_sentence(limit: Limit) -> str:
    """The limit in words, e.g. "Input token limit of 1000 per minute for model m"."""
    of = f" for model {limit.model}" if limit.model is not None else ""
    if limit.dimension is Dimension.CONCURRENCY:
        return f"Concurrency limit of {limit.amount} requests in flight{of}"
    period = _PERIODS.get(limit.period_s, f"{limit.period_s} seconds")
    return f"{_NAMES[limit.dimension]} limit of {limit.amount} per {period}{of}"


def retry_headers(retry_after_s: float | None, should_retry: bool | None) -> list[tuple[bytes, bytes]]:
    """`retry-after` (whole seconds >= 1) and `retry-after-ms` where waiting helps, and the SDKs' override
    `x-should-retry` where the status alone would tell them wrong (reference gateway 2.1).
    """
    headers: list[tuple[bytes, bytes]] = []
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(round(retry_after_s, 6)))))
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(round(retry_after_s * 1_000, 3)))))
    if should_retry is not None:
        headers.append((b"x-should-retry", b"true" if should_retry else b"false"))
    return headers


def limit_headers(view: LimitView) -> list[tuple[bytes, bytes]]:
    """The `x-ratelimit-*` headers of an answer; nothing for a kind that has no limit."""
    headers: list[tuple[bytes, bytes]] = []
    limit, remaining, reset_s, token_limit, tokens_left, token_reset_s = view
    if limit is not None and remaining is not None:
        headers.append((b"x-ratelimit-limit-requests", b"%d" % limit))
        headers.append((b"x-ratelimit-remaining-requests", b"%d" % max(0, remaining)))
        if reset_s is not None:
            headers.append((b"x-ratelimit-reset-requests", duration(reset_s).encode()))
    if token_limit is not None and tokens_left is not None:
        headers.append((b"x-ratelimit-limit-tokens", b"%d" % token_limit))
        headers.append((b"x-ratelimit-remaining-tokens", b"%d" % max(0, tokens_left)))
        if token_reset_s is not None:
            headers.append((b"x-ratelimit-reset-tokens", duration(token_reset_s).encode()))
    return headers


def duration(seconds: float) -> str:
    """A duration as the hosted API writes it (Go's form): 120ms, 1s, 59.28s, 6m0s, 1h0m0s; rounded up to 1 ms."""
    ms = math.ceil(seconds * 1_000 - 0.0005)  # half a microsecond is a float's rounding, not a wait
    if ms <= 0:
        return "0s"
    if ms < 1_000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    second = f"{ms / 1_000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{second}"
    return f"{minutes}m{second}" if minutes else second


def after_outage(decision: Admitted | Refused, cost: Cost, policy: OutagePolicy) -> Admitted | Refused:
    """Apply the outage policy of the caller's tenant class (DESIGN 4.2; default: refuse).

    Only a refusal for want of the store can change, into an admission that takes nothing from any limit: its ticket
    settles nothing. `ALLOW` is for tenants whose use is bounded otherwise, such as a dedicated deployment.
    """
    if isinstance(decision, Admitted) or decision.reason is not RefusalReason.STORE_UNAVAILABLE:
        return decision
    return decision if policy is OutagePolicy.REFUSE else Admitted(Ticket(cost, []), decision.view)
