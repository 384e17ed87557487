"""Token ids from the engine's own `/tokenize`, for models whose tokenizer is not at hand.

Owns: the request to that endpoint (vLLM's; llama.cpp's takes other members) and what may be taken for an answer. Does
not own: which engine is asked, the keys (`prompt_chains.PromptChains.begin_ids` makes them), or any template.

The engine renders and tokenises as for the request itself, so its ids are right where ours might not be; but every step
sends the whole prompt twice and reads all its ids (0.6 MB of JSON at 119,000), so this is the second choice. Members
that `/tokenize` does not know but that change a prompt are an `Unhashed`: it would answer for another prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx
import orjson

from router.prompt_forms import (
    ChatRequest,
    Fields,
    PlainPrompt,
    PromptShape,
    ToolRules,
    Unhashed,
    read_request,
)
from router.prompt_messages import conversation

# Members of a chat that vLLM's TokenizeChatRequest takes (its OpenAPI of 0.32.0). The others of PROMPT_FIELDS that
# reach a template are refused.
_CHAT_MEMBERS: Final = frozenset({"add_generation_prompt"})
# Answers are read up to here: the ids of 4 million tokens.
_MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024


async def engine_tokens(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    shape: PromptShape,
    fields: Fields,
    *,
    deadline_s: float,
    rules: ToolRules | None = None,
) -> list[int] | Unhashed:
    """A request's token ids as the engine at `url` (its root, without `/v1`) computes them. Never raises for an engine
    that is gone, slow or wrong; `deadline_s` is for the whole exchange.
    """
    rules = rules or ToolRules()
    request = read_request(shape, fields, rules)
    if isinstance(request, Unhashed):
        return request
    if isinstance(request, PlainPrompt) and request.token_ids is not None:
        return list(request.token_ids)
    own = fields.get("chat_template_kwargs") or {}
    body = _body(model, request, own, {**rules.default_template_kwargs, **own})
    if isinstance(body, Unhashed):
        return body
    try:
        content = orjson.dumps(body)
    except orjson.JSONEncodeError:
        return Unhashed.MALFORMED
    try:
        async with asyncio.timeout(deadline_s):  # the client's own limits are for each read
            return await _ask(client, url.rstrip("/") + "/tokenize", content)
    except (httpx.TimeoutException, TimeoutError):
        return Unhashed.ENGINE_TIMEOUT
    except (httpx.HTTPError, httpx.InvalidURL):
        return Unhashed.ENGINE_UNREACHABLE


def _body(
    model: str, request: ChatRequest | PlainPrompt, own: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any] | Unhashed:
    """`own`: the request's template variables; `known`: these and the engine's, which need not be told."""
    body: dict[str, Any] = {"model": model, "add_special_tokens": request.add_special_tokens}
    if isinstance(request, PlainPrompt):
        return {**body, "prompt": request.text}
    shown = conversation(request, content_is_parts=False)
    if isinstance(shown, Unhashed):
        return shown
    if shown.mark:
        return Unhashed.MEDIA
    told = {name: value for name, value in request.context.items() if name not in known or value != known[name]}
    if told.keys() - _CHAT_MEMBERS:
        return Unhashed.UNSUPPORTED_FIELD
    body |= {"messages": request.messages, **told}
    if own:
        body["chat_template_kwargs"] = own
    if request.tools is not None:
        body["tools"] = request.tools
    return body


async def _ask(client: httpx.AsyncClient, url: str, content: bytes) -> list[int] | Unhashed:
    headers = {"content-type": "application/json"}
    async with client.stream("POST", url, content=content, headers=headers, timeout=None) as answer:
        if answer.status_code != httpx.codes.OK:
            return Unhashed.ENGINE_REFUSED
        data = bytearray()
        async for part in answer.aiter_bytes():
            data += part
            if len(data) > _MAX_ANSWER_BYTES:
                return Unhashed.TOO_LONG
    return _ids(data)


def _ids(data: bytes | bytearray) -> list[int] | Unhashed:
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        return Unhashed.ENGINE_REFUSED
    tokens: Sequence[Any] | None = answer.get("tokens") if isinstance(answer, Mapping) else None
    if not isinstance(tokens, list) or any(type(each) is not int or each < 0 for each in tokens):
        return Unhashed.ENGINE_REFUSED
    return tokens
