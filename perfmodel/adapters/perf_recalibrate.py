"""`inferplane perf recalibrate`: measure a live pool from its metrics, correct its coefficients, alarm on drift.

Owns: reading Prometheus pages of engines (vLLM's names, which our simulated engine has too) and of the gateway, windows
between scrapes, the verdict and the exit code (1 with the reason on drift; a pool that is idle is no fault). Does not
own: the arithmetic (`recalibration`) or the overlay file (`overlays`). The overlay is written even when the command
alarms: what was measured is wanted most then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.adapters import perf_output

if TYPE_CHECKING:
    from perfmodel.calibration.recalibration import DriftLimits, Multipliers, Recalibration, Scrape, Steps, Window

# A metrics page takes milliseconds; one that takes this long is of no use.
_FETCH_S = 10.0

# Stands between a histogram's name and the upper bound of a bucket.
_BOUND = "|le="

_Page = Mapping[str, float]
"""Sample name -> sum over its labels; of buckets one for each bound."""


class Verdict(StrEnum):
    """What a run says of a pool; only `DRIFTED` is a reason to exit 1."""

    STEADY = "steady"
    DRIFTED = "drifted"
    TOO_LITTLE_TRAFFIC = "too_little_traffic"


@dataclass(frozen=True, slots=True)
class _Source:
    """One engine or gateway: a URL that is asked again, or the files of its scrapes in order."""

    name: str
    url: str | None
    files: tuple[Path, ...]


def recalibrate(  # noqa: PLR0913 typer makes one option of each parameter
    *,
    metrics: Annotated[
        list[str],
        typer.Option(
            help="An engine or gateway: [NAME=]URL of its /metrics, or [NAME=]FILE,FILE,... with its scrapes in order. "
            "Repeat it for each."
        ),
    ],
    model: Annotated[str, typer.Option(help="Model of the catalogue that the pool serves.")],
    gpu: Annotated[str, typer.Option(help="Device of the catalogue that it runs on.")],
    tp: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    weight_dtype: Annotated[str, typer.Option(help="Number format of the weights.")] = "bf16",
    max_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step of the engines.")] = 8192,
    pool: Annotated[str, typer.Option(help="Name of the pool in the overlay file.")] = "default",
    overlay: Annotated[
        Path | None, typer.Option(help="The overlay in use, as an earlier --out wrote it.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Overlay file to write.", show_default=False)] = None,
    windows: Annotated[int, typer.Option(help="Windows to measure at URLs.")] = 3,
    window_s: Annotated[float, typer.Option(help="Seconds of one of them.")] = 60.0,
    band: Annotated[float, typer.Option(help="Drift: how far a step time may be from the prediction (0.2: 20 %).")] = (
        0.2
    ),
    alarm_windows: Annotated[int, typer.Option(help="Windows outside the band, running, that raise the alarm.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Update a pool's coefficients from live metrics; exit 1 when it has drifted away from the model (0: idle)."""
    from perfmodel.adapters.overlays import PoolOverlay, read_overlay, write_overlay
    from perfmodel.calibration.recalibration import recalibrated

    with perf_output.guard():
        _check(windows, window_s, max_batched_tokens)
        limits = _limits(band, alarm_windows)
        sources = [_source(text, number) for number, text in enumerate(metrics)]
        steps = _steps(gpu, model, tp, weight_dtype)
        before = PoolOverlay() if overlay is None else read_overlay(overlay, pool)
        in_use = before.multipliers
        pages = _scrapes(sources, windows, window_s)
        measured = _Measured.of(pages)
        observed = measured.observed(steps, in_use, max_batched_tokens)
        result = recalibrated(in_use, observed, limits, before.out_of_band_count)
        verdict = _verdict(result)
        reason = _reason(pool, verdict, result, measured, limits)
        report = {"verdict": str(verdict), "reason": reason, **_report(result, in_use, measured, limits.band_ratio)}
        if out is not None:
            facts = {"model": model, "gpu": gpu, "tp": tp, "weight_dtype": weight_dtype}
            write_overlay(out, pool, {**facts, **_learned(result)})
        if as_json:
            perf_output.show_json({"pool": pool, **report})
        else:
            _print(pool, report)
        if reason is not None and verdict is Verdict.DRIFTED:
            perf_output.fail(reason)


def _check(windows: int, window_s: float, max_batched_tokens: int) -> None:
    from perfmodel.errors import ConfigError

    if windows < 1:
        raise ConfigError(f"--windows is {windows}; expected at least 1")
    if not 0 < window_s < float("inf"):
        raise ConfigError(f"--window-s is {window_s}; expected more than 0")
    if max_batched_tokens < 1:
        raise ConfigError(f"--max-batched-tokens is {max_batched_tokens}; expected at least 1")


def _limits(band_ratio: float, alarm_windows: int) -> DriftLimits:
    """What drift is. Raises ConfigError in the words of the command line."""
    from perfmodel.calibration.recalibration import DriftLimits
    from perfmodel.errors import ConfigError

    try:
        return DriftLimits(band_ratio, alarm_windows)
    except ConfigError as fault:
        raise ConfigError(f"--{fault}".replace("--alarm_windows", "--alarm-windows")) from None


def _source(text: str, number: int) -> _Source:
    from perfmodel.errors import ConfigError

    named, given, rest = text.partition("=")
    # A URL may have an equals sign in its query; a name has no slash.
    name, place = (named, rest) if given and "/" not in named else (f"engine-{number}", text)
    if place.startswith(("http://", "https://")):
        return _Source(name, place, ())
    files = tuple(Path(each) for each in place.split(","))
    if len(files) < 2:
        raise ConfigError(
            f"--metrics is {text!r}; expected a URL, or at least two files (scrapes a window apart) joined by a comma"
        )
    return _Source(name, None, files)


def _steps(gpu: str, model: str, tp: int, weight_dtype: str) -> Steps:
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.adapters.coefficient_file import load_coefficients
    from perfmodel.step_time import StepModel

    shape = load_catalog().shape(gpu, model, tp, weight_dtype)
    return StepModel(shape, load_coefficients().coefficients)


def _scrapes(sources: Sequence[_Source], windows: int, window_s: float) -> dict[str, list[_Page]]:
    """The pages of each source in order of time."""
    pages: dict[str, list[_Page]] = {source.name: [_parsed(file.read_bytes(), str(file)) for file in source.files]
                                     for source in sources}  # fmt: skip
    live = [source for source in sources if source.url is not None]
    if live:
        with perf_output.progress("measuring windows", windows) as done:
            for number in range(windows + 1):
                if number:
                    time.sleep(window_s)
                    done(1)
                for source in live:
                    pages[source.name].append(_fetched(source.url or ""))
    return pages


def _fetched(url: str) -> _Page:
    import httpx

    from perfmodel.errors import ScrapeError

    try:
        answer = httpx.get(url, timeout=_FETCH_S)
    except (httpx.HTTPError, httpx.InvalidURL) as fault:
        raise ScrapeError(f"{url} cannot be fetched: {str(fault) or type(fault).__name__}") from None
    if answer.status_code != httpx.codes.OK:
        raise ScrapeError(f"{url} answers with status {answer.status_code}; expected a Prometheus page")
    return _parsed(answer.content, url)


def _parsed(text: bytes, where: str) -> _Page:
    from prometheus_client.parser import text_string_to_metric_families

    from perfmodel.errors import ConfigError

    page: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                bound = sample.labels.get("le")
                name = sample.name if bound is None else f"{sample.name}{_BOUND}{bound}"
                page[name] = page.get(name, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as fault:
        raise ConfigError(f"{where} is no Prometheus page ({fault}); expected the text of /metrics") from None
    if not any(name.startswith(("vllm:", "inferplane_time_to_first_token")) for name in page):
        raise ConfigError(f"{where} has no metric of vLLM or of the gateway; expected one of their /metrics")
    return page


def _is_engine(page: _Page) -> bool:
    return any(name.startswith("vllm:") for name in page)


def _scrape(page: _Page) -> Scrape:
    from perfmodel.calibration.recalibration import Scrape

    def count(name: str) -> int:
        return round(page.get(f"vllm:{name}", 0.0))

    return Scrape(
        # Every data-parallel rank of a server has such a stamp; their sum changes when one of them starts again.
        started_s=page.get("vllm:iteration_tokens_total_created", 0.0),
        step_count=count("iteration_tokens_total_count"),
        steps_by_tokens=_buckets(page, "vllm:iteration_tokens_total_bucket"),
        itl_total_s=page.get("vllm:inter_token_latency_seconds_sum", 0.0),
        itl_count=count("inter_token_latency_seconds_count"),
        ttft_total_s=page.get("vllm:time_to_first_token_seconds_sum", 0.0),
        ttft_count=count("time_to_first_token_seconds_count"),
        prefill_total_s=page.get("vllm:request_prefill_time_seconds_sum", 0.0),
        prefill_count=count("request_prefill_time_seconds_count"),
        prompt_tokens=count("request_prompt_tokens_sum"),
        computed_tokens=count("request_prefill_kv_computed_tokens_sum"),
        generated_tokens=count("request_generation_tokens_sum"),
        finished_count=count("request_prompt_tokens_count"),
        kv_usage_ratio=page.get("vllm:kv_cache_usage_perc"),
    )


def _buckets(page: _Page, name: str) -> tuple[tuple[float, int], ...]:
    """(upper bound, count up to it) of a histogram, bounds rising, the last one infinite."""
    named = f"{name}{_BOUND}"
    return tuple(sorted((float(key.removeprefix(named)), round(page[key])) for key in page if key.startswith(named)))


@dataclass(frozen=True, slots=True)
class _Measured:
    """Windows of every engine, one list a round, and what the gateways saw over all of them."""

    rounds: tuple[tuple[Window, ...], ...]
    gateway: Mapping[str, float | None] | None

    @classmethod
    def of(cls, pages: Mapping[str, Sequence[_Page]]) -> _Measured:
        """Pair the scrapes of each source. Raises ConfigError when there is no engine among them."""
        from perfmodel.calibration.recalibration import window_between
        from perfmodel.errors import ConfigError

        engines = {name: list(map(_scrape, each)) for name, each in pages.items() if _is_engine(each[0])}
        if not engines:
            raise ConfigError("--metrics has only gateways; expected at least one engine, whose batches are needed")
        longest = max(map(len, engines.values())) - 1
        rounds = tuple(
            tuple(
                window_between(name, scrapes[number], scrapes[number + 1])
                for name, scrapes in engines.items()
                if number + 1 < len(scrapes)
            )
            for number in range(longest)
        )
        gateways = [each for each in pages.values() if not _is_engine(each[0])]
        return cls(rounds, _gateway_view(gateways) if gateways else None)

    def observed(self, steps: Steps, in_use: Multipliers, max_batched_tokens: int) -> list[list[Any]]:
        """The used windows of each round against the model."""
        from perfmodel.calibration.recalibration import WindowUse, observe

        return [
            [observe(steps, window, in_use, max_batched_tokens) for window in each if window.use is WindowUse.USED]
            for each in self.rounds
        ]


def _gateway_view(gateways: Sequence[Sequence[_Page]]) -> dict[str, float | None]:
    """Mean TTFT and TPOT that clients saw from the first scrape to the last, over all gateways."""

    def mean_ms(name: str) -> float | None:
        total = sum(each[-1].get(f"{name}_sum", 0.0) - each[0].get(f"{name}_sum", 0.0) for each in gateways)
        count = sum(each[-1].get(f"{name}_count", 0.0) - each[0].get(f"{name}_count", 0.0) for each in gateways)
        return 1000 * total / count if count > 0 else None

    return {
        "ttft_ms": mean_ms("inferplane_time_to_first_token_seconds"),
        "tpot_ms": mean_ms("inferplane_time_per_output_token_seconds"),
    }


def _report(result: Recalibration, in_use: Multipliers, measured: _Measured, band_ratio: float) -> dict[str, Any]:
    every = [window for each in measured.rounds for window in each]
    ttft = [(each.ttft_s, each.prompt_count) for each in every if each.ttft_s is not None]
    prompts = sum(count for _, count in ttft)
    engine_ttft_ms = 1000 * sum(ttft_s * count for ttft_s, count in ttft) / prompts if prompts else None
    gateway: dict[str, float | None] | None = None
    if measured.gateway is not None:
        seen = measured.gateway["ttft_ms"]
        outside = None if seen is None or engine_ttft_ms is None else seen - engine_ttft_ms
        gateway = {**measured.gateway, "outside_engine_ms": outside}
    return {
        "decode_ratio": result.multipliers.decode_ratio,
        "prefill_ratio": result.multipliers.prefill_ratio,
        "decode_ratio_in_use": in_use.decode_ratio,
        "prefill_ratio_in_use": in_use.prefill_ratio,
        "step_ratio": result.step_ratio,
        "step_count": result.step_count,
        "prompt_count": result.prompt_count,
        "engine_ttft_ms": engine_ttft_ms,
        "gateway": gateway,
        "drift": {
            "band_ratio": band_ratio,
            "out_of_band_count": result.out_of_band_count,
            "clipped": result.clipped,
            "alarmed": result.alarmed,
        },
        "windows": [_row(window) for window in every],
    }


def _learned(result: Recalibration) -> dict[str, Any]:
    """What the overlay keeps."""
    return {
        **asdict(result.multipliers),
        "step_count": result.step_count,
        "prompt_count": result.prompt_count,
        "out_of_band_count": result.out_of_band_count,
    }


def _row(window: Window) -> dict[str, Any]:
    values = asdict(window)
    for name in ("itl", "prefill", "ttft"):
        seconds = values.pop(f"{name}_s")
        values[f"{name}_ms"] = None if seconds is None else 1000 * seconds
    return values


def _verdict(result: Recalibration) -> Verdict:
    """Without a window that could be used nothing is known, whatever earlier runs counted."""
    if result.step_ratio is None:
        return Verdict.TOO_LITTLE_TRAFFIC
    return Verdict.DRIFTED if result.alarmed else Verdict.STEADY


def _reason(pool: str, verdict: Verdict, result: Recalibration, measured: _Measured, limits: DriftLimits) -> str | None:
    """One sentence for a verdict that needs one; None: steady."""
    if verdict is Verdict.TOO_LITTLE_TRAFFIC:
        return _too_little(pool, result, measured)
    return _alarm(pool, result, limits.band_ratio) if verdict is Verdict.DRIFTED else None


def _too_little(pool: str, result: Recalibration, measured: _Measured) -> str:
    uses = [str(window.use) for each in measured.rounds for window in each]
    counts = ", ".join(f"{uses.count(use)} {use}" for use in dict.fromkeys(uses))
    said = f"pool {pool} had too little traffic to judge it: no window could be used ({counts}), so nothing was learned"
    # What an earlier run found stands until a busy window says otherwise.
    return f"{said}, and the drift of an earlier run stands" if result.alarmed else said


def _alarm(pool: str, result: Recalibration, band_ratio: float) -> str:
    ratio = result.step_ratio or 1.0
    if result.clipped:
        return (
            f"pool {pool} has drifted: its steps take {ratio:.2f} of the predicted time and no multiplier from 0.5 to "
            "2 explains that; check the model, the device and --tp"
        )
    return (
        f"pool {pool} has drifted: its steps take {ratio:.2f} of the predicted time, outside {band_ratio:.0%} in "
        f"{result.out_of_band_count} windows running"
    )


def _print(pool: str, report: Mapping[str, Any]) -> None:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    typer.echo(f"pool {pool}: {report['step_count']} steps and {report['prompt_count']} prompts measured")
    typer.echo(f"  verdict                   {report['verdict']}")
    typer.echo(f"  step time over predicted  {shown(report['step_ratio'])}")
    typer.echo(f"  decode multiplier         {report['decode_ratio_in_use']:.3f} -> {report['decode_ratio']:.3f}")
    typer.echo(f"  prefill multiplier        {report['prefill_ratio_in_use']:.3f} -> {report['prefill_ratio']:.3f}")
    for window in report["windows"]:
        typer.echo(
            f"  {window['engine']}: {window['use']}, {window['step_count']} steps, batch "
            f"{window['decode_count']:.1f}, ITL {shown(window['itl_ms'])} ms, prefill {shown(window['prefill_ms'])} ms"
        )
    if report["gateway"] is not None:
        seen = report["gateway"]
        typer.echo(
            f"  gateway: TTFT {shown(seen['ttft_ms'])} ms, {shown(seen['outside_engine_ms'])} ms outside engines"
        )
    if report["verdict"] == Verdict.TOO_LITTLE_TRAFFIC:
        typer.echo(report["reason"])
