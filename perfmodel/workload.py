"""What a request to the simulated engine is: token ids, how long its answer gets, and which tokens the answer has.

Owns: the byte-level tokenizer, the deterministic text of answers and the length law. Does not own: when a token is made
(`scheduler`) or chat templates (`adapters.engine_wire`). One token is four UTF-8 bytes, so prompts of any language cost
about what they cost on a real tokenizer for English (3.5 to 4.5 bytes a token) and no vocabulary file is needed.
Everything here is a function of its arguments: the same seed, key, choice and position give the same token anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError, RequestError

TokenIds = Sequence[int] | npt.NDArray[np.uint32]

# Bytes of one token id in every token buffer of this package: an unsigned 32-bit little-endian integer.
TOKEN_BYTES = 4

# Fills the last token of a text whose length is no multiple of four; NUL cannot occur in a JSON string unescaped.
_PAD = b"\x00"

# Multiplier and shifts of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_U64 = (1 << 64) - 1

# Answers are words of a space and three letters: printable, never escaped in JSON, exactly one token each.
_LETTERS = 26

# Tokens made at once: large enough that numpy's call overhead vanishes, small enough that an abort wastes little.
_CHUNK_TOKENS = 256


def tokenize(text: bytes) -> npt.NDArray[np.uint32]:
    """UTF-8 bytes to token ids, four bytes a token, the last one padded with NUL."""
    missing = -len(text) % TOKEN_BYTES
    return np.frombuffer(text + _PAD * missing, dtype="<u4").astype(np.uint32, copy=False)


def detokenize(token_ids: TokenIds) -> bytes:
    """Token ids to the bytes they stand for. `detokenize(tokenize(t)) == t` for every t that does not end in NUL."""
    return token_bytes(token_ids).rstrip(_PAD)


def token_bytes(token_ids: TokenIds) -> bytes:
    """Token ids as the buffer the block pool hashes: 32-bit little-endian each."""
    try:
        return np.asarray(token_ids, dtype="<u4").tobytes()
    except (OverflowError, ValueError, TypeError) as fault:
        raise RequestError(f"token ids are not integers in 0..2^32-1: {fault}") from fault


@dataclass(frozen=True, slots=True)
class OutputLaw:
    """How long answers get when nothing cuts them: geometric with this mean, the law of a constant chance to stop.

    `mean_tokens` None: an answer never ends by itself, only by its token limit.
    """

    mean_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.mean_tokens is not None and not self.mean_tokens >= 1:
            raise ConfigError(f"mean_tokens is {self.mean_tokens}; expected at least 1, or none")

    def length_tokens(self, key: int, max_tokens: int) -> int:
        """Tokens of the answer with this key: min(max_tokens, one draw). A function of the arguments only."""
        if self.mean_tokens is None:
            return max_tokens
        if self.mean_tokens == 1:
            return 1
        uniform = (_mix(key ^ _U64) >> 11) / (1 << 53)
        drawn = 1 + int(math.log1p(-uniform) / math.log1p(-1 / self.mean_tokens))
        return min(max_tokens, drawn)


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request. `prompt_token_ids` is a numpy uint32 array or a sequence of ints in 0..2^32-1, never empty.

    `max_tokens` >= 1 bounds each of the `choice_count` answers; `min_tokens` keeps the length law from ending earlier;
    `ignore_eos` makes every answer exactly `max_tokens`. `output_key` decides the answer's tokens and length: equal
    keys give equal answers (pass a digest of the prompt for temperature 0); None takes the request id.
    `output_token_ids` scripts the answer instead (replayed traces): it ends with the script or at `max_tokens`.
    """

    request_id: str
    prompt_token_ids: TokenIds
    max_tokens: int
    choice_count: int = 1
    cache_salt: str | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    output_key: str | None = None
    output_token_ids: TokenIds | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("choice_count", self.choice_count)):
            if value < 1:
                raise RequestError(f"request {self.request_id}: {name} is {value}; expected at least 1")
        if len(self.prompt_token_ids) == 0:
            raise RequestError(f"request {self.request_id}: prompt_token_ids is empty; expected at least one token")
        if self.output_token_ids is not None and len(self.output_token_ids) == 0:
            raise RequestError(f"request {self.request_id}: output_token_ids is empty; expected at least one token")


class Answer:
    """The tokens of one choice, made in chunks as they are asked for. `length_tokens` is known from the start."""

    __slots__ = ("_buffer", "_key", "length_tokens")

    def __init__(self, request: SimRequest, choice_index: int, seed: int, law: OutputLaw) -> None:
        key_text = request.request_id if request.output_key is None else request.output_key
        digest = blake2b(f"{seed}/{choice_index}/{key_text}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")
        self._buffer = b""
        if request.output_token_ids is not None:
            self._buffer = token_bytes(request.output_token_ids)
            self.length_tokens = min(request.max_tokens, len(request.output_token_ids))
        elif request.ignore_eos:
            self.length_tokens = request.max_tokens
        else:
            drawn = law.length_tokens(self._key, request.max_tokens)
            self.length_tokens = min(request.max_tokens, max(drawn, request.min_tokens))

    def token(self, position: int) -> bytes:
        """The TOKEN_BYTES of the token at `position` (0 is the first of the answer)."""
        start = position * TOKEN_BYTES
        while start >= len(self._buffer):
            made = len(self._buffer) // TOKEN_BYTES
            self._buffer += _words(self._key, made, max(1, min(_CHUNK_TOKENS, self.length_tokens - made)))
        return self._buffer[start : start + TOKEN_BYTES]


def _mix(value: int) -> int:
    """One SplitMix64 output for the 64-bit state `value`."""
    value = (value + _GAMMA) & _U64
    value = ((value ^ (value >> 30)) * _MIX_1) & _U64
    value = ((value ^ (value >> 27)) * _MIX_2) & _U64
    return value ^ (value >> 31)


def _words(key: int, start: int, count: int) -> bytes:
    """`count` four-byte words from position `start`, the vectorised twin of `_mix` on key + position * gamma."""
    with np.errstate(over="ignore"):
        state = np.arange(start + 1, start + 1 + count, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(key)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
        state ^= state >> np.uint64(31)
    words = np.empty((count, TOKEN_BYTES), dtype=np.uint8)
    words[:, 0] = ord(" ")
    for place, shift in ((1, 20), (2, 34), (3, 48)):
        words[:, place] = ord("a") + ((state >> np.uint64(shift)) & np.uint64(0xFFFF)) % np.uint64(_LETTERS)
    return words.tobytes()
