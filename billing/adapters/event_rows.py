"""A usage event as a row of `usage_event`, and back.

Owns: the order of the columns, both conversions, and the payload hash of a row without making an event of it. Does
not own: the table (`tables`) or the event and its hash (`usage_event`; a test holds the two hashes to each other).
Rows are made by attribute getters in C, because this runs once per event of the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter, itemgetter
from typing import Any

import orjson

from billing.adapters.tables import UsageEventRow, table
from billing.pricing import Charge
from billing.usage_event import CLOSE_KINDS, OPEN_KINDS, Outcome, UsageClose, UsageEvent, UsageOpen

# Column of a field whose name SQL reserves.
_COLUMN_OF = {"user": "end_user"}
# `price_version` of the row is the one it was rated by, so it is written with the rating.
_OPEN_FIELDS = tuple(name for name in OPEN_KINDS if name != "price_version")
_CLOSE_FIELDS = tuple(CLOSE_KINDS)
_OWN_FIELDS = ("schema_version", "payload_hash")
_RATING = ("extra", "price_version", "currency", "amount_pico", "posting_id")

COLUMNS = tuple(_COLUMN_OF.get(name, name) for name in (*_OPEN_FIELDS, *_CLOSE_FIELDS, *_OWN_FIELDS)) + _RATING
"""The columns of `usage_event` in the order of `to_row`."""

_of_open = attrgetter(*_OPEN_FIELDS)
_of_close = attrgetter(*_CLOSE_FIELDS)
_of_event = attrgetter(*_OWN_FIELDS)
_open_values = itemgetter(*(_COLUMN_OF.get(name, name) for name in OPEN_KINDS))
# The first field of a close, after the id that it shares with its open, is its outcome.
_rest_of_close = itemgetter(*(name for name in CLOSE_KINDS if name != "outcome"))

if next(iter(CLOSE_KINDS)) != "outcome":
    raise ImportError("The outcome is no longer the first field of a close; from_row must follow.")
# What the payload hash is over, in the order of its JSON: every field but the rating (`usage_event.payload_hash`).
_CONTENT = tuple(sorted((*_OPEN_FIELDS, *_CLOSE_FIELDS)))
CONTENT_COLUMNS = tuple(_COLUMN_OF.get(name, name) for name in _CONTENT)
"""The columns of `content_hash`, in order."""
_FLAGS = tuple(name for name in _CONTENT if bool in {**OPEN_KINDS, **CLOSE_KINDS}[name])
# Of the hash of `usage_event`.
_HASH_BYTES = 16

# A field that the event gained and the table did not must fail here, at import, not lose data at run time.
if set(COLUMNS) != set(table(UsageEventRow).columns.keys()):
    raise ImportError(f"usage_event and UsageEvent differ: {set(COLUMNS) ^ set(table(UsageEventRow).columns.keys())}")


def to_row(event: UsageEvent, charge: Charge, posting_id: str | None) -> tuple[Any, ...]:
    """The values of `COLUMNS`."""
    extra = orjson.dumps(dict(event.extra)).decode() if event.extra else None
    rating = (extra, charge.price_version, charge.currency, charge.amount_pico, posting_id)
    return _of_open(event.open) + _of_close(event.close) + _of_event(event) + rating


def from_row(row: Mapping[str, Any]) -> UsageEvent:
    """The event of a row that was read through `UsageEventRow` (so booleans are bool and amounts int).

    Raises ValueError when the row holds an outcome that does not exist.
    """
    opened = UsageOpen(*_open_values(row))
    closed = UsageClose(opened.event_id, Outcome(row["outcome"]), *_rest_of_close(row))
    extra = orjson.loads(row["extra"]) if row["extra"] else {}
    return UsageEvent(opened, closed, row["payload_hash"], row["amount_pico"], row["schema_version"], extra)


def content_hash(row: Sequence[Any], *, has_numbers_for_flags: bool) -> str:
    """The payload hash of a row that begins with `CONTENT_COLUMNS` and has nothing `extra`, as it is now.

    `has_numbers_for_flags`: SQLite's driver gives 0 and 1 for booleans. Gives "" for values that are no JSON.
    """
    content = {name: value for name, value in zip(_CONTENT, row, strict=False) if value is not None}
    if has_numbers_for_flags:
        for name in _FLAGS:
            content[name] = bool(content.get(name))
    try:
        return blake2b(orjson.dumps(content), digest_size=_HASH_BYTES).hexdigest()
    except (TypeError, UnicodeEncodeError):
        return ""
