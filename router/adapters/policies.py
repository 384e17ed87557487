"""The routing policies that a simulation can name: the entry points `inferplane.policies`.

Owns: making each policy for a fleet, with its settings where it has any, and the dice that they throw. Does not own:
any rule (`router.policies`). The fleet comes from another package, which is not imported: what is read of it is written
down here as Protocols. A policy with settings takes them as its second argument `settings`, a dataclass whose default
is what was published, so that whoever names the policy can put others in its place.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from router.blocks import BlockLadder
from router.cost import Promise, Speed
from router.endpoints import Endpoint, EngineSpeed
from router.policies.aibrix_prefix import AibrixPrefix, AibrixSettings
from router.policies.asked import Dice
from router.policies.dynamo_kv import DynamoKv, DynamoSettings
from router.policies.least_requests import LeastRequests
from router.policies.llmd import LlmdDefault, LlmdDefaultSettings, LlmdPrecise, LlmdPreciseSettings
from router.policies.mooncake import Mooncake, MooncakeSettings
from router.policies.power_of_two import PowerOfTwo
from router.policies.production import BYTES_PER_TOKEN, ProductionRouter
from router.policies.round_robin import RoundRobin
from router.policies.sglang_cache_aware import SglangCacheAware, SglangSettings
from router.policies.smetric import Smetric, SmetricSettings
from router.policies.sticky import Sticky, StickyTwice, StickyTwiceSettings
from router.route import Router, RouterConfig

# Longest prompt whose prefix the router follows to its end: twice the longest context on sale (1M tokens).
_LADDER_TOKENS = 2 * 1024 * 1024


# Published settings. `DYNAMO_8`: with this scale one other session does not drive an agent's from its engine (router
# notes, section 1.2).
STICKY_TWICE = StickyTwiceSettings()
SGLANG = SglangSettings()
DYNAMO = DynamoSettings()
DYNAMO_8 = DynamoSettings(prefill_load_scale_ratio=8.0)
LLMD_DEFAULT = LlmdDefaultSettings()
LLMD_PRECISE = LlmdPreciseSettings()
AIBRIX = AibrixSettings()
MOONCAKE = MooncakeSettings()
SMETRIC = SmetricSettings()


class FleetEngine(Speed, Protocol):
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
    def kv_bytes_per_token(self) -> float: ...
    @property
    def peer_bytes_per_s(self) -> float | None: ...


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
    @property
    def slo_tpot_s(self) -> float: ...


def _dice(fleet: Fleet) -> Dice:
    return random.Random(fleet.seed).random  # noqa: S311 - repeatable ties, no secret


def round_robin(fleet: Fleet) -> RoundRobin:
    """`round_robin`."""
    return RoundRobin(len(fleet.engines))


def least_requests(fleet: Fleet) -> LeastRequests:
    """`least_requests`."""
    return LeastRequests(len(fleet.engines), _dice(fleet))


def power_of_two(fleet: Fleet) -> PowerOfTwo:
    """`power_of_two`."""
    return PowerOfTwo(len(fleet.engines), _dice(fleet))


def sticky(fleet: Fleet) -> Sticky:
    """`sticky`."""
    return Sticky(len(fleet.engines))


def sticky_2x(fleet: Fleet, settings: StickyTwiceSettings = STICKY_TWICE) -> StickyTwice:
    """`sticky_2x`."""
    return StickyTwice(len(fleet.engines), settings, _dice(fleet))


def sglang_cache_aware(fleet: Fleet, settings: SglangSettings = SGLANG) -> SglangCacheAware:
    """`sglang_cache_aware`."""
    return SglangCacheAware(len(fleet.engines), fleet.block_tokens, settings, _dice(fleet))


def dynamo_kv(fleet: Fleet, settings: DynamoSettings = DYNAMO) -> DynamoKv:
    """`dynamo_kv`: as published."""
    return DynamoKv(len(fleet.engines), fleet.block_tokens, settings, _dice(fleet))


def dynamo_kv_8(fleet: Fleet, settings: DynamoSettings = DYNAMO_8) -> DynamoKv:
    """`dynamo_kv_8`: the same with a scale of 8."""
    return dynamo_kv(fleet, settings)


def llmd_default(fleet: Fleet, settings: LlmdDefaultSettings = LLMD_DEFAULT) -> LlmdDefault:
    """`llmd_default`."""
    return LlmdDefault(len(fleet.engines), fleet.block_tokens, settings, _dice(fleet))


def llmd_precise(fleet: Fleet, settings: LlmdPreciseSettings = LLMD_PRECISE) -> LlmdPrecise:
    """`llmd_precise`."""
    return LlmdPrecise(len(fleet.engines), settings, _dice(fleet))


def aibrix_prefix(fleet: Fleet, settings: AibrixSettings = AIBRIX) -> AibrixPrefix:
    """`aibrix_prefix`."""
    return AibrixPrefix(len(fleet.engines), fleet.block_tokens, settings, _dice(fleet))


def mooncake(fleet: Fleet, settings: MooncakeSettings = MOONCAKE) -> Mooncake:
    """`mooncake`."""
    return Mooncake(fleet.engines, fleet.block_tokens, settings, _dice(fleet))


def smetric(fleet: Fleet, settings: SmetricSettings = SMETRIC) -> Smetric:
    """`smetric`."""
    return Smetric(fleet, settings)


def inferplane_route(fleet: Fleet) -> ProductionRouter:
    """`inferplane_route`: the production router with its defaults, told the promise and the engines' nominal speeds."""
    ladder = BlockLadder.uniform(fleet.block_tokens * BYTES_PER_TOKEN, _LADDER_TOKENS // fleet.block_tokens)
    endpoints = [_endpoint(engine, fleet.model) for engine in fleet.engines]
    config = RouterConfig(ladder=ladder, promise=Promise(tpot_s=fleet.slo_tpot_s))
    return ProductionRouter(Router(config), endpoints, _dice(fleet))


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
        kv_bytes_per_token=max(1, round(engine.kv_bytes_per_token)),
        kv_link_bytes_per_s=engine.peer_bytes_per_s,
        pulls_kv=engine.peer_bytes_per_s is not None,
    )
