"""Keeps a node's snapshot of keys current, so that a request needs no database.

Owns: when the epoch is read, what a failed or late read means, the early wake by Redis, and the state that `/readyz`
and metrics show. Does not own: the queries (`tenancy_changes`), the decision (`tenancy.authorize`), or the prices,
which have a feed of their own (`billing.adapters.price_feed`).

The rules:
- The epoch in SQL is the truth; it is read every `interval_s`. A Redis message only makes the next read come sooner, so
  losing one, or Redis, costs time inside the bound and nothing else.
- A snapshot is as old as the START of the read that confirmed it. While reads fail it grows old, `authorize` lets known
  keys in until it is older than `allowed_age_s`, and then nobody. A key that is not in it never gets in.
- Revocation bound 2 s on every node while the store answers: 0.5 s between reads and at most 1 s without progress in
  one. With a grace of 0 the bound holds also while it does not answer: `allowed_age_s` is never less than the bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psycopg
import redis
import redis.asyncio
import sqlalchemy as sa
from pydantic import SecretStr

from billing.adapters import sql
from controlplane.adapters.key_secret import pepper_mark
from controlplane.adapters.tenancy_changes import NOTHING_READ, Directory, read_changes, read_mark
from controlplane.adapters.tenancy_tx import check_pepper, faults
from controlplane.errors import ConfigError, StoreUnavailable
from controlplane.tenancy import ModelAlias, Snapshot

# Redis channel on which writers say the epoch of a commit. The content is not trusted: it only wakes readers.
CHANNEL = "inferplane:keys"
# What DESIGN 3 promises: a revoked key is out on every node within this while the store answers.
REVOCATION_BOUND_S = 2.0
# Reads that messages may cause per second: a storm of changes must not become a storm of queries.
_MIN_SPACING_S = 0.02
# Pauses between tries to reach Redis again, doubling from the first to the last.
_REDIS_RETRY_S, _REDIS_RETRY_MAX_S = 0.2, 5.0
# Waiting for Redis inside an admin write: a wake that is late helps nobody.
_ANNOUNCE_TIMEOUT_S = 0.2
_ANNOUNCE_PAUSE_S = 5.0
# How long a first load is tried again while the database comes up beside us.
_START_RETRY_S = 0.25

_log = logging.getLogger("inferplane.key_feed")


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """How the feed is paced. `read_timeout_s` bounds a read without progress, not a long load that moves."""

    interval_s: float = 0.5
    grace_s: float = 60.0
    start_timeout_s: float = 15.0
    read_timeout_s: float = 1.0
    redis_url: SecretStr | None = None
    """None or empty: no early wake."""

    @property
    def allowed_age_s(self) -> float:
        """Oldest snapshot that still lets known keys in: what `authorize` takes as `grace_s`."""
        return max(self.grace_s, REVOCATION_BOUND_S, self.interval_s + self.read_timeout_s + 0.5)


@dataclass(frozen=True, slots=True)
class FeedState:
    """The feed as `/readyz` and metrics show it."""

    answering: bool
    """The last read succeeded and none is overdue."""
    epoch: int
    age_s: float
    """Since the start of the last read that confirmed the snapshot; infinite before the first."""
    grace_left_s: float
    """Until known keys are refused; 0 when they are."""
    key_count: int
    fault: str | None
    """Why the last read failed; never a URL or a secret."""
    listening: bool
    """Redis wakes this feed early. False costs at most `interval_s`."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What one read found. `directory` is None when nothing changed."""

    started_s: float
    snapshot: Snapshot
    models: Mapping[str, ModelAlias] | None


class KeyFeed:
    """The snapshot of every live key and of the model names, kept current in the background of one process."""

    def __init__(self, database_url: str, pepper: bytes, options: FeedOptions = FeedOptions()) -> None:
        # An engine of its own: a feed must not queue behind admin calls for a connection.
        self._engine = sql.engine(database_url)
        self._line: Any = None
        self._line_lock = threading.Lock()
        sa.event.listen(self._engine, "connect", self._connected)
        sa.event.listen(self._engine, "close", self._closing)
        self._pepper = pepper
        self._options = options
        self._directory = Directory(pepper)
        self._snapshot = Snapshot(NOTHING_READ, float("-inf"))
        self._models: Mapping[str, ModelAlias] = MappingProxyType({})
        self._fault: str | None = None
        self._listening = False
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="key-feed")
        self._reading: asyncio.Future[_Read] | None = None
        self._progress_s = 0.0
        self._seen = asyncio.Condition()

    @property
    def snapshot(self) -> Snapshot:
        """Every live key. Read it again for each request."""
        return self._snapshot

    @property
    def models(self) -> Mapping[str, ModelAlias]:
        """The model names that tenants may ask for, and what serves them."""
        return self._models

    @property
    def allowed_age_s(self) -> float:
        """Pass this to `authorize` as `grace_s`."""
        return self._options.allowed_age_s

    def state(self) -> FeedState:
        """How the feed is now."""
        age_s = time.monotonic() - self._snapshot.read_at_s
        return FeedState(
            answering=self._fault is None and self._snapshot.epoch != NOTHING_READ,
            epoch=self._snapshot.epoch,
            age_s=age_s,
            grace_left_s=max(0.0, self.allowed_age_s - age_s),
            key_count=len(self._snapshot.keys),
            fault=self._fault,
            listening=self._listening,
        )

    async def start(self) -> None:
        """Load everything, then keep it current until `stop`.

        Raises StoreUnavailable when the store does not answer within `start_timeout_s`, ConfigError when this node's
        pepper is not the cluster's.
        """
        self._loop = asyncio.get_running_loop()
        give_up_s = time.monotonic() + self._options.start_timeout_s
        while not await self._tick(give_up_s):
            if time.monotonic() + _START_RETRY_S >= give_up_s:
                await self.stop()
                raise StoreUnavailable(
                    f"The keys could not be loaded within {self._options.start_timeout_s:g} s. {self._fault}"
                )
            await asyncio.sleep(_START_RETRY_S)
        self._tasks.append(asyncio.create_task(self._follow(), name="key-feed"))
        if self._options.redis_url is not None and self._options.redis_url.get_secret_value():
            self._tasks.append(asyncio.create_task(self._listen(self._options.redis_url), name="key-feed-redis"))

    async def stop(self) -> None:
        """End the background work. A read that hangs is cut, not waited for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._reading is not None:
            self._cut()
            # The read that is cut fails, which is nobody's business now; without a look asyncio would log it.
            self._reading.add_done_callback(lambda cut: cut.cancelled() or cut.exception())
            await asyncio.wait({self._reading}, timeout=self._options.read_timeout_s)
            self._reading = None
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._engine.dispose()

    def wake(self, _epoch: int = 0) -> None:
        """Read soon: something changed. Callable from any thread; also what `KeyStore` takes as `announce`."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def caught_up(self, timeout_s: float) -> bool:
        """Wait for a read that starts from now on; False when none succeeds in time. Read-your-writes on one node."""
        asked_s = time.monotonic()
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s), self._seen:
                await self._seen.wait_for(lambda: self._snapshot.read_at_s >= asked_s)
        except TimeoutError:
            return False
        return True

    # The loop

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.interval_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._tick(None)
            await asyncio.sleep(_MIN_SPACING_S)

    async def _tick(self, give_up_s: float | None) -> bool:
        """One read, or one more wait for a read that is still running. True when the snapshot was confirmed."""
        if self._reading is None:
            self._progress_s = time.monotonic()
            self._reading = asyncio.get_running_loop().run_in_executor(self._reader, self._read, self._snapshot)
        reading = self._reading
        while not reading.done():
            left_s = self._progress_s + self._options.read_timeout_s - time.monotonic()
            if give_up_s is not None:
                left_s = min(max(left_s, 0.01), give_up_s - time.monotonic())
            if left_s <= 0:
                self._cut()
                self._failed(f"The database made no progress for {self._options.read_timeout_s:g} s.")
                return False
            await asyncio.wait({reading}, timeout=left_s)
        self._reading = None
        return await self._finish(reading)

    async def _finish(self, reading: asyncio.Future[_Read]) -> bool:
        try:
            found = reading.result()
        except StoreUnavailable as fault:
            self._failed(str(fault))
            return False
        except ConfigError as fault:
            self._failed(str(fault))
            if not self._tasks:  # start(): waiting would not help
                await self.stop()
                raise
            return False
        except Exception as fault:
            # A row that cannot be understood must not end the feed: the snapshot grows old and is refused in time.
            _log.exception("The key feed could not use what it read.")
            self._failed(f"The keys could not be read ({type(fault).__name__}).")
            return False
        if self._fault is not None:
            _log.warning("The key feed reads again.")
        self._fault = None
        if found.models is not None:
            self._models = found.models
        async with self._seen:
            self._snapshot = found.snapshot
            self._seen.notify_all()
        return True

    def _failed(self, fault: str) -> None:
        if self._fault is None:
            _log.warning("The key feed cannot read: %s", fault)
        self._fault = fault

    # In the reader's thread

    def _read(self, known: Snapshot) -> _Read:
        started_s = time.monotonic()
        with faults(), sql.read(self._engine) as connection:
            self._alive()
            mark = read_mark(connection)
            self._alive()
            check_pepper(mark.pepper_mark, pepper_mark(self._pepper))
            if mark.epoch == self._directory.epoch:
                return _Read(started_s, known.confirmed(started_s), None)
            if mark.epoch < self._directory.epoch:
                # The store went back in time: a restored backup. What we know of later is not true any more.
                _log.warning("The key store went back from epoch %d to %d.", self._directory.epoch, mark.epoch)
                self._directory = Directory(self._pepper)
            since = self._directory.epoch
            changes = read_changes(connection, mark.epoch, since, time.time(), self._alive)
        whole = since == NOTHING_READ
        directory = Directory(self._pepper) if whole else self._directory
        try:
            put, gone = directory.apply(changes, self._alive)
        except Exception:
            # Half applied: the next read starts from nothing.
            self._directory = Directory(self._pepper)
            raise
        self._directory = directory
        start = Snapshot(NOTHING_READ, started_s) if whole else known
        return _Read(started_s, start.changed(mark.epoch, started_s, put, gone), MappingProxyType(directory.aliases))

    def _alive(self) -> None:
        self._progress_s = time.monotonic()

    def _connected(self, driver: Any, _record: object) -> None:
        # The reader is the only user of this engine, so there is one connection at a time.
        with self._line_lock:
            self._line = driver

    def _closing(self, _driver: Any, _record: object) -> None:
        # Called before the socket is closed: its number may belong to another one right after.
        with self._line_lock:
            self._line = None

    def _cut(self) -> None:
        """End a read that hangs: shut its socket down, which wakes the thread with an error. SQLite has no socket."""
        with self._line_lock, contextlib.suppress(OSError, psycopg.Error):
            if not isinstance(self._line, psycopg.Connection):
                return
            with socket.socket(fileno=os.dup(self._line.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)

    # Beside the loop

    async def _listen(self, url: SecretStr) -> None:
        """Wake at each message. Whatever happens to Redis, the interval goes on."""
        pause_s = _REDIS_RETRY_S
        while True:
            try:
                await self._hear(url)
                pause_s = _REDIS_RETRY_S
            except (redis.RedisError, OSError, TimeoutError, ValueError) as fault:
                if self._listening:
                    _log.warning("Redis does not wake the key feed any more (%s).", type(fault).__name__)
            pause_s = _REDIS_RETRY_S if self._listening else min(2 * pause_s, _REDIS_RETRY_MAX_S)
            self._listening = False
            await asyncio.sleep(pause_s)

    async def _hear(self, url: SecretStr) -> None:
        client = redis.asyncio.Redis.from_url(
            url.get_secret_value(), socket_connect_timeout=1.0, health_check_interval=10
        )
        async with client, client.pubsub() as line:
            await line.subscribe(CHANNEL)
            self._listening = True
            self._wake.set()  # what was said while nobody listened
            while True:
                message = await line.get_message(ignore_subscribe_messages=True, timeout=5.0)
                if message is not None:
                    self._wake.set()


class RedisAnnouncer:
    """Tells every feed by Redis that the epoch moved: what `KeyStore` takes as `announce`.

    It never raises and waits at most 0.2 s; after a failure it does not try for 5 s, so that admin writes stay quick.
    """

    def __init__(self, url: SecretStr) -> None:
        self._client = redis.Redis.from_url(
            url.get_secret_value(), socket_connect_timeout=_ANNOUNCE_TIMEOUT_S, socket_timeout=_ANNOUNCE_TIMEOUT_S
        )
        self._not_before_s = 0.0

    def __call__(self, epoch: int) -> None:
        """Publish the epoch."""
        if time.monotonic() < self._not_before_s:
            return
        try:
            self._client.publish(CHANNEL, str(epoch))
        except (redis.RedisError, OSError):
            self._not_before_s = time.monotonic() + _ANNOUNCE_PAUSE_S

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.close()
