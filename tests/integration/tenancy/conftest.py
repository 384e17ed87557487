"""Fixtures of the tenancy tests: a migrated database, its stores, an admin application over a real feed.

Owns: how these are built. The database is SQLite, then PostgreSQL. Does not own: servers (tests/conftest.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from billing.adapters import sql
from billing.adapters.usage_sql import SqlReports
from controlplane.adapters.admin_calls import AdminDeps
from controlplane.adapters.admin_http import build_admin_app
from controlplane.adapters.admin_prices import SqlPrices
from controlplane.adapters.admin_reconcile import ReconcileResult
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.key_feed import FeedOptions, KeyFeed
from controlplane.adapters.key_secret import load_pepper
from controlplane.adapters.keys_sql import KeyStore
from controlplane.config import Settings
from controlplane.errors import StoreUnavailable
from tests.integration.tenancy.doors import CliDoor, Door, HttpDoor, StoreDoor


@pytest.fixture
def pepper(tmp_path: Path) -> bytes:
    """The pepper of `tmp_path` as data folder: what the command line finds there too."""
    return load_pepper(Settings.model_validate({"data_dir": tmp_path / "data"}))


@pytest.fixture
def database_url(sql_url: str) -> str:
    """A migrated database, SQLite then PostgreSQL."""
    sql.upgrade(sql_url)
    return sql_url


@pytest.fixture
def store(database_url: str, pepper: bytes) -> Iterator[KeyStore]:
    """The store of that database."""
    engine = sql.engine(database_url)
    yield KeyStore(engine, pepper, actor="test")
    engine.dispose()


@pytest.fixture
def catalog(store: KeyStore) -> CatalogStore:
    """Its second half."""
    return CatalogStore(store.db)


@dataclass
class DictDecisions:
    """A `Decisions` over a dict: request id -> (org, record)."""

    records: dict[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)

    async def get(self, request_id: str, org_id: str | None) -> Mapping[str, Any] | None:
        owner, record = self.records.get(request_id, ("", {}))
        return record if owner and org_id in (None, owner) else None


@dataclass
class HeldReconciles:
    """A `Reconciles` that a test sets; a fault is raised."""

    result: ReconcileResult | StoreUnavailable | None = None

    async def last(self) -> ReconcileResult | None:
        if isinstance(self.result, StoreUnavailable):
            raise self.result
        return self.result


@dataclass
class Admin:
    """An admin application and the parts a test reaches into."""

    app: FastAPI
    feed: KeyFeed
    store: KeyStore
    decisions: DictDecisions
    reconciles: HeldReconciles


@asynccontextmanager
async def admin_over(url: str, store: KeyStore, pepper: bytes) -> AsyncIterator[Admin]:
    """The admin application over a running feed."""
    feed = KeyFeed(url, pepper, FeedOptions(interval_s=0.05))
    await feed.start()
    try:
        decisions, reconciles = DictDecisions(), HeldReconciles()
        deps = AdminDeps(
            store=store,
            catalog=CatalogStore(store.db),
            feed=feed,
            pepper=pepper,
            reports=SqlReports(store.db.engine),
            prices=SqlPrices(store.db),
            decisions=decisions,
            reconciles=reconciles,
        )
        yield Admin(build_admin_app(deps), feed, store, decisions, reconciles)
    finally:
        await feed.stop()


@pytest.fixture
async def admin(database_url: str, store: KeyStore, pepper: bytes) -> AsyncIterator[Admin]:
    """The admin application of that database."""
    async with admin_over(database_url, store, pepper) as running:
        yield running


@pytest.fixture(params=["store", "http", "cli"])
def door(
    request: pytest.FixtureRequest, database_url: str, store: KeyStore, pepper: bytes, tmp_path: Path
) -> Iterator[Door]:
    """The same database through `KeyStore`, the HTTP API and the command line."""
    if request.param == "store":
        yield StoreDoor(store)
        return
    if request.param == "cli":
        yield CliDoor(database_url, tmp_path / "data")
        return
    secret = store.bootstrap_admin().secret
    assert secret is not None
    with asyncio.Runner() as runner:
        context = admin_over(database_url, store, pepper)
        running = runner.run(context.__aenter__())
        try:
            yield HttpDoor(running.app, secret, runner)
        finally:
            runner.run(context.__aexit__(None, None, None))
