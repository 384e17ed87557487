"""Chat messages as the engine's server hands them to a template.

Owns: the tidying: content as text or as parts, calls of tools with parsed arguments, roles that a template does not
know, and the mark where a medium begins. Does not own: where the messages come from (`prompt_forms`) or the template
(`prompt_text`). The rules are those of vLLM 0.32.0 (`renderers/chat_utils.py`, `renderers/hf.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from router.prompt_forms import BILLING_HEADER, ChatRequest, Message, Unfollowed, Unhashed, listed

# Stands for the place of an image. Private-use characters: no chat template and hardly any text has them.
MEDIA_MARK: Final = "\ue0f1\ue0f2\ue0f3\ue0f1"

# Content parts that are text, and the member that holds it (vLLM's MM_PARSER_MAP).
_TEXT_PARTS: Final = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
# Content parts that become other tokens than text, and the kind that the template is told (MODALITY names).
_MEDIA_PARTS: Final = {
    "image_url": "image", "input_image": "image", "image_embeds": "image", "audio_url": "audio", "input_audio": "audio",
    "audio_embeds": "audio", "video_url": "video", "video_embeds": "video",
}  # fmt: skip
# A part without text is left out for these types; for others it is an error.
_MAY_LACK_TEXT: Final = frozenset({"text", "refusal"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a template sees them. `mark`, if not empty, stands in the text where the first medium's message
    begins: what is rendered from there on is not what the engine computes."""

    messages: list[Message]
    mark: str = ""


def conversation(request: ChatRequest, content_is_parts: bool, knows_developer: bool = True) -> Conversation | Unhashed:
    """The messages as the engine hands them to the template. `content_is_parts`: the template loops over a message's
    content (`prompt_text.ChatTemplate.content_is_parts`); else content is one string. `knows_developer`: it has a case
    for the role of that name, which else becomes part of the system message.
    """
    found: list[Message] = []
    mark = ""
    try:
        for message in request.messages:
            if type(message) is not dict or type(message.get("role")) is not str:
                return Unhashed.MALFORMED
            parts, media = _parts(message.get("content"))
            if message["role"] == "system":
                parts = _without_billing(parts)
            if media and not mark:
                mark = MEDIA_MARK
                parts.insert(0, {"type": "text", "text": mark})
            found.append(_shown(message, parts, content_is_parts, request.calls_as_given))
    except Unfollowed as refused:
        return refused.reason
    if not knows_developer and any(message["role"] == "developer" for message in found):
        found = _one_system(found)
    return Conversation(found, mark)


def _without_billing(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the first line of a text that begins with Claude Code's header."""
    found: list[dict[str, Any]] = []
    for part in parts:
        text = part.get("text")
        if type(text) is str and text.startswith(BILLING_HEADER):
            text = text.partition("\n")[2]
            if text:
                found.append({**part, "text": text})
        else:
            found.append(part)
    return found


def _one_system(messages: list[Message]) -> list[Message]:
    """Developer messages as system messages, and these as one at the beginning where they are not one already."""
    renamed: list[Message] = []
    for message in messages:
        developer = message["role"] == "developer"
        without_tools = {name: value for name, value in message.items() if name != "tools"}
        renamed.append({**without_tools, "role": "system"} if developer else message)
    places = [n for n, message in enumerate(renamed) if message["role"] == "system"]
    if places == [0]:
        return renamed
    texts: list[str] = []
    for n in places:
        content = renamed[n]["content"]
        if type(content) is list:
            content = "\n".join(part["text"] for part in content if "text" in part)
        if content:
            texts.append(content)
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _parts(content: Any) -> tuple[list[dict[str, Any]], bool]:
    """The content's parts as templates name them, and whether one is no text."""
    if content is None:
        return [], False
    if type(content) is str:
        return [{"type": "text", "text": content}], False
    parts: list[dict[str, Any]] = []
    media = False
    for part in listed(content):
        if type(part) is str:
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if type(part) is dict else None
        if kind in _TEXT_PARTS:
            text = part.get(_TEXT_PARTS[kind])
            if type(text) is str:
                parts.append({"type": "text", "text": text})
            elif text is not None or kind not in _MAY_LACK_TEXT:
                raise Unfollowed(Unhashed.MALFORMED)
        elif kind == "tool_reference":
            parts.append({"type": kind, "name": part.get("name")})
        elif kind in _MEDIA_PARTS:
            media = True
            parts.append({"type": _MEDIA_PARTS[kind]})
        else:
            raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    return parts, media


def _shown(
    message: Mapping[str, Any], parts: list[dict[str, Any]], content_is_parts: bool, calls_as_given: bool
) -> Message:
    role = message["role"]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if content_is_parts:
        content: Any = parts if role != "tool" or len(texts) < len(parts) else "\n".join(texts)
    else:
        told: list[Any] = [part.get("text", part.get("name")) for part in parts if {"text", "name"} & part.keys()]
        if not all(type(text) is str for text in told):
            raise Unfollowed(Unhashed.MALFORMED)
        content = "\n".join(text for text in told if text)  # empty texts are passed over
    shown: Message = {"role": role, "content": content}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [_call(call, calls_as_given) for call in listed(calls)]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            shown["reasoning"] = shown["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            shown["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        shown["tools"] = message.get("tools")
    for name in ("name", "task"):
        if type(message.get(name)) is str:
            shown[name] = message[name]
    return shown


def _call(call: Any, as_given: bool) -> dict[str, Any]:
    """A call of a tool with its members in the order of OpenAI's schema, which the engine's validation gives them;
    the arguments are parsed, because templates write them out themselves, and are an object whatever they were.
    """
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or call.get("type", "function") != "function":
        raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    arguments = function.get("arguments")
    if type(arguments) is str:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    if type(arguments) is not dict:
        arguments = {}
    if as_given:
        return {**call, "function": {**function, "arguments": arguments}}
    shown: dict[str, Any] = {}
    if "id" in call:
        shown["id"] = call["id"]
    shown["function"] = {"arguments": arguments, "name": function.get("name")}
    if "type" in call:
        shown["type"] = call["type"]
    return shown
