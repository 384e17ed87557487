"""Any order, split, repetition and interleaving of batches leaves the books as if every event had come once.

On a real SQLite file per example (copied from an upgraded one). The same property must fail on planted faults: an
ingest that forgets what it has seen, counts repeats in its roll-ups, or loses the tail of a batch.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Connection, Engine

from billing import rollup
from billing.adapters import sql
from billing.adapters.ingest import Ingest, IngestBatch, IngestReport, SpoolOffset, SpoolRefusal
from billing.adapters.ingest_sql import Writer
from billing.adapters.reconcile_sql import reconcile
from billing.adapters.tables import EntryRow, RefusalMinuteRow, UsageEventRow, UsageRollupRow, table
from billing.ledger import RatedEvent, Transfer
from billing.usage_event import Refusal, UsageEvent
from tests.exploring import examples
from tests.fakes.ledger_events import NOON_NS, a_book, usage_event
from tests.services import books_template

CHECKED = settings(max_examples=examples(40), deadline=None, report_multiple_bugs=False)
MUTANT = settings(CHECKED, max_examples=40, phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)

Make = Callable[[Engine], Ingest]


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A database with tables and a price book, to be copied."""
    with books_template(a_book()) as path:
        yield path


def numbered(number: int) -> UsageEvent:
    """The event of a number: of two orgs and nodes, some unknown, unbilled or unsold."""
    return usage_event(
        number,
        org_id=("acme", "zeta")[number % 2],
        node=("n1", "n2")[number % 3 == 0],
        output_tokens=(None, 0, 7, 1_000)[number % 4],
        billable=number % 5 != 0,
        model_served=("llama", "unsold")[number % 7 == 0],
        ended_ns=NOON_NS + number * 25 * 10**9,
    )


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """How many events, and batches of their numbers: shuffled, cut anywhere, with repeats within and between."""
    count = draw(st.integers(1, 12))
    repeats = draw(st.lists(st.integers(1, count), max_size=8))
    order = draw(st.permutations([*range(1, count + 1), *repeats]))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
    return count, [order[start:end] for start, end in pairwise([0, *cuts, len(order)])]


def state(engine: Engine) -> dict[str, Any]:
    """What the books say, without the ids and number of postings: those depend on how events were batched."""
    events, entries, rows = table(UsageEventRow), table(EntryRow), table(UsageRollupRow)
    with sql.read(engine) as connection:
        stored = connection.execute(sa.select(events).order_by(events.c.event_id)).mappings().all()
        balances = connection.execute(
            sa.select(
                entries.c.account,
                entries.c.model,
                entries.c.tier,
                sql.pico_sum(entries.c.amount_pico),
                sa.func.sum(entries.c.quantity_tokens),
            ).group_by(entries.c.account, entries.c.model, entries.c.tier)
        ).all()
        rolled = connection.execute(sa.select(rows)).all()
        refused = connection.execute(sa.select(table(RefusalMinuteRow).c.refusal_count)).all()
    return {
        "events": [{name: value for name, value in row.items() if name != "posting_id"} for row in stored],
        "balances": sorted(map(tuple, balances)),
        "rolled": sorted(map(tuple, rolled)),
        "refused": refused,
    }


def check_ingest(template: Path, make: Make, how: settings) -> None:
    @how
    @given(deliveries(), st.integers(0, 3))
    def is_as_if_each_came_once(delivery: tuple[int, list[list[int]]], replays: int) -> None:
        found = [numbered(number) for number in range(1, delivery[0] + 1)]
        batches = [[found[number - 1] for number in batch] for batch in delivery[1]]
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            states = []
            for name in ("once", "any"):
                path = Path(folder) / f"{name}.db"
                shutil.copy(template, path)
                engine = sql.engine(f"sqlite:///{path}")
                if name == "once":
                    Ingest(engine).write(IngestBatch(found, _refusals(found), offsets=[SpoolOffset("n", "1", 1, 99)]))
                else:
                    deliver(engine, make, batches, replays)
                    report = reconcile(engine)
                    assert report.exact, report.differences
                    totals = report.totals.get("USD", {"events": 0, "ledger": 0, "rollups": 0})
                    assert totals["events"] == totals["ledger"] == totals["rollups"]
                states.append(state(engine))
                engine.dispose()
            assert states[1] == states[0]

    is_as_if_each_came_once()


def deliver(engine: Engine, make: Make, batches: list[list[UsageEvent]], replays: int) -> None:
    """Send the batches by two callers in turn, refusals with the last one, then some of it all over again."""
    callers = (make(engine), make(engine))
    sent = [IngestBatch(batch) for batch in batches]
    everything = {event.event_id: event for batch in batches for event in batch}
    sent.append(IngestBatch((), _refusals(list(everything.values())), offsets=[SpoolOffset("n", "1", 1, 99)]))
    for index, batch in enumerate(sent):
        callers[index % 2].write(batch)
    for index in range(replays):
        callers[index % 2].write(sent[-1 - index % len(sent)])


def _refusals(found: list[UsageEvent]) -> list[SpoolRefusal]:
    return [SpoolRefusal(Refusal("acme", "web", "llama", "rate_limit", NOON_NS, len(found)), "n", "1")]


def test_any_delivery_is_as_if_each_event_came_once(template: Path) -> None:
    check_ingest(template, Ingest, CHECKED)


class PostsRepeats(Ingest):
    """Forgets which events it has posted."""

    def _post(self, store: Writer, rated: Sequence[RatedEvent]) -> tuple[list[Transfer], dict[str, str]]:
        return super()._post(store, [*rated, *rated[:1]])


class RollsUpRepeats(Ingest):
    """Rolls up whatever a batch holds, new or not."""

    def _apply(self, connection: Connection, batch: IngestBatch, poison: Any) -> IngestReport:
        report = super()._apply(connection, batch, poison)
        if report.duplicates:
            rated = self._rate(connection, batch.events[:1])
            Writer(connection).add_rollups(rollup.roll_up(rated))
        return report


class LosesTheTail(Ingest):
    """Leaves the last event of a batch for a next time that never comes."""

    def write(self, batch: IngestBatch) -> IngestReport:
        return super().write(IngestBatch(batch.events[:-1], batch.refusals, batch.quarantined, batch.offsets))


class CountsRefusalsAgain(Ingest):
    """Adds refusals whatever the offset says."""

    def write(self, batch: IngestBatch) -> IngestReport:
        return super().write(IngestBatch(batch.events, batch.refusals, batch.quarantined))


@pytest.mark.parametrize("mutant", [PostsRepeats, RollsUpRepeats, LosesTheTail, CountsRefusalsAgain])
def test_a_faulty_ingest_is_caught(template: Path, mutant: Make) -> None:
    with pytest.raises(AssertionError):
        check_ingest(template, mutant, MUTANT)
