"""Properties of the simulated engine's parsing and template, each shown to fail on a planted fault.

Any body is either a checked request or vLLM's error; a conversation's next prompt extends this one and its answer
token for token (the prefix cache depends on it); and different conversations never have the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel.adapters.chat_template import render_chat
from perfmodel.adapters.engine_wire import (
    Generation,
    WireLimits,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from perfmodel.errors import ClientError
from perfmodel.workload import tokenize

Messages = list[dict[str, str]]
Render = Callable[[Sequence[object]], bytes]
Parse = Callable[[bytes, WireLimits], object]

LIMITS = WireLimits(("tiny",), 100)
MUTANT = settings(
    max_examples=1000,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)

# JSON can hold no NUL unescaped, and text that imitates the template's own marks is the client's doing, as with a real
# engine's special tokens.
CONTENT = st.text(st.characters(exclude_characters="\0<", codec="utf-8"), max_size=12)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": CONTENT}),
    min_size=1,
    max_size=4,
)


# A conversation grows


def check_growth(render: Render, how: settings) -> None:
    @how
    @given(MESSAGES, st.integers(1, 6), CONTENT)
    def grows(messages: Messages, answer_tokens: int, question: str) -> None:
        answer = " abc" * answer_tokens
        turn = [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        known = [*tokenize(render(messages)).tolist(), *tokenize(answer.encode()).tolist()]
        assert tokenize(render([*messages, *turn])).tolist()[: len(known)] == known

    grows()


def unpadded(messages: Sequence[object]) -> bytes:
    return render_chat(messages).replace(b"\0", b"")


def question_first(messages: Sequence[object]) -> bytes:
    return render_chat([messages[-1], *messages[:-1]])


def newline_after_the_answers_mark(messages: Sequence[object]) -> bytes:
    return render_chat(messages) + b"\n\n\n\n"


def test_the_next_prompt_extends_this_one_and_its_answer() -> None:
    check_growth(render_chat, settings())


@pytest.mark.parametrize("mutant", [unpadded, question_first, newline_after_the_answers_mark])
def test_a_template_that_breaks_the_prefix_is_caught(mutant: Render) -> None:
    with pytest.raises(AssertionError):
        check_growth(mutant, MUTANT)


# Conversations are told apart


def check_difference(render: Render, how: settings) -> None:
    @how
    @given(MESSAGES, MESSAGES)
    def differs(first: Messages, second: Messages) -> None:
        assert (render(first) == render(second)) == (first == second)

    differs()


def without_roles(messages: Sequence[Any]) -> bytes:
    return render_chat([{**message, "role": "user"} for message in messages])


def stripped(messages: Sequence[Any]) -> bytes:
    return render_chat([{**message, "content": message["content"].strip()} for message in messages])


def test_different_conversations_have_different_prompts() -> None:
    check_difference(render_chat, settings())


@pytest.mark.parametrize("mutant", [without_roles, stripped])
def test_a_template_that_drops_something_is_caught(mutant: Render) -> None:
    with pytest.raises(AssertionError):
        check_difference(mutant, MUTANT)


# Bodies are checked

NAMES = (
    "messages prompt model n max_tokens max_completion_tokens stream stream_options temperature top_p logprobs seed "
    "stop top_logprobs tools cache_salt min_tokens ignore_eos echo priority request_id tokens return_token_ids"
).split()
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 101, 2**31, 2**32, 2**63, -(2**63), 0.0, 0.5, 1.0, -0.5, 1e300),
    *("", "a", "7", "true", "\ud7ff", "\0", [], [0], [1.5], ["a"], [None], [[]], [[1], [2]], [True], [2**40], ["a", 1]),
    *({}, {"role": "user", "content": "a"}, [{"role": "user", "content": "a"}], [{"role": ""}], [{"role": "user"}]),
    *([{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"role": "user", "content": [1]}]),
    *({"include_usage": True}, {"include_usage": 1, "continuous_usage_stats": "x"}),
)
BODIES = st.builds(
    lambda odd, good: json.dumps({**good, **odd}).encode(),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ODD_VALUES), max_size=3),
    st.sampled_from([{}, {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}, {"tokens": [1]}])
    # Lengths around the context's limit.
    | st.builds(
        lambda length, limit: {"prompt": [1] * length, "max_tokens": limit},
        st.sampled_from([1, 50, 99, 100, 101]),
        st.sampled_from([None, 1, 50, 51, 99, 100, 101]),
    ),
)


def check_refusals(parse: Parse, how: settings) -> None:
    @how
    @given(BODIES | st.binary(max_size=50))
    def refuses_or_parses(body: bytes) -> None:
        try:
            call = parse(body, LIMITS)
        except ClientError as fault:
            assert fault.status in (400, 404)
            return
        if isinstance(call, Generation):
            assert 1 <= call.choice_count <= 128
            for prompt, limit in zip(call.prompts, call.max_tokens, strict=True):
                assert len(prompt) >= 1
                assert limit >= max(1, call.min_tokens)
                assert len(prompt) + limit <= LIMITS.max_model_tokens

    refuses_or_parses()


@pytest.mark.parametrize("parse", [parse_chat, parse_completion, parse_tokenize, parse_detokenize])
def test_any_body_is_a_checked_request_or_a_refusal(parse: Parse) -> None:
    check_refusals(parse, settings())


def without_the_contexts_limit(body: bytes, limits: WireLimits) -> object:
    return parse_completion(body, WireLimits(limits.model_names, 10**9))


def trusting(body: bytes, limits: WireLimits) -> object:
    parsed = json.loads(body)
    return parse_completion(json.dumps({**parsed, "n": 1}).encode(), limits)


@pytest.mark.parametrize("mutant", [without_the_contexts_limit, trusting])
def test_a_parser_that_lets_something_through_is_caught(mutant: Parse) -> None:
    with pytest.raises((AssertionError, ValueError, TypeError)):
        check_refusals(mutant, MUTANT)
