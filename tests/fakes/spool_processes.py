"""Processes that write and ship a spool, made in a millisecond so that a test can kill many of them.

Owns: a process that has everything imported and forks on command (`python -m tests.fakes.spool_processes`), what its
children do, and `Nursery`, the test's end of it. Does not own: what must hold after a kill.

A writer logs the truth to a file of its own, with `os.write`, which survives a kill as the spool does: `i` before an
open, `o` after it, `k` after a checkpoint, `c` after a close. What it writes follows from its seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from billing.adapters import sql
from billing.adapters.shipper import Shipper, ShipperSettings, SqlIngest, shipper_lock, stopped_by_signals
from controlplane.adapters.spool import Spool, SpoolSettings
from tests.fakes.usage import a_checkpoint, a_close, an_open

# So many attempts are open at most, as in a gateway.
_MOST_OPEN = 40


def tokens_of(number: int, step: int) -> int:
    """Output tokens that the checkpoint `step` of attempt `number` says were delivered."""
    return number % 7 + 64 * step


def write_for_ever(spool_dir: str, truth_file: str, writer: int, seed: int, segment_bytes: int) -> None:
    """Open, checkpoint and close until killed."""
    dice = random.Random(seed)
    truth = os.open(truth_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    spool = Spool(SpoolSettings(Path(spool_dir), "node-1", f"w{writer}", 1 << 30, segment_bytes))
    running: dict[int, int] = {}
    number = 0
    while True:
        if len(running) < _MOST_OPEN and dice.random() < 0.4:
            number += 1
            os.write(truth, b"i %d\n" % number)
            spool.open(an_open(number, writer))
            os.write(truth, b"o %d\n" % number)
            running[number] = 0
        elif running:
            chosen = dice.choice(list(running))
            if dice.random() < 0.5:
                running[chosen] += 1
                tokens = tokens_of(chosen, running[chosen])
                spool.checkpoint(a_checkpoint(chosen, writer, output_tokens=tokens))
                os.write(truth, b"k %d %d\n" % (chosen, tokens))
            else:
                spool.close(a_close(chosen, writer))
                os.write(truth, b"c %d\n" % chosen)
                del running[chosen]
        if dice.random() < 0.02:
            spool.refuse("org_a", "proj_a", "llama", "rate_limit", number)
            spool.tick()
            os.write(truth, b"r\n")


def ship(spool_dir: str, database_url: str, batch_event_count: int) -> None:
    """Ship until SIGTERM or killed."""
    import threading

    stopping = threading.Event()
    settings = ShipperSettings(
        Path(spool_dir), "node-1", batch_event_count, batch_wait_s=0.002, idle_poll_s=0.001, retry_first_s=0.01
    )
    with stopped_by_signals(stopping), shipper_lock(Path(spool_dir), stopping, wait=True) as held:
        if held:
            Shipper(settings, SqlIngest(sql.engine(database_url)), stopping).run()


_ROLES: dict[str, Callable[..., None]] = {"writer": write_for_ever, "shipper": ship}


class Nursery:
    """Starts children and kills them. A context manager: every child is dead when it is left."""

    def __enter__(self) -> Nursery:
        command = [sys.executable, "-m", "tests.fakes.spool_processes"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._alive: set[int] = set()
        self._ask({"ping": True})
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _fault: BaseException | None, _at: TracebackType | None
    ) -> None:
        for pid in list(self._alive):
            self.kill(pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def start(self, role: str, **arguments: Any) -> int:
        """Fork a child; gives its pid."""
        pid = self._ask({"role": role, "arguments": arguments})
        self._alive.add(pid)
        return pid

    def kill(self, pid: int, sign: int = signal.SIGKILL) -> int:
        """Send the signal and wait until the child is gone; gives its wait status."""
        os.kill(pid, sign)
        self._alive.discard(pid)
        return self._ask({"wait": pid})

    def _ask(self, message: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def main() -> None:
    """Fork on command until standard input ends."""
    while line := sys.stdin.readline():
        message = json.loads(line)
        answer = 0
        if "wait" in message:
            answer = os.waitpid(message["wait"], 0)[1]
        elif "role" in message:
            answer = os.fork()
            if answer == 0:
                os.close(0)
                try:
                    _ROLES[message["role"]](**message["arguments"])
                except BaseException as fault:
                    print(f"{message['role']}: {fault!r}", file=sys.stderr, flush=True)
                    os._exit(3)
                os._exit(0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
