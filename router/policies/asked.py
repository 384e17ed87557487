"""What routing rules read of a simulated request, of an engine and of an answer, written down as Protocols.

Owns: these shapes, and the draw among equals. Does not own: any rule. The simulation is another package and is not
imported: its values have these shapes and need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from router.cost import PrefillSpeed

# Uniform in [0, 1).
Dice = Callable[[], float]


class Asked(Protocol):
    """One request. `session` is -1 where it has none; `blocks` names the prompt's prefixes, the shortest first."""

    @property
    def serial(self) -> int: ...
    @property
    def session(self) -> int: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...


class Sampled(Protocol):
    """What one engine's metrics say."""

    @property
    def waiting_count(self) -> int: ...
    @property
    def kv_usage_ratio(self) -> float: ...


class NominalFleet(Protocol):
    """What a rule is made for. Its engines have the performance model's speed, which an operator can measure too."""

    @property
    def engines(self) -> Sequence[PrefillSpeed]: ...
    @property
    def block_tokens(self) -> int: ...


def one_of(engines: Sequence[int], dice: Dice) -> int:
    """One of these engines, each as likely as the others."""
    return engines[0] if len(engines) == 1 else engines[int(dice() * len(engines))]


def lowest(costs: Sequence[float], dice: Dice) -> int:
    """The engine with the lowest cost; ties are drawn."""
    least = min(costs)
    return one_of([engine for engine, cost in enumerate(costs) if cost == least], dice)


def blocks_of(tokens: float, block_tokens: int) -> int:
    """How many blocks of the trace stand for so many tokens of a router's own memory; at least one."""
    return max(1, int(tokens // block_tokens))
