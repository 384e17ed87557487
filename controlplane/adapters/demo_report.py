"""What the demo shows at its end: latencies as the clients saw them, the product's own bill, and whether it is exact.

Owns: waiting until the books are complete, asking the product for usage and costs, the reconcile with spool and engine
counters, the table and the JSON. Does not own: any arithmetic of money: amounts are the texts that the costs API gave.

Latencies are those of the simulated engines; the real one on the CPU has a row of its own in the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.adapters.demo_client import Told
from controlplane.adapters.demo_tenants import Tenants
from controlplane.adapters.demo_traffic import LLAMA_WORKLOAD
from controlplane.config import Settings
from controlplane.errors import ConfigError

if TYPE_CHECKING:
    from billing.adapters.reconcile_sql import Report

# The shipper commits within a second; a loaded disk may take much longer before something is wrong.
_SETTLE_S = 30.0
_POLL_S = 0.1
_HTTP_TIMEOUT_S = 30.0
_MINUTE_S = 60
# A pipe has no width: the table's own and a line of text fit this.
_PIPE_COLUMNS = 120
# What is shown -> the usage API's field.
_TOKEN_KINDS = {
    "uncached_input": "input_uncached_tokens",
    "cached_input": "input_cached_tokens",
    "output": "output_tokens",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the report looks."""

    url: str
    settings: Settings
    tenants: Tenants
    endpoints_file: Path
    engine_urls: Mapping[str, str]
    began_unix_s: float


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that is shown."""

    calls: Sequence[Told]
    sent_count: int
    tokens: Mapping[str, int]
    """uncached_input, cached_input, output, by the usage API."""
    bill: Sequence[Mapping[str, str]]
    """tenant, usd."""
    reconcile: Report
    first_token_s: float | None
    """From the start of this process to the first token of a streamed, billed answer."""
    url: str
    """Where the gateway listens."""
    duration_s: float
    """Seconds of traffic that were asked for."""
    real_engine: bool = False
    """A llama.cpp engine was asked for: it has a row, even when it was too late for a request."""

    @property
    def workloads(self) -> tuple[str, ...]:
        """The rows of the table: the tenants in the order of the bill, then the real engine."""
        return (*(line["tenant"] for line in self.bill), *((LLAMA_WORKLOAD,) if self.real_engine else ()))

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        simulated = [call for call in self.calls if call.workload != LLAMA_WORKLOAD]
        return {
            "requests": self.sent_count,
            "completed": sum(call.completed for call in self.calls),
            "ttft_ms": _spread_ms(call.ttft_s for call in simulated),
            "tpot_ms": _spread_ms(call.tpot_s for call in simulated),
            "prefix_hit_ratio": hit_ratio(self.calls),
            "tokens": dict(self.tokens),
            "bill": [dict(line) for line in self.bill],
            "reconcile": {"exact": self.reconcile.exact, "events": self.reconcile.event_count},
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 3),
            "duration_s": self.duration_s,
            "url": self.url,
        }


def percentile(values: Sequence[float], ratio: float) -> float | None:
    """The value below which this share of `values` lies, between two of them in proportion; None without any."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * ratio
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def hit_ratio(calls: Iterable[Told]) -> float | None:
    """Cached prompt tokens over prompt tokens, of the calls whose engine told both."""
    known = [call for call in calls if call.prompt_tokens is not None and call.cached_tokens is not None]
    prompt = sum(call.prompt_tokens or 0 for call in known)
    return round(sum(call.cached_tokens or 0 for call in known) / prompt, 4) if prompt else None


def _spread_ms(values_s: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in values_s if value is not None]
    found = {name: percentile(known, ratio) for name, ratio in (("p50", 0.5), ("p95", 0.95))}
    return {name: None if value is None else round(value * 1e3, 2) for name, value in found.items()}


def await_books(settings: Settings, ended_unix_s: float, stopped: Any) -> None:
    """Wait until the shipper has committed everything that ended by then. Raises ConfigError after a deadline."""
    from billing.adapters.shipper_status import read_status

    until_s = time.monotonic() + _SETTLE_S
    while not stopped(_POLL_S):
        status = read_status(settings.spool_dir)
        if status is not None and status.updated_ns > ended_unix_s * 1e9:
            if not (status.lag_events or status.lag_bytes or status.open_count):
                return
            if time.monotonic() > until_s:
                why = status.last_error or f"{status.open_count} requests are still open."
                raise ConfigError(f"Not all usage is in the books after {_SETTLE_S:g} s: {why}")
        elif time.monotonic() > until_s:
            raise ConfigError(f"The shipper has not said anything for {_SETTLE_S:g} s; its log is shipper.log.")


def ask_product(place: Place) -> tuple[dict[str, int], list[dict[str, str]]]:
    """(tokens by kind, bill by tenant) of this run's keys, from the admin API. Raises ConfigError."""
    import httpx

    tenants = place.tenants.by_name.values()
    query: dict[str, Any] = {
        "start_time": int(place.began_unix_s) // _MINUTE_S * _MINUTE_S,
        "api_key_ids": [tenant.key_id for tenant in tenants],
        "group_by": ["api_key_id"],
    }
    headers = {"authorization": f"Bearer {place.tenants.admin_secret}"}
    try:
        with httpx.Client(base_url=place.url, headers=headers, timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
            usage, costs = (_results(client.get(f"/admin/v1/{name}", params=query)) for name in ("usage", "costs"))
    except httpx.HTTPError as fault:
        raise ConfigError(f"The gateway did not answer for the bill: {type(fault).__name__}.") from None
    tokens = {kind: sum(int(row[field] or 0) for row in usage) for kind, field in _TOKEN_KINDS.items()}
    bill = []
    for tenant in tenants:
        amounts = [row["amount"]["value"] for row in costs if row["api_key_id"] == tenant.key_id]
        # One run may lie on two days, of which each has an amount.
        total = sum((Decimal(amount) for amount in amounts if amount is not None), Decimal(0))
        bill.append({"tenant": tenant.name, "usd": f"{total:f}"})
    return tokens, bill


def _results(answer: Any) -> list[dict[str, Any]]:
    if answer.status_code != 200:
        raise ConfigError(f"The gateway answered {answer.status_code} when asked for the bill.")
    return [row for bucket in answer.json()["data"] for row in bucket["results"]]


def reconcile_all(place: Place) -> Report:
    """The whole comparison: books, spool, and each engine's own counters. Raises BillingError."""
    from billing.adapters import sql
    from billing.adapters.reconcile_inputs import EngineSource
    from billing.adapters.reconcile_sql import ReconcileOptions, reconcile
    from router.adapters.discovery import read_endpoints

    engine = sql.engine(place.settings.sql_url)
    sources = [
        EngineSource(one.endpoint_id, one.incarnation, f"{one.url}/metrics")
        for one in read_endpoints(place.endpoints_file)
        if one.endpoint_id in place.engine_urls
    ]
    try:
        return reconcile(engine, ReconcileOptions(place.settings.spool_dir, sources))
    finally:
        engine.dispose()


def show(results: Results) -> None:
    """Print the table on standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    told = results.as_json()
    # Without lines and edges it fits a terminal of 80 columns.
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for column in ("requests", "TTFT p50", "p95 ms", "TPOT p50", "p95 ms", "cached", "bill USD"):
        table.add_column(column, justify="right", no_wrap=True)
    bill = {line["tenant"]: line["usd"] for line in results.bill}
    for workload in results.workloads:
        calls = [call for call in results.calls if call.workload == workload]
        table.add_row(workload, *_cells(calls, len(calls)), _short(bill.get(workload)))
    simulated = [call for call in results.calls if call.workload != LLAMA_WORKLOAD]
    total = sum((Decimal(amount) for amount in bill.values()), Decimal(0))
    table.add_section()
    table.add_row("all", *_cells(simulated, results.sent_count, results.calls), _short(f"{total:f}"))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_COLUMNS)
    console.print(table)
    tokens = told["tokens"]
    console.print(
        f"tokens: {tokens['uncached_input']:,} uncached input, {tokens['cached_input']:,} cached input, "
        f"{tokens['output']:,} output; {told['completed']} of {told['requests']} requests completed",
        highlight=False,
    )
    if results.first_token_s is not None:
        console.print(
            f"first token after {results.first_token_s:.1f} s of this process (streamed and billed)",
            highlight=False,
        )
    console.print(_verdict(results.reconcile), highlight=False)


def _verdict(report: Report) -> str:
    counts = f"{report.event_count} events, {report.spool_event_count} of them compared with the spool"
    if report.exact:
        return f"reconcile: exact (spool = events = ledger = engines' own counters; {counts})"
    first = report.differences[0]
    return f"reconcile: NOT exact, {report.difference_count} differences; first: {first.kind.value} {first.detail}"


def _cells(calls: Sequence[Told], count: int, hits_of: Sequence[Told] | None = None) -> list[str]:
    ttft, tpot = _spread_ms(call.ttft_s for call in calls), _spread_ms(call.tpot_s for call in calls)
    hits = hit_ratio(calls if hits_of is None else hits_of)
    shown = [ttft["p50"], ttft["p95"], tpot["p50"], tpot["p95"]]
    return [
        str(count),
        *("-" if value is None else f"{value:,.1f}" for value in shown),
        "-" if hits is None else f"{hits:.1%}",
    ]


def _short(amount: str | None) -> str:
    """A hundredth of a cent is enough for eyes; `--json` has the exact text."""
    return "" if amount is None else f"{Decimal(amount):.6f}"
