"""Usage records for tests: plausible values, made from a few numbers, the same for the same numbers.

Owns: opens, checkpoints and closes. Does not own: what a test claims about them. Seeded, so that a writer process and
the test that checks on it afterwards make the same records without talking.
"""

from __future__ import annotations

from typing import Any

from billing.usage_event import Outcome, UsageCheckpoint, UsageClose, UsageOpen

# 2026-01-01T00:00:00Z.
START_NS = 1_767_225_600_000_000_000


def event_id(number: int, writer: int = 0) -> str:
    """32 hex digits that name the writer and the number."""
    return f"{writer:08x}{number:024x}"


def an_open(number: int = 1, writer: int = 0, **changes: Any) -> UsageOpen:
    """The OPEN of attempt 1 of request `number`."""
    opened = UsageOpen(
        event_id=event_id(number, writer),
        request_id=f"req_{writer}_{number}",
        attempt=1,
        org_id="org_a",
        project_id="proj_a",
        key_id="key_a",
        user=None,
        operation="chat",
        profile="chat",
        model_asked="llama",
        model_served="llama-3.3-70b",
        tier_asked=None,
        deployment=None,
        pool="pool-a",
        endpoint="engine-1",
        endpoint_incarnation="e1",
        node="node-1",
        batch_id=None,
        custom_id=None,
        spillover=False,
        stream=True,
        choices=1,
        reserved_input_tokens=1_000 + number,
        reserved_output_tokens=4_096,
        predicted_cached_tokens=512,
        price_version=None,
        received_ns=START_NS + number,
        opened_ns=START_NS + number + 1,
    )
    return opened._replace(**changes)


def a_checkpoint(number: int = 1, writer: int = 0, **changes: Any) -> UsageCheckpoint:
    """A CHECKPOINT of request `number` with `output_tokens` 64 unless told."""
    checkpoint = UsageCheckpoint(
        event_id=event_id(number, writer),
        uncached_input_tokens=number,
        cached_input_tokens=512,
        output_tokens=64,
        first_token_ns=START_NS + number + 1_000,
        at_ns=START_NS + number + 2_000,
    )
    return checkpoint._replace(**changes)


def a_close(number: int = 1, writer: int = 0, **changes: Any) -> UsageClose:
    """The CLOSE of request `number`: completed, counted by the engine."""
    closed = UsageClose(
        event_id=event_id(number, writer),
        outcome=Outcome.COMPLETED,
        status=200,
        error_code=None,
        billable=True,
        estimated=False,
        tier_served="default",
        uncached_input_tokens=number,
        cached_input_tokens=512,
        cache_write_tokens=None,
        output_tokens=100 + number % 50,
        reasoning_tokens=None,
        first_token_ns=START_NS + number + 1_000,
        ended_ns=START_NS + number + 3_000,
    )
    return closed._replace(**changes)
