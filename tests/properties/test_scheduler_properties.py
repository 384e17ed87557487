"""Properties of the simulated engine under any traffic, each shown to fail on a planted fault.

Traffic is a list of arrivals (with choices, salts, shared prefixes) and hang-ups between steps, on an engine small
enough that queues fill, prompts are cut into chunks and sequences are preempted. The driver watches from outside what a
client, a router and an operator would see.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel.errors import BlockPoolError
from perfmodel.kv_cache import BlockRemoved, BlockStored
from perfmodel.scheduler import (
    ChoiceTokens,
    EngineConfig,
    EngineCore,
    Finished,
    FinishReason,
    StepOutcome,
    StepTiming,
    SubmitOutcome,
)
from perfmodel.step_time import BatchShape
from perfmodel.workload import OutputLaw, SimRequest
from tests.exploring import examples


@dataclass(frozen=True)
class Arrival:
    """One request of the traffic, `steps_before` steps after the one before it."""

    steps_before: int
    prompt: tuple[int, ...]
    max_tokens: int
    choice_count: int
    salt: str | None
    ignore_eos: bool
    hang_up_after: int | None  # steps after the arrival


@dataclass(frozen=True)
class Engine:
    """Limits of the engine under test."""

    block_count: int
    max_batched_tokens: int
    max_sequence_count: int
    max_waiting_count: int

    def config(self) -> EngineConfig:
        return EngineConfig(
            block_count=self.block_count,
            block_size_tokens=2,
            max_batched_tokens=self.max_batched_tokens,
            max_sequence_count=self.max_sequence_count,
            max_waiting_count=self.max_waiting_count,
            seed=7,
            output_law=OutputLaw(mean_tokens=4.0),
        )


class LinearTiming:
    def step_s(self, batch: BatchShape) -> float:
        return 0.001 + 0.0001 * batch.token_count


@dataclass
class Watch:
    """What came out of one run."""

    accepted: dict[str, Arrival] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[ChoiceTokens]] = field(default_factory=dict)
    ended: Counter[tuple[str, int]] = field(default_factory=Counter)
    finished: dict[tuple[str, int], Finished] = field(default_factory=dict)
    index: Counter[int] = field(default_factory=Counter)
    outcomes: list[StepOutcome] = field(default_factory=list)

    def end(self, finished: Finished) -> None:
        key = (finished.request_id, finished.choice_index)
        self.ended[key] += 1
        self.finished[key] = finished


class Run:
    """Plays traffic on an engine, checking what must hold at every step."""

    def __init__(self, core: EngineCore, engine: Engine) -> None:
        self.core = core
        self.engine = engine
        self.watch = Watch()
        self.now_s = 0.0
        self.must_produce: set[tuple[str, int]] = set()

    def play(self, traffic: list[Arrival]) -> Watch:
        hang_ups: dict[int, list[str]] = {}
        step_index = 0
        for number, arrival in enumerate(traffic):
            for _ in range(arrival.steps_before):
                self.step(hang_ups.get(step_index, []))
                step_index += 1
            if self.submit(f"r{number}", arrival) and arrival.hang_up_after is not None:
                hang_ups.setdefault(step_index + arrival.hang_up_after, []).append(f"r{number}")
        last = step_index + 10_000
        while not self.core.idle:
            assert step_index < last, "the engine always gets its work done"
            self.step(hang_ups.get(step_index, []))
            step_index += 1
        self.check_end()
        return self.watch

    def submit(self, name: str, arrival: Arrival) -> bool:
        request = SimRequest(
            request_id=name,
            prompt_token_ids=arrival.prompt,
            max_tokens=arrival.max_tokens,
            choice_count=arrival.choice_count,
            cache_salt=arrival.salt,
            ignore_eos=arrival.ignore_eos,
        )
        waiting = self.core.stats().waiting_count
        outcome = self.core.submit(request, self.now_s)
        blocks = -(-(len(arrival.prompt) + arrival.max_tokens - 1) // 2)
        never = blocks > self.engine.block_count - 1
        full = waiting + arrival.choice_count > self.engine.max_waiting_count
        wanted = SubmitOutcome.QUEUE_FULL if full else SubmitOutcome.ACCEPTED
        assert outcome is (SubmitOutcome.NEVER_FITS if never else wanted)
        if outcome is SubmitOutcome.ACCEPTED:
            self.watch.accepted[name] = arrival
        return outcome is SubmitOutcome.ACCEPTED

    def step(self, hang_ups: list[str]) -> None:
        for name in hang_ups:
            for finished in self.core.abort(name, self.now_s):
                self.watch.end(finished)
                self.must_produce.discard((name, finished.choice_index))
            assert self.core.abort(name, self.now_s) == (), "a request is aborted once"
        outcome = self.core.step(self.now_s)
        if outcome is None:
            self.now_s += 0.001
            return
        self.watch.outcomes.append(outcome)
        self.check_step(outcome)
        self.now_s = outcome.ends_at_s

    def check_step(self, outcome: StepOutcome) -> None:
        watch, stats = self.watch, self.core.stats()
        assert 0 < outcome.batch.token_count <= self.engine.max_batched_tokens
        assert outcome.batch.sequence_count <= self.engine.max_sequence_count
        assert stats.running_count <= self.engine.max_sequence_count
        produced = set()
        for output in outcome.outputs:
            key = (output.request_id, output.choice_index)
            assert key not in produced, "one token a step"
            assert watch.ended[key] == 0, "nothing after the end"
            assert output.waited_s > 0
            produced.add(key)
            watch.tokens.setdefault(key, []).append(output)
            if output.finished is not None:
                watch.end(output.finished)
        if not outcome.preempted_count:
            assert self.must_produce <= produced, "a decoding sequence gets its token in every step"
        self.must_produce = {key for key in produced if not watch.ended[key]} if not outcome.preempted_count else set()
        self.check_pool(outcome)

    def check_pool(self, outcome: StepOutcome) -> None:
        core, index = self.core, self.watch.index
        for event in outcome.kv_events:
            if isinstance(event, BlockStored):
                index.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                index.subtract(event.block_hashes)
        assert +index == {block_hash: len(copies) for block_hash, copies in core.pool.cached_copies().items()}
        holders = Counter(block for sequence in core._running for block in sequence.table.blocks)
        counts = {block: core.pool.reference_count(block) for block in range(1, self.engine.block_count)}
        assert {block: count for block, count in counts.items() if count} == holders
        assert core.pool.used_block_count == len(holders)

    def check_end(self) -> None:
        watch, stats = self.watch, self.core.stats()
        choices = {(name, i) for name, arrival in watch.accepted.items() for i in range(arrival.choice_count)}
        assert set(watch.ended) == choices, "every choice of every accepted request ends"
        assert set(watch.ended.values()) <= {1}, "and ends once"
        assert self.core.pool.used_block_count == 0, "nothing holds blocks when nothing runs"
        for key, finished in watch.finished.items():
            self.check_choice(key, finished)
        done = Counter(finished.reason for finished in watch.finished.values())
        assert {reason: count for reason, count in stats.finished_counts.items() if count} == done
        assert stats.generation_tokens == sum(map(len, watch.tokens.values()))
        started = [watch.finished[key] for key in watch.tokens]
        assert stats.prompt_tokens == sum(finished.prompt_tokens for finished in started)
        assert stats.prefix_cache_hits_tokens <= stats.prefix_cache_queries_tokens
        if not stats.preemption_count and FinishReason.ABORT not in done:
            computed = sum(outcome.batch.prefill_tokens for outcome in watch.outcomes)
            assert computed + stats.prefix_cache_hits_tokens == stats.prompt_tokens, "a prompt is computed or cached"

    def check_choice(self, key: tuple[str, int], finished: Finished) -> None:
        arrival, tokens = self.watch.accepted[key[0]], self.watch.tokens.get(key, [])
        assert [token.position for token in tokens] == list(range(len(tokens))), "tokens come in order, each once"
        assert finished.output_tokens == len(tokens)
        assert finished.prompt_tokens == len(arrival.prompt)
        if finished.reason is not FinishReason.ABORT:
            assert 1 <= len(tokens) <= arrival.max_tokens
            if arrival.ignore_eos:
                assert len(tokens) == arrival.max_tokens, "tokens produced are the tokens asked for"
            length = len(tokens) == arrival.max_tokens
            assert finished.reason is (FinishReason.LENGTH if length else FinishReason.STOP)
        if tokens:
            waited = sum(token.waited_s for token in tokens)
            assert finished.first_token_at_s is not None
            assert finished.first_token_at_s - finished.arrived_at_s == pytest.approx(tokens[0].waited_s)
            if finished.reason is not FinishReason.ABORT:
                assert finished.ended_at_s - finished.arrived_at_s == pytest.approx(waited)


arrivals = st.builds(
    Arrival,
    steps_before=st.integers(0, 4),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple),
    max_tokens=st.integers(1, 10),
    choice_count=st.sampled_from([1, 1, 2, 3]),
    salt=st.sampled_from([None, None, "a"]),
    ignore_eos=st.booleans(),
    hang_up_after=st.one_of(st.none(), st.none(), st.integers(0, 8)),
)
engines = st.builds(
    Engine,
    block_count=st.integers(5, 14),
    max_batched_tokens=st.integers(4, 12),
    max_sequence_count=st.integers(1, 4),
    max_waiting_count=st.integers(3, 8),
)
traffics = st.lists(arrivals, max_size=10)


def run(core_type: type[EngineCore], engine: Engine, traffic: list[Arrival]) -> Watch:
    return Run(core_type(engine.config(), LinearTiming()), engine).play(traffic)


def check(core_type: type[EngineCore], engine: Engine, traffic: list[Arrival]) -> None:
    first = run(core_type, engine, traffic)
    second = run(core_type, engine, traffic)
    assert first.outcomes == second.outcomes, "the same seed and traffic give the same run"


@given(engines, traffics)
@settings(max_examples=examples(250), deadline=None)
def test_the_engine_keeps_its_promises(engine: Engine, traffic: list[Arrival]) -> None:
    check(EngineCore, engine, traffic)


class OverspendsTheBudget(EngineCore):
    def _schedule_waiting(self, plan, now_s):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        plan.budget_tokens += 3
        super()._schedule_waiting(plan, now_s)


class AdmitsOneTooMany(EngineCore):
    def _schedule_waiting(self, plan, now_s):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        super()._schedule_waiting(plan, now_s)
        if self._waiting and plan.budget_tokens > 0:
            extra = self._running.pop() if self._running else None
            super()._schedule_waiting(plan, now_s)
            if extra is not None:
                self._running.insert(0, extra)


class LeaksBlocksAtTheEnd(EngineCore):
    def _end(self, sequence, now_s):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        sequence.table.blocks[:] = sequence.table.blocks[:-1]
        return super()._end(sequence, now_s)


class LeaksBlocksOnAbort(EngineCore):
    def abort(self, request_id: str, now_s: float) -> tuple[Finished, ...]:
        for sequence in self._live.get(request_id, []):
            sequence.table.blocks.clear()
        return super().abort(request_id, now_s)


class LosesThePreempted(EngineCore):
    def _preempt(self, victim):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        super()._preempt(victim)
        self._waiting.popleft()


class RestartsThePreempted(EngineCore):
    def _preempt(self, victim):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        super()._preempt(victim)
        victim.token_count = victim.prompt_tokens
        del victim.tokens[victim.prompt_tokens * 4 :]


class ForgetsAChoice(EngineCore):
    def abort(self, request_id: str, now_s: float) -> tuple[Finished, ...]:
        return super().abort(request_id, now_s)[:1]


class EndsTooSoon(EngineCore):
    def _sequences(self, request, now_s):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        sequences = super()._sequences(request, now_s)
        for sequence in sequences:
            sequence.answer.length_tokens = max(1, sequence.answer.length_tokens - 1)
        return sequences


class ServesNewPromptsFirst(EngineCore):
    def _schedule_running(self, plan, now_s):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        self._running.reverse()
        plan.budget_tokens -= 2
        super()._schedule_running(plan, now_s)
        plan.budget_tokens += 2
        self._running.reverse()


class CountsPreemptedPromptsAgain(EngineCore):
    def _preempt(self, victim):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        super()._preempt(victim)
        self._counters.prompt_tokens += victim.prompt_tokens


class DrawsAnewInEachRun(EngineCore):
    runs = itertools.count(1)

    def __init__(self, config: EngineConfig, timing: StepTiming) -> None:
        super().__init__(config, timing)
        self.run = next(self.runs)

    def _sequences(self, request, now_s):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        sequences = super()._sequences(request, now_s)
        for sequence in sequences:
            sequence.answer._key ^= self.run
        return sequences


class QueuesWithoutBound(EngineCore):
    def submit(self, request: SimRequest, now_s: float) -> SubmitOutcome:
        outcome = super().submit(request, now_s)
        if outcome is SubmitOutcome.QUEUE_FULL:
            sequences = self._sequences(request, now_s)
            self._live[request.request_id] = sequences
            self._waiting.extend(sequences)
            return SubmitOutcome.ACCEPTED
        return outcome


@pytest.mark.parametrize(
    "core_type",
    [
        OverspendsTheBudget,
        AdmitsOneTooMany,
        LeaksBlocksAtTheEnd,
        LeaksBlocksOnAbort,
        LosesThePreempted,
        RestartsThePreempted,
        ForgetsAChoice,
        EndsTooSoon,
        ServesNewPromptsFirst,
        CountsPreemptedPromptsAgain,
        DrawsAnewInEachRun,
        QueuesWithoutBound,
    ],
)
def test_a_planted_fault_is_caught(core_type: type[EngineCore]) -> None:
    @given(engines, traffics)
    @settings(
        max_examples=600, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def search(engine: Engine, traffic: list[Arrival]) -> None:
        check(core_type, engine, traffic)

    with pytest.raises((AssertionError, BlockPoolError, KeyError, ValueError)):
        search()
