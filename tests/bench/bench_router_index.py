"""What the exact KV index costs: `python -m tests.bench.bench_router_index [PROMPTS]`. One JSON object per case.

Owns: search latency over many resident prompts (alone, and while events are applied), bytes per block, and the rate at
which messages are decoded and applied; beside wall time the thread's own, for a machine that others use too. Does not
own: any limit; a figure belongs to the machine and Python that it was taken on. 10,000 prompts of 8,000 blocks (the
default) need 2 GB of memory and some ten minutes.

The prompts: 64 engines; a prompt begins with one of 20 harness prefixes (2,000 blocks) and one of 200 project prefixes
(2,000 blocks more), then 4,000 blocks of its own: so 80 million references are to 40 million distinct blocks. The own
blocks of a session come in turns of 40 prefilled blocks and 8 decoded ones, which arrive singly among those of 15 other
sessions: the worst layout for a search that compares rows side by side. A search asks for a whole resident prompt with
one turn more, prompts in random order, so that nothing of it is in the processor's caches.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from array import array
from collections.abc import Iterator

import msgpack
import numpy as np

from router.kv_events import Batch, BlocksRemoved, BlocksStored, decode
from router.kv_index import KvIndex, RankId, Served
from router.kv_keys import ChainIdentity, chain_keys, root_key
from tests.bench.bench_router import percentile_us

SECRET = b"0123456789abcdef"
BLOCK_TOKENS = 16
ENGINES, HARNESSES, PROJECTS, SHARED_BLOCKS, OWN_BLOCKS = 64, 20, 200, 2_000, 4_032
TURN_BLOCKS, DECODED_BLOCKS, ACTIVE_SESSIONS = 48, 8, 16
PROMPTS = 10_000


def rank(engine: int) -> RankId:
    """One rank an engine."""
    return RankId(f"e{engine}", "1")


def tokens(seed: int, block_count: int) -> bytes:
    """Random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 150_000, block_count * BLOCK_TOKENS, dtype=np.uint32).tobytes()


def hashes(seed: int, block_count: int) -> list[int]:
    """An engine's hashes of the same blocks."""
    names: list[int] = np.random.default_rng(seed ^ 0x5EED).integers(0, 2**64, block_count, dtype=np.uint64).tolist()
    return names


class Prompt:
    """One resident prompt: its parts by seed. Keys are made when they are asked for."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.engine = number % ENGINES
        harness = number % HARNESSES
        self.parts = [
            (1_000_000 + harness, SHARED_BLOCKS),
            (2_000_000 + number % PROJECTS, SHARED_BLOCKS),
            (3_000_000 + number, OWN_BLOCKS),
        ]

    def keys(self) -> array[int]:
        """Its chain, with one turn that nobody holds."""
        text = b"".join(tokens(*part) for part in [*self.parts, (4_000_000 + self.number, TURN_BLOCKS)])
        return chain_keys(root_key(SECRET, ChainIdentity("m", BLOCK_TOKENS)), text, BLOCK_TOKENS)

    def shared(self) -> list[BlocksStored]:
        """Stores of its shared parts."""
        events, parent = [], None
        for part in self.parts[:2]:
            names = hashes(*part)
            events.append(BlocksStored(names, parent, tokens(*part), BLOCK_TOKENS))
            parent = names[-1]
        return events

    def turns(self) -> Iterator[list[BlocksStored]]:
        """Stores of its own part: a prefill, then blocks one by one, and so on."""
        names, text, parent = hashes(*self.parts[2]), tokens(*self.parts[2]), hashes(*self.parts[1])[-1]
        size = BLOCK_TOKENS * 4
        at = 0
        while at < OWN_BLOCKS:
            for count in (TURN_BLOCKS - DECODED_BLOCKS, *[1] * DECODED_BLOCKS):
                end = at + count
                yield [BlocksStored(names[at:end], parent, text[at * size : end * size], BLOCK_TOKENS)]
                at, parent = end, names[end - 1]


def fill(index: KvIndex, prompts: list[Prompt]) -> None:
    """Make the prompts resident as engines would tell it: each runs 16 sessions at once."""
    held: set[tuple[int, int]] = set()
    for start in range(0, len(prompts), ENGINES * ACTIVE_SESSIONS):
        for engine in range(ENGINES):
            active = [each for each in prompts[start : start + ENGINES * ACTIVE_SESSIONS] if each.engine == engine]
            for each in active:
                for event, part in zip(each.shared(), each.parts, strict=False):
                    if (engine, part[0]) not in held:
                        held.add((engine, part[0]))
                        index.apply(rank(engine), [event])
            for events in zip(*[each.turns() for each in active], strict=True):
                index.apply(rank(engine), [event for turn in events for event in turn])


def churn(engine: int, number: int) -> tuple[list[BlocksStored], list[BlocksRemoved]]:
    """512 blocks that an engine stores (a prefill chunk), and 512 older ones that it evicts for them."""
    seed = 5_000_000 + engine * 1_000 + number % 100
    names = hashes(seed, 512)
    return (
        [BlocksStored(names, None, tokens(seed, 512), BLOCK_TOKENS)],
        [BlocksRemoved(hashes(seed - 1, 512) if number % 100 else names)],
    )


def bench_lookup(index: KvIndex, prompts: list[Prompt], *, blocks_per_s: int) -> None:
    """Searches, with that many blocks stored (and as many evicted) a second in between."""
    chosen = random.Random(1).sample(prompts, min(1_000, len(prompts)))
    keys = [each.keys() for each in chosen]
    work = [churn(each.engine, number) for number, each in enumerate(chosen)]
    samples, cpu_ns, applied_ns, rest = [], [], [], 0.0
    for number, (each, chain) in enumerate(zip(chosen, keys, strict=True)):
        start, cpu_start = time.perf_counter_ns(), time.thread_time_ns()
        found = index.lookup(chain)
        cpu_ns.append(time.thread_time_ns() - cpu_start)
        samples.append(time.perf_counter_ns() - start)
        assert max(found, key=lambda held: held.blocks).blocks >= len(chain) - TURN_BLOCKS
        rest += blocks_per_s * 0.005  # searches come every 5 ms
        while rest >= 1_024:
            rest -= 1_024
            for events in work[number]:
                cpu_start = time.thread_time_ns()
                index.apply(rank(each.engine), events)
                applied_ns.append(time.thread_time_ns() - cpu_start)
    line = {
        "case": f"lookup, {len(keys[0])} blocks, {len(prompts)} prompts, {blocks_per_s} blocks/s applied",
        "p50_us": percentile_us(samples, 0.5),
        "p99_us": percentile_us(samples, 0.99),
        "cpu_p50_us": percentile_us(cpu_ns, 0.5),
        "cpu_p99_us": percentile_us(cpu_ns, 0.99),
    }
    if applied_ns:
        line |= {"apply_512_cpu_p50_us": percentile_us(applied_ns, 0.5), "apply_cpu_max_us": max(applied_ns) / 1_000}
    print(json.dumps(line), flush=True)


def message(names: list[int], text: bytes, block_count: int) -> bytes:
    """vLLM's bytes of a store."""
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": np.frombuffer(text, np.uint32).tolist(),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * block_count,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return bytes(msgpack.packb([1.0, [event], 0]))


def bench_apply(block_count: int) -> None:
    """Catch-up: messages of so many blocks of one new prompt each, decoded and applied; then told again by others."""
    index = KvIndex(SECRET)
    total = 400_000 if block_count > 8 else 40_000
    payloads = [
        message(hashes(seed, block_count), tokens(seed, block_count), block_count)
        for seed in range(total // block_count)
    ]
    for engine in range(2):
        index.open(rank(engine), Served("m"))
        start, cpu_start = time.perf_counter(), time.thread_time()
        for payload in payloads:
            batch = decode(payload)
            assert isinstance(batch, Batch)
            index.apply(rank(engine), batch.events)
        wall_s, cpu_s = time.perf_counter() - start, time.thread_time() - cpu_start
        name = "new blocks" if not engine else "blocks known from others"
        line = {"case": f"decode and apply, {block_count} blocks a message, {name}"}
        rates = {"blocks_per_s": round(total / wall_s), "blocks_per_cpu_s": round(total / cpu_s)}
        print(json.dumps(line | rates), flush=True)


def main() -> None:
    """Run every case."""
    for block_count in (4, 64, 512):
        bench_apply(block_count)
    prompts = [Prompt(number) for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else PROMPTS)]
    index = KvIndex(SECRET, 4 * 2**30)
    for engine in range(ENGINES):
        index.open(rank(engine), Served("m"))
    start = time.perf_counter()
    fill(index, prompts)
    totals = index.totals()
    references = sum(index.counters(each).live_blocks for each in index.ranks())
    print(
        json.dumps(
            {
                "case": "memory",
                "references": references,
                "distinct_blocks": totals.known_blocks,
                "holder_sets": totals.holder_sets_count,
                "bytes_per_distinct_block": round(totals.size_bytes / totals.known_blocks, 2),
                "filled_in_s": round(time.perf_counter() - start, 1),
            }
        ),
        flush=True,
    )
    assert gc.isenabled()
    for blocks_per_s in (0, 50_000):
        bench_lookup(index, prompts, blocks_per_s=blocks_per_s)


if __name__ == "__main__":
    main()
