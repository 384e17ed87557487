"""The first token of a benchmark: the engine of its replay, agents by Little's law, corrections by group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.adapters.catalog import Catalog
from perfmodel.adapters.coefficient_file import CoefficientFile
from perfmodel.adapters.measured import configured
from perfmodel.coefficients import FirstToken
from perfmodel.configuration import Configuration
from perfmodel.first_token import agent_turn, correction, correction_keys, first_token_s, replayed_run

ROW = {
    "gpu": "H100-SXM-80GB", "model": "Qwen3-32B", "engine": "vllm", "date": "2025-10-29", "weight_dtype": "bf16",
    "kv_dtype": "bf16", "n_gpus": "2", "tp": "2", "isl": "1000", "osl": "500", "concurrency_or_batch": "8",
    "scenario": "closed_loop", "lengths": "uniform_0.8_1.0",
}  # fmt: skip
SPLIT = {
    "disagg(prefill_gpus/decode_gpus or blank)": "2/4", "prefill_layout": "1x(tp2,dp1,bs1)",
    "decode_layout": "2x(tp2,dp1,bs4)",
}  # fmt: skip
AGENTS = {"scenario": "agentic", "prefix_hit_ratio": "0.5", "isl": "20000", "lengths": ""}


def made(catalog: Catalog, **changes: str) -> Configuration:
    return configured({**ROW, **changes}, catalog)


def seconds(asked: Configuration, shipped: CoefficientFile, first: FirstToken | None = None) -> float:
    return first_token_s(asked, shipped.coefficients, first or FirstToken())


def test_it_grows_with_prompt_and_clients_and_is_the_same_each_time(catalog: Catalog, shipped: CoefficientFile) -> None:
    short = seconds(made(catalog), shipped)
    assert 0.02 < short < 1
    assert seconds(made(catalog), shipped) == short
    assert seconds(made(catalog, isl="8000"), shipped) > 3 * short
    assert seconds(made(catalog, concurrency_or_batch="64"), shipped) > 2 * short


def test_clients_beyond_the_cache_wait_for_its_room(catalog: Catalog, shipped: CoefficientFile) -> None:
    one = {"n_gpus": "1", "tp": "1", "isl": "2048", "osl": "512", "concurrency_or_batch": "16"}
    # SGLang leaves a cache of a few sequences here; most clients wait for whole answers.
    full = seconds(made(catalog, engine="sglang", **one), shipped)
    assert full > 10
    assert seconds(made(catalog, engine="sglang", **{**one, "concurrency_or_batch": "1"}), shipped) < 1


def test_prompts_that_are_all_sent_at_once_wait_for_the_answers_before_them(
    catalog: Catalog, shipped: CoefficientFile
) -> None:
    asked = replace(made(catalog, concurrency_or_batch="512", isl="200", osl="1000", n_gpus="8", tp="8"), slot_count=16)
    run = replayed_run(asked, shipped.coefficients, FirstToken(), 0)
    # 160 prompts in ten waves of 16 answers: the mean one waits for four and a half.
    answer_ms = run.tpot_mean_ms * asked.lengths.output_tokens
    assert run.ttft_mean_ms == pytest.approx(4.5 * answer_ms, rel=0.1)
    alone = replayed_run(replace(asked, concurrency=16.0, slot_count=None), shipped.coefficients, FirstToken(), 0)
    assert run.tpot_mean_ms == pytest.approx(alone.tpot_mean_ms, rel=0.05)


def test_launches_hide_behind_work_that_lasts_longer(catalog: Catalog, shipped: CoefficientFile) -> None:
    def added_s(isl: str) -> float:
        slow = FirstToken(layer_us=2 * FirstToken().layer_us)
        asked = made(catalog, isl=isl, osl="2", concurrency_or_batch="1", scenario="single_user")
        return seconds(asked, shipped, slow) - seconds(asked, shipped)

    launches_s = 64 * FirstToken().layer_us * FirstToken().launch_factors["vllm"] * 1e-6
    assert 0 < added_s("8000") < 0.2 * launches_s
    assert added_s("10") > 0.5 * launches_s


def test_prefill_workers_tokenise_side_by_side(catalog: Catalog, shipped: CoefficientFile) -> None:
    # 40 workers and a serial tokeniser of 4 us a token: one tokeniser for all would pass 17 prompts of 15,000 a second.
    wide = made(
        catalog,
        **{
            **SPLIT,
            "disagg(prefill_gpus/decode_gpus or blank)": "80/48",
            "prefill_layout": "40x(tp2,dp1,bs1)",
            "decode_layout": "12x(tp4,dp1,bs40)",
        },
        isl="15000",
        concurrency_or_batch="480",
    )
    with_one = replayed_run(wide, shipped.coefficients, FirstToken(prompt_token_us=4.0), 0)
    without = replayed_run(wide, shipped.coefficients, FirstToken(prompt_token_us=0.0), 0)
    assert with_one.request_per_s > 0.8 * without.request_per_s
    assert with_one.ttft_mean_ms > without.ttft_mean_ms


def test_decode_slots_of_tensor_parallel_trtllm_workers_are_powers_of_two(
    catalog: Catalog, shipped: CoefficientFile
) -> None:
    def ttft_s(engine: str, layout: str) -> float:
        return seconds(made(catalog, **{**SPLIT, "decode_layout": layout}, engine=engine, n_gpus="6",
                            concurrency_or_batch="24"), shipped)  # fmt: skip

    # Two workers of twelve: eight slots each, and a third of the clients waits; vLLM's have what is asked.
    assert ttft_s("trtllm", "2x(tp2,dp1,bs12)") > 5 * ttft_s("vllm", "2x(tp2,dp1,bs12)")
    # Ranks with attention data parallelism take what their clients need.
    assert ttft_s("trtllm", "1x(tp1,dp2,bs12)") < ttft_s("trtllm", "2x(tp2,dp1,bs12)") / 3


def test_a_turn_of_agents_lasts_what_littles_law_leaves(catalog: Catalog, shipped: CoefficientFile) -> None:
    first = FirstToken()
    slow = made(catalog, **AGENTS, request_rate="0.05")  # 8 sessions: 160 s a turn, thinking included
    turn = agent_turn(slow, shipped.coefficients, first)
    assert turn is not None
    assert turn.ttft_s + 499 * turn.tpot_s == pytest.approx(160 - first.think_s)
    assert turn.in_flight == pytest.approx(8 - 0.05 * first.think_s)
    # A rate that leaves less than a turn alone takes is not believed.
    quick = agent_turn(made(catalog, **AGENTS, request_rate="100"), shipped.coefficients, first)
    assert quick is not None
    alone = replayed_run(
        replace(made(catalog, **AGENTS), concurrency=1.0, rate_per_s=None), shipped.coefficients, first, 0
    )
    assert quick.ttft_s + 499 * quick.tpot_s >= (alone.ttft_mean_ms + 499 * alone.tpot_mean_ms) / 1e3 * 0.999
    assert quick.in_flight <= 8


@pytest.mark.parametrize("changes", [{"request_rate": ""}, {"concurrency_or_batch": "", "request_rate": "1"}])
def test_other_loads_are_no_turns(catalog: Catalog, shipped: CoefficientFile, changes: dict[str, str]) -> None:
    assert agent_turn(made(catalog, **AGENTS, **changes), shipped.coefficients, FirstToken()) is None
    assert agent_turn(made(catalog, request_rate="1"), shipped.coefficients, FirstToken()) is None


def test_corrections_multiply_by_group_and_unknown_groups_change_nothing(
    catalog: Catalog, shipped: CoefficientFile
) -> None:
    asked = made(catalog)
    keys = correction_keys(asked)
    assert keys == ("load closed_loop vllm", "era vllm 2025b", "generation hopper", "family Qwen3")
    first = FirstToken(scale_factors={keys[0]: 2.0, keys[3]: 1.5, "family GLM-5": 9.0})
    assert correction(asked, first) == 3.0
    assert seconds(asked, shipped, first) == pytest.approx(3 * seconds(asked, shipped))
    split = replace(asked, prefill=asked.decode)
    assert correction_keys(split)[0] == "load disaggregated vllm"
    # Little's law has said all already.
    assert correction_keys(made(catalog, **AGENTS, request_rate="0.05")) == ()
