"""Many independent jobs at once: over the cores of this machine, or over a Dask cluster.

Owns: where jobs run, that results come back in the order of their arguments, and what happens when one fails, a worker
or the whole cluster goes away, or the user interrupts. Does not own: the jobs. A job is a function of a module (or a
value that can be called and pickled) that depends on what it is given only, so that it gives the same result in this
process, in another one and on another machine. Dask is an optional extra (`inferplane[dask]`); its workers need this
package at the same version, which is checked.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from perfmodel.errors import ConfigError, PerfModelError, SweepError

Argument = TypeVar("Argument")
Result = TypeVar("Result")
Shared = TypeVar("Shared")

# How long a scheduler may take to answer, and how long a cluster may have no worker: local ones take under 2 s.
_DASK_ANSWER_S = 10.0
_DASK_WORKER_S = 30.0
# How often a cluster at work is asked whether it still has workers.
_DASK_LOOK_S = 1.0


class Workers(Protocol):
    """Where jobs run."""

    def map(
        self,
        job: Callable[[Shared, Argument], Result],
        shared: Shared,
        arguments: Sequence[Argument],
        done: Callable[[int], None] | None = None,
    ) -> list[Result]:
        """`[job(shared, argument) for argument in arguments]`; `shared` is sent to each worker once.

        `done` is called with 1 for every finished job, in this thread. The first job that fails ends all: a fault that
        is a sentence already (`ConfigError`) comes as it is, other faults as a SweepError that names the job. Raises
        SweepError too when workers die or the cluster goes away. KeyboardInterrupt and SIGTERM end the jobs and
        pass on.
        """
        ...


@contextmanager
def workers(dask: str | None = None, worker_count: int | None = None, most: int | None = None) -> Iterator[Workers]:
    """Workers for as many `map`s as are wanted.

    `dask` is a scheduler's address ("tcp://host:8786"); without it `worker_count` processes of this machine work (None:
    one for each core that this process may use), at most `most`, and one worker means this process. Raises ConfigError
    for a bad count or address and without Dask, SweepError when the cluster cannot be reached or has no worker.
    """
    if worker_count is not None and worker_count < 1:
        raise ConfigError(f"--workers is {worker_count}; expected at least 1")
    if dask is not None:
        if worker_count is not None:
            raise ConfigError("--workers has no effect beside --dask, whose cluster says it; expected one of the two")
        library = _library()
        with _quiet(), _connected(library, dask) as client:
            yield _Cluster(library, client, dask)
        return
    count = worker_count or len(os.sched_getaffinity(0))
    count = count if most is None else min(count, most)
    if count <= 1:
        yield _Here()
        return
    # Spawned, not forked: a fork would copy locks that threads of this process hold.
    pool = ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=_worker_starts
    )  # fmt: skip
    with _sigterm_raises():
        try:
            yield _Processes(pool)
        except BaseException:
            _end(pool)
            raise
        pool.shutdown()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, with the workers and the folder of the sweep; else both outlive it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set this, and only it would be interrupted
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_sweep(
    job: Callable[[Argument], Result],
    arguments: Sequence[Argument],
    *,
    dask: str | None = None,
    worker_count: int | None = None,
    done: Callable[[int], None] | None = None,
) -> list[Result]:
    """`[job(argument) for argument in arguments]`, spread over workers for this one time. Raises as `Workers.map`."""
    with workers(dask, worker_count, most=len(arguments)) as places:
        return places.map(_Alone(job), None, arguments, done)


@dataclass(frozen=True, slots=True)
class _Alone(Generic[Argument, Result]):
    """A job that shares nothing, in the form of one that does."""

    job: Callable[[Argument], Result]

    def __call__(self, _: None, argument: Argument) -> Result:
        return self.job(argument)


class _Here:
    """This process."""

    def map(
        self,
        job: Callable[[Shared, Argument], Result],
        shared: Shared,
        arguments: Sequence[Argument],
        done: Callable[[int], None] | None = None,
    ) -> list[Result]:
        results: list[Result] = []
        for position, argument in enumerate(arguments):
            try:
                results.append(job(shared, argument))
            except Exception as fault:
                raise _failed(position, len(arguments), fault) from fault
            (done or _nothing)(1)
        return results


class _Processes:
    """Processes of this machine. Mutable: a pool."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def map(
        self,
        job: Callable[[Shared, Argument], Result],
        shared: Shared,
        arguments: Sequence[Argument],
        done: Callable[[int], None] | None = None,
    ) -> list[Result]:
        with tempfile.TemporaryDirectory(prefix="inferplane-sweep-") as folder:
            called: Callable[[Argument], Result]
            if shared is None:
                called = _Given(job, shared)
            else:  # by a file, for the pool would pickle it again for every job
                path = Path(folder) / "shared"
                path.write_bytes(pickle.dumps(shared, pickle.HIGHEST_PROTOCOL))
                called = _FromFile(job, path)
            results: dict[int, Result] = {}
            places: dict[Future[Result], int] = {
                self._pool.submit(called, argument): position for position, argument in enumerate(arguments)
            }
            for future in as_completed(places):
                position = places[future]
                try:
                    results[position] = future.result()
                except BrokenProcessPool:
                    raise SweepError(
                        "a worker process died (killed, or out of memory); expected jobs that fit into memory side by "
                        "side (--workers)"
                    ) from None
                except Exception as fault:
                    _end(self._pool)  # before the folder goes that other jobs read
                    raise _failed(position, len(arguments), fault) from fault
                (done or _nothing)(1)
        return [results[position] for position in range(len(arguments))]


@dataclass(frozen=True, slots=True)
class _Given(Generic[Shared, Argument, Result]):
    """A job with what it shares."""

    job: Callable[[Shared, Argument], Result]
    shared: Shared

    def __call__(self, argument: Argument) -> Result:
        return self.job(self.shared, argument)


@dataclass(frozen=True, slots=True)
class _FromFile(Generic[Shared, Argument, Result]):
    """A job that reads what it shares from a file of this sweep."""

    job: Callable[[Shared, Argument], Result]
    path: Path

    def __call__(self, argument: Argument) -> Result:
        shared: Shared = pickle.loads(self.path.read_bytes())  # noqa: S301 - written by the parent, in a folder of its own
        return self.job(shared, argument)


def _worker_starts() -> None:
    """In a worker: Ctrl-C is the parent's to answer, and without a parent there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_with, args=(parent,), name="parent-watch", daemon=True).start()


def _leave_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _end(pool: ProcessPoolExecutor) -> None:
    """End the workers now: what they compute is wanted by nobody any more."""
    # The executor offers no way to stop a running job before Python 3.14 (`terminate_workers`).
    running = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in running:
        worker.terminate()
    for worker in running:
        worker.join()


class _Cluster:
    """The workers of a Dask cluster. Mutable: a connection."""

    def __init__(self, library: Any, client: Any, address: str) -> None:
        self._library = library
        self._client = client
        self._address = address

    def map(
        self,
        job: Callable[[Shared, Argument], Result],
        shared: Shared,
        arguments: Sequence[Argument],
        done: Callable[[int], None] | None = None,
    ) -> list[Result]:
        futures: list[Any] = []
        try:
            # On every worker, so that one can be lost. Not found by its hash: its pickle may differ between runs.
            sent = None if shared is None else self._client.scatter(shared, broadcast=True, hash=False)
            call = _Same(job, version("inferplane"))
            # Keys of their own: an earlier sweep with equal arguments may have run another version of the job.
            futures += [self._client.submit(call, sent, argument, pure=False) for argument in arguments]
            with self._client.as_current():  # `wait` asks for the one of this thread
                return self._results(futures, done or _nothing)
        except (OSError, TimeoutError, self._library.CancelledError) as fault:
            raise self._gone(f"{type(fault).__name__}") from None
        except BaseException:
            if self._client.status == "running":
                self._client.cancel(futures, force=True)
            raise

    def _results(self, futures: list[Any], done: Callable[[int], None]) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = dict(enumerate(futures))
        seen_s = time.monotonic()
        while waiting:
            try:
                self._library.wait(list(waiting.values()), timeout=_DASK_LOOK_S, return_when="FIRST_COMPLETED")
            except TimeoutError:
                seen_s = self._look(seen_s)
                continue
            for position, future in [(at, each) for at, each in waiting.items() if each.done()]:
                del waiting[position]
                if future.status == "error":
                    fault = future.exception()
                    raise _failed(position, len(futures), fault) from fault
                if future.status != "finished":
                    raise self._gone(f"job {position + 1} of {len(futures)} was {future.status}")
                results[position] = future.result()
                done(1)
        return [results[position] for position in range(len(futures))]

    def _look(self, seen_s: float) -> float:
        """When the cluster last had a worker. Raises SweepError where that is too long ago."""
        try:
            if self._client.status == "running" and within(_DASK_ANSWER_S, self._client.scheduler_info)["workers"]:
                return time.monotonic()
        except TimeoutError:
            raise self._gone(f"its scheduler does not answer within {_DASK_ANSWER_S:.0f} s") from None
        if time.monotonic() - seen_s > _DASK_WORKER_S:
            raise self._gone(f"no worker for {_DASK_WORKER_S:.0f} s")
        return seen_s

    def _gone(self, how: str) -> SweepError:
        return SweepError(f"the Dask cluster at {self._address} has gone away ({how}); expected it to stay up")


@dataclass(frozen=True, slots=True)
class _Same(Generic[Shared, Argument, Result]):
    """A job that runs where the package is the same only, for another one may answer otherwise."""

    job: Callable[[Shared, Argument], Result]
    version: str

    def __call__(self, shared: Shared, argument: Argument) -> Result:
        found = version("inferplane")
        if found != self.version:
            raise SweepError(f"a Dask worker runs inferplane {found}; expected {self.version}, as here")
        return self.job(shared, argument)


def _library() -> Any:
    """The optional package, which has no types."""
    try:
        return importlib.import_module("distributed")
    except ImportError:
        raise ConfigError(
            "--dask needs Dask, which is not installed; from a checkout `make setup` installs it"
        ) from None


def within(limit_s: float, work: Callable[[], Any]) -> Any:
    """What `work` returns, within `limit_s`: Dask's own calls wait for ever on a scheduler that is stopped.

    Raises TimeoutError, and then leaves it to a thread that does not keep the process alive; else what `work` raises.
    """
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as fault:
            done.set_exception(fault)

    threading.Thread(target=run, daemon=True, name="dask-call").start()
    return done.result(timeout=limit_s)


@contextmanager
def _connected(library: Any, address: str) -> Iterator[Any]:
    scheme, _, place = address.rpartition("://")
    if scheme not in ("", "tcp", "tls", "ws", "wss", "ucx") or ":" not in place:  # else Dask leaves half a client
        raise ConfigError(f"--dask is {address!r}; expected an address like tcp://host:8786")
    try:
        client = within(
            _DASK_ANSWER_S + 1, lambda: library.Client(address, timeout=_DASK_ANSWER_S, set_as_default=False)
        )
    except (OSError, TimeoutError):
        raise SweepError(
            f"no Dask scheduler answers at {address} within {_DASK_ANSWER_S:.0f} s; expected the address that "
            "`dask scheduler` prints"
        ) from None
    except ValueError as fault:
        raise ConfigError(f"--dask is {address!r} ({fault}); expected an address like tcp://host:8786") from None
    try:
        try:
            client.wait_for_workers(1, timeout=_DASK_WORKER_S)
        except TimeoutError:
            raise SweepError(
                f"the Dask cluster at {address} has no worker; expected at least one (`dask worker {address}`)"
            ) from None
        yield client
    finally:
        with suppress(TimeoutError):  # a scheduler that is stopped does not say goodbye
            within(_DASK_ANSWER_S, client.close)


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask's own log lines and warnings stay off stderr: what the user must know is in our sentences."""
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="distributed")
            yield
    finally:
        logger.setLevel(before)


def _failed(position: int, count: int, fault: BaseException) -> Exception:
    if isinstance(fault, PerfModelError):
        return fault
    said = " ".join(str(fault).split()) or "no message"
    return SweepError(f"job {position + 1} of {count} failed: {type(fault).__name__}: {said}")


def _nothing(_: int) -> None:
    """Nobody watches."""
