"""A session recorded from vLLM 0.32.0, replayed through the simulated engine: the KV events must be the recorded ones.

What the recording does not hold is filled in, and cannot matter to the cache: prompt tails shorter than a block are
padded to usage.prompt_tokens, answers beyond their last full block are invented, and prompts under one block (batch of
two, the aborted one, /v1/responses) are invented whole at their recorded length. The two parallel phases keep no
request files: their prompt (two tokens, as /tokenize gives for "hello world"), counts and lengths follow from the
events (nine full blocks each) and from the engine's own counters, and that one request was a step ahead of the others
from the first two events.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfmodel.kv_cache import AllBlocksCleared, BlockPool, BlockRemoved, BlockStored, BlockTable, KvEvent
from perfmodel.scheduler import EngineConfig, EngineCore, Finished, FinishReason, SubmitOutcome
from perfmodel.step_time import BatchShape
from perfmodel.workload import SimRequest

RECORDED = Path(__file__).parents[2] / "recorded" / "vllm_0.32.0"

# Ids of invented tokens start above the recorded model's vocabulary (1,024), so that they never equal a recorded one.
INVENTED = 100_000


class FixedTiming:
    def step_s(self, batch: BatchShape) -> float:
        return 0.001


class Recording:
    """The recorded messages, and what each request's files say."""

    def __init__(self) -> None:
        lines = (RECORDED / "kv_events.jsonl").read_text().splitlines()
        self.messages: list[list[dict[str, Any]]] = [json.loads(line)["decoded"][1] for line in lines]

    def stored_tokens(self, *message_indexes: int) -> list[int]:
        """Token ids of the first BlockStored of each message, joined."""
        tokens: list[int] = []
        for index in message_indexes:
            event = next(event for event in self.messages[index] if event["type"] == "BlockStored")
            tokens += event["token_ids"]
        return tokens

    def body(self, name: str) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((RECORDED / f"{name}.meta.json").read_text())["request_body"]
        return body

    def usage(self, name: str) -> tuple[int, int, int]:
        """(prompt, completion, cached) tokens of a request's recorded usage."""
        (path,) = RECORDED.glob(f"{name}.response.*")
        text = path.read_text()

        def last(*fields: str) -> int:
            return int(re.findall(rf'"(?:{"|".join(fields)})":(\d+)', text)[-1])

        return last("prompt_tokens", "input_tokens"), last("completion_tokens", "output_tokens"), last("cached_tokens")

    def counter(self, name: str, label: str = "") -> int:
        """A counter of the engine at the end of the session."""
        text = (RECORDED / "metrics_after.prom").read_text()
        (value,) = re.findall(rf"^vllm:{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return int(float(value))


class Session:
    """The recorded engine's twin and what came out of it."""

    def __init__(self, pool: BlockPool | None = None) -> None:
        recorded = json.loads((RECORDED / "server_info.response.json").read_text())["vllm_config"]
        config = EngineConfig(
            block_count=recorded["cache_config"]["num_gpu_blocks"],
            block_size_tokens=recorded["cache_config"]["block_size"],
            max_batched_tokens=recorded["scheduler_config"]["max_num_batched_tokens"],
            max_sequence_count=recorded["scheduler_config"]["max_num_seqs"],
        )
        self.core = EngineCore(config, FixedTiming())
        if pool is not None:
            self.core.pool = pool
        self.recording = Recording()
        self.messages: list[tuple[KvEvent, ...]] = []
        self.finished: dict[tuple[str, int], Finished] = {}
        self._now_s = 0.0

    def send(self, name: str, prompt: list[int], max_tokens: int, **options: Any) -> None:
        request = SimRequest(name, prompt, max_tokens, ignore_eos=True, **options)
        assert self.core.submit(request, self._now_s) is SubmitOutcome.ACCEPTED

    def steps(self, count: int | None = None) -> None:
        """Run `count` steps, or until the engine is idle."""
        done = 0
        while done != count and (outcome := self.core.step(self._now_s)) is not None:
            done += 1
            self._now_s = outcome.ends_at_s
            if outcome.kv_events:
                self.messages.append(outcome.kv_events)
            for output in outcome.outputs:
                if output.finished is not None:
                    self.finished[output.request_id, output.choice_index] = output.finished

    def abort(self, name: str) -> None:
        for finished in self.core.abort(name, self._now_s):
            self.finished[name, finished.choice_index] = finished


def padded(tokens: list[int], count: int) -> list[int]:
    assert len(tokens) <= count
    return tokens + [INVENTED + index for index in range(count - len(tokens))]


def play(session: Session) -> Session:
    """Every request of the recording, in its order."""
    recording = session.recording
    # Messages 0 and 1: the first chat stores 8 blocks of its prompt, later one of the rest and 4 of the answer.
    prompt_tokens, output_tokens, _ = recording.usage("chat_nonstream_cold")
    chat = recording.stored_tokens(0, 1)
    for name in ("chat_nonstream_cold", "chat_nonstream_warm_cached", "chat_stream_usage"):
        session.send(name, chat[:prompt_tokens], output_tokens, output_token_ids=padded(chat[prompt_tokens:], 12))
        session.steps()
    for name in ("chat_stream_continuous_usage", "chat_stream_nousage"):
        session.send(name, chat[:prompt_tokens], 12, output_token_ids=padded(chat[prompt_tokens:], 12))
        session.steps()
    session.send("chat_n2_logprobs", chat[:prompt_tokens], 3, choice_count=recording.body("chat_n2_logprobs")["n"])
    session.steps()
    text = recording.stored_tokens(6, 7)
    for name in ("completion_nonstream", "completion_stream_usage"):
        prompt_tokens, output_tokens, _ = recording.usage(name)
        answer = text[prompt_tokens : prompt_tokens + output_tokens]
        session.send(name, text[:prompt_tokens], output_tokens, output_token_ids=padded(answer, output_tokens))
        session.steps()
    salted = recording.body("completion_token_ids_cache_salt")
    session.send(
        "completion_token_ids_cache_salt", salted["prompt"], salted["max_tokens"], cache_salt=salted["cache_salt"]
    )
    session.steps()
    play_second_half(session)
    return session


def play_second_half(session: Session) -> None:
    recording = session.recording
    batch_tokens, _, _ = recording.usage("completion_batch2")
    for index in range(len(recording.body("completion_batch2")["prompt"])):
        session.send(f"completion_batch2/{index}", padded([], batch_tokens // 2), 4)
    session.steps()
    session.send("completion_stream_aborted", padded([], 1), recording.body("completion_stream_aborted")["max_tokens"])
    session.steps(13)  # 13 chunks were received before the client hung up
    session.abort("completion_stream_aborted")
    prompt_tokens, output_tokens, _ = recording.usage("responses_api")
    session.send("responses_api", padded([], prompt_tokens), output_tokens)
    session.steps()
    prompt_tokens, output_tokens, _ = recording.usage("evict_fill_0")
    for index in range(8):
        prompt = recording.stored_tokens(10 + 2 * index, 11 + 2 * index)
        session.send(f"evict_fill_{index}", padded(prompt, prompt_tokens), output_tokens)
        session.steps()
    assert session.core.reset_prefix_cache()
    parallel = recording.stored_tokens(*range(27, 36))
    prompt, answer = parallel[:2], padded(parallel[2:], 300)
    for phase, count in (("alone", 1), ("parallel", 4), ("load", 10)):
        session.send(f"{phase}_0", prompt, 300, output_token_ids=answer)
        session.steps(1)
        for index in range(1, count):
            session.send(f"{phase}_{index}", prompt, 300, output_token_ids=answer)
        session.steps()
    session.send("prefill_1500", padded(recording.stored_tokens(123, 124, 125), 1500), 1)
    session.steps()


def differences(session: Session) -> list[str]:
    """Where the session's events differ from the recording, hashes compared through a one-to-one map."""
    found: list[str] = []
    to_ours: dict[int | None, int | None] = {None: None}
    recorded_messages = session.recording.messages
    if len(session.messages) != len(recorded_messages):
        found.append(f"{len(session.messages)} messages, recorded {len(recorded_messages)}")
    for at, (ours, recorded) in enumerate(zip(session.messages, recorded_messages, strict=False)):
        kinds = [type(event).__name__ for event in ours]
        if kinds != [event["type"] for event in recorded]:
            found.append(f"message {at}: {Counter(kinds)}, recorded {Counter(event['type'] for event in recorded)}")
            continue
        for event, wanted in zip(ours, recorded, strict=True):
            if isinstance(event, AllBlocksCleared):
                continue
            if len(event.block_hashes) != len(wanted["block_hashes"]):
                found.append(f"message {at}: {len(event.block_hashes)} hashes, recorded {len(wanted['block_hashes'])}")
            for mine, theirs in zip(event.block_hashes, wanted["block_hashes"], strict=False):
                if to_ours.setdefault(theirs, mine) != mine:
                    found.append(f"message {at}: {type(event).__name__} of another block")
            if isinstance(event, BlockStored):
                salts = [None if keys is None else list(keys) for keys in event.extra_keys]
                mine_facts = (list(event.token_ids), event.parent_block_hash, salts, event.block_size_tokens)
                parent = to_ours.get(wanted["parent_block_hash"], "unknown")
                if mine_facts != (wanted["token_ids"], parent, wanted["extra_keys"], wanted["block_size"]):
                    found.append(f"message {at}: BlockStored differs")
    if len(set(to_ours.values())) != len(to_ours):
        found.append("two recorded hashes became one")
    return found


@pytest.fixture(scope="module")
def session() -> Session:
    return play(Session())


def test_every_message_holds_the_recorded_events_in_the_recorded_order(session: Session) -> None:
    assert differences(session) == []


def test_the_cache_ends_with_the_recorded_stored_and_cached_counts(session: Session) -> None:
    events = [event for message in session.messages for event in message]
    recorded = [event for message in session.recording.messages for event in message]
    assert Counter(type(event).__name__ for event in events) == Counter(event["type"] for event in recorded)
    assert Counter(type(event).__name__ for event in events) == {
        "BlockStored": 164,
        "BlockRemoved": 157,
        "AllBlocksCleared": 1,
    }
    copies = session.core.pool.cached_copies()
    assert (len(copies), sum(map(len, copies.values()))) == (55, 94)
    held: Counter[int] = Counter()
    for event in recorded:
        if event["type"] == "AllBlocksCleared":
            held.clear()
        for block_hash in event.get("block_hashes", ()):
            held[block_hash] += 1 if event["type"] == "BlockStored" else -1
    assert sorted(map(len, copies.values())) == sorted((+held).values())


@pytest.mark.parametrize(
    "name",
    [
        "chat_nonstream_cold",
        "chat_nonstream_warm_cached",
        "chat_stream_usage",
        "chat_stream_continuous_usage",
        "completion_nonstream",
        "completion_stream_usage",
        "completion_token_ids_cache_salt",
        "responses_api",
        "evict_fill_0",
    ],
)
def test_each_request_reports_the_recorded_usage(session: Session, name: str) -> None:
    finished = session.finished[name, 0]
    assert (finished.prompt_tokens, finished.output_tokens, finished.cached_tokens) == session.recording.usage(name)


def test_choices_and_batches_add_up_to_the_recorded_usage(session: Session) -> None:
    choices = [session.finished["chat_n2_logprobs", index] for index in (0, 1)]
    both = sum(choice.output_tokens for choice in choices)
    usage = (choices[0].prompt_tokens, both, choices[0].cached_tokens)
    assert usage == session.recording.usage("chat_n2_logprobs")
    batch = [session.finished[f"completion_batch2/{index}", 0] for index in (0, 1)]
    assert (
        sum(part.prompt_tokens for part in batch),
        sum(part.output_tokens for part in batch),
        sum(part.cached_tokens or 0 for part in batch),
    ) == session.recording.usage("completion_batch2")


def test_newly_cached_prompt_tokens_are_the_recorded_ones(session: Session) -> None:
    for name in ("chat_nonstream_cold", "chat_nonstream_warm_cached", "chat_stream_usage"):
        (path,) = RECORDED.glob(f"{name}.response.*")
        (created,) = set(re.findall(r'"created_cache_tokens":(\d+)', path.read_text()))
        assert session.finished[name, 0].created_cache_tokens == int(created)


def test_the_counters_end_where_the_engines_own_did(session: Session) -> None:
    stats, recording = session.core.stats(), session.recording
    assert stats.prompt_tokens == recording.counter("prompt_tokens_total")
    assert stats.cached_prompt_tokens == recording.counter("prompt_tokens_cached_total")
    assert stats.generation_tokens == recording.counter("generation_tokens_total")
    assert stats.prefix_cache_queries_tokens == recording.counter("prefix_cache_queries_total")
    assert stats.prefix_cache_hits_tokens == recording.counter("prefix_cache_hits_total")
    assert stats.preemption_count == recording.counter("num_preemptions_total")
    assert stats.finished_counts[FinishReason.LENGTH] == recording.counter(
        "request_success_total", 'finished_reason="length"'
    )
    assert stats.kv_usage_ratio == 0.0


class FreesHeadFirst(BlockPool):
    def release(self, table: BlockTable) -> None:
        table.blocks.reverse()
        super().release(table)


class KeepsWorthlessBlocks(BlockPool):
    """Frees blocks without a hash to the back of the queue, as engines before 0.32 did."""

    def release(self, table: BlockTable) -> None:
        worthless = [block for block in table.blocks if self._hash_of_block[block] is None]
        super().release(table)
        for block in worthless:
            self._free.move_to_end(block)


class EvictsTheNewest(BlockPool):
    def grow(self, table: BlockTable, token_count: int) -> bool:
        for block in reversed(self.free_blocks()):
            self._free.move_to_end(block)
        return super().grow(table, token_count)


class AnnouncesEachHashOnce(BlockPool):
    """Tells of the first copy of a hash and of the last one's end only."""

    def take_events(self) -> tuple[KvEvent, ...]:
        events = super().take_events()
        copies = self.cached_copies()
        return tuple(e for e in events if not isinstance(e, BlockRemoved) or e.block_hashes[0] not in copies)


class SharesNothing(BlockPool):
    def find_hit(self, hashes: Any, token_count: int) -> list[int]:
        return []


@pytest.mark.parametrize(
    "wrong_pool", [FreesHeadFirst, KeepsWorthlessBlocks, EvictsTheNewest, AnnouncesEachHashOnce, SharesNothing]
)
def test_the_recording_tells_a_wrong_cache_apart(wrong_pool: Callable[[int, int], BlockPool]) -> None:
    assert differences(play(Session(wrong_pool(96, 32)))) != []
