"""What a simulated cluster notes down: sums, sketches, the timeline, and events for those who listen.

Owns: what is counted at an arrival, a first token and an end, and when an answer counts as good. Does not own: when any
of that happens (`engine`, `cluster`). Nothing here grows with the number of requests: durations go to sketches,
the timeline folds itself in half when time runs over its last bin, events are handed out and forgotten.
"""

from __future__ import annotations

from perfmodel.simulation.compiling import compiled
from perfmodel.simulation.sketch import bucket_of
from perfmodel.simulation.state import (
    ARRIVED,
    END_TO_END,
    ENDED,
    FINISHED,
    FIRST_TOKEN,
    TIMELINE_BINS,
    TOKENS,
    TPOT,
    TTFT,
    TTFT_COUNT,
    TTFT_SUM,
    Cluster,
)


@compiled
def bin_at(c: Cluster, now_s: float) -> int:
    """The timeline's bin for this time; folds the timeline as often as needed first."""
    totals = c.totals[0]
    while now_s >= totals.bin_s * TIMELINE_BINS:
        for at in range(TIMELINE_BINS):
            for column in range(c.timeline.shape[1]):
                both = 0.0
                if 2 * at < TIMELINE_BINS:
                    both = c.timeline[2 * at, column] + c.timeline[2 * at + 1, column]
                c.timeline[at, column] = both
        totals.bin_s *= 2
    return int(now_s / totals.bin_s)


@compiled
def note_arrival(c: Cluster, r: int) -> None:
    """A request was taken by an engine."""
    request = c.requests[r]
    c.engines[request.engine].routed_count += 1
    c.timeline[bin_at(c, request.arrival_s), ARRIVED] += 1


@compiled
def note_first_scheduled(c: Cluster, e: int, r: int, now_s: float) -> None:
    """It runs for the first time, with `computed` tokens found cached."""
    request = c.requests[r]
    request.cached = request.computed
    request.scheduled_s = now_s
    c.totals[0].prompt_tokens += request.prompt
    c.totals[0].hit_tokens += request.cached
    c.engines[e].prompt_tokens += request.prompt
    c.engines[e].hit_tokens += request.cached


@compiled
def note_first_token(c: Cluster, r: int, now_s: float) -> None:
    """The first token of the answer is out."""
    totals, request = c.totals[0], c.requests[r]
    request.first_s = now_s
    ttft_s = now_s - request.arrival_s
    totals.ttft_count += 1
    totals.ttft_sum_s += ttft_s
    c.sketches[TTFT, bucket_of(ttft_s)] += 1
    at = bin_at(c, now_s)
    c.timeline[at, TTFT_SUM] += ttft_s
    c.timeline[at, TTFT_COUNT] += 1
    if totals.hears:
        tell(c, FIRST_TOKEN, r, now_s)


@compiled
def note_end(c: Cluster, r: int, now_s: float) -> None:
    """The answer is complete. It is good when both promises were kept; one token has no time per output token."""
    totals, request = c.totals[0], c.requests[r]
    totals.completed += 1
    totals.output_tokens += request.output
    totals.end_to_end_sum_s += now_s - request.arrival_s
    c.sketches[END_TO_END, bucket_of(now_s - request.arrival_s)] += 1
    good = request.first_s - request.arrival_s <= totals.slo_ttft_s
    if request.output > 1:
        tpot_s = (now_s - request.first_s) / (request.output - 1)
        totals.tpot_count += 1
        totals.tpot_sum_s += tpot_s
        c.sketches[TPOT, bucket_of(tpot_s)] += 1
        good = good and tpot_s <= totals.slo_tpot_s
    if good:
        totals.good += 1
    at = bin_at(c, now_s)
    c.timeline[at, ENDED] += 1
    c.timeline[at, TOKENS] += request.output
    if totals.hears or request.watched:
        tell(c, FINISHED, r, now_s)
        totals.watched_ended += request.watched


@compiled
def tell(c: Cluster, kind: int, r: int, now_s: float) -> None:
    """Keep an event until the caller of `cluster.advance` takes it."""
    request = c.requests[r]
    at = c.totals[0].event_count
    c.events_s[at] = now_s
    event = c.events[at]
    event[0], event[1], event[2] = kind, request.serial, request.row
    event[3], event[4], event[5] = request.cached, request.prompt, request.output
    c.totals[0].event_count = at + 1
