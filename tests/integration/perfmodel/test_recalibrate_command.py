"""`inferplane perf recalibrate` against a simulated engine under load, with coefficients that are wrong on purpose.

Owns: the command from metrics to overlay. The engine runs the catalogue's coefficients, so the true multipliers are 1;
what is wrong is the overlay in use, or the device that the command is told. Does not own: the arithmetic
(`unit/perfmodel/test_recalibration`).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[3]
POOL = ("--model", "Llama-3.1-8B", "--pool", "chat")
H100 = (*POOL, "--gpu", "H100-SXM-80GB")


@dataclass(frozen=True)
class Scrapes:
    """Four scrapes of a busy engine, a window apart, and its address."""

    url: str
    files: tuple[Path, ...]

    @property
    def option(self) -> str:
        return "busy=" + ",".join(map(str, self.files))


def _ask(url: str, seed: int, stop: threading.Event) -> None:
    """A client that asks again and again, prompts of 200 to 3,000 tokens."""
    dice = random.Random(seed)
    with httpx.Client(timeout=60) as client:
        while not stop.is_set():
            prompt = "".join(chr(97 + dice.randrange(26)) for _ in range(4 * dice.randrange(200, 3_000)))
            body = {
                "model": "Llama-3.1-8B",
                "prompt": prompt,
                "max_tokens": dice.randrange(50, 200),
                "ignore_eos": True,
            }
            client.post(f"{url}/v1/completions", json=body)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrapes]:
    """An engine of twelve clients, scraped after every 300 steps of its own."""
    command = [sys.executable, "-m", "controlplane", "engine-sim", "--json", "--no-kv-events", "--speed", "4"]
    stop = threading.Event()
    clients: list[threading.Thread] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as engine:
        try:
            assert engine.stdout is not None
            url = json.loads(engine.stdout.readline())["url"]
            clients = [threading.Thread(target=_ask, args=(url, seed, stop)) for seed in range(12)]
            for client in clients:
                client.start()
            yield Scrapes(url, _scraped(url, tmp_path_factory.mktemp("scrapes")))
        finally:
            stop.set()
            for client in clients:
                client.join()
            engine.terminate()


def _scraped(url: str, folder: Path) -> tuple[Path, ...]:
    files = tuple(folder / f"{number}.prom" for number in range(4))
    for number, file in enumerate(files):
        _wait_for_steps(url, 300 * (number + 1))
        file.write_bytes(httpx.get(f"{url}/metrics").content)
    return files


def _wait_for_steps(url: str, count: int) -> None:
    for _ in range(3_000):
        page = httpx.get(f"{url}/metrics").text
        line = next(line for line in page.splitlines() if line.startswith("vllm:iteration_tokens_total_count"))
        if float(line.split()[-1]) >= count:
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"the engine made no {count} steps")


def recalibrate(*options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    command = [sys.executable, "-m", "controlplane", "perf", "recalibrate", *options]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return ran.returncode, ran.stdout, ran.stderr


def overlay(path: Path, decode_ratio: float, prefill_ratio: float) -> Path:
    """An overlay as the command writes it."""
    path.write_text(json.dumps({"pools": {"chat": {"decode_ratio": decode_ratio, "prefill_ratio": prefill_ratio}}}))
    return path


def test_right_coefficients_stay(busy: Scrapes, tmp_path: Path) -> None:
    out = tmp_path / "overlay.json"
    code, said, complaint = recalibrate(*H100, "--metrics", busy.option, "--out", str(out), "--json")
    assert (code, complaint) == (0, "")
    found = json.loads(said)
    assert list(found)[:3] == ["pool", "verdict", "reason"]
    assert (found["verdict"], found["reason"]) == ("steady", None)
    assert found["step_ratio"] == pytest.approx(1.0, abs=0.1)
    assert found["decode_ratio"] == pytest.approx(1.0, abs=0.12)
    assert found["prefill_ratio"] == pytest.approx(1.0, abs=0.3)
    assert [window["use"] for window in found["windows"]] == ["used"] * 3
    assert found["drift"] == {"band_ratio": 0.2, "out_of_band_count": 0, "clipped": False, "alarmed": False}
    assert json.loads(out.read_text())["pools"]["chat"]["decode_ratio"] == found["decode_ratio"]


def test_wrong_coefficients_are_found_corrected_and_told(busy: Scrapes, tmp_path: Path) -> None:
    wrong, out = overlay(tmp_path / "wrong.json", 1.7, 1.7), tmp_path / "overlay.json"
    options = (*H100, "--metrics", busy.option, "--overlay", str(wrong), "--out", str(out))
    code, said, complaint = recalibrate(*options, "--json")
    assert code == 1
    assert complaint.startswith("perf: pool chat has drifted: its steps take 0.") and complaint.count("\n") == 1
    assert "outside 20% in 3 windows running" in complaint
    found = json.loads(said)
    assert (found["verdict"], f"perf: {found['reason']}\n") == ("drifted", complaint)
    assert found["step_ratio"] == pytest.approx(1 / 1.7, abs=0.07)
    assert found["decode_ratio"] < 1.35, "most of the way from 1.7 to 1, as 900 steps allow"
    # The corrected overlay, used with the same windows again, comes closer and ends the alarm.
    code, said, _ = recalibrate(*H100, "--metrics", busy.option, "--overlay", str(out), "--out", str(out), "--json")
    again = json.loads(said)
    assert abs(again["decode_ratio"] - 1) < abs(found["decode_ratio"] - 1)
    assert again["step_ratio"] > found["step_ratio"]


def test_another_device_than_was_said_is_an_alarm(busy: Scrapes) -> None:
    code, said, complaint = recalibrate(*POOL, "--gpu", "A100-SXM-80GB", "--metrics", busy.option)
    assert code == 1 and "pool chat has drifted" in complaint
    assert "decode multiplier" in said and "busy: used" in said


def test_a_live_engine_and_a_gateway_are_measured_together(busy: Scrapes, tmp_path: Path) -> None:
    pages = []
    for number, (total, count) in enumerate(((0.0, 0), (30.0, 100))):
        pages.append(tmp_path / f"gateway-{number}.prom")
        pages[-1].write_text(
            "# TYPE inferplane_time_to_first_token_seconds histogram\n"
            f'inferplane_time_to_first_token_seconds_bucket{{le="+Inf",model="m"}} {count}\n'
            f'inferplane_time_to_first_token_seconds_count{{model="m"}} {count}\n'
            f'inferplane_time_to_first_token_seconds_sum{{model="m"}} {total}\n'
        )
    code, said, complaint = recalibrate(
        *H100, "--metrics", f"{busy.url}/metrics", "--metrics", f"gateway={pages[0]},{pages[1]}",
        "--windows", "2", "--window-s", "1.0", "--band", "0.5", "--json",
    )  # fmt: skip
    assert (code, complaint) == (0, ""), "silent in a pipe"
    found = json.loads(said)
    assert len(found["windows"]) == 2 and found["windows"][0]["engine"] == "engine-0"
    assert found["gateway"]["ttft_ms"] == pytest.approx(300.0)
    assert found["gateway"]["tpot_ms"] is None
    assert found["gateway"]["outside_engine_ms"] == pytest.approx(300.0 - found["engine_ttft_ms"])


def test_overlays_of_other_pools_stay(busy: Scrapes, tmp_path: Path) -> None:
    out = overlay(tmp_path / "overlay.json", 1.0, 1.0)
    recalibrate(*H100, "--pool", "b", "--metrics", busy.option, "--out", str(out))
    assert set(json.loads(out.read_text())["pools"]) == {"chat", "b"}


def page(folder: Path, number: int, steps: int, started_s: float = 1.0) -> Path:
    """One scrape of an engine that made so many steps."""
    path = folder / f"{number}.prom"
    path.write_text(
        "# TYPE vllm:iteration_tokens_total histogram\n"
        f'vllm:iteration_tokens_total_bucket{{le="+Inf"}} {steps}\n'
        f"vllm:iteration_tokens_total_count {steps}\n"
        f"vllm:iteration_tokens_total_created {started_s}\n"
    )
    return path


IDLE = "too little traffic to judge it: no window could be used (1 idle, 1 restarted), so nothing was learned"


def test_too_little_traffic_is_neither_drift_nor_a_fault(tmp_path: Path) -> None:
    files = (page(tmp_path, 0, 10), page(tmp_path, 1, 12), page(tmp_path, 2, 1, started_s=2.0))
    option = "night=" + ",".join(map(str, files))
    code, said, complaint = recalibrate(*H100, "--metrics", option)
    assert (code, complaint) == (0, "")
    assert said.splitlines()[-1] == f"pool chat had {IDLE}"
    code, said, complaint = recalibrate(*H100, "--metrics", option, "--json")
    assert (code, complaint) == (0, "")
    found = json.loads(said)
    assert (found["verdict"], found["reason"]) == ("too_little_traffic", f"pool chat had {IDLE}")
    assert (found["decode_ratio"], found["step_ratio"]) == (1.0, None)


def test_an_idle_window_neither_ends_nor_raises_the_alarm_of_an_earlier_run(tmp_path: Path) -> None:
    before, out = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(
        json.dumps({"pools": {"chat": {"decode_ratio": 1.5, "prefill_ratio": 1.2, "out_of_band_count": 3}}})
    )
    files = f"{page(tmp_path, 0, 10)},{page(tmp_path, 1, 12)}"
    code, said, _ = recalibrate(*H100, "--metrics", files, "--overlay", str(before), "--out", str(out), "--json")
    found = json.loads(said)
    assert (code, found["verdict"]) == (0, "too_little_traffic")
    assert found["reason"].endswith("nothing was learned, and the drift of an earlier run stands")
    kept = json.loads(out.read_text())["pools"]["chat"]
    assert (kept["decode_ratio"], kept["prefill_ratio"], kept["out_of_band_count"]) == (1.5, 1.2, 3)


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--metrics", "one.prom"), 2, "--metrics is 'one.prom'; expected a URL, or at least two files"),
        (("--metrics", "none.prom,none.prom"), 1, "none.prom: No such file or directory"),
        (("--metrics", "http://127.0.0.1:1/metrics", "--windows", "0"), 2, "--windows is 0; expected at least 1"),
        (("--metrics", "http://127.0.0.1:1/metrics", "--window-s", "0"), 2, "--window-s is 0.0; expected more than 0"),
        (("--metrics", "http://127.0.0.1:1/metrics"), 1, "http://127.0.0.1:1/metrics cannot be fetched: "),
        (("--metrics", "a.prom,a.prom", "--band", "2"), 2, "--band is 2.0; expected more than 0"),
        (("--metrics", "README.md,README.md"), 2, "README.md "),
        (("--metrics", "a.prom,a.prom", "--overlay", "README.md"), 2, "README.md is no overlay"),
        (("--metrics", "a.prom,a.prom", "--gpu", "H1000"), 2, "device"),
    ],
)
def test_a_mistake_is_one_sentence(options: tuple[str, ...], code: int, sentence: str) -> None:
    found, said, complaint = recalibrate(*H100, *options)
    assert (found, said) == (code, "")
    assert complaint.startswith(f"perf: {sentence}") and complaint.count("\n") == 1
