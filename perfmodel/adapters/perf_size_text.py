"""How `perf size` tells its answer to a person: the plan, its promise with bands, its cost, what would change it, and
what was not chosen.

Owns: the words and their order on a terminal. Does not own: the answer (`size_report`) or any figure in it. Lines are
not cut to a width, so that a pipe and a narrow terminal get every engine's full name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from perfmodel.adapters.offer_prices import price_words
from perfmodel.adapters.size_report import Answer, PeriodAnswer, raters
from perfmodel.search.candidates import described
from perfmodel.search.certainty import Certainty
from perfmodel.search.costs import TokenCosts
from perfmodel.search.flips import BreakEven, Flip
from perfmodel.search.moves import Moves
from perfmodel.search.plan import Candidate, PoolPlan, PoolRole, Rejection, RejectionReason, TrafficClass
from perfmodel.search.rating import ClassFigures, class_figures

if TYPE_CHECKING:
    from rich.console import Console

# Kinds of rejected alternatives that are shown; the JSON has all.
_SHOWN_REJECTIONS = 12

# What a pool does, in words.
_ROLES = {
    PoolRole.BOTH: "prompts and answers",
    PoolRole.PREFILL: "prompts",
    PoolRole.DECODE: "answers",
    PoolRole.ATTENTION: "answers",
}


def show(answer: Answer) -> None:
    """Print the answer."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"Prices: {price_words(answer.spec.prices)}")
    for each in answer.periods:
        _show_period(console, answer, each)
    for before, after, change in answer.moves:
        _show_moves(console, before, after, change)


def _show_period(console: Console, answer: Answer, period: PeriodAnswer) -> None:
    plan = period.sized.plan
    assert plan is not None
    title = f"{period.period.name} ({period.period.hours:g} h): " if len(answer.periods) > 1 else ""
    bought = ", ".join(f"{count} {name}" for name, count in plan.device_counts.items())
    power = "" if plan.watts is None else f", {plan.watts / 1000:.1f} kW"
    console.print(f"\n[bold]{title}{plan.usd_per_h:.2f} USD/h[/bold] for {bought}{power}")
    for found, sure, costs in zip(plan.candidates, period.certainties, period.costs, strict=True):
        _show_candidate(console, answer, period, (found, sure, costs))
    changes = [*map(_break_even_words, period.break_evens), *map(_flip_words, period.flips)]
    if changes:
        console.print("\nWhat would change the plan (by calculation: what would win then is not simulated):")
        for line in changes:
            console.print(f"  {line}")
    console.print(
        f"\nNot chosen ({period.sized.feasible_count:,} of {period.sized.considered_count:,} candidates keep the "
        "promise by calculation):"
    )
    told = list(_grouped(period.sized.rejections))
    for each, alike in told[:_SHOWN_REJECTIONS]:
        said = each.usd_per_h is None or each.reason is RejectionReason.COSTS_MORE
        cost = "" if said else f" for {each.usd_per_h:.2f} USD/h"
        more = "" if alike <= 1 else f" (and {alike - 1:,} like it)"
        console.print(f"  {each.reason}: {each.what}{cost}{more}: {each.detail}", markup=False)
    if len(told) > _SHOWN_REJECTIONS:
        console.print(f"  and {len(told) - _SHOWN_REJECTIONS} more kinds; --json has all")


def _show_candidate(
    console: Console,
    answer: Answer,
    period: PeriodAnswer,
    told: tuple[Candidate, Certainty | None, TokenCosts],
) -> None:
    from rich.table import Table

    found, sure, costs = told
    rater = raters(period.sized)[found.classes]
    figures = class_figures(rater, found.pools)
    console.print(f"\n  {' and '.join(found.classes)}, {found.topology}:")
    for pool in found.pools:
        console.print(f"    {_pool_words(pool)}", markup=False)
    table = Table("class", "figure", "promised", "predicted", "80 % band", pad_edge=False)
    for each in period.period.classes:
        if each.name in found.classes:
            for row in _figures(each, figures[each.name], sure):
                table.add_row(*row)
    console.print(table)
    simulated = rater.known_goodput(found.pools)
    if simulated is not None:
        needed = max(each.slo.goodput_ratio for each in period.period.classes if each.name in found.classes)
        strictest = ", all classes held to the strictest of their limits" if len(found.classes) > 1 else ""
        share = f"{simulated:.3f} of requests in time, promised {needed:g}{strictest}"
        console.print(f"    simulated with {answer.policy}: {share}")
    console.print(f"    {_cost_words(costs)}")
    console.print(f"    the P90 load is {found.predicted.utilisation_ratio:.0%} of what the serving replicas can carry")
    console.print(f"    {_certainty_words(sure)}", markup=False)


def _pool_words(pool: PoolPlan) -> str:
    spare = f" + {pool.spare_count} spare" if pool.spare_count else ""
    replicas = "replica" if pool.replica_count == 1 else "replicas"
    return f"{pool.serving_count}{spare} {replicas} for {_ROLES[pool.role]}: {described(pool.option)}"


def _figures(
    each: TrafficClass, told: ClassFigures, sure: Certainty | None
) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows of the table: limits, predictions at the promised percentile, and bands."""
    slo = each.slo
    percentile = f"p{slo.percentile_ratio * 100:g}"
    bands: tuple[str, str, str] = ("not known",) * 3
    if sure is not None:
        ttft = [told.ttft_percentile_ms * ratio for ratio in (sure.ttft.low_ratio, sure.ttft.high_ratio)]
        tpot = [told.tpot_percentile_ms * ratio for ratio in (sure.tpot.low_ratio, sure.tpot.high_ratio)]
        bands = (
            f"{ttft[0]:.0f} to {ttft[1]:.0f} ms",
            f"{tpot[0]:.1f} to {tpot[1]:.1f} ms",
            f"{sure.goodput_low_ratio[each.name]:.3f} to {sure.goodput_high_ratio[each.name]:.3f}",
        )
    yield each.name, f"TTFT {percentile}", f"{slo.ttft_ms:g} ms", f"{told.ttft_percentile_ms:.0f} ms", bands[0]
    yield "", f"TPOT {percentile}", f"{slo.tpot_ms:g} ms", f"{told.tpot_percentile_ms:.1f} ms", bands[1]
    yield "", "share in time", f"{slo.goodput_ratio:g}", f"{told.goodput_ratio:.3f}", bands[2]


def _certainty_words(sure: Certainty | None) -> str:
    if sure is None:
        return "no band: nothing like these engines was calibrated"
    return f"{'EXTRAPOLATED, ' if sure.extrapolated else ''}{'; '.join(sure.nearest)}"


def _cost_words(costs: TokenCosts) -> str:
    parts = [
        ("uncached prompt", costs.uncached_usd_per_million),
        ("cached prompt", costs.cached_usd_per_million),
        ("answer", costs.output_usd_per_million),
        ("all", costs.usd_per_million_tokens),
    ]
    told = ", ".join(f"{name} {value:.3f}" for name, value in parts if value is not None)
    return f"{costs.usd_per_h:.2f} USD/h; USD per million tokens: {told}"


def _break_even_words(one: BreakEven) -> str:
    name, now = one.offer_name, f"{one.offered_usd_per_h:.2f} USD/h"
    if one.in_plan:
        limit = "stays at any price" if one.usd_per_h is None else f"stays up to {one.usd_per_h:.2f} USD/h"
    elif one.usd_per_h is None or one.usd_per_h < 0.005:  # what would be told as 0.00
        limit = "does not come in at any price"
    else:
        limit = f"comes in below {one.usd_per_h:.2f} USD/h"
    return f"price of {name}: now {now}, {limit}"


def _flip_words(flip: Flip) -> str:
    then = "nothing fits" if flip.plan is None else f"{flip.usd_per_h:.2f} USD/h, {flip.plan}"
    return f"{flip.field}: now {flip.was}, stays at {flip.stays}, at {flip.value}: {then}"


def _grouped(rejections: tuple[Rejection, ...]) -> Iterator[tuple[Rejection, int]]:
    """The first of each kind with the number of its candidates, cheaper alternatives before those that cannot be.

    What missed when it was played out comes by the dozen, one chunk size or number format after another: one of each
    layout and set of devices is told.
    """
    kinds: dict[tuple[object, ...], tuple[Rejection, int]] = {}
    for each in rejections:
        kind: tuple[object, ...] = (each.classes, each.what, each.reason)
        if each.reason is RejectionReason.MISSED_WHEN_PLAYED:
            layout, _, engines = each.what.partition(": ")
            devices = {part.split("(")[-1].split(" ")[0] for part in engines.split(" + ")}
            kind = (each.classes, layout, tuple(sorted(devices)), each.reason)
        first, count = kinds.get(kind, (each, 0))
        kinds[kind] = (first, count + each.candidate_count)
    priced = [each for each in kinds.values() if each[0].usd_per_h is not None]
    yield from sorted(priced, key=lambda each: each[0].usd_per_h or 0.0)
    yield from (each for each in kinds.values() if each[0].usd_per_h is None)


def _show_moves(console: Console, before: str, after: str, change: Moves) -> None:
    console.print(f"\nFrom {before} to {after}: {change.total_s:.0f} s")
    for move in change.moves:
        wait = ", after the drain" if move.waits_for_drain else ""
        console.print(
            f"  {_ROLES[move.role]}, {described(move.option)}: "
            f"{move.before_count} -> {move.after_count} replicas, {move.seconds:.0f} s{wait}",
            markup=False,
        )
