"""Requests to block keys, model by model: templates and tokenizers kept, long work put into a thread, failures counted.

Owns: the limits (how much text, how long a template, how much on the event loop), the threads, and the count of every
request that got no keys, by its shape and reason. Does not own: any of the steps (`prompt_forms`, `prompt_text`,
`prompt_chains`), reading the folders (`tokenizer_folder`), or asking an engine (`engine_tokenize`).

Measured on one core: see `tests/bench/bench_prompt_tokens.py` for what a first prompt and a returning step cost.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from router.adapters.tokenizer_folder import ModelPrompts
from router.prompt_chains import ChainScope, PromptChains, PromptKeys, Work
from router.prompt_forms import (
    PROMPT_FIELDS,
    Fields,
    PlainPrompt,
    PromptShape,
    ToolRules,
    Unhashed,
    read_request,
)
from router.prompt_text import PromptText, RenderLimits

# One mebibyte, by definition.
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What prompts may cost."""

    store_bytes: int = 512 * _MIB
    """Keys and offsets between requests: about 100 kB for a session of 119,000 tokens in blocks of 16."""
    max_text_bytes: int = 2 * _MIB
    """Beyond it a prompt has no keys: half a million tokens, some seconds of a core, and 200 bytes of memory a byte."""
    max_messages_count: int = 2_000
    """Messages and tools beyond it are not rendered: each costs ten microseconds on the event loop."""
    max_render_s: float = 0.1
    """On the event loop; 119,000 tokens take 2 ms."""
    gate_wait_s: float = 0.05
    """How long a prompt with much that is new waits for a thread: who has waited is routed without its keys."""
    now_bytes: int = 8 * 1024
    """Tokenised on the event loop at most: 4 to 5 ms at 550 ns a byte. A returning step adds 4 kB."""
    now_id_bytes: int = 512 * 1024
    """Of token ids, hashed on the event loop at most: 3 ms for 131,000 ids."""
    thread_count: int = 2


# Members of a request that hold what is rendered one by one.
_LISTS: Final = ("messages", "input", "tools")


def _count(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


class Prompt(NamedTuple):
    """One request. `model` names the tokenizer (the base model's, for an adapter); `scope` the engine's blocks."""

    model: str
    shape: PromptShape
    fields: Fields
    scope: ChainScope
    rules: ToolRules = ToolRules()


class PromptTokens:
    """Turns requests into keys. One per event loop.

    Mutable: the models, the remembered prompts and the counts.
    """

    def __init__(self, secret: bytes, monotonic_s: Callable[[], float], limits: PromptLimits | None = None) -> None:
        self._limits = limits or PromptLimits()
        self._monotonic_s = monotonic_s
        self._models: Mapping[str, ModelPrompts] = {}
        self.chains = PromptChains(secret, self._limits.store_bytes)
        self._gate = asyncio.Semaphore(self._limits.thread_count)
        self._threads = ThreadPoolExecutor(self._limits.thread_count, thread_name_prefix="prompt-tokens")
        self.counts: Counter[tuple[PromptShape, Unhashed | None]] = Counter()
        """Requests by shape and why they have no keys, or only some; None: all of them."""

    def set_models(self, models: Mapping[str, ModelPrompts]) -> None:
        """The models whose folders are known now. What is remembered of another tokenizer's prompts finds nothing."""
        self._models = dict(models)

    def knows(self, model: str) -> bool:
        """Whether the model's tokenizer is here; if not, an engine may be asked (`engine_tokenize`)."""
        return model in self._models

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def keys_now(self, prompt: Prompt) -> PromptKeys | Unhashed | None:
        """The keys, if little is new in the prompt; None: it is more than should be done on the event loop."""
        work = self._begin(prompt)
        if isinstance(work, Work):
            return self._run(prompt, work) if self._is_quick(work) else None
        return self._counted(prompt, work)

    async def keys(self, prompt: Prompt) -> PromptKeys | Unhashed:
        """The keys; a prompt with much that is new waits for a thread."""
        work = self._begin(prompt)
        if isinstance(work, Unhashed):
            return self._counted(prompt, work)
        if self._is_quick(work):
            return self._run(prompt, work)
        must_wait = self._gate.locked()
        try:
            async with asyncio.timeout(self._limits.gate_wait_s):
                await self._gate.acquire()
        except TimeoutError:
            return self._counted(prompt, Unhashed.BUSY)
        try:
            again = self._begin(prompt) if must_wait else work  # another one may have done most of it since
            if isinstance(again, Unhashed) or self._is_quick(again):
                self._gate.release()
                return self._counted(prompt, again) if isinstance(again, Unhashed) else self._run(prompt, again)
            running = asyncio.get_running_loop().run_in_executor(self._threads, again.run)
        except BaseException:
            self._gate.release()
            raise

        def ended(done: asyncio.Future[PromptKeys]) -> None:
            # Also when nobody waits any more: the thread was taken all the same, and the next step can go on from it.
            self._gate.release()
            if not done.cancelled() and done.exception() is None:
                self._kept(prompt, again, done.result())

        running.add_done_callback(ended)
        try:
            return await asyncio.shield(running)
        except Exception:  # the library raises plain Exception
            return self._counted(prompt, Unhashed.TOKENIZER_FAILED)

    def keys_of_ids(self, prompt: Prompt, ids: Sequence[int] | Unhashed) -> PromptKeys | Unhashed:
        """The keys of token ids that an engine gave for a prompt, or why it gave none."""
        work = ids if isinstance(ids, Unhashed) else self.chains.begin_ids(prompt.scope, ids)
        return self._counted(prompt, work) if isinstance(work, Unhashed) else self._run(prompt, work)

    def _is_quick(self, work: Work) -> bool:
        return work.new_bytes <= (self._limits.now_bytes if work.tokenises else self._limits.now_id_bytes)

    def _begin(self, prompt: Prompt) -> Work | Unhashed:
        if any(_count(prompt.fields.get(name)) > self._limits.max_messages_count for name in _LISTS):
            return Unhashed.TOO_LONG
        model = self._models.get(prompt.model)
        system_first = None if model is None else model.system_first
        request = read_request(prompt.shape, prompt.fields, prompt.rules, system_first)
        if isinstance(request, Unhashed):
            return request
        if isinstance(request, PlainPrompt) and request.token_ids is not None:
            if len(request.token_ids) > self._limits.max_text_bytes // 4:
                return Unhashed.TOO_LONG
            return self.chains.begin_ids(prompt.scope, request.token_ids)
        if model is None:
            return Unhashed.NO_TOKENIZER
        if isinstance(request, PlainPrompt):
            text = PromptText(request.text or "", True)
        else:
            template = model.tool_template if request.tools else model.template
            if template is None:
                return Unhashed.NO_TEMPLATE
            rendered = template.render(request, self._render_limits())
            if isinstance(rendered, Unhashed):
                return rendered
            text = rendered
        if len(text.text) > self._limits.max_text_bytes:
            return Unhashed.TOO_LONG
        special = request.add_special_tokens
        if special and not model.tokenizer.special_tokens_sure:
            return Unhashed.SPECIAL_TOKENS
        return self.chains.begin(model.tokenizer, prompt.scope, text.text, special=special, whole=text.whole)

    def _render_limits(self) -> RenderLimits:
        until_s = self._monotonic_s() + self._limits.max_render_s
        return RenderLimits(self._limits.max_text_bytes, lambda: self._monotonic_s() > until_s)

    def _run(self, prompt: Prompt, work: Work) -> PromptKeys | Unhashed:
        try:
            found = work.run()
        except Exception:  # the library raises plain Exception
            return self._counted(prompt, Unhashed.TOKENIZER_FAILED)
        return self._kept(prompt, work, found)

    def _kept(self, prompt: Prompt, work: Work, found: PromptKeys) -> PromptKeys:
        self.chains.keep(work)
        self.counts[prompt.shape, found.reason] += 1
        return found

    def _counted(self, prompt: Prompt, reason: Unhashed) -> Unhashed:
        self.counts[prompt.shape, reason] += 1
        return reason


def body_fields(body: bytes) -> dict[str, Any]:
    """The members of a request's body as the engines' servers read them (the standard library's parser: another one
    might read a number of a tool's schema in another way). Raises ValueError for what is no JSON object.
    """
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("The request body must be a JSON object.")  # noqa: TRY004  # as for any other bad JSON
    return found


def member_fields(body: bytes, members: Iterable[tuple[str, int, int, int, Any]]) -> dict[str, Any]:
    """The fields that change a prompt, out of members that were found already: (name, start of the name, start and end
    of the value in `body`, value). Values were read as Latin-1 there, which is right for ASCII; others are read again.
    """
    plain = body.isascii()
    return {
        name: value if plain or not isinstance(value, str | list | dict) else json.loads(body[start:end])
        for name, _, start, end, value in members
        if name in PROMPT_FIELDS
    }
