"""Simulated engines on real sockets, inside the test's event loop.

Owns: the fixture `engine` that starts one with the recorded session's limits. Does not own: any assertion.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from perfmodel.adapters.engine_clock import ClockConfig
from perfmodel.adapters.engine_server import EngineServer, ServerConfig
from perfmodel.adapters.kv_publisher import PublisherConfig
from perfmodel.scheduler import EngineConfig
from perfmodel.step_time import BatchShape

StartEngine = Callable[..., Awaitable[EngineServer]]

# The engine of the recorded session: tests/recorded/vllm_0.32.0/README.md.
RECORDED_ENGINE = EngineConfig(block_count=96, block_size_tokens=32, max_batched_tokens=512, max_sequence_count=4)


class FixedTiming:
    """Every step takes this long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def step_s(self, batch: BatchShape) -> float:
        return self._seconds


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts engines of 1 ms a step; changes to `ServerConfig` are arguments, `step_s` is the length of a step."""
    started: list[EngineServer] = []

    async def start(step_s: float = 0.001, **changes: Any) -> EngineServer:
        config = ServerConfig(
            model="tiny",
            root="/models/m",
            host="127.0.0.1",
            port=0,
            max_model_tokens=2048,
            engine=RECORDED_ENGINE,
            clock=ClockConfig(),
            kv_events=PublisherConfig("127.0.0.1", "kv@tiny@0"),
        )
        server = EngineServer(replace(config, **changes), FixedTiming(step_s))
        started.append(server)
        await server.start()
        return server

    yield start
    for server in started:
        server.close()
