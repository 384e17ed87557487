"""What an accelerator can do: frozen facts with units, and nothing about any engine or model.

Owns: the device record and the number formats it computes in. Does not own: where the numbers come from
(`data/hardware.yaml`, each with its source, read by `adapters.catalog`) or how much of a peak is reached (`step_time`).
Peaks are dense, link speeds are one direction per device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perfmodel.errors import ConfigError


class NumberFormat(StrEnum):
    """How weights or KV elements are stored."""

    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def element_bytes(self) -> int:
        """Bytes of one element (FP8 scales are below 1 % and left out)."""
        return 2 if self is NumberFormat.BF16 else 1


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator. `fp8_flop_per_s` None: the device has no FP8 units; weights are then widened and run at BF16."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float | None
    scaleup_bytes_per_s: float
    scaleup_device_count: int

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bytes_per_s", "bf16_flop_per_s", "scaleup_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"hardware {self.name}: {name} is {getattr(self, name)}; expected above 0")

    def flop_per_s(self, weights: NumberFormat) -> float:
        """Dense peak for matrix products with weights of this format."""
        if weights is NumberFormat.FP8 and self.fp8_flop_per_s is not None:
            return self.fp8_flop_per_s
        return self.bf16_flop_per_s
