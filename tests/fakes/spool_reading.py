"""Reading a spool folder whole, for tests: what a shipper would make of it, without a database.

Owns: nothing of the format; it only walks the segments in order with the real Scanner and Fold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from billing.adapters.spool_files import segments
from billing.spool_format import Damage, Fold, Scanner, Unmatched
from billing.usage_event import Refusal, UsageEvent


@dataclass
class Contents:
    """What a folder holds."""

    events: list[UsageEvent] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    unmatched: list[Unmatched] = field(default_factory=list)
    orphans: list[UsageEvent] = field(default_factory=list)
    ended: bool = False


def read_folder(folder: Path, first_segment: int = 1) -> Contents:
    """Every segment from `first_segment` on, as if the writer were gone."""
    found, fold = Contents(), Fold()
    for number in segments(folder):
        if number < first_segment:
            continue
        for item in Scanner().feed((folder / f"{number:08d}.seg").read_bytes(), final=True):
            if isinstance(item, Damage):
                found.damage.append(item)
                continue
            made = fold.add(item.value)
            if isinstance(made, UsageEvent):
                found.events.append(made)
            elif isinstance(made, Refusal):
                found.refusals.append(made)
            elif isinstance(made, Unmatched):
                found.unmatched.append(made)
    found.ended = fold.ended
    found.orphans = fold.settle()
    return found
