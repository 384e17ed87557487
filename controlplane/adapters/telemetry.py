"""Every metric name and label of the gateway, and its access log.

Owns: the Prometheus metrics (one set of files per node, so that `/metrics` of any process is the sum over all), and one
JSON line per request without content. Does not own: when something is worth counting; it is fed finished values.
Labels are closed sets plus the operator's own names (model, endpoint): a tenant's names are never labels.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from controlplane.ports import Call, Trace

# Bucket edges in seconds: OpenTelemetry GenAI conventions for TTFT and TPOT, with long prefills added up to 60 s
# (reference gateway 2.10), and its request duration edges.
_TTFT_EDGES_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0)
_TPOT_EDGES_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_EDGES_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
# Access lines are written together: at this size, and by `flush` every quarter of a second.
_LOG_BUFFER_BYTES = 64 * 1024
# Pieces of the log that wait for a slow reader: 64 of 64 KiB are 4 MiB.
_LOG_QUEUE_COUNT = 64
# How long the end waits for them.
_LOG_CLOSE_S = 1.0
# A model name that no engine serves is the client's text: it is counted under this label.
_UNKNOWN_MODEL = "(unknown)"


class _Histogram(Histogram):
    """A histogram that also takes what was observed since the last tick at once.

    `observe` of a histogram in files that processes share costs 3 us, two thirds of it in the files.
    """

    def observe_all(self, values: Sequence[float]) -> None:
        """The same as `observe` for each."""
        counts = [0] * len(self._upper_bounds)
        for value in values:
            counts[bisect_left(self._upper_bounds, value)] += 1
        self._sum.inc(sum(values))
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class Metrics:
    """The gateway's metrics. Mutable: counters. `for_process` must run in the process that counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"inferplane_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Requests by how they ended.", "operation", "model", "status")
        self.refusals = counter("refusals", "Requests refused before dispatch.", "reason")
        self.tokens = counter("tokens", "Tokens metered.", "model", "kind")
        self.attempts = counter("attempts", "Attempts dispatched to an engine.", "endpoint", "outcome")
        self.retries = counter("retries", "Requests that needed a second engine.", "model")
        self.estimated = counter("estimated_requests", "Requests whose usage is an estimate.", "model")
        self.volatile = counter("volatile_prompts", "Prompts whose beginning changed since the turn before.", "model")
        self.exact = counter(
            "exact_prompts", "Prompts of models whose KV events are heard, by how they were read.", "result"
        )
        self.lost_log_bytes = counter("access_log_lost_bytes", "Access lines that a slow reader made us drop.")
        self.denials = counter("denials", "Requests without a usable key.", "reason")
        labels = ("operation", "model")
        self.ttft = _Histogram(
            "inferplane_time_to_first_token_seconds", "Request head to first token sent.", labels,
            buckets=_TTFT_EDGES_S, registry=registry,
        )  # fmt: skip
        self.tpot = _Histogram(
            "inferplane_time_per_output_token_seconds", "(Duration - TTFT) / (output tokens - 1).", labels,
            buckets=_TPOT_EDGES_S, registry=registry,
        )  # fmt: skip
        self.duration = _Histogram(
            "inferplane_request_duration_seconds", "Request head to last byte.", labels,
            buckets=_DURATION_EDGES_S, registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "inferplane_requests_in_flight", "Requests being answered.", multiprocess_mode="livesum", registry=registry
        )
        self.health = Gauge(
            "inferplane_store_answering", "1 while the store answers, per process.", ("store",),
            multiprocess_mode="liveall", registry=registry,
        )  # fmt: skip
        self.gauges = Gauge(
            "inferplane_state", "Ages, lags and sizes by name (units are in the names).", ("name",),
            multiprocess_mode="livemax", registry=registry,
        )  # fmt: skip


@dataclass(slots=True)
class _Series:
    """The metric children of one (operation, model), looked up once."""

    ttft: Any
    tpot: Any
    duration: Any
    uncached: Any
    cached: Any
    output: Any
    statuses: dict[int, Any]


class Telemetry:
    """Takes finished requests; the one place that turns them into metrics and log lines."""

    def __init__(self, metrics_dir: Path, access_log: str, known_model: Callable[[str], bool]) -> None:
        self._dir = metrics_dir
        self.metrics = Metrics(CollectorRegistry())
        self._known_model = known_model
        self._series: dict[tuple[str, str], _Series] = {}
        self._attempts: dict[tuple[str, str], Any] = {}
        self._log = _open_log(access_log)
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._in_flight_count = 0
        self._exact: dict[str, int] = {}
        # Counts since the last tick: adding here is five times cheaper than in the files that processes share.
        self._counts: dict[Any, int] = {}
        self._observed: dict[_Histogram, list[float]] = {}

    def started(self) -> None:
        """A request's head was read."""
        self._in_flight_count += 1

    def denied(self, reason: str) -> None:
        """A caller without a usable key."""
        self.metrics.denials.labels(reason).inc()

    def volatile(self, model: str) -> None:
        """A prompt's beginning changed, so that nothing after it is found in any cache."""
        self._add(self.metrics.volatile.labels(model), 1)

    def exact(self, totals: Mapping[str, int]) -> None:
        """So many prompts in all were worked out for the exact index, or were not, by result."""
        for result, total in totals.items():
            before = self._exact.get(result, 0)
            if total > before:
                self._exact[result] = total
                self.metrics.exact.labels(result).inc(total - before)

    def finished(self, call: Call, trace: Trace) -> None:
        """A request has ended."""
        self._in_flight_count -= 1
        request = call.request
        asked = request.model_asked
        model = asked if trace.attempts_count or self._known_model(asked) else _UNKNOWN_MODEL
        series = self._series.get((request.operation.value, model)) or self._make(request.operation.value, model)
        status = series.statuses.get(trace.status)
        if status is None:
            status = self.metrics.requests.labels(request.operation.value, model, str(trace.status))
            series.statuses[trace.status] = status
        self._add(status, 1)
        self._observe(series.duration, trace.duration_s)
        if trace.attempts_count == 0:
            self.metrics.refusals.labels(trace.reason).inc()
        else:
            self._count_attempt(model, trace)
        usage = trace.usage
        if usage is not None:
            self._count_tokens(series, model, trace)
        if self._log is not None:
            self._write(call, trace)

    def _add(self, child: Any, count: int) -> None:
        self._counts[child] = self._counts.get(child, 0) + count

    def _observe(self, child: _Histogram, value: float) -> None:
        values = self._observed.get(child)
        if values is None:
            values = self._observed[child] = []
        values.append(value)

    def _make(self, operation: str, model: str) -> _Series:
        m = self.metrics
        series = _Series(
            m.ttft.labels(operation, model), m.tpot.labels(operation, model), m.duration.labels(operation, model),
            m.tokens.labels(model, "uncached_input"), m.tokens.labels(model, "cached_input"),
            m.tokens.labels(model, "output"), {},
        )  # fmt: skip
        self._series[(operation, model)] = series
        return series

    def _count_attempt(self, model: str, trace: Trace) -> None:
        key = (trace.endpoint_id or "", trace.outcome)
        child = self._attempts.get(key)
        if child is None:
            child = self._attempts[key] = self.metrics.attempts.labels(*key)
        self._add(child, 1)
        if trace.attempts_count > 1:
            self.metrics.retries.labels(model).inc()

    def _count_tokens(self, series: _Series, model: str, trace: Trace) -> None:
        usage = trace.usage
        assert usage is not None
        if usage.uncached_input_tokens:
            self._add(series.uncached, usage.uncached_input_tokens)
        if usage.cached_input_tokens:
            self._add(series.cached, usage.cached_input_tokens)
        output = usage.output_tokens
        if output:
            self._add(series.output, output)
        if usage.estimated:
            self.metrics.estimated.labels(model).inc()
        if trace.first_token_s is not None:
            self._observe(series.ttft, trace.first_token_s)
            if output is not None and output > 1 and trace.outcome == "completed":
                self._observe(series.tpot, (trace.duration_s - trace.first_token_s) / (output - 1))

    def _write(self, call: Call, trace: Trace) -> None:
        usage = trace.usage
        line = orjson.dumps(
            {
                "received_ns": call.received_ns,
                "request_id": call.request_id,
                "org": call.principal.org_id,
                "project": call.principal.project_id,
                "key": call.principal.key_id,
                "operation": call.request.operation.value,
                "model": call.request.model_asked,
                "stream": trace.stream,
                "status": trace.status,
                "outcome": trace.outcome,
                "reason": trace.reason or None,
                "endpoint": trace.endpoint_id,
                "attempts_count": trace.attempts_count,
                "ttft_s": trace.first_token_s,
                "duration_s": trace.duration_s,
                "uncached_input_tokens": None if usage is None else usage.uncached_input_tokens,
                "cached_input_tokens": None if usage is None else usage.cached_input_tokens,
                "output_tokens": None if usage is None else usage.output_tokens,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )
        self._lines.append(line)
        self._lines_bytes += len(line)
        if self._lines_bytes >= _LOG_BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand the buffered access lines to the writing thread. What it cannot take any more is dropped and counted."""
        if self._log is None or not self._lines:
            return
        data = b"".join(self._lines)
        self._lines, self._lines_bytes = [], 0
        try:
            self._log.put_nowait(data)
        except queue.Full:
            self.metrics.lost_log_bytes.inc(len(data))

    def tick(self, answering: Mapping[str, bool], gauges: Mapping[str, float | None]) -> None:
        """Write what has gathered: counts, the states of stores, gauges (None is left out), access lines."""
        counts, self._counts = self._counts, {}
        for child, count in counts.items():
            child.inc(count)
        observed, self._observed = self._observed, {}
        for histogram, values in observed.items():
            histogram.observe_all(values)
        self.metrics.in_flight.set(self._in_flight_count)
        for store, answers in answering.items():
            self.metrics.health.labels(store).set(answers)
        for name, value in gauges.items():
            if value is not None:
                self.metrics.gauges.labels(name).set(value)
        self.flush()

    def close(self) -> None:
        """Write the last counts and lines; waits for a log that is slow, but not for long."""
        self.tick({}, {})
        if self._log is not None:
            until_s = time.monotonic() + _LOG_CLOSE_S
            while not self._log.empty() and time.monotonic() < until_s:
                time.sleep(0.005)

    def render(self) -> bytes:
        """The node's metrics in Prometheus text format: the sum over its processes. Blocking: run it in a thread.

        Gauges of processes that have died are dropped; their counters stay, for they were counted.
        """
        for file in self._dir.glob("gauge_live*_*.db"):
            pid = int(file.stem.rpartition("_")[2])
            if not psutil.pid_exists(pid):
                multiprocess.mark_process_dead(pid, path=str(self._dir))
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, path=str(self._dir))
        return generate_latest(registry)


def _open_log(target: str) -> queue.Queue[bytes] | None:
    """Where access lines go: a thread of its own writes them, so that a full pipe never holds up a request."""
    if not target:
        return None
    file: IO[bytes] = sys.stdout.buffer if target == "-" else Path(target).open("ab")  # noqa: SIM115 - as long as we live
    lines: queue.Queue[bytes] = queue.Queue(_LOG_QUEUE_COUNT)

    def write() -> None:
        while True:
            data = lines.get()
            try:
                file.write(data)
                file.flush()
            except OSError as error:
                sys.stderr.write(f"access log: {error.strerror}; {len(data)} bytes dropped\n")

    threading.Thread(target=write, name="access-log", daemon=True).start()
    return lines
