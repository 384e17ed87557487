"""What is stored: secrets never, the pepper's mark, epochs with every change, one writer at a time, the migration.

Owns: the promises of `keys_sql`, `catalog_sql` and `tenancy_tx` that no door shows. On SQLite and PostgreSQL. Does not
own: the behaviour behind the doors (test_doors.py) or what a node makes of it (test_key_feed.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlmodel import SQLModel

from billing.adapters import sql
from controlplane.adapters import tenancy_tables
from controlplane.adapters.catalog_sql import CatalogStore
from controlplane.adapters.key_secret import digest_key
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import Idempotency, KeyWish, LimitWish
from controlplane.adapters.tenancy_tables import API_KEY, AUDIT_LOG, FEED_EPOCH, IDEMPOTENCY_MARK
from controlplane.errors import BadRequest, ConfigError, StoreUnavailable
from controlplane.tenancy import ModelAlias


@pytest.fixture
def project(store: KeyStore) -> str:
    """`acme/web`."""
    store.create_org("acme")
    store.create_project("acme", "web")
    return "acme/web"


def rows(store: KeyStore, table: sa.Table) -> list[sa.Row[Any]]:
    with sql.read(store.db.engine) as connection:
        return list(connection.execute(sa.select(table)).all())


def epoch(store: KeyStore) -> int:
    return int(rows(store, FEED_EPOCH)[0].epoch)


def test_of_a_secret_only_its_keyed_digest_and_its_public_prefix_are_stored(
    store: KeyStore, project: str, pepper: bytes
) -> None:
    key = store.create_key(project, KeyWish("ci"))
    assert key.secret is not None
    (row,) = rows(store, API_KEY)
    assert bytes(row.digest) == digest_key(key.secret.encode(), pepper)
    assert row.prefix == key.secret[:11] == key.prefix
    hidden = key.secret[12:]
    everything = repr([rows(store, table) for table in SQLModel.metadata.sorted_tables if table.name != "x"])
    assert hidden not in everything
    assert hidden not in repr(key)


def test_every_change_moves_the_epoch_and_stamps_its_row(store: KeyStore, catalog: CatalogStore) -> None:
    made: dict[str, str] = {}
    changes: list[Callable[[], object]] = [
        lambda: store.create_org("acme"),
        lambda: store.create_project("acme", "web"),
        lambda: made.update(key=store.create_key("acme/web").key_id),
        lambda: made.update(new=store.rotate_key(made["key"], 60).key_id),
        lambda: store.revoke_key(made["new"]),
        lambda: store.revoke_project("acme/web"),
        lambda: store.restore_project("acme/web"),
        lambda: store.revoke_org("acme"),
        lambda: store.restore_org("acme"),
        lambda: made.update(limit=catalog.set_limit(LimitWish("org", "acme", "requests", 5)).limit_id),
        lambda: catalog.delete_limit(made["limit"]),
        lambda: catalog.set_model(ModelAlias("fast", "m", None, None)),
        lambda: catalog.delete_model("fast"),
        lambda: catalog.set_tenant_class("gold", "allow"),
        lambda: catalog.set_org_class("acme", "gold"),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        assert epoch(store) == number
    stamped = [table for table in SQLModel.metadata.sorted_tables if "changed_epoch" in table.c]
    assert {row.changed_epoch for table in stamped for row in rows(store, table)} <= set(range(len(changes) + 1))
    audit = rows(store, AUDIT_LOG)
    assert [line.epoch for line in audit] == list(range(1, len(changes) + 1))
    assert {line.actor for line in audit} == {"test"}


def test_a_refused_change_leaves_nothing_behind(store: KeyStore, project: str) -> None:
    before = (epoch(store), rows(store, AUDIT_LOG))
    store.revoke_org("acme")
    for refused in (lambda: store.create_key(project), lambda: store.create_org("acme")):
        with pytest.raises(BadRequest):
            refused()
    assert epoch(store) == before[0] + 1
    assert len(rows(store, AUDIT_LOG)) == len(before[1]) + 1
    assert rows(store, API_KEY) == []


def test_writers_at_once_make_one_org_and_lose_no_epoch(store: KeyStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: store.create_org("acme"), range(16)))
    assert len({one.record.org_id for one in made}) == 1
    assert sum(one.created for one in made) == 1
    assert epoch(store) == 16


def test_bootstrap_makes_one_admin_key_unless_forced_and_again_when_it_is_dead(store: KeyStore) -> None:
    first = store.bootstrap_admin()
    assert first.record.scopes == ("admin", "explain", "usage:read")
    with pytest.raises(BadRequest, match="--force") as refused:
        store.bootstrap_admin()
    assert refused.value.status == 409
    store.bootstrap_admin(force=True)
    for key in store.list_keys().items:
        store.revoke_key(key.key_id)
    assert store.bootstrap_admin().secret


def test_bootstrap_at_once_makes_one_admin_key(store: KeyStore) -> None:
    def attempt(_: int) -> bool:
        try:
            return store.bootstrap_admin().secret is not None
        except BadRequest:
            return False

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(attempt, range(6))) == 1


def test_an_idempotency_mark_is_forgotten_after_two_days(database_url: str, pepper: bytes) -> None:
    clock = [1_800_000_000.0]
    engine = sql.engine(database_url)
    store = KeyStore(engine, pepper, clock_s=lambda: clock[0])
    store.create_org("acme")
    store.create_project("acme", "web")
    once = Idempotency("caller", "mark", "print")
    first = store.create_key("acme/web", idempotency=once)
    clock[0] += 47 * 3_600
    assert store.create_key("acme/web", idempotency=once).key_id == first.key_id
    clock[0] += 2 * 3_600
    assert store.create_key("acme/web", idempotency=once).key_id != first.key_id
    assert len(rows(store, IDEMPOTENCY_MARK)) == 1
    engine.dispose()


def test_a_node_with_another_pepper_is_refused_in_one_sentence(store: KeyStore, database_url: str) -> None:
    store.create_org("acme")
    stranger = KeyStore(store.db.engine, b"another pepper" * 2)
    with pytest.raises(ConfigError, match=r"key pepper .* is not the one .*INFERPLANE_KEY_PEPPER") as fault:
        stranger.create_org("other")
    assert "another pepper" not in str(fault.value)
    assert [org.name for org in store.list_orgs().items] == ["acme"]


def test_a_database_without_tables_says_what_to_run(sql_url: str, pepper: bytes) -> None:
    engine = sql.engine(sql_url)
    store = KeyStore(engine, pepper)
    for ask in (lambda: store.create_org("acme"), store.list_orgs):
        with pytest.raises(StoreUnavailable, match="inferplane db upgrade"):
            ask()
    engine.dispose()


def test_a_database_that_is_not_there_is_one_sentence_without_its_password(pepper: bytes, free_port: int) -> None:
    engine = sql.engine(f"postgresql://admin:hunter2@127.0.0.1:{free_port}/x")
    with pytest.raises(StoreUnavailable) as fault:
        KeyStore(engine, pepper).list_orgs()
    assert "hunter2" not in str(fault.value)
    assert "\n" not in str(fault.value)
    engine.dispose()


def test_an_owner_has_a_bounded_number_of_limits(store: KeyStore, catalog: CatalogStore) -> None:
    store.create_org("acme")
    for number in range(50):
        catalog.set_limit(LimitWish("org", "acme", "requests", 5, model=f"m{number}"))
    with pytest.raises(BadRequest, match="has 50 limits already") as refused:
        catalog.set_limit(LimitWish("org", "acme", "requests", 5))
    assert refused.value.status == 409
    catalog.set_limit(LimitWish("org", "acme", "requests", 9, model="m0"))


def test_a_deaf_announcer_is_told_after_the_commit_and_never_for_a_refusal(database_url: str, pepper: bytes) -> None:
    heard: list[tuple[int, int]] = []
    engine = sql.engine(database_url)
    plain = KeyStore(engine, pepper)
    store = KeyStore(engine, pepper, announce=lambda number: heard.append((number, epoch(plain))))
    store.create_org("acme")
    with pytest.raises(BadRequest):
        store.create_project("none", "web")
    assert heard == [(1, 1)]
    engine.dispose()


def test_the_migration_makes_the_tables_that_the_models_declare(store: KeyStore) -> None:
    ours = {table.name for table in vars(tenancy_tables).values() if isinstance(table, sa.Table)}

    def only_ours(name: str | None, kind: str, parents: Any) -> bool:
        return kind != "table" or name in ours

    with sql.read(store.db.engine) as connection:
        options = {"include_name": only_ours, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        found = [
            change
            for change in compare_metadata(context, SQLModel.metadata)
            if getattr(getattr(change[1], "table", change[1]), "name", None) in ours
        ]
    assert found == []
    assert len(ours) == 9


def test_the_pepper_file_of_one_data_folder_serves_a_second_process(
    store: KeyStore, tmp_path: Path, project: str
) -> None:
    from controlplane.adapters.key_secret import load_pepper
    from controlplane.config import Settings

    again = load_pepper(Settings.model_validate({"data_dir": tmp_path / "data"}))
    assert KeyStore(store.db.engine, again).create_key(project).secret
