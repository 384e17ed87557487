"""Which prefix blocks prompts share: ids from layers of common text, each layer known by a key.

Owns: cutting prompts into full blocks and giving equal prefixes equal ids. Does not own: who shares what
(`generators`). A block belongs to the layer that its last token is in: it is as widely shared as its rarest
token. Ids are planned for all prompts (a few numbers each) and written out for some of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLayer:
    """One layer of every prompt: which text (`key` int64[n]) and up to which token (`end_tokens` int64[n]).

    Equal keys must mean equal text up to the shorter of two ends AND equal layers before it: a repository's key
    contains the harness that it is used from.
    """

    key: Ids
    end_tokens: Ids

    def ordered(self, order: Ids) -> PrefixLayer:
        """The layer of the same prompts in another order."""
        return PrefixLayer(self.key[order], self.end_tokens[order])


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """The blocks of n prompts as runs of consecutive ids, one run a layer.

    `first` int64[n, layers] is a run's first id and `length` int64[n, layers] how many ids it has.
    """

    first: Ids
    length: Ids

    def written(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """(offsets int64[m + 1], ids) of the prompts `start` to `stop`, as a trace has them."""
        runs, first = self.length[start:stop].ravel(), self.first[start:stop].ravel()
        before = np.cumsum(runs) - runs
        ids = np.repeat(first - before, runs) + np.arange(runs.sum())
        counts = self.length[start:stop].sum(axis=1)
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))), ids


def block_plan(input_tokens: npt.NDArray[np.int32], layers: Sequence[PrefixLayer], block_tokens: int) -> BlockPlan:
    """The full blocks of n prompts. Tokens behind the last layer's end are in it; ids go from 0 up, layer by layer."""
    counts = input_tokens.astype(np.int64) // block_tokens
    length = np.zeros((len(counts), len(layers)), dtype=np.int64)
    first = np.zeros_like(length)
    start, taken = np.zeros_like(counts), 0
    for number, layer in enumerate(layers):
        last = number == len(layers) - 1
        end = counts if last else np.clip(layer.end_tokens // block_tokens, start, counts)
        base, taken = _run_starts(layer.key, start, end, taken)
        length[:, number], first[:, number] = end - start, base + start
        start = end
    return BlockPlan(first, length)


def _run_starts(key: Ids, start: Ids, end: Ids, taken: int) -> tuple[Ids, int]:
    """For each row the number that a block's place is added to, and how many ids are taken after this layer."""
    _, rank = np.unique(key, return_inverse=True)
    groups = int(rank.max()) + 1 if len(rank) else 0
    used = end > start
    low = np.full(groups, np.iinfo(np.int64).max, dtype=np.int64)
    high = np.zeros(groups, dtype=np.int64)
    np.minimum.at(low, rank[used], start[used])
    np.maximum.at(high, rank[used], end[used])
    low = np.minimum(low, high)
    widths = high - low
    base = taken + np.cumsum(widths) - widths - low
    return base[rank], taken + int(widths.sum())
