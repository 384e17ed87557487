"""The routing policies that a simulation can name: the entry points `inferplane.policies`.

Owns: making each policy for a fleet, and the dice that they throw. Does not own: any rule (`router.policies`). The
fleet comes from another package, which is not imported: what is read of it is written down here as Protocols.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from router.blocks import BlockLadder
from router.endpoints import Endpoint, EngineSpeed
from router.policies.least_requests import LeastRequests
from router.policies.production import BYTES_PER_TOKEN, ProductionRouter
from router.policies.round_robin import RoundRobin
from router.route import Router, RouterConfig

# Longest prompt whose prefix the router follows to its end: twice the longest context on sale (1M tokens).
_LADDER_TOKENS = 2 * 1024 * 1024


class FleetEngine(Protocol):
    """What is read of one engine."""

    @property
    def name(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def zone(self) -> str: ...
    @property
    def kv_capacity_tokens(self) -> int: ...
    @property
    def prefill_tok_per_s(self) -> float: ...
    @property
    def prefill_overhead_s(self) -> float: ...
    @property
    def prefill_s_per_token2(self) -> float: ...
    @property
    def decode_s_per_token(self) -> float: ...
    @property
    def decode_s_per_running(self) -> float: ...


class Fleet(Protocol):
    """What is read of the fleet."""

    @property
    def model(self) -> str: ...
    @property
    def engines(self) -> Sequence[FleetEngine]: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def seed(self) -> int: ...


def round_robin(fleet: Fleet) -> RoundRobin:
    """`round_robin`."""
    return RoundRobin(len(fleet.engines))


def least_requests(fleet: Fleet) -> LeastRequests:
    """`least_requests`."""
    return LeastRequests(len(fleet.engines), random.Random(fleet.seed).random)  # noqa: S311 - repeatable ties, no secret


def inferplane_route(fleet: Fleet) -> ProductionRouter:
    """`inferplane_route`: the production router with its default settings and the engines' nominal speeds."""
    ladder = BlockLadder.uniform(fleet.block_tokens * BYTES_PER_TOKEN, _LADDER_TOKENS // fleet.block_tokens)
    endpoints = [_endpoint(engine, fleet.model) for engine in fleet.engines]
    dice = random.Random(fleet.seed).random  # noqa: S311 - repeatable ties, no secret
    return ProductionRouter(Router(RouterConfig(ladder=ladder)), endpoints, dice)


def _endpoint(engine: FleetEngine, model: str) -> Endpoint:
    speed = EngineSpeed(
        prefill_tok_per_s=engine.prefill_tok_per_s,
        prefill_overhead_s=engine.prefill_overhead_s,
        decode_s_per_token=engine.decode_s_per_token,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        prefill_s_per_token2=engine.prefill_s_per_token2,
        decode_s_per_running=engine.decode_s_per_running,
    )
    return Endpoint(
        endpoint_id=engine.name,
        url=f"sim://{engine.name}",
        models=frozenset({model}),
        kind="sim",
        pool=engine.pool,
        zone=engine.zone,
        accelerator=engine.accelerator,
        speed=speed,
    )
