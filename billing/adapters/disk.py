"""What must be on the disk before the next step may be taken.

Owns: flushing one file or folder by its path. Does not own: when that is needed (the spool, the marks and the secrets
say so themselves), or the descriptors of files that are still written. A new name is only safe once its folder is
flushed as well.
"""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """fsync a file or a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
