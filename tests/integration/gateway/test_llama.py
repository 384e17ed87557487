"""`inferplane serve --engine URL` and nothing else, in front of a real llama.cpp server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from billing.usage_event import Outcome
from controlplane.config import Settings
from tests.integration.gateway.client import Caller, RawClient, request
from tests.integration.gateway.stack import Node, Tenant, Tenants, eventually, start
from tests.services import temporary_folder


@pytest.fixture(scope="module")
def alone(llama_url: str) -> Iterator[Node]:
    """A node that was given an engine's URL, no database, no Redis, no key."""
    with temporary_folder() as folder:
        settings = Settings(data_dir=folder)
        process: subprocess.Popen[bytes] | None = None
        node = Node(process, "", folder, settings, None, "", folder / "node.log")  # type: ignore[arg-type] # set below
        start(node, ["--engine", llama_url, "--data-dir", str(folder)], {"INFERPLANE_DRAIN_LEAD_S": "0"})
        try:
            yield node
            assert node.stop() == 0
            assert "Traceback" not in node.log_text()
        finally:
            node.stop()


@pytest.fixture
def sdk(alone: Node) -> Iterator[openai.OpenAI]:
    """A client with the key that was shown at the start."""
    http: Any = httpx.Client(verify=False, trust_env=False)
    assert alone.first_secret is not None
    with openai.OpenAI(
        base_url=alone.url + "/v1", api_key=alone.first_secret, http_client=http, max_retries=0
    ) as client:
        yield client


@pytest.fixture
def model(sdk: openai.OpenAI) -> str:
    """The one model that the engine has."""
    (found,) = sdk.models.list().data
    return found.id


def test_a_real_answer_is_metered_as_the_engine_counted_it(alone: Node, sdk: openai.OpenAI, model: str) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
    )
    usage = raw.parse().usage
    assert usage is not None
    assert raw.request_id is not None
    close = alone.event(raw.request_id).close
    assert close.outcome is Outcome.COMPLETED
    assert not close.estimated
    assert close.output_tokens == usage.completion_tokens > 0
    assert (close.uncached_input_tokens or 0) + (close.cached_input_tokens or 0) == usage.prompt_tokens


def test_a_real_stream_shows_no_usage_and_is_metered_all_the_same(alone: Node, sdk: openai.OpenAI, model: str) -> None:
    with sdk.chat.completions.with_streaming_response.create(
        model=model, messages=[{"role": "user", "content": "Count to five."}], max_tokens=12, stream=True
    ) as raw:
        chunks = list(raw.parse())
        assert raw.request_id is not None
        close = alone.event(raw.request_id).close
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert (close.outcome, close.estimated) == (Outcome.COMPLETED, False)
    assert 1 <= (close.output_tokens or 0) <= 12


def test_a_real_engine_stops_when_its_client_leaves(
    alone: Node, sdk: openai.OpenAI, model: str, llama_url: str
) -> None:
    tenant = Tenant("", "", "", alone.first_secret or "")
    content = {"model": model, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 1_900, "stream": True,
               "ignore_eos": True}  # fmt: skip
    with RawClient(alone) as raw:
        raw.send(request(tenant, content))
        raw.read_until(b'"content"')
        left_s = time.monotonic()

    def idle() -> bool:
        slots = httpx.get(f"{llama_url}/slots", trust_env=False, verify=False)
        return slots.status_code != 200 or not any(slot["is_processing"] for slot in slots.json())

    eventually(idle, "an idle engine", 5)
    assert time.monotonic() - left_s < 3
    assert alone.all_events()[-1].close.outcome is Outcome.CANCELLED


def test_a_real_refusal_is_openais(sdk: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": "x " * 20_000}], max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_the_first_key_is_made_once(alone: Node) -> None:
    tenants = Tenants(alone.settings)
    try:
        assert [org.name for org in tenants.keys.list_orgs().items] == ["default"]
    finally:
        tenants.close()
    assert Caller(alone, Tenant("", "", "", alone.first_secret or "")).get("/v1/models").status_code == 200
