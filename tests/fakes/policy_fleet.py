"""What a routing policy is made for and asked, in the shape that a simulation gives it.

Owns: an engine, a fleet and a request with defaults that a test changes where it matters. Does not own: any policy.
Values of the tests' own, because `router` knows the simulation's values by their shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Engine:
    """One engine that may be picked."""

    name: str
    pool: str = "p"
    accelerator: str = "a"
    zone: str = ""
    kv_capacity_tokens: int = 2_700_000
    prefill_tok_per_s: float = 10_000.0
    prefill_overhead_s: float = 0.0
    prefill_s_per_token2: float = 0.0
    decode_s_per_token: float = 0.02
    decode_s_per_running: float = 0.0
    kv_bytes_per_token: float = 1_000.0
    peer_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Fleet:
    """What a policy is made for."""

    engines: tuple[Engine, ...]
    model: str = "m"
    block_tokens: int = 16
    seed: int = 0
    slo_tpot_s: float = 0.05


class Ask(NamedTuple):
    """One request."""

    serial: int
    model: str = "m"
    session: int = -1
    input_tokens: int = 64
    output_limit_tokens: int = 100
    blocks: tuple[int, ...] = ()
