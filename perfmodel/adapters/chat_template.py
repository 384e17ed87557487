"""How the simulated engine turns chat messages into the bytes it tokenizes.

Owns: the template. Does not own: the tokenizer (`workload`) or which fields a request may have (`engine_wire`).
The template is made so that a conversation's next prompt extends this prompt plus its answer, token for token:

    <|tools|>...JSON of the tools...</s>                 only when the request has tools
    <|role|>content</s>                                  for every message, in order
    <|assistant|>                                        asks for the answer

A token is four bytes, so every piece is a multiple of four bytes: a role's mark is filled up with line feeds, content
with NUL (which JSON text cannot hold unescaped), and `</s>` is one token. Answers are whole tokens, so an answer that
comes back unchanged as an assistant message tokenizes to itself and its blocks are found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from perfmodel.errors import ClientError
from perfmodel.workload import TOKEN_BYTES

_END_OF_MESSAGE = b"</s>"

# Content parts that carry text, by their `type`, and the member that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def render_chat(
    messages: Sequence[object],
    tools: Sequence[object] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> bytes:
    """The prompt's bytes, a multiple of TOKEN_BYTES unless `continue_final_message` leaves the last message open.

    Raises ClientError when a message is not one this engine can read (no role, an image, ...).
    """
    parts: list[bytes] = []
    if tools:
        parts += (_mark("tools"), _filled(orjson.dumps(tools)), _END_OF_MESSAGE)
    for position, message in enumerate(messages):
        role, content = _message(message, position)
        parts += (_mark(role), _filled(content), _END_OF_MESSAGE)
    if continue_final_message and messages:
        parts[-2] = parts[-2].rstrip(b"\x00")
        parts.pop()
    elif add_generation_prompt:
        parts.append(_mark("assistant"))
    return b"".join(parts)


def _mark(role: str) -> bytes:
    mark = b"<|%s|>" % role.encode()
    return mark + b"\n" * (-len(mark) % TOKEN_BYTES)


def _filled(content: bytes) -> bytes:
    return content + b"\x00" * (-len(content) % TOKEN_BYTES)


def _message(message: object, position: int) -> tuple[str, bytes]:
    if not isinstance(message, dict):
        raise _refused(position, f"is {type(message).__name__}; expected an object with a role")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _refused(position, f"has the role {role!r}; expected a string such as 'user'")
    content = _content(message.get("content"), position)
    if calls := message.get("tool_calls"):
        content += orjson.dumps(calls)
    if call_id := message.get("tool_call_id"):
        content = str(call_id).encode() + b"\n" + content
    return role, content


def _content(content: Any, position: int) -> bytes:
    if content is None:
        return b""
    if isinstance(content, str):
        return content.encode()
    if not isinstance(content, list):
        raise _refused(position, f"has content of type {type(content).__name__}; expected a string or a list of parts")
    texts: list[bytes] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise _refused(position, f"has a content part of type {kind!r}; this engine reads text parts only")
        texts.append(text.encode())
    return b"".join(texts)


def _refused(position: int, what: str) -> ClientError:
    return ClientError(f"messages.{position} {what}.", param="messages")
