"""A real inference engine on the CPU: llama.cpp's own OpenAI-compatible server, as a child process.

Owns: the child (`python -m controlplane.adapters.llama_engine --model FILE`), its readiness and its end, and the tiny
random model that makes it usable offline. Does not own: how the gateway talks to it (it is an engine like any other,
kind `llamacpp`). Why: tests and the demo need one engine whose bytes, prefix cache and cancellation nobody simulated.

The packages come with the extra `llama` (xllamacpp, gguf); a missing one is told in one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.errors import ConfigError

# Shape of the random model: the least that llama.cpp's llama architecture accepts with two layers and grouped heads.
# 1.5 MB in F32, so that it is written in milliseconds and loaded in a quarter of a second.
_LAYER_COUNT = 2
_EMBEDDING_SIZE = 128
_FEED_FORWARD_SIZE = 256
_HEAD_COUNT = 4
_KV_HEAD_COUNT = 2
_TRAINED_CONTEXT_TOKENS = 32_768
# The usual epsilon and rotary base of Llama models; a random model has no better ones.
_RMS_EPSILON = 1e-5
_ROPE_BASE = 10_000.0
# Any fixed seed: the same file, and so the same answers at temperature 0, on every machine.
_WEIGHT_SEED = 20_261_129
# Words that get a token each, so that English takes about three bytes a token rather than one.
_WORDS = (
    "the and to of in is that for it with as was on be by at an or are this from have not you which one all we can "
    "has there been if more when will would who so no say out up what about into than them only time some could "
    "user assistant system you are a helpful assistant inference cluster cache token model prompt answer request"
).split()
# How long the child may go on after the process that started it is gone.
_ORPHAN_CHECK_S = 0.5
# Between two looks at a starting child; it is ready after 0.3 to 0.7 s (reference components 1).
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """How the server runs. `context_tokens` is shared by `slot_count` requests that run at once."""

    alias: str = "tiny"
    context_tokens: int = 8_192
    slot_count: int = 4
    thread_count: int = 1
    cache_ram_mib: int = 64
    """Host memory for prompts that left their slot."""
    port: int = 0
    """0: the kernel chooses a free one."""
    chat_template: str = ""
    """Jinja text that makes a prompt of messages; empty: the model's own, else llama.cpp's (ChatML)."""
    stops: tuple[str, ...] = ()
    """Where an answer ends when the request names no `stop`."""


class LlamaEngine:
    """One llama.cpp server on loopback: `start()`, `url`, `stop()`. It also ends when this process does."""

    def __init__(self, model: Path, options: LlamaOptions | None = None, *, log: Path | None = None) -> None:
        self._model = model
        self._options = options or LlamaOptions()
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """`http://127.0.0.1:<port>` once started."""
        if not self._url:
            raise RuntimeError("LlamaEngine.url was read before start().")
        return self._url

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before `start()` and after `stop()`."""
        return None if self._child is None else self._child.pid

    def start(self, deadline_s: float = 30.0) -> None:
        """Start the server and wait until it answers `/health`. Raises ConfigError with one sentence."""
        _require("xllamacpp")
        if not self._model.is_file():
            raise ConfigError(f"model: {self._model} is not a file; expected a GGUF model.")
        until_s = time.monotonic() + deadline_s
        command = [*llama_command(self._model, self._options), "--parent", str(os.getpid())]
        with contextlib.ExitStack() as files:
            log = subprocess.DEVNULL if self._log is None else files.enter_context(self._log.open("ab"))
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            self._url = self._await_address(self._child, until_s)
            _await_health(self._url, self._child, until_s)
        except ConfigError:
            self.stop()
            raise

    def poll(self) -> int | None:
        """None while the server runs, else its exit status; -1 when it was never started."""
        return -1 if self._child is None else self._child.poll()

    def stop(self, deadline_s: float = 5.0) -> None:
        """End the server; safe to call twice."""
        if self._child is None:
            return
        child, self._child, self._url = self._child, None, ""
        with child:  # closes its pipe and reaps it
            child.terminate()
            try:
                child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                child.kill()

    def __enter__(self) -> LlamaEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await_address(self, child: subprocess.Popen[bytes], until_s: float) -> str:
        """The child says where it listens in one JSON line."""
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, until_s - time.monotonic()))
        line = child.stdout.readline() if ready else b""
        if not line:
            why = "did not answer in time" if not ready else f"ended with status {child.wait()}"
            hint = "" if self._log is None else f"; its log is {self._log}"
            raise ConfigError(f"The llama.cpp server for {self._model} {why}{hint}.")
        return str(json.loads(line)["url"])


def llama_command(model: Path, options: LlamaOptions) -> list[str]:
    """What starts the server as a process of its own."""
    return [
        *(sys.executable, "-m", __name__, "--model", str(model), "--alias", options.alias, "--port", str(options.port)),
        *("--context-tokens", str(options.context_tokens), "--slots", str(options.slot_count)),
        *("--threads", str(options.thread_count), "--cache-ram-mib", str(options.cache_ram_mib)),
        *("--chat-template", options.chat_template),
        *(word for stop in options.stops for word in ("--stop", stop)),
    ]


def write_random_model(path: Path) -> None:
    """Write a random two-layer llama model of 1.5 MB; the same bytes every time. Raises ConfigError without `gguf`."""
    _require("gguf")
    import gguf

    tokens, merges, types = _vocabulary()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("inferplane-random")
    writer.add_context_length(_TRAINED_CONTEXT_TOKENS)
    writer.add_embedding_length(_EMBEDDING_SIZE)
    writer.add_block_count(_LAYER_COUNT)
    writer.add_feed_forward_length(_FEED_FORWARD_SIZE)
    writer.add_head_count(_HEAD_COUNT)
    writer.add_head_count_kv(_KV_HEAD_COUNT)
    writer.add_rope_dimension_count(_EMBEDDING_SIZE // _HEAD_COUNT)
    writer.add_rope_freq_base(_ROPE_BASE)
    writer.add_layer_norm_rms_eps(_RMS_EPSILON)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_eos_token_id(tokens.index("<|eos|>"))
    writer.add_chat_template(
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    for name, weights in _random_weights(len(tokens)):
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and types of a byte-level BPE: 256 bytes, prefixes of `_WORDS` after a space, special tokens."""
    import gguf

    tokens = [_byte_letter(byte) for byte in range(256)]
    merges: list[str] = []
    for word in _WORDS:
        left = _byte_letter(0x20)
        for letter in word:
            if left + letter not in tokens:
                merges.append(f"{left} {letter}")
                tokens.append(left + letter)
            left += letter
    normal_count = len(tokens)
    tokens += ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    types = [int(gguf.TokenType.NORMAL)] * normal_count
    types += [int(gguf.TokenType.CONTROL)] * (len(tokens) - normal_count)
    return tokens, merges, types


def _byte_letter(byte: int) -> str:
    """The letter that byte-level BPE writes for a byte (GPT-2's table: printable Latin-1 stays, others shift)."""
    stays = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in stays:
        return chr(byte)
    return chr(0x100 + sum(1 for other in range(byte) if other not in stays))


def _random_weights(token_count: int) -> Iterator[tuple[str, Any]]:
    """Name and float32 array of every tensor of the model; norms are ones, the rest is normal with 1/sqrt(inputs)."""
    import numpy as np

    dice = np.random.default_rng(_WEIGHT_SEED)

    def weights(output_size: int, input_size: int) -> Any:
        return (dice.standard_normal((output_size, input_size)) / input_size**0.5).astype(np.float32)

    kv_size = _EMBEDDING_SIZE // _HEAD_COUNT * _KV_HEAD_COUNT
    ones = np.ones(_EMBEDDING_SIZE, dtype=np.float32)
    yield "token_embd.weight", weights(token_count, _EMBEDDING_SIZE)
    for layer in range(_LAYER_COUNT):
        yield f"blk.{layer}.attn_norm.weight", ones
        yield f"blk.{layer}.attn_q.weight", weights(_EMBEDDING_SIZE, _EMBEDDING_SIZE)
        yield f"blk.{layer}.attn_k.weight", weights(kv_size, _EMBEDDING_SIZE)
        yield f"blk.{layer}.attn_v.weight", weights(kv_size, _EMBEDDING_SIZE)
        yield f"blk.{layer}.attn_output.weight", weights(_EMBEDDING_SIZE, _EMBEDDING_SIZE)
        yield f"blk.{layer}.ffn_norm.weight", ones
        yield f"blk.{layer}.ffn_gate.weight", weights(_FEED_FORWARD_SIZE, _EMBEDDING_SIZE)
        yield f"blk.{layer}.ffn_up.weight", weights(_FEED_FORWARD_SIZE, _EMBEDDING_SIZE)
        yield f"blk.{layer}.ffn_down.weight", weights(_EMBEDDING_SIZE, _FEED_FORWARD_SIZE)
    yield "output_norm.weight", ones
    yield "output.weight", weights(token_count, _EMBEDDING_SIZE)


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"The package {package} is missing; install it with: pip install 'inferplane[llama]'.")


def _await_health(url: str, child: subprocess.Popen[bytes], until_s: float) -> None:
    import httpx

    with httpx.Client(base_url=url, timeout=1.0, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == 200:
                    return
            if child.poll() is not None:
                raise ConfigError(f"The llama.cpp server ended with status {child.poll()} before it was healthy.")
            if time.monotonic() > until_s:
                raise ConfigError(f"The llama.cpp server at {url} was not healthy in time.")
            time.sleep(_POLL_S)


def _serve(arguments: argparse.Namespace) -> None:
    """Run the server in this process until SIGTERM, SIGINT or the death of the parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.model_alias = {arguments.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = arguments.port
    params.n_ctx = arguments.context_tokens
    params.n_parallel = arguments.slots
    params.cpuparams.n_threads = arguments.threads
    params.cpuparams_batch.n_threads = arguments.threads
    params.cache_ram_mib = arguments.cache_ram_mib
    if arguments.chat_template:
        params.chat_template = arguments.chat_template
    if arguments.stop:
        params.antiprompt = arguments.stop
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.endpoint_props = True
    params.ui = False
    params.warmup = False
    server = xllamacpp.Server(params)
    print(json.dumps({"url": server.listening_address}), flush=True)
    wanted = {signal.SIGTERM, signal.SIGINT}
    while True:
        info = signal.sigtimedwait(wanted, _ORPHAN_CHECK_S)
        if info is not None and info.si_signo in wanted:  # after a SIGSTOP it may tell of a signal that never was
            break
        if arguments.parent and os.getppid() != arguments.parent:
            break
    # Without the interpreter's own shutdown: the server's threads would hold it up for as long as requests run.
    os._exit(0)


def _main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m controlplane.adapters.llama_engine", description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--alias", default=LlamaOptions().alias, help="name of the model in /v1/models")
    parser.add_argument("--port", type=int, default=8081, help="0: a free one")
    parser.add_argument("--context-tokens", type=int, default=LlamaOptions().context_tokens)
    parser.add_argument("--slots", type=int, default=LlamaOptions().slot_count, help="requests that run at once")
    parser.add_argument("--threads", type=int, default=LlamaOptions().thread_count)
    parser.add_argument("--cache-ram-mib", type=int, default=LlamaOptions().cache_ram_mib)
    parser.add_argument("--chat-template", default="", help="Jinja text; empty: the model's own")
    parser.add_argument("--stop", action="append", help="an answer ends before this text; repeat for more")
    parser.add_argument("--parent", type=int, default=0, help="end when this process is no longer the parent")
    try:
        _require("xllamacpp")
        _serve(parser.parse_args(argv))
    except ConfigError as fault:
        raise SystemExit(str(fault)) from fault


if __name__ == "__main__":
    _main(sys.argv[1:])
