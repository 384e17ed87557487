"""The embedded Redis, started for real: its life, its folder, and what it says when it cannot start.

Owns: EmbeddedRedis. Does not own: what is stored in it. The fixtures of `conftest.py` are tested here too, because they
start the same things.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from controlplane.adapters.embedded import EmbeddedRedis
from controlplane.errors import ConfigError
from tests import services


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets must fit."""
    with services.temporary_folder() as path:
        yield path / "redis"


def _client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def _until(condition: object, deadline_s: float = 5.0) -> None:
    assert callable(condition)
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, "the expected state was not reached in time"
        time.sleep(0.01)


@pytest.mark.parametrize("port", [None, 0], ids=["unix socket", "tcp"])
def test_keeps_its_data_over_a_stop_and_over_a_kill(folder: Path, port: int | None) -> None:
    server = EmbeddedRedis(folder, port=port)
    server.start()
    try:
        with _client(server) as client:
            client.set("stopped", "kept")
        server.stop()
        assert server.poll() is not None

        server.start()
        with _client(server) as client:
            assert client.get("stopped") == "kept"
            client.set("killed", "kept")
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        _until(lambda: server.poll() is not None)
        assert server.poll() == -signal.SIGKILL

        server.start()
        with _client(server) as client:
            assert client.mget("stopped", "killed") == ["kept", "kept"]
    finally:
        server.stop()


def test_a_second_start_uses_the_live_server_and_leaves_it_running(folder: Path) -> None:
    with EmbeddedRedis(folder) as first:
        second = EmbeddedRedis(folder)
        second.start()
        assert (second.url, second.pid, second.owned) == (first.url, first.pid, False)
        second.stop()
        assert first.poll() is None
        with _client(first) as client:
            assert client.ping()


def test_takes_over_the_server_of_a_dead_owner(folder: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from controlplane.adapters.embedded import EmbeddedRedis
        server = EmbeddedRedis(Path(sys.argv[1]))
        server.start()
        print(server.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    owner = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    orphan = int(owner.stdout)
    assert psutil.pid_exists(orphan)

    server = EmbeddedRedis(folder)
    server.start()
    assert (server.pid, server.owned) == (orphan, True)
    server.stop()
    _until(lambda: not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE)


def test_a_stale_socket_and_a_stale_owner_record_do_not_hinder_a_start(folder: Path) -> None:
    server = EmbeddedRedis(folder)
    server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    _until(lambda: server.poll() is not None)
    assert (folder / "redis.sock").exists()
    assert (folder / "redis.json").exists()
    with EmbeddedRedis(folder) as fresh:
        assert fresh.owned
        assert fresh.pid != pid


def test_a_folder_with_a_very_long_name_is_reached_through_a_short_link(folder: Path) -> None:
    deep = folder.joinpath(*["a-long-name-of-a-folder" for _ in range(6)])
    with EmbeddedRedis(deep) as server, _client(server) as client:
        assert client.set("a", "b")
        link = Path(server.url.removeprefix("unix://").split("?")[0]).parent
        assert link.is_symlink()
    assert not link.exists()
    assert not link.parent.exists()


def test_only_this_user_can_reach_the_socket(folder: Path) -> None:
    with EmbeddedRedis(folder):
        assert folder.stat().st_mode & 0o077 == 0
        assert (folder / "redis.sock").stat().st_mode & 0o077 == 0
        assert (folder / "redis.json").stat().st_mode & 0o077 == 0


def test_tcp_listens_on_loopback_only_and_wants_the_password_that_no_process_list_shows(folder: Path) -> None:
    with EmbeddedRedis(folder, port=0) as server:
        assert server.pid is not None
        process = psutil.Process(server.pid)
        listening = {connection.laddr.ip for connection in process.net_connections() if connection.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
        password = server.url.split("@")[0].removeprefix("redis://:")
        assert len(password) >= 32
        assert password not in " ".join(process.cmdline())
        with redis.Redis.from_url("redis://" + server.url.split("@")[1]) as stranger:
            with pytest.raises(redis.AuthenticationError):
                stranger.ping()


def test_a_port_in_use_is_one_sentence_that_names_it(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: the embedded Redis cannot bind 127.0.0.1:{port} .* a free port"):
            EmbeddedRedis(folder, port=port).start()


def test_a_live_server_on_another_port_is_named(folder: Path, free_port: int) -> None:
    with EmbeddedRedis(folder, port=0):
        with pytest.raises(ConfigError, match=f"expected port {free_port}"):
            EmbeddedRedis(folder, port=free_port).start()


def test_a_file_in_the_place_of_the_folder_is_one_sentence(folder: Path) -> None:
    folder.write_text("in the way")
    with pytest.raises(ConfigError, match=r"data_dir: .* expected a folder this user can write to"):
        EmbeddedRedis(folder).start()


def test_a_full_disk_is_one_sentence(folder: Path) -> None:
    class FullDisk(EmbeddedRedis):
        def _write_probe(self, probe: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigError, match=r"data_dir: .*No space left on device.* expected free space"):
        FullDisk(folder).start()


def test_a_damaged_append_only_file_is_named_with_the_servers_own_words(folder: Path) -> None:
    with EmbeddedRedis(folder) as server, _client(server) as client:
        for number in range(100):
            client.set(f"key-{number}", "value")
    damaged = next((folder / "appendonlydir").glob("*.incr.aof"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 40] = b"\xff" * 40
    damaged.write_bytes(content)
    server = EmbeddedRedis(folder)
    with pytest.raises(ConfigError, match=r"ended at once with status 1.*Bad file format"):
        server.start()
    assert server.poll() is not None


def test_a_stopped_server_is_told_from_a_dead_one(folder: Path) -> None:
    with EmbeddedRedis(folder) as server:
        assert server.pid is not None
        process = psutil.Process(server.pid)
        process.suspend()
        try:
            with pytest.raises(ConfigError, match=rf"process {process.pid}\) runs but does not answer"):
                EmbeddedRedis(folder).start(deadline_s=0.2)
        finally:
            process.resume()


def test_a_binary_that_never_answers_is_given_up_and_ended(folder: Path, tmp_path: Path) -> None:
    binary = tmp_path / "deaf"
    binary.write_text("#!/bin/sh\nexec sleep 60\n")
    binary.chmod(0o755)
    server = EmbeddedRedis(folder, binary=binary)
    with pytest.raises(ConfigError, match="did not answer in time"):
        server.start(deadline_s=0.3)
    assert server.pid is None


def test_the_redis_fixtures_are_two_different_servers_and_start_empty(redis_url: str, second_redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as valkey, redis.Redis.from_url(second_redis_url) as stock:
        assert valkey.info("server").get("server_name") == "valkey"
        assert stock.info("server").get("server_name") != "valkey"
        assert (valkey.dbsize(), stock.dbsize()) == (0, 0)


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_gets_a_database_of_its_own(postgres_url: str, turn: int) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TABLE only_mine (turn int)")
        version = connection.execute("SHOW server_version_num").fetchone()
        assert version is not None
        assert int(version[0]) >= 150_000
