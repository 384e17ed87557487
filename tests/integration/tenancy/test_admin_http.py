"""What only the HTTP door has: callers and scopes, error bodies, Idempotency-Keys, own-org reports, the document.

Owns: that every answer that is no success has OpenAI's form, that nobody sees another org, that no answer holds a
digest or a secret twice. Does not own: the rules of tenancy (test_doors.py) or the numbers of reports (billing).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from billing.adapters import sql
from billing.adapters.tables import UsageRollupRow, table
from controlplane.adapters.admin_edge import SqlThreads
from controlplane.adapters.admin_reconcile import ReconcileResult
from controlplane.adapters.key_secret import digest_key
from controlplane.adapters.keys_sql import KeyStore
from controlplane.adapters.tenancy_records import KeyWish
from controlplane.errors import StoreUnavailable
from tests.integration.tenancy.conftest import Admin


class Client:
    """The admin API with a key."""

    def __init__(self, admin: Admin, http: httpx.AsyncClient, secret: str) -> None:
        self.admin = admin
        self._http = http
        self._secret = secret

    def with_key(self, secret: str) -> Client:
        """The same with another key; "" for none."""
        return Client(self.admin, self._http, secret)

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """One request."""
        headers = {**({"authorization": f"Bearer {self._secret}"} if self._secret else {}), **more.pop("headers", {})}
        return await self._http.request(method, path, json=body, headers=headers, **more)


@pytest.fixture
async def client(admin: Admin) -> AsyncIterator[Client]:
    """The admin API with an admin key."""
    secret = admin.store.bootstrap_admin().secret
    assert secret is not None
    assert await admin.feed.caught_up(5)
    transport = httpx.ASGITransport(app=admin.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as http:
        yield Client(admin, http, secret)


async def key_with(client: Client, org: str, *scopes: str) -> tuple[str, str]:
    """A key of an org with these scopes: (secret, org id)."""
    store = client.admin.store
    record = store.create_org(org).record
    store.create_project(org, "web")
    secret = store.create_key(f"{org}/web", KeyWish(scopes=scopes)).secret
    assert secret is not None
    assert await client.admin.feed.caught_up(5)
    return secret, record.org_id


def assert_error(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """It is an OpenAI error object with its four keys, a request id and no more."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "`."))
    if code is not None:
        assert error["code"] == code
    return error


# Callers


async def test_no_key_an_unknown_key_and_a_key_without_the_scope_are_refused(client: Client) -> None:
    plain, _ = await key_with(client, "acme", "inference", "usage:read", "explain")
    assert_error(await client.with_key("").ask("GET", "/admin/v1/orgs"), 401, "invalid_api_key")
    unknown = await client.with_key("ip-aaaaaaaa-" + "x" * 43).ask("GET", "/admin/v1/orgs")
    assert_error(unknown, 401, "invalid_api_key")
    assert unknown.headers["x-should-retry"] == "false"
    error = assert_error(await client.with_key(plain).ask("GET", "/admin/v1/orgs"), 403)
    assert "'admin'" in error["message"]


async def test_a_key_may_also_come_as_x_api_key(client: Client) -> None:
    answer = await client.with_key("").ask("GET", "/admin/v1/orgs", headers={"x-api-key": client._secret})
    assert answer.status_code == 200


async def test_every_route_under_admin_refuses_a_caller_without_a_key(client: Client) -> None:
    document = (await client.ask("GET", "/admin/v1/openapi.json")).json()
    asked = 0
    for path, methods in document["paths"].items():
        for method in methods:
            answer = await client.with_key("").ask(method.upper(), re.sub(r"\{\w+\}", "x", path), {})
            assert answer.status_code == 401, (method, path, answer.text)
            asked += 1
    assert asked >= 30


async def test_a_revoked_admin_key_is_out_at_once_on_this_node(client: Client) -> None:
    made = (await client.ask("POST", "/admin/v1/keys", {"project_id": "operators/admin", "scopes": ["admin"]})).json()
    other = client.with_key(made["secret"])
    assert (await other.ask("GET", "/admin/v1/orgs")).status_code == 200
    assert (await client.ask("DELETE", f"/admin/v1/keys/{made['id']}")).status_code == 200
    assert_error(await other.ask("GET", "/admin/v1/orgs"), 401, "invalid_api_key")


async def test_a_stale_snapshot_answers_503_and_says_when_to_come_back(client: Client) -> None:
    await client.admin.feed.stop()
    deps = client.admin.app.state.calls.deps
    client.admin.app.state.calls.deps = type(deps)(
        **{**{name: getattr(deps, name) for name in deps.__dataclass_fields__}, "monotonic_s": lambda: 1e9}
    )
    answer = await client.ask("GET", "/admin/v1/orgs")
    assert_error(answer, 503, "store_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1


# Errors


BAD: tuple[tuple[str, str, bytes, int | None, str | None], ...] = (
    ("POST", "/admin/v1/orgs", b"{", 400, None),
    ("POST", "/admin/v1/orgs", b"[]", 400, None),
    ("POST", "/admin/v1/orgs", b"", 400, None),
    ("POST", "/admin/v1/orgs", b"{}", 400, "name"),
    ("POST", "/admin/v1/orgs", b'{"name": 1}', 400, "name"),
    ("POST", "/admin/v1/orgs", b'{"name": "a", "nmae": 1}', 400, "nmae"),
    ("POST", "/admin/v1/orgs", b'{"name": "\\ud800"}', 400, "name"),
    ("POST", "/admin/v1/orgs", b'{"name": "a\\u0000"}', 400, "name"),
    ("POST", "/admin/v1/orgs", b"\xff\xfe", 400, None),
    ("POST", "/admin/v1/keys", b'{"project_id": "a\\u0000b"}', None, None),
    ("POST", "/admin/v1/orgs", b"[" * 100_000, 400, None),
    ("POST", "/admin/v1/limits", b'{"scope_kind":"galaxy","scope_id":"a","dimension":"requests","amount":1}', 400,
     "scope_kind"),
    ("GET", "/admin/v1/orgs?limit=0", b"", 400, "limit"),
    ("GET", "/admin/v1/orgs?limit=x", b"", 400, "limit"),
    ("GET", "/admin/v1/audit?after=x", b"", 400, "after"),
    ("GET", "/admin/v1/usage", b"", 400, "start_time"),
    ("GET", "/admin/v1/usage?start_time=0&bucket_width=1y", b"", 400, "bucket_width"),
    ("GET", "/admin/v1/usage?start_time=0&limit=99", b"", 400, "limit"),
    ("GET", "/admin/v1/usage?start_time=0&group_by=password", b"", 400, "group_by"),
    ("GET", "/admin/v1/usage?start_time=5&end_time=5", b"", 400, "end_time"),
    ("GET", "/admin/v1/orgs/none", b"", 404, "org_id"),
    ("GET", "/admin/v1/orgs/%00", b"", None, None),
    ("GET", "/admin/v1/decisions/none", b"", 404, "request_id"),
)  # fmt: skip
"""(method, path, body, status or either of 400 and 404, param)."""


async def test_bad_requests_get_the_form_of_openai(client: Client) -> None:
    for method, path, content, status, param in BAD:
        answer = await client.ask(method, path, content=content, headers={"content-type": "application/json"})
        error = assert_error(answer, status or answer.status_code)
        assert answer.status_code in (400, 404), (path, content[:80])
        assert error["type"] == "invalid_request_error"
        assert status is None or error["param"] == param, (path, content[:80], error)


async def test_unknown_routes_and_methods_and_large_bodies_get_the_form_of_openai(client: Client) -> None:
    assert_error(await client.ask("GET", "/admin/v1/nope"), 404, "unknown_url")
    wrong = await client.ask("PUT", "/admin/v1/orgs/x")
    assert_error(wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "DELETE, GET, PATCH"
    large = await client.ask("POST", "/admin/v1/orgs", content=b"x" * (1024 * 1024 + 1))
    assert_error(large, 413, "request_too_large")
    assert large.headers["connection"] == "close"


async def test_a_body_without_a_length_is_bounded_too(client: Client) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 65_536

    assert_error(await client.ask("POST", "/admin/v1/orgs", content=endless()), 413, "request_too_large")


async def test_a_fault_of_ours_is_a_500_with_its_id_and_no_detail(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        async def get(self, request_id: str, org_id: str | None) -> None:
            raise RuntimeError("the pepper is p-e-p-p-e-r")

    deps = client.admin.app.state.calls.deps
    client.admin.app.state.calls.deps = type(deps)(
        **{**{name: getattr(deps, name) for name in deps.__dataclass_fields__}, "decisions": Broken()}
    )
    with caplog.at_level(logging.ERROR):
        answer = await client.ask("GET", "/admin/v1/decisions/x")
    error = assert_error(answer, 500, "internal_error")
    assert "p-e-p-p-e-r" not in error["message"]
    assert answer.headers["x-request-id"] in caplog.text


# Creations under an Idempotency-Key


async def test_a_repeated_creation_makes_one_key_and_shows_its_secret_once(client: Client) -> None:
    await key_with(client, "acme", "inference")
    wish, once = {"project_id": "acme/web", "name": "ci"}, {"idempotency-key": '"abc"'}
    first = await client.ask("POST", "/admin/v1/keys", wish, headers=once)
    again = await client.ask("POST", "/admin/v1/keys", wish, headers=once)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == {**first.json(), "secret": None}
    other = await client.ask("POST", "/admin/v1/keys", {**wish, "name": "cd"}, headers=once)
    assert_error(other, 422, "idempotency_key_reused")
    assert_error(await client.ask("POST", "/admin/v1/keys", wish, headers={"idempotency-key": ""}), 400)


async def test_simultaneous_repeats_make_one_key(client: Client) -> None:
    await key_with(client, "acme", "inference")
    wish, once = {"project_id": "acme/web"}, {"idempotency-key": "race"}
    answers = await asyncio.gather(*(client.ask("POST", "/admin/v1/keys", wish, headers=once) for _ in range(8)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert sum(answer.json()["secret"] is not None for answer in answers) == 1


async def test_two_callers_may_use_the_same_idempotency_key(client: Client) -> None:
    await key_with(client, "acme", "inference")
    second, _ = await key_with(client, "acme", "admin")
    once = {"idempotency-key": "same"}
    ids = {
        (await who.ask("POST", "/admin/v1/keys", {"project_id": "acme/web"}, headers=once)).json()["id"]
        for who in (client, client.with_key(second))
    }
    assert len(ids) == 2


# One's own org


def put_usage(store: KeyStore, org_id: str, tokens: int, minute_s: int) -> None:
    """A minute of usage in the roll-ups."""
    rollup = table(UsageRollupRow)
    texts = ("project_id", "key_id", "end_user", "model", "tier", "node")
    values: dict[str, Any] = {column.name: 0 for column in rollup.c} | {name: "x" for name in texts}
    values |= {"org_id": org_id, "minute_s": minute_s, "currency": "USD", "billable": True, "batch": False}
    values |= {"event_count": 1, "input_known_count": 1, "output_known_count": 1, "uncached_input_tokens": tokens}
    values |= {"input_pico": tokens * 1_000, "amount_pico": tokens * 1_000}
    with sql.write(store.db.engine) as connection:
        connection.execute(sa.insert(rollup).values(**values))


async def test_a_tenant_reads_the_usage_and_costs_of_its_own_org_only(client: Client) -> None:
    mine, my_org = await key_with(client, "acme", "usage:read")
    _, other_org = await key_with(client, "rival", "usage:read")
    minute_s = int(time.time()) // 60 * 60
    put_usage(client.admin.store, my_org, 7, minute_s)
    put_usage(client.admin.store, other_org, 1_000, minute_s)
    span = {"start_time": minute_s - 60, "end_time": minute_s + 60}
    tenant = client.with_key(mine)
    for extra in ({}, {"org_id": other_org}, {"group_by[]": "model"}, {"group_by": "project_id"}):
        answer = await tenant.ask("GET", "/v1/organization/usage/completions", params={**span, **extra})
        results = [result for bucket in answer.json()["data"] for result in bucket["results"]]
        assert [result["input_tokens"] for result in results] == [7], extra
        costs = await tenant.ask("GET", "/v1/organization/costs", params=span)
        amounts = [result["amount"] for bucket in costs.json()["data"] for result in bucket["results"]]
        assert [float(amount["value"]) for amount in amounts] == [7_000 / 1e12]
    assert_error(await tenant.ask("GET", "/admin/v1/usage", params=span), 403)
    whole = (await client.ask("GET", "/admin/v1/usage", params={**span, "group_by": "org_id"})).json()
    found = {result["org_id"]: result["input_tokens"] for bucket in whole["data"] for result in bucket["results"]}
    assert found == {my_org: 7, other_org: 1_000}
    one = (await client.ask("GET", "/admin/v1/usage", params={**span, "org_id": "rival"})).json()
    assert [result["input_tokens"] for bucket in one["data"] for result in bucket["results"]] == [1_000]


async def test_another_orgs_decision_is_not_found(client: Client) -> None:
    mine, my_org = await key_with(client, "acme", "explain")
    _, other_org = await key_with(client, "rival", "explain")
    client.admin.decisions.records = {"req_mine": (my_org, {"a": 1}), "req_other": (other_org, {"b": 2})}
    tenant = client.with_key(mine)
    assert (await tenant.ask("GET", "/admin/v1/decisions/req_mine")).json() == {"a": 1}
    hidden = assert_error(await tenant.ask("GET", "/admin/v1/decisions/req_other"), 404, "decision_not_found")
    assert hidden == assert_error(await tenant.ask("GET", "/admin/v1/decisions/req_none"), 404, "decision_not_found")
    assert (await client.ask("GET", "/admin/v1/decisions/req_other")).json() == {"b": 2}


# Prices, models, classes, audit


async def test_a_price_book_is_added_once_and_never_changed(client: Client) -> None:
    prices = [
        {"model": "m", "sku": "input", "micro_usd_per_million_tokens": 2_500_000},
        {"model": "m", "sku": "output", "micro_usd_per_million_tokens": 10_000_000},
    ]
    book = {"version": "v1", "valid_from_s": 0, "prices": prices}
    assert (await client.ask("POST", "/admin/v1/prices", book)).status_code == 201
    assert (await client.ask("POST", "/admin/v1/prices", book)).status_code == 200
    prices[0]["micro_usd_per_million_tokens"] = 1
    assert_error(await client.ask("POST", "/admin/v1/prices", book), 409, "price_book_conflict")
    error = assert_error(await client.ask("POST", "/admin/v1/prices", {**book, "prices": [prices[0]]}), 400)
    assert "no price for output" in error["message"]
    listed = (await client.ask("GET", "/admin/v1/prices")).json()["data"]
    assert [(item["id"], item["in_force"]) for item in listed] == [("v1", True)]
    assert listed[0]["prices"][0]["micro_usd_per_million_tokens"] == 2_500_000


async def test_model_names_reach_the_feed_and_may_hold_slashes(client: Client) -> None:
    wish = {"name": "fast", "served": "meta-llama/Llama-3.3-70B", "default_max_output_tokens": 512}
    assert (await client.ask("POST", "/admin/v1/models", wish)).status_code == 200
    assert (await client.ask("POST", "/admin/v1/models", {"name": "org/m", "served": "m"})).status_code == 200
    models = client.admin.feed.models
    assert (models["fast"].served, models["fast"].default_max_output_tokens) == ("meta-llama/Llama-3.3-70B", 512)
    assert (await client.ask("DELETE", "/admin/v1/models/org/m")).json()["deleted"] is True
    assert_error(await client.ask("DELETE", "/admin/v1/models/org/m"), 404, "model_not_found")
    assert set(client.admin.feed.models) == {"fast"}


async def test_a_tenant_class_is_made_and_an_org_put_into_it(client: Client) -> None:
    assert_error(await client.ask("POST", "/admin/v1/orgs", {"name": "acme", "tenant_class": "gold"}), 400)
    await client.ask("POST", "/admin/v1/tenant-classes", {"name": "gold", "outage_policy": "allow"})
    await client.ask("POST", "/admin/v1/orgs", {"name": "acme"})
    answer = await client.ask("PATCH", "/admin/v1/orgs/acme", {"tenant_class": "gold"})
    assert answer.json()["tenant_class"] == "gold"
    assert_error(await client.ask("POST", "/admin/v1/tenant-classes", {"name": "x", "outage_policy": "maybe"}), 400)


async def test_the_audit_log_says_who_did_what_newest_first(client: Client) -> None:
    await key_with(client, "acme", "inference")
    made = (await client.ask("POST", "/admin/v1/keys", {"project_id": "acme/web"})).json()
    await client.ask("DELETE", f"/admin/v1/keys/{made['id']}")
    page = (await client.ask("GET", "/admin/v1/audit", params={"org_id": "acme", "limit": 2})).json()
    assert [line["action"] for line in page["data"]] == ["key.revoke", "key.create"]
    assert {line["target_id"] for line in page["data"]} == {made["id"]}
    assert all(line["actor"].startswith("key:key_") for line in page["data"])
    rest = (await client.ask("GET", "/admin/v1/audit", params={"org_id": "acme", "after": page["next_after"]})).json()
    assert [line["action"] for line in rest["data"]] == ["key.create", "project.create", "org.create"]
    assert rest["next_after"] is None


async def test_no_answer_no_row_and_no_log_holds_a_secret_or_a_digest(
    client: Client, pepper: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await key_with(client, "acme", "inference")
    made = (await client.ask("POST", "/admin/v1/keys", {"project_id": "acme/web", "name": "ci"})).json()
    secret, digest = made["secret"], digest_key(made["secret"].encode(), pepper).hex()
    texts = []
    for method, path in (
        ("GET", f"/admin/v1/keys/{made['id']}"),
        ("GET", "/admin/v1/keys"),
        ("GET", f"/admin/v1/keys/{secret}"),
        ("DELETE", f"/admin/v1/keys/{secret}"),
        ("GET", f"/admin/v1/orgs/{secret}"),
        ("POST", f"/admin/v1/keys/{made['id']}/rotate"),
        ("GET", "/admin/v1/audit"),
    ):
        answer = await client.ask(method, path, {} if method == "POST" else None)
        texts.append(answer.text + json.dumps(dict(answer.headers)))
    texts.append((await client.with_key(secret).ask("GET", "/admin/v1/orgs")).text)
    with sql.read(client.admin.store.db.engine) as connection:
        for name in ("audit_log", "idempotency_mark", "api_key", "org"):
            columns = [column for column in sa.inspect(connection).get_columns(name) if column["name"] != "digest"]
            names = ", ".join(column["name"] for column in columns)
            texts.append(repr(connection.execute(sa.text(f"SELECT {names} FROM {name}")).all()))
    # httpx is this test's own client and logs the URLs it was given.
    texts += [record.getMessage() for record in caplog.records if record.name != "httpx"]
    hidden = secret.split("-", 2)[2]
    for text in texts:
        assert hidden not in text
        assert digest not in text


async def test_the_document_describes_every_route_with_errors_of_our_form(client: Client) -> None:
    document = (await client.with_key("").ask("GET", "/admin/v1/openapi.json")).json()
    for path in ("orgs", "projects", "keys", "limits", "prices", "models", "refusals", "usage", "costs", "audit"):
        assert f"/admin/v1/{path}" in document["paths"]
    assert {"/v1/organization/usage/completions", "/v1/organization/costs"} <= set(document["paths"])
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith(
                "ErrorAnswer"
            )
            assert operation["security"]
            assert operation["description"]
    assert "HTTPValidationError" not in json.dumps(document)


# Deadlines


async def test_a_call_that_hangs_is_answered_at_its_deadline_and_the_line_is_bounded() -> None:
    threads = SqlThreads()
    try:
        with pytest.raises(StoreUnavailable, match=r"did not answer within 0.05 s.*may or may not"):
            await threads.run(lambda: time.sleep(0.5), timeout_s=0.05)
        waiting = [asyncio.create_task(threads.run(lambda: time.sleep(0.02))) for _ in range(63)]
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="Too many admin calls"):
            await threads.run(lambda: None)
        await asyncio.gather(*waiting)
        await asyncio.sleep(0.6)  # the call that was given up lands and frees its place
        assert threads._in_flight_count == 0
        assert await threads.run(lambda: "again") == "again"
    finally:
        threads.close()


# The last reconcile


async def test_an_admin_sees_the_last_reconcile(client: Client) -> None:
    error = assert_error(await client.ask("GET", "/admin/v1/reconcile"), 404, "reconcile_not_found")
    assert "inferplane worker" in error["message"]
    now_ns = time.time_ns()
    difference = {"kind": "missing_event", "name": "0" * 32, "amount_pico": "-5"}
    client.admin.reconciles.result = ReconcileResult(now_ns - 90 * 10**9, 1.5, False, 7, 1, (difference,), 3)
    answer = await client.ask("GET", "/admin/v1/reconcile")
    assert answer.status_code == 200
    body = answer.json()
    assert 90 <= body.pop("age_s") < 150
    assert body == {
        "object": "reconcile",
        "exact": False,
        "finished_at": (now_ns - 90 * 10**9) // 10**9,
        "duration_s": 1.5,
        "event_count": 7,
        "difference_count": 1,
        "differences": [difference],
        "quarantined_count": 3,
    }


async def test_the_last_reconcile_is_for_admins_and_a_store_that_is_gone_is_a_503(client: Client) -> None:
    plain, _ = await key_with(client, "acme", "inference", "usage:read", "explain")
    assert_error(await client.with_key(plain).ask("GET", "/admin/v1/reconcile"), 403)
    client.admin.reconciles.result = StoreUnavailable("The store does not answer; try again.")
    assert_error(await client.ask("GET", "/admin/v1/reconcile"), 503, "store_unavailable")
