"""How sure a plan's figures are: the 80 % bands of its engines' class, and the nearest calibrated group when it is new.

Owns: which of a candidate's pools is known least, and what its band does to the share of requests in time. Does not
own: the bands or the distance to calibrated groups (`estimate`, from cross-validated points). The bands were measured
on means of benchmarks; they are applied to the plan's percentiles as factors, which says how far hardware may be from
the model, not how the queue varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfmodel.coefficients import Band, Coefficients
from perfmodel.estimate import Kind, Known, Quantity, Split, band_key, nearest_group, split_of
from perfmodel.search.plan import PoolPlan
from perfmodel.search.rating import Rater, class_figures

# Least known first: a new family is the hardest to predict, then a new pair, then a new device.
_LEAST_KNOWN = (Split.FAMILY, Split.PAIR, Split.GPU, Split.WITHIN)


@dataclass(frozen=True, slots=True)
class Certainty:
    """Factors of the 80 % bands, how far the least known pool is from what was calibrated, each pool's nearest group
    with its row count, and the share in time of each class at the bands' far and near ends, by its name.
    """

    ttft: Band
    tpot: Band
    split: Split
    nearest: tuple[str, ...]
    goodput_low_ratio: Mapping[str, float]
    goodput_high_ratio: Mapping[str, float]

    @property
    def extrapolated(self) -> bool:
        """Whether a pool's device and model were never calibrated together."""
        return self.split is not Split.WITHIN


def certainty(rater: Rater, pools: Sequence[PoolPlan], coefficients: Coefficients, known: Known) -> Certainty | None:
    """The certainty of one candidate; None when the coefficients have no band for any class like it."""
    named = [(pool.option.offer.name, pool.option.shape.architecture.name) for pool in pools]
    splits = [split_of(device, model, coefficients) for device, model in named]
    worst = min(splits, key=_LEAST_KNOWN.index)
    kind = Kind.OPEN if len(pools) == 1 else Kind.DISAGGREGATED
    ttft, tpot = (_band(quantity, worst, kind, coefficients) for quantity in (Quantity.TTFT, Quantity.TPOT))
    if ttft is None or tpot is None:
        return None
    return Certainty(
        ttft=ttft,
        tpot=tpot,
        split=worst,
        nearest=tuple(
            f"{model} on {device}: {_nearest(device, model, split, coefficients, known)}"
            for (device, model), split in dict(zip(named, splits, strict=True)).items()
        ),
        goodput_low_ratio=_goodput(rater, pools, (ttft.high_ratio, tpot.high_ratio)),
        goodput_high_ratio=_goodput(rater, pools, (ttft.low_ratio, tpot.low_ratio)),
    )


def _nearest(device: str, model: str, split: Split, coefficients: Coefficients, known: Known) -> str:
    if split is Split.WITHIN:
        return f"calibrated ({coefficients.pair_rows[f'{device} {model}']} rows)"
    return nearest_group(device, model, split, coefficients, known)


def _band(quantity: Quantity, split: Split, kind: Kind, coefficients: Coefficients) -> Band | None:
    """The class itself; the same kind whatever the split; the same split whatever the kind (as `estimate` does)."""
    keys = (band_key(quantity, split, kind), band_key(quantity, "any", kind), band_key(quantity, split, "any"))
    return next((coefficients.bands[key] for key in keys if key in coefficients.bands), None)


def _goodput(rater: Rater, pools: Sequence[PoolPlan], factors: tuple[float, float]) -> dict[str, float]:
    """Each class's share in time if all TTFTs and TPOTs were these factors longer."""
    return {name: told.goodput_ratio for name, told in class_figures(rater, pools, *factors).items()}
