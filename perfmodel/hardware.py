"""What an accelerator can do: frozen facts with units, and nothing about any engine or model.

Owns: the device record and the number formats it computes in. Does not own: where the numbers come from
(`data/hardware*.yaml`, each with its source, read by `adapters.catalog`) or how much of a peak is reached
(`step_time`). Peaks are dense, link speeds are one direction per device. What is not known is None and is refused where
it is needed: a device without compute figures may decode or hold FFN weights, its compute bound is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perfmodel.errors import ConfigError

# Bits of one element with the scales that travel with it. FP8's scale per 128 x 128 block is below 0.1 % and left out;
# NVFP4 has one scale byte per 16 elements and MXFP4 one per 32 (4.25 bits), counted alike; INT4 has a 16-bit scale and
# a zero point per 128 elements in AWQ and GPTQ: at most 4.25 bits.
_ELEMENT_BITS = {"bf16": 16.0, "fp8": 8.0, "fp4": 4.5, "int8": 8.0, "int4": 4.25}

# How engines, checkpoints and users spell the formats.
_SPELLINGS = {
    "bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "half": "bf16", "auto": "bf16",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8": "fp8", "w8a8": "int8", "uint8": "int8",
    "nvfp4": "fp4", "mxfp4": "fp4", "float4": "fp4",
    "uint4": "int4", "w4a16": "int4", "awq": "int4", "gptq": "int4",
}  # fmt: skip


class NumberFormat(StrEnum):
    """How weights or KV elements are stored."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def element_bytes(self) -> float:
        """Bytes of one element, scales included (4.5 bits for FP4, 4.25 for INT4)."""
        return _ELEMENT_BITS[self.value] / 8

    @classmethod
    def parse(cls, text: str) -> NumberFormat:
        """The format of this spelling (`fp16` is as wide as BF16, `nvfp4` and `mxfp4` are FP4). Raises ConfigError."""
        word = text.strip().lower()
        word = _SPELLINGS.get(word, word)
        if word not in _ELEMENT_BITS:
            known = ", ".join((*_ELEMENT_BITS, "fp16", "nvfp4", "mxfp4"))
            raise ConfigError(f"number format is {text!r}; expected one of {known}")
        return cls(word)


class DeviceKind(StrEnum):
    """What sort of chip it is."""

    GPU = "gpu"
    LPU = "lpu"
    TPU = "tpu"
    RDU = "rdu"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator. None means that the figure is not known, except for `fp8_flop_per_s`, `fp4_flop_per_s` and
    `int8_flop_per_s` of a device whose BF16 figure is known: such a device widens those weights and computes in the
    next wider format, INT8 at the FP8 figure where it has one.

    `memory_bytes` is what software can use; `memory_marketed_bytes` is what the vendor prints. Where the usable size
    was not read the marketed decimal GB stand for it. `memory_reach_ratio` is a published share of the bandwidth that
    decode reaches. `same_die_as` names the device with the same die: an estimate may assume its compute figures, if it
    says so. `scaleup_device_count` is 1 where there is no such fabric or its extent is not known.
    """

    name: str
    vendor: str
    kind: DeviceKind
    generation: str
    memory_bytes: int
    memory_marketed_bytes: int
    memory_bytes_per_s: float
    bf16_flop_per_s: float | None
    fp8_flop_per_s: float | None
    fp4_flop_per_s: float | None
    scaleup_bytes_per_s: float | None
    scaleup_device_count: int = 1
    scaleout_bytes_per_s: float | None = None
    host_link_bytes_per_s: float | None = None
    tdp_w: float | None = None
    all_in_w: float | None = None
    memory_reach_ratio: float | None = None
    sram: bool = False
    same_die_as: str | None = None
    int8_flop_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_marketed_bytes", "memory_bytes_per_s", "scaleup_device_count"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"hardware {self.name}: {name} is {getattr(self, name)}; expected above 0")
        for name in _OPTIONAL_FIGURES:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"hardware {self.name}: {name} is {value}; expected above 0, or null when unknown")
        if self.memory_reach_ratio is not None and self.memory_reach_ratio > 1:
            raise ConfigError(
                f"hardware {self.name}: memory_reach_ratio is {self.memory_reach_ratio}; expected at most 1"
            )

    @property
    def can_prefill(self) -> bool:
        """Whether any compute figure is known. Without one the device serves decode or an FFN half only."""
        return any(figure is not None for figure in (self.bf16_flop_per_s, self.fp8_flop_per_s, self.fp4_flop_per_s))

    def flop_per_s(self, weights: NumberFormat) -> float | None:
        """Dense peak for matrix products with weights of this format; None when no figure for it is known.

        Weights that the device has no units for are widened (FP4 to FP8 to BF16); INT4 weights are widened to BF16 by
        every engine (weight-only), INT8 ones run at the INT8 figure of a device that has no FP8, else at the FP8
        figure, which is the INT8 figure of all devices that have both. Nothing is ever narrowed: a device that lists an
        FP8 figure alone (LP30) has none for BF16.
        """
        narrow_first = {
            NumberFormat.BF16: (self.bf16_flop_per_s,),
            NumberFormat.INT4: (self.bf16_flop_per_s,),
            NumberFormat.FP8: (self.fp8_flop_per_s, self.bf16_flop_per_s),
            NumberFormat.INT8: (self.int8_flop_per_s, self.fp8_flop_per_s, self.bf16_flop_per_s),
            NumberFormat.FP4: (self.fp4_flop_per_s, self.fp8_flop_per_s, self.bf16_flop_per_s),
        }[weights]
        return next((figure for figure in narrow_first if figure is not None), None)


# Figures that may be unknown.
_OPTIONAL_FIGURES = (
    "bf16_flop_per_s", "fp8_flop_per_s", "fp4_flop_per_s", "int8_flop_per_s", "scaleup_bytes_per_s",
    "scaleout_bytes_per_s", "host_link_bytes_per_s", "tdp_w", "all_in_w", "memory_reach_ratio",
)  # fmt: skip
