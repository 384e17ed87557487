"""How a row of a benchmark table becomes a configuration, and what is assumed where the row says nothing.

Owns: the reading of one row's input columns and the documented rules that fill the gaps; each rule that fires is named
in `Configuration.assumed`, its value in `Configuration.imputed`. Does not own: the catalogue (device and model are
handed in), files, or predictions. The measured columns, `exclude` and `note` are never read.

Rules, by the name that `assumed` shows:
  model_facts     -               (a device or model without facts is refused, not assumed)
  compute         a device without compute figures takes those of the named device of the same die or generation
  weight_dtype    the checkpoint's own format; FP8 in MLPerf before 2026 where the submitter says nothing
  kv_dtype        FP8 with weights of at most 8 bits on Blackwell and CDNA4, and on TensorRT-LLM anywhere; else BF16
  n_gpus          tp x pp x dp, or as many devices as hold the weights
  tp              the fewest devices, a power of two, whose memory is at most 60 % full of weights; above 300 billion
                  parameters with experts in MLPerf: attention data parallelism over up to 8 devices (dp and ep too)
  isl, osl        the benchmark's data set (MLPerf), else 1,024 and 256
  concurrency     in flight by Little's law where a rate is given; the decode slots of a disaggregated layout; else as
                  many as fit
  slots           gpt-oss on vLLM and H100 by InferenceX in 2025, 512 clients: its script sent ten prompts for each
                  sequence that the engine was started with (4 to 64 in its sweep, 16 assumed) through 512 clients
  layout          a disaggregated row without its workers' layout: one worker a side
  prefix_hit      0.9 of prompt tokens in agentic rows that do not say
  scenario        a name that is not known, or none: `other`
  memory          (nothing imputed) the weights alone are larger than the marketed memory of the devices of an engine
  max_context     (nothing imputed) prompt and answer together are longer than the model's context
  tp_divides      a tensor parallel size that does not divide the heads is lowered to one that does
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from perfmodel.architecture import Architecture
from perfmodel.benchmarks import DEFAULT_MLPERF_DATA_SET, MLPERF_DATA_SETS
from perfmodel.coefficients import Group
from perfmodel.configuration import Configuration, Pool, Scenario
from perfmodel.errors import ConfigError
from perfmodel.groups import EngineEra, engine_era, model_family
from perfmodel.hardware import Hardware, NumberFormat
from perfmodel.memory import EngineShape, checkpoint_bytes, weight_bytes
from perfmodel.serving import LengthLaw, Lengths
from perfmodel.step_terms import across_nodes, format_class

# Share of a device's memory that weights may fill where the tensor parallel size is not given.
_WEIGHT_FILL_RATIO = 0.6

# Experts models above this size run attention data parallel in MLPerf submissions.
_DATA_PARALLEL_PARAMETERS = 300e9

# Devices of one node.
_NODE_DEVICES = 8

# Lengths where neither the row nor a benchmark says any: InferenceX's commonest prompt, a short answer.
_DEFAULT_INPUT_TOKENS = 1_024.0
_DEFAULT_OUTPUT_TOKENS = 256.0

# Prompt tokens found in the cache in agentic rows that do not say: turns repeat their history.
_AGENTIC_HIT_RATIO = 0.9

# Generations on which every engine's recipes store the cache in FP8 beside narrow weights.
_NARROW_CACHE_GENERATIONS = frozenset({"blackwell", "cdna4"})

# InferenceX's script for gpt-oss on vLLM and H100 of autumn 2025 started the engine for `$CONC` sequences
# (`--max-num-seqs=$CONC`), sent `10 * $CONC` prompts, and let a fixed 512 clients send them (`--max-concurrency 512`;
# benchmarks/gptoss_fp4_h100*.sh of SemiAnalysisAI/InferenceX). Tables of its results name the 512. Later versions send
# with `$CONC` clients. The sweep went from 4 to 64; its middle stands for what the table does not say.
_FIXED_CLIENTS = 512
_FIXED_CLIENT_HALVES = frozenset({"2025a", "2025b"})
_SWEEP_MIDDLE = 16

# Agentic answers and prompts vary; harnesses with measured means are as regular as their nominal ones.
_DISAGGREGATED = "disagg(prefill_gpus/decode_gpus or blank)"
_WORKERS = re.compile(r"(\d+)x\(([^)]*)\)")
_PART = re.compile(r"([a-z_]+)(\d+)$")


@dataclass(frozen=True, slots=True)
class Worker:
    """One kind of worker of a disaggregated layout: `count` of them; sizes as `1x(tp4,dp1,moe_tp4,ep1,bs2)` says.

    `batch`: sequences of one rank; 0 where the layout does not say.
    """

    count: int
    tensor: int = 1
    data: int = 1
    expert: int = 1
    batch: int = 0


def parse_layout(text: str) -> tuple[Worker, ...]:
    """The workers of a layout column."""
    workers = []
    for count, body in _WORKERS.findall(text):
        sizes = {found[1]: int(found[2]) for part in body.split(",") if (found := _PART.match(part.strip()))}
        tensor, data, expert = (max(1, sizes.get(name, 1)) for name in ("tp", "dp", "ep"))
        workers.append(Worker(int(count), tensor, data, expert, sizes.get("bs", 0)))
    return tuple(workers)


def number(row: Mapping[str, str], column: str) -> float | None:
    """A column's number; None where it is blank, no number, or not finite."""
    try:
        value = float(row.get(column) or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# What a row may ask for at most: twice the longest context on sale, and more clients and devices than any benchmark
# has. A replay of more would take minutes.
_MOST = {
    "isl": 4_000_000,
    "osl": 4_000_000,
    "concurrency_or_batch": 32_768,
    "request_rate": 1_000_000,
    **dict.fromkeys(("n_gpus", "tp", "pp", "dp", "ep"), 10_000),
}


def stated(row: Mapping[str, str], column: str, least: float = 0.0) -> float | None:
    """A column's number above 0, at least `least` and no more than can be; None where it is blank or no number. Raises
    ConfigError."""
    text = (row.get(column) or "").strip()
    try:
        value = float(text)
    except ValueError:
        return None
    if not (0 < value <= _MOST[column] and value >= least):
        expected = f"at least {least:g}" if least else "above 0"
        expected += f" and at most {_MOST[column]:,}"
        raise ConfigError(f"{column} is {text!r}; expected a finite number {expected}, or blank where it is not known")
    return value


def configuration(
    row: Mapping[str, str],
    hardware: Hardware,
    architecture: Architecture,
    assumed: Mapping[str, str] | None = None,
) -> Configuration:
    """The configuration that a row describes; `assumed` holds the caller's own rules and values. Raises ConfigError."""
    return _Reader(row, hardware, architecture, dict(assumed or {})).read()


class _Reader:
    """Reads one row. Mutable: it collects the names of the rules that fired."""

    def __init__(
        self, row: Mapping[str, str], hardware: Hardware, architecture: Architecture, assumed: dict[str, str]
    ) -> None:
        # Rules that fired, in order, with their value ("" where nothing was imputed).
        self.row, self.hardware, self.architecture, self.assumed = row, hardware, architecture, assumed
        text = self._text("scenario")
        self.scenario = Scenario(text) if text in tuple(Scenario) else Scenario.OTHER
        if text != self.scenario:
            self.assumed["scenario"] = self.scenario.value
        self.mlperf = text.startswith("mlperf")

    def read(self) -> Configuration:
        engine = self._text("engine")
        era = engine_era(engine, self._text("engine_version"), self._text("date"))
        weights = self._weights()
        kv_format = self._kv(engine, weights)
        lengths = self._lengths()
        if self._text(_DISAGGREGATED):
            prefill, decode = self._split_pools(weights, kv_format)
        else:
            prefill, decode = None, self._one_pool(weights, kv_format)
        group = Group(
            era,
            self.hardware.generation,
            model_family(self.architecture.name),
            format_class(self.hardware, weights),
        )
        concurrency, rate = stated(self.row, "concurrency_or_batch"), number(self.row, "request_rate")
        if rate is not None:  # "inf" is none: all at once
            rate = stated(self.row, "request_rate", 1e-6)
        if self.scenario is Scenario.SINGLE_USER and concurrency is None:
            concurrency = 1.0
        if concurrency is None and self.scenario is Scenario.FIRST_TOKEN:
            concurrency = 1.0
        if concurrency is None and rate is None and prefill is not None:
            concurrency = self._slots()
        if concurrency is None:
            self.assumed["concurrency"] = ""  # how many fit or are in flight is the prediction's to say
        slots = self._fixed_slots(era, concurrency)
        if any(_overfull(pool) for pool in (prefill, decode) if pool is not None):
            self.assumed["memory"] = ""
        return Configuration(
            decode=decode,
            group=group,
            lengths=lengths,
            scenario=self.scenario,
            concurrency=concurrency,
            rate_per_s=rate,
            prefill=prefill,
            slot_count=slots,
            assumed=tuple(self.assumed),
            imputed=tuple((name, value) for name, value in self.assumed.items() if value),
        )

    def _text(self, column: str) -> str:
        return (self.row.get(column) or "").strip()

    def _weights(self) -> NumberFormat:
        text = self._text("weight_dtype")
        native = self.architecture.native_format
        try:
            said = NumberFormat.parse(text) if text else None
        except ConfigError:
            said = None
        own = NumberFormat.parse(native) if native else NumberFormat.BF16
        if said is not None:
            # A checkpoint that exists in one width only is that width, whatever an import wrote (gpt-oss is MXFP4).
            narrow_only = self.architecture.dense_format is not None and own in (NumberFormat.FP4, NumberFormat.INT4)
            return own if narrow_only and said is not NumberFormat.BF16 else said
        imputed = NumberFormat.FP8 if self.mlperf and own is NumberFormat.BF16 else own
        self.assumed["weight_dtype"] = imputed.value
        return imputed

    def _kv(self, engine: str, weights: NumberFormat) -> NumberFormat:
        text = self._text("kv_dtype")
        if text:
            try:
                return NumberFormat.parse(text)
            except ConfigError:
                pass
        narrow = weights.element_bytes <= 1
        wide_cache = engine != "trtllm" and self.hardware.generation not in _NARROW_CACHE_GENERATIONS
        imputed = NumberFormat.FP8 if narrow and not wide_cache else NumberFormat.BF16
        self.assumed["kv_dtype"] = imputed.value
        return imputed

    def _lengths(self) -> Lengths:
        inputs, outputs = stated(self.row, "isl"), stated(self.row, "osl")
        known = MLPERF_DATA_SETS.get(self.architecture.name, DEFAULT_MLPERF_DATA_SET) if self.mlperf else None
        if inputs is None:
            inputs = _DEFAULT_INPUT_TOKENS if known is None else known.input_tokens
            self.assumed["isl"] = f"{inputs:.0f}"
        if outputs is None:
            outputs = _DEFAULT_OUTPUT_TOKENS if known is None else known.output_tokens
            self.assumed["osl"] = f"{outputs:.0f}"
        longest = self.architecture.max_context_tokens
        if longest is not None and inputs + outputs > longest:
            self.assumed["max_context"] = ""
        hit = number(self.row, "prefix_hit_ratio")
        if hit is None and self.scenario is Scenario.AGENTIC:
            hit = _AGENTIC_HIT_RATIO
            self.assumed["prefix_hit"] = f"{hit:g}"
        cached = min(max(hit or 0.0, 0.0), 1.0)
        law = self._text("lengths")
        inputs, outputs = max(inputs, 1.0), max(outputs, 1.0)
        # InferenceX draws from U[0.8, 1] of the nominal tokens whether or not an export says so.
        drawn = not law and "inferencex" in self._text("source").lower() and self.scenario is Scenario.CLOSED_LOOP
        if law == LengthLaw.UNIFORM_08_10 or drawn:
            return Lengths.of_nominal(inputs, outputs, cached_ratio=cached)
        if law == "measured_mean" and self.scenario is Scenario.CLOSED_LOOP:
            return Lengths(inputs, outputs, LengthLaw.UNIFORM_08_10, cached)
        varied = law == "sharegpt" or self.mlperf or self.scenario in (Scenario.AGENTIC, Scenario.OTHER)
        return Lengths(inputs, outputs, LengthLaw.LOGNORMAL if varied else LengthLaw.FIXED, cached)

    def _one_pool(self, weights: NumberFormat, kv_format: NumberFormat) -> Pool:
        count, tensor = stated(self.row, "n_gpus", 1.0), stated(self.row, "tp", 1.0)
        stages, data, expert = (int(stated(self.row, column, 1.0) or 1) for column in ("pp", "dp", "ep"))
        if tensor is None:
            said = (data, expert)
            tensor, data, expert = self._imputed_parallelism(weights, count, data, expert)
            self.assumed["tp"] = f"{tensor:.0f}"
            if (data, expert) != said:
                self.assumed["dp"], self.assumed["ep"] = f"{data}", f"{expert}"
        if count is None:
            count = tensor * data * stages
            self.assumed["n_gpus"] = f"{count:.0f}"
        replicas = max(1.0, count / (tensor * data * stages))
        return self._pool(Worker(1, int(tensor), data, expert), weights, kv_format, replicas, stages)

    def _imputed_parallelism(
        self, weights: NumberFormat, count: float | None, data: int, expert: int
    ) -> tuple[int, int, int]:
        """(tensor, data, expert) where the row gives no tensor parallel size."""
        one = EngineShape(self.hardware, self.architecture, 1, weights)
        wanted = checkpoint_bytes(one) / (_WEIGHT_FILL_RATIO * self.hardware.memory_bytes)
        most = count if count is not None else 2.0**20
        if (
            self.mlperf
            and self.architecture.experts_total
            and self.architecture.parameter_count > _DATA_PARALLEL_PARAMETERS
        ):
            groups = int(min(most, _NODE_DEVICES))
            return 1, max(1, groups), max(1, groups)
        tensor = 1
        while tensor < wanted and 2 * tensor * data <= most:
            tensor *= 2
        return tensor, data, expert

    def _split_pools(self, weights: NumberFormat, kv_format: NumberFormat) -> tuple[Pool, Pool]:
        prefill, decode = parse_layout(self._text("prefill_layout")), parse_layout(self._text("decode_layout"))
        if not prefill or not decode:
            sizes = [int(part) for part in re.findall(r"\d+", self._text(_DISAGGREGATED))]
            first, second = (*sizes, 1, 1)[:2] if len(sizes) != 1 else (sizes[0], sizes[0])
            prefill = prefill or (self._side(first),)
            decode = decode or (self._side(second),)
            self.assumed["layout"] = "/".join(f"tp{side[0].tensor}dp{side[0].data}" for side in (prefill, decode))
        return tuple(
            self._pool(side[0], weights, kv_format, float(sum(worker.count for worker in side)), 1)
            for side in (prefill, decode)
        )  # type: ignore[return-value]  # two pools from a tuple of two

    def _fixed_slots(self, era: EngineEra, concurrency: float | None) -> int | None:
        """Sequences of an engine whose harness sent all prompts at once; None where the clients are the concurrency."""
        fixed = (
            concurrency == _FIXED_CLIENTS
            and self.scenario is Scenario.CLOSED_LOOP
            and era.engine == "vllm"
            and era.half in _FIXED_CLIENT_HALVES
            and model_family(self.architecture.name) == "gpt-oss"
            and self.hardware.name.startswith("H100-SXM")
            and self._text("lengths") == LengthLaw.UNIFORM_08_10
        )
        if not fixed:
            return None
        self.assumed["slots"] = f"{_SWEEP_MIDDLE}"
        return _SWEEP_MIDDLE

    def _slots(self) -> float | None:
        """Sequences that the decode workers of a layout take, for which its clients were counted out."""
        slots = sum(worker.count * worker.data * worker.batch for worker in parse_layout(self._text("decode_layout")))
        if not slots:
            return None
        self.assumed["concurrency"] = f"{slots}"
        return float(slots)

    def _side(self, devices: int) -> Worker:
        """One worker on so many devices: tensor parallel up to a node, data parallel above."""
        devices = max(1, devices)
        tensor = min(devices, _NODE_DEVICES)
        return Worker(1, tensor, max(1, devices // tensor), 1)

    def _pool(
        self, worker: Worker, weights: NumberFormat, kv_format: NumberFormat, replicas: float, stages: int
    ) -> Pool:
        heads = self.architecture.head_count
        tensor = worker.tensor
        if heads % tensor:
            tensor = max(size for size in range(1, tensor + 1) if heads % size == 0)
            self.assumed["tp_divides"] = f"{tensor}"
        device = across_nodes(self.hardware, tensor)
        group = tensor * worker.data
        experts = math.gcd(worker.expert, group) if self.architecture.moe_layer_count else 1
        shape = EngineShape(
            hardware=device,
            architecture=self.architecture,
            tensor_parallel_count=tensor,
            weight_format=weights,
            kv_format=kv_format,
            pipeline_parallel_count=min(stages, self.architecture.layer_count),
            data_parallel_count=worker.data,
            expert_parallel_count=max(1, experts),
        )
        return Pool(shape, replicas, spans_nodes=device is not self.hardware)


def _overfull(pool: Pool) -> bool:
    """Whether the weights alone are larger than the marketed memory of an engine's devices."""
    shape = pool.shape
    return weight_bytes(shape) > shape.device_count * shape.hardware.memory_marketed_bytes


def with_compute(hardware: Hardware, twin: Hardware) -> Hardware:
    """`hardware` with the compute figures that it lacks taken from `twin`, and its link where that is unknown too."""
    return replace(
        hardware,
        bf16_flop_per_s=hardware.bf16_flop_per_s or twin.bf16_flop_per_s,
        fp8_flop_per_s=hardware.fp8_flop_per_s or twin.fp8_flop_per_s,
        fp4_flop_per_s=hardware.fp4_flop_per_s or twin.fp4_flop_per_s,
    )
