"""A gateway process reduced to its router and its sibling socket, driven line by line over standard input and output.

Owns: the child program (`python -m tests.fakes.sibling_process FOLDER`) and `SiblingProcess`, the test's end of it.
Each command is one JSON line with one JSON line for an answer, so that a test decides the order of events.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from router.adapters.siblings import Siblings
from router.blocks import BlockHasher
from router.decision import RouteDecision, RouteRequest
from router.endpoints import Ending, Endpoint, EngineSpeed, Finish
from router.route import Router, RouterConfig

ROOT = Path(__file__).resolve().parents[2]

# A child that does not answer within this has failed the test.
_ANSWER_S = 20.0


class _Child:
    """The commands of the child program."""

    def __init__(self, folder: Path) -> None:
        speed = EngineSpeed(1_000.0, 0.0, 0.010)
        self.router = Router(RouterConfig(share=True))
        self.router.set_endpoints(
            [Endpoint(name, f"http://{name}", frozenset("m"), speed=speed) for name in "abcd"], time.monotonic()
        )
        self.siblings = Siblings(self.router, folder)
        self.hasher = BlockHasher(b"shared secret")
        self.running: dict[int, RouteDecision] = {}

    def pick(self, seed: int, tokens: int) -> dict[str, Any]:
        text = random.Random(seed).randbytes(4 * tokens)
        request = RouteRequest("m", self.hasher.chain("m", "", (text,)), tokens, 10)
        decision = self.router.route(request, time.monotonic(), random.random)
        assert isinstance(decision, RouteDecision)
        self.running[decision.ticket.ticket_id] = decision
        return {
            "endpoint": decision.endpoint.endpoint_id,
            "ticket": decision.ticket.ticket_id,
            "cached": decision.predicted_cached_tokens,
        }

    def end(self, ticket: int, outcome: str = "completed", first_token: bool = True) -> dict[str, Any]:
        decision = self.running.pop(ticket)
        if first_token:
            self.router.first_token(decision.ticket, time.monotonic())
        self.router.finished(decision.ticket, Finish(Ending(outcome)), time.monotonic())
        return {}

    def status(self) -> dict[str, Any]:
        rows = self.router.status(time.monotonic())
        state = self.siblings.state
        return {
            "in_flight": {row.endpoint.endpoint_id: row.load.waiting_count + row.load.decoding_count for row in rows},
            "kv_tokens": sum(row.load.kv_tokens for row in rows),
            "peers": state.peer_count,
            "unreadable": state.unreadable_count,
            "dropped": state.dropped_count,
        }


async def _main(folder: Path) -> None:
    child = _Child(folder)
    await child.siblings.start()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command, arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(child, command)(**arguments)) + "\n")
        sys.stdout.flush()
    await child.siblings.stop()


class SiblingProcess:
    """One child. Use as a context manager; leaving it ends the process."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.sibling_process", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> SiblingProcess:
        self.ask("status")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def pick(self, seed: int, tokens: int) -> dict[str, Any]:
        """Route a prompt made from `seed`; a longer one of the same seed continues it."""
        return self.ask("pick", seed=seed, tokens=tokens)

    def in_flight(self) -> dict[str, int]:
        """Requests in flight by endpoint, over all processes, as this one sees it."""
        counts: dict[str, int] = self.ask("status")["in_flight"]
        return counts

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_ANSWER_S)

    def close(self) -> None:
        """End it by closing its input; it says goodbye."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        try:
            self._process.wait(_ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
