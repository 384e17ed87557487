"""The life of an `engine-sim` process: the event loop, the line that says where it listens, signals, the last words.

Owns: start, SIGTERM and SIGINT, and what is printed. Does not own: the server (`engine_server`) or options (`cli`).
The second signal does not wait for running requests.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys

import orjson
import uvloop

from perfmodel.adapters.engine_server import EngineServer, ServerConfig
from perfmodel.scheduler import StepTiming

# Allocations between two young collections: a step allocates tuples and bytes only, in no cycles, so CPython's 700 is
# wasted work.
_GC_THRESHOLD = 50_000


def run_engine(config: ServerConfig, timing: StepTiming, *, as_json: bool) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError when the port is taken and PortError when the events' port is."""
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config, timing, as_json))


async def _run(config: ServerConfig, timing: StepTiming, as_json: bool) -> None:
    server = EngineServer(config, timing)
    try:
        await server.start()
        gc.freeze()
        _say_where(server, config, as_json)
        stop, hurry = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())
        await stop.wait()
        drain, impatience = loop.create_task(server.drain()), loop.create_task(hurry.wait())
        await asyncio.wait((drain, impatience), return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, impatience):
            task.cancel()
    finally:
        server.close()
    _say_lag(server)


def _say_where(server: EngineServer, config: ServerConfig, as_json: bool) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{server.port}"
    publisher = server.publisher
    if as_json:
        facts = {
            "url": url,
            "model": config.model,
            "architecture": config.root,
            "kv_blocks": config.engine.block_count,
            "block_size_tokens": config.engine.block_size_tokens,
            "max_model_tokens": config.max_model_tokens,
            "kv_events_endpoint": None if publisher is None else publisher.endpoint,
            "kv_replay_endpoint": None if publisher is None else publisher.replay_endpoint,
        }
        print(orjson.dumps(facts).decode(), flush=True)
        return
    print(f"{config.model} ({config.root}, {config.engine.block_count} KV blocks) on {url}", flush=True)
    if publisher is not None:
        print(f"KV events on {publisher.endpoint}, replay on {publisher.replay_endpoint}", flush=True)


def _say_lag(server: EngineServer) -> None:
    """How true the simulation's times were: the clock's lag over all steps."""
    lag = server.metrics.lag
    if not lag.count:
        return
    print(
        f"engine-sim: {lag.count} steps, delivered {lag.sum / lag.count * 1e3:.2f} ms late on average and "
        f"{server.metrics.max_lag_s * 1e3:.1f} ms at most",
        file=sys.stderr,
    )
