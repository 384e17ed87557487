"""What an engine says that an attempt used, out of its JSON.

Owns: `Usage` and the reading of it from a usage object (`usage_from`) or a whole answer (`usage_of`), with the bounds
within which an engine's word is believed. Does not own: streams (`metering`), or what a token costs (`pricing`). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from billing.json_members import reject_constant

# No context and no answer has a billion tokens: what an engine says beyond is no count, and would break the books.
MAX_TOKENS: Final = 1_000_000_000
# Names of service tiers are a word.
_MAX_TIER_CHARS: Final = 64
# Bytes of text per token when an engine gives no usage at all (the same figure as the input estimate, reference 3.2).
_BYTES_PER_TOKEN: Final = 4


class Usage(NamedTuple):
    """Token counts of one attempt, each token in exactly one of the three input counts. Unknown is None, never 0."""

    uncached_input_tokens: int | None
    """Input neither read from nor written to a prompt cache; all of it when the engine tells no cache counts."""
    cached_input_tokens: int | None
    cache_write_tokens: int | None
    output_tokens: int | None
    """Over all choices; reasoning included."""
    reasoning_tokens: int | None
    tier_served: str | None = None
    estimated: bool = False
    """The counts are ours, or the engine's last word before it was cut short."""
    inconsistent: bool = False
    """The engine contradicted itself: a total below what it had counted, or more cached than input tokens."""

    @property
    def input_tokens(self) -> int | None:
        """The whole prompt: uncached, cached and written; None when the engine did not say."""
        if self.uncached_input_tokens is None:
            return None
        return self.uncached_input_tokens + (self.cached_input_tokens or 0) + (self.cache_write_tokens or 0)


UNKNOWN_USAGE: Final = Usage(None, None, None, None, None)
"""Nothing is known: the engine said nothing and nothing was delivered."""


def usage_of(body: bytes, choices: int = 1) -> Usage:
    """The usage of a whole (non-streamed) OpenAI answer of `choices` choices.

    The engine's own figures when there are any, else an estimate of the output from the answer's text (bytes/4), else
    `UNKNOWN_USAGE`. Never raises: an answer that is no JSON is unknown.
    """
    answer = parsed_json(body)
    if not isinstance(answer, dict):
        return UNKNOWN_USAGE
    tier = tier_of(answer)
    counts = answer.get("usage")
    if isinstance(counts, dict) and token_count(counts, "completion_tokens") is not None:
        return usage_from(counts, token_count(counts, "completion_tokens"), tier=tier)
    prompt = counts if isinstance(counts, dict) else {}
    answers = answer.get("choices")
    size = sum(_text_bytes(choice) for choice in answers[:choices]) if isinstance(answers, list) else 0
    estimate = max(1, -(-size // _BYTES_PER_TOKEN)) if answers else None
    return usage_from(prompt, estimate, tier=tier, estimated=True)


def _text_bytes(choice: Any) -> int:
    """Bytes of what a choice says: its text, or its message without the role and without JSON's own signs."""
    if not isinstance(choice, dict):
        return 0
    said = choice.get("message", choice.get("text"))
    parts = [value for name, value in said.items() if name != "role" and value] if isinstance(said, dict) else [said]
    return sum(
        len(part.encode(errors="replace")) if isinstance(part, str) else len(json.dumps(part)) for part in parts if part
    )


def parsed_json(data: bytes) -> Any:
    """The JSON value, or None. orjson refuses lone surrogates, which engines do send; the standard library does not."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return None


def token_count(counts: Mapping[str, Any], name: str) -> int | None:
    """A count that can be one: a whole number from 0 to a billion; None for anything else."""
    value = counts.get(name)
    return value if type(value) is int and 0 <= value < MAX_TOKENS else None


def tier_of(answer: Mapping[str, Any]) -> str | None:
    """The tier that the engine says it served the answer in; None where it says nothing usable."""
    tier = answer.get("service_tier")
    if type(tier) is not str or len(tier) > _MAX_TIER_CHARS or not (tier.isascii() and tier.isprintable()):
        return None  # an engine's text goes into the books only as the short name that it should be
    return tier


def usage_from(
    counts: Mapping[str, Any], output: int | None, *, tier: str | None, estimated: bool = False, wrong: bool = False
) -> Usage:
    """Disjoint counts from OpenAI's, where cached and written tokens are inside `prompt_tokens` (reference 2.3)."""
    prompt = token_count(counts, "prompt_tokens")
    details = counts.get("prompt_tokens_details")
    inside = details if isinstance(details, dict) else {}
    cached, written = token_count(inside, "cached_tokens"), token_count(inside, "cache_write_tokens")
    thought = counts.get("completion_tokens_details")
    reasoning = token_count(thought, "reasoning_tokens") if isinstance(thought, dict) else None
    if prompt is None:
        return Usage(None, None, None, output, reasoning, tier, estimated, wrong)
    if (cached or 0) + (written or 0) > prompt:  # a lie; the prompt's size bounds what may be given away as cached
        wrong, written = True, None
        cached = None if cached is None else min(cached, prompt)
    uncached = prompt - (cached or 0) - (written or 0)
    return Usage(uncached, cached, written, output, reasoning, tier, estimated, wrong)
