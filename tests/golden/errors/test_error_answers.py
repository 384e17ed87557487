"""Every error that a caller can get, word for word: clients and dashboards match on them.

`answers.json` holds them. A change of it is a change of the API: `python -m tests.golden.errors.test_error_answers`
writes it anew, and the difference belongs into the review.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controlplane import faults
from controlplane.adapters import openai_wire
from controlplane.adapters.openai_http import OpenAiEdge
from controlplane.errors import BadRequest, EngineLost, EngineTimeout, EngineUnreachable
from controlplane.ports import Fault, NoTarget, NoTargetReason
from controlplane.rate_limit import LimitView, RefusalReason, Refused
from controlplane.request import Operation
from controlplane.tenancy import DenialReason, Denied, Dimension, Limit
from tests.fakes.serve_ports import FakeSink, a_call

GOLDEN = Path(__file__).with_name("answers.json")
VIEW = LimitView(60, 41, 19.0, 1_000, 12, 59.28)
BODIES = {
    "not json": b"{",
    "not an object": b"[]",
    "no model": b'{"messages":[{}]}',
    "no messages": b'{"model":"m"}',
    "wrong type": b'{"model":"m","messages":"hi"}',
    "wrong n": b'{"model":"m","messages":[{}],"n":0}',
    "twice": b'{"model":"m","messages":[{}],"stream":true,"stream":false}',
    "stream options": b'{"model":"m","messages":[{}],"stream_options":{"include_usage":true}}',
    "not utf-8": b'{"model":"\xff"}',
}
ENGINE_ANSWERS: dict[str, tuple[int, bytes]] = {
    "openai form": (400, b'{"error":{"message":"bad n","type":"BadRequestError","param":"n","code":400}}'),
    "flat form": (422, b'{"object":"error","message":"bad n","type":"E","param":null,"code":422}'),
    "fastapi form": (422, b'{"detail":[{"loc":["body","n"],"msg":"too small","type":"value_error"}]}'),
    "context length": (400, b'{"error":{"message":"This model\'s maximum context length is 8 tokens.","code":400}}'),
    "html": (502, b"<html>Bad Gateway</html>"),
    "own failure": (500, b'{"error":{"message":"EngineCore died.","code":500}}'),
    "busy": (503, b'{"error":{"message":"The queue is full.","code":503}}'),
    "busy, rate": (429, b""),
    "our credentials": (401, b'{"error":{"message":"Invalid API key sk-of-the-engine"}}'),
    "redirect": (307, b""),
}


def limit(dimension: Dimension, model: str | None = None) -> Limit:
    """A limit of 1000 a minute."""
    return Limit("l", "org", "org", model, dimension, 1_000, 60, 1_000)


def cases() -> Iterator[tuple[str, Fault, LimitView | None]]:
    """Name, fault, limits shown."""
    for name in ("SPOOL_FULL", "TRUNCATED", "ENGINE_FAILED", "DRAINED", "DEFECT"):
        yield f"fault: {name.lower()}", getattr(faults, name), None
    for error in (EngineUnreachable("e1", "x"), EngineLost("e1", "x"), EngineTimeout("e1", "connect", 2.0),
                  EngineTimeout("e1", "first_byte", 120.0), EngineTimeout("e1", "idle", 60.0),
                  EngineTimeout("e1", "total", 1_800.0)):  # fmt: skip
        deadline = f" {error.deadline}" if isinstance(error, EngineTimeout) else ""
        yield f"engine: {type(error).__name__}{deadline}", faults.engine_fault(error), VIEW
    for name, (status, body) in ENGINE_ANSWERS.items():
        headers = ((b"retry-after", b"7"),) if status in (429, 503) else ()
        yield f"engine answers: {name}", faults.engine_answer_fault(status, headers, body), None
    yield "no model", faults.no_such_model("gpt-x"), None
    yield "no engine", faults.unroutable("m", NoTarget(NoTargetReason.NO_ENGINE, 2.5)), None
    for dimension in Dimension:
        refused = Refused(RefusalReason.RATE_LIMIT, limit(dimension), 240, 12, 13.68, VIEW)
        yield f"limit: {dimension.value}", Fault(429, "", "requests", refused=refused), VIEW
    large = Refused(RefusalReason.TOO_LARGE, limit(Dimension.INPUT_TOKENS, "m"), 2_000, 1_000, None, VIEW)
    yield "limit: too large", Fault(429, "", "requests", refused=large), VIEW
    gone = Refused(RefusalReason.STORE_UNAVAILABLE, None, 0, 0, 1.0, LimitView())
    yield "limit: no store", Fault(429, "", "requests", refused=gone), None
    for reason in DenialReason:
        yield f"denied: {reason.value}", openai_wire.denial_fault(Denied(reason, "inference")), None
    for name, body in BODIES.items():
        try:
            openai_wire.parse(Operation.CHAT, body)
        except BadRequest as error:
            yield f"body: {name}", openai_wire.bad_request_fault(error), None


async def render(fault: Fault, view: LimitView | None) -> dict[str, Any]:
    """The answer as a caller gets it."""
    sink = FakeSink()
    status = await OpenAiEdge().fail(sink, a_call(), fault, view)
    assert status == sink.status
    headers = {name.decode(): value.decode() for name, value in sink.headers}
    assert int(headers.pop("content-length")) == len(sink.data)
    return {"status": status, "headers": headers, "body": json.loads(sink.data)}


def answers() -> dict[str, Any]:
    """Every error by name."""
    found: dict[str, Any] = {name: asyncio.run(render(fault, view)) for name, fault, view in cases()}
    found["inside a stream"] = OpenAiEdge().stream_fault(faults.TRUNCATED).decode()
    return found


def test_every_error_is_what_it_was() -> None:
    assert answers() == json.loads(GOLDEN.read_text())


def test_every_error_has_openais_form() -> None:
    for name, answer in answers().items():
        if isinstance(answer, str):
            continue
        assert set(answer["body"]) == {"error"}, name
        error = answer["body"]["error"]
        assert set(error) == {"message", "type", "param", "code"}, name
        assert error["code"] is None or isinstance(error["code"], str), name
        assert isinstance(error["message"], str), name
        assert error["message"], name
        assert ("retry-after" in answer["headers"]) == ("retry-after-ms" in answer["headers"]), name
        assert "sk-of-the-engine" not in json.dumps(answer), name
        if answer["status"] in (429, 503):
            headers = answer["headers"]
            assert "retry-after" in headers or headers.get("x-should-retry") == "false", name


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(answers(), indent=1, ensure_ascii=False) + "\n")
