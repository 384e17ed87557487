"""How fast a restarted router catches up with an engine's KV events over ZMQ: `python -m tests.bench.bench_kv_events`.

Owns: a publisher with a full replay buffer in another process, a subscriber with an empty index in this one, and what
the catch-up costs: wall time, CPU time of the event loop's thread (decoding, sequence, index), CPU time of the loop's
longest turn. One JSON object per case. Does not own: what the index alone costs (`bench_router_index`) or any limit.
The publisher and libzmq's own thread need a core beside the loop's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time

import numpy as np
import uvloop

from perfmodel.adapters.kv_publisher import KvPublisher, PublisherConfig
from perfmodel.kv_cache import BlockStored
from router.adapters.kv_subscriber import KvSubscriber
from router.endpoints import Endpoint
from router.kv_index import KvIndex, RankId, Served

BLOCK_TOKENS = 16
# Messages and blocks of each: steps of mixed traffic, of many decodes, and of full prefill chunks of 8,192 tokens.
CASES = ((10_000, 32), (10_000, 8), (1_000, 512))
# Messages of one chain of blocks: a session's turns.
_CHAIN_COUNT = 50
RANK = RankId("e", "1", 0)


async def publish(message_count: int, block_count: int) -> None:
    """Fill a replay buffer with distinct blocks, say where it is, and serve it."""
    publisher = KvPublisher(PublisherConfig("127.0.0.1", "kv", buffer_steps=message_count), time.time)
    dice = np.random.default_rng(1)
    parent: int | None = None
    for number in range(message_count):
        hashes = tuple(dice.integers(1, 2**63, block_count).tolist())
        tokens = tuple(dice.integers(0, 128_000, block_count * BLOCK_TOKENS).tolist())
        if number % _CHAIN_COUNT == 0:
            parent = None
        publisher.publish((BlockStored(hashes, parent, tokens, BLOCK_TOKENS, (None,) * block_count),))
        parent = hashes[-1]
    print(f"{publisher.endpoint}?replay={publisher.replay_endpoint}", flush=True)
    await asyncio.sleep(600)


async def _no_answer(endpoint: Endpoint, path: str) -> str:
    return f"{endpoint.endpoint_id} is not asked for {path}"


async def catch_up(address: str, expected_blocks: int) -> dict[str, float]:
    """Hear the publisher until the index has seen so many blocks."""
    index = KvIndex(b"a secret of the benchmark")
    subscriber = KvSubscriber(index, lambda endpoint: Served("m"), _no_answer)
    subscriber.start()
    loop = asyncio.get_running_loop()
    longest_s, beat_s = 0.0, time.thread_time()

    def beat() -> None:
        nonlocal longest_s, beat_s
        now_s = time.thread_time()  # what other processes take is not the loop's
        longest_s, beat_s = max(longest_s, now_s - beat_s), now_s
        if index.ranks() and index.counters(RANK).stored_blocks >= expected_blocks:
            done.set()
        else:
            loop.call_soon(beat)

    done = asyncio.Event()
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    subscriber.hear([Endpoint("e", "http://127.0.0.1:9", frozenset({"m"}), kv_events=address, incarnation="1")])
    loop.call_soon(beat)
    await done.wait()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    await subscriber.stop()
    return {
        "wall_s": round(wall_s, 3),
        "loop_cpu_s": round(cpu_s, 3),
        "blocks_per_s": round(expected_blocks / wall_s),
        "blocks_per_cpu_s": round(expected_blocks / cpu_s),
        "longest_turn_cpu_ms": round(longest_s * 1e3, 2),
    }


def main() -> None:
    """Run every case, each with a publisher of its own."""
    for messages, blocks in CASES:
        command = [sys.executable, "-m", "tests.bench.bench_kv_events", str(messages), str(blocks)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
            assert publisher.stdout is not None
            address = publisher.stdout.readline().strip()
            gc.collect()
            figures = uvloop.run(catch_up(address, messages * blocks))
            publisher.kill()
        print(json.dumps({"messages": messages, "blocks_of_each": blocks, **figures}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(publish(int(sys.argv[1]), int(sys.argv[2])))
    else:
        main()
