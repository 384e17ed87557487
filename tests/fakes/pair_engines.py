"""Engines that only do a part of each request, as strict as their source: what they do not know or miss, they refuse.

Owns: for vLLM (NIXL), SGLang and TensorRT-LLM the checks of a leg's body, the hand-over between two engines (`Bench`),
and the ways in which a leg can fail. Does not own: the server (`scripted_engine`) or the shape of answers
(`engine_scripts`). Written after these files, which are named in every refusal:

    vLLM 0.32       tests/v1/kv_connector/nixl_integration/toy_proxy_server.py (the six parameters, what P must not
                    get), vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py (what P answers and D
                    reads), entrypoints/openai/chat_completion/protocol.py (field names), rl/online/api_router.py
    SGLang          sgl-router/src/routers/http/pd_router.rs and python/sglang/srt/disaggregation/mini_lb.py (three
                    fields, both legs at once), srt/entrypoints/openai/protocol.py (field names)
    TensorRT-LLM    tensorrt_llm/serve/openai_disagg_service.py and openai_protocol.py (`extra="forbid"`)

A request's `user` says how its legs go: `"pair:prefill=status.500,decode=ok"`; see `_played`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from billing.json_members import json_members
from tests.fakes.engine_scripts import (
    DONE,
    Ask,
    End,
    Script,
    Send,
    Step,
    Truth,
    Wait,
    choice,
    chunk,
    event,
    json_script,
    stream_steps,
    usage_counts,
    whole_answer,
)
from tests.fakes.scripted_engine import ScriptedEngine

# Tokens of every prompt, and how many of them every prefill engine had cached.
PROMPT_TOKENS, CACHED_TOKENS = 100, 32
# What each decoder says was cached although it only came from the other engine (vllm#43370, sglang#25972,
# TensorRT-LLM#13620).
_DECODER_SAYS = {"vllm": 99, "sglang": 64, "trtllm": 100}

# Fields of a chat request, as far as a test may send them.
_COMMON = frozenset(
    "messages model frequency_penalty logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty seed "
    "stop stream stream_options temperature top_p tools tool_choice user top_k min_p repetition_penalty stop_token_ids "
    "ignore_eos min_tokens skip_special_tokens response_format cache_salt priority".split()
)
_FIELDS = {
    "vllm": _COMMON | {"request_id", "session_id", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"},
    "sglang": _COMMON | {"rid", "session_id", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank"},
    "trtllm": _COMMON | {"prompt_token_ids", "disaggregated_params", "conversation_params"},
}
_TRT_PARAMS = frozenset(
    "request_type first_gen_tokens first_gen_log_probs first_gen_logits ctx_request_id encoded_opaque_state "
    "draft_tokens disagg_request_id ctx_dp_rank ctx_info_endpoint schedule_style ctx_usage".split()
)
_SOURCE = {
    "vllm": "toy_proxy_server.py",
    "sglang": "pd_router.rs",
    "trtllm": "openai_disagg_service.py",
}
_NIXL_ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class Refused(Exception):
    """The body is not what this engine takes."""


@dataclass(slots=True)
class Room:
    """Where two SGLang legs meet. Mutable."""

    has: dict[str, Truth] = field(default_factory=dict)
    """The leg of each role."""
    prefilled: bool = False


@dataclass(slots=True)
class Bench:
    """What the engines of one test share: what was handed over, and who was told what. Mutable."""

    handed: dict[str, bytes] = field(default_factory=dict)
    """By request id: the parameters that a prefill answered, as it wrote them."""
    contexts: dict[int, dict[str, Any]] = field(default_factory=dict)
    rooms: dict[int, Room] = field(default_factory=dict)
    told: list[tuple[str, list[str]]] = field(default_factory=list)
    """(engine, request ids) of every abort."""
    fail_first: str = ""
    """The role whose first leg of all is answered 500, whichever engine it comes to."""


class PairEngine(ScriptedEngine):
    """One engine with a role. `legs` are its requests: (leg, truth)."""

    def __init__(self, name: str, kind: str, role: str, bench: Bench, models: Sequence[str] = ("m",)) -> None:
        super().__init__(models=models)
        self.name, self.kind, self.role, self.bench = name, kind, role, bench
        self.host = "127.0.0.1"
        self.bootstrap_port = 8998
        self.says_cached = True
        """Its usage tells cached tokens."""
        self.break_after_s = 3_600.0
        """How long a leg that hangs does."""

    @property
    def legs(self) -> list[Truth]:
        """Its inference requests, in order."""
        return [truth for truth in list(self.truths) if truth.target.endswith("/v1/chat/completions")]

    def script_for(self, truth: Truth) -> Script:
        """The answer to a leg."""
        if truth.method == "GET":
            return super().script_for(truth)
        body = json.loads(truth.body)
        if truth.target == "/abort_requests":
            if self.kind != "vllm" or set(body) != {"request_ids"} or not body["request_ids"]:
                return json_script("refused", b'{"detail":"not an abort of named requests"}', 400)
            self.bench.told.append((self.name, body["request_ids"]))
            return json_script("abort", b'{"status":"aborted","aborted":1}')
        try:
            steps = self._leg(truth, body)
        except Refused as refused:
            error = {"error": {"message": f"{_SOURCE[self.kind]}: {refused}", "type": "BadRequestError", "code": 400}}
            return json_script("refused", json.dumps(error).encode(), 400)
        return steps

    def _leg(self, truth: Truth, body: dict[str, Any]) -> Script:
        unknown = sorted(body.keys() - _FIELDS[self.kind])
        if unknown:
            raise Refused(f"unknown fields {unknown}")
        if not body.get("stream") and body.get("stream_options") is not None:
            raise Refused("stream_options without a stream")
        if not dict(truth.headers).get("x-request-id"):
            raise Refused("no X-Request-Id")
        asked = dict(
            part.split("=", 1) for part in str(body.get("user", "")).removeprefix("pair:").split(",") if "=" in part
        )
        ask = Ask(body, {"prompt": str(PROMPT_TOKENS), "cached": str(CACHED_TOKENS)}, truth)
        how = asked.get(self.role, "ok")
        if self.role == self.bench.fail_first:
            self.bench.fail_first, how = "", "status.500"
        leg = {"vllm": self._vllm, "sglang": self._sglang, "trtllm": self._trtllm}[self.kind]
        return leg(ask, how)

    # -- vLLM ----------------------------------------------------------------------------------------------------------

    def _vllm(self, ask: Ask, how: str) -> Script:
        body = ask.fields
        request_id = dict(ask.truth.headers)["x-request-id"]
        params = body.get("kv_transfer_params")
        if self.role == "prefill":
            if params != _NIXL_ASK:
                raise Refused(f"a prefill needs kv_transfer_params {_NIXL_ASK}, not {params}")
            if (body.get("stream"), body.get("max_tokens"), body.get("max_completion_tokens")) != (False, 1, 1):
                raise Refused("a prefill has stream false and one token")
            if body.keys() & {"stream_options", "min_tokens", "min_completion_tokens"}:
                raise Refused("not supported for a prefill")
            made = json.loads(whole_answer(ask))
            if not self.says_cached:
                made["usage"]["prompt_tokens_details"] = None
            handed = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
                "remote_engine_id": f"engine-{self.name}", "remote_request_id": f"chatcmpl-{request_id}-0",
                "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "zz_unknown": 1.5e0,
            }  # fmt: skip
            raw = json.dumps(handed, indent=1).encode()  # as no other writer would
            if how == "no_params":
                return _played(self, "ok", _whole(json.dumps(made).encode()), ask)
            if how == "bad_params":
                raw, how = raw.replace(b'"127.0.0.1"', b"null"), "ok"
            self.bench.handed[request_id] = raw
            answer = json.dumps(made, separators=(",", ":")).encode()[:-1] + b',"kv_transfer_params":' + raw + b"}"
            return _played(self, how, _whole(answer), ask)
        if params is None:  # prefills for itself
            return _played(self, how, _decoded(ask, 0), ask)
        if _raw(ask.truth.body, "kv_transfer_params") != self.bench.handed.get(request_id):
            raise Refused("the parameters are not what a prefill with this X-Request-Id has answered")
        return _played(self, how, _decoded(ask, _DECODER_SAYS["vllm"]), ask)

    # -- SGLang --------------------------------------------------------------------------------------------------------

    def _sglang(self, ask: Ask, how: str) -> Script:
        body = ask.fields
        if self.role == "both":
            if any(name.startswith("bootstrap_") for name in body):
                raise Refused("it has no bootstrap server")
            return _played(self, how, _decoded(ask, 0), ask)
        host, port, number = (body.get(f"bootstrap_{name}") for name in ("host", "port", "room"))
        if (host, port) != (self.host, self.bootstrap_port):
            raise Refused(f"no bootstrap server at {host}:{port}")
        if type(number) is not int or not 0 <= number < 2**63:
            raise Refused(f"bootstrap_room {number!r} is no 63-bit number")
        room = self.bench.rooms.setdefault(number, Room())
        if self.role in room.has and not room.has[self.role].ended:
            raise Refused(f"bootstrap_room {number} is in use")
        if how != "absent":
            room.has[self.role] = ask.truth
        steps = (
            _prefilled(ask, room) if self.role == "prefill" else _after(room, _decoded(ask, _DECODER_SAYS["sglang"]))
        )
        return _played(self, how, steps, ask, streamed=ask.stream)

    # -- TensorRT-LLM --------------------------------------------------------------------------------------------------

    def _trtllm(self, ask: Ask, how: str) -> Script:
        body = ask.fields
        params = body.get("disaggregated_params")
        if params is not None and params.keys() - _TRT_PARAMS:
            raise Refused(f"disaggregated_params have unknown fields {sorted(params.keys() - _TRT_PARAMS)}")
        if self.role == "prefill":
            if params is None or params.keys() - {"request_type", "disagg_request_id", "schedule_style"}:
                raise Refused(f"a context request needs its type and id, not {params}")
            if params["request_type"] != "context_only" or not 2**42 <= params["disagg_request_id"] < 2**63:
                raise Refused(f"not a context request: {params}")
            if body.get("stream"):
                raise Refused("a context request is not streamed")
            handed = {
                "request_type": "context_only", "first_gen_tokens": [7], "ctx_request_id": 3, "draft_tokens": None,
                "encoded_opaque_state": "AAEC", "disagg_request_id": params["disagg_request_id"], "ctx_dp_rank": 0,
                "ctx_info_endpoint": "tcp://127.0.0.1:5000", "schedule_style": None, "ctx_usage": None,
            }  # fmt: skip
            self.bench.contexts[params["disagg_request_id"]] = handed
            made = json.loads(whole_answer(Ask({**body, "max_tokens": 1}, ask.options, ask.truth)))
            made["prompt_token_ids"] = list(range(PROMPT_TOKENS))
            if how == "eos":
                made["choices"][0]["finish_reason"] = "stop"
            made["choices"][0]["disaggregated_params"] = None if how == "no_params" else handed
            return _played(self, "ok" if how in ("eos", "no_params") else how, _whole(json.dumps(made).encode()), ask)
        if params is None:
            return _played(self, how, _decoded(ask, 0), ask)
        handed = self.bench.contexts.get(params.get("disagg_request_id"), {})
        wanted = {**handed, "request_type": "generation_only", "schedule_style": 0}
        if {**params, "ctx_usage": None} != wanted or not params["ctx_usage"]:
            raise Refused(f"not what the context server has answered: {params}")
        if body.get("prompt_token_ids") != list(range(PROMPT_TOKENS)):
            raise Refused("the prompt's token ids are not carried over")
        return _played(self, how, _decoded(ask, _DECODER_SAYS["trtllm"]), ask)


def _raw(text: bytes, name: str) -> bytes | None:
    """A member's value as it was written."""
    members, _ = json_members(text.decode("latin-1"))
    return next((text[member[2] : member[3]] for member in members if member[0] == name), None)


def _whole(answer: bytes) -> Iterator[Step]:
    yield Send(answer)


def _decoded(ask: Ask, cached: int) -> Iterator[Step]:
    """What a decode leg writes, with its own word on the cache."""
    own = Ask(ask.fields, {**ask.options, "cached": str(cached), "gap_ms": "5"}, ask.truth)
    if ask.stream:
        yield from stream_steps(own)
    else:
        yield Send(whole_answer(own), tokens=own.tokens)


def _prefilled(ask: Ask, room: Room) -> Iterator[Step]:
    """SGLang's prefill leg: its answer comes when the decode engine has fetched the KV."""
    while "decode" not in room.has:
        yield Wait(0.005)
    room.prefilled = True
    if not ask.stream:
        yield Send(whole_answer(Ask({**ask.fields, "max_tokens": 1}, ask.options, ask.truth)))
        return
    yield Send(chunk(ask, [choice(0, {"role": "assistant", "content": "tok1 "})]))
    yield Send(chunk(ask, [choice(0, {}, "length")]))
    if ask.usage:
        yield Send(chunk(ask, [], usage_counts(PROMPT_TOKENS, 1, CACHED_TOKENS)))
    yield Send(DONE)


def _after(room: Room, steps: Iterator[Step]) -> Iterator[Step]:
    """SGLang's decode leg: nothing before the prefill is done, for ever if need be (sglang#29482)."""
    while not room.prefilled:
        yield Wait(0.005)
    yield from steps


_SSE = (("content-type", "text/event-stream; charset=utf-8"),)
_JSON = (("content-type", "application/json"),)


def _played(engine: PairEngine, how: str, steps: Iterator[Step], ask: Ask, *, streamed: bool | None = None) -> Script:
    """A leg that goes as `how` says: `ok`; `status.CODE`; `reset` before a byte of the answer; `stall` likewise;
    `slow.MS`; `cut.N` after N steps of the answer (reset); `hang.N` likewise, without an end; `short.N` likewise, as if
    that were all; `error` (an event in a stream); `absent` (SGLang: never comes to the room, and never answers).
    """
    word, _, number = how.partition(".")
    is_stream = ask.stream if streamed is None else streamed
    if word == "status":
        error = {"error": {"message": f"{engine.name} says {number}", "type": "StubError", "code": int(number)}}
        return json_script(how, json.dumps(error).encode(), int(number), (("retry-after", "7"),))
    if word in ("reset", "stall", "absent"):
        ending = End("reset" if word == "reset" else "stall")
        return Script(how, [Wait(0.02), ending], framing="raw")
    headers = _SSE if is_stream else _JSON
    if word == "error":
        error = {"error": {"message": "EngineCore died.", "type": "InternalServerError", "param": None, "code": 500}}
        return Script(how, [Send(event(error)), Send(DONE)], 200, headers)
    if word in ("cut", "hang"):
        after_s = engine.break_after_s if word == "hang" else 0.0
        return Script(how, _cut(steps, int(number), after_s, whole=not is_stream), 200, headers)
    if word == "short":
        return Script(how, _first(steps, int(number)), 200, headers)
    if word == "slow":
        return Script(how, _slow(steps, int(number) / 1_000), 200, headers)
    assert how == "ok", how
    return Script(how, steps, 200, headers)


def _cut(steps: Iterator[Step], count: int, after_s: float, *, whole: bool) -> Iterator[Step]:
    """The first `count` pieces of an answer and, a while later, its end; of one that is whole, half."""
    for step in steps:
        if isinstance(step, Send):
            if whole:
                yield Send(step.data[: len(step.data) // 2])
                break
            if not count:
                break
            count -= 1
        yield step
    yield Wait(after_s)
    yield End("reset")


def _first(steps: Iterator[Step], count: int) -> Iterator[Step]:
    for step in steps:
        if isinstance(step, Send):
            if not count:
                return
            count -= 1
        yield step


def _slow(steps: Iterator[Step], seconds: float) -> Iterator[Step]:
    yield Wait(seconds)
    yield from steps
