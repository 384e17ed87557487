"""The mean step between two tokens of a request, in closed form: what TPOT is made of.

Owns: how many sequences decode together (concurrency, Little's law, KV room, or the decode pool of a split), how much
prefill work of others falls between two of a request's tokens, and the basis of that mean step. Does not own: the
coefficients or the queue before the first token (`harness`).
With B sequences decoding and each finished one replaced, a request sees the prompts of the others that started after
it once in its answer: n prompts over `output_tokens` steps, where n is B - 1 for lengths that vary; B - g for equal
lengths, g prompts sharing a chunk and so a first token; and half of that in an engine that runs prompts alone, whose
equal requests stay in lockstep (prompt i waits for the B - i after it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel import memory
from perfmodel.configuration import QUEUED, Configuration, Pool, Scenario
from perfmodel.serving import LengthLaw, Lengths, SchedulingOrder
from perfmodel.step_terms import StepBasis, Work

# Share of the memory that engines give to weights and cache, and what runtime and activations take of each device
# (slot waits of Llama 70B, Qwen3-32B and MiniMax rows are then hit within 10 to 30 %).
_UTILISATION_RATIO = 0.92
_RUNTIME_BYTES = 5e9

# The same for SGLang, whose `mem_fraction_static` holds back 1.5 MiB per token of a chunk and the graphs' buffers.
_SGLANG_RUNTIME_BYTES = 11e9

# Share of the memory that a cache has at least where weights leave less: the settings were raised, for the row says
# that it ran (DeepSeek-R1 in FP8 on four B200 serves 32 prompts of 8,192). SGLang's own rule holds until nothing is
# left (Qwen3-32B in BF16 on one H100 runs five of sixteen clients).
_LEAST_CACHE_RATIO = 0.05

# SGLang splits the memory left after the weights of a hybrid model between a pool of recurrent states and the KV cache,
# 0.9 to 1 by default, once at startup (`--mamba-full-memory-ratio`; docs.sglang.io, "Hybrid model memory").
_SGLANG_STATE_RATIO = 0.9

# Share of its answer that a sequence has on average when the cache is full.
_HELD_ANSWER_RATIO = 0.6

# Tokens that a step computes at most (vLLM's, SGLang's and TensorRT-LLM's defaults on large GPUs are 8,192).
CHUNK_TOKENS = 8_192

# Sequences at which engines stop by default (vLLM: 1,024 on large GPUs; TensorRT-LLM: 2,048) where no concurrency says.
_MOST_SEQUENCES = 2_048.0
_QUEUED_SEQUENCES = 1_024.0

# vLLM before its V1 engine ran 256 sequences at most unless told otherwise (`max_num_seqs`); MLPerf submitters do tell.
_V0_SEQUENCES = 256
_V0_HALVES = frozenset({"2023a", "2023b", "2024a", "2024b"})
_SERVED = frozenset({Scenario.CLOSED_LOOP, Scenario.OPEN_LOOP})

# Offered load is served in this many rounds of successive approximation.
_ROUNDS = 12


def scheduling_order(engine: str) -> SchedulingOrder:
    """Who gets a step's tokens first in this engine."""
    return {
        "sglang": SchedulingOrder.PREFILL_FIRST,
        "trtllm": SchedulingOrder.WHOLE_PROMPTS,
    }.get(engine, SchedulingOrder.DECODE_FIRST)


def most_sequences(asked: Configuration) -> int | None:
    """Sequences that one engine runs at once: as it was started, else by its default; None where none is known."""
    if asked.slot_count is not None:
        return asked.slot_count
    era = asked.group.era
    early = era.engine == "vllm" and era.half in _V0_HALVES
    return _V0_SEQUENCES if early and asked.scenario in _SERVED else None


@dataclass(frozen=True, slots=True)
class MeanStep:
    """The mean step: its work and its basis (`step_terms.TERMS`), for `batch` sequences per replica."""

    work: Work
    basis: NDArray[np.float64]
    batch: float


class Steady:
    """One configuration's steady state. Everything that does not depend on the speed is worked out once."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.decode = StepBasis(configuration.decode.shape, spans_nodes=configuration.decode.spans_nodes)
        self.room_sequences = room_sequences(
            configuration.decode, configuration.lengths, configuration.group.era.engine
        )

    def batch(self, tpot_s: float) -> float:
        """Sequences that decode together in one replica when a token takes `tpot_s`; at least 1."""
        asked = self.configuration
        replicas = asked.decode.replicas
        if asked.concurrency is not None and asked.scenario not in QUEUED:
            wanted = asked.concurrency / replicas
        elif asked.concurrency is not None:
            wanted = min(asked.concurrency / replicas, _MOST_SEQUENCES)
        elif asked.rate_per_s is not None and asked.scenario not in QUEUED:
            wanted = min(asked.rate_per_s / replicas * asked.lengths.output_tokens * tpot_s, _MOST_SEQUENCES)
        else:
            wanted = _QUEUED_SEQUENCES
        return max(1.0, min(wanted, self.room_sequences, most_sequences(asked) or math.inf))

    def interfering_prompts(self, batch: float) -> float:
        """Prompts of others that a request waits for between its first and its last token."""
        asked = self.configuration
        if asked.disaggregated:
            return 0.0
        lengths = asked.lengths
        varied = lengths.law is not LengthLaw.FIXED or asked.scenario in (Scenario.AGENTIC, Scenario.OPEN_LOOP)
        if varied or asked.concurrency is None:
            return max(batch - 1, 0.0)
        shared = max(1.0, min(batch, CHUNK_TOKENS / max(lengths.input_tokens, 1.0)))
        waiting = max(batch - shared, 0.0)
        if scheduling_order(asked.group.era.engine) is SchedulingOrder.PREFILL_FIRST:
            return waiting / 2
        return waiting

    def mean_step(self, tpot_s: float) -> MeanStep:
        """The mean step at the batch that this speed leads to."""
        return self.mean_step_of(self.batch(tpot_s))

    def mean_step_of(self, batch: float) -> MeanStep:
        """The mean step of `batch` sequences per replica."""
        lengths = self.configuration.lengths
        static = self.configuration.scenario is Scenario.STATIC_BATCH
        prompts = 0.0 if static else self.interfering_prompts(batch) / lengths.output_tokens
        new_tokens = lengths.input_tokens * (1 - lengths.cached_ratio)
        context = lengths.input_tokens + lengths.output_tokens / 2
        cached = lengths.input_tokens * lengths.cached_ratio
        tokens = prompts * new_tokens
        work = Work(
            decode_count=batch,
            decode_context_tokens=context,
            prefill_count=prompts,
            prefill_tokens=tokens,
            prefill_pairs=tokens * (cached + new_tokens / 2),
            mixed_ratio=min(1.0, prompts * math.ceil(max(new_tokens, 1.0) / CHUNK_TOKENS)),
        )
        return MeanStep(work, self.decode.of(work), batch)


def room_sequences(pool: Pool, lengths: Lengths, engine: str = "") -> float:
    """Sequences of this load that one replica's KV cache holds; at least 1, for it is said to have run."""
    held = lengths.input_tokens + _HELD_ANSWER_RATIO * lengths.output_tokens
    return max(1.0, cache_tokens(pool, lengths, engine) / held)


def cache_tokens(pool: Pool, lengths: Lengths, engine: str = "") -> int:
    """Tokens that one replica's cache holds, at the mean length of this load and in this engine."""
    shape = pool.shape
    size, sglang = shape.hardware.memory_bytes, engine == "sglang"
    free = _UTILISATION_RATIO * size - memory.fullest_device_weight_bytes(shape)
    free -= _SGLANG_RUNTIME_BYTES if sglang else _RUNTIME_BYTES
    if free <= 0 or not sglang:
        free = max(free, _LEAST_CACHE_RATIO * size)
    context = max(1, round(lengths.input_tokens + _HELD_ANSWER_RATIO * lengths.output_tokens))
    held = memory.kv_bytes(shape, context)
    if sglang and shape.architecture.linear_state_bytes:
        free /= 1 + _SGLANG_STATE_RATIO
        held -= shape.architecture.linear_state_bytes
    one = held / (shape.tensor_parallel_count * shape.pipeline_parallel_count) / context
    return int(max(1.0, min(shape.data_parallel_count * free / max(one, 1e-6), 2.0**50)))


def settle(steady: Steady, seconds: NDArray[np.float64], start_s: float = 0.03) -> tuple[MeanStep, float]:
    """The mean step and its seconds at which batch and speed agree, for the multipliers `seconds` of the terms.

    Only where a rate is given does the batch depend on the speed; the geometric mean of successive answers converges
    below saturation and stops at the room above it.
    """
    tpot_s = start_s
    step = steady.mean_step(tpot_s)
    for _ in range(_ROUNDS):
        answer = float(step.basis @ seconds)
        if abs(answer / tpot_s - 1) < 1e-3:
            break
        tpot_s = math.sqrt(tpot_s * answer)
        following = steady.batch(tpot_s)
        # The room may cap both batches while the speed still falls: only the speed says that it is over.
        if following != step.batch:
            step = steady.mean_step_of(following)
    return step, float(step.basis @ seconds)
