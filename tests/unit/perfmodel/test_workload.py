"""Tokens and answers: round trips, determinism, the length law."""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.errors import ConfigError, RequestError
from perfmodel.workload import Answer, OutputLaw, SimRequest, detokenize, token_bytes, tokenize


def answer(seed: int = 1, choice: int = 0, law: OutputLaw | None = None, **options: object) -> Answer:
    fields: dict[str, object] = {"request_id": "r", "prompt_token_ids": [1], "max_tokens": 400, **options}
    return Answer(SimRequest(**fields), choice, seed, law or OutputLaw())  # type: ignore[arg-type]  # fields by name


def text(of: Answer) -> bytes:
    return b"".join(of.token(position) for position in range(of.length_tokens))


@pytest.mark.parametrize("words", ["", "a", "four", "fives", "grüße, 世界 🙂", "x" * 1001])
def test_text_survives_tokens(words: str) -> None:
    tokens = tokenize(words.encode())
    assert len(tokens) == -(-len(words.encode()) // 4)
    assert tokens.dtype == np.uint32
    assert detokenize(tokens).decode() == words


def test_an_answer_is_one_printable_word_a_token_and_comes_back_as_the_same_tokens() -> None:
    made = text(answer())
    assert len(made) == 4 * 400
    assert all(word.isalpha() and word.islower() and len(word) == 3 for word in made.decode().split(" ")[1:])
    ids = [int.from_bytes(answer().token(position), "little") for position in range(400)]
    assert tokenize(made).tolist() == ids
    assert detokenize(ids) == made


def test_tokens_do_not_depend_on_how_they_are_asked_for() -> None:
    late = answer()
    assert late.token(399) == text(answer())[-4:]
    assert late.token(0) == text(answer())[:4]


def test_seed_request_choice_and_key_each_change_the_answer() -> None:
    variants = [answer(), answer(seed=2), answer(choice=1), answer(request_id="q"), answer(output_key="k")]
    assert len({text(variant) for variant in variants}) == len(variants)
    assert text(answer(request_id="a", output_key="k")) == text(answer(request_id="b", output_key="k"))


def test_the_text_of_a_seed_never_changes() -> None:
    assert text(answer(max_tokens=4)) == b" enu nco sub gly"


def test_lengths_follow_the_law_within_the_limits() -> None:
    law = OutputLaw(mean_tokens=50.0)
    lengths = [answer(request_id=str(n), max_tokens=10_000, law=law).length_tokens for n in range(4000)]
    # The mean of 4,000 geometric draws is normal with a deviation of 50 / sqrt(4000) = 0.79: five of them.
    assert abs(sum(lengths) / 4000 - 50) < 4
    assert min(lengths) >= 1
    assert max(answer(request_id=str(n), max_tokens=20, law=law).length_tokens for n in range(200)) == 20
    assert min(answer(request_id=str(n), max_tokens=20, min_tokens=15, law=law).length_tokens for n in range(200)) == 15
    assert answer(law=law, ignore_eos=True).length_tokens == 400
    assert answer(law=OutputLaw(mean_tokens=1)).length_tokens == 1
    assert answer().length_tokens == 400


def test_a_script_is_the_answer() -> None:
    scripted = answer(output_token_ids=[7, 8, 9])
    assert scripted.length_tokens == 3
    assert [int.from_bytes(scripted.token(position), "little") for position in range(3)] == [7, 8, 9]
    assert answer(output_token_ids=[7, 8, 9], max_tokens=2).length_tokens == 2


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 0), ("choice_count", 0), ("prompt_token_ids", []), ("output_token_ids", [])]
)
def test_a_malformed_request_names_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"request r: {field} is .*; expected at least"):
        SimRequest(**{"request_id": "r", "prompt_token_ids": [1], "max_tokens": 1, field: value})  # type: ignore[arg-type]  # by name


def test_token_ids_outside_32_bits_are_refused() -> None:
    with pytest.raises(RequestError, match=r"0\.\.2\^32-1"):
        token_bytes([-1])
    with pytest.raises(RequestError, match=r"0\.\.2\^32-1"):
        token_bytes([2**32])


def test_a_mean_below_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="mean_tokens is 0"):
        OutputLaw(mean_tokens=0.5)
