"""What engines hold of a prompt by their own KV events, and by picks so recent that no event can tell of them yet.

Owns: putting the events' word in the place of the router's own history, the memory of recent picks, and which of the
two counts. Does not own: the history (`prefix_index`), the events (`kv_index`; a request brings what they say), or
trust.

Events are late: by the time to the first token and a little more. Eight siblings of one cold prefix that arrive within
50 ms would each find it nowhere and be spread over eight engines. So the blocks of a pick count as held until its
prefill should be done and told of, as far as a later prompt shares them.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import RouteRequest
from router.site import Site

# How long after the predicted first token events may still be under way: an engine's batching, a hop, our own turns
# (llm-d and vllm-project/router keep speculative entries for 2 s, router notes 1.1).
_TELLING_S = 2.0

# Recent picks that are kept for each engine: more than it starts in the time above.
_RECENT_MAX_COUNT = 64

# Cached tokens of an endpoint that cannot be picked.
UNFIT = -1


def correct(
    found: list[int],
    group: Sequence[Site],
    request: RouteRequest,
    ends_bytes: Sequence[int],
    tokens_now: tuple[int, float],
) -> None:
    """Put into `found`, in the order of `group`, the tokens that each engine whose events are heard will find cached.

    `tokens_now`: the prompt's tokens, and the time in seconds. The last token is always computed.
    """
    if request.told is None:
        return
    told, (input_tokens, now_s) = request.told.held_ratio, tokens_now
    for index, site in enumerate(group):
        ratio = told.get(site.endpoint.endpoint_id)
        if ratio is None or found[index] == UNFIT:
            continue
        if site.recent:
            ratio = max(ratio, _recent_ratio(site, request, ends_bytes, now_s))
        found[index] = min(int(input_tokens * ratio * site.trust_ratio), input_tokens - 1)


def note(site: Site, request: RouteRequest, first_token_s: float, now_s: float) -> None:
    """The prompt was sent there, and its first token is expected after so many seconds."""
    if request.told is None or not request.chain.hashes:
        return
    _forget_told(site, now_s)
    if len(site.recent) >= _RECENT_MAX_COUNT:
        site.recent.popleft()
    site.recent.append((now_s + first_token_s + _TELLING_S, request.chain.hashes))


def _forget_told(site: Site, now_s: float) -> None:
    while site.recent and site.recent[0][0] <= now_s:
        site.recent.popleft()


def _recent_ratio(site: Site, request: RouteRequest, ends_bytes: Sequence[int], now_s: float) -> float:
    """The share of the prompt that the longest of the recent picks has in common with it."""
    _forget_told(site, now_s)
    hashes, total_bytes = request.chain
    longest = max((_common_blocks(hashes, each) for _, each in site.recent), default=0)
    return ends_bytes[longest - 1] / total_bytes if longest else 0.0


def _common_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """How many blocks two chains share: each hash names all before it, so the answer can be halved for."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
