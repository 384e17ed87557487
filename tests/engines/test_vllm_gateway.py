"""A real vLLM behind the gateway: what was predicted of a request is what the engine says that it found.

Owns: the whole way, from a client's chat to the bill's cached tokens, with tokens from the model's own folder: two
turns, two tenants, a restart of the gateway, and a kill -9 of the engine. Does not own: the parts
(`test_vllm_kv_index`, `test_vllm_prompt_tokens`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm_process import BLOCK_TOKENS, MODEL, START_LIMIT_S, VllmProcess
from tests.integration.gateway.stack import Node, Tenant, eventually, http_client, running_node, start
from tests.services import temporary_folder

pytestmark = [pytest.mark.engines, pytest.mark.timeout(START_LIMIT_S + 120)]

# An engine on a busy CPU prefills for seconds; nothing here is about being quick.
ENV = {"INFERPLANE_TOTAL_TIMEOUT_S": "60", "INFERPLANE_DRAIN_LEAD_S": "0", "INFERPLANE_ENDPOINTS_POLL_S": "0.2"}
SYSTEM = "You answer in one word, and you never explain yourself, whatever the question may be. " * 3


class House:
    """The gateway before the engine."""

    def __init__(self, node: Node, tenants: list[Tenant], env: dict[str, str]) -> None:
        self.node, self.tenants, self._env = node, tenants, env

    def heard(self) -> None:
        def state() -> bool:
            said = [self.node.ready() or {} for _ in range(4)]
            return {each["kv_events"] for one in said for each in one.get("engines", [])} == {"heard"}

        eventually(state, "the engine's events are heard", 60.0)

    def chat(self, *turns: str, tenant: int = 0) -> tuple[int, int]:
        """(cached tokens that were predicted, cached tokens that the engine reported)."""
        roles = ["user", "assistant"]
        messages = [{"role": "system", "content": SYSTEM}]
        messages += [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
        with http_client(self.node.url, self.tenants[tenant].headers) as client:
            answer = client.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": messages, "max_tokens": 3, "temperature": 0},
                timeout=60,
            )
        assert answer.status_code == 200, answer.text
        event = self.node.event(answer.headers["x-request-id"])
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert event.open.predicted_cached_tokens is not None
        time.sleep(0.5)  # its events are told
        return event.open.predicted_cached_tokens, (details or {}).get("cached_tokens", 0)

    def restart(self) -> None:
        node = self.node
        assert node.stop() == 0
        arguments = ["--endpoints", str(node.endpoints_file), "--data-dir", str(node.data_dir), "--workers", "2"]
        start(node, arguments, self._env)
        self.heard()


@pytest.fixture(scope="module")
def house(vllm: VllmProcess) -> Iterator[House]:
    env = {**ENV, "INFERPLANE_TOKENIZERS": f"{MODEL}={vllm.model}"}
    rows = [{"id": "vllm", "url": vllm.url, "kind": "vllm", "models": [MODEL]}]
    tenants: list[Tenant] = []
    with (
        temporary_folder() as folder,
        running_node(
            Path(folder), rows, env, prepare=lambda made: tenants.extend(made.tenant() for _ in range(2))
        ) as node,
    ):
        found = House(node, tenants, env)
        found.heard()
        yield found


def same(predicted: int, cached: int) -> bool:
    """One token is always computed, so a prompt of whole blocks is predicted one token short of them."""
    return cached % BLOCK_TOKENS == 0 and predicted == cached


def test_the_second_turn_finds_what_was_predicted(house: House) -> None:
    # The engine has stored nothing at first, so its block size is not known and nothing is predicted of it.
    house.chat("warm-up")
    predicted, cached = house.chat("Is the sky blue?")
    assert same(predicted, cached) and cached >= 4 * BLOCK_TOKENS, "the system prompt of the warm-up"
    more = house.chat("Is the sky blue?", "yes", "And the sea, on a clear day, seen from far above?")
    assert same(*more) and more[1] > cached


def test_no_tenant_finds_another_ones_prompt(house: House) -> None:
    house.chat("A question of the first tenant, long enough for a block of its own.")
    assert house.chat("A question of the first tenant, long enough for a block of its own.", tenant=1) == (0, 0)
    predicted, cached = house.chat("A question of the first tenant, long enough for a block of its own.", tenant=1)
    assert same(predicted, cached) and cached > 0


def test_a_gateway_that_restarted_knows_what_the_engine_holds(house: House) -> None:
    house.chat("What was asked before the restart, in words enough for a block.")
    house.restart()
    predicted, cached = house.chat("What was asked before the restart, in words enough for a block.")
    assert same(predicted, cached) and cached > 0


def test_an_engine_that_was_killed_is_known_to_be_empty(house: House, vllm: VllmProcess) -> None:
    house.chat("What the engine held before it was killed.")
    vllm.kill()
    vllm.start()
    house.heard()
    assert house.chat("What the engine held before it was killed.")[1] == 0
    predicted, cached = house.chat("What the engine held before it was killed.")
    assert same(predicted, cached) and cached > 0
