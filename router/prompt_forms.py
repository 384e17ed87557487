"""From a request's fields to what a chat template is given, as the engine's server prepares it.

Owns: the request shapes of the gateway (chat, completions, Responses, Anthropic messages), the conversion of the last
two to chat messages, tools and template variables, and `Unhashed`, the closed list of reasons why a prompt has no token
ids. Does not own: the tidying of messages (`prompt_messages`), the template (`prompt_text`), tokens (`prompt_chains`).

A prompt that is rendered in another way than the engine renders it gets keys that match nothing, silently. So the rules
here follow the server of vLLM 0.32.0 (`renderers/chat_utils.py`, `renderers/hf.py`, `entrypoints/anthropic/serving.py`,
`entrypoints/openai/responses/utils.py`, `entrypoints/generate/base/protocol.py`) and were compared with what its own
functions return; what this module does not do is a counted `Unhashed`, never a guess. Other versions, and SGLang and
TensorRT-LLM, prepare most requests alike; where they do not, the check of keys against published blocks tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

Fields = Mapping[str, Any]
"""The members of a request's body by name, as `json.loads` gives them."""

Message = dict[str, Any]


class PromptShape(StrEnum):
    """Which API the request came by. The values are metric labels."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"


class Unhashed(StrEnum):
    """Why a prompt, or its part from some place on, has no keys. The values are metric labels."""

    NO_TOKENIZER = "no_tokenizer"
    """The model's tokenizer is not known here."""
    NO_TEMPLATE = "no_template"
    """The model has no chat template, or its engine renders chats by code of its own."""
    TEMPLATE_FAILED = "template_failed"
    TEMPLATE_TOO_LONG = "template_too_long"
    """It rendered for longer, or to more text, than is allowed."""
    UNSUPPORTED_PART = "unsupported_part"
    """A message, content part, item or tool of a kind that is not rendered here."""
    UNSUPPORTED_FIELD = "unsupported_field"
    """A field that changes the prompt in a way that is not followed here."""
    MALFORMED = "malformed"
    """The engine will refuse it: a missing member, a wrong type, text that is no Unicode."""
    MEDIA = "media"
    """An image, sound or video: the tokens before it are hashed, none from there on."""
    STORED_HISTORY = "stored_history"
    """It continues a response that only the engine has."""
    MANY_PROMPTS = "many_prompts"
    """One request with several prompts, which need not share an engine's blocks."""
    SPECIAL_TOKENS = "special_tokens"
    """Which special tokens the engine puts around a plain prompt is not certain."""
    TOKENIZER_FAILED = "tokenizer_failed"
    TOO_LONG = "too_long"
    BUSY = "busy"
    """Every thread that tokenises was taken."""
    """More text than is tokenised here."""
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_REFUSED = "engine_refused"
    """The engine's `/tokenize` answered with an error, or with something else than token ids."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation in OpenAI's form. `context` is what the template gets besides messages and tools."""

    messages: Sequence[Any]
    tools: list[dict[str, Any]] | None
    context: Mapping[str, Any]
    add_special_tokens: bool = False
    calls_as_given: bool = False
    """Calls of tools keep the order of their members; else they have that of OpenAI's schema."""


@dataclass(frozen=True, slots=True)
class PlainPrompt:
    """A prompt that no template touches: text, or the token ids themselves."""

    text: str | None
    token_ids: Sequence[int] | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ToolRules:
    """How the engine was started."""

    exclude_tools_when_tool_choice_none: bool = False
    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    disabled_thinking_effort: str = "none"
    """The effort that an Anthropic request with its thinking disabled gets."""


# Fields that make the engine compute another prompt than template and tokenizer would.
_CHANGES_PROMPT: Final = (
    "chat_template", "truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs", "media_io_kwargs", "mm_payload",
    "previous_input_messages", "suffix",
)  # fmt: skip
# Names in `chat_template_kwargs` that are no template variables, or would take the place of one that is ours.
_NOT_TEMPLATE_VARIABLES: Final = frozenset({"chat_template", "tokenize", "tools", "messages", "conversation"})
# The line that Claude Code's client puts first: another value in every request; vLLM leaves it out.
BILLING_HEADER: Final = "x-anthropic-billing-header"

# What a body may say that changes its prompt: who has only part of a body at hand keeps these members.
PROMPT_FIELDS: Final = frozenset(
    {
        "messages", "prompt", "input", "instructions", "system", "tools", "tool_choice", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents", "reasoning_effort",
        "reasoning", "thinking", "output_config", "previous_response_id", *_CHANGES_PROMPT,
    }
)  # fmt: skip


# -- shapes ------------------------------------------------------------------------------------------------------------


def read_request(
    shape: PromptShape, fields: Fields, rules: ToolRules, system_first: bool | None = None
) -> ChatRequest | PlainPrompt | Unhashed:
    """What is to be tokenised. `fields` are read, never changed. `system_first`: the model's template takes a system
    message at the beginning only (`ChatTemplate.system_first`); None: not known.
    """
    if any(fields.get(name) is not None for name in _CHANGES_PROMPT):
        return Unhashed.UNSUPPORTED_FIELD
    if shape is PromptShape.COMPLETION:
        return _completion(fields)
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is not None and (type(kwargs) is not dict or _NOT_TEMPLATE_VARIABLES & kwargs.keys()):
        return Unhashed.UNSUPPORTED_FIELD
    try:
        if shape is PromptShape.CHAT:
            return _chat(fields, rules)
        if shape is PromptShape.RESPONSES:
            return _responses(fields, rules)
        return _anthropic(fields, rules, system_first)
    except Unfollowed as refused:
        return refused.reason


class Unfollowed(Exception):
    """Ends a walk over a request that found something it cannot follow; caught in this module and `prompt_messages`."""

    def __init__(self, reason: Unhashed) -> None:
        super().__init__(reason.value)
        self.reason = reason


def _completion(fields: Fields) -> PlainPrompt | Unhashed:
    prompt = fields.get("prompt")
    special = fields.get("add_special_tokens", True)
    if type(special) is not bool:
        return Unhashed.MALFORMED
    if type(prompt) is list and prompt:
        if type(prompt[0]) is int:
            return PlainPrompt(None, prompt, special)
        if len(prompt) > 1:
            return Unhashed.MANY_PROMPTS
        prompt = prompt[0]
        if type(prompt) is list:
            return PlainPrompt(None, prompt, special) if prompt else Unhashed.MALFORMED
    return PlainPrompt(prompt, None, special) if type(prompt) is str else Unhashed.MALFORMED


def _chat(fields: Fields, rules: ToolRules) -> ChatRequest:
    messages = fields.get("messages")
    if type(messages) is not list:
        raise Unfollowed(Unhashed.MALFORMED)
    tools = fields.get("tools")
    offered = None if tools is None else [_tool(tool) for tool in listed(tools)]
    if fields.get("tool_choice") == "none" and rules.exclude_tools_when_tool_choice_none:
        offered = None
    return ChatRequest(messages, offered, _context(fields, rules), _flag(fields, "add_special_tokens", False))


def _context(fields: Fields, rules: ToolRules) -> dict[str, Any]:
    """The variables of the template: the engine's defaults, then the request's own, then its fields."""
    if _flag(fields, "continue_final_message", False):
        raise Unfollowed(Unhashed.UNSUPPORTED_FIELD)
    own = fields.get("chat_template_kwargs") or {}
    said = {
        "add_generation_prompt": _flag(fields, "add_generation_prompt", True),
        "documents": fields.get("documents"),
        "reasoning_effort": fields.get("reasoning_effort"),
    }
    if said["reasoning_effort"] is not None and "enable_thinking" not in own:
        said["enable_thinking"] = said["reasoning_effort"] != "none"
    # None and "auto" say nothing (vLLM's `merge_kwargs`)
    given = {name: value for name, value in said.items() if value is not None and value != "auto"}
    return {**rules.default_template_kwargs, **own, **given}


def _flag(fields: Fields, name: str, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise Unfollowed(Unhashed.MALFORMED)
    return value


def listed(value: Any) -> list[Any]:
    """A list, or it is malformed."""
    if type(value) is not list:
        raise Unfollowed(Unhashed.MALFORMED)
    return value


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as the engine's schema writes it out again: its own order, unknown members left out."""
    function = tool.get("function") if type(tool) is dict else None
    if type(function) is not dict or tool.get("type", "function") != "function":
        raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    deferred = tool.get("defer_loading")
    if deferred is not None and function.get("defer_loading") is None:
        function = {**function, "defer_loading": deferred}
    found: dict[str, Any] = {"type": "function", "function": _function(function)}
    if deferred is not None:
        found["defer_loading"] = deferred
    return found


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    if type(function.get("name")) is not str:
        raise Unfollowed(Unhashed.MALFORMED)
    found = {name: function.get(name) for name in ("name", "description", "parameters")}
    for name in ("strict", "defer_loading"):
        if function.get(name) is not None:
            found[name] = function[name]
    return found


# -- Responses ---------------------------------------------------------------------------------------------------------


def _responses(fields: Fields, rules: ToolRules) -> ChatRequest:
    if fields.get("previous_response_id") is not None:
        raise Unfollowed(Unhashed.STORED_HISTORY)
    if fields.get("prompt") is not None:
        raise Unfollowed(Unhashed.UNSUPPORTED_FIELD)
    messages: list[Message] = []
    instructions, asked = fields.get("instructions"), fields.get("input")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if type(asked) is str:
        messages.append({"role": "user", "content": asked})
    else:
        _add_items(listed(asked), messages)
    tools = None
    if fields.get("tools") and not (fields.get("tool_choice") == "none" and rules.exclude_tools_when_tool_choice_none):
        tools = _flat_tools(listed(fields["tools"]))
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if type(reasoning) is dict else None
    given = {"chat_template_kwargs": fields.get("chat_template_kwargs"), "reasoning_effort": effort}
    return ChatRequest(messages, tools, _context(given, rules), calls_as_given=True)


def _flat_tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """The functions among the tools; those that run elsewhere (a web search) are not shown to the model."""
    found: list[dict[str, Any]] = []
    for tool in tools:
        kind = tool.get("type") if type(tool) is dict else None
        if kind in (None, "namespace", "custom"):
            raise Unfollowed(Unhashed.UNSUPPORTED_PART)
        if kind == "function":
            found.append({"type": "function", "function": _function(tool)})
    return found


def _add_items(items: Iterable[Any], messages: list[Message]) -> None:
    """Items in OpenAI's Responses form to messages; an assistant's thoughts, words and calls become one message."""
    item: Any = None
    for item in items:
        if type(item) is not dict:
            raise Unfollowed(Unhashed.MALFORMED)
        kind, last = item.get("type", "message"), messages[-1] if messages else None
        if last is not None and last.get("role") != "assistant":
            last = None
        if kind == "function_call":
            _add_call(item, last, messages)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        elif kind == "reasoning":
            _add_said("reasoning", _thought(item), last, messages)
        elif kind == "message" and item.get("role") == "assistant" and item.get("content") not in (None, []):
            _add_said("content", _first_text(item["content"]), last, messages)
        elif kind == "message":
            messages.append(dict(item))
        else:
            raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    if item is not None and kind in ("message", "reasoning") and item.get("status") in ("in_progress", "incomplete"):
        raise Unfollowed(Unhashed.UNSUPPORTED_FIELD)  # it continues the last message


def _add_said(member: str, text: str, last: Message | None, messages: list[Message]) -> None:
    if last is not None and last.get(member) is None:
        last[member] = text
    else:
        messages.append({"role": "assistant", member: text})


def _add_call(item: Mapping[str, Any], last: Message | None, messages: list[Message]) -> None:
    if item.get("namespace"):
        raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "function": function, "type": "function"}
    if last is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
    else:
        last.setdefault("tool_calls", []).append(call)


def _thought(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    return _first_text(item.get("content") or item.get("summary"))


def _first_text(content: Any) -> str:
    first = content[0] if type(content) is list and content else content
    text = first.get("text", "") if type(first) is dict else first
    return text if type(text) is str else ""


# -- Anthropic ---------------------------------------------------------------------------------------------------------


def _anthropic(fields: Fields, rules: ToolRules, system_first: bool | None) -> ChatRequest:
    said = listed(fields.get("messages"))
    inline = [message for message in said if type(message) is dict and message.get("role") == "system"]
    if inline and system_first is None:
        raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    messages: list[Message] = []
    first = [_system(fields.get("system")), *(_inline_system(each) for each in inline if system_first)]
    if any(first):
        messages.append({"role": "system", "content": "".join(first)})
    for message in said:
        role = message.get("role") if type(message) is dict else None
        if role not in ("user", "assistant", "system"):
            raise Unfollowed(Unhashed.MALFORMED)
        content = message.get("content")
        if role == "system":
            if not system_first and (text := _inline_system(message)):
                messages.append({"role": "system", "content": text})
        elif type(content) is str:
            messages.append({"role": role, "content": content})
        else:
            _add_blocks(role, listed(content), messages)
    tools, choice = None, fields.get("tool_choice")
    hidden = type(choice) is dict and choice.get("type") == "none" and rules.exclude_tools_when_tool_choice_none
    if fields.get("tools") is not None and not hidden:
        tools = [_anthropic_tool(tool) for tool in listed(fields["tools"])]
    output, thinking = fields.get("output_config"), fields.get("thinking")
    effort = output.get("effort") if type(output) is dict else None
    if type(thinking) is dict and thinking.get("type") == "disabled":
        effort = rules.disabled_thinking_effort
    given = {"chat_template_kwargs": fields.get("chat_template_kwargs"), "reasoning_effort": effort}
    return ChatRequest(messages, tools, _context(given, rules))


def _system(system: Any) -> str:
    """The text of a system prompt without Claude Code's header, whose value changes with every request."""
    if system is None:
        return ""
    if type(system) is str:
        return system
    texts = [block.get("text") for block in listed(system) if type(block) is dict and block.get("type") == "text"]
    return "".join(text for text in texts if text and not text.startswith(BILLING_HEADER))


def _inline_system(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return "" if type(content) is str and content.startswith(BILLING_HEADER) else _system(content)


def _anthropic_tool(tool: Any) -> dict[str, Any]:
    if type(tool) is not dict or tool.get("type") not in (None, "custom") or type(tool.get("name")) is not str:
        raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    function: dict[str, Any] = {"name": tool["name"], "description": tool.get("description")}
    function["parameters"] = tool.get("input_schema")
    function |= {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _add_blocks(role: str, blocks: Iterable[Any], messages: list[Message]) -> None:
    """One message of content blocks; results of tools become messages of their own before it."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type") if type(block) is dict else None
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block.get("source"):
            parts.append({"type": "image_url", "image_url": {}})
        elif kind == "thinking":
            thoughts.append(block.get("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "function": function, "type": "function"})
        elif kind == "tool_result" and role == "user":
            _add_result(block, messages)
        elif kind != "redacted_thinking":
            raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    message: Message = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if role != "user" or "content" in message:
        messages.append(message)


def _add_result(block: Mapping[str, Any], messages: list[Message]) -> None:
    content, answered = block.get("content"), block.get("tool_use_id") or ""
    texts: list[str] = [content] if type(content) is str else []
    images = 0
    references: list[dict[str, Any]] = []
    for item in content if type(content) is list else ():
        kind = item.get("type") if type(item) is dict else None
        if kind == "text":
            texts.append(item.get("text", ""))
        elif kind == "image":
            images += 1
        elif kind == "tool_reference":
            if name := item.get("tool_name") or item.get("name"):
                references.append({"type": "tool_reference", "name": name})
        else:
            raise Unfollowed(Unhashed.UNSUPPORTED_PART)
    messages.append({"role": "tool", "tool_call_id": answered, "content": "\n".join(texts)})
    if images:
        messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {}}] * images})
    if references:
        messages.append({"role": "tool", "tool_call_id": answered, "content": references})
