"""What a prediction says beside its figures: bands, what binds, how far from the calibrated, and what was assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.adapters.catalog import Catalog
from perfmodel.adapters.coefficient_file import CoefficientFile
from perfmodel.adapters.measured import configured
from perfmodel.coefficients import Band
from perfmodel.configuration import Configuration, Scenario
from perfmodel.estimate import (
    Kind,
    Known,
    Quantity,
    Split,
    band_of,
    central,
    kind_of,
    nearest_group,
    predict,
    split_of,
)
from perfmodel.step_time import Bound

ROW = {
    "gpu": "H100-SXM-80GB", "model": "Llama-3.3-70B", "engine": "vllm", "date": "2025-10-29", "weight_dtype": "fp8",
    "kv_dtype": "bf16", "n_gpus": "4", "tp": "4", "isl": "1024", "osl": "1024", "concurrency_or_batch": "16",
    "scenario": "closed_loop", "lengths": "uniform_0.8_1.0",
}  # fmt: skip


def made(catalog: Catalog, **changes: str) -> Configuration:
    return configured({**ROW, **changes}, catalog)


def known(catalog: Catalog) -> Known:
    return Known(catalog.devices, catalog.models)


def test_a_closed_loop_keeps_littles_law(catalog: Catalog, shipped: CoefficientFile) -> None:
    asked = made(catalog)
    point = central(asked, shipped.coefficients, shipped.first_token)
    answer_s = point.ttft_s + point.tpot_s * (asked.lengths.output_tokens - 1)
    assert point.output_tok_per_s == pytest.approx(16 * asked.lengths.output_tokens / answer_s)
    assert point.in_flight == 16


def test_prompts_sent_at_once_are_served_as_fast_as_the_engines_sequences_answer(
    catalog: Catalog, shipped: CoefficientFile
) -> None:
    asked = replace(made(catalog, concurrency_or_batch="512"), slot_count=4)
    point = central(asked, shipped.coefficients, shipped.first_token)
    assert point.output_tok_per_s == pytest.approx(4 * asked.decode.replicas / point.tpot_s)
    assert point.in_flight == 4 * asked.decode.replicas


def test_offered_tokens_are_served_up_to_what_fits(catalog: Catalog, shipped: CoefficientFile) -> None:
    offered = {"scenario": "open_loop", "concurrency_or_batch": "", "lengths": "fixed"}
    light = central(made(catalog, **offered, request_rate="0.5"), shipped.coefficients, shipped.first_token)
    # Half a request a second of 1,024 tokens; the run ends with its last answer, a little after the last arrival.
    assert light.output_tok_per_s == pytest.approx(512, rel=0.05)
    heavy = central(made(catalog, **offered, request_rate="1000"), shipped.coefficients, shipped.first_token)
    assert light.ttft_s < 1 < heavy.ttft_s
    assert light.output_tok_per_s < heavy.output_tok_per_s < 100_000


def test_agents_at_a_known_rate_are_given_that_many_tokens(catalog: Catalog, shipped: CoefficientFile) -> None:
    asked = made(catalog, scenario="agentic", isl="40000", osl="800", prefix_hit_ratio="0.9", request_rate="0.1",
                 concurrency_or_batch="12", lengths="")  # fmt: skip
    point = central(asked, shipped.coefficients, shipped.first_token)
    assert point.output_tok_per_s == pytest.approx(80)
    turn_s = point.ttft_s + 799 * point.tpot_s
    assert turn_s == pytest.approx(12 / 0.1 - shipped.first_token.think_s)
    assert point.in_flight == pytest.approx(0.1 * turn_s)


def test_nothing_beats_its_floor(catalog: Catalog, shipped: CoefficientFile) -> None:
    free = replace(shipped.coefficients, families={"Llama-3": 0.02})
    point = central(made(catalog), free, shipped.first_token)
    # The weights alone: 70 GB over four devices of 3.35 TB/s.
    assert point.tpot_s > 70e9 / 4 / 3.35e12


def test_limited_scenarios_answer_from_their_limits(catalog: Catalog, shipped: CoefficientFile) -> None:
    limited = {"model": "Llama-2-70B", "isl": "", "osl": "", "concurrency_or_batch": "", "request_rate": "40",
               "lengths": ""}  # fmt: skip
    server = central(made(catalog, **limited, scenario="mlperf_server"), shipped.coefficients, shipped.first_token)
    tight = central(made(catalog, **limited, scenario="mlperf_interactive"), shipped.coefficients, shipped.first_token)
    assert server.ttft_s < 2.0
    assert server.tpot_s < 0.2
    assert tight.ttft_s < server.ttft_s
    assert tight.tpot_s < server.tpot_s


def test_how_far_a_configuration_is_from_the_calibrated_ones(catalog: Catalog, shipped: CoefficientFile) -> None:
    fitted = shipped.coefficients
    assert split_of("H100-SXM-80GB", "Llama-3.3-70B", fitted) is Split.WITHIN
    assert split_of("B300-SXM-270GB", "Llama-3.3-70B", fitted) is Split.GPU
    assert split_of("H100-SXM-80GB", "GLM-4.6", fitted) is Split.FAMILY
    assert split_of("A100-SXM-80GB", "Llama-3.3-70B", fitted) is Split.PAIR
    text = nearest_group("B300-SXM-270GB", "Llama-3.3-70B", Split.GPU, fitted, known(catalog))
    assert text.startswith("nearest calibrated group: Llama-3.3-70B on B200-SXM-180GB (")
    bare = replace(fitted, pair_rows={})
    assert nearest_group("B200-SXM-180GB", "X", Split.GPU, bare, known(catalog)) == "gpu: nothing is calibrated"


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        (Scenario.CLOSED_LOOP, Kind.CLOSED),
        (Scenario.OTHER, Kind.CLOSED),
        (Scenario.OPEN_LOOP, Kind.OPEN),
        (Scenario.STATIC_BATCH, Kind.STATIC),
        (Scenario.AGENTIC, Kind.AGENTIC),
        (Scenario.MLPERF_SERVER, Kind.LIMITED),
        (Scenario.MLPERF_OFFLINE, Kind.QUEUED),
    ],
)
def test_kinds_of_load(catalog: Catalog, scenario: Scenario, kind: Kind) -> None:
    assert kind_of(made(catalog, scenario=scenario.value)) is kind
    assert kind_of(replace(made(catalog), prefill=made(catalog).decode)) is Kind.DISAGGREGATED


def test_a_band_is_its_class_then_its_kind_then_its_split(shipped: CoefficientFile) -> None:
    own, kind, split = Band(0.9, 1.1, 30), Band(0.8, 1.2, 60), Band(0.7, 1.3, 90)
    bands = {"tpot gpu closed_loop": own, "tpot any closed_loop": kind, "tpot gpu any": split}
    for gone, expected in ((None, own), ("tpot gpu closed_loop", kind), ("tpot any closed_loop", split)):
        if gone is not None:
            bands.pop(gone)
        fitted = replace(shipped.coefficients, bands=dict(bands))
        assert band_of(Quantity.TPOT, Split.GPU, Kind.CLOSED, fitted) is expected
    nothing = replace(shipped.coefficients, bands={})
    assert band_of(Quantity.TPOT, Split.GPU, Kind.CLOSED, nothing).row_count == 0


def test_the_band_holds_the_figure_and_widens_with_what_was_assumed(catalog: Catalog, shipped: CoefficientFile) -> None:
    said = predict(made(catalog, lengths="fixed"), shipped.coefficients, known(catalog), shipped.first_token)
    for figure in (said.ttft_ms, said.tpot_ms, said.output_tok_per_s):
        assert 0 < figure.p10 <= figure.value <= figure.p90
    assert said.bound in tuple(Bound)
    assert (said.split, said.extrapolated) == (Split.WITHIN, "")
    guessed = predict(made(catalog, lengths="fixed", isl=""), shipped.coefficients, known(catalog), shipped.first_token)
    assert guessed.assumed == ("isl=1024",)
    assert guessed.tpot_ms.p90 / guessed.tpot_ms.p10 > said.tpot_ms.p90 / said.tpot_ms.p10


def test_no_band_reaches_below_physics_unless_an_input_was_assumed(catalog: Catalog, shipped: CoefficientFile) -> None:
    wide = replace(shipped.coefficients, bands={f"{Quantity.TPOT} any {Kind.CLOSED}": Band(0.01, 100.0, 50)})
    asked = made(catalog)
    floor_ms = central(asked, wide, shipped.first_token).floor_tpot_s * 1e3
    assert 0 < floor_ms < predict(asked, wide, known(catalog), shipped.first_token).tpot_ms.value
    assert predict(asked, wide, known(catalog), shipped.first_token).tpot_ms.p10 == pytest.approx(floor_ms)
    assumed = made(catalog, weight_dtype="")
    assert predict(assumed, wide, known(catalog), shipped.first_token).tpot_ms.p10 < floor_ms


def test_a_submission_near_its_limit_is_not_faster_than_physics(catalog: Catalog, shipped: CoefficientFile) -> None:
    asked = made(
        catalog, scenario="mlperf_interactive", model="Llama-3.1-405B", gpu="A100-SXM-80GB", tp="8", n_gpus="8"
    )
    point = central(asked, shipped.coefficients, shipped.first_token)
    assert point.tpot_s >= point.floor_tpot_s > 0
