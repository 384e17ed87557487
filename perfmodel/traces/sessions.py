"""Sessions: turns that wait for the answer before, think, and re-send a prompt that has grown.

Owns: agent sessions in both readings of the published figures, chat sessions and voice calls, each as columns of steps
with times counted from the session's start. Does not own: when sessions start or which blocks they share
(`generators`).
The quoted agent figures (62.6 minutes a session, 9.2 requests, a median wait of 25 minutes, 92 % of the time human)
cannot all be true of one population: by Markov's inequality a mean wait of 7 minutes forbids a median of 25.
`TRACELAB` follows the published tables (arXiv 2606.30560), whose mean session lasts 8.2 hours; `QUOTED` keeps the same
steps and meets the quoted figures by shorter waits. Capacity is planned with TRACELAB.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from perfmodel.traces.lengths import Lengths, lognormal

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class AgentReading(StrEnum):
    """Which reading of the published agent figures a generator follows."""

    TRACELAB = "tracelab"
    QUOTED = "quoted"


@dataclass(frozen=True, slots=True, eq=False)
class SessionSteps:
    """n engine calls of `session_count` sessions, session after session, each in order.

    `session` int64[n] counts from 0. `human` bool[n]: a person started this call, not a tool's result. `wait_s`: from
    the end of the call before to this one's start, NaN for a first call. `engine_s`: what the engine takes in open
    loop. `offset_s`: start after the session's. `input_tokens` is the whole prompt; `epoch` int64[n] changes when a
    prompt is compacted, so that a prompt contains the one before it where the epoch is the same.
    """

    session_count: int
    session: Ints
    human: npt.NDArray[np.bool_]
    wait_s: Floats
    engine_s: Floats
    offset_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    epoch: Ints

    def __len__(self) -> int:
        """Calls of all sessions."""
        return len(self.session)


# Agent sessions, all fitted to TraceLab's tables; medians with the standard deviation of the logarithm.
# Human requests of a session: one with this chance, else a lognormal number of at least two; more at weekends
# [assumed].
_SINGLE_SHARE = 0.585
_REQUESTS_MEDIAN, _REQUESTS_SIGMA = 5.86, 1.596
# Weekends have fewer and longer sessions; nothing more exact is published.
_WEEKEND_REQUESTS = 1.35
# Calls that tools start after a human request: none with this chance, else lognormal, at most `_STEPS_CAP`.
_FIRST_NO_STEP_SHARE, _FIRST_STEPS_MEDIAN, _FIRST_STEPS_SIGMA = 0.15, 9.5, 1.30
_LATER_NO_STEP_SHARE, _LATER_STEPS_MEDIAN, _LATER_STEPS_SIGMA = 0.48, 6.05, 1.22
# Keeps one draw of the tail from being a day of traffic.
_STEPS_CAP = 400
# Tokens: the first prompt, what a tool's result adds, what a person adds, and an answer.
_FIRST_PROMPT_MEDIAN, _FIRST_PROMPT_SIGMA = 28_000.0, 0.45
_TOOL_TOKENS_MEDIAN, _TOOL_TOKENS_SIGMA = 330.0, 1.62
_USER_TOKENS_MEDIAN, _USER_TOKENS_SIGMA = 120.0, 1.4
_ANSWER_MEDIAN, _ANSWER_SIGMA = 214.0, 1.337
# Prompt sizes at which a session is compacted, their shares of sessions, and what remains of the limit.
_LIMITS_TOKENS, _LIMIT_SHARES = (225_000, 245_000, 930_000), (0.54, 0.26, 0.20)
_KEPT_LOW, _KEPT_HIGH = 0.12, 0.30
# Human waits: a mixture of coming back soon and of going away (799 minutes), at most 31 days. Tool waits: at most 2 h.
_AWAY_SHARE = 0.0196
_SOON_MEDIAN_S, _SOON_SIGMA = 79.7, 1.942
_AWAY_MEDIAN_S, _AWAY_SIGMA = 799 * 60.0, 1.353
# Longer waits are other sessions.
_HUMAN_CAP_S = 31 * 86_400.0
_TOOL_MEDIAN_S, _TOOL_SIGMA, _TOOL_CAP_S = 0.33, 2.85, 7_200.0
# Engine time in open loop: time to the first token, and the rate after it.
_TTFT_MEDIAN_S, _TTFT_SIGMA = 2.2, 0.6
_RATE_MEDIAN_PER_S, _RATE_SIGMA = 61.0, 0.35
# The quoted reading: a session's waits sum to a lognormal time of 25 minutes' median, engine and tools are faster.
_QUOTED_WAIT_MEDIAN_S, _QUOTED_WAIT_SIGMA = 25 * 60.0, 1.85
_QUOTED_ENGINE_RATIO, _QUOTED_TOOL_RATIO = 0.12, 0.14

# Chat: a share of single turns, else two and a geometric number more of this mean [assumed, between Mooncake's 1.63
# turns and WildChat's 2.35]; gaps from start to start by Mooncake's conversation trace.
_CHAT_SINGLE_SHARE, _CHAT_MORE_MEAN = 0.6, 1.4
_CHAT_GAP_MEDIAN_S, _CHAT_GAP_SIGMA = 131.0, 0.98
# Engine time of a chat turn in open loop, as for agents but at their medians: it only splits the gap in two.
_CHAT_USER_MEDIAN, _CHAT_USER_SIGMA = _USER_TOKENS_MEDIAN, _USER_TOKENS_SIGMA

# Voice calls, for which nothing is published [all assumed]: a call of 3 minutes' median in turns 8 s apart with little
# jitter, a system prompt, and a spoken sentence each way (20 words, about 30 tokens).
_CALL_MEDIAN_S, _CALL_SIGMA, _CALL_TURN_S, _CALL_JITTER_SHAPE = 180.0, 0.9, 8.0, 16.0
_CALL_PROMPT_TOKENS, _CALL_SAID_MEDIAN, _CALL_SAID_SIGMA = 1_000, 30.0, 0.5
# A spoken answer must begin within a second of the last word.
_CALL_ENGINE_S = 1.0
# Nobody talks for longer than two hours.
_CALL_CAP_S = 7_200.0

# Longest prompt that a chat session may reach before it is cut to what its model takes.
_CHAT_CAP_TOKENS = 128_000


def agent_sessions(
    rng: np.random.Generator, weekend: npt.NDArray[np.bool_], reading: AgentReading = AgentReading.TRACELAB
) -> SessionSteps:
    """One agent session for each entry of `weekend`: whether it starts on a weekend day."""
    count = len(weekend)
    single = rng.random(count) < _SINGLE_SHARE
    more = lognormal(rng, _REQUESTS_MEDIAN, _REQUESTS_SIGMA, count) * np.where(weekend, _WEEKEND_REQUESTS, 1.0)
    requests = np.where(single, 1, np.maximum(2, np.rint(more))).astype(np.int64)
    steps = _tool_steps(rng, requests)
    request_session = np.repeat(np.arange(count), requests)
    session = np.repeat(request_session, steps + 1)
    size = len(session)
    human = np.zeros(size, dtype=np.bool_)
    human[np.cumsum(steps + 1) - (steps + 1)] = True
    first = np.concatenate(([True], session[1:] != session[:-1])) if size else np.zeros(0, np.bool_)
    new = np.where(
        human,
        lognormal(rng, _USER_TOKENS_MEDIAN, _USER_TOKENS_SIGMA, size),
        lognormal(rng, _TOOL_TOKENS_MEDIAN, _TOOL_TOKENS_SIGMA, size),
    )
    new[first] = lognormal(rng, _FIRST_PROMPT_MEDIAN, _FIRST_PROMPT_SIGMA, count)
    output = np.maximum(1, np.rint(lognormal(rng, _ANSWER_MEDIAN, _ANSWER_SIGMA, size))).astype(np.int64)
    limits = rng.choice(_LIMITS_TOKENS, count, p=_LIMIT_SHARES)[session]
    kept = np.rint(limits * rng.uniform(_KEPT_LOW, _KEPT_HIGH, size)).astype(np.int64)
    prompts, epochs = _grown(first, np.maximum(1, np.rint(new)).astype(np.int64), output, (limits, kept))
    engine_s = lognormal(rng, _TTFT_MEDIAN_S, _TTFT_SIGMA, size)
    engine_s += output / lognormal(rng, _RATE_MEDIAN_PER_S, _RATE_SIGMA, size)
    tool_s = np.minimum(lognormal(rng, _TOOL_MEDIAN_S, _TOOL_SIGMA, size), _TOOL_CAP_S)
    human_s = _human_waits(rng, session, human & ~first, count, reading)
    if reading is AgentReading.QUOTED:
        engine_s, tool_s = engine_s * _QUOTED_ENGINE_RATIO, tool_s * _QUOTED_TOOL_RATIO
    wait_s = np.where(first, np.nan, np.where(human, human_s, tool_s))
    offset_s = _offsets(first, wait_s, engine_s)
    return SessionSteps(count, session, human, wait_s, engine_s, offset_s, prompts, output, epochs)


def chat_sessions(rng: np.random.Generator, count: int, lengths: Lengths) -> SessionSteps:
    """`count` chat sessions; a first prompt follows the law of `lengths`, later ones add the answer and a message."""
    more = rng.geometric(1 / (1 + _CHAT_MORE_MEAN), count) - 1
    turns = np.where(rng.random(count) < _CHAT_SINGLE_SHARE, 1, 2 + more)
    session = np.repeat(np.arange(count), turns)
    size = len(session)
    first = np.concatenate(([True], session[1:] != session[:-1])) if size else np.zeros(0, np.bool_)
    new = np.maximum(1, np.rint(lognormal(rng, _CHAT_USER_MEDIAN, _CHAT_USER_SIGMA, size))).astype(np.int64)
    new[first] = lengths.input.draw(rng, count)
    output = lengths.output.draw(rng, size).astype(np.int64)
    cap = np.full(size, _CHAT_CAP_TOKENS)
    prompts, epochs = _grown(first, new, output, (cap, cap))
    engine_s = _TTFT_MEDIAN_S + output / _RATE_MEDIAN_PER_S
    gap_s = lognormal(rng, _CHAT_GAP_MEDIAN_S, _CHAT_GAP_SIGMA, size)
    wait_s = np.where(first, np.nan, np.maximum(0.0, gap_s - np.roll(engine_s, 1)))
    everyone = np.ones(size, dtype=np.bool_)
    return SessionSteps(
        count, session, everyone, wait_s, engine_s, _offsets(first, wait_s, engine_s), prompts, output, epochs
    )


def voice_calls(rng: np.random.Generator, count: int) -> SessionSteps:
    """`count` calls: short turns at a steady beat, each prompt the whole call so far."""
    length_s = np.minimum(lognormal(rng, _CALL_MEDIAN_S, _CALL_SIGMA, count), _CALL_CAP_S)
    turns = np.maximum(1, np.rint(length_s / _CALL_TURN_S)).astype(np.int64)
    session = np.repeat(np.arange(count), turns)
    size = len(session)
    first = np.concatenate(([True], session[1:] != session[:-1])) if size else np.zeros(0, np.bool_)
    said = np.maximum(1, np.rint(lognormal(rng, _CALL_SAID_MEDIAN, _CALL_SAID_SIGMA, (2 * size)))).astype(np.int64)
    new, output = said[:size] + np.where(first, _CALL_PROMPT_TOKENS, 0), said[size:]
    cap = np.full(size, _CHAT_CAP_TOKENS)
    prompts, epochs = _grown(first, new, output, (cap, cap))
    engine_s = np.full(size, _CALL_ENGINE_S)
    beat_s = rng.gamma(_CALL_JITTER_SHAPE, _CALL_TURN_S / _CALL_JITTER_SHAPE, size)
    wait_s = np.where(first, np.nan, np.maximum(0.0, beat_s - _CALL_ENGINE_S))
    everyone = np.ones(size, dtype=np.bool_)
    return SessionSteps(
        count, session, everyone, wait_s, engine_s, _offsets(first, wait_s, engine_s), prompts, output, epochs
    )


def _tool_steps(rng: np.random.Generator, requests: Ints) -> Ints:
    """Calls started by tools after each request, the requests of all sessions in a row."""
    total = int(requests.sum())
    first = np.zeros(total, dtype=np.bool_)
    first[np.cumsum(requests) - requests] = True
    none = rng.random(total) < np.where(first, _FIRST_NO_STEP_SHARE, _LATER_NO_STEP_SHARE)
    normal = rng.standard_normal(total)
    some = np.where(
        first,
        _FIRST_STEPS_MEDIAN * np.exp(_FIRST_STEPS_SIGMA * normal),
        _LATER_STEPS_MEDIAN * np.exp(_LATER_STEPS_SIGMA * normal),
    )
    return np.where(none, 0, np.clip(np.rint(some), 1, _STEPS_CAP)).astype(np.int64)


def _human_waits(
    rng: np.random.Generator, session: Ints, gap: npt.NDArray[np.bool_], count: int, reading: AgentReading
) -> Floats:
    """Seconds that a person takes before each call where `gap` is set, 0 elsewhere."""
    waits = np.zeros(len(session))
    size = int(gap.sum())
    if reading is AgentReading.TRACELAB:
        away = rng.random(size) < _AWAY_SHARE
        soon_s = lognormal(rng, _SOON_MEDIAN_S, _SOON_SIGMA, size)
        waits[gap] = np.minimum(np.where(away, lognormal(rng, _AWAY_MEDIAN_S, _AWAY_SIGMA, size), soon_s), _HUMAN_CAP_S)
        return waits
    # The session's whole wait, split by a flat Dirichlet law: exponentials over their sum.
    parts = rng.standard_exponential(size)
    owner = session[gap]
    totals_s = lognormal(rng, _QUOTED_WAIT_MEDIAN_S, _QUOTED_WAIT_SIGMA, count)
    waits[gap] = totals_s[owner] * parts / np.bincount(owner, weights=parts, minlength=count)[owner]
    return waits


def _grown(first: npt.NDArray[np.bool_], new: Ints, output: Ints, limits: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Prompts that hold all before them, and their epochs: past a limit only the kept tokens remain, a new epoch.

    `limits` has, for each call, the prompt size that is too long and what a compaction there leaves.
    """
    prompts, epochs = np.empty(len(first), dtype=np.int64), np.empty(len(first), dtype=np.int64)
    prompt, said, epoch = 0, 0, -1
    rows = zip(first.tolist(), new.tolist(), output.tolist(), *(column.tolist() for column in limits), strict=True)
    for row, (starts, added, answer, limit, kept) in enumerate(rows):
        prompt = added if starts else prompt + said + added
        epoch += starts
        if prompt > limit:
            prompt = kept
            epoch += 1
        prompts[row], epochs[row], said = prompt, epoch, answer
    return prompts, epochs


def _offsets(first: npt.NDArray[np.bool_], wait_s: Floats, engine_s: Floats) -> Floats:
    """When each call starts after its session's start."""
    if not len(first):
        return np.zeros(0)
    passed = np.where(first, 0.0, np.nan_to_num(wait_s) + np.concatenate(([0.0], engine_s[:-1])))
    at_s = np.cumsum(passed)
    starts = np.flatnonzero(first)
    sizes = np.diff(np.concatenate((starts, [len(first)])))
    offset_s: Floats = at_s - np.repeat(at_s[starts], sizes)
    return offset_s
