"""What fits: bytes of weights and of KV cache on the devices of one engine, and how many tokens that leaves room for.

Owns: `EngineShape` (which model on which devices, cut how) and its memory arithmetic. Does not own: time (`step_time`)
or the block pool (`kv_cache`), which takes the resulting capacity as a number.
The formula: KV budget = utilisation * memory - weights - peak activations - runtime. Leaving the activations out
overstates the KV cache by about 31 % (casys-kaist/LLMServingSim#59).
"""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.architecture import Architecture
from perfmodel.errors import ConfigError
from perfmodel.hardware import Hardware, NumberFormat

# vLLM's default gpu_memory_utilization up to 0.11 (0.92 in 0.32); the lower one leaves room for other processes.
DEFAULT_UTILISATION_RATIO = 0.9

# Driver context, kernels and graphs on every device, and NCCL's buffers when devices talk
# (ai-dynamo/aiconfigurator@095f58a: 3.5 GB and 0.4 GB).
RUNTIME_BYTES = 3_500_000_000
COLLECTIVE_BUFFER_BYTES = 400_000_000

# Activations are kept in BF16 whatever the weights are.
_ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine: `tensor_parallel_count` devices of one kind share one model. Raises ConfigError if that cannot be."""

    hardware: Hardware
    architecture: Architecture
    tensor_parallel_count: int = 1
    weight_format: NumberFormat = NumberFormat.BF16
    kv_format: NumberFormat = NumberFormat.BF16

    def __post_init__(self) -> None:
        count, heads = self.tensor_parallel_count, self.architecture.head_count
        if count < 1 or heads % count:
            raise ConfigError(f"tensor_parallel_count is {count}; expected a divisor of the {heads} attention heads")
        if count > self.hardware.scaleup_device_count:
            raise ConfigError(
                f"tensor_parallel_count is {count}; {self.hardware.name} links at most "
                f"{self.hardware.scaleup_device_count} devices"
            )


def layer_weight_bytes(shape: EngineShape) -> int:
    """Bytes of all layers' matrices over all devices of the engine."""
    return shape.architecture.linear_parameter_count * shape.weight_format.element_bytes


def head_weight_bytes(shape: EngineShape) -> int:
    """Bytes of the output head over all devices; quantised checkpoints keep it, and the embedding, in BF16."""
    return shape.architecture.embedding_parameter_count * NumberFormat.BF16.element_bytes


def weight_bytes(shape: EngineShape) -> int:
    """Bytes of all weights over all devices of the engine."""
    return layer_weight_bytes(shape) + 2 * head_weight_bytes(shape)


def kv_bytes_per_token(shape: EngineShape) -> int:
    """Bytes of one token's keys and values over all devices (KV heads are copied when there are fewer than devices)."""
    architecture = shape.architecture
    copies = max(1, shape.tensor_parallel_count // architecture.kv_head_count)
    return architecture.kv_elements_per_token * shape.kv_format.element_bytes * copies


def activation_bytes_per_device(shape: EngineShape, max_batched_tokens: int) -> int:
    """Peak activations of one MLP: residual, normed input, output (3 h) and gate, up, product (3 I / n) per token."""
    architecture = shape.architecture
    per_token = 3 * architecture.hidden_size + 3 * architecture.intermediate_size // shape.tensor_parallel_count
    return max_batched_tokens * per_token * _ACTIVATION_BYTES


def kv_capacity_tokens(
    shape: EngineShape,
    *,
    max_batched_tokens: int = 8192,
    utilisation_ratio: float = DEFAULT_UTILISATION_RATIO,
) -> int:
    """Tokens whose KV fits beside the weights. Raises ConfigError when not even the weights fit.

    `max_batched_tokens` bounds the activations; 8192 is vLLM's default for an H100-class server.
    """
    count = shape.tensor_parallel_count
    taken = RUNTIME_BYTES + activation_bytes_per_device(shape, max_batched_tokens)
    if count > 1:
        taken += COLLECTIVE_BUFFER_BYTES
    budget = count * (utilisation_ratio * shape.hardware.memory_bytes - taken) - weight_bytes(shape)
    if budget <= 0:
        raise ConfigError(
            f"{shape.architecture.name} in {shape.weight_format} does not fit on {count} x {shape.hardware.name}: "
            f"{weight_bytes(shape) / 1e9:.1f} GB of weights leave no room for a KV cache"
        )
    return int(budget // kv_bytes_per_token(shape))
