"""The fleet of engines behind the request path: the router's choice, the engine's wire, and why it was chosen.

Owns: joining `router` (which engine), `openai_wire` (the body as that engine must get it) and `engine_http` (sending
it), or `engine_pair` where two engines share a request, keeping explained decisions for a while, and telling the
operator's log why an engine cannot be reached (a client is only told that it cannot). Does not own: the rules of any of
them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from billing.metering import Meter
from billing.token_usage import Usage
from controlplane.adapters import openai_wire
from controlplane.adapters.engine_http import EngineCall, EngineClient
from controlplane.adapters.engine_pair import EnginePairs, LegName, LegWire, PairCall, PairRun
from controlplane.disaggregation import DEFAULT_BOOTSTRAP_PORT, HANDSHAKES
from controlplane.errors import EngineUnreachable
from controlplane.ports import Answer, AttemptEnd, Call, Deadlines, ModelFacts, NoTarget, NoTargetReason, Target
from controlplane.request import Operation
from router.adapters.discovery import ssl_context
from router.blocks import BlockHasher
from router.decision import NoRoute, NoRouteReason, RouteDecision, RouteRequest, Told
from router.endpoints import Ending, Endpoint, Finish
from router.errors import EndpointsError
from router.pairing import PairDecision
from router.prompt_forms import PromptShape
from router.route import Router
from router.volatile_prefix import LOOKED_AT_BYTES, VolatilePrefixes

_log = logging.getLogger(__name__)

# Engines that accept `continuous_usage_stats` and `cache_salt` (read from their request schemas: vLLM 0.32 OpenAPI in
# tests/recorded; the simulated engine speaks the same; SGLang's public source, whose older versions pass over a salt).
# Others get plain `include_usage`.
_CONTINUOUS_USAGE = frozenset({"vllm", "sglang", "sim"})
CACHE_SALT_KINDS = frozenset({"vllm", "sim", "sglang"})
# A shorter prompt loses little when it is not found in a cache: a thousand tokens.
_VOLATILE_MIN_BYTES = 4_096
# Endpoints whose connection facts are kept; more than a router can hold.
_MAX_WIRES = 10_000
_PATHS: Mapping[Operation, bytes] = {Operation.CHAT: b"/v1/chat/completions", Operation.COMPLETION: b"/v1/completions"}
_SHAPES: Mapping[Operation, PromptShape] = {
    Operation.CHAT: PromptShape.CHAT,
    Operation.COMPLETION: PromptShape.COMPLETION,
}


class DecisionLog(Protocol):
    """Where explained decisions are kept for a while."""

    def put(self, request_id: str, org_id: str, record: Mapping[str, Any]) -> None: ...


class ExactKnowledge(Protocol):
    """Whoever hears from engines what they hold (`router.adapters.exact_prefixes`)."""

    def knows(self, model: str) -> bool: ...
    async def read(self, model: str, shape: PromptShape, body: bytes, salt: str) -> object | None:
        """The prompt as engines name its blocks; None: not known."""
        ...

    def told(self, prompt: Any) -> Told:
        """What engines hold now of what `read` returned."""
        ...


class PairChooser(Protocol):
    """Who says that two engines should share a request."""

    def route_split(
        self, request: RouteRequest, now_s: float, dice: Callable[[], float], choices: int
    ) -> PairDecision | RouteDecision | NoRoute:
        """As `Router.route`, or two engines where that is cheaper. Both tickets of a pair must end."""
        ...


class ModelNames(Protocol):
    """The operator's model aliases, as the key feed holds them now."""

    def alias(self, name: str) -> ModelFacts | None: ...


@dataclass(frozen=True, slots=True)
class FleetDeps:
    """What the fleet stands on."""

    router: Router
    hasher: BlockHasher
    client: EngineClient
    names: ModelNames
    decisions: DecisionLog
    monotonic_s: Callable[[], float]
    dice: Callable[[], float]
    learning: Callable[[], bool]
    """Whether an engine that was just listed has yet to tell its models."""
    engine_key: Callable[[str], str | None]
    """The secret in the environment variable that an endpoint names."""
    pairs: PairChooser | None = None
    """None: every request runs on one engine."""
    exact: ExactKnowledge | None = None
    """None: no engine's KV events are heard."""
    volatile: VolatilePrefixes | None = None
    """None: nobody looks whether prompts change near their beginning."""
    volatile_found: Callable[[str], None] = lambda model: None
    """Such a prompt came for this model."""


@dataclass(frozen=True, slots=True)
class _Wire:
    """What is the same in every request to one endpoint, as the endpoints file describes it now."""

    endpoint: Endpoint
    host: str
    port: int
    tls: ssl.SSLContext | None
    server_name: str | None
    heads: Mapping[Operation, bytes]


@dataclass(frozen=True, slots=True)
class _Split:
    """A picked pair: the router's handles and what becomes of the two legs."""

    request_id: str
    decision: PairDecision
    run: PairRun


class EngineFleet:
    """The `Fleet` port over the production router. Mutable: caches each endpoint's connection facts."""

    def __init__(self, deps: FleetDeps, default_max_output_tokens: int) -> None:
        self._d = deps
        self._default_max_output_tokens = default_max_output_tokens
        self._pairs = EnginePairs(deps.client, secrets.randbits)
        self._wires: dict[str, _Wire] = {}
        self._splits: dict[str, _Split] = {}
        """By request: its attempt on two engines, until that has ended."""
        self._unreached: dict[str, str] = {}
        """Why an engine could not be reached the last time; the log has it."""
        self._volatile_told: set[tuple[str, str]] = set()
        """(org, model) of which the log says that their prompts change near the beginning."""

    def model(self, name: str) -> ModelFacts | NoTarget:
        """What is known of a model name.

        No engine has it: that is final, unless the operator named it or an engine has yet to tell what it serves.
        """
        alias = self._d.names.alias(name)
        if (alias.served if alias is not None else name) in self._d.router.models:
            return alias or ModelFacts(name, self._default_max_output_tokens)
        if alias is not None or self._d.learning():
            return NoTarget(NoTargetReason.NO_ENGINE, None)
        return NoTarget(NoTargetReason.NO_SUCH_MODEL, None)

    async def read(self, call: Call, served: str) -> object | None:
        """The prompt as the blocks of its model's engines, where their events are heard."""
        if self._d.volatile is not None and len(call.request.body) >= _VOLATILE_MIN_BYTES:
            self._look_for_volatile(self._d.volatile, call, served)
        exact = self._d.exact
        if exact is None or not exact.knows(served):
            return None
        shape = _SHAPES[call.request.operation]
        return await exact.read(served, shape, call.request.body, call.principal.cache_salt)

    def _look_for_volatile(self, volatile: VolatilePrefixes, call: Call, served: str) -> None:
        """Whether the client changes its prompt near the beginning from turn to turn: said once, and counted."""
        org_id, left, parts = call.principal.org_id, LOOKED_AT_BYTES, []
        for part in call.request.prompt_parts:
            parts.append(bytes(part[:left]))
            left -= len(parts[-1])
        found = volatile.turn(org_id, served, None, b"".join(parts))
        if found is None:
            return
        self._d.volatile_found(served)
        if (org_id, served) not in self._volatile_told and len(self._volatile_told) < _MAX_WIRES:
            self._volatile_told.add((org_id, served))
            _log.warning(
                "Prompts of %s to %s change near byte %d from turn to turn: nothing after it is found in a cache.",
                org_id, served, found.offset_bytes,
            )  # fmt: skip

    def pick(self, call: Call, served: str, exclude: frozenset[str], read: object | None) -> Target | NoTarget:
        """The engine for the next attempt; its load counts from here on."""
        request, exact = call.request, self._d.exact
        chain = self._d.hasher.chain(served, call.principal.cache_salt, request.prompt_parts)
        output_tokens = request.max_output_tokens or self._default_max_output_tokens
        if self._splits:
            exclude = self._at_fault(call, exclude)
        wanted = RouteRequest(
            served, chain, request.estimated_input_tokens, output_tokens, exclude, request.wish.stream,
            exact.told(read) if exact is not None and read is not None else None,
        )  # fmt: skip
        now_s, pairs = self._d.monotonic_s(), self._d.pairs
        if pairs is None:
            decision = self._d.router.route(wanted, now_s, self._d.dice)
        else:
            made = pairs.route_split(wanted, now_s, self._d.dice, request.choices)
            if isinstance(made, PairDecision):
                return self._split(call, made)
            decision = made
        if isinstance(decision, NoRoute):
            known = decision.reason is not NoRouteReason.NO_SUCH_MODEL
            reason = NoTargetReason.NO_ENGINE if known else NoTargetReason.NO_SUCH_MODEL
            return NoTarget(reason, decision.retry_after_s)
        endpoint, summary = decision.endpoint, decision.summary() if call.explain else ""
        cached_tokens = decision.predicted_cached_tokens
        return Target(endpoint.endpoint_id, endpoint.pool, endpoint.incarnation, cached_tokens, summary, decision)

    async def send(
        self, target: Target, call: Call, served: str, limits: Deadlines, on_send: Callable[[], None]
    ) -> Answer:
        """Send the client's body, with our fields edited in place. Raises EngineError."""
        if isinstance(target.ticket, _Split):
            return await self._send_pair(target.ticket, call, served, limits, on_send)
        decision = _decision(target)
        endpoint = decision.endpoint
        wire = self._wires.get(endpoint.endpoint_id)
        if wire is None or (wire.endpoint is not endpoint and wire.endpoint != endpoint):
            wire = await self._reach(endpoint)
        request = call.request
        body = self._body(call, served, endpoint)
        length = sum(map(len, body))
        head = b"%scontent-length: %d\r\nx-request-id: %s\r\n\r\n" % (
            wire.heads[request.operation], length, call.request_id.encode(),
        )  # fmt: skip
        engine_call = EngineCall(  # in the order of its fields: to name ten costs as much again
            endpoint.endpoint_id, wire.host, wire.port, head, body, limits.connect_s, limits.first_byte_s,
            wire.tls, wire.server_name, on_send,
        )  # fmt: skip
        try:
            answer = await self._d.client.send(engine_call)
        except EngineUnreachable as error:
            self._note_unreached(error)
            raise
        if self._unreached:
            self._unreached.pop(endpoint.endpoint_id, None)
        return answer

    def _body(self, call: Call, served: str, endpoint: Endpoint) -> list[bytes | memoryview]:
        """The client's body with our fields as this engine must get them."""
        request = call.request
        fields = openai_wire.OwnedFields(
            model_served=served,
            cache_salt=call.principal.cache_salt if endpoint.kind in CACHE_SALT_KINDS else None,
            include_usage=request.wish.stream,
            continuous_usage=request.wish.stream and endpoint.kind in _CONTINUOUS_USAGE,
        )
        return openai_wire.apply_edits(request, fields)

    # -- two engines ---------------------------------------------------------------------------------------------------

    def _at_fault(self, call: Call, exclude: frozenset[str]) -> frozenset[str]:
        """The engine to keep away from after an attempt on two: the one that failed. `serve` knows the decoding one."""
        lost = self._splits.get(call.request_id)
        if lost is None or lost.run.fault is not LegName.PREFILL:
            return exclude
        pair = lost.decision
        return exclude - {pair.decode.endpoint.endpoint_id} | {pair.prefill.endpoint.endpoint_id}

    def _split(self, call: Call, pair: PairDecision) -> Target:
        def prefilled(usage: Usage) -> None:
            # Its one token is not an answer's length: the model's mean is not to learn from it.
            now_s, ticket = self._d.monotonic_s(), pair.prefill.ticket
            self._d.router.first_token(ticket, now_s)
            report = Finish(Ending.COMPLETED, usage.cached_input_tokens, usage.input_tokens)
            self._d.router.finished(ticket, report, now_s)

        split = self._splits[call.request_id] = _Split(call.request_id, pair, PairRun(prefilled))
        endpoint, summary = pair.decode.endpoint, pair.summary() if call.explain else ""
        cached_tokens = pair.prefill.predicted_cached_tokens
        return Target(endpoint.endpoint_id, endpoint.pool, endpoint.incarnation, cached_tokens, summary, split)

    async def _send_pair(
        self, split: _Split, call: Call, served: str, limits: Deadlines, on_send: Callable[[], None]
    ) -> Answer:
        """Send to two engines. Raises EngineError, and knows then which of the two it was."""
        pair, request = split.decision, call.request
        try:
            legs = [self._leg(await self._reach(each.endpoint), call, on_send) for each in (pair.prefill, pair.decode)]
            pair_call = PairCall(
                handshake=HANDSHAKES[pair.decode.endpoint.kind],
                operation=request.operation,
                request_id=call.request_id,
                body=b"".join(self._body(call, served, pair.decode.endpoint)),
                stream=request.wish.stream,
                choices=request.choices,
                limits=limits,
                prefill=legs[0],
                decode=legs[1],
            )
            answer = await self._pairs.send(pair_call, split.run)
        except EngineUnreachable as error:
            is_prefill = error.endpoint_id == pair.prefill.endpoint.endpoint_id
            split.run.blame(LegName.PREFILL if is_prefill else LegName.DECODE)
            self._note_unreached(error)
            raise
        if self._unreached:
            self._unreached.pop(pair.prefill.endpoint.endpoint_id, None)
            self._unreached.pop(pair.decode.endpoint.endpoint_id, None)
        return answer

    def _leg(self, wire: _Wire, call: Call, on_send: Callable[[], None]) -> LegWire:
        head = b"%sx-request-id: %s\r\n" % (wire.heads[call.request.operation], call.request_id.encode())
        engine_call = EngineCall(
            wire.endpoint.endpoint_id, wire.host, wire.port, head, (), 0.0, 0.0, wire.tls, wire.server_name, on_send
        )
        host = f"[{wire.host}]" if ":" in wire.host else wire.host
        return LegWire(engine_call, host, wire.endpoint.bootstrap_port or DEFAULT_BOOTSTRAP_PORT)

    def _finish_pair(self, split: _Split, end: AttemptEnd) -> None:
        """Release what both legs were counted for. A leg whose sibling failed was only cancelled; the decode leg's
        cached tokens say nothing of its cache.
        """
        if self._splits.get(split.request_id) is split:
            del self._splits[split.request_id]
        ours, theirs = end.ending, Ending.CANCELLED
        if split.run.fault is LegName.PREFILL:
            ours, theirs = theirs, Ending.FAILED if split.run.no_hand_over else ours
        now_s, pair = self._d.monotonic_s(), split.decision
        self._d.router.finished(pair.prefill.ticket, Finish(theirs, retry_after_s=end.retry_after_s), now_s)
        report = Finish(ours, None, end.input_tokens, end.output_tokens, end.retry_after_s)
        self._d.router.finished(pair.decode.ticket, report, now_s)

    # ------------------------------------------------------------------------------------------------------------------

    def meter(self, target: Target, call: Call) -> Meter:
        """A meter for the stream of this attempt."""
        request = call.request
        return Meter(
            choices=request.choices,
            keep_usage_chunk=request.wish.include_usage,
            keep_continuous_usage=request.wish.continuous_usage,
            now_s=self._d.monotonic_s(),
        )

    def first_token(self, target: Target) -> None:
        """The engine's prefill of this attempt is done."""
        self._d.router.first_token(_decision(target).ticket, self._d.monotonic_s())

    def finished(self, target: Target, end: AttemptEnd) -> None:
        """The attempt has ended: its load is released and the router learns."""
        if isinstance(target.ticket, _Split):
            return self._finish_pair(target.ticket, end)
        report = Finish(end.ending, end.cached_tokens, end.input_tokens, end.output_tokens, end.retry_after_s)
        self._d.router.finished(_decision(target).ticket, report, self._d.monotonic_s())

    def _note_unreached(self, error: EngineUnreachable) -> None:
        """One line in the log when it begins or its reason changes, not one a request."""
        why = str(error)
        if self._unreached.get(error.endpoint_id) == why:
            return
        if len(self._unreached) >= _MAX_WIRES:
            self._unreached.clear()
        self._unreached[error.endpoint_id] = why
        _log.warning("%s cannot be reached: %s", error.endpoint_id, why)

    def explain(self, target: Target, call: Call) -> None:
        """Keep the whole record of this choice for `/admin/v1/decisions/{request_id}`."""
        made = target.ticket.decision if isinstance(target.ticket, _Split) else _decision(target)
        org_id, record = call.principal.org_id, dict(made.record())
        if self._d.volatile is not None:
            seen = self._d.volatile.count(org_id, str(record["model"]))
            last = None if seen.last is None else seen.last._asdict()
            record["volatile_prefix"] = {**asdict(seen), "last": last}
        self._d.decisions.put(call.request_id, org_id, record)

    async def _reach(self, endpoint: Endpoint) -> _Wire:
        """How this endpoint is reached. Raises EngineUnreachable."""
        wire = self._wires.get(endpoint.endpoint_id)
        if wire is not None and (wire.endpoint is endpoint or wire.endpoint == endpoint):
            return wire
        try:
            return await self._connect_facts(endpoint)
        except EngineUnreachable as error:
            self._note_unreached(error)
            raise

    async def _connect_facts(self, endpoint: Endpoint) -> _Wire:
        """Work out and keep how this endpoint is reached. Raises EngineUnreachable if its TLS files cannot be used."""
        parts = urlsplit(endpoint.url)
        host = parts.hostname or "127.0.0.1"
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        secret = self._d.engine_key(endpoint.api_key_env) if endpoint.api_key_env else None
        # a key out of a file often ends in a line feed, which would end the header
        authorization = b"authorization: Bearer %s\r\n" % secret.strip().encode() if secret else b""
        prefix = parts.path.rstrip("/").removesuffix("/v1").encode()
        same = b"content-type: application/json\r\naccept-encoding: identity\r\n" + authorization
        authority = parts.netloc.rpartition("@")[2].encode()
        heads = {
            operation: b"POST %s%s HTTP/1.1\r\nhost: %s\r\n%s" % (prefix, path, authority, same)
            for operation, path in _PATHS.items()
        }
        try:
            tls = await asyncio.to_thread(ssl_context, endpoint.tls) if secure else None
        except EndpointsError as error:
            raise EngineUnreachable(endpoint.endpoint_id, str(error)) from None
        if len(self._wires) >= _MAX_WIRES:  # ids of engines that are gone
            self._wires.clear()
        wire = self._wires[endpoint.endpoint_id] = _Wire(endpoint, host, port, tls, endpoint.tls.server_name, heads)
        return wire


def _decision(target: Target) -> RouteDecision:
    """The choice; of two engines that of the one that decodes."""
    if isinstance(target.ticket, _Split):
        return target.ticket.decision.decode
    assert isinstance(target.ticket, RouteDecision)
    return target.ticket
