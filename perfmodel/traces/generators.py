"""Made-up workloads with the statistics of published ones: one profile, one rate, one seed, one trace.

Owns: the profiles (agent, chat, code, API, realtime, batch), what each shares as prefixes, and how a rate becomes
sessions. Does not own: the laws of lengths (`lengths`), arrivals (`arrivals`) or sessions
(`sessions`), where every parameter has its source. What a profile assumes beyond published figures is said here.
The same demand gives the same trace; nothing is drawn but from its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError
from perfmodel.traces import lengths
from perfmodel.traces.arrivals import Calendar, CurveName, on_off, renewal, tenants
from perfmodel.traces.blocks import BlockPlan, PrefixLayer, block_plan
from perfmodel.traces.lengths import Lengths, lognormal
from perfmodel.traces.sessions import AgentReading, SessionSteps, agent_sessions, chat_sessions, voice_calls
from perfmodel.traces.trace import MOST_S, MOST_TOKENS, Tier, Trace, joined

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Seconds of an hour.
_HOUR_S = 3600.0
# Rows of one piece of a streamed trace, and sessions drawn at once.
_PIECE_ROWS = 8192
_BATCH_SESSIONS = 2000
# Most requests of one trace: session numbers and positions are 32-bit.
_MOST_REQUESTS = 2**31 - 1
# Most tenants of one trace: each has an arrival process of its own, 50 microseconds of work.
_MOST_TENANTS = 1_000_000

# Sessions that were running when the trace begins started within this time before it. Agents: six days hold 87 % of all
# calls; the rest come after waits of weeks and are made up for by more sessions.
_AGENT_WARM_UP_S = 6 * 24 * _HOUR_S
_CHAT_WARM_UP_S = _CALL_WARM_UP_S = 2 * _HOUR_S
# Mean calls that an agent session has made when it is so many hours old, from 400,000 generated sessions (a test draws
# them again): what turns a rate of calls into one of sessions. Weekend sessions make 1.2 times as many.
_AGE_HOURS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 48.0, 72.0, 96.0, 144.0)
_CALLS_BY_AGE = {
    AgentReading.TRACELAB: (1.0, 16.5, 21.9, 28.0, 34.6, 41.5, 47.7, 53.5, 56.9, 62.9, 66.6, 69.1, 72.7),
    AgentReading.QUOTED: (1.0, 34.7, 45.5, 57.5, 68.1, 75.6, 80.0, 82.1, 82.7, 83.2, 83.3, 83.3, 83.3),
}
# Weekend sessions have more requests: 1.2 to 1.3 times the calls, by age.
_WEEKEND_CALLS = 1.2
# Weekend starts of agent sessions over weekday ones: 32 a day against 300 [assumed], which is 0.3 of the calls.
_AGENT_WEEKEND_RATIO = 32 / 300
# Steps of the sum over session starts that expects the calls of a trace: a minute's trace needs short ones, no trace
# shorter ones than a second, for a session's calls are seconds apart.
_EXPECT_STEP_S, _LEAST_STEP_S = 600.0, 1.0
# Mean calls of a chat session (0.6 + 0.4 * 3.4) and of a voice call.
_CHAT_CALLS, _VOICE_CALLS = 1.96, 33.8
# Prompts of later turns hold the earlier ones; first prompts are this much shorter than the published law of all turns,
# so that all turns together have its mean.
_FIRST_OF_LONG, _FIRST_OF_SHORT = 0.94, 0.48

# Prefix layers of agents [assumed, after Claude Code's prompts of 12 to 17 K and NVIDIA's generator]: text of the
# harness (2 versions), then of the repository (80, Zipf 1.2), then the session's own.
_HARNESS_COUNT, _HARNESS_TOKENS = 2, 16_384
_REPOSITORY_COUNT, _REPOSITORY_TOKENS, _REPOSITORY_EXPONENT = 80, 4_096, 1.2
# Chat: one block of 512 tokens that all share, as in Mooncake's trace. Voice: the system prompt of the call.
_CHAT_SHARED_TOKENS = 512
_CALL_SHARED_TOKENS = 1_000
# API: a system prompt for each tenant, whose lognormal length is chosen so that an endless cache serves about half of
# the prompt tokens, as published for Qwen-Bailian's API traffic (53.4 %) [assumed length].
_API_SHARED_MEDIAN, _API_SHARED_SIGMA = 2_500.0, 1.0
# Batch: what every request of a ServeGen job starts with.
_BATCH_SHARED_TOKENS = 160
# Shapes of arrivals of one tenant: Azure 2023 conversation (gamma fit 0.87); voice calls come steadily [assumed].
_CHAT_SHAPE, _CALL_SHAPE = 0.87, 4.0


class Profile(StrEnum):
    """A kind of traffic."""

    AGENT = "agent"
    CHAT = "chat"
    CHAT_SHORT = "chat-short"
    CODE = "code"
    API = "api"
    REALTIME = "realtime"
    BATCH = "batch"


class BatchKind(StrEnum):
    """What a batch job asks for."""

    SUMMARISE = "summarise"
    GENERATE = "generate"
    CLASSIFY = "classify"


# Tokens of a block where nothing is asked for: agents' prompts are long, so their blocks are.
_BLOCK_TOKENS = {
    Profile.AGENT: 1024, Profile.CHAT: 512, Profile.CHAT_SHORT: 16, Profile.CODE: 0, Profile.API: 16,
    Profile.REALTIME: 16, Profile.BATCH: 16,
}  # fmt: skip
_CURVES = {
    Profile.AGENT: CurveName.CODE, Profile.CHAT: CurveName.CHAT, Profile.CHAT_SHORT: CurveName.CHAT,
    Profile.CODE: CurveName.CODE, Profile.API: CurveName.API, Profile.REALTIME: CurveName.CHAT,
    Profile.BATCH: CurveName.FLAT,
}  # fmt: skip
_TIERS = {
    Profile.AGENT: Tier.AGENT, Profile.CHAT: Tier.CHAT, Profile.CHAT_SHORT: Tier.CHAT, Profile.CODE: Tier.CODE,
    Profile.API: Tier.API, Profile.REALTIME: Tier.REALTIME, Profile.BATCH: Tier.BATCH,
}  # fmt: skip
_TENANTS = {Profile.API: 100}
_BATCH_LENGTHS = {
    BatchKind.SUMMARISE: lengths.BATCH_SUMMARISE,
    BatchKind.GENERATE: lengths.BATCH_GENERATE,
    BatchKind.CLASSIFY: lengths.BATCH_CLASSIFY,
}


@dataclass(frozen=True, slots=True)
class Demand:
    """What to generate: `rate_per_s` requests a second, the mean over `hours`; batch: all of them at once, at second 0.

    `curve`, `block_tokens` and `tenant_count` None: the profile's own. `flat` traffic is `CurveName.FLAT`. Second 0 is
    hour `start_hours` of day `start_day_index` (0: Monday). `reading` is for agents, `batch` for batch jobs. Raises
    ConfigError for a value that gives no traffic.
    """

    profile: Profile
    hours: float
    rate_per_s: float
    seed: int = 0
    curve: CurveName | None = None
    start_day_index: int = 0
    start_hours: float = 0.0
    tenant_count: int | None = None
    block_tokens: int | None = None
    reading: AgentReading = AgentReading.TRACELAB
    batch: BatchKind = BatchKind.SUMMARISE

    def __post_init__(self) -> None:
        for name in ("hours", "rate_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; expected more than 0")
        if self.end_s > MOST_S:
            raise ConfigError(f"hours is {self.hours}; expected at most {MOST_S / _HOUR_S:,.0f}, thirty years")
        if self.rate_per_s * self.end_s > _MOST_REQUESTS:
            raise ConfigError(f"rate_per_s is {self.rate_per_s}; expected at most 2^31 requests in {self.hours} hours")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; expected 0 or more")
        for name, most in (("block_tokens", MOST_TOKENS), ("tenant_count", _MOST_TENANTS)):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; expected at least 1")
            if value is not None and value > most:
                raise ConfigError(f"{name} is {value}; expected at most {most:,}")
        _ = self.calendar

    @property
    def end_s(self) -> float:
        """Seconds of the trace."""
        return self.hours * _HOUR_S

    @property
    def calendar(self) -> Calendar:
        """The curve on the clock."""
        curve = self.curve or _CURVES[self.profile]
        weekend = _AGENT_WEEKEND_RATIO if self.profile is Profile.AGENT and curve is CurveName.CODE else None
        return Calendar(curve, self.start_day_index, self.start_hours, weekend)

    @property
    def weekday_rate_per_s(self) -> float:
        """The mean rate of a weekday that gives `rate_per_s` over the trace's own hours."""
        return self.rate_per_s * self.end_s / float(self.calendar.even_s(np.array([self.end_s]))[0])


@dataclass(frozen=True, slots=True, eq=False)
class _Calls:
    """Requests in any order, before they have blocks."""

    arrival_s: Floats
    session: Ints
    input_tokens: Ints
    output_tokens: Ints
    think_s: Floats
    layers: tuple[PrefixLayer, ...]


def generate(demand: Demand) -> Trace:
    """The whole trace; `generate_parts` gives long ones piece by piece."""
    parts = list(generate_parts(demand))
    if not parts:
        raise ConfigError(f"{demand.hours} hours at {demand.rate_per_s} requests/s have no request; expected more")
    return joined(parts)


def generate_parts(demand: Demand, piece_rows: int = _PIECE_ROWS) -> Iterator[Trace]:
    """The trace in pieces of `piece_rows` requests, in order; only the blocks of one piece are in memory."""
    rng = np.random.default_rng(demand.seed)
    calls = _MAKERS[demand.profile](demand, rng)
    order = np.argsort(calls.arrival_s, kind="stable")
    width = demand.block_tokens or _BLOCK_TOKENS[demand.profile]
    input_tokens = np.maximum(1, calls.input_tokens[order]).astype(np.int32)
    plan: BlockPlan | None = None
    if calls.layers and width:
        plan = block_plan(input_tokens, [layer.ordered(order) for layer in calls.layers], width)
    session = _renumbered(calls.session[order])
    for start in range(0, len(order), piece_rows):
        stop = min(len(order), start + piece_rows)
        rows = order[start:stop]
        if plan is None:
            offsets, blocks = np.zeros(stop - start + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
        else:
            offsets, blocks = plan.written(start, stop)
        yield Trace(
            arrival_s=calls.arrival_s[rows],
            session=session[start:stop],
            input_tokens=input_tokens[start:stop],
            output_tokens=np.maximum(1, calls.output_tokens[rows]).astype(np.int32),
            block_offsets=offsets,
            blocks=blocks,
            block_tokens=0 if plan is None else width,
            tier=np.full(stop - start, _TIERS[demand.profile], dtype=np.int8),
            think_s=calls.think_s[rows].astype(np.float32),
        )


def _renumbered(session: Ints) -> npt.NDArray[np.int32]:
    """Session numbers from 0 in the order of their first request; -1 stays."""
    found, first, inverse = np.unique(session, return_index=True, return_inverse=True)
    first = np.where(found < 0, -1, first)
    rank = np.empty(len(found), dtype=np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(found), dtype=np.int32)
    if len(found) and found[0] < 0:
        rank -= 1
    return rank[inverse]


def _played(demand: Demand, starts_s: Floats, steps: SessionSteps, first_id: int) -> _Calls:
    """The calls of sessions that start at `starts_s`, those outside the trace left out; layers: epochs only."""
    at_s = starts_s[steps.session] + steps.offset_s
    inside = (at_s >= 0) & (at_s < demand.end_s)
    # A call whose predecessor was before the trace has nobody to wait for.
    alone = inside & ~np.concatenate(([False], inside[:-1]))
    think_s = np.where(alone, np.nan, steps.wait_s)
    private = PrefixLayer(steps.epoch[inside] + (first_id << 20), steps.input_tokens[inside])
    return _Calls(
        at_s[inside], steps.session[inside] + first_id, steps.input_tokens[inside], steps.output_tokens[inside],
        think_s[inside], (private,),
    )  # fmt: skip


def _merged(parts: list[_Calls]) -> _Calls:
    layers = tuple(
        PrefixLayer(np.concatenate([each.key for each in level]), np.concatenate([each.end_tokens for each in level]))
        for level in zip(*(part.layers for part in parts), strict=True)
    )
    return _Calls(
        arrival_s=np.concatenate([part.arrival_s for part in parts]),
        session=np.concatenate([part.session for part in parts]),
        input_tokens=np.concatenate([part.input_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        think_s=np.concatenate([part.think_s for part in parts]),
        layers=layers,
    )


def _shared(calls: _Calls, key: Ints, tokens: Ints | int) -> PrefixLayer:
    return PrefixLayer(key, np.broadcast_to(np.asarray(tokens, dtype=np.int64), key.shape).copy())


def _agent(demand: Demand, rng: np.random.Generator) -> _Calls:
    rate = _agent_starts_per_s(demand)
    starts_s = renewal(rng, demand.calendar, rate, 1.0, begin_s=-_AGENT_WARM_UP_S, end_s=demand.end_s)
    popularity = np.arange(1, _REPOSITORY_COUNT + 1) ** -_REPOSITORY_EXPONENT
    parts = []
    for start in range(0, max(1, len(starts_s)), _BATCH_SESSIONS):
        some_s = starts_s[start : start + _BATCH_SESSIONS]
        steps = agent_sessions(rng, demand.calendar.is_weekend(some_s), demand.reading)
        harness = rng.integers(_HARNESS_COUNT, size=len(some_s))
        repository = rng.choice(_REPOSITORY_COUNT, len(some_s), p=popularity / popularity.sum())
        calls = _played(demand, some_s, steps, start)
        owner = calls.session - start
        first = _shared(calls, harness[owner], _HARNESS_TOKENS)
        # The same repository under two harnesses is two texts: its prefix differs.
        second_key = harness[owner] * _REPOSITORY_COUNT + repository[owner]
        second = _shared(calls, second_key, _HARNESS_TOKENS + _REPOSITORY_TOKENS)
        parts.append(_with_layers(calls, (first, second, *calls.layers)))
    return _merged(parts)


def _agent_starts_per_s(demand: Demand) -> float:
    """Session starts a second on a weekday that make the trace's rate of calls, those begun before it included."""
    step_s = max(_LEAST_STEP_S, min(_EXPECT_STEP_S, demand.end_s / 8))
    start_s = np.arange(-_AGENT_WARM_UP_S, demand.end_s, step_s) + step_s / 2
    ages = np.array(_AGE_HOURS) * _HOUR_S

    def made(age_s: Floats) -> Floats:
        return np.where(age_s < 0, 0.0, np.interp(age_s, ages, _CALLS_BY_AGE[demand.reading]))

    calls = made(demand.end_s - start_s) - made(-start_s)
    calls *= np.where(demand.calendar.is_weekend(start_s), _WEEKEND_CALLS, 1.0)
    expected = float((calls * demand.calendar.multiplier(start_s)).sum()) * step_s
    return demand.rate_per_s * demand.end_s / expected


def _chat(demand: Demand, rng: np.random.Generator) -> _Calls:
    long = demand.profile is Profile.CHAT
    published = lengths.CHAT_LONG if long else lengths.CHAT_SHORT
    scale_tokens = published.input.scale_tokens * (_FIRST_OF_LONG if long else _FIRST_OF_SHORT)
    first = replace(published, input=replace(published.input, scale_tokens=scale_tokens))
    shared = _CHAT_SHARED_TOKENS if long else 0

    def steps(count: int) -> SessionSteps:
        return chat_sessions(rng, count, first)

    return _by_tenant(demand, rng, steps, _Human(_CHAT_CALLS, _CHAT_SHAPE, _CHAT_WARM_UP_S, shared))


def _realtime(demand: Demand, rng: np.random.Generator) -> _Calls:
    def steps(count: int) -> SessionSteps:
        return voice_calls(rng, count)

    return _by_tenant(demand, rng, steps, _Human(_VOICE_CALLS, _CALL_SHAPE, _CALL_WARM_UP_S, _CALL_SHARED_TOKENS))


@dataclass(frozen=True, slots=True)
class _Human:
    """What chat and voice differ in: calls of a session, shape of starts, warm-up, tokens that users share."""

    calls_count: float
    single_shape_ratio: float
    warm_up_s: float
    shared_tokens: int


def _by_tenant(demand: Demand, rng: np.random.Generator, steps: Callable[[int], SessionSteps], kind: _Human) -> _Calls:
    everyone = tenants(rng, demand.tenant_count or _TENANTS.get(demand.profile, 1))
    rate = demand.weekday_rate_per_s / kind.calls_count
    parts, taken = [], 0
    for tenant, share in enumerate(everyone.share_ratio):
        shape = kind.single_shape_ratio if len(everyone) == 1 else float(everyone.shape_ratio[tenant])
        starts_s = renewal(
            rng, demand.calendar, rate * float(share), shape, begin_s=-kind.warm_up_s, end_s=demand.end_s
        )
        calls = _played(demand, starts_s, steps(len(starts_s)), taken)
        common = _shared(calls, np.full(len(calls.session), tenant), kind.shared_tokens)
        parts.append(_with_layers(calls, (common, *calls.layers)))
        taken += len(starts_s)
    return _merged(parts)


def _with_layers(calls: _Calls, layers: tuple[PrefixLayer, ...]) -> _Calls:
    return _Calls(calls.arrival_s, calls.session, calls.input_tokens, calls.output_tokens, calls.think_s, layers)


def _code(demand: Demand, rng: np.random.Generator) -> _Calls:
    at_s = on_off(rng, demand.calendar, demand.weekday_rate_per_s, begin_s=0.0, end_s=demand.end_s)
    return _single(rng, at_s, lengths.CODE_COMPLETION, np.full(len(at_s), -1))


def _api(demand: Demand, rng: np.random.Generator) -> _Calls:
    """A tenant is a session, as in ServeGen's traces: its requests share its system prompt and wait for nobody."""
    everyone = tenants(rng, demand.tenant_count or _TENANTS[Profile.API], bulk=True)
    shared = np.rint(lognormal(rng, _API_SHARED_MEDIAN, _API_SHARED_SIGMA, len(everyone))).astype(np.int64)
    parts = []
    for tenant, (share, shape) in enumerate(zip(everyone.share_ratio, everyone.shape_ratio, strict=True)):
        rate = demand.weekday_rate_per_s * float(share)
        at_s = renewal(rng, demand.calendar, rate, float(shape), begin_s=0.0, end_s=demand.end_s)
        calls = _single(rng, at_s, lengths.API_REASONING, np.full(len(at_s), tenant))
        parts.append(_with_layers(calls, (_shared(calls, calls.session, int(shared[tenant])),)))
    calls = _merged(parts)
    return _with_layers(calls, (*calls.layers, PrefixLayer(np.arange(len(calls.session)), calls.input_tokens)))


def _batch(demand: Demand, rng: np.random.Generator) -> _Calls:
    count = max(1, round(demand.rate_per_s * demand.end_s))
    calls = _single(rng, np.zeros(count), _BATCH_LENGTHS[demand.batch], np.zeros(count, dtype=np.int64))
    common = _shared(calls, calls.session, _BATCH_SHARED_TOKENS)
    return _with_layers(calls, (common, PrefixLayer(np.arange(count), calls.input_tokens)))


def _single(rng: np.random.Generator, at_s: Floats, lengths: Lengths, session: Ints) -> _Calls:
    """Requests that know nothing of one another."""
    count = len(at_s)
    inputs, outputs = lengths.input.draw(rng, count), lengths.output.draw(rng, count)
    nobody = np.full(count, np.nan)
    return _Calls(at_s, session, inputs.astype(np.int64), outputs.astype(np.int64), nobody, ())


_MAKERS = {
    Profile.AGENT: _agent, Profile.CHAT: _chat, Profile.CHAT_SHORT: _chat, Profile.CODE: _code, Profile.API: _api,
    Profile.REALTIME: _realtime, Profile.BATCH: _batch,
}  # fmt: skip
