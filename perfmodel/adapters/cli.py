"""The commands of this package: `engine-sim`, a simulated vLLM engine on a port, and the group `perf`.

Owns: engine-sim's options, what it prints and its exit codes (0 after SIGTERM, 1 when the port is taken, 2 for a bad
value). Does not own: the server (`engine_server`) or the catalogue (`catalog`), imported when the command runs,
or the commands of `perf` (`perf_cli`).
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.adapters import perf_cli

if TYPE_CHECKING:
    from perfmodel.adapters.engine_server import ServerConfig
    from perfmodel.memory import EngineShape

# What is simulated when nothing is named: the model of the demo and of the documents.
_MODEL = "Llama-3.1-8B"

# Memory and bandwidth are told in powers of ten, as in data sheets.
_GB = 1e9

# Field of the cores -> the option that sets it.
_OPTION_OF = {
    "device": "--hardware",
    "tensor_parallel_count": "--tensor-parallel",
    "weight_format": "--dtype",
    "block_count": "--num-gpu-blocks-override",
    "block_size_tokens": "--block-size",
    "max_sequence_count": "--max-num-seqs",
    "max_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
    "max_waiting_count": "--max-waiting",
    "mean_tokens": "--output-mean-tokens",
    "slow_ratio": "--slow-ratio",
    "noise_ratio": "--step-noise",
    "speed": "--speed",
    "port": "--port",
}


def register(app: typer.Typer) -> None:
    """Add this package's commands to the root command."""
    app.command("engine-sim")(engine_sim)
    perf_cli.register(app)


@dataclass(frozen=True, slots=True)
class _Options:
    """The command line."""

    arch: str | None
    hardware: str
    tensor_parallel: int
    dtype: str
    model: str | None
    host: str
    port: int
    block_size: int
    num_gpu_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    max_waiting: int
    output_mean_tokens: float | None
    dram_gb: float | None
    dram_gb_per_s: float | None
    slow_ratio: float
    step_noise: float
    speed: float
    seed: int
    kv_events: bool
    kv_events_port: int
    kv_replay_port: int
    drain_s: float


def engine_sim(  # noqa: PLR0913 typer makes one option of each parameter
    *,
    arch: Annotated[
        str | None,
        typer.Option(
            help=f"Model of the catalogue that is simulated. Default: --model, else {_MODEL}.", show_default=False
        ),
    ] = None,
    hardware: Annotated[str, typer.Option(help="Device of the catalogue that it runs on.")] = "H100-SXM-80GB",
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    dtype: Annotated[str, typer.Option(help="Weights: bf16 or fp8.")] = "bf16",
    model: Annotated[
        str | None, typer.Option(help="Served name: with --arch any name, without it a model of the catalogue.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 16,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(help="KV blocks. Default: what fits beside the weights.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 8192,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens. Default: the model's, or what the cache holds.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Sequences that may wait; more are refused with 503.")] = 1024,
    output_mean_tokens: Annotated[
        float | None,
        typer.Option(help="Mean length of answers that nothing cuts; 0: answers end by their limit only."),
    ] = 256,
    dram_gb: Annotated[
        float | None,
        typer.Option(help="Lower KV tier that takes what is evicted, GB (10^9 bytes).", show_default=False),
    ] = None,
    dram_gb_per_s: Annotated[
        float | None,
        typer.Option(help="Bandwidth at which it gives KV back; needed beside --dram-gb.", show_default=False),
    ] = None,
    slow_ratio: Annotated[float, typer.Option(help="Factor on every step time, which nothing tells.")] = 1.0,
    step_noise: Annotated[float, typer.Option(help="Log-normal noise of a step's time, 0 to 1.")] = 0.0,
    speed: Annotated[float, typer.Option(help="Seconds of the model that pass in one real second.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides ids, answers and their lengths.")] = 0,
    kv_events: Annotated[bool, typer.Option("--kv-events/--no-kv-events", help="Publish KV events on ZMQ.")] = True,
    kv_events_port: Annotated[int, typer.Option(help="Port of the events; 0 takes a free one.")] = 0,
    kv_replay_port: Annotated[int, typer.Option(help="Port of the replay socket; 0 takes a free one.")] = 0,
    drain_s: Annotated[float, typer.Option(help="Seconds that running requests get after SIGTERM.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it listens as one JSON line.")] = False,
) -> None:
    """Run a simulated engine that speaks vLLM's HTTP API, metrics and KV events."""
    options = _Options(
        arch, hardware, tensor_parallel, dtype, model, host, port, block_size, num_gpu_blocks_override, max_num_seqs,
        max_num_batched_tokens, max_model_len, max_waiting, output_mean_tokens or None, dram_gb, dram_gb_per_s,
        slow_ratio, step_noise, speed, seed, kv_events, kv_events_port, kv_replay_port, drain_s,
    )  # fmt: skip
    _run(options, as_json)


def _run(options: _Options, as_json: bool) -> None:
    """Serve until a signal; a fault is one sentence and its exit code."""
    from perfmodel.errors import ConfigError, PortError

    try:
        _check_host(options.host)
        shape, config = _configured(options)
        _serve(shape, config, as_json)
    except ConfigError as fault:
        typer.echo(f"engine-sim: {_as_typed(str(fault), options)}", err=True)
        raise typer.Exit(2) from None
    except PortError as fault:
        typer.echo(f"engine-sim: {fault}", err=True)
        raise typer.Exit(1) from None
    except OSError as fault:
        trouble = _port_trouble(fault)
        typer.echo(f"engine-sim: port {options.port} on {options.host} cannot be used: {trouble}", err=True)
        raise typer.Exit(1) from None


def _port_trouble(fault: OSError) -> str:
    reason = os.strerror(fault.errno) if fault.errno else str(fault)
    return f"{reason}. Stop what listens there, or name another port with --port."


def _as_typed(sentence: str, options: _Options) -> str:
    """The sentence of a ConfigError about the option that was typed, not about the field that it became."""
    field, said, rest = sentence.partition(" is ")
    if field == "model":
        option: str | None = "--arch" if options.arch else "--model"
    else:
        option = _OPTION_OF.get(field)
    return sentence if option is None else f"{option}{said}{rest}"


def _check_host(host: str) -> None:
    """Raises ConfigError for what is no address, PortError for an address of another machine."""
    from perfmodel.errors import ConfigError, PortError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind((host, 0))
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host is {host!r}; expected an address of this machine") from None
    except OSError as fault:
        if fault.errno == errno.EADDRNOTAVAIL:
            raise PortError(f"host {host} cannot be used: it is no address of this machine") from None


def _configured(options: _Options) -> tuple[EngineShape, ServerConfig]:
    """The engine and its server. Raises ConfigError."""
    from perfmodel.adapters.engine_clock import ClockConfig
    from perfmodel.adapters.engine_server import ServerConfig
    from perfmodel.adapters.kv_publisher import PublisherConfig
    from perfmodel.memory import kv_bytes, kv_capacity_tokens
    from perfmodel.scheduler import EngineConfig
    from perfmodel.workload import OutputLaw

    _check_numbers(options)
    shape = _simulated(options)
    blocks = options.num_gpu_blocks
    if blocks is None:
        blocks = kv_capacity_tokens(shape, max_batched_tokens=options.max_num_batched_tokens) // options.block_size
    longest = options.max_model_len
    if longest is None:
        held = (blocks - 1) * options.block_size
        longest = min(shape.architecture.max_context_tokens or held, held)
    served = options.model or options.arch or _MODEL
    block_bytes = kv_bytes(shape, longest) * options.block_size / longest
    tier_bytes, restore_bytes_per_s = _tier(options)
    events = None
    if options.kv_events:
        topic = f"kv@{options.host}@{served}"
        events = PublisherConfig(options.host, topic, options.kv_events_port, options.kv_replay_port)
    return shape, ServerConfig(
        model=served,
        root=shape.architecture.name,
        host=options.host,
        port=options.port,
        max_model_tokens=longest,
        engine=EngineConfig(
            block_count=blocks,
            block_size_tokens=options.block_size,
            max_batched_tokens=options.max_num_batched_tokens,
            max_sequence_count=options.max_num_seqs,
            max_waiting_count=options.max_waiting,
            tier_block_count=int(tier_bytes // block_bytes),
            restore_s_per_block=block_bytes / restore_bytes_per_s if tier_bytes else 0.0,
            slow_ratio=options.slow_ratio,
            noise_ratio=options.step_noise,
            seed=options.seed,
            output_law=OutputLaw(options.output_mean_tokens),
            record_kv_events=options.kv_events,
        ),
        clock=ClockConfig(options.speed),
        kv_events=events,
        drain_s=options.drain_s,
    )


def _check_numbers(options: _Options) -> None:
    """Raises ConfigError for what no engine can have."""
    from perfmodel.errors import ConfigError

    for name, value in (
        ("--block-size", options.block_size),
        ("--max-num-batched-tokens", options.max_num_batched_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
    if options.num_gpu_blocks is not None and options.num_gpu_blocks < 2:
        raise ConfigError(
            f"--num-gpu-blocks-override is {options.num_gpu_blocks}; expected at least 2 (block 0 is never used)"
        )
    if not options.drain_s >= 0:
        raise ConfigError(f"--drain-s is {options.drain_s}; expected 0 or more")
    for name, value in (("--kv-events-port", options.kv_events_port), ("--kv-replay-port", options.kv_replay_port)):
        if not 0 <= value <= 65535:
            raise ConfigError(f"{name} is {value}; expected 0 to 65535")


def _tier(options: _Options) -> tuple[float, float]:
    """Bytes of the lower KV tier, and bytes per second out of it; 0 without one. Raises ConfigError."""
    from perfmodel.errors import ConfigError

    room, pace = options.dram_gb, options.dram_gb_per_s
    for name, value in (("--dram-gb", room), ("--dram-gb-per-s", pace)):
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{name} is {value}; expected above 0")
    if (room is None) != (pace is None):
        missing = "--dram-gb" if room is None else "--dram-gb-per-s"
        raise ConfigError(f"{missing} is missing; expected --dram-gb and --dram-gb-per-s, or neither")
    return (room or 0.0) * _GB, (pace or 0.0) * _GB


def _simulated(options: _Options) -> EngineShape:
    """What is simulated. Raises ConfigError: a mistyped name must not be served by a model that nobody asked for."""
    from perfmodel.adapters.catalog import load_catalog
    from perfmodel.errors import ConfigError

    catalog = load_catalog()
    arch = options.arch or options.model or _MODEL
    try:
        catalog.model(arch)
    except ConfigError as fault:
        hint = "" if options.arch else "; to serve another name, say with --arch what is simulated"
        raise ConfigError(f"{fault}{hint}") from None
    return catalog.shape(options.hardware, arch, options.tensor_parallel, options.dtype)


def _serve(shape: EngineShape, config: ServerConfig, as_json: bool) -> None:
    from perfmodel.adapters.coefficient_file import load_coefficients
    from perfmodel.adapters.engine_process import run_engine
    from perfmodel.step_time import StepModel

    # As a table: one look-up a step instead of some twenty terms, so that hundreds of steps a second cost nothing.
    steps = StepModel(shape, load_coefficients().coefficients).table(config.engine.max_batched_tokens)
    run_engine(config, steps, as_json=as_json)
