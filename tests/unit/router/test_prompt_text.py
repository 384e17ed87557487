"""Chat templates run as the engines run them, within limits, and cannot reach anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.prompt_forms import ChatRequest, PromptShape, ToolRules, Unhashed, read_request
from router.prompt_text import ChatTemplate, PromptText, RenderLimits, special_variables

LIMITS = RenderLimits(10_000, lambda: False)
LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def template(source: str, **tokens: Any) -> ChatTemplate:
    return ChatTemplate(source, tokens, lambda form: f"today {form}")


def render(source: str, *messages: Any, limits: RenderLimits = LIMITS, **context: Any) -> PromptText | Unhashed:
    tools = context.pop("tools", None)
    request = ChatRequest(messages, tools, context)
    return template(source, bos_token="<s>").render(request, limits)


USER = {"role": "user", "content": "hé <b>"}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ bos_token }}" + LOOP, "<s><user>hé <b></s>"),
        ("{% if tools %}t{% endif %}{{ add_generation_prompt }}", "tTrue"),
        ("{{ tools | tojson }}", '[{"name": "<é>"}]'),
        ("{{ tools | tojson(indent=1) }}", '[\n {\n  "name": "<é>"\n }\n]'),
        ("{{ strftime_now('%d') }}", "today %d"),
        ("a\n{% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{% generation %}x{% set y = 1 %}{% endgeneration %}{{ y is defined }}", "xFalse"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ documents is none }}{{ nothing is defined }}", "TrueFalse"),
    ],
)
def test_it_writes_what_transformers_would(source: str, wanted: str) -> None:
    assert render(source, USER, tools=[{"name": "<é>"}], add_generation_prompt=True) == PromptText(wanted, True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.missing }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ (''.__class__.__mro__)[0].__subclasses__() }}",
        "{% for n in range(10000000) %}x{% endfor %}",
        "{{ tools | tojson }}",
    ],
)
def test_what_it_may_not_do_is_a_failure(source: str) -> None:
    assert render(source, USER, tools=object()) is Unhashed.TEMPLATE_FAILED


def test_it_may_not_write_or_run_for_ever() -> None:
    endless = "{% for a in range(1000) %}{% for b in range(1000) %}0123456789{{ a }}{% endfor %}{% endfor %}"
    assert render(endless, USER) is Unhashed.TEMPLATE_TOO_LONG
    looks = iter([False, True])
    assert render(endless, USER, limits=RenderLimits(10**9, lambda: next(looks))) is Unhashed.TEMPLATE_TOO_LONG


def test_a_template_that_is_none_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^The chat template cannot be compiled: .*\.$"):
        template("{% for %}")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (LOOP, False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", True),
        (
            "{% set rest = messages[1:] %}{% set all = rest %}{% for m in all %}"
            "{% if m.content is not string %}{% for c in m.content | list %}{{ c }}{% endfor %}{% endif %}{% endfor %}",
            True,
        ),
        (
            "{% set ns = namespace() %}{% set ns.all = messages %}"
            "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
        ("{% for m in other %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", False),
        ("{% for a, b in messages %}{% for c in a.content %}{{ c }}{% endfor %}{% endfor %}", False),
    ],
)
def test_what_content_it_expects(source: str, parts: bool) -> None:
    assert template(source).content_is_parts is parts


IMAGE_FIRST = "{% for m in messages %}[{{ m.role }}]{% for c in m.content if c.type == 'image' %}<image>{% endfor %}{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}{% endfor %}"  # noqa: E501  # one template
IN_ORDER = "{% for m in messages %}[{{ m.role }}]{% for c in m.content %}{{ c.text if c.type == 'text' else '<image>' }}{% endfor %}{% endfor %}"  # noqa: E501  # one template


@pytest.mark.parametrize(
    ("source", "wanted"), [(IN_ORDER, "[system]be[user]"), (LOOP, "<system>be</s><user>")], ids=["parts", "text"]
)
def test_the_text_ends_before_a_medium(source: str, wanted: str) -> None:
    seen = {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url"}]}
    system = {"role": "system", "content": "be"}
    assert render(source, system, seen, USER) == PromptText(wanted, False)


def test_a_template_that_moves_images_to_the_front_does_not_leave_one_in() -> None:
    seen = {"role": "user", "content": [{"type": "text", "text": "<image>"}, {"type": "image_url"}]}
    assert render(IMAGE_FIRST, {"role": "system", "content": "be"}, seen) == PromptText("[system]be[user]", False)


def test_special_tokens_as_variables() -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "model_max_length": 4096,
        "add_bos_token": True,
    }
    assert special_variables(config) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": ["<a>", "<b>"],
    }


# What vLLM 0.32.0's own functions (parse, post-process, convert, render) made of random requests under five templates:
# text content, parts, a developer role, a system message at the beginning only, a macro.
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "prompts_vllm_0.32.0.json").read_bytes())


@pytest.mark.parametrize("number", range(len(GOLDEN["cases"])))
def test_prompts_are_those_of_vllm(number: int) -> None:
    """R13: the engine's prompt, character by character, for chats, Responses and Anthropic messages."""
    case = GOLDEN["cases"][number]
    made = ChatTemplate(GOLDEN["templates"][case["template"]], {"bos_token": "<s>"}, str)
    request = read_request(PromptShape(case["shape"]), case["body"], ToolRules(), made.system_first)
    assert isinstance(request, ChatRequest)
    assert made.render(request, LIMITS) == PromptText(case["text"], True)
