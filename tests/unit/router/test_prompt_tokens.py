"""Requests to keys: quick ones at once, long ones in a thread, and every one that has none is counted with a reason."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from billing.json_members import json_members
from router.adapters.prompt_tokens import Prompt, PromptLimits, PromptTokens, body_fields, member_fields
from router.adapters.tokenizer_folder import load_folder
from router.kv_keys import chain_keys, token_bytes
from router.prompt_chains import ChainScope, PromptKeys
from router.prompt_forms import PromptShape, Unhashed
from tests.fakes.tokenizers_made import byte_level, write_folder

SCOPE = ChainScope(7, 4)
WORDS = "the engine holds the blocks of the prompt "
USER = {"role": "user", "content": "hello world"}
IMAGE = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), byte_level(bos=True))


@pytest.fixture
def tokens(folder: Path) -> Iterator[PromptTokens]:
    made = PromptTokens(b"secret", itertools.count().__next__, PromptLimits(max_text_bytes=200_000, gate_wait_s=30))
    made.set_models({"m": load_folder(folder), "bare": load_folder(write_folder(folder / "bare", byte_level(), None))})
    yield made
    made.close()


def ask(shape: PromptShape, model: str = "m", **fields: Any) -> Prompt:
    return Prompt(model, shape, fields, SCOPE)


def wanted(text: str, special: bool = False) -> Any:
    ids = Tokenizer.from_str(byte_level(bos=True)).encode(text, add_special_tokens=special).ids
    return chain_keys(7, token_bytes(ids), 4)


CHAT = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "text", "special"),
    [
        (ask(PromptShape.CHAT, messages=[USER]), CHAT, False),
        (ask(PromptShape.CHAT, messages=[USER], add_special_tokens=True), CHAT, True),
        (ask(PromptShape.CHAT, messages=[{**USER, "content": [{"type": "text", "text": "hello world"}]}]), CHAT, False),
        (ask(PromptShape.RESPONSES, input="hello world"), CHAT, False),
        (ask(PromptShape.MESSAGES, messages=[USER]), CHAT, False),
        (ask(PromptShape.COMPLETION, prompt=WORDS), WORDS, True),
        (ask(PromptShape.COMPLETION, prompt=WORDS, add_special_tokens=False), WORDS, False),
    ],
)
def test_every_shape_becomes_the_engines_tokens(tokens: PromptTokens, prompt: Prompt, text: str, special: bool) -> None:
    found = tokens.keys_now(prompt)
    assert isinstance(found, PromptKeys)
    assert found.keys == wanted(text, special)
    assert tokens.counts == {(prompt.shape, None): 1}


def test_tools_and_calls_are_in_the_prompt(tokens: PromptTokens) -> None:
    """R13: a chat with a system message, tools and a call has the keys of the text that the template writes."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":"é"}'}}
    messages = [{"role": "system", "content": "be"}, USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = tokens.keys_now(ask(PromptShape.CHAT, messages=messages, tools=[TOOL]))
    assert isinstance(found, PromptKeys)
    text = (
        '<|im_start|>system\n{"type": "function", "function": {"name": "f", "description": "d", "parameters": '
        '{"type": "object"}}}\n<|im_end|>\n<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhello world<|im_end|>\n'
        '<|im_start|>assistant\n<call>{"arguments": {"b": 1, "a": "é"}, "name": "f"}</call><|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    assert found.keys == wanted(text)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (ask(PromptShape.CHAT, "unknown", messages=[USER]), Unhashed.NO_TOKENIZER),
        (ask(PromptShape.CHAT, "bare", messages=[USER]), Unhashed.NO_TEMPLATE),
        (ask(PromptShape.CHAT, messages=[{"role": "user", "content": 5}]), Unhashed.MALFORMED),
        (ask(PromptShape.CHAT, messages=[{"role": "user", "content": [{"type": "x"}]}]), Unhashed.UNSUPPORTED_PART),
        (ask(PromptShape.CHAT, messages=[{"role": "user", "content": "\ud800"}]), Unhashed.MALFORMED),
        (ask(PromptShape.CHAT, messages=[USER], truncate_prompt_tokens=9), Unhashed.UNSUPPORTED_FIELD),
        (ask(PromptShape.COMPLETION, prompt=["a", "b"]), Unhashed.MANY_PROMPTS),
        (ask(PromptShape.COMPLETION, prompt=WORDS * 10_000), Unhashed.TOO_LONG),
        (ask(PromptShape.COMPLETION, prompt=[1] * 60_000), Unhashed.TOO_LONG),
        (ask(PromptShape.RESPONSES, input="a", previous_response_id="r"), Unhashed.STORED_HISTORY),
    ],
)
def test_every_fallback_is_counted_with_its_reason(tokens: PromptTokens, prompt: Prompt, reason: Unhashed) -> None:
    """R14."""
    assert tokens.keys_now(prompt) is reason
    assert tokens.counts == {(prompt.shape, reason): 1}


def test_an_image_is_a_part_and_counted(tokens: PromptTokens) -> None:
    """R18: what comes before it has keys, two images with the same text share no more than that."""
    system = {"role": "system", "content": WORDS * 20}
    found = tokens.keys_now(ask(PromptShape.CHAT, messages=[system, IMAGE]))
    assert isinstance(found, PromptKeys)
    assert found.reason is Unhashed.MEDIA
    assert found.total_tokens is None
    whole = wanted(f"<|im_start|>system\n{system['content']}<|im_end|>\n<|im_start|>user\n")
    assert found.keys == whole[: len(found.keys)]
    assert len(found.keys) >= len(whole) - 2
    assert tokens.counts == {(PromptShape.CHAT, Unhashed.MEDIA): 1}


def test_token_ids_need_no_tokenizer(tokens: PromptTokens) -> None:
    found = tokens.keys_now(ask(PromptShape.COMPLETION, "unknown", prompt=list(range(10, 110))))
    assert isinstance(found, PromptKeys)
    assert found.keys == chain_keys(7, token_bytes(list(range(10, 110))), 4)
    long = tokens.keys_now(ask(PromptShape.COMPLETION, "unknown", prompt=list(range(40_000))))
    assert isinstance(long, PromptKeys), "hashing ids is quick enough for the event loop"


def test_an_engines_ids_stand_in_for_a_tokenizer(tokens: PromptTokens) -> None:
    assert tokens.knows("m")
    assert not tokens.knows("unknown")
    prompt = ask(PromptShape.CHAT, "unknown", messages=[USER])
    found = tokens.keys_of_ids(prompt, list(range(10, 110)))
    assert isinstance(found, PromptKeys)
    assert found.keys == chain_keys(7, token_bytes(list(range(10, 110))), 4)
    assert tokens.keys_of_ids(prompt, Unhashed.ENGINE_TIMEOUT) is Unhashed.ENGINE_TIMEOUT
    assert tokens.counts == {(PromptShape.CHAT, None): 1, (PromptShape.CHAT, Unhashed.ENGINE_TIMEOUT): 1}


async def test_a_long_prompt_is_left_to_a_thread_and_then_remembered(tokens: PromptTokens) -> None:
    messages = [{"role": "user", "content": WORDS * 500}]
    prompt = ask(PromptShape.CHAT, messages=messages)
    assert tokens.keys_now(prompt) is None
    assert not tokens.counts
    cold = await tokens.keys(prompt)
    assert isinstance(cold, PromptKeys)
    again = ask(PromptShape.CHAT, messages=[*messages, USER])
    warm = tokens.keys_now(again)
    assert isinstance(warm, PromptKeys)
    assert warm.new_bytes < 1_000
    assert warm.keys[: len(cold.keys) - 5] == cold.keys[:-5]
    assert await tokens.keys(again) == warm


async def test_siblings_of_one_cold_prompt_do_not_all_tokenise_it(tokens: PromptTokens) -> None:
    shared = {"role": "system", "content": WORDS * 500}
    prompts = [
        ask(PromptShape.CHAT, messages=[shared, {"role": "user", "content": f"number {n} " + WORDS * 5}])
        for n in range(8)
    ]
    found = await asyncio.gather(*(tokens.keys(prompt) for prompt in prompts))
    costs = sorted(each.new_bytes for each in found if isinstance(each, PromptKeys))
    assert len(costs) == 8
    assert costs[-1] > 20_000
    assert costs[-3] < 3_000, "two threads begin; the others find what they did"


async def test_who_finds_every_thread_taken_does_not_wait_long(folder: Path) -> None:
    made = PromptTokens(b"s", itertools.count().__next__, PromptLimits(thread_count=1, gate_wait_s=0.01))
    made.set_models({"m": load_folder(folder)})
    release = threading.Event()
    taken = made._threads.submit(release.wait)  # the only thread has other work
    first = asyncio.create_task(made.keys(ask(PromptShape.CHAT, messages=[{"role": "user", "content": WORDS * 500}])))
    await asyncio.sleep(0)
    other = ask(PromptShape.CHAT, messages=[{"role": "user", "content": "other " + WORDS * 500}])
    assert await made.keys(other) is Unhashed.BUSY
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await made.keys(other) is Unhashed.BUSY, "a thread is taken as long as it works, whoever waits for it"
    release.set()
    taken.result(20)
    while made._gate.locked():  # noqa: ASYNC110 - a semaphore sets no event
        await asyncio.sleep(0.01)
    again = made.keys_now(ask(PromptShape.CHAT, messages=[{"role": "user", "content": WORDS * 500}, USER]))
    assert isinstance(again, PromptKeys) and again.new_bytes < 1_000, "what it worked out is kept"
    made.close()


def test_many_messages_or_tools_are_not_rendered(tokens: PromptTokens) -> None:
    for fields in ({"messages": [USER] * 2_001}, {"messages": [USER], "tools": [TOOL] * 2_001}):
        assert tokens.keys_now(ask(PromptShape.CHAT, **fields)) is Unhashed.TOO_LONG


# Put together here, so that no constant of this file, nor pytest's copy of it, has it.
CANARY = "".join(reversed("egassemterces"))


async def test_nothing_of_a_request_is_kept_after_its_answer(tokens: PromptTokens) -> None:
    """Templates, threads and failures hold no text either."""
    seen = [{"type": "text", "text": CANARY}, {"type": "image_url"}]
    for content in (f"{CANARY} " * 10, f"{CANARY} " * 2_000, seen):
        await tokens.keys(ask(PromptShape.CHAT, messages=[{"role": "user", "content": content}]))
        tokens.keys_now(ask(PromptShape.COMPLETION, prompt=[f"{CANARY} {content}"]))
    failing = [
        {"role": "user", "content": CANARY * 3, "tool_calls": 5},
        {"role": "assistant", "tool_calls": [CANARY * 3]},
    ]
    assert tokens.keys_now(ask(PromptShape.CHAT, messages=failing)) is Unhashed.UNSUPPORTED_PART
    del content, failing, seen
    assert len(tokens.chains) > 0
    gc.collect()
    kept = [
        f"{type(member).__name__} in {type(holder).__name__}"
        for holder in gc.get_objects()
        for member in gc.get_referents(holder)
        # not isinstance: a weak proxy of an object that is gone would raise
        if (issubclass(type(member), str) and CANARY in member and member != CANARY)
        or (issubclass(type(member), bytes | bytearray) and CANARY.encode() in member)
    ]
    assert kept == []


def test_a_template_that_runs_too_long(folder: Path) -> None:
    looks = itertools.count(0, 10)
    made = PromptTokens(b"s", looks.__next__)
    slow = write_folder(folder / "slow", byte_level(), "{% for n in range(1000) %}x{{ n }}{% endfor %}")
    made.set_models({"m": load_folder(slow)})
    assert made.keys_now(ask(PromptShape.CHAT, messages=[USER])) is Unhashed.TEMPLATE_TOO_LONG
    made.close()


def test_a_tokenizer_that_fails_is_a_reason(tokens: PromptTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, texts: object) -> list[list[int]]:
        raise RuntimeError("no")

    monkeypatch.setattr("router.adapters.tokenizer_folder.ModelTokenizer.encode", fail)
    assert tokens.keys_now(ask(PromptShape.CHAT, messages=[USER])) is Unhashed.TOKENIZER_FAILED


def test_a_body_is_read_as_the_engines_read_it() -> None:
    fields = body_fields('{"prompt":"é","n":18446744073709551617,"x":1.10}'.encode())
    assert fields == {"prompt": "é", "n": 18446744073709551617, "x": 1.1}
    with pytest.raises(ValueError, match="JSON object"):
        body_fields(b"[]")


@pytest.mark.parametrize("said", ["hé \U0001f642", "plain", "\\u00e9"])
def test_members_that_the_gateway_has_read_are_fields(said: str) -> None:
    """It reads bodies as Latin-1, for the offsets' sake."""
    body = f'{{"model":"m","messages":[{{"role":"user","content":"{said}"}}],"n":2,"tool_choice":"none"}}'.encode()
    members, _ = json_members(body.decode("latin-1"))
    whole = body_fields(body)
    assert member_fields(body, members) == {name: whole[name] for name in ("messages", "tool_choice")}
