"""Block keys: what enters them, and that a step costs what is new."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from router.kv_keys import ChainIdentity, alias_seed, chain_keys, prompt_extras, root_key, token_bytes

SECRET = b"secret"
TOKENS = token_bytes(range(1_000))
IDENTITY = ChainIdentity("m", 16)


def keys(tokens: bytes = TOKENS, identity: ChainIdentity = IDENTITY, **extras: object) -> array[int]:
    return chain_keys(root_key(SECRET, identity), tokens, identity.block_tokens, **extras)  # type: ignore[arg-type]  # extras


def test_full_blocks_have_keys_and_numpy_reads_them_in_place() -> None:
    got = keys()
    assert len(got) == 62 and len(set(got)) == 62
    assert np.frombuffer(got, np.uint64).tolist() == got.tolist()


def test_a_longer_prompt_extends_the_chain_and_a_step_goes_on_from_the_last_key() -> None:
    whole = keys()
    for count in (1, 30, 61):
        before, after = TOKENS[: count * 64], TOKENS[count * 64 :]
        assert keys(before) == whole[:count]
        assert chain_keys(whole[count - 1], after, 16) == whole[count:]
        assert chain_keys(whole[count - 1], memoryview(after), 16) == whole[count:]


@pytest.mark.parametrize("token", [0, 15, 500])
def test_one_changed_token_changes_its_block_and_every_later_one(token: int) -> None:
    changed = list(range(1_000))
    changed[token] += 1
    ours, theirs = keys(), keys(token_bytes(changed))
    assert ours[: token // 16] == theirs[: token // 16]
    assert not set(ours[token // 16 :]) & set(theirs[token // 16 :])


@pytest.mark.parametrize(
    "other",
    [
        ChainIdentity("n", 16),
        ChainIdentity("m", 32),
        ChainIdentity("m", 16, "sql"),
        ChainIdentity("m", 16, weights="v2"),
    ],
)
def test_another_model_block_size_adapter_or_weights_share_no_key(other: ChainIdentity) -> None:
    assert not set(keys()) & set(keys(identity=other))


def test_another_secret_shares_no_key() -> None:
    assert root_key(SECRET, IDENTITY) != root_key(b"other", IDENTITY)
    assert alias_seed(SECRET, "a", "bc") != alias_seed(SECRET, "ab", "c")


def test_salts_and_images_set_blocks_apart_from_where_they_are() -> None:
    plain, salted, other = keys(), keys(extras=prompt_extras("a")), keys(extras=prompt_extras("b"))
    assert not set(plain) & set(salted) and not set(other) & set(salted)
    assert salted == keys(extras=[["a"], None, None])
    pictured = keys(extras=prompt_extras(None, {3: ["image"]}))
    assert pictured[:3] == plain[:3] and not set(pictured[3:]) & set(plain[3:])
    assert prompt_extras("a", {0: ["image"], 2: [["b", 1]]}) == [["image", "a"], None, [["b", 1]]]
    assert prompt_extras(None) == []


def test_tokens_beyond_32_bits_keep_their_low_ones_and_pairs_their_first() -> None:
    assert token_bytes([2**32 + 5, -1]) == token_bytes([5, 2**32 - 1])
    assert token_bytes([[1, 2], (3, 4)]) == token_bytes([1, 3])
    with pytest.raises(TypeError):
        token_bytes(["a"])
