"""Prefill and decode on two engines behind a whole node: roles in the endpoints file, strict engines, exact books.

One pair of each engine kind, one answer and one failure of each; the many ways in which a leg fails are tested without
processes (tests/integration/engine_pair).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from billing.usage_event import Outcome
from tests.fakes.pair_engines import CACHED_TOKENS, PROMPT_TOKENS, Bench, PairEngine
from tests.integration.gateway.client import Caller, RawClient, assert_error, body, request, text_of
from tests.integration.gateway.conftest import ENV, assert_books_exact
from tests.integration.gateway.stack import Engines, Node, Tenant, eventually, running_node
from tests.services import temporary_folder

# The model of each kind's pair, of those that have prices here.
MODELS = {"vllm": "m", "sglang": "solo", "trtllm": "lc"}
_SLOW = {"prefill_tok_per_s": 1.0, "decode_s_per_token": 0.01}
_FAST = {"prefill_tok_per_s": 1e9, "decode_s_per_token": 0.01}


class Pairs:
    """A node over one pair of each kind."""

    def __init__(self, node: Node, engines: dict[tuple[str, str], PairEngine], tenant: Tenant, bench: Bench) -> None:
        self.node, self.engines, self.tenant, self.bench = node, engines, tenant, bench
        self.caller = Caller(node, tenant)

    def legs(self, kind: str, role: str, request_id: str) -> list[Any]:
        """What an engine was sent of a request."""
        wanted = ("x-request-id", request_id)
        return [truth for truth in self.engines[kind, role].legs if wanted in truth.headers]

    def ended(self, kind: str, role: str, request_id: str) -> str:
        """How the one leg ended at its engine."""

        def one() -> str | None:
            (truth,) = self.legs(kind, role, request_id)
            return str(truth.ended) or None

        return eventually(one, f"the end of the {role} leg", 5.0)


def row(engine: PairEngine, kind: str, role: str) -> dict[str, Any]:
    """One engine of the endpoints file."""
    made = {
        "id": f"{kind}-{role}", "url": f"http://127.0.0.1:{engine.port}", "kind": kind, "role": role,
        "models": [MODELS[kind]], "pool": kind, "kv_bytes_per_token": 1_000, "kv_link_bytes_per_s": 1e10,
        "speed": _FAST if role == "prefill" else _SLOW,
    }  # fmt: skip
    if kind == "sglang" and role == "prefill":
        made["bootstrap_port"] = engine.bootstrap_port = 9_123
    return made


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    """Three pairs behind one node; when the module is over, its books are proven exact."""
    running, bench = Engines(), Bench()
    try:
        engines = {}
        for kind, model in MODELS.items():
            for role in ("prefill", "decode"):
                engines[kind, role] = engine = PairEngine(f"{kind}-{role}", kind, role, bench, (model,))
                running.call(engine.start())
            engines[kind, "decode"].bootstrap_port = 9_123
        rows = [row(engine, kind, role) for (kind, role), engine in engines.items()]
        tenants: list[Tenant] = []
        with temporary_folder() as folder:
            with running_node(folder, rows, ENV, prepare=lambda made: tenants.append(made.tenant())) as node:
                yield Pairs(node, engines, tenants[0], bench)
                assert_books_exact(node)
    finally:
        for engine in engines.values():
            running.call(engine.stop())
        running.stop()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_a_pair_answers_and_is_billed_once(kind: str, stream: bool, pairs: Pairs) -> None:
    odd = {"temperature": 1.10, "tools": [{"b": 1, "a": 2}]}
    asked = body(None, model=MODELS[kind], stream=stream, user="pair:", **odd)
    if stream:
        asked["stream_options"] = {"include_usage": True}
        with pairs.caller.stream(asked) as answer:
            data = b"".join(answer.iter_raw())
        assert text_of(data) == "tok1 tok2 tok3 tok4 tok5 "
        assert b'"cached_tokens":%d' % CACHED_TOKENS in data
    else:
        answer = pairs.caller.post(asked)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED_TOKENS
    assert answer.status_code == 200
    request_id = answer.headers["x-request-id"]
    event = pairs.node.event(request_id)
    close = event.close
    assert (close.outcome, close.billable, close.estimated) == (Outcome.COMPLETED, True, False)
    counts = close.uncached_input_tokens, close.cached_input_tokens, close.output_tokens
    assert counts == (PROMPT_TOKENS - CACHED_TOKENS, CACHED_TOKENS, 5)
    assert event.open.endpoint == f"{kind}-decode"
    for role in ("prefill", "decode"):
        (truth,) = pairs.legs(kind, role, request_id)
        # httpx writes a streamed request's body without spaces
        sent = json.dumps(odd, separators=(",", ":") if stream else None)
        assert sent[1:-1].encode() in truth.body, "the client's bytes (R28)"
        assert pairs.ended(kind, role, request_id) == "completed"


@pytest.mark.parametrize("kind", MODELS)
def test_a_failing_prefill_engine_is_answered_for_at_once(kind: str, pairs: Pairs) -> None:
    """R23. SGLang's decode engine cannot do without it; the others do all of it."""
    started_s = time.monotonic()
    answer = pairs.caller.post(body(None, model=MODELS[kind], user="pair:prefill=status.500"))
    assert time.monotonic() - started_s < 2.0
    request_id = answer.headers["x-request-id"]
    events = pairs.node.events(request_id)
    if kind == "sglang":
        assert_error(answer, 500, "engine_error")
        assert pairs.ended(kind, "decode", request_id) == "client_closed"
        assert [event.close.billable for event in events] == [True]
        assert events[0].close.output_tokens is None
    else:
        assert answer.status_code == 200
        assert [event.close.billable for event in events] == [False, True]
        assert events[1].close.uncached_input_tokens == PROMPT_TOKENS


@pytest.mark.parametrize("kind", MODELS)
def test_a_decode_engine_that_dies_first_ends_the_pair(kind: str, pairs: Pairs) -> None:
    started_s = time.monotonic()
    answer = pairs.caller.post(body(None, model=MODELS[kind], user="pair:decode=reset", stream=True))
    assert time.monotonic() - started_s < 2.0
    assert_error(answer, 502, "engine_lost")
    (event,) = pairs.node.events(answer.headers["x-request-id"])
    assert event.close.output_tokens is None


@pytest.mark.parametrize("kind", MODELS)
def test_a_client_that_leaves_during_the_prefill_ends_every_leg(kind: str, pairs: Pairs) -> None:
    """R24: the decode engine of a pair that runs in turn is never asked."""
    before = {role: len(pairs.engines[kind, role].legs) for role in ("prefill", "decode")}
    with RawClient(pairs.node) as raw:
        raw.send(request(pairs.tenant, body(None, model=MODELS[kind], user="pair:prefill=stall", stream=True)))
        eventually(lambda: len(pairs.engines[kind, "prefill"].legs) > before["prefill"], "the prefill leg", 5.0)
        time.sleep(0.05)
        raw.sock.close()
        left_s = time.monotonic()
    truth = pairs.engines[kind, "prefill"].legs[-1]
    eventually(lambda: truth.ended == "client_closed", "the close at the prefill engine", 5.0)
    assert time.monotonic() - left_s < 1.0
    decoded = pairs.engines[kind, "decode"].legs[before["decode"] :]
    assert len(decoded) == (1 if kind == "sglang" else 0)
    eventually(lambda: all(leg.ended == "client_closed" for leg in decoded), "the close at the decode engine", 5.0)


def test_the_choice_can_be_read(pairs: Pairs) -> None:
    answer = pairs.caller.post(body(None, user="pair:"), x_inferplane_decision="explain")
    line = answer.headers["x-inferplane-decision"]
    assert line.startswith("prefill=vllm-prefill ")
    assert " pick=vllm-decode " in line
    record = pairs.caller.get(f"/admin/v1/decisions/{answer.headers['x-request-id']}").json()
    assert "vllm-prefill" in json.dumps(record)
