"""`kill -9` of anything at any time: the ledger loses and doubles nothing (DESIGN 4.3 and 5).

Four seeds, which kill each kind of process at least once and 15 processes and more in all, run with every `make test`;
`make test-faults` runs INFERPLANE_FAULT_SEEDS of them. INFERPLANE_FAULT_SEED=17 runs that one alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.conftest import KILLS
from tests.faults.killable_postgres import KillablePostgres
from tests.faults.plan import SHORT_SEEDS, Target, plan
from tests.faults.run import prepare, run
from tests.services import temporary_folder

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

_LEAST_KILLS_IN_CI = 15


def chosen_seeds() -> list[int]:
    """The seeds of this session."""
    one = os.environ.get("INFERPLANE_FAULT_SEED")
    if one is not None:
        return [int(one)]
    return list(range(int(os.environ.get("INFERPLANE_FAULT_SEEDS", SHORT_SEEDS))))


@contextmanager
def database_of(request: pytest.FixtureRequest, *, postgres: bool) -> Iterator[tuple[str, KillablePostgres | None]]:
    """URL and server of the run's database; both empty for the embedded SQLite file."""
    if not postgres:
        yield "", None
        return
    server: KillablePostgres = request.getfixturevalue("mortal_postgres")
    with server.database() as url:
        yield url, server


@pytest.mark.parametrize("seed", chosen_seeds())
async def test_kills_lose_and_double_nothing(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
    seed: int,
) -> None:
    planned = plan(seed)
    with temporary_folder() as folder, database_of(request, postgres=planned.postgres) as (url, server):
        result = await run(planned, prepare(planned, Path(folder), url), server)
    record_property(KILLS, result.kill_count)
    with capsys.disabled():
        print(f"\n{result.summary}", flush=True)
    assert not result.wrong, "\n".join([f"seed {seed} failed:", *result.wrong])


def test_the_ordinary_seeds_kill_everything_there_is() -> None:
    plans = [plan(seed) for seed in range(SHORT_SEEDS)]
    assert {kill.target for one in plans for kill in one.kills} == set(Target)
    assert sum(one.kill_count for one in plans) >= _LEAST_KILLS_IN_CI


def test_a_seed_is_always_the_same_plan() -> None:
    assert [plan(seed) for seed in range(20)] == [plan(seed) for seed in range(20)]
    assert len({plan(seed).kills for seed in range(20)}) == 20
