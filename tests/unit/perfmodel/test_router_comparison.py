"""The comparison of routing policies is honest arithmetic: searches, pairing, what may be used again, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfmodel.errors import ConfigError
from perfmodel.traces.trace import Trace, trace_of
from tests.bench import bench_router_policies as bench
from tests.bench import router_loads as loads
from tests.bench import router_play as playing
from tests.bench import router_search as searching
from tests.bench import router_table as table
from tests.bench.router_plan import TracePlan, Variant, load_plan
from tests.bench.router_state import RunStore

PLAN = Path(bench.__file__).parent / "router.yaml"


def sought(search: searching.Search, goodput: Callable[[int], float]) -> dict[int, float]:
    known: dict[int, float] = {}
    while (copies := searching.next_copies(search, known)) is not None:
        assert copies not in known, "the same count was tried twice"
        known[copies] = goodput(copies)
    return known


@pytest.mark.parametrize("guess", [1, 5, 40, 700])
@pytest.mark.parametrize("limit", [1, 2, 17, 36, 37, 300])
def test_a_search_finds_the_most_copies_that_pass(guess: int, limit: int) -> None:
    search = searching.Search(guess, 0.95, 0.0, searching.LEAST_SHARE)
    known = sought(search, lambda copies: 1.0 if copies <= limit else 0.5)
    found = searching.carried(search, known)
    assert found == limit or (
        found == 0 and limit < guess * searching.LEAST_SHARE
    )  # so far behind its figure is not sought
    assert searching.is_monotone(search, known)


def test_a_search_ends_within_its_resolution() -> None:
    search = searching.Search(300, 0.95, 0.04)
    found = searching.carried(search, sought(search, lambda copies: 1.0 if copies <= 333 else 0.0))
    assert 333 / 1.04 <= found <= 333


def test_a_search_of_what_never_passes_carries_nothing() -> None:
    search = searching.Search(30, 0.95, 0.04)
    assert searching.carried(search, sought(search, lambda copies: 0.2)) == 0


def test_goodput_that_rises_again_is_said() -> None:
    search = searching.Search(8, 0.95, 0.0)
    assert searching.carried(search, {8: 0.9, 10: 0.96, 12: 0.5}) == 10
    assert not searching.is_monotone(search, {8: 0.9, 10: 0.96, 12: 0.5})


def test_seeds_are_paired_and_their_error_is_of_the_differences() -> None:
    ours, theirs = {0: 91.0, 1: 81.0, 2: 71.0}, {0: 90.0, 1: 80.0, 2: 70.0, 3: 5.0}
    assert searching.paired(ours, theirs) == searching.Paired(1.0, 0.0, 3)
    assert searching.paired({0: 3.0}, {0: 1.0}) == searching.Paired(2.0, None, 1)
    assert searching.paired({0: 1.0, 1: 3.0}, {0: 0.0, 1: 0.0}) == searching.Paired(2.0, 1.0, 2)
    with pytest.raises(ValueError, match="common"):
        searching.paired({0: 1.0}, {1: 1.0})


def test_excess_is_what_stands_above_the_floor() -> None:
    assert searching.excess_removed(3.0, 2.0, 1.0) == 0.5
    assert searching.excess_removed(3.0, 4.0, 1.0) == -0.5
    assert searching.excess_removed(1.0, 1.0, 1.0) is None


def case(points: float, removed: float | None = None, trace: str = "t") -> searching.CaseLoad:
    return searching.CaseLoad(trace, "hbm", 0.8, searching.Paired(points, 0.1, 10), "rival", removed)


def test_each_bar_can_be_missed() -> None:
    bars, good = searching.Bars(), searching.CaseCarried("t", "hbm", 10, 10, "rival")
    assert searching.missed([case(0.1, 0.31)], [good], ["t"], bars) == []
    assert "points" in searching.missed([case(-0.31), case(0.1)], [good], [], bars)[0]
    assert "better in 1 of 3" in searching.missed([case(0.0), case(0.0), case(0.1)], [good], [], bars)[0]
    assert "excess" in searching.missed([case(0.1, 0.29)], [good], ["t"], bars)[0]
    assert searching.missed([case(0.1, 0.29)], [good], ["other"], bars) == []
    assert "9 copies" in searching.missed([case(0.1)], [replace(good, ours=9)], [], bars)[0]


def made(sessions: list[int], blocks: list[list[int]]) -> Trace:
    columns: dict[str, Sequence[object]] = {
        "arrival_s": [float(row) for row in range(len(sessions))],
        "session": sessions,
        "input_tokens": [16 * len(ids) + 1 for ids in blocks],
        "output_tokens": [1] * len(sessions),
        "tier": [0] * len(sessions),
    }
    return trace_of(columns, blocks, 16)


def test_requests_without_a_session_go_by_the_first_block_that_not_all_share() -> None:
    trace = made([-1, -1, -1, -1], [[0, 1], [0, 2], [0, 1, 5], []])
    assert loads.groups_of(trace).tolist() == [0, 1, 0, 2]
    assert loads.groups_of(made([3, 4, 3], [[0], [0], [0]])).tolist() == [0, 1, 0]


def test_parts_are_whole_sessions_and_together_the_trace() -> None:
    trace = made([0, 1, 2, 3, 0, 1, 2, 3], [[0, session + 1] for session in (0, 1, 2, 3, 0, 1, 2, 3)])
    parts = loads.parts_of(trace, TracePlan("m", part=0.25), 3)
    assert sorted(int(part.session[0]) for part in parts) == [0, 1, 2, 3]
    assert all(len(part) == 2 and len(set(part.session.tolist())) == 1 for part in parts)
    with pytest.raises(ConfigError, match="part"):
        loads.parts_of(trace, TracePlan("m", part=0.1), 3)


def test_copies_share_what_sessions_share_and_nothing_else() -> None:
    trace = made([0, 1], [[0, 1], [0, 2]])
    whole = loads.load_of(trace, TracePlan("m", shared_blocks=2, spread_s=1.0), 3, 0, 1)
    ids, users = np.unique(whole.blocks, return_counts=True)
    assert users.tolist() == [6, *[1] * 6]
    assert ids[0] == 0
    assert len(set(whole.session.tolist())) == 6
    alone = loads.load_of(trace, TracePlan("m", spread_s=1.0), 3, 0, 1)
    assert sorted(np.unique(alone.blocks, return_counts=True)[1].tolist()) == [*[1] * 6, 2, 2, 2]


def test_a_run_has_enough_requests_and_the_seed_decides_it() -> None:
    trace = made([0, 1, 2, 3], [[0, 1], [0, 2], [0, 3], [0, 4]])
    plan = TracePlan("m", part=0.5, spread_s=1.0)
    assert len(loads.load_of(trace, plan, 1, 0, 9)) == 10
    once, again = (loads.load_of(trace, plan, 3, 7, 1) for _ in range(2))
    assert once.arrival_s.tolist() == again.arrival_s.tolist()
    assert once.arrival_s.tolist() != loads.load_of(trace, plan, 3, 8, 1).arrival_s.tolist()


@pytest.fixture
def place(tmp_path: Path) -> playing.Place:
    (tmp_path / "t.jsonl.gz").write_bytes(b"a trace")
    plan = load_plan(PLAN)
    return playing.Place(replace(plan, traces={"t": TracePlan("Llama-3.1-70B")}), tmp_path)


def test_all_that_decides_a_run_is_in_its_key(place: playing.Place) -> None:
    run = playing.Play("t", "hbm", Variant("llmd_default"), 4, 0)
    key, plan = playing.run_key(place, run), place.plan
    assert key == playing.run_key(place, replace(run))
    others = [
        playing.run_key(place, other)
        for other in (
            replace(run, copies=5), replace(run, seed=1), replace(run, floor=True), replace(run, engines="tiers"),
            replace(run, variant=Variant("llmd_precise")),
            replace(run, variant=Variant("llmd_default", (("prefix_weight_ratio", "5.0"),))),
        )
    ]  # fmt: skip
    changes = (
        replace(plan, ttft_s=4.0), replace(plan, tpot_ms=40.0), replace(plan, event_delay_ms=6.0),
        replace(plan, least_requests=3000), replace(plan, traces={"t": TracePlan("Llama-3.1-8B")}),
    )  # fmt: skip
    others += [playing.run_key(replace(place, plan=changed), run) for changed in changes]
    assert len({key, *others}) == 1 + len(others)
    guessed = replace(plan, traces={"t": TracePlan("Llama-3.1-70B", guess_copies=99)}, seeds=3)
    assert playing.run_key(replace(place, plan=guessed), run) == key


def test_a_key_follows_the_code_of_its_own_policy() -> None:
    files = {file.name for file in playing.source_files(["router.policies.llmd", "perfmodel.simulation.run"])}
    assert {"llmd.py", "prefix_views.py", "run.py", "cluster.py"} <= files
    assert "smetric.py" not in files
    assert "route.py" in {file.name for file in playing.source_files(["router.policies.production"])}


def test_results_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.put("one", {"seed": 0}, {"goodput_ratio": 0.5})
    with (tmp_path / "router_runs.jsonl").open("a") as file:
        file.write('{"key": "two", "figu')
    again = RunStore(tmp_path)
    assert (len(again), again.get("two")) == (1, None)
    again.put("two", {}, {"goodput_ratio": 0.25})
    last = RunStore(tmp_path)
    assert [last.get(key) for key in ("one", "two")] == [{"goodput_ratio": 0.5}, {"goodput_ratio": 0.25}]


def test_the_table_has_every_policy_and_its_verdict() -> None:
    figures = {"goodput_ratio": 0.971, "ttft_mean_s": 0.5, "hit_ratio": None}
    rows = [
        table.Row("t", "hbm", 0.8, 12, "rival", 1, 15, False, figures),
        table.Row("t", "hbm", 0.8, 12, "ours", 10, 16, True, figures | {"goodput_ratio": 0.99}),
        table.Row("t", "hbm", 0.8, 12, "floor", 10, None, True, figures | {"goodput_ratio": 1.0}),
    ]
    text = table.markdown(rows, [case(1.9, 0.4)], [searching.CaseCarried("t", "hbm", 16, 15, "rival")])
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[1:]] == ["| ours (10 seeds)", "| rival", "| floor (10 seeds)"]
    assert "97.10" in text and "15 (not monotone)" in text
    assert "+1.90 +- 0.10 points from rival (10 paired seeds)" in text
    assert "removed: 40%" in text and "16 copies, rival 15 (1.07 times)" in text
    assert json.dumps(table.as_json(rows, [case(1.9)], [], []))


def test_means_are_unknown_where_one_run_knows_nothing() -> None:
    assert table.mean_figures([{"a": 1.0, "b": None}, {"a": 2.0, "b": 3.0}]) == {"a": 1.5, "b": None}


def test_the_plan_of_the_project_is_sound() -> None:
    plan = load_plan(PLAN)
    assert len(plan.baselines) == 13
    for name, declared in plan.baselines.items():
        assert len(declared) in (0, 5), f"{name} has {len(declared)} declared settings"
    assert plan.seeds == 10 and plan.load_ratios == (0.8, 0.95)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("carried_ratio: 0.95", "carried_ratio: 1.5", "carried_ratio is 1.5; expected a number above 0, at most 1"),
        ("seeds: 10", "seed: 10", "seed is no field here; expected seeds"),
        ("seeds: 10", "seeds: 0", "seeds is 0; expected a whole number"),
        ("part: 0.2,", "part: 2,", "part is 2; expected"),
        ("{slack_ratio: 0.25}", "{slak_ratio: 0.25}", "did you mean slack_ratio"),
        ("  dynamo_kv_8: {}", "  dynamo_kv_9: {}", "dynamo_kv_9"),
        ("slo: {ttft_s: 5.0, tpot_ms: 50.0}", "slo: 5", "slo is 5; expected fields"),
        ("window_h: [13, 16]", "window_h: [16, 13]", "window_h is"),
    ],
)
def test_what_is_wrong_in_the_plan_is_one_sentence(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    text = PLAN.read_text()
    assert old in text
    (tmp_path / "router.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as found:
        load_plan(tmp_path / "router.yaml")
    assert sentence in str(found.value)


def test_the_choice_is_written_at_the_end_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    chosen = {
        "smetric": {"lmcache_miniswe": {"slack_ratio": "2.0"}},
        "sticky_2x": {"lmcache_miniswe": {"load": "tokens"}},
    }
    file.write_text(bench.with_chosen(PLAN.read_text(), chosen))
    plan = load_plan(file)
    assert Variant("smetric", (("slack_ratio", "2.0"),)) in plan.variants("lmcache_miniswe")
    assert not [variant for variant in plan.variants("lmcache_magagent") if variant.settings]
    assert bench.with_chosen(file.read_text(), chosen) == file.read_text()
    file.write_text(bench.with_chosen(PLAN.read_text(), {"smetric": {"lmcache_miniswe": {"slack_ratio": "7.0"}}}))
    with pytest.raises(ConfigError, match="expected one of its declared settings"):
        load_plan(file)


def test_missing_traces_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--traces", str(tmp_path / "none")]) == 2
    assert bench.main(["--traces", str(tmp_path), "--quick"]) == 2
    assert bench.main(["--traces", str(tmp_path), "--only", "nothing"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "expected --traces FOLDER" in told[0] and "jsonl.gz" in told[1] and "--only is 'nothing'" in told[2]
