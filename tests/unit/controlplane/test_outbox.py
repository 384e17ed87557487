"""Pieces of streams that leave together: in the order they came, none lost, none later than the loop's turn."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from controlplane.adapters.gateway_server import _OUTBOX_COUNT, ClientTimes, GatewayProtocol, Outbox
from tests.unit.controlplane.test_gateway_head import HEADS, Wire, fed


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


def _streaming() -> tuple[GatewayProtocol, Wire, list[bool]]:
    """A connection in the middle of a stream, with a piece queued; what `took` is told goes to the list."""
    told: list[bool] = []
    more: dict[str, Any] = {"times": ClientTimes(15.0, 30.0), "outbox": Outbox()}
    connection, wire = fed(GatewayProtocol, HEADS["chunks"], 10_000, **more)
    connection.piece(b"", b"first")
    connection.queue(b"", b"second", told.append)
    return connection, wire, told


async def _ended() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await _turn()


async def test_a_piece_that_is_queued_goes_before_the_transport_closes_at_the_clients_end() -> None:
    connection, wire, told = _streaming()
    connection.eof_received()
    wire.close()
    connection.connection_lost(None)
    assert b"second" in wire.written and told == [True]
    assert connection.drained and connection.taken_bytes == connection.written_bytes
    await _ended()


@pytest.mark.parametrize("lost_first", [True, False])
async def test_a_piece_that_no_socket_was_given_is_not_taken(lost_first: bool) -> None:
    connection, wire, told = _streaming()
    before = connection.written_bytes
    wire.close()
    if not lost_first:
        await _turn()
    connection.connection_lost(None)
    await _turn()
    assert b"second" not in wire.written and told == [False]
    assert (connection.taken_bytes, connection.drained) == (before, False)
    assert connection.written_bytes > before
    await _ended()
