"""One behaviour through three doors (KeyStore, HTTP, command line) on two databases.

Owns: what creating, listing, revoking, restoring, rotating and limiting do and refuse, whichever way they are asked.
Does not own: what a running gateway sees of it (test_key_feed.py), nor what only one door has.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.integration.tenancy.doors import Door, Refused

NOT_FOUND, CONFLICT = {404, 1}, {409, 1}
"""Statuses of the three doors: the command line exits with 1 for both and says which in words."""


@pytest.fixture
def project(door: Door) -> str:
    """A project `acme/web`."""
    door.create_org("acme")
    return str(door.create_project("acme", "web").get("project_id") or door.create_project("acme", "web")["id"])


def key_id(record: dict[str, object]) -> str:
    return str(record.get("key_id") or record["id"])


def test_the_same_name_gives_the_same_org_and_project(door: Door) -> None:
    assert door.create_org("acme") == door.create_org("acme")
    assert door.create_project("acme", "web") == door.create_project("acme", "web")
    assert door.create_org("other") != door.create_org("acme")


def test_the_same_project_name_in_two_orgs_is_two_projects(door: Door) -> None:
    for name in ("acme", "other"):
        door.create_org(name)
    assert door.create_project("acme", "web") != door.create_project("other", "web")


def test_orgs_page_by_key_and_each_comes_once(door: Door) -> None:
    names = [f"org {number}" for number in range(5)]
    for name in names:
        door.create_org(name)
    seen: list[str] = []
    after: str | None = None
    while True:
        page, after = door.list_orgs(after, 2)
        seen += [str(org["name"]) for org in page]
        if after is None:
            break
        assert len(page) == 2
    assert [name for name in seen if name in names] == names


def test_a_key_shows_its_secret_once_and_its_prefix_ever_after(door: Door, project: str) -> None:
    made = door.create_key(project, name="ci", scopes=("inference", "explain"), models=("m", "n"), life_s=3_600)
    assert re.fullmatch(r"ip-[a-z2-9]{8}-[A-Za-z0-9_-]{43}", made["secret"])
    shown = door.show_key(key_id(made))
    assert shown == {name: value for name, value in made.items() if name != "secret"}
    assert door.show_key(made["prefix"]) == shown
    assert door.list_keys(project) == [shown]
    assert list(shown["scopes"]) == ["explain", "inference"]
    assert list(shown["models"]) == ["m", "n"]


def test_revoking_a_key_again_is_no_change(door: Door, project: str) -> None:
    made = door.create_key(project)
    first = door.revoke_key(key_id(made))
    assert door.revoke_key(made["prefix"]) == first
    assert first.get("revoked_at_s", first.get("revoked_at")) is not None


def test_a_revoked_org_takes_no_new_keys_until_it_is_restored(door: Door, project: str) -> None:
    door.switch_org("acme", "revoke")
    with pytest.raises(Refused, match=r"Org 'acme' is revoked; restore it first") as refused:
        door.create_key(project)
    assert refused.value.status in CONFLICT
    with pytest.raises(Refused) as refused:
        door.create_org("acme")
    assert refused.value.status in CONFLICT
    door.switch_org("acme", "restore")
    assert door.create_key(project)["secret"]


def test_a_revoked_project_takes_no_new_keys_until_it_is_restored(door: Door, project: str) -> None:
    door.switch_project(project, "revoke")
    with pytest.raises(Refused, match=r"Project 'web' is revoked"):
        door.create_key(project)
    door.switch_project(project, "restore")
    assert door.create_key(project)["secret"]


def test_rotation_keeps_the_rights_and_ends_the_old_key_after_the_overlap(door: Door, project: str) -> None:
    old = door.create_key(project, name="ci", scopes=("inference",), models=("m",))
    new = door.rotate_key(key_id(old), 3_600)
    assert new["secret"] != old["secret"]
    assert (new["name"], list(new["scopes"]), list(new["models"])) == ("ci", ["inference"], ["m"])
    assert new["rotated_from"] == key_id(old)
    field = "expires_at_s" if "expires_at_s" in old else "expires_at"
    assert old[field] is None
    assert 3_590 <= door.show_key(key_id(old))[field] - old[field.replace("expires", "created")] <= 3_700
    assert new[field] is None


def test_rotation_without_overlap_revokes_the_old_key(door: Door, project: str) -> None:
    old = door.create_key(project)
    door.rotate_key(key_id(old), 0)
    shown = door.show_key(key_id(old))
    assert shown.get("revoked_at_s", shown.get("revoked_at")) is not None


def test_a_key_is_rotated_once_and_only_while_it_lives(door: Door, project: str) -> None:
    old, dead = door.create_key(project), door.create_key(project)
    door.rotate_key(key_id(old), 60)
    with pytest.raises(Refused, match="was rotated already") as refused:
        door.rotate_key(key_id(old), 60)
    assert refused.value.status in CONFLICT
    door.revoke_key(key_id(dead))
    with pytest.raises(Refused, match="is revoked or expired"):
        door.rotate_key(key_id(dead), 60)


def test_setting_a_limit_again_changes_it_and_keeps_its_id(door: Door) -> None:
    door.create_org("acme")
    first = door.set_limit("org", "acme", dimension="requests", amount=60)
    second = door.set_limit("org", "acme", dimension="requests", amount=30, burst=5)
    name = "limit_id" if "limit_id" in first else "id"
    assert first[name] == second[name]
    assert (first["amount"], first["burst"], second["amount"], second["burst"]) == (60, 60, 30, 5)
    assert door.list_limits("org", "acme") == [second]
    door.delete_limit(first[name])
    assert door.list_limits("org", "acme") == []
    assert door.set_limit("org", "acme", dimension="requests", amount=9)[name] == first[name]


def test_limits_of_a_key_follow_its_rotation(door: Door, project: str) -> None:
    old = door.create_key(project)
    limit = door.set_limit("key", key_id(old), dimension="concurrency", amount=4)
    new = door.rotate_key(key_id(old), 60)
    assert door.list_limits("key", key_id(new)) == [limit]


def test_limits_differ_by_model_dimension_and_period(door: Door, project: str) -> None:
    for wish in (
        {"dimension": "requests", "amount": 1},
        {"dimension": "requests", "amount": 2, "model": "m"},
        {"dimension": "requests", "amount": 3, "period_s": 3_600},
        {"dimension": "input_tokens", "amount": 4},
    ):
        door.set_limit("project", project, **wish)
    assert [limit["amount"] for limit in door.list_limits("project", project)] == [1, 2, 3, 4]


BAD: tuple[tuple[Callable[[Door], object], set[int], str], ...] = (
    (lambda door: door.create_org(""), {400}, "name is ''"),
    (lambda door: door.create_org("a/b"), {400}, "name is 'a/b'"),
    (lambda door: door.create_project("nobody", "web"), NOT_FOUND, "No org 'nobody'"),
    (lambda door: door.create_key("acme/none"), NOT_FOUND, "No project 'acme/none'"),
    (lambda door: door.create_key("acme/web", scopes=("root",)), {400}, r"(scopes|--scope) is 'root'; expected one of"),
    (lambda door: door.show_key("key_none"), NOT_FOUND, "No key 'key_none'"),
    (lambda door: door.revoke_key("ip-aaaaaaaa"), NOT_FOUND, "No key 'ip-aaaaaaaa'"),
    (lambda door: door.set_limit("org", "acme", dimension="beers", amount=1), {400}, "dimension is 'beers'"),
    (lambda door: door.set_limit("org", "acme", dimension="requests", amount=0), {400}, "amount is 0"),
    (lambda door: door.set_limit("org", "none", dimension="requests", amount=1), NOT_FOUND, "No org 'none'"),
    (lambda door: door.delete_limit("lim_none"), NOT_FOUND, "No limit 'lim_none'"),
)
"""(what is asked, statuses of the doors, pattern of the sentence; the command line names the option)."""


def test_bad_input_gets_one_clear_sentence(door: Door, project: str) -> None:
    for ask, status, words in BAD:
        with pytest.raises(Refused) as refused:
            ask(door)
        assert refused.value.status in status, words
        assert re.search(words, refused.value.message), refused.value.message
        assert "\n" not in refused.value.message
