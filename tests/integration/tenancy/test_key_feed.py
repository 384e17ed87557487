"""The feed of one process: what it loads, follows, survives and says of itself.

Owns: starts that must fail, stores that go back in time, rows that cannot be understood, the early wake.
On SQLite and PostgreSQL. Does not own: the bound across processes and killed stores (test_revocation.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import SecretStr

from billing.adapters import sql
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.key_feed import FeedOptions, KeyFeed, RedisAnnouncer
from controlplane.adapters.key_secret import digest_key
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import KeyWish, LimitWish, NewKey
from controlplane.adapters.tenancy_tables import API_KEY, FEED_EPOCH
from controlplane.errors import ConfigError, StoreUnavailable
from controlplane.tenancy import Access, DenialReason, Denied, OutagePolicy, Principal, Scope, authorize

QUICK = FeedOptions(interval_s=0.05, start_timeout_s=3.0)


@asynccontextmanager
async def running(url: str, pepper: bytes, options: FeedOptions = QUICK) -> AsyncIterator[KeyFeed]:
    feed = KeyFeed(url, pepper, options)
    await feed.start()
    try:
        yield feed
    finally:
        await feed.stop()


def principal_of(feed: KeyFeed, pepper: bytes, key: NewKey) -> Principal | None:
    assert key.secret is not None
    return feed.snapshot.keys.get(digest_key(key.secret.encode(), pepper))


async def eventually(true: Callable[[], Any], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


@pytest.fixture
def project(store: KeyStore) -> str:
    """`acme/web`."""
    store.create_org("acme")
    store.create_project("acme", "web")
    return "acme/web"


async def test_a_principal_holds_everything_above_its_key(
    database_url: str, store: KeyStore, catalog: CatalogStore, project: str, pepper: bytes
) -> None:
    key = store.create_key(project, KeyWish(models=("m",), life_s=3_600))
    other = store.create_key(project)
    limits = [
        catalog.set_limit(LimitWish(kind, ref, "requests", amount))  # type: ignore[arg-type] # the literal kinds
        for amount, (kind, ref) in enumerate((("org", "acme"), ("project", project), ("key", key.prefix)), start=1)
    ]
    catalog.set_tenant_class("gold", "allow")
    catalog.set_org_class("acme", "gold")
    async with running(database_url, pepper) as feed:
        principal = principal_of(feed, pepper, key)
        assert principal is not None
        assert list(principal.limits) == limits
        assert principal.models == frozenset({"m"})
        assert principal.expires_at_s == key.record.expires_at_s
        assert principal.outage_policy is OutagePolicy.ALLOW
        neighbour = principal_of(feed, pepper, other)
        assert neighbour is not None
        assert neighbour.cache_salt == principal.cache_salt
        assert list(neighbour.limits) == limits[:2]
        catalog.set_tenant_class("gold", "refuse")
        await eventually(lambda: principal_of(feed, pepper, key).outage_policy is OutagePolicy.REFUSE)  # type: ignore[union-attr] # it is there


async def test_the_salt_of_an_org_is_its_own_and_the_same_on_every_node(
    database_url: str, store: KeyStore, project: str, pepper: bytes
) -> None:
    mine = store.create_key(project)
    store.create_org("rival")
    store.create_project("rival", "web")
    theirs = store.create_key("rival/web")
    salts = []
    for _ in range(2):
        async with running(database_url, pepper) as feed:
            pair = [principal_of(feed, pepper, key) for key in (mine, theirs)]
            salts.append([who.cache_salt for who in pair if who is not None])
    assert salts[0] == salts[1]
    assert len(set(salts[0])) == 2


async def test_only_what_changed_is_read_again(database_url: str, store: KeyStore, project: str, pepper: bytes) -> None:
    for _ in range(20):
        store.create_key(project)
    async with running(database_url, pepper) as feed:
        seen: list[str] = []
        sa.event.listen(feed._engine, "before_cursor_execute", lambda *call: seen.append(str(call[2])))
        before = dict(feed.snapshot.keys)
        key = store.create_key(project)
        await eventually(lambda: principal_of(feed, pepper, key))
        assert all(feed.snapshot.keys[digest] is who for digest, who in before.items()), "an old principal was rebuilt"
        assert any("api_key.changed_epoch >" in statement for statement in seen)
        seen.clear()
        assert await feed.caught_up(5)
        tables = {
            name for statement in seen for name in ("api_key", "limit_row", "org ") if f"FROM {name}" in statement
        }
        assert tables == set(), "an unchanged store was read beyond its epoch"


async def test_a_feed_with_another_pepper_does_not_start(
    database_url: str, store: KeyStore, project: str, pepper: bytes
) -> None:
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match="is not the one that the keys of this database were made with"):
        await KeyFeed(database_url, b"another pepper" * 2, QUICK).start()
    assert time.monotonic() - started_s < QUICK.start_timeout_s


async def test_a_feed_without_a_database_says_so_within_its_deadline(pepper: bytes, free_port: int) -> None:
    feed = KeyFeed(f"postgresql://u:hunter2@127.0.0.1:{free_port}/x", pepper, FeedOptions(start_timeout_s=0.6))
    with pytest.raises(
        StoreUnavailable, match=r"could not be loaded within 0\.6 s\. The database did not answer"
    ) as no:
        await feed.start()
    assert "hunter2" not in str(no.value)


async def test_a_feed_waits_for_tables_that_are_still_being_made(sql_url: str, pepper: bytes) -> None:
    feed = KeyFeed(sql_url, pepper, FeedOptions(start_timeout_s=20.0))
    starting = asyncio.create_task(feed.start())
    await eventually(lambda: feed.state().fault is not None)
    assert "inferplane db upgrade" in str(feed.state().fault)
    assert isinstance(
        authorize(feed.snapshot, Access(None, Scope.ADMIN), time.monotonic(), wall_s=0, grace_s=1e9), Denied
    )
    await asyncio.to_thread(sql.upgrade, sql_url)
    await starting
    assert feed.state().answering
    await feed.stop()


async def test_nobody_is_let_in_before_the_first_read(database_url: str, pepper: bytes) -> None:
    feed = KeyFeed(database_url, pepper)
    answer = authorize(
        feed.snapshot, Access(digest_key(b"x", pepper), Scope.ADMIN), time.monotonic(), wall_s=0, grace_s=1e9
    )
    assert answer == Denied(DenialReason.SNAPSHOT_STALE)
    await feed.stop()


async def test_a_store_that_went_back_in_time_is_loaded_whole(
    database_url: str, store: KeyStore, project: str, pepper: bytes
) -> None:
    kept, lost = store.create_key(project), store.create_key(project)
    async with running(database_url, pepper) as feed:
        assert principal_of(feed, pepper, lost)
        with sql.write(store.db.engine) as connection:  # what restoring a backup does
            connection.execute(sa.delete(API_KEY).where(API_KEY.c.id == lost.key_id))
            connection.execute(sa.update(FEED_EPOCH).values(epoch=3))
        await eventually(lambda: feed.state().epoch == 3)
        assert principal_of(feed, pepper, lost) is None
        assert principal_of(feed, pepper, kept)


async def test_a_row_that_cannot_be_understood_ages_the_snapshot_and_heals(
    database_url: str, store: KeyStore, project: str, pepper: bytes
) -> None:
    key = store.create_key(project)
    async with running(database_url, pepper) as feed:
        with sql.write(store.db.engine) as connection:
            connection.execute(sa.text("UPDATE tenant_class SET outage_policy = 'shrug', changed_epoch = 99"))
            connection.execute(sa.text("UPDATE feed_epoch SET epoch = 99"))
        await eventually(lambda: feed.state().fault is not None)
        assert feed.state().answering is False
        assert principal_of(feed, pepper, key), "known keys go on for the grace"
        age_s = feed.state().age_s
        await asyncio.sleep(0.2)
        assert feed.state().age_s > age_s + 0.1
        with sql.write(store.db.engine) as connection:
            connection.execute(sa.text("UPDATE tenant_class SET outage_policy = 'allow'"))
        await eventually(lambda: feed.state().answering)
        healed = principal_of(feed, pepper, key)
        assert healed is not None
        assert healed.outage_policy is OutagePolicy.ALLOW


async def test_a_scope_of_a_newer_version_gives_no_right(
    database_url: str, store: KeyStore, project: str, pepper: bytes
) -> None:
    key = store.create_key(project)
    with sql.write(store.db.engine) as connection:
        connection.execute(sa.update(API_KEY).values(scopes="inference teleport"))
    async with running(database_url, pepper) as feed:
        principal = principal_of(feed, pepper, key)
        assert principal is not None
        assert principal.scopes == {Scope.INFERENCE}


async def test_a_message_of_redis_wakes_the_feed_and_its_content_is_not_trusted(
    database_url: str, store: KeyStore, project: str, pepper: bytes, any_redis_url: str
) -> None:
    slow = FeedOptions(interval_s=30.0, redis_url=SecretStr(any_redis_url))
    announce = RedisAnnouncer(SecretStr(any_redis_url))
    async with running(database_url, pepper, slow) as feed:
        await eventually(lambda: feed.state().listening)
        key = store.create_key(project)
        announce(-1)
        await eventually(lambda: principal_of(feed, pepper, key))
        assert feed.state().epoch == 3
    announce.close()


async def test_a_redis_that_is_not_there_costs_an_admin_write_nothing_but_one_short_wait(
    database_url: str, store: KeyStore, pepper: bytes, free_port: int
) -> None:
    announce = RedisAnnouncer(SecretStr(f"redis://:hunter2@127.0.0.1:{free_port}/0"))
    loud = KeyStore(store.db.engine, pepper, announce=announce)
    loud.create_org("acme")
    loud.create_org("other")
    announce.close()
    gone = FeedOptions(interval_s=0.05, redis_url=SecretStr(f"redis://127.0.0.1:{free_port}/0"))
    async with running(database_url, pepper, gone) as feed:
        loud.create_org("third")
        await eventually(lambda: feed.state().epoch == 3)
        assert feed.state().listening is False
        assert feed.state().answering


async def test_a_feed_that_is_stopped_leaves_no_connection(postgres_url: str, pepper: bytes) -> None:
    sql.upgrade(postgres_url)
    async with running(postgres_url, pepper):
        pass
    others = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    engine = sql.engine(postgres_url)
    try:
        for _ in range(100):  # a server process takes its time to go after its client has closed
            with sql.read(engine) as connection:
                left_count = connection.execute(others).scalar_one()
            if left_count == 0:
                break
            await asyncio.sleep(0.05)
        assert left_count == 0
    finally:
        engine.dispose()


@pytest.mark.parametrize(("grace_s", "allowed_s"), [(0.0, 2.0), (1.0, 2.0), (60.0, 60.0)])
def test_the_allowed_age_is_the_grace_and_never_less_than_the_bound(grace_s: float, allowed_s: float) -> None:
    assert FeedOptions(grace_s=grace_s).allowed_age_s == allowed_s
