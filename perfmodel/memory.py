"""What fits: bytes of weights and of KV cache on the devices of one engine, and how many tokens that leaves room for.

Owns: `EngineShape` (which model on which devices, cut how) and its memory arithmetic. Does not own: time (`step_time`)
or the block pool (`kv_cache`), which takes the resulting capacity as a number.
The formula: KV budget = utilisation * memory - weights - peak activations - runtime, on the fullest device. Leaving the
activations out overstates the KV cache by about 31 % (casys-kaist/LLMServingSim#59).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from perfmodel.architecture import Architecture
from perfmodel.errors import ConfigError
from perfmodel.hardware import Hardware, NumberFormat

# vLLM's default gpu_memory_utilization up to 0.11 (0.92 in 0.32); the lower one leaves room for other processes.
DEFAULT_UTILISATION_RATIO = 0.9

# vLLM's default max_num_batched_tokens for an H100-class server: it bounds the activations.
DEFAULT_MAX_BATCHED_TOKENS = 8192

# Driver context, kernels and graphs on every device, and NCCL's buffers when devices talk
# (ai-dynamo/aiconfigurator@095f58a: 3.5 GB and 0.4 GB).
RUNTIME_BYTES = 3_500_000_000
COLLECTIVE_BUFFER_BYTES = 400_000_000

# Activations are kept in BF16 whatever the weights are.
_ACTIVATION_BYTES = 2

# Devices beyond the largest clusters: no count of an engine is above. A float can hold what follows from it.
_MOST_DEVICES = 1_000_000

# Tokens beyond any context (published models: at most 10 million): what follows from it stays within a float.
_MOST_CONTEXT_TOKENS = 10**12

# Context at which a model whose layers forget (windows, linear state) is asked how much one token of a sequence takes.
_REFERENCE_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine: devices of one kind that share one model. Raises ConfigError if that cannot be.

    `tensor_parallel_count` devices cut the attention heads (and matrices) of a layer; `data_parallel_count` such groups
    hold copies of attention and dense matrices and serve different sequences (attention data parallelism: eight GPUs
    that SGLang calls tp 8, dp 8 are 1 and 8 here); routed experts are spread over all devices of both, whole experts
    over `expert_parallel_count` of them. `pipeline_parallel_count` stages hold consecutive layers.
    """

    hardware: Hardware
    architecture: Architecture
    tensor_parallel_count: int = 1
    weight_format: NumberFormat = NumberFormat.BF16
    kv_format: NumberFormat = NumberFormat.BF16
    pipeline_parallel_count: int = 1
    data_parallel_count: int = 1
    expert_parallel_count: int = 1

    def __post_init__(self) -> None:
        for field in ("tensor", "data", "pipeline", "expert"):
            asked = getattr(self, f"{field}_parallel_count")
            if not asked <= _MOST_DEVICES:
                raise ConfigError(f"{field}_parallel_count is {_short(asked)}; expected at most {_MOST_DEVICES}")
        count, heads = self.tensor_parallel_count, self.architecture.head_count
        if count < 1 or heads % count:
            raise ConfigError(f"tensor_parallel_count is {count}; expected a divisor of the {heads} attention heads")
        linked = self.hardware.scaleup_device_count
        # A domain of one says that its size is not known: then nothing is refused on its account.
        if 1 < linked < count:
            raise ConfigError(f"tensor_parallel_count is {count}; {self.hardware.name} links at most {linked} devices")
        if self.data_parallel_count < 1:
            raise ConfigError(f"data_parallel_count is {self.data_parallel_count}; expected at least 1")
        layers, stages = self.architecture.layer_count, self.pipeline_parallel_count
        if not 1 <= stages <= layers:
            raise ConfigError(f"pipeline_parallel_count is {stages}; expected 1 to the {layers} layers")
        experts, group = self.expert_parallel_count, count * self.data_parallel_count
        if experts < 1 or group % experts:
            raise ConfigError(
                f"expert_parallel_count is {experts}; expected a divisor of the {group} devices of a stage"
            )
        if experts > 1 and self.architecture.moe_layer_count == 0:
            raise ConfigError(
                f"expert_parallel_count is {experts}; {self.architecture.name} has no experts, expected 1"
            )

    @property
    def device_count(self) -> int:
        """Devices of the engine."""
        return self.tensor_parallel_count * self.data_parallel_count * self.pipeline_parallel_count

    @property
    def dense_format(self) -> NumberFormat:
        """Format of the matrices outside of the experts: wider than `weight_format` where checkpoints keep them so."""
        kept = self.architecture.dense_format
        if kept is None or NumberFormat.parse(kept).element_bytes <= self.weight_format.element_bytes:
            return self.weight_format
        return NumberFormat.parse(kept)


# Weights


def layer_weight_bytes(shape: EngineShape) -> int:
    """Bytes of one copy of all layers' matrices, routed experts included."""
    architecture = shape.architecture
    dense = architecture.linear_parameter_count * shape.dense_format.element_bytes
    return round(dense + architecture.routed_parameter_count * shape.weight_format.element_bytes)


def head_weight_bytes(shape: EngineShape) -> int:
    """Bytes of the output head; quantised checkpoints keep it, and the embedding, in BF16."""
    return round(shape.architecture.embedding_parameter_count * NumberFormat.BF16.element_bytes)


def checkpoint_bytes(shape: EngineShape) -> int:
    """Bytes of one copy of all weights: layers, embedding, and the output head unless it is the embedding."""
    tables = 1 if shape.architecture.tied_embeddings else 2
    return layer_weight_bytes(shape) + tables * head_weight_bytes(shape)


def weight_bytes(shape: EngineShape) -> int:
    """Bytes of all weights over all devices: attention data parallelism copies everything but the routed experts."""
    experts = _expert_bytes(shape)
    return round(shape.data_parallel_count * (checkpoint_bytes(shape) - experts) + experts)


def fullest_device_weight_bytes(shape: EngineShape) -> float:
    """Bytes of weights on the device that holds most: the largest stage, and one table (both without stages)."""
    tensor, data, stages = shape.tensor_parallel_count, shape.data_parallel_count, shape.pipeline_parallel_count
    experts = _expert_bytes(shape)
    tables = 1 if stages > 1 or shape.architecture.tied_embeddings else 2
    layers = (layer_weight_bytes(shape) - experts) / tensor + experts / (tensor * data)
    return layers * _stage_ratio(shape) + tables * head_weight_bytes(shape) / tensor


def _expert_bytes(shape: EngineShape) -> float:
    return shape.architecture.routed_parameter_count * shape.weight_format.element_bytes


def _stage_ratio(shape: EngineShape) -> float:
    """Share of the layers that the largest pipeline stage holds."""
    layers = shape.architecture.layer_count
    return ceil(layers / shape.pipeline_parallel_count) / layers


# KV cache


def kv_copy_ratio(shape: EngineShape, kv_head_count: int) -> float:
    """Bytes held per byte of cache: above 1 when fewer KV heads than ranks must be copied (a latent has one head)."""
    ranks = shape.tensor_parallel_count
    return ranks * ceil(kv_head_count / ranks) / kv_head_count


def kv_bytes_per_token(shape: EngineShape, context_tokens: int = 0) -> int:
    """Bytes that one more token adds at this context, over all devices that hold the sequence, copies included.

    Layers whose window is full add nothing. At context 0 this is the rate inside every window.
    """
    _check_context(context_tokens)
    elements = sum(
        group.added_elements(context_tokens) * kv_copy_ratio(shape, group.kv_head_count)
        for group in shape.architecture.attention
    )
    return round(elements * shape.kv_format.element_bytes)


def kv_bytes(shape: EngineShape, context_tokens: int) -> int:
    """Bytes of one sequence of this length over all devices that hold it: cache with copies, and linear state."""
    _check_context(context_tokens)
    elements = sum(
        group.held_elements(context_tokens) * kv_copy_ratio(shape, group.kv_head_count)
        for group in shape.architecture.attention
    )
    return round(elements * shape.kv_format.element_bytes) + shape.architecture.linear_state_bytes


def decode_read_bytes(shape: EngineShape, context_tokens: int) -> float:
    """Bytes of cache and state that making one token moves, over all devices; state is read and written."""
    _check_context(context_tokens)
    elements = sum(
        group.read_elements(context_tokens) * kv_copy_ratio(shape, group.kv_head_count)
        for group in shape.architecture.attention
    )
    return elements * shape.kv_format.element_bytes + 2 * shape.architecture.linear_state_bytes


def _check_context(context_tokens: float) -> None:
    if not context_tokens <= _MOST_CONTEXT_TOKENS:
        raise ConfigError(f"context_tokens is {_short(context_tokens)}; expected at most {_MOST_CONTEXT_TOKENS} tokens")


def _short(count: float) -> str:
    """A count as a person reads it: hundreds of digits are not printed, and need not fit into a float."""
    return str(count) if count < 10**20 else f"above 10^{len(str(int(count))) - 1}" if count < inf else str(count)


# Capacity


def activation_bytes_per_device(shape: EngineShape, max_batched_tokens: int) -> int:
    """Peak activations of one MLP: residual, normed input, output (3 h) and gate, up, product (3 I / n) per token."""
    architecture = shape.architecture
    per_token = 3 * architecture.hidden_size + 3 * architecture.intermediate_size // shape.tensor_parallel_count
    return max_batched_tokens * per_token * _ACTIVATION_BYTES


def kv_budget_bytes_per_device(
    shape: EngineShape,
    *,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    utilisation_ratio: float = DEFAULT_UTILISATION_RATIO,
) -> float:
    """Bytes left for the cache on the fullest device; not above 0 when the weights do not fit."""
    taken = runtime_bytes(shape.hardware, shape.device_count) + activation_bytes_per_device(shape, max_batched_tokens)
    return utilisation_ratio * shape.hardware.memory_bytes - taken - fullest_device_weight_bytes(shape)


def runtime_bytes(hardware: Hardware, device_count: int) -> int:
    """What driver and collectives take of one device. SRAM chips run compiled programs and have no such context."""
    if hardware.sram:
        return 0
    return RUNTIME_BYTES + (COLLECTIVE_BUFFER_BYTES if device_count > 1 else 0)


def kv_capacity_tokens(
    shape: EngineShape,
    *,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    utilisation_ratio: float = DEFAULT_UTILISATION_RATIO,
    context_tokens: int | None = None,
) -> int:
    """Tokens whose KV fits beside the weights, over all data-parallel groups. Raises ConfigError when not even the
    weights fit. Models that forget hold more tokens of longer sequences; `context_tokens` is their length (default
    8,192 or the model's limit).
    """
    budget = _budget_of_group(shape, max_batched_tokens, utilisation_ratio)
    context = context_tokens or min(_REFERENCE_CONTEXT_TOKENS, shape.architecture.max_context_tokens or 2**62)
    per_token = kv_bytes(shape, context) * _stage_ratio(shape) * shape.pipeline_parallel_count / context
    return shape.data_parallel_count * int(budget // per_token)


def largest_batch(
    shape: EngineShape,
    context_tokens: int,
    *,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    utilisation_ratio: float = DEFAULT_UTILISATION_RATIO,
) -> int:
    """Sequences of this length that fit at once (0 when none does). Raises ConfigError when the weights do not fit."""
    budget = _budget_of_group(shape, max_batched_tokens, utilisation_ratio)
    one = kv_bytes(shape, context_tokens) * _stage_ratio(shape) * shape.pipeline_parallel_count
    return shape.data_parallel_count * int(budget // max(one, 1))


def _budget_of_group(shape: EngineShape, max_batched_tokens: int, utilisation_ratio: float) -> float:
    """Budget of one data-parallel group, as if each of its devices were the fullest."""
    one = kv_budget_bytes_per_device(shape, max_batched_tokens=max_batched_tokens, utilisation_ratio=utilisation_ratio)
    if one <= 0:
        raise ConfigError(
            f"{shape.architecture.name} in {shape.weight_format} does not fit on {shape.device_count} x "
            f"{shape.hardware.name}: {weight_bytes(shape) / 1e9:.1f} GB of weights leave no room for a KV cache"
        )
    return one * shape.tensor_parallel_count * shape.pipeline_parallel_count


def device_count_by_memory(
    one: EngineShape,
    context_tokens: int,
    sequence_count: int,
    *,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    utilisation_ratio: float = DEFAULT_UTILISATION_RATIO,
) -> int:
    """Devices whose memory holds the weights and `sequence_count` sequences beside runtime and activations.

    `one` is the model on a single device. Bytes only: no KV head is copied and no count is refused for heads or links.
    Raises ConfigError when one device has no room beside its runtime and activations.
    """
    wanted = checkpoint_bytes(one) + sequence_count * kv_bytes(one, context_tokens)
    fixed = 3 * one.architecture.hidden_size * max_batched_tokens * _ACTIVATION_BYTES
    wanted += activation_bytes_per_device(one, max_batched_tokens) - fixed  # the inner width is cut, h is not
    memory = utilisation_ratio * one.hardware.memory_bytes - fixed
    alone, together = memory - runtime_bytes(one.hardware, 1), memory - runtime_bytes(one.hardware, 2)
    if wanted <= alone:
        return 1
    if together <= 0:
        raise ConfigError(
            f"{one.hardware.name} has {one.hardware.memory_bytes / 1e9:.2f} GB; activations of {max_batched_tokens} "
            f"tokens of {one.architecture.name} and the runtime leave nothing for weights"
        )
    return max(2, ceil(wanted / together))


def crossover_tokens(shape: EngineShape) -> int | None:
    """Shortest context at which one sequence's KV holds as many bytes as the weights; None where it never does.

    Only layers that grow without end can get there. Copies of tensor parallelism are as the shape has them.
    """
    weights = checkpoint_bytes(shape)
    if kv_bytes(shape, 1) >= weights:
        return 1
    growing = sum(group.kv_elements for group in shape.architecture.attention if group.grows)
    if growing == 0:
        return None
    low, high = 1, 2
    while kv_bytes(shape, high) < weights:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kv_bytes(shape, middle) >= weights else (middle, high)
    return high
