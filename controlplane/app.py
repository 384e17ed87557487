"""The composition root of a gateway process: builds the adapters, hands them to the cores, answers HTTP.

Owns: which adapter stands behind which port, the order of start and stop, and what makes the process ready. Does not
own: any rule. It is the only module of the package that sees everything, and the only one that hands a performance
model to the request path (engine speeds for the router's seconds).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import redis.asyncio
import uuid_utils

from billing.adapters import sql
from billing.adapters.price_feed import PriceFeed
from billing.adapters.shipper_status import STATUS_STALE_S, read_status
from billing.adapters.usage_sql import SqlReports
from controlplane.adapters.admin_http import AdminDeps, build_admin_app
from controlplane.adapters.admin_prices import SqlPrices
from controlplane.adapters.admin_reconcile import RedisReconciles
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.decisions_redis import RedisDecisions
from controlplane.adapters.engine_http import EngineClient
from controlplane.adapters.fleet import CACHE_SALT_KINDS, EngineFleet, FleetDeps
from controlplane.adapters.key_feed import FeedOptions, KeyFeed, RedisAnnouncer
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.limits_redis import LimitsOptions, RedisLimits
from controlplane.adapters.openai_http import OpenAiEdge, OpenAiRoutes, RoutesConfig, RoutesDeps
from controlplane.adapters.ops_http import OpsRoutes, Readiness
from controlplane.adapters.spool import Spool, SpoolSettings
from controlplane.adapters.telemetry import Telemetry
from controlplane.config import Settings, engine_secret, tokenizer_sources
from controlplane.ports import Deadlines, ModelFacts, Ports
from controlplane.serve import Path
from controlplane.tenancy import Principal
from router.adapters.discovery import Discovery, EngineProbe, HealthWatch
from router.adapters.siblings import Siblings
from router.blocks import BlockHasher
from router.endpoints import Endpoint, EngineSpeed, HopTable, Place
from router.pair_route import PairingRouter
from router.route import RouterConfig
from router.volatile_prefix import VolatilePrefixes

if TYPE_CHECKING:
    from perfmodel.adapters.catalog import Catalog
    from perfmodel.coefficients import Coefficients
    from router.adapters.exact_prefixes import ExactPrefixes

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_log = logging.getLogger(__name__)
# How late a gateway may learn of a new price book.
_PRICE_REFRESH_S = 1.0
# How long a new engine may take to tell its models before an unknown model is called unknown: it may load weights.
_LEARNING_S = 60.0
# While Redis is gone, `serve` applies the policy of the caller's tenant class.
_LIMITS = LimitsOptions(policy="as the tenant's class declares; without one: refuse")
# How often buffered access lines are written and gauges refreshed.
_TICK_S = 0.25


class SystemClock:
    """The `Clock` port on this machine's clocks."""

    monotonic_s = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)
    unix_ns = staticmethod(time.time_ns)

    @staticmethod
    def event_id() -> str:
        """A UUIDv7 in 32 hex digits."""
        return uuid_utils.uuid7().hex


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the parent process decided for this one."""

    incarnation: str
    """New for every start of a process: names its spool folder and its share of limits."""
    run_dir: pathlib.Path
    """Folder of sockets and metrics files that the node's processes share."""
    node: str


class Gateway:
    """One gateway process as an ASGI application. Mutable: its parts live from `start` to `stop`."""

    def __init__(self, settings: Settings, facts: ProcessFacts) -> None:
        self._settings = settings
        self._facts = facts
        self._draining = False
        self._untold_s: dict[str, float] = {}
        """Since when each engine is listed that has not told its models yet."""
        self._ticker: asyncio.Task[None] | None = None
        self._pepper = load_pepper(settings)
        self._clock = SystemClock()
        self._build_stores(settings, facts)
        self._build_routing(settings, facts)
        self._names = FeedNames(self._feed, settings.default_max_output_tokens)
        self._build_doors(settings, facts, self._build_fleet(settings))

    def _build_stores(self, settings: Settings, facts: ProcessFacts) -> None:
        redis_url = settings.redis_url.get_secret_value()
        self._engine = sql.engine(settings.sql_url)
        self._prices = PriceFeed(self._engine, _PRICE_REFRESH_S)
        options = FeedOptions(
            interval_s=settings.feed_interval_s, grace_s=settings.key_grace_s, redis_url=settings.redis_url
        )
        self._feed = KeyFeed(settings.sql_url, self._pepper, options)
        self._limits = RedisLimits(redis_url, facts.incarnation, options=_LIMITS)
        self._spool = Spool(SpoolSettings(settings.spool_dir, facts.node, facts.incarnation, settings.spool_max_bytes))
        self._redis = redis.asyncio.Redis.from_url(redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        self._decisions = RedisDecisions(self._redis)

    def _build_routing(self, settings: Settings, facts: ProcessFacts) -> None:
        hops = HopTable(Place(settings.zone, settings.region))
        shared = settings.workers > 1  # a node's processes tell each other what they pick
        config = RouterConfig(share=shared, hops=hops)
        self._router = PairingRouter(config)
        self._hasher = BlockHasher(self._pepper, config.ladder)
        self._siblings = Siblings(self._router, facts.run_dir / "siblings") if shared else None
        probe = EngineProbe(engine_secret)
        self._discovery = Discovery(
            settings.endpoints_file if settings.endpoints_file is not None else (),
            self._set_endpoints,
            probe,
            poll_s=settings.endpoints_poll_s,
            report=_log.warning,
        )
        self._exact: ExactPrefixes | None = None
        sources = tokenizer_sources(settings.tokenizers)
        if sources:
            # Only here: numpy and the tokenizers are 40 MB that a process does without where no events are heard.
            from router.adapters.exact_prefixes import ExactPrefixes

            self._exact = ExactPrefixes(
                self._pepper, sources, probe,
                salted_kinds=CACHE_SALT_KINDS, monotonic_s=self._clock.monotonic_s, report=_log.warning,
            )  # fmt: skip
        self._health = HealthWatch(self._router.broken, self._router.health, probe)
        self._client = EngineClient()

    def _build_fleet(self, settings: Settings) -> EngineFleet:
        deps = FleetDeps(
            router=self._router,
            pairs=self._router,
            exact=self._exact,
            volatile=VolatilePrefixes(self._pepper[:64]),
            volatile_found=self._volatile_found,
            hasher=self._hasher,
            client=self._client,
            names=self._names,
            decisions=self._decisions,
            monotonic_s=self._clock.monotonic_s,
            dice=random.random,
            learning=self._is_learning,
            engine_key=engine_secret,
        )
        return EngineFleet(deps, settings.default_max_output_tokens)

    def _build_doors(self, settings: Settings, facts: ProcessFacts, fleet: EngineFleet) -> None:
        self._telemetry = Telemetry(
            facts.run_dir / "metrics", settings.access_log, lambda name: isinstance(fleet.model(name), ModelFacts)
        )
        edge = OpenAiEdge()
        ports = Ports(fleet, self._limits, self._spool, edge, self._clock, self._prices.version_at)
        self._routes = OpenAiRoutes(
            RoutesDeps(
                Path(ports, _deadlines(settings), facts.node),
                edge,
                self._feed,
                self._clock,
                self._telemetry,
                self._models,
            ),
            RoutesConfig(
                self._pepper,
                self._feed.allowed_age_s,
                settings.max_body_bytes,
                settings.idle_timeout_s,
                settings.total_timeout_s,
            ),
        )
        reconciles = RedisReconciles(self._redis)
        self._ops = OpsRoutes(self._readiness, self._telemetry.render, reconciles)
        announcer = RedisAnnouncer(settings.redis_url) if settings.redis_url.get_secret_value() else None
        store = KeyStore(self._engine, self._pepper, announce=announcer)
        self._admin = build_admin_app(
            AdminDeps(
                store=store,
                catalog=CatalogStore(store.db),
                feed=self._feed,
                pepper=self._pepper,
                reports=SqlReports(self._engine),
                prices=SqlPrices(store.db),
                decisions=self._decisions,
                reconciles=reconciles,
            )
        )

    def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> Awaitable[None]:
        """The ASGI entry: the data plane first, everything else is the framework's."""
        if scope["type"] == "lifespan":
            return self._lifespan(receive, send)
        path = scope["path"]
        if self._routes.serves(path):
            return self._routes(scope, receive, send)
        if self._ops.serves(path):
            return self._ops(scope, send)
        return self._admin(scope, receive, send)

    def drain(self) -> None:
        """From now on `/readyz` answers 503; requests are still served."""
        self._draining = True

    async def start(self) -> None:
        """Bring the parts up, the ones that others stand on first."""
        await self._feed.start()
        await self._prices.start()
        await self._limits.start()
        await self._spool.start()
        await self._decisions.start()
        if self._siblings is not None:
            await self._siblings.start()
        if self._exact is not None:
            self._exact.start()
        await self._discovery.start()
        await self._health.start()
        self._ticker = asyncio.create_task(self._tick(), name="telemetry")

    async def stop(self) -> None:
        """Stop in the opposite order; the spool is flushed and synced before this returns."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        await self._health.stop()
        await self._discovery.stop()
        if self._exact is not None:
            await self._exact.stop()
        if self._siblings is not None:
            await self._siblings.stop()
        await self._client.aclose()
        await self._limits.aclose()
        await self._spool.aclose()
        await self._decisions.stop()
        await self._redis.aclose()
        await self._feed.stop()
        await self._prices.stop()
        self._engine.dispose()
        self._telemetry.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.start()
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    def _set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self._router.set_endpoints(modelled_speeds(endpoints), time.monotonic())
        if self._exact is not None:
            self._exact.hear(endpoints)
        untold = {each.endpoint_id for each in endpoints if not each.models}
        now_s = time.monotonic()
        self._untold_s = {name: self._untold_s.get(name, now_s) for name in untold}

    def _volatile_found(self, model: str) -> None:
        self._telemetry.volatile(model)

    def _is_learning(self) -> bool:
        return any(time.monotonic() - since_s < _LEARNING_S for since_s in self._untold_s.values())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            feed, spool = self._feed.state(), self._spool.state()
            if self._exact is not None:
                self._telemetry.exact(self._exact.counts)
            shipper = read_status(self._settings.spool_dir)
            self._telemetry.tick(
                {"sql": feed.answering, "redis": self._limits.state().answering},
                {
                    "key_snapshot_age_s": feed.age_s,
                    "key_epoch_count": feed.epoch,
                    "spool_bytes": spool.node_bytes,
                    "spool_open_count": spool.open_count,
                    "shipper_lag_s": None if shipper is None else shipper.lag_s,
                    "prefix_index_bytes": self._router.index_bytes,
                    "kv_index_bytes": None if self._exact is None else self._exact.totals().size_bytes,
                },
            )

    def _models(self, who: Principal) -> list[str]:
        known = self._names.names() | self._router.models
        return sorted(name for name in known if who.models is None or name in who.models)

    def _readiness(self) -> Readiness:
        feed, spool, limits = self._feed.state(), self._spool.state(), self._limits.state()
        blockers = []
        if self._draining:
            blockers.append("draining")
        if feed.grace_left_s <= 0:
            blockers.append("keys cannot be checked: the database has not answered for longer than the grace")
        if not spool.accepting:
            blockers.append(spool.reason or "the usage spool takes no records")
        if not self._router.models:
            blockers.append("no engine serves a model yet")
        shipper = read_status(self._settings.spool_dir)
        alive = shipper is not None and time.time_ns() - shipper.updated_ns < STATUS_STALE_S * 1e9
        engines = [
            {
                "id": each.endpoint.endpoint_id,
                "breaker": each.breaker.value,
                "drain": each.endpoint.drain,
                "kv_events": None if self._exact is None else self._exact.state_of(each.endpoint.endpoint_id),
            }
            for each in self._router.status(time.monotonic())
        ]
        parts = {
            "keys": {**asdict(feed), "age_s": min(feed.age_s, 1e9)},
            "limits": asdict(limits),
            "spool": asdict(spool),
            "shipper": {"alive": alive, **(asdict(shipper) if shipper is not None else {})},
            "engines": engines,
            "endpoints_file": self._discovery.fault,
        }
        return Readiness(tuple(blockers), parts)


class FeedNames:
    """The operator's model names out of the key feed."""

    def __init__(self, feed: KeyFeed, default_max_output_tokens: int) -> None:
        self._feed = feed
        self._default = default_max_output_tokens

    def alias(self, name: str) -> ModelFacts | None:
        """What a name stands for; None when the operator did not name it."""
        found = self._feed.models.get(name)
        if found is None:
            return None
        return ModelFacts(found.served, found.default_max_output_tokens or self._default)

    def names(self) -> frozenset[str]:
        """Every name."""
        return frozenset(self._feed.models)


def _deadlines(settings: Settings) -> Deadlines:
    return Deadlines(
        settings.connect_timeout_s, settings.first_byte_timeout_s, settings.idle_timeout_s, settings.total_timeout_s
    )


def modelled_speeds(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """The endpoints, with the performance model's speed where one names an accelerator and model that the model knows.

    An endpoint without is learned from its traffic. The data files are only read where one asks for it.
    """
    asking = [each for each in endpoints if each.speed is None and each.accelerator and len(each.models) == 1]
    if not asking:
        return list(endpoints)
    # Only here: numpy and the model are 14 MB that a process does without where no endpoint tells its accelerator.
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.coefficient_file import load_coefficients

    catalog, coefficients = load_catalog(), load_coefficients().coefficients
    return [_modelled(each, catalog, coefficients) if each in asking else each for each in endpoints]


def _modelled(endpoint: Endpoint, catalog: Catalog, coefficients: Coefficients) -> Endpoint:
    from perfmodel.errors import PerfModelError
    from perfmodel.step_time import StepModel, engine_speed

    try:
        shape = catalog.shape(endpoint.accelerator, next(iter(endpoint.models)), 1)
        facts = engine_speed(StepModel(shape, coefficients))
    except PerfModelError:
        return endpoint
    speed = EngineSpeed(
        facts.prefill_tok_per_s, facts.prefill_overhead_s, facts.decode_s_per_token, facts.kv_capacity_tokens
    )
    return replace(endpoint, speed=speed)
