"""The shipper on real folders: what it commits, deletes, adopts, retries, keeps aside and reports."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from billing.adapters import sql
from billing.adapters.ingest import IngestBatch, SpoolOffset
from billing.adapters.shipper import LOCK_FILE, Shipper, ShipperSettings, run, shipper_lock
from billing.adapters.shipper_status import STATUS_FILE, read_status, safe_sentence
from billing.adapters.spool_files import SpoolFolder, segments
from billing.errors import BillingError
from billing.spool_format import encode_checkpoint, encode_close, encode_end, encode_open, encode_refusal
from billing.usage_event import Outcome, Refusal
from controlplane.adapters.spool import Spool, SpoolSettings
from tests.fakes.ingest import FakeIngest, IngestFault
from tests.fakes.usage import START_NS, a_checkpoint, a_close, an_open, event_id


def settings(spool_dir: Path) -> ShipperSettings:
    return ShipperSettings(
        spool_dir, "node-1", batch_wait_s=0.01, idle_poll_s=0.005, retry_first_s=0.01, retry_longest_s=0.05
    )


def a_dead_folder(spool_dir: Path, *contents: bytes, name: str = "node-1~dead", first_segment: int = 1) -> Path:
    """What a writer that was killed leaves behind."""
    folder = spool_dir / name
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    for number, content in enumerate(contents, start=first_segment):
        (folder / f"{number:08d}.seg").write_bytes(content)
    return folder


@contextlib.contextmanager
def a_live_spool(spool_dir: Path, segment_bytes: int = 1 << 24) -> Iterator[Spool]:
    spool = Spool(SpoolSettings(spool_dir, "node-1", "live", 1 << 30, segment_bytes))
    try:
        yield spool
    finally:
        # As a kill leaves it: nothing is written, the lock is free.
        spool._sync.stop()
        os.close(spool._lock_fd)
        spool._refused_because = "dead"


@contextlib.contextmanager
def running(shipper: Shipper) -> Iterator[Shipper]:
    thread = threading.Thread(target=shipper.run)
    thread.start()
    try:
        yield shipper
    finally:
        shipper.stop()
        thread.join(20)
        assert not thread.is_alive()


def eventually(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s, "It did not come to hold within 10 s."
        time.sleep(0.005)


def pair(number: int) -> bytes:
    return encode_open(an_open(number)) + encode_close(a_close(number))


def test_a_live_writer_is_followed_and_its_running_attempts_are_left_alone(tmp_path: Path) -> None:
    fake = FakeIngest()
    with a_live_spool(tmp_path) as spool, running(Shipper(settings(tmp_path), fake)) as shipper:
        for number in range(50):
            spool.open(an_open(number))
        for number in range(40):
            spool.close(a_close(number))
        eventually(lambda: len(fake.events) == 40)
        assert all(event.close.outcome is Outcome.COMPLETED for event in fake.events.values())
        assert shipper.status().open_count == 10
        spool.close(a_close(45))
        eventually(lambda: len(fake.events) == 41)
    assert spool.folder.exists()


def test_a_folder_whose_writer_died_is_adopted_settled_and_removed(tmp_path: Path) -> None:
    fake = FakeIngest()
    content = pair(1) + encode_open(an_open(2)) + encode_checkpoint(a_checkpoint(2)) + encode_open(an_open(3))
    folder = a_dead_folder(tmp_path, content + encode_close(a_close(3))[:30])
    Shipper(settings(tmp_path), fake).run_once()
    closes = {number: fake.events[event_id(number)].close for number in (1, 2, 3)}
    assert closes[1] == a_close(1)
    assert (closes[2].outcome, closes[2].estimated, closes[2].output_tokens) == (Outcome.CRASHED, True, 64)
    assert (closes[3].outcome, closes[3].estimated, closes[3].output_tokens) == (Outcome.CRASHED, True, None)
    assert not fake.quarantined
    assert not folder.exists()
    assert fake.offsets["node-1", "dead"].finished


def test_a_folder_of_another_node_name_is_adopted_under_that_name(tmp_path: Path) -> None:
    fake = FakeIngest()
    a_dead_folder(tmp_path, pair(1), name="old-host~x")
    Shipper(settings(tmp_path), fake).run_once()
    assert list(fake.events) == [event_id(1)]
    assert ("old-host", "x") in fake.offsets


def test_a_segment_is_deleted_only_when_all_of_it_is_committed(tmp_path: Path) -> None:
    fake = FakeIngest()
    fake.is_down = True
    with a_live_spool(tmp_path, segment_bytes=3_000) as spool, running(Shipper(settings(tmp_path), fake)):
        spool.open(an_open(0))
        for number in range(1, 40):
            spool.open(an_open(number))
            spool.close(a_close(number))
        before = segments(spool.folder)
        assert len(before) > 4
        time.sleep(0.1)
        assert segments(spool.folder) == before
        fake.is_down = False
        eventually(lambda: segments(spool.folder) == before[-1:])
        assert len(fake.events) == 39


def test_the_status_counts_what_went_to_the_quarantine_at_the_reader_and_at_the_books(
    tmp_path: Path, sqlite_url: str
) -> None:
    sql.upgrade(sqlite_url)
    unstorable = encode_open(an_open(3)._replace(endpoint="a\x00b")) + encode_close(a_close(3))
    another = encode_open(an_open(1)) + encode_close(a_close(1)._replace(output_tokens=7))
    a_dead_folder(tmp_path / "first", pair(1) + pair(2) + unstorable)
    run(tmp_path / "first", sqlite_url, "node-1", once=True)
    status = read_status(tmp_path / "first")
    assert status is not None
    assert (status.committed_event_count, status.quarantined_count) == (3, 1)
    # A frame that is damaged, and an event with the id of another.
    a_dead_folder(tmp_path / "second", b"?" * 40 + another, name="node-1~other")
    run(tmp_path / "second", sqlite_url, "node-1", once=True)
    status = read_status(tmp_path / "second")
    assert status is not None
    engine = sql.engine(sqlite_url)
    with sql.read(engine) as connection:
        kinds = connection.exec_driver_sql("SELECT kind, count(*) FROM quarantine GROUP BY kind ORDER BY kind").all()
    engine.dispose()
    assert [tuple(row) for row in kinds] == [("conflict", 1), ("event", 1), ("frame", 1)]
    assert status.quarantined_count == 2


def test_a_new_shipper_reads_on_from_what_the_database_says(tmp_path: Path) -> None:
    fake = FakeIngest()
    with a_live_spool(tmp_path) as spool:
        for number in range(10):
            spool.open(an_open(number))
        for number in range(5):
            spool.close(a_close(number))
        Shipper(settings(tmp_path), fake).run_once()
        assert len(fake.events) == 5
        for number in range(5, 8):
            spool.close(a_close(number))
        Shipper(settings(tmp_path), fake).run_once()
        assert len(fake.events) == 8
        assert fake.duplicate_count == 0


def test_a_shipper_killed_between_commit_and_deletion_doubles_nothing(tmp_path: Path) -> None:
    fake = FakeIngest()
    contents = [pair(1) + encode_open(an_open(2)), encode_open(an_open(2)) + pair(3)]
    a_dead_folder(tmp_path, *contents)
    Shipper(settings(tmp_path), fake).run_once()
    events = dict(fake.events)
    folder = a_dead_folder(tmp_path, *contents)
    Shipper(settings(tmp_path), fake).run_once()
    assert fake.events == events
    assert not fake.conflicts
    assert not folder.exists()


@pytest.mark.parametrize("left", ["lock", "nothing"])
def test_an_interrupted_removal_is_ended(tmp_path: Path, left: str) -> None:
    folder = a_dead_folder(tmp_path)
    if left == "nothing":
        (folder / "lock").unlink()
    Shipper(settings(tmp_path), FakeIngest()).run_once()
    assert not folder.exists()


def test_a_folder_that_lost_its_lock_is_not_adopted(tmp_path: Path) -> None:
    """It may have a writer: settling what runs would bill it twice."""
    folder = a_dead_folder(tmp_path, pair(1) + encode_open(an_open(2)))
    (folder / "lock").unlink()
    fake = FakeIngest()
    Shipper(settings(tmp_path), fake).run_once()
    assert list(fake.events) == [event_id(1)]
    assert folder.exists()


def test_a_database_that_is_down_loses_nothing_and_is_reported_without_credentials(tmp_path: Path) -> None:
    fake = FakeIngest()
    with a_live_spool(tmp_path) as spool, running(Shipper(settings(tmp_path), fake)) as shipper:
        spool.open(an_open(1))
        eventually(lambda: bool(fake.offsets))
        fake.is_down = True
        spool.close(a_close(1))
        eventually(lambda: shipper.status().failed_commit_count >= 3)
        status = shipper.status()
        assert status.lag_events == 1
        assert status.lag_s > 0
        assert status.last_error is not None
        assert "refused" in status.last_error
        assert "secret" not in status.last_error
        spool.open(an_open(2))
        eventually(lambda: shipper.status().lag_bytes > 0)
        fake.is_down = False
        eventually(lambda: len(fake.events) == 1)
        eventually(lambda: shipper.status().last_error is None)


def test_an_answer_that_was_lost_after_the_commit_counts_nothing_twice(tmp_path: Path) -> None:
    answers = iter(["after"] * 3)
    fake = FakeIngest(lambda batch: next(answers, None) if batch.events else None)
    refusal = encode_refusal(Refusal("org", "proj", "llama", "rate_limit", START_NS, 7))
    a_dead_folder(tmp_path, pair(1) + refusal)
    with running(Shipper(settings(tmp_path), fake)):
        eventually(lambda: not (tmp_path / "node-1~dead").exists())
    assert len(fake.events) == 1
    assert sum(fake.refusals.values()) == 7


def test_many_orphans_survive_failing_commits(tmp_path: Path) -> None:
    tries = iter(range(10_000))
    fake = FakeIngest(lambda _batch: ["before", "after", None][next(tries) % 3])
    a_dead_folder(tmp_path, b"".join(encode_open(an_open(number)) for number in range(2_500)))
    with running(Shipper(settings(tmp_path), fake)):
        eventually(lambda: not (tmp_path / "node-1~dead").exists())
    assert len(fake.events) == 2_500
    assert not fake.conflicts
    assert max(len(batch.events) for batch in fake.batches) < 2_000


def test_damaged_bytes_are_kept_and_cost_only_themselves(tmp_path: Path) -> None:
    fake = FakeIngest()
    broken = bytearray(encode_open(an_open(2)))
    broken[40] ^= 1
    a_dead_folder(tmp_path, pair(1) + bytes(broken) + encode_close(a_close(2)) + pair(3))
    Shipper(settings(tmp_path), fake).run_once()
    assert set(fake.events) == {event_id(1), event_id(3)}
    kept = sorted((one.raw, one.kind, one.node, one.incarnation) for one in fake.quarantined.values())
    assert kept == sorted((raw, "frame", "node-1", "dead") for raw in (bytes(broken), encode_close(a_close(2))))
    assert all("segment 1, byte" in one.reason for one in fake.quarantined.values())


def test_damage_does_not_stop_a_live_writer_from_being_followed(tmp_path: Path) -> None:
    fake = FakeIngest()
    with a_live_spool(tmp_path) as spool, running(Shipper(settings(tmp_path), fake)):
        spool.open(an_open(1))
        with (spool.folder / "00000001.seg").open("ab") as file:
            file.write(b"\xffUrubbish" * 20)
        spool.close(a_close(1))
        eventually(lambda: len(fake.events) == 1)
        eventually(lambda: len(fake.quarantined) == 1)


def test_segments_that_begin_late_are_read_from_the_first_that_is_there(tmp_path: Path) -> None:
    fake = FakeIngest()
    fake.write(IngestBatch(offsets=[SpoolOffset("node-1", "dead", 4, 999)]))
    a_dead_folder(tmp_path, encode_open(an_open(1)), pair(2) + encode_close(a_close(1)) + encode_end(), first_segment=7)
    Shipper(settings(tmp_path), fake).run_once()
    assert set(fake.events) == {event_id(1), event_id(2)}
    assert not fake.quarantined


def test_folders_take_turns(tmp_path: Path) -> None:
    fake = FakeIngest()
    for writer in range(3):
        frames = (
            encode_open(an_open(number, writer)) + encode_close(a_close(number, writer)) for number in range(3_000)
        )
        a_dead_folder(tmp_path, b"".join(frames), name=f"node-1~w{writer}")
    Shipper(ShipperSettings(tmp_path, "node-1", batch_event_count=100), fake).run_once()
    assert len(fake.events) == 9_000
    first = {int(event.event_id[:8], 16) for batch in fake.batches[:4] for event in batch.events}
    assert first == {0, 1, 2}


def test_the_books_are_told_up_to_when_they_are_complete(tmp_path: Path) -> None:
    fake = FakeIngest()
    with a_live_spool(tmp_path) as spool:
        Shipper(settings(tmp_path), fake).run_once()
        idle = fake.offsets["node-1", "live"].complete_to_ns
        assert idle is not None
        assert abs(time.time_ns() - idle) < 60 * 10**9
        assert idle <= time.time_ns() - 10**9
        spool.open(an_open(1))
        spool.checkpoint(a_checkpoint(1, at_ns=START_NS + 5))
        Shipper(settings(tmp_path), fake).run_once()
        # Should its writer die now, the attempt will have ended at its checkpoint.
        assert fake.offsets["node-1", "live"].complete_to_ns == START_NS + 5


def test_once_raises_what_the_database_raised_and_a_later_run_ships_it(tmp_path: Path) -> None:
    fake = FakeIngest()
    fake.is_down = True
    a_dead_folder(tmp_path, pair(1))
    with pytest.raises(IngestFault):
        Shipper(settings(tmp_path), fake).run_once()
    fake.is_down = False
    Shipper(settings(tmp_path), fake).run_once()
    assert len(fake.events) == 1


def test_a_stop_commits_what_is_there(tmp_path: Path) -> None:
    fake = FakeIngest()
    slow = ShipperSettings(tmp_path, "node-1", batch_wait_s=60, idle_poll_s=0.01)
    with a_live_spool(tmp_path) as spool:
        with running(Shipper(slow, fake)):
            for number in range(20):
                spool.open(an_open(number))
                spool.close(a_close(number))
        assert len(fake.events) == 20


def test_a_stop_while_the_database_is_down_does_not_hang(tmp_path: Path) -> None:
    fake = FakeIngest()
    fake.is_down = True
    a_dead_folder(tmp_path, pair(1))
    started_s = time.monotonic()
    with running(Shipper(ShipperSettings(tmp_path, "node-1"), fake)) as shipper:
        eventually(lambda: shipper.status().last_error is not None)
    assert time.monotonic() - started_s < 10
    assert (tmp_path / "node-1~dead").exists()


def test_the_status_file_says_what_a_probe_needs(tmp_path: Path) -> None:
    fake = FakeIngest()
    assert read_status(tmp_path) is None
    with a_live_spool(tmp_path) as spool, running(Shipper(settings(tmp_path), fake)):
        spool.open(an_open(1))
        spool.close(a_close(1))
        eventually(lambda: (status := read_status(tmp_path)) is not None and status.committed_event_count == 1)
    status = read_status(tmp_path)
    assert status is not None
    assert status.pid == os.getpid()
    assert status.last_commit_ns is not None
    assert status.last_error is None
    assert set(json.loads((tmp_path / STATUS_FILE).read_text())) >= {"pid", "lag_events", "lag_bytes", "lag_s"}
    (tmp_path / STATUS_FILE).write_text("{")
    assert read_status(tmp_path) is None


def test_one_shipper_serves_a_node_and_a_second_stands_by(tmp_path: Path) -> None:
    stopping = threading.Event()
    taken = threading.Event()

    def stand_by() -> None:
        with shipper_lock(tmp_path, stopping, wait=True) as held:
            if held:
                taken.set()

    with shipper_lock(tmp_path, threading.Event(), wait=False) as first:
        assert first
        thread = threading.Thread(target=stand_by)
        thread.start()
        with shipper_lock(tmp_path, threading.Event(), wait=False) as second:
            assert not second
        assert not taken.wait(0.1)
    assert taken.wait(5)
    thread.join()
    assert (tmp_path / LOCK_FILE).exists()


def test_a_hidden_folder_of_a_writer_that_never_came_up_is_cleared(tmp_path: Path) -> None:
    old, young = tmp_path / ".node-1~old", tmp_path / ".node-1~young"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (1, 1))
    Shipper(settings(tmp_path), FakeIngest()).run_once()
    assert not old.exists()
    assert young.exists()


def test_a_folder_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="NODE~INCARNATION"):
        SpoolFolder(Path("/tmp/other"), None)


def test_the_process_ships_a_left_over_spool_into_a_real_database_once(tmp_path: Path, sql_url: str) -> None:
    sql.upgrade(sql_url)
    refusal = encode_refusal(Refusal("org", "proj", "llama", "rate_limit", START_NS, 7))
    a_dead_folder(tmp_path / "spool", pair(1) + refusal + encode_open(an_open(2)) + b"rubbish" * 3 + pair(3))
    run(tmp_path / "spool", sql_url, "node-1", once=True)
    run(tmp_path / "spool", sql_url, "node-1", once=True)
    engine = sql.engine(sql_url)
    try:
        with sql.read(engine) as connection:
            events = connection.exec_driver_sql("SELECT event_id, estimated FROM usage_event ORDER BY 1").fetchall()
            refused = connection.exec_driver_sql("SELECT SUM(refusal_count) FROM refusal_minute").scalar()
            kept = connection.exec_driver_sql("SELECT raw FROM quarantine").scalar()
            finished = connection.exec_driver_sql("SELECT finished FROM spool_offset").scalar()
    finally:
        engine.dispose()
    assert [(row[0], bool(row[1])) for row in events] == [
        (event_id(1), False),
        (event_id(2), True),
        (event_id(3), False),
    ]
    assert int(refused or 0) == 7
    assert bytes(kept or b"") == b"rubbish" * 3
    assert finished


def test_once_tells_what_it_shipped_and_how_many_attempts_run_on(tmp_path: Path, sqlite_url: str) -> None:
    sql.upgrade(sqlite_url)
    with a_live_spool(tmp_path) as spool:
        for number in range(5):
            spool.open(an_open(number))
        for number in range(3):
            spool.close(a_close(number))
        done = run(tmp_path, sqlite_url, "node-1", once=True)
        assert (done.committed_event_count, done.quarantined_count, done.open_count) == (3, 0, 2)
        spool.close(a_close(3))
        done = run(tmp_path, sqlite_url, "node-1", once=True)
        assert (done.committed_event_count, done.quarantined_count, done.open_count) == (1, 0, 1)


@pytest.mark.parametrize("once", [True, False])
def test_a_spool_folder_that_is_not_there_is_told_and_not_made(tmp_path: Path, sqlite_url: str, once: bool) -> None:
    sql.upgrade(sqlite_url)
    with pytest.raises(BillingError, match=r"There is no spool folder .*/nope; expected the one that"):
        run(tmp_path / "nope", sqlite_url, "node-1", once=once)
    assert not (tmp_path / "nope").exists()


def test_once_says_why_it_cannot_ship(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'books.db'}"
    sql.upgrade(url)
    (tmp_path / "spool").mkdir()
    with shipper_lock(tmp_path / "spool", threading.Event(), wait=False) as held:
        assert held
        with pytest.raises(BillingError, match="Another shipper serves"):
            run(tmp_path / "spool", url, "node-1", once=True)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("connect to postgresql://u:p%40ss@host/db failed", "connect to postgresql://***@host/db failed."),
        ("bad password=hunter2 in dsn\nDETAIL: x", "bad ://***@ in dsn."),
        ("", "ValueError."),
    ],
)
def test_a_sentence_for_people_has_no_credentials(text: str, safe: str) -> None:
    assert safe_sentence(ValueError(text)) == safe
