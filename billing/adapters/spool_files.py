"""One writer's spool folder, as the shipper reads it.

Owns: finding folders, reading a folder's segments in order from where the database stands, noticing that its writer
is gone (the lock is free), settling what that writer left open, and deleting what is committed. Does not own: the
frames (`spool_format`), nor when to read or commit (`shipper`).

A segment is read to its end before the next one, and a writer makes the next one visible only when it is complete, so
a segment that has a successor gets no more bytes. A folder is adopted only by whoever holds its lock, which its
writer takes before the folder becomes visible and which the kernel releases when the writer dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from billing.adapters.disk import flush
from billing.adapters.ingest import Quarantined, SpoolOffset, SpoolRefusal
from billing.spool_format import MAX_FRAME_BYTES, Damage, Fold, Item, Scanner, Unmatched
from billing.usage_event import Refusal, UsageEvent

# About 550 events; must be longer than the longest frame.
READ_BYTES = 4 * MAX_FRAME_BYTES
# How far a close's own time may lie before its arrival in the spool, and a new folder's before we see it.
CLOSE_DELAY_NS = 2_000_000_000
# Orphans of one writer go out in portions of this many.
_SETTLED_PORTION = 500
# A writer that died while it made its folder leaves a hidden one; making takes milliseconds.
_HIDDEN_AFTER_S = 60.0
_FOLDER = re.compile(r"(?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)~(?P<incarnation>[A-Za-z0-9][A-Za-z0-9._-]*)")
_SEGMENT = re.compile(r"(\d{8,})\.seg")


@dataclass(slots=True)
class Gathered:
    """What was read and is not committed yet, of all folders. Mutable: it is filled while reading."""

    events: list[UsageEvent] = field(default_factory=list)
    refusals: list[SpoolRefusal] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.events or self.refusals or self.quarantined)


class SpoolFolder:
    """Reads one folder. `committed` is where the database stands; None: it knows nothing of this writer.

    `pull` reads on, `delete_committed` removes what is no longer needed. Raises OSError when the disk does.
    """

    def __init__(self, path: Path, committed: SpoolOffset | None) -> None:
        named = _FOLDER.fullmatch(path.name)
        if named is None:
            raise ValueError(f"The folder is called {path.name!r}; NODE~INCARNATION was expected.")
        self.path = path
        self.node = named["node"]
        self.incarnation = named["incarnation"]
        self._committed = (committed.segment, committed.offset_bytes) if committed else (0, 0)
        self._fold = Fold()
        self._scanner = Scanner()
        self._settled: deque[UsageEvent] = deque()
        self._finished = False
        self._read_bytes = 0
        # True at first: a writer that the database does not know would not hold its watermark back.
        self._owes_offset = True
        self._complete_to_ns: int | None = None
        # Segments before ours may be there still when the last shipper was killed between commit and deletion.
        self._left_segments = True
        self._fd: int | None = None
        self._lock_fd: int | None = None
        self._adopted = False
        # What lies before the committed segment is committed; what is gone was deleted because it was.
        numbers = [number for number in segments(path) if number >= self._committed[0]]
        self._segment = numbers[0] if numbers else self._committed[0]

    @property
    def finished(self) -> bool:
        """Whether the writer is gone and everything was read: once that is committed the folder can go."""
        return self._finished

    @property
    def adopted(self) -> bool:
        """Whether the writer is gone and we hold its lock."""
        return self._adopted

    @property
    def read_bytes(self) -> int:
        """How many bytes were read so far, of all segments."""
        return self._read_bytes

    @property
    def open_count(self) -> int:
        """How many attempts are open."""
        return self._fold.open_count

    def unread_bytes(self) -> int:
        """How many bytes of the folder were not read yet."""
        sizes = {number: _size(self._file(number)) for number in segments(self.path) if number >= self._segment}
        return max(0, sum(sizes.values()) - self._scanner.offset_bytes)

    @property
    def owes_offset(self) -> bool:
        """Whether something was gathered since the last commit, so that the offset must be stored with it."""
        return self._owes_offset

    def offset(self) -> SpoolOffset:
        """Where to read on, given that what was pulled so far is committed."""
        place = (self.node, self.incarnation, self._segment, self._scanner.offset_bytes)
        return SpoolOffset(*place, complete_to_ns=self._complete_to_ns, finished=self._finished)

    def committed(self) -> None:
        """Everything that was pulled so far is committed."""
        self._owes_offset = False

    def pull(self, into: Gathered) -> bool:
        """Read the next portion into `into`; gives whether there was anything to read."""
        if self._finished:
            return False
        if self._settled:
            return self._pull_settled(into)
        # The order matters: a writer that is gone before we look for the next segment and read writes no more.
        self._adopt()
        following = self._following()
        sealed = self._adopted or following is not None
        now_ns = time.time_ns()
        before = self._scanner.offset_bytes
        data, at_end = self._read()
        last = sealed and at_end
        self._take(self._scanner.feed(data, final=last), data, before, into)
        moved = self._scanner.offset_bytes > before
        self._read_bytes += self._scanner.offset_bytes - before
        if at_end and following is None:
            self._complete_to_ns = self._complete(now_ns)
        if last:
            self._leave(following)
        return moved or last

    def delete_committed(self) -> None:
        """Delete what is not needed any more, given that everything that was pulled so far is committed.

        The successor is made durable first: it carries what was still open in the segment that goes.
        """
        if self._finished:
            self._remove()
            return
        if not self._left_segments:
            return
        old = [number for number in segments(self.path) if number < self._segment]
        if old:
            flush(self._file(self._segment))
            flush(self.path)
        for number in old:
            self._file(number).unlink(missing_ok=True)
        self._left_segments = False

    def release(self) -> None:
        """Close the files; a folder that was being adopted is free again."""
        for fd in (self._fd, self._lock_fd):
            if fd is not None:
                os.close(fd)
        self._fd = self._lock_fd = None

    def _pull_settled(self, into: Gathered) -> bool:
        for _ in range(min(_SETTLED_PORTION, len(self._settled))):
            into.events.append(self._settled.popleft())
        self._owes_offset = True
        self._finished = not self._settled
        return True

    def _take(self, items: list[Item], data: bytes, base_bytes: int, into: Gathered) -> None:
        """Join the records, and gather what the database does not have yet."""
        for item in items:
            made: UsageEvent | Refusal | Unmatched | Damage | None
            made = item if isinstance(item, Damage) else self._fold.add(item.value)
            if made is None or (self._segment, item.end_bytes) <= self._committed:
                continue
            self._owes_offset = True
            if isinstance(made, UsageEvent):
                into.events.append(made)
            elif isinstance(made, Refusal):
                into.refusals.append(SpoolRefusal(made, self.node, self.incarnation))
            else:
                raw = data[item.start_bytes - base_bytes : item.end_bytes - base_bytes]
                reason = f"{made.reason} (segment {self._segment}, byte {item.start_bytes})"
                into.quarantined.append(Quarantined("frame", reason, raw, self.node, self.incarnation))

    def _complete(self, read_ns: int) -> int:
        """What is open, and what is written later, ends at or after this (Unix ns)."""
        return min(self._fold.ends_not_before_ns() or read_ns, read_ns - CLOSE_DELAY_NS)

    def _read(self) -> tuple[bytes, bool]:
        """The next bytes of the segment, and whether they reach its end."""
        if self._fd is None:
            try:
                self._fd = os.open(self._file(self._segment), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b"", True
        offset = self._scanner.offset_bytes
        data = os.pread(self._fd, READ_BYTES, offset)
        return data, offset + len(data) >= os.fstat(self._fd).st_size

    def _leave(self, following: int | None) -> None:
        """Go on to the next segment, or, when there is none (the writer is gone), settle what is open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if following is None:
            self._owes_offset = True
            self._settled.extend(self._fold.settle())
            self._finished = not self._settled
            return
        self._segment = following
        self._scanner = Scanner()
        self._left_segments = True

    def _adopt(self) -> None:
        if self._adopted:
            return
        if self._lock_fd is None:
            try:
                self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                # Only a folder whose removal was interrupted has lost its lock and its segments.
                self._adopted = not segments(self.path)
                return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._adopted = True

    def _following(self) -> int | None:
        return next((number for number in segments(self.path) if number > self._segment), None)

    def _file(self, number: int) -> Path:
        return self.path / f"{number:08d}.seg"

    def _remove(self) -> None:
        """Remove the folder, its lock last, so that an interrupted removal is seen as ours to end."""
        for number in segments(self.path):
            self._file(number).unlink(missing_ok=True)
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)


def spool_folders(spool_dir: Path) -> list[Path]:
    """The writers' folders of a node, in a stable order. No folder at all is an empty list."""
    try:
        with os.scandir(spool_dir) as entries:
            return sorted(Path(entry.path) for entry in entries if _FOLDER.fullmatch(entry.name) and entry.is_dir())
    except FileNotFoundError:
        return []


def clear_hidden(spool_dir: Path, *, wall_s: Callable[[], float] = time.time) -> None:
    """Remove folders whose writer died before they became visible: nothing was ever written to them."""
    for path in spool_dir.glob(".*~*"):
        with contextlib.suppress(OSError):
            if wall_s() - path.stat().st_mtime > _HIDDEN_AFTER_S and not _is_locked(path / "lock"):
                shutil.rmtree(path, ignore_errors=True)


def segments(folder: Path) -> list[int]:
    """The numbers of the segments of a folder, in order; empty when the folder is gone."""
    try:
        with os.scandir(folder) as entries:
            return sorted(int(named[1]) for entry in entries if (named := _SEGMENT.fullmatch(entry.name)))
    except FileNotFoundError:
        return []


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
