"""The mark of a clean stop: when a real server leaves one, and when it must not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from controlplane.adapters import clean_stop
from controlplane.adapters.embedded import EmbeddedRedis
from controlplane.errors import ConfigError
from controlplane.store_life import NOT_CLEAN, CleanStop
from tests.services import temporary_folder

MARK = "clean-stop.json"


@pytest.fixture
def folder() -> Iterator[Path]:
    with temporary_folder() as path:
        yield path / "redis"


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedRedis]:
    """Running; stopped at the end whatever the test did."""
    made = EmbeddedRedis(folder)
    made.start()
    yield made
    made.stop()


def client_of(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def test_a_stop_leaves_a_mark_and_the_next_start_tells_of_it_and_takes_it_away(
    folder: Path, server: EmbeddedRedis
) -> None:
    with client_of(server) as client:
        first = client.info("server")["run_id"]
    server.stop()
    assert (folder / MARK).exists()
    server.start()
    assert not (folder / MARK).exists()
    with client_of(server) as client:
        told = client.hgetall(clean_stop.FOLLOWS_KEY)
        assert (told["run"], told["after"], told["doubt"]) == (client.info("server")["run_id"], first, "0")


def test_the_first_server_of_a_folder_is_told_nothing(server: EmbeddedRedis) -> None:
    with client_of(server) as client:
        assert client.exists(clean_stop.FOLLOWS_KEY) == 0


def test_a_second_user_of_the_server_leaves_no_mark(folder: Path, server: EmbeddedRedis) -> None:
    second = EmbeddedRedis(folder)
    second.start()
    second.stop()
    assert server.poll() is None
    assert not (folder / MARK).exists()


def test_a_server_that_was_killed_or_hangs_leaves_no_mark(folder: Path, server: EmbeddedRedis) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        server.start()
        assert server.pid is not None
        os.kill(server.pid, number)
        server.stop(deadline_s=0.2)
        assert server.poll() is not None
        assert not (folder / MARK).exists()
        assert clean_stop.take(folder) == NOT_CLEAN
    server.start()
    with client_of(server) as client:
        told = client.hgetall(clean_stop.FOLLOWS_KEY)
        assert (told["run"], told["after"], told["doubt"]) == (client.info("server")["run_id"], "", "1")
    with server:
        server.stop()
        server.start()
        with client_of(server) as client:
            told = client.hgetall(clean_stop.FOLLOWS_KEY)
            assert told["after"] != ""
            assert told["doubt"] == "1", "a clean stop after it does not remove the doubt"


def test_a_server_whose_file_is_off_leaves_no_mark(folder: Path, server: EmbeddedRedis) -> None:
    with client_of(server) as client:
        client.config_set("appendonly", "no")
        assert clean_stop.prepare(client, 0.05) is None
    server.stop()
    assert not (folder / MARK).exists()


def test_nothing_is_written_between_the_preparation_and_the_end(server: EmbeddedRedis) -> None:
    with client_of(server) as client, redis.Redis.from_url(server.url, socket_timeout=0.3) as late:
        client.set("written", "before")
        assert clean_stop.prepare(client, 1.0) is not None
        with pytest.raises(redis.TimeoutError):
            late.set("written", "after")
        with pytest.raises(redis.TimeoutError):
            late.eval("return redis.call('SET', KEYS[1], 'after')", 1, "written")
        assert client.get("written") == "before"


def test_a_mark_that_cannot_be_read_is_taken_away_and_says_nothing(tmp_path: Path) -> None:
    for text in ("", "[1]", '{"run_id": "a"}', '{"run_id": "a", "stopped_us": "soon"}'):
        (tmp_path / MARK).write_text(text)
        assert clean_stop.take(tmp_path) is None
        assert not (tmp_path / MARK).exists()
    assert clean_stop.take(tmp_path) is None


def test_a_mark_is_read_as_it_was_left(tmp_path: Path) -> None:
    assert clean_stop.leave(tmp_path, CleanStop("a", 7))
    assert clean_stop.take(tmp_path) == CleanStop("a", 7)
    assert clean_stop.take(tmp_path) is None


def test_where_the_disk_refuses_there_is_no_mark(tmp_path: Path) -> None:
    assert not clean_stop.leave(tmp_path / "gone", CleanStop("a", 7))


def test_a_mark_that_cannot_be_taken_away_forbids_the_start(folder: Path, server: EmbeddedRedis) -> None:
    server.stop()
    (folder / MARK).unlink()
    (folder / MARK).mkdir()
    with pytest.raises(ConfigError, match="user can write to"):
        server.start()
    (folder / MARK).rmdir()


def test_nothing_is_told_to_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with redis.Redis.from_url(f"unix://{tmp_path}/none.sock") as client:
        clean_stop.tell(client, CleanStop("a", 7))
        assert clean_stop.prepare(client, 0.1) is None
