"""Properties of the harness replay under any closed or open loop, each shown to fail on a planted fault.

The replay takes decode runs in closed form. A reference that makes every token one by one, written independently below,
must give the same times; the other properties hold for any engine: order, bounds, room, Little's law. A planted fault
is a change of one line of the loop's source, run as plain Python in place of the compiled one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from perfmodel import replay_loop
from perfmodel.harness import ArrivalLaw, HarnessScenario, Replayed, replay, replay_requests
from perfmodel.serving import LengthLaw, Lengths, SchedulingOrder, ServingEngine
from perfmodel.step_time import BatchShape, StepTable
from tests.exploring import examples


class Steps:
    """Every price of a step table at work."""

    def table(self, max_batched_tokens: int) -> StepTable:
        tokens = np.arange(max_batched_tokens + 1, dtype=np.float64)
        return StepTable(0.002 + 1e-4 * tokens**0.9, 1e-5, 2e-7, 3e-8, 1e-7)

    def step_s(self, batch: BatchShape) -> float:
        return self.table(batch.token_count).step_s(batch)


@dataclass(frozen=True)
class Case:
    """An engine and what is asked of it."""

    input_tokens: int
    output_tokens: int
    law: LengthLaw
    clients: int
    count: int
    budget: int
    slots: int
    capacity: int
    order: SchedulingOrder
    reserve: float
    rate: float | None
    seed: int

    def engine(self) -> ServingEngine:
        return ServingEngine(
            Steps(), self.capacity, self.budget, self.slots, order=self.order, reserve_ratio=self.reserve
        )

    def scenario(self) -> HarnessScenario:
        lengths = Lengths(self.input_tokens, self.output_tokens, self.law)
        if self.rate is None:
            return HarnessScenario(lengths, concurrency=self.clients, request_count=self.count)
        return HarnessScenario(lengths, ArrivalLaw.OPEN_LOOP, rate_per_s=self.rate, request_count=self.count)

    def run(self) -> Replayed:
        return replay_requests(self.engine(), self.scenario(), self.seed)


cases = st.builds(
    Case,
    input_tokens=st.integers(1, 120),
    output_tokens=st.integers(1, 40),
    law=st.sampled_from(LengthLaw),
    clients=st.integers(1, 12),
    count=st.integers(1, 40),
    budget=st.integers(16, 200),
    slots=st.integers(1, 12),
    capacity=st.integers(60, 1500),
    order=st.sampled_from([SchedulingOrder.DECODE_FIRST, SchedulingOrder.PREFILL_FIRST]),
    reserve=st.sampled_from([0.0, 1.0]),
    rate=st.one_of(st.none(), st.floats(0.5, 500.0)),
    seed=st.integers(0, 2**31),
)


def shape_of(chunks: list[tuple[int, int]], done: dict[int, int], decodes: int, context: int) -> BatchShape:
    """One step of these (request, prompt tokens) and so many decodes."""
    return BatchShape(
        len(chunks),
        sum(tokens for _, tokens in chunks),
        sum(done[request] for request, _ in chunks),
        sum(tokens * done[request] + tokens * (tokens + 1) // 2 for request, tokens in chunks),
        decodes,
        context,
    )


def one_by_one(case: Case, run: Replayed) -> tuple[list[float], list[float]]:
    """(first token, end) of each request by a loop that makes every token in a step of its own; no eviction known."""
    prompts, answers = run.input_tokens.tolist(), run.output_tokens.tolist()
    total, steps, now_s = len(prompts), Steps(), 0.0
    sent = [0.0] * total if case.rate is None else run.sent_s.tolist()
    launched = min(case.clients, total) if case.rate is None else total
    waiting: deque[int] = deque()
    seen, done, left, held = 0, dict.fromkeys(range(total), 0), list(answers), 0
    live: list[int] = []
    partial: list[int] = []
    first, end = [math.nan] * total, [math.nan] * total

    def need(request: int) -> int:
        return int(prompts[request] + math.floor(case.reserve * answers[request]))

    while any(math.isnan(value) for value in end):
        while seen < launched and sent[seen] <= now_s:
            waiting.append(seen)
            seen += 1
        alone = case.order is SchedulingOrder.PREFILL_FIRST
        budget = case.budget - (0 if alone else len(live))
        chunks: list[tuple[int, int]] = []
        for request in partial:
            chunks.append((request, min(budget, prompts[request] - done[request])))
            budget -= chunks[-1][1]
        while budget > 0 and waiting:
            request = waiting[0]
            running = len(live) + len(chunks)
            spare = len(live) + 2 + case.capacity // 100
            if running and (running >= case.slots or held + need(request) + spare > case.capacity):
                break
            waiting.popleft()
            held += need(request)
            chunks.append((request, min(budget, prompts[request])))
            budget -= chunks[-1][1]
        chunks = [chunk for chunk in chunks if chunk[1] > 0]
        if not chunks and not live:
            now_s = sent[seen]
            continue
        decodes = [] if alone and chunks else list(live)
        context = sum(prompts[request] + answers[request] - left[request] for request in decodes)
        now_s += steps.step_s(shape_of(chunks, done, len(decodes), context))
        for request in decodes:
            left[request] -= 1
        partial = []
        for request, tokens in chunks:
            done[request] += tokens
            if done[request] < prompts[request]:
                partial.append(request)
                continue
            first[request] = now_s
            left[request] -= 1
            live.append(request)
        for request in [request for request in live if left[request] == 0]:
            live.remove(request)
            held -= need(request)
            end[request] = now_s
            if case.rate is None and launched < total:
                sent[launched], launched = now_s, launched + 1
    return first, end


def check_same_as_one_by_one(case: Case) -> None:
    """With all KV set aside nothing is evicted, and the loop and the reference agree on every time."""
    case = Case(**{**vars(case), "reserve": 1.0})
    run = case.run()
    first, end = one_by_one(case, run)
    assert run.preempted_count == 0
    np.testing.assert_allclose(run.sent_s + run.ttft_s, first, rtol=1e-9)
    np.testing.assert_allclose(run.end_s, end, rtol=1e-9)


def check_no_first_token_before_its_prefill(case: Case) -> None:
    run = case.run()
    steps = Steps()
    for prompt, ttft_s in zip(run.input_tokens.tolist(), run.ttft_s.tolist(), strict=True):
        # The linear part of its own tokens and pairs cannot be had for less, in however many chunks.
        assert ttft_s >= steps.step_s(BatchShape(1, prompt, 0, prompt * (prompt + 1) // 2)) * 0.999 - 1e-3
    assert (run.end_s - run.sent_s >= run.ttft_s - 1e-12).all()


def check_order_of_arrival(case: Case) -> None:
    """First tokens come in the order of sending: prompts are served first come, first served."""
    run = case.run()
    first_s = run.sent_s + run.ttft_s
    assert (np.diff(first_s) >= -1e-9).all()


def check_room(case: Case) -> None:
    """Sequences that decode never outnumber the slots, nor do their prompts outgrow the cache when none is evicted."""
    run = case.run()
    assert case.reserve < 1.0 or run.preempted_count == 0
    first_s, ends_s = run.sent_s + run.ttft_s, run.end_s
    for moment in first_s:
        live = (first_s <= moment + 1e-12) & (ends_s > moment + 1e-12)
        assert live.sum() <= case.slots
        if run.preempted_count == 0 and live.sum() > 1:
            assert run.input_tokens[live].sum() <= case.capacity


def check_little(case: Case) -> None:
    """Sequence-seconds in the system are rate times stay, and in steps they are what the engine counted."""
    run = case.run()
    stay_s = float((run.end_s - run.sent_s).sum())
    instants = np.sort(np.concatenate((run.sent_s, run.end_s)))
    present = [((run.sent_s <= at) & (run.end_s > at)).sum() for at in instants[:-1]]
    assert float(np.dot(present, np.diff(instants))) == pytest.approx(stay_s, rel=1e-6, abs=1e-9)
    assert run.sequence_s <= stay_s * (1 + 1e-9) + 1e-9
    if case.rate is None:
        # Each client always has exactly one request out, up to the last launch.
        last = float(run.sent_s.max())
        clients = min(case.clients, case.count)
        out = sum(min(end, last) - sent for sent, end in zip(run.sent_s.tolist(), run.end_s.tolist(), strict=True))
        assert out == pytest.approx(clients * last, rel=1e-6, abs=1e-9)


CHECKS = [
    check_same_as_one_by_one,
    check_no_first_token_before_its_prefill,
    check_order_of_arrival,
    check_room,
    check_little,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_replay_keeps(check: Callable[[Case], None]) -> None:
    @settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(case=cases)
    def holds(case: Case) -> None:
        if check is check_order_of_arrival and case.reserve == 0.0:
            case = Case(**{**vars(case), "reserve": 1.0})  # an evicted request may hold up later ones only
        check(case)

    holds()


FAULTS = {
    "context of a decode run does not grow": (
        check_same_as_one_by_one,
        "context = steps * count[CONTEXT] + live * steps * (steps - 1) / 2",
        "context = steps * count[CONTEXT]",
    ),
    "a decode run passes an arrival": (
        check_same_as_one_by_one,
        "if clock[NOW] < event_s < np.inf:",
        "if False:",
    ),
    "decodes do not count against the budget": (
        check_same_as_one_by_one,
        "        budget -= count[LIVE]\n",
        "        budget -= 0\n",
    ),
    "the first token leaves before its step": (
        check_no_first_token_before_its_prefill,
        "requests.first_s[request] = clock[NOW] + prices.first_token_s",
        "requests.first_s[request] = requests.visible_s[request]",
    ),
    "first tokens go to the wrong request": (
        check_order_of_arrival,
        "requests.first_s[request] = clock[NOW] + prices.first_token_s",
        "requests.first_s[count[SENT] - 1 - request] = clock[NOW] + prices.first_token_s",
    ),
    "no sequence limit": (
        check_room,
        "    if running >= limits.max_sequence_count:\n        return False\n",
        "",
    ),
    "a full cache admits": (
        check_room,
        "return bool(used + need + spare <= limits.kv_capacity_tokens)",
        "return True",
    ),
    "a client sends before its answer ended": (
        check_little,
        "_send(requests, state, prices, requests.end_s[request])",
        "_send(requests, state, prices, requests.first_s[request])",
    ),
}


def planted(old: str, new: str) -> ModuleType:
    """The loop's module with one change, as plain Python."""
    source = Path(replay_loop.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is in the loop {source.count(old)} times"
    source = source.replace(old, new).replace("from perfmodel.compiled import compiled", "compiled = lambda f: f")
    module = ModuleType("planted_replay_loop")
    exec(compile(source, replay_loop.__file__, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, old, new = FAULTS[name]
    monkeypatch.setattr(replay_loop, "run", planted(old, new).run)

    @settings(
        max_examples=200,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(case=cases.filter(lambda case: case.order is SchedulingOrder.DECODE_FIRST))
    def holds(case: Case) -> None:
        check(Case(**{**vars(case), "reserve": 1.0}))

    with pytest.raises((AssertionError, IndexError)):
        holds()


def grown(field: str, law: LengthLaw, order: SchedulingOrder, seed: int) -> tuple[float, float]:
    """Mean TTFT of a loaded engine, and with twice of one input."""
    size = {"input": 300, "clients": 16, "rate": 12.0}
    results = []
    for factor in (1, 2):
        asked = {**size, field: size[field] * factor}
        engine = ServingEngine(Steps(), 10**9, 2048, 512, order=order)
        lengths = Lengths(asked["input"], 64, law)
        scenario = HarnessScenario(lengths, concurrency=int(asked["clients"]))
        if field == "rate":
            scenario = HarnessScenario(lengths, ArrivalLaw.OPEN_LOOP, rate_per_s=asked["rate"])
        results.append(replay(engine, scenario, seed).ttft_mean_ms)
    return results[0], results[1]


@pytest.mark.parametrize("field", ["input", "clients", "rate"])
@given(law=st.sampled_from(LengthLaw), order=st.sampled_from(SchedulingOrder), seed=st.integers(0, 2**31))
@settings(max_examples=examples(15), deadline=None)
def test_ttft_grows_with_prompts_clients_and_rate(
    field: str, law: LengthLaw, order: SchedulingOrder, seed: int
) -> None:
    small, large = grown(field, law, order, seed)
    assert large > small
