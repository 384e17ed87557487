"""The llama.cpp engine, started for real with the random model.

Owns: LlamaEngine and write_random_model. Does not own: how the gateway relays its answers.
It proves that the model is usable (chat, prefix cache, usage) and that the child never outlives its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import psutil
import pytest

from controlplane.adapters.llama_engine import LlamaEngine, LlamaOptions, write_random_model
from controlplane.errors import ConfigError
from tests import services

pytestmark = pytest.mark.engine

# Long enough for the prefix cache to be worth something: llama.cpp keeps any common prefix.
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "you are a helpful assistant for the inference cluster. " * 8}],
    "max_tokens": 8,
    "temperature": 0,
}


def test_answers_and_counts_what_its_prefix_cache_saved(llama_url: str) -> None:
    body = BODY | {"user": "a new prompt for this test"}
    first = httpx.post(f"{llama_url}/v1/chat/completions", json=body).json()["usage"]
    again = httpx.post(f"{llama_url}/v1/chat/completions", json=body).json()["usage"]
    assert first["completion_tokens"] == 8
    assert again["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"] - 1


def test_lists_its_alias_and_its_metrics(llama_url: str) -> None:
    assert [model["id"] for model in httpx.get(f"{llama_url}/v1/models").json()["data"]] == ["tiny"]
    assert "llamacpp:prompt_tokens_total" in httpx.get(f"{llama_url}/metrics").text


def test_a_chat_template_and_stops_of_ours_are_the_servers(tmp_path: Path) -> None:
    write_random_model(tmp_path / "m.gguf")
    messages = [{"role": "user", "content": " Who? "}]
    template = "{{ bos_token }}{% for m in messages %}Question: {{ m['content'] | trim }}\n{% endfor %}Answer:"
    with LlamaEngine(tmp_path / "m.gguf", LlamaOptions(chat_template=template)) as engine:
        prompt = httpx.post(f"{engine.url}/apply-template", json={"messages": messages}).json()["prompt"]
        asked = {"messages": messages, "max_tokens": 32, "temperature": 0}
        whole = httpx.post(f"{engine.url}/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert prompt.removeprefix("<|bos|>") == "Question: Who?\nAnswer:"
    stop = whole[len(whole) // 2 :][:3]
    with LlamaEngine(tmp_path / "m.gguf", LlamaOptions(chat_template=template, stops=("<none>", stop))) as engine:
        choice = httpx.post(f"{engine.url}/v1/chat/completions", json=asked).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == whole.partition(stop)[0]


def test_the_random_model_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    write_random_model(tmp_path / "one.gguf")
    write_random_model(tmp_path / "two.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert (tmp_path / "one.gguf").stat().st_size < 2_000_000


def test_a_stopped_engine_is_gone_and_can_start_again() -> None:
    with services.llama() as engine:
        pid = engine.pid
        assert pid is not None
        engine.stop()
        assert not psutil.pid_exists(pid)
        assert engine.poll() == -1
        engine.start()
        assert httpx.get(f"{engine.url}/health").status_code == 200


def test_a_killed_engine_is_noticed() -> None:
    with services.llama() as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        until_s = time.monotonic() + 5
        while engine.poll() is None:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert engine.poll() == -signal.SIGKILL


def test_the_engine_ends_when_the_process_that_started_it_was_killed(tmp_path: Path) -> None:
    write_random_model(tmp_path / "m.gguf")
    script = """
        import os, signal, sys
        from pathlib import Path
        from controlplane.adapters.llama_engine import LlamaEngine
        engine = LlamaEngine(Path(sys.argv[1]))
        engine.start()
        print(engine.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "m.gguf")]
    pid = int(subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout)
    until_s = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until_s, "the engine outlived its parent"
        time.sleep(0.05)


def test_a_missing_model_and_a_file_that_is_none_are_one_sentence_each(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a GGUF model"):
        LlamaEngine(tmp_path / "none.gguf").start()
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"not a model")
    engine = LlamaEngine(wrong, log=tmp_path / "log")
    with pytest.raises(ConfigError, match=r"The llama\.cpp server for .* ended"):
        engine.start()
    assert engine.pid is None
