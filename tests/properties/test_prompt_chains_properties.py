"""Properties of the remembered prompts: whatever came before, a prompt's keys are those of all its tokens.

Chats grow, branch and lose their beginnings; the store is sometimes too small for them. Each prompt's keys are compared
with those of the whole text, tokenised at once and hashed from the first block. The faults that the same property must
find are the ways in which a cut text tokenises otherwise, and keys that would be another text's or tenant's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest

from router import prompt_chains
from router.adapters import tokenizer_folder
from router.adapters.tokenizer_folder import ModelTokenizer
from router.kv_keys import chain_keys, prompt_extras, token_bytes
from router.prompt_chains import ChainScope, PromptChains, Work
from tests.exploring import examples
from tests.fakes.tokenizers_made import byte_level, sentence_piece

# So small that texts of some hundred characters have many records and cuts within their parts.
SMALL = {"_ANCHOR_GAP_BYTES": 8, "_RECORD_GAP_BYTES": 16, "_REWIND_BYTES": 8, "_BYTES_PER_TOKEN": 2}

PIECES = (
    "hello world", " the quick brown fox", "fox", " foxes", "lazy", "\n", "\n\n", "  ", " ", "<mask>", " <mask> ",
    "<tail>", "<tail>   ", "<a>", "<b>", "<c>", "<a><b><c>", "é", "e\u0301", "你好", "🙂", "12345", "<|im_end|>",
    "<|im_start|>", "<|bos|>", "<|im_", "start|>", "x" * 40, "def route(request: bytes) -> int:\n    return 1\n",
)  # fmt: skip

Chat = list[str]


@dataclass(frozen=True)
class Turn:
    """The next prompt: the one `base` turns ago with some messages taken off its end, or its first changed, and more
    added."""

    base: int
    cut: int
    changed: bool
    added: list[str]
    salt: str | None
    whole: bool


@dataclass(frozen=True)
class Case:
    kind: str
    awkward: bool
    special: bool
    block_tokens: int
    max_bytes: int
    turns: list[Turn]


LINES = ("one\n", "two\n", "你好\n", "hello\n", "\n", "x")

message = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(LINES), min_size=6, max_size=20).map("".join),  # no spaces: cut at line ends
)
turn = st.builds(
    Turn,
    base=st.integers(0, 3),
    cut=st.integers(0, 2),
    changed=st.booleans(),
    added=st.lists(message, min_size=1, max_size=3),
    salt=st.sampled_from([None, None, "a", "b"]),
    whole=st.sampled_from([True, True, True, False]),
)
case = st.builds(
    Case,
    kind=st.sampled_from(["bytes", "pieces"]),
    awkward=st.booleans(),
    special=st.booleans(),
    block_tokens=st.sampled_from([1, 3, 4, 16]),
    max_bytes=st.sampled_from([1 << 20, 1 << 20, 3_000]),
    turns=st.lists(turn, min_size=2, max_size=8),
)


def tokenizer_of(each: Case) -> tuple[ModelTokenizer, Tokenizer]:
    made = (byte_level if each.kind == "bytes" else sentence_piece)(bos=True, awkward=each.awkward)
    return ModelTokenizer(made.encode(), {}), Tokenizer.from_str(made)


def prompts(turns: Sequence[Turn]) -> Iterator[tuple[Turn, str]]:
    chats: list[Chat] = [[]]
    for each in turns:
        chat = list(chats[max(0, len(chats) - 1 - each.base)])
        del chat[max(0, len(chat) - each.cut) :]
        if each.changed and chat:
            chat[0] += "!"
        chat += each.added
        chats.append(chat)
        yield each, "".join(f"<|im_start|>user\n{said}<|im_end|>\n" for said in chat) + "<|im_start|>assistant\n"


def check(each: Case) -> None:
    tokenizer, whole = tokenizer_of(each)
    chains = prompt_chains.PromptChains(b"secret", each.max_bytes)
    for asked, text in prompts(each.turns):
        scope = ChainScope(77, each.block_tokens, asked.salt)
        work = chains.begin(tokenizer, scope, text, special=each.special, whole=asked.whole)
        assert isinstance(work, Work)
        found = work.run()
        chains.keep(work)
        ids = whole.encode(text, add_special_tokens=each.special).ids
        wanted = chain_keys(77, token_bytes(ids), each.block_tokens, prompt_extras(asked.salt))
        if asked.whole:
            assert found.keys == wanted
            assert found.total_tokens == len(ids)
        else:
            assert found.keys == wanted[: len(found.keys)]
            assert found.total_tokens is None
        assert chains.size_bytes == sum(record.size_bytes for record in chains._records.values())
        assert chains.size_bytes <= each.max_bytes
        for record in chains._records.values():
            assert record.parent is None or chains._records.get(record.parent.hash) is record.parent


@contextmanager
def constants(values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(prompt_chains, name) for name in values}
    for name, value in values.items():
        setattr(prompt_chains, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(prompt_chains, name, value)


@settings(max_examples=examples(150))
@given(case)
def test_keys_are_those_of_the_whole_prompt(each: Case) -> None:
    with constants(SMALL):
        check(each)


# -- planted faults ----------------------------------------------------------------------------------------------------


def tokenise_again_from_the_anchor() -> dict[str, Any]:
    """The tokens of the block that was not full are taken to begin at the anchor."""

    class Wrong(prompt_chains._Cuts):
        def rewind(self, mark: Any, tokens: int, tokenizer: Any) -> Any:
            n = self.part_at(mark.start)
            return prompt_chains._Rewind(self.offsets[n], min(tokens, self.tokens[n]), self.within and n == 0)

    return {"_Cuts": Wrong}


def cut_anywhere() -> dict[str, Any]:
    """A cut within a part is not compared with the part's own tokens."""

    class Wrong(prompt_chains._Cuts):
        def _within(self, n: int, wanted: int, tokenizer: Any) -> Any:
            start, at = self.offsets[n], self.offsets[n + 1]
            tail: list[int] = []
            while at > start and len(tail) < wanted:
                at -= 1
                if self.data[at] & 0xC0 != 0x80:
                    text = self.data[at : self.offsets[n + 1]].decode()
                    tail = tokenizer.encode([tokenizer.anchor + text])[0][1:]
            return prompt_chains._Rewind(at, self.tokens[n + 1] - len(tail), True) if len(tail) >= wanted else None

    return {"_Cuts": Wrong}


def hash_without_what_is_before() -> dict[str, Any]:
    """A mark's hash covers the part before it, not the text before that."""

    def wrong(data: bytes, anchors: re.Pattern[bytes] | None, seed: int) -> Any:
        marks, at = [], 0
        for match in anchors.finditer(data) if anchors else ():
            if match.end() - at >= SMALL["_ANCHOR_GAP_BYTES"]:
                digest = xxh3_64_intdigest(data[at : match.end()], seed)
                marks.append(prompt_chains._Mark(match.start(), match.end(), digest))
                at = match.end()
        return marks

    return {"_marks": wrong}


def salt_forgotten() -> dict[str, Any]:
    """A tenant's text is looked up among another's."""

    class Wrong(PromptChains):
        def _seed(self, scope: ChainScope, fingerprint: bytes, special: bool) -> int:
            return super()._seed(scope._replace(salt=None), fingerprint, special)

    return {"PromptChains": Wrong}


def start_of_text_again() -> dict[str, Any]:
    """What is tokenised from within a part is taken for the start of a text."""

    class Wrong(Work):
        def _encode(self, tokenizer: Any, rewind: Any, offsets: list[int]) -> list[list[int]]:
            data = self._order.data
            ends = [*offsets[1:], len(data)]
            return list(tokenizer.encode([data[start:end].decode() for start, end in zip(offsets, ends, strict=True)]))

    return {"Work": Wrong}


def marks_are_kept_without_the_gap() -> dict[str, Any]:
    """Records are made for marks whose block count is rounded up."""

    class Wrong(Work):
        def _record(self, keys: Any, made: Any) -> None:
            super()._record(keys, [(mark, min(count + 1, len(keys)), rewind) for mark, count, rewind in made])

    return {"Work": Wrong}


FAULTS = (
    tokenise_again_from_the_anchor, cut_anywhere, hash_without_what_is_before, salt_forgotten, start_of_text_again,
    marks_are_kept_without_the_gap,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_property_finds(fault: Any) -> None:
    @settings(max_examples=600, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(case)
    def run(each: Case) -> None:
        check(each)

    with constants({**SMALL, **fault()}), pytest.raises((AssertionError, ExceptionGroup, ValueError, IndexError)):
        run()


def test_the_property_finds_anchors_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every added token is taken for a place to cut."""
    monkeypatch.setattr(tokenizer_folder, "anchors_of", lambda added: [token.content for token in added])
    monkeypatch.setattr(ModelTokenizer, "_cuts_at", lambda self, name: True)

    @settings(max_examples=600, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(case.filter(lambda each: each.awkward))
    def run(each: Case) -> None:
        check(each)

    with constants(SMALL), pytest.raises((AssertionError, ExceptionGroup)):
        run()
