"""The command `inferplane perf kv`: how much memory weights and KV cache take, and on how many devices.

Owns: its options, its output and its plot. Does not own: the arithmetic (`memory`, `architecture`) or the figures
(`catalog`). Contract of the JSON: `kv_bytes_per_token` is what one more token adds at the context; `kv_bytes` what all
sequences hold, linear state included; `devices_for_kv` divides it by the marketed memory, `devices_by_memory` fits
weights and cache beside runtime and activations; `crossover_tokens` is where one sequence's KV reaches the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.adapters.perf_output import guard, show_json

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from perfmodel.adapters.catalog import Catalog
    from perfmodel.hardware import NumberFormat
    from perfmodel.memory import EngineShape

# The formats and the commonest of their other spellings (`hardware.NumberFormat.parse`).
_FORMATS = "bf16 (also fp16, auto), fp8 (fp8_e4m3), fp4 (nvfp4, mxfp4; 4.5 bits), int8 (w8a8), int4 (awq, gptq)"

# The plot's contexts: powers of two from 1 Ki tokens, with as many steps between as make the bends of windows visible.
_PLOT_FIRST_TOKENS, _PLOT_STEPS_PER_DOUBLING = 1024, 8


@dataclass(frozen=True, slots=True)
class KvAnswer:
    """What the command found. Devices are None without a device, the crossover where there is none."""

    kv_bytes_per_token: int
    kv_bytes: int
    weights_bytes: int
    devices_for_kv: int | None
    devices_by_memory: int | None
    crossover_tokens: int | None


def kv(
    *,
    model: Annotated[str, typer.Option(help="Model of the catalogue, or path of a Hugging Face config.json.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")],
    batch: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="Sequences held at once.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help=f"KV elements: {_FORMATS}.")] = "bf16",
    weight_dtype: Annotated[
        str | None,
        typer.Option(help=f"Weights: {_FORMATS}. Default: the published checkpoint's.", show_default=False),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Device of the catalogue to count.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw KV bytes over context to this .html or .png file.", show_default=False)
    ] = None,
) -> None:
    """Bytes of weights and KV cache, devices they need, and where a sequence's cache outgrows the weights."""
    from perfmodel.adapters.catalog import load_catalog

    with guard(), _options_named():
        if plot is not None:
            from perfmodel.adapters.plots import check_plot_path

            check_plot_path(plot)
        catalog = load_catalog()
        shape = _shape(catalog, model, kv_dtype, weight_dtype)
        answer = _answer(catalog, shape, gpu, context, batch)
        if plot is not None:
            from perfmodel.adapters.plots import write_plot

            write_plot(_figure(shape, answer, context), plot)
        if as_json:
            from dataclasses import asdict

            show_json(asdict(answer))
        else:
            groups = None
            if gpu is not None and answer.devices_by_memory is not None:
                groups = _tensor_groups(_on_device(catalog, shape, gpu)[0], answer.devices_by_memory, (context, batch))
            _show_table(shape, answer, (gpu, groups), (context, batch))


# How a sentence of the catalogue begins when a name is at fault -> the option that was typed.
_OPTION_OF = {"model is ": "--model is ", "device is ": "--gpu is ", "context_tokens is ": "--context is "}


@contextmanager
def _options_named() -> Iterator[None]:
    """Sentences about a name become sentences about the option that holds it."""
    from perfmodel.errors import ConfigError

    try:
        yield
    except ConfigError as fault:
        sentence = str(fault)
        for words, option in _OPTION_OF.items():
            if sentence.startswith(words):
                raise ConfigError(option + sentence.removeprefix(words)) from None
        raise


def _shape(catalog: Catalog, model: str, kv_dtype: str, weight_dtype: str | None) -> EngineShape:
    """The model on one device without any figure: only its bytes are asked for."""
    from perfmodel.errors import ConfigError
    from perfmodel.memory import EngineShape

    architecture = catalog.model(model)
    if weight_dtype is None:
        if architecture.native_format is None:
            raise ConfigError(
                f"the number format of {architecture.name}'s checkpoint is not known; expected --weight-dtype"
            )
        weight_dtype = architecture.native_format
    return EngineShape(
        hardware=next(iter(catalog.devices.values())),  # no byte of a model depends on the device
        architecture=architecture,
        weight_format=_format("--weight-dtype", weight_dtype),
        kv_format=_format("--kv-dtype", kv_dtype),
    )


def _format(option: str, text: str) -> NumberFormat:
    from perfmodel.errors import ConfigError
    from perfmodel.hardware import NumberFormat

    try:
        return NumberFormat.parse(text)
    except ConfigError as fault:
        raise ConfigError(str(fault).replace("number format is", f"{option} is", 1)) from None


def _answer(catalog: Catalog, shape: EngineShape, gpu: str | None, context: int, batch: int) -> KvAnswer:
    from perfmodel import memory

    held = batch * memory.kv_bytes(shape, context)
    for_kv = by_memory = None
    if gpu is not None:
        for_kv, by_memory = _devices(catalog, shape, gpu, (context, batch))
    return KvAnswer(
        kv_bytes_per_token=memory.kv_bytes_per_token(shape, context),
        kv_bytes=held,
        weights_bytes=memory.checkpoint_bytes(shape),
        devices_for_kv=for_kv,
        devices_by_memory=by_memory,
        crossover_tokens=memory.crossover_tokens(shape),
    )


def _devices(catalog: Catalog, shape: EngineShape, gpu: str, load: tuple[int, int]) -> tuple[int, int]:
    from perfmodel import memory

    context, batch = load
    one, marketed = _on_device(catalog, shape, gpu)
    for_kv = -(-batch * memory.kv_bytes(shape, context) // marketed)
    return for_kv, memory.device_count_by_memory(one, context, batch, max_batched_tokens=_batched_tokens(one, batch))


def _batched_tokens(one: EngineShape, batch: int) -> int:
    """Tokens of a step: SRAM chips hold a decode step's activations, never a prompt's."""
    from perfmodel import memory

    return batch if one.hardware.sram else memory.DEFAULT_MAX_BATCHED_TOKENS


def _tensor_groups(one: EngineShape, least: int, load: tuple[int, int]) -> int | None:
    """The fewest devices, at least `least`, that one tensor-parallel group can be and that hold the load; else None.

    Heads divide, the devices are linked, and KV heads that must be copied fit too.
    """
    from dataclasses import replace

    from perfmodel import memory

    context, batch = load
    heads, linked = one.architecture.head_count, one.hardware.scaleup_device_count
    most = heads if linked == 1 else min(heads, linked)  # 1: the size of the domain is not known
    tokens = _batched_tokens(one, batch)
    for count in range(least, most + 1):
        if heads % count:
            continue
        shape = replace(one, tensor_parallel_count=count)
        if memory.kv_budget_bytes_per_device(shape, max_batched_tokens=tokens) <= 0:
            continue
        if memory.largest_batch(shape, context, max_batched_tokens=tokens) >= batch:
            return count
    return None


def _on_device(catalog: Catalog, shape: EngineShape, gpu: str) -> tuple[EngineShape, int]:
    """The model on one device of this name, and the bytes that its vendor prints."""
    from dataclasses import replace

    from perfmodel.errors import ConfigError

    usable, marketed = catalog.device_memory_bytes(gpu)
    if usable is None or marketed is None:
        raise ConfigError(f"--gpu {catalog.device_name(gpu)}: its memory size is not known; nothing is guessed for it")
    hardware = replace(shape.hardware, name=catalog.device_name(gpu), memory_bytes=usable, sram=False)
    known = catalog.devices.get(hardware.name)
    return replace(shape, hardware=hardware if known is None else known), marketed


def _show_table(
    shape: EngineShape, answer: KvAnswer, devices: tuple[str | None, int | None], load: tuple[int, int]
) -> None:
    from rich.console import Console
    from rich.table import Table

    (gpu, groups), (context, batch) = devices, load
    table = Table(title=f"{shape.architecture.name}: {batch:,} x {context:,} tokens", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row(f"one more token ({shape.kv_format} KV)", f"{answer.kv_bytes_per_token / 1024:,.2f} KiB")
    table.add_row("KV cache", _size(answer.kv_bytes))
    if shape.architecture.linear_state_bytes:
        table.add_row("of which linear state", _size(batch * shape.architecture.linear_state_bytes))
    table.add_row(f"weights ({shape.weight_format})", _size(answer.weights_bytes))
    if gpu is not None:
        table.add_row(f"{gpu} for the KV cache alone", f"{answer.devices_for_kv:,}")
        table.add_row(f"{gpu} for weights, cache and runtime", f"{answer.devices_by_memory:,}")
        if groups is None:
            table.add_row(f"{gpu} as one tensor-parallel group", "none fits")
        elif groups != answer.devices_by_memory:
            table.add_row(f"{gpu} as one tensor-parallel group", f"{groups:,}")
    crossover = answer.crossover_tokens
    table.add_row(
        "KV of one sequence reaches the weights at", "never" if crossover is None else f"{crossover:,} tokens"
    )
    longest = shape.architecture.max_context_tokens
    if longest is not None and context > longest:
        table.add_row("context is above the model's maximum of", f"{longest:,} tokens")
    Console(soft_wrap=True).print(table)


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB ({count / 2**30:,.2f} GiB)"


def _figure(shape: EngineShape, answer: KvAnswer, context: int) -> Figure:
    """KV bytes of one sequence over its length in each KV format, the weights as a line, their crossing marked."""
    from dataclasses import replace

    from plotly.graph_objects import Figure, Scatter

    from perfmodel import memory
    from perfmodel.hardware import NumberFormat

    last = 2 * max(context, answer.crossover_tokens or 0, shape.architecture.max_context_tokens or 0)
    contexts = [_PLOT_FIRST_TOKENS]
    while contexts[-1] < last:
        contexts.append(int(_PLOT_FIRST_TOKENS * 2 ** (len(contexts) / _PLOT_STEPS_PER_DOUBLING)))
    figure = Figure()
    for kv_format in dict.fromkeys((shape.kv_format, NumberFormat.BF16, NumberFormat.FP8, NumberFormat.FP4)):
        sized = replace(shape, kv_format=kv_format)
        chosen = kv_format is shape.kv_format
        line = {"width": 3} if chosen else {"width": 1.5, "dash": "dot"}
        values = [memory.kv_bytes(sized, tokens) / 1e9 for tokens in contexts]
        figure.add_trace(Scatter(x=contexts, y=values, name=f"KV in {kv_format}", line=line))
    weights = answer.weights_bytes / 1e9
    name = f"weights in {shape.weight_format}: {weights:,.0f} GB"
    grey = {"color": "black", "dash": "dash"}
    figure.add_trace(Scatter(x=contexts, y=[weights] * len(contexts), mode="lines", name=name, line=grey))
    marks = [(f"asked: {context:,} tokens", context, memory.kv_bytes(shape, context) / 1e9, "circle")]
    if answer.crossover_tokens is not None:
        crossing = f"KV reaches the weights: {answer.crossover_tokens:,} tokens"
        marks.append((crossing, answer.crossover_tokens, weights, "diamond"))
    for label, tokens, size, symbol in marks:
        marker = {"size": 12, "symbol": symbol, "color": "crimson"}
        figure.add_trace(Scatter(x=[tokens], y=[size], mode="markers", marker=marker, name=label))
    figure.update_layout(
        title=f"{shape.architecture.name}: KV cache of one sequence",
        xaxis={"title": "context (tokens)", "type": "log"},
        yaxis={"title": "GB", "type": "log"},
        template="plotly_white",
        legend={"x": 0.98, "y": 0.02, "xanchor": "right", "yanchor": "bottom"},
    )
    return figure
