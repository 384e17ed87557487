"""What a million tokens cost in a plan: uncached prompt, cached prompt and answer tokens apart.

Owns: dividing the hourly cost of a group's pools by the engine time that each kind of token takes. Does not own: prices
(`price`), purchase units (`purchase`) or what a tenant is charged (billing). The division is one of many: fixed costs
go with the time that a token keeps an engine busy, so idle and spare devices are paid by the tokens in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.search.plan import Candidate, Offer, Plan, PoolPlan, PoolRole
from perfmodel.search.rating import GroupLoad, Rater
from perfmodel.step_time import decode_batch, prefill_batch

# Prices of tokens are quoted per million.
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """USD per million tokens of each kind at the P50 rate; None where there is no such token.

    `usd_per_million_tokens` is the whole hourly cost over all tokens, prompt and answer, cached ones counted.
    """

    usd_per_h: float
    uncached_usd_per_million: float | None
    cached_usd_per_million: float | None
    output_usd_per_million: float
    usd_per_million_tokens: float


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Engine time of one request by kind of token."""

    uncached_s: float
    cached_s: float
    output_s: float


def group_costs(plan: Plan, offers: Mapping[str, Offer], raters: Mapping[tuple[str, ...], Rater]) -> list[TokenCosts]:
    """Costs of each of the plan's candidates, in their order. Together they pay the whole plan: devices that bought
    units leave over are divided as the used ones are.
    """
    alone = [
        sum(count * offers[name].usd_per_h for name, count in each.device_counts().items()) for each in plan.candidates
    ]
    scale = plan.usd_per_h / sum(alone)
    return [
        _token_costs(each, offers, raters[each.classes], usd * scale)
        for each, usd in zip(plan.candidates, alone, strict=True)
    ]


def _token_costs(found: Candidate, offers: Mapping[str, Offer], rater: Rater, usd_per_h: float) -> TokenCosts:
    load = rater.load
    paid = [0.0, 0.0, 0.0]
    pool_usd = [
        sum(count * offers[name].usd_per_h for name, count in pool.device_counts().items()) for pool in found.pools
    ]
    for pool, usd in zip(found.pools, pool_usd, strict=True):
        seconds = _request_seconds(pool, rater, found.predicted.batch_mean_count)
        whole = seconds.uncached_s + seconds.cached_s + seconds.output_s
        share = usd_per_h * usd / sum(pool_usd) / whole
        for place, part in enumerate((seconds.uncached_s, seconds.cached_s, seconds.output_s)):
            paid[place] += share * part
    per_h = load.rate_p50_per_s * 3600
    cached = load.lengths.input_tokens * load.lengths.cached_ratio
    uncached = load.lengths.input_tokens - cached
    return TokenCosts(
        usd_per_h=usd_per_h,
        uncached_usd_per_million=_each(paid[0], per_h * uncached),
        cached_usd_per_million=_each(paid[1], per_h * cached),
        output_usd_per_million=paid[2] / (per_h * load.lengths.output_tokens) * _MILLION,
        usd_per_million_tokens=usd_per_h
        / (per_h * (load.lengths.input_tokens + load.lengths.output_tokens))
        * _MILLION,
    )


def _each(usd_per_h: float, tokens_per_h: float) -> float | None:
    return None if tokens_per_h <= 0 else usd_per_h / tokens_per_h * _MILLION


def _request_seconds(pool: PoolPlan, rater: Rater, batch_count: float) -> _Seconds:
    """Marginal engine time of one request: its prompt without and with the cached part, and its share of decode
    steps.
    """
    load: GroupLoad = rater.load
    steps = rater.steps(pool.option)
    cached = int(load.lengths.input_tokens * load.lengths.cached_ratio)
    uncached = max(1, int(load.lengths.input_tokens) - cached)
    uncached_s = cached_s = output_s = 0.0
    if pool.role in (PoolRole.BOTH, PoolRole.PREFILL):
        chunk = min(uncached, pool.option.chunk_tokens)
        fixed_s = steps.step_s(prefill_batch(1))
        # A full chunk shares its step's fixed costs with nobody, a short prompt with others.
        alone_s = steps.step_s(prefill_batch(chunk))
        uncached_s = (alone_s - fixed_s * (1 - chunk / pool.option.chunk_tokens)) * uncached / chunk
        uncached_s = max(uncached_s, alone_s * 1e-3)
        if cached:
            cached_s = max(0.0, steps.step_s(prefill_batch(chunk, cached)) - alone_s) * uncached / chunk
    if pool.role is not PoolRole.PREFILL:
        batch = max(1, round(batch_count))
        context = int(load.lengths.input_tokens + load.lengths.output_tokens / 2)
        output_s = load.lengths.output_tokens * steps.step_s(decode_batch(batch, context)) / batch
    return _Seconds(uncached_s, cached_s, output_s)
