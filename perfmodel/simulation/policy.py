"""What a simulation asks of a routing policy, and what it tells it.

Owns: the Protocol and its values. Does not own: any policy; `router` has the production router and simple rules for
comparison behind the entry points `inferplane.policies`, and knows this Protocol by its shape only, so that neither
package imports the other. A policy sees what a router in front of real engines sees: the request, its prefix blocks,
the nominal speed of each engine, and when answers begin and end; if it asks for them, also what engines publish: which
blocks they store and drop, and their metrics. It does not see hidden speeds, output lengths, or what is still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class Ask(NamedTuple):
    """One request to be placed. `session` is -1 where it has none.

    `blocks` are the ids (1 or more) of the prompt's full prefix blocks, first block first; empty for a policy that does
    not read them. `output_limit_tokens` is what the client allows, not what the answer will have.
    """

    serial: int
    model: str
    session: int
    input_tokens: int
    output_limit_tokens: int
    blocks: Sequence[int]


class Usage(NamedTuple):
    """What the engine reports with the end of an answer."""

    cached_tokens: int
    input_tokens: int
    output_tokens: int


class Policy(Protocol):
    """A routing rule. Times are seconds of the simulation and never fall."""

    hears: bool
    """Whether it wants `first_token` and `finished`; telling costs time."""
    reads_blocks: bool
    """Whether it wants `Ask.blocks`."""

    def pick(self, ask: Ask, now_s: float) -> int | tuple[int, int] | None:
        """The index of an engine of the fleet; None refuses the request.

        Two: where it goes, and whence that engine fetches the blocks of the prompt that it lacks and the other one
        holds. Without a link between them (`PolicyEngine.peer_bytes_per_s`) nothing is fetched.
        """
        ...

    def first_token(self, serial: int, now_s: float) -> None:
        """The first token of this request came."""
        ...

    def finished(self, serial: int, usage: Usage, now_s: float) -> None:
        """Its last token came."""
        ...


class KvTier(StrEnum):
    """Where an engine holds a block: in the memory that it computes from, or in its lower tier."""

    DEVICE = "device"
    LOWER = "lower"


class HearsKvEvents(Policy, Protocol):
    """A policy that hears what engines store, as from their KV events. It may leave out all of this.

    Told before a pick, late by `SimOptions.event_delay_s`: a block when the step that computes it begins (vLLM caches
    a block when it schedules it), or when it was evicted. Answers' blocks are not told: no prompt of a trace has them.
    """

    hears_kv_events: bool
    """Whether it wants `stored` and `removed`."""

    def stored(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        """These prefixes, which this engine did not hold in this tier, are there now."""
        ...

    def removed(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        """The last copy of each in this tier of this engine is gone."""
        ...


class EngineSample(NamedTuple):
    """What one engine's metrics say. `kv_usage_ratio`: blocks that requests hold; cached ones that nobody holds are
    free. `queued_tokens`: prompt tokens that wait or are not computed yet, before any cache hit of those that wait."""

    waiting_count: int
    running_count: int
    kv_usage_ratio: float
    queued_tokens: int


class HearsMetrics(Policy, Protocol):
    """A policy that reads the engines' metrics. It may leave out all of this."""

    metrics_every_s: float
    """Seconds between two readings of all engines: a sample is that old at most when a request comes. 0: none."""

    def metrics(self, samples: Sequence[EngineSample], sampled_s: float) -> None:
        """The newest reading, one sample an engine of the fleet. Told before a pick, once."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyEngine:
    """One engine that may be picked: names, and its nominal speed by the performance model.

    Prefill of u uncached tokens after c cached takes about `prefill_overhead_s + u / prefill_tok_per_s +
    prefill_s_per_token2 * u * (c + u / 2)`; a decode step with n running `decode_s_per_token + (n - 1) *
    decode_s_per_running`. Its KV comes back from the lower tier at `restore_bytes_per_s`, and from another engine at
    the slower of both `peer_bytes_per_s`; None: there is no such tier or link.
    """

    name: str
    pool: str
    accelerator: str
    zone: str
    kv_capacity_tokens: int
    prefill_tok_per_s: float
    prefill_overhead_s: float
    prefill_s_per_token2: float
    decode_s_per_token: float
    decode_s_per_running: float
    kv_bytes_per_token: float = 0.0
    restore_bytes_per_s: float | None = None
    peer_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PolicyFleet:
    """What a policy is made for. `seed` is for its own dice; the promise is what goodput counts."""

    model: str
    engines: tuple[PolicyEngine, ...]
    block_tokens: int
    seed: int
    slo_ttft_s: float = 5.0
    slo_tpot_s: float = 0.05


PolicyFactory = Callable[[PolicyFleet], Policy]
