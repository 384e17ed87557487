"""The whole house as real processes that can be killed: `serve` with two gateways and a shipper, engines, stores.

Owns: starting, finding, killing (always SIGKILL) and starting again; leaving nothing behind. Does not own: when to kill
(`plan`), the load (`client`) or what must hold afterwards (`check`). What a supervisor of the machine would do for
`serve` (start it again until it runs) this module does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from billing.adapters.shipper_status import ShipperStatus, read_status
from billing.adapters.spool_files import spool_folders
from controlplane.adapters.embedded import EmbeddedRedis
from tests.faults.client import Door
from tests.faults.plan import Target
from tests.faults.truth import EngineSaw, read_engine_log
from tests.services import free_tcp_port

# Children of `serve`, which starts them again.
_CHILDREN = frozenset({Target.GATEWAY, Target.BOTH_GATEWAYS, Target.SHIPPER, Target.GATEWAY_AND_SHIPPER})
_ROOT = Path(__file__).parents[2]
_ME = [sys.executable, "-m", "controlplane"]
GATEWAYS = 2
ENGINES = ("engine-1", "engine-2")
# One engine tells usage in each chunk, the other only at the end.
_KINDS = {"engine-1": "vllm", "engine-2": "openai"}
# Deadlines short enough that a stalled engine does not hold a run up; nobody balances load, so no drain lead.
ENVIRONMENT = {
    "INFERPLANE_DRAIN_LEAD_S": "0",
    "INFERPLANE_DRAIN_TIMEOUT_S": "2",
    "INFERPLANE_FIRST_BYTE_TIMEOUT_S": "4",
    "INFERPLANE_IDLE_TIMEOUT_S": "2",
    "INFERPLANE_TOTAL_TIMEOUT_S": "15",
    "INFERPLANE_ENDPOINTS_POLL_S": "0.2",
    "INFERPLANE_FEED_INTERVAL_S": "0.25",
    "INFERPLANE_ACCESS_LOG": "",
    "INFERPLANE_NODE": "node-1",
}
# A start of the node takes 2 to 4 s of two idle cores.
_START_DEADLINE_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's files are, and which database it uses."""

    folder: Path
    sql_url: str
    door: Door
    embedded_sql: bool
    """The database is the SQLite file of the data folder."""

    @property
    def data_dir(self) -> Path:
        """The node's folder."""
        return self.folder / "data"

    @property
    def spool_dir(self) -> Path:
        """The node's spool."""
        return self.data_dir / "spool"


class Database(Protocol):
    """A database server that can be killed."""

    def kill(self) -> None:
        """SIGKILL to all of its processes; returns when they are gone."""

    def start(self) -> None:
        """Start it again on the same files; returns when it answers."""


@dataclass(slots=True)
class Stack:
    """Mutable: the processes of a run."""

    place: Place
    database: Database | None = None
    """None: an SQLite file, which has no process."""
    kill_count: int = 0
    """SIGKILLs so far; `everything` counts as one."""
    gateway_kills_ns: list[int] = field(default_factory=list)
    engine_kills: list[tuple[str, int]] = field(default_factory=list)
    """(name, Unix ns)."""
    began_s: float = field(default_factory=time.monotonic)
    said: list[str] = field(default_factory=list)
    """What was done and found, with times, for the report of a failed run."""
    _serve: subprocess.Popen[bytes] | None = None
    _worker: subprocess.Popen[bytes] | None = None
    _engines: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _engine_ports: dict[str, int] = field(default_factory=dict)
    _engine_logs: dict[str, list[Path]] = field(default_factory=dict)
    _redis: EmbeddedRedis | None = None
    _returns: list[asyncio.Task[None]] = field(default_factory=list)

    # -- start ---------------------------------------------------------------------------------------------------------

    async def start(self, *, worker: bool) -> None:
        """Everything, ready to serve."""
        self._redis = EmbeddedRedis(self.place.folder / "redis")
        await asyncio.to_thread(self._redis.start)
        for name in ENGINES:
            self._start_engine(name)
        endpoints = [
            {"id": name, "url": f"http://127.0.0.1:{self._engine_ports[name]}", "model": "m", "kind": _KINDS[name]}
            for name in ENGINES
        ]
        (self.place.folder / "engines.json").write_text(json.dumps(endpoints))
        if worker:
            self._start_worker()
        await self.serve_until_ready()

    async def serve_until_ready(self) -> None:
        """Start `serve`, again and again where it cannot start yet, until the node is ready."""
        until_s = time.monotonic() + _START_DEADLINE_S
        self._start_serve()
        while not await self._is_ready():
            assert time.monotonic() < until_s, f"the node is not ready:\n{self.last_words()}"
            assert self._serve is not None
            if self._serve.poll() is not None:  # the port is held by children that drain, or the database is down
                self.say(f"serve ended with {self._serve.returncode}; starting it again")
                await asyncio.sleep(0.2)
                self._start_serve()
            await asyncio.sleep(_POLL_S)
        self.say("ready")

    def environment(self) -> dict[str, str]:
        """The settings of the node and of every command that looks at its books."""
        assert self._redis is not None
        kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERPLANE_")}
        database = "" if self.place.embedded_sql else self.place.sql_url
        return {
            **kept,
            **ENVIRONMENT,
            "INFERPLANE_DATA_DIR": str(self.place.data_dir),
            "INFERPLANE_DATABASE_URL": database,
            "INFERPLANE_REDIS_URL": self._redis.url,
        }

    def _start_serve(self) -> None:
        argv = [
            *_ME, "serve", "--workers", str(GATEWAYS), "--port", str(self.place.door.port),
            "--endpoints", str(self.place.folder / "engines.json"),
        ]  # fmt: skip
        self._serve = self._popen(argv, "serve.log")

    def _start_worker(self) -> None:
        self._worker = self._popen([*_ME, "worker", "--no-beat"], "worker.log")

    def _start_engine(self, name: str) -> None:
        logs = self._engine_logs.setdefault(name, [])
        logs.append(self.place.folder / f"{name}.{len(logs)}.log")
        port = self._engine_ports.setdefault(name, free_tcp_port())
        argv = [sys.executable, "-m", "tests.faults.engine", "--name", name, "--port", str(port)]
        self._engines[name] = self._popen([*argv, "--log", str(logs[-1])], f"{name}.out")

    def _popen(self, argv: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.place.folder / log).open("ab") as out:
            return subprocess.Popen(
                argv, env=self.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                cwd=_ROOT, start_new_session=True,
            )  # fmt: skip

    # -- kill ----------------------------------------------------------------------------------------------------------

    async def kill(self, target: Target, pick: int, down_s: float) -> None:
        """Kill; what nobody else brings back comes back `down_s` later, in the background (`recovered` waits)."""
        if target in _CHILDREN:
            await self._until(f"there is a {target} to kill", lambda: bool(self._chosen(target, pick)))
            self._kill_children(target, self._chosen(target, pick))
            return
        await self._await_returns()  # what is dead cannot be killed
        match target:
            case Target.SUPERVISOR | Target.EVERYTHING:
                self._returns.append(self._kill_serve(whole=target is Target.EVERYTHING, down_s=down_s))
            case Target.REDIS:
                self._returns.append(self._kill_redis(down_s))
            case Target.POSTGRES:
                self._returns.append(self._kill_postgres(down_s))
            case Target.ENGINE:
                self._returns.append(self._kill_engine(ENGINES[pick % len(ENGINES)], down_s))
            case Target.WORKER:
                await self._busy_worker()
                self._returns.append(self._kill_worker(down_s))

    async def recovered(self) -> None:
        """Wait until everything that was killed is back and every gateway takes requests."""
        await self._await_returns()
        await self._until("serve starts its children again", self._is_whole)
        self.say("everything is back")

    async def _await_returns(self) -> None:
        pending, self._returns = self._returns, []
        await asyncio.gather(*pending)

    def _is_whole(self) -> bool:
        return len(self.gateways()) == GATEWAYS and len(self.shippers()) == 1 and self._all_gateways_spool()

    def _chosen(self, target: Target, pick: int) -> list[psutil.Process]:
        """The children of `serve` that a target means, as far as they run now."""
        gateways, shippers = self.gateways(), self.shippers()
        one = gateways[pick % len(gateways) :][:1] if gateways else []
        match target:
            case Target.GATEWAY:
                return one
            case Target.BOTH_GATEWAYS:
                return gateways if len(gateways) == GATEWAYS else []
            case Target.SHIPPER:
                return shippers
        return [*one, *shippers] if one and shippers else []

    def _kill_children(self, target: Target, children: list[psutil.Process]) -> None:
        """Kill children of `serve`, which starts them again."""
        for child in children:
            child.kill()
        self._killed(target, len(children), gateways=target is not Target.SHIPPER)

    def _killed(self, target: Target, count: int, *, gateways: bool = False) -> None:
        self.kill_count += count
        self.say(f"killed {target}")
        if gateways:
            self.gateway_kills_ns.append(time.time_ns())

    def _kill_serve(self, *, whole: bool, down_s: float) -> asyncio.Task[None]:
        assert self._serve is not None
        children = psutil.Process(self._serve.pid).children(recursive=True)
        self._serve.kill()
        for child in children if whole else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._serve.wait()
        self._killed(Target.EVERYTHING if whole else Target.SUPERVISOR, 1, gateways=True)
        return asyncio.create_task(self._bring_serve_back(children, down_s))

    async def _bring_serve_back(self, children: list[psutil.Process], down_s: float) -> None:
        await asyncio.sleep(down_s)
        await self.serve_until_ready()
        # Children of a supervisor that was killed alone have got SIGTERM and drain; none may be left over.
        await self._until("the old children end", lambda: not any(child.is_running() for child in children))
        self.gateway_kills_ns.append(time.time_ns())

    def _kill_redis(self, down_s: float) -> asyncio.Task[None]:
        redis = self._redis
        assert redis is not None and redis.pid is not None
        server = psutil.Process(redis.pid)
        server.kill()
        server.wait(10)
        self._killed(Target.REDIS, 1)

        async def bring_back() -> None:
            await asyncio.sleep(down_s)
            await asyncio.to_thread(redis.start)
            assert redis.owned
            self.say("redis is back")

        return asyncio.create_task(bring_back())

    def _kill_postgres(self, down_s: float) -> asyncio.Task[None]:
        database = self.database
        assert database is not None
        database.kill()
        self._killed(Target.POSTGRES, 1)

        async def bring_back() -> None:
            await asyncio.sleep(down_s)
            await asyncio.to_thread(database.start)
            self.say("postgres is back")

        return asyncio.create_task(bring_back())

    def _kill_engine(self, name: str, down_s: float) -> asyncio.Task[None]:
        self._engines[name].kill()
        self._engines[name].wait()
        self.engine_kills.append((name, time.time_ns()))
        self._killed(Target.ENGINE, 1)

        async def bring_back() -> None:
            await asyncio.sleep(down_s)
            self._start_engine(name)

        return asyncio.create_task(bring_back())

    async def _busy_worker(self) -> None:
        """The worker is at work: it has taken the order to compare the books."""
        self.order_reconcile()
        await self._until("the worker takes its task", lambda: "received" in self.log("worker.log"))

    def _kill_worker(self, down_s: float) -> asyncio.Task[None]:
        assert self._worker is not None
        children = psutil.Process(self._worker.pid).children(recursive=True)
        self._worker.kill()
        self._worker.wait()
        self._killed(Target.WORKER, 1)

        async def bring_back() -> None:
            await self._until("its children end with it", lambda: not any(one.is_running() for one in children))
            await asyncio.sleep(down_s)
            self._start_worker()

        return asyncio.create_task(bring_back())

    def order_reconcile(self) -> None:
        """Put a reconcile of the books into the worker's queue."""
        from pydantic import SecretStr

        from controlplane.adapters.tasks import RECONCILE, build_celery
        from controlplane.config import Settings

        assert self._redis is not None
        settings = Settings(data_dir=self.place.data_dir, redis_url=SecretStr(self._redis.url))
        app = build_celery(settings)
        try:
            app.send_task(RECONCILE, args=(0,))
        finally:
            app.close()

    # -- look ----------------------------------------------------------------------------------------------------------

    def gateways(self) -> list[psutil.Process]:
        """The gateway processes that run."""
        return self._children("gateway-process")

    def shippers(self) -> list[psutil.Process]:
        """The shipper, if it runs."""
        return self._children("ship")

    def _children(self, word: str) -> list[psutil.Process]:
        found = []
        if self._serve is not None and self._serve.poll() is None:
            for child in psutil.Process(self._serve.pid).children():
                with contextlib.suppress(psutil.Error):
                    if word in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                        found.append(child)
        return sorted(found, key=lambda child: child.pid)

    def _all_gateways_spool(self) -> bool:
        """Each gateway that runs has made its spool folder, which is one of the first things that it does."""
        held = [folder.name.partition("~")[2].partition("-")[0] for folder in spool_folders(self.place.spool_dir)]
        return {str(one.pid) for one in self.gateways()} <= set(held)

    async def _is_ready(self) -> bool:
        if len(self.gateways()) < GATEWAYS or not self._all_gateways_spool():
            return False
        try:
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"http://127.0.0.1:{self.place.door.port}/readyz", timeout=2.0)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    async def shipped(self, deadline_s: float) -> ShipperStatus:
        """Wait until the shipper has committed everything and adopted what dead gateways left."""
        found: list[ShipperStatus] = []

        def idle() -> bool:
            now = read_status(self.place.spool_dir)
            if now is None or [now.pid] != [one.pid for one in self.shippers()]:
                return False
            found[:] = [now]
            owed = now.lag_events or now.lag_bytes or now.open_count or now.last_error
            return not owed and now.folder_count == GATEWAYS and len(spool_folders(self.place.spool_dir)) == GATEWAYS

        await self._until("the shipper has shipped everything", idle, deadline_s)
        return found[0]

    def engine_logs(self) -> list[EngineSaw]:
        """What all lives of all engines saw."""
        return [saw for name, logs in self._engine_logs.items() for log in logs for saw in read_engine_log(name, log)]

    def log(self, name: str) -> str:
        """The output of a process."""
        path = self.place.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def last_words(self) -> str:
        """What happened and the end of every log, for the report of a failed run."""
        words = ["-- what was done", *self.said]
        for name in ("serve.log", "worker.log", "engine-1.out", "engine-2.out"):
            tail = self.log(name).splitlines()[-40:]
            words += [f"-- {name}", *tail] if tail else []
        words.append(f"-- spool: {[folder.name for folder in spool_folders(self.place.spool_dir)]}")
        words.append(f"-- shipper: {read_status(self.place.spool_dir)}")
        return "\n".join(words)

    def say(self, what: str) -> None:
        """Note something, with the second in which it happened."""
        self.said.append(f"{time.monotonic() - self.began_s:7.2f} {what}")

    async def _until(self, what: str, holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
        until_s = time.monotonic() + deadline_s
        while not holds():
            if self._ended_by_itself():
                raise AssertionError(f"serve has ended by itself\n{self.last_words()}")
            assert time.monotonic() < until_s, f"not within {deadline_s} s: {what}\n{self.last_words()}"
            await asyncio.sleep(_POLL_S)

    def _ended_by_itself(self) -> bool:
        """`serve` is dead and nobody is about to start it again."""
        dead = self._serve is not None and self._serve.poll() is not None
        return dead and all(task.done() for task in self._returns)

    # -- end -----------------------------------------------------------------------------------------------------------

    async def stop_serve(self) -> int:
        """SIGTERM, as an operator would; gives the exit status."""
        assert self._serve is not None
        self._serve.terminate()
        return await asyncio.to_thread(self._serve.wait, 30)

    async def give_up(self) -> None:
        """Stop bringing things back, for a run that has failed."""
        for task in self._returns:
            task.cancel()
        await asyncio.gather(*self._returns, return_exceptions=True)

    def stop(self) -> None:
        """End everything, whatever state it is in."""
        for process in (self._serve, self._worker, *self._engines.values()):
            if process is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()
        self._kill_strays()
        if self._redis is not None:
            self._redis.stop()

    def _kill_strays(self) -> None:
        """Children of a `serve` that was killed are nobody's children now; they are known by their data folder."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("INFERPLANE_DATA_DIR") == str(self.place.data_dir):
                    process.kill()
