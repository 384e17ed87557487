"""What clients may ask of the simulated engine: vLLM's request bodies, checked, as values the server can run.

Owns: the parsing of every request body and vLLM's error objects, word for word where a recording has them. Does not
own: answers (`engine_answer`), HTTP (`engine_http`) or the template (`chat_template`).
The checks follow vLLM's order: JSON, types, the model's name, sampling parameters, the context's length. No pydantic:
a body of 160 kB costs one native JSON parse and one encoding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from perfmodel.adapters.chat_template import render_chat
from perfmodel.adapters.wire_fields import Fields, invalid
from perfmodel.errors import ClientError
from perfmodel.workload import tokenize

Tokens = npt.NDArray[np.uint32]

# vLLM 0.32's openapi: the default of CompletionRequest.max_tokens.
_COMPLETION_MAX_TOKENS = 16
# vLLM's --max-logprobs default.
_MAX_LOGPROBS = 20
# vLLM's VLLM_MAX_N_SEQUENCES is 16384; nothing real asks for more than this, and each costs a sequence.
_MAX_CHOICES = 128
# Prompts of one /v1/completions body; the engine's queue bounds them again.
_MAX_PROMPTS = 1024
_MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What the served model is called and how long a sequence may get."""

    model_names: tuple[str, ...]
    max_model_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One checked request for text. `max_tokens[i]` bounds the answers to `prompts[i]`.

    `logprob_count` None: no logprobs; otherwise that many alternatives a token. `seed` and `greedy` decide whether the
    same prompt gives the same answer.
    """

    is_chat: bool
    prompts: tuple[Tokens, ...]
    max_tokens: tuple[int, ...]
    choice_count: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprob_count: int | None
    echo: bool
    return_token_ids: bool
    cache_salt: str | None
    ignore_eos: bool
    min_tokens: int
    greedy: bool
    seed: int | None
    request_id: str | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)


def error_body(fault: ClientError) -> bytes:
    """The engine's error object."""
    return orjson.dumps(
        {"error": {"message": str(fault), "type": fault.kind, "param": fault.param, "code": fault.status}}
    )


def parse_chat(body: bytes, limits: WireLimits) -> Generation:
    """A /v1/chat/completions body. Raises ClientError."""
    fields = Fields(_object(body))
    messages = fields.sequence("messages", required=True)
    tools = fields.sequence("tools")
    with_logprobs = fields.boolean("logprobs", default=False)
    top_logprobs = fields.integer("top_logprobs") or 0
    opens = fields.boolean("add_generation_prompt", default=True)
    continues = fields.boolean("continue_final_message", default=False)
    # vLLM prefers the newer name.
    limit_field = "max_completion_tokens" if fields.body.get("max_completion_tokens") is not None else "max_tokens"
    asked_tokens = fields.integer(limit_field)
    common = _SharedFields(fields)
    fields.finish()
    common.check(limits)
    if fields.body.get("top_logprobs") and not with_logprobs:
        raise ClientError("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    text = render_chat(messages or (), tools, add_generation_prompt=opens, continue_final_message=continues)
    return common.generation(
        limits,
        _Asked(
            is_chat=True,
            prompts=(tokenize(text),),
            is_text=True,
            limit_field=limit_field,
            max_tokens=asked_tokens,
            logprob_count=top_logprobs if with_logprobs else None,
        ),
    )


def parse_completion(body: bytes, limits: WireLimits) -> Generation:
    """A /v1/completions body. Raises ClientError."""
    fields = Fields(_object(body))
    prompt = fields.body.get("prompt")
    logprob_count = fields.integer("logprobs")
    echo = fields.boolean("echo", default=False)
    asked_tokens = fields.integer("max_tokens", default=_COMPLETION_MAX_TOKENS)
    common = _SharedFields(fields)
    fields.finish()
    common.check(limits)
    prompts, is_text = _prompts(prompt)
    return common.generation(
        limits,
        _Asked(
            is_chat=False,
            prompts=prompts,
            is_text=is_text,
            limit_field="max_tokens",
            max_tokens=asked_tokens,
            logprob_count=logprob_count,
            echo=echo,
        ),
    )


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A /tokenize body: the tokens, and whether their texts are wanted too."""

    tokens: Tokens
    with_texts: bool


def parse_tokenize(body: bytes, limits: WireLimits) -> TokenizeCall:
    """A /tokenize body, with `prompt` or with `messages`. Raises ClientError."""
    fields = Fields(_object(body))
    messages = fields.sequence("messages")
    tools = fields.sequence("tools")
    prompt = fields.string("prompt", required=messages is None)
    with_texts = fields.boolean("return_token_strs", default=False)
    opens = fields.boolean("add_generation_prompt", default=True)
    continues = fields.boolean("continue_final_message", default=False)
    fields.finish()
    _check_model(fields.body.get("model"), limits)
    if messages is not None:
        text = render_chat(messages, tools, add_generation_prompt=opens, continue_final_message=continues)
    else:
        text = (prompt or "").encode()
    return TokenizeCall(tokenize(text), with_texts)


def parse_detokenize(body: bytes, limits: WireLimits) -> Tokens:
    """A /detokenize body's tokens. Raises ClientError."""
    fields = Fields(_object(body))
    tokens = fields.sequence("tokens", required=True)
    fields.finish()
    _check_model(fields.body.get("model"), limits)
    return _token_ids(tokens or [], "tokens")


def parse_abort(body: bytes) -> tuple[str, ...] | None:
    """An /abort_requests body: the ids clients know their requests by; None for all. Raises ClientError."""
    if not body:
        return None
    fields = Fields(_object(body))
    ids = fields.sequence("request_ids")
    fields.finish()
    if not ids:
        return None
    return tuple(str(request_id) for request_id in ids)


def _object(body: bytes) -> dict[str, Any]:
    """The body's JSON object, with FastAPI's words when it is none."""
    if not body:
        raise invalid([{"type": "missing", "loc": "body", "msg": "Field required", "input": None}])
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise _bad_json(body) from None
    if not isinstance(parsed, dict):
        told = "Input should be a valid dictionary or object to extract fields from"
        raise invalid([{"type": "model_attributes_type", "loc": "body", "msg": told, "input": parsed}])
    return parsed


def _bad_json(body: bytes) -> ClientError:
    """What FastAPI says: position and reason are those of Python's own decoder, which orjson does not give."""
    position, reason = 0, "the body is not UTF-8, is nested too deeply or holds a number out of range"
    try:
        json.loads(body)
    except json.JSONDecodeError as fault:
        position, reason = fault.pos, fault.msg
    except (UnicodeDecodeError, RecursionError):
        pass
    fault_told = {"type": "json_invalid", "loc": f"body.{position}", "msg": "JSON decode error", "input": {}}
    return invalid([{**fault_told, "ctx": {"error": reason}}])


def _check_model(model: object, limits: WireLimits) -> None:
    if model is None or model in limits.model_names:
        return
    told = f"The model `{model}` does not exist. Valid aliases: {', '.join(limits.model_names)}."
    raise ClientError(told, status=404, kind="NotFoundError", param="model")


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What differs between the two routes, after their own fields are read."""

    is_chat: bool
    prompts: tuple[Tokens, ...]
    is_text: bool
    limit_field: str
    max_tokens: int | None
    logprob_count: int | None
    echo: bool = False


class _SharedFields:
    """The fields that both routes share."""

    def __init__(self, fields: Fields) -> None:
        self._model = fields.string("model")
        self._choice_count = fields.integer("n", default=1)
        self._stream = fields.boolean("stream", default=False)
        self._options = fields.mapping("stream_options")
        self._temperature = fields.number("temperature")
        self._top_p = fields.number("top_p")
        self._penalties = [(name, fields.number(name)) for name in ("presence_penalty", "frequency_penalty")]
        self._seed = fields.integer("seed")
        self._ignore_eos = fields.boolean("ignore_eos", default=False)
        self._min_tokens = fields.integer("min_tokens", default=0) or 0
        self._cache_salt = fields.string("cache_salt")
        self._priority = fields.integer("priority", default=0)
        self._prompt_logprobs = fields.integer("prompt_logprobs")
        self._return_token_ids = fields.boolean("return_token_ids", default=False)
        self._request_id = fields.string("request_id")
        fields.stop_strings()

    def check(self, limits: WireLimits) -> None:
        """Model, then sampling parameters."""
        _check_model(self._model, limits)
        if self._options is not None and not self._stream:
            raise ClientError("Stream options can only be defined when `stream=True`.", param="stream_options")
        if self._cache_salt is not None and not 1 <= len(self._cache_salt) <= 1024:
            raise ClientError(
                f"cache_salt has {len(self._cache_salt)} characters; expected 1 to 1024.", param="cache_salt"
            )
        if self._priority:
            raise ClientError(
                f"Got priority {self._priority} but Priority scheduling is not enabled.", param="priority"
            )
        if self._prompt_logprobs is not None:
            raise ClientError("prompt_logprobs is not supported by this simulated engine.", param="prompt_logprobs")
        _check_sampling(self._temperature, self._top_p, self._penalties)
        if not 1 <= self._count <= _MAX_CHOICES:
            raise ClientError(f"n must be at least 1 and at most {_MAX_CHOICES}, got {self._count}.", param="n")
        if self._count > 1 and self._greedy:
            raise ClientError(f"n must be 1 when using greedy sampling, got {self._count}.", param="n")

    @property
    def _count(self) -> int:
        return 1 if self._choice_count is None else self._choice_count

    @property
    def _greedy(self) -> bool:
        return self._temperature is not None and self._temperature < 1e-5

    def generation(self, limits: WireLimits, asked: _Asked) -> Generation:
        """The checked request."""
        if asked.logprob_count is not None and not 0 <= asked.logprob_count <= _MAX_LOGPROBS:
            raise ClientError(
                f"Requested sample logprobs of {asked.logprob_count}, which is greater than max allowed: "
                f"{_MAX_LOGPROBS}",
                param="top_logprobs" if asked.is_chat else "logprobs",
            )
        max_tokens = tuple(_token_limit(asked, len(prompt), limits) for prompt in asked.prompts)
        if self._min_tokens < 0 or self._min_tokens > min(max_tokens):
            raise ClientError(
                f"min_tokens must be in [0, max_tokens={min(max_tokens)}], got {self._min_tokens}.", param="min_tokens"
            )
        options = self._options or {}
        return Generation(
            is_chat=asked.is_chat,
            prompts=asked.prompts,
            max_tokens=max_tokens,
            choice_count=self._count,
            stream=self._stream,
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
            logprob_count=asked.logprob_count,
            echo=asked.echo,
            return_token_ids=self._return_token_ids,
            cache_salt=self._cache_salt,
            ignore_eos=self._ignore_eos,
            min_tokens=self._min_tokens,
            greedy=self._greedy,
            seed=self._seed,
            request_id=self._request_id,
        )


def _check_sampling(
    temperature: float | None, top_p: float | None, penalties: Sequence[tuple[str, float | None]]
) -> None:
    if temperature is not None and not temperature >= 0:
        raise _parameter(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if top_p is not None and not 0 < top_p <= 1:
        raise _parameter(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    for name, value in penalties:
        if value is not None and not -2 <= value <= 2:
            raise _parameter(f"{name} must be in [-2, 2], got {value}.", name, value)


def _parameter(message: str, name: str, value: object) -> ClientError:
    return ClientError(f"{message} (parameter={name}, value={value})", param=name)


def _token_limit(asked: _Asked, prompt_tokens: int, limits: WireLimits) -> int:
    """The answer's bound for one prompt: what was asked, or what is left of the context."""
    wanted, longest = asked.max_tokens, limits.max_model_tokens
    if wanted is not None and wanted < 1:
        raise _parameter(f"{asked.limit_field} must be at least 1, got {wanted}.", asked.limit_field, wanted)
    if wanted is not None and wanted > longest:
        told = f"{asked.limit_field}={wanted} cannot be greater than max_model_len={longest}. "
        raise _parameter(f"{told}Please request fewer output tokens.", asked.limit_field, wanted)
    if prompt_tokens > longest:
        # vLLM stops tokenizing a text one token past the limit.
        seen = longest + 1 if asked.is_text else prompt_tokens
        raise _parameter(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains "
            f"{'at least ' if asked.is_text else ''}{seen} input tokens, which exceeds this limit even without any "
            f"output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            seen,
        )
    needed = 1 if wanted is None else wanted
    if prompt_tokens + needed > longest:
        raise _parameter(
            f"This model's maximum context length is {longest} tokens. However, you requested {needed} output tokens "
            f"and your prompt contains {prompt_tokens} input tokens, for a total of {prompt_tokens + needed} tokens. "
            f"Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
            prompt_tokens,
        )
    return longest - prompt_tokens if wanted is None else wanted


def _prompts(prompt: object) -> tuple[tuple[Tokens, ...], bool]:
    """(the prompts' tokens, whether they came as text)."""
    if isinstance(prompt, str):
        return (_text_tokens(prompt),), True
    if not isinstance(prompt, list) or not prompt:
        raise ClientError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt[0], int):
        return (_token_ids(prompt, "prompt"),), False
    if len(prompt) > _MAX_PROMPTS:
        raise ClientError(f"prompt has {len(prompt)} prompts; expected at most {_MAX_PROMPTS}.", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return tuple(_text_tokens(item) for item in prompt), True
    if all(isinstance(item, list) for item in prompt):
        return tuple(_token_ids(item, "prompt") for item in prompt), False
    raise ClientError(
        "prompt is a list of mixed types; expected a string, strings, token ids or lists of token ids.", param="prompt"
    )


def _text_tokens(text: str) -> Tokens:
    if not text:
        raise ClientError("prompt is an empty string; expected at least one character.", param="prompt")
    return tokenize(text.encode())


def _token_ids(values: list[Any], name: str) -> Tokens:
    if not values and name == "prompt":
        raise ClientError("prompt has no token ids; expected at least one.", param="prompt")
    ids = np.asarray(values) if values else np.zeros(0, dtype=np.int64)
    if (
        ids.ndim != 1
        or ids.dtype.kind not in "iu"
        or (ids.size and not (ids.min() >= 0 and ids.max() <= _MAX_TOKEN_ID))
    ):
        raise ClientError(f"{name} holds something other than token ids; expected integers in 0..2^32-1.", param=name)
    return ids.astype(np.uint32)
