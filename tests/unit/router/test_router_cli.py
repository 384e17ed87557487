"""`inferplane route explain`: what it shows, and how it refuses."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from router.adapters.cli import register

ENDPOINTS = """
- {id: a, url: "http://a:1", model: m, region: here, speed: {prefill_tok_per_s: 10000, decode_s_per_token: 0.02}}
- {id: b, url: "http://b:1", models: [m, n], region: there}
- {id: c, url: "http://c:1", drain: true}
"""


class Cli:
    def __init__(self, folder: Path) -> None:
        self.app = typer.Typer()
        register(self.app)
        self.endpoints, self.prompt = folder / "engines.yaml", folder / "prompt"
        self.endpoints.write_text(ENDPOINTS)
        self.prompt.write_bytes(b"word " * 40_000)

    def run(self, *options: str) -> tuple[int, str, str]:
        files = ["--endpoints", str(self.endpoints), "--prompt-file", str(self.prompt)]
        result = CliRunner().invoke(self.app, ["route", "explain", *files, *options])
        return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_the_table_names_every_endpoint_and_what_it_lost_by(cli: Cli) -> None:
    code, out, _ = cli.run("--model", "m", "--warm", "b", "--region", "here")
    head, columns, first, second, third = out.splitlines()
    assert code == 0 and head.startswith("50000 input tokens of m go to b; first token in 0.")
    assert columns.split()[:3] == ["endpoint", "total_s", "queue_s"]
    assert (first.split()[0], first.split()[-1]) == ("b", "picked")
    assert (second.split()[0], second.split()[-1]) == ("a", "prefill")
    assert (third.split()[0], third.split()[-1]) == ("c", "draining")


def test_json_has_stable_keys_with_units(cli: Cli) -> None:
    code, out, _ = cli.run("--model", "m", "--json")
    record = json.loads(out)
    keys = "endpoint_id model input_tokens input_tokens_known predicted_cached_tokens predicted_ttft_s new_session"
    keys += " pull_from candidates"
    assert code == 0 and set(record) == set(keys.split())
    assert [each["endpoint_id"] for each in record["candidates"]] == ["a", "b", "c"]


def test_a_backlog_on_the_warm_engine_can_outweigh_its_cache(cli: Cli) -> None:
    def picked(seconds: str) -> str:
        return str(
            json.loads(cli.run("--model", "m", "--warm", "b", "--backlog", f"b={seconds}", "--json")[1])["endpoint_id"]
        )

    assert (picked("1"), picked("9")) == ("b", "a")
    lost = json.loads(cli.run("--model", "m", "--warm", "b", "--backlog", "b=9", "--json")[1])["candidates"][1]
    assert (lost["endpoint_id"], lost["lost_by"]) == ("b", "queue")


def test_running_requests_count(cli: Cli) -> None:
    record = json.loads(cli.run("--model", "m", "--running", "a=4", "--json")[1])
    slowed = next(each for each in record["candidates"] if each["endpoint_id"] == "a")
    # Five seconds of prefill; steps of 20 ms leave 30 ms for each of 256 tokens: it spoils 48 % of four answers.
    assert slowed["terms"]["slowdown_s"] == pytest.approx(4 * 0.1 * (1 - exp(-5 / (0.030 * 256))))


def test_a_json_request_names_its_model(cli: Cli) -> None:
    cli.prompt.write_text(json.dumps({"model": "n", "messages": [{"role": "user", "content": "hello " * 500}]}))
    code, out, _ = cli.run("--json")
    assert code == 0 and json.loads(out)["model"] == "n"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "the endpoints list m, n"),
        (("--model", "m", "--warm", "x"), 2, "'x' is no endpoint of this model; there are a, b"),
        (("--model", "m", "--running", "a"), 2, "'a' is not ID=N."),
        (("--model", "m", "--running", "=3"), 2, "'=3' is not ID=N."),
        (("--model", "m", "--running", "x=3"), 2, "'x' is no endpoint of this model; there are a, b"),
        (("--model", "m", "--backlog", "a"), 2, "'a' is not ID=SECONDS."),
        (("--model", "m", "--running", "a=1.5"), 2, "'a=1.5' is not ID=N"),
        (("--model", "m", "--backlog", "a=-1"), 2, "a number of at least 0 was expected"),
        (("--model", "z"), 1, "No endpoint can take it (all_draining): c draining."),
    ],
)
def test_refusals(cli: Cli, options: tuple[str, ...], code: int, said: str) -> None:
    found, out, err = cli.run(*options)
    flat = " ".join(err.replace("│", " ").split())
    assert (found, out) == (code, "") and said in flat
    assert code == 2 or err.count("\n") == 1


def test_files_that_cannot_be_used_are_one_line(cli: Cli) -> None:
    cli.prompt.unlink()
    assert cli.run("--model", "m")[::2] == (1, f"{cli.prompt} cannot be read: No such file or directory.\n")
    cli.endpoints.write_text("[1]")
    code, _, err = cli.run("--model", "m")
    assert code == 1 and err.startswith(f"{cli.endpoints}, entry 1 is 1;") and err.count("\n") == 1
