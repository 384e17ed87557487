"""Results of runs that outlive an interruption: one JSON line a run in a folder, by the hash of what decided it.

Owns: the file's form, and what of it can be trusted: a line cut off by a crash is passed over, a run that changed has
another key. Does not own: the keys (`router_play`). Lines are appended by one process only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


class RunStore:
    """Results by key. Mutable: it grows with every run, in memory and in the file."""

    def __init__(self, folder: Path | None) -> None:
        self._results: dict[str, dict[str, object]] = {}
        self._file = None if folder is None else folder / "router_runs.jsonl"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if self._file is not None and self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            return  # the last line of a run that was killed
        if isinstance(entry, dict) and isinstance(entry.get("key"), str) and isinstance(entry.get("figures"), dict):
            self._results[entry["key"]] = entry["figures"]

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str) -> Mapping[str, object] | None:
        """The figures of this run, where it was played."""
        return self._results.get(key)

    def put(self, key: str, run: Mapping[str, object], figures: Mapping[str, object]) -> None:
        """Keep a result; `run` is for whoever reads the file."""
        self._results[key] = dict(figures)
        if self._file is None:
            return
        line = json.dumps({"key": key, "run": run, "figures": figures}, default=str)
        with self._file.open("a+", encoding="utf-8") as file:
            if file.tell() and not self._ends_line():
                file.write("\n")
            file.write(line + "\n")

    def _ends_line(self) -> bool:
        assert self._file is not None
        with self._file.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"
