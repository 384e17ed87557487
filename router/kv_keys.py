"""Our own name of a block of tokens: a 64-bit key over the block and everything before it.

Owns: the root of a chain (model, weights, block size, adapter), the keys along it, and what besides tokens enters them
(cache salt, images). Does not own: who holds a key (`kv_index`), the tokenizer, or the approximate mode's hashes of
raw bytes (`blocks`).

Engines name blocks by hashes of their own (algorithm, seed and width differ); a key is made from the token ids that
they publish, so blocks of unlike engines meet under one name, and a request's tokens lead to it. XXH3 seeded by the key
before: fast, not cryptographic; the root is keyed by a secret, and a collision costs a wrong guess, never an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

# Bytes of one token id in `tokens`, and the bits that it keeps: SGLang writes an image's hash in place of its tokens.
TOKEN_BYTES = 4
_TOKEN_MASK = (1 << 32) - 1

# Separates what enters a block besides its tokens from the tokens of a block before (an arbitrary odd number).
_EXTRAS = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ChainIdentity:
    """What two prompts must share before their first token. `lora_name` None is the model itself."""

    model: str
    block_tokens: int
    lora_name: str | None = None
    weights: str = ""
    """The version of the weights: KV of other weights is another's."""


def root_key(secret: bytes, identity: ChainIdentity) -> int:
    """The key before the first block. `secret` (up to 64 bytes) is the same in processes that compare keys."""
    parts = [identity.model, identity.block_tokens, identity.lora_name, identity.weights]
    digest = blake2b(msgpack.packb(parts), key=secret, digest_size=8, person=b"kv-root").digest()
    return int.from_bytes(digest, "big")


def alias_seed(secret: bytes, *names: str) -> int:
    """What sets apart the hashes of engines that must not be confused."""
    digest = blake2b(msgpack.packb(names), key=secret, digest_size=8, person=b"kv-alias").digest()
    return int.from_bytes(digest, "big")


def token_bytes(tokens: Sequence[Any]) -> bytes:
    """Token ids as little-endian 32-bit numbers; of a pair (SGLang's pages for EAGLE) the first. Raises TypeError for
    what is not a token id.
    """
    try:
        return array("I", tokens).tobytes()
    except TypeError:
        tokens = [each[0] if isinstance(each, list | tuple) else each for each in tokens]
    except OverflowError:
        pass
    return array("I", [each & _TOKEN_MASK for each in tokens]).tobytes()


def chain_keys(
    key: int, tokens: bytes | memoryview, block_tokens: int, extras: Sequence[Sequence[Any] | None] = ()
) -> array[int]:
    """Keys of the full blocks of `tokens` (little-endian 32-bit ids), after the block `key`; a rest has none.

    `extras` says per block what else it depends on, from the first block on; missing ones are None. The result is an
    array of 64-bit numbers, which numpy reads in place. A session's next step costs what is new: go on from its last
    key.
    """
    size = block_tokens * TOKEN_BYTES
    keys: list[int] = []
    append = keys.append
    starts = range(0, len(tokens) - size + 1, size)
    if any(extras):
        for start, extra in zip(starts, extras, strict=False):
            if extra:
                key = xxh3_64_intdigest(msgpack.packb(extra), key ^ _EXTRAS)
            key = xxh3_64_intdigest(tokens[start : start + size], key)
            append(key)
        starts = starts[len(keys) :]
    digest = xxh3_64_intdigest
    for block in [tokens[start : start + size] for start in starts]:
        key = digest(block, key)
        append(key)
    return array("Q", keys)


def prompt_extras(salt: str | None, media: Mapping[int, Sequence[Any]] | None = None) -> list[list[Any] | None]:
    """A request's extras as an engine would publish them: `media` by block (image hash, or [hash, offset]), then the
    salt in the first block (vLLM's order).
    """
    count = max([1 if salt else 0, *(block + 1 for block in media or ())])
    extras: list[list[Any] | None] = [None] * count
    for block, entries in (media or {}).items():
        extras[block] = list(entries)
    if salt:
        extras[0] = [*(extras[0] or ()), salt]
    return extras
