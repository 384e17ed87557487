"""Calibration from end to end, and what it would have said about points that it had not seen.

Owns: the order of the fits (time per token, benchmark limits, first token), the cross-validation of all three
quantities, the 80 % bands that follow from it, and the residual tables. Does not own: the fit of time per token
(`calibration`), the predictions (`estimate`), or files.
The launches and front end of the first token are nine numbers fitted by hand to all rows; everything else is fitted
anew without the fold that it is judged on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from perfmodel.benchmarks import mlperf_limit
from perfmodel.calibration.fit import Observation, Penalties, Problem, Scheme, fit, folds, row_counts
from perfmodel.coefficients import Band, Coefficients, FirstToken
from perfmodel.configuration import LIMITED, QUEUED, Configuration, Scenario
from perfmodel.estimate import Kind, Point, Quantity, band_key, band_of, central, kind_of
from perfmodel.first_token import correction_keys
from perfmodel.steady import room_sequences

# Ridge weights of the first token's group factors, in points, by the first word of their keys.
_FIRST_PENALTIES = {"load": 2.0, "era": 5.0, "generation": 10.0, "family": 8.0}

# Errors below this count as squares (`calibration` says why).
_L1_FLOOR = 0.05
_ROUNDS = 30

# Classes with fewer points than this take the band of a wider class.
_LEAST_BAND_POINTS = 25

# The middle 80 %.
_LOW, _HIGH = 0.1, 0.9

# TTFT above which a load is called saturated (the issue's own threshold), and the factor around it within which the
# scatter of repeated measurements decides.
SATURATED_S = 10.0
_NEAR_RATIO = 1.25


@dataclass(frozen=True, slots=True)
class Measured:
    """One usable row: what was asked, and what was measured (None: not reported)."""

    configuration: Configuration
    device: str
    model: str
    curve: str
    source: str
    ttft_s: float | None
    tpot_s: float | None
    output_tok_per_s: float | None
    weight: float = 1.0

    @property
    def useful(self) -> bool:
        """Whether anything that is predicted was measured."""
        return not (self.ttft_s is None and self.tpot_s is None and self.output_tok_per_s is None)

    @property
    def limited(self) -> bool:
        """Whether the row was tuned to a latency limit."""
        return self.configuration.scenario in LIMITED

    @property
    def pair(self) -> str:
        """The (device, model) pair."""
        return f"{self.device} {self.model}"

    def observation(self) -> Observation | None:
        """The row as a point of the fit of time per token; None without one, or where its steps are not steady."""
        asked = self.configuration
        at_once = asked.arriving and asked.rate_per_s is None
        if self.tpot_s is None or self.limited or asked.paced or at_once:
            return None
        return Observation(
            self.configuration, self.tpot_s, self.device, self.model, self.curve, self.source, self.weight
        )


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Both coefficient sets."""

    coefficients: Coefficients
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class Predicted:
    """Cross-validated central figures of a row under one scheme."""

    row: Measured
    scheme: Scheme
    point: Point


def calibrate(
    rows: Sequence[Measured], penalties: Penalties | None = None, first: FirstToken | None = None
) -> Calibrated:
    """Fit everything to these rows."""
    base = _fitted(rows, penalties)
    start = replace(first or FirstToken(), scale_factors={})
    raw = _raw_ttft(rows, base, start)
    return Calibrated(base, replace(start, scale_factors=first_factors(rows, raw)))


def _fitted(rows: Sequence[Measured], penalties: Penalties | None) -> Coefficients:
    """Time per token, then the usual distance of limited rows from their limits, then the row counts."""
    points = [point for row in rows if (point := row.observation()) is not None]
    coefficients = fit(Problem(points), penalties).coefficients
    timed = [row for row in rows if row.ttft_s is not None or row.tpot_s is not None]
    return replace(
        coefficients,
        benchmark=_limit_ratios(rows, coefficients),
        device_rows=row_counts(row.device for row in timed),
        model_rows=row_counts(row.model for row in timed),
        pair_rows=row_counts(row.pair for row in timed),
    )


def _limit_ratios(rows: Sequence[Measured], coefficients: Coefficients) -> dict[str, float]:
    """Median share of their limits that limited rows reach, in TPOT (after the model's own part) and in TTFT."""
    tpot: list[float] = []
    ttft: list[float] = []
    for row in rows:
        limit = mlperf_limit(row.model, row.configuration.scenario.value) if row.limited else None
        if limit is None:
            continue
        if row.ttft_s is not None:
            ttft.append(row.ttft_s / (limit.ttft_ms / 1e3))
        if row.tpot_s is not None:
            tpot.append(row.tpot_s / (limit.tpot_ms / 1e3))
    ratios = {}
    if tpot:
        ratios["mlperf_tpot_ratio"] = float(np.median(tpot))
    if ttft:
        ratios["mlperf_ttft_ratio"] = float(np.exp(np.median(np.log(ttft))))
    return ratios


def _raw_ttft(rows: Sequence[Measured], coefficients: Coefficients, first: FirstToken) -> NDArray[np.float64]:
    """TTFT of the rows that have one, before group factors; NaN for the others."""
    answers = np.full(len(rows), np.nan)
    for place, row in enumerate(rows):
        if row.ttft_s is not None:
            answers[place] = central(row.configuration, coefficients, first).ttft_s
    return answers


def first_factors(rows: Sequence[Measured], raw_s: NDArray[np.float64]) -> dict[str, float]:
    """Group factors of the first token: least absolute log error with a ridge towards none."""
    used = [place for place, row in enumerate(rows) if row.ttft_s is not None and math.isfinite(raw_s[place])]
    if not used:
        return {}
    error = np.array([math.log((rows[place].ttft_s or 1.0) / max(raw_s[place], 1e-6)) for place in used])
    weight = np.array([rows[place].weight for place in used])
    keys = [correction_keys(rows[place].configuration) for place in used]
    names = sorted({key for each in keys for key in each})
    column = {name: place for place, name in enumerate(names)}
    design = np.zeros((len(used), len(names)))
    for place, each in enumerate(keys):
        for key in each:
            design[place, column[key]] = 1.0
    ridge = np.diag([_FIRST_PENALTIES[name.split(" ", 1)[0]] for name in names])
    values = np.zeros(len(names))
    for _ in range(_ROUNDS):
        pull = weight / np.maximum(np.abs(error - design @ values), _L1_FLOOR) * 0.1
        values = np.linalg.solve((design * pull[:, None]).T @ design + ridge, (design * pull[:, None]).T @ error)
    return {name: float(math.exp(value)) for name, value in zip(names, values, strict=True)}


# Cross-validation


def cross_validate(
    rows: Sequence[Measured],
    scheme: Scheme,
    whole: Calibrated,
    penalties: Penalties | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> list[Predicted]:
    """Every row as predicted by a calibration that left its fold out.

    The first token's group factors are fitted to the fold's own training rows; the replays they start from are those
    of the whole calibration, whose step times moved little by the rows left out. A fold that leaves no row with a TPOT
    to fit (rows of one family, one device or one curve) gets no answers.
    """
    start = replace(whole.first_token, scale_factors={})
    raw = _raw_ttft(rows, whole.coefficients, start)
    everything = np.arange(len(rows))
    answers: list[Predicted] = []
    for left_out in folds(rows, scheme):
        kept = np.setdiff1d(everything, left_out)
        training = [rows[place] for place in kept]
        if all(row.observation() is None for row in training):
            done(len(left_out))
            continue
        coefficients = _fitted(training, penalties)
        first = replace(start, scale_factors=first_factors(training, raw[kept]))
        answers.extend(
            Predicted(rows[place], scheme, central(rows[place].configuration, coefficients, first))
            for place in left_out
        )
        done(len(left_out))
    return answers


def quantity_pairs(answer: Predicted) -> dict[Quantity, tuple[float, float]]:
    """(predicted, measured) of the quantities that were measured."""
    row, point = answer.row, answer.point
    pairs = {
        Quantity.TTFT: (point.ttft_s, row.ttft_s),
        Quantity.TPOT: (point.tpot_s, row.tpot_s),
        Quantity.OUTPUT: (point.output_tok_per_s, row.output_tok_per_s),
    }
    if row.configuration.scenario in QUEUED:
        pairs.pop(Quantity.TTFT)
    return {name: (made, seen) for name, (made, seen) in pairs.items() if seen is not None}


def bands(answers: Sequence[Predicted]) -> dict[str, Band]:
    """The middle 80 % of measured over predicted by quantity, split and kind, and by each alone."""
    logs: dict[str, list[float]] = {}
    for answer in answers:
        kind = kind_of(answer.row.configuration)
        for quantity, (made, seen) in quantity_pairs(answer).items():
            log = math.log(seen / made)
            split = answer.scheme.value
            for key in (
                band_key(quantity, split, kind), band_key(quantity, "any", kind), band_key(quantity, split, "any"),
            ):  # fmt: skip
                logs.setdefault(key, []).append(log)
    made_bands = {}
    for key, values in logs.items():
        if len(values) >= _LEAST_BAND_POINTS:
            low, high = np.quantile(values, (_LOW, _HIGH))
            made_bands[key] = Band(float(math.exp(min(low, 0.0))), float(math.exp(max(high, 0.0))), len(values))
    return made_bands


def error_table(answers: Sequence[Predicted], key: Callable[[Predicted], str]) -> dict[str, dict[str, float]]:
    """Errors by a key of the answers: per quantity the count, median, mean and 90th percentile, and the median bias."""
    groups: dict[str, dict[Quantity, list[float]]] = {}
    for answer in answers:
        for quantity, (made, seen) in quantity_pairs(answer).items():
            groups.setdefault(key(answer), {}).setdefault(quantity, []).append(made / seen - 1)
    table: dict[str, dict[str, float]] = {}
    for name, quantities in sorted(groups.items()):
        line: dict[str, float] = {}
        for quantity, values in quantities.items():
            signed = np.array(values)
            size = np.abs(signed)
            line[f"{quantity}_count"] = float(len(values))
            line[f"{quantity}_median_ratio"] = float(np.median(size))
            line[f"{quantity}_mean_ratio"] = float(size.mean())
            line[f"{quantity}_p90_ratio"] = float(np.quantile(size, 0.9))
            line[f"{quantity}_bias_ratio"] = float(np.median(signed))
        table[name] = line
    return table


def group_name(row: Measured) -> str:
    """How residuals are told apart: device, model, engine, and disaggregated or not."""
    split = " disaggregated" if row.configuration.disaggregated else ""
    return f"{row.device} {row.model} {row.configuration.group.era.engine}{split}"


class Miss(StrEnum):
    """Why a load was wrongly called saturated or not, the first that holds."""

    # Measured within a factor of 1.25 of the threshold.
    NEAR = "near_threshold"
    AGENTIC = "agentic"
    DISAGGREGATED = "disaggregated"
    # More clients than the KV cache holds: how long they wait was misjudged.
    ROOM = "kv_room"
    OTHER = "other"


def saturation(answers: Sequence[Predicted]) -> Mapping[str, float]:
    """Precision and recall of TTFT above ten seconds, of all rows and (`far`) of those not near the threshold."""
    pairs = [pair for answer in answers if (pair := quantity_pairs(answer).get(Quantity.TTFT)) is not None]
    far = [(made, seen) for made, seen in pairs if not _near(seen)]
    figures = {"count": float(sum(1 for _, seen in pairs if seen > SATURATED_S))}
    for prefix, chosen in (("", pairs), ("far_", far)):
        both = sum(1 for made, seen in chosen if made > SATURATED_S and seen > SATURATED_S)
        said = sum(1 for made, _ in chosen if made > SATURATED_S)
        true = sum(1 for _, seen in chosen if seen > SATURATED_S)
        figures[f"{prefix}precision_ratio"] = both / said if said else float("nan")
        figures[f"{prefix}recall_ratio"] = both / true if true else float("nan")
    return figures


def _near(seen_s: float) -> bool:
    return SATURATED_S / _NEAR_RATIO < seen_s < SATURATED_S * _NEAR_RATIO


def saturation_misses(answers: Sequence[Predicted]) -> dict[str, dict[str, int]]:
    """How many loads of each `Miss` were saturated unsaid (`missed`) and said to be when they were not (`false`)."""
    table: dict[str, dict[str, int]] = {}
    for answer in answers:
        pair = quantity_pairs(answer).get(Quantity.TTFT)
        if pair is None or (pair[0] > SATURATED_S) == (pair[1] > SATURATED_S):
            continue
        line = table.setdefault(_miss(answer.row, pair[1]).value, {"missed": 0, "false": 0})
        line["missed" if pair[1] > SATURATED_S else "false"] += 1
    return dict(sorted(table.items()))


def _miss(row: Measured, seen_s: float) -> Miss:
    asked = row.configuration
    if _near(seen_s):
        return Miss.NEAR
    if asked.scenario is Scenario.AGENTIC:
        return Miss.AGENTIC
    if asked.disaggregated:
        return Miss.DISAGGREGATED
    room = room_sequences(asked.decode, asked.lengths, asked.group.era.engine) * asked.decode.replicas
    return Miss.ROOM if (asked.concurrency or 0.0) > room else Miss.OTHER


def kind_name(answer: Predicted) -> str:
    """The kind of load of an answer, for tables."""
    kind: Kind = kind_of(answer.row.configuration)
    return kind.value


def coverage(answers: Sequence[Predicted], coefficients: Coefficients) -> dict[str, float]:
    """Share of the points inside of their 80 % bands, and the median width of the bands as high over low."""
    inside: dict[Quantity, list[bool]] = {}
    widths: dict[Quantity, list[float]] = {}
    for answer in answers:
        kind = kind_of(answer.row.configuration)
        for quantity, (made, seen) in quantity_pairs(answer).items():
            band = band_of(quantity, answer.scheme.value, kind, coefficients)
            inside.setdefault(quantity, []).append(band.low_ratio <= seen / made <= band.high_ratio)
            widths.setdefault(quantity, []).append(band.high_ratio / band.low_ratio)
    figures = {}
    for quantity, values in inside.items():
        figures[f"{quantity}_coverage_ratio"] = sum(values) / len(values)
        figures[f"{quantity}_band_width_ratio"] = float(np.median(widths[quantity]))
    return figures
