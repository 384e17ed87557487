"""What one engine step has to do, as named terms in physical units, before any of it is fitted.

Owns: the vocabulary of terms and `StepBasis`, which turns a batch into seconds at coefficient 1: FLOPs over peak, bytes
over bandwidth, bytes over links, and counts of layers, steps and sequences in microseconds. Does not own: the
coefficients that multiply them (`coefficients`), their sum (`step_time`) or which batch there is.
The same basis is used to fit and to predict, so that a coefficient means one thing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from perfmodel import memory
from perfmodel.attention import AttentionLayers
from perfmodel.errors import ConfigError
from perfmodel.hardware import Hardware, NumberFormat
from perfmodel.memory import EngineShape

# Bytes of an activation: BF16 between kernels whatever the weights are.
_ACTIVATION_BYTES = 2

# Bytes per activation element of an expert exchange: FP8 out, BF16 back (DeepSeek-V3's own deployment).
_EXCHANGE_BYTES = 3

# Launches on a fabric between nodes take about four times as long as inside of one (NCCL on InfiniBand against NVLink).
_SCALEOUT_LATENCY_RATIO = 4.0

# Overheads are coefficients in microseconds.
_MICROSECOND = 1e-6


class Term(StrEnum):
    """What a step spends its time on. Ratios multiply a physical minimum; overheads are in microseconds each.

    COMPUTE_*: matrix products by the format they run in; COMPUTE_EXPERTS: routed experts, any format. WEIGHT_READ,
    EXPERT_READ: bytes over bandwidth. KV_READ: attention of decodes, the larger of bytes over bandwidth and FLOPs over
    peak. ALLREDUCE_*, EXCHANGE_*: tensor and expert parallel collectives, volume over the link and launches. LAYER,
    MOE_LAYER, LINEAR_LAYER, STEP: per layer and step; SEQUENCE: per sequence. PREFILL_*: only in steps that hold a
    prompt: attention FLOPs, and launches outside of graphs per layer and per expert layer, as far as the decodes beside
    the prompt feel them.
    """

    COMPUTE_BF16 = "compute_bf16"
    COMPUTE_FP8 = "compute_fp8"
    COMPUTE_FP4 = "compute_fp4"
    COMPUTE_EXPERTS = "compute_experts"
    WEIGHT_READ = "weight_read"
    EXPERT_READ = "expert_read"
    KV_READ = "kv_read"
    ALLREDUCE_VOLUME = "allreduce_volume"
    ALLREDUCE_LATENCY = "allreduce_latency_us"
    EXCHANGE_VOLUME = "exchange_volume"
    EXCHANGE_LATENCY = "exchange_latency_us"
    LAYER = "layer_us"
    MOE_LAYER = "moe_layer_us"
    LINEAR_LAYER = "linear_layer_us"
    STEP = "step_us"
    SEQUENCE = "sequence_us"
    PREFILL_ATTENTION = "prefill_attention"
    PREFILL_LAYER = "prefill_layer_us"
    PREFILL_MOE_LAYER = "prefill_moe_layer_us"


TERMS: tuple[Term, ...] = tuple(Term)

# Place of each term in a basis vector.
INDEX: dict[Term, int] = {term: place for place, term in enumerate(TERMS)}


class FormatClass(StrEnum):
    """How weights are read: natively by their width, or narrow and widened on the way (weight-only kernels)."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    WEIGHT_ONLY = "weight_only"


def format_class(hardware: Hardware, weights: NumberFormat) -> FormatClass:
    """The class of these weights on this device: INT4 anywhere, and FP4 without FP4 units, are weight-only."""
    if weights is NumberFormat.INT4 or (weights is NumberFormat.FP4 and hardware.fp4_flop_per_s is None):
        return FormatClass.WEIGHT_ONLY
    return {
        NumberFormat.BF16: FormatClass.BF16,
        NumberFormat.FP8: FormatClass.FP8,
        NumberFormat.INT8: FormatClass.FP8,
    }.get(weights, FormatClass.FP4)


def compute_format(hardware: Hardware, weights: NumberFormat) -> NumberFormat:
    """The format that products with these weights run in on this device."""
    if format_class(hardware, weights) is FormatClass.WEIGHT_ONLY:
        return NumberFormat.BF16
    if weights is NumberFormat.INT8 and hardware.int8_flop_per_s is not None:
        return NumberFormat.INT8
    if weights in (NumberFormat.FP8, NumberFormat.INT8):
        return NumberFormat.FP8 if hardware.fp8_flop_per_s is not None else NumberFormat.BF16
    return weights


def dense_format(shape: EngineShape) -> NumberFormat:
    """Format of attention matrices: expert models in four bits keep them in BF16 (NVIDIA's, OpenAI's, Moonshot's)."""
    narrow = shape.weight_format in (NumberFormat.FP4, NumberFormat.INT4)
    if narrow and shape.architecture.moe_layer_count:
        return NumberFormat.BF16
    return shape.weight_format


def across_nodes(hardware: Hardware, device_count: int) -> Hardware:
    """The device as a group of `device_count` sees it: the scale-out link where it leaves the scale-up domain."""
    domain = hardware.scaleup_device_count
    if domain <= 1 or device_count <= domain:
        return hardware
    return replace(
        hardware,
        scaleup_device_count=device_count,
        scaleup_bytes_per_s=hardware.scaleout_bytes_per_s or hardware.host_link_bytes_per_s,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """One step's work in an engine of one shape, as real numbers (averages over steps are work too).

    `mixed_ratio` of the steps hold prompts; `prefill_tokens`, `prefill_pairs` and `prefill_count` are means over all
    steps. `decode_context_tokens` is the mean context of one decoding sequence. Counts are of the whole engine.
    """

    decode_count: float = 0.0
    decode_context_tokens: float = 0.0
    prefill_count: float = 0.0
    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    prefill_context_tokens: float = 0.0
    mixed_ratio: float = 1.0


class StepBasis:
    """Seconds at coefficient 1 of each term for one engine shape. Raises ConfigError without a compute figure.

    With pipeline stages the work is divided among as many micro-batches: what a token waits for is every stage once.
    With attention data parallelism work is spread evenly over the groups.
    """

    def __init__(self, shape: EngineShape, *, spans_nodes: bool = False) -> None:
        self.shape = shape
        architecture, hardware = shape.architecture, shape.hardware
        bf16 = hardware.flop_per_s(NumberFormat.BF16) or hardware.flop_per_s(NumberFormat.FP8)
        if bf16 is None:
            raise ConfigError(f"device {hardware.name}: no compute figure is known; it may decode, its bound unknown")
        self._bf16_flop_per_s = bf16
        self._groups = shape.data_parallel_count
        self._tensor = shape.tensor_parallel_count
        self._devices = self._tensor * self._groups
        self._stages = shape.pipeline_parallel_count
        self._bandwidth = hardware.memory_bytes_per_s
        dense = dense_format(shape)
        attention = min(architecture.attention_parameter_count, architecture.linear_parameter_count)
        other = architecture.linear_parameter_count - attention
        self._products = (
            self._product(attention / self._devices, dense, 1.0, expert=False),
            self._product(other / self._devices, self._other_format, 1.0, expert=False),
            self._product(
                architecture.moe_layer_count * architecture.experts_active * architecture.expert_parameter_count
                / self._devices,
                shape.weight_format,
                architecture.experts_total / max(architecture.experts_active, 1),
                expert=True,
            ),
        )  # fmt: skip
        head = architecture.embedding_parameter_count
        self._head_flop_s = 2 * head / self._devices / bf16
        read = attention * dense.element_bytes + other * self._other_format.element_bytes
        self._weight_read_s = (read + head * NumberFormat.BF16.element_bytes) / self._tensor / self._bandwidth
        expert_bytes = architecture.expert_parameter_count * shape.weight_format.element_bytes
        self._expert_read_s = architecture.moe_layer_count * expert_bytes / self._devices / self._bandwidth
        self._links(spans_nodes=spans_nodes)

    @property
    def _other_format(self) -> NumberFormat:
        """Format of dense feed-forward matrices and shared experts."""
        shape = self.shape
        return shape.dense_format if shape.architecture.dense_format else shape.weight_format

    def _ridge(self, flop_per_s: float, weights: NumberFormat) -> float:
        """Tokens above which products with these weights take longer than reading them."""
        return flop_per_s * weights.element_bytes / (2 * self._bandwidth)

    def _product(
        self, parameters: float, weights: NumberFormat, spread: float, *, expert: bool
    ) -> tuple[int, float, float]:
        """(term, seconds per token, ridge in tokens) of matrix products; an expert sees one token in `spread`."""
        hardware = self.shape.hardware
        runs_in = compute_format(hardware, weights)
        peak = hardware.flop_per_s(runs_in) or self._bf16_flop_per_s
        term = {
            NumberFormat.BF16: Term.COMPUTE_BF16,
            NumberFormat.FP8: Term.COMPUTE_FP8,
            NumberFormat.INT8: Term.COMPUTE_FP8,
        }.get(runs_in, Term.COMPUTE_FP4)
        place = INDEX[Term.COMPUTE_EXPERTS if expert else term]
        return place, 2 * parameters / peak, self._ridge(peak, weights) * spread

    def _links(self, *, spans_nodes: bool) -> None:
        """Seconds per token and per step of the collectives."""
        architecture, hardware = self.shape.architecture, self.shape.hardware
        link = hardware.scaleup_bytes_per_s or hardware.host_link_bytes_per_s or hardware.scaleout_bytes_per_s
        self._allreduce_token_s = self._allreduce_s = self._exchange_token_s = self._exchange_s = 0.0
        if link is None:
            link = _UNKNOWN_LINK_BYTES_PER_S
        if hardware.vendor == "amd" and 1 < self._tensor < hardware.scaleup_device_count:
            # A full mesh: a group uses only the links between its members.
            link *= (self._tensor - 1) / (hardware.scaleup_device_count - 1)
        slow = _SCALEOUT_LATENCY_RATIO if spans_nodes else 1.0
        exchanges = self._groups > 1 and architecture.moe_layer_count > 0
        if self._tensor > 1:
            ranks = self._tensor
            # Expert exchange replaces the second all-reduce of a layer.
            reduces = architecture.layer_count * (1 if exchanges and self.shape.expert_parallel_count > 1 else 2)
            volume = 2 * (ranks - 1) / ranks * architecture.hidden_size * _ACTIVATION_BYTES
            self._allreduce_token_s = reduces * volume / link / self._groups
            self._allreduce_s = reduces * math.log2(ranks) * slow * _MICROSECOND
        if exchanges:
            layers = architecture.moe_layer_count
            copies = min(architecture.experts_active, self._devices - 1)
            volume = architecture.hidden_size * _EXCHANGE_BYTES * copies
            self._exchange_token_s = layers * volume / min(self._tensor, 8) / link / self._groups
            self._exchange_s = layers * math.log2(self._devices) * _MICROSECOND

    def of(self, work: Work) -> NDArray[np.float64]:
        """Seconds at coefficient 1, one entry per term of `TERMS`, of a mean step of this work."""
        basis = np.zeros(len(TERMS))
        stages = self._stages
        decode, prefill = work.decode_count / stages, work.prefill_tokens / stages
        mixed = work.mixed_ratio if prefill > 0 else 0.0
        if prefill > 0:
            prefill = max(prefill, _TINY)
            mixed = min(max(mixed, _TINY), 1.0)
        for share, tokens in ((1 - mixed, decode), (mixed, decode + (prefill / mixed if mixed else 0.0))):
            if share > 0 and (tokens > 0 or mixed == 0):
                self._add_tokens(basis, max(tokens, 1.0), share)
        self._add_cache(basis, work)
        self._add_fixed(basis, work, mixed)
        return basis

    def _add_tokens(self, basis: NDArray[np.float64], tokens: float, share: float) -> None:
        """What depends on the tokens of a step only, for a share of the steps."""
        for place, token_s, ridge in self._products:
            basis[place] += share * tokens * token_s * tokens / (tokens + ridge)
        basis[INDEX[Term.WEIGHT_READ]] += share * self._weight_read_s
        basis[INDEX[Term.EXPERT_READ]] += share * self._expert_read_s * self.shape.architecture.experts_hit(tokens)
        basis[INDEX[Term.ALLREDUCE_VOLUME]] += share * tokens * self._allreduce_token_s
        basis[INDEX[Term.ALLREDUCE_LATENCY]] += share * self._allreduce_s
        basis[INDEX[Term.EXCHANGE_VOLUME]] += share * tokens * self._exchange_token_s
        basis[INDEX[Term.EXCHANGE_LATENCY]] += share * self._exchange_s

    def _add_cache(self, basis: NDArray[np.float64], work: Work) -> None:
        """KV read by decodes, re-read by chunks on a context, and the attention FLOPs of prompts."""
        shape, stages = self.shape, self._stages
        per_device = 1 / (self._groups * self._tensor * self._bandwidth * stages)
        if work.decode_count > 0:
            basis[INDEX[Term.KV_READ]] += max(self._decode_attention_s(work))
        if work.prefill_context_tokens > 0:
            basis[INDEX[Term.KV_READ]] += work.prefill_context_tokens * memory.kv_bytes_per_token(shape) * per_device
        if work.prefill_tokens > 0 and work.prefill_pairs > 0:
            seen = work.prefill_pairs / work.prefill_tokens
            flop = work.prefill_tokens * sum(_pair_flop(group, seen) for group in shape.architecture.attention)
            flop_s = flop / (self._groups * self._tensor * stages) / self._bf16_flop_per_s
            basis[INDEX[Term.PREFILL_ATTENTION]] += flop_s

    def _decode_attention_s(self, work: Work) -> tuple[float, float]:
        """Seconds of the decodes' attention: its cache over the bandwidth, its FLOPs over the peak.

        One latent (MLA) serves all heads of a rank: 128 of them make about 240 FLOPs of each byte in BF16, as many as a
        device can do while it reads one, and twice that of a byte in FP8. With attention data parallelism compute
        therefore binds, while grouped heads (8 to 16 FLOPs a byte) never come near.
        """
        shape = self.shape
        context = max(1, round(work.decode_context_tokens))
        devices = self._groups * self._tensor * self._stages
        read = memory.decode_read_bytes(shape, context)
        flop = shape.architecture.decode_attention_flop(context)
        each = work.decode_count / devices
        return each * read / self._bandwidth, each * flop / self._bf16_flop_per_s

    def _add_fixed(self, basis: NDArray[np.float64], work: Work, mixed: float) -> None:
        """Overheads per layer, step, sequence and prompt; the output head."""
        architecture, stages = self.shape.architecture, self._stages
        sequences = (work.decode_count + work.prefill_count) / self._groups / stages
        logits = (work.decode_count + work.prefill_count) / stages
        basis[INDEX[Term.COMPUTE_BF16]] += logits * self._head_flop_s
        for term, count in (
            (Term.LAYER, architecture.layer_count),
            (Term.MOE_LAYER, architecture.moe_layer_count),
            (Term.LINEAR_LAYER, self._linear_layers),
            (Term.STEP, stages),
            (Term.SEQUENCE, sequences),
            (Term.PREFILL_LAYER, mixed * architecture.layer_count),
            (Term.PREFILL_MOE_LAYER, mixed * architecture.moe_layer_count),
        ):
            basis[INDEX[term]] += count * _MICROSECOND

    def by_tokens(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """What depends on the tokens of a step alone: (len(tokens), terms) seconds at coefficient 1; whole steps."""
        counts = np.maximum(tokens / self._stages, 1.0)
        basis = np.zeros((len(counts), len(TERMS)))
        for place, token_s, ridge in self._products:
            basis[:, place] += counts * token_s * counts / (counts + ridge)
        architecture = self.shape.architecture
        hit = np.zeros(len(counts))
        if architecture.experts_total:
            miss = 1 - architecture.experts_active / architecture.experts_total
            hit = architecture.experts_total * (1 - miss**counts)
        columns = (
            (Term.WEIGHT_READ, self._weight_read_s),
            (Term.EXPERT_READ, self._expert_read_s * hit),
            (Term.ALLREDUCE_VOLUME, counts * self._allreduce_token_s),
            (Term.ALLREDUCE_LATENCY, self._allreduce_s),
            (Term.EXCHANGE_VOLUME, counts * self._exchange_token_s),
            (Term.EXCHANGE_LATENCY, self._exchange_s),
            (Term.LAYER, architecture.layer_count * _MICROSECOND),
            (Term.MOE_LAYER, architecture.moe_layer_count * _MICROSECOND),
            (Term.LINEAR_LAYER, self._linear_layers * _MICROSECOND),
            (Term.STEP, self._stages * _MICROSECOND),
        )
        for term, seconds in columns:
            basis[:, INDEX[term]] += seconds
        return basis

    def token_floor_s(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """`floor_s` of steps of so many tokens without any cache."""
        counts = np.maximum(tokens / self._stages, 1.0)
        basis = self.by_tokens(tokens)
        read = basis[:, INDEX[Term.WEIGHT_READ]] + basis[:, INDEX[Term.EXPERT_READ]]
        compute = counts * sum(token_s for _, token_s, _ in self._products)
        return np.maximum(read, compute)

    @property
    def _linear_layers(self) -> int:
        return sum(group.count for group in self.shape.architecture.attention if group.state_bytes)

    def floor_s(self, work: Work) -> float:
        """Seconds below which physics does not let this work: bytes over peak bandwidth, or FLOPs over peak compute."""
        basis = self.of(work)
        stages = self._stages
        read = basis[INDEX[Term.WEIGHT_READ]] + basis[INDEX[Term.EXPERT_READ]] + basis[INDEX[Term.KV_READ]]
        attention_s = 0.0
        if work.decode_count > 0:
            read_s, attention_s = self._decode_attention_s(work)
            read += read_s - max(read_s, attention_s)
        tokens = max(1.0, (work.decode_count + work.prefill_tokens) / stages)
        compute = sum(tokens * token_s for _, token_s, _ in self._products)
        compute += basis[INDEX[Term.PREFILL_ATTENTION]] + attention_s
        return float(max(read, compute))


def _pair_flop(group: AttentionLayers, seen_tokens: float) -> float:
    """Attention FLOPs per prompt token that sees this many tokens on average, in all layers of the group."""
    if group.window_tokens is not None:
        seen_tokens = min(seen_tokens, group.window_tokens)
    attention = seen_tokens / group.entry_tokens * group.prefill_pair_flop
    if group.top_k_count is not None:
        attention = min(attention, group.top_k_count * group.decode_pair_flop)
    index = seen_tokens / group.entry_tokens * group.index_pair_flop
    return group.count * (attention + index + group.state_flop_per_token)


# Stands for a link that no source gives: PCIe 4.0 x16, the slowest a current server has. Rows that use it say so.
_UNKNOWN_LINK_BYTES_PER_S = 32e9

# Below this share or count a division would lose precision.
_TINY = 1e-9
