"""What a model is made of: the shapes that decide its bytes and its FLOPs.

Owns: the model as groups of attention layers, dense feed-forward layers and expert layers, and the totals that follow:
parameters, KV elements, FLOPs, experts hit. Does not own: one attention layer's arithmetic (`attention`), devices
(`hardware`), bytes (`memory`), time (`step_time`), or where shapes come from (`adapters.catalog`, `.hf_config`).
"""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.attention import AttentionKind, AttentionLayers
from perfmodel.errors import ConfigError

# How far the shapes' total may be from the published one before the data are called wrong: names are rounded
# (Nemotron-3-Nano "30B" has 31.6), norms, biases and vision towers are not counted.
_PUBLISHED_TOLERANCE_RATIO = 0.06


@dataclass(frozen=True, slots=True)
class DenseLayers:
    """`layer_count` feed-forward layers; `matrix_count` 3 when gated (SwiGLU), 2 when not.

    `layer_parameter_count` overrides the product where widths differ by layer (the mean of one layer).
    """

    layer_count: int
    intermediate_size: int
    matrix_count: int = 3
    layer_parameter_count: int | None = None

    def parameter_count(self, hidden_size: int) -> int:
        """Parameters of all these layers."""
        one = self.layer_parameter_count
        return self.layer_count * (self.matrix_count * hidden_size * self.intermediate_size if one is None else one)


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """`layer_count` mixture-of-experts layers; a token goes through `active_count` of `expert_count` routed experts.

    `shared_count` experts of together `shared_intermediate_size` see every token. `latent_size`: the routed experts
    work on a projection of the hidden state of this width (latent MoE); None: on the hidden state.
    """

    layer_count: int
    expert_count: int
    active_count: int
    intermediate_size: int
    shared_count: int = 0
    shared_intermediate_size: int = 0
    latent_size: int | None = None
    matrix_count: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.active_count <= self.expert_count:
            raise ConfigError(f"active_count is {self.active_count}; expected 1 to the {self.expert_count} experts")

    def expert_parameter_count(self, hidden_size: int) -> int:
        """One routed expert of one layer."""
        return self.matrix_count * (self.latent_size or hidden_size) * self.intermediate_size

    def dense_parameter_count(self, hidden_size: int) -> int:
        """What every token goes through in all these layers: router, shared experts, latent projections."""
        router = hidden_size * self.expert_count
        shared = self.matrix_count * hidden_size * self.shared_intermediate_size
        latent = 2 * hidden_size * self.latent_size if self.latent_size else 0
        return self.layer_count * (router + shared + latent)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder. Counts are of the main model; `mtp_layer_count` draft layers (multi-token prediction) come on top and
    are counted nowhere else.

    `native_format` names the number format of the published checkpoint; `dense_format` the one that matrices outside of
    the experts keep when the experts are stored narrower (gpt-oss: FP4 experts, BF16 rest). None: not known, or no such
    split. `published_parameter_count` is the total that its maker names and only checks the shapes: ConfigError when
    they disagree. `max_context_tokens` None: not known.
    """

    name: str
    layer_count: int
    hidden_size: int
    vocabulary_size: int
    attention: tuple[AttentionLayers, ...]
    feed_forward: tuple[DenseLayers, ...] = ()
    experts: ExpertLayers | None = None
    tied_embeddings: bool = False
    mtp_layer_count: int = 0
    max_context_tokens: int | None = None
    native_format: str | None = None
    dense_format: str | None = None
    published_parameter_count: int | None = None

    def __post_init__(self) -> None:
        if not self.attention:
            raise ConfigError(f"model {self.name}: attention is empty; expected at least one group of layers")
        for name in ("layer_count", "hidden_size", "vocabulary_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model {self.name}: {name} is {getattr(self, name)}; expected at least 1")
        published = self.published_parameter_count
        if published is not None and abs(self.parameter_count / published - 1) > _PUBLISHED_TOLERANCE_RATIO:
            raise ConfigError(
                f"model {self.name}: the shapes give {self.parameter_count} parameters, "
                f"published_parameter_count says {published}"
            )

    # Shapes

    @property
    def head_count(self) -> int:
        """Query heads of the attention layers that cache (of the linear ones when there are no others)."""
        return self._widest.head_count

    @property
    def kv_head_count(self) -> int:
        """KV heads that tensor parallelism can cut (1 for a latent cache), the largest over the layer groups."""
        return max((group.kv_head_count for group in self._cached), default=self._widest.kv_head_count)

    @property
    def head_size(self) -> int:
        """Elements of one key head."""
        return self._widest.head_size

    @property
    def intermediate_size(self) -> int:
        """Width that one token has inside of a feed-forward layer, the widest: dense, or its experts together."""
        widths = [layers.intermediate_size for layers in self.feed_forward]
        if self.experts is not None:
            moe = self.experts
            widths.append(moe.active_count * moe.intermediate_size + moe.shared_intermediate_size)
        return max(widths, default=0)

    # Parameters

    @property
    def embedding_parameter_count(self) -> int:
        """Parameters of the embedding table; the output head has as many (the same ones when tied)."""
        return self.vocabulary_size * self.hidden_size

    @property
    def attention_parameter_count(self) -> int:
        """Parameters of all attention and linear layers."""
        return sum(group.count * group.parameter_count for group in self.attention)

    @property
    def linear_parameter_count(self) -> int:
        """Parameters of the layers' matrices that every token goes through: all but the routed experts."""
        dense = sum(layers.parameter_count(self.hidden_size) for layers in self.feed_forward)
        if self.experts is not None:
            dense += self.experts.dense_parameter_count(self.hidden_size)
        return self.attention_parameter_count + dense

    @property
    def expert_parameter_count(self) -> int:
        """Parameters of one routed expert of one layer; 0 for a dense model."""
        return 0 if self.experts is None else self.experts.expert_parameter_count(self.hidden_size)

    @property
    def moe_layer_count(self) -> int:
        """Layers with routed experts."""
        return 0 if self.experts is None else self.experts.layer_count

    @property
    def experts_total(self) -> int:
        """Routed experts of one layer."""
        return 0 if self.experts is None else self.experts.expert_count

    @property
    def experts_active(self) -> int:
        """Routed experts that one token goes through in one layer."""
        return 0 if self.experts is None else self.experts.active_count

    @property
    def experts_shared(self) -> int:
        """Shared experts of one layer."""
        return 0 if self.experts is None else self.experts.shared_count

    @property
    def routed_parameter_count(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.moe_layer_count * self.experts_total * self.expert_parameter_count

    @property
    def parameter_count(self) -> int:
        """All parameters: layers, embedding, and output head unless tied. Norms and biases (below 0.1 %) left out."""
        tables = 1 if self.tied_embeddings else 2
        return self.linear_parameter_count + self.routed_parameter_count + tables * self.embedding_parameter_count

    @property
    def active_parameter_count(self) -> int:
        """Parameters that one token is multiplied with: layers, its experts and the output head (no look-up)."""
        routed = self.moe_layer_count * self.experts_active * self.expert_parameter_count
        return self.linear_parameter_count + routed + self.embedding_parameter_count

    @property
    def active_linear_flop_per_token(self) -> float:
        """FLOPs of one token in the layers' matrices, its experts included; the output head is apart."""
        routed = self.moe_layer_count * self.experts_active * self.expert_parameter_count
        return 2.0 * (self.linear_parameter_count + routed)

    def experts_hit(self, token_count: float) -> float:
        """Routed experts of one layer that `token_count` tokens touch: E (1 - (1 - k/E)^n), uniform routing."""
        if self.experts is None:
            return 0.0
        miss_ratio = 1 - self.experts_active / self.experts_total
        return float(self.experts_total * (1 - miss_ratio**token_count))

    # The KV cache

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token adds while it is inside every window: an upper bound, exact without windows."""
        return self.kv_elements_per_token_at(0)

    def kv_elements_per_token_at(self, context_tokens: int) -> int:
        """Elements that one more token adds to a sequence of `context_tokens`; full windows add nothing."""
        return sum(group.added_elements(context_tokens) for group in self.attention)

    def kv_elements(self, context_tokens: int) -> int:
        """Elements that a sequence of this length holds, index keys included, linear state not."""
        return sum(group.held_elements(context_tokens) for group in self.attention)

    def decode_read_elements(self, context_tokens: int) -> int:
        """Elements that making one token reads at this context (chunked layers: at most; half of it on average)."""
        return sum(group.read_elements(context_tokens) for group in self.attention)

    @property
    def linear_state_bytes(self) -> int:
        """Constant state of one sequence in all linear layers; a decode step reads and writes it."""
        return sum(group.count * group.state_bytes for group in self.attention)

    # Attention FLOPs

    @property
    def attention_flop_per_pair(self) -> int:
        """Prefill FLOPs of one pair over all layers that see the whole context: 4 L H d for grouped-query heads."""
        return sum(
            group.count * group.prefill_pair_flop // group.entry_tokens for group in self.attention if group.grows
        )

    def prefill_attention_flop(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Attention FLOPs of `new_tokens` of one prompt on top of `context_tokens` computed ones."""
        return float(sum(group.prefill_flop(new_tokens, context_tokens) for group in self.attention))

    def decode_attention_flop(self, context_tokens: int) -> float:
        """Attention FLOPs of one new token that attends to `context_tokens`, itself included."""
        return float(sum(group.decode_flop(context_tokens) for group in self.attention))

    @property
    def _cached(self) -> tuple[AttentionLayers, ...]:
        return tuple(group for group in self.attention if group.kind is not AttentionKind.LINEAR)

    @property
    def _widest(self) -> AttentionLayers:
        return max(self._cached or self.attention, key=lambda group: group.head_count)
