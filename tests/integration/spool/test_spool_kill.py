"""Writers and shippers that are killed at any moment lose nothing and double nothing (DESIGN 4.3, 5)."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from billing.adapters import sql
from billing.adapters.shipper import Shipper, ShipperSettings, SqlIngest
from billing.adapters.spool_files import spool_folders
from tests.fakes.ingest import FakeIngest
from tests.fakes.spool_processes import Nursery
from tests.fakes.usage import a_close, event_id

# Small segments, so that a run of milliseconds rotates many times.
SEGMENT_BYTES = 24_000


@dataclass
class Truth:
    """What a writer did, as it logged it itself."""

    intended: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    tokens: dict[int, int] = field(default_factory=dict)
    refusal_count: int = 0


@dataclass(frozen=True)
class Stored:
    """What the books say of one event."""

    outcome: str
    estimated: bool
    output_tokens: int | None


def read_truth(path: Path) -> Truth:
    truth = Truth()
    for line in path.read_text().splitlines() if path.exists() else ():
        match line.split():
            case ["i", number]:
                truth.intended.add(int(number))
            case ["o", number]:
                truth.opened.add(int(number))
            case ["c", number]:
                truth.closed.add(int(number))
            case ["k", number, tokens]:
                truth.tokens[int(number)] = int(tokens)
            case ["r"]:
                truth.refusal_count += 1
    return truth


def faults_of(truth: Truth, writer: int, books: dict[str, Stored]) -> list[str]:
    """Everything that is wrong with what the books say of a writer that is dead."""
    faults = []
    stored = {number: books.get(event_id(number, writer)) for number in truth.intended}
    ours = {one for one in books if int(one[:8], 16) == writer}
    if ours - {event_id(number, writer) for number in truth.intended}:
        faults.append("an event that nobody opened")
    for number, found in stored.items():
        if found is None:
            if number in truth.opened:
                faults.append(f"{number} was opened and is lost")
            continue
        if found.outcome == "completed":
            if found.output_tokens != a_close(number).output_tokens or found.estimated:
                faults.append(f"{number} is not what was closed")
            continue
        if number in truth.closed:
            faults.append(f"{number} was closed and is {found}")
        if not found.estimated or found.outcome != "crashed":
            faults.append(f"{number} was left open and is not estimated")
        # The last checkpoint may have been written and not logged.
        if (found.output_tokens or 0) < truth.tokens.get(number, 0):
            faults.append(f"{number} has fewer tokens than its last checkpoint")
        if (found.output_tokens or 0) > truth.tokens.get(number, number % 7) + 64:
            faults.append(f"{number} has more tokens than were delivered")
    return faults


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.fixture(scope="module")
def empty_books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with the tables, to be copied."""
    path = tmp_path_factory.mktemp("books") / "empty.db"
    engine = sql.engine(f"sqlite:///{path}")
    sql.upgrade(engine)
    with sql.write(engine) as connection:
        connection.exec_driver_sql("SELECT 1")
    engine.dispose()
    with sqlite3.connect(path) as connection_:
        connection_.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection_.close()
    return path


def read_books(path: Path) -> tuple[dict[str, Stored], int, int, int]:
    """Events by id; how many rows there are; refusals; quarantined."""
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute("SELECT event_id, outcome, estimated, output_tokens FROM usage_event").fetchall()
        refusals = connection.execute("SELECT COALESCE(SUM(refusal_count), 0) FROM refusal_minute").fetchone()[0]
        quarantined = connection.execute("SELECT COUNT(*) FROM quarantine").fetchone()[0]
        rolled = connection.execute("SELECT COALESCE(SUM(event_count), 0) FROM usage_rollup").fetchone()[0]
    finally:
        connection.close()
    assert rolled == len(rows)
    return {row[0]: Stored(row[1], bool(row[2]), row[3]) for row in rows}, len(rows), refusals, quarantined


def start_writers(nursery: Nursery, root: Path, seed: int, count: int) -> dict[int, int]:
    """Writer number -> pid."""
    return {
        writer: nursery.start(
            "writer",
            spool_dir=str(root / "spool"),
            truth_file=str(root / f"truth{writer}"),
            writer=writer,
            seed=seed * 100 + writer,
            segment_bytes=SEGMENT_BYTES,
        )
        for writer in range(count)
    }


def run_writer_kill(nursery: Nursery, root: Path, seed: int) -> None:
    dice = random.Random(seed)
    writers = start_writers(nursery, root, seed, 1)
    time.sleep(dice.uniform(0.0, 0.06))
    for pid in writers.values():
        nursery.kill(pid)
    fake = FakeIngest(lambda _batch: dice.choice([None, None, "after"]))
    settings = ShipperSettings(root / "spool", "node-1", batch_event_count=dice.choice([1, 50, 1_000]))
    for _ in range(1_000):
        try:
            Shipper(settings, fake).run_once()
            break
        except Exception:
            continue
    truth = read_truth(root / "truth0")
    books = {
        one: Stored(event.close.outcome, event.close.estimated, event.close.output_tokens)
        for one, event in fake.events.items()
    }
    assert faults_of(truth, 0, books) == []
    assert not fake.conflicts
    assert not fake.quarantined
    assert truth.refusal_count <= sum(fake.refusals.values()) <= truth.refusal_count + 1
    assert not spool_folders(root / "spool")


def run_everything_killed(nursery: Nursery, root: Path, empty_books: Path, seed: int) -> None:
    dice = random.Random(seed)
    books_file = root / "books.db"
    shutil.copyfile(empty_books, books_file)
    (root / "spool").mkdir()
    url = f"sqlite:///{books_file}"
    shipping = {"spool_dir": str(root / "spool"), "database_url": url, "batch_event_count": dice.choice([1, 20, 500])}
    writers = start_writers(nursery, root, seed, 2)
    shipper = nursery.start("shipper", **shipping)
    for _ in range(dice.randint(1, 4)):
        time.sleep(dice.uniform(0.0, 0.05))
        if writers and dice.random() < 0.4:
            nursery.kill(writers.pop(dice.choice(list(writers))))
        nursery.kill(shipper)
        shipper = nursery.start("shipper", **shipping)
    for pid in writers.values():
        nursery.kill(pid)
    time.sleep(dice.uniform(0.0, 0.03))
    status = nursery.kill(shipper, dice.choice([signal.SIGKILL, signal.SIGTERM]))
    # SIGTERM before the child came to wait for signals ends it as Python does.
    assert status in {0, signal.SIGKILL, signal.SIGTERM}
    engine = sql.engine(url)
    try:
        Shipper(ShipperSettings(root / "spool", "node-1"), SqlIngest(engine)).run_once()
    finally:
        engine.dispose()
    books, row_count, refusal_count, quarantined_count = read_books(books_file)
    truths = [read_truth(root / f"truth{writer}") for writer in range(2)]
    assert [fault for writer, truth in enumerate(truths) for fault in faults_of(truth, writer, books)] == []
    assert row_count == len(books)
    assert quarantined_count == 0
    logged = sum(truth.refusal_count for truth in truths)
    assert logged <= refusal_count <= logged + 2
    assert not spool_folders(root / "spool")


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_writer_loses_nothing(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    run_writer_kill(nursery, tmp_path, seed)


@pytest.mark.parametrize("seed", range(10))
def test_killed_writers_and_shippers_lose_and_double_nothing(
    nursery: Nursery, tmp_path: Path, empty_books: Path, seed: int
) -> None:
    run_everything_killed(nursery, tmp_path, empty_books, seed)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_hundreds_of_kills_lose_and_double_nothing(nursery: Nursery, tmp_path: Path, empty_books: Path) -> None:
    for seed in range(1_000, 1_200):
        root = tmp_path / str(seed)
        root.mkdir()
        run_writer_kill(nursery, root, seed)
        shutil.rmtree(root)
        root.mkdir()
        run_everything_killed(nursery, root, empty_books, seed)
        shutil.rmtree(root)


def test_the_check_sees_what_it_must_see() -> None:
    """A lost event, a wrong close, an orphan that is not estimated, too many or too few tokens, an invented event."""
    truth = Truth({1, 2, 3}, {1, 2}, {1}, {2: 64})
    good = {
        event_id(1): Stored("completed", False, a_close(1).output_tokens),
        event_id(2): Stored("crashed", True, 64),
    }
    assert faults_of(truth, 0, good) == []
    without_one = {event_id(1): good[event_id(1)]}
    for wrong in (
        without_one,
        {**good, event_id(1): Stored("crashed", True, 1)},
        {**good, event_id(1): Stored("completed", False, 1)},
        {**good, event_id(2): Stored("crashed", False, 64)},
        {**good, event_id(2): Stored("crashed", True, 63)},
        {**good, event_id(2): Stored("crashed", True, 64 + 65)},
        {**good, event_id(9): Stored("crashed", True, 1)},
    ):
        assert faults_of(truth, 0, wrong)
