"""A router with a virtual clock over imaginary engines, for tests of routing.

Owns: the clock, the dice (seeded), and short ways to ask and to end an attempt. Does not own: any routing; it calls the
production `Router`. Engines here answer as the test says; nothing is simulated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.blocks import BlockHasher
from router.decision import NoRoute, RouteDecision, RouteRequest
from router.endpoints import Ending, Endpoint, EngineSpeed, Finish
from router.route import Router, RouterConfig

MODEL = "m"

# A round engine for arithmetic by hand: 1 ms per token, no overhead, 10 ms per decode step.
SPEED = EngineSpeed(prefill_tok_per_s=1_000.0, prefill_overhead_s=0.0, decode_s_per_token=0.010)


def endpoint(name: str, speed: EngineSpeed | None = SPEED) -> Endpoint:
    """An endpoint of the test model."""
    return Endpoint(name, f"http://{name}:8000", frozenset({MODEL}), speed=speed)


def prompt(seed: int, tokens: int) -> bytes:
    """Bytes that share nothing with another seed's, 4 to a token."""
    return random.Random(seed).randbytes(tokens * 4)


class Fleet:
    """One router under test with its clock."""

    def __init__(self, endpoints: Sequence[Endpoint], config: RouterConfig | None = None, seed: int = 0) -> None:
        self.now_s = 1_000.0
        self.router = Router(config or RouterConfig())
        self.hasher = BlockHasher(b"secret")
        self.dice = random.Random(seed).random
        self.endpoints = list(endpoints)
        self.router.set_endpoints(self.endpoints, self.now_s)

    def request(self, text: bytes, output_tokens: int = 10, **changes: object) -> RouteRequest:
        """The request for a prompt, with its token count exact."""
        made = RouteRequest(MODEL, self.hasher.chain(MODEL, "", (text,)), len(text) // 4, output_tokens)
        return made._replace(**changes)  # type: ignore[arg-type]  # field values are checked where they are used

    def route(self, request: RouteRequest) -> RouteDecision | NoRoute:
        """Ask the router now."""
        return self.router.route(request, self.now_s, self.dice)

    def pick(self, text: bytes, output_tokens: int = 10, **changes: object) -> RouteDecision:
        """Route a prompt that some endpoint can take."""
        decision = self.route(self.request(text, output_tokens, **changes))
        assert isinstance(decision, RouteDecision), decision
        return decision

    def end(
        self, decision: RouteDecision, outcome: Ending = Ending.COMPLETED, cached_tokens: int | None = None
    ) -> None:
        """End an attempt now, with nothing reported but what is named."""
        tokens = None if cached_tokens is None else decision.ticket.asked_tokens
        self.router.finished(decision.ticket, Finish(outcome, cached_tokens, tokens), self.now_s)

    def start(self, decision: RouteDecision) -> None:
        """Its first token comes now."""
        self.router.first_token(decision.ticket, self.now_s)

    def serve(self, text: bytes, output_tokens: int = 10, cached_tokens: int | None = None) -> RouteDecision:
        """Route a prompt and see it through: prefill and decode take what was predicted, and the cache held what was
        predicted unless `cached_tokens` says otherwise.
        """
        decision = self.pick(text, output_tokens)
        self.router.sent(decision.ticket, self.now_s)
        self.now_s += decision.predicted_ttft_s
        self.start(decision)
        self.now_s += output_tokens * 0.010
        cached = decision.predicted_cached_tokens if cached_tokens is None else cached_tokens
        finish = Finish(Ending.COMPLETED, cached, len(text) // 4, output_tokens)
        self.router.finished(decision.ticket, finish, self.now_s)
        return decision

    def load(self, name: str) -> tuple[int, int, int]:
        """(waiting, decoding, KV tokens) in flight on an endpoint."""
        view = next(row.load for row in self.router.status(self.now_s) if row.endpoint.endpoint_id == name)
        return view.waiting_count, view.decoding_count, view.kv_tokens
