"""What public benchmarks fix by their rules: mean lengths of their data sets and the latency limits of their scenarios.

Owns: the MLPerf Inference language scenarios as constants with their source. Does not own: what a submission measured.
A submission does not report its prompt lengths, and it is tuned until its 99th percentile just meets the limits: the
rules say more about its latency than its load does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataSet:
    """Mean tokens of a prompt and an answer."""

    input_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """99th percentile limits of a scenario: first token, and time per output token after it."""

    ttft_ms: float
    tpot_ms: float


# Data sets by model (mlcommons/inference, language/*: OpenOrca for Llama 2, a mix of OpenOrca, GSM8K and MBXP for
# Mixtral, LongBench, RULER and GovReport for Llama 3.1 405B, CNN/DailyMail for Llama 3.1 8B and GPT-J, five reasoning
# and code sets for DeepSeek-R1, a summarisation set for gpt-oss). Answers: tokens per sample of the reference runs
# (TOKENS_PER_SAMPLE of tools/submission/submission_checker/constants.py; Llama 2 a little less, as submissions report;
# Llama 3.1 8B: its 611 characters a summary are the limit of 128 tokens; gpt-oss: 1,278.2 in its README, TEST09).
# Prompt means are of the reference tokenisers, rounded; gpt-oss's is not published [assumed].
MLPERF_DATA_SETS = {
    "Llama-2-70B": DataSet(294, 291),
    "Llama-3.1-70B": DataSet(294, 291),
    "Mixtral-8x7B": DataSet(425, 146),
    "Llama-3.1-405B": DataSet(9_428, 685),
    "Llama-3.1-8B": DataSet(778, 128),
    "GPT-J-6B": DataSet(778, 69),
    "DeepSeek-R1": DataSet(800, 3_886),
    "gpt-oss-120b": DataSet(1_000, 1_278),
}

# Limits by model and scenario: what a submission is checked by, LLM_LATENCY_LIMITS of mlcommons/inference
# tools/submission/submission_checker/constants.py (v6.0), equal to loadgen/mlperf.conf of v5.1 for all but gpt-oss,
# which is newer. The rules' table is quoted with 20 ms for gpt-oss Interactive, the checker has 15. Llama 3.1 70B is no
# benchmark of its own: those are submissions that ran it under the scenarios of Llama 2 70B.
MLPERF_LIMITS = {
    ("Llama-2-70B", "mlperf_server"): LatencyLimit(2_000, 200),
    ("Llama-2-70B", "mlperf_interactive"): LatencyLimit(450, 40),
    ("Llama-3.1-70B", "mlperf_server"): LatencyLimit(2_000, 200),
    ("Llama-3.1-70B", "mlperf_interactive"): LatencyLimit(450, 40),
    ("Mixtral-8x7B", "mlperf_server"): LatencyLimit(2_000, 200),
    ("Llama-3.1-405B", "mlperf_server"): LatencyLimit(6_000, 175),
    ("Llama-3.1-405B", "mlperf_interactive"): LatencyLimit(4_500, 80),
    ("Llama-3.1-8B", "mlperf_server"): LatencyLimit(2_000, 100),
    ("Llama-3.1-8B", "mlperf_interactive"): LatencyLimit(500, 30),
    ("DeepSeek-R1", "mlperf_server"): LatencyLimit(2_000, 80),
    ("DeepSeek-R1", "mlperf_interactive"): LatencyLimit(1_500, 15),
    ("gpt-oss-120b", "mlperf_server"): LatencyLimit(3_000, 80),
    ("gpt-oss-120b", "mlperf_interactive"): LatencyLimit(2_000, 15),
}

# Where a model has no published limits of its own: those of Llama 2 70B, the oldest and commonest [assumed].
DEFAULT_MLPERF_LIMITS = {
    "mlperf_server": LatencyLimit(2_000, 200),
    "mlperf_interactive": LatencyLimit(450, 40),
}

# Where the data set of a model is not known.
DEFAULT_MLPERF_DATA_SET = DataSet(500, 300)


def mlperf_limit(model: str, scenario: str) -> LatencyLimit | None:
    """The limits that a submission of this scenario met; None where the scenario has none (Offline)."""
    return MLPERF_LIMITS.get((model, scenario), DEFAULT_MLPERF_LIMITS.get(scenario))
