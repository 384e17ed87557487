"""Fits the coefficients of a step to measured points, and says how well it would have done on points it had not seen.

Owns: the objective, the shrinkage of group corrections, and the folds of the cross-validation. Does not own: reading
and refusing rows (`adapters.measured`), the terms (`step_terms`), or what is printed.
The objective is the sum of absolute log errors of seconds per token (by iteratively reweighted least squares, so that
a stalled run counts no more than its sign), plus ridge terms: weak ones that hold base values near physical priors, and
stronger ones that hold the log of every group correction near zero, so that a group with few points changes little.
Corrections of families are centred (their mean over points is zero), because an unseen family gets none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.coefficients import ERA_LEVERS, GENERATION_LEVERS, Coefficients, Lever, bounds, lever_vector
from perfmodel.configuration import Configuration
from perfmodel.errors import ConfigError
from perfmodel.steady import CHUNK_TOKENS, Steady, settle
from perfmodel.step_terms import INDEX, TERMS, FormatClass, Term

# Base values that the fit starts from and is weakly held to: the fitted ones of BLIS (inference-sim @f90a1e3a) and of
# the reference fit (reference/perfmodel.md, section 3), and 30 us for what neither has. Attention of prompts: 42 % of
# the peak, about what FlashAttention-2 reaches on H100. Time per token says little about it; the first tokens of long
# prompts agree (2.4 to 2.5 when they alone are asked).
PRIORS: dict[Term, float] = {
    Term.COMPUTE_BF16: 1.5,
    Term.COMPUTE_FP8: 1.7,
    Term.COMPUTE_FP4: 2.5,
    Term.COMPUTE_EXPERTS: 2.5,
    Term.WEIGHT_READ: 1.3,
    Term.EXPERT_READ: 1.3,
    Term.KV_READ: 1.1,
    Term.ALLREDUCE_VOLUME: 2.0,
    Term.ALLREDUCE_LATENCY: 3.0,
    Term.EXCHANGE_VOLUME: 1.5,
    Term.EXCHANGE_LATENCY: 8.0,
    Term.LAYER: 25.0,
    Term.MOE_LAYER: 30.0,
    Term.LINEAR_LAYER: 30.0,
    Term.STEP: 400.0,
    Term.SEQUENCE: 10.0,
    Term.PREFILL_ATTENTION: 2.4,
    Term.PREFILL_LAYER: 20.0,
    Term.PREFILL_MOE_LAYER: 60.0,
}

# Terms that few points tell apart are held to their priors ten times more strongly.
_STRONG = frozenset(
    {
        Term.LINEAR_LAYER,
        Term.ALLREDUCE_LATENCY,
        Term.EXCHANGE_LATENCY,
        Term.EXCHANGE_VOLUME,
        Term.PREFILL_ATTENTION,
        Term.PREFILL_LAYER,
        Term.PREFILL_MOE_LAYER,
    }
)
# How much more strongly: with ten the fit over unseen pairs was flat around it (docs/performance-model.md).
_STRONG_RATIO = 10.0

# Overhead of engines from before CUDA graphs relative to later ones: a decode step was launched kernel by kernel from
# Python (0.45 ms a layer in the Splitwise characterisation, whatever the tensor parallel size, against 0.05 ms).
ERA_OVERHEAD_PRIORS = {"unnamed 2024a": 6.0, "unnamed 2023b": 6.0, "unnamed 2023a": 6.0}

# Absolute errors below this count as squares, so that the weights stay finite.
_L1_FLOOR = 0.03

# Largest change of a log coefficient in one iteration, and the change at which the fit has converged.
_LARGEST_STEP = 1.0
_CONVERGED = 2e-3
_ITERATIONS = 25

# Rounds in which batches are worked out anew from the fitted speeds.
_ROUNDS = 3

# Weight of the constraint that family corrections have mean zero, per point.
_CENTRING = 10.0


class Scheme(StrEnum):
    """What a fold of the cross-validation leaves out whole."""

    # Concurrency curves (all else equal) of a pair that keeps others.
    WITHIN = "within"
    GPU = "gpu"
    PAIR = "combo"
    FAMILY = "model"


# What a scheme leaves out one of, in the words of the reports.
UNITS = {
    Scheme.WITHIN: "curve",
    Scheme.GPU: "device",
    Scheme.PAIR: "(model, device) pair",
    Scheme.FAMILY: "model family",
}


@dataclass(frozen=True, slots=True)
class Penalties:
    """Ridge weights, in points: a correction of a group with as many points as its weight is about half free."""

    base: float = 1.0
    formats: float = 10.0
    engines: float = 5.0
    eras: float = 3.0
    generations: float = 10.0
    families: float = 2.0


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured point: seconds per token of a configuration. `key` names its concurrency curve.

    `whole` points time a static batch from its first prompt to its last token, divided by the answer's tokens.
    """

    configuration: Configuration
    token_s: float
    device: str
    model: str
    curve: str
    source: str = ""
    weight: float = 1.0
    whole: bool = False

    @property
    def pair(self) -> str:
        """Device and model."""
        return f"{self.device} {self.model}"


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One number that is fitted: a log factor on the terms of `vector`, for the points of one group."""

    kind: str
    name: str
    lever: Lever | None
    vector: NDArray[np.float64]
    penalty: float
    prior: float = 0.0
    term: Term | None = None


@dataclass(slots=True)
class Fit:
    """A fitted set. Mutable: `coefficients` is replaced when bands are added."""

    coefficients: Coefficients
    row_count: int
    iterations: int
    log_error: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class Problem:
    """The points with their steady states, worked out once for all folds and fits."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        if not observations:
            raise ConfigError("calibration: no rows are left to fit; expected some with tpot_ms")
        self.observations = tuple(observations)
        self.steady = [Steady(item.configuration) for item in observations]
        self.log_s = np.log([item.token_s for item in observations])
        self.weight = np.array([item.weight for item in observations])

    def basis(self, rows: NDArray[np.intp], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Basis of these rows (rows x terms) at the batches that these speeds lead to."""
        return np.array([self._basis_of(row, second) for row, second in zip(rows, seconds, strict=True)])

    def _basis_of(self, row: int, second: float) -> NDArray[np.float64]:
        steady = self.steady[row]
        if self.observations[row].whole:
            return whole_batch_basis(steady, steady.batch(second))
        return steady.mean_step(second).basis


def whole_batch_basis(steady: Steady, batch: float) -> NDArray[np.float64]:
    """Basis per answer token of a static batch from start to end: its own prompts, spread over its steps."""
    lengths = steady.configuration.lengths
    step = steady.mean_step_of(batch)
    prompts = batch / lengths.output_tokens
    tokens = prompts * lengths.input_tokens
    work = replace(
        step.work,
        prefill_count=prompts,
        prefill_tokens=tokens,
        prefill_pairs=tokens * lengths.input_tokens / 2,
        mixed_ratio=min(1.0, max(1.0, batch * lengths.input_tokens / CHUNK_TOKENS) / lengths.output_tokens),
    )
    return steady.decode.of(work)


def _parameters(problem: Problem, rows: NDArray[np.intp], penalties: Penalties) -> list[_Parameter]:
    """All numbers that are fitted on these rows."""
    every: list[_Parameter] = []
    for term in TERMS:
        vector = np.zeros(len(TERMS))
        vector[INDEX[term]] = 1.0
        strength = penalties.base * (_STRONG_RATIO if term in _STRONG else 1.0)
        every.append(_Parameter("base", term.value, None, vector, strength, math.log(PRIORS[term]), term))
    groups = [problem.observations[row].configuration.group for row in rows]
    levelled: tuple[tuple[str, list[str], tuple[Lever, ...], float], ...] = (
        ("formats", [group.weights.value for group in groups], (Lever.WEIGHTS,), penalties.formats),
        ("engines", [group.era.engine for group in groups], ERA_LEVERS, penalties.engines),
        ("eras", [group.era.name for group in groups], ERA_LEVERS, penalties.eras),
        ("generations", [group.generation for group in groups], GENERATION_LEVERS, penalties.generations),
    )
    for kind, names, levers, penalty in levelled:
        for name in sorted(set(names)):
            every.extend(
                _Parameter(kind, name, lever, lever_vector(lever), penalty, _lever_prior(name, lever))
                for lever in levers
            )
    every.extend(
        _Parameter("families", name, None, np.ones(len(TERMS)), penalties.families)
        for name in sorted({group.family for group in groups})
    )
    return every


def _lever_prior(name: str, lever: Lever) -> float:
    """The prior log factor of a group's lever: zero but for the overhead of eras before CUDA graphs."""
    return math.log(ERA_OVERHEAD_PRIORS.get(name, 1.0)) if lever is Lever.OVERHEAD else 0.0


def _mask(problem: Problem, rows: NDArray[np.intp], parameters: Sequence[_Parameter]) -> NDArray[np.float64]:
    """1 where a parameter applies to a row (rows x parameters)."""
    groups = [problem.observations[row].configuration.group for row in rows]
    names = {
        "formats": np.array([group.weights.value for group in groups]),
        "engines": np.array([group.era.engine for group in groups]),
        "eras": np.array([group.era.name for group in groups]),
        "generations": np.array([group.generation for group in groups]),
        "families": np.array([group.family for group in groups]),
    }
    columns = [
        np.ones(len(rows)) if parameter.kind == "base" else (names[parameter.kind] == parameter.name).astype(float)
        for parameter in parameters
    ]
    return np.array(columns).T


def fit(problem: Problem, penalties: Penalties | None = None, rows: NDArray[np.intp] | None = None) -> Fit:
    """The coefficients for these rows of the problem (all by default)."""
    chosen = penalties or Penalties()
    picked = np.arange(len(problem.observations)) if rows is None else rows
    parameters = _parameters(problem, picked, chosen)
    mask = _mask(problem, picked, parameters)
    vectors = np.array([parameter.vector for parameter in parameters])
    prior = np.array([parameter.prior for parameter in parameters])
    ridge = np.array([parameter.penalty for parameter in parameters])
    centred = mask.mean(0) * np.array([parameter.kind == "families" for parameter in parameters])
    centring = _CENTRING * len(picked) * np.outer(centred, centred)
    limits = [_log_bounds(parameter) for parameter in parameters]
    low, high = (np.array([limit[side] for limit in limits]) for side in (0, 1))
    values, seconds, rounds = prior.copy(), np.exp(problem.log_s[picked]), 0
    log_s, weight = problem.log_s[picked], problem.weight[picked]
    for _ in range(_ROUNDS):
        basis = problem.basis(picked, seconds)
        for _ in range(_ITERATIONS):
            rounds += 1
            parts = basis * np.exp((mask * values) @ vectors)
            total = parts.sum(1)
            error = log_s - np.log(total)
            slope = (parts / total[:, None]) @ vectors.T * mask
            pull = weight / np.maximum(np.abs(error), _L1_FLOOR) * 0.1
            curvature = (slope * pull[:, None]).T @ slope + np.diag(ridge) + centring
            downhill = (slope * pull[:, None]).T @ error - ridge * (values - prior) - centring @ values
            change = np.linalg.solve(curvature, downhill)
            change *= min(1.0, _LARGEST_STEP / max(float(np.abs(change).max()), 1e-12))
            values = np.clip(values + change, low, high)
            if float(np.abs(change).max()) < _CONVERGED:
                break
        seconds = (basis * np.exp((mask * values) @ vectors)).sum(1)
    return Fit(_coefficients(parameters, values, problem, picked), len(picked), rounds, log_s - np.log(seconds))


def _log_bounds(parameter: _Parameter) -> tuple[float, float]:
    if parameter.term is None:
        return -math.log(40.0), math.log(40.0)
    low, high = bounds(parameter.term)
    # Reading is never faster than the peak, and a product never beats it.
    if not parameter.term.value.endswith("_us"):
        low = max(low, _LEAST_RATIO.get(parameter.term, low))
    return math.log(max(low, 1e-3)), math.log(high)


# Ratios whose physical minimum is 1.
_LEAST_RATIO = {
    Term.WEIGHT_READ: 1.0,
    Term.EXPERT_READ: 0.7,  # routing is more skewed than uniform: fewer experts are hit than the basis says
    Term.KV_READ: 0.7,  # some rows store the cache narrower than is assumed for them
}


def _coefficients(
    parameters: Sequence[_Parameter], values: NDArray[np.float64], problem: Problem, rows: NDArray[np.intp]
) -> Coefficients:
    """The fitted values as a coefficient set, with the row counts by device, model and pair."""
    base: dict[Term, float] = {}
    formats: dict[FormatClass, float] = {}
    families: dict[str, float] = {}
    levelled: dict[str, dict[str, dict[Lever, float]]] = {"engines": {}, "eras": {}, "generations": {}}
    for parameter, value in zip(parameters, values, strict=True):
        factor = math.exp(float(value))
        if parameter.term is not None:
            base[parameter.term] = factor
        elif parameter.kind == "formats":
            formats[FormatClass(parameter.name)] = factor
        elif parameter.kind == "families":
            families[parameter.name] = factor
        elif parameter.lever is not None:
            levelled[parameter.kind].setdefault(parameter.name, {})[parameter.lever] = factor
    items = [problem.observations[row] for row in rows]
    return Coefficients(
        base=base,
        formats=formats,
        engines=levelled["engines"],
        eras=levelled["eras"],
        generations=levelled["generations"],
        families=families,
        device_rows=row_counts(item.device for item in items),
        model_rows=row_counts(item.model for item in items),
        pair_rows=row_counts(item.pair for item in items),
    )


def row_counts(names: Iterable[str]) -> dict[str, int]:
    """How many rows have each name, by name."""
    return dict(sorted(Counter(names).items()))


def predict(problem: Problem, coefficients: Coefficients, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """Seconds per token of these rows under a coefficient set."""
    answers = np.zeros(len(rows))
    for place, row in enumerate(rows):
        item, steady = problem.observations[row], problem.steady[row]
        multipliers = coefficients.resolve(item.configuration.group)
        if item.whole:
            answers[place] = float(whole_batch_basis(steady, steady.batch(0.03)) @ multipliers)
        else:
            answers[place] = settle(steady, multipliers)[1]
    return answers


class Labelled(Protocol):
    """A row as `folds` sees it: what it belongs to."""

    @property
    def curve(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def pair(self) -> str: ...
    @property
    def configuration(self) -> Configuration: ...


def folds(rows: Sequence[Labelled], scheme: Scheme, count: int = 10) -> list[NDArray[np.intp]]:
    """The rows that each fold leaves out. Curves are dealt out to `count` folds by a fixed shuffle."""
    key: Callable[[Labelled], str] = {
        Scheme.WITHIN: lambda row: row.curve,
        Scheme.GPU: lambda row: row.device,
        Scheme.PAIR: lambda row: row.pair,
        Scheme.FAMILY: lambda row: row.configuration.group.family,
    }[scheme]
    names = sorted({key(row) for row in rows})
    if scheme is Scheme.WITHIN:
        order = np.random.default_rng(0).permutation(len(names))
        fold_of = {names[place]: int(turn) % count for turn, place in enumerate(order)}
    else:
        fold_of = {name: place for place, name in enumerate(names)}
    assigned = np.array([fold_of[key(row)] for row in rows])
    return [np.flatnonzero(assigned == fold) for fold in sorted(set(assigned.tolist()))]


def cross_validate(
    problem: Problem,
    scheme: Scheme,
    penalties: Penalties | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> NDArray[np.float64]:
    """Seconds per token of every row, predicted by a fit that left its fold out.

    Raises ConfigError where there is one fold only: nothing would be left to fit.
    """
    answers = np.zeros(len(problem.observations))
    everything = np.arange(len(problem.observations))
    parts = folds(problem.observations, scheme)
    if len(parts) < 2:
        raise ConfigError(
            f"calibration: the rows with tpot_ms are of one {UNITS[scheme]}; expected at least two, to leave one out"
        )
    for left_out in parts:
        kept = np.setdiff1d(everything, left_out)
        answers[left_out] = predict(problem, fit(problem, penalties, kept).coefficients, left_out)
        done(1)
    return answers


def choose_penalties(
    problem: Problem, candidates: Mapping[str, Penalties], done: Callable[[int], None] = lambda _: None
) -> tuple[str, dict[str, float]]:
    """The candidate with the least median error when whole (model, GPU) pairs are left out, and all their errors."""
    errors = {
        name: float(
            np.median(np.abs(cross_validate(problem, Scheme.PAIR, penalties, done) / np.exp(problem.log_s) - 1))
        )
        for name, penalties in candidates.items()
    }
    return min(errors, key=lambda name: errors[name]), errors
