"""One simulated engine: continuous batching over a KV block pool, as a state machine that is told the time.

Owns: which sequence runs in which step, chunked prefill, preemption, the answers' tokens, the counters by vLLM's
meaning. Does not own: how long a step takes (a `StepTiming` is injected), block contents (`kv_cache`), HTTP, clocks or
waiting (`adapters.engine_server` sleeps until `StepOutcome.ends_at_s`; an offline run just passes that time back in).

The rules are vLLM v1's FCFS scheduler with chunked prefill, so that its KV events come out in the recorded order:
  * a step has a token budget; running sequences are served first in order of admission, so decodes never wait for a new
    prompt; then waiting ones are admitted in order while the budget and `max_sequence_count` allow;
  * a waiting sequence is admitted only if all its present tokens fit in free blocks (vLLM's
    scheduler_reserve_full_isl);
  * when a running sequence cannot grow, the youngest running one is preempted: it loses its blocks, goes to the head of
    the queue and is computed again from its first token (its old blocks may still be cached);
  * full blocks are published when their last token is scheduled, so a second choice of the same step already shares
    them;
  * what the lower tier has of a prompt comes back over one link, one restore after another, also when its sequence is
    aborted or preempted; it and whoever shares the blocks hold their places and compute nothing until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, inf
from typing import Protocol

import numpy as np

from perfmodel.errors import ConfigError, RequestError
from perfmodel.kv_cache import BlockHashChain, BlockPool, BlockTable, KvEvent
from perfmodel.step_time import BatchShape
from perfmodel.workload import TOKEN_BYTES, Answer, OutputLaw, SimRequest, token_bytes


class StepTiming(Protocol):
    """How long one step of the engine takes."""

    def step_s(self, batch: BatchShape) -> float:
        """Seconds of one forward pass over `batch`."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Block 0 is reserved, so `block_count - 1` blocks are usable.

    `max_batched_tokens` and `max_sequence_count` are vLLM's max_num_batched_tokens and max_num_seqs (its defaults for
    an H100 server); `max_waiting_count` bounds the queue in sequences (a request of n choices is n sequences).
    `tier_block_count` blocks of a lower KV tier take what is evicted and give it back at `restore_s_per_block`. Steps
    take `slow_ratio` times what the model says, and log-normal noise with this standard deviation: what no router sees.
    """

    block_count: int
    block_size_tokens: int = 16
    max_batched_tokens: int = 8192
    max_sequence_count: int = 256
    max_waiting_count: int = 4096
    tier_block_count: int = 0
    restore_s_per_block: float = 0.0
    slow_ratio: float = 1.0
    noise_ratio: float = 0.0
    seed: int = 0
    output_law: OutputLaw = field(default_factory=OutputLaw)
    prefix_caching: bool = True
    record_kv_events: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batched_tokens", "max_sequence_count", "max_waiting_count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.tier_block_count < 0:
            raise ConfigError(f"tier_block_count is {self.tier_block_count}; expected 0 or more")
        if self.tier_block_count and not 0 < self.restore_s_per_block < inf:
            raise ConfigError(f"restore_s_per_block is {self.restore_s_per_block}; expected above 0 with a lower tier")
        if not 0.001 <= self.slow_ratio <= 1000:  # beyond, times leave what a clock can count
            raise ConfigError(f"slow_ratio is {self.slow_ratio}; expected 0.001 to 1000")
        if not 0 <= self.noise_ratio <= 1:
            raise ConfigError(f"noise_ratio is {self.noise_ratio}; expected 0 to 1")


class SubmitOutcome(StrEnum):
    """What became of a submitted request. Only ACCEPTED ones are heard of again."""

    ACCEPTED = "accepted"
    QUEUE_FULL = "queue_full"  # come back later
    NEVER_FITS = "never_fits"  # prompt + max_tokens need more blocks than the engine has


class FinishReason(StrEnum):
    """Why a choice ended. The values are those of vLLM's `finished_reason` label."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice's whole story, given exactly once. Times are on the caller's clock; None means it never got there.

    vLLM's histograms follow: queue = first_scheduled - arrived, prefill = first_token - first_scheduled,
    decode = ended - first_token, inference = ended - first_scheduled, e2e = ended - arrived. `cached_tokens` were found
    in the prefix cache when it first ran (None: it never ran); `created_cache_tokens` are the full blocks of the prompt
    that were new.
    """

    request_id: str
    choice_index: int
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    created_cache_tokens: int | None
    preemption_count: int
    arrived_at_s: float
    first_scheduled_at_s: float | None
    first_token_at_s: float | None
    ended_at_s: float


@dataclass(frozen=True, slots=True)
class ChoiceTokens:
    """What one choice produced in one step: one token, its four bytes of text, visible at the step's end.

    `waited_s` is the time since the request arrived for the first token (TTFT), since the previous token otherwise
    (ITL).
    """

    request_id: str
    choice_index: int
    position: int
    text: bytes
    waited_s: float
    cached_tokens: int
    finished: Finished | None

    @property
    def token_id(self) -> int:
        """The token's id (`workload.detokenize` turns ids back into text)."""
        return int.from_bytes(self.text, "little")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One iteration: it occupied the engine from `starts_at_s` to `ends_at_s`; its tokens may be sent at the end.

    `asleep`: nothing was computed, every sequence waits for its KV; who arrives before the end need not wait for it.
    """

    starts_at_s: float
    ends_at_s: float
    batch: BatchShape
    outputs: tuple[ChoiceTokens, ...]
    kv_events: tuple[KvEvent, ...]
    preempted_count: int
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges now and counters since the start, by the meaning of vLLM's metrics of the same names.

    Prefix cache counters are tokens of requests when they first run (a preempted request is not counted again); the
    external ones are of what the device's own cache lacked, asked of the lower tier.
    `prompt_tokens` and `cached_prompt_tokens` (of these, `restored_prompt_tokens` from the lower tier) count when a
    prompt's first token is out, `finished_counts` by reason.
    """

    running_count: int
    waiting_count: int
    kv_usage_ratio: float
    cached_block_hash_count: int
    prompt_tokens: int
    cached_prompt_tokens: int
    restored_prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries_tokens: int
    prefix_cache_hits_tokens: int
    external_queries_tokens: int
    external_hits_tokens: int
    preemption_count: int
    step_count: int
    finished_counts: Mapping[FinishReason, int]
    refused_count: int


@dataclass(slots=True, eq=False)
class _Sequence:
    """One choice of one request while the engine has it. Mutable: it is computed, preempted and ended in place."""

    request: SimRequest
    choice_index: int
    arrived_at_s: float
    answer: Answer
    tokens: bytearray
    prompt_tokens: int
    chain: BlockHashChain
    token_count: int
    computed_count: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    preemption_count: int = 0
    cached_tokens: int | None = None
    restored_tokens: int = 0
    first_scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float = 0.0
    running: bool = False
    ready_s: float = 0.0  # until then its KV is on its way from the lower tier
    refill_until: int = 0  # tokens below this position are prefill: the prompt, or everything after a preemption


@dataclass(slots=True)
class _Counters:
    """What `stats` adds up. Mutable: counters only grow."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    restored_prompt_tokens: int = 0
    generation_tokens: int = 0
    queries_tokens: int = 0
    hits_tokens: int = 0
    external_queries_tokens: int = 0
    external_hits_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    refused: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


class EngineCore:
    """A simulated engine. Not thread-safe; calls must come with times that never go back."""

    def __init__(self, config: EngineConfig, timing: StepTiming) -> None:
        self.config = config
        self.pool = BlockPool(
            config.block_count,
            config.block_size_tokens,
            prefix_caching=config.prefix_caching,
            record_events=config.record_kv_events,
            tier_block_count=config.tier_block_count if config.prefix_caching else 0,
        )
        self._link_free_s = 0.0
        self._dice = np.random.default_rng(config.seed)
        self._timing = timing
        self._caching = config.prefix_caching
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._live: dict[str, list[_Sequence]] = {}
        self._counters = _Counters()

    def submit(self, request: SimRequest, now_s: float) -> SubmitOutcome:
        """Queue a request. Raises RequestError when its id is still live."""
        if request.request_id in self._live:
            raise RequestError(f"request {request.request_id}: request_id is in use; expected a new one")
        prompt_tokens = len(request.prompt_token_ids)
        # The last token of an answer is never computed, so it needs no room.
        if self.pool.blocks_for(prompt_tokens + request.max_tokens - 1) > self.pool.usable_block_count:
            self._counters.refused += 1
            return SubmitOutcome.NEVER_FITS
        if len(self._waiting) + request.choice_count > self.config.max_waiting_count:
            self._counters.refused += 1
            return SubmitOutcome.QUEUE_FULL
        sequences = self._sequences(request, now_s)
        self._live[request.request_id] = sequences
        self._waiting.extend(sequences)
        return SubmitOutcome.ACCEPTED

    def abort(self, request_id: str, now_s: float) -> tuple[Finished, ...]:
        """End every live choice of a request at once and free its blocks. Empty when nothing of it is live."""
        sequences = self._live.pop(request_id, [])
        for sequence in sequences:
            (self._running if sequence.running else self._waiting).remove(sequence)
            self.pool.release(sequence.table)
        return tuple(self._finish(sequence, FinishReason.ABORT, now_s) for sequence in sequences)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. False, and nothing done, while any request holds blocks.

        The AllBlocksCleared event goes with the next step, as in vLLM.
        """
        return self.pool.reset()

    @property
    def idle(self) -> bool:
        """True when a step would have nothing to do."""
        return not self._running and not self._waiting

    def step(self, now_s: float) -> StepOutcome | None:
        """Run one iteration from `now_s`. None when there is nothing to do."""
        if self.idle:
            return None
        plan = _Plan(self.config.max_batched_tokens)
        self._schedule_running(plan, now_s)
        if not plan.preempted_count:
            self._schedule_waiting(plan, now_s)
        batch = plan.batch()
        if not plan.sequences and not plan.preempted_count:
            return StepOutcome(now_s, plan.wake_s, batch, (), self.pool.take_events(), 0, asleep=True)
        ends_at_s = now_s + self._timing.step_s(batch) * self._slow_ratio()
        self._counters.steps += 1
        outputs = self._produce(plan, ends_at_s)
        return StepOutcome(now_s, ends_at_s, batch, outputs, self.pool.take_events(), plan.preempted_count)

    def stats(self) -> EngineStats:
        """The engine's gauges and counters now."""
        counters = self._counters
        return EngineStats(
            running_count=len(self._running),
            waiting_count=len(self._waiting),
            kv_usage_ratio=self.pool.usage_ratio,
            cached_block_hash_count=self.pool.cached_hash_count,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            restored_prompt_tokens=counters.restored_prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries_tokens=counters.queries_tokens,
            prefix_cache_hits_tokens=counters.hits_tokens,
            external_queries_tokens=counters.external_queries_tokens,
            external_hits_tokens=counters.external_hits_tokens,
            preemption_count=counters.preemptions,
            step_count=counters.steps,
            finished_counts=dict(counters.finished),
            refused_count=counters.refused,
        )

    def _sequences(self, request: SimRequest, now_s: float) -> list[_Sequence]:
        prompt = token_bytes(request.prompt_token_ids)
        chain = BlockHashChain(self.config.block_size_tokens, request.cache_salt)
        if self._caching:
            chain.extend(prompt)
        prompt_tokens = len(prompt) // TOKEN_BYTES
        return [
            _Sequence(
                request=request,
                choice_index=index,
                arrived_at_s=now_s,
                answer=Answer(request, index, self.config.seed, self.config.output_law),
                tokens=bytearray(prompt),
                prompt_tokens=prompt_tokens,
                chain=chain if index == 0 else chain.fork(),
                token_count=prompt_tokens,
                refill_until=prompt_tokens,
            )
            for index in range(request.choice_count)
        ]

    def _slow_ratio(self) -> float:
        config = self.config
        if not config.noise_ratio:
            return config.slow_ratio
        spread = config.noise_ratio
        return config.slow_ratio * exp(spread * float(self._dice.standard_normal()) - spread * spread / 2)

    def _schedule_running(self, plan: _Plan, now_s: float) -> None:
        running = self._running
        grow = self.pool.grow
        index = 0
        while index < len(running) and plan.budget_tokens > 0:
            sequence = running[index]
            if sequence.ready_s > now_s:
                plan.wake_s = min(plan.wake_s, sequence.ready_s)
                index += 1
                continue
            new_tokens = min(sequence.token_count - sequence.computed_count, plan.budget_tokens)
            while not grow(sequence.table, sequence.computed_count + new_tokens):
                victim = running.pop()
                self._preempt(victim)
                plan.preempted_count += 1
                if victim is sequence:
                    return
            self._take(plan, sequence, new_tokens)
            index += 1

    def _schedule_waiting(self, plan: _Plan, now_s: float) -> None:
        waiting = self._waiting
        pool = self.pool
        while waiting and plan.budget_tokens > 0 and len(self._running) < self.config.max_sequence_count:
            sequence = waiting[0]
            hit = pool.find_hit(sequence.chain.hashes, sequence.token_count)
            restored = pool.find_in_tier(sequence.chain.hashes, len(hit), sequence.token_count)
            if pool.blocks_taken(hit, sequence.table, sequence.token_count) > pool.free_block_count:
                return
            waiting.popleft()
            pool.share(sequence.table, hit)
            sequence.computed_count = (len(hit) + restored) * pool.block_size_tokens
            if sequence.cached_tokens is None:
                sequence.first_scheduled_at_s = now_s
                self._note_cached(sequence, len(hit) * pool.block_size_tokens)
            sequence.running = True
            self._running.append(sequence)
            sequence.ready_s = pool.arrived_s(hit) if self.config.tier_block_count else 0.0
            if restored:
                self._restore(sequence, restored, now_s)
            if sequence.ready_s > now_s:
                plan.wake_s = min(plan.wake_s, sequence.ready_s)
                continue
            new_tokens = min(sequence.token_count - sequence.computed_count, plan.budget_tokens)
            pool.grow(sequence.table, sequence.computed_count + new_tokens)
            self._take(plan, sequence, new_tokens)

    def _note_cached(self, sequence: _Sequence, hit_tokens: int) -> None:
        counters = self._counters
        sequence.cached_tokens = sequence.computed_count
        sequence.restored_tokens = sequence.computed_count - hit_tokens
        counters.queries_tokens += sequence.token_count
        counters.hits_tokens += hit_tokens
        if self.config.tier_block_count:
            counters.external_queries_tokens += sequence.token_count - hit_tokens
            counters.external_hits_tokens += sequence.restored_tokens

    def _restore(self, sequence: _Sequence, block_count: int, now_s: float) -> None:
        """Bring blocks back from the lower tier: room and names at once, contents when the link has moved them."""
        self.pool.grow(sequence.table, sequence.computed_count)
        self.pool.store(sequence.table, sequence.chain, sequence.tokens, sequence.computed_count)
        self._link_free_s = max(self._link_free_s, now_s) + block_count * self.config.restore_s_per_block
        sequence.ready_s = max(sequence.ready_s, self._link_free_s)
        self.pool.arrive(sequence.table.blocks[-block_count:], self._link_free_s)

    def _take(self, plan: _Plan, sequence: _Sequence, new_tokens: int) -> None:
        """Put `new_tokens` of a sequence that has room for them into the step."""
        computed = sequence.computed_count
        plan.add(sequence, new_tokens, is_prefill=computed < sequence.refill_until)
        sequence.computed_count = computed = computed + new_tokens
        if self._caching and computed // self.config.block_size_tokens > sequence.table.stored_count:
            sequence.chain.extend(sequence.tokens)
            self.pool.store(sequence.table, sequence.chain, sequence.tokens, computed)

    def _preempt(self, victim: _Sequence) -> None:
        self.pool.release(victim.table)
        victim.computed_count = 0
        victim.ready_s = 0.0
        victim.refill_until = victim.token_count
        victim.preemption_count += 1
        victim.running = False
        self._counters.preemptions += 1
        self._waiting.appendleft(victim)

    def _produce(self, plan: _Plan, ends_at_s: float) -> tuple[ChoiceTokens, ...]:
        """One token for every scheduled sequence that is computed up to its end; the finished ones leave."""
        counters = self._counters
        outputs: list[ChoiceTokens] = []
        ended = False
        for sequence in plan.sequences:
            if sequence.computed_count < sequence.token_count:
                continue
            position = sequence.token_count - sequence.prompt_tokens
            text = sequence.answer.token(position)
            sequence.tokens += text
            sequence.token_count += 1
            counters.generation_tokens += 1
            waited_s = ends_at_s - (sequence.last_token_at_s if position else sequence.arrived_at_s)
            sequence.last_token_at_s = ends_at_s
            cached = sequence.cached_tokens or 0
            if position == 0:
                sequence.first_token_at_s = ends_at_s
                counters.prompt_tokens += sequence.prompt_tokens
                counters.cached_prompt_tokens += cached
                counters.restored_prompt_tokens += sequence.restored_tokens
            finished = None
            if position + 1 >= sequence.answer.length_tokens:
                ended = True
                finished = self._end(sequence, ends_at_s)
            outputs.append(
                ChoiceTokens(
                    sequence.request.request_id, sequence.choice_index, position, text, waited_s, cached, finished
                )
            )
        if ended:
            self._running = [sequence for sequence in self._running if sequence.running]
        return tuple(outputs)

    def _end(self, sequence: _Sequence, now_s: float) -> Finished:
        """The answer is complete: free the blocks and forget the sequence (the caller drops it from `_running`)."""
        sequence.running = False
        self.pool.release(sequence.table)
        request = sequence.request
        siblings = self._live[request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[request.request_id]
        output_tokens = sequence.token_count - sequence.prompt_tokens
        reason = FinishReason.LENGTH if output_tokens >= request.max_tokens else FinishReason.STOP
        return self._finish(sequence, reason, now_s)

    def _finish(self, sequence: _Sequence, reason: FinishReason, now_s: float) -> Finished:
        self._counters.finished[reason] += 1
        block_size = self.config.block_size_tokens
        cached = sequence.cached_tokens
        created = None
        if cached is not None and sequence.first_token_at_s is not None:
            created = sequence.prompt_tokens // block_size * block_size - cached
        return Finished(
            request_id=sequence.request.request_id,
            choice_index=sequence.choice_index,
            reason=reason,
            prompt_tokens=sequence.prompt_tokens,
            output_tokens=sequence.token_count - sequence.prompt_tokens,
            cached_tokens=cached,
            created_cache_tokens=created,
            preemption_count=sequence.preemption_count,
            arrived_at_s=sequence.arrived_at_s,
            first_scheduled_at_s=sequence.first_scheduled_at_s,
            first_token_at_s=sequence.first_token_at_s,
            ended_at_s=now_s,
        )


class _Plan:
    """What one step will compute, summed up as it is filled."""

    __slots__ = (
        "budget_tokens",
        "decode_context_tokens",
        "decode_count",
        "preempted_count",
        "prefill_context_tokens",
        "prefill_count",
        "prefill_pairs",
        "prefill_tokens",
        "sequences",
        "wake_s",
    )

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.sequences: list[_Sequence] = []
        self.preempted_count = 0
        self.prefill_count = 0
        self.prefill_tokens = 0
        self.prefill_context_tokens = 0
        self.prefill_pairs = 0
        self.decode_count = 0
        self.decode_context_tokens = 0
        self.wake_s = inf
        """When the first sequence that waits for its KV has it."""

    def add(self, sequence: _Sequence, new_tokens: int, *, is_prefill: bool) -> None:
        """Count `new_tokens` computed on top of what the sequence has."""
        self.sequences.append(sequence)
        self.budget_tokens -= new_tokens
        context = sequence.computed_count
        if is_prefill:
            self.prefill_count += 1
            self.prefill_tokens += new_tokens
            self.prefill_context_tokens += context
            self.prefill_pairs += new_tokens * context + new_tokens * (new_tokens + 1) // 2
        else:
            self.decode_count += 1
            self.decode_context_tokens += context + 1

    def batch(self) -> BatchShape:
        """The step's shape for the timing model."""
        return BatchShape(
            prefill_count=self.prefill_count,
            prefill_tokens=self.prefill_tokens,
            prefill_context_tokens=self.prefill_context_tokens,
            prefill_attention_pairs=self.prefill_pairs,
            decode_count=self.decode_count,
            decode_context_tokens=self.decode_context_tokens,
        )
