"""The rules of good input that the command line, the HTTP API and `KeyStore` share.

Owns: each rule with an input just inside and just outside of it, and that a refusal is one sentence that never repeats
a long input. Does not own: where the rules are called from (tests/integration/tenancy). Pure.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controlplane.adapters.key_secret import mint_secret
from controlplane.adapters.tenancy_records import (
    KeyWish,
    LimitWish,
    ListQuery,
    checked_model,
    checked_name,
    checked_overlap,
    checked_scopes,
    parse_duration,
)
from controlplane.errors import BadRequest


@pytest.mark.parametrize("name", ["a", "x" * 100, "Großer Kunde 3", "日本"])
def test_names_for_people_are_taken(name: str) -> None:
    assert checked_name("name", name) == name


@pytest.mark.parametrize("name", ["", "x" * 101, " a", "a ", "a/b", "a\nb", "a\x00b", "org_1", "ip-abc", "key_1"])
def test_names_that_could_confuse_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="name is"):
        checked_name("name", name)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("24h", 86_400), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration("x", text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "1.5h", "1y", "24 h", "٣h", "9" * 13])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="expected a duration"):
        parse_duration("x", text)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: KeyWish(scopes=()).checked(),
        lambda: KeyWish(scopes=("root",)).checked(),
        lambda: KeyWish(models=()).checked(),
        lambda: KeyWish(models=("a b",)).checked(),
        lambda: KeyWish(models=tuple(f"m{i}" for i in range(201))).checked(),
        lambda: KeyWish(life_s=0).checked(),
        lambda: KeyWish(life_s=11 * 366 * 86_400).checked(),
        lambda: LimitWish("org", "o", "money", 1).checked(),
        lambda: LimitWish("org", "o", "requests", 0).checked(),
        lambda: LimitWish("org", "o", "requests", 10**12 + 1).checked(),
        lambda: LimitWish("org", "o", "requests", 1, period_s=0).checked(),
        lambda: LimitWish("org", "o", "requests", 1, burst=0).checked(),
        lambda: ListQuery(limit_count=1_001).checked(),
        lambda: checked_overlap(-1),
        lambda: checked_model("m", ""),
    ],
)
def test_a_wish_out_of_bounds_is_refused_in_one_sentence(bad: Callable[[], object]) -> None:
    with pytest.raises(BadRequest) as fault:
        bad()
    assert fault.value.status == 400
    assert fault.value.message.count("\n") == 0
    assert fault.value.message.endswith(".")
    assert len(fault.value.message) < 200


def test_a_key_pasted_where_a_name_belongs_does_not_come_back() -> None:
    secret = mint_secret().text
    with pytest.raises(BadRequest) as fault:
        checked_name("name", secret)
    assert secret not in fault.value.message
    assert secret.split("-", 2)[2][:10] not in fault.value.message


def test_scopes_and_models_are_put_in_order_without_repeats() -> None:
    assert checked_scopes(("usage:read", "admin", "admin")) == ("admin", "usage:read")
    assert KeyWish(models=("b", "a", "b")).checked().models == ("a", "b")


def test_concurrency_has_neither_period_nor_burst_of_its_own() -> None:
    one = LimitWish("org", "o", "concurrency", 5, period_s=60).checked()
    other = LimitWish("org", "o", "concurrency", 5, period_s=3_600, burst=9).checked()
    assert one == other
    assert one.burst == 5
