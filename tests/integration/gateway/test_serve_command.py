"""`inferplane serve` as the person who types it meets it: wrong options, what is said at the start, and when.

Owns: exit codes and sentences of wrong options, the banner, a Redis that is not there. Does not own: the gateway behind
it. No test here needs an engine or another node.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from billing.adapters import sql
from controlplane.adapters import serve_cli
from controlplane.adapters.node import FirstAnswer, endpoint_warnings, first_key, redis_warning
from controlplane.config import load_settings
from controlplane.errors import ConfigError
from tests.integration.gateway.stack import eventually, http_client
from tests.services import free_tcp_port, temporary_folder

ENGINE = ("--engine", "http://127.0.0.1:1")


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "controlplane", "serve", *options]


def environment(**chosen: str) -> dict[str, str]:
    """This process's, without settings of ours but those."""
    return {name: value for name, value in os.environ.items() if not name.startswith("INFERPLANE_")} | chosen


def refused(*options: str, **chosen: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a `serve` that starts nothing, in this process."""
    app = typer.Typer()
    serve_cli.register(app)
    ours = {name: None for name in os.environ if name.startswith("INFERPLANE_")}
    result = CliRunner().invoke(app, ["serve", *options], env={**ours, **chosen})
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((*ENGINE, "--port", "99999"), "--port is 99999; expected a whole number from 0 to 65535."),
        ((*ENGINE, "--port", "-1"), "--port is -1; expected a whole number from 0 to 65535."),
        ((*ENGINE, "--workers", "0"), "--workers is 0; expected a whole number from 1 to 64."),
        ((*ENGINE, "--workers", "65"), "--workers is 65; expected a whole number from 1 to 64."),
        ((*ENGINE, "--host", "not an address"), "--host is 'not an address'; expected an address of this machine"),
        ((*ENGINE, "--host", "999.1.1.1"), "--host is '999.1.1.1'; expected an address of this machine"),
        ((*ENGINE, "--host", "fe80::x"), "--host is 'fe80::x'; expected an address of this machine"),
        (("--engine", "127.0.0.1:8000"), "--engine is '127.0.0.1:8000'; expected the http:// or https:// URL of an"),
        (("--engine", "ftp://h"), "--engine is 'ftp://h'; expected the http:// or https:// URL of an engine"),
        (("--engine", "http://me:hush@h"), "--engine is a URL with a user or password; expected the http://"),
        ((), "No engine: give --engine URL or --endpoints FILE."),
        ((*ENGINE, "--endpoints", "x.json"), "Give --engine or --endpoints, not both."),
    ],
)
def test_a_wrong_option_is_a_usage_error_in_one_sentence_and_makes_nothing(
    options: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    status, out, err = refused(*options, "--data-dir", str(tmp_path / "data"))
    assert (status, out) == (2, "")
    assert err.startswith(told)
    assert err.count("\n") == 1
    assert "hush" not in err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("PORT", "http", "INFERPLANE_PORT is 'http'; expected a whole number from 0 to 65535."),
        ("IDLE_TIMEOUT_S", "0", "INFERPLANE_IDLE_TIMEOUT_S is '0'; expected a number above 0."),
        ("DRAIN_LEAD_S", "-1", "INFERPLANE_DRAIN_LEAD_S is '-1'; expected a number of at least 0."),
        ("REDIS_URL", "redis.internal:6379", "INFERPLANE_REDIS_URL cannot be read; expected redis://HOST:PORT/N"),
    ],
)
def test_a_wrong_variable_is_named_and_exits_with_1(variable: str, value: str, told: str, tmp_path: Path) -> None:
    chosen = {"INFERPLANE_PORT": "0", f"INFERPLANE_{variable}": value}
    status, _, err = refused(*ENGINE, "--data-dir", str(tmp_path), **chosen)
    assert status == 1
    assert err.startswith(told)
    assert err.count("\n") == 1


def test_an_option_overrules_a_variable_that_cannot_be_for_the_processes_too() -> None:
    with temporary_folder() as folder:
        process = subprocess.Popen(
            command(*ENGINE, "--port", "0", "--workers", "1", "--data-dir", str(folder / "data"), "--json"),
            stdout=subprocess.PIPE,
            text=True,
            env=environment(INFERPLANE_PORT="http", INFERPLANE_WORKERS="many"),
        )
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.communicate(timeout=30)


def test_an_address_of_another_machine_is_one_clear_sentence(tmp_path: Path) -> None:
    status, out, err = refused(*ENGINE, "--host", "203.0.113.7", "--data-dir", str(tmp_path))
    assert (status, out) == (1, "")
    assert err.startswith("host 203.0.113.7 cannot be used: it is no address of this machine; expected one")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (
            "foo",
            "INFERPLANE_DATABASE_URL cannot be used: The database URL cannot be read; sqlite:///FILE or postgresql://",
        ),
        (
            "postgresql://h:port/x",
            "INFERPLANE_DATABASE_URL cannot be used: The database URL cannot be read; sqlite:///",
        ),
        (
            "mysql://me:hush@a/b",
            "INFERPLANE_DATABASE_URL cannot be used: The database is 'mysql'; sqlite or postgresql",
        ),
        ("sqlite://", "INFERPLANE_DATABASE_URL cannot be used: The SQLite database has no file; sqlite:///FILE was"),
        ("sqlite+nope:////tmp/x.db", "INFERPLANE_DATABASE_URL cannot be used: "),
        (
            "postgresql+psycopg://me:hush@127.0.0.1:1/x",
            "The database postgresql+psycopg://me:***@127.0.0.1:1/x does not",
        ),
    ],
)
def test_a_database_that_cannot_be_used_is_one_sentence_without_its_password(
    url: str, told: str, tmp_path: Path
) -> None:
    status, out, err = refused(*ENGINE, "--port", "0", "--data-dir", str(tmp_path), INFERPLANE_DATABASE_URL=url)
    assert (status, out) == (1, "")
    assert err.startswith(told)
    assert err.count("\n") == 1
    assert "hush" not in err


def test_a_database_without_tables_or_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    options = (*ENGINE, "--port", "0", "--data-dir", str(tmp_path / "data"))
    status, _, err = refused(*options, INFERPLANE_DATABASE_URL=f"sqlite:///{tmp_path / 'x.db'}")
    assert (status, err.count("\n")) == (1, 1)
    assert "has no tables yet" in err
    assert "run inferplane db upgrade" in err
    (tmp_path / "text.db").write_text("this is no database" * 100)
    status, _, err = refused(*options, INFERPLANE_DATABASE_URL=f"sqlite:///{tmp_path / 'text.db'}")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("INFERPLANE_DATABASE_URL cannot be used: ")
    (tmp_path / "data" / "inferplane.db").write_text("this is no database" * 100)
    status, _, err = refused(*options)
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith(f"The database {tmp_path / 'data' / 'inferplane.db'} cannot be used: ")


@pytest.mark.parametrize("kind", ["no folder", "a folder", "below a file"])
def test_an_access_log_that_cannot_be_written_is_told_before_anything_starts(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = {"no folder": "nope/x", "a folder": "", "below a file": "file/x"}[kind]
    wrong = str(tmp_path / target) if target else str(tmp_path)
    data = tmp_path / "data"
    status, out, err = refused(*ENGINE, "--port", "0", "--access-log", wrong, "--data-dir", str(data))
    assert (status, out) == (2, "")
    assert err.startswith(f"--access-log is {wrong!r}; expected -, nothing, or a file that can be written: ")
    assert err.count("\n") == 1
    assert not data.exists()
    status, _, err = refused(*ENGINE, "--port", "0", "--data-dir", str(data), INFERPLANE_ACCESS_LOG=wrong)
    assert status == 1
    assert err.startswith(f"INFERPLANE_ACCESS_LOG is {wrong!r}; expected")
    assert not data.exists()


def test_a_missing_endpoints_file_is_told_before_a_taken_port(listening: socket.socket, tmp_path: Path) -> None:
    missing, port = tmp_path / "nope.yaml", str(listening.getsockname()[1])
    status, _, err = refused("--endpoints", str(missing), "--port", port, "--data-dir", str(tmp_path / "data"))
    assert (status, err) == (1, f"{missing} cannot be read: No such file or directory.\n")
    assert not (tmp_path / "data").exists()


ENDPOINTS = """
- {id: a, url: "http://127.0.0.1:1", api_key_env: ENGINE_A_KEY}
- {id: b, url: "https://127.0.0.1:1", api_key_env: ENGINE_B_KEY, tls: {ca: FOLDER/none.pem}}
- {id: c, url: "https://127.0.0.1:1", tls: {ca: FOLDER/text.pem}}
- {id: d, url: "https://127.0.0.1:1", tls: {verify: false}}
"""


def test_an_engine_key_that_is_not_set_and_a_missing_authority_are_one_warning_each(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    file = tmp_path / "engines.yaml"
    file.write_text(ENDPOINTS.replace("FOLDER", str(tmp_path)))
    told = endpoint_warnings(file, {"ENGINE_B_KEY": "hush"}.get)
    assert [line.split(";")[0] for line in told[:2]] == [
        f"{file}, endpoint 'a', field api_key_env is 'ENGINE_A_KEY'",
        f"{file}, endpoint 'b', field tls.ca is '{tmp_path}/none.pem'",
    ]
    assert told[2].startswith(f"{file}, endpoint 'c', field tls.ca is '{tmp_path}/text.pem'; ")
    assert len(told) == 3
    assert "hush" not in "".join(told)


def test_serve_says_such_a_warning_and_starts() -> None:
    with temporary_folder() as folder:
        file = folder / "engines.yaml"
        file.write_text('- {id: a, url: "http://127.0.0.1:1", api_key_env: ENGINE_A_KEY}\n')
        process = subprocess.Popen(
            command("--endpoints", str(file), "--port", "0", "--data-dir", str(folder / "data")),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline()]
            while lines[-1] and not lines[-1].startswith("Gateway:"):
                lines.append(process.stderr.readline())
        finally:
            process.terminate()
            process.communicate(timeout=30)
    assert lines[-1].startswith("Gateway:")
    assert [line for line in lines if "api_key_env" in line] == [
        f"WARNING {file}, endpoint 'a', field api_key_env is 'ENGINE_A_KEY'; this variable is not set, so the engine "
        "is asked without a key. Set it and start again.\n"
    ]


def test_another_pepper_than_the_databases_is_one_sentence_and_starts_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    sql.upgrade(url)
    asked = command(*ENGINE, "--port", "0", "--data-dir", str(tmp_path / "data"))
    settings = load_settings({"database_url": url, "key_pepper": "a" * 32})
    assert first_key(settings) is not None
    chosen = {"INFERPLANE_DATABASE_URL": url, "INFERPLANE_KEY_PEPPER": "b" * 32}
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False, env=environment(**chosen))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("This node's key pepper (mark ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_a_gateway_that_never_answers_is_not_announced_but_its_first_key_is_shown(
    as_json: bool, tmp_path: Path
) -> None:
    wanted = ("--json",) if as_json else ()
    asked = command(*ENGINE, "--port", "0", "--data-dir", str(tmp_path / "data"), *wanted)
    chosen = environment(INFERPLANE_NODE="no name of a folder")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False, env=chosen)
    err = done.stderr
    assert (done.returncode, done.stdout) == (1, "")
    assert "right after its start" in err
    assert "Gateway:" not in err
    assert err.count("API key:  ip-") == 1, "it was made, and nobody could ever see it again"


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def answered(listening: socket.socket, answer: bytes) -> bytes:
    """Take the next connection, answer and close it; what was asked."""
    line, _ = listening.accept()
    with line:
        asked = line.recv(4_096)
        line.sendall(answer)
    return asked


def test_a_port_that_takes_connections_does_not_answer_yet(listening: socket.socket) -> None:
    first = FirstAnswer(listening)
    assert [first.look() for _ in range(3)] == [False, False, False]
    assert answered(listening, b"HTTP/1.1 200 OK\r\n\r\n").startswith(b"GET /healthz HTTP/1.1\r\n")
    assert eventually(first.look, "the answer") is True
    first.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 503 No\r\n\r\n"], ids=["closed", "503"])
def test_a_question_that_a_dying_process_took_is_asked_again(answer: bytes, listening: socket.socket) -> None:
    first = FirstAnswer(listening)
    assert first.look() is False
    answered(listening, answer)
    for _ in range(50):
        assert first.look() is False
    answered(listening, b"HTTP/1.1 200 OK\r\n\r\n")
    assert eventually(first.look, "the answer") is True
    first.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_for_all_is_asked_on_loopback(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as made:
        first = FirstAnswer(made)
        assert first.look() is False
        answered(made, b"HTTP/1.1 200 OK\r\n\r\n")
        assert eventually(first.look, "the answer") is True
        first.close()


def test_a_redis_that_is_gone_is_said_at_the_start_without_its_secrets_and_shown_in_readyz() -> None:
    port = free_tcp_port()
    with temporary_folder() as folder:
        process = subprocess.Popen(
            command(*ENGINE, "--port", "0", "--data-dir", str(folder / "data")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(INFERPLANE_REDIS_URL=f"redis://me:hush@127.0.0.1:{port}/0?socket_keepalive=true"),
        )
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("Gateway:"):
                    break
            with http_client(lines[-1].split()[1].removesuffix("/v1")) as client:
                assert client.get("/healthz").status_code == 200, "the banner comes when the port answers"
                limits = client.get("/readyz").json()["limits"]
        finally:
            process.terminate()
            _, rest = process.communicate(timeout=30)
    warnings = [line for line in lines if "Redis" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"WARNING Redis at 127.0.0.1:{port} does not answer (ConnectionError): ")
    assert "503 limits_unavailable" in warnings[0]
    assert "hush" not in "".join(lines) + rest
    assert limits["answering"] is False
    assert limits["detail"] == "ConnectionError"
    assert "refuse" in limits["policy"]


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock?password=hush", "rediss://:hush@127.0.0.1:1/0"])
def test_the_warning_names_the_place_and_no_secret(url: str) -> None:
    told = redis_warning(load_settings({"redis_url": url}))
    assert told is not None
    assert "hush" not in told
    assert ("/nowhere/redis.sock " if url.startswith("unix") else "at 127.0.0.1:1 ") in told


def test_a_redis_that_answers_is_nothing_to_talk_about(redis_url: str) -> None:
    assert redis_warning(load_settings({"redis_url": redis_url})) is None
    assert redis_warning(load_settings({})) is None
    with pytest.raises(ConfigError, match="INFERPLANE_REDIS_URL cannot be read") as caught:
        redis_warning(load_settings({"redis_url": "http://me:hush@redis"}))
    assert "hush" not in str(caught.value)


def test_json_is_one_line_of_stable_keys_once_the_port_answers() -> None:
    with temporary_folder() as folder:
        process = subprocess.Popen(
            command(*ENGINE, "--port", "0", "--data-dir", str(folder / "data"), "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert set(said) == {"url", "key"}
            with http_client(said["url"]) as client:
                assert client.get("/healthz").status_code == 200
        finally:
            process.terminate()
            process.communicate(timeout=30)
