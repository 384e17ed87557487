"""Properties of calibrated step times on any catalogued model and device, each shown to fail on a planted fault.

What must hold is physics: more sequences, longer contexts and wider numbers never take less time; a longer prompt never
gets its first token sooner; no step beats its bytes over the bandwidth or its FLOPs over the peak; the table and the
model agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from perfmodel.adapters.catalog import load_catalog
from perfmodel.adapters.coefficient_file import load_coefficients
from perfmodel.hardware import NumberFormat
from perfmodel.memory import EngineShape
from perfmodel.step_time import BatchShape, StepModel, decode_batch, prefill_batch
from tests.exploring import examples

CATALOG = load_catalog()
FITTED = load_coefficients().coefficients
DEVICES = ("A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "MI300X", "GB300-NVL72")
MODELS = (
    "Llama-3.1-8B",
    "Llama-3.3-70B",
    "Qwen3-32B",
    "DeepSeek-R1",
    "gpt-oss-120b",
    "Gemma-3-27B",
    "Qwen3.5-397B-A17B",
)
# Full attention only: there the table is exact.
EXACT = ("Llama-3.1-8B", "Llama-3.3-70B", "Qwen3-32B", "DeepSeek-R1")


@dataclass(frozen=True)
class Case:
    shape: EngineShape
    engine: str
    count: int
    more: int
    context: int
    longer: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = CATALOG.model(draw(st.sampled_from(MODELS)))
    tensor = draw(st.sampled_from([size for size in (1, 2, 4, 8) if model.head_count % size == 0]))
    shape = EngineShape(
        CATALOG.device(draw(st.sampled_from(DEVICES))),
        model,
        tensor,
        draw(st.sampled_from((NumberFormat.BF16, NumberFormat.FP8, NumberFormat.FP4))),
        draw(st.sampled_from((NumberFormat.BF16, NumberFormat.FP8))),
    )
    small = st.integers(1, 300)
    return Case(
        shape,
        draw(st.sampled_from(("vllm", "sglang", "trtllm", "another"))),
        draw(small),
        draw(small),
        draw(st.integers(1, 40_000)),
        draw(st.integers(1, 40_000)),
    )


class Steps:
    """What is under test; faults are planted by overriding."""

    def model(self, shape: EngineShape, engine: str) -> StepModel:
        return StepModel(shape, FITTED, engine, "2025b")

    def decode_s(self, shape: EngineShape, engine: str, count: int, context: int) -> float:
        return self.model(shape, engine).step_s(decode_batch(count, context))

    def prefill_s(self, shape: EngineShape, engine: str, tokens: int) -> float:
        return self.model(shape, engine).step_s(prefill_batch(tokens))

    def table_s(self, shape: EngineShape, engine: str, batch: BatchShape) -> float:
        return self.model(shape, engine).table(batch.token_count).step_s(batch)


class BatchFree(Steps):
    """Fault: sequences beyond the first cost nothing."""

    def decode_s(self, shape: EngineShape, engine: str, count: int, context: int) -> float:
        return super().decode_s(shape, engine, 1, context) / count


class ContextFree(Steps):
    """Fault: a longer context is cheaper."""

    def decode_s(self, shape: EngineShape, engine: str, count: int, context: int) -> float:
        return super().decode_s(shape, engine, count, max(1, 80_001 - context))


class NarrowCosts(Steps):
    """Fault: narrow KV elements are read as if they were wide, and wide ones as if narrow."""

    def decode_s(self, shape: EngineShape, engine: str, count: int, context: int) -> float:
        swapped = NumberFormat.FP8 if shape.kv_format is NumberFormat.BF16 else NumberFormat.BF16
        return super().decode_s(replace(shape, kv_format=swapped), engine, count, context)


class ShortPromptSlow(Steps):
    """Fault: prompts above 8,192 tokens are computed as 8,192 in half the time."""

    def prefill_s(self, shape: EngineShape, engine: str, tokens: int) -> float:
        whole_s = super().prefill_s(shape, engine, min(tokens, 8192))
        return whole_s / 2 if tokens > 8192 else whole_s


class BeatsPhysics(Steps):
    """Fault: a step takes a third of what it should."""

    def decode_s(self, shape: EngineShape, engine: str, count: int, context: int) -> float:
        return super().decode_s(shape, engine, count, context) / 3


class OtherTable(Steps):
    """Fault: the table forgets the context of decodes."""

    def table_s(self, shape: EngineShape, engine: str, batch: BatchShape) -> float:
        return super().table_s(shape, engine, replace(batch, decode_context_tokens=0))


def more_sequences_take_longer(steps: Steps, case: Case) -> None:
    few = steps.decode_s(case.shape, case.engine, case.count, case.context)
    many = steps.decode_s(case.shape, case.engine, case.count + case.more, case.context)
    assert many >= few * (1 - 1e-9)


def longer_contexts_take_longer(steps: Steps, case: Case) -> None:
    short = steps.decode_s(case.shape, case.engine, case.count, case.context)
    long = steps.decode_s(case.shape, case.engine, case.count, case.context + case.longer)
    assert long >= short * (1 - 1e-9)


def wider_numbers_take_longer(steps: Steps, case: Case) -> None:
    narrow = replace(case.shape, kv_format=NumberFormat.FP8)
    wide = replace(case.shape, kv_format=NumberFormat.BF16)
    assert steps.decode_s(wide, case.engine, case.count, case.context) >= steps.decode_s(
        narrow, case.engine, case.count, case.context
    )


def longer_prompts_take_longer(steps: Steps, case: Case) -> None:
    short = steps.prefill_s(case.shape, case.engine, case.context)
    long = steps.prefill_s(case.shape, case.engine, case.context + case.longer)
    assert long >= short * (1 - 1e-9)


def physics_is_not_beaten(steps: Steps, case: Case) -> None:
    """Bytes of weights and cache over the bandwidth, and FLOPs over the peak, worked out here by hand."""
    shape, model = case.shape, case.shape.architecture
    devices, width = shape.tensor_parallel_count, shape.weight_format.element_bytes
    routed = model.moe_layer_count * model.expert_parameter_count
    read = width * (model.linear_parameter_count + routed * model.experts_hit(case.count))
    read += case.count * model.decode_read_elements(case.context) * shape.kv_format.element_bytes
    flop = case.count * (model.active_linear_flop_per_token + model.decode_attention_flop(case.context))
    fastest = max(
        figure
        for figure in (shape.hardware.bf16_flop_per_s, shape.hardware.fp8_flop_per_s, shape.hardware.fp4_flop_per_s)
        if figure is not None
    )
    least_s = max(read / shape.hardware.memory_bytes_per_s, flop / fastest) / devices
    assert steps.decode_s(case.shape, case.engine, case.count, case.context) >= least_s * (1 - 1e-9)


def table_and_model_agree(steps: Steps, case: Case) -> None:
    if case.shape.architecture.name not in EXACT:
        return
    batch = BatchShape(2, case.more, 2 * case.longer, case.more * case.longer, case.count, case.count * case.context)
    exact = steps.model(case.shape, case.engine).step_s(batch)
    assert steps.table_s(case.shape, case.engine, batch) == pytest.approx(exact, rel=1e-9)


PROPERTIES = {
    more_sequences_take_longer: BatchFree,
    longer_contexts_take_longer: ContextFree,
    wider_numbers_take_longer: NarrowCosts,
    longer_prompts_take_longer: ShortPromptSlow,
    physics_is_not_beaten: BeatsPhysics,
    table_and_model_agree: OtherTable,
}


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
def test_steps_obey(holds: object) -> None:
    @settings(max_examples=examples(60))
    @given(cases())
    def run(case: Case) -> None:
        holds(Steps(), case)  # type: ignore[operator]  # a function of the table above

    run()


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
def test_each_property_finds_its_fault(holds: object) -> None:
    fault = PROPERTIES[holds]()  # type: ignore[index]  # a function of the table above

    @settings(max_examples=300, derandomize=True, phases=[Phase.generate], database=None)
    @given(cases())
    def run(case: Case) -> None:
        holds(fault, case)  # type: ignore[operator]  # a function of the table above

    with pytest.raises(AssertionError):
        run()
