"""The one parsed form of an inference request that every later stage reads.

Owns: `InferenceRequest` and the token estimate made from bytes. Does not own: the wire (`adapters.openai_wire` builds
this value and renders answers). Values are frozen; the body is referenced once and never copied into them twice.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Operation(StrEnum):
    """The API operation. The values are metric labels and the `operation` of usage events."""

    CHAT = "chat"
    COMPLETION = "completion"


# Bytes of UTF-8 JSON per token below which real tokenizers do not fall on ordinary text: the public vLLM gateways
# estimate bytes/4 * 1.2 (reference gateway 3.2); the error becomes debt or credit at settlement.
_ESTIMATE_MARGIN_PERMILLE = 1_200
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MEDIA_PART = 1_024
_TOKENS_PER_MESSAGE = 4


def estimate_input_tokens(prompt_bytes: int, message_count: int, media_count: int) -> int:
    """An upper-leaning estimate of a prompt's tokens: ceil(bytes/4*1.2) + 4 per message + 1024 per media part."""
    text = -(-prompt_bytes * _ESTIMATE_MARGIN_PERMILLE // (_BYTES_PER_TOKEN * 1_000))
    return text + _TOKENS_PER_MESSAGE * message_count + _TOKENS_PER_MEDIA_PART * media_count


class StreamWish(NamedTuple):
    """What the client asked of the stream, and so what must be cut out of the engine's before relaying it."""

    stream: bool
    include_usage: bool
    """The client asked for the final usage chunk."""
    continuous_usage: bool
    """The client asked for usage in every chunk."""


class InferenceRequest(NamedTuple):
    """A request that may be limited, routed, sent and metered.

    `prompt_parts` are slices of the original body that identify the prompt for routing, in order: the raw `tools`
    value, then the raw `messages` value without its closing bracket (or the raw `prompt`).
    """

    operation: Operation
    model_asked: str
    wish: StreamWish
    choices: int
    max_output_tokens: int | None
    """As the client named it; None: the model's default applies."""
    estimated_input_tokens: int
    body: bytes
    """The client's body, byte for byte."""
    prompt_parts: tuple[memoryview, ...]
    edits: tuple[Edit, ...]
    """Where the fields we own stand in `body`, so that they can be edited in place for the engine that is picked."""
    user: str | None = None
    """As the client named its end user, cut to what a usage event holds."""
    tier_asked: str | None = None


class Edit(NamedTuple):
    """body[start:end] is ours to rewrite. In order of `start`, never overlapping.

    `model` and `stream_options`: the member's value, to be replaced. `INSERT_HERE`: an empty span after the last
    member, where new members go. Any other name: a whole member with its separating comma, to be removed.
    """

    name: str
    start: int
    end: int


INSERT_HERE = ""
"""The name of the edit that marks where members may be added; the last of `InferenceRequest.edits`."""
