"""What a node's shipper says of itself, in a file that `/readyz`, the metrics and people read.

Owns: the fields of `<spool_dir>/shipper.json`, rewriting it atomically each second (from a thread, so that it is
fresh while a commit is waited for), reading it, and making a sentence of a fault that gives no credential away. Does
not own: the figures (`shipper`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

_log = logging.getLogger(__name__)

STATUS_FILE = "shipper.json"
# A probe asks every few seconds; a second is fresh enough for it and costs one small write.
STATUS_INTERVAL_S = 1.0
# A shipper writes its status each second; a reader takes it for dead after this long.
STATUS_STALE_S = 5.0
# A driver's message is a line; what is longer is a statement with its values.
_LONGEST_SENTENCE = 300
_CREDENTIALS = re.compile(r"://[^@/\s]*@|\b(password|passfile|sslpassword)\s*=\s*\S+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ShipperStatus:
    """What `<spool_dir>/shipper.json` holds, for `/readyz`, the metrics and people. Times are Unix ns."""

    pid: int
    node: str
    updated_ns: int
    started_ns: int
    lag_events: int
    """Finished events that were read and are not committed."""
    lag_bytes: int
    """Bytes of the spool that were not read."""
    lag_s: float
    """Age of the oldest finished event that is not committed; 0 when there is none."""
    open_count: int
    """Attempts that are running."""
    folder_count: int
    committed_event_count: int
    """Since this shipper started, as all counts here."""
    quarantined_count: int
    """Frames that could not be read, events that could not be stored, and events with the id of another one."""
    settled_folder_count: int
    failed_commit_count: int
    last_commit_ns: int | None
    last_error: str | None
    """One sentence without credentials; None since the last commit that worked."""


def read_status(spool_dir: Path) -> ShipperStatus | None:
    """What the node's shipper last reported; None when there is no readable status. Compare `updated_ns` with now."""
    try:
        return ShipperStatus(**orjson.loads((spool_dir / STATUS_FILE).read_bytes()))
    except (OSError, orjson.JSONDecodeError, TypeError):
        return None


def safe_sentence(fault: BaseException) -> str:
    """One sentence of a fault for logs and status: no credentials, no SQL parameters, of bounded length."""
    cause = getattr(fault, "orig", None) or fault
    first = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
    return _CREDENTIALS.sub("://***@", first)[:_LONGEST_SENTENCE].rstrip(".") + "."


@contextlib.contextmanager
def reporting(spool_dir: Path, status: Callable[[], ShipperStatus]) -> Iterator[None]:
    """Rewrite the status file at once, each second, and at the end. `status` is called from another thread."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(STATUS_INTERVAL_S):
            _write(spool_dir, status())

    _write(spool_dir, status())
    thread = threading.Thread(target=report, name="shipper-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _write(spool_dir, status())


def _write(spool_dir: Path, status: ShipperStatus) -> None:
    path = spool_dir / STATUS_FILE
    hidden = path.with_name(f".{STATUS_FILE}.{os.getpid()}")
    try:
        hidden.write_bytes(orjson.dumps(asdict(status), option=orjson.OPT_INDENT_2))
        hidden.replace(path)
    except OSError as fault:
        # A full disk: the old status goes stale, which readers see.
        _log.warning("The status file %s cannot be written: %s.", path, fault.strerror)
