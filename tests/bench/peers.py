"""Other gateways from PyPI, measured beside ours: one table of pinned versions and start commands.

Owns: which peers there are, their virtual environments (made by uv in the benchmark's cache folder, byte code
compiled), and how each is started on the gateway's core in front of the same stub. Does not own: the load.

What is not like for like: the routers check no keys, budgets or usage; LiteLLM runs without its database (its engine
binary cannot be fetched everywhere), with a master key or with a static list of keys and in-memory limits; the FastAPI
proxies pass bytes through to one engine and do nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.bench.machine import Affinity, BenchError, favour, resident_mb, tree

_HERE = Path(__file__).parent
_START_S, _STOP_S = 120.0, 10.0
_INSTALL_S = 900.0
# Compared with when nothing else is asked for: the two that have a bar, then the nearest others.
DEFAULT_PEERS = ("litellm", "vllm-router", "vllm-router-8", "sglang-router", "fastapi-httpx", "fastapi-aiohttp")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a peer is started."""

    bin: Path
    """`bin` of its virtual environment."""
    folder: Path
    port: int
    engine_urls: tuple[str, ...]
    model: str
    keys_file: Path
    """Keys of our gateway, one a line."""


@dataclass(frozen=True, slots=True)
class Start:
    """A command, and the file of keys that its clients use; None: it asks for none."""

    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    keys_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """One other gateway."""

    venv: str
    packages: tuple[str, ...]
    """Pinned; the first one is what the report names."""
    start: Callable[[Site], Start]
    engines_count: int
    """Engines behind it: eight as behind ours, or one."""
    slow: bool = False
    """So slow that a warm-up of hundreds of requests would take longer than the run."""
    note: str = ""


def _litellm_config(site: Site, general: dict[str, object]) -> Start:
    config = {
        "model_list": [
            {
                "model_name": site.model,
                "litellm_params": {"model": f"openai/{site.model}", "api_base": f"{url}/v1", "api_key": "sk-stub"},
            }
            for url in site.engine_urls
        ],
        "general_settings": general,
    }
    path = site.folder / "litellm.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    argv = [str(site.bin / "litellm"), "--config", str(path), "--host", "127.0.0.1", "--port", str(site.port)]
    # Without the first it fetches prices from the network at its start.
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "DO_NOT_TRACK": "1"}
    return Start(argv, env)


def _litellm(site: Site) -> Start:
    secret = "sk-bench-master"
    keys = site.folder / "litellm-key.txt"
    keys.write_text(f"{secret}\n")
    started = _litellm_config(site, {"master_key": secret})
    return Start(started.argv, started.env, keys)


def _litellm_limits(site: Site) -> Start:
    shutil.copy(_HERE / "litellm_keys.py", site.folder)
    general: dict[str, object] = {"master_key": "sk-bench-master", "custom_auth": "litellm_keys.check_key"}
    started = _litellm_config(site, general)
    return Start(started.argv, {**started.env, "BENCH_KEYS_FILE": str(site.keys_file)}, site.keys_file)


def _rust_router(program: Sequence[str], log_level: str) -> Callable[[Site], Start]:
    def start(site: Site) -> Start:
        argv = [str(site.bin / program[0]), *program[1:], "--host", "127.0.0.1", "--port", str(site.port)]
        argv += ["--worker-urls", *site.engine_urls, "--policy", "cache_aware", "--log-level", log_level]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        return Start(argv)

    return start


def _fastapi(client: str) -> Callable[[Site], Start]:
    def start(site: Site) -> Start:
        argv = [str(site.bin / "uvicorn"), "fastapi_proxy:app", "--app-dir", str(_HERE), "--host", "127.0.0.1"]
        argv += ["--port", str(site.port), "--loop", "uvloop", "--http", "httptools", "--no-access-log"]
        argv += ["--log-level", "warning"]
        return Start(argv, {"BENCH_CLIENT": client, "BENCH_ENGINE": site.engine_urls[0]})

    return start


_LITELLM_PACKAGES = ("litellm[proxy]==1.108.7", "opentelemetry-sdk==1.45.1", "opentelemetry-exporter-otlp==1.45.1")
_FASTAPI_PACKAGES = (
    "fastapi==0.165.0", "starlette==1.10.0", "uvicorn[standard]==0.54.0", "httpx==0.28.1", "aiohttp==3.14.5",
    "orjson==3.13.0",
)  # fmt: skip
_VLLM_ROUTER = _rust_router(["vllm-router"], "warning")
_SGLANG_ROUTER = _rust_router(["python", "-m", "sglang_router.launch_router"], "warn")
_UNCHECKED = "no keys, limits or usage"
PEERS: dict[str, Peer] = {
    "litellm": Peer(
        "litellm", _LITELLM_PACKAGES, _litellm, 8, slow=True, note="one master key, no limits, no database"
    ),
    "litellm-limits": Peer(
        "litellm", _LITELLM_PACKAGES, _litellm_limits, 8, slow=True, note="our 200 keys, limits in memory, no database"
    ),
    # With one engine it is three times as fast as with eight: the bar is held against the faster one.
    "vllm-router": Peer(
        "vllm-router", ("vllm-router==0.1.17",), _VLLM_ROUTER, 1,
        note=f"cache_aware, asks the engine for each prompt's token ids; {_UNCHECKED}",
    ),
    "vllm-router-8": Peer(
        "vllm-router", ("vllm-router==0.1.17",), _VLLM_ROUTER, 8,
        note=f"cache_aware, asks an engine for each prompt's token ids; {_UNCHECKED}",
    ),
    "sglang-router": Peer(
        "sglang-router", ("sglang-router==0.3.2",), _SGLANG_ROUTER, 8, note=f"cache_aware; {_UNCHECKED}"
    ),
    "fastapi-httpx": Peer("fastapi", _FASTAPI_PACKAGES, _fastapi("httpx"), 1, slow=True, note="passes bytes through"),
    "fastapi-aiohttp": Peer("fastapi", _FASTAPI_PACKAGES, _fastapi("aiohttp"), 1, note="passes bytes through"),
}  # fmt: skip


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(peer: Peer, home: Path, *, install: bool) -> Path:
    """`bin` of the peer's virtual environment, made when these versions are not there. Raises BenchError."""
    folder = home / "venvs" / peer.venv
    stamp = folder / "installed.txt"
    wanted = "\n".join((f"python {sys.version_info.major}.{sys.version_info.minor}", *peer.packages)) + "\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder / "bin"
    if not install:
        raise BenchError(f"{' '.join(peer.packages)} is not in {folder}; run without --no-install.")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise BenchError("uv is not installed (`make setup` brings it), and the peers' environments are made with it.")
    env = {**os.environ, "VIRTUAL_ENV": str(folder)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # Without compiled byte code LiteLLM compiles a failing import at each request: half its speed.
    steps = (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--quiet", "--compile-bytecode", *peer.packages],
    )
    for step in steps:
        made = subprocess.run(step, env=env, capture_output=True, text=True, check=False, timeout=_INSTALL_S)
        if made.returncode:
            lines = made.stderr.strip().splitlines() or ["no message"]
            raise BenchError(f"{' '.join(peer.packages)} could not be installed: {lines[-1].strip()}")
    stamp.write_text(wanted)
    return folder / "bin"


@dataclass(frozen=True, slots=True)
class Running:
    """A peer that answers."""

    name: str
    port: int
    pid: int
    keys_file: Path | None
    start_s: float
    idle_mb: float


@contextmanager
def running(name: str, site: Site, affinity: Affinity) -> Iterator[Running]:
    """Start a peer on the gateway's core and wait for its first answer. Raises BenchError."""
    start = PEERS[name].start(site)
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")}
    log = site.folder / "peer.log"
    began_s = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*affinity.gateway, *start.argv], env={**ours, **start.env}, cwd=site.folder, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        _await_answer(name, process, start, site)
        start_s = time.monotonic() - began_s
        favour(tree(process.pid), affinity.nice)
        time.sleep(1.0)
        yield Running(name, site.port, process.pid, start.keys_file, start_s, resident_mb(tree(process.pid)))
    finally:
        _stop(process)


def _await_answer(name: str, process: subprocess.Popen[bytes], start: Start, site: Site) -> None:
    headers = {}
    if start.keys_file is not None:
        headers["authorization"] = f"Bearer {start.keys_file.read_text().split()[0]}"
    body = {"model": site.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    url = f"http://127.0.0.1:{site.port}/v1/chat/completions"
    until_s, last = time.monotonic() + _START_S, "no answer"
    while time.monotonic() < until_s and process.poll() is None:
        try:
            answer = httpx.post(url, json=body, headers=headers, timeout=10.0, trust_env=False)
            if answer.status_code == 200:
                return
            last = f"{answer.status_code} {answer.text[:200]}"
        except httpx.HTTPError as fault:
            last = type(fault).__name__
        time.sleep(0.1)
    raise BenchError(f"{name} did not answer (status {process.poll()}, last: {last}); see {site.folder / 'peer.log'}.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    from psutil import NoSuchProcess, Process

    children = tree(process.pid)
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in children[1:]:
        try:
            Process(pid).kill()
        except NoSuchProcess:
            continue
