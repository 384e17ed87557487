"""What the shipper may expect of the books, held by the fake and by the real ones on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from billing.adapters import sql
from billing.adapters.ingest import IngestBatch, Quarantined, SpoolOffset, SpoolRefusal
from billing.adapters.shipper import IngestPort, SqlIngest
from billing.usage_event import Refusal, UsageEvent, join
from tests.fakes.ingest import FakeIngest
from tests.fakes.usage import START_NS, a_close, an_open


@dataclass
class Books:
    """A port, and a look behind it."""

    port: IngestPort
    behind: FakeIngest | sa.Engine

    def count(self, fake_name: str, query: str) -> int:
        if isinstance(self.behind, FakeIngest):
            found = getattr(self.behind, fake_name)
            return sum(found.values()) if fake_name == "refusals" else len(found)
        with sql.read(self.behind) as connection:
            return int(connection.exec_driver_sql(query).scalar() or 0)

    @property
    def event_count(self) -> int:
        return self.count("events", "SELECT COUNT(*) FROM usage_event")

    @property
    def refusal_count(self) -> int:
        return self.count("refusals", "SELECT SUM(refusal_count) FROM refusal_minute")

    @property
    def quarantined_count(self) -> int:
        return self.count("quarantined", "SELECT COUNT(*) FROM quarantine WHERE kind = 'frame'")


@pytest.fixture(params=["fake", "sqlite", "postgres"])
def books(request: pytest.FixtureRequest) -> Iterator[Books]:
    if request.param == "fake":
        fake = FakeIngest()
        yield Books(fake, fake)
        return
    engine = sql.engine(request.getfixturevalue(f"{request.param}_url"))
    sql.upgrade(engine)
    try:
        yield Books(SqlIngest(engine), engine)
    finally:
        engine.dispose()


def an_event(number: int) -> UsageEvent:
    return join(an_open(number), a_close(number))


def a_refusal(count: int) -> SpoolRefusal:
    return SpoolRefusal(Refusal("org", "proj", "llama", "rate_limit", START_NS, count), "node-1", "a")


def test_a_batch_is_stored_with_its_offset(books: Books) -> None:
    assert books.port.offset("node-1", "a") is None
    frame = Quarantined("frame", "why", b"raw\x00\xff", "node-1", "a")
    offset = SpoolOffset("node-1", "a", 1, 500)
    books.port.write(IngestBatch([an_event(1), an_event(2)], [a_refusal(3)], [frame], [offset]))
    assert (books.event_count, books.refusal_count, books.quarantined_count) == (2, 3, 1)
    found = books.port.offset("node-1", "a")
    assert found is not None
    assert (found.segment, found.offset_bytes) == (1, 500)
    assert books.port.offset("node-1", "b") is None


def test_a_batch_that_comes_again_changes_nothing(books: Books) -> None:
    batch = IngestBatch(
        [an_event(1)],
        [a_refusal(3)],
        [Quarantined("frame", "why", b"raw", "node-1", "a")],
        [SpoolOffset("node-1", "a", 1, 500)],
    )
    books.port.write(batch)
    books.port.write(batch)
    assert (books.event_count, books.refusal_count, books.quarantined_count) == (1, 3, 1)


def test_an_event_that_comes_twice_in_one_batch_is_stored_once(books: Books) -> None:
    books.port.write(IngestBatch([an_event(1), an_event(1)], offsets=[SpoolOffset("node-1", "a", 1, 500)]))
    assert books.event_count == 1


def test_a_batch_is_told_what_became_of_its_events(books: Books) -> None:
    another = join(an_open(1), a_close(1)._replace(output_tokens=7))
    assert another.payload_hash != an_event(1).payload_hash
    books.port.write(IngestBatch([an_event(1)]))
    report = books.port.write(IngestBatch([another, an_event(1), an_event(2)]))
    assert (report.inserted, report.duplicates, report.conflicting, report.quarantined) == (1, 1, 1, 0)


def test_refusals_count_again_when_the_offset_moved(books: Books) -> None:
    books.port.write(IngestBatch((), [a_refusal(3)], (), [SpoolOffset("node-1", "a", 1, 500)]))
    books.port.write(IngestBatch((), [a_refusal(2)], (), [SpoolOffset("node-1", "a", 2, 0)]))
    assert books.refusal_count == 5


def test_an_offset_does_not_move_back_and_may_be_marked_finished(books: Books) -> None:
    books.port.write(IngestBatch(offsets=[SpoolOffset("node-1", "a", 2, 10)]))
    books.port.write(IngestBatch(offsets=[SpoolOffset("node-1", "a", 1, 999)]))
    found = books.port.offset("node-1", "a")
    assert found is not None
    assert (found.segment, found.offset_bytes) == (2, 10)
    books.port.write(IngestBatch([an_event(1)], offsets=[SpoolOffset("node-1", "a", 2, 10, finished=True)]))
    assert books.event_count == 1
