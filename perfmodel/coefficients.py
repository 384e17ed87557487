"""The fitted coefficients: what multiplies each term of a step, and how groups of engines and devices differ.

Owns: the coefficient set as a value, its bounds, its units and the rule by which corrections combine. Does not own: the
terms (`step_terms`), the fit (`calibration`) or the file (`adapters.coefficient_file`).
A coefficient is a base value times the corrections of the weight format's reading, the engine, its era, the device
generation and the model family. A group that calibration has not seen has no entry and so changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ConfigError
from perfmodel.groups import EngineEra
from perfmodel.step_terms import INDEX, TERMS, FormatClass, Term


class Lever(StrEnum):
    """What a group's correction multiplies: the terms in `LEVER_TERMS`."""

    PREFILL = "prefill"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    COLLECTIVES = "collectives"
    OVERHEAD = "overhead"
    SEQUENCE = "sequence"


# The terms of each lever. Compute is part of PREFILL because decode batches below the ridge hide theirs.
LEVER_TERMS: dict[Lever, tuple[Term, ...]] = {
    Lever.PREFILL: (
        Term.COMPUTE_BF16,
        Term.COMPUTE_FP8,
        Term.COMPUTE_FP4,
        Term.COMPUTE_EXPERTS,
        Term.PREFILL_ATTENTION,
        Term.PREFILL_LAYER,
        Term.PREFILL_MOE_LAYER,
    ),
    Lever.WEIGHTS: (Term.WEIGHT_READ, Term.EXPERT_READ),
    Lever.KV_CACHE: (Term.KV_READ,),
    Lever.COLLECTIVES: (
        Term.ALLREDUCE_VOLUME,
        Term.ALLREDUCE_LATENCY,
        Term.EXCHANGE_VOLUME,
        Term.EXCHANGE_LATENCY,
    ),
    Lever.OVERHEAD: (Term.LAYER, Term.MOE_LAYER, Term.LINEAR_LAYER, Term.STEP),
    Lever.SEQUENCE: (Term.SEQUENCE,),
}

# Levers that an engine and its era have (6), and that a device generation has (4).
ERA_LEVERS: tuple[Lever, ...] = tuple(Lever)
GENERATION_LEVERS = (Lever.PREFILL, Lever.WEIGHTS, Lever.OVERHEAD, Lever.COLLECTIVES)

# Bounds of the base values. Ratios below 0.3 or above 20 mean a wrong fact, not a slow engine; times are microseconds.
_RATIO_BOUNDS = (0.3, 20.0)
_TIME_BOUNDS = (0.0, 5_000.0)

# A correction outside of this range says that a group is another machine, and hides a fault.
_CORRECTION_BOUNDS = (0.02, 50.0)


def lever_vector(lever: Lever) -> NDArray[np.float64]:
    """1 at the terms of the lever, 0 elsewhere."""
    vector = np.zeros(len(TERMS))
    for term in LEVER_TERMS[lever]:
        vector[INDEX[term]] = 1.0
    return vector


def bounds(term: Term) -> tuple[float, float]:
    """Smallest and largest base value of a term."""
    return _TIME_BOUNDS if term.value.endswith("_us") else _RATIO_BOUNDS


@dataclass(frozen=True, slots=True)
class Group:
    """Where a configuration stands: what `Coefficients.resolve` looks corrections up by."""

    era: EngineEra
    generation: str
    family: str
    weights: FormatClass


@dataclass(frozen=True, slots=True)
class Band:
    """The middle 80 % of measured over predicted in a class of cross-validated points: `low` and `high` ratios."""

    low_ratio: float
    high_ratio: float
    row_count: int


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One fitted set. `base` by term; corrections by group as factors on the levers (families: on everything).

    `device_rows` and `model_rows` count calibrated points by device name and by model name, `pair_rows` by
    "device model"; `bands` are by "quantity split class" (see `estimate`). `benchmark` holds what is fitted outside of
    the step. Raises ConfigError for a value outside of its bounds or a missing term.
    """

    base: Mapping[Term, float]
    formats: Mapping[FormatClass, float] = field(default_factory=dict)
    engines: Mapping[str, Mapping[Lever, float]] = field(default_factory=dict)
    eras: Mapping[str, Mapping[Lever, float]] = field(default_factory=dict)
    generations: Mapping[str, Mapping[Lever, float]] = field(default_factory=dict)
    families: Mapping[str, float] = field(default_factory=dict)
    benchmark: Mapping[str, float] = field(default_factory=dict)
    bands: Mapping[str, Band] = field(default_factory=dict)
    device_rows: Mapping[str, int] = field(default_factory=dict)
    model_rows: Mapping[str, int] = field(default_factory=dict)
    pair_rows: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for term in TERMS:
            value = self.base.get(term)
            low, high = bounds(term)
            if value is None or not low <= value <= high:
                raise ConfigError(f"coefficients: {term} is {value}; expected {low} to {high}")
        low, high = _CORRECTION_BOUNDS
        for name, factors in (*self.engines.items(), *self.eras.items(), *self.generations.items()):
            for lever, factor in factors.items():
                if not low <= factor <= high:
                    raise ConfigError(f"coefficients: {name}.{lever} is {factor}; expected {low} to {high}")
        for name, factor in (*self.formats.items(), *self.families.items()):
            if not low <= factor <= high:
                raise ConfigError(f"coefficients: {name} is {factor}; expected {low} to {high}")

    def resolve(self, group: Group) -> NDArray[np.float64]:
        """The multiplier of each term of `TERMS` for this group."""
        values = np.array([self.base[term] for term in TERMS])
        corrections = (
            self.engines.get(group.era.engine, {}),
            self.eras.get(group.era.name, {}),
            self.generations.get(group.generation, {}),
        )
        for factors in corrections:
            for lever, factor in factors.items():
                for term in LEVER_TERMS[lever]:
                    values[INDEX[term]] *= factor
        reading = self.formats.get(group.weights, 1.0)
        for term in LEVER_TERMS[Lever.WEIGHTS]:
            values[INDEX[term]] *= reading
        return values * self.families.get(group.family, 1.0)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Coefficients of the first token. Microseconds, or factors. `launch_factors` and `request_factors` by engine.

    `layer_us`, `moe_layer_us`, `latent_layer_us`: launches once per step that holds a prompt. `request_us` and
    `prompt_token_us`: the front end, before the engine sees a request (the tokeniser is serial). `exchange_wait_steps`:
    decode steps that TensorRT-LLM's attention data parallelism holds a prompt back. `handover_us`: messages between the
    pools of a disaggregated deployment. `think_s`: think time between an agent's turns. `split_prefill_ratio`:
    step of a prefill-only worker over that of a mixed engine. `scale_factors` multiply the whole TTFT by group
    (`correction_keys`).
    """

    layer_us: float = 240.0
    moe_layer_us: float = 290.0
    latent_layer_us: float = 630.0
    request_us: float = 12_000.0
    prompt_token_us: float = 4.0
    exchange_wait_steps: float = 60.0
    handover_us: float = 30_000.0
    think_s: float = 13.0
    launch_factors: Mapping[str, float] = field(
        default_factory=lambda: {"vllm": 1.05, "sglang": 2.5, "trtllm": 2.3, "graph": 0.1}
    )
    request_factors: Mapping[str, float] = field(default_factory=lambda: {"trtllm": 1.3, "graph": 0.25})
    split_prefill_ratio: float = 0.8
    scale_factors: Mapping[str, float] = field(default_factory=dict)
