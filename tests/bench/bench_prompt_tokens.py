"""What it costs to turn a request into block keys: `python -m tests.bench.bench_prompt_tokens`. One JSON object a case.

Owns: an agent's chat of 119,000 tokens of source code, its first prompt and its returning steps (about 875 new tokens
and 214 of an answer), by stage and whole, through `PromptTokens`. Does not own: any limit; a figure belongs to the
machine and Python that it was taken on. The vocabulary is trained here (32,000 tokens on the standard library); larger
ones of real models tokenise at about the same speed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from router.adapters.prompt_tokens import Prompt, PromptTokens, body_fields
from router.adapters.tokenizer_folder import ModelPrompts, load_folder
from router.prompt_chains import ChainScope, PromptKeys
from router.prompt_forms import ChatRequest, PromptShape, ToolRules, read_request
from router.prompt_text import RenderLimits
from router.volatile_prefix import VolatilePrefixes
from tests.fakes.tokenizers_made import CHATML, SPECIALS, write_folder

TOKENS = 119_000
# At 4.5 bytes a token of source code with this vocabulary.
PROMPT_BYTES = 535_000
STEP_BYTES = 3_500
ANSWER_BYTES = 850
STEPS = 40
SCOPE = ChainScope(7, 16, "salt")
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"

Message = dict[str, str]


def sources() -> Iterator[str]:
    """The standard library, file by file, in an order of its own."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(1).shuffle(files)
    for path in files:
        yield path.read_text(encoding="utf-8", errors="ignore")


def model(folder: Path) -> ModelPrompts:
    """A byte-level vocabulary of 32,000 with 256 special tokens, as Llama 3 has."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    specials = [*SPECIALS, *(f"<|reserved_{n}|>" for n in range(253))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, show_progress=False, initial_alphabet=alphabet, special_tokens=specials
    )
    tokenizer.train_from_iterator(sources(), trainer)
    return load_folder(write_folder(folder, tokenizer.to_str(), CHATML))


def timed_ms(action: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start) / 1e6


def show(case: str, samples: list[float], **more: object) -> None:
    """One line of output."""
    ordered = sorted(samples)
    p99_ms = ordered[int(len(ordered) * 0.99)]
    print(json.dumps({"case": case, "p50_ms": round(median(samples), 3), "p99_ms": round(p99_ms, 3), **more}))


def chat(text: str) -> list[Message]:
    """The session so far: 119,000 tokens, tool results and short answers in turn."""
    messages = [{"role": "system", "content": text[:16_000]}]
    at = 16_000
    while at < PROMPT_BYTES:
        messages.append({"role": "tool", "content": text[at : at + STEP_BYTES]})
        messages.append({"role": "assistant", "content": text[at + STEP_BYTES : at + STEP_BYTES + ANSWER_BYTES]})
        at += STEP_BYTES + ANSWER_BYTES
    return messages


def first_prompts(made: ModelPrompts, text: str) -> tuple[PromptTokens, list[Message]]:
    """Five sessions' first prompts; the last one goes on."""
    samples: list[float] = []
    for number in range(5):
        tokens = PromptTokens(b"secret", time.monotonic)
        tokens.set_models({"m": made})
        messages = chat(text[number * 1_000 :])
        prompt = Prompt("m", PromptShape.CHAT, {"messages": messages}, SCOPE)
        samples.append(timed_ms(partial(run, tokens, prompt)))
    found = run(tokens, prompt)
    show("first prompt, in a thread", samples, tokens=found.total_tokens, kept_bytes=tokens.chains.size_bytes)
    return tokens, messages


def run(tokens: PromptTokens, prompt: Prompt) -> PromptKeys:
    """A prompt's keys, in a thread if need be."""
    found = asyncio.run(tokens.keys(prompt))
    assert isinstance(found, PromptKeys)
    return found


def bench_session(folder: Path) -> None:
    """The first prompt of a session and the steps after it, by stage."""
    text = "".join(sources())
    made = model(folder)
    assert made.template is not None
    tokens, messages = first_prompts(made, text)
    volatile, limits = VolatilePrefixes(b"secret"), RenderLimits(10**8, lambda: False)
    stages: dict[str, list[float]] = defaultdict(list)
    for step in range(STEPS):
        at = PROMPT_BYTES + step * 5_000 + 10_000
        messages.append({"role": "assistant", "content": text[at : at + ANSWER_BYTES]})
        messages.append({"role": "tool", "content": text[at + ANSWER_BYTES : at + ANSWER_BYTES + STEP_BYTES]})
        body = json.dumps({"messages": messages}).encode()
        stages["json.loads of the body"].append(timed_ms(partial(body_fields, body)))
        prompt = Prompt("m", PromptShape.CHAT, body_fields(body), SCOPE)
        request = read_request(PromptShape.CHAT, prompt.fields, ToolRules())
        assert isinstance(request, ChatRequest)
        stages["of it: render"].append(timed_ms(partial(made.template.render, request, limits)))
        start = time.perf_counter_ns()
        found = tokens.keys_now(prompt)
        stages["returning step, parsed body to keys"].append((time.perf_counter_ns() - start) / 1e6)
        assert isinstance(found, PromptKeys), "a step is small enough for the event loop"
        stages["volatile prefix"].append(timed_ms(partial(volatile.turn, "o", "m", "c", body)))
    ids = list(range(TOKENS))
    for step in range(STEPS):
        ids += range(step, step + 1_089)
        ids_prompt = Prompt("m", PromptShape.COMPLETION, {"prompt": ids}, SCOPE)
        stages["returning step of token ids"].append(timed_ms(partial(tokens.keys_now, ids_prompt)))
        fresh = ids_prompt._replace(scope=SCOPE._replace(salt=f"fresh {step}"))
        stages["first prompt of token ids"].append(timed_ms(partial(tokens.keys_now, fresh)))
    for case, samples in stages.items():
        show(case, samples[1:])
    print(json.dumps({"case": "kept of both sessions", "bytes": tokens.chains.size_bytes}))


def main() -> None:
    """Run every case."""
    with tempfile.TemporaryDirectory() as folder:
        bench_session(Path(folder))


if __name__ == "__main__":
    main()
