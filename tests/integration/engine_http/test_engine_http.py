"""`controlplane.adapters.engine_http` against real sockets: the scripted engine, and raw servers that break the rules.

Every test runs on asyncio's loop and on uvloop (conftest).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from controlplane.adapters.engine_http import EngineAnswer, EngineCall, EngineClient, PoolLimits, request_head
from controlplane.errors import EngineLost, EngineTimeout, EngineUnreachable
from tests.fakes.scripted_engine import ScriptedEngine

RECORDED = Path(__file__).parents[2] / "recorded"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient()
    yield made
    await made.aclose()


def call(port: int, body: bytes = b"{}", **more: Any) -> EngineCall:
    headers = [(b"host", b"engine"), (b"content-type", b"application/json")]
    head = request_head("POST", "/v1/chat/completions", headers, len(body))
    given = {"connect_timeout_s": 2.0, "first_byte_timeout_s": 2.0, **more}
    return EngineCall("e1", "127.0.0.1", port, head, [body], **given)


def ask(engine: ScriptedEngine, script: str = "normal", stream: bool = True, **more: Any) -> EngineCall:
    fields = {"model": "m", "messages": [], "user": f"script:{script}", "stream": stream}
    timeouts = {name: more.pop(name) for name in list(more) if name.endswith("_s")}
    return call(engine.port, json.dumps({**fields, **more}).encode(), **timeouts)


async def whole(answer: EngineAnswer) -> bytes:
    return await answer.read_all(10_000_000, 5.0)


async def until(true: Callable[[], bool], limit_s: float = 1.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.005)
    return True


def into(got: list[bytes]) -> Callable[[bytes], bool]:
    def take(data: bytes) -> bool:
        got.append(data)
        return True

    return take


class RawServer:
    """Answers each connection's requests with given bytes, and notes what it got."""

    def __init__(self, *answers: bytes, hold_s: float = 5.0, close: bool = False) -> None:
        self._answers = list(answers)
        self._hold_s = hold_s
        self._close = close
        self.requests: list[bytes] = []
        self.connections_count = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_count += 1
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                writer.write(self._answers.pop(0))
                await writer.drain()
                if self._close:
                    break
            else:
                await asyncio.wait_for(reader.read(1), self._hold_s)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.sleep(0.01)


class TestAnswers:
    async def test_a_json_answer(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "recorded?file=vllm_0.32.0/chat_nonstream_cold.response.json", False))
        assert answer.status == 200
        assert (b"content-type", b"application/json") in answer.headers
        assert await whole(answer) == (RECORDED / "vllm_0.32.0/chat_nonstream_cold.response.json").read_bytes()

    @pytest.mark.parametrize("script", ["normal", "burst", "trickle", "close_delimited", "compressed", "line_ends"])
    async def test_a_stream_arrives_byte_for_byte(
        self, engine: ScriptedEngine, client: EngineClient, script: str
    ) -> None:
        answer = await client.send(ask(engine, script, max_tokens=20))
        got = await whole(answer)
        if script == "compressed":
            assert got.endswith(b"data: [DONE]\n\n")
            assert not any(name == b"content-encoding" for name, _ in answer.headers)
        else:
            assert got == bytes(engine.truths[0].sent)

    async def test_compressed_bytes_one_at_a_time(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "compressed?piece=1"))
        assert (await whole(answer)).endswith(b"data: [DONE]\n\n")

    async def test_what_the_engine_gets_is_what_was_sent(self, engine: ScriptedEngine, client: EngineClient) -> None:
        sent = ask(engine, "echo", stream=False)
        await whole(await client.send(sent))
        assert engine.truths[0].body == b"".join(bytes(part) for part in sent.body)
        assert ("host", "engine") in engine.truths[0].headers

    async def test_a_body_of_megabytes_in_pieces(self, engine: ScriptedEngine, client: EngineClient) -> None:
        body = json.dumps({"user": "script:normal", "messages": "x" * 5_000_000}).encode()
        one = call(engine.port, body)
        parts = [memoryview(body)[:10], memoryview(body)[10:3_000_000], memoryview(body)[3_000_000:]]
        split = EngineCall("e1", one.host, one.port, one.head, parts, 2.0, 5.0)
        assert (await client.send(split)).status == 200
        assert engine.truths[0].body == body

    async def test_an_empty_body(self, client: EngineClient) -> None:
        async with RawServer(b"HTTP/1.1 204 No Content\r\n\r\n") as port:
            answer = await client.send(call(port))
            assert await answer.read(1.0) == b""
            assert client.idle_count == 1

    async def test_interim_answers_are_skipped(self, client: EngineClient) -> None:
        raw = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        async with RawServer(raw) as port:
            answer = await client.send(call(port))
            assert (answer.status, answer.headers) == (200, ((b"content-length", b"2"),))
            assert await whole(answer) == b"ok"

    async def test_trailers_are_no_headers(self, client: EngineClient) -> None:
        raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-evil: 1\r\n\r\n"
        async with RawServer(raw) as port:
            answer = await client.send(call(port))
            assert await whole(answer) == b"ok"
            assert answer.headers == ((b"transfer-encoding", b"chunked"),)

    async def test_read_all_is_bounded(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "big_event"))
        with pytest.raises(EngineLost, match="longer than 1000 bytes"):
            await answer.read_all(1_000, 2.0)
        assert await until(lambda: client.open_count == 0)


class TestRelay:
    """`relay` hands on, in the connection's own callback, what `read` would give."""

    @pytest.mark.parametrize("script", ["normal", "burst", "trickle", "close_delimited", "compressed", "line_ends"])
    @pytest.mark.parametrize("after_a_read", [False, True])
    async def test_a_stream_arrives_byte_for_byte(
        self, engine: ScriptedEngine, client: EngineClient, script: str, after_a_read: bool
    ) -> None:
        answer = await client.send(ask(engine, script, max_tokens=20))
        got = [await answer.read(1.0)] if after_a_read else []
        assert await answer.relay(into(got), 1.0, 5.0)
        if script == "compressed":
            assert b"".join(got).endswith(b"data: [DONE]\n\n")
        else:
            assert b"".join(got) == bytes(engine.truths[0].sent)
        assert await answer.read(1.0) == b""

    async def test_it_stops_when_told_and_goes_on_from_there(
        self, engine: ScriptedEngine, client: EngineClient
    ) -> None:
        answer = await client.send(ask(engine, "normal?gap_ms=2", max_tokens=20))
        got: list[bytes] = []

        def every_second(data: bytes) -> bool:
            got.append(data)
            return len(got) % 2 == 1

        stops = 0
        while not await answer.relay(every_second, 1.0, 5.0):
            stops += 1
            await asyncio.sleep(0.005)  # more comes meanwhile
        assert stops > 2
        assert b"".join(got) == bytes(engine.truths[0].sent)
        assert client.idle_count == 1

    async def test_silence_passes_the_idle_deadline(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "cut?how=stall&after=2"))
        with pytest.raises(EngineTimeout):
            await answer.relay(lambda _: True, 0.05, 5.0)
        assert await until(lambda: engine.truths[0].ended == "client_closed")

    @pytest.mark.parametrize("coding", [b"", b"content-encoding: gzip\r\n"])
    async def test_bytes_that_bring_no_body_are_silence(self, client: EngineClient, coding: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + coding + b"\r\n"

        ended = asyncio.Event()

        async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            writer.write(head + b"5;e=")
            with contextlib.suppress(ConnectionError, RuntimeError):
                for _ in range(200):  # a chunk extension, byte by byte
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)
            writer.close()
            with contextlib.suppress(ConnectionError, RuntimeError):
                await writer.wait_closed()
            ended.set()

        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        async with server:
            answer = await client.send(call(server.sockets[0].getsockname()[1]))
            began_s = time.monotonic()
            with pytest.raises(EngineTimeout):
                await answer.relay(lambda _: True, 0.2, 30.0)
            assert time.monotonic() - began_s < 2.0
            await asyncio.wait_for(ended.wait(), 10)

    async def test_a_slow_stream_does_not(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "normal?gap_ms=60&tokens=6"))
        got: list[bytes] = []
        assert await answer.relay(into(got), 0.3, 5.0)
        assert len(got) > 3

    async def test_a_stream_that_flows_passes_the_total_deadline(
        self, engine: ScriptedEngine, client: EngineClient
    ) -> None:
        answer = await client.send(ask(engine, "endless?gap_ms=5"))
        began_s = time.monotonic()
        with pytest.raises(EngineTimeout):
            await answer.relay(lambda _: True, 5.0, 0.1)
        assert time.monotonic() - began_s < 2.0
        assert await until(lambda: engine.truths[0].ended == "client_closed")

    @pytest.mark.parametrize("how", ["reset", "fin"])
    async def test_a_cut_is_a_loss_after_all_that_came(
        self, engine: ScriptedEngine, client: EngineClient, how: str
    ) -> None:
        answer = await client.send(ask(engine, f"cut?how={how}&after=3"))
        got: list[bytes] = []
        with pytest.raises(EngineLost):
            await answer.relay(into(got), 1.0, 5.0)
        assert b"".join(got) == bytes(engine.truths[0].sent)

    async def test_a_defect_of_the_taker_is_raised_where_it_waits(
        self, engine: ScriptedEngine, client: EngineClient
    ) -> None:
        def broken(_: bytes) -> bool:
            raise ZeroDivisionError

        answer = await client.send(ask(engine, "endless?gap_ms=5"))
        with pytest.raises(ZeroDivisionError):
            await answer.relay(broken, 1.0, 5.0)
            await answer.relay(broken, 1.0, 5.0)

    async def test_cancelling_closes_the_engines_side(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "cut?how=stall&after=2"))
        task = asyncio.ensure_future(answer.relay(lambda _: True, 5.0, 5.0))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await until(lambda: engine.truths[0].ended == "client_closed")

    async def test_a_connection_kept_after_a_relay_hands_nothing_to_it(
        self, engine: ScriptedEngine, client: EngineClient
    ) -> None:
        first: list[bytes] = []
        answer = await client.send(ask(engine, "normal"))
        assert await answer.relay(into(first), 1.0, 5.0)
        size = len(first)
        second: list[bytes] = []
        answer = await client.send(ask(engine, "normal"))
        assert await answer.relay(into(second), 1.0, 5.0)
        assert client.open_count == 1
        assert len(first) == size
        assert b"".join(second) == bytes(engine.truths[1].sent)


class TestPool:
    async def test_a_connection_is_used_again(self, engine: ScriptedEngine, client: EngineClient) -> None:
        for _ in range(5):
            await whole(await client.send(ask(engine)))
        assert engine.connections_count == 1
        assert client.idle_count == 1

    async def test_requests_at_once_have_their_own(self, engine: ScriptedEngine, client: EngineClient) -> None:
        async def one() -> bytes:
            return await whole(await client.send(ask(engine, "normal?gap_ms=5")))

        answers = await asyncio.gather(*(one() for _ in range(8)))
        assert all(answer.endswith(b"[DONE]\n\n") for answer in answers)
        assert engine.connections_count == 8

    async def test_one_that_the_engine_closed_while_idle_is_replaced(
        self, engine: ScriptedEngine, client: EngineClient
    ) -> None:
        await whole(await client.send(ask(engine)))
        engine.drop_idle()
        await whole(await client.send(ask(engine)))  # before the loop could see the close
        assert await until(lambda: len(engine.truths) == 2)
        assert engine.connections_count == 2

    async def test_a_reused_one_that_dies_before_a_byte_is_replaced_once(self, client: EngineClient) -> None:
        ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        server = RawServer(ok, b"", close=False)
        server._answers = [ok]
        async with server as port:
            assert await whole(await client.send(call(port))) == b"ok"
            server._hold_s = 0.0  # the next request finds a connection that is closed after it was sent
            server._answers = [ok]
            assert await whole(await client.send(call(port))) == b"ok"

    async def test_a_fresh_one_that_dies_before_a_byte_is_a_loss(self, client: EngineClient) -> None:
        async with RawServer(b"", close=True) as port:
            with pytest.raises(EngineLost, match="closed the connection"):
                await client.send(call(port))

    async def test_idle_ones_go_after_a_while(self, engine: ScriptedEngine) -> None:
        client = EngineClient(PoolLimits(idle_s=0.05))
        await whole(await client.send(ask(engine)))
        assert client.idle_count == 1
        assert await until(lambda: client.open_count == 0)
        await client.aclose()

    async def test_idle_ones_are_bounded(self, engine: ScriptedEngine) -> None:
        client = EngineClient(PoolLimits(idle_count=2))
        answers = await asyncio.gather(*(client.send(ask(engine, "normal?gap_ms=5")) for _ in range(5)))
        await asyncio.gather(*(whole(answer) for answer in answers))
        assert client.idle_count == 2
        await client.aclose()

    async def test_bytes_after_the_answer_are_never_another_answer(self, client: EngineClient) -> None:
        one = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        async with RawServer(one + one.replace(b"ok", b"no")) as port:
            assert await whole(await client.send(call(port))) == b"ok"
            assert client.idle_count == 0

    async def test_bytes_that_nobody_asked_for_cost_the_connection(self, client: EngineClient) -> None:
        async with RawServer(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok") as port:
            await whole(await client.send(call(port)))
            connection = client._idle[next(iter(client._idle))][0]
            connection.data_received(b"HTTP/1.1 200 OK\r\n")
            assert await until(lambda: client.idle_count == 0)

    async def test_connection_close_is_obeyed(self, client: EngineClient) -> None:
        async with RawServer(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok") as port:
            assert await whole(await client.send(call(port))) == b"ok"
            assert client.idle_count == 0

    async def test_after_closing_nothing_is_sent(self, engine: ScriptedEngine, client: EngineClient) -> None:
        await client.aclose()
        with pytest.raises(EngineUnreachable):
            await client.send(ask(engine))


class TestFaults:
    async def test_nobody_listens(self, client: EngineClient) -> None:
        async with RawServer() as port:
            pass
        with pytest.raises(EngineUnreachable) as caught:
            await client.send(call(port))
        assert caught.value.endpoint_id == "e1"
        assert "127.0.0.1" not in str(caught.value)

    async def test_a_silent_engine_passes_the_first_byte_deadline(
        self, engine: ScriptedEngine, client: EngineClient
    ) -> None:
        with pytest.raises(EngineTimeout) as caught:
            await client.send(ask(engine, "cut?how=stall&after=-1", first_byte_timeout_s=0.05))
        assert caught.value.deadline == "first_byte"
        assert await until(lambda: engine.truths[0].ended == "client_closed")

    async def test_a_stream_that_stalls_passes_the_idle_deadline(
        self, engine: ScriptedEngine, client: EngineClient
    ) -> None:
        answer = await client.send(ask(engine, "cut?how=stall&after=2"))
        with pytest.raises(EngineTimeout) as caught:
            while True:
                await answer.read(0.05)
        assert caught.value.deadline == "idle"
        assert await until(lambda: engine.truths[0].ended == "client_closed")

    async def test_a_slow_stream_does_not(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "normal?gap_ms=20&tokens=6"))
        parts = []
        while data := await answer.read(0.5):
            parts.append(data)
        assert b"".join(parts).endswith(b"[DONE]\n\n")
        assert len(parts) > 3

    @pytest.mark.parametrize("how", ["reset", "fin"])
    @pytest.mark.parametrize("after", [-1, 0, 3])
    async def test_a_cut_is_a_loss(self, engine: ScriptedEngine, client: EngineClient, how: str, after: int) -> None:
        got = b""
        with pytest.raises(EngineLost):
            answer = await client.send(ask(engine, f"cut?how={how}&after={after}"))
            while data := await answer.read(1.0):
                got += data
        assert got == bytes(engine.truths[0].sent)
        assert await until(lambda: client.open_count == 0)

    async def test_abort_closes_the_engines_side_at_once(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "endless?gap_ms=5"))
        await answer.read(1.0)
        answer.abort()
        assert await until(lambda: engine.truths[0].ended == "client_closed", 0.5)

    async def test_cancelling_a_wait_closes_the_engines_side(
        self, engine: ScriptedEngine, client: EngineClient
    ) -> None:
        async def read_on(sent: Awaitable[EngineAnswer]) -> None:
            answer = await sent
            while True:
                await answer.read(5.0)

        for script in ("cut?how=stall&after=-1", "cut?how=stall&after=2"):
            task = asyncio.ensure_future(read_on(client.send(ask(engine, script))))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await until(lambda: [truth.ended for truth in engine.truths] == ["client_closed"] * 2)
        assert client.open_count == 0

    async def test_releasing_half_an_answer_closes(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "endless?gap_ms=5"))
        answer.release()
        assert await until(lambda: engine.truths[0].ended == "client_closed")

    async def test_a_reader_that_lags_stops_the_engine(self, engine: ScriptedEngine, client: EngineClient) -> None:
        answer = await client.send(ask(engine, "big_event?size=30000000"))
        await asyncio.sleep(0.2)
        assert answer.buffered_bytes < 2_000_000
        assert (await answer.read_all(40_000_000, 5.0)).endswith(b"[DONE]\n\n")
        assert client.idle_count == 1

    async def test_an_answer_before_the_whole_request_is_taken(self, client: EngineClient) -> None:
        async def early(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
            await asyncio.sleep(0.5)
            writer.close()

        server = await asyncio.start_server(early, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        answer = await client.send(call(port, b"x" * 30_000_000))
        assert answer.status == 413
        assert await whole(answer) == b"big"
        assert client.idle_count == 0
        server.close()
        await asyncio.sleep(0.6)

    @pytest.mark.parametrize(
        "raw",
        [
            b"SSH-2.0-x\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"\r\n",
            b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000,
            b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 2\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\n\x1f\x8b\x08",
        ],
    )
    async def test_what_is_no_proper_answer_is_a_loss(self, client: EngineClient, raw: bytes) -> None:
        async with RawServer(raw) as port:
            with pytest.raises(EngineLost):
                await whole(await client.send(call(port)))


class TestTls:
    @pytest.fixture
    def certificate(self, tmp_path: Path) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
        now = datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName(
            [x509.DNSName("engine.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        made = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        cert, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
        cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert, secret

    async def test_a_known_authority_and_name_are_needed(
        self, certificate: tuple[Path, Path], client: EngineClient
    ) -> None:
        served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        served.load_cert_chain(*certificate)
        engine = ScriptedEngine(tls=served)
        await engine.start()
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        for name in (None, "engine.test"):
            answer = await client.send(ask_tls(engine, trusted, name))
            assert (await whole(answer)).endswith(b"[DONE]\n\n")
        with pytest.raises(EngineUnreachable, match="certificate was refused"):
            await client.send(ask_tls(engine, trusted, "other.test"))
        with pytest.raises(EngineUnreachable, match="certificate was refused"):
            await client.send(ask_tls(engine, ssl.create_default_context(), None))
        await engine.stop()


def ask_tls(engine: ScriptedEngine, context: ssl.SSLContext, name: str | None) -> EngineCall:
    body = json.dumps({"user": "script:normal", "stream": True}).encode()
    return call(engine.port, body, ssl=context, server_name=name)


async def test_the_truth_log_is_written_line_by_line(tmp_path: Path, client: EngineClient) -> None:
    log = tmp_path / "truth.jsonl"
    engine = ScriptedEngine(log)
    await engine.start()
    await whole(await client.send(ask(engine, "normal?tokens=5")))
    await until(lambda: engine.truths[0].ended != "")
    began, ended = (json.loads(line) for line in log.read_text().splitlines())
    await engine.stop()
    assert (began["ended"], began["script"]) == ("", "normal")
    assert (ended["ended"], ended["tokens_sent"]) == ("completed", 5)


async def test_the_scripted_engine_runs_as_a_process(tmp_path: Path, client: EngineClient) -> None:
    log = tmp_path / "truth.jsonl"
    command = [sys.executable, "-m", "tests.fakes.scripted_engine", "--port", "0", "--log", str(log), "--model", "x"]
    root = Path(__file__).parents[3]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=root)
    assert process.stdout is not None
    port = int(await asyncio.wait_for(process.stdout.readline(), 10.0))
    answer = await client.send(call(port, b'{"model":"m","stream":true,"max_tokens":3}'))
    assert (await whole(answer)).endswith(b"[DONE]\n\n")
    assert await until(lambda: log.read_text().count("\n") == 2)
    process.terminate()
    await process.wait()


def test_a_header_cannot_break_out_of_its_line() -> None:
    with pytest.raises(ValueError, match="line break"):
        request_head("GET", "/", [(b"a", b"b\r\nc: d")])
