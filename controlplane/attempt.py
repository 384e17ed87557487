"""What one request and each of its attempts hold until they have ended.

Owns: the state of a request on its way (`Run`, `Attempt`), how an attempt ended (`Verdict`), and what an ended attempt
takes from the limits. Does not own: the order of the steps or any waiting (`serve`), or the ports (`ports`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from billing.metering import Meter
from billing.token_usage import Usage
from billing.usage_event import Outcome
from controlplane.ports import Answer, AttemptEnd, Call, Sink, Target, Trace
from controlplane.rate_limit import Cost, LimitView, Ticket

# What a request takes that was never dispatched.
NOTHING = Cost(input_tokens=0, output_tokens=0, requests=0)


@dataclass(slots=True)
class Attempt:
    """Mutable: one dispatch to one engine, closed exactly once."""

    target: Target
    event_id: str
    sent_s: float
    """Monotonic seconds of the dispatch."""
    answer: Answer | None = None
    meter: Meter | None = None
    first_token_ns: int | None = None
    reached: bool = False
    """An engine may have seen it: there was a connection to write it to."""
    stop_looking: Callable[[], None] | None = None
    """Ends the looking for a checkpoint that is due while the engine is silent."""
    closed: bool = False

    def on_send(self) -> None:
        """The request is about to be written."""
        self.reached = True


class Verdict(NamedTuple):
    """How an attempt ended: for its event, and for the router."""

    outcome: Outcome
    status: int
    error_code: str | None
    end: AttemptEnd
    billable: bool = True


@dataclass(slots=True)
class Run:
    """Mutable: what one request holds until it has ended."""

    call: Call
    sink: Sink
    served: str
    reserved: Cost
    ticket: Ticket
    view: LimitView
    price_version: str | None
    trace: Trace
    read: object | None = None
    """What the fleet worked out of the prompt."""
    attempt: Attempt | None = None
    used: Cost = NOTHING
    settled: bool = False


def used_by(reserved: Cost, attempt: Attempt, usage: Usage) -> Cost:
    """What a closed attempt takes from the limits. Never dispatched to a token: only the request itself."""
    if attempt.first_token_ns is None and usage.input_tokens is None:
        # No token, no money; but an engine may have read the prompt of a client that left: not free to repeat.
        return Cost(input_tokens=reserved.input_tokens if attempt.reached and usage.estimated else 0, output_tokens=0)
    seen_output = usage.output_tokens
    return Cost(
        input_tokens=reserved.input_tokens if usage.input_tokens is None else usage.input_tokens,
        output_tokens=reserved.output_tokens if seen_output is None else seen_output,
    )
