"""What the machine does during a measurement: CPU time of processes, memory, noise, and where processes may run.

Owns: reading /proc and CPU clocks, pinning, and the facts that a report names. Does not own: what is run. Linux only:
CPU clocks of other processes, `taskset` and /proc are what makes figures comparable on a shared machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

# The lowest two bits of a CPU clock's id ask for the scheduler's own count in ns (linux/posix-timers.h).
_CPUCLOCK_SCHED = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Clients and engine stub stand for other machines, so they go before the gateway's side processes on the core that they
# share: three nice steps, about twice the share.
_LOAD_NICE_STEPS = 3


class BenchError(Exception):
    """The benchmark cannot be run, or a part of it not; one sentence says why."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """Where processes run. The core of the gateway under test holds nothing else of ours."""

    gateway_core: int
    load_core: int
    nice: int = 0
    """Weight of all that is measured; below 0 on a machine that others use too."""

    @property
    def load_nice(self) -> int:
        """Weight of the clients and the engine stub."""
        return max(-20, self.nice - _LOAD_NICE_STEPS)

    @property
    def gateway(self) -> list[str]:
        """Prefix of a command that runs on the gateway's core."""
        return ["taskset", "-c", str(self.gateway_core)]

    @property
    def load(self) -> list[str]:
        """Prefix of a command that runs on the core of the load: clients, engine stub, and our side processes."""
        return ["taskset", "-c", str(self.load_core)]


def affinity(nice: int = 0) -> Affinity:
    """The first two cores that this process may use. Raises BenchError when there are not two."""
    if not hasattr(os, "sched_getaffinity") or shutil.which("taskset") is None:
        raise BenchError("The gateway benchmark needs Linux with taskset (util-linux): it pins a gateway to one core.")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError(f"The gateway benchmark needs two cores; this process may use {len(cores)}.")
    return Affinity(cores[0], cores[1], nice)


def pin(pid: int, core: int) -> None:
    """Move a running process with all its threads to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


def favour(pids: Iterable[int], nice: int) -> bool:
    """Give the scheduling groups of processes this weight; the kernel weighs sessions, not processes, where autogroups
    are on. False where it was not allowed: only root may ask for more.
    """
    allowed = True
    for pid in pids:
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
        except OSError:
            allowed = False
    return allowed


def tree(pid: int) -> list[int]:
    """The process and its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of processes so far, with all their threads; those that are gone count nothing."""
    total_s = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total_s += time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    return total_s


def waited_s(pid: int) -> float:
    """How long the main thread of a process stood ready while others had its core."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def resident_mb(pids: Iterable[int]) -> float:
    """Resident memory of processes in MB (10^6 bytes)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return round(total / 1e6, 1)


def busy_s() -> tuple[float, float]:
    """(CPU time that all processes of the machine used, time that the hypervisor kept for others) since boot."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    steal = fields[7]
    return (sum(fields) - fields[3] - fields[4] - steal) / _TICKS_PER_S, steal / _TICKS_PER_S


def facts() -> dict[str, str]:
    """What a reader needs to judge figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "inferplane": metadata.version("inferplane"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
