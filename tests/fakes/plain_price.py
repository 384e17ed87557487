"""The price of work on one engine, written plainly: what the router's quick loop is held to.

Owns: `price`. Does not own: the terms that are no engine's own (hop, eviction, spread), or the choice. Unit tests check
these lines by hand; a property holds every candidate of `Router.route` to them, to the last bit.
"""

from __future__ import annotations

from router.cost import ANSWER_MIN_S, Promise, Speed, Work, decode_danger_s, harm_s, prefill_s
from router.endpoints import Load


def price(
    speed: Speed, load: Load, work: Work, cached_tokens: int, *, recent_s: float = 0.0, now_s: float = 0.0
) -> tuple[float, float, float, float]:
    """Seconds of (queue, prefill, decode, slowdown) for this work on an engine in this state."""
    promise = Promise()
    new_tokens = work.input_tokens - cached_tokens
    own_prefill_s = speed.prefill_overhead_s + new_tokens / speed.prefill_tok_per_s
    if speed.prefill_s_per_token2:
        own_prefill_s = prefill_s(speed, new_tokens, cached_tokens)
    answer_s = max(work.answer_tokens * speed.decode_s_per_token, ANSWER_MIN_S)
    if not load.kv_tokens:
        return 0.0, own_prefill_s, decode_danger_s(promise, speed.decode_s_per_token, recent_s, answer_s), 0.0
    queue_s = load.remaining_s(now_s)  # first: it may move prefills that are due to the decodes
    # Who waits now decodes beside this request later. Were they not counted, an engine that has fewer running than the
    # others would look so until their prefills end, and take every request that comes meanwhile.
    step_s = speed.decode_s_per_token + load.request_count * speed.decode_s_per_running
    slowdown_s = load.request_count * harm_s(promise, step_s, own_prefill_s, work.answer_tokens)
    capacity = speed.kv_capacity_tokens
    if capacity is not None:
        over_tokens = load.kv_tokens + work.input_tokens + work.output_tokens - capacity
        if over_tokens > 0:
            # The requests in flight free their KV over about one answer's time.
            queue_s += work.output_tokens * step_s * over_tokens / load.kv_tokens
    return queue_s, own_prefill_s, decode_danger_s(promise, step_s, recent_s, answer_s), slowdown_s
