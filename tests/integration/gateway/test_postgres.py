"""The same node on PostgreSQL: who may come in, what is billed, and that a database that goes away stops nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from billing.usage_event import Outcome
from tests.integration.gateway.client import Caller, RawClient, assert_error, body, request, text_of
from tests.integration.gateway.conftest import ENV, assert_books_exact
from tests.integration.gateway.stack import Engines, Node, Tenant, Tenants, endpoint, eventually, running_node
from tests.services import Postgres, temporary_folder


class Crowd:
    """The tenants of this node."""

    plain: Tenant
    limited: Tenant

    def prepare(self, tenants: Tenants) -> None:
        """Make them."""
        self.plain = tenants.tenant()
        self.limited = tenants.tenant(limits={"requests": 2})


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    return Crowd()


@pytest.fixture(scope="module")
def big(engines: Engines, crowd: Crowd, postgres_server: Postgres) -> Iterator[Node]:
    """The node; at the end its books are proven exact."""
    by = engines.by_name
    rows = [endpoint(by["e1"], "e1", ["m"]), endpoint(by["e2"], "e2", ["m"])]
    with temporary_folder() as folder, postgres_server.database() as url:
        with running_node(folder / "node", rows, ENV, database_url=url, prepare=crowd.prepare) as node:
            yield node
            assert_books_exact(node)
            assert node.stop() == 0
            assert "Traceback" not in node.log_text()


def test_requests_are_served_metered_and_billed(big: Node, crowd: Crowd) -> None:
    caller = Caller(big, crowd.plain)
    assert caller.post(body("normal?cached=7")).status_code == 200
    with caller.stream(body(stream=True)) as answer:
        assert text_of(answer.read()) == "tok1 tok2 tok3 tok4 tok5 "
    with RawClient(big) as raw:
        raw.send(request(crowd.plain, body("normal?tokens=500&gap_ms=10", stream=True)))
        raw.read_until(b"tok5 ")
    eventually(lambda: len(big.events_of(crowd.plain)) == 3, "three events")
    assert {event.close.outcome for event in big.events_of(crowd.plain)} == {Outcome.COMPLETED, Outcome.CANCELLED}


def test_limits_hold(big: Node, crowd: Crowd) -> None:
    statuses = [Caller(big, crowd.limited).post(body()).status_code for _ in range(5)]
    assert sorted(statuses) == [200, 200, 429, 429, 429]


def test_a_key_made_and_revoked_while_it_runs_is_known_within_two_seconds(big: Node) -> None:
    tenant = big.tenants.tenant()
    caller = Caller(big, tenant)

    def all_say(status: int) -> bool:
        return {caller.post(body()).status_code for _ in range(6)} == {status}

    eventually(lambda: all_say(200), "the new key", 3)
    big.tenants.keys.revoke_key(tenant.key_id)
    eventually(lambda: all_say(401), "the revocation", 3)
    assert_error(caller.post(body()), 401, "invalid_api_key")
