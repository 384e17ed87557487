"""`inferplane engine-sim` as a process: what it prints, its exit codes, its signals.

Owns: the command and the process around the server. Does not own: HTTP (`test_engine_server`).
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

COMMAND = [sys.executable, "-m", "controlplane", "engine-sim"]


@contextmanager
def running(*options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        [*COMMAND, "--json", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def failed(*options: str) -> tuple[int, str]:
    """(exit code, stderr) of a command that must not start."""
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.strip()


def test_it_serves_at_the_url_it_prints_and_exits_0_after_sigterm() -> None:
    with running(
        "--model", "llama", "--arch", "llama-3.1-8b", "--speed", "50", "--hardware", "h200", "--dtype", "fp8"
    ) as (process, facts):
        with httpx.Client(base_url=facts["url"], trust_env=False) as client:
            body = {"model": "llama", "messages": [{"role": "user", "content": "hello"}]}
            answer = client.post("/v1/chat/completions", json=body).json()
            card = client.get("/v1/models").json()["data"][0]
            sources = client.get("/kv_event_sources").json()["0"]
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (card["id"], card["root"], card["max_model_len"]) == ("llama", "Llama-3.1-8B", 131072)
    assert sources["endpoint"] == facts["kv_events_endpoint"]
    assert sources["replay_endpoint"] == facts["kv_replay_endpoint"]
    assert "steps, delivered" in stderr


def test_a_model_of_the_catalogue_is_what_is_simulated_and_its_name_is_served() -> None:
    with running("--model", "qwen3-32b") as (_, facts), httpx.Client(trust_env=False) as client:
        card = client.get(f"{facts['url']}/v1/models").json()["data"][0]
    assert (card["id"], card["root"]) == ("qwen3-32b", "Qwen3-32B")


def test_sigterm_lets_a_running_stream_finish_and_a_second_one_does_not() -> None:
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    for signals, finishes in ((1, True), (2, False)):
        with running() as (process, facts), httpx.Client(trust_env=False) as client:
            with client.stream("POST", f"{facts['url']}/v1/completions", json=body) as response:
                parts = response.iter_text()
                text = next(parts)
                process.send_signal(signal.SIGTERM)
                if signals == 2:
                    # Two signals that are pending at once are one: the second follows when the first was taken.
                    text += next(parts) + next(parts)
                    process.send_signal(signal.SIGTERM)
                try:
                    text += "".join(parts)
                except httpx.RemoteProtocolError:
                    assert not finishes
            assert process.wait(20) == 0
            assert text.endswith("data: [DONE]\n\n") is finishes


def test_a_taken_port_is_one_sentence_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, stderr = failed("--port", str(port))
    assert (code, stderr) == (
        1,
        f"engine-sim: port {port} on 127.0.0.1 cannot be used: Address already in use. Stop what listens there, or "
        "name another port with --port.",
    )


@pytest.mark.parametrize("more", [(), ("--no-kv-events",)])
def test_an_address_of_another_machine_is_one_sentence_and_exit_code_1(more: tuple[str, ...]) -> None:
    code, stderr = failed("--host", "203.0.113.7", *more)
    assert (code, stderr) == (1, "engine-sim: host 203.0.113.7 cannot be used: it is no address of this machine")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--hardware", "tpu"), "--hardware is 'tpu'; the closest of the 43 known names: TPU-v"),
        (("--arch", "gpt"), "--arch is 'gpt'; the closest of the 63 known names: GPT-J-6B"),
        (
            ("--model", "nope"),
            "--model is 'nope'; the closest of the 63 known names: ",
        ),
        (
            ("--model", "x", "--arch", "nope"),
            "--arch is 'nope'; the closest of the 63 known names: ",
        ),
        (("--model", "llama-3.1-70b"), "Llama-3.1-70B in bf16 does not fit on 1 x H100-SXM-80GB"),
        (("--arch", "llama-3.1-70b"), "Llama-3.1-70B in bf16 does not fit on 1 x H100-SXM-80GB"),
        (("--tensor-parallel", "3"), "--tensor-parallel is 3; expected a divisor of the 32 attention heads"),
        (("--dtype", "int3"), "--dtype is 'int3'; expected one of"),
        (("--block-size", "0"), "--block-size is 0; expected at least 1"),
        (("--num-gpu-blocks-override", "1"), "--num-gpu-blocks-override is 1; expected at least 2"),
        (
            ("--num-gpu-blocks-override", "10", "--max-model-len", "1000"),
            "--max-model-len is 1000; expected at least 1",
        ),
        (("--max-num-seqs", "0"), "--max-num-seqs is 0; expected at least 1"),
        (("--max-num-batched-tokens", "-1"), "--max-num-batched-tokens is -1; expected at least 1"),
        (("--max-waiting", "0"), "--max-waiting is 0; expected at least 1"),
        (("--dram-gb", "10"), "--dram-gb-per-s is missing; expected --dram-gb and --dram-gb-per-s"),
        (("--dram-gb-per-s", "10"), "--dram-gb is missing; expected --dram-gb and --dram-gb-per-s"),
        (("--dram-gb", "0", "--dram-gb-per-s", "1"), "--dram-gb is 0.0; expected above 0"),
        (("--slow-ratio", "0"), "--slow-ratio is 0.0; expected 0.001 to 1000"),
        (("--slow-ratio", "1e300"), "--slow-ratio is 1e+300; expected 0.001 to 1000"),
        (("--step-noise", "2"), "--step-noise is 2.0; expected 0 to 1"),
        (("--speed", "0"), "--speed is 0.0; expected above 0"),
        (("--speed", "nan"), "--speed is nan; expected above 0"),
        (("--output-mean-tokens", "0.5"), "--output-mean-tokens is 0.5; expected at least 1"),
        (("--port", "70000"), "--port is 70000; expected 0 to 65535"),
        (("--kv-events-port", "-5"), "--kv-events-port is -5; expected 0 to 65535"),
        (("--drain-s", "-1"), "--drain-s is -1.0; expected 0 or more"),
        (("--host", "999.1.1.1", "--no-kv-events"), "--host is '999.1.1.1'; expected an address of this machine"),
        (("--host", "not an address"), "--host is 'not an address'; expected an address of this machine"),
    ],
)
def test_a_bad_value_is_one_sentence_and_exit_code_2(options: tuple[str, ...], told: str) -> None:
    code, stderr = failed(*options)
    assert code == 2, stderr
    assert stderr.startswith(f"engine-sim: {told}")
    assert "\n" not in stderr
