"""Every shape of request is either prepared as the engine prepares it, or has a reason why not (R14)."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from router.prompt_forms import (
    ChatRequest,
    PlainPrompt,
    PromptShape,
    ToolRules,
    Unhashed,
    read_request,
)
from router.prompt_messages import MEDIA_MARK, Conversation, conversation

HELLO = {"role": "user", "content": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def read(shape: PromptShape, **fields: Any) -> ChatRequest | PlainPrompt | Unhashed:
    before = copy.deepcopy(fields)
    found = read_request(shape, fields, ToolRules())
    assert fields == before, "the request's own values are not changed"
    return found


def chat(**fields: Any) -> ChatRequest:
    found = read(PromptShape.CHAT, messages=[HELLO], **fields)
    assert isinstance(found, ChatRequest)
    return found


def shown(messages: list[Any] | ChatRequest, content_is_parts: bool = False) -> list[dict[str, Any]]:
    request = messages if isinstance(messages, ChatRequest) else ChatRequest(messages, None, {})
    found = conversation(request, content_is_parts)
    assert isinstance(found, Conversation)
    return found.messages


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"prompt": "hi"}, PlainPrompt("hi")),
        ({"prompt": "hi", "add_special_tokens": False}, PlainPrompt("hi", None, False)),
        ({"prompt": [1, 2]}, PlainPrompt(None, [1, 2])),
        ({"prompt": ["hi"]}, PlainPrompt("hi")),
        ({"prompt": [[1, 2]]}, PlainPrompt(None, [1, 2])),
        ({"prompt": ["hi", "ho"]}, Unhashed.MANY_PROMPTS),
        ({"prompt": [[1], [2]]}, Unhashed.MANY_PROMPTS),
        ({"prompt": [[]]}, Unhashed.MALFORMED),
        ({"prompt": 3}, Unhashed.MALFORMED),
        ({}, Unhashed.MALFORMED),
        ({"prompt": "hi", "add_special_tokens": "no"}, Unhashed.MALFORMED),
        ({"prompt": "hi", "truncate_prompt_tokens": 5}, Unhashed.UNSUPPORTED_FIELD),
        ({"prompt_embeds": "AA=="}, Unhashed.UNSUPPORTED_FIELD),
    ],
)
def test_completions(fields: dict[str, Any], wanted: object) -> None:
    assert read(PromptShape.COMPLETION, **fields) == wanted


@pytest.mark.parametrize(
    ("shape", "fields", "reason"),
    [
        (PromptShape.CHAT, {}, Unhashed.MALFORMED),
        (PromptShape.CHAT, {"messages": [HELLO], "chat_template": "{{ 1 }}"}, Unhashed.UNSUPPORTED_FIELD),
        (PromptShape.CHAT, {"messages": [HELLO], "continue_final_message": True}, Unhashed.UNSUPPORTED_FIELD),
        (PromptShape.CHAT, {"messages": [HELLO], "chat_template_kwargs": {"tools": []}}, Unhashed.UNSUPPORTED_FIELD),
        (PromptShape.CHAT, {"messages": [HELLO], "tools": [{"type": "custom"}]}, Unhashed.UNSUPPORTED_PART),
        (PromptShape.CHAT, {"messages": [HELLO], "tools": [{"function": {}}]}, Unhashed.MALFORMED),
        (PromptShape.CHAT, {"messages": [HELLO], "add_generation_prompt": 1}, Unhashed.MALFORMED),
        (PromptShape.RESPONSES, {"input": "hi", "previous_response_id": "resp_1"}, Unhashed.STORED_HISTORY),
        (PromptShape.RESPONSES, {"input": "hi", "prompt": {"id": "p"}}, Unhashed.UNSUPPORTED_FIELD),
        (PromptShape.RESPONSES, {"input": [{"type": "web_search_call"}]}, Unhashed.UNSUPPORTED_PART),
        (
            PromptShape.RESPONSES,
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            Unhashed.UNSUPPORTED_PART,
        ),
        (PromptShape.RESPONSES, {"input": "hi", "tools": [{"type": "custom"}]}, Unhashed.UNSUPPORTED_PART),
        (
            PromptShape.RESPONSES,
            {"input": [{"role": "assistant", "content": "so", "status": "in_progress"}]},
            Unhashed.UNSUPPORTED_FIELD,
        ),
        (PromptShape.RESPONSES, {}, Unhashed.MALFORMED),
        (PromptShape.MESSAGES, {"messages": [{"role": "system", "content": "x"}]}, Unhashed.UNSUPPORTED_PART),
        (
            PromptShape.MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            Unhashed.UNSUPPORTED_PART,
        ),
        (
            PromptShape.MESSAGES,
            {"messages": [HELLO], "tools": [{"type": "bash_20250124", "name": "bash"}]},
            Unhashed.UNSUPPORTED_PART,
        ),
    ],
)
def test_what_is_not_followed_has_a_reason(shape: PromptShape, fields: dict[str, Any], reason: Unhashed) -> None:
    assert read(shape, **fields) is reason


def test_tools_are_written_out_in_the_schemas_order() -> None:
    tool = {
        "function": {"strict": True, "parameters": {"b": 1, "a": 2}, "x": 1, "name": "f"},
        "type": "function",
        "y": 1,
    }
    found = chat(tools=[tool]).tools
    assert found is not None
    assert str(found) == str(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}, "strict": True},
            }
        ]
    )


def test_no_tools_where_the_engine_leaves_them_out() -> None:
    fields = {"messages": [HELLO], "tools": [{"function": {"name": "f"}}], "tool_choice": "none"}
    for exclude in (False, True):
        found = read_request(PromptShape.CHAT, fields, ToolRules(exclude_tools_when_tool_choice_none=exclude))
        assert isinstance(found, ChatRequest)
        assert (found.tools is None) is exclude


def test_the_templates_variables() -> None:
    assert chat().context == {"add_generation_prompt": True}
    asked = chat(reasoning_effort="low", chat_template_kwargs={"a": 1, "add_generation_prompt": False})
    assert asked.context == {"a": 1, "add_generation_prompt": True, "reasoning_effort": "low", "enable_thinking": True}
    assert chat(reasoning_effort="none").context["enable_thinking"] is False
    own = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert own.context["enable_thinking"] is False
    default = read_request(
        PromptShape.CHAT, {"messages": [HELLO]}, ToolRules(default_template_kwargs={"enable_thinking": False})
    )
    assert isinstance(default, ChatRequest)
    assert default.context["enable_thinking"] is False


def test_content_as_text_and_as_parts() -> None:
    said = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}, {"type": "text", "text": None}]
    assert shown([{"role": "user", "content": said}]) == [{"role": "user", "content": "a\nb\nc"}]
    parts = [{"type": "text", "text": text} for text in "abc"]
    assert shown([{"role": "user", "content": said}], True) == [{"role": "user", "content": parts}]
    assert shown([{"role": "user", "content": "a"}], True) == [{"role": "user", "content": parts[:1]}]
    assert shown([{"role": "tool", "content": said, "tool_call_id": "t"}], True) == [
        {"role": "tool", "content": "a\nb\nc", "tool_call_id": "t"}
    ]
    assert shown([{"role": "assistant", "content": None}]) == [{"role": "assistant", "content": ""}]


def test_calls_of_tools_have_parsed_arguments_and_the_schemas_order() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}, "id": "c", "index": 0}
    bad = {"function": {"name": "g", "arguments": "{"}}
    (found,) = shown([{"role": "assistant", "content": "x", "tool_calls": [call, bad], "reasoning_content": "why"}])
    assert str(found["tool_calls"]) == str(
        [
            {"id": "c", "function": {"arguments": {"b": 1, "a": 2}, "name": "f"}, "type": "function"},
            {"function": {"arguments": {}, "name": "g"}},
        ]
    )
    assert found["reasoning"] == found["reasoning_content"] == "why"


def test_the_first_medium_marks_its_message() -> None:
    found = conversation(
        ChatRequest([HELLO, {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}, HELLO], None, {}),
        True,
    )
    assert isinstance(found, Conversation)
    assert found.mark == MEDIA_MARK
    assert found.messages[1]["content"] == [
        {"type": "text", "text": MEDIA_MARK},
        {"type": "text", "text": "see"},
        {"type": "image"},
    ]
    assert (
        conversation(ChatRequest([{"role": "user", "content": [{"type": "hologram"}]}], None, {}), True)
        is Unhashed.UNSUPPORTED_PART
    )
    assert conversation(ChatRequest([{"content": "x"}], None, {}), True) is Unhashed.MALFORMED


def test_responses_items_become_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [{"text": "hm"}], "content": [{"type": "reasoning_text", "text": "hmm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    found = read(PromptShape.RESPONSES, instructions="be", input=items, tools=[{"type": "function", "name": "f"}])
    assert isinstance(found, ChatRequest)
    call = {"id": "c", "function": {"arguments": {}, "name": "f"}, "type": "function"}
    assert shown(found) == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [call],
            "reasoning": "hmm",
            "reasoning_content": "hmm",
        },
        {"role": "tool", "content": "ok", "tool_call_id": "c"},
    ]
    assert found.tools == [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]
    thinking = read(PromptShape.RESPONSES, input="hi", reasoning={"effort": "low"})
    assert isinstance(thinking, ChatRequest)
    wanted = {"add_generation_prompt": True, "reasoning_effort": "low", "enable_thinking": True}
    assert thinking.context == wanted


def test_anthropic_blocks_become_messages() -> None:
    fields = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1f2e"},
            {"type": "text", "text": "be "},
            {"type": "text", "text": "good"},
        ],
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"b": 1, "a": 2}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "ok"}]},
                    {"type": "text", "text": "on"},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }
    found = read(PromptShape.MESSAGES, **fields)
    assert isinstance(found, ChatRequest)
    call = {"id": "c", "function": {"arguments": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    assert shown(found) == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "so", "tool_calls": [call], "reasoning": "hm", "reasoning_content": "hm"},
        {"role": "tool", "content": "ok", "tool_call_id": "c"},
        {"role": "user", "content": "on"},
    ]
    assert found.tools == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}
    ]


def test_a_screenshot_from_a_tool_marks_the_message_that_carries_it() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {"type": "url"}}]}
    found = read(PromptShape.MESSAGES, messages=[{"role": "user", "content": [result]}])
    assert isinstance(found, ChatRequest)
    said = conversation(found, True)
    assert isinstance(said, Conversation)
    assert [message["role"] for message in said.messages] == ["tool", "user"]
    assert said.mark


def test_thinking_and_effort() -> None:
    for thinking, effort in (({"type": "disabled"}, "none"), ({"type": "enabled", "budget_tokens": 9}, "high")):
        found = read(PromptShape.MESSAGES, messages=[HELLO], thinking=thinking, output_config={"effort": "high"})
        assert isinstance(found, ChatRequest)
        assert found.context["reasoning_effort"] == effort
        assert found.context["enable_thinking"] is (effort != "none")
