"""The spool's writer on a real disk: what it wrote is there, whatever the disk, the bound or a fork does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from billing.adapters.spool_files import segments
from billing.spool_format import encode_open
from controlplane.adapters.spool import MAX_REFUSAL_ROWS, OTHER_MODEL, Spool, SpoolSettings, spool_bytes
from controlplane.errors import ConfigError, SpoolFull
from tests.fakes.spool_reading import read_folder
from tests.fakes.usage import START_NS, a_checkpoint, a_close, an_open

PLENTY_BYTES = 1 << 30
ROOT = os.geteuid() == 0


def settings(spool_dir: Path, **changes: object) -> SpoolSettings:
    values: dict[str, object] = {
        "spool_dir": spool_dir,
        "node": "node-1",
        "incarnation": "a1",
        "max_bytes": PLENTY_BYTES,
    }
    return SpoolSettings(**{**values, **changes})  # type: ignore[arg-type]  # values of a test


@asynccontextmanager
async def a_spool(
    spool_dir: Path, fdatasync: Callable[[int], None] = os.fdatasync, **changes: object
) -> AsyncIterator[Spool]:
    spool = Spool(settings(spool_dir, **changes), fdatasync=fdatasync)
    try:
        yield spool
    finally:
        await spool.aclose()


@contextlib.contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Files of this process may not grow beyond this: a write across it is short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def a_small_disk(where: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until it holds; fail after 5 s."""
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("It did not come to hold within 5 s.")


def is_locked(folder: Path) -> bool:
    with (folder / "lock").open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


async def test_a_record_is_readable_by_another_process_as_soon_as_the_call_returns(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        spool.open(an_open(1))
        assert [event.open for event in read_folder(spool.folder).orphans] == [an_open(1)]
        spool.checkpoint(a_checkpoint(1))
        assert read_folder(spool.folder).orphans[0].close.output_tokens == 64
        spool.close(a_close(1))
        assert [event.close for event in read_folder(spool.folder).events] == [a_close(1)]


async def test_the_folder_is_locked_while_the_writer_lives_and_free_afterwards(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        assert spool.folder.name == "node-1~a1"
        assert is_locked(spool.folder)
    assert not is_locked(spool.folder)
    assert read_folder(spool.folder).ended


async def test_an_incarnation_is_used_once(tmp_path: Path) -> None:
    async with a_spool(tmp_path):
        with pytest.raises(SpoolFull, match="incarnation is used once"):
            Spool(settings(tmp_path))


@pytest.mark.parametrize("name", ["", "a~b", "a/b", "..", "-x", "x" * 200])
def test_a_name_that_cannot_be_a_folder_is_refused_with_the_field(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="node is"):
        Spool(settings(tmp_path, node=name))


async def test_a_full_spool_refuses_opens_and_still_takes_closes(tmp_path: Path) -> None:
    async with a_spool(tmp_path, max_bytes=1_000) as spool:
        opened = 0
        with pytest.raises(SpoolFull, match="bound is 1000 bytes"):
            for number in range(100):
                spool.open(an_open(number))
                opened += 1
        state = spool.state()
        assert not state.accepting
        assert state.node_bytes >= state.max_bytes
        for number in range(opened):
            spool.checkpoint(a_checkpoint(number))
            spool.close(a_close(number))
        found = read_folder(spool.folder)
        assert len(found.events) == opened
        assert not found.orphans


async def test_the_bound_is_the_nodes_and_is_measured_again(tmp_path: Path) -> None:
    async with a_spool(tmp_path, max_bytes=2_000) as spool:
        other = tmp_path / "node-1~other"
        other.mkdir()
        (other / "00000001.seg").write_bytes(bytes(5_000))
        await spool.start()
        await eventually(lambda: not spool.state().accepting)
        with pytest.raises(SpoolFull):
            spool.open(an_open(1))
        (other / "00000001.seg").unlink()
        await eventually(lambda: spool.state().accepting)
        spool.open(an_open(1))
        assert spool_bytes(tmp_path) == sum(file.stat().st_size for file in spool.folder.iterdir())


async def test_a_short_write_leaves_no_part_of_a_record_and_room_makes_it_work_again(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        for number in range(3):
            spool.open(an_open(number))
        size = (spool.folder / "00000001.seg").stat().st_size
        for extra in range(0, len(encode_open(an_open(99))), 23):
            with file_size_limit(size + extra), pytest.raises(SpoolFull, match="cannot be written"):
                spool.open(an_open(99))
            assert (spool.folder / "00000001.seg").stat().st_size == size
        spool.open(an_open(4))
        found = read_folder(spool.folder)
        assert [event.event_id for event in found.orphans] == [an_open(number).event_id for number in (0, 1, 2, 4)]
        assert not found.damage


async def test_a_close_that_the_disk_does_not_take_is_kept_and_written_when_there_is_room(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        spool.open(an_open(1))
        spool.open(an_open(2))
        size = (spool.folder / "00000001.seg").stat().st_size
        with file_size_limit(size + 10):
            spool.checkpoint(a_checkpoint(1))
            spool.close(a_close(1))
            spool.tick()
            state = spool.state()
            assert (state.pending_close_count, state.lost_checkpoint_count, state.open_count) == (1, 1, 2)
            assert len(read_folder(spool.folder).orphans) == 2
        spool.tick()
        assert spool.state().pending_close_count == 0
        found = read_folder(spool.folder)
        assert [event.close for event in found.events] == [a_close(1)]
        assert [event.event_id for event in found.orphans] == [an_open(2).event_id]


if ROOT:  # Only root can mount; the size limits above reach the same code without it.

    @pytest.mark.parametrize("segment_bytes", [4_096, PLENTY_BYTES])
    async def test_a_disk_that_is_really_full(tmp_path: Path, segment_bytes: int) -> None:
        with a_small_disk(tmp_path / "disk") as disk:
            async with a_spool(disk, segment_bytes=segment_bytes) as spool:
                ballast = disk / "ballast"
                ballast.write_bytes(bytes(32_000))
                opened = 0
                with pytest.raises(SpoolFull, match=r"No space left|only a part"):
                    for number in range(1_000):
                        spool.open(an_open(number))
                        opened += 1
                for number in range(opened):
                    spool.close(a_close(number))
                assert spool.state().pending_close_count > 0
                ballast.unlink()
                spool.tick()
                assert spool.state().pending_close_count == 0
                spool.open(an_open(2_000))
                found = read_folder(spool.folder)
                expected = {an_open(number).event_id for number in range(opened)}
                assert {event.event_id for event in found.events} == expected
                assert [event.event_id for event in found.orphans] == [an_open(2_000).event_id]
                assert not found.damage


async def test_each_segment_can_be_read_without_those_before_it(tmp_path: Path) -> None:
    async with a_spool(tmp_path, segment_bytes=4_000) as spool:
        spool.open(an_open(0, request_id="long"))
        spool.open(an_open(1_000, request_id="long", attempt=2))
        spool.close(a_close(1_000))
        for number in range(1, 40):
            spool.open(an_open(number))
            if number % 10 == 0:
                spool.checkpoint(a_checkpoint(0, output_tokens=number))
            if number % 4:
                spool.close(a_close(number))
        numbers = segments(spool.folder)
        assert len(numbers) > 3
        whole = read_folder(spool.folder)
        for first in numbers:
            part = read_folder(spool.folder, first)
            assert not part.unmatched
            assert not part.damage
            # What is open is the same from wherever one starts, with its checkpoint and what its retry means.
            assert sorted(part.orphans, key=lambda one: one.event_id) == sorted(
                whole.orphans, key=lambda one: one.event_id
            )
        orphan = next(one for one in whole.orphans if one.event_id == an_open(0).event_id)
        assert not orphan.close.billable
        assert orphan.close.output_tokens == 30


async def test_a_rotation_without_room_goes_on_in_the_old_segment(tmp_path: Path) -> None:
    async with a_spool(tmp_path, segment_bytes=2_000) as spool:
        for number in range(5):
            spool.open(an_open(number))
        blocked = spool.folder / ".next"
        blocked.mkdir()
        for number in range(5, 12):
            spool.open(an_open(number))
        assert spool.state().segment == 1
        blocked.rmdir()
        assert len(read_folder(spool.folder).orphans) == 12


async def test_more_open_attempts_than_a_segment_holds_do_not_rotate_for_ever(tmp_path: Path) -> None:
    async with a_spool(tmp_path, segment_bytes=2_000) as spool:
        for number in range(100):
            spool.open(an_open(number))
        assert spool.state().segment < 10
        assert len(read_folder(spool.folder, spool.state().segment).orphans) == 100


async def test_everything_written_is_synced_soon_and_nothing_written_is_not_synced(tmp_path: Path) -> None:
    synced: list[int] = []
    async with a_spool(tmp_path, fdatasync=lambda fd: synced.append(os.fstat(fd).st_size)) as spool:
        spool.open(an_open(1))
        size = (spool.folder / "00000001.seg").stat().st_size
        await eventually(lambda: bool(synced) and synced[-1] == size)
        count = len(synced)
        await asyncio.sleep(0.15)
        assert len(synced) == count
        for number in range(2, 100):
            spool.open(an_open(number))
        await spool.flush()
        assert synced[-1] == (spool.folder / "00000001.seg").stat().st_size


async def test_old_segments_are_synced_too(tmp_path: Path) -> None:
    synced: set[tuple[int, int]] = set()
    lock = threading.Lock()

    def note(fd: int) -> None:
        facts = os.fstat(fd)
        with lock:
            synced.add((facts.st_ino, facts.st_size))

    async with a_spool(tmp_path, fdatasync=note, segment_bytes=2_000, sync_interval_s=0.2) as spool:
        for number in range(50):
            spool.open(an_open(number))
            spool.close(a_close(number))
        await spool.flush()
        files = [file.stat() for file in spool.folder.glob("*.seg")]
        assert len(files) > 5
        assert {(file.st_ino, file.st_size) for file in files} <= synced


async def test_a_sync_that_fails_ends_trust_in_this_spool(tmp_path: Path) -> None:
    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with a_spool(tmp_path, fdatasync=broken) as spool:
        spool.open(an_open(1))
        await eventually(lambda: not spool.state().accepting)
        assert "Input/output error" in str(spool.state().reason)
        with pytest.raises(SpoolFull, match="durable"):
            spool.open(an_open(2))
        with pytest.raises(SpoolFull, match="durable"):
            await spool.flush()
        spool.close(a_close(1))
        assert len(read_folder(spool.folder).events) == 1


async def test_refusals_are_counted_per_minute_and_written_at_the_tick(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        for second in range(90):
            spool.refuse("org", "proj", "llama", "rate_limit", START_NS + second * 10**9)
        spool.refuse("org", "proj", "llama", "too_large", START_NS)
        assert not read_folder(spool.folder).refusals
        spool.tick()
        spool.tick()
        found = {(one.reason, one.minute_ns): one.count for one in read_folder(spool.folder).refusals}
        assert found == {
            ("rate_limit", START_NS): 60,
            ("rate_limit", START_NS + 60 * 10**9): 30,
            ("too_large", START_NS): 1,
        }


async def test_refusals_reach_the_disk_by_themselves_and_at_the_end(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        await spool.start()
        spool.refuse("org", "proj", "llama", "rate_limit", START_NS)
        await eventually(lambda: bool(read_folder(spool.folder).refusals))
        spool.refuse("org", "proj", "llama", "rate_limit", START_NS)
    assert sum(one.count for one in read_folder(spool.folder).refusals) == 2


async def test_models_invented_by_a_client_do_not_fill_the_memory(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        for number in range(MAX_REFUSAL_ROWS + 500):
            spool.refuse("org", "proj", f"model-{number}", "no_such_model", START_NS)
        spool.tick()
        refusals = read_folder(spool.folder).refusals
        assert len(refusals) == MAX_REFUSAL_ROWS + 1
        assert sum(one.count for one in refusals) == MAX_REFUSAL_ROWS + 500
        assert [one.count for one in refusals if one.model == OTHER_MODEL] == [500]


async def test_only_the_first_close_counts(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        spool.open(an_open(1))
        spool.close(a_close(1))
        spool.close(a_close(1, output_tokens=7))
        spool.close(a_close(2))
        spool.checkpoint(a_checkpoint(1))
        found = read_folder(spool.folder)
        assert [event.close for event in found.events] == [a_close(1)]
        assert not found.unmatched
        assert spool.state().repeated_close_count == 2


async def test_a_closed_spool_takes_no_opens_and_may_be_closed_again(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        spool.open(an_open(1))
    await spool.aclose()
    with pytest.raises(SpoolFull, match="closed"):
        spool.open(an_open(2))
    assert [event.close.estimated for event in read_folder(spool.folder).orphans] == [True]


async def test_an_attempt_that_ends_after_the_spool_writes_into_no_other_file(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        spool.open(an_open(1))
        spool.open(an_open(2))
    others = [(tmp_path / f"other-{n}").open("wb") for n in range(8)]  # they get the numbers that have become free
    spool.checkpoint(a_checkpoint(1))
    spool.close(a_close(1))
    spool.tick()
    for other in others:
        other.close()
        assert os.stat(other.name).st_size == 0
    assert len(read_folder(spool.folder).orphans) == 2


async def test_a_forked_child_cannot_write_and_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        spool.open(an_open(1))
        ready, tell = os.pipe()
        wait, release = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                spool.open(an_open(2))
            except SpoolFull:
                os.write(tell, b"refused")
            else:
                os.write(tell, b"written")
            os.read(wait, 1)
            os._exit(0)
        try:
            assert os.read(ready, 7) == b"refused"
            spool.open(an_open(3))
            await spool.aclose()
            assert not is_locked(spool.folder)
            assert len(read_folder(spool.folder).orphans) == 2
        finally:
            os.write(release, b"x")
            os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once
            for fd in (ready, tell, wait, release):
                os.close(fd)
