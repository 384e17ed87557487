"""What `make bench-router` compares, as `router.yaml` pins it: traces, engines, loads, policies and their settings.

Owns: the file's keys, their checks, and one sentence for what is wrong. Does not own: a run (`router_play`), which
runs there are (`router_search`) or the table (`router_table`). All that decides the outcome is here, so that nothing of
the comparison hides in code; the key of a run's result is made of these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from perfmodel.adapters.policy_names import policy_factory
from perfmodel.adapters.yaml_text import read_yaml
from perfmodel.errors import ConfigError

Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TracePlan:
    """One trace: how it is played and on what share of the engines. See the comments of `router.yaml`."""

    model: str
    part: float = 1.0
    window_h: tuple[float, float] | None = None
    fleet: float = 1.0
    closed: bool = False
    engine_s: float = 2.2
    shared_blocks: int = 0
    spread_s: float | None = None
    agent: bool = False
    guess_copies: int = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy under settings; none: its published defaults."""

    policy: str
    settings: Settings = ()

    @property
    def label(self) -> str:
        """As the table shows it."""
        return self.policy + ("*" if self.settings else "")


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """The whole file. `chosen`: by baseline and trace, the settings that tuning preferred."""

    ttft_s: float
    tpot_ms: float
    carried_ratio: float
    load_ratios: tuple[float, ...]
    seeds: int
    least_requests: int
    event_delay_ms: float
    resolution_ratio: float
    engines: Mapping[str, Path]
    traces: Mapping[str, TracePlan]
    ours: tuple[str, ...]
    baselines: Mapping[str, tuple[Settings, ...]]
    chosen: Mapping[str, Mapping[str, Settings]]

    def variants(self, trace: str) -> tuple[Variant, ...]:
        """All that runs on a trace: ours, each baseline's defaults, and what was chosen for it where that differs."""
        found = [Variant(name) for name in (*self.ours, *self.baselines)]
        for name in self.baselines:
            settings = self.chosen.get(name, {}).get(trace, ())
            if settings:
                found.append(Variant(name, settings))
        return tuple(found)


_KEYS = (
    "version", "slo", "carried_ratio", "load_ratios", "seeds", "least_requests", "event_delay_ms", "resolution_ratio",
    "engines", "traces", "ours", "baselines", "chosen",
)  # fmt: skip


def load_plan(path: Path) -> RouterPlan:
    """The file's content. Raises ConfigError with one sentence, OSError."""
    content = _mapping(read_yaml(path), str(path))
    _known(content, _KEYS, str(path))
    for name in _KEYS:
        if name not in content:
            raise ConfigError(f"{path}: {name} is missing; expected all of {', '.join(_KEYS)}")
    slo = _mapping(content["slo"], f"{path}: slo")
    _known(slo, ("ttft_s", "tpot_ms"), f"{path}: slo")
    baselines = _baselines(_mapping(content["baselines"], f"{path}: baselines"), path)
    ours = content["ours"]
    if not isinstance(ours, list) or not ours or not all(isinstance(name, str) for name in ours):
        raise ConfigError(f"{path}: ours is {ours!r}; expected a list of policies")
    for name in ours:
        policy_factory(name)
    traces = {
        str(name): _trace(_mapping(entry, f"{path}: traces.{name}"), f"{path}: traces.{name}")
        for name, entry in _mapping(content["traces"], f"{path}: traces").items()
    }
    engines = {
        str(name): path.parent / str(file) for name, file in _mapping(content["engines"], f"{path}: engines").items()
    }
    ratios = content["load_ratios"]
    if not isinstance(ratios, list) or not ratios:
        raise ConfigError(f"{path}: load_ratios is {ratios!r}; expected a list of shares of the carried load")
    return RouterPlan(
        ttft_s=_number(slo, "ttft_s", f"{path}: slo.", (0.0, 1e4)),
        tpot_ms=_number(slo, "tpot_ms", f"{path}: slo.", (0.0, 1e6)),
        carried_ratio=_number(content, "carried_ratio", f"{path}: ", (0.0, 1.0)),
        load_ratios=tuple(_number({"share": ratio}, "share", f"{path}: load_ratios: ", (0.0, 2.0)) for ratio in ratios),
        seeds=_count(content, "seeds", f"{path}: "),
        least_requests=_count(content, "least_requests", f"{path}: "),
        event_delay_ms=_number(content, "event_delay_ms", f"{path}: ", (0.0, 1e4)),
        resolution_ratio=_number(content, "resolution_ratio", f"{path}: ", (0.0, 0.5)),
        engines=engines,
        traces=traces,
        ours=tuple(ours),
        baselines=baselines,
        chosen=_chosen(_mapping(content["chosen"] or {}, f"{path}: chosen"), baselines, traces, path),
    )


def _baselines(entries: Mapping[object, object], path: Path) -> dict[str, tuple[Settings, ...]]:
    found: dict[str, tuple[Settings, ...]] = {}
    for name, entry in entries.items():
        where = f"{path}: baselines.{name}"
        body = _mapping(entry, where)
        _known(body, ("settings",), where)
        declared = body.get("settings", [])
        if not isinstance(declared, list):
            raise ConfigError(f"{where}.settings is {declared!r}; expected a list of settings")
        policy_factory(str(name))
        found[str(name)] = tuple(_settings(str(name), each, f"{where}.settings") for each in declared)
    return found


def _chosen(
    entries: Mapping[object, object],
    baselines: Mapping[str, tuple[Settings, ...]],
    traces: Mapping[str, TracePlan],
    path: Path,
) -> dict[str, dict[str, Settings]]:
    found: dict[str, dict[str, Settings]] = {}
    for name, by_trace in entries.items():
        where = f"{path}: chosen.{name}"
        _known({str(name): None}, tuple(baselines), f"{path}: chosen")
        for trace, body in _mapping(by_trace, where).items():
            _known({str(trace): None}, tuple(traces), where)
            settings = _settings(str(name), body, f"{where}.{trace}")
            if settings not in baselines[str(name)]:
                raise ConfigError(f"{where}.{trace} is {dict(settings)}; expected one of its declared settings")
            found.setdefault(str(name), {})[str(trace)] = settings
    return found


def _settings(policy: str, entry: object, where: str) -> Settings:
    """Settings as `--policy-settings` takes them, tried on the policy."""
    body = _mapping(entry, where)
    if not body:
        raise ConfigError(f"{where} has no setting; expected at least one, for the defaults always run")
    words = {str(name): str(value).lower() if isinstance(value, bool) else str(value) for name, value in body.items()}
    policy_factory(policy, words)
    return tuple(words.items())


def _trace(entry: Mapping[object, object], where: str) -> TracePlan:
    _known(entry, tuple(field.name for field in fields(TracePlan)), where)
    model = entry.get("model")
    if not isinstance(model, str):
        raise ConfigError(f"{where}.model is {model!r}; expected a model of the catalogue")
    window = entry.get("window_h")
    if window is not None and not (isinstance(window, list) and len(window) == 2 and 0 <= window[0] < window[1]):
        raise ConfigError(f"{where}.window_h is {window!r}; expected two hours, the first before the second")
    for name in ("closed", "agent"):
        if not isinstance(entry.get(name, False), bool):
            raise ConfigError(f"{where}.{name} is {entry[name]!r}; expected true or false")
    shared = entry.get("shared_blocks", 0)
    if type(shared) is not int or shared < 0:
        raise ConfigError(f"{where}.shared_blocks is {shared!r}; expected a whole number from 0 on")
    return TracePlan(
        model=model,
        part=_number(entry, "part", f"{where}.", (0.0, 1.0), 1.0),
        window_h=None if window is None else (float(window[0]), float(window[1])),
        fleet=_number(entry, "fleet", f"{where}.", (0.0, 1.0), 1.0),
        closed=bool(entry.get("closed", False)),
        engine_s=_number(entry, "engine_s", f"{where}.", (0.0, 60.0), 2.2),
        shared_blocks=shared,
        spread_s=_number(entry, "spread_s", f"{where}.", (0.0, 1e6)) if "spread_s" in entry else None,
        agent=bool(entry.get("agent", False)),
        guess_copies=_count(entry, "guess_copies", f"{where}.", 8),
    )


def _mapping(value: object, where: str) -> Mapping[object, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}; expected fields")
    return value


def _known(entry: Mapping[object, object], known: tuple[str, ...], where: str) -> None:
    for name in entry:
        if name not in known:
            near = get_close_matches(str(name), known, n=1) or known
            raise ConfigError(f"{where}: {name} is no field here; expected {', '.join(near)}")


def _number(
    entry: Mapping[object, object] | Mapping[str, object],
    name: str,
    where: str,
    bounds: tuple[float, float],
    default: float | None = None,
) -> float:
    value = dict(entry).get(name, default)
    if type(value) not in (int, float) or not bounds[0] < float(str(value)) <= bounds[1]:
        raise ConfigError(f"{where}{name} is {value!r}; expected a number above {bounds[0]:g}, at most {bounds[1]:g}")
    return float(str(value))


def _count(entry: Mapping[object, object], name: str, where: str, default: int | None = None) -> int:
    value = entry.get(name, default)
    if type(value) is not int or not 1 <= value <= 1_000_000:
        raise ConfigError(f"{where}{name} is {value!r}; expected a whole number from 1 on")
    return value
