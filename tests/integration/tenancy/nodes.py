"""Starts `feed_node.py` and talks to it.

Owns: the process, its lines and their deadlines. Does not own: what is asserted of them (`test_revocation.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]
# A line that is expected comes well within this on a busy machine; the revocation bound itself is 2 s.
LINE_TIMEOUT_S = 20.0


class Node:
    """A running node. Mutable: its lines arrive in the background."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def say(self, line: str) -> None:
        """Send it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self, timeout_s: float = LINE_TIMEOUT_S) -> dict[str, Any]:
        """Its next line."""
        return self._lines.get(timeout=timeout_s)

    def watch(self, digest: bytes) -> str:
        """Follow a key; gives the first answer."""
        self.say(f"watch {digest.hex()}")
        return str(self.hear()["answer"])

    def hear_answer(self, wanted: str) -> float:
        """Wait until the watched key's answer is `wanted`; gives the wall clock at which the node saw it."""
        line = self.hear()
        assert line["answer"] == wanted, line
        return float(line["at_s"])

    def silent_for(self, seconds: float) -> bool:
        """No answer changes for so long."""
        time.sleep(seconds)
        return self._lines.empty()

    def state(self) -> dict[str, Any]:
        """Its feed's state."""
        self.say("state")
        found: dict[str, Any] = self.hear()["state"]
        return found


@dataclass(frozen=True, slots=True)
class Where:
    """What a node connects to, and its grace."""

    url: str
    pepper: bytes
    redis_url: str = ""
    grace_s: float = 60.0


@contextlib.contextmanager
def started(where: Where, count: int = 1) -> Iterator[list[Node]]:
    """Nodes in processes of their own, started side by side."""
    script = str(Path(__file__).with_name("feed_node.py"))
    command = [sys.executable, script, where.url, where.pepper.hex(), where.redis_url, str(where.grace_s)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with contextlib.ExitStack() as stack:
        running = [Node(stack.enter_context(_process(command, environment))) for _ in range(count)]
        for node in running:
            assert node.hear() == {"started": True}
        yield running


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=_ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # the node ends at the end of its input
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
