"""The scripts that `scripted_engine` plays: everything that goes right or wrong with an engine's answer.

Owns: the steps of an answer, the scripts by name (`SCRIPTS`), the truth record of a request. Does not own: the server
that plays them. Streams have the shape of vLLM 0.32 (tests/recorded): compact JSON, one event per token and choice.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

RECORDED = Path(__file__).parent.parent / "recorded"


@dataclass(frozen=True, slots=True)
class Send:
    """Write `data`, in writes of `piece_bytes` each (0: in one), with `gap_s` after each; it carries `tokens`."""

    data: bytes
    tokens: int = 0
    piece_bytes: int = 0
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class End:
    """How the answer ends early: RST, FIN without the end, or never."""

    how: Literal["reset", "fin", "stall"]


Step = Send | Wait | End


@dataclass(frozen=True, slots=True)
class Script:
    """An answer. `framing`: chunked, with a content-length, ended by the close, or `raw` (steps hold the head too)."""

    name: str
    steps: Iterable[Step]
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("content-type", "text/event-stream; charset=utf-8"),)
    framing: Literal["chunked", "length", "close", "raw"] = "chunked"


@dataclass(slots=True)
class Truth:
    """What happened to one request. Mutable until the answer has ended."""

    number: int
    received_ns: int
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    script: str = ""
    sent: bytearray = field(default_factory=bytearray)
    """The answer's body as written, before framing."""
    tokens_sent: int = 0
    ended: str = ""
    """completed | reset | fin | stalled | client_closed"""
    ended_ns: int | None = None

    def line(self) -> dict[str, Any]:
        """The log record."""
        return {
            "number": self.number, "received_ns": self.received_ns, "method": self.method, "target": self.target,
            "headers": self.headers, "body": self.body.decode("utf-8", "backslashreplace"), "script": self.script,
            "sent_bytes": len(self.sent), "tokens_sent": self.tokens_sent, "ended": self.ended,
            "ended_ns": self.ended_ns,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """What a script may depend on: the request's fields that engines act on, and the script's own options."""

    fields: dict[str, Any]
    options: dict[str, str]
    truth: Truth

    def whole(self, name: str, default: int) -> int:
        """An option as a whole number."""
        return int(self.options.get(name, default))

    @property
    def stream(self) -> bool:
        """The client wants a stream."""
        return bool(self.fields.get("stream"))

    @property
    def usage(self) -> bool:
        """The client wants the final usage chunk."""
        return bool((self.fields.get("stream_options") or {}).get("include_usage"))

    @property
    def usage_each(self) -> bool:
        """The client wants usage in every chunk."""
        return self.usage and bool((self.fields.get("stream_options") or {}).get("continuous_usage_stats"))

    @property
    def choices(self) -> int:
        """Choices wanted."""
        return int(self.fields.get("n") or 1)

    @property
    def tokens(self) -> int:
        """Tokens per choice: the script's option, else the request's limit, else 8."""
        limit = self.fields.get("max_completion_tokens") or self.fields.get("max_tokens") or 8
        return self.whole("tokens", int(limit))

    @property
    def gap_s(self) -> float:
        """Time between tokens."""
        return float(self.options.get("gap_ms", 0)) / 1_000


def event(value: dict[str, Any]) -> bytes:
    """One SSE event, as vLLM writes it: compact JSON, one line."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage_counts(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    """A usage object; `cached` only where the engine would say it."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


def chunk(ask: Ask, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
    """One chat completion chunk."""
    value: dict[str, Any] = {
        "id": ask.options.get("id", f"chatcmpl-{ask.truth.number}"), "object": "chat.completion.chunk",
        "created": 1_700_000_000, "model": ask.fields.get("model", "m"), "choices": choices,
    }  # fmt: skip
    if usage is not None:
        value["usage"] = usage
    return event(value)


def choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """One choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def stream_steps(ask: Ask, upto: int | None = None) -> list[Step]:
    """A stream in vLLM's shape, `choices` interleaved; only its first `upto` tokens per choice when given."""
    prompt = ask.whole("prompt", 17)
    word = ask.options.get("word", "tok")
    steps: list[Step] = []

    def counts(output: int) -> dict[str, Any] | None:
        return usage_counts(prompt, output) if ask.usage_each else None

    indices = range(ask.choices)
    steps += [Send(chunk(ask, [choice(n, {"role": "assistant", "content": ""})], counts(0))) for n in indices]
    total = ask.tokens
    for n in range(1, total + 1):
        if upto is not None and n > upto:
            return steps
        delta = {"content": f"{word}{n} "}
        steps += [Send(chunk(ask, [choice(index, delta)], counts(n)), tokens=1) for index in indices]
        if ask.gap_s:
            steps.append(Wait(ask.gap_s))
    finish = ask.options.get("finish", "length")
    steps += [Send(chunk(ask, [choice(index, {}, finish)], counts(total))) for index in indices]
    if ask.usage:
        final = usage_counts(prompt, total * ask.choices, ask.whole("cached", 0))
        steps.append(Send(chunk(ask, [], final)))
    steps.append(Send(DONE))
    return steps


def whole_answer(ask: Ask) -> bytes:
    """A non-streamed answer in vLLM's shape."""
    total = ask.tokens
    text = "".join(f"tok{n} " for n in range(1, total + 1))
    answers = [
        {"index": n, "message": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": "length"}
        for n in range(ask.choices)
    ]
    value = {
        "id": ask.options.get("id", f"chatcmpl-{ask.truth.number}"), "object": "chat.completion",
        "created": 1_700_000_000, "model": ask.fields.get("model", "m"), "choices": answers,
        "usage": usage_counts(ask.whole("prompt", 17), total * ask.choices, ask.whole("cached", 0)),
    }  # fmt: skip
    return json.dumps(value, separators=(",", ":")).encode()


_JSON = (("content-type", "application/json"),)


def json_script(name: str, body: bytes, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Script:
    """A JSON answer with a content-length."""
    return Script(name, (Send(body),), status, _JSON + headers, "length")


def normal(ask: Ask) -> Script:
    """`tokens` tokens, `gap_ms` apart, `prompt` prompt tokens of which `cached` were cached."""
    if ask.stream:
        return Script("normal", stream_steps(ask))
    body = whole_answer(ask)
    delay_s = float(ask.options.get("delay_ms", 0)) / 1_000
    steps = (Wait(delay_s), Send(body, tokens=ask.tokens * ask.choices))
    return Script("normal", steps, 200, _JSON, "length" if delay_s == 0 else "chunked")


def burst(ask: Ask) -> Script:
    """The whole stream in one write."""
    steps = [step for step in stream_steps(ask) if isinstance(step, Send)]
    return Script("burst", (Send(b"".join(s.data for s in steps), sum(s.tokens for s in steps)),))


def trickle(ask: Ask) -> Script:
    """The stream one byte per write, with characters of 2, 3 and 4 bytes in it."""
    data = b"".join(step.data for step in stream_steps(ask) if isinstance(step, Send))
    data = data.replace(b"tok", "\u00fc\u4f60\U0001f600".encode())
    return Script("trickle", (Send(data, ask.tokens * ask.choices, piece_bytes=ask.whole("piece", 1)),))


def line_ends(ask: Ask) -> Script:
    """The stream with `end=crlf` or `end=cr` line ends and a comment between events."""
    mark = {"crlf": b"\r\n", "cr": b"\r"}[ask.options.get("end", "crlf")]
    steps = [step for step in stream_steps(ask) if isinstance(step, Send)]
    return Script(
        "line_ends",
        [Send((step.data + b": keep-alive\n\n").replace(b"\n", mark), step.tokens) for step in steps],
    )


def cut(ask: Ask) -> Script:
    """`after` tokens, then `how`=reset|fin|stall. With after=-1 the answer's head is never sent."""
    how: Any = ask.options.get("how", "fin")
    after = ask.whole("after", 3)
    if after < 0:
        return Script("cut", (End(how),), framing="raw")
    return Script("cut", [*stream_steps(ask, upto=after), End(how)])


def error_event(ask: Ask) -> Script:
    """`after` tokens, an error event, and the `[DONE]` that vLLM still writes after it."""
    error = {"error": {"message": "EngineCore died.", "type": "InternalServerError", "param": None, "code": 500}}
    return Script("error_event", [*stream_steps(ask, upto=ask.whole("after", 3)), Send(event(error)), Send(DONE)])


def endless(ask: Ask) -> Script:
    """Tokens for ever (a million of them), `gap_ms` apart."""
    options = {**ask.options, "tokens": ask.options.get("tokens", "1000000")}
    ask = Ask(ask.fields, options, ask.truth)

    def steps() -> Iterator[Step]:
        prompt = ask.whole("prompt", 17)
        for n in range(1, ask.tokens + 1):
            counts = usage_counts(prompt, n) if ask.usage_each else None
            yield Send(chunk(ask, [choice(0, {"content": "x"})], counts), tokens=1)
            yield Wait(ask.gap_s)

    return Script("endless", steps())


def falling_usage(ask: Ask) -> Script:
    """Usage in each chunk that falls, and a total below what was counted."""
    total = ask.tokens
    steps = [
        Send(chunk(ask, [choice(0, {"content": "x"})], usage_counts(17, total - n)), tokens=1) for n in range(total)
    ]
    steps.append(Send(chunk(ask, [choice(0, {}, "stop")])))
    return Script("falling_usage", [*steps, Send(chunk(ask, [], usage_counts(17, 1, 99))), Send(DONE)])


def usage_on_last_choice(ask: Ask) -> Script:
    """Usage only in the last chunk, which has a choice (reference gateway 5, row 4): 16111 in, 2 out, 15872 cached."""
    last = chunk(ask, [choice(0, {}, "stop")], usage_counts(16_111, 2, 15_872))
    words = [Send(chunk(ask, [choice(0, {"content": "hi"})]), tokens=1) for _ in range(2)]
    return Script("usage_on_last_choice", [*words, Send(last), Send(DONE)])


def no_usage(ask: Ask) -> Script:
    """An engine that ignores `stream_options`."""
    plain = Ask({**ask.fields, "stream_options": None}, ask.options, ask.truth)
    if ask.stream:
        return Script("no_usage", stream_steps(plain))
    value = json.loads(whole_answer(ask))
    del value["usage"]
    return json_script("no_usage", json.dumps(value).encode())


def tool_calls(ask: Ask) -> Script:
    """Three tool calls, their argument fragments interleaved, opener first (reference gateway 5, row 26)."""
    deltas: list[dict[str, Any]] = [
        {"index": n, "id": f"call_{n}", "type": "function", "function": {"name": f"f{n}", "arguments": ""}}
        for n in range(3)
    ]
    for part in ('{"a', '":"\\"error\\"', '","usage":{}}'):
        deltas += [{"index": n, "function": {"arguments": part}} for n in (2, 0, 1)]
    steps = []
    for n, delta in enumerate(deltas, 1):
        counts = usage_counts(17, n) if ask.usage_each else None
        steps.append(Send(chunk(ask, [choice(0, {"tool_calls": [delta]})], counts), tokens=1))
    steps.append(Send(chunk(ask, [choice(0, {}, "tool_calls")], usage_counts(17, 12) if ask.usage_each else None)))
    if ask.usage:
        steps.append(Send(chunk(ask, [], usage_counts(17, 12, 0))))
    return Script("tool_calls", [*steps, Send(DONE)])


def logprobs(ask: Ask) -> Script:
    """A chunk whose token is a part of a character (reference gateway 5, row 27)."""
    token = {"token": " \ufffd", "logprob": -0.5, "bytes": [240, 159], "top_logprobs": []}
    one = {"index": 0, "delta": {"content": " \ufffd"}, "logprobs": {"content": [token]}, "finish_reason": None}
    steps = [Send(chunk(ask, [one], usage_counts(17, 1) if ask.usage_each else None), tokens=1)]
    steps.append(Send(chunk(ask, [choice(0, {}, "stop")], usage_counts(17, 1) if ask.usage_each else None)))
    if ask.usage:
        steps.append(Send(chunk(ask, [], usage_counts(17, 1, 0))))
    return Script("logprobs", [*steps, Send(DONE)])


def big_event(ask: Ask) -> Script:
    """An event of `size` bytes (200 kB), larger than any line buffer."""
    word = "w" * ask.whole("size", 200_000)
    longer = Ask(ask.fields, {**ask.options, "word": word, "tokens": "1"}, ask.truth)
    return Script("big_event", stream_steps(longer))


def compressed(ask: Ask) -> Script:
    """The stream as gzip, although nobody asked for it."""
    data = b"".join(step.data for step in stream_steps(ask) if isinstance(step, Send))
    headers = (("content-type", "text/event-stream"), ("content-encoding", "gzip"))
    packed = gzip.compress(data, mtime=0)
    return Script("compressed", (Send(packed, ask.tokens, piece_bytes=ask.whole("piece", 0)),), 200, headers)


def status(ask: Ask) -> Script:
    """An HTTP error: `code`, and `retry_after` seconds where given."""
    code = ask.whole("code", 500)
    after = ask.options.get("retry_after")
    body = {"error": {"message": f"stub says {code}", "type": "StubError", "param": None, "code": code}}
    extra = () if after is None else (("retry-after", after),)
    return json_script("status", json.dumps(body).encode(), code, extra)


def html(ask: Ask) -> Script:
    """A 502 of some proxy: no JSON at all."""
    return Script("html", (Send(b"<html>Bad Gateway</html>"),), 502, (("content-type", "text/html"),), "length")


def close_delimited(ask: Ask) -> Script:
    """The stream with no length: its end is the end of the connection (HTTP/1.0)."""
    return Script("close_delimited", stream_steps(ask), framing="close")


def echo(ask: Ask) -> Script:
    """What the engine got: target, headers and raw body, as JSON."""
    truth = ask.truth
    value = {
        "target": truth.target, "headers": truth.headers, "body": base64.b64encode(truth.body).decode(),
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "echo"}, "finish_reason": "stop"}],
        "usage": usage_counts(1, 1, 0),
    }  # fmt: skip
    return json_script("echo", json.dumps(value).encode())


def recorded(ask: Ask) -> Script:
    """A recorded answer: `file` under tests/recorded, with `code` as its status."""
    name = ask.options["file"]
    path = (RECORDED / name).resolve()
    if RECORDED.resolve() not in path.parents:
        raise KeyError(name)
    data = path.read_bytes()
    if path.suffix != ".sse":
        return json_script("recorded", data, ask.whole("code", 200))
    events = [Send(part + b"\n\n", tokens=1) for part in data.split(b"\n\n") if part]
    return Script("recorded", events)


SCRIPTS: dict[str, Callable[[Ask], Script]] = {
    made.__name__: made
    for made in (
        normal, burst, trickle, line_ends, cut, error_event, endless, falling_usage, usage_on_last_choice, no_usage,
        tool_calls, logprobs, big_event, compressed, status, html, close_delimited, echo, recorded,
    )
}  # fmt: skip
