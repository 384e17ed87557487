"""Attention layers by kind: what they weigh, what they cache, what a token costs in them.

Owns: `AttentionLayers` (a group of like layers as plain counts) and the shapes that build one: grouped-query heads,
latent (MLA) heads with an optional sparse indexer, compressed caches, linear (DeltaNet, KDA, Mamba-2) layers. Does not
own: feed-forward layers and totals (`architecture`), bytes (`memory`) or seconds (`step_time`).
Positions count from 1; a "pair" is one query token and one cached entry it attends to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perfmodel.errors import ConfigError

# FLOPs per element of a linear layer's state and token: decay, outer-product update and read-out, two each (the
# recurrent form; chunked kernels do up to twice that in prefill and are still far below the projections).
_STATE_FLOP_PER_ELEMENT = 6

# Length of the causal convolution in front of DeltaNet and Mamba-2 layers (transformers' defaults for both families);
# the cache keeps one column less.
_CONVOLUTION_SIZE = 4

# The convolution's tail is kept in BF16.
_CONVOLUTION_ELEMENT_BYTES = 2


class AttentionKind(StrEnum):
    """How much of the context a layer keeps and reads.

    FULL: every token. WINDOW: the last `window_tokens`. CHUNKED: the tokens of the current chunk of `window_tokens`.
    COMPRESSED: one entry per `entry_tokens` tokens. LINEAR: a state of constant size.
    """

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    COMPRESSED = "compressed"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """`count` layers alike; all other figures are of one layer.

    `kv_elements` are cached per entry (keys and values), `index_elements` beside them for a sparse indexer that scans
    every entry and lets `top_k_count` of them be read. `kv_head_count` is what tensor parallelism can cut the cache
    into (1 for a latent one, which every rank copies). Pair FLOPs are for all heads; `decode_pair_flop` differs from
    `prefill_pair_flop` for MLA, whose decode works on the latent (absorbed form).
    """

    kind: AttentionKind
    count: int
    head_count: int
    kv_head_count: int
    head_size: int
    parameter_count: int
    kv_elements: int = 0
    prefill_pair_flop: int = 0
    decode_pair_flop: int = 0
    window_tokens: int | None = None
    entry_tokens: int = 1
    top_k_count: int | None = None
    index_elements: int = 0
    index_pair_flop: int = 0
    state_bytes: int = 0
    state_flop_per_token: int = 0

    def __post_init__(self) -> None:
        windowed = self.kind in (AttentionKind.WINDOW, AttentionKind.CHUNKED)
        if windowed != (self.window_tokens is not None):
            raise ConfigError(
                f"attention {self.kind}: window_tokens is {self.window_tokens}; "
                "expected a count for window and chunked layers, none for others"
            )
        for name in ("count", "head_count", "kv_head_count", "head_size", "entry_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"attention {self.kind}: {name} is {getattr(self, name)}; expected at least 1")
        for name in ("window_tokens", "top_k_count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"attention {self.kind}: {name} is {value}; expected at least 1")

    @property
    def grows(self) -> bool:
        """Whether the cache grows without end with the context."""
        return self.kind in (AttentionKind.FULL, AttentionKind.COMPRESSED)

    def held_tokens(self, context_tokens: int) -> int:
        """Tokens of a sequence of this length that one layer keeps."""
        if self.kind is AttentionKind.LINEAR:
            return 0
        if self.window_tokens is not None:
            return min(context_tokens, self.window_tokens)
        return context_tokens

    def held_elements(self, context_tokens: int) -> int:
        """Cached elements, index included, of one sequence in all `count` layers."""
        per_entry = self.kv_elements + self.index_elements
        return self.count * (self.held_tokens(context_tokens) * per_entry // self.entry_tokens)

    def added_elements(self, context_tokens: int) -> int:
        """Elements that one more token adds to a sequence of `context_tokens`, in all layers."""
        if self.held_tokens(context_tokens + 1) == self.held_tokens(context_tokens):
            return 0
        return self.count * (self.kv_elements + self.index_elements) // self.entry_tokens

    def read_elements(self, context_tokens: int) -> int:
        """Elements that making one token reads in all layers; the indexer scans every entry, top-k bounds the rest."""
        entries = self.held_tokens(context_tokens) / self.entry_tokens
        chosen = entries if self.top_k_count is None else min(entries, self.top_k_count)
        return round(self.count * (chosen * self.kv_elements + entries * self.index_elements))

    def prefill_flop(self, new_tokens: int, context_tokens: int) -> float:
        """Attention FLOPs of `new_tokens` on top of `context_tokens` computed ones, in all layers, causal."""
        last = context_tokens + new_tokens
        pairs = self._pairs_up_to(last) - self._pairs_up_to(context_tokens)
        attention = pairs * self.prefill_pair_flop
        if self.top_k_count is not None:
            # An engine attends to everything in the dense form or to the chosen in the latent form, whichever is less.
            limit = self.top_k_count * self.entry_tokens
            sparse = _window_pairs(last, limit) - _window_pairs(context_tokens, limit)
            attention = min(attention, sparse / self.entry_tokens * self.decode_pair_flop)
        index = (_all_pairs(last) - _all_pairs(context_tokens)) / self.entry_tokens * self.index_pair_flop
        return self.count * (attention + index + new_tokens * self.state_flop_per_token)

    def decode_flop(self, context_tokens: int) -> float:
        """Attention FLOPs of one token that attends to `context_tokens`, itself included, in all layers."""
        entries = self.held_tokens(context_tokens) / self.entry_tokens
        chosen = entries if self.top_k_count is None else min(entries, self.top_k_count)
        pairs_flop = chosen * self.decode_pair_flop + entries * self.index_pair_flop
        return self.count * (pairs_flop + self.state_flop_per_token)

    def _pairs_up_to(self, tokens: int) -> float:
        if self.kind is AttentionKind.LINEAR:
            return 0
        if self.window_tokens is None:
            return _all_pairs(tokens) / self.entry_tokens
        if self.kind is AttentionKind.WINDOW:
            return _window_pairs(tokens, self.window_tokens)
        chunks, rest = divmod(tokens, self.window_tokens)
        return chunks * _all_pairs(self.window_tokens) + _all_pairs(rest)


def _all_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _window_pairs(tokens: int, window_tokens: int) -> int:
    """Sum of min(p, w) over the positions p = 1..tokens."""
    inside = min(tokens, window_tokens)
    return _all_pairs(inside) + (tokens - inside) * window_tokens


@dataclass(frozen=True, slots=True)
class Indexer:
    """A sparse-attention indexer (DSA): `head_count` query heads score one shared key of `head_size` per entry.

    `query_size` is the width its queries are projected from (the query latent of MLA). `owned` False: the layer uses
    the choice of another layer's indexer and has none itself.
    """

    head_count: int
    head_size: int
    top_k_count: int
    query_size: int
    owned: bool = True

    def parameter_count(self, hidden_size: int) -> int:
        """Query projection, key projection and per-head weights (DeepSeek-V3.2's indexer)."""
        if not self.owned:
            return 0
        return self.query_size * self.head_count * self.head_size + hidden_size * (self.head_size + self.head_count)

    @property
    def key_elements(self) -> int:
        """Index-key elements cached per entry."""
        return self.head_size if self.owned else 0

    @property
    def pair_flop(self) -> int:
        """One dot product per index head and entry."""
        return 2 * self.head_count * self.head_size if self.owned else 0


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """MHA, GQA or MQA: `head_count` query heads share `kv_head_count` keys and values.

    `gated`: an output gate as wide as the queries (Qwen3-Next). `value_is_key`: one projection makes both (Gemma 4's
    global layers); both are still cached.
    """

    hidden_size: int
    head_count: int
    kv_head_count: int
    key_size: int
    value_size: int
    gated: bool = False
    value_is_key: bool = False

    def __post_init__(self) -> None:
        if self.kv_head_count < 1 or self.head_count % self.kv_head_count:
            raise ConfigError(f"head_count {self.head_count} is no multiple of kv_head_count {self.kv_head_count}")

    @property
    def parameter_count(self) -> int:
        """Query, key, value and output projections of one layer."""
        queries = self.head_count * self.key_size * (2 if self.gated else 1)
        values = 0 if self.value_is_key else self.kv_head_count * self.value_size
        return self.hidden_size * (
            queries + self.kv_head_count * self.key_size + values + self.head_count * self.value_size
        )

    def layers(
        self,
        count: int,
        kind: AttentionKind = AttentionKind.FULL,
        window_tokens: int | None = None,
        indexer: Indexer | None = None,
    ) -> AttentionLayers:
        """`count` such layers. Pair FLOPs are 2 H (d_k + d_v): scores and the weighted sum."""
        pair_flop = 2 * self.head_count * (self.key_size + self.value_size)
        return AttentionLayers(
            kind=kind,
            count=count,
            head_count=self.head_count,
            kv_head_count=self.kv_head_count,
            head_size=self.key_size,
            parameter_count=self.parameter_count + (indexer.parameter_count(self.hidden_size) if indexer else 0),
            kv_elements=self.kv_head_count * (self.key_size + self.value_size),
            prefill_pair_flop=pair_flop,
            decode_pair_flop=pair_flop,
            window_tokens=window_tokens,
            top_k_count=indexer.top_k_count if indexer else None,
            index_elements=indexer.key_elements if indexer else 0,
            index_pair_flop=indexer.pair_flop if indexer else 0,
        )


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """MLA: keys and values are projections of one cached latent of `kv_rank` plus a shared rotary key of `rope_size`.

    `query_rank` None: queries are projected from the hidden state at once (DeepSeek-V2-Lite).
    """

    hidden_size: int
    head_count: int
    query_rank: int | None
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int

    @property
    def parameter_count(self) -> int:
        """Query (down and up), latent down, key and value up, and output projections of one layer."""
        key_size = self.nope_size + self.rope_size
        if self.query_rank is None:
            queries = self.hidden_size * self.head_count * key_size
        else:
            queries = self.query_rank * (self.hidden_size + self.head_count * key_size)
        latent = self.hidden_size * (self.kv_rank + self.rope_size)
        expansion = self.kv_rank * self.head_count * (self.nope_size + self.value_size)
        return queries + latent + expansion + self.head_count * self.value_size * self.hidden_size

    def layers(self, count: int, indexer: Indexer | None = None) -> AttentionLayers:
        """`count` such layers. Prefill 2 H (d_qk + d_v) FLOPs a pair; absorbed decode 2 H (2 c + r), c the latent."""
        return AttentionLayers(
            kind=AttentionKind.FULL,
            count=count,
            head_count=self.head_count,
            kv_head_count=1,
            head_size=self.nope_size + self.rope_size,
            parameter_count=self.parameter_count + (indexer.parameter_count(self.hidden_size) if indexer else 0),
            kv_elements=self.kv_rank + self.rope_size,
            prefill_pair_flop=2 * self.head_count * (self.nope_size + self.rope_size + self.value_size),
            decode_pair_flop=2 * self.head_count * (2 * self.kv_rank + self.rope_size),
            top_k_count=indexer.top_k_count if indexer else None,
            index_elements=indexer.key_elements if indexer else 0,
            index_pair_flop=indexer.pair_flop if indexer else 0,
        )


@dataclass(frozen=True, slots=True)
class SharedHead:
    """DeepSeek-V4's attention: one head of `head_size` is key and value of all query heads; the output projection is
    low-rank in `output_group_count` groups. Each layer keeps a window; most keep a compressed cache beside it.

    The compressor's own projections are not counted (below 0.1 % of the total).
    """

    hidden_size: int
    head_count: int
    head_size: int
    query_rank: int
    output_group_count: int
    output_rank: int

    @property
    def parameter_count(self) -> int:
        """Query (down and up), shared key, and grouped low-rank output projections of one layer."""
        width = self.head_count * self.head_size
        queries = self.query_rank * (self.hidden_size + width)
        output = self.output_rank * (width + self.output_group_count * self.hidden_size)
        return queries + self.hidden_size * self.head_size + output

    def window_layers(self, count: int, window_tokens: int) -> AttentionLayers:
        """The windows of `count` layers; carries the layers' weights."""
        return self._layers(AttentionKind.WINDOW, count, self.parameter_count, window_tokens=window_tokens)

    def compressed_layers(self, count: int, entry_tokens: int, indexer: Indexer | None = None) -> AttentionLayers:
        """The compressed caches of `count` of these layers; their weights are counted with the windows."""
        parameters = indexer.parameter_count(self.hidden_size) if indexer else 0
        return self._layers(AttentionKind.COMPRESSED, count, parameters, entry_tokens=entry_tokens, indexer=indexer)

    def _layers(
        self,
        kind: AttentionKind,
        count: int,
        parameter_count: int,
        *,
        window_tokens: int | None = None,
        entry_tokens: int = 1,
        indexer: Indexer | None = None,
    ) -> AttentionLayers:
        pair_flop = 4 * self.head_count * self.head_size
        return AttentionLayers(
            kind=kind,
            count=count,
            head_count=self.head_count,
            kv_head_count=1,
            head_size=self.head_size,
            parameter_count=parameter_count,
            kv_elements=self.head_size,
            prefill_pair_flop=pair_flop,
            decode_pair_flop=pair_flop,
            window_tokens=window_tokens,
            entry_tokens=entry_tokens,
            top_k_count=indexer.top_k_count if indexer else None,
            index_elements=indexer.key_elements if indexer else 0,
            index_pair_flop=indexer.pair_flop if indexer else 0,
        )


class LinearKind(StrEnum):
    """The recurrences: gated DeltaNet (Qwen3-Next), Kimi delta attention, Mamba-2."""

    GATED_DELTANET = "gated_deltanet"
    KDA = "kda"
    MAMBA2 = "mamba2"


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """A layer with a state of `value_head_count` x `key_size` x `value_size` elements and no cache.

    DeltaNet and KDA: `key_head_count` heads of `key_size` for queries and keys. Mamba-2: `key_head_count` is the number
    of groups, `key_size` the state size, `value_head_count` heads of `value_size`. `state_element_bytes`: 4 where the
    state is kept in FP32.
    """

    kind: LinearKind
    hidden_size: int
    key_head_count: int
    key_size: int
    value_head_count: int
    value_size: int
    state_element_bytes: int = 4

    @property
    def parameter_count(self) -> int:
        """Projections and convolutions of one layer (transformers' Qwen3Next and Mamba2 modules, the KDA paper)."""
        hidden, heads = self.hidden_size, self.value_head_count
        keys, values = self.key_head_count * self.key_size, heads * self.value_size
        output = values * hidden
        if self.kind is LinearKind.MAMBA2:
            return hidden * (2 * values + 2 * keys + heads) + (values + 2 * keys) * _CONVOLUTION_SIZE + output
        convolution = (2 * keys + values) * _CONVOLUTION_SIZE
        if self.kind is LinearKind.GATED_DELTANET:
            return hidden * (2 * keys + 2 * values + 2 * heads) + convolution + output
        # KDA: low-rank decay and output gates, each through one head's width.
        gates = 2 * self.value_size * (hidden + values) + hidden * heads
        return hidden * (2 * keys + values) + gates + convolution + output

    @property
    def state_bytes(self) -> int:
        """State of one sequence in one layer, with the convolution's tail (KDA's is left out, as in the catalogue)."""
        keys, values = self.key_head_count * self.key_size, self.value_head_count * self.value_size
        state = values * self.key_size * self.state_element_bytes
        if self.kind is LinearKind.KDA:
            return state
        return state + (2 * keys + values) * (_CONVOLUTION_SIZE - 1) * _CONVOLUTION_ELEMENT_BYTES

    def layers(self, count: int) -> AttentionLayers:
        """`count` such layers."""
        return AttentionLayers(
            kind=AttentionKind.LINEAR,
            count=count,
            head_count=self.value_head_count,
            kv_head_count=self.value_head_count,
            head_size=self.value_size,
            parameter_count=self.parameter_count,
            state_bytes=self.state_bytes,
            state_flop_per_token=_STATE_FLOP_PER_ELEMENT * self.value_head_count * self.key_size * self.value_size,
        )
