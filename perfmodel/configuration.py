"""One deployment under one load, completely said: what an estimate is asked about.

Owns: `Configuration` and the vocabulary of scenarios. Does not own: how a table row becomes one (`row_rules`), or what
it will do (`steady`, `estimate`). Everything that was not said and had to be assumed is listed by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perfmodel.coefficients import Group
from perfmodel.memory import EngineShape
from perfmodel.serving import Lengths


class Scenario(StrEnum):
    """What the clients do (column `scenario` of a table; docs/performance-model.md says what each means)."""

    CLOSED_LOOP = "closed_loop"
    OPEN_LOOP = "open_loop"
    STATIC_BATCH = "static_batch"
    OFFLINE = "offline"
    FIRST_TOKEN = "first_token"  # noqa: S105 a token of text, no secret
    SINGLE_USER = "single_user"
    AGENTIC = "agentic"
    MLPERF_SERVER = "mlperf_server"
    MLPERF_OFFLINE = "mlperf_offline"
    MLPERF_INTERACTIVE = "mlperf_interactive"
    OTHER = "other"


# Scenarios in which every request waits from the start and the engine takes as many as it can hold.
QUEUED = frozenset({Scenario.OFFLINE, Scenario.MLPERF_OFFLINE})

# Scenarios of MLPerf that have latency limits.
LIMITED = frozenset({Scenario.MLPERF_SERVER, Scenario.MLPERF_INTERACTIVE})


@dataclass(frozen=True, slots=True)
class Pool:
    """`replicas` engines of one shape. `spans_nodes`: one engine is larger than its scale-up domain."""

    shape: EngineShape
    replicas: float = 1.0
    spans_nodes: bool = False

    @property
    def device_count(self) -> float:
        """Devices of the pool."""
        return self.shape.device_count * self.replicas


@dataclass(frozen=True, slots=True)
class Configuration:
    """A deployment and its load. `lengths` are true means. `concurrency` and `rate_per_s` are of all replicas together.

    `prefill` is the prefill pool of a disaggregated deployment; `decode` then only decodes. A `concurrency` and a rate
    of None mean as much as fits. `slot_count`: sequences that one engine runs at most because its harness started it
    so, and a tenth of the prompts that are sent; None: the engine's own default. `assumed` names what was imputed,
    `imputed` the figure that stands for it, where there is one.
    """

    decode: Pool
    group: Group
    lengths: Lengths
    scenario: Scenario = Scenario.CLOSED_LOOP
    concurrency: float | None = None
    rate_per_s: float | None = None
    prefill: Pool | None = None
    slot_count: int | None = None
    assumed: tuple[str, ...] = ()
    imputed: tuple[tuple[str, str], ...] = ()

    @property
    def disaggregated(self) -> bool:
        """Whether prompts run on devices of their own."""
        return self.prefill is not None

    @property
    def paced(self) -> bool:
        """Whether agents' live sessions and their rate are both known: Little's law then gives the time of a turn."""
        return self.scenario is Scenario.AGENTIC and self.rate_per_s is not None and self.concurrency is not None

    @property
    def arriving(self) -> bool:
        """Whether requests come by themselves and end: a run without a steady number in flight."""
        return self.scenario is Scenario.OPEN_LOOP and self.concurrency is None and not self.disaggregated

    @property
    def device_count(self) -> float:
        """Devices of the deployment."""
        return self.decode.device_count + (0.0 if self.prefill is None else self.prefill.device_count)
