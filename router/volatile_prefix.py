"""Prompts that change near their beginning from turn to turn, so that nothing after it is ever cached.

Owns: noticing it, naming the place, and counting it per organisation and model. Does not own: prompts (bytes are handed
in, rendered or raw), who a conversation is, or doing anything about it: the client or its harness must.

A client that puts a date, a nonce or a billing header first makes every request a cold one, though all but a few bytes
are as before. It shows in two consecutive prompts of a conversation: they part early, and much of what follows is the
same again, at the same offsets (a nonce of fixed length) or line by line (of another length). A prompt is kept as keyed
32-bit hashes of its blocks and lines, about 3 kB of them; the place is known to the block: 16 bytes in the first 2 KiB,
256 further on. Only the first 32 KiB are looked at: what changes later costs only what comes after it. Measured on one
core: 0.3 ms a turn for a prompt of 32 KiB and more.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

# (offset up to which a step holds, block bytes).
_GRADES: Final = ((2_048, 16), (32 * 1024, 256))
LOOKED_AT_BYTES: Final = _GRADES[-1][0]
# Where lines end: in text, in JSON strings, between messages, at special tokens.
_LINE_ENDS: Final = re.compile(rb'\n|\\n|"role"|<\|')
# Shorter lines are found everywhere (`pass`, `}`), and say nothing.
_LINE_MIN_BYTES: Final = 24
_LINES_MAX_COUNT: Final = 512
# Two prompts are one with a changed place if at least this much is the same after it, and this part of the rest.
_SAME_MIN_BYTES: Final = 128
_SAME_MIN_PART: Final = 0.5
# Prompts of unnamed conversations that a new one is compared with, per organisation and model.
_UNNAMED_COUNT: Final = 4
# A sketch without its arrays' contents: the object, three arrays, a key and its place in the ordered dict.
_SKETCH_BYTES: Final = 600
# (organisation, model) pairs that are counted; beyond it the one that was seen longest ago is forgotten.
_COUNTS_MAX: Final = 10_000
_MASK: Final = 0xFFFFFFFF
_MASK_64: Final = 2**64 - 1


class Divergence(NamedTuple):
    """Two prompts part within `width_bytes` from `offset_bytes`; `same_bytes` after it are as before (at least)."""

    offset_bytes: int
    width_bytes: int
    same_bytes: int


@dataclass(frozen=True, slots=True)
class VolatileCount:
    """What was seen of one organisation's prompts to one model."""

    turns_count: int = 0
    """Prompts that had one before them to be compared with."""
    volatile_count: int = 0
    last: Divergence | None = None


class _Sketch(NamedTuple):
    blocks: array[int]
    lines: array[int]
    line_ends: array[int]
    """Where each line ends, in bytes."""

    @property
    def size_bytes(self) -> int:
        return _SKETCH_BYTES + 4 * (len(self.blocks) + len(self.lines) + len(self.line_ends))


class VolatilePrefixes:
    """The last prompt of each conversation, as hashes. `secret` (up to 64 bytes) keys them.

    Mutable: sketches, the longest unused going first when they are over `max_bytes`, and counts.
    """

    def __init__(self, secret: bytes, max_bytes: int = 16 * 1024 * 1024) -> None:
        self._seed = int.from_bytes(blake2b(key=secret, digest_size=8, person=b"volatile-prefix").digest(), "big")
        self._sketches: OrderedDict[int, _Sketch] = OrderedDict()
        self._counts: OrderedDict[tuple[str, str], VolatileCount] = OrderedDict()
        self._unnamed: dict[int, int] = {}
        self.max_bytes = max_bytes
        self.size_bytes = 0

    def turn(self, org: str, model: str, conversation: str | None, prompt: bytes) -> Divergence | None:
        """A conversation's next prompt; what it shows, if it has parted early from the one before.

        `conversation` None: nobody names it, and the last few such prompts of the same organisation stand in.
        """
        sketch = _sketch(prompt, self._seed)
        owner = self._key(org, model)
        if conversation is None:
            slot = self._unnamed.get(owner, 0)
            keys = [owner + number & _MASK_64 for number in range(_UNNAMED_COUNT)]
            self._unnamed[owner] = (slot + 1) % _UNNAMED_COUNT
            kept = keys[slot]
        else:
            kept = self._key(org, model, conversation)
            keys = [kept]
        before = [self._sketches[key] for key in keys if key in self._sketches]
        found = max((each for each in (_compare(old, sketch) for old in before) if each), key=_same, default=None)
        self._keep(kept, sketch)
        if before:
            self._count(org, model, found)
        return found

    def count(self, org: str, model: str) -> VolatileCount:
        """What was counted so far."""
        return self._counts.get((org, model), VolatileCount())

    def _count(self, org: str, model: str, found: Divergence | None) -> None:
        known = self._counts.pop((org, model), VolatileCount())
        if found is None:
            now = VolatileCount(known.turns_count + 1, known.volatile_count, known.last)
        else:
            now = VolatileCount(known.turns_count + 1, known.volatile_count + 1, found)
        self._counts[org, model] = now
        if len(self._counts) > _COUNTS_MAX:
            self._counts.popitem(last=False)

    def _keep(self, key: int, sketch: _Sketch) -> None:
        old = self._sketches.pop(key, None)
        self.size_bytes += sketch.size_bytes - (0 if old is None else old.size_bytes)
        self._sketches[key] = sketch
        while self.size_bytes > self.max_bytes:
            self.size_bytes -= self._sketches.popitem(last=False)[1].size_bytes
        if len(self._unnamed) > _COUNTS_MAX:
            self._unnamed.clear()

    def _key(self, *names: str) -> int:
        seed = self._seed
        for name in names:  # one after the other: no two lists of names run together
            seed = xxh3_64_intdigest(name.encode(errors="surrogatepass"), seed)
        return seed


def _same(found: Divergence) -> int:
    return found.same_bytes


def _sketch(prompt: bytes, seed: int) -> _Sketch:
    head = prompt[:LOOKED_AT_BYTES]
    blocks: list[int] = []
    at = 0
    for until, step in _GRADES:
        while at + step <= min(until, len(head)):
            blocks.append(xxh3_64_intdigest(head[at : at + step], seed) & _MASK)
            at += step
    lines, ends = array("I"), array("I")
    start = 0
    for match in _LINE_ENDS.finditer(head):
        end = match.start()
        if end - start >= _LINE_MIN_BYTES:
            lines.append(xxh3_64_intdigest(head[start:end], seed) & _MASK)
            ends.append(end)
            if len(lines) == _LINES_MAX_COUNT:
                break
        start = match.end()
    return _Sketch(array("I", blocks), lines, ends)


def _place(index: int) -> tuple[int, int]:
    """Where the index-th block begins, and how long it is."""
    at = 0
    for until, step in _GRADES:
        count = (until - at) // step
        if index < count:
            return at + index * step, step
        index -= count
        at += count * step
    return at, step


def _compare(old: _Sketch, new: _Sketch) -> Divergence | None:
    """Whether `new` is `old` with an early place changed."""
    both = min(len(old.blocks), len(new.blocks))
    first = next((n for n in range(both) if old.blocks[n] != new.blocks[n]), both)
    if first == both:
        return None  # one goes on where the other ends
    offset, width = _place(first)
    end = _place(both)[0]
    at_offsets = sum(_place(n)[1] for n in range(first + 1, both) if old.blocks[n] == new.blocks[n])
    same = max(at_offsets, _same_lines(old, new, offset + width))
    if same < _SAME_MIN_BYTES or same < _SAME_MIN_PART * (end - offset - width):
        return None
    return Divergence(offset, width, same)


def _same_lines(old: _Sketch, new: _Sketch, after: int) -> int:
    """Bytes of the lines of `old` after an offset that `new` has too."""
    known = set(new.lines)
    return sum(size for line, size in _lines_after(old.lines, old.line_ends, after) if line in known)


def _lines_after(lines: Sequence[int], ends: Sequence[int], after: int) -> list[tuple[int, int]]:
    found = []
    before = 0
    for line, end in zip(lines, ends, strict=True):
        if before >= after:
            found.append((line, end - before))
        before = end
    return found
