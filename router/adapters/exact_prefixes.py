"""Where each engine says that a prompt's KV is: tokenizers, the exact index and its events behind two calls.

Owns: which models are known exactly and by what (a tokenizer's folder, or the engines' own `/tokenize`), the deadline
of working a prompt out, and whose word counts: an engine's only while its events are heard whole. Does not own: any of
the parts (`prompt_tokens`, `kv_index`, `kv_subscriber`), what the router makes of it (`router.held`), or the
approximate history that serves everybody else.

A request is read once, before its first pick (`read`: milliseconds for a returning session, a thread for much that is
new). The index is asked at each pick (`told`), because it moves meanwhile. Whatever cannot be done is a counted reason,
and the request is routed by the history.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from router.adapters.discovery import EngineProbe
from router.adapters.engine_tokenize import engine_tokens
from router.adapters.kv_subscriber import EngineReading, KvSubscriber
from router.adapters.prompt_tokens import Prompt, PromptTokens, body_fields
from router.adapters.tokenizer_folder import ModelPrompts, load_folder
from router.decision import Told
from router.endpoints import Endpoint
from router.errors import EndpointsError
from router.kv_index import IndexCounters, KvIndex, RankId, Served
from router.kv_keys import ChainIdentity, root_key
from router.prompt_chains import ChainScope, PromptKeys
from router.prompt_forms import PromptShape, Unhashed

# A prompt that is not worked out within this time is routed by the history: it is what a miss of a short prompt costs,
# and twice what a first prompt of 119,000 tokens takes in a thread.
READ_DEADLINE_S = 0.5

# A larger request is not worked out: half a million tokens of text. To parse it takes 20 ms of the event loop.
_BODY_MAX_BYTES = 2 * 1024 * 1024

# Tokens that a template may add beyond the bytes of a request.
_SPECIAL_MAX_COUNT = 4_096

# How long an engine is left alone whose `/tokenize` did not answer: its other work goes on.
_ASIDE_S = 30.0

# Engines whose `/tokenize` is asked, over plain HTTP and without a key.
_TOKENIZING_KINDS = frozenset({"vllm", "sim"})

# Of that, how long an engine may take to tokenise: what is left makes keys of its answer.
_ASK_DEADLINE_S = 0.4

# What `read` counts beside the reasons of `Unhashed`.
_TOO_SLOW = "too_slow"
_NO_BLOCKS = "no_engine_heard"
_READ = "read"


class Blocks(NamedTuple):
    """A prompt's block keys for the engines with blocks of this size that are sent the salt, or not."""

    block_tokens: int
    salted: bool
    keys: array[int]
    total_tokens: int


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as its model's engines name its blocks: keyed hashes, no text and no token ids."""

    model: str
    blocks: tuple[Blocks, ...]


class ExactPrefixes:
    """Exact knowledge of the models in `sources`: a folder with their tokenizer, or None to ask an engine.

    Mutable: the index, the sockets, and what is remembered of prompts. One per running event loop.
    """

    def __init__(
        self,
        secret: bytes,
        sources: Mapping[str, Path | None],
        probe: EngineProbe,
        *,
        salted_kinds: frozenset[str],
        monotonic_s: Callable[[], float],
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._secret = secret
        self._sources = dict(sources)
        self._salted_kinds = salted_kinds
        self._monotonic_s = monotonic_s
        self._turn = 0
        self._aside_s: dict[str, float] = {}
        """Until when an engine whose `/tokenize` failed is not asked."""
        self._report = report
        self._index = KvIndex(secret)
        self._subscriber = KvSubscriber(self._index, self._served, probe.get, report=report)
        self._tokens = PromptTokens(secret, monotonic_s)
        self._client = httpx.AsyncClient(trust_env=False)
        self._endpoints: dict[str, Endpoint] = {}
        self._roots: dict[tuple[str, int], int] = {}
        self._loading: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        """Requests whose blocks are known (`read`), others by why not: `Unhashed`, `too_slow`, `no_engine_heard`."""

    def start(self) -> None:
        """Hear events from now on; the tokenizers are read in the background."""
        self._subscriber.start()
        self._loading = asyncio.create_task(self._load(), name="tokenizers")

    async def stop(self) -> None:
        """Close everything. May be called twice."""
        if self._loading is not None:
            self._loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading
        await self._subscriber.stop()
        self._tokens.close()
        await self._client.aclose()

    def hear(self, endpoints: Iterable[Endpoint]) -> None:
        """These are the endpoints from now on; those that serve one of the models are heard."""
        self._endpoints = {each.endpoint_id: each for each in endpoints}
        self._subscriber.hear(self._endpoints.values())

    def _served(self, endpoint: Endpoint) -> Served | None:
        """What its blocks are of. An endpoint of several models (adapters) is left to the history."""
        if len(endpoint.models) != 1:
            return None
        model = next(iter(endpoint.models))
        return Served(model) if model in self._sources else None

    async def _load(self) -> None:
        found: dict[str, ModelPrompts] = {}
        for model, folder in self._sources.items():
            if folder is None:
                continue
            try:
                found[model] = await asyncio.to_thread(load_folder, folder)
            except EndpointsError as error:
                self._report(f"The tokenizer of {model} cannot be used: {error}")
            self._tokens.set_models(found)

    def knows(self, model: str) -> bool:
        """Whether `read` may find anything."""
        return model in self._sources

    async def read(self, model: str, shape: PromptShape, body: bytes, salt: str) -> ReadPrompt | None:
        """The prompt's blocks as the heard engines of this model name them; None: not known, and counted why."""
        scopes = self._scopes(model)
        if not scopes:
            self.counts[_NO_BLOCKS] += 1
            return None
        if len(body) > _BODY_MAX_BYTES:
            self.counts[Unhashed.TOO_LONG] += 1
            return None
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                blocks = await self._blocks(model, shape, body, salt, scopes)
        except TimeoutError:
            self.counts[_TOO_SLOW] += 1
            return None
        except ValueError:
            self.counts[Unhashed.MALFORMED] += 1
            return None
        if blocks:
            self.counts[_READ] += 1
        return ReadPrompt(model, tuple(blocks)) if blocks else None

    async def _blocks(
        self, model: str, shape: PromptShape, body: bytes, salt: str, scopes: set[tuple[int, bool]]
    ) -> list[Blocks]:
        fields, body_bytes = body_fields(body), len(body)
        ids: list[int] | Unhashed | None = None
        if not self._tokens.knows(model):
            ids = await self._ask(model, shape, fields)
            if not isinstance(ids, Unhashed) and len(ids) > body_bytes + _SPECIAL_MAX_COUNT:
                ids = Unhashed.ENGINE_REFUSED  # more tokens than bytes: it answers for another prompt
        found = []
        for block_tokens, salted in sorted(scopes):
            scope = ChainScope(self._root(model, block_tokens), block_tokens, salt if salted else None)
            prompt = Prompt(model, shape, fields, scope)
            keys = await self._tokens.keys(prompt) if ids is None else self._tokens.keys_of_ids(prompt, ids)
            if isinstance(keys, Unhashed):
                self.counts[keys] += 1
            elif keys.total_tokens:
                found.append(Blocks(block_tokens, salted, keys.keys, keys.total_tokens))
            else:
                self._count_part(keys)
        return found

    def _count_part(self, keys: PromptKeys) -> None:
        """Known to a place only, such as the first image: how long the prompt is, and so what share, is not known."""
        self.counts[keys.reason or Unhashed.MALFORMED] += 1

    async def _ask(self, model: str, shape: PromptShape, fields: dict[str, object]) -> list[int] | Unhashed:
        """Token ids from one of the model's engines that are heard, in turn; one that failed is left alone a while."""
        now_s = self._monotonic_s()
        able = [
            endpoint
            for _, endpoint in self._heard(model)
            if endpoint.kind in _TOKENIZING_KINDS
            and endpoint.api_key_env is None
            and not endpoint.drain
            and endpoint.url.startswith("http:")
            and self._aside_s.get(endpoint.endpoint_id, now_s) <= now_s
        ]
        if not able:
            return Unhashed.NO_TOKENIZER
        self._turn += 1
        endpoint = able[self._turn % len(able)]
        url = endpoint.url.removesuffix("/").removesuffix("/v1")
        ids = await engine_tokens(self._client, url, model, shape, fields, deadline_s=_ASK_DEADLINE_S)
        if isinstance(ids, Unhashed) and ids in (Unhashed.ENGINE_TIMEOUT, Unhashed.ENGINE_UNREACHABLE):
            self._aside_s[endpoint.endpoint_id] = now_s + _ASIDE_S
        return ids

    def _root(self, model: str, block_tokens: int) -> int:
        known = self._roots.get((model, block_tokens))
        if known is None:
            known = self._roots[model, block_tokens] = root_key(self._secret, ChainIdentity(model, block_tokens))
        return known

    def _scopes(self, model: str) -> set[tuple[int, bool]]:
        """Block sizes and salting of the model's engines that are heard."""
        found = set()
        for rank, endpoint in self._heard(model):
            block_tokens = self._index.block_tokens(rank)
            if block_tokens is not None:
                found.add((block_tokens, endpoint.kind in self._salted_kinds))
        return found

    def _heard(self, model: str) -> list[tuple[RankId, Endpoint]]:
        """The ranks of the model's engines whose word counts now."""
        found = []
        for rank in self._index.ranks():
            endpoint = self._endpoints.get(rank.engine_id)
            if endpoint is not None and model in endpoint.models and self._subscriber.trouble(rank) is None:
                found.append((rank, endpoint))
        return found

    def told(self, prompt: ReadPrompt) -> Told:
        """What each engine holds of the prompt now (the most of its ranks); only those whose events are heard whole."""
        heard = dict(self._heard(prompt.model))
        told = {endpoint.endpoint_id: 0.0 for endpoint in heard.values()}
        for blocks in prompt.blocks:
            for held in self._index.lookup(blocks.keys):
                endpoint = heard.get(held.rank)
                if endpoint is None or (endpoint.kind in self._salted_kinds) != blocks.salted:
                    continue
                ratio = held.blocks * blocks.block_tokens / blocks.total_tokens
                told[endpoint.endpoint_id] = max(told[endpoint.endpoint_id], ratio)
        return Told(prompt.blocks[0].total_tokens, told)

    def state_of(self, endpoint_id: str) -> str | None:
        """`heard`, or why the events of this endpoint's engine are not believed now; None: nobody listens to it."""
        reading = next((each for each in self._subscriber.reading() if each.endpoint_id == endpoint_id), None)
        if reading is None:
            return None
        troubles = [each.stream.trouble.value for each in reading.ranks if each.stream.trouble is not None]
        if reading.fault is not None:
            return reading.fault
        return troubles[0] if troubles else "heard" if reading.ranks else "asked where it publishes"

    def reading(self) -> tuple[EngineReading, ...]:
        """How the engines are heard."""
        return self._subscriber.reading()

    def totals(self) -> IndexCounters:
        """The size of the index."""
        return self._index.totals()
