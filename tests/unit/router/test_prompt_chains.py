"""What is remembered of prompts: keys that match a real engine's, at the cost of what is new, and no text."""

from __future__ import annotations

import gc
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router import kv_events
from router.adapters.tokenizer_folder import ModelTokenizer
from router.kv_keys import ChainIdentity, chain_keys, prompt_extras, root_key, token_bytes
from router.prompt_chains import ChainScope, PromptChains, PromptKeys, Work
from router.prompt_forms import Unhashed
from tests.fakes.tokenizers_made import byte_level

RECORDED = Path(__file__).parents[2] / "recorded" / "vllm_0.32.0"
SCOPE = ChainScope(7, 4)
WORDS = "the engine holds the blocks of the prompt and the router knows it "


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(byte_level().encode(), {})


def keys(chains: PromptChains, tokenizer: Any, text: str, scope: ChainScope = SCOPE, **how: bool) -> PromptKeys:
    work = chains.begin(tokenizer, scope, text, **{"special": False, "whole": True, **how})
    assert isinstance(work, Work)
    found = work.run()
    chains.keep(work)
    return found


def id_keys(chains: PromptChains, ids: Sequence[int], scope: ChainScope = SCOPE) -> PromptKeys:
    work = chains.begin_ids(scope, ids)
    assert isinstance(work, Work)
    found = work.run()
    chains.keep(work)
    return found


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_a_returning_step_costs_what_is_new(tokenizer: ModelTokenizer) -> None:
    chains = PromptChains(b"s", 1 << 24)
    chat = "".join(turn("user", WORDS * 20) + turn("assistant", WORDS * 5) for _ in range(60))
    first = keys(chains, tokenizer, chat)
    assert first.new_bytes == len(chat)
    for _ in range(5):
        chat += turn("user", WORDS * 3)
        again = keys(chains, tokenizer, chat)
        assert again.new_bytes < 1_000
        assert again == keys(PromptChains(b"s", 1 << 24), tokenizer, chat)._replace(new_bytes=again.new_bytes)


def test_a_step_after_a_long_answer_of_a_tool_costs_what_is_new(tokenizer: ModelTokenizer) -> None:
    """The block that was not full ends within a part of 60 kB, which is not tokenised again."""
    chains = PromptChains(b"s", 1 << 24)
    chat = turn("user", WORDS) + turn("tool", WORDS * 1_000)
    keys(chains, tokenizer, chat)
    chat += turn("assistant", "well")
    assert keys(chains, tokenizer, chat).new_bytes < 1_000


def test_a_branch_costs_what_is_not_shared(tokenizer: ModelTokenizer) -> None:
    chains = PromptChains(b"s", 1 << 24)
    harness = turn("system", WORDS * 100) + "".join(turn("user", WORDS * 20) for _ in range(20))
    keys(chains, tokenizer, harness + turn("user", "one"))
    other = keys(chains, tokenizer, harness + turn("user", "another one"))
    assert other.new_bytes < len(harness) // 10


def test_siblings_of_one_long_message_cost_what_is_not_shared(tokenizer: ModelTokenizer) -> None:
    """The shared prefix is one part: its end is cut within, too."""
    chains = PromptChains(b"s", 1 << 24)
    shared = turn("system", WORDS * 1_000)
    keys(chains, tokenizer, shared + turn("user", "one " + WORDS * 10))
    assert keys(chains, tokenizer, shared + turn("user", "two " + WORDS * 10)).new_bytes < 2_000


def test_salts_and_roots_share_nothing(tokenizer: ModelTokenizer) -> None:
    """R16, R17: an adapter is another root, a tenant another salt; the same again finds what is there."""
    chains = PromptChains(b"s", 1 << 24)
    text = turn("user", WORDS * 50)
    scopes = [SCOPE._replace(salt=salt) for salt in ("a", "b", None, "")] + [ChainScope(8, 4, "a")]
    found = [keys(chains, tokenizer, text, scope) for scope in scopes]
    assert len({each.keys[0] for each in found[:3]}) == 3
    assert all(each.new_bytes == len(text) for each in found)
    assert len({each.keys[-1] for each in (found[0], found[1], found[2], found[4])}) == 4
    again = keys(chains, tokenizer, text, scopes[0])
    assert again.keys == found[0].keys
    assert again.new_bytes < len(text)


def test_what_follows_a_medium_is_not_hashed(tokenizer: ModelTokenizer) -> None:
    """R18: two prompts with the same text and another image have the same keys up to it, and none behind."""
    chains = PromptChains(b"s", 1 << 24)
    text = turn("user", WORDS * 50) + "<|im_start|>user\n" + WORDS
    part = keys(chains, tokenizer, text, whole=False)
    whole = keys(chains, tokenizer, text)
    assert part.total_tokens is None
    assert part.reason is Unhashed.MEDIA
    assert part.keys == whole.keys[: len(part.keys)]
    assert len(whole.keys) - 5 - len(WORDS) // 4 <= len(part.keys) < len(whole.keys)
    assert not keys(chains, tokenizer, WORDS, whole=False).keys, "no anchor: nothing is certain"


def test_token_ids_cost_what_is_new() -> None:
    chains = PromptChains(b"s", 1 << 24)
    ids = [n * 7919 % 50_000 for n in range(20_000)]
    scope = ChainScope(7, 16, "salt")
    assert id_keys(chains, ids, scope).new_bytes == 80_000
    again = id_keys(chains, ids + [5] * 100, scope)
    assert again.new_bytes < 4 * (100 + 1_024 + 16)
    assert again.keys == chain_keys(7, token_bytes(ids + [5] * 100), 16, prompt_extras("salt"))
    assert again.total_tokens == 20_100
    assert chains.begin_ids(scope, ["a"]) is Unhashed.MALFORMED  # type: ignore[list-item]  # what a client may send


def test_text_that_is_no_unicode(tokenizer: ModelTokenizer) -> None:
    assert PromptChains(b"s", 1).begin(tokenizer, SCOPE, "\ud800", special=False, whole=True) is Unhashed.MALFORMED


def test_the_store_is_bounded_and_forgets_the_longest_unused(tokenizer: ModelTokenizer) -> None:
    chains = PromptChains(b"s", 40_000)
    kept = turn("user", "kept " + WORDS * 20)
    keys(chains, tokenizer, kept)
    for number in range(200):
        keys(chains, tokenizer, turn("user", f"{number} " + WORDS * 20))
        assert chains.size_bytes <= 40_000
        assert keys(chains, tokenizer, kept).new_bytes < len(kept)
    assert len(chains) > 10


def test_two_at_a_time_on_the_same_prompt(tokenizer: ModelTokenizer) -> None:
    chains = PromptChains(b"s", 1 << 20)
    text = turn("user", WORDS * 50) + turn("assistant", WORDS * 50)
    works = [chains.begin(tokenizer, SCOPE, text, special=False, whole=True) for _ in range(2)]
    found = []
    for work in works:
        assert isinstance(work, Work)
        found.append(work.run())
    for work in works:
        assert isinstance(work, Work)
        chains.keep(work)
    assert found[0] == found[1]
    assert keys(chains, tokenizer, text + turn("user", "more")).new_bytes < 1_000


# Put together here, so that no constant of this file, nor pytest's copy of it, has it.
CANARY = "".join(reversed("yranacrabiznaz"))


class Kept:
    """What the search must find."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def secret_text() -> str:
    return turn("user", f"my secret is {CANARY} " * 40) + turn("assistant", WORDS)


def test_the_search_finds_what_is_kept(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode([secret_text()])[0]
    kept = [Kept(secret_text()), Kept([secret_text().encode()]), Kept(ids[10:90]), Kept(array("I", ids))]
    run = ids[60:68]
    del ids
    assert sorted(holders(CANARY, run)) == ["array in Kept", "bytes in list", "list of ids", "str in Kept"]
    del kept


def test_no_text_and_no_token_ids_are_kept(tokenizer: ModelTokenizer) -> None:
    """After the answer no live object holds the prompt: not its text, not its bytes, not its token ids."""
    chains = PromptChains(b"s", 1 << 24)
    run = tokenizer.encode([secret_text()])[0][60:68]
    keys(chains, tokenizer, secret_text(), SCOPE._replace(salt="tenant"))
    keys(chains, tokenizer, secret_text() + turn("user", CANARY))
    keys(chains, tokenizer, secret_text(), whole=False)
    id_keys(chains, tokenizer.encode([secret_text()])[0] * 50)
    assert len(chains) > 3
    assert holders(CANARY, run) == []


def holders(canary: str, run: list[int]) -> list[str]:
    """The kinds of live objects that hold the canary, or these token ids one after the other.

    Strings and bytes are no containers and are not listed by the collector, but what holds them is.
    """
    gc.collect()
    needles, found = (canary.encode(), token_bytes(run)), []
    for holder in gc.get_objects():
        if holder is run:
            continue
        if type(holder) is list and holder and type(holder[0]) is int and run[0] in holder:
            places = (n for n, each in enumerate(holder) if each == run[0])
            found += ["list of ids" for n in places if holder[n : n + len(run)] == run][:1]
        for member in gc.get_referents(holder):
            kind = type(member)  # not isinstance: a weak proxy of an object that is gone would raise
            if issubclass(kind, str):
                held = canary in member and member != canary
            elif issubclass(kind, bytes | bytearray | array):
                held = any(needle in bytes(member) and member is not needle for needle in needles)
            else:
                continue
            if held:
                found.append(f"{type(member).__name__} in {type(holder).__name__}")
    return found


# -- a real engine's bytes ---------------------------------------------------------------------------------------------


def recorded(name: str) -> Any:
    return json.loads((RECORDED / name).read_bytes())


def stored(during: str) -> list[kv_events.BlocksStored]:
    """The blocks that vLLM 0.32 published while it served a recorded request."""
    found = []
    for line in (RECORDED / "kv_events.jsonl").read_text().splitlines():
        message = json.loads(line)
        if message["during"] == during:
            batch = kv_events.decode(bytes.fromhex(message["payload_hex"]))
            assert isinstance(batch, kv_events.Batch)
            found += [event for event in batch.events if isinstance(event, kv_events.BlocksStored)]
    return found


def event_keys(root: int, event: kv_events.BlocksStored) -> Any:
    return chain_keys(root, event.tokens, event.block_tokens, event.extras or ())


# The recorded engine's tokenizer is not in the recording; these are the ids that it gave to words, from its answers.
VOCABULARY = {
    "<|bos|>": 1, "<|eos|>": 2, "<|user|>": 3, "<|assistant|>": 4, "hello": 519, "Ġworld": 445, "Ġthe": 389,
    "Ġquick": 501, "Ġbrown": 512, "Ġfox": 479, "the": 541, "Ġ": 226,
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded_tokenizer() -> ModelTokenizer:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<|eos|>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = [AddedToken(name, special=True, normalized=False) for name in VOCABULARY if name.startswith("<|")]
    made.add_special_tokens(specials)
    return ModelTokenizer(made.to_str().encode(), {})


def test_keys_of_token_ids_are_those_of_the_engines_blocks() -> None:
    body = recorded("completion_token_ids_cache_salt.meta.json")["request_body"]
    (event,) = stored("completion_token_ids_cache_salt")
    root = root_key(b"secret", ChainIdentity("tiny", event.block_tokens))
    ours = id_keys(PromptChains(b"s", 1 << 20), body["prompt"], ChainScope(root, event.block_tokens, "tenant-a"))
    assert ours.keys == event_keys(root, event)
    assert len(ours.keys) == 3
    other = id_keys(PromptChains(b"s", 1 << 20), body["prompt"], ChainScope(root, event.block_tokens))
    assert other.keys[0] != ours.keys[0]


def test_keys_of_text_are_those_of_the_engines_blocks(recorded_tokenizer: ModelTokenizer) -> None:
    body = recorded("completion_nonstream.meta.json")["request_body"]
    event = stored("completion_nonstream")[0]
    root = root_key(b"secret", ChainIdentity("tiny", event.block_tokens))
    ours = keys(PromptChains(b"s", 1 << 20), recorded_tokenizer, body["prompt"], ChainScope(root, event.block_tokens))
    assert ours.keys == event_keys(root, event)
    assert ours.total_tokens == recorded("completion_nonstream.response.json")["usage"]["prompt_tokens"]


def test_token_ids_are_those_of_the_engines_tokenize(recorded_tokenizer: ModelTokenizer) -> None:
    body = recorded("tokenize.meta.json")["request_body"]
    assert recorded_tokenizer.encode([body["prompt"]])[0] == recorded("tokenize.response.json")["tokens"]
