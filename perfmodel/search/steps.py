"""Step times of engines that the calibrated model does not describe, in the form that queueing and replay take.

Owns: a table over batch sizes of a decoder with its feed-forward half on SRAM chips (`disaggregation.afd_step`), and
the decode of a device whose compute is unknown, by its bandwidth alone. Does not own: the step of an ordinary engine
(`step_time`) or what fits (`options`). Both are decode only, and what is not known of them is said, not guessed:
`compute_known` is False where a half's FLOP/s are missing, and the time is then a lower bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfmodel import memory
from perfmodel.disaggregation import AfdEngine, afd_step
from perfmodel.errors import ConfigError
from perfmodel.search.plan import EngineOption
from perfmodel.step_time import BatchShape, StepTable

# Share of the bandwidth that decode reaches where none is published (what 2025 engines reach on large GPUs), and
# seconds per layer of kernels and scheduling, both as `disaggregation.afd_step` takes them.
_REACH_RATIO, _LAYER_OVERHEAD_S = 0.75, 10e-6

# Batch sizes at which the step is worked out; between them it is nearly straight.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def afd_engine(option: EngineOption) -> AfdEngine:
    """The option as `disaggregation` takes it. Raises ConfigError for an engine without chips."""
    if option.chips is None or option.chip_link_bytes_per_s is None:
        raise ConfigError(f"engine {option.offer.name} has no chips for its feed-forward half")
    shape = option.shape
    return AfdEngine(
        architecture=shape.architecture,
        attention_hardware=option.offer.hardware,
        attention_device_count=shape.device_count,
        ffn_hardware=option.chips.hardware,
        ffn_device_count=option.chip_count,
        link_bytes_per_s=option.chip_link_bytes_per_s,
        weight_format=shape.weight_format,
        kv_format=shape.kv_format,
    )


class AfdSteps:
    """Steps of decodes alone; prompts are computed elsewhere, and a prompt token here costs what a decode does."""

    def __init__(self, option: EngineOption, context_tokens: float) -> None:
        self._engine = afd_engine(option)
        self._context = max(1, round(context_tokens))
        batches = np.array(_BATCHES, dtype=np.float64)
        at_mean = np.array([afd_step(self._engine, batch, self._context).step_s for batch in _BATCHES])
        longer = np.array([afd_step(self._engine, batch, 2 * self._context).step_s for batch in _BATCHES])
        # Seconds per token of context, by batch: the slope between the mean context and twice it, per sequence.
        self._slope_s = float(np.median((longer - at_mean) / (batches * self._context)))
        self._batches = batches
        self._rest_s = np.maximum(at_mean - self._slope_s * batches * self._context, 0.0)

    @property
    def compute_known(self) -> bool:
        """Whether both halves' compute figures are known; without one the step is a lower bound."""
        return afd_step(self._engine, 1, self._context).compute_known

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step."""
        rest = self._at(np.array([batch.token_count], dtype=np.float64))[0]
        return float(rest) + self._slope_s * batch.decode_context_tokens

    def table(self, max_batched_tokens: int) -> StepTable:
        """The same as a table."""
        return StepTable(
            by_token_s=self._at(np.arange(max_batched_tokens + 1, dtype=np.float64)),
            sequence_s=0.0,
            decode_context_s=self._slope_s,
            prefill_pair_s=0.0,
            prefill_context_s=0.0,
        )

    def _at(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Between the batches by straight lines, beyond the last with its slope."""
        last = (self._rest_s[-1] - self._rest_s[-2]) / (self._batches[-1] - self._batches[-2])
        inside = np.interp(tokens, self._batches, self._rest_s)
        return np.where(tokens > self._batches[-1], self._rest_s[-1] + last * (tokens - self._batches[-1]), inside)


class BandwidthSteps:
    """Decode of a device without a compute figure: weights (the experts that the batch hits) and KV over its reachable
    bandwidth, and 10 us a layer. What compute would add is not known, so the time is a lower bound.
    """

    compute_known = False

    def __init__(self, option: EngineOption, context_tokens: float) -> None:
        shape = option.shape
        hardware = shape.hardware
        self._architecture = shape.architecture
        self._bytes_per_s = (
            shape.device_count * hardware.memory_bytes_per_s * (hardware.memory_reach_ratio or _REACH_RATIO)
        )
        architecture = shape.architecture
        self._dense_bytes = shape.data_parallel_count * (
            architecture.linear_parameter_count * shape.dense_format.element_bytes + memory.head_weight_bytes(shape)
        )
        self._expert_bytes = (
            architecture.moe_layer_count * architecture.expert_parameter_count * shape.weight_format.element_bytes
        )
        context = max(1, round(context_tokens))
        self._context_s = memory.decode_read_bytes(shape, context) / context / self._bytes_per_s

    def _fixed_s(self, tokens: float) -> float:
        hit_bytes = self._architecture.experts_hit(tokens) * self._expert_bytes
        read_s = (self._dense_bytes + hit_bytes) / self._bytes_per_s
        return read_s + self._architecture.layer_count * _LAYER_OVERHEAD_S

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step."""
        return self._fixed_s(batch.token_count) + self._context_s * batch.decode_context_tokens

    def table(self, max_batched_tokens: int) -> StepTable:
        """The same as a table."""
        return StepTable(
            by_token_s=np.array([self._fixed_s(tokens) for tokens in range(max_batched_tokens + 1)]),
            sequence_s=0.0,
            decode_context_s=self._context_s,
            prefill_pair_s=0.0,
            prefill_context_s=0.0,
        )
