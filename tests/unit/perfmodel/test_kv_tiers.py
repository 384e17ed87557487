"""Tiers: restoring against recomputing, break-even, and where waiting sessions fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.errors import ConfigError
from perfmodel.kv_tiers import Reuse, SessionLoad, Tier, TierKind, plan_tiers

# Llama-3.1-70B in BF16 at 10,000 prefill tokens a second.
LLAMA = Reuse(kv_bytes_per_token=327_680, prefill_tok_per_s=10_000)
HBM = Tier(TierKind.HBM, 40e9, 3.35e12)
DRAM = Tier(TierKind.DRAM, 400e9, 64e9, 20e-6)
NVME = Tier(TierKind.NVME, 4e12, 7e9, 1e-4)
SLOW = Tier(TierKind.REMOTE, 1e15, 1e9, 0.01)


def test_break_even_bandwidth_is_bytes_per_token_times_prefill_speed() -> None:
    assert LLAMA.break_even_bytes_per_s == pytest.approx(3.2768e9)
    at = replace(DRAM, read_bytes_per_s=LLAMA.break_even_bytes_per_s, latency_s=0)
    assert LLAMA.restore_s(at, 5000) == pytest.approx(LLAMA.recompute_s(5000))


def test_restoring_wins_above_the_break_even_length() -> None:
    tokens = LLAMA.break_even_tokens(NVME)
    assert tokens is not None
    assert LLAMA.restore_s(NVME, tokens) == pytest.approx(LLAMA.recompute_s(tokens))
    assert LLAMA.restore_wins(NVME, 1.01 * tokens)
    assert not LLAMA.restore_wins(NVME, 0.99 * tokens)
    assert LLAMA.break_even_tokens(SLOW) is None
    assert not LLAMA.restore_wins(SLOW, 1e9)
    assert LLAMA.break_even_tokens(HBM) == 0
    assert LLAMA.restore_s(HBM, 1e6) == 0


def test_sessions_fill_the_fastest_tiers_first_and_the_rest_is_dropped() -> None:
    # 10 turns a second after 60 s of thought: 600 sessions of 1 GB wait.
    load = SessionLoad(kv_bytes=1e9, token_count=3000, idle_s=60, turns_per_s=10)
    assert load.waiting_bytes == 600e9
    assert load.byte_minutes == 1e9
    plan = plan_tiers([replace(NVME, capacity_bytes=100e9), HBM, DRAM], load, 10_000)
    assert [share.tier for share in plan.shares] == [TierKind.HBM, TierKind.DRAM, TierKind.NVME, None]
    assert [share.held_bytes for share in plan.shares] == pytest.approx([40e9, 400e9, 100e9, 0])
    assert sum(share.session_ratio for share in plan.shares) == pytest.approx(1)
    assert plan.kept_ratio == pytest.approx(540 / 600)
    dropped = plan.shares[-1]
    assert dropped.resume_s == pytest.approx(0.3)
    by_hand = (400 * (20e-6 + 1 / 64) + 100 * (1e-4 + 1 / 7) + 60 * 0.3) / 600
    assert plan.mean_resume_s == pytest.approx(by_hand)
    assert plan.recompute_saved_s_per_s == pytest.approx(10 * (0.3 - by_hand))


def test_a_tier_slower_than_recomputing_is_left_out() -> None:
    load = SessionLoad(kv_bytes=1e9, token_count=3000, idle_s=60, turns_per_s=10)
    plan = plan_tiers([SLOW], load, 10_000)
    assert [share.tier for share in plan.shares] == [None]
    assert (plan.kept_ratio, plan.mean_resume_s, plan.recompute_saved_s_per_s) == (0, 0.3, 0)
    # A slower engine makes the same tier worth having.
    assert plan_tiers([SLOW], load, 1000).kept_ratio == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(DRAM, read_bytes_per_s=0), "tier dram: read_bytes_per_s is 0"),
        (lambda: replace(DRAM, capacity_bytes=-1), "tier dram: capacity_bytes is -1"),
        (lambda: replace(DRAM, latency_s=-1), "tier dram: latency_s is -1"),
        (lambda: replace(LLAMA, prefill_tok_per_s=0), "reuse: prefill_tok_per_s is 0"),
        (lambda: SessionLoad(1, 1, 0, 1), "session load: idle_s is 0"),
    ],
)
def test_impossible_figures_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()
