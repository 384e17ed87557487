"""One node in a process of its own: a `KeyFeed` and `authorize`, driven by lines on standard input.

Owns: the small protocol that `test_revocation.py` speaks with it. `watch HEX` follows the key of that digest: each
change of the answer is printed as JSON with the wall clock at which it was seen. `state` prints the feed's state.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict

from pydantic import SecretStr

from controlplane.adapters.key_feed import FeedOptions, KeyFeed
from controlplane.tenancy import Access, Denied, KeyDigest, Scope, authorize

# How often a watched key is looked up: the resolution of what is measured.
_LOOK_S = 0.002


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


async def _watch(feed: KeyFeed, digest: KeyDigest) -> None:
    last = ""
    while True:
        access = Access(digest, Scope.INFERENCE)
        answer = authorize(feed.snapshot, access, time.monotonic(), wall_s=time.time(), grace_s=feed.allowed_age_s)
        now = answer.reason.value if isinstance(answer, Denied) else "allowed"
        if now != last:
            last = now
            _say(digest=digest.hex(), answer=now, at_s=time.time())
        await asyncio.sleep(_LOOK_S)


async def _node(url: str, pepper: bytes, redis_url: str, grace_s: float) -> None:
    feed = KeyFeed(url, pepper, FeedOptions(grace_s=grace_s, redis_url=SecretStr(redis_url)))
    await feed.start()
    _say(started=True)
    tasks: set[asyncio.Task[None]] = set()
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            word, _, rest = line.strip().partition(" ")
            if word == "watch":
                tasks.add(asyncio.create_task(_watch(feed, KeyDigest(bytes.fromhex(rest)))))
            elif word == "state":
                _say(state=asdict(feed.state()))
    finally:
        for task in tasks:
            task.cancel()
        await feed.stop()


if __name__ == "__main__":
    asyncio.run(_node(sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
