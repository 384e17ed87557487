"""Prefill and decode on two engines: what each of the two gets in its body, and what the first hands to the second.

Owns: for each engine kind the order of its two legs, the members that each leg's body gets, set in place with every
other byte of the tenant's as it was (reference router R28), and the reading of a prefill's answer. Does not own: any
socket (`adapters.engine_pair`), the client's own fields (`adapters.openai_wire`), which engines (`router.pairing`), or
what the tokens cost (`billing`). Pure, and of the control plane, not of the router: it is about bytes on the wire.

What the engines ask for is their own: vLLM 0.32 (its installed source, and
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py), SGLang (sgl-router/src/routers/http/pd_router.rs and
python/sglang/srt/disaggregation/mini_lb.py), TensorRT-LLM (tensorrt_llm/serve/openai_disagg_service.py and
openai_protocol.py). None of them ran here with two engines; TensorRT-LLM's and SGLang's forms follow source alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from billing.json_members import json_members
from billing.token_usage import Usage, parsed_json, token_count, usage_of
from controlplane.request import Operation
from router.endpoints import EngineKind

Body = list[bytes | memoryview]
"""A body as consecutive slices."""


class Handshake(StrEnum):
    """How an engine kind passes a prefill's KV to the engine that decodes. The values go into logs."""

    NIXL = "nixl"
    """vLLM: the prefill is answered, and what it answered tells the decoder where to fetch the blocks."""
    BOOTSTRAP = "bootstrap"
    """SGLang: both get the same request at once and meet in a room of the prefill engine's bootstrap server."""
    CONTEXT_FIRST = "context_first"
    """TensorRT-LLM: as NIXL, with the first token and an opaque state. Unverified: it follows public source alone."""


HANDSHAKES: Final[Mapping[EngineKind, Handshake]] = {
    "vllm": Handshake.NIXL,
    "sglang": Handshake.BOOTSTRAP,
    "trtllm": Handshake.CONTEXT_FIRST,
}
"""The kinds that can be split; any other runs whole."""

# Asks vLLM to keep the prompt's blocks for another engine (toy_proxy_server.py, all six members).
_NIXL_ASK: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
# What a prefill that ends after one token cannot have (the same file; stream_options is refused without a stream).
_NOT_FOR_PREFILL: Final = frozenset({"stream_options", "min_tokens", "min_completion_tokens"})
# Without these a vLLM decoder prefills again and only its own log says so (nixl/pull_scheduler.py).
_NIXL_NEEDS: Final = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
# A context answer that ended otherwise is the whole answer (openai_disagg_service.py, `_need_gen`).
_NEED_GENERATION: Final = frozenset({"length", "not_finished"})
# SGLang's default (`--disaggregation-bootstrap-port`).
DEFAULT_BOOTSTRAP_PORT: Final = 8998
# Ids up to here are TensorRT-LLM's own local ones (2^40 in llmapi/disagg_utils.py, 2^42 in earlier releases).
MIN_CONTEXT_ID: Final = 1 << 42


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the two SGLang engines of a request meet. An engine with data-parallel ranks takes rank room % ranks."""

    host: str
    port: int
    room_id: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """What a prefill has handed over."""

    usage: Usage
    """Of the prefill leg; its cached tokens are the truth about the prompt (`CachedTokens`)."""
    decode_body: Body | None
    """None: the prefill's one token was all there is, and `answer` is the client's."""
    answer: bytes = b""


@dataclass(frozen=True, slots=True)
class NoHandOver:
    """The prefill was answered, but the decoder could not use it; it would have to begin again, unseen."""

    reason: str


# -- bodies ------------------------------------------------------------------------------------------------------------


def with_members(body: bytes, new: Mapping[str, bytes], drop: Collection[str] = ()) -> Body:
    """`body`, a JSON object, with the members `new` (name -> JSON text) set and those of `drop` gone; names are ASCII.

    A member that is there gets its value replaced where it stands, another one is added behind the last. Every other
    byte stays. Raises ValueError for what is no JSON object.
    """
    members, _ = json_members(body.decode("latin-1"))  # offsets in bytes
    kept = len(members)  # from here on only members that are dropped
    while kept and members[kept - 1][0] in drop:
        kept -= 1
    cuts: list[tuple[int, int, bytes]] = []
    for n, (name, start, value, end, _) in enumerate(members):
        if name in drop:
            if n >= kept:
                cuts.append((members[n - 1][3] if n else start, end, b""))
            else:
                cuts.append((start, members[n + 1][1], b""))
        elif name in new:
            cuts.append((value, end, new[name]))
    there = {member[0] for member in members}
    added = [b"%s:%s" % (orjson.dumps(name), value) for name, value in new.items() if name not in there]
    if added:
        end = members[-1][3] if members else body.index(b"{") + 1
        cuts.append((end, end, (b"," if kept else b"") + b",".join(added)))
    return _cut(body, cuts)


def _cut(body: bytes, cuts: Sequence[tuple[int, int, bytes]]) -> Body:
    view, pos = memoryview(body), 0
    parts: Body = []
    for start, end, put in cuts:
        parts += [view[pos:start], put]
        pos = end
    parts.append(view[pos:])
    return [part for part in parts if part]


def prefill_body(handshake: Handshake, operation: Operation, body: bytes, context_id: int) -> Body:
    """The prefill leg's body, where it goes first and alone. `body` is what the decode leg would get if it were the
    only one; `context_id` is TensorRT-LLM's name for the pair.
    """
    if handshake is Handshake.CONTEXT_FIRST:
        params = b'{"request_type":"context_only","disagg_request_id":%d}' % context_id
        return with_members(body, {"stream": b"false", "disaggregated_params": params}, {"stream_options"})
    new = {"stream": b"false", "max_tokens": b"1"}
    if operation is Operation.CHAT:  # of the two, this one counts (vllm chat_completion/protocol.py)
        new["max_completion_tokens"] = b"1"
    return with_members(body, {**new, "kv_transfer_params": _NIXL_ASK}, _NOT_FOR_PREFILL)


def meeting_body(body: bytes, meeting: Meeting) -> Body:
    """The body of both SGLang legs."""
    new = {
        "bootstrap_host": orjson.dumps(meeting.host),
        "bootstrap_port": b"%d" % meeting.port,
        "bootstrap_room": b"%d" % meeting.room_id,
    }
    return with_members(body, new)


# -- what the prefill answered -----------------------------------------------------------------------------------------


def hand_over(
    handshake: Handshake, operation: Operation, body: bytes, answer: bytes, context_id: int
) -> HandOver | NoHandOver:
    """What the prefill's whole answer says, and the decode leg's body with it. Never raises: an answer that does not
    hand over is told as such, because the decoder would then prefill the prompt again without a word.
    """
    parsed = parsed_json(answer)
    if not isinstance(parsed, dict):
        return NoHandOver("it answered the prefill with something that is no JSON object")
    if handshake is Handshake.CONTEXT_FIRST:
        return _generation(operation, body, answer, parsed, context_id)
    params = parsed.get("kv_transfer_params")
    if not isinstance(params, dict):
        return NoHandOver("it answered the prefill without kv_transfer_params; is its KV connector configured?")
    missing = [name for name in _NIXL_NEEDS if params.get(name) is None]
    if params.get("do_remote_prefill") is not True:
        missing.insert(0, "do_remote_prefill")
    if missing:
        return NoHandOver(f"its kv_transfer_params lack {', '.join(missing)}")
    usage = usage_of(answer)
    cached = token_count(params, "remote_prefill_cached_tokens")
    if usage.cached_input_tokens is None and cached is not None and usage.uncached_input_tokens is not None:
        cached = min(cached, usage.uncached_input_tokens)
        usage = usage._replace(cached_input_tokens=cached, uncached_input_tokens=usage.uncached_input_tokens - cached)
    # verbatim, as the engine wrote it: it may hold more than is known here
    return HandOver(usage, with_members(body, {"kv_transfer_params": _value(answer, "kv_transfer_params")}))


def _value(text: bytes, name: str) -> bytes:
    """The JSON text of the last member of that name."""
    members, _ = json_members(text.decode("latin-1"))
    start, end = next((member[2], member[3]) for member in reversed(members) if member[0] == name)
    return text[start:end]


def _generation(
    operation: Operation, body: bytes, answer: bytes, parsed: Mapping[str, Any], context_id: int
) -> HandOver | NoHandOver:
    """TensorRT-LLM: the parameters stand in the only choice (in earlier releases at the top), and come back with the
    request type turned.
    """
    choices = parsed.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return NoHandOver("it answered the context request with other than one choice")
    params = choices[0].get("disaggregated_params") or parsed.get("disaggregated_params")
    usage = usage_of(answer)
    if choices[0].get("finish_reason") not in _NEED_GENERATION:
        return HandOver(usage, None, _without_params(answer, parsed))
    if not isinstance(params, dict) or params.get("ctx_request_id") is None:
        return NoHandOver("it answered the context request without disaggregated_params that name ctx_request_id")
    turned = {**params, "request_type": "generation_only", "disagg_request_id": context_id, "schedule_style": 0}
    if "ctx_usage" in params:  # releases that know it forbid no other field; older ones forbid this one
        turned["ctx_usage"] = parsed.get("usage")
    new = {"disaggregated_params": orjson.dumps(turned)}
    tokens = parsed.get("prompt_token_ids")
    if tokens:
        new["prompt" if operation is Operation.COMPLETION else "prompt_token_ids"] = orjson.dumps(tokens)
    return HandOver(usage, with_members(body, new))


def _without_params(answer: bytes, parsed: Mapping[str, Any]) -> bytes:
    """An answer that is the client's, without what was meant for a decoder."""
    shown = {name: value for name, value in parsed.items() if name not in ("disaggregated_params", "prompt_token_ids")}
    choices = [{n: v for n, v in each.items() if n != "disaggregated_params"} for each in parsed["choices"]]
    return orjson.dumps({**shown, "choices": choices})


def as_stream(answer: bytes) -> bytes:
    """A whole answer as the stream that the client asked for: one chunk that says all, the usage, and the end."""
    whole = parsed_json(answer)
    same = {name: value for name, value in whole.items() if name not in ("choices", "usage", "object")}
    same["object"] = {"chat.completion": "chat.completion.chunk"}.get(whole.get("object"), whole.get("object"))
    choices = [
        {("delta" if name == "message" else name): value for name, value in choice.items()}
        for choice in whole["choices"]
    ]
    events = [{**same, "choices": choices}, {**same, "choices": [], "usage": whole.get("usage")}]
    return b"".join(b"data: " + orjson.dumps(each) + b"\n\n" for each in events) + b"data: [DONE]\n\n"


# -- cached tokens -----------------------------------------------------------------------------------------------------

# A name in JSON text begins with a quote that no backslash escapes; inside a string every quote is escaped.
_DETAILS: Final = re.compile(rb'(?<!\\)"prompt_tokens_details"\s*:\s*(null|\{[^{}"]*(?:"[^"\\]*"[^{}"]*)*\})')
_NAMED: Final = b'"prompt_tokens_details"'
_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*(null|\d+)')
_USAGE: Final = re.compile(rb'(?<!\\)"usage"\s*:\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*(?=\})')
_NO_CHOICES: Final = re.compile(rb'(?<!\\)"choices"\s*:\s*\[\s*\]')
_EMPTY_LIST: Final = re.compile(rb"\[\s*\]")
# A line that is longer (16 MiB, what the meter of a stream waits for) is passed on as it is.
_MAX_LINE_BYTES: Final = 16 * 1024 * 1024


class CachedTokens:
    """Puts the prefill leg's cached tokens where the decode leg names its own. Mutable: a stream's unfinished line.

    A decoder that got a prompt's KV from elsewhere counts all of it as cached (vllm#43370, TensorRT-LLM#13620) or
    counts a prefix twice (sglang#25972). Only the prefill leg knows what was cached before. Corrected in the decode
    leg's answer, so that the client, its bill and the metrics say the same. `known` None: the prefill leg did not say,
    then nobody knows, and nothing is billed as cached.
    """

    __slots__ = ("_tail", "known")

    def __init__(self, known: int | None) -> None:
        self.known = known
        self._tail = bytearray()

    def feed(self, data: bytes) -> bytes:
        """The next bytes of a stream; returns whole lines, as far as there are any."""
        tail = self._tail
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            tail += data
            return b"" if len(tail) <= _MAX_LINE_BYTES else self.flush()
        lines = bytes(tail) + data[:end]
        self._tail = bytearray(data[end:])
        return self._lines(lines)

    def flush(self) -> bytes:
        """The stream has ended: what was held back."""
        rest, self._tail = bytes(self._tail), bytearray()
        return self._lines(rest)

    def whole(self, answer: bytes) -> bytes:
        """A whole answer."""
        if _NAMED in answer:
            return _DETAILS.sub(self._details, answer)
        return self._total(answer) if self.known else answer

    def _lines(self, lines: bytes) -> bytes:
        if _NAMED in lines:
            lines = _DETAILS.sub(self._details, lines)
        # a total, which may be without details; nearly no other event has an empty list in it
        if self.known and _EMPTY_LIST.search(lines) and _NO_CHOICES.search(lines):
            each = lines.splitlines(keepends=True)
            lines = b"".join(self._total(line) if _NO_CHOICES.search(line) else line for line in each)
        return lines

    def _total(self, text: bytes) -> bytes:
        """A total says what was cached, also where the decode leg says nothing of it."""
        if _NAMED in text:
            return text
        return _USAGE.sub(lambda found: found[0] + b',"prompt_tokens_details":' + self._named(), text, count=1)

    def _details(self, found: re.Match[bytes]) -> bytes:
        said = found[1]
        if said == b"null":
            return found[0] if self.known is None else found[0][: -len(said)] + self._named()
        if _CACHED.search(said):
            count = b"null" if self.known is None else b"%d" % self.known
            return found[0].replace(said, _CACHED.sub(b'"cached_tokens":' + count, said))
        if self.known is None:
            return found[0]
        more = b"" if said[1:-1].strip() == b"" else b","
        return found[0][:-1] + more + b'"cached_tokens":%d}' % self.known

    def _named(self) -> bytes:
        return b'{"cached_tokens":%d}' % (self.known or 0)
