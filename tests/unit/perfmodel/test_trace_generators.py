"""Generated workloads against the published figures that they follow, with the tolerance of the draw.

Owns: the statistics of sessions, lengths, arrivals and whole traces. Does not own: what any trace must be
(`properties/test_trace_properties`). Every draw has its seed, so that no run is lucky; tolerances hold over other seeds
as well, as the comments say where they are wide.
"""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.errors import ConfigError
from perfmodel.traces import lengths
from perfmodel.traces.arrivals import Calendar, CurveName, on_off, renewal, tenants
from perfmodel.traces.blocks import PrefixLayer, block_plan
from perfmodel.traces.generators import _AGE_HOURS, _CALLS_BY_AGE, _VOICE_CALLS, BatchKind, Demand, Profile, generate
from perfmodel.traces.lengths import LengthKind, LengthLaw, Lengths
from perfmodel.traces.sessions import AgentReading, SessionSteps, agent_sessions, voice_calls
from perfmodel.traces.statistics import statistics
from perfmodel.traces.trace import Tier

# Sessions of each reading: the published tables have 4,265.
SESSIONS = 20_000


@pytest.fixture(scope="module", params=list(AgentReading))
def reading(request: pytest.FixtureRequest) -> AgentReading:
    return AgentReading(request.param)


@pytest.fixture(scope="module")
def agents(reading: AgentReading) -> SessionSteps:
    return agent_sessions(np.random.default_rng(7), np.zeros(SESSIONS, dtype=np.bool_), reading)


def test_agent_sessions_have_the_published_steps(agents: SessionSteps) -> None:
    """TraceLab: requests 9.2 with p50/90/99 1/18/137; tool calls 73.6 a session; 83 calls, 89 % by the agent."""
    requests = np.bincount(agents.session, weights=agents.human, minlength=SESSIONS)
    calls = np.bincount(agents.session, minlength=SESSIONS)
    assert requests.mean() == pytest.approx(9.2, rel=0.08)
    assert np.percentile(requests, 50) == 1
    assert np.percentile(requests, (90, 99)) == pytest.approx((18, 137), rel=0.08)
    assert calls.mean() == pytest.approx(83.1, rel=0.08)
    assert 1 - requests.sum() / calls.sum() == pytest.approx(0.89, abs=0.01)
    assert np.percentile(calls - requests, (25, 50)) == pytest.approx((4, 15), abs=1)


def test_agent_sessions_have_the_published_tokens(agents: SessionSteps) -> None:
    """TraceLab: prefix median 118,656 and mean 147,300; output 214 and 523; 0.36 compactions a session."""
    later = ~np.isnan(agents.wait_s)
    prefix = agents.input_tokens[:-1][later[1:]]
    assert np.median(prefix) == pytest.approx(118_656, rel=0.05)
    assert prefix.mean() == pytest.approx(147_300, rel=0.07)
    assert np.median(agents.output_tokens) == pytest.approx(214, rel=0.02)
    assert agents.output_tokens.mean() == pytest.approx(523, rel=0.03)
    assert (agents.epoch.max() + 1 - SESSIONS) / SESSIONS == pytest.approx(0.36, abs=0.08)


def _time(agents: SessionSteps) -> tuple[float, float, float, np.ndarray]:
    """Human, tool and engine seconds of all sessions, and each session's human seconds."""
    later = ~np.isnan(agents.wait_s)
    human_s = np.where(agents.human & later, np.nan_to_num(agents.wait_s), 0.0)
    tool_s = np.where(~agents.human, np.nan_to_num(agents.wait_s), 0.0)
    total = np.bincount(agents.session, weights=human_s, minlength=SESSIONS)
    return float(human_s.sum()), float(tool_s.sum()), float(agents.engine_s.sum()), total


def test_time_is_human_in_both_readings(agents: SessionSteps) -> None:
    """92.3 / 4.8 / 3.3 % human, tool and engine."""
    human_s, tool_s, engine_s, _ = _time(agents)
    whole = human_s + tool_s + engine_s
    assert (human_s / whole, tool_s / whole, engine_s / whole) == pytest.approx((0.923, 0.045, 0.035), abs=0.015)


def test_session_times_are_those_of_the_reading(agents: SessionSteps, reading: AgentReading) -> None:
    """TraceLab: mean 8.2 h, median 5.1 min, p90 5.9 h. Quoted: mean 62.6 min, and the median wait of 25 min."""
    last = np.append(agents.session[1:] != agents.session[:-1], True)
    wall_min = (agents.offset_s + agents.engine_s)[last] / 60
    requests = np.bincount(agents.session, weights=agents.human, minlength=SESSIONS)
    wait_min = np.median(_time(agents)[3][requests > 1]) / 60
    gaps_s = agents.wait_s[agents.human & ~np.isnan(agents.wait_s)]
    if reading is AgentReading.TRACELAB:
        assert wall_min.mean() == pytest.approx(492, rel=0.2)
        assert np.percentile(wall_min, 90) == pytest.approx(354, rel=0.15)
        assert 5 < np.median(wall_min) < 9
        assert gaps_s.mean() == pytest.approx(2_802, rel=0.15)
        assert np.percentile(gaps_s, (50, 90, 99)) == pytest.approx((86, 1_236, 50_040), rel=0.1)
        assert wait_min == pytest.approx(27.3, rel=0.1)
    else:
        assert wall_min.mean() == pytest.approx(62.6, rel=0.1)
        assert wait_min == pytest.approx(25, rel=0.1)


def test_the_quoted_figures_cannot_be_of_one_population(agents: SessionSteps, reading: AgentReading) -> None:
    """A median gap of 25 minutes needs a mean of at least 12.5; 57.6 minutes over 8.2 gaps are 7."""
    if reading is AgentReading.QUOTED:
        gaps_s = agents.wait_s[agents.human & ~np.isnan(agents.wait_s)]
        assert np.median(gaps_s) < 12.5 * 60 and gaps_s.mean() < 12.5 * 60


def test_the_calls_that_a_rate_is_made_of_are_drawn(agents: SessionSteps, reading: AgentReading) -> None:
    aged = [(agents.offset_s <= hours * 3600 + 1e-6).sum() / SESSIONS for hours in _AGE_HOURS]
    # The mean of a tail whose 99th percentile is 12 times the mean: 4 % over 20,000 sessions.
    assert aged == pytest.approx(_CALLS_BY_AGE[reading], rel=0.08)
    assert len(voice_calls(np.random.default_rng(1), 20_000)) / 20_000 == pytest.approx(_VOICE_CALLS, rel=0.03)


@pytest.mark.parametrize(
    ("lengths", "input_tokens", "output_tokens", "within"),
    [
        (lengths.CHAT_SHORT, (1_203, 1_016), (201, 115), 0.3),
        (lengths.CHAT_LONG, (12_428, 7_284), (347, 356), 0.28),
        (lengths.CODE_COMPLETION, (2_033, 1_462), (28, 13), 0.28),
        (lengths.API_REASONING, (1_273, 285), (886, 499), 0.2),
        (lengths.BATCH_SUMMARISE, (2_582, 2_720), (296, 167), 0.2),
        (lengths.BATCH_GENERATE, (75, 56), (1_960, 1_447), 0.15),
        (lengths.BATCH_CLASSIFY, (707, 707), (5, 5), 0.0),
    ],
)
def test_lengths_have_the_published_mean_and_median(
    lengths: Lengths, input_tokens: tuple[int, int], output_tokens: tuple[int, int], within: float
) -> None:
    """Mean and median of the data; how far a fitted law is from them is the fit's error, not the draw's."""
    rng = np.random.default_rng(3)
    for law, (mean, median) in ((lengths.input, input_tokens), (lengths.output, output_tokens)):
        drawn = law.draw(rng, 50_000)
        assert drawn.min() >= 1 and drawn.max() <= law.cap_tokens
        assert drawn.mean() == pytest.approx(mean, rel=within)
        assert np.median(drawn) == pytest.approx(median, rel=max(within, 0.3 * (law.kind is not LengthKind.CONSTANT)))


def test_a_law_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="length law: scale_tokens is 0; expected more than 0"):
        LengthLaw(LengthKind.GAMMA, 0)


@pytest.mark.parametrize("shape", [0.03, 0.87, 4.0])
@pytest.mark.parametrize("curve", [CurveName.FLAT, CurveName.CODE])
def test_renewals_have_their_rate_and_their_shape(shape: float, curve: CurveName) -> None:
    calendar = Calendar(curve)
    hours = 24 * 5
    at_s = renewal(np.random.default_rng(5), calendar, 1.0, shape, begin_s=0.0, end_s=hours * 3600.0)
    assert (np.diff(at_s) >= 0).all() and at_s[0] >= 0 and at_s[-1] < hours * 3600
    assert len(at_s) == pytest.approx(hours * 3600, rel=0.05)
    even = np.diff(calendar.even_s(at_s))
    assert even.std() / even.mean() == pytest.approx(shape**-0.5, rel=0.06)


def test_curves_are_loads_of_a_week() -> None:
    hour_s = np.arange(7 * 24, dtype=np.float64) * 3600 + 60
    code = Calendar(CurveName.CODE).multiplier(hour_s)
    assert code[:24].mean() == pytest.approx(1.0)
    assert code[19] == pytest.approx(2.23, rel=0.01) and code[8] == pytest.approx(0.23, rel=0.02)
    assert code[5 * 24 :].mean() == pytest.approx(0.32), "Azure 2024: a weekend day of code is a third of a weekday"
    chat = Calendar(CurveName.CHAT, start_day_index=5).multiplier(hour_s)
    assert chat[:24].mean() == pytest.approx(0.57)
    assert Calendar(CurveName.CODE, start_hours=19).multiplier(np.array([1.0]))[0] == code[19]
    # The quietest eight hours hold 10 % of a day of code and 28 % of a day of chat.
    for name, share in ((CurveName.CODE, 0.10), (CurveName.CHAT, 0.28), (CurveName.CAMPUS, 0.12)):
        day = np.tile(Calendar(name).multiplier(hour_s[:24]), 2)
        assert min(day[start : start + 8].sum() for start in range(24)) / 24 == pytest.approx(share, abs=0.015)


def test_even_time_and_the_clock_are_inverse() -> None:
    calendar = Calendar(CurveName.CODE, start_day_index=4, start_hours=13.5)
    at_s = np.linspace(-86_400, 3 * 86_400, 1_000)
    even_s = calendar.even_s(at_s)
    assert (np.diff(even_s) > 0).all()
    assert calendar.clock_s(even_s, -86_400, 3 * 86_400) == pytest.approx(at_s, abs=1e-6)
    assert calendar.even_s(np.zeros(1))[0] == 0.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"start_day_index": 7}, "start_day is 7; expected 0"),
        ({"start_hours": 24.0}, "start_hour is 24.0; expected 0"),
        ({"weekend_ratio": 0.0}, "weekend_ratio is 0.0; expected more than 0"),
    ],
)
def test_a_calendar_outside_the_week_is_refused(arguments: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Calendar(CurveName.FLAT, **arguments)  # type: ignore[arg-type]  # one of three numbers


def test_code_comes_in_bursts() -> None:
    """Azure 2023 code: 3.08 requests/s, CV of gaps 12.6, variance over mean of 10-s counts 71, 49 % of them empty."""
    at_s = on_off(np.random.default_rng(2), Calendar(), 3.08, begin_s=0.0, end_s=86_400.0)
    gaps, counts = np.diff(at_s), np.bincount((at_s // 10).astype(np.int64), minlength=8_640)
    assert len(at_s) / 86_400 == pytest.approx(3.08, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(12.6, rel=0.15)
    assert counts.var() / counts.mean() == pytest.approx(71, rel=0.2)
    assert (counts == 0).mean() == pytest.approx(0.49, abs=0.05)


def test_tenants_are_skewed() -> None:
    """ServeGen m-large: the top 10 of 162 clients send 63 %; the bulk tenant has 20 to 50 % and a CV above 5."""
    everyone = tenants(np.random.default_rng(1), 100)
    assert everyone.share_ratio.sum() == pytest.approx(1.0)
    assert everyone.share_ratio[:10].sum() == pytest.approx(0.63, abs=0.08)
    assert everyone.shape_ratio.min() >= 0.2 and everyone.shape_ratio.max() <= 1.2
    bulk = tenants(np.random.default_rng(1), 100, bulk=True)
    assert len(bulk) == 101 and bulk.share_ratio.sum() == pytest.approx(1.0)
    assert 0.2 <= bulk.share_ratio[0] <= 0.5 and bulk.shape_ratio[0] ** -0.5 > 5
    with pytest.raises(ConfigError, match="tenants is 0; expected at least 1"):
        tenants(np.random.default_rng(1), 0)


def test_layers_share_blocks_by_their_last_token() -> None:
    key = np.array([0, 0, 1])
    layers = [
        PrefixLayer(np.zeros(3, dtype=np.int64), np.full(3, 25)),
        PrefixLayer(key, np.full(3, 40)),
        PrefixLayer(np.arange(3), np.full(3, 0)),
    ]
    plan = block_plan(np.array([60, 45, 39], dtype=np.int32), layers, 10)
    offsets, ids = plan.written(0, 3)
    assert offsets.tolist() == [0, 6, 10, 13]
    first, second, third = ids[:6].tolist(), ids[6:10].tolist(), ids[10:].tolist()
    assert first[:4] == second, "two prompts of one key share its layer"
    assert first[:2] == third[:2] and third[2] not in first, "the third block has tokens of the second layer"
    assert len(set(first + third)) == 7
    assert plan.written(1, 2)[1].tolist() == second


def test_a_chat_hour_is_like_mooncakes() -> None:
    """Mooncake conversation: isl 12,428 / 7,284 / 89,868, osl 347, hit 0.374 of the hour at 1.63 turns; here 1.96."""
    found = statistics(generate(Demand(Profile.CHAT, 1.0, 3.28, seed=1)))
    assert found.rate_per_s == pytest.approx(3.28, rel=0.08)
    assert found.input.mean_tokens == pytest.approx(12_428, rel=0.08)
    assert found.input.median_tokens == pytest.approx(7_284, rel=0.1)
    assert found.input.p99_tokens == pytest.approx(89_868, rel=0.15)
    assert found.output.mean_tokens == pytest.approx(347, rel=0.05)
    assert found.prefix is not None and 0.37 < found.prefix.hit_ratio < 0.5
    assert found.prefix.same_session_ratio == pytest.approx(0.93, abs=0.04)
    assert found.tier_counts == {"chat": found.request_count}


def test_short_chat_has_azures_mean() -> None:
    found = statistics(generate(Demand(Profile.CHAT_SHORT, 1.0, 5.92, seed=1)))
    assert found.input.mean_tokens == pytest.approx(1_203, rel=0.1)
    assert found.output.mean_tokens == pytest.approx(201, rel=0.05)


@pytest.mark.parametrize(("day", "seed"), [(0, 3), (5, 2)])
def test_an_agent_day_is_nearly_all_cache(day: int, seed: int) -> None:
    """An own generator of the same profile: hit 0.981, isl 130,760 / 108,846 on a weekday, counts of a minute 5.7."""
    found = statistics(generate(Demand(Profile.AGENT, 24.0, 0.4, seed, start_day_index=day)))
    # 500 sessions of a heavy tail make the day: 20 % of the rate is the draw.
    assert found.rate_per_s == pytest.approx(0.4, rel=0.25)
    # The same generator's weekend day has 191,689: fewer, longer sessions.
    assert 110_000 < found.input.mean_tokens < 230_000
    assert found.prefix is not None and found.prefix.hit_ratio == pytest.approx(0.981, abs=0.008)
    assert found.prefix.same_session_ratio == pytest.approx(0.997, abs=0.004)
    assert found.dispersion_ratio is not None and 3 < found.dispersion_ratio < 14


def test_api_tenants_share_their_system_prompts() -> None:
    """Qwen-Bailian's API traffic: an endless cache serves 53.4 %; hits across tenants are none."""
    trace = generate(Demand(Profile.API, 1.0, 15.0, seed=2))
    found = statistics(trace)
    assert found.rate_per_s == pytest.approx(15.0, rel=0.05)
    assert found.session_count <= 101
    assert found.prefix is not None and found.prefix.hit_ratio == pytest.approx(0.534, abs=0.12)
    assert found.prefix.same_session_ratio == 1.0
    assert found.dispersion_ratio is not None and found.dispersion_ratio > 5
    assert np.isnan(trace.think_s).all(), "a tenant's requests wait for nobody"


def test_voice_is_steady() -> None:
    trace = generate(Demand(Profile.REALTIME, 1.0, 10.0, seed=2, curve=CurveName.FLAT))
    found = statistics(trace)
    assert found.rate_per_s == pytest.approx(10.0, rel=0.1)
    assert found.dispersion_ratio is not None and found.dispersion_ratio < 1.6
    assert np.nanmedian(trace.think_s) == pytest.approx(6.9, rel=0.05)
    assert set(trace.tier.tolist()) == {int(Tier.REALTIME)}


@pytest.mark.parametrize("kind", list(BatchKind))
def test_a_batch_job_comes_at_once(kind: BatchKind) -> None:
    trace = generate(Demand(Profile.BATCH, 1.0, 1.0, seed=2, batch=kind))
    assert len(trace) == 3_600 and trace.span_s == 0.0 and set(trace.session.tolist()) == {0}
    shared = {tuple(trace.block_ids(row)[:10].tolist()) for row in range(50) if trace.input_tokens[row] >= 160}
    assert len(shared) <= 1, "every request of the job starts with the same 160 tokens"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"hours": 0.0}, "hours is 0.0; expected more than 0"),
        ({"rate_per_s": -1.0}, "rate_per_s is -1.0; expected more than 0"),
        ({"rate_per_s": float("nan")}, "rate_per_s is nan; expected more than 0"),
        ({"rate_per_s": 1e9}, "expected at most 2\\^31 requests"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
        ({"block_tokens": 0}, "block_tokens is 0; expected at least 1"),
        ({"tenant_count": 0}, "tenant_count is 0; expected at least 1"),
        ({"start_day_index": 9}, "start_day is 9"),
    ],
)
def test_a_demand_without_traffic_is_refused(arguments: dict[str, float], sentence: str) -> None:
    good = {"profile": Profile.CHAT, "hours": 1.0, "rate_per_s": 1.0}
    with pytest.raises(ConfigError, match=sentence):
        Demand(**(good | arguments))  # type: ignore[arg-type]  # wrong values are the point


def test_too_little_for_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="have no request"):
        generate(Demand(Profile.CODE, 0.001, 0.001, seed=1))
