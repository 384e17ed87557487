"""The demo's tenants: orgs, projects, keys, limits and price books.

Owns: what is made, so that every part of the product has something to do. Does not own: how it is stored (`keys_sql`,
`catalog_sql`, `books_sql`). Orgs, projects and books are the same in every run; keys are new, because their secrets are
shown once and kept nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from billing.adapters import books_sql, sql
from billing.pricing import DEFAULT_TIER, PriceBook, PriceKey, Sku
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import KeyWish, LimitWish
from controlplane.config import Settings
from controlplane.tenancy import Scope

AGENT, CHAT, BATCH = "demo-agent", "demo-chat", "demo-batch"
TENANTS = (AGENT, CHAT, BATCH)
# Sample prices in micro-USD per 1,000,000 tokens: 0.20 $ input, 0.05 $ cached input, 0.60 $ output. Invented, of the
# size that hosted 8B models cost.
_SAMPLE_PRICES = {Sku.INPUT: 200_000, Sku.CACHED_INPUT: 50_000, Sku.OUTPUT: 600_000}
# The batch tenant's discount: half, as the batch prices of the large providers.
_BATCH_DIVISOR = 2
# 2025-01-01 in Unix ns: the books hold from before any run, and are the same in every run.
_VALID_FROM_NS = 1_735_689_600 * 1_000_000_000
# Limits of each org per minute: there, enforced, and a hundred times what the traffic needs.
_LIMITS = (
    ("requests", 100_000),
    ("input_tokens", 2_000_000_000),
    ("output_tokens", 100_000_000),
    ("concurrency", 1_024),
)


@dataclass(frozen=True, slots=True)
class Tenant:
    """An org with the key of this run."""

    name: str
    org_id: str
    key_id: str
    secret: str


@dataclass(frozen=True, slots=True)
class Tenants:
    """Everyone who calls."""

    by_name: dict[str, Tenant]
    admin_secret: str


def make_tenants(settings: Settings, models: tuple[str, ...]) -> Tenants:
    """Make or find the orgs, and new keys. The tables must be there. Raises GatewayError, BillingError."""
    engine = sql.engine(settings.sql_url)
    try:
        keys = KeyStore(engine, load_pepper(settings), actor="demo")
        catalog = CatalogStore(keys.db)
        tenants = {name: _tenant(keys, catalog, name) for name in TENANTS}
        admin = keys.bootstrap_admin(force=True)
        books_sql.add_book(engine, _book(models, 1, "demo", None))
        batch = tenants[BATCH].org_id
        books_sql.add_book(engine, _book(models, _BATCH_DIVISOR, f"demo-batch-{batch}", batch))
        assert admin.secret is not None
        return Tenants(tenants, admin.secret)
    finally:
        engine.dispose()


def _tenant(keys: KeyStore, catalog: CatalogStore, name: str) -> Tenant:
    org = keys.create_org(name).record
    project = keys.create_project(org.org_id, "default").record
    for dimension, amount in _LIMITS:
        catalog.set_limit(LimitWish("org", org.org_id, dimension, amount))
    scopes = (Scope.INFERENCE.value, Scope.USAGE_READ.value, Scope.EXPLAIN.value)
    made = keys.create_key(project.project_id, KeyWish("demo", scopes))
    assert made.secret is not None
    return Tenant(name, org.org_id, made.key_id, made.secret)


def _book(models: tuple[str, ...], divisor: int, version: str, org_id: str | None) -> PriceBook:
    prices: dict[PriceKey, int] = {
        (model, DEFAULT_TIER, sku): price // divisor for model in models for sku, price in _SAMPLE_PRICES.items()
    }
    return PriceBook(version, "USD", _VALID_FROM_NS, prices, org_id, note="Sample prices of inferplane demo.")
