"""The simulated engine's /metrics: vLLM 0.32's names, labels and buckets, from what the core really did.

Owns: the histograms, the counters that the core does not keep, and the Prometheus text. Does not own: the gauges and
counters of the core (`scheduler.EngineStats`), which are read when somebody asks.
Times are the model's: at `--speed 1` they are real seconds, at another speed they are what the engine would report.
Series that name something the simulation has none of (other cache tiers, multi-modal input) are present and zero.
Series of vLLM that are missing: `vllm:estimated_*`, and the web framework's `http_*` and `python_*`. Added:
`inferplane_sim:*`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from perfmodel.adapters.engine_wire import Generation
from perfmodel.scheduler import EngineStats, Finished, FinishReason, StepOutcome

# vLLM 0.32's buckets, read off its recorded /metrics at a context of 2,048 tokens.
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
# How late steps are delivered, in real seconds: event loops keep time in milliseconds.
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

# Series that the simulation can never count: name -> (extra labels' values, what it is).
_NEVER_COUNTED = {
    "vllm:mm_cache_queries": "Multi-modal cache queries, in items.",
    "vllm:mm_cache_hits": "Multi-modal cache hits, in items.",
}


def _round_buckets(max_tokens: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the longest sequence, as vLLM builds its token buckets."""
    bounds: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_tokens:
                return tuple(bounds)
            bounds.append(step * scale)
        scale *= 10


class Histogram:
    """Counts per bucket, sum and count of one histogram."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Values counted so far."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(upper bound, values up to it), the last bound being +Inf."""
        bounds = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        return zip(bounds, accumulate(self._counts), strict=True)


@dataclass(frozen=True, slots=True)
class MetricsFacts:
    """What never changes: labels, the cache's shape, the start in Unix seconds and the clock's speed."""

    model: str
    max_model_tokens: int
    block_count: int
    block_size_tokens: int
    started_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is read off the server when somebody asks."""

    stats: EngineStats
    ending_count: int
    lag_s: float
    open_connection_count: int
    slow_reader_count: int


class EngineMetrics:
    """Counts what the clock delivers (`engine_clock.StepObserver`) and writes the text."""

    def __init__(self, facts: MetricsFacts) -> None:
        tokens = _round_buckets(facts.max_model_tokens)
        self._facts = facts
        # The process's CPU, memory and files, read when somebody asks.
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._rejected = 0
        self._finished: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self.ttft = Histogram(_TTFT_S)
        self.itl = Histogram(_ITL_S)
        self.e2e = Histogram(_REQUEST_S)
        self._tpot = Histogram(_ITL_S)
        self._queue = Histogram(_REQUEST_S)
        self._inference = Histogram(_REQUEST_S)
        self._prefill = Histogram(_REQUEST_S)
        self._decode = Histogram(_REQUEST_S)
        self._iteration = Histogram(_ITERATION_TOKENS)
        self._prompt = Histogram(tokens)
        self._generation = Histogram(tokens)
        self._most_generation = Histogram(tokens)
        self._max_tokens = Histogram(tokens)
        self._computed = Histogram(tokens)
        self._choice_counts = Histogram(_CHOICES)
        self._preempted = Histogram(_PREEMPTIONS)
        self.lag = Histogram(_LAG_S)
        self.max_lag_s = 0.0

    def step(self, outcome: StepOutcome, lag_s: float) -> None:
        """One step was delivered `lag_s` after it was due."""
        self._iteration.observe(outcome.batch.token_count)
        lag_s = max(0.0, lag_s)
        self.lag.observe(lag_s)
        self.max_lag_s = max(self.max_lag_s, lag_s)
        itl = self.itl.observe
        for output in outcome.outputs:
            if output.position:
                itl(output.waited_s)
            else:
                self.ttft.observe(output.waited_s)
            if output.finished is not None:
                self.finished(output.finished)

    def finished(self, finished: Finished) -> None:
        """One choice ended."""
        self._finished[finished.reason] += 1
        self._prompt.observe(finished.prompt_tokens)
        self._generation.observe(finished.output_tokens)
        self._preempted.observe(finished.preemption_count)
        self.e2e.observe(finished.ended_at_s - finished.arrived_at_s)
        if finished.first_scheduled_at_s is None:
            return
        self._queue.observe(finished.first_scheduled_at_s - finished.arrived_at_s)
        self._inference.observe(finished.ended_at_s - finished.first_scheduled_at_s)
        if finished.first_token_at_s is None:
            return
        self._prefill.observe(finished.first_token_at_s - finished.first_scheduled_at_s)
        self._decode.observe(finished.ended_at_s - finished.first_token_at_s)
        self._computed.observe(finished.prompt_tokens - (finished.cached_tokens or 0))
        if finished.output_tokens > 1:
            self._tpot.observe((finished.ended_at_s - finished.first_token_at_s) / (finished.output_tokens - 1))

    def asked(self, call: Generation) -> None:
        """A request was accepted."""
        for max_tokens in call.max_tokens:
            self._choice_counts.observe(call.choice_count)
            self._max_tokens.observe(max_tokens)
            self._most_generation.observe(max_tokens)

    def rejected(self) -> None:
        """A request was refused because the queue is full."""
        self._rejected += 1

    def render(self, gauges: Gauges) -> bytes:
        """The Prometheus text (format 0.0.4)."""
        page = _Page(self._facts)
        self._write_gauges(page, gauges)
        self._write_counters(page, gauges.stats)
        self._write_histograms(page)
        self._write_own(page, gauges)
        return page.text() + generate_latest(self._process)

    def _write_gauges(self, page: _Page, gauges: Gauges) -> None:
        stats = gauges.stats
        page.gauge(
            "vllm:num_requests_running",
            "Requests in the running batch.",
            [({}, stats.running_count + gauges.ending_count)],
        )
        page.gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", [({}, stats.waiting_count)])
        waiting = [({"reason": "capacity"}, stats.waiting_count), ({"reason": "deferred"}, 0)]
        page.gauge("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", waiting)
        states = [
            ({"sleep_state": name}, float(name == "awake")) for name in ("awake", "weights_offloaded", "discard_all")
        ]
        page.gauge("vllm:engine_sleep_state", "1 for the state the engine is in.", states)
        page.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use (1 is all).", [({}, stats.kv_usage_ratio)])
        config = [(self._cache_config(), 1)]
        page.gauge("vllm:cache_config_info", "The cache's configuration, as labels.", config, model=False)

    def _cache_config(self) -> dict[str, str]:
        facts = self._facts
        return {
            "block_size": str(facts.block_size_tokens),
            "cache_dtype": "auto",
            "effective_attention_block_size": str(facts.block_size_tokens),
            "enable_prefix_caching": "True",
            "is_attention_free": "False",
            "kv_cache_size_tokens": str(facts.block_count * facts.block_size_tokens),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(facts.block_count),
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": "None",
        }

    def _write_counters(self, page: _Page, stats: EngineStats) -> None:
        computed = stats.prompt_tokens - stats.cached_prompt_tokens
        on_device = stats.cached_prompt_tokens - stats.restored_prompt_tokens
        hits, queries = stats.prefix_cache_hits_tokens, stats.prefix_cache_queries_tokens
        page.counter("vllm:prefix_cache_queries", "Prefix cache queries, in tokens.", [({}, queries)])
        page.counter("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", [({}, hits)])
        asked, found = stats.external_queries_tokens, stats.external_hits_tokens
        page.counter("vllm:external_prefix_cache_queries", "Queries to the lower tier, in tokens.", [({}, asked)])
        page.counter("vllm:external_prefix_cache_hits", "Hits in the lower tier, in tokens.", [({}, found)])
        for name, about in _NEVER_COUNTED.items():
            page.counter(name, about, [({}, 0)])
        page.counter("vllm:num_preemptions", "Preemptions.", [({}, stats.preemption_count)])
        page.counter("vllm:prompt_tokens", "Prompt tokens processed.", [({}, stats.prompt_tokens)])
        by_source = {
            "local_compute": computed,
            "local_cache_hit": on_device,
            "external_kv_transfer": stats.restored_prompt_tokens,
        }
        page.counter("vllm:prompt_tokens_by_source", "Prompt tokens by source.", _labelled("source", by_source))
        page.counter("vllm:prompt_tokens_cached", "Cached prompt tokens.", [({}, stats.cached_prompt_tokens)])
        tiers = dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), 0)
        tiers["device"], tiers["host"] = on_device, stats.restored_prompt_tokens
        page.counter("vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by tier.", _labelled("source", tiers))
        page.counter("vllm:generation_tokens", "Tokens generated.", [({}, stats.generation_tokens)])
        ended = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        ended.update({reason.value: count for reason, count in self._finished.items()})
        page.counter("vllm:request_success", "Requests that ended, by reason.", _labelled("finished_reason", ended))
        rejected = {"max_num_queued_reqs": self._rejected, "max_num_queued_tokens": 0}
        page.counter(
            "vllm:admission_rejections",
            "Requests refused by a queue limit, by reason.",
            _labelled("reason", rejected),
            engine=False,
        )

    def _write_histograms(self, page: _Page) -> None:
        for name, about, histogram in (
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", self._prompt),
            ("vllm:request_generation_tokens", "Tokens generated for a request.", self._generation),
            ("vllm:iteration_tokens_total", "Tokens computed in one step.", self._iteration),
            ("vllm:request_max_num_generation_tokens", "Most tokens asked for by a choice.", self._most_generation),
            ("vllm:request_params_n", "The request parameter n.", self._choice_counts),
            ("vllm:request_params_max_tokens", "The request parameter max_tokens.", self._max_tokens),
            ("vllm:time_to_first_token_seconds", "Time to the first token.", self.ttft),
            ("vllm:inter_token_latency_seconds", "Time between two tokens.", self.itl),
            ("vllm:request_time_per_output_token_seconds", "Mean time per token of a request.", self._tpot),
            ("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", self.e2e),
            ("vllm:request_queue_time_seconds", "Time waiting to be scheduled.", self._queue),
            ("vllm:request_inference_time_seconds", "Time from first scheduled to the end.", self._inference),
            ("vllm:request_prefill_time_seconds", "Time from first scheduled to the first token.", self._prefill),
            ("vllm:request_decode_time_seconds", "Time from the first token to the last.", self._decode),
            ("vllm:request_num_preemptions", "Preemptions of a request.", self._preempted),
            ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", self._computed),
        ):
            page.histogram(name, about, histogram)

    def _write_own(self, page: _Page, gauges: Gauges) -> None:
        page.gauge("inferplane_sim:speed_ratio", "Model seconds per real second.", [({}, self._facts.speed)])
        page.gauge("inferplane_sim:clock_lag_now_seconds", "How overdue the next delivery is.", [({}, gauges.lag_s)])
        page.gauge("inferplane_sim:clock_lag_max_seconds", "Latest delivery of a step so far.", [({}, self.max_lag_s)])
        page.gauge("inferplane_sim:connections", "Open HTTP connections.", [({}, gauges.open_connection_count)])
        page.gauge(
            "inferplane_sim:slow_readers",
            "Connections that do not take what is written.",
            [({}, gauges.slow_reader_count)],
        )
        page.gauge(
            "inferplane_sim:cached_block_hashes",
            "Distinct block hashes a prompt could hit.",
            [({}, gauges.stats.cached_block_hash_count)],
        )
        page.histogram("inferplane_sim:clock_lag_seconds", "Real time by which a step's tokens were late.", self.lag)


def _labelled(label: str, values: Mapping[str, float]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, value) for name, value in values.items()]


class _Page:
    """Prometheus text being written. Labels come in alphabetical order, as vLLM's do."""

    def __init__(self, facts: MetricsFacts) -> None:
        self._lines: list[str] = []
        self._started = facts.started_s
        self._model = facts.model

    def text(self) -> bytes:
        """The page."""
        return ("\n".join(self._lines) + "\n").encode()

    def gauge(
        self, name: str, about: str, samples: Iterable[tuple[dict[str, str], float]], *, model: bool = True
    ) -> None:
        """A gauge with its samples."""
        self._header(name, about, "gauge")
        for labels, value in samples:
            self._sample(name, self._labels(labels, model=model), value)

    def counter(
        self, name: str, about: str, samples: Sequence[tuple[dict[str, str], float]], *, engine: bool = True
    ) -> None:
        """A counter, and when it began to count."""
        self._header(f"{name}_total", about, "counter")
        for labels, value in samples:
            self._sample(f"{name}_total", self._labels(labels, engine=engine), value)
        self._header(f"{name}_created", about, "gauge")
        for labels, _ in samples:
            self._sample(f"{name}_created", self._labels(labels, engine=engine), self._started)

    def histogram(self, name: str, about: str, histogram: Histogram) -> None:
        """A histogram, and when it began to count."""
        self._header(name, about, "histogram")
        for bound, count in histogram.cumulative():
            self._sample(f"{name}_bucket", self._labels({"le": bound}), count)
        self._sample(f"{name}_count", self._labels({}), histogram.count)
        self._sample(f"{name}_sum", self._labels({}), histogram.sum)
        self._header(f"{name}_created", about, "gauge")
        self._sample(f"{name}_created", self._labels({}), self._started)

    def _header(self, name: str, about: str, kind: str) -> None:
        self._lines += (f"# HELP {name} {about}", f"# TYPE {name} {kind}")

    def _labels(self, labels: Mapping[str, str], *, engine: bool = True, model: bool = True) -> str:
        every = dict(labels)
        if engine:
            every["engine"] = "0"
        if model:
            every["model_name"] = self._model
        return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(every.items()))

    def _sample(self, name: str, labels: str, value: float) -> None:
        self._lines.append(f"{name}{{{labels}}} {float(value)!r}")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
