"""Runs a node's processes under one parent: start, watch, restart, stop in order.

Owns: child processes and their lives. Does not own: what they do. A child that dies is started again with back-off; a
child that dies before it was ever ready ends the whole with its last words, because starting it again cannot help.
Children die with the parent (`follow_parent`; on Linux the kernel signals them), so a killed supervisor leaves nothing
on the port. Every child is an `inferplane` command, which calls it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

# Back-off of restarts in seconds: doubles from the first to the last, and falls back after a minute of life.
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 15.0
_HEALTHY_AFTER_S = 60.0
# How often children are looked at.
_POLL_S = 0.05
# How a child knows that it is one, and whose.
_PARENT = "INFERPLANE_PARENT_PID"
# prctl(2) PR_SET_PDEATHSIG.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Child:
    """How one process is started and stopped."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    """Added to the parent's environment."""
    pass_fds: tuple[int, ...] = ()
    restart: bool = True
    stop_timeout_s: float = 10.0
    """After SIGTERM, how long before SIGKILL."""
    log: Path | None = None
    """Where its output goes; None: the parent's."""
    essential_s: float = 0.0
    """If it dies by itself within this time of its first start, the whole ends."""
    group: str = ""
    """Children of one group are stopped at once; empty: by itself."""


@dataclass(slots=True)
class _Running:
    """Mutable: a child as it lives and is restarted."""

    child: Child
    process: subprocess.Popen[bytes]
    started_s: float
    starts_count: int = 1
    backoff_s: float = _FIRST_BACKOFF_S
    retry_at_s: float | None = None
    ready: bool = False


@dataclass(slots=True)
class Supervisor:
    """Mutable: the children of this parent, in the order in which they were started."""

    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    _running: list[_Running] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _signals: int = 0

    def start(self, child: Child) -> None:
        """Start a child."""
        self._running.append(_Running(child, _spawn(child), time.monotonic()))

    def alive(self, name: str) -> bool:
        """Whether the named child runs now."""
        return any(r.child.name == name and r.process.poll() is None for r in self._running)

    def pid(self, name: str) -> int | None:
        """Process id of the named child; None while it does not run."""
        return next((r.process.pid for r in self._running if r.child.name == name and r.process.poll() is None), None)

    def note_ready(self, *names: str) -> None:
        """These children have shown that they work (no names: all): one that dies now is started again."""
        for running in self._running:
            running.ready = running.ready or not names or running.child.name in names

    @property
    def stopping(self) -> bool:
        """Whether a signal or `request_stop` has asked for the end."""
        return self._stopping.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the end is asked for, at most this long. True: it is."""
        return self._stopping.wait(timeout_s)

    def request_stop(self) -> None:
        """Make `run` return; safe from any thread and from a signal handler."""
        self._stopping.set()

    def install_signals(self) -> None:
        """SIGTERM and SIGINT stop the whole; a second one kills it."""

        def on_signal(number: int, _frame: object) -> None:
            self._signals += 1
            if self._signals > 1:
                for running in self._running:
                    running.process.kill()
            self._stopping.set()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    def run(self, tick: Callable[[], None] = lambda: None) -> int:
        """Watch until asked to stop, calling `tick` now and then. Returns the exit status, 1 when an essential child
        could not start; the children still run then (`stop`).
        """
        while not self._stopping.wait(_POLL_S):
            tick()
            fault = self.watch()
            if fault is not None:
                self.say(fault)
                return 1
        return 0

    def watch(self) -> str | None:
        """Restart what died. Returns one sentence when the whole has to end."""
        now_s = time.monotonic()
        for running in self._running:
            code = running.process.poll()
            if code is None:
                continue
            if running.retry_at_s is None:
                lived_s = now_s - running.started_s
                early = running.starts_count == 1 and lived_s < running.child.essential_s
                # SIGKILL comes from outside (a person, the kernel out of memory): it says nothing about the next start.
                if early and not running.ready and code != -signal.SIGKILL:
                    return f"{running.child.name} {_how(code)} right after its start{_last_words(running.child.log)}"
                if not running.child.restart:
                    continue
                if lived_s > _HEALTHY_AFTER_S:
                    running.backoff_s = _FIRST_BACKOFF_S
                running.retry_at_s = now_s + running.backoff_s
                self.say(f"{running.child.name} {_how(code)}; starting it again in {running.backoff_s:g} s")
                running.backoff_s = min(_LAST_BACKOFF_S, running.backoff_s * 2)
            elif now_s >= running.retry_at_s:
                running.process = _spawn(running.child)
                running.started_s, running.retry_at_s = now_s, None
                running.starts_count += 1
        return None

    def stop(self) -> None:
        """Stop the children, last started first; a group at once, in the place of the first of it."""
        groups: dict[str, list[_Running]] = {}
        for running in self._running:
            groups.setdefault(running.child.group or f"alone: {running.child.name}", []).append(running)
        for together in reversed(groups.values()):
            for running in together:
                if running.process.poll() is None:
                    running.process.terminate()
            for running in together:
                _await_end(running.process, running.child.stop_timeout_s)
        self._running.clear()


def _spawn(child: Child) -> subprocess.Popen[bytes]:
    out: IO[bytes] | None = None
    if child.log is not None:
        child.log.parent.mkdir(parents=True, exist_ok=True)
        out = child.log.open("ab")
    try:
        return subprocess.Popen(
            list(child.argv),
            env={**os.environ, **child.env, _PARENT: str(os.getpid())},
            pass_fds=child.pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which stops the children in order
        )
    finally:
        if out is not None:
            out.close()


def follow_parent() -> None:
    """In a child of a `Supervisor`: get SIGTERM when the parent dies. Elsewhere: nothing.

    Linux ties this to the thread that made the child: call `Supervisor.start` from a thread that lives on.
    """
    parent = os.environ.pop(_PARENT, "")
    if not parent.isdigit():
        return
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the parent dies. On systems other than Linux: nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _await_end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _last_words(log: Path | None) -> str:
    if log is None or not log.exists():
        return "."
    lines = log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else "."
