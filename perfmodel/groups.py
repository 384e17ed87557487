"""Which group a measured or asked-for configuration belongs to: engine era, model family, nearest known device.

Owns: the rules that name the groups whose corrections `coefficients` holds. Does not own: the corrections, or any
figure about a model or device. Groups are named from what a user knows of a deployment (engine, version, date, model
name), never from a measurement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Families by the start of a model's name, longest first: members share shapes and kernels. DeepSeek V3 and R1 are one
# model; all Llama 3 sizes are one family, as the reference data count them.
_FAMILIES = (
    ("DeepSeek-R1", "DeepSeek-V3"),
    ("DeepSeek-V3", "DeepSeek-V3"),
    ("DeepSeek-V4", "DeepSeek-V4"),
    ("DeepSeek-V2", "DeepSeek-V2"),
    ("Llama-3", "Llama-3"),
    ("Llama-2", "Llama-2"),
    ("Llama-4", "Llama-4"),
    ("Qwen3-Next", "Qwen3-Next"),
    ("Qwen3.5", "Qwen3.5"),
    ("Qwen3", "Qwen3"),
    ("Qwen2", "Qwen2"),
    ("Kimi-K2", "Kimi-K2"),
    ("MiniMax-M2", "MiniMax-M2"),
    ("GLM-4", "GLM-4"),
    ("GLM-5", "GLM-5"),
    ("gpt-oss", "gpt-oss"),
    ("Gemma-2", "Gemma-2"),
    ("Gemma-3", "Gemma-3"),
    ("Gemma-4", "Gemma-4"),
)

# Half-years in which versions came out, for rows that give a version and no date (the projects' release pages).
_RELEASES = (
    ("trtllm", "0.", "2024b"),
    ("trtllm", "1.0", "2025b"),
    ("trtllm", "1.1", "2025b"),
    ("trtllm", "1.2", "2026a"),
    ("trtllm", "1.3", "2026a"),
    ("vllm", "0.6", "2024b"),
    ("vllm", "0.1", "2025b"),
    ("sglang", "0.4", "2025a"),
    ("sglang", "0.5.8", "2026a"),
    ("sglang", "0.5.9", "2026a"),
    ("sglang", "0.5", "2025b"),
)

# Half-year of a version and date that say nothing: the one most rows are from.
_DEFAULT_HALF = "2025b"

# Years without a month are read as their first half.
_LAST_MONTH_OF_FIRST_HALF = 6


@dataclass(frozen=True, slots=True)
class EngineEra:
    """An engine and the half-year it is from ("vllm", "2025b"): kernels and schedulers change faster than devices."""

    engine: str
    half: str

    @property
    def name(self) -> str:
        """As the coefficient file spells it."""
        return f"{self.engine} {self.half}"


def engine_era(engine: str, version: str = "", date: str = "") -> EngineEra:
    """The era of an engine by the date of the run (YYYY, YYYY-MM or longer), else by its version."""
    name = engine.strip().lower() or "unnamed"
    found = re.match(r"(\d{4})(?:-(\d{2}))?", date.strip())
    if found:
        month = int(found[2] or 1)
        return EngineEra(name, found[1] + ("a" if month <= _LAST_MONTH_OF_FIRST_HALF else "b"))
    plain = version.strip().lower().lstrip("v")
    for owner, start, half in _RELEASES:
        if owner == name and plain.startswith(start):
            return EngineEra(name, half)
    return EngineEra(name, _DEFAULT_HALF)


def model_family(model: str) -> str:
    """The family of a model by its name; a name that no rule knows loses its sizes ("Mixtral-8x7B": "Mixtral")."""
    for start, family in _FAMILIES:
        if model.lower().startswith(start.lower()):
            return family
    words = [word for word in model.split("-") if not re.fullmatch(r"a?\d+(x\d+)?(\.\d+)?[bm]", word.lower())]
    return "-".join(words) or model
