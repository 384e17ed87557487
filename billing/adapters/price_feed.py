"""The price schedule of a running process: an immutable snapshot, refreshed in the background.

Owns: the refreshing and its bound. Does not own: books (`books_sql`) or which one holds (`pricing.PriceSchedule`). The
gateway reads `schedule` on every request and never waits for SQL; a book should therefore be added before it holds.
While the database does not answer, the last schedule stays: books never change, so it can only lack new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from billing.adapters import books_sql
from billing.adapters.sql import read
from billing.pricing import PriceSchedule, schedule

_log = logging.getLogger(__name__)
# How late a gateway may learn of a new book. It is one small query, so it can be short.
REFRESH_INTERVAL_S = 5.0


class PriceFeed:
    """Keeps `schedule` current. `start` loads it once and raises what that raises; after that faults are logged."""

    def __init__(self, engine: Engine, interval_s: float = REFRESH_INTERVAL_S) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._mark: tuple[int, int] | None = None
        self._schedule = schedule(())
        self._confirmed_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def schedule(self) -> PriceSchedule:
        """The books as last read."""
        return self._schedule

    @property
    def confirmed_s(self) -> float:
        """When the database last confirmed them (monotonic seconds)."""
        return self._confirmed_s

    def version_at(self, org_id: str, at_ns: int) -> str | None:
        """The version that holds for an org at a Unix time; None: nothing is sold to it then."""
        return self._schedule.version_at(org_id, at_ns)

    def refresh(self) -> bool:
        """Read the books if there are new ones (blocking); True when there were. Raises SQLAlchemyError."""
        with read(self._engine) as connection:
            mark = books_sql.books_mark(connection)
            changed = mark != self._mark
            if changed:
                self._schedule, self._mark = schedule(books_sql.read_books(connection)), mark
        self._confirmed_s = time.monotonic()
        return changed

    async def start(self) -> None:
        """Load the books, then keep them current."""
        await asyncio.to_thread(self.refresh)
        self._task = asyncio.create_task(self._keep_current(), name="price-feed")

    async def stop(self) -> None:
        """End the background work."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _keep_current(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await asyncio.to_thread(self.refresh)
            except sa.exc.SQLAlchemyError as fault:
                _log.warning("The price books could not be read: %s", type(fault).__name__)
