"""What a plain FastAPI proxy costs: it parses the request's JSON and passes bytes through, nothing else.

Runs in the `fastapi` peer's own environment (peers.py). BENCH_CLIENT is `httpx` or `aiohttp`, BENCH_ENGINE the engine's
URL. A reference, not a product: it shows what the framework and the client library cost before a gateway does any work.
"""
# aiohttp is only in the peer's own environment, never in the project's.
# mypy: ignore-errors

import os
from contextlib import asynccontextmanager

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

URL = os.environ["BENCH_ENGINE"] + "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}


class HttpxClient:
    """Upstream calls through httpx."""

    async def open(self):
        """Make the pool."""
        import httpx

        limits = httpx.Limits(max_connections=2_000, max_keepalive_connections=2_000)
        self.client = httpx.AsyncClient(timeout=60, limits=limits, trust_env=False)

    async def close(self):
        """Close the pool."""
        await self.client.aclose()

    async def whole(self, body):
        """Status and bytes of an answer."""
        answer = await self.client.post(URL, content=body, headers=HEADERS)
        return answer.status_code, answer.content

    async def pieces(self, body):
        """The answer's bytes as they come."""
        async with self.client.stream("POST", URL, content=body, headers=HEADERS) as answer:
            async for piece in answer.aiter_raw():
                yield piece


class AiohttpClient:
    """Upstream calls through aiohttp."""

    async def open(self):
        """Make the pool."""
        import aiohttp

        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self):
        """Close the pool."""
        await self.client.close()

    async def whole(self, body):
        """Status and bytes of an answer."""
        async with self.client.post(URL, data=body, headers=HEADERS) as answer:
            return answer.status, await answer.read()

    async def pieces(self, body):
        """The answer's bytes as they come."""
        async with self.client.post(URL, data=body, headers=HEADERS) as answer:
            async for piece in answer.content.iter_any():
                yield piece


client = {"httpx": HttpxClient, "aiohttp": AiohttpClient}[os.environ["BENCH_CLIENT"]]()


@asynccontextmanager
async def lifespan(_app):
    """Open and close the client with the server."""
    await client.open()
    yield
    await client.close()


app = FastAPI(lifespan=lifespan)


@app.post("/v1/chat/completions")
async def chat(request: Request):
    """Pass one request through."""
    body = await request.body()
    if orjson.loads(body).get("stream"):
        return StreamingResponse(client.pieces(body), media_type="text/event-stream")
    status, content = await client.whole(body)
    return Response(content, status, media_type="application/json")
