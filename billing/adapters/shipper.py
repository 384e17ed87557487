"""The shipper: the one process of a node that brings usage from the spool into the database.

Owns: which folders are read and when, batches, retries while the database is down, the status file, and the order in
which things become final (commit, then delete). Does not own: reading a folder (`spool_files`), joining records
(`billing.spool_format`), or rating and storing (`ingest`).

A batch is committed together with the places in the spool up to which it reaches, and only what is committed is ever
deleted, so the shipper may be killed at any moment: its successor reads on from what the database says. An event that
comes twice is the same row. There is no queue between the gateway and the database but the files themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from billing.adapters import sql
from billing.adapters.ingest import Ingest, IngestBatch, IngestReport, SpoolOffset
from billing.adapters.shipper_status import ShipperStatus, reporting, safe_sentence
from billing.adapters.spool_files import Gathered, SpoolFolder, clear_hidden, segments, spool_folders
from billing.adapters.tables import SpoolOffsetRow, table
from billing.errors import BillingError

_log = logging.getLogger(__name__)

# A batch is one transaction: large enough that a commit's fixed cost is shared, small enough to be retried whole.
BATCH_EVENT_COUNT = 1_000
# An event waits at most this long for company.
BATCH_WAIT_S = 0.2
# How often a spool in which nothing was written is looked at.
IDLE_POLL_S = 0.05
# How often folders that appeared are looked for.
FOLDERS_POLL_S = 0.25
# While the database does not answer: doubled from the first to the second, then jittered to half and more of it.
RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 30.0
# After SIGTERM, how long what is already readable may take to be committed.
DRAIN_TIMEOUT_S = 10.0
STANDBY_POLL_S = 0.5
# How often the database learns that nothing came, up to when its books are complete.
WATERMARK_INTERVAL_S = 5.0
# How soon the thread that waits for signals notices that it is no longer needed.
SIGNAL_POLL_S = 0.1
LOCK_FILE = "shipper.lock"


class IngestPort(Protocol):
    """The database, as the shipper needs it. Both methods raise when it does not answer."""

    def write(self, batch: IngestBatch) -> IngestReport:
        """Store all of it or none, and tell what became of the events. Those that are there already, and refusals read
        before the stored offset, are left out: a batch whose answer was lost is sent again as it is.
        """

    def offset(self, node: str, incarnation: str) -> SpoolOffset | None:
        """Up to where this writer's spool is committed; None: nothing is."""


@dataclass(frozen=True, slots=True)
class ShipperSettings:
    """Where the spool is, and the times above where a test or an operator needs others."""

    spool_dir: Path
    node: str
    batch_event_count: int = BATCH_EVENT_COUNT
    batch_wait_s: float = BATCH_WAIT_S
    idle_poll_s: float = IDLE_POLL_S
    retry_first_s: float = RETRY_FIRST_S
    retry_longest_s: float = RETRY_LONGEST_S
    drain_timeout_s: float = DRAIN_TIMEOUT_S


class SqlIngest:
    """The port on a real database."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._ingest = Ingest(engine)

    def write(self, batch: IngestBatch) -> IngestReport:
        """One transaction."""
        return self._ingest.write(batch)

    def offset(self, node: str, incarnation: str) -> SpoolOffset | None:
        """What the last transaction for this writer stored."""
        rows = table(SpoolOffsetRow)
        wanted = sa.select(rows.c.segment, rows.c.offset_bytes).where(
            rows.c.node == node, rows.c.incarnation == incarnation
        )
        with sql.read(self._engine) as connection:
            found = connection.execute(wanted).first()
        return SpoolOffset(node, incarnation, found.segment, found.offset_bytes) if found else None


class Shipper:
    """Reads all folders and commits. One thread calls `run` or `run_once`; any thread may call `stop` and `status`."""

    def __init__(self, settings: ShipperSettings, ingest: IngestPort, stopping: threading.Event | None = None) -> None:
        self._settings = settings
        self._ingest = ingest
        self._stopping = stopping or threading.Event()
        self._folders: dict[str, SpoolFolder] = {}
        self._turn = 0
        self._gathered = Gathered()
        self._gathered_at_s: float | None = None
        self._folders_due_s = self._watermark_due_s = 0.0
        self._started_ns = time.time_ns()
        self._committed_event_count = self._quarantined_count = 0
        self._settled_folder_count = self._failed_commit_count = 0
        self._last_commit_ns: int | None = None
        self._last_error: str | None = None

    def stop(self) -> None:
        """Ask `run` to commit what is readable and to return."""
        self._stopping.set()

    def run(self) -> None:
        """Ship until `stop`; then drain for at most `drain_timeout_s`. A database that is down is waited for."""
        with self._serving():
            while not self._stopping.is_set():
                self._look_for_folders()
                moved = self._pull()
                if self._is_due():
                    self._commit()
                elif not moved:
                    self._rest()
            try:
                self._ship_what_is_there(time.monotonic() + self._settings.drain_timeout_s)
            except Exception as fault:
                self._note_fault(fault, "The last batch could not be committed; the next shipper finds it in the spool")

    def run_once(self) -> ShipperStatus:
        """Ship everything that is in the spool now, adopt what was left over, and tell what was shipped and is left.

        Raises what the database raised, or BillingError when a folder cannot be read: then nothing was lost, and a
        later run ships it.
        """
        with self._serving():
            self._ship_what_is_there(math.inf)
            done = self.status()
        if done.last_error is not None:
            raise BillingError(done.last_error)
        return done

    def status(self) -> ShipperStatus:
        """The figures of this moment."""
        folders = list(self._folders.values())
        waiting = self._gathered.events
        now_ns = time.time_ns()
        oldest_ns = waiting[0].close.ended_ns if waiting else now_ns
        return ShipperStatus(
            pid=os.getpid(),
            node=self._settings.node,
            updated_ns=now_ns,
            started_ns=self._started_ns,
            lag_events=len(waiting),
            lag_bytes=sum(folder.unread_bytes() for folder in folders),
            lag_s=round(max(0, now_ns - oldest_ns) / 1e9, 3),
            open_count=sum(folder.open_count for folder in folders),
            folder_count=len(folders),
            committed_event_count=self._committed_event_count,
            quarantined_count=self._quarantined_count,
            settled_folder_count=self._settled_folder_count,
            failed_commit_count=self._failed_commit_count,
            last_commit_ns=self._last_commit_ns,
            last_error=self._last_error,
        )

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """Report while the block runs; let go of every folder at its end. What was not committed is read again."""
        try:
            with reporting(self._settings.spool_dir, self.status):
                yield
        finally:
            for folder in self._folders.values():
                folder.release()
            self._folders.clear()
            self._gathered, self._gathered_at_s = Gathered(), None

    def _ship_what_is_there(self, deadline_s: float) -> None:
        """Read and commit up to where the spool reaches now; a writer that is gone is read to its very end.

        A writer that is busy is not followed for ever. Raises what the database raised.
        """
        self._find_folders()
        goals = {folder: folder.read_bytes + folder.unread_bytes() for folder in self._folders.values()}
        moved = True
        while moved and time.monotonic() < deadline_s:
            moved = self._pull()
            if self._is_full() or not moved:
                self._commit_or_raise()
            if all(one.finished or (not one.adopted and one.read_bytes >= goal) for one, goal in goals.items()):
                break
        self._commit_or_raise()

    def _is_full(self) -> bool:
        return len(self._gathered.events) >= self._settings.batch_event_count

    def _is_due(self) -> bool:
        now_s = time.monotonic()
        if self._gathered_at_s is None:
            return bool(self._folders) and now_s >= self._watermark_due_s
        return self._is_full() or now_s - self._gathered_at_s >= self._settings.batch_wait_s

    def _rest(self) -> None:
        """Nothing to read: wait a little, but not beyond the moment at which a batch is due."""
        if self._gathered_at_s is None:
            # Segments of which nothing is owed to the database can go as soon as the reader has left them.
            self._delete_committed()
        self._stopping.wait(min(self._settings.idle_poll_s, self._settings.batch_wait_s))

    def _pull(self) -> bool:
        """Read a portion of each folder until a batch is full; gives whether there was anything to read.

        Whose turn is first goes round, so that no busy folder keeps the others waiting.
        """
        folders = list(self._folders.values())
        self._turn += 1
        moved = False
        for place in range(len(folders)):
            if self._is_full():
                return True
            folder = folders[(place + self._turn) % len(folders)]
            try:
                moved = folder.pull(self._gathered) or moved
            except OSError as fault:
                self._note_fault(fault, f"The spool folder {folder.path.name} cannot be read")
        owing = self._gathered or any(folder.owes_offset for folder in folders)
        if owing and self._gathered_at_s is None:
            self._gathered_at_s = time.monotonic()
        return moved

    def _look_for_folders(self) -> None:
        """Add the folders that appeared, when it is time; a database that does not answer is asked again later."""
        now_s = time.monotonic()
        if now_s < self._folders_due_s:
            return
        self._folders_due_s = now_s + FOLDERS_POLL_S
        try:
            self._find_folders()
        except Exception as fault:
            self._note_fault(fault, "The database does not say up to where the spool is committed")
            self._folders_due_s = now_s + self._settings.retry_first_s

    def _find_folders(self) -> None:
        """Add the folders that appeared, each to be read on from where the database stands."""
        clear_hidden(self._settings.spool_dir)
        for path in spool_folders(self._settings.spool_dir):
            if path.name not in self._folders:
                node, _, incarnation = path.name.partition("~")
                self._folders[path.name] = SpoolFolder(path, self._ingest.offset(node, incarnation))
                if not (path / "lock").exists() and segments(path):
                    _log.warning("%s has lost its lock file: it is read, and never taken for left over.", path)

    def _commit(self) -> None:
        """Commit what was gathered, however long the database is down."""
        wait_s = self._settings.retry_first_s
        while not self._try_commit() and not self._stopping.is_set():
            # Jitter: the nodes of a cluster must not all come back in the same moment.
            self._stopping.wait(wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            wait_s = min(2 * wait_s, self._settings.retry_longest_s)

    def _try_commit(self) -> bool:
        try:
            self._commit_or_raise()
        except Exception as fault:
            self._failed_commit_count += 1
            self._note_fault(fault, "A batch could not be committed")
            return False
        return True

    def _commit_or_raise(self) -> None:
        gathered = self._gathered
        now_s = time.monotonic()
        folders = list(self._folders.values())
        owing = folders if now_s >= self._watermark_due_s else [folder for folder in folders if folder.owes_offset]
        if gathered or owing:
            offsets = tuple(folder.offset() for folder in owing)
            report = self._ingest.write(
                IngestBatch(tuple(gathered.events), tuple(gathered.refusals), tuple(gathered.quarantined), offsets)
            )
            for folder in owing:
                folder.committed()
            self._note_commit(gathered, report)
            if owing is folders:
                self._watermark_due_s = now_s + WATERMARK_INTERVAL_S
        self._gathered = Gathered()
        self._gathered_at_s = None
        self._delete_committed()

    def _note_commit(self, gathered: Gathered, report: IngestReport) -> None:
        self._committed_event_count += len(gathered.events)
        # What could not be read, what could not be stored, and what has the id of another event.
        self._quarantined_count += len(gathered.quarantined) + report.quarantined + report.conflicting
        self._last_commit_ns = time.time_ns()
        if self._last_error is not None:
            _log.info("The shipper commits again.")
            self._last_error = None

    def _delete_committed(self) -> None:
        """Called when nothing that was read is waiting for a commit."""
        for name, folder in list(self._folders.items()):
            try:
                folder.delete_committed()
            except OSError as fault:
                self._note_fault(fault, f"The spool folder {name} cannot be cleaned")
                continue
            if folder.finished:
                del self._folders[name]
                self._settled_folder_count += 1

    def _note_fault(self, fault: Exception, what: str) -> None:
        sentence = f"{what}: {safe_sentence(fault)}"
        if sentence != self._last_error:
            _log.error("%s", sentence)
        self._last_error = sentence


@contextlib.contextmanager
def shipper_lock(spool_dir: Path, stopping: threading.Event, *, wait: bool) -> Iterator[bool]:
    """Hold the node's shipper lock; gives False when it was not got (`stopping`, or it is held and not `wait`).

    The folder is the gateways': it is not made here. Raises BillingError when it is not there.
    """
    if not spool_dir.is_dir():
        raise BillingError(
            f"There is no spool folder {spool_dir}; expected the one that `inferplane serve` makes in its data folder."
        )
    fd = os.open(spool_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        held = _try_lock(fd)
        if not held and wait:
            _log.info("Another shipper serves %s; this one stands by.", spool_dir)
        while not held and wait and not stopping.wait(STANDBY_POLL_S):
            held = _try_lock(fd)
        yield held
    finally:
        os.close(fd)


def run(spool_dir: Path, database_url: str, node: str = "", once: bool = False) -> ShipperStatus:
    """The shipper process: `inferplane ship`. Returns after SIGTERM or SIGINT, or, with `once`, when all is shipped.

    Gives the last figures. A second shipper of a node stands by until the first one is gone. Raises BillingError when
    there is no such folder, and with `once` where it cannot do its work: another shipper runs, the tables are outdated,
    the database does not answer.
    """
    stopping = threading.Event()
    engine = sql.engine(database_url)
    settings = ShipperSettings(spool_dir, node or socket.gethostname())
    try:
        with stopped_by_signals(stopping), shipper_lock(spool_dir, stopping, wait=not once) as held:
            shipper = Shipper(settings, SqlIngest(engine), stopping)
            if once:
                if not held:
                    raise BillingError(f"Another shipper serves {spool_dir}; it ships what is there.")
                sql.require_current(engine)
                return shipper.run_once()
            if held:
                shipper.run()
            return shipper.status()
    finally:
        engine.dispose()


@contextlib.contextmanager
def stopped_by_signals(stopping: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stopping`, from a thread that waits for them.

    A handler would run between two steps of the main thread, perhaps while that holds the event's lock: a deadlock.
    """
    wanted = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    done = threading.Event()

    def wait() -> None:
        while not done.is_set():
            info = signal.sigtimedwait(wanted, SIGNAL_POLL_S)
            if info is not None and info.si_signo in wanted:  # after a SIGSTOP it may tell of a signal that never was
                stopping.set()

    thread = threading.Thread(target=wait, name="shipper-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
