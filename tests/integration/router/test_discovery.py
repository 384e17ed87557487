"""Discovery against files that change and engines that answer or do not (respx stands in for most of them)."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import respx

from router.adapters.discovery import Discovery, EngineProbe, HealthWatch, endpoint_of_url
from router.endpoints import Ending, Endpoint
from router.errors import EndpointsError
from tests.fakes.fleet import Fleet, endpoint, prompt

MODELS = {"object": "list", "data": [{"id": "m1"}, {"id": "m2"}]}


def probe(timeout_s: float = 2.0) -> EngineProbe:
    return EngineProbe({"ENGINE_KEY": "sk-engine"}.get, timeout_s)


class Heard:
    """What discovery handed out and reported."""

    def __init__(self) -> None:
        self.lists: list[tuple[Endpoint, ...]] = []
        self.reports: list[str] = []

    @property
    def models(self) -> list[set[str]]:
        return [set(each.models) for each in self.lists[-1]]


def write(path: Path, *entries: dict[str, object]) -> None:
    path.write_text(json.dumps([{"id": f"e{number}", **each} for number, each in enumerate(entries)]))


def remove(path: Path) -> None:
    path.unlink()


def overwrite(path: Path, text: str) -> None:
    path.write_text(text)


@asynccontextmanager
async def discovery(path: Path, heard: Heard, *, poll_s: float = 60.0) -> AsyncIterator[Discovery]:
    made = Discovery(path, heard.lists.append, probe(), poll_s=poll_s, report=heard.reports.append)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engines.json"


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never held")


class TestFile:
    async def test_a_changed_file_is_taken_over(self, path: Path) -> None:
        heard = Heard()
        write(path, {"url": "http://a", "models": ["m"]})
        async with discovery(path, heard, poll_s=0.02):
            assert [each.url for each in heard.lists[0]] == ["http://a"]
            write(path, {"url": "http://a", "models": ["m"]}, {"url": "http://b", "models": ["m"]})
            await until(lambda: len(heard.lists) == 2)
            assert [each.url for each in heard.lists[1]] == ["http://a", "http://b"]

    async def test_the_same_content_written_again_hands_out_nothing(self, path: Path) -> None:
        heard = Heard()
        write(path, {"url": "http://a", "models": ["m"]})
        async with discovery(path, heard) as found:
            write(path, {"url": "http://a", "models": ["m"]})
            assert not await found.check()
            assert len(heard.lists) == 1

    async def test_a_bad_new_file_keeps_the_last_good_and_is_reported_once(self, path: Path) -> None:
        heard = Heard()
        write(path, {"url": "http://a", "models": ["m"]})
        async with discovery(path, heard) as found:
            overwrite(path, "[{")
            assert not await found.check()
            assert not await found.check()
            assert found.fault is not None and "is neither YAML nor JSON" in found.fault
            assert len(heard.reports) == 1 and heard.reports[0].endswith("The endpoints read before stay in use.")
            assert len(heard.lists) == 1 and [each.url for each in found.endpoints] == ["http://a"]
            write(path, {"url": "http://a", "models": ["m"]})
            assert not await found.check()
            assert found.fault is None

    async def test_a_deleted_file_keeps_the_last_good(self, path: Path) -> None:
        heard = Heard()
        write(path, {"url": "http://a", "models": ["m"]})
        async with discovery(path, heard) as found:
            remove(path)
            await found.check()
            assert found.fault is not None and "cannot be read" in found.fault
            assert len(found.endpoints) == 1

    async def test_a_bad_file_at_start_stops_the_process(self, path: Path) -> None:
        overwrite(path, "nonsense")
        found = Discovery(path, Heard().lists.append, probe())
        with pytest.raises(EndpointsError, match="a list of endpoints was expected"):
            await found.start()
        await found.stop()


class TestModels:
    @respx.mock
    async def test_models_that_are_not_listed_are_asked_with_the_engines_key(self, path: Path) -> None:
        route = respx.get("http://a:1/v1/models").respond(json=MODELS)
        heard = Heard()
        write(path, {"url": "http://a:1/v1", "api_key_env": "ENGINE_KEY"}, {"url": "http://b", "models": ["m"]})
        async with discovery(path, heard):
            assert heard.models == [set(), {"m"}]
            await until(lambda: len(heard.lists) == 2)
            assert heard.models == [{"m1", "m2"}, {"m"}]
        assert route.calls.last.request.headers["authorization"] == "Bearer sk-engine"

    @respx.mock
    async def test_an_engine_that_is_still_loading_is_asked_again_and_reported_once(self, path: Path) -> None:
        route = respx.get("http://a/v1/models")
        route.side_effect = [httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200, json=MODELS)]
        heard = Heard()
        write(path, {"url": "http://a"})
        async with discovery(path, heard):
            await until(lambda: len(heard.lists) == 2)
        assert heard.models == [{"m1", "m2"}]
        assert [line.split(":")[0].split(" Its")[0] for line in heard.reports] == [
            "e0 cannot be asked for /v1/models",
            "e0 answered 503 to GET /v1/models.",
        ]

    @respx.mock
    async def test_an_engine_is_asked_anew_when_its_url_changes_and_not_when_others_change(self, path: Path) -> None:
        first = respx.get("http://a/v1/models").respond(json=MODELS)
        respx.get("http://c/v1/models").respond(json={"data": [{"id": "m3"}]})
        heard = Heard()
        write(path, {"url": "http://a"})
        async with discovery(path, heard) as found:
            await until(lambda: len(heard.lists) == 2)
            write(path, {"url": "http://a"}, {"url": "http://b", "models": ["m"]})
            assert await found.check()
            assert heard.models == [{"m1", "m2"}, {"m"}] and first.call_count == 1
            write(path, {"url": "http://c"})
            assert await found.check()
            assert heard.models == [set()]
            await until(lambda: heard.models == [{"m3"}])

    @respx.mock
    @pytest.mark.parametrize(
        ("answer", "why"),
        [
            (httpx.Response(200, json={"data": []}), "serves no model yet"),
            (httpx.Response(200, text="<html>"), "something that is no model list"),
            (httpx.Response(200, json=[1]), "something that is no model list"),
            (httpx.Response(401), "answered 401 to GET /v1/models"),
            (httpx.Response(200, content=b"x" * 2_000_000), "over 1048576 bytes"),
        ],
    )
    async def test_an_answer_of_no_use_is_one_sentence(self, answer: httpx.Response, why: str) -> None:
        respx.get("http://a/v1/models").mock(return_value=answer)
        found = await probe().models(endpoint_of_url("http://a"))
        assert isinstance(found, str) and why in found

    async def test_an_engine_that_accepts_and_says_nothing_costs_the_timeout_only(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            found = await probe(0.1).models(endpoint_of_url(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        assert found == "engine did not answer GET /v1/models within 0.1 s."

    async def test_a_fixed_list_needs_no_file(self) -> None:
        heard = Heard()
        found = Discovery([endpoint("a")], heard.lists.append, probe())
        await found.start()
        assert heard.lists == [(endpoint("a"),)] and not await found.check()
        await found.stop()


class TestHealth:
    @respx.mock
    @pytest.mark.parametrize(
        ("answer", "healthy"),
        [
            (httpx.Response(200), True),
            (httpx.Response(404), True),
            (httpx.Response(503), False),
            (httpx.ConnectError("refused"), False),
        ],
    )
    async def test_what_counts_as_healthy(self, answer: httpx.Response | Exception, healthy: bool) -> None:
        respx.get("http://a/health").mock(side_effect=[answer])
        assert await probe().healthy(endpoint_of_url("http://a/v1")) is healthy

    @respx.mock
    async def test_a_recovery_that_the_probe_saw_lets_the_router_try_again_at_once(self) -> None:
        fleet = Fleet([endpoint("a")])
        for number in range(5):
            fleet.end(fleet.pick(prompt(number, 100)), Ending.UNREACHABLE)
        health = respx.get("http://a:8000/health")
        health.side_effect = [httpx.ConnectError("refused"), httpx.Response(200)]
        watch = HealthWatch(fleet.router.broken, fleet.router.health, probe(), clock=lambda: fleet.now_s)
        assert await watch.check() == {"a": False}
        assert not hasattr(fleet.route(fleet.request(prompt(9, 100))), "endpoint")
        assert await watch.check() == {"a": True}
        decision = fleet.pick(prompt(9, 100))
        fleet.start(decision)
        fleet.end(decision)
        assert await watch.check() == {}

    @respx.mock
    async def test_the_watch_runs_on_its_own_until_it_is_stopped(self) -> None:
        fleet = Fleet([endpoint("a")])
        for number in range(5):
            fleet.end(fleet.pick(prompt(number, 100)), Ending.FAILED)
        health = respx.get("http://a:8000/health").respond(200)
        watch = HealthWatch(fleet.router.broken, fleet.router.health, probe(), every_s=0.01)
        await watch.start()
        await until(lambda: health.call_count >= 2)
        await watch.stop()
        await watch.stop()
