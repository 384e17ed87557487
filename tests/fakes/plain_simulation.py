"""The simulation's own sources run as plain Python, whole or with one fault planted in them.

Owns: loading private copies of the modules with the compiler taken out (`compiling` replaced) and, for a mutant, one
piece of text replaced. Does not own: any property. Why sources and not subclasses: compiled functions call each other
directly, so nothing can be overridden; and plain Python shows that the compiled code does what the source says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import perfmodel.simulation

MODULES = (
    "sketch",
    "state",
    "blocks",
    "record",
    "fleet",
    "engine",
    "cluster",
    "arrivals",
    "hearing",
    "run",
)
FOLDER = Path(str(perfmodel.simulation.__file__)).parent
PRIVATE = "plain_simulation"


@dataclass(frozen=True, slots=True)
class Fault:
    """Replace `text`, which must stand exactly once in `module`, by `by`."""

    name: str
    module: str
    text: str
    by: str
    engines: str = "any"
    """`tier`: only engines with a lower tier can show it; `linked`: only engines that fetch from one another."""


@contextmanager
def plain_simulation(fault: Fault | None = None) -> Iterator[ModuleType]:
    """The module `run` of a private copy."""
    names = [PRIVATE, f"{PRIVATE}.compiling", *(f"{PRIVATE}.{name}" for name in MODULES)]
    try:
        package = sys.modules[PRIVATE] = ModuleType(PRIVATE)
        package.__path__ = []
        compiler: Any = ModuleType(f"{PRIVATE}.compiling")
        compiler.compiled = same
        compiler.columns_of = lambda name, layout: same
        compiler.address_book = same
        sys.modules[compiler.__name__] = compiler
        for name in MODULES:
            source = (FOLDER / f"{name}.py").read_text()
            if fault is not None and fault.module == name:
                assert source.count(fault.text) == 1, f"{fault.name}: {source.count(fault.text)} places in {name}"
                source = source.replace(fault.text, fault.by)
            source = re.sub(r"from perfmodel\.simulation\.(?!policy )", f"from {PRIVATE}.", source)
            module = sys.modules[f"{PRIVATE}.{name}"] = ModuleType(f"{PRIVATE}.{name}")
            exec(compile(source, f"plain {name}", "exec"), module.__dict__)
        yield sys.modules[f"{PRIVATE}.run"]
    finally:
        for name in names:
            sys.modules.pop(name, None)


def same(value: Any) -> Any:
    """What takes the place of the compiler."""
    return value
