"""A clean stop of the embedded Redis: brought about, proven, remembered once, and told to the run that follows.

Owns: the mark in the server's folder and the key under which the next run finds it. Does not own: what the store of
limits makes of it (`store_life`), nor the server's process (`embedded`). Why: without it every restart must count as a
loss of memory, and a limit of 3 a minute would admit its first request only after 20 s.

**What a mark says** (overshoot depends on it): that run ended, and every write of it is on the disk. `prepare` makes it
true: it forbids writes, then waits until the server has handed all it wrote to the system; after the process has ended
`leave` flushes its files to the disk, and only then writes the mark, whole or not at all. A crash anywhere before that
leaves no mark. `take` removes the mark, on the disk, before the next server is started: no later start can find it, not
even if everything the next run writes is lost. The caller holds the folder's lock over `prepare` to `leave`, and over
`take` to `tell`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

from billing.adapters.disk import flush
from controlplane.store_life import NOT_CLEAN, CleanStop

FOLLOWS_KEY = "{inferplane-limits}:follows"
"""Hash {run, after, stopped_us, doubt}: run `run` follows the clean stop of run `after` (empty: no clean one); doubt 1:
some run before did not end cleanly. Read by `limits_redis.lua`, hence its hash tag. Never removed: it says nothing to
another run, and a doubt stays."""
# The server's files, and what a server before version 7 has instead.
_FILES, _OLD_FILE = "appendonlydir", "appendonly.aof"
# Beside the server's files.
_MARK = "clean-stop.json"
# Writes stay forbidden for longer than any stop takes.
_FORBIDDEN_MS = 60_000
# The server hands what it wrote to the system between two commands, at once as a rule.
_POLL_S = 0.005


def prepare(client: redis.Redis, deadline_s: float) -> CleanStop | None:
    """Forbid writes (for a minute), and wait until the append-only file holds all there were. None: it does not, or
    the server does not answer. The server must be ended next."""
    until_s = time.monotonic() + deadline_s
    try:
        client.client_pause(_FORBIDDEN_MS, all=False)
        seconds, micros = client.time()
        run_id = str(client.info("server")["run_id"])
        while not _is_written(client.info("persistence")):
            if time.monotonic() > until_s:
                return None
            time.sleep(_POLL_S)
    except (redis.RedisError, OSError):
        return None
    return CleanStop(run_id, seconds * 1_000_000 + micros)


def _is_written(persistence: dict[str, Any]) -> bool:
    """Whether the append-only file is on, whole, and not behind."""
    return (
        persistence.get("aof_enabled") == 1
        and persistence.get("aof_last_write_status") == "ok"
        and persistence.get("aof_buffer_length") == 0
        and persistence.get("loading") == 0
    )


def leave(folder: Path, stop: CleanStop) -> bool:
    """Flush the files of the ended server to the disk, and leave the mark. False: the disk refused, there is none."""
    fresh = folder / f"{_MARK}.new"
    try:
        for root, _, names in os.walk(folder / _FILES):
            for name in names:
                flush(Path(root) / name)
            flush(Path(root))
        if (folder / _OLD_FILE).exists():
            flush(folder / _OLD_FILE)
        fresh.write_text(json.dumps(asdict(stop)))
        flush(fresh)
        fresh.replace(folder / _MARK)
        flush(folder)
    except OSError:
        return False
    return True


def take(folder: Path) -> CleanStop | None:
    """The mark of the last stop, removed from the disk for good; `NOT_CLEAN` where a server was without leaving one;
    None where there never was one. Raises OSError when it cannot be removed: then no server may be started here."""
    path = folder / _MARK
    unmarked = NOT_CLEAN if (folder / _FILES).exists() or (folder / _OLD_FILE).exists() else None
    try:
        fields = path.read_bytes()
    except FileNotFoundError:
        return unmarked
    path.unlink()
    flush(folder)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        mark = json.loads(fields)
        return CleanStop(str(mark["run_id"]), int(mark["stopped_us"]))
    return unmarked


def tell(client: redis.Redis, stop: CleanStop) -> None:
    """Tell those who will use the server that its run follows `stop`. If this fails a restart counts as a loss."""
    with contextlib.suppress(redis.RedisError, OSError):
        run_id = str(client.info("server")["run_id"])
        before = client.hget(FOLLOWS_KEY, "doubt")
        doubt = int(stop.doubt or before in ("1", b"1"))
        times: list[str | int] = ["stopped_us", stop.stopped_us, "doubt", doubt]
        client.hset(FOLLOWS_KEY, items=["run", run_id, "after", stop.run_id, *times])
