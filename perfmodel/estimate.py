"""What a deployment will do under its load, how sure that is, and how far it is from anything measured.

Owns: the prediction of one configuration (first token, time per token, output rate, what binds), its 80 % band, and the
nearest calibrated group where the configuration is outside of what was fitted. Does not own: the terms and
coefficients, the replay of the harness (`harness`), or rows and files (`row_rules`, `adapters.perf_estimate`).
TPOT is the mean step in closed form, with which the coefficients were fitted; TTFT is a replay of the benchmark's
clients against the same step times. MLPerf's limited scenarios are tuned to their limits, and answered from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum

from perfmodel.architecture import Architecture
from perfmodel.benchmarks import LatencyLimit, mlperf_limit
from perfmodel.coefficients import Band, Coefficients, FirstToken
from perfmodel.configuration import LIMITED, QUEUED, Configuration, Scenario
from perfmodel.first_token import Turn, agent_turn, correction, first_token_s, replayed_run
from perfmodel.groups import model_family
from perfmodel.hardware import Hardware
from perfmodel.steady import MeanStep, Steady, settle
from perfmodel.step_terms import INDEX, Term
from perfmodel.step_time import Bound, bound_of

# Share of a limited scenario's TPOT that the limit explains: all of it where no prefill interferes, less where prompts
# dominate and the first-token limit binds first (the exponent is of the prefill share of a step).
_PREFILL_EXPONENT = 2.0

# Bands where no class of cross-validated points covers a configuration: the widest that any class had.
_WIDEST = Band(0.4, 2.5, 0)

# How much wider the log of a band is for each assumed input that matters.
_WIDER_PER_ASSUMPTION = 0.15
_MATTERING = frozenset(
    {"isl", "osl", "tp", "weight_dtype", "concurrency", "n_gpus", "layout", "compute", "scenario", "memory", "slots"}
)


class Quantity(StrEnum):
    """What is predicted."""

    TTFT = "ttft"
    TPOT = "tpot"
    OUTPUT = "output"


class Split(StrEnum):
    """How a configuration stands to the calibrated ones, as the accuracy figures are told apart."""

    WITHIN = "within"
    GPU = "gpu"
    PAIR = "combo"
    FAMILY = "model"


class Kind(StrEnum):
    """Kinds of load whose errors differ."""

    CLOSED = "closed_loop"
    DISAGGREGATED = "disaggregated"
    OPEN = "open_loop"
    STATIC = "static"
    AGENTIC = "agentic"
    LIMITED = "mlperf"
    QUEUED = "offline"


@dataclass(frozen=True, slots=True)
class Estimated:
    """A figure with the bounds of its 80 % band."""

    value: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer. `extrapolated` is empty inside of the calibrated pairs, else the nearest group and its row count.

    `assumed` has one text per rule that fired: `tp=4` where a value was imputed, else the rule's name.
    """

    ttft_ms: Estimated
    tpot_ms: Estimated
    output_tok_per_s: Estimated
    bound: Bound
    split: Split
    kind: Kind
    assumed: tuple[str, ...]
    extrapolated: str


@dataclass(frozen=True, slots=True)
class Known:
    """The catalogue's devices and models, to say which calibrated one is nearest."""

    devices: Mapping[str, Hardware]
    models: Mapping[str, Architecture]


@dataclass(frozen=True, slots=True)
class Point:
    """The central figures before any band. `in_flight`: sequences that decode at once, of all replicas. No TPOT can be
    below `floor_tpot_s`, where the load is as asked: bytes over bandwidth, FLOPs over peak."""

    ttft_s: float
    tpot_s: float
    output_tok_per_s: float
    bound: Bound
    in_flight: float
    floor_tpot_s: float


def predict(
    asked: Configuration, coefficients: Coefficients, known: Known, first: FirstToken | None = None, seed: int = 0
) -> Prediction:
    """What `asked` will do. Raises ConfigError for a device without compute figures."""
    point = central(asked, coefficients, first or FirstToken(), seed)
    device, model = asked.decode.shape.hardware.name, asked.decode.shape.architecture.name
    split = split_of(device, model, coefficients)
    kind = kind_of(asked)
    return Prediction(
        ttft_ms=_banded(point.ttft_s * 1e3, Quantity.TTFT, split, asked, coefficients),
        tpot_ms=_physical(
            _banded(point.tpot_s * 1e3, Quantity.TPOT, split, asked, coefficients), point.floor_tpot_s * 1e3, asked
        ),
        output_tok_per_s=_banded(point.output_tok_per_s, Quantity.OUTPUT, split, asked, coefficients),
        bound=point.bound,
        split=split,
        kind=kind,
        assumed=_assumed(asked, point),
        extrapolated="" if split is Split.WITHIN else nearest_group(device, model, split, coefficients, known),
    )


def central(asked: Configuration, coefficients: Coefficients, first: FirstToken, seed: int = 0) -> Point:
    """The central figures of `asked`."""
    turn = agent_turn(asked, coefficients, first, seed)
    if turn is not None:
        return _agents(asked, turn, coefficients, first)
    if asked.arriving:
        return _arriving(asked, coefficients, first, seed)
    steady = Steady(asked)
    multipliers = coefficients.resolve(asked.group)
    step, tpot_s = settle(steady, multipliers)
    floor_s = steady.decode.floor_s(step.work)
    tpot_s = max(tpot_s, floor_s)
    bound = bound_of(step.basis, multipliers)
    limit = _limit(asked)
    if limit is not None:
        # The batch of a submission is not told: one sequence alone is what no batch can beat.
        floor_s = steady.decode.floor_s(steady.mean_step_of(1.0).work)
        tpot_s = max(floor_s, _limited_tpot_s(tpot_s, _prefill_share(step, multipliers), limit, coefficients))
        ttft_s = limit.ttft_ms / 1e3 * coefficients.benchmark.get("mlperf_ttft_ratio", _TTFT_LIMIT_RATIO)
        ttft_s *= correction(asked, first)
    else:
        ttft_s = first_token_s(asked, coefficients, first, seed)
    in_flight = step.batch * asked.decode.replicas
    return Point(ttft_s, tpot_s, _output_tok_per_s(asked, step, ttft_s, tpot_s), bound, in_flight, floor_s)


def _agents(asked: Configuration, turn: Turn, coefficients: Coefficients, first: FirstToken) -> Point:
    """The figures of agents whose rate is known, and with it what they are given in a second."""
    steady = Steady(replace(asked, concurrency=turn.in_flight, rate_per_s=None))
    multipliers = coefficients.resolve(asked.group)
    step, _ = settle(steady, multipliers)
    given = (asked.rate_per_s or 0.0) * asked.lengths.output_tokens
    alone_s = steady.decode.floor_s(steady.mean_step_of(1.0).work)
    tpot_s = max(turn.tpot_s, alone_s)
    ttft_s = turn.ttft_s * correction(asked, first)
    return Point(ttft_s, tpot_s, given, bound_of(step.basis, multipliers), turn.in_flight, alone_s)


def _arriving(asked: Configuration, coefficients: Coefficients, first: FirstToken, seed: int) -> Point:
    """The figures of an open loop, all of its replay: it starts empty, ends, and never settles above what it can serve.

    A burst of 512 prompts waits for its own prompts once; a steady state would let each answer wait for as many.
    """
    run = replayed_run(asked, coefficients, first, seed)
    steady = Steady(asked)
    mean = steady.mean_step_of(max(run.batch_mean, 1.0))
    alone_s = steady.decode.floor_s(steady.mean_step_of(1.0).work)
    tpot_s = max(run.tpot_mean_ms / 1e3, alone_s)
    ttft_s = run.ttft_mean_ms / 1e3 * correction(asked, first)
    bound = bound_of(mean.basis, coefficients.resolve(asked.group))
    return Point(ttft_s, tpot_s, run.output_tok_per_s, bound, mean.batch * asked.decode.replicas, alone_s)


def _assumed(asked: Configuration, point: Point) -> tuple[str, ...]:
    """The rules that fired with their values; how many requests are in flight is known only now."""
    values = {"concurrency": f"{point.in_flight:.0f}", **dict(asked.imputed)}
    return tuple(f"{name}={values[name]}" if name in values else name for name in asked.assumed)


# Means over limits where no coefficient file says (fitted ones replace them).
_TTFT_LIMIT_RATIO = 0.2
_TPOT_LIMIT_RATIO = 0.75


def _limit(asked: Configuration) -> LatencyLimit | None:
    if asked.scenario not in LIMITED:
        return None
    return mlperf_limit(asked.decode.shape.architecture.name, asked.scenario.value)


def _limited_tpot_s(model_s: float, prefill_share: float, limit: LatencyLimit, coefficients: Coefficients) -> float:
    """TPOT of a submission tuned to a limit: a geometric mean of the model's and the limit's usual share."""
    own = min(1.0, prefill_share) ** _PREFILL_EXPONENT
    usual_s = limit.tpot_ms / 1e3 * coefficients.benchmark.get("mlperf_tpot_ratio", _TPOT_LIMIT_RATIO)
    return math.exp(own * math.log(model_s) + (1 - own) * math.log(usual_s))


def _prefill_share(step: MeanStep, multipliers: object) -> float:
    """Share of the mean step that goes to prompts: of the compute, that of prompt tokens."""
    parts = step.basis * multipliers  # type: ignore[operator]  # an array of the same length
    compute = sum(
        parts[INDEX[term]] for term in (Term.COMPUTE_BF16, Term.COMPUTE_FP8, Term.COMPUTE_FP4, Term.COMPUTE_EXPERTS)
    )
    prompts = step.work.prefill_tokens / max(step.work.prefill_tokens + step.work.decode_count, 1.0)
    launches = parts[INDEX[Term.PREFILL_LAYER]] + parts[INDEX[Term.PREFILL_MOE_LAYER]]
    return float((compute * prompts + parts[INDEX[Term.PREFILL_ATTENTION]] + launches) / parts.sum())


def _output_tok_per_s(asked: Configuration, step: MeanStep, ttft_s: float, tpot_s: float) -> float:
    """Output tokens a second of the whole deployment."""
    lengths = asked.lengths
    full = step.batch * asked.decode.replicas / tpot_s
    if asked.scenario in QUEUED or asked.slot_count is not None:
        return full
    if asked.rate_per_s is not None and asked.concurrency is None:
        offered = asked.rate_per_s * lengths.output_tokens
        return offered if asked.scenario in LIMITED else min(offered, full)
    if asked.concurrency is None:
        return full
    answer_s = ttft_s + tpot_s * max(lengths.output_tokens - 1, 0.0)
    return asked.concurrency * lengths.output_tokens / answer_s


# Bands


def kind_of(asked: Configuration) -> Kind:
    """The kind of load of a configuration."""
    if asked.disaggregated:
        return Kind.DISAGGREGATED
    if asked.scenario in LIMITED:
        return Kind.LIMITED
    if asked.scenario in QUEUED:
        return Kind.QUEUED
    return {
        Scenario.AGENTIC: Kind.AGENTIC,
        Scenario.OPEN_LOOP: Kind.OPEN,
        Scenario.STATIC_BATCH: Kind.STATIC,
        Scenario.FIRST_TOKEN: Kind.STATIC,
    }.get(asked.scenario, Kind.CLOSED)


def split_of(device: str, model: str, coefficients: Coefficients) -> Split:
    """How far (device, model) is from what was calibrated."""
    if f"{device} {model}" in coefficients.pair_rows:
        return Split.WITHIN
    if device not in coefficients.device_rows:
        return Split.GPU
    if model_family(model) not in {model_family(name) for name in coefficients.model_rows}:
        return Split.FAMILY
    return Split.PAIR


def band_key(quantity: Quantity, split: Split | str, kind: Kind | str) -> str:
    """How the coefficient file spells a class of points."""
    return f"{quantity} {split} {kind}"


def band_of(quantity: Quantity, split: Split | str, kind: Kind, coefficients: Coefficients) -> Band:
    """The band of a class: its own; that of its kind whatever the split; that of its split whatever the kind."""
    keys = (band_key(quantity, split, kind), band_key(quantity, "any", kind), band_key(quantity, split, "any"))
    return next((coefficients.bands[key] for key in keys if key in coefficients.bands), _WIDEST)


def _banded(value: float, quantity: Quantity, split: Split, asked: Configuration, fitted: Coefficients) -> Estimated:
    """`value` with its 80 % band, wider where inputs were assumed that the class' points had."""
    kind = kind_of(asked)
    band = band_of(quantity, split, kind, fitted)
    missing = len(_MATTERING.intersection(asked.assumed) - _usual(kind))
    wider = 1 + _WIDER_PER_ASSUMPTION * missing
    return Estimated(value, value * band.low_ratio**wider, value * band.high_ratio**wider)


def _physical(tpot: Estimated, floor: float, asked: Configuration) -> Estimated:
    """The band, not below what physics allows; where an input was assumed the truth may be another load's."""
    if _MATTERING.intersection(asked.assumed):
        return tpot
    return replace(tpot, p10=max(tpot.p10, min(floor, tpot.value)))


def _usual(kind: Kind) -> frozenset[str]:
    """Inputs that a kind's rows lack by nature: an open loop has a rate, not a concurrency."""
    usual: dict[Kind, AbstractSet[str]] = {
        # Limited scenarios never say their lengths and layout: their class' band already has that.
        Kind.LIMITED: _MATTERING - {"memory"},
        Kind.OPEN: {"concurrency"},
        Kind.QUEUED: {"concurrency"},
        Kind.STATIC: {"weight_dtype"},
        Kind.CLOSED: {"weight_dtype"},
    }
    return frozenset(usual.get(kind, ()))


# The nearest calibrated group


def nearest_group(device: str, model: str, split: Split, coefficients: Coefficients, known: Known) -> str:
    """The calibrated (device, model) pair that is most like this one, with its row count."""
    pairs = [tuple(name.split(" ", 1)) for name in coefficients.pair_rows]
    usable = [pair for pair in pairs if pair[0] in known.devices and pair[1] in known.models]
    if not usable:
        return f"{split}: nothing is calibrated"
    nearest = min(usable, key=lambda pair: _distance(pair, device, model, known))
    count = coefficients.pair_rows[" ".join(nearest)]
    return f"nearest calibrated group: {nearest[1]} on {nearest[0]} ({count} rows)"


def _distance(pair: tuple[str, ...], device: str, model: str, known: Known) -> float:
    """Sum of log distances in bandwidth, active and total parameters; another generation or family counts extra."""
    one, other = known.devices.get(device), known.devices[pair[0]]
    far = 0.0 if pair[0] == device else 1.0
    if one is not None:
        far += abs(math.log(one.memory_bytes_per_s / other.memory_bytes_per_s))
        far += 0.0 if one.generation == other.generation else 2.0
    this, that = known.models.get(model), known.models[pair[1]]
    far += 0.0 if pair[1] == model else 1.0
    far += 0.0 if model_family(pair[1]) == model_family(model) else 2.0
    if this is not None:
        far += abs(math.log(this.active_parameter_count / that.active_parameter_count))
        far += abs(math.log(this.parameter_count / that.parameter_count)) / 2
    return far
