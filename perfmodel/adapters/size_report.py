"""What `perf size` answers: the searches of a spec's periods put together, as JSON and as a plot.

Owns: the keys of the answer. Does not own: any figure in it (`search`, `search.costs`, `search.flips`, `search.moves`)
or its wording on a terminal (`perf_size_text`). Keys name their unit; what is not known is null, never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from perfmodel.adapters.catalog import Catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.adapters.offer_prices import prices_json
from perfmodel.adapters.spec_file import Period, SizeSpec
from perfmodel.coefficients import Band, Coefficients
from perfmodel.estimate import Known
from perfmodel.search.certainty import Certainty, certainty
from perfmodel.search.cheapest import EngineSteps, Problem, Sized, group_count, size
from perfmodel.search.check import replayed
from perfmodel.search.costs import TokenCosts, group_costs
from perfmodel.search.flips import INPUT_QUESTIONS, BreakEven, Flip, break_evens, input_flips, plan_words
from perfmodel.search.moves import Moves, StartSpeed, moves
from perfmodel.search.plan import Candidate, EngineOption, PoolPlan, Rejection, RejectionReason, TrafficClass
from perfmodel.search.rating import Check, ClassFigures, Memory, Rater, class_figures
from perfmodel.search.steps import AfdSteps, BandwidthSteps
from perfmodel.serving import Steps
from perfmodel.step_time import StepModel

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Shows a step while it runs: called with what is done, it gives what to call when parts of it are done.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True, eq=False)
class PeriodAnswer:
    """One period's search and what follows from it."""

    period: Period
    sized: Sized
    costs: tuple[TokenCosts, ...]
    certainties: tuple[Certainty | None, ...]
    break_evens: tuple[BreakEven, ...]
    flips: tuple[Flip, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """All periods, the moves from each to the next (round the clock), and the sentence when nothing fits."""

    spec: SizeSpec
    periods: tuple[PeriodAnswer, ...]
    moves: tuple[tuple[str, str, Moves], ...]
    sentence: str | None
    policy: str | None = None


def answered(
    spec: SizeSpec, catalog: Catalog, *, flips: bool, check: Check | None, progress: Progress, policy: str | None = None
) -> Answer:
    """Search every period, each step shown by `progress`; the first that nothing fits ends it with its sentence.

    `policy` is the name of the one that `check` routes by.
    """
    context = max(
        each.demand.input_tokens + each.demand.output_tokens / 2 for period in spec.periods for each in period.classes
    )
    coefficients = load_coefficients().coefficients
    steps = engine_steps(spec, coefficients, context)
    answers: list[PeriodAnswer] = []
    sentence = None
    memory = Memory()
    for period in spec.periods:
        where = _where(spec, period)
        models = dict.fromkeys(each.model for each in period.classes)
        problem = Problem(
            period.classes,
            spec.fleet,
            spec.choices,
            tuple((name, catalog.model(name)) for name in models),
            steps,
            replayed(),
            check,
            memory=memory,
        )
        with progress(f"{where}searching the cheapest plan", group_count(period.classes)) as advance:
            sized = size(problem, partial(advance, 1))
        answer = _period_answer(period, problem, sized)
        if flips and sized.plan is not None:
            with progress(f"{where}what would change the plan", INPUT_QUESTIONS + len(spec.fleet.offers)) as advance:
                answer = _with_flips(answer, problem, advance)
        answers.append(replace(answer, certainties=_certainties(answer, coefficients, catalog)))
        if sized.impossible is not None:
            sentence = where + sized.impossible.sentence
            break
    return Answer(spec, tuple(answers), () if sentence else tuple(_moves(spec, answers)), sentence, policy)


def _where(spec: SizeSpec, period: Period) -> str:
    """The period before what is said of it; a spec without periods has one that nobody named."""
    return f"{period.name}: " if len(spec.periods) > 1 else ""


def _period_answer(period: Period, problem: Problem, sized: Sized) -> PeriodAnswer:
    plan = sized.plan
    if plan is None:
        return PeriodAnswer(period, sized, (), (), (), ())
    offers = {offer.name: offer for offer in problem.fleet.offers}
    return PeriodAnswer(period, sized, tuple(group_costs(plan, offers, raters(sized))), (), (), ())


def _with_flips(answer: PeriodAnswer, problem: Problem, advance: Callable[[int], None]) -> PeriodAnswer:
    changes: list[Flip] = []
    for flip in input_flips(problem, answer.sized):
        changes += [] if flip is None else [flip]
        advance(1)
    prices: list[BreakEven] = []
    for price in break_evens(problem, answer.sized):
        prices.append(price)
        advance(1)
    return replace(answer, break_evens=tuple(prices), flips=tuple(changes))


def raters(sized: Sized) -> dict[tuple[str, ...], Rater]:
    """The raters of all groups, by the names of their classes."""
    return {group.rater.load.names: group.rater for group in sized.groups}


def _certainties(answer: PeriodAnswer, coefficients: Coefficients, catalog: Catalog) -> tuple[Certainty | None, ...]:
    plan = answer.sized.plan
    if plan is None:
        return ()
    known = Known(catalog.devices, catalog.models)
    rated = raters(answer.sized)
    return tuple(certainty(rated[each.classes], each.pools, coefficients, known) for each in plan.candidates)


def _moves(spec: SizeSpec, answers: list[PeriodAnswer]) -> list[tuple[str, str, Moves]]:
    if len(answers) < 2:
        return []
    stock = {
        offer.name: offer.inventory_count // offer.unit.device_count * offer.unit.device_count
        for offer in spec.fleet.offers
    }
    speed = StartSpeed(spec.weight_load_bytes_per_s, spec.warm_up_s)
    found = []
    for before, after in zip(answers, [*answers[1:], answers[0]], strict=True):
        if before.sized.plan is None or after.sized.plan is None:
            continue
        longest = max(each.demand.output_tokens for each in before.period.classes)
        change = moves(before.sized.plan, after.sized.plan, longest, stock, speed)
        found.append((before.period.name, after.period.name, change))
    return found


# JSON


def as_json(answer: Answer) -> dict[str, object]:
    """The answer with stable keys. One period: its plan; several: `periods` of plans, and `moves`."""
    first = answer.periods[0]
    single = len(answer.spec.periods) == 1
    done = answer.sentence is None
    hours = sum(each.period.hours for each in answer.periods)
    usd = sum((each.sized.plan.usd_per_h if each.sized.plan else 0.0) * each.period.hours for each in answer.periods)
    plan: dict[str, object] | None = None
    predicted: dict[str, object] | None = None
    if done and single:
        plan, predicted = _plan_json(first), _predicted_json(first, answer.policy)
    elif done:
        plan = {
            "periods": {each.period.name: _plan_json(each) for each in answer.periods},
            "moves": [_moves_json(*change) for change in answer.moves],
        }
        predicted = {"periods": {each.period.name: _predicted_json(each, answer.policy) for each in answer.periods}}
    return {
        "plan": plan,
        "reason": answer.sentence,
        "cost_usd_per_h": usd / hours if done else None,
        "predicted": predicted,
        "rejected": [
            _rejection_json(each, None if single else period.period.name)
            for period in answer.periods
            for each in period.sized.rejections
        ],
        "sensitivity": _sensitivity_json(first)
        if single
        else {each.period.name: _sensitivity_json(each) for each in answer.periods},
        "candidates": {
            "considered": sum(each.sized.considered_count for each in answer.periods),
            "feasible": sum(each.sized.feasible_count for each in answer.periods),
        },
        "prices": prices_json(answer.spec.prices),
    }


def _plan_json(answer: PeriodAnswer) -> dict[str, object]:
    plan = answer.sized.plan
    assert plan is not None
    return {
        "words": plan_words(plan),
        "topology": "+".join(dict.fromkeys(str(each.topology) for each in plan.candidates)),
        "cost_usd_per_h": plan.usd_per_h,
        "device_counts": plan.device_counts,
        "unit_counts": plan.unit_counts,
        "power_watts": plan.watts,
        "hours": answer.period.hours,
        "pools": [_pool_json(each, pool) for each in plan.candidates for pool in each.pools],
    }


def _pool_json(found: Candidate, pool: PoolPlan) -> dict[str, object]:
    option, shape = pool.option, pool.option.shape
    return {
        "classes": list(found.classes),
        "topology": str(found.topology),
        "role": str(pool.role),
        "model": shape.architecture.name,
        "accelerator": option.offer.name,
        "replicas": pool.replica_count,
        "replicas_serving": pool.serving_count,
        "replicas_spare": pool.spare_count,
        "tensor_parallel": shape.tensor_parallel_count,
        "pipeline_parallel": shape.pipeline_parallel_count,
        "attention_data_parallel": shape.data_parallel_count,
        "expert_parallel": shape.expert_parallel_count,
        "devices_per_replica": shape.device_count,
        "weight_format": str(shape.weight_format),
        "kv_format": str(shape.kv_format),
        "chunk_tokens": option.chunk_tokens,
        "max_sequences": option.max_sequence_count,
        "kv_capacity_tokens": option.kv_capacity_tokens,
        "compute_known": option.offer.hardware.can_prefill
        and (option.chips is None or option.chips.hardware.can_prefill),
        "ffn_accelerator": option.chips.name if option.chips else None,
        "ffn_devices_per_replica": option.chip_count if option.chips else None,
    }


def _predicted_json(answer: PeriodAnswer, policy: str | None) -> dict[str, object]:
    plan = answer.sized.plan
    assert plan is not None
    classes = {each.name: each for each in answer.period.classes}
    told: dict[str, object] = {}
    rated = raters(answer.sized)
    for found, costs, sure in zip(plan.candidates, answer.costs, answer.certainties, strict=True):
        rater = rated[found.classes]
        simulated = rater.known_goodput(found.pools)
        figures = class_figures(rater, found.pools)
        for name in found.classes:
            told[name] = {
                **_class_json(classes[name], figures[name], sure),
                **_shared_json(found, costs, name),
                "goodput_ratio_simulated": simulated,
                "simulated_policy": None if simulated is None else policy,
            }
    if len(told) == 1:
        only = next(iter(told.values()))
        assert isinstance(only, dict)
        return {**only, "classes": told}
    return {"goodput_ratio": min(each.predicted.goodput_ratio for each in plan.candidates), "classes": told}


def _class_json(each: TrafficClass, told: ClassFigures, sure: Certainty | None) -> dict[str, object]:
    """`band_low` and `band_high` bound the percentile with 80 % (goodput: what it is at the other two's far ends)."""
    percentile = f"p{each.slo.percentile_ratio * 100:g}"

    def latency(mean_ms: float, at_ms: float, limit_ms: float, band: Band | None) -> dict[str, object]:
        return {
            "mean": mean_ms,
            percentile: at_ms,
            "band_low": None if band is None else at_ms * band.low_ratio,
            "band_high": None if band is None else at_ms * band.high_ratio,
            "limit": limit_ms,
        }

    return {
        "ttft_ms": latency(
            told.ttft_mean_ms, told.ttft_percentile_ms, each.slo.ttft_ms, None if sure is None else sure.ttft
        ),
        "tpot_ms": latency(
            told.tpot_mean_ms, told.tpot_percentile_ms, each.slo.tpot_ms, None if sure is None else sure.tpot
        ),
        "goodput_ratio": told.goodput_ratio,
        "goodput_ratio_band_low": None if sure is None else sure.goodput_low_ratio[each.name],
        "goodput_ratio_band_high": None if sure is None else sure.goodput_high_ratio[each.name],
        "extrapolated": None if sure is None else sure.extrapolated,
        "nearest_calibrated": None if sure is None else list(sure.nearest),
    }


def _shared_json(found: Candidate, costs: TokenCosts, own: str) -> dict[str, object]:
    """What a class has in common with those that it shares pools with."""
    return {
        "utilisation_ratio": found.predicted.utilisation_ratio,
        "batch_mean": found.predicted.batch_mean_count,
        "shares_pools_with": [name for name in found.classes if name != own],
        "cost_usd_per_h": costs.usd_per_h,
        "usd_per_million_tokens": {
            "uncached_input": costs.uncached_usd_per_million,
            "cached_input": costs.cached_usd_per_million,
            "output": costs.output_usd_per_million,
            "all": costs.usd_per_million_tokens,
        },
    }


def _rejection_json(each: Rejection, period: str | None) -> dict[str, object]:
    told: dict[str, object] = {} if period is None else {"period": period}
    return {
        **told,
        "classes": list(each.classes),
        "alternative": each.what,
        "reason": str(each.reason),
        "detail": each.detail,
        "candidates": each.candidate_count,
        "cost_usd_per_h": each.usd_per_h,
    }


def _sensitivity_json(answer: PeriodAnswer) -> dict[str, object]:
    dearer = [each for each in answer.sized.rejections if each.reason is RejectionReason.COSTS_MORE]
    runner_up = min(dearer, key=lambda each: (each.usd_per_h or 0.0, each.what), default=None)
    return {
        "runner_up": None
        if runner_up is None
        else {"alternative": runner_up.what, "cost_usd_per_h": runner_up.usd_per_h},
        "break_even_usd_per_h": {
            each.offer_name: {
                "in_plan": each.in_plan,
                "offered": each.offered_usd_per_h,
                "break_even": each.usd_per_h,
            }
            for each in answer.break_evens
        },
        "flips": [
            {
                "field": each.field,
                "now": each.was,
                "stays_at": each.stays,
                "flips_at": each.value,
                "plan": each.plan,
                "cost_usd_per_h": each.usd_per_h,
            }
            for each in answer.flips
        ],
    }


def _moves_json(before: str, after: str, change: Moves) -> dict[str, object]:
    return {
        "from": before,
        "to": after,
        "total_s": change.total_s,
        "moves": [
            {
                "model": move.option.shape.architecture.name,
                "role": str(move.role),
                "accelerator": move.option.offer.name,
                "tensor_parallel": move.option.shape.tensor_parallel_count,
                "weight_format": str(move.option.shape.weight_format),
                "replicas_before": move.before_count,
                "replicas_after": move.after_count,
                "start_s": move.start_s,
                "drain_s": move.drain_s,
                "waits_for_drain": move.waits_for_drain,
            }
            for move in change.moves
        ],
    }


# Plot


def figure(answer: Answer) -> Figure:
    """Cost against room: every candidate that would do by topology and devices, and the plan."""
    import plotly.graph_objects as go

    drawn = go.Figure()
    for period in answer.periods:
        for group in period.sized.groups:
            for rows in group.rows:
                _draw_rows(drawn, period, group.rater.load.names, rows)
        plan = period.sized.plan
        for found in plan.candidates if plan else ():
            told = class_figures(raters(period.sized)[found.classes], found.pools)
            use = max(
                max(
                    told[each.name].ttft_percentile_ms / each.slo.ttft_ms,
                    told[each.name].tpot_percentile_ms / each.slo.tpot_ms,
                )
                for each in period.period.classes
                if each.name in told
            )
            drawn.add_scatter(
                x=[plan.usd_per_h if plan else 0.0],
                y=[use],
                mode="markers",
                name=f"{_where(answer.spec, period.period)}plan {'/'.join(found.classes)}",
                marker={"symbol": "star", "size": 16},
            )
    drawn.update_layout(
        title="Candidates that keep the promise: cost against the share of its limits that they take",
        xaxis_title="USD per hour",
        yaxis_title="largest share of a latency limit (lower: more room)",
    )
    return drawn


def _draw_rows(drawn: Figure, period: PeriodAnswer, names: tuple[str, ...], rows: object) -> None:
    import numpy as np

    from perfmodel.search.candidates import Rows

    assert isinstance(rows, Rows)
    used = rows.bill.units > 0
    offers = period.sized.offer_names
    for pattern in np.unique(used, axis=0) if len(used) else []:
        mine = np.flatnonzero((used == pattern).all(axis=1))
        devices = " + ".join(name for name, has in zip(offers, pattern, strict=True) if has)
        drawn.add_scatter(
            x=rows.bill.usd_per_h[mine],
            y=rows.use[mine],
            mode="markers",
            name=f"{'/'.join(names)} {rows.topology}: {devices}",
            marker={"size": 5, "opacity": 0.6},
        )


def engine_steps(spec: SizeSpec, coefficients: Coefficients, context_tokens: float) -> EngineSteps:
    """Step times of the spec's engine; `context_tokens` is the mean one of a decode, for engines that are tabulated.

    They raise ConfigError for a device of which not enough is known.
    """

    def steps(option: EngineOption) -> Steps:
        if option.chips is not None:
            return AfdSteps(option, context_tokens)
        if not option.offer.hardware.can_prefill:
            return BandwidthSteps(option, context_tokens)
        linked = option.offer.hardware.scaleup_device_count
        wide = 1 < linked < option.shape.device_count
        return StepModel(option.shape, coefficients, spec.engine, spec.era, spans_nodes=wide)

    return steps
