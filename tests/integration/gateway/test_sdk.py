"""The OpenAI SDK against the gateway: what people really run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.gateway.client import Caller
from tests.integration.gateway.conftest import People
from tests.integration.gateway.stack import Node

ASK: list[Any] = [{"role": "user", "content": "hello"}]


def new_client(node: Node, secret: str, **more: Any) -> openai.OpenAI:
    """A client that loads no certificates and reads no environment."""
    http: Any = httpx.Client(verify=False, trust_env=False)
    return openai.OpenAI(base_url=node.url + "/v1", api_key=secret, http_client=http, **{"max_retries": 0, **more})


@pytest.fixture
def sdk(caller: Caller) -> Iterator[openai.OpenAI]:
    """A client of a tenant without limits."""
    with new_client(caller.node, caller.tenant.secret) as client:
        yield client


def test_a_chat(sdk: openai.OpenAI, node: Node) -> None:
    raw = sdk.chat.completions.with_raw_response.create(model="m", messages=ASK, max_tokens=5)
    answer = raw.parse()
    assert answer.choices[0].message.content == "tok1 tok2 tok3 tok4 tok5 "
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert raw.request_id is not None
    event = node.event(raw.request_id)
    assert (event.close.uncached_input_tokens, event.close.output_tokens) == (17, 5)


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream(usage: bool, sdk: openai.OpenAI) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    text, counted = "", []
    for chunk in sdk.chat.completions.create(model="m", messages=ASK, max_tokens=5, stream=True, **options):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        counted += [chunk.usage] if chunk.usage is not None else []
    assert text == "tok1 tok2 tok3 tok4 tok5 "
    assert [one.completion_tokens for one in counted] == ([5] if usage else [])


def test_several_choices_in_one_stream(sdk: openai.OpenAI, node: Node) -> None:
    texts = {0: "", 1: ""}
    with sdk.chat.completions.with_streaming_response.create(
        model="m", messages=ASK, max_tokens=4, n=2, stream=True
    ) as raw:
        for chunk in raw.parse():
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert raw.request_id is not None
        assert node.event(raw.request_id).close.output_tokens == 8
    assert texts == dict.fromkeys((0, 1), "tok1 tok2 tok3 tok4 ")


def test_interleaved_tool_calls_are_assembled_as_they_were_sent(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="m", messages=ASK, user="script:tool_calls") as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        (f"call_{n}", f"f{n}", '{"a":"\\"error\\"","usage":{}}') for n in range(3)
    ]
    assert final.choices[0].finish_reason == "tool_calls"


def test_logprobs_of_half_a_character(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(model="m", messages=ASK, stream=True, logprobs=True, user="script:logprobs")
    )
    found = chunks[0].choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert (found.content[0].token, found.content[0].bytes) == (" \ufffd", [240, 159])


def test_a_cut_stream_is_an_error_and_never_a_short_answer(sdk: openai.OpenAI, fresh: str) -> None:
    text = ""
    with pytest.raises(openai.APIError, match="lost"):
        for chunk in sdk.chat.completions.create(
            model=fresh, messages=ASK, stream=True, user="script:cut?after=3&how=reset&gap_ms=20"
        ):
            text += chunk.choices[0].delta.content or ""
            assert chunk.choices[0].finish_reason is None
    assert text == "tok1 tok2 tok3 "


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (openai.BadRequestError, {"n": 0}),
        (openai.NotFoundError, {"model": "no-such"}),
        (openai.AuthenticationError, {"api_key": "wrong"}),
        (openai.PermissionDeniedError, {"who": "reader"}),
        (openai.RateLimitError, {"user": "script:status?code=429"}),
        (openai.InternalServerError, {"model": "dead"}),
    ],
)
def test_errors_are_the_sdks_own_kinds(
    kind: type[openai.APIStatusError], arguments: dict[str, Any], node: Node, people: People, fresh: str
) -> None:
    secret = arguments.pop("api_key", None) or people[arguments.pop("who", "plain")].secret
    asked: dict[str, Any] = {"model": fresh, "messages": ASK, **arguments}
    with new_client(node, secret) as client, pytest.raises(kind) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.request_id is not None
    assert caught.value.request_id.startswith("req_")
    assert caught.value.body is not None


def test_the_sdk_retries_what_we_say_can_be_retried(node: Node, people: People, fresh: str) -> None:
    """Both engines are busy for a second; the SDK comes back when it was told to."""
    with new_client(node, people["plain"].secret, max_retries=2) as client:
        busy: Any = {"model": fresh, "messages": ASK}
        with pytest.raises(openai.RateLimitError):
            client.with_options(max_retries=0).chat.completions.create(
                **busy, user="script:status?code=429&retry_after=1"
            )
        answer = client.chat.completions.create(**busy, max_tokens=5)
    assert answer.choices[0].message.content == "tok1 tok2 tok3 tok4 tok5 "


def test_the_async_client_side_by_side(caller: Caller) -> None:
    async def run() -> list[str]:
        http: Any = httpx.AsyncClient(verify=False, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=caller.node.url + "/v1", api_key=caller.tenant.secret, http_client=http, max_retries=0
        ) as client:

            async def one(n: int) -> str:
                stream = await client.chat.completions.create(
                    model="m", messages=ASK, stream=True, user=f"script:normal?tokens=3&word=w{n}x"
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(n) for n in range(20)))

    assert asyncio.run(run()) == [f"w{n}x1 w{n}x2 w{n}x3 " for n in range(20)]


def test_models_and_completions(sdk: openai.OpenAI) -> None:
    assert "m" in {model.id for model in sdk.models.list()}
    assert sdk.models.retrieve("m").id == "m"
    recorded = "script:recorded?file=vllm_0.32.0/completion_nonstream.response.json"
    assert sdk.completions.create(model="m", prompt="x", user=recorded).choices[0].text
