"""A real vLLM as a child process: start, kill, end.

Owns: the command line, the environment, waiting for readiness, and that nothing of it is left. Does not own: its
installation (`make test-engines`) or the model (`tiny_model`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.services import free_tcp_port

ROOT = Path(__file__).parents[2]
_COMMAND = ROOT / ".venv/engines-vllm/bin/vllm"
# On the CPU vLLM takes multiples of 32 only.
BLOCK_TOKENS = 32
# Few enough that a test can fill them.
BLOCK_COUNT = 96
MODEL = "tiny"
# The first start compiles Python's byte code of torch and vLLM: two minutes on a busy machine with two cores.
START_LIMIT_S = 300.0


class VllmProcess:
    """One `vllm serve` with KV events. `start` may be called again after `kill`: the same ports, an empty cache."""

    def __init__(self, model: Path, log: Path) -> None:
        self.model = model
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._port, self._event_port, self._replay_port = free_tcp_port(), free_tcp_port(), free_tcp_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self._replay_port}"

    def start(self) -> None:
        """Start it and wait until it answers; skips the test where it is not installed."""
        if not _COMMAND.is_file():
            pytest.skip("vLLM: it is not installed; `make test-engines` does that")
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._words(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        until_s = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if self._child.poll() is not None or time.monotonic() > until_s:
                said = self._log.read_text(errors="replace")[-3_000:]
                self.kill()
                pytest.fail(f"vLLM does not start; its last words:\n{said}")
            time.sleep(0.5)

    def kill(self) -> None:
        """kill -9 of the whole process group: the API server, the engine and its workers. Twice does nothing."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(30)
        self._child = None

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == 200
        return False

    def _words(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._event_port}",
            "replay_endpoint": self.replay_endpoint,
            "topic": f"kv@{MODEL}@0",
        }
        return [
            *(str(_COMMAND), "serve", str(self.model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self._port), "--max-model-len", "2048"),
            *("--enable-prefix-caching", "--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", str(BLOCK_COUNT), "--max-num-seqs", "4", "--enforce-eager"),
            *("--dtype", "bfloat16", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)),
        ]


def _environment() -> dict[str, str]:
    """Offline, on loopback, one GiB of KV cache at most; byte code is kept, or every start compiles torch anew."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
