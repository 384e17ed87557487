"""Block chains: what extends what, what never meets, and where blocks end."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from router.blocks import BlockHasher, BlockLadder

HASHER = BlockHasher(b"secret")
TEXT = random.Random(1).randbytes(600_000)


def hashes(text: bytes, *, model: str = "m", salt: str = "org", hasher: BlockHasher = HASHER) -> list[int]:
    return list(hasher.chain(model, salt, (text,)).hashes)


@pytest.mark.parametrize("size", [256, 5_000, 8_192, 100_000, 131_072, 500_000])
def test_a_longer_prompt_extends_the_chain_of_its_beginning(size: int) -> None:
    short = hashes(TEXT[:size])
    assert short and hashes(TEXT)[: len(short)] == short


@pytest.mark.parametrize("position", [0, 255, 256, 10_000, 200_000])
def test_one_changed_byte_changes_its_block_and_every_later_one(position: int) -> None:
    changed = bytearray(TEXT)
    changed[position] ^= 1
    ends = BlockLadder.graded().ends_bytes
    block = next(index for index, end in enumerate(ends) if position < end)
    before, after = hashes(TEXT), hashes(bytes(changed))
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after[block:])


@pytest.mark.parametrize(
    "other",
    [
        hashes(TEXT, model="n"),
        hashes(TEXT, salt="another org"),
        hashes(TEXT, salt=""),
        hashes(TEXT, hasher=BlockHasher(b"another secret")),
        hashes(TEXT, model="mo", salt="rg"),
    ],
)
def test_another_model_salt_or_secret_shares_no_hash(other: list[int]) -> None:
    assert not set(hashes(TEXT)) & set(other)


def test_parts_are_one_byte_stream_and_memoryviews_hash_as_bytes() -> None:
    whole = hashes(TEXT)
    for cut in (1, 300, 70_000):
        parts = (memoryview(TEXT)[:cut], TEXT[cut:])
        assert list(HASHER.chain("m", "org", parts).hashes) == whole
    assert list(HASHER.chain("m", "org", (memoryview(TEXT),)).hashes) == whole


def test_sibling_processes_with_one_secret_agree() -> None:
    assert hashes(TEXT, hasher=BlockHasher(b"secret")) == hashes(TEXT)


def test_a_prompt_shorter_than_a_block_has_no_hash_but_a_length() -> None:
    chain = HASHER.chain("m", "", (b"hello",))
    assert (list(chain.hashes), chain.total_bytes) == ([], 5)
    assert HASHER.chain("m", "", ()).total_bytes == 0


def test_a_block_is_a_small_part_of_the_prefix_before_it() -> None:
    ends = BlockLadder.graded().ends_bytes
    assert ends[:3] == (256, 512, 768) and ends[-1] == 32 * 1024 * 1024
    steps = [(start, end - start) for start, end in pairwise(ends)]
    assert all(step == 256 for start, step in steps if start < 8_192)
    assert all(step <= start / 8 for start, step in steps if start >= 8_192)


def test_seeds_are_bounded_and_survive_their_clearing() -> None:
    hasher = BlockHasher(b"secret")
    first = hashes(TEXT[:300], hasher=hasher)
    for number in range(20_000):
        hasher.chain(f"m{number}", "", (b"",))
    assert len(hasher._seeds) <= 8_192
    assert hashes(TEXT[:300], hasher=hasher) == first


def test_a_uniform_ladder_gives_equal_blocks() -> None:
    assert BlockLadder.uniform(512, 3).ends_bytes == (512, 1024, 1536)
