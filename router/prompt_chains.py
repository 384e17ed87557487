"""From a prompt's text to its block keys, at the cost of what is new in it.

Owns: where a text may be cut so that its parts tokenise alone, what is remembered of a prompt between requests, and the
bounded store of it. Does not own: the tokenizer (handed in; `adapters.prompt_tokens`), the template (`prompt_text`), or
the keys' form (`kv_keys`). Pure: one thread begins and keeps, the work between may run in another.

A tokenizer first splits at its added special tokens, then works on each part alone. So the tokens of a text are those
of its parts, and an anchor (the start of a special token that nothing can overlap or extend) is a place to cut: a chat
has two to a message. A text is hashed up to its anchors, each hash going on from the one before; the deepest hash that
is known from an earlier request says how many full blocks lie before it and what their keys are.

Block boundaries fall inside parts, and the tokens of a block that was not full are not kept: a record says from which
offset to tokenise again to get them. That is an anchor, or, where the part is long, a place within it at which the
tail's tokens, tokenised alone, were seen to equal the end of the part's tokens: the same bytes then follow again up to
an anchor, so this holds for every text with that prefix. Kept are keys, keyed hashes and offsets: no text, no token
ids. The hashes are XXH3 on from a secret: a collision costs a wrong guess of what is cached, never an answer.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from router.kv_keys import chain_keys, prompt_extras, token_bytes
from router.prompt_forms import Unhashed

# Bytes of one token id in `token_bytes`, and of one key.
_TOKEN_BYTES: Final = 4
_KEY_BYTES: Final = 8
# Anchors closer than this to the one before are passed over: a text of nothing but special tokens would cost a hash
# and a call of the tokenizer each; re-tokenising 256 bytes costs about 0.1 ms.
_ANCHOR_GAP_BYTES: Final = 256
# Records of one cold prompt: one per this many bytes, or per this part of the depth. What a prompt that branches off an
# earlier one pays is at most 1/16 of what they share.
_RECORD_GAP_BYTES: Final = 2_048
_RECORD_GAP_PARTS: Final = 16
# A rewind of more than this many bytes is worth looking for a cut within the part.
_REWIND_BYTES: Final = 512
# Bytes that hold one token of most texts (four on average), and how often a cut is tried, each twice as far back.
_BYTES_PER_TOKEN: Final = 8
_CUT_TRIES: Final = 4
# Prompts of token ids are looked up at every so many tokens: hashing the rest costs 0.1 ms.
_ID_STEP_TOKENS: Final = 1_024
# What a record costs besides its keys: its slots, its entry in the ordered dict, the bytes object (sys.getsizeof).
_RECORD_BYTES: Final = 480


class TextTokenizer(Protocol):
    """A model's tokenizer. Its methods may be called from any thread."""

    @property
    def fingerprint(self) -> bytes:
        """Of all that decides what token ids come out."""

    @property
    def anchors(self) -> re.Pattern[bytes] | None:
        """Matches exactly the special tokens (in UTF-8) at which a text may be cut; None: there are none."""

    @property
    def anchor(self) -> str:
        """One of them."""

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """The ids that the engine puts before and after a plain prompt."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, nothing added around them."""


class ChainScope(NamedTuple):
    """Whose blocks: the root of the keys (`kv_keys.root_key`), the engine's block size, the tenant's salt."""

    root_key: int
    block_tokens: int
    salt: str | None = None


class PromptKeys(NamedTuple):
    """The keys of a prompt's full blocks, first to last."""

    keys: array[int]
    total_tokens: int | None
    """How long the whole prompt is; None: it goes on after `keys` in a way that is not known."""
    new_bytes: int
    """How much text was tokenised for it (or ids hashed, four bytes each)."""
    reason: Unhashed | None = None
    """Why it is not known further."""


class _Mark(NamedTuple):
    """An anchor in a text, and the hash of the text to its end."""

    start: int
    end: int
    hash: int


@dataclass(frozen=True, slots=True)
class _Rewind:
    """Where to tokenise from again: a byte offset, the tokens before it, and whether it is within a part."""

    at_bytes: int = 0
    tokens: int = 0
    within: bool = False


_START: Final = _Rewind()


class _Record:
    """What is known of a text up to an anchor. `keys`: those of its full blocks that `parent` has not."""

    __slots__ = ("block_count", "end", "hash", "keys", "parent", "rewind")

    def __init__(self, mark: _Mark, parent: _Record | None, keys: bytes, block_count: int, rewind: _Rewind) -> None:
        self.hash = mark.hash
        self.end = mark.end
        self.parent = parent
        self.keys = keys
        self.block_count = block_count
        self.rewind = rewind

    @property
    def size_bytes(self) -> int:
        return _RECORD_BYTES + len(self.keys)

    def all_keys(self) -> array[int]:
        parts: list[bytes] = []
        record: _Record | None = self
        while record is not None:
            parts.append(record.keys)
            record = record.parent
        found = array("Q")
        found.frombytes(b"".join(reversed(parts)))
        return found


@dataclass(frozen=True, slots=True)
class _Order:
    """What a piece of work is about. `tokenizer` None: `data` is token ids."""

    scope: ChainScope
    data: bytes
    marks: list[_Mark]
    tokenizer: TextTokenizer | None = None
    special: bool = False
    reason: Unhashed | None = None


class Work:
    """One prompt between `begin` and `keep`. `run` may be called in another thread; it touches nothing shared.

    Mutable: holds the prompt until it is dropped, and what is to be kept of it once it has run.
    """

    __slots__ = ("_base", "_order", "found", "new_bytes")

    def __init__(self, order: _Order, base: _Record | None) -> None:
        self._order = order
        self._base = base
        self.new_bytes = len(order.data) - (0 if base is None else base.rewind.at_bytes)
        """How much `run` will tokenise, or only hash."""
        self.found: list[_Record] = []

    @property
    def tokenises(self) -> bool:
        """Whether there is text to tokenise; False: token ids are hashed, which costs a hundredth."""
        return self._order.tokenizer is not None

    def run(self) -> PromptKeys:
        """Tokenise what is new and make its keys."""
        tokenizer = self._order.tokenizer
        return self._run_ids() if tokenizer is None else self._run_text(tokenizer)

    def _run_ids(self) -> PromptKeys:
        order, base = self._order, self._base
        size = order.scope.block_tokens * _TOKEN_BYTES
        keys = array("Q") if base is None else base.all_keys()
        keys.extend(self._chain(keys, order.data[len(keys) * size :]))
        self._record(keys, [(mark, mark.end // size, _Rewind(mark.end)) for mark in self._spaced()])
        return PromptKeys(keys, len(order.data) // _TOKEN_BYTES, self.new_bytes)

    def _run_text(self, tokenizer: TextTokenizer) -> PromptKeys:
        order, base = self._order, self._base
        size = order.scope.block_tokens
        rewind = _START if base is None else base.rewind
        offsets = [rewind.at_bytes, *(mark.start for mark in order.marks if mark.start > rewind.at_bytes)]
        parts = self._encode(tokenizer, rewind, offsets)
        before, after = tokenizer.around if order.special else ([], [])
        ids = list(before) if rewind.at_bytes == 0 else []
        tokens = [rewind.tokens]  # before each offset, and at the end
        for part in parts:
            ids += part
            tokens.append(rewind.tokens + len(ids))
        if order.reason is None:
            ids += after
        keys = array("Q") if base is None else base.all_keys()
        keys.extend(self._chain(keys, token_bytes(ids)[(len(keys) * size - rewind.tokens) * _TOKEN_BYTES :]))
        cuts = _Cuts(order.data, offsets, tokens, parts, rewind.within)
        made: list[tuple[_Mark, int, _Rewind]] = []
        for mark in self._spaced():
            blocks = (tokens[cuts.part_at(mark.start)] + 1) // size
            made.append((mark, blocks, cuts.rewind(mark, blocks * size, tokenizer)))
        self._record(keys, made)
        total = rewind.tokens + len(ids)
        return PromptKeys(keys, total if order.reason is None else None, self.new_bytes, order.reason)

    def _encode(self, tokenizer: TextTokenizer, rewind: _Rewind, offsets: list[int]) -> list[list[int]]:
        """The ids of the text from each offset to the next."""
        data = self._order.data
        texts = [data[start:end].decode() for start, end in pairwise([*offsets, len(data)])]
        if rewind.within:  # so that it is not taken for the start of a text
            texts[0] = tokenizer.anchor + texts[0]
        parts = tokenizer.encode(texts)
        if rewind.within:
            del parts[0][0]
        return parts

    def _chain(self, keys: array[int], tokens: bytes) -> array[int]:
        scope = self._order.scope
        if keys:
            return chain_keys(keys[-1], tokens, scope.block_tokens)
        return chain_keys(scope.root_key, tokens, scope.block_tokens, prompt_extras(scope.salt))

    def _spaced(self) -> list[_Mark]:
        """The marks after the base that get a record: far enough apart, and the last."""
        found: list[_Mark] = []
        at = 0 if self._base is None else self._base.end
        for mark in self._order.marks:
            if mark.end <= at:
                continue
            if mark is self._order.marks[-1] or mark.end - at >= max(_RECORD_GAP_BYTES, mark.end // _RECORD_GAP_PARTS):
                found.append(mark)
                at = mark.end
        return found

    def _record(self, keys: array[int], made: list[tuple[_Mark, int, _Rewind]]) -> None:
        parent = self._base
        for mark, block_count, rewind in made:
            known = 0 if parent is None else parent.block_count
            parent = _Record(mark, parent, keys[known:block_count].tobytes(), block_count, rewind)
            self.found.append(parent)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The parts that a text was tokenised in."""

    data: bytes
    offsets: list[int]
    tokens: list[int]
    """Before each offset, and at the end."""
    parts: list[list[int]]
    within: bool
    """Whether the first offset is within a part."""

    def part_at(self, offset: int) -> int:
        """Which part begins at or before an offset."""
        return bisect_right(self.offsets, offset) - 1

    def rewind(self, mark: _Mark, tokens: int, tokenizer: TextTokenizer) -> _Rewind:
        """The last place from which the tokens from the `tokens`-th on come out again, given the text up to `mark`."""
        n = min(bisect_right(self.tokens, tokens) - 1, self.part_at(mark.start))
        found = _Rewind(self.offsets[n], self.tokens[n], self.within and n == 0)
        if mark.end - found.at_bytes <= _REWIND_BYTES or n == self.part_at(mark.start):
            return found
        return self._within(n, self.tokens[n + 1] - tokens, tokenizer) or found

    def _within(self, n: int, wanted: int, tokenizer: TextTokenizer) -> _Rewind | None:
        """A cut in the n-th part, before its last `wanted` tokens, whose tail tokenises alone to the same tokens."""
        data, ids = self.data, self.parts[n]
        start, end = self.offsets[n], self.offsets[n + 1]
        back = max(wanted, 1) * _BYTES_PER_TOKEN
        for _ in range(_CUT_TRIES):
            at = data.rfind(b" ", start, max(start, end - back))  # words begin with their space in most vocabularies
            if at < 0:
                at = data.rfind(b"\n", start, max(start, end - back))
            if at <= start or end - at >= (end - start) // 2:
                return None
            tail = tokenizer.encode([tokenizer.anchor + data[at:end].decode()])[0][1:]
            if wanted <= len(tail) and tail == ids[-len(tail) :]:
                return _Rewind(at, self.tokens[n + 1] - len(tail), True)
            back = (end - at) * 2
        return None


class PromptChains:
    """What is remembered of prompts. `secret` (up to 64 bytes) keys the hashes; `max_bytes` bounds the memory.

    Mutable: records, least recently used last-in-line first out. A record goes before the ones that it builds on.
    """

    def __init__(self, secret: bytes, max_bytes: int) -> None:
        self._secret = secret
        self._records: OrderedDict[int, _Record] = OrderedDict()
        self.max_bytes = max_bytes
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def begin(
        self, tokenizer: TextTokenizer, scope: ChainScope, text: str, *, special: bool, whole: bool
    ) -> Work | Unhashed:
        """The work for a text. `special`: the engine puts its special tokens around it. `whole` False: more follows,
        which is not known, so keys end with the last anchor.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return Unhashed.MALFORMED
        marks = _marks(data, tokenizer.anchors, self._seed(scope, tokenizer.fingerprint, special))
        if not whole:
            data = data[: marks[-1].end] if marks else b""
        order = _Order(scope, data, marks, tokenizer, special, None if whole else Unhashed.MEDIA)
        return Work(order, self._deepest(marks))

    def begin_ids(self, scope: ChainScope, ids: Sequence[int]) -> Work | Unhashed:
        """The work for a prompt that is token ids already."""
        try:
            data = token_bytes(ids)
        except (OverflowError, TypeError):
            return Unhashed.MALFORMED
        step = max(1, _ID_STEP_TOKENS // scope.block_tokens) * scope.block_tokens * _TOKEN_BYTES
        seed = self._seed(scope, b"", False)
        view, marks = memoryview(data), []
        for end in range(step, len(data) + 1, step):
            seed = xxh3_64_intdigest(view[end - step : end], seed)
            marks.append(_Mark(end, end, seed))
        return Work(_Order(scope, data, marks), self._deepest(marks))

    def keep(self, work: Work) -> None:
        """Remember what a piece of work found, and forget what is over the bound."""
        if work.found:
            self._touch(work.found[-1])
            while self.size_bytes > self.max_bytes:
                self.size_bytes -= self._records.popitem(last=False)[1].size_bytes

    def _touch(self, last: _Record) -> None:
        """Use a record, and put it and the ones that it builds on in the store: these last, so that none of them is
        forgotten before it.
        """
        record: _Record | None = last
        above: _Record | None = None
        while record is not None:
            known = self._records.get(record.hash)
            if known is not None and known is not record and known.end == record.end:
                record = known  # the same text was worked on twice at a time
                if above is not None:
                    above.parent = known
            elif known is not record:
                if known is not None:
                    self.size_bytes -= known.size_bytes
                self._records[record.hash] = record
                self.size_bytes += record.size_bytes
            self._records.move_to_end(record.hash)
            above, record = record, record.parent

    def _deepest(self, marks: list[_Mark]) -> _Record | None:
        for mark in reversed(marks):
            record = self._records.get(mark.hash)
            if record is not None and record.end == mark.end:
                self._touch(record)
                return record
        return None

    def _seed(self, scope: ChainScope, fingerprint: bytes, special: bool) -> int:
        salt = b"" if scope.salt is None else b"s" + scope.salt.encode(errors="surrogatepass")
        text = b"%d %d %d %d %s%s" % (scope.root_key, scope.block_tokens, special, len(salt), salt, fingerprint)
        return int.from_bytes(blake2b(text, key=self._secret, digest_size=8, person=b"prompt-text").digest(), "big")


def _marks(data: bytes, anchors: re.Pattern[bytes] | None, seed: int) -> list[_Mark]:
    """The anchors of a text that are far enough apart, a choice that no later text changes."""
    if anchors is None:
        return []
    view, marks, at = memoryview(data), [], 0
    for match in anchors.finditer(data):
        end = match.end()
        if end - at >= _ANCHOR_GAP_BYTES:
            seed = xxh3_64_intdigest(view[at:end], seed)
            marks.append(_Mark(match.start(), end, seed))
            at = end
    return marks
