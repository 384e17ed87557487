"""The production router behind the questions of a simulation: the code that routes real requests, not a copy of it.

Owns: turning a simulated request into the router's own, and the beginnings and ends of its answers into the router's
calls, in the order in which the gateway makes them. Does not own: any rule. The prefix chain is the trace's block ids:
each names a whole prefix, as a chained hash does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from router.blocks import Chain
from router.decision import EndpointStatus, RouteDecision, RouteRequest
from router.endpoints import Ending, Endpoint, Finish, Ticket
from router.route import Router

# Bytes of prompt for each token of a trace; any number serves, the router learns the ratio.
BYTES_PER_TOKEN = 4


class Asked(Protocol):
    """What is read of a request."""

    @property
    def serial(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_limit_tokens(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...


class Used(Protocol):
    """What is read of an answer's usage."""

    @property
    def cached_tokens(self) -> int: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


class ProductionRouter:
    """Drives a `Router`. Mutable: it remembers the ticket of every request in flight."""

    hears = True
    reads_blocks = True

    def __init__(self, router: Router, endpoints: Sequence[Endpoint], dice: Callable[[], float]) -> None:
        router.set_endpoints(endpoints, 0.0)
        self._router = router
        self._index = {endpoint.endpoint_id: index for index, endpoint in enumerate(endpoints)}
        self._dice = dice
        self._tickets: dict[int, Ticket] = {}

    def pick(self, ask: Asked, now_s: float) -> int | tuple[int, int] | None:
        """The router's choice; None where it has none."""
        chain = Chain(ask.blocks, ask.input_tokens * BYTES_PER_TOKEN)
        request = RouteRequest(ask.model, chain, ask.input_tokens, ask.output_limit_tokens)
        decision = self._router.route(request, now_s, self._dice)
        if not isinstance(decision, RouteDecision):
            return None
        self._tickets[ask.serial] = decision.ticket
        picked = self._index[decision.endpoint.endpoint_id]
        if decision.pull_from is None:
            return picked
        return picked, self._index[decision.pull_from.endpoint_id]

    def first_token(self, serial: int, now_s: float) -> None:
        """The prefill is done."""
        self._router.first_token(self._tickets[serial], now_s)

    def status(self, now_s: float) -> tuple[EndpointStatus, ...]:
        """Every engine as the router sees it."""
        return self._router.status(now_s)

    def finished(self, serial: int, usage: Used, now_s: float) -> None:
        """The answer is complete; one without tokens was refused by the engine."""
        ticket = self._tickets.pop(serial)
        ending = Ending.COMPLETED if usage.output_tokens else Ending.REFUSED
        report = Finish(ending, usage.cached_tokens, usage.input_tokens, usage.output_tokens)
        self._router.finished(ticket, report, now_s)
