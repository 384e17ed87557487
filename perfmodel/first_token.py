"""The first token of a benchmark's requests: its clients replayed against the calibrated step times.

Owns: how a configuration becomes the engine and the clients of a replay (scheduler limits, room, front end, launches of
a prompt step), and the mean TTFT that comes out. Does not own: the replay (`harness`), time per token (`steady`), or
the coefficients it reads (`coefficients.FirstToken`).
A step with a prompt in it is launched kernel by kernel, while the device works: the launches here are their own
coefficients, per layer, expert layer and latent-attention layer, with a factor per engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from perfmodel import memory
from perfmodel.attention import AttentionKind
from perfmodel.coefficients import Coefficients, FirstToken
from perfmodel.configuration import QUEUED, Configuration, Pool, Scenario
from perfmodel.disaggregation import SplitEngine
from perfmodel.harness import OPEN_LOOP_REQUESTS, REQUESTS_PER_CLIENT, ArrivalLaw, HarnessScenario, replay, replay_split
from perfmodel.serving import FrontEnd, LengthLaw, SchedulingOrder, Served, ServingEngine
from perfmodel.steady import CHUNK_TOKENS, cache_tokens, most_sequences, scheduling_order
from perfmodel.step_time import BatchShape, StepModel, StepTable

# Share of an answer's KV that admission sets aside: TensorRT-LLM all of it, SGLang's estimate starts near 0.3.
_RESERVE_RATIOS = {"trtllm": 1.0, "sglang": 0.3}

# Sequences that an engine runs at most.
_MOST_SEQUENCES = 1_024

# Decode slots of TensorRT-LLM's disaggregated tensor-parallel workers are a power of two from this batch size on: the
# sizes of its graphs. Workers with attention data parallelism take what their clients need.
_ROUNDED_SLOTS = 6

# Requests of a replay: enough for waves to settle, as many as the harness replays at most: with fewer than ten a client
# the burst at the start would weigh too much.
_MOST_REPLAYED = 65_536

# Requests of an open loop: TensorRT-LLM's tables send 512, vLLM's `benchmark_serving` 1,000 unless told otherwise.
_OPEN_LOOP_REQUESTS = {"trtllm": 512}

# Versions of TensorRT-LLM before its PyTorch path, by half-year: a prompt step is one graph there.
_GRAPH_ERAS = frozenset({"2024a", "2024b", "2025a"})
_GRAPH_ENGINES = frozenset({"intel-gaudi-pytorch"})


class _ScaledSteps:
    """A step model whose steps last `scale` times as long."""

    def __init__(self, model: StepModel, scale: float) -> None:
        self._model = model
        self._scale = scale

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one step."""
        return self._scale * self._model.step_s(batch)

    def table(self, max_batched_tokens: int) -> StepTable:
        """The same as a table."""
        table, scale = self._model.table(max_batched_tokens), self._scale
        return StepTable(
            by_token_s=scale * table.by_token_s,
            sequence_s=scale * table.sequence_s,
            decode_context_s=scale * table.decode_context_s,
            prefill_pair_s=scale * table.prefill_pair_s,
            prefill_context_s=scale * table.prefill_context_s,
            prefill_step_s=scale * table.prefill_step_s,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """Mean seconds of an agent's turn to its first token and per further token, and the turns in flight."""

    ttft_s: float
    tpot_s: float
    in_flight: float


def first_token_s(asked: Configuration, coefficients: Coefficients, first: FirstToken, seed: int = 0) -> float:
    """Mean seconds to the first token of the requests of this configuration, its groups' factors included."""
    return replayed_run(asked, coefficients, first, seed).ttft_mean_ms / 1e3 * correction(asked, first)


def agent_turn(asked: Configuration, coefficients: Coefficients, first: FirstToken, seed: int = 0) -> Turn | None:
    """The turns of agents whose live sessions and rate are both known; None for any other load.

    By Little's law a session's turn takes sessions over rate. What the think time leaves of it is wait, prompt and
    answer, and it says how many turns are in flight. The replay of that many clients says how the time divides; no turn
    is shorter than one alone.
    """
    if not asked.paced:
        return None
    assert asked.rate_per_s is not None and asked.concurrency is not None, "what paced means"
    alone = _turn(replace(asked, concurrency=1.0, rate_per_s=None), coefficients, first, seed)
    tokens = max(asked.lengths.output_tokens - 1, 1.0)
    turn_s = max(asked.concurrency / asked.rate_per_s - first.think_s, alone.ttft_s + tokens * alone.tpot_s)
    in_flight = min(asked.concurrency, max(1.0, asked.rate_per_s * turn_s))
    together = _turn(replace(asked, concurrency=in_flight, rate_per_s=None), coefficients, first, seed)
    longer = turn_s / (together.ttft_s + tokens * together.tpot_s)
    return Turn(together.ttft_s * longer, together.tpot_s * longer, in_flight)


def _turn(asked: Configuration, coefficients: Coefficients, first: FirstToken, seed: int) -> Turn:
    run = replayed_run(asked, coefficients, first, seed)
    return Turn(run.ttft_mean_ms / 1e3, run.tpot_mean_ms / 1e3, asked.concurrency or 1.0)


def correction_keys(asked: Configuration) -> tuple[str, ...]:
    """The groups whose factors multiply a replayed TTFT: kind of load by engine, engine era, generation, family.

    None where Little's law has given the time already (`agent_turn`).
    """
    if asked.paced:
        return ()
    era = asked.group.era
    kind = "disaggregated" if asked.disaggregated else asked.scenario.value
    return (
        f"load {kind} {_engine_kind(asked)}",
        f"era {era.name}",
        f"generation {asked.group.generation}",
        f"family {asked.group.family}",
    )


def correction(asked: Configuration, first: FirstToken) -> float:
    """The product of the factors of the configuration's groups; 1 where none was fitted."""
    return math.prod(first.scale_factors.get(key, 1.0) for key in correction_keys(asked))


def replayed_run(asked: Configuration, coefficients: Coefficients, first: FirstToken, seed: int) -> Served:
    """The replay of the configuration's clients."""
    scenario = _scenario(asked)
    decode = _engine(asked.decode, asked, coefficients, first)
    if asked.prefill is None:
        return replay(decode, scenario, seed)
    prompts = asked.prefill
    if asked.group.era.engine == "trtllm" and prompts.shape.expert_parallel_count > 1:
        prompts = _spread(prompts)
    prefill = _engine(prompts, asked, coefficients, first, first.split_prefill_ratio)
    ranks = prompts.shape.data_parallel_count
    # Each rank computes prompts of its own; together they take a budget each.
    prefill = replace(
        prefill, kv_capacity_tokens=2**50, order=SchedulingOrder.WHOLE_PROMPTS,
        max_batched_tokens=max(CHUNK_TOKENS, math.ceil(asked.lengths.input_tokens * 1.25)) * ranks,
    )  # fmt: skip
    decode = replace(
        decode,
        max_sequence_count=_decode_slots(asked),
        order=SchedulingOrder.DECODE_FIRST,
        reserve_ratio=1.0,
        front_end=FrontEnd(),
    )
    split = SplitEngine(prefill=prefill, decode=decode, handover_s=first.handover_us * 1e-6, prefill_rank_count=ranks)
    return replay_split(split, scenario, seed)


def _spread(pool: Pool) -> Pool:
    """TensorRT-LLM prefill workers printed as tensor parallel with expert parallelism run attention data parallel."""
    shape = pool.shape
    count = shape.tensor_parallel_count * shape.data_parallel_count
    return replace(pool, shape=replace(shape, tensor_parallel_count=1, data_parallel_count=count))


def _decode_slots(asked: Configuration) -> int:
    """Sequences that one decode worker takes: what the clients need, as the layout was made for them."""
    share = max(1.0, (asked.concurrency or _MOST_SEQUENCES) / max(asked.decode.replicas, 1.0))
    ranks = asked.decode.shape.data_parallel_count
    each = math.ceil(share / ranks)
    if asked.group.era.engine == "trtllm" and ranks == 1 and each >= _ROUNDED_SLOTS:
        each = 2 ** int(math.log2(each))
    return max(1, each * ranks)


def _engine_kind(asked: Configuration) -> str:
    """The engine as launches tell it apart."""
    era = asked.group.era
    if era.engine in _GRAPH_ENGINES or (era.engine == "trtllm" and era.half in _GRAPH_ERAS):
        return "graph"
    return era.engine


def _launch_s(shape: memory.EngineShape, engine: str, first: FirstToken) -> float:
    """Seconds of launches of one step that holds a prompt."""
    architecture = shape.architecture
    latent = sum(
        group.count
        for group in architecture.attention
        if group.kind is AttentionKind.FULL and group.decode_pair_flop > group.prefill_pair_flop
    )
    once_us = (
        architecture.layer_count * first.layer_us
        + architecture.moe_layer_count * first.moe_layer_us
        + latent * first.latent_layer_us
    )
    return once_us * first.launch_factors.get(engine, 1.0) * 1e-6


def _engine(
    pool: Pool, asked: Configuration, coefficients: Coefficients, first: FirstToken, scale: float = 1.0
) -> ServingEngine:
    """A pool as the replay takes it."""
    era, shape = asked.group.era, pool.shape
    kind = _engine_kind(asked)
    model = StepModel(shape, coefficients, era.engine, era.half, spans_nodes=pool.spans_nodes)
    order = scheduling_order(era.engine)
    ranks = shape.data_parallel_count
    budget = CHUNK_TOKENS * ranks
    request_s = first.request_us * first.request_factors.get(kind, 1.0) * 1e-6
    if era.engine == "trtllm" and ranks > 1 and not asked.disaggregated:
        batch = max(1, round((asked.concurrency or 1) / max(asked.decode.replicas, 1.0)))
        context = round(asked.lengths.input_tokens + asked.lengths.output_tokens / 2)
        step_s = model.step_s(BatchShape(decode_count=batch, decode_context_tokens=batch * context))
        request_s += first.exchange_wait_steps * step_s
    once = asked.scenario in (Scenario.STATIC_BATCH, Scenario.FIRST_TOKEN, Scenario.SINGLE_USER)
    most = max(1.0, asked.concurrency or _MOST_SEQUENCES)
    return ServingEngine(
        step=_ScaledSteps(model, scale),
        launch_s=_launch_s(shape, kind, first) * scale,
        kv_capacity_tokens=2**50 if once else cache_tokens(pool, asked.lengths, era.engine),
        max_batched_tokens=2**30 if once else budget,
        max_sequence_count=round(max(most, 1)) if once else most_sequences(asked) or _MOST_SEQUENCES,
        replicas=max(1, min(round(pool.replicas), round(most))),
        order=SchedulingOrder.WHOLE_PROMPTS if once else order,
        reserve_ratio=0.0 if once else _RESERVE_RATIOS.get(era.engine, 0.0),
        front_end=FrontEnd() if once else FrontEnd(request_s, first.prompt_token_us * 1e-6),
    )


def _scenario(asked: Configuration) -> HarnessScenario:
    """What the clients of this scenario do."""
    lengths, concurrency = asked.lengths, asked.concurrency
    closed = asked.scenario is Scenario.CLOSED_LOOP
    if closed and lengths.law is LengthLaw.FIXED and asked.group.era.engine != "sglang":
        # Runs whose table gives one length desynchronise in engines that mix prompts and decodes.
        lengths = replace(lengths, law=LengthLaw.UNIFORM_08_10)
    if concurrency is not None and asked.scenario not in QUEUED:
        clients = max(1, round(concurrency))
        once = asked.scenario in (Scenario.STATIC_BATCH, Scenario.FIRST_TOKEN, Scenario.SINGLE_USER)
        sent = REQUESTS_PER_CLIENT * clients if asked.slot_count is None else REQUESTS_PER_CLIENT * asked.slot_count
        count = clients if once else min(sent, max(_MOST_REPLAYED, 2 * clients))
        return HarnessScenario(lengths, concurrency=clients, request_count=count)
    sent = _OPEN_LOOP_REQUESTS.get(asked.group.era.engine, OPEN_LOOP_REQUESTS)
    if asked.scenario in QUEUED or asked.rate_per_s is None:
        count = max(1, round(concurrency)) if concurrency is not None else sent
        return HarnessScenario(lengths, ArrivalLaw.OPEN_LOOP, request_count=min(count, _MOST_REPLAYED))
    return HarnessScenario(lengths, ArrivalLaw.OPEN_LOOP, rate_per_s=asked.rate_per_s, request_count=sent)
