"""What a caller does wrong: always an OpenAI error with its request id, never a word too much, never a stuck worker."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from tests.integration.gateway.client import (
    CHAT,
    Caller,
    RawClient,
    assert_error,
    body,
    connected_to,
    head,
    request,
    request_id,
)
from tests.integration.gateway.conftest import MAX_BODY_BYTES, People
from tests.integration.gateway.stack import Engines, Node, eventually, http_client


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'{"model":"m","messages":[]} x', None),
        (b'{"model":"m"}', "messages"),
        (b'{"messages":[{"role":"user","content":"x"}]}', "model"),
        (b'{"model":7,"messages":[{}]}', "model"),
        (b'{"model":"m","messages":{}}', "messages"),
        (b'{"model":"m","messages":[{"role":"user"}],"n":0}', "n"),
        (b'{"model":"m","messages":[{"role":"user"}],"stream":"yes"}', "stream"),
        (b'{"model":"m","messages":[{"role":"user"}],"max_tokens":-1}', "max_tokens"),
        (b'{"model":"m","messages":[{"role":"user"}],"stream_options":{"include_usage":true}}', "stream_options"),
        (b'{"model":"m","model":"m","messages":[{"role":"user"}]}', "model"),
        (b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', None),
        (b'{"model":"m","user":"a\\u0000b","messages":[{"role":"user"}]}', "user"),
        (b'{"model":"' + b"m" * 300 + b'","messages":[{"role":"user"}]}', "model"),
        (b'{"model":"m","messages":' + b"[" * 100_000, None),
    ],
)
def test_a_malformed_body_is_named(content: bytes, param: str | None, caller: Caller) -> None:
    answer = caller.post(content)
    error = assert_error(answer, 400, type_="invalid_request_error")
    assert error["param"] == param
    assert len(error["message"]) < 500


def test_an_unknown_model_is_404_and_counted_as_a_refusal(caller: Caller) -> None:
    error = assert_error(caller.post(body(model="no-such")), 404, "model_not_found")
    assert error["param"] == "model"


class TestKeys:
    """Who may come in."""

    @pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/v1/models/m"])
    @pytest.mark.parametrize(
        "headers",
        [{}, {"authorization": "Bearer ip-00000000-nothing"}, {"authorization": "Basic abc"},
         {"authorization": "Bearer"}, {"x-api-key": "nothing"}],
    )  # fmt: skip
    def test_no_key_or_a_wrong_one_is_401(self, path: str, headers: dict[str, str], node: Node) -> None:
        method = "GET" if "models" in path else "POST"
        answer = httpx.request(method, node.url + path, headers=headers, json=body(), trust_env=False, verify=False)
        error = assert_error(answer, 401, "invalid_api_key")
        assert "ip-0000" not in error["message"]

    def test_a_wrong_key_is_told_before_the_body_is_read(self, node: Node) -> None:
        with RawClient(node) as raw:
            raw.send(head(None, 1_000_000))
            assert raw.read_until(b"}}").startswith(b"HTTP/1.1 401 ")

    def test_an_expired_key_is_401(self, node: Node, people: People) -> None:
        assert_error(Caller(node, people["expired"]).post(body()), 401, "invalid_api_key")

    def test_a_key_without_the_scope_is_403(self, node: Node, people: People) -> None:
        error = assert_error(Caller(node, people["reader"]).post(body()), 403, "insufficient_permissions")
        assert "inference" in error["message"]

    def test_a_model_that_the_key_may_not_use_is_403_and_not_listed(self, node: Node, people: People) -> None:
        caller = Caller(node, people["only solo"])
        assert_error(caller.post(body()), 403, "model_not_allowed")
        assert caller.post(body(model="solo")).status_code == 200
        assert [card["id"] for card in caller.get("/v1/models").json()["data"]] == ["solo"]
        assert_error(caller.get("/v1/models/m"), 404, "model_not_found")
        assert caller.get("/v1/models/solo").json()["id"] == "solo"

    def test_x_api_key_is_as_good_as_a_bearer(self, node: Node, people: People) -> None:
        answer = httpx.post(
            node.url + CHAT, headers={"x-api-key": people["plain"].secret}, json=body(), trust_env=False
        )
        assert answer.status_code == 200

    def test_a_revoked_key_is_out_on_every_worker_within_two_seconds(self, node: Node, people: People) -> None:
        tenant = people["to revoke"]

        def statuses() -> set[int]:
            """By a connection to each worker."""
            found = set()
            for raw in held:
                answer = raw.send(request(tenant, body())).read_until(b"}}")
                found.add(int(answer[9:12]))
            return found

        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(connected_to(node, worker)) for worker in node.workers()]
            assert len(held) == 2
            assert statuses() == {200}
            node.tenants.keys.revoke_key(tenant.key_id)
            started_s = time.monotonic()
            eventually(lambda: statuses() == {401}, "revocation", 4)
            assert time.monotonic() - started_s <= 2.2  # the bound of DESIGN 3, and the last round of requests


class TestPaths:
    """Methods and paths under /v1."""

    @pytest.mark.parametrize("path", ["/v1/nothing", "/v1/", "/v1/chat", "/v1/chat/completions/", "/v1/%zz/..%2f"])
    @pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
    def test_an_unknown_path_is_an_openai_error_with_or_without_a_key(
        self, path: str, method: str, node: Node, people: People
    ) -> None:
        for headers in ({}, people["plain"].headers):
            answer = httpx.request(method, node.url + path, headers=headers, trust_env=False, verify=False)
            assert_error(answer, 404, "unknown_url")

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
    def test_a_wrong_method_is_405_with_the_right_one(self, method: str, node: Node) -> None:
        answer = httpx.request(method, node.url + CHAT, trust_env=False, verify=False)
        assert_error(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"

    def test_head_has_no_body(self, node: Node, people: People) -> None:
        with RawClient(node) as raw:
            raw.send(head(people["plain"], None, "connection: close", path="/v1/models", method="HEAD"))
            answer = raw.read_all()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\n")
        assert httpx.head(node.url + CHAT, trust_env=False, verify=False).status_code == 405

    def test_a_path_outside_is_an_openai_error_too(self, node: Node) -> None:
        assert_error(httpx.get(node.url + "/nothing", trust_env=False, verify=False), 404)


class TestSizes:
    """Bounds on what a caller sends."""

    def test_a_declared_length_past_the_limit_is_413_at_once(self, node: Node, people: People) -> None:
        with RawClient(node) as raw:
            raw.send(head(people["plain"], MAX_BODY_BYTES + 1))
            assert raw.read_until(b"}}").startswith(b"HTTP/1.1 413 ")

    def test_a_huge_body_gets_its_413_although_it_is_still_being_sent(self, caller: Caller) -> None:
        big = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * (3 * MAX_BODY_BYTES) + b'"}]}'
        assert_error(caller.post(big), 413, "request_too_large")

    def test_a_chunked_body_past_the_limit_is_413(self, caller: Caller) -> None:
        def pieces() -> Any:
            for _ in range(3 * MAX_BODY_BYTES // 65_536):
                yield b"x" * 65_536

        answer = httpx.post(
            caller.node.url + CHAT, content=pieces(), headers=caller.tenant.headers, trust_env=False, timeout=30
        )
        assert_error(answer, 413, "request_too_large")

    def test_the_sdk_sees_the_413(self, caller: Caller) -> None:
        client = openai.OpenAI(base_url=caller.node.url + "/v1", api_key=caller.tenant.secret, max_retries=0)
        with client, pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * (2 * MAX_BODY_BYTES)}]
            )
        assert caught.value.status_code == 413

    def test_curl_with_expect_continue_gets_its_413_without_sending(self, caller: Caller, tmp_path: Any) -> None:
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        big = tmp_path / "big"
        big.write_bytes(b"x" * (2 * MAX_BODY_BYTES))
        key = f"Authorization: Bearer {caller.tenant.secret}"
        wanted = ["-w", "\n%{http_code} %{size_upload}", "-H", key, "-H", "Expect: 100-continue"]
        command = ["curl", "-sS", *wanted, "--data-binary", f"@{big}", caller.node.url + CHAT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        said, status = done.stdout.rsplit("\n", 1)
        assert json.loads(said)["error"]["code"] == "request_too_large"
        assert status == "413 0"

    def test_a_small_request_after_a_refused_one_works_on_the_same_connection(self, caller: Caller) -> None:
        with http_client(caller.node.url, caller.tenant.headers) as client:
            assert client.post(CHAT, content=b"{").status_code == 400
            assert client.post(CHAT, json=body(), headers={"authorization": "Bearer x"}).status_code == 401
            assert client.post(CHAT, json=body()).status_code == 200

    @pytest.mark.parametrize("how", ["one header", "many headers", "long url"])
    def test_a_head_beyond_64_kib_is_431(self, how: str, node: Node, people: People) -> None:
        extra = {"one header": ["x: " + "y" * 70_000], "many headers": [f"x{n}: {'y' * 50}" for n in range(1_500)],
                 "long url": []}[how]  # fmt: skip
        path = CHAT + ("?" + "q" * 70_000 if how == "long url" else "")
        for pieces in (1, 10):
            data = head(people["plain"], 2, *extra, path=path)
            with RawClient(node) as raw:
                step = len(data) // pieces
                try:
                    for start in range(0, len(data), step):
                        raw.send(data[start : start + step])
                        time.sleep(0.01)
                except (ConnectionResetError, BrokenPipeError):
                    pass  # it closed while we were writing
                answer = raw.read_all()
            assert answer.startswith(b"HTTP/1.1 431 "), answer[:200]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
            assert request_id(answer)


class TestSlowCallers:
    """A caller that trickles holds a connection, but no longer than its time (2.5 s here)."""

    def test_heads_and_bodies_that_never_come_are_closed(self, node: Node, people: People) -> None:
        tenant = people["plain"]
        started = {
            "no byte": b"",
            "half a head": head(tenant, 10)[:-20],
            "no body": head(tenant, 10),
            "half a body": head(tenant, 10) + b"{",
            "no body after 401": head(None, 10),
        }
        ends: dict[str, tuple[bytes, float]] = {}

        def trickle(name: str, data: bytes) -> None:
            with RawClient(node) as raw:
                began_s = time.monotonic()
                raw.send(data)
                ends[name] = (raw.read_all(), time.monotonic() - began_s)

        broken: list[float] = []

        def drip() -> None:
            """One byte now and then is no progress either."""
            with RawClient(node) as raw:
                raw.send(head(people["plain"], 1_000))
                began_s = time.monotonic()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    while time.monotonic() - began_s < 10:
                        raw.send(b" ")
                        time.sleep(0.3)
                broken.append(time.monotonic() - began_s)

        threads = [threading.Thread(target=trickle, args=item) for item in started.items()]
        threads.append(threading.Thread(target=drip))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        assert {name: answer[:12] for name, (answer, _) in ends.items()} == {
            "no byte": b"",
            "half a head": b"HTTP/1.1 408",
            "no body": b"HTTP/1.1 408",
            "half a body": b"HTTP/1.1 408",
            "no body after 401": b"HTTP/1.1 401",
        }
        assert all(took_s < 9 for _, took_s in ends.values()), ends
        assert broken
        assert 2 < broken[0] < 9
        assert json.loads(ends["no body"][0].partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


class TestSmuggling:
    """Requests whose end two readers could see at different places: refused, and nothing behind them is served."""

    @pytest.mark.parametrize(
        "headers",
        [
            "content-length: 4\r\ntransfer-encoding: chunked",
            "content-length: 4\r\ncontent-length: 5",
            "content-length: +4",
            "content-length: 4 4",
            "content-length: -1",
            "transfer-encoding: chunked, identity",
            "transfer-encoding: xchunked",
            "transfer-encoding : chunked",
            "content-length: 0x4",
            "x: y\n z: w\ncontent-length: 4",
            "x\x00: y",
        ],
    )
    def test_an_ambiguous_request_is_400_and_the_connection_ends(
        self, headers: str, node: Node, people: People, engines: Engines
    ) -> None:
        before = len(engines.truths())
        smuggled = request(people["plain"], body("normal"))
        first = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {people['plain'].secret}\r\n{headers}\r\n\r\n"
        )
        with RawClient(node) as raw:
            raw.send(first.encode("latin-1") + b"0\r\n\r\n" + smuggled)
            answer = raw.read_all()
        assert answer.startswith(b"HTTP/1.1 400 "), answer[:300]
        assert answer.count(b"HTTP/1.1 ") == 1
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        assert len(engines.truths()) == before

    def test_a_pipelined_request_is_not_served_and_the_connection_ends(
        self, node: Node, people: People, engines: Engines
    ) -> None:
        with RawClient(node) as raw:
            raw.send(request(people["plain"], body("normal?delay_ms=100")) * 2)
            answer = raw.read_all()
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        assert len(engines.of_request(request_id(answer))) == 1

    def test_garbage_is_400(self, node: Node) -> None:
        for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            with RawClient(node) as raw:
                answer = raw.send(data).read_all()
            assert answer.startswith(b"HTTP/1.1 400 "), (data, answer)

    def test_an_upgrade_is_not_taken_for_an_empty_body(self, node: Node, people: People) -> None:
        wanted = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAA")
        with RawClient(node) as raw:
            answer = raw.send(request(people["plain"], body("normal"), *wanted)).read_all()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "upgrade_not_supported"

    def test_a_caller_of_http_1_0_gets_a_stream_that_it_understands(self, node: Node, people: People) -> None:
        data = request(people["plain"], body("normal", stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        with RawClient(node) as raw:
            answer = raw.send(data).read_all()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in answer
        assert answer.partition(b"\r\n\r\n")[2].startswith(b"data: ")


def test_a_compressed_body_is_415(caller: Caller) -> None:
    assert_error(caller.post(b"x", content_encoding="gzip"), 415, "unsupported_content_encoding")


def test_no_secret_is_ever_written(node: Node, people: People) -> None:
    """Neither keys nor prompts in the log, the spool or the database files."""
    marker = "the-prompt-of-a-tenant-73512"
    Caller(node, people["plain"]).post(body("normal", messages=[{"role": "user", "content": marker}]))
    needles = [marker.encode(), people["plain"].secret.encode()]
    kept = [path for path in node.data_dir.rglob("*") if path.is_file() and not path.is_socket()]
    assert len(kept) > 5
    for path in kept:
        data = path.read_bytes()
        assert not any(needle in data for needle in needles), path
