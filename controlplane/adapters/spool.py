"""The usage spool of one gateway process: an append-only file that is written before a request may go on.

Owns: the process's folder `<spool_dir>/<node>~<incarnation>/` with its flock'ed `lock`, its segments
`00000001.seg`, ..., their rotation, the group fdatasync, and the byte bound. Does not own: the frames
(`billing.spool_format`), or reading, committing and deleting (`billing.adapters.shipper`), nor when to write:
`serve.py` opens before dispatch and closes before the last byte.

Why a synchronous `os.write` on the event loop: it is one copy into the page cache (1 to 2 microseconds), less than
handing it to a thread. The kill of the process loses nothing that was written. Loss of power loses at most the last
20 ms: a thread calls fdatasync on whatever was written since, and no request waits for it (DESIGN 4.3).

All methods are called from one thread, the event loop's. A process makes its spool after it was forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from billing.adapters.disk import flush
from billing.spool_format import (
    Retried,
    encode_checkpoint,
    encode_close,
    encode_end,
    encode_open,
    encode_refusal,
    encode_retried,
)
from billing.usage_event import Refusal, UsageCheckpoint, UsageClose, UsageOpen
from controlplane.errors import ConfigError, SpoolFull

_log = logging.getLogger(__name__)

# About 35,000 requests; small enough that a committed one is soon deleted, large enough that rotation is rare.
SEGMENT_BYTES = 16 * 1024 * 1024
# What loss of power may cost (DESIGN 4.3).
SYNC_INTERVAL_S = 0.02
# Refusals reach the spool, and the node's size is measured anew, this often.
TICK_INTERVAL_S = 1.0
# Distinct (org, project, model, reason) between two ticks; a client chooses the model's name, so it must be bounded.
MAX_REFUSAL_ROWS = 4_096
# The model that refusals are counted under beyond that bound.
OTHER_MODEL = "(other)"
# A rotation that failed is tried again when the segment has grown by this much.
_ROTATE_AGAIN_BYTES = 1024 * 1024
_NANOSECONDS_PER_MINUTE = 60_000_000_000
# A node's and an incarnation's name are parts of a folder's name, separated by a tilde.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NEW_FILE = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Where a process spools. `incarnation` is unique to this start of the process."""

    spool_dir: Path
    node: str
    incarnation: str
    max_bytes: int
    """Bound of all spool folders of this node together."""
    segment_bytes: int = SEGMENT_BYTES
    sync_interval_s: float = SYNC_INTERVAL_S


@dataclass(frozen=True, slots=True)
class SpoolState:
    """What `/readyz` and the metrics show. `reason` is one sentence when `accepting` is False."""

    accepting: bool
    reason: str | None
    open_count: int
    segment: int
    node_bytes: int
    """Size of the node's spool when it was last measured, and what this process wrote since."""
    max_bytes: int
    pending_close_count: int
    """Closes that the disk did not take yet; they are tried again every second."""
    lost_checkpoint_count: int
    repeated_close_count: int
    """Closes of attempts that were not open (closed twice): the first one counts."""


class _Attempt:
    """An open attempt: what must be carried into the next segment."""

    __slots__ = ("attempt", "checkpoint", "frame", "request_id")

    def __init__(self, frame: bytes, request_id: str, attempt: int) -> None:
        self.frame = frame
        self.checkpoint = b""
        self.request_id = request_id
        self.attempt = attempt


class Spool:
    """The writer. Making one creates and locks the folder; raises ConfigError or SpoolFull when that cannot be done."""

    def __init__(self, settings: SpoolSettings, *, fdatasync: Callable[[int], None] = os.fdatasync) -> None:
        for field_name, value in (("node", settings.node), ("incarnation", settings.incarnation)):
            if not _NAME.fullmatch(value):
                raise ConfigError(f"{field_name} is {value!r}; letters, digits, '.', '_' and '-' were expected.")
        self._settings = settings
        self._folder = settings.spool_dir / f"{settings.node}~{settings.incarnation}"
        self._open: dict[str, _Attempt] = {}
        # request_id -> its latest attempt, where there was more than one; pruned at each rotation.
        self._retried: dict[str, int] = {}
        self._pending: dict[str, bytes] = {}
        self._refusals: dict[tuple[str, str, str, str, int], int] = {}
        self._refused_because: str | None = None
        self._lost_checkpoint_count = self._repeated_close_count = 0
        self._segment = 1
        self._size_bytes = 0
        self._rotate_at_bytes = settings.segment_bytes
        self._written_bytes = 0
        self._ticking: asyncio.Task[None] | None = None
        try:
            self._lock_fd, self._fd = _claim(self._folder)
        except OSError as fault:
            raise SpoolFull(f"The spool folder {self._folder} cannot be made: {fault.strerror}.") from None
        self._sync = _GroupSync(self._folder, self._fd, settings.sync_interval_s, fdatasync)
        self._room_bytes = settings.max_bytes - spool_bytes(settings.spool_dir)
        self._gone = False
        _forget_after_fork(self)

    @property
    def folder(self) -> Path:
        """The folder of this process."""
        return self._folder

    async def start(self) -> None:
        """Begin the work of each second: refusal counts, closes that are due, the size of the node's spool."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick_forever(), name="spool-tick")

    def open(self, opened: UsageOpen) -> None:
        """Record an attempt before it is dispatched. Raises SpoolFull: then it must not be dispatched."""
        if self._room_bytes <= 0 or self._sync.fault is not None or self._refused_because is not None:
            raise SpoolFull(self._why_not() or "The usage spool takes no records.")
        frame = encode_open(opened)
        self._write(frame)
        self._open[opened.event_id] = _Attempt(frame, opened.request_id, opened.attempt)
        if opened.attempt > 1:
            self._retried[opened.request_id] = opened.attempt

    def checkpoint(self, checkpoint: UsageCheckpoint) -> None:
        """Record what was delivered so far. Never raises: when the disk is full the one before it stands."""
        entry = self._open.get(checkpoint.event_id)
        if entry is None:
            return
        frame = encode_checkpoint(checkpoint)
        try:
            self._write(frame)
        except SpoolFull:
            self._lost_checkpoint_count += 1
        entry.checkpoint = frame

    def close(self, closed: UsageClose) -> None:
        """Record how an attempt ended, before the client gets the last byte; the first close of an attempt counts.

        Never raises for a full disk, and is not held back by the byte bound: the attempt's OPEN is already on disk,
        so it is billed in any case. A close that the disk does not take is kept and tried again every second.
        """
        event_id = closed.event_id
        if event_id not in self._open or event_id in self._pending:
            self._repeated_close_count += 1
            return
        frame = encode_close(closed)
        try:
            self._write(frame)
        except SpoolFull:
            self._pending[event_id] = frame
            return
        del self._open[event_id]

    def refuse(self, org_id: str, project_id: str, model: str, reason: str, at_ns: int) -> None:
        """Count a refusal (`at_ns` in Unix ns). In memory until the next tick; never raises."""
        minute_ns = at_ns - at_ns % _NANOSECONDS_PER_MINUTE
        row = (org_id, project_id, model, reason, minute_ns)
        if row not in self._refusals and len(self._refusals) >= MAX_REFUSAL_ROWS:
            row = ("", "", OTHER_MODEL, reason, minute_ns)
        self._refusals[row] = self._refusals.get(row, 0) + 1

    def state(self) -> SpoolState:
        """For `/readyz` and the metrics."""
        reason = self._why_not()
        return SpoolState(
            accepting=reason is None,
            reason=reason,
            open_count=len(self._open),
            segment=self._segment,
            node_bytes=self._settings.max_bytes - self._room_bytes,
            max_bytes=self._settings.max_bytes,
            pending_close_count=len(self._pending),
            lost_checkpoint_count=self._lost_checkpoint_count,
            repeated_close_count=self._repeated_close_count,
        )

    def tick(self) -> None:
        """Write the refusal counts and the closes that are due. What the disk does not take waits for the next tick."""
        with contextlib.suppress(SpoolFull):
            for event_id, frame in list(self._pending.items()):
                self._write(frame)
                del self._pending[event_id]
                del self._open[event_id]
            for row, count in list(self._refusals.items()):
                self._write(encode_refusal(Refusal(*row, count)))
                del self._refusals[row]

    async def flush(self) -> None:
        """Write what is in memory and wait until all of it is on the disk. Raises SpoolFull when it cannot be."""
        self.tick()
        await asyncio.to_thread(self._sync.now)
        if self._sync.fault is not None:
            raise SpoolFull(self._sync.fault)

    async def aclose(self) -> None:
        """Write everything, sync, and let the folder go. What is still open is settled by the shipper, estimated."""
        if self._refused_because is not None:
            return
        self._refused_because = "The usage spool is closed."
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        self.tick()
        with contextlib.suppress(SpoolFull):
            self._write(encode_end())
        self._gone = True  # before the descriptor goes: its number may be another file's the next moment
        await asyncio.to_thread(self._sync.stop)
        os.close(self._lock_fd)
        if self._sync.fault is not None:
            _log.error("%s", self._sync.fault)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.tick()
            written_bytes = self._written_bytes
            try:
                node_bytes = await asyncio.to_thread(spool_bytes, self._settings.spool_dir)
                # What was written while measuring may be counted twice, never not at all.
                node_bytes += self._written_bytes - written_bytes
                self._room_bytes = self._settings.max_bytes - node_bytes
            except OSError as fault:
                # The last figure stands, less what was written since; writing itself shows a broken disk.
                _log.warning("The size of the spool %s cannot be read: %s.", self._settings.spool_dir, fault.strerror)

    def _why_not(self) -> str | None:
        if self._refused_because is not None:
            return self._refused_because
        if self._sync.fault is not None:
            return self._sync.fault
        if self._room_bytes <= 0:
            return f"The usage spool of this node is full: its bound is {self._settings.max_bytes} bytes."
        return None

    def _write(self, frame: bytes) -> None:
        """Append one frame in one call. Raises SpoolFull, and leaves no part of a frame behind."""
        if self._gone:
            raise SpoolFull("The usage spool is closed.")
        if self._size_bytes + len(frame) > self._rotate_at_bytes:
            self._rotate()
        try:
            written = os.write(self._fd, frame)
        except OSError as fault:
            raise SpoolFull(f"The usage spool cannot be written: {fault.strerror}.") from None
        if written != len(frame):
            self._cut_off(written)
            raise SpoolFull("The usage spool cannot be written: the disk took only a part of a record.")
        self._size_bytes += written
        self._written_bytes += written
        self._room_bytes -= written
        self._sync.dirty()

    def _cut_off(self, written: int) -> None:
        """Remove a half-written frame. Where even that fails the reader skips it as damage, so writing may go on."""
        try:
            os.ftruncate(self._fd, self._size_bytes)
        except OSError as fault:
            self._size_bytes += written
            _log.error("A part of a usage record stays in segment %d: %s.", self._segment, fault.strerror)

    def _rotate(self) -> None:
        """Go on in a new segment that starts with what is open, and becomes visible complete.

        A reader may therefore delete the old one once it has read it. When the disk has no room for that, writing
        goes on in the old segment.
        """
        carried = self._carried()
        hidden = self._folder / ".next"
        try:
            fd = os.open(hidden, _NEW_FILE, 0o600)
            try:
                if os.write(fd, carried) != len(carried):
                    raise SpoolFull("The disk has no room for a new segment.")  # noqa: TRY301 - one way out of here
                hidden.rename(self._folder / f"{self._segment + 1:08d}.seg")
            except BaseException:
                os.close(fd)
                hidden.unlink(missing_ok=True)
                raise
        except (OSError, SpoolFull):
            self._rotate_at_bytes = self._size_bytes + _ROTATE_AGAIN_BYTES
            return
        self._segment += 1
        self._fd = fd
        self._size_bytes = len(carried)
        self._written_bytes += len(carried)
        self._room_bytes -= len(carried)
        # With very many open attempts the next rotation must still be some way off.
        self._rotate_at_bytes = max(self._settings.segment_bytes, 2 * len(carried))
        self._sync.replace(fd)

    def _carried(self) -> bytes:
        """What is open: OPEN, last CHECKPOINT, and RETRIED where a later attempt of the request was dispatched."""
        parts: list[bytes] = []
        kept: dict[str, int] = {}
        for entry in self._open.values():
            parts += (entry.frame, entry.checkpoint)
            latest = self._retried.get(entry.request_id)
            if latest is None:
                continue
            kept[entry.request_id] = latest
            if latest > entry.attempt:
                parts.append(encode_retried(Retried(entry.request_id, latest)))
        self._retried = kept
        return b"".join(parts)

    def _forked(self) -> None:
        """In a child: the folder and its lock are the parent's."""
        if self._refused_because is not None:
            return
        self._refused_because = "The usage spool belongs to the parent of this process."
        self._gone = True
        for fd in (self._fd, self._lock_fd):
            with contextlib.suppress(OSError):
                os.close(fd)


class _GroupSync:
    """A thread that calls fdatasync at most once per interval, and not at all when nothing was written.

    A call that fails is final: the kernel may have dropped the pages it could not write and say nothing the next
    time, so `fault` stays and the spool takes no more opens.
    """

    def __init__(self, folder: Path, fd: int, interval_s: float, fdatasync: Callable[[int], None]) -> None:
        self.fault: str | None = None
        self._folder = folder
        self._fd = fd
        self._interval_s = interval_s
        self._fdatasync = fdatasync
        self._retired: deque[int] = deque()
        self._new_file = True
        self._dirty = False
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="spool-sync", daemon=True)
        self._thread.start()

    def dirty(self) -> None:
        """Something was written."""
        if not self._dirty:
            self._dirty = True
            self._wake.set()

    def replace(self, fd: int) -> None:
        """Writing goes on in another file; the one before it is synced once more and closed here."""
        self._retired.append(self._fd)
        self._fd = fd
        self._new_file = True
        self.dirty()

    def now(self) -> None:
        """Sync at once, in the calling thread."""
        with self._one_at_a_time:
            try:
                self._sync()
            except OSError as fault:
                self.fault = f"Usage records could not be made durable (fdatasync: {fault.strerror}); restart needed."

    def stop(self) -> None:
        """End the thread, sync once more and close the file."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()
        self.now()
        for fd in (*self._retired, self._fd):
            os.close(fd)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if self._stopping.wait(self._interval_s):
                return
            # In this order: what is written from here on is either in this sync or wakes the next one.
            self._wake.clear()
            if self._stopping.is_set():  # `stop` may have set both between the wait and the clear
                return
            self._dirty = False
            self.now()

    def _sync(self) -> None:
        if self._new_file:
            self._new_file = False
            flush(self._folder)
        while self._retired:
            fd = self._retired[0]
            self._fdatasync(fd)
            self._retired.popleft()
            os.close(fd)
        self._fdatasync(self._fd)


def spool_bytes(spool_dir: Path) -> int:
    """Size of every segment of the node, in bytes. Folders that vanish meanwhile count nothing."""
    total = 0
    with os.scandir(spool_dir) as folders:
        for folder in folders:
            if "~" not in folder.name:
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder.path) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        total += file.stat().st_size
    return total


def _claim(folder: Path) -> tuple[int, int]:
    """Make the folder with its lock held, and its first segment; gives both descriptors.

    It is made under a hidden name and renamed, so that nobody ever sees it without an owner and adopts it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        raise FileExistsError(17, "it is there already, but an incarnation is used once")
    hidden = folder.with_name(f".{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(mode=0o700)
    lock_fd = os.open(hidden / "lock", _NEW_FILE, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fd = os.open(hidden / "00000001.seg", _NEW_FILE, 0o600)
        hidden.rename(folder)
        flush(folder.parent)
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd, fd


def _forget_after_fork(spool: Spool) -> None:
    """A hook of the interpreter cannot be removed again, so it must not keep the spool alive."""
    known = weakref.ref(spool)

    def forget() -> None:
        alive = known()
        if alive is not None:
            alive._forked()

    os.register_at_fork(after_in_child=forget)
