"""The OpenAI wire form: a request's bytes to `InferenceRequest`, our fields into those bytes, and error objects out.

Owns: what a chat or completion body must look like to be served, which fields are the gateway's own (DESIGN 4.1), the
edit of those fields in place, and the form of every error. Does not own: HTTP (`openai_http`), when an error happens
(`serve`), or the answer's side (`billing.metering`). Bodies are never re-serialised: a changed key order or float would
change the prompt and lose the engine's prefix cache, and fields that we do not know belong to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from billing.json_members import Member, json_members
from controlplane.errors import BadRequest
from controlplane.ports import Fault
from controlplane.request import INSERT_HERE, Edit, InferenceRequest, Operation, StreamWish, estimate_input_tokens
from controlplane.tenancy import DenialReason, Denied

# The bound of OpenAI's own API description (`n`: maximum 128).
MAX_CHOICES: Final = 128
# Token limits are 32-bit integers in the engines; more is a mistake or an attack.
_MAX_TOKENS: Final = 2**31 - 1
# Longest model and tier names that usage events and metric labels take; real ones are under 100.
_MAX_NAME_CHARS: Final = 256
# As much of `user` as a usage event keeps.
_MAX_USER_CHARS: Final = 256
# HTTP: from here on it is not the caller's fault.
_FIRST_SERVER_STATUS: Final = 500
# Fields at top level: vLLM's chat request has about 80; a body of many thousands only costs time.
_MAX_MEMBERS: Final = 1_024
# A parsed value costs up to 70 bytes where its text takes 2: a body may not turn into more Python objects than this.
_MAX_VALUES: Final = 4_000_000
# Bodies up to here cannot reach that bound by their length alone.
_SMALL_BODY_BYTES: Final = _MAX_VALUES

# What this gateway reads or owns. An engine takes the last of two, a proxy perhaps the first: two are refused.
_READ: Final = 0
_REWRITTEN: Final = 1
_REMOVED: Final = 2
# Ours are set or removed, never taken from a tenant (DESIGN 4.1).
_KINDS: Final = {
    "model": _REWRITTEN, "stream_options": _REWRITTEN,
    "cache_salt": _REMOVED, "priority": _REMOVED, "request_id": _REMOVED, "session_id": _REMOVED,
    "kv_transfer_params": _REMOVED, "ec_transfer_params": _REMOVED, "vllm_xargs": _REMOVED,
    # SGLang and TensorRT-LLM: on which rank, under which name, from which tokens and whose KV a request runs
    "disaggregated_params": _REMOVED, "routed_dp_rank": _REMOVED, "disagg_prefill_dp_rank": _REMOVED,
    "data_parallel_rank": _REMOVED, "rid": _REMOVED, "input_ids": _REMOVED,
    "stream": _READ, "messages": _READ, "prompt": _READ, "tools": _READ, "n": _READ, "max_tokens": _READ,
    "max_completion_tokens": _READ, "user": _READ, "service_tier": _READ,
}  # fmt: skip
_REMOVED_PREFIX: Final = "bootstrap_"
# Content parts that are not text. Their size in bytes says nothing about their tokens.
_MEDIA_PARTS: Final = frozenset(
    {
        "image_url", "input_image", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url", "file",
        "input_file",
    }
)  # fmt: skip

_Fields = dict[str, Member]


# -- requests ----------------------------------------------------------------------------------------------------------


def parse(operation: Operation, body: bytes) -> InferenceRequest:
    """The request in `body`. Raises BadRequest that names the field and what was expected.

    One pass; the body is kept, not copied. Only fields that the gateway acts on are checked, the rest is the engine's.
    """
    fields, edits = _read(body)
    model = _name(body, fields, "model")
    if model is None:
        raise BadRequest("model is required: a string that names a model.", param="model")
    stream = _flag(fields, "stream")
    wish = _wish(fields, stream)
    choices = _whole(fields, "n", MAX_CHOICES) or 1
    max_tokens = _whole(fields, "max_tokens", _MAX_TOKENS)
    max_completion = _whole(fields, "max_completion_tokens", _MAX_TOKENS)
    view = memoryview(body)
    if operation is Operation.CHAT:
        parts, tokens = _chat_prompt(fields, view)
    else:
        parts, tokens, prompts = _completion_prompt(fields, view)
        choices *= prompts
    user = _text(body, fields, "user")
    return InferenceRequest(
        operation=operation,
        model_asked=model,
        wish=wish,
        choices=choices,
        max_output_tokens=_most(max_tokens, max_completion if operation is Operation.CHAT else None),
        estimated_input_tokens=tokens,
        body=body,
        prompt_parts=parts,
        edits=edits,
        user=None if user is None else user[:_MAX_USER_CHARS],
        tier_asked=_name(body, fields, "service_tier"),
    )


def _most(max_tokens: int | None, max_completion: int | None) -> int | None:
    """The most an engine may write. Engines differ in which field of a chat wins: the larger one is reserved."""
    if max_tokens is None or max_completion is None:
        return max_completion if max_tokens is None else max_tokens
    return max(max_tokens, max_completion)


def _members(body: bytes) -> Sequence[Member]:
    """The members of the body's object at byte offsets. Raises BadRequest for what is no JSON object, or too much."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"The request body is not valid UTF-8 at byte {error.start}.") from None
    if len(body) > _SMALL_BODY_BYTES and body.count(b",") + body.count(b"[") + body.count(b"{") > _MAX_VALUES:
        raise BadRequest(f"The request body has more than {_MAX_VALUES} JSON values.", status=413)
    # JSON's structure is ASCII, so Latin-1 gives the right one, at byte offsets; strings we need are decoded again
    text = body.decode("latin-1")
    try:
        members, close = json_members(text)
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    except ValueError as error:
        raise BadRequest(f"The request body is not a valid JSON object: {_first_line(error)}.") from None
    if text[close + 1 :].strip(" \t\r\n"):
        raise BadRequest(f"The request body is not a valid JSON object: text follows it at byte {close + 1}.")
    if len(members) > _MAX_MEMBERS:
        raise BadRequest(f"The request body has {len(members)} fields at top level; at most {_MAX_MEMBERS} are taken.")
    return members


def _read(body: bytes) -> tuple[_Fields, tuple[Edit, ...]]:
    """The members that we read, by name, and where our own stand."""
    members = _members(body)
    kept = len(members)  # from here on only members that are removed
    while kept and _is_removed(members[kept - 1][0]):
        kept -= 1
    fields: _Fields = {}
    edits: list[Edit] = []
    for n, member in enumerate(members):
        name = member[0]
        kind = _KINDS.get(name)
        if kind is None:
            if not name.startswith(_REMOVED_PREFIX):
                continue
            kind = _REMOVED
        if name in fields:
            raise BadRequest(f"{name} is given twice.", param=name)
        fields[name] = member
        if kind == _REWRITTEN:
            edits.append(Edit(name, member[2], member[3]))
        elif kind == _REMOVED:
            edits.append(_removal(members, n, n >= kept))
    end = members[-1][3] if members else 1
    edits.append(Edit(INSERT_HERE, end, end))
    return fields, tuple(edits)


def _removal(members: Sequence[Member], n: int, at_end: bool) -> Edit:
    """A removed member takes the comma after it, but those at the end of the object take the comma before them."""
    name, start, _, end, _ = members[n]
    if at_end:
        return Edit(name, members[n - 1][3] if n else start, end)
    return Edit(name, start, members[n + 1][1])


def _is_removed(name: str) -> bool:
    return _KINDS.get(name) == _REMOVED or name.startswith(_REMOVED_PREFIX)


def _first_line(error: ValueError) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _wrong(name: str, value: Any, expected: str) -> BadRequest:
    """`name` has a `value` that it cannot have. Long values are not echoed."""
    if isinstance(value, dict):
        shown = "an object"
    elif isinstance(value, list):
        shown = "an array" if value else "an empty array"
    else:
        shown = _short(value)
    return BadRequest(f"{name} must be {expected}, not {shown}.", param=name)


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, str | bool | None) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _flag(fields: _Fields, name: str) -> bool:
    member = fields.get(name)
    if member is None or member[4] is None:
        return False
    value = member[4]
    if type(value) is not bool:
        raise _wrong(name, value, "true or false")
    return value


def _whole(fields: _Fields, name: str, most: int) -> int | None:
    member = fields.get(name)
    if member is None or member[4] is None:
        return None
    value = member[4]
    if type(value) is not int or not 1 <= value <= most:
        raise _wrong(name, value, f"a whole number from 1 to {most}")
    return value


def _text(body: bytes, fields: _Fields, name: str) -> str | None:
    """A string that will be stored and logged: no NUL (PostgreSQL refuses it), no lone surrogate (UTF-8 refuses it)."""
    member = fields.get(name)
    if member is None or member[4] is None:
        return None
    value: object = member[4]
    if type(value) is not str:
        raise _wrong(name, value, "a string")
    if not value.isascii():
        value = str(json.loads(body[member[2] : member[3]]))
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise BadRequest(f"{name} must be valid Unicode.", param=name)
    if "\x00" in value:
        raise BadRequest(f"{name} must not contain a NUL character.", param=name)
    return value


def _name(body: bytes, fields: _Fields, name: str) -> str | None:
    value = _text(body, fields, name)
    if value is not None and not 1 <= len(value) <= _MAX_NAME_CHARS:
        raise BadRequest(f"{name} must have 1 to {_MAX_NAME_CHARS} characters, this one has {len(value)}.", param=name)
    return value


def _wish(fields: _Fields, stream: bool) -> StreamWish:
    member = fields.get("stream_options")
    options = None if member is None else member[4]
    if options is None:
        return _PLAIN_STREAM if stream else _NO_STREAM
    if type(options) is not dict:
        raise _wrong("stream_options", options, "an object")
    if not stream:
        raise BadRequest("stream_options is only allowed when stream is true.", param="stream_options")
    asked = []
    for name in ("include_usage", "continuous_usage_stats"):
        value = options.get(name)
        if value is not None and type(value) is not bool:
            raise _wrong(f"stream_options.{name}", value, "true or false")
        asked.append(value is True)
    if not asked[0]:
        return _PLAIN_STREAM
    return _EACH_USAGE_STREAM if asked[1] else _USAGE_STREAM


_PLAIN_STREAM: Final = StreamWish(True, False, False)
_NO_STREAM: Final = StreamWish(False, False, False)
_USAGE_STREAM: Final = StreamWish(True, True, False)
_EACH_USAGE_STREAM: Final = StreamWish(True, True, True)


def _chat_prompt(fields: _Fields, view: memoryview) -> tuple[tuple[memoryview, ...], int]:
    """The prompt's parts and its estimated tokens."""
    member = fields.get("messages")
    if member is None:
        raise BadRequest("messages is required: a list with at least one message.", param="messages")
    messages = member[4]
    if type(messages) is not list:
        raise _wrong("messages", messages, "a list with at least one message")
    if not messages:
        raise BadRequest("messages must be a list with at least one message, not an empty one.", param="messages")
    media_count = media_bytes = 0
    for n, message in enumerate(messages):
        if type(message) is not dict:
            raise BadRequest(f"messages[{n}] must be an object.", param=f"messages[{n}]")
        content = message.get("content")
        if type(content) is list:
            for part in content:
                if type(part) is dict and part.get("type") in _MEDIA_PARTS:
                    media_count += 1
                    media_bytes += _payload_bytes(part)
    # without its closing bracket: the next turn of the same conversation then starts with these very bytes
    said = view[member[2] : member[3] - 1]
    size = len(said) - media_bytes
    tools = fields.get("tools")
    if tools is None or not tools[4]:
        return (said,), estimate_input_tokens(max(0, size), len(messages), media_count)
    if type(tools[4]) is not list:
        raise _wrong("tools", tools[4], "a list")
    offered = view[tools[2] : tools[3]]
    return (offered, said), estimate_input_tokens(max(0, size) + len(offered), len(messages), media_count)


def _payload_bytes(part: Mapping[str, Any]) -> int:
    """The bytes of a media part that are its data (a data URL, base64): they are no text and no tokens."""
    size = 0
    for value in part.values():
        if type(value) is str:
            size += len(value)
        elif type(value) is dict:
            size += sum(len(inner) for inner in value.values() if type(inner) is str)
    return size


def _completion_prompt(fields: _Fields, view: memoryview) -> tuple[tuple[memoryview, ...], int, int]:
    """The prompt's parts, its estimated tokens, and how many prompts it is."""
    expected = "a string, a list of strings, a list of token ids, or a list of such lists"
    member = fields.get("prompt")
    if member is None:
        raise BadRequest(f"prompt is required: {expected}.", param="prompt")
    prompt = member[4]
    raw = view[member[2] : member[3] - 1]
    if type(prompt) is str:
        return (raw,), estimate_input_tokens(len(raw), 0, 0), 1
    if type(prompt) is not list or not prompt:
        raise _wrong("prompt", prompt, expected)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return (raw,), len(prompt), 1
    if kinds == {str}:
        return (raw,), estimate_input_tokens(len(raw), 0, 0), len(prompt)
    if kinds == {list} and all(inner and set(map(type, inner)) == {int} for inner in prompt):
        return (raw,), sum(map(len, prompt)), len(prompt)
    raise BadRequest(f"prompt must be {expected}.", param="prompt")


class OwnedFields(NamedTuple):
    """Our fields as the picked engine must get them."""

    model_served: str
    cache_salt: str | None = None
    include_usage: bool = False
    """Ask for usage in the stream (only where the request streams)."""
    continuous_usage: bool = False
    """Ask for usage in every chunk; only for engines that know the option."""
    request_id: str | None = None
    priority: int | None = None


def apply_edits(request: InferenceRequest, owned: OwnedFields) -> list[bytes | memoryview]:
    """The body for an engine as consecutive slices: the client's bytes with our fields in them. Copies no prompt."""
    view = memoryview(request.body)
    parts: list[bytes | memoryview] = []
    pos = 0
    options = _stream_options(request, owned)
    for edit in request.edits:
        name = edit.name
        if name == "model":
            if owned.model_served == request.model_asked:
                continue
            new = orjson.dumps(owned.model_served)
        elif name == "stream_options":
            if options is None:
                continue  # null, in a request that does not stream
            new, options = options, None
        elif name == INSERT_HERE:
            new = _added(owned, options)
        else:
            new = b""
        parts.append(view[pos : edit.start])
        if new:
            parts.append(new)
        pos = edit.end
    parts.append(view[pos:])
    return parts


def _stream_options(request: InferenceRequest, owned: OwnedFields) -> bytes | None:
    if not request.wish.stream:
        return None
    if not owned.include_usage:
        return b'{"include_usage":false}'
    if owned.continuous_usage:
        return b'{"include_usage":true,"continuous_usage_stats":true}'
    return b'{"include_usage":true}'


def _added(owned: OwnedFields, options: bytes | None) -> bytes:
    """The members to add after the last one, each with its comma."""
    new = b""
    if owned.cache_salt is not None:
        new += b',"cache_salt":' + orjson.dumps(owned.cache_salt)
    if owned.request_id is not None:
        new += b',"request_id":' + orjson.dumps(owned.request_id)
    if owned.priority is not None:
        new += b',"priority":%d' % owned.priority
    if options is not None and owned.include_usage:
        new += b',"stream_options":' + options
    return new


# -- errors ------------------------------------------------------------------------------------------------------------


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error object; all four keys are always there (reference gateway 2.1)."""
    return _dumps({"error": {"message": message, "type": type_, "param": param, "code": code}})


def stream_error(message: str, type_: str, param: str | None = None, code: str | None = None) -> bytes:
    """An error inside a stream that has begun, and the stream's end. No finish reason is ever invented."""
    return b"data: " + error_body(message, type_, param, code) + b"\n\ndata: [DONE]\n\n"


def _dumps(value: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # a lone surrogate in an engine's message: escaped, as it came
        return json.dumps(value).encode()


def bad_request_fault(error: BadRequest) -> Fault:
    """A request that cannot be served as written."""
    if error.status >= _FIRST_SERVER_STATUS:
        return Fault(error.status, error.message, "server_error", code=error.code, retry_after_s=1.0)
    return Fault(error.status, error.message, "invalid_request_error", code=error.code, param=error.param)


def denial_fault(denied: Denied) -> Fault:
    """Why a caller is not let in. Never says whether a key exists, has expired, or whose it is."""
    reason = denied.reason
    if reason is DenialReason.NO_KEY:
        message = "You did not provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'."
        return Fault(401, message, "invalid_request_error", code="invalid_api_key")
    if reason in (DenialReason.UNKNOWN_KEY, DenialReason.EXPIRED_KEY):
        return Fault(401, "The API key provided is not valid.", "invalid_request_error", code="invalid_api_key")
    if reason is DenialReason.MISSING_SCOPE:
        message = f"This API key lacks the scope '{denied.detail}'."
        return Fault(403, message, "permission_error", code="insufficient_permissions")
    if reason is DenialReason.MODEL_NOT_ALLOWED:
        message = f"This API key may not use the model '{denied.detail}'."
        return Fault(403, message, "permission_error", code="model_not_allowed", param="model")
    message = "API keys cannot be checked now. Try again shortly."
    return Fault(503, message, "server_error", code="auth_unavailable", retry_after_s=1.0)


@dataclass(frozen=True, slots=True)
class EngineErrorDefault:
    """What an engine's error says where the engine does not."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


def engine_error_body(body: bytes, default: EngineErrorDefault) -> bytes:
    """An engine's error body in OpenAI's form: its message and parameter, our type, a code that is a string or null.

    Takes `{"error": {..}}` (vLLM, llama.cpp), `{"error": "text"}`, vLLM's older flat `{"object": "error", ..}`, and
    FastAPI's `{"detail": ..}`; anything else (an HTML page, nothing) gets the default's message.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        return error_body(default.message, default.type, default.param, default.code)
    message, param = error.get("message"), error.get("param")
    if not isinstance(message, str) or not message:
        message = _detail(error.get("detail")) or default.message
    if isinstance(param, str):
        param = param.removeprefix("body.")
    if not isinstance(param, str) or not param or param.isdigit():
        param = default.param
    code = error.get("code") if isinstance(error.get("code"), str) else default.code
    if error.get("type") == "exceed_context_size_error" or "maximum context length" in message:
        code, param = "context_length_exceeded", "messages"
    elif error.get("code") == 404 and param == "model":
        code = "model_not_found"
    return error_body(message, default.type, param, code)


def _detail(detail: Any) -> str | None:
    """FastAPI's `detail`: a text, or a list of what is wrong where."""
    if isinstance(detail, str):
        return detail
    if not isinstance(detail, list):
        return None
    found = []
    for item in detail:
        if isinstance(item, dict) and isinstance(item.get("msg"), str):
            where = item.get("loc")
            place = ".".join(str(step) for step in where if step != "body") if isinstance(where, list) else ""
            found.append(f"{place}: {item['msg']}" if place else item["msg"])
    return "; ".join(found) or None
