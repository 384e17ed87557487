"""The rules of other routers, asked directly: each decision can be worked out by hand from the rule's own text.

Owns: what each rule does, and when it leaves the engine that holds a 119,000-token session. Does not own: the views of
prefixes (`test_prefix_views`) or playing traces (`test_published_policies` among the integration tests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from router.adapters import policies
from router.errors import PolicyError
from router.policies.mooncake import prefill_s
from router.policies.sticky import StickyTwiceSettings
from tests.fakes.policy_fleet import Ask, Engine, Fleet

# An agent's step: 119,000 tokens of prefix, 875 new.
PREFIX_TOKENS, NEW_TOKENS, WIDTH = 119_000, 875, 16
HELD = tuple(range(1, PREFIX_TOKENS // WIDTH + 1))
STEP = (*HELD, *range(100_000, 100_000 + NEW_TOKENS // WIDTH))


class Sample(NamedTuple):
    waiting_count: int = 0
    running_count: int = 0
    kv_usage_ratio: float = 0.0
    queued_tokens: int = 0


class Usage(NamedTuple):
    cached_tokens: int = 0
    input_tokens: int = 64
    output_tokens: int = 9


def fleet(count: int, **changes: Any) -> Fleet:
    return Fleet(tuple(replace(Engine(f"e{number}"), **changes) for number in range(count)))


def step(serial: int, session: int = 1) -> Ask:
    return Ask(serial, session=session, input_tokens=PREFIX_TOKENS + NEW_TOKENS, blocks=STEP)


def other(serial: int, tokens: int = PREFIX_TOKENS, first: int = 500_000, session: int = 2) -> Ask:
    return Ask(serial, session=session, input_tokens=tokens, blocks=tuple(range(first, first + tokens // WIDTH)))


def done(policy: Any, serial: int, now_s: float = 1.0) -> None:
    policy.first_token(serial, now_s)
    policy.finished(serial, Usage(), now_s)


def picks(policy: Any, asks: Sequence[Ask]) -> list[int]:
    return [policy.pick(ask, 0.0) for ask in asks]


class TestPowerOfTwo:
    def test_the_less_loaded_of_two(self) -> None:
        policy = policies.power_of_two(fleet(2))
        first = policy.pick(Ask(0), 0.0)
        assert picks(policy, [Ask(1)]) == [1 - first]
        policy.finished(0, Usage(), 1.0)
        assert policy.pick(Ask(2), 1.0) == first

    def test_two_distinct_engines_are_drawn(self) -> None:
        policy = policies.power_of_two(fleet(8))
        counts = Counter(picks(policy, [Ask(serial) for serial in range(800)]))
        # a single random choice would leave a spread of about 40; two choices leave a handful
        assert max(counts.values()) - min(counts.values()) < 12

    def test_one_engine(self) -> None:
        assert picks(policies.power_of_two(fleet(1)), [Ask(0), Ask(1)]) == [0, 0]


class TestSticky:
    def test_a_session_never_moves_whatever_its_engine_does(self) -> None:
        policy = policies.sticky(fleet(4))
        assert len(set(picks(policy, [Ask(serial, session=7) for serial in range(50)]))) == 1

    def test_sessions_spread(self) -> None:
        counts = Counter(picks(policies.sticky(fleet(4)), [Ask(n, session=n) for n in range(400)]))
        assert set(counts) == {0, 1, 2, 3} and min(counts.values()) > 60

    def test_without_a_session_the_first_block_decides_and_without_that_nothing(self) -> None:
        policy = policies.sticky(fleet(4))
        assert len({policy.pick(Ask(n, blocks=(5, n)), 0.0) for n in range(20)}) == 1
        assert len({policy.pick(Ask(n), 0.0) for n in range(40)}) == 4


class TestStickyTwice:
    def home(self) -> int:
        return policies.sticky(fleet(4)).pick(Ask(0, session=1), 0.0)

    def test_it_leaves_only_above_twice_the_mean(self) -> None:
        policy = policies.sticky_2x(fleet(4))
        home = self.home()
        # alone on its engine: 1 in flight there, a mean of 0.25, so the next one leaves
        assert policy.pick(Ask(0, session=1), 0.0) == home
        assert policy.pick(Ask(1, session=1), 0.0) != home
        # 1, 1 and a mean of 0.5: exactly twice, it stays
        assert policy.pick(Ask(2, session=1), 0.0) == home

    def test_the_load_can_be_prompt_tokens(self) -> None:
        settings = StickyTwiceSettings(load="tokens")
        policy = policies.sticky_2x(fleet(4), settings)
        home = self.home()
        assert policy.pick(Ask(0, session=1, input_tokens=10), 0.0) == home
        assert policy.pick(Ask(1, session=1, input_tokens=1000), 0.0) != home, "10 over a mean of 2.5"
        assert policy.pick(Ask(2, session=1, input_tokens=1000), 0.0) == home, "10 over a mean of 252.5"
        assert sorted(policy.loads) == [0, 0, 1000, 1010]

    def test_the_pin_can_move(self) -> None:
        policy = policies.sticky_2x(fleet(4), StickyTwiceSettings(moves=True))
        policy.pick(Ask(0, session=1), 0.0)
        moved = policy.pick(Ask(1, session=1), 0.0)
        for serial in (0, 1):
            policy.finished(serial, Usage(), 1.0)
        assert policy.pick(Ask(2, session=1), 2.0) == moved != self.home()

    def test_what_it_cannot_count_is_refused(self) -> None:
        with pytest.raises(PolicyError, match="load is 'bytes'; expected one of requests, tokens"):
            StickyTwiceSettings(load="bytes")


class TestSglang:
    def test_a_match_above_the_threshold_stays_and_one_below_goes_to_the_idlest(self) -> None:
        policy = policies.sglang_cache_aware(fleet(3))
        warm = policy.pick(Ask(0, input_tokens=160, blocks=tuple(range(1, 11))), 0.0)
        assert policy.pick(Ask(1, input_tokens=160, blocks=(1, 2, 3, 4, 91, 92, 93, 94, 95, 96)), 0.0) == warm
        # 3 of 10 blocks are not more than 30 %
        assert policy.pick(Ask(2, input_tokens=160, blocks=(1, 2, 3, *range(80, 87))), 0.0) != warm

    def test_ties_of_load_go_to_whoever_got_fewest_so_far(self) -> None:
        policy = policies.sglang_cache_aware(fleet(4))
        chosen = []
        for serial in range(40):
            chosen.append(policy.pick(Ask(serial, blocks=(1000 * serial + 1,)), 0.0))
            done(policy, serial)
        assert set(Counter(chosen).values()) == {10}

    def test_it_leaves_only_above_64_requests_and_one_and_a_half_times_then_all_leave(self) -> None:
        policy = policies.sglang_cache_aware(fleet(2))
        warm = policy.pick(step(0), 0.0)
        # 65 in flight on the warm one, none on the other: 64 more than it is not above 64
        for serial in range(1, 64):
            assert policy.pick(step(serial), 0.0) == warm
        assert policy.pick(step(64), 0.0) == warm
        assert policy.pick(step(65), 0.0) != warm, "65 over 0"
        assert policy.pick(Ask(66), 0.0) != warm, "and everybody else with it"

    def test_a_spread_above_64_below_one_and_a_half_times_keeps_the_match(self) -> None:
        policy = policies.sglang_cache_aware(fleet(2))
        warm = policy.pick(step(0), 0.0)
        serial = 1
        # both to 200, then the warm one to 290: 290 <= 1.5 * 200
        while min(policy._in_flight.counts) < 200:
            policy.pick(Ask(serial, blocks=(10_000_000 + serial,)), 0.0)
            serial += 1
        for _ in range(90):
            assert policy.pick(step(serial), 0.0) == warm
            serial += 1


class TestDynamo:
    def warm(self, scale_name: str = "dynamo_kv") -> Any:
        policy = getattr(policies, scale_name)(fleet(8))
        policy.stored(3, HELD, "device", 0.0)
        return policy

    def test_costs_in_blocks_by_hand(self) -> None:
        policy = self.warm()
        costs = policy.costs(step(0))
        blocks = (PREFIX_TOKENS + NEW_TOKENS) / WIDTH
        assert costs[3] == pytest.approx(blocks - len(HELD) + blocks)
        assert costs[0] == pytest.approx(blocks + blocks)
        assert policy.pick(step(0), 0.0) == 3
        # until its first token the new part is still to be computed there, and its blocks are in use
        assert policy.costs(other(1))[3] - policy.costs(other(1))[0] == pytest.approx(2 * blocks - len(HELD))
        policy.first_token(0, 1.0)
        assert policy.costs(other(1))[3] - policy.costs(other(1))[0] == pytest.approx(blocks)
        policy.finished(0, Usage(), 2.0)
        assert policy.costs(other(1))[3] == pytest.approx(policy.costs(other(1))[0])

    def test_it_leaves_with_one_other_active_session(self) -> None:
        policy = self.warm()
        policy.stored(3, other(9).blocks, "device", 0.0)
        # a second session of 7,493 blocks decodes on the warm engine: 55 new + 7,493 > 7,492 cold
        assert policy.pick(other(9, tokens=119_888), 0.0) == 3
        policy.first_token(9, 1.0)
        assert policy.pick(step(0), 2.0) != 3

    def test_scale_8_stays_with_one_other(self) -> None:
        policy = self.warm("dynamo_kv_8")
        policy.stored(3, other(9).blocks, "device", 0.0)
        assert policy.pick(other(9, tokens=119_888), 0.0) == 3
        policy.first_token(9, 1.0)
        assert policy.pick(step(0), 2.0) == 3

    def test_a_shared_prefix_in_use_counts_once(self) -> None:
        policy = self.warm()
        policy.pick(step(0), 0.0)
        policy.first_token(0, 1.0)
        costs = policy.costs(step(1))
        assert costs[3] < 1.05 * (costs[0] - len(HELD)) + NEW_TOKENS, "its own blocks are in use already"
        assert policy.pick(step(1), 2.0) == 3

    def test_the_lower_tier_counts_three_quarters(self) -> None:
        policy = self.warm()
        policy.stored(5, HELD, "lower", 0.0)
        costs = policy.costs(step(0))
        assert costs[5] - costs[3] == pytest.approx(0.25 * len(HELD))

    def test_an_entry_without_an_end_is_dropped_after_five_minutes(self) -> None:
        policy = self.warm()
        policy.pick(step(0), 0.0)
        policy.pick(other(1, tokens=64), 301.0)
        policy.first_token(0, 302.0)
        policy.finished(0, Usage(), 303.0)
        done(policy, 1, 304.0)
        assert len(set(policy.costs(other(2)))) == 1

    def test_temperature_draws_the_cheaper_more_often(self) -> None:
        settings = replace(policies.DYNAMO, temperature_ratio=0.5)
        policy = policies.dynamo_kv(fleet(2), settings)
        policy.stored(1, HELD, "device", 0.0)
        drawn: Counter[int] = Counter()
        for serial in range(400):
            drawn[policy.pick(step(serial), 0.0)] += 1
            done(policy, serial)
        # exp(0) to exp(-2): 88 %
        assert 320 < drawn[1] < 385

    def test_a_negative_temperature_is_refused(self) -> None:
        with pytest.raises(PolicyError, match=r"temperature_ratio is -1.0; expected 0 or more"):
            replace(policies.DYNAMO, temperature_ratio=-1.0)


class TestLlmd:
    def with_history(self, share: float = 1.0) -> Any:
        policy = policies.llmd_default(fleet(2))
        ask = Ask(0, input_tokens=119_872, blocks=STEP[: int(share * len(STEP))])
        policy.metrics([Sample(), Sample(waiting_count=9)], 0.0)
        assert policy.pick(ask, 0.0) == 0
        return policy

    def test_the_cold_one_wins_at_4_0_to_3_4(self) -> None:
        policy = self.with_history()
        policy.metrics([Sample(waiting_count=1, kv_usage_ratio=0.8), Sample()], 1.0)
        assert policy.scores(step(1)) == pytest.approx([3.4, 4.0])
        assert policy.pick(step(1), 1.0) == 1

    def test_it_stays_while_the_gap_in_usage_is_at_most_a_half(self) -> None:
        policy = self.with_history()
        for usage, stays in ((0.49, True), (0.51, False)):
            policy.metrics([Sample(waiting_count=1, kv_usage_ratio=usage), Sample()], 1.0)
            scores = policy.scores(step(1))
            assert (scores[0] > scores[1]) is stays

    def test_after_a_compaction_one_waiting_request_is_enough(self) -> None:
        policy = self.with_history(share=0.6)
        policy.metrics([Sample(waiting_count=1), Sample()], 1.0)
        scores = policy.scores(step(1))
        assert scores == pytest.approx([3 * 0.6 + 2, 4.0], abs=1e-3)

    def test_one_waiting_is_worth_as_much_as_a_hundred(self) -> None:
        policy = policies.llmd_default(fleet(3))
        policy.metrics([Sample(), Sample(waiting_count=1), Sample(waiting_count=1)], 0.0)
        one = policy.scores(Ask(0))
        policy.metrics([Sample(), Sample(waiting_count=100), Sample(waiting_count=100)], 0.0)
        assert policy.scores(Ask(0)) == one == [4.0, 2.0, 2.0]

    def test_the_history_of_may_2026_sees_4096_tokens_only(self) -> None:
        settings = replace(policies.LLMD_DEFAULT, most_matched_tokens=4096)
        policy = policies.llmd_default(fleet(2), settings)
        policy.metrics([Sample(), Sample(waiting_count=1)], 0.0)
        policy.pick(step(0), 0.0)
        fork = Ask(1, input_tokens=119_872, blocks=(*STEP[:256], *range(200_000, 207_000)))
        assert policy.scores(fork)[0] - policy.scores(fork)[1] == pytest.approx(2 + 3)

    def test_a_pod_forgets_after_31_250_blocks(self) -> None:
        policy = self.with_history()
        # four more sessions of 7,437 blocks fit 500,000 tokens with it; the fifth drives it out
        for number, kept in enumerate((True, True, True, False)):
            policy.metrics([Sample(), Sample(waiting_count=9)], 0.0)
            policy.pick(other(10 + number, first=1_000_000 * (number + 1)), 0.0)
            policy.metrics([Sample(), Sample()], 0.0)
            scores = policy.scores(step(1))
            assert (scores[0] > scores[1]) is kept

    def test_without_metrics_it_has_only_the_prefix(self) -> None:
        policy = policies.llmd_default(fleet(2))
        assert policy.scores(Ask(0)) == [4.0, 4.0]

    def test_precise_never_leaves_a_full_hit(self) -> None:
        policy = policies.llmd_precise(fleet(2))
        policy.stored(0, STEP, "device", 0.0)
        policy.metrics([Sample(waiting_count=50, kv_usage_ratio=0.999), Sample()], 0.0)
        assert policy.scores(step(0)) == pytest.approx([2.001, 2.0])
        assert policy.pick(step(0), 0.0) == 0
        policy.removed(0, STEP[:1], "device", 1.0)
        assert policy.pick(step(1), 1.0) == 1

    def test_precise_scores_the_share_of_the_prompt(self) -> None:
        policy = policies.llmd_precise(fleet(3))
        policy.stored(0, STEP[:10], "device", 0.0)
        policy.stored(0, STEP[10:20], "lower", 0.0)
        policy.stored(1, STEP[:20], "device", 0.0)
        assert policy.scores(step(0)) == pytest.approx([2 + 2 * 18 / len(STEP), 2 + 2 * 20 / len(STEP), 2.0])

    def test_the_older_scorer_stretched_between_the_pods_that_have_any(self) -> None:
        policy = policies.llmd_precise(fleet(3), replace(policies.LLMD_PRECISE, normalised="minmax"))
        policy.stored(1, STEP[:1], "device", 0.0)
        assert policy.scores(step(0)) == pytest.approx([2.0, 4.0, 2.0]), "one block is all of the points"
        policy.stored(0, STEP[:10], "device", 0.0)
        assert policy.scores(step(0)) == pytest.approx([4.0, 2.0, 2.0])
        policy.stored(1, STEP[1:5], "device", 0.0)
        policy.stored(2, STEP[:1], "device", 0.0)
        assert policy.scores(step(0)) == pytest.approx([4.0, 2 + 2 * 4 / 9, 2.0])

    def test_an_unknown_way_to_normalise_is_refused(self) -> None:
        with pytest.raises(PolicyError, match="normalised is 'z'; expected one of minmax, share"):
            replace(policies.LLMD_PRECISE, normalised="z")


class TestAibrix:
    def test_on_eight_idle_pods_one_running_request_is_too_many(self) -> None:
        # 200K tokens: one session of 119K fits the index
        policy = policies.aibrix_prefix(fleet(8))
        warm = policy.pick(step(0), 0.0)
        done(policy, 0)
        assert policy.pick(step(1), 1.0) == warm, "idle: it stays"
        # 1 running there: above the mean of .125 and .33
        assert policy.pick(step(2), 2.0) != warm

    def test_within_a_standard_deviation_the_match_wins(self) -> None:
        policy = policies.aibrix_prefix(fleet(2))
        warm = policy.pick(step(0), 0.0)
        # 1 and 0 running: mean .5, deviation .5
        assert policy.pick(step(1), 0.0) == warm

    def test_the_idlest_only_when_the_spread_is_above_eight(self) -> None:
        settings = replace(policies.AIBRIX, deviation_ratio=1e9)
        policy = policies.aibrix_prefix(fleet(2), settings)
        warm = policy.pick(step(0), 0.0)
        assert picks(policy, [step(serial) for serial in range(1, 9)]) == [warm] * 8
        assert policy.pick(step(9), 0.0) != warm, "9 over 0"

    def test_it_forgets_after_twenty_minutes_and_after_200_000_tokens(self) -> None:
        policy = policies.aibrix_prefix(fleet(2))
        policy.pick(step(0), 0.0)
        done(policy, 0)
        policy._index.forget_idle(1200.0)
        assert max(policy._index.matched(STEP)) == len(STEP)
        policy._index.forget_idle(1201.0)
        assert max(policy._index.matched(STEP)) == 0
        policy.pick(step(1), 1300.0)
        policy.pick(other(2), 1301.0)
        assert max(policy._index.matched(STEP)) < len(STEP)
        assert max(policy._index.matched(other(2).blocks)) == len(other(2).blocks)


class TestMooncake:
    ENGINE = Engine("e", prefill_tok_per_s=10_000.0, prefill_overhead_s=0.01, prefill_s_per_token2=1e-9)

    def test_prefill_time_by_hand(self) -> None:
        assert prefill_s(self.ENGINE, 1000, 0) == pytest.approx(0.01 + 0.1 + 1e-9 * 1000 * 500)
        assert prefill_s(self.ENGINE, 1000, 600) == pytest.approx(0.01 + 0.04 + 1e-9 * 400 * 800)
        assert prefill_s(self.ENGINE, 1000, 1000) == pytest.approx(0.01 + 0.0001 + 1e-9 * 999.5)

    @pytest.mark.parametrize(("queued_tokens", "stays"), [(100_000, True), (120_000, False)])
    def test_it_leaves_when_the_queue_is_longer_than_a_prefill_elsewhere(self, queued_tokens: int, stays: bool) -> None:
        policy = policies.mooncake(fleet(2))
        queued = other(0, tokens=queued_tokens)
        policy.stored(0, (*HELD, *queued.blocks[:5]), "device", 0.0)
        assert policy.pick(queued, 0.0) == 0, "80 tokens less than on the other"
        # 9.99 or 11.99 s behind which 883 tokens take 0.09 s, or 11.99 s at once
        estimates = [ttft_s for ttft_s, _, _ in policy.estimates_s(step(1))]
        assert estimates == pytest.approx([(queued_tokens - 80 + 883) / 10_000, 11.9875])
        assert (policy.pick(step(1), 1.0) == 0) is stays
        policy.first_token(0, 2.0)
        assert policy.pick(step(2), 2.0) == 0, "the queue is gone"

    def test_either_tier_is_a_prefix(self) -> None:
        policy = policies.mooncake(fleet(2))
        policy.stored(1, HELD, "lower", 0.0)
        assert policy.pick(step(0), 0.0) == 1

    @pytest.mark.parametrize(("ratio", "held", "fetched"), [(2.0, 1, True), (2.0, len(HELD), False), (1e9, 1, False)])
    def test_it_fetches_where_another_holds_many_times_the_prefix(self, ratio: float, held: int, fetched: bool) -> None:
        linked = tuple(replace(each, peer_bytes_per_s=1e8) for each in fleet(2).engines)
        policy = policies.mooncake(Fleet(linked), replace(policies.MOONCAKE, balancing_ratio=ratio))
        policy.stored(0, HELD, "device", 0.0)
        policy.stored(1, HELD[:held], "device", 0.0)
        policy.pick(Ask(0, input_tokens=100_000, blocks=tuple(HELD)), 0.0)  # 16 blocks a thousand bytes each
        ttft_s, own_s, source = policy.estimates_s(step(1))[1]
        assert (source == 0) is fetched
        if fetched:
            assert ttft_s - own_s == pytest.approx((len(HELD) - held) * 16 * 1_000 / 1e8)

    def test_it_refuses_only_when_told_when(self) -> None:
        settings = replace(policies.MOONCAKE, reject_above_s=5.0)
        policy = policies.mooncake(fleet(2), settings)
        assert policy.pick(step(0), 0.0) is None
        assert policy.pick(Ask(1), 0.0) is not None
        done(policy, 1)
        assert policies.mooncake(fleet(2)).pick(step(0), 0.0) is not None

    def test_a_refusal_by_the_engine_frees_the_queue(self) -> None:
        policy = policies.mooncake(fleet(1))
        policy.pick(step(0), 0.0)
        policy.finished(0, Usage(output_tokens=0), 0.0)
        assert policy.estimates_s(Ask(1, input_tokens=100))[0][0] == pytest.approx(0.01)


class TestSmetric:
    def settled(self, **changes: Any) -> tuple[Any, int]:
        settings = replace(policies.SMETRIC, prefill_work_per_s=10_000.0, **changes)
        policy = policies.smetric(fleet(3), settings)
        warm = policy.pick(step(0), 0.0)
        done(policy, 0)
        return policy, warm

    def test_it_stays_while_its_engine_keeps_the_promise(self) -> None:
        policy, warm = self.settled()
        assert policy.pick(step(1), 10.0) == warm
        # 40,000 tokens of work queued there: 4 s, still within 5 s
        policy._work[warm] = 40_000.0
        assert policy.pick(step(2), 11.0) == warm

    def test_it_leaves_for_an_engine_that_keeps_the_promise_when_its_own_does_not(self) -> None:
        policy, warm = self.settled(ttft_slo_base_s=15.0)
        policy._work[warm] = 200_000.0
        assert policy.pick(step(1), 10.0) != warm

    def test_it_stays_when_nobody_keeps_it(self) -> None:
        # 12 s elsewhere, 20 s here, 5 s promised
        policy, warm = self.settled()
        policy._work[warm] = 200_000.0
        assert policy.pick(step(1), 10.0) == warm

    def test_a_first_turn_goes_to_the_least_work_times_requests(self) -> None:
        policy, _ = self.settled()
        policy._work = [10.0, 10.0, 10.0]
        policy._in_flight.placed(90, 0)
        policy._in_flight.placed(91, 1)
        assert policy.pick(Ask(5, session=77, input_tokens=119_872, blocks=STEP), 10.0) == 2

    def test_a_small_part_of_the_history_is_no_reason_to_stay(self) -> None:
        policy, warm = self.settled()
        half = len(STEP) // 2
        fork = (*STEP[: half - 400], *range(300_000, 300_000 + half + 400))
        for serial in range(3):
            policy._in_flight.placed(100 + serial, warm)
        assert policy.pick(Ask(1, session=1, input_tokens=119_872, blocks=fork), 10.0) != warm

    def test_the_rate_is_learned_from_eight_first_tokens(self) -> None:
        policy = policies.smetric(fleet(1))
        for serial in range(8):
            assert policy._rates[0].work_per_s is None
            policy.pick(Ask(serial, input_tokens=1000), float(serial))
            policy.first_token(serial, serial + (1.0 if serial else 0.5))
            policy.finished(serial, Usage(), serial + 1.0)
        # 2,000 once and 1,000 seven times: the 90th percentile of eight is the seventh
        assert policy._rates[0].work_per_s == pytest.approx(1000.0)

    def test_what_the_engine_refused_is_no_work(self) -> None:
        policy = policies.smetric(fleet(1))
        policy.pick(step(0), 0.0)
        policy.finished(0, Usage(output_tokens=0), 0.0)
        assert policy._work == [0.0] and policy._in_flight.counts == [0]


def test_every_policy_has_a_source_in_its_module() -> None:
    for made in (policies.sticky_2x, policies.dynamo_kv, policies.llmd_default, policies.aibrix_prefix):
        assert "router notes, section" in (__import__(type(made(fleet(2))).__module__, fromlist=["_"]).__doc__ or "")
