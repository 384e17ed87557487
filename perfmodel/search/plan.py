"""What is asked of a fleet and what is answered: demand, promise, offers, candidates, plans and why a candidate fails.

Owns: the values of sizing and their closed vocabularies; cost and power of a set of devices bought in whole units. Does
not own: how fast anything is (`rating`), which candidate is chosen (`search`), or the text of a spec file
(`adapters.spec_file`). Values only, so that a plan can be printed, compared and checked without being searched again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from perfmodel.errors import ConfigError
from perfmodel.hardware import Hardware, NumberFormat
from perfmodel.memory import EngineShape
from perfmodel.serving import LengthLaw, Lengths

# The lowest and highest share of requests that a promise can be about: below a half it promises nothing, and no model
# here says anything about the slowest request in a thousand.
_LOWEST_SHARE_RATIO, _HIGHEST_SHARE_RATIO = 0.5, 0.999

# The standard normal's 0.999 quantile.
_ONE_IN_A_THOUSAND = 3.0902


class Topology(StrEnum):
    """How the halves of a model's work are laid out."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
    AFD = "afd"


class PoolRole(StrEnum):
    """What the engines of a pool compute."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    ATTENTION = "attention"
    FFN = "ffn"


class RejectionReason(StrEnum):
    """Why a candidate is not the plan: the first check that it fails, in the order of this list."""

    NO_COMPUTE_FIGURE = "no_compute_figure"
    FACTS_UNKNOWN = "device_facts_unknown"
    PARALLELISM_IMPOSSIBLE = "parallelism_impossible"
    WEIGHTS_DO_NOT_FIT = "weights_do_not_fit"
    CONTEXT_DOES_NOT_FIT = "context_does_not_fit"
    LINK_UNKNOWN = "link_unknown"
    TTFT_BELOW_BOUND = "slo_ttft_below_physical_bound"
    TPOT_BELOW_BOUND = "slo_tpot_below_physical_bound"
    LOAD_NOT_CARRIED = "load_not_carried_at_any_size"
    TTFT_MISSED = "ttft_missed_at_any_size"
    TPOT_MISSED = "tpot_missed_at_any_size"
    GOODPUT_MISSED = "goodput_missed_at_any_size"
    INVENTORY = "inventory_exceeded"
    POWER = "power_exceeded"
    MISSED_WHEN_PLAYED = "missed_when_played_out"
    COSTS_MORE = "costs_more"


class DemandLevel(StrEnum):
    """Which of a class's two rates."""

    P50 = "p50"
    P90 = "p90"


@dataclass(frozen=True, slots=True)
class Slo:
    """A promise. `percentile_ratio` of the requests must see TTFT and TPOT within their limits, each counted on its
    own; `goodput_ratio` of them must see both.
    """

    ttft_ms: float
    tpot_ms: float
    percentile_ratio: float = 0.9
    goodput_ratio: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"slo.{name} is {getattr(self, name)}; expected above 0")
        for name in ("percentile_ratio", "goodput_ratio"):
            if not _LOWEST_SHARE_RATIO <= getattr(self, name) <= _HIGHEST_SHARE_RATIO:
                raise ConfigError(f"slo.{name} is {getattr(self, name)}; expected {_LOWEST_SHARE_RATIO} to 0.999")


@dataclass(frozen=True, slots=True)
class Demand:
    """Load of one class: requests a second in the median and in the busy hours (P90), and what a request is.

    `input_tokens` and `output_tokens` are means; `cached_ratio` is the share of prompt tokens found in the prefix
    cache; `burstiness_cv2_ratio` is the squared coefficient of variation of the gaps between arrivals (1: Poisson).
    """

    rate_p50_per_s: float
    rate_p90_per_s: float
    input_tokens: float
    output_tokens: float
    law: LengthLaw = LengthLaw.LOGNORMAL
    cached_ratio: float = 0.0
    burstiness_cv2_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate_p50_per_s", "rate_p90_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"load.{name} is {getattr(self, name)}; expected above 0: nothing is bought for no load"
                )
        if self.rate_p90_per_s < self.rate_p50_per_s:
            raise ConfigError(
                f"load.rate_p90_per_s is {self.rate_p90_per_s}; expected at least rate_p50_per_s {self.rate_p50_per_s}"
            )
        for name in ("input_tokens", "output_tokens"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"load.{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.cached_ratio < 1:
            raise ConfigError(f"load.cached_ratio is {self.cached_ratio}; expected 0 or more and below 1")
        if not self.burstiness_cv2_ratio >= 0:
            raise ConfigError(f"load.burstiness_cv2 is {self.burstiness_cv2_ratio}; expected 0 or more")

    @property
    def lengths(self) -> Lengths:
        """The requests' lengths as the queueing model takes them."""
        return Lengths(self.input_tokens, self.output_tokens, self.law, self.cached_ratio)

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer that all but one in a thousand requests stay within: an engine must hold that many
        tokens.
        """
        return math.ceil(
            sum(
                _longest(mean, cv2, self.law)
                for mean, cv2 in zip((self.input_tokens, self.output_tokens), self.lengths.cv2, strict=True)
            )
        )

    def rate_per_s(self, level: DemandLevel) -> float:
        """The rate of this level."""
        return self.rate_p90_per_s if level is DemandLevel.P90 else self.rate_p50_per_s


def _longest(mean: float, cv2: float, law: LengthLaw) -> float:
    """Length that one in a thousand passes; a uniform or fixed law has a largest one."""
    if law is LengthLaw.FIXED:
        return mean
    if law is LengthLaw.UNIFORM_08_10:
        return mean / 0.9
    variance = math.log1p(cv2)
    return mean * math.exp(_ONE_IN_A_THOUSAND * math.sqrt(variance) - variance / 2)


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One tenancy class: whose traffic, on which model, with which promise."""

    name: str
    model: str
    demand: Demand
    slo: Slo


@dataclass(frozen=True, slots=True)
class PurchaseUnit:
    """The smallest thing that can be bought: an 8-GPU node, an NVL72 rack, one card. `watts` None: not known."""

    name: str = "device"
    device_count: int = 1
    watts: float | None = None

    def __post_init__(self) -> None:
        if self.device_count < 1:
            raise ConfigError(f"unit.devices is {self.device_count}; expected at least 1")


@dataclass(frozen=True, slots=True)
class Offer:
    """An accelerator that may be used, what one costs an hour, and how many there are.

    `scaleout_bytes_per_s` is the network of one device, one way, that KV caches cross between pools; None: unknown.
    """

    hardware: Hardware
    usd_per_h: float
    inventory_count: int
    unit: PurchaseUnit = PurchaseUnit()
    scaleout_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not self.usd_per_h > 0:
            raise ConfigError(f"accelerators.{self.name}.usd_per_h is {self.usd_per_h}; expected above 0")
        if self.inventory_count < 0:
            raise ConfigError(f"accelerators.{self.name}.inventory is {self.inventory_count}; expected 0 or more")

    @property
    def name(self) -> str:
        """The device's name in the catalogue."""
        return self.hardware.name


@dataclass(frozen=True, slots=True)
class SpareRule:
    """How much may be missing while the promise holds. Serving replicas are sized for the P90 rate; then:

    `replica_count` replicas of each pool may fail (N+1 is 1) at P90; one of `zone_count` zones may be lost at
    `zone_demand` (1 zone: not asked); `rolling_count` replicas are restarted at once at `rolling_demand`.
    """

    replica_count: int = 0
    zone_count: int = 1
    zone_demand: DemandLevel = DemandLevel.P50
    rolling_count: int = 0
    rolling_demand: DemandLevel = DemandLevel.P50

    def __post_init__(self) -> None:
        for name, least in (("replica_count", 0), ("zone_count", 1), ("rolling_count", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"spare.{name} is {getattr(self, name)}; expected at least {least}")

    def total_count(self, p90_count: int, p50_count: int) -> int:
        """Replicas to run when the P90 load needs `p90_count` of them and the P50 load `p50_count`."""
        needed = {DemandLevel.P90: p90_count, DemandLevel.P50: p50_count}
        total = max(p90_count + self.replica_count, needed[self.rolling_demand] + self.rolling_count)
        if self.zone_count > 1:
            # The zones are filled evenly, so the largest holds ceil(total / zones).
            while total - -(-total // self.zone_count) < needed[self.zone_demand]:
                total += 1
        return total


@dataclass(frozen=True, slots=True)
class RackLimit:
    """Racks that there are, and the watts each may draw."""

    rack_count: int
    watts: float

    def __post_init__(self) -> None:
        if self.rack_count < 1:
            raise ConfigError(f"racks.count is {self.rack_count}; expected at least 1")
        if not self.watts > 0:
            raise ConfigError(f"racks.kw is {self.watts / 1000}; expected above 0")


@dataclass(frozen=True, slots=True)
class Choices:
    """What the search may vary."""

    topologies: tuple[Topology, ...] = (Topology.AGGREGATED, Topology.DISAGGREGATED)
    weight_formats: tuple[NumberFormat, ...] = (NumberFormat.BF16, NumberFormat.FP8)
    kv_formats: tuple[NumberFormat, ...] = (NumberFormat.BF16,)
    tensor_parallel_count: tuple[int, ...] = (1, 2, 4, 8)
    pipeline_parallel_count: tuple[int, ...] = (1,)
    attention_data_parallel_count: tuple[int, ...] = (1,)
    expert_parallel: bool = True
    chunk_tokens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    max_sequence_count: int = 256

    def __post_init__(self) -> None:
        for name in ("topologies", "weight_formats", "kv_formats", "tensor_parallel_count", "chunk_tokens"):
            if not getattr(self, name):
                raise ConfigError(f"choices.{name} is empty; expected at least one")
        for name in ("tensor_parallel_count", "pipeline_parallel_count", "attention_data_parallel_count"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(f"choices.{name} holds {min(getattr(self, name))}; expected at least 1")
        if min(self.chunk_tokens) < 16:
            raise ConfigError(f"choices.chunk_tokens holds {min(self.chunk_tokens)}; expected at least 16")
        if self.max_sequence_count < 1:
            raise ConfigError(f"choices.max_sequences is {self.max_sequence_count}; expected at least 1")


@dataclass(frozen=True, slots=True)
class Fleet:
    """What there is to buy from: offers, racks, and how much must be spare."""

    offers: tuple[Offer, ...]
    racks: RackLimit | None = None
    spare: SpareRule = SpareRule()

    def __post_init__(self) -> None:
        names = [offer.name for offer in self.offers]
        if not names:
            raise ConfigError("accelerators is empty; expected at least one")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"accelerators names {twice} twice; expected each device once")


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One engine that could be run: what it is made of and how it is configured.

    `chips` are the SRAM devices that hold its feed-forward weights (AFD), reached over `chip_link_bytes_per_s`; without
    them `shape` holds everything.
    """

    offer: Offer
    shape: EngineShape
    chunk_tokens: int
    max_sequence_count: int
    kv_capacity_tokens: int
    chips: Offer | None = None
    chip_count: int = 0
    chip_link_bytes_per_s: float | None = None
    # Sorts and names it; two options differ in it. Made once: a search asks for it a million times.
    key: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = self.shape
        key = (
            self.offer.name,
            self.chips.name if self.chips else "",
            f"{self.chip_count:05d}",
            f"tp{shape.tensor_parallel_count:03d}",
            f"pp{shape.pipeline_parallel_count:03d}",
            f"dp{shape.data_parallel_count:03d}",
            f"ep{shape.expert_parallel_count:03d}",
            str(shape.weight_format),
            str(shape.kv_format),
            f"c{self.chunk_tokens:06d}",
        )
        object.__setattr__(self, "key", key)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Replicas of one engine: `serving_count` carry the P90 load, `spare_count` more are run for failures."""

    role: PoolRole
    option: EngineOption
    serving_count: int
    spare_count: int

    @property
    def replica_count(self) -> int:
        """Replicas that run."""
        return self.serving_count + self.spare_count

    def device_counts(self) -> dict[str, int]:
        """Devices by the name of their offer."""
        option = self.option
        counts = {option.offer.name: option.shape.device_count * self.replica_count}
        if option.chips is not None:
            counts[option.chips.name] = counts.get(option.chips.name, 0) + option.chip_count * self.replica_count
        return counts


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a group of pools would show at the P90 rate, serving replicas only. Percentiles are the merged stream's at
    the first class's share, `goodput_ratio` is that of the class worst off, and `utilisation_ratio` is the rate over
    the largest that the fuller pool carries.
    """

    ttft_mean_ms: float
    ttft_percentile_ms: float
    tpot_mean_ms: float
    tpot_percentile_ms: float
    goodput_ratio: float
    utilisation_ratio: float
    batch_mean_count: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """Pools that serve the named classes within their promises, and what they would show."""

    classes: tuple[str, ...]
    topology: Topology
    pools: tuple[PoolPlan, ...]
    predicted: Prediction

    @property
    def key(self) -> tuple[str, ...]:
        """Breaks ties of cost, so that the result does not depend on the order of the candidates."""
        parts = [str(self.topology)]
        for pool in self.pools:
            parts += [str(pool.role), f"{pool.replica_count:05d}", *pool.option.key]
        return tuple(parts)

    def device_counts(self) -> dict[str, int]:
        """Devices by the name of their offer."""
        return added_counts(pool.device_counts() for pool in self.pools)


@dataclass(frozen=True, slots=True)
class Plan:
    """The cheapest fleet: one candidate per group of classes, with what is bought for all of them together."""

    candidates: tuple[Candidate, ...]
    device_counts: dict[str, int]
    unit_counts: dict[str, int]
    usd_per_h: float
    watts: float | None


@dataclass(frozen=True, slots=True)
class Rejection:
    """An alternative that is not the plan: what it was, the first reason, the figure that failed and its limit."""

    classes: tuple[str, ...]
    what: str
    reason: RejectionReason
    detail: str
    candidate_count: int = 1
    usd_per_h: float | None = None


@dataclass(frozen=True, slots=True)
class Impossible:
    """No fleet serves the demand; `sentence` says why, with the bound where one is beaten."""

    sentence: str
    rejections: tuple[Rejection, ...]


def added_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum of device counts by name."""
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return total
