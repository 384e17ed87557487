"""The price of work on one engine, written plainly: what the router's quick loop is held to.

Owns: `price`. Does not own: the terms that are no engine's own (hop, eviction, spread), or the choice. Unit tests check
these lines by hand; a property holds every candidate of `Router.route` to them, to the last bit.
"""

from __future__ import annotations

from router.cost import CHUNK_TOKENS, Speed, Work, prefill_s
from router.endpoints import Load


def price(speed: Speed, load: Load, work: Work, cached_tokens: int, now_s: float) -> tuple[float, float, float, float]:
    """Seconds of (queue, prefill, decode, slowdown) for this work on an engine in this state."""
    new_tokens = work.input_tokens - cached_tokens
    own_prefill_s = speed.prefill_overhead_s + new_tokens / speed.prefill_tok_per_s
    if speed.prefill_s_per_token2:
        own_prefill_s = prefill_s(speed, new_tokens, cached_tokens)
    if not load.kv_tokens:
        return 0.0, own_prefill_s, work.output_tokens * speed.decode_s_per_token, 0.0
    queue_s = load.remaining_s(now_s)  # first: it may move prefills that are due to the decodes
    running = load.decoding_count
    # Who waits now decodes beside this request later. Were they not counted, an engine that has fewer running than the
    # others would look so until their prefills end, and take every request that comes meanwhile.
    step_s = speed.decode_s_per_token + load.request_count * speed.decode_s_per_running
    decode_s = work.output_tokens * step_s
    slowdown_s = load.request_count * (work.output_tokens * speed.decode_s_per_running)
    if running:
        queue_s += new_tokens / CHUNK_TOKENS * step_s
        # Chunked prefill stretches every running request's steps for about as long as the prefill takes. Who waits now
        # runs by then: were they left out, an engine would attract more the longer its queue of prefills is.
        slowdown_s += load.request_count * own_prefill_s
    capacity = speed.kv_capacity_tokens
    if capacity is not None:
        over_tokens = load.kv_tokens + work.input_tokens + work.output_tokens - capacity
        if over_tokens > 0:
            # The requests in flight free their KV over about one answer's time.
            queue_s += decode_s * over_tokens / load.kv_tokens
    return queue_s, own_prefill_s, decode_s, slowdown_s
