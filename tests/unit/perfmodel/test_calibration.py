"""The fit finds coefficients that made synthetic points, shrinks what few points say, and refuses what cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfmodel.adapters.catalog import Catalog, load_catalog
from perfmodel.adapters.coefficient_file import CoefficientFile, dump_coefficients, load_coefficients
from perfmodel.adapters.measured import configured, usable_rows
from perfmodel.calibration.fit import Observation, Penalties, Problem, Scheme, cross_validate, fit, folds, predict
from perfmodel.calibration.validation import (
    Measured,
    Predicted,
    error_table,
    first_factors,
    saturation,
    saturation_misses,
)
from perfmodel.coefficients import ERA_LEVERS, GENERATION_LEVERS, Coefficients, Lever, bounds
from perfmodel.errors import ConfigError
from perfmodel.estimate import Point
from perfmodel.steady import Steady, settle
from perfmodel.step_terms import TERMS, Term
from perfmodel.step_time import Bound

# What one set of coefficients may have (the limits): global values are terms, formats and benchmark shares.
MOST_GLOBAL, MOST_PER_ERA, MOST_PER_GENERATION = 25, 6, 4


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


@pytest.fixture(scope="module")
def shipped() -> CoefficientFile:
    return load_coefficients()


def synthetic(catalog: Catalog, truth: Coefficients, slower: float = 1.0) -> list[Observation]:
    """Points made by `truth`, those of one model `slower` times slower."""
    points = []
    for gpu in ("H100-SXM-80GB", "B200-SXM-180GB", "A100-SXM-80GB"):
        for model, tensor in (("Llama-3.3-70B", 4), ("Qwen3-32B", 2), ("DeepSeek-R1", 8), ("gpt-oss-120b", 2)):
            for inputs, outputs in ((1024, 1024), (8192, 1024), (1024, 8192)):
                for count in (1, 8, 64, 256):
                    asked = configured(
                        {"gpu": gpu, "model": model, "engine": "vllm", "date": "2025-10", "weight_dtype": "fp8",
                         "tp": str(tensor), "n_gpus": str(tensor), "isl": str(inputs), "osl": str(outputs),
                         "concurrency_or_batch": str(count), "scenario": "closed_loop", "lengths": "uniform_0.8_1.0"},
                        catalog,
                    )  # fmt: skip
                    seconds = settle(Steady(asked), truth.resolve(asked.group))[1]
                    factor = slower if model == "Qwen3-32B" else 1.0
                    points.append(Observation(asked, seconds * factor, gpu, model, f"{gpu}{model}{inputs}{outputs}"))
    return points


def plain(base: dict[Term, float]) -> Coefficients:
    return Coefficients(base=base)


def test_the_fit_reproduces_the_points_of_known_coefficients(catalog: Catalog, shipped: CoefficientFile) -> None:
    truth = plain({**shipped.coefficients.base, Term.WEIGHT_READ: 1.8, Term.LAYER: 70.0, Term.KV_READ: 1.6})
    problem = Problem(synthetic(catalog, truth))
    found = fit(problem, Penalties(base=0.01))
    assert float(np.median(np.abs(found.log_error))) < 0.01
    answers = cross_validate(problem, Scheme.WITHIN, Penalties(base=0.01))
    assert float(np.median(np.abs(answers / np.exp(problem.log_s) - 1))) < 0.02


def test_a_stalled_run_does_not_move_the_fit(catalog: Catalog, shipped: CoefficientFile) -> None:
    points = synthetic(catalog, plain(dict(shipped.coefficients.base)))
    spoiled = [
        replace(point, token_s=point.token_s * 50) if place % 20 == 0 else point for place, point in enumerate(points)
    ]
    clean = Problem(points)
    answers = predict(clean, fit(Problem(spoiled)).coefficients, np.arange(len(points)))
    assert float(np.median(np.abs(answers / np.exp(clean.log_s) - 1))) < 0.05


def test_a_family_is_corrected_and_an_unseen_one_is_not(catalog: Catalog, shipped: CoefficientFile) -> None:
    points = synthetic(catalog, plain(dict(shipped.coefficients.base)), slower=1.5)
    found = fit(Problem(points)).coefficients
    assert found.families["Qwen3"] / found.families["Llama-3"] > 1.2
    strong = fit(Problem(points), Penalties(families=1e6)).coefficients
    assert strong.families["Qwen3"] == pytest.approx(1.0, abs=0.01)
    assert found.families.get("GLM-5", 1.0) == 1.0


def test_folds_leave_out_whole_groups(catalog: Catalog, shipped: CoefficientFile) -> None:
    problem = Problem(synthetic(catalog, plain(dict(shipped.coefficients.base))))
    for scheme, name in ((Scheme.GPU, "device"), (Scheme.PAIR, "pair"), (Scheme.WITHIN, "curve")):
        parts = folds(problem.observations, scheme)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(problem.observations)))
        for part in parts:
            inside = {getattr(problem.observations[row], name) for row in part}
            outside = {getattr(item, name) for row, item in enumerate(problem.observations) if row not in set(part)}
            assert not inside & outside


def test_the_shipped_file_keeps_to_the_limits(shipped: CoefficientFile) -> None:
    fitted = shipped.coefficients
    assert len(fitted.base) + len(fitted.formats) - 1 + len(fitted.benchmark) <= MOST_GLOBAL
    assert all(len(factors) <= MOST_PER_ERA for factors in (*fitted.engines.values(), *fitted.eras.values()))
    assert all(len(factors) <= MOST_PER_GENERATION for factors in fitted.generations.values())
    assert set(ERA_LEVERS) == set(Lever)
    assert len(GENERATION_LEVERS) == MOST_PER_GENERATION
    for term in TERMS:
        low, high = bounds(term)
        assert low <= fitted.base[term] <= high
    assert fitted.base[Term.WEIGHT_READ] >= 1


def test_a_file_reads_back_as_written_and_faults_are_named(shipped: CoefficientFile, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = dump_coefficients(shipped)
    path.write_text(text, encoding="utf-8")
    again = load_coefficients(path)
    assert dump_coefficients(again) == text
    for broken, sentence in (
        (text.replace("weight_read:", "weight_reed:"), "weight_reed"),
        (text.replace("\nbase:", "\nbasis:"), "base"),
        ("[1]", "expected a mapping"),
        (": [", "is no YAML"),
    ):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(ConfigError, match=sentence):
            load_coefficients(path)
    with pytest.raises(ConfigError, match=r"weight_read is 0\.1; expected 0\.3 to 20"):
        Coefficients(base={**shipped.coefficients.base, Term.WEIGHT_READ: 0.1})


def test_rows_that_cannot_be_true_are_refused_with_the_reason(catalog: Catalog) -> None:
    good = {
        "gpu": "H100-SXM-80GB", "model": "Llama-3.3-70B", "engine": "vllm", "date": "2025-10", "weight_dtype": "fp8",
        "tp": "4", "n_gpus": "4", "isl": "1000", "osl": "1001", "concurrency_or_batch": "10",
        "scenario": "closed_loop", "lengths": "fixed", "ttft_ms": "100", "tpot_ms": "12", "output_tok_s": "827",
        "note": "do not read",
    }  # fmt: skip
    rows = [
        good,
        {**good, "exclude": "e2e_mismatch"},
        {**good, "tpot_ms": "0.012"},
        {**good, "output_tok_s": "8270"},
        {**good, "tpot_ms": "3", "output_tok_s": ""},
        {**good, "scenario": "offline", "tpot_ms": "", "ttft_ms": "", "output_tok_s": "90000"},
        {**good, "gpu": "H800-SXM-80GB"},
    ]
    used, refused = usable_rows(rows, catalog)
    assert [row.line for row in used] == [2]
    assert [row.line for row in refused] == [3, 4, 5, 6, 7, 8]
    for row, words in zip(
        refused, ("exclude", "units", "Little's law", "weight read", "peak FLOPS", "device"), strict=True
    ):
        assert row.reason.startswith(words)


def test_saturation_is_told_by_precision_recall_and_cause(catalog: Catalog) -> None:
    row = {
        "gpu": "H100-SXM-80GB", "model": "Llama-3.3-70B", "engine": "vllm", "date": "2025-10", "weight_dtype": "fp8",
        "tp": "4", "n_gpus": "4", "isl": "1000", "osl": "1000", "concurrency_or_batch": "8", "scenario": "closed_loop",
        "lengths": "fixed",
    }  # fmt: skip
    split = {
        "disagg(prefill_gpus/decode_gpus or blank)": "4/4", "prefill_layout": "1x(tp4)", "decode_layout": "1x(tp4)",
    }  # fmt: skip
    crowd = {"concurrency_or_batch": "20000"}
    cases: tuple[tuple[dict[str, str], float, float], ...] = (
        ({}, 20.0, 30.0),
        ({}, 2.0, 1.0),
        ({}, 9.0, 11.0),
        (split, 20.0, 1.0),
        (crowd, 3.0, 40.0),
        ({"scenario": "agentic"}, 5.0, 40.0),
        ({}, 1.0, 50.0),
    )
    answers = []
    for changes, made_s, seen_s in cases:
        asked = configured({**row, **changes}, catalog)
        one = Measured(asked, "d", "m", "c", "s", ttft_s=seen_s, tpot_s=None, output_tok_per_s=None)
        answers.append(Predicted(one, Scheme.PAIR, Point(made_s, 0.01, 1.0, Bound.WEIGHTS, 1.0, 0.0)))
    figures = saturation(answers)
    assert (figures["count"], figures["precision_ratio"], figures["recall_ratio"]) == (5, 1 / 2, 1 / 5)
    # One of the missed was measured so near the threshold that a second run might have said otherwise.
    assert figures["far_recall_ratio"] == 1 / 4
    assert saturation_misses(answers) == {
        "agentic": {"missed": 1, "false": 0},
        "disaggregated": {"missed": 0, "false": 1},
        "kv_room": {"missed": 1, "false": 0},
        "near_threshold": {"missed": 1, "false": 0},
        "other": {"missed": 1, "false": 0},
    }
    assert math.isnan(saturation([])["precision_ratio"])


def test_agents_whose_turns_littles_law_gives_are_no_points_of_the_fit(catalog: Catalog) -> None:
    row = {
        "gpu": "B200-SXM-180GB", "model": "gpt-oss-120b", "engine": "vllm", "date": "2026-06", "tp": "2", "n_gpus": "2",
        "isl": "40000", "osl": "800", "concurrency_or_batch": "8", "scenario": "agentic", "prefix_hit_ratio": "0.9",
    }  # fmt: skip
    for rate, points in (("0.1", False), ("", True)):
        asked = configured({**row, "request_rate": rate}, catalog)
        one = Measured(asked, "d", "m", "c", "s", ttft_s=1.0, tpot_s=0.02, output_tok_per_s=None)
        assert (one.observation() is not None) is points


def test_nothing_to_fit_is_said() -> None:
    with pytest.raises(ConfigError, match="no rows are left to fit"):
        Problem([])
    assert first_factors([], np.zeros(0)) == {}
    assert error_table([], lambda _: "all") == {}
    assert math.isfinite(Penalties().base)
