"""When requests or sessions come: curves over day and week, renewal processes of tenants, bursts, and tenants' shares.

Owns: the published hour curves, the map from a curve's even time to the clock, and the arrival processes. Does not own:
what arrives (`generators`). A process is drawn in even time and then stretched by the curve, which scales its
rate and keeps its shape: thinning a bursty process at random would make it Poisson.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError
from perfmodel.traces.lengths import lognormal

Seconds = npt.NDArray[np.float64]

# Seconds of an hour, hours of a day, days of a week, and the first day of the weekend (Monday is 0).
_HOUR_S = 3600.0
_DAY_HOURS, _WEEK_DAYS, _WEEKEND_INDEX = 24, 7, 5

# A renewal process that starts with an arrival is not a steady one: this many mean gaps run before it is looked at.
_SETTLE_GAPS = 50

# Shape of a tenant's gamma renewal process (ServeGen: p10 0.22, median 0.88 of per-client windows), drawn log-uniform.
_SHAPE_LOW, _SHAPE_HIGH = 0.2, 1.2
# The one large bulk tenant of a pool: its share of all requests, and its shape for a coefficient of variation above 5.
_BULK_SHARE_LOW, _BULK_SHARE_HIGH = 0.2, 0.5
# Its coefficient of variation is 5.8.
_BULK_SHAPE = 0.03
# Skew of tenants (ServeGen m-large: slope -1.16 over the top 50 of 162 clients).
_ZIPF_EXPONENT = 1.2

# On/off bursts of code completion (Azure 2023 code): medians and 90th percentiles of the bursts (10 and 26 s) and of
# the silences (15 and 78 s, at most 174 s, over 3 s by definition), as lognormal laws; within a burst the gaps have a
# CV of 1.9 at 9.6 requests/s, which gives 3.08 requests/s on the whole. Bursts differ in density so much [fitted here]
# that the counts of 10 s have the published variance over mean, 71.
_ON_MEDIAN_S, _ON_SIGMA = 10.0, 0.746
_OFF_MEDIAN_S, _OFF_SIGMA, _OFF_LEAST_S, _OFF_MOST_S = 15.0, 1.286, 3.0, 174.0
_ON_GAP_CV, _ON_DENSITY_SIGMA = 1.9, 0.6
_ON_RATE_PER_S, _ON_OFF_RATE_PER_S = 9.6, 3.08


class CurveName(StrEnum):
    """A published curve of load over the day."""

    FLAT = "flat"
    CODE = "code"
    CHAT = "chat"
    CAMPUS = "campus"
    API = "api"


def _hours(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# Multipliers of the day's mean by hour 0..23, weekday and weekend. Code and chat: Azure 2024 (UTC, read off plots);
# campus: BurstGPT session starts; API: the median client of ServeGen m-small. Where one curve is published, it serves
# both.
_CURVES = {
    CurveName.FLAT: (_hours("1 " * 24),) * 2,
    CurveName.CODE: (
        _hours(
            "0.70 0.68 0.64 0.52 0.42 0.34 0.30 0.25 0.23 0.24 0.26 0.38 "
            "0.70 1.19 1.69 1.82 1.72 1.98 2.18 2.23 2.06 1.52 1.10 0.82"
        ),
        _hours(
            "1.36 1.32 1.18 1.14 0.96 0.78 0.64 0.44 0.34 0.31 0.29 0.40 "
            "0.60 0.79 0.99 1.14 1.23 1.32 1.46 1.49 1.50 1.48 1.48 1.38"
        ),
    ),
    CurveName.CHAT: (
        _hours(
            "0.89 0.97 0.95 0.79 0.80 0.87 1.01 1.09 1.11 1.08 0.97 1.03 "
            "1.15 1.27 1.34 1.24 1.13 1.08 1.08 1.01 0.92 0.77 0.69 0.72"
        ),
        _hours(
            "0.88 0.94 0.93 0.79 0.77 0.80 0.82 0.92 0.94 0.87 0.92 1.02 "
            "1.09 1.22 1.23 1.27 1.19 1.17 1.13 1.06 1.06 1.02 0.94 1.01"
        ),
    ),
    CurveName.CAMPUS: (
        _hours(
            "1.00 0.97 0.63 0.57 0.41 0.38 0.22 0.17 0.18 0.34 0.79 1.27 "
            "1.91 1.59 1.85 1.34 1.42 1.35 1.23 1.65 1.38 1.17 1.14 1.05"
        ),
    )
    * 2,
    CurveName.API: (
        _hours(
            "0.81 0.72 0.78 0.60 0.51 0.41 0.45 0.75 0.95 1.06 1.26 1.34 "
            "1.34 1.31 1.17 1.16 1.12 1.18 1.29 1.22 1.29 1.20 1.04 1.04"
        ),
    )
    * 2,
}
# Volume of a weekend day over a weekday's: Azure 2024 code 0.32 and conversation 0.57; API traffic has no visible
# weekend, and a campus has none published.
_WEEKEND_VOLUMES = {CurveName.CODE: 0.32, CurveName.CHAT: 0.57}


@dataclass(frozen=True, slots=True)
class Calendar:
    """A curve laid on a clock: second 0 is hour `start_hours` of day `start_day_index` (0: Monday).

    `weekend_ratio` is a weekend day's volume over a weekday's (None: the curve's own). Rates are means of a WEEKDAY.
    Raises ConfigError for a start outside the week.
    """

    curve: CurveName = CurveName.FLAT
    start_day_index: int = 0
    start_hours: float = 0.0
    weekend_ratio: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_day_index < _WEEK_DAYS:
            raise ConfigError(f"start_day is {self.start_day_index}; expected 0 (Monday) to 6 (Sunday)")
        if not 0 <= self.start_hours < _DAY_HOURS:
            raise ConfigError(f"start_hour is {self.start_hours}; expected 0 to less than 24")
        if self.weekend_ratio is not None and not 0 < self.weekend_ratio < float("inf"):
            raise ConfigError(f"weekend_ratio is {self.weekend_ratio}; expected more than 0")

    def multiplier(self, at_s: Seconds) -> Seconds:
        """The rate at a time, over the mean rate of a weekday."""
        hours = np.floor(at_s / _HOUR_S + self._start).astype(np.int64) % (_WEEK_DAYS * _DAY_HOURS)
        return self._week()[hours]

    def is_weekend(self, at_s: Seconds) -> npt.NDArray[np.bool_]:
        """Whether a time is on a Saturday or Sunday."""
        days = np.floor((at_s / _HOUR_S + self._start) / _DAY_HOURS).astype(np.int64) % _WEEK_DAYS
        return days >= _WEEKEND_INDEX

    def even_s(self, at_s: Seconds) -> Seconds:
        """Even time at a clock time: the integral of the multiplier from second 0, negative before it."""
        low, high = float(np.min(at_s, initial=0.0)), float(np.max(at_s, initial=0.0))
        clock_s, even_s = self._knots(low, high)
        return np.interp(at_s, clock_s, even_s)

    def clock_s(self, even_s: Seconds, low_s: float, high_s: float) -> Seconds:
        """The clock time of even times that lie within the clock's `low_s` to `high_s`."""
        clock_s, knots_s = self._knots(min(0.0, low_s), max(0.0, high_s))
        return np.interp(even_s, knots_s, clock_s)

    @property
    def _start(self) -> float:
        return self.start_day_index * _DAY_HOURS + self.start_hours

    def _week(self) -> Seconds:
        weekday, weekend = (np.array(hours) / np.mean(hours) for hours in _CURVES[self.curve])
        volume = self.weekend_ratio
        if volume is None:
            volume = _WEEKEND_VOLUMES.get(self.curve, 1.0)
        days = [weekday] * _WEEKEND_INDEX + [weekend * volume] * (_WEEK_DAYS - _WEEKEND_INDEX)
        return np.concatenate(days)

    def _knots(self, low_s: float, high_s: float) -> tuple[Seconds, Seconds]:
        """Clock times at which the rate changes, from before `low_s` to after `high_s`, with their even times."""
        first = np.floor(low_s / _HOUR_S + self._start)
        last = np.ceil(high_s / _HOUR_S + self._start) + 1
        clock_s = (np.arange(first, last + 1) - self._start) * _HOUR_S
        rates = self.multiplier(clock_s[:-1] + _HOUR_S / 2)
        even_s = np.concatenate(([0.0], np.cumsum(rates * _HOUR_S)))
        return clock_s, even_s - np.interp(0.0, clock_s, even_s)


def renewal(
    rng: np.random.Generator, calendar: Calendar, rate_per_s: float, shape: float, *, begin_s: float, end_s: float
) -> Seconds:
    """Sorted arrivals in [begin_s, end_s) of a gamma renewal process (shape 1: Poisson; the CV is shape ** -0.5)."""
    low, high = calendar.even_s(np.array([begin_s, end_s]))
    wanted = (high - low) * rate_per_s
    if not wanted > 0:
        return np.zeros(0)
    settle = max(_SETTLE_GAPS, _SETTLE_GAPS / shape)
    drawn = np.zeros(0)
    while not len(drawn) or drawn[-1] < wanted + settle:
        count = int(wanted + settle + 6 * np.sqrt((wanted + settle) / shape)) + 16
        after = drawn[-1] if len(drawn) else 0.0
        drawn = np.concatenate((drawn, after + np.cumsum(rng.gamma(shape, 1 / shape, count))))
    even_s = low + (drawn - settle) / rate_per_s
    inside = calendar.clock_s(even_s[(drawn >= settle) & (even_s < high)], begin_s, end_s)
    return np.clip(inside, begin_s, np.nextafter(end_s, begin_s))


def on_off(rng: np.random.Generator, calendar: Calendar, rate_per_s: float, *, begin_s: float, end_s: float) -> Seconds:
    """Sorted arrivals in [begin_s, end_s) that come in bursts with silence between them, as code completion does.

    Another mean rate than the measured 3.08 requests/s scales the rate within bursts; bursts and silences keep their
    lengths, and the curve makes bursts more or less dense.
    """
    density = _ON_RATE_PER_S * rate_per_s / _ON_OFF_RATE_PER_S
    if not density > 0:
        return np.zeros(0)
    # The silence is that of one pool's users; it does not shrink with the hour, so bursts stay on the clock.
    found: list[Seconds] = []
    now_s = begin_s - float(rng.uniform(0.0, _OFF_MEDIAN_S + _ON_MEDIAN_S))
    shape = _ON_GAP_CV**-2
    while now_s < end_s:
        burst_s = float(lognormal(rng, _ON_MEDIAN_S, _ON_SIGMA, 1)[0])
        # The lognormal factor has mean 1.
        varied = float(lognormal(rng, np.exp(-(_ON_DENSITY_SIGMA**2) / 2), _ON_DENSITY_SIGMA, 1)[0])
        local = density * varied * float(calendar.multiplier(np.array([now_s]))[0])
        gaps = rng.gamma(shape, 1 / (shape * local), int(burst_s * local + 6 * np.sqrt(burst_s * local / shape)) + 16)
        at_s = now_s + np.cumsum(gaps)
        found.append(at_s[at_s < now_s + burst_s])
        silence_s = float(lognormal(rng, _OFF_MEDIAN_S, _OFF_SIGMA, 1)[0])
        now_s += burst_s + min(max(silence_s, _OFF_LEAST_S), _OFF_MOST_S)
    at_s = np.concatenate(found)
    return at_s[(at_s >= begin_s) & (at_s < end_s)]


@dataclass(frozen=True, slots=True, eq=False)
class Tenants:
    """Who sends: `share_ratio` float64[n] of all requests (sums to 1) and the `shape_ratio` of each one's process."""

    share_ratio: Seconds
    shape_ratio: Seconds

    def __len__(self) -> int:
        """How many there are."""
        return len(self.share_ratio)


def tenants(rng: np.random.Generator, count: int, *, bulk: bool = False, exponent: float = _ZIPF_EXPONENT) -> Tenants:
    """`count` tenants with Zipf shares, largest first, and shapes drawn log-uniform from 0.2 to 1.2.

    `bulk` puts one more in front, with 20 to 50 % of all requests and a coefficient of variation above 5. Raises
    ConfigError for a count below 1.
    """
    if count < 1:
        raise ConfigError(f"tenants is {count}; expected at least 1")
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    share = weights / weights.sum()
    shape = np.exp(rng.uniform(np.log(_SHAPE_LOW), np.log(_SHAPE_HIGH), count))
    if bulk:
        first = rng.uniform(_BULK_SHARE_LOW, _BULK_SHARE_HIGH)
        share = np.concatenate(([first], share * (1 - first)))
        shape = np.concatenate(([_BULK_SHAPE], shape))
    return Tenants(share, shape)
