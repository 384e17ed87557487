"""The books in memory: what the shipper may expect of a database, without one.

Owns: the rules of `IngestPort` (all or nothing, an event once, refusals only when the offset moves forward) and ways
to fail: before the commit, or after it with the answer lost. Passes the same contract as the real one
(`tests/contracts/test_ingest_port.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from billing.adapters.ingest import IngestBatch, IngestReport, Quarantined, SpoolOffset
from billing.usage_event import Refusal, UsageEvent


class IngestFault(Exception):
    """The fake was told to fail."""


def no_fault(_batch: IngestBatch) -> str | None:
    """Nothing fails."""
    return None


class FakeIngest:
    """`fault` is asked at each write: None, "before" (nothing is stored) or "after" (stored, the answer is lost)."""

    def __init__(self, fault: Callable[[IngestBatch], str | None] = no_fault) -> None:
        self.fault = fault
        self.is_down = False
        self.events: dict[str, UsageEvent] = {}
        self.conflicts: list[UsageEvent] = []
        self.duplicate_count = 0
        self.refusals: dict[tuple[str, str, str, str, int], int] = {}
        self.quarantined: dict[str, Quarantined] = {}
        self.offsets: dict[tuple[str, str], SpoolOffset] = {}
        self.batches: list[IngestBatch] = []

    def write(self, batch: IngestBatch) -> IngestReport:
        """Store the batch."""
        if self.is_down:
            raise IngestFault("connection to postgresql://user:secret@host/db refused")
        fault = self.fault(batch)
        if fault == "before":
            raise IngestFault("the server closed the connection")
        self.batches.append(batch)
        new_count, conflicting_count = len(self.events), len(self.conflicts)
        for event in batch.events:
            known = self.events.setdefault(event.event_id, event)
            if known is event:
                continue
            if known.payload_hash == event.payload_hash:
                self.duplicate_count += 1
            else:
                self.conflicts.append(event)
        new_count, conflicting_count = len(self.events) - new_count, len(self.conflicts) - conflicting_count
        moved = {self._put(offset) for offset in batch.offsets}
        tracked = {(offset.node, offset.incarnation) for offset in batch.offsets}
        for one in batch.refusals:
            if one.spool in moved or one.spool not in tracked:
                self._count(one.refusal)
        for bytes_kept in batch.quarantined:
            self.quarantined[bytes_kept.quarantine_id] = bytes_kept
        if fault == "after":
            raise IngestFault("the answer to the commit was lost")
        known_count = len(batch.events) - new_count - conflicting_count
        return IngestReport(new_count, known_count, conflicting_count)

    def offset(self, node: str, incarnation: str) -> SpoolOffset | None:
        """What is stored for this writer."""
        if self.is_down:
            raise IngestFault("connection to postgresql://user:secret@host/db refused")
        return self.offsets.get((node, incarnation))

    def _put(self, offset: SpoolOffset) -> tuple[str, str] | None:
        place = (offset.node, offset.incarnation)
        before = self.offsets.get(place)
        position = (offset.segment, offset.offset_bytes)
        if before is None or position >= (before.segment, before.offset_bytes):
            self.offsets[place] = offset
        return place if before is None or position > (before.segment, before.offset_bytes) else None

    def _count(self, refusal: Refusal) -> None:
        key = (refusal.org_id, refusal.project_id, refusal.model, refusal.reason, refusal.minute_ns)
        self.refusals[key] = self.refusals.get(key, 0) + refusal.count
