"""How far the demo's traffic is, while it runs: a bar on a terminal, a plain line every few seconds in a pipe.

Owns: what is drawn and when. Does not own: the counts (`demo_traffic.Tally`), nor what is told at the end
(`demo_report`). A log that is silent for a minute looks like a demo that hangs, so a pipe gets lines, on stderr: what
is piped on is the result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controlplane.adapters.demo_traffic import Tally

# Between two lines in a pipe: soon enough to see that something happens, a dozen lines for the usual minute.
LINE_EVERY_S = 5.0

Draw = Callable[[], None]


@contextmanager
def progress(tally: Tally, duration_s: float, say: Callable[[str], None]) -> Iterator[Draw]:
    """Gives what draws the state anew; to be called often. `say` writes a line to stderr."""
    if not sys.stderr.isatty():
        yield ProgressLines(tally, duration_s, say).draw
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=duration_s, told="")

        def draw() -> None:
            if tally.began_s is None:
                return
            gone_s = time.monotonic() - tally.began_s
            bar.update(task, completed=min(gone_s, duration_s), description="traffic", told=_counts(tally))

        yield draw


class ProgressLines:
    """One line every `LINE_EVERY_S`. Mutable: when the next is due."""

    def __init__(
        self, tally: Tally, duration_s: float, say: Callable[[str], None], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._tally = tally
        self._duration_s = duration_s
        self._say = say
        self._clock_s = clock_s
        self._next_s = clock_s() + LINE_EVERY_S

    def draw(self) -> None:
        """Say how far it is, when a line is due."""
        now_s, began_s = self._clock_s(), self._tally.began_s
        if now_s < self._next_s:
            return
        self._next_s = now_s + LINE_EVERY_S
        if began_s is None:
            self._say("starting ...")
            return
        gone_s = min(now_s - began_s, self._duration_s)
        self._say(f"traffic: {gone_s:.0f} of {self._duration_s:.0f} s, {_counts(self._tally)}")


def _counts(tally: Tally) -> str:
    return f"{tally.sent_count} requests, {tally.completed_count} completed"
