"""Who gets in: `authorize` and the snapshot it decides on.

Owns: each reason for a denial, the order in which they are found, and that a snapshot never changes under a reader.
Does not own: how a snapshot is kept current (tests/integration/tenancy). Pure: no store, no clock.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.tenancy import (
    Access,
    DenialReason,
    Denied,
    Dimension,
    KeyDigest,
    KeyId,
    Limit,
    OrgId,
    Principal,
    ProjectId,
    Scope,
    Snapshot,
    authorize,
)

DIGEST, OTHER = KeyDigest(b"a" * 32), KeyDigest(b"b" * 32)
NOW_S, WALL_S, GRACE_S = 1_000.0, 1_800_000_000.0, 60.0


def principal(**changes: object) -> Principal:
    plain = Principal(
        key_id=KeyId("key_1"),
        org_id=OrgId("org_1"),
        project_id=ProjectId("proj_1"),
        scopes=frozenset({Scope.INFERENCE}),
        models=None,
        expires_at_s=None,
        cache_salt="salt",
    )
    return replace(plain, **changes)  # type: ignore[arg-type] # fields of one frozen value


def ask(
    snapshot: Snapshot, access: Access, *, now_s: float = NOW_S, wall_s: float = WALL_S, grace_s: float = GRACE_S
) -> Principal | Denied:
    return authorize(snapshot, access, now_s, wall_s=wall_s, grace_s=grace_s)


def snapshot_of(who: Principal) -> Snapshot:
    return Snapshot(1, NOW_S, {DIGEST: who})


def test_a_live_key_with_the_scope_gets_its_principal() -> None:
    who = principal()
    assert ask(snapshot_of(who), Access(DIGEST, Scope.INFERENCE, "m")) is who


@pytest.mark.parametrize(
    ("who", "access", "denied"),
    [
        (principal(), Access(None, Scope.INFERENCE), Denied(DenialReason.NO_KEY)),
        (principal(), Access(OTHER, Scope.INFERENCE), Denied(DenialReason.UNKNOWN_KEY)),
        (principal(expires_at_s=WALL_S), Access(DIGEST, Scope.INFERENCE), Denied(DenialReason.EXPIRED_KEY)),
        (principal(), Access(DIGEST, Scope.ADMIN), Denied(DenialReason.MISSING_SCOPE, "admin")),
        (
            principal(models=frozenset({"m"})),
            Access(DIGEST, Scope.INFERENCE, "n"),
            Denied(DenialReason.MODEL_NOT_ALLOWED, "n"),
        ),
    ],
)
def test_each_reason_for_a_denial(who: Principal, access: Access, denied: Denied) -> None:
    assert ask(snapshot_of(who), access) == denied


def test_a_key_lives_until_the_very_second_it_expires() -> None:
    who = principal(expires_at_s=WALL_S)
    assert ask(snapshot_of(who), Access(DIGEST, Scope.INFERENCE), wall_s=WALL_S - 0.001) is who


@pytest.mark.parametrize(("age_s", "allowed"), [(0.0, True), (60.0, True), (60.001, False), (float("inf"), False)])
def test_a_snapshot_older_than_the_grace_lets_nobody_in(age_s: float, allowed: bool) -> None:
    answer = ask(Snapshot(1, NOW_S - age_s, {DIGEST: principal()}), Access(DIGEST, Scope.INFERENCE))
    assert isinstance(answer, Principal) == allowed
    assert allowed or answer == Denied(DenialReason.SNAPSHOT_STALE)


def test_a_stale_snapshot_does_not_say_whether_a_key_is_known() -> None:
    stale = Snapshot(1, NOW_S - 100, {DIGEST: principal()})
    known, unknown = ask(stale, Access(DIGEST, Scope.INFERENCE)), ask(stale, Access(OTHER, Scope.INFERENCE))
    assert known == unknown == Denied(DenialReason.SNAPSHOT_STALE)


def test_a_change_makes_a_new_snapshot_and_leaves_the_old_one_as_it_was() -> None:
    before = Snapshot(1, NOW_S, {DIGEST: principal()})
    after = before.changed(2, NOW_S + 1, {OTHER: principal(key_id=KeyId("key_2"))}, [DIGEST])
    assert set(before.keys) == {DIGEST}
    assert set(after.keys) == {OTHER}
    assert (after.epoch, after.read_at_s) == (2, NOW_S + 1)


def test_a_key_that_is_dropped_and_put_in_one_change_is_put() -> None:
    after = Snapshot(1, NOW_S, {DIGEST: principal()}).changed(2, NOW_S, {DIGEST: principal(models=None)}, [DIGEST])
    assert DIGEST in after.keys


def test_confirming_keeps_the_keys_and_moves_only_the_time() -> None:
    before = Snapshot(7, NOW_S, {DIGEST: principal()})
    after = before.confirmed(NOW_S + 5)
    assert (after.epoch, after.read_at_s, after.keys) == (7, NOW_S + 5, before.keys)


def test_limits_for_a_model_are_those_of_any_model_and_its_own() -> None:
    limits = tuple(
        Limit(name, "org", "org_1", model, Dimension.REQUESTS, 1, 60, 1)
        for name, model in (("any", None), ("mine", "m"), ("other", "n"))
    )
    assert [limit.limit_id for limit in principal(limits=limits).limits_for("m")] == ["any", "mine"]
