"""The simulation by example: closed forms that can be worked out by hand, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import perfmodel.simulation.run as sim
from perfmodel.adapters.compiled_code import remember_compiled_code
from perfmodel.errors import ConfigError
from perfmodel.simulation.arrivals import ClosedLoop, OpenLoop
from perfmodel.simulation.fleet import EngineSpec, HandOver, LowerTier
from perfmodel.simulation.policy import Ask, EngineSample, KvTier, PolicyFactory, PolicyFleet, Usage
from perfmodel.step_time import StepTable
from perfmodel.traces.copies import Copies
from perfmodel.traces.trace import Trace, trace_of
from router.adapters import policies
from tests.fakes.sim_worlds import Mirror, Watch

TABLE = StepTable(np.full(129, 0.010) + 0.001 * np.arange(129.0), 0.0, 0.0005, 0.0, 0.0)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> None:
    remember_compiled_code()


def spec(**changes: object) -> EngineSpec:
    made = EngineSpec("p", TABLE, 4096, 2.0, max_batched_tokens=128, max_sequence_count=8)
    return replace(made, **changes)  # type: ignore[arg-type]  # a test names only what it changes


def trace(rows: list[tuple[float, int, int, list[int]]], session: list[int] | None = None, think: float = 1.0) -> Trace:
    count = len(rows)
    columns: dict[str, Sequence[object]] = {
        "arrival_s": [row[0] for row in rows],
        "session": session or [-1] * count,
        "input_tokens": [row[1] for row in rows],
        "output_tokens": [row[2] for row in rows],
        "tier": [0] * count,
        "think_s": [think] * count if session else [float("nan")] * count,
    }
    return trace_of(columns, [row[3] for row in rows], 16)


def watched(specs: list[EngineSpec], load: OpenLoop | ClosedLoop) -> tuple[Watch, sim.SimResult]:
    made: list[Watch] = []

    def factory(fleet: PolicyFleet) -> Watch:
        made.append(Watch(fleet))
        return made[0]

    result = sim.simulate(specs, load, factory)
    return made[0], result


def test_one_request_takes_its_prefill_and_its_decode_steps() -> None:
    watch, result = watched([spec()], OpenLoop([trace([(1.0, 32, 3, [5, 6])])]))
    # 32 tokens in one step: 10 ms + 32 ms; then two decodes of one token on contexts of 33 and 34
    first_s = 1.0 + 0.042
    assert watch.first_s[0] == [pytest.approx(first_s)]
    assert watch.ended_s[0] == [pytest.approx(first_s + 2 * 0.011 + 0.0005 * (33 + 34))]
    assert watch.usage[0] == Usage(0, 32, 3)
    assert result.ttft.mean_s == pytest.approx(0.042)
    assert result.goodput_ratio == 1.0
    assert result.sim_s == pytest.approx(watch.ended_s[0][0])


def test_a_shared_prefix_is_found_and_not_computed_again() -> None:
    rows = [(0.0, 40, 1, [1, 2]), (1.0, 40, 1, [1, 2]), (2.0, 40, 1, [1, 3])]
    watch, result = watched([spec()], OpenLoop([trace(rows)]))
    assert [watch.usage[row].cached_tokens for row in range(3)] == [0, 32, 16]
    assert result.prefix_hit_ratio == pytest.approx(48 / 120)


def test_a_prompt_that_fits_nowhere_is_refused_and_counts_as_not_good() -> None:
    watch, result = watched([spec(kv_capacity_tokens=64)], OpenLoop([trace([(0.0, 80, 1, [0] * 5), (0.0, 8, 1, [])])]))
    assert (result.requests, result.completed_count, result.refused_count) == (2, 1, 1)
    assert result.goodput_ratio == 0.5
    assert watch.usage[0] == Usage(0, 80, 0), "the policy hears that it is over"


def test_what_was_evicted_comes_back_from_the_lower_tier_at_its_bandwidth() -> None:
    rows = [(0.0, 64, 1, [1, 2, 3, 4]), (1.0, 64, 1, [5, 6, 7, 8]), (2.0, 65, 1, [1, 2, 3, 4])]
    tier = LowerTier(capacity_bytes=16 * 32.0, restore_bytes_per_s=3200.0)
    watch, result = watched([spec(kv_capacity_tokens=80, tier=tier)], OpenLoop([trace(rows)]))
    without, _ = watched([spec(kv_capacity_tokens=80)], OpenLoop([trace(rows)]))
    assert watch.usage[2].cached_tokens == 64
    assert without.usage[2].cached_tokens < 64
    # block 1 is still there or not; each restored block is 16 tokens of 2 bytes over 3,200 bytes/s: 10 ms
    restored = round((result.restored_ratio or 0) * (64 + 64 + 65) / 16)
    assert restored >= 3
    assert watch.first_s[2][0] - 2.0 == pytest.approx(restored * 0.010 + 0.011)


def test_a_prompt_s_blocks_are_fetched_from_an_engine_that_holds_them_over_both_links() -> None:
    rows = [(0.0, 65, 1, [1, 2, 3, 4]), (1.0, 65, 1, [1, 2, 3, 4]), (1.0, 65, 1, [1, 2, 3, 4]), (9.0, 65, 1, [9] * 4)]
    picks: list[object] = [0, (1, 0), (2, 0), (1, 0)]

    def playing(link: float) -> tuple[Watch, sim.SimResult]:
        made: list[Watch] = []

        class Told(Watch):
            def pick(self, ask: Ask, now_s: float) -> object:  # type: ignore[override]  # what a policy may answer
                super().pick(ask, now_s)
                return picks[ask.serial]

        def factory(fleet: PolicyFleet) -> Watch:
            made.append(Told(fleet))
            return made[0]

        # links of 640 and 3,200 bytes/s: the slower one decides
        specs = [spec(peer_bytes_per_s=link), spec(count=2, peer_bytes_per_s=5 * link)]
        result = sim.simulate(specs, OpenLoop([trace(rows)]), factory)
        return made[0], result

    watch, result = playing(640.0)
    assert [watch.usage[row].cached_tokens for row in range(4)] == [0, 64, 64, 0]
    # 4 blocks of 32 bytes take 0.2 s; the second fetch waits for the first, which uses the same sender
    assert watch.first_s[1][0] - 1.0 == pytest.approx(0.2 + 0.011)
    assert watch.first_s[2][0] - 1.0 == pytest.approx(0.4 + 0.011)
    assert result.pulled_ratio == pytest.approx(128 / 260)
    without, result = playing(0.0)
    assert without.usage[1].cached_tokens == 0 and result.pulled_ratio == 0


def test_a_prompt_crosses_from_prefill_to_decode_at_the_link_s_bandwidth() -> None:
    link = HandOver(bytes_per_s=640.0, latency_s=0.05)
    fleet = [spec(role="prefill", hand_over=link), spec(role="decode", pool="d")]
    watch, result = watched(fleet, OpenLoop([trace([(0.0, 32, 3, [1, 2])])]))
    assert watch.first_s[0] == [pytest.approx(0.042)]
    # 2 blocks of 32 bytes take 0.1 s, and 0.05 s more; then two decodes
    assert watch.ended_s[0] == [pytest.approx(0.042 + 0.15 + 0.022 + 0.0005 * (33 + 34))]
    assert [engine.decode_tokens for engine in result.engines] == [0, 2]
    assert result.hand_over_count == 1


def test_layer_wise_transfer_hides_behind_a_prefill_that_is_long_enough() -> None:
    link = HandOver(bytes_per_s=3200.0, layer_count=10)
    fleet = [spec(role="prefill", hand_over=link), spec(role="decode", pool="d")]
    watch, _ = watched(fleet, OpenLoop([trace([(0.0, 32, 2, [1, 2])])]))
    # 64 bytes take 20 ms, less than the prefill's 42: one layer's 2 ms remain
    assert watch.ended_s[0] == [pytest.approx(0.042 + 0.002 + 0.011 + 0.0005 * 33)]


def test_a_closed_loop_waits_for_the_answer_and_the_think_time() -> None:
    rows = [(0.0, 16, 5, [1]), (0.1, 32, 1, [1, 2]), (0.2, 16, 1, [7])]
    watch, result = watched([spec()], ClosedLoop(trace(rows, session=[0, 0, 1], think=2.5)))
    assert watch.arrived_s[1] == pytest.approx(watch.ended_s[0][0] + 2.5)
    assert watch.arrived_s[2] == 0.2
    assert result.completed_count == 3


def test_windows_and_one_whole_trace_give_the_same_run() -> None:
    dice = np.random.default_rng(5)
    base = trace([(float(at), int(dice.integers(1, 90)), int(dice.integers(1, 30)), []) for at in range(40)])
    copies = Copies(base, 7, 3)
    fleet = [spec(count=2)]
    whole = sim.simulate(fleet, OpenLoop([copies.whole()]), policies.least_requests)
    parts = sim.simulate(fleet, OpenLoop(copies.windows(3.0)), policies.least_requests)
    assert whole == parts
    assert whole.requests == 280


def test_more_live_requests_than_there_is_room_for_at_first() -> None:
    rows = [(0.001 * at, 16, 2, [at]) for at in range(3000)]
    result = sim.simulate([spec()], OpenLoop([trace(rows)]), policies.round_robin)
    assert result.completed_count == 3000


def test_hidden_speeds_change_times_and_not_what_the_policy_is_told() -> None:
    load = OpenLoop([trace([(0.1 * at, 64, 8, []) for at in range(20)])])
    fleets: list[PolicyFleet] = []

    def factory(fleet: PolicyFleet) -> Watch:
        fleets.append(fleet)
        return Watch(fleet)

    plain = sim.simulate([spec(count=2)], load, factory)
    hidden = sim.simulate([spec(count=2)], load, factory, sim.SimOptions(engine_spread_ratio=0.3, step_noise_ratio=0.1))
    assert fleets[0] == fleets[1]
    assert plain.end_to_end != hidden.end_to_end


@pytest.mark.parametrize("factory", [policies.round_robin, policies.least_requests, policies.inferplane_route])
def test_the_same_seed_gives_the_same_result_and_another_one_another(factory: PolicyFactory) -> None:
    base = trace([(0.2 * at, 48, 12, [at % 7, 10 + at % 7, 20 + at]) for at in range(60)])
    runs = [
        sim.simulate(
            [spec(count=3)], OpenLoop(Copies(base, 4, seed).windows(2.0)), factory,
            sim.SimOptions(seed=seed, engine_spread_ratio=0.1, step_noise_ratio=0.1),
        )
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert runs[0] == runs[1] != runs[2]


def test_the_production_router_finds_more_of_the_prefixes_than_round_robin() -> None:
    rows = [(0.05 * at, 160, 4, [1000 * (at % 9) + depth for depth in range(10)]) for at in range(300)]
    load = OpenLoop([trace(rows)])
    ours = sim.simulate([spec(count=4, kv_capacity_tokens=1024)], load, policies.inferplane_route)
    theirs = sim.simulate([spec(count=4, kv_capacity_tokens=1024)], load, policies.round_robin)
    assert (ours.prefix_hit_ratio or 0) > (theirs.prefix_hit_ratio or 0) + 0.1
    assert (ours.ttft.mean_s or 0) < (theirs.ttft.mean_s or 9)


class Refuser(Watch):
    """Takes nothing."""

    def pick(self, ask: Ask, now_s: float) -> int:
        return None  # type: ignore[return-value]  # what a policy without an engine answers


def test_a_policy_may_refuse() -> None:
    result = sim.simulate([spec()], OpenLoop([trace([(0.0, 8, 1, [])])]), Refuser)
    assert (result.requests, result.completed_count, result.goodput_ratio) == (1, 0, 0.0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: spec(count=0), "count is 0; expected at least 1"),
        (lambda: spec(role="draft"), "role is 'draft'; expected one of both, prefill, decode"),
        (lambda: spec(max_batched_tokens=129), "their step table ends at 128"),
        (lambda: LowerTier(0, 1), "capacity_bytes is 0; expected above 0"),
        (lambda: HandOver(0), "bytes_per_s is 0; expected above 0"),
        (lambda: sim.SimOptions(slo_ttft_s=0), "slo_ttft_s is 0; expected above 0"),
        (lambda: watched([], OpenLoop([])), "no engine computes prompts"),
        (lambda: watched([spec(role="prefill", hand_over=HandOver(1))], OpenLoop([])), "no decode engine"),
        (lambda: watched([spec(role="prefill"), spec(role="decode")], OpenLoop([])), "no transfer bandwidth"),
        (lambda: watched([spec(kv_capacity_tokens=3)], OpenLoop([])), "room for 0 KV blocks"),
        (
            lambda: watched([spec()], OpenLoop([trace([(1.0, 8, 1, [])]), trace([(0.5, 8, 1, [])])])),
            "expected a trace sorted by arrival",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(make: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()  # type: ignore[operator]  # a lambda of the table above


def line(arrived: list[float], ended: list[float], ttft_s: list[float | None]) -> sim.Timeline:
    return sim.Timeline(1.0, tuple(arrived), tuple(ended), tuple(0.0 for _ in ended), tuple(ttft_s))


@pytest.mark.parametrize(
    ("ended", "ttft_s", "grew"),
    [
        ([5.0] * 32, [float(at) for at in range(32)], True),
        ([10.0] * 16 + [0.0] * 16, [6.0] * 32, False),  # a long queue that stays as it is
        ([5.0] * 32, [0.1] * 32, False),  # long answers that are merely running
        ([5.0] * 8 + [10.0] * 20 + [0.0] * 4, [9.0] * 12 + [20.0] * 20, False),  # it grew early only
    ],
)
def test_a_queue_that_grows_to_the_last_arrival_is_told(
    ended: list[float], ttft_s: list[float | None], grew: bool
) -> None:
    found = sim.growing_queue(line([10.0] * 16 + [0.0] * 16, ended, ttft_s), slo_ttft_s=5.0)
    assert found == (sim.GrowingQueue(10.0, 5.0) if grew else None)


def test_too_few_arrivals_say_nothing_of_a_queue() -> None:
    assert sim.growing_queue(line([10.0] * 4, [1.0] * 4, [50.0] * 4), 5.0) is None
    assert sim.growing_queue(line([], [], []), 5.0) is None


def mirrored(
    rows: list[tuple[float, int, int, list[int]]], delay_s: float, every_s: float = 0.05
) -> tuple[list[set[int]], list[tuple[EngineSample, float]]]:
    """What a policy that hears was told of the engine's blocks by each pick, and the samples with their times."""
    held: list[set[int]] = []
    samples: list[tuple[EngineSample, float]] = []

    class Listening(Mirror):
        def pick(self, ask: Ask, now_s: float) -> int:
            held.append(set(self.held.get((0, KvTier.DEVICE), set())))
            return super().pick(ask, now_s)

        def metrics(self, said: Sequence[EngineSample], sampled_s: float) -> None:
            samples.append((said[0], sampled_s))

    def factory(fleet: PolicyFleet) -> Mirror:
        return Listening(fleet, metrics_every_s=every_s)

    sim.simulate([spec()], OpenLoop([trace(rows)]), factory, sim.SimOptions(event_delay_s=delay_s))
    return held, samples


def test_blocks_are_told_late_by_the_delay() -> None:
    # the first prompt's step begins at 0; nothing is known of it at 4 ms, all of it at 5 ms
    rows = [(0.0, 32, 1, [1, 2]), (0.004, 8, 1, []), (0.005, 8, 1, []), (0.006, 8, 1, [])]
    held, _ = mirrored(rows, delay_s=0.005)
    assert held == [set(), set(), {2, 3}, {2, 3}], "a block of the trace is told as one more: 0 is nobody's"
    held, _ = mirrored(rows, delay_s=0.0)
    assert held == [set(), {2, 3}, {2, 3}, {2, 3}]


def test_a_sample_is_of_the_last_tick() -> None:
    # a prefill of 42 ms, and one that waits behind it from 20 ms on
    rows: list[tuple[float, int, int, list[int]]] = [
        (0.0, 32, 1, []),
        (0.02, 16, 1, []),
        (0.035, 8, 1, []),
        (0.3, 8, 1, []),
    ]
    _, samples = mirrored(rows, delay_s=0.0, every_s=0.03)
    # at 20 ms that of 0 is the newest and has been told; at 35 ms that of 30 ms is
    assert [(sample.waiting_count, sample.running_count) for sample, _ in samples] == [(0, 0), (1, 1), (0, 0)]
    assert [sampled_s for _, sampled_s in samples] == pytest.approx([0.0, 0.03, 0.3])
    assert [sample.queued_tokens for sample, _ in samples] == [0, 16, 0]
    # the first prompt's 32 tokens take 2 of 256 blocks
    assert [sample.kv_usage_ratio for sample, _ in samples] == pytest.approx([0.0, 2 / 256, 0.0])


def test_the_log_of_blocks_is_made_only_for_those_who_hear() -> None:
    replay = sim.Replay([spec()], OpenLoop([trace([(0.0, 32, 1, [1, 2])])]), policies.round_robin, sim.SimOptions())
    assert len(replay.cluster.kv_log) == 1
    replay.run(lambda _: None)
    assert replay.cluster.totals[0].kv_count == 0


class Deaf:
    """A policy whose ears are at fault."""

    hears = reads_blocks = False
    hears_kv_events = True

    def __init__(self, fleet: PolicyFleet) -> None:
        """Of nothing."""

    def pick(self, ask: Ask, now_s: float) -> int:
        return 0

    def stored(self, engine: int, blocks: Sequence[int], tier: KvTier, now_s: float) -> None:
        raise LookupError("no such tier")


def test_a_fault_in_hearing_is_the_policy_s() -> None:
    load = OpenLoop([trace([(0.0, 32, 1, [1, 2]), (1.0, 8, 1, [])])])
    with pytest.raises(
        ConfigError, match=r"the policy d failed in stored, removed or metrics .LookupError: no such ti"
    ):
        sim.simulate([spec()], load, Deaf, sim.SimOptions(policy_name="d"))  # type: ignore[arg-type] # its fault


def test_a_delay_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"event_delay_s is -1.0; expected 0 or more"):
        sim.SimOptions(event_delay_s=-1.0)
