"""The bytes of answers, exactly as vLLM 0.32 writes them: members in its order, null where it writes null.

Owns: the JSON of completions and chat completions, whole and as server-sent events. Does not own: when a token is made
or sent (`engine_clock`, `engine_server`) or HTTP framing (`engine_http`).
JSON is written by joining bytes: a streamed token costs one concatenation, because everything around its text is the
same for the whole answer. Text of answers is ASCII words that need no escaping (`workload.Answer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import orjson

from perfmodel.adapters.engine_wire import Generation
from perfmodel.workload import TOKEN_BYTES, detokenize

_DONE = b"data: [DONE]\n\n"
# Spread of invented log probabilities: vLLM's recorded ones lie between 0 and -9.
_LOGPROB_SPAN = 8.0


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What every part of one answer repeats: id, Unix second of creation, served name, engine fingerprint."""

    wire_id: str
    created_s: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice got: whole tokens, how many it has now, and why it ended if it did (`stop` or `length`)."""

    index: int
    text: bytes
    total_tokens: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole answer. `created_cache_tokens` is only told for chat; None where it is not known."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_cache_tokens: int | None


class Answer(Protocol):
    """One answer being written. Each call gives the bytes to send now (empty: nothing yet)."""

    def opening(self) -> bytes:
        """Before the first token."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """One choice grew."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """Every choice has ended."""
        ...


def answer_for(call: Generation, facts: AnswerFacts) -> Answer:
    """The writer of the answer that `call` asks for."""
    if call.stream:
        return _ChatStream(call, facts) if call.is_chat else _CompletionStream(call, facts)
    return _ChatBody(call, facts) if call.is_chat else _CompletionBody(call, facts)


def _json(value: object) -> bytes:
    return orjson.dumps(value)


def _head(facts: AnswerFacts, kind: bytes) -> bytes:
    return b'{"id":%s,"object":"%s","created":%d,"model":%s,"choices":[' % (
        _json(facts.wire_id),
        kind,
        facts.created_s,
        _json(facts.model),
    )


def _fingerprint(facts: AnswerFacts) -> bytes:
    return b',"system_fingerprint":' + _json(facts.fingerprint)


def _words(text: bytes) -> list[bytes]:
    return [text[start : start + TOKEN_BYTES] for start in range(0, len(text), TOKEN_BYTES)]


def _token_ids(text: bytes) -> list[int]:
    return [int.from_bytes(word, "little") for word in _words(text)]


def _logprob(word: bytes, rank: int) -> float:
    """An invented log probability: a function of the token, and lower for every further alternative."""
    mixed = (int.from_bytes(word, "little") * 2654435761) & 0xFFFF
    return -round(mixed / 0x10000 * _LOGPROB_SPAN / 4 + rank * _LOGPROB_SPAN / 16, 6) - 0.000001


def _alternative(word: bytes, rank: int) -> str:
    """The rank-th alternative to a token: the same word with its last letter moved on."""
    return (word[:-1] + bytes([(word[-1] - ord("a") + rank) % 26 + ord("a")])).decode("utf-8", "replace")


def _chat_logprobs(text: bytes, count: int) -> dict[str, object]:
    content = []
    for word in _words(text):
        told = {"token": word.decode("utf-8", "replace"), "logprob": _logprob(word, 0), "bytes": list(word)}
        others = [
            {"token": other, "logprob": _logprob(word, rank), "bytes": list(other.encode())}
            for rank in range(count)
            for other in (_alternative(word, rank),)
        ]
        content.append({**told, "top_logprobs": others})
    return {"content": content}


def _completion_logprobs(text: bytes, count: int, offset: int) -> dict[str, object]:
    words = _words(text)
    return {
        "text_offset": [offset + position * TOKEN_BYTES for position in range(len(words))],
        "token_logprobs": [_logprob(word, 0) for word in words],
        "tokens": [word.decode("utf-8", "replace") for word in words],
        "top_logprobs": [
            {_alternative(word, rank): _logprob(word, rank) for rank in range(max(1, count))} for word in words
        ],
    }


def _details(usage: Usage, *, is_chat: bool) -> dict[str, int | None]:
    details: dict[str, int | None] = {"cached_tokens": usage.cached_tokens}
    if is_chat:
        details["created_cache_tokens"] = usage.created_cache_tokens
    return details


class _Stream:
    """Server-sent events: what chat and completions share."""

    def __init__(self, call: Generation, facts: AnswerFacts, kind: bytes) -> None:
        self._call = call
        self._facts = facts
        self._head = b"data: " + _head(facts, kind)
        # The last choice's last chunk, or the usage chunk when there is one, carries the fingerprint.
        self._open_count = call.choice_count * len(call.prompts)
        self._plain = call.logprob_count is None and not call.continuous_usage and not call.return_token_ids

    def _ends(self, delta: Delta) -> bytes:
        """The members after the choices of a chunk, with the brace."""
        tail = b""
        if self._call.continuous_usage:
            tail = self._running_usage(delta.index, delta.total_tokens)
        if delta.reason is not None:
            self._open_count -= 1
            if not self._open_count and not self._call.include_usage:
                tail += _fingerprint(self._facts)
        return tail + b"}\n\n"

    def _running_usage(self, index: int, completion_tokens: int) -> bytes:
        prompt_tokens = len(self._call.prompts[index // self._call.choice_count])
        return b',"usage":' + _json(
            {
                "prompt_tokens": prompt_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "completion_tokens": completion_tokens,
                "completion_tokens_details": None,
            }
        )

    def closing(self, usage: Usage) -> bytes:
        if not self._call.include_usage:
            return _DONE
        told = {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens_details": {
                name: value for name, value in _details(usage, is_chat=self._call.is_chat).items() if value is not None
            },
        }
        return b'%s],"usage":%s%s}\n\n%s' % (self._head, _json(told), _fingerprint(self._facts), _DONE)


class _ChatStream(_Stream):
    def __init__(self, call: Generation, facts: AnswerFacts) -> None:
        super().__init__(call, facts, b"chat.completion.chunk")
        self._starts = [self._head + b'{"index":%d,"delta":{"content":"' % index for index in range(call.choice_count)]

    def opening(self) -> bytes:
        prompt_ids = _json(self._call.prompts[0].tolist()) if self._call.return_token_ids else b"null"
        chunks = []
        for index in range(self._call.choice_count):
            usage = self._running_usage(index, 0) if self._call.continuous_usage else b""
            chunks.append(
                b'%s{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%s,'
                b'"prompt_token_ids":%s,"prompt_text":null}\n\n' % (self._head, index, usage, prompt_ids)
            )
        return b"".join(chunks)

    def delta(self, delta: Delta) -> bytes:
        if self._plain and delta.reason is None:
            return (
                self._starts[delta.index]
                + delta.text
                + b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            )
        call = self._call
        logprobs = b"null"
        if call.logprob_count is not None:
            logprobs = _json(_chat_logprobs(delta.text, call.logprob_count))
        ending = b'"finish_reason":null'
        if delta.reason is not None:
            ending = b'"finish_reason":"%s","stop_reason":null' % delta.reason.encode()
        token_ids = _json(_token_ids(delta.text)) if call.return_token_ids else b"null"
        return b'%s%s"},"logprobs":%s,%s,"token_ids":%s}]%s' % (
            self._starts[delta.index],
            delta.text,
            logprobs,
            ending,
            token_ids,
            self._ends(delta),
        )


class _CompletionStream(_Stream):
    def __init__(self, call: Generation, facts: AnswerFacts) -> None:
        super().__init__(call, facts, b"text_completion")
        self._offsets: dict[int, int] = {}
        self._starts = [
            self._head + b'{"index":%d,"text":"' % index for index in range(call.choice_count * len(call.prompts))
        ]

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if self._plain and delta.reason is None and (delta.index in self._offsets or not self._call.echo):
            return (
                self._starts[delta.index]
                + delta.text
                + b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
                b'"token_ids":null}]}\n\n'
            )
        call = self._call
        is_first = delta.index not in self._offsets
        prompt = call.prompts[delta.index // call.choice_count]
        shown = _shown_prompt(call, delta.index) if is_first and call.echo else b""
        offset = self._offsets.get(delta.index, len(shown))
        self._offsets[delta.index] = offset + len(delta.text)
        logprobs = b"null"
        if call.logprob_count is not None:
            logprobs = _json(_completion_logprobs(delta.text, call.logprob_count, offset))
        prompt_ids = _json(prompt.tolist()) if is_first and call.return_token_ids else b"null"
        return (
            b'%s%s%s","logprobs":%s,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":%s,"token_ids":%s}]%s'
            % (
                self._starts[delta.index],
                shown,
                delta.text,
                logprobs,
                _json(delta.reason),
                prompt_ids,
                _json(_token_ids(delta.text)) if call.return_token_ids else b"null",
                self._ends(delta),
            )
        )


def _shown_prompt(call: Generation, index: int) -> bytes:
    """The prompt's text as the inside of a JSON string, for `echo`."""
    text = detokenize(call.prompts[index // call.choice_count]).decode("utf-8", "replace")
    return _json(text)[1:-1]


@dataclass(slots=True)
class _Choice:
    text: bytearray = field(default_factory=bytearray)
    reason: str | None = None


class _Body:
    """A whole answer: gathers the choices and is written when the last one has ended."""

    def __init__(self, call: Generation, facts: AnswerFacts) -> None:
        self._call = call
        self._facts = facts
        self._choices = [_Choice() for _ in range(call.choice_count * len(call.prompts))]

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        choice = self._choices[delta.index]
        choice.text += delta.text
        choice.reason = delta.reason
        return b""

    def _whole(self, kind: bytes, choices: Sequence[bytes], usage: Usage, ending: bytes) -> bytes:
        details = {
            "cached_tokens": usage.cached_tokens,
            "created_cache_tokens": usage.created_cache_tokens if self._call.is_chat else None,
            "multimodal_tokens": None,
        }
        told = {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        }
        return (
            b'%s%s],"service_tier":null%s,"usage":%s,%s"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
            % (
                _head(self._facts, kind),
                b",".join(choices),
                _fingerprint(self._facts),
                _json(told),
                ending,
            )
        )


class _ChatBody(_Body):
    def closing(self, usage: Usage) -> bytes:
        call = self._call
        choices = []
        for index, choice in enumerate(self._choices):
            text = bytes(choice.text)
            logprobs = None if call.logprob_count is None else _chat_logprobs(text, call.logprob_count)
            choices.append(
                b'{"index":%d,"message":{"role":"assistant","content":"%s","refusal":null,"annotations":null,'
                b'"audio":null,"function_call":null,"reasoning":null},"logprobs":%s,"finish_reason":%s,'
                b'"stop_reason":null,"token_ids":%s,"routed_experts":null}'
                % (
                    index,
                    text,
                    _json(logprobs),
                    _json(choice.reason),
                    _json(_token_ids(text) if call.return_token_ids else None),
                )
            )
        prompt_ids = call.prompts[0].tolist() if call.return_token_ids else None
        ending = b'"prompt_logprobs":null,"prompt_token_ids":%s,"prompt_text":null,' % _json(prompt_ids)
        return self._whole(b"chat.completion", choices, usage, ending)


class _CompletionBody(_Body):
    def closing(self, usage: Usage) -> bytes:
        call = self._call
        choices = []
        for index, choice in enumerate(self._choices):
            text = bytes(choice.text)
            shown = _shown_prompt(call, index) if call.echo else b""
            logprobs = None
            if call.logprob_count is not None:
                logprobs = _completion_logprobs(text, call.logprob_count, len(shown))
            prompt_ids = call.prompts[index // call.choice_count].tolist() if call.return_token_ids else None
            choices.append(
                b'{"index":%d,"text":"%s%s","logprobs":%s,"finish_reason":%s,"stop_reason":null,"token_ids":%s,'
                b'"prompt_logprobs":null,"prompt_token_ids":%s,"routed_experts":null}'
                % (
                    index,
                    shown,
                    text,
                    _json(logprobs),
                    _json(choice.reason),
                    _json(_token_ids(text) if call.return_token_ids else None),
                    _json(prompt_ids),
                )
            )
        return self._whole(b"text_completion", choices, usage, b"")
