"""How long the router takes: `python -m tests.bench.bench_router`. Prints one JSON object per case, times in us.

Owns: the measurements that docs and module docstrings quote (hashing, a pick with eight endpoints, one request's news
between siblings). Does not own: any limit; a figure belongs to the machine and Python that it was taken on.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from functools import partial

from router.adapters.siblings import Message, decode, encode, split
from router.blocks import BlockHasher
from router.decision import RouteDecision, RouteRequest
from router.endpoints import Ending, EngineSpeed, Finish
from router.route import Router, RouterConfig
from tests.fakes.fleet import MODEL, endpoint

# Prompt sizes of the design's targets: a short chat, and 119,000 tokens at 4 bytes.
SIZES_BYTES = (430, 476_000)

SPEED = EngineSpeed(10_000.0, 0.030, 0.020)


def percentile_us(samples: list[int], share: float) -> float:
    """A percentile of nanosecond samples."""
    return round(sorted(samples)[int(len(samples) * share)] / 1_000, 2)


def show(case: str, samples: list[int]) -> None:
    """One line of output."""
    print(json.dumps({"case": case, "p50_us": percentile_us(samples, 0.5), "p99_us": percentile_us(samples, 0.99)}))


def timed(action: Callable[[], object]) -> int:
    """Nanoseconds of one call."""
    start = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - start


def bench_hash() -> None:
    """The chain of one prompt."""
    hasher = BlockHasher(b"secret")
    for size in (*SIZES_BYTES, 480_000):
        parts = (memoryview(os.urandom(size)),)
        show(f"hash {size} B", [timed(partial(hasher.chain, MODEL, "salt", parts)) for _ in range(1_000)])


def bench_route() -> None:
    """A pick among eight idle endpoints, and the calls that end it."""
    for size in SIZES_BYTES:
        for turn_bytes, kind in ((0, "new prompts"), (3_500, "a session's next turns")):
            router, hasher = Router(RouterConfig()), BlockHasher(b"secret")
            router.set_endpoints([endpoint(f"e{number}", SPEED) for number in range(8)], 0.0)
            text, picks, ends = os.urandom(size), [], []
            for number in range(500):
                text = text + os.urandom(turn_bytes) if turn_bytes else os.urandom(size)
                request = RouteRequest(MODEL, hasher.chain(MODEL, "salt", (text,)), len(text) // 4, 256)
                now_s = number / 20
                start = time.perf_counter_ns()
                decision = router.route(request, now_s, random.random)
                picks.append(time.perf_counter_ns() - start)
                assert isinstance(decision, RouteDecision)
                ends.append(timed(partial(end, router, decision, now_s)))
            show(f"route {size} B, {kind}", picks)
            show(f"sent + first_token + finished, {size} B, {kind}", ends)


def end(router: Router, decision: RouteDecision, now_s: float) -> None:
    """What the request path calls after a pick."""
    router.sent(decision.ticket, now_s)
    router.first_token(decision.ticket, now_s)
    tokens = decision.ticket.input_tokens
    router.finished(decision.ticket, Finish(Ending.COMPLETED, decision.predicted_cached_tokens, tokens, 200), now_s)


def bench_news() -> None:
    """One request's share of a round of news: told by one process, heard by another, without the sockets."""
    for size, per_round in ((430, 1), (430, 6), (476_000, 1)):
        ours, theirs = (Router(RouterConfig(share=True)) for _ in range(2))
        hasher, told, heard = BlockHasher(b"secret"), [], []
        for router in (ours, theirs):
            router.set_endpoints([endpoint(f"e{number}", SPEED) for number in range(8)], 0.0)
        for number in range(300):
            now_s = number / 100
            for _ in range(per_round):
                chain = hasher.chain(MODEL, "salt", (os.urandom(size),))
                decision = ours.route(RouteRequest(MODEL, chain, size // 4, 256), now_s, random.random)
                assert isinstance(decision, RouteDecision)
                end(ours, decision, now_s)
            start = time.perf_counter_ns()
            data = [encode(Message("a", "a.sock", part)) for part in split(ours.take_news(now_s))]
            middle = time.perf_counter_ns()
            for each in data:
                message = decode(each)
                assert message is not None
                theirs.hear("a", message.news, now_s)
            told.append((middle - start) // per_round)
            heard.append((time.perf_counter_ns() - middle) // per_round)
        show(f"news told, {size} B, {per_round} a round", told)
        show(f"news heard, {size} B, {per_round} a round", heard)


def main() -> None:
    """Run every case."""
    bench_hash()
    bench_route()
    bench_news()


if __name__ == "__main__":
    main()
