"""Whatever order writing, shipping, failing and dying come in: every attempt is in the books once, as it ended.

Two properties. Pure: a run of records, cut into segments anywhere and cut off at any byte, reads as what was written
before the cut. On files: writers, shippers and databases that fail at any step end in exact books. Each property is
also run on planted faults and must catch every one of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from billing.adapters.ingest import IngestBatch, SpoolOffset
from billing.adapters.shipper import IngestPort, Shipper, ShipperSettings
from billing.adapters.spool_files import spool_folders
from billing.spool_format import (
    Damage,
    Fold,
    Item,
    Scanner,
    Unmatched,
    Value,
    encode_checkpoint,
    encode_close,
    encode_open,
)
from billing.usage_event import (
    UsageCheckpoint,
    UsageClose,
    UsageEvent,
    UsageOpen,
    join,
    settle_orphan,
)
from controlplane.adapters.spool import Spool, SpoolSettings
from tests.exploring import examples
from tests.fakes.ingest import FakeIngest, IngestFault
from tests.fakes.usage import START_NS, a_checkpoint, a_close, an_open

# Files and threads: an example takes some 10 ms.
ON_FILES = settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
PURE = settings(max_examples=examples(200), deadline=None)
# A planted fault needs to be found, not to be shrunk.
HUNT = settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.generate],
    derandomize=True,
)


# --- pure ---------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What must be in the books: kept by the test from what it did."""

    open: dict[str, UsageOpen] = field(default_factory=dict)
    noted: dict[str, UsageCheckpoint] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)
    events: dict[str, UsageEvent] = field(default_factory=dict)
    refusal_count: int = 0

    def begin(self, opened: UsageOpen) -> None:
        self.open[opened.event_id] = opened
        self.latest[opened.request_id] = max(opened.attempt, self.latest.get(opened.request_id, 0))

    def end(self, closed: UsageClose) -> None:
        opened = self.open.pop(closed.event_id)
        self.noted.pop(closed.event_id, None)
        self.events[closed.event_id] = join(opened, closed)

    def die(self) -> None:
        for event_id, opened in self.open.items():
            billable = opened.attempt == self.latest[opened.request_id]
            closed = settle_orphan(opened, self.noted.get(event_id), billable=billable)
            self.events[event_id] = join(opened, closed)
        self.open.clear()
        self.noted.clear()


actions = st.lists(st.tuples(st.sampled_from("oockr"), st.integers(0, 7)), max_size=40)


def the_records(script: list[tuple[str, int]]) -> list[Value]:
    """A run of records of one writer that makes sense: only what is open is noted, closed or tried again."""
    records: list[Value] = []
    running: list[UsageOpen] = []
    for number, (action, choice) in enumerate(script):
        if action == "o" or not running:
            running.append(an_open(number))
            records.append(running[-1])
            continue
        chosen = running[choice % len(running)]
        if action == "k":
            records.append(a_checkpoint(number, output_tokens=number)._replace(event_id=chosen.event_id))
        elif action == "c":
            running.remove(chosen)
            records.append(a_close(number)._replace(event_id=chosen.event_id))
        else:
            again = an_open(number, request_id=chosen.request_id, attempt=chosen.attempt + 1)
            running.append(again)
            records.append(again)
    return records


def encoded(record: Value) -> bytes:
    match record:
        case UsageOpen():
            return encode_open(record)
        case UsageCheckpoint():
            return encode_checkpoint(record)
        case UsageClose():
            return encode_close(record)
    raise AssertionError(record)


def told(records: list[Value]) -> dict[str, UsageEvent]:
    """The events of a writer that wrote these and died."""
    model = Model()
    for record in records:
        match record:
            case UsageOpen():
                model.begin(record)
            case UsageCheckpoint():
                model.noted[record.event_id] = record
            case UsageClose():
                model.end(record)
    model.die()
    return model.events


def check_cut(script: list[tuple[str, int]], cut_ratio: float, chunk_bytes: int, scanner: Scanner, fold: Fold) -> None:
    """A file cut at `cut_ratio` of its length, read in chunks, gives the events of the records before the cut."""
    records = the_records(script)
    frames = [encoded(record) for record in records]
    data = b"".join(frames)
    cut = round(len(data) * cut_ratio)
    whole, end = 0, 0
    while whole < len(frames) and end + len(frames[whole]) <= cut:
        end += len(frames[whole])
        whole += 1
    items: list[Item] = []
    for upto in range(0, cut, chunk_bytes):
        items += scanner.feed(data[scanner.offset_bytes : upto])
    items += scanner.feed(data[scanner.offset_bytes : cut], final=True)
    events: dict[str, UsageEvent] = {}
    for item in items:
        assert not isinstance(item, Damage)
        made = fold.add(item.value)
        assert not isinstance(made, Unmatched)
        if isinstance(made, UsageEvent):
            assert made.event_id not in events
            events[made.event_id] = made
    for orphan in fold.settle():
        assert orphan.event_id not in events
        events[orphan.event_id] = orphan
    assert events == told(records[:whole])
    assert scanner.offset_bytes == end


cuts = given(actions, st.floats(0, 1), st.integers(1, 2_000))


@PURE
@cuts
def test_a_file_cut_off_at_any_byte_reads_as_what_was_written_before(
    script: list[tuple[str, int]], cut_ratio: float, chunk_bytes: int
) -> None:
    check_cut(script, cut_ratio, chunk_bytes, Scanner(), Fold())


class TakesTornForDamage(Scanner):
    def _undecided(self, data: bytes, at: int, *, final: bool) -> int:
        return len(data) if final else at


class GivesUpEarly(Scanner):
    def _undecided(self, data: bytes, at: int, *, final: bool) -> int:
        return len(data)


class ForgetsCheckpoints(Fold):
    def _note(self, checkpoint: UsageCheckpoint) -> Unmatched | None:
        return None


class KeepsTheFirstCheckpoint(Fold):
    def _note(self, checkpoint: UsageCheckpoint) -> Unmatched | None:
        known = self._open.get(checkpoint.event_id)
        return super()._note(checkpoint) if known is None or known[1] is None else None


class BillsEveryAttempt(Fold):
    def settle(self) -> list[UsageEvent]:
        return [join(opened, settle_orphan(opened, noted)) for opened, noted in self._open.values()]


class ForgetsClosedAttempts(Fold):
    def _close(self, closed: UsageClose) -> UsageEvent | Unmatched:
        known = self._open.get(closed.event_id)
        made = super()._close(closed)
        if known is not None and known[0].request_id in self._attempts:
            self._attempts[known[0].request_id] = (self._attempts[known[0].request_id][0], 1)
        return made


def is_caught(run: Callable[[], None]) -> bool:
    """Whether the property fails on the planted fault."""
    try:
        run()
    except (AssertionError, Flaky, ExceptionGroup, KeyError):
        return True
    return False


@pytest.mark.parametrize(
    ("scanner", "fold"),
    [
        (TakesTornForDamage, Fold),
        (GivesUpEarly, Fold),
        (Scanner, ForgetsCheckpoints),
        (Scanner, KeepsTheFirstCheckpoint),
        (Scanner, BillsEveryAttempt),
        (Scanner, ForgetsClosedAttempts),
    ],
)
def test_the_cut_property_catches_planted_faults(scanner: type[Scanner], fold: type[Fold]) -> None:
    @HUNT
    @cuts
    def hunt(script: list[tuple[str, int]], cut_ratio: float, chunk_bytes: int) -> None:
        check_cut(script, cut_ratio, chunk_bytes, scanner(), fold())

    assert is_caught(hunt)


@PURE
@given(st.binary(max_size=3_000), st.booleans())
def test_any_bytes_at_all_are_read_without_an_exception_and_accounted_for(data: bytes, final: bool) -> None:
    scanner = Scanner()
    items = scanner.feed(data, final=final)
    assert sum(item.end_bytes - item.start_bytes for item in items) == scanner.offset_bytes <= len(data)


@PURE
@given(actions, st.data())
def test_damage_costs_only_the_records_it_touches(script: list[tuple[str, int]], data: st.DataObject) -> None:
    frames = [encoded(record) for record in the_records(script)]
    if not frames:
        return
    victim = data.draw(st.integers(0, len(frames) - 1))
    place = data.draw(st.integers(0, len(frames[victim]) - 1))
    flip = data.draw(st.integers(1, 255))
    broken = bytearray(frames[victim])
    broken[place] ^= flip
    changed = [*frames[:victim], bytes(broken), *frames[victim + 1 :]]
    items = Scanner().feed(b"".join(changed), final=True)
    read = [item.value for item in items if not isinstance(item, Damage)]
    records = the_records(script)
    assert read == records[:victim] + records[victim + 1 :]
    # At the very end a broken length looks like a record that was cut off.
    lost = [item.raw for item in items if isinstance(item, Damage)]
    assert lost == [bytes(broken)] or (victim == len(frames) - 1 and not lost)


# --- on files -----------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.sampled_from(["open"] * 4 + ["check", "close", "close", "retry", "refuse", "ship", "ship", "die"]),
              st.integers(0, 7)),
    max_size=60,
)  # fmt: skip


def die(spool: Spool) -> None:
    """What the kernel leaves of a killed process: the files as they are, no lock."""
    spool._sync.stop()
    os.close(spool._lock_fd)
    spool._refused_because = "dead"


class Run:
    """One writer (restarted when it dies), shippers that fail, and the truth."""

    def __init__(
        self, spool_dir: Path, writer: type[Spool], shipper: type[Shipper], ingest: Callable[[FakeIngest], IngestPort]
    ) -> None:
        self.spool_dir = spool_dir
        self.writer = writer
        self.shipper = shipper
        self.fake = FakeIngest()
        self.port = ingest(self.fake)
        self.model = Model()
        self.number = 0
        self.lives = 0
        self.spool = self.born()

    def born(self) -> Spool:
        self.lives += 1
        return self.writer(SpoolSettings(self.spool_dir, "node-1", f"life{self.lives}", 1 << 30, segment_bytes=1_500))

    def step(self, action: str, choice: int) -> None:
        self.number += 1
        running = list(self.model.open.values())
        if action == "ship":
            self.ship(choice)
        elif action == "die":
            die(self.spool)
            self.model.die()
            self.spool = self.born()
        elif action == "refuse":
            self.spool.refuse("org", "proj", "llama", "rate_limit", START_NS)
            self.spool.tick()
            self.model.refusal_count += 1
        elif action == "open" or not running:
            self.begin(an_open(self.number))
        else:
            self.go_on(action, running[choice % len(running)])

    def go_on(self, action: str, chosen: UsageOpen) -> None:
        if action == "check":
            checkpoint = a_checkpoint(self.number, output_tokens=self.number)._replace(event_id=chosen.event_id)
            self.spool.checkpoint(checkpoint)
            self.model.noted[chosen.event_id] = checkpoint
        elif action == "retry":
            self.begin(an_open(self.number, request_id=chosen.request_id, attempt=chosen.attempt + 1))
        else:
            closed = a_close(self.number)._replace(event_id=chosen.event_id)
            self.spool.close(closed)
            self.model.end(closed)

    def begin(self, opened: UsageOpen) -> None:
        self.spool.open(opened)
        self.model.begin(opened)

    def ship(self, choice: int) -> None:
        """A shipper that is new and dies with its first fault: at a write that is not, or is, committed."""
        left = choice // 2
        fault = ["before", "after"][choice % 2]

        def fail_at(_batch: IngestBatch) -> str | None:
            nonlocal left
            left -= 1
            return fault if left == 0 else None

        self.fake.fault = fail_at
        batch_count = 1 + choice
        with contextlib.suppress(IngestFault):
            self.shipper(ShipperSettings(self.spool_dir, "node-1", batch_count), self.port).run_once()
        for event_id in self.fake.events:
            # Nothing that runs is in the books.
            assert event_id not in self.model.open

    def finish(self) -> None:
        die(self.spool)
        self.model.die()
        self.fake.fault = lambda _batch: None
        for _ in range(2):
            self.shipper(ShipperSettings(self.spool_dir, "node-1"), self.port).run_once()
        assert self.fake.events == self.model.events
        assert not self.fake.conflicts
        assert not self.fake.quarantined
        assert sum(self.fake.refusals.values()) == self.model.refusal_count
        assert not spool_folders(self.spool_dir)
        assert all(offset.finished for offset in self.fake.offsets.values())


def check_run(
    script: list[tuple[str, int]],
    writer: type[Spool] = Spool,
    shipper: type[Shipper] = Shipper,
    ingest: Callable[[FakeIngest], IngestPort] = lambda fake: fake,
) -> None:
    spool_dir = Path(tempfile.mkdtemp(prefix="spool-"))
    run = Run(spool_dir, writer, shipper, ingest)
    try:
        for action, choice in script:
            run.step(action, choice)
        run.finish()
    finally:
        if run.spool._refused_because != "dead":
            die(run.spool)
        shutil.rmtree(spool_dir, ignore_errors=True)


@ON_FILES
@given(steps)
def test_every_attempt_is_in_the_books_once_as_it_ended(script: list[tuple[str, int]]) -> None:
    check_run(script)


class CarriesNothing(Spool):
    def _carried(self) -> bytes:
        return b""


class CarriesNoCheckpoints(Spool):
    def _carried(self) -> bytes:
        for entry in self._open.values():
            entry.checkpoint = b""
        return super()._carried()


class CarriesNoRetries(Spool):
    def _carried(self) -> bytes:
        self._retried.clear()
        return super()._carried()


class DeletesBeforeTheCommit(Shipper):
    def _pull(self) -> bool:
        moved = super()._pull()
        self._delete_committed()
        return moved


class AdoptsTheLiving(Shipper):
    def _pull(self) -> bool:
        for folder in self._folders.values():
            folder._adopted = True
        return super()._pull()


@dataclass
class Wrapped:
    """A database with a fault of its own."""

    fake: FakeIngest

    def write(self, batch: IngestBatch) -> object:
        return self.fake.write(batch)

    def offset(self, node: str, incarnation: str) -> SpoolOffset | None:
        return self.fake.offset(node, incarnation)


class ForgetsOffsets(Wrapped):
    def write(self, batch: IngestBatch) -> object:
        return self.fake.write(replace(batch, offsets=()))

    def offset(self, node: str, incarnation: str) -> SpoolOffset | None:
        return None


class StoresOffsetsFirst(Wrapped):
    """The offset in a transaction of its own, before the events."""

    def write(self, batch: IngestBatch) -> object:
        for offset in batch.offsets:
            self.fake._put(offset)
        return self.fake.write(batch)


class DropsRefusals(Wrapped):
    def write(self, batch: IngestBatch) -> object:
        return self.fake.write(replace(batch, refusals=()))


@pytest.mark.parametrize(
    ("writer", "shipper", "ingest"),
    [
        (CarriesNothing, Shipper, Wrapped),
        (CarriesNoCheckpoints, Shipper, Wrapped),
        (CarriesNoRetries, Shipper, Wrapped),
        (Spool, DeletesBeforeTheCommit, Wrapped),
        (Spool, AdoptsTheLiving, Wrapped),
        (Spool, Shipper, ForgetsOffsets),
        (Spool, Shipper, StoresOffsetsFirst),
        (Spool, Shipper, DropsRefusals),
    ],
)
def test_the_books_property_catches_planted_faults(
    writer: type[Spool], shipper: type[Shipper], ingest: Callable[[FakeIngest], IngestPort]
) -> None:
    @HUNT
    @given(steps)
    def hunt(script: list[tuple[str, int]]) -> None:
        check_run(script, writer, shipper, ingest)

    assert is_caught(hunt)
