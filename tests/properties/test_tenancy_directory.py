"""What a node knows after any sequence of changes equals what it would know from all rows at once.

Owns: the property that `Directory`, fed batch by batch, gives exactly the principals that a plain model of tenancy
says live, with their limits and policy; and the mutants that the same property must catch. Does not own: SQL or time.
Pure: rows are made in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controlplane.adapters.tenancy_changes import Changes, Directory
from controlplane.tenancy import KeyDigest, Principal
from tests.exploring import examples

# Few of each, so that changes meet the same rows again and again.
ORGS, PROJECTS, KEYS, LIMITS = 2, 4, 6, 4

Row = SimpleNamespace
Step = tuple[str, int, int]
STEPS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["org", "project", "key", "revoke key", "rotate", "limit", "class", "alias"]),
            st.integers(0, 7),
            st.integers(0, 7),
        ),
        max_size=5,
    ),
    max_size=12,
)


@dataclass
class World:
    """The rows of a small cluster, and which of them changed since the last batch."""

    classes: dict[str, Row] = field(default_factory=dict)
    orgs: dict[str, Row] = field(default_factory=dict)
    projects: dict[str, Row] = field(default_factory=dict)
    keys: dict[str, Row] = field(default_factory=dict)
    limits: dict[str, Row] = field(default_factory=dict)
    aliases: dict[str, Row] = field(default_factory=dict)
    changed: dict[tuple[str, str], Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            self.put("classes", name, Row(name=name, outage_policy="refuse"))
        for number in range(ORGS):
            self.put("orgs", f"o{number}", Row(id=f"o{number}", tenant_class="a", revoked_at_s=None))
        for number in range(PROJECTS):
            owner = f"o{number % ORGS}"
            self.put("projects", f"p{number}", Row(id=f"p{number}", org_id=owner, revoked_at_s=None))
        for number in range(KEYS):
            self.add_key(f"k{number}", f"p{number % PROJECTS}", f"k{number}")

    def put(self, table: str, name: str, row: Row) -> None:
        """Write a row."""
        getattr(self, table)[name] = row
        self.changed[table, name] = row

    def edit(self, table: str, name: str, **values: object) -> None:
        """Change a row."""
        self.put(table, name, Row(**{**vars(getattr(self, table)[name]), **values}))

    def add_key(self, key_id: str, project: str, lineage: str) -> None:
        """A key of a project."""
        row = Row(
            id=key_id,
            digest=key_id.encode(),
            org_id=self.projects[project].org_id,
            project_id=project,
            lineage_id=lineage,
            scopes="inference",
            models=None,
            expires_at_s=None,
            revoked_at_s=None,
        )
        self.put("keys", key_id, row)

    def step(self, step: Step) -> None:
        """One change, as an admin would make it."""
        what, one, other = step
        match what:
            case "org":
                name = f"o{one % ORGS}"
                self.edit("orgs", name, revoked_at_s=None if self.orgs[name].revoked_at_s else 1)
            case "project":
                name = f"p{one % PROJECTS}"
                self.edit("projects", name, revoked_at_s=None if self.projects[name].revoked_at_s else 1)
            case "key":
                self.add_key(f"n{len(self.keys)}", f"p{one % PROJECTS}", f"n{len(self.keys)}")
            case "revoke key":
                self.edit("keys", sorted(self.keys)[one % len(self.keys)], revoked_at_s=1)
            case "rotate":
                old = self.keys[sorted(self.keys)[one % len(self.keys)]]
                self.add_key(f"n{len(self.keys)}", old.project_id, old.lineage_id)
            case "limit":
                owners = [*self.orgs, *self.projects, *sorted({key.lineage_id for key in self.keys.values()})]
                self._toggle_limit(f"l{one % LIMITS}", owners[other % len(owners)])
            case "class":
                if one % 2:
                    policy = "allow" if self.classes["a"].outage_policy == "refuse" else "refuse"
                    self.edit("classes", "a", outage_policy=policy)
                else:
                    self.edit("orgs", f"o{other % ORGS}", tenant_class="ab"[one // 2 % 2])
            case "alias":
                self.put("aliases", f"m{one}", alias_row(f"m{one}", f"s{other}", deleted=other % 3 == 0))

    def _toggle_limit(self, name: str, owner: str) -> None:
        there = self.limits.get(name)
        if there is None:
            self.put("limits", name, limit_row(name, owner))
        else:  # a limit never changes its owner
            self.edit("limits", name, amount=there.amount + 1, deleted_at_s=None if there.deleted_at_s else 1)

    def take_changes(self, epoch: int) -> Changes:
        """The rows that changed since the last call."""
        taken: dict[str, list[Row]] = {}
        for (table, _), row in self.changed.items():
            taken.setdefault(table, []).append(row)
        self.changed = {}
        tables = ("classes", "orgs", "projects", "limits", "aliases", "keys")
        return Changes(epoch, *(cast("list[Any]", taken.get(table, [])) for table in tables))

    def expected(self) -> dict[KeyDigest, tuple[str, str, set[tuple[str, int]]]]:
        """digest -> (key, policy, {(limit, amount)}) of every key that lives, by the plain rule."""
        live = {}
        for key in self.keys.values():
            org, project = self.orgs[key.org_id], self.projects[key.project_id]
            if key.revoked_at_s or org.revoked_at_s or project.revoked_at_s:
                continue
            owners = {key.org_id, key.project_id, key.lineage_id}
            limits = {
                (row.id, row.amount) for row in self.limits.values() if row.scope_id in owners and not row.deleted_at_s
            }
            live[KeyDigest(key.digest)] = (key.id, self.classes[org.tenant_class].outage_policy, limits)
        return live


def limit_row(name: str, owner: str) -> Row:
    return Row(
        id=name, scope_kind="org", scope_id=owner, model="", dimension="requests", amount=1, period_s=60, burst=1,
        deleted_at_s=None,
    )  # fmt: skip


def alias_row(name: str, served: str, *, deleted: bool) -> Row:
    return Row(
        name=name, served=served, default_max_output_tokens=None, context_tokens=None,
        deleted_at_s=1 if deleted else None,
    )  # fmt: skip


def check(make: Callable[[bytes], Directory], batches: list[list[Step]]) -> None:
    """Feed a directory batch by batch; after each, its answers are those of the plain rule."""
    world, directory = World(), make(b"p" * 32)
    known: dict[KeyDigest, Principal] = {}
    for epoch, batch in enumerate([[], *batches], start=1):
        for step in batch:
            world.step(step)
        put, gone = directory.apply(world.take_changes(epoch), lambda: None)
        for digest in gone:
            known.pop(digest, None)
        known.update(put)
        seen = {
            digest: (who.key_id, who.outage_policy.value, {(limit.limit_id, limit.amount) for limit in who.limits})
            for digest, who in known.items()
        }
        assert seen == world.expected()
        served = {name: alias.served for name, alias in directory.aliases.items()}
        assert served == {row.name: row.served for row in world.aliases.values() if row.deleted_at_s is None}
        assert all(len(who.limits) == len(set(who.limits)) for who in known.values())


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
def test_batch_by_batch_equals_all_at_once(batches: list[list[Step]]) -> None:
    check(Directory, batches)


class _IgnoresOrgs(Directory):
    """An org once seen is not looked at again: the cascade of a revoked org is lost."""

    def apply(self, changes: Changes, alive: Callable[[], None]) -> Any:
        return super().apply(replace(changes, orgs=[row for row in changes.orgs if row.id not in self._orgs]), alive)


class _IgnoresProjects(Directory):
    """The same for projects."""

    def apply(self, changes: Changes, alive: Callable[[], None]) -> Any:
        known = self._live_projects
        return super().apply(replace(changes, projects=[row for row in changes.projects if row.id not in known]), alive)


class _ForgetsToDrop(Directory):
    """Revoked keys stay in the snapshot."""

    def apply(self, changes: Changes, alive: Callable[[], None]) -> Any:
        put, _ = super().apply(changes, alive)
        return put, []


class _KeepsDeletedLimits(Directory):
    """A limit that was deleted goes on."""

    def apply(self, changes: Changes, alive: Callable[[], None]) -> Any:
        return super().apply(replace(changes, limits=[row for row in changes.limits if not row.deleted_at_s]), alive)


class _LimitsByKey(Directory):
    """Limits hang on the key itself: rotation gets rid of them."""

    def apply(self, changes: Changes, alive: Callable[[], None]) -> Any:
        keys = [cast("Any", Row(**{**vars(row), "lineage_id": row.id})) for row in changes.keys]
        return super().apply(replace(changes, keys=keys), alive)


class _TouchesOnlyKeys(Directory):
    """Only keys that changed themselves are rebuilt."""

    def _take_owners(self, changes: Changes) -> Any:
        list(super()._take_owners(changes))
        return iter(())


class _IgnoresClasses(Directory):
    """A class once seen keeps its policy."""

    def apply(self, changes: Changes, alive: Callable[[], None]) -> Any:
        known = self._policies
        return super().apply(replace(changes, classes=[row for row in changes.classes if row.name not in known]), alive)


class _KeepsAliases(Directory):
    """A model name that was deleted goes on."""

    def apply(self, changes: Changes, alive: Callable[[], None]) -> Any:
        return super().apply(replace(changes, aliases=[row for row in changes.aliases if not row.deleted_at_s]), alive)


@pytest.mark.parametrize(
    "mutant",
    [
        _IgnoresOrgs,
        _IgnoresProjects,
        _ForgetsToDrop,
        _KeepsDeletedLimits,
        _LimitsByKey,
        _TouchesOnlyKeys,
        _IgnoresClasses,
        _KeepsAliases,
    ],
)
def test_the_property_catches_each_planted_fault(mutant: type[Directory]) -> None:
    @settings(max_examples=400, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(STEPS)
    def search(batches: list[list[Step]]) -> None:
        check(mutant, batches)

    with pytest.raises(AssertionError):
        search()
