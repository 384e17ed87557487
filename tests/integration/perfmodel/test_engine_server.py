"""The simulated engine's server under clients that leave, dawdle, flood it or break the protocol.

Owns: what the HTTP side promises beyond the recorded bytes. Does not own: those bytes (`test_engine_contract`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import openai
import pytest

from perfmodel.adapters.engine_clock import ClockConfig
from perfmodel.adapters.engine_http import HttpLimits
from perfmodel.adapters.engine_server import EngineServer
from perfmodel.scheduler import EngineConfig, FinishReason
from perfmodel.workload import OutputLaw
from tests.integration.perfmodel.conftest import RECORDED_ENGINE, StartEngine

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello world " * 40}]
# A step of this length never ends within a test: what ends a request then is an abort.
NEVER_S = 3600.0


def client_of(server: EngineServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=30)


def sdk(server: EngineServer) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", http_client=http, max_retries=0
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 what is waited for is another process's view, with no event to wait on
            await asyncio.sleep(0.005)


def request_bytes(body: dict[str, Any], path: str = "/v1/chat/completions", extra: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{extra}content-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


async def raw(server: EngineServer, data: bytes) -> bytes:
    """What the server answers to these bytes until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks_at_once(start_engine: StartEngine, stream: bool) -> None:
    server = await start_engine(step_s=NEVER_S)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes({"messages": MESSAGES, "stream": stream, "max_tokens": 100}))
    await until(lambda: server.core.pool.used_block_count > 0)
    writer.close()
    await until(lambda: server.core.pool.used_block_count == 0)
    assert server.core.stats().running_count == 0
    async with client_of(server) as client:
        text = (await client.get("/metrics")).text
        assert (await client.get("/load")).json() == {"server_load": 0}
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0' in text


async def test_a_client_that_leaves_while_it_waits_in_the_queue_is_taken_out(start_engine: StartEngine) -> None:
    server = await start_engine(step_s=NEVER_S, engine=replace(RECORDED_ENGINE, max_sequence_count=1))
    writers = [(await asyncio.open_connection("127.0.0.1", server.port))[1] for _ in range(2)]
    for writer in writers:
        writer.write(request_bytes({"messages": MESSAGES, "stream": True}))
        await asyncio.sleep(0.02)
    await until(lambda: server.core.stats().waiting_count == 1)
    writers[1].close()
    await until(lambda: server.core.stats().waiting_count == 0)
    assert server.core.stats().running_count == 1
    writers[0].close()


async def test_half_of_a_request_and_a_close_leave_nothing_behind(start_engine: StartEngine) -> None:
    server = await start_engine()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes({"messages": MESSAGES})[:-10])
    await writer.drain()
    writer.close()
    async with client_of(server) as client:
        await until(lambda: server.core.idle)
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_requests_can_be_aborted_by_their_id(start_engine: StartEngine) -> None:
    server = await start_engine(step_s=NEVER_S)
    async with client_of(server) as client:
        body = {"messages": MESSAGES, "max_tokens": 100}
        asked = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body, headers={"x-request-id": name}))
            for name in ("first", "second")
        ]
        await until(lambda: server.core.stats().running_count + server.core.stats().waiting_count == 2)
        await client.post("/abort_requests", json={"request_ids": ["chatcmpl-first"]})
        ended = (await asked[0]).json()
        assert (ended["id"], ended["choices"][0]["finish_reason"]) == ("chatcmpl-first", "abort")
        assert not asked[1].done()
        await client.post("/abort_requests")
        assert (await asked[1]).json()["choices"][0]["finish_reason"] == "abort"
    assert server.core.pool.used_block_count == 0


async def test_a_crowd_of_clients_of_which_many_leave_leaves_nothing_behind(start_engine: StartEngine) -> None:
    server = await start_engine(step_s=0.001, engine=replace(RECORDED_ENGINE, max_sequence_count=16))
    dice = Random(7)

    async def visit(number: int) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{number % 7} " + "word " * dice.randrange(200)}]
        }
        body |= {"max_tokens": dice.randrange(1, 60), "stream": dice.random() < 0.7, "n": dice.randrange(1, 3)}
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes(body, extra="connection: close\r\n"))
        if dice.random() < 0.5:
            await asyncio.sleep(dice.random() * 0.3)
        else:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 OK"), answer
        writer.close()

    async with asyncio.timeout(60):
        await asyncio.gather(*[visit(number) for number in range(150)])
    await until(lambda: server.core.idle)
    assert server.core.pool.used_block_count == 0
    async with client_of(server) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        text = (await client.get("/metrics")).text
    finished = server.core.stats().finished_counts
    assert server.metrics.e2e.count == sum(finished.values())
    assert min(finished[FinishReason.LENGTH], finished[FinishReason.ABORT]) > 10
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text


# Clients that dawdle


async def slow_socket(server: EngineServer) -> socket.socket:
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", server.port))
    return slow


LONG_ENGINE = EngineConfig(block_count=2000, block_size_tokens=32, max_batched_tokens=512)
LONG_ANSWER = {"messages": MESSAGES, "stream": True, "max_tokens": 2500, "ignore_eos": True, "logprobs": True}
LONG_ANSWER |= {"top_logprobs": 20, "stream_options": {"include_usage": True}}


async def test_a_slow_reader_gets_every_token_in_fewer_events(start_engine: StartEngine) -> None:
    server = await start_engine(step_s=0.001, engine=LONG_ENGINE, max_model_tokens=8192, clock=ClockConfig(speed=1_000))
    loop = asyncio.get_running_loop()
    with await slow_socket(server) as slow:
        await loop.sock_sendall(slow, request_bytes(LONG_ANSWER, extra="connection: close\r\n"))
        await until(lambda: server.metrics.e2e.count == 1)
        async with client_of(server) as client:
            text = (await client.get("/metrics")).text
        assert 'inferplane_sim:slow_readers{engine="0",model_name="tiny"} 1.0' in text
        answer = b""
        while data := await loop.sock_recv(slow, 1 << 20):
            answer += data
    payloads = [line for line in dechunked(answer).split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(payload[6:]) for payload in payloads]
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]][1:]
    assert sum(len(delta["delta"]["content"]) for delta in deltas) == 4 * 2500
    assert sum(len(delta["logprobs"]["content"]) for delta in deltas) == 2500
    assert len(deltas) < 2500
    assert chunks[-1]["usage"]["completion_tokens"] == 2500


def dechunked(answer: bytes) -> bytes:
    _, _, rest = answer.partition(b"\r\n\r\n")
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        rest = rest[length + 2 :]
    return b"".join(parts)


async def test_a_reader_that_takes_nothing_is_cut_off_and_its_request_aborted(start_engine: StartEngine) -> None:
    server = await start_engine(
        step_s=0.001,
        engine=LONG_ENGINE,
        max_model_tokens=60_000,
        clock=ClockConfig(speed=1_000),
        http=HttpLimits(write_timeout_s=0.2),
    )
    with await slow_socket(server) as slow:
        body = {**LONG_ANSWER, "max_tokens": 50_000}
        await asyncio.get_running_loop().sock_sendall(slow, request_bytes(body))
        await until(lambda: server.metrics.e2e.count == 1)
    assert server.core.idle
    async with client_of(server) as client:
        assert 'finished_reason="abort",model_name="tiny"} 1.0' in (await client.get("/metrics")).text


async def test_a_request_that_trickles_in_and_an_idle_connection_are_closed(start_engine: StartEngine) -> None:
    server = await start_engine(http=HttpLimits(receive_timeout_s=0.1, keep_alive_s=0.1))
    assert await raw(server, b"POST /v1/comp") == b""
    assert (await raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")


# Clients that flood


async def test_a_full_queue_is_refused_with_503_and_a_time_to_come_back(start_engine: StartEngine) -> None:
    engine = replace(RECORDED_ENGINE, max_sequence_count=1, max_waiting_count=1)
    server = await start_engine(step_s=NEVER_S, engine=engine)
    async with client_of(server) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": MESSAGES}))
        await until(lambda: server.core.stats().running_count == 1)
        refused = await client.post("/v1/completions", json={"prompt": ["first", "second"]})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["message"] == "The engine's queue is full (1 sequences are waiting)."
        # The part of a refused request that still fitted is taken out again.
        assert server.core.stats().waiting_count == 0
        assert 'reason="max_num_queued_reqs"} 1.0' in (await client.get("/metrics")).text
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_a_body_over_the_limit_is_refused_whether_its_length_is_told_or_not(start_engine: StartEngine) -> None:
    server = await start_engine(http=HttpLimits(max_body_bytes=1000))
    told = await raw(server, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
    untold = await raw(
        server, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n" + b"a" * 1001
    )
    for answer in (told, untold):
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"larger than 1000 bytes" in answer


async def test_endless_headers_are_refused(start_engine: StartEngine) -> None:
    server = await start_engine()
    answer = await raw(server, b"GET /health HTTP/1.1\r\n" + b"x: " + b"a" * 70_000 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_connections_over_the_limit_are_told_so(start_engine: StartEngine) -> None:
    server = await start_engine(http=HttpLimits(max_connection_count=1))
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await asyncio.sleep(0.02)
    assert (await raw(server, b"")).startswith(b"HTTP/1.1 503 ")
    writer.close()


async def test_too_many_requests_in_one_write_cut_the_connection(start_engine: StartEngine) -> None:
    server = await start_engine(step_s=NEVER_S)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes({"messages": MESSAGES}) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/1.1" not in await reader.read()
    await until(lambda: server.core.idle)
    writer.close()


# Clients that break the protocol, or use rare parts of it


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    ],
    ids=["tls", "version", "chunk size", "content length", "upgrade"],
)
async def test_bytes_that_are_not_http_get_one_400(start_engine: StartEngine, data: bytes) -> None:
    server = await start_engine()
    answer = await raw(server, data)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


async def test_pipelined_requests_are_answered_in_order(start_engine: StartEngine) -> None:
    server = await start_engine()
    generate = request_bytes({"prompt": "hello", "max_tokens": 3}, "/v1/completions")
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = await raw(server, generate + b"GET /v1/nothing HTTP/1.1\r\nhost: x\r\n\r\n" + last)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP/1.1 ") == 3
    assert answer.index(b"text_completion") < answer.index(b"Not Found") < answer.index(b'{"version":"0.32.0"}')


async def test_a_chunked_body_and_expect_continue_are_read(start_engine: StartEngine) -> None:
    server = await start_engine()
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\n"
    body = b'transfer-encoding: chunked\r\n\r\n8\r\n{"prompt\r\nd\r\n":"hello wo"}\r\n0\r\n\r\n'
    answer = await raw(server, head + body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert b'"count":2,' in answer


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(start_engine: StartEngine) -> None:
    server = await start_engine()
    request = request_bytes({"messages": MESSAGES, "stream": True, "max_tokens": 3}).replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = await raw(server, request)
    assert b"transfer-encoding" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


# Conversations


async def test_the_next_turn_finds_the_last_one_and_its_answer_in_the_cache(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        body: dict[str, Any] = {"messages": [{"role": "system", "content": "Be kind."}, *MESSAGES], "max_tokens": 64}
        first = (await client.post("/v1/chat/completions", json=body)).json()
        answer = first["choices"][0]["message"]
        turn = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "And then?"}]
        body["messages"] += turn
        second = (await client.post("/v1/chat/completions", json=body)).json()
    known = first["usage"]["prompt_tokens"] + 64 - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 32 * 32


async def test_what_was_evicted_comes_back_from_the_lower_tier_and_is_told_as_such(start_engine: StartEngine) -> None:
    engine = EngineConfig(block_count=20, block_size_tokens=32, tier_block_count=100, restore_s_per_block=0.02)
    server = await start_engine(engine=engine, max_model_tokens=600)
    async with client_of(server) as client:
        for user in ("first", "second", "first"):
            body = {"messages": [{"role": "user", "content": user + " and many words" * 130}], "max_tokens": 1}
            began_s = time.monotonic()
            answer = (await client.post("/v1/chat/completions", json=body)).json()
        took_s = time.monotonic() - began_s
        page = (await client.get("/metrics")).text
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    told = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    host = next(float(value) for name, value in told.items() if "cached_by_source_total{" in name and '"host"' in name)
    assert 0 < host <= cached
    assert took_s >= 0.02 * host / 32
    hits = next(
        float(value) for name, value in told.items() if name.startswith("vllm:external_prefix_cache_hits_total")
    )
    assert hits == host


async def test_tenants_with_different_salts_do_not_share_blocks(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        hits = []
        for salt in ("a", "a", "b", None):
            body = {"messages": MESSAGES, "max_tokens": 1, "cache_salt": salt}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert hits == [False, True, False, False]


async def test_a_seed_decides_ids_answers_and_lengths(start_engine: StartEngine) -> None:
    async def told(seed: int) -> list[Any]:
        engine = replace(RECORDED_ENGINE, seed=seed, output_law=OutputLaw(20))
        server = await start_engine(engine=engine)
        async with client_of(server) as client:
            answers = [(await client.post("/v1/chat/completions", json={"messages": MESSAGES})).json() for _ in "123"]
        for answer in answers:
            del answer["created"]
        return answers

    first, again, other = [await told(seed) for seed in (1, 1, 2)]
    assert first == again
    assert first != other
    assert len({answer["choices"][0]["message"]["content"] for answer in first}) == 3


async def test_temperature_0_and_a_request_seed_repeat_their_answers(start_engine: StartEngine) -> None:
    server = await start_engine()

    async def text(**sampling: Any) -> str:
        body = {"messages": MESSAGES, "max_tokens": 8, **sampling}
        content: str = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
        return content

    async with client_of(server) as client:
        assert await text(temperature=0) == await text(temperature=0)
        assert await text(seed=1) == await text(seed=1) != await text(seed=2)
        assert await text() != await text()


async def test_token_ids_are_those_of_tokenize_and_come_back_when_asked_for(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        tokens = (await client.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"]
        body = {"messages": MESSAGES, "max_tokens": 4, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        made = (await client.post("/detokenize", json={"tokens": answer["choices"][0]["token_ids"]})).json()
    assert answer["prompt_token_ids"] == tokens
    assert made["prompt"] == answer["choices"][0]["message"]["content"]


async def test_echo_gives_the_prompt_back(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with client_of(server) as client:
        body: dict[str, Any] = {"prompt": 'say "hi"\n', "max_tokens": 2, "echo": True, "temperature": 0}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        streamed = (await client.post("/v1/completions", json={**body, "stream": True})).text
    parts = [json.loads(line[6:])["choices"][0]["text"] for line in streamed.split("\n") if line.startswith("data: {")]
    assert whole.startswith('say "hi"\n ')
    assert "".join(parts) == whole


# The official client


async def test_the_openai_sdk_streams_a_chat_with_usage(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with sdk(server) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]).count(" ") == 5
    assert chunks[-2].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 5
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_the_openai_sdk_gets_two_choices_with_logprobs(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with sdk(server) as client:
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=3,
            n=2,
            logprobs=True,
            top_logprobs=2,
        )
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=3, n=2, logprobs=True, stream=True
        )
        streamed = [chunk.choices[0] async for chunk in stream]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    for choice in answer.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert "".join(token.token for token in content) == choice.message.content
        assert all(len(token.top_logprobs) == 2 for token in content)
        assert all(token.logprob == token.top_logprobs[0].logprob > token.top_logprobs[1].logprob for token in content)
    counted = [choice.index for choice in streamed if choice.logprobs is not None and choice.logprobs.content]
    assert sorted(counted) == [0, 0, 0, 1, 1, 1]


async def test_the_openai_sdk_completes_several_prompts_with_logprobs(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with sdk(server) as client:
        answer = await client.completions.create(
            model="tiny", prompt=["one", "two", "three"], max_tokens=2, n=2, logprobs=1, temperature=1
        )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len({choice.text for choice in answer.choices}) == 6
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset == [0, 4]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


async def test_the_openai_sdk_raises_its_own_errors(start_engine: StartEngine) -> None:
    server = await start_engine()
    async with sdk(server) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hello"}])
        with pytest.raises(openai.BadRequestError, match="max_model_len=2048"):
            await client.completions.create(model="tiny", prompt="hello", max_tokens=4096)
        assert [model.id async for model in client.models.list()] == ["tiny"]


# The end


async def test_a_drain_lets_a_stream_finish_and_takes_no_new_connection(start_engine: StartEngine) -> None:
    server = await start_engine(step_s=0.02)
    async with client_of(server) as client:
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 20, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            port = server.port
            drain = asyncio.create_task(server.drain())
            text = "".join([part async for part in response.aiter_text()])
        await drain
    assert text.endswith("data: [DONE]\n\n")
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_drain_ends_at_its_deadline(start_engine: StartEngine) -> None:
    server = await start_engine(step_s=NEVER_S, drain_s=0.05)
    async with client_of(server) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": MESSAGES}))
        await until(lambda: server.core.stats().running_count == 1)
        await server.drain()
        server.close()
        with pytest.raises(httpx.RemoteProtocolError):
            await asked
    assert server.core.pool.used_block_count == 0
