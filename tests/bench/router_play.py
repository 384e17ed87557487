"""One run of the comparison as a job for any process, and the key under which its result is kept.

Owns: making engines and load of a run, the run itself, and the hash of everything that decides it: the pinned values,
the bytes of the trace and of the engines file, and the source of all code that takes part, so that a change of one
policy plays that policy's runs again and no other's. Does not own: which runs there are (`bench_router_policies`).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from perfmodel.adapters.catalog import load_catalog
from perfmodel.adapters.compiled_code import remember_compiled_code
from perfmodel.adapters.policy_names import GROUP, policy_factory
from perfmodel.adapters.sim_fleet_file import EngineOptions, engines_of
from perfmodel.adapters.traces import read_trace
from perfmodel.simulation.fleet import EngineSpec
from perfmodel.simulation.run import SimOptions, SimResult, simulate
from perfmodel.traces.trace import Trace
from tests.bench.router_loads import cut, distinct_blocks, load_of, workload_of
from tests.bench.router_plan import RouterPlan, TracePlan, Variant

# Ids from here on are renumbered, so that copies stay below 2^63; the same as the command `perf simulate`.
_LARGE_BLOCK_ID = 2**32

# What takes part in every run, beside the policy: whatever these import, of this project, takes part too.
_ROOTS = ("perfmodel.adapters.sim_fleet_file", "perfmodel.adapters.traces", "perfmodel.simulation.run",
          "tests.bench.router_loads")  # fmt: skip
_OURS = ("perfmodel.", "router.", "tests.bench.router_loads")

# A policy's module of factories names all policies; what one takes part in is read off its factory instead.
_FACTORIES = "router.adapters.policies"


@dataclass(frozen=True, slots=True)
class Play:
    """One run. `floor`: every engine's cache is unbounded."""

    trace: str
    engines: str
    variant: Variant
    copies: int
    seed: int
    floor: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """What a job is made from: the plan and the folder of the traces."""

    plan: RouterPlan
    traces: Path


def trace_file(folder: Path, name: str) -> Path:
    """The file of a trace."""
    return folder / f"{name}.jsonl.gz"


@lru_cache(maxsize=4)
def _trace(file: Path, plan: TracePlan) -> Trace:
    trace = read_trace(file)
    if trace.block_end_id > _LARGE_BLOCK_ID:
        trace = trace.with_small_block_ids()
    return cut(trace.window(float(trace.arrival_s[0]), float("inf")), plan)


@lru_cache(maxsize=2)
def _load(file: Path, plan: TracePlan, copies: int, seed: int, least_requests: int) -> Trace:
    return load_of(_trace(file, plan), plan, copies, seed, least_requests)


@lru_cache(maxsize=32)
def _engines(file: Path, model: str, share: float) -> tuple[EngineSpec, ...]:
    specs = engines_of(EngineOptions(model, None), file, load_catalog())
    return tuple(replace(spec, count=max(1, round(spec.count * share))) for spec in specs)


def _unbounded(engines: Iterable[EngineSpec], load: Trace) -> tuple[EngineSpec, ...]:
    """The same engines with room for every block there is and for all that runs at once."""
    width = load.block_tokens or 16
    longest = -(-int((load.input_tokens.astype("int64") + load.output_tokens).max()) // width)
    found = []
    for spec in engines:
        blocks = distinct_blocks(load) + (spec.max_sequence_count + 1) * longest
        found.append(replace(spec, kv_capacity_tokens=max(spec.kv_capacity_tokens, blocks * width), tier=None))
    return tuple(found)


def play(place: Place, run: Play) -> dict[str, object]:
    """The figures of one run. Raises ConfigError."""
    remember_compiled_code()
    plan = place.plan
    trace_plan = plan.traces[run.trace]
    load = _load(trace_file(place.traces, run.trace), trace_plan, run.copies, run.seed, plan.least_requests)
    engines = _engines(plan.engines[run.engines], trace_plan.model, trace_plan.fleet)
    if run.floor:
        engines = _unbounded(engines, load)
    options = SimOptions(
        slo_ttft_s=plan.ttft_s,
        slo_tpot_s=plan.tpot_ms / 1e3,
        seed=run.seed,
        model=trace_plan.model,
        policy_name=run.variant.policy,
        event_delay_s=plan.event_delay_ms / 1e3,
    )
    factory = policy_factory(run.variant.policy, dict(run.variant.settings))
    return figures(simulate(engines, workload_of(load, trace_plan), factory, options), len(load))


def figures(result: SimResult, offered: int) -> dict[str, object]:
    """What the table is made of; goodput is of all `offered` requests, those that never came included."""
    came = result.goodput_ratio or 0.0
    return {
        "requests": offered,
        "goodput_ratio": came * result.requests / offered if offered else 0.0,
        "ttft_mean_s": result.ttft.mean_s,
        "ttft_p50_s": result.ttft.p50_s,
        "ttft_p95_s": result.ttft.p95_s,
        "ttft_p99_s": result.ttft.p99_s,
        "tpot_p95_s": result.tpot.p95_s,
        "hit_ratio": result.prefix_hit_ratio,
        "pulled_ratio": result.pulled_ratio,
        "restored_ratio": result.restored_ratio,
        "output_tok_per_s": result.output_tok_per_s,
        "refused_count": result.refused_count,
        "preemption_count": result.preemption_count,
    }


# The key of a run


def run_key(place: Place, run: Play) -> str:
    """Hash of all that decides the run's result."""
    plan = place.plan
    told = {
        "run": asdict(run),
        "trace": asdict(plan.traces[run.trace]) | {"guess_copies": None},
        "bytes": _digest_of((trace_file(place.traces, run.trace), plan.engines[run.engines])),
        "promise": [plan.ttft_s, plan.tpot_ms, plan.event_delay_ms, plan.least_requests],
        "code": _code(_ROOTS) + _policy_code(run.variant.policy) + _data(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:24]


@lru_cache(maxsize=64)
def _digest_of(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"\0".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


@lru_cache(maxsize=1)
def _data() -> str:
    """The catalogue and the coefficients."""
    import perfmodel

    folder = Path(str(perfmodel.__file__)).parent / "data"
    return _digest_of(tuple(sorted(folder.glob("*.yaml"))))


@lru_cache(maxsize=64)
def _policy_code(policy: str) -> str:
    """Hash of a policy's factory, of what it is made of, and of the modules that these import."""
    point = next(point for point in entry_points(group=GROUP) if point.name == policy)
    factory = point.load()
    module = inspect.getmodule(factory)
    if module is None or module.__name__ != _FACTORIES:
        return _code((factory.__module__,))
    texts: dict[str, str] = {}
    modules: set[str] = set()
    _gather(module, factory.__name__, texts, modules)
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest() + _code(tuple(sorted(modules)))


@lru_cache(maxsize=4)
def _definitions(file: Path) -> dict[str, ast.stmt]:
    """What stands at the top of a module, by name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def _gather(module: ModuleType, name: str, texts: dict[str, str], modules: set[str]) -> None:
    """Text of a factory and of all beside it that it names, and where the classes that it is made of live."""
    if name in texts:
        return
    node = _definitions(Path(str(module.__file__))).get(name)
    value = getattr(module, name)
    if node is None:
        if inspect.isclass(value) or inspect.isfunction(value):
            modules.add(value.__module__)
        else:
            texts[name] = repr(value)
        return
    texts[name] = ast.dump(node)
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and hasattr(module, part.id):
            _gather(module, part.id, texts, modules)


@lru_cache(maxsize=64)
def _code(roots: tuple[str, ...]) -> str:
    """Hash of the source of these modules and of all of this project that they import."""
    return _digest_of(tuple(sorted(source_files(roots))))


def source_files(roots: Iterable[str]) -> set[Path]:
    """The files of these modules and of all of this project that they import, wherever the import stands."""
    found: set[Path] = set()
    todo = list(roots)
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or not name.startswith(_OURS):
            continue
        seen.add(name)
        spec = _spec_of(name)
        if spec is None:
            continue
        found.add(spec)
        for node in ast.walk(ast.parse(spec.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                todo.extend(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                todo.append(node.module)
                todo.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _spec_of(name: str) -> Path | None:
    """The file of a module; None where the name is a value in one."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None
