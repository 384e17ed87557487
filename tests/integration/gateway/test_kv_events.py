"""The gateway knows where the KV is: simulated engines that publish their events, through a real node.

What is checked: a prompt goes to the engine that says it holds it, the share that was predicted is what the engine then
reports, also after the node has restarted and remembers nothing, and after an engine was killed and came back empty.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gateway.client import Caller, assert_error
from tests.integration.gateway.conftest import ENV
from tests.integration.gateway.stack import Node, Tenant, eventually, http_client, running_node, start
from tests.integration.router.event_sources import engine_sim
from tests.services import temporary_folder

MODEL = "tiny"


class Crew:
    """A node of two workers over two simulated engines whose events it hears."""

    def __init__(self, node: Node, engines: dict[str, dict[str, Any]], tenants: list[Tenant]) -> None:
        self.node, self.engines, self.tenants = node, engines, tenants

    def states(self) -> set[str]:
        """What `/readyz` says of the engines' events, over some of its workers."""
        found = [self.node.ready() or {} for _ in range(4)]
        return {each["kv_events"] for said in found for each in said.get("engines", [])}

    def heard(self) -> None:
        eventually(lambda: self.states() == {"heard"}, "every engine is heard")

    def ask(self, text: str, tenant: int = 0) -> tuple[str, int, int]:
        """(engine, cached tokens that were predicted, cached tokens that the engine reported)."""
        with http_client(self.node.url, self.tenants[tenant].headers) as client:
            answer = client.post(
                "/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 2, "temperature": 0}
            )
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        request_id = answer.headers["x-request-id"]
        event = eventually(lambda: self.node.events(request_id), f"an event of {request_id}")[-1]
        predicted = event.open.predicted_cached_tokens
        assert predicted is not None
        return event.open.endpoint, predicted, usage["prompt_tokens_details"]["cached_tokens"]

    def known(self, text: str, tenant: int = 0) -> tuple[str, int, int]:
        """The same for a prompt that is surely worked out: on a machine that is busy enough one may take too long, and
        is routed by the history then. Each try ends in another way, so that none finds more than what was there.
        """
        for number in range(20):
            before = self.read_count()
            answer = self.ask(f"{text} try {number}", tenant)
            for _ in range(20):  # counts are written four times a second
                if self.read_count() > before:
                    return answer
                time.sleep(0.1)
        raise AssertionError("no prompt is worked out in time")

    def read_count(self) -> float:
        with http_client(self.node.url) as client:
            lines = client.get("/metrics").text.splitlines()
        name = 'inferplane_exact_prompts_total{result="read"'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def told(self) -> None:
        """Events of what was just asked have come."""
        time.sleep(0.3)


def prompt(seed: str, blocks: int) -> str:
    """Blocks of 16 tokens of 4 bytes that share nothing with another seed's."""
    return "".join(f"{seed}-{number:04d}".ljust(64, ".") for number in range(blocks))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine_sim()) for name in ("left", "right")}
        folder = Path(stack.enter_context(temporary_folder()))
        rows = [{"id": name, "url": said["url"], "kind": "sim", "models": [MODEL]} for name, said in engines.items()]
        env = {**ENV, "INFERPLANE_TOKENIZERS": f"{MODEL}=engine"}
        tenants: list[Tenant] = []
        node = stack.enter_context(
            running_node(folder, rows, env, prepare=lambda made: tenants.extend(made.tenant() for _ in range(2)))
        )
        found = Crew(node, engines, tenants)
        found.heard()
        yield found


def test_what_is_predicted_is_what_the_engine_finds(crew: Crew) -> None:
    text = prompt("predicted", 40)
    home, predicted, cached = crew.ask(text + "x" * 30)
    assert (predicted, cached) == (0, 0)
    crew.told()
    for turn in range(4):
        engine, predicted, cached = crew.known(text + f"turn {turn}" * 5)
        assert engine == home
        assert cached == 640 and abs(predicted - cached) <= 1
        crew.told()


def test_no_tenant_finds_another_ones_blocks(crew: Crew) -> None:
    text = prompt("tenants", 40)
    crew.ask(text + "x" * 30)
    crew.told()
    assert crew.ask(text + "y" * 30)[2] == 640
    _, predicted, cached = crew.ask(text + "z" * 30, tenant=1)
    assert (predicted, cached) == (0, 0)


def test_a_node_that_restarted_knows_from_the_engines_what_they_hold(crew: Crew) -> None:
    texts = [prompt(f"restart-{number}", 30) for number in range(4)]
    homes = [crew.ask(text + "x" * 30)[0] for text in texts]
    crew.told()
    node = crew.node
    assert node.stop() == 0
    arguments = ["--endpoints", str(node.endpoints_file), "--data-dir", str(node.data_dir), "--workers", "2"]
    start(node, [*arguments, "--tokenizer", f"{MODEL}=engine"], ENV)  # the flag reaches the processes as well
    crew.heard()
    for text, home in zip(texts, homes, strict=True):
        engine, predicted, cached = crew.known(text + "after the restart" * 3)
        assert engine == home and cached == 480 and abs(predicted - cached) <= 1


def test_an_engine_that_was_killed_is_known_to_be_empty(crew: Crew) -> None:
    text = prompt("killed", 40)
    home = crew.ask(text + "x" * 30)[0]
    crew.told()
    said = crew.engines[home]
    said["process"].kill()
    said["process"].wait()
    other = ({"left", "right"} - {home}).pop()
    assert eventually(lambda: crew.ask(text + "y" * 30), "an answer from the other engine")[0] == other
    port, events = int(said["url"].rpartition(":")[2]), said["kv_events_endpoint"]
    with engine_sim(port=port, events_port=int(events.rpartition(":")[2])):
        crew.heard()
        # What only the dead engine held is nowhere now; the other one has what it served since.
        engine, predicted, cached = crew.known(text + "z" * 30)
        assert engine == other and cached == 640 and abs(predicted - cached) <= 1
        fresh = prompt("only before", 40)
        assert crew.ask(fresh)[1:] == (0, 0)


def test_an_unusable_source_of_tokens_is_refused_at_the_start(tmp_path: Path, crew: Crew) -> None:
    node = crew.node
    with pytest.raises(AssertionError, match="expected a folder with a tokenizer"):
        start(
            Node(None, "", tmp_path, node.settings, node.tenants, "", tmp_path / "log"),  # type: ignore[arg-type]  # started below
            ["--endpoints", str(node.endpoints_file), "--data-dir", str(tmp_path), "--tokenizer", f"{MODEL}=/nowhere"],
            ENV,
        )


def test_a_body_that_is_no_prompt_is_refused_as_ever(crew: Crew) -> None:
    assert_error(Caller(crew.node, crew.tenants[0]).post({"model": MODEL, "messages": "no list"}), 400)
