"""Speculative decoding: the textbook figures, and a depth that falls with the load."""

from __future__ import annotations

import pytest

from perfmodel.adapters.catalog import load_catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.errors import ConfigError
from perfmodel.speculation import Draft, best_depth, expected_tokens, token_s, verify_step_s
from perfmodel.step_time import StepModel, StepTable, decode_batch


@pytest.fixture(scope="module")
def table() -> StepTable:
    shape = load_catalog().shape("H200-SXM-141GB", "Llama-3.3-70B", 4, "fp8")
    return StepModel(shape, load_coefficients().coefficients, "vllm", "2025b").table(8192)


@pytest.mark.parametrize(
    ("acceptance", "depth", "tokens"), [(0.8, 3, 2.952), (0.0, 5, 1.0), (1.0, 4, 5.0), (0.5, 0, 1.0)]
)
def test_expected_tokens_are_the_geometric_sum(acceptance: float, depth: int, tokens: float) -> None:
    assert expected_tokens(acceptance, depth) == pytest.approx(tokens)


def test_without_drafts_a_verify_step_is_a_decode_step(table: StepTable) -> None:
    assert verify_step_s(table, 16, 2000, 0) == pytest.approx(table.step_s(decode_batch(16, 2000)))
    assert token_s(table, Draft(0.9), 16, 2000, 0) == pytest.approx(table.step_s(decode_batch(16, 2000)))


def test_the_best_depth_falls_with_load_and_with_acceptance(table: StepTable) -> None:
    draft = Draft(0.8, pass_s=2e-4)
    depths = [best_depth(table, draft, count, 2000) for count in (1, 16, 128, 1024)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]
    assert best_depth(table, Draft(0.05, pass_s=2e-3), 8, 2000) == 0
    assert best_depth(table, Draft(0.95), 1, 2000) > best_depth(table, Draft(0.3, pass_s=1e-3), 1, 2000)


def test_what_cannot_be_is_refused(table: StepTable) -> None:
    with pytest.raises(ConfigError, match=r"acceptance_ratio is 1\.2; expected 0 to 1"):
        Draft(1.2)
    with pytest.raises(ConfigError, match="pass_s is -1"):
        Draft(0.5, pass_s=-1)
    with pytest.raises(ConfigError, match="draft depth is -1"):
        expected_tokens(0.5, -1)
    with pytest.raises(ConfigError, match="9216 tokens; the step table ends at 8192"):
        verify_step_s(table, 1024, 100, 8)
