"""A scripted engine as a process whose log survives its SIGKILL: the truth of what an engine was asked and sent.

Owns: the log (a line when a request came, a line *before* each token is sent, a line at its end) and the option
`lost_on=NAME`, with which one of two engines is lost before its first token and the other answers. Does not own: the
scripts or the server (`tests.fakes`).

A token is logged before it is written, so what the log says was sent is what can have been sent at most, at any moment
at which the process may die. Run as `python -m tests.faults.engine --name engine-1 --port 0 --log FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.fakes.engine_scripts import Ask, Script, Send, Step, Truth, cut
from tests.fakes.scripted_engine import ScriptedEngine
from tests.faults.truth import TAGGED


class LoggedEngine(ScriptedEngine):
    """A scripted engine that writes down each token before it sends it."""

    def __init__(self, name: str, log: Path) -> None:
        super().__init__(models=["m"])
        self._name = name
        self._file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.truths = _Noted(self.record)

    def script_for(self, truth: Truth) -> Script:
        """The script, with its tokens written down as they are about to be sent."""
        script = super().script_for(truth)
        if truth.method != "POST":
            return script
        if f"lost_on={self._name}&" in truth.body.decode("utf-8", "replace"):
            script = cut(Ask({}, {"after": "-1", "how": "reset"}, truth))
        if script.framing != "length":
            return replace(script, steps=self._noted(truth, script.steps))
        # Its length is counted before it is sent, so it can only be noted whole.
        self._write({"number": truth.number, "sending": sum(s.tokens for s in script.steps if isinstance(s, Send))})
        return script

    def record(self, truth: Truth) -> None:
        """A request came (`ended` is empty) or has ended."""
        if truth.method != "POST":
            return
        line = truth.line()
        headers = dict(truth.headers)
        self._write(
            {
                "number": truth.number, "request_id": headers.get("x-request-id", ""), "script": truth.script,
                "tag": _tag(line["body"]), "tokens_sent": truth.tokens_sent, "ended": truth.ended,
                "received_ns": truth.received_ns, "ended_ns": truth.ended_ns,
            }
        )  # fmt: skip

    def _noted(self, truth: Truth, steps: Iterable[Step]) -> Iterator[Step]:
        total = 0
        for step in steps:
            if isinstance(step, Send) and step.tokens:
                total += step.tokens
                self._write({"number": truth.number, "sending": total})
            yield step

    def _write(self, line: dict[str, object]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


class _Noted(list[Truth]):
    """Requests in order, each written down in the moment in which its last byte was read."""

    def __init__(self, record: Callable[[Truth], None]) -> None:
        super().__init__()
        self._record = record

    def append(self, truth: Truth) -> None:
        """A request is whole."""
        super().append(truth)
        self._record(truth)


def _tag(body: str) -> str:
    found = TAGGED.search(body)
    return found[1] if found else ""


async def _main(name: str, port: int, log: Path) -> None:
    engine = LoggedEngine(name, log)
    await engine.start(port=port)
    sys.stdout.write(f"{engine.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plays an engine by script and keeps the truth.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(given.name, given.port, given.log))
