"""Explained routing decisions, kept for an hour where every process of the cluster can read them.

Owns: the Redis keys of decision records and their expiry. Does not own: what is in a record (`router.route`), or who
may read it (`admin_http`). Records hold counts, seconds and endpoint names, never content. Only requests that asked to
be explained are kept, so this is off the hot path; when Redis does not answer, a record is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import orjson
import redis.asyncio
from redis.exceptions import RedisError

# How long a decision can be asked for. An operator looks at it minutes after the request.
_KEEP_S = 3_600
# Records waiting to be written; beyond this the oldest is dropped.
_QUEUE_COUNT = 1_000
# Deadline of one Redis call.
_CALL_TIMEOUT_S = 1.0


class RedisDecisions:
    """Writes decision records in the background and reads them back. Mutable: a bounded queue."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._queue: deque[tuple[str, bytes]] = deque(maxlen=_QUEUE_COUNT)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.dropped_count = 0

    def put(self, request_id: str, org_id: str, record: Mapping[str, Any]) -> None:
        """Keep a record. Never blocks."""
        if len(self._queue) == _QUEUE_COUNT:
            self.dropped_count += 1
        self._queue.append((_key(request_id), orjson.dumps({"org_id": org_id, "record": record})))
        self._wake.set()

    async def get(self, request_id: str, org_id: str | None) -> Mapping[str, Any] | None:
        """The record of a request; with `org_id`, only if it is that org's. None when unknown or expired.

        Raises RedisError or TimeoutError when the store does not answer.
        """
        await self._drain()
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            data = await self._redis.get(_key(request_id))
        if data is None:
            return None
        kept = orjson.loads(data)
        if org_id is not None and kept["org_id"] != org_id:
            return None
        record: Mapping[str, Any] = kept["record"]
        return record

    async def start(self) -> None:
        """Begin writing in the background."""
        self._task = asyncio.create_task(self._run(), name="decisions")

    async def stop(self) -> None:
        """Write what is queued, within the call deadline, and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._drain()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._drain()

    async def _drain(self) -> None:
        while self._queue:
            key, data = self._queue.popleft()
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    await self._redis.set(key, data, ex=_KEEP_S)
            except (RedisError, OSError, TimeoutError):
                self.dropped_count += 1
                return


def _key(request_id: str) -> str:
    return f"inferplane:decision:{request_id}"
