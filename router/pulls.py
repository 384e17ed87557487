"""Whether an engine should fetch a prompt's KV from another that holds more of it, before it computes the rest.

Owns: the price of that way for each candidate. Does not own: the other prices (`route`), how an engine is told, or
which engines hold what. Warm wait, fetch and recomputation compete: an engine's row becomes that of the fetch only
where this is cheaper than to compute what it lacks. The link of either engine moves one prompt after the other, so what
was asked of it before is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.cost import Promise, Work, harm_s, prefill_s
from router.decision import Row
from router.site import Site

# A fetched prefix is a second copy of what another engine holds, and what goes for it was somebody's only one. Where
# engines wait longer than this on average, caches are the scarce thing, and what a fetch pushes out is priced in full:
# all of it comes back (not `kv_reuse_ratio`, a quarter), at twice the linear rate for attention's growth over a long
# context. Otherwise an overloaded fleet spends its caches on copies: agents on 4 x 8 H200 had 82 % in time at 14
# copies, and have 89 % so (mooncake 87 %). Below overload that price only keeps fetches away that pay (at 10 copies
# TTFT 434 ms without it, 477 ms with it always, 457 ms so).
_OVERLOAD_S = 2.0
_EVICTION_TIMES = 8.0


def offer_pulls(group: Sequence[Site], rows: list[Row], work: Work, promise: Promise, now_s: float) -> dict[int, Site]:
    """Put the price of a fetch, in `rows`, in the place of dearer ones. Returns whence, by the index of the row."""
    most, source = 0, None
    for site, row in zip(group, rows, strict=True):
        if row[1] is None and row[2] > most and site.pull_s_per_token is not None:
            most, source = row[2], site
    found: dict[int, Site] = {}
    if source is None or source.pull_s_per_token is None:
        return found
    queues_s = [row[3][0] for row in rows if row[1] is None]
    times = _EVICTION_TIMES if sum(queues_s) > _OVERLOAD_S * len(queues_s) else 1.0
    for index, site in enumerate(group):
        endpoint, unfit, cached, terms, total_s = rows[index]
        if unfit is not None or cached >= most or site.pull_s_per_token is None:
            continue
        wait_s = max(site.link_free_s, source.link_free_s, now_s) - now_s
        fetch_s = wait_s + (most - cached) * max(site.pull_s_per_token, source.pull_s_per_token)
        own_s = prefill_s(site.speed, work.input_tokens - most, most)
        others = site.load.request_count if site.load.kv_tokens else 0
        step_s = site.speed.decode_s_per_token + others * site.speed.decode_s_per_running
        slowdown_s = others * harm_s(promise, step_s, own_s, work.answer_tokens)
        queue_s, _, decode_s, hop_s, _, _, evicted_s, _, spread_s = terms
        evicted_s *= times
        work_s = promise.work_ratio * own_s
        made = (queue_s, own_s, decode_s, hop_s, slowdown_s, work_s, evicted_s, fetch_s, spread_s)
        if sum(made) < total_s:
            rows[index] = (endpoint, None, most, made, sum(made))
            found[index] = source
    return found
