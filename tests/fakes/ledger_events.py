"""Usage events for the ledger's tests: a whole, plausible event in which a test names only what it is about.

Owns: `usage_event`, `event_id` and `a_book`. Does not own: the event's form (`billing.usage_event`), spool records
(`tests.fakes.usage`) or random events (the strategies of the property tests).
"""

from __future__ import annotations

from typing import Any

from billing.pricing import PriceBook, Sku
from billing.usage_event import Outcome, UsageClose, UsageEvent, UsageOpen, join

# 2026-11-10T00:00:00Z in Unix ns: a time in the middle of a month, at the start of a day.
NOON_NS = 1_794_268_800_000_000_000
_S = 1_000_000_000

_OPEN: dict[str, Any] = {
    "request_id": "req_1",
    "attempt": 1,
    "org_id": "acme",
    "project_id": "web",
    "key_id": "key_1",
    "user": None,
    "operation": "chat",
    "profile": None,
    "model_asked": "llama",
    "model_served": "llama",
    "tier_asked": None,
    "deployment": None,
    "pool": None,
    "endpoint": "engine-0",
    "endpoint_incarnation": "1",
    "node": "node-0",
    "batch_id": None,
    "custom_id": None,
    "spillover": False,
    "stream": True,
    "choices": 1,
    "reserved_input_tokens": 2_000,
    "reserved_output_tokens": 4_096,
    "predicted_cached_tokens": None,
    "price_version": "pb-1",
    "received_ns": NOON_NS,
    "opened_ns": NOON_NS + 1_000,
}
_CLOSE: dict[str, Any] = {
    "outcome": Outcome.COMPLETED,
    "status": 200,
    "error_code": None,
    "billable": True,
    "estimated": False,
    "tier_served": None,
    "uncached_input_tokens": 1_000,
    "cached_input_tokens": 512,
    "cache_write_tokens": None,
    "output_tokens": 100,
    "reasoning_tokens": None,
    "first_token_ns": NOON_NS + _S,
    "ended_ns": NOON_NS + 2 * _S,
}


def event_id(number: int) -> str:
    """The id of the event with this number."""
    return f"{number:032x}"


def usage_event(number: int = 1, **changed: Any) -> UsageEvent:
    """A completed chat event; `changed` names fields of the open or the close."""
    unknown = set(changed) - {*_OPEN, *_CLOSE, "extra"}
    assert not unknown, f"no such fields of an event: {unknown}"
    ident = event_id(number)
    opened = {"event_id": ident, **_OPEN, "request_id": f"req_{number}"}
    closed = {"event_id": ident, **_CLOSE}
    for target, kind in ((opened, UsageOpen), (closed, UsageClose)):
        names = {*kind._fields} - {"extra"}
        target.update({name: value for name, value in changed.items() if name in names})
    return join(UsageOpen(**opened, extra=changed.get("extra", {})), UsageClose(**closed))


def a_book(version: str = "pb-1", **changed: Any) -> PriceBook:
    """A book in USD that sells `llama` (default and flex tier) from the beginning of time."""
    values: dict[str, Any] = {
        "version": version,
        "currency": "USD",
        "valid_from_ns": 0,
        "prices": {
            ("llama", "default", Sku.INPUT): 3_000_000,
            ("llama", "default", Sku.CACHED_INPUT): 300_000,
            ("llama", "default", Sku.OUTPUT): 15_000_000,
            ("llama", "flex", Sku.INPUT): 1_500_000,
            ("llama", "flex", Sku.OUTPUT): 7_500_001,
        },
    }
    return PriceBook(**{**values, **changed})
