"""Pieces of streams that leave together: in the order they came, none lost, none later than the loop's turn."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from controlplane.adapters.gateway_server import _OUTBOX_COUNT, Outbox


class Connection:
    """Stands for a connection with one piece queued: says when it was pushed, or fails."""

    def __init__(self, name: int, pushed: list[int], *, broken: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport = self
        self.aborted = False
        self._name, self._pushed, self._broken = name, pushed, broken

    def push(self) -> None:
        if self._broken:
            raise OSError("planted")
        self._pushed.append(self._name)

    def abort(self) -> None:
        self.aborted = True


async def _turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_pieces_of_one_turn_leave_when_it_ends_in_the_order_they_came() -> None:
    pushed: list[int] = []
    outbox: Any = Outbox()
    for name in (3, 1, 2):
        outbox.put(Connection(name, pushed))
    assert pushed == []
    await _turn()
    assert pushed == [3, 1, 2]
    outbox.put(Connection(4, pushed))
    await _turn()
    assert pushed == [3, 1, 2, 4]


async def test_no_piece_waits_for_more_than_a_bounded_number_of_others() -> None:
    pushed: list[int] = []
    outbox: Any = Outbox()
    for name in range(_OUTBOX_COUNT + 1):
        outbox.put(Connection(name, pushed))
    assert pushed == list(range(_OUTBOX_COUNT))
    await _turn()
    assert pushed == list(range(_OUTBOX_COUNT + 1))


async def test_a_connection_that_fails_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    pushed: list[int] = []
    outbox: Any = Outbox()
    broken = Connection(1, pushed, broken=True)
    with caplog.at_level(logging.ERROR):
        for each in (Connection(0, pushed), broken, Connection(2, pushed)):
            outbox.put(each)
        await _turn()
    assert pushed == [0, 2]
    assert broken.aborted
    assert "could not be written" in caplog.text
