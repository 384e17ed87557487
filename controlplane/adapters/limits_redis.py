"""Limits in Redis or Valkey (>= 6.2): the port over leases whose store is one Lua script.

Owns: the connection with its deadlines, the script's call and its arguments, the background report (every 50 ms when
there is something to say), and noticing that the server restarted. Does not own: any rule (`rate_limit`, `leases`; the
script is `rate_limit.Buckets` in Lua) or what happens to a tenant while the store is gone (`admission`).

**Keys.** All keys carry one hash tag, so a call is legal in Redis Cluster and every limit lives on one primary: a limit
row does not name its org, and a call may touch rows of a key, a project and an org. Leases keep the call rate low.
Every bucket key expires when it would be full again. `maxmemory-policy` must be `noeviction`: an evicted bucket is a
full one; `state().detail` says so otherwise. The server's clock must be slewed, not stepped.

**A restart of the server** may have lost admissions (appendonly everysec: up to 1 s; a snapshot: more; a failover to a
replica: what was not replicated). The script compares the run id with the one stored; a new one empties every bucket,
which then fills at its rate 2 s later: the bound holds, at the price of refusals right after a restart. An embedded
server that was stopped cleanly, after its gateways, goes on with what is in it (`store_life`, `clean_stop`). A server
that no living process ever used starts with full buckets; if it has just started, processes that knew an earlier life
get 1 s to say so first. What this cannot see: the server without persistence *and* every gateway process ending at
once.

**Threads.** Calls are made by the blocking client in a few threads. In the event loop one call is half a dozen steps,
each behind whatever else the loop has to do: on a saturated gateway that took longer than the deadline, and a store
that answers in half a millisecond seemed gone. It also costs half as much CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson
import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from controlplane import rate_limit
from controlplane.adapters.clean_stop import FOLLOWS_KEY
from controlplane.leases import Leases
from controlplane.rate_limit import (
    LEASE_WAIT_S,
    NO_LIMITS,
    SLOTS,
    Admitted,
    Ask,
    Attempt,
    BucketReply,
    Cost,
    RefusalReason,
    Refused,
    Reply,
    StoreState,
    Ticket,
    axis_of,
)
from controlplane.tenancy import Limit

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

# The script beside this file; its SHA-1 is how Redis names it.
_SCRIPT = Path(__file__).with_suffix(".lua").read_bytes()
_SHA = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()
# One hash tag for all keys: see the module's note on keys. `clean_stop.FOLLOWS_KEY` has the same.
_TAG = "{inferplane-limits}:"
# Values per bucket in the script's reply, after its header of four.
_REPLY_FIELDS = 6
_REPLY_HEADER = 4
# Statuses of the script.
_DECIDED, _STALE, _OPENING = 0, 1, 2
# An attempt may be made again after the connection broke or the server was found restarted, within its deadline.
_TRIES = 3
# A serial client may arrive here before the slot or tokens of its last request are back from another process, which
# tells of them at once: a refusal for want of them is looked at again after these waits, together
# `leases.REPORT_WAIT_S`.
_LOOK_AGAIN_S = (0.004, 0.016, 0.080)
# Rounds of a report: 32 * 64 leases in one interval; the rest follows in the next.
_REPORTS_PER_ROUND = 32


@dataclass(frozen=True, slots=True)
class LimitsOptions:
    """Tuning of `RedisLimits`; the defaults fit production."""

    deadline_s: float = 0.8
    """Of one call. Must stay below `leases.LEASE_LOCAL_NS` (0.9 s): what a reply grants must still be good."""
    interval_s: float = 0.05
    """Of the background report: settlements reach the store within two of these."""
    heartbeat_s: float = 0.5
    """The store hears of this process at least this often."""
    opening_s: float = 1.0
    """How long a server that has just started waits for processes that knew an earlier life of it."""
    connections: int = 8
    policy: str = "refuse"
    """Named in `state()`: what `admission` does while the store is gone."""


class _StaleError(Exception):
    """The server is not in the life this process believes in; nothing was applied."""


class _OpeningError(Exception):
    """The server has just started and admits nobody yet; nothing was applied."""


class RedisLimits:
    """`LimitsPort` over Redis. `start` before use, `aclose` at the end; one event loop owns it.

    `process_id` must be new for every process start: a report number is applied once per id.
    """

    def __init__(
        self,
        url: str,
        process_id: str,
        clock: Callable[[], int] = time.monotonic_ns,
        options: LimitsOptions | None = None,
    ) -> None:
        self._options = options or LimitsOptions()
        self._clock = clock
        self._process_id = process_id
        self._leases = Leases(process_id)
        self._redis = _client(url, self._options)
        self._threads = ThreadPoolExecutor(self._options.connections, thread_name_prefix="limits-redis")
        self._run = ""
        self._memory_policy = "noeviction"
        self._uptime_s = 0
        self._met_before = False
        self._met_other = False
        self._identifying = asyncio.Lock()
        self._asked: dict[str, asyncio.Future[None]] = {}
        """The latest call under way per first limit of a request; those who come meanwhile wait for its grant."""
        self._looking: set[str] = set()
        """Limits for which a refused request looks again."""
        self._wake = asyncio.Event()
        self._stopping = False
        self._loop_task: asyncio.Task[None] | None = None
        self._last_call_ns = 0
        self._answering = False
        self._since_ns = clock()
        self._detail = "not asked yet"

    # ---- the port

    def try_admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | None:
        """From leases held by this process, without I/O; None: `admit`."""
        return self._leases.try_spend(limits, cost, now_ns) if limits else Admitted(Ticket(cost, []), NO_LIMITS)

    async def admit(self, limits: tuple[Limit, ...], cost: Cost, now_ns: int) -> Admitted | Refused:
        """One atomic attempt at the store, within the deadline. Never raises for a store that is gone.

        Where what is missing may come back at any moment, one request at a time per limit looks again for 0.1 s.
        """
        if not limits:
            return Admitted(Ticket(cost, []), NO_LIMITS)
        decision = await self._admit_in_turn(limits, cost)
        if isinstance(decision, Admitted) or not self._leases.may_come_back(decision):
            return decision
        return await self._look_again(limits, cost, decision)

    async def _look_again(self, limits: tuple[Limit, ...], cost: Cost, refused: Refused) -> Admitted | Refused:
        assert refused.limit is not None, "only what a limit refused may come back"
        limit_id = refused.limit.limit_id
        if limit_id in self._looking:
            return refused  # more than one at once is no serial client, and a refused crowd must not load the store
        self._looking.add(limit_id)
        try:
            for wait_s in _LOOK_AGAIN_S:
                await asyncio.sleep(wait_s)
                spare = self._leases.try_spend(limits, cost, self._clock())
                decision = spare or await self._admit_in_turn(limits, cost)
                if isinstance(decision, Admitted):
                    return decision
                if decision.reason is RefusalReason.STORE_UNAVAILABLE:
                    return refused
                refused = decision
                if not self._leases.may_come_back(refused):
                    break
            return refused
        finally:
            self._looking.discard(limit_id)

    async def _admit_in_turn(self, limits: tuple[Limit, ...], cost: Cost) -> Admitted | Refused:
        asked = self._asked.get(limits[0].limit_id)
        if asked is not None:
            # Somebody is asking for the same limits, and brings back more than one request's worth as a rule.
            await asyncio.wait({asked}, timeout=self._options.deadline_s)
            spare = self._leases.try_spend(limits, cost, self._clock())
            if spare is not None:
                return spare
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[limits[0].limit_id] = mine
        try:
            return await self._admit(limits, cost)
        finally:
            mine.set_result(None)
            if self._asked.get(limits[0].limit_id) is mine:
                del self._asked[limits[0].limit_id]

    async def _admit(self, limits: tuple[Limit, ...], cost: Cost) -> Admitted | Refused:
        refused = Refused(RefusalReason.STORE_UNAVAILABLE, None, 0, 0, LEASE_WAIT_S, NO_LIMITS)
        try:
            async with asyncio.timeout(self._options.deadline_s):
                for _ in range(_TRIES):
                    decision = await self._try(limits, cost)
                    if self._leases.urgent:
                        self._wake.set()
                    if decision is not None:
                        return decision
        except (TimeoutError, OSError, RedisError, _OpeningError) as fault:
            self._note(fault)
        return refused

    def settle(self, ticket: Ticket, used: Cost, now_ns: int) -> None:
        """Once per ticket; the store hears of it in the background."""
        self._leases.settle(ticket, used, now_ns)
        if self._leases.urgent:
            self._wake.set()

    def state(self) -> StoreState:
        """Whether the store answers, since when, and what is wrong with it."""
        return StoreState(self._answering, self._since_ns, self._options.policy, self._detail)

    # ---- life

    async def start(self) -> None:
        """Meet the store and begin reporting. A store that does not answer is not an error: it is asked again."""
        for _ in range(2 + int(self._options.opening_s / self._options.interval_s)):
            if await self._heartbeat() or self._detail != "opening":
                break
            await asyncio.sleep(self._options.interval_s)
        self._loop_task = asyncio.create_task(self._report_for_ever(), name="limits-report")

    async def aclose(self) -> None:
        """Give back what is unspent, tell what was spent, and leave."""
        self._stopping = True
        self._wake.set()
        if self._loop_task is not None:
            await self._loop_task
        self._leases.give_all_back(self._clock())
        if await self._round():
            with contextlib.suppress(TimeoutError, OSError, RedisError):
                async with asyncio.timeout(self._options.deadline_s):
                    await self._call(lambda: self._redis.zrem(_TAG + "processes", self._process_id))
                    await self._call(lambda: self._redis.hdel(_TAG + "reports", self._process_id))
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._redis.close()

    async def flush(self, now_ns: int) -> None:
        """Tell the store what is due now instead of at the next interval."""
        await self._round()

    # ---- one attempt

    async def _try(self, limits: tuple[Limit, ...], cost: Cost) -> Admitted | Refused | None:
        """None: nothing was decided, try again."""
        plan = self._leases.plan(limits, cost, self._clock())
        if isinstance(plan, Refused):
            return plan
        sent_ns = self._clock()
        try:
            reply = await self._ask(plan.attempt)
        except _StaleError:
            self._leases.abandon(plan)
            await self._identify()
            return None
        except RedisConnectionError as fault:  # a pooled connection to a server that is gone; it may be back
            self._leases.abandon(plan)
            self._note(fault)
            return None
        except BaseException:
            self._leases.abandon(plan)
            raise
        return self._leases.merge(plan, reply, sent_ns, self._clock())

    async def _ask(self, attempt: Attempt) -> Reply:
        return self._decoded(await self._run_script(attempt))

    async def _run_script(self, attempt: Attempt) -> list[int]:
        keys = self._keys(attempt.asks)
        arguments = self._arguments(attempt, just_read=False)
        try:
            return await self._call(lambda: cast(list[int], self._redis.evalsha(_SHA, len(keys), *keys, *arguments)))
        except NoScriptError:
            raise _StaleError from None

    async def _call(self, work: Callable[[], T]) -> T:
        """Run a call of the blocking client in a thread; its socket has the deadline."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _decoded(self, raw: list[int]) -> Reply:
        status, at_us, processes, admitted = raw[:_REPLY_HEADER]
        if status == _STALE:
            raise _StaleError
        self._last_call_ns = self._clock()
        if status == _OPENING:
            raise _OpeningError
        self._note(None)
        rows = (raw[at : at + _REPLY_FIELDS] for at in range(_REPLY_HEADER, len(raw), _REPLY_FIELDS))
        return Reply(admitted == 1, processes, tuple(_bucket(row) for row in rows), at_us)

    async def _identify(self) -> None:
        """Learn which life of the server this is, and tell the script so on the same connection."""
        before = self._run
        async with self._identifying:
            if self._run != before:
                return  # another request has just done it
            raw = await self._call(self._read_identity)
            if self._met_before:
                _LOG.warning("The store of limits restarted or lost its data: leases are void, buckets start empty.")
                self._leases.store_lost()
            self._met_before = True
            policy = self._memory_policy
            self._detail = "" if policy == "noeviction" else f"maxmemory-policy is {policy}, expected noeviction"
            self._decoded(raw)

    def _read_identity(self) -> list[int]:
        """On one connection: which life the server is in, and the script told so. In a thread."""
        with self._redis.client() as connection:
            server = cast(dict[str, Any], connection.info("server"))
            memory = cast(dict[str, Any], connection.info("memory"))
            run = str(server["run_id"])
            self._uptime_s = int(server["uptime_in_seconds"])
            self._met_other = self._met_other or (self._met_before and run != self._run)
            self._run = run
            self._memory_policy = str(memory.get("maxmemory_policy", "noeviction"))
            keys = self._keys(())
            arguments = self._arguments(Attempt(self._process_id, 0, ()), just_read=True)
            return cast(list[int], connection.eval(_SCRIPT.decode(), len(keys), *keys, *arguments))

    def _keys(self, asks: Iterable[Ask]) -> list[str]:
        own = (_TAG + "store", _TAG + "processes", _TAG + "reports", FOLLOWS_KEY)
        return [*own, *(f"{_TAG}b:{ask.limit.limit_id}" for ask in asks)]

    def _arguments(self, attempt: Attempt, *, just_read: bool) -> list[str | int | bytes]:
        rows = [
            (
                axis_of(limit) == SLOTS, limit.amount, limit.period_s * 1_000_000, limit.burst, lease_id,
                need, want, spent, returned, debt,
                ",".join([f"{generation}:{tokens}" for generation, tokens in credits]) if credits else "",
                held, renew,
            )
            for limit, lease_id, need, want, spent, returned, debt, credits, held, renew in attempt.asks
        ]  # fmt: skip
        return [
            self._run, int(just_read), int(self._met_before), int(self._met_other), self._uptime_s,
            self._process_id, attempt.sequence, int(self._options.opening_s * 1e6),
            rate_limit.LEASE_TTL_US, rate_limit.SLOT_TTL_US, rate_limit.RESTART_US, rate_limit.PROCESS_TTL_US,
            rate_limit.FORGET_US, rate_limit.SHARE_DIVISOR, rate_limit.MAX_POOLS, orjson.dumps(rows),
        ]  # fmt: skip

    # ---- the background

    async def _report_for_ever(self) -> None:
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.interval_s):
                    await self._wake.wait()
            self._wake.clear()
            silent_s = (self._clock() - self._last_call_ns) / 1e9
            if await self._round() and silent_s >= self._options.heartbeat_s:
                await self._heartbeat()

    async def _round(self) -> bool:
        """Send every report that is due; False: the store did not answer."""
        self._leases.begin_round()
        self._leases.forgotten()
        for _ in range(_REPORTS_PER_ROUND):
            report = self._leases.report(self._clock())
            if report is None:
                break
            sent_ns = self._clock()
            try:
                async with asyncio.timeout(self._options.deadline_s):
                    reply = await self._ask(report.attempt)
            except (TimeoutError, OSError, RedisError, _OpeningError, _StaleError) as fault:
                self._leases.report_failed(report)
                await self._recover(fault)
                return False
            self._leases.reported(report, reply, sent_ns)
        return True

    async def _heartbeat(self) -> bool:
        try:
            async with asyncio.timeout(self._options.deadline_s):
                self._leases.heard(await self._ask(Attempt(self._process_id, 0, ())))
        except (TimeoutError, OSError, RedisError, _OpeningError, _StaleError) as fault:
            return await self._recover(fault)
        return True

    async def _recover(self, fault: Exception) -> bool:
        """After a failed call: a stale identity is read again, anything else waits for the next interval."""
        if not isinstance(fault, _StaleError):
            self._note(fault)
            return False
        try:
            async with asyncio.timeout(self._options.deadline_s):
                await self._identify()
        except (TimeoutError, OSError, RedisError, _OpeningError, _StaleError) as again:
            self._note(again)
            return False
        return True

    def _note(self, fault: Exception | None) -> None:
        """Keep `state` current. Only the fault's class is kept: its text may name an address."""
        answering = fault is None
        if fault is not None:
            self._detail = "opening" if isinstance(fault, _OpeningError) else type(fault).__name__
        elif not self._answering:
            self._detail = self._detail if self._detail.startswith("maxmemory") else ""
        if answering != self._answering:
            self._answering, self._since_ns = answering, self._clock()
            _LOG.log(logging.INFO if answering else logging.WARNING, "The store of limits %s%s.",
                     "answers" if answering else "does not answer: ", self._detail)  # fmt: skip


def _bucket(row: list[int]) -> BucketReply:
    level, fraction, out, granted, generation, known = row
    return BucketReply(level, fraction, out, granted, generation, known == 1)


def _client(url: str, options: LimitsOptions) -> redis.Redis:
    """No retries below us: a call that is sent twice would be granted twice."""
    pool = redis.BlockingConnectionPool.from_url(
        url, max_connections=options.connections, timeout=options.deadline_s, retry=Retry(NoBackoff(), 0), protocol=2,
        socket_timeout=options.deadline_s, socket_connect_timeout=options.deadline_s, health_check_interval=0,
    )  # fmt: skip
    return redis.Redis.from_pool(pool)
