"""Many independent jobs at once: over the cores of this machine, or over a Dask cluster.

Owns: where jobs run, that results come back in the order of their arguments, and what happens when one fails or the
user interrupts. Does not own: the jobs. A job is a function of a module (or a `functools.partial` of one) that depends
on its argument only, so that it gives the same result in this process, in another one and on another machine.
Dask is an optional extra (`inferplane[dask]`); its workers need this package at the same version.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from perfmodel.errors import ConfigError, SweepError

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# How long a scheduler may take to answer, and then to have a worker: local ones take under 2 s.
_DASK_ANSWER_S = 10.0
_DASK_WORKER_S = 30.0


def run_sweep(
    job: Callable[[Argument], Result],
    arguments: Sequence[Argument],
    *,
    dask: str | None = None,
    worker_count: int | None = None,
    done: Callable[[int], None] | None = None,
) -> list[Result]:
    """`[job(argument) for argument in arguments]`, spread over workers.

    `dask` is a scheduler's address ("tcp://host:8786"); without it `worker_count` processes of this machine work (None:
    one for each core that this process may use), and one worker means this process. `done` is called with 1 for every
    finished job, in this thread. The first job that fails ends the sweep: a ConfigError comes as it is, other faults as
    a SweepError that names the job. Raises SweepError too when workers die or the cluster cannot be reached.
    KeyboardInterrupt ends the workers' jobs and passes on.
    """
    told = done or _nothing
    if worker_count is not None and worker_count < 1:
        raise ConfigError(f"worker_count is {worker_count}; expected at least 1")
    if dask is not None:
        return _on_dask(job, arguments, dask, told)
    count = min(len(arguments), worker_count or len(os.sched_getaffinity(0)))
    if count <= 1:
        return _here(job, arguments, told)
    return _in_processes(job, arguments, count, told)


def _here(
    job: Callable[[Argument], Result], arguments: Sequence[Argument], done: Callable[[int], None]
) -> list[Result]:
    results: list[Result] = []
    for position, argument in enumerate(arguments):
        try:
            results.append(job(argument))
        except Exception as fault:
            raise _failed(position, len(arguments), fault) from fault
        done(1)
    return results


def _in_processes(
    job: Callable[[Argument], Result], arguments: Sequence[Argument], count: int, done: Callable[[int], None]
) -> list[Result]:
    # Spawned, not forked: a fork would copy locks that threads of this process hold.
    context = multiprocessing.get_context("spawn")
    results: dict[int, Result] = {}
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_worker_starts)
    try:
        places: dict[Future[Result], int] = {
            pool.submit(job, argument): position for position, argument in enumerate(arguments)
        }
        for future in as_completed(places):
            position = places[future]
            try:
                results[position] = future.result()
            except BrokenProcessPool:
                raise SweepError(
                    "a worker process died (killed, or out of memory); expected jobs that fit into memory side by side"
                ) from None
            except Exception as fault:
                raise _failed(position, len(arguments), fault) from fault
            done(1)
    except BaseException:
        _end(pool)
        raise
    pool.shutdown()
    return [results[position] for position in range(len(arguments))]


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
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _on_dask(
    job: Callable[[Argument], Result], arguments: Sequence[Argument], address: str, done: Callable[[int], None]
) -> list[Result]:
    library = _library()
    results: dict[int, Result] = {}
    with _quiet(), _connected(library, address) as client:
        # Keys of their own: an earlier sweep with equal arguments may have run another version of the job.
        futures = client.map(job, arguments, pure=False)
        places = {future.key: position for position, future in enumerate(futures)}
        try:
            for future in library.as_completed(futures, loop=client.loop):
                position = places[future.key]
                _check(future, position, len(arguments))
                results[position] = future.result()
                done(1)
        except BaseException:
            client.cancel(futures, force=True)
            raise
    return [results[position] for position in range(len(arguments))]


def _check(future: Any, position: int, count: int) -> None:
    """Raise what ended a Dask job that has no result."""
    if future.status == "error":
        fault = future.exception()
        raise _failed(position, count, fault) from fault
    if future.status != "finished":
        raise SweepError(f"job {position + 1} of {count} was {future.status}: the Dask cluster has gone away")


def _library() -> Any:
    """The optional package, which has no types."""
    try:
        return importlib.import_module("distributed")
    except ImportError:
        raise SweepError("--dask needs Dask, which is not installed; expected `pip install inferplane[dask]`") from None


@contextmanager
def _connected(library: Any, address: str) -> Iterator[Any]:
    try:
        client = library.Client(address, timeout=_DASK_ANSWER_S, set_as_default=False)
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
        client.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask's own log lines stay off stderr: what the user must know is in our sentences."""
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _failed(position: int, count: int, fault: BaseException) -> Exception:
    if isinstance(fault, ConfigError):
        return fault
    said = " ".join(str(fault).split()) or "no message"
    return SweepError(f"job {position + 1} of {count} failed: {type(fault).__name__}: {said}")


def _nothing(_: int) -> None:
    """Nobody watches."""
