"""A prompt's bytes to a chain of block hashes: the identity under which a prefix is remembered.

Owns: the block ladder (where blocks end) and `BlockHasher`. Does not own: what is held where (`prefix_index`), or the
engines' own block hashes (the KV event adapter maps those). This is the approximate mode: blocks of the request's raw
JSON bytes, not of tokens, so nothing is tokenised on the hot path.

Each hash covers its block and every block before it, the model, the tenant's salt and a secret of the process group,
so equal hashes mean equal prefixes, and one tenant's prompts never match another's. The 64-bit hash (XXH3, seeded by
the hash before) is fast, not cryptographic: a collision can cost a wrong guess of what is cached, never an answer.

Blocks grow with depth. The cost of a block (hashing, index entry) is per block, and what a coarse block loses is at
most one block of prefill; so a block is kept to a small part of the prefix before it. Measured on one core of the
build machine for 480 kB: 1,875 equal blocks of 256 B take 255 us with XXH3 and 108 us with a numpy multilinear sum;
the ladder's 237 blocks take 50 us, and a 430-byte prompt 0.6 us where numpy needs 6 us.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

# (depth in bytes up to which a step holds, block bytes): 256 B is 64 tokens at 4 bytes a token, 1 KiB is at most 1/8
# and 4 KiB at most 1/32 of the prefix before it (256 and 1,024 tokens: about 25 and 100 ms of prefill at 10,000
# tokens/s).
_GRADES = ((8 * 1024, 256), (128 * 1024, 1024), (32 * 1024 * 1024, 4096))

# Seeds kept per hasher: one per (model, salt) in use; beyond this all are dropped and made again (1.5 us each).
_SEEDS_MAX_COUNT = 8_192


@dataclass(frozen=True, slots=True)
class BlockLadder:
    """Where blocks end: `ends_bytes[i]` is the prefix length that the i-th hash covers. A prompt's tail beyond its
    last full block, and what lies beyond the ladder, has no hash.
    """

    ends_bytes: tuple[int, ...]

    @classmethod
    def graded(cls) -> BlockLadder:
        """The ladder of raw prompt bytes: 256 B blocks to 8 KiB, 1 KiB to 128 KiB, 4 KiB to 32 MiB."""
        ends: list[int] = []
        position = 0
        for until, step in _GRADES:
            ends.extend(range(position + step, until + 1, step))
            position = until
        return cls(tuple(ends))

    @classmethod
    def uniform(cls, block_bytes: int, block_count: int) -> BlockLadder:
        """Equal blocks, for traces that come with block ids of their own."""
        return cls(tuple(range(block_bytes, block_bytes * (block_count + 1), block_bytes)))


class Chain(NamedTuple):
    """The prefix hashes of one prompt, shortest prefix first, and the prompt's length."""

    hashes: Sequence[int]
    total_bytes: int


class BlockHasher:
    """Hashes prompts. `secret` (any length up to 64 bytes) must be the same in processes that share an index.

    Not thread-safe; one per event loop.
    """

    __slots__ = ("_ends", "_secret", "_seeds", "ladder")

    def __init__(self, secret: bytes, ladder: BlockLadder | None = None) -> None:
        self.ladder = ladder or BlockLadder.graded()
        self._ends = self.ladder.ends_bytes
        self._secret = secret
        self._seeds: dict[tuple[str, str], int] = {}

    def chain(self, model: str, salt: str, parts: Sequence[bytes | memoryview]) -> Chain:
        """The chain of `parts` read as one byte stream (the raw `tools` value, then the raw `messages` value without
        its closing bracket, so that a conversation's next turn extends it).
        """
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        seed = self._seeds.get((model, salt))
        if seed is None:
            seed = self._seed(model, salt)
        total = len(data)
        hashes: list[int] = []
        start = 0
        for end in self._ends[: bisect_right(self._ends, total)]:
            seed = xxh3_64_intdigest(data[start:end], seed)
            hashes.append(seed)
            start = end
        return Chain(hashes, total)

    def _seed(self, model: str, salt: str) -> int:
        if len(self._seeds) >= _SEEDS_MAX_COUNT:
            self._seeds.clear()
        name = model.encode()
        text = len(name).to_bytes(4, "big") + name + salt.encode()
        seed = int.from_bytes(blake2b(text, key=self._secret, digest_size=8).digest(), "big")
        self._seeds[model, salt] = seed
        return seed
