"""What a model is made of: the shapes that decide its bytes and its FLOPs.

Owns: parameter counts, KV elements and FLOP counts of a dense decoder with grouped-query attention (every model in the
catalogue today). Does not own: number formats, devices or time. Mixture-of-experts and latent attention are not
described here yet; `adapters.catalog` refuses a data file that would need them rather than sizing it wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder. `parameter_count` is the published total; embedding and output head are untied in all of
    these.
    """

    name: str
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    intermediate_size: int
    vocabulary_size: int
    parameter_count: int
    max_context_tokens: int

    def __post_init__(self) -> None:
        if self.head_count % self.kv_head_count:
            raise ConfigError(
                f"model {self.name}: head_count {self.head_count} is no multiple of kv_head_count {self.kv_head_count}"
            )
        # A wrong shape in a data file shows up here; norms and biases are far below 1 %.
        computed = self.linear_parameter_count + 2 * self.embedding_parameter_count
        if abs(computed / self.parameter_count - 1) > 0.02:
            raise ConfigError(
                f"model {self.name}: the shapes give {computed} parameters, parameter_count says {self.parameter_count}"
            )

    @property
    def embedding_parameter_count(self) -> int:
        """Parameters of the embedding table; the output head has as many."""
        return self.vocabulary_size * self.hidden_size

    @property
    def linear_parameter_count(self) -> int:
        """Parameters of all layers' matrices (attention projections and the gated MLP)."""
        attention = self.hidden_size * self.head_size * (2 * self.head_count + 2 * self.kv_head_count)
        return self.layer_count * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def kv_elements_per_token(self) -> int:
        """Key and value elements that one token keeps over all layers: 2 * L * Hkv * d."""
        return 2 * self.layer_count * self.kv_head_count * self.head_size

    @property
    def attention_flop_per_pair(self) -> int:
        """FLOPs for one (query token, key token) pair over all layers: 4 * L * H * d (scores and the weighted sum)."""
        return 4 * self.layer_count * self.head_count * self.head_size
