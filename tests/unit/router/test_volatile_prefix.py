"""Prompts that change near their beginning are noticed and the place is named; others are not (R29)."""

from __future__ import annotations

import random

import pytest

from router.volatile_prefix import Divergence, VolatilePrefixes


def words(seed: int, count: int, line_words: int = 12) -> str:
    dice = random.Random(seed)
    found = [f"w{dice.randrange(10**6)}" for _ in range(count)]
    return "\n".join(" ".join(found[n : n + line_words]) for n in range(0, count, line_words))


def turns(*prompts: str, conversation: str | None = "c") -> list[Divergence | None]:
    seen = VolatilePrefixes(b"secret")
    return [seen.turn("org", "model", conversation, prompt.encode()) for prompt in prompts]


def test_two_turns_that_differ_at_character_40_only() -> None:
    """R29's own probe."""
    text = words(1, 600)
    first, second = turns(text, text[:40] + "#" + text[41:])
    assert first is None
    assert second is not None
    assert second.offset_bytes <= 40 < second.offset_bytes + second.width_bytes
    assert second.width_bytes == 16


@pytest.mark.parametrize("offset", [0, 100, 2_047, 2_048, 5_000])
def test_the_place_is_named(offset: int) -> None:
    text = words(2, 4_000)
    found = turns(text, text[:offset] + "#" + text[offset + 1 :])[1]
    assert found is not None
    assert found.offset_bytes <= offset < found.offset_bytes + found.width_bytes


def test_a_line_of_another_length_is_noticed_too() -> None:
    text = words(3, 2_000)
    found = turns(f"id: 7\n{text}", f"id: 1234567\n{text}\nand more")[1]
    assert found is not None
    assert found.offset_bytes == 0
    body = '[{"role":"system","content":"today is %s"},{"role":"user","content":"%s"}'
    said = words(4, 1_000).replace("\n", "\\n")
    assert turns(body % ("the 1st", said), body % ("the 31st of May", said))[1] is not None


def test_a_conversation_that_grows_is_not_volatile() -> None:
    text = words(5, 3_000)
    assert turns(text[:900], text[:5_000], text, text + "!", text + "!?") == [None] * 5


def test_prompts_that_only_share_their_beginning_are_not_volatile() -> None:
    harness = words(6, 800)
    assert turns(harness + words(7, 800), harness + words(8, 800)) == [None, None]
    assert turns(words(9, 800), words(10, 800)) == [None, None]


def test_without_a_conversation_the_last_few_stand_in() -> None:
    text = words(11, 1_000)
    others = [words(20 + n, 1_000) for n in range(2)]
    found = turns("nonce 1111\n" + text, *others, "nonce 2222\n" + text, conversation=None)
    assert [each is not None for each in found] == [False, False, False, True]


def test_organisations_and_conversations_are_apart_and_counted() -> None:
    seen = VolatilePrefixes(b"secret")
    text = words(12, 600)
    changed = "#" + text[1:]
    assert seen.turn("a", "m", "c", text.encode()) is None
    assert seen.turn("b", "m", "c", changed.encode()) is None
    assert seen.turn("a", "n", "c", changed.encode()) is None
    assert seen.turn("a", "m", "d", changed.encode()) is None
    assert seen.turn("a", "m", "c", changed.encode()) is not None
    assert seen.turn("a", "m", "c", changed.encode()) is None
    count = seen.count("a", "m")
    assert (count.turns_count, count.volatile_count) == (2, 1)
    assert count.last is not None
    assert count.last.offset_bytes == 0
    assert seen.count("b", "m").turns_count == 0


def test_the_memory_is_bounded() -> None:
    seen = VolatilePrefixes(b"secret", max_bytes=20_000)
    for number in range(100):
        seen.turn("o", "m", str(number), words(number, 500).encode())
        assert 0 < seen.size_bytes <= 20_000
