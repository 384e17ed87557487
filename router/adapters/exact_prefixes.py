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
from router.kv_stream import StreamTrouble
from router.prompt_chains import ChainScope, PromptKeys
from router.prompt_forms import PromptShape, Unhashed

# A prompt that is not worked out within this time is routed by the history: it is what a miss of a short prompt costs,
# and twice what a first prompt of 119,000 tokens takes in a thread.
READ_DEADLINE_S = 0.5

# Engines whose `/tokenize` is asked.
_TOKENIZING_KINDS = frozenset({"vllm", "sim"})

# What `read` counts beside the reasons of `Unhashed`.
_TOO_SLOW = "too_slow"
_NO_BLOCKS = "no_engine_heard"


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
        self._report = report
        self._index = KvIndex(secret)
        self._subscriber = KvSubscriber(self._index, self._served, probe.get, report=report)
        self._tokens = PromptTokens(secret, monotonic_s)
        self._client = httpx.AsyncClient(trust_env=False)
        self._endpoints: dict[str, Endpoint] = {}
        self._roots: dict[tuple[str, int], int] = {}
        self._loading: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        """Requests by why their blocks are not known: a reason of `Unhashed`, `too_slow`, or `no_engine_heard`."""

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
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                blocks = await self._blocks(model, shape, body_fields(body), salt, scopes)
        except TimeoutError:
            self.counts[_TOO_SLOW] += 1
            return None
        except ValueError:
            self.counts[Unhashed.MALFORMED] += 1
            return None
        return ReadPrompt(model, tuple(blocks)) if blocks else None

    async def _blocks(
        self, model: str, shape: PromptShape, fields: dict[str, object], salt: str, scopes: set[tuple[int, bool]]
    ) -> list[Blocks]:
        ids: list[int] | Unhashed | None = None
        if not self._tokens.knows(model):
            ids = await self._ask(model, shape, fields)
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
        """Token ids from any engine of the model that is heard."""
        for endpoint in self._endpoints.values():
            if model in endpoint.models and endpoint.kind in _TOKENIZING_KINDS and endpoint.api_key_env is None:
                url = endpoint.url.removesuffix("/").removesuffix("/v1")
                return await engine_tokens(self._client, url, model, shape, fields, deadline_s=READ_DEADLINE_S)
        return Unhashed.NO_TOKENIZER

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
        """`heard`, or why the events of this endpoint's engine are not believed now; None: it should not be heard."""
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None or self._served(endpoint) is None:
            return None
        ranks = [rank for rank in self._index.ranks() if rank.engine_id == endpoint_id]
        troubles = [trouble.value for rank in ranks if (trouble := self._subscriber.trouble(rank)) is not None]
        return troubles[0] if troubles else "heard" if ranks else StreamTrouble.UNREACHABLE.value

    def reading(self) -> tuple[EngineReading, ...]:
        """How the engines are heard."""
        return self._subscriber.reading()

    def totals(self) -> IndexCounters:
        """The size of the index."""
        return self._index.totals()
