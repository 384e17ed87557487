"""The mean step in closed form: how many sequences decode together, in what room, and whose prompts they wait for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel import memory
from perfmodel.adapters.catalog import Catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.adapters.measured import configured
from perfmodel.configuration import Configuration
from perfmodel.serving import SchedulingOrder
from perfmodel.steady import (
    CHUNK_TOKENS,
    Steady,
    cache_tokens,
    most_sequences,
    room_sequences,
    scheduling_order,
    settle,
)

ROW = {
    "gpu": "H100-SXM-80GB", "model": "Qwen3-32B", "engine": "vllm", "date": "2025-10-29", "weight_dtype": "bf16",
    "kv_dtype": "bf16", "n_gpus": "2", "tp": "2", "isl": "1000", "osl": "500", "concurrency_or_batch": "8",
    "scenario": "closed_loop", "lengths": "fixed",
}  # fmt: skip


def made(catalog: Catalog, **changes: str) -> Configuration:
    return configured({**ROW, **changes}, catalog)


def room(asked: Configuration, engine: str) -> float:
    return room_sequences(asked.decode, asked.lengths, engine)


def test_the_room_is_what_memory_leaves_beside_weights_and_runtime(catalog: Catalog) -> None:
    asked = made(catalog)
    shape = asked.decode.shape
    free = 0.92 * shape.hardware.memory_bytes - 5e9 - memory.fullest_device_weight_bytes(shape)
    per_token = memory.kv_bytes_per_token(shape) / 2
    assert cache_tokens(asked.decode, asked.lengths, "vllm") == pytest.approx(free / per_token, rel=1e-3)
    # A sequence holds its prompt and, when the cache is full, six tenths of its answer.
    assert room(asked, "vllm") == pytest.approx(free / per_token / (1000 + 0.6 * 500), rel=1e-3)


def test_sglang_holds_more_back_and_the_room_says_so(catalog: Catalog) -> None:
    asked = made(catalog)
    assert 0.7 < room(asked, "sglang") / room(asked, "vllm") < 0.95
    # The weights of a 32B model in BF16 leave one H100 a few sequences at SGLang's share (measured: about five).
    one = made(catalog, n_gpus="1", tp="1")
    assert 3 < room(one, "sglang") < 9
    assert room(one, "vllm") > 2 * room(one, "sglang")


def test_weights_that_leave_nothing_still_leave_a_cache_for_it_ran(catalog: Catalog) -> None:
    tight = made(catalog, model="Llama-3.3-70B", weight_dtype="fp8", n_gpus="1", tp="1")
    per_token = memory.kv_bytes_per_token(tight.decode.shape)
    for engine in ("vllm", "sglang"):
        held = cache_tokens(tight.decode, tight.lengths, engine) * per_token
        assert held == pytest.approx(0.05 * tight.decode.shape.hardware.memory_bytes, rel=0.01)


@pytest.mark.parametrize("changes", [{"n_gpus": "4", "tp": "4"}, {"kv_dtype": "fp8"}, {"weight_dtype": "fp8"}])
def test_more_memory_or_fewer_bytes_never_shrink_the_room(catalog: Catalog, changes: dict[str, str]) -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        assert room(made(catalog, **changes), engine) > room(made(catalog), engine)


def test_the_batch_is_what_is_asked_bounded_by_the_room(catalog: Catalog) -> None:
    assert Steady(made(catalog)).batch(0.03) == 8
    assert Steady(made(catalog, n_gpus="4")).batch(0.03) == 4  # two replicas
    full = Steady(made(catalog, isl="30000", concurrency_or_batch="4096"))
    assert full.batch(0.03) == full.room_sequences < 20
    # A rate keeps rate x time sequences in flight.
    offered = Steady(made(catalog, scenario="open_loop", concurrency_or_batch="", request_rate="2"))
    assert offered.batch(0.01) == pytest.approx(2 * 500 * 0.01)


def test_vllm_before_v1_ran_256_sequences(catalog: Catalog) -> None:
    crowd = {"concurrency_or_batch": "1000", "n_gpus": "8", "tp": "8", "isl": "200"}
    assert Steady(made(catalog, **crowd, date="2024-11")).batch(0.03) == 256
    assert Steady(made(catalog, **crowd)).batch(0.03) == 1000
    assert most_sequences(made(catalog, date="2024-11", scenario="mlperf_server")) is None
    assert most_sequences(made(catalog, date="2024-11", engine="trtllm")) is None


def test_sglang_gives_the_states_of_a_hybrid_model_a_pool_of_their_own(catalog: Catalog) -> None:
    asked = made(catalog, model="Qwen3.5-397B-A17B", gpu="MI355X", n_gpus="4", tp="4", weight_dtype="fp8", isl="80000")
    shape = asked.decode.shape
    free = 0.92 * shape.hardware.memory_bytes - 11e9 - memory.fullest_device_weight_bytes(shape)
    context = 80_000 + 300
    cache = memory.kv_bytes(shape, context) - shape.architecture.linear_state_bytes
    # State pool to KV pool is 0.9 to 1, of what the weights leave.
    assert cache_tokens(asked.decode, asked.lengths, "sglang") == pytest.approx(
        free / 1.9 * 4 / (cache / context), rel=1e-3
    )
    assert room(asked, "vllm") > 1.8 * room(asked, "sglang")


def test_an_engine_that_was_started_for_fewer_runs_no_more(catalog: Catalog) -> None:
    asked = made(catalog, concurrency_or_batch="512", n_gpus="8", tp="8", isl="200")
    assert Steady(replace(asked, slot_count=16)).batch(0.03) == 16 == most_sequences(replace(asked, slot_count=16))
    assert Steady(asked).batch(0.03) == 512


def test_prompts_of_others_interfere_by_the_scheduler(catalog: Catalog) -> None:
    assert Steady(made(catalog, lengths="measured_mean")).interfering_prompts(8) == 7
    # Equal prompts of 1,000 share a chunk of 8,192, and with it their first token.
    assert Steady(made(catalog)).interfering_prompts(8) == 0
    assert Steady(made(catalog)).interfering_prompts(16) == pytest.approx(16 - CHUNK_TOKENS / 1000)
    # SGLang runs prompts alone: equal requests stay in step and wait for those after them.
    assert Steady(made(catalog, engine="sglang")).interfering_prompts(16) == pytest.approx((16 - 8.192) / 2)
    split = made(
        catalog,
        **{"disagg(prefill_gpus/decode_gpus or blank)": "2/2", "prefill_layout": "1x(tp2)", "decode_layout": "1x(tp2)"},
    )
    assert Steady(split).interfering_prompts(16) == 0


def test_orders_by_engine() -> None:
    assert scheduling_order("sglang") is SchedulingOrder.PREFILL_FIRST
    assert scheduling_order("trtllm") is SchedulingOrder.WHOLE_PROMPTS
    assert scheduling_order("vllm") is scheduling_order("") is SchedulingOrder.DECODE_FIRST


def test_an_offered_load_settles_where_batch_and_speed_agree(catalog: Catalog) -> None:
    asked = made(catalog, scenario="open_loop", concurrency_or_batch="", request_rate="3")
    steady, multipliers = Steady(asked), load_coefficients().coefficients.resolve(asked.group)
    step, tpot_s = settle(steady, multipliers)
    assert steady.batch(tpot_s) == pytest.approx(step.batch, rel=0.01)
    assert float(step.basis @ multipliers) == tpot_s
    # From a start at which the room caps the batch it still comes down.
    far, far_s = settle(steady, multipliers, start_s=1.0)
    assert far_s < 0.2
    assert far.batch < steady.room_sequences
    # Above what fits, the batch stops at the room.
    over = made(catalog, scenario="open_loop", concurrency_or_batch="", request_rate="500", isl="20000")
    assert settle(Steady(over), multipliers)[0].batch == Steady(over).room_sequences


def test_tpot_grows_with_concurrency_context_and_bytes(catalog: Catalog) -> None:
    def tpot_s(**changes: str) -> float:
        asked = made(catalog, **changes)
        return settle(Steady(asked), load_coefficients().coefficients.resolve(asked.group))[1]

    by_clients = [tpot_s(concurrency_or_batch=str(count)) for count in (1, 4, 16, 64)]
    by_prompt = [tpot_s(isl=str(tokens)) for tokens in (500, 2000, 8000)]
    assert np.all(np.diff(by_clients) > 0)
    assert np.all(np.diff(by_prompt) > 0)
    assert tpot_s(weight_dtype="fp8") < tpot_s()
